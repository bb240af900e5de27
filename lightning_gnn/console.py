"""Tables as text for terminals, files and notebooks; progress bars in terminals only."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from math import ceil
from typing import IO, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text
from typing_extensions import override


def text_console(width: int | None = None, file: IO[str] | None = None, **options: Any) -> Console:
    """Returns a console that writes text; in Jupyter, rich's own would show HTML next to the cell and write nothing to `file`.

    The `file` determines whether cursor movements are allowed: kernels set ``FORCE_COLOR``, which rich treats as a terminal.
    """
    is_terminal = (file or sys.stdout).isatty()
    return Console(force_jupyter=False, force_terminal=is_terminal, width=width, file=file, **options)


def text_table(*heads: str, title: str | None = None, num_left: int = 1) -> Table:
    """Returns a table of numbers except for the first `num_left` columns.

    Cells are folded, since truncated numbers would be wrong.
    """
    table = Table(title=title, title_justify="left")
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < num_left else "right", overflow="fold")
    return table


def text_of(*parts: RenderableType, width: int) -> str:
    """Returns tables and lines as printed on `width` columns; lines are not wrapped."""
    file = io.StringIO()
    console = text_console(width, file)
    for part in parts:
        plain = isinstance(part, str)
        console.print(part, markup=not plain, highlight=False if plain else None, soft_wrap=plain)
    return file.getvalue()


REFRESH_S = 0.1
"""Seconds between updates of the bars."""


class _Bars(Progress):
    """The display of this process: one line per running task, below the renderable `above`."""

    above: Callable[[], RenderableType] | None = None

    @override
    def get_renderables(self) -> Iterator[RenderableType]:
        if self.above is not None:
            yield self.above()
        yield self.make_tasks_table(self.tasks)


class _Pace(ProgressColumn):
    """Column with completed steps, rate, elapsed time and remaining time, as far as they are known."""

    @override
    def render(self, task: Task) -> Text:
        unit, at, expected = (task.fields[name] for name in ("unit", "at", "expected"))
        elapsed, done, total, parts = task.elapsed or 0.0, task.completed, task.total, []
        if total is not None:
            parts.append(f"{done:.0f} of {total:.0f}" if total < 1000 else f"{task.percentage:.0f} %")
        if done and at:
            rate = done / at
            parts.append(f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s")
        parts.append(_clock(int(elapsed)))
        if total is not None and done and at:
            parts.append(f"{_clock(max(0.0, (total - done) * at / done - (elapsed - at)))} left")
        elif expected is not None and elapsed < ceil(expected):  # rounded as shown
            parts.append(f"of up to about {_clock(expected)}")
        return Text("  ".join(parts), "progress.data.speed", no_wrap=True)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=ceil(seconds))).removeprefix("0:")


_display: _Bars | None = None


def shows_bars() -> bool:
    """Returns whether bars are shown: on rank 0, at a terminal, in the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return is_main and getattr(rank_zero_only, "rank", 0) == 0 and terminal


@contextmanager
def progress_bar(
    text: str,
    total: int | None = None,
    unit: str = "edges",
    *,
    expected: float | None = None,
    above: Callable[[], RenderableType] | None = None,
) -> Iterator[Callable[[int], None]]:
    """Context manager that shows a progress bar if standard error is a terminal; yields a function to report steps.

    A nested bar is one more line of the same display. Output, warnings and logs appear above it.

    Args:
        text: description of the task.
        total: number of steps; None if unknown, for example for one library call: then only the elapsed time is shown.
        unit: unit of steps, in the plural.
        expected: predicted seconds, shown until steps are reported.
        above: function that returns a renderable above the bars, such as a table; used for the outermost bar.
    """
    if not shows_bars():
        yield lambda steps: None
        return
    with nullcontext(_display) if _display is not None else _show_bars(above) as display:
        began = time.perf_counter()
        task = display.add_task(text, total=total, unit=unit, at=0.0, expected=expected)

        def advance_task(steps: int) -> None:
            display.update(task, advance=steps, at=time.perf_counter() - began)

        try:
            yield advance_task
        finally:
            display.remove_task(task)


@contextmanager
def _show_bars(above: Callable[[], RenderableType] | None) -> Iterator[_Bars]:
    global _display
    console = text_console(file=sys.stderr)
    # The cursor stays visible: a killed process, for example out of memory, could not show it again.
    console.show_cursor = lambda show=True: False  # type: ignore[method-assign]
    columns = TextColumn("{task.description}", markup=False), BarColumn(20), _Pace()
    # Standard output is not redirected if it is a file.
    options: dict[str, Any] = {"transient": True, "auto_refresh": False, "redirect_stdout": sys.stdout.isatty()}
    display = _display = _Bars(*columns, console=console, **options)
    display.above = above
    before, done = sys.stderr, threading.Event()

    def refresh() -> None:
        while not done.wait(REFRESH_S):
            display.refresh()

    # Replaces rich's own thread, which is not joined.
    thread = threading.Thread(target=refresh, name="progress_bar", daemon=True)
    try:
        with display, _logging_to(before, sys.stderr):
            thread.start()
            try:
                yield display
            finally:
                done.set()
                thread.join()
    finally:
        _display = None


@contextmanager
def _logging_to(before: Any, file: Any) -> Iterator[None]:
    """Context manager that redirects handlers of `before` to `file`; a handler does not follow a replaced ``sys.stderr``."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {
        handler
        for logger in loggers
        for handler in getattr(logger, "handlers", ())
        if isinstance(handler, logging.StreamHandler) and handler.stream in (before, sys.__stderr__)
    }
    streams = [(handler, handler.setStream(file)) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in streams:
            handler.setStream(stream)


def is_live() -> bool:
    """Returns whether a bar of this thread is shown."""
    return _display is not None and shows_bars()


@contextmanager
def handed_over() -> Iterator[None]:
    """Context manager that releases the terminal to another process, which may show its own bars."""
    if _display is None or not shows_bars():
        yield
        return
    display, tasks = _display, _display.task_ids

    def show(visible: bool) -> None:
        for task in tasks:
            display.update(task, visible=visible)

    # Hide the tasks first: rich would overwrite lines of the other process.
    show(False)
    display.stop()
    try:
        yield
    finally:
        show(True)
        display.start()


def plain_width(columns: int | None) -> int | None:
    """Returns the width of a console: `columns` if the output is not a terminal, where rich would use 80."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else columns
