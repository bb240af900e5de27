"""Named topologies: the machines of DGCL section 7 and CAGNET section 5.2, with the bandwidths given there."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

from lightning_gnn.arguments import quote
from lightning_gnn.extensions.plans.topology import INFINIBAND, NVLINK, NVLINK_PAIR, PCIE, QPI, Topology
from lightning_gnn.extensions.plans.wiring import Wiring, load_topology, uniform

NCCL_STAGE, NCCL_STAGE_BETWEEN_HOSTS = 8.4e-6 + 5.7e-6, 8.4e-6 + 14.0e-6
"""Seconds of a stage of NCCL messages: base latency plus the latency of PCIe or of the network.

The values are for rings and the protocol "Simple" in the tuning tables of NCCL 2.19 to 2.27 (src/graph/tuning.cc).
"""

_CUBE_MESH = {
    NVLINK_PAIR: ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)),
    NVLINK: ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)),
}
"""NVLink pairs of a DGX-1 with V100: each GPU has six NVLinks, to four other GPUs."""


def dgx1(num_hosts: int = 1) -> Topology:
    """Returns DGX-1 machines of 8 GPUs: NVLinks in a hybrid cube mesh, other pairs over PCIe switches (2 GPUs each) and QPI.

    Machines are connected by one InfiniBand port each, at their first PCIe switch. GPUs of other switches reach it through their
    own switch.
    """
    made = Wiring("dgx1" if num_hosts == 1 else f"dgx1x{num_hosts}")
    nvlinked = {pair for pairs in _CUBE_MESH.values() for pair in pairs}
    to_port: dict[int, list[str]] = {}
    for host in range(num_hosts):
        first = 8 * host
        switch = [made.hop(f"pcie{first // 2 + i}", "pcie", PCIE) for i in range(4)]
        qpi = made.hop(f"qpi{host}", "qpi", QPI)
        for rate, pairs in _CUBE_MESH.items():
            for a, b in pairs:
                made.link(first + a, first + b, kind="nvlink", gb_per_s=rate)
        for a, b in product(range(4), range(4, 8)):
            if (a, b) not in nvlinked:
                made.link(first + a, first + b, via=[switch[a // 2], qpi, f"-{switch[b // 2]}"])
        for device in range(8):
            across = [f"-{qpi}"] if device >= 4 else []
            up = [] if device < 2 else [switch[device // 2], *across, f"-{switch[0]}"]
            to_port[first + device] = [*up, f"port{host}"]
            made.memory(first + device, [switch[device // 2]])
        made.host(range(first, first + 8), [range(first, first + 4), range(first + 4, first + 8)])
    if num_hosts > 1:
        for host in range(num_hosts):
            made.hop(f"port{host}", "ib", INFINIBAND)
    made.link_hosts(to_port)
    return made.topology(**nccl_latency(num_hosts))


def pcie8() -> Topology:
    """Returns a machine of 8 GPUs without NVLink: a slot each, a PCIe switch per two, two switches per socket, QPI between."""
    made = Wiring("pcie8")
    slot, switch = ([made.hop(f"{kind}{i}", "pcie", PCIE) for i in range(n)] for kind, n in (("slot", 8), ("pcie", 4)))
    qpi = made.hop("qpi", "qpi", QPI)
    for a, b in combinations(range(8), 2):
        between = [] if a // 2 == b // 2 else [switch[a // 2], f"-{switch[b // 2]}"]
        if a // 4 != b // 4:
            between.insert(1, qpi)
        made.link(a, b, via=[slot[a], *between, f"-{slot[b]}"])
    for device in range(8):
        made.memory(device, [slot[device], switch[device // 2]])
    made.host(range(8), [range(4), range(4, 8)])
    return made.topology(**nccl_latency(1))


SUMMIT_NVLINK, SUMMIT_XBUS, SUMMIT_SOCKET_PORT = 50.0, 64.0, 12.5
"""GB/s per direction: between two GPUs of a socket or a GPU and its CPU; between sockets; out of a socket (CAGNET 5.2)."""


def summit(num_devices: int = 6, per_host: int = 6) -> Topology:
    """Returns Summit nodes: 2 sockets of 3 V100 each, fully connected by NVLinks, also to their CPU; an X-bus between the CPUs.

    Traffic between nodes crosses the CPU and its socket's half of the dual-rail InfiniBand, which the socket's GPUs share. The 16
    GB/s between a socket and the NIC are omitted: that half is narrower, and all traffic crosses both.

    Args:
        num_devices: total number of GPUs; nodes are filled in order.
        per_host: number of GPUs used per node, starting with the first.

    Source: CAGNET (GNNSys'21) section 5.2 lists all bandwidths.
    """
    if not 1 <= per_host <= 6:
        raise ValueError(f"per_host must be from 1 to 6, the GPUs of a Summit node, got {per_host}.")
    made = Wiring("summit")
    hosts = [range(first, min(first + per_host, num_devices)) for first in range(0, num_devices, per_host)]
    socket = {device: 2 * number + (device - host[0]) // 3 for number, host in enumerate(hosts) for device in host}
    for number, host in enumerate(hosts):
        made.host(host, [sockets for sockets in (host[:3], host[3:]) if sockets])
        if host[3:]:
            made.hop(f"xbus{number}", "xbus", SUMMIT_XBUS)
    cpu = [made.hop(f"cpu{device}", "nvlink", SUMMIT_NVLINK) for device in range(num_devices)]
    if len(hosts) > 1:
        for each in sorted(set(socket.values())):
            made.hop(f"port{each}", "ib", SUMMIT_SOCKET_PORT)
    for a, b in combinations(range(num_devices), 2):
        if socket[a] == socket[b]:
            made.link(a, b, kind="nvlink", gb_per_s=SUMMIT_NVLINK)
        else:
            same_host = socket[a] // 2 == socket[b] // 2
            between = [f"xbus{socket[a] // 2}"] if same_host else [f"port{socket[a]}", f"-port{socket[b]}"]
            made.link(a, b, via=[cpu[a], *between, f"-{cpu[b]}"])
    for device in range(num_devices):
        made.memory(device, [cpu[device]])
    return made.topology(**nccl_latency(len(hosts)))


def nccl_latency(num_hosts: int) -> dict[str, float]:
    """Returns the latency of a stage of GPU messages as topology fields; the messages of a stage start together."""
    return {"stage_seconds": NCCL_STAGE if num_hosts == 1 else NCCL_STAGE_BETWEEN_HOSTS}


PRESETS: dict[str, Callable[[int], Topology]] = {
    "dgx1": lambda num_ranks: dgx1(),
    "dgx1x2": lambda num_ranks: dgx1(2),
    "pcie8": lambda num_ranks: pcie8(),
    "summit": lambda num_ranks: summit(num_ranks or 6),
    "uniform": uniform,
}
"""Constructors of named topologies; the argument is the number of ranks, or 0; topologies of fixed size ignore it."""


def find_topology(source: str | Path | Topology, num_ranks: int | None) -> Topology:
    """Returns a topology.

    Args:
        source: ``"dgx1"``, ``"dgx1x2"``, ``"pcie8"``, ``"summit"``, ``"uniform"``, the path of a JSON file, or a topology.
        num_ranks: number of devices; the first devices of a larger topology are used. None for all devices.

    Raises:
        ValueError: if the source is unknown or too small, or for ``"uniform"`` without `num_ranks`.
    """
    if isinstance(source, str) and source in PRESETS:
        if source == "uniform" and num_ranks is None:
            raise ValueError("Topology 'uniform' needs the number of ranks, got None. Set it.")
        source = PRESETS[source](num_ranks or 0)
    elif not isinstance(source, Topology):
        if not isinstance(source, (str, Path)) or not os.path.isfile(source):
            raise ValueError(f"topology must be one of {', '.join(PRESETS)} or a JSON file (got {quote(str(source))}).")
        source = load_topology(source)
    return source if num_ranks is None else source.for_ranks(num_ranks)
