"""Stages: several schemes in one fit are one run, with one optimizer, one logger run, one chain of checkpoints.

Test tiers: without ranks; gloo ranks in the pool.
"""

from __future__ import annotations

import csv
import gc
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import yaml
from common import Recorder, UserModule, awkward_graph, build, of_file, quiet_trainer, strategy_of_config
from conftest import RankFailed
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from processes import REPOSITORY
from test_embedding import Embedded
from test_embedding import graph as graph_without_features
from test_guards import Centred

from lightning_gnn import (
    CachedVertexCutStrategy,
    CommunicationMonitor,
    DGCLStrategy,
    GraphDataModule,
    SamplingStrategy,
    StagedStrategy,
    UnsupportedModelError,
)
from lightning_gnn.launching import ScriptLauncher

BATCHES = {"fanouts": [4, 4], "batch_size": 6}
QUICK = {"timeout": 60, "self_check": False}
DGCL, CUT = {"strategy": "dgcl", **QUICK}, {"strategy": "vertex_cut", **QUICK}
SAMPLES = {"strategy": "sampling", **BATCHES, **QUICK}


class Scheduled(UserModule):
    """Adam, whose step gets smaller every epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


class Dropping(Scheduled):
    """Draws random numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.model(F.dropout(batch.x, 0.5), batch.edge_index)
        return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)


class Watch(L.Callback):
    """Keeps what each epoch ran under, and what hooks saw."""

    def __init__(self) -> None:
        self.schemes: list[str] = []
        self.steps: list[int] = []
        self.optimizers: set[int] = set()
        self.calls = {"on_train_start": 0, "on_train_end": 0}
        self.logged: list[set[str]] = []

    def on_train_start(self, *_: Any) -> None:
        self.calls["on_train_start"] += 1

    def on_train_end(self, *_: Any) -> None:
        self.calls["on_train_end"] += 1

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.optimizers.add(id(trainer.optimizers[0]))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.schemes.append(getattr(trainer.strategy, "strategy_name", "none"))
        self.steps.append(trainer.global_step)
        self.logged.append(set(trainer.callback_metrics))


def run(
    rank: int,
    world_size: int,
    stages: list[Any] | None,
    epochs: int,
    folder: Path | None = None,
    resume: Path | None = None,
    module: type[UserModule] = Scheduled,
    callbacks: Any = (),
    **saver: Any,
) -> dict[str, Any]:
    """Trains, and returns what must be that of one run; on one device without stages."""
    strategy = "auto" if stages is None else StagedStrategy(stages)
    recorder, watch = Recorder(), Watch()
    wrapped = module(build("gcn_batch_norm")).double()
    data = GraphDataModule(awkward_graph())
    more: dict[str, Any] = {}
    if folder is not None:
        saver = {"filename": "{epoch}", "save_top_k": -1, **saver}
        callbacks = [ModelCheckpoint(folder / "checkpoints", **saver), *callbacks]
        more = {"logger": CSVLogger(folder, "", ""), "enable_checkpointing": True}
    trainer = quiet_trainer(strategy, world_size, max_epochs=epochs, callbacks=[recorder, watch, *callbacks], **more)
    trainer.fit(wrapped, datamodule=data, ckpt_path=resume, weights_only=None if resume is None else False)
    weights = {name: value.clone() for name, value in wrapped.state_dict().items()}
    [tested] = trainer.test(wrapped, datamodule=data, verbose=False)
    [predicted] = trainer.predict(wrapped, datamodule=data)
    return {
        "epochs": recorder.epochs,
        "weights": weights,
        "optimizer": trainer.optimizers[0].state_dict(),
        "test": tested,
        "predictions": predicted,
        "watch": watch,
        "left": [type(callback).__name__ for callback in trainer.callbacks],
        "approximation": getattr(trainer.strategy, "approximation", ""),
    }


RESULTS = ("weights", "optimizer", "test", "predictions")


def same(found: dict[str, Any], expected: dict[str, Any], keys: tuple[str, ...] = ("epochs", *RESULTS)) -> None:
    for key in keys:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-8, atol=1e-8, msg=lambda m, k=key: f"{k}: {m}")


def checkpoint(folder: Path, epoch: int) -> Path:
    return folder / "checkpoints" / f"epoch={epoch}.ckpt"


# One run ######################################################################


def watched(rank: int, world_size: int, folder: Path, **saver: Any) -> dict[str, Any]:
    """Three exact stages, with whatever may look at a run."""
    stages = [
        {"strategy": "dgcl", "epochs": 2, "timeout": 60},
        {"strategy": DGCLStrategy(plan="swap", timeout=60), "epochs": 1},
        {"strategy": "spmm_1d", "timeout": 60},
    ]
    callbacks = [
        EarlyStopping("val_loss", patience=10),
        LearningRateMonitor(),
        CommunicationMonitor(),
    ]
    return run(rank, world_size, stages, 5, folder, callbacks=callbacks, **saver)


def logged(folder: Path, value: str) -> list[tuple[int, int, float]]:
    """Returns epoch, step and number of each entry."""
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row[value]]
    return [(int(row["epoch"] or -1), int(row["step"]), float(row[value])) for row in rows]


def test_exact_stages_are_one_device(ranks, tmp_path):
    alone, staged = tmp_path / "alone", tmp_path / "staged"
    best = {"monitor": "val_loss", "mode": "min", "save_top_k": 1}
    expected = run(0, 1, None, 5, alone, callbacks=[LearningRateMonitor()], **best)
    for found in ranks.run(2, watched, staged, **best):
        same(found, expected)
        watch = found["watch"]
        assert watch.schemes == ["dgcl"] * 3 + ["spmm_1d"] * 2
        assert watch.steps == [1, 2, 3, 4, 5] and len(watch.optimizers) == 1
        assert watch.calls == {"on_train_start": 1, "on_train_end": 1}
        assert all({"comm/bytes_sent", "throughput/nodes_per_s"} <= each for each in watch.logged)
        assert not {"CommunicationMetrics", "LambdaCallback"} & set(found["left"])
    for value in ("train_loss", "val_loss", "lr-Adam"):
        assert logged(staged, value) == [(*when, pytest.approx(each, rel=1e-8)) for *when, each in logged(alone, value)]
    assert [each.name for each in staged.glob("checkpoints/*")] == [each.name for each in alone.glob("checkpoints/*")]
    options = (staged / "hparams.yaml").read_text()
    assert "stages:" in options and "first_epoch: 3" in options
    assert len(list((staged / "communication" / "heat_map").parent.iterdir())) > 1


def resumed(rank: int, world_size: int, folder: Path) -> list[dict[str, Any]]:
    """A run, and others that go on from its checkpoints: in the middle of a stage, at its end, in the middle of the next."""
    stages = [{**SAMPLES, "epochs": 2}, CUT]
    L.seed_everything(3)
    through = run(rank, world_size, stages, 4, folder, module=Dropping)
    found = [through]
    for epoch in range(3):
        L.seed_everything(10 + epoch)
        again = run(rank, world_size, stages, 4, resume=checkpoint(folder, epoch), module=Dropping)
        found.append(again)
    return found


def test_any_checkpoint_gives_the_run_that_went_through(ranks, tmp_path):
    for through, *others in ranks.run(2, resumed, tmp_path):
        schemes = through["watch"].schemes
        assert schemes == ["sampling"] * 2 + ["vertex_cut"] * 2
        for epoch, found in enumerate(others):
            same(found, through, RESULTS)
            assert found["watch"].schemes == schemes[epoch + 1 :]


def test_samples_then_the_whole_graph(ranks, tmp_path):
    [found, other] = ranks.run(2, run, [{**SAMPLES, "epochs": 2}, DGCL], 4, tmp_path)
    same(other, found)
    steps = found["watch"].steps
    assert steps == [steps[0], 2 * steps[0], 2 * steps[0] + 1, 2 * steps[0] + 2] and steps[0] > 1
    assert found["watch"].schemes == ["sampling"] * 2 + ["dgcl"] * 2 and len(found["watch"].optimizers) == 1
    assert found["approximation"] == "sampled mini-batches"
    # One device goes on from the sampled epochs as the last stage does.
    exact = run(0, 1, None, 4, resume=checkpoint(tmp_path, 1))
    same(found, exact, RESULTS)
    same({"epochs": found["epochs"][2:]}, exact, ("epochs",))
    # And what was validated under either stage is what one device finds with these weights.
    module, data = Scheduled(build("gcn_batch_norm")).double(), GraphDataModule(awkward_graph())
    for epoch in range(4):
        module.load_state_dict(torch.load(checkpoint(tmp_path, epoch), weights_only=False)["state_dict"])
        [validated] = quiet_trainer("auto", 1).validate(module, datamodule=data, verbose=False)
        assert {name: found["epochs"][epoch][name] for name in validated} == pytest.approx(validated, rel=1e-8)


def test_cached_then_exact(ranks, tmp_path):
    stages = [{"strategy": CachedVertexCutStrategy(0.3, cache_within_hosts=True, **QUICK), "epochs": 3}, CUT]
    [found, _] = ranks.run(2, run, stages, 5, tmp_path)
    whole = run(0, 1, None, 5)
    assert found["watch"].schemes == ["vertex_cut_cached"] * 3 + ["vertex_cut"] * 2
    assert found["approximation"] == "cached messages, codec int8"
    assert abs(found["epochs"][2]["train_loss"] - whole["epochs"][2]["train_loss"]) > 1e-6
    same(found, run(0, 1, None, 5, resume=checkpoint(tmp_path, 2)), RESULTS)


@pytest.mark.parametrize(
    ("saver", "under_the_old"),
    [({"monitor": "val_loss"}, ["dgcl"]), ({"every_n_train_steps": 1}, [])],
    ids=["validation", "step"],
)
def test_resumes_from_the_last_thing_in_a_stage(ranks, tmp_path, saver, under_the_old):
    """Such a checkpoint belongs to the epoch that it ends, of which no batch is left; Lightning may still end that epoch."""
    stages = [{**DGCL, "epochs": 2}, CUT]
    ranks.run(2, run, stages, 2, tmp_path, save_on_train_epoch_end=False, **saver)
    expected = run(0, 1, None, 4, resume=checkpoint(tmp_path, 1))
    for found in ranks.run(2, run, stages, 4, resume=checkpoint(tmp_path, 1)):
        same(found, expected)
        assert found["watch"].schemes == under_the_old + ["vertex_cut"] * 2
    # Of an epoch of several steps none is left out.
    stages = [{**DGCL, "epochs": 2}, SAMPLES]
    [found, _] = ranks.run(2, run, stages, 4, resume=checkpoint(tmp_path, 1))
    first, second = found["watch"].steps[-2:]
    assert first - 2 == second - first > 1


class Freed(L.Callback):
    """Looks whether the first stage's part of the graph, its layers' exchange and its messages are there in the second."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.alive: list[str] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if trainer.current_epoch == 0:
            context = strategy._binding.context
            kept = [strategy._shard, strategy._shard.batch, context, strategy.world, strategy._shared]
            kept += [
                each for each in vars(strategy.scheme).values() if type(each).__module__.startswith("lightning_gnn.")
            ]
            self.kept = [weakref.ref(each) for each in kept]
        else:
            gc.collect()
            in_use = strategy._shard, strategy._shard.batch  # of both stages, if both hold the same rows
            alive = (each() for each in self.kept)
            self.alive += [type(each).__name__ for each in alive if not any(each is one for one in (None, *in_use))]


def freed(rank: int, world_size: int, first: Any) -> list[str]:
    look = Freed()
    stages = StagedStrategy([{"strategy": first, "epochs": 1}, {"strategy": "spmm_1d", **QUICK}])
    trainer = quiet_trainer(stages, world_size, max_epochs=2, callbacks=[look])
    trainer.fit(Scheduled(build("gcn")).double(), datamodule=GraphDataModule(awkward_graph()))
    assert len(look.kept) > 5
    return look.alive


@pytest.mark.parametrize(
    "first",
    [
        DGCLStrategy(**QUICK),
        CachedVertexCutStrategy(0.3, cache_within_hosts=True, **QUICK),
        SamplingStrategy(**BATCHES, **QUICK),
    ],
    ids=["dgcl", "cached", "sampling"],
)
def test_a_stage_that_has_ended_takes_no_memory(ranks, first):
    assert ranks.run(2, freed, first) == [[], []]


def embedded(rank: int, world_size: int, stages: list[Any] | None) -> Any:
    strategy = "auto" if stages is None else StagedStrategy(stages)
    trainer = quiet_trainer(strategy, world_size, max_epochs=4)
    module = Embedded()
    trainer.fit(module, datamodule=GraphDataModule(graph_without_features()))
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_embeddings_and_their_optimizer_move_with_the_nodes(ranks):
    [found, _] = ranks.run(2, embedded, [{**DGCL, "epochs": 2}, CUT])
    torch.testing.assert_close(found, embedded(0, 1, None), rtol=1e-8, atol=1e-10)


# Refused ######################################################################


@pytest.mark.parametrize(
    ("stages", "error"),
    [
        ([], "list of strategies"),
        ("dgcl", "list of strategies"),
        ([{"epochs": 2}], "has the key 'strategy'"),
        ([{"strategy": "dgcl", "epochs": 0}, "dgcl"], "at least 1: others follow"),
        ([{"strategy": "dgcl", "epochs": 1.5}, "dgcl"], "at least 1: others follow"),
        (["dgcl", "vertex_cut"], "needs epochs"),
        ([{"strategy": "dgcl", "epochs": 3}], "Leave epochs=3 out"),
        ([{"strategy": "dgcll", "epochs": 3}, "dgcl"], "none of this package's .*There are dgcl, cover, spmm, spmm_1d"),
        ([{"strategy": "ddp", "epochs": 3}, "dgcl"], "none of this package's"),
        ([{"strategy": "dgcl", "epochs": 3, "devices": 4}, "dgcl"], "cannot have devices of its own"),
        ([{"strategy": "dgcl", "epochs": 3, "codex": "int8"}, "dgcl"], "Stage 1, dgcl, cannot be made: .*codex"),
        ([{"strategy": "sampling", "epochs": 3, "batch_size": 0}, "dgcl"], "Stage 1, sampling, cannot be made"),
        ([{"strategy": "gossip", "epochs": 3}, "dgcl"], "cannot be a stage. Its workers train independently"),
        (["cluster_allreduce"], "cannot be a stage. Its workers train independently"),
        (["auto_gnn"], "cannot be a stage. It rehearses"),
        ([{"strategy": DGCLStrategy(), "epochs": 3, "codec": "int8"}, "dgcl"], "is made already"),
        ([{"strategy": StagedStrategy(["dgcl"]), "epochs": 3}, "dgcl"], "has stages itself"),
        ([{"strategy": "dgcl", "epochs": 3}, "vertex_cut_spawn"], "started once, for all stages"),
        ([{"strategy": (once := SamplingStrategy()), "epochs": 1}, once], "stands for one stage"),
    ],
)
def test_refuses(stages, error):
    with pytest.raises(ValueError, match=error):
        StagedStrategy(stages)


def fit(rank: int, world_size: int, stages: list[Any], model: torch.nn.Module, **data: Any) -> None:
    """Fits; what is refused is so before anything is trained."""
    watch = Watch()
    trainer = quiet_trainer(StagedStrategy(stages), world_size, self_check=True, callbacks=[watch])
    try:
        trainer.fit(UserModule(model).double(), datamodule=GraphDataModule(awkward_graph(), **data))
    finally:
        assert not watch.steps


LATER = [
    pytest.param([{**DGCL, "epochs": 1}, {"strategy": "spmm_2d"}], build("gcn"), "square", id="ranks"),
    pytest.param(
        [{**DGCL, "epochs": 1}, "dgcl"], Centred(), r"x.numpy\(\) would see this rank's rows only", id="model"
    ),
]


@pytest.mark.parametrize(("stages", "model", "error"), LATER)
def test_refuses_what_a_later_stage_does_not_take(ranks, stages, model, error):
    with pytest.raises(RankFailed, match=error):
        ranks.run(2, fit, stages, model)


@pytest.mark.parametrize(("stages", "model", "error"), LATER)
def test_refuses_it_before_ranks_start(monkeypatch, stages, model, error):
    monkeypatch.setattr(ScriptLauncher, "_start", lambda launcher, check: [check(), pytest.fail("ranks were let in")])
    with pytest.raises((ValueError, UnsupportedModelError), match=error):
        fit(0, 2, stages, model)


def test_fan_outs_of_the_datamodule_are_for_stages_that_sample(ranks):
    with pytest.raises(RankFailed, match="makes none"):
        ranks.run(2, fit, [{**DGCL, "epochs": 1}, CUT], build("gcn"), **BATCHES)


def test_a_last_stage_that_is_not_reached_is_told():
    trainer = quiet_trainer(StagedStrategy([{**DGCL, "epochs": 3}, CUT]), 1, max_epochs=3)
    with pytest.warns(UserWarning, match="max_epochs=3, but the last of 2 stages begins after epoch 3"):
        trainer.fit(Scheduled(build("gcn")).double(), datamodule=GraphDataModule(awkward_graph()))


# Given otherwise ##############################################################


def fan_outs(rank: int, world_size: int) -> None:
    stages = StagedStrategy([{"strategy": "sampling", "epochs": 1, **QUICK}, DGCL])
    trainer = quiet_trainer(stages, world_size, max_epochs=2)
    trainer.fit(Scheduled(build("gcn")).double(), datamodule=GraphDataModule(awkward_graph(), **BATCHES))
    assert stages.stages[0].batch_size == 6 and trainer.strategy is stages


def test_fan_outs_of_the_datamodule(ranks):
    ranks.run(2, fan_outs)


def from_yaml(rank: int, world_size: int, config: Path) -> list[str]:
    cli, watch = of_file(config), Watch()
    cli.trainer.callbacks.append(watch)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return watch.schemes


def test_yaml(ranks, tmp_path):
    config = yaml.safe_load((REPOSITORY / "configs" / "stages.yaml").read_text())
    config["data"]["init_args"]["source_args"]["num_nodes"] = 200
    config["trainer"] |= {
        "max_epochs": 7,
        "logger": False,
        "enable_checkpointing": False,
        "default_root_dir": str(tmp_path / "run"),
    }
    (tmp_path / "stages.yaml").write_text(yaml.safe_dump(config))
    assert ranks.run(2, from_yaml, tmp_path / "stages.yaml") == [["sampling"] * 5 + ["dgcl"] * 2] * 2
    stages = "[{strategy: dgcl, epochs: 3, codec: int8}, vertex_cut]"
    entry = f"{{class_path: lightning_gnn.StagedStrategy, init_args: {{stages: {stages}}}}}"
    found = strategy_of_config(tmp_path / "config.yaml", entry)
    assert [each.strategy_name for each in found.stages] == ["dgcl", "vertex_cut"]
    assert found.stages[0].codec == "int8" and found.first_epochs == [0, 3]
