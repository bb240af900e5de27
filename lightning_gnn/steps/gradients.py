"""The replicated model: gradients are summed in buckets during the backward pass, and replicas are compared.

Source: buckets and overlap as in PyTorch's DistributedDataParallel (Li et al., VLDB 2020, section 3.2).
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_gnn.comm.group import World
from lightning_gnn.comm.replicas import Replicas
from lightning_gnn.data.shards import Shard
from lightning_gnn.nn.learned_rows import LearnedRows, learned_rows
from lightning_gnn.private_lightning import TRAINER
from lightning_gnn.private_torch import hooks_on_gradient, version_counter

_Hook = Callable[[Tensor], Tensor | None]

BUCKET_BYTES = 4 << 20
"""Size of a bucket; a bucket ends with the parameter that fills it."""


@dataclass
class _Bucket:
    """Parameters whose gradients are sent in one message.

    Attributes:
        parameters: parameters in the approximate order of the backward pass: the model's last first.
        ready: number of parameters that have a gradient in this backward pass.
        flat: sent gradients while the message is pending; the sum afterwards.
        versions: versions of the gradients when they were copied into `flat`.
        wait: function that waits until `flat` holds the sum.
    """

    parameters: list[Tensor]
    ready: int = 0
    flat: Tensor | None = None
    versions: list[tuple[int, int] | None] = field(default_factory=list)
    wait: Callable[[], None] | None = None


class GradientSum:
    """Sum over ranks of the gradients of a backward pass, added to each parameter's ``grad``; used on every rank.

    `parameters` returns the model's parameters, in the same order on every rank. It is called before each backward pass, since
    callbacks may freeze and unfreeze layers.

    Only the gradients of the backward pass are summed. Earlier values of ``grad``, as in manual optimization with several
    backward passes, are already summed. Inside :meth:`pause`, gradients stay local. They are summed with the next backward pass
    outside of it.

    Hooks on parameters (``register_hook``, ``register_post_accumulate_grad_hook``) are called with the sum, which is the gradient
    on one device. Parameters with such hooks are summed in every backward pass.

    A bucket is sent when all its gradients are complete, in the same order on all ranks; the last bucket is sent after the
    backward pass. The message of the last bucket contains flags. They mark the parameters with a gradient on some rank: the
    others keep None, as on one device, where the optimizer then skips them. They also mark buckets that changed after they were
    sent, as in reentrant checkpointing; these are sent again. On devices, hosts exchange the flags without waiting for a device.

    Attributes:
        seconds, collective_seconds: total time spent after backward passes, and its share in collectives.
    """

    def __init__(self, world: World, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._world, self._parameters = world, parameters
        self._learning: list[Tensor] = []
        self._buckets: list[_Bucket] = []
        self._summed_grads: dict[Tensor, Tensor] = {}
        self._removed_hooks: list[tuple[Tensor, dict[int, _Hook], dict[int, _Hook]]] = []
        self._is_paused = self._local = self._working = False
        self._next = 0
        self._own_hooks: dict[int, RemovableHandle] = {}
        self.seconds = self.collective_seconds = 0.0
        self._follow()

    def _follow(self) -> None:
        """Rebuild the buckets if the set of trainable parameters changed."""
        learning = [parameter for parameter in self._parameters() if parameter.requires_grad]
        if len(learning) == len(self._learning) and all(map(operator.is_, learning, self._learning)):
            return
        self._drop_own_hooks()
        self._learning, self._buckets = learning, list(_buckets(learning))
        if self._world.size > 1:
            for bucket in self._buckets[:-1]:
                for parameter in bucket.parameters:
                    hook = parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._on_gradient(bucket))
                    self._own_hooks[hook.id] = hook

    def release(self) -> None:
        self._give_hooks_back()
        self._drop_own_hooks()

    def _drop_own_hooks(self) -> None:
        for hook in self._own_hooks.values():
            hook.remove()
        self._own_hooks = {}

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager in which backward passes leave their gradients unsummed."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def before(self) -> None:
        """Set aside gradients that are already summed; called before a backward pass.

        Gradients of backward passes inside :meth:`pause` stay, for the next sum.
        """
        if self._world.size == 1:
            return
        self._give_hooks_back()  # in case a backward pass raised an error
        self._follow()
        self._hold_hooks()
        for bucket in self._buckets:
            bucket.ready = 0
            for parameter in bucket.parameters:
                if parameter.grad is not None and not self._local:
                    self._summed_grads[parameter], parameter.grad = parameter.grad, None
        self._working, self._next = self._sums, 0

    @property
    def _sums(self) -> bool:
        """True if the gradients of this backward pass are summed."""
        return not self._is_paused or bool(self._removed_hooks)

    def _hold_hooks(self) -> None:
        """Remove the hooks of users from parameters: during the backward pass they would get the local gradient."""
        for parameter in self._learning:
            on_grad, on_parameter = (
                {key: hooks.pop(key) for key in [*hooks] if key not in self._own_hooks} for hooks in _hooks_of(parameter)
            )
            if on_grad or on_parameter:
                self._removed_hooks.append((parameter, on_grad, on_parameter))

    def _give_hooks_back(self) -> None:
        for parameter, *theirs in self._removed_hooks:
            for hooks, removed in zip(_hooks_of(parameter), theirs):
                hooks.update(removed)
        self._removed_hooks = []

    def _on_gradient(self, bucket: _Bucket) -> None:
        """Send the buckets that are complete, in order."""
        if not self._working:
            return
        bucket.ready += 1
        # Except the last bucket, which has the flags of the others.
        while self._next < len(self._buckets) - 1:
            waiting = self._buckets[self._next]
            if waiting.ready < len(waiting.parameters):
                return
            self._send(waiting)
            self._next += 1

    def after(self, loss: Tensor | None = None) -> Tensor | None:
        """Sum the gradients of a backward pass, call the parameters' hooks, and add the gradients that were set aside.

        Returns the sum over ranks of `loss`, ``[]``, which is sent with the gradients; None if nothing was summed.
        """
        self._local = not self._sums
        self._working = False
        if self._local or self._world.size == 1 or not self._buckets:
            return None
        began, collectives = time.perf_counter(), self._world.collectives_s
        total = self._sum(loss)
        removed_hooks = self._removed_hooks
        self._give_hooks_back()
        for parameter, on_grad, _ in removed_hooks:
            for hook in on_grad.values():
                if parameter.grad is not None and (changed := hook(parameter.grad)) is not None:
                    parameter.grad = changed
        added = {parameter for parameter in self._learning if parameter.grad is not None}
        for parameter, grad in self._summed_grads.items():
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        self._summed_grads = {}
        for parameter, _, on_parameter in removed_hooks:
            for hook in on_parameter.values():
                if parameter in added:
                    hook(parameter)
        self.seconds += time.perf_counter() - began
        self.collective_seconds += self._world.collectives_s - collectives
        return total

    def _sum(self, loss: Tensor | None) -> Tensor | None:
        *early, last = self._buckets
        for bucket in early[self._next :]:
            self._send(bucket)
        flags = [float(parameter.grad is not None) for bucket in self._buckets for parameter in bucket.parameters]
        flags += [float(bucket.versions != _versions(bucket)) for bucket in early]
        flag_counts = torch.tensor(flags)
        on_device = last.parameters[0].device.type != "cpu"
        wait_for_flags = self._world.start_all_reduce_(flag_counts, "Which gradients there are") if on_device else None
        dtype = last.parameters[0].dtype
        fits = loss is not None and torch.promote_types(loss.dtype, dtype) == dtype
        self._send(last, [] if on_device else flags, loss if fits else None)
        for bucket in self._buckets:
            assert bucket.wait is not None
            bucket.wait()
        assert last.flat is not None
        total: Tensor | None = None
        if fits:
            last.flat, total = last.flat[:-1], last.flat[-1].clone()
        elif loss is not None:
            total = self._world.all_reduce_(loss.clone(), "Loss")
        if wait_for_flags is None:
            flag_counts = last.flat[len(last.flat) - len(flags) :]
        else:
            wait_for_flags()
        values = flag_counts.tolist()
        used, again = iter(values), values[len(values) - len(early) :]
        for bucket, late in zip(early, again):
            if late:
                self._send(bucket)
                assert bucket.wait is not None
                bucket.wait()
        for bucket in self._buckets:
            self._receive(bucket, used)
        return total

    def _send(self, bucket: _Bucket, tail: Sequence[float] = (), loss: Tensor | None = None) -> None:
        first = bucket.parameters[0]
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in bucket.parameters]
        others = [first.new_tensor(tail), *([] if loss is None else [loss.to(first)])]
        bucket.flat = torch.cat([each.detach().reshape(-1) for each in (*grads, *others)])
        bucket.versions = _versions(bucket)
        bucket.wait = self._world.start_all_reduce_(bucket.flat, "Sum of gradients")

    @staticmethod
    def _receive(bucket: _Bucket, used: Iterator[float]) -> None:
        assert bucket.flat is not None
        sizes = [each.numel() for each in bucket.parameters]
        for parameter, total, is_used in zip(bucket.parameters, bucket.flat[: sum(sizes)].split(sizes), used):
            if is_used:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(total.view_as(parameter))
        bucket.flat = bucket.wait = None


def _hooks_of(parameter: Any) -> tuple[dict[int, _Hook], dict[int, _Hook]]:
    """Returns the hooks on a parameter by number, for its gradient and for itself; torch reads these dicts."""
    on_grad, on_parameter = ({} if hooks is None else hooks for hooks in hooks_on_gradient(parameter))
    return on_grad, on_parameter


def _versions(bucket: _Bucket) -> list[tuple[int, int] | None]:
    return [None if p.grad is None else (id(p.grad), version_counter(p.grad)) for p in bucket.parameters]


def _buckets(parameters: Sequence[Tensor]) -> Iterator[_Bucket]:
    """Yields buckets of parameters of one dtype and device, the last parameters first."""

    def kind(parameter: Tensor) -> tuple[str, str]:
        return str(parameter.dtype), str(parameter.device)

    for _, group in groupby(sorted(reversed(parameters), key=kind), key=kind):
        filling: list[Tensor] = []
        for parameter in group:
            filling.append(parameter)
            if sum(each.numel() * each.element_size() for each in filling) >= BUCKET_BYTES:
                yield _Bucket(filling)
                filling = []
        if filling:
            yield _Bucket(filling)


class SharedModel:
    """Replicated module; used on every rank.

    Args:
        module: module on the rank's device; all ranks get the parameters and buffers of rank 0.
        world: all ranks.
        shard: shard of this rank, which owns the learned embeddings of its local nodes.
        num_optimizers: number of optimizers of the run.
        precision: precision plugin, which may scale gradients.
        equal_buffers: whether buffers must stay equal on all ranks, too.

    Attributes:
        learned_rows: distributed embedding tables of the module; empty on a single rank.

    Raises:
        ValueError: learned embeddings with several optimizers, or with scaled gradients.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        world: World,
        shard: Shard,
        num_optimizers: int = 1,
        precision: Precision | None = None,
        equal_buffers: bool = True,
    ) -> None:
        self._module, self._world, self._equal_buffers = module, world, equal_buffers
        world.broadcast_tensors_([*module.parameters(), *module.buffers()])
        self.learned_rows: list[LearnedRows] = []
        found = learned_rows(module, shard)
        for each in found:
            each.check_training(num_optimizers, precision)
        for each in found if world.size > 1 else ():
            each.distribute(world, shard, self.learned_rows)
            self.learned_rows.append(each)
        self._known_parameters, self._known_buffers = set(module.parameters()), {name for name, _ in module.named_buffers()}
        self.gradients = GradientSum(world, lambda: (parameter for _, parameter in self._parameters()))
        self.replicas = Replicas(world, self._tensors)

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields by name the parameters that were registered before the run, or are in an optimizer.

        Other parameters belong to one rank, such as the best model that rank 0 stores on the module.

        Raises:
            RuntimeError: another parameter has a gradient.
        """
        trainer = getattr(self._module, TRAINER)
        optimizers = [] if trainer is None else trainer.optimizers
        learned = {each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
        for name, parameter in self._module.named_parameters():
            if parameter in self._known_parameters or parameter in learned:
                yield name, parameter
            elif parameter.grad is not None:
                raise RuntimeError(
                    f"The parameter {name!r} was registered during the run and is in no optimizer, so its gradient is not "
                    "summed over ranks. Register it in __init__ or configure_model, or call optimizer.add_param_group."
                )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that must be equal on all ranks, by name."""
        modules = self._module.modules()
        tables = [each for each in modules if isinstance(each, LearnedRows)]
        own_rows = {id(each) for table in tables for each in table.parameters()}
        yield from (named for named in self._parameters() if id(named[1]) not in own_rows)
        if self._equal_buffers:
            yield from (named for named in self._module.named_buffers() if named[0] in self._known_buffers)

    def end_training(self) -> None:
        """Compare the replicas, and collect all learned embeddings."""
        # Ranks with different numbers of steps raise an error here instead of waiting for ranks that still train.
        digests = self._world.all_gather(self.replicas.digest(), "End of training")
        self.replicas.check(digests, "At the end of training")
        for each in self.learned_rows:
            each.collect()

    def release(self) -> None:
        self.gradients.release()
        for each in self.learned_rows:
            each.release()
        self.learned_rows = []
