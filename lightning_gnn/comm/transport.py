"""Rows between ranks: shared memory for peers on this machine, the process group for the others."""

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
"""Bytes at whose multiples numbers of any size may lie."""


@dataclass(frozen=True)
class UpTo:
    """Takes a message whose sender decides how long it is.

    Attributes:
        most_bytes: it is not longer.
        accept: takes its bytes, uint8, and may be given more behind them.
    """

    most_bytes: int
    accept: Accept


class Buffers:
    """Memory of an exchange that is used again: new memory costs more than what is written to it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns memory that nobody else has until it is given back."""
        free = self._free[torch.Size(shape), dtype]
        if free:
            return free.pop()
        # An inference tensor could not take part in autograd later, and evaluation may well come first.
        with torch.inference_mode(False):
            return torch.empty(*shape, dtype=dtype, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Has memory used again that :meth:`take` has returned."""
        self._free[buffer.shape, buffer.dtype].append(buffer)


Receive = Tensor | UpTo


@lru_cache(maxsize=4096)
def _some(counts: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Returns the ranks that there are rows for or from, and how many for each."""
    peers = [peer for peer, count in enumerate(counts) if count]
    return peers, [counts[peer] for peer in peers]


def by_peer(rows: Tensor, counts: Sequence[int]) -> list[tuple[int, Tensor]]:
    """Returns the messages that rows in the order of ranks are, so many for or from each, ``[P]``: none without rows."""
    peers, sizes = _some(tuple(counts))
    return list(zip(peers, rows.split(sizes))) if rows.numel() else []


Messages = tuple[
    Sequence[tuple[int, Tensor]],
    Sequence[tuple[int, Receive]],
    Traffic,
    Callable[[Callable[[], None]], Callable[[], None]] | None,
]
"""What to send and to receive, see :meth:`Transport.start_each`; what is counted of it; what makes the function that is waited
for of the one that :meth:`Transport.start_each` returns, if that is another."""


class Transport(ABC):
    """One message to and from every peer, whatever carries it.

    Ranks that exchange anything start to do so in the same order, and may wait for it in any order.

    Attributes:
        approximate: whether rows may travel approximately now: in fewer bytes, or only where they have changed.
        receives_early: whether receiving may start before what must be sent first: NCCL does one thing after the other.
    """

    approximate = False
    receives_early = True

    @abstractmethod
    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns memory for rows that the next :meth:`start_each` sends; waits until those who were sent what lay there before
        have taken it."""

    def lends(self, rows: Tensor) -> bool:
        """Returns whether rows lie in memory of :meth:`scratch` that the next :meth:`start_each` sends."""
        return False

    @abstractmethod
    def start_each(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Receive]]) -> Callable[[], None]:
        """Starts to send rows to peers and to receive rows from them; returns the function that waits.

        Args:
            sends: a rank and contiguous rows for it, not none; the same rows may go to several. Of the last :meth:`scratch`, or
                of none.
            receives: a rank and contiguous memory for its rows, not none; or, on the CPU, what takes a message of bytes.

        Raises:
            PeerError: from the returned function (and from here when a peer has not taken what it was sent before).
        """

    def messages(
        self, out: Tensor, out_counts: Sequence[int], into: Tensor, into_counts: Sequence[int], call: Call, exchange: Any
    ) -> Messages:
        """Returns the messages that rows of an exchange are: one to and from every peer that has some.

        Args:
            out, into: what is sent and what is filled, contiguous, of one dtype, rows in rank order.
            out_counts, into_counts: rows for and from each rank, ``[P]``.
            call: which one of the step.
            exchange: whose rows they are.
        """
        sends = by_peer(out, out_counts)
        return sends, by_peer(into, into_counts), self.traffic(sends), None

    @abstractmethod
    def start_varied(self, sends: Sequence[tuple[int, Tensor]], senders: Sequence[int]) -> Callable[[], dict[int, Tensor]]:
        """Starts to send bytes to peers and to receive, from each of `senders`, as many as it sends.

        Args:
            sends: a rank and bytes for it, uint8.
            senders: ranks that send something here.

        Returns:
            Waits, and returns the bytes by sender.

        Raises:
            PeerError: as :meth:`start_each`.
        """

    def traffic(self, sends: Sequence[tuple[int, Tensor]], num_rows: int | None = None) -> Traffic:
        """Returns what :meth:`start_each` would send now; `num_rows` where that is not how many rows the tensors have."""
        traffic = Traffic(0, len(sends), num_rows or 0, to=(to := dict[int, int]()))
        for peer, rows in sends:
            num_bytes = self.message_bytes(rows)
            to[peer] = to.get(peer, 0) + num_bytes
            traffic.bytes_sent += num_bytes
            traffic.rows += len(rows) if num_rows is None else 0
        return traffic

    def message_bytes(self, rows: Tensor) -> int:
        """Returns how many bytes a message of these rows takes now, or several messages that they are split into by rows."""
        return rows.nbytes

    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        """Returns the bytes of a row of `width` numbers in training, where it may travel approximately."""
        return width * dtype.itemsize

    @contextmanager
    def approximating(self, on: bool = True) -> Iterator[None]:
        """Rows may travel approximately while this is open, or may not; on every rank alike."""
        before, self.approximate = self.approximate, on
        try:
            yield
        finally:
            self.approximate = before

    def take_sums(self) -> tuple[float, ...]:
        """Returns numbers since the last call, whose sums over ranks :meth:`metrics` takes."""
        return ()

    def metrics(self, sums: Tensor) -> dict[str, Tensor]:
        """Returns by name what is logged of such sums."""
        return {}


class TransportWrapper(Transport):
    """A transport over another one, which has what this one does not.

    Args:
        transport: what carries the bytes.
    """

    def __init__(self, transport: Any) -> None:
        self._transport, self.receives_early = transport, transport.receives_early

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @staticmethod
    def warm_up(dtype: torch.dtype) -> None:
        """Runs the loops of the wrapper once, on rows of this dtype, so that they are compiled."""

    # The other one's own, without a frame in between.

    @property
    def scratch(self) -> Any:
        return self._transport.scratch

    @property
    def lends(self) -> Any:
        return self._transport.lends

    @property
    def start_each(self) -> Any:
        return self._transport.start_each

    @property
    def start_varied(self) -> Any:
        return self._transport.start_varied


class ProcessTransport(Transport):
    """Sends one message to, and receives one from, every peer that there is something for.

    Args:
        size: number of ranks.
        group: process group for peers on other machines, and for tensors of devices.
        memory: mailboxes of this machine's ranks, or None.
        watch: keeps the deadline of waits, and marks messages by the operation that they belong to.
        device: of what is sent and received.
        hosts: carries tensors of the CPU where `group` does not; None where it does.
    """

    def __init__(
        self,
        size: int,
        group: Any,
        memory: SharedMemory | None,
        watch: Watchdog,
        device: torch.device,
        hosts: ProcessTransport | None = None,
    ) -> None:
        self.device, self._hosts = device, hosts or self
        self._group, self._memory, self.watch = group, memory, watch
        self.waited_s = 0.0
        """Seconds that this rank has waited for messages from other machines until now, and for what it sent there."""
        self._local = set(memory.peers) if memory is not None else set()
        self.all_local = len(self._local) == size - 1
        self._queued = dist.get_backend(group) != "gloo"
        self.receives_early = not self._queued

    def close(self) -> None:
        """Gives up the process group."""
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
        memory, mark, remote = self._memory, self.watch.mark(), list[dist.P2POp]()  # NCCL knows no such marks
        varied: list[tuple[UpTo, Tensor]] = []
        expected: list[tuple[int, int]] = []
        for peer, rows in receives:
            if memory is not None and peer in self._local:
                accept = rows.accept if isinstance(rows, UpTo) else as_bytes(rows).copy_
                expected.append(memory.expect(peer, mark, accept))
                continue
            if isinstance(rows, UpTo):  # gloo fills as much of the memory as there is
                varied.append((rows, torch.empty(rows.most_bytes, dtype=torch.uint8)))
                rows = varied[-1][1]
            remote.append(dist.P2POp(dist.irecv, as_bytes(rows), peer, self._group, mark))
        local: list[tuple[int, Tensor]] = []
        for peer, rows in sends:
            if peer in self._local:
                local.append((peer, rows))
            else:
                remote.append(dist.P2POp(dist.isend, as_bytes(rows), peer, self._group, mark))
        works, requests = list[Any](), list[_Request]()
        if remote:
            works = self._start(remote)
            requests = [_Request(work, op.peer, self) for work, op in zip(works, remote)]
        if memory is not None and remote:
            leaving = [request for request, op in zip(requests, remote) if op.op is dist.isend]
            memory.leaving = [request for request in memory.leaving if not request.done] + leaving
        # All is expected before anything is posted: the peer may do the same, and each must be able to take the other's.
        if memory is not None and local:
            memory.post(local, mark)

        def wait() -> None:
            if memory is not None:
                memory.receive_all(expected)
            if self._queued:
                for work in works:
                    work.wait()  # orders the streams; NCCL's own watchdog keeps the deadline
                return
            for request in requests:
                request.wait()
            for rows, data in varied:
                rows.accept(data)

        return wait

    def _start(self, messages: list[dist.P2POp]) -> list[Any]:
        if self._queued:
            return dist.batch_isend_irecv(messages)
        works = []
        for each in messages:
            try:
                works += dist.batch_isend_irecv([each])
            except RuntimeError as error:  # the peer has closed the connection before this rank came to it
                raise PeerError(each.peer, f"nothing to or from rank {each.peer} ({error})") from error
        return works

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
        lengths = {peer: torch.tensor([data.numel()]) for peer, data in remote}  # of the CPU, which must know them
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
        """Whether all ranks can map each other's memory: what :meth:`show` needs."""
        return self._memory is not None and self.all_local

    def show(self, block: Tensor | None, readers: Sequence[int], looks: Mapping[int, Accept]) -> Callable[[], None]:
        """Lets each of `readers` look at all of `block`, and looks at the blocks that peers show; returns what waits for these.

        Args:
            block: the last :meth:`scratch`, which stays until all have looked; None if there are no readers.
            readers: ranks that expect it.
            looks: by peer, takes the bytes of its block.
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
    """A message of gloo that is waited for once, whoever asks first."""

    def __init__(self, work: Any, peer: int, transport: ProcessTransport) -> None:
        self._work, self._peer, self._transport = work, peer, transport
        self.done = False

    def wait(self) -> None:
        """Waits for its end; raises :class:`PeerError` where there is none in time."""
        if self.done:
            return
        self.done, began = True, time.perf_counter()
        watch = self._transport.watch
        try:
            with watch.waiting(self._peer):
                self._work.wait(timedelta(seconds=watch.deadline_s))
        except RuntimeError as error:
            waited = time.perf_counter() - began
            reason = f"nothing to or from rank {self._peer} for {waited:.1f} s ({error})"
            raise PeerError(self._peer, reason, astray=waited >= watch.deadline_s) from error
        self._transport.waited_s += time.perf_counter() - began
