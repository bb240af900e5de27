"""Tables as text, alike in a terminal, in a file and in a notebook."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def text_console(width: int | None = None, file: IO[str] | None = None, **options: Any) -> Console:
    """Returns a console that writes text; in Jupyter, rich's own would show HTML beside the cell and write nothing to `file`.

    Whether it may move a cursor is what `file` says: kernels set ``FORCE_COLOR``, which rich takes for a terminal.
    """
    is_terminal = (file or sys.stdout).isatty()
    return Console(force_jupyter=False, force_terminal=is_terminal, width=width, file=file, **options)


def text_table(*heads: str, title: str | None = None, left: int = 1) -> Table:
    """Returns a table of numbers but for the `left` first columns; cells are folded, since a number cut short is a wrong one."""
    table = Table(title=title, title_justify="left")
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < left else "right", overflow="fold")
    return table


def text_of(*parts: RenderableType, width: int) -> str:
    """Returns tables and lines as they print on so many columns; lines are not wrapped."""
    file = io.StringIO()
    console = text_console(width, file)
    for part in parts:
        plain = isinstance(part, str)
        console.print(part, markup=not plain, highlight=False if plain else None, soft_wrap=plain)
    return file.getvalue()


@contextmanager
def progress_bar(text: str, total: int, unit: str = "edges") -> Iterator[Callable[[int], None]]:
    """Shows a bar, the rate and the time that remains, where standard error is a terminal; yields what is told of steps."""
    console = text_console(file=sys.stderr)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=total, rate="")

        def told(steps: int) -> None:
            speed = progress.tasks[0].speed
            progress.update(task, advance=steps, rate="" if speed is None else f"{speed:,.0f} {unit}/s")

        yield told


def plain_width(columns: int | None) -> int | None:
    """Returns the width of a console: so many columns where the output is no terminal: rich would take 80."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else columns
