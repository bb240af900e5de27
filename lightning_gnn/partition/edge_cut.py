"""Edge cuts: who owns which node, so that the slowest rank of a full-graph epoch is as fast as can be."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_gnn.partition.layout import Groups
from lightning_gnn.partition.metis import Adjacency, MetisUnavailable, part_graph, part_graph_constrained
from lightning_gnn.partition.metrics import EdgeCutReport, edge_cut_report
from lightning_gnn.partition.refine import refine_for_cover

EDGE_BOUNDS = (1.05, 1.3)
"""Allowed edge imbalances that METIS tries: a tight one costs cut on skewed graphs, a loose one idle ranks."""

GOOD_EDGE_BALANCE = 1.05
"""Below this, balancing nodes alone has balanced edges as well, and nothing else is tried."""

METHODS = ("metis", "metis_masks", "metis_cover", "random", "contiguous")
"""Names of ways to assign nodes, see :func:`assign_nodes`."""

Cut = Callable[[NDArray[np.int64], int, int], NDArray[np.int32]]
"""Of edges ``[2, E]``, the number of nodes and that of parts: the part of each node."""


@dataclass(frozen=True)
class Assignment:
    """Who owns which node.

    Attributes:
        part: int32 ``[N]``.
        method: one of `METHODS`, or ``"given"``.
        balance: which balance setting was kept, in words.
        report: its quality.
    """

    part: NDArray[np.int32]
    method: str
    balance: str
    report: EdgeCutReport


def assign_nodes(
    edge_index: NDArray[np.int64],
    num_nodes: int,
    num_parts: int,
    method: str | NDArray[np.integer] = "metis",
    *,
    seed: int = 0,
    masks: Mapping[str, NDArray[np.bool_]] | None = None,
    groups: Groups | None = None,
) -> Assignment:
    """Returns an owner for every node.

    Args:
        edge_index: int64 ``[2, E]``; the owner of a target computes the edge.
        method: ``"metis"``: of several balance settings the one with the lowest predicted epoch time; ``"metis_masks"``: the
            same, of settings that balance nodes, edges and the nodes of each mask at once (DistDGL, section III-B);
            ``"metis_cover"``: as ``"metis"``, and nodes then move so that a cover sends fewer rows
            (:func:`~lightning_gnn.partition.refine.refine_for_cover`); ``"random"``: equal parts; ``"contiguous"``: equal
            ranges; or the part of every node, int ``[N]``, taken as it is.
        seed: of METIS, of moves and of the random assignment.
        masks: bool ``[N]`` each; every part gets a node of each mask that has at least P (not for a given assignment).
        groups: let METIS cut between these groups of parts first; see :func:`assign_hierarchically`.

    Raises:
        ValueError: an unknown method, an assignment that does not fit, groups of unequal size.
        MemoryError: the graph is too large for METIS on this machine.
    """
    method = checked_method(method)
    if not isinstance(method, str):
        part = _checked(method, num_nodes, num_parts)
        return Assignment(part, "given", "as given", edge_cut_report(edge_index, part, num_parts, masks))
    if num_parts == 1:
        candidates = iter([("one part", np.zeros(num_nodes, np.int32))])
    elif method == "random":
        part = np.random.default_rng(seed).permutation(np.arange(num_nodes) % num_parts).astype(np.int32)
        candidates = iter([("nodes", part)])
    elif method == "contiguous":
        candidates = iter([("nodes", (np.arange(num_nodes) * num_parts // max(num_nodes, 1)).astype(np.int32))])
    elif groups is not None:
        part = assign_hierarchically(edge_index, num_nodes, groups, lambda *cut: assign_nodes(*cut, seed=seed).part)
        candidates = iter([("level by level", part)])
    else:
        balanced = list((masks or {}).values()) if method == "metis_masks" else None
        candidates = metis_candidates(edge_index, num_nodes, num_parts, seed, balanced)
    kept: Assignment | None = None
    for balance, part in candidates:
        part = spread_masks(part, num_parts, masks or {})
        report = edge_cut_report(edge_index, part, num_parts, masks)
        if kept is None or report.predicted_seconds < kept.report.predicted_seconds:
            kept = Assignment(part, method, balance, report)
        if kept.report.edge_balance <= GOOD_EDGE_BALANCE:
            break
    assert kept is not None
    if method == "metis_cover":
        part = spread_masks(refine_for_cover(edge_index, kept.part, num_parts, seed), num_parts, masks or {})
        report = edge_cut_report(edge_index, part, num_parts, masks)
        return Assignment(part, method, f"{kept.balance}, moved for a cover", report)
    return kept


def assign_hierarchically(edge_index: NDArray[np.int64], num_nodes: int, groups: Groups, cut: Cut) -> NDArray[np.int32]:
    """Returns an owner for every node, int32 ``[N]``: cut over the outer groups, then inside each over the inner ones.

    What is cut between machines first, then between sockets, then between devices (DGCL section 4.1).

    Raises:
        ValueError: groups side by side that do not hold equally many devices, or other devices than 0 to P - 1, each once.
    """
    named = devices(groups)
    if sorted(named) != list(range(len(named))):
        raise ValueError(f"Groups must name the devices 0 to {len(named) - 1}, each once (got {groups}).")
    if not alike(groups):
        raise ValueError(
            f"Groups side by side must hold equally many devices (got {groups}). "
            "Take the same number of each machine, or cut without hierarchy."
        )
    part = np.empty(num_nodes, np.int32)
    _assign(edge_index, np.arange(num_nodes), groups, cut, part)
    return part


def alike(groups: Groups | int) -> bool:
    """Returns whether groups side by side hold equally many devices, on all levels."""
    if isinstance(groups, int):
        return True
    return len({len(devices(each)) for each in groups}) <= 1 and all(map(alike, groups))


def several_alike(groups: Groups) -> bool:
    """Returns whether groups are several machines of equally many devices, between which METIS cuts first by default."""
    return len(groups) > 1 and alike(groups)


def _assign(
    edge_index: NDArray[np.int64], nodes: NDArray[np.int64], group: Groups | int, cut: Cut, part: NDArray
) -> None:
    """Writes the owners of `nodes`; `edge_index` holds the edges among them, as positions in `nodes`."""
    if isinstance(group, int):
        part[nodes] = group
        return
    choice = cut(edge_index, len(nodes), len(group))
    for number, each in enumerate(group):
        chosen = choice == number
        position = np.cumsum(chosen) - 1
        inside = chosen[edge_index].all(0)
        _assign(position[edge_index[:, inside]], nodes[chosen], each, cut, part)


def devices(group: Groups | int) -> list[int]:
    return [group] if isinstance(group, int) else [device for each in group for device in devices(each)]


def checked_method(method: Any) -> str | NDArray[np.integer]:
    """Returns one of `METHODS`, or the part of every node, int ``[N]``; whether it fits is seen when nodes are assigned."""
    if isinstance(method, str) and method in METHODS:
        return method
    wanted = f"partition must be {', '.join(map(repr, METHODS))} or the rank of every node"
    if isinstance(method, str):
        raise ValueError(f"{wanted} (got {method!r}).")
    try:
        part = np.asarray(method.cpu() if isinstance(method, Tensor) else method)
    except ValueError as error:
        raise ValueError(f"{wanted}, one integer each ({error}).") from error
    if part.ndim != 1:
        raise ValueError(f"{wanted}, one integer each (got shape {list(part.shape)}).")
    if not np.issubdtype(part.dtype, np.integer):
        raise ValueError(f"{wanted}: it must hold integers (got {part.dtype}).")
    return part


def _checked(part: NDArray[np.integer], num_nodes: int, num_parts: int) -> NDArray[np.int32]:
    if part.shape != (num_nodes,):
        raise ValueError(
            f"partition must give a rank for each of the {num_nodes} nodes (got shape {list(part.shape)}). "
            "Was it made for another graph?"
        )
    if num_nodes and (part.min() < 0 or part.max() >= num_parts):
        raise ValueError(
            f"partition names ranks {part.min()} to {part.max()}, but there are {num_parts}: 0 to {num_parts - 1}. "
            "Make it for as many parts as the Trainer has devices."
        )
    return part.astype(np.int32)


def metis_candidates(
    edge_index: NDArray[np.int64],
    num_nodes: int,
    num_parts: int,
    seed: int,
    masks: Sequence[NDArray[np.bool_]] | None = None,
) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Yields METIS assignments under balance settings, the cheapest first.

    Full-batch time follows edges, and METIS with balanced nodes may leave a part up to four times too many on skewed
    graphs; balancing edges tightly may cost far more cut edges. So several are made, for the caller to choose. The nodes of
    `masks`, bool ``[N]`` each, are balanced as well in all of them.
    """
    if num_nodes <= num_parts or edge_index.shape[1] == 0:
        yield "nodes", (np.arange(num_nodes) % num_parts).astype(np.int32)
        return
    graph = Adjacency.of(edge_index, num_nodes)
    if masks is None:
        yield "nodes", part_graph(graph, num_parts, seed)
    in_degree = np.bincount(edge_index[1], minlength=num_nodes)
    weights = np.stack([np.ones_like(in_degree), in_degree, *(masks or [])], 1)
    what = "nodes and edges" if masks is None else "nodes, edges and masks"
    for bound in EDGE_BOUNDS:
        bounds = np.full(weights.shape[1], bound, np.float32)
        bounds[0] = max(bound, 1.1)
        try:
            yield f"{what} within {bound}", part_graph_constrained(graph, num_parts, seed, weights, bounds)
        except MetisUnavailable as error:
            warnings.warn(f"METIS balances one summed weight of {what} instead of each: {error}", stacklevel=2)
            scale = np.maximum(1, np.round(in_degree.sum() / np.maximum(1, weights.sum(0)))).astype(np.int64)
            yield f"{what}, summed", part_graph(graph, num_parts, seed, weights @ scale)
            return


def spread_masks(part: NDArray[np.int32], num_parts: int, masks: Mapping[str, NDArray[np.bool_]]) -> NDArray[np.int32]:
    """Returns `part` with as few nodes moved as are needed for each part to have one of each mask, where counts allow.

    A node moves from the part with most nodes of the mask; one that no other mask needs there goes first.
    """
    part = part.copy()
    for mask in masks.values():
        counts = np.bincount(part[mask], minlength=num_parts)
        if counts.sum() < num_parts:
            continue
        for empty in np.flatnonzero(counts == 0):
            for donor in np.argsort(-counts, kind="stable"):
                if counts[donor] < 2:
                    break
                node = _spare(part, mask, int(donor), masks)
                if node is not None:
                    part[node] = empty
                    counts[donor] -= 1
                    counts[empty] += 1
                    break
    return part


def _spare(
    part: NDArray[np.int32], mask: NDArray[np.bool_], donor: int, masks: Mapping[str, NDArray[np.bool_]]
) -> int | None:
    """Returns a node of `mask` on `donor` whose move leaves no other mask empty there."""
    there = part == donor
    blocked = np.zeros_like(mask)
    for other in masks.values():
        if other is not mask and (there & other).sum() == 1:
            blocked |= other
    nodes = np.flatnonzero(there & mask & ~blocked)
    return int(nodes[0]) if len(nodes) else None
