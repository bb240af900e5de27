"""Averaged values of workers, and the choice of the result."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_gnn.devices import copy_to_device, copy_to_host
from lightning_gnn.private_lightning import results_of
from lightning_gnn.strategies.gossip.worker import Scores

Final = Literal["auto", "best", "average"]
Mode = Literal["min", "max"]


class Averages:
    """Averaged values of a worker's module: gradients; or parameters and floating-point buffers.

    Args:
        module: the module.
        gradients: whether to average gradients.
        through_host: whether values are transferred through host memory: the host waits for its device once.
    """

    def __init__(self, module: torch.nn.Module, gradients: bool, through_host: bool) -> None:
        self._module, self._gradients, self._through_host = module, gradients, through_host

    def _tensors(self) -> list[Tensor]:
        parameters: list[Tensor] = [each for each in self._module.parameters() if each.requires_grad]
        if self._gradients:
            return parameters
        return parameters + [each for each in self._module.buffers() if each.is_floating_point()]

    def _value(self, tensor: Tensor) -> Tensor | None:
        return tensor.grad if self._gradients else tensor.detach()

    @property
    def sizes(self) -> list[int]:
        """Numbers of entries of a :meth:`vector` for each tensor, and for the flags of existing values."""
        tensors = self._tensors()
        return [*(each.numel() for each in tensors), len(tensors)]

    def vector(self) -> Tensor:
        """Returns the vector for the others: the values, ``[n]``, 0 for missing ones, and whether they exist, ``[tensors]``.

        The dtype is float, the device the CPU if values are transferred through host memory.
        """
        tensors = self._tensors()
        device, found = tensors[0].device, [self._value(each) for each in tensors]
        dtype = torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32
        pieces = [
            torch.zeros(each.numel(), dtype=dtype, device=device) if value is None else value.reshape(-1).to(dtype)
            for each, value in zip(tensors, found)
        ]
        there = torch.tensor([value is not None for value in found], dtype=dtype)
        vector = torch.cat([*pieces, copy_to_device(there, device)])
        return copy_to_host(vector, math.inf) if self._through_host and device.type != "cpu" else vector

    @torch.no_grad()
    def take(self, total: Tensor) -> None:
        """Replace each tensor by its mean over the workers that have it, given the sum of their vectors."""
        tensors = self._tensors()
        on_device = copy_to_device(total, tensors[0].device) if self._through_host else total
        *pieces, counts = on_device.split(self.sizes)
        for each, piece, count in zip(tensors, pieces, counts):
            # Counts of this worker's tensors are above 0: the device is read only for the others.
            if self._value(each) is not None or count:
                mean = (piece / count).view(each.shape).to(each)
                if self._gradients:
                    each.grad = mean
                else:
                    each.copy_(mean)


class Comparison:
    """Choice of the workers whose weights are the result of a fit.

    Args:
        final, monitor, mode: see :class:`~lightning_gnn.strategies.gossip.cluster_strategy.ClusterStrategy`.

    Attributes:
        losses: losses of the steps of this epoch.
        training_loss: their mean in the last epoch with steps.
    """

    def __init__(self, final: Final, monitor: str | None, mode: Mode | None) -> None:
        self._final, self._monitor, self._mode = final, monitor, mode
        self._score: float | None = None
        self._chosen_by: tuple[str, str] | None = None
        self._warned = False
        self.losses: list[Tensor] = []
        self.training_loss: float | None = None

    def end_epoch(self) -> None:
        """Store the mean loss of the epoch's steps, if there were any."""
        losses, self.losses = self.losses, []
        if losses:
            self.training_loss = float(torch.stack(losses).double().mean())

    def end_validation(self, trainer: pl.Trainer) -> None:
        """Store the value by which the result is chosen; raises ValueError if validation has not logged it."""
        if not self.compares:
            return
        candidates = self._candidates(trainer)
        logged = {} if (results := results_of(trainer)) is None else results.metrics(on_step=False)["callback"]
        self._chosen_by = next(((name, mode) for name, mode in candidates if name in logged), None)
        names = ", ".join(sorted(logged)) or "nothing"
        if self._chosen_by is not None:
            name, mode = self._chosen_by
            if not trainer.sanity_checking:
                found = float(trainer.callback_metrics[name])
                self._score = found if mode == "min" else -found
        elif self._final == "best" or self._monitor is not None:
            raise ValueError(
                f"final_weights={self._final!r} needs monitor={candidates[0][0]!r}, which validation_step did not log (logged: "
                f'{names}). Set monitor and mode for a logged value, or use final_weights="average".'
            )
        elif not self._warned:
            self._warned = True
            rank_zero_warn(
                f"Workers are compared by training loss: validation logged {names}, but neither val_loss nor the value that a "
                "callback monitors. Set GossipStrategy(monitor=..., mode=...) to compare by a validation metric."
            )

    def _candidates(self, trainer: pl.Trainer) -> list[tuple[str, str]]:
        """Returns names of values that workers may be compared by, with their modes; the first that is logged is used."""
        if self._monitor is not None:
            return [(self._monitor, self._mode or "min")]
        callbacks: list[Any] = [*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks]
        monitored = [(each.monitor, each.mode) for each in callbacks if getattr(each, "monitor", None) is not None]
        return [*monitored, ("val_loss", "min")]

    @property
    def compares(self) -> bool:
        """Whether values of validation affect the result."""
        return self._final != "average"

    @property
    def scores(self) -> Scores:
        """Values by which workers are compared, the lowest being best; None for missing values."""
        if self._final == "auto":
            return self._score, self.training_loss
        return (self._score if self._final == "best" else None,)

    def choose(self, scores: Mapping[int, Scores], me: int) -> tuple[list[int], str]:
        """Returns the workers whose weights form the result, and a description of it.

        Only the first worker, if it is `me`, warns if there is nothing to compare.
        """
        name, mode = self._chosen_by or ("the validation metrics", "min")
        for column, what in enumerate((name, "training loss")[: len(self.scores)]):
            # Workers without validation, and workers that diverged, are excluded.
            ranked = [(score, rank) for rank, each in scores.items() if (score := each[column]) is not None]
            score, best = min((each for each in ranked if math.isfinite(each[0])), default=(math.nan, -1))
            if best >= 0:
                value = -score if column == 0 and mode == "max" else score
                return [best], f"worker {best}'s weights, of best {what} ({value:.4g})"
        if self._final != "average" and me == min(scores):
            warnings.warn(f"The result is the average of all workers: no worker has a finite value in {name}.", stacklevel=2)
        return sorted(scores), "the average of all workers' weights"


def weights_of(module: torch.nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save({name: value.cpu() for name, value in module.state_dict().items()}, file)
    return file.getvalue()


def mean_of(weights: Sequence[bytes]) -> dict[str, Any]:
    """Returns the mean of states from :func:`weights_of`; for values that are not floating-point tensors, the first."""
    states = [torch.load(io.BytesIO(each), weights_only=True) for each in weights]
    return {
        name: torch.stack([state[name] for state in states]).mean(0)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in states[0].items()
    }
