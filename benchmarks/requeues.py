"""Sends SLURM's requeue signal to a training run at random moments; checks saved steps and the weights of the next run.

python benchmarks/requeues.py [--signals 20] [--seed 0] [--json FILE]

No SLURM is needed: variables are set as ``srun`` sets them, and a stub takes the place of ``scontrol``. As SLURM does after
``scontrol requeue``, the script sends SIGTERM to all ranks, which must end within 30 s. In the first half of the trials, the
signal reaches all ranks at once; in the second half, 2 s lie between ranks. Of each trial: all ranks save at the same step, the
job is requeued once, and the next run comes to the weights of a run that nobody disturbed, digit by digit. Exit status 1 if
anything was otherwise; the folder of that trial is kept, and named.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

RANKS, EPOCHS, PAUSE_S = 2, 40, 0.15
LATEST = 15
"""Latest epoch of a signal: the others must last longer than the time between the signals of two ranks."""
WITHIN_S = 30.0
"""How long ranks may take to end after SIGTERM; SLURM then sends SIGKILL (KillWait)."""
APART_S = 2.0


def train(folder: Path) -> None:
    """Trains as one task of ``srun``; notes each start, the steps at which this rank saves, and the weights at the end."""
    import lightning as L
    import torch
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from torch_geometric.nn.models import GCN

    from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition

    class Notes(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
            with (folder / f"epochs-{trainer.global_rank}").open("a") as lines:
                lines.write(f"{trainer.current_epoch}\n")

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            time.sleep(PAUSE_S * random.random())  # ranks are apart, which the next exchange brings together

        def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
            with (folder / f"saved-{trainer.global_rank}").open("a") as lines:
                lines.write(f"{trainer.global_step}\n")

    L.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    model = NodeClassifier(GCN(8, 16, 2, 4, dropout=0.3), lr=0.02)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    plugins = [SLURMEnvironment(auto_requeue=True)]
    trainer = L.Trainer(
        strategy="dgcl", devices=RANKS, accelerator="cpu", max_epochs=EPOCHS, default_root_dir=folder, plugins=plugins,
        callbacks=[Notes()], **options,
    )  # fmt: skip
    trainer.fit(model, datamodule=GraphDataModule(planted_partition(300, num_classes=4, num_features=8)))
    torch.save(model.state_dict(), folder / f"weights-{trainer.global_rank}.pt")


def start(folder: Path) -> list[subprocess.Popen[bytes]]:
    """Starts the tasks of a job in a folder, as ``srun --ntasks-per-node=2`` does."""
    stub = folder / "bin" / "scontrol"
    stub.parent.mkdir(parents=True, exist_ok=True)
    stub.write_text(f'#!/bin/sh\necho "$@" >> {folder}/scontrol\n')
    stub.chmod(0o755)
    values = {"JOB_ID": os.getpid(), "JOB_NAME": "train", "NTASKS": RANKS, "NTASKS_PER_NODE": RANKS, "NNODES": 1, "NODEID": 0}
    slurm = {f"SLURM_{name}": str(value) for name, value in {**values, "NODELIST": "localhost"}.items()}
    env = {**os.environ, **slurm, "OMP_NUM_THREADS": "1", "PATH": f"{stub.parent}:{os.environ['PATH']}"}
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    with (folder / "output.txt").open("ab") as output:
        return [
            subprocess.Popen(
                [sys.executable, __file__, "--train", folder],
                env={**env, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                stdout=output,
                stderr=output,
            )
            for rank in range(RANKS)
        ]


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Returns whether a condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def ended(tasks: list[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Returns whether all tasks have ended in time; ends them otherwise."""
    in_time = wait(lambda: all(task.poll() is not None for task in tasks), seconds)
    for task in tasks:
        if task.poll() is None:
            task.kill()
            task.wait()
    return in_time


def weights(folder: Path) -> list[dict[str, Any]]:
    import torch

    return [torch.load(folder / f"weights-{rank}.pt", weights_only=True) for rank in range(RANKS)]


def is_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    import torch

    return all(torch.equal(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in b)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def has_reached(folder: Path, epoch: int) -> bool:
    return all(len(lines_of(folder / f"epochs-{rank}")) > epoch for rank in range(RANKS))


def trial(folder: Path, epoch: int, moment: float, apart_s: float, first: int, expected: list[dict[str, Any]]) -> dict[str, Any]:
    """Signals once, requeues as SLURM does, and returns what came of it.

    Args:
        folder: of the trial.
        epoch: epoch that both ranks have begun.
        moment: seconds after that.
        apart_s: seconds between the signals of ranks.
        first: rank that the signal reaches first.
        expected: weights of an undisturbed run.
    """
    wrong, tasks = [], start(folder)
    if not wait(lambda: has_reached(folder, epoch), 120):
        wrong.append("not begun")
    time.sleep(moment)
    for number, rank in enumerate((first, 1 - first)):
        time.sleep(apart_s * number)
        if tasks[rank].poll() is None:
            tasks[rank].send_signal(signal.SIGUSR1)
    if not wait(lambda: (folder / "scontrol").exists(), WITHIN_S):
        wrong.append("not requeued")
    time.sleep(0.2)  # SLURM's controller takes its time
    began = time.monotonic()
    for task in tasks:
        with suppress(ProcessLookupError):
            task.terminate()
    if not ended(tasks, WITHIN_S):
        wrong.append("late")
    seconds = time.monotonic() - began
    saved = [lines_of(folder / f"saved-{rank}") for rank in range(RANKS)]
    if len(saved[0]) != 1 or any(each != saved[0] for each in saved):
        wrong.append(f"saved at {saved}")
    calls = lines_of(folder / "scontrol")
    if calls != [f"requeue {os.getpid()}"]:
        wrong.append(f"scontrol {calls}")
    for path in folder.glob("epochs-*"):
        path.unlink()
    tasks = start(folder)
    if not ended(tasks, 120) or any(task.returncode for task in tasks):
        wrong.append("next run failed")
    elif lines_of(folder / "epochs-0")[0] == "0":
        wrong.append("next run began at epoch 0")
    elif not is_equal(weights(folder), expected):
        wrong.append("other weights")
    row = {"trial": folder.name, "apart": apart_s, "epoch": epoch, "moment": moment, "saved": saved[0]}
    return {**row, "seconds": seconds, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    root, rng = Path(tempfile.mkdtemp(prefix="requeues-")), random.Random(options.seed)
    os.environ.setdefault("LIGHTNING_GNN_STORE", str(root / "store"))
    folder = root / "undisturbed"
    folder.mkdir()
    tasks = start(folder)
    assert ended(tasks, 240) and not any(task.returncode for task in tasks), (folder / "output.txt").read_text()
    rows, expected = [], weights(folder)
    for number in range(options.signals):
        apart_s = APART_S if 2 * number >= options.signals else 0.0
        folder = root / f"{number:02d}"
        folder.mkdir()
        row = trial(folder, rng.randrange(LATEST), rng.uniform(0, PAUSE_S), apart_s, rng.randrange(RANKS), expected)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if not row["wrong"]:
            shutil.rmtree(folder)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))
    wrong = sum(bool(row["wrong"]) for row in rows)
    slowest = max(row["seconds"] for row in rows)
    good = f"{len(rows) - wrong} of {len(rows)} signals"
    print(f"{good}: saved at one step, requeued once, equal weights. Slowest end: {slowest:.1f} s")
    if wrong:
        sys.exit(f"{wrong} were not as they should be; see {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
