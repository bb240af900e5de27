"""Self-check of a run: selection of stages and ranks, and evaluation of the outcomes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_gnn.checks.self_check import SelfCheck, self_check
from lightning_gnn.checks.trial import STAGES
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard
from lightning_gnn.data.sources import counted_mask
from lightning_gnn.lightning_packages import is_overridden
from lightning_gnn.nn.context import UnsupportedModelError
from lightning_gnn.registry import explain_error, feature
from lightning_gnn.strategy.graph_kinds import make_small_graph
from lightning_gnn.strategy.scheme import Run, bind_module, twin_of

Outcomes = Mapping[str, SelfCheck]


def checkers(run: Run, shard: Shard) -> dict[str, int]:
    """Returns the stages to check, each with a rank whose shard has enough nodes to sample from."""
    if not run.self_check:
        return {}
    stages, module, trainer = run.stages, run.module, run.trainer
    if stages and trainer.state.fn == "fit":
        stages = [*stages, *(stage for stage in ("test", "predict") if stage not in stages)]
    found: dict[str, int] = {}
    of_masks = shard.mask_counts.values()
    lacks = [sum(not each[rank] and any(each) for each in of_masks) for rank in range(len(shard.counts))]
    for stage in stages:
        step, mask = STAGES[stage]
        counts = shard.mask_counts.get(counted_mask(mask, module), shard.counts) if mask and not run.samples else shard.counts
        unused = stage == "validate" and trainer.state.fn == "fit" and trainer.limit_val_batches == 0
        unused = unused or (run.samples is not None and not run.samples.has(stage))
        if sum(counts) and not unused and is_overridden(step, module):
            # Ranks run checks at the same time. Steps may use other masks than their own.
            busy, most = Counter(found.values()), max(counts)
            found[stage] = min(
                (lacks[rank], 2 * count < most, busy[rank], -count, -shard.counts[rank], rank)
                for rank, count in enumerate(counts)
                if count
            )[-1]
    return found


def outcomes_of_ranks(run: Run, world: World, shard: Shard) -> Outcomes:
    """Returns the outcomes of all stages; collective."""
    by_stage = checkers(run, shard)
    own: dict[str, Any] = {stage: outcome_of(run, shard, stage) for stage, rank in by_stage.items() if rank == world.rank}
    found: dict[str, Any] = {stage: world.broadcast_object(own.get(stage), rank) for stage, rank in by_stage.items()}
    return found


def outcome_of(run: Run, shard: Shard, stage: str) -> SelfCheck:
    """Returns the outcome of a stage's step on a small graph with the attributes of a shard."""
    scheme = twin_of(run.scheme)
    # Layers store their activations even with checkpoint_convs=True: dropout, disabled here, would be active in a recomputation.
    bind = partial(bind_module, scheme, meter=Meter(), cache_input_aggregation=run.cache_input_aggregation)
    batch, make = copy.copy(shard.batch).cpu(), make_small_graph(shard, run.samples, stage)
    return self_check(
        run.module, batch, bind, stage, run.trainer, scheme.layout(min(2, run.layout.parts)), shard.num_classes, make
    )


def report_outcomes(run: Run, outcomes: Outcomes) -> float:
    """Log the outcomes, or raise :class:`UnsupportedModelError`. Returns the seconds of the checks."""
    seconds, name = sum(outcome.seconds for outcome in outcomes.values()), type(run.module).__name__
    same: list[str] = []
    for stage, outcome in outcomes.items():
        step = f"{name}.{STAGES[stage][0]}"
        text = outcome.refused or _text(run, step, outcome)
        if text is not None:
            if stage in run.stages:
                raise UnsupportedModelError(text)
            rank_zero_warn(f"trainer.{stage} does not support this module. {text}")
        elif outcome.not_run is None:
            same.append(STAGES[stage][0])
            for hook, error in outcome.hooks_not_run.items() if stage in run.stages else ():
                rank_zero_warn(
                    f"The self-check could not run {name}.{hook} on a small graph ({error}), so the values "
                    f"that it logs on {run.world_size} ranks were not compared."
                )
        elif stage in run.stages:
            if (said := explain_error(outcome.not_run, step)) is not None:
                raise UnsupportedModelError(said)
            rank_zero_warn(
                f"The self-check could not run {step} on a small graph ({outcome.not_run}), so its results on "
                f"{run.world_size} ranks were not compared. Compare the losses of fit with devices=1."
                f"{'' if run.samples is None else run.samples.advice}"
            )
    if same:
        rank_zero_info(f"Self-check passed in {seconds:.2f} s: {', '.join(same)} of {name} match one device")
    return seconds


def _text(run: Run, step: str, outcome: SelfCheck) -> str | None:
    if outcome.finding is None:
        return None
    return (
        f"{step} does not match single-device results. The self-check ran it on a small random graph, unpartitioned and "
        f"{'in two parts' if run.layout.parts > 1 else 'on two data ranks'}: {outcome.finding.description}. "
        f"{feature('describe_fixes')(run, outcome.finding)}"
    )
