"""Compiled models in steps with row semantics.

Compiled code computes with local rows. This is exact if the functions of a model, outside of bound layers, treat each row
separately. So a model is observed first, in a step that runs it without a compiler: row semantics must neither send a message nor
look up a number of rows. For each graph that ``torch.compile`` makes, the call is observed once more, before the graph runs.
Other models run without a compiler, and rank 0 logs the reason.

Ranks observe and compile independently. Both ways send the same messages, so ranks may change at different steps.
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
from lightning_gnn.extensions.compiled.layers import IN_GRAPH, last, originals, put_in_graphs
from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.patches import Patches
from lightning_gnn.private_torch import (
    ORIGINAL,
    backend_of,
    backend_without_code,
    current_function_mode,
    optimized_module,
    tree_leaves,
    tree_map,
    without_function_mode,
)
from lightning_gnn.rows import elementwise
from lightning_gnn.rows.mode import RULES, RowsMode, active_mode, name_of, place, placement_of, rows_of, user_line
from lightning_gnn.rows.placement import Placement

_LOCAL = RULES[torch.matmul], RULES[torch.cat], RowsMode.run_unchanged
"""Rules outside of :mod:`~lightning_gnn.rows.elementwise` that either treat each row separately or send a message."""

_MOST = 4
"""Number of observed calls after which a model runs without a compiler."""


class CompiledModels:
    """Compiled models of a bound module, prepared for steps; :meth:`release` undoes it.

    Args:
        module: module whose submodules may be results of ``torch.compile``.
        mode: mode of the steps.
        binding: binding of the module.
        context: ``dynamo_ctx`` of a compiled LightningModule, whose submodules are then compiled; else None.
    """

    def __init__(self, module: torch.nn.Module, mode: RowsMode, binding: Binding, context: Any = None) -> None:
        self._patches, layers = Patches(), binding.layers
        compiled = [part for part in module.modules() if isinstance(part, optimized_module())]
        inside = {id(part) for each in compiled for part in each.modules()}
        plain = [part for part in _models_in(module) if id(part) not in inside] if context is not None else []
        put_in_graphs(self._patches, layers, mode.ranks.world)
        self.models = [CompiledModel(part, backend_of(part.dynamo_ctx), mode, layers) for part in compiled]
        self.models += [CompiledModel(part, backend_of(context), mode, layers) for part in plain]
        for model in self.models:
            self._patches.put(model.part, {"forward": types.MethodType(model, model.part)})

    def release(self) -> None:
        self._patches.release()


def _models_in(module: torch.nn.Module) -> Iterator[Any]:
    """Yields the models in a LightningModule: its children without layers and metrics, and those in lists of modules."""
    for child in module.children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from _models_in(child)
        elif "forward" not in child.__dict__ and not isinstance(child, (Metric, MetricCollection)):
            yield child


def _model_of(part: Any) -> Any:
    """Returns a model without a compiler."""
    return getattr(part, ORIGINAL) if isinstance(part, optimized_module()) else types.MethodType(type(part).forward, part)


class _NotObserved(Exception):
    """Raised by a new graph in place of its first run; its argument is the graph."""


class CompiledModel:
    """Forward of a compiled model.

    Args:
        part: result of ``torch.compile``, or another module.
        backend: backend of ``torch.compile``.
        mode: mode of the steps.
        layers: bound layers that the model may call.

    Attributes:
        num_compiled: number of calls that ran as one graph.
    """

    def __init__(self, part: Any, backend: Any, mode: RowsMode, layers: list[Any]) -> None:
        self.part, self._backend, self._mode, self._layers = part, backend, mode, layers
        self._outside, self._model, self._name = part.forward, _model_of(part), type(getattr(part, ORIGINAL, part)).__name__
        self._local, self._num_observed, self.num_compiled = set[Any](), 0, 0
        self._reason = ""  # why the last observed call may not run as a graph, and a fix
        self._has_warned = False
        self._placements: list[Placement] | None = None
        self._compile()

    def _compile(self) -> None:
        def run(*args: Any, **kwargs: Any) -> Any:
            last.clear()
            out = model(*args, **kwargs)
            last.clear()
            return out

        model = self._model
        run.__code__ = run.__code__.replace()  # torch counts and limits the graphs of a code object
        self._compiled: Any = torch.compile(run, backend=self._make_graph, fullgraph=True, dynamic=False)

    def _make_graph(self, module: Any, inputs: Any) -> Callable[..., Any]:
        compiled = self._backend(module, inputs)
        graph: dict[Any, list[Placement]] = {}  # placements of outputs, by signature of the call

        def run(*args: Any) -> Any:
            if self._signature not in graph:
                raise _NotObserved(graph)
            self._placements = graph[self._signature]
            return compiled(*args)

        return run

    def __call__(self, part: Any, *args: Any, **kwargs: Any) -> Any:
        mode = active_mode()
        if part is not self.part:  # a copy
            return _model_of(part)(*args, **kwargs)
        if mode is None:
            return self._outside(*args, **kwargs)
        leaves, signature = _tensors((args, kwargs)), (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), part.training)
        self._signature: Any = (*signature, *map(placement_of, leaves))
        if not self._may_compile(mode):
            return self._model(*args, **kwargs)
        if self._signature not in self._local:
            return self._observe({}, args, kwargs)
        self._placements = None
        try:
            return self._run(leaves, args, kwargs)
        except _NotObserved as error:
            return self._observe(error.args[0], args, kwargs)
        except Exception as error:
            if self._placements is not None:  # from the model
                raise
            self._change_backend(error)
            return self._model(*args, **kwargs)

    def _may_compile(self, mode: RowsMode) -> bool:
        if not mode.has_nodes:  # observations and placements are of one axis
            self._warn_of_eager("several data ranks divide the samples. Set graph_ranks to the number of ranks")
            return False
        if self._backend is None or mode is not self._mode or mode.in_backward or mode.exact_draws:
            return False
        if torch.is_autocast_enabled(mode.ranks.device.type):
            self._warn_of_eager("autocast is enabled. Train with Trainer(precision='32-true')")
            return False
        other = current_function_mode()
        if other is not mode:
            self._warn_of_eager(f"{type(other).__name__} is active. Leave this context before you call the model")
        return other is mode

    def _warn_of_eager(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(f"{self._name} runs without a compiler: {reason}.")

    def _change_backend(self, error: Exception) -> None:
        reason, other = f"{type(error).__name__}: {error}".partition("\n")[0], backend_without_code()
        self._backend = None if self._backend is other else other
        how = "without a compiler" if self._backend is None else "with backend='aot_eager'"
        rank_zero_warn(f"{self._name} runs {how}, since torch.compile failed: {reason}")
        self._compile()

    def _run(self, leaves: list[Tensor], args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(_as_in_graph, (args, kwargs))
        with self._mode.pause(), without_function_mode(), torch.compiler.set_stance("default"):
            originals.update({id(_as_in_graph(x)): x for x in leaves if isinstance(x, LazyIds)})
            try:
                out = self._compiled(*args, **kwargs)
            finally:
                originals.clear()
        for x, placement in zip(_tensors(out), self._placements or ()):
            place(x, placement)
        self.num_compiled += 1
        return out

    def _observe(self, graph: dict[Any, list[Placement]], args: Any, kwargs: Any) -> Any:
        """Returns the output without a compiler, and stores its placements if compiled code would have the same output."""
        self._num_observed += 1
        if self._num_observed > _MOST * (1 + len(self._local)):
            self._backend = None
            self._warn_of_eager(self._reason)
        with _observation(self._mode, self._layers) as found:
            out = self._model(*args, **kwargs)
        placements = [placement_of(x) for x in _tensors(out)]
        if found:
            self._reason = f"{found[0]} may depend on other ranks. Compile only the modules before and after it"
        elif any(each is None or each.view is not None for each in placements):
            self._reason = "it returns a view of rows, or a tensor of unknown placement. Return a result of torch's functions"
        else:
            self._reason = "torch.compile makes more graphs than inputs require. Read no Python values that change between steps"
            self._local.add(self._signature)
            graph[self._signature] = placements  # type: ignore[assignment]
        return out


@contextmanager
def _observation(mode: RowsMode, layers: list[Any]) -> Iterator[list[str]]:
    """Context manager that stores shapes of layers' outputs; yields functions that mix rows, with their lines."""
    found, last_seen = list[str](), list[Any]()

    def note(func: Any) -> None:
        found.append(f"{name_of(func)} at {user_line()}")

    def see(func: Any, args: Any) -> None:
        rule, last_seen[:] = RULES.get(func), [func]
        if func is Tensor.size and len(args) > 1 and not mode.paused:
            of = rows_of(args[0])
            if of is not None and args[1] % args[0].dim() == of.dim:
                note(func)
        elif not mode.paused and rule not in _LOCAL and getattr(rule, "__module__", "") != elementwise.__name__:
            note(func)

    def noting(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            note(last_seen[0] if last_seen else function)
            return function(*args, **kwargs)

        return call

    def keeping_shapes(layer: Any, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            with mode.pause():
                getattr(layer, IN_GRAPH).observe(layer, *tree_map(_as_in_graph, (args, kwargs)), out)
            return out

        return call

    watched = (mode.ranks, "make_operation"), (mode, "common_draws"), (mode, "expand"), (mode, "reduce")
    changes = [(owner, name, noting(getattr(owner, name))) for owner, name in watched if getattr(owner, name) is not None]
    changes += [(layer, "forward", keeping_shapes(layer, layer.forward)) for layer in layers]
    with ExitStack() as stack:
        for owner, name, value in [*changes, (mode, "see", see)]:
            before = {name: owner.__dict__[name]} if name in owner.__dict__ else {}
            stack.callback(owner.__dict__.update, before)
            stack.callback(owner.__dict__.pop, name)
            owner.__dict__[name] = value
        yield found


def _as_in_graph(x: Any) -> Any:
    """Returns edges as they are stored: layers in graphs find the edges of the batch by them."""
    return (x.ids if x.dim() == 2 else x.read()) if isinstance(x, LazyIds) else x


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]
