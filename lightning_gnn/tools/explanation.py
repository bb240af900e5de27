"""Messages that ranks send each other in a step, by communicating operation, with the user's line."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_gnn.comm.group import World
from lightning_gnn.rows.mode import placement_of, tensors_in, user_line
from lightning_gnn.rows.ranks import Operation, Ranks

_LAYERS = "Halo exchange"
"""Prefix of the names of halo exchange operations of bound layers."""


class Sender(NamedTuple):
    """Source of messages.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        line: the user's line, of the forward pass if known; empty if no user line causes the message.
        operation: the function, the layer, or another operation of the ranks.
        rows: placement of the rows, with the dimension; empty if no rows are involved.
    """

    direction: str
    line: str
    operation: str
    rows: str


@dataclass
class Explanation:
    """Messages of one step; one object observes the ranks of a :class:`~lightning_gnn.checks.trial.Trial`.

    Attributes:
        step: name of the module's method.
        num_ranks: number of ranks.
        messages, bytes_sent: for each sender in order of time, the messages and bytes sent by each rank, by rank.
    """

    step: str
    num_ranks: int
    messages: dict[Sender, list[int]] = field(default_factory=dict)
    bytes_sent: dict[Sender, list[int]] = field(default_factory=dict)
    _followed: dict[int, tuple[World, Ranks]] = field(default_factory=dict)
    _in_backward: set[int] = field(default_factory=set)
    _lines: dict[str, str] = field(default_factory=dict)  # of layers, in their forward pass

    @contextmanager
    def following(self, world: World, ranks: Ranks) -> Iterator[None]:
        """Context manager that counts messages of this rank as messages of the explained step."""
        rank = world.global_rank(world.rank)
        self._followed[rank] = world, ranks
        try:
            with _RowsOfArguments(ranks):
                yield
        finally:
            del self._followed[rank]

    @contextmanager
    def backward(self, rank: int) -> Iterator[None]:
        """Context manager that attributes messages sent by a rank to a backward pass."""
        self._in_backward.add(rank)
        try:
            yield
        finally:
            self._in_backward.discard(rank)

    def add(self, rank: int, message: Any) -> None:
        """Count a message; called by the sending rank."""
        if rank not in self._followed:
            return
        world, ranks = self._followed[rank]
        sender = self._sender(world, ranks.sends, rank in self._in_backward)
        num_bytes = message.nbytes if isinstance(message, Tensor) else len(pickle.dumps(message))
        for counts, number in ((self.messages, 1), (self.bytes_sent, num_bytes)):
            counts.setdefault(sender, [0] * self.num_ranks)[rank] += number

    def _sender(self, world: World, operation: Operation | None, in_backward: bool) -> Sender:
        direction = "backward" if in_backward else "forward"
        if operation is not None:
            return Sender(direction, operation.line, operation.name, operation.rows)
        name = world.watch.operation
        if not name.startswith(_LAYERS):
            return Sender(direction, "" if in_backward else user_line(), name or "Values of all ranks", "")
        layer = name.partition(" of ")[2]
        line = self._lines.get(layer, "") if in_backward else self._lines.setdefault(layer, user_line())
        return Sender(direction, line, f"{_LAYERS} of {layer}", "halo rows along dimension 0")

    def as_dict(self) -> dict[str, Any]:
        """Returns a dict of plain values, for JSON."""
        found = [
            {**each._asdict(), "messages": self.messages[each], "bytes_sent": self.bytes_sent[each]} for each in self.bytes_sent
        ]
        return {"step": self.step, "operations": found}


class _RowsOfArguments(TorchFunctionMode):
    """Mode that records which rows the arguments of the running function have."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = [placement_of(x) for x in tensors_in((args, kwargs))]
        rows = dict.fromkeys(str(each) for each in found if each is not None and each.rows is not None)
        before, self._ranks.rows = self._ranks.rows, ", ".join(rows)
        try:
            return func(*args, **kwargs)
        finally:
            self._ranks.rows = before
