"""What a PyG model takes of a graph."""

from __future__ import annotations

import inspect

import torch
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn.nn.commnet import CommNet


def check_width(model: torch.nn.Module, num_features: int) -> None:
    """Raises ``ValueError`` where a library model takes features of another width than the graph's."""
    # A model of the user's own may call something else in_channels.
    width = model.in_channels if isinstance(model, (BasicGNN, CommNet)) else None
    if isinstance(width, int) and 0 < width != num_features:
        raise ValueError(
            f"{type(model).__name__} takes {width} features (in_channels), but x of the graph has {num_features} columns. "
            f"Make the model with in_channels={num_features}."
        )


def edge_inputs(model: torch.nn.Module) -> list[str]:
    """Returns which of ``edge_weight`` and ``edge_attr`` the model takes."""
    return [name for name in ("edge_weight", "edge_attr") if _accepts(model, name)]


def _accepts(model: torch.nn.Module, name: str) -> bool:
    """Returns whether the model takes `name`; PyG's ready models say so, their forwards take what not every conv does."""
    if hasattr(model, f"supports_{name}"):
        # A GAT takes edge features only where its convs were told how many columns they have.
        wanted = name != "edge_attr" or any(getattr(child, "edge_dim", None) is not None for child in model.modules())
        return bool(getattr(model, f"supports_{name}")) and wanted
    return name in inspect.signature(model.forward).parameters
