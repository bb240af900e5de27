"""The self-check: the user's own step on a small random graph, whole and split in two, inside one process.

Row semantics follow every function of torch. What they cannot see, such as the backward of a function of the user's, would differ
here: outputs of modules, loss, gradients, buffers, predictions and what is logged are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import lightning.pytorch as pl

from lightning_gnn.checks.record import STATE, TOLERANCES, UNKNOWN, Difference, Finding, Outcome, Parted, differences
from lightning_gnn.checks.small_graph import FORM, Form, SmallGraph, small_graph
from lightning_gnn.checks.stand_ins import QuietTrainer, aside, uncompiled
from lightning_gnn.checks.trial import STAGES, Bind, Trial, in_one_line
from lightning_gnn.data.shards import Graph
from lightning_gnn.data.sources import LeftOutError, counted_mask
from lightning_gnn.nn.context import UnsupportedModelError
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.rows.mode import NotExactError

HALVES = LayoutSpec("edge_cut", 2)


@dataclass(frozen=True)
class SelfCheck:
    """The outcome of a self-check.

    Attributes:
        seconds: what it took.
        finding: where the step first differs from that of one device, and why; None if nowhere.
        not_run: why the step could not run on a small graph at all; None if it could.
        refused: what is wrong with the model on any graph, be it whole; None if nothing is known.
        hooks_not_run: hooks that log and could not run on a small graph, and why.
    """

    seconds: float
    finding: Finding | None = None
    not_run: str | None = None
    refused: str | None = None
    hooks_not_run: Mapping[str, str] = field(default_factory=dict)

    @property
    def problem(self) -> str | None:
        return None if self.finding is None else f"{self.finding.what}. {self.finding.why}"


def self_check(
    module: pl.LightningModule,
    batch: Graph,
    bind: Bind,
    stage: str = "fit",
    trainer: pl.Trainer | None = None,
    layout: LayoutSpec = HALVES,
    num_classes: int = 0,
    make: Callable[..., SmallGraph] = small_graph,
    form: Form = FORM,
) -> SelfCheck:
    """Runs the stage's step on a small graph, whole and on two ranks, and compares. `module` and random streams stay.

    Args:
        module: unbound; copies of it run on the CPU, in float64 where they can.
        batch: this rank's part of the graph, on the CPU; the small graph's attributes are drawn from its rows.
        bind: how the scheme binds a module to a rank's shard.
        stage: a key of `STAGES`.
        trainer: what the step finds as ``self.trainer``; its loggers record nothing.
        layout: what the scheme's two ranks hold.
        num_classes: of the whole graph's labels.
        make: makes a small graph as :func:`~lightning_gnn.checks.small_graph.small_graph` does, of this batch.
        form: of the small graph.
    """
    began = time.perf_counter()
    quiet_trainer = None if trainer is None else QuietTrainer(trainer, stage)
    finding = refused = not_run = None
    hooks: Mapping[str, str] = {}
    with aside(), uncompiled():
        mask = STAGES[stage][1]
        masks = [counted_mask(mask, module)] if mask else []
        for dtype, tolerance in TOLERANCES.items():
            try:
                small = make(batch, masks, form, 0, num_classes)
                trial = Trial(module, small.graph, stage, quiet_trainer, dtype, small.whole)
                whole = trial.on_whole()
            except (UnsupportedModelError, LeftOutError) as error:
                refused = str(error)
                break
            except Exception as error:
                not_run = not_run or in_one_line(error)
                continue
            not_run, hooks = None, trial.hooks_not_run
            shards = small.shards(trial.graph, layout)
            try:
                finding = _compare(trial, whole, trial.on_parts(shards, bind), tolerance)
                if finding is not None and finding.where.startswith("the logged"):
                    # Where scores tie but for rounding, another order of sums changes what is made of their order.
                    alone = small.undivided().shards(trial.graph, replace(layout, parts=1))
                    with suppress(Parted):  # schemes that need several ranks
                        if _compare(trial, whole, trial.on_parts(alone, bind), tolerance) is not None:
                            finding = None
            except Parted as error:
                finding = Finding.of_error(error, trial.step)
                if isinstance(error.__cause__, (NotExactError, UnsupportedModelError)):
                    refused, finding = str(error.__cause__), None
            break
    return SelfCheck(time.perf_counter() - began, finding, not_run, refused, hooks)


def _compare(trial: Trial, whole: Outcome, found: Outcome, tolerance: float) -> Finding | None:
    """Returns where a run on parts differs from one device; what two runs of one device do not agree in, such as seconds, does
    not count."""
    again: list[Difference] | None = None
    for difference in differences(whole, found, tolerance):
        again = list(differences(whole, trial.on_whole(), tolerance)) if again is None else again
        if difference.group != "metrics" and any(each.group != "metrics" for each in again):
            return Finding(trial.step, difference.where, difference.size, f"{STATE}.")
        if difference.group == "metrics" and difference.name in {each.name for each in again}:
            continue
        return Finding(trial.step, difference.where, difference.size, f"{UNKNOWN}.")
    return None
