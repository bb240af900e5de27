"""Any graph as one list of nodes and edges, which is what partitioners cut; of several types where it has some.

E edges, N nodes, P parts.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.data.attributes import kinds_of
from lightning_gnn.data.sources import EDGE_MASKS, MASKS, is_labelled, num_labelled
from lightning_gnn.partition.locality import local_relabelling
from lightning_gnn.partition.shard import EdgeCutPart, Ids, Relabelling, edge_cut_parts, id_dtype
from lightning_gnn.partition.types import ONE_TYPE, Types

Graph: TypeAlias = Data | HeteroData


@dataclass(frozen=True)
class Orders:
    """Where nodes and edges of each type come to lie in a graph that is cut.

    Attributes:
        types: how many each part has.
        by_type: original ids in relabelled order.
    """

    types: Types
    by_type: Mapping[NodeType | EdgeType, Ids]

    def n_id(self) -> Ids:
        """Returns the ids of the nodes of one type after those of the other."""
        return np.concatenate([self.by_type[name] for name in self.types.nodes])

    def e_id(self) -> Ids:
        """Returns the ids of the edges of one type after those of the other, in a dtype that is enough."""
        found = np.concatenate([self.by_type[kind] for kind in self.types.edges])
        return found.astype(id_dtype(len(found)))

    @classmethod
    def of_one_type(cls, relabelling: Relabelling, num_edges: list[int], e_id: Ids) -> Orders:
        """Returns those of a graph without types, of whose edges parts have so many."""
        types = Types.none(np.diff(relabelling.offsets), np.array(num_edges))
        return cls(types, {ONE_TYPE[0]: relabelling.n_id, ONE_TYPE: e_id})


@dataclass(frozen=True)
class JoinedGraph:
    """A graph whose nodes of all types are one list, type after type, and so its edges; of one type where it has none.

    Attributes:
        edge_index: int64 ``[2, E]``.
        num_nodes: N.
        node_kinds, edge_kinds: number of each one's type, int16 ``[N]`` and ``[E]``; None for a graph without types.
        node_firsts, edge_firsts: by type, where it begins in these lists.
    """

    edge_index: Ids
    num_nodes: int
    node_kinds: np.ndarray | None = None
    edge_kinds: np.ndarray | None = None
    node_firsts: Mapping[NodeType, int] | None = None
    edge_firsts: Mapping[EdgeType, int] | None = None

    @classmethod
    def of(cls, data: Graph) -> JoinedGraph:
        if isinstance(data, Data):
            return cls(data.edge_index.numpy(), data.x.size(0))
        nodes = {name: data[name].num_nodes for name in data.node_types}
        edges = {kind: data[kind].edge_index.size(1) for kind in data.edge_types}
        node_firsts, edge_firsts = (dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist())) for sizes in (nodes, edges))
        ends = [data[kind].edge_index + torch.tensor([[node_firsts[kind[0]]], [node_firsts[kind[2]]]]) for kind in edges]
        node_type, edge_type = (
            np.repeat(np.arange(len(sizes), dtype=np.int16), list(sizes.values())) for sizes in (nodes, edges)
        )
        return cls(torch.cat(ends, 1).numpy(), sum(nodes.values()), node_type, edge_type, node_firsts, edge_firsts)

    def relabelling(self, part: np.ndarray, num_parts: int) -> Relabelling:
        """Returns the order of rows by owner, ``[N]``: type after type in each part, else neighbours near each other."""
        found = local_relabelling(self.edge_index, part, num_parts)
        if self.node_kinds is None:
            return found
        rows = found.n_id
        return Relabelling(rows[np.lexsort((self.node_kinds[rows], part[rows]))], found.offsets)

    def parts(self, relabelling: Relabelling) -> Iterator[EdgeCutPart]:
        """Yields the parts, whose edges come type after type."""
        for part in edge_cut_parts(self.edge_index, relabelling):
            if self.edge_kinds is None:
                yield part
                continue
            order = np.argsort(self.edge_kinds[part.edge_ids], kind="stable")
            yield replace(part, edge_index=part.edge_index[:, order], edge_ids=part.edge_ids[order])

    def masks_of(self, predicted: Predicted) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Returns the masks of labelled nodes, bool ``[N]``, and of edges, ``[E]``, that have any: of all types."""
        nodes, edges, y = predicted.nodes, predicted.edges, predicted.nodes.get("y")
        of_nodes = {name: nodes[name] if y is None else nodes[name] & is_labelled(y) for name in MASKS}
        of_edges = {name: edges[name] for name in EDGE_MASKS if name in edges}
        return (
            {name: self._among_all(of, predicted.node_type) for name, of in of_nodes.items() if num_labelled(y, nodes[name])},
            {name: self._among_all(of, predicted.edge_type) for name, of in of_edges.items() if of.any()},
        )

    def _among_all(self, mask: Tensor, kind: NodeType | EdgeType | None) -> np.ndarray:
        """Returns a mask of the nodes, or edges, of a type as one of all of them."""
        if self.node_firsts is None:
            return mask.numpy()
        firsts: Any = self.node_firsts if isinstance(kind, str) else self.edge_firsts
        found = np.zeros(self.num_nodes if isinstance(kind, str) else self.edge_index.shape[1], np.bool_)
        found[firsts[kind] :][: len(mask)] = mask.numpy()
        return found

    def types_per_part(self, part: np.ndarray, num_parts: int) -> dict[str, np.ndarray]:
        """Returns the nodes and the edges of each type in each part, int64 ``[P]``, by its name; none without types."""
        if self.node_firsts is None or self.edge_firsts is None:
            return {}
        owner, counts = part[self.edge_index[1]], {}
        for number, name in enumerate(self.node_firsts):
            counts[f"{name} nodes"] = np.bincount(part[self.node_kinds == number], minlength=num_parts)
        for number, kind in enumerate(self.edge_firsts):
            counts[" ".join(kind)] = np.bincount(owner[self.edge_kinds == number], minlength=num_parts)
        return counts

    def orders(self, relabelling: Relabelling, edge_ids: list[Ids], part: np.ndarray, predicted: Predicted) -> Orders:
        """Returns where nodes and edges of a graph come to lie.

        Args:
            edge_ids: of each part, in order.
            predicted: of the graph.
        """
        edge_order, sizes = np.concatenate(edge_ids), list(map(len, edge_ids))
        if self.node_firsts is None or self.edge_firsts is None:
            return Orders.of_one_type(relabelling, sizes, edge_order)
        assert self.node_kinds is not None and self.edge_kinds is not None
        num_parts, owner = len(edge_ids), np.repeat(np.arange(len(edge_ids)), sizes)
        orders: dict[NodeType | EdgeType, Ids] = {}
        nodes, edges = {}, {}
        for number, (name, first) in enumerate(self.node_firsts.items()):
            rows = relabelling.n_id[self.node_kinds[relabelling.n_id] == number]
            orders[name], nodes[name] = rows - first, np.bincount(part[rows], minlength=num_parts)
        for number, (kind, first) in enumerate(self.edge_firsts.items()):
            here = self.edge_kinds[edge_order] == number
            orders[kind], edges[kind] = edge_order[here] - first, np.bincount(owner[here], minlength=num_parts)
        return Orders(Types(nodes, edges, predicted.node_type), orders)


def graph_by_type(attributes: Mapping[Any, Mapping[str, Tensor]], edge_indices: Mapping[EdgeType, Tensor]) -> HeteroData:
    """Returns the graph that has these attributes, and edges, by type."""
    data = HeteroData()
    for name, group in attributes.items():
        data[name].update(group)
    for kind, edge_index in edge_indices.items():
        data[kind].edge_index = edge_index
    return data


def attributes_of(data: Graph, kind: NodeType | EdgeType) -> dict[str, Tensor]:
    """Returns what has a row per node, or edge, of a type, without ``edge_index``."""
    if isinstance(data, Data):
        what = "node" if isinstance(kind, str) else "edge"
        return {name: data[name] for name, found in kinds_of(data).items() if found == what}
    return {name: value for name, value in data[kind].items() if isinstance(value, Tensor) and name != "edge_index"}


def predicted_edges(of: Mapping[EdgeType, Container[str]]) -> EdgeType | None:
    """Returns the edge type whose edges are predicted, of what edges of each type have.

    It is the only one with an ``edge_val_mask`` or an ``edge_test_mask``, or else with an ``edge_train_mask``; None where there
    is none, or there are several. Of others with an ``edge_train_mask``, edges in it carry messages.
    """
    for names in (EDGE_MASKS[1:], EDGE_MASKS[:1]):
        having = [kind for kind, has in of.items() if any(name in has for name in names)]
        if having:
            return having[0] if len(having) == 1 else None
    return None


def input_type_of(data: HeteroData, given: NodeType | None) -> NodeType:
    """Returns the node type whose nodes are predicted: the given one, else the only one with a train_mask, else the targets of
    edges that are predicted, else the only one with labels."""
    types, edges = data.node_types, predicted_edges(edge_stores(data))
    if given is not None:
        if given not in types:
            raise ValueError(f"input_type={given!r}, but the graph's node types are {types}.")
        return given
    for name in ("train_mask", "y"):
        having = [kind for kind in types if name in data[kind]]
        if name == "y" and edges is not None:
            return edges[2]
        if len(having) == 1:
            return having[0]
        if having:
            raise ValueError(
                f"Node types {having} have a {name}. Say whose nodes are predicted: GraphDataModule(..., "
                f"input_type={having[0]!r})."
            )
    raise ValueError(
        f"No node type of {types} has a train_mask. Set one, data['{types[0]}'].train_mask (bool, one entry per node), or give a "
        "random split of one type: GraphDataModule(..., split=(0.6, 0.2, 0.2), input_type=...). To predict links, split the "
        f"edges of one type: GraphDataModule(split_edges(data, edge_type={data.edge_types[0]}))."
    )


def edge_stores(data: HeteroData) -> dict[EdgeType, BaseStorage]:
    return {kind: data[kind] for kind in data.edge_types}


@dataclass(frozen=True)
class Predicted:
    """Where a graph has the masks and labels of what is predicted: of nodes, and of edges.

    Attributes:
        nodes, edges: attributes of all nodes, and edges, of these types.
        node_type, edge_type: see :func:`input_type_of` and :func:`predicted_edges`.
    """

    nodes: Any
    edges: Any
    node_type: NodeType = ONE_TYPE[0]
    edge_type: EdgeType | None = ONE_TYPE
    has_types: bool = False

    @classmethod
    def of(cls, data: Graph, input_type: NodeType | None = None) -> Predicted:
        if isinstance(data, Data):
            return cls(data, data)
        node_type, edge_type = input_type_of(data, input_type), predicted_edges(edge_stores(data))
        return cls(data[node_type], {} if edge_type is None else data[edge_type], node_type, edge_type, True)
