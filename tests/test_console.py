"""Reports are strings wherever they are made: in Jupyter, rich would write nothing."""

from __future__ import annotations

import builtins
import io
import re
from pathlib import Path

import pytest
from common import CLASSES, awkward_graph, build
from rich.console import Console
from rich.table import Table

import lightning_gnn
from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, check_parity
from lightning_gnn.console import progress_bar, text_console, text_of
from lightning_gnn.strategy.run_config import partition_report


@pytest.fixture(params=[False, True], ids=["terminal", "jupyter"])
def place(request, monkeypatch):
    """As if the test ran in a notebook's kernel; or not."""
    if request.param:
        shell = type("ZMQInteractiveShell", (), {})()
        monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
        assert Console().is_jupyter
        lost = io.StringIO()
        Console(file=lost).print("a line")
        assert not lost.getvalue()  # what rich does there, and we must not


def test_tables_are_text(place, capsys):
    table = Table("a head")
    table.add_row("a cell")
    assert "a cell" in text_of(table, "[a line]", width=40) and "[a line]" in text_of(table, "[a line]", width=40)
    text_console(40).print(table)
    assert "a cell" in capsys.readouterr().out


def test_a_cell_gets_no_bars(place, monkeypatch, capsys):
    """Kernels force colours, and so do the processes that they start; a cursor that moves leaves its codes in the page."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("Sorting", total=2) as told:
        told(2)
    text_console(40).print("[bold]a line")
    assert capsys.readouterr() == ("a line\n", "")


def test_a_parity_report_is_a_string(place):
    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    report = str(check_parity(module, GraphDataModule(awkward_graph()), ["dgcl"]))
    assert "dgcl" in report and "Compared: " in report


def test_the_report_of_a_partition_has_its_table(place):
    data = GraphDataModule(awkward_graph())
    data.prepare_for(DGCLStrategy().scheme.layout(2))
    files = partition_report(data.stored_cut().shard(0), with_picture=False)
    assert "halo" in files["partition.txt"]


def test_one_place_makes_consoles():
    package = Path(lightning_gnn.__file__).parent
    made = [path.name for path in package.rglob("*.py") if re.search(r"(?<![\w_])Console\(", path.read_text())]
    assert made == ["console.py"]
