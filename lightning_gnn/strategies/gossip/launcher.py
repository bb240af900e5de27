"""Launchers whose ranks continue without a failed rank once they are connected in a fit, and restart killed ranks."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_gnn.comm.processes import current_progress
from lightning_gnn.launching.failures import Failure
from lightning_gnn.launching.processes import ProcessLauncher
from lightning_gnn.launching.script import ScriptLauncher
from lightning_gnn.launching.supervisor import Child, Reporter, Supervisor
from lightning_gnn.private_lightning import Launcher
from lightning_gnn.private_torch import barrier_of_agents, end_of_agents

REJOIN_VARIABLE = "LIGHTNING_GNN_REJOINS"
"""Environment variable of a restarted rank: the place of the others' store."""

_AGENT_S = 5.0
"""Timeout in seconds of torchrun's store."""


class Losses:
    """Filter of failures: none end the other ranks once these have reported that they are independent.

    Args:
        supervisor: supervisor of the ranks.
        start_again: function that restarts the local rank of a child whose process was killed, given the place of the others'
            store.
        restarts: maximum number of restarts of each rank.
    """

    def __init__(self, supervisor: Supervisor, start_again: Callable[[Child, str], Child], restarts: int) -> None:
        self._supervisor, self._start_again, self._restarts = supervisor, start_again, restarts
        self._place = ""
        self._reported_ranks: set[int] = set()
        self._started_again: Counter[int] = Counter()

    def select_fatal(self, failures: list[Failure]) -> list[Failure]:
        """Returns the failures that end all ranks; prints the others."""
        for child in self._supervisor.children:
            self._place = child.received.get("independent", self._place)
        if not self._place:  # the ranks would wait for each other
            return failures
        for failure in failures:
            if failure.rank not in self._reported_ranks:
                self._reported_ranks.add(failure.rank)
                again = self._takes_its_place(failure)
                then = "it is started again, and the others go on" if again else "the others go on"
                print(f"{failure.traceback}{failure}; {then}.", file=sys.stderr, flush=True)
        return []

    def _takes_its_place(self, failure: Failure) -> bool:
        """Restart a rank, unless it raised an error, which it would raise again, or is rank 0, whose loggers have started."""
        supervisor = self._supervisor
        [lost] = [child for child in supervisor.children if child.rank == failure.rank]
        was_killed = (lost.exit_code() or 0) < 0 and "result" not in lost.received
        if supervisor.stopping or supervisor.ending or not was_killed or lost.rank == 0:
            return False
        if self._started_again[lost.rank] >= self._restarts:
            return False
        self._started_again[lost.rank] += 1
        self._reported_ranks.discard(lost.rank)
        supervisor.children[supervisor.children.index(lost)] = self._start_again(lost, self._place)
        return True


class SurvivingScriptLauncher(ScriptLauncher):
    """Launcher that runs the script once per rank; in a fit, ranks continue without a failed rank, even rank 0."""

    _strategy: Any

    @override
    def _arrive(self, reporter: Reporter) -> None:
        if REJOIN_VARIABLE in os.environ:  # the others already run this call
            reporter.send("arrived", current_progress().address)
        else:
            super()._arrive(reporter)

    @override
    def _begin(self, supervisor: Supervisor, first: bool) -> None:
        super()._begin(supervisor, first)
        for child in supervisor.children:
            child.received.pop("independent", None)
        # A restarted rank runs the script's first call.
        restarts = self._strategy.most_restarts if first else 0
        supervisor.begin(Losses(supervisor, self._start_again, restarts).select_fatal)

    def _start_again(self, lost: Child, place: str) -> Child:
        return self._start_rank(lost.rank % self._strategy.num_processes, {REJOIN_VARIABLE: place})

    def ranks_are_independent(self, place: str) -> None:
        """Report, in a rank, that ranks are independent from now on, and the place of their store."""
        if self._script.reporter is not None:
            self._script.reporter.needs_parent = False
            self._script.reporter.send("independent", place)
        elif self._script.supervisor is None and self._strategy.most_restarts:
            raise ValueError(
                f"max_restarts={self._strategy.most_restarts} is not supported for ranks started by "
                f"{type(self._strategy.cluster_environment).__name__}. Remove it, or start the script with python."
            )

    @override
    def _end_without_asking(self, code: int) -> None:
        if not self._strategy.survives_lost_ranks:
            super()._end_without_asking(code)


class SurvivingProcessLauncher(ProcessLauncher):
    """Launcher that starts processes for one call; in a fit, they continue without a failed rank.

    The first remaining rank sends the results.
    """

    _strategy: Any

    @override
    def _begin(self, supervisor: Supervisor, arguments: Sequence[Any]) -> None:
        again = partial(self._start_again, arguments=arguments)
        supervisor.begin(Losses(supervisor, again, self._strategy.most_restarts).select_fatal)

    def _start_again(self, lost: Child, place: str, arguments: Sequence[Any]) -> Child:
        os.environ[REJOIN_VARIABLE] = place
        try:
            return self._start_rank(lost.rank, self._run, arguments)
        finally:
            del os.environ[REJOIN_VARIABLE]

    @override
    def _sends_results(self, local_rank: int) -> bool:
        return super()._sends_results(local_rank) or self._strategy.survives_lost_ranks

    def ranks_are_independent(self, place: str) -> None:
        """Report, in a rank, that ranks are independent from now on, and the place of their store."""
        assert self._reporter is not None
        self._reporter.send("independent", place)


def surviving(launcher: Launcher | None) -> Launcher | None:
    """Returns a launcher that starts the same ranks as the given one, but whose ranks continue without lost ones."""
    if isinstance(launcher, ScriptLauncher):
        return SurvivingScriptLauncher(launcher._strategy)
    if isinstance(launcher, ProcessLauncher):
        return SurvivingProcessLauncher(launcher._strategy, launcher._start_method)
    return launcher


def end_for_lost_agents(agents: Collection[int]) -> None:
    """Under torchrun, pass the exit barrier in place of agents whose ranks were lost; called once, by a remaining rank.

    An agent whose ranks have ended waits up to 300 s at the exit barrier for all others (``SimpleElasticAgent._exit_barrier``),
    including lost ones. This works only if agents use the store that ranks can reach, with ``--master-addr``: ranks cannot reach
    the store of ``--rdzv-backend c10d``.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    # If these names do not exist in a version of torch, or the store does not, agents wait for their timeout.
    with suppress(ImportError, AttributeError, RuntimeError, OSError):
        from torch.distributed.elastic.agent.server import api
        from torch.distributed.elastic.utils import store as barriers

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection((address, port), _AGENT_S).close()  # torch would retry for a long time
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_AGENT_S))
        of_agents = dist.PrefixStore(os.environ["TORCHELASTIC_RUN_ID"], store)
        for _ in agents:
            barrier_of_agents(barriers)(of_agents, int(os.environ["GROUP_WORLD_SIZE"]), end_of_agents(api))
