"""Shards of graphs with types: see :mod:`lightning_gnn.data.shards`.

N local nodes, H halo nodes of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType, NodeType
from typing_extensions import override

from lightning_gnn.data.lazy_ids import lazy_ids
from lightning_gnn.data.shards import BatchRows, Cut, Shard, edge_stores, input_type_of, only_shard, predicted_edges
from lightning_gnn.partition.layout import Replicas, Types
from lightning_gnn.partition.shard import Ids


@dataclass(frozen=True)
class TypedShard(Shard):
    """Shard of a graph with types."""

    @property
    @override
    def edge_type(self) -> EdgeType | None:
        return predicted_edges(edge_stores(self.batch)) if isinstance(self.batch, HeteroData) else None

    @override
    def sizes(self, rank: int) -> tuple[int, ...]:
        return *(int(of[rank]) for of in self.types.nodes.values()), *super().sizes(rank)

    @override
    def masks_and_labels(self, batch: Any) -> Any:
        return batch[self.types.input_type] if isinstance(batch, HeteroData) else batch

    @override
    def stores(self, batch: Any) -> dict[Any, Any]:
        if not isinstance(batch, HeteroData):
            return {}
        return {kind: batch[kind] for kind in (*batch.node_types, *batch.edge_types)}

    @override
    def nodes_held(self) -> dict[Any, BatchRows]:
        of = self.types.nodes.items()
        return {name: self._rows_of_kind(f"nodes of {name!r}", self.batch[name].n_id, self.n_id, name, each) for name, each in of}

    @override
    def edges_held(self) -> dict[Any, BatchRows]:
        found = {}
        for kind, counts in self.types.edges.items():
            held = self._rows_of_kind(f"edges of {kind}", self.batch[kind].e_id, self.e_id, kind, counts)
            found[kind] = held._replace(targets=kind[2])
        return found

    def _rows_of_kind(self, name: str, ids: Tensor, all_ids: Tensor, kind: NodeType | EdgeType, counts: Ids) -> BatchRows:
        return BatchRows(name, ids, all_ids[self.types.place(kind)], counts.tolist(), int(counts[self.rank]))

    @override
    def versions(self) -> dict[str, int]:
        return {}

    def edge_shard(self, kind: EdgeType, rank: int) -> Shard:
        """Returns the shard of `rank` for one edge type, from the typed shard of `rank`.

        It is a graph whose nodes have the source type and whose edges end at rows of :attr:`targets`. It shares the tensors of
        the batch.
        """
        source, _, target = kind
        types, number, nodes = self.types, list(self.types.nodes).index(kind[0]), self.batch[kind[0]]
        halos = tuple(types.ids(halo[types.numbers(halo) == number]) for halo in self.halos)
        counts, edge_counts = (tuple(of[name].tolist()) for of, name in ((types.nodes, source), (types.edges, kind)))
        x = nodes.x if "x" in nodes else torch.empty(counts[rank], 0, device=nodes.n_id.device)
        edges = self.batch[kind]
        batch = Data(x=x, edge_index=edges.edge_index, n_id=nodes.n_id, e_id=edges.e_id)
        if "edge_weight" in edges:
            batch.edge_weight = edges.edge_weight
        begin = int(types.begins(kind)[rank])
        holders = None if self.holders is None else self.holders[begin : begin + edge_counts[rank]]
        return replace(
            self,
            batch=batch,
            halos=halos,
            n_id=self.n_id[types.place(source)],
            e_id=self.e_id[types.place(kind)],
            counts=counts,
            edge_counts=edge_counts,
            rows=counts,
            edges=edge_counts,
            holders=holders,
            targets=tuple(types.nodes[target].tolist()),
        )


@dataclass(frozen=True)
class TypedCut(Cut):
    """Partitioned graph with types."""

    _shard_class = TypedShard

    @property
    @override
    def edge_type(self) -> EdgeType | None:
        return predicted_edges({kind: self.attributes[self.types.key(kind)] for kind in self.types.edges})

    @override
    def _empty_graph(self) -> HeteroData:
        return HeteroData()

    @override
    def _store_of(self, graph: HeteroData, kind: NodeType | EdgeType) -> Any:
        return graph[kind]

    @override
    def shard(self, rank: int, replicas: Replicas | None = None, with_edges: bool = True) -> Shard:
        types, batch = self.types, HeteroData()
        for kind in (*types.nodes, *types.edges):
            rows, into = slice(*types.offsets(kind)[rank : rank + 2]), batch[kind]
            for name, value in self.attributes[types.key(kind)].items():
                into[name] = self.in_batches(name, value[rows]) if with_edges else value[rows]
            if isinstance(kind, str):
                into.n_id = self.ids_of(kind, rows)
            else:
                into.e_id = lazy_ids(self.e_id[types.place(kind)][rows], "e_id")
        holders = None
        if with_edges:
            edge_index = self.edge_index_of(rank)
            local = self._rows_of_types(rank).astype(edge_index.dtype)
            for kind, counts in types.edges.items():
                begin = int(types.begins(kind)[rank])
                ids = torch.from_numpy(local[edge_index[:, begin : begin + int(counts[rank])]])
                batch[kind].edge_index = lazy_ids(ids, "edge_index")
            for name, counts in types.nodes.items():
                if "x" not in batch[name]:
                    batch[name].num_nodes = int(counts[rank])
            holders = None if self.holders is None else self.holders[slice(*self.edge_offsets[rank : rank + 2])]
        return self._shard_of(rank, batch, self.halos, self.offsets, np.diff(self.edge_offsets), holders)

    def _rows_of_types(self, rank: int) -> Ids:
        """Returns the row within its type of each local and halo node of `rank`: local nodes first, ``[N + H]``."""
        numbers, counts = self.types.numbers(self.halos[rank]), [int(of[rank]) for of in self.types.nodes.values()]
        halo = np.empty_like(numbers)
        for number, owned in enumerate(counts):
            here = numbers == number
            halo[here] = owned + np.arange(here.sum())
        return np.concatenate([*map(np.arange, counts), halo]).astype(np.int64)


def whole_graph_with_types(data: HeteroData, input_type: NodeType | None) -> Shard:
    """Returns the whole graph as the shard of a single rank, with ids of nodes and edges."""
    batch = data.clone()
    for name in batch.node_types:
        batch[name].n_id = torch.arange(batch[name].num_nodes)
    for kind in batch.edge_types:
        batch[kind].e_id = torch.arange(batch[kind].edge_index.size(1))
    n_ids = {name: batch[name].n_id for name in batch.node_types}
    e_ids = {kind: batch[kind].e_id for kind in batch.edge_types}
    nodes, edges = ({kind: np.array([len(ids)]) for kind, ids in of.items()} for of in (n_ids, e_ids))
    types = Types(nodes, edges, input_type_of(data, input_type))
    return only_shard(TypedShard, batch, data, torch.cat([*n_ids.values()]), torch.cat([*e_ids.values()]), types)
