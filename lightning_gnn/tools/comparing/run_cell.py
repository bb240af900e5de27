"""One rank of one cell, ``python -m lightning_gnn.tools.comparing.run_cell FOLDER``: trains, tests and writes what it measured.

The folder holds ``task.json``; rank r writes ``rank-r.json``, rank 0 also ``weights.pt``, and of each epoch a line of
``epochs.jsonl``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gnn.checks.draws import draws_random_numbers
from lightning_gnn.comm.processes import end_with_parent
from lightning_gnn.data.sources import counted_mask
from lightning_gnn.datamodules import GraphDataModule
from lightning_gnn.tools.comparing.cells import MAKES, task_parser
from lightning_gnn.tools.comparing.measure import EpochTimes, peak_memory


def main() -> None:
    folder, started = Path(sys.argv[1]), time.time()
    at_start = peak_memory()
    task = json.loads((folder / "task.json").read_text())
    # Rank 0 starts the others, which have LOCAL_RANK, and end with it.
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if first:
        end_with_parent(task["parent"])
    L.seed_everything(task["seed"], verbose=False)
    model, data, strategy = _made(task, "model"), _made(task, "data"), _made(task, "strategy")
    if not isinstance(model, L.LightningModule) or not isinstance(data, GraphDataModule):
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
    if is_overridden("test_step", model) and any(data.shard.mask_counts[counted_mask("test_mask", model)]):
        found["test"] = trainer.test(model, datamodule=data, verbose=False)[0]
    if trainer.is_global_zero:
        for epoch in times.epochs:
            if task["loss"] not in epoch["logged"]:
                logged = ", ".join(sorted(epoch["logged"]))
                raise ValueError(f"loss: {task['loss']!r} is not among what the module logs: {logged}. Name one of these.")
    (folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(found))
    if trainer.is_global_zero:
        torch.save({name: value.cpu() for name, value in model.state_dict().items()}, folder / "weights.pt")


def _made(task: dict[str, Any], what: str) -> Any:
    section = task[what]
    if isinstance(section, str):  # a strategy of Lightning's
        return section
    if MAKES not in section:
        parser = task_parser()
        return parser.instantiate(parser.parse_object({what: section}))[what]
    module, _, name = section[MAKES].rpartition(".")
    return getattr(importlib.import_module(module), name)()


def _digest(model: torch.nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
