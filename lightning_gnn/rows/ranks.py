"""Messages of row semantics, and the autograd functions that send them.

Gradients: on each of P ranks, the backward pass starts from loss / P. The gradient of a row is complete, on the rank that has the
row. The gradient of a replicated tensor that was reduced from rows is equal on all ranks, 1 / P of the true gradient. Parameters
get partial gradients, which are summed over ranks at the end of the backward pass. The functions below are transposes of each
other in this sense.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gnn.comm.group import World

_SMALL = 1 << 16
"""Maximal bytes of a sum that is sent in one message with the checksum of its operation."""


class DivergedError(RuntimeError):
    """Raised if ranks ran different operations."""


class Operation(NamedTuple):
    """Source of a message.

    Attributes:
        name: name of the function, or of a consequence of it.
        line: line of the user, ``file:number``; empty if unknown.
        rows: description of the rows of the function's arguments; empty unless :attr:`Ranks.rows` is set.
        in_backward: whether the message belongs to a backward pass; `line` is then the line of the forward pass.
    """

    name: str
    line: str = ""
    rows: str = ""
    in_backward: bool = False

    @property
    def gradient(self) -> Operation:
        """Operation that sends the gradients of this operation."""
        return self._replace(name=f"gradient of {self.name}", in_backward=True)

    def __str__(self) -> str:
        return f"{self.name} at {self.line}" if self.line else self.name


class Ranks:
    """Sums and gathers over ranks; ranks whose operations or user lines differ raise an error.

    Args:
        world: all ranks.
        where: function that returns the user's line.
        name: name that is equal on all ranks.
        attribute: attribute of tensors with the placements of their rows on these ranks.

    Attributes:
        messages: number of messages by the name of the operation.
        bytes_sent: bytes that this rank sent in messages of operations.
        sends: operation of the pending message; None if no message is pending.
        rows: description of the rows of the running function's arguments, if an observer sets it.
    """

    def __init__(
        self, world: World, where: Callable[[], str] = lambda: "", name: str = "", attribute: str = "_lightning_gnn_placement"
    ) -> None:
        self.name, self.attribute = name, attribute
        self.world, self.size, self._where = world, world.size, where
        self.messages: Counter[str] = Counter()
        self._numbers: dict[int, Tensor] = {}
        self.bytes_sent = 0
        self.device = world.device
        self.sends: Operation | None = None
        self.rows = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self

    def make_operation(self, operation: str | Operation) -> Operation:
        """Returns an operation with the user's line."""
        return operation if isinstance(operation, Operation) else Operation(operation, self._where(), self.rows)

    @contextmanager
    def _sending(self, operation: Operation) -> Iterator[None]:
        before, self.sends = self.sends, operation
        try:
            yield
        finally:
            self.sends = before

    def sum(self, x: Tensor, operation: str | Operation) -> Tensor:
        """Returns the sum of `x` over ranks, with equal rounding on all ranks."""
        if self.size == 1:
            return x
        operation = self.make_operation(operation)
        if x.nbytes <= _SMALL:
            return self.gather(x, operation).sum(0, dtype=x.dtype)
        self.gather(x.new_empty(0), operation)
        wide = x.to(torch.int64) if x.dtype == torch.bool else x
        self.bytes_sent += 2 * wide.nbytes * (self.size - 1) // self.size
        with self._sending(operation):
            return self.world.all_reduce_(wide.contiguous().clone(), str(operation))

    def gather(self, x: Tensor, operation: str | Operation) -> Tensor:
        """Returns the tensors of all ranks, ``[P, *shape]``.

        Raises:
            DivergedError: ranks called it from different operations.
        """
        operation = self.make_operation(operation)
        self.messages[operation.name] += 1
        # The line is excluded in the backward pass, since it may differ for one gradient; folders may differ between machines.
        line = "" if operation.in_backward else operation.line.rpartition("/")[2]
        code = zlib.crc32(f"{operation.name}\0{line}\0{tuple(x.shape)}\0{x.dtype}".encode())
        flat = x.detach().contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)  # a single entry may have any stride
        header = self._number(code, flat.device).view(torch.uint8)
        payload = torch.cat([header, flat, flat.new_zeros(-len(flat) % 8)])
        with self._sending(operation):
            found = self._exchange_payload(payload, operation)
        codes = found[:, :8].view(torch.int64)
        if found.device.type == "cpu" and bool((codes != code).any()):
            self._raise_diverged(operation)
        parts = found[:, 8 : 8 + len(flat)].contiguous().view(-1).view(x.dtype)
        return parts.view(self.size, *x.shape)

    def _number(self, value: int, device: torch.device) -> Tensor:
        """Returns a number ``[1]`` on a device; copied once, because the host waits for a copy."""
        if value not in self._numbers:
            self._numbers[value] = torch.tensor([value], device=device)
        return self._numbers[value]

    def _exchange_payload(self, payload: Tensor, operation: Operation) -> Tensor:
        # Ranks in different operations may send different sizes, so a large message is preceded by its size.
        name = str(operation)
        if len(payload) > _FIRST:
            size = self._number(len(payload), payload.device)
            self.bytes_sent += size.nbytes * (self.size - 1)
            sizes = self.world.all_gather(size, name)
            if payload.device.type == "cpu" and bool((sizes != sizes[0]).any()):
                self._raise_diverged(operation)
        else:
            payload = torch.cat([payload, payload.new_zeros(_FIRST - len(payload))])
        self.bytes_sent += payload.nbytes * (self.size - 1)
        return self.world.all_gather(payload, name)

    def _raise_diverged(self, operation: Operation) -> None:
        by_rank = self.world.all_gather_object(str(operation))
        shown = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(by_rank))
        raise DivergedError(
            f"Ranks reached different operations over all nodes ({shown}). All ranks must run the same operations in "
            "the same order: make conditions and loops depend on values that are the same on all ranks."
        )

    def gather_rows(self, rows: Tensor, counts: Sequence[int] | None, operation: str | Operation) -> tuple[Tensor, list[int]]:
        """Returns the rows of all ranks in rank order, and their number per rank; with None for `counts`, ranks exchange it."""
        if self.size == 1:
            return rows, [len(rows)]
        operation = self.make_operation(operation)
        sizes = self.gather(torch.tensor([len(rows)], device=rows.device), operation).view(-1).tolist()
        if counts is not None and list(counts) != sizes:
            raise DivergedError(f"{operation.name}: rows by rank must be {list(counts)}, got {sizes}. Filter all ranks equally.")
        self.bytes_sent += rows.nbytes * (self.size - 1)
        with self._sending(operation):
            return self.world.all_gather_rows(rows.detach().contiguous(), sizes), sizes


_FIRST = 1 << 8
"""Bytes of a first message, equal for all operations, so that diverged ranks can detect it."""


def digest_of(x: Tensor) -> int:
    """Returns a checksum that is equal for tensors of equal shape, type and entries."""
    found, parts = zlib.crc32(f"{x.dtype} {x.layout} {tuple(x.shape)}".encode()), [x.detach()]
    if x.layout == torch.sparse_coo:
        parts = [x.detach().coalesce().indices(), x.detach().coalesce().values()]
    elif x.layout == torch.sparse_csr:
        parts = [x.crow_indices(), x.col_indices(), x.detach().values()]
    for part in parts:
        if part.numel() and part.layout == torch.strided:
            copied = part.to("cpu", copy=True).contiguous()  # memory shared with numpy cannot be resized
            found = zlib.crc32(copied.view(-1).view(torch.uint8).numpy().tobytes(), found)
    return found


class SumOverRanks(torch.autograd.Function):
    """Autograd function of the sum over ranks; all ranks get it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, operation: str | Operation) -> Tensor:
        ctx.ranks, ctx.operation = ranks, ranks.make_operation(operation)
        return ranks.sum(x, ctx.operation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return EnterRows.apply(grad, ctx.ranks, ctx.operation) * ctx.ranks.size, None, None


class EnterRows(torch.autograd.Function):
    """Autograd function for a replicated tensor used with rows: its gradients are summed over ranks and divided by P."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, operation: str | Operation) -> Tensor:
        ctx.ranks, ctx.operation = ranks, ranks.make_operation(operation)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = SumOverRanks.apply(grad, ctx.ranks, ctx.operation.gradient)
        return total / ctx.ranks.size, None, None


class GatherParts(torch.autograd.Function):
    """Autograd function that gathers a tensor of each rank, ``[P, *shape]``, on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, operation: str | Operation) -> Tensor:
        ctx.ranks, ctx.operation = ranks, ranks.make_operation(operation)
        return ranks.gather(x, ctx.operation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ranks = ctx.ranks
        return EnterRows.apply(grad, ranks, ctx.operation)[ranks.world.rank] * ranks.size, None, None
