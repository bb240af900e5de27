"""Table of schemes and options that elastic training supports, or rejects before ranks start (docs/elastic.md)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_gnn.extensions.elastic.loggers import check_loggers
from lightning_gnn.lightning_packages import is_instance
from lightning_gnn.nn.learned_rows import LearnedRows

SCHEMES: Mapping[str, str] = {
    **dict.fromkeys(("dgcl", "cover", "spmm", "spmm_1d", "spmm_15d"), ""),
    "spmm_2d": "its number of ranks is a square, and fewer ranks are not",
    "spmm_3d": "its number of ranks is a cube, and fewer ranks are not",
    "vertex_cut": "it gives edges to ranks, and the edges of a lost rank have no other owner",
    "vertex_cut_cached": "each rank has cached messages that no other rank has",
    "sampling": "an epoch has many steps, with other seeds on other ranks, and only whole epochs are repeated",
    "gossip": "its workers continue by themselves without lost workers",
    "cluster_allreduce": "its workers train on clusters of their own",
}
"""Reason against each scheme by name; empty for supported schemes."""


@dataclass(frozen=True)
class Rejection:
    """Option that is rejected.

    Attributes:
        name: the option, as in an error message.
        is_used: function that returns whether a strategy uses it.
        reason: reason, without a period.
        fix: change that helps.
    """

    name: str
    is_used: Callable[[Any], bool]
    reason: str
    fix: str

    def error(self) -> ValueError:
        return ValueError(f"elastic=True does not support {self.name}: {self.reason}. {self.fix}, or set elastic=False.")


def _is_external(strategy: Any) -> bool:
    return bool(strategy.cluster_environment.creates_processes_externally)


STARTS: Sequence[Rejection] = (
    Rejection(
        "a start_method other than 'popen'",
        lambda strategy: strategy._start_method != "popen",
        "only ranks that run the script can be moved to other processes",
        "Remove start_method, and use the name of the strategy without _spawn and _notebook",
    ),
    Rejection(
        "several machines without torchrun or lightning-gnn launch",
        lambda strategy: strategy.num_nodes > 1 and not _is_external(strategy),
        "the process that supervises the ranks sees its own machine only",
        "Start with lightning-gnn launch or torchrun",
    ),
    Rejection(
        "devices=1",
        lambda strategy: strategy.num_processes * strategy.num_nodes == 1 and not _is_external(strategy),
        "without another rank, none can continue",
        "Set devices=2 or more",
    ),
)
"""Rejected ways to start ranks."""

OPTIONS: Sequence[Rejection] = (
    Rejection(
        "GPUs",
        lambda strategy: any(device.type != "cpu" for device in strategy.parallel_devices or ()),
        "leaving NCCL operations after a loss has not been tested",
        'Use accelerator="cpu"',
    ),
    Rejection(
        "memory_limit",
        lambda strategy: strategy.memory_limit is not None,
        "ranks compute in turns, and a lost rank would keep its turn",
        "Remove memory_limit",
    ),
    Rejection(
        "graph_ranks",
        lambda strategy: strategy.graph_ranks is not None,
        "the ranks that remain after a loss may not be a multiple of it",
        "Remove graph_ranks: all ranks then divide the graph",
    ),
    Rejection(
        "replication_factor",
        lambda strategy: (getattr(strategy.scheme, "replication_factor", None) or 1) > 1,
        "it may not divide a smaller number of ranks",
        "Remove it: the factor is then chosen for each number of ranks",
    ),
)
"""Rejected options of strategies."""

_SEARCH = "it trains before the first epoch, and such steps are not repeated", "Set its result, and remove the callback"

CALLBACKS: Mapping[str, tuple[str, str]] = {
    "LearningRateFinder": _SEARCH,
    "BatchSizeFinder": _SEARCH,
    "ModelPruning": ("its set-up cannot be repeated", "Remove the callback, and prune before or after the fit"),
    "StochasticWeightAveraging": ("it adds an epoch in on_train_start, and would add another one", "Use WeightAveraging"),
    "OnExceptionCheckpoint": (
        "a loss is not an exception, and if too few ranks remain, elastic.ckpt is written",
        "Remove the callback",
    ),
}
"""Reason and fix for rejected callbacks of Lightning."""


def check_strategy(strategy: Any, min_ranks: int, is_started: bool) -> None:
    """Raises ValueError if elastic training does not support a strategy or its options; called when a Trainer is made.

    Args:
        strategy: the strategy.
        min_ranks: least number of ranks that continue.
        is_started: whether this process is a rank that was started for elastic training.
    """
    name = strategy.strategy_name
    reason = SCHEMES.get(name, "it has not been tested")
    if reason:
        raise Rejection(f"strategy {name!r}", bool, reason, "Use strategy 'dgcl'").error()
    for option in OPTIONS:
        if option.is_used(strategy):
            raise option.error()
    if is_started:
        return
    for start in STARTS:
        if start.is_used(strategy):
            raise start.error()
    ranks = strategy.num_processes * strategy.num_nodes
    if not _is_external(strategy):
        if min_ranks > ranks:
            raise ValueError(f"min_ranks={min_ranks} is above the number of ranks, {ranks}. Set it to {ranks} or less.")
    elif "TORCHELASTIC_RUN_ID" not in os.environ:
        kind, fix = type(strategy.cluster_environment).__name__, "Use lightning-gnn launch or torchrun"
        raise Rejection(f"ranks of {kind}", bool, "the process that started them does not supervise them", fix).error()


def check_run(trainer: pl.Trainer, module: torch.nn.Module) -> None:
    """Raises ValueError if elastic training does not support a part of a run; called before ranks start, and on each rank."""
    check_loggers(trainer.loggers)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for name, (reason, fix) in CALLBACKS.items():
            if is_instance(callback, f"callbacks.{name}"):
                raise Rejection(name, bool, reason, fix).error()
    if hasattr(trainer.strategy.checkpoint_io, "checkpoint_io"):
        name = type(trainer.strategy.checkpoint_io).__name__
        reason = "rank 0 may be lost before it has written a checkpoint that other ranks count as saved"
        raise Rejection(name, bool, reason, "Remove the plugin").error()
    if any(isinstance(each, LearnedRows) for each in module.modules()):
        reason = "each rank has rows and moments that no other rank has"
        raise Rejection("DistributedEmbedding", bool, reason, "Use torch.nn.Embedding").error()
