"""Replicated neighborhoods: rows of other ranks that a group of ranks stores and computes instead of receiving them.

Source: DGCL (EuroSys'21) section 3 (replication: each rank alone) and Table 5 (DGCL-R: the ranks of each machine together).

A rank's rows are its local nodes, then its replicas. It has all in-edges of its rows. A source that no rank of the group has is
outside the neighborhood; one zero row represents all such sources. After the l-th of K propagations, rows within K - l hops of
the group's nodes are correct. Rows further out are not, and no correct row reads them.

N nodes, E edges, P ranks, K hops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.kernels.loops import compile_loop
from lightning_gnn.partition.layout import Replicas
from lightning_gnn.partition.shard import Ids

_MOST_GROUPS = 64  # a set of groups is a 64-bit mask


@dataclass(frozen=True)
class ReplicatedRows:
    """Rows of every rank with replicated neighborhoods.

    Ids number the rows of rank 0, then the rows of rank 1, and so on: a node on several groups has several ids.

    Attributes:
        offsets: first id of each rank and the end, int64 ``[P + 1]``.
        rows: relabeled ids of the nodes of each rank: local nodes, then replicas, each ascending.
        halos: ids of the rows that each rank reads from other ranks of its group, ascending.
        num_edges: in-edges of each rank's rows, int64 ``[P]``.
    """

    offsets: Ids
    rows: tuple[Ids, ...]
    halos: tuple[Ids, ...]
    num_edges: Ids
    _holder: tuple[NDArray[np.int16], ...]  # by group: the rank that has each node, -1 for none
    _group: NDArray[np.int64]  # of each rank

    def edges_of(self, rank: int, edge_index: Ids) -> tuple[Ids, Ids]:
        """Returns the in-edges of a rank's rows in local ids, int64 ``[2, E_r]``, and their positions in `edge_index`, ``[E_r]``.

        Local ids number local nodes, replicas, rows of the group's other ranks, and last the zero row. Targets ascend.
        """
        holder = self._holder[self._group[rank]]
        rows, halo = self.rows[rank], self.halos[rank]
        chosen = np.flatnonzero(holder[edge_index[1]] == rank)
        source, target = edge_index[:, chosen]
        beyond = len(rows) + len(halo)
        local = np.full(len(holder), beyond)
        local[rows] = np.arange(len(rows))
        local[np.concatenate(self.rows)[halo]] = len(rows) + np.arange(len(halo))
        order = np.argsort(local[target], kind="stable")
        return np.stack([local[source], local[target]])[:, order], chosen[order]


def hold(edge_index: Ids, offsets: Ids, replicas: Replicas) -> ReplicatedRows:
    """Returns the rows of every rank with replicated neighborhoods.

    A replica is assigned to the rank of its group that reads it most, from the group's own nodes outwards.
    """
    num_ranks = len(offsets) - 1
    group = np.empty(num_ranks, np.int64)
    for number, ranks in enumerate(replicas.groups):
        group[list(ranks)] = number
    owner = np.repeat(np.arange(num_ranks, dtype=np.int16), np.diff(offsets))
    reached = within_hops(edge_index, group[owner], len(replicas.groups), replicas.hops)
    holders = []
    for number, ranks in enumerate(replicas.groups):
        bit = np.uint64(1 << number)
        levels = [(masks & bit).astype(np.bool_) for masks in reached]
        holders.append(_holders(edge_index, owner, levels, np.asarray(ranks, np.int16)))
    num_edges = np.zeros(num_ranks, np.int64)
    rows: list[Ids] = [np.empty(0, np.int64)] * num_ranks
    for holder, ranks in zip(holders, replicas.groups):
        num_edges += np.bincount(holder[edge_index[1]] + 1, minlength=num_ranks + 1)[1:]
        for rank in ranks:
            held = np.flatnonzero(holder == rank)
            own = owner[held] == rank
            rows[rank] = np.concatenate([held[own], held[~own]])
    ids = np.concatenate([[0], np.cumsum([len(each) for each in rows])])
    halos = [np.empty(0, np.int64)] * num_ranks
    for holder, ranks in zip(holders, replicas.groups):
        if len(ranks) == 1:
            continue
        number_of = np.zeros(len(owner), np.int64)
        for rank in ranks:
            number_of[rows[rank]] = np.arange(ids[rank], ids[rank + 1])
        held_by, read_by = holder[edge_index]
        read = (held_by >= 0) & (read_by >= 0) & (held_by != read_by)
        source, read_by = edge_index[0, read], read_by[read]
        for rank in ranks:
            halos[rank] = np.unique(number_of[source[read_by == rank]])
    return ReplicatedRows(ids, tuple(rows), tuple(halos), num_edges, tuple(holders), group)


def within_hops(edge_index: Ids, group: NDArray[np.integer], num_groups: int, hops: int) -> list[NDArray[np.uint64]]:
    """Returns the groups that each node reaches by paths of at most `hops` edges: bit g for group g.

    Args:
        edge_index: edges, int64 ``[2, E]``.
        group: group of each node, ``[N]``.
        num_groups: number of groups, at most 64.
        hops: K.

    Returns:
        For 0 to K hops, uint64 ``[N]`` each.
    """
    if num_groups > _MOST_GROUPS:
        raise ValueError(f'plan="replicate" supports 64 ranks, "dgcl_r" 64 machines, got {num_groups}. Use plan="p2p".')
    reached = [np.uint64(1) << group.astype(np.uint64)]
    for _ in range(hops):
        reached.append(_grown(edge_index[0], edge_index[1], reached[-1]))
        if np.array_equal(reached[-1], reached[-2]):
            break
    return reached + [reached[-1]] * (hops + 1 - len(reached))


def replication_factors(edge_index: Ids, group: NDArray[np.integer], num_groups: int, hops: int) -> tuple[float, ...]:
    """Returns the average number of copies of a node, after 1 to K hops (DGCL Figure 4); see :func:`within_hops`."""
    reached = within_hops(edge_index, group, num_groups, hops)[1:]
    bits = [[(masks >> np.uint64(g) & np.uint64(1)).sum() for g in range(num_groups)] for masks in reached]
    return tuple(float(sum(counts)) / max(1, len(group)) for counts in bits)


def _holders(
    edge_index: Ids, owner: NDArray[np.int16], levels: Sequence[NDArray[np.bool_]], ranks: NDArray[np.int16]
) -> NDArray[np.int16]:
    """Returns the rank of a group that has each node, -1 for none, ``[N]``."""
    holder = np.where(levels[0], owner, np.int16(-1))
    if len(ranks) == 1:
        holder[levels[-1]] = ranks[0]
        return holder
    position = np.zeros(ranks.max() + 1, np.int64)
    position[ranks] = np.arange(len(ranks))
    for inner, outer in pairwise(levels):
        new = np.flatnonzero(outer & ~inner)
        votes = np.zeros((len(new), len(ranks)), np.int64)
        read = (outer & ~inner)[edge_index[0]] & inner[edge_index[1]]
        source, target = edge_index[:, read]
        np.add.at(votes, (np.searchsorted(new, source), position[holder[target]]), 1)
        holder[new] = ranks[votes.argmax(1)]
    return holder


@compile_loop
def _grown(source, target, reached):  # type: ignore[no-untyped-def]
    grown = reached.copy()
    for edge in range(len(source)):
        grown[source[edge]] |= reached[target[edge]]
    return grown
