"""Simulation of training steps of all ranks in one process: threads in turns, with timed computation and counted messages.

The scheme's own code runs on the user's graph and model, so no formulas of its traffic are needed. It takes the memory of all
ranks together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.checks.footprint import Footprint, RankStep
from lightning_gnn.checks.stand_ins import QuietTrainer, copy_module, isolate, join_results, quiet
from lightning_gnn.checks.trial import Bind
from lightning_gnn.comm.group import World
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.data.shards import Shard
from lightning_gnn.heap import keeping_freed_memory

STEPS = 4
"""Number of simulated steps; the first fills caches, and the median of the others is used, per computation."""


@dataclass(frozen=True)
class Compute:
    """Computation of a rank, in seconds of one core or of all its cores."""

    seconds: float


@dataclass(frozen=True)
class Send:
    """Message sent by a rank, which does not wait for it."""

    to: int
    num_bytes: int


@dataclass(frozen=True)
class Take:
    """Wait of a rank for the next message from another rank."""

    sender: int


Event: TypeAlias = Compute | Send | Take


@dataclass(frozen=True)
class Rehearsal:
    """Recorded step, after caches are filled.

    Attributes:
        events: events of each rank, in order.
        footprints: memory of each rank, ``[P]``.
    """

    events: tuple[tuple[Event, ...], ...]
    footprints: tuple[Footprint, ...]

    @property
    def bytes_sent(self) -> tuple[int, ...]:
        """Bytes sent by each rank, ``[P]``."""
        return tuple(sum(event.num_bytes for event in each if isinstance(event, Send)) for each in self.events)

    @property
    def messages(self) -> int:
        return sum(isinstance(event, Send) for each in self.events for event in each)

    @property
    def compute_seconds(self) -> tuple[float, ...]:
        """Computation of each rank, in seconds, ``[P]``."""
        return tuple(sum(event.seconds for event in each if isinstance(event, Compute)) for each in self.events)


class _Recorder(Meeting):
    """Meeting that records the events of ranks, step by step."""

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        super().__init__(size)
        self._clock = clock
        self.steps: list[list[list[Event]]] = [[] for _ in range(size)]
        self._since = [0.0] * size

    def begin(self, rank: int) -> None:
        self.steps[rank].append([])
        self._since[rank] = self._clock()

    def note(self, rank: int, event: Event | None = None) -> None:
        """Record the computation of a rank since its last event, and this event."""
        if self.steps[rank]:
            self.steps[rank][-1].append(Compute(self._clock() - self._since[rank]))
            if event is not None:
                self.steps[rank][-1].append(event)

    @override
    def post(self, sender: int, receiver: int, value: Any) -> None:
        self.note(sender, Send(receiver, value.nbytes if isinstance(value, Tensor) else 0))
        super().post(sender, receiver, value)
        self._since[sender] = self._clock()

    @override
    def take(self, receiver: int, sender: int) -> Any:
        self.note(receiver, Take(sender))
        value = super().take(receiver, sender)
        self._since[receiver] = self._clock()
        return value


def rehearse(
    module: pl.LightningModule,
    shards: Sequence[Shard],
    bind: Bind,
    trainer: pl.Trainer,
    threads: int = 1,
    prepare: Callable[[World], AbstractContextManager[None]] | None = None,
) -> Rehearsal:
    """Run a few training steps on all ranks and return one recorded step.

    Args:
        module: unbound module; copies of it run.
        shards: shard of each rank, on the CPU.
        bind: function with which the scheme binds a module to a rank's shard.
        trainer: value of ``self.trainer`` in the step; its loggers receive nothing.
        threads: number of threads of each rank. With one, CPU time is measured, which other processes do not affect; otherwise,
            wall-clock time.
        prepare: called with each rank's world before the module is bound; the returned context manager is open during steps.

    Raises:
        RuntimeError: if the step does not run, or the exchanges of the ranks do not match; the cause is the first error.
    """
    recorder = _Recorder(len(shards), time.thread_time if threads == 1 else time.perf_counter)

    def on_rank(rank: int) -> Footprint:
        world = InProcessWorld(rank, recorder)
        prepared = nullcontext() if prepare is None else prepare(world)
        model = quiet(copy_module(module).cpu(), QuietTrainer(trainer, "fit"))
        step = RankStep(model, shards[rank], world, bind)
        parameters = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=0.0)  # stands in for the module's optimizer: it takes about as long
        with step.bound(), prepared:
            for number in range(STEPS):
                recorder.begin(rank)
                step.binding.context.begin_step()
                step.run(counts=number == 0)
                _sum_gradients(parameters, world)
                optimizer.step()
                if number == 0:
                    footprint = step.footprint()
                optimizer.zero_grad()
                recorder.note(rank)
        step.release()
        return footprint

    with isolate(), keeping_freed_memory(), ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        ran = recorder.run(on_rank)
    footprints = join_results(ran)
    return Rehearsal(tuple(_median(steps[1:]) for steps in recorder.steps), tuple(footprints))


def _sum_gradients(parameters: Sequence[Tensor], world: World) -> None:
    gradients = [each.grad for each in parameters if each.grad is not None]
    if world.size > 1 and gradients:
        world.all_reduce_(torch.cat([each.reshape(-1) for each in gradients]))


def _median(steps: Sequence[Sequence[Event]]) -> tuple[Event, ...]:
    """Returns a step with the median of each computation, if all steps have the same events; else the last step."""
    shapes = {tuple(None if isinstance(event, Compute) else event for event in step) for step in steps}
    if len(shapes) > 1:
        return tuple(steps[-1])
    return tuple(
        Compute(median(each.seconds for each in events if isinstance(each, Compute)))
        if isinstance(events[0], Compute)
        else events[0]
        for events in zip(*steps)
    )
