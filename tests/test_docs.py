"""Files and names that the README and docs/ speak of exist."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
from processes import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
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
