"""Watches started ranks: one that fails ends the others, in bounded time.

Each started rank has a pipe to the process that started it: it reports arrival at the Trainer's call, failures and its result,
and gets what it is to run with, tensors in shared memory included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_sharer
from multiprocessing.connection import Connection
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

from lightning_gnn.comm.processes import Progress, here
from lightning_gnn.launching.failures import GRACE_S, Failure, set_report


class _SharesDescriptors:
    """Stands in for the process that is being started, so that locks and queues can be pickled for one that runs already."""

    DupFd = staticmethod(resource_sharer.DupFd)

    @staticmethod
    def duplicate_for_child(descriptor: int) -> int:
        return descriptor


Event = Literal["arrived", "started", "independent", "result", "failed"]
"""What a rank sends: that it has arrived, with the address of its progress; that from now on no rank needs another, with the
place where they meet; bytes; a failure."""


class Reporter:
    """A started rank's end of the pipe."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self._connection = rank, connection

    def send(self, event: Event, value: Any = None) -> None:
        """Sends to the parent, unless it is gone."""
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
        survives_lost_ranks: a rank that fails does not concern the others once they are independent.
        independent: no rank needs another any more.
        stopping: the ranks were asked to end, and may take :data:`~lightning_gnn.launching.failures.STOP_S`.
        start_again: starts the local rank of a child whose process was killed, when ranks are independent, given the place where
            these meet; None to do without. It may be called `restarts` times for each rank.
    """

    def __init__(self, children: Iterable[Child] = (), survives_lost_ranks: bool = False) -> None:
        self.children, self.survives_lost_ranks = list(children), survives_lost_ranks
        self.independent = self.stopping = False
        self.start_again: Callable[[Child, str], Child] | None = None
        self.restarts, self.place = 0, ""
        self._environment = dict(os.environ)
        self._lock = threading.RLock()
        self._shown: set[int] = set()
        self._started_again: Counter[int] = Counter()

    def look(self) -> list[Failure]:
        """Returns the failures so far, those that are not about other ranks first."""
        with self._lock:
            for child in self.children:
                code = child.exit_code()  # before listening: what it sent last is then there
                child.listen()
                if code and not child.failures:
                    child.failures.append(Failure.ended(child.rank, code, str(child.progress or "")))
            found = [failure for child in self.children for failure in child.failures]
            for child in self.children:
                if "independent" in child.received:
                    self.independent, self.place = True, child.received["independent"]
            if not (self.survives_lost_ranks and self.independent):  # else they would wait for each other
                return sorted(found, key=lambda failure: failure.about_peers)
            for failure in found:
                if failure.rank not in self._shown:
                    self._shown.add(failure.rank)
                    again = self._start_again(failure)
                    then = "it is started again, and the others go on" if again else "the others go on"
                    print(f"{failure.traceback}{failure}; {then}.", file=sys.stderr, flush=True)
        return []

    def _start_again(self, failure: Failure) -> bool:
        """Starts a rank again, unless it has raised something, which it would again, or is rank 0, whose loggers have begun."""
        [lost] = [child for child in self.children if child.rank == failure.rank]
        was_killed = (lost.exit_code() or 0) < 0 and "result" not in lost.received
        if self.start_again is None or self.stopping or not was_killed or lost.rank == 0:
            return False
        if self._started_again[lost.rank] >= self.restarts:
            return False
        self._started_again[lost.rank] += 1
        self._shown.discard(lost.rank)
        self.children[self.children.index(lost)] = self.start_again(lost, self.place)
        return True

    def begin(self, survives_lost_ranks: bool) -> None:
        """Another call of a Trainer begins: ranks meet anew."""
        with self._lock:
            self.look()  # receives what was sent in the call before
            self.survives_lost_ranks, self.independent, self.start_again = survives_lost_ranks, False, None
            for child in self.children:
                child.received.pop("independent", None)

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
        self.start_again = None
        if not self.wait_for(lambda: not self.running(), grace):
            for number in (signal.SIGTERM, signal.SIGKILL):
                for child in self.running():
                    child.signal(number)
                if self.wait_for(lambda: not self.running(), 1.5):
                    break


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
