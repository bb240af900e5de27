"""Launcher of ranks as processes that run the script again: this process is the first of its machine, and starts the others."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_gnn.checkpoints import with_whole_last
from lightning_gnn.comm.group import CommunicationError, is_about_peers
from lightning_gnn.comm.listening import hold
from lightning_gnn.comm.processes import REPORTED, current_progress, end_after, end_with_parent, exit_status
from lightning_gnn.launching import STARTED_BY, preload, program
from lightning_gnn.launching.failures import (
    GRACE_S,
    IMPORT_S,
    SETTLE_S,
    STOP_S,
    Failure,
    report_ended_ranks,
    report_to_torchrun,
    set_report,
    show_once,
)
from lightning_gnn.launching.supervisor import Child, Launchable, Reporter, Supervisor, ignoring_interrupts, listener_of
from lightning_gnn.private_lightning import HYDRA_AVAILABLE, Launcher, hydra_command, set_num_threads


@dataclass
class _Script:
    """State of the ranks that run the script; they belong to the process, not to one Trainer, and follow it through the script.

    Attributes:
        supervisor: supervisor of the ranks that this process started.
        reporter, parent: for a started rank, its pipe and the process that started it.
        watches: whether a started rank ends with its parent; set by its first Trainer.
        waits: whether the rank has not reached its first call of a Trainer.
        size: number of ranks, if this package started them.
    """

    supervisor: Supervisor | None = None
    reporter: Reporter | None = None
    parent: int | None = None
    watches: bool = False
    waits: bool = False
    size: int | None = None


_script = _Script()


def take_up(parent: int, rank: int, size: int, descriptor: int) -> None:
    """Open the pipe to the process that started this rank."""
    os.set_inheritable(descriptor, False)
    _script.reporter, _script.parent, _script.size, _script.waits = Reporter(rank, Connection(descriptor)), parent, size, True
    show_once()


def num_script_ranks() -> int | None:
    """Returns the number of ranks that run this script, if this package started them."""
    return _script.size


class ScriptLauncher(Launcher):
    """Launcher that runs the script once per rank, or only the call if ranks already run (torchrun, SLURM).

    The other ranks import while this process checks the run. If a check fails, they are terminated.

    If a rank fails, the others end within about :data:`~lightning_gnn.launching.failures.GRACE_S` seconds. The traceback of the
    failed rank is shown once, with a line with reason and place. Ranks that already run are ended by the launcher that started
    them. Ranks of the same machine report which rank was gone.
    """

    _script = _script  # state of the process, shared by all launchers
    _first_rank = 1  # of a machine, among the ranks that this process starts

    def __init__(self, strategy: Launchable) -> None:
        self._strategy = strategy
        reporter, parent = _script.reporter, _script.parent
        if reporter is not None and parent is not None and not _script.watches:
            end_with_parent(parent, unless=lambda: not reporter.needs_parent)
            _script.watches = True

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        raise RuntimeError(
            f"Ranks of Trainer(strategy={self._strategy.strategy_name!r}) run this file again, and an interactive session has no "
            f"file. In a notebook use Trainer(strategy='{self._strategy.strategy_name}_notebook'), or run a script."
        )

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        environment, strategy, script = self._strategy.cluster_environment, self._strategy, self._script
        assert environment is not None
        environment.validate_settings(num_devices=strategy.num_processes, num_nodes=strategy.num_nodes)
        ranks, reporter = strategy.num_processes * strategy.num_nodes, script.reporter
        if reporter is not None:  # this is a started rank
            if script.waits:
                script.waits = False
                self._arrive(reporter)
            # This call needs all ranks, and raises an error if one is gone.
            reporter.needs_parent = reporter.needs_parent or os.getppid() == script.parent
        args = with_whole_last(trainer, args)
        starts = not environment.creates_processes_externally
        if starts:
            self._start(lambda: strategy.before_ranks_start(trainer, (*args, *kwargs.values())))
        elif script.size not in (None, ranks):
            raise RuntimeError(
                f"This script runs on {script.size} ranks since its first Trainer, and this one needs {ranks}. "
                f"Set the same devices for all its Trainers, or use strategy='{strategy.strategy_name}_spawn', "
                "whose ranks last for one call."
            )
        set_num_threads(num_processes=strategy.num_processes)
        if script.supervisor is not None:
            self._begin(script.supervisor, starts)
            return self._as_parent(script.supervisor, function, args, kwargs)
        try:
            return function(*args, **kwargs)
        except (Exception, SystemExit) as error:
            if reporter is not None:
                reporter.send_failure(error)
            elif isinstance(error, Exception):
                self._report_guest(error)
            raise

    def _arrive(self, reporter: Reporter) -> None:
        """Wait, in a started rank, at its first call of a Trainer."""
        reporter.wait_for_start()

    def _begin(self, supervisor: Supervisor, first: bool) -> None:
        """Hook called when a Trainer's call begins, in the process that started the ranks.

        `first` is True if the ranks were started for this call.
        """
        supervisor.begin()

    def _start(self, check: Callable[[], None]) -> None:
        """Start the other ranks of this machine, which continue after `check` succeeds."""
        strategy, environment = self._strategy, self._strategy.cluster_environment
        assert environment is not None
        size = strategy.num_processes * strategy.num_nodes
        variables = {
            "MASTER_ADDR": environment.main_address,
            "NODE_RANK": str(environment.node_rank()),
            "LOCAL_RANK": str(environment.local_rank()),
            "WORLD_SIZE": str(size),
        }
        supervisor, preloaded = Supervisor(), preload.take()
        try:
            for local_rank in range(self._first_rank, strategy.num_processes):
                with ignoring_interrupts():
                    supervisor.children.append(self._start_rank(local_rank, variables, preloaded))
            if preloaded is not None:
                preloaded.close()
            check()
            seconds = max(IMPORT_S, strategy.timeout.total_seconds())
            variables["MASTER_PORT"] = str(self._begin_ranks(supervisor, size, seconds))
        except BaseException:
            supervisor.end(grace=0.0)
            raise
        os.environ.update(variables)
        self._script.supervisor, self._script.size = supervisor, size
        show_once()
        atexit.register(_see_off, supervisor)

    def _begin_ranks(self, supervisor: Supervisor, size: int, seconds: float) -> int:
        """Let the started ranks begin when they have arrived; returns the port at which ranks meet."""
        environment = self._strategy.cluster_environment
        assert environment is not None
        listener = listener_of(environment, size)
        if listener is not None:
            hold(listener)  # only rank 0 has a listener
        supervisor.start_all(None, seconds, MASTER_PORT=str(environment.main_port))
        return environment.main_port

    def _start_rank(self, local_rank: int, variables: Mapping[str, str], preloaded: preload.Preloaded | None = None) -> Child:
        """Run the script again, with these environment variables; `preloaded` starts it without imports."""
        environment, ranks = self._strategy.cluster_environment, self._strategy.num_processes
        assert environment is not None
        command, folder = _command(local_rank, self._strategy.strategy_name)
        rank, size = environment.node_rank() * ranks + local_rank, ranks * self._strategy.num_nodes
        ours, theirs = Pipe()
        started_by = f"{os.getpid()} {rank} {size} "
        # A script's wandb.init() returns the configuration of the sweep here too, without a second run.
        environment_of = {**os.environ, **variables, "LOCAL_RANK": str(local_rank), "WANDB_MODE": "disabled"}
        with theirs:
            if preloaded is not None:
                pid = preloaded.start(command, folder, {**environment_of, STARTED_BY: started_by + "{}"}, theirs.fileno())
                return Child(rank, pid, partial(exit_status, pid), ours)
            environment_of[STARTED_BY] = f"{started_by}{theirs.fileno()}"
            process = subprocess.Popen(command, cwd=folder, env=environment_of, pass_fds=[theirs.fileno()])
            return Child(rank, process.pid, process.poll, ours)

    def _as_parent(self, supervisor: Supervisor, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        show_once()
        failed_before = supervisor.look()
        if failed_before:
            raise failed_before[0].error()
        inside = threading.Event()
        inside.set()
        threading.Thread(target=_watch, args=(supervisor, inside), daemon=True, name="watches ranks").start()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            inside.clear()  # stops _watch, which would end the other ranks and hide the cause
            if supervisor.stopping and is_about_peers(error):  # another rank was first to end after the signal
                supervisor.end(grace=STOP_S)
                raise SIGTERMException from None
            own = Failure.of(self._strategy.global_rank, error)
            cause = self._cause(supervisor, error)
            show_once()
            if cause is None:
                set_report(error, str(own), _without_traceback(error))
                raise
            raise cause from None
        except BaseException:  # Ctrl-C, or process exit
            inside.clear()
            supervisor.end(grace=STOP_S if supervisor.stopping else 1.0)
            raise
        finally:
            inside.clear()

    def _cause(self, supervisor: Supervisor, error: Exception) -> Exception | None:
        """Returns the error to raise in place of this rank's error if another rank's failure caused it; else None.

        Ends the other ranks, or lets them continue if all failed and still run.
        """

        # Messages of another rank may be delayed. If all ranks raise, for example for invalid input, all may continue. A rank
        # that did not raise would wait forever.
        def peers_failure() -> Failure | None:
            return next((each for each in supervisor.look() if is_about_peers(error) and not each.about_peers), None)

        supervisor.wait_for(lambda: supervisor.all_failed() or peers_failure() is not None, GRACE_S)
        all_failed, cause = supervisor.all_failed(), peers_failure()
        if all_failed and len(supervisor.running()) == len(supervisor.children):
            supervisor.forget_failures()
        elif all_failed or cause is None:  # else they notice that this rank leaves, or their helper processes end them
            supervisor.end(grace=1.0 if all_failed else 0.0)
        return None if cause is None else cause.error()

    @override
    def kill(self, signum: Any) -> None:
        """Forward a signal to the other ranks; called by Lightning when this process receives it."""
        end_after(STOP_S, 128 + signum)
        what = f"was asked to end by {signal.Signals(signum).name}"
        reporter, supervisor = self._script.reporter, self._script.supervisor
        if reporter is not None:
            reporter.send("failed", Failure(reporter.rank, what, place=str(current_progress())))
        elif supervisor is not None:
            supervisor.stopping = True
            for child in supervisor.running():
                child.signal(signum)
        elif report_ended_ranks(self._strategy.global_rank, what):
            self._end_without_asking(128 + signum)

    def _end_without_asking(self, code: int) -> None:
        """End this rank after another rank ended: Lightning would communicate with all ranks, and wait for the missing one."""
        raise SystemExit(code)

    def _report_guest(self, error: Exception) -> None:
        """Report an error of a rank that this package did not start, and that started no ranks."""
        own = Failure.of(self._strategy.global_rank, error)
        ended = report_ended_ranks(own.rank, "cannot go on", SETTLE_S) if own.about_peers else ""
        show_once()
        report_to_torchrun(ended or str(own), own.about_peers)
        set_report(error, "" if ended else str(own), "" if ended else _without_traceback(error))


def _without_traceback(error: Exception) -> str | None:
    """Returns an error as text if its message already has the code positions of all ranks; None otherwise."""
    explained = isinstance(error, CommunicationError) and error.explained
    return f"{type(error).__name__}: {error}\n" if explained else None


def _command(local_rank: int, strategy: str) -> tuple[Sequence[str], str]:
    """Returns the command that runs this script again, and its working directory.

    Raises:
        RuntimeError: it cannot be run again.
    """
    if HYDRA_AVAILABLE:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.initialized():
            (python, *arguments), folder = hydra_command(local_rank)
            return [python, *program.options(), *arguments], folder
    try:
        return program.command()
    except RuntimeError as error:
        raise RuntimeError(
            f"Each rank of strategy='{strategy}' runs this program again, and that is not possible: {error}. Save it in a file "
            f"and run that, or use Trainer(strategy='{strategy}_notebook'), whose ranks are forks of this process."
        ) from None


def _watch(supervisor: Supervisor, inside: threading.Event) -> None:
    """End all ranks if another rank failed and this rank does not detect it."""
    while inside.is_set():
        time.sleep(0.1)
        failures = supervisor.look()
        if not failures or supervisor.stopping:
            continue
        if supervisor.wait_for(lambda: not inside.is_set(), GRACE_S / 2):  # before the helper process ends this process
            return
        supervisor.end(grace=0.0)
        said = f"This process did not detect the failure of another rank, and ends.\n{failures[0].error()}"
        print(said, file=sys.stderr, flush=True)
        current_progress().ending = REPORTED
        os._exit(1)


def _see_off(supervisor: Supervisor) -> None:
    """Wait at the end of the script for the other ranks to reach their end, unless an error occurred."""
    wrong = getattr(sys, "last_value", None) is not None
    supervisor.end(grace=GRACE_S if wrong or supervisor.look() else 60.0)
