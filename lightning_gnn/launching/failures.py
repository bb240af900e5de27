"""What went wrong in a rank, reported to the process that started it, so that it is shown once."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from types import TracebackType

from lightning_gnn.comm import processes
from lightning_gnn.comm.group import is_about_peers
from lightning_gnn.comm.processes import here
from lightning_gnn.comm.watchdog import EXIT_STATUS
from lightning_gnn.launching import RankFailedError

GRACE_S = 3.0
"""How long ranks may take to end by themselves once one has failed; then they are ended."""

IMPORT_S = 300.0
"""How long a started rank may take at least to import and to come to the Trainer's call."""

SETTLE_S = 1.0
"""How long a rank that has lost another looks for one that has ended."""

_REPORT = "_lightning_gnn_report"

STOP_S = 60.0
"""How long ranks that were asked to end may take, for a checkpoint, say."""


@dataclass
class Failure:
    """Why a rank failed; ``str()`` of it is one line.

    Attributes:
        what: ``"failed"``, or how its process ended.
        reason: what it raised, or a possible cause; one line.
        place: where it was in its training, as far as that is known.
        about_peers: it only says that other ranks are gone or late, so another failure is likely the cause.
        exception: what it raised, where that can be pickled.
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
        """Returns the failure of `rank`, this process, by `error`."""
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
        """Returns the failure of a process that ended without reporting one."""
        if code >= 0:
            about_peers = code == EXIT_STATUS  # the watchdog's: its ranks wait for each other in vain
            return cls(rank, f"ended with exit status {code}", "its output says why", place, about_peers=about_peers)
        name = signal.Signals(-code).name
        hint = "if nobody did that on purpose, the machine may have run out of memory" if name == "SIGKILL" else ""
        return cls(rank, f"was ended by {name}", hint, place)

    def __str__(self) -> str:
        place = f" in {self.place}" if self.place else ""
        return f"Rank {self.rank} {self.what}{place}{': ' if self.reason else ''}{self.reason}"

    def error(self) -> RankFailedError:
        error = RankFailedError(f"{self.traceback}\n{self}" if self.traceback else str(self))
        set_report(error, str(self), self.traceback)
        return error


def report_ended_ranks(rank: int, what: str, wait_s: float = 0.0) -> str:
    """Writes to stderr which ranks of this machine have ended, and how, after waiting some seconds for the first; returns what it
    wrote."""
    lines = []
    for peer, status in processes.ended(wait_s).items():
        place = processes.place_of(peer)
        failure = Failure.ended(peer, status, place) if status else Failure(peer, "has ended", place=place)
        lines.append(f"Rank {rank} {what}: {str(failure)[0].lower()}{str(failure)[1:]}")
    if lines:
        # Not print: a signal handler may interrupt another.
        os.write(2, "".join(f"{line}\n" for line in lines).encode())
    return "\n".join(lines)


def report_to_torchrun(line: str, consequence: bool) -> None:
    """Leaves a line for the summary that torchrun prints at the end, where it has started this process; it is to take another
    failure, of which this one is a `consequence`, for the first."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        with contextlib.suppress(OSError), open(file, "w") as opened:
            json.dump({"message": line, "timestamp": int(time.time()) + consequence}, opened)


def show_once() -> None:
    """Lets this process end with one traceback, that of the rank that failed, and with a line that says why and where.

    Called again, it goes before hooks that were set meanwhile: torch's marks all lines as this rank's.
    """
    before = sys.excepthook
    if getattr(before, "_shows_once", False):
        return

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        line, text = getattr(error, _REPORT, ("", None))
        set_report(error, "", text)  # the line once, where such a hook stands before and behind torch's
        if text is None:
            before(kind, error, where)
        else:
            print(text, end="", file=sys.stderr)
        if line:
            print(line, file=sys.stderr, flush=True)

    hook._shows_once = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def set_report(error: BaseException, line: str, text: str | None = None) -> None:
    """Notes what :func:`show_once` prints of an error that nobody catches: a last line, unless it is empty, and before it a text
    in place of the error's traceback, empty if another process shows that."""
    setattr(error, _REPORT, (line, text))
