"""Communication of independent workers: a store of keys, heartbeats and peer servers, without collectives.

The store is a TCPStore in a separate process: any rank may die, and so may the process that starts the ranks. Vectors are sent
over plain sockets. The module ``multiprocessing.connection`` has no deadlines for connecting, for its handshake or within a
message. Streams of asyncio have deadlines, but copy received data, and took 2 to 4 times the CPU time.
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
"""Maximum number of connections that wait to be accepted."""
BEAT_S = 0.5
"""Seconds between two heartbeats."""
EXCHANGE_S = 30.0
"""Seconds without data from a worker, or the store, after which an exchange is abandoned."""

_NOTHING = "-"
_CHUNK = 4 << 20  # a TCPStore takes at most 8 MB at once
_HEADER = struct.Struct("!qqq")  # visitor, number of the meeting, and its state id of the partner
_STATE_ID = struct.Struct("!q")  # answer: the state id of the visitor
_NOTIFY_S = 1.0
_LOOK_S = 0.2  # seconds between two checks whether a mailbox is closed


class MessageSource(Protocol):
    """Source of the messages of a meeting.

    Attributes:
        state_id: id of the stored state of the partner; both sides compare it. 0 if nothing is stored.
    """

    state_id: int

    def message(self, agreed: bool) -> Tensor:
        """Returns the message to the partner, on the CPU, of equal shape and dtype on both sides.

        Args:
            agreed: whether the ids of both sides are equal.
        """
        ...


def connect_to_store(place: str) -> dist.Store:
    """Returns a separate connection to the store at ``host:port prefix``; all keys start with the prefix."""
    address, _, prefix = place.partition(" ")
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=EXCHANGE_S)
    return dist.PrefixStore(prefix, dist.TCPStore(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False))


class SharedKeys:
    """Key-value store shared by processes; each call is atomic.

    Args:
        place: address of the key-value store, see :func:`connect_to_store`; empty for a store of this process only.

    Raises:
        CommunicationError: the store cannot be reached; also raised by all methods.
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
                f"The store of the workers at {self._where} does not answer: its process has ended, or cannot be reached "
                f"({str(error).splitlines()[0]})."
            ) from error

    def get(self, key: str) -> str:
        """Returns the value of a key, ``""`` if there is none."""
        with self._naming():
            # get() would wait for a missing key.
            found = self._store.compare_set(key, _NOTHING, _NOTHING).decode()
        return "" if found == _NOTHING else found

    def add(self, key: str, amount: int) -> int:
        """Add to a number; returns the sum."""
        with self._naming():
            return self._store.add(key, amount)

    def swap(self, key: str, expected: str, new: str) -> bool:
        """Replace `expected` by `new`; returns whether the value is now `new`."""
        with self._naming():
            # A key with a value never loses it, so "" also works as the expected value of such keys.
            found = self._store.compare_set(key, expected, new).decode()
        return found == new

    def put(self, key: str, value: bytes) -> None:
        """Store bytes of any length."""
        with self._naming():
            for place in range(0, len(value), _CHUNK):
                self._store.set(f"{key}/{place}", value[place : place + _CHUNK])  # type: ignore[arg-type]
            self._store.set(key, str(len(value)))

    def find(self, key: str) -> bytes | None:
        """Returns the bytes stored by :meth:`put`; None if they are missing or not complete."""
        length = self.get(key)
        if not length:
            return None
        with self._naming():
            return b"".join(self._store.get(f"{key}/{place}") for place in range(0, int(length), _CHUNK))


class Heartbeat:
    """Thread that sends this worker's heartbeats, and detector of dead workers.

    Args:
        place: address of the key-value store, see :func:`connect_to_store`; heartbeats use separate connections.
        me: this worker.
        patience: seconds without a heartbeat after which a worker counts as dead.
    """

    def __init__(self, place: str, me: int, patience: float) -> None:
        self._keys, self._beats = SharedKeys(place), SharedKeys(place)
        self._me, self._patience = me, patience
        self._last_beats: dict[int, tuple[int, float]] = {}
        self._over = threading.Event()
        self._beats.add(f"heartbeat/{me}", 1)
        self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
        self._thread.start()

    def _beat(self) -> None:
        with contextlib.suppress(CommunicationError):  # the training thread gets the error too
            while not self._over.wait(BEAT_S):
                self._beats.add(f"heartbeat/{self._me}", 1)

    def is_alive(self, worker: int) -> bool:
        """Returns whether a worker has sent a heartbeat recently."""
        count, now = self._keys.add(f"heartbeat/{worker}", 0), time.monotonic()
        before, since = self._last_beats.get(worker, (None, now))
        if count != before:
            since = now
        self._last_beats[worker] = count, since
        return now - since < self._patience

    def stop(self) -> None:
        """Stop the heartbeats of this worker."""
        self._over.set()
        self._thread.join()


class PeerServer:
    """Server that other workers connect to, one at a time.

    Args:
        host: address of this machine for the others.
        timeout: seconds without data after which a connection fails.

    Attributes:
        address: ``host:port``.
        sent_bytes: bytes of vectors sent to others.
    """

    def __init__(self, host: str, timeout: float) -> None:
        self.sent_bytes = 0
        self._socket = socket.create_server((host, 0), backlog=MOST_WAITING)
        self._timeout = timeout
        self.address = f"{host}:{self._socket.getsockname()[1]}"

    def wait(self, partner: int, meeting: int, source: MessageSource, seconds: float) -> Tensor | None:
        """Returns the partner's message of a meeting and sends this worker's; None if the partner does not come in time.

        Args:
            partner: worker to wait for.
            meeting: number of the meeting; connections for other meetings are closed.
            source: source of this worker's message.
            seconds: maximum waiting time.
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
                *who, state_id = _HEADER.unpack(header)
                if who == [partner, meeting]:
                    visitor.sendall(_STATE_ID.pack(source.state_id))
                    message = source.message(state_id == source.state_id)
                    theirs = torch.empty_like(message)
                    receive(visitor, _bytes(theirs))
                    self._send_all(visitor, message)
                    return theirs

    def visit(self, address: str, me: int, meeting: int, source: MessageSource) -> Tensor | None:
        """Returns the message of the worker at `address` and sends this worker's, from `source`; None without an answer."""
        try:
            with connect(address, self._timeout) as partner:
                partner.sendall(_HEADER.pack(me, meeting, source.state_id))
                answer = bytearray(_STATE_ID.size)
                receive(partner, memoryview(answer))
                message = source.message(_STATE_ID.unpack(answer)[0] == source.state_id)
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
        """Notify the worker at `address` that it was chosen, by a connection that is closed at once; may get lost."""
        with contextlib.suppress(OSError):
            connect(address, _NOTIFY_S).close()

    def read_notifications(self) -> bool:
        """Returns whether any worker has connected since the last call, and closes these connections.

        Must not be called while this worker waits.
        """
        found = False
        self._socket.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.accept()[0].close()
                found = True
        return found

    def send(self, address: str, vector: Tensor) -> bool:
        """Send a vector to the worker at `address`, which need not wait; returns whether it was sent completely."""
        try:
            with connect(address, self._timeout) as partner:
                self._send_all(partner, vector)
        except OSError:
            return False
        return True

    def receive(self, like: Tensor, seconds: float) -> Tensor | None:
        """Returns a vector of the shape and dtype of `like` that arrives within `seconds`; None if none arrives completely."""
        self._socket.settimeout(seconds)
        with contextlib.suppress(OSError), self._socket.accept()[0] as visitor:
            visitor.settimeout(self._timeout)
            vector = torch.empty_like(like)
            receive(visitor, _bytes(vector))
            return vector
        return None

    def close(self) -> None:
        """Stop accepting connections."""
        self._socket.close()


class Mailbox:
    """Asynchronous messages between workers, in threads; sender and receiver never wait.

    Received vectors are summed, so that they take the memory of one. A vector that cannot be delivered is added to the received
    ones.

    Args:
        server: server for received vectors; must not be used otherwise in the meantime.
        like: tensor with the shape and dtype of all vectors, on the CPU.
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
        """Whether a vector is still in transit."""
        return self._sender is not None and self._sender.is_alive()

    def send(self, address: str, vector: Tensor) -> None:
        """Starts to send a vector; one at a time."""
        assert not self.sending
        self._sender = threading.Thread(target=self._send, args=(address, vector), daemon=True, name="mailbox sends")
        self._sender.start()

    def take(self) -> Tensor | None:
        """Returns the sum of the vectors received since the last call; None if there are none."""
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
        """Stop receiving."""
        self._over.set()
        self._receiver.join()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.numpy().data.cast("B")


def own_address(main: str, num_machines: int) -> str:
    """Returns this machine's address on the route to the machine `main`, for workers that reach `main` too."""
    if num_machines == 1:
        return LOCAL
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((main, 9))  # sends no data
        return towards.getsockname()[0]


def connect(address: str, timeout: float) -> socket.socket:
    """Returns a connection to ``host:port`` whose operations time out after `timeout` seconds."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout)


def receive(connection: socket.socket, into: memoryview) -> None:
    """Fill `into`; raises ConnectionError if the other side closes the connection before."""
    while len(into):
        count = connection.recv_into(into)
        if not count:
            raise ConnectionError("the peer has closed the connection")
        into = into[count:]
