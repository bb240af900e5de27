"""Caches in the course of a run: how a threshold follows what the model learns, how a share grows, and what is logged."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from lightning_gnn.arguments import check_choice, check_numbers, shown
from lightning_gnn.callbacks.loggers import log_values
from lightning_gnn.comm.call import DIRECTIONS
from lightning_gnn.comm.group import World
from lightning_gnn.strategies.vertex_cut.cache import LargestChangesCache, MessageCache, Sent


@dataclass(frozen=True)
class TopKChanges:
    """A cache that sends a given share of each message, ours: see :class:`~.cache.LargestChangesCache`.

    The share grows over the epochs: rows that wait cost accuracy towards the end of training, and little at its start. What a
    layer sends is known beforehand, and no accuracy is needed.

    Args:
        share: of a message's rows, in the mean over a run; above 0, at most 1.
        growth: the share begins this much below its mean and ends as much above, in shares of it, from 0 to 1; 0 keeps it the
            same. So it is without ``max_epochs``, since the end is not known then.

    Raises:
        ValueError: a share or a growth out of range.
    """

    share: float = 0.33
    growth: float = 0.5

    def __post_init__(self) -> None:
        check_numbers(share=self.share, growth=self.growth)
        if not 0 < self.share <= 1:
            raise ValueError(f"share of the rows that are sent is above 0 and at most 1 (got {self.share}).")
        if not 0 <= self.growth <= 1:
            raise ValueError(f"growth of the share is between 0 and 1 (got {self.growth}).")

    def share_in(self, epoch: int, epochs: int) -> float:
        """Returns the share in an epoch of so many, the first being 0; `epochs` below 1 if that is not known."""
        progress = epoch / (epochs - 1) if epochs > 1 else 0.5
        return min(1.0, self.share * (1 + self.growth * (2 * progress - 1)))


@dataclass
class AdaptiveThreshold:
    """The threshold epsilon of the adaptive cache, changed once an epoch (CDFGNN section 4.1, equations 6 and 7).

    Equation 6 relaxes epsilon while the accuracy falls and tightens it while it rises; the text beside it wants the opposite,
    and so does Figure 7. ``rule="text"`` is the default, ``rule="printed"`` is the equation.

    The paper's rule is on accuracy, which rises from 0 towards 1. A loss falls, from a value that depends on the task, so what
    stands for the accuracy is the share of its first value that it has lost, (l_0 - l) / abs(l_0): 0 in the first epoch, 1 where
    nothing is left of it. So mu1 and mu2 are parts of the first loss: epsilon is relaxed in an epoch whose loss is lower than its
    moving average by more than 2 % of the first loss, and tightened where it is higher by more than 0.1 % of it.

    Args:
        epsilon: at the start, not given in the paper; Figure 7 has it small there. From 0.1 fewer rows are sent, but two of six
            graphs lost one and four points (docs/numbers.md).
        rule: ``"text"`` or ``"printed"``.
        mu1, mu2: how far the accuracy must fall below, or rise above, its moving average before epsilon changes.
        nu1, nu2: the largest and the smallest epsilon.
        xi: how far epsilon changes at most.
        lambda1, lambda2: its factors up and down.
        factors: for messages whose threshold is not epsilon but so many times it (ours): by the name of a layer in the module,
            ``"model.convs.1"``, by direction, ``"backward"``, or by both, ``"model.convs.1/backward"``; of several that name a
            message, the product. 0 sends whatever has changed. With nu1 and nu2 at epsilon, all stay as they are.

    Attributes:
        mean: moving average of the accuracy, or of what stands for it; None before the first epoch.
        first: the first epoch's loss, where one is followed.

    Raises:
        ValueError: an unknown rule, or numbers out of their range.
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
            raise ValueError(f"factors must be a number by name, such as {{'backward': 4}} (got {shown(self.factors)}).")
        check_numbers(**{f"factors[{name!r}]": factor for name, factor in self.factors.items()})
        if min(self.factors.values(), default=0) < 0:
            raise ValueError(f"factors are at least 0 (got {shown(self.factors)}).")
        if not (0 <= self.nu2 <= self.epsilon <= self.nu1):
            raise ValueError(
                f"epsilon must lie between nu2 and nu1 (got nu2={self.nu2}, epsilon={self.epsilon}, nu1={self.nu1})."
            )
        if not (self.lambda2 <= 1 <= self.lambda1) or self.lambda2 <= 0:
            raise ValueError(f"lambda1 is at least 1, lambda2 in (0, 1] (got lambda1={self.lambda1}, lambda2={self.lambda2}).")

    def check_names(self, layers: Collection[str]) -> None:
        """Raises ValueError for a factor that names neither one of the layers nor a direction."""
        for name in self.factors:
            layer, slash, direction = name.rpartition("/")
            known = layer in layers and direction in DIRECTIONS if slash else name in (*layers, *DIRECTIONS)
            if not known:
                raise ValueError(
                    f"factors has {name!r}, and no messages are called so. Layers are {', '.join(map(repr, layers))}; name one, "
                    f"'forward' or 'backward', or both, as in '{next(iter(layers), 'convs.1')}/backward'."
                )

    def update(self, accuracy: float) -> None:
        """Takes the accuracy of an epoch over the training nodes of all ranks."""
        mean = accuracy if self.mean is None else self.mean
        rises, falls = accuracy > mean + self.mu2, accuracy < mean - self.mu1
        relax, tighten = (rises, falls) if self.rule == "text" else (falls, rises)
        if relax and self.epsilon < self.nu1:
            self.epsilon = min(self.lambda1 * self.epsilon, self.epsilon + self.xi, self.nu1)
        elif tighten and self.epsilon > self.nu2:
            self.epsilon = max(self.lambda2 * self.epsilon, self.epsilon - self.xi, self.nu2)
        self.mean = 0.8 * mean + 0.2 * accuracy

    def update_by_loss(self, loss: float) -> None:
        """Takes the loss of an epoch over the training nodes of all ranks; one that is not finite changes nothing."""
        if not math.isfinite(loss):
            return
        self.first = loss if self.first is None else self.first
        self.update((self.first - loss) / abs(self.first) if self.first else -loss)


class CacheSchedule(pl.Callback):
    """Moves the threshold of a cache, or its share, and logs what it lets through.

    Logged after each epoch: ``cache/epsilon``, the threshold, if there is one, and if it has factors,
    ``cache/epsilon/LAYER/DIRECTION``, those that were in use; ``comm/sent_fraction/LAYER/DIRECTION``, rows that
    were sent of those that an exact run sends, over all ranks.

    Args:
        rule: how it moves; None keeps the cache's own threshold.
        monitor: the logged value that the threshold follows, an accuracy; None for the training loss.

    Raises:
        ValueError: from the second epoch, if nothing was logged under `monitor`.
    """

    def __init__(
        self, cache: MessageCache, rule: AdaptiveThreshold | TopKChanges | None, monitor: str | None, world: World
    ) -> None:
        self._cache, self._rule, self._monitor, self._world = cache, rule, monitor, world
        self._trained = False  # a run that goes on from a checkpoint may begin with the end of an epoch
        self._loss = math.nan
        self._known: list[tuple[str, str]] = []

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
                f"cache='adaptive' is to follow monitor='{self._monitor}', which was not logged (logged: {logged}). Log it in "
                "training_step, name another, or leave monitor out: the cache then follows the loss."
            )
        # Of rank 0, so that no two ranks have different thresholds.
        return float(self._world.broadcast_object(float(value)))

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total = {key: Sent() for key in self._known}
        by_rank = self._world.all_gather_object((self._cache.take(), self._cache.take_loss()))
        self._loss = sum(loss for _, loss in by_rank)
        for sent, _ in by_rank:
            for key, value in sent.items():
                of_all = total.setdefault(key, Sent())
                of_all.rows, of_all.of = of_all.rows + value.rows, of_all.of + value.of
        self._known = [*total]
        values = {} if self._cache.guesses else {"cache/epsilon": self._cache.epsilon}
        for (layer, direction), sent_rows in sorted(total.items()):  # none in an exact epoch
            fraction = sent_rows.rows / sent_rows.of if sent_rows.of else 1.0
            values[f"comm/sent_fraction/{layer}/{direction}"] = fraction
            if self._cache.factors:
                values[f"cache/epsilon/{layer}/{direction}"] = self._cache.threshold(layer, direction)
        log_values(trainer, values)
