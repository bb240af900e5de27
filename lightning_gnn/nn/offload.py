"""What layers leave for the backward, in host memory until the backward wants it. Not tried on CUDA so far."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor

from lightning_gnn.devices import can_pin

Packed = Tensor | tuple[torch.device, Tensor]


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


class Offloaded(torch.autograd.graph.saved_tensors_hooks):
    """While open, in this thread: what a forward saves for its backward is moved to the host, and back when it is wanted.

    As ``torch.autograd.graph.save_on_cpu``, but for what stays on the device anyway, of which a copy would spare nothing.

    Args:
        held: addresses of memory that stays.
        moves: whether a tensor is moved; by default what is not on the host.
    """

    def __init__(self, held: Container[int] = (), moves: Callable[[Tensor], bool] = _on_device) -> None:
        def pack(tensor: Tensor) -> Packed:
            if tensor.untyped_storage().data_ptr() in held or not moves(tensor):
                return tensor
            # What is not pinned, CUDA copies by pinned memory of its own.
            pinned = can_pin(tensor.device) and tensor.layout == torch.strided
            host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=pinned)
            return tensor.device, host.copy_(tensor)

        super().__init__(pack, _unpack)


def _unpack(packed: Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=host.is_pinned())
