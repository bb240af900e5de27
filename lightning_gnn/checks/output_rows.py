"""Over which rows of a model's output a loss is taken: those that it has a gradient in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch_geometric.nn import MessagePassing


class OutputRows:
    """Looks, from its making to :meth:`release`, at what a module and those inside it return. Tensors with `num_rows` rows have
    one per node; `changed`, given the number of such a tensor and the tensor, returns what takes its place. `last` is the number
    of the output that :meth:`of` took; None for none."""

    def __init__(
        self, module: torch.nn.Module, num_rows: int, changed: Callable[[int, Tensor], Tensor] | None = None
    ) -> None:
        self._num_rows, self._changed = num_rows, changed
        self._outputs: list[Tensor] = []
        self.last: int | None = None
        inside = {
            id(part)
            for each in module.modules()
            # What is inside a conv sees other rows, or none if a kernel takes its place; a compiled model would be compiled anew.
            if isinstance(each, MessagePassing) or hasattr(each, "_orig_mod")
            for part in each.modules()
            if part is not each
        }
        parts = [part for part in module.modules() if id(part) not in inside]
        self._hooks = [
            part.register_forward_hook(lambda *of: tree_map_only(Tensor, self._seen, of[-1])) for part in parts
        ]

    def _seen(self, value: Tensor) -> Tensor:
        if not value.requires_grad or not value.dim() or len(value) != self._num_rows:
            return value
        if self._outputs and self._outputs[-1] is value:  # a module that returns what one inside it has returned
            return value
        if self._changed is not None:
            value = self._changed(len(self._outputs), value)
        self._outputs.append(value)
        return value

    def of(self, loss: Tensor) -> Tensor | None:
        """Returns in which rows of the last output that it was made of a loss has a gradient, bool ``[N]``; None for none."""
        for number in reversed(range(len(self._outputs))):
            [gradient] = torch.autograd.grad(loss, self._outputs[number], retain_graph=True, allow_unused=True)
            if gradient is not None:
                self.last = number
                return gradient.flatten(1).ne(0).any(1) if gradient.dim() > 1 else gradient.ne(0)
        return None

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._outputs = [], []
