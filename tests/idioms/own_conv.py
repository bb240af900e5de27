"""A conv of a user."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing


class OwnConv(MessagePassing):
    """Messages of both ends."""

    def __init__(self, in_channels: int, out_channels: int, aggr: str) -> None:
        super().__init__(aggr=aggr)
        self.lin = torch.nn.Linear(2 * in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j - x_i], -1)).tanh()
