"""What a strategy asks of the datamodule: which parts of the graph each rank shall hold; and the types of what parts hold.

P parts.
"""

from __future__ import annotations

from collections.abc import Mapping
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
"""The edge type of a graph that has no types; its node type is ``"node"``."""


@dataclass(frozen=True)
class Types:
    """How many nodes and edges of each type lie in each part.

    Rows of a part are its nodes of the first type, then those of the second, and so on; so are its edges. Beside that, nodes of
    one type have ids of their own, from 0 on: those of part 0, then those of part 1; so have edges.

    Attributes:
        nodes, edges: by type, int64 ``[P]``, in the order of the types.
        input_type: the node type that seeds are of.
        is_hetero: the graph has types, even if only one.
    """

    nodes: Mapping[NodeType, Counts]
    edges: Mapping[EdgeType, Counts]
    input_type: NodeType
    is_hetero: bool = True

    @classmethod
    def none(cls, nodes: Counts, edges: Counts) -> Types:
        """Returns what stands for the types of a graph without any, which has so many nodes and edges in each part."""
        return cls({ONE_TYPE[0]: nodes}, {ONE_TYPE: edges}, ONE_TYPE[0], is_hetero=False)

    def _of(self, kind: NodeType | EdgeType) -> Mapping[Any, Counts]:
        return self.nodes if isinstance(kind, str) else self.edges

    def total(self, kind: NodeType | EdgeType) -> int:
        return int(self._of(kind)[kind].sum())

    def offsets(self, kind: NodeType | EdgeType) -> Counts:
        """Returns a type's first id in each part, and the end, ``[P + 1]``."""
        return np.concatenate([[0], np.cumsum(self._of(kind)[kind])])

    def begins(self, kind: NodeType | EdgeType) -> Counts:
        """Returns where a type begins among the rows, or the edges, of each part, ``[P]``."""
        of = self._of(kind)
        before = takewhile(lambda name: name != kind, of)
        return sum((of[name] for name in before), np.zeros_like(of[kind]))

    def place(self, kind: NodeType | EdgeType) -> slice:
        """Returns where a type lies in a list of all nodes, or edges, that has type after type."""
        first = int(self.begins(kind).sum())
        return slice(first, first + self.total(kind))

    def key(self, kind: NodeType | EdgeType) -> str:
        """Returns the name under which attributes of a type are kept: types may have names that files cannot have."""
        what = "node" if isinstance(kind, str) else "edge"
        return f"{what}{list(self._of(kind)).index(kind)}" if self.is_hetero else what

    def ids(self, rows: Counts) -> Counts:
        """Returns the ids within their types of nodes that are given by their rows, ``[n]``, counted over all parts."""
        block, starts = self._blocks(rows)
        firsts = np.stack([self.offsets(name)[:-1] for name in self.nodes], 1).ravel()
        return rows - starts[block] + firsts[block]

    def numbers(self, rows: Counts) -> Counts:
        """Returns the numbers of the types, in their order, of nodes that are given by their rows, ``[n]``."""
        return self._blocks(rows)[0] % len(self.nodes)

    def _blocks(self, rows: Counts) -> tuple[Counts, Counts]:
        """Returns in which block of nodes, of one part and type, rows lie, ``[n]``, and the first row of each block."""
        per_part = np.stack(list(self.nodes.values()), 1)  # [P, types]
        starts = np.concatenate([[0], np.cumsum(per_part)[:-1]])
        return np.searchsorted(starts, rows, side="right") - 1, starts

    def by_name(self) -> dict[str, list[int]]:
        """Returns the nodes and the edges of each type in each part, by its name."""
        nodes = {f"{name} nodes": counts.tolist() for name, counts in self.nodes.items()}
        return nodes | {" ".join(kind): counts.tolist() for kind, counts in self.edges.items()}

    def as_dict(self) -> dict[str, Any] | None:
        """Returns plain values, of which :func:`types_of` makes these again; None without types."""
        if not self.is_hetero:
            return None
        return {
            "nodes": [[name, counts.tolist()] for name, counts in self.nodes.items()],
            "edges": [[list(kind), counts.tolist()] for kind, counts in self.edges.items()],
            "input_type": self.input_type,
        }


def types_of(manifest: Mapping[str, Any]) -> Types:
    """Returns how many nodes and edges of each type the parts of an entry have."""
    values = manifest.get("types")
    if values is None:
        return Types.none(np.diff(manifest["offsets"]), np.diff(manifest["edge_offsets"]))
    nodes = {name: np.asarray(counts, np.int64) for name, counts in values["nodes"]}
    edges: dict[EdgeType, Counts] = {tuple(kind): np.asarray(counts, np.int64) for kind, counts in values["edges"]}
    return Types(nodes, edges, values["input_type"])


Groups = tuple["int | Groups", ...]
"""Ranks as nested tuples: ``((0, 1), (2, 3))`` are two machines of two; see ``Topology.groups``."""

NO_TYPES = (
    'A HeteroData is trained as a whole by strategy="dgcl", "vertex_cut" and "spmm_1d", without replicas, caches, new plans or '
    'whole blocks, and on sampled neighbourhoods by strategy="sampling". For others, try `.to_homogeneous()`, whose edge_type '
    "RGCNConv and its kin take."
)


KAMINPAR = ("kaminpar", "kaminpar_compressed")

METHODS = ("auto", "metis", "metis_masks", "metis_cover", *KAMINPAR, *PARTITIONERS, "random", "contiguous")
"""Names of ways to assign nodes, see :func:`~lightning_gnn.partition.edge_cut.assign_nodes`."""


def by_machine(world_size: int, num_hosts: int) -> Groups | None:
    """Returns the ranks of each of several machines of equally many; None for one machine."""
    per_host = world_size // num_hosts
    if num_hosts == 1 or world_size % num_hosts:
        return None
    return tuple(tuple(range(first, first + per_host)) for first in range(0, world_size, per_host))


@dataclass(frozen=True)
class Replicas:
    """Rows of other ranks that a rank holds and computes too, so that it need not fetch them.

    Attributes:
        hops: how far from the nodes of its group a rank looks: the number of propagations of the model.
        groups: ranks that share replicas, each rank once: between groups nothing is exchanged (DGCL section 3: every rank
            alone; Table 5, DGCL-R: the ranks of each machine).
    """

    hops: int
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LayoutSpec:
    """How a graph is laid out over ranks.

    Attributes:
        kind: ``"whole"``: one rank holds everything; ``"edge_cut"``: a rank holds all in-edges of the nodes it owns;
            ``"vertex_cut"``: every edge is held by the rank that it is given to, and a node is owned by its master.
        parts: number of ranks.
        groups: where the partitioner shall cut first; None for cutting between all ranks alike.
        method: how nodes, or the edges of a vertex cut, get their ranks if the user leaves that open; None: as
            :meth:`~lightning_gnn.data.loading.GraphSource.method` says; see
            :func:`~lightning_gnn.partition.edge_cut.assign_nodes` and
            :func:`~lightning_gnn.strategies.vertex_cut.cutters.assign_edges`.
        replicas: what ranks hold beside what they own; made when a rank reads its part, the stored cut is the same.
        host_weight: of a vertex cut, what a replica on another machine costs against one in the same, 0 to 1.
        takes_types: the graph may have node and edge types.
        samples: steps of training look at sampled neighbourhoods, so fan-outs and a batch size are of use.
        in_batches: no step of any stage sees the rank's own edges, which are not read then; None: of a graph with types.
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
        """Returns that of an edge cut of any graph."""
        return cls("edge_cut", parts, takes_types=True)

    def takes(self, has_types: bool) -> bool:
        """Returns whether the graph may have types, if it does."""
        return self.takes_types or not has_types

    def reads_edges(self, types: Types) -> bool:
        """Returns whether a rank's batch has its edges."""
        return self.in_batches is False or (self.in_batches is None and not types.is_hetero)

    @property
    def stored(self) -> LayoutSpec:
        """The layout as the store keeps it: who made the parts, and what a rank adds to its own, do not matter there."""
        return LayoutSpec(self.kind, self.parts, self.groups, host_weight=self.host_weight)

    def as_dict(self) -> dict[str, Any]:
        names = ("kind", "parts", "groups", "method", "host_weight", "takes_types")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayoutSpec:
        """Returns the layout that :meth:`as_dict` gave, also by way of JSON."""
        return cls(**{**values, "groups": _as_groups(values["groups"])})


def _as_groups(groups: Any) -> Any:
    return tuple(map(_as_groups, groups)) if isinstance(groups, (list, tuple)) else groups


def devices(group: Groups | int) -> list[int]:
    return [group] if isinstance(group, int) else [device for each in group for device in devices(each)]


def alike(groups: Groups | int) -> bool:
    """Returns whether groups side by side hold equally many devices, on all levels."""
    if isinstance(groups, int):
        return True
    return len({len(devices(each)) for each in groups}) <= 1 and all(map(alike, groups))


def several_alike(groups: Groups) -> bool:
    """Returns whether groups are several machines of equally many devices, between which METIS cuts first by default."""
    return len(groups) > 1 and alike(groups)


def levels(group: Groups | int) -> int:
    """Returns how many cuts, one inside the other, make single devices of a group."""
    return 0 if isinstance(group, int) else (len(group) > 1) + levels(group[0])


def checked_method(method: Any) -> str | NDArray[np.integer]:
    """Returns one of `METHODS`, or the part of every node, int ``[N]``; whether it fits is seen when nodes are assigned."""
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
