"""Self-check: the user's step on a small random graph, unpartitioned and split in two, inside one process.

Row semantics apply to every torch function. Computations outside of them, such as the backward of a user's function, would cause
differences here. Outputs of modules, loss, gradients, buffers, predictions and logged values are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

import lightning.pytorch as pl

from lightning_gnn.checks.record import STATE, TOLERANCES, UNKNOWN, Difference, Finding, Outcome, Parted, differences
from lightning_gnn.checks.small_graph import FORM, Form, SmallGraph, small_graph
from lightning_gnn.checks.stand_ins import QuietTrainer, disable_compile, isolate
from lightning_gnn.checks.trial import STAGES, Bind, Trial, in_one_line
from lightning_gnn.data.shards import Graph
from lightning_gnn.data.sources import LeftOutError, counted_mask
from lightning_gnn.nn.context import UnsupportedModelError
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.rows.mode import NotExactError

HALVES = LayoutSpec("edge_cut", 2)


@dataclass(frozen=True)
class SelfCheck:
    """Outcome of a self-check.

    Attributes:
        seconds: duration.
        finding: first difference from one device, with the reason; None if there is none.
        not_run: reason why the step could not run on a small graph; None if it could.
        refused: problem of the model on any graph, even unpartitioned; None if there is none.
        hooks_not_run: hooks that log and could not run on a small graph, with the reason.
    """

    seconds: float
    finding: Finding | None = None
    not_run: str | None = None
    refused: str | None = None
    hooks_not_run: Mapping[str, str] = field(default_factory=dict)

    @property
    def problem(self) -> str | None:
        return None if self.finding is None else f"{self.finding.description}. {self.finding.why}"


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
    """Run the stage's step on a small graph, unpartitioned and on two ranks, and compare; restores `module` and random streams.

    Args:
        module: unbound module; its copies run on the CPU, in float64 if possible.
        batch: this rank's part of the graph, on the CPU; attributes of the small graph are sampled from its rows.
        bind: function that binds a module to a rank's shard for the scheme.
        stage: key of `STAGES`.
        trainer: value of ``self.trainer`` in the step; its loggers record nothing.
        layout: layout of the scheme for two ranks.
        num_classes: number of classes of the whole graph.
        make: function that makes a small graph of this batch, as :func:`~lightning_gnn.checks.small_graph.small_graph` does.
        form: sizes of the small graph.
    """
    began = time.perf_counter()
    quiet_trainer = None if trainer is None else QuietTrainer(trainer, stage)
    finding = refused = not_run = None
    hooks: Mapping[str, str] = {}
    with isolate(), disable_compile():
        mask = STAGES[stage][1]
        masks = [counted_mask(mask, module)] if mask else []
        # Some code supports no duplicate edges, for example a conversion to a dense adjacency.
        for (dtype, tolerance), each in product(TOLERANCES.items(), (form, replace(form, simple=True))):
            try:
                small = make(batch, masks, each, 0, num_classes)
                trial = Trial(module, small.graph, stage, quiet_trainer, dtype, small.whole)
                whole = trial.on_whole()
            except (UnsupportedModelError, LeftOutError) as error:
                refused = str(error)
                break
            except Exception as error:
                not_run = not_run or in_one_line(error)
                continue
            not_run, hooks = None, trial.hooks_not_run
            try:
                finding = _compare(trial, whole, trial.on_parts(small.shards(trial.graph, layout), bind), tolerance)
                if finding is not None and finding.where.startswith("the logged"):
                    # If scores are equal up to rounding, another summation order changes values that depend on their order.
                    single_part = small.merge_parts().shards(trial.graph, replace(layout, parts=1))
                    with suppress(Parted):  # some schemes need several ranks
                        if _compare(trial, whole, trial.on_parts(single_part, bind), tolerance) is not None:
                            finding = None
            except Parted as error:
                finding = Finding.from_error(error, trial.step)
                if isinstance(error.__cause__, (NotExactError, UnsupportedModelError)):
                    refused, finding = str(error.__cause__), None
            break
    return SelfCheck(time.perf_counter() - began, finding, not_run, refused, hooks)


def _compare(trial: Trial, whole: Outcome, parts: Outcome, tolerance: float) -> Finding | None:
    """Returns the first difference between a run on parts and one device; None if there is none.

    Values that vary between two runs of one device, such as seconds, do not count.
    """
    again: list[Difference] | None = None
    for difference in differences(whole, parts, tolerance):
        again = list(differences(whole, trial.on_whole(), tolerance)) if again is None else again
        if difference.group != "metrics" and any(each.group != "metrics" for each in again):
            return Finding(trial.step, difference.where, difference.size, f"{STATE}.")
        if difference.group == "metrics" and difference.name in {each.name for each in again}:
            continue
        return Finding(trial.step, difference.where, difference.size, f"{UNKNOWN}.")
    return None
