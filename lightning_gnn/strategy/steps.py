"""StepStrategy: what a rank's steps, losses and gradients are to those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gnn.heap import keeping_freed_memory
from lightning_gnn.nn.bind import Binding
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.registry import explained
from lightning_gnn.rows.graph import GraphRows, whole_value
from lightning_gnn.rows.mode import active_mode, local_rows, place, placement_of
from lightning_gnn.rows.placement import FROM_ROWS
from lightning_gnn.steps.loop import SKIPPED, Progress
from lightning_gnn.steps.model import SharedModel
from lightning_gnn.steps.predictions import Predictions
from lightning_gnn.steps.random_streams import RandomStreams
from lightning_gnn.steps.values import StepValues
from lightning_gnn.steps.weights import gather_rows
from lightning_gnn.strategy.ranks import RankStrategy
from lightning_gnn.strategy.scheme import Scheme


class StepStrategy(RankStrategy):
    """Runs the module's steps, and sums gradients over ranks; a subclass binds the module. Between set-up and teardown, `random`
    are its streams of random numbers; after a step's backward, `loss` is that of all ranks."""

    strategy_name: str
    scheme: Scheme
    self_check: bool
    keep_constant: bool
    keep_memory: bool
    recompute: bool
    predictions: Predictions
    redraw_every = 1
    """Epochs whose training steps draw the same random numbers; 1: each draws on from the rank's stream."""
    trains_on_batches = False
    """An epoch has many steps, on parts of the graph; else one step, on all of it."""

    def __init__(self, *options: Any, **plugins: Any) -> None:
        super().__init__(*options, **plugins)
        self.progress = Progress()
        self.random: RandomStreams | None = None
        self.loss: Tensor | None = None
        self._binding: Binding | None = None
        # Of a stage, between set-up and teardown.
        self._values: StepValues | None = None
        self._rows: GraphRows | None = None  # of the whole graph, where layers are bound to it
        self._shared: SharedModel | None = None
        self._in_use = ExitStack()
        self._steps = 0

    def layout(self) -> LayoutSpec:
        """Returns what the datamodule must give each rank."""
        return self.scheme.layout(self.world_size, self.num_nodes)

    def checked_stages(self, trainer: pl.Trainer) -> Sequence[str]:
        """Returns the stages whose steps must give the numbers of one device in what the Trainer does now."""
        assert trainer.state.fn is not None
        return ("fit", "validate") if trainer.state.fn == TrainerFn.FITTING else (trainer.state.fn.value,)

    @property
    def gradient_seconds(self) -> tuple[float, float]:
        """Seconds spent after backwards on sums of gradients until now, and of these in collectives."""
        total = None if self._shared is None else self._shared.gradients
        return (0.0, 0.0) if total is None else (total.seconds, total.collective_seconds)

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._steps += 1
        # From the second on: the first frees much that no later one needs.
        if self._steps == 2 and self.keep_memory and self.root_device.type == "cpu":
            self._in_use.enter_context(keeping_freed_memory())
        self.loss = None
        values = self._begin_step("training")
        with (
            self._step("training_step"),
            self._drawing_to_train(),
            self._approximating(),
            values.step(batch, "train_mask", whole=not self.trains_on_batches),
        ):
            output = super().training_step(batch, *args, **kwargs)
        values.leave(output, trains=True)
        if output is None and self.world_size > 1 and self._module.automatic_optimization:
            self._compare_skipped()
            return SKIPPED
        return output

    def _compare_skipped(self) -> None:
        """Ranks whose step has returned a loss meet this one, which has none, where they sum gradients: all are told."""
        assert self._shared is not None and self._values is not None
        gradients, none = self._shared.gradients, torch.zeros((), device=self.root_device)
        gradients.before()
        self._values.check_loss(none, gradients.after(none))

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, "validation", "val_mask", batch, *args, **kwargs)

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, "test", "test_mask", batch, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], stage: str, mask: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
        values = self._begin_step(stage)
        with self._step(f"{stage}_step"), self._drawing(), values.step(batch, mask):
            output = step(batch, *args, **kwargs)
        values.leave(output)
        return output

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        values = self._begin_step("prediction")
        with self._step("predict_step"), self._drawing(), values.step(batch, None):
            output = super().predict_step(batch, *args, **kwargs)
        return values.predicted(output, self.predictions, self._predictions_folder)

    @property
    def _predictions_folder(self) -> Path:
        return Path(self._module.trainer.default_root_dir) / "predictions"

    def _drawing(self, step: bool = True) -> AbstractContextManager[None]:
        """While open, random numbers are those of a step, or those of a hook within one."""
        return nullcontext() if self.random is None else self.random.inside(step)

    def _drawing_to_train(self) -> AbstractContextManager[None]:
        """As :meth:`_drawing`, but what is drawn is the same for :attr:`redraw_every` epochs."""
        if self.random is None or self.redraw_every == 1:
            return self._drawing()
        return self.random.repeated(self._module.trainer.current_epoch // self.redraw_every)

    def _begin_step(self, stage: str) -> StepValues:
        assert self._values is not None
        step = self.progress.begin_step(stage, self._module.trainer, self.world)
        if self._binding is not None:  # none where a step takes its batch as it is
            self._binding.context.begin_step(step)
        return self._values

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """While open, the module's step of that name runs."""
        try:
            yield
        except AttributeError as error:
            said = explained(str(error), f"{type(self._module).__name__}.{name}")
            if said is None:
                raise
            raise AttributeError(said) from error

    def _approximating(self) -> AbstractContextManager[None]:
        """Rows may travel approximately while this is open, except in the last epoch: what it learns is exact."""
        trainer = self._module.trainer
        return self.world.transport.approximating(trainer.current_epoch + 1 != trainer.max_epochs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # As Lightning's, but gradients are summed before on_after_backward, which precision.post_backward calls, and
        # on_before_backward is given the loss as the step returned it.
        self.progress.at("backward", self._module.trainer)
        assert self._shared is not None and self._values is not None
        gradients, scale = self._shared.gradients, self._values.scale
        module, precision = self._module, self.precision_plugin
        with local_rows():
            with self._drawing(False):  # hooks draw alike on all ranks, in manual optimisation too
                self.pre_backward(closure_loss)
                loss = precision.pre_backward(closure_loss, module)
            gradients.before()
            with self._approximating(), self._computing_again():
                precision.backward(loss * scale, module, optimizer, *args, **kwargs)
            with self._drawing(False):
                self.loss = gradients.after(closure_loss.detach() * scale)
                self._values.check_loss(closure_loss.detach(), self.loss)
                loss = precision.post_backward(loss, module)
                self.post_backward(loss)
        self.progress.at("the optimizer's step", self._module.trainer)
        return loss

    def _computing_again(self) -> AbstractContextManager[Any]:
        """While open, what a backward computes again, such as checkpoints, is what it was the first time."""
        is_whole = self._rows is not None and not self.trains_on_batches
        if not is_whole or self._rows is None:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(self._rows.mode.differentiating())
        stack.enter_context(self._rows.mode.opened(in_backward=True))
        return stack

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._drawing(False):
            return super().optimizer_step(*args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator:
        """Leaves gradients unsummed while open: those of an accumulation are summed once, at its end."""
        assert self._shared is not None
        with self._shared.gradients.blocked():
            yield None

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Returns the mean over ranks, by the labelled rows of the stage's mask as in logs, or the sum, as `reduce_op` says."""
        if not isinstance(tensor, Tensor):
            return tensor
        if active_mode() is not None:
            return whole_value(tensor, reduce_op)
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if is_mean and self._values is not None and self.world.size > 1 and group in (None, self.world.everyone):
            return self._values.logs.weights.mean(tensor, "A mean over ranks")
        return _sync_ddp_if_available(tensor.to(self.root_device), group, reduce_op=reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        with local_rows():  # decisions of ranks are counted
            return super().reduce_boolean_decision(decision, all)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensors of all ranks, which may have different numbers of rows; see
        :func:`~lightning_gnn.steps.weights.gather_rows`."""
        if self._world is None or self._world.size == 1:
            return tensor
        if group not in (None, self.world.everyone):
            return super().all_gather(tensor, group, sync_grads)
        mode = active_mode()
        of = placement_of(tensor)
        if mode is not None and tensor.requires_grad and of is not None and of.rows is None:
            return tensor.expand(self.world.size, *tensor.shape)  # whose gradient is that of one value
        weights = None if self._values is None or mode is not None else self._values.logs.weights
        with local_rows():
            found = gather_rows(tensor, self.world, weights, sync_grads)
        return found if mode is None else place(found, FROM_ROWS)
