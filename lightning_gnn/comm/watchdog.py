"""Watches what ranks wait for: each wait has a deadline, and ranks that have come to different operations are reported at once.

Every process has a thread for it, which reads what its rank is doing and, where a rank waits long, tells the others through
the ranks' store. Nothing else is sent but a look twice a second whether there is news.

Deadlines need no cleverness. Before them, three things prove that ranks have taken different ways, however slow the network is
(:func:`difference`): two ranks have done different things as the same operation of all ranks; a rank waits for rows that their
sender has passed over; or one has made a call of torch.distributed, as Lightning and torchmetrics do, before an operation that
another has begun without that call.
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

EXIT_STATUS = 70
"""Of a process that is ended because its code cannot be told otherwise: EX_SOFTWARE of sysexits.h."""

GROUP_MARGIN_S = 3.0
"""How much longer than the deadline process groups wait, so that it is known by then what all ranks do."""

_LOOK_S = 0.5
_LONG_S = 1.0  # a wait that is published
_AGAIN_S = 30.0  # how often at the least they are, as long as it lasts
_ANSWERS_S = 4.0  # how long ranks may take to say what they do
_GRACE_S = 6.0  # for errors that come by themselves, once the alarm is raised
_KEPT = 100  # operations that are remembered
_SHOWN = 3  # of them in a report
_FRAMES = 100
_LIBRARIES = (
    sysconfig.get_paths()["stdlib"],
    sysconfig.get_paths()["purelib"],
    os.path.dirname(os.path.dirname(__file__)),
)


class PeerError(RuntimeError):
    """A peer is gone, or does not do what this rank waits for.

    Attributes:
        peer: its rank.
        astray: it still runs, but is late, or has come to another operation.
    """

    def __init__(self, peer: int, reason: str, astray: bool = False) -> None:
        self.peer, self.astray = peer, astray
        super().__init__(reason)


class CommunicationError(RuntimeError):
    """Ranks could not exchange something: names the operation and, where known, the layer and the peer.

    Attributes:
        explained: the watchdog has said on stderr where the code of each rank is.
    """

    explained = False


class Passed(NamedTuple):
    """An operation that a rank has begun.

    Attributes:
        number: how many operations of all ranks it had begun then, this one included.
        name: the operation, with stage and step.
        joint: whether this is one of all ranks.
        calls: calls of torch.distributed on the default group until then.
    """

    number: int
    name: str
    joint: bool
    calls: int


@dataclass
class State:
    """What a rank is doing.

    Attributes:
        operation: that it waits in, with stage and step; empty if it waits in none of ours.
        waited_s: since when.
        peer: the rank that it waits for; None for all, or none.
        stage: of the operation, where it has several.
        number: how many operations of all ranks it has begun.
        calls: calls of torch.distributed on the default group until now.
        passed: the last operations that it has begun.
        code: where its code is: function, file and line.
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
            return f"waits in no operation of ours: its last was: {last}{at}"
        stage = f", {self.stage}" if self.stage else ""
        peer = "the others" if self.peer is None else f"rank {self.peer}"
        return f"waits for {peer}, for {self.waited_s:.1f} s now, in: {self.operation}{stage}{at}"

    def passed_over(self, operation: str, number: int) -> bool:
        """Returns whether it has certainly not begun an exchange since the operation of all ranks with `number`."""
        remembers = len(self.passed) < _KEPT or self.passed[0].number < number
        return remembers and not any(each.name == operation and each.number >= number for each in self.passed)

    def exchanges(self) -> bool:
        """Returns whether it waits for rows."""
        return any(each.name == self.operation and not each.joint for each in self.passed)


def difference(first: int, one: State, second: int, other: State) -> str:
    """Returns how two ranks have come to do different things, or nothing if that is not certain.

    What ranks say may be old: whatever follows from it must be true however far they have come since.

    Args:
        first, second: the ranks.
        one, other: what they have said.
    """
    ours, theirs = ({each.number: each for each in state.passed if each.joint} for state in (one, other))
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number].name != theirs[number].name:
            return f"Rank {first} has come to: {ours[number].name}; where rank {second} has come to: {theirs[number].name}."
    for rank, state, peer, there in ((first, one, second, other), (second, other, first, one)):
        # It waits for rows of a peer that waits for others, later, or for rows that this one has not sent either.
        later = there.operation and (
            there.number > state.number
            or (there.exchanges() and there.peer == rank and state.passed_over(there.operation, there.number))
        )
        if later and state.exchanges() and state.peer == peer and there.passed_over(state.operation, state.number):
            return f"Rank {rank} waits for rank {peer} in: {state.operation}; but that has come to: {there.operation}."
        mine, yours = ({each.number: each.calls for each in who.passed if each.joint} for who in (state, there))
        begun = yours.get(state.number + 1)
        if begun is not None and begun < state.calls and mine.get(state.number) == yours.get(state.number, -1):
            return (
                f"Rank {rank} is in a call of torch.distributed, by Lightning, a metric or the model, after: "
                f"{state.passed[-1].name if state.passed else 'the start'}; where rank {peer} has come to: {there.operation}."
            )
    return ""


def cause(alarm: str, answers: Mapping[int, State], size: int) -> str:
    """Returns why ranks wait in vain, in a line: who waits for nobody, or else the alarm."""
    found = []
    for rank in range(size):
        state = answers.get(rank)
        if state is None:
            found.append(f"Rank {rank} says nothing.")
        elif not state.operation:
            found.append(f"Rank {rank} waits for nobody{f', in {state.code}' if state.code else ''}.")
    return " ".join(found) if len(found) < size else alarm


def summary(alarm: str, answers: Mapping[int, State], size: int) -> str:
    """Returns what all ranks do, and who is missing.

    Args:
        alarm: why one wants to know.
        answers: what each rank does that has said so.
        size: how many there are.
    """
    silent = "says nothing: its process has ended, or stands still, or cannot be reached"
    lines = [f"  rank {rank}: {answers.get(rank, silent)}" for rank in range(size)]
    missing = [f"rank {rank}" for rank in range(size) if rank not in answers or not answers[rank].operation]
    return "\n".join([f"Watchdog: {alarm}", *lines, *([f"Missing: {', '.join(missing)}."] if missing else [])])


class Watchdog:
    """What this rank is doing with others, and the thread that looks at it once :meth:`start` is called.

    Args:
        rank, size: this rank, and how many there are.
        deadline_s: how long a wait may take.

    Attributes:
        place: stage and step of the training, alike on all ranks that do the same: part of what operations are called.
        stage: of the current operation, where it has several.
        peer: the rank that is waited for; None for all.
        alarm: why the ranks are to end; empty while all is well.
        cause: of it, in a line, once all have said what they do.
    """

    def __init__(self, rank: int, size: int, deadline_s: float) -> None:
        self.rank, self.size, self.deadline_s = rank, size, deadline_s
        self.place = self.stage = self.alarm = self.cause = ""
        self.peer: int | None = None
        self._number = 0
        self._calls: Callable[[], int] = lambda: 0
        self._passed: deque[Passed] = deque(maxlen=_KEPT)
        self._running: dict[int, tuple[str, float]] = {}  # by thread: the operation, and when it began
        self._owner = threading.get_ident()
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._summary = ""
        self._raise, self._known, self._end = (threading.Event() for _ in range(3))

    # What operations say ######################################################

    @contextmanager
    def during(self, operation: str, errors: type[Exception] = PeerError, joint: bool | None = None) -> Iterator[None]:
        """Says what this thread is doing while it is open, to other ranks and in errors.

        Args:
            operation: what it is called.
            errors: those that say that a message did not come or go.
            joint: all ranks take part, each as often as the others and in the same order; where it is False, others may leave it
                out, as long as none waits for what they would send. None for what is not remembered as an operation.

        Raises:
            CommunicationError: such an error.
        """
        thread = threading.get_ident()
        before, name = self._running.get(thread), f"{operation}, {self.place}"
        self._running[thread] = name, time.monotonic()
        if joint is not None:
            self._number += joint
            self._passed.append(Passed(self._number, name, joint, self._calls()))
        try:
            yield
        except errors as error:
            raise self._failed(operation, error) from None
        finally:
            if before is None:
                self._running.pop(thread, None)
            else:
                self._running[thread] = before

    def _failed(self, operation: str, error: Exception) -> CommunicationError:
        peer = f"rank {error.peer}'s" if isinstance(error, PeerError) else "the other ranks'"
        astray = error.astray if isinstance(error, PeerError) else "timed out" in str(error).lower()
        known = self.explained(f"{operation} on rank {self.rank}: {error}.") if astray or self.alarm else ""
        failed = CommunicationError(
            f"{operation} on rank {self.rank}: {error}.{f' {self.cause}' if known else ''}\n"
            f"The deadline is {self.deadline_s:.0f} s (argument `timeout` of the strategy). Look at {peer} output "
            "first: it may have stopped, be slower than the deadline, or have taken another branch of the code."
            + (f"\n{known}" if known else "")
        )
        failed.explained = bool(known)
        return failed

    @contextmanager
    def waiting(self, peer: int | None = None) -> Iterator[None]:
        """Says, while it is open, that this rank waits for a peer, or for several; of a wait that has failed it stays known."""
        self.peer = peer
        yield
        self.peer = None

    def mark(self) -> int:
        """Returns a number that messages of the current operation carry, 31 bits: of another one it is another."""
        return crc32(self._running.get(threading.get_ident(), ("", 0.0))[0].encode()) >> 1

    @property
    def operation(self) -> str:
        """The operation that :meth:`during` is open for in this thread; empty if there is none."""
        return self._running.get(threading.get_ident(), ("", 0.0))[0].removesuffix(f", {self.place}")

    # The alarm ################################################################

    def start(self, store: Any, calls: Callable[[], int]) -> None:
        """Begins to watch.

        Args:
            store: of all ranks, with keys for nobody else, and a connection for nobody else.
            calls: returns how many calls of torch.distributed this rank has made on the default group.
        """
        self._store, self._calls = store, calls
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._thread.start()
        atexit.register(self.stop)  # a thread that still talks to the store when Python ends could make it abort

    def stop(self) -> None:
        """Ends it."""
        atexit.unregister(self.stop)
        self._end.set()
        self._raise.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _LOOK_S)
            if not self._thread.is_alive():
                self._store, self._calls = None, lambda: 0
        self._thread = None

    def explained(self, reason: str) -> str:
        """Raises the alarm, and returns what all ranks do, for an error of this one; nothing if nobody watches.

        Args:
            reason: why, in a sentence.
        """
        if self._thread is None:
            return ""
        self.alarm = self.alarm or reason
        self._raise.set()
        self._known.wait(2 * _ANSWERS_S)
        self._end.set()  # an error is on its way: this process ends by it
        return self._summary

    def _watch(self) -> None:
        try:
            news, heard_at, next_s, told = 0, 0.0, _LONG_S, ""
            while not self._end.is_set():
                self._raise.wait(_LOOK_S)
                if self._end.is_set():
                    return
                operation, waited_s = self._longest_wait()
                if operation != told or waited_s < next_s / 2:
                    next_s, told = _LONG_S, operation
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
                    self.alarm = self.alarm or self._heard("alarm")
                    self._tell("waits", self._state(_LONG_S))
                if not self.alarm and self.rank == 0 and time.monotonic() - heard_at < _ANSWERS_S:
                    self.alarm = self._difference()
                if self.alarm:
                    self._raise_alarm()
                    return
        except RuntimeError:  # the store is gone, and with it rank 0: waits end by themselves
            return
        finally:
            self._known.set()

    def _longest_wait(self) -> tuple[str, float]:
        """Returns the operation that lasts longest, and for how many seconds it has."""
        now = time.monotonic()
        return max(((name, now - began) for name, began in list(self._running.values())), key=itemgetter(1), default=("", 0.0))

    def _difference(self) -> str:
        """Compares, on rank 0, what ranks have said: each with rank 0, and with the rank that it waits for."""
        states = {**self._told("waits"), self.rank: self._state(_LONG_S)}
        for rank, state in states.items():
            for peer, other in states.items():
                if peer in (0, state.peer) and peer != rank and (found := difference(rank, state, peer, other)):
                    return found
        return ""

    def _raise_alarm(self) -> None:
        """Says what this rank does, hears what others do, and ends this process if no error does."""
        self._store.compare_set("alarm", "", self.alarm)
        self._store.add("news", 1)
        self.alarm = self._heard("alarm")  # the first one, on all ranks
        self._tell("answers", self._state(0.0))
        stack = _stack(self._frame())
        before = "; ".join(each.name for each in list(self._passed)[-_SHOWN:]) or "none"
        print(
            f"Watchdog, rank {self.rank}: {self._state(0.0)}\nLast operations: {before}\n{stack}",
            end="",
            file=sys.stderr,
            flush=True,
        )
        deadline = time.monotonic() + _ANSWERS_S
        while len(answers := self._told("answers")) < self.size and time.monotonic() < deadline:
            time.sleep(0.05)
        self._summary, self.cause = summary(self.alarm, answers, self.size), cause(self.alarm, answers, self.size)
        if self.rank == 0:
            print(self._summary, file=sys.stderr, flush=True)
        self._known.set()
        if not self._end.wait(_GRACE_S):
            print(f"Watchdog, rank {self.rank}: ends this process.", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(EXIT_STATUS)

    def _state(self, least_s: float) -> State:
        """Returns what this rank does; an operation only if it lasts at least so long."""
        calls = self._calls()  # first: they were made before any later operation
        number, passed = self._number, list(self._passed)
        operation, waited_s = self._longest_wait()
        if waited_s < least_s:
            operation, waited_s = "", 0.0
        peer = self.peer if operation else None
        return State(operation, waited_s, peer, self.stage, number, calls, passed, _code(self._frame()))

    def _frame(self) -> FrameType | None:
        """Returns where the thread is that made this."""
        return sys._current_frames().get(self._owner)

    def _tell(self, what: str, state: State) -> None:
        self._store.set(f"{what}/{self.rank}", json.dumps(asdict(state)))

    def _heard(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _told(self, what: str) -> dict[int, State]:
        found = {rank: self._heard(f"{what}/{rank}") for rank in range(self.size)}
        states = {rank: State(**json.loads(text)) for rank, text in found.items() if text}
        return {rank: replace(state, passed=[Passed(*each) for each in state.passed]) for rank, state in states.items()}


def _stack(frame: FrameType | None) -> str:
    """Returns where code is, as in a traceback: what is no library's, and the innermost place."""
    found = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
    own = [each for each in found[:-1] if not each.filename.startswith(("<", *_LIBRARIES))]
    return "".join(traceback.format_list([*own, *found[-1:]]))


def _code(frame: FrameType | None) -> str:
    """Returns the innermost place in code that is no library's."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(("<", *_LIBRARIES)):
            return f"{code.co_name}, {code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
