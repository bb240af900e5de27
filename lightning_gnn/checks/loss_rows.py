"""Whether the losses of a real step weigh as much as they have rows: looked at in its first step, and again now and then."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_gnn.checks.output_rows import OutputRows
from lightning_gnn.checks.stand_ins import ignore, kept_state
from lightning_gnn.comm.group import World
from lightning_gnn.comm.in_process import kept_random_state
from lightning_gnn.nn.rank_graph import UnsupportedModelError

_TRIES = ((-1.0, 0.0), (-1000.0, 0.0), (1000.0, 0.0), (0.0, 1.0), (0.0, 1000.0), (0.0, -1000.0))
"""What outputs are multiplied with, and the noise added, in further runs, to see which rows have a gradient for other values."""
_EXACT, _FLOATING = 1e-12, 1e-6
"""What shares of rows may differ by: counts are exact, what a step returns as its weight may be float32."""


class LossRows:
    """Counts over which rows of the model's output the loss of one training step is, on every rank.

    A loss is a mean over the rows that it has a gradient in. Where it is over other rows than those that it is weighted by, the
    ranks' losses do not add up to that of one device. A loss may leave out rows that are right already, as a hinge does: before a
    model is refused, its step runs again with other values in place of the output, and the rows of all runs count.

    Masks are those of `predicted`: the batch, or what it has of the type that is predicted, with `num_rows` rows."""

    def __init__(
        self,
        module: pl.LightningModule,
        world: World,
        mask: str,
        counts: Sequence[int],
        batch: Any,
        predicted: Any,
        num_rows: int,
        warns: bool = False,
    ) -> None:
        self._module, self._world, self._mask, self._counts, self._warns = module, world, mask, counts, warns
        self._batch, self._num_rows = copy.copy(batch), num_rows
        # What stands in for an empty mask is no row of the loss.
        self._stand_ins = predicted[mask].clone() if not counts[world.rank] else None
        self._outputs = OutputRows(module, num_rows)

    def check(self, output: Any, scale: float, run: Callable[[Any], Any]) -> None:
        """Ends the count in a step that has returned `output`, whose loss weighs `scale`, of 1; `run` runs it again on a batch.
        Raises UnsupportedModelError on all ranks alike."""
        rows, last = self._rows(self._outputs, output), self._outputs.last
        self._outputs.release()
        found = self._gather(rows, scale)
        if found is None or self._fits(found, output):
            return
        with kept_state(self._module), kept_random_state():
            for name in ("log", "log_dict"):
                object.__setattr__(self._module, name, ignore)
            for times, noise in _TRIES:

                def other(place: int, value: Tensor, times: float = times, noise: float = noise) -> Tensor:
                    return _other(value, times, noise) if place == last else value

                outputs = OutputRows(self._module, self._num_rows, other)
                more = self._rows(outputs, run(copy.copy(self._batch)))
                outputs.release()
                rows = rows | more if rows is not None and more is not None else None
        found = self._gather(rows, scale)
        if found is None or self._fits(found, output):
            return
        if not self._warns:
            raise UnsupportedModelError(self._text(found, output))
        rank_zero_warn(self._text(found, output))

    def _rows(self, outputs: OutputRows, output: Any) -> Tensor | None:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        rows = outputs.of(loss) if isinstance(loss, Tensor) and loss.requires_grad else None
        return rows if rows is None or self._stand_ins is None else rows & ~self._stand_ins

    def _gather(self, rows: Tensor | None, scale: float) -> list[tuple[int, float]] | None:
        """Returns rows and share of each rank; None where some rank has none to look at."""
        own = [-1.0 if rows is None else float(rows.sum()), scale]
        mine = torch.tensor(own, dtype=torch.float64, device=self._world.device)
        by_rank = self._world.all_gather(mine, "Rows of losses").tolist()
        if any(count < 0 for count, _ in by_rank) or not sum(count for count, _ in by_rank):
            return None
        return [(int(count), share) for count, share in by_rank]

    @staticmethod
    def _fits(found: Sequence[tuple[int, float]], output: Any) -> bool:
        total = sum(count for count, _ in found)
        near = _FLOATING if isinstance(output, Mapping) and "loss_weight" in output else _EXACT
        return all(abs(share - count / total) <= near for count, share in found)

    def _text(self, found: Sequence[tuple[int, float]], output: Any) -> str:
        counts = [count for count, _ in found]
        of_mask = f"{sum(self._counts):,} labelled nodes ({_listed(self._counts)})"
        by = f"{self._mask}, by which the ranks' losses are weighted, has {of_mask}"
        if isinstance(output, Mapping) and "loss_weight" in output:
            shares = [f"{share:.4g}" for _, share in found]
            by = f"its loss_weight gives the ranks' losses shares of {_listed(shares)}"
        return (
            f"{type(self._module).__name__}.training_step takes its loss over {sum(counts):,} rows of the output "
            f"({_listed(counts)} on the ranks), while {by}: it is not the loss of one device. Return {{'loss': loss, "
            "'loss_weight': how many rows it is over}; make each of several means that of all ranks by "
            "lightning_gnn.mean_over_ranks before you add them."
        )


def _listed(values: Sequence[object], most: int = 8) -> str:
    shown = ", ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in values[:most])
    return shown + (", ..." if len(values) > most else "")


def _other(value: Tensor, times: float, noise: float) -> Tensor:
    """Returns other values in place of an output's; gradients go through to it."""
    size = value.detach().abs().mean().clamp(min=1e-3)
    same = torch.Generator(value.device).manual_seed(0)  # noise of the other sign is of the other sign in each row
    drawn = torch.randn(value.shape, generator=same, device=value.device, dtype=value.dtype)
    drawn = drawn + drawn.sign()  # nowhere near 0
    return value + ((times - 1) * value + noise * size * drawn).detach()
