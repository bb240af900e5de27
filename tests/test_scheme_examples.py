"""The schemes of examples/: boundary sampling and pipelining, by what makes them these schemes."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from common import CLASSES, FEATURES, awkward_graph, build, quiet_trainer, train
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import StrategyRegistry
from processes import REPOSITORY
from test_contract import N, on_ranks, shards, whole_graph
from torch_geometric import nn

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.comm.call import Step
from lightning_gnn.comm.in_process import InProcessWorld
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.strategy.scheme import bind_module
from lightning_gnn.testing import conformance


def imported(name: str) -> ModuleType:
    """Returns a module of examples/; its strategies are not left registered, since other tests ask for all that are."""
    sys.path.insert(0, str(REPOSITORY / "examples"))
    known = set(StrategyRegistry)
    module = import_module(name)
    for each in set(StrategyRegistry) - known:
        StrategyRegistry.remove(each)
    return module


sampling, pipelining, ring = map(imported, ("boundary_sampling", "pipelined", "own_scheme"))


def trained(rank: int, world_size: int, strategy: type, options: dict[str, Any], model: str) -> dict[str, Any]:
    return train(rank, world_size, awkward_graph(), model, strategy=strategy, options=options, self_check=True)


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_all_of_the_boundary_is_dgcl(ranks, model):
    sampled = ranks.run(2, trained, sampling.BoundarySamplingStrategy, {"share": 1.0}, model)
    for found, expected in zip(sampled, ranks.run(2, trained, DGCLStrategy, {"topology": None}, model)):
        assert same_bits(found, expected)


CONVS = {
    "sum": lambda: nn.GraphConv(8, 6),
    "mean": lambda: nn.SAGEConv(8, 6),
    "max": lambda: nn.SAGEConv(8, 6, aggr="max"),
    "attention": lambda: nn.GATv2Conv(8, 3, heads=2),
    "dot products": lambda: nn.TransformerConv(8, 3, heads=2),
}


def draws(name: str, count: int, share: float = 0.5) -> Any:
    """Returns by rank: outputs of so many steps, which halo rows were there, those of an exact step, and the shard."""

    def work(rank: int, world: InProcessWorld) -> Any:
        shard = shards(2)[rank]
        torch.manual_seed(7)
        conv, meter = CONVS[name]().double(), Meter()
        binding = bind_module(
            sampling.BoundarySampling(share, 0), torch.nn.Sequential(conv), shard, world, meter
        )
        exchange: Any = binding.context.exchange
        x = torch.randn(N, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[shard.batch.n_id]
        outs, present, rows = [], [], []
        for step in range(count):
            binding.context.begin_step(Step("train", 0, step))
            with world.transport.approximating():
                present.append(exchange.present)
                outs.append(conv(x, shard.batch.edge_index).detach())
            rows.append(meter.take()["0", "forward"].rows)
        binding.context.begin_step(Step("validation"))
        assert exchange.present is None
        return outs, present, conv(x, shard.batch.edge_index).detach(), shard, rows, x

    return on_ranks(2, work)


@pytest.mark.parametrize("name", ["sum", "mean"])
def test_sampled_sums_are_right_on_average(name):
    count = 600
    for outs, _, exact, *_ in draws(name, count):
        found = torch.stack(outs)
        error = (found.mean(0) - exact) / (found.std(0) / count**0.5 + 1e-12)
        assert error.abs().max() < 5 and found.std(0).max() > 0.01


@pytest.mark.parametrize("name", ["max", "attention", "dot products"])
def test_edges_of_rows_that_do_not_come_are_left_out(name):
    graph = whole_graph()
    x = torch.randn(N, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    missing = 0
    for rank, (outs, present, _, shard, *_) in enumerate(draws(name, 6)):
        halo = shard.n_id[torch.from_numpy(shard.halos[rank])]  # original ids
        for out, there in zip(outs, present):
            torch.manual_seed(7)
            conv = CONVS[name]().double()
            gone = halo[~there]
            missing += len(gone)
            kept = ~torch.isin(graph.edge_index[0], gone) | torch.isin(graph.edge_index[0], shard.batch.n_id)
            expected = conv(x, graph.edge_index[:, kept])[shard.batch.n_id]
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert missing > 20


def test_only_the_drawn_rows_travel_anew_in_each_step():
    one, other = draws("sum", 40, 0.3)
    for (_, present, *_), (*_, rows, _) in ((one, other), (other, one)):
        assert [int(there.sum()) for there in present] == rows  # what one reads, the other has sent
        assert len({tuple(there.tolist()) for there in present}) > 30
        assert 0.2 < sum(rows) / sum(map(len, present)) < 0.4


def test_own_messages_are_refused():
    class Own(nn.MessagePassing):
        def forward(self, x: Any, edge_index: Any) -> Any:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Any) -> Any:
            return x_j.tanh()

    CONVS["own"] = Own
    try:
        with pytest.raises(ValueError, match="'0' computes its own messages, which does not support steps without"):
            draws("own", 1)
    finally:
        del CONVS["own"]


def test_rows_and_gradients_of_the_last_step():
    def work(rank: int, world: InProcessWorld) -> None:
        shard, meter = shards(2)[rank], Meter()
        exchange: Any = pipelining.Pipelined().exchange(shard, world, meter)
        own, halo = exchange.num_owned, exchange.num_halo
        seen = []
        for step in range(4):
            world.begin_step(Step("train", 0, step))
            exchange.begin_step(world.step)
            with world.transport.approximating():
                x = torch.full((own, 2), float(step + 1), requires_grad=True)
                out = exchange.expand(x, "layer")
                out.backward(torch.full_like(out, 10.0 * (step + 1)))
            seen.append(float(out[own:].detach().max()))
            readers = exchange.send_rows.bincount(minlength=own)
            of = max(step, 1)  # the step whose gradients arrive: the first one twice
            assert torch.equal(x.grad[:, 0], 10.0 * (step + 1) + readers * 10.0 * of)
        assert seen == [1, 1, 2, 3] and halo
        assert len(exchange.under_way) == 2  # rows and gradients of the last step
        world.begin_step(Step("validation"))
        exchange.drain()
        assert not exchange.under_way
        exact = exchange.expand(torch.full((own, 2), 9.0), "layer")
        assert (exact == 9).all() and float(exchange.state_dict()["last"]["layer", 0, "forward", "sum"].max()) == 4

    on_ranks(2, work)


def pipelined(rank: int, world_size: int, folder: str) -> Any:
    """Returns weights after four steps, at once and from the checkpoint of the second; and after one, beside those of dgcl."""

    def fit(strategy: Any, steps: int, resume: str | None = None) -> Any:
        torch.manual_seed(0)
        module = NodeClassifier(build("gcn", FEATURES, CLASSES), num_classes=CLASSES).double()
        keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        options = {"limit_val_batches": 0, "enable_checkpointing": True, "max_epochs": 6, "max_steps": steps}
        trainer = quiet_trainer(strategy, world_size, callbacks=[keep], **options)
        trainer.fit(module, datamodule=GraphDataModule(awkward_graph()), ckpt_path=resume)
        return {name: value.clone() for name, value in module.state_dict().items()}

    at_once = fit(pipelining.PipelinedStrategy(timeout=60), 4)
    resumed = fit(pipelining.PipelinedStrategy(timeout=60), 4, f"{folder}/step=2.ckpt")
    return (
        at_once,
        resumed,
        fit(DGCLStrategy(timeout=60, topology=None), 1),
        fit(pipelining.PipelinedStrategy(timeout=60), 1),
    )


def test_a_pipelined_run_goes_on_as_if_it_had_not_stopped(ranks, tmp_path: Path):
    for at_once, resumed, direct, first in ranks.run(2, pipelined, str(tmp_path), timeout=200):
        assert same_bits(at_once, resumed)
        assert same_bits(direct, first) and not same_bits(at_once, first)  # the first step has no other rows


def test_the_ring_keeps_the_contract():
    assert len(conformance(ring.RingStrategy(), (2, 3))) == 10
