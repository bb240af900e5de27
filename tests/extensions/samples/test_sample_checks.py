"""The self-check and the memory prediction of runs with samples, before ranks start. No ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from common import quiet_trainer
from lightning.pytorch.trainer.states import TrainerFn
from sample_runs import CONCATENATED, FEATURES, MODELS, NODES, OVER_TIME, STEPS, TARGETS, SampleModule, Samples, graph_of_samples
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv

from lightning_gnn import CoverStrategy, DGCLStrategy, GraphDataModule, SpMM1DStrategy, VertexCutStrategy, register_row_rule
from lightning_gnn.checks.footprint import Footprint, Sizes, _steps
from lightning_gnn.checks.small_graph import Form, small_graph
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.extensions.samples.formats import SampleFormat
from lightning_gnn.extensions.samples.small_graph import with_samples
from lightning_gnn.nn.context import UnsupportedModelError
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategy.memory import memory_advice
from lightning_gnn.strategy.scheme import bind_module
from lightning_gnn.strategy.self_checks import outcome_of, report_outcomes


class Tested(SampleModule):
    def test_step(self, batch: Data, batch_idx: int) -> None:
        self.log("test_loss", (self.model(batch) - batch.y).abs().mean())


def data_of(samples: Any, **options: Any) -> GraphDataModule:
    given = dict.fromkeys(("val_samples", "test_samples", "predict_samples"), samples)
    return GraphDataModule(
        graph_of_samples(), partition="random", samples=samples, **{**given, "global_batch_size": 4, **options}
    )


def checks(
    module: L.LightningModule, data: GraphDataModule, strategy: Any = DGCLStrategy, ranks: int = 2, **options: Any
) -> dict[str, Any]:
    """Returns the outcomes of the self-check of ``fit`` by stage."""
    strategy = strategy(**options)
    trainer = quiet_trainer(strategy, ranks, self_check=True)
    trainer.state.fn = TrainerFn.FITTING
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.before_ranks_start(trainer, [module, data])
    return dict(strategy.checks._outcomes)


@pytest.mark.parametrize("strategy", [DGCLStrategy, CoverStrategy, SpMM1DStrategy, VertexCutStrategy])
@pytest.mark.parametrize("name", ["gcn", "mesh_graph_net", "conv_gru"])
def test_right_steps_pass(strategy, name):
    module = Tested(MODELS[name]()).double()
    found = checks(module, data_of(Samples(STEPS if name in OVER_TIME else None)), strategy)
    assert [*found] == ["fit", "validate", "test", "predict"]
    assert not any(each.problem or each.not_run or each.refused for each in found.values())


@torch.library.custom_op("sample_checks::wrong_values", mutates_args=())
def wrong_values(x: Tensor) -> Tensor:
    """Mixes nodes, although it has a rule for rows."""
    return x - x.mean(0)


wrong_values.register_autograd(lambda ctx, grad: grad)


class WrongGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


register_row_rule(torch.ops.sample_checks.wrong_values)
register_row_rule(WrongGradients)


def mix(wrong: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return wrong(x.movedim(1, 0).contiguous()).movedim(0, 1)


class WrongConv(torch.nn.Module):
    def __init__(self, wrong: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.wrong = GraphConv(5, 3), wrong

    def forward(self, batch: Data) -> Tensor:
        return mix(self.wrong, self.conv(batch.x, batch.edge_index))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.ops.sample_checks.wrong_values, "training_step does not match single-device results.*the output of 'model'"),
        (WrongGradients.apply, "training_step does not match single-device results.*the gradient of 'model.conv.lin"),
    ],
)
def test_wrong_convs_are_found(wrong, words):
    with pytest.raises(UnsupportedModelError, match=words):
        checks(Tested(WrongConv(wrong)), data_of(Samples()))
    found = checks(Tested(WrongConv(wrong)), data_of(Samples()), graph_ranks=1)  # nodes are not divided
    assert found and not any(each.problem or each.not_run or each.refused for each in found.values())
    assert checks(Tested(WrongConv(wrong)), data_of(Samples()), self_check=False) == {}


class WrongInValidation(Tested):
    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.log("val_loss", mix(torch.ops.sample_checks.wrong_values, self.model(batch) * batch.factor).square().mean())


class More(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "factor": 1 + torch.arange(NODES).view(-1, 1).double()}


def test_stages_have_their_own_samples():
    module = WrongInValidation(MODELS["gcn"]()).double()
    with pytest.raises(UnsupportedModelError, match="validation_step does not match.*the logged 'val_loss'"):
        checks(module, data_of(Samples(), val_samples=More(), test_samples=None))
    module = Tested(MODELS["gcn"]()).double()
    assert [*checks(module, data_of(Samples(), val_samples=More(), test_samples=None))] == ["fit", "validate", "predict"]


class Kinds(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "kind": torch.arange(NODES) % 3, "station": index}


class OfKinds(torch.nn.Module):
    """Fails for a kind that the samples do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.conv = torch.nn.Embedding(3, 5), GraphConv(5, 3)

    def forward(self, batch: Data) -> Tensor:
        assert batch.kind.shape[0] == batch.x.shape[0] == len(batch.station)
        return self.conv(batch.x + self.kinds(batch.kind), batch.edge_index)


def test_whole_numbers_are_in_range():
    found = checks(Tested(OfKinds()).double(), data_of(Kinds()))
    assert not any(each.problem or each.not_run or each.refused for each in found.values())


class OfRows(torch.nn.Module):
    """A cell for ``[N, F]``, as in PyG Temporal: its initial state is a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(FEATURES + 2, TARGETS).double()

    def forward(self, batch: Data) -> Tensor:
        return self.lin(torch.cat([batch.x, batch.x.new_zeros(len(batch.x), 2)], 1))


@pytest.mark.parametrize("concatenate", [False, True])
def test_layers_of_matrices_need_concatenated_samples(concatenate):
    """The warning about a step that does not run on stacked samples names the option."""
    module, strategy = Tested(OfRows()), DGCLStrategy()
    trainer, data = quiet_trainer(strategy, 2), data_of(Samples(), concatenate=concatenate)
    trainer.state.fn = TrainerFn.FITTING
    data.prepare_for(strategy.layout())
    run, shard = strategy._run_for_checks(module, trainer, data), data.stored_cut().shard(0)
    outcome = outcome_of(run, shard, "fit")
    assert (outcome.not_run is None) == concatenate
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        report_outcomes(run, {"fit": outcome})
    texts = [str(each.message) for each in found if "could not run" in str(each.message)]
    assert len(texts) == (not concatenate)
    assert all("dimensions: got 3 and 2" in text and "(..., concatenate=True). Models" in text for text in texts)


# Memory #######################################################################


def footprints(name: str, batch_size: int) -> tuple[Any, list[Sizes], list[Footprint]]:
    """Returns the prediction for a batch size, and sizes and memory of two ranks in steps on a larger graph."""
    module = Tested((MODELS | CONCATENATED)[name]()).double()
    samples = Samples(STEPS if name in OVER_TIME else None, size=20)
    strategy = DGCLStrategy(graph_ranks=2)
    trainer = quiet_trainer(strategy, 4)
    trainer.state.fn = TrainerFn.FITTING
    data = data_of(samples, global_batch_size=2 * batch_size, concatenate=name in CONCATENATED)
    data.prepare_for(strategy.layout())
    shard, run = data.stored_cut().shard(0), strategy._run_for_checks(module, trainer, data)
    make = run.samples.maker(shard, "fit", True)
    scheme = DGCLStrategy(topology=None).scheme
    steps = memory_advice(scheme).steps(module, shard.batch, make=make)
    small = make(shard.batch, [], Form((700, 1200), (4000, 7000), (10, 10)))
    bind = partial(bind_module, scheme, meter=Meter())
    ran = _steps([module, copy.deepcopy(module)], small, bind, LayoutSpec("edge_cut", 2))
    return steps, [Sizes.of(shard, 0) for shard, _ in ran], [each for _, each in ran]


@pytest.mark.parametrize("name", ["graph_conv", "mesh_graph_net", "conv_gru", "gat", "concatenated_gcn"])
def test_memory_of_small_graphs_predicts_larger_graphs(name):
    of_sizes = []
    for batch_size in (1, 5):
        steps, sizes, measured = footprints(name, batch_size)
        for size, found in zip(sizes, measured, strict=True):
            assert steps.footprint(size).peak().max_bytes == pytest.approx(found.peak().max_bytes, rel=0.05)
            assert steps.footprint(size).peak().setup == pytest.approx(found.peak().setup, rel=0.05)
        of_sizes.append(measured[0].peak().backward)
    assert of_sizes[1] > 3 * of_sizes[0]


def test_steps_on_copies_of_the_graph_share_tensors():
    """Inputs would otherwise count twice: as memory that persists, and as saved memory."""
    graph = prepare_graph(graph_of_samples(), masks_needed=False, features_needed=False)
    graph.n_id, graph.e_id, graph.num_owned = torch.arange(NODES), torch.arange(graph.num_edges), NODES
    small = small_graph(graph, [], Form((20, 30), (30, 90), (6, 24)))
    form = SampleFormat.of("samples", {"x": torch.randn(3, 50, 5)}, 50, 120)
    of_samples = with_samples(small, {"x": torch.randn(4, 3, 50, 5)}, form, concatenates=True)
    for shard in of_samples.shards(of_samples.graph, LayoutSpec("edge_cut", 2)):
        first, second = shard.step_batch(), shard.step_batch()
        assert first.x.data_ptr() == second.x.data_ptr() and first.x.size(1) == 4 * shard.counts[shard.rank]
        first.x = None
        assert second.x is not None and shard.step_batch().x is not None


def warnings_of(monkeypatch: pytest.MonkeyPatch, free: int, **options: Any) -> list[str]:
    monkeypatch.setattr("lightning_gnn.devices.available_bytes", lambda: free)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        strategy = DGCLStrategy(self_check=False)
        trainer = quiet_trainer(strategy, 2)
        trainer.state.fn = TrainerFn.FITTING
        strategy.before_ranks_start(trainer, [Tested(MODELS["gcn"]()).double(), data_of(Samples(), **options)])
    return [str(each.message) for each in heard if "predicted to need" in str(each.message)]


def test_too_little_memory(monkeypatch):
    assert warnings_of(monkeypatch, 10**7) == []
    [said] = warnings_of(monkeypatch, 60_000)
    assert "The 2 ranks on this machine are predicted to need" in said and "a smaller global_batch_size; a larger graph" in said
    assert "sampling" not in said
    [said] = warnings_of(monkeypatch, 60_000, global_batch_size=None, batch_size=4)
    assert "To use less memory: a smaller batch_size; a larger graph_ranks" in said
    assert warnings_of(monkeypatch, 60_000, global_batch_size=1) == []
    with pytest.raises(ValueError, match="The 2 ranks on this machine need at least"):
        warnings_of(monkeypatch, 10_000)
