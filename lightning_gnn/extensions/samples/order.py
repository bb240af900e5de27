"""Order of samples in an epoch, and splits of samples by time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset

from lightning_gnn.arguments import check_whole
from lightning_gnn.data.sources import checked_fractions
from lightning_gnn.extensions.samples.folders import samples_of


class RankBatch(NamedTuple):
    """Samples of a data rank in a global batch.

    Attributes:
        indices: dataset indices of the samples.
        positions: positions of the samples in the global batch, int64 ``[B]``.
        total: number of samples of the global batch.
    """

    indices: list[int]
    positions: Tensor
    total: int


def positions_of(data_rank: int, data_ranks: int, total: int) -> Tensor:
    """Returns the positions of a data rank's samples in a global batch, int64: entry j belongs to data rank j mod D."""
    return torch.arange(data_rank, max(total, data_rank), data_ranks)


@dataclass(frozen=True)
class GlobalOrder:
    """Order of samples in an epoch: a permutation in global batches of B samples for each of D data ranks.

    Global batch k has entries k·B·D to (k + 1)·B·D - 1 of the permutation, and entry j of a batch belongs to data rank j mod D.
    Each sample is in one batch. In the last batch, data ranks may have fewer samples or none.

    Attributes:
        num_samples: number of samples of the dataset.
        batch_size: B.
        data_ranks: D.
        shuffle: whether the permutation is random; else it is the order of the dataset.
        seed: seed of the first epoch's permutation; each epoch adds 1.
    """

    num_samples: int
    batch_size: int
    data_ranks: int = 1
    shuffle: bool = False
    seed: int = 0

    def __len__(self) -> int:
        return -(-self.num_samples // self.global_size)

    @property
    def global_size(self) -> int:
        """Number of samples of a full global batch."""
        return self.batch_size * self.data_ranks

    def permutation(self, epoch: int) -> Tensor:
        """Returns the dataset indices of an epoch, int64 ``[num_samples]``."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(self.seed + epoch))

    def batches(self, epoch: int, data_rank: int, first: int = 0) -> Iterator[RankBatch]:
        """Yields the samples of a data rank in each global batch of an epoch, from batch `first` on."""
        order, size = self.permutation(epoch), self.global_size
        for number in range(first, len(self)):
            batch = order[number * size : (number + 1) * size]
            positions = positions_of(data_rank, self.data_ranks, len(batch))
            yield RankBatch(batch[positions].tolist(), positions, len(batch))


def split_by_time(samples: Any, fractions: Sequence[float] = (0.7, 0.1, 0.2), gap: int = 0) -> tuple[Subset[Any], ...]:
    """Returns training, validation and test samples, in the order of the dataset.

    Args:
        samples: map-style dataset in the order of time, or a folder of arrays (see `GraphDataModule`).
        fractions: fractions of training, validation and test samples.
        gap: number of samples that are left out between two splits. With windows of T input steps and H output steps,
            ``gap=T + H - 1`` gives splits without common time steps.

    Raises:
        ValueError: fractions or the gap are invalid, or a split with a fraction above 0 gets no sample.
    """
    check_whole(0, gap=gap)
    shares, samples = checked_fractions(fractions), samples_of(samples)
    ends = [round((len(samples) - 2 * gap) * share) for share in accumulate((0.0, *shares))]
    places = [range(ends[part] + part * gap, ends[part + 1] + part * gap) for part in range(3)]
    if any(share and not place for share, place in zip(shares, places)):
        raise ValueError(
            f"split_by_time needs a sample in each split with a fraction above 0, but fractions={shares} and gap={gap} of "
            f"{len(samples)} samples give {', '.join(str(len(place)) for place in places)} samples. Use a smaller gap."
        )
    return tuple(Subset(samples, place) for place in places)
