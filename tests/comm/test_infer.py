"""Topologies from measurements: simulated ones of known topologies, without ranks; real ones of gloo ranks, and the command."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from common import assert_same, awkward_graph, examples, single, train
from conftest import SHARED
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn import cli
from lightning_gnn.comm.group import World
from lightning_gnn.comm.measure import Stopwatch, measure
from lightning_gnn.commands.topology import check_writable, topology
from lightning_gnn.planning.infer import (
    Flow,
    all_flows,
    crowds_to_measure,
    fair_rates,
    hosts_by_speed,
    infer,
    pairs_to_measure,
)
from lightning_gnn.planning.presets import dgx1, machines, pcie8, uniform
from lightning_gnn.planning.topology import Topology
from lightning_gnn.planning.topology_file import load_topology, topology_from_dict, topology_to_dict
from lightning_gnn.strategies.dgcl import DGCLScheme

NETLAB = SHARED / "netlab" / "topologies"


def carried(true: Topology, flows: tuple[Flow, ...], lengths: np.ndarray) -> float:
    """What messages of these lengths carry until the last has arrived, sharing max-min fairly; see `Stopwatch`."""
    left, seconds = lengths.astype(float), 0.0
    while (running := np.flatnonzero(left > 1e-9 * lengths)).size:
        rates = fair_rates(true, [flows[index] for index in running])
        step = (left[running] / rates).min()
        left[running] -= rates * step
        seconds += step
    return float(lengths.sum() / seconds)


def measured(true: Topology, noise: float = 0.0, seed: int = 0, hosts: list[list[int]] | None = None) -> Topology:
    """What is inferred from a simulation in which every timing is up to `noise` slower than the truth."""
    rng = np.random.default_rng(seed)
    alone = np.ones((true.num_devices, true.num_devices))
    for flow in all_flows(true.num_devices):
        alone[flow] = fair_rates(true, [flow])[0] * (1 - noise * rng.random())
    together: dict[tuple[Flow, ...], float] = {}
    for f, g in pairs_to_measure(true.num_devices):
        together[f, g] = carried(true, (f, g), np.array([alone[f], alone[g]])) * (1 - noise * rng.random())
    first = infer(alone, together, hosts)
    for crowd in crowds_to_measure(first):
        together[crowd] = carried(true, crowd, fair_rates(first, crowd)) * (1 - noise * rng.random())
    return infer(alone, together, hosts)


def cost_ratios(true: Topology, found: Topology, seed: int = 0) -> np.ndarray:
    """Cost of the direct exchange as `found` predicts it, over the true one, for random traffic."""
    rng = np.random.default_rng(seed)
    ratios = []
    for density in np.repeat([0.1, 0.3, 1.0], 20):
        rows = rng.integers(1, 1000, (true.num_devices, true.num_devices)) * (
            rng.random((true.num_devices,) * 2) < density
        )
        np.fill_diagonal(rows, 0)
        if rows.any():
            costs = [(np.einsum("ab,abh->h", rows, t.passes) / t.gb_per_s).max() for t in (found, true)]
            ratios.append(costs[0] / costs[1])
    return np.array(ratios)


def random_tree(rng: np.random.Generator, num_devices: int) -> Topology:
    """Devices below switches of a tree, of whose connections any two flows fill each; some pairs joined directly instead."""
    num_switches = int(rng.integers(1, 4))
    parent = [int(rng.integers(0, max(place, 1))) for place in range(num_switches)]
    below = [int(rng.integers(0, num_switches)) for _ in range(num_devices)]

    def up(device: int) -> list[str]:
        way, switch = [f"slot{device}"], below[device]
        while switch:
            way.append(f"up{switch}")
            switch = parent[switch]
        return way

    names = [*(f"slot{device}" for device in range(num_devices)), *(f"up{switch}" for switch in range(1, num_switches))]
    hops = [{"name": name, "gb_per_s": float(rng.choice([1.0, 1.15, 1.35, 1.6]))} for name in names]
    links = []
    for a in range(num_devices):
        for b in range(a + 1, num_devices):
            if rng.random() < 0.2:
                links.append({"a": a, "b": b, "gb_per_s": float(rng.choice([2.0, 5.0, 10.0]))})
            else:
                rise, fall = up(a), up(b)
                both = set(rise) & set(fall)
                via = [name for name in rise if name not in both] + [f"-{n}" for n in fall[::-1] if n not in both]
                links.append({"a": a, "b": b, "via": via})
    return topology_from_dict({"devices": num_devices, "hops": hops, "links": links})


@examples(40)
@given(st.integers(0, 100_000), st.integers(2, 7))
def test_trees_are_recovered(seed, num_devices):
    true = random_tree(np.random.default_rng(seed), num_devices)
    ratios = cost_ratios(true, measured(true), seed)
    assert ratios.min() > 0.9 and ratios.max() < 1.1


KNOWN = {
    "dgx1": dgx1,
    "pcie8": pcie8,
    "uniform": lambda: uniform(5),
    "machines": lambda: machines([2, 3, 1]),
    "2x2": lambda: machines([2, 2], [24.22, 11.13], 6.37),
    **{
        path.stem: lambda path=path: load_topology(path)
        for path in sorted(NETLAB.glob("*.json"))  # type: ignore[misc]
    },
}


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("name", KNOWN)
def test_known_topologies_are_recovered(name, noise):
    true = KNOWN[name]()
    for seed in range(3):
        found = measured(true, noise, seed)
        ratios = cost_ratios(true, found)
        assert ratios.min() > 0.9 and ratios.max() < 1.1
        assert found.uniform == true.uniform


def test_hosts_and_sockets():
    assert measured(dgx1()).groups == (((0, 1, 2, 3), (4, 5, 6, 7)),)
    assert measured(machines([2, 2])).hosts == ((0, 1), (2, 3))
    assert hosts_by_speed(np.full((3, 3), 2.0)) == [[0, 1, 2]]
    given_hosts = [[0], [1, 2]]
    assert measured(uniform(3), hosts=given_hosts).hosts == ((0,), (1, 2))


def test_pairs_are_measured_once():
    pairs = pairs_to_measure(4)
    flows = all_flows(4)
    wanted = {frozenset((f, g)) for f in flows for g in flows if f != g and f != g[::-1]}
    mirrored = [frozenset((f[::-1], g[::-1])) for f, g in pairs]
    assert {frozenset(pair) for pair in pairs} | set(mirrored) == wanted
    assert 2 * len(pairs) == len(wanted) + sum(frozenset(p) == m for p, m in zip(pairs, mirrored))


def test_a_port_that_no_two_flows_fill():
    links = [{"a": a, "b": b, "gb_per_s": 1, "via": ["nic"] * (a < 3 <= b)} for a in range(6) for b in range(a + 1, 6)]
    true = topology_from_dict({"devices": 6, "hops": [{"name": "nic", "gb_per_s": 3}], "links": links})
    found = measured(true, hosts=[[0, 1, 2], [3, 4, 5]])
    assert [hop.gb_per_s for hop in found.hops if hop.kind == "shared"] == pytest.approx([3, 3])
    assert cost_ratios(true, found) == pytest.approx(1)


def test_flows_that_meet_two_by_two_in_three_places():
    ways = {(0, 1): ["x", "y"], (2, 3): ["y", "z"], (4, 5): ["z", "x"]}
    links = [
        {"a": a, "b": b, **({"via": ways[a, b]} if (a, b) in ways else {"gb_per_s": 1})}
        for a in range(6)
        for b in range(a + 1, 6)
    ]
    hops = [{"name": name, "gb_per_s": 1} for name in "xyz"]
    true = topology_from_dict({"devices": 6, "hops": hops, "links": links})
    found = measured(true)
    assert cost_ratios(true, found) == pytest.approx(1)
    assert [len([f for f in found.links if hop in found.links[f]]) for hop in range(0, 6, 2)] == [2, 2, 2]


def test_copying_through_one_memory_is_a_bus():
    alone = np.full((4, 4), 10.0)
    together: dict[tuple[Flow, ...], float] = dict.fromkeys(pairs_to_measure(4), 12.0)
    found = infer(alone, together)
    assert [(hop.kind, hop.gb_per_s) for hop in found.hops] == [("bus", 6.0)] * 2
    [bus, *_] = crowds_to_measure(found)[1:2]
    assert sorted(bus) == all_flows(4)
    assert infer(alone, {**together, bus: 16.0}).hops[0].gb_per_s == 8.0


def test_refuses_pairs_without_bandwidth():
    with pytest.raises(ValueError, match="Each ordered pair of devices needs a bandwidth above 0"):
        infer(np.array([[0.0, 1.0], [0.0, 0.0]]), {})


# Ranks #######################################################################


def _measured(rank: int, size: int, shared_memory: bool) -> tuple[Topology, list[str]]:
    world = World(rank, size, torch.device("cpu"), timedelta(seconds=60), shared_memory)
    phases: list[str] = []
    try:
        return measure(world, 0.001, 1_000_000, None, lambda phase, done, total: phases.append(phase)), phases
    finally:
        world.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_all_ranks_measure_the_same(ranks, shared_memory):
    results = ranks.run(3, _measured, shared_memory)
    assert all(result == results[0] for result in results)
    found, phases = results[0]
    assert found.num_devices == 3 and len(found.links) == 6
    assert phases[: 6 + len(pairs_to_measure(3))] == ["alone"] * 6 + ["in pairs"] * len(pairs_to_measure(3))


def _uneven(rank: int, size: int) -> tuple[Topology, list[str]]:
    world = World(rank, size, torch.device("cpu"), timedelta(seconds=60))
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stopwatch, "alone", lambda self, flow: 1.0 + flow[0])
        patch.setattr("lightning_gnn.comm.measure.rank_zero_warn", said.append)
        found = measure(world, 0.001, 1_000_000, None, lambda phase, done, total: None)
    world.close()
    return found, said


def test_says_where_directions_differ(ranks):
    [found, [said]] = ranks.run(2, _uneven)[0]
    assert "between ranks 0-1" in said and [hop.gb_per_s for hop in found.hops] == [1.5, 1.5]


# The command #################################################################


@pytest.mark.slow
def test_measure_starts_ranks_and_writes_what_show_reads(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "found.json"
    topology(["measure", "--ranks=2", "--seconds=0.005", "--device=cpu", f"--output={path}"])
    said = capfd.readouterr()
    output = said.out + said.err
    assert "alone: 2 of 2" in output and f"Written to {path}" in output
    assert [each.name for each in tmp_path.glob("*.json")] == ["found.json"]
    assert load_topology(path).num_devices == 2
    topology(["show", str(path)])
    assert "0-1" in capfd.readouterr().out


def test_show(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    topology(["show", "dgx1"])
    said = capsys.readouterr().out
    assert "0, 1, 2, 3 | 4, 5, 6, 7" in said and "pcie0, qpi0, -pcie2" in said and "9.56" in said
    topology(["show", "uniform", "--ranks=3"])
    assert "1-2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["measure", "--output=x.json"], {}, "how many ranks? give --ranks N"),
        (["measure", "--output=x.json", "--ranks=1"], {}, "one rank has no links"),
        (["measure", "--output=x.json", "--ranks=65"], {}, "at most 64 ranks (got 65)"),
        (["measure", "--output=x.json", "--ranks=2", "--seconds=0"], {}, "--seconds is a number above 0 (got 0.0)"),
        (["measure", "--output=x.json", "--ranks=2", "--device=tpu"], {}, "--device is auto, cpu or cuda (got 'tpu')"),
        (["measure", "--output=.", "--ranks=2"], {}, "is a folder: name a file in it"),
        (["measure", "--output=no/x.json", "--ranks=2"], {}, "there is no folder"),
        (["measure", "--output=x.json"], {"RANK": "0", "WORLD_SIZE": "2"}, "but not MASTER_ADDR, MASTER_PORT"),
        (
            ["measure", "--output=x.json", "--ranks=3"],
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
            "--ranks 3, but the launcher has started 2",
        ),
        (["measure", "--ranks=2"], {}, "output"),
        (["measure", "--otput=x.json"], {}, "did you mean 'output'"),
        (["mesure"], {}, "did you mean 'measure'"),
        (["show", "dgx2"], {}, "topology must be one of dgx1, dgx1x2, pcie8, summit, uniform or a JSON file"),
        (["show", "uniform"], {}, "as many devices as there are ranks"),
        (["show", "dgx1", "--ranks=9"], {}, "has 8 devices, but there are 9 ranks"),
    ],
)
def test_refusals(arguments, variables, message, tmp_path, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-gnn", "topology", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_output_must_be_writable(tmp_path, monkeypatch):
    check_writable(tmp_path / "x.json")

    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"cannot write to .* \(Permission denied\)"):
        check_writable(tmp_path / "x.json")


def test_files_of_the_command_are_topologies(tmp_path):
    found = measured(dgx1())
    (tmp_path / "t.json").write_text(json.dumps(topology_to_dict(found)))
    assert load_topology(tmp_path / "t.json") == found


# Runs that measure ###########################################################


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_run_measures_its_links_and_plans_over_them(ranks, codec):
    """Whatever is measured, training is as on one device; with links that differ, the plan is of what was measured."""
    graph = awkward_graph()
    options = {"plan": "spst", "topology": "measured", "shared_memory": False, **({"codec": codec} if codec else {})}
    results = ranks.run(3, trained_over_measured_links, graph, options)
    expected = single(graph, "gcn")
    assert results[0][1]["topology"] == "measured" and results[0][1]["stages"] == 2
    if codec is None:
        for result, _ in results:
            assert_same(result, expected, rtol=1e-9, atol=1e-11)


def trained_over_measured_links(
    rank: int, size: int, graph: Any, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    found: list[dict[str, Any]] = []
    followed = DGCLScheme.followed

    def noted(scheme: DGCLScheme) -> dict[str, Any]:
        found.append(followed(scheme))
        return found[-1]

    def alone(watch: Stopwatch, flow: tuple[int, int]) -> float:  # between ranks 0 and 1 links are slow
        return 0.01 if set(flow) == {0, 1} else 10.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DGCLScheme, "followed", noted)
        patch.setattr(Stopwatch, "alone", alone)
        patch.setattr(Stopwatch, "together", lambda watch, flows, rates, repeats=1: float(sum(rates)))
        patch.setattr("lightning_gnn.comm.measure.fixed_seconds", lambda world: (0.0, 0.0))
        return train(rank, size, graph, "gcn", options=options), found[-1] if found else {}


def test_no_more_ranks_are_measured_than_plans_are_made_for():
    assert DGCLScheme(topology="measured").layout(64, num_hosts=2).groups is not None
    with pytest.raises(
        ValueError, match='topology="measured" times messages between each two ranks, of at most 64 .got 65.'
    ):
        DGCLScheme(topology="measured").layout(65)
