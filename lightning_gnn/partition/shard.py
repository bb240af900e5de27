"""An edge cut as data: which rows and edges each rank holds, and which rows it must exchange.

The rank that owns a node holds all of its in-edges (DGCL section 4.1: the tuples (d_i, d_j, V_ij) are `send_rows`).
Pure functions of a graph. N nodes, E edges, P parts, H halo rows.

Rows of a part are ordered so that SpMM finds its neighbours' rows in the cache: communities of the part, and inside a community
the nodes of highest degree first. A community's rows are read by each other while they are in the cache; rows of like degree,
one after the other, have loops of like length. Measured against it on five graphs: reverse Cuthill-McKee and degrees alone are
slower on most, communities by METIS as fast at more set-up.
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
from lightning_gnn.kernels.loops import compiled

Ids = NDArray[np.int64]

ShortIds = NDArray[Any]
"""What there is one of for each edge: of the shortest :func:`id_dtype`."""


def id_dtype(count: int) -> np.dtype[Any]:
    """Returns the dtype of ids below `count`: int32 as far as it goes, which halves what edges take."""
    return np.dtype(np.int32) if count <= 2**31 else np.dtype(np.int64)


@dataclass(frozen=True)
class HaloPlan:
    """What one rank sends and receives in S.

    Attributes:
        num_owned: N of this rank.
        recv_counts: per peer, how many halo rows it sends; halo rows lie in peer order.
        send_rows: per peer, the owned rows (local ids) that it reads, in the order of its halo.
    """

    num_owned: int
    recv_counts: tuple[int, ...]
    send_rows: tuple[Ids, ...]


@dataclass(frozen=True)
class Relabelling:
    """Node order in which each part is one contiguous range.

    Attributes:
        n_id: original id of each row, int64 ``[N]``, parts in order.
        offsets: first row of each part and the end, int64 ``[P + 1]``.
    """

    n_id: Ids
    offsets: Ids

    @classmethod
    def from_assignment(cls, part: NDArray[np.integer], num_parts: int) -> Relabelling:
        """Returns the relabelling for ``part`` ``[N]``, values 0 to `num_parts` - 1; original order within a part."""
        counts = np.bincount(part, minlength=num_parts)
        return cls(np.argsort(part, kind="stable").astype(np.int64), np.cumsum([0, *counts], dtype=np.int64))

    def new_ids(self) -> Ids:
        """Returns the row of each original id, int64 ``[N]``."""
        new = np.empty_like(self.n_id)
        new[self.n_id] = np.arange(len(self.n_id))
        return new


@dataclass(frozen=True)
class EdgeCutPart:
    """One part: its edges in local ids (owned rows first, halo rows after them) and its halo.

    Attributes:
        edge_index: ``[2, E_p]``, of :func:`id_dtype`; targets are owned rows, ascending, sources owned or halo.
        edge_ids: position of each edge in the whole graph's list, int64 ``[E_p]``, ascending for each target.
        halo: relabelled ids of the halo rows, ascending and so grouped by owner, int64 ``[H_p]``. In the order of their
            first use, they cost owners more when gathered and added to than they save those who read them.
    """

    edge_index: ShortIds
    edge_ids: Ids
    halo: Ids


def edge_cut_parts(edge_index: Ids, relabelling: Relabelling) -> Iterator[EdgeCutPart]:
    """Yields the parts of edges in original ids, ``[2, E]``; edges come in the order of their targets' rows, as in a CSR."""
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
    """Returns the ranks whose ranges, which begin at `offsets` ``[P + 1]``, hold ids ``[n]``."""
    return np.searchsorted(offsets, ids, side="right") - 1


def halo_plan(rank: int, offsets: Ids, halos: Sequence[Ids]) -> HaloPlan:
    """Returns what `rank` exchanges, from the halos of all parts (relabelled ids, ascending)."""

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
"""Most nodes of a community: 1 MB of rows of 16 float32 columns, as much as an L2 cache holds; 8 MB of 128 columns, in L3."""

RECENT = 16_384
"""A row is taken to be in the cache still if it was among the last so many that were read: 8 MB of 128 float32 columns."""

_PASSES = 5
_SETTLED = 0.01  # of the nodes: when fewer move, another pass changes little


@dataclass(frozen=True)
class Locality:
    """How often SpMM finds a row in the cache, over all parts, in the original order and renumbered.

    Attributes:
        before, after: share of the reads of owned rows, one per edge, of a row that was among the last `RECENT` reads.
        seconds: that the renumbering took.
    """

    before: float
    after: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"Rows renumbered in {self.seconds:.2g} s: of the rows that edges read, {self.after:.1%} were read shortly before "
            f"(in the original order {self.before:.1%})"
        )


def local_relabelling(edge_index: Ids, part: NDArray[np.integer], num_parts: int) -> Relabelling:
    """Returns the relabelling for an assignment in which rows of a part that edges connect are near each other.

    Communities are those of one level of Louvain's method (Blondel et al. 2008, section 2), of at most `COMMUNITY` nodes:
    each node in turn joins that community of its sources that raises the modularity most. Edges into the node alone are
    looked at: the same where edges come in both directions, and half the work. Communities come in the order of their
    first nodes, so that a good order of the user's is kept roughly. The same input gives the same order. Ids are original ones.
    """
    num_nodes = len(part)
    inside = edge_index[:, part[edge_index[0]] == part[edge_index[1]]]  # so that no community leaves its part
    source, target = torch.from_numpy(inside)
    reads = CSR.from_coo(target, source, num_nodes, num_nodes)
    indptr, indices = reads.indptr.numpy(), reads.indices.numpy()
    first = _communities(
        indptr, indices, np.bincount(inside[0], minlength=num_nodes), COMMUNITY, _PASSES, int(_SETTLED * num_nodes)
    )
    order = np.lexsort((-np.diff(indptr), first, part))
    return Relabelling(order.astype(np.int64), Relabelling.from_assignment(part, num_parts).offsets)


def recent_reads(edge_index: Ids, relabelling: Relabelling, window: int = RECENT) -> float:
    """Returns the share of reads that find a row among the last `window` ones, when each part goes through its rows.

    Read are the sources that the target's part owns; 1 if there are none.
    """
    new, offsets = relabelling.new_ids(), relabelling.offsets
    source, target = torch.from_numpy(new[edge_index])
    reads = CSR.from_coo(target, source, len(new), len(new))
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    recent, total = _recent(reads.indptr.numpy(), reads.indices.numpy(), owner, window)
    return recent / total if total else 1.0


@compiled
def _communities(indptr, indices, out_degree, most, passes, settled):  # type: ignore[no-untyped-def]
    """Returns the first node of each node's community, ``[N]``. In integers: no rounding decides between communities."""
    num_nodes, total = len(indptr) - 1, len(indices)
    community = np.arange(num_nodes)
    size = np.ones(num_nodes, np.int64)
    degrees = out_degree.copy()  # summed over a community
    edges = np.zeros(num_nodes, np.int64)  # from a community to the node at hand
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
                if other != own and gained > most_gained and size[other] < most:
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


@compiled
def _recent(indptr, indices, owner, window):  # type: ignore[no-untyped-def]
    """Returns how many reads of owned rows are within `window` reads of the last one of the same row, and their number."""
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
