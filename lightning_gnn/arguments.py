"""Checks of arguments: errors name the argument, the expectation, and the value."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeAlias

import torch


def quote(value: Any, max_length: int = 80) -> str:
    """Returns a value as text of limited length, for messages."""
    text = repr(value[:20] if isinstance(value, Sequence) else value)
    return text if len(text) <= max_length else f"{text[:max_length]}..."


def check_whole(minimum: int | None = None, /, **arguments: Any) -> None:
    """Raises ValueError for the first argument that is not an integer, or below `minimum`."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{name} must be an integer (got {quote(value)}).")
        if minimum is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum} (got {value}).")


def check_numbers(**arguments: Any) -> None:
    """Raises ValueError for the first argument that is not a finite number."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number (got {quote(value)}).")


def checked_bytes(name: str, size: Any, minimum: int = 1) -> int:
    """Returns a number of bytes, from a number or a text with a decimal unit, such as ``"4GB"`` or ``"512 MB"``."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?B?)", size.upper()) if isinstance(size, str) else None
    if found is not None and found[2] in units:
        size = round(float(found[1]) * units[found[2]])
    if isinstance(size, bool) or not isinstance(size, Integral) or size < minimum:
        raise ValueError(f'{name} must be a number of bytes, such as 4_000_000_000 or "4GB" (got {quote(size)}).')
    return int(size)


def checked_dtype(name: str, dtype: Any) -> torch.dtype:
    """Returns a floating-point dtype, from a dtype or its name."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f'{name} must be a floating-point dtype of torch, such as "float32" (got {quote(dtype)}).')
    return found


def check_seed(seed: Any) -> None:
    """Raises ValueError unless `seed` is an integer from 0 to 2^63 - 1."""
    check_whole(seed=seed)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an integer from 0 to 2^63 - 1 (got {quote(seed)}).")


def check_flags(**arguments: Any) -> None:
    """Raises ValueError for the first argument that is not a bool."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False (got {quote(value)}).")


def check_words(**arguments: Any) -> None:
    """Raises ValueError for the first argument that is not a non-empty string."""
    for name, value in arguments.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} must be a non-empty string (got {quote(value)}).")


def is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    """Returns whether a value is among the `choices`; values of any type are allowed, such as a list or an array."""
    return (value is None or isinstance(value, str)) and value in choices


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError if a value is not among the `choices`."""
    if value is None or not is_one_of(value, choices):
        *others, last = map(repr, choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last} (got {quote(value)}).")


def check_fanout(fanout: int, minimum: int = 1) -> None:
    """Raises ValueError for a fan-out that is neither -1 nor at least `minimum`."""
    if fanout != -1 and fanout < minimum:
        raise ValueError(f"A fan-out must be at least {minimum}, or -1 for all edges (got {fanout}).")


Fanouts: TypeAlias = list[int] | dict[tuple[str, str, str], list[int]]
"""In-edges sampled per node and hop, for all edge types or by edge type; 0 excludes an edge type from a hop."""


def checked_batches(num_neighbors: Any, batch_size: int | None) -> Fanouts | None:
    """Returns :func:`checked_fanouts`, None without `num_neighbors`; raises ValueError for a batch size below 1."""
    if batch_size is not None:
        check_whole(batch_size=batch_size)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 (got {batch_size}).")
    return None if num_neighbors is None else checked_fanouts(num_neighbors)


def checked_fanouts(num_neighbors: Any) -> Fanouts:
    """Returns fan-outs; edge types may be written as ``"author__writes__paper"``."""
    if not isinstance(num_neighbors, (Mapping, Sequence)) or isinstance(num_neighbors, str):
        raise ValueError(
            f"num_neighbors must be a list of integers, one per layer, such as [15, 10] (got {quote(num_neighbors)})."
        )
    typed, found = isinstance(num_neighbors, Mapping), dict[Any, list[int]]()
    for kind, each in num_neighbors.items() if isinstance(num_neighbors, Mapping) else [(None, num_neighbors)]:
        key = tuple(kind.split("__")) if isinstance(kind, str) else kind
        is_list = isinstance(each, Sequence) and not isinstance(each, str)
        if typed and not (isinstance(key, tuple) and len(key) == 3 and is_list):
            by_type = "map edge types to lists, such as {('author', 'writes', 'paper'): [15, 10]}"
            raise ValueError(f"num_neighbors must {by_type} (got {quote(kind)}: {quote(each)}).")
        found[key] = list(each)
    if not found or not all(found.values()):
        raise ValueError(f"num_neighbors must have one number per layer of the model, such as [15, 10] (got {num_neighbors}).")
    if len({len(each) for each in found.values()}) != 1:
        raise ValueError(f"num_neighbors must have the same number of hops for all edge types (got {num_neighbors}).")
    for each in found.values():
        for fanout in each:
            check_whole(num_neighbors=fanout)
            check_fanout(fanout, 0 if typed else 1)
    return found if typed else found[None]
