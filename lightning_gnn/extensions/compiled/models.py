"""Compiled models in steps with row semantics.

Compiled code computes with local rows. This is exact for a model whose functions, outside of bound layers, treat each row
separately. A model is therefore observed first, in a step that runs it without a compiler: row semantics must neither send a
message nor look up a size. For every graph that ``torch.compile`` makes, the same call is observed once more, before the graph
runs. Other models run without a compiler.

Each rank observes and compiles by itself. Both ways send the same messages, so ranks may change at different steps.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_gnn.data.lazy_ids import LazyIds
from lightning_gnn.extensions.compiled.layers import LAYER, originals
from lightning_gnn.nn.patches import Patches
from lightning_gnn.private_torch import (
    ORIGINAL,
    backend_of,
    compiler_without_code,
    current_function_mode,
    optimized_module,
    tree_leaves,
    tree_map,
    without_function_mode,
)
from lightning_gnn.rows import elementwise
from lightning_gnn.rows.mode import RULES, RowsMode, active_mode, place, placement_of, rows_of
from lightning_gnn.rows.placement import Placement

_LOCAL = {RULES[torch.matmul], RULES[torch.cat], RowsMode.run_unchanged}
"""Rules outside of :mod:`~lightning_gnn.rows.elementwise` that either treat each row separately or send a message."""


class CompiledModels:
    """Compiled models of a module, prepared for steps; :meth:`release` undoes it.

    Args:
        module: module whose submodules may be results of ``torch.compile``.
        mode: mode of the steps.
        context: ``dynamo_ctx`` of a compiled LightningModule, whose children are then compiled; else None.
    """

    def __init__(self, module: torch.nn.Module, mode: RowsMode, context: Any = None) -> None:
        self._patches = Patches()
        self.models = list[CompiledModel]()
        layers = [part for part in module.modules() if LAYER in part.__dict__]
        compiled = [part for part in module.modules() if isinstance(part, optimized_module())]
        inside = {id(part) for each in compiled for part in each.modules()}
        for part in compiled:
            self._put(part, CompiledModel(getattr(part, ORIGINAL), part.dynamo_ctx, mode, layers, part.forward))
        for part in _models_in(module) if context is not None else ():
            if id(part) not in inside:
                self._put(part, CompiledModel(part.forward, context, mode, layers, part.forward))

    def _put(self, part: Any, model: CompiledModel) -> None:
        self.models.append(model)
        self._patches.put(part, {"forward": types.MethodType(model, part)})

    def release(self) -> None:
        self._patches.release()


def _models_in(module: torch.nn.Module) -> Iterator[Any]:
    """Yields the models in a LightningModule: its children, and the members of lists and dicts of modules."""
    for child in module.children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from _models_in(child)
        elif LAYER not in child.__dict__ and not isinstance(child, (Metric, MetricCollection)):
            yield child


class _NotObserved(Exception):
    """Raised by a new graph instead of its first run."""


class _Graph:
    """Graph of a model, with the placements of its outputs by the placements of its inputs."""

    def __init__(self) -> None:
        self.placements: dict[Any, list[Placement]] = {}


class CompiledModel:
    """Compiled model in steps with row semantics.

    Args:
        model: model without a compiler.
        context: ``dynamo_ctx`` of ``torch.compile``.
        mode: mode of the steps.
        layers: bound layers that the model may call.
        outside: function that runs outside of row semantics.

    Attributes:
        num_compiled: number of calls that ran as one graph.
    """

    def __init__(
        self, model: Any, context: Any, mode: RowsMode, layers: list[Any], outside: Callable[..., Any]
    ) -> None:
        self._model, self._mode, self._layers, self._outside = model, mode, layers, outside
        self._backend = backend_of(context)
        self._local = set[Any]()
        self._num_observed = self.num_compiled = 0
        self._graph: _Graph | None = None
        self._signature: Any = None
        self._is_running = False
        self._compile()

    def _compile(self) -> None:
        def run(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        model = self._model
        run.__code__ = run.__code__.replace()  # torch counts compilations of each code object
        self._compiled: Any = torch.compile(run, backend=self._make_graph, fullgraph=True, dynamic=False)

    def _make_graph(self, module: Any, inputs: Any) -> Callable[..., Any]:
        compiled, graph = self._backend(module, inputs), _Graph()

        def run(*args: Any) -> Any:
            self._graph = graph
            if self._signature not in graph.placements:
                raise _NotObserved
            self._is_running = True
            return compiled(*args)

        return run

    def __call__(self, part: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        mode = active_mode()
        if mode is None:
            return self._outside(*args, **kwargs)
        if mode is not self._mode or not self._may_compile():
            return self._model(*args, **kwargs)
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        of_call = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), part.training
        self._signature = (*of_call, *(placement_of(x) for x in leaves))
        if self._signature not in self._local:
            return self._observe(None, args, kwargs)
        self._is_running, self._graph = False, None
        try:
            return self._run(leaves, args, kwargs)
        except _NotObserved:
            return self._observe(self._graph, args, kwargs)
        except Exception as error:
            if self._is_running:
                raise
            self._change_backend(error)
            return self._model(*args, **kwargs)

    def _may_compile(self) -> bool:
        mode, device = self._mode, self._mode.ranks.device.type
        plain = current_function_mode() is mode and not (mode.in_backward or mode.exact_draws or mode.ranks.world.stand_ins)
        return plain and self._backend is not None and not torch.is_autocast_enabled(device)

    def _change_backend(self, error: Exception) -> None:
        if __import__("os").environ.get("CE_DEBUG"):
            __import__("traceback").print_exception(error)
        reason, other = f"{type(error).__name__}: {error}".partition("\n")[0], compiler_without_code()
        self._backend = None if self._backend is other else other
        then = "without a compiler" if self._backend is None else "with backend='aot_eager'"
        rank_zero_warn(f"{type(self._model).__name__} runs {then}, since torch.compile failed: {reason}")
        self._compile()

    def _run(self, leaves: list[Tensor], args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda x: x.ids if isinstance(x, LazyIds) else x, (args, kwargs))
        with self._mode.pause(), without_function_mode(), torch.compiler.set_stance("default"):
            originals.update({id(x.ids): x for x in leaves if isinstance(x, LazyIds)})
            try:
                out = self._compiled(*args, **kwargs)
            finally:
                originals.clear()
        assert self._graph is not None
        for x, placement in zip(_tensors(out), self._graph.placements[self._signature]):
            place(x, placement)
        self.num_compiled += 1
        return out

    def _observe(self, graph: _Graph | None, args: Any, kwargs: Any) -> Any:
        """Returns the output of a call without a compiler, and notes whether compiled code would have the same."""
        if graph is None and self._num_observed >= _MOST:
            return self._model(*args, **kwargs)
        self._num_observed += 1
        with _Observation(self._mode, self._layers).active() as seen:
            out = self._model(*args, **kwargs)
        placements = [placement_of(x) for x in _tensors(out)]
        found = [each for each in placements if each is not None and each.view is None]
        if seen.is_local and len(found) == len(placements):
            self._local.add(self._signature)
            if graph is not None:
                graph.placements[self._signature] = found
        return out


_MOST = 4
"""Number of calls that are observed before a model counts as one that compiled code does not compute."""


class _Observation:
    """Whether the functions of a call treat each row separately, and the outputs of bound layers."""

    def __init__(self, mode: RowsMode, layers: list[Any]) -> None:
        self.mode, self._layers, self.is_local = mode, layers, True

    @contextmanager
    def active(self) -> Iterator[_Observation]:
        mode, ranks = self.mode, self.mode.ranks
        before, mode.see = mode.see, self._see
        watched = [(ranks, "make_operation"), (mode, "common_draws"), (mode, "expand"), (mode, "reduce")]
        with ExitStack() as stack:
            stack.callback(setattr, mode, "see", before)
            for owner, name in watched:
                stack.callback(_restore, owner, name, owner.__dict__.get(name))
                if getattr(owner, name) is not None:
                    setattr(owner, name, self._not_local(getattr(owner, name)))
            for layer in self._layers:
                stack.callback(_restore, layer, "forward", layer.__dict__["forward"])
                layer.__dict__["forward"] = self._keep_shapes(layer, layer.forward)
            yield self

    def _see(self, func: Any, args: Any) -> None:
        if self.mode.paused or not self.is_local:
            return
        rule = RULES.get(func)
        if func is Tensor.size and len(args) > 1:
            of = rows_of(args[0])
            self.is_local = of is None or args[1] % args[0].dim() != of.dim
        elif rule not in _LOCAL and getattr(rule, "__module__", "") != elementwise.__name__:
            self.is_local = False

    def _not_local(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.is_local = False
            return function(*args, **kwargs)

        return call

    def _keep_shapes(self, layer: Any, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            with self.mode.pause():
                layer.__dict__[LAYER].observe(layer, *tree_map(_stored, (args, kwargs)), out)
            return out

        return call


def _restore(owner: Any, name: str, before: Any) -> None:
    owner.__dict__.pop(name) if before is None else owner.__dict__.update({name: before})


def _stored(x: Any) -> Any:
    return x.ids if isinstance(x, LazyIds) else x


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]
