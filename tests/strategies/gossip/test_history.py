"""Stale halos: batches read the rows of nodes outside them from a history that all workers of a machine share.

Test tiers: without ranks; gloo ranks in the pool; real processes, of which one dies.
"""

from __future__ import annotations

import csv
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from common import CLASSES, FEATURES, awkward_graph, build, campaign, one_training_node, quiet_trainer
from gossiping import done, new_trainer
from lightning.pytorch.loggers import CSVLogger
from torch_geometric.nn import ChebConv, DirGNNConv, GraphConv, MessagePassing, SGConv, TAGConv

from lightning_gnn import ClusterAllReduceStrategy, GossipStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.comm.call import Step
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import cut_graph
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.nn.helpers import gather_halo, graph_in_use
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.strategies.gossip.clusters import Clusters
from lightning_gnn.strategies.gossip.history import History, HistoryBinding, HistoryExchange
from lightning_gnn.strategies.gossip.peers import SharedKeys

# Without ranks ################################################################

NODES = 60


def new_history(nodes: int = NODES) -> History:
    with tempfile.TemporaryFile() as file:
        return History(nodes, os.dup(file.fileno()), SharedKeys())


def clusters_of(graph: Any, count: int, method: str = "random", per_batch: int = 1) -> Clusters:
    part = assign_nodes(graph.edge_index.numpy(), graph.num_nodes, count, method).part
    return Clusters(cut_graph(graph, part, count), per_batch, 0, with_halo=True)


class InBatches:
    """A model that is run on batches, one after the other."""

    def __init__(self, model: torch.nn.Module, history: History) -> None:
        self.model, self.step = model, 0
        self.exchange = HistoryExchange(history, InProcessWorld(0, Meeting(1)), Meter())
        self.binding = HistoryBinding(model, self.exchange)

    def __call__(self, batch: Any, phase: Any = "train", **inputs: Any) -> torch.Tensor:
        self.step += 1
        own, ids = (torch.from_numpy(each) for each in (batch.halo.local_ids, batch.halo.ids))
        self.exchange.turn_to(own, ids, self.step)
        self.binding.turn_to(batch.x, batch.halo.x, batch.edge_index, batch.get("edge_weight"))
        self.binding.context.begin_step(Step(phase))
        with graph_in_use(self.binding.context):
            return self.model(batch.x, batch.edge_index, **inputs)


@pytest.fixture
def graph() -> Any:
    return prepare_graph(awkward_graph(), None, None, 0, 0)


@pytest.mark.parametrize("chosen", [[0], [3, 1], [0, 1, 2, 3]])
def test_a_batch_has_all_edges_that_end_in_it(graph, chosen):
    clusters = clusters_of(graph, 4)
    batch = clusters.batch(chosen)
    plain = Clusters(clusters._cut, 1, 0).batch(chosen)
    assert torch.equal(batch.n_id, plain.n_id) and batch.num_owned == len(batch.n_id) == len(batch.x)
    n_id = torch.cat([batch.n_id, clusters._cut.n_id[torch.from_numpy(batch.halo.ids)]])
    assert len(n_id.unique()) == len(n_id)
    ends_here = torch.isin(graph.edge_index[1], batch.n_id).nonzero().view(-1)
    assert torch.equal(batch.e_id.sort().values, ends_here)
    assert torch.equal(n_id[batch.edge_index], graph.edge_index[:, batch.e_id])
    assert torch.equal(batch.halo.x, graph.x[n_id[len(batch.n_id) :]])
    assert batch.edge_index[1].max() < len(batch.n_id) and torch.equal(batch.edge_attr, graph.edge_attr[batch.e_id])


def test_clusters_without_training_nodes_are_computed_too():
    """Once an epoch, as all others are: their rows are read."""
    awkward = awkward_graph()
    awkward.train_mask[5:] = False
    for graph, part, count in ((*one_training_node(), 4), (awkward, torch.arange(60) % 7, 7)):
        clusters = Clusters(
            cut_graph(prepare_graph(graph, None, None, 0, 0), part.numpy(), count), 2, 0, with_halo=True
        )
        assert 0 < len(clusters.trained) < count
        of_items = [clusters.draw_clusters(item) for item in range(clusters.batches)]
        assert sorted(cluster for each in of_items for cluster in each) == list(range(count))
        assert all({*each} & {*clusters.trained} for each in of_items)


class Hops(torch.nn.Module):
    """A conv that lets rows travel several times in a call."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv, self.lin = conv, torch.nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.lin(self.conv(x, edge_index))


class ByHand(torch.nn.Module):
    """Reads the ends of edges outside of a conv."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        source, target = edge_index
        return self.lin(torch.zeros_like(x).index_add(0, target, gather_halo(x)[source]))


def model_of(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    of_hops = {
        "sg": lambda: Hops(SGConv(FEATURES, 16, K=2)),
        "tag": lambda: Hops(TAGConv(FEATURES, 16, K=2)),
        "by hand": ByHand,
    }
    return (of_hops[name]() if name in of_hops else build(name)).double()


MODELS = ["gcn", "sage", "gat", "gin_batch_norm", "own", "sg"]
MORE = ["sage_max", "sage_several", "gatv2", "transformer", "pna", "commnet", "gcn_cached", "tag", "by hand"]


@pytest.mark.parametrize("name", [*MODELS, *campaign(*MORE)])
@pytest.mark.parametrize(("method", "per_batch"), [("metis", 1), *campaign(("random", 2))])
def test_with_weights_that_stay_batches_come_to_the_outputs_of_the_whole_graph(graph, name, method, per_batch):
    """Rows that are read are those of the right nodes, calls and layers: each pass makes one more layer exact."""
    model = model_of(name).eval()
    whole = model(graph.x, graph.edge_index).detach()
    run, clusters = InBatches(model, new_history()), clusters_of(graph, 5, method)
    chosen = [list(range(first, min(first + per_batch, 5))) for first in range(0, 5, per_batch)]
    found = torch.zeros_like(whole)
    for passes in range(5):
        if passes == 1:
            assert (found - whole).abs().max() > 1e-3  # of rows that are not there yet, unless there is one layer
        for each in chosen:
            batch = clusters.batch(each)
            found[batch.n_id] = run(batch, "train" if passes < 4 else "validation").detach()
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-11)
    run.binding.release()
    torch.testing.assert_close(model(graph.x, graph.edge_index), whole, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gat", *campaign("gcn", "sage", "own")])
def test_weights_learn_of_messages_of_halo_nodes(graph, name):
    """With a history that is exact, the gradients of the last layer's weights are those of the whole graph."""
    model = model_of(name).eval()
    run, clusters = InBatches(model, new_history()), clusters_of(graph, 5)
    last = [*model.parameters()][-2:]
    for _ in range(4):
        for each in range(5):
            run(clusters.batch([each]))
    for each in range(5):
        batch = clusters.batch([each])
        run(batch).square().sum().backward()
    found = [parameter.grad.clone() for parameter in last]
    run.binding.release()
    model.zero_grad()
    model(graph.x, graph.edge_index).square().sum().backward()
    for own, parameter in zip(found, last):
        torch.testing.assert_close(own, parameter.grad, rtol=1e-9, atol=1e-11)


def test_how_old_rows_are(graph):
    run, clusters = InBatches(model_of("sage"), new_history()), clusters_of(graph, 2)
    one, other = clusters.batch([0]), clusters.batch([1])
    run(one)
    assert run.exchange.take_ages() == (0.0, 1.0)
    for batch in (other, one, other):
        run(batch)
    assert run.exchange.take_ages() == (1.0, 0.0)
    run(one, "validation")
    assert run.exchange.take_ages() == (0.0, 0.0)
    run(other)
    assert run.exchange.take_ages() == (3.0, 0.0)  # validation has left the rows alone, and counted as a step here


def test_tables_are_found_by_all_in_any_order():
    with tempfile.TemporaryFile() as file:
        keys = SharedKeys()
        one, other = (History(3, os.dup(file.fileno()), keys) for _ in range(2))
    first = one.table(("a", 0), (2,), torch.float32)
    second = other.table(("b", 0), (), torch.bfloat16)
    first.rows[1] = 5
    second.rows[2] = 7
    assert other.table(("a", 0), (2,), torch.float32).rows.tolist() == [[0, 0], [5, 5], [0, 0]]
    assert one.table(("b", 0), (), torch.bfloat16).rows.tolist() == [0, 0, 7]
    assert (
        not one.table(("a", 0), (2,), torch.float64).rows.any()
        and not one.table(("a", 1), (2,), torch.float32).rows.any()
    )


class Twice(MessagePassing):
    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.propagate(edge_index, x=self.propagate(edge_index, x=x))


@pytest.mark.parametrize(
    ("conv", "message"),
    [
        (Twice(), "propagates several times in a call"),
        (DirGNNConv(GraphConv(FEATURES, 16)), "reads out-edges"),
        (ChebConv(FEATURES, 16, K=2), "reads out-edges"),
    ],
    ids=["own", "directed", "chebyshev"],
)
def test_refused_models(graph, conv, message):
    batch = clusters_of(graph, 2).batch([0])
    with pytest.raises(ValueError, match=message):
        InBatches(conv.double(), new_history())(batch)


def test_refused_options():
    with pytest.raises(ValueError, match="max_restarts is not supported"):
        GossipStrategy(historical_embeddings=True, max_restarts=1)
    with pytest.raises(ValueError, match="historical_embeddings must be .*'stale'"):
        GossipStrategy(historical_embeddings="stale")


# One device ###################################################################


def module_of(lr: float) -> NodeClassifier:
    return NodeClassifier(build("gcn"), num_classes=CLASSES, lr=lr).double()


def test_one_cluster_of_all_nodes_is_full_graph_training():
    """Halo or none, and the whole graph is what a batch has."""
    found = {}
    for name in ("history", "auto"):
        module = module_of(0.05)
        strategy = "auto" if name == "auto" else GossipStrategy(num_clusters=1, historical_embeddings=True)
        quiet_trainer(strategy, 1).fit(module, datamodule=GraphDataModule(awkward_graph()))
        found[name] = module.state_dict()
    torch.testing.assert_close(found["history"], found["auto"], rtol=1e-9, atol=1e-11)


# Ranks ########################################################################


class Looks(L.Callback):
    """What the history of a worker is in the middle of a run."""

    def __init__(self) -> None:
        self.links = self.bytes = 0
        self.written: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        history = trainer.strategy._history.history
        self.links, self.bytes = os.fstat(history._file).st_nlink, os.fstat(history._file).st_size
        self.written = [int((table.written > 0).sum()) for table in history._tables.values()]


def frozen(rank: int, world_size: int, folder: Path, kind: Any, clusters: int) -> dict[str, Any]:
    module, looks, folder = module_of(0.0), Looks(), folder / "runs"
    folder.mkdir(exist_ok=True)
    strategy = kind(num_clusters=clusters, historical_embeddings=True, assignment="metis", timeout=60)
    logger = CSVLogger(folder, "", "")
    run = new_trainer(folder, "", strategy, world_size, max_epochs=4, logger=logger)
    run.callbacks.append(looks)
    data = GraphDataModule(awkward_graph())
    run.fit(module, datamodule=data)
    in_fit = float(run.callback_metrics["val_loss"])
    [exact] = run.validate(module, datamodule=data, verbose=False)
    rows = [*csv.DictReader((folder / "metrics.csv").open())] if rank == 0 else []
    return {
        "in fit": in_fit,
        "exact": exact["val_loss"],
        "links": looks.links,
        "bytes": looks.bytes,
        "written": looks.written,
        "unknown": [float(row["gossip/halo_unknown"]) for row in rows if row.get("gossip/halo_unknown")],
        "ages": [float(row["gossip/halo_age"]) for row in rows if row.get("gossip/halo_age")],
        "closed": strategy._history is None,
    }


@pytest.mark.parametrize("kind", [ClusterAllReduceStrategy, *campaign(GossipStrategy)])
def test_workers_share_one_history(ranks, tmp_path, kind):
    """With weights that stay, what a worker sees of the graph in batches is all of it, though others computed most of it; and the
    tables have no name that could stay behind, whoever is killed."""
    everyone = ranks.run(3, frozen, tmp_path, kind, 12)
    batches = done(tmp_path / "runs")
    assert kind is GossipStrategy or all(len({*batches[rank]}) < 12 for rank in range(3))
    for found in everyone:
        assert found["in fit"] == pytest.approx(found["exact"], rel=1e-9)
        assert found["links"] == 0 and found["bytes"] in (0, everyone[0]["bytes"]) and found["closed"]
        assert kind is GossipStrategy or set(found["written"]) == {60}
    unknown, ages = everyone[0]["unknown"], everyone[0]["ages"]
    assert unknown[0] > 0 == unknown[-1] and 0 < ages[-1] < 2
