"""A comparison as a table, while it runs and at its end; the HTML report has the same columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lightning_gnn.console import text_table

Cell = Mapping[str, Any]
"""As the JSON has it, see docs/compare.md."""

MARKS = {"exact": "", "approximate": "approx. ", "random": "dropout "}


class Column(NamedTuple):
    """What a column shows of a cell that has finished: `title` is the report's, `head` that of a terminal."""

    title: str
    head: str
    text: Callable[[Cell], str]


def columns(cells: Sequence[Cell], loss: str = "loss") -> list[Column]:
    """Returns the columns of a table of these cells; `loss` is the logged value whose curves are compared."""
    accuracy = accuracy_name(cells) or "test"

    def of_partition(cell: Cell, name: str) -> str:
        value = (cell["partition"] or {}).get(name)
        return f"{value:.1%}" if value is not None and name == "cut_fraction" else number(value)

    def peak(cell: Cell) -> str:
        return number(max(cell["memory_cuda_bytes"] or cell["memory_bytes"]) / 1e6)

    made: list[tuple[str, str, Callable[[Cell], str]]] = [
        ("cell", "cell", lambda cell: cell["name"]),
        (f"parity, of {loss}", "parity", lambda cell: parity_text(cell["parity"])),
        (accuracy, accuracy, lambda cell: number(cell["test"].get(accuracy), 4)),
        (loss, "loss", lambda cell: number(cell["final_loss"], 4)),
        ("weights off by", "", lambda cell: number(cell["parity"]["weights"])),
        ("s per epoch", "epoch, s", lambda cell: number(cell["epoch_seconds"])),
        ("compute, s", "compute", lambda cell: number(cell["seconds"]["compute"])),
        ("communication, s", "commun.", lambda cell: number(cell["seconds"]["communication"])),
        ("waiting, s", "waiting", lambda cell: number(cell["seconds"]["waiting"])),
        ("rows, MB", "rows, MB", lambda cell: number(cell["row_bytes"] / 1e6)),
        ("gradients, MB", "grads, MB", lambda cell: number(cell["gradient_bytes"] / 1e6)),
        ("messages", "messages", lambda cell: number(cell["messages"])),
        ("edges cut", "cut", lambda cell: of_partition(cell, "cut_fraction")),
        ("replication", "replic.", lambda cell: of_partition(cell, "replication")),
        ("edges, max / mean", "edges max/mean", lambda cell: of_partition(cell, "edge_balance")),
        ("peak MB per rank", "peak MB", peak),
        ("set-up, s", "set-up, s", lambda cell: number(cell["setup_seconds"])),
    ]
    return [Column(*each) for each in made]


SPARED = (
    "set-up, s",
    "edges max/mean",
    "replic.",
    "cut",
    "grads, MB",
    "messages",
    "waiting",
    "commun.",
    "compute",
    "peak MB",
    "rows, MB",
)
"""Columns that a narrow terminal does without, the first ones first."""


@dataclass
class ComparisonTable:
    """A row per cell; of those that have not finished, their state. As many columns as fit, and a line that names the others."""

    cells: Sequence[Cell]
    title: str

    def __post_init__(self) -> None:
        self._of_width: dict[int, tuple[int, bool]] = {}  # since bars draw it again ten times a second, while cells are timed

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width not in self._of_width:
            self._of_width[options.max_width] = self._spared(console, options)
        spared, fits = self._of_width[options.max_width]
        yield self._table(spared, folded=not fits)
        if spared:
            left_out = [column.head for column in columns(self.cells) if column.head in SPARED[:spared]]
            yield Text(f"In a wider terminal, and in the report: {'; '.join(left_out)}.")

    def _spared(self, console: Console, options: ConsoleOptions) -> tuple[int, bool]:
        """Returns how many columns there is no room for, and whether the others fit."""
        for spared in range(len(SPARED) + 1):
            if self._needs(console, options, spared) <= options.max_width:
                return spared, True
        return len(SPARED), False

    def _needs(self, console: Console, options: ConsoleOptions, spared: int) -> int:
        """Returns the width from which only names of cells are folded, after 24 letters."""
        table = self._table(spared)
        table.columns[0].max_width = 24
        return console.measure(table, options=options.update(max_width=10_000)).maximum

    def _table(self, spared: int, folded: bool = True) -> Table:
        shown = [column for column in columns(self.cells) if column.head and column.head not in SPARED[:spared]]
        table = text_table(*(column.head for column in shown), title=self.title, left=2)
        for column in table.columns[1:]:
            column.no_wrap = not folded
        for cell in self.cells:
            done = cell["status"] == "finished"
            table.add_row(*(escape(column.text(cell)) for column in (shown if done else shown[:1])), *[cell["status"]][done:])
        return table


def accuracy_name(cells: Sequence[Cell]) -> str | None:
    """Returns the first test metric that is no loss; None if nothing was tested."""
    tested = (name for cell in cells if cell["status"] == "finished" for name in cell["test"])
    return next((name for name in tested if "loss" not in name), None)


def parity_text(found: Mapping[str, Any]) -> str:
    """Returns a cell's parity in a word or two."""
    kind, ok = found["kind"], found["ok"]
    if kind == "reference":
        return "reference"
    if found["loss"] is None:
        return "unknown"
    return MARKS[kind] + ("" if ok is None else "ok " if ok else "differs ") + f"{found['loss']:.1e}"


def number(value: float | None, digits: int = 3) -> str:
    if value is None or math.isnan(value):
        return "-" if value is None else "nan"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
