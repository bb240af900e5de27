"""Tests of a custom strategy in one process: ``lightning_gnn.testing.conformance(MyStrategy())``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GAT, GCN, GraphSAGE, MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.data.shards import Shard
from lightning_gnn.modules import NodeClassifier
from lightning_gnn.strategy.base import GNNStrategy
from lightning_gnn.tools.exchange_check import CLASSES, FEATURES, check_exchange, odd_graph, split_odd_graph
from lightning_gnn.tools.parity import check_parity


def conformance(strategy: GNNStrategy, ranks: Sequence[int] = (2, 3, 4)) -> list[str]:
    """Check that a strategy follows the contract of schemes and exchanges (docs/own-scheme.md), on threads of this process.

    - Steps equal a single device in loss, outputs, gradients and metrics, for models with sums, max aggregation, attention, a
      custom conv and batch norm. With an approximate strategy, they run and are not compared.
    - `start_expand` receives exactly the halo rows, and `start_reduce` is its transpose, for any row width. Several exchanges are
      pending and complete in any order.
    - Sent messages are counted.
    - The states of scheme and exchange are plain values, which ``torch.load(weights_only=True)`` accepts.

    A graph with hubs, isolated nodes and duplicate edges is partitioned unevenly; with three or more ranks, one part is empty.

    Args:
        strategy: strategy with the arguments to test.
        ranks: numbers of ranks. Numbers that the scheme's layout does not support are omitted.

    Returns:
        Descriptions of the checks.

    Raises:
        AssertionError: if the strategy differs, or supports none of these numbers of ranks; the message names the place.
    """
    done: list[str] = []
    for size in ranks:
        try:
            layout = strategy.scheme.layout(size)
        except ValueError:
            continue
        data = odd_graph(layout)
        for name, make in _MODELS.items():
            module = NodeClassifier(make(FEATURES, 8, 2, CLASSES, norm="batch_norm"))
            report = check_parity(module, data, [strategy], devices=size)
            assert report.ok, f"{name} on {size} ranks:\n{report}"
            done.append(f"{name} on {size} ranks")
        shards, meeting = split_odd_graph(data, layout), Meeting(size)
        for found in meeting.run(partial(_check_on_thread, strategy, shards, meeting)):
            if isinstance(found, BaseException):
                raise AssertionError(f"the exchange on {size} ranks: {found}") from found
        done.append(f"the exchange on {size} ranks")
    assert done, f"{type(strategy).__name__} runs on none of {', '.join(map(str, ranks))} ranks."
    return done


def _check_on_thread(strategy: GNNStrategy, shards: Sequence[Shard], meeting: Meeting, rank: int) -> None:
    check_exchange(strategy, shards, InProcessWorld(rank, meeting))


class _UsersConv(MessagePassing):
    """Conv with a custom message."""

    def __init__(self, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__(aggr="mean")
        self.lin = torch.nn.Linear(2 * inputs, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j - x_i], -1)).tanh()


class _UsersModel(BasicGNN):
    """PyG's stack of convs, with a custom conv."""

    supports_edge_weight = supports_edge_attr = False

    def init_conv(self, in_channels: int, out_channels: int, **options: Any) -> MessagePassing:
        return _UsersConv(in_channels, out_channels, **options)


_MODELS: dict[str, Callable[..., BasicGNN]] = {
    "sums (GCN)": GCN,
    "extremes (GraphSAGE, max)": partial(GraphSAGE, aggr="max"),
    "attention (GAT)": GAT,
    "a message of a user's": _UsersModel,
}
