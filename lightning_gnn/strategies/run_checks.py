"""What is checked before a run: data, model, memory, the module's own steps; and what is compiled for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gnn.data.hetero import NO_TYPES
from lightning_gnn.data.shards import Shard
from lightning_gnn.datamodules.graph import check_fits
from lightning_gnn.kernels.warm_up import warm_up
from lightning_gnn.nn.bind import check_module
from lightning_gnn.nn.fused import kernel_groups
from lightning_gnn.strategies.memory import check_memory, check_own_memory
from lightning_gnn.strategies.run_config import log_run
from lightning_gnn.strategies.self_checks import SelfChecks

if TYPE_CHECKING:
    from lightning_gnn.strategies.base import GNNStrategy


class RunChecks:
    """Checks a run of a strategy."""

    def __init__(self, strategy: GNNStrategy) -> None:
        self._strategy = strategy
        self.self_checks = SelfChecks(strategy)

    def before_ranks_start(self, trainer: pl.Trainer, given: Sequence[Any], self_check: bool) -> None:
        """See :meth:`~lightning_gnn.strategies.base.GNNStrategy.before_ranks_start`."""
        strategy = self._strategy
        module = next((value for value in given if isinstance(value, pl.LightningModule)), trainer.lightning_module)
        data = next((value for value in given if isinstance(value, pl.LightningDataModule)), None)
        data = strategy.check_data(data or getattr(trainer, "datamodule", None))
        if module is None:
            return  # Lightning says so
        layout = strategy.layout()
        if not layout.takes_types:  # else the graph decides what the model may be
            check_module(module)
        data.prepare_for(layout)
        types = data.stored_cut().types
        check_fits(module, types)
        strategy.check_model(module, types)
        if types.is_hetero:
            return
        self._warm_up(module, trainer)
        check_memory(strategy, data, module, trainer)
        if self_check:
            self.self_checks.ahead(module, data.stored_cut(), trainer)

    def before_stage(self, module: pl.LightningModule, shard: Shard, trainer: pl.Trainer) -> None:
        """Checks on ranks, whose parts of the graph are there."""
        strategy = self._strategy
        strategy.check_model(module, shard.types)
        if not strategy.binds(shard):
            return
        # One rank of a machine compiles, and the others load what it has kept.
        if strategy.local_rank == 0:
            self._warm_up(module, trainer)
        strategy.world.barrier()
        if strategy.local_rank != 0:
            self._warm_up(module, trainer)
        self.self_checks.before_stage(module, shard, trainer)
        check_own_memory(strategy, trainer, shard)

    def take_shard(self, trainer: pl.Trainer) -> Shard:
        """Returns this rank's part of the graph, and tells the loggers what is trained on it."""
        strategy = self._strategy
        shard = strategy.check_data(getattr(trainer, "datamodule", None)).shard
        digests = strategy.world.all_gather_object(shard.digest)
        if len(set(digests)) > 1:
            raise RuntimeError(
                f"The ranks hold parts of different partitions (digests {digests}): machines with stores of their own have "
                "partitioned differently. Put the store on a file system that all share, GraphDataModule(store=...)."
            )
        log_run(strategy, trainer, shard)
        return shard

    def ahead_of_stage(self, module: pl.LightningModule, shard: Shard, trainer: pl.Trainer) -> None:
        """Checks what :meth:`before_stage` would refuse later; on the ranks of another strategy."""
        strategy = self._strategy
        if shard.types.is_hetero and not strategy.layout().takes_types:
            raise ValueError(NO_TYPES)
        strategy.check_model(module, shard.types)
        if not shard.types.is_hetero:
            self.self_checks.before_stage(module, shard, trainer)
            self.self_checks.done = True

    def _warm_up(self, module: pl.LightningModule, trainer: pl.Trainer) -> None:
        """Compiles what layers run, unless PyG's own code runs in all steps: then there is none to check either."""
        strategy = self._strategy
        if strategy.root_device.type != "cpu" or not strategy.checked_stages(trainer):
            return
        dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        if "bf16" in str(trainer.precision):
            dtypes.add(torch.bfloat16)
        groups = kernel_groups(module) | ({"codes"} if strategy.codec is not None else set())
        seconds = warm_up(groups, dtypes)
        if seconds:
            rank_zero_info(f"Compiled in {seconds:.1f} s")
