"""The store of workers that train independently, in the process that starts them: a TCPStore that any rank may outlive."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

LOCAL = "127.0.0.1"
MOST_WAITING = 128
"""Connections that wait to be accepted."""


STORE_VARIABLE = "LIGHTNING_GNN_WORKER_STORE"
"""Environment of a started rank: where the store is, ``host:port``, if its parent has one."""

REJOIN_VARIABLE = "LIGHTNING_GNN_REJOINS"
"""Environment of a rank that takes the place of one that was killed: :attr:`StoreAddress.place` of the workers' store."""


class StoreServer:
    """The store itself; it lasts as long as this object.

    Args:
        host: of this machine, as the workers know it.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0), backlog=MOST_WAITING)
        self._host = host
        self.port: int = self._socket.getsockname()[1]
        self._store: dist.TCPStore | None = None

    def start(self) -> None:
        """Begins to answer; not before this process has forked: its threads are not there in the children."""
        self._store = dist.TCPStore(
            self._host, self.port, is_master=True, master_listen_fd=self._socket.detach(), wait_for_workers=False
        )

    def stop(self) -> None:
        """Ends it."""
        self._store = None
        self._socket.close()


@contextmanager
def store_for_children(wanted: bool) -> Iterator[StoreServer | None]:
    """Keeps a store for ranks that are started while it is open, if `wanted`; they find it by :data:`STORE_VARIABLE`."""
    if not wanted:
        yield None
        return
    server = StoreServer(LOCAL)
    os.environ[STORE_VARIABLE] = f"{LOCAL}:{server.port}"
    try:
        yield server
    finally:
        os.environ.pop(STORE_VARIABLE, None)
        server.stop()
