"""Checks docs/style.md: counts findings by area and rule, and compares them with .ci/limits.json, which is only lowered.

Words are in .ci/language.json. ``--show [PATH]`` lists findings, ``--lower`` lowers the limits to the present counts.
"""

import ast
import inspect
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter, namedtuple
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
Finding = namedtuple("Finding", "area rule file line text")
FIRST_COMMIT, MAX_SUBJECT = "0ca9359", 72
LISTS = json.loads((ROOT / ".ci/language.json").read_text())
ALLOWED, MAX_WORDS = LISTS["allowed"], LISTS["max_words"]


def any_of(words: Iterable[str], flags: int = re.IGNORECASE) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(words)})\b", flags)


TEXT_RULES = {rule: any_of(words) for rule, words in LISTS["text"].items()}
OPENER, DOCSTRING_OPENER = any_of(LISTS["openers"], 0), any_of(LISTS["docstring openers"], 0)
LOGS = {"rank_zero_info", "rank_zero_warn", "rank_zero_debug", "warn", "warning", "info", "debug", "error"}
SKIPPED = re.compile(r"<!-- python.*?<!-- end -->|<!--.*?-->|^ *(```|~~~).*?^ *\1|(?<=\n\n)(?: {4}[^\n]*\n)+", re.DOTALL | re.M)
BLOCK_START = re.compile(r"\s*(?:[-*] |\d+\. |\||#|$)")
ENTRY = r"\*{0,2}\w[\w, *]*(?: \([^)]*\))?: "
PARTS = re.compile(rf"\n\s*\n|\n(?=\s*- )|^(?:Args|Attributes|Raises|Returns|Yields):\s*\n|\n(?= {{4}}{ENTRY})", re.M)


def check_text(area: str, file: str, line: int, text: str, is_cell: bool = False) -> Iterator[Finding]:
    """Yields the findings in a paragraph, list entry, heading, table cell, docstring part or message."""
    text = re.sub(r":\w+:`[^`]*`|``.+?``|`[^`]*`", "CODE", text)
    text = " ".join(re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("*", "").split())
    for rule, pattern in TEXT_RULES.items():
        found = [match[0] for match in pattern.finditer(text) if match[0].lower() not in ALLOWED]
        yield from (Finding(area, rule, file, line, each) for each in found)
    for part in [text] if is_cell else re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])", text):
        kind, count = "cell" if is_cell else "sentence", len(re.findall(r"\w[\w'.,/-]*", part))
        if count > MAX_WORDS[kind]:
            yield Finding(area, f"long {kind}", file, line, f"{count} words: {part[:60]}")
        if OPENER.match(part) and not part.endswith("?"):
            yield Finding(area, "opener", file, line, part[:60])


def check_page(file: str, text: str) -> Iterator[Finding]:
    """Yields the findings of a page, without code blocks, comments and tables that are made by benchmarks."""
    text = SKIPPED.sub(lambda match: "\n" * match[0].count("\n"), text)
    blocks: list[tuple[int, str]] = []
    for line, content in enumerate(text.splitlines(), 1):
        if blocks and not BLOCK_START.match(content) and blocks[-1][1].strip() and blocks[-1][1][0] not in "|#":
            blocks[-1] = (blocks[-1][0], f"{blocks[-1][1]}\n{content}")
        else:
            blocks.append((line, content))
    for line, block in blocks:
        is_row = block.startswith("|")
        for part in re.split(r"(?<!\\)\|", re.sub(r"`[^`]*`", "CODE", block)) if is_row else [block.lstrip("#-* ")]:
            yield from check_text("docs", file, line, part, is_cell=is_row)


def check_code(file: str, source: str) -> Iterator[Finding]:
    """Yields the findings in docstrings and comments, in messages of errors, warnings and logs, and in names."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from check_text("docstrings", file, token.start[0], re.sub(r"#\s*(?:noqa|type):?.*|^#", "", token.string))
    for node in ast.walk(ast.parse(source)):
        yield from check_name(file, node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from check_docstring(file, node.lineno, node.value.value)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in LOGS or name.endswith(("Error", "Warning", "Exception")):
                for line, text in (found for each in node.args for found in literals(each)):
                    yield from check_text("messages", file, line, text)


def check_docstring(file: str, line: int, text: str) -> Iterator[Finding]:
    """Yields the findings of a docstring, whose paragraphs and entries are checked one by one."""
    if DOCSTRING_OPENER.match(text.strip()):
        yield Finding("docstrings", "docstring opener", file, line, text.strip()[:60])
    for part in filter(None, PARTS.split(inspect.cleandoc(text))):
        yield from check_text("docstrings", file, line, re.sub(rf"^\s*(?:- |{ENTRY})", "", part))


def check_name(file: str, node: ast.AST) -> Iterator[Finding]:
    """Yields names of functions, classes, arguments and attributes that are a participle, an adverb or a pronoun."""
    name, is_function = "", isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        name = node.name
    elif isinstance(node, ast.arg) or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
        name = node.arg if isinstance(node, ast.arg) else node.attr
    for rules in (LISTS["names"], LISTS["function names"] if is_function else {}) if name else ():
        for rule, words in rules.items():
            if re.fullmatch(rf"_*(?:{'|'.join(words)})_*", name.lower()) and name.strip("_") not in ALLOWED:
                yield Finding("names", rule, file, node.lineno, name)  # type: ignore[attr-defined]


def literals(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of string literals; a value in an f-string is one word."""
    if isinstance(node, ast.JoinedStr):
        yield node.lineno, "".join(str(each.value) if isinstance(each, ast.Constant) else "CODE" for each in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    else:
        yield from (found for each in ast.iter_child_nodes(node) for found in literals(each))


def check_subject(commit: str, subject: str) -> Iterator[Finding]:
    """Yields a finding unless a subject is "area: imperative summary" and short."""
    is_verb = subject.partition(": ")[2].split(" ")[0] in ALLOWED or re.fullmatch(LISTS["subjects"], subject)
    if not is_verb or len(subject) > MAX_SUBJECT:
        yield Finding("commits", "subject", commit, 0, subject)


def findings(prefix: str) -> Iterator[Finding]:
    pages = [*sorted(ROOT.glob("docs/*.md")), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG"))]
    for path in [*pages, *sorted(ROOT.glob("lightning_gnn/**/*.py"))]:
        if (name := path.relative_to(ROOT).as_posix()).startswith(prefix):
            yield from (check_page if path.suffix == ".md" else check_code)(name, path.read_text(encoding="utf-8"))
    command = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%h %s", f"{FIRST_COMMIT}..HEAD"]
    log = subprocess.run(command, capture_output=True, text=True).stdout if (ROOT / ".git").exists() else ""
    yield from (found for entry in log.splitlines() for found in check_subject(*entry.split(" ", 1)))


def main() -> None:
    prefix, file = (sys.argv[2:] or [""])[0], ROOT / ".ci/limits.json"
    found = list(findings(prefix))
    if "--show" in sys.argv:
        shown = (f"{file}:{line}: {area}, {rule}: {text}" for area, rule, file, line, text in found)
        return print(*shown, sep="\n")
    counts, limits = Counter((each.area, each.rule) for each in found), json.loads(file.read_text())["language"]
    for area in limits if "--lower" in sys.argv else ():
        limits[area] = {rule: min(limit, counts[area, rule]) for rule, limit in limits[area].items()}
        file.write_text(re.sub(rf'"{area}": \{{[^}}]*\}}', f'"{area}": {json.dumps(limits[area])}', file.read_text()))
    above = [(*key, count) for key, count in sorted(counts.items()) if count > limits.get(key[0], {}).get(key[1], 0)]
    for area, rule, count in above:
        print(f"{area}, {rule}: {count} findings are above the limit. python .ci/language.py --show lists them.")
    print(f"language: {len(found):,} findings, {len(above)} counts above their limits")
    sys.exit(bool(above))


if __name__ == "__main__":
    main()
