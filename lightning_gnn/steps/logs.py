"""``self.log`` with global values: a call logs the value of one device, not the value of a rank."""

from __future__ import annotations

import numbers
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_gnn.comm.group import World
from lightning_gnn.nn.patches import Patches
from lightning_gnn.private_lightning import HOOK
from lightning_gnn.rows.graph import GraphRows
from lightning_gnn.rows.mode import NotExactError, local_rows
from lightning_gnn.steps.metrics import FORWARD, StandInMetrics
from lightning_gnn.steps.weights import RowWeights

OPTIONS = tuple(signature(pl.LightningModule.log).parameters)[3:]
"""Arguments of ``self.log`` after name and value, in order."""

_REDUCTIONS: dict[Any, str] = {
    **{name: name for name in ("mean", "sum", "max", "min")},
    **{"avg": "mean", torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min"},
    **{sum: "sum", max: "max", min: "min"},
}

_FIRST = 16
"""Number of values in the first message of a step, which has one size even if ranks log different values."""


@dataclass
class _Call:
    """Call of ``self.log`` in a hook.

    For a metric, `forward` is its value on the batch at that time. A tensor with `is_tracked` has a placement.
    """

    name: str
    value: Any
    options: dict[str, Any]
    hook: str | None
    forward: Any = None
    is_tracked: bool = False

    @property
    def reduction(self) -> str | None:
        """Name of the reduction over ranks; None for reductions that Lightning rejects."""
        given = self.options.get("reduce_fx", "mean")
        given = given.lower() if isinstance(given, str) else given
        return next((name for known, name in _REDUCTIONS.items() if given is known or given == known), None)

    @property
    def is_of_rank(self) -> bool:
        """True if the value is a number of this rank that must be reduced over ranks."""
        number = isinstance(self.value, numbers.Real) or (isinstance(self.value, Tensor) and self.value.numel() == 1)
        return number and not self.options.get("rank_zero_only") and self.reduction is not None


class GlobalLogs:
    """Wrapper of ``module.log`` until :meth:`release` that makes scalars global before they are logged.

    Metrics are handled by :class:`StandInMetrics`. The weight of a rank in a mean is its number of labeled nodes in the mask of
    the stage. If a call passes ``batch_size`` values that differ between ranks, these are the weights. ``reduce_fx`` of
    ``"sum"``, ``"max"`` and ``"min"`` reduces over ranks likewise. If a step returns ``loss_weight``, this is the weight of its
    values. ``sync_dist`` has no effect. Calls with ``rank_zero_only`` log rank 0's own value. The values of a step are sent in
    one message.
    """

    def __init__(
        self, module: pl.LightningModule, world: World, callbacks: Sequence[pl.Callback] = (), rows: GraphRows | None = None
    ) -> None:
        self._module, self._world, self._rows = module, world, rows
        self._is_whole = False  # whether steps log values of the whole graph
        self._log = module.log
        self.weights = RowWeights(module, world)
        self.metrics = StandInMetrics(module, world, self.weights, callbacks, rows)
        # Suppresses Lightning's advice to set sync_dist=True: the values are already global.
        warnings.filterwarnings("ignore", message=".*It is recommended to use `self.log\\(.*sync_dist=True.*")
        self._ignored = warnings.filters[0]
        self._pending_calls: list[_Call] | None = None
        self._sum: Tensor | None = None  # loss of the last step, if it is a sum over local rows
        self._warned: set[str] = set()
        self._patches = Patches()
        self._patches.put(module, {"log": self._record_call})

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalLogs:
        return self  # copies of the module share the logs

    def release(self) -> None:
        """Restore the ``log`` method of the module."""
        self._patches.release()
        self.metrics.release()
        known: Any = warnings.filters
        known[:] = [each for each in known if each is not self._ignored]

    def enter(self, counts: Sequence[int], stand_ins: int = 0, sizes: Sequence[int] = ()) -> None:
        """Begin a step; its calls are held until :meth:`leave`. See :meth:`RowWeights.enter`."""
        self._is_whole = False
        self.weights.enter(counts, stand_ins, sizes)
        self.metrics.enter()
        self._pending_calls, self._sum = [], None

    def leave(self, output: Any = None, loss_reduction: str = "mean") -> float:
        """End the step with its `output`: make the held values global and log them, in order.

        Returns the factor for this rank's loss, see :meth:`RowWeights.loss_scale`.
        """
        weights = self.weights
        says = weights.take(output)
        scale = weights.loss_scale(loss_reduction)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and not says and loss_reduction == "sum":
            self._sum = loss.detach()
        pending_calls, self._pending_calls = self._pending_calls, None
        self._flush(pending_calls or [])
        self.metrics.leave()
        weights.in_step = False
        return scale

    def enter_rows(self) -> None:
        """Begin a full-graph step; its calls are held until :meth:`leave_rows`."""
        self._is_whole, self._pending_calls = True, []

    def leave_rows(self) -> None:
        """End the step: compare the logged values of the ranks, and log them, in order."""
        pending_calls, self._pending_calls = self._pending_calls, None
        self._flush(pending_calls or [])

    def check_names(self) -> None:
        """Raises ValueError on all ranks if ranks log different names. :meth:`leave` detects this only if all ranks log."""
        self._check_alike([call.name for call in self._pending_calls or []])

    def _check_alike(self, names: Sequence[str]) -> None:
        by_rank = self._world.all_gather_object(list(names))
        if any(each != by_rank[0] for each in by_rank):
            logged = "; ".join(f"rank {rank}: {', '.join(map(repr, each))}" for rank, each in enumerate(by_rank))
            raise ValueError(
                f"Ranks log different values ({logged}). Call self.log on all ranks: it logs the value of the whole graph, "
                "once. For a value of rank 0 only, set rank_zero_only=True."
            )

    def _record_call(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options.update(zip(OPTIONS, args))  # positional arguments such as prog_bar
        call = _Call(name, value, options, getattr(self._module, HOOK))
        with local_rows():
            if self._world.size > 1:
                self._prepare(call)
            if self._pending_calls is None:
                self._flush([call])
            else:
                self._pending_calls.append(call)

    def _prepare(self, call: _Call) -> None:
        name, options = call.name, call.options
        options.pop("sync_dist", None)  # already global
        if options.get("sync_dist_group") is not None:
            raise ValueError(
                f"self.log({name!r}, ..., sync_dist_group=...) is not supported: a group of ranks has only a part of the "
                "graph. Remove sync_dist_group."
            )
        if self._is_whole and not isinstance(call.value, Metric):
            self._prepare_whole(call)
        elif isinstance(call.value, Metric):
            on_step = options.get("on_step")
            if not self._is_whole and self.weights.in_step and (call.hook == "training_step" if on_step is None else on_step):
                self.metrics.make_forward_global(call.value)
            call.forward = getattr(call.value, FORWARD)
        elif not options.get("rank_zero_only"):
            call.value = self.metrics.make_global(call.value)
        elif name not in self._warned:
            self._warned.add(name)
            rank_zero_warn(
                f"self.log({name!r}, ..., rank_zero_only=True) logs rank 0's value, which may describe only rank 0's "
                "part of the graph. To log the value of the whole graph, once, call self.log on all ranks, without "
                "rank_zero_only."
            )

    def _prepare_whole(self, call: _Call) -> None:
        value = call.value
        if isinstance(value, Tensor):
            assert self._rows is not None
            placements = self._rows.placements_of(value)
            call.is_tracked = None not in placements
            for placement in placements:
                if placement is not None and placement.rows is not None and value.numel() != 1:
                    raise NotExactError(
                        f"self.log({call.name!r}, ...) was given one entry for each of the {placement.rows.name}. Log its "
                        "mean or sum."
                    )

    def _compare(self, calls: Sequence[_Call]) -> list[float]:
        """Compare the values of a full-graph step between ranks; unequal numbers, such as seconds, are averaged."""
        device = self._world.device
        local = torch.stack([torch.as_tensor(call.value, dtype=torch.float64).detach().to(device).reshape(()) for call in calls])
        sizes = local.new_tensor([float(self._own_size(call)) for call in calls])
        channels = torch.stack([local, sizes, local, local])
        values, sizes, *_ = self._gather(channels, [call.name for call in calls]).unbind(1)
        for call, of_ranks in zip(calls, sizes.unbind(1)):
            if self._rows is not None and self._rows.batch_size is not None and bool((of_ranks != of_ranks[0]).any()):
                raise ValueError(
                    f"self.log({call.name!r}, ..., batch_size=...) must be given one size on all ranks, got {of_ranks.tolist()}. "
                    "Pass the number of samples of the global batch, such as len(batch.x) or batch.x.size(0)."
                )
        differ = ~((values == values[0]) | (values.isnan() & values[0].isnan())).all(0)
        for call, differs, of_ranks in zip(calls, differ.tolist(), values.unbind(1)):
            if not differs:
                continue
            if call.is_tracked:
                raise NotExactError(f"self.log({call.name!r}, ...) must be equal on all ranks, got {of_ranks.tolist()}.")
            if call.name not in self._warned:
                self._warned.add(call.name)
                rank_zero_warn(
                    f"self.log({call.name!r}, ...) was given a different number on each rank, such as seconds. Logged their mean."
                )
            mean = of_ranks.mean()
            call.value = mean.to(call.value) if isinstance(call.value, Tensor) else mean.item()
        return [self._own_size(call) for call in calls]

    def _flush(self, calls: Sequence[_Call]) -> None:
        of_ranks = [call for call in calls if call.is_of_rank]
        join = self._compare if self._is_whole else self._reduce
        weights = join(of_ranks) if of_ranks and self._world.size > 1 else []
        for call, weight in zip(of_ranks, weights or [self._own_size(call) for call in of_ranks]):
            # Weight of a step in the mean of an epoch; for a single batch, it only stops Lightning from guessing the size.
            call.options["batch_size"] = int(weight) or 1
        now = getattr(self._module, HOOK)
        for call in calls:
            if isinstance(call.value, Metric) and self._world.size > 1:
                setattr(call.value, FORWARD, call.forward)
            setattr(self._module, HOOK, call.hook)
            self._log(call.name, call.value, **call.options)
        setattr(self._module, HOOK, now)

    def _own_size(self, call: _Call) -> float:
        given = call.options.get("batch_size")
        if given is not None:
            return given
        if self._is_whole and self._rows is not None:  # batch size that Lightning infers on one device
            return self._rows.batch_size or next(iter(self._rows.nodes.values())).total
        return sum(self.weights.counts)

    def _reduce(self, calls: Sequence[_Call]) -> list[float]:
        """Replace the value of each call by its reduction over ranks; returns the sum of the ranks' weights for each call."""
        names = [call.name for call in calls]
        channels = torch.stack([self._channels(call) for call in calls], 1)  # [4, calls]
        values, sizes, are_all, are_sums = self._gather(channels, names).unbind(1)  # [P, calls] each
        counts = torch.tensor(self.weights.counts, dtype=torch.float64)
        real = counts > 0
        # A size that is equal on all ranks, such as batch_size=1, does not describe the rows of the values, unless all ranks have
        # equally many nodes or edges.
        alike = (sizes[real] == sizes[real][0]).all(0) & (are_all == 0).any(0) | (sizes[real] < 0).any(0)
        weights = torch.where(alike, counts.view(-1, 1), sizes)
        weights = torch.where((weights > 0).any(0), weights, 1.0)
        present = weights > 0
        means = (values.where(present, 0.0) * weights).sum(0) / weights.sum(0)
        means = torch.where((values == values[0]).all(0), values[0], means)
        has_rows = real.view(-1, 1)
        joined = {
            "mean": torch.where((are_sums > 0).all(0), values.where(has_rows, 0.0).sum(0), means),
            "sum": values.where(has_rows | ~values.isnan(), 0.0).sum(0),
            "max": values.where(present, float("-inf")).amax(0),
            "min": values.where(present, float("inf")).amin(0),
        }
        totals = torch.where(alike & (sizes[real][0] >= 0), sizes[real].sum(0), weights.sum(0))
        for index, call in enumerate(calls):
            given = call.value
            like = given if isinstance(given, Tensor) else torch.empty(0, device=self._world.device)
            dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
            call.value = joined[call.reduction or "mean"][index].to(like.device, dtype)
        return totals.tolist()

    def _channels(self, call: _Call) -> Tensor:
        """Returns a tensor ``[4]`` for a rank's value: value, batch size, and two flags.

        The batch size is -1 if it is not given. The first flag marks a batch size equal to all local nodes or edges, the second a
        value that is a sum.
        """
        device, stand_ins = self._world.device, self.weights.stand_ins
        own = call.value if isinstance(call.value, Tensor) else float(call.value)
        value = torch.as_tensor(own, dtype=torch.float64).detach().to(device).reshape(())
        given = call.options.get("batch_size")
        size = -1.0 if given is None else float(given)
        if stand_ins:
            size = 0.0 if 0 <= size <= stand_ins else size
            if call.reduction == "sum" and _may_be_of(stand_ins, float(value)):
                value = torch.zeros_like(value)
        is_sum = torch.zeros_like(value)
        if self._sum is not None and given is None and call.reduction == "mean":
            is_sum = (value == self._sum.to(value)).to(value)
        of_all = float(size in self.weights.sizes)
        return torch.stack([value, value.new_tensor(size), value.new_tensor(of_all), is_sum])

    def _gather(self, channels: Tensor, names: Sequence[str]) -> Tensor:
        """Returns the values of all ranks, ``[P, 4, calls]``, on the CPU."""
        digest = float(zlib.crc32("\0".join(names).encode()))
        header = channels.new_tensor([len(names), digest, 0.0, 0.0]).view(4, 1)
        first = torch.cat([header, channels[:, :_FIRST], channels.new_zeros(4, max(0, _FIRST - len(names)))], 1)
        operation = "Logged values"  # equal on all ranks, independent of the logged values
        found = self._world.to_host(self._world.all_gather(first, operation), operation)
        if bool((found[:, :2, 0] != found[0, :2, 0]).any()):
            self._check_alike(names)
        values = found[:, :, 1 : 1 + len(names)]
        if len(names) > _FIRST:
            rest = self._world.to_host(self._world.all_gather(channels[:, _FIRST:], operation), operation)
            values = torch.cat([values, rest], 2)
        return values


def _may_be_of(stand_ins: int, value: float) -> bool:
    """Returns whether a sum may be from placeholder rows only; an integer above their number cannot be."""
    return not (value.is_integer() and abs(value) > stand_ins)
