"""Products with a matrix that lies on a process grid in whole blocks: CAGNET's 1D and 1.5D algorithms.

Source: CAGNET (GNNSys'21) Algorithm 1 (c = 1) and Algorithm 2. Ours differs in that each row of a block row is owned by one of
the c ranks of its process row instead of lying on all of them: a block is brought together at the rank that broadcasts it, and
partial sums are reduced to the owners, the first half of the paper's all-reduce. And all blocks of a process column are broadcast
at once, around a ring of its ranks, so that no rank waits for another one's turn: see
:meth:`~lightning_gnn.strategies.spmm.grid.ProcessGrid.ring`.

n nodes, N of them owned by a rank, P ranks, c the replication factor, R = P / c block rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Matrix, Triples, start_messages
from lightning_gnn.comm.group import World
from lightning_gnn.comm.matrix import distribute
from lightning_gnn.comm.traffic import Meter, Moment
from lightning_gnn.comm.transport import Rows, rows_of
from lightning_gnn.kernels import CSR, spmm
from lightning_gnn.partition.shard import Ids
from lightning_gnn.strategies.spmm.grid import ProcessGrid, on_grid


class BlockMatrix(Matrix):
    """Whole blocks travel, a sub-block at a time, around each process column; one is multiplied while the next one comes.

    All ranks go through the stages alike, so that a transport that does one thing after the other (NCCL) comes to no standstill.

    Memory beside the operands: the block that this rank broadcasts, two or three sub-blocks on their way, and its process row's
    partial sums.

    Args:
        entries: the matrix's entries whose row this rank owns, in relabelled ids.
        grid: of the products.
        offsets: first node of each rank and the end, ``[P + 1]``.
        world, meter: the ranks, and where traffic is counted.
    """

    def __init__(self, entries: Triples, grid: ProcessGrid, offsets: Ids, world: World, meter: Meter) -> None:
        self.grid, self.offsets, self.world, self.meter = grid, offsets, world, meter
        self.row, column = grid.row(world.rank), grid.column(world.rank)
        self._read = [owner for block in grid.chunk(column) for owner in grid.in_row(block)]
        ring = list(grid.in_column(column))
        self._next, self._previous = ring[(self.row + 1) % len(ring)], ring[self.row - 1]
        self._stages = [(passed[self.row], passed[self.row - 1]) for passed in grid.ring(column)]
        self._passes = {owner for owner, _ in self._stages if owner is not None}
        self._blocks = [self._distribute(entries), self._distribute(entries.transpose())]
        self._buffers = world.buffers(world.device)

    def _distribute(self, entries: Triples) -> dict[int, tuple[CSR, Tensor | None]]:
        """Returns by the owner of a sub-block what it is multiplied with here, and the values of that in slot order."""
        mine = distribute(entries, on_grid(self.grid, self.offsets), self.world)
        rows = self.grid.in_row(self.row)
        first, stop = int(self.offsets[rows.start]), int(self.offsets[rows.stop])
        blocks = {}
        for owner in self._read:
            begin, end = self.offsets[owner : owner + 2].tolist()
            part = mine[((mine.col >= begin) & (mine.col < end)).nonzero().view(-1)]
            csr = CSR.from_coo(part.row - first, part.col - begin, stop - first, end - begin)
            blocks[owner] = csr.of_slots(), None if part.value is None else csr.permute(part.value)
        return blocks

    @override
    def multiply(self, x: Tensor, call: Call) -> Tensor:
        rank, messages = self.world.rank, ProductMessages(self.world, self.meter, call)
        blocks = self._blocks[call.direction == "backward"]
        sums = int(np.diff(self.offsets[:: self.grid.replication])[self.row])
        total = x.new_zeros((sums, x.size(1)), dtype=torch.promote_types(x.dtype, torch.float32))
        here: dict[int, Tensor] = {}  # by owner
        uses: dict[int, int] = {}  # that are left of each
        waiting: list[int] = []  # for their product

        def room(owner: int) -> Tensor:
            size = int(self.offsets[owner + 1] - self.offsets[owner])
            return self._buffers.take((size, x.size(1)), x.dtype)

        def arrives(owner: int, rows: Tensor) -> None:
            here[owner], uses[owner] = rows, 1 + (owner in self._passes)
            waiting.append(owner)

        def used(owner: int) -> None:
            uses[owner] -= 1
            if not uses[owner]:
                rows = here.pop(owner)
                if owner != rank:
                    self._buffers.give_back(rows)

        def add() -> None:
            owner = waiting.pop(0)
            csr, values = blocks[owner]
            if csr.num_edges:
                spmm(csr, here[owner], values, out=total, accumulate=True)
            used(owner)

        # The rows of this process row come together at the rank that broadcasts them.
        source, others = self.grid.source(self.row), dict[int, Tensor]()
        if source == rank:
            others = {owner: room(owner) for owner in self.grid.in_row(self.row) if owner != rank}
            arrives(rank, x)
        gather = messages.start([] if source == rank else [(source, x)], list(others.items()))
        for stage, (passed, coming) in enumerate(self._stages):
            self.world.watch.stage = f"stage {stage + 1} of {len(self._stages)}"
            if passed in others and passed not in here:
                gather()
                for owner, rows in others.items():
                    arrives(owner, rows)
            sends = [] if passed is None else [(self._next, here[passed])]
            into = None if coming is None else room(coming)
            wait = messages.start(sends, [] if into is None else [(self._previous, into)])
            if waiting:
                add()
            wait()
            if passed is not None:
                used(passed)
            if coming is not None and into is not None:
                arrives(coming, into)
        if not self._stages:
            gather()
            for owner, rows in others.items():
                arrives(owner, rows)
        while waiting:
            add()
        out = self._reduced(total, messages)
        messages.end()
        self.world.watch.stage = ""
        return out

    def _reduced(self, total: Tensor, messages: ProductMessages) -> Tensor:
        """Sums a process row's partial sums at the owners, in the order of ranks."""
        ranks = self.grid.in_row(self.row)
        if len(ranks) == 1:
            return total
        parts = total.split(np.diff(self.offsets[ranks.start : ranks.stop + 1]).tolist())
        return messages.sum(ranks, parts)


class ProductMessages:
    """Messages of one product: counted, and named in errors."""

    def __init__(self, world: World, meter: Meter, call: Call) -> None:
        self._world, self._meter, self._call = world, meter, call
        self._open: list[Callable[[], None]] = []

    def start(self, sends: Sequence[tuple[int, Rows]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        """Starts messages, empty ones left out; returns the function that waits. Call :meth:`end` if it is not called."""
        began = Moment.now(self._world.device, "send", self._call.layer, self._call.direction)
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
