"""Topologies from what NVML and Linux tell, from a module and files that stand in for them; and what ranks agree on. No GPUs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import combinations
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SHARED
from test_sysfs import Tree

from lightning_gnn.comm.group import World
from lightning_gnn.extensions.plans import detect as detect_module
from lightning_gnn.extensions.plans import hardware
from lightning_gnn.extensions.plans.detect import detect
from lightning_gnn.extensions.plans.hardware import (
    HOST_BRIDGE,
    NUMA_NODE,
    ONE_SWITCH,
    PCIE3_X16,
    SYSTEM,
    V100_NVLINK,
    LocalGPUs,
    Machine,
    Port,
    UnknownGPUsError,
    detect_topology,
    device_uuid,
    local_gpus,
)
from lightning_gnn.extensions.plans.plan_cost import plan_cost
from lightning_gnn.extensions.plans.presets import _CUBE_MESH, dgx1, find_topology, nccl_latency, pcie8
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.topology import NVLINK_PAIR, Topology
from lightning_gnn.extensions.plans.ways import fastest, fastest_plans
from lightning_gnn.extensions.plans.wiring import machines, topology_from_dict, uniform
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.shard import Relabelling

SWITCH_BUS = "00000000:FE:00.0"
NOWHERE = Path("/nowhere")


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


def fake_nvml(
    nvlinks: Any, ancestors: Any, switch_nvlinks: Sequence[int] | None = None, nvlink_mbps: int | None = 25781
) -> ModuleType:
    """A module with what of pynvml is used, for a machine of these GPUs; the UUID of GPU i ends in i, its address is 06 + i."""
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

    def fields(handle: int, which: Sequence[int]) -> list[Any]:
        assert which == [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
        return [SimpleNamespace(nvmlReturn=0 if nvlink_mbps else 3, value=SimpleNamespace(uiVal=nvlink_mbps or 0))]

    nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, nvml.NVML_SUCCESS = 90, 0
    nvml.nvmlDeviceGetFieldValues = fields
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


def gpus_of(*numbers: int, sysfs: Path = NOWHERE) -> LocalGPUs:
    return local_gpus(uuids(*numbers), sysfs)[0]


def sharing(topology: Topology) -> list[tuple[Any, ...]]:
    """What a topology is but for names and order: each hop's flows and bandwidth."""
    return sorted(
        (hop.gb_per_s, sorted(flow for flow, via in topology.links.items() if index in via))
        for index, hop in enumerate(topology.hops)
    )


def same(one: Topology, other: Topology) -> bool:
    memory = [[[t.hops[hop].gb_per_s for hop in via] for via in t.memory] for t in (one, other)]
    return sharing(one) == sharing(other) and one.groups == other.groups and memory[0] == memory[1]


def dgx1_tree(root: Path) -> Tree:
    """Two GPUs under each of four switches of PCIe 3, as ancestors_of_8 has it."""
    tree = Tree(root)
    for gpu in range(8):
        tree.device(slot_of(gpu, gpu // 2), "8.0 GT/s PCIe", numa_node=gpu // 4)
    return tree


def slot_of(gpu: int, switch: int) -> str:
    root = f"{0x16 * (switch + 1):02x}"
    return f"pci0000:{root}/0000:{root}:01.0/0000:{6 + gpu:02x}:00.0"


@pytest.mark.parametrize("told", [True, False])
def test_dgx1(monkeypatch, tmp_path, told):
    """What nobody tells is taken as DGCL measured it, on a DGX-1 too."""
    nvml = fake_nvml(cube_mesh(), ancestors_of_8(), nvlink_mbps=25781 if told else None)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpus, devices, assumed = local_gpus(uuids(*range(8)), dgx1_tree(tmp_path).root if told else NOWHERE)
    assert np.array_equal(gpus.nvlinks, cube_mesh())
    assert same(detect_topology([Machine(tuple(range(8)), gpus)]), dgx1())
    if told:
        assert [device.numa_node for device in devices if device] == [0] * 4 + [1] * 4 and not assumed
    else:
        assert devices == [None] * 8
        assert [text.partition(",")[0] for text in assumed] == ["NVLinks of 24.22 GB/s", "slots of 11.13 GB/s"]
    port = Port("mlx5_0:1", 6.37, tuple(ancestors_of_8()[0]))  # under the first switch
    both = [Machine(tuple(range(first, first + 8)), gpus, (port,)) for first in (0, 8)]
    assert same(detect_topology(both), dgx1(2))


def test_only_the_visible_devices_in_their_order(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(cube_mesh(), ancestors_of_8()))
    visible = (6, 1, 2, 5)  # CUDA_VISIBLE_DEVICES=6,1,2,5
    found = detect_topology([Machine((0, 1, 2, 3), gpus_of(*visible))])
    assert found.num_devices == 4 and found.sockets == ((0, 3), (1, 2))
    whole = dgx1()
    for (a, b), via in found.links.items():
        rates = [whole.hops[hop].gb_per_s for hop in whole.links[visible[a], visible[b]]]
        assert [found.hops[hop].gb_per_s for hop in via] == rates


def test_without_nvlinks(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(np.zeros((8, 8), int), ancestors_of_8()))
    gpus = gpus_of(*range(8))
    assert not np.any(gpus.nvlinks)
    assert same(detect_topology([Machine(tuple(range(8)), gpus)]), pcie8())


def test_nvswitches(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(np.zeros((8, 8), int), ancestors_of_8(), [6] * 8))
    gpus = gpus_of(*range(8))
    assert gpus.switch_nvlinks == (6,) * 8
    found = detect_topology([Machine(tuple(range(8)), gpus)])
    used = [found.hops[hop] for via in found.links.values() for hop in via]
    assert all(hop.kind == "nvlink" and hop.gb_per_s == pytest.approx(6 * 24.2) for hop in used)
    assert found.links[0, 1][0] == found.links[0, 7][0] and found.links[0, 1][-1] == found.links[5, 1][-1]


def test_host_bridges_of_one_numa_node():
    ancestors = ((0, NUMA_NODE), (NUMA_NODE, 0))
    gpus = LocalGPUs(((0, 0), (0, 0)), (0, 0), ancestors, (V100_NVLINK,) * 2, (PCIE3_X16,) * 2)
    found = detect_topology([Machine((0, 1), gpus)])
    assert [found.hops[hop].kind for hop in found.links[0, 1]] == ["pcie", "qpi", "pcie"]
    assert found.sockets == ((0, 1),)


def test_several_machines(monkeypatch):
    assert same(detect_topology([Machine((0, 1)), Machine((2, 3, 4))]), machines([2, 3]))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(cube_mesh(), ancestors_of_8()))
    gpus = gpus_of(*range(8))
    found = detect_topology([Machine(tuple(range(8)), gpus), Machine(tuple(range(8, 16)), gpus)])
    assert found.hosts == dgx1(2).hosts and found.sockets == dgx1(2).sockets
    assert [found.hops[hop].kind for hop in found.links[2, 9]] == ["network", "network"]
    scattered = detect_topology([Machine((0, 2)), Machine((1, 3))])
    assert scattered.hosts == ((0, 2), (1, 3)) and len(scattered.links[0, 2]) == 1 and len(scattered.links[0, 1]) == 2


def test_machines():
    two = machines([2, 1], 24.22, 6.37)
    assert two.hosts == ((0, 1), (2,))
    assert [two.hops[hop].gb_per_s for hop in two.links[0, 1]] == [24.22]
    assert [two.hops[hop].gb_per_s for hop in two.links[2, 0]] == [6.37, 6.37]
    assert [two.hops[hop].name for hop in two.links[2, 0]] == ["port1", "-port0"]
    assert two.links[0, 2] == two.links[1, 2]
    assert sharing(machines([3], 2.0)) == sharing(uniform(3, 2.0)) and machines([3]).uniform
    assert not machines([1, 1, 1]).uniform  # a rank's port is shared by its links
    for counts in ([], [2, 0]):
        with pytest.raises(ValueError, match="Each machine needs one or more ranks"):
            machines(counts)


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


def test_rates_are_in_proportion(monkeypatch, tmp_path):
    """Blackwell's NVLinks, and two generations of slots; an NVLink is as fast as its slower end."""
    tree = Tree(tmp_path)
    for gpu, speed in enumerate(("32.0 GT/s PCIe", "16.0 GT/s PCIe")):
        tree.device(slot_of(gpu, 0), speed)
    ancestors = [[0, ONE_SWITCH], [ONE_SWITCH, 0]]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([[0, 3], [3, 0]], ancestors, nvlink_mbps=53125))
    gpus = gpus_of(0, 1, sysfs=tree.root)
    assert gpus.nvlink_rates == (53.125, 53.125) and gpus.pcie_rates == pytest.approx((63.02, 31.51), rel=1e-3)
    found = detect_topology([Machine((0, 1), gpus)])
    assert found.hops[found.links[0, 1][0]].gb_per_s == pytest.approx(3 * 24.2 * 53.125 / 25.781, abs=0.01)
    slower = detect_topology([Machine((0, 1), replace(gpus, nvlink_rates=(53.125, 26.562)))])
    assert slower.hops[slower.links[0, 1][0]].gb_per_s == pytest.approx(3 * 24.2 * 26.562 / 25.781, abs=0.01)
    bare = detect_topology([Machine((0, 1), replace(gpus, nvlinks=((0, 0), (0, 0))))])
    assert [bare.hops[hop].gb_per_s for hop in bare.links[0, 1]] == pytest.approx([44.52, 22.26], abs=0.02)


def ways_out(found: Topology) -> list[list[str]]:
    """The hops from each device of the first host to the first device of the second."""
    return [[found.hops[hop].name for hop in found.links[device, found.hosts[1][0]]] for device in found.hosts[0]]


def test_ports_are_those_nearest_to_each_gpu():
    none, rates = ((0,) * 4,) * 4, ((V100_NVLINK,) * 4, (PCIE3_X16,) * 4)
    ancestors = tuple(
        tuple(0 if a == b else HOST_BRIDGE if a // 2 == b // 2 else SYSTEM for b in range(4)) for a in range(4)
    )
    gpus = LocalGPUs(none, (0,) * 4, ancestors, *rates)
    far = Machine((4,))

    def ways(*ports: Port) -> list[list[str]]:
        found = detect_topology([Machine((0, 1, 2, 3), gpus, ports), far])
        return [way[: next(i for i, name in enumerate(way) if name == "-port1")] for way in ways_out(found)]

    under = [Port(f"nic{k}", 5.0, tuple(ONE_SWITCH if i == k else ancestors[k][i] for i in range(4))) for k in range(4)]
    for ports in (under, under[::-1]):
        assert ways(*ports) == [[f"port0.nic{k}"] for k in range(4)]
    assert ways(under[0]) == [
        ["port0.nic0"],
        ["pcie0.1", "-pcie0.0", "port0.nic0"],
        ["pcie0.2", "-qpi0.0-1", "-pcie0.0", "port0.nic0"],
        ["pcie0.3", "-qpi0.0-1", "-pcie0.0", "port0.nic0"],
    ]
    two = [Port(name, 5.0, (NUMA_NODE, NUMA_NODE, SYSTEM, SYSTEM)) for name in ("a", "b")]
    assert ways(*two) == [  # both are equally near
        ["pcie0.0", "bridge0.0-2", "port0.a"],
        ["pcie0.1", "bridge0.0-3", "port0.b"],
        ["pcie0.2", "-qpi0.0-1", "port0.a"],
        ["pcie0.3", "-qpi0.0-1", "port0.b"],
    ]
    assert ways(Port("lone", 5.0, (SYSTEM,) * 4))[3] == ["pcie0.3", "qpi0.1-2", "port0.lone"]
    assert ways(Port("unknown", 5.0)) == [["port0.unknown"]] * 4
    unseen = detect_topology([Machine((0, 1), ports=(Port("a", 2.0), Port("b", 3.0))), Machine((2,))])
    assert [unseen.hops[unseen.links[rank, 2][0]].gb_per_s for rank in (0, 1)] == [2.0, 3.0]


# Ranks #######################################################################


def _detected(
    rank: int, size: int, trees: Sequence[Path], nvml: dict[str, Any] | None, interface: str = ""
) -> tuple[Topology, list[str]]:
    """The topology of as many machines as there are trees of files, with GPUs if something is said of NVML, and the log."""
    world = World(rank, size, torch.device("cpu"), timedelta(seconds=60))
    said: list[str] = []
    patch = pytest.MonkeyPatch()
    host, per_host = rank * len(trees) // size, size // len(trees)
    try:
        patch.setattr(detect_module, "machine_key", lambda: f"host{host}")
        patch.setattr(detect_module, "rank_zero_info", said.append)
        patch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        if interface:
            patch.setenv("GLOO_SOCKET_IFNAME", interface)
        if nvml is not None:
            world.device = torch.device("cuda", rank)  # control messages go through gloo all the same
            patch.setattr(hardware, "device_uuid", lambda device: f"GPU-{rank % per_host}")
            patch.setitem(sys.modules, "pynvml", fake_nvml(**nvml) if nvml else None)
        return detect(world, trees[host]), said
    finally:
        patch.undo()
        world.device = torch.device("cpu")
        world.close()


def test_ranks_agree(ranks, tmp_path):
    results = ranks.run(4, _detected, [NOWHERE], None)
    assert all(found == results[0][0] and not said for found, said in results)
    assert results[0][0].uniform and find_topology(results[0][0], 4).num_devices == 4
    fast = Tree(tmp_path)
    fast.interface("eth0", "pci0000:00/0000:00:03.0", "100000")
    results = ranks.run(4, _detected, [NOWHERE, tmp_path], None)
    found, said = results[0]
    assert results == [(found, said)] * 4
    assert [found.hops[hop].gb_per_s for hop in found.links[0, 2]] == [3.12, 12.5]
    assert len(said) == 1 and "ranks 0, 1: one network port of 3.12 GB/s" in said[0]
    fast.interface("eth1", "pci0000:00/0000:00:04.0", "100000")  # which of the two gloo takes is unknown
    results = ranks.run(4, _detected, [tmp_path, tmp_path], None)
    assert same(results[0][0], machines([2, 2])) and len(results[0][1]) == 2


def test_ranks_agree_on_gpus(ranks):
    there = {"nvlinks": cube_mesh(), "ancestors": ancestors_of_8()}
    results = ranks.run(4, _detected, [NOWHERE] * 2, there)
    found, said = results[0]
    assert results == [(found, said)] * 4
    assert [found.hops[hop].gb_per_s for hop in found.links[0, 1]] == [24.22]
    assert found.hosts == ((0, 1), (2, 3)) and [found.hops[hop].gb_per_s for hop in found.links[0, 2]] == [3.12, 3.12]
    assert ["slots of 11.13" in text and "port of 3.12" in text and "NVLinks" not in text for text in said] == [
        True
    ] * 2
    results = ranks.run(4, _detected, [NOWHERE] * 2, {})
    assert all(same(found, machines([2, 2])) for found, _ in results)
    assert "ranks 0, 1" in results[0][1][0] and "pip install nvidia-ml-py" in results[0][1][0]


# H100s #######################################################################

NUM_H100 = 4
H100_NVML = {
    "nvlinks": [[0] * NUM_H100] * NUM_H100,
    "ancestors": [[SYSTEM if a // 2 != b // 2 else NUMA_NODE for b in range(NUM_H100)] for a in range(NUM_H100)],
    "switch_nvlinks": [18] * NUM_H100,
    "nvlink_mbps": 26562,
}
"""Four in two sockets, each on a host bridge of its own, and joined by NVSwitches."""


def h100_tree(root: Path, where: str) -> Path:
    """Their PCIe 5, and 400 Gbit/s ports: one under each GPU's switch, one under the first's, or one apart from all of them."""
    tree = Tree(root)
    for gpu in range(NUM_H100):
        tree.device(slot_of(gpu, gpu), numa_node=gpu // 2)
    apart = "pci0000:80/0000:80:01.0/0000:81:00.0"
    nics = {
        "each": [slot_of(gpu, gpu).replace(":00.0", ":00.1") for gpu in range(NUM_H100)],
        "first": [slot_of(0, 0).replace(":00.0", ":00.1")],
        "apart": [apart],
    }[where]
    for number, path in enumerate(nics):
        tree.device(path, numa_node=0 if where == "apart" else number // 2)
        tree.rdma(f"mlx5_{number}", path)
    storage = "pci0000:90/0000:90:01.0/0000:91:00.0"
    tree.device(storage)
    tree.rdma("mlx5_9", storage, "100 Gb/sec (4X EDR)")  # slower: not for messages
    tree.interface("eth0", storage, "25000")
    return root


def h100_by_hand(where: str) -> Topology:
    """The same machines by NVIDIA's data sheet: 450 GB/s of NVLink per GPU, 63 GB/s of PCIe 5 x16, ports of 50 GB/s; and 48 GB/s
    between sockets."""
    hops = [{"name": f"nvlink{gpu}", "kind": "nvlink", "gb_per_s": 450.0} for gpu in range(8)]
    hops += [{"name": f"pcie{gpu}", "kind": "pcie", "gb_per_s": 63.0} for gpu in range(8)]
    hops += [{"name": f"port{number}", "kind": "ib", "gb_per_s": 50.0} for number in range(8 if where == "each" else 2)]
    hops += [{"name": f"sockets{host}", "kind": "qpi", "gb_per_s": 48.0} for host in range(2)]

    def out(gpu: int) -> list[str]:
        host = gpu // 4
        if where == "each":
            return [f"port{gpu}"]
        if where == "first" and gpu % 4 == 0:
            return [f"port{host}"]
        sockets = [f"sockets{host}"] if gpu % 4 >= 2 else []
        into = [f"-pcie{4 * host}"] if where == "first" else []
        return [f"pcie{gpu}", *sockets, *into, f"port{host}"]

    def back(way: list[str]) -> list[str]:
        return [name[1:] if name.startswith("-") else f"-{name}" for name in reversed(way)]

    links = [
        {"a": a, "b": b, "via": [f"nvlink{a}", f"-nvlink{b}"] if a // 4 == b // 4 else out(a) + back(out(b))}
        for a, b in combinations(range(8), 2)
    ]
    hosts = [{"devices": [*range(first, first + 4)]} for first in (0, 4)]
    return topology_from_dict({"devices": 8, "hosts": hosts, "hops": hops, "links": links, **nccl_latency(2)})


@cache
def twitter() -> Relation:
    """ego-twitter over two machines of four."""
    path = SHARED / "data/edges/ego-twitter.npz"
    if not path.exists():
        pytest.skip("needs ego-twitter.npz in the data folder (set LIGHTNING_GNN_SHARED)")
    arrays = np.load(path)
    edge_index, num_nodes = np.stack([arrays["src"], arrays["dst"]]).astype(np.int64), int(arrays["num_nodes"])
    part = assign_nodes(edge_index, num_nodes, 8, groups=((0, 1, 2, 3), (4, 5, 6, 7))).part
    relabelling = Relabelling.from_assignment(part, 8)
    return Relation.from_edges(relabelling.new_ids()[edge_index], relabelling.offsets)


def test_which_ports_ranks_use(ranks, tmp_path):
    """One rank of each machine: on GPUs InfiniBand, without it interfaces; on CPUs an interface."""
    tree, slow = Tree(h100_tree(tmp_path, "each")), "pci0000:91/0000:91:01.0/0000:92:00.0"

    def rates(nvml: dict[str, Any] | None, interface: str = "") -> list[float]:
        [(found, _), (other, _)] = ranks.run(2, _detected, [tmp_path] * 2, nvml, interface)
        assert found == other
        return [found.hops[hop].gb_per_s for hop in found.links[0, 1]]

    assert rates(H100_NVML) == [50.0, 50.0]
    assert rates(None) == [3.125, 3.125]
    tree.interface("eth1", slow, "10000")
    assert rates(None) == [3.12, 3.12]  # assumed
    assert rates(None, "eth1") == [1.25, 1.25]
    (tmp_path / "class/infiniband").rename(tmp_path / "class/none")
    assert 3.125 in rates(H100_NVML) and 1.25 not in rates(H100_NVML)


@pytest.mark.parametrize("where", ["each", "first", "apart"])
def test_plans_over_h100s_cost_what_they_do_by_hand(ranks, tmp_path, where):
    trees = [h100_tree(tmp_path / str(host), where) for host in range(2)]
    results = ranks.run(8, _detected, trees, H100_NVML)
    found, said = results[0]
    assert results == [(found, said)] * 8
    assert not said if where == "each" else len(said) == 1 and "between sockets" in said[0]
    truth = h100_by_hand(where)
    known, right = (fastest_plans(twitter(), topology) for topology in (found, truth))
    for row_bytes in (256, 1024, 4096, 1 << 20):
        made, best = fastest(known, row_bytes), fastest(right, row_bytes)
        seconds = best.cost.seconds(row_bytes)
        assert made.cost.seconds(row_bytes) == pytest.approx(seconds, rel=0.05)
        assert plan_cost(made.plan, truth).seconds(row_bytes) <= 1.05 * seconds
    without = detect_topology([Machine((0, 1, 2, 3)), Machine((4, 5, 6, 7))])
    assert fastest(fastest_plans(twitter(), without), 1024).cost.seconds(1024) > 5 * fastest(right, 1024).cost.seconds(
        1024
    )
