"""Files and names that the README and docs/ speak of exist; tutorials are notebooks, and run."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from pkgutil import resolve_name

import pytest
from processes import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
TUTORIALS = sorted((REPOSITORY / "docs" / "tutorials").glob("*.py"))
FOLDERS = ("", "lightning_gnn", "docs", "benchmarks", "tests", "examples")


def exists(name: str) -> bool:
    """Returns whether a dotted name is a module, or an attribute of one."""
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path):
    text = page.read_text()
    files = re.findall(r"`((?:[a-z_]+/)+[A-Za-z_]+\.(?:py|md|yaml|json)|[a-z_]+\.py)`", text)
    absent = {file for file in files if not any((REPOSITORY / folder / file).exists() for folder in FOLDERS)}
    absent |= {name for name in re.findall(r"\blightning_gnn(?:\.[A-Za-z_]\w*)+", text) if not exists(name)}
    assert not absent


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.stem)
def test_a_tutorial_is_a_notebook(tutorial: Path):
    """Its cells are Python, what they import is there, and so are the pages that it links to."""
    import jupytext
    import nbformat

    notebook = jupytext.read(tutorial)
    nbformat.validate(notebook)
    first, *others = notebook.cells
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    assert f"(tutorials/{tutorial.name})" in (REPOSITORY / "docs" / "tutorials.md").read_text()
    absent = []
    for cell in [first, *others]:
        if cell.cell_type == "markdown":
            links = re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", cell.source)
            absent += [link for link in links if not (tutorial.parent / link).exists()]
            continue
        for part in ast.walk(ast.parse(re.sub(r"^!.*", "", cell.source, flags=re.MULTILINE))):
            if isinstance(part, ast.ImportFrom):
                absent += [
                    f"{part.module}:{each.name}" for each in part.names if not exists(f"{part.module}:{each.name}")
                ]
    assert not absent


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.stem)
def test_a_tutorial_runs(tutorial: Path):
    runpy.run_path(str(REPOSITORY / "docs" / "notebooks.py"))["executed"](tutorial)
