"""Small random graphs with types, for checks: see :mod:`lightning_gnn.checks.small_graph`."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.typing import NodeType

from lightning_gnn.checks.small_graph import (
    Form,
    SmallGraph,
    chosen_rows,
    predicted_nodes,
    random_edges,
    some_nodes,
    values_of_rows,
)

_NODES, _EDGES = (5, 41), (15, 201)
"""Ranges of random numbers of nodes and edges of a part, without the end."""


def typed_small_graph(
    batch: HeteroData, masks: Collection[str], form: Form, seed: int = 0, num_classes: int = 0, *, input_type: NodeType
) -> SmallGraph:
    """Returns a small graph as :func:`~lightning_gnn.checks.small_graph.small_graph` does, for a graph with types.

    Args:
        input_type: predicted node type. It has the form's number of nodes, and each edge type the form's number of edges, unless
            the form is varied. Other types have a few more, so that no two sizes are equal.
    """
    g = torch.Generator().manual_seed(seed)
    small, used, orders = HeteroData(), set[int](), dict[NodeType, Tensor]()
    others = [name for name in batch.node_types if name != input_type]

    def sizes_of_type(sizes: tuple[int, int], limits: tuple[int, int]) -> tuple[int, int]:
        first, second = torch.randint(*limits, (2,), generator=g).tolist() if form.varied else sizes
        return _unlike((first, second), used)

    nodes = {input_type: _unlike(form.nodes, used), **{name: sizes_of_type(form.nodes, _NODES) for name in others}}
    parts = []
    for name in batch.node_types:
        values = {each: value for each, value in batch[name].items() if isinstance(value, Tensor)}
        if name == input_type:
            found, order = predicted_nodes(batch[name], values, masks, form, num_classes, seed, g)
        else:
            none = torch.zeros(len(batch[name].n_id), dtype=torch.bool)
            found, order = some_nodes(values, none, nodes[name], (0, 0), g)
        small[name].update(found)
        if "x" not in found:
            small[name].num_nodes = len(order)
        orders[name] = order
        parts.append((order.argsort() >= nodes[name][0]).long())
    for kind in batch.edge_types:
        source, target = kind[0], kind[2]
        edges = sizes_of_type(form.edges, _EDGES)
        shuffled = torch.randperm(sum(edges), generator=g)
        rows = random_edges(nodes[source], nodes[target], edges, source == target, g, form.simple)[:, shuffled]
        small[kind].edge_index = torch.stack([orders[source][rows[0]], orders[target][rows[1]]])
        values = {name: value for name, value in batch[kind].items() if isinstance(value, Tensor) and name != "edge_index"}
        none = torch.zeros(len(batch[kind].e_id), dtype=torch.bool)
        chosen = chosen_rows(values, none, edges, (0, 0), g)[shuffled] if len(none) else torch.empty(0)
        for name, value in values.items():
            small[kind][name] = values_of_rows(value, chosen) if len(none) else value.new_zeros((sum(edges), *value.shape[1:]))
    holders = (torch.rand(small.num_edges, generator=g) < 0.3).long().numpy()
    return SmallGraph(small, torch.cat(parts).numpy(), holders, {"input_type": input_type})


def _unlike(sizes: tuple[int, int], used: set[int]) -> tuple[int, int]:
    """Returns sizes of two parts near `sizes`, such that they and their sum are not in `used`; adds them to `used`."""
    first, second = sizes
    while used & {first, second, first + second} or first == second:
        first, second = first + 1, second + 2
    used |= {first, second, first + second}
    return first, second
