"""What an epoch costs: the constants that planners and partitioners share, and a model of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SECONDS_PER_EDGE_COLUMN = 0.4e-9
"""Of SpMM in float32 on one core of a 2-core CPU machine: 0.2 s for 4.0 M edges x 128 columns (benchmarks/kernels.py)."""

BYTES_PER_S = 1.0e9
"""Between two ranks: gloo over loopback on that machine; also the order of a 10 Gbit/s network."""

COLUMNS = 64
"""A common hidden width."""

BYTES_PER_ELEMENT = 4
"""float32."""


@dataclass(frozen=True)
class LayerCost:
    """Predicted time of one layer and direction on each part; the slowest part sets the pace.

    Attributes:
        compute_seconds: SpMM over the part's edges, ``[P]``.
        exchange_seconds: receiving the part's halo rows, ``[P]``.
    """

    compute_seconds: NDArray[np.float64]
    exchange_seconds: NDArray[np.float64]

    @classmethod
    def of(cls, edges: NDArray[np.integer], halo_rows: NDArray[np.integer]) -> LayerCost:
        """Returns the cost of parts with that many in-edges and halo rows, ``[P]`` each."""
        return cls(
            edges.astype(np.float64) * COLUMNS * SECONDS_PER_EDGE_COLUMN,
            halo_rows.astype(np.float64) * COLUMNS * BYTES_PER_ELEMENT / BYTES_PER_S,
        )

    @property
    def seconds(self) -> float:
        """Seconds of the slowest part."""
        return float((self.compute_seconds + self.exchange_seconds).max())
