"""The self-check of runs on several data ranks, on concatenated samples and on node sets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from common import quiet_trainer
from node_set_runs import TYPED_MODELS, TypedModule, TypedSamples, graph_of_node_sets
from sample_runs import CONCATENATED, IN_ORDER, MODELS, OVER_TIME, STEPS, Samples, TwoConvs
from test_sample_checks import Tested, checks, data_of
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv, MessagePassing
from torch_geometric.utils import degree, to_dense_adj

from lightning_gnn import DGCLStrategy, GraphDataModule, SpMM1DStrategy, VertexCutStrategy, register_row_rule
from lightning_gnn.checks.record import Finding
from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.extensions.findings import describe_fixes
from lightning_gnn.extensions.mesh import rows as mesh_rows
from lightning_gnn.extensions.mesh import run as mesh_run
from lightning_gnn.extensions.samples import copies as sample_copies
from lightning_gnn.extensions.samples import node_sets
from lightning_gnn.nn.context import UnsupportedModelError

MESHES = {"2x1": (2, 1), "2x2": (4, 2), "1x2": (2, 2)}
"""Number of ranks and of graph ranks; data ranks first in the name."""


class OnTrainer(Tested):
    """A loss with the number of ranks, which covers all ranks already."""

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / self.trainer.world_size


def typed_data() -> GraphDataModule:
    samples = TypedSamples()
    given = dict.fromkeys(("samples", "val_samples", "predict_samples"), samples)
    return GraphDataModule(graph_of_node_sets(), partition="random", global_batch_size=4, **given)


def outcomes(name: str, mesh: str, module: Any = Tested, **options: Any) -> dict[str, Any]:
    """Returns the outcomes of the self-check by stage; names of models with types begin with ``types/``."""
    ranks, graph_ranks = MESHES[mesh]
    if name.startswith("types/"):
        typed = TypedModule(TYPED_MODELS[name[6:]]()).double()
        return checks(typed, typed_data(), ranks=ranks, graph_ranks=graph_ranks, **options)
    made = module((MODELS | CONCATENATED | IN_ORDER)[name]()).double()
    data = data_of(Samples(STEPS if name in OVER_TIME else None), concatenate=name in CONCATENATED)
    return checks(made, data, ranks=ranks, graph_ranks=graph_ranks, **options)


def assert_right(found: dict[str, Any], stages: list[str]) -> None:
    assert [*found] == stages
    assert not any(each.problem or each.not_run or each.refused for each in found.values())


ALL, OF_TYPES = ["fit", "validate", "test", "predict"], ["fit", "validate", "predict"]


RIGHT = ("norms", "gat", "conv_gru", "mesh_graph_net", "types/interaction", "types/hetero")
DAILY = {("norms", "2x2"), ("types/hetero", "2x2"), ("mesh_graph_net", "2x1")}
"""Others are of the campaign."""


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(*each, marks=[] if each in DAILY else pytest.mark.campaign)
        for each in ((name, mesh) for name in RIGHT for mesh in MESHES)
    ],
)
def test_right_steps_pass(name, mesh):
    assert_right(outcomes(name, mesh), OF_TYPES if name.startswith("types/") else ALL)


@pytest.mark.campaign
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("strategy", [SpMM1DStrategy, VertexCutStrategy])
@pytest.mark.parametrize("name", ["gcn", "norms", "edge_reader", "types/graph_conv"])
def test_right_steps_pass_under_other_strategies(name, strategy, mesh):
    assert_right(outcomes(name, mesh, strategy=strategy), OF_TYPES if name.startswith("types/") else ALL)


def test_a_single_part_keeps_the_order_of_edges():
    assert_right(outcomes("ordered_conv", "2x1"), ALL)
    with pytest.raises(UnsupportedModelError):
        outcomes("ordered_conv", "1x2")


class Noise(torch.nn.Module):
    """Random numbers per sample, per node, and for all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GraphConv(5, 3)

    def forward(self, batch: Data) -> Tensor:
        x = batch.x + torch.rand(len(batch.x), 1, 1, dtype=batch.x.dtype) + torch.randn_like(batch.x)
        return self.conv(x * torch.rand(5).double(), batch.edge_index)


@pytest.mark.parametrize("mesh", [pytest.param("2x1", marks=pytest.mark.campaign), "2x2"])
def test_random_numbers_equal_one_device(mesh, monkeypatch):
    monkeypatch.setitem(MODELS, "noise", Noise)
    assert_right(outcomes("noise", mesh), ALL)


# Wrong models #################################################################


@torch.library.custom_op("sample_self_check::mixes_rows", mutates_args=())
def mixes_rows(x: Tensor) -> Tensor:
    """Mixes the first dimension, although it has a rule for rows: samples, or nodes of all samples."""
    return x - x.mean(0)


mixes_rows.register_autograd(lambda ctx, grad: grad)
register_row_rule(torch.ops.sample_self_check.mixes_rows)
mix = torch.ops.sample_self_check.mixes_rows


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GraphConv(5, 3)

    def forward(self, batch: Data) -> Tensor:
        return mix(self.conv(batch.x, batch.edge_index))


class MixedSites(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = TYPED_MODELS["graph_conv"]()

    def forward(self, batch: Any) -> Tensor:
        return mix(self.model(batch))


@pytest.mark.parametrize(
    ("kind", "meshes"),
    [
        ("stacked", ("2x1", "2x2")),
        pytest.param("types", ("2x1", "2x2"), marks=pytest.mark.campaign),
        pytest.param("concatenated", ("2x1", "1x2", "2x2"), marks=pytest.mark.campaign),
    ],
)
def test_wrong_models_are_found(kind, meshes, monkeypatch):
    """Samples are mixed on several data ranks, and nodes of copies of the graph on graph ranks."""
    monkeypatch.setitem(CONCATENATED if kind == "concatenated" else MODELS, "mixed", Mixed)
    monkeypatch.setitem(TYPED_MODELS, "mixed", MixedSites)
    name = "types/mixed" if kind == "types" else "mixed"
    for mesh in MESHES:
        if mesh not in meshes:
            assert_right(outcomes(name, mesh), OF_TYPES if kind == "types" else ALL)
            continue
        parts = "on two data ranks" if mesh == "2x1" else "in two parts"
        with pytest.raises(UnsupportedModelError, match=f"training_step does not match .*{parts}: the output of 'model'"):
            outcomes(name, mesh)


def test_losses_with_the_number_of_ranks_are_found():
    with pytest.raises(UnsupportedModelError, match="remove the number of ranks"):
        outcomes("gcn", "2x1", OnTrainer)


class MixedLogs(Tested):
    """Only a logged value is wrong."""

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.log("val_loss", mix(batch.x).square().mean())


def test_logged_values_are_compared_between_data_ranks():
    """The run on one part, which excuses values that depend on the order of rows, has one data rank."""
    with pytest.raises(UnsupportedModelError, match="validation_step does not match .*the logged 'val_loss'"):
        outcomes("gcn", "2x1", MixedLogs)
    assert_right(outcomes("gcn", "1x2", MixedLogs), ALL)


class DenseConv(MessagePassing):
    """Weights by a dense adjacency of ``edge_index``, in which duplicate edges would be one; as DConv of PyG Temporal."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__(aggr="sum")
        self.map = torch.nn.Linear(size, out)

    def forward(self, x: Tensor, edge_index: Tensor, *_: Any) -> Tensor:
        adjacency = to_dense_adj(edge_index)[0]
        reverse = adjacency.t().nonzero().t()
        return self.map(self.propagate(reverse, x=x, weight=1 / adjacency.sum(1)[edge_index[0]]))

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1) * x_j


class SpreadConv(MessagePassing):
    """Divides by out-degrees, which ranks compute from their own edges."""

    def __init__(self, size: int, out: int) -> None:
        super().__init__()
        self.map = torch.nn.Linear(size, out)

    def forward(self, x: Tensor, edge_index: Tensor, *_: Any) -> Tensor:
        count = degree(edge_index[0], x.size(-2), x.dtype).clamp(min=1)
        return self.propagate(edge_index, x=self.map(x) / count.view(-1, 1))


def test_duplicate_edges_are_left_out_if_code_does_not_support_them(monkeypatch):
    monkeypatch.setitem(MODELS, "dense", lambda: TwoConvs(DenseConv, True))
    assert_right(outcomes("dense", "2x1"), ALL)


@pytest.mark.parametrize("conv", [DenseConv, SpreadConv])
def test_convs_that_compute_from_edges_are_named(conv, monkeypatch):
    monkeypatch.setitem(MODELS, "own", lambda: TwoConvs(conv, True))
    name = conv.__name__
    with pytest.raises(UnsupportedModelError, match=rf"Check whether {name} \('model.first'\) computes") as error:
        outcomes("own", "1x2")
    for words in (f"register an adapter for {name}", "or set graph_ranks=1", "To train anyway", r"dense matrix [N, N]"):
        assert words in str(error.value)


def test_fixes_without_samples_and_for_convs_of_pyg():
    class Own(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SpreadConv(4, 2)

        def training_step(self, batch: Data, batch_idx: int) -> Tensor:
            return self.conv(batch.x, batch.edge_index).square().mean()

    graph = planted_partition(num_nodes=60, num_features=4)
    with pytest.raises(UnsupportedModelError, match=r"Check whether SpreadConv \('conv'\).*register an adapter") as error:
        checks(Own(), GraphDataModule(graph))
    assert "graph_ranks" not in str(error.value)

    def fixes(where: str, parts: int = 2, conv: Any = GraphConv) -> str:
        layout = SimpleNamespace(parts=parts)
        run = SimpleNamespace(strategy="DGCLStrategy", module=TwoConvs(conv, True), layout=layout, samples=None)
        return describe_fixes(run, Finding("training_step", where, 0.1, "Why."))

    assert fixes("the output of 'first' (GraphConv)") == "To train anyway: DGCLStrategy(self_check=False).\nWhy."
    assert fixes("the loss") == fixes("the gradient of 'first.lin_rel.weight'") == fixes("the output of 'first' (GraphConv)")
    assert fixes("the loss") == fixes("the gradient of 'first.lin_rel.weight' (GraphConv)")
    assert fixes("the loss") == fixes("the output of 'first' (SpreadConv)", 1, SpreadConv)  # a part has all edges
    assert "Check whether SpreadConv ('first')" in fixes("the output of 'first.map' (Linear)", 2, SpreadConv)


# Wrong rules ##################################################################


def keep_sums(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data ranks do not add their sums."""
    monkeypatch.setattr(owner, "sum", lambda self, x, operation: x, raising=False)


def confuse_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data ranks have consecutive samples in place of each second one."""
    positions = mesh_rows.positions_of

    def consecutive(data_rank: int, data_ranks: int, total: int) -> Tensor:
        counts = [len(positions(rank, data_ranks, total)) for rank in range(data_ranks)]
        return torch.arange(total).split(counts)[data_rank]

    monkeypatch.setattr(mesh_rows, "positions_of", consecutive)


def keep_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of copies of the graph include the rows of one data rank."""
    monkeypatch.setattr(mesh_run.SampleRanks, "include_all_ranks", lambda self, context: context)


def confuse_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of samples are in the order of data ranks."""

    def gather(self: Any, values: Tensor, total: int) -> Tensor:
        sizes = [len(mesh_run.positions_of(rank, self._mesh.data.size, total)) for rank in range(self._mesh.data.size)]
        return mesh_run.Ranks(self._mesh.data).gather_rows(values, sizes, "Values of samples")[0]

    monkeypatch.setattr(mesh_run.SampleRanks, "gather_samples", gather)


def confuse_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies have the halo nodes of the first copy."""
    local_ids = sample_copies._local_ids

    def wrong(halo: Any, offsets: Any, rank: int, copies: int) -> Any:
        found, owned = local_ids(halo, offsets, rank, copies), offsets[rank + 1] - offsets[rank]
        found[:, owned:] = found[:1, owned:]
        return found

    monkeypatch.setattr(sample_copies, "_local_ids", wrong)


def confuse_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples have the first nodes of their type in place of the nodes of the rank."""
    from lightning_gnn.extensions.samples import small_graph

    def first(of: Any) -> Any:
        return {kind: [ids.argsort() for ids in parts] for kind, parts in node_sets.rows_of_parts(of).items()}

    monkeypatch.setattr(small_graph, "rows_of_parts", first)


def confuse_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples count as equal on all graph ranks."""
    tensors = node_sets.TypedSampleBatch.sample_tensors.fget
    monkeypatch.setattr(
        node_sets.TypedSampleBatch,
        "sample_tensors",
        property(lambda self: ((x, kind, None if x.size(-1) == 3 else dim) for x, kind, dim in tensors(self))),
    )


@pytest.mark.parametrize(
    ("confuse", "name", "mesh"),
    [
        (partial(keep_sums, mesh_rows.SampleMode), "gcn", "2x1"),
        pytest.param(partial(keep_sums, mesh_rows.SampleMode), "types/graph_conv", "2x2", marks=pytest.mark.campaign),
        pytest.param(confuse_samples, "gcn", "2x2", marks=pytest.mark.campaign),
        (confuse_samples, "mesh_graph_net", "2x1"),
        pytest.param(confuse_nodes, "gcn", "1x2", marks=pytest.mark.campaign),
        (confuse_nodes, "types/graph_conv", "1x2"),
        pytest.param(confuse_types, "types/graph_conv", "1x2", marks=pytest.mark.campaign),
        pytest.param(confuse_copies, "gat", "1x2", marks=pytest.mark.campaign),
        (confuse_copies, "edge_reader", "2x2"),
        (keep_statistics, "norms", "2x1"),
        (confuse_numbers, "gat", "2x1"),
    ],
)
def test_wrong_rules_are_found(confuse: Callable[[Any], None], name, mesh, monkeypatch):
    confuse(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="training_step does not match|must be equal on all ranks"):
        outcomes(name, mesh)


def test_module_is_restored():
    module = Tested(CONCATENATED["norms"]()).double()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    checks(module, data_of(Samples(), concatenate=True), ranks=4, graph_ranks=2)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert module.device_mesh is None and not any("forward" in vars(each) for each in module.modules())


def fit_on_ranks(rank: int, world_size: int, graph_ranks: int, is_wrong: bool) -> Any:
    L.seed_everything(0, verbose=False)
    module = Tested((Mixed if is_wrong else MODELS["gcn"])()).double()
    strategy = DGCLStrategy(graph_ranks=graph_ranks, timeout=60)
    try:
        quiet_trainer(strategy, world_size, self_check=True, max_epochs=1).fit(module, datamodule=data_of(Samples()))
    except UnsupportedModelError as error:
        return str(error)
    return [*strategy.checks._outcomes], len(module.losses)


def test_ranks_share_the_outcome(ranks):
    """One of the graph ranks of the first data rank runs the check of a stage."""
    assert ranks.run(2, fit_on_ranks, 1, False) == [(ALL, 3)] * 2
    first, second = ranks.run(2, fit_on_ranks, 1, True)
    assert first == second and "on two data ranks: the output of 'model'" in first


@pytest.mark.campaign
def test_ranks_of_a_mesh_share_the_outcome(ranks):
    assert ranks.run(4, fit_on_ranks, 2, False) == [(ALL, 3)] * 4
    assert len(set(ranks.run(4, fit_on_ranks, 2, True))) == 1
