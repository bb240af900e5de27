"""Small random graphs in two unequal parts, with sampled rows of the user's attributes and random edges."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from typing_extensions import Self

from lightning_gnn.data.lazy_ids import stored_ids
from lightning_gnn.data.shards import Graph, Shard, split_graph, whole_graph
from lightning_gnn.data.sources import EDGE_MASKS, MASKS, OF_BATCHES, GraphData, class_labels, is_labeled, kinds_of, left_out_of
from lightning_gnn.partition.layout import LayoutSpec


@dataclass(frozen=True)
class Form:
    """Sizes of a small graph and of its two parts.

    Attributes:
        nodes, edges: numbers per part; an edge belongs to the part of its target.
        num_labeled: rows per part in the mask of the stage, if there are enough other rows.
        simple: whether all edges differ; otherwise some are duplicates.
        varied: whether sizes of other types than the input type are random; otherwise they are close to these sizes.
    """

    nodes: tuple[int, int]
    edges: tuple[int, int]
    num_labeled: tuple[int, int]
    simple: bool = False
    varied: bool = False


FORM = Form((138, 43), (390, 97), (69, 37))
_ISOLATED, _TWICE = 2, 9
"""Nodes of a part without edges, and number of duplicate edges."""
_POOL = 8192
"""Maximal number of rows to sample from; larger graphs are subsampled."""
_VALUES = 64
"""Maximal number of values of an attribute that counts as classes."""


@dataclass(frozen=True)
class SmallGraph:
    """Small graph: directed, with duplicate edges and isolated nodes, without self-loops.

    Attributes:
        graph: the graph.
        part: owner of each node, rank 0 or 1; with types, type after type.
        holders: rank that computes each edge in a vertex cut, rank 0 or 1; with types, type after type.
    """

    graph: Graph
    part: np.ndarray
    holders: np.ndarray
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of :func:`~lightning_gnn.data.shards.split_graph`."""

    def whole(self, graph: Graph) -> Shard:
        """Returns this graph, or for example a copy in another dtype, as the only rank's shard."""
        return whole_graph(graph, **self.options)

    def shards(self, graph: Graph, layout: LayoutSpec) -> list[Shard]:
        """Returns the shards of this graph, or for example of a copy in another dtype."""
        holders = self.holders if layout.kind == "vertex_cut" else None
        return split_graph(graph, self.part, layout, holders, **self.options)

    def merge_parts(self) -> Self:
        """Returns the graph with all nodes and edges on the first rank."""
        return replace(self, part=np.zeros_like(self.part), holders=np.zeros_like(self.holders))


def small_graph(batch: Data, masks: Collection[str], form: Form, seed: int = 0, num_classes: int = 0) -> SmallGraph:
    """Returns a small graph with sampled rows of the user's node and edge attributes; other attributes are unchanged.

    Each part has rows of each class, and of each value of other attributes with few values, if the rank has them. Further rows
    are ordered by label, so that classes and losses of the parts differ. Repeated rows of real-valued attributes are scaled down
    slightly; otherwise the maximum would be equal on both parts.

    Args:
        batch: a rank's part of the graph.
        masks: masks of nodes or edges for the means of the step.
        form: sizes of the small graph.
        seed: seed of the sample.
        num_classes: number of classes of the whole graph; labeled nodes of each part include classes that this rank lacks, as far
            as there is room.
    """
    g = torch.Generator().manual_seed(seed)
    owned, given = int(batch.num_owned), batch.edge_index.size(1)
    kinds = kinds_of(batch)
    nodes = {name: batch[name][:owned] for name, kind in kinds.items() if kind == "node"}
    edges = {name: batch[name] for name, kind in kinds.items() if kind == "edge"}
    found, order = predicted_nodes(batch, nodes, masks, form, num_classes, seed, g)
    place = order.argsort()
    edge_index = order[random_edges(form.nodes, form.nodes, form.edges, True, g, form.simple)]
    shuffled = torch.randperm(sum(form.edges), generator=g)
    small = GraphData(kinds, left_out_of(batch), edge_index=edge_index[:, shuffled])
    for name, value in batch.to_dict().items():
        if name not in ("edge_index", "num_owned"):
            small[name] = found.get(name, value)
    if given and edges:
        counted = torch.zeros(given, dtype=torch.bool)
        for mask in set(masks) & set(EDGE_MASKS):
            counted |= batch[mask]
        quotas = [count * labels // size for count, labels, size in zip(form.edges, form.num_labeled, form.nodes)]
        rows = chosen_rows(edges, counted, form.edges, quotas, g)[shuffled]
    for name, value in edges.items():
        small[name] = values_of_rows(value, rows) if given else value.new_zeros((sum(form.edges), *value.shape[1:]))
    for name in kinds.keys() - set(OF_BATCHES):
        if name.endswith("n_id"):  # global ids, which are used to gather rows
            small[name] = small[name] % sum(form.nodes)
    part = (place >= form.nodes[0]).long().numpy()
    holders = (torch.rand(sum(form.edges), generator=g) < 0.3).long().numpy()
    return SmallGraph(small, part, holders)


def predicted_nodes(
    of: Any, nodes: dict[str, Tensor], masks: Collection[str], form: Form, num_classes: int, seed: int, g: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the result of :func:`some_nodes` for nodes with masks and labels.

    `of` has the masks and labels, `nodes` the attributes of its local nodes.
    """
    counted = torch.zeros_like(nodes[MASKS[0]])
    for mask in set(masks) & set(MASKS):
        y = nodes.get("y")
        counted |= nodes[mask] if y is None else nodes[mask] & is_labeled(y)
    found, order = some_nodes(nodes, counted, form.nodes, form.num_labeled, g)
    classes = class_labels(found["y"]) if "y" in found else None
    if classes is not None and len(classes) == len(order):
        # Classes that this rank's labeled nodes lack, on the last nodes of each part: the last class, and some others.
        ranges = [(begin, begin + count) for begin, count in zip((0, form.nodes[0]), form.num_labeled)]
        there = torch.cat([classes[order[begin:end]] for begin, end in ranges])
        absent = sorted({*range(num_classes)} - {*there.tolist()}, reverse=True)
        absent = absent[:1] + absent[1 + seed :] + absent[1 : 1 + seed]
        for begin, end in ranges:
            for number, label in enumerate(absent[: max(1, (end - begin) // 4)]):
                found["y"][order[end - 1 - number]] = label
    return found, order


def some_nodes(
    nodes: dict[str, Tensor], counted: Tensor, sizes: Sequence[int], num_labeled: Sequence[int], g: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns attributes of both parts' nodes by id, and the ids, beginning with the first part."""
    if not len(counted):
        zeros = {name: value.new_zeros((sum(sizes), *value.shape[1:])) for name, value in nodes.items()}
        return zeros, torch.randperm(sum(sizes), generator=g)
    rows = chosen_rows(nodes, counted, sizes, num_labeled, g)
    order = torch.randperm(sum(sizes), generator=g)  # ids of an owner are not consecutive
    return {name: values_of_rows(value, rows)[order.argsort()] for name, value in nodes.items()}, order


def values_of_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Returns these rows; repeated rows are scaled down by a few percent if their values are real numbers."""
    found, order = stored_ids(values)[rows].to(values.dtype), rows.argsort(stable=True)  # lazy ids stay lazy
    times = torch.empty_like(rows)
    times[order] = torch.arange(len(rows)) - torch.searchsorted(rows[order], rows[order])
    if not values.is_floating_point() or not times.any() or len(found[:_VALUES].unique()) <= _VALUES:
        return found
    return found * (1 - 0.03 * times.clamp(max=10)).to(found.dtype).view(-1, *[1] * (found.dim() - 1))


def random_edges(
    sources: Sequence[int], targets: Sequence[int], edges: Sequence[int], is_same_type: bool, g: torch.Generator, simple: bool
) -> Tensor:
    """Returns the edges of both parts, ``[2, E]``, between nodes of one type if `is_same_type`, otherwise of two types.

    `sources` and `targets` are numbers of nodes per part; nodes of the first part have the first ids.
    """
    busy, ends = torch.cat(_busy(sources)), _busy(targets)
    pieces = []
    for into, count in zip(ends, edges):
        if simple:
            pairs = torch.randperm(len(into) * (len(busy) - 1), generator=g)[:count]
            place, step = pairs % len(into), 1 + pairs // len(into)
        else:
            place, step = (torch.randint(low, high, (count,), generator=g) for low, high in ((0, len(into)), (1, len(busy))))
        target = into[place]
        there = torch.searchsorted(busy, target) if is_same_type else 0
        source = busy[(there + step) % len(busy)]
        twice = min(_TWICE, count // 4) * (not simple)
        source[count - twice :], target[count - twice :] = source[:twice].clone(), target[:twice].clone()
        pieces.append(torch.stack([source, target]))
    return torch.cat(pieces, 1)


def _busy(sizes: Sequence[int]) -> list[Tensor]:
    """Returns the nodes of each part that have edges."""
    first, second = sizes
    return [torch.arange(_ISOLATED, first), torch.arange(first + _ISOLATED, first + second)]


def chosen_rows(
    attributes: dict[str, Tensor], counted: Tensor, sizes: Sequence[int], num_labeled: Sequence[int], g: torch.Generator
) -> Tensor:
    """Returns the sampled rows of both parts, beginning with the first part."""
    attributes = {name: value for name, value in attributes.items() if value.dim() == 1 or name == "y"}
    if "y" in attributes and (classes := class_labels(attributes["y"])) is not None:
        attributes["y"] = classes
    num_unlabeled = [size - count for size, count in zip(sizes, num_labeled)]
    return torch.cat(_sample_parts(attributes, counted, num_labeled, num_unlabeled, g))


def _sample_parts(
    attributes: dict[str, Tensor], counted: Tensor, num_labeled: Sequence[int], num_unlabeled: Sequence[int], g: torch.Generator
) -> list[Tensor]:
    """Returns the rows of each part; if all rows count, or none, all are sampled from them."""
    yes, no = counted.nonzero().view(-1), (~counted).nonzero().view(-1)
    if not len(yes) or not len(no):
        yes = no = torch.arange(len(counted))
    samples = [_sample_rows(attributes, yes, num_labeled, g), _sample_rows(attributes, no, num_unlabeled, g)]
    return [torch.cat(rows) for rows in zip(*samples)]


def _sample_rows(attributes: dict[str, Tensor], rows: Tensor, quotas: Sequence[int], g: torch.Generator) -> list[Tensor]:
    """Returns sampled `rows` of each part: each value of an attribute with few values, then others in order of labels."""
    if len(rows) > 8 * _POOL:  # equivalent to a shuffle of all rows, and fast for hundreds of millions of edges
        rows = rows[torch.randint(len(rows), (2 * _POOL,), generator=g).unique()]
    pool = rows[torch.randperm(len(rows), generator=g)[:_POOL]]
    kinds = _kinds(attributes, pool)
    free = torch.ones(len(pool), dtype=torch.bool)
    taken: list[list[int]] = [[], []]
    for kind in kinds:
        for part, quota in enumerate(quotas):
            if len(taken[part]) < quota and not kind[taken[part]].any():
                found = (kind & free).nonzero()
                row = int(found[0] if len(found) else kind.nonzero()[0])
                taken[part].append(row)
                free[row] = False
    left = sum(quotas) - sum(map(len, taken))
    rest = free.nonzero().view(-1)[:left]
    if len(rest) < left:
        rest = torch.cat([rest, torch.randint(len(pool), (left - len(rest),), generator=g)])
    if "y" in attributes:
        values = attributes["y"][pool[rest]].double()
        rest = rest[(values if values.dim() == 1 else values.sum(1)).argsort()]
    missing = quotas[0] - len(taken[0])
    rests = (rest[:missing], rest[missing:])
    return [pool[torch.cat([torch.tensor(own, dtype=torch.long), more])] for own, more in zip(taken, rests)]


def _kinds(attributes: dict[str, Tensor], rows: Tensor) -> list[Tensor]:
    """Returns a boolean mask of rows for each value of attributes with few values; the rarest first."""
    kinds: list[Tensor] = []
    for value in attributes.values():
        own = stored_ids(value)[rows]
        if own.dim() == 2 and not own.is_floating_point() and own.size(1) <= _VALUES:  # multiple labels
            kinds += list((own > 0).unbind(1))
        elif own.dim() == 1 and not own.is_complex():
            found = own.unique()
            if 1 < len(found) <= _VALUES:
                kinds += [own == each for each in found]
    return sorted((kind for kind in kinds if kind.any()), key=lambda kind: int(kind.sum()))
