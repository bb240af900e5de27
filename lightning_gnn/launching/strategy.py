"""What launchers ask of a strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment


class Launchable(Protocol):
    """A strategy whose ranks a launcher can start."""

    strategy_name: str
    cluster_environment: ClusterEnvironment | None
    num_nodes: int
    timeout: timedelta
    survives_lost_ranks: bool
    """Whether the other ranks may go on when one has failed."""
    most_restarts: int
    """How often each rank that was killed is started again, where the others may go on without."""

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""

    @property
    def global_rank(self) -> int:
        """This process's rank."""

    def before_ranks_start(self, trainer: pl.Trainer | None, given: Sequence[Any], self_check: bool = True) -> None:
        """Finds what is wrong while there is one process only."""

    def outcome(self) -> Mapping[str, Any]:
        """Returns attributes that a call of the Trainer has set, for the process that started the ranks."""
