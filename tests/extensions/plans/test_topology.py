"""Topologies: files, presets, restriction, refusals; hierarchical cuts and the predictions that need no plan. No ranks."""

from __future__ import annotations

import json
from itertools import permutations

import numpy as np
import pytest
from common import examples
from conftest import SHARED
from hypothesis import given
from hypothesis import strategies as st
from planning import problems, random_relation

from lightning_gnn.extensions.plans import presets
from lightning_gnn.extensions.plans import topology as terms
from lightning_gnn.extensions.plans.plan_cost import direct_cost, swap_cost
from lightning_gnn.extensions.plans.presets import dgx1, find_topology, pcie8, summit
from lightning_gnn.extensions.plans.wiring import load_topology, machines, topology_from_dict, topology_to_dict, uniform
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.metrics import edge_cut_report
from lightning_gnn.partition.replicas import replication_factors


@examples(30)
@given(problem=problems())
def test_files_keep_everything(problem, tmp_path_factory):
    path = tmp_path_factory.mktemp("topology") / "t.json"
    for topology in (problem[1], dgx1(2), pcie8(), summit(14)):
        path.write_text(json.dumps(topology_to_dict(topology)))
        assert load_topology(path) == topology
        for (a, b), via in topology.links.items():
            assert topology.links[b, a] == tuple(hop ^ 1 for hop in reversed(via))
            assert [topology.hops[hop].gb_per_s for hop in via] == [topology.hops[hop ^ 1].gb_per_s for hop in via]


DGX1 = """
     0   1   2   3   4   5   6   7
0    X   NV1 NV1 NV2 NV2 SYS SYS SYS
1    NV1 X   NV2 NV1 SYS NV2 SYS SYS
2    NV1 NV2 X   NV2 SYS SYS NV1 SYS
3    NV2 NV1 NV2 X   SYS SYS SYS NV1
4    NV2 SYS SYS SYS X   NV1 NV1 NV2
5    SYS NV2 SYS SYS NV1 X   NV2 NV1
6    SYS SYS NV1 SYS NV1 NV2 X   NV2
7    SYS SYS SYS NV1 NV2 NV1 NV2 X
"""
"""What ``nvidia-smi topo -m`` prints on a DGX-1 with V100; SYS is over PCIe and between the sockets."""

MEASURED = {"NV2": 48.35, "NV1": 24.22, "PCIe": 11.13, "QPI": 9.56, "IB": 6.37, "Ethernet": 3.12}
"""GB/s of DGCL's Table 1."""


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_dgx1_is_the_machine_that_the_driver_shows(num_hosts):
    found = dgx1(num_hosts)
    rates = {hop.name.strip("-0123456789"): hop.gb_per_s for hop in found.hops if hop.kind != "nvlink"}
    assert rates == {"pcie": 11.13, "qpi": 9.56} | ({"port": MEASURED["IB"]} if num_hosts > 1 else {})
    for host in range(num_hosts):
        for a, line in enumerate(DGX1.strip().splitlines()[1:]):
            for b, kind in enumerate(line.split()[1:]):
                if kind == "X":
                    continue
                hops = [found.hops[hop] for hop in found.links[8 * host + a, 8 * host + b]]
                if kind == "SYS":
                    names = [f"pcie{4 * host + a // 2}", f"qpi{host}", f"pcie{4 * host + b // 2}"]
                    signs = ("", "-" * (a > b), "-")
                    assert [hop.name for hop in hops] == [sign + name for sign, name in zip(signs, names)]
                else:
                    assert [hop.gb_per_s for hop in hops] == [MEASURED[kind]] and hops[0].kind == "nvlink"
    assert len(found.links) == 8 * num_hosts * (8 * num_hosts - 1)


def test_bandwidths_are_those_of_the_papers():
    constants = (terms.NVLINK_PAIR, terms.NVLINK, terms.PCIE, terms.QPI, terms.INFINIBAND, terms.ETHERNET)
    assert constants == tuple(MEASURED.values())
    assert (presets.SUMMIT_NVLINK, presets.SUMMIT_XBUS, presets.SUMMIT_SOCKET_PORT) == (50.0, 64.0, 12.5)  # CAGNET 5.2
    # NCCL's base latency of rings, and that of PCIe and of the network, in microseconds
    assert pytest.approx((14.1e-6, 22.4e-6)) == (presets.NCCL_STAGE, presets.NCCL_STAGE_BETWEEN_HOSTS)
    assert dgx1().stage_seconds == pcie8().stage_seconds == summit(6).stage_seconds == presets.NCCL_STAGE
    assert dgx1(2).stage_seconds == summit(7).stage_seconds == presets.NCCL_STAGE_BETWEEN_HOSTS
    apart = machines([2, 2])
    assert (apart.stage_seconds, apart.message_seconds) == (terms.SOCKET_STAGE, terms.SOCKET_MESSAGE)


def test_pcie8_has_a_switch_for_two_and_two_for_a_socket():
    found = pcie8()
    for a, b in permutations(range(8), 2):
        names = [f"slot{a}", f"-slot{b}"]
        if a // 2 != b // 2:
            names[1:1] = [f"pcie{a // 2}", f"-pcie{b // 2}"]
        if a // 4 != b // 4:
            names.insert(2, "qpi" if a < b else "-qpi")
        assert [found.hops[hop].name for hop in found.links[a, b]] == names
    assert {hop.name.strip("-0123456789"): hop.gb_per_s for hop in found.hops} == {
        "slot": 11.13,
        "pcie": 11.13,
        "qpi": 9.56,
    }


def test_presets():
    machine, two = dgx1(), dgx1(2)
    assert two.hosts == (tuple(range(8)), tuple(range(8, 16)))
    names = [two.hops[hop].name for hop in two.links[6, 9]]
    assert names == ["pcie3", "-qpi0", "-pcie0", "port0", "-port1"]
    assert uniform(5).uniform and not machine.uniform and find_topology("dgx1", 2).uniform
    assert find_topology("dgx1x2", 8).hops == dgx1().hops
    assert find_topology(machine, 3).num_devices == 3


def test_summit():
    nodes = find_topology("summit", 14)  # the third is not full
    assert nodes == summit(14) and len(nodes.links) == 14 * 13
    assert nodes.sockets == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11), (12, 13))

    def way(topology, a, b):
        return [topology.hops[hop].name for hop in topology.links[a, b]]

    assert [way(nodes, 0, 2), way(nodes, 0, 3)] == [["0-2"], ["cpu0", "xbus0", "-cpu3"]]
    assert way(nodes, 5, 13) == ["cpu5", "port1", "-port4", "-cpu13"]
    rows = np.zeros((14, 14))
    rows[[3, 4, 5], [6, 7, 8]] = 1e9  # three of a socket, each to another GPU
    assert direct_cost(rows[None], nodes).seconds_per_byte == pytest.approx(3 / 12.5)
    assert find_topology("summit", 2).uniform and find_topology("summit", None) == summit()
    apart = summit(16, per_host=1)
    assert len(apart.hosts) == 16 and way(apart, 3, 15) == ["cpu3", "port6", "-port30", "-cpu15"]
    with pytest.raises(ValueError, match="per_host must be from 1 to 6"):
        summit(8, per_host=8)


def test_ways_to_ports_and_memory():
    """DGCL section 7: GPUs under the InfiniBand card's switch reach it directly; CAGNET section 5.2: a CPU at each socket."""

    def names(topology, way):
        return [topology.hops[hop].name for hop in way]

    two, nodes = dgx1(2), summit(12)
    for gpu in range(8):
        first = [] if gpu < 2 else [f"pcie{gpu // 2}", *["-qpi0"] * (gpu >= 4), "-pcie0"]
        assert names(two, two.links[gpu, 8]) == [*first, "port0", "-port1"]
    assert [names(two, way) for way in two.memory] == [[f"pcie{gpu // 2}"] for gpu in range(16)]
    assert [names(pcie8(), way) for way in pcie8().memory] == [[f"slot{gpu}", f"pcie{gpu // 2}"] for gpu in range(8)]
    assert [names(nodes, way) for way in nodes.memory] == [[f"cpu{gpu}"] for gpu in range(12)]
    rates = {hop.name.strip("-").rstrip("-0123456789"): hop.gb_per_s for hop in nodes.hops}
    assert rates == {"": 50.0, "cpu": 50.0, "xbus": 64.0, "port": 12.5}


@pytest.mark.skipif(not (SHARED / "netlab").exists(), reason="needs the emulator's topologies")
def test_files_of_the_emulator():
    found = load_topology(SHARED / "netlab" / "topologies" / "dgx1_8.json")
    assert found.hops[found.links[0, 3][0]].gb_per_s == pytest.approx(96.7 / 8000)
    kinds = [[topology.hops[hop].kind for hop in topology.links[0, 5]] for topology in (found, dgx1())]
    assert kinds == [
        ["pcie", "qpi", "pcie", "pcie"],
        ["pcie", "qpi", "pcie"],
    ]  # the emulator's has a rate per link as well


LINK = {"a": 0, "b": 1, "gb_per_s": 1.0}
BAD = [
    ([], "topology must be a JSON object"),
    ({}, "'devices' must be int (it is missing)"),
    ({"devices": "two", "links": []}, "'devices' must be int (got 'two')"),
    ({"devices": 0, "links": []}, "1 to 64 devices (got 0)"),
    ({"devices": 65, "links": []}, "1 to 64 devices (got 65)"),
    ({"devices": 2}, "'links' must be list (it is missing)"),
    ({"devices": 2, "links": []}, "not connected: no links lead from device 0 to 1"),
    ({"devices": 4, "links": [LINK, {"a": 2, "b": 3, "gb_per_s": 1}]}, "from device 0 to 2"),
    ({"devices": 2, "links": [{"a": 0, "b": 2, "gb_per_s": 1}]}, "must join two of the devices 0 to 1"),
    ({"devices": 2, "links": [{"a": 0, "b": 0, "gb_per_s": 1}]}, "Link 0-0 must join two"),
    ({"devices": 2, "links": [LINK, {"a": 1, "b": 0, "gb_per_s": 1}]}, "links[1]: the link between 1 and 0 is defined twice"),
    ({"devices": 2, "links": [{"a": 0, "b": 1}]}, "Link 0-1 has no hops. Set gb_per_s or via"),
    ({"devices": 2, "links": [{"a": 0, "b": 1, "gb_per_s": 0}]}, "needs a positive bandwidth in GB/s (got 0)"),
    ({"devices": 2, "links": [{"a": 0, "b": 1, "gb_per_s": -1}]}, "positive bandwidth"),
    ({"devices": 2, "links": [{"a": 0, "b": 1, "gb_per_s": float("nan")}]}, "positive bandwidth"),
    ({"devices": 2, "links": [{"a": 0, "b": 1, "gb_per_s": "fast"}]}, "links[0]: 'gb_per_s' must be int or float"),
    ({"devices": 2, "links": [{"a": 0, "b": 1, "via": ["bus"]}]}, "via names the hop 'bus'; the hops are none"),
    ({"devices": 2, "links": [LINK], "hops": [{"name": "x"}]}, "hops[0]: 'gb_per_s' must be int or float (it is missing)"),
    ({"devices": 2, "links": [LINK], "hops": [{"name": "x", "gb_per_s": 1}] * 2}, "hops[1]: name must be unique"),
    ({"devices": 2, "links": [LINK], "hosts": [{"devices": [0]}]}, "hosts must contain each device 0 to 1 once"),
    ({"devices": 2, "links": [LINK], "hosts": [{"devices": [0, "1"]}]}, "'devices' must be a list of integers"),
    ({"devices": 2, "links": [LINK], "hosts": [{"devices": [0]}, {"devices": [1], "sockets": [[0], [1]]}]}, "sockets"),
    ({"devices": 2, "links": [LINK], "memory": [{"device": 0, "via": []}]}, "'memory' must have an entry for each device 0 to 1"),
]  # fmt: skip


@pytest.mark.parametrize(("description", "message"), BAD)
def test_bad_descriptions_name_the_field(description, message, tmp_path):
    with pytest.raises(ValueError) as caught:
        topology_from_dict(description)
    assert message in str(caught.value)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"bad\.json: "):
        load_topology(path)


def test_other_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"'dgx1' has 8 devices, but there are 9 ranks"):
        find_topology("dgx1", 9)
    with pytest.raises(ValueError, match=r"one of dgx1, dgx1x2, pcie8, summit, uniform or a JSON file \(got 'dgx2'\)"):
        find_topology("dgx2", 2)
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(ValueError, match=r"t\.json is not JSON"):
        find_topology(tmp_path / "t.json", 2)
    relation = random_relation(np.random.default_rng(0), 16, 10)
    with pytest.raises(ValueError, match="memory of one machine"):
        swap_cost(relation, dgx1(2))
    with pytest.raises(ValueError, match="no links between devices and host memory"):
        swap_cost(relation, uniform(16))


def test_swap_writes_everything_and_reads_halos():
    relation = random_relation(np.random.default_rng(0), 8, 4000)
    cost = swap_cost(relation, dgx1())
    owned, halo = np.diff(relation.offsets), relation.pair_rows.sum(0)
    expected = [
        max(rows[i] + rows[i + 1] for i in (0, 2, 4, 6)) / 11.13e9 for rows in (owned, halo)
    ]  # two share a switch
    assert cost.stage_seconds(1) - cost.fixed_seconds == pytest.approx(expected)


@examples(40)
@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 4))
def test_replication_factors_against_a_loop(seed, parts, hops):
    rng = np.random.default_rng(seed)
    edge_index, part = rng.integers(0, 20, (2, 30)), rng.integers(0, parts, 20)
    held = [set(np.flatnonzero(part == p).tolist()) for p in range(parts)]
    for found in replication_factors(edge_index, part, parts, hops):
        for nodes in held:
            nodes |= {int(source) for source, target in edge_index.T if int(target) in nodes}
        assert found == pytest.approx(sum(map(len, held)) / 20)


def communities(rng: np.random.Generator, num_nodes: int = 1600) -> np.ndarray:
    """Returns the edges of a graph of 16 groups, in pairs, in fours."""
    source = rng.integers(0, num_nodes, 16_000)
    size = num_nodes // rng.choice([16, 16, 8, 4, 2], len(source))
    return np.stack([source, source // size * size + rng.integers(0, size)])


def test_hierarchical_cuts_send_less_between_machines():
    rng = np.random.default_rng(0)
    edge_index = communities(rng)
    topology = find_topology("dgx1x2", 16)
    part = assign_nodes(edge_index, 1600, 16, groups=topology.groups).part
    assert part.dtype == np.int32 and sorted(np.unique(part)) == list(range(16))
    assert edge_cut_report(edge_index, part, 16).node_balance < 1.5
    between = (part[edge_index] // 8)[0] != (part[edge_index] // 8)[1]
    scattered = rng.permutation(16)[part]  # parts as good, on any devices
    assert between.sum() < 0.7 * ((scattered[edge_index] // 8)[0] != (scattered[edge_index] // 8)[1]).sum()
    assert np.array_equal(part, assign_nodes(edge_index, 1600, 16, groups=topology.groups).part)


def test_hierarchical_cuts_refuse():
    edges = np.zeros((2, 1), np.int64)
    with pytest.raises(ValueError, match=r"the same number of devices \(got \(\(0, 1\), \(2,\)\)"):
        assign_nodes(edges, 9, 3, groups=((0, 1), (2,)))
    with pytest.raises(ValueError, match="devices 0 to 1, each once"):
        assign_nodes(edges, 9, 2, groups=((0,), (2,)))
    assert assign_nodes(edges, 3, 2, groups=((0,), (1,))).part.max() <= 1
