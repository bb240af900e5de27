"""Supervisors in processes of their own, on the loopback interface: loss of hosts, stopped hosts, joining hosts."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized

import pytest

from lightning_gnn.extensions.elastic.hosts import ExcludedError, Hosts, NoQuorumError, _Link, decode, encode
from lightning_gnn.extensions.elastic.membership import Accept, Decided, Generation, HostReport, Promise, Ready, Refused

DEADLINE_S = 2.0


def cut_halves(number: int, is_cut: Synchronized[int]) -> None:
    """Make links between hosts 0 and 1 and other hosts carry nothing while they are cut; they deliver everything later."""
    send, receive = _Link.send, _Link.receive

    def reaches(link: _Link) -> bool:
        return not is_cut.value or not link.name or (int(link.name[:4]) < 2) == (number < 2)

    def send_later(link: _Link, data: bytes = b"") -> None:
        if reaches(link):
            send(link, data)
        else:
            link._unsent += data

    _Link.send = send_later  # type: ignore[method-assign]
    _Link.receive = lambda link: receive(link) if reaches(link) else time.sleep(0.01) or []  # type: ignore[method-assign]


def supervise(pipe: Connection, number: int, port: int, counts: tuple[int, int], token: str, is_cut: Synchronized[int]) -> None:
    """Run a host: leave a generation when another host does or the pipe requests it; send each generation and the end."""
    cut_halves(number, is_cut)
    hosts = Hosts("127.0.0.1", port, counts, DEADLINE_S, number=number, token=token, start_s=20)
    changed, admits_hosts = threading.Event(), False
    hosts.on_change(changed.set)
    call: Callable[[HostReport], Generation] = hosts.start
    step = number
    try:
        hosts.connect()
        while True:
            generation = call(hosts.make_report(1000 + number, [(rank, step) for rank in range(number + 1)], admits_hosts))
            pipe.send((generation.number, [int(host[:4]) for host in generation.hosts], list(generation.ranks_of(hosts.name))))
            step, call, admits_hosts = step + 1, hosts.next_generation, False
            while not changed.wait(0.02) and not admits_hosts:
                admits_hosts = pipe.poll() and pipe.recv() == "end of epoch"
            changed.clear()
    except (NoQuorumError, ExcludedError) as error:
        pipe.send(type(error).__name__)
    finally:
        hosts.close()


class Run:
    """Hosts of a run."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.context = multiprocessing.get_context("fork")
        self.is_cut = self.context.Value("i", 0)
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.pipes: list[Connection] = []

    def start(self, count: int, counts: tuple[int, int], token: str = "word") -> None:
        for _ in range(count):
            mine, other = self.context.Pipe()
            arguments = other, len(self.processes), self.port, counts, token, self.is_cut
            self.processes.append(self.context.Process(target=supervise, args=arguments, daemon=True))
            self.processes[-1].start()
            self.pipes.append(mine)

    def signal(self, host: int, number: int) -> None:
        pid = self.processes[host].pid
        assert pid is not None
        os.kill(pid, number)

    def receive(self, *hosts: int) -> list[object]:
        """Returns the next event of each host."""
        found = []
        for host in hosts:
            assert self.pipes[host].poll(20), f"host {host} sent nothing"
            found.append(self.pipes[host].recv())
        return found


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    for process in run.processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_start(run: Run, count: int) -> None:
    run.start(count, (count, count))
    ranks = [list(range(host * (host + 1) // 2, (host + 1) * (host + 2) // 2)) for host in range(count)]
    assert run.receive(*range(count)) == [(1, list(range(count)), ranks[host]) for host in range(count)]


def test_killed_host(run: Run) -> None:
    run.start(3, (3, 3))
    run.receive(0, 1, 2)
    run.signal(1, signal.SIGKILL)
    assert run.receive(0, 2) == [(2, [0, 2], [0]), (2, [0, 2], [1, 2, 3])]
    run.signal(2, signal.SIGKILL)
    assert run.receive(0) == [(3, [0], [0])]  # half of the hosts, with the first


def test_killed_first_host(run: Run) -> None:
    run.start(4, (4, 4))
    run.receive(0, 1, 2, 3)
    run.signal(0, signal.SIGKILL)
    assert run.receive(1, 2, 3) == [(2, [1, 2, 3], [0, 1]), (2, [1, 2, 3], [2, 3, 4]), (2, [1, 2, 3], [5, 6, 7, 8])]


def test_half_without_first_host(run: Run) -> None:
    run.start(2, (2, 2))
    run.receive(0, 1)
    run.signal(0, signal.SIGKILL)
    assert run.receive(1) == ["NoQuorumError"]


def test_stopped_host(run: Run) -> None:
    run.start(3, (3, 3))
    run.receive(0, 1, 2)
    run.signal(0, signal.SIGSTOP)
    assert run.receive(1, 2) == [(2, [1, 2], [0, 1]), (2, [1, 2], [2, 3, 4])]
    time.sleep(2 * DEADLINE_S)
    run.signal(0, signal.SIGCONT)
    assert run.receive(0) == ["ExcludedError"]
    assert not run.pipes[1].poll(2 * DEADLINE_S) and not run.pipes[2].poll()


@pytest.mark.parametrize("is_healed", [False, True])
def test_cut_halves(run: Run, is_healed: bool) -> None:
    run.start(4, (4, 4))
    run.receive(0, 1, 2, 3)
    run.is_cut.value = 1
    assert run.receive(0, 1) == [(2, [0, 1], [0]), (2, [0, 1], [1, 2])]
    run.is_cut.value = int(not is_healed)
    assert run.receive(2, 3) == ["ExcludedError" if is_healed else "NoQuorumError"] * 2
    assert not run.pipes[0].poll(DEADLINE_S) and not run.pipes[1].poll()


def test_short_stop(run: Run) -> None:
    run.start(2, (2, 2))
    run.receive(0, 1)
    run.signal(1, signal.SIGSTOP)
    time.sleep(DEADLINE_S / 2)
    run.signal(1, signal.SIGCONT)
    assert not run.pipes[0].poll(DEADLINE_S) and not run.pipes[1].poll()


def test_joining_host(run: Run) -> None:
    run.start(2, (2, 2))
    run.receive(0, 1)
    run.start(1, (2, 2))
    assert not run.pipes[2].poll(1) and not run.pipes[0].poll()
    run.pipes[0].send("end of epoch")
    assert run.receive(0, 1, 2) == [(2, [0, 1, 2], [0]), (2, [0, 1, 2], [1, 2]), (2, [0, 1, 2], [3, 4, 5])]
    run.signal(0, signal.SIGKILL)
    assert run.receive(1, 2) == [(3, [1, 2], [0, 1]), (3, [1, 2], [2, 3, 4])]


def test_other_token(run: Run) -> None:
    run.start(1, (1, 2), "word")
    run.start(1, (1, 2), "other")
    assert not run.pipes[0].poll(2)
    with socket.create_connection(("127.0.0.1", run.port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert connection.recv(100) == b""


def test_single_host() -> None:
    hosts = Hosts("127.0.0.1", 0, (1, 1), DEADLINE_S)
    first = hosts.start(hosts.make_report(1, [(0, -1), (1, -1), (2, -1)]))
    assert (first.number, first.size, first.rendezvous, hosts.wants_join) == (1, 3, ("127.0.0.1", 1), False)
    second = hosts.next_generation(hosts.make_report(2, [(0, 4), (2, 5)]))
    assert (second.number, second.size, second.source, second.rendezvous) == (2, 2, 1, ("127.0.0.1", 2))
    hosts.close()


def test_too_few_hosts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"must be free on this host, got 127.0.0.1:{port}"):
            Hosts("127.0.0.1", port, (2, 2), DEADLINE_S, token="word")
    hosts = Hosts("127.0.0.1", port, (2, 3), DEADLINE_S, token="word", start_s=0.5)
    with pytest.raises(NoQuorumError, match="1 of at least 2 hosts have connected"):
        hosts.start(hosts.make_report(1, [(0, -1)]))
    hosts.close()
    other = Hosts("127.0.0.1", port, (2, 3), DEADLINE_S, number=1, token="word", start_s=0.5)
    with pytest.raises(NoQuorumError, match="cannot connect to the first host"):
        other.connect()
    other.close()
    with pytest.raises(ValueError, match="LIGHTNING_GNN_TOKEN must be one word"):
        Hosts("127.0.0.1", port, (2, 2), DEADLINE_S, token="two words")


def test_messages() -> None:
    report = HostReport("A", "10.0.0.1", 29500, ((0, 7), (3, 8)))
    generation = Generation(2, (report,))
    for message in (
        Ready(generation, report, frozenset("BC")),
        Promise(2, (3, "A"), (0, ""), None),
        Accept(2, (3, "A"), generation),
        Refused(2, (4, "B")),
        Decided(generation),
    ):
        assert decode(encode(message)) == message
    with pytest.raises((ValueError, KeyError, TypeError)):
        decode(json.dumps({"kind": "Other"}).encode())
