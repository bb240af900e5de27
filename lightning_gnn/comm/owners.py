"""Rows that lie at the owner of their node: read, changed, gathered and dealt over ranks.

Source: DistDGL (2020) section III-C: a distributed key-value store with pull and push, to the owner of a row.

N nodes, P ranks, n ids that a rank asks for, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.comm.group import World
from lightning_gnn.comm.requests import Requests


class Owners:
    """Who owns which node, and what ranks tell each other of its rows; all ranks make its calls in step.

    Args:
        world: the ranks.
        n_id: original ids of all nodes in rank order, ``[N]``.
        counts: nodes of each rank.
        batch_ids: the tensor that whole-graph steps have as ``batch.n_id``, if it is this rank's nodes in order.

    Attributes:
        own_ids: original ids of this rank's nodes, whose rows it holds in this order.
        idle: this step's batch only stands in for one that other ranks have, and counts for nothing.
        background: where pushes run; in the same order on all ranks.
    """

    def __init__(self, world: World, n_id: Tensor, counts: Sequence[int], batch_ids: Tensor | None = None) -> None:
        self._world, self._n_id, self._batch_ids = world, n_id, batch_ids
        self._offsets = torch.from_numpy(np.cumsum([0, *counts]))
        self._place = torch.empty_like(n_id)
        self._place[n_id] = torch.arange(len(n_id))
        self.own_ids = n_id.split(list(counts))[world.rank]
        self.idle = False
        # Two groups, as pulls of the next step and pushes of the last ones are under way at the same time.
        self._pulls, self._pushes = Requests(world, "Reading rows"), Requests(world, "Changing rows")
        self.background = Background("lightning_gnn rows")

    def __deepcopy__(self, memo: dict[int, Any]) -> Owners:
        return self

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def num_nodes(self) -> int:
        return len(self._n_id)

    def any(self, own: bool) -> bool:
        """Returns whether it holds on any rank."""
        return any(self._world.all_gather_object(own))

    @property
    def bytes_received(self) -> int:
        """From other ranks."""
        return self._pulls.bytes_received + self._pushes.bytes_received

    def are_own(self, ids: Tensor) -> bool:
        """Returns whether ids are each rank's own nodes, on all ranks alike: nothing need travel then."""
        return ids is self._batch_ids

    def _by_owner(self, places: Tensor) -> list[Tensor]:
        """Returns ascending places in rank order as rows of each owner."""
        bounds = torch.searchsorted(places, self._offsets).tolist()
        return [places[low:high] - first for (low, high), first in zip(pairwise(bounds), self._offsets.tolist())]

    def pull(self, ids: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the rows of ids, ``[n, D]``, each read once at its owner.

        Args:
            ids: original, ``[n]``.
            read: returns copies of rows of this rank.
        """
        places, inverse = self._place[ids].unique(return_inverse=True)
        asked = self._pulls.exchange(self._by_owner(places))
        return torch.cat(self._pulls.exchange([read(rows) for rows in asked]))[inverse]

    def push(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what all ranks push to rows of this one: which rows, ascending ``[m]``, and their sums, ``[m, D]``.

        Sums are taken on each rank first, and then over ranks in their order.

        Args:
            ids: original, ``[n]``, with duplicates.
            values: ``[n, D]``.
        """
        places, sums = summed(self._place[ids], values)
        parts = self._by_owner(places)
        rows = torch.cat(self._pushes.exchange(parts))
        return summed(rows, torch.cat(self._pushes.exchange(sums.split([len(part) for part in parts]))))

    def gather(self, rows: Tensor) -> Tensor:
        """Returns the rows of all nodes in original order, ``[N, ...]``, on rank 0; on others nothing, ``[0, ...]``.

        Args:
            rows: of this rank's nodes.
        """
        found = torch.cat(self._pulls.exchange([rows if peer == 0 else rows[:0] for peer in range(self._world.size)]))
        return found if self.rank else torch.empty_like(found).index_copy_(0, self._n_id, found)

    def deal(self, rows: Tensor) -> Tensor:
        """Returns the rows of this rank's nodes: the transpose of :meth:`gather`.

        Args:
            rows: of all nodes in original order on rank 0; on others nothing, ``[0, ...]``.
        """
        if self.rank == 0:
            parts = [rows[ids] for ids in self._n_id.split(self._offsets.diff().tolist())]
        else:
            parts = [rows] * self._world.size
        return self._pulls.exchange(parts)[0]

    def number(self, value: int) -> int:
        """Returns rank 0's."""
        return self._world.broadcast_object(value)

    def close(self) -> None:
        """Ends its thread and groups."""
        self.background.close()
        for requests in (self._pulls, self._pushes):
            requests.close()


class Background:
    """Runs functions in a thread, one after the other."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        # A daemon: after a failure it may wait for ranks that are gone.
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def start(self, work: Callable[[], None]) -> Future[None]:
        """Returns the future of `work`, which raises what it raises."""
        future: Future[None] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        """Ends the thread after what was started."""
        self._work.put(None)
        self._thread.join(1.0)


def summed(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the different rows, ascending, and the sum of the values of each, in the order given.

    Args:
        rows: ``[n]``.
        values: ``[n, D]``.
    """
    different, inverse = rows.unique(return_inverse=True)
    return different, values.new_zeros((len(different), values.size(1))).index_add_(0, inverse, values)
