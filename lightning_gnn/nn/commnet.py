"""CommNet as a PyG conv and model: the second model of DGCL's evaluation."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense import Linear
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import remove_self_loops


class CommNetConv(MessagePassing):
    r"""One communication step of CommNet.

    .. math::
        h_i' = W h_i + U \frac{1}{|\{j \in N(i), j \ne i\}|} \sum_{j \in N(i), j \ne i} h_j

    Source: Sukhbaatar et al., "Learning Multiagent Communication with Backpropagation" (2016), equations 1 and 2. Neighbors in a
    graph replace all other agents, as in DGCL (EuroSys'21, section 2). The model applies the activation. The sum is 0 for a node
    without other neighbors.

    Args:
        in_channels: number of input channels.
        out_channels: number of output channels.
        bias: whether to learn an additive bias.

    Shapes: ``x [N, in_channels]``, ``edge_index [2, E]`` -> ``[N, out_channels]``.
    """

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(aggr="mean", **kwargs)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.lin_self = Linear(in_channels, out_channels, bias=bias)
        self.lin_heard = Linear(in_channels, out_channels, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.lin_self.reset_parameters()
        self.lin_heard.reset_parameters()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        heard = self.propagate(without_self_loops(edge_index), x=x)
        return self.lin_self(x) + self.lin_heard(heard)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def without_self_loops(edge_index: Tensor) -> Tensor:
    """Returns the edges between different nodes; the same tensor if there are no self-loops."""
    if bool((edge_index[0] != edge_index[1]).all()):
        return edge_index
    return remove_self_loops(edge_index)[0]


class CommNet(BasicGNN):
    """CommNet: a stack of :class:`CommNetConv` with an activation between the layers. Same arguments as PyG's ``GCN``."""

    supports_edge_weight = False
    supports_edge_attr = False

    def init_conv(self, in_channels: int | tuple[int, int], out_channels: int, **kwargs: Any) -> MessagePassing:
        assert isinstance(in_channels, int)
        return CommNetConv(in_channels, out_channels, **kwargs)
