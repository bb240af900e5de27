"""Configuration of a run for loggers: strategy and arguments, ranks, graph and partition, as plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_gnn.callbacks.communication import PartSize
from lightning_gnn.callbacks.loggers import log_config, log_files, uploads
from lightning_gnn.console import text_of
from lightning_gnn.data.shards import Shard
from lightning_gnn.data.sources import MASKS
from lightning_gnn.partition.metrics import EdgeCutReport
from lightning_gnn.registry import cutter_of
from lightning_gnn.strategy.graph_kinds import describe_graph

_NOT_TOLD = (
    *("self", "scheme", "model", "optimizers", "lr_schedulers"),
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
)


def arguments_of(strategy: Any) -> dict[str, Any]:
    """Returns the arguments in use of a strategy's constructor and its bases by name, as plain values.

    Strategies and their schemes store arguments under their names, or as ``num_name`` or ``_name``.
    """
    kept = {**vars(strategy.scheme), **vars(strategy)}
    found = {}
    for each in reversed(type(strategy).__mro__):
        for name, parameter in signature(each.__init__).parameters.items():  # type: ignore[misc]
            if parameter.kind == parameter.POSITIONAL_OR_KEYWORD and name not in _NOT_TOLD:
                key = next((key for key in (name, f"num_{name}", f"_{name}") if key in kept), None)
                if key is not None:
                    found[name] = _plain(kept[key])
    return found


def run_config(strategy: Any, shard: Shard) -> dict[str, Any]:
    """Returns the configuration of a run without its module: ``strategy``, ``graph``, ``partition``, and sizes."""
    nodes, edges = sum(shard.counts), sum(shard.edge_counts)
    graph: dict[str, Any] = {"nodes": nodes, "edges": edges, "mean_degree": edges / max(1, nodes)}
    graph.update(describe_graph(shard))
    graph["classes"] = shard.num_classes
    graph.update({mask.replace("_mask", "_nodes"): sum(shard.mask_counts[mask]) for mask in MASKS})
    return {
        "strategy": {"name": strategy.strategy_name, **arguments_of(strategy)},
        "world_size": strategy.world_size,
        "machines": strategy.num_nodes,
        "device": strategy.root_device.type,
        "graph": graph,
        "partition": {
            **{name: value for name, value in shard.report.items() if isinstance(value, str | int | float)},
            "halo_rows": sum(map(len, shard.halos)),
            "largest_part_nodes": max(shard.counts),
            "largest_part_edges": max(shard.edge_counts),
            "digest": shard.digest,
        },
        "versions": {"torch": str(torch.__version__), "lightning": lightning.__version__},
    }


def _plain(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if is_dataclass(value) and not isinstance(value, type):
        return getattr(value, "name", None) or asdict(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else "__".join(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) or not isinstance(value, str | int | float | None) else value


def part_sizes(shard: Shard) -> list[PartSize]:
    return [PartSize(*of) for of in zip(shard.counts, shard.edge_counts, map(len, shard.halos))]


def partition_report(shard: Shard, with_picture: bool) -> dict[str, Any]:
    """Returns contents by file name: the partition as JSON, the tables of ``lightning-gnn partition``, optionally a picture."""
    parts = part_sizes(shard)
    counts = {name: [asdict(part)[name] for part in parts] for name in ("nodes", "edges", "halo_rows")}
    report = {**counts, **{name: list(of) for name, of in shard.mask_counts.items()}, **shard.report}
    files: dict[str, Any] = {"partition.json": json.dumps(report, indent=1) + "\n"}
    if shard.report:
        report_of = EdgeCutReport.from_dict if shard.holders is None else cutter_of("vertex_cut").report_of
        files["partition.txt"] = text_of(report_of(shard.report).table(), width=140)
    if with_picture:
        from lightning_gnn.callbacks.pictures import draw_parts

        title = str(shard.report.get("method", "Parts"))
        named = {name.replace("_", " "): values for name, values in counts.items()}
        files["partition.png"] = draw_parts(named, f"{title}: the parts' sizes")
    return files


def log_run(strategy: Any, trainer: pl.Trainer, shard: Shard) -> None:
    """Log the configuration of the run, its graph and its partition."""
    log_config(trainer, run_config(strategy, shard))
    if trainer.is_global_zero and trainer.state.fn == TrainerFn.FITTING and strategy.world_size > 1:
        log_files(trainer, "partition", partition_report(shard, uploads(trainer)))
