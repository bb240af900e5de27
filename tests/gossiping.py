"""A user's script in which workers train independently, started by test_gossip.py: FOLDER EVENT START_METHOD.

Each worker notes the batches that it has done. ``kill R``: rank R kills itself after some batches. ``return R``: it does so and
is started again; each other one does some batches and waits for that. ``slow R``: it sleeps after each. ``agent R``: it kills the
agent of torchrun that has started it, and all of its ranks.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import GossipStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.strategies.gossip import fit
from lightning_gnn.strategies.gossip.fit import load_snapshot

GRAPH = {"num_nodes": 600, "num_features": 8, "num_classes": 3, "seed": 3}
WORKERS, CLUSTERS, EPOCHS, SLEEP_S = 3, 8, 6, 0.25


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Notes(L.Callback):
    """Writes a line for each batch: which cluster, and by whom."""

    def __init__(self, folder: Path, event: str) -> None:
        self.folder = folder
        self.what, _, rank = event.partition(" ")
        self.rank = int(rank or -1)
        self.back = folder / "back.pt"

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self.what == "return":  # in each process, however it was started
            fit.load_snapshot = load_and_note

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        [of_worker] = [each for each in trainer.callbacks if isinstance(each, fit.WorkerFit)]
        if of_worker.worker.life:
            assert trainer.current_epoch > 0
            (self.folder / "new.pt").rename(self.back)  # the others look for it

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.what == "return":  # what others may begin with
            states = [each.state_dict() for each in trainer.optimizers]
            kept = {"weights": pl_module.state_dict(), "optimizers": states}
            torch.save(kept, self.folder / f"kept-{trainer.global_rank}-{trainer.current_epoch}.pt")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        history = trainer.strategy._history
        # Of no name that could stay behind.
        assert history is None or os.fstat(history.history._file).st_nlink == 0
        with (self.folder / f"rank{trainer.global_rank}.jsonl").open("a") as lines:
            lines.write(json.dumps({"first": int(batch.n_id.min()), "nodes": len(batch.n_id)}) + "\n")
        if self.rank == trainer.global_rank:
            if self.what == "slow":
                time.sleep(SLEEP_S)
            elif self.what == "kill" and trainer.global_step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.what == "return":
                if trainer.global_step == 3 and not self.back.exists():
                    wait_for(lambda: any(self.folder.glob("kept-*-1.pt")))  # another has come to an epoch of its own
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.02)
            elif self.what == "agent" and trainer.global_step == 3:
                agent = psutil.Process(os.getppid())
                for process in sorted(agent.children(), key=lambda process: process.pid == os.getpid()):
                    agent.kill()
                    process.kill()
        else:
            time.sleep(0.02)  # all of them get some
            if self.what == "return" and trainer.global_step > 5:
                wait_for(self.back.exists)


def load_and_note(trainer: L.Trainer, module: Any, snapshot: bytes) -> None:
    """Keeps what a worker that is started again begins with, before it averages with one that may wait for it."""
    load_snapshot(trainer, module, snapshot)
    states = [each.state_dict() for each in trainer.optimizers]
    torch.save({"weights": module.state_dict(), "optimizers": states}, Path(sys.argv[1]) / "new.pt")


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
    strategy = GossipStrategy(
        2,
        num_clusters=CLUSTERS,
        historical_embeddings=not event.startswith("return"),
        start_method=start_method,
        heartbeat_timeout=3.0,
        partner_timeout=5.0 if event.startswith("return") else 20.0,
        max_restarts=int(event.startswith("return")),
    )
    machines, workers = int(os.environ.get("GROUP_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", WORKERS))
    trainer = new_trainer(folder, event, strategy, workers, num_nodes=machines)
    before = module.model.convs[0].lin_l.weight.clone()
    trainer.fit(module, datamodule=data)
    assert not torch.equal(module.model.convs[0].lin_l.weight, before)
    if trainer.is_global_zero:
        batches = {rank: counts.batches for rank, counts in strategy.report.items()}
        print("outcome", json.dumps([batches, strategy.consensus, strategy.result]))
        print("lives", json.dumps([[counts.lives, counts.averages] for counts in strategy.report.values()]))
    trainer.save_checkpoint(folder / "result.ckpt")
    if start_method != "popen" or event.startswith("return"):  # else some are lost
        [found] = trainer.test(module, datamodule=data, verbose=False)  # on all of them, new ones or not
        if trainer.is_global_zero:
            print("tested", found["test_acc"])


if __name__ == "__main__":
    main()
