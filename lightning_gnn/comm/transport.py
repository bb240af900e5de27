"""Transport of rows between ranks: shared memory for peers on this machine, the process group for other peers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from math import prod
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.shared_memory import Accept, SharedMemory, as_bytes
from lightning_gnn.comm.traffic import Traffic
from lightning_gnn.comm.watchdog import PeerError, Watchdog

ALIGNED = 16
"""Alignment in bytes for all dtypes."""


@dataclass(frozen=True)
class UpTo:
    """Receive of a variable-length message; the sender determines the length.

    Attributes:
        most_bytes: maximum length in bytes.
        accept: function that takes the bytes, uint8, possibly with further bytes behind them.
    """

    most_bytes: int
    accept: Accept


class Buffers:
    """Pool of receive buffers: allocation costs more than filling a buffer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a buffer from the pool; return it with :meth:`give_back`."""
        free = self._free[torch.Size(shape), dtype]
        if free:
            return free.pop()
        # An inference tensor could not take part in autograd later, and evaluation may come first.
        with torch.inference_mode(False):
            return torch.empty(*shape, dtype=dtype, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer of :meth:`take` to the pool."""
        self._free[buffer.shape, buffer.dtype].append(buffer)


Receive = Tensor | UpTo


@lru_cache(maxsize=4096)
def _nonzero_counts(counts: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Returns the ranks with nonzero counts, and their counts."""
    peers = [peer for peer, count in enumerate(counts) if count]
    return peers, [counts[peer] for peer in peers]


def by_peer(rows: Tensor, counts: Sequence[int]) -> list[tuple[int, Tensor]]:
    """Returns the messages of rows in rank order, with `counts` rows per rank, ``[P]``; none for empty rows."""
    peers, sizes = _nonzero_counts(tuple(counts))
    return list(zip(peers, rows.split(sizes))) if rows.numel() else []


Messages = tuple[
    Sequence[tuple[int, Tensor]],
    Sequence[tuple[int, Receive]],
    Traffic,
    Callable[[Callable[[], None]], Callable[[], None]] | None,
]
"""Sends and receives, see :meth:`Transport.start_each`; their traffic; and optionally a function that wraps the wait function of
:meth:`Transport.start_each`.
"""


class Transport(ABC):
    """Interface of point-to-point messages: one message to and from every peer.

    Ranks start their exchanges in the same order, and may wait for them in any order.

    Attributes:
        approximate: whether rows may be sent approximately now: in fewer bytes, or only changed rows.
        receives_early: whether a receive may start before an earlier send. NCCL runs operations in order.
    """

    approximate = False
    receives_early = True

    @abstractmethod
    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a send buffer for the next :meth:`start_each`; waits until its earlier messages have been received."""

    def lends(self, rows: Tensor) -> bool:
        """Returns whether rows are in the send buffer of :meth:`scratch` for the next :meth:`start_each`."""
        return False

    @abstractmethod
    def start_each(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Receive]]) -> Callable[[], None]:
        """Starts to send rows to peers and to receive rows from peers; returns a function that waits.

        Args:
            sends: ranks and contiguous, non-empty rows for them; several ranks may get the same rows. Either all rows or none are
                in the last :meth:`scratch` buffer.
            receives: ranks and contiguous, non-empty receive buffers; or, on the CPU, an :class:`UpTo` for a message of bytes.

        Raises:
            PeerError: from the returned function; also from this call if a peer has not received earlier messages.
        """

    def messages(
        self, out: Tensor, out_counts: Sequence[int], into: Tensor, into_counts: Sequence[int], call: Call, exchange: Any
    ) -> Messages:
        """Returns the messages of an exchange: one to and from every peer with rows.

        Args:
            out: send buffer, contiguous, rows in rank order.
            out_counts: rows for each rank, ``[P]``.
            into: receive buffer, contiguous, of the dtype of `out`, rows in rank order.
            into_counts: rows from each rank, ``[P]``.
            call: identifier of the exchange.
            exchange: exchange that sends the rows.
        """
        sends = by_peer(out, out_counts)
        return sends, by_peer(into, into_counts), self.traffic(sends), None

    @abstractmethod
    def start_varied(self, sends: Sequence[tuple[int, Tensor]], senders: Sequence[int]) -> Callable[[], dict[int, Tensor]]:
        """Starts to exchange bytes with peers; returns a function that waits for the bytes of `senders`, of any length.

        Args:
            sends: ranks and bytes for them, uint8.
            senders: ranks that send to this rank.

        Returns:
            Function that waits and returns the bytes by sender.

        Raises:
            PeerError: see :meth:`start_each`.
        """

    def traffic(self, sends: Sequence[tuple[int, Tensor]], num_rows: int | None = None) -> Traffic:
        """Returns the traffic of a :meth:`start_each` now; `num_rows` overrides the row count of the tensors."""
        traffic = Traffic(0, len(sends), num_rows or 0, to=(to := dict[int, int]()))
        for peer, rows in sends:
            num_bytes = self.message_bytes(rows)
            to[peer] = to.get(peer, 0) + num_bytes
            traffic.bytes_sent += num_bytes
            traffic.rows += len(rows) if num_rows is None else 0
        return traffic

    message_bytes: Any = attrgetter("nbytes")
    """Function that returns the bytes of a message of rows now, also if it is split into several messages by rows."""

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Returns the bytes that a row of `width` numbers takes in a training message; codecs return fewer."""
        return width * dtype.itemsize

    @contextmanager
    def approximating(self, on: bool = True) -> Iterator[None]:
        """Context manager that allows or forbids a codec to encode rows; all ranks use the same value."""
        before, self.approximate = self.approximate, on
        try:
            yield
        finally:
            self.approximate = before

    def take_sums(self) -> tuple[float, ...]:
        """Returns counters since the last call; :meth:`metrics` takes their sums over ranks."""
        return ()

    def metrics(self, sums: Tensor) -> dict[str, Tensor]:
        """Returns the logged metrics of such sums by name."""
        return {}


class TransportWrapper(Transport):
    """Transport over another transport; attributes that it lacks come from the other.

    Args:
        transport: transport that sends the bytes.
    """

    def __init__(self, transport: Any) -> None:
        self._transport, self.receives_early = transport, transport.receives_early

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @staticmethod
    def warm_up(dtype: torch.dtype) -> None:
        """Run the loops of the wrapper once, on rows of this dtype, so that they are compiled."""

    # Methods of the wrapped transport, without a frame in between.

    scratch: Any = property(attrgetter("_transport.scratch"))
    lends: Any = property(attrgetter("_transport.lends"))
    start_each: Any = property(attrgetter("_transport.start_each"))
    start_varied: Any = property(attrgetter("_transport.start_varied"))


class ProcessTransport(Transport):
    """Transport that sends at most one message to, and receives at most one from, every peer.

    Args:
        size: number of ranks.
        group: process group for peers on other machines, and for tensors on devices.
        memory: mailboxes of this machine's ranks, or None.
        watch: watchdog with the deadline of waits, and with the mark of each message's operation.
        device: device of sent and received tensors.
        hosts: transport for CPU tensors, if `group` does not support them; else None.
        rank: this rank.
    """

    def __init__(
        self,
        size: int,
        group: Any,
        memory: SharedMemory | None,
        watch: Watchdog,
        device: torch.device,
        hosts: ProcessTransport | None = None,
        rank: int = 0,
    ) -> None:
        self.rank = rank
        self.device, self._hosts = device, hosts or self
        self._group, self._memory, self.watch = group, memory, watch
        self.waited_s = 0.0
        """Seconds that this rank has waited so far for messages from and to other machines."""
        self._local = set(memory.peers) if memory is not None else set()
        self.all_local = len(self._local) == size - 1
        self._queued = dist.get_backend(group) != "gloo"
        self.receives_early = not self._queued

    def is_local(self, rank: int) -> bool:
        """Returns whether a rank is on this machine and shares memory."""
        return rank == self.rank or rank in self._local

    def close(self) -> None:
        """Release the process group."""
        if self._hosts is not self:
            self._hosts.close()
        self._group = None
        if self._memory is not None:
            self._memory.leaving = []

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = dtype.itemsize * prod(shape)
        if self._memory is None or not self._local or count == 0:
            with torch.inference_mode(False):
                return torch.empty(*shape, dtype=dtype, device=self.device)
        memory = self._memory.scratch(count, "Waiting until what was sent before has been taken")
        return memory.view(dtype).view(*shape)

    @override
    def lends(self, rows: Tensor) -> bool:
        return self._memory is not None and self._memory.lends(rows)

    @override
    def start_each(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Receive]]) -> Callable[[], None]:
        memory, mark, remote = self._memory, self.watch.mark(), list[dist.P2POp]()  # NCCL ignores marks
        varied: list[tuple[UpTo, Tensor]] = []
        expected: list[tuple[int, int]] = []
        for peer, rows in receives:
            if memory is not None and peer in self._local:
                accept = rows.accept if isinstance(rows, UpTo) else rows.detach().view(-1).view(torch.uint8).copy_
                expected.append(memory.expect(peer, mark, accept))
                continue
            if isinstance(rows, UpTo):  # gloo fills only a part of the buffer
                varied.append((rows, torch.empty(rows.most_bytes, dtype=torch.uint8)))
                rows = varied[-1][1]
            remote.append(dist.P2POp(dist.irecv, as_bytes(rows), peer, self._group, mark))
        local: list[tuple[int, Tensor]] = []
        for peer, rows in sends:
            if peer in self._local:
                local.append((peer, rows))
            else:
                remote.append(dist.P2POp(dist.isend, as_bytes(rows), peer, self._group, mark))
        works = dist.batch_isend_irecv(remote) if remote and self._queued else []
        requests = list[_Request]()
        for each in [] if self._queued else remote:
            try:
                [work] = dist.batch_isend_irecv([each])
            except RuntimeError as error:  # the peer has closed the connection earlier
                raise PeerError(each.peer, f"nothing to or from rank {each.peer} ({error})") from error
            requests.append(_Request(work, each.peer, self))
        if memory is not None and remote:
            leaving = [request for request, op in zip(requests, remote) if op.op is dist.isend]
            memory.leaving = [request for request in memory.leaving if not request.is_done] + leaving
        # All receives are registered before a message is posted: the peer may do the same, and each must accept the other's.
        if memory is not None and local:
            memory.post(local, mark)
        if memory is not None and not remote:
            return partial(memory.receive_all, expected)

        def wait() -> None:
            if memory is not None:
                memory.receive_all(expected)
            if self._queued:
                for work in works:
                    work.wait()  # orders the streams; NCCL's own watchdog enforces the deadline
                return
            for request in requests:
                request.wait()
            for rows, data in varied:
                rows.accept(data)

        return wait

    @override
    def start_varied(self, sends: Sequence[tuple[int, Tensor]], senders: Sequence[int]) -> Callable[[], dict[int, Tensor]]:
        local = [(peer, data) for peer, data in sends if peer in self._local]
        remote = [(peer, data) for peer, data in sends if peer not in self._local]
        from_afar = [peer for peer in senders if peer not in self._local]
        arrived: dict[int, Tensor] = {}

        def keep(peer: int) -> Accept:
            return lambda data: arrived.update({peer: data.clone()})

        memory, mark = self._memory, self.watch.mark()
        expected = [] if memory is None else [memory.expect(peer, mark, keep(peer)) for peer in memory.peers if peer in senders]
        lengths = {peer: torch.tensor([data.numel()]) for peer, data in remote}  # on the CPU, which needs them
        into = {peer: torch.empty(1, dtype=torch.int64) for peer in from_afar}
        wait_lengths = self._hosts.start_each([*lengths.items()], [*into.items()])
        filled = [(peer, data) for peer, data in remote if data.numel()]
        early = self.start_each([*local, *filled], []) if self.receives_early else None

        def wait() -> dict[int, Tensor]:
            if memory is not None:
                memory.receive_all(expected)
            wait_lengths()
            for peer in from_afar:
                arrived[peer] = torch.empty(int(into[peer]), dtype=torch.uint8, device=self.device)
            receives = [(peer, arrived[peer]) for peer in from_afar if arrived[peer].numel()]
            late = [] if self.receives_early else [*local, *filled]
            self.start_each(late, receives)()
            if early is not None:
                early()
            return arrived

        return wait

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks can map each other's memory, as :meth:`show` requires."""
        return self._memory is not None and self.all_local

    def show(self, block: Tensor | None, readers: Sequence[int], looks: Mapping[int, Accept]) -> Callable[[], None]:
        """Starts to share a block with readers, without copies; returns a function that waits for the blocks of peers.

        Args:
            block: last :meth:`scratch` buffer, not reused before all readers have read it; None without readers.
            readers: ranks that expect the block.
            looks: functions that take the bytes of a block, by peer.
        """
        memory, mark = self._memory, self.watch.mark()
        assert memory is not None
        expected = [memory.expect(peer, mark, look) for peer, look in looks.items()]
        if block is not None:
            memory.post([(peer, block) for peer in readers], mark)
        return partial(memory.receive_all, expected)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks in rank order; all ranks are on this machine."""
        memory = self._memory
        assert memory is not None and self.all_local
        parts = {peer: torch.empty_like(tensor, memory_format=torch.contiguous_format) for peer in memory.peers}
        mark, rows = self.watch.mark(), tensor.contiguous()
        expected = [memory.expect(peer, mark, as_bytes(part).copy_) for peer, part in parts.items()]
        memory.post([(peer, rows) for peer in memory.peers], mark)
        memory.receive_all(expected)
        parts[memory.rank] = tensor
        return [parts[rank] for rank in sorted(parts)]


class _Request:
    """Gloo message that is waited for once, by the first caller."""

    def __init__(self, work: Any, peer: int, transport: ProcessTransport) -> None:
        self._work, self._peer, self._transport = work, peer, transport
        self.is_done = False

    def wait(self) -> None:
        """Wait for completion; raises :class:`PeerError` after the deadline."""
        if self.is_done:
            return
        self.is_done, began = True, time.perf_counter()
        watch = self._transport.watch
        try:
            watch.peer = self._peer
            self._work.wait(timedelta(seconds=watch.deadline_s))
            watch.peer = None
        except RuntimeError as error:
            waited = time.perf_counter() - began
            reason = f"nothing to or from rank {self._peer} for {waited:.1f} s ({error})"
            raise PeerError(self._peer, reason, astray=waited >= watch.deadline_s) from error
        self._transport.waited_s += time.perf_counter() - began
