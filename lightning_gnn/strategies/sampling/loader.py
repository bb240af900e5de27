"""Mini-batches of one rank: which seeds they have, and what is sampled around them, made ahead of training in the background."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import HeteroSamplerOutput
from torch_geometric.typing import EdgeType, NodeType
from typing_extensions import override

from lightning_gnn.data.ahead import Background, Copies, Sent
from lightning_gnn.data.draws import OtherNodes, draw_others
from lightning_gnn.data.shards import Cut
from lightning_gnn.data.sources import EDGE_MASKS, MASKS, GraphData, is_labelled
from lightning_gnn.partition.layout import ONE_TYPE
from lightning_gnn.strategies.sampling.expansion import MOST_HOPS, Expander, Neighbourhood
from lightning_gnn.strategies.sampling.graph_store import GraphStore
from lightning_gnn.strategies.sampling.hops import Numbering, sample_hops, sample_trees

_CPU = torch.device("cpu")


class BatchMaker:
    """Makes a batch of seeds: samples, and fetches what its nodes and edges have.

    Args:
        store: the graph.
        num_neighbors: by edge type, per hop, the in-edges drawn of each node; -1 for all.
        replace, directed: see :class:`~lightning_gnn.strategies.sampling.NeighborSampler`.
    """

    own_masks: Sequence[str] = MASKS
    """Those of seeds that :meth:`make` sets itself: they are not fetched."""
    of_seeds: Sequence[str] = ()
    """What edges have as seeds, under these names: those that carry messages come without."""

    def __init__(
        self, store: GraphStore, num_neighbors: Mapping[EdgeType, Sequence[int]], replace: bool = False, directed: bool = True
    ) -> None:
        self.store, self._fanouts = store, num_neighbors
        self._replace, self._directed = replace, directed
        self._numberings = {name: Numbering(store.types.total(name)) for name in store.types.nodes}
        left_out = dict.fromkeys(store.types.edges, self.of_seeds) | {store.types.input_type: self.own_masks}
        kinds = *store.types.nodes, *store.types.edges
        self._names = {kind: [name for name in store.names(kind) if name not in left_out.get(kind, ())] for kind in kinds}
        shallow, timed = max(map(len, num_neighbors.values())) <= MOST_HOPS, store.choice.time_attr is not None
        expands = store.channel is not None and directed and shallow and not timed
        self._expander = Expander(store, num_neighbors, replace, self._names) if expands else None

    def make(self, seeds: Tensor, random_seeds: list[int], asked: Mapping[int, Tensor] | None = None) -> Data | HeteroData:
        """Returns the batch, as PyG's NeighborLoader gives it, with masks that are true for seeds only.

        With times, each seed has a tree of its own, of nothing later than the seed: ``batch [n]`` has each node's tree, and
        ``seed_time`` is that of each seed.

        Args:
            seeds: ids in the partitioned graph, of the input type where there are types.
            random_seeds: of each rank's batch.
            asked: the seeds of the ranks that this one answers, if they are known.
        """
        store, kind, moment = self.store, self.store.types.input_type, self.store.choice.time_attr
        if moment is None:
            batch = self._batch(*self._sample({kind: seeds}, random_seeds, asked))
        else:
            until = store.rows({kind: (seeds, [moment])})[kind][moment]
            batch = self._batch(self._trees([(kind, seeds)], random_seeds, until, self._directed), store)
            part_of(batch, kind).seed_time = until
        nodes = part_of(batch, kind)
        for name in MASKS:
            nodes[name] = torch.arange(len(nodes.n_id)) < len(seeds)
        nodes.input_id, nodes.batch_size = nodes.n_id[: len(seeds)], len(seeds)
        return batch

    def _sample(
        self, seeds: Mapping[NodeType, Tensor], random_seeds: list[int], asked: Mapping[int, Tensor] | None = None
    ) -> tuple[HeteroSamplerOutput, GraphStore | Neighbourhood]:
        """Returns the sampled neighbourhood of distinct nodes, by type, which come first, and who has its rows."""
        if self._expander is not None:
            found = self._expander.run(seeds, random_seeds, asked)
            return sample_hops(seeds, self._fanouts, found.hop, self._numberings), found
        hop = self.store.hops(random_seeds, self._replace)
        return sample_hops(seeds, self._fanouts, hop, self._numberings, self._directed), self.store

    def _trees(
        self, roots: Sequence[tuple[NodeType, Tensor]], random_seeds: list[int], until: Tensor | None, directed: bool
    ) -> HeteroSamplerOutput:
        """Returns what :func:`sample_trees` does; with times, `until` has the latest of each tree, ``[n]``."""
        types, hop = self.store.types, self.store.hops(random_seeds, self._replace, until)
        return sample_trees(roots, self._fanouts, hop, {name: types.total(name) for name in types.nodes}, directed)

    def _batch(self, out: HeteroSamplerOutput, source: GraphStore | Neighbourhood) -> Data | HeteroData:
        """Returns the batch of what was sampled, whose rows `source` has."""
        store, cut = self.store, self.store.cut
        batch: Data | HeteroData = HeteroData()
        if not store.types.is_hetero:
            batch = GraphData(cut.kinds, cut.left_out, **cut.attributes["graph"], **cut.scalars)
        ids: dict[NodeType | EdgeType, Tensor] = {**out.node, **out.edge}
        rows = source.rows({kind: (ids[kind], names) for kind, names in self._names.items()})
        for name in store.types.nodes:  # before edges: a batch has the types in the graph's order
            nodes = part_of(batch, name)
            nodes.n_id = cut.ids_of(name, out.node[name])
            for attribute, values in rows[name].items():
                nodes[attribute] = cut.in_batches(attribute, values)
            if out.num_sampled_nodes is not None:
                nodes.num_sampled_nodes = out.num_sampled_nodes[name]
            if out.batch is not None:
                nodes.batch = out.batch[name]
            if "x" not in nodes:
                nodes.num_nodes = len(nodes.n_id)
        for kind in store.types.edges:
            edges = part_of(batch, kind)
            edges.edge_index = torch.stack([out.row[kind], out.col[kind]])
            edges.e_id = cut.ids_of(kind, out.edge[kind])
            for attribute, values in rows[kind].items():
                edges[attribute] = values
            if out.num_sampled_edges is not None:
                edges.num_sampled_edges = out.num_sampled_edges[kind]
        return batch


def part_of(batch: Data | HeteroData, kind: NodeType | EdgeType) -> Any:
    """Returns where a batch keeps what the nodes, or the edges, of a type have: in itself, where there are no types."""
    return batch if isinstance(batch, Data) else batch[kind]


@dataclass(frozen=True)
class Links:
    """Which edges are seeds, and what they are compared with; ids are those of the partitioned graph.

    Attributes:
        ends: returns sources and targets of edges, ``[2, n]``, for their ids ``[n]``.
        num_negatives: pairs for each edge whose target is drawn from all other nodes of its type.
        kind: the type of the edges.
        others: draws the negatives by original ids; None where they are drawn by those of the partitioned graph.
        held_out: of edges that are no messages, in evaluation: what their negatives depend on beside the edge, in place of the
            batch's random seed. Nothing is taken out for them.
    """

    ends: Callable[[Tensor], Tensor]
    num_negatives: int
    kind: EdgeType = ONE_TYPE
    others: OtherNodes | None = None
    held_out: Sequence[int] | None = None


class EdgeBatchMaker(BatchMaker):
    """Makes a batch of edges, whose ends are the seeds of the neighbourhood.

    Edges of the batch carry no messages in it, in either direction, nor do others between the same nodes: they would tell what
    is to be learnt. With types, others are those of the same type, and of types the other way round that have an
    ``edge_train_mask``.

    With times, each end has a tree of its own, of nothing later than the edge, whose time is its ``edge_label_time``, or else its
    time as a message. Messages between its two ends that are no earlier than the edge are taken out of its trees; where messages
    have no times of their own, all between its ends.

    Args:
        links: which edges.
        *args, **options: see :class:`BatchMaker`.
    """

    of_seeds = ("edge_label", "edge_label_time")

    def __init__(self, links: Links, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._links, types, kind, self._moment = links, self.store.types, links.kind, self.store.choice.time_attr or ""
        # What is asked of seeds: with times, theirs first.
        moments = ("edge_label_time", self._moment) if self._moment else ()
        self._told = [name for name in (*moments, "edge_label", "edge_type") if name in self.store.names(kind)]
        self._shift = 0  # of labels, so that 0 is of negatives
        if links.num_negatives and "edge_label" in self._told:
            labels = self.store.cut.attributes[types.key(kind)]["edge_label"]
            self._shift = int(not labels.is_floating_point() and int(labels.min()) == 0)
        # By type of edges that may tell of a seed: whether they join the ends of a seed as it does, and the other way round.
        self._telling: dict[EdgeType, tuple[bool, bool]] = {}
        for each in types.edges if links.held_out is None else ():
            masked = EDGE_MASKS[0] in self.store.names(each)
            forth = each == kind or (masked and kind[0] == kind[2] == each[0] == each[2])
            back = (each == kind or masked) and (each[0], each[2]) == (kind[2], kind[0])
            if forth or back:
                self._telling[each] = forth, back

    @override
    def make(self, seeds: Tensor, random_seeds: list[int], asked: Mapping[int, Tensor] | None = None) -> Data | HeteroData:
        """Returns the batch of these edges, as PyG's LinkNeighborLoader gives it.

        ``edge_label_index [2, n + n K]`` has the edges in local numbers and then K negatives of the first, K of the second and so
        on; ``edge_label`` is 1 or 0, or what the graph has under that name, where 0 is of negatives, and classes from 0 on are
        raised by 1 if there are any; ``input_id`` has the edges' original ids; ``edge_label_type [n]`` their types, if the graph
        has ``edge_type``. With types, the batch has these of the type that the edges are of.

        With times, ``batch [N]`` has the seed in whose trees a node is, and ``edge_label_time [n + n K]`` the times of
        ``edge_label_index``. A negative has the source and the time of its edge.
        """
        kind, store, edge = self._links.kind, self.store, torch.arange(len(seeds))
        told = store.rows({kind: (seeds, self._told)})[kind] if self._told else {}
        until = told[self._told[0]] if self._moment else None
        source, target = self._links.ends(seeds)
        targets = torch.cat([target, self._drawn(seeds, target, until, random_seeds)])
        edge_of = torch.cat([edge, edge.repeat_interleave(self._links.num_negatives)])  # of each pair
        if until is None:
            nodes, local = _numbered(kind, source[edge_of], targets)
            batch = self._batch(*self._sample(nodes, random_seeds))
            taken = {each: self._join_seeds(batch, each, local[:, : len(seeds)]) for each in self._telling}
        else:
            edge_of_tree = torch.cat([edge, edge_of])
            roots = [(kind[0], source), (kind[2], targets)]
            out = self._trees(roots, random_seeds, until[edge_of_tree], self._directed)
            assert out.batch is not None
            out.batch = {name: edge_of_tree[tree] for name, tree in out.batch.items()}
            local = torch.stack([edge_of, (len(edge) if kind[0] == kind[2] else 0) + torch.arange(len(edge_of))])
            batch = self._batch(out, store)
            part_of(batch, kind).edge_label_time = until[edge_of]
            ends = torch.stack([source, target])
            taken = {each: self._join_own_seed(batch, each, out.node, ends, told.get(self._moment)) for each in self._telling}
        for each, leaving in taken.items():
            edges, kept = part_of(batch, each), ~leaving
            if "num_sampled_edges" in edges:
                edges.num_sampled_edges = [int(hop.sum()) for hop in kept.split(edges.num_sampled_edges)]
            for name in ("e_id", *self._names[each]):
                edges[name] = edges[name][kept]
            edges.edge_index = edges.edge_index[:, kept]
        into = part_of(batch, kind)
        into.edge_label_index, into.input_id = local, store.cut.ids_of(kind, seeds)
        label = told.get("edge_label", torch.ones(len(seeds)))
        label = label + self._shift if self._shift else label
        into.edge_label = torch.cat([label, label.new_zeros((len(edge_of) - len(seeds), *label.shape[1:]))])
        if "edge_type" in told:
            into.edge_label_type = told["edge_type"]
        return batch

    def _drawn(self, seeds: Tensor, targets: Tensor, until: Tensor | None, random_seeds: list[int]) -> Tensor:
        """Returns the targets of the negatives of each seed, ``[n K]``."""
        links, store = self._links, self.store
        numbers = links.held_out or [random_seeds[store.rank]]
        if links.others is None:
            total = store.types.total(links.kind[2])
            return draw_others(seeds, targets, links.num_negatives, total, *numbers).view(-1)
        keys = store.cut.ids_of(links.kind, seeds)
        return links.others.draw(keys, targets, until, links.num_negatives, *numbers).view(-1)

    def _join_seeds(self, batch: Data | HeteroData, kind: EdgeType, seeds: Tensor) -> Tensor:
        """Returns which edges of a type join the ends of a seed, bool ``[E]``; `seeds` in local numbers, ``[2, n]``."""
        (forth, back), (first, second) = self._telling[kind], seeds
        num, (row, col) = len(part_of(batch, kind[2]).n_id), part_of(batch, kind).edge_index
        return torch.isin(row * num + col, torch.cat([first * num + second] * forth + [second * num + first] * back))

    def _join_own_seed(
        self, batch: Data | HeteroData, kind: EdgeType, nodes: Mapping[NodeType, Tensor], ends: Tensor, time: Tensor | None
    ) -> Tensor:
        """Returns which edges of a type join the ends of their trees' seed, and are no earlier, bool ``[E]``.

        Args:
            nodes: ids by type, in local numbers' order.
            ends, time: of seeds, ids ``[2, n]``, and times as messages, if they have some, ``[n]``.
        """
        (forth, back), edges = self._telling[kind], part_of(batch, kind)
        of = part_of(batch, kind[2]).batch[edges.edge_index[1]]
        found = torch.stack([nodes[name][ids] for name, ids in zip((kind[0], kind[2]), edges.edge_index)])
        pairs, joining = ends[:, of], torch.zeros_like(of, dtype=torch.bool)
        for same in [pairs] * forth + [pairs.flip(0)] * back:
            joining |= (found == same).all(0)
        return joining if time is None or self._moment not in edges else joining & (edges[self._moment] >= time[of])


def _numbered(kind: EdgeType, sources: Tensor, targets: Tensor) -> tuple[dict[NodeType, Tensor], Tensor]:
    """Returns the distinct nodes of each type at the ends of pairs, and the pairs in their numbers, ``[2, n]``."""
    if kind[0] == kind[2]:
        nodes, local = torch.stack([sources, targets]).unique(return_inverse=True)
        return {kind[0]: nodes}, local
    (source, row), (target, col) = (ids.unique(return_inverse=True) for ids in (sources, targets))
    return {kind[0]: source, kind[2]: target}, torch.stack([row, col])


def seeds_in(cut: Cut, kind: NodeType | EdgeType, mask: str | None, rank: int | None = None) -> Tensor:
    """Returns the ids of the nodes of a type, or the edges, that are in a mask and not without a label; None takes all.

    Those of one rank's part, or of all.
    """
    low, high = (0, cut.types.total(kind)) if rank is None else cut.types.offsets(kind)[rank : rank + 2].tolist()
    if mask is None:
        return torch.arange(low, high)
    attributes = cut.attributes[cut.types.key(kind)]
    chosen, y = attributes[mask][low:high], attributes.get("y") if isinstance(kind, str) else None
    return (chosen if y is None else chosen & is_labelled(y[low:high])).nonzero().view(-1) + low


class SplitSeeds:
    """The seeds of each rank: equally many, to within one, and as many of them its own as can be.

    What a rank has too many of goes to those that have too few, of its machine first: seeds move, features stay where they
    are. DistDGL (section III-B) cuts the sorted ids into equal ranges instead, and gives each to the machine that owns most of
    it; of unequal parts, fewer seeds then stay with their owners.

    Args:
        owned: returns the seeds that a rank owns, ascending: read where they are needed, since those of all ranks are many.
        counts: how many these are, by rank.

    Attributes:
        sizes: how many seeds each rank has.
        first: the lowest of all, ``[1]``; empty where there is none.
    """

    def __init__(self, owned: Callable[[int], Tensor], counts: Sequence[int], ranks_per_machine: int = 1) -> None:
        self._owned = owned
        self.first = owned(next((rank for rank, count in enumerate(counts) if count), 0))[:1].clone()
        num_ranks, total = len(counts), sum(counts)
        share = np.full(num_ranks, total // num_ranks)
        share[np.argsort([-count for count in counts], kind="stable")[: total % num_ranks]] += 1
        self.sizes: list[int] = share.tolist()
        kept = [min(count, size) for count, size in zip(counts, self.sizes)]
        # By rank: whose seeds it has, from which of these on to which.
        self._pieces = [[(rank, 0, count)] for rank, count in enumerate(kept)]
        room = [size - count for size, count in zip(self.sizes, kept)]
        for same_machine in (True, False):
            for taker, giver in product(range(num_ranks), repeat=2):
                if same_machine and taker // ranks_per_machine != giver // ranks_per_machine:
                    continue
                given = min(room[taker], counts[giver] - kept[giver])
                if given:
                    self._pieces[taker].append((giver, kept[giver], kept[giver] + given))
                    kept[giver] += given
                    room[taker] -= given

    @classmethod
    def of(cls, cut: Cut, kind: NodeType | EdgeType, mask: str | None, ranks_per_machine: int = 1) -> SplitSeeds:
        """Returns the split of :func:`seeds_in` a mask."""

        def owned(rank: int) -> Tensor:
            return seeds_in(cut, kind, mask, rank)

        return cls(owned, [len(owned(rank)) for rank in range(len(cut.halos))], ranks_per_machine)

    def seeds(self, rank: int) -> Tensor:
        """Returns the seeds of a rank, ascending, int64."""
        return torch.cat([self._owned(owner)[low:high] for owner, low, high in self._pieces[rank]]).sort().values


class SeedBatches:
    """Batches of one rank's seeds: as many on all ranks, so that none waits for another in vain.

    Attributes:
        steps: batches of an epoch.
    """

    def __init__(self, sizes: list[int], batch_size: int) -> None:
        self.sizes = sizes
        self.steps = max(1, -(-max(sizes) // batch_size))

    def counts(self, step: int) -> tuple[int, ...]:
        return tuple((step + 1) * size // self.steps - step * size // self.steps for size in self.sizes)

    def of_epoch(self, seeds: Tensor, rank: int, seed: int | None) -> list[Tensor]:
        """Returns the seeds of each step, in the epoch's own order; None leaves them as they are."""
        order = torch.arange(len(seeds))
        if seed is not None:
            order = torch.randperm(len(seeds), generator=torch.Generator().manual_seed(seed))
        size = self.sizes[rank]
        bounds = [step * size // self.steps for step in range(self.steps + 1)]
        return [seeds[order[low:high]] for low, high in pairwise(bounds)]


@dataclass(eq=False)
class SampledBatches:
    """The training loader of a rank: an epoch's batches, some of them ahead.

    Ranks on several machines answer each other while they make batches, so all make as many: when training stops early, those
    that were begun are made to the end. Of several samplers (DistDGL, section III-D), each takes the same steps on all ranks and
    asks on channels of its own, so that none waits for another.

    Args:
        makers: make them, one per sampler; what a batch is does not depend on which.
        batches: which seeds each has.
        seeds: of this rank, nodes or edges.
        stand_in: a seed for batches in which this rank has none: a mean over nothing would be nan.
        rank: this one.
        seed: of all random numbers; None to leave the seeds in order.
        ahead: batches that are made ahead; 0 makes each when it is needed.
        epoch: returns the number of the epoch whose batches are made.
        device: where a batch is when it is taken. Where memory can be pinned for it, samplers copy each batch as soon as it is
            made, on streams of their own, while the device computes.
        others: seeds of the ranks that this one answers; None if they are to tell it.

    Attributes:
        waited: seconds spent in waiting for batches, since :meth:`take_seconds`.
    """

    makers: Sequence[BatchMaker]
    batches: SeedBatches
    seeds: Tensor
    stand_in: Tensor
    rank: int
    seed: int | None
    ahead: int
    epoch: Callable[[], int]
    device: torch.device = _CPU
    others: Mapping[int, Tensor] | None = None

    def __post_init__(self) -> None:
        self.waited = 0.0
        self._epochs = 0
        self._seconds = [0.0] * len(self.makers)
        self._copies = [Copies(self.device) for _ in self.makers]
        self._running: Generator[Data | HeteroData, None, None] | None = None

    def __len__(self) -> int:
        return self.batches.steps

    def __iter__(self) -> Iterator[Data | HeteroData]:
        self.close()
        store, *others = (maker.store for maker in self.makers)
        # No batch of this loader is being made, here or elsewhere, and all ranks begin its epochs alike.
        store.begin_epoch(others, counts=not self._epochs and self.seed is not None)
        self._epochs += 1
        epoch = self.epoch()
        of_ranks = {
            rank: self.batches.of_epoch(seeds, rank, None if self.seed is None else _mixed(self.seed, epoch, rank))
            for rank, seeds in {self.rank: self.seeds, **(self.others or {})}.items()
        }

        def make(step: int, sampler: int) -> Sent:
            began = time.perf_counter()
            try:
                batch = self._made(epoch, step, {rank: of[step] for rank, of in of_ranks.items()}, self.makers[sampler])
                return self._copies[sampler].send(batch)
            finally:
                self._seconds[sampler] += time.perf_counter() - began

        arrived = self._copies[0].arrived
        self._running = self._ahead_of(make) if self.ahead else (arrived(make(step, 0)) for step in range(len(self)))
        return self._running

    def close(self) -> None:
        """Ends an epoch that was left early, once the batches that were begun are made: other ranks may wait for them."""
        if self._running is not None:
            self._running.close()
        self._running = None

    def _made(self, epoch: int, step: int, of_ranks: Mapping[int, Tensor], maker: BatchMaker) -> Data | HeteroData:
        counts = self.batches.counts(step)
        random_seeds = [_mixed(self.seed or 0, epoch, rank, step) for rank in range(len(counts))]
        given = {rank: each if len(each) else self.stand_in for rank, each in of_ranks.items()}
        own = given.pop(self.rank)
        batch = maker.make(own, random_seeds, None if self.others is None else given)
        if "num_seeds" not in batch:  # else what other ranks have is not known before they have made theirs
            batch.seed_counts = counts
        return batch

    def _ahead_of(self, make: Callable[[int, int], Sent]) -> Generator[Data | HeteroData, None, None]:
        """Yields ``make(step, sampler)`` of all steps in order, made in threads that are so many ahead of who takes them.

        Step after step goes to the samplers in turn, so that each makes the same ones on all ranks, in the same order.
        """
        steps, samplers = len(self), len(self.makers)
        threads = [Background(f"lightning_gnn sampler {sampler}") for sampler in range(samplers)]

        def begin(step: int) -> Future[Sent]:
            return threads[step % samplers].begin(partial(make, step, step % samplers))

        begun = deque(begin(step) for step in range(min(self.ahead, steps)))
        try:
            for step in range(steps):
                began = time.perf_counter()
                sent = begun.popleft().result()
                self.waited += time.perf_counter() - began
                if step + self.ahead < steps:
                    begun.append(begin(step + self.ahead))
                yield self._copies[step % samplers].arrived(sent)
        finally:
            for thread in threads:
                thread.end()
            for thread in threads:
                thread.join()

    def take_seconds(self) -> tuple[float, float]:
        """Returns the seconds that samplers, added up, made batches and training waited for them, since the last call."""
        seconds = sum(self._seconds)
        taken = seconds, self.waited if self.ahead else seconds
        self._seconds, self.waited = [0.0] * len(self.makers), 0.0
        return taken


def _mixed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
