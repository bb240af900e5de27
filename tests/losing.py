"""A script whose ranks are killed one after the other: CASE RANKS LOSSES FOLDER [STATE].

LOSSES names a rank, an epoch and a place for each, such as ``0:2:validation,0:4:epoch``. With RANKS 1 it runs on one device. With
STATE, a file that a run with losses has kept, an ordinary run continues from it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.nn.models import GCN
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn import (
    CoverStrategy,
    DGCLStrategy,
    GraphDataModule,
    LinkPredictor,
    SpMM1DStrategy,
    SpMM15DStrategy,
    SpMMStrategy,
    planted_partition,
    split_edges,
)

EPOCHS = 7
STRATEGIES: dict[str, Any] = {
    "cover": CoverStrategy,
    "spmm": SpMMStrategy,
    "spmm_1d": SpMM1DStrategy,
    "spmm_15d": SpMM15DStrategy,
}
OPTIONS: dict[str, Any] = {
    "codec": {"codec": "int8"},
    "rounding": {"codec": "int8", "stochastic_rounding": True},
    "spst": {"plan": "spst", "topology": "dgx1"},
    "swap": {"plan": "swap"},
    "replicate": {"plan": "replicate", "num_hops": 2},
    "dgcl_r": {"plan": "dgcl_r", "num_hops": 2, "topology": "dgx1"},
    "convs": {"checkpoint_convs": True},
    "sockets": {"shared_memory": False},
}
DRAWS = ("dropout", "codec", "rounding")


def graph_with_types() -> HeteroData:
    data, found, half = graph(), HeteroData(), 200
    parts = {"a": slice(0, half), "b": slice(half, 2 * half)}
    for name, part in parts.items():
        found[name].x = data.x[part]
    for name in ("y", "train_mask", "val_mask", "test_mask"):
        found["a"][name] = data[name][parts["a"]]
    sources, targets = data.edge_index
    for source in "ab":
        for target in "ab":
            kept = ((sources >= half) == (source == "b")) & ((targets >= half) == (target == "b"))
            found[source, "to", target].edge_index = data.edge_index[:, kept] % half
    return found


class Typed(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        types = [(source, "to", target) for source in "ab" for target in "ab"]
        self.first = HeteroConv({each: SAGEConv((32, 32), 16) for each in types})
        self.last = HeteroConv({each: SAGEConv((16, 16), 8) for each in types})

    def _loss(self, batch: HeteroData, mask: str) -> Tensor:
        x = {name: rows.relu() for name, rows in self.first(batch.x_dict, batch.edge_index_dict).items()}
        mask = batch["a"][mask]
        return F.cross_entropy(self.last(x, batch.edge_index_dict)["a"][mask], batch["a"].y[mask])

    def training_step(self, batch: HeteroData, batch_idx: int) -> Tensor:
        loss = self._loss(batch, "train_mask")
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=1)  # Lightning cannot infer it
        return loss

    def validation_step(self, batch: HeteroData, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch, "val_mask"), batch_size=1)

    def test_step(self, batch: HeteroData, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch, "test_mask"), batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def graph() -> Data:
    data = planted_partition(400, seed=3)
    for name, value in data.to_dict().items():
        if value.is_floating_point():
            data[name] = value.double()
    return data


class Node(L.LightningModule):
    """Two optimizers in manual optimization in the case "manual"; otherwise one with schedulers."""

    def __init__(self, case: str, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.case = case
        self.automatic_optimization = case != "manual"
        norm = "batch_norm" if case not in DRAWS else None
        self.model = GCN(32, width, 2, 8, norm=norm, dropout=0.5 if case in DRAWS else 0.0)
        # Before a batch norm, the gradient of a bias is rounding, which Adam amplifies.
        self.model.convs[0].bias.requires_grad_(norm is None)
        self.accuracy, self.so_far = MulticlassAccuracy(8), MeanMetric()
        self.steps = 0

    def _step(self, batch: Data, mask: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(batch.x, batch.edge_index)[mask]
        return F.cross_entropy(out, batch.y[mask]), out

    def training_step(self, batch: Data, batch_idx: int) -> Tensor | None:
        loss, out = self._step(batch, batch.train_mask)
        self.accuracy(out, batch.y[batch.train_mask])
        self.so_far.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers()):
            optimizer.step()
            scheduler.step()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def on_train_epoch_end(self) -> None:
        self.log("loss_so_far", self.so_far.compute())

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.log("val_loss", self._step(batch, batch.val_mask)[0])

    def test_step(self, batch: Data, batch_idx: int) -> None:
        self.log("test_loss", self._step(batch, batch.test_mask)[0])

    def configure_optimizers(self) -> Any:
        if self.case == "manual":
            parts = [list(each.parameters()) for each in self.model.convs]
            of_norms = list(self.model.norms.parameters())
            optimizers = [torch.optim.SGD(parts[0] + of_norms, 0.1, momentum=0.9), torch.optim.Adam(parts[1], 0.02)]
            return optimizers, [torch.optim.lr_scheduler.StepLR(each, 2, 0.7) for each in optimizers]
        optimizer = torch.optim.Adam(self.parameters(), 0.02)
        if self.case == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        interval = "step" if self.case == "step" else "epoch"
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["steps"] = self.steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.steps = checkpoint["steps"]


class Counter(L.Callback):
    """Counts the epochs that have ended, and keeps the loss of each."""

    def __init__(self, folder: Path) -> None:
        self.epochs, self.folder = 0, folder

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        file = self.folder / f"loss-{trainer.current_epoch}-{trainer.world_size}-{trainer.global_rank}"
        file.write_text(repr(float(outputs["loss"])))

    def on_train_epoch_end(self, *_: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


class Loss(L.Callback):
    """Kills this process; each loss happens once: the number of ranks shows the earlier losses."""

    def __init__(self, ranks: int, losses: str) -> None:
        self.losses = {ranks - number: loss.split(":") for number, loss in enumerate(filter(None, losses.split(",")))}

    def _at(self, place: str, trainer: L.Trainer) -> None:
        rank, epoch, of_loss = self.losses.get(trainer.world_size, ("-1", "-1", ""))
        here = trainer.global_rank, trainer.current_epoch, place
        if here == (int(rank), int(epoch), of_loss) and not trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._at("epoch", trainer)
        file = Path(trainer.default_root_dir) / "kept.pt"
        if trainer.world_size == len(self.losses) > 1 and trainer.is_global_zero and not file.exists():
            state = trainer.strategy.recovery.snapshots.at(trainer.current_epoch)
            torch.save({**state, "partition": trainer.datamodule.partition}, file)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._at("step", trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._at("validation", trainer)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._at("validation end", trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._at("end", trainer)

    def on_test_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._at("test", trainer)


class DiesWhileLogging(CSVLogger):
    """Kills rank 0 when it logs the values of an epoch, after all communication of that epoch."""

    loss: Loss

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        trainer = self.trainer
        if "loss_epoch" in metrics:
            self.loss._at("before rows", trainer)
        super().log_metrics(metrics, step)
        if "loss_epoch" in metrics:
            self.loss._at("after rows", trainer)


class DiesWhileSaving:
    """Part of a checkpoint that kills rank 0 while it is written."""

    loss: Any = None
    trainer: Any = None

    def __reduce__(self) -> Any:
        in_file = any(frame.name == "save_checkpoint" for frame in traceback.extract_stack())  # not a copy in memory
        if in_file and self.loss is not None and self.trainer.global_rank == 0:
            self.loss._at("saving", self.trainer)
        return DiesWhileSaving, ()


class SavesPart(L.Callback):
    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if "saving" in str(self.loss.losses):
            checkpoint["part"] = part = DiesWhileSaving()
            part.loss, part.trainer = self.loss, trainer


class FailsAlone(L.Callback):
    """A set-up that one rank has no memory for."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if trainer.world_size == 1:
            raise MemoryError("one rank cannot hold the graph")


def main(case: str, ranks: int, losses: str, folder: Path, state: str = "") -> None:
    """Fits and tests; each remaining rank writes its results."""
    torch.set_default_dtype(torch.float64)
    L.seed_everything(1)
    loss, counter = Loss(ranks, losses), Counter(folder)
    logger = DiesWhileLogging(folder, flush_logs_every_n_steps=100)
    checkpoints = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    stopping = EarlyStopping("val_loss", patience=3, check_on_train_epoch_end=False)
    callbacks = [counter, checkpoints, stopping, Timer(), LearningRateMonitor(), SavesPart(loss), loss]
    given: dict[str, Any] = {
        "val2": {"check_val_every_n_epoch": 2},
        "steps": {"max_epochs": -1, "max_steps": EPOCHS},
        "clip": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    }
    options: dict[str, Any] = {"elastic": not state, "min_ranks": 2 if case == "least" else 1, "self_check": not state}
    kind = STRATEGIES.get(case, DGCLStrategy)
    strategy = kind(timeout=30.0, **options, **OPTIONS.get(case, {})) if ranks > 1 else "auto"
    if case == "average":
        callbacks.append(WeightAveraging())
    if case == "alone" and not state:
        callbacks.append(FailsAlone())
    trainer = L.Trainer(
        strategy=strategy,
        devices=ranks,
        accelerator="cpu",
        precision="bf16-mixed" if case == "bf16" else "64-true",
        callbacks=callbacks,
        logger=logger,
        log_every_n_steps=1,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0 if state else 1,
        **{"max_epochs": EPOCHS, **given.get(case, {})},
    )
    logger.trainer, logger.loss = trainer, loss
    module: Any = Typed() if case == "types" else LinkPredictor(GCN(32, 8, 2, 8)) if case == "links" else Node(case)
    partition, path = None, None
    if state.endswith(".pt"):
        kept = torch.load(state, weights_only=False)
        partition, path = kept["partition"], str(folder / f"state-{os.environ.get('LOCAL_RANK', '0')}.ckpt")
        torch.save(kept["checkpoint"], path)
        torch.set_rng_state(kept["streams"][2][0])
    elif state:
        path = state
    source = graph_with_types() if case == "types" else split_edges(graph(), seed=0) if case == "links" else graph()
    data = GraphDataModule(source, partition_dir=folder / "parts", partition=partition)
    trainer.fit(module, datamodule=data, ckpt_path=path)
    [tested] = trainer.test(module, datamodule=data, verbose=False)
    torch.save(
        {
            "weights": module.state_dict(),
            "optimizers": [each.state_dict() for each in trainer.optimizers],
            "steps": getattr(module, "steps", 0),
            "epochs": counter.epochs,
            "tested": tested,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items() if "/" not in name},
            "best": os.path.relpath(checkpoints.best_model_path, folder),
            "score": float(checkpoints.best_model_score),
            "stopping": stopping.wait_count,
            "version": os.path.relpath(logger.log_dir, folder),
        },
        folder / f"result-{trainer.world_size}-{trainer.global_rank}.pt",
    )


if __name__ == "__main__":
    case, ranks, losses, folder, *state = sys.argv[1:]
    main(case, int(ranks), losses, Path(folder), *state)
