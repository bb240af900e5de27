"""Bound layers as operators in the graphs of ``torch.compile``.

A bound layer communicates, runs its own kernels and reads caches, so it is one operator, which runs the layer's usual code. The
messages of a user's conv are part of the graph; there the operator is S x only. The backward pass is another operator, which
differentiates the usual code by autograd.

Operators are effectful, so compilers keep them. Each operator reads a tensor of the previous one, because Inductor of torch 2.13
reorders effectful operators.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from lightning_gnn.comm.group import World
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.nn.convs import rule_of
from lightning_gnn.nn.norms import STATE
from lightning_gnn.nn.patches import Patches
from lightning_gnn.private_torch import autograd_in_operator, graph_task, ordered_effect, tree_map
from lightning_gnn.rows.mode import register_row_rule

IN_GRAPH = "_lightning_gnn_in_graph"
"""Attribute of a bound layer: its :class:`LayerInGraph`."""

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

_numbers = itertools.count()
_layers: WeakValueDictionary[int, LayerInGraph] = WeakValueDictionary()
_uses: WeakValueDictionary[int, _Use] = WeakValueDictionary()
originals: dict[int, Tensor] = {}
"""Tensors that the running graph received in another form, by the id of that form."""
last: list[Tensor] = []
"""Tensors of the operators in the graph that is traced, in their order."""


class LayerInGraph:
    """State of a layer in graphs.

    Args:
        world: all ranks.
        predict: function that returns the shapes of the outputs of a call from the inputs; by default, calls are observed first.

    Attributes:
        outputs: shapes of the outputs of a call, and whether they are a tuple, by structure and shapes of its arguments.
        recorded: inputs and outputs of calls without a backward pass so far, by number.
    """

    def __init__(self, world: World, predict: Callable[[Sequence[Spec]], list[Spec]] | None = None) -> None:
        self.number, self.world, self.predict, self.step = next(_numbers), world, predict, world.step
        self.module: Any = lambda: None
        self.outputs: dict[Any, tuple[list[Spec], bool]] = {}
        self.uses: dict[Any, _Use] = {}
        self.recorded: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        _layers[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerInGraph:
        return LayerInGraph(self.world)

    def observe(self, module: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """Store the shapes of the output of a call: of a tensor or tuple of tensors that only inputs and parameters train."""
        tensors, outs = list[Tensor](), out if isinstance(out, tuple) else (out,)
        structure = _encode((args, kwargs), tensors)
        learns = any(x.requires_grad for x in [*tensors, *module.parameters()])
        if all(isinstance(each, Tensor) and (learns or not each.requires_grad) for each in outs):
            self.module = ref(module)
            self.outputs[structure, _specs_of(tensors)] = [*_specs_of(outs)], out is outs


@dataclass
class _Use:
    """Call of a layer in graphs: its arguments without tensors, its tensors, and the tensors that need gradients.

    Inputs are the tensors in arguments, then the weights.
    """

    layer: LayerInGraph
    structure: Any
    num_arguments: int
    inputs: tuple[Spec, ...]
    outputs: list[Spec]
    needs: tuple[bool, ...]
    number: int = field(default_factory=lambda: next(_numbers))

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the outputs, and the number of this call."""
        layer, number, needs, step = self.layer, next(_numbers), any(self.needs), self.layer.world.step
        if layer.step is not step:  # a step without a backward pass leaves its calls
            layer.step, layer.recorded = step, {}
        with autograd_in_operator(), torch.set_grad_enabled(needs):
            known = [originals.get(id(x), x) for x in tensors[: self.num_arguments]]
            given = [x.detach().requires_grad_() if need else x for x, need in zip(known, self.needs)]
            args, kwargs = _decode(self.structure, given)
            module = layer.module()
            out = module.forward(*args, **kwargs)
        outs = [*out] if isinstance(out, tuple) else [out]
        inputs = [x for x, need in zip([*given, *module.parameters()], self.needs) if need]
        if [*_specs_of(outs)] != self.outputs or _leaves_of(outs) - {id(x) for x in inputs}:
            raise RuntimeError(
                f"A compiled {type(module).__name__} must return tensors of shapes that follow from the shapes of arguments, "
                "and only its own parameters may learn. Do not compile this model."
            )
        if needs:
            layer.recorded[number] = inputs, outs
        # Outputs without gradient may be cached values, and compiled code may write into outputs.
        return [*[x.detach() if x.requires_grad else x.clone() for x in outs], torch.tensor([number])]

    def differentiate(self, grads: Sequence[Tensor], number: int) -> list[Tensor]:
        """Returns the gradients of the inputs that need them, from the gradients of the outputs of a call."""
        inputs, outs = self.layer.recorded.pop(number)
        learn, given = zip(*[(out, grad) for out, grad in zip(outs, grads) if out.requires_grad])
        found = torch.autograd.grad(learn, inputs, given, allow_unused=True)
        return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found)]


def _leaves_of(outs: Sequence[Tensor]) -> set[int]:
    """Returns the ids of the leaves that get gradients from outputs."""
    nodes: list[Any] = [x.grad_fn for x in outs if x.grad_fn is not None]
    for node in nodes:
        nodes.extend(each for each, _ in node.next_functions if each is not None and each not in nodes)
    return {id(node.variable) for node in nodes if hasattr(node, "variable")}


def _specs_of(tensors: Iterable[Tensor]) -> tuple[Spec, ...]:
    return tuple([(tuple(x.shape), x.dtype) for x in tensors])


def _encode(value: Any, tensors: list[Tensor]) -> Any:
    """Returns arguments with places in `tensors` instead of tensors, and appends new tensors there."""
    if isinstance(value, Tensor):
        for place, known in enumerate(tensors):
            if known is value:
                return "tensor", place
        tensors.append(value)
        return "tensor", len(tensors) - 1
    if isinstance(value, (tuple, list)):
        return ("tuple", *[_encode(each, tensors) for each in value])
    if isinstance(value, dict):
        return ("dict", *[(name, _encode(each, tensors)) for name, each in value.items()])
    return "value", value


def _decode(code: Any, tensors: Sequence[Tensor]) -> Any:
    kind, *parts = code
    if kind == "tuple":
        return tuple(_decode(each, tensors) for each in parts)
    if kind == "dict":
        return {name: _decode(each, tensors) for name, each in parts}
    return tensors[parts[0]] if kind == "tensor" else parts[0]


# Operators ####################################################################


@torch.library.custom_op("lightning_gnn::layer", mutates_args=())
def _call(tensors: list[Tensor], after: list[Tensor], use: int) -> list[Tensor]:
    return _uses[use].run(tensors)


@_call.register_fake
def _(tensors: list[Tensor], after: list[Tensor], use: int) -> list[Tensor]:
    outs = [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in _uses[use].outputs]
    return [*outs, torch.empty(1, dtype=torch.int64)]


@torch.library.custom_op("lightning_gnn::layer_backward", mutates_args=())
def _call_backward(grads: list[Tensor], number: Tensor, after: list[Tensor], use: int) -> list[Tensor]:
    return [*_uses[use].differentiate(grads, int(number)), torch.empty(1)]


@_call_backward.register_fake
def _(grads: list[Tensor], number: Tensor, after: list[Tensor], use: int) -> list[Tensor]:
    known = _uses[use]
    found = [grads[0].new_empty(shape, dtype=dtype) for (shape, dtype), need in zip(known.inputs, known.needs) if need]
    return [*found, torch.empty(1)]


def _keep(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    ctx.save_for_backward(output[-1])
    ctx.use, ctx.num_after = inputs[2], len(inputs[1])


_of_last: dict[int, Tensor] = {}
"""Tensor of the last operator in the backward pass that is traced, by its id."""


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], list[None], None]:
    after = [_of_last[graph_task()]] if graph_task() in _of_last else []
    found = _call_backward(list(grads[:-1]), ctx.saved_tensors[0], after, ctx.use)
    _of_last.clear()
    _of_last[graph_task()] = found[-1]
    given = iter(found)
    return [next(given) if need else None for need in _uses[ctx.use].needs], [None] * ctx.num_after, None


_call.register_autograd(_differentiate, setup_context=_keep)
for _operator in (_call, _call_backward):
    _operator.register_effect(ordered_effect())
register_row_rule(_call)  # backend="eager" returns its outputs as they are


# Functions that torch.compile traces ##########################################


def put_in_graphs(patches: Patches, layers: Iterable[Any], world: World) -> None:
    """Make bound layers operators of graphs, until `patches` are released."""
    for layer in layers:
        own = rule_of(type(layer))
        conv: Any = getattr(layer, STATE, None)
        put: dict[str, Any] = {IN_GRAPH: LayerInGraph(world), "forward": _switch(layer.forward, _run_layer)}
        # Only `propagate` communicates, for messages that the conv's own code computes.
        computes = getattr(conv, "of_update", None) == set() and not (own.adapter or own.forward or conv.rule.sends_rows)
        if computes and conv.sources and "edge_updater" not in conv.functions:
            conv.halo_rows = HaloRows(conv.context, conv.layer, layer.node_dim)
            put |= {"forward": _switch(layer.forward, _trace_conv), "propagate": _switch(layer.propagate, _propagate)}
        patches.put(layer, put)


def _switch(method: Any, in_graph: Callable[..., Any]) -> Any:
    """Returns a method that runs `in_graph` inside functions that torch.compile traces."""
    function = method.__func__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return in_graph(self, *args, **kwargs) if torch.compiler.is_compiling() else function(self, *args, **kwargs)

    return types.MethodType(call, method.__self__)


@torch.compiler.assume_constant_result
def _find(number: int, structure: Any, inputs: Any, weights: Any, needs: Any) -> int:
    """Returns twice the number of a use, plus 1 for several outputs; raises KeyError for a call that was not observed."""
    layer = _layers[number]
    if layer.predict is not None:
        layer.outputs[structure, inputs] = layer.predict(inputs), False
    outputs, several = layer.outputs[structure, inputs]
    if (structure, inputs, needs) not in layer.uses:
        use = _Use(layer, structure, len(inputs), (*inputs, *weights), outputs, needs)
        layer.uses[structure, inputs, needs] = _uses[use.number] = use
    return 2 * layer.uses[structure, inputs, needs].number + several


def _run_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
    tensors: list[Tensor] = []
    structure, weights = _encode((args, kwargs), tensors), [*layer.parameters()]
    needs = tuple([torch.is_grad_enabled() and x.requires_grad for x in [*tensors, *weights]])
    use = _find(getattr(layer, IN_GRAPH).number, structure, _specs_of(tensors), _specs_of(weights), needs)
    *outs, number = _call([*tensors, *weights], last[-1:], use // 2)
    last.append(number)
    return tuple(outs) if use % 2 else outs[0]


def _trace_conv(conv: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = tree_map(_with_wide_ids, (args, kwargs))
    return type(conv).forward(conv, *args, **kwargs)


def _with_wide_ids(x: Any) -> Any:
    is_edges = isinstance(x, Tensor) and x.dtype == torch.int32 and x.dim() == 2 and len(x) == 2
    return x.long() if is_edges else x


def _propagate(conv: Any, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
    """`propagate` in graphs: PyG's own over (S x, x)."""
    state, lifted = getattr(conv, STATE), dict(kwargs)
    sources: list[str] = []
    for name in sorted(state.sources):
        value = kwargs.get(name)
        source, target = value if isinstance(value, (tuple, list)) else (value, value)
        if isinstance(source, Tensor):
            lifted[name] = _run_layer(state.halo_rows, source, not sources), target
            sources.append(name)
    context = state.context
    found: Tensor = state.functions["propagate"](
        conv, edge_index, size=(context.num_owned + context.num_halo, context.num_targets), **lifted
    )
    return found


class HaloRows(torch.nn.Module):
    """S x of a conv as a layer."""

    def __init__(self, context: GraphContext, layer: str, dim: int) -> None:
        super().__init__()
        self._context, self._layer, self._dim = context, layer, dim
        self.__dict__[IN_GRAPH] = LayerInGraph(context.exchange.world, self._predict)
        self.__dict__[IN_GRAPH].module = ref(self)

    def _predict(self, inputs: Sequence[Spec]) -> list[Spec]:
        (shape, dtype), rows = inputs[0], self._context.num_owned + self._context.num_halo
        dim = self._dim % len(shape)
        return [((*shape[:dim], rows, *shape[dim + 1 :]), dtype)]

    def forward(self, x: Tensor, is_first: bool) -> Tensor:
        self._context.check_rows(x.size(self._dim), self._layer)
        if is_first:
            self._context.count_propagation(self._layer)
            self._context.on_loaded_edges.add(self._layer)
        return self._context.expand(x, self._layer, self._dim)
