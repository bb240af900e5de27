"""What the tests of planning share: random topologies and relations, and plans carried out in numpy. No ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from lightning_gnn.extensions.plans.plan import Plan
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.tables import RankPlan, Stage, rank_plan
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.wiring import topology_from_dict


def random_topology(rng: np.random.Generator, num_devices: int, density: float) -> Topology:
    """Returns a connected topology; links have hops of their own, shared ones, or both."""
    shared = [f"bus{i}" for i in range(rng.integers(1, 5))]
    links: list[dict[str, Any]] = []
    for b in range(1, num_devices):
        joined = {int(rng.integers(b))} | set(np.flatnonzero(rng.random(b) < density).tolist())
        for a in sorted(joined):
            via = [sign + name for name in shared if rng.random() < 0.3 for sign in [rng.choice(["", "-"])]]
            link = {"a": a, "b": b, "via": via}
            if not via or rng.random() < 0.5:
                link["gb_per_s"] = float(rng.choice([1.0, 5.0, 40.0]))
            links.append(link)
    hops = [{"name": name, "kind": "bus", "gb_per_s": float(rng.choice([1.0, 10.0]))} for name in shared]
    return topology_from_dict({"devices": num_devices, "hops": hops, "links": links})


def chain(num_devices: int) -> Topology:
    """Only neighbours are joined."""
    links = [{"a": a, "b": a + 1, "gb_per_s": 1.0} for a in range(num_devices - 1)]
    return topology_from_dict({"name": "chain", "devices": num_devices, "links": links})


def random_relation(rng: np.random.Generator, num_devices: int, num_nodes: int) -> Relation:
    """Returns a relation in which nodes are needed on few devices, as at the border of parts, or on none."""
    offsets = np.sort(np.concatenate([[0, num_nodes], rng.integers(0, num_nodes + 1, num_devices - 1)]))
    bits = np.uint64(1) << rng.integers(0, num_devices, (num_nodes, 3)).astype(np.uint64)
    bits[rng.random(bits.shape) < 0.3] = 0
    return Relation.from_masks(np.bitwise_or.reduce(bits, 1), offsets)


@st.composite
def problems(draw: Any, most: int = 16, complete: bool = False) -> tuple[Relation, Topology]:
    """A relation and a topology of 2 to `most` devices, with links between all pairs if `complete`."""
    rng = np.random.default_rng(draw(st.integers(0, 100_000)))
    num_devices = draw(st.integers(2, most))
    topology = random_topology(rng, num_devices, 1.0 if complete else draw(st.sampled_from([0.0, 0.3, 1.0])))
    return random_relation(rng, num_devices, draw(st.sampled_from([0, 1, 10, 200]))), topology


def rank_plans(plan: Plan) -> list[RankPlan]:
    return [rank_plan(plan, rank) for rank in range(plan.num_devices)]


def rows_of(plan: Plan, rank: int) -> np.ndarray:
    """Returns the ids of the rows that `rank` shall have after an allgather: owned, then halo."""
    low, high = plan.relation.offsets[rank : rank + 2]
    return np.concatenate([np.arange(low, high), plan.relation.halo(rank)])


def carry_out(stages: list[tuple[Stage, ...]], buffers: list[np.ndarray], add: bool) -> np.ndarray:
    """Carries out one pass on all ranks, stage by stage; changes the buffers.

    Returns:
        rows moved in each stage from each rank to each other one, ``[stages, P, P]``.
    """
    ranks = range(len(buffers))
    moved = np.zeros((len(stages[0]), len(buffers), len(buffers)), np.int64)
    for number in range(len(stages[0])):
        now = [stages[rank][number] for rank in ranks]
        messages = [[buffers[a][now[a].sends[b]] for b in ranks] for a in ranks]  # before anything of the stage arrives
        for b in ranks:
            for a in ranks:
                assert len(messages[a][b]) == len(now[b].receives[a])
                moved[number, a, b] = len(messages[a][b])
                if add:
                    np.add.at(buffers[b], now[b].receives[a], messages[a][b])
                else:
                    buffers[b][now[b].receives[a]] = messages[a][b]
    return moved
