"""Validation of a mesh of ranks before a run."""

from __future__ import annotations

from typing import Any


def check_graph_ranks(graph_ranks: Any) -> None:
    """Raises ValueError unless `graph_ranks` is a number of ranks, or "auto"."""
    if graph_ranks != "auto" and (not isinstance(graph_ranks, int) or isinstance(graph_ranks, bool) or graph_ranks < 1):
        raise ValueError(f'graph_ranks must be an integer of at least 1 or "auto", got {graph_ranks!r}.')


def check_mesh(strategy: Any, samples: Any) -> None:
    """Raises ValueError if a strategy cannot divide its ranks among data ranks, or samples.

    Args:
        strategy: strategy of this package.
        samples: :class:`~lightning_gnn.extensions.samples.data.SampleData` of its datamodule, or None.
    """
    size, graph_ranks, shape = strategy.world_size, strategy.graph_ranks, strategy.mesh_shape
    if shape.is_auto and (samples is None or samples.global_batch_size is None):
        raise ValueError(
            'graph_ranks="auto" requires GraphDataModule(graph, samples=..., global_batch_size=...), so that batches do not '
            f"depend on the choice. Set global_batch_size, or a number, such as graph_ranks={size}."
        )
    if graph_ranks == "auto":
        return
    if size % graph_ranks:
        raise ValueError(
            f"The number of ranks must be a multiple of graph_ranks, got {size} ranks and graph_ranks={graph_ranks}. Set devices "
            f"to {max(1, size // graph_ranks) * graph_ranks}, or graph_ranks to a divisor of {size}."
        )
    if shape.data_ranks == 1:
        return
    ranks = f"graph_ranks={graph_ranks} with {size} ranks gives {shape.data_ranks} data ranks"
    if samples is None:
        raise ValueError(
            f"{ranks}, which need samples, but the datamodule has none. Pass GraphDataModule(graph, samples=...), or remove "
            "graph_ranks."
        )
    plan = getattr(strategy.scheme, "plan", None)
    if plan not in (None, "auto", "p2p", "spst"):
        raise ValueError(f'plan={plan!r} does not support several data ranks: {ranks}. Set plan="p2p", or remove graph_ranks.')
