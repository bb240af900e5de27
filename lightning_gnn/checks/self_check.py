"""The self-check: the user's own step on small random graphs, whole and split in two, inside one process.

Classes that are known to be exact cannot vouch for a model, whose own code may look across nodes anywhere. So the step
runs both ways, and what goes in and out of every module is compared, then loss, gradients, buffers and what is logged.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import lightning.pytorch as pl
import numpy as np
import torch
from torch_geometric.data import Data

from lightning_gnn.checks import causes
from lightning_gnn.checks.causes import Finding
from lightning_gnn.checks.differences import Difference, differences, first_difference
from lightning_gnn.checks.draws import Draw
from lightning_gnn.checks.small_graph import FORMS, Form, SmallGraph, small_graph
from lightning_gnn.checks.stand_ins import QuietTrainer, aside, uncompiled
from lightning_gnn.checks.trial import NOISE, STAGES, Bind, Outcome, Parted, Trial, in_one_line
from lightning_gnn.data.attributes import LeftOutError
from lightning_gnn.data.shards import Shard, split_graph
from lightning_gnn.data.sources import counted_mask
from lightning_gnn.nn.rank_graph import UnsupportedModelError
from lightning_gnn.partition.layout import LayoutSpec

HALVES = LayoutSpec("edge_cut", 2)
EXTREMES = (0.001, 0.999)
"""What numbers that ranks would not share are set to, to see whether they matter."""

OTHER = 10.0
"""Noise by which outputs become others."""


@dataclass(frozen=True)
class SelfCheck:
    """The outcome of a self-check.

    Attributes:
        seconds: what it took.
        finding: where the step first differs from that of one device, and why; None if nowhere.
        not_run: why the step could not run on a small graph at all; None if it could.
        refused: what is wrong with the model on any graph, be it whole; None if nothing is known.
        counts_rows: whether the rows that the losses have gradients in tell what the losses must weigh.
    """

    seconds: float
    finding: Finding | None = None
    not_run: str | None = None
    refused: str | None = None
    counts_rows: bool = False

    @property
    def problem(self) -> str | None:
        """The finding in words."""
        return None if self.finding is None else f"{self.finding.what}. {self.finding.cause.text}"


def self_check(
    module: pl.LightningModule,
    batch: Data,
    bind: Bind,
    stage: str = "fit",
    loss_reduction: str = "mean",
    trainer: pl.Trainer | None = None,
    layout: LayoutSpec = HALVES,
    without: Collection[str] = (),
    epochs: Sequence[int] = (),
    forms: Sequence[Form] = FORMS,
    begins: bool = True,
    num_classes: int = 0,
) -> SelfCheck:
    """Runs the stage's step on small graphs, whole and on two ranks, and compares. `module` and random streams stay.

    Args:
        module: unbound; copies of it run on the CPU, in float64 where they can.
        batch: this rank's part of the graph, on the CPU; the small graphs' attributes are drawn from its rows.
        bind: how the scheme binds a module to a rank's shard.
        stage: a key of `STAGES`.
        loss_reduction: ``"mean"`` or ``"sum"``.
        trainer: what the step finds as ``self.trainer``; its loggers hear nothing.
        layout: what the scheme's two ranks hold; all of their rows must be right in every layer.
        without: masks that some rank of the run has no labelled node of.
        epochs: to run it in as well, if the step asks for its epoch.
        forms: of the small graphs.
        begins: whether the stage begins with it, else it has begun.
        num_classes: of the whole graph.
    """
    began = time.perf_counter()
    check = _Check(module, batch, bind, stage, loss_reduction, trainer, layout, without, forms, begins, num_classes)
    finding = refused = None
    with ExitStack() as stack:
        stack.enter_context(aside())
        stack.enter_context(uncompiled())
        try:
            finding = check.run(epochs)
        except (UnsupportedModelError, LeftOutError) as error:
            refused = str(error)
    ran = finding is not None or refused is not None or check.compared
    not_run = None if ran else check.not_run
    return SelfCheck(time.perf_counter() - began, finding, not_run, refused, check.counts_rows and check.compared)


class _Check:
    """One step of one module; see :func:`self_check`.

    Attributes:
        compared: whether a run on parts was compared.
        not_run: what the step raised on a whole graph, in one line.
        counts_rows: see :class:`SelfCheck`.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        batch: Data,
        bind: Bind,
        stage: str,
        loss_reduction: str,
        trainer: pl.Trainer | None,
        layout: LayoutSpec,
        without: Collection[str],
        forms: Sequence[Form],
        begins: bool,
        num_classes: int,
    ) -> None:
        self._module, self._batch, self._bind, self._stage, self._forms = module, batch, bind, stage, forms
        self._loss_reduction, self._layout, self._without, self._begins = loss_reduction, layout, without, begins
        self._num_classes = num_classes
        self._trainer = None if trainer is None else QuietTrainer(trainer, stage)
        self._dtype: torch.dtype | None = torch.float64
        self._trials: dict[torch.dtype | None, Trial] = {}
        self._reads_epoch = False
        self.compared, self.counts_rows = False, True
        self.not_run: str | None = None

    @property
    def _tolerance(self) -> float:
        return 1e-7 if self._dtype is not None else 1e-3

    def run(self, epochs: Sequence[int]) -> Finding | None:
        """Returns what is found on all small graphs, in all epochs where the step asks for its epoch."""
        for number in range(len(self._forms)):
            without = self._without if number == len(FORMS) - 1 else ()
            finding = self._on_small_graph(number, without)
            if finding is not None:
                if without and self._on_small_graph(number, ()) is None:
                    return replace(finding, cause=causes.STANDS_IN)
                return finding
        if self._trainer is not None and self._reads_epoch:
            for self._trainer.epoch in epochs:
                finding = self._on_small_graph(0, ())
                if finding is not None:
                    return replace(finding, where=f"in epoch {self._trainer.epoch}, {finding.where}")
        return None

    def _on_small_graph(self, number: int, without: Collection[str]) -> Finding | None:
        ran = self._whole(number, without)
        if ran is None:
            return None
        small, trial, whole = ran
        if not self.compared:
            finding = self._kept(trial, whole)
            if finding is not None:
                return finding
        self.compared = True
        return self._compare(small, trial, whole)

    def _whole(self, number: int, without: Collection[str]) -> tuple[SmallGraph, Trial, Outcome] | None:
        """Returns a run on a whole small graph, None if it raises."""
        mask = STAGES[self._stage][1]
        masks = [counted_mask(mask, self._module)] if mask else []
        # Where the user's constants are float32, float64 may not mix with them.
        for dtype in dict.fromkeys((self._dtype, None)):
            try:
                small = small_graph(self._batch, masks, self._forms[number], number, without, self._num_classes)
                like = self._trials.get(dtype)
                trial = Trial(
                    self._module, small.graph, self._stage, self._trainer, dtype, begins=self._begins, like=like
                )
                self._trials[dtype] = trial
                whole = trial.on_whole()
            except (UnsupportedModelError, LeftOutError):
                raise
            except Exception as error:
                self.not_run = self.not_run or in_one_line(error)
                continue
            self._dtype = dtype
            self._reads_epoch = self._reads_epoch or trial.reads_epoch
            return small, trial, whole
        return None

    def _kept(self, trial: Trial, whole: Outcome) -> Finding | None:
        """Returns what differs when one device runs the step a second time."""
        again = trial.on_whole()
        found = [each for each in differences(whole, again, self._tolerance) if each.group != "metrics"]
        # What is logged may be a time, or the like.
        return _finding(trial, found[0], causes.KEPT) if found else None

    def _compare(self, small: SmallGraph, trial: Trial, whole: Outcome) -> Finding | None:
        holders = small.holders if self._layout.kind == "vertex_cut" else None
        shards = split_graph(trial.graph, small.part, self._layout, holders)
        try:
            found = trial.on_parts(shards, self._bind, self._loss_reduction)
        except Parted as error:
            return Finding(trial.step, f"on a part of the graph, {error}", None, causes.of_error(error))
        difference = self._first_difference(trial, shards, whole, found)
        drawn = [draw for each in (*found.ranks, *whole.ranks) for draw in each.noted_draws]
        if difference is None:
            self.counts_rows = self.counts_rows and _follows(found)
            return self._shared_draws(trial, whole, found) or self._of_other_features(trial, shards, whole)
        chooses = [draw for draw in drawn if draw.chooses]
        if drawn and self._agrees_without_draws(trial, shards):
            # Else rows of which nothing is known but their number, which each rank draws for: no difference.
            shared = chooses or _common(whole, found)
            return _finding(trial, difference, causes.of_draws(shared)) if shared else None
        if chooses:
            matter = self._where_draws_matter(trial)
            if matter is not None and matter.where == difference.where:
                return _finding(trial, difference, causes.of_draws(chooses))
        return _finding(trial, difference, causes.of(difference, whole, found, shards, trial))

    def _first_difference(
        self, trial: Trial, shards: Sequence[Shard], whole: Outcome, found: Outcome
    ) -> Difference | None:
        difference = first_difference(whole, found, self._tolerance)
        if difference is None or difference.group != "metrics":
            return difference
        logged = [each for each in differences(whole, found, self._tolerance) if each.group == "metrics"]
        # Not what is another number in each run.
        again = [trial.on_whole(), self._on_one_part(trial)]
        logged = [each for each in logged if _is_beyond(each, found, whole, again)]
        if not logged:
            return None
        # Nor what another order of sums changes where rows tie: with noise they do not.
        noisy: list[tuple[Outcome, Outcome]] = []
        try:
            for trial.noise in (NOISE, -NOISE):
                noisy.append((trial.on_whole(), trial.on_parts(shards, self._bind, self._loss_reduction)))
        except Parted:
            return logged[0]
        finally:
            trial.noise = 0.0
        again = [outcome for outcome, _ in noisy]
        for each in logged:
            differs_without_ties = self._dtype is not None and all(
                each.name in {other.name for other in differences(*pair, self._tolerance)} for pair in noisy
            )
            if differs_without_ties or _is_beyond(each, found, whole, again):
                return each
        return None

    def _of_other_features(self, trial: Trial, shards: Sequence[Shard], whole: Outcome) -> Finding | None:
        """Returns which logged values differ where outputs are others: as the graph is, counts and shares may all be 0, and what
        a module has gathered over epochs, such as its best loss, is that of this one.
        """
        names = {name for name, value in whole.ranks[0].logged.items() if bool((value == value.round()).all())}
        runs: list[tuple[float, ...]] = [(OTHER,), (-OTHER,)] if names else []
        if trial.gathers:
            names.update(whole.ranks[0].logged)
            runs.append((OTHER, -OTHER, OTHER + 1, -OTHER - 1, OTHER + 2, -OTHER - 2))
        if trial.graph.x.size(0) != sum(FORMS[0].nodes):
            return None
        try:
            for trial.noises in runs:
                other, again = trial.on_whole(), trial.on_whole()
                found = trial.on_parts(shards, self._bind, self._loss_reduction)
                for each in differences(other, found, self._tolerance):
                    if each.group == "metrics" and each.name in names and _is_beyond(each, found, other, [again]):
                        return _finding(trial, each, causes.of(each, other, found, shards, trial))
        except Exception:  # features may be something else than numbers, such as places in a table
            return None
        finally:
            trial.noises = ()
        return None

    def _on_one_part(self, trial: Trial) -> Outcome | None:
        """Returns a run on one rank that has the whole graph, None if the scheme has none."""
        nodes, edges = trial.graph.x.size(0), trial.graph.edge_index.size(1)
        holders = np.zeros(edges, dtype=np.int64) if self._layout.kind == "vertex_cut" else None
        try:
            shards = split_graph(trial.graph, np.zeros(nodes, dtype=np.int64), replace(self._layout, parts=1), holders)
            return trial.on_parts(shards, self._bind, self._loss_reduction)
        except (Parted, ValueError):
            return None

    def _agrees_without_draws(self, trial: Trial, shards: Sequence[Shard]) -> bool:
        trial.constant = 0.5
        try:
            whole = trial.on_whole()
            return (
                first_difference(whole, trial.on_parts(shards, self._bind, self._loss_reduction), self._tolerance)
                is None
            )
        except Exception:
            return False
        finally:
            trial.constant = None

    def _shared_draws(self, trial: Trial, whole: Outcome, found: Outcome) -> Finding | None:
        """Returns what numbers change that are the same for all nodes, and would differ from rank to rank."""
        common = _common(whole, found)
        difference = self._where_draws_matter(trial) if common else None
        return None if difference is None else _finding(trial, difference, causes.of_draws(common))

    def _where_draws_matter(self, trial: Trial) -> Difference | None:
        """Returns what is first changed by numbers that are not one per node or edge; None if nothing is."""
        outcomes = []
        try:
            for trial.constant in EXTREMES:
                outcomes.append(trial.on_whole())
        except Exception:
            return None
        finally:
            trial.constant = None
        return first_difference(outcomes[0], outcomes[1], self._tolerance)


def _finding(trial: Trial, difference: Difference, cause: causes.Cause) -> Finding:
    return Finding(trial.step, difference.where, difference.size, cause)


def _is_beyond(difference: Difference, found: Outcome, whole: Outcome, others: Sequence[Outcome | None]) -> bool:
    """Returns whether a logged value differs by more than other runs of one device do."""
    name = difference.name
    expected, value = whole.ranks[0].logged[name], found.ranks[0].logged[name]
    same = [each.ranks[0].logged[name] for each in others if each is not None and name in each.ranks[0].logged]
    floor = max((float((each - expected).abs().max()) for each in same), default=0.0)
    return not float((value - expected).abs().max()) <= 4 * floor


def _common(whole: Outcome, found: Outcome) -> list[Draw]:
    """Returns the draws that are of one shape on the whole graph and on all parts: none of rows."""
    draws = [each.noted_draws for each in (*whole.ranks, *found.ranks)]
    return [each[0] for each in zip(*draws) if len(set(each)) == 1]


def _follows(found: Outcome) -> bool:
    """Returns whether losses weigh as much as they have rows."""
    counts = [each.found_rows for each in found.ranks]
    rows = [count for count in counts if count is not None]
    if len(rows) < len(counts) or not sum(rows):
        return False
    return all(abs(each.scale - count / sum(rows)) < 1e-9 for each, count in zip(found.ranks, rows))
