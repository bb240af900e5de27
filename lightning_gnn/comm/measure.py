"""How fast messages between the running ranks are, alone and together, over the same transport as in training.

Every timing starts at a barrier, sends one message per flow and ends when the last one has arrived, as a stage of a plan does
(DGCL section 5.1). Messages that run together are as long as would make them end together if nothing unknown slowed them.
Noise from elsewhere only slows down, so of several timings the fastest counts.

P ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray

from lightning_gnn.comm.detect import hosts_of
from lightning_gnn.comm.group import CommunicationError, World
from lightning_gnn.comm.shared_memory import PeerError
from lightning_gnn.comm.transport import by_peer, rows_of
from lightning_gnn.devices import synchronize
from lightning_gnn.planning.infer import (
    SHARING,
    Flow,
    all_flows,
    crowds_to_measure,
    fair_rates,
    infer,
    pairs_to_measure,
)
from lightning_gnn.planning.topology import Topology

REPEATS = 3
FIRST_BYTES = 1 << 16
QUICK_SECONDS, QUICK_BYTES = 0.02, 16_000_000
SHORT_BYTES, SHORT_REPEATS = 64, 10
UNEVEN = 1.25

Progress = Callable[[str, int, int], None]
"""Told the phase, how many of its timings are done, and how many there are."""


def transfer_seconds(world: World, num_bytes: NDArray[np.int64]) -> float:
    """Returns how long messages of ``num_bytes[a, b]`` from a to b take until the last has arrived; runs on all ranks.

    Raises:
        CommunicationError: a message did not arrive; names the peer.
    """
    sent, received = num_bytes[world.rank].tolist(), num_bytes[:, world.rank].tolist()
    out = world.scratch((sum(sent),), torch.uint8)
    rows_of(out).fill_(world.rank)  # memory that nobody has touched is faster to read than rows are
    into = torch.zeros(sum(received), dtype=torch.uint8, device=world.device)
    world.barrier()
    synchronize(world.device)
    began = time.perf_counter()
    try:
        world.transport.start_each(by_peer(out, sent), by_peer(into, received))()
    except PeerError as error:
        raise CommunicationError(
            f"Rank {world.rank} got nothing from, or could not send to, rank {error.peer}: {error}. Every two ranks must reach "
            "each other: look for a firewall between them, or name the interface with GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME."
        ) from error
    synchronize(world.device)
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=world.device)
    return float(world.all_gather(seconds, "Timing of messages").max())


class Stopwatch:
    """Times flows between the ranks; all ranks make the same calls and get the same results.

    Args:
        world: the ranks.
        seconds: that a message alone should take: longer is more exact.
        most_bytes: that a message may have.
    """

    def __init__(self, world: World, seconds: float, most_bytes: int) -> None:
        self._world, self._seconds, self._most_bytes = world, seconds, most_bytes

    def _carried(self, flows: Sequence[Flow], lengths: NDArray[np.int64]) -> float:
        table = np.zeros((self._world.size, self._world.size), np.int64)
        table[tuple(np.array(flows).T)] = lengths
        return float(lengths.sum()) / transfer_seconds(self._world, table) / 1e9

    def alone(self, flow: Flow) -> float:
        """Returns the GB/s of one flow."""
        self._carried([flow], np.array([FIRST_BYTES]))  # NCCL connects two ranks at their first message
        length = FIRST_BYTES
        while True:
            carried = max(self._carried([flow], np.array([length])) for _ in range(REPEATS))
            enough = min(self._most_bytes, int(carried * 1e9 * self._seconds))
            if length * 1.5 >= enough:
                return carried
            length = min(enough, 16 * length)  # step by step: how long starting takes is not known yet

    def together(self, flows: Sequence[Flow], rates: Sequence[float], repeats: int = 1) -> float:
        """Returns the GB/s that `flows` carry at once; repeats what is much slower than the sum of the expected `rates`."""
        expected = np.array(rates)
        seconds = min(self._seconds, self._most_bytes / (expected.max() * 1e9))
        lengths = np.maximum(expected * 1e9 * seconds, 1).astype(np.int64)
        best = 0.0
        for _ in range(repeats):
            best = max(best, self._carried(flows, lengths))
            if best >= SHARING * expected.sum():
                break
        return best


def fixed_seconds(world: World) -> tuple[float, float]:
    """Returns what a stage of messages takes whatever its size, and what each further message of a rank in it takes, in seconds.

    The first is the median over flows of a single short message, the second what all flows at once take longer, by message.
    """
    size = world.size

    def least(num_bytes: NDArray[np.int64]) -> float:
        return min(transfer_seconds(world, num_bytes) for _ in range(SHORT_REPEATS))

    single = [np.zeros((size, size), np.int64) for _ in range(size)]
    for rank, table in enumerate(single):
        table[rank, (rank + 1) % size] = SHORT_BYTES
    one = float(np.median([least(table) for table in single]))
    if size == 2:
        return one, 0.0
    everyone = least(SHORT_BYTES * (1 - np.eye(size, dtype=np.int64)))
    return one, max(0.0, everyone - one) / (size - 2)


def measured(world: World) -> Topology:
    """Returns the topology of the running ranks, measured in a fraction of the time of ``lightning-gnn topology measure``.

    Raises:
        CommunicationError: two ranks do not reach each other.
    """
    began, hosts = time.perf_counter(), hosts_of(world)
    # Host names that are all different say nothing: containers have them, and so have machines of one rank.
    known = hosts if len(hosts) < world.size else None
    found = measure(world, QUICK_SECONDS, QUICK_BYTES, known, lambda phase, done, total: None)
    slowest, fastest = (8 * by(found.gb_per_s) for by in (np.min, np.max))
    rank_zero_info(
        f"Measured the links between {world.size} ranks in {time.perf_counter() - began:.1f} s: {len(found.hops) // 2} "
        f"connections of {slowest:.3g} to {fastest:.3g} Gbit/s"
    )
    return found


def measure(
    world: World,
    seconds: float,
    most_bytes: int,
    hosts: Sequence[Sequence[int]] | None,
    progress: Progress,
    name: str = "measured",
) -> Topology:
    """Returns the topology of the running ranks as measured; runs on all ranks, with the same result.

    Args:
        world: the ranks, two or more.
        seconds, most_bytes: see :class:`Stopwatch`.
        hosts: the ranks of each host, or None to find them by speed.
        progress: called after every timing.
        name: of the topology.

    Raises:
        CommunicationError: two ranks do not reach each other.
        ValueError: there is one rank only.
    """
    if world.size < 2:
        raise ValueError("There is nothing to measure between ranks where there is one only.")
    watch = Stopwatch(world, seconds, most_bytes)
    flows, pairs = all_flows(world.size), pairs_to_measure(world.size)
    alone = np.ones((world.size, world.size))
    for done, flow in enumerate(flows, 1):
        alone[flow] = watch.alone(flow)
        progress("alone", done, len(flows))
    uneven = [f"{a}-{b}" for a, b in flows if a < b and abs(np.log(alone[a, b] / alone[b, a])) > np.log(UNEVEN)]
    if uneven:
        rank_zero_warn(
            f"One direction is more than {UNEVEN} times as fast as the other between ranks {', '.join(uneven)}. A topology has "
            "one bandwidth for both: their average is taken."
        )
    together: dict[tuple[Flow, ...], float] = {}
    phase = "in pairs"
    for _ in range(REPEATS):
        for done, (f, g) in enumerate(pairs, 1):
            now = watch.together((f, g), (alone[f], alone[g]))
            together[f, g] = max(now, together.get((f, g), 0.0))
            progress(phase, done, len(pairs))
        # Once more, but later: what slowed a pair down from elsewhere may have lasted longer than a few timings.
        pairs = [(f, g) for f, g in pairs if together[f, g] < SHARING * (alone[f] + alone[g])]
        phase = "in pairs, again"
    first = infer(alone, together, hosts, name)
    crowds = crowds_to_measure(first)
    for done, crowd in enumerate(crowds, 1):
        together[crowd] = watch.together(crowd, fair_rates(first, crowd).tolist(), REPEATS)
        progress("in crowds", done, len(crowds))
    stage_seconds, message_seconds = fixed_seconds(world)
    found = infer(alone, together, hosts, name)
    return replace(found, stage_seconds=stage_seconds, message_seconds=message_seconds)
