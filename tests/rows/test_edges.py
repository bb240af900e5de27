"""Edges that a step makes of ``batch.edge_index``, as by PyG's utils, are those of one device in convs, or refused.

Test tiers: ranks of one process.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import utils

from lightning_gnn import NotExactError
from rows.programs import Net, Program, make_net, reference
from rows.ranks import assert_of_one_device, on_ranks


def on(edges: Any) -> Program:
    return lambda net, g: net(g.x, edges(g.edge_index, g.x.size(0))).square().sum()


def dense(net: Net, g: Any) -> Tensor:
    adjacency = torch.zeros(g.x.size(0), g.x.size(0), dtype=g.x.dtype)
    adjacency[g.edge_index[1], g.edge_index[0]] = 1.0
    return (adjacency @ net.head(g.x)).square().sum()


def sparse(net: Net, g: Any) -> Tensor:
    ones = torch.ones(g.edge_index.size(1), dtype=g.x.dtype)
    adjacency = torch.sparse_coo_tensor(g.edge_index.flip(0), ones, (len(g.x), len(g.x)))
    return torch.sparse.mm(adjacency, net.head(g.x)).square().sum()


PROGRAMS = {
    "self-loops added": on(lambda edges, count: utils.add_self_loops(edges, num_nodes=count)[0]),
    "remaining self-loops added": on(lambda edges, count: utils.add_remaining_self_loops(edges, num_nodes=count)[0]),
    "self-loops removed": on(lambda edges, count: utils.remove_self_loops(edges)[0]),
    "coalesced": on(lambda edges, count: utils.coalesce(edges, num_nodes=count)),
    "sorted": on(lambda edges, count: utils.sort_edge_index(edges, num_nodes=count, sort_by_row=False)),
    "ids by arithmetic": on(lambda edges, count: torch.stack([edges[0] + 0, edges[1] * 1])),
    "their number": lambda net, g: net.head(g.x).square().sum() * (g.edge_index.max() + g.edge_index.sum()),
    "a dense adjacency": dense,
    "a sparse adjacency": sparse,
}


def largest(end: int, by_size: bool) -> Program:
    def program(net: Net, g: Any) -> Tensor:
        h, (source, target) = net.head(g.x), g.edge_index
        sizes = h.size(0) if by_size else len(h)
        weights = utils.softmax((h[source] * h[target]).sum(1), g.edge_index[end], num_nodes=sizes)
        of_nodes = utils.scatter(h[source] * weights[:, None], g.edge_index[end], dim=0, dim_size=sizes, reduce="max")
        return (of_nodes * h).sum()

    return program


PROGRAMS |= {
    "one column of sources": lambda net, g: net.head(g.x)[g.edge_index[0], 0].tanh().sum(),
    "columns of both ends": lambda net, g: (
        net.head(g.x)[g.edge_index[0], :2] * net.head(g.x)[g.edge_index[1], :2]
    ).sum(),
    "the largest at targets": largest(1, True),
    "the largest at targets, of a number": largest(1, False),
    "the largest at sources": largest(0, True),
    "the largest at sources, of a number": largest(0, False),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_edges_of_a_step_are_those_of_one_device(name):
    assert_of_one_device(on_ranks(PROGRAMS[name], make_net(), 3), reference(PROGRAMS[name]), name)


def flipped_in_place(net: Net, g: Any) -> Tensor:
    g.edge_index[:, :3] = 0
    return net(g.x, g.edge_index).sum()


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (on(lambda edges, count: edges.flip(0)), "before the run"),
        (on(lambda edges, count: edges.clone().add_(0)), "changed in place"),
        (flipped_in_place, "changed in place"),
    ],
)
def test_edges_that_a_rank_cannot_follow_are_refused(program, says):
    errors = on_ranks(program, make_net(), 3)
    assert all(isinstance(each, NotExactError) and says in str(each) for each in errors), errors
    assert all(re.search(r"test_edges\.py:\d+: |programs\.py:\d+: ", str(each)) for each in errors), errors
