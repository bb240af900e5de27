"""Products with a matrix that lies on a process grid in whole blocks: CAGNET's 1D and 1.5D algorithms.

Source: CAGNET (GNNSys'21) Algorithm 1 (c = 1) and Algorithm 2. Ours differs in that each row of a block row is owned by one of
the c ranks of its process row instead of lying on all of them: a block is brought together at the rank that broadcasts it, and
partial sums are reduced to the owners, the first half of the paper's all-reduce.

n nodes, N of them owned by a rank, P ranks, c the replication factor, R = P / c block rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import start_messages
from lightning_gnn.comm.group import World
from lightning_gnn.comm.matrix import Matrix, Triples, distribute, on_grid
from lightning_gnn.comm.traffic import Meter, Moment
from lightning_gnn.comm.transport import Rows, rows_of
from lightning_gnn.kernels import CSR, spmm
from lightning_gnn.partition.grid import ProcessGrid
from lightning_gnn.partition.shard import Ids


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
        self._blocks = [self._distribute(entries), self._distribute(entries.transpose())]
        self._buffers: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}

    def block(self, number: int) -> slice:
        """Returns the nodes of a block row."""
        ranks = self.grid.in_row(number)
        return slice(int(self.offsets[ranks.start]), int(self.offsets[ranks.stop]))

    def _distribute(self, entries: Triples) -> list[tuple[CSR, Tensor | None]]:
        """Returns by stage the block of this rank, and its values in slot order."""
        mine = distribute(entries, on_grid(self.grid, self.offsets), self.world)
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
    def multiply(self, x: Tensor, call: Call) -> Tensor:
        messages = ProductMessages(self.world, self.meter, call)
        chunk = self.grid.chunk(self.column)
        own_block = self._gathered(x, messages)
        rows = self.block(self.row)
        shape, dtype = (rows.stop - rows.start, x.size(1)), torch.promote_types(x.dtype, torch.float32)
        total = x.new_empty(shape, dtype=dtype) if len(chunk) else x.new_zeros(shape, dtype=dtype)

        def fetch(stage: int) -> tuple[Tensor, Callable[[], None]]:
            number = chunk[stage]
            source = self.grid.source(number)
            if source == self.world.rank:
                assert own_block is not None
                readers = [rank for rank in self.grid.in_column(self.column) if rank != source]
                messages.start([(rank, own_block) for rank in readers], [])
                return rows_of(own_block), lambda: None
            columns = self.block(number)
            into = self._buffer(stage % 2, torch.Size((columns.stop - columns.start, x.size(1))), x.dtype)
            return into, messages.start([], [(source, into)])

        coming = [fetch(0)] if len(chunk) else []
        for stage, (csr, values) in enumerate(self._blocks[call.direction == "backward"]):
            self.world.watch.stage = f"stage {stage + 1} of {len(chunk)}"
            rows_of_stage, wait = coming.pop()
            wait()
            if stage + 1 < len(chunk):
                coming.append(fetch(stage + 1))
            spmm(csr, rows_of_stage, values, out=total, accumulate=stage > 0)
        out = self._reduced(total, messages)
        messages.end()
        self.world.watch.stage = ""
        return out

    def _gathered(self, x: Tensor, messages: ProductMessages) -> Rows | None:
        """Brings the rows of this process row together at the rank that broadcasts them; None on the others."""
        source = self.grid.source(self.row)
        ranks = self.grid.in_row(self.row)
        if source != self.world.rank:
            messages.start([(source, x.contiguous())], [])
            return None
        rows = self.block(self.row)
        shape = (rows.stop - rows.start, x.size(1))
        # Memory to send from is the next one's until something is sent from it.
        block = self.world.scratch(shape, x.dtype) if self.grid.num_rows > 1 else x.new_empty(shape)
        parts = rows_of(block).split(np.diff(self.offsets[ranks.start : ranks.stop + 1]).tolist())
        parts[self.column].copy_(x)
        messages.start([], [(rank, part) for rank, part in zip(ranks, parts) if rank != source])()
        return block

    def _reduced(self, total: Tensor, messages: ProductMessages) -> Tensor:
        """Sums a process row's partial sums at the owners, in the order of ranks."""
        ranks = self.grid.in_row(self.row)
        if len(ranks) == 1:
            return total
        parts = total.split(np.diff(self.offsets[ranks.start : ranks.stop + 1]).tolist())
        return messages.sum(ranks, parts)

    def _buffer(self, number: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        key = (number, shape, dtype)
        if key not in self._buffers:
            with torch.inference_mode(False):
                self._buffers[key] = torch.empty(shape, dtype=dtype, device=self.world.device)
        return self._buffers[key]


class ProductMessages:
    """Messages of one product: counted, and named in errors."""

    def __init__(self, world: World, meter: Meter, call: Call) -> None:
        self._world, self._meter, self._call = world, meter, call
        self._open: list[Callable[[], None]] = []

    def start(self, sends: Sequence[tuple[int, Rows]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        """Starts messages, empty ones left out; returns the function that waits. Call :meth:`end` if it is not called."""
        began = Moment.now(self._world.device)
        sends = [(peer, rows) for peer, rows in sends if rows_of(rows).numel()]
        receives = [(peer, into) for peer, into in receives if into.numel()]
        waiting = start_messages(self._world, self._meter, self._call, sends, receives, began)

        def finish() -> None:
            if finish in self._open:
                self._open.remove(finish)
                waiting()

        self._open.append(finish)
        return finish

    def swap(self, ranks: Sequence[int], out: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Sends ``out[i]`` to ``ranks[i]`` and receives ``into[i]`` from it, except for this rank itself; waits."""
        others = [index for index, rank in enumerate(ranks) if rank != self._world.rank]
        self.start([(ranks[i], out[i]) for i in others], [(ranks[i], into[i]) for i in others])()

    def sum(self, ranks: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
        """Returns the sum of what two or more `ranks` have for this one, in their order, as each has ``parts[i]`` for rank i."""
        own = parts[ranks.index(self._world.rank)]
        addends = [own if rank == self._world.rank else torch.empty_like(own) for rank in ranks]
        self.swap(ranks, parts, addends)
        out = addends[0] + addends[1]
        for part in addends[2:]:
            out += part
        return out

    def end(self) -> None:
        """Waits until all that has been started is done."""
        for finish in list(self._open):
            finish()
