"""Two-stage plans, between machines and inside machines, for more ranks than link-by-link planning supports.

Each row is sent to a machine once. The receiver is one of the ranks there that read the row, its gateway, which sends it to the
others. A rank's part of the plan depends on its own rows, the ids that its readers request, and the halos of its own machine. So
time and memory grow with the number of ranks only by a few values per rank. DGCL (section 4.1) partitions in such a hierarchy,
and plans by a search over all links. The two-stage plan sends the same rows as DGCL's trees if only the machines' ports are slow.

P ranks, N local nodes, H halo nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.extensions.plans.tables import RankPlan, Stage
from lightning_gnn.extensions.plans.topology import ETHERNET, SHARED_MEMORY, SOCKET_LATENCY, Hosts
from lightning_gnn.partition.shard import HaloPlan, Ids


def gateways(readers: Sequence[Ids]) -> list[NDArray[np.bool_]]:
    """Returns, for each reader of a machine, a mask of the rows that it receives from their owners, bool ``[rows]`` each.

    The gateway of a row with n readers is reader number (id modulo n). So owners and readers agree without messages, and no rank
    relays a row that it does not read.

    Args:
        readers: for each reader, the ids that it reads, without duplicates.
    """
    ids = np.concatenate(readers)
    order = np.argsort(ids, kind="stable")  # stable: keeps the readers of each row in order
    ids = ids[order]
    first = np.flatnonzero(np.diff(ids, prepend=-1))
    count = np.diff(first, append=len(ids))
    chosen = np.zeros(len(ids), np.bool_)
    chosen[order[first + ids[first] % count]] = True
    return np.split(chosen, np.cumsum([len(each) for each in readers])[:-1])


def plan_through_hosts(rank: int, hosts: Hosts, rows: HaloPlan, halos: Sequence[Ids], offsets: Ids) -> RankPlan:
    """Returns the part of `rank` in the two-stage plan.

    In the first stage, owners send each row to its gateway on each other machine, and to all readers on their own machine. In the
    second stage, gateways send rows to the other readers. Backward, gateways add the gradients of a machine and send one row to
    the owner.

    Args:
        rank: the rank.
        hosts: machines of the ranks.
        rows: rows of the direct exchange from and to this rank.
        halos: for each rank, the ids of its halo nodes, ascending; only entries of ranks on the rank's own machine are read.
        offsets: first id of each rank and the end, ``[P + 1]``.
    """
    size, owned, halo = len(offsets) - 1, rows.num_owned, np.asarray(halos[rank])
    host_of = hosts.host_of
    near_ranks = hosts.ranks[host_of[rank]]
    sends: list[Ids] = list(rows.send_rows)
    for host, ranks in enumerate(hosts.ranks):
        if host != host_of[rank]:
            asked = [rows.send_rows[peer] for peer in ranks]
            for peer, sent, chosen in zip(ranks, asked, gateways([each + offsets[rank] for each in asked])):
                sends[peer] = sent[chosen]

    far = host_of[np.searchsorted(offsets, halo, side="right") - 1] != host_of[rank]
    ids, far_rows = halo[far], owned + np.flatnonzero(far)
    # Rows that other ranks of the machine read matter here only if this rank reads them, too.
    shared = [ids if peer == rank else np.intersect1d(ids, halos[peer], assume_unique=True) for peer in near_ranks]
    from_owners = gateways(shared)
    mine = from_owners[near_ranks.index(rank)]
    received = ~far
    received[far] = mine
    first = owned + np.flatnonzero(received)
    receives = np.split(first, np.searchsorted(halo[received], offsets[1:-1]))

    nothing = np.empty(0, np.int64)
    relayed, arrives = [nothing] * size, [nothing] * size
    for peer, common, chosen in zip(near_ranks, shared, from_owners):
        if peer != rank:
            place = np.searchsorted(ids, common)
            relayed[peer], arrives[peer] = far_rows[place[mine[place]]], far_rows[place[chosen]]
    forward = Stage(tuple(sends), tuple(receives)), Stage(tuple(relayed), tuple(arrives))
    backward = tuple(Stage(stage.receives, stage.sends) for stage in reversed(forward))
    return RankPlan(owned, len(halo), 0, forward, backward)


def loads(rank: int, hosts: Hosts, rows: HaloPlan, tables: RankPlan) -> NDArray[np.int64]:
    """Returns the counts of one rank for :func:`prices`, int64 ``[3, 4]``.

    The rows are the direct exchange, the first stage and the second stage. The columns count the rows sent to and received from
    other machines, the most rows received from one rank of the same machine, and messages.
    """
    near = hosts.host_of == hosts.host_of[rank]
    direct = np.array([len(each) for each in rows.send_rows]), np.array(rows.recv_counts)
    stages = [tuple(np.array([len(each) for each in ends]) for ends in (s.sends, s.receives)) for s in tables.forward]
    found = []
    for out, into in (direct, *stages):
        messages = max(np.count_nonzero(out), np.count_nonzero(into))
        found.append([out[~near].sum(), into[~near].sum(), into[near].max(), messages])
    return np.array(found, np.int64)


def prices(hosts: Hosts, loads: NDArray[np.int64]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns the :attr:`~lightning_gnn.extensions.plans.plan_cost.PlanCost.price` of direct and of two-stage exchanges.

    The machines are modeled as in :func:`~lightning_gnn.extensions.plans.presets.machines`.

    Args:
        hosts: machines of the ranks.
        loads: the result of :func:`loads` for each rank, ``[P, 3, 4]``.
    """
    port = np.zeros((len(hosts.ranks), 3, 2), np.int64)
    np.add.at(port, hosts.host_of, loads[:, :, :2])
    per_byte = np.maximum(port.max((0, 2)) / ETHERNET, loads[:, :, 2].max(0) / SHARED_MEMORY) / 1e9
    messages = loads[:, :, 3].max(0)
    stage, more = SOCKET_LATENCY["stage_seconds"], SOCKET_LATENCY["message_seconds"]
    fixed = np.where(messages > 0, stage + (messages - 1) * more, 0.0)
    return (float(fixed[0]), float(per_byte[0])), (float(fixed[1:].sum()), float(per_byte[1:].sum()))
