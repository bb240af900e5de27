"""Pythons that need not import torch, Lightning and PyG again: they are forked from a process that has done so and nothing else.

:func:`start` makes such a process, a child of this one. From then on what ``subprocess`` and multiprocessing's spawn start as
``python SCRIPT ...``, ``python -m MODULE ...`` or ``python -c CODE ...`` is forked from it instead, here and in all that
is started so: a child of whoever asked, with the arguments, environment, folder and open files asked for, in which these
modules happen to be imported. What modules read from the environment while they are imported is of this process.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import multiprocessing.util
import os
import pkgutil
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MARK = "LIGHTNING_GNN_TEST_RUN"
"""Of a run in the environment: its first letters are the name of the processes that are forked in it, see /proc/PID/comm."""
_IMPORTED = ("lightning.pytorch.cli", "torch.distributed.run", "torch.distributed.elastic.agent.server")
"""Beside all of this package, which imports most of its modules, and other packages, when they are needed."""
_OPTIONAL = ("optuna", "hydra")
"""Modules that need a package of the same name, which may not be installed."""
_ARGUMENTS = {"-m", "-c"}
_SUBREAPER, _NAME = 36, 15  # of prctl
_FREE = 512  # numbers of open files from here on are wanted by nobody

_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_spawnv_passfds = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]
_prctl = ctypes.CDLL(None).prctl


class _Forker:
    """A child of this process that forks what it is asked for."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock, self._owner = connection, threading.Lock(), os.getpid()

    def fork(self, request: dict[str, Any], files: Mapping[int, int]) -> int | None:
        """Returns the number of a new child of this process, or None if there is no asking.

        Args:
            request: arguments of :func:`_become`.
            files: by their numbers in the child, open files of this process.
        """
        if os.getpid() != self._owner:  # this process is itself a fork, by other means
            return None
        with self._lock, suppress(OSError):
            text = json.dumps({**request, "files": [*files]}).encode()
            with _adopting():
                socket.send_fds(self._connection, [len(text).to_bytes(8, "big")], [*files.values()])
                self._connection.sendall(text)
                answer = self._connection.recv(8, socket.MSG_WAITALL)
            return int.from_bytes(answer, "big") or None
        return None


_forker: _Forker | None = None
_thread = threading.local()


@contextmanager
def _adopting() -> Iterator[None]:
    """While open, descendants of this process whose parents end are its children."""
    _prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _prctl(_SUBREAPER, 0, 0, 0, 0)


def start(environment: Mapping[str, str] | None = None) -> None:
    """Has this process's Pythons forked from one that has imported everything, which ends with this process."""
    ours, theirs = socket.socketpair()
    subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # no terminal: lines are not written one by one
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # out of reach of a terminal's Ctrl-C
    )
    theirs.close()
    _install(ours)


def _install(connection: socket.socket) -> None:
    global _forker
    _forker = _Forker(connection)
    subprocess.Popen._execute_child = _execute  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _spawn  # type: ignore[attr-defined]


def serve_from_here() -> None:
    """Has this process's Pythons forked from what it is now: a fork, in which nobody else's files are open."""
    global _forker
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        # Replaced later, they would close what is open at their numbers by then.
        _forker = None
        sys.stdin.close()
        _open({theirs.fileno(): theirs.fileno()})
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _serve(theirs)
    theirs.close()
    _install(ours)


@contextmanager
def cold() -> Iterator[None]:
    """While open, Pythons that this thread starts import everything themselves, and so do those that they start."""
    before, _thread.cold = getattr(_thread, "cold", False), True
    try:
        yield
    finally:
        _thread.cold = before


def _execute(self: Any, args: Any, *rest: Any) -> None:
    """In place of ``subprocess.Popen``'s own."""
    _, preexec, _, pass_fds, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[:15]
    pid = None
    if not isinstance(args, (str, bytes, os.PathLike)) and not shell and preexec is None:
        standard = [wanted if given == -1 else given for wanted, given in enumerate((p2cread, c2pwrite, errwrite))]
        pid = _fork(args, pass_fds, cwd, env, standard, new_session=rest[20])
    if pid is None:
        _execute_child(self, args, *rest)
        return
    self.pid, self._child_created = pid, True
    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _spawn(path: Any, args: Any, passfds: Any) -> int:
    """In place of multiprocessing's own."""
    code = any(name in os.fsdecode(each) for each in args for name in ("spawn_main", "forkserver import main"))
    pid = _fork(args, passfds, None, None, [0, 1, 2], new_session=False) if code else None
    return _spawnv_passfds(path, args, passfds) if pid is None else pid


def _fork(
    args: Sequence[Any], pass_fds: Sequence[int], cwd: Any, env: Any, standard: Sequence[int], new_session: bool
) -> int | None:
    executable, *arguments = [os.fsdecode(each) for each in args]
    if (
        _forker is None
        or executable != sys.executable
        or getattr(_thread, "cold", False)
        or max([0, *pass_fds]) >= _FREE
    ):
        return None
    options = []  # of the interpreter: -u, -B
    while arguments and arguments[0].startswith("-") and arguments[0] not in _ARGUMENTS:
        options.append(arguments.pop(0))
    if not arguments or "-S" in options:  # imports no packages
        return None
    request = {
        "arguments": arguments,
        "cwd": os.fsdecode(cwd or os.getcwd()),
        "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in (env or os.environ).items()},
        "new_session": bool(new_session),
        "unbuffered": "-u" in options,
        "interruptible": signal.getsignal(signal.SIGINT) != signal.SIG_IGN,
    }
    files = {int(each): int(each) for each in pass_fds} | dict(enumerate(standard))
    return _forker.fork(request, {number: ours for number, ours in files.items() if _is_open(ours)})


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# In the process that forks ####################################################


def _serve(connection: socket.socket) -> None:
    """Forks what it is asked for until nobody is left who might ask."""
    while True:
        head, files, *_ = socket.recv_fds(connection, 8, 250)
        if not head:
            os._exit(0)
        with connection.makefile("rb") as lines:
            request = json.loads(lines.read(int.from_bytes(head, "big")))
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)  # whoever has asked adopts it
            if request.pop("new_session"):
                os.setsid()  # before its pid is known: a signal to its group would reach the group of the tests
            os.write(writer, os.getpid().to_bytes(8, "big"))
            while os.getppid() == between:
                os.sched_yield()
            _become(files=dict(zip(request.pop("files"), files)), **request)
        os.waitpid(between, 0)
        os.close(writer)
        connection.sendall(os.read(reader, 8) or bytes(8))
        for each in (reader, *files):
            os.close(each)


def _become(
    arguments: list[str],
    cwd: str,
    environment: dict[str, str],
    unbuffered: bool,
    interruptible: bool,
    files: dict[int, int],
) -> None:
    """Is a Python that was called with these arguments, to its end."""
    _open(files)
    signal.signal(signal.SIGINT, signal.default_int_handler if interruptible else signal.SIG_IGN)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if MARK in environment:
        _prctl(_NAME, environment[MARK][:15].encode(), 0, 0, 0)
    serve_from_here()
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing reads nothing, from another number
    sys.stdout.reconfigure(write_through=unbuffered)  # type: ignore[union-attr]
    tempfile.tempdir = None  # of TMPDIR
    random.seed()
    code = 0
    try:
        _as_imported_now()
        _run(arguments, environment)
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


def _open(files: Mapping[int, int]) -> None:
    """Has these files open at these numbers, and no others; standard ones are empty if not given."""
    kept = {wanted: fcntl.fcntl(given, fcntl.F_DUPFD, _FREE) for wanted, given in files.items()}
    empty = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        kept.setdefault(standard, fcntl.fcntl(empty, fcntl.F_DUPFD, _FREE))
    os.closerange(0, _FREE)
    for wanted, given in kept.items():
        os.dup2(given, wanted)
    os.closerange(_FREE, max(kept.values()) + 1)


def _as_imported_now() -> None:
    """Does what imports do that depends on the environment."""
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    from lightning_gnn.launching import join_parent, program

    rank_zero_only.rank = _get_rank() or 0
    program._FOLDER = os.getcwd()
    join_parent()


def _run(arguments: list[str], environment: Mapping[str, str]) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__spec__=None, __builtins__=__builtins__)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *paths, *(path for path in sys.path[1:] if path not in paths)]
    sys.orig_argv[1:] = arguments
    how, *rest = arguments
    if how == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        sys.modules.pop(rest[0], None)
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif how == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], main.__dict__)
    else:
        sys.argv, script = arguments, Path(how).absolute()
        sys.path[0] = str(script.resolve().parent)
        main.__file__ = str(script)
        exec(compile(script.read_bytes(), script, "exec"), main.__dict__)


def _main() -> None:
    import lightning_gnn

    ours = [module.name for module in pkgutil.walk_packages(lightning_gnn.__path__, "lightning_gnn.")]
    if find_spec("triton") is None:
        ours = [name for name in ours if ".triton_" not in name]
    ours = [name for name in ours if name.removeprefix("lightning_gnn.") not in _OPTIONAL or find_spec(name.split(".")[1])]
    for module in (*_IMPORTED, *ours):
        import_module(module)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("imports have started threads, which a fork does not take along: set OMP_NUM_THREADS=1")
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import warm

    warm._serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    _main()
