"""The self-check: models that are wrong on purpose are refused, where they go wrong is named, and right ones pass. No ranks."""

from __future__ import annotations

import copy
import random
import re
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import CLASSES, FEATURES, OwnConv, UserModule, awkward_graph, build, campaign
from torch_geometric.nn import BatchNorm, GCNConv, JumpingKnowledge, MessagePassing, global_mean_pool
from torch_geometric.utils import add_self_loops, degree, dropout_edge, negative_sampling

import lightning_gnn
from lightning_gnn.checks.self_check import SelfCheck, self_check
from lightning_gnn.comm.call import Step
from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard, split_graph, whole_graph
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.strategies.spmm.matrices import SummaMatrix
from lightning_gnn.strategies.spmm.strategy import CubeScheme
from lightning_gnn.strategy.scheme import bind_module, twin_of


def shard(seed: int = 0) -> Shard:
    """One of two parts of the awkward graph, as rank 0 has it when the check runs."""
    graph = prepare_graph(awkward_graph(seed=seed, dtype=torch.float32))
    return split_graph(graph, np.arange(60) % 2, LayoutSpec("edge_cut", 2))[0]


def check(module: Any, stage: str = "fit", trainer: Any = None) -> SelfCheck:
    bind = partial(bind_module, DGCLScheme(), meter=Meter())
    return self_check(module, shard().batch, bind, stage, trainer)


def verdict(found: SelfCheck) -> tuple[str | None, str | None, str | None]:
    """Nothing but None if the step is right."""
    return found.problem, found.not_run, found.refused


class Model(torch.nn.Module):
    """Two GCN layers; `between` is what goes wrong between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(FEATURES, 8), GCNConv(8, CLASSES)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x, edge_index).relu(), edge_index), edge_index)

    def between(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return x


class Centred(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class CentredInAModule(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Centred()

    def between(self, x, edge_index):
        return self.norm(x)


class CentredInline(Model):
    def between(self, x, edge_index):
        return x - x.mean(0)


class DegreeConv(MessagePassing):
    """Divides by the number of out-edges, which other ranks hold some of."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(8, 8)

    def forward(self, x, edge_index):
        rows = max(x.size(0), int(edge_index[0].max()) + 1)  # else it would raise, on the halo rows
        out_degree = degree(edge_index[0], rows)[: x.size(0)].clamp(min=1)
        return self.propagate(edge_index, x=self.lin(x) / out_degree.unsqueeze(1))


class OutDegree(Model):
    def __init__(self) -> None:
        super().__init__()
        self.conv = DegreeConv()

    def between(self, x, edge_index):
        return self.conv(x, edge_index)


class SourceRows(Model):
    """Reads rows by edge_index, which runs past the owned rows."""

    def between(self, x, edge_index):
        return x + torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])


CALLS: list[int] = []


class CountsCalls(Model):
    def between(self, x, edge_index):
        CALLS.append(1)
        return x / len(CALLS)


MEMORY: dict[str, torch.Tensor] = {}


class Remembers(Model):
    def between(self, x, edge_index):
        before = MEMORY.get("x", torch.zeros_like(x))
        MEMORY["x"] = x.detach()
        return x + before


class RandomNegatives(Model):
    def between(self, x, edge_index):
        negative = negative_sampling(edge_index, x.size(0), 50)
        return x - 0.1 * torch.zeros_like(x).index_add(0, negative[1], x[negative[0]])


class NumpyNoise(Model):
    def between(self, x, edge_index):
        return x * torch.from_numpy(np.random.rand(x.size(0), 1)).to(x)  # noqa: NPY002


class KeepsTheBest(Model):
    """Shapes depend on data: convs see other rows than there are nodes."""

    def between(self, x, edge_index):
        return torch.cat([x[x[:, 0] > x[:, 0].median()], x])[: x.size(0)]


class DropsRows(Model):
    def forward(self, x, edge_index):
        keep = x[:, 0] > x[:, 0].median()
        kept = self.first(x[keep], edge_index % int(keep.sum()))
        return self.second(kept.new_zeros(len(x), 8).index_put((keep,), kept), edge_index)


class BranchesOnCounts(Model):
    """One half takes another way than the other."""

    def forward(self, x, edge_index):
        if x.size(0) % 2:
            x = self.first(x, edge_index).relu()
        else:
            x = F.pad(x, (0, 8 - FEATURES))
        return self.second(x, edge_index)


class Pools(Model):
    def between(self, x, edge_index):
        return x + global_mean_pool(x, None)


class Swapped(torch.autograd.Function):
    """Gradients of rows in another order, which no one can see from outside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.flip(0)


class SaidToBeRowWise(Swapped):
    """As above, and registered: only numbers tell."""


lightning_gnn.register_row_rule(SaidToBeRowWise)


class NotSaid(Model):
    def between(self, x, edge_index):
        return Swapped.apply(x)


class SaidWrong(Model):
    def between(self, x, edge_index):
        return SaidToBeRowWise.apply(x)


EXACT = [CentredInAModule, CentredInline, SourceRows, NumpyNoise, KeepsTheBest, BranchesOnCounts, Pools]
WRONG = {
    OutDegree: r"the output of 'model.conv' \(DegreeConv\) differs by \d",
    CountsCalls: r"the output of 'model.second' \(GCNConv\) differs by \d.* A second run on one device",
    SaidWrong: r"the gradient of 'model.first.lin.weight' differs by \d.* the backward of a torch.autograd.Function",
}
REFUSED = {
    NotSaid: r"test_self_check.py:\d+: .* made by Swapped, whose backward has no row rule\. .*register_row_rule\(Swapped\)",
    RandomNegatives: r"test_self_check.py:\d+: edge_index is changed in place",
    DropsRows: r"test_self_check.py:\d+: a conv was given edges that were made in the step",
}


@pytest.mark.parametrize("kind", EXACT)
def test_what_looks_across_nodes_is_exact(kind):
    assert verdict(check(UserModule(kind()))) == (None, None, None)


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_models_are_refused_by_name(kind):
    found = check(UserModule(kind()))
    assert found.not_run is None and found.refused is None
    assert found.problem is not None
    assert re.search(WRONG[kind], found.problem), found.problem


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_exact_is_refused_at_its_line(kind):
    found = check(UserModule(kind()))
    assert found.not_run is None and found.problem is None
    assert re.search(REFUSED[kind], found.refused or ""), found


def test_rows_that_are_kept_outside_of_the_module_are_refused_and_no_rank_waits():
    MEMORY.clear()
    assert any(verdict(check(UserModule(Remembers()))))


class SumLoss(UserModule):
    def training_step(self, batch, batch_idx):
        out = self.model(batch.x, batch.edge_index)
        return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask], reduction="sum", ignore_index=-1)


class OwnMean(UserModule):
    """A mean over other nodes than those of the mask."""

    def training_step(self, batch, batch_idx):
        out = self.model(batch.x, batch.edge_index)
        chosen = batch.train_mask & (batch.y != 0) & (batch.y >= 0)
        return F.cross_entropy(out[chosen], batch.y[chosen], reduction="sum") / chosen.sum().clamp(min=1)


class MeanOfTheBatch(UserModule):
    """A buffer that follows the rows."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.register_buffer("seen", torch.zeros(FEATURES))

    def training_step(self, batch, batch_idx):
        self.seen += batch.x.mean(0)
        return super().training_step(batch, batch_idx)


class DividesByRanks(UserModule):
    """As some do under DistributedDataParallel."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / self.trainer.world_size


def test_a_loss_divided_by_the_number_of_ranks_is_named():
    found = check(DividesByRanks(build("gcn")), trainer=any_trainer())
    assert re.search(r"the loss differs by 5.0e-01 .*remove the number of ranks: a loss covers all ranks", found.problem or "")


@pytest.mark.parametrize("kind", [SumLoss, OwnMean, MeanOfTheBatch])
def test_losses_and_buffers_of_any_rows_are_exact(kind):
    assert verdict(check(kind(build("gcn")))) == (None, None, None)


class Augmented(Model):
    """Drops edges, adds noise, drops out: draws per node and per edge may differ from rank to rank."""

    def between(self, x, edge_index):
        x = F.dropout(x, 0.5, self.training)
        x = x + 0.1 * torch.randn_like(x) + torch.empty_like(x).uniform_(-1, 1) + torch.empty_like(x).normal_()
        x = x * torch.bernoulli(torch.full_like(x, 0.7)) * torch.full_like(x, 0.5).bernoulli_(0.9)
        return self.second_of_two(x, dropout_edge(edge_index, 0.3, training=self.training)[0])

    def __init__(self) -> None:
        super().__init__()
        self.second_of_two = GCNConv(8, 8)


class Helped(Model):
    """What the helpers are for: out-degrees and source rows."""

    def between(self, x, edge_index):
        rows = lightning_gnn.gather_halo(x)
        out_degree = lightning_gnn.reduce_halo(degree(edge_index[0], len(rows), x.dtype))
        x = (x - x.mean(0)) / out_degree.clamp(min=1).unsqueeze(1)
        return x + torch.zeros_like(x).index_add(0, edge_index[1], lightning_gnn.gather_halo(x)[edge_index[0]])


class SelfLoops(Model):
    def between(self, x, edge_index):
        return self.third(x, add_self_loops(edge_index, num_nodes=x.size(0))[0])

    def __init__(self) -> None:
        super().__init__()
        self.third = OwnConv(8, 8)


class Jumps(Model):
    def __init__(self) -> None:
        super().__init__()
        self.jump = JumpingKnowledge("lstm", 8, 2)

    def between(self, x, edge_index):
        return self.jump([x, x.tanh()])


class Float32Only(Model):
    def between(self, x, edge_index):
        return x @ torch.eye(8, dtype=torch.float32)


class ByNodeId(Model):
    """An embedding of the user's own node ids, which reach to 59."""


class ByNodeIdModule(UserModule):
    def __init__(self) -> None:
        super().__init__(Model())
        self.table = torch.nn.Embedding(60, FEATURES)

    def training_step(self, batch, batch_idx):
        assert (batch.e_id >= 0).all() and len(batch.e_id) == batch.edge_index.size(1)
        batch.x = batch.x + self.table(batch.n_id)
        return super().training_step(batch, batch_idx)


class Manual(UserModule):
    def __init__(self) -> None:
        super().__init__(build("gcn"))
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        self.logger.experiment.add_scalar("rate", 0.1)
        return loss


@pytest.mark.parametrize("kind", [Augmented, Helped, SelfLoops, Jumps, Float32Only])
@pytest.mark.parametrize("stage", ["fit", *campaign("validate", "predict")])
def test_right_models_pass(kind, stage):
    assert verdict(check(UserModule(kind()), stage)) == (None, None, None)


@pytest.mark.parametrize(
    "name", ["gcn_cached", "gcn_batch_norm", "sage_graph_norm", "gat", "transformer", "own", "commnet"]
)
@pytest.mark.parametrize("stage", ["fit", *campaign("test")])
def test_known_models_pass(name, stage):
    found = check(UserModule(build(name)), stage)
    assert (found.problem, found.not_run) == (None, None)


@pytest.mark.parametrize(("stage", "phase"), [("fit", "train"), ("validate", "validation"), ("predict", "predict")])
def test_exchanges_are_told_the_phase_that_is_tried_out(monkeypatch, stage, phase):
    told = set()
    begin = HaloExchange.begin_step
    monkeypatch.setattr(HaloExchange, "begin_step", lambda self, step: (told.add(step), begin(self, step))[1])
    assert verdict(check(UserModule(build("gcn")), stage)) == (None, None, None)
    assert told == {Step(phase)}


def test_user_ids_and_manual_optimisation_pass():
    for found in (check(ByNodeIdModule()), check(Manual(), trainer=any_trainer())):
        assert (found.problem, found.not_run) == (None, None)


def any_trainer() -> L.Trainer:
    return L.Trainer(logger=False, enable_progress_bar=False, accelerator="cpu", devices=1)


def test_wrong_manual_optimisation_is_found():
    module = Manual()
    module.model = SaidWrong()
    assert "the gradient of 'model.first" in (check(module, trainer=any_trainer()).problem or "")


def test_a_step_that_cannot_run_on_a_small_graph_is_said_so():
    class NeedsTheWholeGraph(UserModule):
        def training_step(self, batch, batch_idx):
            raise ValueError("too small" if len(batch.x) < 1000 else "large enough")

    found = check(NeedsTheWholeGraph(build("gcn")))
    assert (found.problem, found.not_run) == (None, "ValueError: too small")


def test_nothing_is_left_behind():
    module = UserModule(build("gcn_batch_norm"))
    batch = shard().batch
    before = copy.deepcopy(module.state_dict()), batch.x.clone(), [set(vars(child)) for child in module.modules()]
    draws = [(torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()) for _ in range(2)]  # noqa: NPY002
    self_check(module, batch, partial(bind_module, DGCLScheme(), meter=Meter()))
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    assert torch.equal(after[0], draws[0][0]) and after[1:] == draws[0][1:]
    torch.testing.assert_close(module.state_dict(), before[0], rtol=0, atol=0)
    assert torch.equal(batch.x, before[1]) and before[2] == [set(vars(child)) for child in module.modules()]
    assert all(parameter.grad is None for parameter in module.parameters())
    assert lightning_gnn.gather_halo(batch.x) is batch.x


def test_shards_in_memory_are_those_of_the_store(tmp_path):
    from lightning_gnn.data.store import read_cut, write_store

    graph, part = prepare_graph(awkward_graph()), np.arange(60) % 3
    write_store(tmp_path / "store", graph, part, LayoutSpec("edge_cut", 3), {})
    for rank, found in enumerate(split_graph(graph, part, LayoutSpec("edge_cut", 3))):
        stored = read_cut(tmp_path / "store").shard(rank)
        assert found.batch.keys() == stored.batch.keys() or set(found.batch.keys()) == set(stored.batch.keys())
        for name, value in stored.batch.to_dict().items():
            torch.testing.assert_close(found.batch[name], value, rtol=0, atol=0)
        assert (found.counts, found.edge_counts, found.mask_counts) == (
            stored.counts,
            stored.edge_counts,
            stored.mask_counts,
        )
        torch.testing.assert_close((found.n_id, found.e_id), (stored.n_id, stored.e_id), rtol=0, atol=0)
        assert found.plan.recv_counts == stored.plan.recv_counts
        assert all(np.array_equal(a, b) for a, b in zip(found.plan.send_rows, stored.plan.send_rows))
    assert whole_graph(graph).edge_counts == (graph.edge_index.size(1),)


def test_the_documented_adapter_makes_a_conv_exact():
    """The example of docs/models.md, as it stands there, with and without its adapter."""
    from pathlib import Path

    from lightning_gnn.nn.convs import CONVS

    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    [example] = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "register_adapter" in block]
    assert len([line for line in example.splitlines() if line.strip()]) <= 24
    names: dict[str, Any] = {}
    exec(example, names)

    class Spread(Model):
        def __init__(self) -> None:
            super().__init__()
            self.spread = names["SpreadConv"](8, 8)

        def between(self, x, edge_index):
            return self.spread(x, edge_index)

    assert verdict(check(UserModule(Spread()))) == (None, None, None)
    del CONVS[names["SpreadConv"]]
    assert "'model.spread' (SpreadConv) raises RuntimeError" in (check(UserModule(Spread())).problem or "")


def test_register_adapter_wants_a_class():
    with pytest.raises(TypeError, match="requires a class that derives from MessagePassing"):
        lightning_gnn.register_adapter(GCNConv(2, 2))


@pytest.mark.parametrize("dimensions", [2, 3])
def test_products_on_a_cube_are_those_that_training_uses(monkeypatch, dimensions):
    """A product that is wrong is seen; the strategy's own, on a cube that two ranks can make, is right."""
    module = lightning_gnn.NodeClassifier(build("gcn"))
    scheme = twin_of(CubeScheme(dimensions, "random"))
    bind, layout = partial(bind_module, scheme, meter=Meter()), scheme.layout(2)
    found = self_check(module, shard().batch, bind, layout=layout)
    assert verdict(found) == (None, None, None)
    multiply = SummaMatrix.multiply
    monkeypatch.setattr(SummaMatrix, "multiply", lambda *args: torch.zeros_like(multiply(*args)))
    assert self_check(module, shard().batch, bind, layout=layout).problem is not None


class WeighedInFloat32(L.LightningModule):
    """A bias in front of a batch norm, whose gradient is rounding, and a constant by which no float64 may be multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = GCNConv(FEATURES, 16), BatchNorm(16), torch.nn.Linear(16, CLASSES)

    def training_step(self, batch, batch_idx):
        out = self.head(self.norm(self.conv(batch.x, batch.edge_index)).relu())[batch.train_mask]
        return F.cross_entropy(out, batch.y[batch.train_mask].clamp(min=0), weight=torch.ones(CLASSES, dtype=torch.float32))


def test_rounding_in_float32_is_no_difference():
    found = check(WeighedInFloat32())
    assert verdict(found) == (None, None, None), found.finding
