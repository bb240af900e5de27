"""Rows of nodes of some types, each at its node's owner, learn what they learn on one device. Gloo ranks in the pool."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from common import Recorder, assert_same, campaign, outcome, quiet_trainer
from test_hetero import STRATEGIES, Layers, Trained, sages
from test_hetero_sampling import SIZES, typed_graph, uneven
from torch_geometric.data import HeteroData

from lightning_gnn import DistributedEmbedding, GraphDataModule, SamplingStrategy
from lightning_gnn.datamodules.graph import check_fits
from lightning_gnn.partition.layout import Types

WITHOUT = ("author", "topic")


def graph() -> HeteroData:
    """Authors and topics have no features."""
    found = typed_graph()
    del found["author"].x
    found["author"].num_nodes = SIZES["author"]
    return found


class Tables(torch.nn.Module):
    """A table per type without features."""

    def __init__(self, optimizer: Any = "adam", staleness: int = 0) -> None:
        super().__init__()
        how: dict[str, Any] = {
            "optimizer": optimizer,
            "lr": 0.05 if optimizer == "adam" else 1.0,
            "staleness": staleness,
        }
        self.tables = torch.nn.ModuleDict(
            {name: DistributedEmbedding(SIZES[name], 4, node_type=name, **how).double() for name in WITHOUT}
        )
        self.model, whole = Layers(sages).double(), graph()
        with torch.no_grad():  # its layers look at their input once
            self.model(
                {**whole.x_dict, **{name: torch.zeros(SIZES[name], 4).double() for name in WITHOUT}},
                whole.edge_index_dict,
            )

    def forward(self, batch: HeteroData) -> torch.Tensor:
        x = {**batch.x_dict, **{name: table(batch[name].n_id) for name, table in self.tables.items()}}
        return self.model(x, batch.edge_index_dict)["paper"]


class WhereThereAreAny(Tables):
    """A rank whose batch has no topics does not look at their edges."""

    def forward(self, batch: HeteroData) -> torch.Tensor:
        authors, topics = (self.tables[name](batch[name].n_id) for name in WITHOUT)
        topics = topics if len(topics) else torch.zeros(0, 4).double()
        return self.model({**batch.x_dict, "author": authors, "topic": topics}, batch.edge_index_dict)["paper"]


def learned(rank: int, world_size: int, strategy: str | None, optimizer: str, data: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    made = Trained(Tables(optimizer)).double()
    chosen: Any = "auto"
    if strategy == "sampling":
        options: dict[str, Any] = {"num_neighbors": [-1, -1], "batch_size": 1000}
        chosen = SamplingStrategy(timeout=60, **options)
    elif strategy is not None:
        chosen = STRATEGIES[strategy](timeout=60, self_check=False)
    recorder = Recorder()
    return outcome(
        quiet_trainer(chosen, world_size, callbacks=[recorder]), made, GraphDataModule(graph(), **data), recorder
    )


@cache
def on_one_device(optimizer: str) -> dict[str, Any]:
    return learned(0, 1, None, optimizer, {})


@pytest.mark.parametrize(
    ("strategy", "optimizer", "data"),
    [
        ("dgcl", "adam", {"partition": uneven()}),
        ("sampling", "sgd", {"partition": uneven()}),
        *campaign(("vertex_cut", "adam", {}), ("spmm_1d", "sgd", {}), ("sampling", "adam", {})),
    ],
)
def test_tables_of_types_learn_what_they_learn_on_one_device(ranks, strategy, optimizer, data):
    expected = on_one_device(optimizer)
    begun = DistributedEmbedding(SIZES["topic"], 4, node_type="topic").double()(torch.arange(SIZES["topic"]))
    name = "model.tables.topic.weight"
    assert (expected["weights"][name] - begun).abs().max() > 0.01
    first, *others = ranks.run(3, learned, strategy, optimizer, data)
    assert_same(first, expected, rtol=1e-8, atol=1e-10)
    for found in others:  # which have no rows after training
        assert found["weights"][name].shape == (0, 4)
        assert_same({**found, "weights": expected["weights"]}, expected, rtol=1e-8, atol=1e-10)


def skips(rank: int, world_size: int) -> int:
    """Trains a model that leaves a table's rows out on ranks whose batches have no nodes of the type."""
    torch.manual_seed(1)
    made = Trained(WhereThereAreAny()).double()
    strategy = SamplingStrategy(num_neighbors=[1], batch_size=2, timeout=20)
    quiet_trainer(strategy, world_size, limit_val_batches=0).fit(made, datamodule=GraphDataModule(graph()))
    return int(made.model.tables["topic"].state_dict()["step"])


def test_ranks_step_alike_where_a_batch_has_no_nodes_of_a_type(ranks):
    steps = ranks.run(2, skips)
    assert steps[0] > 3


def test_types_begin_with_rows_of_their_own():
    rows = [DistributedEmbedding(5, 4, node_type=name)(torch.arange(5)) for name in WITHOUT]
    assert not torch.isclose(*rows).any()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"num_nodes": 6}, "node_type=None, but the graph has node types .* Set the type of its nodes"),
        ({"num_nodes": 6, "node_type": "venue"}, "node_type='venue', but the graph has node types"),
        ({"num_nodes": 7, "node_type": "topic"}, "num_nodes=7, but the graph has 6 nodes of type 'topic'"),
    ],
)
def test_tables_of_no_type_of_the_graph_are_refused(table, words, tmp_path):
    made = Trained(DistributedEmbedding(dim=4, **table))
    trainer = quiet_trainer("auto", 1)
    with pytest.raises(ValueError, match=words):
        trainer.fit(made, datamodule=GraphDataModule(graph(), partition_dir=tmp_path))


def test_a_table_of_a_type_is_refused_for_a_graph_without():
    one = torch.tensor([5]).numpy()
    made = torch.nn.ModuleList([DistributedEmbedding(5, 4, node_type="topic")])
    with pytest.raises(ValueError, match="but the graph has no types. Remove node_type"):
        check_fits(made, SimpleNamespace(types=Types.none(one, one)))
