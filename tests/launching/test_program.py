"""A program is run again as it was started: options, arguments, folder. Plain Pythons, which import nothing of this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest
from processes import REPOSITORY, run
from warm import cold

CODE = f"""
import os, sys
START = os.environ.get("START")
if START:
    os.chdir(START)  # before the import
exec(compile(open({str(REPOSITORY / "lightning_gnn/launching/program.py")!r}).read(), "program.py", "exec"))
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
import json, subprocess
told = [sys.argv[1:], sys.flags.optimize, sys.flags.utf8_mode, sys.warnoptions, sys.stdout.write_through, os.getcwd()]
print(json.dumps(told), flush=True)
if "AGAIN" not in os.environ:
    try:
        arguments, folder = command()
    except RuntimeError as error:
        print(error)
    else:
        subprocess.run(arguments, cwd=folder, env={{**os.environ, "AGAIN": "1"}}, check=True)
"""
FLAGS = ("-uO", "-W", "error", "-X", "utf8", "-i", "-Wdefault::ImportWarning")


def output(folder: Path, *arguments: str, given: str = "", **variables: str) -> list[str]:
    command, env = [sys.executable, *arguments], {**os.environ, **variables}
    with cold():
        done = subprocess.run(command, cwd=folder, input=given, env=env, capture_output=True, text=True, timeout=100)
    return [line for line in done.stdout.splitlines() if line] or [done.stderr]


def same_twice(folder: Path, *arguments: str, **variables: str) -> None:
    """The second run says what the first has said: where it is, too, although the first had gone elsewhere."""
    first, second = map(json.loads, output(folder, *arguments, **variables))
    assert second == first
    assert first[:4] == [["one", "two words"], 1, 1, ["error", "default::ImportWarning"]] and first[4] is True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    for name in ("script.py", "package/__init__.py", "package/script.py", "package/__main__.py"):
        (tmp_path / name).write_text("" if name.endswith("__init__.py") else CODE)
    zipapp.create_archive(tmp_path / "package", tmp_path / "program.pyz")
    return tmp_path


@pytest.mark.parametrize(
    "how",
    [
        ("script.py",),
        ("./package/script.py",),
        ("program.pyz",),
        ("package",),
        ("-m", "package.script"),
        ("-mpackage",),
        ("-c", CODE),
    ],
    ids=["script", "in a folder", "archive", "folder", "module", "package", "code"],
)
def test_it_is_run_again_as_it_was(folder, how):
    same_twice(folder, *FLAGS, *how, "one", "two words")


def test_the_folder_that_it_was_started_in_is_told_by_its_file(folder):
    """It may have gone elsewhere before it has imported this package."""
    same_twice(folder, *FLAGS, "package/script.py", "one", "two words", START="package")


def test_under_another_program(folder):
    """A debugger, say, which has taken its own arguments away."""
    (folder / "debugger.py").write_text(
        "import runpy, sys\nsys.argv = sys.argv[2:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    first, second = map(json.loads, output(folder, "debugger.py", "--port=1", "script.py", "one"))
    assert first == second and first[0] == ["one"]


def test_what_cannot_be_run_again(folder):
    assert output(folder, "-", given=CODE)[1] == "it was read from standard input, which can be read only once"
    assert output(folder, given=CODE)[1] == "it was read from standard input, which can be read only once"
    (folder / "gone.py").write_text(f"import os\nos.remove({str(folder / 'gone.py')!r})\n{CODE}")
    assert output(folder, "gone.py")[1] == f"its file {folder}/gone.py no longer exists"
    (folder / "other.py").write_text(
        "import multiprocessing, runpy\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.Process(target=runpy.run_path, args=('script.py',))\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    assert output(folder, "other.py")[1].startswith("this process was started by multiprocessing")


TRAINS = """
import os, sys, lightning as L
from torch_geometric.nn.models import GCN
from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
options = dict(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = L.Trainer(strategy="dgcl", devices=2, **options)
try:
    trainer.fit(NodeClassifier(GCN(32, 16, 2, 8)), datamodule=GraphDataModule(planted_partition(100)))
except RuntimeError as error:
    print(error)
else:
    print("RANK", trainer.global_rank, os.getcwd(), flush=True)
"""


def test_ranks_of_a_program_that_has_gone_elsewhere(tmp_path):
    (tmp_path / "trains.py").write_text(TRAINS)
    said = run("trains.py", cwd=tmp_path).succeeded().output
    assert {f"RANK {rank} {tmp_path}/elsewhere" for rank in (0, 1)} <= set(said.splitlines())


@pytest.mark.campaign
def test_ranks_of_code_and_of_standard_input(tmp_path):
    finished = run("-c", TRAINS, cwd=tmp_path)
    assert finished.succeeded().output.count(f"{tmp_path}/elsewhere") == 2
    told = "\n".join(output(tmp_path, "-", given=TRAINS, PYTHONPATH=str(REPOSITORY)))
    assert "runs this program again, and that is not possible: it was read from standard input" in told
    assert "Trainer(strategy='dgcl_notebook')" in told


def test_forked_pythons_have_a_session_of_their_own_before_their_pid_is_known():
    """Jupyter sends signals to the group that a kernel has when it is started, which could be the group of the tests."""
    for _ in range(10):
        with subprocess.Popen([sys.executable, "-c", "pass"], start_new_session=True) as started:
            assert os.getpgid(started.pid) == started.pid
