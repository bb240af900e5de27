"""Checks of arguments: an error names the argument, what it may be, and what it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import NoneType
from typing import Any, TypeAlias


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
    """Returns whether a value is a known one; any value may be given, a list or an array, too."""
    return (value is None or isinstance(value, str)) and value in known


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """Raises ValueError for a value that is none of the known ones."""
    if value is None or not is_one_of(value, known):
        *others, last = map(repr, known)
        raise ValueError(f"{name} must be {', '.join(others)} or {last} (got {shown(value)}).")


def check_fanout(fanout: int, minimum: int = 1) -> None:
    """Raises ValueError for a fan-out that is neither -1 nor at least `minimum`."""
    if fanout != -1 and fanout < minimum:
        raise ValueError(f"A fan-out is a number of edges from {minimum} on, or -1 for all (got {fanout}).")


EdgeType: TypeAlias = tuple[str, str, str]
Fanouts: TypeAlias = list[int] | dict[EdgeType, list[int]]
"""In-edges drawn of each node, per hop: the same of all edge types, or by edge type."""


def checked_batches(
    fanouts: Sequence[int] | Mapping[Any, Sequence[int]] | None, batch_size: int | None
) -> Fanouts | None:
    """Returns fan-outs; None is for what is not given.

    Args:
        fanouts: one per hop; by edge type, which may be written ``"author__writes__paper"``, also 0.
        batch_size: at least 1.

    Raises:
        ValueError: fan-outs that are none, not as many for all edge types; a batch size below 1.
    """
    if batch_size is not None:
        check_whole(batch_size=batch_size)
    if not isinstance(fanouts, (Mapping, Sequence, NoneType)) or isinstance(fanouts, str):
        raise ValueError(
            f"fanouts must be a list of numbers of edges, one per layer, such as [15, 10] (got {shown(fanouts)})."
        )
    if fanouts is not None and not fanouts:
        raise ValueError("fanouts are numbers of edges, one per layer of the model, such as [15, 10] (got none).")
    typed = isinstance(fanouts, Mapping)
    found: dict[Any, list[int]] = {None: [] if fanouts is None else list(fanouts)}
    if isinstance(fanouts, Mapping):
        found = {}
        for kind, each in fanouts.items():
            key = tuple(kind.split("__")) if isinstance(kind, str) else kind
            if not isinstance(key, tuple) or len(key) != 3 or not isinstance(each, Sequence) or isinstance(each, str):
                raise ValueError(
                    "fanouts by edge type must be lists by three names, such as {('author', 'writes', 'paper'): [15, 10]} (got "
                    f"{shown(kind)}: {shown(each)})."
                )
            found[key] = list(each)
    if len({len(each) for each in found.values()}) != 1 or (typed and not all(found.values())):
        raise ValueError(f"All edge types have fan-outs for equally many hops, at least one (got {fanouts}).")
    for each in found.values():
        for fanout in each:
            check_whole(fanouts=fanout)
            check_fanout(fanout, 0 if typed else 1)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is a number of seeds, at least 1 (got {batch_size}).")
    return None if fanouts is None else found if typed else found[None]


def fanouts_by_type(
    fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]], kinds: list[EdgeType], hetero: bool
) -> dict[EdgeType, list[int]]:
    """Returns the fan-outs of each edge type, per hop.

    Args:
        fanouts: by edge type, 0 leaves it out of a hop; or the same for all.
        kinds: the edge types of the graph.
        hetero: it has types.

    Raises:
        ValueError: no fan-outs, numbers that are none, other edge types, or not as many hops for all of them.
    """
    if isinstance(fanouts, Mapping):
        by_type, minimum = {kind: list(each) for kind, each in fanouts.items()}, 0 if hetero else 1
    else:
        by_type, minimum = {kind: list(fanouts) for kind in kinds}, 1
    if set(by_type) != set(kinds):
        raise ValueError(f"Fan-outs are given for {sorted(by_type)}, but the edge types are {sorted(kinds)}.")
    if len({len(each) for each in by_type.values()}) != 1 or not by_type[kinds[0]]:
        raise ValueError(f"All edge types have fan-outs for equally many hops, at least one (got {fanouts}).")
    for each in by_type.values():
        for fanout in each:
            check_fanout(fanout, minimum)
    return {kind: by_type[kind] for kind in kinds}
