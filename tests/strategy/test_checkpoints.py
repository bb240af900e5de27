"""Checkpoints: of any scheme and number of ranks for any other, and for plain PyG; whole, or refused by name."""

from __future__ import annotations

import copy
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from common import CAMPAIGN, CLASSES, FEATURES, awkward_graph, build, quiet_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_gnn import (
    CachedVertexCutStrategy,
    ClusterAllReduceStrategy,
    CoverStrategy,
    DGCLStrategy,
    DistributedEmbedding,
    GossipStrategy,
    GraphDataModule,
    NodeClassifier,
    SamplingStrategy,
    SpMM1DStrategy,
    SpMM2DStrategy,
    SpMM15DStrategy,
    VertexCutStrategy,
)
from lightning_gnn.checkpoints import DamagedCheckpointError, WholeCheckpointIO

HALF, ALL = 10, 14
ROWS = 4


class Everything(L.LightningModule):
    """What a checkpoint may hold: weights, Adam's moments, a schedule, learnt rows of nodes; plain losses."""

    def __init__(self, embedded: bool) -> None:
        super().__init__()
        self.embedding = DistributedEmbedding(60, ROWS, lr=0.05) if embedded else None
        self.model = build("sage", FEATURES + ROWS * embedded)
        self.losses: list[float] = []

    def forward(self, batch: Any) -> torch.Tensor:
        x = batch.x if self.embedding is None else torch.cat([batch.x, self.embedding(batch.n_id)], 1)
        return self.model(x, batch.edge_index)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch)[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch)[batch.val_mask], batch.y[batch.val_mask], ignore_index=-1))

    def on_train_epoch_end(self) -> None:
        # A gossip worker may come to nothing, if the others are faster.
        self.losses.append(float(self.trainer.callback_metrics.get("train_loss", "nan")))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)]


def strategy_of(name: str) -> Any:
    options: dict[str, Any] = {"timeout": 300, "self_check": False}
    return {
        "auto": lambda: "auto",
        "dgcl": lambda: DGCLStrategy(**options),
        "cover": lambda: CoverStrategy(**options),
        "spmm_1d": lambda: SpMM1DStrategy(**options),
        "spmm_15d": lambda: SpMM15DStrategy(**options),
        "spmm_2d": lambda: SpMM2DStrategy(**options),
        "vertex_cut": lambda: VertexCutStrategy(**options),
        "sampling": lambda: SamplingStrategy([-1, -1], 1000, **options),  # all of the graph in each step: exact
        "vertex_cut_cached": lambda: CachedVertexCutStrategy(cache_within_hosts=True, **options),
        "gossip": lambda: GossipStrategy(num_clusters=6, average_every_n_batches=2, heartbeat_timeout=60, **options),
        "cluster_allreduce": lambda: ClusterAllReduceStrategy(num_clusters=6, **options),
    }[name]()


def train_on(rank: int, world_size: int, runs: list[tuple[str, str | None, str]], embedded: bool = True) -> list[Any]:
    """Fits under each strategy, from a checkpoint or from the beginning, and writes one."""
    results = []
    for strategy, load, save in runs:
        L.seed_everything(3, verbose=False)
        module = Everything(embedded).double()
        trainer = quiet_trainer(strategy_of(strategy), world_size, max_epochs=ALL if load else HALF)
        trainer.fit(module, datamodule=GraphDataModule(awkward_graph()), ckpt_path=load)
        trainer.save_checkpoint(save)
        results.append({"losses": module.losses, "epoch": trainer.current_epoch, "rank": rank})
    return results


def read(path: str) -> dict[str, Any]:
    """Returns what resumed runs have in common; any checkpoint of ours is plain."""
    checkpoint = torch.load(path, weights_only=True)
    return {key: checkpoint[key] for key in ("epoch", "state_dict", "optimizer_states", "lr_schedulers")}


BEFORE = ["dgcl", "spmm_1d", "spmm_15d", "vertex_cut", "sampling", "cover"]
AFTER = ["spmm_2d", "spmm_15d", "vertex_cut", "cover", "sampling", "dgcl", "spmm_1d"]


def test_exact_schemes_go_on_as_if_nothing_had_happened(ranks, tmp_path):
    """10 epochs on two ranks, the rest on four, or on one, equal 14 on one device; and plain PyG computes the same."""
    path = {name: str(tmp_path / f"{name}.ckpt") for name in (*BEFORE, *(f"to {name}" for name in AFTER), "one", "all")}
    ranks.run(2, train_on, [(name, None, path[name]) for name in BEFORE])
    before = [path[BEFORE[index % len(BEFORE)]] for index in range(len(AFTER))]
    ranks.run(4, train_on, [(name, load, path[f"to {name}"]) for name, load in zip(AFTER, before)])
    train_on(0, 1, [("auto", path["vertex_cut"], path["one"])])
    quiet_fit(path["all"], ALL)
    expected = read(path["all"])
    assert expected["epoch"] == ALL and int(expected["state_dict"]["embedding.step"]) == ALL
    for name in (*(f"to {name}" for name in AFTER), "one"):
        torch.testing.assert_close(read(path[name]), expected, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")

    weights, graph = torch.load(path["to spmm_2d"], weights_only=True)["state_dict"], awkward_graph()
    plain, rows = build("sage", FEATURES + ROWS).double(), torch.nn.Embedding(60, ROWS).double()
    plain.load_state_dict({key[6:]: value for key, value in weights.items() if key.startswith("model.")})
    rows.load_state_dict({"weight": weights["embedding.weight"]})
    module = Everything(True).double()
    module.load_state_dict(expected["state_dict"])
    graph.n_id = torch.arange(60)
    torch.testing.assert_close(plain(torch.cat([graph.x, rows.weight], 1), graph.edge_index), module(graph))


def quiet_fit(save: str, epochs: int) -> None:
    """The run that nothing disturbs, on one device."""
    L.seed_everything(3, verbose=False)
    trainer = quiet_trainer("auto", 1, max_epochs=epochs)
    trainer.fit(Everything(True).double(), datamodule=GraphDataModule(awkward_graph()))
    trainer.save_checkpoint(save)


APPROXIMATE = ["vertex_cut_cached", "gossip", "cluster_allreduce"]


@pytest.mark.campaign
def test_approximate_schemes_hand_on_what_they_have_learnt(ranks, tmp_path):
    """What an exact scheme on four ranks makes of their checkpoints is what one device makes of them."""
    saved = {name: str(tmp_path / f"{name}.ckpt") for name in APPROXIMATE}
    ended = {name: str(tmp_path / f"{name} ended.ckpt") for name in APPROXIMATE}
    alone = {name: str(tmp_path / f"{name} alone.ckpt") for name in APPROXIMATE}
    ranks.run(2, train_on, [(name, None, saved[name]) for name in APPROXIMATE], embedded=False)
    ranks.run(4, train_on, [("dgcl", saved[name], ended[name]) for name in APPROXIMATE], embedded=False)
    train_on(0, 1, [("auto", saved[name], alone[name]) for name in APPROXIMATE], embedded=False)
    for name in APPROXIMATE:
        assert read(saved[name])["epoch"] == HALF and read(ended[name])["epoch"] == ALL
        torch.testing.assert_close(read(ended[name]), read(alone[name]), rtol=1e-8, atol=1e-10)


def test_approximate_schemes_go_on_from_exact_ones(ranks, tmp_path):
    """They train as many epochs as are left; a cache begins with all rows, so its first loss is exact."""
    exact, alone, *ends = (str(tmp_path / f"{name}.ckpt") for name in ("exact", "alone", *APPROXIMATE))
    ranks.run(2, train_on, [("dgcl", None, exact)], embedded=False)
    runs = [(name, exact, end) for name, end in zip(APPROXIMATE, ends)]
    for cached, *others in ranks.run(4, train_on, runs, embedded=False):
        [expected] = train_on(0, 1, [("auto", exact, alone)], embedded=False)
        assert cached["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-9)
        for found in (cached, *others):
            assert found["epoch"] == ALL and len(found["losses"]) == ALL - HALF


# Objects in them ##############################################################


class Configured(L.LightningModule):
    """Hyperparameters that are a model, a loss and a metric, as in lightning-hydra-template; pickles the model, too."""

    def __init__(self, model: torch.nn.Module, loss: torch.nn.Module, metric: Metric) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model, self.loss, self.metric = model, loss, metric
        self.metrics = MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)], prefix="val_")
        self.kept: list[torch.nn.Module] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(self.model(batch.x, batch.edge_index)[batch.train_mask], batch.y[batch.train_mask])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.model(batch.x, batch.edge_index)[batch.val_mask]
        self.log("val_metric", self.metric(out, batch.y[batch.val_mask]))
        self.log_dict(self.metrics(out, batch.y[batch.val_mask]))

    def on_train_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))
        data = pickle.dumps((self, self.model))
        assert b"lightning_gnn" not in data
        module, model = pickle.loads(data)
        assert module.model is model
        torch.testing.assert_close(module.metrics.state_dict(), self.metrics.state_dict())
        self.kept = [model, copy.deepcopy(self.model)]

    def configure_optimizers(self) -> Any:
        # Gradients of biases before a batch norm are rounding alone, of which a smaller epsilon would make steps.
        return torch.optim.Adam(self.parameters(), lr=0.02, eps=1e-6)


def resume_configured(
    rank: int, world_size: int, folder: Path, strategies: list[str], resumed_from: Path | None = None
) -> list[Any]:
    """Fits under each strategy, half of the epochs and then, from its checkpoint, or another's, the rest."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = (
        "1"  # as Trainer.fit(weights_only=False), which is of Lightning 2.6
    )
    results = []
    for name in strategies:
        losses, at = [], folder / name
        for part, epochs, load in (("half", HALF, None), ("all", ALL, (resumed_from or at) / "half" / "last.ckpt")):
            torch.manual_seed(2)
            graph = awkward_graph()
            graph.y[3] = 0
            loss, metric = torch.nn.CrossEntropyLoss(), MulticlassAccuracy(CLASSES, average="micro")
            module = Configured(build("gin_batch_norm", FEATURES), loss, metric).double()
            saver = ModelCheckpoint(at / part, save_last=True)
            trainer = quiet_trainer(
                strategy_of(name), world_size, max_epochs=epochs, callbacks=[saver], enable_checkpointing=True
            )
            trainer.fit(module, datamodule=GraphDataModule(graph), ckpt_path=load)
            losses += module.losses
        kept = [each.eval()(graph.x, graph.edge_index).detach() for each in (*module.kept, module.model)]
        torch.testing.assert_close(kept[1], kept[0], rtol=0, atol=0)
        torch.testing.assert_close(kept[2], kept[0], rtol=0, atol=0)
        loaded = Configured.load_from_checkpoint(at / "all" / "last.ckpt")
        torch.testing.assert_close(loaded.eval().model(graph.x, graph.edge_index).detach(), kept[0])
        results.append({"losses": losses, "out": kept[0], "logged": dict(trainer.callback_metrics)})
    return results


def test_models_among_hyperparameters_are_saved_and_resumed(ranks, tmp_path):
    """Pickles hold nothing of ranks, and training goes on unharmed, on one device from what two ranks have saved, too."""
    names = ["dgcl", *(["vertex_cut", "spmm_15d"] if CAMPAIGN else [])]
    runs = ranks.run(2, resume_configured, tmp_path, names)
    [expected] = resume_configured(0, 1, tmp_path, ["auto"], tmp_path / "dgcl")
    assert len(expected["losses"]) == ALL
    for found in (each for run in runs for each in run):
        for key in ("losses", "out"):
            torch.testing.assert_close(found[key], expected[key], rtol=1e-9, atol=1e-9)
        logged = {name: found["logged"][name] for name in expected["logged"]}
        torch.testing.assert_close(logged, expected["logged"], rtol=1e-9, atol=1e-9)


# Files ########################################################################


def a_checkpoint() -> dict[str, Any]:
    return {"epoch": 3, "state_dict": {"weight": torch.arange(40.0).sqrt()}}


def test_any_change_of_a_file_is_found_or_harmless(tmp_path):
    """Cut off anywhere, it is refused; with any byte changed, too, but for bytes that say nothing of the values."""
    path, io = tmp_path / "some.ckpt", WholeCheckpointIO()
    io.save_checkpoint(a_checkpoint(), path)
    whole, harmless = path.read_bytes(), 0
    end = whole.index(b"PK\1\2")  # where the list of entries begins
    for length in (*range(0, end, 50), *range(end, len(whole), 5), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedCheckpointError, match="some.ckpt is damaged: it is cut off"):
            io.load_checkpoint(path)
    places = [*range(0, end, 3), *range(end, len(whole))]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            found = io.load_checkpoint(path)
        except DamagedCheckpointError:
            continue
        harmless += 1
        torch.testing.assert_close(found, a_checkpoint(), rtol=0, atol=0)
    assert harmless < len(places) / 2


@pytest.mark.parametrize("io", [WholeCheckpointIO, lambda: AsyncCheckpointIO(WholeCheckpointIO())])
def test_files_are_whole_at_any_moment(tmp_path, monkeypatch, io):
    path, save, writer = tmp_path / "new folder" / "some.ckpt", torch.save, io()
    writer.save_checkpoint({"epoch": 1}, path)
    writer.teardown()
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)

    def halted(checkpoint: Any, file: Any) -> None:
        save(checkpoint, file)
        assert WholeCheckpointIO().load_checkpoint(path) == {"epoch": 1}
        if checkpoint["epoch"] == 2:
            file.truncate(file.tell() // 2)
            raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", halted)
    writer = io()
    with pytest.raises(OSError, match="No space"):
        writer.save_checkpoint({"epoch": 2}, path)
        writer.teardown()
    assert os.listdir(path.parent) == ["some.ckpt"] and writer.load_checkpoint(path) == {"epoch": 1}
    writer = io()
    writer.save_checkpoint({"epoch": 3}, path)
    writer.teardown()
    assert os.listdir(path.parent) == ["some.ckpt"] and writer.load_checkpoint(path) == {"epoch": 3}


def test_checksums_that_are_switched_off_are_written_all_the_same(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        WholeCheckpointIO().save_checkpoint(a_checkpoint(), tmp_path / "some.ckpt")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert WholeCheckpointIO().load_checkpoint(tmp_path / "some.ckpt")["epoch"] == 3


# The last one #################################################################


def saving_each_epoch(
    rank: int, world_size: int, folder: Path, epochs: int, load: str | None, plugins: Any = None
) -> tuple[int, dict[str, torch.Tensor]]:
    """Returns at which epoch training began, and the weights."""
    began: list[int] = []

    class Look(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            began.append(trainer.current_epoch)

    L.seed_everything(3, verbose=False)
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True)
    trainer = quiet_trainer(
        strategy_of("dgcl"),
        world_size,
        max_epochs=epochs,
        callbacks=[saver, Look()],
        enable_checkpointing=True,
        plugins=plugins,
    )
    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()), ckpt_path=load)
    return began[0], module.state_dict()


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_last_is_the_newest_whole_one(ranks, tmp_path):
    _, expected = saving_each_epoch(0, 1, tmp_path / "undisturbed", 5, None)
    ranks.run(2, saving_each_epoch, tmp_path, 3, None)
    last, newest = tmp_path / "last.ckpt", tmp_path / "epoch=2.ckpt"
    cut_off(last)
    cut_off(newest)
    with pytest.raises(
        DamagedCheckpointError, match=r"last\.ckpt is damaged: .* newest whole one there is .*epoch=1\.ckpt"
    ):
        saving_each_epoch(0, 1, tmp_path, 5, str(last))
    for began, found in ranks.run(2, saving_each_epoch, tmp_path, 5, "last"):
        assert began == 2
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    for file in tmp_path.glob("*.ckpt"):
        if file.stem != "epoch=0":
            cut_off(file)
    with pytest.warns(
        UserWarning, match=r'"last" is .*last\.ckpt, which is damaged: .* newest whole one: .*epoch=0\.ckpt'
    ):
        began, found = saving_each_epoch(0, 1, tmp_path, 5, "last", plugins=AsyncCheckpointIO())
    assert began == 1
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    for file in tmp_path.glob("*.ckpt"):
        cut_off(file)
    with pytest.raises(DamagedCheckpointError, match='"last" is .* No other one there is whole'):
        saving_each_epoch(0, 1, tmp_path, 5, "last")
