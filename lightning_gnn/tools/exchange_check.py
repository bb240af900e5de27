"""Check of a halo exchange against tensors over all nodes, on a small graph; for conformance and ``lightning-gnn test``."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard, split_graph
from lightning_gnn.datamodules.graph import GraphDataModule
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategy.base import GNNStrategy

FEATURES, CLASSES = 6, 4
_NODES, _EDGES = 61, 240


def check_exchange(strategy: GNNStrategy, shards: Sequence[Shard], world: World) -> None:
    """Check that rows arrive as in tensors over all nodes: halo rows, sums at owners, traffic and state; called on each rank.

    Args:
        strategy: strategy whose scheme makes the exchange.
        shards: shards of all ranks.
        world: connected ranks.

    Raises:
        AssertionError: a row or a count differs on this rank.
    """
    rank, meter = world.rank, Meter()
    shard = shards[rank]
    exchange = strategy.scheme.exchange(shard, world, meter)
    ids = torch.from_numpy(shard.node_ids(rank)).to(world.device)
    owned, halo = ids[: exchange.num_owned], ids[exchange.num_owned :]
    assert len(halo) == exchange.num_halo, f"it has {exchange.num_halo} halo rows, and the shard {len(halo)}"
    readers = torch.zeros(int(shard.offsets[-1]), 1, dtype=torch.float64)
    for each in shard.halos:
        readers[each] += 1
    readers = readers.to(world.device)
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
    rows = (torch.arange(1.0, len(readers) + 1).to(readers) * (number + 1)).view(-1, 1).repeat(1, width)
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


def odd_graph(layout: LayoutSpec) -> GraphDataModule:
    """Returns a graph with hubs, isolated nodes, self-loops, duplicate edges, and masks that are empty on some parts.

    Under an edge cut, the parts are uneven; with three or more ranks, the last is empty.
    """
    draws = np.random.default_rng(3)
    source = draws.integers(0, _NODES - 6, _EDGES)  # the last nodes are isolated
    target = np.where(draws.random(_EDGES) < 0.2, 0, draws.integers(0, _NODES - 6, _EDGES))
    x = torch.from_numpy(draws.standard_normal((_NODES, FEATURES))).float()
    y, group = torch.from_numpy(draws.integers(0, CLASSES, _NODES)), torch.from_numpy(draws.integers(0, 4, _NODES))
    edges = torch.from_numpy(np.stack([source, target]))
    graph = Data(x=x, edge_index=edges, y=y, train_mask=group < 2, val_mask=group == 2, test_mask=group == 3)
    return GraphDataModule(graph, partition=_parts(layout.parts) if layout.kind == "edge_cut" else None)


def split_odd_graph(data: GraphDataModule, layout: LayoutSpec) -> Sequence[Shard]:
    """Returns the shards of :func:`odd_graph`; deterministic."""
    graph = data.load()
    part, holders, _ = data.assign(graph, layout)
    return split_graph(graph, np.asarray(part), layout, holders)


def _parts(size: int) -> NDArray[np.int64]:
    """Returns the owner of each node."""
    shares = np.arange(size, 0, -1.0)
    if size > 2:
        shares[-1] = 0
    return np.random.default_rng(size).choice(size, _NODES, p=shares / shares.sum())
