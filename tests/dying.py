"""Script whose rank 1 fails, stops or sleeps in epoch 3; arguments: EVENT MEMORY TIMEOUT FOLDER.

If the first argument is ``by-hand``, this script starts the ranks, with the environment variables that a user would set. With
DYING_GRAPH_RANKS, the ranks are a mesh, and rank 1 fails inside a step.
"""

from __future__ import annotations

# ruff: noqa: E402
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZE = int(os.environ.get("DYING_RANKS", "2"))
GRAPH_RANKS = int(os.environ.get("DYING_GRAPH_RANKS", "0")) or None


def start_by_hand() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(SIZE), "NODE_RANK": "0"}
    command = [sys.executable, __file__, *sys.argv[2:]]
    ranks = [subprocess.Popen(command, env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(SIZE)]
    return max(abs(rank.wait()) for rank in ranks)


if sys.argv[1] == "by-hand":
    sys.exit(start_by_hand())

EVENT, MEMORY, TIMEOUT, FOLDER = sys.argv[1], sys.argv[2], float(sys.argv[3]), Path(sys.argv[4])
if "RANK" in os.environ:  # not under this package's launcher, whose ranks share one stream
    os.dup2(os.open(FOLDER / f"stderr-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)

import lightning as L
import psutil
from sample_runs import MODELS, SampleModule, Samples, graph_of_samples
from torch_geometric.nn.models import GCN

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, planted_partition
from lightning_gnn.comm.processes import exit_status

sys.path.append(str(Path(__file__).parent / "device"))
from queued import never_return

if "DYING_ON_DEVICE" in os.environ:
    import on_device

    on_device.begin()


def hold_interpreter(seconds: int) -> None:
    """Sleep with the interpreter lock, as a compiler may: no other thread of this process runs Python."""
    ctypes.PyDLL(None).sleep(seconds)


def cut_network() -> None:
    for name in os.listdir("/sys/class/net"):
        subprocess.run(["ip", "link", "set", name, "down"], check=True)


class LeavingStrategy(DGCLStrategy):
    """Rank 1 leaves the run some seconds after the end of the process of rank 0."""

    def teardown(self) -> None:
        link = FOLDER / "process"
        if EVENT == "leave" and self.global_rank == 0:
            os.symlink(str(os.getpid()), link)
        elif EVENT == "leave":
            while not link.is_symlink() or exit_status(int(os.readlink(link))) is None:
                time.sleep(0.1)
            time.sleep(4)  # a helper process that had lost a rank would end this one
        super().teardown()


class Happens(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if GRAPH_RANKS is None:
            self.happen(trainer)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Any) -> None:
        if GRAPH_RANKS is not None:
            self.happen(trainer)

    def happen(self, trainer: L.Trainer) -> None:
        if trainer.current_epoch != 3:
            return
        if EVENT == "hold":
            hold_interpreter(20)
        elif trainer.global_rank == 1:
            if EVENT.endswith("while others are stuck"):
                time.sleep(2)  # until the others are stuck
            (FOLDER / "when").write_text(str(time.time()))
            if EVENT == "raise":
                raise ValueError("the data of rank 1 is spoilt")
            if EVENT == "exit":
                sys.exit(7)
            if EVENT == "sleep":
                time.sleep(600)
            if EVENT == "cut":
                cut_network()
            if EVENT.startswith("vanish"):  # as after the loss of a machine: kill the helper process first
                for child in psutil.Process().children():
                    child.kill()
            if EVENT.startswith(("kill", "vanish")):
                os.kill(os.getpid(), signal.SIGKILL)
            if EVENT.startswith("stop"):
                os.kill(os.getpid(), signal.SIGSTOP)
        elif EVENT.endswith("while others are stuck"):
            never_return()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if trainer.global_rank != 1:
            time.sleep(0.5)  # as if it saved a checkpoint
            (FOLDER / f"on_exception-{trainer.global_rank}").touch()


def main() -> None:
    shares = MEMORY == "shared"
    strategy = LeavingStrategy(shared_memory=shares, timeout=TIMEOUT, self_check=False, graph_ranks=GRAPH_RANKS)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    nodes = int(os.environ.get("DYING_MACHINES", "1"))
    trainer = L.Trainer(
        strategy=strategy,
        devices=SIZE // nodes,
        num_nodes=nodes,
        accelerator="cpu",
        max_epochs=5,
        callbacks=[Happens()],
        num_sanity_val_steps=0,
        limit_val_batches=0,
        **options,
    )
    for number in range(2 if EVENT == "twice" else 1):
        trainer.fit_loop.max_epochs = 5 * (number + 1)
        if GRAPH_RANKS is None:
            trainer.fit(NodeClassifier(GCN(32, 16, 2, 8)), datamodule=GraphDataModule(planted_partition(2000)))
        else:
            data = GraphDataModule(graph_of_samples(), samples=Samples(), global_batch_size=4)
            trainer.fit(SampleModule(MODELS["gcn"]()).double(), datamodule=data)
    print(f"rank {trainer.global_rank} finished", flush=True)


if __name__ == "__main__":
    main()
