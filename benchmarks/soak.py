"""Trains for many epochs and looks whether memory, descriptors or threads grow: of each strategy, then of all in one process.

python benchmarks/soak.py [--epochs 1000] [--strategies dgcl gossip ...] [--rounds 3] [--json FILE]

A small graph with validation and a checkpoint every 10 epochs. Slopes are those of least-squares lines through a rank's
resident memory, but for that of files: in the second third of the epochs as it is, in the last third after Python has collected
its cycles and emptied its free lists. `plain` is Lightning's own strategy on one device. In the other table the ranks' processes
stay, and all strategies of two ranks train in them in turn, for several rounds: what a `fit` leaves behind would add up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", WANDB_MODE="disabled", PYTHONWARNINGS="ignore")
os.environ["TORCH_FR_BUFFER_SIZE"] = (
    "100"  # torch keeps a record of the last 2000 collectives, a kB each: it is full at once
)

import lightning as L
import numpy as np
import torch
from common import report
from killing import KINDS as OURS
from killing import Kind, module, run_program, trainer_of
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gnn import GraphDataModule
from lightning_gnn.extensions.codecs.transport import EncodingTransport
from lightning_gnn.kernels.warm_up import warm_up
from lightning_gnn.nn.convs import kernel_groups

EVERY = 10
KINDS = {"plain": Kind(lambda **_: "auto", ranks=1), **OURS}  # type: ignore[arg-type, return-value]


def held() -> tuple[int, int, int]:
    """Returns this process's resident memory in kB, without that of files, its open descriptors and its threads."""
    [kilobytes] = re.findall(r"^RssAnon:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kilobytes), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class Held(L.Callback):
    """Notes what each rank holds, every so many epochs, by thirds of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[list[tuple[float, ...]]] = [[], [], []]

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        epoch = trainer.current_epoch
        if epoch % EVERY == 5:  # not while a checkpoint is written
            third = 3 * epoch // trainer.max_epochs
            if third == 2:
                gc.collect()
            self.notes[third].append((epoch, *held(), time.time()))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(self.notes))


def fit(name: str, start_method: str, epochs: int, folder: Path, *callbacks: L.Callback) -> None:
    """Trains once."""
    kind = KINDS[name]
    L.seed_everything(1, verbose=False)
    strategy = kind.make(start_method=start_method, self_check=False, **dict(kind.options))
    saver = ModelCheckpoint(folder / "checkpoints", save_last=True)
    trainer = trainer_of(kind, strategy, epochs, [saver, *callbacks], check_val_every_n_epoch=EVERY)
    trainer.fit(module(), datamodule=GraphDataModule("killing.graph", partition_dir=folder / "store"))


def row_of(name: str, notes: list[list[list[list[float]]]]) -> dict[str, Any]:
    """Returns a strategy's row, of each rank's notes by thirds: the worst of its ranks."""
    ranks = [[np.array(third) for third in of_rank] for of_rank in notes]
    slopes = np.array([[100 * np.polyfit(each[:, 0], each[:, 1], 1)[0] for each in thirds[1:]] for thirds in ranks])
    grown = np.array([np.concatenate(thirds[1:])[-1] - thirds[1][0] for thirds in ranks]).max(0)
    _, second, last = ranks[0]
    return {
        "strategy": name,
        "ranks": len(ranks),
        "epochs": int(last[-1, 0]) + EVERY - 5,
        "ms per epoch": 1000 * float(second[-1, 4] - second[0, 4]) / float(second[-1, 0] - second[0, 0]),
        "memory (MB)": float(last[-1, 1]) / 1024,
        "kB per 100 epochs": round(float(slopes[:, 0].max())),
        "collected": round(float(slopes[:, 1].max())),
        "of each rank": " ".join(f"{slope:+.0f}" for slope in slopes[:, 1]),
        "descriptors": f"{grown[2]:+.0f}",
        "threads": f"{grown[3]:+.0f}",
    }


def soak(name: str, epochs: int, folder: Path) -> dict[str, Any]:
    """Trains a strategy for many epochs in forks of this process; returns its row."""
    folder.mkdir()
    code = run_program(lambda: fit(name, "fork", epochs, folder, Held(folder)), folder)
    if code:
        raise RuntimeError(f"{name} failed, see {folder / 'output.txt'}")
    return row_of(name, [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))])


def in_turn(names: list[str], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Trains strategies in turn in the same processes, the ranks of a script; returns what rank 0 holds after each."""
    folder.mkdir()

    def script() -> None:
        rows = []
        for turn in range(rounds):
            for name in names:
                fit(name, "popen", 2 * EVERY, folder / name)
                waiting = held()[1]
                gc.collect()
                kilobytes, descriptors, threads = held()
                rows.append(
                    {
                        "round": turn + 1,
                        "fit": name,
                        "memory (MB)": kilobytes / 1024,
                        "descriptors": descriptors,
                        "before gc": waiting,
                        "threads": threads,
                    }
                )
        if os.environ.get("LOCAL_RANK", "0") == "0":
            (folder / "rows.json").write_text(json.dumps(rows))

    if run_program(script, folder):
        raise RuntimeError(f"Several fits in one process failed, see {folder / 'output.txt'}")
    return json.loads((folder / "rows.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategies", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm_up(kernel_groups(module()), {torch.float32}, [EncodingTransport.warm_up])
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    rows: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []

    def keep() -> None:
        if options.json:
            Path(options.json).write_text(json.dumps({"rows": rows, "turns": turns}, indent=1))

    if options.rounds:
        turns = in_turn(
            [each for each in options.strategies if KINDS[each].ranks == 2], options.rounds, folder / "turns"
        )
        report("All strategies in one process, by round", turns, [*turns[0]], None)
        keep()
    for name in options.strategies:
        rows.append(soak(name, options.epochs, folder / name))
        print(rows[-1], file=sys.stderr, flush=True)
        keep()
    report(f"{options.epochs} epochs, growth in the second third and, collected, in the last", rows, [*rows[0]], None)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
