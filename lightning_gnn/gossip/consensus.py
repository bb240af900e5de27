"""How far the workers' parameters are from each other, without sending them.

Source: count sketch, Charikar, Chen and Farach-Colton (2002); as a random projection, Weinberger et al., "Feature Hashing for
Large Scale Multitask Learning" (ICML 2009), Lemma 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

SIZE = 1024
"""Numbers in a sketch. Squared distances are right in the mean, with a standard deviation of at most sqrt(2 / SIZE): 4.4 %."""


def sketch(tensors: Iterable[Tensor]) -> Tensor:
    """Returns a projection ``[SIZE]``, float64, of all values of some tensors, which keeps distances.

    Each value is added to one of the numbers, drawn at random, with a random sign; the same for all workers.
    """
    values = torch.cat([torch.zeros(0), *(each.detach().reshape(-1).cpu() for each in tensors)]).double()
    drawn = torch.randint(2 * SIZE, values.shape, generator=torch.Generator().manual_seed(0))
    signs = 1.0 - 2.0 * (drawn % 2)
    return torch.zeros(SIZE, dtype=torch.float64).index_add_(0, drawn // 2, values * signs)


def distance(vectors: Sequence[Tensor]) -> float:
    """Returns how far vectors x_1..x_P are from their mean m, relative to it: sqrt(sum of ``|x_r - m|^2`` / P) / ``|m|``."""
    rows = torch.stack(list(vectors)).double()
    offsets = rows - rows[0]  # so that equal ones give 0, whatever is rounded
    root = (offsets - offsets.mean(0)).square().sum(1).mean().sqrt()
    return float(root / rows.mean(0).norm()) if root else 0.0
