"""Placements: which dimension of a tensor has one row per node or edge, and which of the rows each rank holds.

Inside a step every tensor stands for the tensor of the whole graph. A *row tensor* is distributed: each rank holds some of
its rows. A *replicated* tensor is whole and equal on every rank. The placement of any other tensor is unknown.
"""

from __future__ import annotations

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
"""The attribute of a tensor that holds its placement."""
_SELECTIONS = "_lightning_gnn_selections"
Made = TypeVar("Made")


class RowSet:
    """Rows that are distributed over ranks: all nodes or edges of a type, or a selection of these.

    Two tensors combine element by element without communication if they have the same row set. A rank holds its own rows first,
    and behind them replicas of rows that other ranks own; sums leave replicas out.

    Args:
        ranks: who holds the rows.
        count: rows of this rank, with replicas.
        keys: returns for each row of this rank a number by which the rows of all ranks are ordered, int64 ``[count]``.
        owned: rows of this rank without replicas.
        total: rows of all ranks; None if it takes a message to know.
        all_keys: returns the keys of all ranks in rank order and how many each has; None if it takes a message to know.
        name: of the rows, for errors.
        replicas: some rank has replicas; None says that all ranks are like this one.

    Attributes:
        targets: of edges, the nodes that they end at.
        places: of a selection, where its rows are among those that they were selected from, on this rank, int64 ``[count]``.
        entries_of: of entries of rows, see :meth:`repeated`, the rows and how many entries each has.
        known_total: rows of all ranks; None if it takes a message to know.
    """

    targets: RowSet | None = None
    places: Tensor
    entries_of: tuple[RowSet, int] | None = None

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
        self._made: dict[Any, Any] = {}
        self._at = [RowPlacement(self, dim) for dim in range(4)]

    def at(self, dim: int) -> RowPlacement:
        """Returns the placement of a tensor whose dimension `dim` has these rows."""
        return self._at[dim] if dim < 4 else RowPlacement(self, dim)

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """Returns what these rows have under a key, which is made when it is first asked for."""
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    @property
    def keys(self) -> Tensor:
        return self.once("keys", self._keys)

    def _resolve(self) -> tuple[list[int], Tensor, Tensor]:
        """Returns rows per rank, the order of the gathered rows, and the position of each row of this rank; all ranks call it."""
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
        """Rows of all ranks; all ranks call it, since it may take a message."""
        return len(self.order) if self.known_total is None else self.known_total

    def num_rows(self, like: Tensor) -> Tensor | None:
        """Returns the rows of all ranks as a tensor without dimensions; None if it takes a message to know."""
        if self._num is None and self.known_total is not None:
            self._num = torch.tensor(float(self.known_total), dtype=torch.float64, device=like.device)
        return self._num

    def note_num_rows(self, num: Tensor) -> None:
        """Keeps the rows of all ranks, as a message has told them."""
        self._num = num

    @property
    def counts(self) -> list[int]:
        """Rows per rank, without replicas; all ranks call it."""
        return self.once("resolved", self._resolve)[0]

    @property
    def order(self) -> Tensor:
        """Puts gathered rows into the order of the graph, ``[total]``; all ranks call it."""
        return self.once("resolved", self._resolve)[1]

    @property
    def positions(self) -> Tensor:
        """Of each row of this rank among those of all ranks, in the order of the graph, ``[count]``; all ranks call it."""
        return self.once("resolved", self._resolve)[2]

    def select(self, mask: Tensor) -> RowSet:
        """Returns the rows in a mask, bool ``[count]``; the same row set for the same mask."""

        def make() -> RowSet:
            places = mask.nonzero().view(-1)
            owned = len(places) if self.owned == self.count else int((places < self.owned).sum())
            name = f"selected {self.name}"
            made = RowSet(self.ranks, len(places), lambda: self.keys[places], owned, name=name, replicas=self.replicas)
            made.targets, made.places = self.targets, places
            return made

        return self.selected(mask, make)

    def choose(self, index: Tensor) -> RowSet:
        """Returns the rows at positions of the whole graph in the order of `index`, int64 ``[k]``, equal on all ranks: each is on
        the rank that owns it. All ranks call it."""

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

        return self.selected(index, make)

    def selected(self, by: Tensor, make: Callable[[], RowSet]) -> RowSet:
        """Returns the rows that `by`, a mask or an index, chooses: made anew where it has changed in place."""
        kept = by.__dict__.setdefault(_SELECTIONS, _Selections())
        known, version = kept.get(self), version_of(by)
        if known is None or known[0] != version:
            known = kept[self] = (version, make())
        return known[1]

    def repeated(self, times: int) -> RowSet:
        """Returns the rows that ``x.view(-1)`` of an ``x [count, times]`` has."""

        def keys() -> Tensor:
            own = self.positions.unsqueeze(1) * times + torch.arange(times, device=self.positions.device)
            return own.view(-1)

        def make() -> RowSet:
            total = None if self.known_total is None else self.known_total * times
            name, owned = f"entries of {self.name}", self.owned * times
            made = RowSet(self.ranks, self.count * times, keys, owned, total, name=name, replicas=self.replicas)
            made.entries_of = self, times
            return made

        return self.once(times, make)

    def joined(self, others: Sequence[RowSet]) -> RowSet | None:
        """Returns the rows of ``torch.cat``; None where some rank holds replicas."""
        parts = (self, *others)
        if any(part.replicas for part in parts):
            return None

        def keys() -> Tensor:
            begins = [sum(part.total for part in parts[:place]) for place in range(len(parts))]
            return torch.cat([part.positions + begin for part, begin in zip(parts, begins)])

        def make() -> RowSet:
            totals = [part.known_total for part in parts]
            total = None if None in totals else sum(part.total for part in parts)
            return RowSet(self.ranks, sum(part.count for part in parts), keys, total=total, name=f"joined {self.name}")

        return self.once(parts, make)


class _Selections(weakref.WeakKeyDictionary[RowSet, tuple[int, RowSet]]):
    """Row sets that an index has made; neither copied nor saved with it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Selections:
        return _Selections()

    def __reduce__(self) -> Any:
        return set, ()


@dataclass(eq=False, slots=True)
class Placement:
    """Where the rows of a tensor are.

    Attributes:
        rows: the row set; None of a replicated tensor.
        dim: along which the rows lie.
        from_rows: a replicated tensor was reduced from rows, so that gradients that rows give back to it are summed over ranks.
        local_ids: the values are places in the rank's own rows and halo rows, as those of ``edge_index``: of the edges'
            ``"source"`` or ``"target"``, of ``"both"`` along dimension 0, or ``"mixed"``; empty for all other values.
        view: the values are a copy of rows where one device has a view of them.
    """

    rows: RowSet | None
    dim: int = 0
    from_rows: bool = False
    local_ids: str = ""
    view: View | None = None

    def with_view(self, view: View | None) -> Self:
        """Returns the placement of a copy of rows where one device has a view; None for values of their own."""
        return self if view is self.view else replace(self, view=view)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.with_view(None)

    def __reduce__(self) -> Any:
        return set, ()  # a saved tensor has no placement; weights_only=True loads a set

    def __repr__(self) -> str:
        return "replicated" if self.rows is None else f"{self.rows.name} along dimension {self.dim}"


@dataclass(eq=False, slots=True, repr=False)
class RowPlacement(Placement):
    """Where the rows of a row tensor are."""

    rows: RowSet


class View:
    """What one device has a view of, where ranks have a copy: a change of the copy is written back.

    Args:
        base: the rows.
        index: of the view in the rows; None where it is one of `whole`.
        whole: the rows of all ranks, gathered.
    """

    def __init__(self, base: Tensor, index: Any, whole: Tensor | None = None) -> None:
        self.base, self.index, self.whole = base, index, whole
        self.version = version_of(base)

    @property
    def is_stale(self) -> bool:
        """Whether the rows have changed since they were copied, or those that they are a view of."""
        of = copied_for(self.base)
        return self.version != version_of(self.base) or (of is not None and of[1].view.is_stale)  # type: ignore[union-attr]


def copied_for(x: Tensor) -> tuple[Tensor, Placement] | None:
    """Returns the copy, of what one device has a view of, that a tensor is or that torch has made it a view of."""
    for each in (x, base_of(x)):
        placement = None if each is None else each.__dict__.get(ATTRIBUTE)
        if placement is not None and placement.view is not None:
            return each, placement
    return None


_changes: dict[int, int] = {}


def version_of(x: Tensor) -> int:
    """Returns a number that changes in place with a tensor."""
    return _changes.get(x.untyped_storage().data_ptr(), 0) if x.is_inference() else version_counter(x)


def note_change(x: Tensor) -> None:
    """Notes that a tensor was changed in place: tensors of ``torch.inference_mode`` have no version."""
    if x.is_inference():
        storage = x.untyped_storage().data_ptr()
        _changes[storage] = _changes.get(storage, 0) + 1


REPLICATED = Placement(None)
FROM_ROWS = Placement(None, from_rows=True)


class RowCount(int):
    """The number of rows of all ranks; as a size that a function is given, that of the rank's own rows."""

    rows: RowSet

    def __new__(cls, rows: RowSet) -> RowCount:
        self = super().__new__(cls, rows.total)
        self.rows = rows
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)


class GatherRows(torch.autograd.Function):
    """The rows of all ranks along dimension 0, in the order of the graph, on all ranks; `x` has this rank's own and replicas."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowSet, operation: str | Operation) -> Tensor:
        ctx.rows, ctx.operation = rows, rows.ranks.named(operation)
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
    """This rank's rows of a replicated tensor that has those of all ranks along dimension 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: RowSet, operation: str | Operation) -> Tensor:
        ctx.rows, ctx.operation = rows, rows.ranks.named(operation)
        return x[rows.positions]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, operation = ctx.rows, ctx.operation.gradient
        if not rows.replicas:
            whole = GatherRows.apply(grad, rows, operation)
        else:  # replicas give gradients back, too
            placed = grad.new_zeros(rows.total, *grad.shape[1:]).index_add(0, rows.positions, grad)
            whole = SumOverRanks.apply(placed, rows.ranks, operation)
        return whole / rows.ranks.size, None, None
