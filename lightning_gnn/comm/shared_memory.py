"""Messages between ranks of one machine through shared memory.

On a 2-core machine, a message over loopback sockets between two busy ranks costs one or two milliseconds, mostly for waking
threads. Through mapped memory with a short spin, it costs a hundredth of this. DGCL (section 6.1) also selects its transport by
the pair of devices.

Memory is anonymous (memfd), and peers open it through the owner's process, so nothing remains however a rank ends. The protocol
relies on the memory order of x86-64: data is visible before the number that announces it.
"""

from __future__ import annotations

import mmap
import os
import platform
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.comm.processes import exit_status
from lightning_gnn.comm.watchdog import PeerError, Watchdog

_SPINS = 200  # about 20 us: the usual skew between synchronized ranks
_YIELD_S = 2e-3  # then yield the core at every check, and after this time sleep between checks
_SLEEP_S = 5e-5
_LIVENESS_S = 0.2  # interval at which a waiting rank checks that its peer runs

# Columns of a control table's row for one peer.
_POSTED, _BUFFER, _GENERATION, _FD, _OFFSET, _BYTES, _MARK, _TAKEN, _CLOSED = range(9)


Accept = Callable[[Tensor], Any]
"""Function that takes the bytes of a message, uint8 ``[B]``, which are valid until it returns."""


def machine_key() -> str | None:
    """Returns a key that is equal exactly for processes that can map each other's memory; None if unsupported."""
    if not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"
    except OSError:
        return None


def as_bytes(rows: Tensor) -> Tensor:
    """Returns contiguous rows as uint8 ``[B]``."""
    return rows.detach().view(-1).view(torch.uint8)


class Segment:
    """Memory that this process owns or has mapped from a peer."""

    def __init__(self, fd: int, size: int, owned: bool) -> None:
        self.fd, self.size, self._owned = fd, size, owned
        self._map = mmap.mmap(fd, size)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        if not owned:
            os.close(fd)

    @classmethod
    def create(cls, size: int) -> Segment:
        fd = os.memfd_create("lightning_gnn")
        os.ftruncate(fd, size)
        return cls(fd, size, owned=True)

    @classmethod
    def open(cls, pid: int, fd: int) -> Segment:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        return cls(opened, os.fstat(opened).st_size, owned=False)

    def close(self) -> None:
        # The mapping ends with the last tensor over it.
        if self._owned:
            os.close(self.fd)
            self._owned = False


class _Outbox:
    """One of a rank's two send buffers."""

    def __init__(self) -> None:
        self.segment: Segment | None = None
        self.first = 0  # address of the segment
        self.generation = 0
        self.waits_for: dict[int, int] = {}  # peer -> number of its last message in this buffer


class SharedMemory:
    """Mailboxes between this rank and the other ranks of the machine.

    Args:
        rank: this process's rank.
        exchange_objects: function that all-gathers a picklable object over all ranks; used by the constructor only.
        watch: watchdog with the deadline after which a wait raises :class:`PeerError`.

    Attributes:
        peers: reachable ranks in ascending order.
        waited_s: seconds that this rank has waited for other ranks so far.
        leaving: messages to other machines that may still read the send buffers.

    Data is written to or copied to a send buffer (:meth:`scratch`), posted, and copied by the receiver. A send buffer is reused
    after its receivers have acknowledged it. A rank registers receives (:meth:`expect`) before messages arrive, in the order in
    which the peer posts, and may wait for them in any order. During any wait, it accepts all registered messages that have
    arrived. Any number of messages may therefore be in progress, although a mailbox holds one.
    """

    def __init__(self, rank: int, exchange_objects: Callable[[Any], list[Any]], watch: Watchdog) -> None:
        self.rank, self._watch = rank, watch
        self.waited_s, self.leaving = 0.0, list[Any]()
        key = machine_key()
        size = 0
        self._control: Segment | None = None
        if key is not None:
            self._control = Segment.create(1 << 16)
            size = self._control.size
        everyone = exchange_objects((key, os.getpid(), self._control.fd if self._control else -1))
        self._pids = {r: pid for r, (other, pid, _) in enumerate(everyone) if key is not None and other == key and r != rank}
        self._tables: dict[int, np.ndarray] = {}
        width = _CLOSED + 1
        if len(everyone) * width * 8 > size:
            self._pids = {}
        try:
            segments = {peer: Segment.open(pid, everyone[peer][2]) for peer, pid in self._pids.items()}
        except OSError:  # a hardened system: processes may not open each other's memory
            segments = {}
        # All or none: two ranks must use the same transport.
        agreed = all(exchange_objects(len(segments) == len(self._pids)))
        self.peers = sorted(segments) if agreed else []
        if self._control is not None and self.peers:
            for r, segment in {rank: self._control, **segments}.items():
                table = segment.bytes[: len(everyone) * width * 8].view(torch.int64).view(len(everyone), width)
                self._tables[r] = table.numpy()
        self._num_sent = dict.fromkeys(self.peers, 0)
        self._num_received = dict.fromkeys(self.peers, 0)
        self._expected: dict[int, deque[tuple[int, Accept]]] = {peer: deque() for peer in self.peers}
        self._outboxes = (_Outbox(), _Outbox())
        self._current = 0
        self._maps: dict[tuple[int, int], tuple[int, Segment]] = {}

    def scratch(self, num_bytes: int, operation: str = "") -> Tensor:
        """Returns a send buffer, uint8 ``[num_bytes]``; posting its messages switches to the other buffer.

        Waits until receivers have taken the buffer's earlier messages; as a separate `operation`, if a name is given.
        """
        box, is_taken = self._outboxes[self._current], not self.leaving
        for peer, number in box.waits_for.items():  # not `_has_taken`: this runs for every message
            is_taken &= bool(self._tables[peer][self.rank, _TAKEN] >= number)
        if not is_taken:
            with self._watch.during(operation) if operation else nullcontext():
                for request in self.leaving:
                    request.wait()
                self.leaving = []
                for peer, number in box.waits_for.items():
                    self._wait(peer, number, self._has_taken)
        box.waits_for = {}
        if box.segment is None or box.segment.size < num_bytes:
            if box.segment is not None:
                box.segment.close()
            box.segment = self._new_segment(max(1 << 16, 1 << (num_bytes - 1).bit_length()))
            box.first, box.generation = box.segment.bytes.data_ptr(), box.generation + 1
        return box.segment.bytes[:num_bytes]

    def _new_segment(self, size: int) -> Segment:
        return Segment.create(size)

    def lends(self, rows: Tensor) -> bool:
        """Returns whether non-empty rows are in the current send buffer."""
        box = self._outboxes[self._current]
        return box.segment is not None and 0 <= rows.data_ptr() - box.first < box.segment.size

    def post(self, messages: Sequence[tuple[int, Tensor]], mark: int) -> None:
        """Announce contiguous rows to peers, and switch to the other send buffer.

        All rows are in the current send buffer, or all are copied to it, once each.

        Args:
            messages: non-empty list of peers and rows.
            mark: number of the operation; the receiver expects the same number.
        """
        box = self._outboxes[self._current]
        if box.segment is None or not 0 <= messages[0][1].data_ptr() - box.first < box.segment.size:
            messages = self._copy_messages(messages)
        assert box.segment is not None
        for peer, rows in messages:
            offset = rows.data_ptr() - box.first if rows.nbytes else 0
            assert 0 <= offset < box.segment.size, "rows of scratch memory and others in one call"
            # The receiver of the previous message has yet to read its fields.
            if self._tables[peer][self.rank, _TAKEN] < self._num_sent[peer]:
                self._wait(peer, self._num_sent[peer], self._has_taken)
            self._num_sent[peer] += 1
            row = self._tables[self.rank][peer]
            row[_BUFFER : _MARK + 1] = (self._current, box.generation, box.segment.fd, offset, rows.nbytes, mark)
            row[_POSTED] = self._num_sent[peer]
            box.waits_for[peer] = self._num_sent[peer]
        self._current = 1 - self._current

    def _copy_messages(self, messages: Sequence[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        """Returns the messages with their rows in the send buffer."""
        peers, tensors = zip(*messages)
        distinct = dict(zip(map(id, tensors), tensors))
        sizes = list(map(attrgetter("nbytes"), distinct.values()))
        copies = dict(zip(distinct, self.scratch(sum(sizes)).split(sizes)))
        for key, rows in distinct.items():
            copies[key].copy_(as_bytes(rows))
        return list(zip(peers, map(copies.__getitem__, map(id, tensors))))

    def expect(self, peer: int, mark: int, accept: Accept) -> tuple[int, int]:
        """Register a receiver for the next unclaimed message of `peer`.

        Args:
            peer: rank of the sender.
            mark: number of the operation.
            accept: function that takes the bytes, uint8, which are valid until it returns.

        Returns:
            Peer and number of the message, for :meth:`receive_all`.
        """
        self._expected[peer].append((mark, accept))
        return peer, self._num_received[peer] + len(self._expected[peer])

    def receive_all(self, expected: Sequence[tuple[int, int]]) -> None:
        """Wait until registered messages, given by peer and number, have been accepted.

        Raises:
            PeerError: a message has not arrived in time, or belongs to another operation.
        """
        for peer, number in expected:
            while self._num_received[peer] < number:
                self._wait(peer, number, self._has_come)
                if self._num_received[peer] < number and not self._accept(peer):
                    self._watch.peer = peer
                    raise PeerError(peer, f"what rank {peer} has sent belongs to another operation", astray=True)

    def _accept(self, peer: int) -> bool:
        """Accept the message in a peer's mailbox; returns whether it is the expected message."""
        mark, accept = self._expected[peer][0]
        buffer, generation, fd, offset, num_bytes, marked = self._tables[peer][self.rank][_BUFFER : _MARK + 1].tolist()
        if marked != mark:
            return False
        known = self._maps.get((peer, buffer))
        if known is None or known[0] != generation:
            try:
                known = (generation, Segment.open(self._pids[peer], fd))
            except OSError as error:  # after the peer has announced the message
                raise PeerError(peer, f"rank {peer} has ended") from error
            self._maps[peer, buffer] = known
        accept(known[1].bytes[offset : offset + num_bytes])
        self._expected[peer].popleft()
        self._num_received[peer] += 1
        self._tables[self.rank][peer, _TAKEN] = self._num_received[peer]
        return True

    def _has_posted(self, peer: int) -> bool:
        """Returns whether a peer's mailbox has a message that was not accepted."""
        return bool(self._tables[peer][self.rank, _POSTED] > self._num_received[peer])

    def _take_in(self) -> None:
        """Accept the registered messages that have arrived, during any wait."""
        for sender, expected in self._expected.items():
            if expected and self._has_posted(sender):
                self._accept(sender)

    def _has_come(self, peer: int, number: int) -> bool:
        """Returns whether a message of a peer was accepted, or the next message can be."""
        return self._num_received[peer] >= number or self._has_posted(peer)

    def _wait(self, peer: int, number: int, ready: Callable[[int, int], bool]) -> None:
        """Wait until a message is `ready`; see :meth:`_take_in`."""
        for _ in range(_SPINS):
            if ready(peer, number):
                return
        began = looked = time.perf_counter()
        with self._watch.waiting(peer):
            while not ready(peer, number):
                self._take_in()
                now = time.perf_counter()
                if now - began < _YIELD_S:
                    os.sched_yield()
                else:
                    time.sleep(_SLEEP_S)
                if now - looked > _LIVENESS_S:
                    looked = now
                    # Check once more after the peer has ended: the message may be its last.
                    if self._is_gone(peer) and not ready(peer, number):
                        raise PeerError(peer, f"rank {peer} has ended")
                    self._watch.check_ranks()
                    if self._watch.alarm or now - began > self._watch.deadline_s:
                        raise PeerError(peer, f"nothing from rank {peer} for {now - began:.1f} s", astray=True)
        self.waited_s += time.perf_counter() - began

    def _has_taken(self, peer: int, number: int) -> bool:
        """Returns whether a peer has accepted this rank's message `number`."""
        return bool(self._tables[peer][self.rank, _TAKEN] >= number)

    def _is_gone(self, peer: int) -> bool:
        return bool(self._tables[peer][self.rank, _CLOSED]) or exit_status(self._pids[peer]) is not None

    def close(self) -> None:
        """Announce the end to peers; without an alarm, wait briefly for messages that peers have not taken yet."""
        if self._control is None:
            return
        deadline = time.perf_counter() + (0.0 if self._watch.alarm else min(5.0, self._watch.deadline_s))
        for box in self._outboxes:
            for peer, number in box.waits_for.items():
                while not self._has_taken(peer, number) and time.perf_counter() < deadline:
                    if self._is_gone(peer):
                        break
                    time.sleep(_SLEEP_S)
            if box.segment is not None:
                box.segment.close()
        for peer in self.peers:
            self._tables[self.rank][peer, _CLOSED] = 1
        self._maps, self._tables = {}, {}
        self._control.close()
        self._control = None
