"""Workers in lockstep: the synchronous counterpart of gossip, for comparison.

Source: Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster" (2021), Algorithms 3 and 4.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.group import CommunicationError, no_process_group
from lightning_gnn.comm.listening import gloo_beside
from lightning_gnn.devices import backend_of
from lightning_gnn.private_torch import make_group
from lightning_gnn.strategies.gossip.pairing import Pairing
from lightning_gnn.strategies.gossip.peers import connect_to_store
from lightning_gnn.strategies.gossip.pool import Pool
from lightning_gnn.strategies.gossip.worker import Peers, Worker


class Lockstep(Worker):
    """Worker with an equal share of every epoch that averages with all others at once.

    In the thesis, a worker with one batch less than another would never reach the last average. Here all workers make the same
    number of batches: if it does not divide an epoch's batches, some are done twice. Only the items of the pool are used; workers
    do not share records of taken or completed batches. Sums use process groups that are separate from torch's default group. Each
    worker waits `timeout` seconds for the others.

    Raises:
        CommunicationError: a worker does not answer; also raised by `meet` and `agrees`.
    """

    through_host = False

    def __init__(self, pool: Pool, me: int, size: int, interval: int, peers: Peers | None, timeout: float) -> None:
        super().__init__(pool, Pairing(me, size), interval, peers, 0.0, 0)
        self.pairs, self._limit = False, timedelta(seconds=timeout)
        self._share = math.ceil(pool.size / size)
        self._num_taken = 0
        self._device_group: Any = None
        if peers is not None:
            with self._naming(), gloo_beside(peers.place.rpartition(":")[0]):
                self._host_group: Any = dist.ProcessGroupGloo(connect_to_store(peers.place), me, size, self._limit)

    @property
    def _first_epoch(self) -> int:
        return self.pool.begin // self.pool.size

    @override
    def take(self) -> int | None:
        epoch, turn = divmod(self._num_taken, self._share)
        item = (self._first_epoch + epoch) * self.pool.size + (self.me + turn * self.size) % self.pool.size
        if self.pool.end is not None and item >= self.pool.end:
            return None
        self._num_taken += 1
        self.reached = self._first_epoch * self.pool.size + self._num_taken * self.pool.size // self._share
        return item

    @override
    def mark_done(self, item: int) -> None:
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
    def meet(self, make_vector: Callable[[], Tensor]) -> Tensor | None:
        self.counts.batches += 1
        if self.peers is None or self.counts.batches % self.interval:
            return None
        total, began = make_vector(), time.perf_counter()
        self._sum(self.peers, total)
        self.counts.waits += 1
        self.counts.averages += 1
        self.counts.waited += time.perf_counter() - began
        return total

    @override
    def agrees(self, decision: bool, all: bool) -> bool:
        """Returns whether all workers, or any, have decided so."""
        if self.peers is None:
            return decision
        count = torch.tensor([int(decision)])
        self._sum(self.peers, count)
        return int(count) >= (self.size if all else 1)

    def _sum(self, peers: Peers, tensor: Tensor) -> None:
        """Sum `tensor` over all workers in place, between CPUs or between devices; the latter does not block the host."""
        with self._naming():
            group = self._host_group if tensor.device.type == "cpu" else self._get_device_group(peers, tensor.device)
            group.allreduce([tensor]).wait()

    def _get_device_group(self, peers: Peers, device: torch.device) -> Any:
        """Returns the process group of the devices, created at the first use."""
        if self._device_group is None:
            # dist.new_group needs a default group of all workers, through which Lightning would make them wait for each other.
            # The default group of this worker alone cannot split communicators.
            make: Any = make_group(dist)
            store, name, backend = connect_to_store(peers.place), f"workers of {peers.place}", backend_of(device)
            with no_process_group():
                self._device_group, _ = make(self.size, self.me, [], dist.Backend(backend), store, name, timeout=self._limit)
        return self._device_group

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(
                f"Averaging over all workers on rank {self.me} of {self.size}: {error}. Look at the other ranks' output first: "
                "one may have stopped, or be slower than the deadline (argument `timeout` of the strategy)."
            ) from error
