"""Bound layers as operators in the graphs of ``torch.compile``.

A bound layer communicates, runs its own kernels and reads caches, so it is one operator, which runs the layer's usual code.
The operator is registered as effectful: compilers keep it, and its order, also if nothing reads its output. The backward pass is
another such operator. It differentiates the layer by autograd, as without a compiler.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from lightning_gnn.comm.group import World
from lightning_gnn.private_torch import autograd_in_operator, ordered_effect

LAYER = "_lightning_gnn_in_graph"
"""Attribute of a bound layer: its :class:`LayerInGraph`."""

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

_numbers = itertools.count()
_layers: WeakValueDictionary[int, LayerInGraph] = WeakValueDictionary()
_uses: WeakValueDictionary[int, _Use] = WeakValueDictionary()
originals: dict[int, Tensor] = {}
"""Tensors that the running graph received in another form, by the id of that form."""


class LayerInGraph:
    """Calls of a bound layer that were observed, with the shapes of their outputs.

    Args:
        world: all ranks.
    """

    def __init__(self, world: World) -> None:
        self.number, self.world, self.step = next(_numbers), world, world.step
        self.module: Any = lambda: None
        self.outputs: dict[Any, tuple[list[Spec], bool]] = {}
        self.uses: dict[Any, _Use] = {}
        self.recorded: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        _layers[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerInGraph:
        return LayerInGraph(self.world)

    def observe(self, module: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """Store the shapes of the output of a call; no-op for an output that is neither a tensor nor a tuple of tensors."""
        tensors, outs = list[Tensor](), out if isinstance(out, tuple) else (out,)
        structure = _encode((args, kwargs), tensors)
        if all(isinstance(each, Tensor) for each in outs):
            self.module = ref(module)
            self.outputs[structure, specs_of(tensors)] = [(tuple(each.shape), each.dtype) for each in outs], out is outs


@dataclass
class _Use:
    """Call of a layer in graphs: its arguments without tensors, and the tensors that need gradients."""

    layer: LayerInGraph
    structure: Any
    num_arguments: int
    inputs: tuple[Spec, ...]
    """Arguments, then weights."""
    outputs: list[Spec]
    needs: tuple[bool, ...]
    """Of all inputs."""
    number: int = field(default_factory=lambda: next(_numbers))

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns copies of the outputs, and the number of the recorded call."""
        layer, number = self.layer, next(_numbers)
        module, needs = layer.module(), any(self.needs)
        given = [originals.get(id(x), x) for x in tensors[: self.num_arguments]]
        if layer.step is not layer.world.step:  # a step without a backward pass leaves its calls
            layer.step = layer.world.step
            layer.recorded.clear()
        with autograd_in_operator(), torch.set_grad_enabled(needs):
            given = [x.detach().requires_grad_() if need else x for x, need in zip(given, self.needs)]
            args, kwargs = _decode(self.structure, given)
            out = module.forward(*args, **kwargs)
        outs = [*out] if isinstance(out, tuple) else [out]
        found = [(tuple(each.shape), each.dtype) for each in outs]
        if found != self.outputs:
            raise RuntimeError(
                f"{type(module).__name__} must return {self.outputs} in a compiled model, as in an earlier call, got {found}. "
                "Do not compile this model."
            )
        if needs:
            weights = [x for x, need in zip(module.parameters(), self.needs[len(given) :]) if need]
            inputs = [x for x, need in zip(given, self.needs) if need]
            layer.recorded[number] = [*inputs, *weights], outs
        # Outputs without gradient may be cached values, and compiled code may write into outputs.
        outs = [each.detach() if each.requires_grad else each.clone() for each in outs]
        return [*outs, torch.tensor([number])]

    def differentiate(self, grads: Sequence[Tensor], number: int) -> list[Tensor]:
        """Returns the gradients of all inputs that need them, from the gradients of the outputs."""
        inputs, outs = self.layer.recorded.pop(number)
        learn = [out for out in outs if out.requires_grad]
        given = [grad for out, grad in zip(outs, grads) if out.requires_grad]
        found = torch.autograd.grad(learn, inputs, given, allow_unused=True) if learn else [None] * len(inputs)
        return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found)]


def specs_of(tensors: Sequence[Tensor]) -> tuple[Spec, ...]:
    return tuple([(tuple(x.shape), x.dtype) for x in tensors])


def _encode(value: Any, tensors: list[Tensor]) -> Any:
    """Returns arguments with tensors replaced by their places in `tensors`, to which new tensors are appended."""
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


@torch.compiler.assume_constant_result
def _find(number: int, structure: Any, inputs: Any, weights: Any, needs: Any) -> int:
    """Returns twice the number of a use, plus 1 for several outputs; -1 if the call was not observed."""
    layer = _layers[number]
    outputs, several = layer.outputs.get((structure, inputs), (None, False))
    if outputs is None or layer.module() is None:
        return -1
    use = layer.uses.get((structure, inputs, needs))
    if use is None:
        use = layer.uses[structure, inputs, needs] = _Use(
            layer, structure, len(inputs), (*inputs, *weights), outputs, needs
        )
        _uses[use.number] = use
    return 2 * use.number + several


def run_in_graph(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the output of a bound layer inside a function that ``torch.compile`` traces.

    The first call of each shape is a graph break and runs eagerly, since the shape of the output is unknown.
    """
    tensors: list[Tensor] = []
    structure, weights = _encode((args, kwargs), tensors), [*layer.parameters()]
    learns = torch.is_grad_enabled()
    needs = tuple([learns and x.requires_grad for x in [*tensors, *weights]])
    state = getattr(layer, LAYER)
    code = -1
    if len(state.outputs) and not torch.is_autocast_enabled(tensors[0].device.type):
        code = _find(state.number, structure, specs_of(tensors), specs_of(weights), needs)
    if code < 0:
        return _run_eagerly(layer, *args, **kwargs)
    outs = _call([*tensors, *weights], code // 2)[:-1]
    return tuple(outs) if code % 2 else outs[0]


@torch.compiler.disable
def _run_eagerly(layer: Any, *args: Any, **kwargs: Any) -> Any:
    out = layer.forward(*args, **kwargs)
    getattr(layer, LAYER).observe(layer, args, kwargs, out)
    return out


def _call_fake(tensors: list[Tensor], use: int) -> list[Tensor]:
    outs = [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in _uses[use].outputs]
    return [*outs, torch.empty(1, dtype=torch.int64)]


@torch.library.custom_op("lightning_gnn::layer", mutates_args=())
def _call(tensors: list[Tensor], use: int) -> list[Tensor]:
    return _uses[use].run(tensors)


@torch.library.custom_op("lightning_gnn::layer_backward", mutates_args=())
def _call_backward(grads: list[Tensor], number: Tensor, use: int) -> list[Tensor]:
    return _uses[use].differentiate(grads, int(number))


@_call_backward.register_fake
def _(grads: list[Tensor], number: Tensor, use: int) -> list[Tensor]:
    known = _uses[use]
    return [grads[0].new_empty(shape, dtype=dtype) for (shape, dtype), need in zip(known.inputs, known.needs) if need]


def _keep(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    ctx.save_for_backward(output[-1])
    ctx.use = inputs[1]


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None]:
    found = iter(_call_backward(list(grads[:-1]), ctx.saved_tensors[0], ctx.use))
    return [next(found) if need else None for need in _uses[ctx.use].needs], None


_call.register_fake(_call_fake)
_call.register_autograd(_differentiate, setup_context=_keep)
for _operator in (_call, _call_backward):
    _operator.register_effect(ordered_effect())
