"""Ranks start in a process that has run the script's imports."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from processes import Finished, run

from lightning_gnn.launching import preload

ON_CPU = torch.version.cuda is None
"""Whether this build of torch allows forks: with CUDA, no process runs imports for others."""

SCRIPT = """
import os, sys, threading, traceback
import lightning as L
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition
from torch_geometric.nn.models import GCN
import slow

class Event(L.Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.global_rank == 1 and trainer.current_epoch == 1:
            if sys.argv[1] == "raise":
                raise ValueError("the data is spoilt")
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), 9)

options = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
model, data = NodeClassifier(GCN(8, 8, 2, 3)), GraphDataModule(planted_partition(300, num_classes=3, num_features=8))
trainer = L.Trainer(strategy="dgcl", devices=3, max_epochs=2, callbacks=Event(), **options)
trainer.fit(model, datamodule=data)
preloaded = any(frame.filename.endswith("preload.py") for frame in traceback.extract_stack())
loss = float(trainer.callback_metrics["train_loss"])
line = f"rank {trainer.global_rank} {preloaded} {loss} {__name__} {sys.argv[1:]} {os.getcwd()} {os.getpid()} {os.getppid()}"
os.write(1, f"{line}\\n".encode())
if trainer.global_rank == 1:
    threading.Thread(target=slow.say).start()
"""
SLOW = """
import time

def say():
    import lightning_gnn
    time.sleep(0.5)
    print("thread of rank 1 has ended", flush=True)
"""


def in_script(folder: Path, *arguments: str) -> Finished:
    (folder / "script.py").write_text(SCRIPT)
    (folder / "slow.py").write_text(SLOW)
    return run("script.py", *arguments, cwd=folder, warm=False)


def said(finished: Finished) -> dict[str, list[str]]:
    """Returns the words of each rank."""
    lines = [line.split() for line in finished.succeeded().output.splitlines()]
    return {line[1]: line[2:] for line in lines if line and line[0] == "rank"}


def test_ranks_run_the_script_from_its_first_line_without_its_imports(tmp_path):
    finished = in_script(tmp_path, "a b")
    ranks = said(finished)
    assert [ranks[rank][0] for rank in "012"] == ["False", str(ON_CPU), str(ON_CPU)]
    for rank in "012":
        assert ranks[rank][1:-2] == [ranks["0"][1], "__main__", "['a", "b']", str(tmp_path)]
    assert ranks["1"][-1] == ranks["2"][-1] == ranks["0"][-2]  # rank 0's process is the parent of the others
    assert "thread of rank 1 has ended" in finished.output


IMPORTS = """
BEFORE
import lightning_gnn
from lightning_gnn.launching.preload import take
print("preloaded", take() is not None)
"""


@pytest.mark.parametrize(
    ("before", "variables", "expected"),
    [
        ("'A docstring.'\nimport torch\nfrom pathlib import Path", {}, ON_CPU),
        ("import os\nhere = os.getcwd()", {}, False),
        pytest.param("import thread", {}, False, marks=pytest.mark.campaign),
        pytest.param("import user", {}, False, marks=pytest.mark.campaign),
        pytest.param("", {"LIGHTNING_GNN_PRELOAD": "0"}, False, marks=pytest.mark.campaign),
        pytest.param("", {"RANK": "0"}, False, marks=pytest.mark.campaign),
    ],
    ids=["imports", "a line before", "a thread", "another file imports first", "the switch", "torchrun"],
)
def test_a_process_is_forked_only_where_a_rank_would_not_differ(tmp_path, before, variables, expected):
    (tmp_path / "thread.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()")
    (tmp_path / "user.py").write_text("import lightning_gnn")
    (tmp_path / "script.py").write_text(IMPORTS.replace("BEFORE", before))
    finished = run("script.py", cwd=tmp_path, variables=variables, warm=False)
    assert f"preloaded {expected}" in finished.succeeded().output


@pytest.mark.parametrize(("command", "expected"), [("lightning-gnn", ON_CPU), ("pytest", False)])
def test_of_installed_commands_only_ours_has_the_process(monkeypatch, command, expected):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", f"{sys.prefix}/bin/{command}", raising=False)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    for name in preload._STARTERS:
        monkeypatch.delenv(name, raising=False)
    assert preload._is_supported() == expected


@pytest.mark.parametrize(
    ("event", "last"),
    [
        pytest.param(
            "raise",
            "Rank 1 failed in epoch 1, the epoch's start: ValueError: the data is spoilt",
            marks=pytest.mark.campaign,
        ),
        ("kill", "Rank 1 was ended by SIGKILL in epoch 1, the epoch's start"),
    ],
)
def test_failures_are_reported_as_of_other_ranks(tmp_path, event, last):
    finished = in_script(tmp_path, event)
    assert finished.code != 0
    assert finished.output.strip().splitlines()[-1].startswith(last)
    assert "preload.py" not in finished.output


UNUSED = """
import lightning_gnn
from pathlib import Path
print("waiting", Path("/proc/self/task/{0}/children".format(__import__("os").getpid())).read_text())
"""


@pytest.mark.campaign
def test_the_process_ends_with_a_script_that_does_not_use_it(tmp_path):
    (tmp_path / "script.py").write_text(UNUSED)
    _, pid = run("script.py", cwd=tmp_path, warm=False).succeeded().output.split()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
