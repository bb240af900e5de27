"""The examples run as a user runs them."""

from __future__ import annotations

import re
import shutil
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from common import CAMPAIGN, assert_same, awkward_graph, campaign, quiet_trainer, single, train
from conftest import SHARED
from processes import REPOSITORY, TORCHRUN, Finished, run

from lightning_gnn import DGCLStrategy
from lightning_gnn.partition.layout import LayoutSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def accuracy(output: str) -> float:
    [found] = re.findall(r"^Test accuracy (\d\.\d+)", output, re.MULTILINE)
    return float(found)


def foreign(output: str) -> list[str]:
    """Returns lines that the example's user can do nothing about: warnings from within other packages, and their tips."""
    return [line for line in output.splitlines() if re.search(r"site-packages/\S+\.py:\d+: |Tip: ", line)]


def example(folder: Path, name: str, at_least: float) -> Finished:
    return run(REPOSITORY / "examples" / name, cwd=folder)


@pytest.mark.program(runs=example)
@pytest.mark.parametrize(
    ("name", "at_least"),
    [
        ("demo.py", 0.9),
        ("own_scheme.py", 0.9),
        *campaign(
            ("library.py", 0.8),
            ("own_module.py", 0.65),
            ("boundary_sampling.py", 0.9),
            ("pipelined.py", 0.9),
            ("embeddings.py", 0.9),
            ("events.py", 0.67),
            ("node_types.py", 0.9),
        ),
    ],
)
def test_example(ran, name, at_least):
    _, finished = ran
    assert accuracy(finished.succeeded().output) >= at_least
    assert not foreign(finished.output)


@pytest.mark.campaign
def test_search(tmp_path):
    pytest.importorskip("optuna")
    output = run(REPOSITORY / "examples" / "search.py", cwd=tmp_path).succeeded().output
    assert output.count("Trial ") == 8 and output.count("Best trial 6") == 1
    assert float(output.partition("Validation accuracy ")[2][:5]) > 0.9 and not foreign(output)


def in_a_ring(rank: int, world_size: int, model: str, shared_memory: bool) -> dict[str, Any]:
    sys.path.insert(0, str(REPOSITORY / "examples"))
    from own_scheme import RingStrategy

    options = {"shared_memory": shared_memory}
    return train(rank, world_size, awkward_graph(), model, strategy=RingStrategy, options=options, self_check=True)


@pytest.mark.parametrize(
    ("model", "world_size", "shared_memory"), [("gcn", 2, True), ("gin_batch_norm", 4, True), ("gat", 3, False)]
)
def test_own_scheme_is_exact(ranks, model, world_size, shared_memory):
    """The script's scheme gives the losses, gradients and predictions of one device, in float64."""
    expected = single(awkward_graph(), model)
    for found in ranks.run(world_size, in_a_ring, model, shared_memory):
        assert_same(found, expected, rtol=1e-8, atol=1e-10)


# Many samples on one graph ####################################################

SAMPLES: dict[str, dict[str, int]] = {
    "traffic": {"num_sensors": 50, "num_days": 1, "global_batch_size": 8},
    "weather": {"num_refinements": 1, "num_samples": 9, "global_batch_size": 4},
    "mesh_simulation": {"points_per_side": 6, "num_steps": 9, "global_batch_size": 4},
    "observations": {"num_sites": 60, "points_per_side": 5, "num_samples": 9, "global_batch_size": 4},
}
"""Sizes of the examples with samples; the last batch leaves a data rank with fewer samples."""


def curves(rank: int, world_size: int, graph_ranks: int) -> dict[str, list[float]]:
    """Returns the losses of each step of these examples, in float64; on one device without graph ranks."""
    sys.path.insert(0, str(REPOSITORY / "examples"))
    found = {}
    torch.set_default_dtype(torch.float64)
    try:
        for name, sizes in SAMPLES.items():
            module, data, *_ = import_module(name).make(**sizes)
            strategy: Any = DGCLStrategy(graph_ranks=graph_ranks, timeout=60) if graph_ranks else "auto"
            quiet_trainer(strategy, world_size, max_epochs=2).fit(module, datamodule=data)
            found[name] = module.losses
    finally:
        torch.set_default_dtype(torch.float32)
        sys.path.pop(0)
    return found


@cache
def curves_of_one_device() -> dict[str, list[float]]:
    return curves(0, 1, 0)


@pytest.mark.parametrize("meshes", [*campaign([(4, 2)]), [(2, 1), (2, 2)]])
def test_curves_of_samples(ranks, meshes):
    """Losses of all steps on data ranks, graph ranks and both."""
    expected = curves_of_one_device()
    assert {name: len(losses) for name, losses in expected.items()} == dict.fromkeys(SAMPLES, 6)
    for world_size, graph_ranks in meshes:
        for found in ranks.run(world_size, curves, graph_ranks):
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["weather", "observations"])
def test_both_node_sets_are_partitioned_together(name, tmp_path, monkeypatch):
    """Of the edges between two node sets, at least 90 % are within a rank, and each rank has its share of both sets."""
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    _, data, _ = import_module(name).make()
    data.partition_dir = tmp_path
    for parts in (2, 4):
        data.prepare_for(LayoutSpec("edge_cut", parts, method="metis", takes_types=True))
        cut = data.stored_cut()
        for kind, counts in cut.types.edges.items():
            if kind[0] != kind[2]:
                first, own = cut.types.begins(kind), 0
                for part in range(parts):
                    sources = cut.edge_index_of(part)[0, first[part] : first[part] + counts[part]]
                    own += int((sources < sum(of[part] for of in cut.types.nodes.values())).sum())
                assert own >= 0.9 * counts.sum()
        for counts in cut.types.nodes.values():
            assert counts.max() <= 1.25 * counts.mean()


def with_samples(folder: Path, name: str, size: str) -> Finished:
    """A script with a small graph, which writes its picture."""
    return run(REPOSITORY / "examples" / f"{name}.py", *size.split(), "--picture", "picture.png", cwd=folder)


@pytest.mark.program(runs=with_samples)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mesh_simulation", "--points 12"),
        *campaign(
            ("traffic", "--sensors 100"),
            ("weather", "--refinements 2 --graph-ranks 1"),
            ("observations", "--sites 200"),
        ),
    ],
)
def test_samples(ran, name, size):
    folder, finished = ran
    errors = re.findall(r"^Epoch \d+: .* error (\d+\.\d+)", finished.succeeded().output, re.MULTILINE)
    assert len(errors) >= 3 and float(errors[-1]) < 0.9 * float(errors[0])
    assert (folder / "picture.png").stat().st_size > 5_000 and not foreign(finished.output)


def losses_of_the_page(folder: Path) -> list[float]:
    """The losses that the program of docs/samples.md prints, on its four ranks and on one device."""
    script, *_ = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "samples.md").read_text(), re.DOTALL)
    one_device = script.replace("strategy=strategy, devices=4", 'strategy="auto", devices=1')
    assert one_device != script
    found = []
    for text in (script, one_device):
        (folder / "train.py").write_text(text)
        output = run(folder / "train.py", cwd=folder).succeeded().output
        found += [float(each) for each in re.findall(r"^Loss (\d+\.\d+)", output, re.MULTILINE)]
    return found


@pytest.mark.campaign
def test_page_of_samples(tmp_path):
    four_ranks, one_device = losses_of_the_page(tmp_path)
    assert four_ranks == pytest.approx(one_device, abs=2e-4) and one_device < 0.5


def by_hand(folder: Path) -> Finished:
    return run(*TORCHRUN, REPOSITORY / "examples" / "by_hand.py", cwd=folder)


@pytest.mark.program(runs=by_hand)
def test_by_hand(ran):
    _, finished = ran
    assert accuracy(finished.succeeded().output) >= 0.85


def on_cora(folder: Path) -> Finished:
    shutil.copytree(SHARED / "data" / "planetoid", folder / "planetoid")
    return run(REPOSITORY / "examples" / "library.py", "--root", "planetoid", "--epochs", 10, cwd=folder)


@pytest.mark.campaign
@pytest.mark.program(runs=on_cora)
def test_library_on_cora(shared, ran):
    _, finished = ran
    assert accuracy(finished.succeeded().output) >= 0.7
    assert not foreign(finished.output)


def of_the_readme(folder: Path, how: str) -> Finished:
    """The README's script and its command line, on a machine that has compiled and partitioned nothing; every day, one that has
    compiled."""
    shutil.copytree(SHARED / "data" / "planetoid", folder / "data" / "planetoid")
    fresh = {"LIGHTNING_GNN_STORE": str(folder / "store")}
    if CAMPAIGN:
        fresh["NUMBA_CACHE_DIR"] = str(folder / "compiled")
    if how == "command line":
        config = REPOSITORY / "configs" / "dgcl.yaml"
        command: list[object] = ["-m", "lightning_gnn.tools.cli", "fit", "--config", config, "--trainer.max_epochs", 3]
    else:
        [script] = re.findall(
            r"## Quickstart\n\n```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL
        )
        if how == "auto":
            script = script.replace('strategy="dgcl", devices=2', 'strategy="auto", devices=1')
        (folder / "five_minutes.py").write_text(script.replace("max_epochs=30", "max_epochs=3"))
        command = [folder / "five_minutes.py"]
    return run(*command, cwd=folder, variables=fresh, warm=not CAMPAIGN)


@pytest.mark.program(runs=of_the_readme)
@pytest.mark.parametrize("how", ["script", *campaign("auto", "command line")])
def test_first_sight(shared, ran, how):
    """Nothing foreign is said, and what takes long is said before it begins."""
    _, finished = ran
    output = finished.succeeded().output
    assert not foreign(output)
    if how != "auto":  # one device compiles and partitions nothing
        kernels = "kernels of lightning_gnn.kernels"
        partitions = "Partitioning 2,708 nodes and 10,556 edges into 2 parts (metis): about 1 s", "Partitioned in"
        for first, then in (partitions, (kernels, "Compiled in"))[: 1 + CAMPAIGN]:
            assert output.index(first) < output.index(then) < output.index("Self-check")
        assert output.count(kernels) <= 2  # the process that loads the graph may need one of them, too


BEFORE = """
import lightning as L, torch, torch.nn.functional as F
from torch_geometric.data.lightning import LightningNodeData
from torch_geometric.datasets import Planetoid
from torch_geometric.nn.models import GraphSAGE
from lightning_gnn import GraphDataModule
L.seed_everything(0)
graph = Planetoid("data/planetoid", "Cora")[0]
"""
AFTER = """
if trainer.is_global_zero:
    print("weights", sum(float(each.double().abs().sum()) for each in trainer.lightning_module.parameters()))
"""


def with_other_lines(folder: Path) -> list[float]:
    """The sums of the weights to which the README's two scripts come: PyG's for one device, and that for two ranks."""
    shutil.copytree(SHARED / "data" / "planetoid", folder / "data" / "planetoid")
    [lines] = re.findall(r"```diff\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    found = []
    for sign in "-+":
        script = folder / "two_lines.py"
        script.write_text(
            "\n".join([BEFORE, *(line[1:] for line in lines.splitlines() if line[:1] in ("", " ", sign)), AFTER])
        )
        output = run(script, cwd=folder, variables={"LIGHTNING_GNN_STORE": str(folder / "store")}).succeeded().output
        found += [float(each) for each in re.findall(r"^weights (.*)$", output, re.MULTILINE)]
    return found


@pytest.mark.campaign
def test_two_lines_change(shared, tmp_path):
    one_device, two_ranks = with_other_lines(tmp_path)
    assert two_ranks == pytest.approx(one_device, rel=1e-5)
