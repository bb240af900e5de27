"""Features of a machine's own nodes that are kept in memory: which, in how many bytes, and that batches are the same.

Test tiers: ranks that are threads, whose machines are said to be; gloo ranks in the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from common import awkward_graph, build, examples, quiet_trainer
from hypothesis import given
from hypothesis import strategies as st
from test_exchanges import PAIRS, TWO, UNEQUAL, assert_equal, cut_of, on_threads
from test_hetero_sampling import typed_graph
from test_links import mapped_file
from test_sampling_strategy import Watch
from torch import Tensor

from lightning_gnn import GraphDataModule, NodeClassifier, SamplingStrategy
from lightning_gnn.data.shards import Cut
from lightning_gnn.strategies.sampling import near_cache
from lightning_gnn.strategies.sampling.graph_store import GraphStore
from lightning_gnn.strategies.sampling.loader import BatchMaker, SampledBatches, SeedBatches, SplitSeeds
from lightning_gnn.strategies.sampling.near_cache import NearCache, most_worth

Node = tuple[str, int]


def chosen(worth: Mapping[Node, Any], row_bytes: Mapping[str, int], room: int) -> set[Node]:
    """One row after the other, those worth most first, until one does not fit; then others of the same worth."""
    found, full = set[Node](), None
    for node in sorted(worth, key=lambda each: (-worth[each], list(row_bytes).index(each[0]), each[1])):
        if full is not None and worth[node] < full:
            break
        if row_bytes[node[0]] <= room:
            found.add(node)
            room -= row_bytes[node[0]]
        else:
            full = worth[node]
    return found


@examples(60)
@given(st.lists(st.lists(st.integers(-1, 6), max_size=8), min_size=1, max_size=3), st.integers(0, 40))
def test_rows_that_are_worth_most_are_kept(numbers, room):
    """Of those below 0, none is."""
    row_bytes = dict(zip("abc", (3, 1, 7)[: len(numbers)]))
    worth = {name: torch.tensor(of, dtype=torch.float32) / row_bytes[name] for name, of in zip(row_bytes, numbers)}
    kept = most_worth(worth, row_bytes, room)
    expected = {(name, at): each for name, of in worth.items() for at, each in enumerate(of.tolist()) if each >= 0}
    found = {(name, at) for name, each in kept.items() for at in each.nonzero().view(-1).tolist()}
    assert found == chosen(expected, row_bytes, room)


def kept_in(cache: NearCache | None) -> dict[Node, Tensor]:
    """Returns each row that is kept."""
    every = {} if cache is None else cache._cached_rows
    return {
        (name, node): each.rows[place - 1].clone()
        for name, each in every.items()
        for node, place in enumerate(each.place.tolist())
        if place
    }


def epochs_of(cut: Cut, machines: Any, near_bytes: int, **options: Any) -> list[list[Any]]:
    """Returns of each rank, for each of three epochs, its batches, its hits and misses, and what was kept."""
    split = SplitSeeds.of(cut, cut.types.input_type, "train_mask")

    def of_rank(rank: int, world: Any, near: Sequence[int]) -> list[Any]:
        store = GraphStore(cut, world, near, near_bytes=near_bytes)
        stores, epoch, found = (store, store.clone()), iter(range(9)), []
        makers = [BatchMaker(each, {kind: [3, 2] for kind in cut.types.edges}, **options) for each in stores]
        others = {asker: split.seeds(asker) for asker in store.askers}
        own, steps = split.seeds(rank), SeedBatches(split.sizes, 3)
        ahead = 0 if store.channel else 2
        loader = SampledBatches(makers, steps, own, split.first, rank, 0, ahead, lambda: next(epoch), peer_seeds=others)
        for _ in range(3):
            batches = list(loader)
            counts = np.sum([each.take_counts()[3:] for each in stores], 0)
            found.append((batches, counts, kept_in(store.near_cache)))
        return found

    return on_threads(machines, of_rank)[0]


@pytest.mark.parametrize(
    ("graph", "machines", "options"),
    [
        (awkward_graph, [[0]], {}),
        (awkward_graph, [[0, 1, 2]], {}),
        (awkward_graph, PAIRS, {"directed": False}),
        (awkward_graph, UNEQUAL, {"directed": False}),
        (awkward_graph, PAIRS, {}),
        (typed_graph, [[0, 1]], {}),
        (typed_graph, TWO, {"directed": False}),
    ],
)
def test_batches_are_the_same_and_hits_are_counted(graph, machines, options, tmp_path):
    """What is kept is first what most edges of the machine read, then what batches of the first epoch read most often."""
    budget = 1500
    cut = cut_of(graph(), sum(map(len, machines)), tmp_path)
    types = cut.types
    cached, bare = (epochs_of(cut, machines, size, **options) for size in (budget, 0))
    features = {name: of["x"] for name in types.nodes if "x" in (of := cut.attributes[types.key(name)])}
    row_bytes = {name: each[:1].nbytes for name, each in features.items()}
    new = {name: torch.empty(types.total(name), dtype=torch.long) for name in types.nodes}
    for name, ids in new.items():
        ids[cut.ids_of(name)] = torch.arange(len(ids))

    def nodes_of(batch: Any) -> list[Node]:
        parts = [(name, batch[name] if types.is_hetero else batch) for name in features]
        return [(name, node) for name, part in parts for node in new[name][part.n_id].tolist()]

    whole: Any = cut.graph()
    edges = whole.edge_index_dict if types.is_hetero else {("node", "to", "node"): whole.edge_index}
    read = [[Counter(node for batch in of[0] for node in nodes_of(batch)) for of in of_rank] for of_rank in cached]
    for machine in machines:
        reads = Counter[Node]()
        here = [
            (name, node)
            for name in features
            for rank in machine
            for node in range(*types.offsets(name)[rank : rank + 2].tolist())
        ]
        for (source, _, target), (sources, targets) in edges.items():
            owner = np.searchsorted(types.offsets(target), new[target][targets].numpy(), side="right") - 1
            mine = torch.from_numpy(np.isin(owner, machine))
            reads.update((source, node) for node in new[source][sources[mine]].tolist())
        top = {name: max(count for (of, _), count in reads.items() if of == name) for name in features}
        used = sum((read[rank][0] for rank in range(len(cached))), Counter[Node]())
        for epoch in range(3):
            f = np.float32
            worth = {
                each: (f(used[each] if epoch else 0) + f(reads[each]) / f(1 + top[each[0]])) / f(row_bytes[each[0]])
                for each in here
            }
            expected = chosen(worth, row_bytes, budget - 4 * len(here))
            size = 4 * len(here) + sum(row_bytes[name] for name, _ in expected)
            assert budget - max(row_bytes.values()) < size <= budget
            for rank in machine:
                kept = cached[rank][epoch][2]
                assert kept.keys() == expected
                for (name, node), row in kept.items():
                    assert torch.equal(row, features[name][node])
    for epoch in range(3):
        for of_rank, plain in zip(cached, bare):
            for batch, other in zip(of_rank[epoch][0], plain[epoch][0], strict=True):
                assert_equal(batch.to_dict(), other.to_dict())
            assert plain[epoch][1].tolist() == [0, 0]
        everything = sum((read[rank][epoch] for rank in range(len(cached))), Counter[Node]())
        anywhere = {node for of_rank in cached for node in of_rank[epoch][2]}
        hits, misses = np.sum([of_rank[epoch][1] for of_rank in cached], 0)
        counted = sum(count for node, count in everything.items() if node in anywhere)
        if len(machines) == 1 or options:
            assert 0 < hits == counted < hits + misses == everything.total()
        else:  # what is first reached late comes twice
            assert counted <= hits < 1.1 * counted and everything.total() <= hits + misses < 1.1 * everything.total()


@pytest.mark.parametrize(
    ("near_bytes", "free", "message"),
    [
        (239, None, "more than 240 bytes, got 239: its index takes 4 bytes for each of the 60 nodes of a machine"),
        (10**9, 5000, "local_cache needs 6,000 bytes, but a machine has 5,000 available"),
    ],
)
def test_sizes_that_cannot_be(near_bytes, free, message, tmp_path, monkeypatch):
    """All ranks raise."""
    cut = cut_of(awkward_graph(), 3, tmp_path)
    if free is not None:
        monkeypatch.setattr(near_cache, "available_bytes", lambda: free)

    def of_rank(rank: int, world: Any, near: Sequence[int]) -> bool:
        with pytest.raises(ValueError, match=message):
            GraphStore(cut, world, near, near_bytes=near_bytes)
        return True

    assert on_threads([[0, 1, 2]], of_rank)[0] == [True] * 3


@pytest.mark.parametrize("wrong", ["2 lots", -1, False, 1.5, [1]])
def test_what_is_no_size(wrong):
    with pytest.raises(ValueError, match="local_cache must be a number of bytes"):
        SamplingStrategy(local_cache=wrong)


# Ranks in processes ###########################################################


class InMemory(Watch):
    """Keeps after each step which memory the near cache is, and how many bytes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        super().on_train_batch_end(trainer, *given)
        cache = trainer.strategy._loaders["train_mask"].makers[0].store.near_cache
        if cache is not None:
            kept = cache._cached_rows["node"]
            self.found.append((mapped_file(kept.place), mapped_file(kept.rows), kept.place.nbytes + kept.rows.nbytes))


def trained(rank: int, world_size: int, local_cache: Any) -> tuple[Any, ...]:
    watch, module = InMemory(), NodeClassifier(build("sage"), num_classes=5, lr=0.05).double()
    strategy = SamplingStrategy(
        [3, 2], 4, timeout=60, self_check=False, num_workers=2, prefetch_batches=2, local_cache=local_cache
    )
    run = quiet_trainer(strategy, world_size, callbacks=[watch], max_epochs=3)
    run.fit(module, datamodule=GraphDataModule(awkward_graph()))
    nodes = [sum(len(batch.n_id) for batch in epoch) for epoch in watch.batches]
    return watch.found, watch.logged, nodes, {name: each.clone() for name, each in module.state_dict().items()}


def test_ranks_of_a_machine_share_it_and_train_the_same(ranks):
    """One memory for both, another from the second epoch on; what all ranks read is counted."""
    (one, logged, nodes, weights), (other, _, of_other, _) = ranks.run(2, trained, "2KB")
    (none, plain, _, same), _ = ranks.run(2, trained, 0)
    assert one == other and not none
    assert len(set(one)) == 2 and all("0" not in of_step for of_step in one)
    assert {size for _, _, size in one} == {4 * 60 + (2000 - 240) // 96 * 96}
    assert_equal(weights, same)
    for epoch, read in zip(logged, map(sum, zip(nodes, of_other)), strict=True):
        hits, misses = (epoch[f"sampling/feature_cache_{what}"] for what in ("hits", "misses"))
        assert min(hits, misses) > 0 and hits + misses == read
    assert not any("local_cache" in name for epoch in plain for name in epoch)
    assert [each["train_loss"] for each in logged] == [each["train_loss"] for each in plain]
