"""Who runs the self-check, and what follows from its outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_gnn.checks.self_check import SelfCheck
from lightning_gnn.checks.trial import STAGES
from lightning_gnn.datamodules.shards import Shard
from lightning_gnn.datamodules.sources import counted_mask
from lightning_gnn.nn.context import UnsupportedModelError

if TYPE_CHECKING:
    from lightning_gnn.strategies.base import GNNStrategy


def most_labelled(shard: Shard, stage: str, module: pl.LightningModule) -> int:
    """Returns the rank that has most of the rows that a stage's values count."""
    mask = STAGES[stage][1]
    counts = shard.mask_counts.get(counted_mask(mask, module), shard.counts) if mask else shard.counts
    return max(range(len(counts)), key=lambda rank: (counts[rank], shard.counts[rank]))


def judge(outcome: SelfCheck, strategy: GNNStrategy, module: pl.LightningModule, stage: str) -> None:
    """Says what the self-check found, or raises :class:`UnsupportedModelError`."""
    if outcome.refused is not None:
        raise UnsupportedModelError(outcome.refused)
    step = f"{type(module).__name__}.{STAGES[stage][0]}"
    if outcome.not_run is not None:
        rank_zero_warn(
            f"The self-check could not run {step} on a small graph ({outcome.not_run}), so nothing is known about its "
            f"numbers on {strategy.world_size} ranks. Compare a few epochs with devices=1."
        )
    elif outcome.problem is not None:
        raise UnsupportedModelError(
            f"{step} does not give the numbers of one device. The self-check ran it on a small random graph, whole and "
            f"split in two: {outcome.problem}. Code that looks across nodes outside message passing does that, such as "
            "x.mean(0), degree(...) or x[edge_index[0]]; expand, reduce and sum_over_ranks of lightning_gnn are made for "
            f"it (docs/models.md). To train all the same: {type(strategy).__name__}(self_check=False)."
        )
    else:
        rank_zero_info(
            f"Self-check: {step} gives the same numbers on two parts of a small graph as on the whole "
            f"({outcome.seconds:.2f} s)"
        )
