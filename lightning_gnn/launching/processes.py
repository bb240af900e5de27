"""Launcher of ranks as processes that run one call of the Trainer: for notebooks, and for callers that need one process."""

from __future__ import annotations

import gc
import io
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_gnn.callbacks.loggers import begin_runs
from lightning_gnn.checkpoints import with_whole_last
from lightning_gnn.comm.listening import hold
from lightning_gnn.comm.processes import current_progress, end_with_parent
from lightning_gnn.heap import freeze_objects
from lightning_gnn.launching.changes import Shared, warn_of_lost
from lightning_gnn.launching.failures import GRACE_S, IMPORT_S, Failure, set_report, show_once
from lightning_gnn.launching.supervisor import Child, Launchable, Reporter, Supervisor, ignoring_interrupts, listener_of
from lightning_gnn.private_lightning import Launcher, collect_random_states, set_num_threads, set_random_states
from lightning_gnn.private_torch import tree_map_only


class ProcessLauncher(Launcher):
    """Launcher of processes that run one call of the Trainer, and return rank 0's results to the caller.

    The caller's module and callbacks get the trained weights and other changed attributes (``changes.py``). Metrics, the loop's
    progress and predictions are returned as well. An error of a rank is raised in the caller, with that rank's traceback. In
    notebooks, only the start method ``"fork"`` works.
    """

    def __init__(self, strategy: Launchable, start_method: Literal["spawn", "fork"]) -> None:
        self._strategy, self._start_method = strategy, start_method
        self._supervisor: Supervisor | None = None
        self._reporter: Reporter | None = None  # set in a rank
        self._listener: socket.socket | None = None  # rendezvous socket, until ranks are started

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        if self._start_method == "fork":
            return True
        raise RuntimeError(
            "Spawned ranks import this file again, and an interactive session has no file. In a notebook use "
            f"Trainer(strategy='{self._strategy.strategy_name}_notebook')."
        )

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        strategy, environment = self._strategy, self._strategy.cluster_environment
        assert environment is not None
        if self._start_method == "fork" and torch.cuda.is_initialized():
            raise RuntimeError(
                "CUDA is in use in this process, and a fork of it cannot use CUDA. Restart the kernel and create no CUDA "
                f"tensor before trainer.fit, or run a script with strategy='{strategy.strategy_name}'."
            )
        args = with_whole_last(trainer, args)
        shared = None if trainer is None else Shared(trainer)
        supervisor = Supervisor()
        try:
            if self._start_method == "spawn":
                # They import while this process checks the run.
                self._start(supervisor, _enter)
            # A fork lacks the threads that the check starts, and would wait for them forever.
            strategy.before_ranks_start(trainer, (*args, *kwargs.values()), self_check=self._start_method == "spawn")
            self._listener = listener_of(environment, strategy.num_processes)
            os.environ["MASTER_PORT"] = str(environment.main_port)  # set once, here
            if trainer is not None:
                begin_runs(trainer)
            if self._start_method == "spawn":
                arguments: tuple[Any, ...] = collect_random_states(), trainer, function, args, kwargs
                supervisor.start_all((self, arguments), max(IMPORT_S, strategy.timeout.total_seconds()))
            else:
                arguments = None, trainer, function, args, kwargs
                self._start(supervisor, self._run, *arguments)
            self._close_listener()  # rank 0 has a copy
            self._begin(supervisor, arguments)
            self._supervisor = supervisor
            results = torch.load(io.BytesIO(_result_of(supervisor)), weights_only=False)
        finally:
            self._supervisor = None
            supervisor.end(grace=0.0)
            self._close_listener()
            os.environ.pop("MASTER_PORT", None)
        if trainer is not None:
            assert shared is not None
            _restore(trainer, shared, results)
        return results["output"]

    def _start(self, supervisor: Supervisor, target: Callable[..., None], *arguments: Any) -> None:
        """Start the ranks, each with ``target(local rank, parent's process id, its end of a pipe, *arguments)``."""
        # Python's garbage collector ends the threads of an earlier run's process group. A forked rank lacks these threads, and
        # would wait forever. So garbage is collected before the fork, and ranks freeze existing objects.
        if self._start_method == "fork":
            gc.collect()
        for rank in range(self._strategy.num_processes):
            with ignoring_interrupts() if self._start_method == "spawn" else nullcontext():
                supervisor.children.append(self._start_rank(rank, target, arguments))

    def _start_rank(self, rank: int, target: Callable[..., None], arguments: Sequence[Any]) -> Child:
        context: Any = mp.get_context(self._start_method)
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(rank, os.getpid(), theirs, *arguments))
        process.start()
        theirs.close()
        return Child(rank, process.pid, partial(getattr, process, "exitcode"), ours)

    def _begin(self, supervisor: Supervisor, arguments: Sequence[Any]) -> None:
        """Hook called when the ranks have received their `arguments`, before they are watched."""

    def _sends_results(self, local_rank: int) -> bool:
        return local_rank == 0

    def _run(
        self,
        local_rank: int,
        parent: int,
        connection: Connection,
        random_states: dict[str, Any] | None,
        trainer: pl.Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> None:
        """Main function of each started process."""
        freeze_objects()
        end_with_parent(parent)
        reporter = self._reporter = Reporter(local_rank, connection)
        reporter.send("arrived", current_progress().address)
        try:
            if random_states is not None:
                set_random_states(random_states)
            if self._start_method == "fork":
                torch.set_num_threads(1)  # a fork lacks OpenMP's threads, and would wait for them forever
            else:
                set_num_threads(num_processes=self._strategy.num_processes)
            os.environ["LOCAL_RANK"] = str(local_rank)
            if local_rank == 0 and self._listener is not None:
                hold(self._listener)
            else:
                self._close_listener()
            if self._start_method == "spawn":  # parameters are in shared memory: each rank needs its own
                for module in (a for a in (*args, *kwargs.values()) if isinstance(a, torch.nn.Module)):
                    for tensor in (*module.parameters(), *module.buffers()):
                        tensor.data = tensor.data.clone()
            sends = self._sends_results(local_rank)
            shared = Shared(trainer) if trainer is not None and sends else None
            before = {} if shared is None else shared.digests()
            output = function(*args, **kwargs)
            file = io.BytesIO()
            if sends:
                results: dict[str, Any] = {"output": output}
                if trainer is not None and shared is not None:
                    results |= {**_collect(trainer), "changes": shared.changes(before)}
                torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, results), file)
            reporter.send("result", file.getvalue())
        except (Exception, SystemExit) as error:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning's handler would raise during the report
            reporter.send_failure(error)
            sys.exit(1)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    @override
    def kill(self, signum: Any) -> None:
        """Forward a signal to the ranks."""
        if self._supervisor is not None:
            for child in self._supervisor.running():
                child.signal(signum)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_supervisor": None}


def _enter(local_rank: int, parent: int, connection: Connection) -> None:
    """Main function of each spawned process: waits for its arguments."""
    end_with_parent(parent)
    launcher, arguments = Reporter(local_rank, connection).wait_for_start()
    launcher._run(local_rank, parent, connection, *arguments)


def _result_of(supervisor: Supervisor) -> bytes:
    """Returns the first result after all ranks are done; raises the error of a failed rank."""
    waiting = list(supervisor.children)
    while waiting:
        failures = supervisor.look()
        if failures:
            supervisor.wait_for(supervisor.all_failed, GRACE_S)
            raise _to_raise(supervisor.look()[0])
        waiting = [
            child
            for child in supervisor.children  # the list may change
            if "result" not in child.received and not child.failures and child.exit_code() != 0
        ]
        wait([child.connection for child in waiting], timeout=0.2)
    supervisor.look()
    first = next((child for child in supervisor.children if child.received.get("result")), supervisor.children[0])
    if "result" not in first.received:
        raise _to_raise(first.failures[0] if first.failures else Failure.from_exit_code(first.rank, first.exit_code() or 0))
    supervisor.wait_for(lambda: not supervisor.running(), GRACE_S)
    return first.received["result"]


def _to_raise(failure: Failure) -> BaseException:
    """Returns the rank's exception if it could be sent; its cause shows the place in notebooks."""
    show_once()
    if failure.exception is None:
        return failure.error()
    failure.exception.__cause__ = failure.error()
    set_report(failure.exception, str(failure), failure.traceback)
    return failure.exception


def _collect(trainer: pl.Trainer) -> dict[str, Any]:
    fits = trainer.state.fn == TrainerFn.FITTING
    weights = trainer.lightning_module.state_dict() if fits else None
    return {
        "state": trainer.state,
        "weights": weights,
        "beside": {} if weights is None else {n: t for n, t in _tensors(trainer.lightning_module) if n not in weights},
        "callback_metrics": dict(trainer.callback_metrics),
        "fit_loop": trainer.fit_loop.state_dict(),
        "outcome": trainer.strategy.outcome(),  # type: ignore[attr-defined]
    }


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and buffers, including tensors outside of the ``state_dict``."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _restore(trainer: pl.Trainer, shared: Shared, results: dict[str, Any]) -> None:
    """Apply the changes of a rank to the caller's objects."""
    changes, lost = results["changes"]
    lost |= shared.apply(changes)
    if results["weights"] is not None:
        lost |= _load(trainer.lightning_module, results["weights"], results["beside"])
        trainer.fit_loop.load_state_dict(results["fit_loop"])
    trainer.state = results["state"]
    trainer.callback_metrics.update(results["callback_metrics"])
    for name, value in results["outcome"].items():
        setattr(trainer.strategy, name, value)
    warn_of_lost(lost, trainer.strategy.strategy_name)  # type: ignore[attr-defined]


def _load(module: torch.nn.Module, weights: dict[str, Any], extra_tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Load the weights of a rank, and `extra_tensors` outside of the ``state_dict``; returns reasons for missing weights."""
    with torch.no_grad():
        for name, tensor in _tensors(module):
            if name in extra_tensors and extra_tensors[name].shape == tensor.shape:
                tensor.copy_(extra_tensors[name])
    try:
        module.load_state_dict(weights)
        return {}
    except RuntimeError as error:
        known = module.state_dict()  # matching weights have been loaded
        there = {name for name in weights.keys() & known.keys() if _shape(weights[name]) == _shape(known[name])}
        return dict.fromkeys(sorted((weights.keys() | known.keys()) - there), str(error).partition(":")[0])


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)
