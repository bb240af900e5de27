"""Pool of batches: each free worker takes the next batch.

Source: Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster" (2021), Algorithm 6: the indices 0..n-1, repeated for every
epoch, in a shared queue. There, "while the pool is not empty: take" are two steps. If two workers see one remaining index, the
second waits forever. The index of a worker that dies is never done. Here, taking an index is one atomic addition, and indices of
dead workers are taken over.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from lightning_gnn.strategies.gossip.operations import Add, Get, IsAlive, Steps, Swap

_DONE = "done by "


@dataclass
class Pool:
    """Pool of items `begin` to `end`; item i is batch ``i % size`` of epoch ``i // size``.

    The key of an item is empty, then has the worker that took it, then the worker that completed it.

    Attributes:
        size: number of batches of an epoch.
        end: end of the range of items; None if the number of epochs is unlimited.
        begin: first item; above 0 after a resume.
        done_before: items from `begin` on that were done before a resume.
    """

    size: int
    end: int | None
    begin: int = 0
    done_before: Collection[int] = field(default_factory=frozenset)

    def take(self, me: int) -> Steps[int | None]:
        while True:
            item = self.begin + (yield Add("pool/taken")) - 1
            if self.end is not None and item >= self.end:
                return None
            # Another worker may have taken it over, if this worker seemed dead in between.
            if item not in self.done_before and (yield Swap(_key(item), "", str(me))):
                return item

    def mark_done(self, me: int, item: int) -> Steps[None]:
        """Mark an item as done; if another worker took it over in the meantime, that worker does so."""
        if (yield Swap(_key(item), str(me), f"{_DONE}{me}")):
            yield Add(f"pool/done/{item // self.size}")

    def give_back(self, me: int, item: int) -> Steps[None]:
        yield Swap(_key(item), str(me), "")

    def give_back_all(self, me: int) -> Steps[None]:
        """Return items that this worker took before a restart: others would wait for them, since the worker is alive again."""
        taken = self.begin + (yield Add("pool/taken", 0))
        for item in (yield from self.open_items(taken if self.end is None else min(taken, self.end))):
            yield from self.give_back(me, item)

    def take_over(self, me: int) -> Steps[tuple[list[int], list[int]]]:
        """Take over the items of dead workers once all items are taken; returns these, and the items that others still work on.

        Between the addition and the swap of :meth:`take`, an item seems to have no worker. It is then taken over too, and its
        first worker continues with the next item.
        """
        assert self.end is not None
        mine, others = [], []
        for item in (yield from self.open_items(self.end)):
            holder = yield Get(_key(item))
            if holder.startswith(_DONE):
                continue
            free = holder == "" or (holder != str(me) and not (yield IsAlive(int(holder))))
            if free and (yield Swap(_key(item), holder, str(me))):
                mine.append(item)
            else:
                others.append(item)
        return mine, others

    def open_items(self, end: int) -> Steps[list[int]]:
        """Returns the items before `end` that may not be done: the items of incomplete epochs."""
        found: list[int] = []
        for epoch in range(self.begin // self.size, -(-end // self.size)):
            items = range(max(self.begin, epoch * self.size), (epoch + 1) * self.size)
            items_left = [item for item in items if item not in self.done_before]
            # Count the whole epoch: items from `end` on may have been done in the meantime.
            if (yield Add(f"pool/done/{epoch}", 0)) < len(items_left):
                found.extend(item for item in items_left if item < end)
        return found

    def position(self) -> Steps[tuple[int, list[int]]]:
        """Returns the first item that is not done, and the items after it that are done: the start of a resumed run."""
        taken = self.begin + (yield Add("pool/taken", 0))
        end = taken if self.end is None else min(taken, self.end)
        undone = []
        for item in (yield from self.open_items(end)):
            if not (yield Get(_key(item))).startswith(_DONE):
                undone.append(item)
        first = undone[0] if undone else end
        return first, sorted(set(range(first, end)) - set(undone))


def _key(item: int) -> str:
    return f"pool/item/{item}"
