"""Files and names that the README and docs/ speak of exist; tutorials are notebooks, and run."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shutil
from pathlib import Path
from pkgutil import resolve_name

import pytest
from processes import REPOSITORY, run

from benchmarks import reproduce

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
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


def test_the_map_has_each_folder():
    """Of the core in the order of the import contract, and each extension and scheme."""
    layers = re.search(r"^layers = \[(.*?)\]", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    package = REPOSITORY / "lightning_gnn"
    folders = [name for name in re.findall(r"\w+", layers[1]) if (package / name).is_dir()]
    text = (REPOSITORY / "docs" / "how-it-works.md").read_text()
    places = text[text.index("## Where things are") : text.index("## Sources")]
    core = re.findall(r"^\| `(\w+)/`", places[places.index("**The core**") :], re.MULTILINE)
    assert core == folders[folders.index("strategy") :]
    for folder in ("extensions", "strategies"):
        for each in (package / folder).glob("*/__init__.py"):
            assert f"`{each.parent.name}/`" in places or f"/{each.parent.name}/`" in places, each


def test_each_table_has_a_command():
    """Of each section of the numbers, and the scripts know the commands' options."""
    commands = reproduce.commands()
    for title, text in reproduce.sections():
        assert "\n|---" not in text or any(each.section == title for each in commands), title
    assert not {each.text: each.unknown_options for each in commands if each.unknown_options}


def test_commands_of_the_numbers():
    assert reproduce.variants("python a.py --x 1 [--model sage|gat] [--large]") == [
        f"python a.py --x 1{model}{large}" for model in ("", " --model sage", " --model gat") for large in ("", " --large")
    ]
    blocks = [each for page in reproduce.pages() for each in re.findall(r"^    (python .*)", page.read_text(), re.MULTILINE)]
    assert {reproduce.variants(each)[0] for each in blocks} <= {each.text for each in reproduce.commands()}


def test_tables_are_those_of_the_numbers():
    """Each table is what numbers.json gives: below it stand the day and the machine."""
    for path in reproduce.pages():
        page = path.read_text()
        assert reproduce.made(page, reproduce.kept()) == page, "python benchmarks/reproduce.py --list --write"
        ends = re.findall(r"^\|.*\n\n?(?!\|)(.*)", page, re.MULTILINE)
        assert ends and not [end for end in ends if not re.match(r"\*\d{4}-\d\d-\d\d: ", end)], path


def test_every_benchmark_page_is_in_the_index():
    """The index links all benchmark pages, and each has a summary on its first screen."""
    assert {page.name for page in reproduce.pages()} == {page.name for page in reproduce.INDEX.parent.glob("*-benchmarks.md")}
    for page in reproduce.pages():
        before = page.read_text().partition("\n## ")[0]
        assert before.count("\n") < 25 and ("|---|" in before or "\n- **" in before), page


def test_the_reference_is_that_of_the_code():
    """Options, support matrix and index of the API; and each public name has a page."""
    reference = runpy.run_path(str(REPOSITORY / "docs" / "reference.py"))
    for name in reference["PAGES"]:
        page = (REPOSITORY / "docs" / name).read_text()
        assert reference["updated"](page) == page, "python docs/reference.py --write"
    for page in reference["public_pages"]().values():
        assert exists(re.search(r"^::: (.*)", page, re.MULTILINE)[1])
    linked = re.findall(r"\(api/(\w+)\.md\)", reference["with_links_to_pages"]((REPOSITORY / "docs" / "api.md").read_text()))
    assert sorted(f"api/{name}.md" for name in linked) == sorted(reference["public_pages"]())


TINY = """
import sys, json, pathlib
pathlib.Path("runs").open("a").write("x")
print("a table")
found = {"rows": sys.argv[1:-2], "shown": [["a", "b"], ["1", "2"]]}
pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(found))
sys.exit(pathlib.Path("fails").exists())
"""


def test_reproducing_goes_on_where_it_was(tmp_path):
    """What has ended well is not run again, what has failed is; other sections are left alone."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "docs").mkdir()
    shutil.copy(reproduce.__file__, tmp_path / "benchmarks")
    (tmp_path / "benchmarks" / "tiny.py").write_text(TINY)
    page = "# Tiny\n\n## First\n\n    python benchmarks/tiny.py 1\n\n## Second\n\n    python benchmarks/tiny.py NETLAB.py\n"
    (tmp_path / "docs" / "numbers.md").write_text("[Tiny](tiny-benchmarks.md#first)\n")
    (tmp_path / "docs" / "tiny-benchmarks.md").write_text(page)
    found, fails = tmp_path / "reproduced" / "numbers.json", tmp_path / "fails"
    fails.touch()
    assert run(tmp_path / "benchmarks" / "reproduce.py", "--only", "first", cwd=tmp_path).code == 1
    assert [each["status"] for each in json.loads(found.read_text())] == [1]
    fails.unlink()
    for _ in range(2):
        assert "needs --netlab" in run(tmp_path / "benchmarks" / "reproduce.py", cwd=tmp_path).succeeded().output
    [record] = json.loads(found.read_text())
    assert (tmp_path / "runs").read_text() == "xx"
    # The table that it makes of the page's marks, and what it was before.
    marks = "<!-- python benchmarks/tiny.py 1 -->\n{}\n<!-- end -->\n"
    page = tmp_path / "docs" / "tiny-benchmarks.md"
    page.write_text(page.read_text() + marks.format("| a | b |\n|---|---|\n| 3 | 4 |"))
    run(tmp_path / "benchmarks" / "reproduce.py", "--list", "--write", cwd=tmp_path).succeeded()
    assert "| a | b |\n|---|---|\n| 1 | 2 |\n\n*20" in page.read_text() and "| 3 | 4 |" not in page.read_text()
    [kept] = json.loads((tmp_path / "docs" / "numbers.json").read_text())
    assert kept["date"] == record["date"] and "output" not in kept
    assert record["output"] == "a table\n" and record["result"]["rows"] == ["1"] and record["machine"]["torch"]


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
                absent += [f"{part.module}:{each.name}" for each in part.names if not exists(f"{part.module}:{each.name}")]
    assert not absent


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.stem)
def test_a_tutorial_runs(tutorial: Path):
    runpy.run_path(str(REPOSITORY / "docs" / "notebooks.py"))["executed"](tutorial)
