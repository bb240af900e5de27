"""The graph as a sampler sees it: neighbours and rows of any node, wherever they lie.

Source: DistDGL (2020) sections III-C (features: local rows through shared memory, remote ones in bulk) and III-D (samplers: the
owner of a node draws its neighbours). Parts of this machine are read through the memory-mapped store, which all of its ranks
share; the owners of others are asked, once for all nodes of a hop.

N nodes, P ranks; ids are those of the partitioned graph, in which a rank's nodes of a type, and their in-edges of a type, are one
range. A graph without types has one of each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.comm.group import World
from lightning_gnn.comm.rows import GroupChannel, packed, unpacked
from lightning_gnn.data.attributes import GraphData
from lightning_gnn.data.shards import Cut
from lightning_gnn.kernels import CSR
from lightning_gnn.partition.shard import owners_of
from lightning_gnn.sampling.neighbors import Neighbors, sample_neighbors
from lightning_gnn.sampling.sampler import seed_of_type

T = TypeVar("T")

_IDS = torch.empty(0, dtype=torch.long)


class _Part:
    """In-edges of one type of a rank's nodes, memory-mapped; `halo` has each halo row's id within its type."""

    def __init__(self, cut: Cut, rank: int, kind: EdgeType, halo: Tensor, messages: str | None) -> None:
        types, (source_type, _, target_type) = cut.types, kind
        self._first, self._first_source, self._first_edge = (
            int(types.offsets(each)[rank]) for each in (target_type, source_type, kind)
        )
        # Sources are rows of the rank, of all types, and then of its halo.
        self._owned, self._halo = int(np.diff(cut.offsets)[rank]), halo
        self._first_row = int(types.begins(source_type)[rank])
        begin, count = int(types.begins(kind)[rank]), int(types.edges[kind][rank])
        source, target = torch.from_numpy(cut.edge_index_of(rank)[:, begin : begin + count])
        self._edges: Tensor | None = None
        if messages is not None:
            kept = cut.attributes[types.key(kind)][messages][self._first_edge : self._first_edge + count]
            self._edges, source, target = kept.nonzero().view(-1), source[kept], target[kept]
        rows, self._num_targets = int(types.nodes[target_type][rank]), types.total(target_type)
        indptr = _bounds(torch.bincount(target - int(types.begins(target_type)[rank]), minlength=rows))
        self._csr = CSR(indptr, source, None, self._owned + len(halo))

    def neighbors(self, targets: Tensor, fanout: int, seed: int, replace: bool) -> Neighbors:
        """Returns sampled in-edges of targets, nodes or copies of them, in ids of the whole graph."""
        rows = targets % self._num_targets - self._first
        found = sample_neighbors(self._csr, rows, fanout, seed, replace=replace, keys=targets)
        sources = found.sources
        far = sources >= self._owned
        sources = sources + (self._first_source - self._first_row)
        sources[far] = self._halo[found.sources[far] - self._owned]
        edges = found.edges if self._edges is None else self._edges[found.edges]
        return Neighbors(found.offsets, sources, edges + self._first_edge)

    def halo_reads(self) -> Tensor:
        """Returns how many edges read each halo row, ``[H]``; of another type than their sources' they read none."""
        return torch.bincount(self._csr.indices, minlength=self._csr.num_cols)[self._owned :]


class GraphStore:
    """Neighbours and rows of all nodes. Where ranks lie on several machines, all of them make its calls in step.

    Each rank asks one rank of every other machine, which reads the parts of all ranks there.

    Args:
        cut: the partitioned graph, in the store of this machine.
        world: the ranks.
        near: ranks of this machine.
        cache_bytes: of features of nodes on other machines that are kept here: those that most edges of this rank read.
        messages: a mask of edges; other edges join no neighbours.

    Attributes:
        types: of the graph.
        requested, hits: rows of features that lie on other machines, and those of them found in the cache.
    """

    def __init__(
        self, cut: Cut, world: World, near: Sequence[int], cache_bytes: int = 0, messages: str | None = None
    ) -> None:
        self._cut, self._world, self.types = cut, world, cut.types
        self._offsets = {kind: self.types.offsets(kind) for kind in (*self.types.nodes, *self.types.edges)}
        halos = {rank: cut.halos[rank] for rank in near}
        if self.types.is_hetero:
            halos = {rank: self.types.ids(halo) for rank, halo in halos.items()}
        self._parts = {
            kind: {rank: _Part(cut, rank, kind, torch.from_numpy(halo), messages) for rank, halo in halos.items()}
            for kind in self.types.edges
        }
        self.channel = None
        self._machine = torch.zeros(world.size, dtype=torch.long)  # of each rank
        self._here = 0
        if len(near) < world.size:
            self.channel = GroupChannel(world)
            machines = sorted({tuple(sorted(ranks)) for ranks in world.all_gather_object([*near])})
            for number, ranks in enumerate(machines):
                self._machine[list(ranks)] = number
            self._here = int(self._machine[world.rank])
            # Who answers whom: the ranks of a machine share the questions of others evenly.
            answers = {
                rank: [on[ranks.index(rank) % len(on)] for on in machines] for ranks in machines for rank in ranks
            }
            self._servers = {number: rank for number, rank in enumerate(answers[world.rank]) if number != self._here}
            self._askers = [rank for rank in answers if rank != world.rank and world.rank in answers[rank]]
        self.requested = self.hits = 0
        self._cached: dict[NodeType, tuple[Tensor, Tensor]] = {}
        if self.channel is not None and cache_bytes:
            self._fill_cache(cache_bytes)

    @property
    def rank(self) -> int:
        return self._world.rank

    def clone(self) -> GraphStore:
        """Returns a store of the same parts for another thread, with counts and a channel of its own; all ranks call it."""
        other = copy.copy(self)
        other.channel = None if self.channel is None else GroupChannel(self._world)
        other.requested = other.hits = 0
        return other

    def of_graph(self) -> GraphData:
        """Returns a batch of a graph without types that has what belongs to the graph, and nothing else yet."""
        cut = self._cut
        return GraphData(cut.kinds, cut.left_out, **cut.attributes["graph"], **cut.scalars)

    def names(self, kind: NodeType | EdgeType) -> list[str]:
        """Returns the names of what has a row per node, or per edge, of a type."""
        return sorted(self._cut.attributes[self.types.key(kind)])

    def original(self, kind: NodeType | EdgeType, ids: Tensor) -> Tensor:
        return self._cut.ids_of(kind)[ids]

    def _fill_cache(self, cache_bytes: int) -> None:
        """Fetches rows of features of nodes on other machines: those of which most are read per byte."""
        rank = self._world.rank
        halo = torch.from_numpy(self._cut.halos[rank])
        ids = torch.from_numpy(self.types.ids(halo.numpy()))
        wanted: dict[NodeType, Tensor] = {}
        reads, sizes = [torch.empty(0)], [torch.empty(0, dtype=torch.long)]
        for name in self.types.nodes:
            if "x" not in self.names(name):
                continue
            row_bytes = self._cut.attributes[self.types.key(name)]["x"][:1].nbytes
            read = sum((self._parts[kind][rank].halo_reads() for kind in self.types.edges if kind[0] == name), halo * 0)
            rows = read.nonzero().view(-1)
            rows = rows[self._machines_of(name, ids[rows]) != self._here]
            wanted[name] = ids[rows]
            reads.append(read[rows] / max(row_bytes, 1))
            sizes.append(torch.full_like(rows, row_bytes))
        order = torch.cat(reads).argsort(descending=True)
        size = torch.cat(sizes)
        kept = torch.zeros(len(order), dtype=torch.bool)
        kept[order[size[order].cumsum(0) <= cache_bytes]] = True
        chosen = kept.split([len(each) for each in wanted.values()])
        cached = {name: all_of_it[of].sort().values for (name, all_of_it), of in zip(wanted.items(), chosen)}
        found = self.rows({name: (ids, ["x"]) for name, ids in cached.items()})
        self._cached = {name: (ids, found[name]["x"]) for name, ids in cached.items()}
        self.requested = 0

    def hops(self, seeds: Sequence[int], replace: bool) -> Callable[[EdgeType, Tensor, int], Neighbors]:
        """Returns what answers the hops of one batch, see :func:`~lightning_gnn.sampling.hops.sample_hops`.

        Of a node i, ids i + N, i + 2 N, ... are copies, each with draws of its own. Sources are nodes, not copies. `seeds` are
        those of the random numbers for the batch of each rank: who answers draws what the asking rank would.
        """
        numbers = {kind: number for number, kind in enumerate(self.types.edges)}

        def hop(kind: EdgeType, targets: Tensor, fanout: int) -> Neighbors:
            def draw(rank: int, targets: Tensor) -> Neighbors:
                return self._drawn(kind, targets, fanout, seed_of_type(seeds[rank], numbers[kind]), replace)

            if self.channel is None:
                return draw(self.rank, targets)
            machine = self._machines_of(kind[2], targets % self.types.total(kind[2]))
            order = torch.argsort(machine, stable=True)
            parts = targets[order].split(torch.bincount(machine, minlength=len(self._servers) + 1).tolist())
            own, answers = self._ask(
                {there: [parts[there]] for there in self._servers},
                [_IDS],
                lambda rank, question: _fields(draw(rank, question[0])),
                [_IDS] * 3,
                lambda: draw(self.rank, parts[self._here]),
            )
            found = {self._here: own, **{there: _neighbors(fields) for there, fields in answers.items()}}
            return _stitched([found[there] for there in range(len(found))], order)

        return hop

    def _drawn(self, kind: EdgeType, targets: Tensor, fanout: int, seed: int, replace: bool) -> Neighbors:
        """Returns sampled in-edges of targets on this machine, nodes or copies of them."""
        parts, offsets = self._parts[kind], self._offsets[kind[2]]
        if len(parts) == 1:
            [part] = parts.values()
            return part.neighbors(targets, fanout, seed, replace)
        owner = _owners(targets % int(offsets[-1]), offsets)
        order = torch.argsort(owner, stable=True)
        by_rank = targets[order].split(torch.bincount(owner, minlength=self._world.size).tolist())
        return _stitched([parts[rank].neighbors(by_rank[rank], fanout, seed, replace) for rank in sorted(parts)], order)

    def _machines_of(self, kind: NodeType | EdgeType, ids: Tensor) -> Tensor:
        """Returns on which machine each node, or edge, of a type lies."""
        return self._machine[_owners(ids, self._offsets[kind])]

    def _ask(
        self,
        questions: Mapping[int, Sequence[Tensor]],
        like: Sequence[Tensor],
        answer: Callable[[int, list[Tensor]], Sequence[Tensor]],
        answered: Sequence[Tensor],
        meanwhile: Callable[[], T],
    ) -> tuple[T, dict[int, list[Tensor]]]:
        """Asks all other machines and answers those that ask this rank: two exchanges.

        Args:
            questions: by machine.
            like, answered: tensors of the dtypes and trailing dimensions of a question's and an answer's.
            answer: returns what answers the question of a rank.
            meanwhile: is called while answers travel.

        Returns:
            What `meanwhile` returned, and the answers by machine.
        """
        assert self.channel is not None
        asked = self.channel.start(
            {self._servers[there]: packed(fields) for there, fields in questions.items()}, self._askers
        )
        replies = {rank: packed(answer(rank, unpacked(data, like))) for rank, data in asked().items()}
        replied = self.channel.start(replies, list(self._servers.values()))
        own, found = meanwhile(), replied()
        return own, {there: unpacked(found[rank], answered) for there, rank in self._servers.items()}

    def rows(self, wanted: Mapping[Any, tuple[Tensor, Sequence[str]]]) -> dict[Any, dict[str, Tensor]]:
        """Returns rows of nodes and edges, by type and name, ``[n, ...]``: ids are asked for once, all their rows come at once.

        Args:
            wanted: by node or edge type, ids ``[n]`` and which of its :meth:`names`; the types and names are those of all ranks.
        """
        values = {kind: self._cut.attributes[self.types.key(kind)] for kind in wanted}

        def read(kind: NodeType | EdgeType, name: str, ids: Tensor) -> Tensor:
            return torch.index_select(values[kind][name], 0, ids)

        if self.channel is None:
            return {kind: {name: read(kind, name, ids) for name in names} for kind, (ids, names) in wanted.items()}
        far = {kind: self._far(kind, ids) for kind, (ids, _) in wanted.items()}
        fields = [(kind, name) for kind, (_, names) in wanted.items() for name in names]

        def answer(_: int, question: list[Tensor]) -> list[Tensor]:
            # Of each type those whose features are wanted, and those whose features the other has.
            asked = {kind: question[2 * number : 2 * number + 2] for number, kind in enumerate(wanted)}
            return [
                read(kind, name, asked[kind][0] if _is_cached(kind, name) else torch.cat(asked[kind]))
                for kind, name in fields
            ]

        def near() -> dict[Any, dict[str, Tensor]]:
            return {
                kind: {name: far[kind].room_beside(values[kind][name], ids) for name in names}
                for kind, (ids, names) in wanted.items()
            }

        out, answers = self._ask(
            {
                there: [part for kind in wanted for part in far[kind].parts[2 * there : 2 * there + 2]]
                for there in self._servers
            },
            [_IDS] * 2 * len(wanted),
            answer,
            [values[kind][name][:0] for kind, name in fields],
            near,
        )
        for number, (kind, name) in enumerate(fields):
            each, rows = far[kind], torch.cat([answers[there][number] for there in sorted(answers)])
            if _is_cached(kind, name):
                self.requested, self.hits = self.requested + len(each.cached), self.hits + int(each.cached.sum())
                rows, came = rows.new_empty((len(each.cached), *rows.shape[1:])), rows
                rows[~each.cached] = came
                if each.cached.any():
                    rows[each.cached] = self._cached[kind][1][each.place]
            out[kind][name][each.far] = rows[each.inverse]
        return out

    def _far(self, kind: NodeType | EdgeType, ids: Tensor) -> _Far:
        far = self._machines_of(kind, ids) != self._here
        distinct, inverse = ids[far].unique(return_inverse=True)
        hit, place = torch.zeros(len(distinct), dtype=torch.bool), torch.zeros_like(distinct)
        if isinstance(kind, str) and kind in self._cached and len(self._cached[kind][0]):
            cached = self._cached[kind][0]
            place = torch.searchsorted(cached, distinct).clamp(max=len(cached) - 1)
            hit = cached[place] == distinct
        group = 2 * self._machines_of(kind, distinct) + hit.long()
        order = group.argsort(stable=True)
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order))
        counts = torch.bincount(group, minlength=2 * len(self._servers) + 2)
        hit, place = hit[order], place[order]
        return _Far(far, position[inverse], distinct[order].split(counts.tolist()), hit, place[hit])

    def take_counts(self) -> tuple[int, int, int]:
        """Returns rows requested, hits, and bytes received from other machines since the last call."""
        received = 0 if self.channel is None else self.channel.bytes_received
        taken = self.requested, self.hits, received
        self.requested = self.hits = 0
        if self.channel is not None:
            self.channel.bytes_received = 0
        return taken

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()


@dataclass(frozen=True)
class _Far:
    """Those of some ids ``[n]`` that lie on other machines.

    Attributes:
        far: which, bool ``[n]``.
        inverse: of each, its number among the distinct ones.
        parts: the distinct ones: of each machine those whose features are not in the cache, and those whose are.
        cached: whether they are, bool, by number.
        place: in the cache, of those that are.
    """

    far: Tensor
    inverse: Tensor
    parts: Sequence[Tensor]
    cached: Tensor
    place: Tensor

    def room_beside(self, values: Tensor, ids: Tensor) -> Tensor:
        """Returns the rows of ids, ``[n, ...]``, of which those of other machines are still to come."""
        out = values.new_empty((len(ids), *values.shape[1:]))
        out[~self.far] = torch.index_select(values, 0, ids[~self.far])
        return out


def _is_cached(kind: NodeType | EdgeType, name: str) -> bool:
    return isinstance(kind, str) and name == "x"


def _fields(found: Neighbors) -> list[Tensor]:
    return [found.counts, found.sources, found.edges]


def _neighbors(fields: Sequence[Tensor]) -> Neighbors:
    counts, sources, edges = fields
    return Neighbors(_bounds(counts), sources, edges)


def _bounds(counts: Tensor) -> Tensor:
    """Returns where each of the groups of so many begins, and the end, ``[n + 1]``."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _owners(ids: Tensor, offsets: np.ndarray) -> Tensor:
    return torch.from_numpy(owners_of(offsets, ids.numpy()))


def _stitched(found: Sequence[Neighbors], order: Tensor) -> Neighbors:
    """Returns the edges of targets that were sampled in groups; `order` is the position of each target, group after group."""
    counts = torch.cat([each.counts for each in found])
    wanted = torch.empty_like(counts)
    wanted[order] = counts
    offsets = _bounds(wanted)
    begins = counts.cumsum(0) - counts
    place = torch.repeat_interleave(offsets[:-1][order] - begins, counts) + torch.arange(int(counts.sum()))
    sources, edges = (torch.empty(len(place), dtype=torch.long) for _ in range(2))
    sources[place] = torch.cat([each.sources for each in found])
    edges[place] = torch.cat([each.edges for each in found])
    return Neighbors(offsets, sources, edges)
