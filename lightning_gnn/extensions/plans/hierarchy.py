"""Plans in two stages, between machines and inside them, for more ranks than can be planned link by link.

Each row crosses to a machine once, to one of the ranks there that read it, its gateway; this one sends it to the others. A rank's
part is made of its own rows, of what its readers ask for and of the halos of its own machine, so neither time nor memory grows
with the number of ranks beyond a few numbers for each. DGCL (section 4.1) partitions in such a hierarchy, and plans over a search
of all links; what moves here is what its trees move where nothing but the machines' ports is slow.

P ranks, N owned rows, H halo rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.extensions.plans.tables import RankPlan, Stage
from lightning_gnn.extensions.plans.topology import ETHERNET, SHARED_MEMORY, SOCKET_LATENCY, Hosts
from lightning_gnn.partition.shard import HaloPlan, Ids


def gateways(readers: Sequence[Ids]) -> list[NDArray[np.bool_]]:
    """Returns which of its rows each reader of a machine receives from their owners, bool ``[rows]`` each.

    Of n readers of a row it is the one at place id modulo n, so that owners and readers agree without asking, and none relays
    what it does not read.

    Args:
        readers: the ids that each reads, without duplicates.
    """
    ids = np.concatenate(readers)
    order = np.argsort(ids, kind="stable")  # the readers of a row stay in their order
    ids = ids[order]
    first = np.flatnonzero(np.diff(ids, prepend=-1))
    count = np.diff(first, append=len(ids))
    chosen = np.zeros(len(ids), np.bool_)
    chosen[order[first + ids[first] % count]] = True
    return np.split(chosen, np.cumsum([len(each) for each in readers])[:-1])


def plan_through_hosts(rank: int, hosts: Hosts, rows: HaloPlan, halos: Sequence[Ids], offsets: Ids) -> RankPlan:
    """Returns what `rank` does in the plan of two stages.

    In the first, owners send each row to its gateway on each other machine, and to all readers on their own; in the second,
    gateways send rows to the other readers. Backward, gateways add the gradients of a machine, and one row goes to the owner.

    Args:
        rank: whose part.
        hosts: of the ranks.
        rows: what goes directly from and to this rank.
        halos: of each rank, the ids that it reads from others, ascending; those of the rank's own machine are looked at.
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
    # Of what others read, all that matters here is what this rank reads, too.
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
    """Returns what :func:`prices` needs of a rank, int64 ``[3, 4]``: directly, in the first stage and in the second, the rows
    that it sends to and receives from other machines, the most from a rank of its own, and its messages."""
    near = hosts.host_of == hosts.host_of[rank]
    direct = np.array([len(each) for each in rows.send_rows]), np.array(rows.recv_counts)
    stages = [tuple(np.array([len(each) for each in ends]) for ends in (s.sends, s.receives)) for s in tables.forward]
    found = []
    for out, into in (direct, *stages):
        messages = max(np.count_nonzero(out), np.count_nonzero(into))
        found.append([out[~near].sum(), into[~near].sum(), into[near].max(), messages])
    return np.array(found, np.int64)


def prices(hosts: Hosts, loads: NDArray[np.int64]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns the :attr:`~lightning_gnn.extensions.plans.plan_cost.PlanCost.price` of direct rows and of those in two stages,
    over machines as :func:`~lightning_gnn.extensions.plans.presets.machines` has them.

    Args:
        hosts: of the ranks.
        loads: of each rank, ``[P, 3, 4]``, see :func:`loads`.
    """
    port = np.zeros((len(hosts.ranks), 3, 2), np.int64)
    np.add.at(port, hosts.host_of, loads[:, :, :2])
    per_byte = np.maximum(port.max((0, 2)) / ETHERNET, loads[:, :, 2].max(0) / SHARED_MEMORY) / 1e9
    messages = loads[:, :, 3].max(0)
    stage, more = SOCKET_LATENCY["stage_seconds"], SOCKET_LATENCY["message_seconds"]
    fixed = np.where(messages > 0, stage + (messages - 1) * more, 0.0)
    return (float(fixed[0]), float(per_byte[0])), (float(fixed[1:].sum()), float(per_byte[1:].sum()))
