"""A module's own step tried out on one graph, whole and in parts, in one process: what is recorded is what checks compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import NodeType

from lightning_gnn.checks.draws import Draw, SharedDraws
from lightning_gnn.checks.hooks import PHASES, Hooks
from lightning_gnn.checks.logged_values import Logged, LoggedValues
from lightning_gnn.checks.output_rows import OutputRows
from lightning_gnn.checks.record import Event, Recorder, Rows
from lightning_gnn.checks.stand_ins import (
    QuietTrainer,
    backward,
    copied,
    first_failure,
    quiet,
    run_step,
    without_optimizers,
)
from lightning_gnn.comm.call import Step
from lightning_gnn.comm.group import CommunicationError, World
from lightning_gnn.comm.in_process import InProcessWorld, Meeting, kept_random_state
from lightning_gnn.data.shards import Shard, whole_graph
from lightning_gnn.data.sources import MASKS, counted_mask
from lightning_gnn.nn.bind import Binding, only_bound_convs
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.nn.helpers import graph_in_use
from lightning_gnn.steps.gradients import GradientSum
from lightning_gnn.steps.metric_states import metrics_in
from lightning_gnn.steps.predictions import AmbiguousRowsError, PredictedRows, tensors_in
from lightning_gnn.steps.weights import scale_by

_Graph = TypeVar("_Graph", bound=Data | HeteroData)
Bind = Callable[[torch.nn.Module, Shard, World], Binding]

STAGES: dict[str, tuple[str, str | None]] = {
    "fit": ("training_step", "train_mask"),
    "validate": ("validation_step", "val_mask"),
    "test": ("test_step", "test_mask"),
    "predict": ("predict_step", None),
}
"""By Lightning's name of a stage, the step that it runs and the mask that its values count."""

LR = 0.01
"""Of runs of several steps."""
_MOST_CHANGED = 1 << 20
"""Entries of a parameter that noise is added to."""
NOISE = 1e-9
"""Of features: values that it changes by more than rounding are those of ties."""


@dataclass
class OnRank:
    """A run of the step on one rank.

    Attributes:
        events: what its modules were given and returned, in order of time.
        scale: what the loss weighs in the sum over ranks.
        found_rows: rows of the output that the loss has a gradient in, without those that stand in; None where there are none to
            look at.
        backwards: how often a step that optimises by hand has called ``manual_backward``.
        logged: values by name, at the end of the epoch.
        calls: of ``self.log``.
        predicted: what ``predict_step`` returns, put together; empty where that is not known.
        own_draws: what the model's own code drew for itself, in words.
        noted_draws: draws other than per node or edge.
    """

    rows: Sequence[Rows]
    events: Sequence[Event]
    loss: Tensor | None = None
    scale: float = 1.0
    found_rows: int | None = None
    backwards: int | None = None
    logged: Mapping[str, Tensor] = field(default_factory=dict)
    calls: Mapping[str, Logged] = field(default_factory=dict)
    predicted: Sequence[Tensor] = ()
    own_draws: Sequence[str] = ()
    noted_draws: Sequence[Draw] = ()


@dataclass
class Outcome:
    """A run of the step on all ranks."""

    ranks: Sequence[OnRank]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor | None]

    @property
    def parts(self) -> list[tuple[Sequence[Rows], Sequence[Event]]]:
        return [(each.rows, each.events) for each in self.ranks]

    @property
    def loss(self) -> Tensor | None:
        """Of all ranks together, float64."""
        losses = [each.loss.detach().double() * each.scale for each in self.ranks if each.loss is not None]
        return torch.stack(losses).sum() if losses else None


class Parted(Exception):
    """A run on parts did not come to its end; the text says where and why, `__cause__` is the error."""


class Trial:
    """Runs of copies of one module on one graph. The copies of a run share their parameters, so gradients add up; unless the
    step optimises by hand, or hooks come before it or log after its backward, which may read and write both: then each has its
    own, and gradients are summed as in training.

    Args:
        module: unbound; copies of it run on the CPU.
        graph: as :func:`~lightning_gnn.data.sources.prepare_graph` returns it, with ``n_id`` and ``e_id``, the ids that
            the user's code may look things up by.
        stage: a key of `STAGES`.
        trainer: what the step finds as ``self.trainer``.
        dtype: of all floating tensors; None leaves them as they are.
        share_rows: see :class:`~lightning_gnn.checks.draws.SharedDraws`.
        like: a trial of the same module in the same stage and dtype, whose copy of it is used here, too.
        input_type: of a graph with types, the node type that is predicted.

    Attributes:
        graph: in the dtype of the trial: what is to be split for :meth:`on_parts`.
        reads_epoch: whether the step has asked for its epoch.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        graph: Data | HeteroData,
        stage: str,
        trainer: QuietTrainer | None = None,
        dtype: torch.dtype | None = None,
        share_rows: bool = False,
        begins: bool = True,
        like: Trial | None = None,
        input_type: NodeType | None = None,
    ) -> None:
        self._share_rows, self._input_type = share_rows, input_type
        self._skipped: set[str] = set()
        self._hooks = Hooks(stage, self._skipped, begins)
        self._constant: float | None = None
        self._noises: Sequence[float] = ()
        self.reads_epoch = False
        self.stage, self.training, self._reduction = stage, stage == "fit", "mean"
        self.step, mask = STAGES[stage]
        self.mask = None if mask is None else counted_mask(mask, module)
        self._by_hand = self.training and not module.automatic_optimization
        self._own_weights = self._by_hand or self._hooks.come_before(module) or self._hooks.see_gradients(module)
        self.graph, self._trainer, self._dtype = in_dtype(graph, dtype), trainer, dtype
        self._module: pl.LightningModule = copied(module).cpu() if like is None else like._module
        if like is not None:
            return
        if dtype is not None:
            self._module.to(dtype)
        for metric in metrics_in([self._module]):
            metric.reset()  # of what it has seen in training, each rank has seen a part
        if not self.training:
            self._module.eval()
        for child in self._module.modules():
            if isinstance(child, (torch.nn.MultiheadAttention, torch.nn.RNNBase)):
                child.dropout = 0.0  # drawn where no mode sees it

    @property
    def hooks_not_run(self) -> dict[str, str]:
        """Hooks that log, and what they have raised on one device."""
        return {hook: in_one_line(error) for hook, error in self._hooks.not_run.items()}

    @property
    def gathers(self) -> bool:
        """Whether what an epoch's end logs may be of earlier steps."""
        return self._hooks.gather(self._module, self.step)

    def on_whole(
        self,
        own_draws: int | None = None,
        steps: int = 1,
        constant: float | None = None,
        noises: Sequence[float] = (),
    ) -> Outcome:
        """Returns a run on the whole graph, as on one device.

        Args:
            own_draws, constant: see :class:`~lightning_gnn.checks.draws.SharedDraws`.
            steps: of which the last one is recorded; between two of them Adam steps, with a learning rate of `LR`.
            noises: how much is added to features in each of so many steps, of the largest, and nothing is learnt between them;
                another number is other noise. If the first is 1 or more, weights are others, too, and biases one number.
        """
        shard = whole_graph(self.graph.clone(), self._input_type)  # which the step may change in place
        self._constant, self._noises = constant, noises
        # Later in training the strategy's own graph is in use, in this thread, too.
        alone = graph_in_use(None, this_thread_only=True)
        with self._weights_kept(noises), kept_random_state(), self._in_dtype(), alone:
            [model] = self._copies(1)
            return self._outcome([self._run(model, shard, None, Recorder(model), own_draws, None, steps)], model)

    def on_parts(
        self,
        shards: Sequence[Shard],
        bind: Bind,
        loss_reduction: str = "mean",
        prepare: Callable[[World], None] | None = None,
        own_draws: int | None = None,
        steps: int = 1,
        constant: float | None = None,
        noises: Sequence[float] = (),
    ) -> Outcome:
        """Returns a run on parts of it, each on a rank that is a thread.

        Args:
            loss_reduction: ``"mean"`` or ``"sum"``.
            prepare: called with each rank's world before the module is bound.
            own_draws: of rank 0, of each other rank one more; see :class:`~lightning_gnn.checks.draws.SharedDraws`.
            steps, constant, noises: see :meth:`on_whole`.

        Raises:
            Parted: a rank raised, or they did not exchange alike.
        """
        # Copies: a step may change its batch in place, and slices of one tensor share its version.
        shards = [replace(shard, batch=shard.batch.clone()) for shard in shards]
        meeting = Meeting(len(shards))
        self._reduction, self._constant, self._noises = loss_reduction, constant, noises
        recorders = [Recorder(torch.nn.Module())] * len(shards)

        def on_rank(rank: int) -> OnRank:
            world: World = InProcessWorld(rank, meeting)
            if prepare is not None:
                prepare(world)
            binding = bind(models[rank], shards[rank], world)
            if not shards[rank].types.is_hetero:
                binding.context.columns_at_once = max(1, shards[rank].batch.x.size(1))  # of few rows
            recorders[rank] = Recorder(models[rank])
            own = None if own_draws is None else own_draws + rank
            with graph_in_use(binding.context, this_thread_only=True):
                return self._run(models[rank], shards[rank], world, recorders[rank], own, binding.context, steps)

        with self._weights_kept(noises), only_bound_convs(), self._in_dtype():
            models = self._copies(len(shards))
            ran: Any = meeting.run(on_rank)
            failure = first_failure(ran)
            if failure is None:
                return self._outcome(ran, models[0])
        rank, error = failure
        text = f"{recorders[rank].inside or self.step} raises {in_one_line(error)}"
        if isinstance(error, CommunicationError):
            text = f"its parts do not go the same way: {error.__context__ or error}, in {recorders[rank].inside}"
        raise Parted(text) from error

    def _run(
        self,
        model: pl.LightningModule,
        shard: Shard,
        world: World | None,
        recorder: Recorder,
        own_draws: int | None,
        context: GraphContext | None,
        steps: int,
    ) -> OnRank:
        """Runs the step on one rank, or on the whole graph where there is no world."""
        learning = (model if self._own_weights else self._module).parameters()
        parameters = [each for each in learning if each.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=LR) if parameters else None
        for step in range(len(self._noises) or steps):
            if step and optimizer is not None and not self._noises:
                _learn(optimizer, None if self._own_weights else world)
                recorder.events.clear()
            if context is not None:
                epoch = 0 if self._trainer is None else self._trainer.epochs_before
                context.begin_step(Step(PHASES[self.stage], epoch, step))
            ran = self._run_once(model, shard, world, recorder, own_draws, optimizer, step)
        return ran

    def _run_once(
        self,
        model: pl.LightningModule,
        shard: Shard,
        world: World | None,
        recorder: Recorder,
        own_draws: int | None,
        optimizer: torch.optim.Optimizer | None,
        step: int,
    ) -> OnRank:
        rank = 0 if world is None else world.rank
        all_rows = Rows.of_shard(shard, rank)
        ran = OnRank(all_rows, recorder.events)
        batch: Any = copy.copy(shard.batch)
        # For fetch_rows, which knows this graph, and for tables with a row per node of the user's, which may be smaller.
        for store, known_ids, name in self._ids(batch):
            store[name] = store[name] % (int(known_ids.max()) + 1) if len(known_ids) else store[name]
        if self._noises and self._noises[step]:
            self._add_noise(batch, shard, self._noises[step])
        predicted = shard.predicted(batch)
        rows = next(of for of in all_rows if of.kind == shard.types.input_type)
        counts = shard.mask_counts[self.mask] if self.mask else (1,) * len(shard.counts)
        stand_ins = int(predicted[self.mask].sum()) if self.mask in MASKS and not counts[rank] else 0
        sizes = shard.sizes(rank)
        known = {len(of.edges): (of.num_edges, of.edges) for of in all_rows}
        known |= {len(of.nodes): (of.num_nodes, of.nodes) for of in all_rows}
        draws = SharedDraws(known, rows.of_masks(predicted), 0, own_draws, self._share_rows, self._constant)
        logged = LoggedValues(model, world)
        if self._trainer is not None:
            model._trainer = self._trainer.on_rank(world, logged)  # type: ignore[assignment]
        counts_rows = (
            self.training and self.mask in MASKS and model.automatic_optimization and self._reduction == "mean"
        )
        outputs = OutputRows(model, len(rows.nodes)) if counts_rows else None

        with draws, torch.set_grad_enabled(self.training):
            self._hooks.before(model, batch, world is None, draws, again=step > 0)
            model._current_fx_name = self.step
            logged.enter(counts, stand_ins, sizes)
            sums = GradientSum(world, model.parameters) if world is not None and self._own_weights else None

            def run_backward(loss: Tensor, scale: float, *args: Any, **kwargs: Any) -> None:
                with self._hooks.around_backward(model, loss, optimizer, world is None, draws):
                    backward(loss * scale, sums, *args, **kwargs)

            if self._by_hand:
                scale = scale_by(None, counts, rank, self._reduction, stand_ins)
                backwards = without_optimizers(model, partial(run_backward, scale=scale))
            output = run_step(model, self.step, batch)
            ran.scale = logged.leave(output, self._reduction)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            model._current_fx_name = None
            if self.training:
                if isinstance(loss, Tensor):
                    ran.loss = loss
                    if model.automatic_optimization and loss.requires_grad:
                        found = None if outputs is None else outputs.of(loss)
                        ran.found_rows = None if found is None else max(0, int(found.sum()) - stand_ins)
                        run_backward(loss, ran.scale)
            else:
                recorder.record(f"what {self.step} returns", (self.step,), output, whole_numbers=True)
                if self.stage == "predict" and not self._has_other_ids(output):
                    with suppress(AmbiguousRowsError):  # among so few
                        of = shard.batch if isinstance(batch, HeteroData) else batch  # with this graph's own ids
                        joined = output if world is None else PredictedRows(world, shard, of, "all")(output)
                        ran.predicted = [each.double() for each in tensors_in(joined)]
                self._run_on_second_loader(model, batch, logged, (counts, stand_ins, sizes), world is None)
            if outputs is not None:
                outputs.release()
            if world is None and isinstance(model._trainer, QuietTrainer):
                self.reads_epoch = self.reads_epoch or model._trainer.reads_epoch
            self._hooks.after(model, batch, output, world is None, draws)
            logged.finish(self._skipped)
        ran.backwards = backwards() if self._by_hand else None
        ran.logged, ran.calls = logged.values, logged.calls
        ran.own_draws, ran.noted_draws = draws.own_draws, draws.noted
        return ran

    def _ids(self, batch: Data | HeteroData) -> Iterator[tuple[Any, Tensor, str]]:
        """Yields where a batch has ids of nodes and edges, those that the user's graph has, and their names."""
        if isinstance(batch, HeteroData):
            yield from ((batch[name], self.graph[name].n_id, "n_id") for name in batch.node_types)
            yield from ((batch[kind], self.graph[kind].e_id, "e_id") for kind in batch.edge_types)
        else:
            yield from ((batch, self.graph[name], name) for name in ("n_id", "e_id"))

    def _has_other_ids(self, output: Any) -> bool:
        """Returns whether there may be ids in what a step returns, and the user's are fewer than those of this graph."""
        fewer = any(len(ids) and int(ids.max()) + 1 < len(ids) for _, ids, _ in self._ids(self.graph))
        return fewer and any(each.dtype == torch.int64 and each.dim() == 1 for each in tensors_in(output))

    def _add_noise(self, batch: Any, shard: Shard, size: float) -> None:
        """Adds noise to features, the same for each node on each rank; if it is small, upwards: 3.0 stays 3."""
        g = torch.Generator().manual_seed(round(size / NOISE) % 2**31)
        draw = torch.rand if abs(size) < 1 else torch.randn
        is_hetero = isinstance(batch, HeteroData)
        for name in batch.node_types if is_hetero else [None]:
            into, of_whole, own = ((each[name] if is_hetero else each) for each in (batch, self.graph, shard.batch))
            if "x" not in into:
                continue
            x = into.x
            largest = of_whole.x.abs().max() * max(abs(size), torch.finfo(x.dtype).eps)
            into.x = x + (largest * draw(of_whole.x.shape, generator=g, dtype=x.dtype))[own.n_id]

    def _run_on_second_loader(
        self, model: pl.LightningModule, batch: Any, logged: LoggedValues, counted: tuple[Any, ...], alone: bool
    ) -> None:
        """Runs a step that asks for its dataloader once more, as of the second one; not where that raises on one device."""
        name, step = f"{self.step} of the second dataloader", getattr(model, self.step)
        if name in self._skipped or not is_param_in_hook_signature(step, "dataloader_idx", explicit=True):
            return
        logged.enter(*counted)
        model._current_fx_name = self.step
        try:
            output = run_step(model, self.step, batch, 1)
        except Exception:
            if not alone:
                raise
            self._skipped.add(name)
            output = None
        logged.leave(output, self._reduction)
        model._current_fx_name = None

    def _in_dtype(self) -> _DtypeContextManager:
        """Tensors that a step makes are of the trial's type, too."""
        return _DtypeContextManager(self._dtype or torch.get_default_dtype())

    @contextmanager
    def _weights_kept(self, noises: Sequence[float]) -> Iterator[None]:
        """Gives the parameters that all runs share their values back; inside, noise of 1 or more changes them."""
        before = [parameter.detach().clone() for parameter in self._module.parameters()]
        try:
            if noises and abs(noises[0]) >= 1:
                g = torch.Generator().manual_seed(round(noises[0]) % 2**31)
                with torch.no_grad():
                    for each in self._module.parameters():
                        if each.is_floating_point() and 0 < each.numel() <= _MOST_CHANGED:
                            if each.dim() < 2:  # a bias may make one class of all
                                each.fill_(each.mean())
                            else:
                                noise = torch.randn(each.shape, generator=g, dtype=each.dtype)
                                each.add_(noise * each.abs().max().clamp(min=0.1))
            yield
        finally:
            with torch.no_grad():
                for parameter, values in zip(self._module.parameters(), before):
                    if not torch.equal(parameter, values):
                        parameter.copy_(values)

    def _copies(self, count: int) -> list[pl.LightningModule]:
        """Returns copies without gradients; buffers are each copy's own."""
        for parameter in self._module.parameters():
            parameter.grad = None
        shared = [] if self._own_weights else list(self._module.parameters())
        return [quiet(copied(self._module, shared), self._trainer) for _ in range(count)]

    def _outcome(self, ranks: Sequence[OnRank], model: pl.LightningModule) -> Outcome:
        learning = model if self._own_weights else self._module
        gradients = {name: parameter.grad for name, parameter in learning.named_parameters()}
        return Outcome(ranks, gradients, dict(model.named_buffers()))


def _learn(optimizer: torch.optim.Optimizer, world: World | None) -> None:
    """Steps once for all ranks, whose gradients have been added up."""
    if world is not None:
        world.all_gather_object(None)
    if world is None or world.rank == 0:
        optimizer.step()
        optimizer.zero_grad()
    if world is not None:
        world.all_gather_object(None)


def in_dtype(graph: _Graph, dtype: torch.dtype | None) -> _Graph:
    """Returns a graph whose floating tensors are of that type; None leaves them as they are."""
    return copy.copy(graph).apply(lambda each: each.to(dtype) if dtype and each.is_floating_point() else each)


def in_one_line(error: BaseException) -> str:
    """Returns an error's kind and the begin of its text."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first[:300]}"
