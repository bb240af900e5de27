"""One hop of neighbor sampling, at the owner of the targets. Independent of ranks, without state.

R rows (targets), C columns (sources) and E slots of a CSR matrix of in-edges; T targets, S edges drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch_geometric.typing import EdgeType

from lightning_gnn.arguments import check_fanout
from lightning_gnn.kernels.csr import CSR, even_ranges
from lightning_gnn.kernels.run import run_over_range, run_over_ranges
from lightning_gnn.strategies.sampling import loops

_WORK = 32
"""Approximate cost of drawing an edge, in multiplications; below some thousand edges, threads are not faster."""

NO_IDS = torch.empty(0, dtype=torch.long)


def concat_ids(pieces: Sequence[Tensor]) -> Tensor:
    """Returns the concatenation of some ids, ``[n]``; a single tensor is returned without a copy."""
    return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0] if pieces else NO_IDS


def bounds(counts: Tensor) -> Tensor:
    """Returns the start of each group of `counts` elements, and the end, ``[n + 1]``."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def inverse(order: Tensor) -> Tensor:
    """Returns the inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


@dataclass(frozen=True)
class Neighbors:
    """In-edges of some targets.

    Attributes:
        offsets: first edge of each target, and the end, int64 ``[T + 1]``.
        sources: source of each edge, int64 ``[S]``.
        edges: position of each edge in the list that the matrix was made from, int64 ``[S]``.
    """

    offsets: Tensor
    sources: Tensor
    edges: Tensor

    @classmethod
    def of(cls, counts: Tensor, sources: Tensor, edges: Tensor) -> Neighbors:
        """Returns the in-edges of targets with `counts` edges each, ``[T]``."""
        return cls(bounds(counts), sources, edges)

    @classmethod
    def all_of(cls, parts: Sequence[Neighbors]) -> Neighbors:
        """Returns the concatenation of the in-edges of several lists of targets."""
        if len(parts) == 1:
            return parts[0]
        return cls.of(*map(concat_ids, zip(*(each.fields for each in parts)) if parts else [[]] * 3))

    @property
    def counts(self) -> Tensor:
        """Number of edges of each target, int64 ``[T]``."""
        return self.offsets.diff()

    @property
    def fields(self) -> list[Tensor]:
        """Arguments of :meth:`of`."""
        return [self.counts, self.sources, self.edges]

    def at(self, places: Tensor) -> Neighbors:
        """Returns the in-edges of the targets at some positions, ``[n]``."""
        begins, counts = self.offsets[places], self.counts[places]
        offsets = bounds(counts)
        slots = torch.repeat_interleave(begins - offsets[:-1], counts) + torch.arange(int(offsets[-1]))
        return Neighbors(offsets, self.sources[slots], self.edges[slots])

    def targets(self, first: int = 0) -> Tensor:
        """Returns each edge's target, int64 ``[S]``: its position among the targets, plus `first`."""
        # numpy's repeat is faster than torch's.
        return torch.from_numpy(np.repeat(np.arange(first, first + len(self.offsets) - 1), self.counts.numpy()))


@dataclass(frozen=True)
class InEdges:
    """In-edges of some nodes, as input of ``edge_score_fn``; see :class:`~lightning_gnn.SamplingStrategy`.

    ``edges["strength"]`` is the edge attribute of that name, ``[S, ...]``.

    Attributes:
        kind: type of the edges; ``("node", "to", "node")`` for a graph without types.
        uniform: a random number of each edge, from 0 up to 1, float64 ``[S]``: a function of the batch's random seed and of the
            edge.
        offsets: edges of target t are ``offsets[t]`` to ``offsets[t + 1] - 1``, int64 ``[T + 1]``, for T targets and S edges.
        of_edges: function that returns an edge attribute of a given name, ``[S, ...]``.
        of_sources: function that returns a node attribute of a given name for the source of each edge, ``[S, ...]``.
        of_targets: function that returns a node attribute of a given name for the target of each edge, ``[S, ...]``.
    """

    kind: EdgeType
    uniform: Tensor
    offsets: Tensor
    of_edges: Callable[[str], Tensor]
    of_sources: Callable[[str], Tensor]
    of_targets: Callable[[str], Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.of_edges(name)


Score = Callable[[InEdges], Tensor]
"""Function that returns a score for each edge, ``[S]``; edges with -inf are never drawn.

It must be a function of each node and its in-edges only: the other nodes of a call depend on the partition.
"""


def best_of(neighbors: Neighbors, scores: Tensor, fanout: int) -> Neighbors:
    """Returns for each target the in-edges with the highest scores ``[S]``, at most `fanout`, in their order.

    Ties go to the first edge.

    Raises:
        ValueError: scores that are not one real number for each edge.
    """
    if not isinstance(scores, Tensor) or scores.shape != neighbors.sources.shape or scores.isnan().any():
        what = f"{scores.dtype} {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"edge_score_fn must return a number, not nan, for each of {len(neighbors.sources)} edges, got {what}.")
    target = neighbors.targets()
    order = scores.argsort(descending=True, stable=True)
    order = order[target[order].argsort(stable=True)]
    place = torch.arange(len(order)) - neighbors.offsets[:-1][target]  # rank of each edge among its target's edges, best first
    kept = torch.zeros(len(order), dtype=torch.bool)
    kept[order[place < fanout]] = True
    if scores.is_floating_point():
        kept &= scores != float("-inf")
    counts = torch.bincount(target[kept], minlength=len(neighbors.offsets) - 1)
    return Neighbors.of(counts, neighbors.sources[kept], neighbors.edges[kept])


def random_numbers(csr: CSR, targets: Tensor, keys: Tensor, seed: int, neighbors: Neighbors) -> Tensor:
    """Returns the random number of each edge, float64 ``[S]``: the number by which :func:`sample_neighbors` draws it."""
    assert csr.edge is None
    out = torch.empty(len(neighbors.sources), dtype=torch.float64)
    arrays = csr.indptr, targets, keys, seed & (2**63 - 1), neighbors.offsets, neighbors.edges, out
    ranges = partial(even_ranges, neighbors.offsets)
    run_over_ranges(loops.random_numbers, *arrays, size=len(targets), ranges=ranges, work=_WORK * len(out))
    return out


def sample_neighbors(
    csr: CSR,
    targets: Tensor,
    fanout: int,
    seed: int = 0,
    *,
    replace: bool = False,
    keys: Tensor | None = None,
    weight: Tensor | None = None,
    time: Tensor | None = None,
    until: Tensor | None = None,
    strategy: str = "uniform",
    of_sources: bool = False,
    source_keys: Tensor | None = None,
) -> Neighbors:
    """Returns up to `fanout` in-edges of each target, uniformly drawn; duplicate edges count twice.

    The draws of a target depend only on `seed` and on its key, not on the number of threads or on the rank that draws. This is
    GraphSAGE's sampling (Hamilton et al., NeurIPS 2017), done by the owner of the targets (DistDGL, section III-D).

    Args:
        csr: in-edges; rows are targets, columns sources; indices int32 or int64.
        targets: rows, int64 ``[T]``; duplicates are sampled separately.
        fanout: edges per target; -1 for all.
        seed: random seed; the same seed gives the same sample.
        replace: whether to draw with replacement: `fanout` edges of every target that has any; -1 gives each edge once.
        keys: keys of the targets for random numbers, int64 ``[T]``; their positions by default. With node ids, a sample does not
            depend on the rank that draws it, or on the order.
        weight: weight of each slot, floating ``[E]``, see :meth:`CSR.permute`: edges are drawn with probabilities proportional to
            it, and edges of weight 0 or less never.
        time, until: time of each slot, int64 ``[E]``, and limit of each target, int64 ``[T]``: only edges with ``time <= until``
            are drawn.
        strategy: ``"uniform"``, or ``"last"`` for the latest edges; with equal times, the earlier slots.
        of_sources: whether `time` is per column, ``[C]``: an edge has the time of its source.
        source_keys: keys of the columns, int64 ``[C]``. Targets share one random number per source, and draw the edges from
            sources with the smallest numbers. This is LABOR-0 with the same number of edges (Balin and Catalyurek, NeurIPS 2023,
            appendix A.3). The probabilities for a single target do not change; several targets draw the same sources more often.
            The time is proportional to the targets' in-edges, not to the edges drawn. The second of two edges from one source
            uses the source's second number, and so on.

    Raises:
        ValueError: targets outside the matrix, sizes or options that do not fit.
    """
    check_fanout(fanout, minimum=0)
    check_ids(targets, csr.num_rows, "Targets")
    check_choices(replace, weight is not None, time is not None, strategy, source_keys is not None)
    if (time is None) != (until is None):
        raise ValueError("The time of edges and the until of targets must be set together. Set both, or neither.")
    sizes = len(targets), csr.num_edges, csr.num_cols if of_sources else csr.num_edges, len(targets), csr.num_cols
    given = {"keys": keys, "weight": weight, "time": time, "until": until, "source_keys": source_keys}
    for (name, value), size in zip(given.items(), sizes):
        if value is not None and len(value) != size:
            raise ValueError(f"{name} must have {size} entries, got {len(value)}.")
    targets = targets.contiguous()
    seed &= 2**63 - 1
    offsets = torch.empty(len(targets) + 1, dtype=torch.long)
    key, times, limits, by_source = (
        NO_IDS if value is None else value.contiguous() for value in (keys, time, until, source_keys)
    )
    weights = torch.empty(0) if weight is None else weight.contiguous()
    free, again = weight is None and time is None, replace and fanout >= 0
    if free:
        loops.offsets_of_all(csr.indptr.numpy(), targets.numpy(), fanout, again, offsets.numpy())
    else:
        edges_of = csr.indptr.numpy(), csr.indices.numpy(), weights.numpy(), times.numpy(), of_sources
        loops.offsets_of_allowed(*edges_of, limits.numpy(), targets.numpy(), fanout, offsets.numpy())
    slots, sources, edges = (torch.empty(int(offsets[-1]), dtype=torch.long) for _ in range(3))
    work = _WORK * len(slots)
    run = partial(run_over_ranges, size=len(targets), ranges=partial(even_ranges, offsets), work=work)
    if free and source_keys is None:
        run(loops.draw_uniform, csr.indptr, targets, key, seed, offsets, again, slots)
    else:
        latest = strategy == "last"
        edges_by = csr.indptr, csr.indices, weights, times, of_sources
        run(loops.draw_best, *edges_by, limits, latest, by_source, targets, key, seed, offsets, slots)
    edge = NO_IDS if csr.edge is None else csr.edge
    run_over_range(loops.take, len(slots), csr.indices, edge, csr.edge is not None, slots, sources, edges, work=work)
    return Neighbors(offsets, sources, edges)


def check_ids(ids: Tensor, size: int, name: str) -> None:
    """Raises ValueError for ids that are not int64 ``[n]``, or not between 0 and `size` - 1."""
    if ids.dtype != torch.long or ids.dim() != 1:
        raise ValueError(f"{name} must be int64 of one dimension, got {ids.dtype} of shape {tuple(ids.shape)}.")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= size):
        raise ValueError(f"{name} must be from 0 to {size - 1}, got {int(ids.min())} to {int(ids.max())}.")


def check_choices(replace: bool, weighted: bool, timed: bool, strategy: str, by_source: bool = False) -> None:
    """Raises ValueError for options that exclude each other."""
    if strategy not in ("uniform", "last"):
        raise ValueError(f'temporal_strategy must be "uniform" or "last", got {strategy!r}.')
    if replace and (weighted or timed):
        raise ValueError("replace=True is not supported with weight_attr or time_attr. Remove one of them.")
    if strategy == "last" and (weighted or not timed):
        raise ValueError('temporal_strategy="last" must be used with time_attr, without weight_attr: it draws the latest edges.')
    if by_source and replace:
        raise ValueError(
            "LABOR does not support replace=True: it draws each source once. Remove replace=True, or draw by target."
        )
    if by_source and timed:
        raise ValueError(
            "LABOR does not support time: with times each seed has its own tree, and LABOR shares nodes between trees. Remove "
            "time, or draw by target."
        )


def random_walks(csr: CSR, roots: Tensor, steps: int, seed: int = 0) -> Tensor:
    """Returns the nodes of walks from `roots`, int64 ``[T]``, each step to an in-neighbor; int64 ``[T, steps + 1]``.

    A walk stays at a node without in-neighbors. The same seed gives the same walks.
    """
    check_ids(roots, csr.num_rows, "Roots")
    out = torch.empty(len(roots), steps + 1, dtype=torch.long)
    arrays = csr.indptr, csr.indices, roots.contiguous(), seed & (2**63 - 1), out
    run_over_range(loops.walk, len(roots), *arrays, work=_WORK * out.numel())
    return out
