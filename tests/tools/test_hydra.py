"""Applications of Hydra: all ranks use configuration and folder of rank 0's job, and only rank 0 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from common import campaign
from processes import REPOSITORY, TORCHRUN, run

pytest.importorskip("hydra")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def lines(folder: Path, rank: int) -> list[Any]:
    return [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("launcher", [(), *campaign((TORCHRUN,))])
@pytest.mark.parametrize(
    ("arguments", "jobs"),
    [
        (("--multirun", "columns=4,8", "hydra.job.chdir=True"), 2),
        *campaign((("columns=4",), 1), (("--multirun", "columns=4,8", "epochs=0,1"), 4)),
    ],
)
def test_jobs_are_equal_on_all_ranks(tmp_path, launcher, arguments, jobs):
    script = REPOSITORY / "tests" / "hydra_script.py"
    run(*launcher, script, *arguments, cwd=tmp_path, variables={"FOLDER": str(tmp_path)}).succeeded()
    first, second = lines(tmp_path, 0), lines(tmp_path, 1)
    assert len(first) == jobs and len({folder for _, _, folder, _ in first}) == jobs
    # Ranks that rank 0 starts in the second job begin with it.
    assert second == (first[1:] if "epochs=0,1" in arguments and not launcher else first)
    assert ("hydra.job.chdir=True" in arguments) == (first[0][2] == first[0][3])
    written = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.*") if file.is_file()} - {"0.jsonl", "1.jsonl"}
    [root] = {name.partition("/")[0] for name in written}
    of_a_job = {".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "hydra_script.log"}
    expected = {str((Path(folder) / name).relative_to(tmp_path)) for _, _, folder, _ in first for name in of_a_job}
    assert written - expected == ({str(Path(first[0][2]).parent.relative_to(tmp_path) / "multirun.yaml")} if jobs > 1 else set())
    assert root == ("multirun" if jobs > 1 else "outputs") and expected <= written
