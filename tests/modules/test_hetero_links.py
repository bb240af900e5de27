"""Links of one type of a HeteroData: splits, batches as PyG's LinkNeighborLoader gives them, and the numbers of one process.

Tiers: no ranks, gloo ranks in the pool, also ``apart``, as if each were on a machine of its own.
"""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from common import Recorder, campaign, examples, quiet_trainer, ranks_apart
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkLoader
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import DistributedEmbedding, GraphDataModule, LinkPredictor, SamplingStrategy, split_edges
from lightning_gnn.data.draws import OtherNodes, draw_others
from lightning_gnn.data.shards import whole_graph
from lightning_gnn.data.sources import MASKS
from lightning_gnn.data.store import check_arrays, read_cut, read_manifest
from lightning_gnn.datamodules.graph import check_links
from lightning_gnn.extensions.node_types.graph import prepare_hetero
from lightning_gnn.strategies.sampling import NeighborSampler
from lightning_gnn.strategies.sampling.strategy import SamplingScheme

USERS, MOVIES = 24, 30
RATES, REV, LIKE, FOLLOWS = (
    ("user", "rates", "movie"),
    ("movie", "rev_rates", "user"),
    ("movie", "like", "movie"),
    ("user", "follows", "user"),
)


def ratings(seed: int = 0) -> HeteroData:
    """Users without features who rate movies, the same the other way round in another order, and two types that are not split;
    parallel edges, and ratings that are numbers."""
    g = torch.Generator().manual_seed(seed)
    data = HeteroData()
    data["user"].num_nodes = USERS
    data["movie"].x = torch.randn(MOVIES, 5, generator=g, dtype=torch.float64)
    ends = torch.stack([torch.randint(0, size, (140,), generator=g) for size in (USERS, MOVIES)])
    ends = torch.cat([ends, ends[:, :6]], 1)
    data[RATES].edge_index = ends
    data[RATES].edge_label = torch.randn(146, generator=g, dtype=torch.float64)
    data[RATES].time = torch.randint(0, 50, (146,), generator=g)
    order = torch.randperm(146, generator=g)
    data[REV].edge_index, data[REV].time = ends.flip(0)[:, order], data[RATES].time[order]
    data[LIKE].edge_index = torch.randint(0, MOVIES, (2, 60), generator=g)
    data[FOLLOWS].edge_index = torch.randint(0, USERS, (2, 50), generator=g)
    return data


def split(kind: Any = RATES, labels: bool = True, times: bool = False, **options: Any) -> HeteroData:
    data = ratings()
    if not labels:
        del data[RATES].edge_label
    if not times:
        del data[RATES].time, data[REV].time
    return split_edges(data, 0.15, 0.15, edge_type=kind, rev_edge_type=REV if kind == RATES else None, **options)


class Model(torch.nn.Module):
    """Two layers of a conv per relation, and learned rows for users."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.users = torch.nn.Embedding(USERS, 4)
        self.layers = torch.nn.ModuleList(
            HeteroConv({kind: SAGEConv((sizes[kind[0]], sizes[kind[2]]), 6) for kind in (RATES, REV, LIKE, FOLLOWS)})
            for sizes in ({"user": 4, "movie": 5}, {"user": 6, "movie": 6})
        )

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor], user_ids: Tensor) -> dict[str, Tensor]:
        x = {**x, "user": self.users(user_ids)}
        for layer in self.layers:
            x = {name: rows.tanh() for name, rows in layer(x, edges).items()}
        return x


class Ratings(L.LightningModule):
    """What a user writes, after PyG's examples/hetero/hetero_link_pred.py: a rating from the rows of both ends."""

    predicts_edges = True

    def __init__(self, negatives: int = 0, kind: Any = RATES) -> None:
        super().__init__()
        self.model, self.kind = Model(), kind
        self.head = torch.nn.Linear(12, 1)
        self.sampled_negatives = negatives

    def loss(self, rows: dict[str, Tensor], ends: Tensor, label: Tensor) -> Tensor:
        pairs = torch.cat([rows[self.kind[0]][ends[0]], rows[self.kind[2]][ends[1]]], 1)
        return F.mse_loss(self.head(pairs).view(-1), label.to(pairs.dtype))

    def of_batch(self, batch: HeteroData, stage: str) -> Tensor:
        edges = batch[self.kind]
        rows = self.model(batch.x_dict, batch.edge_index_dict, batch["user"].n_id)
        loss = self.loss(rows, edges.edge_label_index, edges.edge_label)
        self.log(f"{stage}_loss", loss, batch_size=len(edges.input_id), on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: HeteroData, batch_idx: int) -> Tensor:
        return self.of_batch(batch, "train")

    def validation_step(self, batch: HeteroData, batch_idx: int) -> None:
        self.of_batch(batch, "val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def messages(graph: HeteroData) -> dict[Any, Tensor]:
    """Which edges carry messages, by type."""
    return {
        kind: graph[kind].get("edge_train_mask", torch.ones(graph[kind].edge_index.size(1), dtype=torch.bool))
        for kind in graph.edge_types
    }


def carried(graph: HeteroData, out: dict[Any, Tensor] | None = None) -> dict[Any, Tensor]:
    """The edges that carry messages, but for some, by type."""
    out = out or {}
    kept = {kind: mask & ~out[kind] if kind in out else mask for kind, mask in messages(graph).items()}
    return {kind: graph[kind].edge_index[:, mask] for kind, mask in kept.items()}


# Splits #######################################################################


@examples(30)
@given(st.integers(0, 1000), st.sampled_from([RATES, LIKE, FOLLOWS]), st.booleans())
def test_split_holds_out_both_directions(seed, kind, with_reverse):
    data, rev = ratings(seed), (kind[2], "rev", kind[0])
    order = torch.randperm(data[kind].edge_index.size(1))
    data[rev].edge_index = data[kind].edge_index.flip(0)[:, order]
    found = split_edges(data, 0.2, 0.1, seed=seed, edge_type=kind, rev_edge_type=rev if with_reverse else None)
    assert "edge_train_mask" not in data[kind] and "edge_train_mask" not in data[rev]
    masks = torch.stack([found[kind][f"edge_{name}_mask"] for name in ("train", "val", "test")])
    assert (masks.sum(0) == 1).all() and masks.any(1).all()
    of: dict[Any, set[int]] = {}
    for pair, part in zip(map(tuple, found[kind].edge_index.T.tolist()), masks.int().argmax(0).tolist()):
        of.setdefault(pair, set()).add(part)
    assert all(len(parts) == 1 for parts in of.values())
    others = [each for each in found.edge_types if each != kind and "edge_train_mask" in found[each]]
    assert others == ([rev] if with_reverse else [])
    if with_reverse:
        assert [*found[rev].keys()] == ["edge_index", "edge_train_mask"]
        assert torch.equal(found[rev].edge_train_mask, masks[0][order])


def test_a_split_of_one_type_is_that_of_the_graph_that_it_makes():
    data = ratings()
    alone = split_edges(Data(edge_index=data[LIKE].edge_index, num_nodes=MOVIES), 0.2, 0.1, seed=4)
    typed = split_edges(data, 0.2, 0.1, seed=4, edge_type=LIKE)[LIKE]
    for name in ("train", "val", "test"):
        assert torch.equal(typed[f"edge_{name}_mask"], alone[f"edge_{name}_mask"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "edge_type must be the edge type to split"),
        ({"edge_type": ("user", "rates", "user")}, "edge_type must be the edge type to split"),
        ({"edge_type": RATES, "rev_edge_type": LIKE}, "must be another edge type, .* from 'movie' to 'user'"),
        ({"edge_type": LIKE, "rev_edge_type": LIKE}, "another edge type"),
        ({"edge_type": RATES, "undirected": True}, "edges between nodes of one type"),
    ],
)
def test_refused_splits(options, words):
    with pytest.raises(ValueError, match=words):
        split_edges(ratings(), **options)


def test_types_are_of_graphs_with_types():
    with pytest.raises(ValueError, match="the graph has no types"):
        split_edges(Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2), edge_type=RATES)


# Graphs in the store ##########################################################


def test_parts_know_the_edges_that_are_predicted(tmp_path):
    graph = split()
    del graph[RATES].edge_val_mask, graph[RATES].edge_test_mask
    graph["movie"].train_mask = torch.ones(MOVIES, dtype=torch.bool)
    with_all = split()
    for source, kind_of in ((graph, None), (with_all, RATES)):
        folder = GraphDataModule(source, partition_dir=tmp_path, input_type="movie").partition_for(SamplingScheme().layout(3))
        cut = read_cut(folder)
        assert cut.edge_type == kind_of  # two types with a mask of training edges alone are none
        check_arrays(folder, read_manifest(folder))
        for rank in range(3):
            assert cut.shard(rank).edge_type == kind_of
        for kind in source.edge_types:
            ids = cut.types.total(kind)
            found = torch.stack(
                [cut.ids_of(end)[of] for end, of in zip((kind[0], kind[2]), cut.ends(torch.arange(ids), kind))]
            )
            assert torch.equal(found, source[kind].edge_index[:, cut.ids_of(kind)])
    assert {name: sum(of) for name, of in cut.mask_counts.items() if "edge" in name} == {
        name: int(with_all[RATES][name].sum()) for name in ("edge_train_mask", "edge_val_mask", "edge_test_mask")
    }
    assert cut.types.input_type == "movie"


# Mini-batches #################################################################


class Batches(L.Callback):
    """Keeps the batches of training, and of validation."""

    def __init__(self) -> None:
        self.train: list[HeteroData] = []
        self.val: list[HeteroData] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.train.append(copy.copy(batch))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.val.append(copy.copy(batch))


def trained(
    rank: int, world_size: int, graph: HeteroData, module: Any, options: dict[str, Any], apart: bool = False
) -> dict[str, Any]:
    batches, recorder = Batches(), Recorder()
    module = copy.deepcopy(module).double()
    strategy = SamplingStrategy(**{"num_neighbors": [-1, -1], "batch_size": 20, "timeout": 60, **options})
    with ranks_apart(apart):
        trainer = quiet_trainer(strategy, world_size, callbacks=[batches, recorder], max_epochs=1)
        trainer.fit(module, datamodule=GraphDataModule(graph))
    found = {"train": batches.train, "val": batches.val, "gradients": recorder.gradients}
    return {**found, "epochs": recorder.epochs, "weights": module.state_dict()}


def check_conventions(batch: HeteroData, graph: HeteroData, kind: Any, negatives: int, training: bool) -> None:
    """A batch is what LinkNeighborLoader makes of the graph's messages, without what tells of its edges."""
    edges, num = batch[kind], len(batch[kind].input_id)
    pairs = torch.stack([batch[end].n_id[of] for end, of in zip((kind[0], kind[2]), edges.edge_label_index)])
    assert torch.equal(pairs[:, :num], graph[kind].edge_index[:, edges.input_id])
    assert torch.equal(pairs[0, num:], pairs[0, :num].repeat_interleave(negatives))
    assert not (pairs[1, num:] == pairs[1, :num].repeat_interleave(negatives)).any()
    hidden = set(map(tuple, pairs[:, :num].T.tolist())) if training else set()
    kept = messages(graph)
    for each in graph.edge_types:
        found = torch.stack([batch[end].n_id[of] for end, of in zip((each[0], each[2]), batch[each].edge_index)])
        assert torch.equal(found, graph[each].edge_index[:, batch[each].e_id])
        assert kept[each][batch[each].e_id].all()
        assert sum(batch[each].num_sampled_edges) == len(batch[each].e_id)
        ends = set(map(tuple, found.T.tolist()))
        if each == kind:
            assert not ends & hidden
        if each == REV and kind == RATES:
            assert not {(user, movie) for movie, user in ends} & hidden
        if each == kind and kind[0] == kind[2]:
            assert not {(t, s) for s, t in ends} & hidden


@pytest.mark.parametrize(
    ("world_size", "negatives", "kind", "apart"),
    [(2, 0, RATES, True), (3, 2, RATES, False), *campaign((2, 2, LIKE, True), (1, 1, RATES, False))],
)
def test_edges_are_predicted_as_in_one_process(ranks, world_size, negatives, kind, apart):
    """The first step's gradients are those of these edges on the whole graph but for them; validation's loss is that of all."""
    graph, module = split(kind), Ratings(negatives, kind)
    results = ranks.run(world_size, trained, graph, module, {}, apart)
    for mask, stage in (("edge_train_mask", "train"), ("edge_val_mask", "val")):
        seen = torch.cat([batch[kind].input_id for found in results for batch in found[stage]])
        assert torch.equal(seen.sort().values, graph[kind][mask].nonzero().view(-1))
    for found in results:
        assert len(found["val"]) == len(results[0]["val"])
        for stage in ("train", "val"):
            for batch in found[stage]:
                check_conventions(batch, graph, kind, negatives, stage == "train")
                if kind == RATES:
                    label = graph[kind].edge_label[batch[kind].input_id]
                    expected = torch.cat([label, label.new_zeros(len(label) * negatives)])
                    assert torch.equal(batch[kind].edge_label, expected)
    reference, losses = copy.deepcopy(module).double(), []
    first = [found["train"][0] for found in results]
    for batch in first:
        edges, pairs = batch[kind], graph[kind].edge_index[:, batch[kind].input_id]
        hidden = set(map(tuple, pairs.T.tolist()))
        back = {(t, s) for s, t in hidden}
        tells = {kind: hidden | (back if kind[0] == kind[2] else set()), **({REV: back} if kind == RATES else {})}
        out = {
            each: torch.tensor([tuple(pair) in of for pair in graph[each].edge_index.T.tolist()])
            for each, of in tells.items()
        }
        ends = torch.stack([batch[end].n_id[of] for end, of in zip((kind[0], kind[2]), edges.edge_label_index)])
        loss = reference.loss(
            reference.model(graph.x_dict, carried(graph, out), torch.arange(USERS)), ends, edges.edge_label
        )
        losses.append(loss * len(edges.input_id) / sum(len(each[kind].input_id) for each in first))
    sum(losses).backward()
    expected_gradients = [parameter.grad for parameter in reference.parameters()]
    for found in results:
        torch.testing.assert_close(found["gradients"], expected_gradients, rtol=1e-9, atol=1e-12)
        reference.load_state_dict(found["weights"])
        if not negatives:
            val = graph[kind].edge_val_mask
            with torch.no_grad():
                rows = reference.model(graph.x_dict, carried(graph), torch.arange(USERS))
                loss = reference.loss(rows, graph[kind].edge_index[:, val], graph[kind].edge_label[val])
            assert found["epochs"][-1]["val_loss"] == pytest.approx(float(loss), rel=1e-9)


def test_rows_of_users_that_lie_at_their_owners_learn_the_same(ranks):
    """With batches of edges, in training and in validation."""
    table = DistributedEmbedding(USERS, 4, node_type="user", optimizer="sgd", lr=0.01).double()
    plain, spread = Ratings().double(), Ratings().double()
    plain.model.users.load_state_dict({"weight": table.state_dict()["weight"]})
    spread.model.users = table
    graph, options = split(), {"batch_size": 30}
    expected = ranks.run(2, trained, graph, plain, options)
    for found, one in zip(ranks.run(2, trained, graph, spread, options), expected):
        assert found["epochs"] == [pytest.approx(epoch, rel=1e-9) for epoch in one["epochs"]]


def test_a_batch_has_what_pygs_loader_gives(ranks):
    graph = split(labels=False)
    [found] = ranks.run(1, trained, graph, Ratings(), {"batch_size": 40})
    batch, edges = found["train"][0], graph[RATES]
    kept = copy.copy(graph)
    for kind in (RATES, REV):
        kept[kind].edge_index = graph[kind].edge_index[:, graph[kind].edge_train_mask]
    loader = LinkLoader(
        kept,
        NeighborSampler.from_data(kept, [-1, -1]),
        edge_label_index=(RATES, edges.edge_index[:, batch[RATES].input_id]),
        edge_label=torch.ones(len(batch[RATES].input_id)),
        batch_size=1000,
    )
    theirs = next(iter(loader))
    assert batch.edge_types == theirs.edge_types and batch.node_types == theirs.node_types
    for name in ("edge_label_index", "edge_label", "input_id", "e_id"):
        assert batch[RATES][name].dtype == theirs[RATES][name].dtype
        assert batch[RATES][name].dim() == theirs[RATES][name].dim()
    for name in batch.node_types:
        assert torch.equal(batch[name].n_id.sort().values, theirs[name].n_id.sort().values)
        assert batch[name].num_sampled_nodes[0] == theirs[name].num_sampled_nodes[0]
    assert torch.equal(batch[RATES].edge_label, theirs[RATES].edge_label)


# LinkPredictor ################################################################


def with_features(graph: HeteroData) -> HeteroData:
    graph["user"].x = torch.randn(USERS, 4, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return graph


class Convs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Model().layers

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Tensor]) -> dict[str, Tensor]:
        for layer in self.layers:
            x_dict = {name: rows.tanh() for name, rows in layer(x_dict, edge_index_dict).items()}
        return x_dict


def predicted(
    rank: int, world_size: int, graph: HeteroData, options: dict[str, Any], negatives: str, apart: bool, size: int = 16
) -> dict[str, Any]:
    """Tests and predicts, then trains and tests again."""
    batches, recorder = Batches(), Recorder()
    arguments: dict[str, Any] = {"num_negatives": 2, "eval_negatives": 4, "negatives": negatives, "edge_type": RATES}
    module = LinkPredictor(Convs(), **arguments).double()
    before = copy.deepcopy(module.model)
    strategy = SamplingStrategy([-1, -1], batch_size=size, timeout=60, **options)
    rows = {}
    with ranks_apart(apart):
        trainer = quiet_trainer(strategy, world_size, callbacks=[batches, recorder], max_epochs=1)
        data = GraphDataModule(graph)
        [tested] = trainer.test(module, datamodule=data, verbose=False)
        for name in ("user", "movie") if not options else ():
            [rows[name]] = trainer.predict(module, datamodule=GraphDataModule(graph, input_type=name))
        trainer.fit(module, datamodule=data)
        [after] = trainer.test(module, datamodule=data, verbose=False)
    found = {"before": tested, "after": after, "rows": rows, "epochs": recorder.epochs, "batches": batches.train}
    return {**found, "models": (before, module.model)}


def metrics_by_hand(graph: HeteroData, model: Any) -> dict[str, float]:
    """Returns the test metrics of one process: each edge, and the movies that it is compared with."""
    edges = graph[RATES].edge_test_mask.nonzero().view(-1)
    source, target = graph[RATES].edge_index[:, edges]
    against = draw_others(edges, target, 4, MOVIES, 0, -1)
    kept = {
        kind: graph[kind].edge_index[:, mask.expand(graph[kind].edge_index.size(1))]
        for kind, mask in messages(graph).items()
    }
    rows = model(graph.x_dict, kept)
    return _metrics(
        (rows["user"][source] * rows["movie"][target]).sum(1),
        (rows["user"][source].unsqueeze(1) * rows["movie"][against]).sum(2),
    )


def _metrics(positive: Tensor, negative: Tensor) -> dict[str, float]:
    place = 1 + (negative >= positive.unsqueeze(1)).sum(1).double()
    return {
        "test_loss": float((F.softplus(-positive) + F.softplus(negative).mean(1)).mean()),
        "test_mrr": float((1 / place).mean()),
        "test_hits@3": float((place <= 3).double().mean()),
    }


@pytest.mark.parametrize(
    ("world_size", "negatives", "apart", "size"),
    [
        (2, "uniform", True, 16),
        (2, "in_batch", False, 16),
        *campaign((1, "uniform", False, 16), (3, "in_batch", False, 16), (2, "uniform", False, 1)),
    ],
)
def test_links_are_evaluated_as_in_one_process(ranks, world_size, negatives, apart, size):
    """Before and after training, on any number of ranks: what is drawn in evaluation depends on neither ranks nor batches.

    With one edge a batch, a rank has none in the last: one stands in there, and counts for nothing."""
    graph = with_features(split(labels=False))
    for found in ranks.run(world_size, predicted, graph, {}, negatives, apart, size):
        for name, model in zip(("before", "after"), found["models"]):
            with torch.no_grad():
                expected = metrics_by_hand(graph, model)
            assert {key: found[name][key] for key in expected} == pytest.approx(expected, abs=1e-9)
        with torch.no_grad():
            kept = messages(graph)
            edges = {
                kind: graph[kind].edge_index[:, kept[kind].expand(graph[kind].edge_index.size(1))] for kind in kept
            }
            rows = found["models"][0](graph.x_dict, edges)
        for name in ("user", "movie"):
            torch.testing.assert_close(found["rows"][name], rows[name], rtol=1e-10, atol=1e-12)
        assert found["before"]["test_loss"] != found["after"]["test_loss"]
        for batch in found["batches"]:
            check_conventions(batch, graph, RATES, 2 if negatives == "uniform" else 0, True)


# Times ########################################################################


def metrics_in_time(graph: HeteroData, model: Any) -> dict[str, float]:
    """As `metrics_by_hand`, each end in a tree of its own, of training edges that are no later."""
    past = HeteroData()
    for name in graph.node_types:
        past[name].x = graph[name].x
    for kind, kept in messages(graph).items():
        past[kind].edge_index = graph[kind].edge_index[:, kept]
        if "time" in graph[kind]:
            past[kind].time = graph[kind].time[kept]
    sampler = NeighborSampler.from_data(past, [-1, -1], time_attr="time", disjoint=True)
    edges = graph[RATES].edge_test_mask.nonzero().view(-1)
    target, until = graph[RATES].edge_index[1, edges], graph[RATES].time[edges]
    others = OtherNodes(torch.arange(MOVIES)).draw(edges, target, None, 4, 0, -1)
    scores = []
    for edge, moment, compared in zip(edges, until, others):
        user, movie = graph[RATES].edge_index[:, edge]
        seeds = {"user": user.view(1), "movie": torch.cat([movie.view(1), compared])}
        out: Any = sampler.sample(seeds, seed_time={name: moment.expand(len(ids)) for name, ids in seeds.items()})
        ends = {kind: torch.stack([out.row[kind], out.col[kind]]) for kind in graph.edge_types}
        rows = model({name: graph[name].x[ids] for name, ids in out.node.items()}, ends)
        scores.append((rows["user"][0] * rows["movie"][:5]).sum(1))
    return _metrics(torch.stack(scores)[:, 0], torch.stack(scores)[:, 1:])


@pytest.mark.parametrize("apart", [True, *campaign(False)])
def test_links_in_time(ranks, apart):
    graph = with_features(split(labels=False, times=True))
    taken = 0
    for found in ranks.run(2, predicted, graph, {"time_attr": "time"}, "uniform", apart):
        for name, model in zip(("before", "after"), found["models"]):
            with torch.no_grad():
                expected = metrics_in_time(graph, model)
            assert {key: found[name][key] for key in expected} == pytest.approx(expected, abs=1e-9)
        for batch in found["batches"]:
            edges, num = batch[RATES], len(batch[RATES].input_id)
            until, edge = graph[RATES].time[edges.input_id], torch.arange(num)
            pairs = torch.stack([batch[end].n_id[of] for end, of in zip(("user", "movie"), edges.edge_label_index)])
            assert torch.equal(pairs[:, :num], graph[RATES].edge_index[:, edges.input_id])
            assert torch.equal(edges.edge_label_time, torch.cat([until, until.repeat_interleave(2)]))
            for end, of in zip(("user", "movie"), edges.edge_label_index):
                assert torch.equal(batch[end].batch[of], torch.cat([edge, edge.repeat_interleave(2)]))
            # All in-edges of each root that are no later, but for the edge itself and its like.
            for kind, seeded in ((RATES, 1), (REV, 0)):
                roots, ends = edges.edge_label_index[seeded, :num], batch[kind].edge_index
                for place, root in enumerate(roots.tolist()):
                    source, target = graph[kind].edge_index
                    node, moment = batch[kind[2]].n_id[root], until[place]
                    allowed = graph[kind].edge_train_mask & (target == node) & (graph[kind].time <= moment)
                    own = (source == pairs[1 - seeded, place]) & (graph[kind].time >= moment)
                    found_ids = batch[kind].e_id[ends[1] == root].sort().values
                    assert torch.equal(found_ids, (allowed & ~own).nonzero().view(-1))
                    taken += int((allowed & own).sum())
    assert taken > 20


# What is refused ##############################################################


def two_predicted() -> HeteroData:
    graph = split()
    graph[LIKE].edge_val_mask = torch.ones(60, dtype=torch.bool)
    graph["movie"].train_mask = torch.ones(MOVIES, dtype=torch.bool)
    return graph


def overlapping() -> HeteroData:
    graph = split()
    graph[RATES].edge_val_mask = graph[RATES].edge_train_mask
    return graph


def predictor(**options: Any) -> LinkPredictor:
    return LinkPredictor(GraphSAGE(5, 4, 1, 4), **options)


@pytest.mark.parametrize(
    ("strategy", "make", "module", "words"),
    [
        ("sampling", split, predictor, r"calls model\(x, edge_index\), but the edge masks of this HeteroData select type"),
        ("sampling", split, lambda: predictor(edge_type=LIKE), r"has edge_type=\('movie', 'like', 'movie'\), but"),
        ("sampling", two_predicted, lambda: predictor(edge_type=RATES), "The graph has none, or several"),
        ("sampling", two_predicted, Ratings, "The graph has none, or several"),
        ("sampling", overlapping, Ratings, "Edge type .*edges are in more than one of"),
        ("sampling", ratings, Ratings, "split_edges"),
        ("dgcl", split, Ratings, 'in mini-batch steps only. Use Trainer.strategy="sampling"'),
        ("vertex_cut", split, Ratings, 'in mini-batch steps only. Use Trainer.strategy="sampling"'),
        ("auto", split, Ratings, 'in mini-batch steps only. Use Trainer.strategy="sampling"'),
        (SamplingStrategy([2, 2], evaluation="layerwise"), split, Ratings, "evaluation='layerwise' does not support"),
    ],
)
def test_refused_before_training(strategy, make, module, words, tmp_path):
    trainer = quiet_trainer(strategy, 1)
    with pytest.raises(ValueError, match=f"(?s){words}"):
        trainer.fit(module(), datamodule=GraphDataModule(make(), partition_dir=tmp_path))


def test_an_edge_type_of_a_users_own_module_says_nothing():
    module, every = Ratings(), torch.ones(2, dtype=torch.bool)
    module.edge_type = torch.zeros(3)
    graph = Data(x=torch.ones(2, 1), edge_index=torch.zeros(2, 1, dtype=torch.long), **dict.fromkeys(MASKS, every))
    check_links(module, whole_graph(graph), samples=False)
    typed = prepare_hetero(split())
    check_links(module, whole_graph(typed, "movie"), samples=True)


def test_refused_arguments():
    for options in ({"filtered": True}, {"decoder": "distmult", "num_relations": 2}):
        with pytest.raises(ValueError, match="require a graph without types"):
            predictor(edge_type=RATES, **options)
    with pytest.raises(ValueError, match="the graph has no types"):
        graph = split_edges(Data(x=torch.ones(9, 5), edge_index=torch.randint(0, 9, (2, 40))), 0.2, 0.2)
        quiet_trainer("sampling", 1).fit(predictor(edge_type=RATES), datamodule=GraphDataModule(graph))
