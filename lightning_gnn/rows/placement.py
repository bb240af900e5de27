"""Placements: the dimension of a tensor that has one row per node or edge, and the rows that each rank has.

Inside a step every tensor stands for the tensor of the whole graph. A *row tensor* is distributed: each rank has some of its
rows. A *replicated* tensor is complete and equal on every rank. The placement of any other tensor is unknown.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_gnn.private_torch import base_of, version_counter
from lightning_gnn.rows.ranks import EnterRows, Operation, Ranks, SumOverRanks

ATTRIBUTE = "_lightning_gnn_placement"
"""Attribute of a tensor with the placement of its nodes or edges."""
OF_SAMPLES = "_lightning_gnn_samples"
"""Attribute of a tensor with the placement of its samples, where ranks have different samples."""


class Axis(threading.local):
    """Axis of ranks whose placements are in use, in this thread: ranks with parts of the graph, or with other samples.

    Attributes:
        attribute: attribute of a tensor with its placement.
    """

    attribute = ATTRIBUTE


axis = Axis()
_SELECTIONS = "_lightning_gnn_selections"
Made = TypeVar("Made")


class RowSet:
    """Rows that are distributed over ranks: all nodes or edges of a type, or a selection of them.

    Tensors with the same row set can be combined element by element without communication. A rank has its own rows first, then
    replicas of rows that other ranks own. Sums exclude replicas.

    Args:
        ranks: ranks that have the rows.
        count: number of rows of this rank, including replicas.
        keys: function that returns a number for each row of this rank, int64 ``[count]``; the numbers define the order over all
            ranks.
        owned: number of rows of this rank without replicas.
        total: number of rows of all ranks; None if it is not known yet, and computing it needs communication.
        all_keys: function that returns the keys of all ranks in rank order, and the number of keys per rank; None if this
            needs communication.
        name: name of the rows in errors.
        replicas: whether any rank has replicas; None if all ranks are like this rank.

    Attributes:
        targets: for edges, the row set of their target nodes.
        places: for a selection, the positions of its rows in the original rows on this rank, int64 ``[count]``.
        entries_of: for flattened entries (:meth:`flatten_entries`), the original row set and the number of entries per row.
        repeats_of: for repeated rows (:meth:`repeat`), the original row set and the number of repetitions.
        known_total: `total` if it is known without communication; otherwise None.
    """

    targets: RowSet | None = None
    places: Tensor
    entries_of: tuple[RowSet, int] | None = None
    repeats_of: tuple[RowSet, int] | None = None

    def __init__(
        self,
        ranks: Ranks,
        count: int,
        keys: Callable[[], Tensor],
        owned: int | None = None,
        total: int | None = None,
        all_keys: Callable[[], tuple[Tensor, Sequence[int]]] | None = None,
        name: str = "rows",
        replicas: bool | None = None,
    ) -> None:
        self.ranks, self.count, self.name = ranks, count, name
        self.owned = count if owned is None else owned
        self.replicas = self.owned != count if replicas is None else replicas
        self.known_total, self.all_keys, self._keys = total, all_keys, keys
        self._num: Tensor | None = None
        self._cache: dict[Any, Any] = {}
        self._at = [RowPlacement(self, dim) for dim in range(4)]

    def at(self, dim: int) -> RowPlacement:
        """Returns the placement of a tensor whose dimension `dim` has these rows."""
        return self._at[dim] if dim < 4 else RowPlacement(self, dim)

    def get_or_make(self, key: Any, make: Callable[[], Made]) -> Made:
        """Returns the cached value of a key, which is created on first use."""
        if key not in self._cache:
            self._cache[key] = make()
        found: Made = self._cache[key]
        return found

    @property
    def keys(self) -> Tensor:
        return self.get_or_make("keys", self._keys)

    def _resolve(self) -> tuple[list[int], Tensor, Tensor]:
        """Returns rows per rank, the order of the gathered rows, and the position of each row of this rank; collective."""
        if self.all_keys is not None:
            keys, counts = self.all_keys()
        else:
            keys, counts = self.ranks.gather_rows(self.keys[: self.owned], None, f"Order of {self.name}")
        keys = keys.to(self.keys.device)
        in_order, order = keys.sort(stable=True)
        self.known_total = len(keys)
        return list(counts), order, torch.searchsorted(in_order, self.keys)

    @property
    def total(self) -> int:
        """Number of rows of all ranks; collective, since it may take a message."""
        return len(self.order) if self.known_total is None else self.known_total

    def num_rows(self, like: Tensor) -> Tensor | None:
        """Returns the number of rows of all ranks as a tensor without dimensions; None if it takes a message to compute."""
        if self._num is None and self.known_total is not None:
            self._num = torch.tensor(float(self.known_total), dtype=torch.float64, device=like.device)
        return self._num

    def note_num_rows(self, num: Tensor) -> None:
        """Store the number of rows of all ranks, as received in a message."""
        self._num = num

    @property
    def counts(self) -> list[int]:
        """Number of rows per rank, without replicas; collective."""
        return self.get_or_make("resolved", self._resolve)[0]

    @property
    def order(self) -> Tensor:
        """Permutation of gathered rows to the order of the graph, ``[total]``; collective."""
        return self.get_or_make("resolved", self._resolve)[1]

    @property
    def positions(self) -> Tensor:
        """Position of each row of this rank among all rows, in the order of the graph, ``[count]``; collective."""
        return self.get_or_make("resolved", self._resolve)[2]

    def select(self, mask: Tensor) -> RowSet:
        """Returns the rows in a mask, bool ``[count]``; the same row set for the same mask."""

        def make() -> RowSet:
            places = mask.nonzero().view(-1)
            owned = len(places) if self.owned == self.count else int((places < self.owned).sum())
            name = f"selected {self.name}"
            made = RowSet(self.ranks, len(places), lambda: self.keys[places], owned, name=name, replicas=self.replicas)
            made.targets, made.places = self.targets, places
            return made

        return self.get_selection(mask, make)

    def choose(self, index: Tensor) -> RowSet:
        """Returns the rows at global positions in the order of `index`, int64 ``[k]``, equal on all ranks. Collective.

        Each row is on the rank that owns it.
        """

        def make() -> RowSet:
            index_ = torch.where(index < 0, index + self.total, index).to(self.keys.device)
            if len(index_) and not (int(index_.min()) >= 0 and int(index_.max()) < self.total):
                raise IndexError(f"an index is out of bounds for {self.total} {self.name}")
            in_order, order = self.positions[: self.owned].sort()
            place = torch.searchsorted(in_order, index_).clamp(max=max(0, len(in_order) - 1))
            here = in_order[place] == index_ if len(in_order) else torch.zeros_like(index_, dtype=torch.bool)
            where = here.nonzero().view(-1)
            found = RowSet(self.ranks, len(where), lambda: where, total=len(index_), name=f"chosen {self.name}")
            found.targets, found.places = self.targets, order[place[where]] if len(in_order) else where
            return found

        return self.get_selection(index, make)

    def get_selection(self, by: Tensor, make: Callable[[], RowSet]) -> RowSet:
        """Returns the rows that `by`, a mask or an index, selects; computed again if it changed in place."""
        selections = by.__dict__.setdefault(_SELECTIONS, _Selections())
        selection, version = selections.get(self), version_of(by)
        if selection is None or selection[0] != version:
            selection = selections[self] = (version, make())
        return selection[1]

    def flatten_entries(self, times: int) -> RowSet:
        """Returns the rows of ``x.view(-1)`` for an ``x [count, times]``."""

        def keys() -> Tensor:
            own = self.positions.unsqueeze(1) * times + torch.arange(times, device=self.positions.device)
            return own.view(-1)

        def make() -> RowSet:
            total = None if self.known_total is None else self.known_total * times
            name, owned = f"entries of {self.name}", self.owned * times
            made = RowSet(self.ranks, self.count * times, keys, owned, total, name=name, replicas=self.replicas)
            made.entries_of = self, times
            return made

        return self.get_or_make(times, make)

    def repeat(self, times: int) -> RowSet:
        """Returns the rows of ``x.view(-1)`` for an ``x [times, count]``, such as the nodes of several samples.

        Not for rows with replicas, since a rank must have its own rows first.
        """

        def keys() -> Tensor:
            return (self.total * torch.arange(times, device=self.positions.device).unsqueeze(1) + self.positions).view(-1)

        def make() -> RowSet:
            total = None if self.known_total is None else self.known_total * times
            made = RowSet(self.ranks, self.count * times, keys, total=total, name=self.name)
            made.repeats_of = self, times
            return made

        return self if times == 1 else self.get_or_make(("repeat", times), make)

    def concat(self, row_sets: Sequence[RowSet]) -> RowSet | None:
        """Returns the rows of ``torch.cat``; None if any rank has replicas."""
        parts = (self, *row_sets)
        if any(part.replicas for part in parts):
            return None

        def keys() -> Tensor:
            begins = [sum(part.total for part in parts[:place]) for place in range(len(parts))]
            return torch.cat([part.positions + begin for part, begin in zip(parts, begins)])

        def make() -> RowSet:
            totals = [part.known_total for part in parts]
            total = None if None in totals else sum(part.total for part in parts)
            return RowSet(self.ranks, sum(part.count for part in parts), keys, total=total, name=f"joined {self.name}")

        return self.get_or_make(parts, make)


class _Selections(weakref.WeakKeyDictionary[RowSet, tuple[int, RowSet]]):
    """Row sets that an index has created; neither copied nor saved with it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Selections:
        return _Selections()

    def __reduce__(self) -> Any:
        return set, ()


@dataclass(eq=False, slots=True)
class Placement:
    """Location of the rows of a tensor.

    Attributes:
        rows: the row set; None for a replicated tensor.
        dim: dimension of the rows.
        from_rows: whether a replicated tensor was reduced from rows, so that gradients that it receives from rows are summed over
            ranks.
        local_ids: kind of local ids, positions among local and halo nodes as in ``edge_index``: ``"source"`` or ``"target"`` of
            the edges, ``"both"`` along dimension 0, or ``"mixed"``; empty for other values.
        view: set if the values are a copy of rows that would be a view on one device.
    """

    rows: RowSet | None
    dim: int = 0
    from_rows: bool = False
    local_ids: str = ""
    view: View | None = None

    def with_view(self, view: View | None) -> Self:
        """Returns the placement with another `view`; None for values without a base."""
        return self if view is self.view else replace(self, view=view)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.with_view(None)

    def __reduce__(self) -> Any:
        return set, ()  # saved tensors have no placement; weights_only=True can load a set

    def __repr__(self) -> str:
        return "replicated" if self.rows is None else f"{self.rows.name} along dimension {self.dim}"


@dataclass(eq=False, slots=True, repr=False)
class RowPlacement(Placement):
    """Location of the rows of a row tensor."""

    rows: RowSet


class View:
    """Copy on ranks that stands for a view on one device: changes of the copy are written back.

    Args:
        base: the rows.
        index: index of the view in the rows; None if it is a view of `whole`.
        whole: the gathered rows of all ranks.
    """

    def __init__(self, base: Tensor, index: Any, whole: Tensor | None = None) -> None:
        self.base, self.index, self.whole = base, index, whole
        self.version = version_of(base)

    @property
    def is_stale(self) -> bool:
        """True if the rows, or the base of the rows, changed since they were copied."""
        of = copied_for(self.base)
        return self.version != version_of(self.base) or (of is not None and of[1].view.is_stale)  # type: ignore[union-attr]


def copied_for(x: Tensor) -> tuple[Tensor, Placement] | None:
    """Returns the copy for a view on one device that `x` is, or is a view of; None if there is none."""
    for each in (x, base_of(x)):
        placement = None if each is None else each.__dict__.get(axis.attribute)
        if placement is not None and placement.view is not None:
            return each, placement
    return None


_changes: dict[int, int] = {}


def version_of(x: Tensor) -> int:
    """Returns a number that changes with each in-place change of a tensor."""
    return _changes.get(x.untyped_storage().data_ptr(), 0) if x.is_inference() else version_counter(x)


def note_change(x: Tensor) -> None:
    """Record an in-place change: tensors of ``torch.inference_mode`` have no version counter."""
    if x.is_inference():
        storage = x.untyped_storage().data_ptr()
        _changes[storage] = _changes.get(storage, 0) + 1


REPLICATED = Placement(None)
FROM_ROWS = Placement(None, from_rows=True)


class RowCount(int):
    """Number of rows of all ranks; as a size argument, it stands for the number of local rows.

    Attributes:
        local: number of local rows; on a mesh, a number of rows on the other axis if both are along one dimension.
    """

    rows: RowSet
    local: int

    def __new__(cls, rows: RowSet, local: int | None = None) -> RowCount:
        self = super().__new__(cls, rows.total)
        self.rows = rows
        self.local = local if isinstance(local, RowCount) else rows.count
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)


class GatherRows(torch.autograd.Function):
    """Autograd function that gathers the rows of all ranks along dimension 0, in the order of the graph, on all ranks.

    `x` has this rank's rows and replicas.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowSet, operation: str | Operation) -> Tensor:
        ctx.rows, ctx.operation = rows, rows.ranks.make_operation(operation)
        found, _ = rows.ranks.gather_rows(x[: rows.owned], rows.counts, ctx.operation)
        return found[rows.order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.rows
        own = EnterRows.apply(grad, rows.ranks, ctx.operation)[rows.positions[: rows.owned]] * rows.ranks.size
        if rows.owned != rows.count:
            own = torch.cat([own, own.new_zeros(rows.count - rows.owned, *own.shape[1:])])
        return own, None, None


class TakeRows(torch.autograd.Function):
    """Autograd function that returns this rank's rows of a replicated tensor with all rows along dimension 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowSet, operation: str | Operation) -> Tensor:
        ctx.rows, ctx.operation = rows, rows.ranks.make_operation(operation)
        return x[rows.positions]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, operation = ctx.rows, ctx.operation.gradient
        if not rows.replicas:
            whole = GatherRows.apply(grad, rows, operation)
        else:  # replicas have gradients, too
            placed = grad.new_zeros(rows.total, *grad.shape[1:]).index_add(0, rows.positions, grad)
            whole = SumOverRanks.apply(placed, rows.ranks, operation)
        return whole / rows.ranks.size, None, None
