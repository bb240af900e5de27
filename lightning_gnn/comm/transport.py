"""Rows between ranks: shared memory for peers on this machine, the process group for the others."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.shared_memory import Accept, PeerError, SharedMemory
from lightning_gnn.comm.traffic import Traffic
from lightning_gnn.comm.watchdog import Watchdog

ALIGNED = 16
"""Bytes at whose multiples numbers of any size may lie."""


@dataclass(frozen=True)
class Scratch:
    """Rows in memory that a transport has lent for them, and sends from without a copy.

    Attributes:
        rows: contiguous.
        offset: where they begin in that memory, in bytes.
    """

    rows: Tensor
    offset: int = 0

    def split(self, counts: Sequence[int]) -> list[Scratch]:
        """Returns its rows in parts of so many each."""
        parts = self.rows.split(list(counts))
        ends = accumulate((part.nbytes for part in parts), initial=self.offset)
        return [Scratch(part, offset) for part, offset in zip(parts, ends)]


Rows = Tensor | Scratch


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


def rows_of(rows: Rows) -> Tensor:
    """Returns rows wherever they lie."""
    return rows.rows if isinstance(rows, Scratch) else rows


def by_peer(rows: Rows, counts: Sequence[int]) -> list[tuple[int, Any]]:
    """Returns the messages that rows in the order of ranks are, so many for or from each, ``[P]``: none without rows."""
    return [(peer, part) for peer, part in enumerate(rows.split(list(counts))) if rows_of(part).numel()]


Messages = tuple[
    Sequence[tuple[int, Rows]],
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
    def scratch(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Rows:
        """Returns memory for rows that the next :meth:`start_each` sends."""

    @abstractmethod
    def start_each(self, sends: Sequence[tuple[int, Rows]], receives: Sequence[tuple[int, Receive]]) -> Callable[[], None]:
        """Starts to send rows to peers and to receive rows from them; returns the function that waits.

        Args:
            sends: a rank and contiguous rows for it, not none; the same rows may go to several. Of the last :meth:`scratch`, or
                of none.
            receives: a rank and contiguous memory for its rows, not none; or, on the CPU, what takes a message of bytes.

        Raises:
            PeerError: from the returned function (and from here when a peer has not taken what it was sent before).
        """

    def messages(
        self, out: Rows, out_counts: Sequence[int], into: Tensor, into_counts: Sequence[int], call: Call, exchange: Any
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

    def traffic(self, sends: Sequence[tuple[int, Rows]]) -> Traffic:
        """Returns what :meth:`start_each` would send now."""
        sent = ((peer, self.message_bytes(rows)) for peer, rows in sends)
        return Traffic.of(sent, sum(len(rows_of(rows)) for _, rows in sends))

    def message_bytes(self, rows: Rows) -> int:
        """Returns how many bytes a message of these rows takes now, or several messages that they are split into by rows."""
        return rows_of(rows).nbytes

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
        self._device, self._hosts = device, hosts or self
        self._group, self._memory, self.watch = group, memory, watch
        self.waited_s = 0.0
        """Seconds that this rank has waited for messages from other machines until now, and for what it sent there."""
        self._local = set(memory.peers) if memory is not None else set()
        self.all_local = len(self._local) == size - 1
        self._queued = dist.get_backend(group) != "gloo"
        self.receives_early = not self._queued
        self._leaving: list[_Request] = []  # sends that may not be done

    def close(self) -> None:
        """Gives up the process group."""
        if self._hosts is not self:
            self._hosts.close()
        self._group, self._leaving = None, []

    def scratch(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Rows:
        """Returns memory for rows that the next :meth:`start_each` sends, so that no copy is needed on the way."""
        count = dtype.itemsize * prod(shape)
        if self._memory is None or not self._local or count == 0:
            with torch.inference_mode(False):
                return torch.empty(*shape, dtype=dtype, device=device)
        return Scratch(self._free_scratch(count).view(dtype).view(*shape))

    @override
    def start_each(self, sends: Sequence[tuple[int, Rows]], receives: Sequence[tuple[int, Receive]]) -> Callable[[], None]:
        into: list[tuple[int, Tensor]] = []  # what gloo or NCCL fill
        accepts: list[tuple[int, Accept]] = []  # by peers whose memory is mapped
        varied: list[tuple[UpTo, Tensor]] = []
        for peer, rows in receives:
            if peer in self._local:
                accepts.append((peer, rows.accept if isinstance(rows, UpTo) else _as_bytes(rows).copy_))
            elif isinstance(rows, UpTo):  # gloo fills as much of the memory as there is
                varied.append((rows, torch.empty(rows.most_bytes, dtype=torch.uint8)))
                into.append((peer, varied[-1][1]))
            else:
                into.append((peer, _as_bytes(rows)))
        mark = self.watch.mark()
        remote = [
            dist.P2POp(kind, rows, peer, self._group, mark)  # NCCL knows no such tags
            for kind, messages in (
                (dist.irecv, into),
                (dist.isend, [(peer, _as_bytes(rows_of(rows))) for peer, rows in sends]),
            )
            for peer, rows in messages
            if peer not in self._local
        ]
        works: list[Any] = self._start(remote) if remote else []
        requests = [_Request(work, op.peer, self) for work, op in zip(works, remote)]
        if self._memory is not None:
            self._leaving = [request for request in self._leaving if not request.done]
            self._leaving += [request for request, op in zip(requests, remote) if op.op is dist.isend]
        # Expected before anything is posted: the peer may do the same, and each must be able to take the other's.
        expected = [(peer, self._expect(peer, accept)) for peer, accept in accepts]
        local = [(peer, rows) for peer, rows in sends if peer in self._local]
        if local:
            self._post(local)

        def wait() -> None:
            self._receive(expected)
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

        expected = [(peer, self._expect(peer, keep(peer))) for peer in senders if peer in self._local]
        lengths = {peer: torch.tensor([data.numel()]) for peer, data in remote}  # of the CPU, which must know them
        into = {peer: torch.empty(1, dtype=torch.int64) for peer in from_afar}
        wait_lengths = self._hosts.start_each([*lengths.items()], [*into.items()])
        filled = [(peer, data) for peer, data in remote if data.numel()]
        early = self.start_each([*local, *filled], []) if self.receives_early else None

        def wait() -> dict[int, Tensor]:
            self._receive(expected)
            wait_lengths()
            for peer in from_afar:
                arrived[peer] = torch.empty(int(into[peer]), dtype=torch.uint8, device=self._device)
            receives = [(peer, arrived[peer]) for peer in from_afar if arrived[peer].numel()]
            late = [] if self.receives_early else [*local, *filled]
            self.start_each(late, receives)()
            if early is not None:
                early()
            return arrived

        return wait

    def _expect(self, peer: int, accept: Callable[[Tensor], Any]) -> int:
        assert self._memory is not None
        return self._memory.expect(peer, self.watch.mark(), accept)

    def _receive(self, expected: Sequence[tuple[int, int]]) -> None:
        if expected:
            assert self._memory is not None
            self._memory.receive_all(expected)

    def _free_scratch(self, num_bytes: int) -> Tensor:
        """Returns shared memory that nothing is sent from any more, to peers on other machines either."""
        assert self._memory is not None
        for request in self._leaving:
            request.wait()
        self._leaving = []
        return self._memory.scratch(num_bytes)

    def _post(self, messages: Sequence[tuple[int, Rows]]) -> None:
        memory = self._memory
        assert memory is not None
        posts = [(peer, rows.offset, rows.rows.nbytes) for peer, rows in messages if isinstance(rows, Scratch)]
        if not posts:
            parts = {id(rows): _as_bytes(rows_of(rows)) for _, rows in messages}  # the same rows once
            begins = accumulate((len(part) for part in parts.values()), initial=0)
            scratch = self._free_scratch(sum(len(part) for part in parts.values()))
            places = dict(zip(parts, begins))
            for key, part in parts.items():
                scratch[places[key] : places[key] + len(part)] = part
            posts = [(peer, places[id(rows)], len(parts[id(rows)])) for peer, rows in messages]
        assert len(posts) == len(messages), "rows of scratch memory and others in one call"
        memory.post(posts, self.watch.mark())

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks can map each other's memory: what :meth:`show` needs."""
        return self._memory is not None and self.all_local

    def show(self, block: Rows | None, readers: Sequence[int], looks: Mapping[int, Accept]) -> Callable[[], None]:
        """Lets each of `readers` look at all of `block`, and looks at the blocks that peers show; returns what waits for these.

        Args:
            block: the last :meth:`scratch`, which stays until all have looked; None if there are no readers.
            readers: ranks that expect it.
            looks: by peer, takes the bytes of its block.
        """
        assert self._memory is not None
        expected = [(peer, self._expect(peer, look)) for peer, look in looks.items()]
        if block is not None:
            self._memory.post([(peer, 0, rows_of(block).nbytes) for peer in readers], self.watch.mark())
        return lambda: self._receive(expected)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks in rank order; all ranks are on this machine."""
        memory = self._memory
        assert memory is not None and self.all_local
        parts = {peer: torch.empty_like(tensor, memory_format=torch.contiguous_format) for peer in memory.peers}
        expected = [(peer, self._expect(peer, _as_bytes(part).copy_)) for peer, part in parts.items()]
        self._post([(peer, tensor.contiguous()) for peer in memory.peers])
        self._receive(expected)
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


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.detach().view(-1).view(torch.uint8)
