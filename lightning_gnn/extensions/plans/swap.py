"""The exchange through host memory: every rank writes all of its rows there, and reads the rows that it needs.

Source: NeuGraph's scheme, as DGCL describes it (sections 3 and 7.1); it serves as a baseline. Gradients of halo rows are written
there likewise, and read by their owners.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import HaloExchange, counted, starting
from lightning_gnn.comm.group import World
from lightning_gnn.comm.shared_memory import Accept
from lightning_gnn.comm.traffic import Meter, Traffic
from lightning_gnn.comm.transport import rows_of
from lightning_gnn.kernels import take_rows
from lightning_gnn.partition.shard import HaloPlan, Ids


class SwapExchange(HaloExchange):
    """S by way of memory that all ranks of one machine map; S^T as in the direct exchange, which uses the same memory.

    Args:
        plan: which rows go to whom.
        halo: ids of this rank's halo rows, ascending, ``[H]``.
        offsets: first id of each rank and the end, ``[P + 1]``.
        world: the ranks.
        meter: where traffic is counted: rows written.

    Raises:
        ValueError: the ranks do not share memory.
    """

    def __init__(self, plan: HaloPlan, halo: Ids, offsets: Ids, world: World, meter: Meter) -> None:
        if world.size > 1 and not world.transport.shares_memory:
            raise ValueError(
                'plan="swap" exchanges through the memory of one machine: it takes CPU ranks, all on one machine, and '
                'shared_memory=True. Use plan="p2p" or "spst" here.'
            )
        super().__init__(plan, world, meter)
        bounds = np.searchsorted(halo, offsets)
        self._reads = [torch.from_numpy(halo[low:high] - first) for low, high, first in zip(bounds, bounds[1:], offsets)]
        self._readers = [peer for peer, count in enumerate(self.send_counts) if count]

    @override
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        began, traffic, block = self.now(call), Traffic(), None

        def look(rows: Tensor, part: Tensor) -> Accept:
            return lambda block: take_rows(block.view(x.dtype).view(-1, *x.shape[1:]), rows, part)

        looks = {
            peer: look(rows, part)
            for peer, (rows, part) in enumerate(zip(self._reads, halo.split(self.recv_counts)))
            if len(rows)
        }
        with starting(self.world, self.meter, call, traffic, began):
            if self._readers:
                block = self.world.scratch(x.shape, x.dtype)
                rows_of(block).copy_(x)
                traffic.bytes_sent, traffic.messages, traffic.rows = x.nbytes, 1, len(x)
            wait = self.world.transport.show(block, self._readers, looks)
        return counted(wait, self.world, self.meter, call, traffic)
