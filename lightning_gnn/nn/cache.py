"""Cache of values derived from a batch's features and edges that are constant between steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from lightning_gnn.data.lazy_ids import LazyIds
from lightning_gnn.private_torch import version_counter

T = TypeVar("T")
Tensors: TypeAlias = tuple[Tensor, ...]


class BatchCache:
    """Cache of values derived from constant tensors; an in-place change of such a tensor invalidates it.

    Tensors are compared by identity, on which all ranks agree, and not by storage: two empty tensors share their storage.

    Args:
        x: input features of the batch, ``[N, F]``.
        edges: edges and edge weights of the batch.
        widths: maximum size of cached values of features, as a multiple of the size of `x`; 0 for no cache.
    """

    def __init__(self, x: Tensor, edges: Sequence[Tensor], widths: int) -> None:
        self.x, self.widths, self._edges = x, widths, tuple(edges)
        self._versions: list[int] = []
        self._edge_values: dict[Hashable, Any] = {}
        self._x_values: dict[Hashable, Tensors] = {}
        self._batch_tensors: dict[int, Tensor] = {}
        self._constants: dict[int, Tensor] = {}
        self._look()

    def _look(self) -> None:
        """Drop values derived from tensors that were changed in place, equally on every rank."""
        # Several calls per layer: this reads stored ids, without a function call for each tensor.
        versions = [version_counter(self.x)]
        for tensor in self._edges:
            versions.append(version_counter(tensor.ids if isinstance(tensor, LazyIds) else tensor))
        if versions == self._versions:
            return
        if versions[1:] != self._versions[1:]:
            self._edge_values.clear()
            # References keep ids from being reused: tensors of the batch, selections of them, and values derived from them.
            self._batch_tensors = {id(tensor): tensor for tensor in self._edges}
            self._constants = dict(self._batch_tensors)
        self._x_values.clear()
        self._x_versions: dict[int, tuple[Tensor, int]] = {}
        self._columns, self._versions = 0, versions

    def is_own(self, *tensors: Tensor | None) -> bool:
        """Returns whether all tensors are edges or weights of the batch, selections of them, or None."""
        self._look()
        return all(tensor is None or id(tensor) in self._batch_tensors for tensor in tensors)

    def choose(self, tensors: Sequence[Tensor]) -> None:
        """Register constant tensors as tensors of the batch."""
        self._batch_tensors.update({id(tensor): tensor for tensor in tensors})

    def derive(self, name: Hashable, tensors: Sequence[Tensor | None], make: Callable[[], T], strict: bool = False) -> T | None:
        """Returns ``make()``, cached by name and tensors; None if a tensor changes between steps.

        Trainable tensors may change. With `strict`, all tensors must satisfy :meth:`is_own`.
        """
        self._look()
        known = self._batch_tensors if strict else self._constants
        key: Hashable = (name, *map(id, tensors))
        for tensor in tensors:
            if tensor is not None and (id(tensor) not in known or (type(tensor) is not LazyIds and tensor.requires_grad)):
                return None
        if key not in self._edge_values:
            # Evaluation may come first, and an inference tensor could not take part in training later.
            with torch.inference_mode(False), torch.no_grad():
                self._edge_values[key] = make()
        return self._edge_values[key]

    def edge_values(self) -> Iterable[Any]:
        """Returns all cached values of :meth:`derive`."""
        return self._edge_values.values()

    def derive_constants(self, name: Hashable, tensors: Sequence[Tensor | None], make: Callable[[], T]) -> T | None:
        """Returns ``make()``, a tuple of tensors that count as constant; None unless all inputs satisfy :meth:`is_own`."""
        made: Any = self.derive(name, tensors, make, strict=True)
        for tensor in made or ():
            self._constants[id(tensor)] = tensor
        return made

    def is_constant(self, x: Tensor) -> bool:
        """Returns whether `x` is the batch's input features, or a cached value derived from them alone."""
        if x.requires_grad:
            return False
        self._look()
        _, version = self._x_versions.get(id(x), (x, None))
        return x is self.x if version is None else version_counter(x) == version

    def derive_from_x(self, name: Hashable, x: Tensor, count: int, make: Callable[[], Tensors]) -> Tensors | None:
        """Returns ``make()``, `count` tensors with the width of x, derived from x and edges; None unless x is constant.

        They are cached while the cache has room.
        """
        if not self.widths or not self.is_constant(x):
            return None
        kept = self._x_values.get(key := (name, id(x)))
        if kept is None or not all(map(self.is_constant, kept)):  # changed in place by a caller
            kept = make()
            # Counted in columns, so that all ranks decide equally.
            columns = 0 if key in self._x_values else count * x.size(1)
            if self._columns + columns <= self.widths * self.x.size(1):
                self._columns += columns
                self._x_values[key] = kept
                self._x_versions.update({id(each): (each, version_counter(each)) for each in kept})
        return kept
