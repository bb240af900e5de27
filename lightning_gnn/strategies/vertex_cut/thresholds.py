"""Schedules of caches: thresholds that follow training, shares that grow, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from lightning_gnn.arguments import check_choice, check_numbers, quote
from lightning_gnn.callbacks.loggers import log_values
from lightning_gnn.comm.call import DIRECTIONS
from lightning_gnn.comm.group import World
from lightning_gnn.strategies.vertex_cut.cache import LargestChangesCache, MessageCache, RowCounts


@dataclass(frozen=True)
class TopKChanges:
    """Cache that sends a given share of each message (not in the paper); see :class:`~.cache.LargestChangesCache`.

    The share grows over the epochs: delayed rows reduce accuracy late in training, but little early. The number of rows of each
    message is known in advance, and no accuracy is needed.

    Args:
        share: share of a message's rows, mean over a run; above 0, at most 1.
        growth: difference between the first, or last, share and the mean, relative to the mean; 0 to 1. The share rises from
            `share` times 1 - growth to `share` times 1 + growth. 0 keeps it constant, which is also the behavior without
            ``max_epochs``.

    Raises:
        ValueError: a share or a growth out of range.
    """

    share: float = 0.33
    growth: float = 0.5

    def __post_init__(self) -> None:
        check_numbers(share=self.share, growth=self.growth)
        if not 0 < self.share <= 1:
            raise ValueError(f"share of the rows that are sent must be above 0 and at most 1, got {self.share}.")
        if not 0 <= self.growth <= 1:
            raise ValueError(f"growth of the share must be from 0 to 1, got {self.growth}.")

    def share_in(self, epoch: int, epochs: int) -> float:
        """Returns the share of an epoch.

        Args:
            epoch: number of the epoch, from 0.
            epochs: number of epochs; below 1 if unknown.
        """
        progress = epoch / (epochs - 1) if epochs > 1 else 0.5
        return min(1.0, self.share * (1 + self.growth * (2 * progress - 1)))


@dataclass
class AdaptiveThreshold:
    """Threshold epsilon of the adaptive cache, updated once per epoch (CDFGNN section 4.1, equations 6 and 7).

    Equation 6 raises epsilon while the accuracy falls, and lowers it while the accuracy rises. The text next to it and Figure 7
    require the opposite. ``rule="text"`` is the default, ``rule="printed"`` is the equation.

    The paper's rule uses the accuracy, which rises from 0 towards 1. A loss falls, and its scale depends on the task. Therefore
    the progress of the loss, ``(l_0 - l) / abs(l_0)``, replaces the accuracy. It is 0 in the first epoch, and 1 for a loss of 0.
    mu1 and mu2 are then shares of the first loss. With the default rule, epsilon rises in an epoch whose loss is below its moving
    average by more than 2 % of the first loss. It falls if the loss is above the average by more than 0.1 %.

    Args:
        epsilon: initial threshold. The paper does not give it; in Figure 7 it is small at first. From 0.1 on, fewer rows are
            sent, but two of six graphs lost one and four points (docs/vertex-cut-benchmarks.md).
        rule: ``"text"`` or ``"printed"``.
        mu1: decrease below the moving average of the accuracy that changes epsilon.
        mu2: increase above that average that changes epsilon.
        nu1: largest epsilon.
        nu2: smallest epsilon.
        xi: largest change of epsilon per epoch.
        lambda1: factor of epsilon for an increase.
        lambda2: factor of epsilon for a decrease.
        factors: factors of epsilon per message (not in the paper). Keys are the name of a layer in the module,
            ``"model.convs.1"``; a direction, ``"backward"``; or both, ``"model.convs.1/backward"``. If several match a message,
            they are multiplied. 0 sends all rows that changed. If nu1 and nu2 equal epsilon, all thresholds stay constant.

    Attributes:
        mean: moving average of the accuracy, or of the progress; None before the first epoch.
        first: loss of the first epoch, if the threshold follows a loss.

    Raises:
        ValueError: an unknown rule, or numbers out of range.
    """

    epsilon: float = 0.01
    rule: Literal["text", "printed"] = "text"
    mu1: float = 0.001
    mu2: float = 0.02
    nu1: float = 0.3
    nu2: float = 0.001
    xi: float = 0.01
    lambda1: float = 1.05
    lambda2: float = 0.9
    factors: dict[str, float] = field(default_factory=dict)
    mean: float | None = None
    first: float | None = None

    def __post_init__(self) -> None:
        check_choice("rule", self.rule, ("text", "printed"))
        given = {name: value for name, value in asdict(self).items() if name not in ("rule", "factors")}
        check_numbers(**{name: value for name, value in given.items() if name not in ("mean", "first") or value is not None})
        if not isinstance(self.factors, dict) or not all(isinstance(name, str) for name in self.factors):
            raise ValueError(f"factors must be a number by name, such as {{'backward': 4}} (got {quote(self.factors)}).")
        check_numbers(**{f"factors[{name!r}]": factor for name, factor in self.factors.items()})
        if min(self.factors.values(), default=0) < 0:
            raise ValueError(f"factors must be at least 0, got {quote(self.factors)}.")
        if not (0 <= self.nu2 <= self.epsilon <= self.nu1):
            raise ValueError(f"epsilon must satisfy nu2 <= epsilon <= nu1 (got {self.nu2}, {self.epsilon} and {self.nu1}).")
        if not (self.lambda2 <= 1 <= self.lambda1) or self.lambda2 <= 0:
            raise ValueError(f"lambda1 must be at least 1 and lambda2 in (0, 1], got {self.lambda1} and {self.lambda2}.")

    def check_names(self, layers: Collection[str]) -> None:
        """Raises ValueError for a factor that names neither one of the layers nor a direction."""
        for name in self.factors:
            layer, slash, direction = name.rpartition("/")
            known = layer in layers and direction in DIRECTIONS if slash else name in (*layers, *DIRECTIONS)
            if not known:
                raise ValueError(
                    f"factors has {name!r}, which is no layer or direction. Use a layer ({', '.join(map(repr, layers))}), "
                    f"'forward', 'backward', or both, as in '{next(iter(layers), 'convs.1')}/backward'."
                )

    def update(self, accuracy: float) -> None:
        """Update epsilon by the accuracy of an epoch over the training nodes of all ranks."""
        mean = accuracy if self.mean is None else self.mean
        rises, falls = accuracy > mean + self.mu2, accuracy < mean - self.mu1
        relax, tighten = (rises, falls) if self.rule == "text" else (falls, rises)
        if relax and self.epsilon < self.nu1:
            self.epsilon = min(self.lambda1 * self.epsilon, self.epsilon + self.xi, self.nu1)
        elif tighten and self.epsilon > self.nu2:
            self.epsilon = max(self.lambda2 * self.epsilon, self.epsilon - self.xi, self.nu2)
        self.mean = 0.8 * mean + 0.2 * accuracy

    def update_by_loss(self, loss: float) -> None:
        """Update epsilon by the loss of an epoch over the training nodes of all ranks; does nothing if it is not finite."""
        if not math.isfinite(loss):
            return
        self.first = loss if self.first is None else self.first
        self.update((self.first - loss) / abs(self.first) if self.first else -loss)


class CacheSchedule(pl.Callback):
    """Callback that updates the threshold, or the share, of a cache and logs the share of rows sent.

    Logged after each epoch:

    - ``cache/epsilon``: the threshold, if there is one.
    - ``cache/epsilon/LAYER/DIRECTION``: the threshold of each message, if there are factors.
    - ``comm/sent_fraction/LAYER/DIRECTION``: rows sent by all ranks, relative to an exact run.

    Args:
        rule: schedule; None keeps the cache's threshold.
        monitor: logged accuracy that the threshold follows; None for the training loss.

    Raises:
        ValueError: nothing was logged under `monitor`; raised from the second epoch on.
    """

    def __init__(
        self, cache: MessageCache, rule: AdaptiveThreshold | TopKChanges | None, monitor: str | None, world: World
    ) -> None:
        self._cache, self._rule, self._monitor, self._world = cache, rule, monitor, world
        self._trained = False  # a resumed run may start with the end of an epoch
        self._loss = math.nan
        self._logged_keys: list[tuple[str, str]] = []

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(self._rule, AdaptiveThreshold):
            if self._trained and self._monitor is None:
                self._rule.update_by_loss(self._loss)
            elif self._trained:
                self._rule.update(self._accuracy(trainer))
            self._cache.epsilon = self._rule.epsilon
        elif isinstance(self._cache, LargestChangesCache) and self._rule is not None:
            self._cache.share = self._rule.share_in(trainer.current_epoch, trainer.max_epochs or -1)

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._trained = True

    def _accuracy(self, trainer: pl.Trainer) -> float:
        value = trainer.callback_metrics.get(str(self._monitor))
        if value is None:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise ValueError(
                f"cache='adaptive' follows monitor='{self._monitor}', which was not logged (logged: {logged}). Log it in "
                "training_step, set another name, or remove monitor to follow the loss."
            )
        # The value of rank 0, so that all ranks have the same threshold.
        return float(self._world.broadcast_object(float(value)))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total = {key: RowCounts() for key in self._logged_keys}
        by_rank = self._world.all_gather_object((self._cache.take(), self._cache.take_loss()))
        self._loss = sum(loss for _, loss in by_rank)
        for sent, _ in by_rank:
            for key, value in sent.items():
                of_all = total.setdefault(key, RowCounts())
                of_all.rows, of_all.total = of_all.rows + value.rows, of_all.total + value.total
        self._logged_keys = [*total]
        values = {} if self._cache.guesses else {"cache/epsilon": self._cache.epsilon}
        for (layer, direction), sent_rows in sorted(total.items()):  # none in an exact epoch
            fraction = sent_rows.rows / sent_rows.total if sent_rows.total else 1.0
            values[f"comm/sent_fraction/{layer}/{direction}"] = fraction
            if self._cache.factors:
                values[f"cache/epsilon/{layer}/{direction}"] = self._cache.threshold(layer, direction)
        log_values(trainer, values)
