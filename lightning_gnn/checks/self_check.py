"""The self-check: the user's own step on a small random graph, whole and split in two, inside one process.

Classes that are known to be exact cannot vouch for a model, whose own code may look across nodes anywhere. So the step
runs both ways, and what goes in and out of every module is compared, then the loss, the gradients and the buffers.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from lightning_gnn.checks.draws import SharedDraws
from lightning_gnn.checks.record import Event, Recorder, Rows, differing, first_difference
from lightning_gnn.checks.small_graph import small_graph, two_halves, two_halves_of_edges
from lightning_gnn.checks.stand_ins import QuietTrainer, aside, quiet, run_step, without_optimizers
from lightning_gnn.comm.group import CommunicationError, World
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.datamodules.shards import Shard, split_graph, whole_graph
from lightning_gnn.datamodules.sources import counted_mask
from lightning_gnn.nn import pyg
from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.context import UnsupportedModelError
from lightning_gnn.nn.helpers import graph_in_use
from lightning_gnn.nn.loss import loss_scale
from lightning_gnn.partition.layout import LayoutSpec

Bind = Callable[[torch.nn.Module, Shard, World], Binding]

HALVES = LayoutSpec("edge_cut", 2)

STAGES: dict[str, tuple[str, str | None]] = {
    "fit": ("training_step", "train_mask"),
    "validate": ("validation_step", "val_mask"),
    "test": ("test_step", "test_mask"),
    "predict": ("predict_step", None),
}
"""By Lightning's name of a stage, the step that it runs and the mask that its values count."""


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
    with ExitStack() as stack:
        stack.enter_context(aside())
        if hasattr(torch.compiler, "set_stance"):  # torch 2.6; compiling would take longer than all runs
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Where the user's constants are float32, float64 may not mix with them.
        for dtype, tolerance in ((torch.float64, 1e-7), (None, 1e-3)):
            try:
                check = _Check(module, batch, bind, stage, loss_reduction, trainer, layout, dtype)
                whole = check.on_whole()
            except UnsupportedModelError as error:
                not_run, refused = None, str(error)
                break
            except Exception as error:
                not_run = not_run or _in_one_line(error)
                continue
            not_run, problem = None, check.compare(whole, tolerance)
            break
    return SelfCheck(time.perf_counter() - began, problem, not_run, refused)


@dataclass
class _Result:
    """One run of the step, on all ranks."""

    events: list[tuple[Rows, Sequence[Event]]]
    loss: Tensor | None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor | None] = field(default_factory=dict)


class _Parted(Exception):
    """A run on two parts did not come to its end; the text says where and why."""


class _Check:
    """Runs of copies of one module on one small graph. All copies share their parameters, so gradients add up."""

    def __init__(
        self,
        module: pl.LightningModule,
        batch: Data,
        bind: Bind,
        stage: str,
        loss_reduction: str,
        trainer: pl.Trainer | None,
        layout: LayoutSpec,
        dtype: torch.dtype | None,
    ) -> None:
        self._layout = layout
        self._bind, self._training, self._reduction = bind, stage == "fit", loss_reduction
        self._step, mask = STAGES[stage]
        self._mask = None if mask is None else counted_mask(mask, module)
        self._graph = small_graph(batch, [self._mask] if self._mask else [])
        self._trainer = None if trainer is None else QuietTrainer(trainer)
        self._module = copy.deepcopy(module).cpu()
        if dtype is not None:
            self._module.to(dtype)
            self._graph.apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
        if not self._training:
            self._module.eval()
        for child in self._module.modules():
            if isinstance(child, MessagePassing):
                pyg.clear_caches(child)

    # Runs #####################################################################

    def on_whole(self) -> _Result:
        """Returns a run on the whole graph, as on one device."""
        shard = whole_graph(self._graph)
        self._forget_gradients()
        model = self._copy()
        events, loss = self._run(model, shard, 0, Recorder(model), lambda value: value)
        return self._result([(self._rows(shard), events)], loss, model)

    def on_parts(self) -> _Result:
        """Returns a run on two halves of it.

        Raises:
            _Parted: a rank raised, or they did not exchange alike.
        """
        holders = two_halves_of_edges() if self._layout.kind == "vertex_cut" else None
        shards, meeting = split_graph(self._graph, two_halves(), self._layout, holders), Meeting(2)
        rows = [self._rows(shard) for shard in shards]
        models, recorders = [self._copy(), self._copy()], [Recorder(torch.nn.Module())] * 2
        self._forget_gradients()

        def on_rank(rank: int) -> tuple[Sequence[Event], Tensor | None]:
            world = InProcessWorld(rank, meeting)
            binding = self._bind(models[rank], shards[rank], world)
            recorders[rank] = Recorder(models[rank])
            with graph_in_use(binding.context, this_thread_only=True):
                return self._run(models[rank], shards[rank], rank, recorders[rank], world.all_reduce_)

        ran = meeting.run(on_rank)
        failures = [(rank, error) for rank, error in enumerate(ran) if isinstance(error, BaseException)]
        if failures:
            # A rank that waits for one that raised fails too, and has nothing to say.
            rank, error = next((f for f in failures if not isinstance(f[1], CommunicationError)), failures[0])
            if isinstance(error, CommunicationError):
                raise _Parted(
                    f"its halves do not go the same way: {error.__cause__ or error}, in {recorders[rank].inside}"
                )
            raise _Parted(f"{recorders[rank].inside or self._step} raises {_in_one_line(error)}")
        done: Any = ran
        losses = [loss for _, loss in done if loss is not None]
        return self._result(
            [(part, events) for part, (events, _) in zip(rows, done)],
            torch.stack(losses).sum() if losses else None,
            models[0],
        )

    def _run(
        self,
        model: pl.LightningModule,
        shard: Shard,
        rank: int,
        recorder: Recorder,
        total: Callable[[Tensor], Tensor],
    ) -> tuple[Sequence[Event], Tensor | None]:
        """Runs the step on one rank; returns what it recorded and the rank's part of the loss."""
        rows = self._rows(shard)
        batch: Any = copy.copy(shard.batch)
        # The user's ids, which their code may look things up by.
        batch.n_id, batch.e_id = self._graph.n_id[rows.nodes], self._graph.e_id[rows.edges]
        counts = shard.mask_counts[self._mask] if self._mask else (1,)
        known = {len(rows.nodes): (rows.num_nodes, rows.nodes), len(rows.edges): (rows.num_edges, rows.edges)}
        with SharedDraws(known), torch.set_grad_enabled(self._training):
            if not model.automatic_optimization:
                without_optimizers(model, loss_scale(None, counts, rank, self._reduction, total))
            output = run_step(model, self._step, batch)
            if not self._training:
                recorder.record(f"what {self._step} returns", (self._step,), output)
                return recorder.events, None
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if not isinstance(loss, Tensor):
                return recorder.events, None
            loss = loss * loss_scale(output, counts, rank, self._reduction, total)
            if model.automatic_optimization and loss.requires_grad:
                loss.backward()
        return recorder.events, loss.detach().double()

    def _copy(self) -> pl.LightningModule:
        shared = {id(parameter): parameter for parameter in self._module.parameters()}
        return quiet(copy.deepcopy(self._module, shared), self._trainer)

    def _rows(self, shard: Shard) -> Rows:
        return Rows(shard.batch.n_id, shard.batch.e_id, sum(shard.counts), sum(shard.edge_counts))

    def _forget_gradients(self) -> None:
        for parameter in self._module.parameters():
            parameter.grad = None

    def _result(self, events: Any, loss: Tensor | None, model: pl.LightningModule) -> _Result:
        gradients = {name: parameter.grad for name, parameter in self._module.named_parameters()}
        return _Result(events, loss, gradients, dict(model.named_buffers()))

    # Comparison ###############################################################

    def compare(self, whole: _Result, tolerance: float) -> str | None:
        """Returns in words where runs part from `whole`; None if they do not."""
        difference = self._difference(whole, self.on_whole(), tolerance)
        if difference is not None:
            return (
                f"run a second time on the same graph, it gives something else: {difference}. It keeps state outside of its "
                "parameters and buffers, or draws random numbers that have nothing to do with nodes and edges"
            )
        try:
            parts = self.on_parts()
        except _Parted as error:
            return f"on a part of the graph, {error}"
        return self._difference(whole, parts, tolerance)

    def _difference(self, whole: _Result, found: _Result, tolerance: float) -> str | None:
        [(_, events)] = whole.events
        first = first_difference(events, found.events, tolerance)
        if first is not None:
            event, difference = first
            return f"{event.where} differs by {difference:.1e} of its largest value"
        if whole.loss is not None and found.loss is not None:
            for _, difference in differing({"loss": found.loss}, {"loss": whole.loss}, tolerance):
                return (
                    f"the loss differs by {difference:.1e}, though all modules agree: if it is not a mean over the labelled "
                    f"nodes of {self._mask}, return {{'loss': loss, 'loss_weight': how many it is over}}"
                )
        for name, difference in list(differing(found.gradients, whole.gradients, tolerance))[::-1]:
            return (
                f"the gradient of '{name}' differs by {difference:.1e} of its largest value, though all outputs agree"
            )
        for name, difference in differing(found.buffers, whole.buffers, tolerance):
            return f"the buffer '{name}' differs by {difference:.1e} of its largest value after the step"
        return None


def _in_one_line(error: BaseException) -> str:
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first[:300]}"
