"""Sockets and interfaces on which this machine listens: the given address, and all addresses only if necessary.

Neither torch's store nor gloo uses passwords: any process that reaches their ports can take part (docs/security.md).
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from lightning_gnn.comm.processes import current_progress

_INTERFACE = "GLOO_SOCKET_IFNAME"

LISTENER_VARIABLE = "LIGHTNING_GNN_LISTENER"
"""Environment variable of rank 0: file descriptor of an open socket that listens at the rendezvous address."""

_CONNECT = timedelta(seconds=10)

_held: dict[int, socket.socket] = {}  # of this process, by port


def listen_for_ranks(address: str, port: int, size: int) -> socket.socket | None:
    """Returns a socket that listens at the rendezvous address, for :func:`hold` of rank 0; it reserves the port.

    Args:
        address: address of this machine.
        port: port; 0 for any free port.
        size: number of ranks that may connect at once.

    Returns:
        The socket. None if the port is in use (rank 0 raises the error), or if the address is not an address of this machine.
    """
    try:
        return _listen(address, port, size)
    except OSError:
        return None


def hold(listener: socket.socket) -> None:
    """Store a socket of :func:`listen_for_ranks` for the rendezvous store of this process, which is rank 0."""
    _held[listener.getsockname()[1]] = listener


def _take(port: int) -> socket.socket | None:
    """Returns and removes the socket that already listens on a port; None without one."""
    descriptor = os.environ.pop(LISTENER_VARIABLE, None)
    if descriptor is not None:
        hold(socket.socket(fileno=int(descriptor)))
    return _held.pop(port, None)


def meeting_store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Returns the rendezvous store at MASTER_ADDR and MASTER_PORT; rank 0 serves it.

    It replaces torch's ``env://``, which listens on all addresses of rank 0's machine. With torchrun's agent store, torchrun
    serves it.

    Raises:
        DistNetworkError: this rank outlives others, and the store has ended because a rank was lost.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if current_progress().outlives_others:
        return _supervisors_store(address, port, timeout)
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listener = _take(port) or _listener(address, port, size)
        if listener is not None:
            return dist.TCPStore(address, port, size, True, timeout, multi_tenant=True, master_listen_fd=listener.detach())
    if rank > 0:
        _wait_for_listener(address, port)
    return next(dist.rendezvous("env://", rank=rank, world_size=size, timeout=timeout))[0]


def _supervisors_store(address: str, port: int, timeout: timedelta) -> dist.Store:
    """Returns the store that :func:`serve_store` serves in the process that started the ranks."""
    if not _wait_for_listener(address, port):  # torch would wait for the whole timeout
        raise dist.DistNetworkError(f"The store at {address}:{port} has ended, because another rank was lost.")
    store = dist.TCPStore(address, port, None, False, min(timeout, _CONNECT), wait_for_workers=False)
    store.set_timeout(timeout)
    return store


def serve_store(address: str) -> tuple[dist.Store, int]:
    """Returns a store for ranks of which none serves it, and its port; the ranks outlive others."""
    listener = _listen(address, 0, 1) or socket.create_server(("", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()), port


def _wait_for_listener(address: str, port: int) -> bool:
    """Returns whether a process listens at the address within a second: torch's own retries are up to a second apart."""
    end = time.monotonic() + 1
    while time.monotonic() < end:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return True
        except OSError:
            time.sleep(0.005)
    return False


def _listener(address: str, port: int, size: int) -> socket.socket | None:
    """Returns a socket that listens on an address; None if torch should listen, on all addresses.

    None if the port is in use, perhaps by a store of this process, which torch then reuses. Torch reports other errors of the
    port. None with a warning if no interface of this machine has the address, as behind a gateway. The same holds if the
    machine's name resolves to 127.0.1.1, which other machines cannot reach.
    """
    try:
        listener = _listen(address, port, size)
    except OSError:
        return None
    if listener is not None:
        return listener
    warnings.warn(
        f"MASTER_ADDR={address} is no address of an interface of this machine, so rank 0 listens on all of them, port {port}. "
        "Give an address of rank 0's machine, or see to it that only the other ranks reach that port.",
        stacklevel=2,
    )
    return None


def _listen(address: str, port: int, size: int) -> socket.socket | None:
    """Returns a socket that listens on an address; None if no interface of this machine has it.

    Raises:
        OSError: the port is in use, or this user may not use it.
    """
    for family, *_, (host, *_) in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        if is_loopback(str(host)) and not is_loopback(address):
            continue
        try:
            return socket.create_server((str(host), port), family=family, backlog=max(size, 128))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return None


def is_loopback(address: str) -> bool:
    """Returns whether an address is a loopback address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


@contextmanager
def gloo_beside(address: str) -> Iterator[None]:
    """Context manager that makes gloo listen on the loopback interface, if the rendezvous address is a loopback one.

    Gloo's default is the interface of the host name. ``GLOO_SOCKET_IFNAME`` takes precedence.
    """
    inside = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if _INTERFACE in os.environ or not inside or not is_loopback(address):
        yield
        return
    os.environ[_INTERFACE] = inside[0]
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
