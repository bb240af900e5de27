"""What is checked before a run: data, model, memory, the module's own steps; and what is compiled for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_gnn.checks.alike import check_alike, module_and_trainer, optimizers_and_schedulers
from lightning_gnn.checks.unregistered import unregistered, unregistered_in_loss
from lightning_gnn.comm.group import raise_together
from lightning_gnn.data.shards import Shard
from lightning_gnn.datamodules.graph import GraphDataModule, check_fits, check_links
from lightning_gnn.kernels.warm_up import warm_up
from lightning_gnn.nn.convs import kernel_groups
from lightning_gnn.strategy.graph_kinds import check_for_layout, predicts_memory
from lightning_gnn.strategy.memory import check_memory, check_own_memory
from lightning_gnn.strategy.run_config import log_run

if TYPE_CHECKING:
    from lightning_gnn.strategy.base import GNNStrategy


class RunChecks(pl.Callback):
    """Refuses what has changed since the stage began, and ranks would not follow, before the next epoch's first step.

    Beside the graph, that is what optimizers hold, in callbacks that unfreeze layers, say. Looks at it again where groups of
    parameters have come or gone, and in the first step at what its loss comes from.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._before: list[Tensor] = []
        self._steps = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before = list(pl_module.parameters())

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        sizes = [len(group["params"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if trainer.world_size > 1 and (batch_idx == 0 or sizes != self._sizes):
            self._sizes = sizes
            failure = unregistered(pl_module, trainer.optimizers, self._before)
            if failure is not None:
                raise failure
        if batch_idx == 0:
            self._check_graph(trainer.datamodule)  # type: ignore[attr-defined]

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if trainer.world_size > 1 and self._steps == 0:
            failure = unregistered_in_loss(pl_module, loss)
            if failure is not None:
                raise failure

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self._steps += 1

    def _check_graph(self, data: GraphDataModule) -> None:
        changed = data.changed_in_stage()
        if changed:
            raise ValueError(
                f"{', '.join(changed)} of the graph that was given to GraphDataModule changed in place during fit. Ranks go on "
                "with the graph as it was when fit began, and one device would train on the changed one. Change the graph "
                "between calls of the Trainer, or, for one step, a copy in its batch: "
                f"batch.{changed[0]} = batch.{changed[0]}.clone()."
            )


def before_ranks_start(
    strategy: GNNStrategy, trainer: pl.Trainer, given: Sequence[Any], self_check: bool, must_fit: bool
) -> None:
    """See :meth:`~lightning_gnn.strategy.base.GNNStrategy.before_ranks_start`; `must_fit`: into this machine's memory."""
    module = next((value for value in given if isinstance(value, pl.LightningModule)), trainer.lightning_module)
    data = next((value for value in given if isinstance(value, pl.LightningDataModule)), None)
    data = strategy.check_data(data or getattr(trainer, "datamodule", None))
    if module is None:
        return  # Lightning says so
    layout = strategy.layout()
    if not layout.samples:  # else the graph decides what the model may be
        check_for_layout(module, layout)
    if strategy.num_nodes > 1:
        return  # the graph comes to machines when their ranks have met, and none waits for one that stops here
    data.prepare_ahead(layout)
    cut = data.stored_cut()
    check_fits(module, cut)
    check_links(module, cut, layout.samples)
    strategy.check_model(module, cut)
    if not layout.reads_edges(cut.types):
        return
    _warm_up(strategy, module, trainer)
    if must_fit and predicts_memory(cut):
        check_memory(strategy, data, module, trainer)
    if self_check:
        strategy._checks.ahead(module, cut, trainer)


def before_stage(strategy: GNNStrategy, module: pl.LightningModule, shard: Shard, trainer: pl.Trainer) -> None:
    """Checks on ranks, whose parts of the graph are there."""
    check_alike(strategy.world, module_and_trainer(module, trainer))
    strategy.check_model(module, shard)
    if not strategy.binds(shard):
        return
    # One rank of a machine compiles, and the others load what it has kept.
    if strategy.local_rank == 0:
        _warm_up(strategy, module, trainer)
    strategy.world.barrier()
    if strategy.local_rank != 0:
        _warm_up(strategy, module, trainer)
    strategy._checks.before_stage(module, shard, trainer)
    if predicts_memory(shard):
        check_own_memory(strategy, trainer, shard)


def check_optimizers(strategy: GNNStrategy, trainer: pl.Trainer) -> None:
    """Refuses, on all ranks, what a module's ``configure_optimizers`` has returned, if ranks could not train it together."""
    failure: ValueError | None = None
    if strategy.trains_on_batches and any(isinstance(each, torch.optim.LBFGS) for each in strategy.optimizers):
        failure = ValueError(
            "LBFGS decides by the loss of a rank's own batch how far to step. Use Adam, AdamW or SGD, or a strategy whose "
            "steps are of the whole graph."
        )
    elif strategy.world_size > 1:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        failure = data.trained_by(strategy.optimizers) or unregistered(strategy._module, strategy.optimizers)
    raise_together(strategy.world, failure, "The optimizers cannot be used on ranks")
    made = optimizers_and_schedulers(strategy._module, strategy.optimizers, strategy.lr_scheduler_configs)
    check_alike(strategy.world, made)


def take_shard(strategy: GNNStrategy, trainer: pl.Trainer) -> Shard:
    """Returns this rank's part of the graph, and tells the loggers what is trained on it."""
    shard = strategy.check_data(getattr(trainer, "datamodule", None)).shard
    log_run(strategy, trainer, shard)
    return shard


def _warm_up(strategy: GNNStrategy, module: pl.LightningModule, trainer: pl.Trainer) -> None:
    """Compiles what layers run, unless PyG's own code runs in all steps: then there is none to check either."""
    if strategy.root_device.type != "cpu" or not strategy.checked_stages(trainer):
        return
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if "bf16" in str(trainer.precision):
        dtypes.add(torch.bfloat16)
    seconds = warm_up(kernel_groups(module), dtypes, [each.warm_up for each in strategy.transport_wrappers()])
    if seconds:
        rank_zero_info(f"Compiled in {seconds:.1f} s")
