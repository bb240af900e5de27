"""Topologies from measurements between ranks, the command, and runs that measure."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from common import assert_same, awkward_graph, single, train

from lightning_gnn.comm.group import World
from lightning_gnn.extensions.plans import scheme
from lightning_gnn.extensions.plans.measure import levels, measure
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.wiring import load_topology
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.tools import cli
from lightning_gnn.tools.commands.topology import check_writable, topology

# Ranks #######################################################################


def _measured(rank: int, size: int, shared_memory: bool) -> tuple[Topology, list[tuple[int, int]]]:
    world = World(rank, size, torch.device("cpu"), timedelta(seconds=60), shared_memory)
    told: list[tuple[int, int]] = []
    try:
        return measure(world, 0.001, 1_000_000, lambda done, total: told.append((done, total))), told
    finally:
        world.close()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_all_ranks_measure_the_same(ranks, shared_memory):
    results = ranks.run(3, _measured, shared_memory)
    assert all(result == results[0] for result in results)
    found, told = results[0]
    assert found.num_devices == 3 and len(found.links) == 6 and found.hosts == ((0, 1, 2),)
    assert told == [(done, 6) for done in range(1, 7)]


def _of_rates(rank: int, size: int, rates: dict[tuple[int, int], float]) -> tuple[Topology, list[str]]:
    """Measures, where messages between two ranks are known to be so fast."""
    world = World(rank, size, torch.device("cpu"), timedelta(seconds=60))
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lightning_gnn.extensions.plans.measure.rate", lambda world, a, b, seconds, most_bytes: rates[a, b]
        )
        patch.setattr("lightning_gnn.extensions.plans.measure.rank_zero_warn", said.append)
        patch.setattr("lightning_gnn.extensions.plans.measure.hosts_of", lambda world: ((0, 2), (1,))[:size])
        found = measure(world, 0.001, 1_000_000, lambda done, total: None)
    world.close()
    return found, said


def test_each_two_ranks_have_a_link_as_fast_as_measured(ranks):
    rates = {(0, 1): 1.0, (1, 0): 1.2, (0, 2): 8.0, (2, 0): 10.0, (1, 2): 1.12, (2, 1): 1.12}
    found, said = ranks.run(3, _of_rates, rates)[0]
    assert not said and found.hosts == found.sockets == ((0, 2), (1,))
    assert found.links == {(0, 1): (0,), (1, 0): (1,), (0, 2): (2,), (2, 0): (3,), (1, 2): (4,), (2, 1): (5,)}
    assert [hop.gb_per_s for hop in found.hops] == pytest.approx([1.11, 1.11, 9, 9, 1.11, 1.11])
    assert not found.uniform and found.hops[0].gb_per_s == found.hops[4].gb_per_s


def test_says_where_directions_differ(ranks):
    rates = {**dict.fromkeys([(0, 1), (0, 2), (1, 2), (2, 1), (2, 0)], 1.0), (1, 0): 2.0}
    [found, [said]] = ranks.run(3, _of_rates, rates)[0]
    assert "between ranks 0-1: one is more than" in said and found.hops[0].gb_per_s == 1.5


def test_links_that_are_nearly_as_fast_are_alike():
    found = levels(np.array([10.0, 1.0, 10.5, 1.07, 1.04, 11.0]))
    assert found.tolist() == [10.25, 1.04, 10.25, 1.04, 1.04, 11.0]


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
    assert "messages from rank to rank: 2 of 2" in output and f"Written to {path}" in output
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
        (["measure", "--output=x.json"], {}, "the number of ranks is unknown. Pass --ranks N"),
        (["measure", "--output=x.json", "--ranks=1"], {}, "one rank has no links"),
        (["measure", "--output=x.json", "--ranks=65"], {}, "at most 64 ranks, got 65"),
        (["measure", "--output=x.json", "--ranks=2", "--seconds=0"], {}, "--seconds must be above 0, got 0.0"),
        (["measure", "--output=x.json", "--ranks=2", "--device=tpu"], {}, "--device must be auto, cpu or cuda, got 'tpu'"),
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
        (["show", "uniform"], {}, "needs the number of ranks"),
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
    tell = scheme._describe_plan

    def noted(*args: Any) -> dict[str, Any]:
        found.append(tell(*args))
        return found[-1]

    def rate(world: World, a: int, b: int, *_: object) -> float:  # between ranks 0 and 1 links are slow
        return 0.01 if {a, b} == {0, 1} else 10.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheme, "_describe_plan", noted)
        patch.setattr("lightning_gnn.extensions.plans.measure.rate", rate)
        patch.setattr("lightning_gnn.extensions.plans.measure.fixed_seconds", lambda world: (0.0, 0.0))
        return train(rank, size, graph, "gcn", options=options), found[-1] if found else {}


def test_no_more_ranks_are_measured_than_plans_are_made_for():
    assert DGCLScheme(topology="measured").layout(64, num_hosts=2).groups is not None
    with pytest.raises(
        ValueError, match='topology="measured" supports at most 64 ranks, got 65.'
    ):
        DGCLScheme(topology="measured").layout(65)
