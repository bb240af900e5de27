"""Mini-batch training over ranks: whole neighbourhoods give the numbers of the full graph, and no rank waits in vain.

Test tiers: without ranks; gloo ranks in the pool, also ``apart``, as if each were on a machine of its own.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import numpy as np
import pytest
import torch
from common import (
    CLASSES,
    FEATURES,
    assert_same,
    awkward_graph,
    build,
    examples,
    one_training_node,
    quiet_trainer,
    ranks_apart,
    single,
    strategy_of_config,
    train,
)
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from processes import Finished, run
from scipy.optimize import linear_sum_assignment
from torch_geometric.data import Data
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import GraphDataModule, NodeClassifier, SamplingStrategy
from lightning_gnn.strategies.sampling.loader import SampledBatches, SeedBatches, SplitSeeds

WHOLE: dict[str, Any] = {"num_neighbors": [-1, -1], "batch_size": 1000}
SMALL: dict[str, Any] = {"num_neighbors": [3, 2], "batch_size": 4}

# Seeds, without ranks #########################################################


@st.composite
def seeds_and_offsets(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    nodes = draw(st.integers(0, 60))
    bounds = np.sort(rng.integers(0, nodes + 1, draw(st.integers(0, 5))))
    seeds = np.flatnonzero(rng.random(nodes) < draw(st.sampled_from([0.05, 0.4, 1.0])))
    return seeds, np.array([0, *bounds, nodes])


def split_seeds(seeds: np.ndarray, offsets: np.ndarray, ranks_per_machine: int) -> list[np.ndarray]:
    owned = [torch.from_numpy(each) for each in np.split(seeds, np.searchsorted(seeds, offsets[1:-1]))]
    split = SplitSeeds(owned.__getitem__, [*map(len, owned)], ranks_per_machine)
    found = [split.seeds(rank).numpy() for rank in range(len(owned))]
    assert split.sizes == [*map(len, found)] and split.first.tolist() == seeds[:1].tolist()
    return found


@examples(200)
@given(seeds_and_offsets(), st.integers(1, 3))
def test_each_seed_has_one_rank_and_most_are_at_home(graph, ranks_per_machine):
    seeds, offsets = graph
    ranks = len(offsets) - 1
    split = split_seeds(seeds, offsets, ranks_per_machine)
    assert len(split) == ranks and np.array_equal(np.sort(np.concatenate(split)), seeds)
    assert all((np.diff(each) > 0).all() for each in split)
    sizes = [len(each) for each in split]
    assert max(sizes) - min(sizes) <= 1
    overlap = np.stack([np.histogram(each, offsets)[0] for each in split])
    owned = np.histogram(seeds, offsets)[0]
    share, over = divmod(len(seeds), ranks)
    # No split into such sizes keeps more at home, and DistDGL's equal ranges of sorted ids do not.
    best = np.minimum(owned, share).sum() + min(over, (owned > share).sum())
    assert np.trace(overlap) == best
    theirs = np.stack([np.histogram(each, offsets)[0] for each in np.array_split(seeds, ranks)])
    assert theirs[linear_sum_assignment(theirs, maximize=True)].sum() <= best


def test_seeds_stay_on_their_machine_where_they_can():
    # Three machines of two ranks; ranks 2, 4 and 5 have a seed too many.
    seeds = np.array([0, 10, 20, 21, 22, 30, 40, 41, 42, 50, 51, 52])
    split = split_seeds(seeds, np.arange(0, 70, 10), ranks_per_machine=2)
    assert [each.tolist() for each in split] == [[0, 42], [10, 52], [20, 21], [22, 30], [40, 41], [50, 51]]


@examples(100)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 10), st.integers(0, 3))
def test_batches_of_an_epoch(sizes, batch_size, seed):
    batches = SeedBatches(sizes, batch_size)
    counts = [batches.counts(step) for step in range(batches.steps)]
    assert [sum(each) for each in zip(*counts)] == sizes
    for rank, size in enumerate(sizes):
        own = torch.arange(size) + 100
        parts = batches.split_epoch(own, rank, seed)
        assert [len(part) for part in parts] == [each[rank] for each in counts]  # as many steps on all ranks
        assert max(map(len, parts)) <= batch_size
        assert torch.equal(torch.cat(parts).sort().values, own)


class Failing:
    """Makes one batch, and then fails."""

    made, store = 0, Mock()

    def make(self, seeds: torch.Tensor, random_seeds: list[int], peer_seeds: Any = None) -> Data:
        self.made += 1
        return Data() if self.made == 1 else 1 // 0  # type: ignore[return-value]


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_in_the_background_is_the_users(ahead):
    own = torch.arange(6)
    loader = SampledBatches([Failing()], SeedBatches([6], 2), own, own[:1], 0, 0, ahead, lambda: 0)  # type: ignore[arg-type]
    found = []
    with pytest.raises(ZeroDivisionError) as failure:
        found.extend(loader)
    lines = "".join(traceback.format_exception(failure.value))
    assert "in make" in lines and "1 // 0" in lines
    loader.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_neighbors": []}, "one number per layer"),
        ({"num_neighbors": [5, -2]}, "-2"),
        ({"num_neighbors": [5, 0]}, "0"),
        ({"batch_size": 0}, "batch_size must be at least 1 .got 0"),
        ({"prefetch_batches": -1}, "prefetch_batches must be at least 0 .got -1"),
        ({"remote_cache": -0.5}, "remote_cache must be a number of bytes"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingStrategy(**options)


def test_yaml(tmp_path):
    given = "{num_neighbors: [4, -1], batch_size: 7, prefetch_batches: 1}"
    entry = f"{{class_path: lightning_gnn.SamplingStrategy, init_args: {given}}}"
    found = strategy_of_config(tmp_path / "config.yaml", entry)
    assert isinstance(found, SamplingStrategy)
    assert (found.num_neighbors, found.batch_size, found.prefetch_batches, found.remote_cache) == ([4, -1], 7, 1, 64_000_000)
    assert isinstance(strategy_of_config(tmp_path / "config.yaml", "sampling"), SamplingStrategy)


def test_parts_that_are_balanced_for_sampling_are_others(tmp_path):
    data = GraphDataModule(awkward_graph(), partition_dir=tmp_path)
    layouts = [quiet_trainer(name, 2).strategy.layout() for name in ("sampling", "dgcl")]
    folders = [data.partition_for(layout) for layout in layouts]
    assert folders[0] != folders[1]
    assert folders[0] == data.partition_for(layouts[0])


# Ranks ########################################################################


@cache
def on_one_device(model: str, module: str = "library") -> dict[str, Any]:
    return single(awkward_graph(), model, module=module)


def trained(rank: int, world_size: int, model: str, options: dict[str, Any], apart: bool, **others: Any) -> Any:
    with ranks_apart(apart):
        graph = others.pop("graph", None) or awkward_graph()
        return train(rank, world_size, graph, model, strategy=SamplingStrategy, options=options, **others)


class Watch(L.Callback):
    """Keeps each epoch's batches and losses, and what was logged at its end."""

    def __init__(self) -> None:
        self.batches: list[list[Data]] = []
        self.logged: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.batches.append([])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Data, batch_idx: int) -> None:
        self.batches[-1].append(copy.copy(batch))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def watched(
    rank: int,
    world_size: int,
    options: dict[str, Any],
    model: str = "sage",
    callbacks: list[Any] | None = None,
    save: Path | None = None,
    load: Path | None = None,
    apart: bool = True,
    data: dict[str, Any] | None = None,
    **trainer: Any,
) -> dict[str, Any]:
    """Trains on one rank, by default as if every rank were on a machine of its own; returns what was seen."""
    watch = Watch()
    module = NodeClassifier(build(model), num_classes=CLASSES, lr=0.05).double()
    strategy = SamplingStrategy(timeout=60, self_check=False, **options)
    run = quiet_trainer(strategy, world_size, callbacks=[watch, *(callbacks or [])], **trainer)
    datamodule = GraphDataModule(awkward_graph(), **(data or {}))
    with ranks_apart(apart):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run.fit(module, datamodule=datamodule, ckpt_path=load, weights_only=False)
        weights = copy.deepcopy(module.state_dict())
        if save is not None:
            run.save_checkpoint(save)
        run.test(module, datamodule=datamodule, verbose=False)  # ranks can still speak to each other
    return {
        "batches": watch.batches,
        "logged": watch.logged,
        "weights": weights,
        "told": [str(each.message) for each in told],
    }


def seeds_of(found: dict[str, Any]) -> list[list[list[int]]]:
    return [[batch.input_id.tolist() for batch in epoch] for epoch in found["batches"]]


@pytest.mark.parametrize(
    ("world_size", "model", "apart"), [(1, "sage", False), (2, "sage", True), (3, "gat", False), (4, "gin", True)]
)
def test_whole_neighbourhoods_in_one_batch_are_the_full_graph(ranks, world_size, model, apart):
    for found in ranks.run(world_size, trained, model, WHOLE, apart, self_check=model == "sage"):
        assert_same(found, on_one_device(model), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_users_module_with_and_without_prefetching(ranks, prefetch):
    options = {**WHOLE, "prefetch_batches": prefetch, "shared_memory": False}
    for found in ranks.run(2, trained, "sage", options, True, module="user", self_check=False):
        assert_same(found, on_one_device("sage", "user"), rtol=1e-8, atol=1e-10)


def check_conventions(batch: Data, graph: Data) -> None:
    """A batch is what PyG's NeighborLoader would make of the graph."""
    size = batch.batch_size
    assert torch.equal(batch.n_id[:size], batch.input_id) and graph.train_mask[batch.input_id].all()
    assert torch.equal(batch.x, graph.x[batch.n_id]) and torch.equal(batch.y, graph.y[batch.n_id])
    assert torch.equal(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])
    for name in ("edge_weight", "edge_attr"):
        assert torch.equal(batch[name], graph[name][batch.e_id])
    assert len(batch.n_id.unique()) == len(batch.n_id)
    for name in ("train_mask", "val_mask", "test_mask"):
        assert batch[name].nonzero().view(-1).tolist() == list(range(size))
    nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
    assert nodes[0] == size and sum(nodes) == len(batch.n_id) and sum(edges) == len(batch.e_id)
    assert len(nodes) == len(SMALL["num_neighbors"]) + 1 and len(edges) == len(SMALL["num_neighbors"])
    for fanout, (low, high) in zip(SMALL["num_neighbors"], pairwise(np.cumsum([0, *edges]).tolist())):
        assert batch.edge_index[1, low:high].bincount(minlength=1).max() <= fanout
    model = GraphSAGE(FEATURES, 8, num_layers=2, out_channels=3).double()
    trimmed = model(batch.x, batch.edge_index, num_sampled_nodes_per_hop=nodes, num_sampled_edges_per_hop=edges)
    torch.testing.assert_close(trimmed[:size], model(batch.x, batch.edge_index)[:size])


def test_small_batches_train_and_are_what_pyg_makes(ranks):
    graph = awkward_graph()
    everyone = ranks.run(2, watched, SMALL, max_epochs=8)
    labelled = (graph.train_mask & (graph.y >= 0)).nonzero().view(-1).tolist()
    for epochs in zip(*map(seeds_of, everyone)):
        assert len({len(epoch) for epoch in epochs}) == 1 and len(epochs[0]) > 1  # as many steps on both
        assert sorted(seed for epoch in epochs for batch in epoch for seed in batch) == labelled
    for found in everyone:
        assert found["logged"][-1]["train_loss"] < found["logged"][0]["train_loss"]
        assert found["logged"] == everyone[0]["logged"]
        for batch in found["batches"][1]:
            check_conventions(batch, graph)
        torch.testing.assert_close(found["weights"], everyone[0]["weights"], rtol=0, atol=0)


def test_the_cache_is_counted_and_spares_bytes(ranks):
    with_cache, without = (  # of the second epoch: what fills the cache is in the first one's bytes
        ranks.run(2, watched, {**SMALL, "remote_cache": size}, max_epochs=2)[0]["logged"][1] for size in ("1MB", 0)
    )
    assert with_cache["sampling/cache_hit_rate"] > 0.5 and without["sampling/cache_hit_rate"] == 0
    assert 0 < with_cache["sampling/remote_bytes"] < without["sampling/remote_bytes"]
    assert with_cache["sampling/wait_s"] >= 0 and with_cache["sampling/seconds"] > 0
    # What is cached is exact.
    assert with_cache["train_loss"] == without["train_loss"]


def test_the_cache_learns_from_the_first_epoch_for_all_samplers(ranks):
    """It holds a few rows only, others from the second epoch on; batches are the same as without."""
    options = {**SMALL, "num_workers": 2, "prefetch_batches": 2}
    small, none = (
        ranks.run(2, watched, {**options, "remote_cache": size}, max_epochs=3)[0]["logged"] for size in (500, 0)
    )
    assert all(0 < epoch["sampling/cache_hit_rate"] < 1 for epoch in small)
    assert small[2]["sampling/remote_bytes"] < none[2]["sampling/remote_bytes"]
    assert [epoch["train_loss"] for epoch in small] == [epoch["train_loss"] for epoch in none]


@pytest.mark.parametrize(
    "how",
    [
        {"limit_train_batches": 2},
        {"callbacks": [EarlyStopping("val_loss", min_delta=100, patience=1)], "max_epochs": 9},
    ],
    ids=["limited", "early"],
)
def test_training_that_stops_early_ends(ranks, how):
    for found in ranks.run(2, watched, {**SMALL, "batch_size": 2, "prefetch_batches": 3}, **how):
        assert 2 <= len(found["batches"]) <= 3
        assert len(found["batches"][0]) == how.get("limit_train_batches", len(found["batches"][0]))


@pytest.mark.parametrize("validated", [True, False])
def test_running_statistics_agree_after_an_epoch(ranks, validated):
    limit = {} if validated else {"limit_val_batches": 0}
    one, other = ranks.run(2, watched, {**SMALL, "batch_size": 8}, "gin_batch_norm", max_epochs=1, **limit)
    assert any("running_mean" in name for name in one["weights"])
    torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)


def test_resumes_with_the_batches_that_come_next(ranks, tmp_path):
    path = tmp_path / "after_two.ckpt"
    throughout = ranks.run(2, watched, SMALL, max_epochs=4)
    begun = ranks.run(2, watched, SMALL, max_epochs=2, save=path)
    resumed = ranks.run(2, watched, SMALL, max_epochs=4, load=path)
    for whole, first, rest in zip(throughout, begun, resumed):
        assert seeds_of(whole) == seeds_of(first) + seeds_of(rest)  # also: same seed, same run
        for batch, again in zip(whole["batches"][3], rest["batches"][1]):
            assert torch.equal(batch.e_id, again.e_id)
        torch.testing.assert_close(whole["weights"], rest["weights"])
    other = ranks.run(2, watched, {**SMALL, "seed": 1}, max_epochs=1)
    assert seeds_of(other[0])[0] != seeds_of(throughout[0])[0]


def test_resumes_from_the_checkpoint_of_an_epoch(ranks, tmp_path):
    """As ModelCheckpoint writes it: Lightning then counts that epoch once more for a moment."""
    saver = {"callbacks": [ModelCheckpoint(tmp_path, save_top_k=-1)], "enable_checkpointing": True}
    throughout = ranks.run(2, watched, SMALL, max_epochs=3, **saver)
    [path] = tmp_path.glob("epoch=1-*.ckpt")
    for whole, rest in zip(throughout, ranks.run(2, watched, SMALL, max_epochs=3, load=path)):
        assert seeds_of(whole)[2] == seeds_of(rest)[-1]
        torch.testing.assert_close(whole["weights"], rest["weights"])


def uneven() -> tuple[Data, torch.Tensor]:
    """A graph, and parts of which rank 0 owns all training nodes and rank 2 nothing."""
    graph = awkward_graph()
    return graph, (~graph.train_mask).long()


@pytest.mark.parametrize(
    ("world_size", "given", "apart"), [(3, uneven, True), (4, one_training_node, False)], ids=["uneven", "one"]
)
def test_parts_without_training_nodes(ranks, world_size, given, apart):
    graph, part = given()
    expected = single(graph, "sage")
    data = {"partition": part}
    for found in ranks.run(world_size, trained, "sage", WHOLE, apart, graph=graph, data=data, self_check=False):
        assert_same(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("model", "num_neighbors"), [("sage", [3]), ("own", [3, 3, 3])])
def test_fanouts_that_do_not_match_the_models_depth_are_told_of(ranks, model, num_neighbors):
    [found] = ranks.run(1, watched, {**SMALL, "num_neighbors": num_neighbors}, model, apart=False, max_epochs=1)
    hops = f"sample {len(num_neighbors)} hops, but the model propagates along edges 2 times"
    assert sum(hops in each for each in found["told"]) == 1


def test_fanouts_that_match_are_not_told_of(ranks):
    for model in ("sage", "own", "relations"):
        [found] = ranks.run(1, watched, SMALL, model, apart=False, max_epochs=1)
        assert not any("hops" in each for each in found["told"])


SPAWNED = """
import lightning as L
from torch_geometric.nn.models import GraphSAGE
from lightning_gnn import GraphDataModule, NodeClassifier, SamplingStrategy

if __name__ == "__main__":
    data = GraphDataModule("lightning_gnn.planted_partition", {"num_nodes": 400, "num_classes": 4})
    strategy = SamplingStrategy([5, 5], batch_size=32, start_method="spawn")
    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = L.Trainer(strategy=strategy, devices=2, accelerator="cpu", max_epochs=3, **options)
    module = NodeClassifier(GraphSAGE(32, 16, num_layers=2, out_channels=4))
    trainer.fit(module, datamodule=data)
    print("waited", float(trainer.callback_metrics["sampling/wait_s"]), "trained", trainer.global_step)
"""


def spawned(folder: Path) -> Finished:
    (folder / "script.py").write_text(SPAWNED)
    return run(folder / "script.py", cwd=folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.program(runs=spawned)
def test_spawned_ranks(ran):
    _, finished = ran
    assert "trained" in finished.succeeded().output
