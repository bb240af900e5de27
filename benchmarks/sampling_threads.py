"""Threads that make batches in place of ranks: what they would send each other, for benchmarks and tests of sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import Queue
from threading import Barrier
from types import SimpleNamespace
from typing import Any

from torch import Tensor

Machines = Sequence[Sequence[int]]


class Meeting:
    """What threads send each other in place of ranks: see :class:`~lightning_gnn.comm.rows.GroupChannel`.

    Args:
        machines: the ranks of each.
        timeout: seconds after which a thread that waits for others fails; None: it waits on.

    Attributes:
        on: by rank, those of its machine.
        sent: sender, receiver and bytes of each message.
    """

    def __init__(self, machines: Machines, timeout: float | None = None) -> None:
        self.size, self._timeout = sum(map(len, machines)), timeout
        self.on = {rank: on for rank, on in sorted((rank, list(ranks)) for ranks in machines for rank in ranks)}
        self.sent: list[tuple[int, int, int]] = []
        self.channels: dict[int, Any] = {}
        self._boxes = {(a, b): Queue[Tensor]() for a in range(self.size) for b in range(self.size)}
        self._everyone, self._values = Barrier(self.size, timeout=timeout), dict[int, Any]()

    def world(self, rank: int) -> Any:
        def all_gather_object(value: Any) -> list[Any]:
            self._values[rank] = value
            self._everyone.wait()
            found = [self._values[each] for each in range(self.size)]
            self._everyone.wait()
            return found

        return SimpleNamespace(rank=rank, size=self.size, all_gather_object=all_gather_object)

    def channel(self, world: Any) -> Any:
        channel = self.channels[world.rank] = SimpleNamespace(bytes_received=0, exchanges=0)

        def start(sends: dict[int, Tensor], senders: Sequence[int]) -> Callable[[], dict[int, Tensor]]:
            for peer, data in sends.items():
                assert peer not in self.on[world.rank]  # who shares a machine reads, and does not ask
                self.sent.append((world.rank, peer, len(data)))
                self._boxes[world.rank, peer].put(data)

            def wait() -> dict[int, Tensor]:
                channel.exchanges += 1
                found = {peer: self._boxes[peer, world.rank].get(timeout=self._timeout) for peer in senders}
                channel.bytes_received += sum(map(len, found.values()))
                return found

            return wait

        channel.start = start
        return channel
