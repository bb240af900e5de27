"""Exchange of bytes between ranks on a separate process group.

n rows; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn.comm.call import Direction
from lightning_gnn.comm.group import World

_HEAD = 16_384
"""Bytes of the first message of each pair of ranks in :meth:`GroupChannel.start`.

Gloo sends data once the receiver has posted a buffer. A second message costs another round trip, so small messages should fit in
the first. 16 kB take 0.1 ms at 1 Gbit/s.
"""


class GroupChannel:
    """Separate process group for CPU tensors.

    All calls, including the constructor and :meth:`close`, come from one thread at a time per rank.

    Args:
        purpose: name of the operation in errors.

    Attributes:
        bytes_received: bytes from other ranks, without the padding of short messages.
        exchanges: number of completed exchanges.
    """

    def __init__(self, world: World, purpose: str = "Sampling") -> None:
        self._world, self._purpose = world, purpose
        # Gloo, even with GPUs: the data is in host memory and must not wait for a stream.
        self._group = dist.new_group(timeout=world.group_timeout, backend="gloo")
        self.bytes_received = self.exchanges = 0

    def exchange(
        self, parts: Sequence[Tensor], counts: Sequence[int] | None = None, layer: str = "", direction: Direction = "forward"
    ) -> list[Tensor]:
        """See :meth:`TransportChannel.exchange`; with unknown row counts, tensors may have any dtype."""
        first = parts[0]
        sizes = torch.tensor([len(part) for part in parts])
        row_bytes = first.element_size() * first.shape[1:].numel()
        with self._world.watch.during(self._purpose, RuntimeError):
            if counts is None:
                arriving = torch.empty_like(sizes)
                dist.all_to_all_single(arriving, sizes, group=self._group)
            else:
                arriving = torch.tensor(counts)
            data = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
            into = torch.empty(int(arriving.sum()) * row_bytes, dtype=torch.uint8)
            in_bytes, out_bytes = ((each * row_bytes).tolist() for each in (arriving, sizes))
            dist.all_to_all_single(into, data, in_bytes, out_bytes, group=self._group)
        self.bytes_received += into.numel() - in_bytes[self._world.rank]
        self.exchanges += 1
        return list(into.view(first.dtype).view(-1, *first.shape[1:]).split(arriving.tolist()))

    def start(self, sends: Mapping[int, Tensor], senders: Sequence[int]) -> Callable[[], dict[int, Tensor]]:
        """Starts to exchange bytes with some ranks; returns a function that waits for the bytes of `senders`.

        Other ranks take no part. The receiver does not need the message lengths.

        Args:
            sends: bytes to send, uint8 ``[n]``, by rank of the receiver.
            senders: ranks that send to this rank.

        Returns:
            Function that waits and returns the bytes by sender. Call it before you start the next exchange.

        Raises:
            CommunicationError: a rank does not answer. The returned function may raise it, too.
        """
        room = _HEAD - 8
        leaving: list[tuple[Any, Tensor]] = []
        with self._world.watch.during(self._purpose, RuntimeError):
            heads = {peer: torch.empty(_HEAD, dtype=torch.uint8) for peer in senders}
            arriving: dict[int, Any] = {peer: dist.irecv(head, peer, group=self._group) for peer, head in heads.items()}
            for peer, data in sends.items():
                head = torch.zeros(_HEAD, dtype=torch.uint8)
                head[:8], head[8 : 8 + len(data)] = torch.tensor([len(data)]).view(torch.uint8), data[:room]
                pieces = [head, data[room:]] if len(data) > room else [head]
                leaving += [(dist.isend(piece, peer, group=self._group), piece) for piece in pieces]

        def wait() -> dict[int, Tensor]:
            found: dict[int, Tensor] = {}
            rests: list[Any] = []
            with self._world.watch.during(self._purpose, RuntimeError):
                for peer, work in arriving.items():
                    work.wait()
                    size = int(heads[peer][:8].view(torch.int64))
                    found[peer] = heads[peer][8 : 8 + size]
                    if size > room:
                        whole = torch.empty(size, dtype=torch.uint8)
                        whole[:room], found[peer] = found[peer], whole
                        rests.append(dist.irecv(whole[room:], peer, group=self._group))
                    self.bytes_received += 8 + size
                for work in (*rests, *(work for work, _ in leaving)):
                    work.wait()
            self.exchanges += 1
            return found

        return wait

    def close(self) -> None:
        """Destroy the group; all ranks call it."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)
