"""Watches started ranks: one that fails ends the others, in bounded time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from lightning_gnn.comm.progress import Progress
from lightning_gnn.launching.door import Door
from lightning_gnn.launching.failures import GRACE_S, Apart, Arrived, Failure


@dataclass
class Child:
    """A started rank.

    Attributes:
        rank: its rank.
        pid: its process.
        exit_code: returns its exit status, negative for a signal, None while it runs.
        reports: what it sends: that it has arrived, failures, :class:`~lightning_gnn.launching.failures.Apart`, and at most
            one result.
        door: where it waits, if it was started early.
    """

    rank: int
    pid: int
    exit_code: Callable[[], int | None]
    reports: Connection
    door: Door | None = None
    progress: Progress | None = None
    failures: list[Failure] = field(default_factory=list)
    result: Any = None
    apart: bool = False
    arrived: bool = False

    def listen(self) -> None:
        """Takes in what the child has sent."""
        with contextlib.suppress(EOFError, OSError):
            while self.reports.poll():
                received = self.reports.recv()
                if isinstance(received, Failure):
                    self.failures.append(received)
                elif isinstance(received, Apart):
                    self.apart = True
                elif isinstance(received, Arrived):
                    self.arrived, self.progress = True, Progress.of(received.progress)
                else:
                    self.result = received

    def signal(self, number: int) -> None:
        """Sends its process a signal, if it still runs."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Supervisor:
    """The children of this process.

    Args:
        children: started ranks.
        survives_lost_ranks: a rank that fails does not concern the others, once they are apart.

    Attributes:
        apart: ranks have met, and need each other no more.
        stopping: the ranks were asked to end, and take their time.
    """

    def __init__(self, children: Sequence[Child], survives_lost_ranks: bool = False) -> None:
        self.children, self.survives_lost_ranks = list(children), survives_lost_ranks
        self.apart = self.stopping = False
        self._lock = threading.RLock()
        self._told: set[int] = set()

    def look(self) -> list[Failure]:
        """Returns the failures so far, those that are not about other ranks first."""
        with self._lock:
            for child in self.children:
                code = child.exit_code()  # before listening: what it sent last is then there
                child.listen()
                if code and not child.failures:
                    child.failures.append(Failure.ended(child.rank, code, str(child.progress or "")))
            found = [failure for child in self.children for failure in child.failures]
            self.apart = self.apart or any(child.apart for child in self.children)
        if self.survives_lost_ranks and self.apart:  # before, they would wait for it
            self._tell(found)
            return []
        return sorted(found, key=lambda failure: failure.about_peers)

    def begin(self, survives_lost_ranks: bool) -> None:
        """Another call of a Trainer begins: ranks meet anew."""
        with self._lock:
            self.look()  # takes in what was said of the call before
            self.survives_lost_ranks, self.apart = survives_lost_ranks, False
            for child in self.children:
                child.apart = False

    def _tell(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            if failure.rank not in self._told:
                self._told.add(failure.rank)
                print(f"{failure.traceback}{failure}; the others go on.", file=sys.stderr, flush=True)

    def running(self) -> list[Child]:
        """Returns the children that have not ended."""
        return [child for child in self.children if child.exit_code() is None]

    def all_failed(self) -> bool:
        """Returns whether every child has failed."""
        self.look()
        return all(child.failures for child in self.children)

    def let_in(self, payload: Any, seconds: float) -> None:
        """Waits until all children are at the door, and opens it.

        Args:
            payload: what each of them gets.
            seconds: to wait for them at most.

        Raises:
            RankFailedError: one of them has failed, or ended, before it came there.
            RuntimeError: one has not come in time.
        """
        everyone = self.children
        self.wait_for(
            lambda: bool(self.look()) or all(c.arrived or c.exit_code() is not None for c in everyone), seconds
        )
        for failure in self.look():
            raise failure.error()
        for child in everyone:
            if not child.arrived and child.exit_code() is not None:
                raise Failure(child.rank, "ended", "it has not come to this call of the Trainer").error()
        late = [child.rank for child in everyone if not child.arrived]
        if late:
            raise RuntimeError(
                f"Rank(s) {', '.join(map(str, late))} have not come to this call of the Trainer within {seconds:.0f} s. Each "
                "rank runs the whole script: look for what keeps one from it, a branch or a wait."
            )
        for child in everyone:
            assert child.door is not None
            with contextlib.suppress(OSError):  # it has ended: look() says so
                child.door.open(payload)

    def forget_failures(self) -> None:
        """Starts to look anew: ranks that raised alike, and go on alike."""
        with self._lock:
            for child in self.children:
                child.failures = []

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Returns whether `condition` came true within some time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def end(self, grace: float = GRACE_S) -> None:
        """Ends all children: first by themselves, then by SIGTERM, then by SIGKILL."""
        if not self.wait_for(lambda: not self.running(), grace):
            for number in (signal.SIGTERM, signal.SIGKILL):
                for child in self.running():
                    child.signal(number)
                if self.wait_for(lambda: not self.running(), 1.5):
                    break
