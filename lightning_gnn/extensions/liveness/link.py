"""The rank's side of its helper process: start, connection and end."""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_gnn.comm.listening import listen_for_ranks
from lightning_gnn.comm.processes import CLOSED, REPORTED, current_progress

SWITCH = "LIGHTNING_GNN_HELPER"
"""Environment variable: ``0`` disables the helper process of a rank."""

_CONNECT_S = 5.0
_LEAVE_S = 1.0


class RankHelper:
    """Helper process of this rank, see ``helper.py``; all ranks of a run make one.

    Args:
        rank: this rank.
        share: collective that returns rank 0's argument.
        deadline_s: seconds without a message of another rank's helper after which that rank counts as lost.
    """

    _current: RankHelper | None = None  # of this process; it outlives an error of its run

    def __init__(self, rank: int, share: Callable[[str], str], deadline_s: float) -> None:
        self._owner, progress = os.getpid(), current_progress()
        before = RankHelper._current
        if before is not None and before._owner == self._owner:
            before.leave()
        self._process: subprocess.Popen[bytes] | None = None
        progress.begin()
        self._leaves_at_exit = True
        is_enabled = bool(progress.address) and os.environ.get(SWITCH) != "0"
        link, token = _listen(share, is_enabled) if rank == 0 else _connect(rank, share(""), is_enabled)
        if not is_enabled:
            return
        memory = int(progress.address.split()[1])
        supervisor = os.getppid() if progress.is_supervised else 0
        numbers = rank, os.getpid(), supervisor, memory, -1 if link is None else link.fileno()
        helper, spares = Path(__file__).with_name("helper.py"), str(progress.outlives_others)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", str(helper), *map(str, numbers), str(deadline_s), token, spares],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[number for number in numbers[3:] if number >= 0],
                start_new_session=True,  # torchrun, Ctrl-C and Ctrl-Z signal whole process groups
                bufsize=0,
            )
        except OSError as error:
            _warn(f"its process was not started ({error})")
            return
        finally:
            if link is not None:
                link.close()
        RankHelper._current = self
        atexit.register(self._exit)

    def tell(self, alarm: str) -> None:
        """Send an alarm of the watchdog: helper processes end all ranks soon, unless they end by errors."""
        self._send(f"alarm {alarm}")

    def close(self, error: BaseException | None) -> None:
        """Detach from the helper process at the end of a run.

        Args:
            error: error that ends the run. The helper process then continues to watch this process: if it ends because of the
                error, it is lost for ranks that wait for it.
        """
        if error is None:
            self.leave()
        else:
            current_progress().ending = CLOSED
            self._leaves_at_exit = isinstance(error, Exception)

    def leave(self) -> None:
        """End the helper process; other ranks no longer depend on this rank."""
        self._send("bye")
        atexit.unregister(self._exit)
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_S)
            self._process = None

    def _exit(self) -> None:
        failed = current_progress().ending == REPORTED or getattr(sys, "last_value", None) is not None
        if self._owner == os.getpid() and self._leaves_at_exit and not failed:
            self.leave()

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has ended
                self._process.stdin.write(f"{line}\n".encode())


def _listen(share: Callable[[str], str], is_enabled: bool) -> tuple[socket.socket | None, str]:
    """Returns, on rank 0, a socket for the other helpers and the token of the run, after it has published its address."""
    if not is_enabled:
        share("")
        return None, ""
    host, token = os.environ.get("MASTER_ADDR") or socket.gethostname(), secrets.token_hex(8)
    # All addresses behind a gateway, as for the store, which warns.
    listener = listen_for_ranks(host, 0, 1) or socket.create_server(("", 0))
    share(f"{host} {listener.getsockname()[1]} {token}")
    return listener, token


def _connect(rank: int, address: str, is_enabled: bool) -> tuple[socket.socket | None, str]:
    """Returns, on other ranks, a connection to rank 0's helper and the token of the run; None without a helper there."""
    if not address or not is_enabled:
        return None, ""
    host, port, token = address.split()
    try:
        link = socket.create_connection((host, int(port)), _CONNECT_S)
        link.sendall(f"{token} {rank}\n".encode())
    except OSError as error:
        _warn(f"rank {rank} cannot connect to rank 0's helper at {host}:{port} ({error})")
        return None, ""
    return link, token


def _warn(reason: str) -> None:
    warnings.warn(
        f"Lost ranks may be detected late: {reason}. Allow connections to all ports between the machines, or set {SWITCH}=0.",
        stacklevel=4,
    )
