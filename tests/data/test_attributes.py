"""Every attribute of a graph goes with its nodes, with its edges, with the graph, or is left out and says why.

Test tiers: without ranks; gloo ranks in the pool.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import CLASSES, FEATURES, Recorder, awkward_graph, campaign, quiet_trainer
from conftest import RankFailed
from test_hetero_sampling import typed_graph
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.nn.models import GCN
from torch_geometric.transforms import RandomLinkSplit
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, SamplingStrategy, gather_nodes
from lightning_gnn.checks.small_graph import FORM, small_graph
from lightning_gnn.data.loading import load_source
from lightning_gnn.data.shards import cut_graph, split_graph, whole_graph
from lightning_gnn.data.sources import LeftOutError, kinds_of, prepare_graph, tell_kinds
from lightning_gnn.data.store import read_cut, write_store
from lightning_gnn.extensions.node_types.graph import prepare_hetero
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.gossip.clusters import Clusters

MASKS = ("train_mask", "val_mask", "test_mask")
HALVES = np.arange(60) % 2


def graph(**changes: Any) -> Data:
    """The awkward graph, all of whose nodes are labelled, with other attributes, or without those that are None."""
    data = awkward_graph()
    data.y[data.y < 0] = 0
    for name, value in changes.items():
        data[name] = value
        if value is None:
            del data[name]
    return data


def ids_of(name: str, data: Data | None = None) -> torch.Tensor:
    """The nodes of a mask, in no order."""
    ids = (data or graph())[name].nonzero().view(-1)
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))]


WITHOUT_MASKS: dict[str, Any] = dict.fromkeys(MASKS)
TRAIN, VAL, TEST = (ids_of(name) for name in MASKS)


# Splits by ids ################################################################


@pytest.mark.parametrize(
    "split",
    [
        {"train_idx": TRAIN, "val_idx": VAL, "test_idx": TEST},
        {"idx_train": TRAIN.int(), "idx_val": VAL.numpy(), "idx_test": TEST.tolist()},
        {"train_index": TRAIN, "valid_index": VAL, "test_index": TEST},
        {"train_nodes": TRAIN, "validation_nodes": VAL, "test_ids": TEST},
        {"split_idx": {"train": TRAIN, "valid": VAL, "test": TEST}},
        {"train_idx": graph().train_mask, "valid_mask": graph().val_mask, "test_mask": graph().test_mask},
    ],
)
def test_splits_by_ids_become_masks(split):
    data = prepare_graph(graph(**{**WITHOUT_MASKS, **split}))
    assert all(torch.equal(data[name], graph()[name]) for name in MASKS)
    for name in split.keys() - set(MASKS):
        assert name not in data
        with pytest.raises(LeftOutError, match=f"The batch has no {name}: .*batch.(train|val|test)_mask"):
            data[name]


def test_labels_of_a_split_become_y():
    """As in PyG's Entities, which rgcn.py trains on."""
    y = graph().y
    split = {"train_idx": TRAIN, "train_y": y[TRAIN], "test_idx": TEST, "test_y": y[TEST]}
    data = prepare_graph(graph(**WITHOUT_MASKS, y=None, **split))
    known = graph().train_mask | graph().test_mask
    assert torch.equal(data.y, torch.where(known, y, -1)) and not data.val_mask.any()
    with pytest.raises(LeftOutError, match=r"batch.y\[batch.train_mask\]"):
        data["train_y"]


@pytest.mark.parametrize(
    ("split", "name"),
    [
        ({"train_idx": torch.tensor([0, 1, 60])}, "train_idx"),
        ({"train_idx": torch.tensor([0, 1, 1])}, "train_idx"),
        ({"train_idx": TRAIN.view(-1, 1)}, "train_idx"),
        ({"train_idx": torch.arange(60)}, "train_idx"),  # one entry per node
        ({"train_idx": graph().train_mask.long()}, "train_idx"),
        ({"train_idx": TRAIN, "y": None}, "train_idx"),  # of nodes, or of edges
        ({"split": {"train": TRAIN, "test": torch.tensor([0.5])}}, "split"),
    ],
)
def test_what_is_no_list_of_nodes_beyond_doubt_is_refused_by_name(split, name):
    with pytest.raises(ValueError, match=f"{name} cannot be read: .*Set masks: data.train_mask"):
        prepare_graph(graph(**{**WITHOUT_MASKS, **split}))
    with pytest.raises(LeftOutError, match="not a list of distinct ids"):
        prepare_graph(graph(**split))[name]  # there are masks
    prepare_graph(graph(**{**WITHOUT_MASKS, **split}), fractions=(0.5, 0.2, 0.2))


# What attributes belong to ####################################################


def of_all_kinds() -> Data:
    num_edges = graph().edge_index.size(1)
    return graph(
        node_number=torch.arange(60),
        edge_number=torch.arange(num_edges),
        edge_index_number=torch.arange(num_edges),  # an id of its own for each
        label_count=torch.rand(CLASSES),
        as_long_as_a_part=torch.rand(30),
        as_long_as_a_small_graph=torch.rand(sum(FORM.nodes), 2),
        as_many_as_its_edges=torch.rand(sum(FORM.edges)),
        pairs_n_id=torch.tensor([[3, 50], [7, 59]]),
        temperature=torch.tensor(36.6),
        scale=2,
        title="a graph",
        share=np.float64(0.5),
    )


@pytest.mark.parametrize("replicas", [False, True])
def test_rows_go_with_nodes_and_edges_and_the_rest_is_everywhere(replicas):
    given = prepare_graph(of_all_kinds())
    shards = split_graph(given, HALVES, LayoutSpec("edge_cut", 2))
    for shard in shards:
        batch = shard.batch
        assert torch.equal(batch.node_number, batch.n_id)
        assert torch.equal(batch.edge_number, batch.e_id) and torch.equal(batch.edge_index_number, batch.e_id)
        for name in (
            "label_count",
            "as_long_as_a_part",
            "as_long_as_a_small_graph",
            "as_many_as_its_edges",
            "pairs_n_id",
        ):
            assert torch.equal(batch[name], given[name]), name
        assert (batch.temperature, batch.scale, batch.title, batch.share) == (given.temperature, 2, "a graph", 0.5)
        small = small_graph(batch, MASKS, FORM).graph
        for name in ("as_long_as_a_part", "as_long_as_a_small_graph", "as_many_as_its_edges"):
            assert torch.equal(small[name], given[name]), name
        assert int(small.pairs_n_id.max()) < sum(FORM.nodes) and kinds_of(small) == kinds_of(batch)


def test_the_store_keeps_kinds_words_and_reasons(tmp_path):
    given = prepare_graph(graph(words=["a"], title="a graph", as_long_as_a_part=torch.rand(30)))
    write_store(tmp_path / "one", given, HALVES, LayoutSpec("edge_cut", 2), {})
    cut = read_cut(tmp_path / "one")
    for batch in (cut.shard(0).batch, Clusters(cut, 1, 0).batch([0]), cut.graph()):
        assert batch.title == "a graph" and len(batch.as_long_as_a_part) == 30
        assert kinds_of(batch)["as_long_as_a_part"] == "graph"
        with pytest.raises(LeftOutError, match="words: it is a list"):
            copy.deepcopy(batch)["words"]


def ring(**attributes: Any) -> Data:
    """Each node with one in-edge: as many nodes as edges, also in the parts."""
    source = torch.arange(60)
    return graph(edge_index=torch.stack([source, (source + 7) % 60]), edge_weight=None, edge_attr=None, **attributes)


def test_what_may_be_of_nodes_or_of_edges_is_asked():
    of_nodes = {name: torch.rand(60) for name in ("pos", "z", "x_2", "node_tone", "tone_n_id")}
    of_nodes["own_mask"] = torch.rand(60) > 0.5
    of_edges = {"edge_tone": torch.rand(60), "tone_of_edge": torch.rand(60, 2)}
    data = prepare_graph(ring(**of_nodes, **of_edges))
    batch = cut_graph(data, HALVES, 2).shard(1).batch
    for name in (*of_nodes, "x", "y", "train_mask"):
        assert kinds_of(data)[name] == "node" and torch.equal(batch[name], data[name][batch.n_id]), name
    for name in of_edges:
        assert kinds_of(data)[name] == "edge" and torch.equal(batch[name], data[name][batch.e_id]), name
    words = (
        "dist, tone: 60 rows, and the graph has as many nodes as edges.*data.node_dist = data.dist, or data.edge_dist"
    )
    with pytest.raises(ValueError, match=words):
        prepare_graph(ring(dist=torch.rand(60), tone=torch.rand(60, 3), classes=torch.rand(5)))
    again = prepare_graph(ring(node_tone=torch.rand(60)))
    prepare_graph(again)
    again.dist = torch.rand(60)
    with pytest.raises(ValueError, match="dist: 60 rows"):
        prepare_graph(again)


@pytest.mark.parametrize("kind", ["node", "edge"])
def test_a_source_that_knows_is_not_asked(kind):
    given = ring(dist=torch.rand(60))
    tell_kinds(given, kind, ["dist"])
    data = prepare_graph(copy.copy(given))
    assert kinds_of(data)["dist"] == kind


# What is left out #############################################################

PAIRS = torch.randint(0, 60, (2, 40), generator=torch.Generator().manual_seed(0))
LEFT_OUT: dict[str, tuple[Any, str]] = {
    "edge_label_index": (PAIRS, r"GraphDataModule\(split_edges\(data\)\)"),
    "edge_label": (torch.ones(40), r"GraphDataModule\(split_edges\(data\)\)"),
    "neg_edge_label_index": (PAIRS, r"split_edges"),
    "pos_edge_index": (PAIRS, r"data.edge_kind that.*split_edges"),
    "train_edge_index": (PAIRS, r"data.edge_kind that"),
    "held_out_edge_idx": (torch.arange(5), r"one entry per edge: data.held_out_mask\[data.held_out_edge_idx\] = True"),
    "hub_index": (torch.arange(5), r"data.hub_mask\[data.hub_index\] = True; or .*gather_nodes.*hub_n_id"),
    "parent_idx": (torch.arange(60).roll(1), "ids of the whole graph.*parent_n_id"),
    "face": (torch.randint(0, 60, (3, 8)), "ids of the whole graph"),
    "ptr": (torch.tensor([0, 60]), "a batch is one graph"),
    "adj": (torch.eye(60).to_sparse(), "sparse matrix"),
    "names": (["a"] * 60, "it is a list.*batch.n_id"),
    "table": ({"a": 1}, "it is a dict"),
    "heights": (np.ones(60), r"data.heights = torch.from_numpy\(data.heights\)"),
    "batch_size": (60, "does not begin with seed nodes"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_no_part_can_have_is_told_and_says_what_to_write(name):
    value, words = LEFT_OUT[name]
    with pytest.warns(UserWarning, match=f"Batches do not have {name} of the graph. Reason for {name}: "):
        data = prepare_graph(graph(**{name: value}))
    for batch in (whole_graph(data).batch, split_graph(data, HALVES, LayoutSpec("edge_cut", 2))[1].batch):
        with pytest.raises(LeftOutError, match=f"The batch has no {name}: .*{words}"):
            batch[name]
        assert name not in batch and batch.get(name) is None
        if name != "face":  # of any Data, PyG says None
            with pytest.raises(LeftOutError, match=f"The batch has no {name}: .*{words}"):
                getattr(batch, name)
            assert not hasattr(batch, name)
        batch[name] = value  # set by the user, in a hook say
        assert batch[name] is value


def test_other_missing_attributes_are_missing_as_ever():
    batch = whole_graph(prepare_graph(graph())).batch
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        batch.nothing  # noqa: B018
    with pytest.raises(KeyError, match="nothing"):
        batch["nothing"]


@pytest.mark.parametrize(
    ("value", "told"),
    [(torch.tensor([4, 9, 17]), True), (torch.tensor([-1, 5]), False), (torch.tensor([9999, 3]), False)],
)
def test_whole_numbers_that_may_be_ids_are_told(value, told):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        data = prepare_graph(graph(anchors=value))
    assert any("anchors [3] does not have one row per node or edge" in str(each.message) for each in heard) == told
    assert torch.equal(data.anchors, value)


def test_nothing_is_told_of_an_ordinary_graph():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_graph(prepare_graph(of_all_kinds()))


def test_ids_that_a_loader_has_left_are_told():
    with pytest.warns(UserWarning, match="n_id is reserved for the ids that batches set"):
        data = prepare_graph(graph(n_id=torch.arange(100, 160)))
    assert whole_graph(data).batch.n_id.tolist() == list(range(60))


class Links:
    """A dataset with RandomLinkSplit as its transform."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return RandomLinkSplit(is_undirected=False)(graph())


@pytest.mark.parametrize(
    "source", [Links(), RandomLinkSplit()(graph()), lambda: RandomLinkSplit(split_labels=True)(graph())]
)
def test_random_link_split_is_refused_by_name(source):
    with pytest.raises(
        ValueError, match=r"returned 3 graphs with edge_label_index, as from RandomLinkSplit.*split_edges\(data\)"
    ):
        load_source(source)


def test_a_split_of_edges_without_edges_is_refused_by_name():
    with pytest.raises(ValueError, match="no edge_index.*Its train_pos_edge_index is from a split of edges.*split_edges"):
        prepare_graph(graph(edge_index=None, train_pos_edge_index=PAIRS))


def test_types_are_told_of_what_is_left_out():
    data = typed_graph()
    paper = data["paper"]
    paper.train_idx, paper.names, paper.parent_idx = paper.train_mask.nonzero().view(-1), ["a"], torch.tensor([1, 0])
    paper.by_class = torch.rand(3)
    paper.node_id = torch.arange(paper.num_nodes)
    expected = paper.train_mask
    del paper.train_mask
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = prepare_hetero(data, "paper")["paper"]
    told = " ".join(str(each.message) for each in heard)
    assert "Batches do not have names, parent_idx, by_class of node type 'paper'. Reason for names: it is a list" in told
    assert "Reason for train_idx: the batch has train_mask instead" in told
    assert torch.equal(found.train_mask, expected) and torch.equal(found.node_id, paper.node_id)
    assert not {"train_idx", "names", "parent_idx", "by_class"} & set(found.keys())


# Through the Trainer ##########################################################


class OGBModule(L.LightningModule):
    """As OGB's and PyG's scripts have it: labels [N, 1], squeezed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = GCNConv(FEATURES, 8), GCNConv(8, CLASSES)
        self.acc = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, batch: Any) -> torch.Tensor:
        return self.second(self.first(batch.x, batch.edge_index).relu(), batch.edge_index).log_softmax(-1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.nll_loss(self(batch)[batch.train_mask], batch.y.squeeze(1)[batch.train_mask])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.acc.update(self(batch)[batch.val_mask], batch.y.squeeze(1)[batch.val_mask])
        self.log("val_acc", self.acc)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch)[batch.test_mask]
        self.log("test_loss", F.nll_loss(out, batch.y.squeeze(1)[batch.test_mask]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def ogb_like(val: torch.Tensor = VAL) -> Data:
    """Labels [N, 1], and ids in place of masks."""
    return graph(**WITHOUT_MASKS, y=graph().y.view(-1, 1), train_idx=TRAIN, val_idx=val, test_idx=TEST)


def train_ogb(
    rank: int, world_size: int, strategy: Any, module: Any = OGBModule, val: torch.Tensor = VAL
) -> dict[str, Any]:
    recorder, built = Recorder(), module()
    built = (NodeClassifier(built, CLASSES) if not isinstance(built, L.LightningModule) else built).double()
    data = GraphDataModule(ogb_like(val), partition=HALVES if world_size > 1 and strategy == "dgcl" else None)
    trainer = quiet_trainer(strategy, world_size, self_check=True, callbacks=[recorder])
    trainer.fit(built, datamodule=data)
    [tested] = trainer.test(built, datamodule=data, verbose=False)
    return {"epochs": recorder.epochs, "tested": tested, "weights": built.state_dict()}


def gcn() -> Any:
    torch.manual_seed(3)
    return GCN(FEATURES, 8, 2, CLASSES)


@pytest.mark.parametrize(
    ("strategy", "module"),
    [
        ("dgcl", OGBModule),
        ("vertex_cut", gcn),
        *campaign(("dgcl", gcn), ("vertex_cut", OGBModule), ("spmm_15d", OGBModule), ("spmm_15d", gcn)),
    ],
)
def test_labels_in_a_column_and_splits_by_ids_are_those_of_one_device(ranks, module, strategy):
    val = VAL[HALVES[VAL] == 0] if strategy == "dgcl" else VAL  # none on rank 1: a stand-in
    expected = train_ogb(0, 1, "auto", module, val)
    for found in ranks.run(2, train_ogb, strategy, module, val):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_one_device_trains_on_the_ids():
    """Against PyTorch alone."""
    data, module = ogb_like(), OGBModule().double()
    optimizer = module.configure_optimizers()
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.nll_loss(module(data)[data.train_idx], data.y.squeeze(1)[data.train_idx])
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert [each["train_loss"] for each in train_ogb(0, 1, "auto")["epochs"]] == pytest.approx(losses, rel=1e-9)


class Seeds(OGBModule):
    """As PyG's graph_sage.py for Lightning has it."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out, y = self(batch)[: batch.batch_size], batch.y[: batch.batch_size].squeeze(1)
        self.log("train_loss", F.nll_loss(out, y), batch_size=batch.batch_size)
        return F.nll_loss(out, y)


class Reads(OGBModule):
    """Asks for ids."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.nll_loss(self(batch)[batch.train_idx], batch.y.squeeze(1)[batch.train_idx])


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Seeds, "The batch has no batch_size: a full-graph batch does not begin with seed nodes"),
        (Reads, "The batch has no train_idx: the batch has train_mask instead"),
    ],
)
def test_a_step_that_asks_for_what_is_left_out_is_refused_before_training(ranks, module, words):
    with pytest.raises(LeftOutError, match=words):
        train_ogb(0, 1, "auto", module)
    with pytest.raises(RankFailed) as failed:
        ranks.run(2, train_ogb, "dgcl", module)
    assert all(words in error and error.startswith("UnsupportedModelError") for error in failed.value.errors.values())


class Sampled(Seeds):
    """Keeps what a sampled batch was."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert batch.train_mask.nonzero().view(-1).tolist() == list(range(batch.batch_size))
        assert batch.title == "a graph" and len(batch.weights) == CLASSES and batch.y.shape == (len(batch.x), 1)
        return super().training_step(batch, batch_idx)


def sample(rank: int, world_size: int) -> float:
    data = ogb_like()
    data.title, data.weights = "a graph", torch.rand(CLASSES)
    trainer = quiet_trainer(SamplingStrategy([3, 3], 8, timeout=60), world_size, max_epochs=2)
    trainer.fit(Sampled().double(), datamodule=GraphDataModule(data))
    return float(trainer.callback_metrics["train_loss"])


def test_samples_have_seeds_first_and_what_is_of_the_graph(ranks):
    first, second = ranks.run(2, sample)
    assert first == second > 0


class ReadsPairs(OGBModule):
    """A loss over given pairs, on all ranks alike."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        z = self.first(batch.x, batch.edge_index)
        source, target = gather_nodes(z, batch.pairs_n_id)
        return {"loss": F.softplus(-(source * target).sum(-1)).mean(), "loss_weight": 1}


def train_pairs(rank: int, world_size: int, strategy: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    recorder, built = Recorder(), ReadsPairs().double()
    data = GraphDataModule(graph(pairs_n_id=PAIRS, y=graph().y.view(-1, 1)))
    quiet_trainer(strategy, world_size, callbacks=[recorder]).fit(built, datamodule=data)
    return {"weights": built.state_dict(), "epochs": recorder.epochs}


def test_ids_of_the_whole_graph_under_their_name_fetch_rows(ranks):
    expected = train_pairs(0, 1, "auto")
    for found in ranks.run(2, train_pairs, DGCLStrategy(timeout=60)):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
