"""Graph store of a sampler: neighbors, features and other rows of any node, regardless of its machine.

Sources:

- DistDGL (2020) section III-C (features: local rows through shared memory, remote rows in bulk) and section III-D (samplers: the
  owner of a node draws its neighbors).
- GNNLab (Yang et al., EuroSys 2022), whose cache has the nodes that samples drew most often.

Partitions of this machine are read from the memory-mapped store, which all of its ranks share. Other partitions are requested
from their owners, once for all nodes of a hop.

N nodes, P ranks. Ids are in the order of the partitioned graph. In it, a rank's nodes of a type, and their in-edges of a type,
are one range. A graph without types has one node type and one edge type.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Cut
from lightning_gnn.extensions.embeddings.channel import GroupChannel
from lightning_gnn.extensions.graph_files.in_edges import counts_of
from lightning_gnn.kernels import CSR
from lightning_gnn.partition.shard import owners_of
from lightning_gnn.strategies.sampling.hops import Numbering, pack_tensors, unpack_tensors
from lightning_gnn.strategies.sampling.near_cache import NearCache, Rows, most_worth
from lightning_gnn.strategies.sampling.neighbors import (
    NO_IDS,
    InEdges,
    Neighbors,
    Score,
    best_of,
    bounds,
    inverse,
    random_numbers,
    sample_neighbors,
)
from lightning_gnn.strategies.sampling.one_call import Buffers, HopSampler
from lightning_gnn.strategies.sampling.one_copy import one_copy
from lightning_gnn.strategies.sampling.sampler import seed_of_type

T = TypeVar("T")

Names = Mapping[Any, Sequence[str]]
"""Attribute names with one row per node or edge, by node type and edge type."""

_FEW = 1 << 20
"""Number of ids that are buffered before they are counted."""


class _Uses:
    """Counts of requests per node.

    Attributes:
        ids, counts: nodes in ascending order, and their numbers of requests, int64 ``[n]``.
    """

    def __init__(self) -> None:
        self.ids = self.counts = NO_IDS
        self._later = list[Tensor]()
        self._size = 0

    def add(self, ids: Tensor) -> None:
        self._later.append(ids)
        self._size += len(ids)
        # The buffer grows with the number of counted ids, so each id is sorted only a few times per epoch.
        if self._size > max(_FEW, len(self.ids)):
            self.sum_up()

    def sum_up(self, *clones: _Uses) -> None:
        """Add the buffered ids, and the counts of `clones`, to the counts."""
        added, self._later, self._size = torch.cat([NO_IDS, *self._later]), [], 0
        pairs = [(self.ids, self.counts), (added, torch.ones_like(added))]
        for clone in clones:
            clone.sum_up()
            pairs.append((clone.ids, clone.counts))
        ids, counts = (torch.cat(each) for each in zip(*pairs))
        self.ids, place = ids.unique(return_inverse=True)
        self.counts = torch.zeros_like(self.ids).index_add_(0, place, counts)


@dataclass
class _FarCache:
    """Cached features of nodes on other machines, and the nodes that other ranks cache.

    Attributes:
        rows: by node type, ids in ascending order and their features.
        ids_by_rank: by rank that sends requests to this rank, the nodes here whose features it caches, by type.
    """

    rows: dict[NodeType, tuple[Tensor, Tensor]]
    ids_by_rank: dict[int, dict[NodeType, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """Options that select edges; see the arguments of :class:`~lightning_gnn.SamplingStrategy`."""

    weight_attr: str | None = None
    time_attr: str | None = None
    temporal_strategy: str = "uniform"
    score: Score | None = None
    labor: bool = False


class _Part:
    """In-edges of one type of a rank's nodes, memory-mapped.

    Args:
        halo: id of each halo node within its type.
        derived: tensors returned by :func:`_derive_tensors`.
    """

    def __init__(self, cut: Cut, rank: int, kind: EdgeType, halo: Tensor, choice: Choice, derived: Mapping[str, Tensor]) -> None:
        types, (source_type, _, target_type) = cut.types, kind
        self._first, self._first_source, self._first_edge = (
            int(types.offsets(each)[rank]) for each in (target_type, source_type, kind)
        )
        # Sources are local rows of the rank, of all types, followed by its halo rows.
        self._owned, self._halo = int(np.diff(cut.offsets)[rank]), halo
        self._first_row, self._num_targets = int(types.begins(source_type)[rank]), types.total(target_type)
        stored = _stored_of(cut, rank, kind, choice)
        given = stored | dict(derived)
        self._edges, self._csr = given.get("edges"), CSR(given["indptr"], given["source"], None, self._owned + len(halo))
        self._choice: dict[str, Any] = {name: given[name] for name in ("weight", "time") if name in given}
        self._kind, self._score = kind, choice.score
        self._attributes = [cut.attributes[types.key(each)] for each in (source_type, kind, target_type)]
        if choice.labor:  # id in the graph of each column, for columns that edges of this type read
            own = torch.arange(self._first_source - self._first_row, self._first_source - self._first_row + self._owned)
            self._choice["source_keys"] = torch.cat([own, halo])
        if "time" in self._choice:
            self._choice |= {"strategy": choice.temporal_strategy, "of_sources": "time" not in stored}

    def neighbors(self, fanout: int, seed: int, replace: bool, targets: Tensor, until: Tensor | None = None) -> Neighbors:
        """Returns sampled in-edges of targets, nodes or copies of nodes, in ids of the whole graph."""
        rows = targets % self._num_targets - self._first
        choice = self._choice | ({"until": until} if "time" in self._choice else {})
        scored = self._score is not None and fanout >= 0
        found = sample_neighbors(self._csr, rows, -1 if scored else fanout, seed, replace=replace, keys=targets, **choice)
        uniform = random_numbers(self._csr, rows, targets, seed, found) if scored else None
        sources = found.sources
        far = sources >= self._owned
        sources = sources + (self._first_source - self._first_row)
        sources[far] = self._halo[found.sources[far] - self._owned]
        edges = found.edges if self._edges is None else self._edges[found.edges]
        found = Neighbors(found.offsets, sources, edges + self._first_edge)
        if uniform is None or self._score is None:
            return found
        ends = found.edges, found.sources, rows[found.targets()] + self._first
        of = (partial(_attribute, self._attributes[each], ids) for each, ids in zip((1, 0, 2), ends))
        return best_of(found, self._score(InEdges(self._kind, uniform, found.offsets, *of)), fanout)

    def arrays(self) -> tuple[list[Tensor], list[int]]:
        """Returns this part's entry of the table of :func:`loops.sample_hops`: its arrays, and its numbers."""
        edges = NO_IDS if self._edges is None else self._edges
        shift = self._first_source - self._first_row
        return [self._csr.indptr, self._csr.indices, self._halo, edges], [self._first, shift, self._owned, self._first_edge]

    def reads(self) -> Tensor:
        """Returns the number of edges that read each row, local rows first, then halo rows; 0 for rows of other types."""
        return torch.from_numpy(counts_of(self._csr.indices.numpy(), self._csr.num_cols))


def _attribute(attributes: Mapping[str, Tensor], ids: Tensor, name: str) -> Tensor:
    if name not in attributes:
        raise ValueError(f"edge_score_fn reads {name!r}, which the graph does not have. Use one of {sorted(attributes)}.")
    return attributes[name].index_select(0, ids)


def _stored_of(cut: Cut, rank: int, kind: EdgeType, choice: Choice) -> dict[str, Tensor]:
    """Returns the stored tensors of a rank's edges of a type: ends, and edge weights and times if any, ``[E]``."""
    types = cut.types
    begin, first, count = (int(each[rank]) for each in (types.begins(kind), types.offsets(kind), types.edges[kind]))
    source, target = torch.from_numpy(cut.edge_index_of(rank)[:, begin : begin + count])
    named, of_edges = {"weight": choice.weight_attr, "time": choice.time_attr}, cut.attributes[types.key(kind)]
    chosen = {name: of_edges[attr][first : first + count] for name, attr in named.items() if attr and attr in of_edges}
    return {"source": source, "target": target, **chosen}


def _derive_tensors(cut: Cut, rank: int, kind: EdgeType, halo: Tensor, messages: str | None, choice: Choice) -> dict[str, Tensor]:
    """Returns tensors derived from the stored ones.

    These are the first edge of each target; for edges in a mask, their indices and attributes; for times of nodes, the times of
    all rows.
    """
    types, (source_type, _, target_type) = cut.types, kind
    stored, derived = _stored_of(cut, rank, kind, choice), dict[str, Tensor]()
    target = stored.pop("target")
    mask = None if messages is None else cut.attributes[types.key(kind)].get(messages)
    if mask is not None:
        first, last = types.offsets(kind)[rank : rank + 2].tolist()
        edges = derived["edges"] = mask[first:last].nonzero().view(-1)
        derived |= {name: values[edges] for name, values in stored.items()}
        target = target[edges]
    rows = int(types.nodes[target_type][rank])
    counts = counts_of(target.numpy(), rows, int(types.begins(target_type)[rank]))
    derived["indptr"] = bounds(torch.from_numpy(counts))
    of_nodes = cut.attributes[types.key(source_type)]
    if "time" not in stored and choice.time_attr and choice.time_attr in of_nodes:
        values, owned = of_nodes[choice.time_attr], int(np.diff(cut.offsets)[rank])
        first, last = types.offsets(source_type)[rank : rank + 2].tolist()
        # Columns of nodes of other types remain 0: no edge reads them.
        times = derived["time"] = values.new_zeros(owned + len(halo))
        begin = int(types.begins(source_type)[rank])
        times[begin : begin + last - first] = values[first:last]
        if len(values):
            times[owned:] = values[halo.clamp(max=len(values) - 1)]
    return derived


class Counts(NamedTuple):
    """Counts of feature rows and bytes.

    Attributes:
        requested: rows on other machines that were requested.
        hits: the ones of these in the remote cache.
        received: bytes received from other machines.
        near_hits, near_misses: rows of this machine read from the local cache, and from the store.
    """

    requested: int
    hits: int
    received: int
    near_hits: int
    near_misses: int


class GraphStore:
    """Neighbors and rows of all nodes. With several machines, all ranks call its methods in the same order.

    Each rank sends requests to one rank of every other machine, which reads the partitions of all ranks there.

    Args:
        cut: the partitioned graph, in the store of this machine.
        world: the ranks.
        local_ranks: ranks of this machine.
        cache_bytes: bytes for the remote cache: features of nodes on other machines. Until :meth:`begin_epoch`, it has the nodes
            that most edges of this rank read.
        messages: an edge mask; for types that have it, only edges in the mask are sampled.
        choice: options that select edges.
        near_bytes: bytes for the local cache: features of nodes on this machine, shared by its ranks. Until :meth:`begin_epoch`,
            it has the nodes that most edges of the machine read. With 0, all are read from the store.

    Raises:
        ValueError: see :class:`~lightning_gnn.strategies.sampling.near_cache.NearCache`.

    Attributes:
        cut, types, rank: the graph, its types, and this rank.
        near_cache: the local cache; None without one.
        machine, local_machine: number of the machine of each rank, int64 ``[P]``; number of this machine.
        teams: by rank, the rank that answers its requests on each machine; the rank itself on its own machine.
        servers: by other machine, the rank that answers this rank's requests there.
        askers: ranks whose requests this rank answers.
        requested, hits: feature rows on other machines, and the ones of these in the remote cache.
        near_hits, near_misses: feature rows of this machine, for its batches and for other machines, from the local cache and
            from the store; not counted without a local cache.
        uses: by node type, requests of nodes that a cache may have; None if requests are not counted.
        buffers: memory of rows that :meth:`rows` reads on this machine.
    """

    def __init__(
        self,
        cut: Cut,
        world: World,
        local_ranks: Sequence[int],
        cache_bytes: int = 0,
        messages: str | None = None,
        choice: Choice = Choice(),
        near_bytes: int = 0,
    ) -> None:
        self.cut, self._world, self.rank, self.types, self.choice = cut, world, world.rank, cut.types, choice
        self._offsets = {kind: self.types.offsets(kind) for kind in (*self.types.nodes, *self.types.edges)}
        ids_of = self.types.ids if self.types.is_hetero else lambda rows: rows
        halos = {rank: torch.from_numpy(ids_of(cut.halos[rank])) for rank in local_ranks}
        derived = {kind: _derive_tensors(cut, world.rank, kind, halos[world.rank], messages, choice) for kind in self.types.edges}
        by_rank = one_copy(world, local_ranks, [values for tensors in derived.values() for values in tensors.values()])
        tensors = {rank: iter(of_rank) for rank, of_rank in by_rank.items()}
        self._parts = {
            kind: {rank: _Part(cut, rank, kind, halos[rank], choice, dict(zip(names, tensors[rank]))) for rank in halos}
            for kind, names in derived.items()
        }
        self.channel, self.buffers = None, Buffers()
        self.machine, self.local_machine = torch.zeros(world.size, dtype=torch.long), 0
        self.teams: dict[int, list[int]] = {}
        self.servers: dict[int, int] = {}
        self.askers: list[int] = []
        if len(local_ranks) < world.size:
            self.channel = GroupChannel(world)
            self._meet(sorted({tuple(sorted(ranks)) for ranks in world.all_gather_object([*local_ranks])}))
        self.requested = self.hits = self.near_hits = self.near_misses = 0
        self._cache_bytes = cache_bytes if self.channel is not None else 0
        self.uses: dict[NodeType, _Uses] | None = None
        self._features = {name: cut.attributes[self.types.key(name)]["x"] for name in self.types.nodes if "x" in self.names(name)}
        self._cache = _FarCache({name: (NO_IDS, x[:0]) for name, x in self._features.items()})
        self._newest = [self._cache]  # shared by all clones
        self.near_cache = NearCache(self._features, self.types, world, local_ranks, near_bytes) if near_bytes else None
        self._fill_caches({})

    def _meet(self, machines: Sequence[Sequence[int]]) -> None:
        """Assign the ranks that answer requests; the ranks of a machine share the requests of others evenly."""
        for number, ranks in enumerate(machines):
            self.machine[list(ranks)] = number
        self.local_machine = int(self.machine[self.rank])
        for ranks in machines:
            for place, rank in enumerate(ranks):
                self.teams[rank] = [rank if rank in on else on[place % len(on)] for on in machines]
        self.servers = {there: rank for there, rank in enumerate(self.teams[self.rank]) if there != self.local_machine}
        self.askers = [rank for rank, team in self.teams.items() if self.rank in team and rank != self.rank]

    def clone(self) -> GraphStore:
        """Returns a store of the same partitions for another thread, with separate counts and channel; all ranks call it."""
        other = copy.copy(self)
        other.channel = None if self.channel is None else GroupChannel(self._world)
        other.requested = other.hits = other.near_hits = other.near_misses = 0
        other.uses, other.buffers = None, Buffers()
        return other

    def names(self, kind: NodeType | EdgeType) -> list[str]:
        """Returns the names of attributes with one row per node, or per edge, of a type."""
        return sorted(self.cut.attributes[self.types.key(kind)])

    def begin_epoch(self, clones: Sequence[GraphStore], counts: bool) -> None:
        """Fill the caches with the nodes that this store and its clones requested most often, if requests were counted.

        All ranks call it in the same order, while none of these stores makes a batch. All clones then use the remote cache that
        was filled last.

        Args:
            clones: clones of this store.
            counts: whether to count requests from now on; without a cache, they are not counted.
        """
        if self.uses is not None:
            for name, uses in self.uses.items():
                uses.sum_up(*(clone.uses[name] for clone in clones if clone.uses is not None))
            found, self.uses = self.uses, None
            for clone in clones:
                clone.uses = None
            self._fill_caches(found)
        for each in (self, *clones):
            each._cache = self._newest[0]
            if counts and (self._cache_bytes or self.near_cache is not None):
                each.uses = {name: _Uses() for name in self._features}

    def _fill_caches(self, uses: Mapping[NodeType, _Uses]) -> None:
        if self._cache_bytes:
            self._fill_far_cache(uses)
        if self.near_cache is not None:
            self.near_cache.fill(self._reads(), {name: (each.ids, each.counts) for name, each in uses.items()})

    def _reads(self) -> dict[NodeType, Rows]:
        """Returns by type the nodes that edges of this rank read, and the number of edges that read each."""
        rank, found = self.rank, dict[NodeType, Rows]()
        halo, owned = torch.from_numpy(self.types.ids(self.cut.halos[rank])), int(np.diff(self.cut.offsets)[rank])
        for name in self._features:
            reads = sum((self._parts[kind][rank].reads() for kind in self.types.edges if kind[0] == name), halo.new_zeros(1))
            rows = reads.nonzero().view(-1)
            own, of_halo = rows[rows < owned], rows[rows >= owned] - owned
            first = int(self._offsets[name][rank] - self.types.begins(name)[rank])
            found[name] = torch.cat([own + first, halo[of_halo]]), reads[rows]
        return found

    def _fill_far_cache(self, uses: Mapping[NodeType, _Uses]) -> None:
        """Fill the remote cache with the nodes of most requests per byte, then with the nodes that most edges read."""
        wanted, worth, row_bytes = dict[NodeType, Tensor](), dict[NodeType, Tensor](), dict[NodeType, int]()
        for name, (ids, reads) in self._reads().items():
            known = uses.get(name, _Uses())
            read_far, used_far = (self.machines_of(name, each) != self.local_machine for each in (ids, known.ids))
            wanted[name], place = torch.cat([known.ids[used_far], ids[read_far]]).unique(return_inverse=True)
            score = torch.cat([known.counts[used_far], reads[read_far].double() / (1 + reads.sum())]).float()
            row_bytes[name] = self._features[name][:1].nbytes
            worth[name] = torch.zeros(len(wanted[name])).index_add_(0, place, score) / max(row_bytes[name], 1)
        kept = most_worth(worth, row_bytes, self._cache_bytes)
        cached = {name: ids[kept[name]] for name, ids in wanted.items()}
        counts, ids_by_rank = (self.requested, self.hits), dict[int, dict[NodeType, Tensor]]()
        found = self.rows({name: (ids, ["x"]) for name, ids in cached.items()}, ids_by_rank)
        self._cache = self._newest[0] = _FarCache({name: (ids, found[name]["x"]) for name, ids in cached.items()}, ids_by_rank)
        self.requested, self.hits = counts

    def find_cached(self, name: NodeType, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which nodes of a type have features in the remote cache, bool ``[n]``, and their positions there."""
        return _places_in(self._cache.rows[name][0], ids)

    def from_cache(self, name: NodeType, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which nodes on other machines are in the remote cache, bool ``[n]``, and their features; updates the counts."""
        known, places = self.find_cached(name, ids)
        self.requested, self.hits = self.requested + len(known), self.hits + len(places)
        if self.uses is not None:
            self.uses[name].add(ids)
        return known, self._cache.rows[name][1].index_select(0, places)

    def hops(
        self, seeds: Sequence[int], replace: bool, until: Tensor | None = None
    ) -> Callable[[EdgeType, Tensor, int], Neighbors]:
        """Returns a function that samples the hops of one batch, see :func:`~lightning_gnn.strategies.sampling.hops.sample_hops`.

        For a node i, ids i + N, i + 2 N, ... are copies with separate draws. Sources are nodes, not copies.

        Args:
            seeds: random seed for the batch of each rank. A rank that answers a request makes the same draws as the requesting
                rank would make.
            replace: whether to draw with replacement.
            until: with times, the latest time of each copy, int64 ``[copies]``.
        """
        numbers = {kind: number for number, kind in enumerate(self.types.edges)}

        def hop(kind: EdgeType, targets: Tensor, fanout: int) -> Neighbors:
            limits = [] if until is None else [until[targets // self.types.total(kind[2])]]

            def draw(rank: int, targets: Tensor, *limits: Tensor) -> Neighbors:
                return self.draw_neighbors(kind, targets, fanout, seed_of_type(seeds[rank], numbers[kind]), replace, *limits)

            if self.channel is None:
                return draw(self.rank, targets, *limits)
            machine = self.machines_of(kind[2], targets % self.types.total(kind[2]))
            order, parts = _groups(machine, len(self.servers) + 1, targets, *limits)
            own, answers = self._ask(
                {there: parts[there] for there in self.servers},
                [NO_IDS] * len(parts[0]),
                lambda rank, question: draw(rank, *question).fields,
                [NO_IDS] * 3,
                lambda: draw(self.rank, *parts[self.local_machine]),
            )
            found = {self.local_machine: own, **{there: Neighbors.of(*fields) for there, fields in answers.items()}}
            return Neighbors.all_of([found[there] for there in range(len(found))]).at(inverse(order))

        return hop

    def hop_sampler(self, fanouts: Sequence[int], replace: bool, numbering: Numbering) -> HopSampler | None:
        """Returns a sampler of all hops at once; None with types, several machines, weights, times, scores or LABOR."""
        if self.types.is_hetero or self.channel is not None or self.choice != Choice():
            return None
        [(kind, parts)] = self._parts.items()
        arrays = [parts[rank].arrays() for rank in sorted(parts)]
        return HopSampler(arrays, self._offsets[kind[2]], fanouts, replace, numbering)

    def draw_neighbors(self, kind: EdgeType, targets: Tensor, fanout: int, seed: int, replace: bool, *until: Tensor) -> Neighbors:
        """Returns sampled in-edges of targets on this machine, nodes or copies; `until` as in :func:`sample_neighbors`."""
        parts, offsets = self._parts[kind], self._offsets[kind[2]]
        if len(parts) == 1:
            [part] = parts.values()
            return part.neighbors(fanout, seed, replace, targets, *until)
        order, groups = _groups(_owners(targets % int(offsets[-1]), offsets), self._world.size, targets, *until)
        found = [parts[rank].neighbors(fanout, seed, replace, *groups[rank]) for rank in sorted(parts)]
        return Neighbors.all_of(found).at(inverse(order))

    def machines_of(self, kind: NodeType | EdgeType, ids: Tensor) -> Tensor:
        """Returns the machine of each node, or edge, of a type."""
        return self.machine[_owners(ids, self._offsets[kind])]

    def exchange(self, messages: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Returns the messages from ranks of other machines, by rank: from each rank that `messages` has a message to."""
        assert self.channel is not None
        return self.channel.start(messages, list(messages))()

    def _ask(
        self,
        requests: Mapping[int, Sequence[Tensor]],
        like: Sequence[Tensor],
        answer: Callable[[int, list[Tensor]], Sequence[Tensor]],
        answered: Sequence[Tensor],
        meanwhile: Callable[[], T],
    ) -> tuple[T, dict[int, list[Tensor]]]:
        """Send requests to all other machines and answer the requests to this rank: two exchanges.

        Args:
            requests: requests by machine.
            like, answered: tensors with the dtypes and trailing dimensions of a request, and of an answer.
            answer: function that returns the answer to the request of a rank.
            meanwhile: function that is called while answers are in transit.

        Returns:
            The result of `meanwhile`, and the answers by machine.
        """
        assert self.channel is not None
        asked = self.channel.start({self.servers[there]: pack_tensors(fields) for there, fields in requests.items()}, self.askers)
        replies = {rank: pack_tensors(answer(rank, unpack_tensors(data, like))) for rank, data in asked().items()}
        replied = self.channel.start(replies, list(self.servers.values()))
        own, found = meanwhile(), replied()
        return own, {there: unpack_tensors(found[rank], answered) for there, rank in self.servers.items()}

    def read(self, kind: NodeType | EdgeType, name: str, ids: Tensor) -> Tensor:
        """Returns rows of nodes, or edges, of a type on this machine."""
        if self.near_cache is None or not _is_feature(kind, name) or not len(ids):
            return torch.index_select(self.cut.attributes[self.types.key(kind)][name], 0, ids)
        rows, hits = self.near_cache.rows(kind, ids)
        self.near_hits, self.near_misses = self.near_hits + hits, self.near_misses + len(ids) - hits
        if self.uses is not None:
            self.uses[kind].add(ids)
        return rows

    def read_for(self, rank: int, kind: NodeType | EdgeType, name: str, ids: Tensor) -> Tensor:
        """Returns rows for the request of a rank, without features that it has in its remote cache."""
        if _is_feature(kind, name):
            ids = ids[~_places_in(self._cache.ids_by_rank.get(rank, {}).get(kind, NO_IDS), ids)[0]]
        return self.read(kind, name, ids)

    def rows(
        self, wanted: Mapping[Any, tuple[Tensor, Sequence[str]]], ids_by_rank: dict[int, dict[Any, Tensor]] | None = None
    ) -> dict[Any, dict[str, Tensor]]:
        """Returns rows of nodes and edges, by type and name, ``[n, ...]``. Ids are requested once for all of their rows.

        Args:
            wanted: by node or edge type, ids ``[n]`` and a selection of :meth:`names`. Types and names must be the same on all
                ranks.
            ids_by_rank: output for a cache: the ids that each rank requests from this rank.
        """
        if self.channel is None and self.near_cache is not None:
            return {kind: {name: self.read(kind, name, ids) for name in names} for kind, (ids, names) in wanted.items()}
        if self.channel is None:
            asked = [(self.cut.attributes[self.types.key(kind)][n], ids) for kind, (ids, names) in wanted.items() for n in names]
            found = iter(self.buffers.gather(asked))
            return {kind: {name: next(found) for name in names} for kind, (_, names) in wanted.items()}
        fields = [(kind, name) for kind, (_, names) in wanted.items() for name in names]
        machines = {kind: self.machines_of(kind, ids) for kind, (ids, _) in wanted.items()}
        distinct, place, parts = {}, {}, {}
        for kind, (ids, _) in wanted.items():
            far = machines[kind] != self.local_machine
            found, place[kind] = ids[far].unique(return_inverse=True)
            order, parts[kind] = _groups(self.machines_of(kind, found), len(self.teams), found)
            place[kind], distinct[kind] = inverse(order)[place[kind]], found[order]

        def answer(rank: int, question: list[Tensor]) -> list[Tensor]:
            requested = dict(zip(wanted, question))
            found = [self.read_for(rank, kind, name, requested[kind]) for kind, name in fields]
            if ids_by_rank is not None:
                ids_by_rank[rank] = {kind: ids.clone() for kind, ids in requested.items()}
            return found

        def meanwhile() -> dict[Any, dict[str, Tensor]]:
            return {
                kind: {name: self.read_local(kind, name, ids, machines[kind] == self.local_machine) for name in names}
                for kind, (ids, names) in wanted.items()
            }

        out, answers = self._ask(
            {there: [parts[kind][there][0] for kind in wanted] for there in self.servers},
            [NO_IDS] * len(wanted),
            answer,
            [self.read(kind, name, NO_IDS) for kind, name in fields],
            meanwhile,
        )
        for number, (kind, name) in enumerate(fields):
            rows = torch.cat([answers[there][number] for there in sorted(answers)])
            if _is_feature(kind, name):
                known, features = self.from_cache(kind, distinct[kind])
                came, rows = rows, rows.new_empty((len(known), *rows.shape[1:]))
                rows[~known], rows[known] = came, features
            far = (machines[kind] != self.local_machine).nonzero().view(-1)
            out[kind][name].index_copy_(0, far, rows.index_select(0, place[kind]))
        return out

    def read_local(self, kind: NodeType | EdgeType, name: str, ids: Tensor, is_local: Tensor) -> Tensor:
        """Returns rows of ids, ``[n, ...]``, filled only for ids on this machine.

        Args:
            is_local: whether each id is on this machine, bool ``[n]``.
        """
        places = is_local.nonzero().view(-1)
        rows = self.read(kind, name, ids[places])
        return rows.new_empty((len(ids), *rows.shape[1:])).index_copy_(0, places, rows)

    def take_counts(self) -> Counts:
        """Returns the counts since the last call and resets them."""
        received = 0 if self.channel is None else self.channel.bytes_received
        taken = Counts(self.requested, self.hits, received, self.near_hits, self.near_misses)
        self.requested = self.hits = self.near_hits = self.near_misses = 0
        if self.channel is not None:
            self.channel.bytes_received = 0
        return taken

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()


def _places_in(ascending: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which ids are in `ascending`, bool ``[n]``, and the positions of these."""
    if not len(ascending):
        return torch.zeros(len(ids), dtype=torch.bool), NO_IDS
    place = torch.searchsorted(ascending, ids).clamp(max=len(ascending) - 1)
    known = ascending[place] == ids
    return known, place[known]


def _is_feature(kind: NodeType | EdgeType, name: str) -> bool:
    return isinstance(kind, str) and name == "x"


def _groups(numbers: Tensor, size: int, *fields: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Returns the order of fields ``[n]`` by their group number ``[n]``, and the fields of each of `size` groups."""
    order, counts = numbers.argsort(stable=True), torch.bincount(numbers, minlength=size).tolist()
    return order, list(zip(*(values[order].split(counts) for values in fields)))


def _owners(ids: Tensor, offsets: np.ndarray) -> Tensor:
    return torch.from_numpy(owners_of(offsets, ids.numpy()))
