"""Edge cut as data: rows and edges of each rank, and rows to exchange.

The owner of a node has all of its in-edges (DGCL section 4.1: the tuples (d_i, d_j, V_ij) are `send_rows`). Pure functions of a
graph. N nodes, E edges, P ranks, H halo nodes.

Rows of a rank are ordered for cache reuse in SpMM: by community and, inside a community, with the nodes of highest degree first.
Rows of a community read each other while they are in the cache, and consecutive rows of similar degree have loops of similar
length. Alternatives were measured on five graphs: reverse Cuthill-McKee and degrees alone are slower on most, and communities by
METIS are as fast with more set-up time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_gnn.kernels import CSR
from lightning_gnn.kernels.loops import compile_loop

Ids = NDArray[np.int64]

ShortIds = NDArray[Any]
"""Array with one entry per edge, of the shortest :func:`id_dtype`."""


def id_dtype(count: int) -> np.dtype[Any]:
    """Returns the dtype of ids below `count`: int32 if possible, which halves the size of edges."""
    return np.dtype(np.int32) if count <= 2**31 else np.dtype(np.int64)


@dataclass(frozen=True)
class HaloPlan:
    """Rows that one rank sends and receives in S.

    Attributes:
        num_owned: N of this rank.
        recv_counts: number of halo rows from each peer; halo rows are in peer order.
        send_rows: for each peer, local indices of the rows that it reads, in the order of its halo nodes.
    """

    num_owned: int
    recv_counts: tuple[int, ...]
    send_rows: tuple[Ids, ...]


@dataclass(frozen=True)
class Relabelling:
    """Node order in which each rank has one contiguous range.

    Attributes:
        n_id: original id of each row, int64 ``[N]``, in rank order.
        offsets: first row of each rank and the end, int64 ``[P + 1]``.
    """

    n_id: Ids
    offsets: Ids

    @classmethod
    def from_assignment(cls, part: NDArray[np.integer], num_parts: int) -> Relabelling:
        """Returns the relabeling for ``part`` ``[N]``, values 0 to `num_parts` - 1; original order within a rank."""
        counts = np.bincount(part, minlength=num_parts)
        return cls(np.argsort(part, kind="stable").astype(np.int64), np.cumsum([0, *counts], dtype=np.int64))

    def new_ids(self) -> Ids:
        """Returns the row of each original id, int64 ``[N]``."""
        new = np.empty_like(self.n_id)
        new[self.n_id] = np.arange(len(self.n_id))
        return new


@dataclass(frozen=True)
class EdgeCutPart:
    """Edges of one rank in local ids (local rows, then halo rows), and its halo nodes.

    Attributes:
        edge_index: edges, ``[2, E_p]``, of :func:`id_dtype`; targets are local rows, ascending, sources local or halo rows.
        edge_ids: position of each edge in the whole graph's list, int64 ``[E_p]``, ascending for each target.
        halo: relabeled ids of the halo nodes, ascending and therefore grouped by owner, int64 ``[H_p]``. In order of first use,
            gathering and adding at the owners would cost more than readers would save.
    """

    edge_index: ShortIds
    edge_ids: Ids
    halo: Ids


def edge_cut_parts(edge_index: Ids, relabelling: Relabelling) -> Iterator[EdgeCutPart]:
    """Yields the edges of each rank in the order of target rows, as in a CSR matrix; input in original ids, ``[2, E]``."""
    offsets, new = relabelling.offsets, relabelling.new_ids()
    source, target = torch.from_numpy(new[edge_index])
    edges = CSR.from_coo(target, source, len(new), len(new))
    order, bounds = edges.edge_ids().numpy(), edges.indptr.numpy()[offsets]
    for (low, high), (begin, end) in zip(pairwise(offsets), pairwise(bounds)):
        ids = order[begin:end]
        local = edges.indices[begin:end].long().numpy()
        remote = (local < low) | (local >= high)
        halo, position = np.unique(local[remote], return_inverse=True)
        local -= low
        local[remote] = (high - low) + position
        dtype = id_dtype(int(high - low) + len(halo))
        yield EdgeCutPart(np.stack([local, target.numpy()[ids] - low]).astype(dtype), ids, halo)


def owners_of(offsets: Ids, ids: Ids) -> Ids:
    """Returns the owners of ids ``[n]``, given the first id of each rank and the end, `offsets` ``[P + 1]``."""
    return np.searchsorted(offsets, ids, side="right") - 1


def halo_plan(rank: int, offsets: Ids, halos: Sequence[Ids]) -> HaloPlan:
    """Returns the halo plan of `rank` from the halo nodes of all ranks (relabeled ids, ascending)."""

    def owned_by(part: int, halo: Ids) -> Ids:
        low, high = np.searchsorted(halo, offsets[part : part + 2])
        return halo[low:high]

    parts = range(len(halos))
    return HaloPlan(
        num_owned=int(offsets[rank + 1] - offsets[rank]),
        recv_counts=tuple(len(owned_by(peer, halos[rank])) for peer in parts),
        send_rows=tuple(owned_by(rank, halos[peer]) - offsets[rank] for peer in parts),
    )


COMMUNITY = 16_384
"""Maximum size of a community: 1 MB of rows of 16 float32 columns, the size of an L2 cache; 8 MB of 128 columns, in L3."""

RECENT = 16_384
"""Number of last reads that are assumed to be in the cache: 8 MB of 128 float32 columns."""

_PASSES = 5
_SETTLED = 0.01  # fraction of the nodes: when fewer move, another pass changes little


@dataclass(frozen=True)
class Locality:
    """Fraction of SpMM reads from the cache, over all ranks, in the original and in the new order.

    Attributes:
        before, after: fraction of the reads of local rows, one per edge, of a row among the last `RECENT` reads.
        seconds: seconds of the renumbering.
    """

    before: float
    after: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"Reordered rows in {self.seconds:.2g} s: {self.after:.1%} of the rows that edges read were read shortly before "
            f"(original order: {self.before:.1%})"
        )


def local_relabelling(edge_index: Ids, part: NDArray[np.integer], num_parts: int) -> Relabelling:
    """Returns a relabeling in which rows of a rank that edges connect are close together.

    Communities are from one level of Louvain's method (Blondel et al. 2008, section 2), with at most `COMMUNITY` nodes. Each node
    in turn joins the community of its sources that increases modularity most. Only edges to the node are read: equivalent if
    edges have both directions, and half the work. Communities are ordered by their first nodes, which roughly preserves a good
    order of the user. The result is deterministic. Ids are original ids.
    """
    num_nodes = len(part)
    inside = edge_index[:, part[edge_index[0]] == part[edge_index[1]]]  # so that each community is on one rank
    source, target = torch.from_numpy(inside)
    reads = CSR.from_coo(target, source, num_nodes, num_nodes)
    indptr, indices = reads.indptr.numpy(), reads.indices.numpy()
    first = _communities(
        indptr, indices, np.bincount(inside[0], minlength=num_nodes), COMMUNITY, _PASSES, int(_SETTLED * num_nodes)
    )
    order = np.lexsort((-np.diff(indptr), first, part))
    return Relabelling(order.astype(np.int64), Relabelling.from_assignment(part, num_parts).offsets)


def recent_reads(edge_index: Ids, relabelling: Relabelling, window: int = RECENT) -> float:
    """Returns the fraction of reads of a row among the last `window` reads, when each rank processes its rows in order.

    Only sources that are local to the target's rank count; 1 without such reads.
    """
    new, offsets = relabelling.new_ids(), relabelling.offsets
    source, target = torch.from_numpy(new[edge_index])
    reads = CSR.from_coo(target, source, len(new), len(new))
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    recent, total = _recent(reads.indptr.numpy(), reads.indices.numpy(), owner, window)
    return recent / total if total else 1.0


@compile_loop
def _communities(indptr, indices, out_degree, max_size, passes, settled):  # type: ignore[no-untyped-def]
    """Returns the first node of each node's community, ``[N]``; integer arithmetic avoids decisions by rounding."""
    num_nodes, total = len(indptr) - 1, len(indices)
    community = np.arange(num_nodes)
    size = np.ones(num_nodes, np.int64)
    degrees = out_degree.copy()  # sums over communities
    edges = np.zeros(num_nodes, np.int64)  # from a community to the current node
    for _ in range(passes):
        moved = 0
        for node in range(num_nodes):
            low, high = indptr[node], indptr[node + 1]
            degree, own = high - low, community[node]
            for slot in range(low, high):
                edges[community[indices[slot]]] += 1
            best, most_gained = own, edges[own] * total - degree * (degrees[own] - out_degree[node])
            for slot in range(low, high):
                other = community[indices[slot]]
                gained = edges[other] * total - degree * degrees[other]
                if other != own and gained > most_gained and size[other] < max_size:
                    best, most_gained = other, gained
            for slot in range(low, high):
                edges[community[indices[slot]]] = 0
            if best != own:
                community[node] = best
                size[own] -= 1
                size[best] += 1
                degrees[own] -= out_degree[node]
                degrees[best] += out_degree[node]
                moved += 1
        if moved <= settled:
            break
    first = np.full(num_nodes, num_nodes)
    for node in range(num_nodes):
        first[community[node]] = min(first[community[node]], node)
    return first[community]


@compile_loop
def _recent(indptr, indices, owner, window):  # type: ignore[no-untyped-def]
    """Returns the number of reads of local rows within `window` reads of the row's last read, and the number of reads."""
    last = np.full(len(owner), -window - 1)
    recent = reads = 0
    for row in range(len(owner)):
        for slot in range(indptr[row], indptr[row + 1]):
            source = indices[slot]
            if owner[source] == owner[row]:
                recent += reads - last[source] <= window
                last[source] = reads
                reads += 1
    return recent, reads
