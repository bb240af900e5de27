"""Workers in lockstep: the synchronous counterpart of gossip, to compare with.

Source: Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster" (2021), Algorithms 3 and 4.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from torch import Tensor
from typing_extensions import override

from lightning_gnn.strategies.gossip.pairing import Pairing
from lightning_gnn.strategies.gossip.peers import WorkerGroup
from lightning_gnn.strategies.gossip.pool import Pool
from lightning_gnn.strategies.gossip.worker import Peers, Worker


class Lockstep(Worker):
    """A worker that has an equal share of every epoch, and averages with all others at once.

    In the thesis a worker that has a batch less than another would never come to the last average. Here all make as many: where
    they do not divide an epoch's batches, some of these are done twice. Of the pool, only the items are used: no worker asks what
    others have taken or done.
    """

    through_host = False

    def __init__(self, pool: Pool, me: int, size: int, interval: int, peers: Peers | None, group: WorkerGroup | None) -> None:
        super().__init__(pool, Pairing(me, size), interval, peers, 0.0, 0)
        self.pairs, self._group = False, group
        self._share = math.ceil(pool.size / size)
        self._taken = 0

    @property
    def _first_epoch(self) -> int:
        return self.pool.begin // self.pool.size

    @override
    def take(self) -> int | None:
        epoch, turn = divmod(self._taken, self._share)
        item = (self._first_epoch + epoch) * self.pool.size + (self.me + turn * self.size) % self.pool.size
        if self.pool.end is not None and item >= self.pool.end:
            return None
        self._taken += 1
        self.reached = self._first_epoch * self.pool.size + self._taken * self.pool.size // self._share
        return item

    @override
    def done(self, item: int) -> None:
        pass  # no other worker takes it

    @override
    def give_back(self, item: int) -> None:
        pass

    @override
    def left_over(self) -> list[int]:
        return []

    @override
    def undone(self) -> int:
        return 0

    @override
    def position(self) -> tuple[int, list[int]]:
        """Returns the first item of the first epoch that is not complete."""
        return (self._first_epoch + self.counts.batches // self._share) * self.pool.size, []

    @override
    def meet(self, own: Callable[[], Tensor]) -> Tensor | None:
        self.counts.batches += 1
        if self._group is None or self.counts.batches % self.interval:
            return None
        total, began = own(), time.perf_counter()
        self._group.sum_(total)
        self.counts.waits += 1
        self.counts.averages += 1
        self.counts.waited += time.perf_counter() - began
        return total

    @override
    def agrees(self, decision: bool, all: bool) -> bool:
        return decision if self._group is None else self._group.agree(decision, all)
