"""Operations of a step that a graph of a device cannot contain, found while the step runs as usual."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.extensions.graphs.source import line_of_frame
from lightning_gnn.private_torch import TorchDispatchMode, tree_leaves

_KNOWN = {"aten", "prims", "prim", "c10d", "_c10d_functional", "lightning_gnn", "torchvision"}
"""Namespaces of operators that change only their arguments, and wait for nothing except by their tags."""

_INDEXED = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
_BY_OPTIONS = {*_INDEXED, "repeat_interleave"}
_MOVES = {*_INDEXED, "_to_copy", "copy_", "_copy_from"}


class Operations(TorchDispatchMode):
    """Mode that looks at each operation before it runs.

    Args:
        device: device of the graph.

    Attributes:
        obstacle: description of the first operation that cannot be captured, with the user's line; empty if there is none.
        draws: whether an operation drew random numbers on the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self.obstacle, self.draws = device, "", False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.obstacle and (reason := self._reason(func, args, kwargs or {})):
            line = line_of_frame(sys._getframe(1)) or "in the backward pass:"
            self.obstacle = f"{line} {func.name().partition('::')[2]} {reason}"
        return func(*args, **(kwargs or {}))

    def _reason(self, func: Any, args: Any, kwargs: dict[str, Any]) -> str:
        """Returns why an operation cannot be captured; empty if it can."""
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        here = [each for each in tensors if each.device.type == self._device.type]
        others = [each for each in tensors if each.device.type == "cpu" and each.numel()]
        target = kwargs.get("device")
        to_device = bool(here) if target is None else torch.device(target).type == self._device.type
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws and kwargs.get("generator") is not None:
            return "draws from a torch.Generator, which is not registered with the graph"
        if draws and not to_device and not here:
            return "draws random numbers on the CPU, which a replay would repeat"
        self.draws |= draws
        if namespace not in _KNOWN:
            return "is a custom operator, which may wait for the device"
        if not here and not (to_device and others):
            return ""
        if not to_device or (others and (name in _MOVES or any(each.dim() for each in others))):
            return "reads or makes a tensor of the CPU, which waits for the device"
        is_masked = name in _INDEXED and any(
            isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1] or ()
        )
        if is_masked or (name == "repeat_interleave" and len(here) == 1 and kwargs.get("output_size") is None):
            return "makes a tensor whose size depends on data"
        if name not in _BY_OPTIONS and torch.Tag.dynamic_output_shape in func.tags:
            return "makes a tensor whose size depends on data"
        if torch.Tag.data_dependent_output in func.tags:
            return "reads a number from the device"
        return ""
