"""What a trial of ``kills.py`` runs: a small training of which one process ends by SIGKILL at a chosen point of a phase.

Importing costs seconds, training this graph a fraction of one. So all processes of a trial are forks of one that has imported
everything, also where the package starts a Python of its own: :class:`ForkedPopen` runs in a fork what the command would.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN

import lightning_gnn
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition
from lightning_gnn.datamodules import build
from lightning_gnn.launching import join_parent
from lightning_gnn.strategies import GNNStrategy
from lightning_gnn.strategies.gossip import store_process

PHASES = ("partition", "set-up", "forward", "backward", "checkpoint", "validation")
STARTS = {"script": "popen", "notebook": "fork", "torchrun": "popen"}
"""How ranks are started, and the strategy's `start_method` for it."""
EPOCHS, COUNTED_EPOCH = 5, 2


@dataclass(frozen=True)
class Kind:
    """A strategy as it is tried.

    Attributes:
        make: of the strategy, given `start_method` and other options.
        ranks: the least that it takes, of 2, 4 and 8.
        repeats: with the same seed it comes to the same digits, also by way of a checkpoint.
        dropout: of the model; checkpoints of independent workers hold no random states.
        goes_on: does without a rank that it loses in `fit`.
        options: of `make`.
    """

    make: Callable[..., GNNStrategy]
    ranks: int = 2
    repeats: bool = True
    goes_on: bool = False
    dropout: float = 0.5
    options: tuple[tuple[str, Any], ...] = ()


_CLUSTERS = (("num_clusters", 12), ("average_every_n_batches", 1))
KINDS = {
    "dgcl": Kind(lightning_gnn.DGCLStrategy),
    "spmm_1d": Kind(lightning_gnn.SpMM1DStrategy),
    "spmm_15d": Kind(lightning_gnn.SpMM15DStrategy),
    "spmm_2d": Kind(lightning_gnn.SpMM2DStrategy, 4),
    "spmm_3d": Kind(lightning_gnn.SpMM3DStrategy, 8),
    "vertex_cut": Kind(lightning_gnn.VertexCutStrategy),
    "vertex_cut_cached": Kind(lightning_gnn.CachedVertexCutStrategy, repeats=False),  # caches begin anew
    "sampling": Kind(lightning_gnn.SamplingStrategy, options=(("num_neighbors", (4, 4)), ("batch_size", 40))),
    "gossip": Kind(
        lightning_gnn.GossipStrategy, 3, False, True, options=(*_CLUSTERS, ("heartbeat_timeout", 3.0), ("partner_timeout", 10.0))
    ),
    "cluster_allreduce": Kind(lightning_gnn.ClusterAllReduceStrategy, dropout=0.0, options=_CLUSTERS),
}


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        strategy, start: names of :data:`KINDS` and :data:`STARTS`.
        folder: for its checkpoints and notes.
        store: for the partitioned graph.
        phase: where a process is ended; empty for nowhere.
        rank: whose process: any, but of ``"partition"`` 0 for the one that partitions, 1 for the one that waits for it.
        epoch: from which on; some workers of ``gossip`` have no batch in some epochs.
        share: how much of the phase is over by then, 0 to 1.
        calls: of functions in the whole phase, as counted in an undisturbed run.
    """

    strategy: str
    start: str
    folder: Path
    store: Path
    phase: str = ""
    rank: int = 0
    epoch: int = 0
    share: float = 0.0
    calls: int = 0


# In each process ##############################################################

_script: Callable[[], None] | None = None
_trial: Trial | None = None
_counts: Counter[str] = Counter()
_in_build = False


def _rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _is_chosen(phase: str, epoch: int | None) -> bool:
    trial = _trial
    if trial is None or phase != trial.phase or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return False
    if phase == "partition":
        return True
    return _rank() == trial.rank and (epoch is None or epoch >= trial.epoch)


def _end() -> None:
    """Ends the process that was chosen."""
    assert _trial is not None
    target = os.getppid() if _trial.phase == "partition" and _trial.rank else os.getpid()
    sys.setprofile(None)
    (_trial.folder / "when").write_text(str(time.time()))
    os.kill(target, signal.SIGKILL)
    time.sleep(60)  # partitioning a large graph would go on as well


@contextmanager
def phase_of(phase: str, epoch: int | None = None) -> Iterator[None]:
    """Ends a process while this is open, at the call of a function that is due; or counts the calls."""
    begin(phase, epoch)
    try:
        yield
    finally:
        end(phase, epoch)


def begin(phase: str, epoch: int | None = None) -> None:
    """See :func:`phase_of`."""
    if _trial is None:
        return
    if not _trial.phase:
        if epoch in (None, COUNTED_EPOCH) and phase not in _counts:  # once, of several batches

            def count(frame: Any, event: str, argument: Any) -> None:
                _counts[phase] += 1

            sys.setprofile(count)
    elif _is_chosen(phase, epoch):
        left = max(1, int(_trial.share * _trial.calls))

        def look(frame: Any, event: str, argument: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                _end()

        sys.setprofile(look)


def end(phase: str, epoch: int | None = None) -> None:
    """See :func:`phase_of`; waits for others differ, and with them the calls: at the end it is high time."""
    if _trial is None:
        return
    if _trial.phase and _is_chosen(phase, epoch):
        _end()
    sys.setprofile(None)
    if phase == "partition" and not _trial.phase:  # in a process that does nothing else
        (_trial.folder / "partition.json").write_text(json.dumps(_counts))


class Phases(L.Callback):
    """Says when phases of training begin and end."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        end("set-up")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        begin("forward", trainer.current_epoch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        end("forward", trainer.current_epoch)
        begin("backward", trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        end("backward", trainer.current_epoch)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            begin("validation", trainer.current_epoch)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            end("validation", trainer.current_epoch)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if _trial is not None and not _trial.phase:
            (_trial.folder / f"calls{trainer.global_rank}.json").write_text(json.dumps(_counts))


class Saver(ModelCheckpoint):
    """Writing checkpoints, two of them, is a phase."""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with phase_of("checkpoint", trainer.current_epoch):
            super().on_validation_end(trainer, pl_module)


_build = GraphDataModule.build


def _noted_build(self: GraphDataModule, layout: Any) -> str:
    with phase_of("partition"):
        return _build(self, layout)


GraphDataModule.build = _noted_build  # type: ignore[method-assign]


def graph() -> Data:
    """Returns the graph of all trials."""
    return planted_partition(240, num_features=8, num_classes=3, seed=3)


def module(dropout: float = 0.5) -> NodeClassifier:
    """Returns the model of all trials; with dropout it shows whether random states come back."""
    return NodeClassifier(GCN(8, 8, num_layers=2, out_channels=3, dropout=dropout), lr=0.05)


def trainer_of(
    kind: Kind, strategy: GNNStrategy, epochs: int, callbacks: list[L.Callback], **options: Any
) -> L.Trainer:
    """Returns a Trainer that says nothing."""
    return L.Trainer(
        strategy=strategy,
        devices=kind.ranks,
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        **options,
    )


def train(trial: Trial) -> None:
    """What the user's script does: trains, or goes on from the last checkpoint, and leaves the weights in a file."""
    kind = KINDS[trial.strategy]
    L.seed_everything(1, verbose=False)
    model, data = module(kind.dropout), GraphDataModule("killing.graph", partition_dir=trial.store)
    options = dict(kind.options)
    strategy = kind.make(start_method=STARTS[trial.start], self_check=False, timeout=200.0, **options)
    environment = strategy.setup_environment

    def setup_environment() -> None:
        begin("set-up")
        environment()

    strategy.setup_environment = setup_environment  # type: ignore[method-assign]
    saver = Saver(trial.folder / "checkpoints", save_last=True, save_on_train_epoch_end=False)
    trainer = trainer_of(kind, strategy, EPOCHS, [Phases(), saver])
    trainer.fit(model, datamodule=data, ckpt_path="last")
    if trainer.is_global_zero:
        torch.save(model.state_dict(), trial.folder / "result.pt")


def _under_torchrun(trial: Trial) -> None:
    """Does what ``torchrun --standalone --max-restarts 1`` does."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=KINDS[trial.strategy].ranks,
        run_id="kills",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        start_method="fork",
        monitor_interval=0.1,
    )
    elastic_launch(config, _worker)(trial, multiprocessing.get_context("fork").Barrier(config.nproc_per_node))


def _worker(trial: Trial, all_there: Barrier) -> None:
    # A thread of the process that forks them answers ranks that meet, and a rank forked meanwhile would find its locks taken.
    all_there.wait()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not torchrun's own, which a Python that it starts does not have
    torch.set_num_threads(1)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":  # all of the first attempt have ended
        (trial.folder / "anew").write_text(str(time.time()))
    train(trial)


# Forks ########################################################################


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Runs in a fork of this process what a Python that the package starts would run."""

    def _execute_child(self, args: Any, *rest: Any) -> None:  # type: ignore[override]
        if args[0] != sys.executable or args[1] == "-S":  # the helper process of a rank imports little
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        _, _, _, pass_fds, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[:15]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            gc.freeze()  # objects of the first process would close their files, whose numbers others have here
            for given, wanted in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2)):
                if given not in (-1, wanted):
                    os.dup2(given, wanted)
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in pass_fds:
                    with suppress(OSError):
                        os.close(int(name))
            if cwd is not None:
                os.chdir(cwd)
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            if rest[20]:  # start_new_session
                os.setsid()
            main = _again
            if args[1:3] == ["-m", "lightning_gnn.datamodules.build"]:
                main = build.main
            elif args[1] == store_process.__file__:
                host, run, size, lease = args[2:]
                main = partial(store_process.serve, host, run, int(size), float(lease))
            as_program(main)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _again() -> None:
    """Runs the script as a rank that the package has started."""
    torch.set_num_threads(1)
    join_parent()
    assert _script is not None
    _script()


def as_program(main: Callable[[], None]) -> None:
    """Runs `main` as a Python of its own would, to its end; does not return."""
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(each, mode, closefd=False) for each, mode in enumerate("rww"))
    atexit._clear()
    code = 0
    try:
        main()
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    except BaseException as error:
        code, sys.last_value = 1, error
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start(main: Callable[[], None], folder: Path, output: Path) -> int:
    """Starts a program in a session of its own, and returns its first process.

    Args:
        main: what it does; where the package starts the same script again, once more.
        folder: where it works, with a folder for temporary files.
        output: gets all that its processes print.
    """
    global _script
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        with output.open("w") as file:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        temporary = folder / "tmp"
        temporary.mkdir(exist_ok=True)
        os.environ["TMPDIR"], tempfile.tempdir = str(temporary), None
        os.chdir(folder)
        _script, subprocess.Popen = main, ForkedPopen  # type: ignore[misc]
        as_program(main)
    finally:
        os._exit(1)  # whatever happens, the caller's code is not run twice


def start_trial(trial: Trial, output: Path, undisturbed: bool = False) -> int:
    """Starts a trial, see :func:`start`; `undisturbed`: it goes on from the last checkpoint, and nothing happens to it."""

    def main() -> None:
        global _trial
        _trial = replace(trial, phase="none") if undisturbed else trial
        if trial.start == "torchrun":
            _under_torchrun(trial)
        else:
            train(trial)

    return start(main, trial.folder, output)


def run_program(main: Callable[[], None], folder: Path) -> int:
    """Runs a program, see :func:`start`, and returns its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(start(main, folder, folder / "output.txt"), 0)[1])
