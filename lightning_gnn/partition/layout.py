"""Layouts, which strategies request from the datamodule, and node and edge types of shards.

P ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.registry import PARTITIONERS

Counts = NDArray[np.int64]

ONE_TYPE: EdgeType = ("node", "to", "node")
"""Edge type of a homogeneous graph; its node type is ``"node"``."""


@dataclass(frozen=True)
class Types:
    """Numbers of nodes and edges of each type and rank.

    Rows of a rank are its nodes of the first type, then its nodes of the second, and so on, and similarly its edges. In addition,
    nodes of one type have ids from 0 on, first the nodes of rank 0, then of rank 1, and so on. The same holds for edges.

    Attributes:
        nodes, edges: counts by type, int64 ``[P]``, in the order of the types.
        input_type: node type of the seed nodes.
        is_hetero: whether the graph is heterogeneous, possibly with a single type.
    """

    nodes: Mapping[NodeType, Counts]
    edges: Mapping[EdgeType, Counts]
    input_type: NodeType
    is_hetero: bool = True

    @classmethod
    def none(cls, nodes: Counts, edges: Counts) -> Types:
        """Returns the types of a homogeneous graph with these numbers of nodes and edges of each rank."""
        return cls({ONE_TYPE[0]: nodes}, {ONE_TYPE: edges}, ONE_TYPE[0], is_hetero=False)

    def _of(self, kind: NodeType | EdgeType) -> Mapping[Any, Counts]:
        return self.nodes if isinstance(kind, str) else self.edges

    def total(self, kind: NodeType | EdgeType) -> int:
        return int(self._of(kind)[kind].sum())

    def offsets(self, kind: NodeType | EdgeType) -> Counts:
        """Returns the first id of a type on each rank, and the end, ``[P + 1]``."""
        return np.concatenate([[0], np.cumsum(self._of(kind)[kind])])

    def begins(self, kind: NodeType | EdgeType) -> Counts:
        """Returns the first position of a type in the rows or edges of each rank, ``[P]``."""
        of = self._of(kind)
        before = takewhile(lambda name: name != kind, of)
        return sum((of[name] for name in before), np.zeros_like(of[kind]))

    def place(self, kind: NodeType | EdgeType) -> slice:
        """Returns the range of a type in a list of all nodes or edges, type after type."""
        first = int(self.begins(kind).sum())
        return slice(first, first + self.total(kind))

    def key(self, kind: NodeType | EdgeType) -> str:
        """Returns the key of a type's attributes: type names may not be valid in file names."""
        what = "node" if isinstance(kind, str) else "edge"
        return f"{what}{list(self._of(kind)).index(kind)}" if self.is_hetero else what

    def ids(self, rows: Counts) -> Counts:
        """Returns the ids within their types of nodes given by their rows, ``[n]``, over all ranks."""
        block = self._blocks(rows)
        firsts = np.stack([self.offsets(name)[:-1] for name in self.nodes], 1).ravel()
        return rows - self._block_offsets()[block] + firsts[block]

    def numbers(self, rows: Counts) -> Counts:
        """Returns the type numbers of nodes given by their rows, ``[n]``."""
        return self._blocks(rows) % len(self.nodes)

    def _block_offsets(self) -> Counts:
        """Returns the first row of each block, the nodes of a type on a rank, and the end, ``[P * node types + 1]``."""
        return np.concatenate([[0], np.cumsum(np.stack(list(self.nodes.values()), 1))])

    def count(self, halos: Sequence[Counts]) -> tuple[Counts, Counts, Counts, Counts]:
        """Returns local nodes, halo nodes, sent rows and edges of each rank and type, ``[P, node or edge types]`` each.

        `halos` are the rows of the halo nodes of each rank, ascending.
        """
        rows, edges = (np.stack([*each.values()], 1) for each in (self.nodes, self.edges))
        of_owners = [np.diff(np.searchsorted(halo, self._block_offsets())).reshape(rows.shape) for halo in halos]
        return rows, np.stack([each.sum(0) for each in of_owners]), np.sum(of_owners, 0), edges

    def count_held(self, holders: Tensor) -> Counts:
        """Returns the edges that each rank computes, by type, ``[P, edge types]``, given the rank of each edge ``[E]``."""
        edges = np.stack([*self.edges.values()], 1)
        pieces = np.split(holders.numpy(), np.cumsum(edges)[:-1])  # edges of a type whose targets have one owner
        held = np.stack([np.bincount(piece, minlength=len(edges)) for piece in pieces])
        return held.reshape(*edges.shape, -1).sum(0).T

    def _blocks(self, rows: Counts) -> Counts:
        return np.searchsorted(self._block_offsets()[:-1], rows, side="right") - 1

    def by_name(self) -> dict[str, list[int]]:
        """Returns the nodes and edges of each type and rank, by type name."""
        nodes = {f"{name} nodes": counts.tolist() for name, counts in self.nodes.items()}
        return nodes | {" ".join(kind): counts.tolist() for kind, counts in self.edges.items()}

    def as_dict(self) -> dict[str, Any] | None:
        """Returns plain values for :func:`types_of`; None for a homogeneous graph."""
        if not self.is_hetero:
            return None
        return {
            "nodes": [[name, counts.tolist()] for name, counts in self.nodes.items()],
            "edges": [[list(kind), counts.tolist()] for kind, counts in self.edges.items()],
            "input_type": self.input_type,
        }


def types_of(manifest: Mapping[str, Any]) -> Types:
    """Returns the numbers of nodes and edges of each type and rank from a manifest."""
    values = manifest.get("types")
    if values is None:
        return Types.none(np.diff(manifest["offsets"]), np.diff(manifest["edge_offsets"]))
    nodes = {name: np.asarray(counts, np.int64) for name, counts in values["nodes"]}
    edges: dict[EdgeType, Counts] = {tuple(kind): np.asarray(counts, np.int64) for kind, counts in values["edges"]}
    return Types(nodes, edges, values["input_type"])


Groups = tuple["int | Groups", ...]
"""Ranks as nested tuples: ``((0, 1), (2, 3))`` are two machines with two ranks each; see ``Topology.groups``."""

NO_TYPES = (
    'A HeteroData requires strategy="dgcl", "vertex_cut" or "spmm_1d", without replicas, caches, new plans or whole blocks, or '
    'strategy="sampling", which has mini-batch steps. For other strategies, try `.to_homogeneous()`, whose edge_type is an '
    "argument of RGCNConv and similar convs."
)


KAMINPAR = ("kaminpar", "kaminpar_compressed")

METHODS = ("auto", "metis", "metis_masks", "metis_cover", *KAMINPAR, *PARTITIONERS, "random", "contiguous")
"""Names of partitioning methods, see :func:`~lightning_gnn.partition.edge_cut.assign_nodes`."""


def by_machine(world_size: int, num_hosts: int) -> Groups | None:
    """Returns the ranks of each machine for machines of equal size; None for one machine."""
    per_host = world_size // num_hosts
    if num_hosts == 1 or world_size % num_hosts:
        return None
    return tuple(tuple(range(first, first + per_host)) for first in range(0, world_size, per_host))


@dataclass(frozen=True)
class Replicas:
    """Rows of other ranks that a rank also stores and computes, so that it need not receive them.

    Attributes:
        hops: distance of replicas from the nodes of the group: the number of propagations of the model.
        groups: ranks that share replicas, each rank once. There is no exchange between groups (DGCL section 3: every rank alone;
            Table 5, DGCL-R: the ranks of each machine).
    """

    hops: int
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LayoutSpec:
    """Layout of a graph over ranks.

    Attributes:
        kind: ``"whole"``: one rank has everything. ``"edge_cut"``: a rank has all in-edges of its local nodes. ``"vertex_cut"``:
            edges are assigned to ranks, and a node is owned by its master.
        parts: number of ranks.
        groups: groups between which the partitioner cuts first; None for equal cuts between all ranks.
        method: default method that assigns nodes, or the edges of a vertex cut, to ranks. None for
            :meth:`~lightning_gnn.data.loading.GraphSource.method`. See :func:`~lightning_gnn.partition.edge_cut.assign_nodes` and
            :func:`~lightning_gnn.strategies.vertex_cut.cutters.assign_edges`.
        replicas: additional rows of ranks. They are made when a rank reads its shard; the stored partition is the same.
        host_weight: in a vertex cut, cost of a replica on another machine relative to one on the same machine, 0 to 1.
        takes_types: whether the graph may be heterogeneous.
        samples: whether training steps use sampled neighborhoods, so that num_neighbors and a batch size apply.
        in_batches: whether no step of any stage reads the rank's own edges, which are then not loaded; None: only for
            heterogeneous graphs.
    """

    kind: Literal["whole", "edge_cut", "vertex_cut"]
    parts: int = 1
    groups: Groups | None = None
    method: str | None = "metis"
    replicas: Replicas | None = None
    host_weight: float = 0.0
    takes_types: bool = False
    samples: bool = field(default=False, compare=False)
    in_batches: bool | None = False

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise ValueError(f"A layout needs at least one part (got {self.parts}).")

    @classmethod
    def edge_cut(cls, parts: int) -> LayoutSpec:
        """Returns the layout of an edge cut for any graph."""
        return cls("edge_cut", parts, takes_types=True)

    def takes(self, has_types: bool) -> bool:
        """Returns whether the layout supports a heterogeneous (`has_types`) or homogeneous graph."""
        return self.takes_types or not has_types

    def reads_edges(self, types: Types) -> bool:
        """Returns whether a batch contains the edges of the rank's nodes."""
        return self.in_batches is False or (self.in_batches is None and not types.is_hetero)

    @property
    def storage_layout(self) -> LayoutSpec:
        """Layout in the partition directory, without the method and the replicas, which do not matter there."""
        return LayoutSpec(self.kind, self.parts, self.groups, host_weight=self.host_weight)

    def as_dict(self) -> dict[str, Any]:
        names = ("kind", "parts", "groups", "method", "host_weight", "takes_types")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayoutSpec:
        """Returns the layout from the result of :meth:`as_dict`, also after JSON."""
        return cls(**{**values, "groups": _as_groups(values["groups"])})


def _as_groups(groups: Any) -> Any:
    return tuple(map(_as_groups, groups)) if isinstance(groups, (list, tuple)) else groups


def devices(group: Groups | int) -> list[int]:
    return [group] if isinstance(group, int) else [device for each in group for device in devices(each)]


def has_equal_groups(groups: Groups | int) -> bool:
    """Returns whether sibling groups have equal numbers of devices, on all levels."""
    if isinstance(groups, int):
        return True
    return len({len(devices(each)) for each in groups}) <= 1 and all(map(has_equal_groups, groups))


def has_equal_machines(groups: Groups) -> bool:
    """Returns whether groups are several machines with equal numbers of devices, between which METIS cuts first by default."""
    return len(groups) > 1 and has_equal_groups(groups)


def levels(group: Groups | int) -> int:
    """Returns the number of nested cuts from a group to single devices."""
    return 0 if isinstance(group, int) else (len(group) > 1) + levels(group[0])


def checked_method(method: Any) -> str | NDArray[np.integer]:
    """Returns one of `METHODS`, or the rank of every node, int ``[N]``, whose values are checked at assignment."""
    if isinstance(method, str) and method in METHODS:
        return method
    wanted = f"partition must be {', '.join(map(repr, METHODS))} or the rank of every node"
    if isinstance(method, str):
        raise ValueError(f"{wanted} (got {method!r}).")
    try:
        part = np.asarray(method.cpu() if isinstance(method, Tensor) else method)
    except ValueError as error:
        raise ValueError(f"{wanted}, one integer each ({error}).") from error
    if part.ndim != 1:
        raise ValueError(f"{wanted}, one integer each (got shape {list(part.shape)}).")
    if not np.issubdtype(part.dtype, np.integer):
        raise ValueError(f"{wanted}: it must hold integers (got {part.dtype}).")
    return part
