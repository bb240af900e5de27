"""Predictions of samples that all ranks write to one file, in the order of samples and nodes (gloo ranks)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from common import campaign, quiet_trainer
from conftest import RankFailed
from sample_runs import CONCATENATED, MODELS, NODES, TARGETS, SampleModule, Samples, graph_of_samples
from torch_geometric.data import Data

from lightning_gnn import DGCLStrategy, GraphDataModule, VertexCutStrategy
from lightning_gnn.rows.mode import RowsMode

SIZE, TIMES = 9, 3  # the last batch leaves a data rank without a sample


class Rollout(SampleModule):
    """Predicts tensors of all shapes; fails in a batch."""

    def __init__(self, fails_in: int) -> None:
        super().__init__(MODELS["gcn"]())
        self.fails_in = fails_in

    def predict_step(self, batch: Data, batch_idx: int) -> Any:
        if batch_idx == self.fails_in:
            raise ValueError("spoilt")
        x = self.model(batch)
        steps = torch.stack([x * time for time in range(TIMES)], 1)
        return {
            "steps": steps,  # [B, T, N, F]
            "last": (x[..., 0], x.bfloat16()),  # [B, N], [B, N, F]
            "permuted": steps.permute(0, 3, 1, 2),  # [B, F, T, N]
            "array": x.detach().numpy(),
            "hour": batch.hour,
            "mean": x.mean(0),
            "name": "a text",
        }


def predict(
    rank: int,
    world_size: int,
    graph_ranks: int,
    folder: Path,
    mode: str = "file",
    kind: Any = DGCLStrategy,
    fails_in: int = -1,
    size: int = 4,
    **trainer: Any,
) -> list[Any]:
    """Returns the predictions; with files, no rows of nodes and samples are gathered."""

    def gather_rows(self: RowsMode, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        assert mode != "file" or x.dim() <= 2 or not x.numel(), f"gathers {list(x.shape)}"
        return gather(self, x, *arguments)

    L.seed_everything(0, verbose=False)
    samples = Samples(size=SIZE)
    data = GraphDataModule(graph_of_samples(), predict_samples=samples, global_batch_size=size)
    strategy: Any = kind(graph_ranks=graph_ranks, timeout=60, predictions=mode) if graph_ranks else "auto"
    gather = RowsMode.gather_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowsMode, "gather_rows", gather_rows)
        run = quiet_trainer(strategy, world_size, self_check=False, default_root_dir=folder, **trainer)
        return run.predict(Rollout(fails_in).double(), datamodule=data)


def assert_equal(found: Any, expected: Any) -> None:
    names = [each.pop("name") for each in [*found, *expected]]
    assert set(names) == {"a text"}
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, check_dtype=False)


@pytest.mark.parametrize(
    ("world_size", "graph_ranks", "kind"),
    [(2, 1, DGCLStrategy), (2, 2, DGCLStrategy), *campaign((4, 2, DGCLStrategy), (4, 2, VertexCutStrategy))],
)
def test_files(ranks, tmp_path, world_size, graph_ranks, kind):
    """Each rank writes its block; files have all samples and nodes in order, and ranks map the samples of a batch."""
    expected = predict(0, 1, 0, tmp_path / "one")
    for batch in expected:
        batch["last"] = batch["last"][0], batch["last"][1].float()
    for found in ranks.run(world_size, predict, graph_ranks, tmp_path, "file", kind):
        assert_equal(found, [{**each} for each in expected])
    of_all = {name: torch.cat([batch[name] for batch in expected]) for name in ("steps", "permuted")}
    of_all |= {f"last_{place}": torch.cat([batch["last"][place] for batch in expected]) for place in (0, 1)}
    of_all["array"] = torch.from_numpy(np.concatenate([batch["array"] for batch in expected]))
    files = {file.name: torch.from_numpy(np.load(file)) for file in (tmp_path / "predictions").iterdir()}
    assert files["steps.npy"].shape == (SIZE, TIMES, NODES, TARGETS) and files["last_1.npy"].dtype == torch.float32
    torch.testing.assert_close(files, {f"{name}.npy": each for name, each in of_all.items()}, rtol=1e-10, atol=1e-10)


class Concatenated(SampleModule):
    def predict_step(self, batch: Data, batch_idx: int) -> Any:
        x = self.model(batch)
        ends = x[batch.edge_index[0]] - x[batch.edge_index[1]]
        return {"nodes": x, "edges": ends, "some": x[:, 0][batch.seen]}


def predict_concatenated(rank: int, world_size: int, graph_ranks: int, folder: Path) -> list[Any]:
    L.seed_everything(0, verbose=False)
    data = GraphDataModule(graph_of_samples(), predict_samples=Samples(size=SIZE), global_batch_size=4, concatenate=True)
    strategy: Any = DGCLStrategy(graph_ranks=graph_ranks, timeout=60, predictions="file") if graph_ranks else "auto"
    gathered, gather = [], RowsMode.gather_rows

    def gather_rows(self: RowsMode, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        gathered.append(x.dim())
        return gather(self, x, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowsMode, "gather_rows", gather_rows)
        run = quiet_trainer(strategy, world_size, self_check=False, default_root_dir=folder)
        found = run.predict(Concatenated(CONCATENATED["concatenated_gcn"]()).double(), datamodule=data)
    assert gathered == ([1] * 3 if graph_ranks else [])  # only the selected nodes
    return found


@pytest.mark.parametrize(("world_size", "graph_ranks"), [(2, 2), (2, 1), *campaign((4, 2))])
def test_files_of_concatenated_samples(ranks, tmp_path, world_size, graph_ranks):
    """Files have the rows of all samples, one after the other; selected rows are returned on all ranks."""
    expected = predict_concatenated(0, 1, 0, tmp_path / "one")
    for found in ranks.run(world_size, predict_concatenated, graph_ranks, tmp_path):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    files = {file.stem: torch.from_numpy(np.load(file)) for file in (tmp_path / "predictions").iterdir()}
    of_all = {name: torch.cat([batch[name] for batch in expected]) for name in ("nodes", "edges")}
    assert of_all["nodes"].shape == (SIZE * NODES, TARGETS)
    torch.testing.assert_close(files, of_all, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("mode", "graph_ranks", "world_size"), [("rank0", 1, 2), ("shards", 2, 2), ("all", 2, 4), *campaign(("all", 1, 3))]
)
def test_other_modes(ranks, tmp_path, mode, graph_ranks, world_size):
    """Also where a data rank has no sample in the last batch: the shapes of an empty tensor do not show where its nodes are."""
    size = 3 if world_size == 3 else 4
    expected = predict(0, 1, 0, tmp_path, size=size)
    found = ranks.run(world_size, predict, graph_ranks, tmp_path, mode, size=size)
    if mode == "shards":
        assert sum(len(each[0]["steps"][0, 0]) for each in found) == NODES
        return
    for rank, each in enumerate(found):
        if mode == "rank0" and rank:
            assert each == [None] * 3
        else:
            assert_equal(each, [{**batch} for batch in expected])


class Joined(SampleModule):
    """Predicts tensors whose samples and nodes are along one dimension, and selected samples."""

    def predict_step(self, batch: Data, batch_idx: int) -> Any:
        x = self.model(batch)
        joined = x.flatten(0, 1), x.transpose(0, 1).flatten(0, 1), x.reshape(-1), x.flatten(1), x[..., 0].view(-1)
        return {"joined": joined, "some": (x[0], x[:2].mean(1), x[..., 0][batch.seen]), "sum": torch.cat([x, x]).sum(0)}


def predict_joined(rank: int, world_size: int, graph_ranks: int, folder: Path, mode: str) -> list[Any]:
    L.seed_everything(0, verbose=False)
    data = GraphDataModule(graph_of_samples(), predict_samples=Samples(size=SIZE), global_batch_size=4)
    strategy: Any = DGCLStrategy(graph_ranks=graph_ranks, timeout=60, predictions=mode) if graph_ranks else "auto"
    run = quiet_trainer(strategy, world_size, self_check=False, default_root_dir=folder)
    return run.predict(Joined(MODELS["gcn"]()).double(), datamodule=data)


@pytest.mark.parametrize(
    ("mode", "graph_ranks", "world_size"), [("all", 2, 4), *campaign(("all", 1, 2), ("all", 2, 2), ("file", 2, 4))]
)
def test_joined_dimensions(ranks, tmp_path, mode, graph_ranks, world_size):
    expected = predict_joined(0, 1, 0, tmp_path, mode)
    for found in ranks.run(world_size, predict_joined, graph_ranks, tmp_path, mode):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_some_batches(ranks, tmp_path):
    """The file has the samples of the predicted batches, and replaces the file of another call."""
    ranks.run(2, predict, 2, tmp_path)
    expected = predict(0, 1, 0, tmp_path / "one", limit_predict_batches=2)
    ranks.run(2, predict, 2, tmp_path, limit_predict_batches=2)
    found = torch.from_numpy(np.load(tmp_path / "predictions" / "steps.npy"))
    torch.testing.assert_close(found, torch.cat([each["steps"] for each in expected]), rtol=1e-10, atol=1e-10)


def test_an_error_in_a_later_batch(ranks, tmp_path):
    """No incomplete file remains, and the files of another call stay."""
    ranks.run(2, predict, 1, tmp_path)
    with pytest.raises(RankFailed, match="spoilt"):
        ranks.run(2, predict, 1, tmp_path, fails_in=1)
    files = {file.name: np.load(file).shape[0] for file in (tmp_path / "predictions").iterdir()}
    assert set(files.values()) == {SIZE} and all(name.endswith(".npy") for name in files)


class Changing(Rollout):
    def predict_step(self, batch: Data, batch_idx: int) -> Any:
        return self.model(batch)[..., : 1 + batch_idx]


def predict_changing(rank: int, world_size: int, folder: Path) -> None:
    data = GraphDataModule(graph_of_samples(), predict_samples=Samples(), batch_size=2)
    strategy = DGCLStrategy(graph_ranks=2, timeout=60, predictions="file")
    quiet_trainer(strategy, world_size, default_root_dir=folder).predict(Changing(-1).double(), datamodule=data)


def test_shapes_that_differ(ranks, tmp_path):
    with pytest.raises(RankFailed) as failed:
        ranks.run(2, predict_changing, tmp_path)
    words = "predict_step must return one shape and dtype for all batches, got [9, 40, 2] of float64 in place of [9, 40, 1]"
    assert all(words in line for line in failed.value.errors.values()), failed.value.errors
    assert not [*(tmp_path / "predictions").iterdir()]
