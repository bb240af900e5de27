"""Trial runs of a module's step on one graph, unpartitioned and in parts, in one process, with recorded outputs for checks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_gnn.checks.hooks import PHASES, Hooks, LoggedValues
from lightning_gnn.checks.record import OnRank, Outcome, Parted, Recorder
from lightning_gnn.checks.stand_ins import (
    NoDropout,
    QuietTrainer,
    backward,
    copy_module,
    first_failure,
    quiet,
    run_step,
    seed_all,
    without_optimizers,
)
from lightning_gnn.comm.call import Step
from lightning_gnn.comm.group import CommunicationError, World
from lightning_gnn.comm.in_process import InProcessWorld, Meeting, kept_random_state
from lightning_gnn.data.shards import Graph, Shard, whole_graph
from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.helpers import gather_halo, graph_in_use, reduce_halo
from lightning_gnn.private_lightning import HOOK, TRAINER, DtypeContext
from lightning_gnn.rows.graph import GraphRows, check_loss
from lightning_gnn.rows.mode import local_rows
from lightning_gnn.rows.ranks import Ranks
from lightning_gnn.steps.gradients import GradientSum
from lightning_gnn.steps.metrics import metrics_in
from lightning_gnn.steps.predictions import PredictedRows, tensors_in

_Graph = TypeVar("_Graph", bound=Graph)
Bind = Callable[[torch.nn.Module, Shard, World], Binding]

STAGES: dict[str, tuple[str, str | None]] = {
    "fit": ("training_step", "train_mask"),
    "validate": ("validation_step", "val_mask"),
    "test": ("test_step", "test_mask"),
    "predict": ("predict_step", None),
}
"""Step and mask by Lightning's name of a stage."""


def join_ranks(module: pl.LightningModule, shard: Shard, world: InProcessWorld, bind: Bind) -> tuple[Binding, GraphRows]:
    """Returns a module bound to a rank's shard, and the rows of its steps; collective."""
    if shard.join_ranks is not None:
        return shard.join_ranks(module, world, bind)  # type: ignore[no-any-return]
    return bind(module, shard, world), GraphRows(shard, world, expand=gather_halo, reduce=reduce_halo)


LR = 0.01
"""Learning rate of runs of several steps."""


class Observer(Protocol):
    """Receiver of the messages that the ranks of a :class:`Trial` send."""

    def following(self, world: World, ranks: Ranks) -> AbstractContextManager[None]:
        """Returns a context manager in which messages of a rank belong to the step."""

    def backward(self, rank: int) -> AbstractContextManager[None]:
        """Returns a context manager in which messages of a rank belong to a backward pass."""

    def add(self, rank: int, message: Any) -> None:
        """Hook called for each message, by the rank that sends it."""


class Trial:
    """Runs of copies of one module on one graph.

    The copies of a run share their parameters, so gradients add up. The copies have separate parameters under manual
    optimization, or with hooks before the step or after its backward pass. Such code may access parameters and gradients.
    Gradients are then summed as in training.

    Args:
        module: unbound module; its copies run on the CPU.
        graph: graph from :func:`~lightning_gnn.data.sources.prepare_graph`, with ``n_id`` and ``e_id``, ids for lookups by user
            code.
        stage: key of `STAGES`.
        trainer: value of ``self.trainer`` in the step.
        dtype: dtype of all floating-point tensors; None leaves them unchanged.
        whole: function that returns a graph as the only rank's shard.
        observer: receiver of messages. With an observer, ranks send the messages of training, and nothing is recorded.

    Attributes:
        graph: the graph in the dtype of the trial, to be split for :meth:`on_parts`.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        graph: Graph,
        stage: str,
        trainer: QuietTrainer | None = None,
        dtype: torch.dtype | None = None,
        whole: Callable[[Any], Shard] = whole_graph,
        observer: Observer | None = None,
    ) -> None:
        self._whole, self._observer = whole, observer
        self._skipped: set[str] = set()
        self._hooks = Hooks(stage, self._skipped)
        self.stage, self.training = stage, stage == "fit"
        self.step = STAGES[stage][0]
        self._by_hand = self.training and not module.automatic_optimization
        hooks = (self._hooks.come_before, self._hooks.see_gradients, self._hooks.come_after)
        sees_gradients = any(each(module) for each in hooks)
        self._own_weights = self._by_hand or sees_gradients or observer is not None
        self.graph, self._trainer, self._dtype = in_dtype(graph, dtype), trainer, dtype
        self._module: pl.LightningModule = copy_module(module).cpu()
        if dtype is not None:
            self._module.to(dtype)
        for metric in metrics_in([self._module]):
            metric.reset()  # clear its states of training, which cover a part per rank
        if not self.training:
            self._module.eval()
        for child in self._module.modules():
            if isinstance(child, (torch.nn.MultiheadAttention, torch.nn.RNNBase)):
                child.dropout = 0.0  # drawn internally, where modes do not apply

    @property
    def hooks_not_run(self) -> dict[str, str]:
        """Errors on one device of hooks that log."""
        return {hook: in_one_line(error) for hook, error in self._hooks.not_run.items()}

    def on_whole(self, steps: int = 1, seed: int = 0) -> Outcome:
        """Returns a run on the whole graph, as on one device.

        Args:
            steps: number of steps; the last one is recorded, and Adam with learning rate `LR` updates between steps.
            seed: seed of all random numbers.
        """
        shard = self._whole(self.graph.clone())  # the step may change it in place
        # Later in training the strategy's graph is active in this thread, too.
        alone = graph_in_use(None, this_thread_only=True)
        with self._weights_kept(), kept_random_state(), self._in_dtype(), alone:
            seed_all(seed)
            [model] = self._copies(1)
            return self._outcome([self._run(model, shard, None, Recorder(model, False), (None, None), steps)], model)

    def on_parts(
        self,
        shards: Sequence[Shard],
        bind: Bind,
        prepare: Callable[[World], AbstractContextManager[None]] | None = None,
        steps: int = 1,
        seed: int = 0,
    ) -> Outcome:
        """Returns a run on parts of the graph, each on a rank that is a thread.

        Args:
            shards: shards of the graph.
            bind: function that binds a module to a rank's shard for the scheme.
            prepare: function called with each rank's world before the module is bound; its context manager is open during steps.
            steps, seed: see :meth:`on_whole`.

        Raises:
            Parted: a rank raised an error, or the exchanges of the ranks diverged.
        """
        # Copies: a step may change its batch in place, and slices of one tensor share its version.
        shards = [replace(shard, batch=shard.batch.clone()) for shard in shards]
        meeting = Meeting(len(shards))
        meeting.observer = None if self._observer is None else self._observer.add
        recorders = [Recorder(torch.nn.Module(), True)] * len(shards)

        def on_rank(rank: int) -> OnRank:
            world = InProcessWorld(rank, meeting)
            prepared = nullcontext() if prepare is None else prepare(world)
            binding, rows = join_ranks(models[rank], shards[rank], world, bind)
            if (x := getattr(shards[rank].batch, "x", None)) is not None:  # not for graphs with types
                binding.context.columns_at_once = max(1, x.size(1))  # all columns at once, since there are few rows
            recorders[rank] = Recorder(models[rank], True, self._observer is None)
            with graph_in_use(binding.context, this_thread_only=True), prepared:
                seed_all(seed)
                return self._run(models[rank], shards[rank], world, recorders[rank], (binding, rows), steps)

        with self._weights_kept(), self._in_dtype():
            models = self._copies(len(shards))
            ran: Any = meeting.run(on_rank)
            failure = first_failure(ran)
            if failure is None:
                return self._outcome(ran, models[0])
        rank, error = failure
        text = f"{recorders[rank].inside or self.step} raises {type(error).__name__}"
        if isinstance(error, CommunicationError):
            text = f"its parts diverge: {error.__context__ or error}, in {recorders[rank].inside}"
        raise Parted(text) from error

    def _run(
        self,
        model: pl.LightningModule,
        shard: Shard,
        world: World | None,
        recorder: Recorder,
        joined: tuple[Binding, GraphRows] | tuple[None, None],
        steps: int,
    ) -> OnRank:
        """Run the step on one rank, or on the whole graph if there is no world."""
        learning = (model if self._own_weights else self._module).parameters()
        parameters = [each for each in learning if each.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=LR) if parameters else None
        (binding, rows), observer = joined, self._observer
        if rows is not None and world is not None:
            for mode in rows.modes:
                mode.exact_draws, mode.lets_rows_leave = observer is None, self.stage == "predict"
            rows.place_state(model, world)
        for step in range(steps):
            if step and optimizer is not None:
                _learn(optimizer, None if self._own_weights else world)
                recorder.events.clear()
            if binding is not None:
                epoch = 0 if self._trainer is None else self._trainer.current_epoch
                binding.context.begin_step(Step(PHASES[self.stage], epoch, step))
            watched = nullcontext() if rows is None or observer is None else observer.following(rows.ranks.world, rows.ranks)
            with NoDropout(), nullcontext() if rows is None else rows.activate(), watched:
                ran = self._run_once(model, shard, world, recorder, rows, optimizer, step)
        if rows is not None:
            rows.release(model)
        return ran

    def _run_once(
        self,
        model: pl.LightningModule,
        shard: Shard,
        world: World | None,
        recorder: Recorder,
        rows: GraphRows | None,
        optimizer: torch.optim.Optimizer | None,
        step: int,
    ) -> OnRank:
        ran, on_one_device = OnRank(recorder.events), world is None
        batch: Any = shard.step_batch()
        limit_ids(shard, batch, self.graph)
        with local_rows():
            logged = LoggedValues(model, world, rows)
            if self._trainer is not None:
                setattr(model, TRAINER, self._trainer.on_rank(world, logged))
            if rows is not None:
                rows.place(batch)

        with torch.set_grad_enabled(self.training):
            self._hooks.before(model, batch, on_one_device, again=step > 0)
            setattr(model, HOOK, self.step)
            logged.enter()
            sums = GradientSum(world, model.parameters) if world is not None and self._own_weights else None

            def run_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
                with self._hooks.around_backward(model, loss, optimizer, on_one_device), ExitStack() as stack:
                    if rows is not None:
                        stack.enter_context(rows.activate(in_backward=True))
                    if world is not None and self._observer is not None:
                        stack.enter_context(self._observer.backward(world.rank))
                    backward(loss if world is None else loss / world.size, sums, *args, **kwargs)

            if self._by_hand:
                without_optimizers(model, run_backward)
            output = run_step(model, self.step, batch)
            if rows is not None:
                check_loss(output if self.training else None, rows)
            logged.leave()
            loss = output.get("loss") if isinstance(output, Mapping) else output
            setattr(model, HOOK, None)
            if self.training:
                if isinstance(loss, Tensor):
                    ran.loss = loss.detach()
                    if model.automatic_optimization and loss.requires_grad:
                        run_backward(loss)
            else:
                recorder.record(f"the output of {self.step}", (self.step,), output, whole_numbers=True)
                if self.stage == "predict":
                    with local_rows():
                        joined = output if rows is None else PredictedRows(rows.ranks.world, rows, "all")(output)
                        ran.predicted = [each.double() for each in tensors_in(joined)]
            self._hooks.after(model, batch, output, on_one_device)
            logged.finish(self._skipped)
        ran.logged = logged.values
        return ran

    def _in_dtype(self) -> DtypeContext:
        """Returns a context manager in which a step creates tensors of the trial's dtype."""
        return DtypeContext(self._dtype or torch.get_default_dtype())

    @contextmanager
    def _weights_kept(self) -> Iterator[None]:
        """Context manager that restores the parameters that all runs share."""
        before = [parameter.detach().clone() for parameter in self._module.parameters()]
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, values in zip(self._module.parameters(), before):
                    if not torch.equal(parameter, values):
                        parameter.copy_(values)

    def _copies(self, count: int) -> list[pl.LightningModule]:
        """Returns copies without gradients; each copy has its own buffers."""
        for parameter in self._module.parameters():
            parameter.grad = None
        shared = [] if self._own_weights else list(self._module.parameters())
        return [quiet(copy_module(self._module, shared), self._trainer) for _ in range(count)]

    def _outcome(self, ranks: Sequence[OnRank], model: pl.LightningModule) -> Outcome:
        learning = model if self._own_weights else self._module
        gradients = {name: parameter.grad for name, parameter in learning.named_parameters()}
        return Outcome(ranks, gradients, dict(model.named_buffers()))


def _learn(optimizer: torch.optim.Optimizer, world: World | None) -> None:
    """Step the optimizer of the shared module once, on rank 0, with summed gradients; other ranks wait for rank 0."""
    if world is not None:
        world.all_gather_object(None)
    if world is None or world.rank == 0:
        optimizer.step()
        optimizer.zero_grad()
    if world is not None:
        world.all_gather_object(None)


def limit_ids(shard: Shard, batch: Any, graph: Graph) -> None:
    """Limit `n_id` and `e_id` of a batch to ids in the user's graph, for embedding tables with a row per node.

    Args:
        shard: shard of the batch.
        batch: batch of a step on a small graph.
        graph: the small graph, with ids of the user's graph, from which its rows were sampled.
    """
    known = shard.stores(graph)
    with local_rows():
        for kind, store in shard.stores(batch).items():
            for name in {"n_id", "e_id"} & {*known[kind].keys()}:
                ids = known[kind][name]
                if len(ids) and (end := int(ids.max()) + 1) < len(ids):
                    store[name] = store[name] % end


def in_dtype(graph: _Graph, dtype: torch.dtype | None) -> _Graph:
    """Returns a graph with floating-point tensors of `dtype`; None leaves them unchanged."""
    return copy.copy(graph).apply(lambda x: x.to(dtype) if dtype and x.is_floating_point() else x)


def in_one_line(error: BaseException) -> str:
    """Returns an error's type and the begin of its message."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first[:300]}"
