"""Entries of the store, brought to machines that lack them: over sockets of our own, checked as they arrive.

An entry is sent as a whole. Rows of all parts lie in one file per attribute, and any rank may ask for any of them (predictions in
the original order, samples, clusters, the graph on one device), so a machine with some parts only would have an entry that looks
complete and is not.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from lightning_gnn.comm.group import World
from lightning_gnn.comm.sockets import connect, own_address, receive
from lightning_gnn.console import text_console
from lightning_gnn.data.store import LARGEST_MANIFEST, StoreError, read_manifest, write_copy

T = TypeVar("T")

_CHUNK = 1 << 20
_LENGTH = struct.Struct("!Q")  # of the manifest, which comes first
_TOKEN = 16  # bytes that whoever is expected knows from the ranks' own group
_CONNECT_S = 60.0  # to connect, and to show the token
_BEAT_S = 1.0  # ranks tell each other so often how far they are, so none waits long for another


class _Source(NamedTuple):
    """Where an entry is fetched from: the rank that sends it, its machine's name, where it listens, and for whom."""

    rank: int
    host: str
    address: str
    token: bytes


def spread_entry(world: World, leads: bool, folder: Path, lock: Callable[[str], AbstractContextManager[None]]) -> None:
    """Returns once the machines of all ranks have an entry of the store; all ranks call it.

    A machine that has it sends it to one that lacks it, and those that have got it to others, until none is left: 2, 4, 8 have
    it after a round, two, three. Without effect, and without a socket, where all see it, as on a shared file system.

    Args:
        leads: whether this rank is the one that fetches and sends for its machine.
        folder: of the entry on this machine, under the same name everywhere.
        lock: lets one process at a time write what has that name.

    Raises:
        StoreError: it could not be fetched, or has arrived altered; RuntimeError on the other ranks. Nothing of it is kept. On
            all: a machine has another partition of the same graph, from an earlier run.
    """

    def own() -> tuple[str, str | None]:
        has = leads and (folder / "manifest.json").exists()
        return platform.node(), read_manifest(folder)["digest"] if has else "" if leads else None

    while True:
        told = _on_all(world, own)
        [_, digest] = told[0]
        others = [f"{host} (rank {rank})" for rank, (host, found) in enumerate(told) if found not in (None, "", digest)]
        if digest and others:
            raise StoreError(
                f"Stores hold different partitions of the same graph under {folder.name}: {', '.join(others)} made theirs in "
                f"earlier runs. Remove {folder} there and run again: it is then fetched from {told[0][0]}."
            )
        having, lacking = ([rank for rank, (_, found) in enumerate(told) if found == what] for what in (digest, ""))
        if not digest or not lacking:
            return
        _round(world, dict(zip(lacking, having)), folder, lock)


def _round(
    world: World, senders: dict[int, int], folder: Path, lock: Callable[[str], AbstractContextManager[None]]
) -> None:
    """Has each key of `senders` fetch the entry from its value."""
    sender = senders.get(world.rank)
    receiver = {value: key for key, value in senders.items()}.get(world.rank)
    timeout = world.timeout.total_seconds()
    hosts = _on_all(world, lambda: "" if sender is None else own_address(os.environ["MASTER_ADDR"], 2))
    token, listener = secrets.token_bytes(_TOKEN), None

    def listen() -> _Source | None:
        nonlocal listener
        if receiver is None:
            return None
        # Its address as the receiver's machine knows it, not only by its own name, which may be 127.0.1.1 to itself.
        host = own_address(hosts[receiver], 2)
        listener = socket.create_server((host, 0))
        return _Source(world.rank, platform.node(), f"{host}:{listener.getsockname()[1]}", token)

    sources, began = _on_all(world, listen), time.monotonic()

    def work(task: _Task) -> None:
        if listener is not None:
            _send(listener, token, folder, timeout)
        elif sender is not None:
            source = sources[sender]
            assert source is not None
            _fetch(source, folder, lock, timeout, task)

    task = _Task(work)
    console = text_console(stderr=True)
    columns = (
        "Sending the partitioned graph",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    shows = world.rank == 0 and console.is_terminal
    try:
        with Progress(*columns, console=console, disable=not shows, transient=True) as progress:
            bar = progress.add_task("", total=None)
            while True:
                looks = _on_all(world, task.look)
                states = [looks[rank] for rank in senders]
                arrived, total = (sum(column) for column in zip(*(state[:2] for state in states)))
                progress.update(bar, completed=arrived, total=total or None)
                if not any(alive for *_, alive in states):
                    break
    finally:
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes a thread that still accepts
            listener.close()
        task.stop()
    seconds = time.monotonic() - began
    rank_zero_info(f"Sent {folder.name} to {len(senders)} machine(s): {arrived:,} bytes in {seconds:.1f} s")


class _Task:
    """What this rank does in a round, in a thread; `arrived` bytes of a `total` so far, and whether it is `over` for all."""

    def __init__(self, work: Callable[[_Task], None]) -> None:
        self.arrived = self.total = 0
        self.over = threading.Event()
        self._work = work
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="partitioned graph travels")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work(self)
        except Exception as error:
            self._failure = error

    def look(self) -> tuple[int, int, bool]:
        """Returns soon: bytes that have arrived, of how many, and whether it goes on; raises what it has raised."""
        self._thread.join(_BEAT_S)
        alive = self._thread.is_alive()  # first: it may fail in between
        if self._failure is not None:
            raise self._failure
        return self.arrived, self.total, alive

    def stop(self) -> None:
        """Ends a transfer that has become useless, with its next bytes."""
        self.over.set()
        self._thread.join(2 * _BEAT_S)


def _on_all(world: World, function: Callable[[], T]) -> list[T]:
    """Returns what a function gives on each rank, in rank order; raises on all where it raises on one."""
    with world.together("The partitioned graph could not be brought to all machines"):
        value = function()
    return world.all_gather_object(value)


def _send(listener: socket.socket, token: bytes, folder: Path, timeout: float) -> None:
    """Sends an entry to the first that shows the token; one that hangs up knows why."""
    listener.settimeout(timeout)
    sent = False
    while not sent:
        with suppress(OSError), listener.accept()[0] as visitor:
            visitor.settimeout(_CONNECT_S)
            shown = bytearray(_TOKEN)
            receive(visitor, memoryview(shown))
            sent = secrets.compare_digest(bytes(shown), token)
            if not sent:
                continue
            visitor.settimeout(timeout)
            manifest = b"".join(_chunks(folder / "manifest.json"))
            visitor.sendall(_LENGTH.pack(len(manifest)) + manifest)
            for name in json.loads(manifest)["files"]:
                for chunk in _chunks(folder / name):
                    visitor.sendall(chunk)
        if listener.fileno() < 0:
            return


def _chunks(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                yield chunk
    except OSError as error:
        raise StoreError(f"{file} cannot be read ({error}), and other machines need it.") from error


def _fetch(
    source: _Source,
    folder: Path,
    lock: Callable[[str], AbstractContextManager[None]],
    timeout: float,
    task: _Task,
) -> None:
    """Writes the entry that `source` sends, unless another process has in the meantime."""
    of = f"of the partitioned graph {folder.name}"
    try:
        connection = connect(source.address, _CONNECT_S)
        connection.sendall(source.token)
    except OSError as error:
        raise StoreError(
            f"{platform.node()} has no copy {of}, and cannot reach {source.host} at {source.address} to fetch one ({error}). Let "
            "the firewall take connections between these machines, or put the store on a file system that all of them see: "
            "GraphDataModule(store=...) or $LIGHTNING_GNN_STORE."
        ) from error
    buffer = memoryview(bytearray(_CHUNK))

    def received(name: str, size: int) -> Iterator[memoryview]:
        """Yields the next bytes, which are those of a file; each piece is overwritten by the next."""
        while size:
            try:
                count = connection.recv_into(buffer[: min(size, _CHUNK)])
                if not count or task.over.is_set():
                    raise ConnectionError("the connection was closed")
            except OSError as error:
                raise StoreError(
                    f"{source.host} stopped sending {name} {of}, {size:,} bytes before its end ({error}). Look at the output of "
                    f"rank {source.rank} there, then run again. Nothing of it was kept on {platform.node()}."
                ) from error
            yield buffer[:count]
            size -= count
            task.arrived += count

    def whole(name: str, size: int) -> bytes:
        return b"".join(map(bytes, received(name, size)))

    def expect(num_bytes: int) -> None:
        task.arrived, task.total = 0, num_bytes

    with connection:
        connection.settimeout(timeout)
        with lock(folder.name):
            if (folder / "manifest.json").exists():
                return
            [length] = _LENGTH.unpack(whole("manifest.json", _LENGTH.size))
            text = whole("manifest.json", min(length, LARGEST_MANIFEST))
            write_copy(folder, text, source.host, received, expect)
