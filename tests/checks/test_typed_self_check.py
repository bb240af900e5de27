"""The self-check on graphs with types: what looks across a rank's nodes of a type is found and named, and right models pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from common import campaign
from test_hetero import STRATEGIES, OfAll, Trained, module, sages
from test_hetero_sampling import CLASSES, SIZES, typed_graph
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroDictLinear

from lightning_gnn.checks.self_check import SelfCheck, self_check
from lightning_gnn.checks.small_graph import FORM
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard, split_graph
from lightning_gnn.extensions.node_types.graph import prepare_hetero
from lightning_gnn.extensions.node_types.small_graph import typed_small_graph
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategy.scheme import bind_module, twin_of

MAKE = partial(typed_small_graph, input_type="paper")


def shard(rank: int = 0, part: torch.Tensor | None = None) -> Shard:
    graph = prepare_hetero(typed_graph())
    part = torch.arange(71) % 2 if part is None else part
    return split_graph(graph, part.numpy(), LayoutSpec("edge_cut", 2), input_type="paper")[rank]


def check(made: Any, stage: str = "fit", strategy: str = "dgcl", of: Shard | None = None, **options: Any) -> SelfCheck:
    scheme = twin_of(STRATEGIES[strategy]().scheme)
    of, bind, layout = of or shard(), partial(bind_module, scheme, meter=Meter()), scheme.layout(2)
    return self_check(made, of.batch, bind, stage, layout=layout, make=MAKE, num_classes=CLASSES, **options)


@pytest.mark.parametrize(("strategy", "stage"), [("dgcl", "fit"), *campaign(("vertex_cut", "fit"), ("spmm_1d", "fit"))])
@pytest.mark.parametrize("name", ["mixed", "hgt", "sage", *campaign("gat", "others", "han")])
def test_right_models_pass(name, strategy, stage):
    found = check(module(name), stage, strategy)
    assert (found.problem, found.not_run, found.refused) == (None, None, None)


@pytest.mark.parametrize(("strategy", "stage"), [("vertex_cut", "test"), ("spmm_1d", "predict")])
def test_a_part_without_nodes_of_some_type(stage, strategy):
    part = torch.zeros(71, dtype=torch.long)
    part[25:40] = 1  # authors and topics are the other's
    found = check(module("mixed"), stage, strategy, shard(1, part))
    assert (found.problem, found.not_run, found.refused) == (None, None, None)


def test_small_graphs_tell_types_by_their_sizes():
    small = MAKE(shard().batch, ["train_mask"], FORM, 0, CLASSES)
    graph, part = small.graph, torch.from_numpy(small.part)
    assert isinstance(graph, HeteroData)
    graph.validate()
    of_types = part.split([graph[name].num_nodes for name in graph.node_types])
    dimensions = [int((of == rank).sum()) for of in of_types for rank in (0, 1)]
    dimensions += [len(of) for of in of_types]
    paper = of_types[graph.node_types.index("paper")]
    assert dimensions[2:4] == [*FORM.nodes]
    for kind in graph.edge_types:
        owner = of_types[graph.node_types.index(kind[2])][graph[kind].edge_index[1]]
        assert (of_types[graph.node_types.index(kind[0])][graph[kind].edge_index[0]] != owner).any()
        dimensions += [int((owner == 0).sum()), int((owner == 1).sum()), len(owner)]
    assert len({*dimensions}) == len(dimensions)
    assert bool(graph["paper"].train_mask[paper == 1].any())
    for mask in ("val_mask", "test_mask"):
        assert all(graph["paper"][mask][paper == rank].any() for rank in (0, 1))


class Wrong(OfAll):
    """`wrong` is what goes wrong with rows by type."""

    def __init__(self, wrong: Any) -> None:
        super().__init__(sages(CLASSES))
        self.wrong = wrong
        self.last = HeteroDictLinear(CLASSES, CLASSES, ["paper", "author", "topic"])

    def forward(self, batch: HeteroData) -> torch.Tensor:
        x = {**batch.x_dict, "topic": self.topics(batch["topic"].n_id)}
        return self.last(self.wrong(self, self.model(x, batch.edge_index_dict), batch))["paper"]


def centred(model: Wrong, x: dict[str, torch.Tensor], batch: HeteroData) -> dict[str, torch.Tensor]:
    return {**x, "author": x["author"] - x["author"].mean(0)}


def counted(model: Wrong, x: dict[str, torch.Tensor], batch: HeteroData) -> dict[str, torch.Tensor]:
    return {**x, "paper": x["paper"] / len(x["paper"])}


def neighbours(model: Wrong, x: dict[str, torch.Tensor], batch: HeteroData) -> dict[str, torch.Tensor]:
    source, target = batch["author", "writes", "paper"].edge_index
    known = source < len(x["author"])
    rows = torch.zeros_like(x["paper"]).index_add(0, target[known], x["author"][source[known]])
    return {**x, "paper": x["paper"] + rows}


def drawn(model: Wrong, x: dict[str, torch.Tensor], batch: HeteroData) -> dict[str, torch.Tensor]:
    return {**x, "paper": x["paper"] * torch.rand(1)}


def per_node(model: Wrong, x: dict[str, torch.Tensor], batch: HeteroData) -> dict[str, torch.Tensor]:
    noise = {name: torch.rand(len(rows), 1) for name, rows in x.items()}  # each rank's own, as in dropout
    return {name: rows * (1 + noise[name]) for name, rows in x.items()}


WRONG = {"centred": centred, "counted": counted, "neighbours": neighbours, "drawn": drawn}


def made(model: torch.nn.Module) -> Trained:
    torch.manual_seed(1)
    graph = typed_graph()
    graph["topic"].n_id = torch.arange(SIZES["topic"])
    wrapped = Trained(model).double()
    with torch.no_grad():
        wrapped.model(graph)
    return wrapped


@pytest.mark.parametrize("name", WRONG)
def test_what_looks_across_nodes_is_exact_or_refused_at_its_line(name):
    found = check(made(Wrong(WRONG[name])))
    if name == "neighbours":
        assert "test_typed_self_check.py" in str(found.refused) and "edge_index" in str(found.refused), found
    else:
        assert (found.problem, found.not_run, found.refused) == (None, None, None), found


def test_numbers_for_each_node_are_none_of_the_check():
    assert check(made(Wrong(per_node))).problem is None


class OfMoreRows(Trained):
    """A loss over rows that the mask does not have."""

    def training_step(self, batch: HeteroData, batch_idx: int) -> torch.Tensor:
        paper = batch["paper"]
        chosen = paper.train_mask | paper.val_mask
        return F.cross_entropy(self.model(batch)[chosen], paper.y[chosen], ignore_index=-1)


class Logs(Trained):
    def validation_step(self, batch: HeteroData, batch_idx: int) -> None:
        self.log("papers", float(batch["paper"].num_nodes), batch_size=1)


@pytest.mark.parametrize(("kind", "stage"), [(OfMoreRows, "fit"), (Logs, "validate")])
def test_losses_and_logged_values(kind, stage):
    found = check(kind(module("sages").model).double(), stage)
    assert (found.problem, found.not_run, found.refused) == (None, None, None), found
