"""Who runs the self-check, when, and what follows from its outcome."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_gnn.callbacks.loggers import log_values
from lightning_gnn.checks.self_check import SelfCheck, self_check
from lightning_gnn.checks.trial import STAGES
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Cut, Shard
from lightning_gnn.data.sources import counted_mask
from lightning_gnn.nn.rank_graph import UnsupportedModelError
from lightning_gnn.registry import explained
from lightning_gnn.strategy.graph_kinds import make_small_graph
from lightning_gnn.strategy.scheme import bind_module, twin_of

if TYPE_CHECKING:
    from lightning_gnn.strategy.steps import StepStrategy

Outcomes = Mapping[str, SelfCheck]


class SelfChecks(pl.Callback):
    """Checks the steps of a strategy's module before a stage. All ranks call it; one of them tries out a step, and tells the
    others. Logs ``check/seconds``: what checks have taken."""

    def __init__(self, strategy: StepStrategy) -> None:
        self._strategy = strategy
        self.shard: Shard | None = None
        self._outcomes: Outcomes = {}
        self._done = False  # before ranks were started
        self._seconds = 0.0

    def ahead(self, module: pl.LightningModule, cut: Cut, trainer: pl.Trainer) -> None:
        """Checks before ranks are started, in the process that starts them."""
        outcomes = {}
        for stage, checker in self._checkers(module, cut.shard(0), trainer).items():
            outcomes[stage] = self._check(module, cut.shard(checker), trainer, stage)
        # Else once more on the ranks: the module's own setup() may still make its layers.
        if all(outcome.not_run is None for outcome in outcomes.values()):
            self._judge(outcomes, module, trainer)
            self._outcomes, self._done = outcomes, True

    def before_stage(self, module: pl.LightningModule, shard: Shard, trainer: pl.Trainer) -> None:
        """Checks on ranks, unless that has been done before they were started."""
        self.shard = shard
        done, self._done = self._done, False
        if self._strategy.world_size == 1:
            return
        world = self._strategy.world
        if world.broadcast_object(done):
            # Of the process that has started the others, perhaps: they check later with it.
            self._outcomes = world.broadcast_object(self._outcomes)
            return
        self._seconds = 0.0
        self._outcomes = self._check_on_ranks(module, shard, trainer)
        self._judge(self._outcomes, module, trainer)

    def _checkers(self, module: pl.LightningModule, shard: Shard, trainer: pl.Trainer) -> dict[str, int]:
        """Returns the stages whose steps are tried out, and on which rank: one that has many rows to draw from."""
        if not self._strategy.self_check:
            return {}
        stages = self._strategy.checked_stages(trainer)
        if stages and trainer.state.fn == "fit":
            stages = *stages, *(stage for stage in ("test", "predict") if stage not in stages)
        found: dict[str, int] = {}
        of_masks = shard.mask_counts.values()
        lacks = [sum(not each[rank] and any(each) for each in of_masks) for rank in range(len(shard.counts))]
        for stage in stages:
            step, mask = STAGES[stage]
            counts = shard.mask_counts.get(counted_mask(mask, module), shard.counts) if mask else shard.counts
            unused = stage == "validate" and trainer.state.fn == "fit" and trainer.limit_val_batches == 0
            if sum(counts) and not unused and is_overridden(step, module, pl.LightningModule):
                # Ranks try out steps side by side; steps may read other masks than their own.
                busy, most = Counter(found.values()), max(counts)
                found[stage] = min(
                    (lacks[rank], 2 * count < most, busy[rank], -count, -shard.counts[rank], rank)
                    for rank, count in enumerate(counts)
                    if count
                )[-1]
        return found

    def _check_on_ranks(self, module: pl.LightningModule, shard: Shard, trainer: pl.Trainer) -> Outcomes:
        """Returns the outcomes of all stages."""
        world, checkers = self._strategy.world, self._checkers(module, shard, trainer)
        mine = [stage for stage, checker in checkers.items() if checker == world.rank]
        own: dict[str, Any] = {stage: self._check(module, shard, trainer, stage) for stage in mine}
        found: dict[str, Any] = {s: world.broadcast_object(own.get(s), checker) for s, checker in checkers.items()}
        return found

    def _check(self, module: pl.LightningModule, shard: Shard, trainer: pl.Trainer, stage: str) -> SelfCheck:
        scheme = twin_of(self._strategy.scheme)
        # Layers keep what they make, also under recompute=True: dropout that does nothing here would do its work in a backward.
        bind = partial(bind_module, scheme, meter=Meter(), keep_constant=self._strategy.keep_constant)
        batch, make = copy.copy(shard.batch).cpu(), make_small_graph(shard)
        return self_check(module, batch, bind, stage, trainer, scheme.layout(2), shard.num_classes, make)

    def _judge(self, outcomes: Outcomes, module: pl.LightningModule, trainer: pl.Trainer) -> None:
        """Says what was found, or raises :class:`UnsupportedModelError`."""
        seconds = sum(outcome.seconds for outcome in outcomes.values())
        self._seconds += seconds
        required, same = self._strategy.checked_stages(trainer), []
        for stage, outcome in outcomes.items():
            step = f"{type(module).__name__}.{STAGES[stage][0]}"
            text = outcome.refused or self._text(step, outcome)
            if text is not None:
                if stage in required:
                    raise UnsupportedModelError(text)
                rank_zero_warn(f"trainer.{stage} will refuse this module. {text}")
            elif outcome.not_run is None:
                same.append(STAGES[stage][0])
                for hook, error in outcome.hooks_not_run.items() if stage in required else ():
                    rank_zero_warn(
                        f"The self-check could not run {type(module).__name__}.{hook} on a small graph ({error}), so nothing is "
                        f"known about what it logs on {self._strategy.world_size} ranks."
                    )
            elif stage in required:
                if (said := explained(outcome.not_run, step)) is not None:
                    raise UnsupportedModelError(said)
                rank_zero_warn(
                    f"The self-check could not run {step} on a small graph ({outcome.not_run}), so nothing is known about its "
                    f"numbers on {self._strategy.world_size} ranks. Compare a few epochs with devices=1."
                )
        if same:
            what = f"{', '.join(same)} of {type(module).__name__} {'gives' if len(same) == 1 else 'give'} the same numbers"
            rank_zero_info(f"Self-check: {what} on parts of small graphs as on the whole ({seconds:.2f} s)")

    def _text(self, step: str, outcome: SelfCheck) -> str | None:
        if outcome.finding is None:
            return None
        return (
            f"{step} does not give the numbers of one device. The self-check ran it on a small random graph, whole and "
            f"split in two: {outcome.finding.what}. To train all the same: "
            f"{type(self._strategy).__name__}(self_check=False).\n{outcome.finding.why}"
        )

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._outcomes:
            log_values(trainer, {"check/seconds": self._seconds})
