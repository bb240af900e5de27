"""Pairs of PyG's feature and graph stores as the source of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData

from lightning_gnn.data.shards import Graph
from lightning_gnn.data.sources import tell_kinds


def graph_in_stores(features: FeatureStore, edges: GraphStore) -> Graph:
    """Returns the graph in a pair of PyG's stores, with all tensors of nodes and edges; homogeneous for a single type of each."""
    rows, columns, _ = edges.coo()
    if isinstance(rows, Tensor):  # homogeneous
        rows, columns = {None: rows}, {None: columns}
    if not rows:
        raise ValueError(f"{type(edges).__name__} has no edges: get_all_edge_attrs() names none.")
    groups: dict[Any, dict[str, Tensor]] = {}
    for attr in features.get_all_tensor_attrs():
        found = features.get_tensor(group_name=attr.group_name, attr_name=attr.attr_name, index=None)
        groups.setdefault(attr.group_name, {})[attr.attr_name] = torch.as_tensor(found)
    ends = {kind: torch.stack([rows[kind], columns[kind]]) for kind in rows}
    [first, *others] = ends
    of_nodes = [name for name in groups if not isinstance(name, tuple)]
    if not others and (first is None or (first[0] == first[2] and of_nodes == [first[0]])):
        values = {name: value for group in groups.values() for name, value in group.items()}
        whole = Data(edge_index=ends[first], **values)
        for name, group in groups.items() if first is not None else ():
            tell_kinds(whole, "edge" if isinstance(name, tuple) else "node", group)
        return whole
    typed = HeteroData()
    for name, group in groups.items():
        typed[name].update(group)
    for kind, edge_index in ends.items():
        typed[kind].edge_index = edge_index
    return typed
