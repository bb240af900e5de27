"""How commands print predicted memory."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from lightning_gnn.checks.footprint import PHASES, Peak


def memory_table(title: str, first: str, rows: Sequence[tuple[str, Peak, Peak]]) -> Table:
    """Returns a row per name: the peak of each phase in MB, and the largest with ``recompute=True``."""
    table = Table(first, *PHASES, "with recompute", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, peak, recomputed in rows:
        table.add_row(name, *(_megabytes(getattr(peak, phase)) for phase in PHASES), _megabytes(recomputed.most))
    table.caption = "Of tensors, in MB; python and libraries come on top (docs/memory.md)."
    return table


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.3g}" if count < 1e9 else f"{count / 1e6:,.0f}"
