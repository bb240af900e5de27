"""Messages of the backward pass without the rows that are zero.

Where few nodes are labelled, most gradients are zero: those of nodes from which no labelled node is reached in the layers that
are left. Which rows these are is not derived from the training mask, since batch norms, means over all nodes, penalties and
other losses give gradients to any node. Whoever sends rows looks at them, in each step.

A message without its zero rows has a bit for each row in front, 1 for those that follow. The messages of a call between two
ranks have this form if it would have saved an eighth of their bytes, or did, in the step before: both ranks have seen those, so
nothing need be said about it. Where fewer rows are zero, messages are as they are in the forward pass, and looked at in the first
steps of a run and then now and again. Rows are zero if all their bits are, so what arrives has the same bits in either form:
rows with -0.0 or NaN are sent.

R rows, of B bytes each, in P parts of consecutive ones; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call, Step
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.transport import (
    ALIGNED,
    Messages,
    Receive,
    TransportWrapper,
    UpTo,
    by_peer,
)
from lightning_gnn.kernels import loops

_WORTH = 1 / 8
"""The share of a message's bytes from which on its zero rows are left out of the next step's."""

_LOOKS = 8
"""Whole messages are looked at in so many steps first, and in every so many-th."""


def bits_bytes(num_rows: int) -> int:
    """Returns the bytes that a bit for each of so many rows takes."""
    return -(-num_rows // 8)


def nonzero_rows(rows: Tensor, counts: Sequence[int]) -> list[int]:
    """Returns how many rows of each part are not zero.

    Args:
        rows: contiguous ``[R, ...]``.
        counts: rows of each part, ``[P]``.
    """
    kept = np.empty(len(counts), np.int64)
    loops.count_nonzero(_as_bytes(rows).numpy(), np.array(counts), kept)
    return kept.tolist()


def pack_rows(rows: Tensor, counts: Sequence[int], packed: Sequence[bool], places: Sequence[int], out: Tensor) -> list[int]:
    """Writes each part to its place in memory; returns how many rows of each are not zero.

    Args:
        rows: contiguous ``[R, ...]``.
        counts: rows of each part, ``[P]``.
        packed: which parts are written without the rows that are zero, behind :func:`bits_bytes` that tell which these are; the
            others as they are.
        places: where each part begins, in bytes.
        out: uint8, contiguous.
    """
    kept = np.empty(len(counts), np.int64)
    arrays = (np.array(each) for each in (counts, packed, places))
    loops.pack_nonzero(_as_bytes(rows).numpy(), *arrays, out.numpy(), kept)
    return kept.tolist()


def unpack_rows(data: Tensor, out: Tensor) -> int:
    """Overwrites `out`, contiguous ``[R, ...]``, with a part that was packed; returns how many of its rows are not zero.

    Args:
        data: what :func:`pack_rows` wrote, and anything behind that.
    """
    return loops.unpack_nonzero(data.numpy(), _as_bytes(out).numpy())


def _as_bytes(rows: Tensor) -> Tensor:
    """Returns rows as uint8 ``[R, B]``."""
    return rows.detach().view(len(rows), -1).view(torch.uint8)


@dataclass
class _Seen:
    """What both ends know of the messages of a call between them.

    Attributes:
        step: of the last ones.
        short: they leave zero rows out.
        worth: whether all of them do, or would, save enough; None where nobody has looked.
    """

    step: Step | None = None
    short: bool = False
    worth: bool | None = None


class ZeroRows:
    """Which messages of one exchange leave zero rows out.

    All ranks start the exchanges of a step in that step. What is still under way when the next one's first is started, is
    waited for, so that both ends of a message have seen the same ones.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._step: Step | None = None
        self._looks = True
        # By call and whether this rank sends: of each peer.
        self._seen = defaultdict[tuple[Call, bool], list[_Seen]](lambda: [_Seen() for _ in range(world.size)])
        self._under_way: set[Callable[[], None]] = set()

    def messages(self, out: Tensor, out_counts: Sequence[int], into: Tensor, into_counts: Sequence[int], call: Call) -> Messages:
        """See :meth:`~lightning_gnn.comm.transport.Transport.messages`."""
        if self._step != self._world.step:
            for receive in list(self._under_way):
                receive()
            self._step = self._world.step
            self._looks = self._step.number < _LOOKS or self._step.number % _LOOKS == 0
        sent, coming = self._known(call, True, out_counts), self._known(call, False, into_counts)
        sends, num_rows = self._pack(out, out_counts, sent)
        receives: list[tuple[int, Receive]] = []
        for peer, rows in by_peer(into, into_counts):
            receives.append((peer, self._unpacked(rows, coming[peer]) if coming[peer].short else rows))

        def around(wait: Callable[[], None]) -> Callable[[], None]:
            def receive() -> None:
                if receive in self._under_way:
                    self._under_way.remove(receive)
                    wait()
                    self._look(into, into_counts, coming)

            self._under_way.add(receive)
            return receive

        return sends, receives, self._world.transport.traffic(sends, num_rows), around

    def _known(self, call: Call, sent: bool, counts: Sequence[int]) -> list[_Seen]:
        """Returns what is known of messages to each rank, or from each; it is brought to this step where there are rows."""
        known = self._seen[call, sent]
        for seen, count in zip(known, counts):
            if count and seen.step != self._step:
                seen.step, seen.short, seen.worth = self._step, bool(seen.worth), None
        return known

    def _pack(self, out: Tensor, counts: Sequence[int], known: Sequence[_Seen]) -> tuple[Sequence[tuple[int, Tensor]], int]:
        """Returns what is sent in place of rows, so many to each rank, ``[P]``; and how many rows that is."""
        short = [count > 0 and seen.short for seen, count in zip(known, counts)]
        if not any(short):
            self._look(out, counts, known)
            return by_peer(out, counts), len(out)
        row_bytes = out[0].nbytes
        room = [-(-(bits_bytes(count) + count * row_bytes) // ALIGNED) * ALIGNED for count in counts]
        transport = self._world.transport
        if transport.lends(out):  # the memory in which it would be packed
            memory = torch.empty(sum(room), dtype=torch.uint8)
        else:
            memory = transport.scratch((sum(room),), torch.uint8)
        places = [*accumulate(room, initial=0)]
        found = pack_rows(out, counts, short, places, memory)
        self._note(known, counts, found, row_bytes, short=True)
        sends: list[tuple[int, Tensor]] = []
        num_rows = 0
        for peer, (count, kept, packed, part) in enumerate(zip(counts, found, short, memory.split(room))):
            if not count:
                continue
            if packed:
                data = part[: bits_bytes(count) + kept * row_bytes]
            else:
                data = part[: count * row_bytes].view(out.dtype).view(count, *out.shape[1:])
            num_rows += kept if packed else count
            sends.append((peer, data))
        return sends, num_rows

    def _unpacked(self, rows: Tensor, seen: _Seen) -> UpTo:
        """Returns what is received in place of rows of a rank."""

        def accept(data: Tensor) -> None:
            self._note([seen], [len(rows)], [unpack_rows(data, rows)], rows[0].nbytes, short=True)

        return UpTo(bits_bytes(len(rows)) + rows.nbytes, accept)

    def _look(self, rows: Tensor, counts: Sequence[int], known: Sequence[_Seen]) -> None:
        """Notes what is zero in messages that are sent, or came, whole; of others, it is known."""
        is_whole = False
        for seen, count in zip(known, counts):
            is_whole |= count > 0 and not seen.short
        if is_whole and self._looks and rows.numel():
            self._note(known, counts, nonzero_rows(rows, counts), rows[0].nbytes, short=False)

    def _note(self, known: Sequence[_Seen], counts: Sequence[int], kept: Sequence[int], row_bytes: int, short: bool) -> None:
        """Notes how many rows of messages were not zero; `short`: of those that leave zero rows out, too."""
        for seen, count, nonzero in zip(known, counts, kept):
            if count and (short if seen.short else self._looks):
                saved = (count - nonzero) * row_bytes - bits_bytes(count)
                seen.worth = seen.worth is not False and saved >= _WORTH * count * row_bytes


class ZeroRowsTransport(TransportWrapper):
    """A transport over another one, which sends rows as they are, that leaves rows of zeros out of messages of the backward.

    Not on devices, for which the host would have to wait to know how much there is to send.
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
        self,
        out: Tensor,
        out_counts: Sequence[int],
        into: Tensor,
        into_counts: Sequence[int],
        call: Call,
        exchange: Exchange,
    ) -> Messages:
        if call.direction != "backward" or into.device.type != "cpu":
            return self._transport.messages(out, out_counts, into, into_counts, call, exchange)
        if exchange not in self._of:
            self._of[exchange] = ZeroRows(exchange.world)
        return self._of[exchange].messages(out, out_counts, into, into_counts, call)
