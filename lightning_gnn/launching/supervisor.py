"""What launchers share: where ranks meet, and who watches them. One that fails ends the others, in bounded time.

Each started rank has a pipe to the process that started it: it reports arrival at the Trainer's call, failures and its result,
and gets what it is to run with, tensors in shared memory included. torchelastic's `start_processes` was tried: lost would be
errors as objects, the caller's own way with Ctrl-C, imports while the first rank checks, and ranks that do without a lost one.
"""

from __future__ import annotations

import contextlib
import os
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
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment

from lightning_gnn.comm.listening import listen_for_ranks
from lightning_gnn.comm.processes import Progress, here
from lightning_gnn.launching.failures import GRACE_S, Failure, set_report
from lightning_gnn.private_lightning import PORT


class Launchable(Protocol):
    """A strategy whose ranks a launcher can start."""

    strategy_name: str
    cluster_environment: ClusterEnvironment | None
    num_nodes: int
    timeout: timedelta

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""

    @property
    def global_rank(self) -> int:
        """This process's rank."""

    def before_ranks_start(self, trainer: pl.Trainer | None, given: Sequence[Any], self_check: bool = True) -> None:
        """Finds what is wrong while there is one process only."""

    def outcome(self) -> Mapping[str, Any]:
        """Returns attributes that a call of the Trainer has set, for the process that started the ranks."""


class _SharesDescriptors:
    """Stands in for the process that is being started, so that locks and queues can be pickled for one that runs already."""

    DupFd = staticmethod(resource_sharer.DupFd)

    @staticmethod
    def duplicate_for_child(descriptor: int) -> int:
        return descriptor


class Reporter:
    """A started rank's end of the pipe.

    Attributes:
        needs_parent: this rank ends if its parent does.
    """

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self.needs_parent, self._connection = rank, True, connection

    def send(self, event: str, value: Any = None) -> None:
        """Sends to the parent, unless it is gone: that this rank has "arrived", with the address of its progress; that it has
        "started"; bytes as its "result"; that it has "failed", with a failure; other events are for launchers of schemes."""
        with contextlib.suppress(OSError):
            self._connection.send((event, value))

    def failed(self, error: BaseException) -> None:
        """Sends what this rank raised to the parent, which shows it."""
        self.send("failed", Failure.of(self.rank, error))
        set_report(error, "", "")

    def wait_for_start(self) -> Any:
        """Waits until the parent has found nothing wrong; returns the argument of :meth:`Supervisor.start_all`.

        Takes the parent's environment, and whether Ctrl-C interrupts it. Ends this process silently if the parent ends.
        """
        self.send("arrived", here().address)
        try:
            variables, interruptible, given = self._connection.recv()
        except (EOFError, OSError):
            os._exit(1)
        self.send("started")
        os.environ.update(variables)
        if interruptible and threading.current_thread() is threading.main_thread() and not _handles_interrupts():
            signal.signal(signal.SIGINT, signal.default_int_handler)  # raises KeyboardInterrupt again
        return given


@dataclass
class Child:
    """A started rank; `exit_code` returns its exit status, negative for a signal, None while it runs. `connection` is the
    parent's end of the pipe, `failures` those that it has sent, or its end, and `received` values of its events, by name."""

    rank: int
    pid: int
    exit_code: Callable[[], int | None]
    connection: Connection
    failures: list[Failure] = field(default_factory=list)
    received: dict[str, Any] = field(default_factory=dict)
    progress: Progress | None = None

    def listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                event, value = self.connection.recv()
                if event == "failed":
                    self.failures.append(value)
                    continue
                self.received[event] = value
                if event == "arrived":
                    self.progress = Progress.of(value)

    def signal(self, number: int) -> None:
        """Sends its process a signal, if it still runs."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Supervisor:
    """The children of this process.

    Attributes:
        stopping: the ranks were asked to end, and may take :data:`~lightning_gnn.launching.failures.STOP_S`.
        ending: they are being ended.
    """

    def __init__(self, children: Iterable[Child] = ()) -> None:
        self.children = list(children)
        self.stopping = self.ending = False
        self._of_concern: Callable[[list[Failure]], list[Failure]] = list
        self._environment = dict(os.environ)
        self._lock = threading.RLock()

    def look(self) -> list[Failure]:
        """Returns the failures so far, those that are not about other ranks first."""
        with self._lock:
            for child in self.children:
                code = child.exit_code()  # before listening: what it sent last is then there
                child.listen()
                if code and not child.failures:
                    child.failures.append(Failure.ended(child.rank, code, str(child.progress or "")))
            found = [failure for child in self.children for failure in child.failures]
            return sorted(self._of_concern(found), key=lambda failure: failure.about_peers)

    def begin(self, of_concern: Callable[[list[Failure]], list[Failure]] = list) -> None:
        """Another call of a Trainer begins, in which :meth:`look` returns those failures that are `of_concern` to all ranks."""
        with self._lock:
            self.look()  # receives what was sent in the call before
            self._of_concern = of_concern

    def running(self) -> list[Child]:
        return [child for child in self.children if child.exit_code() is None]

    def all_failed(self) -> bool:
        self.look()
        return all(child.failures for child in self.children)

    def start_all(self, given: Any, seconds: float, **variables: str) -> None:
        """Waits until all children have arrived at the Trainer's call, and lets them run it.

        Args:
            given: what :meth:`Reporter.wait_for_start` returns in each of them.
            **variables: of their environment, beside those that have changed here since they were started.

        Raises:
            RankFailedError: one of them has failed, or ended, before it arrived.
            RuntimeError: one has not arrived in time.
        """

        def missing() -> list[Child]:
            return [child for child in self.children if "arrived" not in child.received]

        self.wait_for(lambda: bool(self.look()) or all(c.exit_code() is not None for c in missing()), seconds)
        for failure in self.look():
            raise failure.error()
        for child in missing():
            if child.exit_code() is not None:
                raise Failure(child.rank, "ended", "it has not come to this call of the Trainer").error()
        if late := missing():
            raise RuntimeError(
                f"Rank(s) {', '.join(str(child.rank) for child in late)} have not come to this call of the Trainer within "
                f"{seconds:.0f} s. Each rank runs the whole script: look for what keeps one from it, a branch or a wait."
            )
        variables |= {name: value for name, value in os.environ.items() if self._environment.get(name) != value}
        for child in self.children:
            with contextlib.suppress(OSError):  # it has ended: look() says so
                set_spawning_popen(_SharesDescriptors)  # type: ignore[arg-type]
                try:
                    data = ForkingPickler.dumps((variables, _handles_interrupts(), given))
                finally:
                    set_spawning_popen(None)
                child.connection.send_bytes(data)
                # One after the other: until a child has them, descriptors are open here once more.
                self.wait_for(lambda: bool(self.look()) or "started" in child.received, seconds)  # noqa: B023

    def forget_failures(self) -> None:
        """Starts anew: all ranks raised alike, and go on alike."""
        with self._lock:
            for child in self.children:
                child.failures = []

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Returns whether `condition` came true within some time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def end(self, grace: float = GRACE_S) -> None:
        """Ends all children: first by themselves, then by SIGTERM, then by SIGKILL."""
        self.ending = True
        if not self.wait_for(lambda: not self.running(), grace):
            for number in (signal.SIGTERM, signal.SIGKILL):
                for child in self.running():
                    child.signal(number)
                if self.wait_for(lambda: not self.running(), 1.5):
                    break


def listener_of(environment: ClusterEnvironment, size: int) -> socket.socket | None:
    """Returns a socket, for rank 0 of this machine, that listens where the ranks of an environment will meet; None elsewhere.

    Unless the port is given (MASTER_PORT), the environment has another one after each call.
    """
    if environment.node_rank() > 0:
        return None
    is_given = not isinstance(environment, LightningEnvironment) or {"MASTER_PORT", "STANDALONE_PORT"} & os.environ.keys()
    listener = listen_for_ranks(environment.main_address, environment.main_port if is_given else 0, size)
    if listener is not None and not is_given:
        setattr(environment, PORT, listener.getsockname()[1])
    return listener


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Processes that are started while this is open ignore Ctrl-C, until :meth:`Reporter.wait_for_start` has returned: it would
    end an import with a traceback of their own."""
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
    """Returns whether Ctrl-C interrupts this process; not what a shell starts in the background."""
    return signal.getsignal(signal.SIGINT) != signal.SIG_IGN
