"""One datamodule has one graph, whatever its source draws: in all stages, on all ranks, under all strategies.

Test tiers: without ranks; gloo ranks in the pool.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import awkward_graph, quiet_trainer
from test_hetero_sampling import typed_graph
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.transforms import RandomNodeSplit

from lightning_gnn import (
    ClusterAllReduceStrategy,
    DGCLStrategy,
    GraphDataModule,
    SamplingStrategy,
    local_rows,
)
from lightning_gnn.data.loading import graph_digests, seed_rngs
from lightning_gnn.data.shards import Predicted
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.data.store import read_cut, write_store
from lightning_gnn.extensions.node_types.graph import prepare_hetero
from lightning_gnn.partition.layout import LayoutSpec

MASKS = ("train_mask", "val_mask", "test_mask")
STRATEGIES: dict[str, Any] = {
    "dgcl": lambda: DGCLStrategy(timeout=60),
    "spmm_1d": lambda: "spmm_1d",
    "vertex_cut": lambda: "vertex_cut",
    "sampling": lambda: SamplingStrategy([3, 3], 8, timeout=60),
    "cluster_allreduce": lambda: ClusterAllReduceStrategy(num_clusters=6, final_weights="average", timeout=60),
}


class Drawing:
    """A dataset whose transform draws another split each time that it is asked, like PyG's with RandomNodeSplit."""

    def __init__(self, generator: np.random.Generator | None = None) -> None:
        self.asked, self.generator = 0, generator

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Data:
        self.asked += 1
        return draw(self.generator)


def draw(generator: np.random.Generator | None = None) -> Data:
    """A graph with a random split; drawn from the system's own entropy with a generator, which no seed reaches."""
    graph = awkward_graph()
    graph.y[graph.y < 0] = 0
    for name in MASKS:
        del graph[name]
    if generator is None:
        return RandomNodeSplit(num_val=15, num_test=20)(graph)
    part = torch.from_numpy(generator.integers(0, 3, 60))
    for number, name in enumerate(MASKS):
        graph[name] = part == number
    return graph


def drawn_from_entropy() -> Data:
    return draw(np.random.default_rng())


def nothing_drawn() -> Data:
    return awkward_graph()


class Seen(L.LightningModule):
    """Keeps which nodes each stage's batches had in each mask."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(12, 5)
        self.masks: dict[str, dict[str, set[int]]] = {}

    def see(self, stage: str, batch: Any) -> torch.Tensor:
        with local_rows():
            own = batch.n_id[: batch.get("num_owned", len(batch.n_id))]
        counts = {} if self.trainer.datamodule.is_whole else self.trainer.datamodule.shard.mask_counts
        for name in MASKS:
            stands_in = (
                len(counts.get(name, ())) == self.trainer.world_size and not counts[name][self.trainer.global_rank]
            )
            if not stands_in:
                with local_rows():
                    found = own[batch[name][: len(own)]].tolist()
                self.masks.setdefault(stage, {}).setdefault(name, set()).update(found)
        return self.conv(batch.x, batch.edge_index)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.see("fit", batch)
        return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.see("validate", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.see("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.see("predict", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_stages(
    rank: int,
    world_size: int,
    source: Any,
    strategy: str,
    calls: tuple[str, ...] = ("validate", "fit", "test", "predict"),
) -> dict[str, dict[str, set[int]]]:
    """Runs stages of Trainers with one datamodule; each rank's script has come to another state of its random numbers."""
    torch.manual_seed(7)
    torch.rand(rank + 1)
    module, data = Seen().double(), GraphDataModule(source() if isinstance(source, type) else source)
    for number, call in enumerate(calls):
        if number in (0, 2):  # two Trainers
            trainer = quiet_trainer(STRATEGIES[strategy]() if world_size > 1 else "auto", world_size, max_epochs=2)
        getattr(trainer, call)(module, datamodule=data)
    if isinstance(data.source, Drawing):
        assert data.source.asked == (1 if rank == 0 else 0)
    return module.masks


def union(found: list[dict[str, dict[str, set[int]]]], stage: str) -> dict[str, set[int]]:
    return {name: set.union(*(each[stage].get(name, set()) for each in found)) for name in MASKS}


def split_of(seed: int) -> dict[str, set[int]]:
    """What the source draws right after the seed was set."""
    with seed_rngs(seed):
        graph = draw()
    return {name: set(graph[name].nonzero().view(-1).tolist()) for name in MASKS}


def test_one_device_has_one_split_in_all_stages():
    found = [run_stages(0, 1, Drawing, "auto")]
    assert all(union(found, stage) == split_of(7) for stage in ("fit", "validate", "test", "predict"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_have_one_split_in_all_stages(ranks, strategy):
    found = ranks.run(2, run_stages, Drawing, strategy)
    samples = strategy in ("sampling", "cluster_allreduce")
    for stage, own in {"fit": "train_mask", "validate": "val_mask", "test": "test_mask", "predict": None}.items():
        for name in MASKS:
            if not (
                samples and stage in ("fit", "validate") and name != own
            ):  # masks of a sample are those of its seeds
                assert union(found, stage)[name] == split_of(7)[name], (stage, name)


def test_a_path_is_loaded_in_another_process_which_draws_the_same_and_reads_back_what_is_known(tmp_path):
    torch.manual_seed(7)
    assert prepared(tmp_path, "test_one_graph.draw")[1] == split_of(7)
    data, split = prepared(tmp_path, "test_one_graph.drawn_from_entropy")
    assert prepared(tmp_path, data, devices=3)[1] == split


def prepared(path: Path, source: Any, devices: int = 2, **options: Any) -> tuple[GraphDataModule, dict[str, set[int]]]:
    """A datamodule, new or given, after its graph was partitioned, and the split in the store."""
    data = source if isinstance(source, GraphDataModule) else GraphDataModule(source, partition_dir=path, **options)
    data.prepare_for(LayoutSpec("edge_cut", devices))
    return data, split_in_store(data)


def split_in_store(data: GraphDataModule) -> dict[str, set[int]]:
    cut = data.stored_cut()
    return {name: set(cut.n_id[cut.attributes["node"][name]].tolist()) for name in MASKS}


def test_a_later_run_finds_what_was_drawn_with_its_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(GraphDataModule, "_build_in_subprocess", GraphDataModule.build)
    torch.manual_seed(1)
    assert prepared(tmp_path, "test_one_graph.draw")[1] == split_of(1)
    assert prepared(tmp_path, "test_one_graph.draw", seed=4)[1] == split_of(5)
    torch.manual_seed(2)
    assert prepared(tmp_path, "test_one_graph.draw")[1] == split_of(2)
    prepared(tmp_path, "test_one_graph.nothing_drawn")
    with monkeypatch.context() as patched:
        patched.setattr(GraphDataModule, "_build_in_subprocess", _refuse)
        torch.manual_seed(1)
        assert prepared(tmp_path, "test_one_graph.draw")[1] == split_of(1)
        torch.manual_seed(3)
        prepared(tmp_path, "test_one_graph.nothing_drawn")  # whatever the seed
        with pytest.raises(AssertionError, match="loaded again"):
            prepared(tmp_path, "test_one_graph.draw")


def _refuse(*_: Any) -> Any:
    raise AssertionError("loaded again")


def test_loading_takes_no_random_numbers_from_the_run():
    torch.manual_seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    GraphDataModule(draw).load()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002


def test_what_no_seed_reaches_is_read_back(tmp_path):
    data, split = prepared(tmp_path, drawn_from_entropy)
    digests = data._digests
    again, _ = prepared(tmp_path, data)  # the same layout
    assert again is data and split_in_store(data) == split
    prepared(tmp_path, data, devices=3)
    assert data._digests == digests and split_in_store(data) == split
    graph = data.load()  # on one device
    assert graph_digests(graph) == digests
    assert {name: set(graph[name].nonzero().view(-1).tolist()) for name in MASKS} == split


def test_another_graph_is_refused_by_what_has_changed(tmp_path):
    data, _ = prepared(tmp_path, drawn_from_entropy)
    for manifest in tmp_path.glob("*/manifest.json"):
        shutil.rmtree(manifest.parent)
    words = r"drawn_from_entropy, loaded again, differs from .*: test_mask, train_mask, val_mask\. .*split=\(0.6, 0.2, 0.2\)"
    with pytest.raises(ValueError, match=words):
        data.load()
    with pytest.raises(ValueError, match=words):
        data.prepare_for(LayoutSpec("edge_cut", 2))


def test_a_cut_gives_its_graph_back(tmp_path):
    graph = prepare_graph(awkward_graph())
    graph.edge_number, graph.scale, graph.temperature = torch.arange(graph.edge_index.size(1)), 2, torch.tensor(36.6)
    part = np.random.default_rng(1).integers(0, 3, 60)
    write_store(tmp_path / "one", graph, part, LayoutSpec("edge_cut", 3), {})
    found = read_cut(tmp_path / "one").graph()
    assert graph_digests(found) == graph_digests(graph) and torch.equal(found.edge_index, graph.edge_index)


def test_a_cut_gives_its_types_back(tmp_path):
    hetero = prepare_hetero(typed_graph(), "paper")
    num_nodes = sum(hetero[kind].num_nodes for kind in hetero.node_types)
    part = np.random.default_rng(1).integers(0, 3, num_nodes)
    write_store(tmp_path / "types", hetero, part, LayoutSpec("edge_cut", 3), {}, predicted=Predicted.of(hetero, "paper"))
    found = read_cut(tmp_path / "types").graph()
    assert found.metadata() == hetero.metadata()
    assert graph_digests(found) == graph_digests(hetero)


def test_one_device_and_ranks_take_turns(tmp_path):
    data = GraphDataModule(draw, partition_dir=tmp_path)
    torch.manual_seed(11)
    seen = []
    for strategy in ("auto", DGCLStrategy(timeout=60), "auto"):
        module = Seen().double()
        quiet_trainer(strategy, 1).test(module, datamodule=data, verbose=False)
        seen.append(module.masks["test"])
        torch.manual_seed(12)
    assert seen[0] == seen[1] == seen[2] == split_of(11)


# Changes of a given graph, and of the batch ####################################


def test_changes_of_a_given_graph_are_followed(tmp_path):
    graph = awkward_graph()
    data, split = prepared(tmp_path, graph)
    graph.train_mask = graph.train_mask.clone()
    graph.train_mask[split["train_mask"].pop()] = False
    prepared(tmp_path, data)
    assert split_in_store(data)["train_mask"] == split["train_mask"]
    assert torch.equal(GraphDataModule(graph).load().train_mask, graph.train_mask)


class ScalesFeatures(Seen):
    """Changes the batch in place."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batch.x.mul_(0.5)
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.tested = float(batch.x.abs().sum())


def scale_features(rank: int, world_size: int, strategy: Any, tested_under: Any = None) -> tuple[float, list[str]]:
    torch.manual_seed(0)
    module, data = ScalesFeatures().double(), GraphDataModule(awkward_graph())
    told = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lightning_gnn.datamodules.graph.rank_zero_warn", told.append)
        trainer = quiet_trainer(strategy, world_size, max_epochs=3)
        trainer.fit(module, datamodule=data)
        if tested_under is not None:
            trainer = quiet_trainer(tested_under, world_size)
        trainer.test(module, datamodule=data, verbose=False)
    return module.tested, told


def test_changes_in_place_stay_as_on_one_device(ranks):
    [whole, _] = scale_features(0, 1, "auto")
    parts = ranks.run(2, scale_features, DGCLStrategy(timeout=60, self_check=False))
    assert whole == pytest.approx(float(awkward_graph().x.abs().sum()) / 8)
    assert all(found == pytest.approx(whole) for found, _ in parts)
    assert not any(told for _, told in parts)


def test_changes_in_place_that_are_lost_are_told(ranks):
    for _, told in ranks.run(2, scale_features, "dgcl", "vertex_cut"):
        assert told[0].startswith("batch.x changed in place during this stage, but the next stage starts with the graph")
