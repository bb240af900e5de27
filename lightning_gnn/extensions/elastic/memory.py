"""Memory of ranks after a move of nodes, which must fit before nodes move.

P ranks, N nodes, E edges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from numpy.typing import NDArray

from lightning_gnn import devices
from lightning_gnn.checks.footprint import Sizes, memory_of
from lightning_gnn.comm.shared_memory import machine_key
from lightning_gnn.data.sources import counted_mask
from lightning_gnn.heap import peak_bytes
from lightning_gnn.partition.shard import Ids
from lightning_gnn.strategy.memory import memory_advice

_PLENTY = 2
"""Factor on the largest memory of ranks so far, grown like their work, above which nothing is predicted."""


class Room(NamedTuple):
    """Memory of a rank between two stages, in bytes.

    Attributes:
        where: name of the memory, equal for ranks that share it.
        available: free memory for this rank; infinite if it is unknown.
        held: its part of the graph, which the next stage releases.
        peak: most memory of the rank so far.
    """

    where: str
    available: float
    held: int
    peak: int

    @classmethod
    def of(cls, strategy: Any, shard: Any) -> Room:
        """Returns the memory of this rank."""
        device, rank = strategy.root_device, strategy.global_rank
        if device.type != "cpu":
            peak = devices.functions_of(device).max_memory_allocated(device)
            return cls(f"device of rank {rank}", devices.free_bytes(device), 0, peak)
        available, held = devices.available_bytes(), sum(memory_of(shard.batch).values())
        free = float("inf") if available is None else available
        return cls(machine_key() or f"rank {rank}", free, held, peak_bytes())


def has_room(
    strategy: Any, trainer: Any, rooms: Sequence[Room], edge_index: Ids, owners: NDArray[np.integer], growth: NDArray[np.float64]
) -> bool:
    """Returns whether all ranks are predicted to fit into memory with other owners.

    Args:
        strategy: strategy of the run.
        trainer: its Trainer, between two stages.
        rooms: memory of each rank, ``[P]``.
        edge_index: edges in original ids, int64 ``[2, E]``.
        owners: owner of each node after the move, ``[N]``.
        growth: work of each rank after the move, as a multiple of its work before, ``[P]``.
    """
    if _fits(rooms, _PLENTY * growth * [room.peak for room in rooms]):
        return True
    shard, module = trainer.datamodule.shard, trainer.lightning_module
    if shard.types.is_hetero:  # sizes by type are unknown
        return True
    try:
        advice = memory_advice(strategy.scheme)
        steps = advice.steps(module, shard.batch.cpu(), trainer, strategy.root_device, strategy.cache_input_aggregation)
    except RuntimeError as error:
        rank_zero_info(f"Skipped the memory prediction of other owners: {error}")
        return True
    labeled = sum(shard.mask_counts[counted_mask("train_mask", module)]) / len(owners)
    counts = _count_rows(edge_index, owners, len(rooms))
    sizes = [Sizes(rows, halo, sent, edges, round(labeled * rows), edges) for rows, halo, sent, edges in counts.tolist()]
    peaks = [steps.footprint(each).peak(strategy.checkpoint_convs).max_bytes for each in sizes]
    return _fits(rooms, np.array(peaks) - [room.held for room in rooms])


def _fits(rooms: Sequence[Room], needed: NDArray[np.floating]) -> bool:
    left = defaultdict[str, list[float]](list)
    for room, each in zip(rooms, needed):
        left[room.where].append(each)
    return all(sum(left[room.where]) <= room.available for room in rooms)


def _count_rows(edge_index: Ids, owners: NDArray[np.integer], ranks: int) -> NDArray[np.int64]:
    """Returns the numbers of nodes, halo nodes, sent rows and edges of each rank, int64 ``[P, 4]``."""
    source, target = owners[edge_index].astype(np.int64)
    cut = source != target
    pairs = np.unique(edge_index[0, cut] * ranks + target[cut])
    found = owners, pairs % ranks, owners[pairs // ranks], target
    return np.stack([np.bincount(each, minlength=ranks) for each in found], 1)
