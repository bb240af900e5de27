"""Products with a matrix that lies on a process grid: CAGNET's 1D and 1.5D algorithms, and their sparsity-aware form.

Source: CAGNET (GNNSys'21) Algorithm 1 (c = 1) and Algorithm 2. Ours differs in that each row of a block row is owned by one of
the c ranks of its process row instead of lying on all of them: a block is brought together at the rank that broadcasts it, and
partial sums are reduced to the owners, the first half of the paper's all-reduce.

n nodes, N of them owned by a rank, P ranks, c the replication factor, R = P / c block rows.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.exchange import HaloExchange, exchange_error
from lightning_gnn.comm.group import World
from lightning_gnn.comm.shared_memory import PeerError
from lightning_gnn.comm.traffic import Meter, Traffic
from lightning_gnn.kernels import CSR, spmm
from lightning_gnn.partition.grid import ProcessCube, ProcessGrid
from lightning_gnn.partition.shard import HaloPlan, Ids, halo_plan

MakeExchange = Callable[[HaloPlan, World, Meter], HaloExchange]


class Triples:
    """Entries of a matrix over all nodes, ids as in the relabelled graph.

    Attributes:
        row, col: int64 ``[E]``.
        value: ``[E]``; None for ones.
    """

    def __init__(self, row: Tensor, col: Tensor, value: Tensor | None) -> None:
        self.row, self.col, self.value = row, col, value

    def transpose(self) -> Triples:
        return Triples(self.col, self.row, self.value)

    def __getitem__(self, chosen: Tensor) -> Triples:
        return Triples(self.row[chosen], self.col[chosen], None if self.value is None else self.value[chosen])


Holders = Callable[[Ids, Ids], Ids]
"""Returns the rank that multiplies each entry, ``[E]``, from its row and column."""


def on_grid(grid: ProcessGrid | ProcessCube, offsets: Ids) -> Holders:
    """Returns who multiplies an entry on a process grid, of nodes that start at `offsets`, ``[P + 1]``, on each rank."""
    return partial(grid.holders, offsets)


def deal(entries: Triples, holders: Holders, world: World) -> Triples:
    """Sends each entry to the rank that multiplies it; returns those of this rank, in rank order. All ranks must call it.

    Args:
        entries: on the rank's device.
        holders: says which rank that is.
        world: the ranks.
    """
    holder = torch.from_numpy(holders(entries.row.cpu().numpy(), entries.col.cpu().numpy()))
    counts = torch.bincount(holder, minlength=world.size)
    arriving = world.all_gather(counts.to(world.device), "Dealing a matrix over the ranks").cpu()[:, world.rank]
    sorted_entries = entries[torch.argsort(holder, stable=True).to(entries.row.device)]

    def exchanged(values: Tensor) -> Tensor:
        into = values.new_empty(int(arriving.sum()))
        here = slice(int(counts[: world.rank].sum()), int(counts[: world.rank + 1].sum()))
        there = slice(int(arriving[: world.rank].sum()), int(arriving[: world.rank + 1].sum()))
        into[there] = values[here]
        sends = _messages(values, counts.tolist(), world.rank)
        world.wire.start_each(sends, _messages(into, arriving.tolist(), world.rank))()
        return into

    value = None if sorted_entries.value is None else exchanged(sorted_entries.value)
    return Triples(exchanged(sorted_entries.row), exchanged(sorted_entries.col), value)


def _messages(values: Tensor, counts: Sequence[int], rank: int) -> list[tuple[int, Tensor]]:
    parts = values.split(list(counts))
    return [(peer, part) for peer, part in enumerate(parts) if peer != rank and len(part)]


class Matrix(ABC):
    """One rank's part of a matrix over all nodes, ``[n, n]``, and of its transpose."""

    @abstractmethod
    def multiply(self, x: Tensor, layer: str, transposed: bool) -> Tensor:
        """Returns this rank's rows of the product, ``[N, F]``, in at least float32.

        Args:
            x: this rank's rows, ``[N, F]``, contiguous.
            layer: named in errors and counted under.
            transposed: multiply with the transpose: the backward pass.
        """


class BlockMatrix(Matrix):
    """Whole blocks travel, one at a time; the next one is on its way while one is multiplied (1D and 1.5D as published).

    All ranks go through the stages alike, one ahead of what they multiply, so that a transport that does one thing after the
    other (NCCL) comes to no standstill.

    Memory beside the operands: the block that this rank broadcasts, two that it receives, its process row's partial sums.

    Args:
        entries: the matrix's entries whose row this rank owns, in relabelled ids.
        grid: of the products.
        offsets: first node of each rank and the end, ``[P + 1]``.
        world, meter: the ranks, and where traffic is counted.
    """

    def __init__(self, entries: Triples, grid: ProcessGrid, offsets: Ids, world: World, meter: Meter) -> None:
        self.grid, self.offsets, self.world, self.meter = grid, offsets, world, meter
        self.row, self.column = grid.row(world.rank), grid.column(world.rank)
        self._blocks = [self._deal(entries), self._deal(entries.transpose())]
        self._buffers: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}

    def block(self, number: int) -> slice:
        """Returns the nodes of a block row."""
        ranks = self.grid.in_row(number)
        return slice(int(self.offsets[ranks.start]), int(self.offsets[ranks.stop]))

    def _deal(self, entries: Triples) -> list[tuple[CSR, Tensor | None]]:
        """Returns by stage the block of this rank, and its values in slot order."""
        mine = deal(entries, on_grid(self.grid, self.offsets), self.world)
        rows = self.block(self.row)
        stages = []
        for number in self.grid.chunk(self.column):
            columns = self.block(number)
            part = mine[((mine.col >= columns.start) & (mine.col < columns.stop)).nonzero().view(-1)]
            csr = CSR.from_coo(
                part.row - rows.start, part.col - columns.start, rows.stop - rows.start, columns.stop - columns.start
            )
            stages.append((csr.of_slots(), None if part.value is None else csr.permute(part.value)))
        return stages

    @override
    def multiply(self, x: Tensor, layer: str, transposed: bool) -> Tensor:
        direction = "backward" if transposed else "forward"
        talk = Talk(self.world, self.meter, layer, direction)
        chunk = self.grid.chunk(self.column)
        own_block = self._gathered(x, talk)
        rows = self.block(self.row)
        shape, dtype = (rows.stop - rows.start, x.size(1)), torch.promote_types(x.dtype, torch.float32)
        total = x.new_empty(shape, dtype=dtype) if len(chunk) else x.new_zeros(shape, dtype=dtype)

        def fetch(stage: int) -> tuple[Tensor, Callable[[], None]]:
            number = chunk[stage]
            source = self.grid.source(number)
            if source == self.world.rank:
                assert own_block is not None
                readers = [rank for rank in self.grid.in_column(self.column) if rank != source]
                talk.start([(rank, own_block) for rank in readers if own_block.numel()], [])
                return own_block, _nothing
            columns = self.block(number)
            into = self._buffer(stage % 2, torch.Size((columns.stop - columns.start, x.size(1))), x.dtype)
            return into, talk.start([], [(source, into)] if into.numel() else [])

        coming = [fetch(0)] if len(chunk) else []
        for stage, (csr, values) in enumerate(self._blocks[transposed]):
            rows_of_stage, wait = coming.pop()
            wait()
            if stage + 1 < len(chunk):
                coming.append(fetch(stage + 1))
            spmm(csr, rows_of_stage, values, out=total, accumulate=stage > 0)
        out = self._reduced(total, talk)
        talk.end()
        return out

    def _gathered(self, x: Tensor, talk: Talk) -> Tensor | None:
        """Brings the rows of this process row together at the rank that broadcasts them; None on the others."""
        source = self.grid.source(self.row)
        ranks = self.grid.in_row(self.row)
        if source != self.world.rank:
            talk.start([(source, x.contiguous())] if x.numel() else [], [])
            return None
        rows = self.block(self.row)
        shape = (rows.stop - rows.start, x.size(1))
        # Memory to send from is the next one's until something is sent from it.
        block = self.world.wire.scratch(shape, x.dtype, x.device) if self.grid.num_rows > 1 else x.new_empty(shape)
        parts = block.split(np.diff(self.offsets[ranks.start : ranks.stop + 1]).tolist())
        parts[self.column].copy_(x)
        others = [(rank, part) for rank, part in zip(ranks, parts) if rank != source and part.numel()]
        talk.start([], others)()
        return block

    def _reduced(self, total: Tensor, talk: Talk) -> Tensor:
        """Sums a process row's partial sums at the owners, in the order of ranks."""
        ranks = self.grid.in_row(self.row)
        if len(ranks) == 1:
            return total
        parts = total.split(np.diff(self.offsets[ranks.start : ranks.stop + 1]).tolist())
        own = parts[self.column]
        arrived = own.new_empty((len(ranks) - 1, *own.shape))
        peers = [rank for rank in ranks if rank != self.world.rank]
        sends = [(rank, part) for rank, part in zip(ranks, parts) if rank != self.world.rank and part.numel()]
        talk.start(sends, [(rank, into) for rank, into in zip(peers, arrived) if own.numel()])()
        addends = [*arrived[: self.column], own, *arrived[self.column :]]
        out = addends[0] + addends[1]
        for part in addends[2:]:
            out += part
        return out

    def _buffer(self, number: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        key = (number, shape, dtype)
        if key not in self._buffers:
            with torch.inference_mode(False):
                self._buffers[key] = torch.empty(shape, dtype=dtype, device=self.world.device)
        return self._buffers[key]


class SparseMatrix(Matrix):
    """Only rows that a nonzero reads travel, and only partial sums that a nonzero has added to, wherever nonzeros lie.

    On a process grid this is the later work of CAGNET's authors on sparsity-aware communication; for any cut of the edges, the
    scatter from masters to mirrors and the gather back of a vertex cut (CDFGNN section 3). Rows go directly between their
    owner and each rank that reads or adds to them.

    Args:
        entries, offsets, world, meter: see :class:`BlockMatrix`.
        holders: who multiplies which entry.
        make_exchange: an exchange of rows by a plan.

    Attributes:
        reads: brings rows of the columns. adds: takes partial sums of the rows home. targets: brings rows of the rows.
    """

    def __init__(
        self,
        entries: Triples,
        holders: Holders,
        offsets: Ids,
        world: World,
        meter: Meter,
        make_exchange: MakeExchange = HaloExchange,
    ) -> None:
        self.offsets, self.world, self._make_exchange = offsets, world, make_exchange
        self.num_owned = int(offsets[world.rank + 1] - offsets[world.rank])
        mine = deal(entries, holders, world)
        self.reads, self._col = self._exchange(mine.col, meter)
        self.adds, self._row = self._exchange(mine.row, _Reversed(meter))
        self.targets = make_exchange(self.adds.plan, world, meter)
        self._value = mine.value

    @cached_property
    def csr(self) -> CSR:
        """This rank's part as one matrix: owned rows and those that it adds to, by owned columns and those that it reads."""
        shape = self.num_owned + self.adds.num_halo, self.num_owned + self.reads.num_halo
        return CSR.from_coo(self._row, self._col, *shape).of_slots()

    @cached_property
    def _parts(self) -> dict[tuple[bool, bool], _Part]:
        """By where rows and columns lie, so that what needs no waiting is multiplied while rows travel."""
        return {
            (own_row, own_col): self._part(own_row, own_col) for own_row in (True, False) for own_col in (True, False)
        }

    def _part(self, own_row: bool, own_col: bool) -> _Part:
        """Returns the entries between own or others' rows and own or others' columns."""
        row, col, owned = self._row, self._col, self.num_owned
        ids = (((row < owned) == own_row) & ((col < owned) == own_col)).nonzero().view(-1)
        csr = CSR.from_coo(
            row[ids] - (0 if own_row else owned),
            col[ids] - (0 if own_col else owned),
            owned if own_row else self.adds.num_halo,
            owned if own_col else self.reads.num_halo,
        )
        values = None if self._value is None else csr.permute(self._value[ids])
        csr = csr.of_slots()
        return _Part(csr, values, None if values is None else csr.transpose().permute(values))

    def _exchange(self, ids: Tensor, meter: Meter) -> tuple[HaloExchange, Tensor]:
        """Returns the exchange of the nodes `ids` that others own, and `ids` in local numbers: owned, then others."""
        first = int(self.offsets[self.world.rank])
        own = (ids >= first) & (ids < first + self.num_owned)
        halo, position = torch.unique(ids[~own], return_inverse=True)
        halos = self.world.all_gather_object(halo.cpu().numpy())
        exchange = self._make_exchange(halo_plan(self.world.rank, self.offsets, halos), self.world, meter)
        local = ids - first
        local[~own] = self.num_owned + position
        return exchange, local

    @override
    def multiply(self, x: Tensor, layer: str, transposed: bool) -> Tensor:
        reads, adds = (self.adds, self.reads) if transposed else (self.reads, self.adds)
        dtype = torch.promote_types(x.dtype, torch.float32)
        arrived = reads.buffer("rows", torch.Size((reads.num_halo, x.size(1))), x.dtype)
        wait = _nothing if reads.idle else reads.start_fetch(x, arrived, layer)

        def add(own_row: bool, own_col: bool, out: Tensor) -> None:
            """Multiplies with own rows, which come first and overwrite, or with those that have arrived."""
            part = self._parts[(own_col, own_row) if transposed else (own_row, own_col)]
            if own_col or part.csr.num_edges:
                csr, values = (part.csr.transpose(), part.values_transposed) if transposed else (part.csr, part.values)
                spmm(csr, x if own_col else arrived, values, out=out, accumulate=not own_col)

        own = x.new_empty((self.num_owned, x.size(1)), dtype=dtype)
        partial = own[:0] if adds.idle else adds.outgoing(torch.Size((adds.num_halo, x.size(1))), dtype)
        if len(partial):
            add(False, True, partial)
        # Own rows while others travel: those that come in, or, where none do, the partial sums that go out.
        if not reads.idle:
            add(True, True, own)
        wait()
        if len(partial):
            add(False, False, partial)
        finish = None if adds.idle else adds.start_return(partial, layer)
        if reads.idle:
            add(True, True, own)
        add(True, False, own)
        if finish is not None:
            finish(own)
        return own


@dataclass(frozen=True)
class _Part:
    """Entries of a matrix, and their values in the slot order of it and of its transpose, ``[E]``; None for ones."""

    csr: CSR
    values: Tensor | None
    values_transposed: Tensor | None


class _Reversed(Meter):
    """Counts for partial sums, which are sent home in the forward pass and fetched in the backward one."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    @override
    def direction(self, direction: str) -> str:
        return "forward" if direction == "backward" else "backward"

    @override
    def record(self, layer: str, direction: str, traffic: Traffic) -> None:
        self._meter.record(layer, self.direction(direction), traffic)


class Talk:
    """Messages of one product: counted, and named in errors."""

    def __init__(self, world: World, meter: Meter, layer: str, direction: str) -> None:
        self._world, self._meter, self._layer, self._direction = world, meter, layer, direction
        self._open: list[Callable[[], None]] = []

    def start(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Callable[[], None]:
        """Starts messages; returns the function that waits for them. Call :meth:`end` if it is not called."""
        began = time.perf_counter()
        traffic = Traffic(
            bytes_sent=sum(self._world.wire.message_bytes(rows) for _, rows in sends),
            messages=len(sends),
            rows=sum(len(rows) for _, rows in sends),
        )
        try:
            wait = self._world.wire.start_each(sends, receives)
        except PeerError as error:
            raise exchange_error(self._world, error, self._layer, self._direction) from error
        traffic.seconds = time.perf_counter() - began
        self._meter.record(self._layer, self._direction, traffic)

        def finish() -> None:
            if finish in self._open:
                self._open.remove(finish)
            began = time.perf_counter()
            try:
                wait()
            except PeerError as error:
                raise exchange_error(self._world, error, self._layer, self._direction) from error
            self._meter.record(self._layer, self._direction, Traffic(seconds=time.perf_counter() - began))

        self._open.append(finish)
        return finish

    def end(self) -> None:
        """Waits until all that has been started is done."""
        for finish in list(self._open):
            finish()


def _nothing() -> None:
    pass
