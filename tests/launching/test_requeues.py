"""Some of the signals of ``benchmarks/requeues.py``, each judged as there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import REPOSITORY, Finished, run


def signals(folder: Path) -> Finished:
    script = REPOSITORY / "benchmarks" / "requeues.py"
    return run(script, "--signals", 3, "--seed", 3, "--json", "signals.json", cwd=folder, timeout=150)


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.program(runs=signals)
def test_signals(ran):
    """Two reach both ranks at once, and the third one rank 2 s before the other."""
    folder, finished = ran
    finished.succeeded()
    trials = json.loads((folder / "signals.json").read_text())
    assert [trial["apart"] for trial in trials] == [0.0, 0.0, 2.0] and not any(trial["wrong"] for trial in trials)
