"""Topologies from what NVML tells, from a module that stands in for it; and what ranks agree on. No GPUs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gnn.comm import detect as detect_module
from lightning_gnn.comm.detect import UnknownGPUsError, detect, device_uuid, local_gpus
from lightning_gnn.comm.group import World
from lightning_gnn.planning.detect import HOST_BRIDGE, NUMA_NODE, ONE_SWITCH, SYSTEM, LocalGPUs, Machine, detected
from lightning_gnn.planning.presets import _CUBE_MESH, NVLINK_PAIR, dgx1, find_topology, machines, pcie8, uniform
from lightning_gnn.planning.topology import Topology

SWITCH_BUS = "00000000:FE:00.0"


def ancestors_of_8() -> list[list[int]]:
    """A switch per two, a host bridge per switch and two of them per NUMA node, as nvidia-smi shows for a DGX-1."""
    return [
        [ONE_SWITCH if a // 2 == b // 2 else HOST_BRIDGE if a // 4 == b // 4 else SYSTEM for b in range(8)]
        for a in range(8)
    ]


def cube_mesh() -> np.ndarray:
    counts = np.zeros((8, 8), np.int64)
    for rate, pairs in _CUBE_MESH.items():
        for a, b in pairs:
            counts[a, b] = counts[b, a] = 2 if rate == NVLINK_PAIR else 1
    return counts


def fake_nvml(nvlinks: Any, ancestors: Any, switch_nvlinks: Sequence[int] | None = None) -> ModuleType:
    """A module with what of pynvml is used, for a machine of these GPUs; the UUID of GPU i ends in i."""
    nvml = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    nvml.NVMLError = NVMLError
    nvml.NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    nvml.NVMLError_InvalidArgument = type("NVMLError_InvalidArgument", (NVMLError,), {})
    nvml.NVML_NVLINK_MAX_LINKS, nvml.NVML_FEATURE_ENABLED, nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH = 18, 1, 2
    ends = [
        [other for other, count in enumerate(row) for _ in range(count)]
        + [None] * (switch_nvlinks[index] if switch_nvlinks else 0)
        for index, row in enumerate(nvlinks)
    ]

    def by_uuid(uuid: str) -> int:
        number = int(uuid.rpartition("-")[2])
        if number >= len(ends):
            raise NVMLError("Not Found")
        return number

    def state(handle: int, link: int) -> int:
        if not ends[handle]:
            raise nvml.NVMLError_NotSupported("Not Supported")
        if link > len(ends[handle]):
            raise nvml.NVMLError_InvalidArgument("Invalid Argument")
        return int(link < len(ends[handle]))  # the last one is there, and inactive

    def bus(handle: int | None, domain: str) -> Any:
        return SimpleNamespace(busId=SWITCH_BUS if handle is None else f"{domain}:{handle + 6:02X}:00.0")

    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetHandleByUUID = by_uuid
    nvml.nvmlDeviceGetPciInfo = lambda handle: SimpleNamespace(busId=bus(handle, "00000000").busId.encode())
    nvml.nvmlDeviceGetNvLinkState = state
    nvml.nvmlDeviceGetNvLinkRemoteDeviceType = lambda handle, link: 2 if ends[handle][link] is None else 0
    nvml.nvmlDeviceGetNvLinkRemotePciInfo = lambda handle, link: bus(ends[handle][link], "0000")
    nvml.nvmlDeviceGetTopologyCommonAncestor = lambda a, b: ancestors[a][b]
    return nvml


def uuids(*numbers: int) -> list[str | None]:
    return [f"GPU-{number}" for number in numbers]


def sharing(topology: Topology) -> list[tuple[Any, ...]]:
    """What a topology is but for names and order: each hop's flows and bandwidth."""
    return sorted(
        (hop.gb_per_s, sorted(flow for flow, via in topology.links.items() if index in via))
        for index, hop in enumerate(topology.hops)
    )


def same(one: Topology, other: Topology) -> bool:
    memory = [[[t.hops[hop].gb_per_s for hop in via] for via in t.memory] for t in (one, other)]
    return sharing(one) == sharing(other) and one.groups == other.groups and memory[0] == memory[1]


def test_dgx1(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(cube_mesh(), ancestors_of_8()))
    gpus = local_gpus(uuids(*range(8)))
    assert np.array_equal(gpus.nvlinks, cube_mesh())
    assert same(detected([Machine(tuple(range(8)), gpus)]), dgx1())


def test_only_the_visible_devices_in_their_order(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(cube_mesh(), ancestors_of_8()))
    visible = (6, 1, 2, 5)  # CUDA_VISIBLE_DEVICES=6,1,2,5
    found = detected([Machine((0, 1, 2, 3), local_gpus(uuids(*visible)))])
    assert found.num_devices == 4 and found.sockets == ((0, 3), (1, 2))
    whole = dgx1()
    for (a, b), via in found.links.items():
        rates = [whole.hops[hop].gb_per_s for hop in whole.links[visible[a], visible[b]]]
        assert [found.hops[hop].gb_per_s for hop in via] == rates


def test_without_nvlinks(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(np.zeros((8, 8), int), ancestors_of_8()))
    gpus = local_gpus(uuids(*range(8)))
    assert not np.any(gpus.nvlinks)
    assert same(detected([Machine(tuple(range(8)), gpus)]), pcie8())


def test_nvswitches(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(np.zeros((8, 8), int), ancestors_of_8(), [6] * 8))
    gpus = local_gpus(uuids(*range(8)))
    assert gpus.switch_nvlinks == (6,) * 8
    found = detected([Machine(tuple(range(8)), gpus)])
    used = [found.hops[hop] for via in found.links.values() for hop in via]
    assert all(hop.kind == "nvlink" and hop.gb_per_s == pytest.approx(6 * 24.2) for hop in used)
    assert found.links[0, 1][0] == found.links[0, 7][0] and found.links[0, 1][-1] == found.links[5, 1][-1]


def test_host_bridges_of_one_numa_node():
    ancestors = ((0, NUMA_NODE), (NUMA_NODE, 0))
    gpus = LocalGPUs(((0, 0), (0, 0)), (0, 0), ancestors)
    found = detected([Machine((0, 1), gpus)])
    assert [found.hops[hop].kind for hop in found.links[0, 1]] == ["pcie", "qpi", "pcie"]
    assert found.sockets == ((0, 1),)


def test_several_machines(monkeypatch):
    assert same(detected([Machine((0, 1)), Machine((2, 3, 4))]), machines([2, 3]))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(cube_mesh(), ancestors_of_8()))
    gpus = local_gpus(uuids(*range(8)))
    found = detected([Machine(tuple(range(8)), gpus), Machine(tuple(range(8, 16)), gpus)])
    assert found.hosts == dgx1(2).hosts and found.sockets == dgx1(2).sockets
    assert [found.hops[hop].kind for hop in found.links[2, 9]] == ["network", "network"]
    scattered = detected([Machine((0, 2)), Machine((1, 3))])
    assert scattered.hosts == ((0, 2), (1, 3)) and len(scattered.links[0, 2]) == 1 and len(scattered.links[0, 1]) == 2


def test_machines():
    two = machines([2, 1], [24.22, 1.0], 6.37)
    assert two.hosts == ((0, 1), (2,))
    assert [two.hops[hop].gb_per_s for hop in two.links[0, 1]] == [24.22]
    assert [two.hops[hop].name for hop in two.links[2, 0]] == ["port1", "-port0"]
    assert two.links[0, 2] == two.links[1, 2]
    assert sharing(machines([3], 2.0)) == sharing(uniform(3, 2.0)) and machines([3]).uniform
    assert not machines([1, 1, 1]).uniform  # a rank's port is shared by its links
    for counts, inside in (([], 1.0), ([2, 0], 1.0), ([2, 2], [1.0])):
        with pytest.raises(ValueError, match="Each machine needs one or more ranks"):
            machines(counts, inside)


def test_what_is_unknown(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UnknownGPUsError, match="pip install nvidia-ml-py"):
        local_gpus(uuids(0, 1))
    nvml = fake_nvml(cube_mesh(), ancestors_of_8())
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with pytest.raises(UnknownGPUsError, match=r"torch 2\.5"):
        local_gpus(["GPU-0", None])
    with pytest.raises(UnknownGPUsError, match="Not Found"):
        local_gpus(uuids(0, 9))

    def fails() -> None:
        raise nvml.NVMLError("Driver Not Loaded")

    nvml.nvmlInit = fails
    with pytest.raises(UnknownGPUsError, match="Driver Not Loaded"):
        local_gpus(uuids(0, 1))


def test_uuids(monkeypatch):
    assert device_uuid(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    assert device_uuid(torch.device("cuda", 0)) == "GPU-abc"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert device_uuid(torch.device("cuda", 0)) is None


# Ranks #######################################################################


def _detected(rank: int, size: int, num_hosts: int, nvml: str) -> tuple[Topology, list[str]]:
    world = World(rank, size, torch.device("cpu"), timedelta(seconds=60))
    said: list[str] = []
    patch = pytest.MonkeyPatch()
    try:
        patch.setattr(detect_module, "machine_key", lambda: f"host{rank * num_hosts // size}")
        patch.setattr(detect_module, "rank_zero_info", said.append)
        if nvml:
            world.device = torch.device("cuda", rank)  # control messages go through gloo all the same
            patch.setattr(detect_module, "device_uuid", lambda device: f"GPU-{rank % (size // num_hosts)}")
            module = fake_nvml(cube_mesh(), ancestors_of_8()) if nvml == "there" else None
            patch.setitem(sys.modules, "pynvml", module)
        return detect(world), said
    finally:
        patch.undo()
        world.device = torch.device("cpu")
        world.close()


def test_ranks_agree(ranks):
    results = ranks.run(4, _detected, 1, "")
    assert all(found == results[0][0] and not said for found, said in results)
    assert results[0][0].uniform and find_topology(results[0][0], 4).num_devices == 4
    results = ranks.run(4, _detected, 2, "")
    assert all(found == results[0][0] and not said for found, said in results)
    assert same(results[0][0], machines([2, 2]))


def test_ranks_agree_on_gpus(ranks):
    results = ranks.run(4, _detected, 2, "there")
    assert all(found == results[0][0] and not said for found, said in results)
    found = results[0][0]
    assert [found.hops[hop].gb_per_s for hop in found.links[0, 1]] == [24.22]
    assert found.hosts == ((0, 1), (2, 3))
    results = ranks.run(4, _detected, 2, "missing")
    assert all(same(found, machines([2, 2])) for found, _ in results)
    assert "ranks 0, 1" in results[0][1][0] and "pip install nvidia-ml-py" in results[0][1][0]
