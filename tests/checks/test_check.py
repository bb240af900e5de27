"""The parity check: models pass under all schemes on Cora, also where they look across nodes; wrong ones are named. No ranks."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import CLASSES, FEATURES, UserModule, awkward_graph, build, campaign, examples
from hypothesis import given
from hypothesis import strategies as st
from test_self_check import (
    BranchesOnCounts,
    CentredInAModule,
    CentredInline,
    CountsCalls,
    Float32Only,
    Model,
    NotSaid,
    OutDegree,
    SaidWrong,
    SourceRows,
    Swapped,
)
from torch_geometric.datasets import Planetoid
from torch_geometric.nn import GCNConv, GINConv
from torch_geometric.utils import dropout_edge

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, check_parity
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.tools.cli import main
from lightning_gnn.tools.parity import ball, explain_steps, some_of

EXACT = ("dgcl", "cover", "spmm_1d", "spmm_15d", "spmm_2d", "vertex_cut")


# Right models #################################################################


@pytest.mark.parametrize("kind", campaign("library", "user"))
def test_right_models_pass_on_cora(shared, kind):
    data = GraphDataModule(Planetoid(str(shared / "planetoid"), "Cora"))
    if kind == "library":
        module: Any = NodeClassifier(build("gcn_batch_norm", 1433, 7))
        report = check_parity(module, data, EXACT, devices=4)
    else:
        module = UserModule(build("gat", 1433, 7), 7)
        report = check_parity(module, data, ["dgcl", "spmm_15d", "vertex_cut"], devices=3, nodes=700)
        assert "A subgraph of 700 of 2,708 nodes" in str(report)
    assert report.ok, str(report)
    assert {each.verdict for each in report.schemes} == {"same"} and report.dtype == "float64"
    for each in report.schemes:
        assert {"training_step", "validation_step", "test_step", "predict_step"} <= set(each.steps)
        assert all(value is not None and value < 1e-6 for value in each.differences.values()), each


class Augmented(Model):
    """What is random as in PyG's own models: it is shared, and needs no option."""

    def between(self, x, edge_index):
        x = F.dropout(x, 0.5, self.training)
        return self.third(x, dropout_edge(edge_index, 0.3, training=self.training)[0])

    def __init__(self) -> None:
        super().__init__()
        self.third = GCNConv(8, 8)


class WeightedMean(UserModule):
    def training_step(self, batch, batch_idx):
        out = self.model(batch.x, batch.edge_index)
        chosen = batch.train_mask & (batch.y > 0)
        loss = F.cross_entropy(out[chosen], batch.y[chosen], reduction="sum") / chosen.sum().clamp(min=1)
        return {"loss": loss, "loss_weight": chosen.sum()}


@pytest.mark.parametrize(
    "module", [UserModule(Augmented()), WeightedMean(build("sage")), UserModule(build("gin_batch_norm"))]
)
def test_right_models_pass(module):
    report = check_parity(module, GraphDataModule(awkward_graph()), ["dgcl", "vertex_cut", "cover"])
    assert report.ok, str(report)


def test_every_scheme_is_told_of_and_nothing_is_left_behind():
    module, data = NodeClassifier(build("gcn"), num_classes=CLASSES), GraphDataModule(awkward_graph())
    before = copy.deepcopy(module.state_dict()), set(vars(module))
    streams = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    report = check_parity(module, data)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    verdicts = {each.scheme: each.verdict for each in report.schemes}
    assert report.ok and {name for name, verdict in verdicts.items() if verdict == "same"} >= set(EXACT) - {"spmm_2d"}
    assert verdicts["spmm_2d"] == "not compared" and "need a square number of ranks" in str(report)
    for name in ("sampling", "gossip", "cluster_allreduce"):
        assert verdicts[name] == "evaluation same"
    [cached] = [each for each in report.schemes if each.scheme == "vertex_cut_cached"]
    assert cached.verdict == "approximate" and 1e-5 < cached.differences["outputs"] < 1
    assert "auto_gnn" not in verdicts and str(report).count("sampled mini-batches") == 1
    assert torch.equal(after[0], streams[0]) and after[1:] == streams[1:]
    torch.testing.assert_close(module.state_dict(), before[0], rtol=0, atol=0)
    assert set(vars(module)) == before[1] and data.source is not None
    json.dumps(report.as_dict())


# Models that look across nodes ###############################################


class ByHand(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, training=True).relu()


class NormalisedByHand(CentredInAModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = ByHand()


class NotHandled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = GINConv(torch.nn.InstanceNorm1d(8))

    def between(self, x, edge_index):
        return self.norm(x, edge_index)


class SoftmaxOverNodes(Model):
    def between(self, x, edge_index):
        return x.softmax(0)


class AttendsToAll(Model):
    """A weighted sum of all nodes' rows."""

    def between(self, x, edge_index):
        return x + x.sum(1).softmax(0) @ x


class DividesByCount(Model):
    def between(self, x, edge_index):
        return x / x.size(0)


class ReadsOut(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 8)

    def between(self, x, edge_index):
        return x + self.head(x.mean(0, keepdim=True))


class Noise(Model):
    def between(self, x, edge_index):
        return x + 0.1 * torch.rand_like(x)


class OneScale(Model):
    def between(self, x, edge_index):
        return x * torch.rand(1)


class Shuffles(Model):
    def between(self, x, edge_index):
        return x + 0.1 * x[torch.randperm(x.size(0))]


def module_of(kind: type[Model]) -> UserModule:
    torch.manual_seed(0)
    return UserModule(kind())


class Step(UserModule):
    """A loss over other rows than the labelled nodes of the mask."""

    def __init__(self, loss: str) -> None:
        super().__init__(build("gcn"))
        self.kind = loss

    def training_step(self, batch, batch_idx):
        out = self.model(batch.x, batch.edge_index)
        if self.kind == "all nodes":
            return out.square().mean()
        chosen = batch.train_mask & (batch.y > 0)
        how = "sum" if self.kind == "sum" else "mean"
        return F.cross_entropy(out[chosen], batch.y[chosen], reduction=how)


class NoMean(UserModule):
    def validation_step(self, batch, batch_idx):
        out = self.model(batch.x, batch.edge_index)[batch.val_mask]
        self.log("val_std", out.std(), sync_dist=True)


class Seen(UserModule):
    def __init__(self) -> None:
        super().__init__(build("gcn"))
        self.register_buffer("seen", torch.zeros(FEATURES))

    def training_step(self, batch, batch_idx):
        self.seen += batch.x.mean(0)
        return super().training_step(batch, batch_idx)


def uneven(dtype: torch.dtype = torch.float64) -> GraphDataModule:
    """Parts of different sizes, so that no mean is right by luck."""
    return GraphDataModule(awkward_graph(dtype=dtype), partition=np.repeat([0, 1], [17, 43]))


EXACT_STEPS: dict[str, Callable[[], Any]] = {
    "centred": lambda: module_of(CentredInAModule),
    "centred inline": lambda: module_of(CentredInline),
    "batch norm by hand": lambda: module_of(NormalisedByHand),
    "softmax over nodes": lambda: module_of(SoftmaxOverNodes),
    "attention to all nodes": lambda: module_of(AttendsToAll),
    "divided by the count": lambda: module_of(DividesByCount),
    "readout": lambda: module_of(ReadsOut),
    "noise": lambda: module_of(Noise),
    "one scale": lambda: module_of(OneScale),
    "shuffles": lambda: module_of(Shuffles),
    "source rows": lambda: module_of(SourceRows),
    "branches on counts": lambda: module_of(BranchesOnCounts),
    "mean over all nodes": lambda: Step("all nodes"),
    "sum": lambda: Step("sum"),
    "mean over some": lambda: Step("some"),
    "no mean": lambda: NoMean(build("gcn")),
    "buffer": Seen,
}


@pytest.mark.parametrize("name", EXACT_STEPS)
def test_what_looks_across_nodes_is_exact(name):
    report = check_parity(EXACT_STEPS[name](), uneven(), ["dgcl", "cover"])
    assert report.ok, str(report)
    assert [each.verdict for each in report.schemes] == ["same", "same"]


WRONG: dict[str, tuple[type[Model], str]] = {
    "norm not handled": (
        NotHandled,
        r"training_step raises UnsupportedModelError\. 'model.norm.nn' \(InstanceNorm1d\) computes statistics over all nodes",
    ),
    "counts calls": (
        CountsCalls,
        r"the output of 'model.second.lin' \(Linear\) differs by \d.* A second run on one device",
    ),
    "out-degrees": (OutDegree, r"the output of 'model.conv' \(DegreeConv\) differs by \d"),
    "unknown backward": (
        NotSaid,
        r"'model.second' \(GCNConv\) raises NotExactError\. \S*test_self_check.py:\d+: .*by Swapped, whose backward has no row "
        r"rule\. If it is row-wise, register it: lightning_gnn.register_row_rule\(Swapped\)\.$",
    ),
    "wrong backward": (
        SaidWrong,
        r"the gradient of 'model.first.lin.weight' differs by \d.*the backward of a torch.autograd.Function",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_models_are_caught_with_layer_and_cause(name):
    kind, text = WRONG[name]
    report = check_parity(module_of(kind), uneven(), ["dgcl"])
    [finding] = report.findings
    assert not report.ok and finding.startswith("training_step: ") and re.search(text, finding), finding


def test_a_module_for_float32_only_is_checked_as_it_is():
    report = check_parity(module_of(Float32Only), uneven(torch.float32), ["dgcl"])
    assert report.ok and report.dtype != "float64" and "does not run in float64" in str(report)


def test_a_sum_may_be_said_to_be_one():
    assert check_parity(Step("sum"), uneven(), [DGCLStrategy()]).ok


def test_one_finding_for_all_schemes():
    report = check_parity(module_of(OutDegree), GraphDataModule(awkward_graph()), ["dgcl", "cover"])
    [schemes] = report.findings.values()
    assert schemes == ["dgcl", "cover"] and "dgcl, cover: training_step: the output of 'model.conv'" in str(report)


class Broken(UserModule):
    def training_step(self, batch, batch_idx):
        raise KeyError("no such layer")

    validation_step = test_step = predict_step = training_step


class OneBroken(UserModule):
    def test_step(self, batch, batch_idx):
        raise KeyError("no such layer")


def test_what_cannot_be_compared_is_said():
    data = GraphDataModule(awkward_graph())
    report = check_parity(OneBroken(build("gcn")), data, ["dgcl"])
    assert report.ok and report.dtype == "float64"
    assert "test_step was skipped: on one device, it raises KeyError" in str(report)
    with pytest.raises(RuntimeError, match="training_step does not run on one device: KeyError"):
        check_parity(Broken(build("gcn")), data, ["dgcl"])
    for options, message in (
        ({"strategies": ["dgcl2"]}, "got 'dgcl2'"),
        ({"devices": 1}, "at least 2 ranks"),
        ({"nodes": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            check_parity(UserModule(build("gcn")), data, **options)  # type: ignore[arg-type]


# What ranks send ##############################################################


class ReadsOutPerClass(UserModule):
    """Operations over all nodes, each on a line of its own."""

    def training_step(self, batch, batch_idx):
        rows = self.model(batch.x, batch.edge_index)
        centre = rows.mean(0)
        return (rows - centre).square().sum()


def line_of(code: str) -> str:
    [number] = [
        number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.strip() == code
    ]
    return f"test_check.py:{number}"


def test_messages_are_told_with_line_operation_rows_and_bytes():
    steps = explain_steps(ReadsOutPerClass(build("gcn")), uneven(torch.float32), DGCLStrategy())
    assert [each.step for each in steps] == ["training_step", "validation_step", "test_step", "predict_step"]
    found = {
        (each.direction, Path(each.line).name, each.operation, each.rows): max(sent)
        for each, sent in steps[0].bytes_sent.items()
    }
    model, mean = line_of("rows = self.model(batch.x, batch.edge_index)"), line_of("centre = rows.mean(0)")
    loss = line_of("return (rows - centre).square().sum()")
    nodes = "nodes along dimension 0"
    assert found["forward", mean, "mean", nodes] == found["forward", loss, "sum", nodes] == 256
    assert found["backward", loss, "gradient of sub", nodes] == 256
    layer = "Halo exchange of layer 'model.convs.1'", "halo rows along dimension 0"
    assert found[("forward", model, *layer)] == found[("backward", model, *layer)] > 0
    parameters = sum(each.numel() for each in build("gcn").parameters())
    assert parameters * 4 <= found["backward", "", "Sum of gradients", ""] < parameters * 5
    json.dumps([each.as_dict() for each in steps])


# Samples ######################################################################


@examples(20)
@given(num_nodes=st.integers(1, 60), seed=st.integers(0, 3))
def test_samples_are_induced_and_have_training_nodes(num_nodes, seed):
    graph, every = some_of(prepare_graph(awkward_graph()), None)
    (found, ids), (again, _) = ball(graph, num_nodes, seed), ball(graph, num_nodes, seed)
    assert every.tolist() == [*range(len(graph.x))] and ids.tolist() == found.n_id.tolist()
    assert len(found.x) == num_nodes and found.train_mask.any() and torch.equal(found.n_id, again.n_id)
    inside = torch.isin(graph.edge_index, found.n_id).all(0)
    assert torch.equal(found.e_id, inside.nonzero().view(-1))
    assert torch.equal(found.n_id[found.edge_index], graph.edge_index[:, inside])
    assert torch.equal(found.x, graph.x[found.n_id]) and torch.equal(found.edge_attr, graph.edge_attr[inside])


# The command ##################################################################

CONFIG = """
model:
  class_path: {model}
data:
  class_path: lightning_gnn.GraphDataModule
  init_args: {{source: lightning_gnn.planted_partition, source_kwargs: {{num_nodes: 300}}}}
trainer:
  devices: 2
  accelerator: cpu
  strategy: {{class_path: lightning_gnn.DGCLStrategy, init_args: {{plan: p2p}}}}
"""


class Wrong(NodeClassifier):
    """As a file names it."""

    def __init__(self, wrong: bool = True) -> None:
        super().__init__(build("gcn", 32, 8))
        self.wrong = wrong

    def forward(self, batch: Any) -> torch.Tensor:
        out = super().forward(batch)
        return out + Swapped.apply(out) if self.wrong else out - out.mean(0)


@pytest.mark.parametrize(("wrong", "status"), [("true", 1), ("false", 0)])
def test_command(monkeypatch, tmp_path: Path, capsys, wrong, status):
    (tmp_path / "run.yaml").write_text(CONFIG.format(model="test_check.Wrong"))
    arguments = ["--config", str(tmp_path / "run.yaml"), "--model.wrong", wrong, "--json", str(tmp_path / "all.json")]
    monkeypatch.setattr("sys.argv", ["lightning-gnn", "check", *arguments, "--schemes", "[dgcl,spmm_1d]"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown, found = capsys.readouterr().out, json.loads((tmp_path / "all.json").read_text())
    assert int(ended.value.code or 0) == status == int(not found["ok"]), shown
    assert "2 ranks against one device: 300 nodes" in shown
    assert [each["verdict"] for each in found["schemes"]] == ["differs" if status else "same"] * 2
    assert ("test_check.py" in shown and "register_row_rule(Swapped)" in shown) == bool(status)


def test_command_explains(monkeypatch, tmp_path: Path, capsys):
    (tmp_path / "run.yaml").write_text(CONFIG.format(model="test_check.Wrong"))
    arguments = ["--config", str(tmp_path / "run.yaml"), "--model.wrong", "false", "--json", str(tmp_path / "all.json")]
    monkeypatch.setattr("sys.argv", ["lightning-gnn", "check", *arguments, "--explain"])
    main()
    shown, found = capsys.readouterr().out, json.loads((tmp_path / "all.json").read_text())
    assert "dgcl: what 2 ranks send each other" in shown
    line = line_of("return out + Swapped.apply(out) if self.wrong else out - out.mean(0)")
    assert re.search(rf"training_step *│ *forward *│ *{line} *│ *mean *│ *nodes along dimension 0", shown), shown
    assert [each["step"] for each in found][:2] == ["training_step", "validation_step"]
    assert all(len(each["bytes_sent"]) == 2 for step in found for each in step["operations"])
