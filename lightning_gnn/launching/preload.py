"""Forked process that has run the imports of a script; ranks are forks of it and do not import again.

The process is forked when the first lines of a script import this package. A fork does not copy threads, and a GPU's context does
not work in it. So the process is forked only under a CPU build of torch, and only before any thread exists, except the threads of
OpenBLAS, which end at a fork. Started ranks run the script from its first line.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import logging
import os
import runpy
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import numpy as np
import torch

from lightning_gnn.launching import MPI_SIZES, STARTED_BY, join_parent, program

SWITCH = "LIGHTNING_GNN_PRELOAD"
"""Environment variable: ``0`` disables the process."""

_STARTERS = "RANK", "LOCAL_RANK", "SLURM_JOB_ID", "LSB_JOBID", *MPI_SIZES, STARTED_BY
"""Environment variables of processes that another launcher or this package started; no process is forked in them."""

_LOOK_S = 5.0  # interval at which the process checks that its parent runs
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER of Linux: orphans of this process's children become its children
_MESSAGE = 1 << 18


class Preloaded:
    """Forked process in which ranks start, as seen by the process that forked it.

    Args:
        pid: process id.
        connection: socket to the process.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self._pid, self._connection = pid, connection

    def start(self, command: Sequence[str], folder: str, environment: Mapping[str, str], descriptor: int) -> int:
        """Returns the process id of a started rank. The rank becomes a child of this process in :meth:`close`.

        Args:
            command: Python with its options, and the script with its arguments.
            folder: working directory.
            environment: environment variables of the rank. `STARTED_BY` contains ``{}``, which the rank replaces by its
                pipe's descriptor.
            descriptor: the rank's pipe to this process.
        """
        request = json.dumps([command[1 + len(program.options()) :], folder, dict(environment)])
        socket.send_fds(self._connection, [request.encode()], [descriptor])
        return int(self._connection.recv(_MESSAGE))

    def close(self) -> None:
        """End the process; ranks that it started are children of this process afterwards."""
        _adopt(True)
        self._connection.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        _adopt(False)


_preloaded: Preloaded | None = None


def take() -> Preloaded | None:
    """Returns the forked process at the first call; None later, or if there is none."""
    global _preloaded
    found, _preloaded = _preloaded, None
    return found


def preload(frame: FrameType | None) -> None:
    """Fork the process if the current import is at the beginning of the script that this process runs.

    Args:
        frame: frame of the module that is being imported.
    """
    global _preloaded
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None or not _is_supported() or not _has_only_imported(frame):
        return
    parent, (ours, theirs) = os.getpid(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are counted here
        pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(parent, theirs)
    theirs.close()
    preloaded = Preloaded(pid, ours)
    if len(os.listdir("/proc/self/task")) > 1:
        preloaded.close()
    else:
        _preloaded = preloaded


def _is_supported() -> bool:
    """Returns whether this process may start ranks by running a file again, and a fork of it can compute."""
    file = Path(str(sys.modules["__main__"].__file__))
    is_own_script = file.name == "lightning-gnn" or not file.is_relative_to(sys.prefix)  # no other installed command
    is_alone = threading.active_count() == 1 and not any(name in os.environ for name in _STARTERS)
    on_cpu = sys.platform == "linux" and torch.version.cuda is None and torch.version.hip is None
    return is_own_script and is_alone and on_cpu and os.environ.get(SWITCH) != "0"


def _has_only_imported(frame: FrameType) -> bool:
    """Returns whether a frame is the script's, and its lines so far only import: lines that run once more have no effect."""
    main = sys.modules["__main__"]
    if frame.f_globals is not vars(main) or frame.f_code.co_name != "<module>":
        return False
    with contextlib.suppress(OSError, SyntaxError):
        before = [line for line in ast.parse(Path(str(main.__file__)).read_bytes()).body if line.lineno <= frame.f_lineno]
        return all(isinstance(getattr(line, "value", line), (ast.Import, ast.ImportFrom, ast.Constant)) for line in before)
    return False


def _serve(parent: int, connection: socket.socket) -> None:
    """Start ranks on request in this process, which ends with its connection or its parent."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        connection.settimeout(_LOOK_S)
        own_pid = os.getpid()
        _prepare()
        while os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                message, descriptors, *_ = socket.recv_fds(connection, _MESSAGE, 1)
                if not message:
                    break
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    _run_rank(own_pid, descriptors[0], *json.loads(message))
                os.close(descriptors[0])
                connection.send(str(pid).encode())
    finally:
        os._exit(0)


def _prepare() -> None:
    """Import modules of a later Trainer call, and load the tables of numba; nothing here starts a thread."""
    package, disabled = sys.modules["lightning_gnn"], logging.root.manager.disable
    logging.disable()  # the process that runs the script logs the same
    assert package.GraphDataModule and package.DGCLStrategy
    from numba.core.registry import cpu_target

    cpu_target.target_context.refresh()
    logging.disable(disabled)


def _run_rank(preloaded: int, descriptor: int, arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Run the script from its first line in this process, and end the process."""
    while os.getppid() == preloaded:  # until the process that started this rank is its parent
        time.sleep(1e-3)
    code: object = 0
    try:
        environment[STARTED_BY] = environment[STARTED_BY].format(descriptor)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = arguments
        np.random.seed()  # noqa: NPY002  as at its import
        # Its import does not end in this process; threads that import it would wait.
        setattr(sys.modules["lightning_gnn"].__spec__, "_initializing", False)  # noqa: B010
        join_parent()
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != arguments[0]:
            trace = trace.tb_next
        error.__traceback__ = trace or error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    ctypes.pythonapi.Py_Exit(code if isinstance(code, int) else 1)  # as at the end of a script: threads, atexit, flush


def _adopt(value: bool) -> None:
    """Make this process the parent of its descendants whose parent ends, or stop that."""
    ctypes.CDLL(None).prctl(_ADOPT, int(value))
