"""Launchers: start, supervision and end of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from lightning_gnn.checkpoints import with_whole_last
from lightning_gnn.launching import program  # records the working directory at import
from lightning_gnn.private_lightning import Launcher

if TYPE_CHECKING:
    from lightning_gnn.launching.supervisor import Launchable

StartMethod = Literal["popen", "spawn", "fork"]

__all__ = ["RankFailedError", "StartMethod", "join_parent", "make_launcher", "program"]

STARTED_BY = "LIGHTNING_GNN_STARTED_BY"
"""Environment variable of a started rank: process id of its parent, its rank, number of ranks, descriptor of its pipe."""


MPI_SIZES = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"
"""Environment variables of processes that Open MPI, MPICH or Intel MPI, or MVAPICH started."""


class RankFailedError(RuntimeError):
    """Raised if another rank failed: its traceback, if there is one, and a last line with reason and place."""


def join_parent() -> None:
    """Open the pipe to the parent, in a process that :class:`~lightning_gnn.launching.script.ScriptLauncher` started."""
    if STARTED_BY in os.environ:
        from lightning_gnn.launching.script import take_up

        take_up(*map(int, os.environ.pop(STARTED_BY).split()))


class InPlaceLauncher(Launcher):
    """Launcher that starts nothing: this process is the only rank."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        return function(*with_whole_last(trainer, args), **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """No-op: there is no other process."""


def make_launcher(strategy: Launchable, start_method: StartMethod) -> Launcher:
    """Returns the launcher, which starts the ranks and runs the Trainer's calls on them.

    Raises:
        ValueError: the ranks already run, and would be started again; or `start_method` does not support several machines.
        RuntimeError: MPI started this process.
    """
    environment: Any = strategy.cluster_environment
    ranks = strategy.num_processes * strategy.num_nodes
    if ranks == 1 and not environment.creates_processes_externally:
        return InPlaceLauncher()
    if not environment.creates_processes_externally:
        _check_mpi(ranks)
    if start_method == "popen":
        from lightning_gnn.launching.script import ScriptLauncher

        return ScriptLauncher(strategy)
    if environment.creates_processes_externally:
        raise ValueError(
            f"The ranks have been started already ({type(environment).__name__}), and start_method={start_method!r} would start "
            f"each of them again. Use strategy='{strategy.strategy_name}' under torchrun and SLURM."
        )
    if strategy.num_nodes > 1:
        raise ValueError(
            f"start_method={start_method!r} starts ranks on this machine only (num_nodes={strategy.num_nodes}). Use "
            f"strategy='{strategy.strategy_name}' in a script that is started on each machine, or torchrun."
        )
    from lightning_gnn.launching.processes import ProcessLauncher

    return ProcessLauncher(strategy, start_method)


def _check_mpi(ranks: int) -> None:
    """Raises RuntimeError in one of several processes that MPI started, since each would start all ranks."""
    name, size = next(((name, os.environ[name]) for name in MPI_SIZES if name in os.environ), ("", "1"))
    if size.isdecimal() and int(size) > 1:
        raise RuntimeError(
            f"MPI has started {size} processes ({name}={size}), which Lightning detects only with mpi4py: each would start "
            f"{ranks} ranks. Install mpi4py for this MPI, or start with `torchrun --nproc-per-node {ranks} script.py`."
        )
