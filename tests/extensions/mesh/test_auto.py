"""``graph_ranks="auto"``: the smallest number whose predicted peak times 1.2 fits in free memory, which is emulated."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from common import campaign, quiet_trainer
from conftest import RankFailed
from lightning.pytorch.trainer.states import TrainerFn
from node_set_runs import DOWN, ON, TYPED_MODELS, UP, TypedModule, TypedSamples, graph_of_node_sets
from sample_runs import CONCATENATED, MODELS, NODES, SampleModule, Samples
from torch_geometric.data import Data, HeteroData

from lightning_gnn import CoverStrategy, DGCLStrategy, GraphDataModule, SpMM1DStrategy, SpMM2DStrategy, VertexCutStrategy
from lightning_gnn.strategy.run_config import run_config


def ring() -> Data:
    """A ring with many edges between neighbors, whose parts have few halo nodes: edges take most of the memory."""
    source = torch.arange(NODES).repeat(50)
    return Data(
        edge_index=torch.stack([source, (source + 1) % NODES]), edge_weight=torch.ones(len(source)).double(), num_nodes=NODES
    )


def data_of(**options: Any) -> GraphDataModule:
    return GraphDataModule(
        ring(), partition="contiguous", samples=Samples(), **{"global_batch_size": 4, "shuffle": False, **options}
    )


def train(
    rank: int,
    world_size: int,
    graph_ranks: Any,
    free: int,
    name: str = "graph_conv",
    strategy: Any = DGCLStrategy,
    **options: Any,
) -> Any:
    """Returns losses, weights, both numbers of ranks, and the number in the configuration of the run."""
    L.seed_everything(0, verbose=False)
    module = SampleModule((MODELS | CONCATENATED)[name]()).double()
    strategy = strategy(graph_ranks=graph_ranks, timeout=60, **options)
    with mock.patch("lightning_gnn.devices.available_bytes", lambda: free + rank):  # ranks need not measure equal numbers
        data = data_of(concatenate=name in CONCATENATED)
        quiet_trainer(strategy, world_size, max_epochs=1).fit(module, datamodule=data)
    shape, recorded = strategy.mesh_shape, run_config(strategy, data.shard)["strategy"]["graph_ranks"]
    return module.losses, module.state_dict(), (shape.graph_ranks, shape.data_ranks, recorded, len(data.shard.counts))


def peaks_of(
    ranks: int,
    data: GraphDataModule | None = None,
    strategy: Any = DGCLStrategy,
    name: str = "graph_conv",
    module: L.LightningModule | None = None,
    **options: Any,
) -> dict[int, float]:
    """Returns the predicted peaks of all numbers of graph ranks in MB, from the error if none fits."""
    strategy = strategy(graph_ranks="auto", **options)
    trainer = quiet_trainer(strategy, ranks)
    trainer.state.fn = TrainerFn.FITTING
    module = module or SampleModule((MODELS | CONCATENATED)[name]()).double()
    found: dict[int, float] = {}
    with mock.patch("lightning_gnn.devices.available_bytes", lambda: 1), pytest.raises(ValueError, match="1.2 times") as error:
        strategy.before_ranks_start(trainer, [module, data or data_of()])
    for number, peak in re.findall(r"(\d+): (?:at least )?([\d.]+) MB", str(error.value)):
        found[int(number)] = float(peak)
    assert strategy.graph_ranks == "auto"
    return found


def test_choice(ranks):
    """Two ranks select 1 or 2 graph ranks, or raise an error; results equal those of the number."""
    peaks = peaks_of(2)
    assert [*peaks] == [1, 2] and peaks[2] < 0.8 * peaks[1]
    enough, some = int(1.3e6 * peaks[1]), int(1.19e6 * peaks[1])
    for free, number in ((enough, 1), (some, 2)):
        expected = ranks.run(2, train, number, 10**9)
        for found, (losses, weights, numbers) in zip(ranks.run(2, train, "auto", free), expected, strict=True):
            assert found[2] == numbers == (number, 2 // number, number, number)
            assert found[0] == losses
            torch.testing.assert_close(found[1], weights, rtol=0, atol=0)
    with pytest.raises(RankFailed, match=r"got 0.01 MB for peaks of 1: [\d.]+ MB, 2: at least [\d.]+ MB by graph_ranks"):
        ranks.run(2, train, "auto", 10_000)


def test_choice_for_concatenated_samples(ranks):
    """The ranks of a machine have a copy of the graph for each sample of a batch, with any number of graph ranks."""
    name = "concatenated_gcn"
    peaks = peaks_of(2, data_of(concatenate=True), name=name)
    assert peaks[1] > 1.5 * peaks_of(2)[1] and peaks[2] == pytest.approx(peaks[1], rel=0.1)
    for _, _, numbers in ranks.run(2, train, "auto", int(1.3e6 * peaks[1]), name):
        assert numbers == (1, 2, 1, 1)


def node_sets() -> GraphDataModule:
    """Many edges between sites and mesh nodes with equal numbers, and along the mesh; parts have few halo nodes."""
    graph, nodes = graph_of_node_sets(), torch.arange(17).repeat(100)
    ends = {UP: (nodes, nodes), ON: (nodes, (nodes + 1) % 17), DOWN: (nodes, nodes)}
    for kind, pair in ends.items():
        graph[kind].edge_index, graph[kind].edge_attr = torch.stack(pair), torch.ones(1700, 2).double()
    return GraphDataModule(graph, samples=TypedSamples(), global_batch_size=4)


@pytest.mark.parametrize("strategy", [DGCLStrategy, *campaign(VertexCutStrategy, SpMM1DStrategy)])
def test_choice_for_node_sets(strategy, caplog):
    module = TypedModule(TYPED_MODELS["graph_conv"]()).double()
    peaks = peaks_of(2, node_sets(), strategy, module=module)
    assert [*peaks] == [1, 2] and peaks[2] < 0.8 * peaks[1]
    for free, number in ((1.25e6 * peaks[1], 1), (1.19e6 * peaks[1], 2)):
        chosen, data = strategy(graph_ranks="auto"), node_sets()
        trainer = quiet_trainer(chosen, 2)
        trainer.state.fn = TrainerFn.FITTING
        with mock.patch("lightning_gnn.devices.available_bytes", lambda free=free: int(free)):
            chosen.before_ranks_start(trainer, [module, data])
        cut = data.stored_cut()
        assert chosen.graph_ranks == number and len(cut.halos) == number and isinstance(cut.graph(), HeteroData)
        assert f"Selected graph_ranks={number} of 2 ranks" in caplog.text


def test_choice_ahead(caplog):
    """The process that starts ranks makes the partition of the selected number."""
    [one, _] = peaks_of(2).values()
    for free, number in ((1.3e6 * one, 1), (1.19e6 * one, 2)):
        strategy, data = DGCLStrategy(graph_ranks="auto"), data_of()
        trainer = quiet_trainer(strategy, 2)
        trainer.state.fn = TrainerFn.FITTING
        with mock.patch("lightning_gnn.devices.available_bytes", lambda free=free: int(free)):
            strategy.before_ranks_start(trainer, [SampleModule(MODELS["graph_conv"]()).double(), data])
        assert strategy.graph_ranks == number and len(data.stored_cut().halos) == number
        assert f"Selected graph_ranks={number} of 2 ranks" in caplog.text


def test_ranks_of_a_machine_share_its_memory():
    [of_two, _], [of_four, *_] = peaks_of(2).values(), peaks_of(4, data_of(global_batch_size=8)).values()
    assert of_four == pytest.approx(2 * of_two, rel=0.01)  # with as many samples per rank


@pytest.mark.parametrize(
    ("ranks", "size", "strategy", "options", "expected"),
    [
        (4, 4, DGCLStrategy, {}, [1, 2, 4]),
        (4, 6, DGCLStrategy, {}, [2, 4]),
        (6, 6, DGCLStrategy, {}, [1, 2, 3, 6]),
        (4, 4, DGCLStrategy, {"plan": "swap"}, [4]),
        (4, 4, CoverStrategy, {"codec": "int8"}, [1, 2, 4]),
        (4, 4, SpMM2DStrategy, {}, [1, 4]),
    ],
)
def test_candidates(ranks, size, strategy, options, expected):
    """Data ranks divide the global batch, and options and the scheme support the number."""
    assert [*peaks_of(ranks, data_of(global_batch_size=size), strategy, **options)] == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 2, "global_batch_size": None}, r'graph_ranks="auto" requires .*global_batch_size=...\)'),
        ({"samples": None}, 'graph_ranks="auto" requires GraphDataModule'),
    ],
)
def test_samples_of_a_global_batch_are_required(options, words):
    strategy = DGCLStrategy(graph_ranks="auto")
    given = {"samples": Samples(), "global_batch_size": 4, **options}
    if given["samples"] is None:
        del given["global_batch_size"]
    with pytest.raises(ValueError, match=words):
        quiet_trainer(strategy, 2).fit(SampleModule(MODELS["graph_conv"]()), datamodule=GraphDataModule(ring(), **given))


def test_unpredictable_models():
    """Models with parameters per node do not run on a small graph; the error names the number to set."""
    strategy = DGCLStrategy(graph_ranks="auto")
    trainer = quiet_trainer(strategy, 2)
    trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(RuntimeError, match=r"cannot predict memory: .* Set a number, such as DGCLStrategy\(graph_ranks=2\)"):
        strategy.before_ranks_start(trainer, [SampleModule(MODELS["rnn_of_time"]()).double(), data_of()])


SCRIPT = """
import sys
import lightning as L
from unittest import mock
from lightning_gnn import DGCLStrategy
from sample_runs import MODELS, SampleModule
from test_auto import data_of

if __name__ == "__main__":
    free, method = sys.argv[1:]
    L.seed_everything(0)
    strategy = DGCLStrategy(graph_ranks="auto", start_method=method)
    trainer = L.Trainer(strategy=strategy, devices=2, accelerator="cpu", max_epochs=1, logger=False, barebones=True)
    with mock.patch("lightning_gnn.devices.available_bytes", lambda: int(free)):
        trainer.fit(SampleModule(MODELS["graph_conv"]()).double(), datamodule=data_of())
        trainer.validate(SampleModule(MODELS["graph_conv"]()).double(), datamodule=data_of())
    print("chose", strategy.graph_ranks, strategy.mesh_shape.data_ranks)
"""


@pytest.mark.campaign
@pytest.mark.parametrize("method", ["popen", "spawn", "fork"])
def test_started_ranks(method, tmp_path):
    """Ranks that one process starts receive its choice, also in a later call."""
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    free = str(int(1.19e6 * peaks_of(2)[1]))
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", free, method],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(re.findall("chose .*", done.stdout)) == {"chose 2 1"}
    assert done.stderr.count("Selected graph_ranks=2") == 1
