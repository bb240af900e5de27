"""What ranks of several machines tell each other for a batch: how often, how much, and that it is the batch of one machine.

Ranks are threads here, and machines are said to be; processes of their own are in ``test_sampling_strategy.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from common import awkward_graph, examples
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from test_hetero_sampling import BY, WRITES, typed_graph
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from benchmarks.sampling_threads import Machines, Meeting
from lightning_gnn import GraphDataModule, split_edges
from lightning_gnn.data.shards import Cut
from lightning_gnn.data.store import read_cut
from lightning_gnn.partition.layout import ONE_TYPE
from lightning_gnn.strategies.sampling import graph_store
from lightning_gnn.strategies.sampling.graph_store import GraphStore
from lightning_gnn.strategies.sampling.loader import BatchMaker, EdgeBatchMaker, Links, SampledBatches, SeedBatches, SplitSeeds
from lightning_gnn.strategies.sampling.strategy import SamplingScheme
from lightning_gnn.strategies.sampling.variants import EgoBatchMaker


def typed_links() -> HeteroData:
    return split_edges(typed_graph(), 0.1, 0.1, edge_type=WRITES, rev_edge_type=BY)


def cut_of(graph: Any, parts: int, folder: Any) -> Cut:
    """Returns the graph cut into parts, with no regard to its edges."""
    nodes = graph.num_nodes
    part = torch.randint(0, parts, (nodes,), generator=torch.Generator().manual_seed(1))
    data = GraphDataModule(graph, partition_dir=folder, partition=part)
    return read_cut(data.partition_for(SamplingScheme().layout(parts)))


def on_threads(machines: Machines, of_rank: Callable[[int, Any, Sequence[int]], Any]) -> tuple[list[Any], Meeting]:
    """Returns ``of_rank(rank, world, ranks of its machine)`` of all ranks, and what they sent."""
    meeting = Meeting(machines, timeout=30)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(meeting.size) as pool:
        patch.setattr(graph_store, "GroupChannel", meeting.channel)
        return list(pool.map(lambda rank: of_rank(rank, meeting.world(rank), meeting.on[rank]), meeting.on)), meeting


def batches_of(
    cut: Cut, machines: Machines, make: Callable[[GraphStore], BatchMaker], cache_bytes: int = 0, edges: Any = False
) -> tuple[list[list[Any]], Meeting]:
    """Returns the batches of an epoch of every rank; or of some edges, of all or of those of a mask."""
    kind: Any = (cut.edge_type or ONE_TYPE) if edges else cut.types.input_type
    split = SplitSeeds.of(cut, kind, "train_mask" if not edges else None if edges is True else edges)
    most = 12 if edges else max(split.sizes)  # of a rank

    def of_rank(rank: int, world: Any, near: Sequence[int]) -> list[Any]:
        store = GraphStore(cut, world, near, cache_bytes)
        store.take_counts()
        steps = SeedBatches([min(size, most) for size in split.sizes], 3)
        others = None if edges else {asker: split.seeds(asker) for asker in store.askers}
        own = split.seeds(rank)[:most]
        loader = SampledBatches([make(store)], steps, own, split.first, rank, 0, 0, lambda: 0, peer_seeds=others)
        return list(loader)

    return on_threads(machines, of_rank)


def assert_equal(one: Any, other: Any) -> None:
    """Two batches are the same, bit by bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert_equal(value, other[name])
    elif isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    else:
        assert one == other


TWO, PAIRS, THREE, UNEQUAL = [[0], [1]], [[0, 1], [2, 3]], [[0], [1], [2]], [[0, 2, 3], [1]]
NINE = [[0, 1, 2, 3], [4, 5], [6, 7, 8]]  # ranks 5 and 6 both work for rank 3, and neither for the other
NEIGHBORS: dict[str, Any] = {"num_neighbors": [3, 2, 2]}


@pytest.mark.parametrize(
    ("graph", "machines", "options", "cache_bytes", "exchanges"),
    [
        (awkward_graph, TWO, NEIGHBORS, 0, 4),
        (awkward_graph, PAIRS, NEIGHBORS, 0, 4),
        (awkward_graph, THREE, NEIGHBORS, 1000, 4),
        (awkward_graph, UNEQUAL, NEIGHBORS, 1000, 4),
        (awkward_graph, NINE, NEIGHBORS, 0, 4),
        (awkward_graph, THREE, {"num_neighbors": [4, 3, 2, 2], "replace": True}, 10**6, 5),
        (awkward_graph, THREE, {"num_neighbors": [-1, 2, -1]}, 0, 4),
        (awkward_graph, THREE, {"num_neighbors": [3, 2], "directed": False}, 0, 8),
        (awkward_graph, THREE, {"num_neighbors": [3, 2, 2, 2, 2]}, 1000, 12),
        (awkward_graph, THREE, {"num_neighbors": [3, 2], "method": "shadow"}, 0, 8),
        (awkward_graph, THREE, {"num_neighbors": [3, 2], "method": "edges"}, 1000, 4),
        (typed_graph, TWO, {"num_neighbors": [3, 2]}, 0, None),
        (typed_graph, THREE, {"num_neighbors": [2, 3, 2], "cut off": True}, 300, None),
        (typed_links, THREE, {"num_neighbors": [3, 2], "method": "edges"}, 300, 4),
        (typed_links, TWO, {"num_neighbors": [2, 2, 2, 2, 2], "method": "edges"}, 0, None),
    ],
)
def test_batches_of_several_machines_are_those_of_one(tmp_path, graph, machines, options, cache_bytes, exchanges):
    """Ids, order and all rows, bit by bit; in so many exchanges."""
    options = dict(options)
    size, num_neighbors, method = sum(map(len, machines)), options.pop("num_neighbors"), options.pop("method", "")
    cut = cut_of(graph(), size, tmp_path)
    of_types = {kind: list(num_neighbors) for kind in cut.types.edges}
    if options.pop("cut off", False):  # a type that is not followed from some hop on
        of_types[next(iter(of_types))] = [0, 2, 0]
    kind = cut.edge_type or ONE_TYPE
    links = Links(partial(cut.ends, kind=kind), 2, kind)
    classes: dict[str, Any] = {"shadow": EgoBatchMaker, "edges": partial(EdgeBatchMaker, links)}
    make = classes.get(method, BatchMaker)
    found = [
        batches_of(cut, on, lambda store: make(store, of_types, **options), cache_bytes, method == "edges")
        for on in (machines, [list(range(size))])
    ]
    (apart, meeting), (together, nobody) = found
    assert not nobody.sent
    for one, other in zip(apart, together, strict=True):
        assert len(one) == len(other) > 1
        for batch, same in zip(one, other):
            assert_equal(batch.to_dict(), same.to_dict())
    if exchanges is not None:
        filling = 2 if cache_bytes else 0
        assert {each.exchanges - filling for each in meeting.channels.values()} == {exchanges * len(apart[0])}


@examples(30)
@given(st.lists(st.lists(st.integers(0, 20)), max_size=5), st.lists(st.integers(0, 20)), st.integers(0, 9))
def test_uses_are_counted(asked, elsewhere, few):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_store, "_FEW", few)
        uses, others = graph_store._Uses(), graph_store._Uses()
        for ids in asked:
            uses.add(torch.tensor(ids, dtype=torch.long))
        others.add(torch.tensor(elsewhere, dtype=torch.long))
    uses.sum_up(others)
    expected = Counter([*elsewhere, *(each for ids in asked for each in ids)])
    assert dict(zip(uses.ids.tolist(), uses.counts.tolist())) == expected and uses.ids.tolist() == sorted(expected)


@pytest.mark.parametrize(("graph", "machines"), [(awkward_graph, PAIRS), (awkward_graph, THREE), (typed_graph, TWO)])
def test_the_cache_has_what_the_first_epoch_asked_for_most(graph, machines, tmp_path):
    """From the second epoch on, whose batches are those of one machine; who answers sends what is not there, and no more."""
    size = sum(map(len, machines))
    cut = cut_of(graph(), size, tmp_path)
    types, budget = cut.types, 1000
    split = SplitSeeds.of(cut, types.input_type, "train_mask")
    new = {name: torch.empty(types.total(name), dtype=torch.long) for name in types.nodes}
    for name, ids in new.items():
        ids[cut.ids_of(name)] = torch.arange(len(ids))

    def of_rank(cache_bytes: int, rank: int, world: Any, near: Sequence[int]) -> Any:
        store = GraphStore(cut, world, near, cache_bytes)
        makers = [BatchMaker(each, {kind: [3, 2] for kind in types.edges}) for each in (store, store.clone())]
        steps, epoch = SeedBatches(split.sizes, 3), iter(range(9))
        others = {asker: split.seeds(asker) for asker in store.askers}
        loader = SampledBatches(
            makers, steps, split.seeds(rank), split.first, rank, 0, 0, lambda: next(epoch), peer_seeds=others
        )
        first = list(loader)
        store.take_counts()
        filled = iter(loader)
        received = store.take_counts().received
        batches = [*filled, *loader]
        assert makers[1].store._cache is store._cache and len(store._newest) == 1
        return first, batches, store, store.take_counts(), received

    (apart, _), (bare, _), (together, _) = (
        on_threads(on, partial(of_rank, cache_bytes))
        for on, cache_bytes in ((machines, budget), (machines, 0), ([list(range(size))], budget))
    )
    for rank, (first, batches, store, (asked, hits, *_), received) in enumerate(apart):
        for batch, same in zip(first + batches, together[rank][0] + together[rank][1], strict=True):
            assert_equal(batch.to_dict(), same.to_dict())
        uses, row_bytes = Counter[Any](), {}
        for batch in first:
            for name in types.nodes:
                nodes = batch[name] if types.is_hetero else batch
                if "x" in nodes:
                    ids = new[name][nodes.n_id]
                    far = ids[store.machines_of(name, ids) != store.local_machine]
                    row_bytes[name] = nodes.x[:1].nbytes
                    uses.update((name, each) for each in far.tolist())
        cached = {(name, each) for name, (ids, _) in store._cache.rows.items() for each in ids.tolist()}
        assert 0 < sum(row_bytes[name] for name, _ in cached) <= budget
        worth = {each: count / row_bytes[each[0]] for each, count in uses.items()}
        assert min(worth[each] for each in cached) >= max(worth[each] for each in worth if each not in cached)
        assert received and 0 < hits < asked
        spared = bare[rank][3].received - apart[rank][3].received
        assert spared == sum(
            row_bytes[name] * len(set(new[name][nodes.n_id].tolist()) & {each for of, each in cached if of == name})
            for batch in batches
            for name in row_bytes
            for nodes in [batch[name] if types.is_hetero else batch]
        )
        assert store.uses is None and bare[rank][2].uses is None


def test_what_travels_for_a_batch(tmp_path, monkeypatch):
    """Each far edge and each far node's rows once, their ids, and next to nothing else; masks do not travel."""
    read, names = GraphStore.read, set()
    monkeypatch.setattr(GraphStore, "read", lambda *of: names.add(of[2]) or read(*of))
    graph = awkward_graph()
    cut = cut_of(graph, 2, tmp_path)
    part = torch.empty(60, dtype=torch.long)
    part[cut.n_id] = torch.from_numpy(np.repeat([0, 1], np.diff(cut.offsets)))
    everyone, meeting = batches_of(cut, TWO, lambda store: BatchMaker(store, {ONE_TYPE: [3, 2, 2]}))
    least = most = 0
    for rank, batches in enumerate(everyone):
        for batch in batches:
            far = int((part[batch.n_id] != rank).sum())
            edges = int((part[batch.n_id[batch.edge_index[1]]] != rank).sum())
            row_bytes = sum(batch[name][:1].nbytes for name in ("x", "y"))
            edge_bytes = sum(batch[name][:1].nbytes for name in ("edge_weight", "edge_attr"))
            least += far * row_bytes + edges * (edge_bytes + 16)
            most += far * (row_bytes + 8 + 8 + 16) + edges * (edge_bytes + 16)  # a node's id there and back, its count
    sent = sum(size for _, _, size in meeting.sent)
    steps = len(everyone[0])
    assert len(meeting.sent) == 4 * 2 * steps  # one message to each other machine an exchange
    assert names == {"x", "y", "edge_weight", "edge_attr"}
    # Nodes passed on for two batches, draws of each hop, rows: each field comes with its size.
    fields = 2 * 4 + 3 * 6 + 3
    twice = 0.05 * most  # of nodes that are first reached late
    assert least < sent < most + twice + len(meeting.sent) * fields * 8


def test_far_edges_are_drawn_at_the_odds_of_near_ones(tmp_path):
    """A hub's in-edges, from three machines, are drawn alike by its own machine and by the others, who ask for them.

    Where they are, the test fails for one choice of seeds in a thousand; these pass.
    """
    degree, fanout, times = 30, 6, 100
    hub, seeds = 0, torch.arange(1, 4)  # of which each rank has one, and which have an edge from the hub
    sources = torch.arange(4, 4 + degree)
    edge_index = torch.cat([torch.stack([sources, sources * 0]), torch.stack([seeds * 0, seeds])], 1)
    graph = Data(x=torch.zeros(4 + degree, 1), edge_index=edge_index, y=torch.zeros(4 + degree, dtype=torch.long))
    graph.train_mask = graph.val_mask = graph.test_mask = torch.ones(4 + degree, dtype=torch.bool)
    part = torch.cat([torch.tensor([1, 0, 1, 2]), torch.arange(degree) % 3])
    data = GraphDataModule(graph, partition_dir=tmp_path, partition=part)
    cut = read_cut(data.partition_for(SamplingScheme().layout(3)))
    new = torch.empty(4 + degree, dtype=torch.long).index_copy_(0, cut.n_id, torch.arange(4 + degree))

    def of_rank(rank: int, world: Any, near: Sequence[int]) -> Tensor:
        maker = BatchMaker(GraphStore(cut, world, near), {ONE_TYPE: [1, fanout]})
        counts = torch.zeros(4 + degree, dtype=torch.double)
        for step in range(times):
            batch = maker.make(new[seeds[rank : rank + 1]], [3 * step + each for each in range(3)])
            counts[batch.n_id[batch.edge_index[0]]] += 1
        assert counts[hub] == times and counts[sources].sum() == times * fanout
        return counts[sources]

    drawn = torch.stack(on_threads(THREE, of_rank)[0])
    # Draws of one batch exclude each other: counts vary by less than a multinomial's, by this factor.
    expected = times * fanout / degree
    spread = ((drawn - expected) ** 2 / expected).sum(1) / (1 - fanout / degree) * (degree - 1) / degree
    for each in spread:
        assert chi2.sf(float(each), degree - 1) > 1e-3 / 3
