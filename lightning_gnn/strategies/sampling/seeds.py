"""Which seed nodes a rank trains on, and in which batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, product

import numpy as np
import torch
from torch import Tensor
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.data.shards import Cut
from lightning_gnn.data.sources import is_labelled


def seeds_in(cut: Cut, kind: NodeType | EdgeType, mask: str | None, rank: int | None = None) -> Tensor:
    """Returns the ids of the nodes of a type, or the edges, that are in a mask and not without a label; None takes all.

    Those of one rank's part, or of all.
    """
    low, high = (0, cut.types.total(kind)) if rank is None else cut.types.offsets(kind)[rank : rank + 2].tolist()
    if mask is None:
        return torch.arange(low, high)
    attributes = cut.attributes[cut.types.key(kind)]
    chosen, y = attributes[mask][low:high], attributes.get("y") if isinstance(kind, str) else None
    return (chosen if y is None else chosen & is_labelled(y[low:high])).nonzero().view(-1) + low


class SplitSeeds:
    """The seeds of each rank: equally many, to within one, and as many of them its own as can be.

    What a rank has too many of goes to those that have too few, of its machine first: seeds move, features stay where they
    are. DistDGL (section III-B) cuts the sorted ids into equal ranges instead, and gives each to the machine that owns most of
    it; of unequal parts, fewer seeds then stay with their owners.

    Args:
        owned: returns the seeds that a rank owns, ascending: read where they are needed, since those of all ranks are many.
        counts: how many these are, by rank.

    Attributes:
        sizes: how many seeds each rank has.
        first: the lowest of all, ``[1]``; empty where there is none.
    """

    def __init__(self, owned: Callable[[int], Tensor], counts: Sequence[int], ranks_per_machine: int = 1) -> None:
        self._owned = owned
        self.first = owned(next((rank for rank, count in enumerate(counts) if count), 0))[:1].clone()
        num_ranks, total = len(counts), sum(counts)
        share = np.full(num_ranks, total // num_ranks)
        share[np.argsort([-count for count in counts], kind="stable")[: total % num_ranks]] += 1
        self.sizes: list[int] = share.tolist()
        kept = [min(count, size) for count, size in zip(counts, self.sizes)]
        # By rank: whose seeds it has, from which of these on to which.
        self._pieces = [[(rank, 0, count)] for rank, count in enumerate(kept)]
        room = [size - count for size, count in zip(self.sizes, kept)]
        for same_machine in (True, False):
            for taker, giver in product(range(num_ranks), repeat=2):
                if same_machine and taker // ranks_per_machine != giver // ranks_per_machine:
                    continue
                given = min(room[taker], counts[giver] - kept[giver])
                if given:
                    self._pieces[taker].append((giver, kept[giver], kept[giver] + given))
                    kept[giver] += given
                    room[taker] -= given

    @classmethod
    def of(cls, cut: Cut, kind: NodeType | EdgeType, mask: str | None, ranks_per_machine: int = 1) -> SplitSeeds:
        """Returns the split of :func:`seeds_in` a mask."""

        def owned(rank: int) -> Tensor:
            return seeds_in(cut, kind, mask, rank)

        return cls(owned, [len(owned(rank)) for rank in range(len(cut.halos))], ranks_per_machine)

    def seeds(self, rank: int) -> Tensor:
        """Returns the seeds of a rank, ascending, int64."""
        return torch.cat([self._owned(owner)[low:high] for owner, low, high in self._pieces[rank]]).sort().values


class SeedBatches:
    """Batches of one rank's seeds: as many on all ranks, so that none waits for another in vain.

    Attributes:
        steps: batches of an epoch.
    """

    def __init__(self, sizes: list[int], batch_size: int) -> None:
        self.sizes = sizes
        self.steps = max(1, -(-max(sizes) // batch_size))

    def counts(self, step: int) -> tuple[int, ...]:
        return tuple((step + 1) * size // self.steps - step * size // self.steps for size in self.sizes)

    def of_epoch(self, seeds: Tensor, rank: int, seed: int | None) -> list[Tensor]:
        """Returns the seeds of each step, in the epoch's own order; None leaves them as they are."""
        order = torch.arange(len(seeds))
        if seed is not None:
            order = torch.randperm(len(seeds), generator=torch.Generator().manual_seed(seed))
        size = self.sizes[rank]
        bounds = [step * size // self.steps for step in range(self.steps + 1)]
        return [seeds[order[low:high]] for low, high in pairwise(bounds)]
