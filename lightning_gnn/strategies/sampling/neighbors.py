"""One hop of neighbour sampling, at the owner of the targets. Pure: no ranks, no state.

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
from lightning_gnn.kernels.run import over_range, over_ranges
from lightning_gnn.strategies.sampling import loops

_WORK = 32
"""Multiplications that drawing an edge costs, about: below some thousand edges, threads do not pay."""

NO_IDS = torch.empty(0, dtype=torch.long)


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """Returns all ids of some pieces, ``[n]``; of a single one itself."""
    return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0] if pieces else NO_IDS


def bounds(counts: Tensor) -> Tensor:
    """Returns where each of the groups of so many begins, and the end, ``[n + 1]``."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def inverse(order: Tensor) -> Tensor:
    """Returns where each place is in a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


@dataclass(frozen=True)
class Neighbors:
    """In-edges of some targets.

    Attributes:
        offsets: where each target's edges begin, and the end, int64 ``[T + 1]``.
        sources: source of each edge, int64 ``[S]``.
        edges: position of each edge in the list that the matrix was made from, int64 ``[S]``.
    """

    offsets: Tensor
    sources: Tensor
    edges: Tensor

    @classmethod
    def of(cls, counts: Tensor, sources: Tensor, edges: Tensor) -> Neighbors:
        """Returns in-edges of targets that have so many each, ``[T]``."""
        return cls(bounds(counts), sources, edges)

    @classmethod
    def all_of(cls, found: Sequence[Neighbors]) -> Neighbors:
        """Returns those of some targets, then those of others, and so on."""
        if len(found) == 1:
            return found[0]
        return cls.of(*map(joined, zip(*(each.fields for each in found)) if found else [[]] * 3))

    @property
    def counts(self) -> Tensor:
        """How many edges each target has, int64 ``[T]``."""
        return self.offsets.diff()

    @property
    def fields(self) -> list[Tensor]:
        """What :meth:`of` makes these of."""
        return [self.counts, self.sources, self.edges]

    def at(self, places: Tensor) -> Neighbors:
        """Returns the in-edges of the targets at some places, ``[n]``."""
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
    """In-edges of some nodes, of which those with the highest scores are drawn; see :class:`~lightning_gnn.SamplingStrategy`.

    ``edges["strength"]`` has an attribute of each, ``[S, ...]``.

    Attributes:
        kind: their type; that of a graph without types is ``("node", "to", "node")``.
        uniform: a random number of each, from 0 up to 1, float64 ``[S]``: a function of the batch's random seed and of the edge.
        offsets: where each node's edges begin, and the end, int64 ``[T + 1]``.
        of_edges, of_sources, of_targets: return an attribute, by its name, of the edges and of their ends, ``[S, ...]``.
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
"""Returns a number for each edge, ``[S]``; those of -inf are never drawn. It is a function of the node and its in-edges: which
other nodes are there depends on who owns them."""


def best_of(found: Neighbors, scores: Tensor, fanout: int) -> Neighbors:
    """Returns of each target's in-edges those with the highest scores ``[S]``, up to `fanout`, in their order; of equal ones the
    first.

    Raises:
        ValueError: scores that are not one real number for each edge.
    """
    if not isinstance(scores, Tensor) or scores.shape != found.sources.shape or scores.isnan().any():
        what = f"{scores.dtype} {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"score must return a number for each of {len(found.sources)} edges, and not nan (got {what}).")
    target = found.targets()
    order = scores.argsort(descending=True, stable=True)
    order = order[target[order].argsort(stable=True)]
    place = torch.arange(len(order)) - found.offsets[:-1][target]  # of the best, the second, ... of each target
    kept = torch.zeros(len(order), dtype=torch.bool)
    kept[order[place < fanout]] = True
    if scores.is_floating_point():
        kept &= scores != float("-inf")
    counts = torch.bincount(target[kept], minlength=len(found.offsets) - 1)
    return Neighbors.of(counts, found.sources[kept], found.edges[kept])


def random_numbers(csr: CSR, targets: Tensor, keys: Tensor, seed: int, found: Neighbors) -> Tensor:
    """Returns the random number of each edge that was found, float64 ``[S]``: by which :func:`sample_neighbors` draws it."""
    assert csr.edge is None
    out = torch.empty(len(found.sources), dtype=torch.float64)
    arrays = csr.indptr, targets, keys, seed & (2**63 - 1), found.offsets, found.edges, out
    ranges = partial(even_ranges, found.offsets)
    over_ranges(loops.random_numbers, *arrays, size=len(targets), ranges=ranges, work=_WORK * len(out))
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
    """Returns up to `fanout` in-edges of each target, uniformly drawn; duplicate edges count as two.

    What is drawn for a target depends on `seed` and on its key only: not on the number of threads, nor on who draws it.
    GraphSAGE's sampling (Hamilton et al., NeurIPS 2017), done by the owner of the targets (DistDGL, section III-D).

    Args:
        csr: in-edges; rows are targets, columns sources; indices int32 or int64.
        targets: rows, int64 ``[T]``; duplicates are sampled each.
        fanout: edges per target; -1 for all of them.
        seed: same seed, same sample.
        replace: draw with replacement: `fanout` edges of every target that has any; -1 stands for all, each once.
        keys: what numbers the targets for the random numbers, int64 ``[T]``; their positions by default. With ids of nodes, a
            sample does not depend on which rank draws it, and in which order.
        weight: of each slot, floating ``[E]``, see :meth:`CSR.permute`: edges are drawn with odds in proportion to it, those
            of weight 0 or less never.
        time, until: of each slot, int64 ``[E]``, and of each target, int64 ``[T]``: only edges with ``time <= until`` are drawn.
        strategy: ``"uniform"``, or ``"last"`` for the latest edges; where times are equal, the earlier slots.
        of_sources: `time` is of each column, ``[C]``: an edge has its source's.
        source_keys: what numbers the columns, int64 ``[C]``: targets share one random number per source, and take the edges
            from those whose number is the smallest (LABOR-0 with as many edges as without: Balin and Catalyurek, NeurIPS 2023,
            appendix A.3). What is drawn for one target is as likely as without it; several targets draw the same sources more
            often. It takes time in proportion to the targets' in-edges, not to what is drawn. The second of two edges from one
            source has the source's second number, and so on.

    Raises:
        ValueError: targets outside the matrix, sizes or choices that do not fit.
    """
    check_fanout(fanout, minimum=0)
    check_ids(targets, csr.num_rows, "Targets")
    check_choices(replace, weight is not None, time is not None, strategy, source_keys is not None)
    if (time is None) != (until is None):
        raise ValueError("time of edges and until of targets are given together, or neither.")
    sizes = len(targets), csr.num_edges, csr.num_cols if of_sources else csr.num_edges, len(targets), csr.num_cols
    given = {"keys": keys, "weight": weight, "time": time, "until": until, "source_keys": source_keys}
    for (name, value), size in zip(given.items(), sizes):
        if value is not None and len(value) != size:
            raise ValueError(f"{name} has {len(value)} entries, but needs {size}.")
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
    run = partial(over_ranges, size=len(targets), ranges=partial(even_ranges, offsets), work=work)
    if free and source_keys is None:
        run(loops.draw_uniform, csr.indptr, targets, key, seed, offsets, again, slots)
    else:
        latest = strategy == "last"
        edges_by = csr.indptr, csr.indices, weights, times, of_sources
        run(loops.draw_best, *edges_by, limits, latest, by_source, targets, key, seed, offsets, slots)
    edge = NO_IDS if csr.edge is None else csr.edge
    over_range(loops.take, len(slots), csr.indices, edge, csr.edge is not None, slots, sources, edges, work=work)
    return Neighbors(offsets, sources, edges)


def check_ids(ids: Tensor, size: int, name: str) -> None:
    """Raises ValueError for ids that are not int64 ``[n]``, or lie outside 0 to `size` - 1."""
    if ids.dtype != torch.long or ids.dim() != 1:
        raise ValueError(f"{name} are one dimension of int64 (got {ids.dtype}, shape {tuple(ids.shape)}).")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= size):
        raise ValueError(f"{name} from {int(ids.min())} to {int(ids.max())} are outside a graph of {size} nodes.")


def check_choices(replace: bool, weighted: bool, timed: bool, strategy: str, by_source: bool = False) -> None:
    """Raises ValueError for ways to draw that exclude each other."""
    if strategy not in ("uniform", "last"):
        raise ValueError(f'strategy is "uniform" or "last" (got {strategy!r}).')
    if replace and (weighted or timed):
        raise ValueError("replace=True draws uniformly; leave out weight and time, or draw without replacement.")
    if strategy == "last" and (weighted or not timed):
        raise ValueError('strategy="last" takes the latest edges; it needs time, and no weight.')
    if by_source and replace:
        raise ValueError(
            "LABOR draws each source once, by a random number of its own; leave out replace=True, or draw by target."
        )
    if by_source and timed:
        raise ValueError(
            "With times, each seed has a tree of its own, and trees share no nodes, as LABOR would have them do; leave out "
            "time, or draw by target."
        )


def random_walks(csr: CSR, roots: Tensor, steps: int, seed: int = 0) -> Tensor:
    """Returns the nodes of walks from `roots`, int64 ``[T]``, each step to one in-neighbour; int64 ``[T, steps + 1]``.

    Where there is no in-neighbour, a walk stays. Same seed, same walks.
    """
    check_ids(roots, csr.num_rows, "Roots")
    out = torch.empty(len(roots), steps + 1, dtype=torch.long)
    arrays = csr.indptr, csr.indices, roots.contiguous(), seed & (2**63 - 1), out
    over_range(loops.walk, len(roots), *arrays, work=_WORK * out.numel())
    return out
