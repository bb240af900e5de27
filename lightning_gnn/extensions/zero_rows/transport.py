"""Messages of the backward pass without rows of zeros.

If few nodes are labeled, most gradients are zero: the gradients of nodes that do not reach a labeled node in the remaining
layers. The zero rows are not derived from the training mask, as batch norms, global means, penalties and other losses give
gradients to any node. Instead, the sender inspects the rows in each step.

A message without its zero rows starts with one bit per row, 1 for rows that follow. Messages of a call between two ranks use this
form if it saved (or would have saved) an eighth of their bytes before. Both ranks have seen these messages, so they agree without
communication. If fewer rows are zero, messages are as in the forward pass. They are inspected in the first steps of a run and
then periodically. A row is zero if all its bits are zero; rows with -0.0 or NaN are sent. So received rows are bitwise the same
in both forms.

R rows, of B bytes each, in P consecutive parts; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call, Step
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.transport import ALIGNED, Messages, Receive, TransportWrapper, UpTo, by_peer
from lightning_gnn.kernels import loops

_WORTH = 1 / 8
"""Minimum share of a message's bytes saved by omitting zero rows, from which on the next step omits them."""

_LOOKS = 8
"""Complete messages are inspected in the first `_LOOKS` steps and in every `_LOOKS`-th step."""


def bits_bytes(num_rows: int) -> int:
    """Returns the number of bytes for one bit per row."""
    return -(-num_rows // 8)


def nonzero_rows(rows: Tensor, counts: Sequence[int]) -> list[int]:
    """Returns the number of nonzero rows of each part.

    Args:
        rows: contiguous ``[R, ...]``.
        counts: number of rows of each part, ``[P]``.
    """
    num_nonzero = np.empty(len(counts), np.int64)
    loops.count_nonzero(rows.detach().view(len(rows), -1).view(torch.uint8).numpy(), np.array(counts), num_nonzero)
    return num_nonzero.tolist()


def pack_rows(rows: Tensor, counts: Sequence[int], packed: Sequence[bool], places: Sequence[int], out: Tensor) -> list[int]:
    """Write each part to its place in memory; return the number of nonzero rows of each part.

    Args:
        rows: contiguous ``[R, ...]``.
        counts: number of rows of each part, ``[P]``.
        packed: whether each part is written without zero rows, after :func:`bits_bytes` with one bit per row; other parts are
            copied unchanged.
        places: start of each part, in bytes.
        out: uint8, contiguous.
    """
    num_nonzero = np.empty(len(counts), np.int64)
    arrays = (np.array(each) for each in (counts, packed, places))
    loops.pack_nonzero(_as_bytes(rows).numpy(), *arrays, out.numpy(), num_nonzero)
    return num_nonzero.tolist()


def unpack_rows(data: Tensor, out: Tensor) -> int:
    """Overwrite `out`, contiguous ``[R, ...]``, with a packed part; return the number of its nonzero rows.

    Args:
        data: output of :func:`pack_rows`; trailing bytes are ignored.
    """
    return loops.unpack_nonzero(data.numpy(), _as_bytes(out).numpy())


def _as_bytes(rows: Tensor) -> Tensor:
    """Returns rows as uint8 ``[R, B]``."""
    return rows.detach().view(len(rows), -1).view(torch.uint8)


@dataclass
class _State:
    """State of the messages of one call from one rank to another, equal at both ends.

    Attributes:
        step: step of the last messages.
        short: whether they omit zero rows.
        worth: whether omitting saves, or would save, enough in all of them; None if they were not inspected.
    """

    step: Step | None = None
    short: bool = False
    worth: bool | None = None


class ZeroRows:
    """Selection of the messages of one exchange that omit zero rows.

    All ranks start the exchanges of a step in that step. Pending receives are completed before the first message of the next step
    starts, so that both ends of a message have seen the same messages.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._step: Step | None = None
        self._looks = True
        # By call: the states of sent and of received messages, one per peer.
        self._states = defaultdict[Call, list[list[_State]]](lambda: [[_State() for _ in range(world.size)] for _ in range(2)])
        self._under_way: set[Callable[[], None]] = set()

    def messages(self, out: Tensor, out_counts: Sequence[int], into: Tensor, into_counts: Sequence[int], call: Call) -> Messages:
        """See :meth:`~lightning_gnn.comm.transport.Transport.messages`."""
        if self._step != self._world.step:
            for receive in list(self._under_way):
                receive()
            self._step = self._world.step
            self._looks = self._step.number < _LOOKS or self._step.number % _LOOKS == 0
        sending, receiving = self._states[call]
        for state, count in (*zip(sending, out_counts), *zip(receiving, into_counts)):
            if count and state.step is not self._step:
                state.step, state.short, state.worth = self._step, bool(state.worth), None
        sends, num_rows = self._pack(out, out_counts, sending)
        receives: list[tuple[int, Receive]] = []
        for peer, rows in by_peer(into, into_counts):
            receives.append((peer, self._packed_receive(rows, receiving[peer]) if receiving[peer].short else rows))

        def around(wait: Callable[[], None]) -> Callable[[], None]:
            def receive() -> None:
                if receive in self._under_way:
                    self._under_way.remove(receive)
                    wait()
                    self._look(into, into_counts, receiving)

            self._under_way.add(receive)
            return receive

        return sends, receives, self._world.transport.traffic(sends, num_rows), around

    def _pack(self, out: Tensor, counts: Sequence[int], states: Sequence[_State]) -> tuple[Sequence[tuple[int, Tensor]], int]:
        """Returns the messages that replace `counts` rows to each rank, ``[P]``, and the number of rows in them."""
        if not out.numel() or not any(map(attrgetter("short"), compress(states, counts))):
            self._look(out, counts, states)
            return by_peer(out, counts), len(out)
        short = [count > 0 and state.short for state, count in zip(states, counts)]
        row_bytes = out[0].nbytes
        room = [-(-(bits_bytes(count) + count * row_bytes) // ALIGNED) * ALIGNED for count in counts]
        transport = self._world.transport
        if transport.lends(out):  # `out` is in the memory that would be packed into
            memory = torch.empty(sum(room), dtype=torch.uint8)
        else:
            memory = transport.scratch((sum(room),), torch.uint8)
        places = [*accumulate(room, initial=0)]
        found = pack_rows(out, counts, short, places, memory)
        self._note(states, counts, found, row_bytes, short=True)
        sends: list[tuple[int, Tensor]] = []
        num_rows = 0
        for peer, (count, nonzero, packed, part) in enumerate(zip(counts, found, short, memory.split(room))):
            if not count:
                continue
            if packed:
                data = part[: bits_bytes(count) + nonzero * row_bytes]
            else:
                data = part[: count * row_bytes].view(out.dtype).view(count, *out.shape[1:])
            num_rows += nonzero if packed else count
            sends.append((peer, data))
        return sends, num_rows

    def _packed_receive(self, rows: Tensor, state: _State) -> UpTo:
        """Returns the receive that replaces receiving the rows of a rank."""

        def accept(data: Tensor) -> None:
            self._note([state], [len(rows)], [unpack_rows(data, rows)], rows[0].nbytes, short=True)

        return UpTo(bits_bytes(len(rows)) + rows.nbytes, accept)

    def _look(self, rows: Tensor, counts: Sequence[int], states: Sequence[_State]) -> None:
        """Record zero rows of complete messages; other messages are recorded when they are packed or unpacked."""
        is_whole = False
        for state, count in zip(states, counts):
            is_whole |= count > 0 and not state.short
        if is_whole and self._looks and rows.numel():
            self._note(states, counts, nonzero_rows(rows, counts), rows[0].nbytes, short=False)

    def _note(self, states: Sequence[_State], counts: Sequence[int], nonzero: Sequence[int], row_bytes: int, short: bool) -> None:
        """Record the numbers of nonzero rows; `short`: also for messages that omit zero rows."""
        for state, count, num_nonzero in zip(states, counts, nonzero):
            if count and (short if state.short else self._looks):
                saved = (count - num_nonzero) * row_bytes - (count + 7) // 8
                state.worth = state.worth is not False and saved >= _WORTH * count * row_bytes


class ZeroRowsTransport(TransportWrapper):
    """Wrapper of a transport that omits rows of zeros from messages of the backward pass.

    Not used for GPU tensors, as the host would have to wait for the device to compute message sizes.
    """

    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        self._of: WeakKeyDictionary[Exchange, ZeroRows] = WeakKeyDictionary()

    @override
    @staticmethod
    def warm_up(dtype: torch.dtype) -> None:
        rows, out = torch.ones(1, 2, dtype=dtype), torch.empty(1 + 2 * dtype.itemsize, dtype=torch.uint8)
        nonzero_rows(rows, [1])
        pack_rows(rows, [1], [True], [0], out)
        unpack_rows(out, rows)

    @override
    def messages(
        self, out: Tensor, out_counts: Sequence[int], into: Tensor, into_counts: Sequence[int], call: Call, exchange: Exchange
    ) -> Messages:
        if call.direction != "backward" or into.device.type != "cpu":
            return self._transport.messages(out, out_counts, into, into_counts, call, exchange)
        if exchange not in self._of:
            self._of[exchange] = ZeroRows(exchange.world)
        return self._of[exchange].messages(out, out_counts, into, into_counts, call)
