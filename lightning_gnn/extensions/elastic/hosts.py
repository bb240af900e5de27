"""Connections between the hosts of an elastic run (docs/elastic-protocol.md), for the supervisor of each host.

Each host is connected with each other host. A line is a word or JSON. The first line of a connection is the token of the run.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, get_args

from lightning_gnn.comm.listening import listen_for_ranks
from lightning_gnn.extensions.elastic.membership import Generation, HostReport, Member, Message, Messages, Outcome

_TICK_S = 0.05
_PAUSE_S = 1.0  # a thread that has not run for longer was stopped, or had no core
_LINE_BYTES = 1 << 22
_MESSAGES = {kind.__name__: kind for kind in get_args(Message)}


class NoQuorumError(RuntimeError):
    """This host reaches too few hosts to continue."""


class ExcludedError(RuntimeError):
    """Other hosts continue without this host."""


def encode(message: Message) -> bytes:
    """Returns a message as a line of JSON."""
    fields = {"kind": type(message).__name__, **dataclasses.asdict(message)}
    return json.dumps(fields, default=sorted).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Returns the message of a line; raises ValueError, KeyError or TypeError for others."""
    fields = json.loads(line)
    kind = _MESSAGES[fields.pop("kind")]
    readers: dict[str, Callable[[Any], Any]] = {
        "generation": _read_generation, "value": _read_generation, "report": _read_report,
        "lost": frozenset, "ballot": tuple, "accepted": tuple,
    }  # fmt: skip
    message: Message = kind(**{name: readers.get(name, lambda value: value)(value) for name, value in fields.items()})
    return message


def _read_report(fields: dict[str, Any]) -> HostReport:
    return HostReport(**{**fields, "ranks": tuple((rank, step) for rank, step in fields["ranks"])})


def _read_generation(fields: dict[str, Any] | None) -> Generation | None:
    return None if fields is None else Generation(fields["number"], tuple(map(_read_report, fields["reports"])))


class _Link:
    """Connection to another host.

    Attributes:
        name: name of that host; empty before its first message.
        place: address and port at which that host listens.
        heard_at: time of its last message.
        is_trusted: whether it has sent the token.
    """

    def __init__(self, connection: socket.socket, name: str = "", place: tuple[str, int] = ("", 0)) -> None:
        self.connection, self.name, self.place, self.is_trusted = connection, name, place, bool(name)
        self.heard_at, self._read, self._unsent = time.monotonic(), b"", b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self) -> list[bytes] | None:
        """Returns the lines that have arrived; None if the connection is closed."""
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._read = (self._read + data).split(b"\n")
        if not data or len(self._read) > (_LINE_BYTES if self.is_trusted else 256):
            return None
        self.heard_at = time.monotonic()
        return lines

    def send(self, data: bytes = b"") -> None:
        """Send data, and earlier data that was not sent."""
        self._unsent += data
        with suppress(OSError):  # full, or closed, which receive() notices
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]


class Hosts:
    """Hosts of a run, for the supervisor of one of them.

    At a normal end, supervisors call :meth:`close` at different times: a host whose ranks have ended ignores changes.

    Args:
        address: address of the first host, like MASTER_ADDR.
        port: port of the first host, like MASTER_PORT.
        host_count_range: least and greatest number of hosts of the first generation. ``(1, 1)`` opens no connection.
        deadline_s: seconds without a message after which a host is lost. It is also lost if its ranks have not left a generation
            in this time after the ranks of another host. After twice this time without a decision, there is no quorum.
        number: number of this host, like NODE_RANK: 0 is the first host. The first generation has this order.
        token: word that all hosts of the run, and no other processes, have.
        start_s: seconds to wait for the first generation.
    """

    def __init__(
        self, address: str, port: int, host_count_range: tuple[int, int], deadline_s: float, *,
        number: int = 0, token: str = "", start_s: float = 300.0
    ) -> None:  # fmt: skip
        self._place, (self._min_count, self._max_count) = (address, port), host_count_range
        self._text = f"{address}:{port}"
        self._number, self._token, self._deadline_s, self._start_s = number, token, deadline_s, start_s
        self.name = f"{number:04}-{secrets.token_hex(4)}"
        self.address = address
        self._lock = threading.Condition(threading.RLock())
        self._links: dict[str, _Link] = {}
        self._callback: Callable[[], None] = lambda: None
        self._has_called = self._is_closed = False
        self._ready_at = float("inf")
        self._member = Member(self.name, Generation(0, (HostReport(self.name, address, 0, ()),) if number == 0 else ()))
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._error: Exception | None = None
        self._listener: socket.socket | None = None
        self._present_hosts = list[str]()
        if host_count_range == (1, 1):
            return
        if not token or any(character.isspace() for character in token):
            raise ValueError("LIGHTNING_GNN_TOKEN must be one word without spaces. Set it to the same word on all hosts.")
        if number == 0:
            self._listen(port)

    @property
    def wants_join(self) -> bool:
        """Whether a host waits for the end of an epoch, to join."""
        with self._lock:
            return bool(self._member.joining)

    @property
    def has_lost(self) -> bool:
        """Whether a host of the present generation is lost."""
        with self._lock:
            return not self._member.lost.isdisjoint(self._member.generation.hosts)

    def make_report(self, port: int, ranks: Iterable[tuple[int, int]], admits_hosts: bool = False, notes: str = "") -> HostReport:
        """Returns a report of this host, see :class:`~lightning_gnn.extensions.elastic.membership.HostReport`."""
        return HostReport(self.name, self.address, port, tuple(ranks), admits_hosts, notes)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Set a function that a thread calls when the ranks must leave the generation; it is called once per generation."""
        self._callback = callback

    def connect(self) -> None:
        """Connect to the other hosts, which shows the address of this host.

        Raises:
            NoQuorumError: the first host was not reached.
        """
        if self._number:
            self._present_hosts = self._connect_all()

    def start(self, report: HostReport) -> Generation:
        """Join the run after :meth:`connect`; returns the first generation with this host.

        Args:
            report: report of :meth:`make_report`.

        Raises:
            NoQuorumError: too few hosts have joined the first host.
        """
        self._thread.start()
        with self._lock:
            if self._number:
                self._deliver(self._member.on_ready(report))
                for host in self._present_hosts:
                    self._deliver(self._member.on_connect(host))
            else:
                self._wait(lambda: 1 + len(self._member.joining) >= self._max_count, self._start_s)
                if 1 + len(self._member.joining) < self._min_count:
                    raise NoQuorumError(
                        f"{1 + len(self._member.joining)} of at least {self._min_count} hosts have connected to {self._text} in "
                        f"{self._start_s:.0f} s. Start the other hosts with this address, or lower MIN of --nnodes MIN:MAX."
                    )
                self._deliver(self._member.on_ready(dataclasses.replace(report, admits_hosts=True)))
            return self._wait_for_generation(1)

    def next_generation(self, report: HostReport) -> Generation:
        """Leave the present generation; returns the next one.

        Args:
            report: report of :meth:`make_report`. All ranks of this host have left the present generation, or are dead.

        Raises:
            NoQuorumError: this host reaches too few hosts to continue. Save a checkpoint, and end.
            ExcludedError: other hosts continue without this host. End without writing.
        """
        with self._lock:
            number = self._member.generation.number + 1
            if self._member.outcome is None:
                self._ready_at = time.monotonic()
                self._deliver(self._member.on_ready(report))
            return self._wait_for_generation(number)

    def close(self) -> None:
        """Leave the run: other hosts lose this host."""
        with self._lock:
            self._is_closed = True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _wait(self, condition: Callable[[], bool], seconds: float = float("inf")) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end and self._error is None:
            self._lock.wait(_TICK_S * 4)
        if self._error is not None:
            raise self._error

    def _wait_for_generation(self, number: int) -> Generation:
        member = self._member
        self._wait(lambda: member.outcome is not None or member.generation.number >= number)
        if member.outcome is Outcome.EXCLUDED:
            raise ExcludedError(
                f"Host {self.name} is not in the generation after {member.generation.number}: it was late, stopped or cut off. "
                "Start it again to join at the end of an epoch."
            )
        if member.outcome is Outcome.NO_QUORUM:
            raise NoQuorumError(
                f"Host {self.name} found no quorum of the hosts of generation {member.generation.number} "
                f"in {2 * self._deadline_s:.0f} s; it has lost {', '.join(sorted(member.lost)) or 'none'}. "
                "Allow connections between the hosts, and start them again."
            )
        return member.generation

    def _listen(self, port: int) -> None:
        self._listener = listen_for_ranks(self.address, port, self._max_count)
        if self._listener is None:
            raise ValueError(
                f"address and port must be free on this host, got {self.address}:{port}. Set --master-addr and "
                "--master-port to an address and a free port of the first host, and --node-rank on other hosts."
            )
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _connect_all(self) -> list[str]:
        """Connect to all hosts, the first host first; returns their names."""
        end = time.monotonic() + self._start_s
        while True:
            try:
                first, others = self._connect(self._place)
                break
            except OSError as error:
                if time.monotonic() > end:
                    raise NoQuorumError(
                        f"Host {self.name} cannot connect to the first host at {self._text} ({error}). "
                        "Start the first host, allow connections to this port, and set the same LIGHTNING_GNN_TOKEN."
                    ) from None
                time.sleep(_TICK_S * 4)
        for host, *place in others:
            try:
                self._connect((place[0], place[1]))
            except OSError:
                self._member.on_lost(host)
        return [first, *(host for host, *_ in others if host in self._links)]

    def _connect(self, place: tuple[str, int]) -> tuple[str, list[list[Any]]]:
        """Connect to a host; returns its name, and names and places of the hosts that it is connected with."""
        connection = socket.create_connection(place, self._deadline_s)
        if self._listener is None:
            self.address = connection.getsockname()[0]
            self._listen(0)
        assert self._listener is not None
        hello = {"name": self.name, "place": [self.address, self._listener.getsockname()[1]]}
        connection.sendall(f"{self._token}\n{json.dumps(hello)}\n".encode())
        try:
            reply = connection.makefile("rb", buffering=0).readline()  # no further bytes: messages may follow
            welcome = json.loads(reply or b"{}")
        except (OSError, ValueError):
            welcome = {}
        if not welcome:
            connection.close()
            raise ConnectionError("it closed the connection, or did not answer; the tokens may differ")
        self._add(_Link(connection, welcome["name"], place))
        return welcome["name"], welcome["hosts"]

    def _add(self, link: _Link) -> None:
        link.connection.setblocking(False)
        self._selector.register(link.connection, selectors.EVENT_READ, link)
        if link.name:
            self._links[link.name] = link

    def _run(self) -> None:
        try:
            self._exchange()
        except Exception as error:  # for the thread that waits
            self._error = error

    def _exchange(self) -> None:
        ran_at = beaten_at = time.monotonic()
        while True:
            ready = self._selector.select(_TICK_S)
            now = time.monotonic()
            with self._lock:
                if now - ran_at > _PAUSE_S:  # first read the messages that have arrived meanwhile
                    self._ready_at += now - ran_at
                    for link in self._links.values():
                        link.heard_at += now - ran_at
                ran_at = now
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._add(_Link(self._listener.accept()[0]))
                    else:
                        self._read(key.data)
                self._check(now)
                beat = b"beat\n" if now - beaten_at > self._deadline_s / 5 else b""
                beaten_at = now if beat else beaten_at
                for name, link in self._links.items():
                    link.send(b"" if name in self._member.lost else beat)
                has_changed = self._member.has_changed and self._member.report is None
                calls, self._has_called = has_changed and not self._has_called, has_changed
                self._lock.notify_all()
                if self._is_closed:
                    return
            if calls:
                self._callback()

    def _read(self, link: _Link) -> None:
        lines = link.receive()
        try:
            for line in lines or ():
                if not link.is_trusted:
                    if not hmac.compare_digest(line, self._token.encode()):
                        raise ValueError("token")
                    link.is_trusted = True
                elif not link.name:
                    self._welcome(link, json.loads(line))
                elif line != b"beat":
                    self._deliver(self._member.on_message(link.name, decode(line)))
        except (ValueError, KeyError, TypeError, AttributeError):  # not a host of this run
            lines = None
        if lines is None:
            self._selector.unregister(link.connection)
            link.connection.close()
            if self._links.get(link.name) is link:
                del self._links[link.name]

    def _welcome(self, link: _Link, hello: dict[str, Any]) -> None:
        """Send the places of the other hosts to a host that has connected."""
        link.name, link.place = hello["name"], (hello["place"][0], hello["place"][1])
        hosts = [[name, *other.place] for name, other in self._links.items() if name not in self._member.lost]
        link.send(json.dumps({"name": self.name, "hosts": hosts}).encode() + b"\n")
        self._links[link.name] = link

    def _check(self, now: float) -> None:
        """Look for lost hosts and missed deadlines."""
        member = self._member
        late = {name for name, link in self._links.items() if now - link.heard_at > self._deadline_s}
        self._ready_at = float("inf") if member.report is None else self._ready_at
        if now - self._ready_at > self._deadline_s:
            late |= {host for host in member.generation.hosts if host not in member.reports}
        closed = {host for host in (*member.generation.hosts, *member.joining) if host not in self._links}
        for host in sorted((late | closed) - member.lost - {self.name}):
            self._deliver(member.on_lost(host))
        has_no_host = member.generation.number == 0 and self._number > 0 and not self._links.keys() - member.lost
        if now - self._ready_at > 2 * self._deadline_s or has_no_host:
            member.on_deadline()

    def _deliver(self, messages: Messages) -> None:
        for receiver, message in messages:
            if receiver in self._links:
                self._links[receiver].send(encode(message))
