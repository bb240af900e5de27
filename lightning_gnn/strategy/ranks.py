"""`RankStrategy`: devices, processes, connections between ranks, and atomic checkpoints, independent of graphs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_gnn.arguments import check_choice, check_flags, check_numbers
from lightning_gnn.checkpoints import WholeCheckpointIO
from lightning_gnn.comm.group import World, wait_for_all
from lightning_gnn.comm.processes import current_progress
from lightning_gnn.devices import backend_of
from lightning_gnn.launching import StartMethod, make_launcher
from lightning_gnn.lightning_packages import ParallelStrategy
from lightning_gnn.private_lightning import COMPILATION, TRAINER

MOST_SECONDS = 10**8
"""Maximal timeout, three years: torch counts timeouts in milliseconds, and in places in 64-bit nanoseconds."""


class SideBySide:
    """Ranks that compute at the same time, each fully in memory; an extension may replace it.

    Args:
        shared_memory: whether CPU ranks of one machine exchange data through shared memory.
    """

    most_bytes: int | None = None

    def __init__(self, shared_memory: bool) -> None:
        self._shared_memory = shared_memory

    def check(self, devices: Sequence[torch.device], machines: int) -> None:
        """No-op: all devices are supported."""

    def make_world(self, folder: str, rank: int, size: int, device: torch.device, timeout: timedelta) -> World:
        """Returns the connected ranks of a run; collective."""
        return World(rank, size, device, timeout, self._shared_memory)

    def turn(self) -> AbstractContextManager[None]:
        """Context manager that surrounds the computation of this rank."""
        return nullcontext()


class MeshShape:
    """Division of the ranks of a strategy into groups that each have the whole graph.

    Args:
        owner: strategy of the ranks. Its `graph_ranks` is the number of ranks of a group, or None for all ranks; ``"auto"`` is
            replaced by a number before or after the ranks start.
        is_auto: whether this number is chosen.

    Attributes:
        graph_ranks, data_ranks: number of ranks of a group, and number of groups.
        graph_rank, data_rank: rank of this process in its group, which is the number of its part of the graph; and its group.
        hosts: number of machines of a group.
    """

    def __init__(self, owner: Any, is_auto: bool) -> None:
        self._owner, self.is_auto = owner, is_auto

    graph_ranks = property(lambda self: self._owner.graph_ranks or self._owner.world_size)
    data_ranks = property(lambda self: max(1, self._owner.world_size // self.graph_ranks))
    graph_rank = property(lambda self: self._owner.global_rank % self.graph_ranks)
    data_rank = property(lambda self: self._owner.global_rank // self.graph_ranks)

    @property
    def hosts(self) -> int:
        size, owner = self._owner.graph_ranks, self._owner
        return owner.num_nodes if size is None else -(-size // max(1, owner.num_processes))  # type: ignore[no-any-return]


class RankStrategy(ParallelStrategy):
    """Ranks that are connected while the Trainer runs; see :class:`~lightning_gnn.strategy.base.GNNStrategy`.

    Attributes:
        recovery: object that continues a run whose ranks change; None if they do not.
        ranks: object that connects the ranks, and runs them at the same time or in turns.
    """

    def __init__(
        self, start_method: StartMethod = "popen", shared_memory: bool = True, timeout: float = 1800.0, **plugins: Any
    ) -> None:
        super().__init__(**plugins)
        check_choice("start_method", start_method, get_args(StartMethod))
        check_numbers(timeout=timeout)
        if not 0 < timeout <= MOST_SECONDS:
            raise ValueError(f"timeout must be above 0 and at most {MOST_SECONDS:,} seconds, got {timeout}.")
        check_flags(shared_memory=shared_memory)
        self.shared_memory, self.timeout = shared_memory, timedelta(seconds=timeout)
        self.ranks: Any = SideBySide(shared_memory)
        self.recovery: Any = None
        self.num_nodes = 1
        self._start_method: StartMethod = start_method
        self._world: World | None = None
        self._compiler: Any = None

    @property
    def _lightning_module(self) -> pl.LightningModule | None:  # type: ignore[override]
        return self._given_module

    @_lightning_module.setter
    def _lightning_module(self, module: pl.LightningModule | None) -> None:
        """Set the Trainer's module, whose steps are not compiled; called before Lightning checks whether they are."""
        compiled = getattr(module, COMPILATION, None)
        if module is not None and compiled is not None:
            self._compiler = compiled["dynamo_ctx"]
            for name, method in compiled.items():
                if name.startswith("original_"):
                    setattr(module, name.removeprefix("original_"), method)
            setattr(module, COMPILATION, None)
        self._given_module = module

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Any:
        return getattr(self.lightning_module, TRAINER, None)

    @override
    def _configure_launcher(self) -> None:
        devices = self.parallel_devices or []
        self.ranks.check(devices, self.num_nodes)
        for device in devices:
            backend_of(device)
        self._launcher = make_launcher(self, self._start_method)  # type: ignore[arg-type]

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of ranks on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """True: Lightning then accounts for ranks that log different values."""
        return True

    @property
    def world(self) -> World:
        """All ranks, available between ``setup_environment`` and ``teardown``."""
        if self._world is None:
            raise RuntimeError("The strategy's ranks are connected during fit, validate, test and predict only.")
        return self._world

    def set_world_ranks(self) -> None:
        """Set the rank of this process in the environment; called by Lightning before and after ranks start."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for decorator in (rank_zero_only, fabric_rank_zero_only):
            decorator.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        current_progress().at("set-up")
        self.set_world_ranks()
        expected = self.num_nodes * self.num_processes
        if self.world_size != expected and self.recovery is None:
            raise RuntimeError(
                f"The Trainer needs num_nodes={self.num_nodes} x devices={self.num_processes} = {expected} ranks, but "
                f"{type(self.cluster_environment).__name__} reports {self.world_size}. "
                f"{_how_to_start(self.cluster_environment, self.num_nodes, self.num_processes)}"
            )
        super().setup_environment()
        environment = self.cluster_environment
        assert environment is not None
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        self._world = self._make_world()

    def _make_world(self) -> World:
        folder = self._trainer.default_root_dir
        return self.ranks.make_world(folder, self.global_rank, self.world_size, self.root_device, self.timeout)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._world is not None:
            self._world.barrier(f"Barrier {name}" if name else "Barrier")
        elif self.world_size > 1:  # after fit, other ranks read files of rank 0
            wait_for_all(self.global_rank, self.world_size, self.timeout)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._world is None else self._world.broadcast_object(obj, src)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """Atomic checkpoint IO, also under a wrapper such as AsyncCheckpointIO, unless ``Trainer(plugins=...)`` sets another."""
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeCheckpointIO()
        elif hasattr(self._checkpoint_io, "checkpoint_io"):  # a wrapper
            self._checkpoint_io.checkpoint_io = WholeCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def teardown(self) -> None:
        super().teardown()
        self._compiler = None
        if self._world is not None:
            self._world.close()
            self._world = None
        if sys.exc_info()[1] is None:  # else the last line of this process names it
            current_progress().at("")


def _how_to_start(environment: ClusterEnvironment | None, machines: int, ranks: int) -> str:
    """Returns a command that starts the number of ranks in the Trainer's arguments."""
    kind = type(environment).__name__
    if kind == "SLURMEnvironment":
        return (
            f"In the batch script write `#SBATCH --nodes={machines}` and `#SBATCH --ntasks-per-node={ranks}`, and start with "
            "`srun python script.py`; or change devices and num_nodes."
        )
    if kind == "TorchElasticEnvironment":
        return f"Start with `torchrun --nnodes {machines} --nproc-per-node {ranks} script.py`, or change devices and num_nodes."
    return f"Start {machines * ranks} processes, or change devices and num_nodes. In Ray, call lightning_gnn.ray.prepare_trainer."
