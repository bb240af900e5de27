"""The self-check: the user's own step on a small random graph, whole and split in two, inside one process.

Classes that are known to be exact cannot vouch for a model, whose own code may look across nodes anywhere. So the step
runs both ways, and what goes in and out of every module is compared, then the loss, the gradients and the buffers.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch_geometric.data import Data

from lightning_gnn.checks.record import compared, differing
from lightning_gnn.checks.small_graph import small_graph, two_halves, two_halves_of_edges
from lightning_gnn.checks.stand_ins import QuietTrainer, aside, uncompiled
from lightning_gnn.checks.trial import STAGES, Bind, Outcome, Parted, Trial, in_one_line
from lightning_gnn.datamodules.shards import split_graph
from lightning_gnn.datamodules.sources import counted_mask
from lightning_gnn.nn.context import UnsupportedModelError
from lightning_gnn.partition.layout import LayoutSpec

HALVES = LayoutSpec("edge_cut", 2)


@dataclass(frozen=True)
class SelfCheck:
    """The outcome of a self-check.

    Attributes:
        seconds: what it took.
        problem: what differs, in words; None if nothing does.
        not_run: why the step could not run on a small graph at all; None if it could.
        refused: what is wrong with the model on any graph, be it whole; None if nothing is known.
    """

    seconds: float
    problem: str | None = None
    not_run: str | None = None
    refused: str | None = None


def self_check(
    module: pl.LightningModule,
    batch: Data,
    bind: Bind,
    stage: str = "fit",
    loss_reduction: str = "mean",
    trainer: pl.Trainer | None = None,
    layout: LayoutSpec = HALVES,
) -> SelfCheck:
    """Runs the stage's step on a small graph, whole and on two ranks, and compares. `module` and random streams stay.

    Args:
        module: unbound; copies of it run on the CPU, in float64 where they can.
        batch: this rank's part of the graph, on the CPU; the small graph's attributes are drawn from its rows.
        bind: how the scheme binds a module to a rank's shard.
        stage: a key of `STAGES`.
        loss_reduction: ``"mean"`` or ``"sum"``.
        trainer: what the step finds as ``self.trainer``; its loggers hear nothing.
        layout: what the scheme's two ranks hold; all of their rows must be right in every layer.
    """
    began = time.perf_counter()
    problem = not_run = refused = None
    mask = STAGES[stage][1]
    quiet_trainer = None if trainer is None else QuietTrainer(trainer)
    with ExitStack() as stack:
        stack.enter_context(aside())
        stack.enter_context(uncompiled())
        # Where the user's constants are float32, float64 may not mix with them.
        for dtype, tolerance in ((torch.float64, 1e-7), (None, 1e-3)):
            try:
                graph = small_graph(batch, [counted_mask(mask, module)] if mask else [])
                trial = Trial(module, graph, stage, quiet_trainer, dtype)
                whole = trial.on_whole()
            except UnsupportedModelError as error:
                not_run, refused = None, str(error)
                break
            except Exception as error:
                not_run = not_run or in_one_line(error)
                continue
            not_run, problem = None, _problem(trial, whole, bind, loss_reduction, layout, tolerance)
            break
    return SelfCheck(time.perf_counter() - began, problem, not_run, refused)


def _problem(
    trial: Trial, whole: Outcome, bind: Bind, loss_reduction: str, layout: LayoutSpec, tolerance: float
) -> str | None:
    """Returns in words where other runs part from `whole`; None if they do not."""
    difference = _difference(trial, whole, trial.on_whole(), tolerance)
    if difference is not None:
        return (
            f"run a second time on the same graph, it gives something else: {difference}. It keeps state outside of its "
            "parameters and buffers, or draws random numbers that have nothing to do with nodes and edges"
        )
    holders = two_halves_of_edges() if layout.kind == "vertex_cut" else None
    try:
        shards = split_graph(trial.graph, two_halves(), layout, holders)
        parts = trial.on_parts(shards, bind, loss_reduction)
    except Parted as error:
        return f"on a part of the graph, {error}"
    return _difference(trial, whole, parts, tolerance)


def _difference(trial: Trial, whole: Outcome, found: Outcome, tolerance: float) -> str | None:
    [(_, events)] = whole.parts
    first = next((each for each in compared(events, found.parts) if each.difference > tolerance), None)
    if first is not None:
        return f"{first.event.where} differs by {first.difference:.1e} of its largest value"
    if whole.loss is not None and found.loss is not None:
        for _, difference in differing({"loss": found.loss}, {"loss": whole.loss}, tolerance):
            return (
                f"the loss differs by {difference:.1e}, though all modules agree: if it is not a mean over the labelled "
                f"nodes of {trial.mask}, return {{'loss': loss, 'loss_weight': how many it is over}}"
            )
    for name, difference in list(differing(found.gradients, whole.gradients, tolerance))[::-1]:
        return f"the gradient of '{name}' differs by {difference:.1e} of its largest value, though all outputs agree"
    for name, difference in differing(found.buffers, whole.buffers, tolerance):
        return f"the buffer '{name}' differs by {difference:.1e} of its largest value after the step"
    return None
