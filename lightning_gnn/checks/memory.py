"""Memory that a rank needs at the very least, to say so before it is started."""

from __future__ import annotations

import torch


def least_bytes(rows: int, halo_rows: int, edges: int, row_bytes: int, module: torch.nn.Module) -> int:
    """Returns what a rank holds whatever its model: rows, halo rows, edges in CSR both ways, weights and gradients.

    Activations come on top. Rows and edges are those of the rank, replicas included; `row_bytes` are those of a node's features.
    """
    columns = edges * 8  # columns, for A and its transpose
    parameters = sum(2 * parameter.nbytes for parameter in module.parameters())
    return (rows + halo_rows) * row_bytes + columns + parameters


def training_bytes(
    rows: int, halo_rows: int, edges: int, feature_bytes: int, row_bytes: int, num_layers: int, relayed: int = 0
) -> int:
    """Returns a low estimate of a rank's peak in training: :func:`least_bytes` without weights, and activations.

    These are each layer's output and its gradient, and one buffer of halo and relayed rows and its gradient, which layers share.

    Args:
        feature_bytes, row_bytes: of a node's features, and of a row of a layer's output.
        relayed: rows that the rank only passes on.
    """
    least = least_bytes(rows, halo_rows, edges, feature_bytes, torch.nn.Module())
    return least + 2 * (num_layers * rows + halo_rows + relayed) * row_bytes
