"""The topology that explains how fast messages were, alone and together (what DGCL 5.1 takes as given: its Tables 1 and 3).

A *flow* (a, b) is a message from device a to device b; its mirror is (b, a). Two directions of a connection do not compete,
and are alike. :func:`infer` works in four steps:

1. Alone: a pair's bandwidth is the average of its two directions.
2. In pairs: two flows *share* if together they carry less than 0.85 of what they carry alone. Then a hop that both pass is
   full, so what they carry together *is* its bandwidth.
3. From the slowest such bandwidth up, a hop is a largest set of flows of which each two share that bandwidth or less: where
   ways are unique, as between the leaves of a tree, flows that meet two by two all meet in one place. Its bandwidth is the
   median over its pairs. A hop that a slower one hides, because all its flows pass that too, cannot be seen and is no loss.
4. In crowds: a hop gets the bandwidth that all its flows carry at once. Where they carry more than any one hop could, it is
   none, and each two of them share their own. Where all flows out of a device or a host carry less than the hops explain,
   what they carry is a hop of its own: no two of them could fill it.

A link keeps a connection of its own where its bandwidth is below that of its hops. Where both directions compete, as ranks
that copy through one memory do, there is a *bus*: a flow then shares with another and with its mirror. A topology has full
duplex hops only, so each direction of a bus gets half of what both carry. What stays unseen is a hop so wide that no two
flows, and no crowd above, fill it.

P devices, F = P (P - 1) flows, H hops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.planning.topology import Topology
from lightning_gnn.planning.topology_file import topology_from_dict

Flow = tuple[int, int]

SHARING = 0.85
"""Flows share a hop if together they carry less than this part of what is expected without it."""

ALIKE = 1.08
"""Bandwidths are taken for one if their ratio is at most this: DGCL's nearest two, PCIe and QPI, differ by 1.16."""


def all_flows(num_devices: int) -> list[Flow]:
    return list(permutations(range(num_devices), 2))


def pairs_to_measure(num_devices: int) -> list[tuple[Flow, Flow]]:
    """Returns the pairs of flows to time together: one of two that mirror each other, none of a flow and its own mirror."""
    return [
        (f, g)
        for f, g in combinations(all_flows(num_devices), 2)
        if g != f[::-1] and (f, g) <= tuple(sorted((f[::-1], g[::-1])))
    ]


def crowds_to_measure(topology: Topology) -> list[tuple[Flow, ...]]:
    """Returns sets of three or more flows to time together: of each hop (a bus both ways), out of each device and host."""
    flows = all_flows(topology.num_devices)
    hops = range(0, len(topology.hops), 2)
    of_hops = ([f for f in flows if hop in topology.links[f]] for hop in hops)
    buses = [hop for hop in hops if topology.hops[hop].kind == "bus"]
    of_buses = ([f for f in flows if {hop, hop + 1} & {*topology.links[f]}] for hop in buses)
    places = [*((device,) for device in range(topology.num_devices)), *topology.hosts]
    leaving = ([f for f in flows if f[0] in place and f[1] not in place] for place in places)
    found: dict[tuple[Flow, ...], None] = {}
    for crowd in (*of_hops, *of_buses, *leaving):
        if len(crowd) > 2 and tuple(sorted(_mirrored(crowd))) not in found:
            found[tuple(sorted(crowd))] = None
    return list(found)


def fair_rates(topology: Topology, flows: Sequence[Flow]) -> NDArray[np.float64]:
    """Returns the GB/s of each of the `flows` when all run at once and share hops max-min fairly, ``[F]``."""
    passes = np.zeros((len(flows), len(topology.hops)), bool)
    for row, flow in zip(passes, flows):
        row[list(topology.links[flow])] = True
    left, rates = topology.gb_per_s.copy(), np.zeros(len(flows))
    waiting = np.ones(len(flows), bool)
    while waiting.any():
        users = passes[waiting].sum(0)
        share = np.where(users > 0, left / np.maximum(users, 1), np.inf)
        tight = int(share.argmin())
        settled = waiting & passes[:, tight]
        rates[settled] = share[tight]
        left = np.maximum(left - share[tight] * passes[settled].sum(0), 0)
        waiting &= ~settled
    return rates


@dataclass(frozen=True)
class _Shared:
    """One direction of a hop that several links pass, and what it carries."""

    flows: frozenset[Flow]
    gb_per_s: float
    bus: bool = False

    @property
    def crowd(self) -> frozenset[Flow]:
        """The flows that share what the hop carries, and those of a bus its other direction's too."""
        return self.flows | _mirrored(self.flows) if self.bus else self.flows


def infer(
    alone: NDArray[np.float64],
    together: Mapping[tuple[Flow, ...], float],
    hosts: Sequence[Sequence[int]] | None = None,
    name: str = "measured",
) -> Topology:
    """Returns the topology that explains the measurements; see the top of this file.

    Args:
        alone: GB/s of each flow by itself, ``[P, P]``; the diagonal is ignored.
        together: GB/s that flows carry together, by flow: pairs (see :func:`pairs_to_measure`; a pair that is not there is
            taken not to share) and, in a second round, crowds (see :func:`crowds_to_measure`).
        hosts: the devices of each host; by default found by speed, see :func:`hosts_by_speed`.
        name: of the topology.
    """
    num_devices = len(alone)
    off_diagonal = ~np.eye(num_devices, dtype=bool)
    if alone.shape != (num_devices, num_devices) or not (np.isfinite(alone) & (alone > 0))[off_diagonal].all():
        raise ValueError(f"Each ordered pair of devices needs a bandwidth above 0 (got {alone.tolist()}).")
    rate = np.where(off_diagonal, (alone + alone.T) / 2, 1.0)
    hosts = hosts_by_speed(rate) if hosts is None else hosts
    totals = _totals(rate, together)
    buses = _buses(totals, num_devices)
    shared = [*buses, *_cliques(totals)]
    crowds = sorted((crowd for crowd in together if len(crowd) > 2), key=len)
    of_hops = {flows for each in shared for flows in (each.crowd, _mirrored(each.crowd))}
    topology = _topology(rate, shared, hosts, name)
    for crowd in crowds:
        if frozenset(crowd) in of_hops:
            shared = _corrected(shared, frozenset(crowd), together[crowd], topology, totals)
    for crowd in crowds:
        if frozenset(crowd) in of_hops:
            continue
        topology = _topology(rate, shared, hosts, name)
        if together[crowd] < SHARING * fair_rates(topology, crowd).sum():
            shared.append(_Shared(frozenset(crowd), together[crowd]))
    return _topology(rate, _visible(shared), hosts, name)


def _mirrored(flows: Iterable[Flow]) -> frozenset[Flow]:
    return frozenset((b, a) for a, b in flows)


def _totals(rate: NDArray[np.float64], together: Mapping[tuple[Flow, ...], float]) -> NDArray[np.float64]:
    """Returns what two flows carry together if they share, else infinity, ``[F, F]``, by position in :func:`all_flows`."""
    position = {flow: index for index, flow in enumerate(all_flows(len(rate)))}
    totals = np.full((len(position), len(position)), np.inf)
    for pair, total in together.items():
        if len(pair) == 2 and total < SHARING * (rate[pair[0]] + rate[pair[1]]):
            for f, g in (pair, (pair[0][::-1], pair[1][::-1])):
                totals[position[f], position[g]] = totals[position[g], position[f]] = total
    return totals


def _buses(totals: NDArray[np.float64], num_devices: int) -> list[_Shared]:
    """Returns groups of links most of which compete in both directions; takes their pairs out of `totals`."""
    flows = all_flows(num_devices)
    forward = np.array([index for index, (a, b) in enumerate(flows) if a < b], np.int64)
    backward = np.array([flows.index(flows[index][::-1]) for index in forward], np.int64)
    finite = np.isfinite(totals)
    both = finite[np.ix_(forward, forward)] & finite[np.ix_(forward, backward)]
    found, left = [], set(range(len(forward)))
    while left:
        group = {min(left)}
        while grown := {int(each) for each in np.flatnonzero(both[sorted(group)].any(0))} - group:
            group |= grown
        left -= group
        links = np.array(sorted(group))
        if len(links) > 1 and both[np.ix_(links, links)].sum() > len(links) * (len(links) - 1) / 2:
            ends = np.concatenate([forward[links], backward[links]])
            inside = totals[np.ix_(ends, ends)]
            usual = float(np.median(inside[np.isfinite(inside)]))
            found.append(_Shared(frozenset(flows[index] for index in forward[links]), usual / 2, bus=True))
            totals[np.ix_(ends, ends)] = np.inf
    return found


def _cliques(totals: NDArray[np.float64]) -> list[_Shared]:
    """Returns sets of flows of which each two share, slow ones first, until every pair that shares is in one of them."""
    flows = all_flows(round((1 + (1 + 4 * len(totals)) ** 0.5) / 2))
    mirror = np.array([flows.index(flow[::-1]) for flow in flows])
    seen = np.isinf(totals)
    found = []
    firsts, seconds = np.nonzero(np.triu(~seen))
    for index in np.argsort(totals[firsts, seconds], kind="stable"):
        u, v = int(firsts[index]), int(seconds[index])
        if seen[u, v]:
            continue
        near = totals <= ALIKE * totals[u, v]
        members, candidates = [u, v], near[u] & near[v]
        while candidates.any():
            left = np.where(candidates, (near & candidates).sum(1), -1)  # candidates that would remain
            best = int(left.argmax())
            members.append(best)
            candidates &= near[best]
        inside = totals[np.ix_(members, members)]
        usual = inside[np.isfinite(inside) & (inside >= totals[u, v] / ALIKE)]
        found.append(_Shared(frozenset(flows[member] for member in members), float(np.median(usual))))
        for ends in (np.array(members), mirror[members]):
            seen[np.ix_(ends, ends)] = True
    return _visible(found)


def _visible(shared: Sequence[_Shared]) -> list[_Shared]:
    """Returns the hops without those that a hop with the same and perhaps more flows makes superfluous, being as slow."""
    kept: list[_Shared] = []
    for each in sorted(shared, key=lambda one: (-len(one.flows), one.gb_per_s)):
        hidden = (
            other.gb_per_s <= ALIKE * each.gb_per_s
            and (each.flows <= other.flows or _mirrored(each.flows) <= other.flows)
            for other in kept
        )
        if not any(hidden):
            kept.append(each)
    return kept


def _corrected(
    shared: Sequence[_Shared], crowd: frozenset[Flow], carried: float, topology: Topology, totals: NDArray[np.float64]
) -> list[_Shared]:
    """Returns the hops after all flows of one have run at once and `carried` so many GB/s."""
    expected = fair_rates(topology, sorted(crowd)).sum()
    position = {flow: index for index, flow in enumerate(all_flows(topology.num_devices))}
    corrected = []
    for each in shared:
        if each.crowd not in (crowd, _mirrored(crowd)):
            corrected.append(each)
        elif each.bus:
            corrected.append(replace(each, gb_per_s=carried / 2))
        elif carried > expected / SHARING:
            for f, g in combinations(sorted(each.flows), 2):
                corrected.append(_Shared(frozenset((f, g)), float(totals[position[f], position[g]])))
        elif each.gb_per_s <= ALIKE * expected:  # else another hop limits the crowd, and it says nothing about this one
            corrected.append(replace(each, gb_per_s=carried))
        else:
            corrected.append(each)
    return corrected


def hosts_by_speed(rate: NDArray[np.float64]) -> list[list[int]]:
    """Returns groups of devices that links at least half as fast as the fastest one hold together.

    `rate` is GB/s between each two devices, ``[P, P]``, symmetric; the diagonal is ignored.
    """
    off_diagonal = ~np.eye(len(rate), dtype=bool)
    reach = ((rate >= rate[off_diagonal].max(initial=0) / 2) & off_diagonal) | ~off_diagonal
    for _ in range(len(rate).bit_length()):
        reach = (reach.astype(np.int64) @ reach) > 0
    return [list(group) for group in sorted({tuple(np.flatnonzero(row).tolist()) for row in reach})]


def _sockets(host: Sequence[int], shared: Sequence[_Shared]) -> list[list[int]]:
    """Returns the two halves of a host between which a hop lies, that is, whose flows all go from one to the other."""
    for each in shared:
        sources, targets = ({flow[end] for flow in each.flows} & set(host) for end in (0, 1))
        if min(len(sources), len(targets)) > 1 and not sources & targets and sources | targets == set(host):
            return sorted([sorted(sources), sorted(targets)])
    return [list(host)]


def _levels(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns each value's level: the median of those that are taken for one, so that equal links come out equal."""
    levels, rest = values.copy(), np.argsort(values)
    while len(rest):
        count = int(np.searchsorted(values[rest], ALIKE * values[rest[0]], side="right"))
        levels[rest[:count]] = np.median(values[rest[:count]])
        rest = rest[count:]
    return levels


def _topology(
    rate: NDArray[np.float64], shared: Sequence[_Shared], hosts: Sequence[Sequence[int]], name: str
) -> Topology:
    """Returns the topology of these shared hops, and of a connection for each link that is slower than its hops."""
    titles: list[str] = []
    for each in shared:
        ends = [",".join(map(str, sorted({flow[end] for flow in each.flows}))) for end in (0, 1)]
        title = ">".join(ends)
        titles.append(title if title not in titles else f"{title} ({len(titles)})")
    widths = _levels(np.array([each.gb_per_s for each in shared]))
    pairs = [(a, b) for a, b in all_flows(len(rate)) if a < b]
    own = _levels(np.array([rate[pair] for pair in pairs]))
    links = []
    for (a, b), gb_per_s in zip(pairs, own):
        via = [title for title, each in zip(titles, shared) if (a, b) in each.flows]
        via += [f"-{title}" for title, each in zip(titles, shared) if (b, a) in each.flows]
        narrowest = min((width for width, each in zip(widths, shared) if {(a, b), (b, a)} & each.flows), default=np.inf)
        alone = {"kind": "link", "gb_per_s": float(gb_per_s)} if gb_per_s * ALIKE < narrowest else {}
        links.append({"a": a, "b": b, "via": via, **alone})
    return topology_from_dict(
        {
            "name": name,
            "devices": len(rate),
            "hosts": [{"devices": list(host), "sockets": _sockets(host, shared)} for host in hosts],
            "hops": [
                {"name": title, "kind": "bus" if each.bus else "shared", "gb_per_s": float(width)}
                for title, width, each in zip(titles, widths, shared)
            ],
            "links": links,
        }
    )
