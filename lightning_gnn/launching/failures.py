"""What went wrong in a rank, told to the process that started it, so that it is shown once."""

from __future__ import annotations

import contextlib
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

PARENT, REPORT = "LIGHTNING_GNN_PARENT", "LIGHTNING_GNN_REPORT"
"""Environment of a started rank: its parent's process id; its rank, their number, the file descriptor of its report pipe."""

GRACE_S = 3.0
"""How long ranks may take to end by themselves once one has failed; then they are ended."""

SETTLE_S = 1.0
"""How long a rank that has lost another looks for one that has ended."""

STOP_S = 60.0
"""How long ranks that were asked to end may take, for a checkpoint, say."""


class RankFailedError(RuntimeError):
    """Another rank's process has failed: carries that rank's traceback, or how its process ended."""


@dataclass
class Failure:
    """Why a rank failed.

    Attributes:
        rank: which.
        text: its traceback, or how its process ended.
        about_peers: it only says that other ranks are gone or late, so another failure is likely the cause.
        exception: what it raised, where that can be sent.
    """

    rank: int
    text: str
    about_peers: bool = False
    exception: BaseException | None = None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Returns what `error` on `rank` says."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            pickle.loads(pickle.dumps(error))
            sent: BaseException | None = error
        except Exception:
            sent = None
        return cls(rank, text, is_about_peers(error), sent)

    @classmethod
    def ended(cls, rank: int, code: int) -> Failure:
        """Returns what a process that ended without a word has to say."""
        if code >= 0:
            return cls(rank, f"Its process ended with exit status {code}; its output says why.")
        name = signal.Signals(-code).name
        hint = " If nobody did that on purpose, the machine may have run out of memory." if name == "SIGKILL" else ""
        return cls(rank, f"Its process was ended by {name}.{hint}")

    def error(self) -> RankFailedError:
        """Returns the error to raise in another process."""
        return RankFailedError(f"Rank {self.rank} failed.\n{self.text}")


def say_who_ended(rank: int, what: str, wait_s: float = 0.0) -> bool:
    """Says on stderr which ranks of this machine have ended, and how, where whoever started them may not; returns whether any.

    Args:
        rank: this one.
        what: became of it.
        wait_s: for the first of them.
    """
    ended = neighbours.ended(wait_s)
    for peer, status in ended.items():
        how = f" {Failure.ended(peer, status).text}" if status else ""
        # Not print: a signal's handler may interrupt another.
        os.write(2, f"Rank {rank} {what}: rank {peer} has ended.{how}\n".encode())
    return bool(ended)


class Apart:
    """Said by a rank: all ranks have come so far that none needs another."""


class Reporter:
    """A started rank's end of the report pipe."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank, self._connection = rank, connection

    def failed(self, error: BaseException) -> None:
        """Tells the parent what this rank raised."""
        self.send(Failure.of(self.rank, error))

    def send(self, value: Any) -> None:
        """Sends the parent a failure, a result or :class:`Apart`; a parent that is gone hears nothing."""
        with contextlib.suppress(OSError):
            self._connection.send(value)


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
    """Lets this process end without the traceback of an error that its parent shows, or that shows another rank's."""
    before = sys.excepthook
    if getattr(before, "_shows_once", False):
        return

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if isinstance(error, RankFailedError):
            print(f"{kind.__name__}: {error}", file=sys.stderr, flush=True)
        elif not getattr(error, "_lightning_gnn_reported", False):
            before(kind, error, where)

    hook._shows_once = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def mark_reported(error: BaseException) -> None:
    """Notes on an error that another process shows it."""
    error._lightning_gnn_reported = True  # type: ignore[attr-defined]
