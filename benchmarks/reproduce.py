"""Runs the commands on the benchmark pages that docs/numbers.md links, in their order. The first has the README's figures.

    python benchmarks/reproduce.py --list
    python benchmarks/reproduce.py --only "Real graphs" Kernels
    python benchmarks/reproduce.py --netlab NETLAB.py      emulated links, too: root only
    python benchmarks/reproduce.py --only Kernels --write  the tables, generated from the results

Each command writes a file to the folder ``reproduced``: the command, machine, date, seconds, exit status, output, and its JSON
if it writes one. Commands that succeeded are not run again; failed ones are. ``numbers.json`` has all results, in page order.

``--write`` copies results to ``docs/numbers.json``, and generates each table between ``<!-- COMMAND -->`` and ``<!-- end -->``
from them, with date, machine and load below.

A command with ``[--model sage|gat]`` runs without the option and with each choice. Options alone in the text of a section
(```--large```) are added to the last command above that supports them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INDEX = ROOT / "docs" / "numbers.md"
NUMBERS = INDEX.with_suffix(".json")

_COMMAND = (
    r"^ {4}(?P<command>python benchmarks/.*)$|(?<!`)`(?P<inline>python benchmarks/[^`]*)`|(?<!`)`(?P<options>--[^`]*)`"
)
_MADE = re.compile(r"<!-- (?P<command>python benchmarks/.*?) -->\n.*?<!-- end -->", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command of a benchmark page, and its section."""

    section: str
    text: str

    @property
    def script(self) -> Path:
        return ROOT / self.text.split()[1]

    def knows(self, option: str) -> bool:
        """Returns whether the script names an option, or a benchmark that it imports does."""
        own = self.script.read_text(encoding="utf-8")
        imported = (ROOT / "benchmarks" / f"{name}.py" for name in re.findall(r"^from (\w+) import", own, re.MULTILINE))
        return any(f'"{option}"' in text for text in (own, *(each.read_text() for each in imported if each.exists())))

    @property
    def unknown_options(self) -> list[str]:
        return [word for word in shlex.split(self.text) if word.startswith("--") and not self.knows(word)]

    @property
    def name(self) -> str:
        return f"{self.script.stem}-{hashlib.sha256(self.text.encode()).hexdigest()[:8]}"


def pages() -> list[Path]:
    """Returns the benchmark pages, in the order of their first links in the index."""
    names = re.findall(r"\((?P<name>[\w-]+-benchmarks\.md)[#)]", INDEX.read_text(encoding="utf-8"))
    return [INDEX.parent / name for name in dict.fromkeys(names)]


def sections() -> Iterator[tuple[str, str]]:
    """Yields title and text of each section of the benchmark pages."""
    for page in pages():
        for part in re.split(r"^(?=#{2,} )", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            title, _, text = part.partition("\n")
            yield title.lstrip("# "), text


def variants(text: str) -> list[str]:
    """Returns a command without what stands in brackets, and with each choice of it."""
    choices = []
    for part in re.split(r" (\[--[^]]*\])", text):
        if not part.startswith("[--"):
            choices.append([part])
            continue
        option, _, values = part[1:-1].partition(" ")
        choices.append(["", *(f" {option} {value}".rstrip() for value in values.split("|"))])
    return ["".join(chosen) for chosen in product(*choices)]


def commands() -> list[Command]:
    """Returns all commands of the pages, in their order, each once."""
    found: dict[str, Command] = {}
    for section, text in sections():
        above: list[str] = []
        for match in re.finditer(_COMMAND, text, re.MULTILINE):
            if match["options"] is None:
                these = variants(match["command"] or match["inline"])
                above += these[:1]
            else:
                added = (f"{each} {' '.join(match['options'].split())}" for each in reversed(above))
                these = [next(each for each in added if not Command(section, each).unknown_options)]
            for each in these:
                found.setdefault(each, Command(section, each))
    return [*found.values()]


def machine() -> dict[str, Any]:
    """Returns what ``common.machine`` does, without importing torch for it, and what else is installed of the stack."""
    packages = {
        name.replace("-", "_"): version(name) for name in ("torch", "torch-geometric", "lightning", "lightning-gnn")
    }
    return {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version(), **packages}


def run(command: Command, folder: Path, given: dict[str, str | None], jobs: str | None = None) -> dict[str, Any] | str:
    """Runs a command and returns its record; or what it lacks."""
    words = shlex.split(command.text)
    for place, word in enumerate(words):
        if word in given:
            value = given[word]
            if value is None:
                return f"needs --{word.partition('.')[0].lower()}"
            words[place] = value
        elif given["NETLAB.py"] is not None:  # netlab's own topologies lie beside it
            known = Path(given["NETLAB.py"]).parent / "topologies"
            words[place] = ",".join(str(known / each) if (known / each).is_file() else each for each in word.split(","))
    if command.script.stem == "gpu_acceptance" and shutil.which("nvidia-smi") is None:
        return "needs a GPU"
    result = folder / f"{command.name}.result.json"
    if command.knows("--json") and "--json" not in words:
        words += ["--json", str(result)]
    if jobs is not None and command.knows("--jobs"):
        words += ["--jobs", jobs]
    load = round(os.getloadavg()[0], 1)
    began, date = time.perf_counter(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    record = {**asdict(command), "ran": shlex.join(words), "machine": machine(), "load": load, "date": date}
    record |= {"seconds": round(time.perf_counter() - began, 1), "status": done.returncode, "output": done.stdout}
    if result.exists():
        record["result"] = json.loads(result.read_text())
        result.unlink()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the commands, and which have ended well; run nothing")
    parser.add_argument(
        "--only", nargs="+", metavar="SECTION", help="of these sections, by the beginning of their titles"
    )
    parser.add_argument("--folder", type=Path, default=Path("reproduced"))
    parser.add_argument("--netlab", help="netlab.py, for commands over emulated links")
    parser.add_argument("--jobs", help="runs at a time, for commands that know this option")
    parser.add_argument("--write", action="store_true", help="then generate the tables of commands that succeeded")
    asked = parser.parse_args()
    found = commands()
    if asked.only is not None:
        for title in asked.only:
            if not any(each.section.lower().startswith(title.lower()) for each in found):
                parser.error(
                    f"no section begins with {title!r}: {', '.join(dict.fromkeys(each.section for each in found))}"
                )
        titles = tuple(title.lower() for title in asked.only)
        found = [each for each in found if each.section.lower().startswith(titles)]
    folder: Path = asked.folder.resolve()
    given = {"NETLAB.py": asked.netlab and str(Path(asked.netlab).resolve()), "FOLDER": str(folder)}
    section, failed = "", 0
    for number, command in enumerate(found, 1):
        path = folder / f"{command.name}.json"
        ended = path.exists() and json.loads(path.read_text())["status"] == 0
        if command.section != section:
            section = command.section
            print(f"\n{section}")
        print(f"  [{number} of {len(found)}] {command.text}", end="", flush=True)
        if asked.list or ended:
            print(": done before" if ended else "")
            continue
        folder.mkdir(parents=True, exist_ok=True)
        record = run(command, folder, given, asked.jobs)
        if isinstance(record, str):
            print(f": left out, {record}")
            continue
        path.write_text(json.dumps(record, indent=1) + "\n")
        collect(folder)
        failed += record["status"] != 0
        print(
            f": {record['seconds']} s"
            + (f", failed with status {record['status']}, see {path}" if record["status"] else "")
        )
    if asked.write:
        write(folder)
    sys.exit(failed > 0)


def collect(folder: Path) -> None:
    """Writes numbers.json: the existing records, in the order of the pages."""
    paths = [folder / f"{command.name}.json" for command in commands()]
    records = [json.loads(path.read_text()) for path in paths if path.exists()]
    (folder / "numbers.json").write_text(json.dumps(records, indent=1) + "\n")


def made(page: str, records: dict[str, dict[str, Any]]) -> str:
    """Returns the page with its tables made from records, by their commands; below each, where and when it was measured."""

    def table(match: re.Match[str]) -> str:
        text = match["command"]
        if text not in records:
            raise SystemExit(f"{NUMBERS.name} has nothing of `{text}`. Run it: reproduce.py --only SECTION --write")
        record = records[text]
        heads, *rows = record["result"]["shown"]
        lines, stack = [heads, ["---"] * len(heads), *rows], "{cores} cores, {system}, Python {python}, torch {torch}"
        gpu = record["result"].get("machine", {}).get("gpu")
        stack = f"{gpu}, {stack}" if gpu else stack
        load = "" if record["load"] is None else f", load {record['load']} when it began"
        below = f"*{record['date'][:10]}: {stack.format(**record['machine'])}{load}.*"
        cells = "\n".join(f"| {' | '.join(row)} |" for row in lines).replace("| --- ", "|---").replace("--- |", "---|")
        return f"<!-- {text} -->\n\n{cells}\n\n{below}\n\n<!-- end -->"

    return _MADE.sub(table, page)


def kept() -> dict[str, dict[str, Any]]:
    """Returns what ``docs/numbers.json`` has, by command."""
    return {each["text"]: each for each in json.loads(NUMBERS.read_text())} if NUMBERS.exists() else {}


def write(folder: Path) -> None:
    """Copies the results of the pages' tables to ``docs/numbers.json``, without their output, and generates the tables."""
    texts, records = {page: page.read_text(encoding="utf-8") for page in pages()}, kept()
    shown = [match["command"] for text in texts.values() for match in _MADE.finditer(text)]
    for command in commands():
        path = folder / f"{command.name}.json"
        if command.text in shown and path.exists():
            record = json.loads(path.read_text())
            del record["output"]
            record.get("result", {}).pop("runs", None)  # epoch by epoch
            if record["status"] == 0:
                records[command.text] = record
    for page, text in texts.items():
        page.write_text(made(text, records), encoding="utf-8")
    NUMBERS.write_text(json.dumps([records[text] for text in shown], indent=1) + "\n")


if __name__ == "__main__":
    main()
