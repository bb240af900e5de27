"""The self-check: the user's own step on small random graphs, whole and split in two, inside one process.

Classes that are known to be exact cannot vouch for a model, whose own code may look across nodes anywhere. So the step
runs both ways, and what goes in and out of every module is compared, then loss, gradients, buffers and what is logged.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import NodeType

from lightning_gnn.checks import causes
from lightning_gnn.checks.causes import Finding
from lightning_gnn.checks.differences import TOLERANCES, Difference, differences, first_difference
from lightning_gnn.checks.draws import Draw
from lightning_gnn.checks.small_graph import FORMS, Form, small_graph
from lightning_gnn.checks.stand_ins import QuietTrainer, aside, uncompiled
from lightning_gnn.checks.trial import NOISE, STAGES, Bind, Outcome, Parted, Trial, in_one_line
from lightning_gnn.data.attributes import LeftOutError
from lightning_gnn.data.shards import Shard, split_graph
from lightning_gnn.data.sources import counted_mask
from lightning_gnn.nn.rank_graph import UnsupportedModelError
from lightning_gnn.partition.layout import LayoutSpec

HALVES = LayoutSpec("edge_cut", 2)
_EXTREMES = (0.001, 0.999)
"""What numbers that ranks would not share are set to, to see whether they matter."""
_OTHER = 10.0
"""Noise by which outputs become others."""


@dataclass(frozen=True)
class SelfCheck:
    """The outcome of a self-check.

    Attributes:
        seconds: what it took.
        finding: where the step first differs from that of one device, and why; None if nowhere.
        not_run: why the step could not run on a small graph at all; None if it could.
        refused: what is wrong with the model on any graph, be it whole; None if nothing is known.
        hooks_not_run: hooks that log and could not run on a small graph, and why.
        counts_rows: whether the rows that the losses have gradients in tell what the losses must weigh.
    """

    seconds: float
    finding: Finding | None = None
    not_run: str | None = None
    refused: str | None = None
    hooks_not_run: Mapping[str, str] = field(default_factory=dict)
    counts_rows: bool = False

    @property
    def problem(self) -> str | None:
        return None if self.finding is None else f"{self.finding.what}. {self.finding.cause.text}"


def self_check(
    module: pl.LightningModule,
    batch: Data | HeteroData,
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
    input_type: NodeType | None = None,
) -> SelfCheck:
    """Runs the stage's step on small graphs, whole and on two ranks, and compares. `module` and random streams stay.

    Args:
        module: unbound; copies of it run on the CPU, in float64 where they can.
        batch: this rank's part of the graph, on the CPU; the small graphs' attributes are drawn from its rows.
        bind: how the scheme binds a module to a rank's shard.
        stage: a key of `STAGES`.
        loss_reduction: ``"mean"`` or ``"sum"``.
        trainer: what the step finds as ``self.trainer``; its loggers record nothing.
        layout: what the scheme's two ranks hold; all of their rows must be right in every layer.
        without: masks that some rank of the run has no labelled node of.
        epochs: to run it in as well, if the step asks for its epoch.
        begins: whether the stage begins with it, else it has begun.
        input_type: of a ``HeteroData``, the node type that is predicted.
    """
    began = time.perf_counter()
    quiet_trainer = None if trainer is None else QuietTrainer(trainer, stage)
    check = _Check(
        module, batch, bind, stage, loss_reduction, quiet_trainer, layout, forms, begins, num_classes, input_type
    )
    finding = refused = None
    with aside(), uncompiled():
        try:
            finding = check.run(without, epochs)
        except (UnsupportedModelError, LeftOutError) as error:
            refused = str(error)
    ran = finding is not None or refused is not None or check.compared
    not_run = None if ran else check.not_run
    counts_rows = check.counts_rows and check.compared
    return SelfCheck(time.perf_counter() - began, finding, not_run, refused, check.hooks_not_run, counts_rows)


@dataclass
class _Check:
    """One step of one module; see :func:`self_check` and :class:`SelfCheck`."""

    module: pl.LightningModule
    batch: Data | HeteroData
    bind: Bind
    stage: str
    loss_reduction: str
    trainer: QuietTrainer | None
    layout: LayoutSpec
    forms: Sequence[Form]
    begins: bool
    num_classes: int
    input_type: NodeType | None
    dtype: torch.dtype | None = torch.float64
    trials: dict[torch.dtype | None, Trial] = field(default_factory=dict)
    compared: bool = False
    counts_rows: bool = True
    reads_epoch: bool = False
    not_run: str | None = None
    hooks_not_run: dict[str, str] = field(default_factory=dict)

    def run(self, without: Collection[str], epochs: Sequence[int]) -> Finding | None:
        """Returns what is found on all small graphs, in all epochs where the step asks for its epoch."""
        graphs = [(number, without if number == len(FORMS) - 1 else ()) for number in range(len(self.forms))]
        finding = self._on_small_graphs(graphs)
        if finding is None and self.trainer is not None and self.reads_epoch:
            for self.trainer.epoch in epochs:
                finding = self._on_small_graphs([each for each in graphs if not each[0] or each[1]])
                if finding is not None:
                    return replace(finding, where=f"in epoch {self.trainer.epoch}, {finding.where}")
        return finding

    def _on_small_graphs(self, graphs: Sequence[tuple[int, Collection[str]]]) -> Finding | None:
        for number, without in graphs:
            finding = self._on_small_graph(number, without)
            if finding is not None:
                stands_in = bool(without) and self._on_small_graph(number, ()) is None
                return replace(finding, cause=causes.STANDS_IN) if stands_in else finding
        return None

    def _on_small_graph(self, number: int, without: Collection[str]) -> Finding | None:
        mask = STAGES[self.stage][1]
        masks = [counted_mask(mask, self.module)] if mask else []
        for dtype in dict.fromkeys((self.dtype, None)):
            try:
                small = small_graph(
                    self.batch, masks, self.forms[number], number, without, self.num_classes, self.input_type
                )
                like = self.trials.get(dtype)
                trial = Trial(
                    self.module, small.graph, self.stage, self.trainer, dtype, False, self.begins, like, self.input_type
                )
                self.trials[dtype] = trial
                whole = trial.on_whole()
                break
            except (UnsupportedModelError, LeftOutError):
                raise
            except Exception as error:
                self.not_run = self.not_run or in_one_line(error)
        else:
            return None
        self.dtype, self.reads_epoch = dtype, self.reads_epoch or trial.reads_epoch
        self.hooks_not_run |= trial.hooks_not_run
        if not self.compared:
            again = differences(whole, trial.on_whole(), TOLERANCES[dtype])
            kept = next((each for each in again if each.group != "metrics"), None)  # a time may be logged, or the like
            if kept is not None:
                return Finding.at(kept, trial, causes.KEPT)
        self.compared = True
        holders = small.holders if self.layout.kind == "vertex_cut" else None
        shards = split_graph(trial.graph, small.part, self.layout, holders, self.input_type)
        return self._compare(trial, whole, shards, is_first=number == 0)

    def _on_parts(self, trial: Trial, shards: Sequence[Shard], **options: Any) -> Outcome:
        return trial.on_parts(shards, self.bind, self.loss_reduction, **options)

    def _compare(self, trial: Trial, whole: Outcome, shards: Sequence[Shard], is_first: bool) -> Finding | None:
        try:
            found = self._on_parts(trial, shards)
        except Parted as error:
            return Finding.of_error(error, trial)
        difference = self._first_difference(trial, shards, whole, found)
        drawn = [draw for each in (*found.ranks, *whole.ranks) for draw in each.noted_draws]
        common = _common(whole, found)
        if difference is None:
            self.counts_rows = self.counts_rows and _follows(found)
            # Numbers that are the same for all nodes here would differ from rank to rank.
            difference = self._where_draws_matter(trial) if common else None
            if difference is not None:
                return Finding.at(difference, trial, causes.of_draws(common))
            return self._of_other_features(trial, shards, whole, is_first)
        chooses = [draw for draw in drawn if draw.chooses]
        if drawn and self._agrees_without_draws(trial, shards):
            # Else rows of which nothing is known but their number, which each rank draws for: no difference.
            shared = chooses or common
            return Finding.at(difference, trial, causes.of_draws(shared)) if shared else None
        matter = self._where_draws_matter(trial) if chooses else None
        if matter is not None and matter.where == difference.where:
            return Finding.at(difference, trial, causes.of_draws(chooses))
        return Finding.at(difference, trial, causes.of(difference, whole, found, shards, trial))

    def _first_difference(
        self, trial: Trial, shards: Sequence[Shard], whole: Outcome, found: Outcome
    ) -> Difference | None:
        tolerance = TOLERANCES[self.dtype]
        difference = first_difference(whole, found, tolerance)
        if difference is None or difference.group != "metrics":
            return difference
        logged = [each for each in differences(whole, found, tolerance) if each.group == "metrics"]
        varies = self._varies(whole, trial.on_whole())
        logged = [each for each in logged if each.name not in varies]
        logged = [each for each in logged if _is_beyond(each, found, whole, [self._on_one_part(trial)])]
        if not logged:
            return None
        # Nor what another order of sums changes where rows tie: with noise they do not.
        noises = ((NOISE,), (-NOISE,))
        try:
            noisy = [(trial.on_whole(noises=each), self._on_parts(trial, shards, noises=each)) for each in noises]
        except Parted:
            return logged[0]
        others = [outcome for outcome, _ in noisy]
        for each in logged:
            differs_without_ties = self.dtype is not None and all(
                each.name in {other.name for other in differences(*pair, tolerance)} for pair in noisy
            )
            if differs_without_ties or _is_beyond(each, found, whole, others):
                return each
        return None

    def _varies(self, whole: Outcome, again: Outcome) -> set[str]:
        """Returns the logged values that are another number when the same run is repeated: a time, or the like."""
        return {each.name for each in differences(whole, again, TOLERANCES[self.dtype]) if each.group == "metrics"}

    def _of_other_features(
        self, trial: Trial, shards: Sequence[Shard], whole: Outcome, is_first: bool
    ) -> Finding | None:
        """Returns which logged values differ where outputs are others: as the graph is, counts and shares may all be 0, and what
        a module has gathered over epochs, such as its best loss, is that of this one.
        """
        names = {name for name, value in whole.ranks[0].logged.items() if bool((value == value.round()).all())}
        runs: list[tuple[float, ...]] = [(_OTHER,), (-_OTHER,)] if names and is_first else []
        if trial.gathers:
            names.update(whole.ranks[0].logged)
            runs.append(tuple(sign * (_OTHER + number) for number in range(3) for sign in (1, -1)))
        try:
            for noises in runs:
                other, found = trial.on_whole(noises=noises), self._on_parts(trial, shards, noises=noises)
                for each in differences(other, found, TOLERANCES[self.dtype]):
                    if each.group != "metrics" or each.name not in names:
                        continue
                    if each.name not in self._varies(other, trial.on_whole(noises=noises)):
                        return Finding.at(each, trial, causes.of(each, other, found, shards, trial))
        except Exception:  # features may be something else than numbers, such as places in a table
            pass
        return None

    def _on_one_part(self, trial: Trial) -> Outcome | None:
        """Returns a run on one rank that has the whole graph, None if the scheme has none."""
        nodes, edges = trial.graph.num_nodes, trial.graph.num_edges
        assert nodes is not None
        holders = np.zeros(edges, dtype=np.int64) if self.layout.kind == "vertex_cut" else None
        try:
            part, layout = np.zeros(nodes, dtype=np.int64), replace(self.layout, parts=1)
            shards = split_graph(trial.graph, part, layout, holders, self.input_type)
            return self._on_parts(trial, shards)
        except (Parted, ValueError):
            return None

    def _agrees_without_draws(self, trial: Trial, shards: Sequence[Shard]) -> bool:
        try:
            whole, found = trial.on_whole(constant=0.5), self._on_parts(trial, shards, constant=0.5)
        except Exception:
            return False
        return first_difference(whole, found, TOLERANCES[self.dtype]) is None

    def _where_draws_matter(self, trial: Trial) -> Difference | None:
        """Returns what is first changed by numbers that are not one per node or edge; None if nothing is."""
        try:
            first, second = (trial.on_whole(constant=each) for each in _EXTREMES)
        except Exception:
            return None
        return first_difference(first, second, TOLERANCES[self.dtype])


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
