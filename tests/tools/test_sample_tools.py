"""``check``, ``advise`` and ``compare`` with samples on one graph."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from common import campaign
from sample_runs import CONCATENATED, MODELS, SampleModule, Samples, graph_of_samples
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn import (
    AutoStrategy,
    DGCLStrategy,
    GraphDataModule,
    VertexCutStrategy,
    advise,
    check_parity,
    compare,
    register_row_rule,
)
from lightning_gnn.tools.advising.advice import repeat_groups
from lightning_gnn.tools.advising.rehearsal import Send, Take
from lightning_gnn.tools.commands.check import check
from lightning_gnn.tools.parity import explain_steps


class Module(SampleModule):
    """Also created by command lines, without arguments."""

    def __init__(self, name: str = "gcn") -> None:
        super().__init__((MODELS | CONCATENATED)[name]())
        self.double()

    def test_step(self, batch: Data, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), batch_size=len(batch.x))


def data_of(**options: Any) -> GraphDataModule:
    given = dict.fromkeys(("samples", "val_samples", "test_samples"), Samples())
    return GraphDataModule(graph_of_samples(), partition="random", **{**given, "global_batch_size": 4, **options})


# Check ########################################################################


@pytest.mark.parametrize("options", [{}, {"devices": 3, "nodes": 20}])
def test_right_steps(options):
    report = check_parity(Module(), data_of(), ["dgcl", "cover", "vertex_cut", "sampling"], **options)
    *exact, sampling = report.schemes
    assert report.ok and [each.verdict for each in exact] == ["same"] * 3
    assert all(each.steps == ["training_step", "validation_step", "test_step"] for each in exact)
    assert all(0 < max(each.differences.values()) < 1e-12 for each in exact)
    assert sampling.verdict == "not compared" and "samples are not supported" in sampling.not_compared
    assert report.nodes == options.get("nodes", 40)
    assert any("predict_step was skipped" in note for note in report.notes)
    assert any("compared with one data rank" in note for note in report.notes)


@pytest.mark.parametrize("concatenate", [False, *campaign(True)])
def test_meshes_are_compared(concatenate):
    """Data ranks have different samples, and one has fewer; without graph_ranks, all ranks divide the graph."""
    meshes = [DGCLStrategy(graph_ranks=1), VertexCutStrategy(graph_ranks=2), DGCLStrategy(graph_ranks=3), DGCLStrategy()]
    report = check_parity(Module("norms" if concatenate else "gcn"), data_of(concatenate=concatenate), meshes, devices=4)
    labels = ["dgcl graph_ranks=1", "vertex_cut graph_ranks=2", "dgcl graph_ranks=3", "dgcl"]
    assert [each.scheme for each in report.schemes] == labels
    assert [each.verdict for each in report.schemes] == ["same", "same", "not compared", "same"]
    assert "must be a multiple of graph_ranks=3" in report.schemes[2].not_compared
    tolerance = 1e-8 if concatenate else 1e-12  # for concatenated samples, gradients before a norm are only rounding errors
    assert all(max(each.differences.values()) < tolerance for each in report.schemes if each.verdict == "same")


class OfDataRank(Module):
    """Subtracts the mean over the samples of a data rank, although the operation has a rule for rows."""

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.log("val_loss", torch.ops.sample_tools.wrong_values(self.model(batch)).square().mean())


def test_errors_of_data_ranks_are_found():
    found = check_parity(OfDataRank(), data_of(), [DGCLStrategy(graph_ranks=1), DGCLStrategy(graph_ranks=2)]).schemes
    assert [each.verdict for each in found] == ["differs", "same"]


def test_messages_of_data_ranks():
    """Two groups send each halo row; sums over data ranks are messages, too."""
    found = {number: explain_steps(Module(), data_of(), DGCLStrategy(graph_ranks=number), devices=4)[0] for number in (1, 2)}
    alone = explain_steps(Module(), data_of(), DGCLStrategy(graph_ranks=2), devices=2)[0]
    halos = {
        number: [sent for each, sent in step.bytes_sent.items() if each.operation.startswith("Halo exchange")]
        for number, step in (*found.items(), (0, alone))
    }
    assert not halos[1] and found[1].bytes_sent  # sums for the loss
    assert len(halos[2]) == len(halos[0]) and all(len(sent) == 4 and min(sent) > 0 for sent in halos[2])
    for of_mesh, of_group in zip(halos[2], halos[0], strict=True):  # the groups have two samples of three, and one
        for both, expected in zip(map(sum, zip(of_mesh[:2], of_mesh[2:], strict=True)), of_group, strict=True):
            assert expected <= both < 1.1 * expected  # each group sends degrees


def test_concatenated_samples_are_compared():
    for name, verdict in (("norms", "same"), ("mixed", "differs")):
        module = Module("norms" if name == "norms" else "edge_reader")
        if name == "mixed":
            module.model.map.register_forward_hook(lambda _, __, out: torch.ops.sample_tools.wrong_values(out))
        found = check_parity(module, data_of(concatenate=True), ["dgcl", "vertex_cut"]).schemes
        assert [each.verdict for each in found] == [verdict] * 2
    first, *_ = explain_steps(Module("gat"), data_of(concatenate=True), DGCLStrategy())
    assert any(each.operation.startswith("Halo exchange") for each in first.bytes_sent)


@torch.library.custom_op("sample_tools::wrong_values", mutates_args=())
def wrong_values(x: Tensor) -> Tensor:
    return x - x.mean(0)


wrong_values.register_autograd(lambda ctx, grad: grad)
register_row_rule(torch.ops.sample_tools.wrong_values)


class Wrong(Module):
    def validation_step(self, batch: Data, batch_idx: int) -> None:
        out = torch.ops.sample_tools.wrong_values(self.model(batch).movedim(1, 0).contiguous())
        self.log("val_loss", out.square().mean())


def test_wrong_steps_are_found():
    [found] = check_parity(Wrong(), data_of(), ["dgcl"]).schemes
    assert found.verdict == "differs" and found.finding is not None and found.finding.step == "validation_step"


class More(Samples):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "factor": float(index + 1)}


class WithFactor(Module):
    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.log("val_loss", (self.model(batch) * batch.factor.view(-1, 1, 1)).square().mean())


def test_stages_have_their_own_samples():
    [found] = check_parity(WithFactor(), data_of(val_samples=More(), test_samples=None), ["dgcl"]).schemes
    assert found.verdict == "same" and found.steps == ["training_step", "validation_step"]


def test_messages_of_a_step():
    first, *_ = explain_steps(Module(), data_of(), DGCLStrategy())
    halo = [each for each in first.bytes_sent if each.operation.startswith("Halo exchange")]
    assert first.step == "training_step" and {each.direction for each in halo} == {"forward", "backward"}
    assert all(max(first.messages[each]) == 1 for each in halo if "second" in each.operation)


CONFIG = """
model: {class_path: test_sample_tools.Module}
data:
  class_path: lightning_gnn.GraphDataModule
  init_args:
    source: sample_runs.graph_of_samples
    samples: {class_path: sample_runs.Samples, init_args: {size: 5}}
    global_batch_size: 2
trainer: {devices: 2}
"""


def test_command(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(CONFIG)
    with pytest.raises(SystemExit) as ended:
        check([f"--config={tmp_path / 'run.yaml'}", "--schemes=[dgcl]", f"--json={tmp_path / 'found.json'}"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert ended.value.code == 0 and found["schemes"][0]["steps"] == ["training_step"] and found["nodes"] == 40


# Advise #######################################################################


def test_advice():
    """Each number of graph ranks whose data ranks divide the global batch is rehearsed."""
    module, found = Module(), advise(Module(), data_of(global_batch_size=6), devices=4)
    of_dgcl = {each.candidate.arguments["graph_ranks"]: each for each in found if each.candidate.name == "dgcl"}
    assert [*sorted(of_dgcl)] == [2, 4] and all(each.applies for each in found)
    assert {each.candidate.name for each in found} >= {"dgcl", "cover", "vertex_cut", "spmm"}
    assert not {each.candidate.name for each in found} & {"sampling", "gossip", "vertex_cut_cached"}
    gradients = sum(each.nbytes for each in module.parameters())
    for each in of_dgcl.values():
        assert each.steps == 2 and len(each.peaks) == 4 and each.seconds > 0  # 9 samples in batches of 6
        assert each.bytes_sent > each.steps * gradients
    assert str(of_dgcl[2].candidate).startswith("dgcl graph_ranks=2")


def test_advice_for_concatenated_samples():
    """Messages equal those of stacked samples, which travel together, too; copies of the graph take more memory."""
    [copied], [stacked] = (
        [each for each in advise(Module(name), data, devices=2) if str(each.candidate).startswith("dgcl graph_ranks=2")]
        for name, data in (("concatenated_gcn", data_of(concatenate=True)), ("gcn", data_of()))
    )
    assert copied.bytes_sent == stacked.bytes_sent and copied.messages >= stacked.messages
    assert max(each.max_bytes for each in copied.peaks) > max(each.max_bytes for each in stacked.peaks)


def test_data_ranks_repeat_the_messages_of_graph_ranks():
    found = repeat_groups(((Send(1, 8), Take(1)), (Take(0), Send(0, 8))), 2, 100)
    sums = [(Send(peer, 50), Take(peer)) * 2 for peer in (2, 3, 0, 1)]  # of gradients, over two data ranks
    halos = [(Send(1, 8), Take(1)), (Take(0), Send(0, 8)), (Send(3, 8), Take(3)), (Take(2), Send(2, 8))]
    assert found == tuple((*halo, *ring) for halo, ring in zip(halos, sums, strict=True))


def test_auto_gnn_does_not_support_samples(ranks):
    with pytest.raises(AssertionError, match="samples is not supported with AutoStrategy: it predicts full-graph steps"):
        ranks.run(2, fit_auto)


def fit_auto(rank: int, world_size: int) -> None:
    from common import quiet_trainer

    quiet_trainer(AutoStrategy(timeout=60), world_size).fit(Module(), datamodule=data_of())


# Compare ######################################################################


@pytest.mark.campaign
def test_comparison(tmp_path):
    runs = [{"strategy": "auto", "devices": 1}, *({"strategy": "dgcl", "graph_ranks": each} for each in (1, 2, "auto"))]
    found = compare(Module, data_of, runs, devices=2, epochs=2, output=tmp_path, trainer={"accelerator": "cpu"})
    assert [each["status"] for each in found["runs"]] == ["finished"] * 4, [each["error"] for each in found["runs"]]
    assert all(each["parity"]["ok"] for each in found["runs"])
    assert len({round(each["test"]["test_loss"], 8) for each in found["runs"]}) == 1
    first, second = found["runs"][0]["curves"]["train_loss"]
    assert first > second  # each the mean of its epoch
