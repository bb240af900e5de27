"""The modules of docs/recipes.md and docs/rows.md, as they stand there, give the numbers of one device (float64).

Test tiers: ranks of one process, under every exact scheme; gloo ranks in the pool.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from common import CLASSES, FEATURES, Recorder, awkward_graph, campaign, quiet_trainer
from torch_geometric.data import Data
from torch_geometric.nn.models import SGFormer

from lightning_gnn import DGCLStrategy, GraphDataModule, check_parity

PAGES = [(Path(__file__).parents[2] / "docs" / name).read_text() for name in ("recipes.md", "rows.md")]
NODES = 60
EXACT = ["dgcl", "cover", "spmm_1d", "spmm_15d", "vertex_cut"]

BOTH, ALONE = (FEATURES, CLASSES), (FEATURES,)
SIZES: dict[str, tuple[int, ...]] = {
    "DirectedSAGE": BOTH,
    "DirectedGAT": (*BOTH, 3),
    "LabelInputs": BOTH,
    "Smoothed": BOTH,
    "Propagated": (),
    "Linkx": (NODES, *BOTH),
    "SeveralMeans": BOTH,
    "Autoencoder": ALONE,
    "LinearAttention": BOTH,
    "DenseAttention": BOTH,
    "Contrastive": ALONE,
    "VirtualNode": BOTH,
    "Infomax": ALONE,
    "Prototypes": BOTH,
    "MinCut": (FEATURES, 3),
    "PageRank": BOTH,
    "Encoded": BOTH,
    "Hardest": BOTH,
    "Binary": BOTH,
}
"""Arguments of each module."""
MADE_BEFORE = {"DirectedGAT": "both_directions", "Encoded": "encoded"}
"""What the graph goes through."""
OTHER_ARGUMENTS = {"LabelInputs", "Infomax"}
"""Whose forward takes more than a batch."""
OWN_DRAWS = {"Autoencoder"}
"""Each rank draws its own numbers: alike with one device if they are shared."""


@cache
def names() -> dict[str, Any]:
    """Returns what the pages define."""
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", "\n".join(PAGES), re.S):
        exec(block, found)
    return found


def few() -> Data:
    """A graph with three training nodes: of four ranks, one has none at least."""
    graph = awkward_graph(seed=4)
    graph.train_mask &= (graph.y >= 0) & (graph.train_mask.cumsum(0) <= 3)
    return graph


def recipe(name: str, graph: Data) -> tuple[L.LightningModule, Data]:
    """Returns a module with the weights that its name gives, and its graph."""
    torch.manual_seed(1)
    kind = names()[name]
    methods: dict[str, Callable[..., Any]] = {
        "configure_optimizers": lambda module: torch.optim.Adam(module.parameters(), lr=0.01)
    }
    if "forward" in vars(kind) and "predict_step" not in vars(kind) and name not in OTHER_ARGUMENTS:
        methods["predict_step"] = lambda module, batch, batch_idx: module(batch)
    made = type(name, (kind,), methods)(*SIZES[name]).double()
    if name == "Encoded":  # PyG's walks are of float32
        del graph.edge_weight
    return made, names()[MADE_BEFORE[name]](graph) if name in MADE_BEFORE else graph


def check(name: str, graph: Data, strategies: list[Any], ranks: int, part: torch.Tensor | None = None) -> None:
    module, graph = recipe(name, graph)
    data = GraphDataModule(graph, partition="random" if part is None else part)
    report = check_parity(module, data, strategies, ranks)
    assert report.ok and report.dtype == "float64", report
    assert [each.verdict for each in report.schemes] == ["same"] * len(strategies), report


EVERY_DAY = ("LabelInputs", "VirtualNode")


@pytest.mark.parametrize("name", [*EVERY_DAY, *campaign(*(name for name in SIZES if name not in EVERY_DAY))])
def test_is_exact_under_every_scheme(name):
    """On four ranks, with three training nodes; and on two, of which one has none."""
    check(name, few(), [*EXACT, "spmm_2d"], 4)
    check(name, awkward_graph(), [DGCLStrategy(plan="p2p")], 2, (~awkward_graph().train_mask).long())


def test_sgformer_is_exact():
    torch.manual_seed(1)
    model = SGFormer(FEATURES, 16, CLASSES, trans_num_heads=2, trans_dropout=0.0, gnn_dropout=0.0)

    class Attentive(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
            out = self.model(batch.x, batch.edge_index, torch.zeros(len(batch.x), dtype=torch.long))
            return torch.nn.functional.nll_loss(out[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)

    report = check_parity(Attentive().double(), GraphDataModule(awkward_graph()), EXACT)
    assert [each.verdict for each in report.schemes] == ["same"] * len(EXACT), report


def run(rank: int, world_size: int, name: str, strategy: Any = None) -> Any:
    """Returns what two epochs, and a test and predictions where there are any, give."""
    graph = awkward_graph()
    part = (~graph.train_mask).long()
    module, graph = recipe(name, graph)
    recorder, data = Recorder(), GraphDataModule(graph, partition=part)
    trainer = quiet_trainer(
        strategy or DGCLStrategy(timeout=60), world_size, self_check=True, callbacks=[recorder], max_epochs=2
    )
    if name != "Propagated":
        trainer.fit(module, datamodule=data)
    tested = trainer.test(module, datamodule=data, verbose=False) if "test_step" in vars(names()[name]) else None
    has_predictions = any("predict_step" in vars(kind) for kind in type(module).__mro__[:2])
    predicted = trainer.predict(module, datamodule=data) if has_predictions else None
    weights = {key: value for key, value in module.state_dict().items() if "num_batches" not in key}
    return recorder.epochs, recorder.gradients, weights, tested, predicted


@pytest.mark.parametrize("name", sorted(SIZES.keys() - OWN_DRAWS))
def test_trains_as_on_one_device(ranks, name):
    expected = run(0, 1, name, "auto")
    atol = 1e-6 if name == "Propagated" else 1e-9  # PyG makes float32 of labels
    for found in ranks.run(2, run, name):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=atol)


def test_the_pages_are_tested_whole_and_their_modules_are_short():
    blocks = re.findall(r"```python\n(.*?)```", "\n".join(PAGES), re.S)
    modules = re.findall(r"^class (\w+)\(L.LightningModule\)", "\n".join(blocks), re.M)
    assert sorted(modules) == sorted(SIZES)
    for block in blocks:
        assert len([line for line in block.splitlines() if line.strip()]) <= 30, block
    for page in PAGES:
        titles = re.findall(r"^##+ (.*)$", page, re.M)
        anchors = {re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert set(re.findall(r"\]\(#([\w-]+)\)", page)) <= anchors
