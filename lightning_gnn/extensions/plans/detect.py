"""Detection of the topology of the running ranks from host names, NVIDIA's management library (NVML) and Linux."""

from __future__ import annotations

import socket
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gnn.comm.group import World
from lightning_gnn.comm.shared_memory import machine_key
from lightning_gnn.extensions.plans.topology import SHARED_MEMORY, SOCKET_LATENCY, Topology
from lightning_gnn.extensions.plans.wiring import uniform


def detect(world: World, sysfs: Path = Path("/sys")) -> Topology:
    """Returns the topology of the ranks, the same on every rank. Collective: all ranks must call it.

    Ranks with the same host name are on one machine. For CUDA ranks, the first rank of each machine queries NVML (package
    ``nvidia-ml-py``, imported as ``pynvml``) and Linux for the links. Without NVML, the links are assumed to be uniform. With
    several machines, it also queries Linux for the network ports. Unknown bandwidths are assumed as measured by DGCL, and rank 0
    logs the assumptions. ``lightning-gnn topology measure`` measures them.

    Args:
        world: the ranks.
        sysfs: folder in which Linux describes devices.
    """
    hosts, cuda = hosts_of(world), world.device.type == "cuda"
    if len(hosts) == 1 and not cuda:
        return uniform(world.size, SHARED_MEMORY, "detected", **SOCKET_LATENCY)
    from lightning_gnn.extensions.plans.hardware import Machine, detect_topology, device_uuid, local_machine  # often unused

    uuids = world.all_gather_object(device_uuid(world.device))
    ranks = next(host for host in hosts if world.rank in host)
    machine, assumed = Machine(ranks), list[str]()
    if ranks[0] == world.rank:
        machine, assumed = local_machine(ranks, [uuids[rank] for rank in ranks], cuda, len(hosts) > 1, sysfs)
    tables = world.all_gather_object((machine, assumed))
    found = [tables[host[0]] for host in hosts]
    for machine, assumed in found:
        if assumed:
            rank_zero_info(
                f"Assumed for the machine of ranks {', '.join(map(str, machine.ranks))}: {'; '.join(assumed)}. To measure "
                "instead, run lightning-gnn topology measure."
            )
    topology = detect_topology([machine for machine, _ in found])
    if qpi := {hop.gb_per_s for hop in topology.hops if hop.kind == "qpi"}:
        rank_zero_info(
            f"Assumed between sockets and between host bridges: {', '.join(map(str, sorted(qpi)))} GB/s, in proportion to "
            "PCIe. To measure instead, run lightning-gnn topology measure."
        )
    return topology


def hosts_of(world: World) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each machine, by host names. Collective: all ranks must call it."""
    ranks: dict[str, list[int]] = {}
    for rank, key in enumerate(world.all_gather_object(machine_key() or socket.gethostname())):
        ranks.setdefault(key, []).append(rank)
    return tuple(map(tuple, ranks.values()))
