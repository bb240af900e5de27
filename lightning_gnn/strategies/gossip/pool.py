"""The work pool: whoever is free takes the next batch.

Source: Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster" (2021), Algorithm 6: the indices 0..n-1, repeated for every
epoch, in a shared queue. There "while the pool is not empty: take" are two steps, and of two workers that see one index left, the
second waits for ever; and an index that a worker took along when it died is never done. Here taking is one atomic addition, and
what dead workers hold is taken over.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from lightning_gnn.strategies.gossip.operations import Add, Get, IsAlive, Steps, Swap

_DONE = "done by "


@dataclass
class Pool:
    """Items ``begin`` to ``end``; item i is batch ``i % size`` of epoch ``i // size``.

    An item's key holds nothing, then the worker that has it, then who has done it.

    Attributes:
        end: the first item that is none; None if epochs have no end.
        begin: the first item; above 0 after a resume.
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
            # Someone may have taken it over, who thought that we had died in between.
            if item not in self.done_before and (yield Swap(_key(item), "", str(me))):
                return item

    def done(self, me: int, item: int) -> Steps[None]:
        """Says that an item is done; of one that was taken over meanwhile, the other says so."""
        if (yield Swap(_key(item), str(me), f"{_DONE}{me}")):
            yield Add(f"pool/done/{item // self.size}")

    def give_back(self, me: int, item: int) -> Steps[None]:
        yield Swap(_key(item), str(me), "")

    def give_back_all(self, me: int) -> Steps[None]:
        """Gives back what an earlier life of this worker has left: others would wait for it, now that it lives again."""
        taken = self.begin + (yield Add("pool/taken", 0))
        for item in (yield from self.open_items(taken if self.end is None else min(taken, self.end))):
            yield from self.give_back(me, item)

    def take_over(self, me: int) -> Steps[tuple[list[int], list[int]]]:
        """Takes over what dead workers hold, of a pool of which all is taken; returns that, and what others are still at.

        Between the addition and the swap of :meth:`take` an item seems to be nobody's. It is taken over as well: then its first
        worker goes on to the next.
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
        """Returns the items before `end` that may not be done: those of epochs that are not complete."""
        found: list[int] = []
        for epoch in range(self.begin // self.size, -(-end // self.size)):
            items = range(max(self.begin, epoch * self.size), (epoch + 1) * self.size)
            items_left = [item for item in items if item not in self.done_before]
            # All of the epoch: those behind `end` may have been done meanwhile.
            if (yield Add(f"pool/done/{epoch}", 0)) < len(items_left):
                found.extend(item for item in items_left if item < end)
        return found

    def position(self) -> Steps[tuple[int, list[int]]]:
        """Returns the first item that is not done, and those behind it that are: what a resumed run begins with."""
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
