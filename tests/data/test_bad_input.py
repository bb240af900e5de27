"""Bad input: one table per topic. Every case is refused before ranks start work, in words, and by our own code.

A case is a small graph, a datamodule, a store or a model, wrong in one way, and what must be said about it.
"""

from __future__ import annotations

import errno
import json
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import quiet_trainer
from conftest import RankFailed
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.models import GCN

import lightning_gnn
from lightning_gnn import CommNet, DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.data import store
from lightning_gnn.data.store import FORMAT, StoreError, read_cut, read_manifest
from lightning_gnn.datamodules import graph as datamodule
from lightning_gnn.partition import edge_cut
from lightning_gnn.partition.layout import LayoutSpec

NAN, INF = float("nan"), float("inf")
TWO = LayoutSpec("edge_cut", 2)


def small(**changes: Any) -> Data:
    """Six nodes, three classes, two features, five edges; None removes an attribute."""
    graph = Data(
        x=torch.arange(12.0).view(6, 2),
        edge_index=torch.tensor([[0, 1, 2, 3, 5], [1, 2, 0, 4, 5]]),
        edge_weight=torch.ones(5),
        edge_attr=torch.ones(5, 3),
        y=torch.tensor([0, 1, 2, 0, 1, -1]),
        train_mask=torch.tensor([1, 1, 0, 0, 0, 0]).bool(),
        val_mask=torch.tensor([0, 0, 1, 1, 0, 0]).bool(),
        test_mask=torch.tensor([0, 0, 0, 0, 1, 1]).bool(),
    )
    for name, value in changes.items():
        graph[name] = value
    return graph


def refused(run: Callable[[], Any], words: str, kind: type[Exception] = ValueError) -> None:
    """Asserts that `run` raises `kind` with `words`, from a line of this package and with a way out."""
    with pytest.raises(kind, match=words) as caught:
        run()
    last = traceback.extract_tb(caught.value.__traceback__)[-1].filename
    assert Path(last).is_relative_to(Path(lightning_gnn.__file__).parent), f"raised in {last}"
    assert str(caught.value).endswith((".", "?")), "a message is made of sentences"


def set_(tensor: torch.Tensor, index: Any, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


# Graphs #######################################################################

X, Y, EDGES = small().x, small().y, small().edge_index
TARGETS = torch.zeros(6, 4)

GRAPHS: dict[str, tuple[dict[str, Any], str]] = {
    # features
    "x_missing": ({"x": None}, "no node features x. Add them"),
    "x_list": ({"x": [[1.0]] * 6}, "x must be a tensor .got list.. Convert it: data.x = torch.as_tensor"),
    "x_objects": ({"x": np.array([["a", "b"]] * 6, object)}, "x must be a tensor .got ndarray"),
    "x_sparse": ({"x": X.to_sparse()}, r"x must be dense .got torch.sparse_coo.. Convert it: data.x = data.x.to_dense"),
    "x_complex": ({"x": X.to(torch.complex64)}, "x is complex64; features must be real"),
    "x_bfloat16": ({"x": X.bfloat16()}, "x is bfloat16, which the files .* cannot hold. Convert it"),
    "x_one_dimension": ({"x": torch.ones(6)}, r"x must have shape \[N, F\].*got \[6\].* is a column"),
    "x_three_dimensions": ({"x": torch.ones(6, 2, 2)}, r"x must have shape \[N, F\].*got \[6, 2, 2\]"),
    "x_scalar": ({"x": torch.tensor(1.0)}, r"x must have shape \[N, F\].*got \[\]"),
    "x_no_columns": ({"x": torch.ones(6, 0)}, r"x must have shape \[N, F\].*got \[6, 0\]"),
    "x_nan": ({"x": set_(X, (4, 1), NAN)}, "x holds NaN or infinite values in 1 of 6 rows, first in row 4. Fill"),
    "x_inf": ({"x": set_(X, ([2, 3], 0), INF)}, "x holds NaN or infinite values in 2 of 6 rows, first in row 2"),
    "x_minus_inf": ({"x": set_(X, 0, -INF)}, "x holds NaN or infinite values in 1 of 6 rows, first in row 0"),
    "x_nan_half": ({"x": set_(X.half(), (5, 0), NAN)}, "x holds NaN .* first in row 5"),
    "x_empty": ({"x": torch.empty(0, 2)}, "The graph has no nodes"),
    "x_too_long": ({"x": torch.ones(7, 2)}, "y has 6 rows, but x has 7"),
    "x_too_short": ({"x": torch.ones(5, 2)}, "ids from 0 to 5, but there are 5 nodes"),
    "x_other_num_nodes": ({"num_nodes": 9}, "has num_nodes=9, but x has 6 rows. Set one row of x per node"),
    # edges
    "edges_missing": ({"edge_index": None}, "no edge_index. If it holds an adjacency `adj_t`"),
    "edges_list": ({"edge_index": [[0], [1]]}, "edge_index must be a tensor .got list"),
    "edges_sparse": ({"edge_index": torch.eye(6).to_sparse()}, "edge_index must be dense"),
    "edges_transposed": ({"edge_index": EDGES.t()}, r"shape \[2, E\] .got \[5, 2\].. Transpose it"),
    "edges_three_rows": ({"edge_index": torch.zeros(3, 5).long()}, r"shape \[2, E\] .got \[3, 5\]"),
    "edges_one_dimension": ({"edge_index": EDGES[0]}, r"shape \[2, E\] .got \[5\]"),
    "edges_float": ({"edge_index": EDGES.float()}, "edge_index must hold integers .got float32"),
    "edges_bool": ({"edge_index": EDGES > 2}, "edge_index must hold integers .got bool"),
    "edges_negative": ({"edge_index": set_(EDGES, (0, 3), -1)}, "ids from -1 to 5.*1 edges are wrong, first column 3"),
    "edges_beyond": ({"edge_index": set_(EDGES, (1, [1, 2]), 6)}, "ids from 0 to 6.*2 edges are wrong, first column 1"),
    "edges_from_one": ({"edge_index": EDGES + 1}, "valid ids are 0 to 5.*Number the nodes from 0"),
    # values of edges
    "weight_length": ({"edge_weight": torch.ones(4)}, "edge_weight has 4 rows, but edge_index has 5 columns"),
    "weight_scalar": ({"edge_weight": torch.tensor(1.0)}, "edge_weight has a single value, but edge_index has 5"),
    "weight_column": ({"edge_weight": torch.ones(5, 1)}, r"one weight per edge .got \[5, 1\].*view\(-1\)"),
    "weight_columns": ({"edge_weight": torch.ones(5, 2)}, r"one weight per edge .got \[5, 2\].*edge_attr"),
    "weight_nan": ({"edge_weight": set_(torch.ones(5), 3, NAN)}, "edge_weight holds NaN .* 1 of 5 edges, first .* 3"),
    "weight_complex": ({"edge_weight": torch.ones(5).to(torch.complex64)}, "edge_weight is complex64"),
    "weight_list": ({"edge_weight": [1.0] * 5}, "edge_weight must be a tensor .got list"),
    "attr_length": ({"edge_attr": torch.ones(6, 3)}, "edge_attr has 6 rows, but edge_index has 5 columns"),
    "attr_inf": ({"edge_attr": set_(torch.ones(5, 3), (1, 2), INF)}, "edge_attr holds NaN .* 1 of 5 edges, first .* 1"),
    "attr_complex": ({"edge_attr": torch.ones(5, 3).to(torch.complex64)}, "edge_attr is complex64"),
    "attr_array": ({"edge_attr": np.ones((5, 3))}, "edge_attr must be a tensor .got ndarray"),
    # labels
    "y_list": ({"y": [0, 1, 2, 0, 1, 0]}, "y must be a tensor .got list"),
    "y_short": ({"y": Y[:5]}, "y has 5 rows, but x has 6: node labels are needed, one row per node"),
    "y_of_the_graph": ({"y": torch.tensor([1])}, "y has 1 rows.*Labels of whole graphs are not supported"),
    "y_long_column": ({"y": torch.zeros(7, 1)}, "y has 7 rows, but x has 6"),
    "y_scalar": ({"y": torch.tensor(1)}, r"y must have shape \[N\] for classes or \[N, C\] for targets .got \[\]"),
    "y_three_dimensions": ({"y": torch.zeros(6, 2, 2)}, r"y must have shape .* .got \[6, 2, 2\]"),
    "y_no_columns": ({"y": torch.zeros(6, 0)}, r"y must have shape .* .got \[6, 0\]"),
    "y_complex": ({"y": Y.to(torch.complex64)}, "y is complex64; labels must be integers"),
    "y_below": ({"y": set_(Y, 3, -7)}, "y holds labels down to -7, first in row 3"),
    "y_targets_below": ({"y": set_(TARGETS.long(), (2, 1), -100)}, "y holds labels down to -100, first in row 2"),
    "y_targets_nan": ({"y": set_(TARGETS, (1, 3), NAN)}, "y holds NaN or infinite targets in 1 of 6 rows, first in row 1"),
    "y_inf": ({"y": set_(Y.float(), 2, INF)}, "y holds NaN or infinite targets in 1 of 6 rows, first in row 2"),
    "y_nan_and_fractions": ({"y": torch.tensor([0.5, NAN, 1, 2, 3, 4])}, "only if y .* is whole numbers"),
    "y_float_below": ({"y": torch.tensor([-3.0, NAN, 1, 2, 3, 4])}, "y holds labels down to -3, first in row 0"),
    # masks
    "no_masks": (dict.fromkeys(("train_mask", "val_mask", "test_mask")), "no train_mask. Use a random split"),
    "no_train_mask": ({"train_mask": None}, "no train_mask. Use a random split"),
    "mask_list": ({"train_mask": [True] * 6}, "train_mask must be a tensor .got list"),
    "mask_short": ({"val_mask": torch.ones(5).bool()}, "val_mask has 5 entries, but x has 6 rows"),
    "mask_of_ids": ({"train_mask": torch.tensor([0, 4])}, "train_mask has 2 entries.*mask.ids. = True"),
    "mask_of_ids_of_length": ({"train_mask": torch.arange(6)}, "bool or hold 0 and 1 .got values from 0 to 5"),
    "mask_negative": ({"test_mask": -torch.ones(6).long()}, "test_mask must be bool or hold 0 and 1 .got values from -1"),
    "mask_float": ({"test_mask": torch.ones(6)}, "test_mask must be bool .got float32.. Convert it"),
    "mask_complex": ({"test_mask": torch.ones(6).to(torch.complex64)}, "test_mask must be bool .got complex64"),
    "mask_scalar": ({"train_mask": torch.tensor(True)}, r"train_mask must have shape \[N\] or \[N, splits\] .got \[\]"),
    "mask_three_dimensions": ({"train_mask": torch.ones(6, 2, 2).bool()}, r"train_mask must have shape .* .got \[6, 2, 2\]"),
    "mask_no_columns": ({"train_mask": torch.ones(6, 0).bool()}, "split_index=0, but train_mask has 0 columns"),
    "mask_empty": ({"train_mask": torch.zeros(6).bool()}, "train_mask holds no labeled node. Use another split"),
    "mask_unlabelled": ({"train_mask": torch.arange(6) == 5}, "train_mask holds no labeled node"),
    "no_labels_at_all": ({"y": -torch.ones(6).long()}, "train_mask holds no labeled node"),
    # anything else
    "other_bfloat16": ({"noise": torch.ones(6).bfloat16()}, "noise is bfloat16, which the files"),
}  # fmt: skip


@pytest.mark.parametrize("case", GRAPHS)
def test_graphs(case):
    changes, words = GRAPHS[case]
    refused(lambda: GraphDataModule(small(**changes)).setup("fit"), words)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_stage_without_nodes(stage):
    masks = {name: torch.zeros(6).bool() for name in ("val_mask", "test_mask")}
    datamodule = GraphDataModule(small(**masks))
    datamodule.setup("fit")
    assert datamodule.val_dataloader() == []  # training goes without
    refused(
        lambda: datamodule.setup(stage), f"{stage[:3] if stage == 'validate' else stage}_mask holds no labeled node"
    )


def test_what_is_accepted():
    """The other side of the checks: none of these may become an error."""
    kept: dict[str, Any] = {
        "bool x": {"x": X > 3},
        "half x": {"x": X.half()},
        "int32 edges": {"edge_index": EDGES.int()},
        "no edges": {"edge_index": EDGES[:, :0], "edge_weight": torch.ones(0), "edge_attr": torch.ones(0, 3)},
        "integer weights": {"edge_weight": torch.ones(5).long()},
        "numbers as edge_attr": {"edge_attr": torch.ones(5)},
        "no y": {"y": None},
        "small integers": {"y": Y.to(torch.int8)},
        "bool y": {"y": Y > 0},
        "column of labels": {"y": Y.view(-1, 1)},
        "OGB's NaN": {"y": torch.tensor([0.0, 1, 2, 0, NAN, NAN])},
        "targets": {"y": TARGETS},
        "numbers to predict": {"y": torch.linspace(-5, 5, 6)},
        "uint8 masks": {"train_mask": small().train_mask.to(torch.uint8)},
        "overlapping masks": {"val_mask": small().train_mask},
        "an adjacency as well": {"adj": torch.eye(6).to_sparse()},
    }
    for changes in kept.values():
        GraphDataModule(small(**changes)).setup("fit")
    loaded = GraphDataModule(small(**kept["OGB's NaN"])).load()
    assert loaded.y.tolist() == [0, 1, 2, 0, -1, -1]
    for name, dtype in (("small integers", torch.int64), ("bool y", torch.int64), ("targets", torch.float32)):
        assert GraphDataModule(small(**kept[name])).load().y.dtype == dtype
    assert GraphDataModule(small(**kept["integer weights"])).load().edge_weight.dtype == torch.float32


# Datasets and their splits ####################################################


class WithSplit:
    """A dataset of one graph with an index split, as OGB has it."""

    def __init__(self, split: Any) -> None:
        self.split = split

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Data:
        return small()

    def get_idx_split(self) -> Any:
        if isinstance(self.split, Exception):
            raise self.split
        return self.split


class Broken(WithSplit):
    def __getitem__(self, index: int) -> Data:
        raise FileNotFoundError("raw/graph.npz")


INDEX_SPLITS: dict[str, tuple[Any, str]] = {
    "tuple": (([0], [1], [2]), "index split must be a dict.*got tuple"),
    "unknown_key": ({"train": [0], "training": [0]}, r"keys in .*, got \['training'\]. Rename or remove these keys"),
    "number_as_key": ({0: [0]}, r"keys in .*, got \['0'\]"),
    "no_train": ({"valid": [0]}, r"has no 'train' .got \['valid'\]"),
    "beyond": ({"train": [0, 6]}, "'train' holds node ids from 0 to 6, but there are 6 nodes: 0 to 5"),
    "negative": ({"train": [0], "test": [-1]}, "'test' holds node ids from -1 to -1"),
    "float": ({"train": torch.tensor([0.0])}, "'train' must hold integer node ids, .*got float32"),
    "mask": ({"train": small().train_mask}, "'train' must hold integer node ids, .*got bool.*mask.nonzero"),
    "matrix": ({"train": [0], "valid": [[1], [2]]}, r"'valid' must hold integer node ids, .*\[2, 1\]"),
    "words": ({"train": ["a"]}, "'train' must be a list of node ids"),
    "twice": ({"train": [0, 3, 1, 3, 3]}, "'train' lists 2 node ids more than once, first id 3"),
    "nobody": ({"train": [], "valid": [1]}, "train_mask holds no labeled node"),
    "raises": (OSError("no split.csv"), "WithSplit cannot load its graph: OSError: no split.csv"),
}


@pytest.mark.parametrize("case", INDEX_SPLITS)
def test_index_splits(case):
    split, words = INDEX_SPLITS[case]
    refused(lambda: GraphDataModule(WithSplit(split)).setup("fit"), words)


def raises(kind: str = "ValueError") -> Data:
    raise {"ValueError": ValueError, "KeyError": KeyError}[kind]("no such file")


SOURCES: dict[str, tuple[Any, Any, str]] = {
    "unknown_module": ("no.such.module", None, "source='no.such.module' cannot be imported"),
    "unknown_name": ("test_bad_input.nothing", None, "cannot be imported .* has no attribute 'nothing'"),
    "name_only": ("Planetoid", None, "cannot be imported.*Use the import path"),
    "relative": ("..graphs.make", None, "cannot be imported"),
    "empty_path": ("", None, "source='' cannot be imported"),
    "broken_module": ("broken_module.make", None, "cannot be imported .*division by zero"),
    "path_to_a_number": ("math.pi", None, "math.pi returned a float; GraphDataModule requires"),
    "path_to_a_module": ("torch_geometric.datasets", None, "returned a module"),
    "raises": (raises, None, r"Loading the graph failed: raises\(\) raised ValueError: no such file. Call it directly"),
    "path_raises": ("test_bad_input.raises", {"kind": "KeyError"}, r"raises\(kind='KeyError'\) raised KeyError"),
    "unknown_argument": (small, 5, "source_kwargs must be a dict of keyword arguments .got 5"),
    "wrong_argument": (raises, {"root": "x"}, r"raises\(root='x'\) raised TypeError.*unexpected keyword argument"),
    "number_as_argument": (raises, {1: 2}, "raised TypeError.*keywords must be strings"),
    "arguments_of_a_graph": (small(), {"root": "x"}, "needs a callable or an import path as source .got Data"),
    "nothing": (None, None, "returned a NoneType"),
    "returns_nothing": (lambda: None, None, "returned a NoneType"),
    "number": (5, None, "returned a int"),
    "tensor": (torch.ones(1, 3), None, "returned a Tensor"),
    "dict": ({"x": X}, None, "returned a dict"),
    "no_graphs": ([], None, "list holds 0 graphs"),
    "two_graphs": ([small(), small()], None, "list holds 2 graphs.*Pick one: GraphDataModule.dataset.0.."),
    "many_graphs": ([small()] * 188, None, "holds 188 graphs"),
    "hetero": (HeteroData(), None, "The HeteroData has no edge types"),
    "dataset_of_hetero": ([HeteroData()], None, "The HeteroData has no edge types"),
    "dataset_without_files": (Broken(None), None, "Broken cannot load its graph: FileNotFoundError: raw/graph.npz"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_sources(case, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    source, args, words = SOURCES[case]
    refused(lambda: GraphDataModule(source, args).setup("fit"), words)


# Arguments of the datamodule ##################################################

FRACTIONS = "split needs three fractions that sum to at most 1, such as"

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "split_number": ({"split": 0.6}, f"{FRACTIONS} .* .got 0.6"),
    "split_two": ({"split": (0.6, 0.4)}, FRACTIONS),
    "split_above_one": ({"split": (0.6, 0.3, 0.2)}, FRACTIONS),
    "split_counts": ({"split": (140, 500, 1000)}, FRACTIONS),
    "split_negative": ({"split": (0.6, -0.2, 0.2)}, FRACTIONS),
    "split_nan": ({"split": (0.6, NAN, 0.2)}, FRACTIONS),
    "split_zeros": ({"split": (0, 0, 0)}, FRACTIONS),
    "split_words": ({"split": "public"}, FRACTIONS),
    "split_dict": ({"split": {"train": 0.6}}, FRACTIONS),
    "split_without_training": ({"split": (0.0, 0.5, 0.5)}, "train_mask holds no labeled node"),
    "split_too_small": ({"split": (0.01, 0.5, 0.4)}, "train_mask holds no labeled node"),
    "column_negative": ({"split_index": -1}, "split_index must be an integer of at least 0 .got -1"),
    "column_word": ({"split_index": "0"}, "split_index must be an integer"),
    "column_beyond": ({"split_index": 3}, "split_index=3, but train_mask has 3 columns: choose 0 to 2"),
    "seed_negative": ({"seed": -1}, "seed must be an integer of at least 0 .got -1"),
    "seed_float": ({"seed": 0.5}, "seed must be an integer of at least 0 .got 0.5"),
    "partition_name": (
        {"partition": "louvain"},
        "'auto', 'metis', 'metis_masks', 'metis_cover', 'kaminpar', 'kaminpar_compressed', 'streaming', "
        "'random', 'contiguous' or the rank of every node .got 'louvain'",
    ),
    "partition_ragged": ({"partition": [[0], [1, 1]]}, "rank of every node, one integer each"),
    "partition_matrix": ({"partition": torch.zeros(6, 1).long()}, r"one integer each .got shape \[6, 1\]"),
    "partition_floats": ({"partition": [0.0] * 6}, "must hold integers .got float64"),
    "partition_words": ({"partition": ["a"] * 6}, "must hold integers"),
    "partition_short": ({"partition": [0] * 5}, r"one rank for each of the 6 nodes .got shape \[5\].. Compute it for"),
    "partition_negative": ({"partition": [0, 0, 0, 0, 0, -1]}, "ranks from 0 to 1 .got -1 to 0"),
    "partition_too_many": ({"partition": torch.arange(6)}, "ranks from 0 to 1 .got 0 to 5.*as many parts as"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case, tmp_path):
    options, words = ARGUMENTS[case]
    graph = small(train_mask=small().train_mask.view(-1, 1).repeat(1, 3))

    def use() -> None:
        datamodule = GraphDataModule(graph, **options, partition_dir=tmp_path)
        datamodule.setup("fit")
        datamodule.build(TWO)

    refused(use, words)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


# The store ####################################################################


def built(root: Path, **options: Any) -> Path:
    """The folder of a partitioned graph."""
    return root / GraphDataModule(small(), **options, partition_dir=root).build(TWO)


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any], sign: bool = False) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    if sign:
        manifest["checksum"] = store._manifest_checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


ADVICE = ".*Remove the folder .* and run again"

STORES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no_manifest": (lambda f: (f / "manifest.json").unlink(), "no readable manifest .*No such file"),
    "empty_manifest": (lambda f: (f / "manifest.json").write_text(""), "no readable manifest"),
    "truncated_manifest": (lambda f: os.truncate(f / "manifest.json", 200), "no readable manifest"),
    "binary_manifest": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "no readable manifest"),
    "manifest_is_a_list": (lambda f: (f / "manifest.json").write_text("[]"), "no readable manifest"),
    "manifest_is_a_folder": (
        lambda f: [(f / "manifest.json").unlink(), (f / "manifest.json").mkdir()],
        "no readable manifest",
    ),
    "older_format": (lambda f: rewrite(f, lambda m: m.update(format=FORMAT - 1)), f"has format {FORMAT - 1}, this"),
    "newer_format": (lambda f: rewrite(f, lambda m: m.update(format=FORMAT + 1)), f"has format {FORMAT + 1}, this"),
    "no_format": (lambda f: rewrite(f, lambda m: m.pop("format")), "has format None"),
    "altered_offsets": (lambda f: rewrite(f, lambda m: m["offsets"].__setitem__(1, 5)), "manifest.json has been altered"),
    "altered_counts": (lambda f: rewrite(f, lambda m: m["mask_counts"].clear()), "manifest.json has been altered"),
    "no_checksum": (lambda f: rewrite(f, lambda m: m.pop("checksum")), "manifest.json has been altered"),
    "missing_key": (lambda f: rewrite(f, lambda m: m.pop("files")), "manifest.json has been altered"),
    "other_number_of_parts": (lambda f: rewrite(f, lambda m: m["layout"].update(parts=3), sign=True), "in 3 parts .*, but"),
    "other_layout": (lambda f: rewrite(f, lambda m: m["layout"].update(kind="whole"), sign=True), "holds whole in 2 parts"),
    "of_another_graph": (lambda f: rewrite(f, lambda m: m.update(name="x"), sign=True), "was written as x: it may hold"),
    "missing_file": (lambda f: (f / "node.x.npy").unlink(), "node.x.npy is missing"),
    "missing_halo": (lambda f: (f / "part1.halo.npy").unlink(), "part1.halo.npy is missing"),
    "truncated_file": (lambda f: os.truncate(f / "node.y.npy", 100), r"node.y.npy has 100 bytes instead of \d+"),
    "emptied_file": (lambda f: os.truncate(f / "n_id.npy", 0), r"n_id.npy has 0 bytes instead of"),
    "longer_file": (lambda f: (f / "e_id.npy").open("ab").write(b"!"), "e_id.npy has .* bytes instead of"),
    "altered_features": (lambda f: flip(f / "node.x.npy", -1), "node.x.npy has been altered or damaged"),
    "altered_header": (lambda f: flip(f / "node.x.npy", 20), "node.x.npy has been altered or damaged"),
    "altered_edges": (lambda f: flip(f / "part0.edge_index.npy", -8), "part0.edge_index.npy has been altered"),
    "altered_edges_of_another": (lambda f: flip(f / "part1.edge_index.npy", -8), "part1.edge_index.npy has been altered"),
    "altered_ids": (lambda f: flip(f / "n_id.npy", -8), "n_id.npy has been altered"),
    "altered_mask": (lambda f: flip(f / "node.train_mask.npy", -1), "node.train_mask.npy has been altered"),
    "zeros": (lambda f: (f / "node.x.npy").write_bytes(bytes((f / "node.x.npy").stat().st_size)), "has been altered"),
    "swapped_files": (
        lambda f: [(f / "node.val_mask.npy").replace(f / "x"), shutil.copy(f / "node.test_mask.npy", f / "node.val_mask.npy")],
        "node.val_mask.npy has been altered",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STORES)
def test_stores(case, tmp_path):
    change, words = STORES[case]
    folder = built(tmp_path)
    read_cut(folder, TWO).shard(0)
    change(folder)
    for _ in range(2):  # nor is it trusted the second time
        refused(lambda: read_cut(folder, TWO).shard(0), words + ADVICE, StoreError)
        refused(lambda: GraphDataModule(small(), partition_dir=tmp_path).build(TWO), words + ADVICE, StoreError)


def test_renamed_and_moved_entries(tmp_path):
    folder = built(tmp_path)
    copied = shutil.copytree(folder, tmp_path / "elsewhere" / folder.name)
    read_cut(copied, TWO).shard(0)
    other = tmp_path / built(tmp_path, seed=1).name
    shutil.rmtree(other)
    folder.replace(other)
    refused(
        lambda: built(tmp_path, seed=1), f"was written as {folder.name}: it may hold another graph{ADVICE}", StoreError
    )


def test_checksums_are_worked_out_once(tmp_path, monkeypatch):
    folder, read = built(tmp_path), []
    checksum = store.checksum_of
    monkeypatch.setattr(store, "checksum_of", lambda file: read.append(file.name) or checksum(file))
    read_cut(folder, TWO).shard(0)
    assert read == []  # known from writing
    os.utime(folder / "node.x.npy")
    read_cut(folder, TWO).shard(0)
    read_cut(folder, TWO).shard(1)
    assert read == ["node.x.npy"]
    for content in ("{", "[1]", "5", json.dumps({"node.x.npy": [0, 0, 0]})):
        (folder / "verified.json").write_text(content)
        read.clear()
        read_manifest(folder)
        read_manifest(folder)
        assert sorted(read) == sorted(json.loads((folder / "manifest.json").read_text())["files"])


def test_notes_are_not_believed_blindly(tmp_path, monkeypatch):
    """What a description is known by is checked: copied to another description, or altered, it counts for nothing."""
    monkeypatch.setattr(GraphDataModule, "_build_in_subprocess", GraphDataModule.build)
    module = GraphDataModule("test_bad_input.small", partition_dir=tmp_path)
    folder = module._ensure_stored(TWO)
    key, _ = module._notes(TWO)
    note = tmp_path / f"{key}.known"
    assert module._read_note(key) == folder
    (tmp_path / "other.known").write_text(note.read_text())
    assert module._read_note("other") is None
    for content in ("", folder, f"{folder} 0", "../.. 0", "\0"):
        note.write_text(content)
        assert module._read_note(key) is None
    note.write_bytes(b"\xff\xff")
    assert module._read_note(key) is None


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("after", [0, 1, 5, 12])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_disk_fills_up_while_writing(tmp_path, monkeypatch, after, code):
    begin, begun = store.write_header, []

    def full(file: Any, *header: Any) -> None:
        begun.append(header)
        if len(begun) > after:
            file.write(b"half")
            raise OSError(code, os.strerror(code))
        begin(file, *header)

    monkeypatch.setattr(store, "write_header", full)
    words = (
        r"The disk of the partition directory .* is full. The partitioned graph needs at least \d+ bytes, .* are free. Free"
    )
    if code == errno.EIO:
        words = "The partition directory .* cannot be written .*Input/output error.*Use a folder with write permission"
    refused(lambda: built(tmp_path), words + r".*GraphDataModule\(partition_dir=...\) or \$LIGHTNING_GNN_STORE", StoreError)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    monkeypatch.undo()
    read_cut(built(tmp_path), TWO).shard(0)


def test_room_is_looked_for_before_partitioning(tmp_path, monkeypatch):
    monkeypatch.setattr(edge_cut, "assign_nodes", no_space)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100))
    refused(lambda: built(tmp_path), r"is full. .* needs at least \d\d\d bytes, 100 bytes are free", StoreError)


@pytest.mark.parametrize("what", ["file", "below_a_file", "forbidden", "full"])
def test_stores_that_cannot_be_written(tmp_path, monkeypatch, what):
    root, words = tmp_path / "store", "The partition directory .* cannot be written .*Use a folder with write permission"
    if what in ("file", "below_a_file"):
        root.write_text("")
        root = root if what == "file" else root / "below"
    elif what == "forbidden":
        monkeypatch.setattr(
            store.os, "open", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "denied", "x"))
        )
    else:
        monkeypatch.setattr(datamodule, "write_atomically", no_space)
        words = r"The disk of the partition directory .* is full. [\d,]+ bytes are free"
    refused(lambda: GraphDataModule(small(), partition_dir=root).build(TWO), words, StoreError)


def build_and_die(root: Path, where: str) -> None:
    """Partitions, and is killed while it writes the file of that number or when it has written all."""
    begin, rename, begun = store.write_header, Path.replace, []

    def counted(file: Any, *header: Any) -> None:
        begun.append(header)
        if where == str(len(begun)):
            file.write(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        begin(file, *header)

    def replace(path: Path, target: Path) -> Path:
        if where == "rename" and path.is_dir():
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(path, target)

    store.write_header, Path.replace = counted, replace  # type: ignore[method-assign]
    built(root)


@pytest.mark.parametrize("where", ["1", "7", "rename"])
def test_a_killed_writer_leaves_nothing_that_is_trusted(tmp_path, where):
    writer = mp.get_context("fork").Process(target=build_and_die, args=(tmp_path, where))
    writer.start()
    writer.join(60)
    assert writer.exitcode == -signal.SIGKILL
    [scratch] = (path for path in tmp_path.iterdir() if path.is_dir())
    assert scratch.name.startswith(".edge_cut-2-")
    other = tmp_path / ".edge_cut-2-other.123"  # of another entry, whose writer may be at work
    other.mkdir()
    began = time.perf_counter()
    folder = built(tmp_path)
    assert time.perf_counter() - began < 2  # the lock went with its holder
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == {folder, other}
    assert torch.equal(read_cut(folder).shard(0).batch.x, X[read_cut(folder).shard(0).batch.n_id])


def test_a_killed_or_failed_child_is_told(tmp_path, monkeypatch, capfd):
    module = GraphDataModule("test_bad_input.without_numbers", partition_dir=tmp_path)
    failed = "Loading or partitioning test_bad_input.without_numbers failed: "
    refused(lambda: module._ensure_stored(TWO), f"{failed}x holds NaN or infinite values in 6 of 6", RuntimeError)
    assert "Traceback" in capfd.readouterr().err
    for code, said in ((-9, "its process was ended by signal 9.* too little memory"), (1, "see the error above")):
        done = subprocess.CompletedProcess([], code, stdout="")
        monkeypatch.setattr(datamodule.subprocess, "run", lambda *_, done=done, **__: done)
        refused(lambda: module._ensure_stored(TWO), failed + said, RuntimeError)


def without_numbers() -> Data:
    return small(x=X * NAN)


# Models #######################################################################


class Returns(torch.nn.Module):
    """A model whose result is made wrong by `change`."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.gcn, self.change, self.out_channels = GCN(2, 8, 2, 3), change, 3

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> Any:
        return self.change(self.gcn(x, edge_index))


def without_last(out: torch.Tensor) -> torch.Tensor:
    return out[:-1]


MODELS: dict[str, tuple[Callable[[], NodeClassifier], dict[str, Any], str]] = {
    "fewer_outputs": (lambda: NodeClassifier(GCN(2, 8, 2, 2)), {}, "with labels 0 to 2, but GCN has 2 outputs. Create"),
    "fewer_classes": (
        lambda: NodeClassifier(Returns(lambda out: out), num_classes=2),
        {},
        "3 classes, with labels 0 to 2, but Returns has 2 outputs",
    ),
    "label_is_an_id": (
        lambda: NodeClassifier(GCN(2, 8, 2, 3)),
        {"y": set_(Y, 5, 1000)},
        "1001 classes, with labels 0 to 1000, but GCN has 3 outputs",
    ),
    "no_labels": (lambda: NodeClassifier(GCN(2, 8, 2, 3)), {"y": None}, "needs labels, but the graph has no y"),
    "float_labels": (
        lambda: NodeClassifier(GCN(2, 8, 2, 3)),
        {"y": Y.float()},
        r"needs integer labels, but y is float32 \[N\]. Convert it",
    ),
    "targets_for_classes": (
        lambda: NodeClassifier(GCN(2, 8, 2, 4)),
        {"y": TARGETS},
        r"one integer label per node, but y is float32 \[N, 4\].*task='multilabel'",
    ),
    "classes_for_targets": (
        lambda: NodeClassifier(GCN(2, 8, 2, 3), task="multilabel"),
        {},
        r"needs targets \[N, C\] of 0 and 1, but y is int64 \[N\]",
    ),
    "fewer_targets": (
        lambda: NodeClassifier(GCN(2, 8, 2, 3), task="multilabel"),
        {"y": TARGETS},
        "targets have 4 columns, but GCN has 3 outputs. Create",
    ),
    "more_targets": (
        lambda: NodeClassifier(GCN(2, 8, 2, 5), task="multilabel"),
        {"y": TARGETS},
        "targets have 4 columns, but GCN has 5 outputs",
    ),
    "features": (lambda: NodeClassifier(GCN(3, 8, 2, 3)), {}, "GCN takes 3 features .* x of the graph has 2 columns"),
    "features_commnet": (lambda: NodeClassifier(CommNet(3, 8, 2, 3)), {}, "CommNet takes 3 features"),
    "rows_missing": (
        lambda: NodeClassifier(Returns(without_last)),
        {},
        r"Returns returned \[5, 3\] for a batch of 6 nodes, but .* \[6, 3\]: one row per node",
    ),
    "rows_too_many": (
        lambda: NodeClassifier(Returns(lambda out: torch.cat([out, out]))),
        {},
        r"Returns returned \[12, 3\] for a batch of 6 nodes",
    ),
    "one_row": (
        lambda: NodeClassifier(Returns(lambda out: out.mean(0))),
        {},
        r"Returns returned \[3\] for a batch of 6",
    ),
    "columns_missing": (
        lambda: NodeClassifier(Returns(lambda out: out[:, :2])),
        {},
        r"Returns returned \[6, 2\] .* logits \[6, 3\].*num_classes=",
    ),
    "no_columns": (lambda: NodeClassifier(Returns(lambda out: out[:, 0])), {}, r"Returns returned \[6\] for a batch"),
    "tuple": (lambda: NodeClassifier(Returns(lambda out: (out, 0))), {}, "Returns returned a tuple for a batch of 6"),
    "nothing": (lambda: NodeClassifier(Returns(lambda out: None)), {}, "Returns returned a NoneType for a batch"),
    "no_out_channels": (lambda: NodeClassifier(torch.nn.Identity()), {}, "Identity has no out_channels. Use"),
    "unknown_task": (lambda: NodeClassifier(GCN(2, 8, 2, 3), task="regression"), {}, "task must be 'multiclass' or"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(case):
    make, changes, words = MODELS[case]
    refused(lambda: quiet_trainer("auto", 1).fit(make(), datamodule=GraphDataModule(small(**changes))), words)


def test_models_that_predict_need_no_labels():
    trainer = quiet_trainer("auto", 1)
    [found] = trainer.predict(NodeClassifier(GCN(2, 8, 2, 2)), datamodule=GraphDataModule(small(y=None)))
    assert found.shape == (6, 2)


# Over ranks: raised on all of them, at once ###################################


def cannot_read(*_: Any) -> None:
    raise StoreError("rank 1 cannot read it.")


def fit_bad(rank: int, world_size: int, kind: str, root: str) -> None:
    torch.manual_seed(0)
    source: Any = small(x=set_(X, (4, 1), NAN)) if kind == "graph" else small()
    model: torch.nn.Module = Returns(without_last) if kind in ("rows", "rows_unchecked") else GCN(2, 8, 2, 3)
    if kind == "classes":
        model = GCN(2, 8, 2, 2)
    checked = kind != "rows_unchecked"
    trainer = quiet_trainer(DGCLStrategy(timeout=20), world_size, self_check=checked, max_epochs=1)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "unreadable" and rank == 1:
            patch.setattr(datamodule, "read_cut", cannot_read)
        trainer.fit(NodeClassifier(model), datamodule=GraphDataModule(source, partition_dir=root))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("graph", "x holds NaN or infinite values in 1 of 6 rows, first in row 4"),
        ("classes", "The graph has 3 classes, with labels 0 to 2, but GCN has 2 outputs"),
        ("rows", "Returns returned ["),  # found by the self-check
        ("rows_unchecked", "Returns returned ["),
        ("store", "node.x.npy has been altered or damaged"),
        ("unreadable", "rank 1 cannot read it."),
    ],
)
def test_over_ranks(ranks, tmp_path, kind, words):
    if kind == "store":
        flip(built(tmp_path) / "node.x.npy", -1)
    began = time.perf_counter()
    with pytest.raises(RankFailed) as caught:
        ranks.run(2, fit_bad, kind, str(tmp_path))
    assert len(caught.value.errors) == 2 and all(words in line for line in caught.value.errors.values())
    assert time.perf_counter() - began < 60
    ranks.run(2, fit_bad, "nothing", str(tmp_path / "next"))  # and the ranks are as before
