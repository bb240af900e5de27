"""What users give, checked at the door: an error names the argument, what it may be, and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


def shown(value: Any, most: int = 80) -> str:
    """Returns a value as a message can have it: cut to a length."""
    text = repr(value[:20] if isinstance(value, Sequence) else value)
    return text if len(text) <= most else f"{text[:most]}..."


def check_whole(**arguments: Any) -> None:
    """Raises ValueError for the first argument that is no whole number."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{name} must be a whole number (got {shown(value)}).")


def check_numbers(**arguments: Any) -> None:
    """Raises ValueError for the first argument that is no finite number."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{name} must be a number (got {shown(value)}).")


def check_seed(seed: Any) -> None:
    """Raises ValueError for what is no seed: a whole number of at least 0, in 63 bits."""
    check_whole(seed=seed)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1 (got {shown(seed)}).")


def check_flags(**arguments: Any) -> None:
    """Raises ValueError for the first argument that is neither True nor False."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False (got {shown(value)}).")


def check_words(**arguments: Any) -> None:
    """Raises ValueError for the first argument that is no text, or an empty one."""
    for name, value in arguments.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} must be a word (got {shown(value)}).")


def is_one_of(value: Any, known: Sequence[Any]) -> bool:
    """Returns whether a value is a known one; any value may be asked for, a list or an array, too."""
    return (value is None or isinstance(value, str)) and value in known


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Raises ValueError for a value that is none of the known ones."""
    if value is None or not is_one_of(value, known):
        *others, last = map(repr, known)
        raise ValueError(f"{name} must be {', '.join(others)} or {last} (got {shown(value)}).")
