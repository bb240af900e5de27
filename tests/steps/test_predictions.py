"""What ``trainer.predict`` and ``self.all_gather`` return on several ranks (gloo ranks)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from common import CLASSES, FEATURES, UserModule, awkward_graph, build, quiet_trainer
from conftest import RankFailed
from lightning.pytorch.callbacks import BasePredictionWriter
from torch_geometric.data import Data

from lightning_gnn import CoverStrategy, DGCLStrategy, GraphDataModule, VertexCutStrategy, local_rows
from lightning_gnn.comm.group import World


def graph_and_parts(world_size: int) -> tuple[Data, torch.Tensor]:
    """A graph in lopsided parts; of three, the last has no node of the validation and test masks."""
    graph = awkward_graph(seed=4)
    graph.y = graph.y.clamp(min=0)
    graph.x[:, 0] = torch.arange(60)  # what to choose rows by
    for name in ("val_mask", "test_mask"):
        graph[name][48:] = False
    graph.edge_test_mask = torch.arange(graph.edge_index.size(1)) % 5 == 0
    graph.odd = graph.n_odd = torch.arange(60) % 7 == 0
    part = torch.zeros(60, dtype=torch.long)
    part[40 if world_size == 3 else 37 :] = 1
    if world_size == 3:
        part[48:] = 2
    return graph, part


class Predicting(UserModule):
    """Returns what a kind says of rows, with the batch's ids."""

    def __init__(self, kind: str) -> None:
        super().__init__(build("sage", FEATURES, CLASSES))
        self.kind = kind

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.model(batch.x, batch.edge_index)
        edges = batch.x[:, :1].expand(-1, 3)[batch.edge_index[1]] if self.kind.startswith("edges") else out
        test, some = batch.test_mask, batch.x[: len(out), 0] % 3 == 1
        return {
            "all": lambda: out,
            "test": lambda: out[test],
            "classes of test": lambda: out[test].argmax(-1),
            "several": lambda: {
                "out": out,
                "of": [out[test], out[batch.val_mask].argmax(-1)],
                "name": "gcn",
                "one": 1.5,
            },
            "user's mask": lambda: (out[batch.odd], batch.y[batch.odd]),
            "ids": lambda: {"n_id": batch.n_id[some], "out": out[some], "class": out[some].argmax(-1)},
            "ids in a tuple": lambda: (out[some], batch.n_id[some]),
            "ids of test": lambda: {"n_id": batch.n_id[test], "out": out[test]},
            "ids of some of test": lambda: {"n_id": batch.n_id[test & some], "out": out[test & some]},
            "ids in another order": lambda: {"n_id": batch.n_id[some].flip(0), "out": out[some].flip(0)},
            "edges": lambda: edges,
            "edges of a mask": lambda: edges[batch.edge_test_mask],
            "edges by id": lambda: {"e_id": batch.e_id[edges[:, 0] > 30], "rows": edges[edges[:, 0] > 30]},
            "array": lambda: out[test].numpy(),
            "list": lambda: out[test].argmax(-1).tolist(),
            "nothing": lambda: None,
            "of the graph": lambda: (torch.ones(4, 2) * torch.arange(4).view(4, 1), torch.tensor(2.0), [], None),
            "scalar": lambda: out.mean(),
            "number": lambda: {"loss": float(out.mean())},
            "some rows": lambda: [out[some]],
            "two masks": lambda: out[batch.twin],
            "other things": lambda: (out, out) if len(out) > 30 else (out,),
        }[self.kind]()


KINDS = (
    "all", "test", "classes of test", "several", "user's mask", "ids", "ids in a tuple", "ids of test", "ids of some of test",
    "ids in another order", "edges", "edges of a mask", "edges by id", "array", "list", "nothing", "of the graph",
    "scalar", "number", "some rows", "two masks", "other things",
)  # fmt: skip


class Writer(BasePredictionWriter):
    """Keeps what it is to write, per batch and per epoch."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *_: Any) -> None:
        self.batches.append(prediction)

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.extend(predictions)


def predicted(
    rank: int, world_size: int, kinds: tuple[str, ...], parts: int, strategy: str = "auto", **options: Any
) -> Any:
    """What predict returns of each kind, and what a writer gets."""
    graph, part = graph_and_parts(parts)
    returns, root = options.pop("returns", True), options.pop("root", None)
    if "two masks" in kinds:  # of as many nodes
        graph.twin, graph.other = (torch.arange(60) % 30 == rest for rest in (0, 1))
    data = GraphDataModule(graph, partition=None if strategy in ("auto", "vertex_cut") else part)
    found = {}
    for kind in kinds:
        writer = Writer()
        chosen: Any = strategy
        if strategy != "auto":
            make = {"dgcl": DGCLStrategy, "vertex_cut": VertexCutStrategy, "cover": CoverStrategy}[strategy]
            chosen = make(timeout=60, self_check=False, **options)
        trainer = quiet_trainer(chosen, world_size, callbacks=[writer], default_root_dir=root)
        result = trainer.predict(Predicting(kind).double(), datamodule=data, return_predictions=returns)
        found[kind] = result, writer.batches, writer.epochs
    return found if options.get("predictions") not in ("shards", "rank0") else (found, data.shard.batch.n_id)


def assert_same(found: Any, expected: Any, kind: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key], kind)
    elif isinstance(expected, (list, tuple)) and not (expected and isinstance(expected[0], (int, float))):
        assert type(found) is type(expected) and len(found) == len(expected)
        for ours, theirs in zip(found, expected):
            assert_same(ours, theirs, kind)
    elif isinstance(expected, (torch.Tensor, np.ndarray)):
        assert type(found) is type(expected)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=lambda m: f"{kind}: {m}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9), kind
    else:
        assert found == expected, kind


@pytest.mark.parametrize(("world_size", "strategy"), [(2, "dgcl"), (3, "dgcl"), (2, "vertex_cut"), (2, "cover")])
def test_predictions_are_those_of_one_device(ranks, world_size, strategy):
    expected = predicted(0, 1, KINDS, world_size)
    for found in ranks.run(world_size, predicted, KINDS, world_size, strategy):
        for kind in KINDS:
            assert_same(found[kind], expected[kind], kind)


def test_predictions_on_rank_zero_and_of_shards(ranks):
    kinds = ("test", "ids of test", "edges of a mask")
    expected = predicted(0, 1, kinds, 3)
    first, *others = (found for found, _ in ranks.run(3, predicted, kinds, 3, "dgcl", predictions="rank0"))
    for kind in kinds:
        assert_same(first[kind], expected[kind], kind)
        assert all(other[kind][0] == [None] for other in others)
    parts = ranks.run(3, predicted, kinds, 3, "dgcl", predictions="shards")
    graph, _ = graph_and_parts(3)
    [whole] = expected["ids of test"][0]
    for found, n_id in parts:
        [rows], [by_id] = found["test"][0], found["ids of test"][0]
        own = n_id[graph.test_mask[n_id]]
        assert torch.equal(by_id["n_id"], own)
        for each in (rows, by_id["out"]):
            assert_same(each, whole["out"][torch.searchsorted(whole["n_id"], own)], "shards")
    edges = sum(len(found["edges of a mask"][0][0]) for found, _ in parts)
    assert edges == int(graph.edge_test_mask.sum())


def test_predictions_in_files(ranks, tmp_path, monkeypatch):
    """Each rank writes its rows where they belong; all have them, mapped, and no rows travel."""
    kinds = "all", "test", "several", "ids of test", "edges of a mask", "array", "nothing", "of the graph"
    expected = predicted(0, 1, kinds, 3)
    for found in ranks.run(3, without_gathering, kinds, 3, "dgcl", predictions="file", root=str(tmp_path)):
        for kind in kinds:
            assert_same(found[kind], expected[kind], kind)
    written = {file.name: np.load(file) for file in (tmp_path / "predictions").iterdir()}
    assert "predictions.npy" in written and all(name.endswith(".npy") for name in written)
    assert_same(written["predictions.npy"], expected["array"][0][0], "the last of that name")


def without_gathering(*given: Any, **options: Any) -> Any:
    """As :func:`predicted`; rows that are gathered are ids."""

    def gather_rows(world: World, rows: torch.Tensor, counts: Any) -> torch.Tensor:
        assert rows.dtype == torch.int64 and rows.dim() == 1
        return gather(world, rows, counts)

    gather = World.all_gather_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "all_gather_rows", gather_rows)
        return predicted(*given, **options)


def test_a_folder_that_a_rank_does_not_see(ranks, tmp_path):
    """Nothing is left, and every rank says so; a file of that name stays as it was."""
    (tmp_path / "predictions").mkdir()
    (tmp_path / "predictions" / "predictions.npy").write_bytes(b"of an earlier run")
    with pytest.raises(RankFailed) as caught:
        ranks.run(2, with_lost_file, ("all",), 2, "dgcl", predictions="file", root=str(tmp_path))
    words = "Rank 1 cannot write predictions to .*predictions.npy: .*No such file.*All ranks need access to its folder"
    assert all(re.search(words, line) for line in caught.value.errors.values()) and len(caught.value.errors) == 2
    [kept] = (tmp_path / "predictions").iterdir()
    assert kept.read_bytes() == b"of an earlier run"


def with_lost_file(rank: int, *given: Any, **options: Any) -> Any:
    def open_memmap(file: Any, mode: str, *form: Any) -> Any:
        return opened(f"{file} elsewhere" if rank else file, mode, *form)

    opened = np.lib.format.open_memmap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.lib.format, "open_memmap", open_memmap)
        return predicted(rank, *given, **options)


def test_writers_get_predictions_that_are_not_returned(ranks):
    expected = predicted(0, 1, ("test",), 2)["test"]
    for found in ranks.run(2, predicted, ("test",), 2, "dgcl", returns=False):
        result, batches, epochs = found["test"]
        assert result is None
        assert_same([batches, epochs], list(expected[1:]), "test")


# all_gather ###################################################################


class Gathering(UserModule):
    """Gathers whatever it likes in a validation step, and learns from what it gathers."""

    found: dict[str, Any]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with local_rows():
            self.gather(batch)

    def gather(self, batch: Any) -> None:
        rows = batch.x[batch.val_mask]
        self.found = {
            "rows": self.all_gather(rows),
            "labels": self.all_gather(batch.y[batch.val_mask]),
            "scalar": self.all_gather(torch.tensor(float(self.global_rank))),
            "number": self.all_gather(self.global_rank),
            "alike": self.all_gather(torch.full((2, 3), self.global_rank)),
            "tree": self.all_gather({"x": [rows[:1] if self.global_rank else rows[:0]], "y": (batch.y[:3],)}),
            "dtypes": self.all_gather(rows.float() if self.global_rank else rows),
            "empty": self.all_gather(torch.empty(0) if self.global_rank else rows),
            "reduced": self.trainer.strategy.reduce(torch.tensor(self.global_rank + 1.0), reduce_op="sum"),
            "any": self.trainer.strategy.reduce_boolean_decision(self.global_rank == 0, all=False),
            "every": self.trainer.strategy.reduce_boolean_decision(self.global_rank == 0),
            "told": self.trainer.strategy.broadcast({"rank": self.global_rank}, src=1),
        }


def gathered(rank: int, world_size: int) -> Any:
    graph, part = graph_and_parts(world_size)
    module = Gathering(build("sage")).double()
    trainer = quiet_trainer(DGCLStrategy(timeout=60, self_check=False), world_size)
    trainer.validate(module, datamodule=GraphDataModule(graph, partition=part), verbose=False)
    return module.found


def test_all_gather_of_unequal_rows(ranks):
    graph, part = graph_and_parts(3)
    rows, labels = graph.x[graph.val_mask], graph.y[graph.val_mask]
    for found in ranks.run(3, gathered):
        assert found["rows"].shape == (1, *rows.shape)  # rank 2 has none
        order = found["rows"].view(-1, FEATURES)[:, 0].argsort()  # by id
        assert torch.equal(found["rows"].flatten(0, 1)[order], rows)
        assert torch.equal(torch.cat(list(found["labels"]))[order], labels)
        assert found["scalar"].tolist() == found["number"].tolist() == [0, 1, 2]
        assert found["alike"].shape == (3, 2, 3) and found["alike"][2].eq(2).all()
        own = part[graph.val_mask]
        assert found["tree"]["x"][0].shape == (1, 1, FEATURES)
        assert found["tree"]["y"][0].shape == (3, 3)
        assert found["dtypes"].dtype == torch.float64 and len(found["dtypes"][0]) == len(rows)
        assert found["empty"].shape == (1, int((own == 0).sum()), FEATURES)
        assert float(found["reduced"]) == 6 and found["any"] and not found["every"] and found["told"] == {"rank": 1}


class LearnsFromAll(UserModule):
    """A loss of what all ranks have: the squared norm of the mean output over training nodes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.model(batch.x, batch.edge_index)[batch.train_mask]
        everything = self.all_gather(out, sync_grads=True)
        return everything.reshape(-1, CLASSES).mean(0).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def learnt(rank: int, world_size: int, strategy: str = "dgcl") -> Any:
    graph, part = graph_and_parts(3)
    module = LearnsFromAll(build("sage")).double()
    chosen: Any = DGCLStrategy(timeout=60, self_check=False) if strategy == "dgcl" else strategy
    trainer = quiet_trainer(chosen, world_size, limit_val_batches=0)
    trainer.fit(module, datamodule=GraphDataModule(graph, partition=part if world_size > 1 else None))
    return module.model.state_dict()


def test_gradients_flow_through_all_gather(ranks):
    expected = learnt(0, 1, "auto")
    for found in ranks.run(3, learnt):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


class WrongShapes(UserModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.all_gather(torch.ones(2, 3 + self.global_rank))


def wrong_shapes(rank: int, world_size: int) -> None:
    graph, part = graph_and_parts(world_size)
    trainer = quiet_trainer(DGCLStrategy(timeout=60, self_check=False), world_size)
    trainer.validate(
        WrongShapes(build("sage")).double(), datamodule=GraphDataModule(graph, partition=part), verbose=False
    )


def test_all_gather_of_other_shapes_is_refused(ranks):
    with pytest.raises(RankFailed) as caught:
        ranks.run(2, wrong_shapes)
    words = "equal except in their first dimension, got [2, 3] on rank 0, [2, 4] on rank 1"
    assert all(words in line for line in caught.value.errors.values())
