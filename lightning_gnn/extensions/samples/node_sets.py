"""Node sets of a graph with samples: all nodes, or the nodes of each type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.data.shards import CutInfo, Graph, Shard
from lightning_gnn.data.sources import MASKS
from lightning_gnn.extensions.samples.formats import ALL_NODES


def rows_of_parts(of: CutInfo) -> dict[str, list[np.ndarray]]:
    """Returns the original ids of the nodes of each part, by node type."""
    types = of.types
    return {
        name if types.is_hetero else ALL_NODES: np.split(of.n_id[types.place(name)].numpy(), types.offsets(name)[1:-1])
        for name in types.nodes
    }


def count_nodes(graph: Graph) -> dict[str, int]:
    """Returns the number of nodes of a graph, by node type."""
    if isinstance(graph, HeteroData):
        return {name: graph[name].num_nodes for name in graph.node_types}
    return {ALL_NODES: graph.num_nodes}


def local_sizes(shard: Shard) -> dict[str, int]:
    """Returns the number of local nodes of each type."""
    return {name: len(ids[shard.rank]) for name, ids in rows_of_parts(shard).items()}


def _stores_of(shard: Shard) -> dict[NodeType | EdgeType, dict[str, Any]]:
    """Returns the attributes of a graph with types, without absent masks.

    The number of nodes is left out: PyG then counts the rows of ``n_id``, under row semantics of all ranks.
    """
    absent = ["num_nodes", *(name for name in MASKS if not sum(shard.mask_counts[name]))]
    stores = shard.stores(shard.batch)
    return {kind: {name: value for name, value in store.items() if name not in absent} for kind, store in stores.items()}


def names_of_graph(shard: Shard) -> set[str]:
    """Returns the names of attributes of a graph with types, as in samples, and of its types."""
    stores = _stores_of(shard)
    return {f"{kind}.{name}" for kind in shard.types.nodes for name in (*stores[kind], "num_nodes")} | {*shard.types.nodes}


class TypedSampleBatch(HeteroData):
    """Batch of samples on a rank's part of a graph with types."""

    @property
    def total_size(self) -> int:
        """Number of samples of the global batch."""
        return int(self.sample_info.total)

    @property
    def sample_tensors(self) -> Iterator[tuple[Tensor, NodeType | None, int | None]]:
        """Tensors of the samples, with the type and the dimension of their nodes; None for one value per sample."""
        for name, dim in self.sample_info.node_dims.items():
            kind, _, of_kind = name.rpartition(".")
            yield (self[kind][of_kind] if kind else getattr(self, name)), kind, dim

    def __iter__(self) -> Iterator[Tensor]:
        """Yields the tensors of the samples, from which Lightning infers the batch size on one device."""
        return (x for x, *_ in self.sample_tensors)


def typed_batch(shard: Shard, tensors: Mapping[str, Tensor], info: Any) -> TypedSampleBatch:
    """Returns a batch of samples on a part of a graph with types.

    Args:
        shard: part of the graph.
        tensors: tensors of the samples by name, such as ``"grid.x"``.
        info: samples of the batch, a :class:`~lightning_gnn.extensions.samples.loader.SampleInfo`.
    """
    batch = TypedSampleBatch()
    for kind, values in _stores_of(shard).items():
        batch[kind].update(values)
    for name, value in tensors.items():
        kind, _, of_kind = name.rpartition(".")
        if kind:
            batch[kind][of_kind] = value
        else:
            setattr(batch, name, value)
    batch.sample_info = info
    return batch
