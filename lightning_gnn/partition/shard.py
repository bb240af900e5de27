"""An edge cut as data: which rows and edges each rank holds, and which rows it must exchange.

The rank that owns a node holds all of its in-edges (DGCL section 4.1: the tuples (d_i, d_j, V_ij) are `send_rows`).
Pure functions of a graph. N nodes, E edges, P parts, H halo rows.
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
