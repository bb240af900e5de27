"""Questions between ranks, and their answers, beside everything else that they say to each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn.comm.group import World


class Requests:
    """Rows from every rank to every other, as many as each has for it, on a process group of their own.

    All ranks must make their calls in the same order, in any one thread each; making it is a call, too.

    Args:
        world: the ranks.
        purpose: named in errors.
    """

    def __init__(self, world: World, purpose: str = "Sampling") -> None:
        self._world, self._purpose = world, purpose
        # Gloo, also beside GPUs: what is asked for lies in host memory, and must not wait for a stream.
        self._group = dist.new_group(timeout=world.group_timeout, backend="gloo")
        self.bytes_received = 0

    def exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns what every rank has for this one.

        Args:
            parts: for each rank, on the CPU, ``[n, ...]``; dtype and trailing dimensions are equal everywhere.

        Raises:
            CommunicationError: a rank does not answer.
        """
        first = parts[0]
        sizes = torch.tensor([len(part) for part in parts])
        arriving = torch.empty_like(sizes)
        row_bytes = first.element_size() * first.shape[1:].numel()
        with self._world.during(self._purpose, RuntimeError):
            dist.all_to_all_single(arriving, sizes, group=self._group)
            data = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])
            into = torch.empty(int(arriving.sum()) * row_bytes, dtype=torch.uint8)
            in_bytes, out_bytes = ((each * row_bytes).tolist() for each in (arriving, sizes))
            dist.all_to_all_single(into, data, in_bytes, out_bytes, group=self._group)
        self.bytes_received += into.numel() - in_bytes[self._world.rank]
        rows = into.view(first.dtype).view(-1, *first.shape[1:])
        return list(rows.split(arriving.tolist()))

    def close(self) -> None:
        """Ends the group; all ranks call it."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)
