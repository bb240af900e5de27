"""Choice of the number of graph ranks by predicted memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gnn import devices
from lightning_gnn.checks.footprint import Sizes
from lightning_gnn.comm.group import raise_together
from lightning_gnn.extensions.mesh.support import check_mesh
from lightning_gnn.strategy.memory_checks import feature_bytes, in_gb, predicted_steps, sample_bytes, working_bytes

FACTOR = 1.2
"""Factor on predicted peaks: Python, libraries and fragmented memory are not predicted."""


def choose_ahead(strategy: Any, module: pl.LightningModule, trainer: pl.Trainer, data: Any) -> bool:
    """Set the number of graph ranks before ranks start; returns whether it is set.

    The free memory of other machines and of GPUs is known only after their ranks have started.
    """
    if strategy.graph_ranks == "auto" and strategy.num_nodes == 1 and strategy.root_device.type == "cpu":
        strategy.graph_ranks = _choose(strategy, module, trainer, data, devices.available_bytes())
    return bool(strategy.graph_ranks != "auto")


def agree_on_graph_ranks(strategy: Any) -> None:
    """Set the number of graph ranks that rank 0 has chosen or chooses, on all ranks; collective."""
    world, device, failure = strategy.world, strategy.root_device, None
    free = [each for each in world.all_gather_object(_free_bytes(device)) if each is not None]
    if world.rank == 0 and strategy.graph_ranks == "auto":
        module = strategy.lightning_module
        try:
            data = strategy.check_data(getattr(module.trainer, "datamodule", None))
            strategy.graph_ranks = _choose(strategy, module, module.trainer, data, min(free, default=None))
        except Exception as error:
            failure = error
    raise_together(world, failure, 'graph_ranks="auto" found no number')
    strategy.graph_ranks = world.broadcast_object(strategy.graph_ranks)


def _free_bytes(device: Any) -> int | None:
    return devices.available_bytes() if device.type == "cpu" else devices.free_bytes(device)


def _choose(strategy: Any, module: pl.LightningModule, trainer: pl.Trainer, data: Any, free: int | None) -> int:
    """Returns the smallest number of graph ranks whose predicted peak fits, given the free memory of a machine or device.

    Raises:
        ValueError: none fits, or ranks and samples cannot be divided.
        RuntimeError: memory cannot be predicted.
    """
    if free is None:
        raise RuntimeError(f'graph_ranks="auto" requires the free memory, which is unknown here. Set {_number(strategy)}.')
    found: list[str] = []
    try:
        for graph_ranks in _candidates(strategy, data):
            peak, is_bound = _peak(strategy, module, trainer, data, free)
            found.append(f"{graph_ranks}: {'at least ' if is_bound else ''}{in_gb(peak)}")
            if FACTOR * peak <= free:
                rank_zero_info(
                    f"Selected graph_ranks={graph_ranks} of {strategy.world_size} ranks: the predicted peak times {FACTOR} fits "
                    f"in {in_gb(free)} of free memory. Predicted peaks by graph_ranks: {', '.join(found)}"
                )
                return graph_ranks
    finally:
        strategy.graph_ranks = "auto"
    raise ValueError(
        f'graph_ranks="auto" requires {FACTOR} times the predicted peak as free memory, got {in_gb(free)} for peaks of '
        f"{', '.join(found)} by graph_ranks. Use a smaller global_batch_size or more ranks, or set {_number(strategy)}."
    )


def _number(strategy: Any) -> str:
    return f"a number, such as {type(strategy).__name__}(graph_ranks={strategy.world_size})"


def _candidates(strategy: Any, data: Any) -> Iterator[int]:
    """Yields the numbers of graph ranks that ranks, options, scheme and samples support; raises ValueError if there is none."""
    size = strategy.world_size
    for graph_ranks in (number for number in range(1, size + 1) if size % number == 0):
        strategy.graph_ranks = graph_ranks  # the mesh and the layout follow
        try:
            check_mesh(strategy, data.sample_data)
            data.sample_data.check_strategy(strategy)
            strategy.layout()
        except ValueError:
            if graph_ranks == size:
                raise
            continue
        yield graph_ranks


def _peak(strategy: Any, module: pl.LightningModule, trainer: pl.Trainer, data: Any, free: int) -> tuple[int, bool]:
    """Returns the peak of the ranks that share a machine's memory or a device, and whether it is only a lower bound.

    If a lower bound exceeds the free memory, the graph is not partitioned.
    """
    run, parts = strategy._run_for_checks(module, trainer, data), strategy.graph_ranks
    if not data.is_stored:
        data.partition_for(run.layout)
    cut = data.stored_cut()
    try:
        steps = predicted_steps(run, cut.shard(0))
    except RuntimeError as error:
        raise RuntimeError(f'graph_ranks="auto" cannot predict memory: {error} Set {_number(strategy)}.') from error
    sharing = list(strategy.parallel_devices).count(strategy.root_device)

    def peak_of(sizes: Sequence[Sizes], working_bytes: int = 0) -> int:
        peaks = [steps.footprint(each, working_bytes).peak(run.checkpoint_convs).max_bytes for each in sizes]
        firsts = range(0, strategy.world_size, sharing)
        return max(sum(peaks[rank % parts] for rank in range(first, first + sharing)) for first in firsts)

    rows, edges = (np.array([*map(cut.types.total, kinds)]) // parts for kinds in (cut.types.nodes, cut.types.edges))
    bound = peak_of([Sizes(rows, 0 * rows, 0 * rows, edges, 0, edges)] * parts)
    if FACTOR * bound > free:
        return bound, parts > 1
    data.partition_for(run.layout)
    cut = data.stored_cut()
    working = working_bytes(run.scheme, cut, feature_bytes(cut) + sample_bytes(run, cut))
    return peak_of(Sizes.from_cut(cut, module), working), False
