"""Runs notebooks, and writes each as a page: python docs/notebooks.py FOLDER docs/tutorials/NAME.py ...

They lie in git as scripts, cells between lines of ``# %%`` (jupytext's percent format). Each runs in an empty
folder, with an empty store.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from nbformat import NotebookNode


def executed(source: Path, seconds: int = 300) -> NotebookNode:
    """Returns the notebook with what its cells gave. Raises CellExecutionError with the traceback of the first that failed."""
    notebook = jupytext.read(source)
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "LIGHTNING_GNN_STORE": f"{folder}/store", "COLUMNS": "200"}
        env["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm's, where ipywidgets is not installed
        where = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=seconds, kernel_name="python3", resources=where).execute(env=env)
    for cell in notebook.cells:
        merged: list[NotebookNode] = []
        for output in cell.get("outputs", []):
            if merged and "text" in output and output.get("name") == merged[-1].get("name"):
                merged[-1].text += output.text
            else:
                merged.append(output)
        for output in merged:
            if "text" in output:
                output.text = as_on_a_screen(output.text)
        if merged:
            cell.outputs = merged
    return notebook


def as_on_a_screen(text: str) -> str:
    """Returns what a terminal would show in the end: without colours, and without lines that were cleared."""
    text = re.sub(r"\x1b\[[0-9;?]*[^0-9;?AK]|\r", "", text)
    return re.sub(r"[^\n]*\n\x1b\[1A|[^\n]*\x1b\[2K", "", text)


def write_page(source: Path, folder: Path) -> None:
    """Writes NAME.md, and pictures beside it."""
    text, resources = MarkdownExporter().from_notebook_node(
        executed(source), {"unique_key": source.stem, "output_files_dir": "."}
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in resources["outputs"].items():
        (folder / name).write_bytes(content)
    (folder / f"{source.stem}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[2:]:
        write_page(Path(each), Path(sys.argv[1]))
