"""Tables as text, alike in a terminal, in a file and in a notebook."""

from __future__ import annotations

import io
import os
import sys
from typing import IO, Any

from rich.console import Console, RenderableType


def text_console(width: int | None = None, file: IO[str] | None = None, **options: Any) -> Console:
    """Returns a console that writes text; in Jupyter, rich's own would show HTML beside the cell and write nothing to `file`.

    Args:
        width: in columns; None for that of the terminal.
        file: where to; None for stdout.
        **options: see ``rich.console.Console``.
    """
    return Console(force_jupyter=False, width=width, file=file, **options)


def text_of(*parts: RenderableType, width: int) -> str:
    """Returns tables and lines as they print on so many columns; lines are not wrapped."""
    file = io.StringIO()
    console = text_console(width, file)
    for part in parts:
        plain = isinstance(part, str)
        console.print(part, markup=not plain, highlight=False if plain else None, soft_wrap=plain)
    return file.getvalue()


def plain_width(columns: int) -> int | None:
    """Returns the width of a console: so many columns where nobody watches and rich would take 80 and cut tables short."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else columns
