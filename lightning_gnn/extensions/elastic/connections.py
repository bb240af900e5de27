"""Connections with other ranks, which this process ends itself when a rank is lost: a cut network closes none."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

from lightning_gnn.comm.processes import current_progress

_LOOK_S = 0.2


class Connections:
    """Connections that this process opens between the construction and :meth:`watch`, or :meth:`note`.

    gloo waits for a message until its timeout, and has no function that ends the wait.
    """

    def __init__(self) -> None:
        self._before, self._connections = _sockets(), dict[int, str]()
        self._end = threading.Event()

    def watch(self) -> None:
        """Start a thread that ends the connections when a rank is lost, if this rank outlives others."""
        if current_progress().outlives_others:
            self.note()
            threading.Thread(target=self._watch, name="connections", daemon=True).start()

    def note(self) -> None:
        """Note the connections that this process has opened."""
        self._connections = {number: name for number, name in _sockets().items() if self._before.get(number) != name}

    def close(self) -> None:
        """End the thread."""
        self._end.set()

    def end(self) -> None:
        """End the connections: operations that wait for messages raise errors."""
        present = _sockets()
        for number, name in self._connections.items():
            if present.get(number) == name:
                with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    connection.getpeername()  # raises an error if the socket listens: gloo would abort the process
                    connection.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        while not self._end.wait(_LOOK_S):
            if current_progress().loss is not None:
                self.end()
                return


def _sockets() -> dict[int, str]:
    """Returns the names of the sockets of this process by file descriptor; empty on a system without ``/proc``."""
    found = dict[int, str]()
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the folder's own descriptor
                found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return {number: name for number, name in found.items() if name.startswith("socket:")}
