"""Modules with learned rows of nodes, each row on the owner of its node."""

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
    """Context manager that uses the initial values of learned rows and does not train them, for trial steps."""
    global _trying_out
    before, _trying_out = _trying_out, True
    try:
        yield
    finally:
        _trying_out = before


def are_untrained() -> bool:
    """Returns whether :func:`untrained_rows` is active."""
    return _trying_out


class LearnedRows(torch.nn.Module, ABC):
    """Interface of modules with learned rows of nodes. Rows are not parameters: each rank has other rows.

    With several ranks, a strategy calls :meth:`distribute`, :meth:`begin_step`, :meth:`collect` and :meth:`release` on all ranks.
    ``state_dict`` has all rows.
    """

    @abstractmethod
    def row_bytes(self, of: Shard | Cut) -> list[int]:
        """Returns the bytes of a node's row, with its optimizer state, by node type of a graph."""

    @abstractmethod
    def check_fits(self, name: str, of: Shard | Cut) -> None:
        """Raises ValueError if the graph's nodes do not match; `name` is the name of this module."""

    @abstractmethod
    def check_training(self, num_optimizers: int, precision: Precision | None) -> None:
        """Raises ValueError if rows cannot be trained with this number of optimizers, or with this precision."""

    @abstractmethod
    def distribute(self, world: World, shard: Shard, before: Sequence[Self]) -> None:
        """Keep only the rows of local nodes on each rank, before steps.

        Args:
            world: ranks.
            shard: shard of this rank.
            before: modules of the model that are already distributed, to share process groups with.
        """

    @abstractmethod
    def begin_step(self, idle: bool) -> None:
        """Hook called at the start of a step; on an `idle` rank, the batch is a placeholder."""

    @abstractmethod
    def collect(self) -> None:
        """Gather the rows of all nodes on rank 0, after training."""

    @abstractmethod
    def release(self) -> None:
        """Drop references to ranks at the end of a run, also after an error."""


def learned_rows(module: torch.nn.Module, of: Shard | Cut) -> list[LearnedRows]:
    """Returns the modules with learned rows in a module, for a graph.

    Raises:
        ValueError: the rows of a module are for other nodes than the graph's.
    """
    found = {name: each for name, each in module.named_modules() if isinstance(each, LearnedRows)}
    for name, each in found.items():
        each.check_fits(name, of)
    return list(found.values())
