"""What a strategy asks of the datamodule: which parts of the graph each rank shall hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_gnn.partition.types import Types

Groups = tuple["int | Groups", ...]
"""Ranks as nested tuples: ``((0, 1), (2, 3))`` are two machines of two; see ``Topology.groups``."""

NO_TYPES = (
    'A HeteroData is trained as a whole by strategy="dgcl", "vertex_cut" and "spmm_1d", without replicas, caches, new plans or '
    'whole blocks, and on sampled neighbourhoods by strategy="sampling". For others, try `.to_homogeneous()`, whose edge_type '
    "RGCNConv and its kin take."
)


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
