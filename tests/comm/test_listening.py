"""What ranks listen on: the address that they were given. Over gloo ranks in the pool."""

from __future__ import annotations

import socket
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_gnn.comm import group, listening
from lightning_gnn.comm.group import CommunicationError, World, next_store


def listened_on(rank: int, world_size: int, shared_memory: bool) -> list[str]:
    before = {connection.laddr for connection in psutil.Process().net_connections("tcp")}
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=100), shared_memory)
    world.barrier()
    connections = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    world.barrier()
    world.close()
    return [each.laddr.ip for each in connections if each.laddr not in before]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_ranks_of_one_machine_listen_on_loopback(ranks, shared_memory):
    found = ranks.run(2, listened_on, shared_memory)
    assert all(found) and {ip for each in found for ip in each} == {"127.0.0.1"}


def test_the_store_listens_where_it_is_told(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with listening._listener("127.0.0.1", port, 2) as found:
        assert found.getsockname() == ("127.0.0.1", port)
        # In use: torch says so, or takes the store of this process.
        assert listening._listener("127.0.0.1", port, 2) is None
    elsewhere = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (ip, port)) for ip in ("192.0.2.1", "127.0.1.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: elsewhere)
    with pytest.warns(UserWarning, match="MASTER_ADDR=gateway is no address of an interface of this machine"):
        assert listening._listener("gateway", port, 2) is None


def test_a_port_is_held_from_its_choice_on(monkeypatch):
    held = listening.listen_for_ranks("127.0.0.1", 0, 1)
    port = held.getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    assert listening.listen_for_ranks("127.0.0.1", port, 1) is None
    listening.hold(held)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = listening.meeting_store(0, 1, timedelta(seconds=20))  # on that very socket
    store.set("key", "value")
    assert store.port == port and store.get("key") == b"value" and not listening._held


def test_a_port_of_another_process_is_named(monkeypatch):
    program = "import socket; held = socket.create_server(('127.0.0.1', 0)); print(held.getsockname()[1], flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    port = other.stdout.readline().strip()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    words = rf"Rank 0 cannot listen at 127.0.0.1:{port}, .* another process does .address in use.. Set MASTER_PORT"
    with pytest.raises(RuntimeError, match=words):
        next_store(0, 2, timedelta(seconds=20))
    other.communicate("")


def test_the_first_word_of_who_has_not_come(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    with pytest.raises(CommunicationError, match=r"Rank 0 has waited 1 s for rank\(s\) 1, 2, which have not come"):
        group._meet(store, 0, 3, timedelta(seconds=1))
    words = r"Rank 1 of 2 could not meet the others at 127.0.0.1:\d+ in \d+ s \(Dist.*Are all ranks started"
    with pytest.raises(RuntimeError, match=words):
        next_store(1, 2, timedelta(seconds=1))


def test_gloo_is_left_alone_where_others_come(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for address in ("10.0.0.1", "node7", ""):
        with listening.gloo_beside(address):
            assert "GLOO_SOCKET_IFNAME" not in listening.os.environ
    with listening.gloo_beside("127.0.0.1"):
        assert listening.os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with listening.gloo_beside("::1"):
        assert listening.os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
