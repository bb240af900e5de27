"""Ranks as processes that run the same script: this process is the first of its machine and starts the others."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.strategies.launchers.subprocess_script import (
    _HYDRA_AVAILABLE,
    _basic_subprocess_cmd,
    _hydra_subprocess_cmd,
)
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from typing_extensions import override

from lightning_gnn.checkpoints import with_whole_last
from lightning_gnn.comm.group import is_about_peers
from lightning_gnn.launching.failures import (
    GRACE_S,
    PARENT,
    REPORT,
    SETTLE_S,
    STOP_S,
    Apart,
    Failure,
    Reporter,
    end_after,
    end_with_parent,
    mark_reported,
    say_who_ended,
    show_once,
)
from lightning_gnn.launching.supervisor import Child, Supervisor

if TYPE_CHECKING:
    from lightning_gnn.strategies.base import GNNStrategy

# The started ranks belong to the process, not to one Trainer: they follow it through the script.
_supervisor: Supervisor | None = None
_reporter: Reporter | None = None
_size: int | None = None  # how many ranks there are, where this package has started them


def join_parent() -> None:
    """In a process that :class:`ScriptLauncher` has started: ends with its parent, and tells it of failures."""
    global _reporter, _size
    if REPORT not in os.environ:
        return
    rank, _size, descriptor = map(int, os.environ.pop(REPORT).split())
    os.set_inheritable(descriptor, False)
    _reporter = Reporter(rank, Connection(descriptor, readable=False))
    end_with_parent(int(os.environ.pop(PARENT)))
    show_once()


class InPlaceLauncher(_Launcher):
    """Starts nothing: this process is the only rank."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        return function(*with_whole_last(trainer, args), **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """There is no other process."""


class ScriptLauncher(_Launcher):
    """Runs the script once per rank; or, where ranks are there already (torchrun, SLURM), nothing but the call.

    If a rank fails, the others end within :data:`~lightning_gnn.launching.failures.GRACE_S` seconds and a little, and
    the traceback of that rank is shown once. Where ranks are there already, whoever started them ends them; those of the same
    machine say which was gone.

    Args:
        strategy: whose ranks are started.
    """

    def __init__(self, strategy: GNNStrategy) -> None:
        self._strategy = strategy

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        raise RuntimeError(
            f"Ranks of Trainer(strategy={self._strategy.strategy_name!r}) run this file again, and an interactive session has "
            f"none. In a notebook use Trainer(strategy='{self._strategy.strategy_name}_notebook'), or run a script."
        )

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        environment, strategy = self._strategy.cluster_environment, self._strategy
        assert environment is not None
        environment.validate_settings(num_devices=strategy.num_processes, num_nodes=strategy.num_nodes)
        ranks = strategy.num_processes * strategy.num_nodes
        args = with_whole_last(trainer, args)
        if not environment.creates_processes_externally:
            strategy.before_ranks_start(trainer, (*args, *kwargs.values()))
            self._start()
        elif _size not in (None, ranks):
            raise RuntimeError(
                f"This script runs on {_size} ranks since its first Trainer, and this one asks for {ranks}. "
                f"Give all its Trainers as many devices, or use strategy='{strategy.strategy_name}_spawn' for each, whose ranks "
                "last for one call."
            )
        _set_num_threads_if_needed(num_processes=strategy.num_processes)
        if _supervisor is not None:
            _supervisor.begin(strategy.scheme.survives_lost_ranks)
        if _reporter is not None:
            return self._as_child(_reporter, function, args, kwargs)
        if _supervisor is not None:
            return self._as_parent(_supervisor, function, args, kwargs)
        return self._as_guest(function, args, kwargs)

    # The parent ###############################################################

    def _start(self) -> None:
        global _supervisor, _size
        strategy, environment = self._strategy, self._strategy.cluster_environment
        assert environment is not None
        os.environ.update(
            MASTER_ADDR=environment.main_address,
            MASTER_PORT=str(environment.main_port),
            NODE_RANK=str(environment.node_rank()),
            LOCAL_RANK=str(environment.local_rank()),
            WORLD_SIZE=str(strategy.num_processes * strategy.num_nodes),
        )
        _size = strategy.num_processes * strategy.num_nodes
        children = []
        for local_rank in range(1, strategy.num_processes):
            command, folder = _command(local_rank)
            rank = environment.node_rank() * strategy.num_processes + local_rank
            reader, writer = Pipe(duplex=False)
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={
                    **os.environ,
                    "LOCAL_RANK": str(local_rank),
                    PARENT: str(os.getpid()),
                    REPORT: f"{rank} {_size} {writer.fileno()}",
                    # A script's own wandb.init() gives the sweep's choice here too, and makes no second run.
                    "WANDB_MODE": "disabled",
                },
                pass_fds=(writer.fileno(),),
            )
            writer.close()
            children.append(Child(rank, process.pid, process.poll, reader))
        _supervisor = Supervisor(children, strategy.scheme.survives_lost_ranks)
        show_once()
        atexit.register(_see_off, _supervisor)

    def _as_parent(self, supervisor: Supervisor, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        failed_before = supervisor.look()
        if failed_before:
            raise failed_before[0].error()
        inside = threading.Event()
        inside.set()
        threading.Thread(target=_watch, args=(supervisor, inside), daemon=True, name="watches ranks").start()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            inside.clear()  # this process knows; else the other ranks were asked to end, and said so as if it were why
            cause = self._cause(supervisor, error)
            if cause is None:
                raise
            raise cause from None
        except BaseException:  # Ctrl-C, or the end of the process
            inside.clear()
            supervisor.end(grace=STOP_S if supervisor.stopping else 1.0)
            raise
        finally:
            inside.clear()

    def _cause(self, supervisor: Supervisor, error: Exception) -> Exception | None:
        """Returns what to raise in place of this rank's error, if another's failure led to it; settles the others."""
        if is_about_peers(error):
            # What the other rank says may take a moment to arrive.
            supervisor.wait_for(lambda: any(not f.about_peers for f in supervisor.look()), 2.0)
        # Ranks that all raise, as for bad input, may all go on; one that does not would wait forever.
        supervisor.wait_for(supervisor.all_failed, GRACE_S)
        failures = supervisor.look()
        if supervisor.all_failed() and len(supervisor.running()) == len(supervisor.children):
            supervisor.forget_failures()
        else:
            supervisor.end(grace=1.0)
        if is_about_peers(error) and failures and not failures[0].about_peers:
            first = failures[0]
            return Failure(first.rank, f"{first.text}\nThis process noticed so: {error}").error()
        return None

    def ranks_are_apart(self) -> None:
        """Says, in a rank, that from here on none needs another."""
        if _reporter is not None:
            _reporter.send(Apart())
        elif _supervisor is not None:
            _supervisor.apart = True

    @override
    def kill(self, signum: Any) -> None:
        """Passes a signal on to the other ranks; called by Lightning when this process is asked to end."""
        end_after(STOP_S, 128 + signum)
        if _reporter is not None:
            _reporter.send(Failure(_reporter.rank, f"It was asked to end, by {signal.Signals(signum).name}."))
        elif _supervisor is not None:
            _supervisor.stopping = True
            for child in _supervisor.running():
                child.signal(signum)
        else:
            some_ended = say_who_ended(self._strategy.global_rank, f"was asked to end by {signal.Signals(signum).name}")
            if some_ended and not self._strategy.scheme.survives_lost_ranks:
                raise SystemExit(128 + signum)  # Lightning would go on to ask all ranks, and wait for these

    # A child ##################################################################

    def _as_child(self, reporter: Reporter, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            reporter.failed(error)
            mark_reported(error)
            raise

    # A rank that others have started ##########################################

    def _as_guest(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if is_about_peers(error):
                say_who_ended(self._strategy.global_rank, "cannot go on", SETTLE_S)
            raise


def _command(local_rank: int) -> tuple[Any, str | None]:
    """Returns how this script is run again, and where."""
    if _HYDRA_AVAILABLE:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.initialized():
            return _hydra_subprocess_cmd(local_rank)
    return _basic_subprocess_cmd(), None


def _watch(supervisor: Supervisor, inside: threading.Event) -> None:
    """Ends everything if another rank has failed and this one does not come to know of it."""
    while inside.is_set():
        time.sleep(0.1)
        failures = supervisor.look()
        if not failures or supervisor.stopping:
            continue
        if supervisor.wait_for(lambda: not inside.is_set(), GRACE_S):
            return
        supervisor.end(grace=0.0)
        print(f"{failures[0].error()}\nThis process did not notice, and ends.", file=sys.stderr, flush=True)
        os._exit(1)


def _see_off(supervisor: Supervisor) -> None:
    """At the end of the script: lets the other ranks come to its end too, unless something went wrong."""
    wrong = getattr(sys, "last_value", None) is not None
    supervisor.end(grace=GRACE_S if wrong or supervisor.look() else 60.0)
