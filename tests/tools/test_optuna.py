"""Searches with Optuna: rank 0 draws, records and prunes, and the trials of all ranks are equal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from common import campaign
from processes import REPOSITORY, TORCHRUN, Finished, run

optuna = pytest.importorskip("optuna")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def search(
    folder: Path, strategy: str, devices: int, event: str = "", storage: str = "memory", launcher: tuple[str, ...] = ()
) -> Finished:
    script = REPOSITORY / "tests" / "search_script.py"
    return run(*launcher, script, strategy, devices, event, storage, folder, cwd=folder)


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("[0-9].json"))]


@pytest.mark.parametrize(
    ("strategy", "devices", "storage", "launcher"),
    [
        ("dgcl", 2, "memory", ()),
        ("dgcl", 2, "sqlite", TORCHRUN),
        *campaign(
            ("dgcl", 2, "sqlite", ()),
            ("dgcl", 2, "journal", ()),
            ("dgcl", 3, "memory", ()),
            ("dgcl_spawn", 2, "memory", ()),
            ("dgcl_spawn", 2, "sqlite", ()),
            ("dgcl", 1, "sqlite", ()),
            ("auto", 1, "memory", ()),
        ),
    ],
)
def test_trials_are_equal_on_all_ranks(tmp_path, strategy, devices, storage, launcher):
    search(tmp_path, strategy, devices, "", storage, launcher).succeeded()
    found = results(tmp_path)
    assert len(found) == (1 if strategy == "dgcl_spawn" else devices)
    assert all(each == found[0] for each in found)
    assert found[0]["seen"] == [0, 1, 2, 3, 4]
    assert found[0]["states"] == ["COMPLETE", "COMPLETE", "PRUNED", "FAIL", "COMPLETE"]
    assert found[0]["reports"] == [3, 3, 2, 1, 3]
    assert found[0]["columns"][0] == 16 and len(set(found[0]["columns"])) > 1
    if storage == "sqlite":
        [summary] = optuna.get_all_study_summaries(f"sqlite:///{tmp_path}/study.db")
        assert summary.n_trials == (5 if strategy == "dgcl_spawn" else 8)  # of a second search those until an error
    if storage == "journal":
        backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal"))
        [summary] = optuna.get_all_study_summaries(optuna.storages.JournalStorage(backend))
        assert summary.n_trials == 8


@pytest.mark.parametrize("place", ["in the check", *campaign("before training")])
def test_ranks_that_are_started_in_a_later_trial_begin_with_it(tmp_path, place):
    search(tmp_path, "dgcl", 2, f"first fails {place}").succeeded()
    first, second = results(tmp_path)
    assert first["seen"] == [0, 1, 2, 3, 4] and second["seen"] == [1, 2, 3, 4]
    assert first["trials"] == second["trials"] and first["states"][0] == "FAIL"


@pytest.mark.campaign
def test_a_study_that_is_created_after_training(tmp_path):
    search(tmp_path, "dgcl", 2, "fit before", "sqlite").succeeded()
    first, second = results(tmp_path)
    assert first == second


@pytest.mark.parametrize(("rank", "launcher"), [(1, ()), *campaign((0, ()), (0, TORCHRUN), (1, TORCHRUN))])
def test_an_error_on_one_rank_ends_the_search_with_its_cause(tmp_path, rank, launcher):
    began = time.monotonic()
    finished = search(tmp_path, "dgcl", 2, f"raise on {rank}", "memory", launcher)
    assert finished.code != 0 and not finished.left_over and time.monotonic() - began < 60
    assert f"ValueError: the data of rank {rank} is spoilt" in finished.output
    assert f"The objective must end equally on all ranks, got ValueError on rank {rank}" in finished.output


@pytest.mark.campaign
def test_slurm(tmp_path):
    from test_environments import TASKS

    (tmp_path / "srun.py").write_text(TASKS)
    values = {"JOB_ID": "4712", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "NODELIST": "localhost"}
    variables = {f"SLURM_{name}": value for name, value in {**values, "NODEID": "0"}.items()}
    script = REPOSITORY / "tests" / "search_script.py"
    arguments = (script, "dgcl", 2, "", "sqlite", tmp_path)
    run(tmp_path / "srun.py", *arguments, cwd=tmp_path, variables=variables).succeeded()
    first, second = results(tmp_path)
    assert first == second


def test_trials_that_differ_name_the_difference_and_the_fix(tmp_path):
    finished = search(tmp_path, "dgcl", 2, "plain")
    assert finished.code != 0
    assert "The run must be the same on all ranks: the hyperparameter 'lr' is" in finished.output
    assert "lightning_gnn.optuna.create_study" in finished.output


def test_options_that_are_not_supported():
    from lightning_gnn.optuna import create_study

    with pytest.raises(ValueError, match="n_jobs must be 1"):
        create_study().optimize(lambda trial: 0.0, n_trials=1, n_jobs=2)
