"""Watchdog of waits for other ranks: enforces deadlines, and reports ranks that run different operations.

Every process has a watchdog thread. It reads the current operation of its rank and publishes long waits in the ranks' store.
Otherwise it only polls a counter in the store twice a second.

Besides the deadline, three conditions prove that ranks have diverged, however slow the network is (:func:`difference`):

- two ranks have run different operations as the same collective operation
- a rank waits for rows that their sender has skipped
- a rank has called torch.distributed, as Lightning and torchmetrics do, before an operation that another rank has started without
  this call
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from types import FrameType
from typing import Any, NamedTuple
from zlib import crc32

from lightning_gnn.comm.processes import REACTS, current_progress

GROUP_MARGIN_S = 3.0
"""Seconds that process groups wait longer than the deadline, so that the state of all ranks is available by then."""

_LOOK_S = 0.5
_LONG_S = 1.0  # minimum length of a published wait
_AGAIN_S = 30.0  # maximum interval between publications of a wait
_ANSWERS_S = 1.5  # maximum time for ranks to publish their state
_KEPT = 100  # operations in the history
_SHOWN = 3  # operations of the history in a report
_FRAMES = 100
_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], os.path.dirname(os.path.dirname(__file__)))


class PeerError(RuntimeError):
    """Error raised if a peer has ended, or runs an operation that differs from this rank's.

    Attributes:
        peer: rank of the peer.
        astray: whether the peer still runs, but is late or in another operation.
    """

    def __init__(self, peer: int, reason: str, astray: bool = False) -> None:
        self.peer, self.astray = peer, astray
        super().__init__(reason)


class CommunicationError(RuntimeError):
    """Failed communication between ranks: names the operation and, if available, the layer and the peer.

    Attributes:
        explained: whether the watchdog has printed the code position of each rank to stderr.
    """

    explained = False


class Passed(NamedTuple):
    """Operation that a rank has started.

    Attributes:
        number: collective operations that the rank had started, including this operation.
        name: operation, with stage and step.
        joint: whether it is a collective operation.
        calls: calls of torch.distributed on the default group before it.
    """

    number: int
    name: str
    joint: bool
    calls: int


@dataclass
class State:
    """State of a rank.

    Attributes:
        operation: operation that the rank waits in, with stage and step; empty if it is in no operation of this package.
        waited_s: seconds since the start of the operation.
        peer: rank that it waits for; None for all ranks or no rank.
        stage: stage of the operation, if it has several.
        number: collective operations that the rank has started.
        calls: calls of torch.distributed on the default group so far.
        passed: last operations that the rank has started.
        code: code position: function, file and line.
    """

    operation: str
    waited_s: float
    peer: int | None
    stage: str
    number: int
    calls: int
    passed: Sequence[Passed]
    code: str

    def __str__(self) -> str:
        at = f"; its code is in {self.code}" if self.code else ""
        if not self.operation:
            last = self.passed[-1].name if self.passed else "nothing"
            return f"is in no operation of this package, after: {last}{at}"
        stage = f", {self.stage}" if self.stage else ""
        peer = "the others" if self.peer is None else f"rank {self.peer}"
        return f"waits for {peer}, for {self.waited_s:.1f} s now, in: {self.operation}{stage}{at}"

    def passed_over(self, operation: str, number: int) -> bool:
        """Returns whether the rank has certainly not started `operation` since the collective operation `number`."""
        remembers = len(self.passed) < _KEPT or self.passed[0].number < number
        return remembers and not any(each.name == operation and each.number >= number for each in self.passed)

    def exchanges(self) -> bool:
        """Returns whether the rank waits in an exchange of rows."""
        return any(each.name == self.operation and not each.joint for each in self.passed)


def difference(first: int, first_state: State, second: int, second_state: State) -> str:
    """Returns a message about two diverged ranks, or an empty string if divergence is not certain.

    The states may be outdated: the conclusions must hold however far the ranks have come since.

    Args:
        first, second: ranks.
        first_state, second_state: published states of the ranks.
    """
    ours, theirs = ({each.number: each for each in state.passed if each.joint} for state in (first_state, second_state))
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number].name != theirs[number].name:
            return f"Rank {first} started: {ours[number].name}; rank {second} started: {theirs[number].name}."
    for rank, state, peer, there in ((first, first_state, second, second_state), (second, second_state, first, first_state)):
        # The rank waits for rows of a peer. The peer is in a later operation, or waits for rows of this rank, too.
        later = there.operation and (
            there.number > state.number
            or (there.exchanges() and there.peer == rank and state.passed_over(there.operation, there.number))
        )
        if later and state.exchanges() and state.peer == peer and there.passed_over(state.operation, state.number):
            return f"Rank {rank} waits for rank {peer} in: {state.operation}; but rank {peer} is in: {there.operation}."
        mine, yours = ({each.number: each.calls for each in who.passed if each.joint} for who in (state, there))
        begun = yours.get(state.number + 1)
        if begun is not None and begun < state.calls and mine.get(state.number) == yours.get(state.number, -1):
            return (
                f"Rank {rank} is in a call of torch.distributed, by Lightning, a metric or the model, after: "
                f"{state.passed[-1].name if state.passed else 'the start'}; but rank {peer} is in: {there.operation}."
            )
    return ""


def cause(alarm: str, answers: Mapping[int, State], size: int) -> str:
    """Returns the cause of a deadlock in one line: ranks that are not waiting, or else the alarm."""
    found = []
    for rank in range(size):
        state = answers.get(rank)
        if state is None:
            found.append(f"Rank {rank} does not respond.")
        elif not state.operation:
            found.append(f"Rank {rank} is not waiting for another rank{f', in {state.code}' if state.code else ''}.")
    return " ".join(found) if len(found) < size else alarm


def summary(alarm: str, answers: Mapping[int, State], size: int) -> str:
    """Returns a report of the states of all ranks, and of missing ranks.

    Args:
        alarm: reason of the report.
        answers: published states by rank.
        size: number of ranks.
    """
    silent = "does not respond: its process is in a call outside of Python, has ended, is stopped, or cannot be reached"
    lines = [f"  rank {rank}: {answers.get(rank, silent)}" for rank in range(size)]
    missing = [f"rank {rank}" for rank in range(size) if rank not in answers or not answers[rank].operation]
    return "\n".join([f"Watchdog: {alarm}", *lines, *([f"Missing: {', '.join(missing)}."] if missing else [])])


class Watchdog:
    """Current operation of this rank, and the watchdog thread after :meth:`start`.

    Args:
        rank, size: this rank and the number of ranks.
        deadline_s: maximum duration of a wait in seconds.

    Attributes:
        place: stage and step of the training, equal on all ranks that do the same; part of operation names.
        stage: stage of the current operation, if it has several.
        peer: rank that this rank waits for; None for all ranks.
        alarm: reason to end the ranks; empty without an error.
        cause: cause of the alarm in one line, once all ranks have published their states.
    """

    def __init__(self, rank: int, size: int, deadline_s: float) -> None:
        self.rank, self.size, self.deadline_s = rank, size, deadline_s
        self.place = self.stage = self.alarm = self.cause = ""
        self.peer: int | None = None
        self._number = 0
        self._calls: Callable[[], int] = lambda: 0
        self._passed: deque[Passed] = deque(maxlen=_KEPT)
        self._running: dict[int, tuple[str, float]] = {}  # by thread: the operation and its start time
        self._owner = threading.get_ident()
        self._note: Callable[[float, bytes], None] | None = None
        self._tell: Callable[[str], object] = str  # no helper process
        self._abort: Callable[[], None] | None = None
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._summary = ""
        self._raise, self._summary_ready, self._end = (threading.Event() for _ in range(3))

    # Operations #################################################################

    @contextmanager
    def during(self, operation: str, errors: type[Exception] = PeerError, joint: bool | None = None) -> Iterator[None]:
        """Context manager that labels the current operation of this thread, for other ranks and errors.

        Args:
            operation: name of the operation.
            errors: exception types of failed messages.
            joint: True if all ranks run it equally often and in the same order. False if other ranks may skip it, as long as no
                rank waits for their messages. None for an operation that is not recorded.

        Raises:
            CommunicationError: in place of an exception of type `errors`.
        """
        thread = threading.get_ident()
        before, name, now = self._running.get(thread), f"{operation}, {self.place}", time.monotonic()
        note = self._note if thread == self._owner else None
        self._running[thread] = name, now
        if note is not None:
            note(now, name.encode())
        if joint is not None:
            self._number += joint
            self._passed.append(Passed(self._number, name, joint, self._calls()))
        try:
            yield
            if note is not None:
                note(*((0.0, b"") if before is None else (before[1], before[0].encode())))
        except errors as error:
            raise self._make_error(operation, error) from None
        finally:
            if before is None:
                self._running.pop(thread, None)
            else:
                self._running[thread] = before

    def _make_error(self, operation: str, error: Exception) -> CommunicationError:
        if self._note is not None:
            self._note(0.0, f"{operation}, {self.place}".encode())
            current_progress().ending = REACTS
        peer = f"rank {error.peer}'s" if isinstance(error, PeerError) else "the other ranks'"
        astray = error.astray if isinstance(error, PeerError) else "timed out" in str(error).lower()
        report = self.report_alarm(f"{operation} on rank {self.rank}: {error}.") if astray or self.alarm else ""
        loss = current_progress().loss if self._note is not None else None
        reason = loss[1] if loss else f"{error}.{f' {self.cause}' if report else ''}"
        failure = CommunicationError(
            f"{operation} on rank {self.rank}: {reason}\n"
            f"The deadline is {self.deadline_s:.0f} s (argument `timeout` of the strategy). Look at {peer} output "
            "first: it may have stopped, be slower than the deadline, or have taken another branch of the code."
            + (f"\n{report}" if report else "")
        )
        failure.explained = bool(report)
        return failure

    @contextmanager
    def waiting(self, peer: int | None = None) -> Iterator[None]:
        """Context manager that records the peer of a wait, or None for several; the record remains after a failed wait."""
        self.peer = peer
        yield
        self.peer = None

    def mark(self) -> int:
        """Returns a 31-bit number for messages of the current operation; other operations have other numbers."""
        return crc32(self._running.get(threading.get_ident(), ("", 0.0))[0].encode()) >> 1

    @property
    def operation(self) -> str:
        """Current operation of :meth:`during` in this thread; empty without one."""
        return self._running.get(threading.get_ident(), ("", 0.0))[0].removesuffix(f", {self.place}")

    # Alarm ######################################################################

    def start(
        self, store: Any, calls: Callable[[], int], tell: Callable[[str], object] = str, abort: Callable[[], None] | None = None
    ) -> None:
        """Start the watchdog thread.

        Args:
            store: store of all ranks, with its own key prefix and its own connection.
            calls: function that returns the number of calls of torch.distributed on the default group.
            tell: function that sends the alarm to the helper processes, which then end the ranks.
            abort: function that ends operations of a device that wait for a lost rank; None if they end without it.
        """
        self._abort = abort
        self._store, self._calls, self._tell, self._note = store, calls, tell, current_progress().note
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._thread.start()
        atexit.register(self.stop)  # a thread that uses the store while Python ends could abort the process

    def stop(self) -> None:
        """Stop the watchdog thread."""
        atexit.unregister(self.stop)
        self._end.set()
        self._raise.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _LOOK_S)
            if not self._thread.is_alive():
                self._store, self._calls = None, lambda: 0
        self._thread = self._note = None

    def check_ranks(self) -> None:
        """Raises PeerError if the helper process has found a lost rank."""
        if self._note is not None and (loss := current_progress().loss) is not None:
            raise PeerError(*loss)

    def report_alarm(self, reason: str) -> str:
        """Raise the alarm and return the report of all ranks, for an error of this rank; empty without a watchdog thread.

        Args:
            reason: reason of the alarm, one sentence.
        """
        if self._thread is None:
            return ""
        self.alarm = self.alarm or reason
        self._raise.set()
        self._summary_ready.wait(2 * _ANSWERS_S)
        self._end.set()  # this process ends by the error that follows
        return self._summary

    def _watch(self) -> None:
        try:
            news, heard_at, next_s, reported = 0, 0.0, _LONG_S, ""
            while not self._end.is_set():
                self._raise.wait(_LOOK_S)
                if self._end.is_set():
                    return
                if current_progress().loss:  # the store may be lost, too
                    if self._abort is not None:
                        self._abort()
                    return
                operation, waited_s = self._longest_wait()
                if operation != reported or waited_s < next_s / 2:
                    next_s, reported = _LONG_S, operation
                if not self.alarm and waited_s > next_s:
                    next_s = min(2 * next_s, next_s + _AGAIN_S)
                    self._store.add("news", 1)
                if not self.alarm and waited_s > self.deadline_s:
                    self.alarm = (
                        f"Rank {self.rank} has waited {waited_s:.1f} s in: {operation}. The deadline is {self.deadline_s:.0f} s "
                        "(argument `timeout` of the strategy)."
                    )
                found = self._store.add("news", 0)
                if found != news:
                    news, heard_at = found, time.monotonic()
                    self.alarm = self.alarm or self._read_value("alarm")
                    self._publish_state("waits", self._state(_LONG_S))
                if not self.alarm and self.rank == 0 and time.monotonic() - heard_at < _ANSWERS_S:
                    self.alarm = self._difference()
                if self.alarm:
                    self._raise_alarm()
                    return
        except RuntimeError:  # the store has ended, and with it rank 0: waits end without the watchdog
            return
        finally:
            self._summary_ready.set()

    def _longest_wait(self) -> tuple[str, float]:
        """Returns the longest-running operation and its duration in seconds."""
        now = time.monotonic()
        return max(((name, now - began) for name, began in list(self._running.values())), key=itemgetter(1), default=("", 0.0))

    def _difference(self) -> str:
        """Compare, on rank 0, the published states: each with rank 0, and with the rank that it waits for."""
        states = {**self._read_states("waits"), self.rank: self._state(_LONG_S)}
        for rank, state in states.items():
            for peer, other in states.items():
                if peer in (0, state.peer) and peer != rank and (found := difference(rank, state, peer, other)):
                    return found
        return ""

    def _raise_alarm(self) -> None:
        """Publish the state of this rank and collect the states of all ranks; helper processes end the ranks."""
        self._tell(self.alarm)
        self._store.compare_set("alarm", "", self.alarm)
        self._store.add("news", 1)
        self.alarm = self._read_value("alarm")  # the first alarm, on all ranks
        self._publish_state("answers", self._state(0.0))
        stack = _stack(self._frame())
        before = "; ".join(each.name for each in list(self._passed)[-_SHOWN:]) or "none"
        print(
            f"Watchdog, rank {self.rank}: {self._state(0.0)}\nLast operations: {before}\n{stack}",
            end="",
            file=sys.stderr,
            flush=True,
        )
        deadline = time.monotonic() + _ANSWERS_S
        while len(answers := self._read_states("answers")) < self.size and time.monotonic() < deadline:
            if current_progress().loss:
                break
            time.sleep(0.05)
        self._summary, self.cause = summary(self.alarm, answers, self.size), cause(self.alarm, answers, self.size)
        if self.rank == 0:
            print(self._summary, file=sys.stderr, flush=True)

    def _state(self, least_s: float) -> State:
        """Returns the state of this rank; without its operation if it is shorter than `least_s` seconds."""
        calls = self._calls()  # first: these calls precede any later operation
        number, passed = self._number, list(self._passed)
        operation, waited_s = self._longest_wait()
        if waited_s < least_s:
            operation, waited_s = "", 0.0
        peer = self.peer if operation else None
        return State(operation, waited_s, peer, self.stage, number, calls, passed, _code(self._frame()))

    def _frame(self) -> FrameType | None:
        """Returns the current frame of the thread that made this object."""
        return sys._current_frames().get(self._owner)

    def _publish_state(self, key: str, state: State) -> None:
        self._store.set(f"{key}/{self.rank}", json.dumps(asdict(state)))

    def _read_value(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _read_states(self, key: str) -> dict[int, State]:
        found = {rank: self._read_value(f"{key}/{rank}") for rank in range(self.size)}
        states = {rank: State(**json.loads(text)) for rank, text in found.items() if text}
        return {rank: replace(state, passed=[Passed(*each) for each in state.passed]) for rank, state in states.items()}


def _stack(frame: FrameType | None) -> str:
    """Returns a traceback of the user's code and of the innermost frame."""
    found = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
    own = [each for each in found[:-1] if not each.filename.startswith(("<", *_LIBRARIES))]
    return "".join(traceback.format_list([*own, *found[-1:]]))


def _code(frame: FrameType | None) -> str:
    """Returns the innermost position in the user's code."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(("<", *_LIBRARIES)):
            return f"{code.co_name}, {code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
