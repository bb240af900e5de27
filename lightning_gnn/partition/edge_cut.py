"""Edge cuts: assignments of nodes to ranks that minimize the full-graph epoch time of the slowest rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.console import progress_bar
from lightning_gnn.devices import available_bytes
from lightning_gnn.heap import giving_back_freed_memory
from lightning_gnn.partition.adjacency import Adjacency
from lightning_gnn.partition.layout import KAMINPAR, Groups, checked_method, devices, has_equal_groups, levels
from lightning_gnn.partition.metrics import EdgeCutReport, edge_cut_report
from lightning_gnn.registry import PARTITIONERS, partitioners, refiner_of

if TYPE_CHECKING:
    from lightning_gnn.partition.budget import Candidates, Partitioner

EDGE_BOUNDS = (1.05, 1.3)
"""Edge imbalances that METIS tries: a tight bound costs cut edges on skewed graphs, a loose bound idle ranks."""

GOOD_EDGE_BALANCE = 1.05
"""Edge imbalance up to which no other balance setting than balanced nodes is tried."""

SHARE_BOUND = 1.05
"""Allowed imbalance of the weights of :func:`shares` under ``"metis_masks"``."""

CANDIDATES = {
    "metis": 1 + len(EDGE_BOUNDS),
    "metis_cover": 1 + len(EDGE_BOUNDS),
    "metis_masks": len(EDGE_BOUNDS),
    **dict.fromkeys(KAMINPAR, 2),
}
"""Maximum number of balance settings; one for other methods."""

LEAST_BOUND = 1.005
"""Minimum bound of one METIS cut, if outer levels have used up the allowed imbalance."""

Cut = Callable[[Adjacency, NDArray[np.int64], Groups], NDArray[np.int32]]
"""Function that assigns nodes to members of a group, given the group's subgraph, its original node ids ``[n]``, and the group."""


@dataclass(frozen=True)
class Assignment:
    """Owners of nodes.

    Attributes:
        part: owner of each node, int32 ``[N]``.
        method: one of `METHODS`, or ``"given"``.
        balance: description of the selected balance setting.
        report: partition quality.
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
    edge_masks: Mapping[str, NDArray[np.bool_]] | None = None,
    node_kinds: NDArray[np.integer] | None = None,
    plugins: Mapping[str, Partitioner] | None = None,
) -> Assignment:
    """Returns an owner for every node.

    Args:
        edge_index: edges, int64 ``[2, E]``; the owner of a target computes the edge.
        num_nodes: N.
        num_parts: P.
        method: method name, or the rank of every node, int ``[N]``, used unchanged. The names are:

            - ``"metis"``: of several balance settings, the setting with the lowest predicted epoch time
            - ``"metis_masks"``: the same, with settings that balance nodes, edges, the entries of each mask and the nodes of each
              kind at once (DistDGL, section III-B)
            - ``"metis_cover"``: ``"metis"``, and then nodes move so that a cover sends fewer rows
              (:func:`~lightning_gnn.strategies.cover.refine.refine_for_cover`)
            - ``"kaminpar"``, and ``"kaminpar_compressed"`` with less memory: the better of balanced nodes and a balanced sum of
              nodes and edges
            - one of :data:`~lightning_gnn.registry.PARTITIONERS`
            - ``"auto"``: the first of METIS, KaMinPar, KaMinPar compressed and the registry's partitioners whose predicted memory
              is free (:mod:`~lightning_gnn.partition.budget`)
            - ``"random"``: equal parts
            - ``"contiguous"``: equal ranges
        seed: random seed of partitioners and of the random assignment.
        masks: masks, bool ``[N]`` each; every part gets a node of each mask with at least P nodes (not for a given assignment).
        groups: groups of ranks between which METIS cuts first; see :func:`assign_hierarchically`. Balance constraints are the
            same, over all ranks equally.
        edge_masks: edge masks, bool ``[E]`` each, whose edges are counted at the owners of their targets.
        node_kinds: type number of each node, ``[N]``; None for a single type.
        plugins: replacements of the registry's partitioners, by name.

    Raises:
        ValueError: the method is unknown, the assignment does not match, or groups have unequal sizes.
        ModuleNotFoundError: KaMinPar is requested and not installed.
        MemoryError: the graph is too large for METIS on this machine, or, under ``"auto"``, for all methods.
    """
    method, masks, edge_masks = checked_method(method), masks or {}, edge_masks or {}
    if not isinstance(method, str):
        part = _check_owners(method, num_nodes, num_parts)
        return Assignment(part, "given", "as given", edge_cut_report(edge_index, part, num_parts, masks, edge_masks))
    if num_parts > 1:
        from lightning_gnn.partition.budget import choose, most_seconds, predictions  # unused for one part

    if method == "auto" and num_parts > 1:
        method = choose(predictions(edge_index, num_nodes, num_parts, plugins), available_bytes()).method
    plugin = (plugins or partitioners())[method] if method in PARTITIONERS else None
    to_cut = edge_index, num_nodes, groups or tuple(range(num_parts)), seed
    nodes = np.arange(num_nodes)
    if num_parts == 1:
        candidates = iter([("one part", np.zeros(num_nodes, np.int32))])
    elif method == "random":
        candidates = iter([("nodes", np.random.default_rng(seed).permutation(nodes % num_parts).astype(np.int32))])
    elif method == "contiguous":
        candidates = iter([("nodes", (nodes * num_parts // max(num_nodes, 1)).astype(np.int32))])
    elif method in KAMINPAR or plugin is not None:  # METIS's memory prediction assumes that freed memory is kept
        candidates = _giving_back(kaminpar_candidates(*to_cut, method) if plugin is None else plugin.candidates(*to_cut))
    else:
        balanced = shares(edge_index, num_nodes, masks, edge_masks, node_kinds) if method == "metis_masks" else None
        candidates = metis_candidates(*to_cut, balanced)
    kept: Assignment | None = None
    settings = 1 if num_parts == 1 else CANDIDATES.get(method, 1) if plugin is None else plugin.settings
    expected = None if num_parts == 1 else most_seconds(method, num_nodes, edge_index.shape[1], num_parts, plugin)
    with progress_bar(f"Partitioning ({method})", settings, "balance settings", expected=expected) as told:
        for balance, part in candidates:
            part = spread_masks(part, num_parts, masks)
            report = edge_cut_report(edge_index, part, num_parts, masks, edge_masks)
            if kept is None or report.predicted_seconds < kept.report.predicted_seconds:
                kept = Assignment(part, method, balance, report)
            if kept.report.edge_balance <= GOOD_EDGE_BALANCE:
                break
            told(1)
    assert kept is not None
    refine = refiner_of(method)
    if refine is None:
        return kept
    part = spread_masks(refine(edge_index, kept.part, num_parts, seed), num_parts, masks)
    report = edge_cut_report(edge_index, part, num_parts, masks, edge_masks)
    return Assignment(part, method, f"{kept.balance}, moved for a cover", report)


def _giving_back(candidates: Candidates) -> Candidates:
    with giving_back_freed_memory():
        yield from candidates


def assign_hierarchically(graph: Adjacency, groups: Groups, cut: Cut) -> NDArray[np.int32]:
    """Returns an owner for every node, int32 ``[N]``: a partition over the outer groups, then inside each over its inner groups.

    Cuts are made between machines first, then between sockets, then between devices (DGCL section 4.1). Ranks without groups, for
    example ``(0, 1, 2, 3)``, are one level.

    Raises:
        ValueError: sibling groups have unequal numbers of devices, or the devices are not 0 to P - 1, each once.
    """
    named = devices(groups)
    if sorted(named) != list(range(len(named))):
        raise ValueError(f"Groups must name the devices 0 to {len(named) - 1}, each once (got {groups}).")
    if not has_equal_groups(groups):
        raise ValueError(
            f"Groups of one level must have the same number of devices (got {groups}). "
            "Use the same number on each machine, or partition without hierarchy."
        )
    part = np.empty(graph.num_nodes, np.int32)
    _assign(graph, np.arange(graph.num_nodes), groups, cut, part)
    return part


def _assign(graph: Adjacency, nodes: NDArray[np.int64], group: Groups | int, cut: Cut, part: NDArray) -> None:
    """Write the owners of `nodes`; `graph` is their induced subgraph."""
    if isinstance(group, int):
        part[nodes] = group
    elif len(group) == 1:
        _assign(graph, nodes, group[0], cut, part)
    else:
        few = len(nodes) <= len(group) or not len(graph.indices)
        choice = np.arange(len(nodes)) % len(group) if few else cut(graph, nodes, group)
        for number, each in enumerate(group):
            chosen = np.flatnonzero(choice == number)
            inside = graph if isinstance(each, int) else graph.among(chosen)
            _assign(inside, nodes[chosen], each, cut, part)


def _check_owners(part: NDArray[np.integer], num_nodes: int, num_parts: int) -> NDArray[np.int32]:
    if part.shape != (num_nodes,):
        raise ValueError(
            f"partition must have one rank for each of the {num_nodes} nodes (got shape {list(part.shape)}). "
            "Compute it for this graph."
        )
    if num_nodes and (part.min() < 0 or part.max() >= num_parts):
        raise ValueError(
            f"partition must have ranks from 0 to {num_parts - 1} (got {part.min()} to {part.max()}). "
            "Compute it for as many parts as the Trainer has devices."
        )
    return part.astype(np.int32)


def shares(
    edge_index: NDArray[np.int64],
    num_nodes: int,
    masks: Mapping[str, NDArray[np.bool_]],
    edge_masks: Mapping[str, NDArray[np.bool_]],
    node_kinds: NDArray[np.integer] | None,
) -> list[NDArray[np.integer]]:
    """Returns node weights, int64 ``[N]`` each, to balance: nodes of masks and kinds, edges of masks."""
    kinds = [] if node_kinds is None else [node_kinds == each for each in np.unique(node_kinds)]
    edges = [np.bincount(edge_index[1, mask], minlength=num_nodes) for mask in edge_masks.values()]
    return [each.astype(np.int64) for each in (*masks.values(), *kinds, *edges) if each.any()]


def metis_candidates(
    edge_index: NDArray[np.int64], num_nodes: int, groups: Groups, seed: int, shares: Sequence[NDArray[np.integer]] | None = None
) -> Candidates:
    """Yields METIS assignments under balance settings, the cheapest first, from which the caller selects.

    Full-graph step time depends on edges. With balanced nodes, METIS may give a rank up to four times the average on skewed
    graphs. Tightly balanced edges may cost far more cut edges. `shares`, weights ``[N]`` each, are balanced in all
    settings.
    """
    from lightning_gnn.partition.budget import check_metis
    from lightning_gnn.partition.metis import MetisUnavailable, part_graph

    parts = len(devices(groups))
    check_metis(edge_index, num_nodes, parts)
    graph = Adjacency.of(edge_index, num_nodes)
    if shares is None:
        yield "nodes", assign_hierarchically(graph, groups, lambda inside, _, group: part_graph(inside, len(group), seed))
    in_degree = np.bincount(edge_index[1], minlength=num_nodes)
    weights = np.stack([np.ones_like(in_degree), in_degree, *(shares or [])], 1)
    total = np.maximum(1, weights.sum(0))
    share_bounds = np.maximum(SHARE_BOUND, 1 + weights[:, 2:].max(0, initial=0) * parts / total[2:])  # few items: looser
    summed = weights @ np.maximum(1, np.round(in_degree.sum() / total)).astype(np.int64)
    what = "nodes and edges" if shares is None else "nodes, edges and masks"
    for bound in EDGE_BOUNDS:
        bounds = np.array([max(bound, 1.1), bound, *share_bounds])
        try:
            yield f"{what} within {bound}", cut_within(bounds, graph, groups, weights, seed)
        except MetisUnavailable as error:
            warnings.warn(f"METIS balances one summed weight of {what} instead of each: {error}", stacklevel=2)

            def as_one(inside: Adjacency, nodes: NDArray[np.int64], group: Groups) -> NDArray[np.int32]:
                return part_graph(inside, len(group), seed, summed[nodes])

            yield f"{what}, summed", assign_hierarchically(graph, groups, as_one)
            return


def cut_within(
    bounds: NDArray[np.float64], graph: Adjacency, groups: Groups, weights: NDArray[np.integer], seed: int
) -> NDArray[np.int32]:
    """Returns METIS's parts with node weights ``[N, W]`` balanced within bounds ``[W]``."""
    from lightning_gnn.partition.metis import FEW_PARTS, part_graph_constrained

    parts, total, halve = len(devices(groups)), np.maximum(1, weights.sum(0)), levels(groups) > 1

    def cut(inside: Adjacency, nodes: NDArray[np.int64], group: Groups) -> NDArray[np.int32]:
        # Bounds hold for all ranks: a level may use its root of the imbalance that the outer cuts have left.
        left = bounds * total * (len(devices(group)) / parts) / np.maximum(1, weights[nodes].sum(0))
        allowed = np.maximum(left ** (1 / levels(group)), LEAST_BOUND).astype(np.float32)
        return part_graph_constrained(inside, len(group), seed, weights[nodes], allowed, halve and len(group) <= FEW_PARTS)

    return assign_hierarchically(graph, groups, cut)


def kaminpar_candidates(edge_index: NDArray[np.int64], num_nodes: int, groups: Groups, seed: int, method: str) -> Candidates:
    """Yields KaMinPar's assignments, the cheapest first: with balanced nodes, and with a balanced sum of nodes and edges."""
    from lightning_gnn.partition import kaminpar

    kaminpar.check_installed()
    graph, in_degree = Adjacency.of(edge_index, num_nodes), np.bincount(edge_index[1], minlength=num_nodes)
    summed = in_degree + max(1, round(in_degree.sum() / max(1, num_nodes)))
    for balance, weights in (("nodes", None), ("nodes and edges, summed", summed)):

        def cut(inside: Adjacency, nodes: NDArray[np.int64], group: Groups, weights: Any = weights) -> NDArray[np.int32]:
            return kaminpar.part_graph(
                inside, len(group), seed, None if weights is None else weights[nodes], method == "kaminpar_compressed"
            )

        yield balance, assign_hierarchically(graph, groups, cut)


def spread_masks(part: NDArray[np.int32], num_parts: int, masks: Mapping[str, NDArray[np.bool_]]) -> NDArray[np.int32]:
    """Returns `part` with the fewest moves of nodes after which each part has a node of each mask, if counts allow.

    A node moves from the part with most nodes of the mask; a node that is not the last of another mask there goes first.
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


def _spare(part: NDArray[np.int32], mask: NDArray[np.bool_], donor: int, masks: Mapping[str, NDArray[np.bool_]]) -> int | None:
    """Returns a node of `mask` on `donor` whose move leaves no other mask empty there."""
    there = part == donor
    blocked = np.zeros_like(mask)
    for other in masks.values():
        if other is not mask and (there & other).sum() == 1:
            blocked |= other
    nodes = np.flatnonzero(there & mask & ~blocked)
    return int(nodes[0]) if len(nodes) else None
