"""How ranks are started, watched and ended."""

from __future__ import annotations

import os
from typing import Any, Literal

from lightning.pytorch.strategies.launchers.launcher import _Launcher

from lightning_gnn.launching.failures import RankFailedError
from lightning_gnn.launching.processes import ProcessLauncher
from lightning_gnn.launching.script import InPlaceLauncher, ScriptLauncher, join_parent
from lightning_gnn.launching.strategy import Launchable

StartMethod = Literal["popen", "spawn", "fork"]

__all__ = ["RankFailedError", "ScriptLauncher", "StartMethod", "join_parent", "make_launcher"]


_MPI_SIZES = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"
"""Of the environment of a process that Open MPI, MPICH or Intel MPI, or MVAPICH has started."""


def make_launcher(strategy: Launchable, start_method: StartMethod) -> _Launcher:
    """Returns the launcher, which starts the ranks and runs the Trainer's calls on them; raises ValueError if they are there
    already, and would be started again, RuntimeError under MPI."""
    environment: Any = strategy.cluster_environment
    ranks = strategy.num_processes * strategy.num_nodes
    if ranks == 1 and not environment.creates_processes_externally:
        return InPlaceLauncher()
    if not environment.creates_processes_externally:
        _check_mpi(ranks)
    if start_method == "popen":
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
    return ProcessLauncher(strategy, start_method)


def _check_mpi(ranks: int) -> None:
    """Raises RuntimeError in one of several processes that MPI has started, each of which would start all ranks."""
    name, size = next(((name, os.environ[name]) for name in _MPI_SIZES if name in os.environ), ("", "1"))
    if size.isdecimal() and int(size) > 1:
        raise RuntimeError(
            f"MPI has started {size} processes ({name}={size}), which Lightning takes for no ranks: each would start {ranks}. "
            f"Start with `torchrun --nproc-per-node {ranks} script.py`, or `python script.py`, in place of mpirun."
        )
