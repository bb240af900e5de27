"""Rows of embeddings at their owners: read and changed in the background.

N nodes of the whole graph, P ranks, n ids of a rank, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import NodeType

from lightning_gnn.comm.group import World
from lightning_gnn.comm.rows import AnyRows, GroupChannel, OwnedRows
from lightning_gnn.data.shards import Shard


class EmbeddingRows(AnyRows):
    """Rows of embeddings, on the CPU: read and changed in the background, gathered and scattered over ranks.

    Args:
        n_id, counts, world: see :class:`AnyRows`.
        batch_ids: the tensor that whole-graph steps have as ``batch.n_id``, if it is this rank's nodes in order.

    Attributes:
        own_ids: original ids of this rank's nodes, whose rows it holds in this order.
        idle: this step's batch only stands in for one that other ranks have, and counts for nothing.
        background: where gradients are sent to owners; in the same order on all ranks.
    """

    def __init__(self, world: World, n_id: Tensor, counts: Sequence[int], batch_ids: Tensor | None = None) -> None:
        # Two groups, as rows of the next step are read while gradients of the last ones are on their way.
        self._reads, self._changes = GroupChannel(world, "Reading rows"), GroupChannel(world, "Changing rows")
        OwnedRows.__init__(self, torch.tensor([0, *counts]).cumsum(0), self._reads)
        self._changed = OwnedRows(self._first, self._changes)
        self._world, self._batch_ids, self._place = world, batch_ids, None
        self.num_nodes, self._n_id, self.rank = len(n_id), n_id, world.rank
        self.own_ids = n_id.split(list(counts))[world.rank]
        self.idle, self._is_open = False, True
        self.background = Background("lightning_gnn rows")

    @classmethod
    def of_type(cls, name: NodeType | None, world: World, shard: Shard) -> EmbeddingRows:
        """Returns those of the nodes of a type, on the rank whose `shard` it is; None for a graph without types."""
        held = shard.nodes_held()[name]
        return cls(world, held.all_ids, held.counts, None if held.replicas else held.ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingRows:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickle does not have the other ranks

    def any(self, own: bool) -> bool:
        """Returns whether it holds on any rank."""
        return any(self._world.all_gather_object(own))

    def number(self, value: int) -> int:
        """Returns rank 0's."""
        return self._world.broadcast_object(value)

    def begin_step(self, idle: bool) -> None:
        self.idle = idle

    @property
    def bytes_received(self) -> int:
        """From other ranks."""
        return self._reads.bytes_received + self._changes.bytes_received

    def are_own(self, ids: Tensor) -> bool:
        """Returns whether ids are each rank's own nodes, on all ranks alike: nothing need travel then."""
        return ids is self._batch_ids

    def read(self, ids: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the rows of original ids, ``[n, D]``, each read once at its owner.

        Args:
            ids: original, ``[n]``.
            read: returns copies of rows of this rank.
        """
        places, inverse = self._places()[ids].unique(return_inverse=True)
        return self.pull(self.request(places), read)[inverse]

    def sum(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what all ranks have for rows of this one: which rows, ascending ``[m]``, and their sums, ``[m, D]``.

        Sums are taken on each rank first, and then over ranks in their order.

        Args:
            ids: original, ``[n]``, with duplicates.
            values: ``[n, D]``.
        """
        places, sums = summed(self._places()[ids], values)
        request = self._changed.request(places)
        return summed(torch.cat(request.rows), torch.cat(self._changed.push(request, sums)))

    def gather(self, rows: Tensor) -> Tensor:
        """Returns the rows of all nodes in original order, ``[N, ...]``, on rank 0; on others nothing, ``[0, ...]``.

        Args:
            rows: of this rank's nodes.
        """
        size = self._world.size
        found = torch.cat(self._reads.exchange([rows if peer == 0 else rows[:0] for peer in range(size)]))
        return found if self.rank else torch.empty_like(found).index_copy_(0, self._n_id, found)

    def scatter(self, rows: Tensor) -> Tensor:
        """Returns the rows of this rank's nodes: the transpose of :meth:`gather`.

        Args:
            rows: of all nodes in original order on rank 0; on others nothing, ``[0, ...]``.
        """
        parts = [rows] * self._world.size
        if self.rank == 0:
            parts = [rows[ids] for ids in self._n_id.split(self._first.diff().tolist())]
        return self._reads.exchange(parts)[0]

    def close(self) -> None:
        """Ends its thread and groups, once: several embeddings of a type share them."""
        if not self._is_open:
            return
        self._is_open = False
        self.background.close()
        self._reads.close()
        self._changes.close()


class Background:
    """Runs functions in a thread, one after the other."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        # A daemon, which an executor's thread is not: after a failure it may wait for ranks that are gone.
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
    """Returns the distinct rows, ascending, and the sum of the values of each, in the order given.

    Args:
        rows: ``[n]``.
        values: ``[n, D]``.
    """
    distinct, inverse = rows.unique(return_inverse=True)
    return distinct, values.new_zeros((len(distinct), values.size(1))).index_add_(0, inverse, values)
