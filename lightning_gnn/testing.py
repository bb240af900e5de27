"""Tests of a custom strategy in one process: ``lightning_gnn.testing.conformance(MyStrategy())``."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE, MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard, split_graph
from lightning_gnn.datamodules.graph import GraphDataModule
from lightning_gnn.modules import NodeClassifier
from lightning_gnn.strategy.base import GNNStrategy
from lightning_gnn.tools.parity import check_parity

_NODES, _EDGES, _FEATURES, _CLASSES = 61, 240, 6, 4


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
        graph = _graph()
        data = GraphDataModule(graph, partition=_part(size) if layout.kind == "edge_cut" else None)
        for name, make in _MODELS.items():
            module = NodeClassifier(make(_FEATURES, 8, 2, _CLASSES, norm="batch_norm"))
            report = check_parity(module, data, [strategy], devices=size)
            assert report.ok, f"{name} on {size} ranks:\n{report}"
            done.append(f"{name} on {size} ranks")
        part, holders, _ = data.assign(graph, layout)
        shards, meeting = split_graph(graph, np.asarray(part), layout, holders), Meeting(size)
        for found in meeting.run(partial(_check_exchange, strategy, shards, meeting)):
            if isinstance(found, BaseException):
                raise AssertionError(f"the exchange on {size} ranks: {found}") from found
        done.append(f"the exchange on {size} ranks")
    assert done, f"{type(strategy).__name__} runs on none of {', '.join(map(str, ranks))} ranks."
    return done


def _check_exchange(strategy: GNNStrategy, shards: Sequence[Shard], meeting: Meeting, rank: int) -> None:
    """Check the exchange; runs on each rank."""
    shard, world, meter = shards[rank], InProcessWorld(rank, meeting), Meter()
    exchange = strategy.scheme.exchange(shard, world, meter)
    ids = torch.from_numpy(shard.node_ids(rank))
    owned, halo = ids[: exchange.num_owned], ids[exchange.num_owned :]
    assert len(halo) == exchange.num_halo, f"it has {exchange.num_halo} halo rows, and the shard {len(halo)}"
    readers = torch.zeros(int(shard.offsets[-1]), 1, dtype=torch.float64)
    for each in shard.halos:
        readers[each] += 1
    order = np.random.default_rng(rank).permutation(6)  # order of waits, different on each rank
    waits = [_start(exchange, number, owned, halo, readers) for number in range(6)]
    for number in range(6) if exchange.in_stages else order:
        waits[number]()
    sent = sum(traffic.bytes_sent for traffic in meter.by_layer.values())
    assert sent > 0 or exchange.idle, "it sends rows that the meter does not count"
    exchange.drain()
    for name, of in (("scheme", strategy.scheme), ("exchange", exchange)):
        buffer = io.BytesIO()
        torch.save(of.state_dict(), buffer)
        buffer.seek(0)
        try:
            of.load_state_dict(torch.load(buffer, weights_only=True))
        except Exception as error:
            raise AssertionError(f"the {name}'s state_dict() has more than plain values and tensors: {error}") from error


def _start(exchange: Exchange, number: int, owned: Tensor, halo: Tensor, readers: Tensor) -> Callable[[], None]:
    """Starts an expand or a reduce of rows with unique values; returns a function that waits for it and checks the result."""
    call, width = Call(f"layer {number % 2}", number // 2), 1 + number % 3
    rows = torch.arange(1.0, len(readers) + 1, dtype=torch.float64).view(-1, 1).repeat(1, width) * (number + 1)
    if number % 2 == 0:
        into = rows.new_empty(len(halo), width)
        wait = exchange.start_expand(rows[owned], into, call)

        def check_expand() -> None:
            wait()
            assert torch.equal(into, rows[halo]), "start_expand brings other rows than the owners have"

        return check_expand
    finish = exchange.start_reduce(rows[halo], call.backward())

    def check_reduce() -> None:
        out = rows[owned].clone()
        finish(out)
        expected = rows[owned] * (1 + readers[owned])
        assert torch.allclose(out, expected, rtol=1e-12), "start_reduce adds something else than the readers sent"

    return check_reduce


def _graph() -> Data:
    """Returns a graph with hubs, isolated nodes, self-loops, duplicate edges, and masks that are empty on some parts."""
    draws = np.random.default_rng(3)
    source = draws.integers(0, _NODES - 6, _EDGES)  # the last nodes are isolated
    target = np.where(draws.random(_EDGES) < 0.2, 0, draws.integers(0, _NODES - 6, _EDGES))
    x = torch.from_numpy(draws.standard_normal((_NODES, _FEATURES))).float()
    y, group = torch.from_numpy(draws.integers(0, _CLASSES, _NODES)), torch.from_numpy(draws.integers(0, 4, _NODES))
    edges = torch.from_numpy(np.stack([source, target]))
    return Data(x=x, edge_index=edges, y=y, train_mask=group < 2, val_mask=group == 2, test_mask=group == 3)


def _part(size: int) -> NDArray[np.int64]:
    """Returns the owner of each node: uneven parts; with three or more parts, the last is empty."""
    shares = np.arange(size, 0, -1.0)
    if size > 2:
        shares[-1] = 0
    return np.random.default_rng(size).choice(size, _NODES, p=shares / shares.sum())


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
