"""One rank of a run, ``python -m lightning_gnn.tools.comparing.run_cell FOLDER``: trains, tests and writes measurements.

The folder has ``task.json``. Rank r writes ``rank-r.json``; rank 0 also writes ``weights.pt`` and a line of ``epochs.jsonl`` per
epoch.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.checks.stand_ins import draws_random_numbers
from lightning_gnn.comm.group import World
from lightning_gnn.comm.processes import end_with_parent
from lightning_gnn.comm.traffic import Meter, Traffic
from lightning_gnn.data.sources import counted_mask
from lightning_gnn.datamodules import GraphDataModule
from lightning_gnn.devices import synchronize
from lightning_gnn.heap import peak_bytes
from lightning_gnn.lightning_packages import is_instance, is_overridden
from lightning_gnn.tools.comparing.cells import MAKES, task_parser


class EpochTimes(pl.Callback):
    """Callback that records times and traffic of this rank per training epoch, without validation and callbacks.

    Args:
        loss: logged value whose mean over the steps of an epoch is stored as the value of the epoch.
        lines: file to which each epoch is appended as a line of JSON; None for no file.

    Attributes:
        began: start time of the first epoch, by ``time.time``.
        epochs: for each epoch

            - ``seconds``: from its start to the end of its last step;
            - ``batches``: included seconds of waiting for batches;
            - ``gradients``: seconds of summing or averaging gradients over ranks, except time overlapped with the backward pass;
            - ``sums``: seconds of all other sums and gathers in steps: logged values, statistics of norms;
            - ``exchange``: for each ``"LAYER DIRECTION"``, bytes, messages, rows and seconds of exchanging rows;
            - ``waited``: seconds of waiting for other ranks in gradients, sums and exchange; 0 for CUDA ranks, whose devices
              wait. Also 0 for workers that train independently, which measure it themselves;
            - ``steps``: number of steps;
            - ``logged``: logged values at its end, including validation.
    """

    def __init__(self, loss: str, lines: Path | None) -> None:
        self.loss, self.began = loss, 0.0
        self.epochs: list[dict[str, Any]] = []
        self._file = lines
        self._before: Mapping[tuple[str, str], Traffic] = {}
        self._start = self._ended = self._paused = 0.0
        self._stale: Tensor | None = None
        self._clear()

    def _clear(self) -> None:
        self._traffic: dict[tuple[str, str], Traffic] = {}
        self._losses: list[float] = []
        self._backward_ended: tuple[float, float] | None = None  # time, and the seconds of sums so far
        self._outside = 0.0
        self._epoch: dict[str, Any] = {"seconds": 0.0, "batches": 0.0, "gradients": 0.0, "sums": 0.0, "waited": 0.0, "steps": 0}

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clear()
        self._stale = trainer.callback_metrics.get(self.loss)  # stays until the end of the epoch if steps do not log it
        self._start = self._ended = self._now(pl_module)
        self.began = self.began or time.time()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused = self._now(pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Time between two steps belongs to neither; time after the last step is not counted anyway.
        gone = self._now(pl_module) - self._paused
        self._outside += gone
        self._ended += gone

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._epoch["batches"] += time.perf_counter() - self._ended
        self._before = dict(_meter(trainer).by_layer)
        self._count(trainer, -1)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Workers that train independently average after this hook; other ranks have summed gradients, timed by the strategy.
        self._backward_ended = self._now(pl_module), _world_seconds(trainer)[0]

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if self._backward_ended is not None:
            ended, sums = self._backward_ended
            self._epoch["gradients"] += self._now(pl_module) - ended
            self._epoch["sums"] -= _world_seconds(trainer)[0] - sums
            self._backward_ended = None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._ended = self._now(pl_module)
        self._count(trainer, 1)
        self._epoch["steps"] += 1
        for key, now in _meter(trainer).by_layer.items():
            self._traffic[key] = self._traffic.get(key, Traffic()) + now - self._before.get(key, Traffic())
        loss = trainer.callback_metrics.get(self.loss)
        if trainer.num_training_batches != 1 and loss is not None and loss is not self._stale:
            self._losses.append(float(loss))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        logged = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if not isinstance(value, Tensor) or value.numel() == 1
        }
        if self._losses:
            logged[self.loss] = sum(self._losses) / len(self._losses)
        exchange = {
            f"{layer} {direction}": [each.bytes_sent, each.messages, each.rows, each.seconds]
            for (layer, direction), each in self._traffic.items()
        }
        self._epoch["seconds"] = self._ended - self._start - self._outside
        self.epochs.append({**self._epoch, "exchange": exchange, "logged": logged})
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(self.epochs[-1]) + "\n")

    def _count(self, trainer: pl.Trainer, sign: int) -> None:
        """Add (1) or subtract (-1) the time counters of the strategy at the end or the start of a step."""
        sums, waited = _world_seconds(trainer)
        steps = getattr(trainer.strategy, "steps", None)
        gradients, of_sums = (0.0, 0.0) if steps is None else steps.gradient_seconds
        for name, seconds in (("gradients", gradients), ("sums", sums - of_sums), ("waited", waited)):
            self._epoch[name] += sign * seconds

    @staticmethod
    def _now(module: pl.LightningModule) -> float:
        synchronize(module.device)
        return time.perf_counter()


def _meter(trainer: pl.Trainer) -> Meter:
    return getattr(trainer.strategy, "meter", None) or Meter()


def _world_seconds(trainer: pl.Trainer) -> tuple[float, float]:
    """Returns the total seconds of sums and gathers, and of waiting; 0 for strategies without a world."""
    world: World | None = getattr(trainer.strategy, "world", None)
    return (0.0, 0.0) if world is None else (world.collectives_s, world.waited_s or 0.0)


def peak_memory() -> int:
    peak = peak_bytes()  # not ru_maxrss, which a process inherits from its parent
    if not peak:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak


def main() -> None:
    folder, started = Path(sys.argv[1]), time.time()
    at_start = peak_memory()
    task = json.loads((folder / "task.json").read_text())
    # Rank 0 starts the other ranks, which have LOCAL_RANK and end with it.
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if first:
        end_with_parent(task["parent"])
    L.seed_everything(task["seed"], verbose=False)
    model, data, strategy = _make_object(task, "model"), _make_object(task, "data"), _make_object(task, "strategy")
    if not is_instance(model, "LightningModule") or not isinstance(data, GraphDataModule):
        raise ValueError(
            f"model must be a LightningModule, and data a GraphDataModule (got {type(model).__name__}, {type(data).__name__})."
        )
    initial = _digest(model)
    times = EpochTimes(task["loss"], folder / "epochs.jsonl" if first else None)
    trainer = L.Trainer(
        strategy=strategy,
        devices=task["devices"],
        max_epochs=task["epochs"],
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **{"log_every_n_steps": 1, **task["trainer"]},
    )
    trainer.fit(model, datamodule=data)
    cuda = trainer.strategy.root_device.type == "cuda"
    found: dict[str, Any] = {
        "rank": trainer.global_rank,
        "epochs": times.epochs,
        "memory": peak_memory(),
        "memory_at_start": at_start,
        "memory_cuda": torch.cuda.max_memory_allocated(trainer.strategy.root_device) if cuda else None,
        "seconds_to_start": started - task["started"],
        "seconds_to_set_up": times.began - started,
        "partition": dict(data.shard.report),
        "counts": {"nodes": sum(data.shard.counts), "edges": sum(data.shard.edge_counts), "ranks": trainer.world_size},
        "approximation": getattr(trainer.strategy, "approximation", ""),
        "dropout": draws_random_numbers(model),
        "initial_weights": initial,
        "gradient_bytes": sum(each.numel() * each.element_size() for each in model.parameters() if each.requires_grad),
        "workers": {rank: vars(counts) for rank, counts in getattr(trainer.strategy, "report", {}).items()},
        "test": {},
    }
    samples = data.sample_data
    is_tested = (
        any(data.shard.mask_counts[counted_mask("test_mask", model)]) if samples is None else "test_samples" in samples.sizes
    )
    if is_overridden("test_step", model) and is_tested:
        found["test"] = trainer.test(model, datamodule=data, verbose=False)[0]
    if trainer.is_global_zero:
        for epoch in times.epochs:
            if task["loss"] not in epoch["logged"]:
                logged = ", ".join(sorted(epoch["logged"]))
                raise ValueError(f"loss must be one of the logged values {logged}, got {task['loss']!r}.")
    (folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(found))
    if trainer.is_global_zero:
        torch.save({name: value.cpu() for name, value in model.state_dict().items()}, folder / "weights.pt")


def _make_object(task: dict[str, Any], key: str) -> Any:
    section = task[key]
    if isinstance(section, str):  # a Lightning strategy
        return section
    if MAKES not in section:
        parser = task_parser()
        return parser.instantiate(parser.parse_object({key: section}))[key]
    module, _, name = section[MAKES].rpartition(".")
    return getattr(importlib.import_module(module), name)()


def _digest(model: torch.nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
