"""The schemes that are compared: those of all registered strategies, with the arguments that each names for so many ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_gnn.strategies import GNNStrategy, registered


@dataclass(frozen=True)
class Candidate:
    """A strategy and its arguments, plain values."""

    kind: type[GNNStrategy]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def full_graph(self) -> bool:
        """Whether a step is an epoch; else epochs have many steps, and learn more."""
        return not self.kind.trains_on_batches

    @property
    def exact(self) -> bool:
        """Whether every number is that of one device."""
        return not self.strategy().approximation

    @property
    def name(self) -> str:
        return self.kind.strategy_name

    def strategy(self, **options: Any) -> GNNStrategy:
        return self.kind(**self.arguments, **options)

    def __str__(self) -> str:
        return f"{self.name} {' '.join(f'{name}={value}' for name, value in self.arguments.items())}".rstrip()


def candidates(ranks: int, links_alike: bool = True) -> Iterator[Candidate]:
    """Yields what can run on so many ranks, see :meth:`~lightning_gnn.strategy.base.GNNStrategy.variants`."""
    for name, kind in registered().items():
        if name != kind.strategy_name:  # another way to start its ranks
            continue
        for arguments in kind.variants(ranks, links_alike):
            candidate = Candidate(kind, dict(arguments))
            try:
                candidate.strategy().scheme.layout(ranks)
            except (TypeError, ValueError):  # it needs arguments, or another number of ranks
                continue
            yield candidate


def chosen(names: Sequence[str] | None, ranks: int, links_alike: bool = True) -> list[Candidate]:
    """Returns those :func:`candidates` whose strategies have these names, all for None; a ValueError if there is none."""
    every = list(candidates(ranks, links_alike))
    found = [each for each in every if names is None or each.name in names]
    if not found:
        known = ", ".join(dict.fromkeys(each.name for each in every))
        raise ValueError(f"None of {', '.join(names or ())} runs on {ranks} ranks; {known} do.")
    return found
