"""Compiled models train like one device: layers stay in the graph, exchanges keep their order (gloo ranks, float64)."""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from common import (
    CLASSES,
    FEATURES,
    OwnConv,
    Recorder,
    UserModule,
    assert_same,
    awkward_graph,
    build,
    campaign,
    outcome,
    quiet_trainer,
)
from torch_geometric import nn

from lightning_gnn import DGCLStrategy, GraphDataModule, local_rows
from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.extensions.compiled.models import CompiledModels

HAS_COMPILER = shutil.which("g++") is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no g++")
BACKENDS = [pytest.param("inductor", marks=[needs_compiler, pytest.mark.campaign]), "aot_eager"]
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # in ranks: no pools of processes
EPOCHS = 5


class Dropping(torch.nn.Module):
    """Dropout between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.GCNConv(FEATURES, 8), torch.nn.LayerNorm(8), nn.SAGEConv(8, CLASSES)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.norm(self.first(x, edge_index)).relu(), 0.4, self.training)
        return self.second(x, edge_index)


class Several(torch.nn.Module):
    """Two independent exchanges, one layer whose output nothing reads, and one of which gradients are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(FEATURES, 8)
        self.left, self.right, self.unused = nn.GCNConv(8, CLASSES), OwnConv(8, CLASSES), nn.GATConv(8, 3)
        self.zero = nn.GraphConv(8, CLASSES)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = self.lin(x).tanh()
        right = self.right(x, edge_index)
        out = self.left(x, edge_index) + right + 0 * self.zero(x, edge_index)
        self.unused(x * 2, edge_index)  # the last one, which no other operator reads
        return out


class Changing(torch.nn.Module):
    """Code that depends on a number that differs between steps, and between ranks."""

    def __init__(self, changed: Any = lambda rank, step: 0) -> None:
        super().__init__()
        self.first, self.second = nn.GCNConv(FEATURES, 8), OwnConv(8, CLASSES)
        self.how, self._changed = 0, changed

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        x = self.first(x, edge_index)
        how = self.how
        if how == 1:  # the same for each row
            x = x + x - x
        elif how == 2:
            x = x - x.mean(0)
        elif how == 3:
            x = x * len(x)
        elif how == 4:
            x = x + x[:3].sum()
        elif how == 5:
            x = x * torch.rand(8, dtype=x.dtype)
        return self.second(x.relu(), edge_index)


def at_other_steps(rank: int, step: int) -> int:
    return int(step >= 3 + rank)


def not_local(way: int) -> Any:
    return lambda rank, step: way * (step > 2)


MODELS: dict[str, Any] = {
    **{name: (lambda name=name: build(name)) for name in ("gcn", "sage", "gat", "own", "gcn_batch_norm", "edge cnn")},
    "dropout": Dropping,
    "several": Several,
    "at other steps": lambda: Changing(at_other_steps),
    **{f"not local {way}": (lambda way=way: Changing(not_local(way))) for way in (2, 3, 4, 5)},
}


class Module(UserModule):
    """Sets the rank and the step in its model."""

    def on_train_batch_start(self, *_: Any) -> None:
        inner = getattr(self.model, "_orig_mod", self.model)
        if isinstance(inner, Changing):
            inner.how = inner._changed(self.global_rank, self.global_step)


def noting(start: Any, found: list[tuple[str, str, int]]) -> Any:
    def call(self: Any, *args: Any) -> Any:
        found.append((args[-1].layer, args[-1].direction, args[-1].index))
        return start(self, *args)

    return call


@contextmanager
def exchanges_noted() -> Iterator[list[tuple[str, str, int]]]:
    found: list[tuple[str, str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("start_expand", "start_reduce"):
            patch.setattr(HaloExchange, name, noting(getattr(HaloExchange, name), found))
        yield found


def fit(
    rank: int, size: int, model: str, backend: str | None, whole: bool = False, strategy: Any = "dgcl", **options: Any
) -> dict[str, Any]:
    """Trains, tests and predicts; returns also what was compiled, and the exchanges in order."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(1)
    module: Any = Module(MODELS[model]()).double()
    if backend is not None and not whole:
        module.model = torch.compile(module.model, backend=backend)
    recorder, made = Recorder(), []
    with pytest.MonkeyPatch.context() as patch, exchanges_noted() as exchanges:
        init = CompiledModels.__init__
        patch.setattr(CompiledModels, "__init__", lambda self, *args: (init(self, *args), made.append(self))[0])
        strategy = DGCLStrategy(timeout=60, **options) if strategy == "dgcl" else strategy
        trainer = quiet_trainer(strategy, size, False, callbacks=[recorder], max_epochs=EPOCHS)
        data = GraphDataModule(awkward_graph())
        if whole:
            trainer.fit(torch.compile(module, backend=backend), datamodule=data)
        found = outcome(trainer, module, data, recorder, fit=not whole)
    found["weights"] = {name.replace("_orig_mod.", ""): value for name, value in found["weights"].items()}
    compiled = [each.num_compiled for models in made for each in models.models]
    counters = copy.deepcopy(torch._dynamo.utils.counters)
    return {**found, "compiled": compiled, "counters": counters, "exchanges": exchanges}


def expected(model: str) -> dict[str, Any]:
    return fit(0, 1, model, None, strategy="auto")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("model", [*campaign("gcn", "sage", "gat", "gcn_batch_norm", "edge cnn"), "own"])
def test_equals_one_device_in_graphs_without_breaks(ranks, model, size, backend):
    reference = expected(model)
    for found in ranks.run(size, fit, model, backend):
        tight = {"rtol": 1e-5, "atol": 1e-5} if "norm" in model else {"rtol": 1e-10, "atol": 1e-10}
        assert_same(found, reference, **tight)
        # In fit: training steps after two that are observed, and validation likewise; 2 x 5 calls and a sanity check.
        assert found["compiled"][0] >= 2 * EPOCHS - 4
        assert not found["counters"]["graph_break"]
        assert found["counters"]["stats"]["unique_graphs"] == 2  # of training, and of evaluation


@pytest.mark.parametrize("backend", BACKENDS)
def test_independent_exchanges_keep_their_order_and_unused_ones_stay(ranks, backend):
    reference, plain = expected("several"), ranks.run(2, fit, "several", None)
    for found, eager in zip(ranks.run(2, fit, "several", backend), plain):
        assert_same(found, reference, rtol=1e-10, atol=1e-10)
        assert found["compiled"][0] > 0 and not found["counters"]["graph_break"]
        assert {"model.unused", "model.zero"} <= {layer for layer, *_ in eager["exchanges"]}
        named = [(layer.replace("_orig_mod.", ""), *others) for layer, *others in found["exchanges"]]
        assert named == eager["exchanges"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_compile_at_different_steps(ranks, backend):
    reference = expected("at other steps")
    for rank, found in enumerate(ranks.run(3, fit, "at other steps", backend)):
        assert_same(found, reference, rtol=1e-10, atol=1e-10)
        assert found["compiled"][0] > 0
        # Of training and evaluation, before and after the change, which the third rank does not reach.
        assert found["counters"]["stats"]["unique_graphs"] == (4 if rank < 2 else 2)


class Reported(torch.nn.Module):
    """Model with an operation that runs it without a compiler."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.how = nn.GCNConv(FEATURES, CLASSES), how
        self.register_buffer("of_nodes", torch.ones(1, awkward_graph().num_nodes))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out = self.conv(x, edge_index)
        if self.how == "mean":
            out = out - out.mean(0)
        elif self.how == "product":
            out = out + self.of_nodes @ out
        elif self.how == "size":
            out = out / out.size(0)
        elif self.how == "unknown":
            with local_rows():
                return out, out * 2
        return out


class Outer(torch.nn.Module):
    """Calls a model in another mode, and returns its first output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        with torch.device("cpu") if self.inner.how == "mode" else nullcontext():
            out = self.inner(x, edge_index)
        return out[0] if isinstance(out, tuple) else out


LINE = {
    how: number
    for number, line in enumerate(Path(__file__).read_text().splitlines(), 1)
    for how in ("mean", "product", "size")
    if f'self.how == "{how}"' in line
}


def eager_reasons(rank: int, size: int, how: str, **options: Any) -> list[str]:
    """Returns the warnings about models without a compiler."""
    torch.manual_seed(1)
    module: Any = UserModule(Reported(how)).double()
    if how == "in place":
        module.model.compile(backend="aot_eager")
    else:
        module.model = torch.compile(module.model, backend="aot_eager")
    module.model = Outer(module.model)
    strategy = DGCLStrategy(timeout=60, self_check=False, checkpoint_convs=how == "checkpoint_convs")
    trainer = quiet_trainer(strategy, size, False, max_epochs=12, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    return [str(each.message) for each in caught if "without a compiler" in str(each.message)]


@pytest.mark.parametrize(
    "how, expected",
    [
        ("mean", "Reported runs without a compiler: mean at {line} may depend on other ranks. Compile only"),
        ("product", "Reported runs without a compiler: matmul at {line} may depend on other ranks."),
        ("size", "Reported runs without a compiler: size at {line} may depend on other ranks."),
        ("unknown", "Reported runs without a compiler: it returns a view of rows, or a tensor of unknown placement."),
        ("mode", "Reported runs without a compiler: DeviceContext is active. Leave this context"),
        ("in place", "Compiled models run without a compiler: Reported.compile() has no effect in full-graph steps."),
        ("checkpoint_convs", "Compiled models run without a compiler: checkpoint_convs=True recomputes convs"),
        ("autocast", "Reported runs without a compiler: autocast is enabled."),
        ("nothing", None),
    ],
)
def test_an_eager_model_is_reported_once_on_rank_0(ranks, how, expected):
    first, second = ranks.run(2, eager_reasons, how, **({"precision": "bf16-mixed"} if how == "autocast" else {}))
    assert not second
    assert len(first) == (expected is not None), first
    if expected is not None:
        assert first[0].startswith(expected.format(line=f"{__file__}:{LINE.get(how, 0) + 1}")), first


@pytest.mark.parametrize("way", [*campaign(2, 4, 5), 3])
def test_graphs_that_would_mix_rows_do_not_run(ranks, way):
    """Of a model that compiled code computes first: what it computes from the fifth step on, no graph does."""
    model = f"not local {way}"
    plain = ranks.run(2, fit, model, None)
    for found, eager in zip(ranks.run(2, fit, model, "aot_eager"), plain):
        assert found["compiled"][0] > 0
        assert_same(found, eager, rtol=0, atol=0)
    if way != 5:  # random numbers
        assert_same(eager, expected(model), rtol=1e-8, atol=1e-10)


def test_dropout_between_layers(ranks):
    """Compiled without code of its own, dropout draws the numbers of a model without a compiler."""
    plain = ranks.run(2, fit, "dropout", None)
    for found, eager in zip(ranks.run(2, fit, "dropout", "aot_eager"), plain):
        assert found["compiled"][0] > 0
        assert_same(found, eager, rtol=0, atol=0)


@needs_compiler
@pytest.mark.campaign
def test_dropout_by_inductor(ranks):
    [found, other] = ranks.run(2, fit, "dropout", "inductor")
    assert found["compiled"][0] > 0 and torch.isfinite(found["predictions"]).all()
    assert_same(found, other, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", [*campaign("gcn"), "own"])
def test_a_compiled_module_has_its_models_compiled(ranks, model, backend):
    reference = expected(model)
    for found in ranks.run(2, fit, model, backend, whole=True):
        assert_same(found, reference, rtol=1e-10, atol=1e-10)
        assert found["compiled"][0] >= 2 * EPOCHS - 4 and len(found["compiled"]) == 1  # test and predict got the module itself
        assert not found["counters"]["graph_break"]


def test_graphs_run_without_a_compiler(ranks):
    """The output of the last layer is the output of a graph, without a node of autograd by a compiler."""
    for found in ranks.run(2, fit, "gat", "eager"):
        assert_same(found, expected("gat"), rtol=1e-10, atol=1e-10)
        assert found["compiled"][0] > 0


def without_compiler(rank: int, size: int, model: str) -> dict[str, Any]:
    from torch._inductor import config, cpp_builder
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config.cpp, "cxx", ("no-such-compiler",))
        patch.setattr(config, "force_disable_caches", True)
        for function in (cpp_builder.get_cpp_compiler, valid_vec_isa_list):
            getattr(function, "cache_clear", lambda: None)()
        try:
            with pytest.warns(UserWarning) as warned:
                found = fit(rank, size, model, "inductor")
        finally:
            for function in (cpp_builder.get_cpp_compiler, valid_vec_isa_list):
                getattr(function, "cache_clear", lambda: None)()
    found["said"] = [str(each.message) for each in warned]
    return found


def test_without_a_compiler_graphs_run_by_aot_eager(ranks):
    reference = expected("own")
    both = ranks.run(2, without_compiler, "own")
    for found in both:
        assert_same(found, reference, rtol=1e-10, atol=1e-10)
        assert found["compiled"][0] > 0
    assert any("OwnModel runs with backend='aot_eager', since torch.compile failed" in text for text in both[0]["said"])


class Copying(Module):
    """Also trains on the output of a copy of its model."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        twin = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
            assert self.model(batch.x, batch.edge_index).abs().amax() != 0
            assert twin(batch.x, batch.edge_index).abs().amax() == 0
        return loss


def copied(rank: int, size: int) -> bool:
    torch.manual_seed(1)
    module = Copying(build("gcn")).double()
    module.model = torch.compile(module.model, backend="aot_eager")
    trainer = quiet_trainer(DGCLStrategy(timeout=60), size, False, max_epochs=5)
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    return isinstance(module.model.forward, type(copied)) and "forward" not in vars(module.model.convs[0])


def test_a_copy_is_another_model_and_nothing_stays(ranks):
    assert all(ranks.run(2, copied))


@pytest.mark.campaign
@pytest.mark.parametrize("strategy", ["cover", "spmm_15d", "vertex_cut"])
def test_other_schemes(ranks, strategy):
    reference = expected("gcn")
    for found in ranks.run(2, fit, "gcn", "aot_eager", strategy=strategy):
        assert_same(found, reference, rtol=1e-10, atol=1e-10)
        assert found["compiled"][0] > 0


@pytest.mark.campaign
def test_recomputed_convs_are_not_compiled(ranks):
    reference = expected("gcn")
    for found in ranks.run(2, fit, "gcn", "aot_eager", checkpoint_convs=True):
        assert_same(found, reference, rtol=1e-10, atol=1e-10)
        assert not found["compiled"]
