"""Captured training steps: equal to steps that run as usual, bit by bit, or not captured, with the reason."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import changing_steps
import corpus
import emulated
import lightning as L
import numpy as np
import on_device
import pytest
import torch
import torch.nn.functional as F
from common import CLASSES, awkward_graph, build, campaign, quiet_trainer
from conftest import RankPool
from sample_runs import CONCATENATED, MODELS, SampleModule, Samples, graph_of_samples

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.extensions.graphs import source
from lightning_gnn.extensions.graphs.steps import StepGraphs

EPOCHS = 9


def begin() -> None:
    """Has the emulated device count as a part of torch, which it replaces."""
    on_device.begin()
    source.KNOWN.extend(["emulated", "queued", "on_device"])


@pytest.fixture(scope="module")
def ranks() -> Any:
    pool = RankPool(begin)
    yield pool
    pool.close()


class Seen(L.Callback):
    """Keeps the losses of all steps and the graphs of a fit."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.graphs: StepGraphs | None = None

    def on_train_batch_end(self, trainer: L.Trainer, _: Any, outputs: Any, *others: Any) -> None:
        self.losses.append(outputs["loss"].detach().cpu())
        self.graphs = trainer.strategy.steps.graphs


class Plain(L.LightningModule):
    """A classifier; `optimizer` makes its optimizers from its parameters."""

    def __init__(self, model: torch.nn.Module | None = None, optimizer: Any = None) -> None:
        super().__init__()
        self.model = build("gcn") if model is None else model
        self.make_optimizer = optimizer or functools.partial(torch.optim.Adam, lr=0.01)

    def loss(self, batch: Any) -> torch.Tensor:
        out = self.model(batch.x, batch.edge_index)
        return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


Result = tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]


def fitted(make: Callable[[], L.LightningModule], size: int, cuda_graph: Any, **options: Any) -> tuple[Result, Seen, L.Trainer]:
    """Returns losses, weights and logged values of a fit."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 (what users draw from)
    module, seen = make().double(), Seen()
    callbacks = [*options.pop("callbacks", []), seen]
    plan, ckpt_path = options.pop("plan", "auto"), options.pop("ckpt_path", None)
    defaults: dict[str, Any] = {"max_epochs": EPOCHS, "limit_val_batches": 0, "num_sanity_val_steps": 0, "callbacks": callbacks}
    strategy = DGCLStrategy(plan=plan, cuda_graph=cuda_graph, timeout=60)
    trainer = quiet_trainer(strategy, size, False, **{**defaults, **options})
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()), ckpt_path=ckpt_path)
    logged = {name: value.clone() for name, value in trainer.callback_metrics.items() if not name.endswith(("seconds", "per_s"))}
    return (seen.losses, [each.detach().clone() for each in module.parameters()], logged), seen, trainer


def assert_bits(found: Result, expected: Result) -> None:
    for place, (losses, others) in enumerate(zip(found[:2], expected[:2])):
        assert len(losses) == len(others)
        for one, other in zip(losses, others):
            assert torch.equal(one, other), (place, one, other)
    assert found[2].keys() == expected[2].keys()
    for name, value in found[2].items():
        assert torch.equal(value, expected[2][name]), name


def compared(rank: int, size: int, make: Callable[[], L.LightningModule], least: int, **options: Any) -> tuple[int, str]:
    """Compares a fit with captured steps to a fit without; returns the number of replays and the obstacle."""
    expected, _, _ = fitted(make, size, False, **options)
    found, seen, _ = fitted(make, size, "auto", **options)
    assert_bits(found, expected)
    graphs = seen.graphs
    assert graphs is not None and graphs.replays >= least, (graphs.replays, graphs.obstacle)
    return graphs.replays, graphs.obstacle


OPTIMIZERS: dict[str, Any] = {
    "adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=5e-4),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True, maximize=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, weight_decay=1e-3),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "dampening": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
}


def of_model(model: str, optimizer: str) -> L.LightningModule:
    return Plain(build(model), OPTIMIZERS[optimizer])


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        *campaign(*((model, optimizer) for model in ("gcn", "sage", "gat") for optimizer in OPTIMIZERS)),
        *campaign(("gcn_batch_norm", "sgd")),
        ("gat", "adamw"),
    ],
)
def test_captured_steps_equal_others(ranks, model, optimizer):
    [(replays, obstacle)] = ranks.run(1, compared, functools.partial(of_model, model, optimizer), EPOCHS - 4)
    assert (replays, obstacle) == (EPOCHS - 4, "")


@pytest.mark.parametrize(("model", "plan"), [("gcn", "auto"), ("gat", "auto"), *campaign(("sage", "auto"), ("gcn", "spst"))])
def test_ranks_replay_together(ranks, model, plan):
    for replays, obstacle in ranks.run(2, compared, functools.partial(of_model, model, "adam"), EPOCHS - 4, plan=plan):
        assert (replays, obstacle) == (EPOCHS - 4, "")


# What Lightning does around steps ##############################################


class Full(Plain):
    """Logs on steps and epochs, numbers and tensors; evaluates between steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"twice": 2 * loss.detach(), "constant": 0.5}, on_step=False, on_epoch=True)
        return {"loss": loss, "more": loss.detach() + 1}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.model(batch.x, batch.edge_index)
        self.log("val_loss", F.cross_entropy(out[batch.val_mask], batch.y[batch.val_mask], ignore_index=-1))


class Scheduled(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Dropping(Plain):
    def __init__(self) -> None:
        super().__init__(build("gcn"))

    def loss(self, batch: Any) -> torch.Tensor:
        out = self.model(F.dropout(batch.x, 0.3), batch.edge_index) + 0.1 * torch.randn_like(batch.x[:, :CLASSES])
        return F.cross_entropy(F.dropout(out, 0.5)[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)


class Hooks(L.Callback):
    """Counts hooks, and changes gradients in one of them; the optimizer has hooks, too."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        [optimizer] = trainer.optimizers
        optimizer.register_step_pre_hook(lambda *_: self.seen.append("before step"))
        optimizer.register_step_post_hook(lambda *_: self.seen.append("after step"))

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.append("batch")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.seen.append("zero")

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: torch.Tensor) -> None:
        self.seen.append(("backward", float(loss), loss.requires_grad))

    def on_after_backward(self, trainer: L.Trainer, module: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.mul_(1 + trainer.current_epoch)

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.seen.append(float(sum(each.grad.sum() for each in module.parameters())))


class Kept(L.Callback):
    """Keeps outputs of steps, which later steps must not overwrite."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs)


def classifier(model: str) -> L.LightningModule:
    return NodeClassifier(build(model), num_classes=CLASSES)


def hooks_are_called(rank: int, size: int) -> None:
    expected, found = Hooks(), Hooks()
    assert_bits(fitted(Plain, size, "auto", callbacks=[found])[0], fitted(Plain, size, False, callbacks=[expected])[0])
    assert found.seen == expected.seen and found.seen.count("after step") == EPOCHS


def outputs_stay(rank: int, size: int) -> None:
    expected, found = Kept(), Kept()
    fitted(Full, size, False, callbacks=[expected])
    fitted(Full, size, "auto", callbacks=[found])
    assert len(found.outputs) == EPOCHS
    for one, other in zip(found.outputs, expected.outputs):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("function", "size"), [(hooks_are_called, 1), (hooks_are_called, 2), (outputs_stay, 1)])
def test_hooks_and_outputs(ranks, function, size):
    ranks.run(size, function)


@pytest.mark.parametrize(
    ("make", "size", "options"),
    [
        (Scheduled, 1, {"gradient_clip_val": 0.1}),
        (Scheduled, 2, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (Plain, 1, {"accumulate_grad_batches": 3}),
        (Full, 1, {"limit_val_batches": 1, "num_sanity_val_steps": 1}),
        (Full, 2, {"limit_val_batches": 1, "check_val_every_n_epoch": 2}),
        (Dropping, 1, {}),
        (functools.partial(classifier, "gcn"), 1, {"limit_val_batches": 1}),
        (functools.partial(classifier, "sage"), 2, {}),
    ],
)
def test_the_trainers_features(ranks, make, size, options):
    for replays, obstacle in ranks.run(size, compared, make, EPOCHS - 4, **options):
        assert (replays, obstacle) == (EPOCHS - 4, "")


def resumed(rank: int, size: int, first: Any, then: Any) -> tuple[Result, dict[str, Any]]:
    """A fit of six epochs that is continued from its checkpoint."""
    with TemporaryDirectory() as folder:
        _, _, trainer = fitted(Scheduled, size, first, max_epochs=6)
        path = str(Path(folder) / "last.ckpt")
        trainer.strategy.barrier = lambda *_: None  # type: ignore[method-assign]
        trainer.save_checkpoint(path)
        checkpoint = torch.load(path, weights_only=False)
        result, seen, _ = fitted(Scheduled, size, then, max_epochs=12, ckpt_path=path)
    if then:
        assert seen.graphs is not None and seen.graphs.replays == 2, seen.graphs.obstacle
    return result, checkpoint


def checkpoints_equal(rank: int, size: int) -> None:
    expected, plain = resumed(rank, size, False, False)
    for first, then in ((True, True), (True, False), (False, True)):
        found, checkpoint = resumed(rank, size, first, then)
        assert_bits(found, expected)
        for name in ("optimizer_states", "lr_schedulers", "state_dict"):
            assert repr(checkpoint[name]) == repr(plain[name]), name
        options = checkpoint["optimizer_states"][0]["param_groups"][0]
        assert options["capturable"] is False and type(options["lr"]) is float


def test_checkpoints_equal_those_without_graphs(ranks):
    ranks.run(1, checkpoints_equal)


# Steps that change #############################################################


def _same(module: L.LightningModule) -> L.LightningModule:
    return module


def changing(rank: int, size: int, names: list[str]) -> dict[str, str]:
    """Compares fits of these steps; returns a description of each difference, by step."""
    wrong: dict[str, str] = {}
    for name in names:
        make, least, most = changing_steps.CASES[name]
        results, replays, obstacle = [], 0, ""
        for cuda_graph in (False, "auto"):
            torch.manual_seed(1)
            module, callbacks = make()
            again = {"callbacks": callbacks, "max_epochs": changing_steps.EPOCHS}
            result, seen, _ = fitted(functools.partial(_same, module), size, cuda_graph, **again)
            results.append(result)
            if seen.graphs is not None:
                replays, obstacle = seen.graphs.replays, seen.graphs.obstacle
        try:
            assert_bits(*results[::-1])
        except AssertionError as error:
            wrong[name] = f"differs: {error}"
        if not least <= replays <= most or (most == 0) != bool(obstacle):
            wrong[name] = f"{wrong.get(name, '')} {replays} replays; {obstacle}"
        print(f"{name}: {replays} replays; {obstacle}")
    return wrong


DAILY = ["late_epochs", "counter_that_matters_late", "closure_that_counts", "switched_layer", "features_changed_in_place"]
LATER = [[name] for name in changing_steps.CASES if name not in DAILY]


@pytest.mark.parametrize("names", [*campaign(*LATER), DAILY])
def test_changing_steps_equal_others(ranks, names):
    assert ranks.run(1, changing, names, timeout=250) == [{}]


# Steps that cannot be captured #################################################


class Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Synchronizing(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        return loss * 2 if loss > 100 else loss  # the obstacle


LINE = next(
    number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# the obstacle")
)


def obstacles(rank: int, size: int) -> list[str]:
    notes, logger = Notes(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    try:
        compared(rank, size, Synchronizing, 0)
    finally:
        logger.removeHandler(notes)
        logger.setLevel(level)
    try:
        fitted(Synchronizing, size, True)
    except RuntimeError as error:
        notes.lines.append(f"{type(error).__name__}: {error}")
    return [line for line in notes.lines if "captured" in line]


@pytest.mark.parametrize("size", [1, 2])
def test_an_obstacle_is_reported_once_with_its_line(ranks, size):
    for rank, lines in enumerate(ranks.run(size, obstacles)):
        reason = f"test_graphs.py:{LINE}: aten._local_scalar_dense reads a number from the device"
        *logged, error = lines
        assert len(logged) == (rank == 0) and all(reason in line for line in lines), lines
        assert error.startswith("NotCapturedError: Training steps cannot be captured:") and 'cuda_graph="auto"' in error


def unsupported(rank: int, size: int) -> None:
    for optimizer, reason in (
        (functools.partial(torch.optim.RMSprop, lr=0.01), "RMSprop is not captured. Use Adam, AdamW or SGD"),
        (functools.partial(torch.optim.Adam, differentiable=True), "the option differentiable is not captured. Remove it"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            fitted(functools.partial(Plain, None, optimizer), size, True)


def test_unsupported_optimizers_are_named(ranks):
    ranks.run(1, unsupported)


def test_the_cpu_has_no_graphs():
    with pytest.raises(ValueError, match="cuda_graph must be False, 'auto' or True"):
        DGCLStrategy(cuda_graph="yes")  # type: ignore[arg-type]
    trainer = quiet_trainer(DGCLStrategy(cuda_graph=True), 1, False)
    with pytest.raises(RuntimeError, match="cpu devices have no graphs"):
        trainer.fit(Plain().double(), datamodule=GraphDataModule(awkward_graph()))


# Samples #######################################################################


class OnSamples(SampleModule):
    """Masked error over samples; no hook replaces values of a batch."""

    on_after_batch_transfer = L.LightningModule.on_after_batch_transfer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch.hour))
        return loss


def fit_samples(size: int, graph_ranks: int, name: str, cuda_graph: Any) -> tuple[Result, Seen]:
    torch.manual_seed(1)
    module, seen, samples = OnSamples((MODELS | CONCATENATED)[name]()).double(), Seen(), Samples(size=14)
    strategy = DGCLStrategy(graph_ranks=graph_ranks, cuda_graph=cuda_graph, timeout=60)
    trainer = quiet_trainer(strategy, size, False, max_epochs=4, callbacks=[seen], num_sanity_val_steps=0)
    data = GraphDataModule(
        graph_of_samples(),
        partition="random",
        samples=samples,
        val_samples=samples,
        global_batch_size=4,
        concatenate=name in CONCATENATED,
    )
    trainer.fit(module, datamodule=data)
    logged = {name: value.clone() for name, value in trainer.callback_metrics.items() if name.endswith("_loss")}
    return (seen.losses, [each.detach().clone() for each in module.parameters()], logged), seen


def compare_samples(rank: int, size: int, graph_ranks: int, name: str) -> tuple[int, str]:
    expected, _ = fit_samples(size, graph_ranks, name, False)
    found, seen = fit_samples(size, graph_ranks, name, "auto")
    assert_bits(found, expected)
    assert seen.graphs is not None
    return seen.graphs.replays, seen.graphs.obstacle


@pytest.mark.parametrize(
    ("size", "graph_ranks", "name"), [(2, 2, "gcn"), (2, 1, "gcn"), *campaign((2, 2, "concatenated_gcn"), (1, 1, "sage"))]
)
def test_full_batches_of_samples_are_replayed(ranks, size, graph_ranks, name):
    """Batches of 4 of 14 samples: two steps warm up, one is recorded and one captured; the last of each epoch runs as usual."""
    for replays, obstacle in ranks.run(size, compare_samples, graph_ranks, name):
        assert (replays, obstacle) == (4 * 3 - 3 - 1, "")


# The capture mode of the emulated device #######################################


def controls(rank: int, size: int) -> None:
    device = torch.device("emulated", 0)
    x, mask, host = torch.arange(6.0, device=device), torch.ones(6, dtype=torch.bool, device=device), torch.ones(6)
    refused: dict[str, Callable[[], Any]] = {
        "waits for the device": x.sum().item,
        "synchronize": torch.emulated.synchronize,  # type: ignore[attr-defined]
        "index waits": lambda: x[mask],
        "nonzero waits": mask.nonzero,
        "reads a tensor of the CPU": lambda: x.copy_(host),
        "a copy reads a tensor": lambda: host.to(device),
        "copy to the host": lambda: host.copy_(x),
        "random state": lambda: torch.emulated.get_rng_state(),  # type: ignore[attr-defined]
    }
    for reason, run in refused.items():
        with pytest.raises(RuntimeError, match=f"stream is capturing.*{reason}"), emulated.graph(emulated.CUDAGraph()):
            run()
        if reason != "synchronize":
            run()  # otherwise allowed
    total, graph = torch.zeros(6, device=device), emulated.CUDAGraph()
    with emulated.graph(graph):
        out = total.add_(x).mul(2.0) + torch.rand(6, device=device)
    assert not total.raw.any() and bool(out.raw.isnan().all())  # nothing ran
    values = []
    for _ in range(2):
        graph.replay()
        values.append(out.raw - 2 * total.raw)
    assert torch.equal(total.raw, 2 * x.raw) and not torch.equal(*values)  # other draws in each replay


def test_the_emulated_device_refuses_what_a_graph_cannot_contain(ranks):
    ranks.run(1, controls)


# The corpus of programs ########################################################


@pytest.mark.parametrize("every", [*campaign(6), 90])
def test_most_steps_of_the_corpus_are_captured(ranks, every):
    """Of steps that the device can capture by hand; the others are printed with their obstacles."""
    [names] = ranks.run(1, corpus.names)
    [found] = ranks.run(1, corpus.examine, names[every // 2 :: every], timeout=1500)
    possible = {name: each for name, each in found.items() if each[0]}
    assert not [name for name, (*_, difference) in possible.items() if difference]
    others = {name: obstacle for name, (_, replays, obstacle, _) in possible.items() if not replays}
    print(f"{len(possible) - len(others)} of {len(possible)} steps are captured; of {len(found)} programs")
    for name, obstacle in others.items():
        print(f"{name}: {obstacle}")
    assert len(possible) > len(found) / 3 and len(others) <= 0.2 * len(possible)
