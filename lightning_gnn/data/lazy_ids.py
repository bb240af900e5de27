"""Edge ids of a rank: int64 for users, like PyG's, but stored as int32 until they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_gnn.devices import available_bytes
from lightning_gnn.private_torch import VERSION, make_wrapper, parse_to, tree_map_only

# fmt: off
_OF_THE_SHAPE = frozenset((
    "size", "shape", "dim", "ndim", "numel", "nelement", "stride", "is_contiguous", "__len__", "__hash__", "dtype", "device",
    "get_device", "layout", "element_size", "itemsize", "nbytes", "is_floating_point", "is_complex", "is_inference", "is_sparse",
    "is_sparse_csr", "is_quantized", "is_nested", "is_meta", "is_cpu", "is_cuda", "is_mps", "is_xpu", "is_mkldnn", "is_leaf",
    "requires_grad", "grad_fn", "grad",
))
# fmt: on
"""Functions, methods and properties of tensors that do not depend on values."""


class LazyIds(Tensor):
    """int64 ids that are stored as int32 until they are read, and as int64 afterwards.

    PyG's ``edge_index`` takes 16 bytes per edge, and ``e_id`` 8. Sums and attention over a rank's own edges do not read them.
    They use matrices, which are made from the stored ids, see :func:`stored_ids`. All other code gets int64 like PyG's.

    Args:
        ids: int32, of any shape.
        attribute: name of the batch attribute, for errors.

    Attributes:
        ids: int32, or int64 after the first read.
    """

    ids: Tensor
    attribute: str

    @staticmethod
    def __new__(cls, ids: Tensor, attribute: str) -> LazyIds:
        return make_wrapper(cls, ids.shape, dtype=torch.long, device=ids.device)

    def __init__(self, ids: Tensor, attribute: str) -> None:
        self.ids, self.attribute = ids, attribute

    @property
    def were_read(self) -> bool:
        return self.ids.dtype == torch.long

    def read(self) -> Tensor:
        """Returns the ids as int64, always the same tensor.

        Raises:
            MemoryError: not enough memory; the message names the attribute and its readers.
        """
        if self.ids.dtype != torch.long:
            num_bytes = 8 * self.ids.numel()
            looked_up = self.ids.device.type == "cpu" and not torch.compiler.is_compiling()
            free = available_bytes() if looked_up else None
            try:
                if free is not None and num_bytes > free:
                    raise MemoryError
                with torch.inference_mode(False):  # evaluation may come first, and training needs the ids, too
                    self.ids = self.ids.long()
            except (MemoryError, torch.cuda.OutOfMemoryError) as error:
                left = "" if free is None else f", and {free / 1e9:.3g} GB are available"
                raise MemoryError(
                    f"batch.{self.attribute} as int64 takes {num_bytes / 1e9:.3g} GB on this rank{left}. It is created "
                    "because the model, or a conv that runs PyG's own code, reads edge ids. docs/memory.md lists the convs that "
                    "do not read them."
                ) from error
        return self.ids

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        with torch.DisableTorchFunctionSubclass():
            if name in _OF_THE_SHAPE:
                return func(*args, **kwargs)
            first = args[0] if args else None
            if not isinstance(first, LazyIds):
                return cls.__torch_dispatch__(func, types, args, kwargs)
            if name == VERSION and not first.were_read:
                return 0
            moved = first._move(func, args[1:], kwargs)
            if moved is not None:
                return moved
            # Like for any tensor, the result of an in-place or no-op method is the object itself: layers compare edges by
            # identity.
            found = cls.__torch_dispatch__(func, types, args, kwargs)
            return first if found is first.ids else found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(LazyIds, LazyIds.read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LazyIds | None:
        """Returns the ids on another device or contiguous, or the object itself; None for other operations."""
        if func is Tensor.to:
            try:
                device, dtype, non_blocking, memory_format = parse_to(*args, **kwargs)
            except RuntimeError:  # a requested copy, which is not supported here
                return None
            args, kwargs = (device or self.ids.device,), {"non_blocking": non_blocking}
            if dtype not in (None, torch.long) or memory_format is not None:
                return None
        elif func is Tensor.long and not kwargs:
            return self
        elif func not in (Tensor.cpu, Tensor.cuda, Tensor.contiguous):
            return None
        moved = func(self.ids, *args, **kwargs)
        return self if moved is self.ids else LazyIds(moved, self.attribute)


def lazy_ids(ids: Tensor, attribute: str) -> Tensor:
    """Returns ids as int64 for batches; see :class:`LazyIds`."""
    return LazyIds(ids, attribute) if ids.dtype == torch.int32 else ids.long()


def stored_ids(ids: Tensor) -> Tensor:
    """Returns ids for code that accepts int32; a :class:`LazyIds` is not converted."""
    return ids.ids if isinstance(ids, LazyIds) else ids


def plain_ids(ids: Tensor) -> Tensor:
    """Returns ids as int64; a :class:`LazyIds` is converted without storing the result."""
    return stored_ids(ids).long()


def kept_as(ids: Tensor, like: Tensor) -> Tensor:
    """Returns node ids derived from `like`, stored in its dtype."""
    return lazy_ids(ids.to(stored_ids(like).dtype), "edge_index")
