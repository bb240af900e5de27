"""Launcher whose ranks continue without lost ranks; the process that starts them is not a rank."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_gnn.comm.processes import current_progress
from lightning_gnn.extensions.elastic.environment import Place, take_place
from lightning_gnn.extensions.elastic.hosts import Hosts
from lightning_gnn.extensions.elastic.loggers import start_runs
from lightning_gnn.extensions.elastic.recovery import Departure, End, Generation
from lightning_gnn.extensions.elastic.restarts import KeptStates
from lightning_gnn.extensions.elastic.supervision import Supervision
from lightning_gnn.extensions.elastic.support import check_strategy
from lightning_gnn.launching.script import ScriptLauncher
from lightning_gnn.launching.supervisor import Reporter, Supervisor


class ElasticLauncher(ScriptLauncher):
    """Launcher of ranks that run the script, of which some may be lost.

    The process that runs the script first supervises the ranks until they end, and ends with them. It serves the store in which
    ranks meet, since every rank may be lost.
    """

    _first_rank = 0
    _strategy: Any
    _supervision: Supervision | None = None
    # State of the process, shared by all launchers
    _calls = 0
    _place: Place | None = None
    _joins: Generation | None = None

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        check_strategy(strategy, strategy.recovery.min_ranks, self._script.reporter is not None)

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        reporter, recovery, of_process = self._script.reporter, self._strategy.recovery, ElasticLauncher
        of_process._calls += 1
        call = of_process._calls
        if reporter is not None:
            self._take_place(reporter)
            current_progress().outlives_others = True
            reporter.send("began", call)
            joins, of_process._joins = of_process._joins, None
            recovery.must_change = reporter.has_request
            runs: Callable[..., Any] = partial(
                recovery.run, function, trainer, partial(self._meet, call), partial(self._send, call), joins
            )
        elif os.environ.get("TORCHELASTIC_RUN_ID"):
            runs = partial(recovery.resume, function, trainer, self._states(), call)
        else:
            start_runs(trainer)
            runs = function
        return super().launch(runs, *args, trainer=trainer, **kwargs)

    def _take_place(self, reporter: Reporter) -> None:
        """Take the place of this rank, for the first call of a strategy in this process."""
        script, of_process = self._script, ElasticLauncher
        if script.waits:
            script.waits = False
            generation: Generation = reporter.wait_for_start()[reporter.rank]
            of_process._place, of_process._joins = generation.place, generation if generation.source >= 0 else None
        assert of_process._place is not None
        take_place(self._strategy, of_process._place)
        reporter.rank, script.size = of_process._place.rank, None

    def _states(self) -> KeptStates:
        """Returns the states of fits outside of the ranks that torchrun started, and sets torchrun's number of ranks."""
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        self._strategy.parallel_devices = self._strategy.parallel_devices[:1] * here
        self._strategy.num_nodes = int(os.environ["WORLD_SIZE"]) // here
        return KeptStates(os.getppid(), os.environ["LOCAL_RANK"] == "0")

    def _send(self, call: int, event: str, value: Any) -> None:
        """Send an event of a call of the Trainer to the supervisor."""
        assert self._script.reporter is not None
        self._script.reporter.send(event, (call, value))

    def _meet(self, call: int, epochs: Sequence[int], finished: bool) -> Generation | End:
        """Returns the next generation, after this rank has left or finished a call; the end if the run cannot continue."""
        reporter = self._script.reporter
        assert reporter is not None
        try:
            generation: Generation | End = reporter.ask(
                "left", Departure(call, epochs, finished, self._strategy.recovery.min_ranks)
            )
        except (EOFError, OSError):  # the supervisor has ended
            return End()
        if isinstance(generation, Generation):
            ElasticLauncher._place, reporter.rank = generation.place, generation.place.rank
        return generation

    @override
    def _begin_ranks(self, supervisor: Supervisor, size: int, seconds: float) -> int:
        address, timeout_s = self._strategy.cluster_environment.main_address, self._strategy.timeout.total_seconds()
        self._supervision = Supervision(supervisor, Hosts(address, 0, (1, 1), timeout_s), timeout_s)
        return self._supervision.start(seconds)

    @override
    def _as_parent(self, supervisor: Supervisor, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        supervision = self._supervision
        assert supervision is not None
        signal.signal(signal.SIGTERM, lambda number, _: supervision.forward(number))
        ctypes.pythonapi.Py_Exit(supervision.run())
