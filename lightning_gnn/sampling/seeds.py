"""Which seed nodes a rank trains on, and in which batches."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.data.shards import Cut
from lightning_gnn.data.sources import is_labelled

Ids = NDArray[np.int64]


def seeds_in(cut: Cut, kind: NodeType | EdgeType, mask: str | None) -> Tensor:
    """Returns the ids of the nodes of a type, or the edges, that are in a mask and not without a label; None takes all."""
    if mask is None:
        return torch.arange(cut.types.total(kind))
    attributes = cut.attributes[cut.types.key(kind)]
    chosen, y = attributes[mask], attributes.get("y") if isinstance(kind, str) else None
    return (chosen if y is None else chosen & is_labelled(y)).nonzero().view(-1)


def split_seeds(seeds: Ids, offsets: Ids, ranks_per_machine: int = 1) -> list[Ids]:
    """Returns the seed nodes of each rank, ascending: equally many, to within one, and as many of them its own as can be.

    What a rank has too many of goes to those that have too few, of its machine first: seeds move, features stay where they
    are. DistDGL (section III-B) cuts the sorted ids into equal ranges instead, and gives each to the machine that owns most of
    it; of unequal parts, fewer seeds then stay with their owners.
    """
    num_ranks = len(offsets) - 1
    owned = np.split(seeds, np.searchsorted(seeds, offsets[1:-1]))
    share = np.full(num_ranks, len(seeds) // num_ranks)
    share[np.argsort([-len(each) for each in owned], kind="stable")[: len(seeds) % num_ranks]] += 1
    kept = [[each[:size]] for each, size in zip(owned, share)]
    spare = [each[size:] for each, size in zip(owned, share)]
    room = [int(size) - len(each[0]) for each, size in zip(kept, share)]
    for same_machine in (True, False):
        for taker, giver in product(range(num_ranks), repeat=2):
            if same_machine and taker // ranks_per_machine != giver // ranks_per_machine:
                continue
            given = spare[giver][: room[taker]]
            kept[taker].append(given)
            spare[giver] = spare[giver][len(given) :]
            room[taker] -= len(given)
    return [np.sort(np.concatenate(pieces)) for pieces in kept]


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
