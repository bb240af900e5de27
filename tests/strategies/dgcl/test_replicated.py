"""Plans to compare with: replicated neighbourhoods (alone, per machine) and exchange through host memory are exact too."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import CLASSES, assert_same, awkward_graph, build, campaign, examples, quiet_trainer, single, train
from conftest import RankFailed
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.nn import ChebConv

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import cut_graph
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.extensions.plans.planned_exchange import SwapExchange
from lightning_gnn.extensions.plans.wiring import topology_from_dict
from lightning_gnn.partition.layout import Replicas
from lightning_gnn.partition.replicas import hold
from lightning_gnn.partition.shard import Relabelling, edge_cut_parts, halo_plan

MACHINES = topology_from_dict(
    {
        "devices": 4,
        "hosts": [{"devices": [0, 1]}, {"devices": [2, 3]}],
        "hops": [{"name": "nic0", "gb_per_s": 1.0}, {"name": "nic1", "gb_per_s": 1.0}],
        "links": [
            {"a": a, "b": b, **({"via": ["nic0", "-nic1"]} if a < 2 <= b else {"gb_per_s": 20.0})}
            for a in range(4)
            for b in range(a + 1, 4)
        ],
    }
)
PLANS: dict[str, dict[str, Any]] = {
    "swap": {"plan": "swap"},
    "replicate": {"plan": "replicate", "num_hops": 2},
    "dgcl_r": {"plan": "dgcl_r", "num_hops": 2, "topology": MACHINES},
    "hierarchical": {"plan": "spst", "partition": "hierarchical", "topology": MACHINES},
}


@cache
def on_one_device(model: Any, module: str = "library") -> dict[str, Any]:
    return single(awkward_graph(), model, module=module)


MODELS = ("gcn", "gat_edges", "gin_batch_norm")


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        pytest.param("swap", MODELS, id="swap-together"),
        pytest.param("hierarchical", MODELS, id="hierarchical-together"),
        ("replicate", "gat_edges"),  # together they would be more layers than hops
        ("dgcl_r", "gin_batch_norm"),
        *campaign(*((plan, model) for plan in PLANS for model in (*MODELS, "pna"))),
    ],
)
def test_trained_as_on_one_device(ranks, plan, model):
    options = dict(PLANS[plan])
    if model == "pna" and "num_hops" in options:
        options["num_hops"] = 3  # PyG's PNA has a conv more than it is asked for
    for found in ranks.run(4, train, awkward_graph(), model, options=options):
        assert_same(found, on_one_device(model), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("plan", "world_size"), [("swap", 2), ("replicate", 3), *campaign(("swap", 3), ("replicate", 2))]
)
def test_other_numbers_of_ranks_with_the_users_module(ranks, plan, world_size):
    options = {"data": {"partition": "random"}, "options": PLANS[plan], "module": "user"}
    for found in ranks.run(world_size, train, awkward_graph(), "transformer", **options):
        assert_same(found, on_one_device("transformer", "user"), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("plan", ["replicate", "dgcl_r"])
def test_ranks_without_nodes(ranks, plan):
    part = torch.arange(60) % 2
    part[50:] = 3
    for found in ranks.run(
        4, train, awkward_graph(), "gcn", options=PLANS[plan], data={"partition": part}, self_check=False
    ):
        assert_same(found, on_one_device("gcn"), rtol=1e-8, atol=1e-10)


# What is held #################################################################


@st.composite
def replicated(draw: Any) -> tuple[np.ndarray, np.ndarray, Replicas]:
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    num_ranks, num_nodes = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    offsets = np.sort(np.concatenate([[0, num_nodes], rng.integers(0, num_nodes + 1, num_ranks - 1)]))
    edge_index = rng.integers(0, num_nodes, (2, draw(st.sampled_from([0, 20, 80]))))
    bounds = [0, *np.flatnonzero(rng.random(num_ranks - 1) < 0.5) + 1, num_ranks]
    groups = tuple(tuple(range(low, high)) for low, high in pairwise(bounds))
    return edge_index, offsets, Replicas(draw(st.integers(0, 4)), groups)


@examples(150)
@given(replicated())
def test_every_propagation_has_what_it_reads(problem):
    """Sums over edges, K times, on what ranks hold, against the whole graph; nothing crosses between groups."""
    edge_index, offsets, replicas = problem
    num_nodes = int(offsets[-1])
    values = np.arange(1.0, num_nodes + 1)
    expected = [values]
    for _ in range(replicas.hops):
        expected.append(np.bincount(edge_index[1], expected[-1][edge_index[0]], num_nodes))
    held = hold(edge_index, offsets, replicas)
    edges = [held.edges_of(rank, edge_index) for rank in range(len(offsets) - 1)]
    assert held.num_edges.tolist() == [len(chosen) for _, chosen in edges]
    owner_of_id = np.repeat(np.arange(len(offsets) - 1), np.diff(held.offsets))
    group = {rank: number for number, ranks in enumerate(replicas.groups) for rank in ranks}
    rows = np.concatenate(held.rows)
    now = values[rows]
    for step in range(replicas.hops):
        after = []
        for rank, ((source, target), chosen) in enumerate(edges):
            assert all(group[owner] == group[rank] and owner != rank for owner in owner_of_id[held.halos[rank]])
            assert np.array_equal(edge_index[1][chosen], held.rows[rank][target])
            assert (np.diff(target) >= 0).all()
            own = now[held.offsets[rank] : held.offsets[rank + 1]]
            read = np.concatenate([own, now[held.halos[rank]], [np.nan]])  # nan: beyond
            after.append(np.bincount(target, read[source], len(own)))
        now = np.concatenate(after)
        for rank in range(len(edges)):
            first, count = held.offsets[rank], offsets[rank + 1] - offsets[rank]
            low, high = offsets[rank : rank + 2]
            assert held.rows[rank][:count].tolist() == list(range(low, high))
            np.testing.assert_allclose(now[first : first + count], expected[step + 1][low:high])
    for number, ranks in enumerate(replicas.groups):  # a node is held once in a group
        nodes = np.concatenate([held.rows[rank] for rank in ranks])
        assert len(nodes) == len(np.unique(nodes)), number


def test_sizes_are_those_of_the_shards():
    data = prepare_graph(awkward_graph())
    cut = cut_graph(data, np.arange(60) % 4, 4)
    for replicas in (None, Replicas(1, ((0,), (1,), (2,), (3,))), Replicas(2, ((0, 1), (2, 3)))):
        for rank, size in enumerate(cut.sizes(replicas)):
            shard = cut.shard(rank, replicas)
            assert size == (len(shard.batch.n_id), len(shard.halos[rank]), shard.batch.edge_index.size(1))
            assert (shard.rows[rank], shard.edges[rank]) == (size[0], size[2])
            assert torch.equal(shard.batch.x, data.x[shard.batch.n_id])
            assert torch.equal(shard.batch.edge_attr, data.edge_attr[shard.batch.e_id])
            assert not shard.batch.train_mask[shard.counts[rank] :].any()


# What ranks send ##############################################################


def logged(rank: int, world_size: int, options: dict[str, Any]) -> tuple[int, list[str]]:
    """Rows that this rank sent in three epochs, and the layers that sent any."""
    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    trainer = quiet_trainer(DGCLStrategy(timeout=30, **options), world_size, limit_val_batches=0)
    rows: list[int] = []
    layers: list[str] = []

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            counted = {key: traffic.rows for key, traffic in trainer.callbacks[0].by_layer.items() if traffic.rows}
            rows.append(sum(counted.values()))
            layers.extend(layer for layer, _ in counted)

    trainer.callbacks.append(Look())  # type: ignore[attr-defined]
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph(), partition="random"))
    return rows[-1], layers


def test_replication_sends_nothing(ranks):
    assert ranks.run(3, logged, PLANS["replicate"]) == [(0, [])] * 3


def test_machines_send_less_than_all(ranks):
    inside = sum(rows for rows, _ in ranks.run(4, logged, PLANS["dgcl_r"]))
    assert inside > 0
    assert inside != sum(rows for rows, _ in ranks.run(4, logged, {"plan": "p2p"}))


def test_swap_writes_all_rows_once(ranks):
    found = ranks.run(2, logged, {"plan": "swap"})
    halo = [rows - 30 for rows, _ in found]  # forward all 30 of the rank, backward the halo's gradients
    assert all(0 < count <= 30 for count in halo)


def swapped(rank: int, world_size: int, seeds: range) -> None:
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30))
    try:
        for seed in seeds:
            rng = np.random.default_rng(seed)
            num_nodes = int(rng.integers(1, 40))
            edge_index = rng.integers(0, num_nodes, (2, int(rng.integers(0, 150))))
            part = rng.integers(0, world_size - (seed % 3 == 0), num_nodes)
            relabelling = Relabelling.from_assignment(part.astype(np.int32), world_size)
            halos = [piece.halo for piece in edge_cut_parts(edge_index, relabelling)]
            rows = halo_plan(rank, relabelling.offsets, halos)
            direct = HaloExchange(rows, world, Meter())
            swap = SwapExchange(rows, halos[rank], relabelling.offsets, world, Meter())
            for shape, dtype in (((3,), torch.float64), ((2, 5), torch.float32), ((4,), torch.bfloat16)):
                x = torch.randn(direct.num_owned, *shape).to(dtype)
                assert torch.equal(swap.expand(x, "layer"), direct.expand(x, "layer"))
                y = torch.randn(direct.num_owned + direct.num_halo, *shape).to(dtype)
                assert torch.equal(swap.reduce(y, "layer"), direct.reduce(y, "layer"))
                both = [x, 2 * x[:, :1]]
                for ours, theirs in zip(swap.expand_all(both, "layer"), direct.expand_all(both, "layer")):
                    assert torch.equal(ours, theirs)
    finally:
        world.close()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_swap_equals_the_direct_exchange(ranks, world_size):
    ranks.run(world_size, swapped, range(8))


def swap_without_memory(rank: int, world_size: int) -> None:
    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    trainer = quiet_trainer(DGCLStrategy(timeout=30, plan="swap", shared_memory=False), world_size)
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))


def test_swap_needs_shared_memory(ranks):
    with pytest.raises(RankFailed, match="needs CPU ranks on one machine") as caught:
        ranks.run(2, swap_without_memory)
    assert len(caught.value.errors) == 2


# Refusals #####################################################################


def fit(rank: int, world_size: int, model: str, hops: int, predictions: str = "all") -> Any:
    module = build(model) if model != "cheb" else Cheb()
    wrapped = NodeClassifier(module, num_classes=CLASSES).double()
    strategy = DGCLStrategy(timeout=30, plan="replicate", num_hops=hops, predictions=predictions)  # type: ignore[arg-type]
    trainer = quiet_trainer(strategy, world_size, max_epochs=1)
    data = GraphDataModule(awkward_graph(), partition="random")
    trainer.fit(wrapped, datamodule=data)
    return trainer.predict(wrapped, datamodule=data)[0], data.shard.batch.n_id[: data.shard.batch.num_owned]


class Cheb(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = ChebConv(12, CLASSES, K=2)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.conv(x, edge_index)


@pytest.mark.parametrize("model", ["gcn", "gat", "transformer", "sage_several", "own"])
def test_too_few_hops(ranks, model):
    with pytest.raises(RankFailed, match=r"propagation number 2 of a step, but .*num_hops=1: rows would be missing"):
        ranks.run(2, fit, model, 1)
    ranks.run(2, fit, model, 2)


def test_sums_over_out_edges_are_refused(ranks):
    with pytest.raises(RankFailed, match=r"sums over the out-edges of each node.*plan=.p2p"):
        ranks.run(2, fit, "cheb", 1)


def test_predictions_leave_replicas_out(ranks):
    full = ranks.run(3, fit, "gcn", 2)[0][0]
    for found, n_id in ranks.run(3, fit, "gcn", 2, "shards"):
        torch.testing.assert_close(found, full[n_id], rtol=1e-9, atol=1e-11)


class AllRows(NodeClassifier):
    """Its loss counts every row of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.model(batch.x, batch.edge_index), batch.y.clamp(min=0))
        self.log("loss_of_all", loss)
        return loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "replicate"}, "num_hops must be set .*, got None. .*num_hops=2 for a GCN of two layers"),
        ({"plan": "replicate", "num_hops": -1}, r"got -1"),
        ({"plan": "spst", "topology": "dgx1", "num_hops": 2}, r'num_hops=2 needs .*, got plan="spst"'),
        ({"plan": "dgcl_r", "num_hops": 2, "topology": None}, r'plan="dgcl_r" needs a topology, got None'),
    ],
)
def test_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        DGCLStrategy(**options)


def losses_of_all_rows(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(1)
    module = AllRows(build("gcn"), num_classes=CLASSES).double()
    strategy = DGCLStrategy(timeout=60, plan="replicate", num_hops=2)
    trainer = quiet_trainer(strategy, world_size, max_epochs=2, limit_val_batches=0)
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    return [float(trainer.callback_metrics["loss_of_all"])]


def fit_from_here(module: Any, **options: Any) -> None:
    trainer = quiet_trainer(DGCLStrategy(timeout=30, **options), 2, self_check=True)
    trainer.fit(module.double(), datamodule=GraphDataModule(awkward_graph()))


def test_losses_of_all_rows_count_each_node_once(ranks):
    [expected], *_ = ranks.run(1, losses_of_all_rows)
    for [found] in ranks.run(3, losses_of_all_rows):
        assert found == pytest.approx(expected, rel=1e-12)


def test_too_little_memory_is_told(monkeypatch):
    monkeypatch.setattr("lightning_gnn.devices.available_bytes", lambda: 20_000)
    with pytest.raises(ValueError, match=r"need at least 2\.\d+e-05 GB for .*including all nodes within 2 hops.*plan="):
        fit_from_here(NodeClassifier(build("gcn"), num_classes=CLASSES), plan="replicate", num_hops=2)
