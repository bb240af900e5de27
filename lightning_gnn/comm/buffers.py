"""Memory that rows are received into."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


class Buffers:
    """Memory of an exchange that is used again: new memory costs more than what is written to it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns memory that nobody else has until it is given back."""
        free = self._free[torch.Size(shape), dtype]
        if free:
            return free.pop()
        # An inference tensor could not take part in autograd later, and evaluation may well come first.
        with torch.inference_mode(False):
            return torch.empty(*shape, dtype=dtype, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Has memory used again that :meth:`take` has returned."""
        self._free[buffer.shape, buffer.dtype].append(buffer)
