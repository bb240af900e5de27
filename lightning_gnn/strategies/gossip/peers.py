"""How workers that train independently reach each other: a store of keys, heartbeats, peer servers. No collective.

The store is a TCPStore in a process of its own: any rank may die, and the process that starts them may be one.
Vectors travel over sockets of our own: multiprocessing.connection has no deadlines for connecting, for its handshake or within a
message; asyncio's streams have, but copy what arrives, and took 2 to 4 times the CPU time.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn.comm.group import CommunicationError

LOCAL = "127.0.0.1"
MOST_WAITING = 128
"""Connections that wait to be accepted."""
BEAT_S = 0.5
"""Seconds between two heartbeats."""
EXCHANGE_S = 30.0
"""Seconds that a worker, or the store, may be silent in an exchange before the other goes on without."""

_NOTHING = "-"
_CHUNK = 4 << 20  # a TCPStore takes 8 MB at once
_HEADER = struct.Struct("!qqq")  # who connects, in which meeting, and what it knows of the other
_KNOWN = struct.Struct("!q")  # the answer: what this one knows of it
_NOTIFY_S = 1.0
_LOOK_S = 0.2  # how often a mailbox looks whether it is closed


class Bring(Protocol):
    """What a worker brings to a meeting.

    Attributes:
        known: a number of what it knows of the other already; the two compare it. 0 for nothing.
    """

    known: int

    def message(self, agreed: bool) -> Tensor:
        """Returns what the other gets, on the CPU, of the same shape and dtype for both; `agreed`: their numbers are equal."""
        ...


def connect_to_store(place: str) -> dist.Store:
    """Returns a connection of its own to the store at a place, ``host:port prefix``; all keys begin with the prefix."""
    address, _, prefix = place.partition(" ")
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=EXCHANGE_S)
    return dist.PrefixStore(prefix, dist.TCPStore(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False))


class SharedKeys:
    """A key-value store that processes share; each call is atomic.

    Args:
        place: of the store, see :func:`connect_to_store`; empty for one of this process alone.

    Raises:
        CommunicationError: also from all methods: the store is gone.
    """

    def __init__(self, place: str = "") -> None:
        self._where = place.partition(" ")[0]
        with self._naming():
            self._store = connect_to_store(place) if place else dist.HashStore()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(
                f"The store of the workers at {self._where} does not answer: the process that keeps it has ended, or cannot be "
                f"reached ({str(error).splitlines()[0]})."
            ) from error

    def get(self, key: str) -> str:
        """Returns what is under a key, ``""`` for nothing."""
        with self._naming():
            # get() would wait for a key that is not there.
            found = self._store.compare_set(key, _NOTHING, _NOTHING).decode()
        return "" if found == _NOTHING else found

    def add(self, key: str, amount: int) -> int:
        """Adds to a number and returns the sum."""
        with self._naming():
            return self._store.add(key, amount)

    def swap(self, key: str, expected: str, new: str) -> bool:
        """Replaces `expected` by `new`; returns whether `new` is there now."""
        with self._naming():
            # A key that has had a value never has none again, and "" is expected of such keys, too.
            found = self._store.compare_set(key, expected, new).decode()
        return found == new

    def put(self, key: str, value: bytes) -> None:
        """Leaves bytes, of any length."""
        with self._naming():
            for place in range(0, len(value), _CHUNK):
                self._store.set(f"{key}/{place}", value[place : place + _CHUNK])  # type: ignore[arg-type]
            self._store.set(key, str(len(value)))

    def find(self, key: str) -> bytes | None:
        """Returns what :meth:`put` has left; None if nothing has been, or not all of it yet."""
        length = self.get(key)
        if not length:
            return None
        with self._naming():
            return b"".join(self._store.get(f"{key}/{place}") for place in range(0, int(length), _CHUNK))


class Heartbeat:
    """Beats for this worker, from a thread, and watches those of others.

    Args:
        place: of the store, which is asked over connections of their own.
        me: this worker.
        patience: seconds without a beat after which a worker counts as dead.
    """

    def __init__(self, place: str, me: int, patience: float) -> None:
        self._keys, self._beats = SharedKeys(place), SharedKeys(place)
        self._me, self._patience = me, patience
        self._seen: dict[int, tuple[int, float]] = {}
        self._over = threading.Event()
        self._beats.add(f"heartbeat/{me}", 1)
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
        self._thread.start()

    def _beat(self) -> None:
        with contextlib.suppress(CommunicationError):  # the training thread notices, too
            while not self._over.wait(BEAT_S):
                self._beats.add(f"heartbeat/{self._me}", 1)

    def is_alive(self, worker: int) -> bool:
        """Returns whether a worker has beaten lately."""
        count, now = self._keys.add(f"heartbeat/{worker}", 0), time.monotonic()
        before, since = self._seen.get(worker, (None, now))
        if count != before:
            since = now
        self._seen[worker] = count, since
        return now - since < self._patience

    def stop(self) -> None:
        """Beats no more."""
        self._over.set()
        self._thread.join()


class PeerServer:
    """Where other workers connect to this one, one at a time.

    Args:
        host: of this machine, as the others know it.
        timeout: seconds that a connection may take without a byte.

    Attributes:
        address: ``host:port``.
        sent_bytes: of vectors that others got.
    """

    def __init__(self, host: str, timeout: float) -> None:
        self.sent_bytes = 0
        self._socket = socket.create_server((host, 0), backlog=MOST_WAITING)
        self._timeout = timeout
        self.address = f"{host}:{self._socket.getsockname()[1]}"

    def wait(self, partner: int, meeting: int, own: Bring, seconds: float) -> Tensor | None:
        """Returns the message that the partner brings to a meeting, and gives it that of `own`; None if it does not come in time.

        Args:
            partner: the worker that is waited for.
            meeting: its number; who comes to another one is not answered.
            own: what this worker brings.
            seconds: to wait.
        """
        deadline = time.monotonic() + seconds
        while True:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                visitor, _ = self._socket.accept()
            except TimeoutError:
                return None
            with visitor, contextlib.suppress(OSError):
                visitor.settimeout(self._timeout)
                header = bytearray(_HEADER.size)
                receive(visitor, memoryview(header))
                *who, known = _HEADER.unpack(header)
                if who == [partner, meeting]:
                    visitor.sendall(_KNOWN.pack(own.known))
                    message = own.message(known == own.known)
                    theirs = torch.empty_like(message)
                    receive(visitor, _bytes(theirs))
                    self._send_all(visitor, message)
                    return theirs

    def visit(self, address: str, me: int, meeting: int, own: Bring) -> Tensor | None:
        """Returns the message of the worker at `address`, and gives it that of `own`; None if it does not answer."""
        try:
            with connect(address, self._timeout) as partner:
                partner.sendall(_HEADER.pack(me, meeting, own.known))
                known = bytearray(_KNOWN.size)
                receive(partner, memoryview(known))
                message = own.message(_KNOWN.unpack(known)[0] == own.known)
                theirs = torch.empty_like(message)
                self._send_all(partner, message)
                receive(partner, _bytes(theirs))
        except OSError:
            return None
        return theirs

    def _send_all(self, connection: socket.socket, vector: Tensor) -> None:
        connection.sendall(_bytes(vector))
        self.sent_bytes += vector.nbytes

    @staticmethod
    def notify(address: str) -> None:
        """Lets the worker at `address` know that it has been chosen, by a connection that is closed at once; it may get lost."""
        with contextlib.suppress(OSError):
            connect(address, _NOTIFY_S).close()

    def notified(self) -> bool:
        """Returns whether anybody has connected since this was last asked, and closes; not while this worker waits."""
        found = False
        self._socket.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.accept()[0].close()
                found = True
        return found

    def send(self, address: str, vector: Tensor) -> bool:
        """Sends a vector to the worker at `address`, which need not wait; returns whether all of it is on its way."""
        try:
            with connect(address, self._timeout) as partner:
                self._send_all(partner, vector)
        except OSError:
            return False
        return True

    def receive(self, like: Tensor, seconds: float) -> Tensor | None:
        """Returns a vector of the shape and dtype of `like` that is sent within some seconds; None for nothing, or a part."""
        self._socket.settimeout(seconds)
        with contextlib.suppress(OSError), self._socket.accept()[0] as visitor:
            visitor.settimeout(self._timeout)
            vector = torch.empty_like(like)
            receive(visitor, _bytes(vector))
            return vector
        return None

    def close(self) -> None:
        """Accepts no more connections."""
        self._socket.close()


class Mailbox:
    """Vectors that workers send each other whenever they like, from threads; nobody waits.

    Arriving vectors are summed, so that they take the space of one. What cannot be delivered comes back.

    Args:
        server: where vectors arrive; nothing else uses it meanwhile.
        like: a tensor of the shape and dtype of them all, on the CPU.
    """

    def __init__(self, server: PeerServer, like: Tensor) -> None:
        self._server, self._like = server, torch.empty_like(like)
        self._lock = threading.Lock()
        self._sum: Tensor | None = None
        self._over = threading.Event()
        self._receiver = threading.Thread(target=self._receive, daemon=True, name="mailbox receives")
        self._sender: threading.Thread | None = None
        self._receiver.start()

    @property
    def sending(self) -> bool:
        """Whether a vector has not been delivered yet."""
        return self._sender is not None and self._sender.is_alive()

    def send(self, address: str, vector: Tensor) -> None:
        """Sends a vector; one at a time."""
        assert not self.sending
        self._sender = threading.Thread(target=self._send, args=(address, vector), daemon=True, name="mailbox sends")
        self._sender.start()

    def take(self) -> Tensor | None:
        """Returns the sum of what has arrived since the last call; None for nothing."""
        with self._lock:
            found, self._sum = self._sum, None
        return found

    def _send(self, address: str, vector: Tensor) -> None:
        if not self._server.send(address, vector):
            self._add(vector)

    def _receive(self) -> None:
        while not self._over.is_set():
            vector = self._server.receive(self._like, _LOOK_S)
            if vector is not None:
                self._add(vector)

    def _add(self, vector: Tensor) -> None:
        with self._lock:
            self._sum = vector if self._sum is None else self._sum + vector

    def close(self) -> None:
        """Receives nothing more."""
        self._over.set()
        self._receiver.join()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.numpy().data.cast("B")


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
