"""The order of rows within each part: neighbours near each other, so that SpMM finds their rows in the cache.

Communities of the part, and inside a community the nodes of highest degree first. A community's rows are read by each
other while they are in the cache; rows of like degree, one after the other, have loops of like length. Measured against it on
five graphs: reverse Cuthill-McKee and degrees alone are slower on most, communities by METIS as fast at more set-up.

N nodes, E edges, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from lightning_gnn.kernels import CSR
from lightning_gnn.partition.shard import Ids, Relabelling

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


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
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
