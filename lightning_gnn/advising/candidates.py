"""The schemes that are compared, each with the arguments that matter most, for a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

from lightning_gnn.partition.grid import legal_replications
from lightning_gnn.strategies.base import GNNStrategy
from lightning_gnn.strategies.dgcl import DGCLStrategy
from lightning_gnn.strategies.gossip import ClusterAllReduceStrategy
from lightning_gnn.strategies.sampling import SamplingStrategy
from lightning_gnn.strategies.spmm import SpMM1DStrategy, SpMM2DStrategy, SpMM3DStrategy, SpMM15DStrategy
from lightning_gnn.strategies.vertex_cut import VertexCutStrategy


@dataclass(frozen=True)
class Candidate:
    """A strategy and its arguments.

    Attributes:
        kind: the strategy's class.
        arguments: of it; plain values.
        full_graph: a step is an epoch; else epochs have many steps, and learn more.
    """

    kind: type[GNNStrategy]
    arguments: dict[str, Any] = field(default_factory=dict)
    full_graph: bool = True

    @property
    def exact(self) -> bool:
        """Whether every number is that of one device."""
        return not self.strategy().approximation

    @property
    def name(self) -> str:
        """The word for the Trainer."""
        return self.kind.strategy_name

    def strategy(self, **options: Any) -> GNNStrategy:
        """Returns it for a Trainer, with further arguments of the class."""
        return self.kind(**self.arguments, **options)

    def __str__(self) -> str:
        return f"{self.name} {' '.join(f'{name}={value}' for name, value in self.arguments.items())}".rstrip()


def candidates(ranks: int, links_alike: bool = True) -> Iterator[Candidate]:
    """Yields what can run on so many ranks; a plan over relays only where links are not alike."""
    yield Candidate(DGCLStrategy, {"plan": "p2p"})
    if not links_alike:
        yield Candidate(DGCLStrategy, {"plan": "spst"})
    yield Candidate(SpMM1DStrategy, {"sparsity_aware": False})
    for c in legal_replications(ranks):
        if 1 < c <= isqrt(ranks):
            yield Candidate(SpMM15DStrategy, {"replication": c})
            yield Candidate(SpMM15DStrategy, {"replication": c, "sparsity_aware": False})
    if ranks > 1 and isqrt(ranks) ** 2 == ranks:
        yield Candidate(SpMM2DStrategy)
    if ranks > 1 and round(ranks ** (1 / 3)) ** 3 == ranks:
        yield Candidate(SpMM3DStrategy)
    yield Candidate(VertexCutStrategy)
    # What vertex_cut_cached sends at most: how many rows have not changed is known only in training.
    yield Candidate(VertexCutStrategy, {"codec": "int8"})
    yield Candidate(SamplingStrategy, full_graph=False)
    yield Candidate(ClusterAllReduceStrategy, {"averaging_interval": 1}, full_graph=False)


def chosen(names: Sequence[str] | None, ranks: int, links_alike: bool = True) -> list[Candidate]:
    """Returns those :func:`candidates` whose strategies have these names; None for all.

    Raises:
        ValueError: there is none.
    """
    every = list(candidates(ranks, links_alike))
    found = [each for each in every if names is None or each.name in names]
    if not found:
        known = ", ".join(dict.fromkeys(each.name for each in every))
        raise ValueError(f"None of {', '.join(names or ())} runs on {ranks} ranks; {known} do.")
    return found
