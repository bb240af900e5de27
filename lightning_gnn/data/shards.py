"""Graph as one list of nodes and edges for partitioners, and the shard of each rank.

N nodes, E edges, P ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.data.lazy_ids import lazy_ids
from lightning_gnn.data.sources import (
    EDGE_MASKS,
    MASKS,
    GraphData,
    Kind,
    count_labeled,
    full_graph_left_out,
    is_labeled,
    kinds_of,
    left_out_of,
    num_classes,
)
from lightning_gnn.partition.layout import ONE_TYPE, LayoutSpec, Replicas, Types
from lightning_gnn.partition.shard import (
    EdgeCutPart,
    HaloPlan,
    Ids,
    Relabelling,
    ShortIds,
    edge_cut_parts,
    halo_plan,
    id_dtype,
    local_relabelling,
)
from lightning_gnn.private_torch import version_counter
from lightning_gnn.registry import feature

if TYPE_CHECKING:
    from lightning_gnn.partition.replicas import ReplicatedRows

Graph: TypeAlias = Data | HeteroData

_PIECE = 1 << 22


@dataclass(frozen=True)
class Orders:
    """Order of the nodes and edges of each type in a partitioned graph.

    Attributes:
        types: numbers of nodes and edges of each type and rank.
        by_type: original ids in relabeled order.
    """

    types: Types
    by_type: Mapping[NodeType | EdgeType, Ids]

    def n_id(self) -> Ids:
        """Returns the original node ids, type after type."""
        return np.concatenate([self.by_type[name] for name in self.types.nodes])

    def e_id(self) -> Ids:
        """Returns the original edge ids, type after type, in the smallest sufficient dtype."""
        found = np.concatenate([self.by_type[kind] for kind in self.types.edges])
        return found.astype(id_dtype(len(found)))

    @classmethod
    def homogeneous(cls, relabelling: Relabelling, num_edges: list[int], e_id: Ids) -> Orders:
        """Returns the order of a homogeneous graph; `num_edges` is the number of edges of each rank."""
        types = Types.none(np.diff(relabelling.offsets), np.array(num_edges))
        return cls(types, {ONE_TYPE[0]: relabelling.n_id, ONE_TYPE: e_id})


@dataclass(frozen=True)
class JoinedGraph:
    """Graph whose nodes of all types are one list, type after type, and whose edges are, too; also for homogeneous graphs.

    Attributes:
        edge_index: edges, int64 ``[2, E]``.
        num_nodes: N.
        node_kinds, edge_kinds: type number of each node and edge, int16 ``[N]`` and ``[E]``; None for a homogeneous graph.
        node_firsts, edge_firsts: first position of each type in these lists.
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
        if "_joined" in data.__dict__:  # in files
            return data.__dict__["_joined"]
        nodes = {name: data[name].num_nodes for name in data.node_types}
        edges = {kind: data[kind].edge_index.size(1) for kind in data.edge_types}
        node_firsts, edge_firsts = (dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist())) for sizes in (nodes, edges))
        ends = [data[kind].edge_index + torch.tensor([[node_firsts[kind[0]]], [node_firsts[kind[2]]]]) for kind in edges]
        node_type, edge_type = (
            np.repeat(np.arange(len(sizes), dtype=np.int16), list(sizes.values())) for sizes in (nodes, edges)
        )
        return cls(torch.cat(ends, 1).numpy(), sum(nodes.values()), node_type, edge_type, node_firsts, edge_firsts)

    def relabelling(self, part: np.ndarray, num_parts: int) -> Relabelling:
        """Returns the order of nodes by owner, ``[N]``: type after type on each rank, else neighbors close together."""
        found = local_relabelling(self.edge_index, part, num_parts)
        if self.node_kinds is None:
            return found
        rows = found.n_id
        return Relabelling(rows[np.lexsort((self.node_kinds[rows], part[rows]))], found.offsets)

    def parts(self, relabelling: Relabelling) -> Iterator[EdgeCutPart]:
        """Yields the parts of all ranks, with edges type after type."""
        for part in edge_cut_parts(self.edge_index, relabelling):
            if self.edge_kinds is None:
                yield part
                continue
            order = np.argsort(self.edge_kinds[part.edge_ids], kind="stable")
            yield replace(part, edge_index=part.edge_index[:, order], edge_ids=part.edge_ids[order])

    def masks_of(self, predicted: Predicted) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Returns the masks with labeled nodes, bool ``[N]``, and the masks with edges, ``[E]``, over all types."""
        nodes, edges, y = predicted.nodes, predicted.edges, predicted.nodes.get("y")
        of_nodes = {name: nodes[name] if y is None else nodes[name] & is_labeled(y) for name in MASKS}
        of_edges = {name: edges[name] for name in EDGE_MASKS if name in edges}
        return (
            {name: self._among_all(of, predicted.node_type) for name, of in of_nodes.items() if count_labeled(y, nodes[name])},
            {name: self._among_all(of, predicted.edge_type) for name, of in of_edges.items() if of.any()},
        )

    def _among_all(self, mask: Tensor, kind: NodeType | EdgeType | None) -> np.ndarray:
        """Returns a mask of the nodes or edges of a type as a mask over all types."""
        if self.node_firsts is None:
            return mask.numpy()
        firsts: Any = self.node_firsts if isinstance(kind, str) else self.edge_firsts
        found = np.zeros(self.num_nodes if isinstance(kind, str) else self.edge_index.shape[1], np.bool_)
        found[firsts[kind] :][: len(mask)] = mask.numpy()
        return found

    def types(self, part: np.ndarray, num_parts: int, input_type: NodeType) -> Types:
        """Returns the numbers of nodes and edges of each type and rank; for heterogeneous graphs."""
        assert self.node_firsts is not None and self.edge_firsts is not None
        ends = [*self.edge_firsts.values(), self.edge_index.shape[1]]
        targets = {kind: self.edge_index[1, low:high] for kind, (low, high) in zip(self.edge_firsts, pairwise(ends))}
        kinds = self.node_kinds
        nodes = {name: np.bincount(part[kinds == number], minlength=num_parts) for number, name in enumerate(self.node_firsts)}
        return Types(nodes, {kind: _count_owned(ids, part, num_parts) for kind, ids in targets.items()}, input_type)

    def orders(self, relabelling: Relabelling, edge_ids: list[Ids], part: np.ndarray, predicted: Predicted) -> Orders:
        """Returns the order of nodes and edges of a partitioned graph.

        Args:
            relabelling: order of nodes by owner.
            edge_ids: original edge ids of each rank, in order.
            part: owner of each node, ``[N]``.
            predicted: masks and labels of the graph.
        """
        nodes, edges, by_type = relabelling.n_id, np.concatenate(edge_ids), dict[NodeType | EdgeType, Ids]()
        if self.node_kinds is None or self.edge_kinds is None:
            return Orders.homogeneous(relabelling, list(map(len, edge_ids)), edges)
        for firsts, kinds, order in ((self.node_firsts, self.node_kinds, nodes), (self.edge_firsts, self.edge_kinds, edges)):
            for number, (name, first) in enumerate((firsts or {}).items()):
                by_type[name] = order[kinds[order] == number] - first
        return Orders(self.types(part, len(edge_ids), predicted.node_type), by_type)


def _count_owned(ids: Ids, part: np.ndarray, num_parts: int) -> Ids:
    """Returns the number of `ids` that each part owns; allocates nothing of the size of `ids`, which may be mapped."""
    pieces = (part[ids[begin : begin + _PIECE]] for begin in range(0, len(ids), _PIECE))
    return sum((np.bincount(piece, minlength=num_parts) for piece in pieces), np.zeros(num_parts, np.int64))


def attributes_of(data: Graph, kind: NodeType | EdgeType) -> dict[str, Tensor]:
    """Returns the tensors with one row per node or edge of a type, without ``edge_index``."""
    if isinstance(data, Data):
        what = "node" if isinstance(kind, str) else "edge"
        return {name: data[name] for name, found in kinds_of(data).items() if found == what}
    return {name: value for name, value in data[kind].items() if isinstance(value, Tensor) and name != "edge_index"}


def predicted_edges(of: Mapping[EdgeType, Container[str]]) -> EdgeType | None:
    """Returns the edge type whose edges are predicted, given the attributes of each edge type.

    It is the only type with an ``edge_val_mask`` or an ``edge_test_mask``, or else with an ``edge_train_mask``; None if there is
    no such type or several. For other types with an ``edge_train_mask``, its edges carry messages.
    """
    for names in (EDGE_MASKS[1:], EDGE_MASKS[:1]):
        having = [kind for kind, has in of.items() if any(name in has for name in names)]
        if having:
            return having[0] if len(having) == 1 else None
    return None


def input_type_of(data: HeteroData, requested: NodeType | None) -> NodeType:
    """Returns the node type whose nodes are predicted.

    It is the requested type, else the only type with a train_mask, else the targets of predicted edges, else the only type with
    labels.
    """
    types, edges = data.node_types, predicted_edges(edge_stores(data))
    if requested is not None:
        if requested not in types:
            raise ValueError(f"input_type={requested!r}, but the graph's node types are {types}.")
        return requested
    for name in ("train_mask", "y"):
        having = [kind for kind in types if name in data[kind]]
        if name == "y" and edges is not None:
            return edges[2]
        if len(having) == 1:
            return having[0]
        if having:
            raise ValueError(
                f"Node types {having} have a {name}. Set the type to predict: GraphDataModule(..., input_type={having[0]!r})."
            )
    raise ValueError(
        f"No node type of {types} has a train_mask. Set one, data['{types[0]}'].train_mask (bool, one entry per node), or use a "
        "random split of one type: GraphDataModule(..., split=(0.6, 0.2, 0.2), input_type=...). To predict links, split the "
        f"edges of one type: GraphDataModule(split_edges(data, edge_type={data.edge_types[0]}))."
    )


def edge_stores(data: HeteroData) -> dict[EdgeType, BaseStorage]:
    return {kind: data[kind] for kind in data.edge_types}


@dataclass(frozen=True)
class Predicted:
    """Masks and labels of a graph's predictions: of nodes, and of edges.

    Attributes:
        nodes, edges: attributes of all nodes and edges of the predicted types.
        node_type, edge_type: predicted types, see :func:`input_type_of` and :func:`predicted_edges`.
        has_types: whether the graph is heterogeneous.
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


class BatchRows(NamedTuple):
    """Nodes or edges of a batch: of all types, or of one type.

    Attributes:
        name: description for messages.
        ids: original ids, ``[rows]``.
        all_ids: original ids of all ranks' own rows, in rank order.
        counts: number of own rows of each rank.
        rows: number of rows of this rank, including replicas.
        replicas: whether any rank has replicas.
        targets: for edges, the node type of their targets.
    """

    name: str
    ids: Tensor
    all_ids: Tensor
    counts: Sequence[int]
    rows: int
    replicas: bool = False
    targets: Any = None


@dataclass(frozen=True, kw_only=True)
class CutInfo:
    """Properties of a partitioned graph that all ranks have.

    Attributes:
        n_id: original ids of all ranks' nodes in rank order, without replicas, int64 ``[N]``. In a heterogeneous graph, type
            after type, see :meth:`Cut.ids_of`.
        e_id: original ids of all ranks' edges in the same order, int64 ``[E]``, or int32 if sufficient.
        mask_counts: number of labeled nodes of each rank, by mask: the weights of a mean loss. In a heterogeneous graph, of the
            input type. For edge masks, if there are any, the number of edges, of :attr:`edge_type` in a heterogeneous graph.
        num_classes: number of classes of the whole graph's labels.
        types: numbers of nodes and edges of each type that each rank owns.
        digest: digest of the node assignment; equal on all ranks with shards of the same partition.
        report: partition quality, for logs.
    """

    n_id: Tensor
    e_id: Tensor
    mask_counts: Mapping[str, tuple[int, ...]]
    num_classes: int
    types: Types
    digest: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def edge_type(self) -> EdgeType | None:
        """Edge type whose edges are predicted; None without predicted edges, and for a homogeneous graph."""
        return None


@dataclass(frozen=True)
class Shard(CutInfo):
    """Shard of one rank.

    Attributes:
        batch: rows of the rank, local nodes first, then replicas. ``edge_index`` has local ids, with halo nodes last. ``n_id``
            and ``e_id`` are the original ids of its nodes and edges. It has ``num_owned`` and boolean node masks, False for
            replicas. Edge masks are unchanged: edges of replicas, whose targets are not local nodes, carry messages, too. For a
            heterogeneous graph, a ``HeteroData`` with the attributes of local nodes and their in-edges. Its ``edge_index`` has
            local ids of the end types, with halo nodes last, and is left out if steps read samples.
        rank: rank of this shard.
        halos: ids of the halo nodes of each rank, ascending, int64 ``[H]`` each; for planners. Ids number the rows of rank 0,
            then the rows of rank 1, and so on.
        counts, edge_counts: numbers of local nodes and their edges of each rank.
        rows, edges: numbers of nodes and edges in each rank's batch, including replicas.
        holders: in a vertex cut, the rank that computes each edge of the batch, ``[E_r]``; None if the owner of the target does.
        targets: number of target nodes that each rank owns, if targets are of another type than sources: see
            `TypedShard.of_edges`.
    """

    batch: Graph
    rank: int
    halos: tuple[np.ndarray, ...]
    counts: tuple[int, ...]
    edge_counts: tuple[int, ...]
    rows: tuple[int, ...]
    edges: tuple[int, ...]
    holders: Tensor | None = None
    targets: tuple[int, ...] | None = None
    join_ranks: ClassVar[Any] = None
    """Method that checks call in place of :func:`~lightning_gnn.checks.trial.join_ranks`; None: the function is called."""

    @cached_property
    def plan(self) -> HaloPlan:
        """Send indices and receive counts of the halo exchange; computed on demand, because sampled batches need none."""
        return halo_plan(self.rank, np.cumsum([0, *self.rows]), self.halos)

    @property
    def offsets(self) -> Ids:
        """First node of each rank and the end, ``[P + 1]``."""
        return np.cumsum([0, *self.counts])

    @property
    def target_offsets(self) -> Ids:
        """:attr:`offsets` of the targets of edges."""
        return np.cumsum([0, *(self.targets or self.counts)])

    def sizes(self, rank: int) -> tuple[int, ...]:
        """Returns the numbers of nodes and edges of a rank, without and with replicas; also for each node type."""
        return self.counts[rank], self.rows[rank], self.edge_counts[rank], self.edges[rank]

    def node_ids(self, rank: int) -> Ids:
        """Returns the relabeled id of each local and halo row of `rank`, the rank of this shard, ``[N + H]``."""
        return np.concatenate([np.arange(*self.offsets[rank : rank + 2]), self.halos[rank]])

    def target_ids(self, rank: int) -> Ids:
        """Returns the relabeled id of each target row of `rank`."""
        return np.arange(*self.target_offsets[rank : rank + 2])

    def masks_and_labels(self, batch: Graph) -> Any:
        """Returns the store of masks and labels of a batch: the batch itself, or its input type."""
        return batch

    def stores(self, batch: Any) -> dict[Any, Any]:
        """Returns the stores of node and edge attributes of a batch, by type; a common store is under None."""
        return {None: batch} if isinstance(batch, Data) else {}

    def nodes_held(self) -> dict[Any, BatchRows]:
        """Returns the nodes in the batch, by type; under None for a homogeneous graph."""
        batch, copied = self.batch, self.rows != self.counts
        return {None: BatchRows("nodes", batch.n_id, self.n_id, self.counts, self.rows[self.rank], copied)}

    def edges_held(self) -> dict[Any, BatchRows]:
        """Returns the edges in the batch, by type; under None for a homogeneous graph."""
        batch, copied = self.batch, self.edges != self.edge_counts
        return {None: BatchRows("edges", batch.e_id, self.e_id, self.edge_counts, self.edges[self.rank], copied)}

    def step_batch(self) -> Any:
        """Returns the batch of a step, a shallow copy: attributes that a step sets do not persist."""
        return copy.copy(self.batch)

    def versions(self) -> dict[str, int]:
        """Returns the version counter of each tensor of the batch, by name; empty for heterogeneous graphs: steps get samples."""
        return {name: version_counter(value) for name, value in self.batch.to_dict().items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class Cut(CutInfo):
    """Partitioned graph, from which shards are made.

    Attributes:
        offsets, edge_offsets: first node and first edge of each rank and the end, ``[P + 1]``, in relabeled order.
        edge_index_of: function that returns the edges of a rank in local ids, local nodes first, then halo nodes, ``[2, E_r]``,
            int32 if sufficient.
        halos: relabeled ids of the halo nodes of each rank, ascending.
        attributes: tensors by name, for ``"node"`` and ``"edge"`` in relabeled order, for ``"graph"`` unchanged. In a
            heterogeneous graph, by type keys, each in the order of its type's ids.
        scalars: attributes that are not tensors.
        left_out: by name, reasons why attributes of the user's graph are missing here.
        holders: in a vertex cut, the rank that computes each edge, int16 ``[E]`` in relabeled order.
        feature_dtype: dtype of ``x`` in batches; None for the stored dtype.
    """

    offsets: Ids
    edge_offsets: Ids
    edge_index_of: Callable[[int], ShortIds]
    halos: tuple[Ids, ...]
    attributes: Mapping[str, Mapping[str, Tensor]]
    scalars: Mapping[str, Any]
    left_out: Mapping[str, str]
    holders: Tensor | None = None
    feature_dtype: torch.dtype | None = None
    _shard_class: ClassVar[type[Shard]] = Shard

    def in_batches(self, name: str, values: Tensor) -> Tensor:
        """Returns rows of an attribute in the dtype of batches."""
        return values if name != "x" or self.feature_dtype is None else values.to(self.feature_dtype)

    def ids_of(self, kind: NodeType | EdgeType, rows: slice | Tensor = slice(None)) -> Tensor:
        """Returns original ids of a type's nodes or edges, int64, by default of all in relabeled order."""
        return (self.n_id if isinstance(kind, str) else self.e_id)[self.types.place(kind)][rows].long()

    @property
    def kinds(self) -> dict[str, Kind]:
        kinds: tuple[Kind, ...] = ("node", "edge", "graph")
        return {name: kind for kind in kinds for name in self.attributes[kind]}

    def edge_index(self) -> Ids:
        """Returns all edges in relabeled ids and order, int64 ``[2, E]``."""
        return np.concatenate([self.relabeled_edges(rank) for rank in range(len(self.halos))], 1)

    def relabeled_edges(self, rank: int) -> Ids:
        """Returns the edges of a rank in relabeled ids, int64 ``[2, E_r]``."""
        owned = np.arange(*self.offsets[rank : rank + 2])
        return np.concatenate([owned, self.halos[rank]])[self.edge_index_of(rank)]

    def ends(self, edges: Tensor, kind: EdgeType = ONE_TYPE) -> Tensor:
        """Returns sources and targets of edges of a type, ``[2, n]``.

        Ids of edges, int64 ``[n]``, and of nodes are relabeled ids within their types.
        """
        found = torch.empty((2, len(edges)), dtype=torch.long)
        begins = self.types.begins(kind)
        for rank, (low, high) in enumerate(pairwise(self.types.offsets(kind))):
            here = (edges >= low) & (edges < high)
            local = torch.from_numpy(self.edge_index_of(rank)[:, (edges[here] + int(begins[rank] - low)).numpy()])
            first, owned = int(self.offsets[rank]), int(self.offsets[rank + 1] - self.offsets[rank])
            ids = local.long() + first
            far = local >= owned
            ids[far] = torch.from_numpy(self.halos[rank][(local[far] - owned).numpy()])
            found[:, here] = torch.from_numpy(self.types.ids(ids.numpy()))
        return found

    def graph(self) -> Graph:
        """Returns the original graph in its original order, equal in every attribute."""
        types, whole = self.types, self._empty_graph()
        for kind in (*types.nodes, *types.edges):
            into, ids = self._store_of(whole, kind), self.ids_of(kind)
            for name, value in self.attributes[types.key(kind)].items():
                into[name] = torch.empty_like(value).index_copy_(0, ids, value)
            if isinstance(kind, str):
                if "x" not in into:
                    into.num_nodes = len(ids)
                continue
            places = enumerate(zip(types.begins(kind), types.edges[kind]))
            rows = np.concatenate([self.relabeled_edges(rank)[:, low : low + size] for rank, (low, size) in places], 1)
            ends = [self.ids_of(end)[types.ids(of)] for end, of in zip((kind[0], kind[2]), rows)]
            into.edge_index = torch.empty((2, len(ids)), dtype=torch.long).index_copy_(1, ids, torch.stack(ends))
        for name, value in (*self.attributes.get("graph", {}).items(), *self.scalars.items()):
            whole[name] = value
        return whole

    def _empty_graph(self) -> Any:
        return GraphData(self.kinds, self.left_out)

    def _store_of(self, graph: Any, kind: NodeType | EdgeType) -> Any:
        """Returns the store of a graph with the attributes of a type."""
        return graph

    def sizes(self, replicas: Replicas | None = None) -> list[tuple[int, int, int]]:
        """Returns numbers of rows, halo rows and edges of every rank's shard; with replicas, this reads all edges."""
        if replicas is None:
            offsets, halos, edges = self.offsets, self.halos, np.diff(self.edge_offsets)
        else:
            held = self._hold(replicas, self.edge_index())
            offsets, halos, edges = held.offsets, held.halos, held.num_edges
        return list(zip(np.diff(offsets).tolist(), map(len, halos), edges.tolist()))

    def _hold(self, replicas: Replicas, edge_index: Ids) -> ReplicatedRows:
        from lightning_gnn.partition.replicas import hold  # few runs need it

        return hold(edge_index, self.offsets, replicas)

    def shard(self, rank: int, replicas: Replicas | None = None, with_edges: bool = True) -> Shard:
        """Returns the shard of `rank`; replicas are copied. Without edges, nothing is copied from the partition directory."""
        halos, offsets = self.halos, self.offsets
        owned = slice(*offsets[rank : rank + 2])
        nodes: Any = owned
        edges: Any = slice(*self.edge_offsets[rank : rank + 2])
        num_edges = np.diff(self.edge_offsets)
        if replicas is None:
            edge_index = self.edge_index_of(rank) if with_edges else None
        else:
            everything = self.edge_index()
            held = self._hold(replicas, everything)
            edge_index, chosen = held.edges_of(rank, everything)
            nodes, edges = torch.from_numpy(held.rows[rank]), torch.from_numpy(chosen)
            halos, offsets, num_edges = held.halos, held.offsets, held.num_edges
        batch = GraphData(self.kinds, full_graph_left_out(self.left_out))
        if edge_index is not None:
            batch.edge_index = lazy_ids(torch.from_numpy(edge_index), "edge_index")
        rows = {"node": nodes, "edge": edges, "graph": slice(None)}
        for kind, values in self.attributes.items():
            for name, value in values.items():
                own = value[rows[kind]] if value.dim() else value
                batch[name] = self.in_batches(name, own) if with_edges else own
        for name, value in self.scalars.items():
            batch[name] = value
        batch.n_id, batch.num_owned = self.n_id[nodes], int(owned.stop - owned.start)
        if with_edges:
            batch.e_id = lazy_ids(self.e_id[edges], "e_id")
        if len(batch.n_id) > batch.num_owned:
            for name in MASKS:
                batch[name][batch.num_owned :] = False
        holders = None if self.holders is None else self.holders[edges]
        return self._shard_of(rank, batch, halos, offsets, num_edges, holders)

    def _shard_of(
        self, rank: int, batch: Graph, halos: tuple[Ids, ...], offsets: Ids, num_edges: Ids, holders: Tensor | None
    ) -> Shard:
        """Returns the shard of a batch; `offsets` ``[P + 1]`` and `num_edges` ``[P]`` include replicas."""
        return self._shard_class(
            batch=batch,
            rank=rank,
            halos=halos,
            counts=tuple(np.diff(self.offsets).tolist()),
            edge_counts=tuple(np.diff(self.edge_offsets).tolist()),
            rows=tuple(np.diff(offsets).tolist()),
            edges=tuple(num_edges.tolist()),
            holders=holders,
            **{each.name: getattr(self, each.name) for each in fields(CutInfo)},
        )


def cut_of(types: Types, **parts: Any) -> Cut:
    """Returns the partitioned graph of these types, with its other attributes."""
    return (feature("TypedCut") if types.is_hetero else Cut)(types=types, **parts)


def cut_graph(
    data: Graph, part: np.ndarray, num_parts: int, holders: np.ndarray | None = None, input_type: NodeType | None = None
) -> Cut:
    """Returns the partitioned graph of `data` in memory, equal to a graph in the partition directory.

    Args:
        data: result of :func:`~lightning_gnn.data.sources.prepare_graph` or
            :func:`~lightning_gnn.extensions.node_types.graph.prepare_hetero`.
        part: owner of each node, ``[N]``, values 0 to `num_parts` - 1; in a heterogeneous graph, type after type.
        num_parts: number of ranks.
        holders: in a vertex cut, the rank that computes each edge, ``[E]``.
        input_type: predicted node type of a heterogeneous graph.
    """
    joined, predicted = JoinedGraph.of(data), Predicted.of(data, input_type)
    relabelling = joined.relabelling(part, num_parts)
    pieces = list(joined.parts(relabelling))
    edge_ids = [piece.edge_ids for piece in pieces]
    orders = joined.orders(relabelling, edge_ids, part, predicted)
    attributes = {
        orders.types.key(kind): {name: value[torch.from_numpy(order)] for name, value in attributes_of(data, kind).items()}
        for kind, order in orders.by_type.items()
    }
    scalars, left_out = {}, {}
    if isinstance(data, Data):
        attributes["graph"] = {name: data[name] for name, kind in kinds_of(data).items() if kind == "graph"}
        scalars = {name: value for name, value in data.to_dict().items() if not isinstance(value, Tensor)}
        left_out = left_out_of(data)
    return cut_of(
        orders.types,
        offsets=relabelling.offsets,
        edge_offsets=np.cumsum([0, *map(len, edge_ids)]),
        edge_index_of=lambda rank: pieces[rank].edge_index,
        halos=tuple(piece.halo for piece in pieces),
        n_id=torch.from_numpy(orders.n_id()),
        e_id=torch.from_numpy(orders.e_id()),
        attributes=attributes,
        scalars=scalars,
        left_out=left_out,
        mask_counts=mask_counts(predicted, orders),
        num_classes=num_classes(predicted.nodes.get("y")),
        holders=None if holders is None else torch.from_numpy(holders.astype(np.int16)[np.concatenate(edge_ids)]),
    )


def split_graph(
    data: Graph, part: np.ndarray, layout: LayoutSpec, holders: np.ndarray | None = None, input_type: NodeType | None = None
) -> list[Shard]:
    """Returns the shards of all ranks in memory, equal to shards from the partition directory; see :func:`cut_graph`."""
    cut = cut_graph(data, part, layout.parts, holders, input_type)
    return [cut.shard(rank, layout.replicas) for rank in range(layout.parts)]


def whole_graph(data: Graph, input_type: NodeType | None = None) -> Shard:
    """Returns the whole graph as the only rank's shard, the reference for all schemes."""
    if isinstance(data, HeteroData):
        return feature("whole_graph_with_types")(data, input_type)
    batch = GraphData(kinds_of(data), full_graph_left_out(left_out_of(data)), **data.to_dict())
    batch.num_owned = data.x.size(0)
    batch.n_id, batch.e_id = torch.arange(batch.num_owned), torch.arange(data.edge_index.size(1))
    types = Types.none(np.array([len(batch.n_id)]), np.array([len(batch.e_id)]))
    return only_shard(Shard, batch, data, batch.n_id, batch.e_id, types)


def restore_order(shard: Shard, graph: Graph, input_type: NodeType | None = None) -> Shard:
    """Returns the only part of a graph with nodes and edges in the order of the graph, on which a model may depend."""
    whole = whole_graph(graph, input_type)
    return replace(shard, batch=whole.batch, n_id=whole.n_id.clone(), e_id=whole.e_id.clone())  # steps place the ids in a batch


def only_shard(kind: type[Shard], batch: Graph, data: Graph, n_id: Tensor, e_id: Tensor, types: Types) -> Shard:
    """Returns the shard of the only rank."""
    counts, edge_counts, nothing = (len(n_id),), (len(e_id),), np.empty(0, np.int64)
    orders = Orders(types, {kind: np.arange(types.total(kind)) for kind in (*types.nodes, *types.edges)})
    predicted = Predicted.of(data, types.input_type)
    return kind(
        batch=batch,
        rank=0,
        halos=(nothing,),
        n_id=n_id,
        e_id=e_id,
        counts=counts,
        edge_counts=edge_counts,
        rows=counts,
        edges=edge_counts,
        mask_counts=mask_counts(predicted, orders),
        num_classes=num_classes(predicted.nodes.get("y")),
        types=types,
    )


def mask_counts(predicted: Predicted, orders: Orders) -> dict[str, tuple[int, ...]]:
    """Returns the number of labeled nodes that each rank owns, by mask; for masks of predicted edges, the number of edges."""

    def parts(kind: NodeType | EdgeType) -> list[Tensor]:
        return [torch.from_numpy(ids) for ids in np.split(orders.by_type[kind], orders.types.offsets(kind)[1:-1])]

    nodes, edges, edge_type = predicted.nodes, predicted.edges, predicted.edge_type
    y, rows = nodes.get("y"), parts(predicted.node_type)
    found = {name: tuple(count_labeled(None if y is None else y[ids], nodes[name][ids]) for ids in rows) for name in MASKS}
    masks = [name for name in EDGE_MASKS if name in edges]
    if edge_type is not None and masks:
        ids_of_parts = parts(edge_type)
        found |= {name: tuple(int(edges[name][ids].sum()) for ids in ids_of_parts) for name in masks}
    return found
