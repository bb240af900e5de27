"""Measurement of bandwidth and latency between each pair of running ranks, over the transport used in training.

Each timing starts at a barrier, sends one message per flow, and ends when the last message is received. A stage of a plan has the
same form (DGCL section 5.1). Other load can only increase a timing, so the fastest of several timings is used.

P ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations, permutations

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray

from lightning_gnn.comm.group import CommunicationError, World
from lightning_gnn.comm.transport import by_peer
from lightning_gnn.comm.watchdog import PeerError
from lightning_gnn.devices import synchronize
from lightning_gnn.extensions.plans.detect import hosts_of
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.wiring import Wiring

REPEATS = 3
FIRST_BYTES = 1 << 16
QUICK_SECONDS, QUICK_BYTES = 0.02, 16_000_000
SHORT_BYTES, SHORT_REPEATS = 64, 10
UNEVEN = 1.25

ALIKE = 1.08
"""Maximum ratio of bandwidths that are treated as equal; the nearest two of DGCL, PCIe and QPI, differ by 1.16."""

Progress = Callable[[int, int], None]
"""Callback with the number of measured pairs of ranks, per direction, and their total number."""


def transfer_seconds(world: World, num_bytes: NDArray[np.int64]) -> float:
    """Returns the seconds until the last of the messages of ``num_bytes[a, b]`` from a to b is received. Collective.

    Raises:
        CommunicationError: if a message is not received; the error names the peer.
    """
    sent, received = num_bytes[world.rank].tolist(), num_bytes[:, world.rank].tolist()
    out = world.transport.scratch((sum(sent),), torch.uint8)
    out.fill_(world.rank)  # untouched memory is faster to read than real rows
    into = torch.zeros(sum(received), dtype=torch.uint8, device=world.device)
    world.barrier()
    synchronize(world.device)
    began = time.perf_counter()
    try:
        world.transport.start_each(by_peer(out, sent), by_peer(into, received))()
    except PeerError as error:
        raise CommunicationError(
            f"Rank {world.rank} could not exchange messages with rank {error.peer}: {error}. All ranks must reach each other: "
            "check firewalls, or set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the interface."
        ) from error
    synchronize(world.device)
    seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=world.device)
    return float(world.all_gather(seconds, "Timing of messages").max())


def rate(world: World, a: int, b: int, seconds: float, most_bytes: int) -> float:
    """Returns the bandwidth in GB/s of messages from rank a to rank b. Collective; the same result on all ranks.

    Args:
        world: the ranks.
        a, b: two of the ranks.
        seconds: target duration of a message; longer is more accurate.
        most_bytes: maximum size of a message.
    """

    def gb_per_s(length: int) -> float:
        table = np.zeros((world.size, world.size), np.int64)
        table[a, b] = length
        return length / transfer_seconds(world, table) / 1e9

    gb_per_s(FIRST_BYTES)  # NCCL connects two ranks at their first message
    length = FIRST_BYTES
    while True:
        fastest = max(gb_per_s(length) for _ in range(REPEATS))
        enough = min(most_bytes, int(fastest * 1e9 * seconds))
        if length * 1.5 >= enough:
            return fastest
        length = min(enough, 16 * length)  # gradually: the share of the startup time is not known yet


def fixed_seconds(world: World) -> tuple[float, float]:
    """Returns the seconds of a stage of messages regardless of size, and of each further message of a rank in the stage.

    The first value is the median time of a single short message over several flows. The second is the additional time per message
    when all flows run at once.
    """
    size = world.size

    def min_seconds(num_bytes: NDArray[np.int64]) -> float:
        return min(transfer_seconds(world, num_bytes) for _ in range(SHORT_REPEATS))

    single = [np.zeros((size, size), np.int64) for _ in range(size)]
    for rank, table in enumerate(single):
        table[rank, (rank + 1) % size] = SHORT_BYTES
    one = float(np.median([min_seconds(table) for table in single]))
    if size == 2:
        return one, 0.0
    everyone = min_seconds(SHORT_BYTES * (1 - np.eye(size, dtype=np.int64)))
    return one, max(0.0, everyone - one) / (size - 2)


def measure_quickly(world: World) -> Topology:
    """Returns the measured topology of the running ranks, in a fraction of the time of ``lightning-gnn topology measure``.

    Raises:
        CommunicationError: if two ranks cannot reach each other.
    """
    began = time.perf_counter()
    found = measure(world, QUICK_SECONDS, QUICK_BYTES, lambda num_done, total: None)
    slowest, fastest = (8 * by(found.gb_per_s) for by in (np.min, np.max))
    rank_zero_info(
        f"Measured the links between {world.size} ranks in {time.perf_counter() - began:.1f} s: {slowest:.3g} to {fastest:.3g} "
        "Gbit/s"
    )
    return found


def measure(world: World, seconds: float, most_bytes: int, progress: Progress, name: str = "measured") -> Topology:
    """Returns the measured topology of the running ranks. Collective; the same result on all ranks.

    Each pair of ranks gets a separate link, with the bandwidth of a message between them while no other message is sent. Hosts
    are identified by name.

    Args:
        world: the ranks, two or more.
        seconds, most_bytes: see :func:`rate`.
        progress: called after each ordered pair of ranks.
        name: name of the topology.

    Raises:
        CommunicationError: if two ranks cannot reach each other.
        ValueError: if there is only one rank.
    """
    if world.size < 2:
        raise ValueError("Measuring links needs at least two ranks, got one.")
    flows = list(permutations(range(world.size), 2))
    rates: dict[tuple[int, int], float] = {}
    for done, flow in enumerate(flows, 1):
        rates[flow] = rate(world, *flow, seconds, most_bytes)
        progress(done, len(flows))
    pairs = list(combinations(range(world.size), 2))
    uneven = [f"{a}-{b}" for a, b in pairs if abs(np.log(rates[a, b] / rates[b, a])) > np.log(UNEVEN)]
    if uneven:
        rank_zero_warn(
            f"Averaged the bandwidths of both directions between ranks {', '.join(uneven)}: one is more than {UNEVEN} times "
            "the other, but a topology has one for both."
        )
    both_ways = levels(np.array([(rates[a, b] + rates[b, a]) / 2 for a, b in pairs]))
    stage_seconds, message_seconds = fixed_seconds(world)
    made = Wiring(name)
    for host in hosts_of(world):
        made.host(host)
    for (a, b), gb_per_s in zip(pairs, both_ways.tolist()):
        made.link(a, b, gb_per_s=gb_per_s)
    return made.topology(stage_seconds=stage_seconds, message_seconds=message_seconds)


def levels(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the level of each value: the median of the values treated as equal, so that equal links get equal bandwidths."""
    found, rest = values.copy(), np.argsort(values)
    while len(rest):
        count = int(np.searchsorted(values[rest], ALIKE * values[rest[0]], side="right"))
        found[rest[:count]] = np.median(values[rest[:count]])
        rest = rest[count:]
    return found
