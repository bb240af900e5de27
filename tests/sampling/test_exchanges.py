"""What ranks of several machines tell each other for a batch: how often, how much, and that it is the batch of one machine.

Ranks are threads here, and machines are said to be; processes of their own are in ``tests/strategies/test_sampling_strategy.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from common import awkward_graph
from test_hetero_sampling import typed_graph
from torch import Tensor

from lightning_gnn import GraphDataModule
from lightning_gnn.data.shards import Cut
from lightning_gnn.data.store import read_cut
from lightning_gnn.partition.types import ONE_TYPE
from lightning_gnn.sampling import graph_store
from lightning_gnn.sampling.graph_store import GraphStore
from lightning_gnn.sampling.loader import BatchMaker, EdgeBatchMaker, SampledBatches
from lightning_gnn.sampling.seeds import SeedBatches, seeds_in, split_seeds
from lightning_gnn.sampling.variants import EgoBatchMaker
from lightning_gnn.strategies.sampling import SamplingScheme

Machines = Sequence[Sequence[int]]


class Meeting:
    """What threads send each other in place of ranks: see :class:`~lightning_gnn.comm.rows.GroupChannel`.

    Attributes:
        sent: sender, receiver and bytes of each message.
    """

    def __init__(self, machines: Machines) -> None:
        self.size = sum(map(len, machines))
        self.on = {rank: list(ranks) for ranks in machines for rank in ranks}
        self.sent: list[tuple[int, int, int]] = []
        self.channels: dict[int, Any] = {}
        self._boxes = {(a, b): Queue[Tensor]() for a in range(self.size) for b in range(self.size)}

    def world(self, rank: int) -> Any:
        return SimpleNamespace(
            rank=rank, size=self.size, all_gather_object=lambda _: [self.on[each] for each in range(self.size)]
        )

    def channel(self, world: Any) -> Any:
        channel = self.channels[world.rank] = SimpleNamespace(bytes_received=0, exchanges=0)

        def start(sends: dict[int, Tensor], senders: Sequence[int]) -> Callable[[], dict[int, Tensor]]:
            for peer, data in sends.items():
                assert peer not in self.on[world.rank]  # who shares a machine reads, and does not ask
                self.sent.append((world.rank, peer, len(data)))
                self._boxes[world.rank, peer].put(data)

            def wait() -> dict[int, Tensor]:
                channel.exchanges += 1
                found = {peer: self._boxes[peer, world.rank].get(timeout=30) for peer in senders}
                channel.bytes_received += sum(map(len, found.values()))
                return found

            return wait

        channel.start = start
        return channel


def cut_of(graph: Any, parts: int, folder: Any) -> Cut:
    """Returns the graph cut into parts, with no regard to its edges."""
    nodes = graph.num_nodes
    part = torch.randint(0, parts, (nodes,), generator=torch.Generator().manual_seed(1))
    data = GraphDataModule(graph, store=folder, partition=part)
    return read_cut(data.partition_for(SamplingScheme().layout(parts)))


def batches_of(
    cut: Cut, machines: Machines, make: Callable[[GraphStore], BatchMaker], cache_bytes: int = 0, edges: bool = False
) -> tuple[list[list[Any]], Meeting]:
    """Returns the batches of an epoch of every rank."""
    meeting = Meeting(machines)
    graph_store.GroupChannel, before = meeting.channel, graph_store.GroupChannel  # type: ignore[assignment,misc]
    kind: Any = ONE_TYPE if edges else cut.types.input_type
    seeds = seeds_in(cut, kind, None if edges else "train_mask")[: 40 if edges else None]
    split = [torch.from_numpy(each) for each in split_seeds(seeds.numpy(), cut.types.offsets(kind))]

    def of_rank(rank: int) -> list[Any]:
        store = GraphStore(cut, meeting.world(rank), meeting.on[rank], cache_bytes)
        store.take_counts()
        steps = SeedBatches([len(each) for each in split], 4)
        others = None if edges else {asker: split[asker] for asker in store.askers}
        loader = SampledBatches([make(store)], steps, split[rank], seeds[:1], rank, 0, 0, lambda: 0, others=others)
        return list(loader)

    try:
        with ThreadPoolExecutor(meeting.size) as pool:
            return list(pool.map(of_rank, range(meeting.size))), meeting
    finally:
        graph_store.GroupChannel = before  # type: ignore[misc]


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
NEIGHBORS: dict[str, Any] = {"fanouts": [3, 2, 2]}


@pytest.mark.parametrize(
    ("graph", "machines", "options", "cache_bytes", "exchanges"),
    [
        (awkward_graph, TWO, NEIGHBORS, 0, 4),
        (awkward_graph, PAIRS, NEIGHBORS, 0, 4),
        (awkward_graph, THREE, NEIGHBORS, 1000, 4),
        (awkward_graph, UNEQUAL, NEIGHBORS, 1000, 4),
        (awkward_graph, THREE, {"fanouts": [4, 3, 2, 2], "replace": True}, 10**6, 5),
        (awkward_graph, THREE, {"fanouts": [-1, 2, -1]}, 0, 4),
        (awkward_graph, THREE, {"fanouts": [3, 2], "directed": False}, 0, 8),
        (awkward_graph, THREE, {"fanouts": [3, 2, 2, 2, 2]}, 1000, 12),
        (awkward_graph, THREE, {"fanouts": [3, 2], "method": "shadow"}, 0, 8),
        (awkward_graph, THREE, {"fanouts": [3, 2], "method": "edges"}, 1000, 4),
        (typed_graph, TWO, {"fanouts": [3, 2]}, 0, None),
        (typed_graph, THREE, {"fanouts": [2, 3, 2], "cut off": True}, 300, None),
    ],
)
def test_batches_of_several_machines_are_those_of_one(tmp_path, graph, machines, options, cache_bytes, exchanges):
    """Ids, order and all rows, bit by bit; in so many exchanges."""
    options = dict(options)
    size, fanouts, method = sum(map(len, machines)), options.pop("fanouts"), options.pop("method", "")
    cut = cut_of(graph(), size, tmp_path)
    of_types = {kind: list(fanouts) for kind in cut.types.edges}
    if options.pop("cut off", False):  # a type that is not followed from some hop on
        of_types[next(iter(of_types))] = [0, 2, 0]
    classes: dict[str, Any] = {"shadow": EgoBatchMaker, "edges": partial(EdgeBatchMaker, cut.ends, 2)}
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
