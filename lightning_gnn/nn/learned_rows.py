"""Modules that learn rows of nodes, each row on the rank that owns its node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch.plugins import Precision
from typing_extensions import Self

from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Cut, Shard

_trying_out = False


@contextmanager
def untrained_rows() -> Iterator[None]:
    """While open, learned rows are the initial ones and learn nothing: for steps that only try a model out."""
    global _trying_out
    before, _trying_out = _trying_out, True
    try:
        yield
    finally:
        _trying_out = before


def are_untrained() -> bool:
    """Returns whether :func:`untrained_rows` is open."""
    return _trying_out


class LearnedRows(torch.nn.Module, ABC):
    """Learned rows of nodes, which are no parameters: copies of the module on several ranks hold different rows.

    A strategy calls :meth:`distribute`, :meth:`begin_step`, :meth:`collect` and :meth:`release` on all ranks, where there are
    several. ``state_dict`` has all rows.
    """

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """What a node's row takes, with the state of its optimizer."""

    @abstractmethod
    def check_fits(self, name: str, of: Shard | Cut) -> None:
        """Raises ValueError if a graph does not have the nodes; `name` is that of this module."""

    @abstractmethod
    def check_training(self, num_optimizers: int, precision: Precision | None) -> None:
        """Raises ValueError if rows cannot learn beside so many optimizers, or under this precision."""

    @abstractmethod
    def distribute(self, world: World, shard: Shard, before: Sequence[Self]) -> None:
        """Leaves to each rank the rows of its nodes, before steps.

        Args:
            world: the ranks.
            shard: of this rank.
            before: those of the model that are distributed already, to share groups with.
        """

    @abstractmethod
    def begin_step(self, idle: bool) -> None:
        """Takes note of a step; of an `idle` rank, the batch only stands in for one that other ranks have."""

    @abstractmethod
    def collect(self) -> None:
        """Gives rank 0 the rows of all nodes, after training."""

    @abstractmethod
    def release(self) -> None:
        """Forgets ranks, when the run is over, also by an error."""


def learned_rows(module: torch.nn.Module, of: Shard | Cut) -> list[LearnedRows]:
    """Returns the learned rows in a module, for a graph.

    Raises:
        ValueError: some are of other nodes than the graph has.
    """
    found = {name: each for name, each in module.named_modules() if isinstance(each, LearnedRows)}
    for name, each in found.items():
        each.check_fits(name, of)
    return list(found.values())
