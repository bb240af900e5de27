"""Layers made again, or saved on the host, give the numbers of those that are kept; and predicted memory is what steps take."""

from __future__ import annotations

import json
import re
import warnings
from functools import cache, partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from common import (
    CLASSES,
    FEATURES,
    OwnModel,
    UserModule,
    all_rows_sent,
    assert_same,
    awkward_graph,
    build,
    campaign,
    quiet_trainer,
    single,
    train,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch_geometric.nn import GATConv
from torch_geometric.nn.models import GAT, GCN

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.checks.footprint import PHASES, Footprint, Sizes
from lightning_gnn.comm.in_process import InProcessTransport
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import whole_graph
from lightning_gnn.devices import _left_in
from lightning_gnn.kernels.run import BACKENDS
from lightning_gnn.strategies import (
    CachedVertexCutStrategy,
    ClusterAllReduceStrategy,
    CoverStrategy,
    SamplingStrategy,
    SpMM2DStrategy,
    SpMM15DStrategy,
    VertexCutStrategy,
)
from lightning_gnn.strategy.memory import memory_advice
from lightning_gnn.strategy.memory_checks import warn_of_memory
from lightning_gnn.strategy.scheme import bind_module
from lightning_gnn.tools.advising.rehearsal import rehearse
from lightning_gnn.tools.commands.plan import plan

AGAIN = {"checkpoint_convs": True}
SCHEME = DGCLStrategy(topology=None).scheme

CONFIG = """
model:
  class_path: lightning_gnn.NodeClassifier
  init_args:
    model:
      class_path: torch_geometric.nn.models.GAT
      init_args: {in_channels: 32, hidden_channels: 16, num_layers: 2, out_channels: 8, heads: 2}
data:
  class_path: lightning_gnn.GraphDataModule
  init_args: {source: lightning_gnn.planted_partition, source_kwargs: {num_nodes: 500}}
"""


def saved_bytes(footprint: Footprint) -> float:
    """Returns what a forward leaves for its backward."""
    return sum(piece.bytes for piece in footprint.pieces if piece.saved)


@cache
def on_one_device(model: str) -> dict[str, Any]:
    return single(awkward_graph(), model)


# Made again ###################################################################


def trained(rank: int, world_size: int, models: list[str], strategy: Any, options: dict[str, Any]) -> list[Any]:
    return [train(rank, world_size, awkward_graph(), each, strategy=strategy, options=options) for each in models]


@pytest.mark.parametrize("strategy", [DGCLStrategy, CoverStrategy, SpMM15DStrategy, SpMM2DStrategy, VertexCutStrategy])
def test_recomputed_layers_of_models_together(ranks, strategy):
    models = ["gcn", "sage", "gat", "gin", "sage_max", "own", "pna"]
    expected = single(awkward_graph(), models)
    world_size = 3 if strategy is DGCLStrategy else 4
    for found in ranks.run(world_size, train, awkward_graph(), models, strategy=strategy, options=AGAIN, timeout=280):
        assert_same(found, expected, rtol=1e-9, atol=1e-11)  # after three epochs
        torch.testing.assert_close(found["gradients"], expected["gradients"], rtol=1e-11, atol=1e-11)


def test_layers_with_dropout_may_be_recomputed(ranks):
    """The self-check of a strategy that recomputes refused them."""
    for found in ranks.run(2, train, awkward_graph(), "gat_dropout", options=AGAIN, self_check=True):
        assert len(found["epochs"]) == 3


@pytest.mark.parametrize("world_size", campaign(2, 3, 4))
def test_recomputed_layers_give_the_numbers_of_one_device(ranks, world_size):
    models = ["gcn", "sage", "gat", "gin"] + (["gin_batch_norm", "sage_max", "own", "pna"] if world_size == 3 else [])
    for found in ranks.run(world_size, trained, models, DGCLStrategy, AGAIN):
        for model, result in zip(models, found, strict=True):
            expected = on_one_device(model)
            assert_same(result, expected, rtol=1e-9, atol=1e-11)  # after three epochs
            torch.testing.assert_close(result["gradients"], expected["gradients"], rtol=1e-12, atol=1e-12)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "strategy", [CoverStrategy, SpMM15DStrategy, SpMM2DStrategy, VertexCutStrategy], ids=lambda kind: kind.strategy_name
)
def test_so_they_do_under_other_schemes(ranks, strategy):
    models = ["gcn", "gat", "sage_max"]
    for found in ranks.run(4, trained, models, strategy, AGAIN):
        for model, result in zip(models, found, strict=True):
            assert_same(result, on_one_device(model), rtol=1e-9, atol=1e-11)


def fitted(model: torch.nn.Module, devices: int, **options: Any) -> tuple[dict[str, Any], float]:
    """Returns weights and bytes sent in an epoch, all rows counted."""
    L.seed_everything(3, verbose=False)
    module = NodeClassifier(model, num_classes=CLASSES).double()
    trainer = quiet_trainer(DGCLStrategy(timeout=60, self_check=False, **options), devices, limit_val_batches=0)
    with all_rows_sent():
        trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return weights, float(trainer.callback_metrics["comm/bytes_sent"])


def kept_and_made_again(rank: int, world_size: int) -> list[Any]:
    found = []
    for make in (
        lambda: GAT(FEATURES, 16, num_layers=3, out_channels=CLASSES, heads=2, dropout=0.5, norm="batch_norm"),
        lambda: GCN(FEATURES, 16, num_layers=3, out_channels=CLASSES, dropout=0.5),
    ):
        torch.manual_seed(1)
        model = make()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        found.append([])
        for options in ({}, AGAIN, {"codec": "int8"}, {"codec": "int8", **AGAIN}):
            model.load_state_dict(state)
            found[-1].append(fitted(model.float(), world_size, **options))
    return found


def test_recomputing_repeats_draws_and_codes_and_fetches_halos_once_more(ranks):
    for gat, gcn in ranks.run(2, kept_and_made_again):
        for kept, again, coded, coded_again in (gat, gcn):
            for one, other in ((kept, again), (coded, coded_again)):
                assert one[0].keys() == other[0].keys()
                assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])  # bit for bit
        # Three layers, each fetched and returned; again, each fetched twice.
        assert gat[1][1] == pytest.approx(gat[0][1] * 3 / 2)
        # The first is constant; the second needs its sum again, the last maps first and sends nothing again.
        assert gcn[0][1] < gcn[1][1] < gcn[0][1] * 3 / 2


def test_what_cannot_be_made_again_is_refused():
    for make in (
        lambda: SamplingStrategy(checkpoint_convs=True),
        lambda: ClusterAllReduceStrategy(checkpoint_convs=True),
        lambda: CachedVertexCutStrategy(checkpoint_convs=True),
        lambda: DGCLStrategy(codec="int8", stochastic_rounding=True, checkpoint_convs=True),
    ):
        with pytest.raises(ValueError, match="checkpoint_convs=True"):
            make()


# On the host ##################################################################


class OnHost(UserModule):
    """Keeps what the model leaves for the backward on the host; on the CPU, in copies."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            out = self.model(batch.x, batch.edge_index)
        loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)
        self.log("train_loss", loss)
        return loss


def saved_on_host(rank: int, world_size: int, module: type[UserModule], kind: str) -> Any:
    trained = module(build(kind)).double()
    trainer = quiet_trainer("dgcl" if world_size > 1 else "auto", world_size)
    trainer.fit(trained, datamodule=GraphDataModule(awkward_graph()))
    return float(trainer.callback_metrics["train_loss"]), dict(trained.named_parameters())


@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_tensors_saved_on_the_host_give_the_numbers_of_one_device(ranks, kind):
    expected = saved_on_host(0, 1, UserModule, kind)
    for found in ranks.run(2, saved_on_host, OnHost, kind):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "make", [DGCLStrategy, SpMM15DStrategy, VertexCutStrategy, SamplingStrategy, ClusterAllReduceStrategy]
)
def test_offload_says_what_replaces_it(make):
    with pytest.raises(TypeError, match=rf"argument offload of {make.__name__} was removed. .*save_on_cpu\(pin_memory=True\)"):
        make(offload=True)


# Predicted ####################################################################


@pytest.mark.parametrize("model", ["gcn", "sage_max", "gat", "own", "gin_batch_norm"])
def test_small_graphs_predict_what_large_ones_keep(model):
    module, data = (
        NodeClassifier(build(model), num_classes=CLASSES),
        GraphDataModule(awkward_graph(3000, dtype=torch.float32)),
    )
    data.prepare_for(DGCLStrategy().scheme.layout(3))
    cut = data.stored_cut()
    steps = memory_advice(SCHEME).steps(module, cut.shard(0).batch)
    bind = partial(bind_module, DGCLStrategy().scheme, meter=Meter())
    rehearsed = rehearse(module, [cut.shard(rank) for rank in range(3)], bind, quiet_trainer("dgcl", 1))
    for sizes, found in zip(Sizes.from_cut(cut, module), rehearsed.footprints, strict=True):
        expected = steps.footprint(sizes)
        assert saved_bytes(expected) == pytest.approx(saved_bytes(found), rel=0.05)
        assert expected.held_bytes == pytest.approx(found.held_bytes, rel=0.1)
        assert expected.peak().backward == pytest.approx(found.peak().backward, rel=0.1)
        # What is there in the backward is what is kept and two more; layers made again never take more.
        assert found.peak().backward > found.held_bytes + saved_bytes(found)
        assert found.peak(recompute=True).max_bytes <= found.peak().max_bytes


def test_memory_is_that_of_the_way_a_device_goes(monkeypatch):
    """On CUDA without Triton, GAT keeps rows of edges times columns; with it, what it keeps on the CPU; sums keep none."""
    cuda, edges = torch.device("cuda"), 5_000_000
    sizes = Sizes(100_000, 0, 0, edges, 10_000, edges)
    batch = whole_graph(awkward_graph(dtype=torch.float32)).batch

    def kept(model: str, device: torch.device | None) -> float:
        module = NodeClassifier(build(model), num_classes=CLASSES)
        return saved_bytes(memory_advice(SCHEME).steps(module, batch, device=device).footprint(sizes))

    monkeypatch.setitem(BACKENDS, "cuda", lambda *_: None)
    on_cpu = kept("gat", None)
    assert kept("gat", cuda) == on_cpu
    monkeypatch.delitem(BACKENDS, "cuda")
    columns = next(each for each in build("gat").modules() if isinstance(each, GATConv))
    assert kept("gat", cuda) > on_cpu + edges * columns.heads * columns.out_channels * 4
    assert kept("gcn", cuda) < edges * 4 * 8


@pytest.mark.parametrize("model", ["gcn", "gat"])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (SpMM15DStrategy, {"replication_factor": 1}),
        (SpMM15DStrategy, {"replication_factor": 2}),
        (SpMM2DStrategy, {}),
        (VertexCutStrategy, {}),
        (CoverStrategy, {}),
    ],
)
def test_memory_is_that_of_the_scheme(strategy, options, model):
    """What ranks hold is asked of the scheme; of products on a grid, of those in one column."""
    module, scheme = NodeClassifier(build(model), num_classes=CLASSES), strategy(**options).scheme
    data = GraphDataModule(awkward_graph(3000, dtype=torch.float32))
    data.prepare_for(scheme.layout(4))
    cut = data.stored_cut()
    steps = memory_advice(scheme).steps(module, cut.shard(0).batch)
    shards = [cut.shard(rank) for rank in range(4)]
    rehearsed = rehearse(module, shards, partial(bind_module, scheme, meter=Meter()), quiet_trainer("dgcl", 1))
    expected = max(steps.footprint(sizes).peak().backward for sizes in Sizes.from_cut(cut, module))
    found = max(each.peak().backward for each in rehearsed.footprints)
    assert expected == pytest.approx(found, rel=0.05 if options == {"replication_factor": 1} else 0.35)


def test_memory_is_that_of_the_precision():
    """Modules are converted on ranks, later than this; tensors of the graph have the type that the user gave them."""
    sizes = Sizes(1000, 0, 0, 5000, 100, 5000)

    def kept(dtype: torch.dtype, precision: str) -> float:
        batch = whole_graph(awkward_graph(dtype=dtype)).batch
        trainer, module = quiet_trainer("auto", 1, precision=precision), NodeClassifier(build("gcn"), num_classes=CLASSES)
        return memory_advice(SCHEME).steps(module, batch, trainer).footprint(sizes).held_bytes

    assert kept(torch.float64, "64-true") > 1.5 * kept(torch.float32, "32-true")


def test_layers_made_again_keep_their_arguments():
    rows, edges, columns = 1000, 5000, 8
    module = NodeClassifier(OwnModel(FEATURES, CLASSES), num_classes=CLASSES)
    found = memory_advice(SCHEME).steps(module, whole_graph(awkward_graph(dtype=torch.float32)).batch).footprint(
        Sizes(rows, 0, 0, edges, 0, edges)
    )
    # By hand: messages of both layers, their inputs and tanh's outputs, on each edge; between the layers, a row of each node.
    inside = [edges * 4 * (2 * FEATURES + columns), edges * 4 * (2 * columns + CLASSES)]
    assert saved_bytes(found) > sum(inside)
    spared = found.peak().backward - found.peak(recompute=True).backward
    assert spared > min(inside)  # one of them is there at a time


def test_rows_on_their_way_are_counted(monkeypatch):
    module = NodeClassifier(OwnModel(FEATURES, CLASSES), num_classes=CLASSES)
    batch = whole_graph(awkward_graph(dtype=torch.float32)).batch
    sizes = Sizes(rows=1000, halo_rows=300, sent_rows=500, edges=5000, targets=0, held_edges=5000)
    counted = memory_advice(SCHEME).steps(module, batch).footprint(sizes).held_bytes
    monkeypatch.setattr(
        InProcessTransport, "most_bytes", property(lambda transport: 0, lambda transport, count: None), raising=False
    )
    without = memory_advice(SCHEME).steps(module, batch).footprint(sizes).held_bytes
    assert counted - without == pytest.approx((300 + 500) * FEATURES * 4)  # the widest rows, both ways


def available(monkeypatch: pytest.MonkeyPatch, count: int, **options: Any) -> list[str]:
    """Returns what is said before ranks start where so many bytes are available."""
    monkeypatch.setattr("lightning_gnn.devices.available_bytes", lambda: count)
    strategy = DGCLStrategy(self_check=False, **options)
    module = NodeClassifier(build("own"), num_classes=CLASSES)
    trainer = quiet_trainer(strategy, 2)
    trainer.state.fn = TrainerFn.FITTING
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        strategy.before_ranks_start(trainer, [module, GraphDataModule(awkward_graph(2000, dtype=torch.float32))])
    return [str(each.message) for each in heard if "predicted to need" in str(each.message)]


def test_fit_warns_of_what_will_not_fit_and_says_what_would(monkeypatch):
    assert available(monkeypatch, 10**8) == []
    [said] = available(monkeypatch, 3_200_000)
    assert "The 2 ranks on this machine are predicted to need" in said and "3.2 MB are available" in said
    assert "in the backward" in said and "num_nodes=" in said and 'strategy="sampling"' in said
    needed = float(re.search(r"predicted to need ([\d.]+) MB", said)[1])
    [said] = available(monkeypatch, int(0.97e6 * needed))
    again = float(re.search(r"DGCLStrategy\(checkpoint_convs=True\), about ([\d.]+) MB", said)[1])
    assert again < 0.97 * needed
    assert available(monkeypatch, int(1.01e6 * again), checkpoint_convs=True) == []


def test_devices_are_looked_at_by_themselves(monkeypatch):
    """As on CUDA, which is not here: a rank's peak against its device's free memory."""
    graph = awkward_graph(2000, dtype=torch.float32)
    strategy = DGCLStrategy(parallel_devices=[torch.device("cuda", 0), torch.device("cuda", 1)])
    monkeypatch.setattr(type(strategy), "root_device", torch.device("cuda", 0))
    module = NodeClassifier(build("own"), num_classes=CLASSES)
    trainer = quiet_trainer("dgcl", 2)
    trainer.state.fn = TrainerFn.FITTING
    run = strategy._run_for_checks(module, trainer, GraphDataModule(graph))
    size = Sizes(1000, 500, 500, 6000, 100, 6000)
    peak = memory_advice(SCHEME).steps(module, whole_graph(graph).batch).footprint(size).peak().max_bytes
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warn_of_memory(run, whole_graph(graph), [size], peak)
        assert not heard
        warn_of_memory(run, whole_graph(graph), [size], peak - 1)
    [said] = [str(each.message) for each in heard]
    assert "A rank is predicted to need" in said and "checkpoint_convs=True" in said and "devices=4, at most" in said


def test_a_rank_alone_is_looked_at_too(monkeypatch):
    monkeypatch.setattr("lightning_gnn.devices.available_bytes", lambda: 20_000)
    with pytest.warns(UserWarning, match="A rank is predicted to need .* are available"):
        fitted(OwnModel(FEATURES, CLASSES), 1)


def test_plan_predicts_memory_by_rank_and_phase(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(CONFIG)
    plan([f"--config={tmp_path / 'run.yaml'}", "--parts=3", "--topology=uniform", f"--json={tmp_path / 'plan.json'}"])
    shown, found = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())["memory"]
    assert "Predicted peak memory of a rank, by phase" in shown and "with recompute" in shown
    assert len(found) == 3 and all(rank[phase] > 0 for rank in found for phase in PHASES)
    for rank in found:
        assert f"{rank['backward'] / 1e6:,.3g}" in shown and max(rank["checkpoint_convs"].values()) <= rank["backward"]


def test_a_control_group_leaves_less(tmp_path):
    """Pages of files count as used there, and can be dropped."""
    assert _left_in(tmp_path, "limit", "used") == float("inf")
    (tmp_path / "used").write_text("700\n")
    (tmp_path / "memory.stat").write_text("cache 450\nactive_file 100\ninactive_file 300\n")
    for limit, left in (("1000", 700), ("600", 300), ("max", float("inf")), ("200", 0)):
        (tmp_path / "limit").write_text(f"{limit}\n")
        assert _left_in(tmp_path, "limit", "used") == left
    (tmp_path / "memory.stat").write_text("active_file 100\ninactive_file 0\ntotal_active_file 200\ntotal_inactive_file 100\n")
    (tmp_path / "limit").write_text("1000\n")
    assert _left_in(tmp_path, "limit", "used") == 600  # version 1: with the groups inside it
