"""Failures of ranks, reported to the process that started them, so that each is shown once."""

from __future__ import annotations

import atexit
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
from typing import NoReturn

from lightning_gnn.comm import processes
from lightning_gnn.comm.group import is_about_peers
from lightning_gnn.comm.processes import GIVEN_UP, REACTS, REPORTED, Progress, current_progress
from lightning_gnn.launching import RankFailedError

GRACE_S = 2.5
"""Seconds that ranks may take to end by themselves after a failure before they are terminated."""

IMPORT_S = 300.0
"""Minimal timeout in seconds for a started rank to import and to reach the Trainer's call."""

SETTLE_S = 1.0
"""Seconds for which a rank that lost a peer searches for ranks that ended."""

_MEMORY_HINT = "if this was not intended, the machine may have run out of memory"
_REPORT = "_lightning_gnn_report"

STOP_S = 60.0
"""Seconds that ranks may take to end after a request, for example to write a checkpoint."""


@dataclass
class Failure:
    """Failure of a rank; ``str()`` of it is one line.

    Attributes:
        rank: the rank.
        what: ``"failed"``, or a description of how its process ended.
        reason: error, or a possible cause; one line.
        place: position in training, if known.
        traceback: traceback as text.
        about_peers: whether the error only reports that other ranks are gone or late, so that another failure is likely the
            cause.
        exception: the exception, if it can be pickled.
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
        current_progress().ending = REACTS
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            pickle.loads(pickle.dumps(error))
            sent: BaseException | None = error
        except Exception:
            sent = None
        about_peers = is_about_peers(error)
        if isinstance(error, SystemExit):
            return cls(rank, "left", f"sys.exit({error.code!r})", str(current_progress()), text)
        said = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
        return cls(rank, "failed", reason, str(current_progress()), text, about_peers, sent)

    @classmethod
    def from_exit_code(cls, rank: int, code: int, progress: Progress | None = None) -> Failure:
        """Returns the failure of a process that ended without a report."""
        place = str(progress or "")
        if progress is not None and progress.ending == GIVEN_UP and (loss := progress.loss) is not None:
            return cls(rank, "was ended by its helper process", loss[1], place, about_peers=True)
        if code >= 0:
            return cls(rank, f"ended with exit status {code}", "see its output", place)
        name = signal.Signals(-code).name
        return cls(rank, f"was ended by {name}", _MEMORY_HINT if name == "SIGKILL" else "", place)

    def __str__(self) -> str:
        place = f" in {self.place}" if self.place else ""
        return f"Rank {self.rank} {self.what}{place}{': ' if self.reason else ''}{self.reason}"

    def error(self) -> RankFailedError:
        error = RankFailedError(f"{self.traceback}\n{self}" if self.traceback else str(self))
        set_report(error, str(self), self.traceback)
        return error


def report_ended_ranks(rank: int, event: str, wait_s: float = 0.0) -> str:
    """Write to stderr which ranks of this machine ended, and how; returns the text.

    Args:
        rank: this rank.
        event: event of this rank, in the form that follows "Rank 0", such as "cannot go on".
        wait_s: seconds to wait for a rank that ended.
    """
    own = current_progress()
    place = str(own) if own.operation in str(own) else ", ".join(filter(None, [str(own), own.operation]))
    during = f" in {place}" if place else ""
    reasons = []
    for peer, status in ({} if own.loss else processes.exit_statuses(wait_s)).items():
        progress = processes.progress_of(peer)
        ended = Failure(peer, "has ended", place=str(progress or ""))
        failure = str(Failure.from_exit_code(peer, status, progress) if status else ended)
        reasons.append(f"{failure[0].lower()}{failure[1:]}")
    if own.loss:
        reasons = [own.loss[1] + (f": {_MEMORY_HINT}" if "SIGKILL" in own.loss[1] else "")]
    lines = [f"Rank {rank} {event}{during}: {reason}" for reason in reasons]
    if lines:
        # os.write instead of print: a signal handler may interrupt another.
        os.write(2, "".join(f"{line}\n" for line in lines).encode())
    return "\n".join(lines)


def report_to_torchrun(line: str, consequence: bool) -> None:
    """Write a line for torchrun's final summary, if torchrun started this process.

    For a `consequence` of another failure, the timestamp is later, so that torchrun treats the other failure as the first.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        with contextlib.suppress(OSError), open(file, "w") as opened:
            json.dump({"message": line, "timestamp": int(time.time()) + consequence}, opened)


def show_once() -> None:
    """Install an exception hook that prints one traceback, of the failed rank, and a line with reason and place.

    A repeated call installs it before hooks that were set in between: torch's hook prefixes all lines with this rank.
    """
    before = sys.excepthook
    if getattr(before, "_shows_once", False):
        return

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        line, text = getattr(error, _REPORT, ("", None))
        set_report(error, "", text)  # print the line once, if such hooks surround torch's hook
        if text is None:
            before(kind, error, where)
        else:
            print(text, end="", file=sys.stderr)
        if line:
            print(line, file=sys.stderr, flush=True)
        current_progress().ending = REPORTED
        if current_progress().loss is not None or isinstance(error, RankFailedError) or is_about_peers(error):
            atexit.register(_end_process)  # not here: torch's hook collects the output of this hook

    hook._shows_once = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _end_process() -> NoReturn:
    """End this process as Python does after an error, but without freeing objects: it takes seconds, and threads may be stuck."""
    atexit.unregister(_end_process)
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def set_report(error: BaseException, line: str, text: str | None = None) -> None:
    """Set the output of :func:`show_once` for an uncaught error.

    Args:
        error: the error.
        line: last line of the output; empty for none.
        text: text in place of the traceback. None shows the traceback; empty shows nothing, because another process does.
    """
    setattr(error, _REPORT, (line, text))
