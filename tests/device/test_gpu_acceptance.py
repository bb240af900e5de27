"""benchmarks/gpu_acceptance.py on the emulated device: what of it needs no GPU, and that it can fail."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from common import CAMPAIGN, campaign
from processes import REPOSITORY, Finished, environment, run

PARTS = ("models", "ranks", "kernels", "waits", "speed", "sampling") if CAMPAIGN else ("kernels", "nccl")


def accepted(folder: Path, plugin: str, parts: tuple[str, ...]) -> Finished:
    size = ("--edges", 3000, "--ranks", 2, *(() if CAMPAIGN else ("--schemes", "dgcl")))
    given = ("--device", "emulated", "--plugin", plugin, "--folder", folder / "kept", "--parts", *parts)
    path = {"PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], str(REPOSITORY / "tests" / "device")])}
    return run(REPOSITORY / "benchmarks" / "gpu_acceptance.py", *given, *size, cwd=folder, variables=path)


def rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "kept" / "acceptance.json").read_text())["rows"]


def test_all_of_it_that_needs_no_gpu_passes_and_is_kept(tmp_path):
    accepted(tmp_path, "emulated_plugin", PARTS).succeeded()
    found = rows(tmp_path)
    assert {each["part"] for each in found} == {*PARTS} and all(each["ok"] for each in found)
    # Parts that have passed are not run again: nothing would, under this plugin.
    accepted(tmp_path, "wrong_plugin", PARTS).succeeded()
    assert rows(tmp_path) == found


@pytest.mark.parametrize("part", ["kernels", *campaign("models")])
def test_wrong_sums_are_found(tmp_path, part):
    finished = accepted(tmp_path, "wrong_plugin", (part,))
    assert finished.code == 1 and "FAILED" in finished.output
    wrong = [each["check"] for each in rows(tmp_path) if not each["ok"]]
    assert wrong[0].startswith("sums" if part == "kernels" else "gcn") and not any("gat:" in each for each in wrong)


def test_what_is_not_there_is_skipped_by_name(tmp_path):
    accepted(tmp_path, "emulated_plugin", ("nccl", "memory", "sanitizer")).succeeded()
    assert [each["result"] for each in rows(tmp_path)] == ["skipped"] * 3
