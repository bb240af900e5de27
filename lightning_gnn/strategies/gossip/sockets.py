"""Connections between workers."""

from __future__ import annotations

import socket

from lightning_gnn.launching.worker_store import LOCAL


def own_address(main: str, num_machines: int) -> str:
    """Returns this machine's address, as others reach it that reach the machine `main`."""
    if num_machines == 1:
        return LOCAL
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((main, 9))  # sends nothing
        return towards.getsockname()[0]


def connect(address: str, timeout: float) -> socket.socket:
    """Returns a connection to ``host:port``, each operation of which ends after `timeout` seconds."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout)


def receive(connection: socket.socket, into: memoryview) -> None:
    """Fills `into`; raises ConnectionError if the other side ends before."""
    while len(into):
        count = connection.recv_into(into)
        if not count:
            raise ConnectionError("the other side has hung up")
        into = into[count:]
