"""The graph as a sampler sees it: neighbours and rows of any node, wherever they lie.

Source: DistDGL (2020) sections III-C (features: local rows through shared memory, remote ones in bulk) and III-D (samplers: the
owner of a node draws its neighbours). Parts of this machine are read through the memory-mapped store, which all of its ranks
share; the owners of others are asked, once for all nodes of a hop.

N nodes, P ranks; ids are those of the partitioned graph, in which a rank's nodes of a type, and their in-edges of a type, are one
range. A graph without types has one of each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.comm.group import World
from lightning_gnn.comm.rows import GroupChannel, OwnedRows
from lightning_gnn.data.attributes import GraphData
from lightning_gnn.data.shards import Cut
from lightning_gnn.kernels import CSR
from lightning_gnn.partition.shard import owners_of
from lightning_gnn.sampling.neighbors import Neighbors, sample_neighbors
from lightning_gnn.sampling.sampler import seed_of_type


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
        self._near = [rank in near for rank in range(world.size)]
        self._offsets = {kind: self.types.offsets(kind) for kind in (*self.types.nodes, *self.types.edges)}
        halos = {rank: cut.halos[rank] for rank in near}
        if self.types.is_hetero:
            halos = {rank: self.types.ids(halo) for rank, halo in halos.items()}
        self._parts = {
            kind: {rank: _Part(cut, rank, kind, torch.from_numpy(halo), messages) for rank, halo in halos.items()}
            for kind in self.types.edges
        }
        self.channel = None if all(self._near) else GroupChannel(world)
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
            rows = rows[~torch.tensor(self._near)[_owners(ids[rows], self._offsets[name])]]
            wanted[name] = ids[rows]
            reads.append(read[rows] / max(row_bytes, 1))
            sizes.append(torch.full_like(rows, row_bytes))
        order = torch.cat(reads).argsort(descending=True)
        size = torch.cat(sizes)
        kept = torch.zeros(len(order), dtype=torch.bool)
        kept[order[size[order].cumsum(0) <= cache_bytes]] = True
        for (name, all_of_it), chosen in zip(wanted.items(), kept.split([len(each) for each in wanted.values()])):
            cached = all_of_it[chosen].sort().values
            self._cached[name] = cached, self._fetch(name, "x", cached)
        self.requested = 0

    def hops(self, seeds: Sequence[int], replace: bool) -> Callable[[EdgeType, Tensor, int], Neighbors]:
        """Returns what answers the hops of one batch, see :func:`~lightning_gnn.sampling.hops.sample_hops`.

        Of a node i, ids i + N, i + 2 N, ... are copies, each with draws of its own. Sources are nodes, not copies. `seeds` are
        those of the random numbers for the batch of each rank: who answers draws what the asking rank would.
        """
        numbers = {kind: number for number, kind in enumerate(self.types.edges)}

        def hop(kind: EdgeType, targets: Tensor, fanout: int) -> Neighbors:
            of_type = [seed_of_type(seed, numbers[kind]) for seed in seeds]
            offsets = self._offsets[kind[2]]
            owner = _owners(targets % int(offsets[-1]), offsets)
            order = torch.argsort(owner, stable=True)
            by_rank = targets[order].split(torch.bincount(owner, minlength=self._world.size).tolist())
            found = self._answers(kind, by_rank, fanout, of_type, replace)
            for rank, part in self._parts[kind].items():
                found[rank] = part.neighbors(by_rank[rank], fanout, of_type[self.rank], replace)
            return _stitched([found[rank] for rank in range(self._world.size)], order)

        return hop

    def _answers(
        self, kind: EdgeType, by_rank: Sequence[Tensor], fanout: int, seeds: Sequence[int], replace: bool
    ) -> dict[int, Neighbors]:
        if self.channel is None:
            return {}
        nothing = by_rank[0][:0]
        questions = self.channel.exchange([nothing if near else targets for near, targets in zip(self._near, by_rank)])
        own = self._parts[kind][self._world.rank]
        answers = [own.neighbors(targets, fanout, seeds[peer], replace) for peer, targets in enumerate(questions)]
        counts = self.channel.exchange([answer.counts for answer in answers])
        ends = self.channel.exchange([torch.stack([answer.sources, answer.edges], 1) for answer in answers])
        return {peer: Neighbors(_bounds(count), *edges.T) for peer, (count, edges) in enumerate(zip(counts, ends))}

    def rows(self, kind: NodeType | EdgeType, name: str, ids: Tensor) -> Tensor:
        """Returns the rows of nodes, or edges, of a type, ``[n, ...]``, of one of its :meth:`names`."""
        if name != "x" or not isinstance(kind, str) or kind not in self._cached or not len(self._cached[kind][0]):
            return self._fetch(kind, name, ids)
        cached, cache = self._cached[kind]
        place = torch.searchsorted(cached, ids).clamp(max=len(cached) - 1)
        hit = cached[place] == ids
        self.hits += int(hit.sum())
        self.requested += int(hit.sum())
        rows = self._fetch(kind, name, ids[~hit])
        out = rows.new_empty((len(ids), *rows.shape[1:]))
        out[~hit], out[hit] = rows, cache[place[hit]]
        return out

    def _fetch(self, kind: NodeType | EdgeType, name: str, ids: Tensor) -> Tensor:
        values = self._cut.attributes[self.types.key(kind)][name]
        if self.channel is None:
            return torch.index_select(values, 0, ids)
        owner = _owners(ids, self._offsets[kind])
        far = ~torch.tensor(self._near)[owner]
        if isinstance(kind, str) and name == "x":
            self.requested += int(far.sum())
        order = torch.argsort(torch.where(far, owner, self._world.size), stable=True)
        order, near = order.tensor_split([int(far.sum())])
        first = torch.from_numpy(self._offsets[kind])
        rows, own = OwnedRows(first, self.channel), first[self._world.rank]
        out = values.new_empty((len(ids), *values.shape[1:]))
        out[order] = rows.pull(rows.request(ids[order]), lambda chosen: torch.index_select(values, 0, chosen + own))
        out[near] = torch.index_select(values, 0, ids[near])
        return out

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
