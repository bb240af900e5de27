"""Replacements of the objects that a step uses, for steps without a Trainer in checks and rehearsals."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from lightning_gnn.comm.group import CommunicationError, World, no_process_group
from lightning_gnn.comm.in_process import kept_random_state
from lightning_gnn.nn.learned_rows import untrained_rows
from lightning_gnn.private_lightning import TRAINER, metrics_so_far
from lightning_gnn.private_pyg import clear_caches
from lightning_gnn.private_torch import tree_leaves
from lightning_gnn.rows.graph import whole_value
from lightning_gnn.rows.mode import active_mode, local_rows, place
from lightning_gnn.rows.placement import FROM_ROWS
from lightning_gnn.steps.gradients import GradientSum
from lightning_gnn.steps.weights import gather_rows

if TYPE_CHECKING:
    from lightning_gnn.checks.hooks import LoggedValues

M = TypeVar("M", bound=torch.nn.Module)
T = TypeVar("T")


_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
}  # fmt: skip


class NoDropout(TorchFunctionMode):
    """Mode that disables dropout in this thread, since bound layers draw for local rows.

    Generators of the user are copied, since ranks that are threads share them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[torch.Generator, torch.Generator] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        given = kwargs.get("generator")
        if given is not None:
            if given not in self._copies:
                self._copies[given] = torch.Generator(given.device)
                self._copies[given].set_state(given.get_state())
            kwargs = {**kwargs, "generator": self._copies[given]}
        return func(*args, **kwargs)


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python that users draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def draws_random_numbers(module: torch.nn.Module) -> bool:
    """Returns whether a model has dropout, which each rank draws separately."""
    for part in module.modules():
        rate = getattr(part, "p", 0) if "Dropout" in type(part).__name__ else getattr(part, "dropout", 0)
        if isinstance(rate, (int, float)) and rate > 0:
            return True
    return False


@contextmanager
def isolate() -> Iterator[None]:
    """Context manager that isolates steps: no communication, no warnings, restored random streams and learned embeddings."""
    contexts = no_process_group(), kept_random_state(), untrained_rows(), torch.inference_mode(False)
    with ExitStack() as stack:
        for each in (*contexts, warnings.catch_warnings()):
            stack.enter_context(each)
        warnings.simplefilter("ignore")
        yield


def disable_compile() -> AbstractContextManager[Any]:
    """Returns a context manager in which compiled models run eagerly: compiling would take longer than a few steps."""
    since_2_6 = hasattr(torch.compiler, "set_stance")
    return torch.compiler.set_stance("force_eager") if since_2_6 else nullcontext()


def ignore(*_: Any, **__: Any) -> None:
    """No-op."""


def first_failure(ran: Sequence[Any]) -> tuple[int, BaseException] | None:
    """Returns the rank and the error of a failed run on threads, if possible not an error caused by another rank's failure."""
    failures = [(rank, each) for rank, each in enumerate(ran) if isinstance(each, BaseException)]
    first = failures[0] if failures else None
    return next((each for each in failures if not isinstance(each[1], CommunicationError)), first)


def join_results(ran: Sequence[T | BaseException]) -> list[T]:
    """Returns the results of all ranks; raises RuntimeError if a rank failed."""
    failure = first_failure(ran)
    if failure is not None:
        raise RuntimeError(f"{type(failure[1]).__name__}: {failure[1]}") from failure[1]
    results: Any = ran
    return results


class QuietTrainer:
    """Trainer as seen by a step, without loggers; optionally in another stage and with another datamodule."""

    _logged: LoggedValues | None = None

    def __init__(self, trainer: pl.Trainer, stage: str | None = None, datamodule: pl.LightningDataModule | None = None) -> None:
        self._trainer = trainer
        self.state: TrainerState = copy.copy(trainer.state)
        if stage is not None:
            self.state.stage = RunningStage("train" if stage == "fit" else stage)
            inside_fit = stage == "validate" and trainer.state.fn == TrainerFn.FITTING
            self.state.fn = TrainerFn.FITTING if inside_fit else TrainerFn(stage)
        self.logger: Logger = DummyLogger()
        if datamodule is not None:
            self.datamodule = datamodule

    def __getattr__(self, name: str) -> Any:
        if name == TRAINER:  # during copying
            raise AttributeError(name)
        return getattr(self._trainer, name)

    def on_rank(self, world: World | None, logged: LoggedValues) -> QuietTrainer:
        """Returns the Trainer of one rank, None for one device; `logged` records the values of its logger."""
        mine: Any = copy.copy(self)
        mine.logger, mine._logged = _KeptLogger(logged), logged
        size, rank = (1, 0) if world is None else (world.size, world.rank)
        mine.world_size, mine.num_devices, mine.global_rank, mine.is_global_zero = size, size, rank, rank == 0
        mine.strategy = _QuietStrategy(self._trainer.strategy, world)
        return mine

    # Derived from the state, as in the Trainer.
    training, validating, testing = pl.Trainer.training, pl.Trainer.validating, pl.Trainer.testing
    predicting, evaluating = pl.Trainer.predicting, pl.Trainer.evaluating
    sanity_checking = pl.Trainer.sanity_checking

    @property
    def loggers(self) -> list[Logger]:
        return [self.logger]

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Logged values; the Trainer's own property would communicate with other ranks, which do not exist here."""
        before = metrics_so_far(self._trainer)
        return _Metrics({**before, **({} if self._logged is None else self._logged.so_far())})

    logged_metrics = callback_metrics

    @property
    def estimated_stepping_batches(self) -> float:
        """Total number of steps with one batch per epoch; the Trainer's own property would load data."""
        trainer = self._trainer
        epochs = trainer.max_epochs if trainer.max_epochs is not None else 1
        most = float("inf") if trainer.max_steps == -1 else trainer.max_steps
        return most if epochs == -1 else min(max(epochs, 1), most)

    save_checkpoint = ignore


class _Metrics(dict[str, Tensor]):
    """Logged values by name; values of other stages, which do not run here, are 1 on all ranks."""

    def __missing__(self, name: str) -> Tensor:
        return torch.tensor(1.0)


class _QuietStrategy:
    """Trainer's strategy as seen by a step, for ranks that are threads."""

    def __init__(self, strategy: Any, world: World | None) -> None:
        self._strategy, self._world = strategy, world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._world is None:
            return tensor
        with local_rows():
            found: Tensor = place(gather_rows(tensor, self._world, None, sync_grads), FROM_ROWS)
        return found

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._world is None or not isinstance(tensor, Tensor):
            return tensor
        if active_mode() is not None:
            return whole_value(tensor, reduce_op)
        is_mean = str(reduce_op).lower() in ("mean", "avg")  # mean of the ranks' local values, in local_rows()
        return self._world.all_reduce_(tensor.clone(), "reduce") / (self._world.size if is_mean else 1)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return value if self._world is None else self._world.broadcast_object(value, src)

    barrier = ignore  # ranks need not synchronize


class _KeptLogger(DummyLogger):
    """Logger whose values are recorded; its experiment accepts calls as for TensorBoard and W&B."""

    def __init__(self, logged: LoggedValues) -> None:
        super().__init__()
        self._logged = logged

    @override
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            self._logged.given_to_logger(name, value)

    @property
    def experiment(self) -> Any:
        return self

    def add_scalar(self, tag: str, scalar_value: Any, *_: Any, **__: Any) -> None:
        self._logged.given_to_logger(tag, scalar_value)

    def log(self, values: Any, *_: Any, **__: Any) -> None:
        if isinstance(values, Mapping):
            self.log_metrics(values)

    def __getattr__(self, name: str) -> Any:
        return ignore


class _Idle:
    """Optimizer or scheduler whose steps do nothing."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.zero_grad = ignore

    def step(self, *args: Any, closure: Callable[[], Any] | None = None, **_: Any) -> None:
        closure = next((each for each in (closure, *args) if callable(each)), None)
        if closure is not None:
            closure()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def backward(loss: Tensor, sums: GradientSum | None, *args: Any, **kwargs: Any) -> None:
    """Run a backward pass, and sum gradients over ranks if `sums` is given."""
    if sums is not None:
        sums.before()
    loss.backward(*args, **kwargs)
    if sums is not None:
        sums.after()


def without_optimizers(model: pl.LightningModule, run_backward: Callable[..., None]) -> None:
    """Replace ``manual_backward`` by `run_backward`, and disable optimizer methods, for a step with manual optimization."""
    _replace(model, manual_backward=run_backward)
    _replace(model, **dict.fromkeys(("toggle_optimizer", "untoggle_optimizer", "clip_gradients"), ignore))


def _replace(model: pl.LightningModule, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        object.__setattr__(model, name, method)


def _idle(model: pl.LightningModule) -> tuple[list[_Idle], list[_Idle]]:
    """Returns the optimizers and schedulers that a module configures, as objects whose steps do nothing."""
    configured: Any = model.configure_optimizers()
    schedulers: Any = ()
    if isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], Sequence):
        configured, schedulers = configured
    given = list(configured) if isinstance(configured, Sequence) else [configured]
    of_optimizers = [one["lr_scheduler"] for one in given if isinstance(one, Mapping) and "lr_scheduler" in one]
    return (
        [_Idle(one["optimizer"] if isinstance(one, Mapping) else one) for one in given],
        [_Idle(one["scheduler"] if isinstance(one, Mapping) else one) for one in (*schedulers, *of_optimizers)],
    )


def copy_module(module: M, shared: Iterable[Tensor] = ()) -> M:
    """Returns a copy of a module that shares the `shared` tensors.

    Pruning, weight norm and convs that store their scores leave non-leaf tensors, which ``copy.deepcopy`` rejects. The copy has
    their values. Graph caches of convs are not copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    for part in module.modules():
        for value in part.__dict__.values():
            if isinstance(value, dict) and not value:
                memo[id(value)] = type(value)()  # mostly hooks: copying them took most of the time
                continue
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor) and not tensor.is_leaf:
                    memo[id(tensor)] = tensor.detach().clone()
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        if isinstance(part, MessagePassing):
            clear_caches(part)
    return copied


def quiet(model: pl.LightningModule, trainer: QuietTrainer | None) -> pl.LightningModule:
    """Returns the module with logging and printing disabled, the given trainer, and optimizers that do nothing."""
    setattr(model, TRAINER, trainer)
    idle = cache(partial(_idle, model))  # only on first use

    def one_or_all(objects: list[_Idle]) -> Any:
        return objects[0] if len(objects) == 1 else objects

    _replace(model, optimizers=lambda *_, **__: one_or_all(idle()[0]), lr_schedulers=lambda: one_or_all(idle()[1]) or None)
    _replace(model, **dict.fromkeys(("log", "log_dict", "print"), ignore))
    return model


def run_step(model: pl.LightningModule, name: str, batch: Any) -> Any:
    """Returns the output of a step by name, after the module's own hooks on batches."""
    batch = model.on_after_batch_transfer(model.on_before_batch_transfer(batch, 0), 0)
    step = getattr(model, name)
    return step(batch, 0) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else step(batch)
