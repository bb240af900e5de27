"""A few of the kills of ``benchmarks/kills.py``, each judged as there; and what is left of a writer that was killed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

import pytest
from processes import REPOSITORY, Finished, run

from lightning_gnn.checkpoints import WholeCheckpointIO


def kills(folder: Path) -> Finished:
    chosen = ("--strategies", "dgcl", "gossip", "--phases", "partition", "set-up", "checkpoint", "--patience", 200)
    return run(
        REPOSITORY / "benchmarks" / "kills.py", "--kills", 6, *chosen, "--json", "kills.json", cwd=folder, timeout=600
    )


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.program(runs=kills)
def test_kills(ran):
    folder, finished = ran
    finished.succeeded()
    tally = json.loads((folder / "kills.json").read_text())
    assert len(tally["trials"]) == 6 and not any(trial["wrong"] for trial in tally["trials"])


def test_the_next_writer_removes_what_a_killed_one_has_left(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = platform.node()
    left = tmp_path / f".a[1].ckpt.{here}.{ended.pid}.0123.part"
    others = [
        tmp_path / f".a[1].ckpt.{here}.{os.getppid()}.0123.part",  # runs
        tmp_path / f".a[1].ckpt.not-{here}.{ended.pid}.0123.part",  # perhaps runs
        tmp_path / f".b.ckpt.{here}.{ended.pid}.0123.part",
    ]
    for part in (left, *others):
        part.touch()
    WholeCheckpointIO().save_checkpoint({"epoch": 1}, tmp_path / "a[1].ckpt")
    assert not left.exists() and all(other.exists() for other in others)
    assert WholeCheckpointIO().load_checkpoint(tmp_path / "a[1].ckpt") == {"epoch": 1}
