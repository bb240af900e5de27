"""Neighborhoods over several machines, for a batch of every rank at once, in one exchange more than the number of hops.

Source: DistDGL (2020) sections III-C and III-D, in which each hop is a request and an answer, and features are another. Here a
draw depends only on the node and the batch's random seed. The machine of a node can therefore draw its in-edges before they are
requested.

One rank of every machine works for a batch. It draws as far as nodes are on its machine. It passes nodes on other machines to the
ranks that work for this batch there. It sends edges, and each node's rows once, to the rank of the batch.

A node is reached at some depth, seeds at 0, and drawn with that hop's number of neighbors. A machine may first reach it at a
larger depth, if a shorter path goes through another machine. It is then drawn again, and the first draw is discarded. If a node
is reached again at the same or a larger depth, nothing is done.

This requires that the first depth is no less than the depth in the sample. It can only fail for nodes that were reached through a
node drawn too late. Seeds are never late: each machine has them first. Draws at depth 1 are therefore correct. Nodes reached at
up to depth 2 are in the sample, at no larger depth. The first depth that can be wrong is 3, for a node of depth 4, at which
nothing is drawn with :data:`MOST_HOPS`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.strategies.sampling.graph_store import GraphStore, Names
from lightning_gnn.strategies.sampling.hops import LARGEST_ARRAY, Numbering, pack_tensors, unpack_tensors
from lightning_gnn.strategies.sampling.neighbors import NO_IDS, Neighbors, concat_ids
from lightning_gnn.strategies.sampling.sampler import seed_of_type

MOST_HOPS = 4
"""Maximum number of hops; deeper neighborhoods are sampled hop by hop."""


class _Work:
    """Work of a rank for one rank's batch, on its machine.

    Attributes:
        samples: by edge type and depth, targets and their in-edges.
        reached: by node type, nodes here that were reached for the first time.
        passed: by machine, node type and depth, nodes there that were reached.
    """

    def __init__(self, sizes: Mapping[NodeType, int], dense: bool) -> None:
        self._numberings = {name: Numbering(size, dense) for name, size in sizes.items()}
        self._depths = {name: torch.empty(1024, dtype=torch.int8) for name in sizes}
        self.start()

    def start(self) -> None:
        for numbering in self._numberings.values():
            numbering.clear()
        self.samples = defaultdict[tuple[EdgeType, int], list[tuple[Tensor, Neighbors]]](list)
        self.reached = defaultdict[NodeType, list[Tensor]](list)
        self.passed = defaultdict[tuple[int, NodeType, int], list[Tensor]](list)

    def reach(self, name: NodeType, ids: Tensor, depth: int) -> tuple[Tensor, int]:
        """Returns the distinct nodes not yet reached at this depth or below, new nodes first, and the number of new nodes."""
        numbering, first = self._numberings[name], len(self._numberings[name])
        numbers = numbering.add(ids)
        depths = self._depths[name]
        if len(numbering) > len(depths):
            with torch.inference_mode(False):  # reused by the next batch
                depths = self._depths[name] = torch.cat([depths, depths.new_empty(2 * len(numbering))])
        depths[first : len(numbering)] = depth
        again = numbers[depths[numbers] > depth].unique()
        depths[again] = depth
        new = numbering.since(first)
        return (torch.cat([new, numbering.ids[again]]) if len(again) else new), len(new)


class Expander:
    """Sampler of the neighborhoods of a batch of each rank; all ranks call it in the same order.

    Args:
        store: the graph, on several machines.
        num_neighbors: by edge type and hop, up to :data:`MOST_HOPS` hops.
        replace: whether to draw with replacement.
        names: attributes of nodes and edges of each type that batches have.
    """

    def __init__(self, store: GraphStore, num_neighbors: Mapping[EdgeType, Sequence[int]], replace: bool, names: Names) -> None:
        self._store, self._fanouts, self._replace, self._names = store, num_neighbors, replace, names
        self._hops = max(map(len, num_neighbors.values()))
        self._draws = [(kind, depth) for depth in range(self._hops) for kind, of in num_neighbors.items() if of[depth]]
        self._tasks = [(name, depth) for name in store.types.nodes for depth in range(self._hops + 1)]
        self._number = {kind: number for number, kind in enumerate(store.types.edges)}
        sizes = {name: store.types.total(name) for name in store.types.nodes}
        ranks = (store.rank, *store.askers)
        dense = max(sizes.values()) * len(ranks) <= LARGEST_ARRAY
        self._work = {rank: _Work(sizes, dense) for rank in ranks}
        # By peer rank: the ranks whose batches both work for.
        peers = {peer for rank in ranks for peer in store.teams[rank]} - {store.rank}
        self._shared = {peer: [rank for rank in sorted(ranks) if peer in store.teams[rank]] for peer in sorted(peers)}
        # Empty tensors with the dtypes of a message from each peer.
        nothing = self._results(store.rank, _Work({}, dense))
        self._like = {
            peer: [NO_IDS] * len(of) * len(self._tasks) + nothing * (peer in store.servers.values())
            for peer, of in self._shared.items()
        }

    def run(
        self, seeds: Mapping[NodeType, Tensor], random_seeds: Sequence[int], peer_seeds: Mapping[int, Tensor] | None
    ) -> Neighborhood:
        """Returns this rank's neighborhood.

        Args:
            seeds: ids by type.
            random_seeds: random seed of the batch of each rank.
            peer_seeds: seeds, of the input type, of the ranks whose requests this rank answers; None requires an additional
                exchange.
        """
        store, seeded = self._store, self._store.types.input_type
        for work in self._work.values():
            work.start()
        sample = Neighborhood(store, self._draws, self._work[store.rank])
        seeds_by_peer = {rank: {seeded: ids} for rank, ids in (peer_seeds or {}).items()}
        for rank, first in {store.rank: seeds, **seeds_by_peer}.items():
            self._expand(rank, {(name, 0): [ids] for name, ids in first.items()}, random_seeds[rank])
            if peer_seeds is not None:  # the ranks that work for the batch elsewhere have them
                for there in store.servers:
                    self._work[rank].passed.pop((there, seeded, 0), None)
        for _ in range(self._hops + (1 if peer_seeds is not None else 2)):
            arrived = store.exchange({peer: pack_tensors(self._message(peer)) for peer in self._shared})
            tasks: dict[int, dict[tuple[NodeType, int], list[Tensor]]] = {rank: {} for rank in self._work}
            for peer, data in arrived.items():
                fields = iter(unpack_tensors(data, self._like[peer]))
                for rank in self._shared[peer]:
                    for task in self._tasks:
                        tasks[rank].setdefault(task, []).append(next(fields))
                if peer in store.servers.values():
                    self._take(sample, fields)
            for rank, of_rank in tasks.items():
                self._expand(rank, of_rank, random_seeds[rank])
        return sample

    def _expand(self, rank: int, tasks: dict[tuple[NodeType, int], list[Tensor]], random_seed: int) -> None:
        """Draw the in-edges of nodes that were reached, and of nodes reached by these, as far as they are on this machine."""
        store, work = self._store, self._work[rank]
        for depth in range(self._hops + 1):
            for name in store.types.nodes:
                reached = concat_ids(tasks.get((name, depth), []))
                if not len(reached):
                    continue
                ids, num_new = work.reach(name, reached, depth)
                machine = store.machines_of(name, ids)
                here = machine == store.local_machine
                if depth < self._hops or self._names[name]:
                    for there in store.servers if len(ids) else ():
                        work.passed[there, name, depth].append(ids[machine == there])
                if rank != store.rank:
                    work.reached[name].append(ids[:num_new][here[:num_new]])
                targets = ids[here]
                for kind, of in self._fanouts.items():
                    if kind[2] == name and depth < self._hops and of[depth] and len(targets):
                        seed = seed_of_type(random_seed, self._number[kind])
                        neighbors = store.draw_neighbors(kind, targets, of[depth], seed, self._replace)
                        work.samples[kind, depth].append((targets, neighbors))
                        tasks.setdefault((kind[0], depth + 1), []).append(neighbors.sources)

    def _message(self, peer: int) -> list[Tensor]:
        """Returns the message to a rank: nodes reached on its machine, and the results for its own batch."""
        store, fields = self._store, list[Tensor]()
        there = int(store.machine[peer])
        for rank in self._shared[peer]:
            fields += [concat_ids(self._work[rank].passed.pop((there, *task), [])) for task in self._tasks]
        return fields + self._results(peer, self._work[peer]) if peer in store.askers else fields

    def _results(self, rank: int, work: _Work) -> list[Tensor]:
        """Returns the results for a rank's batch since its last message.

        These are draws by type and depth, and new nodes by type; each with rows.
        """
        store, fields = self._store, list[Tensor]()
        for draw in self._draws:
            found = work.samples.pop(draw, [])
            edges = Neighbors.all_of([of for _, of in found])
            fields += [concat_ids([targets for targets, _ in found]), *edges.fields]
            fields += [store.read(draw[0], name, edges.edges) for name in self._names[draw[0]]]
        for name in store.types.nodes:
            ids = concat_ids(work.reached.pop(name, []))
            fields += [ids, *(store.read_for(rank, name, each, ids) for each in self._names[name])]
        return fields

    def _take(self, sample: Neighborhood, fields: Any) -> None:
        for kind, depth in self._draws:
            targets, counts, sources, edges = (next(fields) for _ in range(4))
            rows = {name: next(fields) for name in self._names[kind]}
            if len(targets):
                sample.samples[kind, depth].append((targets, Neighbors.of(counts, sources, edges)))
                sample.add(kind, edges, rows)
        for name in self._store.types.nodes:
            ids = next(fields)
            rows = {each: next(fields) for each in self._names[name]}
            if "x" in rows and len(ids):
                sample.add((name, "x"), ids[~self._store.find_cached(name, ids)[0]], {"x": rows.pop("x")})
            sample.add(name, ids, rows)


class Neighborhood:
    """Sample of a batch: returns hops in the order of the calls, and rows of its nodes and edges.

    Attributes:
        samples: by edge type and depth, targets and their in-edges.
    """

    def __init__(self, store: GraphStore, draws: Sequence[tuple[EdgeType, int]], work: _Work) -> None:
        self._store, self._draws = store, iter(draws)
        self.samples = work.samples
        self._remote_rows = defaultdict[Any, list[tuple[Tensor, dict[str, Tensor]]]](list)

    def add(self, kind: Any, ids: Tensor, rows: dict[str, Tensor]) -> None:
        """Add rows of nodes, or edges, of another machine; node features have the key ``(type, "x")``, since some are cached."""
        if rows and len(ids):
            self._remote_rows[kind].append((ids, rows))

    def hop(self, kind: EdgeType, targets: Tensor, fanout: int) -> Neighbors:
        """See :data:`~lightning_gnn.strategies.sampling.hops.Hop`."""
        draw = next(self._draws)
        assert draw[0] == kind
        samples = self.samples.pop(draw, [])
        places = _places(concat_ids([ids for ids, _ in samples]), targets, self._store.types.total(kind[2]))
        return Neighbors.all_of([of for _, of in samples]).at(places)

    def rows(self, wanted: Mapping[Any, tuple[Tensor, Sequence[str]]]) -> dict[Any, dict[str, Tensor]]:
        """See :meth:`GraphStore.rows`; for nodes and edges in the sample."""
        store, out = self._store, dict[Any, dict[str, Tensor]]()
        for kind, (ids, names) in wanted.items():
            is_local = store.machines_of(kind, ids) == store.local_machine
            remote = (~is_local).nonzero().view(-1)
            out[kind] = {name: store.read_local(kind, name, ids, is_local) for name in names}
            features = out[kind].get("x") if isinstance(kind, str) else None
            if features is not None:
                known, rows = store.from_cache(kind, ids[remote])
                features.index_copy_(0, remote[known], rows)
                self._fill({"x": features}, (kind, "x"), ids, remote[~known], store.types.total(kind))
            plain = {name: rows for name, rows in out[kind].items() if rows is not features}
            self._fill(plain, kind, ids, remote, store.types.total(kind))
        return out

    def _fill(self, out: Mapping[str, Tensor], kind: Any, ids: Tensor, remote: Tensor, num_ids: int) -> None:
        """Copy the rows received from other machines to the positions `remote` of `ids`."""
        came = self._remote_rows.pop(kind, [])
        if not out or not len(remote):
            return
        place = _places(concat_ids([each for each, _ in came]), ids[remote], num_ids)
        for name, values in out.items():
            values.index_copy_(0, remote, concat_ids([rows[name] for _, rows in came]).index_select(0, place))


def _places(known_ids: Tensor, ids: Tensor, num_ids: int) -> Tensor:
    """Returns the first position of each id in `known_ids`, which must contain it."""
    numbering = Numbering(num_ids, dense=False)
    numbering.start(known_ids)
    places = numbering.find(ids)
    assert not len(places) or int(places.min()) >= 0, "a node or an edge of the sample did not come"
    return places
