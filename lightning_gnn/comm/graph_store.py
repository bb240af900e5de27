"""The graph as a sampler sees it: neighbours and rows of any node, wherever they lie.

Source: DistDGL (2020) sections III-C (features: local rows through shared memory, remote ones in bulk) and III-D (samplers: the
owner of a node draws its neighbours). Parts of this machine are read through the memory-mapped store, which all of its ranks
share; for others their owners are asked, once for all nodes of a hop.

N nodes, P ranks; ids are those of the partitioned graph, in which a rank's nodes, and their in-edges, are one range.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch_geometric.typing import EdgeType

from lightning_gnn.comm.group import World
from lightning_gnn.comm.requests import Requests
from lightning_gnn.kernels import CSR
from lightning_gnn.partition.shard import owners_of
from lightning_gnn.sampling.neighbors import Neighbors, sample_neighbors

if TYPE_CHECKING:
    from lightning_gnn.datamodules.shards import Cut


class _Part:
    """In-edges of a rank's nodes, memory-mapped."""

    def __init__(self, cut: Cut, rank: int, messages: str | None) -> None:
        self._first, self._first_edge = int(cut.offsets[rank]), int(cut.edge_offsets[rank])
        self._owned = int(cut.offsets[rank + 1]) - self._first
        self._num_nodes = int(cut.offsets[-1])
        self._halo = torch.from_numpy(cut.halos[rank])
        source, target = torch.from_numpy(cut.edge_index_of(rank))
        self._edges: Tensor | None = None
        if messages is not None:
            kept = cut.attributes["edge"][messages][self._first_edge : int(cut.edge_offsets[rank + 1])]
            self._edges, source, target = kept.nonzero().view(-1), source[kept], target[kept]
        indptr = _bounds(torch.bincount(target, minlength=self._owned))
        self._csr = CSR(indptr, source, None, self._owned + len(self._halo))

    def neighbors(self, targets: Tensor, fanout: int, seed: int, replace: bool) -> Neighbors:
        """Returns sampled in-edges of targets, nodes or copies of them, in ids of the whole graph."""
        rows = targets % self._num_nodes - self._first
        found = sample_neighbors(self._csr, rows, fanout, seed, replace=replace, keys=targets)
        sources = found.sources
        far = sources >= self._owned
        sources = sources + self._first
        sources[far] = self._halo[found.sources[far] - self._owned]
        edges = found.edges if self._edges is None else self._edges[found.edges]
        return Neighbors(found.offsets, sources, edges + self._first_edge)

    def halo_by_reads(self) -> Tensor:
        """Returns the halo rows, those that most edges read first."""
        reads = torch.bincount(self._csr.indices, minlength=self._csr.num_cols)[self._owned :]
        return self._halo[reads.argsort(descending=True)]


class GraphStore:
    """Neighbours and rows of all nodes. Where ranks lie on several machines, all of them make its calls in step.

    Args:
        cut: the partitioned graph, in the store of this machine.
        world: the ranks.
        near: ranks of this machine.
        cache_bytes: of features of nodes on other machines that are kept here: those that most edges of this rank read.
        messages: a mask of edges; other edges join no neighbours.

    Attributes:
        asked, hits: rows of features that lie on other machines: wanted, and found in the cache.
    """

    def __init__(
        self, cut: Cut, world: World, near: Sequence[int], cache_bytes: int = 0, messages: str | None = None
    ) -> None:
        self._cut, self._world = cut, world
        self._near = [rank in near for rank in range(world.size)]
        self._parts = {rank: _Part(cut, rank, messages) for rank in near}
        self.requests = None if all(self._near) else Requests(world)
        self.asked = self.hits = 0
        self._cached, self._cache = torch.empty(0, dtype=torch.long), cut.attributes["node"]["x"][:0]
        if self.requests is not None and cache_bytes:
            self._fill_cache(cache_bytes)

    @property
    def rank(self) -> int:
        """This process."""
        return self._world.rank

    @property
    def node_names(self) -> list[str]:
        """Names of what has a row per node."""
        return sorted(self._cut.attributes["node"])

    @property
    def edge_names(self) -> list[str]:
        """Names of what has a row per edge."""
        return sorted(self._cut.attributes["edge"])

    def _fill_cache(self, cache_bytes: int) -> None:
        wanted = self._parts[self._world.rank].halo_by_reads()
        far = ~torch.tensor(self._near)[_owners(wanted, self._cut.offsets)]
        row_bytes = self._cut.attributes["node"]["x"][:1].nbytes
        cached = wanted[far][: cache_bytes // max(row_bytes, 1)].sort().values
        self._cached, self._cache = cached, self._fetch("node", "x", cached)
        self.asked = 0

    def hops(self, seeds: Sequence[int], replace: bool) -> Callable[[EdgeType, Tensor, int], Neighbors]:
        """Returns what answers the hops of one batch, see :func:`~lightning_gnn.sampling.hops.sample_hops`.

        Of a node i, ids i + N, i + 2 N, ... are copies, each with draws of its own. Sources are nodes, not copies.

        Args:
            seeds: of the random numbers for the batch of each rank: who answers draws what the asking rank would.
            replace: draw with replacement.
        """

        def hop(kind: EdgeType, targets: Tensor, fanout: int) -> Neighbors:
            return self._neighbors(targets, fanout, seeds, replace)

        return hop

    def _neighbors(self, targets: Tensor, fanout: int, seeds: Sequence[int], replace: bool) -> Neighbors:
        seed = seeds[self._world.rank]
        owner = _owners(targets % int(self._cut.offsets[-1]), self._cut.offsets)
        order = torch.argsort(owner, stable=True)
        by_rank = targets[order].split(torch.bincount(owner, minlength=self._world.size).tolist())
        found = self._answers(by_rank, fanout, seeds, replace)
        for rank, part in self._parts.items():
            found[rank] = part.neighbors(by_rank[rank], fanout, seed, replace)
        return _stitched([found[rank] for rank in range(self._world.size)], order)

    def _answers(
        self, by_rank: Sequence[Tensor], fanout: int, seeds: Sequence[int], replace: bool
    ) -> dict[int, Neighbors]:
        """Asks the ranks of other machines, and answers theirs."""
        if self.requests is None:
            return {}
        nothing = by_rank[0][:0]
        questions = self.requests.exchange([nothing if near else targets for near, targets in zip(self._near, by_rank)])
        own = self._parts[self._world.rank]
        answers = [own.neighbors(targets, fanout, seeds[peer], replace) for peer, targets in enumerate(questions)]
        counts = self.requests.exchange([answer.counts for answer in answers])
        ends = self.requests.exchange([torch.stack([answer.sources, answer.edges], 1) for answer in answers])
        found = {}
        for peer, (count, edges) in enumerate(zip(counts, ends)):
            found[peer] = Neighbors(_bounds(count), edges[:, 0], edges[:, 1])
        return found

    def nodes(self, name: str, ids: Tensor) -> Tensor:
        """Returns the rows of nodes, ``[n, ...]``, of one of `node_names`."""
        if name != "x" or not len(self._cached):
            return self._fetch("node", name, ids)
        place = torch.searchsorted(self._cached, ids).clamp(max=len(self._cached) - 1)
        hit = self._cached[place] == ids
        self.hits += int(hit.sum())
        self.asked += int(hit.sum())
        rows = self._fetch("node", name, ids[~hit])
        out = rows.new_empty((len(ids), *rows.shape[1:]))
        out[~hit], out[hit] = rows, self._cache[place[hit]]
        return out

    def edges(self, name: str, ids: Tensor) -> Tensor:
        """Returns the rows of edges, ``[n, ...]``, of one of `edge_names`."""
        return self._fetch("edge", name, ids)

    def _fetch(self, kind: str, name: str, ids: Tensor) -> Tensor:
        values = self._cut.attributes[kind][name]
        if self.requests is None:
            return torch.index_select(values, 0, ids)
        offsets = self._cut.offsets if kind == "node" else self._cut.edge_offsets
        owner = _owners(ids, offsets)
        far = ~torch.tensor(self._near)[owner]
        if kind == "node" and name == "x":
            self.asked += int(far.sum())
        order = torch.argsort(torch.where(far, owner, self._world.size), stable=True)
        counts = torch.bincount(owner[far], minlength=self._world.size).tolist()
        questions = self.requests.exchange(ids[order][: sum(counts)].split(counts))
        arrived = self.requests.exchange([torch.index_select(values, 0, question) for question in questions])
        out = values.new_empty((len(ids), *values.shape[1:]))
        out[order[: sum(counts)]] = torch.cat(arrived)
        here = order[sum(counts) :]
        out[here] = torch.index_select(values, 0, ids[here])
        return out

    def beside(self) -> GraphStore:
        """Returns a store of the same parts for another thread, with counts and a way to ask of its own; all ranks call it."""
        other = copy.copy(self)
        other.asked = other.hits = 0
        if self.requests is not None:
            other.requests = Requests(self._world)
        return other

    def take_counts(self) -> tuple[int, int, int]:
        """Returns rows asked for, hits, and bytes received from other machines since the last call."""
        received = 0 if self.requests is None else self.requests.bytes_received
        taken = self.asked, self.hits, received
        self.asked = self.hits = 0
        if self.requests is not None:
            self.requests.bytes_received = 0
        return taken

    def close(self) -> None:
        """Ends what ranks ask each other through."""
        if self.requests is not None:
            self.requests.close()


def _bounds(counts: Tensor) -> Tensor:
    """Returns where each of several groups of so many begins, and the end, ``[n + 1]``."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _owners(ids: Tensor, offsets: np.ndarray) -> Tensor:
    return torch.from_numpy(owners_of(offsets, ids.numpy()))


def _stitched(found: Sequence[Neighbors], order: Tensor) -> Neighbors:
    """Returns the edges of targets that were asked for in groups, in the order in which they were wanted.

    Args:
        found: by group.
        order: position of each target, group after group, among those wanted.
    """
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
