"""The exchange of ranks that hold the neighbourhoods of their nodes: only the ranks of a group exchange, if any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call, Step
from lightning_gnn.comm.exchange import Exchange


class ReplicatedExchange(Exchange):
    """S and S^T inside a group of ranks, and behind the halo rows one of zeros: the source of edges from beyond.

    Rows that read it are not right, and nothing that is right reads these (:mod:`lightning_gnn.partition.replicas`).

    Args:
        inner: between the ranks of the group; idle where each is alone.
        own_lengths, most_propagations: see :class:`~lightning_gnn.comm.exchange.Exchange`.
    """

    def __init__(self, inner: Exchange, own_lengths: dict[int, int], most_propagations: int) -> None:
        super().__init__(inner.num_owned, inner.num_halo + 1, inner.world, inner.meter)
        self.inner, self.own_lengths, self.most_propagations = inner, own_lengths, most_propagations

    @override
    def begin_step(self, step: Step) -> None:
        self.inner.begin_step(step)

    @override
    def drain(self) -> None:
        self.inner.drain()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)

    @override
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        halo[-1] = 0
        return (lambda: None) if self.inner.idle else self.inner.start_expand(x, halo[:-1], call)

    @override
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        return (lambda own: None) if self.inner.idle else self.inner.start_reduce(halo[:-1], call)

    @override
    def reduce(self, x: Tensor, layer: str) -> Tensor:
        raise ValueError(
            f"'{layer}' sums over the out-edges of each node, of which replicas know some only. Let ranks communicate instead: "
            'plan="p2p" or "spst".'
        )
