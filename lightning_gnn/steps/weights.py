"""What the values of each rank weigh in those of one device, in steps and in the hooks of their stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_gnn.comm.group import World


@dataclass
class _Stage:
    """Training, validation or test.

    Attributes:
        counts: labelled rows of each rank in the last step, or what it says that its values weigh.
        stand_ins: rows that only stand in for this rank's empty mask.
        sums: these of all steps since a hook of an epoch has read them.
        sizes: nodes and edges of this rank.
        read: whether one has read these.
    """

    counts: Sequence[float]
    stand_ins: int
    sums: Sequence[float]
    sizes: Sequence[int]
    read: bool = False


class RowWeights:
    """Knows how many labelled rows of the stage's mask each rank has; of a hook, by the stage that its name tells.

    Args:
        module: knows which step or hook is running.
        world: the ranks.

    Attributes:
        in_step: whether a step is running.
    """

    def __init__(self, module: pl.LightningModule, world: World) -> None:
        self._module, self._world = module, world
        self._stages: dict[str, _Stage] = {}
        self._last = ""
        self.in_step = False

    def enter(self, counts: Sequence[int], stand_ins: int = 0, sizes: Sequence[int] = ()) -> None:
        """Starts a step.

        Args:
            counts: labelled rows in its mask on each rank.
            stand_ins: rows in its mask on this rank that only stand in; 0 where it has labelled ones.
            sizes: nodes and edges of this rank.
        """
        self._last = self._name
        before = self._stages.get(self._name)
        sums = [0] * len(counts) if before is None or before.read else before.sums
        self._stages[self._name] = _Stage(counts, stand_ins, [a + b for a, b in zip(sums, counts)], sizes)
        self.in_step = True

    def say(self, weights: Sequence[float]) -> None:
        """Has the step's values weigh what it says."""
        stage = self._stages[self._name]
        stage.sums = [total + weight - count for total, weight, count in zip(stage.sums, weights, stage.counts)]
        stage.counts = weights

    def leave(self) -> None:
        """Ends the step."""
        self.in_step = False

    @property
    def _name(self) -> str:
        hook = self._module._current_fx_name
        if hook is None:
            return self._last
        return next((stage for stage in ("validation", "test") if stage in hook), "training")

    @property
    def counts(self) -> Sequence[float]:
        """What ranks weigh: in the step, or in the epoch in its hooks; all alike where there is nothing to go by."""
        stage = self._stages.get(self._name)
        if stage is None:
            return (1,) * self._world.size
        of_epoch = not self.in_step and "epoch" in (self._module._current_fx_name or "")
        stage.read |= of_epoch
        counts = stage.sums if of_epoch else stage.counts
        return counts if any(counts) else (1,) * self._world.size

    @property
    def shares(self) -> list[float]:
        """Each rank's part of the whole."""
        counts = self.counts
        return [count / sum(counts) for count in counts]

    @property
    def share(self) -> float:
        """This rank's part of the whole."""
        return self.shares[self._world.rank]

    @property
    def stand_ins(self) -> int:
        """Rows that only stand in for this rank's empty mask; 0 where it has labelled ones."""
        stage = self._stages.get(self._name)
        return 0 if stage is None else stage.stand_ins

    @property
    def sizes(self) -> Sequence[int]:
        """Nodes and edges of this rank."""
        stage = self._stages.get(self._name)
        return () if stage is None else stage.sizes

    def mean(self, value: Tensor, operation: str) -> Tensor:
        """Returns the mean of the ranks' values by their labelled rows, on every rank; what all ranks have alike, as it is.

        Args:
            value: of one shape on all ranks.
            operation: named in errors.
        """
        value = value.detach() if value.is_floating_point() else value.float()
        everyone = self._world.all_gather(value, operation)
        if bool((everyone == everyone[0]).all()):
            return everyone[0]
        counts = torch.tensor(self.counts, dtype=torch.float64, device=everyone.device)
        some = counts > 0
        parts = counts[some].view(-1, *[1] * value.dim()) / counts.sum()
        return (everyone[some].double() * parts).sum(0).to(value.dtype)
