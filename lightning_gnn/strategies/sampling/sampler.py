"""Neighbor sampler for a graph in one process, for any PyG ``NodeLoader`` or ``LinkLoader``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.neighbor_sampler import edge_sample
from torch_geometric.typing import EdgeType, NodeType
from typing_extensions import override

from lightning_gnn.arguments import checked_fanouts
from lightning_gnn.kernels.csr import CSR
from lightning_gnn.partition.layout import ONE_TYPE
from lightning_gnn.strategies.sampling.hops import Numbering, induced_subgraph, sample_hops, sample_trees
from lightning_gnn.strategies.sampling.neighbors import Neighbors, check_choices, check_ids, random_walks, sample_neighbors


class NeighborSampler(BaseSampler):
    """Sampler of the neighborhoods of seed nodes, hop by hop, like PyG's sampler, which needs compiled extensions.

    A sample depends only on the seeds and one random seed, not on threads. The draws of a node depend on the random seed and its
    id, so that samplers of parts of a graph draw the same edges. Buffers are reused between batches: the sampler is not
    thread-safe.

    Args:
        csr: in-edges, rows are targets; a mapping by edge type for a heterogeneous graph. See :meth:`from_data`.
        num_neighbors: in-edges per node and hop, -1 for all; for a heterogeneous graph also a mapping by edge type, in which 0
            omits a type in a hop.
        replace: whether to draw with replacement.
        directed: whether to keep only the edges drawn. If False, all edges between the sampled nodes.
        disjoint: whether seeds have separate trees that share no nodes; ``batch`` is each node's tree. Always True with times.
            With ``directed=False`` these are the ego graphs of ShaDow (Zeng et al., NeurIPS 2021), each root in its seed's row.
        weight: weight of each slot, floating ``[E]``, by edge type for a heterogeneous graph; see :func:`sample_neighbors`. Edges
            of weight 0 are ignored.
        time: time of each slot, int64 ``[E]``, by edge type for a heterogeneous graph; edges later than their tree's seed are not
            drawn.
        strategy: ``"uniform"``, or ``"last"`` for the latest edges.
        labor: whether targets draw by one random number per source and edge type, so that a sample has fewer nodes: see
            `source_keys` of :func:`sample_neighbors`. All hops share the numbers.

    Raises:
        ValueError: `num_neighbors` that is invalid or does not fit the edge types, matrices with different numbers of nodes,
            options that exclude each other.
    """

    def __init__(
        self,
        csr: CSR | Mapping[EdgeType, CSR],
        num_neighbors: Sequence[int] | Mapping[EdgeType, Sequence[int]],
        *,
        replace: bool = False,
        directed: bool = True,
        disjoint: bool = False,
        weight: Tensor | Mapping[EdgeType, Tensor] | None = None,
        time: Tensor | Mapping[EdgeType, Tensor] | None = None,
        strategy: str = "uniform",
        labor: bool = False,
    ):
        self.is_hetero = not isinstance(csr, CSR)
        self.csr: dict[EdgeType, CSR] = {ONE_TYPE: csr} if isinstance(csr, CSR) else dict(csr)
        self.num_neighbors = fanouts_by_type(num_neighbors, list(self.csr))
        self.num_nodes = _num_nodes(self.csr)
        self.replace, self.directed, self.strategy = replace, directed, strategy
        self.weight, self.time = _by_type(weight), _by_type(time)
        self.disjoint = disjoint or bool(self.time)
        check_choices(replace, bool(self.weight), bool(self.time), strategy, labor)
        if labor and disjoint:
            raise ValueError("disjoint=True is not supported with labor=True, which shares nodes of seeds. Remove one of them.")
        self._ids = {name: torch.arange(size) for name, size in self.num_nodes.items()} if labor else {}
        for name, values in (("weight", self.weight), ("time", self.time)):
            for kind, value in values.items():
                if kind not in self.csr or len(value) != self.csr[kind].num_edges:
                    edges = self.csr[kind].num_edges if kind in self.csr else "no"
                    raise ValueError(f"{name} must have {edges} entries for {kind}, one per edge, got {len(value)}.")
        self._numberings: dict[NodeType, Numbering] = {}

    @classmethod
    def from_data(
        cls,
        data: Data | HeteroData,
        num_neighbors: Sequence[int] | Mapping[EdgeType, Sequence[int]],
        *,
        weight_attr: str | None = None,
        time_attr: str | None = None,
        **options: Any,
    ) -> NeighborSampler:
        """Returns a sampler of a graph in memory.

        Args:
            data: graph with ``edge_index`` (of each edge type).
            num_neighbors, options: see the class.
            weight_attr: name of edge weights.
            time_attr: name of times of edges, or of nodes: an edge then has the time of its source.
        """
        hetero = isinstance(data, HeteroData)
        csr, weight, time = {}, {}, {}
        for kind, store in zip(data.edge_types, data.edge_stores) if hetero else [(ONE_TYPE, data)]:
            sizes = (data[kind[0]].num_nodes, data[kind[2]].num_nodes) if hetero else (data.num_nodes, data.num_nodes)
            source, target = store.edge_index
            csr[kind] = CSR.from_coo(target, source, sizes[1], sizes[0])
            nodes = data[kind[0]] if hetero else data
            if weight_attr is not None and weight_attr in store:
                weight[kind] = csr[kind].permute(store[weight_attr])
            if time_attr is not None and (time_attr in store or time_attr in nodes):
                of_edges = time_attr in store and store.is_edge_attr(time_attr)
                values = store[time_attr] if of_edges else nodes[time_attr][source]
                time[kind] = csr[kind].permute(values)
        for name, found in ((weight_attr, weight), (time_attr, time)):
            if name is not None and not found:
                raise ValueError(f"The graph has no attribute {name!r}.")
        made: Any = csr if hetero else csr[ONE_TYPE]
        return cls(made, num_neighbors, weight=weight or None, time=time or None, **options)

    def sample(
        self,
        seeds: Tensor | Mapping[NodeType, Tensor],
        seed: int = 0,
        seed_time: Tensor | Mapping[NodeType, Tensor] | None = None,
    ) -> SamplerOutput | HeteroSamplerOutput:
        """Returns the sampled neighborhood of `seeds` in local numbers, seeds first.

        Args:
            seeds: ids, int64 ``[n]``; by node type for a heterogeneous graph. A duplicate has a separate row, as in PyG, and the
                same draws.
            seed: random seed; the same seeds and random seed give the same sample.
            seed_time: time of each seed, int64 ``[n]``, by node type for a heterogeneous graph; required if edges have times.

        Returns:
            PyG's output (by type): ``node`` ids ``[n_id]``, ``row`` and ``col`` local sources and targets, ``edge`` positions in
                the list of edges, ``num_sampled_nodes`` and ``num_sampled_edges`` per hop (None for ``directed=False``).

        Raises:
            ValueError: no seeds, or seeds outside the graph.
        """
        by_type = dict(seeds) if isinstance(seeds, Mapping) else {ONE_TYPE[0]: seeds}
        until: dict[NodeType, Any] = dict(seed_time) if isinstance(seed_time, Mapping) else {ONE_TYPE[0]: seed_time}
        self._check_seeds(by_type, until)
        limit = torch.cat([until[name] for name in by_type]) if self.time else None
        hop = partial(self._hop, seed=seed, limit=limit)
        if self.disjoint:
            out = sample_trees(list(by_type.items()), self.num_neighbors, hop, self.num_nodes, self.directed)
        else:
            out = sample_hops(by_type, self.num_neighbors, hop, self._shared_numberings, self.directed)
        return out if self.is_hetero else output_of_one_type(out)

    def induced(self, nodes: Tensor | Mapping[NodeType, Tensor]) -> SamplerOutput | HeteroSamplerOutput:
        """Returns all edges between `nodes`, ids int64 ``[n]`` (by node type), in local numbers: positions in `nodes`.

        For the nodes of some clusters, ``torch.isin(part, chosen).nonzero().view(-1)``, this is Cluster-GCN's batch (Chiang et
        al., KDD 2019); see :func:`saint_nodes` for other choices.

        Raises:
            ValueError: no nodes, or nodes outside the graph.
        """
        if self.disjoint:
            raise ValueError("An induced subgraph has no seeds: disjoint=True and times are not supported. Remove them.")
        by_type = dict(nodes) if isinstance(nodes, Mapping) else {ONE_TYPE[0]: nodes}
        self._check_seeds(by_type, {})
        out = induced_subgraph(by_type, list(self.csr), self._hop, self._shared_numberings)
        return out if self.is_hetero else output_of_one_type(out)

    def _hop(self, kind: EdgeType, targets: Tensor, fanout: int, seed: int = 0, limit: Tensor | None = None) -> Neighbors:
        source, _, target = kind
        choices: dict[str, Any] = {"seed": seed_of_type(seed, list(self.csr).index(kind)), "keys": targets}
        if fanout != -1:
            choices["replace"] = self.replace
        if kind in self.weight:
            choices["weight"] = self.weight[kind]
        if self._ids:
            choices["source_keys"] = self._ids[source]
        if self.disjoint:  # targets are copies in trees, see sample_trees
            tree, targets = targets // self.num_nodes[target], targets % self.num_nodes[target]
            if kind in self.time and limit is not None:
                choices.update(time=self.time[kind], until=limit[tree], strategy=self.strategy)
        return sample_neighbors(self.csr[kind], targets, fanout, **choices)

    @property
    def _shared_numberings(self) -> dict[NodeType, Numbering]:
        if not self._numberings:
            self._numberings = {name: Numbering(size) for name, size in self.num_nodes.items()}
        return self._numberings

    def _check_seeds(self, seeds: Mapping[NodeType, Tensor], until: Mapping[NodeType, Any]) -> None:
        if not sum(map(len, seeds.values())):
            raise ValueError("The seeds must be at least one node, got none.")
        for name, ids in seeds.items():
            if name not in self.num_nodes:
                raise ValueError(f"No edge type has nodes of type {name!r}. Use one of {sorted(self.num_nodes)}.")
            check_ids(ids, self.num_nodes[name], "Seeds")
            times = until.get(name)
            if self.time and (times is None or len(times) != len(ids)):
                raise ValueError(
                    f"Each of {len(ids)} seeds must have a time, because edges have times, got "
                    f"{'none' if times is None else len(times)}. Set input_time of the loader."
                )

    # Called by PyG's loaders. The random seed comes from torch's generator, which is separate in each worker.

    @override
    def sample_from_nodes(self, inputs: NodeSamplerInput) -> SamplerOutput | HeteroSamplerOutput:
        named = inputs.input_type is not None
        seeds = {inputs.input_type: inputs.node} if named else inputs.node
        out = self._sample(seeds, {inputs.input_type: inputs.time} if named else inputs.time)
        out.metadata = (inputs.input_id, inputs.time)
        return out

    @override
    def sample_from_edges(
        self, inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput | HeteroSamplerOutput:
        num_nodes: Any = self.num_nodes if self.is_hetero else self.num_nodes[ONE_TYPE[0]]
        return edge_sample(inputs, self._sample, num_nodes, self.disjoint, None, neg_sampling)

    def _sample(self, seeds: Any, seed_time: Any = None, **_: Any) -> SamplerOutput | HeteroSamplerOutput:
        return self.sample(seeds, int(torch.randint(2**62, ())), seed_time)


def output_of_one_type(out: HeteroSamplerOutput) -> SamplerOutput:
    names = "node", "row", "col", "edge", "batch", "num_sampled_nodes", "num_sampled_edges"
    by_type = {name: getattr(out, name) for name in names}
    return SamplerOutput(**{name: None if of is None else next(iter(of.values())) for name, of in by_type.items()})


def _by_type(values: Tensor | Mapping[EdgeType, Tensor] | None) -> dict[EdgeType, Tensor]:
    if values is None:
        return {}
    return {ONE_TYPE: values} if isinstance(values, Tensor) else dict(values)


def seed_of_type(seed: int, number: int) -> int:
    """Returns the random seed for an edge type: types share node ids, and the draws of a node must differ between types."""
    return seed + 0x9E3779B9 * number


def _num_nodes(matrices: Mapping[EdgeType, CSR]) -> dict[NodeType, int]:
    if not matrices:
        raise ValueError("The graph must have at least one edge type, got none.")
    sizes: dict[NodeType, int] = {}
    for kind, csr in matrices.items():
        for name, size in ((kind[0], csr.num_cols), (kind[2], csr.num_rows)):
            if sizes.setdefault(name, size) != size:
                raise ValueError(f"Edge types must agree on nodes of type {name!r}, got {size} ({kind}) and {sizes[name]}.")
    return sizes


def fanouts_by_type(num_neighbors: Any, kinds: list[EdgeType]) -> dict[EdgeType, list[int]]:
    """Returns :func:`checked_fanouts` of each edge type of a graph; raises ValueError for other types."""
    checked = checked_fanouts(num_neighbors)
    by_type = checked if isinstance(checked, dict) else dict.fromkeys(kinds, checked)
    if set(by_type) != set(kinds):
        raise ValueError(f"Fan-outs are given for {sorted(by_type)}, but the edge types are {sorted(kinds)}.")
    return {kind: by_type[kind] for kind in kinds}


# GraphSAINT: functions that choose the nodes of a batch (Zeng et al., ICLR 2020); NeighborSampler.induced makes the batch. Each
# returns distinct nodes in ascending order. Matrices have in-edges of graphs whose edges go both ways, as in the paper.


def saint_nodes(csr: CSR, count: int, seed: int = 0) -> Tensor:
    """Returns the nodes of `count` draws with probabilities proportional to their degree."""
    return csr.indices[_draws(csr.num_edges, count, seed)].long().unique()


def saint_edges(csr: CSR, count: int, seed: int = 0) -> Tensor:
    """Returns the ends of `count` drawn edges, with probabilities proportional to the sum of the inverse degrees of both ends."""
    target = csr.row_of_slot().long()
    source = csr.indices.long()
    odds = 1 / csr.indptr.diff().double()[target] + 1 / torch.bincount(source, minlength=csr.num_cols).double()[source]
    # multinomial is limited to 2^24 edges; a search is not.
    heap = odds.cumsum(0)
    points = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * heap[-1]
    drawn = torch.searchsorted(heap, points).clamp_(max=csr.num_edges - 1)
    return torch.cat([source[drawn], target[drawn]]).unique()


def saint_walks(csr: CSR, count: int, steps: int, seed: int = 0) -> Tensor:
    """Returns the nodes of `count` walks of `steps` steps, from roots drawn uniformly."""
    return random_walks(csr, _draws(csr.num_rows, count, seed), steps, seed).unique()


def saint_norms(sampler: NeighborSampler, draw: Callable[[int], Tensor], samples: int) -> tuple[Tensor, Tensor]:
    """Returns weights that correct for the sampling frequency of nodes and edges, estimated from samples (section 3.2).

    Args:
        sampler: sampler of the graph.
        draw: function that returns the nodes of a sample for a random seed, such as ``lambda seed: saint_nodes(csr, 6000,
            seed)``.
        samples: number of samples.

    Returns:
        For each node, the factor of its loss in a sum over a batch, float32 ``[N]``. For each edge, the factor of its message in
            a sum over in-edges, float32 ``[E]`` in list order. This factor is the inverse of the share of its target's samples
            that include the edge. Nodes and edges that were never drawn count as drawn 0.1 times, as in PyG.
    """
    [csr] = sampler.csr.values()
    nodes, edges = torch.zeros(csr.num_rows), torch.zeros(csr.num_edges)
    for seed in range(samples):
        out = sampler.induced(draw(seed))
        nodes[out.node] += 1
        edges[out.edge] += 1
    target = csr.unpermute(csr.row_of_slot()).long()
    return samples / nodes.clamp(min=0.1) / csr.num_rows, nodes.clamp(min=0.1)[target] / edges.clamp(min=0.1)


def _draws(size: int, count: int, seed: int) -> Tensor:
    if not size:
        raise ValueError("There is nothing to draw from: the graph is empty.")
    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(seed))
