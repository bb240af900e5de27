"""Neighbor sampling over several hops, built from single hops and local numbers. The caller provides the function for a hop.

Nodes have types, and edge types are triples (source, relation, target), as in PyG's HeteroData.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.strategies.sampling import loops
from lightning_gnn.strategies.sampling.neighbors import NO_IDS, Neighbors, concat_ids

LARGEST_ARRAY = 1 << 24
"""Maximum number of ids for an array over all ids, 4 bytes each; ``benchmarks/sampling.py`` measures the cost of a table."""

_LARGEST_BASE = 1 << 30
"""Base at which the array is reset: the rest of int32 is room for the numbers of one batch."""


def pack_tensors(fields: Sequence[Tensor]) -> Tensor:
    """Returns tensors of any dtype, ``[n, ...]`` each, concatenated as bytes after their numbers of rows."""
    pieces = [torch.tensor([len(field) for field in fields]).view(torch.uint8)]
    for field in fields:
        if field.numel():
            pieces.append(field.contiguous().view(-1).view(torch.uint8))
            if odd := len(pieces[-1]) % 8:  # alignment for any dtype
                pieces.append(pieces[-1].new_zeros(8 - odd))
    return torch.cat(pieces)


def unpack_tensors(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns the arguments of :func:`pack_tensors`; `like` has empty tensors of the same dtypes and trailing dimensions."""
    begin, tensors = 8 * len(like), []
    for size, each in zip(data[:begin].view(torch.int64).tolist(), like):
        num_bytes = size * each.element_size() * each.shape[1:].numel()
        shape = size, *each.shape[1:]
        tensors.append(data[begin : begin + num_bytes].view(each.dtype).view(shape) if num_bytes else each.new_empty(shape))
        begin += num_bytes + -num_bytes % 8
    return tensors


class Numbering:
    """Local numbers of ids, in the order of their first occurrence. Buffers are reused between batches.

    Not thread-safe.

    Args:
        num_ids: ids are between 0 and `num_ids` - 1, which is not checked.
        dense: whether to use an array over all ids instead of a hash table of the ids that occur. By default, the faster one, as
            long as the array is small.
    """

    def __init__(self, num_ids: int, dense: bool | None = None):
        self.num_ids = num_ids
        self.dense = num_ids <= LARGEST_ARRAY if dense is None else dense
        # Entries below the base belong to an earlier batch, so nothing needs to be cleared.
        self._base = 0
        self._count = 0
        self._known_ids = torch.empty(1024, dtype=torch.long)
        self._array = torch.full((num_ids if self.dense else 0,), -1, dtype=torch.int32)
        self._table = _empty_table(0 if self.dense else 2048)

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Tensor:
        """Id of each number, int64 ``[count]``; a copy."""
        return self._known_ids[: self._count].clone()

    def since(self, first: int) -> Tensor:
        """Returns a copy of the ids with local numbers `first` and higher, int64."""
        return self._known_ids[first : self._count].clone()

    def clear(self) -> None:
        self._base += self._count
        self._count = 0
        if self.dense and self._base > _LARGEST_BASE:
            self._array.fill_(-1)
            self._base = 0

    def start(self, seeds: Tensor) -> None:
        """Reset, and number `seeds`, int64 ``[n]``, from 0 to n - 1; lookups of duplicates return their first number."""
        self.clear()
        self._number(seeds, loops.APPEND)

    def open(self, seeds: Tensor, room: int) -> tuple[np.ndarray, int, np.ndarray]:
        """Start with `seeds`, for a loop that numbers at most `room` other ids; returns its memory, base and ids by number."""
        self.start(seeds)
        self._reserve(self._count + room)
        return (self._array if self.dense else self._table).numpy(), self._base, self._known_ids.numpy()

    def close(self, count: int) -> Tensor:
        """Set the number of ids after such a loop; returns a copy of all ids, int64 ``[count]``."""
        self._count = count
        return self.ids

    def add(self, ids: Tensor) -> Tensor:
        """Returns the number of each id, int64 ``[n]``; new ids get the next numbers."""
        return self._number(ids, loops.ADD)

    def find(self, ids: Tensor) -> Tensor:
        """Returns the number of each id, int64 ``[n]``; -1 for ids without one."""
        return self._number(ids, loops.FIND)

    def _number(self, ids: Tensor, mode: int) -> Tensor:
        if mode != loops.FIND:
            self._reserve(self._count + len(ids))
        loop, memory = (loops.number_in_array, self._array) if self.dense else (loops.number_in_table, self._table)
        numbers = torch.empty(len(ids), dtype=torch.long)
        arrays = ids.contiguous().numpy(), memory.numpy(), self._base, self._known_ids.numpy()
        self._count = loop(*arrays, self._count, numbers.numpy(), mode)
        return numbers

    def _reserve(self, size: int) -> None:
        if size > len(self._known_ids):
            known_ids = torch.empty(2 * size, dtype=torch.long)
            known_ids[: self._count] = self._known_ids[: self._count]
            self._known_ids = known_ids
        if not self.dense and 2 * size > len(self._table):
            ids = self.ids
            self._table, self._base, self._count = _empty_table(2 * size), 0, 0
            self._number(ids, loops.APPEND)


def _empty_table(size: int) -> Tensor:
    """Returns a table of at least `size` entries, a power of two: ids and numbers, int64 ``[entries, 2]``."""
    return torch.full((1 << max(size - 1, 1).bit_length(), 2), -1, dtype=torch.long)


Hop = Callable[[EdgeType, Tensor, int], Neighbors]
"""Function that returns in-edges of an edge type for targets ``[T]``, at most the given number each; takes and returns ids.

It is called for every hop and edge type with a nonzero number of neighbors, even without targets. In distributed sampling, all
ranks then take part.
"""


def sample_hops(
    seeds: Mapping[NodeType, Tensor],
    num_neighbors: Mapping[EdgeType, Sequence[int]],
    hop: Hop,
    numberings: Mapping[NodeType, Numbering],
    directed: bool = True,
) -> HeteroSamplerOutput:
    """Returns the sampled neighborhood of the seeds in local numbers, in PyG's order.

    Seeds come first, then the nodes of each hop. A hop samples in-edges of the nodes that the previous hop added. Edges of a hop
    are in the order of their targets. This is GraphSAGE's sampling (Hamilton et al., NeurIPS 2017, algorithm 2), one hop at a
    time (DistDGL, section III-D).

    Args:
        seeds: ids by node type, int64 ``[n]``; missing types have none.
        num_neighbors: by edge type, one number per hop; 0 omits the type in that hop.
        hop: function that samples one hop.
        numberings: numbering by node type.
        directed: whether to keep only the edges drawn. If False, all edges between sampled nodes, which cannot be trimmed per
            layer.
    """
    for name, numbering in numberings.items():
        numbering.start(seeds.get(name, NO_IDS))
    num_nodes = {name: [len(numbering)] for name, numbering in numberings.items()}
    first = dict.fromkeys(numberings, 0)
    row, col, edge = ({kind: list[Tensor]() for kind in num_neighbors} for _ in range(3))
    num_edges = {kind: list[int]() for kind in num_neighbors}
    for depth in range(max(map(len, num_neighbors.values()))):
        targets = {name: numbering.since(first[name]) for name, numbering in numberings.items()}
        for kind, fanout in num_neighbors.items():
            source, _, target = kind
            if fanout[depth] == 0:
                num_edges[kind].append(0)
                continue
            found = hop(kind, targets[target], fanout[depth])
            row[kind].append(numberings[source].add(found.sources))
            col[kind].append(found.targets(first[target]))
            edge[kind].append(found.edges)
            num_edges[kind].append(len(found.edges))
        for name, numbering in numberings.items():
            first[name] += len(targets[name])
            num_nodes[name].append(len(numbering) - first[name])
    nodes = {name: numbering.ids for name, numbering in numberings.items()}
    if not directed:
        return induced_subgraph(nodes, list(num_neighbors), hop, numberings)
    rows, cols, edges = ({kind: concat_ids(parts) for kind, parts in each.items()} for each in (row, col, edge))
    return HeteroSamplerOutput(nodes, rows, cols, edges, num_sampled_nodes=num_nodes, num_sampled_edges=num_edges)


def sample_trees(
    roots: Sequence[tuple[NodeType, Tensor]],
    num_neighbors: Mapping[EdgeType, Sequence[int]],
    hop: Hop,
    totals: Mapping[NodeType, int],
    directed: bool = True,
) -> HeteroSamplerOutput:
    """Returns the result of :func:`sample_hops` for roots with separate trees that share no nodes; ``batch`` is each node's tree.

    Args:
        roots: node types and ids of each, ``[n]``, in the order of their trees.
        num_neighbors, directed: see :func:`sample_hops`.
        hop: function that samples in-edges of copies: the copy of node i in tree t is i + N t. It returns nodes.
        totals: N by node type.
    """
    trees, copies = torch.arange(sum(len(ids) for _, ids in roots)), dict[NodeType, Tensor]()
    for (name, ids), tree in zip(roots, trees.split([len(ids) for _, ids in roots])):
        copies[name] = torch.cat([copies.get(name, NO_IDS), tree * totals[name] + ids])

    def hop_in_trees(kind: EdgeType, targets: Tensor, fanout: int) -> Neighbors:
        found = hop(kind, targets, fanout)
        tree = torch.repeat_interleave(targets // totals[kind[2]], found.counts, output_size=len(found.sources))
        return Neighbors(found.offsets, tree * totals[kind[0]] + found.sources, found.edges)

    numberings = {name: Numbering(total * len(trees), dense=False) for name, total in totals.items()}  # too many for an array
    out = sample_hops(copies, num_neighbors, hop_in_trees, numberings, directed)
    out.batch = {name: ids // totals[name] for name, ids in out.node.items()}
    out.node = {name: ids % totals[name] for name, ids in out.node.items()}
    return out


def induced_subgraph(
    nodes: Mapping[NodeType, Tensor], kinds: Sequence[EdgeType], hop: Hop, numberings: Mapping[NodeType, Numbering]
) -> HeteroSamplerOutput:
    """Returns all edges of these `kinds` between `nodes`, ids by node type, in local numbers: positions in `nodes`.

    If a node occurs twice, both copies get in-edges and the first has the out-edges, as in PyG.
    """
    for name, numbering in numberings.items():
        numbering.start(nodes.get(name, NO_IDS))
    row, col, edge = {}, {}, {}
    for kind in kinds:
        source, _, target = kind
        found = hop(kind, nodes.get(target, NO_IDS), -1)
        numbers = numberings[source].find(found.sources)
        inside = numbers >= 0
        row[kind], col[kind], edge[kind] = numbers[inside], found.targets()[inside], found.edges[inside]
    return HeteroSamplerOutput(node=dict(nodes), row=row, col=col, edge=edge)
