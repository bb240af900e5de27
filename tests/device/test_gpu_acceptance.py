"""benchmarks/gpu_acceptance.py on the emulated device: what of it needs no GPU, and that it can fail."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from common import CAMPAIGN, campaign
from processes import REPOSITORY, Finished, environment, run

PARTS = ("models", "ranks", "kernels", "bandwidth", "waits", "speed", "sampling") if CAMPAIGN else ("kernels", "bandwidth")
SCRIPT = REPOSITORY / "benchmarks" / "gpu_acceptance.py"


def accepted(folder: Path, plugin: str, parts: tuple[str, ...], *more: object, trouble: str = "") -> Finished:
    size = ("--edges", 3000, "--ranks", 2, *(() if CAMPAIGN else ("--schemes", "dgcl")))
    given = ("--device", "emulated", "--plugin", plugin, "--folder", folder / "kept", "--parts", *parts)
    path = {"PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], str(REPOSITORY / "tests" / "device")])}
    return run(SCRIPT, *given, *size, *more, cwd=folder, variables={**path, "TROUBLE": trouble})


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "kept" / "acceptance.json").read_text())["parts"]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [{"part": part, **each} for part, found in results(folder).items() for each in found["rows"]]


def test_all_of_it_that_needs_no_gpu_passes_and_is_kept(tmp_path):
    accepted(tmp_path, "emulated_plugin", PARTS).succeeded()
    found = results(tmp_path)
    assert {*found} == {*PARTS} and all(each["state"] == "passed" for each in found.values())
    # Parts that have passed are not run again: nothing would, under this plugin.
    accepted(tmp_path, "wrong_plugin", PARTS).succeeded()
    assert results(tmp_path) == found


@pytest.mark.parametrize("part", ["kernels", *campaign("models", "nccl")])
def test_wrong_sums_are_found(tmp_path, part):
    finished = accepted(tmp_path, "wrong_plugin", (part,), "--cases", "dgcl, gcn", "dgcl, gat")
    assert finished.code == 1 and "FAILED" in finished.output
    wrong = [each["check"] for each in rows(tmp_path) if not each["ok"]]
    assert results(tmp_path)[part]["state"] == "failed" and wrong[0] in results(tmp_path)[part]["reason"]
    start = {"kernels": "sums", "models": "gcn", "nccl": "2 ranks, dgcl, gcn"}[part]
    assert wrong[0].startswith(start) and not any("gat:" in each for each in wrong)


def test_what_is_not_there_is_skipped_by_name_and_tried_again(tmp_path):
    for _ in range(2):
        finished = accepted(tmp_path, "emulated_plugin", ("memory", "sanitizer")).succeeded()
        assert all(f"{part} ..." in finished.output for part in ("memory", "sanitizer"))
        assert [each["state"] for each in results(tmp_path).values()] == ["skipped"] * 2
        assert results(tmp_path)["sanitizer"]["reason"] == "not installed; needs compute-sanitizer"


def test_parts_that_hang_or_end_do_not_end_the_others(tmp_path):
    parts = ("waits", "kernels", "nccl", "memory")
    finished = accepted(tmp_path, "troubled_plugin", parts, "--limit", 20, "--minutes", 2, trouble="parts")
    assert finished.code == 1 and not finished.left_over
    found = results(tmp_path)
    assert {part: each["state"] for part, each in found.items()} == {
        "waits": "failed", "kernels": "failed", "nccl": "not run", "memory": "skipped"
    }  # fmt: skip
    assert found["waits"]["reason"] == "took more than 20 s" and found["kernels"]["reason"] == "exit status 7"
    assert "of --minutes were left, and it takes about 240 s" in found["nccl"]["reason"]
    table = run(SCRIPT, "--folder", tmp_path / "kept", "--table", cwd=tmp_path).succeeded().output
    assert "| waits | a step waits for the device once | failed, took more than 20 s | none, torch" in table, table


def test_untested_parts_come_first(tmp_path):
    """Failed parts run after the others; passed parts do not run."""
    (tmp_path / "kept").mkdir()
    known = {part: {"state": state, "reason": "", "rows": []} for part, state in (("waits", "failed"), ("models", "passed"))}
    (tmp_path / "kept" / "acceptance.json").write_text(json.dumps({"parts": known}))
    parts = ("waits", "models", "nccl", "speed", "memory")
    finished = accepted(tmp_path, "emulated_plugin", parts, "--minutes", 0.1)
    assert finished.code == 1  # one has failed before
    said = [line.partition(": not run")[0] for line in finished.output.splitlines() if ": not run" in line]
    assert said == ["memory", "speed", "nccl", "waits"]
    assert [each["state"] for each in results(tmp_path).values()] == ["failed", "passed", *["not run"] * 3]


def counts(folder: Path, trouble: str) -> dict[str, float]:
    (folder / trouble).mkdir()
    accepted(folder / trouble, "troubled_plugin", ("host",), "--kinds", "gcn", trouble=trouble).succeeded()
    found = rows(folder / trouble)
    assert len(found) == 6 and all(each["launches"] > 30 and each["calls"]["torch"] > 100 for each in found)
    assert not any("wall ms" in each or "host ms" in each for each in found)
    return {each["check"]: each["syncs"] for each in found}


def test_host_counts_what_a_step_waits_for(tmp_path):
    plain, waiting = (counts(tmp_path, trouble) for trouble in ("no", "steps"))
    for check, syncs in plain.items():
        assert waiting[check] == syncs + ("dgcl" in check), (check, syncs, waiting[check])
        assert syncs == 0 or "dgcl" in check


def test_cases_that_hang_or_end_do_not_end_the_others(tmp_path):
    cases = ("--cases", "dgcl, gcn", "dgcl, gat", "two groups in flight", "--case-limit", 15)
    finished = accepted(tmp_path, "troubled_plugin", ("nccl",), *cases, trouble="cases")
    assert finished.code == 1 and not finished.left_over
    hung, ended, passed = rows(tmp_path)
    assert "no end within" in hung["value"] and "emulated rank 1: exit status 7" in ended["value"]
    assert passed["ok"] and passed["value"] == 0


CASES = {
    2: [
        ("dgcl, gcn", "dgcl, gat", "cover, gcn", "cover, gat", "spmm, gcn", "spmm_1d, gcn"),
        ("spmm_15d, gcn", "spmm_15d, gat", "vertex_cut, gcn", "vertex_cut, gat", "cache", "codec int8", "codec bf16"),
        ("planned exchanges", "planned exchanges, cover", "sampling", "cluster_allreduce", "gossip", "checkpoints"),
        ("killed",), ("stopped",), ("asleep",),
    ],
    4: [
        ("two groups in flight", "spmm_2d, gcn", "planned relays"),
        ("dgcl, gcn", "cover, gcn", "vertex_cut, gcn", "gossip"),
        ("spmm_3d, gcn",),  # on 8 ranks
    ],
}  # fmt: skip


@pytest.mark.parametrize(("size", "cases"), campaign(*((size, cases) for size, each in CASES.items() for cases in each)))
def test_ranks_on_one_device(tmp_path, size, cases):
    accepted(tmp_path, "emulated_plugin", ("nccl",), "--ranks", size, "--cases", *cases).succeeded()
    found = rows(tmp_path)
    assert all(each["ok"] for each in found) and len(found) == (3 if cases[0] in ("killed", "stopped", "asleep") else len(cases))


@pytest.mark.parametrize(("version", "skipped"), [(None, True), ((2, 29, 7), True), ((2, 30, 3), False), ((2, 31, 0), False)])
def test_ranks_share_a_gpu_with_a_recent_nccl_only(tmp_path, version, skipped):
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import argparse, gpu_nccl; "
        f"gpu_nccl.nccl_version = lambda: {version}; options = argparse.Namespace(plugin=None, device='cuda'); "
        "print('reason:', gpu_nccl.skip_reason(2, options))"
    )
    output = run("-c", code, cwd=REPOSITORY).succeeded().output
    name = "NCCL is missing" if version is None else f"NCCL {'.'.join(map(str, version))}"
    assert f"reason: {name if skipped else None}" in output
