"""The examples run as a user runs them."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from common import assert_same, awkward_graph, single, train
from conftest import SHARED
from processes import REPOSITORY, TORCHRUN, Finished, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def accuracy(output: str) -> float:
    [found] = re.findall(r"^Test accuracy (\d\.\d+)", output, re.MULTILINE)
    return float(found)


def example(folder: Path, name: str, at_least: float) -> Finished:
    return run(REPOSITORY / "examples" / name, cwd=folder)


@pytest.mark.ahead(runs=example)
@pytest.mark.parametrize(
    ("name", "at_least"),
    [
        ("demo.py", 0.9),
        ("library.py", 0.8),
        ("own_module.py", 0.65),
        ("own_scheme.py", 0.9),
        ("embeddings.py", 0.9),
    ],
)
def test_example(ahead, name, at_least):
    _, finished = ahead
    assert accuracy(finished.succeeded().output) >= at_least


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


def by_hand(folder: Path) -> Finished:
    return run(*TORCHRUN, REPOSITORY / "examples" / "by_hand.py", cwd=folder)


@pytest.mark.ahead(runs=by_hand)
def test_by_hand(ahead):
    _, finished = ahead
    assert accuracy(finished.succeeded().output) >= 0.85


def on_cora(folder: Path) -> Finished:
    shutil.copytree(SHARED / "data" / "planetoid", folder / "planetoid")
    return run(REPOSITORY / "examples" / "library.py", "--root", "planetoid", "--epochs", 10, cwd=folder)


@pytest.mark.ahead(runs=on_cora)
def test_library_on_cora(shared, ahead):
    _, finished = ahead
    assert accuracy(finished.succeeded().output) >= 0.7


def links(folder: Path, strategy: str) -> Finished:
    script = REPOSITORY / "examples" / "link_prediction.py"
    return run(script, "--strategy", strategy, "--nodes", 400, "--epochs", 20, cwd=folder)


@pytest.mark.ahead(runs=links)
@pytest.mark.parametrize("strategy", ["dgcl", "sampling"])
def test_link_prediction(ahead, strategy):
    _, finished = ahead
    [found] = re.findall(r"^Test MRR (\d\.\d+)", finished.succeeded().output, re.MULTILINE)
    assert float(found) >= 0.15  # random: 0.09


def choosing(folder: Path) -> Finished:
    return run(REPOSITORY / "examples" / "choose_scheme.py", "--nodes", 400, "--epochs", 20, cwd=folder, timeout=450)


@pytest.mark.timeout(500)
@pytest.mark.ahead(runs=choosing)
def test_choose_scheme(ahead):
    _, finished = ahead
    output = finished.succeeded().output
    exact = re.findall(r"^(.*\S) +exact +([\d.]+) ms an epoch: ", output, re.MULTILINE)
    # The usual scheme stands before what is hardly faster.
    seconds = [float(each) for name, each in exact if name.split()[0] != "dgcl"]
    assert len(exact) >= 3 and seconds == sorted(seconds)
    [chosen] = re.findall(r"^(.*): [\d.]+ ms an epoch predicted, the last one took [\d.]+ ms", output, re.MULTILINE)
    [reached] = re.findall(r"^Validation accuracy (\d\.\d+)", output, re.MULTILINE)
    assert chosen == exact[0][0] and float(reached) >= 0.8


def in_parts(folder: Path) -> Finished:
    script = REPOSITORY / "examples" / "large_graph.py"
    store = {"LIGHTNING_GNN_STORE": str(folder / "store")}
    return run(script, "--nodes", 3000, "--ranks", 3, cwd=folder, timeout=450, variables=store)


@pytest.mark.timeout(500)
@pytest.mark.ahead(runs=in_parts)
def test_large_graph(ahead):
    """Every node is held by one of the ranks, and what lies on disk and travels is told."""
    folder, finished = ahead
    output = finished.succeeded().output
    held = re.findall(r"Rank (\d) holds ([\d,]+) nodes and their ([\d,]+) in-edges", output)
    assert {rank for rank, *_ in held} == {"0", "1", "2"}
    assert sum(int(nodes.replace(",", "")) for _, nodes, _ in held) == 3000
    [size, kept] = re.findall(r"^All parts take ([\d.]+) MB on disk, in (.*)$", output, re.MULTILINE)[0]
    assert float(size) > 3000 * 64 * 4 / 1e6 and Path(kept).parent == folder / "store"
    [sent] = re.findall(r"which exchanged ([\d.]+) MB per epoch", output)
    assert float(sent) > 0 and accuracy(output) >= 0.7


def schemes(folder: Path) -> Finished:
    script = REPOSITORY / "examples" / "compare_schemes.py"
    return run(script, "--nodes", 400, "--epochs", 2, cwd=folder, timeout=450)


@pytest.mark.timeout(500)
@pytest.mark.ahead(runs=schemes)
def test_compare_schemes(ahead):
    folder, finished = ahead
    output = finished.succeeded().output
    assert "dgcl in 8 bits" in output and re.search(r"^Fastest here: .* s per epoch\.$", output, re.MULTILINE)
    assert "data:image/svg" in (folder / "comparison" / "comparison.html").read_text()
