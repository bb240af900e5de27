"""Fixes for differences that the self-check finds."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch_geometric.nn import MessagePassing


def describe_fixes(run: Any, finding: Any) -> str:
    """Returns the fixes of a difference from one device, and its cause.

    Args:
        run: call of the Trainer, a :class:`~lightning_gnn.strategy.scheme.Run`.
        finding: the difference, a :class:`~lightning_gnn.checks.record.Finding`.
    """
    anyway = f"To train anyway: {run.strategy}(self_check=False)."
    name = _own_conv(run.module, finding.where) if run.layout.parts > 1 else None
    if name is None:
        return f"{anyway}\n{finding.why}"
    conv = type(run.module.get_submodule(name)).__name__
    fixes = f'register an adapter for {conv} (see docs/models.md, "Adapters")'
    fixes = f"or {fixes}" if run.samples is None else f"{fixes}, or set graph_ranks=1, so that each rank has the whole graph"
    return (
        f"Check whether {conv} ('{name}') computes degrees, an adjacency or other edges from edge_index. On ranks, edge_index "
        "has local ids, and only edges to nodes of the rank. Pass such values as attributes of the graph, for example as a dense "
        f"matrix [N, N], {fixes}. {anyway}\n{finding.why}"
    )


def _own_conv(module: torch.nn.Module, where: str) -> str | None:
    """Returns the name of a conv of the user, if the description of a place names the conv or its part; else None."""
    found = re.search(r"'([^']*)' \(", where)
    names, parts = [] if found is None else found[1].split("."), dict(module.named_modules())
    for size in range(1, len(names) + 1):
        name = ".".join(names[:size])
        part = parts.get(name)  # a quoted name may be of a parameter
        if isinstance(part, MessagePassing) and not type(part).__module__.startswith("torch_geometric."):
            return name
    return None
