"""The rank's side of elastic training: calls of the Trainer that begin again without lost ranks, or with other owners."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torchmetrics import Metric
from typing_extensions import override

from lightning_gnn.arguments import check_whole
from lightning_gnn.comm.group import forget_stores, gather_numbers, is_about_peers
from lightning_gnn.comm.watchdog import CommunicationError
from lightning_gnn.data.shards import JoinedGraph
from lightning_gnn.extensions.elastic.balance import Balance, OwnersChange, moved_owners
from lightning_gnn.extensions.elastic.connections import Connections
from lightning_gnn.extensions.elastic.environment import Place, take_place
from lightning_gnn.extensions.elastic.files import CheckpointFiles
from lightning_gnn.extensions.elastic.loggers import Logs
from lightning_gnn.extensions.elastic.ownership import give_to_survivors, move_work, owners_in, work_of_nodes
from lightning_gnn.extensions.elastic.restarts import KeptStates
from lightning_gnn.extensions.elastic.snapshots import Flags, Snapshots
from lightning_gnn.extensions.elastic.support import check_run
from lightning_gnn.lightning_packages import is_instance
from lightning_gnn.private_lightning import SAVED_AT, SAVED_FILE, tear_down
from lightning_gnn.steps.loop import RanksChange
from lightning_gnn.steps.metrics import metrics_in

END_OF_CALL = 2**62
"""Epoch with which rank 0 sends positions of loggers at the end of a call."""

IN_MEMORY = "the start of the interrupted epoch, in memory"
"""``ckpt_path`` of a fit that begins again."""

_STAGES = {
    TrainerFn.FITTING: "training",
    TrainerFn.VALIDATING: "validating",
    TrainerFn.TESTING: "testing",
    TrainerFn.PREDICTING: "predicting",
}


@dataclass(frozen=True)
class Generation:
    """Ranks of a run between two changes, as one of its ranks receives it.

    Attributes:
        number: number of changes before.
        place: place of the receiving rank.
        new_ranks: by the rank in the last generation, the rank in this one; None for a lost rank.
        again: whether the call of the Trainer begins again.
        source: rank whose state all ranks take; -1 for none.
        epoch: epoch that begins again; -1 for the start of the call.
        positions: positions of the loggers at its start, see :class:`~lightning_gnn.extensions.elastic.loggers.Logs`.
    """

    number: int
    place: Place
    new_ranks: Sequence[int | None] = ()
    again: bool = True
    source: int = -1
    epoch: int = -1
    positions: Any = None


@dataclass(frozen=True)
class End:
    """End of a run whose ranks cannot continue.

    Attributes:
        epoch: epoch whose state the receiving rank writes to a file; -1 for none.
    """

    epoch: int = -1


@dataclass(frozen=True)
class Departure:
    """Departure of a rank from a generation.

    Attributes:
        call: number of the call of the Trainer.
        epochs: epochs whose states the rank has.
        finished: whether the call has ended.
        least: least number of ranks that continue.
    """

    call: int
    epochs: Sequence[int]
    finished: bool
    least: int


class _Steps(pl.Callback):
    """Callback that removes checkpoints of earlier epochs when a step shows that all ranks have begun the epoch."""

    def __init__(self, settle: Callable[[int], None]) -> None:
        self._settle = settle

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._settle(trainer.current_epoch)


def _drop_frames(error: BaseException | None) -> None:
    """Drop the frames of an error and of errors before it, which refer to connections."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


class Recovery:
    """Elastic training on one rank.

    Args:
        strategy: strategy of the run.
        min_ranks: least number of ranks that continue.
        balance: whether owners follow the speed of ranks, or the relative speed of each rank.

    Attributes:
        must_change: function that returns, on rank 0, whether other ranks join.
    """

    must_change: Callable[[], bool] = staticmethod(bool)

    def __init__(self, strategy: Any, min_ranks: int, balance: bool | Sequence[float] = False) -> None:
        check_whole(1, min_ranks=min_ranks)
        self._strategy, self.min_ranks = strategy, min_ranks
        self.balance = None if balance is False else Balance(None if balance is True else balance)
        self.snapshots, self.files = Snapshots(), CheckpointFiles()
        self._logs: Logs | None = None
        self._number = 0
        self._new_ranks: Sequence[int | None] | None = None  # since the nodes were moved last
        self._source, self._positions = (-1, -1), None
        self._joined: Generation | None = None  # until an epoch begins
        self._trainer: Any = None
        self._flags: list[list[bool]] = [[], []]

    def check(self, trainer: pl.Trainer, module: torch.nn.Module) -> None:
        """Raises ValueError if elastic training does not support a part of a run."""
        check_run(trainer, module)

    def check_balance(self) -> None:
        """Raises ValueError if the option `balance` does not support the strategy of the run; devices are known."""
        if self.balance is not None:
            self.balance.check(self._strategy)

    def resume(self, function: Callable[..., Any], trainer: Any, states: KeptStates, call: int, *args: Any) -> Any:
        """Returns ``function(*args)``, which continues a fit that ended with all its ranks, if one of them has kept its state.

        Args:
            function: function of the Trainer's call.
            trainer: the Trainer.
            states: states outside of the ranks.
            call: number of the call in this process.
            args: arguments of the call.
        """
        strategy = self._strategy
        self.check(trainer, trainer.lightning_module)
        self.snapshots, self._trainer = Snapshots(states.load(call), partial(states.save, call)), trainer
        self.files = CheckpointFiles()
        if trainer.state.fn == TrainerFn.FITTING:
            epochs = gather_numbers(strategy.global_rank, strategy.world_size, strategy.timeout, self.snapshots.epoch)
            if max(epochs) >= 0:
                self._source = epochs.index(max(epochs)), max(epochs)
                args = (*args[:4], IN_MEMORY, *args[5:])
        result = self._run_balanced(function, args)
        self._settle(math.inf)
        return result

    def run(
        self,
        function: Callable[..., Any],
        trainer: Any,
        meet: Callable[[Sequence[int], bool], Generation | End],
        send: Callable[[str, Any], None],
        joins: Generation | None,
        *arguments: Any,
    ) -> Any:
        """Returns ``function(*arguments)``, which begins again after a lost rank, or when hosts join.

        Args:
            function: function of the Trainer's call.
            trainer: the Trainer.
            meet: function that returns the next generation, given the epochs whose states this rank has and whether the call has
                ended; the end if the run cannot continue.
            send: function that sends an event to the supervisor.
            joins: generation in which this rank joins others; None if all ranks start.
            arguments: arguments of the call.

        Raises:
            CommunicationError: the run cannot continue.
        """
        if trainer.lightning_module is None:
            return function(*arguments)  # Lightning raises an error
        self.check(trainer, trainer.lightning_module)
        self._flags = Flags(trainer.lightning_module).state()
        self._trainer, self.snapshots, self.files = trainer, Snapshots(begin=self._begin_epoch), CheckpointFiles()
        self._logs = logs = Logs(trainer, lambda epoch, positions: send("epoch", (epoch, positions)))
        args: Sequence[Any] = arguments
        if joins is not None:
            self._join(joins)
            args = self._again(arguments)
        while True:
            result, cause = None, None
            try:
                result = self._run_balanced(function, args)
                logs.begin(END_OF_CALL)
            except Exception as error:
                if not (is_about_peers(error) or isinstance(error, RanksChange)):
                    self._give_up(error)
                    raise
                cause = error
            if cause is not None:
                _drop_frames(cause)
                self._leave()
            # All ranks return, or none: a rank in the next call could not repeat this one with the others.
            generation = meet(self.snapshots.epochs, cause is None)
            if isinstance(generation, End):
                if generation.epoch >= 0:
                    send("saved", self._save(generation.epoch))
                raise cause or CommunicationError("Other ranks cannot end this call of the Trainer, see their errors.")
            if generation.number > self._number:
                self._join(generation)
            if not generation.again:
                self._joined = None
                self._settle(math.inf)
                return result
            args = self._again(arguments)

    def _run_balanced(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Returns ``function(*args)``, which begins again when owners change."""
        if self.balance is not None:
            self.balance.begin(self.balance.shares if self._new_ranks is not None else None)
        while True:
            self._connections = Connections()
            try:
                return function(*args)
            except OwnersChange as change:
                shares = change.shares
            finally:
                self._connections.close()
            assert self.balance is not None
            self.balance.begin(shares)
            self._leave()
            self._new_ranks = range(self._strategy.world_size)
            self._source, self._positions, self._strategy.self_check = (0, self.snapshots.epoch), None, False
            args = self._again(args)

    def _begin_epoch(self, epoch: int) -> None:
        self._joined = None
        if self._logs is not None:
            self._logs.begin(epoch)

    def _settle(self, epoch: float) -> None:
        self.files.settle(epoch, self._io)

    @property
    def _io(self) -> Any:
        """Checkpoint IO on rank 0; None on other ranks."""
        return self._strategy.checkpoint_io if self._strategy.is_global_zero else None

    def _save(self, epoch: int) -> str:
        """Write the state of an epoch as a checkpoint; returns its path."""
        path = str(Path(self._trainer.default_root_dir) / "elastic.ckpt")
        self._strategy.checkpoint_io.save_checkpoint(self.snapshots.at(epoch)["checkpoint"], path)
        return path

    def _give_up(self, error: Exception) -> None:
        """Write a checkpoint, and raise an error that names it, if the ranks that remain cannot begin the epoch again."""
        joined, self._joined = self._joined, None
        if joined is not None and self.snapshots.epochs:
            path = self._save(joined.epoch)
            raise RuntimeError(
                f"A rank was lost, and {joined.place.size} ranks cannot continue, for the reason above. The state at the begin "
                f'of epoch {joined.epoch} is in {path}: continue with trainer.fit(..., ckpt_path="{path}").'
            ) from error

    def _leave(self) -> None:
        """Leave the ranks, and undo the set-up of the call."""
        with suppress(RuntimeError):  # the ranks have not been connected
            self._strategy.world.close()
        tear_down(self._trainer)()
        gc.collect()  # connections close with their last reference, and others may wait for this rank

    def _join(self, generation: Generation) -> None:
        before = range(len(generation.new_ranks)) if self._new_ranks is None else self._new_ranks
        if len(generation.new_ranks) < generation.place.size:  # hosts join, whose ranks know no earlier changes
            before = range(len(generation.new_ranks))
        self._new_ranks = [None if rank is None else generation.new_ranks[rank] for rank in before]
        self._number, self._joined = generation.number, generation
        self._source, self._positions = (generation.source, generation.epoch), generation.positions
        if self.balance is not None:
            self.balance.renumber(generation.new_ranks)
        forget_stores()
        take_place(self._strategy, generation.place)
        self._strategy.self_check = False

    def _again(self, args: Sequence[Any]) -> Sequence[Any]:
        """Returns the arguments with which the call begins again."""
        trainer, (source, epoch) = self._trainer, self._source
        trainer.num_sanity_val_steps = 0
        trainer.state.status = TrainerStatus.RUNNING
        setattr(trainer, _STAGES[trainer.state.fn], True)
        Flags(trainer.lightning_module).load(self._flags)
        for metric in metrics_in([trainer.lightning_module, *trainer.callbacks]):
            if isinstance(metric, Metric):
                metric.reset()
        if trainer.state.fn != TrainerFn.FITTING:
            return args
        trainer.should_stop = False
        self.files.repeat(epoch, self._io)
        for callback in trainer.callbacks:
            if is_instance(callback, "callbacks.ModelCheckpoint"):  # otherwise it skips steps that it has saved
                setattr(callback, SAVED_AT, 0)
                setattr(callback, SAVED_FILE, "")
        return args if source < 0 else [*args[:4], IN_MEMORY, *args[5:]]

    def callbacks(self) -> list[pl.Callback]:
        """Returns the callbacks of a stage."""
        return [self.snapshots, _Steps(self._settle), *([] if self.balance is None else [self.balance])]

    def move_nodes(self) -> None:
        """Continue loggers, and move nodes, once the ranks of a call are connected; collective."""
        self._connections.watch()
        world, data, new_ranks = self._strategy.world, self._trainer.datamodule, self._new_ranks
        if self._logs is not None:
            self._logs.share_versions(world)
            if new_ranks is not None:
                self._logs.continue_at(self._positions)
            self._logs.begin(-1)
        if new_ranks is None:
            return
        balance = self.balance if self.balance is not None and self.balance.shares is not None and world.size > 1 else None
        part, edges = None, None
        # Rank 0 decides: if it was lost while nodes were moved, others may have received their new owners, or not yet.
        if world.rank == 0 and (balance is not None or list(new_ranks) != list(range(world.size))):
            data.remove_remains()
            owners = data.partition
            if not isinstance(owners, np.ndarray) and data.is_stored:
                owners = owners_in(data.stored_cut())
            if isinstance(owners, np.ndarray):
                edges = JoinedGraph.of(data.load()).edge_index
                part = give_to_survivors(edges, owners, new_ranks, world.size, data.seed)
                if len(new_ranks) < world.size:  # ranks join
                    part = move_work(edges, part, work_of_nodes(edges, len(part)), np.ones(world.size))
        if balance is not None:
            part = moved_owners(balance, self._strategy, self._trainer, edges, part)
        part = world.broadcast_object(part)
        data.partition = data.partition if part is None else part
        self._new_ranks = None

    def load(self, path: Any) -> dict[str, Any] | None:
        """Returns the checkpoint in memory; None for another path. Collective."""
        return self.snapshots.state(self._strategy.world, *self._source) if path == IN_MEMORY else None
