"""Steps of a stage on a rank, with outputs that are combined over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Step
from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Shard
from lightning_gnn.nn.helpers import gather_halo, graph_in_use, reduce_halo
from lightning_gnn.private_torch import MODULES, ORIGINAL, compiled_call, ordered_effect
from lightning_gnn.registry import explain_error, feature
from lightning_gnn.rows.graph import GraphRows
from lightning_gnn.rows.hooks import in_hooks
from lightning_gnn.rows.mode import local_rows
from lightning_gnn.steps.gradients import SharedModel
from lightning_gnn.steps.loop import SKIPPED, Progress, SignalCheck, loss_in_outputs, without_example
from lightning_gnn.steps.predictions import PredictedRows, Predictions
from lightning_gnn.steps.random_streams import RandomStreams
from lightning_gnn.steps.values import StepValues
from lightning_gnn.steps.weights import RowWeights

_EAGER = "Compiled models run without a compiler: {}."


class Unbound:
    """Null object for a binding and its context, in stages whose steps use their batches unchanged."""

    propagations: Mapping[str, int] = {}

    @property
    def context(self) -> Unbound:
        return self

    def bind(self) -> None:
        """No-op."""

    def release(self) -> None:
        """No-op."""

    def begin_step(self, step: Step) -> None:
        """No-op: nothing is exchanged."""

    def drain(self) -> None:
        """No-op: no exchange is pending."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No-op: there is no state."""


class Steps:
    """Steps of a stage on this rank.

    Call :meth:`share`, :meth:`bind`, :meth:`see_whole_graph` and :meth:`begin` in this order. Only the first and the last are
    called in every stage. :meth:`end` undoes all of them.

    Args:
        turn: context manager around the computation of this rank.
        redraws_every: number of epochs whose training steps draw the same random numbers.
        samples: run on samples, see :class:`~lightning_gnn.extensions.mesh.run.SampleRun`; None without samples.

    Attributes:
        random: streams of random numbers.
        graph_world: ranks that have parts of the same graph, and exchange its rows.
        progress: current position of this rank.
        rounding: codec of messages, with a random state of its own; None without a codec.
        binding: binding of the module to the rank's part of the graph.
        shared: the replicated module.
        values: outputs of steps.
        rows: rows of the whole graph, where layers are bound to it.
        weights: weights of the ranks' values; None outside of stages.
        loss: loss over all ranks, set after the backward pass of a step.
        must_change: function that returns, on rank 0, whether other ranks join.
        in_use: stack of context managers that are open until the end.
        combine: class of objects that combine predictions, or a function that makes one.
        graphs: captured training steps (:mod:`lightning_gnn.extensions.graphs`); None without them.
    """

    graphs: Any = None
    shared: SharedModel
    values: StepValues
    weights: RowWeights | None = None
    loss: Tensor | None = None
    must_change: Callable[[], bool] = staticmethod(bool)
    combine: Callable[..., PredictedRows] = PredictedRows

    def __init__(
        self,
        trainer: pl.Trainer,
        world: World,
        turn: Callable[[], AbstractContextManager[None]],
        redraws_every: int,
        samples: Any = None,
    ) -> None:
        self._samples = samples
        self._trainer, self._world, self._turn = trainer, world, turn
        self._redraws_every = redraws_every
        self.random = RandomStreams(world) if samples is None else samples.random
        self.graph_world: World = world if samples is None else samples.graph_world
        self.progress = Progress()
        self.rounding: Any = None
        self.binding: Any = Unbound()
        self.rows: GraphRows | None = None
        self.in_use = ExitStack()

    def share(self, shared: SharedModel) -> None:
        self.shared = shared
        self.in_use.callback(shared.release)

    def bind(self, binding: Any) -> None:
        """Make the graph of a binding available to layers."""
        self.binding = binding
        self.in_use.callback(binding.release)
        self.in_use.enter_context(graph_in_use(binding.context))

    def see_whole_graph(self, module: pl.LightningModule, shard: Shard) -> None:
        """Enable row semantics: steps on this rank's part stand for steps on the whole graph."""
        if self._world.size > 1:
            self.in_use.enter_context(without_example(module))
        make = partial(GraphRows, shard, self._world, partial(self.random.inside, False), gather_halo, reduce_halo)
        self.rows = rows = make() if self._samples is None else self._samples.make_rows(self.binding.context)
        self.in_use.callback(rows.release, module)
        rows.place_state(module, self._world)

    def keep_compiled(self, module: pl.LightningModule, compiler: Any, checkpoint_convs: bool) -> None:
        """Run compiled models as graphs in steps with row semantics, or warn that they run eagerly.

        Args:
            compiler: compiler of the module itself; None if it is not compiled.
            checkpoint_convs: whether convs are recomputed in the backward pass.
        """
        in_place = [type(part).__name__ for part in module.modules() if compiled_call(part) is not None]
        is_compiled = compiler is not None or any(ORIGINAL in getattr(part, MODULES) for part in module.modules())
        if in_place:
            rank_zero_warn(_EAGER.format(f"{in_place[0]}.compile() has no effect in full-graph steps. Use torch.compile(model)"))
        if is_compiled and checkpoint_convs:
            rank_zero_warn(_EAGER.format("checkpoint_convs=True recomputes convs without a compiler. Remove it"))
        elif is_compiled and ordered_effect() is None:
            rank_zero_warn(_EAGER.format(f"torch {torch.__version__} has no ordered operators. Use torch 2.13 or newer"))
        elif is_compiled and self.rows is not None:
            self.in_use.callback(feature("CompiledModels")(module, self.rows.mode, self.binding, compiler).release)

    def begin(self, module: pl.LightningModule, shard: Shard, loss_reduction: str, on_batches: bool) -> None:
        """Combine the outputs of steps over all ranks.

        Args:
            loss_reduction: reduction of the losses of mini-batch steps.
            on_batches: whether training steps use mini-batches.
        """
        self._module, self._on_batches, trainer = module, on_batches, self._trainer
        self.values = values = StepValues(module, self._world, shard, loss_reduction, self.rows)
        self.in_use.callback(values.release)
        self.weights = values.logs.weights
        self.in_use.enter_context(in_hooks(trainer, lambda: values.hook(not (on_batches and trainer.training))))
        self.in_use.enter_context(loss_in_outputs(trainer, lambda: self.loss))
        check = SignalCheck(self._world, self.must_change)
        self.in_use.enter_context(check.replace_check(trainer))
        self.add_callbacks(check)

    def add_callbacks(self, *callbacks: pl.Callback, place: int = 0) -> None:
        """Insert callbacks into the Trainer's callbacks at `place`."""
        known: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        known[place:place] = callbacks

        def remove() -> None:
            # A LearningRateFinder that fails leaves other callbacks in the list.
            known: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
            known[:] = [each for each in known if each not in callbacks]

        self.in_use.callback(remove)

    @property
    def gradient_seconds(self) -> tuple[float, float]:
        """Seconds spent so far on gradient sums after backward passes, and the seconds of these in collectives."""
        gradients = self.shared.gradients
        return gradients.seconds, gradients.collective_seconds

    def train(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of `step`, Lightning's training step; or `SKIPPED`."""
        self.loss = None
        draws = self.random.inside()
        if self._redraws_every > 1:
            draws = self.random.seed_draws(self._trainer.current_epoch // self._redraws_every)
        run = step if self.graphs is None else partial(self.graphs.forward, step)
        of_step = self.values.step(batch, "train_mask", whole=not self._on_batches)
        with self._computing("training"), draws, self._approximating(), of_step:
            output = run(batch, *args, **kwargs)
        self.values.leave(output, trains=True)
        if output is None and self._trainer.world_size > 1 and self._module.automatic_optimization:
            # Ranks whose step returned a loss wait for this rank in the gradient sum: all ranks raise the error.
            none = torch.zeros((), device=self._world.device)
            self.shared.gradients.before()
            self.values.check_loss(none, self.shared.gradients.after(none))
            return SKIPPED
        return output

    def evaluate(self, step: Callable[..., Any], stage: str, mask: str | None, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of `step`, Lightning's step of a stage; `mask` selects its nodes or edges, None in prediction."""
        with self._computing(stage), self.random.inside(), self.values.step(batch, mask):
            output = step(batch, *args, **kwargs)
        if mask is not None:
            self.values.leave(output)
        return output

    def gather_predictions(self, output: Any, mode: Predictions) -> Any:
        """Returns the predictions of one device; see :class:`~lightning_gnn.steps.predictions.PredictedRows`."""
        assert self.rows is not None
        return self.combine(self._world, self.rows, mode, self.predictions_folder)(output)

    @property
    def predictions_folder(self) -> Path:
        return Path(self._trainer.default_root_dir) / "predictions"

    @contextmanager
    def _computing(self, stage: str) -> Iterator[None]:
        """Context manager around the step of a stage."""
        self.binding.context.begin_step(self.progress.begin_step(stage, self._trainer, self._world))
        try:
            with self._turn():
                yield
        except AttributeError as error:
            name = f"{'predict' if stage == 'prediction' else stage}_step"
            said = explain_error(str(error), f"{type(self._module).__name__}.{name}")
            if said is None:
                raise
            raise AttributeError(said) from error

    def _approximating(self) -> AbstractContextManager[None]:
        """Context manager that allows lossy messages, except in the last epoch, which is exact."""
        return self.graph_world.transport.approximating(self._trainer.current_epoch + 1 != self._trainer.max_epochs)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Context manager around a backward pass and its hooks, which draw equal numbers on all ranks.

        This holds in manual optimization too.
        """
        self.progress.at("backward", self._trainer)
        with self._turn(), local_rows():
            yield
        self.progress.at("the optimizer's step", self._trainer)

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """Context manager around the computation of gradients.

        Recomputations, such as checkpoints, repeat the results of the forward pass.
        """
        self.shared.gradients.before()
        with ExitStack() as stack:
            stack.enter_context(self._approximating())
            if self.rows is not None and not self._on_batches:
                stack.enter_context(self.rows.mode.differentiating())
                stack.enter_context(self.rows.activate(in_backward=True))
            yield

    def differentiate(self, backward: Callable[[Tensor], Any], loss: Tensor, closure_loss: Tensor) -> None:
        """Run the backward pass of a loss, and sum gradients; `closure_loss` is the loss before it was scaled."""
        with self.differentiating():
            backward(loss * self.values.scale)
        with self.random.inside(False):
            self.sum_gradients(closure_loss)

    def sum_gradients(self, loss: Tensor) -> None:
        """All-reduce the gradients of the backward pass of a loss."""
        self.loss = self.shared.gradients.after(loss.detach() * self.values.scale)
        self.values.check_loss(loss.detach(), self.loss)

    def end_training(self) -> None:
        """Wait for pending exchanges, and compare the models of the ranks."""
        self._world.watch.place = "end of training"
        self.binding.context.drain()
        self.shared.end_training()

    def state(self) -> dict[str, Any]:
        """Returns the state of ranks for checkpoints; collective."""
        kept, world = dict[str, Any](), self._world
        if world.size > 1:
            common, own = self.random.state()
            rounding = None if self.rounding is None else self.rounding.random_state()
            streams, seeds, roundings = zip(*world.all_gather_object((own, self.random.seed, rounding)))
            kept["random_streams"] = {"common": common, "own": [*streams], "seeds": [*seeds], "rounding": [*roundings]}
        if not isinstance(self.binding, Unbound):
            exchanges = world.all_gather_object(self.binding.context.state_dict())
            if any(exchanges):
                kept["exchanges"] = exchanges
        return kept

    def load(self, state: Mapping[str, Any], rank: int, world_size: int) -> None:
        """Restore the result of :meth:`state`, possibly on other ranks."""
        exchanges, streams = state.get("exchanges", []), state.get("random_streams", {"own": []})
        if len(exchanges) == world_size:
            self.binding.context.load_state_dict(exchanges[rank])
        if len(streams["own"]) == world_size:
            self.random.load(streams["common"], streams["own"][rank])
            if "seeds" in streams:
                self.random.seed = streams["seeds"][rank]
            if self.rounding is not None and "rounding" in streams:
                self.rounding.set_random_state(streams["rounding"][rank])

    def end(self) -> None:
        """Restore the module, the Trainer and this process."""
        self.in_use.close()


class NoSteps(Steps):
    """Null object before and after a stage."""

    gradient_seconds = 0.0, 0.0  # type: ignore[assignment]

    def __init__(self) -> None:
        self.binding, self.in_use = Unbound(), ExitStack()

    @override
    def state(self) -> dict[str, Any]:
        return {}
