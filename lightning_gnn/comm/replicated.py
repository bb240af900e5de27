"""The exchange of ranks that hold the neighbourhoods of their nodes: only the ranks of a group exchange, if any."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.exchange import RowExchange


class ReplicatedExchange(RowExchange):
    """S and S^T inside a group of ranks, and behind the halo rows one of zeros: the source of edges from beyond.

    Rows that read it are not right, and nothing that is right reads these (:mod:`lightning_gnn.partition.replicas`).

    Args:
        inner: between the ranks of the group; idle where each is alone.
        own_lengths: see :class:`~lightning_gnn.comm.exchange.RowExchange`.
    """

    def __init__(self, inner: RowExchange, own_lengths: dict[int, int]) -> None:
        super().__init__(inner.num_owned, inner.num_halo + 1, False, inner.world, inner.meter)
        self._inner, self.own_lengths = inner, own_lengths

    @override
    def start_fetch(self, x: Tensor, halo: Tensor, layer: str) -> Callable[[], None]:
        halo[-1] = 0
        return _nothing if self._inner.idle else self._inner.start_fetch(x, halo[:-1], layer)

    @override
    def outgoing(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return self.buffer("outgoing", shape, dtype)

    @override
    def start_return(self, halo_grad: Tensor, layer: str) -> Callable[[Tensor], None]:
        return _nothing if self._inner.idle else self._inner.start_return(halo_grad[:-1], layer)

    @override
    def reduce(self, x: Tensor, layer: str) -> Tensor:
        raise ValueError(
            f"'{layer}' sums over the out-edges of each node, of which replicas know some only. Let ranks communicate instead: "
            'plan="p2p" or "spst".'
        )


def _nothing(*_: Tensor) -> None:
    pass
