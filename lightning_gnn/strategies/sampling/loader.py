"""Mini-batches of one rank: their seeds and their samples, made in advance in the background."""

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
from lightning_gnn.data.sources import EDGE_MASKS, MASKS, GraphData, is_labeled
from lightning_gnn.devices import can_pin
from lightning_gnn.partition.layout import ONE_TYPE
from lightning_gnn.strategies.sampling.expansion import MOST_HOPS, Expander, Neighborhood
from lightning_gnn.strategies.sampling.graph_store import GraphStore
from lightning_gnn.strategies.sampling.hops import Numbering, sample_hops, sample_trees
from lightning_gnn.strategies.sampling.one_call import Buffers

_CPU = torch.device("cpu")


class BatchMaker:
    """Maker of batches: samples around seeds, and collects the rows of nodes and edges.

    Args:
        store: the graph.
        num_neighbors: by edge type, in-edges drawn per node in each hop; -1 for all.
        replace, directed: see :class:`~lightning_gnn.strategies.sampling.NeighborSampler`.
    """

    own_masks: Sequence[str] = MASKS
    """Masks of seeds that :meth:`make` sets; they are not requested."""
    of_seeds: Sequence[str] = ()
    """Attributes that edges have only as seeds; they are not requested for edges that carry messages."""

    def __init__(
        self, store: GraphStore, num_neighbors: Mapping[EdgeType, Sequence[int]], replace: bool = False, directed: bool = True
    ) -> None:
        self.store, self._fanouts = store, num_neighbors
        self._replace, self._directed = replace, directed
        self._numberings = {name: Numbering(store.types.total(name)) for name in store.types.nodes}
        cut, types = store.cut, store.types
        self._ids = {name: cut.n_id[types.place(name)] for name in types.nodes}
        self._ids |= {kind: cut.e_id[types.place(kind)] for kind in types.edges}
        left_out = dict.fromkeys(store.types.edges, self.of_seeds) | {store.types.input_type: self.own_masks}
        kinds = *store.types.nodes, *store.types.edges
        self._names = {kind: [name for name in store.names(kind) if name not in left_out.get(kind, ())] for kind in kinds}
        shallow, timed = max(map(len, num_neighbors.values())) <= MOST_HOPS, store.choice.time_attr is not None
        expands = store.channel is not None and directed and shallow and not timed
        self._expander = Expander(store, num_neighbors, replace, self._names) if expands else None
        first = next(iter(num_neighbors.values())), replace, next(iter(self._numberings.values()))
        self._hop_sampler = store.hop_sampler(*first) if directed else None

    def make(self, seeds: Tensor, random_seeds: list[int], peer_seeds: Mapping[int, Tensor] | None = None) -> Data | HeteroData:
        """Returns the batch in the format of PyG's NeighborLoader, with masks that are True for seeds only.

        With times, each seed has a separate tree without anything later than the seed. ``batch [n]`` is the tree of each node,
        and ``seed_time`` the time of each seed.

        Args:
            seeds: ids in the partitioned graph; with types, ids of the input type.
            random_seeds: random seed of each rank's batch.
            peer_seeds: seeds of the ranks whose requests this rank answers; None if they are not available.
        """
        store, kind, moment = self.store, self.store.types.input_type, self.store.choice.time_attr
        if moment is None:
            batch = self._batch(*self._sample({kind: seeds}, random_seeds, peer_seeds))
        else:
            until = store.rows({kind: (seeds, [moment])})[kind][moment]
            batch = self._batch(self._trees([(kind, seeds)], random_seeds, until, self._directed), store)
            part_of(batch, kind).seed_time = until
        nodes = part_of(batch, kind)
        for name in MASKS:
            nodes[name] = torch.zeros(len(nodes.n_id), dtype=torch.bool)
            nodes[name][: len(seeds)] = True
        nodes.input_id, nodes.batch_size = nodes.n_id[: len(seeds)], len(seeds)
        return batch

    def _sample(
        self, seeds: Mapping[NodeType, Tensor], random_seeds: list[int], peer_seeds: Mapping[int, Tensor] | None = None
    ) -> tuple[HeteroSamplerOutput, GraphStore | Neighborhood]:
        """Returns the sampled neighborhood of distinct nodes, by type, which come first, and the source of its rows."""
        if self._expander is not None:
            found = self._expander.run(seeds, random_seeds, peer_seeds)
            return sample_hops(seeds, self._fanouts, found.hop, self._numberings), found
        if self._hop_sampler is not None:
            return self._hop_sampler.sample(seeds[ONE_TYPE[0]], random_seeds[self.store.rank]), self.store
        hop = self.store.hops(random_seeds, self._replace)
        return sample_hops(seeds, self._fanouts, hop, self._numberings, self._directed), self.store

    def _trees(
        self, roots: Sequence[tuple[NodeType, Tensor]], random_seeds: list[int], until: Tensor | None, directed: bool
    ) -> HeteroSamplerOutput:
        """Returns the result of :func:`sample_trees`; with times, `until` is the latest time of each tree, ``[n]``."""
        types, hop = self.store.types, self.store.hops(random_seeds, self._replace, until)
        return sample_trees(roots, self._fanouts, hop, {name: types.total(name) for name in types.nodes}, directed)

    def _batch(self, out: HeteroSamplerOutput, source: GraphStore | Neighborhood) -> Data | HeteroData:
        """Returns the batch of a sample, with rows from `source`."""
        store, cut = self.store, self.store.cut
        batch: Data | HeteroData = HeteroData()
        if not store.types.is_hetero:
            batch = GraphData(cut.kinds, cut.left_out, **cut.attributes["graph"], **cut.scalars)
        ids: dict[NodeType | EdgeType, Tensor] = {**out.node, **out.edge}
        rows = source.rows({kind: (ids[kind], names) for kind, names in self._names.items()})
        original = dict(zip(ids, store.buffers.gather([(self._ids[kind], each) for kind, each in ids.items()])))
        for name in store.types.nodes:  # before edges: types of a batch are in the graph's order
            nodes = part_of(batch, name)
            nodes.n_id = original[name]
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
            ends = [out.row[kind], out.col[kind]]
            edges.edge_index = torch.stack(ends, out=store.buffers.empty(ends[0], 2, len(ends[0])))
            edges.e_id = original[kind].long()
            for attribute, values in rows[kind].items():
                edges[attribute] = values
            if out.num_sampled_edges is not None:
                edges.num_sampled_edges = out.num_sampled_edges[kind]
        return batch


def part_of(batch: Data | HeteroData, kind: NodeType | EdgeType) -> Any:
    """Returns the storage of a node or edge type in a batch; the batch itself without types."""
    return batch if isinstance(batch, Data) else batch[kind]


@dataclass(frozen=True)
class Links:
    """Seed edges and their negatives; ids are in the order of the partitioned graph.

    Attributes:
        ends: function that returns sources and targets of edges, ``[2, n]``, for their ids ``[n]``.
        num_negatives: number of pairs per edge whose target is drawn from all other nodes of its type.
        kind: type of the edges.
        others: draws the negatives by original ids; None draws them by ids of the partitioned graph.
        held_out: in evaluation, for edges that carry no messages: replaces the batch's random seed in the draws of negatives. No
            edges are removed from the batch.
    """

    ends: Callable[[Tensor], Tensor]
    num_negatives: int
    kind: EdgeType = ONE_TYPE
    others: OtherNodes | None = None
    held_out: Sequence[int] | None = None


class EdgeBatchMaker(BatchMaker):
    """Maker of batches of edges, whose ends are the seeds of the neighborhood.

    The seed edges carry no messages in the batch, in either direction, and neither do other edges between the same nodes: they
    would leak the labels. With types, other edges are edges of the same type, and of reverse types that have an
    ``edge_train_mask``.

    With times, each end has a separate tree without anything later than the edge. The time of the edge is its
    ``edge_label_time``, or else its time as a message. Messages between its two ends that are no earlier than the edge are
    removed from its trees. If messages have no times, all messages between its ends are removed.

    Args:
        links: seed edges.
        *args, **options: see :class:`BatchMaker`.
    """

    of_seeds = ("edge_label", "edge_label_time")

    def __init__(self, links: Links, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._links, types, kind, self._moment = links, self.store.types, links.kind, self.store.choice.time_attr or ""
        # Attributes requested for seeds: with times, the times first.
        moments = ("edge_label_time", self._moment) if self._moment else ()
        self._seed_attributes = [name for name in (*moments, "edge_label", "edge_type") if name in self.store.names(kind)]
        self._shift = 0  # added to labels, so that 0 is the label of negatives
        if links.num_negatives and "edge_label" in self._seed_attributes:
            labels = self.store.cut.attributes[types.key(kind)]["edge_label"]
            self._shift = int(not labels.is_floating_point() and int(labels.min()) == 0)
        # By type of edges that may leak a seed: whether they join the ends of a seed in its direction, and in the reverse
        # direction.
        self._leaks: dict[EdgeType, tuple[bool, bool]] = {}
        for each in types.edges if links.held_out is None else ():
            masked = EDGE_MASKS[0] in self.store.names(each)
            forth = each == kind or (masked and kind[0] == kind[2] == each[0] == each[2])
            back = (each == kind or masked) and (each[0], each[2]) == (kind[2], kind[0])
            if forth or back:
                self._leaks[each] = forth, back

    @override
    def make(self, seeds: Tensor, random_seeds: list[int], peer_seeds: Mapping[int, Tensor] | None = None) -> Data | HeteroData:
        """Returns the batch of these edges in the format of PyG's LinkNeighborLoader.

        - ``edge_label_index [2, n + n K]``: the edges in local numbers, then K negatives of the first, K of the second and so on.
        - ``edge_label``: 1 or 0, or the graph's attribute of that name with 0 for negatives; classes from 0 on are raised by 1 if
          there are any.
        - ``input_id``: original ids of the edges.
        - ``edge_label_type [n]``: types of the edges, if the graph has ``edge_type``.

        With types, these are attributes of the edges' type. With times, ``batch [N]`` is the seed whose trees a node is in, and
        ``edge_label_time [n + n K]`` has the times of ``edge_label_index``. A negative has the source and the time of its edge.
        """
        kind, store, edge = self._links.kind, self.store, torch.arange(len(seeds))
        seed_rows = store.rows({kind: (seeds, self._seed_attributes)})[kind] if self._seed_attributes else {}
        until = seed_rows[self._seed_attributes[0]] if self._moment else None
        source, target = self._links.ends(seeds)
        targets = torch.cat([target, self._draw_negatives(seeds, target, until, random_seeds)])
        edge_of = torch.cat([edge, edge.repeat_interleave(self._links.num_negatives)])  # of each pair
        if until is None:
            nodes, local = _number_ends(kind, source[edge_of], targets)
            batch = self._batch(*self._sample(nodes, random_seeds))
            taken = {each: self._join_seeds(batch, each, local[:, : len(seeds)]) for each in self._leaks}
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
            taken = {each: self._join_own_seed(batch, each, out.node, ends, seed_rows.get(self._moment)) for each in self._leaks}
        for each, leaving in taken.items():
            edges, kept = part_of(batch, each), ~leaving
            if "num_sampled_edges" in edges:
                edges.num_sampled_edges = [int(hop.sum()) for hop in kept.split(edges.num_sampled_edges)]
            for name in ("e_id", *self._names[each]):
                edges[name] = edges[name][kept]
            edges.edge_index = edges.edge_index[:, kept]
        into = part_of(batch, kind)
        into.edge_label_index, into.input_id = local, store.cut.ids_of(kind, seeds)
        label = seed_rows.get("edge_label", torch.ones(len(seeds)))
        label = label + self._shift if self._shift else label
        into.edge_label = torch.cat([label, label.new_zeros((len(edge_of) - len(seeds), *label.shape[1:]))])
        if "edge_type" in seed_rows:
            into.edge_label_type = seed_rows["edge_type"]
        return batch

    def _draw_negatives(self, seeds: Tensor, targets: Tensor, until: Tensor | None, random_seeds: list[int]) -> Tensor:
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
        (forth, back), (first, second) = self._leaks[kind], seeds
        num, (row, col) = len(part_of(batch, kind[2]).n_id), part_of(batch, kind).edge_index
        return torch.isin(row * num + col, torch.cat([first * num + second] * forth + [second * num + first] * back))

    def _join_own_seed(
        self, batch: Data | HeteroData, kind: EdgeType, nodes: Mapping[NodeType, Tensor], ends: Tensor, time: Tensor | None
    ) -> Tensor:
        """Returns which edges of a type join the ends of their tree's seed and are no earlier, bool ``[E]``.

        Args:
            nodes: ids by type, in the order of local numbers.
            ends, time: ids of the seeds' ends, ``[2, n]``, and times as messages, if any, ``[n]``.
        """
        (forth, back), edges = self._leaks[kind], part_of(batch, kind)
        of = part_of(batch, kind[2]).batch[edges.edge_index[1]]
        found = torch.stack([nodes[name][ids] for name, ids in zip((kind[0], kind[2]), edges.edge_index)])
        pairs, joining = ends[:, of], torch.zeros_like(of, dtype=torch.bool)
        for same in [pairs] * forth + [pairs.flip(0)] * back:
            joining |= (found == same).all(0)
        return joining if time is None or self._moment not in edges else joining & (edges[self._moment] >= time[of])


def _number_ends(kind: EdgeType, sources: Tensor, targets: Tensor) -> tuple[dict[NodeType, Tensor], Tensor]:
    """Returns the distinct nodes of each type at the ends of pairs, and the pairs in local numbers, ``[2, n]``."""
    if kind[0] == kind[2]:
        nodes, local = torch.stack([sources, targets]).unique(return_inverse=True)
        return {kind[0]: nodes}, local
    (source, row), (target, col) = (ids.unique(return_inverse=True) for ids in (sources, targets))
    return {kind[0]: source, kind[2]: target}, torch.stack([row, col])


def seeds_in(cut: Cut, kind: NodeType | EdgeType, mask: str | None, rank: int | None = None) -> Tensor:
    """Returns the ids of nodes, or edges, of a type that are in a mask and have a label; None for all.

    Args:
        rank: limits the result to a rank's partition; None for all ranks.
    """
    low, high = (0, cut.types.total(kind)) if rank is None else cut.types.offsets(kind)[rank : rank + 2].tolist()
    if mask is None:
        return torch.arange(low, high)
    attributes = cut.attributes[cut.types.key(kind)]
    chosen, y = attributes[mask][low:high], attributes.get("y") if isinstance(kind, str) else None
    return (chosen if y is None else chosen & is_labeled(y[low:high])).nonzero().view(-1) + low


class SplitSeeds:
    """Division of seeds between ranks: equal numbers, up to one, with as many local nodes as possible.

    Excess seeds of a rank are assigned to ranks with too few, of the same machine first. Seeds move; features do not. DistDGL
    (section III-B) divides the sorted ids into equal ranges instead, and assigns each range to the machine that owns most of it.
    With unequal partitions, fewer seeds then stay with their owners.

    Args:
        owned_seeds: function that returns the seeds that a rank owns, ascending; called when they are needed, since all ranks
            have many.
        counts: number of these, by rank.
        ranks_per_machine: ranks per machine.

    Attributes:
        sizes: number of seeds of each rank.
        first: the lowest seed of all ranks, ``[1]``; empty if there are none.
    """

    def __init__(self, owned_seeds: Callable[[int], Tensor], counts: Sequence[int], ranks_per_machine: int = 1) -> None:
        self._owned_seeds = owned_seeds
        self.first = owned_seeds(next((rank for rank, count in enumerate(counts) if count), 0))[:1].clone()
        num_ranks, total = len(counts), sum(counts)
        share = np.full(num_ranks, total // num_ranks)
        share[np.argsort([-count for count in counts], kind="stable")[: total % num_ranks]] += 1
        self.sizes: list[int] = share.tolist()
        kept = [min(count, size) for count, size in zip(counts, self.sizes)]
        # By rank: owners of its seeds, with the range of each owner's seeds.
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

        def owned_seeds(rank: int) -> Tensor:
            return seeds_in(cut, kind, mask, rank)

        return cls(owned_seeds, [len(owned_seeds(rank)) for rank in range(len(cut.halos))], ranks_per_machine)

    def seeds(self, rank: int) -> Tensor:
        """Returns the seeds of a rank, ascending, int64."""
        return torch.cat([self._owned_seeds(owner)[low:high] for owner, low, high in self._pieces[rank]]).sort().values


class SeedBatches:
    """Batches of one rank's seeds, with the same number of batches on all ranks, so that no rank waits for a missing one.

    Attributes:
        steps: number of batches of an epoch.
    """

    def __init__(self, sizes: list[int], batch_size: int) -> None:
        self.sizes = sizes
        self.steps = max(1, -(-max(sizes) // batch_size))

    def counts(self, step: int) -> tuple[int, ...]:
        return tuple((step + 1) * size // self.steps - step * size // self.steps for size in self.sizes)

    def split_epoch(self, seeds: Tensor, rank: int, seed: int | None) -> list[Tensor]:
        """Returns the seeds of each step, in random order; in the given order if `seed` is None."""
        order = torch.arange(len(seeds))
        if seed is not None:
            order = torch.randperm(len(seeds), generator=torch.Generator().manual_seed(seed))
        size = self.sizes[rank]
        bounds = [step * size // self.steps for step in range(self.steps + 1)]
        return [seeds[order[low:high]] for low, high in pairwise(bounds)]


@dataclass(eq=False)
class SampledBatches:
    """Loader of a rank's batches, some of them made in advance.

    Ranks on several machines answer each other's requests while they make batches, so all make the same number. If training stops
    early, batches in progress are completed. With several samplers (DistDGL, section III-D), each sampler makes the same steps on
    all ranks and uses separate channels, so that none waits for another.

    Args:
        makers: makers of batches, one per sampler; batches do not depend on which one makes them.
        batches: seeds of each batch.
        seeds: seeds of this rank, nodes or edges.
        stand_in: seed for batches in which this rank has none: a mean over no seeds would be nan.
        rank: this rank.
        seed: random seed of all draws; None keeps the order of the seeds.
        ahead: number of batches made in advance; 0 makes each when it is needed.
        epoch: function that returns the number of the current epoch.
        device: device of the batches. If host memory can be pinned for it, samplers copy each batch at once, on separate streams,
            while the device computes.
        peer_seeds: seeds of the ranks whose requests this rank answers; None if these ranks send them.

    Attributes:
        waited: seconds of waiting for batches since :meth:`take_seconds`.
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
    peer_seeds: Mapping[int, Tensor] | None = None

    def __post_init__(self) -> None:
        self.waited = 0.0
        self._epochs = 0
        self._seconds = [0.0] * len(self.makers)
        self._copies = [Copies(self.device) for _ in self.makers]
        for maker in self.makers:
            maker.store.buffers = Buffers(can_pin(self.device))
        self._running: Generator[Data | HeteroData, None, None] | None = None

    def to(self, *args: Any, **kwargs: Any) -> SampledBatches:
        """Returns itself: Lightning would move the tensors of a dataclass, and samplers read the seeds on the CPU."""
        return self

    def __len__(self) -> int:
        return self.batches.steps

    def __iter__(self) -> Iterator[Data | HeteroData]:
        self.close()
        store, *clones = (maker.store for maker in self.makers)
        # No rank makes a batch of this loader now, and all ranks start its epochs in the same order.
        store.begin_epoch(clones, counts=not self._epochs and self.seed is not None)
        self._epochs += 1
        epoch = self.epoch()
        by_rank = {
            rank: self.batches.split_epoch(seeds, rank, None if self.seed is None else _mix_seeds(self.seed, epoch, rank))
            for rank, seeds in {self.rank: self.seeds, **(self.peer_seeds or {})}.items()
        }

        def make(step: int, sampler: int) -> Sent:
            began = time.perf_counter()
            try:
                batch = self._make_batch(epoch, step, {rank: of[step] for rank, of in by_rank.items()}, self.makers[sampler])
                return self._copies[sampler].send(batch)
            finally:
                self._seconds[sampler] += time.perf_counter() - began

        receive = self._copies[0].receive
        self._running = self._ahead_of(make) if self.ahead else (receive(make(step, 0)) for step in range(len(self)))
        return self._running

    def close(self) -> None:
        """End an unfinished epoch after the batches in progress are made: other ranks may wait for them."""
        if self._running is not None:
            self._running.close()
        self._running = None

    def _make_batch(self, epoch: int, step: int, seeds_by_rank: Mapping[int, Tensor], maker: BatchMaker) -> Data | HeteroData:
        counts = self.batches.counts(step)
        random_seeds = [_mix_seeds(self.seed or 0, epoch, rank, step) for rank in range(len(counts))]
        given = {rank: each if len(each) else self.stand_in for rank, each in seeds_by_rank.items()}
        own = given.pop(self.rank)
        batch = maker.make(own, random_seeds, None if self.peer_seeds is None else given)
        if "num_seeds" not in batch:  # otherwise the counts of other ranks are not known before their batches are made
            batch.seed_counts = counts
        return batch

    def _ahead_of(self, make: Callable[[int, int], Sent]) -> Generator[Data | HeteroData, None, None]:
        """Yields ``make(step, sampler)`` for all steps in order, made in threads `ahead` steps in advance.

        Steps are assigned to samplers in turn, so that each sampler makes the same steps on all ranks, in the same order.
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
                yield self._copies[step % samplers].receive(sent)
        finally:
            for thread in threads:
                thread.end()
            for thread in threads:
                thread.join()

    def take_seconds(self) -> tuple[float, float]:
        """Returns the seconds of making batches, summed over samplers, and of waiting for them, since the last call."""
        seconds = sum(self._seconds)
        taken = seconds, self.waited if self.ahead else seconds
        self._seconds, self.waited = [0.0] * len(self.makers), 0.0
        return taken


def _mix_seeds(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
