"""Holds code lines, without docstrings, comments and blanks, to the limits in .ci/limits.json, which only go down."""

import ast
import io
import json
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LAYOUT = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER


def code_lines(file: Path) -> int:
    """Returns the lines of a file that have code."""
    text = file.read_text()
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = (range(each.start[0], each.end[0] + 1) for each in tokens if each.type not in _LAYOUT)
    return len({line for each in lines for line in each} - docs)


LIMITS = json.loads((ROOT / ".ci/limits.json").read_text())
"""Numbers that are only lowered; ``language`` is read by .ci/language.py, the others except ``code_lines`` by tests."""

_OUTER = ("extensions", "functional", "strategies", "tools", "__init__.py", "__main__.py")
_OUTER += ("hydra.py", "optuna.py", "ray.py", "testing.py")  # the public modules of tools


def files_of(name: str) -> list[Path]:
    """Returns the files of a folder, or of the package's core."""
    files = (ROOT / ("lightning_gnn" if name == "core" else name)).rglob("*.py")
    return [file for file in files if name != "core" or file.relative_to(ROOT).parts[1] not in _OUTER]


def main() -> None:
    failed = False
    for name, limit in LIMITS["code_lines"].items():
        count = sum(map(code_lines, files_of(name)))
        print(f"{name}: {count:,} code lines of at most {limit:,}")
        failed |= count > limit
    sys.exit(failed)


if __name__ == "__main__":
    main()
