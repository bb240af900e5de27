"""What this machine listens on for other ranks: the address that was given, never all addresses without need.

Neither torch's store nor gloo knows passwords: who reaches their ports can take part (docs/security.md).
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

_INTERFACE = "GLOO_SOCKET_IFNAME"

LISTENER_VARIABLE = "LIGHTNING_GNN_LISTENER"
"""Environment of rank 0: the number of a socket, open in it, that listens where ranks meet."""

_held: dict[int, socket.socket] = {}  # of this process, by port


def listen_for_ranks(address: str, port: int, size: int) -> socket.socket | None:
    """Returns a socket that listens where ranks will meet, for rank 0 to :func:`hold`: no other process can take the port then.

    Args:
        address: of this machine.
        port: 0 for one that is free.
        size: how many ranks may connect at once.

    Returns:
        None where nothing can listen: on a port that is in use, which rank 0 says, or at an address that is not this machine's.
    """
    try:
        return _listen(address, port, size)
    except OSError:
        return None


def hold(listener: socket.socket) -> None:
    """Keeps a socket of :func:`listen_for_ranks` for the store of this process, which is rank 0."""
    _held[listener.getsockname()[1]] = listener


def _take(port: int) -> socket.socket | None:
    """Returns the socket that listens on a port already, once."""
    descriptor = os.environ.pop(LISTENER_VARIABLE, None)
    if descriptor is not None:
        hold(socket.socket(fileno=int(descriptor)))
    return _held.pop(port, None)


def meeting_store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Returns the store at MASTER_ADDR and MASTER_PORT, by which ranks find each other; rank 0 keeps it.

    As torch's ``env://``, which listens on all addresses of rank 0's machine. Where torchrun keeps the store, it is torchrun's.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        listener = _take(port) or _listener(address, port, size)
        if listener is not None:
            return dist.TCPStore(address, port, size, True, timeout, multi_tenant=True, master_listen_fd=listener.detach())
    if rank > 0:
        _wait_for_listener(address, port)
    return next(dist.rendezvous("env://", rank=rank, world_size=size, timeout=timeout))[0]


def _wait_for_listener(address: str, port: int) -> None:
    """Returns once somebody listens there, or after a second: torch, which tries again, waits up to a second in between."""
    end = time.monotonic() + 1
    while time.monotonic() < end:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.005)


def _listener(address: str, port: int, size: int) -> socket.socket | None:
    """Returns a socket that listens on an address; None if torch is to find its own way, on all addresses.

    So it is if the port is in use, perhaps by a store of this process, which torch then takes; else torch says what is wrong
    with the port. So it is, with a warning, if none of
    this machine's interfaces has the address, as behind a gateway, or if its own name is 127.0.1.1 to it, where no other comes.
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
    """Returns a socket that listens on an address; None if it is not one of this machine's interfaces.

    Raises:
        OSError: the port is in use, or not for this user.
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
    """Returns whether an address is, by itself, one that only this machine reaches."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


@contextmanager
def gloo_beside(address: str) -> Iterator[None]:
    """Has gloo listen on this machine's loopback interface for groups that are made inside, if the ranks meet there.

    By itself it takes the interface of the host's name. ``GLOO_SOCKET_IFNAME``, where it is set, decides.
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
