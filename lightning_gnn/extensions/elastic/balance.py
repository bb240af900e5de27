"""Owners that follow the speed of ranks: nodes move from ranks for which others wait to these others.

P ranks. The work of a rank is the number of its edges plus, for each node, the mean number of edges per node.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray

from lightning_gnn.arguments import check_numbers, quote
from lightning_gnn.data.shards import Shard
from lightning_gnn.extensions.elastic.memory import Room, has_room
from lightning_gnn.extensions.elastic.ownership import move_work, work_of_nodes
from lightning_gnn.partition.shard import Ids
from lightning_gnn.strategy.scheme import EdgeCutScheme

Numbers = NDArray[np.float64]

GAIN = 0.1
"""Least gain of a move, as a fraction of the seconds of the slowest rank."""
MOST_GAIN = 0.5
"""Least gain after several moves in opposite directions, of which each raises the least gain by half."""
WINDOW, EVERY = 3, 2
"""Number of epochs that must all promise a gain, and epochs between two decisions."""
LEAST_SHARE = 0.02
"""Least work of a rank, as a fraction of the mean."""


class OwnersChange(Exception):
    """Exception with which all ranks leave a stage at the start of an epoch, to begin it again with other owners.

    Attributes:
        shares: share of the work of each rank afterwards, ``[P]``.
    """

    def __init__(self, shares: Numbers) -> None:
        super().__init__("Owners of nodes change.")
        self.shares = shares


def work_of(shard: Shard) -> Numbers:
    """Returns the work of each rank, ``[P]``."""
    nodes, edges = np.array(shard.counts, float), np.array(shard.edge_counts, float)
    return edges + nodes * edges.sum() / nodes.sum()


def level_works(work: Numbers, seconds: Numbers, fixed: Numbers) -> tuple[Numbers, float]:
    """Returns the work of each rank, ``[P]``, with which ranks are predicted to take equally long, and the longest seconds.

    Args:
        work: work of each rank, ``[P]``.
        seconds: seconds of each rank without waits, ``[P]``.
        fixed: seconds of each rank that do not depend on its work, ``[P]``, below `seconds`.
    """
    rate, found, free = (seconds - fixed) / work, work.copy(), np.ones(len(work), bool)
    # Seconds of little work do not predict much work: a rank grows to the mean, or to twice its work.
    low, high = LEAST_SHARE * work.mean(), np.maximum(2 * work, work.mean())
    while free.any():
        left = work.sum() - found[~free].sum()
        level = (left + (fixed / rate)[free].sum()) / (1 / rate)[free].sum()
        found[free] = ((level - fixed) / rate)[free]
        outside = free & ((found < low) | (found > high))
        if not outside.any():
            break
        above = outside & (found > high)
        chosen = above if above.any() else outside
        found[chosen] = found.clip(low, high)[chosen]
        free &= ~chosen
    return found, float((fixed + rate * found).max())


class Decisions:
    """Decisions on moves; equal on all ranks, since their inputs are.

    Attributes:
        full: ranks whose memory is full, and which receive no more work.
    """

    def __init__(self) -> None:
        self._least_gain, self._last = GAIN, np.zeros(1)
        self._before: tuple[Numbers, Numbers] | None = None  # work and seconds before the last move
        self._fixed = np.zeros(1)  # by rank, fraction of its seconds
        self.full: Sequence[int] = ()

    def next_shares(self, work: Numbers, seconds: Numbers, cost_s: float, epochs_left: float) -> Numbers | None:
        """Returns the shares of the work after a move, ``[P]``; None if nodes stay.

        Args:
            work: work of each rank, ``[P]``.
            seconds: seconds of each rank without waits in the last epochs, ``[epochs, P]``.
            cost_s: seconds of a move.
            epochs_left: number of epochs that remain.
        """
        typical = np.median(seconds, 0)
        self._fit(work, typical)
        found, level = level_works(work, typical, self._fixed * typical)
        change, before = found - work, seconds.max(1)
        after = (seconds * (self._fixed + (1 - self._fixed) * found / work)).max(1)
        is_clear = (before - after >= self._least_gain * before).all()  # also in the epochs that were not the median
        if not is_clear or (typical.max() - level) * epochs_left < cost_s or (change[[*self.full]] > 0).any():
            return None
        if (change * self._last).sum() < 0:
            self._least_gain = min(1.5 * self._least_gain, MOST_GAIN)
        self._last, self._before = change, (work, typical)
        shares: Numbers = found / found.sum()
        return shares

    def _fit(self, work: Numbers, after: Numbers) -> None:
        """Estimate the fixed seconds of ranks from the seconds before and after a move."""
        if self._before is None:
            return
        (work_before, before), self._before = self._before, None
        moved = work_before - work
        clear = np.abs(moved) > 0.1 * work_before
        rate = np.divide(before - after, moved, out=np.zeros_like(work), where=clear)
        # Without a plausible rate, the speed has changed since, and no fixed seconds follow from them.
        self._fixed = np.where(rate > 0, 1 - rate * work / after, 0).clip(0, 0.8)


class Balance(pl.Callback):
    """Callback that measures the speed of ranks and moves owners; it outlives the stages of a call.

    Args:
        speeds: relative speed of each rank, ``[P]``; None to measure it.

    Attributes:
        shares: share of the work of each rank, ``[P]``, that the owners of the next stage must have; None to keep owners.
        cost_s: seconds of the last move on this rank; before the first, of the first set-up.
    """

    def __init__(self, speeds: Sequence[float] | None) -> None:
        self._speeds = None if speeds is None else np.array(speeds, float)
        self.shares: Numbers | None = None
        self.decisions, self.cost_s = Decisions(), 0.0
        self._seconds, self._mark = list[float](), (0.0, 0.0)
        self.begin()

    def begin(self, shares: Numbers | None = None) -> None:
        """Begin a set-up, with other `shares` of the work."""
        self._began, self.shares = time.perf_counter(), shares

    def renumber(self, new_ranks: Sequence[int | None]) -> None:
        """Keep the given speeds of ranks that remain, by their new ranks; None for a lost rank."""
        self.shares, self.decisions = None, Decisions()
        if self._speeds is not None:
            kept = sorted((new, speed) for new, speed in zip(new_ranks, self._speeds) if new is not None)
            self._speeds = np.array([speed for _, speed in kept])
            self.shares = self._speeds / self._speeds.sum()

    def check(self, strategy: Any) -> None:
        """Raises ValueError if owners cannot move under a strategy, whose devices are known."""
        kind, size = type(strategy).__name__, strategy.num_nodes * strategy.num_processes
        scheme = strategy.scheme
        if strategy.trains_on_batches or not isinstance(scheme, EdgeCutScheme) or getattr(scheme, "num_hops", None) is not None:
            raise ValueError(
                f"balance needs full-graph steps on an edge cut without replicas, and {kind} has none here. Use "
                'strategy="dgcl", or remove balance.'
            )
        if strategy.memory_limit is not None:
            raise ValueError("balance is not supported with memory_limit, where ranks compute in turns. Remove one of them.")
        if self._speeds is None and strategy.root_device.type != "cpu":
            raise ValueError(
                f"balance=True measures the waits of ranks, which are not counted on {strategy.root_device.type} devices. Give "
                "the relative speed of each rank, such as balance=[1.0, 0.5], or remove balance."
            )
        if self._speeds is not None and len(self._speeds) != size:
            raise ValueError(f"balance must have one speed for each of the {size} ranks (got {len(self._speeds)}).")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seconds.clear()
        self.cost_s = time.perf_counter() - self._began
        if self.shares is not None:
            rank_zero_info(f"Owners changed in {self.cost_s:.1f} s")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        world, last = strategy.world, self._mark
        if world.size == 1:
            return
        now = time.perf_counter(), world.waited_s or 0.0
        self._seconds.append(now[0] - last[0] - (now[1] - last[1]))
        work = work_of(trainer.datamodule.shard)  # type: ignore[attr-defined]
        # The first entry is not an epoch, and the second is an epoch with caches to fill.
        count, shares = len(self._seconds) - 2, None
        if self._speeds is not None:
            wanted = self._speeds / self._speeds.sum()
            if self.shares is None and np.abs(wanted / (work / work.sum()) - 1).max() > GAIN / 2:
                shares = wanted
        elif count >= WINDOW and (count - WINDOW) % EVERY == 0:
            mine = torch.tensor([*self._seconds[-WINDOW:], self.cost_s], dtype=torch.float64)
            of_ranks = world.all_gather(mine, "Seconds of ranks").numpy()
            shares = self.decisions.next_shares(work, of_ranks[:, :-1].T, of_ranks[:, -1].max(), _epochs_left(trainer))
        if shares is not None:
            raise OwnersChange(shares)
        self._mark = time.perf_counter(), world.waited_s or 0.0


def _epochs_left(trainer: pl.Trainer) -> float:
    epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs - trainer.current_epoch
    return min(epochs, math.inf if trainer.max_steps == -1 else trainer.max_steps - trainer.global_step)


def moved_owners(
    balance: Balance, strategy: Any, trainer: Any, edge_index: Ids | None, owners: NDArray[np.int32] | None
) -> NDArray[np.int32] | None:
    """Returns the owner of each node, ``[N]``, on rank 0, after nodes moved to the shares of `balance`; collective.

    Where the memory of a rank is predicted not to suffice, fewer nodes move.

    Args:
        balance: the callback.
        strategy: strategy of the run.
        trainer: its Trainer, between two stages.
        edge_index: on rank 0, edges in original ids, int64 ``[2, E]``.
        owners: on rank 0, owner of each node before, ``[N]``.
    """
    world = strategy.world
    rooms = world.all_gather_object(Room.of(strategy, trainer.datamodule.shard))
    full: list[int] = []
    if edge_index is not None and owners is not None and balance.shares is not None:
        work = work_of_nodes(edge_index, len(owners))
        now = np.bincount(owners, work, world.size) / work.sum()
        change = balance.shares / balance.shares.sum() - now
        for part in (1.0, 0.5, 0.25, 0.0):
            found = move_work(edge_index, owners, work, now + part * change) if part else owners
            growth = np.bincount(found, work, world.size) / (now * work.sum())
            if not part or has_room(strategy, trainer, rooms, edge_index, found, growth):
                break
        moved = f"{(found != owners).sum():,} of {len(owners):,} nodes"
        if part < 1:
            full = np.flatnonzero(change > 0).tolist()
            rank_zero_warn(
                f"Only {moved} move to faster ranks: the memory of ranks {full} is predicted not to suffice for more. They "
                "receive no more nodes. See docs/memory.md."
            )
        rank_zero_info(
            f"Moving {moved} to other ranks; shares of work: {', '.join(f'{each:.0%}' for each in now + part * change)}"
        )
        owners = found
    balance.decisions.full = world.broadcast_object(full) or balance.decisions.full
    return owners


def check_balance(balance: bool | Sequence[float], elastic: bool) -> None:
    """Raises ValueError if the option is invalid."""
    if isinstance(balance, bool):
        speeds: Sequence[float] = ()
    elif isinstance(balance, Sequence) and not isinstance(balance, str):
        speeds = balance
    else:
        raise ValueError(f"balance must be True, False or the relative speed of each rank (got {quote(balance)}).")
    for speed in speeds:
        check_numbers(balance=speed)
        if speed <= 0:
            raise ValueError(f"balance must have speeds above 0 (got {quote(balance)}).")
    if balance is not False and not elastic:
        raise ValueError(f"balance={quote(balance)} is supported with elastic=True only. Set elastic=True, or remove balance.")
