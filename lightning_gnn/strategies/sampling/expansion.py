"""Neighbourhoods that lie on several machines, of a batch of every rank, in as many exchanges as they have hops, and one.

Source: DistDGL (2020) sections III-C and III-D, where a hop is a question and an answer, and features are another. Here a draw
depends on nothing but the node and the batch's random seed, so who holds a node draws its in-edges before it is asked: one rank
of every machine works for a batch. It draws as far as nodes lie on its machine, passes those on that lie on another to the rank
that works for this batch there, and sends edges, and each node's rows once, to the rank whose batch it is.

A node is reached at some depth, seeds at 0, and drawn with that hop's fan-out. A machine may reach it late, by a detour, while a
shorter way leads over another machine: then it is drawn again, and what was drawn first is left aside. A node that is reached
a second time, no earlier, needs nothing. This rests on its first depth being no less than its depth in the sample, which can only
fail for what was reached by way of a node that was drawn too late. Seeds never are: each machine has them first. So what is drawn
at depth 1 is drawn right, what is reached at up to depth 2 is in the sample, no deeper than that, and the first that can be wrong
is a depth of 3: of a node whose own is 4, at which nothing is drawn in :data:`MOST_HOPS`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import EdgeType, NodeType

from lightning_gnn.strategies.sampling.graph_store import GraphStore, Names
from lightning_gnn.strategies.sampling.hops import LARGEST_ARRAY, Numbering, packed, unpacked
from lightning_gnn.strategies.sampling.neighbors import NO_IDS, Neighbors, joined
from lightning_gnn.strategies.sampling.sampler import seed_of_type

MOST_HOPS = 4
"""Deeper neighbourhoods are asked for hop by hop."""


class _Work:
    """What a rank does for one rank's batch, on its machine.

    Attributes:
        drawn: by edge type and depth, targets and their in-edges.
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
        self.drawn = defaultdict[tuple[EdgeType, int], list[tuple[Tensor, Neighbors]]](list)
        self.reached = defaultdict[NodeType, list[Tensor]](list)
        self.passed = defaultdict[tuple[int, NodeType, int], list[Tensor]](list)

    def reach(self, name: NodeType, ids: Tensor, depth: int) -> tuple[Tensor, int]:
        """Returns those of nodes that were not reached at this depth or a smaller one, distinct; first the new ones, so many."""
        numbering, first = self._numberings[name], len(self._numberings[name])
        numbers = numbering.add(ids)
        depths = self._depths[name]
        if len(numbering) > len(depths):
            with torch.inference_mode(False):  # it stays for the next batch
                depths = self._depths[name] = torch.cat([depths, depths.new_empty(2 * len(numbering))])
        depths[first : len(numbering)] = depth
        again = numbers[depths[numbers] > depth].unique()
        depths[again] = depth
        new = numbering.since(first)
        return (torch.cat([new, numbering.ids[again]]) if len(again) else new), len(new)


class Expander:
    """Samples the neighbourhoods of a batch of each rank; all ranks call it in step.

    Args:
        store: the graph, on several machines.
        num_neighbors: by edge type, per hop, up to :data:`MOST_HOPS`.
        replace: draw with replacement.
        names: of what nodes and edges of each type have that the batch will, too.
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
        # By rank that is spoken to, whose batches both work for.
        peers = {peer for rank in ranks for peer in store.teams[rank]} - {store.rank}
        self._shared = {peer: [rank for rank in sorted(ranks) if peer in store.teams[rank]] for peer in sorted(peers)}
        # Empty tensors of the dtypes of a message from each.
        nothing = self._results(store.rank, _Work({}, dense))
        self._like = {
            peer: [NO_IDS] * len(of) * len(self._tasks) + nothing * (peer in store.servers.values())
            for peer, of in self._shared.items()
        }

    def run(
        self, seeds: Mapping[NodeType, Tensor], random_seeds: Sequence[int], asked: Mapping[int, Tensor] | None
    ) -> Neighbourhood:
        """Returns this rank's neighbourhood.

        Args:
            seeds: ids by type.
            random_seeds: of the batch of each rank.
            asked: the seeds, of the input type, of the ranks that this one answers; None if it does not know: an exchange more.
        """
        store, seeded = self._store, self._store.types.input_type
        for work in self._work.values():
            work.start()
        found = Neighbourhood(store, self._draws, self._work[store.rank])
        of_others = {rank: {seeded: ids} for rank, ids in (asked or {}).items()}
        for rank, first in {store.rank: seeds, **of_others}.items():
            self._expand(rank, {(name, 0): [ids] for name, ids in first.items()}, random_seeds[rank])
            if asked is not None:  # who works for the batch elsewhere knows them
                for there in store.servers:
                    self._work[rank].passed.pop((there, seeded, 0), None)
        for _ in range(self._hops + (1 if asked is not None else 2)):
            arrived = store.exchange({peer: packed(self._message(peer)) for peer in self._shared})
            tasks: dict[int, dict[tuple[NodeType, int], list[Tensor]]] = {rank: {} for rank in self._work}
            for peer, data in arrived.items():
                fields = iter(unpacked(data, self._like[peer]))
                for rank in self._shared[peer]:
                    for task in self._tasks:
                        tasks[rank].setdefault(task, []).append(next(fields))
                if peer in store.servers.values():
                    self._take(found, fields)
            for rank, of_rank in tasks.items():
                self._expand(rank, of_rank, random_seeds[rank])
        return found

    def _expand(self, rank: int, tasks: dict[tuple[NodeType, int], list[Tensor]], random_seed: int) -> None:
        """Draws the in-edges of nodes that were reached, and of those that are reached by them, as far as they lie here."""
        store, work = self._store, self._work[rank]
        for depth in range(self._hops + 1):
            for name in store.types.nodes:
                found = joined(tasks.get((name, depth), []))
                if not len(found):
                    continue
                ids, num_new = work.reach(name, found, depth)
                machine = store.machines_of(name, ids)
                here = machine == store.here
                if depth < self._hops or self._names[name]:
                    for there in store.servers if len(ids) else ():
                        work.passed[there, name, depth].append(ids[machine == there])
                if rank != store.rank:
                    work.reached[name].append(ids[:num_new][here[:num_new]])
                targets = ids[here]
                for kind, of in self._fanouts.items():
                    if kind[2] == name and depth < self._hops and of[depth] and len(targets):
                        seed = seed_of_type(random_seed, self._number[kind])
                        drawn = store.drawn(kind, targets, of[depth], seed, self._replace)
                        work.drawn[kind, depth].append((targets, drawn))
                        tasks.setdefault((kind[0], depth + 1), []).append(drawn.sources)

    def _message(self, peer: int) -> list[Tensor]:
        """Returns what a rank is to be told: nodes that were reached on its machine, and what was found for its own batch."""
        store, fields = self._store, list[Tensor]()
        there = int(store.machine[peer])
        for rank in self._shared[peer]:
            fields += [joined(self._work[rank].passed.pop((there, *task), [])) for task in self._tasks]
        return fields + self._results(peer, self._work[peer]) if peer in store.askers else fields

    def _results(self, rank: int, work: _Work) -> list[Tensor]:
        """Returns what was found for a rank's batch since its last message: by type and depth draws, and by type new nodes; each
        with rows."""
        store, fields = self._store, list[Tensor]()
        for draw in self._draws:
            found = work.drawn.pop(draw, [])
            edges = Neighbors.all_of([of for _, of in found])
            fields += [joined([targets for targets, _ in found]), *edges.fields]
            fields += [store.read(draw[0], name, edges.edges) for name in self._names[draw[0]]]
        for name in store.types.nodes:
            ids = joined(work.reached.pop(name, []))
            fields += [ids, *(store.read_for(rank, name, each, ids) for each in self._names[name])]
        return fields

    def _take(self, found: Neighbourhood, fields: Any) -> None:
        for kind, depth in self._draws:
            targets, counts, sources, edges = (next(fields) for _ in range(4))
            rows = {name: next(fields) for name in self._names[kind]}
            if len(targets):
                found.drawn[kind, depth].append((targets, Neighbors.of(counts, sources, edges)))
                found.add(kind, edges, rows)
        for name in self._store.types.nodes:
            ids = next(fields)
            rows = {each: next(fields) for each in self._names[name]}
            if "x" in rows and len(ids):
                found.add((name, "x"), ids[~self._store.cached(name, ids)[0]], {"x": rows.pop("x")})
            found.add(name, ids, rows)


class Neighbourhood:
    """What was sampled for a batch: answers hops in the order in which they are asked, and has the rows of its nodes and edges.

    Attributes:
        drawn: by edge type and depth, targets and their in-edges.
    """

    def __init__(self, store: GraphStore, draws: Sequence[tuple[EdgeType, int]], work: _Work) -> None:
        self._store, self._draws = store, iter(draws)
        self.drawn = work.drawn
        self._far = defaultdict[Any, list[tuple[Tensor, dict[str, Tensor]]]](list)

    def add(self, kind: Any, ids: Tensor, rows: dict[str, Tensor]) -> None:
        """Takes rows of nodes, or edges, of another machine; features of nodes by ``(type, "x")``, since some are cached."""
        if rows and len(ids):
            self._far[kind].append((ids, rows))

    def hop(self, kind: EdgeType, targets: Tensor, fanout: int) -> Neighbors:
        """See :data:`~lightning_gnn.strategies.sampling.hops.Hop`."""
        asked = next(self._draws)
        assert asked[0] == kind
        drawn = self.drawn.pop(asked, [])
        places = _places(joined([ids for ids, _ in drawn]), targets, self._store.types.total(kind[2]))
        return Neighbors.all_of([of for _, of in drawn]).at(places)

    def rows(self, wanted: Mapping[Any, tuple[Tensor, Sequence[str]]]) -> dict[Any, dict[str, Tensor]]:
        """See :meth:`GraphStore.rows`; of nodes and edges that were sampled."""
        store, out = self._store, dict[Any, dict[str, Tensor]]()
        for kind, (ids, names) in wanted.items():
            near = store.machines_of(kind, ids) == store.here
            far = (~near).nonzero().view(-1)
            out[kind] = {name: store.with_near(kind, name, ids, near) for name in names}
            features = out[kind].get("x") if isinstance(kind, str) else None
            if features is not None:
                known, rows = store.from_cache(kind, ids[far])
                features.index_copy_(0, far[known], rows)
                self._fill({"x": features}, (kind, "x"), ids, far[~known], store.types.total(kind))
            others = {name: rows for name, rows in out[kind].items() if rows is not features}
            self._fill(others, kind, ids, far, store.types.total(kind))
        return out

    def _fill(self, out: Mapping[str, Tensor], kind: Any, ids: Tensor, far: Tensor, num_ids: int) -> None:
        """Puts what has come from other machines where it belongs, `far` among `ids`."""
        came = self._far.pop(kind, [])
        if not out or not len(far):
            return
        place = _places(joined([each for each, _ in came]), ids[far], num_ids)
        for name, values in out.items():
            values.index_copy_(0, far, joined([rows[name] for _, rows in came]).index_select(0, place))


def _places(known: Tensor, ids: Tensor, num_ids: int) -> Tensor:
    """Returns where each id is first among those that are known, which it is."""
    numbering = Numbering(num_ids, dense=False)
    numbering.start(known)
    places = numbering.find(ids)
    assert not len(places) or int(places.min()) >= 0, "a node or an edge of the sample did not come"
    return places
