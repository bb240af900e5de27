"""A process that has imported torch, Lightning and PyG, and forks for each script or command that it is asked to run.

``python warm.py NAME MODULE...`` imports the modules and serves at the abstract socket of that name; :class:`WarmPython`
is the other side. What runs is a process of its own, in a session of its own, as if ``python SCRIPT ...`` or ``python -m
MODULE ...`` had been called, but these modules are imported. Ranks that it starts with ``subprocess`` or by spawn are
Pythons like any other. What modules read from the environment while they are imported is of the serving process.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO


class Running:
    """A process that was forked, with what of ``subprocess.Popen`` is needed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._code: int | None = None
        self.pid = self._number()

    def wait(self, timeout: float | None = None) -> int:
        """Returns its exit status, negative for a signal."""
        if self._code is None:
            self._connection.settimeout(timeout)
            try:
                self._code = self._number()
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None
            self._connection.close()
        return self._code

    def _number(self) -> int:
        answer = self._connection.recv(8, socket.MSG_WAITALL)
        if not answer:
            raise RuntimeError("the process that forks has ended: see its error above")
        return int.from_bytes(answer, "big", signed=True)


class WarmPython:
    """Starts the serving process, which ends with this one, and forks from it when asked to."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = uuid.uuid4().hex
        self._server = subprocess.Popen(
            [sys.executable, __file__, self._name, *modules],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of a terminal's Ctrl-C
        )

    def start(self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], output: IO[str]) -> Running:
        """Runs ``python *arguments`` with standard output and error in `output`."""
        connection = socket.socket(socket.AF_UNIX)
        while connection.connect_ex(f"\0{self._name}"):  # still importing
            if self._server.poll() is not None:
                raise RuntimeError("the process that forks has ended: see its error above")
            time.sleep(0.05)
        request = json.dumps({"arguments": [*arguments], "cwd": str(cwd), "environment": {**environment}}).encode()
        socket.send_fds(connection, [len(request).to_bytes(8, "big")], [output.fileno()])
        connection.sendall(request)
        return Running(connection)


# The other side ###############################################################


def _serve(name: str, modules: Sequence[str]) -> None:
    parent = os.getppid()
    for module in modules:
        import_module(module)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("imports have started threads, which a fork does not take along: set OMP_NUM_THREADS=1")
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{name}")
    listening.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for the processes
    listening.settimeout(1.0)
    while os.getppid() == parent:
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listening.close()
            connection.setblocking(True)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _fork(connection)
        connection.close()


def _fork(connection: socket.socket) -> None:
    """Forks the process that was asked for, waits for it, and tells its number and its end."""
    head, [output], *_ = socket.recv_fds(connection, 8, 1)
    with connection.makefile("rb") as lines:
        request = json.loads(lines.read(int.from_bytes(head, "big")))
    pid = os.fork()
    if pid == 0:
        connection.close()
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        _become(**request)
    os.close(output)
    connection.sendall(pid.to_bytes(8, "big"))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):  # who asked has ended
        connection.sendall(code.to_bytes(8, "big", signed=True))
    os._exit(0)


def _become(arguments: list[str], cwd: str, environment: dict[str, str]) -> None:
    """Is a Python that was called with these arguments, to its end."""
    os.chdir(cwd)
    added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    sys.path[:0] = added
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # of TMPDIR
    random.seed()
    code = 0
    try:
        _run(arguments)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does at its end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _run(arguments: list[str]) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    sys.argv = arguments
    script = Path(arguments[0]).absolute()
    sys.path[0] = str(script.resolve().parent)
    main.__dict__.update(__file__=str(script), __spec__=None, __builtins__=__builtins__)
    exec(compile(script.read_bytes(), script, "exec"), main.__dict__)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
