"""Commands in processes of their own, with a deadline, that must leave no process behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import psutil
from warm import MARK, cold

REPOSITORY = Path(__file__).resolve().parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_OF_A_RANK = ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")

# PyG leaves the functions that it generates in files, torch makes folders for those that it compiles and for torchrun's logs.
_OF_OTHERS = re.compile(r".*_(propagate|edge_updater)_\w+\.py|torchinductor_|torchelastic_|netlab-|__pycache__")

ENVIRONMENT: dict[str, str] = dict(os.environ)
"""What every command finds as its environment: that of the session's beginning, for tests change this process's own."""


@dataclass
class Finished:
    """How a command ended."""

    code: int
    output: str
    left_over: list[str]  # command lines of processes that outlived it
    files: list[str]  # temporary files, and files of shared memory, that outlived it
    ended: float  # when its last process had ended, time.time()

    def succeeded(self) -> Finished:
        assert self.code == 0, self.output[-6000:]
        assert not self.left_over, f"still running: {self.left_over}"
        assert not self.files, f"left behind: {self.files}"
        return self


def environment() -> dict[str, str]:
    env = {key: value for key, value in ENVIRONMENT.items() if key not in _OF_A_RANK}
    paths = [str(REPOSITORY), str(REPOSITORY / "tests"), ENVIRONMENT.get("PYTHONPATH", "")]
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "200"}


def _of_run(mark: str, session: int) -> list[psutil.Process]:
    """Returns the processes of a run: of its session, or with its mark in the environment that they were started with."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            of_run = (
                os.getsid(process.pid) == session
                or process.environ().get(MARK) == mark
                or Path(f"/proc/{process.pid}/comm").read_text().strip() == mark[:15]  # it was forked
            )
            if of_run and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _in_use(names: set[str]) -> set[str]:
    """Returns those files of shared memory that a process has mapped: they are that process's, not left behind."""
    mapped: set[int] = set()
    for pid in psutil.pids() if names else ():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
    found = set()
    for name in names:
        with contextlib.suppress(OSError):
            if (
                os.stat(f"/dev/shm/{name}").st_ino in mapped
            ):  # not by name: a semaphore is mapped before it gets its own
                found.add(name)
    return found


def run(
    *arguments: object,
    cwd: Path,
    timeout: float = 200,
    variables: Mapping[str, str] | None = None,
    warm: bool = True,
) -> Finished:
    """Runs ``python *arguments`` in `cwd`, with this checkout's package and with `variables` in its environment.

    Args:
        arguments: a script or ``-m MODULE``, and what it is called with.
        cwd: its folder.
        timeout: seconds after which it fails.
        variables: added to :data:`ENVIRONMENT`.
        warm: its processes have imported this package already, see ``warm.py``, which saves seconds; not with variables that are
            read on import.
    """
    mark = uuid.uuid4().hex
    env = {**environment(), MARK: mark, "TMPDIR": mkdtemp(), **(variables or {})}
    command = [*map(str, arguments)]
    shared_memory = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryFile("w+") as output:  # a pipe would stay open as long as any rank lives
        with nullcontext() if warm else cold():
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=cwd,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code: int | str = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"no end within {timeout} s"
        deadline = time.monotonic() + 10  # rank 0 may end a moment before the others
        while not isinstance(code, str) and time.monotonic() < deadline and _of_run(mark, process.pid):
            time.sleep(0.1)
        ended, left_over = time.time(), []
        for remaining in _of_run(mark, process.pid):
            with contextlib.suppress(psutil.Error):
                left_over.append(" ".join(remaining.cmdline()))
                remaining.kill()
        process.wait()
        output.seek(0)
        text = output.read()
    if isinstance(code, str):
        raise AssertionError(f"{code}; {left_over}\n{text[-6000:]}")
    files = [name for name in os.listdir(env["TMPDIR"]) if not _OF_OTHERS.match(name)]
    shared = set(os.listdir("/dev/shm")) - shared_memory
    deadline = time.monotonic() + 3  # others' come and go
    while (shared := shared & set(os.listdir("/dev/shm")) - _in_use(shared)) and time.monotonic() < deadline:
        time.sleep(0.1)
    shutil.rmtree(env["TMPDIR"])
    return Finished(code, text, left_over, [*files, *shared], ended)
