"""Several hops of neighbour sampling, composed of one hop and numbering; who answers a hop is the caller's choice.

Nodes have types and edges have types of three names, (source, relation, target), as in PyG's HeteroData.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.strategies.sampling.neighbors import NO_IDS, Neighbors, joined
from lightning_gnn.strategies.sampling.numbering import Numbering

Hop = Callable[[EdgeType, Tensor, int], Neighbors]
"""Returns up to so many in-edges, of an edge type, of targets ``[T]``: ids in, ids out. Distributed, this is where ranks ask:
it is called for every hop and edge type whose fan-out is not 0, also without targets, so that all ranks take part in it."""


def sample_hops(
    seeds: Mapping[NodeType, Tensor],
    fanouts: Mapping[EdgeType, Sequence[int]],
    hop: Hop,
    numberings: Mapping[NodeType, Numbering],
    directed: bool = True,
) -> HeteroSamplerOutput:
    """Returns the sampled neighbourhood of the seeds in local numbers, in PyG's order.

    Seeds come first, then what each hop finds; a hop asks for the in-edges of the nodes that the one before it found. Edges of
    a hop are in the order of their targets. GraphSAGE's sampling (Hamilton et al., NeurIPS 2017, algorithm 2), a hop at a time
    (DistDGL, section III-D).

    Args:
        seeds: ids by node type, int64 ``[n]``; a type that is not there has none.
        fanouts: by edge type, one per hop; 0 leaves it out of that hop.
        directed: keep the edges that were drawn; else all edges between sampled nodes, which cannot be trimmed to a layer.
    """
    for name, numbering in numberings.items():
        numbering.start(seeds.get(name, NO_IDS))
    num_nodes = {name: [len(numbering)] for name, numbering in numberings.items()}
    first = dict.fromkeys(numberings, 0)
    row, col, edge = ({kind: list[Tensor]() for kind in fanouts} for _ in range(3))
    num_edges = {kind: list[int]() for kind in fanouts}
    for depth in range(max(map(len, fanouts.values()))):
        targets = {name: numbering.since(first[name]) for name, numbering in numberings.items()}
        for kind, fanout in fanouts.items():
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
        return induced_subgraph(nodes, list(fanouts), hop, numberings)
    rows, cols, edges = ({kind: joined(parts) for kind, parts in each.items()} for each in (row, col, edge))
    return HeteroSamplerOutput(nodes, rows, cols, edges, num_sampled_nodes=num_nodes, num_sampled_edges=num_edges)


def sample_trees(
    roots: Sequence[tuple[NodeType, Tensor]],
    fanouts: Mapping[EdgeType, Sequence[int]],
    hop: Hop,
    totals: Mapping[NodeType, int],
    directed: bool = True,
) -> HeteroSamplerOutput:
    """Returns what :func:`sample_hops` does, of roots with a tree each, which share no nodes; ``batch`` has each node's tree.

    Args:
        roots: some node types and ids of each, ``[n]``, in the order of their trees.
        fanouts, directed: see :func:`sample_hops`.
        hop: is asked for in-edges of copies: of node i, the one in tree t is i + N t. It answers with nodes.
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
    out = sample_hops(copies, fanouts, hop_in_trees, numberings, directed)
    out.batch = {name: ids // totals[name] for name, ids in out.node.items()}
    out.node = {name: ids % totals[name] for name, ids in out.node.items()}
    return out


def induced_subgraph(
    nodes: Mapping[NodeType, Tensor], kinds: Sequence[EdgeType], hop: Hop, numberings: Mapping[NodeType, Numbering]
) -> HeteroSamplerOutput:
    """Returns all edges of these `kinds` between `nodes`, ids by node type, in local numbers: positions in `nodes`.

    Of a node that is there twice, both get in-edges and the first gives out-edges, as in PyG.
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
