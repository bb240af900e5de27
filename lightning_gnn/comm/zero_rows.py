"""Messages of the backward pass without the rows that are zero.

Where few nodes are labelled, most gradients are zero: those of nodes from which no labelled node is reached in the layers that
are left. Which rows these are is not derived from the training mask, since batch norms, means over all nodes, penalties and
other losses give gradients to any node. Whoever sends rows looks at them, in each step.

A message without its zero rows has a bit for each row in front, 1 for those that follow. The messages of a call between two
ranks have this form if it would have saved an eighth of their bytes, or did, in the step before: both ranks have seen those, so
nothing need be said about it. Where fewer rows are zero, messages are as they are in the forward pass. Rows are zero if all
their bits are, so what arrives has the same bits in either form: those of -0.0 and NaN are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_gnn.comm.call import Call, Step
from lightning_gnn.comm.group import World
from lightning_gnn.comm.transport import ALIGNED, Receive, Rows, Scratch, UpTo, rows_of
from lightning_gnn.kernels import bits_bytes, nonzero_rows, pack_rows, unpack_rows

_WORTH = 1 / 8
"""The share of a message's bytes from which on its zero rows are left out of the next step's."""

_Key = tuple[Call, int, bool]
"""A call, a peer, and whether this rank sends."""


class ZeroRows:
    """Which messages of one exchange leave zero rows out.

    All ranks start the exchanges of a step in that step. What is still under way when the next one's first is started, is
    waited for, so that both ends of a message have seen the same ones.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._step: Step | None = None
        self._short: set[_Key] = set()
        self._worth: dict[_Key, bool] = {}  # for the next step, of all messages of this one
        self._under_way: set[Callable[[], None]] = set()

    def may_be_left_out(self, call: Call) -> bool:
        """Returns whether rows of a call may be left out.

        Not on devices, for which the host would have to wait to know how much there is to send; nor where rows are encoded.
        """
        transport = self._world.transport
        encoded = transport.codec is not None and transport.encodes
        return call.direction == "backward" and self._world.device.type == "cpu" and not encoded

    def begin_step(self) -> None:
        """Decides about the messages of the step that ranks are in, before the first of them."""
        if self._step != self._world.step:
            for receive in list(self._under_way):
                receive()
            self._short = {key for key, worth in self._worth.items() if worth}
            self._worth, self._step = {}, self._world.step

    def pack(self, sends: Sequence[tuple[int, Rows]], call: Call) -> tuple[Sequence[tuple[int, Rows]], int]:
        """Returns what is sent in place of these messages, and how many rows that is."""
        if not any((call, peer, True) in self._short for peer, _ in sends):
            for peer, given in sends:
                self._look((call, peer, True), rows_of(given))
            return sends, sum(len(rows_of(given)) for _, given in sends)
        room = [-(-_most_bytes(rows_of(given)) // ALIGNED) * ALIGNED for _, given in sends]
        memory: Rows
        if any(isinstance(given, Scratch) for _, given in sends):  # what is packed lies there
            memory = torch.empty(sum(room), dtype=torch.uint8)
        else:
            memory = self._world.scratch((sum(room),), torch.uint8)
        packed: list[tuple[int, Rows]] = []
        num_rows = 0
        for (peer, given), part in zip(sends, memory.split(room)):
            rows, into, key = rows_of(given).detach(), rows_of(part), (call, peer, True)
            if key in self._short:
                kept, data = pack_rows(rows, into)
                self._note(key, rows, kept)
                num_rows += kept
            else:
                data = into[: rows.nbytes].view(rows.dtype).view(rows.shape).copy_(rows)
                self._look(key, rows)
                num_rows += len(rows)
            packed.append((peer, replace(part, rows=data) if isinstance(part, Scratch) else data))
        return packed, num_rows

    def unpacked(self, receives: Sequence[tuple[int, Tensor]], call: Call) -> list[tuple[int, Receive]]:
        """Returns what is received in place of these messages."""

        def received(key: _Key, rows: Tensor) -> Receive:
            if key not in self._short:
                return rows
            return UpTo(_most_bytes(rows), lambda data: self._note(key, rows, unpack_rows(data, rows)))

        return [(peer, received((call, peer, False), rows)) for peer, rows in receives]

    def waiting(
        self, wait: Callable[[], None], receives: Sequence[tuple[int, Tensor]], call: Call
    ) -> Callable[[], None]:
        """Returns the function that waits for what :meth:`unpacked` returned for these messages, and looks at them."""

        def receive() -> None:
            if receive not in self._under_way:
                return
            self._under_way.remove(receive)
            wait()
            for peer, rows in receives:
                if (call, peer, False) not in self._short:
                    self._look((call, peer, False), rows)

        self._under_way.add(receive)
        return receive

    def _look(self, key: _Key, rows: Tensor) -> None:
        self._note(key, rows, nonzero_rows(rows))

    def _note(self, key: _Key, rows: Tensor, kept: int) -> None:
        """Notes that so many rows of a message were not zero."""
        saved = rows[0].nbytes * (len(rows) - kept) - bits_bytes(len(rows))
        self._worth[key] = self._worth.get(key, True) and saved >= _WORTH * rows.nbytes


def _most_bytes(rows: Tensor) -> int:
    """Returns the bytes of rows that are all sent, and of the bits in front."""
    return bits_bytes(len(rows)) + rows.nbytes
