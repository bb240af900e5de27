"""Checks before and during a run: whether ranks give, and continue to give, the results of one device.

Most imports are local: only runs with several ranks need them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gnn import devices
from lightning_gnn.callbacks.loggers import log_values
from lightning_gnn.comm.group import World, raise_together
from lightning_gnn.data.lazy_ids import stored_ids
from lightning_gnn.data.shards import Cut, Shard
from lightning_gnn.datamodules.graph import GraphDataModule
from lightning_gnn.strategy.memory import PLENTY
from lightning_gnn.strategy.scheme import Run

if TYPE_CHECKING:
    from lightning_gnn.checks.self_check import SelfCheck

_trained: WeakSet[pl.LightningModule] = WeakSet()
"""Modules with which a stage has begun: their attributes may contain values of one rank."""


class Checks(pl.Callback):
    """Checks before a stage.

    One rank runs the self-check of a step and broadcasts the outcome. ``check/seconds`` is the time of the self-check.
    """

    def __init__(self) -> None:
        self._outcomes: Mapping[str, SelfCheck] = {}
        self._is_checked = False  # checked before ranks started
        self._seconds = 0.0

    def check_ahead(self, run: Run, cut: Cut) -> None:
        """Run the self-check in the process that starts the ranks."""
        from lightning_gnn.strategy.self_checks import checkers, outcome_of, report_outcomes

        found = checkers(run, cut.shard(0))
        outcomes = {stage: outcome_of(run, cut.shard(rank), stage) for stage, rank in found.items()}
        # Otherwise the check is repeated on the ranks: setup() of the module may create its layers.
        if all(outcome.not_run is None for outcome in outcomes.values()):
            self._seconds += report_outcomes(run, outcomes)
            self._outcomes, self._is_checked = outcomes, True

    def memory_ahead(self, run: Run, cut: Cut) -> None:
        """Check the memory of this machine's CPU ranks, in the process that starts them."""
        from lightning_gnn.strategy.memory_checks import check_memory

        check_memory(run, cut)

    def module_alike(self, run: Run, world: World) -> None:
        """Raises an error on all ranks if modules or Trainers differ between ranks."""
        has_begun = run.module in _trained
        _trained.add(run.module)
        if world.size > 1:
            from lightning_gnn.checks.alike import check_alike, module_and_trainer

            check_alike(world, module_and_trainer(run.module, run.trainer, has_begun))

    def before_stage(self, run: Run, world: World, shard: Shard) -> None:
        """Run the self-check on ranks, unless it ran before they started, and check their memory."""
        is_checked, self._is_checked = self._is_checked, False
        if world.size > 1 and world.broadcast_object(is_checked):
            # The process that started the others may have these outcomes, and checks them again later.
            self._outcomes = world.broadcast_object(self._outcomes)
        elif world.size > 1:
            from lightning_gnn.strategy.self_checks import outcomes_of_ranks, report_outcomes

            self._outcomes = outcomes_of_ranks(run, world, shard)
            self._seconds = report_outcomes(run, self._outcomes)
        if _may_lack_memory(run, shard):
            from lightning_gnn.strategy.memory_checks import check_own_memory

            check_own_memory(run, world, shard)

    def optimizers(
        self, run: Run, world: World, data: GraphDataModule, optimizers: Sequence[Optimizer], schedulers: Iterable[Any]
    ) -> None:
        """Raises an error on all ranks if ranks cannot train the result of ``configure_optimizers`` together."""
        failure: ValueError | None = None
        if run.on_batches and any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
            failure = ValueError(
                "LBFGS is not supported on batches: its line search uses the loss of a rank's own batch. Use Adam, AdamW or SGD, "
                "or a strategy with full-graph steps."
            )
        elif run.world_size > 1:
            from lightning_gnn.checks.unregistered import find_unregistered

            failure = data.trained_by(optimizers) or find_unregistered(run.module, optimizers)
        raise_together(world, failure, "The optimizers cannot be used on ranks")
        if world.size > 1:
            from lightning_gnn.checks.alike import check_alike, optimizers_and_schedulers

            check_alike(world, optimizers_and_schedulers(run.module, optimizers, schedulers))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._outcomes:
            log_values(trainer, {"check/seconds": self._seconds})


class RunChecks(pl.Callback):
    """Raises an error before the first step of an epoch if changes since the start of the stage are not supported.

    Checked are the graph and the parameters in optimizers, which callbacks may change, for example to unfreeze layers. Optimizers
    are checked again if parameter groups change. In the first step, the inputs of the loss are checked too.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._before: list[Tensor] = []
        self._steps = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before = list(pl_module.parameters())

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        sizes = [len(group["params"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if trainer.world_size > 1 and (batch_idx == 0 or sizes != self._sizes):
            from lightning_gnn.checks.unregistered import find_unregistered

            self._sizes = sizes
            failure = find_unregistered(pl_module, trainer.optimizers, self._before)
            if failure is not None:
                raise failure
        if batch_idx == 0:
            _check_graph(trainer.datamodule)  # type: ignore[attr-defined]

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if trainer.world_size > 1 and self._steps == 0:
            from lightning_gnn.checks.unregistered import find_unregistered_in_loss

            failure = find_unregistered_in_loss(pl_module, loss)
            if failure is not None:
                raise failure

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self._steps += 1


def _may_lack_memory(run: Run, shard: Shard) -> bool:
    """Returns whether to predict the memory of this rank; several CPU ranks were checked before they started."""
    if run.device.type != "cpu":
        return run.keeps_activations
    if run.world_size > 1 or not run.keeps_activations:
        return False
    available, values = devices.available_bytes(), (each for store in shard.batch.stores for each in store.values())
    held = sum(stored_ids(each).nbytes for each in values if isinstance(each, Tensor))
    return available is not None and (run.samples is not None or available < PLENTY * held)


def _check_graph(data: GraphDataModule) -> None:
    changed = data.changed_in_stage()
    if changed:
        raise ValueError(
            f"{', '.join(changed)} of the graph that was given to GraphDataModule changed in place during fit. Ranks "
            "train on the graph as it was at the start of fit; a single device would train on the changed graph. Change the "
            "graph between calls of the Trainer or, for one step, replace it in the step's batch first: "
            f"batch.{changed[0]} = batch.{changed[0]}.clone()."
        )
