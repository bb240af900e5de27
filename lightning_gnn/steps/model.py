"""The model that all ranks have alike: gradients are summed, copies compared, learned rows left to their owners."""

from __future__ import annotations

from collections.abc import Iterator

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_gnn.comm.group import World
from lightning_gnn.comm.replicas import Replicas
from lightning_gnn.data.shards import Shard
from lightning_gnn.nn.learned_rows import LearnedRows, learned_rows
from lightning_gnn.steps.gradients import GradientSum


class SharedModel:
    """A module of which each rank has a copy; runs on every rank.

    Args:
        module: on the rank's device; all ranks get the parameters and buffers of rank 0.
        shard: of this rank, whose nodes' learned rows it owns.
        equal_buffers: buffers, too, must stay equal on all ranks.

    Attributes:
        learned_rows: of the module; none on one rank, which has them all.

    Raises:
        ValueError: learned rows with several optimizers, or with scaled gradients.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        world: World,
        shard: Shard,
        num_optimizers: int = 1,
        precision: Precision | None = None,
        equal_buffers: bool = True,
    ) -> None:
        self._module, self._world, self._equal_buffers = module, world, equal_buffers
        world.broadcast_tensors_([*module.parameters(), *module.buffers()])
        self.learned_rows: list[LearnedRows] = []
        found = learned_rows(module, shard)
        for each in found:
            each.check_training(num_optimizers, precision)
        for each in found if world.size > 1 else ():
            each.distribute(world, shard, self.learned_rows)
            self.learned_rows.append(each)
        self._known, self._known_buffers = set(module.parameters()), {name for name, _ in module.named_buffers()}
        self.gradients = GradientSum(world, lambda: (parameter for _, parameter in self._parameters()))
        self.replicas = Replicas(world, self._tensors)

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields by name the parameters that were registered before the run, or are in an optimizer. Others are a rank's own,
        such as the best model that rank 0 keeps on the module.

        Raises:
            RuntimeError: one of the others has learned.
        """
        trainer = self._module._trainer
        optimizers = [] if trainer is None else trainer.optimizers
        learned = {each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
        for name, parameter in self._module.named_parameters():
            if parameter in self._known or parameter in learned:
                yield name, parameter
            elif parameter.grad is not None:
                raise RuntimeError(
                    f"The parameter {name!r} was registered during the run and is in no optimizer, so that its gradient is that "
                    "of this rank. Register it in __init__ or configure_model, or call optimizer.add_param_group"
                )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what must be the same on all ranks, by name."""
        modules = self._module.modules()
        tables = [each for each in modules if isinstance(each, LearnedRows)]
        own_rows = {id(each) for table in tables for each in table.parameters()}
        yield from (named for named in self._parameters() if id(named[1]) not in own_rows)
        if self._equal_buffers:
            yield from (named for named in self._module.named_buffers() if named[0] in self._known_buffers)

    def end_training(self) -> None:
        """Compares the copies, and gives rank 0 all learned rows back."""
        # Ranks that come here from another number of steps are told so, and do not wait for those that still train.
        digests = self._world.all_gather(self.replicas.digest(), "End of training")
        self.replicas.check(digests, "At the end of training")
        for each in self.learned_rows:
            each.collect()

    def release(self) -> None:
        self.gradients.release()
        for each in self.learned_rows:
            each.release()
        self.learned_rows = []
