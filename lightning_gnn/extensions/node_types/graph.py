"""Graphs with node and edge types: checked, and as one list of nodes and edges, which is what partitioners cut."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.arguments import check_whole
from lightning_gnn.data.attributes import kinds_of, rows_of_type, warn_of_left_out, with_masks_of_ids
from lightning_gnn.data.sources import (
    EDGE_MASKS,
    MASKS,
    check_tensor,
    checked_edges,
    edge_values,
    features,
    labels,
    masks_of,
    set_edge_masks,
)
from lightning_gnn.partition.locality import local_relabelling
from lightning_gnn.partition.shard import EdgeCutPart, Ids, Relabelling, edge_cut_parts
from lightning_gnn.partition.types import ONE_TYPE, Types

NO_TYPES = (
    'A HeteroData is trained as a whole by strategy="dgcl", "vertex_cut" and "spmm_1d", without replicas, caches, new plans or '
    'whole blocks, and on sampled neighbourhoods by strategy="sampling". For others, try `.to_homogeneous()`, whose edge_type '
    "RGCNConv and its kin take."
)


def about_types(error: str, step: str) -> str | None:
    """Returns what to do where `step` reads a graph with types as one without, or the other way round; None for another error."""
    found = re.search(r"'(HeteroData|GlobalStorage)'.* has no attribute '(\w+)'", error)
    if found is not None and found[1] == "HeteroData":
        kind = "'paper', 'cites', 'paper'" if found[2].startswith("edge") else "'paper'"
        return (
            f"{step} reads batch.{found[2]}, and a HeteroData has its rows and edges by type: batch[{kind}].{found[2]}, say, "
            "batch.x_dict and batch.edge_index_dict. Make the model for types (to_hetero, HeteroConv), or, if the graph's types "
            "do not matter, GraphDataModule(graph.to_homogeneous()); docs/models.md, 'Node and edge types'."
        )
    if found is not None and found[2].endswith("_dict"):
        name = found[2].removesuffix("_dict")
        return (
            f"{step} reads batch.{name}_dict, which a HeteroData has, and this graph has no types: read batch.{name}."
        )
    return None


@contextmanager
def telling_about_types(step: str) -> Iterator[None]:
    """Adds to an error of `step` what :func:`about_types` says of it."""
    try:
        yield
    except AttributeError as error:
        said = about_types(str(error), step)
        if said is None:
            raise
        raise AttributeError(said) from error


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


def prepare_hetero(
    data: HeteroData,
    input_type: NodeType | None = None,
    fractions: Sequence[float] | None = None,
    split_column: int = 0,
    seed: int = 0,
    masks_needed: bool = True,
) -> HeteroData:
    """Returns a checked copy of `data`: what has a row per node or edge of its type, and boolean masks of the input type.

    Args:
        data: with ``edge_index`` per edge type; per node type ``x``, or ``num_nodes`` where there are no features.
        input_type: see :func:`input_type_of`.
        fractions, split_column, seed, masks_needed: see :func:`~lightning_gnn.data.sources.prepare_graph`.
    """
    if not data.edge_types:
        raise ValueError("The HeteroData has no edge types. Set data['author', 'writes', 'paper'].edge_index, say.")
    chosen, predicted = input_type_of(data, input_type), predicted_edges(edge_stores(data))
    masks_needed = masks_needed and predicted is None
    result = HeteroData()
    sizes: dict[NodeType, int] = {}
    rows_of_type(dict(data._global_store.items()), None, None, "the HeteroData itself")
    for name in data.node_types:
        with _told(f"Node type {name!r}"):
            attributes = dict(data[name].items())
            if name == chosen:
                size = _num_nodes(name, data[name])
                attributes, replaced = with_masks_of_ids(attributes, size, masks_needed and fractions is None)
                warn_of_left_out(replaced, f"node type {name!r}")
                given = Data(**{mask: attributes.pop(mask).cpu() for mask in MASKS if mask in attributes})
            sizes[name] = _prepare_nodes(name, data[name], attributes, result)
    with _told(f"Node type {chosen!r}"):
        y = result[chosen].get("y")
        masks = masks_of(given, y, sizes[chosen], None, fractions, split_column, seed, masks_needed)
    result[chosen].update(masks)
    for kind in data.edge_types:
        with _told(f"Edge type {kind}"):
            _prepare_edges(kind, data[kind], sizes, result)
            if any(name in data[kind] for name in EDGE_MASKS):
                set_edge_masks(result[kind], result[kind].edge_index.size(1), complete=kind == predicted)
    return result


@contextmanager
def _told(of: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{of}: {error}") from error


def _num_nodes(name: NodeType, store: BaseStorage) -> int:
    for attribute in ("x", "y", *MASKS):
        check_tensor(attribute, store.get(attribute))
        if store.get(attribute) is not None and not store[attribute].dim():
            raise ValueError(f"{attribute} has a single value: one row per node is needed.")
    rows = [store[attribute].size(0) for attribute in ("x", "y") if store.get(attribute) is not None]
    size = store["num_nodes"] if "num_nodes" in store else rows[0] if rows else None
    if size is None:
        raise ValueError(
            f"it has neither x nor num_nodes. Say how many nodes there are: data['{name}'].num_nodes = 1000."
        )
    check_whole(num_nodes=size)
    if any(each != size for each in rows):
        raise ValueError(f"num_nodes is {size}, but x and y have {rows} rows: one row per node is needed.")
    if size < 1:
        raise ValueError(
            f"it has no nodes: x has no rows, or num_nodes is {size}. Remove it: del data['{name}'], and its edge types."
        )
    return int(size)


def _prepare_nodes(name: NodeType, store: BaseStorage, attributes: Mapping[str, Any], result: HeteroData) -> int:
    size, into = _num_nodes(name, store), result[name]
    into.update(rows_of_type(attributes, size, None, f"node type {name!r}"))
    if "x" in into:
        into.x = features(into.x)
    else:
        into.num_nodes = size
    if "y" in into:
        into.y = labels(into.y, size)
    return size


def _prepare_edges(kind: EdgeType, store: BaseStorage, sizes: Mapping[NodeType, int], result: HeteroData) -> None:
    source, _, target = kind
    for end in (source, target):
        if end not in sizes:
            raise ValueError(
                f"there are no nodes of type {end!r}. Set data[{end!r}].x or data[{end!r}].num_nodes; there are {sorted(sizes)}."
            )
    if store.get("edge_index") is None:
        raise ValueError("it has no edge_index. Convert its adj_t, or remove the edge type.")
    check_tensor("edge_index", store.edge_index)
    edge_index = checked_edges(store.edge_index.cpu(), max(sizes[source], sizes[target]))
    for row, end in enumerate((source, target)):
        high = int(edge_index[row].max()) if edge_index.size(1) else -1
        if high >= sizes[end]:
            raise ValueError(
                f"edge_index[{row}] holds ids up to {high}, but there are {sizes[end]} nodes of type {end!r}: sources are in "
                "row 0, targets in row 1."
            )
    into = result[kind]
    into.edge_index = edge_index
    for attribute in ("edge_weight", "edge_attr"):
        check_tensor(attribute, store.get(attribute))
        if store.get(attribute) is not None:
            into[attribute] = edge_values(
                attribute, store[attribute].cpu(), edge_index.size(1), torch.get_default_dtype()
            )
    attributes = {name: value for name, value in store.items() if name not in into}
    into.update(rows_of_type(attributes, None, edge_index.size(1), f"edge type {kind}"))


@dataclass(frozen=True)
class JoinedGraph:
    """A graph whose nodes of all types are one list, type after type, and so its edges; of one type where it has none.

    Attributes:
        edge_index: int64 ``[2, E]``.
        num_nodes: N.
        node_type, edge_type: number of each one's type, int16 ``[N]`` and ``[E]``; None for a graph without types.
        node_firsts, edge_firsts: by type, where it begins in these lists.
    """

    edge_index: Ids
    num_nodes: int
    node_type: np.ndarray | None = None
    edge_type: np.ndarray | None = None
    node_firsts: Mapping[NodeType, int] | None = None
    edge_firsts: Mapping[EdgeType, int] | None = None

    @classmethod
    def of(cls, data: Data | HeteroData) -> JoinedGraph:
        if isinstance(data, Data):
            return cls(data.edge_index.numpy(), data.x.size(0))
        nodes = {name: data[name].num_nodes for name in data.node_types}
        edges = {kind: data[kind].edge_index.size(1) for kind in data.edge_types}
        node_firsts, edge_firsts = (
            dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist())) for sizes in (nodes, edges)
        )
        ends = [
            data[kind].edge_index + torch.tensor([[node_firsts[kind[0]]], [node_firsts[kind[2]]]]) for kind in edges
        ]
        node_type, edge_type = (
            np.repeat(np.arange(len(sizes), dtype=np.int16), list(sizes.values())) for sizes in (nodes, edges)
        )
        return cls(torch.cat(ends, 1).numpy(), sum(nodes.values()), node_type, edge_type, node_firsts, edge_firsts)

    def relabelling(self, part: np.ndarray, num_parts: int) -> Relabelling:
        """Returns the order of rows by owner, ``[N]``: type after type in each part, else neighbours near each other."""
        found = local_relabelling(self.edge_index, part, num_parts)
        if self.node_type is None:
            return found
        rows = found.n_id
        return Relabelling(rows[np.lexsort((self.node_type[rows], part[rows]))], found.offsets)

    def parts(self, relabelling: Relabelling) -> Iterator[EdgeCutPart]:
        """Yields the parts, whose edges come type after type."""
        for part in edge_cut_parts(self.edge_index, relabelling):
            if self.edge_type is None:
                yield part
                continue
            order = np.argsort(self.edge_type[part.edge_ids], kind="stable")
            yield replace(part, edge_index=part.edge_index[:, order], edge_ids=part.edge_ids[order])

    def among_all(self, mask: np.ndarray, kind: NodeType | EdgeType) -> np.ndarray:
        """Returns a mask of the nodes, or edges, of a type as one of all of them, bool ``[N]`` or ``[E]``."""
        firsts: Any = self.node_firsts if isinstance(kind, str) else self.edge_firsts
        found = np.zeros(self.num_nodes if isinstance(kind, str) else self.edge_index.shape[1], np.bool_)
        found[firsts[kind] :][: len(mask)] = mask
        return found

    def types_per_part(self, part: np.ndarray, num_parts: int) -> dict[str, np.ndarray]:
        """Returns the nodes and the edges of each type in each part, int64 ``[P]``, by its name; none without types."""
        if self.node_firsts is None or self.edge_firsts is None:
            return {}
        owner, counts = part[self.edge_index[1]], {}
        for number, name in enumerate(self.node_firsts):
            counts[f"{name} nodes"] = np.bincount(part[self.node_type == number], minlength=num_parts)
        for number, kind in enumerate(self.edge_firsts):
            counts[" ".join(kind)] = np.bincount(owner[self.edge_type == number], minlength=num_parts)
        return counts


def orders_of(
    joined: JoinedGraph, relabelling: Relabelling, edge_ids: list[Ids], part: np.ndarray, input_type: NodeType | None
) -> tuple[Types, dict[NodeType | EdgeType, Ids]]:
    """Returns the types of a graph as it is cut, and by type the original ids of its nodes and edges in relabelled order.

    Args:
        edge_ids: of each part, in order.
        input_type: None for a graph without types.
    """
    num_parts, edge_order = len(edge_ids), np.concatenate(edge_ids)
    if input_type is None:
        edge_counts = np.array([len(each) for each in edge_ids])
        types = Types.none(np.diff(relabelling.offsets), edge_counts)
        return types, {ONE_TYPE[0]: relabelling.n_id, ONE_TYPE: edge_order}
    assert joined.node_firsts is not None and joined.edge_firsts is not None
    assert joined.node_type is not None and joined.edge_type is not None
    owner = np.repeat(np.arange(num_parts), [len(each) for each in edge_ids])
    orders: dict[NodeType | EdgeType, Ids] = {}
    nodes, edges = {}, {}
    for number, (name, first) in enumerate(joined.node_firsts.items()):
        rows = relabelling.n_id[joined.node_type[relabelling.n_id] == number]
        orders[name], nodes[name] = rows - first, np.bincount(part[rows], minlength=num_parts)
    for number, (kind, first) in enumerate(joined.edge_firsts.items()):
        here = joined.edge_type[edge_order] == number
        orders[kind], edges[kind] = edge_order[here] - first, np.bincount(owner[here], minlength=num_parts)
    return Types(nodes, edges, input_type), orders


def attributes_of(data: Data | HeteroData, kind: NodeType | EdgeType) -> dict[str, Tensor]:
    """Returns what has a row per node, or edge, of a type, without ``edge_index``."""
    if isinstance(data, Data):
        what = "node" if isinstance(kind, str) else "edge"
        return {name: data[name] for name, found in kinds_of(data).items() if found == what}
    return {name: value for name, value in data[kind].items() if isinstance(value, Tensor) and name != "edge_index"}
