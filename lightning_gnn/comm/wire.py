"""Rows between ranks: shared memory for peers on this machine, the process group for the others."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.codec import Codec
from lightning_gnn.comm.shared_memory import PeerError, SharedMemory
from lightning_gnn.comm.watchdog import Watchdog


class Sends(ABC):
    """One message to and from every peer, whatever carries it.

    Attributes:
        codes: whether rows may travel approximately now: encoded, by a :class:`~lightning_gnn.comm.coded.CodedWire`, or only
            where they have changed, by a :class:`~lightning_gnn.comm.cache.CachedExchange`.
        codec: how rows are encoded; None for as they are.
    """

    codes = False
    codec: Codec | None = None

    @abstractmethod
    def start_each(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Callable[[], None]:
        """Starts to send rows to peers and to receive rows from them; returns the function that waits.

        Args:
            sends, receives: a rank and contiguous rows for or from it, not none; the same rows may go to several. Memory of
                ``scratch`` is sent without a copy.

        Raises:
            PeerError: from the returned function (and from here when a peer has not taken what it was sent before).
        """

    def start(
        self, out: Tensor, out_counts: Sequence[int], into: Tensor, into_counts: Sequence[int]
    ) -> Callable[[], None]:
        """Starts to send ``out``'s rows and to receive ``into``'s, in peer order; returns the function that waits.

        Args:
            out, into: contiguous, of one dtype.
            out_counts, into_counts: rows for and from each rank.

        Raises:
            PeerError: as :meth:`start_each`.
        """
        return self.start_each(
            [(peer, rows) for peer, rows in enumerate(out.split(list(out_counts))) if rows.numel()],
            [(peer, rows) for peer, rows in enumerate(into.split(list(into_counts))) if rows.numel()],
        )

    @abstractmethod
    def start_varied(
        self, sends: Sequence[tuple[int, Tensor]], senders: Sequence[int]
    ) -> Callable[[], dict[int, Tensor]]:
        """Starts to send bytes to peers and to receive, from each of `senders`, as many as it sends.

        Args:
            sends: a rank and bytes for it, uint8.
            senders: ranks that send something here.

        Returns:
            Waits, and returns the bytes by sender.

        Raises:
            PeerError: as :meth:`start_each`.
        """

    def message_bytes(self, rows: Tensor) -> int:
        """Returns how many bytes a message of these rows takes now, or several messages that they are split into by rows."""
        return rows.numel() * rows.element_size()

    @contextmanager
    def coding(self, on: bool = True) -> Iterator[None]:
        """Rows may travel approximately while this is open, or may not; on every rank alike."""
        before, self.codes = self.codes, on
        try:
            yield
        finally:
            self.codes = before


class Wire(Sends):
    """Sends one message to, and receives one from, every peer that there is something for.

    Args:
        size: number of ranks.
        group: process group for peers on other machines, and for CUDA tensors.
        memory: mailboxes of this machine's ranks, or None.
        watch: keeps the deadline of waits, and marks messages by the operation that they belong to.
        device: of what is sent and received.
    """

    def __init__(
        self, size: int, group: Any, memory: SharedMemory | None, watch: Watchdog, device: torch.device
    ) -> None:
        self._device = device
        self._group, self._memory, self.watch = group, memory, watch
        self.waited_s = 0.0
        """Seconds that this rank has waited for messages from other machines until now, and for what it sent there."""
        self._local = set(memory.peers) if memory is not None else set()
        self.all_local = len(self._local) == size - 1
        self._nccl = dist.get_backend(group) == "nccl"
        self.receives_early = not self._nccl
        """Whether receiving may start before what must be sent first: NCCL does one thing after the other."""
        self._scratch: Tensor | None = None
        self._leaving: list[_Request] = []  # sends that may not be done

    def scratch(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for rows that the next :meth:`start` sends, so that no copy is needed on the way."""
        count = dtype.itemsize
        for length in shape:
            count *= length
        if self._memory is None or not self._local or count == 0:
            with torch.inference_mode(False):
                return torch.empty(*shape, dtype=dtype, device=device)
        self._scratch = self._free_scratch(count).view(dtype).view(*shape)
        return self._scratch

    @override
    def start_each(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Callable[[], None]:
        sends = [(peer, _as_bytes(rows)) for peer, rows in sends]
        receives = [(peer, _as_bytes(rows)) for peer, rows in receives]
        mark = self.watch.mark()
        remote = [
            dist.P2POp(kind, rows, peer, self._group, mark)  # NCCL knows no such tags
            for kind, messages in ((dist.irecv, receives), (dist.isend, sends))
            for peer, rows in messages
            if peer not in self._local
        ]
        works: list[Any] = dist.batch_isend_irecv(remote) if remote else []
        requests = [_Request(work, op.peer, self) for work, op in zip(works, remote)]
        if self._memory is not None:
            self._leaving = [request for request in self._leaving if not request.done]
            self._leaving += [request for request, op in zip(requests, remote) if op.op is dist.isend]
        local = [(peer, rows) for peer, rows in sends if peer in self._local]
        if local:
            self._post(local)

        def wait() -> None:
            for peer, rows in receives:
                if peer in self._local:
                    assert self._memory is not None
                    rows.copy_(self._memory.receive(peer, mark))
                    self._memory.taken(peer)
            if self._nccl:
                for work in works:
                    work.wait()  # orders the streams; NCCL's own watchdog keeps the deadline
                return
            for request in requests:
                request.wait()

        return wait

    @override
    def start_varied(
        self, sends: Sequence[tuple[int, Tensor]], senders: Sequence[int]
    ) -> Callable[[], dict[int, Tensor]]:
        local = [(peer, data) for peer, data in sends if peer in self._local]
        remote = [(peer, data) for peer, data in sends if peer not in self._local]
        from_afar = [peer for peer in senders if peer not in self._local]
        mark = self.watch.mark()
        lengths = {peer: torch.tensor([data.numel()], device=self._device) for peer, data in remote}
        into = {peer: torch.empty(1, dtype=torch.int64, device=self._device) for peer in from_afar}
        wait_lengths = self.start_each([*lengths.items()], [*into.items()])
        filled = [(peer, data) for peer, data in remote if data.numel()]
        early = self.start_each([*local, *filled], []) if self.receives_early else None

        def wait() -> dict[int, Tensor]:
            arrived = {}
            for peer in senders:
                if peer in self._local:
                    assert self._memory is not None
                    arrived[peer] = self._memory.receive(peer, mark).clone()
                    self._memory.taken(peer)
            wait_lengths()
            for peer in from_afar:
                length = into[peer]
                arrived[peer] = torch.empty(int(length), dtype=torch.uint8, device=length.device)
            receives = [(peer, arrived[peer]) for peer in from_afar if arrived[peer].numel()]
            late = [] if self.receives_early else [*local, *filled]
            self.start_each(late, receives)()
            if early is not None:
                early()
            return arrived

        return wait

    def _free_scratch(self, num_bytes: int) -> Tensor:
        """Returns shared memory that nothing is sent from any more, to peers on other machines either."""
        assert self._memory is not None
        for request in self._leaving:
            request.wait()
        self._leaving = []
        return self._memory.scratch(num_bytes)

    def _post(self, messages: Sequence[tuple[int, Tensor]]) -> None:
        memory = self._memory
        assert memory is not None
        base = -1 if self._scratch is None else self._scratch.data_ptr()
        end = base if self._scratch is None else base + self._scratch.nbytes
        if all(base <= rows.data_ptr() and rows.data_ptr() + rows.numel() <= end for _, rows in messages):
            memory.post([(peer, rows.data_ptr() - base, rows.numel()) for peer, rows in messages], self.watch.mark())
        else:
            scratch = self._free_scratch(sum(rows.numel() for _, rows in messages))
            posts, offset = [], 0
            for peer, rows in messages:
                scratch[offset : offset + rows.numel()] = rows
                posts.append((peer, offset, rows.numel()))
                offset += rows.numel()
            memory.post(posts, self.watch.mark())
        self._scratch = None

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks can map each other's memory: what :meth:`show` and :meth:`shown` need."""
        return self._memory is not None and self.all_local

    def show(self, block: Tensor, readers: Sequence[int]) -> None:
        """Lets each of `readers` look at all of `block`, which is the last :meth:`scratch`; it stays until all have looked."""
        assert self._memory is not None
        self._memory.post([(peer, 0, block.nbytes) for peer in readers], self.watch.mark())
        self._scratch = None

    @contextmanager
    def shown(self, peer: int) -> Iterator[Tensor]:
        """Waits for the next block that `peer` shows; its bytes, uint8, hold while this is open."""
        assert self._memory is not None
        yield self._memory.receive(peer, self.watch.mark())
        self._memory.taken(peer)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks in rank order; all ranks are on this machine."""
        memory = self._memory
        assert memory is not None and self.all_local
        own = _as_bytes(tensor.contiguous())
        self._free_scratch(len(own)).copy_(own)
        memory.post([(peer, 0, len(own)) for peer in memory.peers], self.watch.mark())
        parts = {memory.rank: tensor}
        for peer in memory.peers:
            parts[peer] = memory.receive(peer, self.watch.mark()).clone().view(tensor.dtype).view(tensor.shape)
            memory.taken(peer)
        return [parts[rank] for rank in sorted(parts)]


class _Request:
    """A message of gloo that is waited for once, whoever asks first."""

    def __init__(self, work: Any, peer: int, wire: Wire) -> None:
        self._work, self._peer, self._wire = work, peer, wire
        self.done = False

    def wait(self) -> None:
        """Waits for its end; raises :class:`PeerError` where there is none in time."""
        if self.done:
            return
        self.done, began = True, time.perf_counter()
        watch = self._wire.watch
        watch.peer = self._peer
        try:
            self._work.wait(timedelta(seconds=watch.deadline_s))
        except RuntimeError as error:
            waited = time.perf_counter() - began
            reason = f"nothing to or from rank {self._peer} for {waited:.1f} s ({error})"
            raise PeerError(self._peer, reason, astray=waited >= watch.deadline_s) from error
        watch.peer = None
        self._wire.waited_s += time.perf_counter() - began


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.detach().view(-1).view(torch.uint8)
