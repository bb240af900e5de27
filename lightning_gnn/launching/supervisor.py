"""Supervision of ranks, shared by launchers: rendezvous address, pipes, and the end of all ranks in bounded time if one fails.

Each started rank has a pipe to the process that started it. The rank reports arrival at the Trainer's call, failures and its
result. It receives its arguments, including tensors in shared memory. torchelastic's `start_processes` was tried. It would lose
errors as objects, the caller's handling of Ctrl-C, imports during the checks, and ranks that continue without a lost rank.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import resource_sharer
from multiprocessing.connection import Connection
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import ClusterEnvironment

from lightning_gnn.comm.listening import listen_for_ranks
from lightning_gnn.comm.processes import REPORTED, Progress, current_progress
from lightning_gnn.launching.failures import GRACE_S, Failure, set_report
from lightning_gnn.lightning_packages import FABRICS, is_instance
from lightning_gnn.private_lightning import PORT
from lightning_gnn.registry import feature


class Launchable(Protocol):
    """Strategy whose ranks a launcher can start."""

    strategy_name: str
    cluster_environment: ClusterEnvironment | None
    num_nodes: int
    timeout: timedelta

    @property
    def num_processes(self) -> int:
        """Number of ranks on this machine."""

    @property
    def global_rank(self) -> int:
        """Rank of this process."""

    def before_ranks_start(self, trainer: pl.Trainer | None, arguments: Sequence[Any], self_check: bool = True) -> None:
        """Hook called to check the run before ranks start."""

    def outcome(self) -> Mapping[str, Any]:
        """Returns attributes that a call of the Trainer has set, for the process that started the ranks."""


class _SharesDescriptors:
    """Replacement for the process that is being started, so that locks and queues can be pickled for a running process."""

    DupFd = staticmethod(resource_sharer.DupFd)

    @staticmethod
    def duplicate_for_child(descriptor: int) -> int:
        return descriptor


class Reporter:
    """A started rank's end of the pipe.

    Attributes:
        needs_parent: whether this rank ends if its parent does.
    """

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self.needs_parent, self._connection = rank, True, connection
        current_progress().is_supervised = True

    def send(self, event: str, value: Any = None) -> None:
        """Send an event to the parent, unless it is gone.

        Events are "arrived" with the address of the rank's progress, "started", "result" with bytes, and "failed" with a failure.
        Launchers of schemes may have other events.
        """
        with contextlib.suppress(OSError):
            self._connection.send_bytes(pickle.dumps((event, value)))  # faster than its send(), which shares objects

    def ask(self, event: str, value: Any) -> Any:
        """Returns the parent's answer to an event; raises EOFError if the parent is gone."""
        self.send(event, value)
        while (answer := self._connection.recv()) is None:  # a request, see has_request()
            pass
        return answer

    def has_request(self) -> bool:
        """Returns whether the parent has sent None since the last call."""
        found = False
        while self._connection.poll():
            found = self._connection.recv() is None
        return found

    def send_failure(self, error: BaseException) -> None:
        """Send an error of this rank to the parent, which shows it."""
        self.send("failed", Failure.of(self.rank, error))
        set_report(error, "", "")

    def wait_for_start(self) -> Any:
        """Wait for the checks of the parent; returns the argument of :meth:`Supervisor.start_all`.

        Copies the parent's environment, and its handling of Ctrl-C. Ends this process silently if the parent ends.
        """
        self.send("arrived", current_progress().address)
        try:
            variables, interruptible, arguments = self._connection.recv()
        except (EOFError, OSError):
            os._exit(1)
        self.send("started")
        os.environ.update(variables)
        if interruptible and threading.current_thread() is threading.main_thread() and not _handles_interrupts():
            signal.signal(signal.SIGINT, signal.default_int_handler)  # restores KeyboardInterrupt
        return arguments


@dataclass
class Child:
    """Started rank.

    Attributes:
        rank: the rank.
        pid: process id.
        exit_code: function that returns the exit status, negative for a signal, None while the process runs.
        connection: the parent's end of the pipe.
        failures: failures that the rank sent, or the failure of its process.
        received: values of its events, by name.
        handlers: functions that receive the values of events in place of `received`, by name.
        progress: shared memory with the rank's progress, after arrival.
    """

    rank: int
    pid: int
    exit_code: Callable[[], int | None]
    connection: Connection
    failures: list[Failure] = field(default_factory=list)
    received: dict[str, Any] = field(default_factory=dict)
    handlers: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    progress: Progress | None = None

    def listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                event, value = self.connection.recv()
                if event == "failed":
                    self.failures.append(value)
                    continue
                if event in self.handlers:
                    self.handlers[event](value)
                    continue
                self.received[event] = value
                if event == "arrived":
                    self.progress = Progress.of(value)

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Supervisor:
    """The child processes of this process.

    Attributes:
        stopping: whether the ranks received a request to end, and may take :data:`~lightning_gnn.launching.failures.STOP_S`.
        ending: whether they are being terminated.
    """

    def __init__(self, children: Iterable[Child] = ()) -> None:
        self.children = list(children)
        self.stopping = self.ending = False
        self._select_failures: Callable[[list[Failure]], list[Failure]] = list
        self._environment = dict(os.environ)
        self._lock = threading.RLock()

    def look(self) -> list[Failure]:
        """Returns the failures so far; failures about other ranks are last."""
        with self._lock:
            for child in self.children:
                code = child.exit_code()  # before listening, so that its last message is available
                child.listen()
                if code and not child.failures:
                    child.failures.append(Failure.from_exit_code(child.rank, code, child.progress))
            found = [failure for child in self.children for failure in child.failures]
            return sorted(self._select_failures(found), key=lambda failure: failure.about_peers)

    def begin(self, select_failures: Callable[[list[Failure]], list[Failure]] = list) -> None:
        """Begin another call of a Trainer, in which :meth:`look` returns only the failures that `select_failures` returns."""
        with self._lock:
            self.look()  # receives the messages of the previous call
            self._select_failures = select_failures

    def running(self) -> list[Child]:
        return [child for child in self.children if child.exit_code() is None]

    def all_failed(self) -> bool:
        self.look()
        return all(child.failures for child in self.children)

    def start_all(self, arguments: Any, seconds: float, **variables: str) -> None:
        """Wait until all children have arrived at the Trainer's call, and let them run it.

        Args:
            arguments: return value of :meth:`Reporter.wait_for_start` in the children.
            seconds: timeout.
            **variables: environment variables of the children, in addition to variables that changed here since they started.

        Raises:
            RankFailedError: a child failed, or ended, before it arrived.
            RuntimeError: a child did not arrive in time.
        """

        def missing() -> list[Child]:
            return [child for child in self.children if "arrived" not in child.received]

        self.wait_for(lambda: bool(self.look()) or all(c.exit_code() is not None for c in missing()), seconds)
        for failure in self.look():
            raise failure.error()
        for child in missing():
            if child.exit_code() is not None:
                raise Failure(child.rank, "ended", "it did not reach this call of the Trainer").error()
        if late := missing():
            raise RuntimeError(
                f"Rank(s) {', '.join(str(child.rank) for child in late)} did not reach this call of the Trainer within "
                f"{seconds:.0f} s. Each rank runs the whole script: look for a branch or a wait before this call."
            )
        variables |= {name: value for name, value in os.environ.items() if self._environment.get(name) != value}
        message, dumps = (variables, _handles_interrupts(), arguments), ForkingPickler.dumps
        for child in self.children:
            with contextlib.suppress(OSError):  # it ended: look() reports it
                set_spawning_popen(_SharesDescriptors)  # type: ignore[arg-type]
                try:
                    data = dumps(message)
                except RuntimeError as error:  # /dev/shm is small in containers
                    dumps = feature("MemfdPickler")(error).dumps
                    data = dumps(message)
                finally:
                    set_spawning_popen(None)
                child.connection.send_bytes(data)
                # One child at a time: until a child has received the descriptors, they are duplicated here.
                self.wait_for(lambda: bool(self.look()) or "started" in child.received, seconds)  # noqa: B023

    def forget_failures(self) -> None:
        """Clear the failures: all ranks raised equal errors, and continue."""
        with self._lock:
            for child in self.children:
                child.failures = []

    def wait_for(self, condition: Callable[[], bool], seconds: float, interval_s: float = 0.02) -> bool:
        """Returns whether `condition` became true within `seconds`; it is called every `interval_s` seconds."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(interval_s)
        return True

    def end(self, grace: float = GRACE_S) -> None:
        """End all children: wait `grace` seconds, then send SIGTERM, then SIGKILL."""
        self.ending = True
        if not self.wait_for(lambda: not self.running(), grace):
            for number in (signal.SIGTERM, signal.SIGKILL):
                for child in self.running():
                    if child.progress is not None:
                        child.progress.ending = REPORTED  # its helper process writes no line: this process does
                    child.signal(number)
                if self.wait_for(lambda: not self.running(), 1.5):
                    break


def listener_of(environment: ClusterEnvironment, size: int) -> socket.socket | None:
    """Returns a socket, for rank 0 of this machine, that listens at the rendezvous address of an environment; None elsewhere.

    Unless MASTER_PORT is set, each call sets another port in the environment.
    """
    if environment.node_rank() > 0:
        return None
    is_local = is_instance(environment, "plugins.environments.LightningEnvironment", FABRICS)
    is_given = not is_local or {"MASTER_PORT", "STANDALONE_PORT"} & os.environ.keys()
    listener = listen_for_ranks(environment.main_address, environment.main_port if is_given else 0, size)
    if listener is not None and not is_given:
        setattr(environment, PORT, listener.getsockname()[1])
    return listener


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Context manager in which started processes ignore Ctrl-C until :meth:`Reporter.wait_for_start` returns.

    Otherwise Ctrl-C would end an import with a traceback.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _handles_interrupts() -> bool:
    """Returns whether Ctrl-C interrupts this process; False for background processes of a shell."""
    return signal.getsignal(signal.SIGINT) != signal.SIG_IGN
