"""A run without its lost ranks gives the losses, weights, logged rows and checkpoints of an uninterrupted one. Real processes."""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import pytest
import torch
from common import campaign
from processes import REPOSITORY, Finished, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

SCRIPT = REPOSITORY / "tests" / "losing.py"


def lose(folder: Path, case: str, ranks: int, losses: str, *state: object) -> Finished:
    return run(SCRIPT, case, ranks, losses, folder, *state, cwd=folder, timeout=int(os.environ.get("ESTATE_T", "55")))


def rows_in(folder: Path) -> list[dict[str, float]]:
    """Returns the rows that the module and Lightning have logged, in order."""
    [file] = folder.glob("lightning_logs/version_0/metrics.csv")
    with open(file) as opened:
        read = list(csv.DictReader(opened))
    rows = [{name: float(value) for name, value in row.items() if value and "/" not in name} for row in read]
    return [row for row in rows if row.keys() - {"step", "epoch"}]


def results_in(folder: Path) -> list[dict]:
    return [torch.load(file, weights_only=False) for file in sorted(folder.glob("result-*"))]


def close(tolerance: float, first, second) -> bool:
    """Returns whether two nested values are equal up to a tolerance."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(close(tolerance, first[name], second[name]) for name in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(close(tolerance, *pair) for pair in zip(first, second))
    if isinstance(first, torch.Tensor):
        return torch.allclose(first.double(), second.double(), rtol=0, atol=tolerance)
    return abs(first - second) <= tolerance if isinstance(first, float) else first == second


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    known: dict[str, Path] = {}

    def find(case: str) -> Path:
        if case not in known:
            known[case] = tmp_path_factory.mktemp(case)
            lose(known[case], case, 1, "").succeeded()
        return known[case]

    return find


@pytest.mark.parametrize(
    ("case", "ranks", "losses"),
    [
        ("adam", 3, "0:2:saving,0:4:before rows"),
        ("manual", 3, "1:2:validation,0:5:step"),
        *campaign(
            ("adam", 3, "0:0:epoch,0:1:epoch"),
            ("adam", 3, "0:5:validation end,0:6:after rows"),
            ("plateau", 3, "0:1:after rows,0:3:epoch"),
            ("val2", 3, "0:2:end,0:3:saving"),
            ("clip", 2, "0:3:end"),
            ("step", 3, "0:6:end,0:7:test"),
            ("steps", 3, "0:2:validation end,0:4:epoch"),
            ("bf16", 3, "2:2:epoch,0:4:step"),
            *((scheme, 3, "1:2:step") for scheme in ("cover", "spmm", "spmm_1d", "spmm_15d")),
            *((option, 3, "1:2:step") for option in ("spst", "swap", "replicate", "dgcl_r", "convs", "sockets")),
            *((part, 3, "0:3:validation") for part in ("types", "links", "average")),
        ),
    ],
)
def test_losses_leave_no_trace(case, ranks, losses, uninterrupted, tmp_path):
    finished = lose(tmp_path, case, ranks, losses)
    assert "The run continues." in finished.succeeded().output
    expected = uninterrupted(case)
    tolerance = 3e-2 if case == "bf16" else 1e-10
    [want], found = results_in(expected), results_in(tmp_path)
    assert len(found) == ranks - losses.count(",") - 1
    for each in found:
        assert not {name: (want[name], each[name]) for name in want if not close(tolerance, want[name], each[name])}
    assert close(tolerance, rows_in(expected), rows_in(tmp_path)), finished.output
    checkpoints = [sorted(str(file.relative_to(folder)) for file in folder.rglob("*.ckpt*")) for folder in (expected, tmp_path)]
    assert checkpoints[0] == checkpoints[1]
    hidden = [file for file in tmp_path.rglob("lightning_logs/**/.*") if file.is_file()]
    assert not hidden


@pytest.mark.parametrize("case", ["dropout", *campaign("codec", "rounding")])
def test_random_streams_are_those_of_a_resumed_run(case, tmp_path):
    """A run that resumes from the same state, with the same owners of nodes and the same streams."""
    interrupted, resumed = tmp_path / "interrupted", tmp_path / "resumed"
    interrupted.mkdir(), resumed.mkdir()
    lose(interrupted, case, 3, "1:2:step,5:50:never").succeeded()
    lose(resumed, case, 2, "", interrupted / "kept.pt").succeeded()
    losses = [{file.name: float(file.read_text()) for file in folder.glob("loss-*-2-?")} for folder in (interrupted, resumed)]
    assert len(losses[0]) == 10 and close(1e-10, *losses)


@pytest.mark.parametrize(
    ("case", "reason"),
    [("least", "1 ranks remain, and min_ranks=2"), *campaign(("alone", "MemoryError: one rank cannot hold the graph"))],
)
def test_too_few_ranks_leave_a_checkpoint(case, reason, uninterrupted, tmp_path):
    failed = lose(tmp_path, case, 2, "0:3:validation")
    path = tmp_path / "elastic.ckpt"
    assert failed.code != 0 and reason in failed.output, failed.output
    assert re.search(rf'epoch 3 is in {path}: continue with trainer.fit\(..., ckpt_path="{path}"\)', failed.output), failed.output
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    lose(resumed, case, 1, "", path).succeeded()
    [want], [found] = results_in(uninterrupted("adam")), results_in(resumed)
    # An ordinary checkpoint does not have the states of metrics that are never reset.
    rows = [[{**row, "loss_so_far": 0} for row in rows_in(each)] for each in (uninterrupted("adam"), resumed)]
    assert close(1e-10, want["weights"], found["weights"]) and close(1e-10, rows[0][12:], rows[1])
