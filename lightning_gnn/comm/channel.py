"""Bytes between ranks beside all else that they exchange, on a process group of its own.

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
"""Bytes of the first message of each pair of ranks in :meth:`GroupChannel.start`. Gloo sends what the receiver has made room for:
a longer rest costs another round trip, so that small messages should not have one; 16 kB take 0.1 ms at 1 Gbit/s."""


class GroupChannel:
    """A process group of its own, for tensors on the CPU, beside everything else that ranks exchange.

    Calls come from any one thread of each rank; making and closing it is a call, too.

    Args:
        purpose: named in errors.

    Attributes:
        bytes_received: from other ranks, but for what fills up short messages.
        exchanges: how often ranks have waited for each other.
    """

    def __init__(self, world: World, purpose: str = "Sampling") -> None:
        self._world, self._purpose = world, purpose
        # Gloo, also beside GPUs: what is wanted lies in host memory, and must not wait for a stream.
        self._group = dist.new_group(timeout=world.group_timeout, backend="gloo")
        self.bytes_received = self.exchanges = 0

    def exchange(
        self,
        parts: Sequence[Tensor],
        counts: Sequence[int] | None = None,
        layer: str = "",
        direction: Direction = "forward",
    ) -> list[Tensor]:
        """See :meth:`TransportChannel.exchange`; rows of unknown number may have any dtype."""
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
        """Starts to send bytes to some ranks and to receive, from each of `senders`, as many as it sends. Others take no part.

        Args:
            sends: by rank, bytes for it, uint8 ``[n]``.
            senders: ranks that send something here.

        Returns:
            Waits, and returns the bytes by sender. Ranks wait before they start the next exchange.

        Raises:
            CommunicationError: a rank does not answer; from the returned function, too.
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
        """Ends the group; all ranks call it."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)
