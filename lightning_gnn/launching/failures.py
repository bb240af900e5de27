"""What went wrong in a rank, told to the process that started it, so that it is shown once."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from lightning_gnn.comm import neighbours
from lightning_gnn.comm.group import is_about_peers
from lightning_gnn.comm.progress import here
from lightning_gnn.comm.watchdog import EXIT_STATUS

PARENT, REPORT = "LIGHTNING_GNN_PARENT", "LIGHTNING_GNN_REPORT"
"""Environment of a started rank: its parent's process id; its rank, their number, descriptors of its report pipe and its door."""

GRACE_S = 3.0
"""How long ranks may take to end by themselves once one has failed; then they are ended."""

IMPORT_S = 300.0
"""How long at the least one waits for a started rank to import and to come to the call, on a busy machine, say."""

SETTLE_S = 1.0
"""How long a rank that has lost another looks for one that has ended."""

_TOLD = "_lightning_gnn_told"

STOP_S = 60.0
"""How long ranks that were asked to end may take, for a checkpoint, say."""


class RankFailedError(RuntimeError):
    """Another rank has failed: its traceback, if it had one, and at the end a line that says why and where."""


@dataclass
class Failure:
    """Why a rank failed; as text, a line.

    Attributes:
        rank: which.
        what: became of it: ``"failed"``, or how its process ended.
        reason: what it raised, or what one may think of; one line.
        place: where it was in its training, as far as that is known.
        traceback: of what it raised.
        about_peers: it only says that other ranks are gone or late, so another failure is likely the cause.
        exception: what it raised, where that can be sent.
    """

    rank: int
    what: str
    reason: str = ""
    place: str = ""
    traceback: str = ""
    about_peers: bool = False
    exception: BaseException | None = None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Returns what `error` on `rank`, which is this process, says."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            pickle.loads(pickle.dumps(error))
            sent: BaseException | None = error
        except Exception:
            sent = None
        about_peers = is_about_peers(error)
        if isinstance(error, SystemExit):
            return cls(rank, "left", f"sys.exit({error.code!r})", str(here()), text)
        said = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
        return cls(rank, "failed", reason, str(here()), text, about_peers, sent)

    @classmethod
    def ended(cls, rank: int, code: int, place: str = "") -> Failure:
        """Returns what a process that ended without a word has to say."""
        if code >= 0:
            # Of the watchdog: it was told that ranks wait for each other in vain.
            return cls(
                rank, f"ended with exit status {code}", "its output says why", place, about_peers=code == EXIT_STATUS
            )
        name = signal.Signals(-code).name
        hint = "if nobody did that on purpose, the machine may have run out of memory" if name == "SIGKILL" else ""
        return cls(rank, f"was ended by {name}", hint, place)

    def __str__(self) -> str:
        place = f" in {self.place}" if self.place else ""
        return f"Rank {self.rank} {self.what}{place}{': ' if self.reason else ''}{self.reason}"

    def error(self) -> RankFailedError:
        """Returns the error to raise in another process."""
        error = RankFailedError(f"{self.traceback}\n{self}" if self.traceback else str(self))
        tell(error, str(self), self.traceback)
        return error


def say_who_ended(rank: int, what: str, wait_s: float = 0.0) -> str:
    """Says on stderr which ranks of this machine have ended, and how, where whoever started them may not; returns what it said.

    Args:
        rank: this one.
        what: became of it.
        wait_s: for the first of them.
    """
    told = []
    for peer, status in neighbours.ended(wait_s).items():
        place = neighbours.place_of(peer)
        failure = Failure.ended(peer, status, place) if status else Failure(peer, "has ended", place=place)
        told.append(f"Rank {rank} {what}: {str(failure)[0].lower()}{str(failure)[1:]}")
    if told:
        os.write(
            2, "".join(f"{line}\n" for line in told).encode()
        )  # not print: a signal's handler may interrupt another
    return "\n".join(told)


class Apart:
    """Said by a rank: all ranks have come so far that none needs another."""


@dataclass
class Arrived:
    """Said by a rank: it has come to the call, and waits at the door, if there is one.

    Attributes:
        progress: where to find its :class:`~lightning_gnn.comm.progress.Progress`.
    """

    progress: str


class Reporter:
    """A started rank's end of the report pipe."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self._connection = rank, connection

    def failed(self, error: BaseException) -> None:
        """Tells the parent what this rank raised, which then says so."""
        self.send(Failure.of(self.rank, error))
        told_elsewhere(error)

    def send(self, value: Any) -> None:
        """Sends the parent a failure, a result, :class:`Apart` or :class:`Arrived`; one that is gone hears nothing."""
        with contextlib.suppress(OSError):
            self._connection.send(value)


def tell_torchrun(line: str, consequence: bool) -> None:
    """Leaves a line for the summary that torchrun prints at the end, where it has started this process.

    Args:
        line: why this rank has failed.
        consequence: of another's failure, which torchrun shall take for the first.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        with contextlib.suppress(OSError), open(file, "w") as told:
            json.dump({"message": line, "timestamp": int(time.time()) + consequence}, told)


def end_with_parent(parent: int) -> None:
    """Ends this process, from a thread, soon after its parent is gone: nobody would wait for it, or end it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="ends with its parent").start()


def end_after(seconds: float, code: int) -> None:
    """Ends this process after some time, from a thread, if it has not ended by then."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, daemon=True, name="ends after a while").start()


def show_once() -> None:
    """Lets this process end with one traceback, that of the rank that failed, and with a line that says why and where.

    Called again, it goes before hooks that were set meanwhile: torch's marks all lines as this rank's.
    """
    before = sys.excepthook
    if getattr(before, "_shows_once", False):
        return

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        line, text = getattr(error, _TOLD, ("", None))
        tell(error, "", text)  # the line once, where such a hook stands before and behind torch's
        if text is None:
            before(kind, error, where)
        else:
            print(text, end="", file=sys.stderr)
        if line:
            print(line, file=sys.stderr, flush=True)

    hook._shows_once = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def tell(error: BaseException, line: str, text: str | None = None) -> None:
    """Notes what :func:`show_once` is to say of an error that nobody catches.

    Args:
        error: which.
        line: the last one; none if empty.
        text: before it, in place of the error's own traceback.
    """
    setattr(error, _TOLD, (line, text))


def told_elsewhere(error: BaseException) -> None:
    """Notes on an error that it has been said already, or that another process says it."""
    tell(error, "", "")
