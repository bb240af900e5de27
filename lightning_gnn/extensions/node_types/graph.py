"""Checks of graphs with node and edge types, and their form as one list of nodes and edges for partitioners."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.arguments import check_whole
from lightning_gnn.data.shards import edge_stores, input_type_of, predicted_edges
from lightning_gnn.data.sources import (
    EDGE_MASKS,
    MASKS,
    OF_BATCHES,
    check_storable,
    check_tensor,
    checked_edges,
    edge_values,
    features,
    kind_by_rows,
    labels,
    masks_of,
    set_edge_masks,
    warn_of_left_out,
    why_left_out,
    with_masks_of_ids,
)
from lightning_gnn.private_pyg import graph_attributes


def about_types(error: str, step: str) -> str | None:
    """Returns the fix if `step` reads a graph with types like a graph without types, or vice versa; None for other errors."""
    found = re.search(r"'(HeteroData|GlobalStorage)'.* has no attribute '(\w+)'", error)
    if found is not None and found[1] == "HeteroData":
        kind = "'paper', 'cites', 'paper'" if found[2].startswith("edge") else "'paper'"
        return (
            f"{step} reads batch.{found[2]}, but a HeteroData stores it by type: batch[{kind}].{found[2]}, batch.x_dict and "
            "batch.edge_index_dict. Use a model for types (to_hetero, HeteroConv). If types do not matter, use "
            "GraphDataModule(graph.to_homogeneous()). See docs/models.md, 'Node and edge types'."
        )
    if found is not None and found[2].endswith("_dict"):
        name = found[2].removesuffix("_dict")
        return f"{step} reads batch.{name}_dict of a HeteroData, but this graph has no types. Read batch.{name}."
    return None


def prepare_hetero(
    data: HeteroData,
    input_type: NodeType | None = None,
    fractions: Sequence[float] | None = None,
    split_index: int = 0,
    seed: int = 0,
    masks_needed: bool = True,
    short_ids: bool = False,
) -> HeteroData:
    """Returns a checked copy of `data`: attributes with a row per node or edge of their type, and masks of the input type.

    Args:
        data: graph with ``edge_index`` per edge type, and ``x`` per node type, or ``num_nodes`` for types without features.
        input_type: see :func:`input_type_of`.
        fractions, split_index, seed, masks_needed, short_ids: see :func:`~lightning_gnn.data.sources.prepare_graph`.
    """
    if not data.edge_types:
        raise ValueError("The HeteroData has no edge types. Add one, such as data['author', 'writes', 'paper'].edge_index.")
    predicted = predicted_edges(edge_stores(data))
    if not masks_needed and not any(name in data[kind] for kind in data.node_types for name in ("train_mask", "y")):
        input_type = input_type or (data.node_types[0] if predicted is None else None)
    chosen = input_type_of(data, input_type)
    masks_needed = masks_needed and predicted is None
    result = HeteroData()
    sizes: dict[NodeType, int] = {}
    _rows_of_type(dict(graph_attributes(data).items()), None, None, "the HeteroData itself")
    for name in data.node_types:
        with _prefix_errors(f"Node type {name!r}"):
            attributes = dict(data[name].items())
            if name == chosen:
                size = _num_nodes(name, data[name])
                attributes, replaced = with_masks_of_ids(attributes, size, masks_needed and fractions is None)
                warn_of_left_out(replaced, f"node type {name!r}")
                given = Data(**{mask: attributes.pop(mask).cpu() for mask in MASKS if mask in attributes})
            sizes[name] = _prepare_nodes(name, data[name], attributes, result)
    with _prefix_errors(f"Node type {chosen!r}"):
        y = result[chosen].get("y")
        masks = masks_of(given, y, sizes[chosen], None, fractions, split_index, seed, masks_needed)
    result[chosen].update(masks)
    for kind in data.edge_types:
        with _prefix_errors(f"Edge type {kind}"):
            _prepare_edges(kind, data[kind], sizes, result, short_ids)
            if any(name in data[kind] for name in EDGE_MASKS):
                set_edge_masks(result[kind], result[kind].edge_index.size(1), complete=kind == predicted)
    return result


@contextmanager
def _prefix_errors(subject: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{subject}: {error}") from error


def _num_nodes(name: NodeType, store: BaseStorage) -> int:
    for attribute in ("x", "y", *MASKS):
        check_tensor(attribute, store.get(attribute))
        if store.get(attribute) is not None and not store[attribute].dim():
            raise ValueError(f"{attribute} must have one row per node, got a single value.")
    rows = [store[attribute].size(0) for attribute in ("x", "y") if store.get(attribute) is not None]
    size = store["num_nodes"] if "num_nodes" in store else rows[0] if rows else None
    if size is None:
        raise ValueError(f"it has neither x nor num_nodes. Set the number of nodes, such as data['{name}'].num_nodes = 1000.")
    check_whole(num_nodes=size)
    if any(each != size for each in rows):
        raise ValueError(f"x and y must have num_nodes={size} rows, one per node, got {rows}.")
    if size < 1:
        raise ValueError(
            f"it has no nodes: x has no rows, or num_nodes is {size}. Remove it: del data['{name}'], and its edge types."
        )
    return int(size)


def _prepare_nodes(name: NodeType, store: BaseStorage, attributes: Mapping[str, Any], result: HeteroData) -> int:
    size, into = _num_nodes(name, store), result[name]
    into.update(_rows_of_type(attributes, size, None, f"node type {name!r}"))
    if "x" in into:
        into.x = features(into.x)
    else:
        into.num_nodes = size
    if "y" in into:
        into.y = labels(into.y, size)
    return size


def _prepare_edges(kind: EdgeType, store: BaseStorage, sizes: Mapping[NodeType, int], result: HeteroData, short: bool) -> None:
    source, _, target = kind
    for end in (source, target):
        if end not in sizes:
            raise ValueError(
                f"the graph has no node type {end!r}. Set data[{end!r}].x or num_nodes, or use a type of {sorted(sizes)}."
            )
    if store.get("edge_index") is None:
        raise ValueError("it has no edge_index. Convert its adj_t, or remove the edge type.")
    check_tensor("edge_index", store.edge_index)
    edge_index = checked_edges(store.edge_index.cpu(), max(sizes[source], sizes[target]), short)
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
            into[attribute] = edge_values(attribute, store[attribute].cpu(), edge_index.size(1), torch.get_default_dtype())
    attributes = {name: value for name, value in store.items() if name not in into}
    into.update(_rows_of_type(attributes, None, edge_index.size(1), f"edge type {kind}"))


def _rows_of_type(attributes: Mapping[str, Any], num_nodes: int | None, num_edges: int | None, of: str) -> dict[str, Tensor]:
    """Returns the tensors with one row per node or edge of a type, on the CPU; warns about other attributes.

    Args:
        attributes: attributes of the type, by name.
        num_nodes, num_edges: number of nodes or edges of the type; None for the other kind.
        of: description of the type.
    """
    kept, left_out = {}, {}
    for name, value in attributes.items():
        if value is None or name == "num_nodes" or (name in OF_BATCHES and isinstance(value, Tensor)):
            continue
        reason = why_left_out(name, value, num_nodes, num_edges)
        of_rows = isinstance(value, Tensor) and kind_by_rows(name, value, num_nodes, num_edges) != "graph"
        if reason is None and not of_rows:
            reason = "it does not have one row per node or edge of its type, which batches of a HeteroData require"
        if reason is None:
            check_storable(name, value)
            kept[name] = value.detach().cpu()
        else:
            left_out[name] = reason
    warn_of_left_out(left_out, of)
    return kept
