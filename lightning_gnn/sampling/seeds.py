"""Which seed nodes a rank trains on, and in which batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

Ids = NDArray[np.int64]


def split_seeds(seeds: Ids, offsets: Ids) -> list[Ids]:
    """Returns the seed nodes of each rank: equally many, to within one, and most of them its own.

    Source: DistDGL section III-B, the two-level split: sorted ids are cut into equal ranges, and each range goes to the rank that
    owns most of it. Ranks are given their ranges so that most seeds are at home in all.

    Args:
        seeds: ids in the partitioned graph, ascending.
        offsets: first node of each rank and the end, ``[P + 1]``.
    """
    ranges = np.array_split(seeds, len(offsets) - 1)
    overlap = np.stack([np.histogram(each, offsets)[0] for each in ranges])
    _, rank_of_range = linear_sum_assignment(overlap, maximize=True)
    return [ranges[i] for i in np.argsort(rank_of_range)]


class SeedBatches:
    """Batches of one rank's seeds: as many on all ranks, so that none waits for another in vain.

    Args:
        sizes: number of seeds of each rank.
        batch_size: seeds of a batch, at most.

    Attributes:
        steps: batches of an epoch.
    """

    def __init__(self, sizes: list[int], batch_size: int) -> None:
        self.sizes = sizes
        self.steps = max(1, -(-max(sizes) // batch_size))

    def counts(self, step: int) -> tuple[int, ...]:
        """Returns how many seeds each rank has in a step."""
        return tuple((step + 1) * size // self.steps - step * size // self.steps for size in self.sizes)

    def of_epoch(self, seeds: Tensor, rank: int, seed: int) -> list[Tensor]:
        """Returns the seeds of each step, in the epoch's own order."""
        order = torch.randperm(len(seeds), generator=torch.Generator().manual_seed(seed))
        size = self.sizes[rank]
        bounds = [step * size // self.steps for step in range(self.steps + 1)]
        return [seeds[order[low:high]] for low, high in pairwise(bounds)]
