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
        is_common: whether random numbers are now equal on all ranks.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self.obstacle, self.is_common = device, "", False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.obstacle and (reason := self._reason(func, args, kwargs or {})):
            self.obstacle = f"{line_of_frame(sys._getframe(1)) or 'backward pass:'} {func.overloadpacket} {reason}"
        return func(*args, **(kwargs or {}))

    def _reason(self, func: Any, args: Any, kwargs: dict[str, Any]) -> str:
        """Returns why an operation cannot be captured; empty if it can."""
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        here = [each for each in tensors if each.device.type == self._device.type]
        others = [each for each in tensors if each.device.type == "cpu" and each.numel()]
        target = kwargs.get("device")
        to_device = bool(here) if target is None else torch.device(target).type == self._device.type
        draws, uses_device = torch.Tag.nondeterministic_seeded in func.tags, bool(here or (to_device and others))
        moves = not to_device or any(each.dim() or name in _MOVES for each in others)
        indices = args[1] or () if name in _INDEXED else ()
        is_masked = any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)
        repeats = name == "repeat_interleave" and len(here) == 1 and kwargs.get("output_size") is None
        by_tag = name not in _BY_OPTIONS and torch.Tag.dynamic_output_shape in func.tags
        reasons = {
            "draws from a torch.Generator, which is not registered": draws and kwargs.get("generator") is not None,
            "draws random numbers on the CPU, which a replay would repeat": draws and not (to_device or here),
            "draws random numbers that are equal on all ranks, which is not supported": draws and self.is_common,
            "is a custom operator, which may wait for the device": func.namespace not in _KNOWN,
            "reads or makes a tensor of the CPU, which waits for the device": uses_device and moves,
            "makes a tensor whose size depends on data": uses_device and (is_masked or repeats or by_tag),
            "reads a number from the device": uses_device and torch.Tag.data_dependent_output in func.tags,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")
