"""Programs on ranks that are threads of this process, under row semantics."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import split_graph
from lightning_gnn.data.sources import GraphData
from lightning_gnn.heap import tensors_now
from lightning_gnn.nn.helpers import gather_halo, graph_in_use, reduce_halo
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.rows import gather_global
from lightning_gnn.rows.graph import GraphRows
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.strategy.scheme import bind_module
from rows.programs import Net, Program, Result, assert_same, make_graph


def parts(num_nodes: int, ranks: int) -> np.ndarray:
    """Returns the rank of each node: uneven parts, whose rows are in no order."""
    draw = np.random.default_rng(ranks)
    part = draw.choice(ranks, num_nodes, p=np.arange(1, ranks + 1) / sum(range(1, ranks + 1)))
    part[:ranks] = np.arange(ranks)
    return part


@cache
def tensors_before() -> list[Tensor]:
    """Returns the tensors of this process when first asked for: to look for them takes longer than most programs."""
    return tensors_now()


def on_ranks(program: Program, net: Net, ranks: int, part: np.ndarray | None = None) -> list[Any]:
    """Returns by rank what a program gives, with gradients of one device, or what it raises."""
    graph = make_graph()
    graph.e_id = torch.arange(graph.edge_index.size(1))
    data = GraphData({}, {}, **graph.to_dict())
    layout = LayoutSpec("edge_cut", ranks)
    shards = split_graph(data, parts(graph.num_nodes, ranks) if part is None else part, layout, None, None)
    nets = [copy.deepcopy(net) for _ in range(ranks)]
    meeting, now = Meeting(ranks), tensors_before()

    def on_rank(rank: int) -> Any:
        world, shard, own = InProcessWorld(rank, meeting), shards[rank], nets[rank]
        binding = bind_module(DGCLScheme(), own, shard, world, Meter())
        rows = GraphRows(shard, world, expand=gather_halo, reduce=reduce_halo)
        rows.place_state(own, world, now)
        batch = copy.copy(shard.batch)
        with graph_in_use(binding.context, this_thread_only=True), rows.mode:
            value = program(own, batch)
            grads = {}
            if isinstance(value, Tensor) and value.requires_grad:
                with rows.mode.activate(in_backward=True):
                    (value / ranks).backward()
                value = value.detach()
            whole = global_of(value)
        for name, parameter in own.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grads[name] = rows.ranks.sum(grad, "gradients")
        return whole, grads

    return meeting.run(on_rank)


def assert_of_one_device(found: list[Any], expected: Result, name: str) -> None:
    """Compares what :func:`on_ranks` returns with what a program gives on one device, where None stands for gradients of zero."""
    for rank in found:
        assert not isinstance(rank, BaseException), (name, rank)
        value, gradients = rank
        assert_same(value, expected.value, name)
        wanted = {key: torch.zeros_like(gradients[key]) if g is None else g for key, g in expected.gradients.items()}
        assert_same(gradients, wanted, name)


def global_of(value: Any) -> Any:
    """Returns what a program gave with the rows of all ranks."""
    if isinstance(value, Tensor):
        return gather_global(value)
    if isinstance(value, dict):
        return {key: global_of(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(global_of, value)) if not hasattr(value, "_fields") else tuple(map(global_of, value))
    return value
