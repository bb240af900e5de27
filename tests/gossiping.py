"""A user's script in which workers train independently, started by test_gossip.py: FOLDER EVENT START_METHOD.

Each worker notes the batches that it has done. ``kill R``: rank R kills itself after some batches. ``slow R``: it sleeps after
each. ``agent R``: it kills the agent of torchrun that has started it, and all of its ranks.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import GossipStrategy, GraphDataModule, NodeClassifier

GRAPH = {"num_nodes": 600, "num_features": 8, "num_classes": 3, "seed": 3}
WORKERS, CLUSTERS, EPOCHS, SLEEP_S = 3, 8, 6, 0.25


class Notes(L.Callback):
    """Writes a line for each batch: which cluster, and by whom."""

    def __init__(self, folder: Path, event: str) -> None:
        self.folder = folder
        self.what, _, rank = event.partition(" ")
        self.rank = int(rank or -1)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with (self.folder / f"rank{trainer.global_rank}.jsonl").open("a") as lines:
            lines.write(json.dumps({"first": int(batch.n_id.min()), "nodes": len(batch.n_id)}) + "\n")
        if self.rank == trainer.global_rank:
            if self.what == "slow":
                time.sleep(SLEEP_S)
            elif self.what == "kill" and trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.what == "agent" and trainer.global_step == 3:
                agent = psutil.Process(os.getppid())
                for process in sorted(agent.children(), key=lambda process: process.pid == os.getpid()):
                    agent.kill()
                    process.kill()
        else:
            time.sleep(0.02)  # all of them get some


class EndsEarly(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        assert torch.distributed.get_world_size() == 1  # alone
        trainer.should_stop = trainer.global_rank == 1


def done(folder: Path) -> dict[int, list[int]]:
    """Returns the batches of each worker, by their least original node."""
    return {
        int(path.stem.removeprefix("rank")): [json.loads(line)["first"] for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("rank*.jsonl"))
    }


def new_trainer(folder: Path, event: str, strategy: Any, workers: int = WORKERS, **options: Any) -> L.Trainer:
    callbacks: list[Any] = [Notes(folder, event)] + ([EndsEarly()] if event == "early" else [])
    defaults: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    callbacks += options.pop("callbacks", [])
    options = {**defaults, **options}
    return L.Trainer(strategy=strategy, devices=workers, accelerator="cpu", callbacks=callbacks, **options)


def main() -> None:
    folder, event, start_method = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    L.seed_everything(0)
    data = GraphDataModule("lightning_gnn.planted_partition", GRAPH)
    module = NodeClassifier(GraphSAGE(8, 8, num_layers=2, out_channels=3))
    strategy = GossipStrategy(2, clusters=CLUSTERS, start_method=start_method, lease=3.0, patience=20.0)
    machines, workers = int(os.environ.get("GROUP_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", WORKERS))
    trainer = new_trainer(folder, event, strategy, workers, num_nodes=machines)
    before = module.model.convs[0].lin_l.weight.clone()
    trainer.fit(module, datamodule=data)
    assert not torch.equal(module.model.convs[0].lin_l.weight, before)
    if trainer.is_global_zero:
        batches = {rank: counts.batches for rank, counts in strategy.report.items()}
        print("outcome", json.dumps([batches, strategy.consensus, strategy.result]))
    trainer.save_checkpoint(folder / "result.ckpt")
    if start_method != "popen":  # else some are lost
        [found] = trainer.test(module, datamodule=data, verbose=False)  # new ranks, all of them
        print("tested", found["test_acc"])


if __name__ == "__main__":
    main()
