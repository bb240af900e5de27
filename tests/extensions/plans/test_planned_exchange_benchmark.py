"""The benchmark over emulated links: its topologies are ours, scaled; its measurements check what they move."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from planning import chain
from processes import REPOSITORY
from test_planned import slow_pair

from lightning_gnn.comm.group import World
from lightning_gnn.extensions.plans.plan import p2p
from lightning_gnn.extensions.plans.plan_cost import plan_cost
from lightning_gnn.extensions.plans.presets import find_topology
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.spst import spst
from lightning_gnn.extensions.plans.wiring import load_topology


def benchmark() -> ModuleType:
    """Returns the script as a module; the benchmarks have a module ``common`` of their own, as the tests have."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, REPOSITORY / "benchmarks" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    ours = sys.modules.get("common")
    try:
        load("common")
        return load("planned_exchange")
    finally:
        if ours is not None:
            sys.modules["common"] = ours
        else:
            sys.modules.pop("common")


def some_relation() -> Relation:
    rng = np.random.default_rng(0)
    offsets = np.linspace(0, 2000, 9).astype(np.int64)
    return Relation.from_masks(rng.integers(0, 256, 2000).astype(np.uint64), offsets)


@pytest.mark.parametrize("name", ["dgx1", "pcie8", "uniform"])
def test_scaled_topology_costs_alike(tmp_path, name):
    ours = find_topology(name, 8)
    file = tmp_path / "links.json"
    file.write_text(json.dumps(benchmark().netlab_topology(ours, 2.0)))
    scaled = load_topology(file)
    assert {hop.kind for hop in scaled.hops} == {hop.kind for hop in ours.hops}
    relation = some_relation()
    for plan in (p2p(relation, ours), spst(relation, ours)):  # 2 Mbit/s per GB/s: 4000 times as slow
        assert plan_cost(plan, scaled).seconds_per_byte == pytest.approx(
            4000 * plan_cost(plan, ours).seconds_per_byte, rel=1e-9
        )


def test_every_pair_needs_a_link():
    with pytest.raises(ValueError, match="'chain' has none for 0-2"):
        benchmark().netlab_topology(chain(3), 1.0)


def test_sub_stages():
    topology = find_topology("dgx1", 8)
    relation, seconds = some_relation(), benchmark().sub_stage_seconds
    plan = spst(relation, topology)
    # One after the other they cannot be faster than at once, and a direct exchange has one for each reader at most.
    for made in (plan, p2p(relation, topology)):
        assert seconds(made, topology, 4) >= 4 * plan_cost(made, topology).seconds_per_byte


def test_line_through_measurements():
    rows: list[dict[str, Any]] = [
        {"topology": "t", "graph": "g", "plan": "spst", "predicted ms": float(x), "forward ms": 1.1 * x + 3}
        for x in (100, 200, 400)
    ]
    [line] = benchmark().fits(rows)
    assert (line["slope"], line["offset ms"], line["R^2"]) == pytest.approx((1.1, 3, 1))
    assert line["% largest deviation"] < 1e-6 and line["% off prediction at most"] == pytest.approx(13)
    assert benchmark().fits(rows[:2]) == []


def measured(rank: int, world_size: int, wrong: bool) -> Any:
    script, topology = benchmark(), slow_pair(world_size)
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30), shared_memory=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "cut.npz")
            script.write_cut(path, "power-law-300", topology)
            ours = script.Rank(world, script.read_cut(path), 1)
        if wrong and rank == 1:
            ours.readers += 1
        return ours.rows(topology, "power-law-300", [2, 4])
    finally:
        world.close()


def test_measures(ranks):
    rows = ranks.run(3, measured, False)[0]
    assert [(row["plan"], row["columns"]) for row in rows] == [("p2p", 2), ("spst", 2), ("p2p", 4), ("spst", 4)]
    assert all(row["forward ms"] > 0 and row["backward ms"] > 0 for row in rows)
    assert rows[1]["% predicted"] > 50 and rows[3]["predicted ms"] == pytest.approx(2 * rows[1]["predicted ms"])


def test_wrong_rows_are_no_measurement(ranks):
    with pytest.raises(AssertionError, match=r"wrong rows on ranks \[1\]"):
        ranks.run(3, measured, True)
