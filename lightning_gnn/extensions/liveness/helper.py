"""Helper process of a rank: detects the end of its rank, informs the helpers of other ranks, and ends its rank if one is lost.

    python -S -E helper.py RANK PROCESS SUPERVISOR MEMORY CONNECTION DEADLINE TOKEN SPARES

runs it. It imports only a few modules of Python, so that it starts fast. Rank 0's helper connects to all others: a star needs one
connection per rank, and one place decides which rank was lost first. Rank 0's machine also has the store, so a run needs it
anyway. A helper sends heartbeats while the process of its rank runs, even in a call that does not return.

Helpers send lines: ``beat``, ``bye`` at a normal end, ``lost RANK HOW`` and ``alarm HOW``. A rank sends ``bye`` and
``alarm HOW`` to standard input.
"""

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import time
from mmap import mmap

# The memory of a rank, as in comm/processes.py.
_PLACE, _OPERATION, _ENDING, _LOSS = struct.Struct("112s"), struct.Struct("d200s"), struct.Struct("q"), struct.Struct("304s")
_OPERATION_AT, _ENDING_AT, _LOSS_AT, _SIZE = 112, 320, 328, 632
_RUNS, _REACTS, _CLOSED, _REPORTED, _GIVEN_UP = range(5)

_TICK_S = 0.2
_LEAST_DEADLINE_S = 5.0  # a busy machine may not run a helper for some seconds
_STUCK_S = 2.2  # from the loss of another rank to the end of a rank that does not react
_LOSS_S = 2.7  # to the end of a rank that handles the error
_EXIT_S = 2.0  # from the last line of a rank to its end
_ALARM_S = 4.0  # ranks first compare their states
_STATUS = 49  # index of the exit status in /proc/PID/stat, counted from the state


class Link:
    """Connection to another helper.

    Attributes:
        rank: rank of that helper; -1 before it has sent its rank.
        heard_at: time of the last message.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.connection, self.rank, self.heard_at, self._data = connection, rank, time.monotonic(), b""
        connection.setblocking(False)

    def lines(self) -> list[str] | None:
        """Returns the lines that have arrived; None if the connection is closed."""
        try:
            data = self.connection.recv(4096)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self.heard_at = time.monotonic()
        *lines, self._data = (self._data + data).split(b"\n")
        return [line.decode(errors="ignore") for line in lines]

    def send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it is gone, or does not read
            self.connection.send(f"{line}\n".encode())


class Helper:
    """State of the helper process.

    Args:
        rank: its rank.
        process: process id of the rank.
        supervisor: process that prints the failures of the rank; 0 without one.
        memory: file descriptor of the rank's memory.
        connection: file descriptor: on rank 0 a socket that listens for other helpers, else a connection to rank 0's; -1: none.
        deadline_s: seconds without a heartbeat after which a rank is lost.
        token: first word of other helpers.
        spares: whether the rank continues without lost ranks, so that this process ends it only if it is lost itself.
    """

    def __init__(
        self,
        rank: int,
        process: int,
        supervisor: int,
        memory: int,
        connection: int,
        deadline_s: float,
        token: str,
        spares: bool = False,
    ) -> None:
        self._rank, self._process, self._supervisor, self._token = rank, process, supervisor, token
        self._spares = spares
        self._deadline_s = max(deadline_s, _LEAST_DEADLINE_S)
        self._memory = mmap(memory, _SIZE)
        self._links: dict[int, Link] = {}  # by file descriptor
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        if connection >= 0 and rank == 0:
            self._listener = socket.socket(fileno=connection)
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif connection >= 0:
            self._add_link(socket.socket(fileno=connection), 0)
        self._reason, self._is_alarm = "", True  # of the end of all ranks
        self._reported_at, self._ends_at = float("inf"), {_RUNS: float("inf"), _REACTS: float("inf")}
        with contextlib.suppress(AttributeError, OSError):  # older systems: noticed at the next tick
            self._selector.register(os.pidfd_open(process), selectors.EVENT_READ)

    def run(self) -> None:
        """Run until the rank leaves or ends."""
        looked = beaten = ran = time.monotonic()
        while os.getppid() == self._process:
            for key, _ in self._selector.select(_TICK_S):
                if key.fd == 0 and self._listen_to_rank():
                    return
                if key.fd in self._links:
                    self._listen_to_helper(self._links[key.fd])
                elif key.fileobj is self._listener:
                    self._add_link(self._listener.accept()[0], -1)
            now = time.monotonic()
            if now - looked > 1 + _TICK_S:  # this process was stopped, or had no core
                ran += now - looked
                for link in self._links.values():
                    link.heard_at += now - looked
            if not self._is_stopped():
                ran = now
                if now - beaten >= min(1.0, self._deadline_s / 5):
                    beaten = now
                    self._send("beat")
            looked = now
            self._check(now, ran)
        self._finish()

    def _check(self, now: float, ran: float) -> None:
        """Look for missed deadlines; end the rank at the end of its time."""
        if now - ran > self._deadline_s:
            self._announce("lost", f"{self._rank} has been stopped for {now - ran:.0f} s{self._place()}")
        for link in self._links.values():
            if now - link.heard_at > self._deadline_s and link.rank >= 0:
                how = f"has not responded for {now - link.heard_at:.0f} s: it is stopped, or its machine cannot be reached"
                self._announce("lost", f"{link.rank} {how}")
        since, operation = _OPERATION.unpack_from(self._memory, _OPERATION_AT)
        if since and now - since > self._deadline_s + 1 and ran == now:  # its watchdog cannot run
            self._announce("alarm", f"rank {self._rank} has waited {now - since:.0f} s in {_text(operation)}")
        ending = self._ending()
        if ending == _REPORTED:
            self._reported_at = min(self._reported_at, now)
        if ending == _REPORTED:
            ends_at = max(self._ends_at[_REACTS], self._reported_at + _EXIT_S)
        else:
            ends_at = self._ends_at.get(ending, float("inf"))
        if self._reason and now > ends_at:
            if ending < _CLOSED:
                _ENDING.pack_into(self._memory, _ENDING_AT, _GIVEN_UP)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
            self._ends_at = {_REACTS: float("inf")}

    def _listen_to_rank(self) -> bool:
        """Returns whether the rank has left the run."""
        lines = os.read(0, 4096).decode(errors="ignore").splitlines()
        if not lines:  # at its end, or lost by an error
            self._selector.unregister(0)
        for line in lines:
            if line == "bye":
                self._send("bye")
                return True
            self._announce(*line.split(" ", 1))
        return False

    def _add_link(self, connection: socket.socket, rank: int) -> None:
        self._links[connection.fileno()] = Link(connection, rank)
        self._selector.register(connection, selectors.EVENT_READ)

    def _listen_to_helper(self, link: Link) -> None:
        lines = link.lines()
        for line in lines or ():
            kind, _, text = line.partition(" ")
            if link.rank < 0:
                if kind != self._token:
                    lines = None  # not a rank of this run
                    break
                link.rank = int(text)
            elif kind == "bye":
                link.rank, lines = -1, None
            elif kind != "beat":
                self._announce(kind, text)
        if lines is None:
            number = link.connection.fileno()
            self._selector.unregister(number)
            link.connection.close()
            del self._links[number]
            if link.rank >= 0:
                self._announce("lost", f"{link.rank} has ended, with its helper process: its machine may have failed")

    def _send(self, line: str) -> None:
        for link in self._links.values():
            link.send(line)

    def _announce(self, kind: str, text: str) -> None:
        """Inform all helpers of the first alarm and the first lost rank, and set the time at which this rank ends."""
        if self._reason and not (self._is_alarm and kind == "lost"):
            return
        self._send(f"{kind} {text}")
        now = time.monotonic()
        if kind == "lost":
            self._reason, self._is_alarm = f"rank {text}", False
            if text.partition(" ")[0] == str(self._rank):  # stopped: its end closes connections on which others wait
                self._ends_at = {_RUNS: now, _REACTS: now}
            elif not self._spares:
                self._ends_at = {_RUNS: now + _STUCK_S, _REACTS: now + _LOSS_S}
            _LOSS.pack_into(self._memory, _LOSS_AT, text.encode())
        else:
            self._reason = text
            if not self._spares:
                self._ends_at = {_RUNS: now + _ALARM_S, _REACTS: now + _ALARM_S}

    def _finish(self) -> None:
        """Inform the others of the end of this rank, and write its last line unless the rank or its supervisor does."""
        own = f"{self._rank} {self._exit_status()}{self._place()}"
        is_first = not self._reason
        if is_first:
            self._announce("lost", own)
        self._send("bye")
        if _runs(self._supervisor) or self._ending() in (_CLOSED, _REPORTED):
            return
        line = f"Rank {own}" if is_first else f"Rank {self._rank} cannot go on{self._place()}: {self._reason}"
        os.write(2, f"{line}\n".encode())

    def _ending(self) -> int:
        return _ENDING.unpack_from(self._memory, _ENDING_AT)[0]

    def _place(self) -> str:
        """Returns the epoch, phase and operation of the rank."""
        operation = _OPERATION.unpack_from(self._memory, _OPERATION_AT)[1]
        found = ", ".join(filter(None, map(_text, (*_PLACE.unpack_from(self._memory), operation))))
        return found and f" in {found}"

    def _is_stopped(self) -> bool:
        return _stat(self._process)[:1] == ["T"]

    def _exit_status(self) -> str:
        fields = _stat(self._process)
        if fields[:1] != ["Z"] or len(fields) <= _STATUS:  # its parent has collected the status
            return "has ended"
        status = os.waitstatus_to_exitcode(int(fields[_STATUS]))
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def _stat(process: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on; empty without the process."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _runs(process: int) -> bool:
    return process > 0 and _stat(process)[:1] not in ([], ["Z"], ["X"])


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of schedulers, to all processes: the rank may save
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, process, supervisor, memory, connection = map(int, sys.argv[1:6])
    Helper(rank, process, supervisor, memory, connection, float(sys.argv[6]), sys.argv[7], sys.argv[8] == "True").run()
