"""Matrices in blocks on a process grid, and their products: CAGNET's 1D, 1.5D, 2D and 3D algorithms.

Source of :class:`BlockMatrix`: CAGNET (GNNSys'21) Algorithm 1 (c = 1) and Algorithm 2. In the paper, each block row is on all c
ranks of its process row; here, each of its rows has one owner among them. A block is gathered at the rank that broadcasts it.
Partial sums are reduced to the owners, the first half of the paper's all-reduce. All blocks of a process column are broadcast at
once, around a ring of its ranks, so that no rank waits for another rank's turn. See
:meth:`~lightning_gnn.strategies.spmm.grid.ProcessGrid.ring`.

Source of :class:`SummaMatrix`: CAGNET (SC'20) sections 4.3 and 4.4, SUMMA on a square of ranks, and on each layer of a cube. See
:class:`~lightning_gnn.strategies.spmm.grid.ProcessCube` for the distribution. Inputs and outputs are whole rows on their owners,
so that dense layers have all columns of a node. The owners of a block convert rows to columns of blocks, and back.

SUMMA's stages start at a different block on each rank of a row and of a column, as in Cannon's algorithm. In each stage, a rank
sends its block of the matrix to one rank and its rows to one rank, and receives one of each. If all ranks used the same order, q
- 1 of q would wait.

n nodes, N local nodes of a rank, P ranks, c the replication factor, R = P / c block rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Matrix, Triples, start_messages
from lightning_gnn.comm.group import World
from lightning_gnn.comm.matrix import distribute
from lightning_gnn.comm.traffic import Meter, Moment
from lightning_gnn.kernels import CSR, spmm
from lightning_gnn.partition.shard import Ids
from lightning_gnn.strategies.spmm.grid import ProcessCube, ProcessGrid, on_grid


class BlockMatrix(Matrix):
    """Matrix whose products send whole blocks, one sub-block at a time, around each process column.

    A rank multiplies one sub-block while it receives the next. All ranks run the same stages in the same order, so that a
    transport that runs operations in sequence (NCCL) does not deadlock.

    Memory in addition to the operands: the block that this rank broadcasts, two or three sub-blocks in transit, and the partial
    sums of its process row.

    Args:
        entries: entries of the matrix whose row this rank owns, in relabeled ids.
        grid: process grid of the products.
        offsets: first node of each rank and the end, ``[P + 1]``.
        world, meter: the ranks, and the traffic counter.
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
        """Returns by owner of a sub-block the matrix that multiplies it here, and the matrix's values in slot order."""
        mine = distribute(entries, on_grid(self.grid, self.offsets), self.world)
        rows = self.grid.in_row(self.row)
        first, stop = int(self.offsets[rows.start]), int(self.offsets[rows.stop])
        blocks = {}
        for owner in self._read:
            begin, end = self.offsets[owner : owner + 2].tolist()
            part = mine[((mine.col >= begin) & (mine.col < end)).nonzero().view(-1)]
            csr = CSR.from_coo(part.row - first, part.col - begin, stop - first, end - begin)
            blocks[owner] = csr.to_slot_order(), None if part.value is None else csr.permute(part.value)
        return blocks

    @override
    def multiply(self, x: Tensor, call: Call) -> Tensor:
        rank, messages = self.world.rank, ProductMessages(self.world, self.meter, call)
        blocks = self._blocks[call.direction == "backward"]
        sums = int(np.diff(self.offsets[:: self.grid.replication])[self.row])
        total = x.new_zeros((sums, x.size(1)), dtype=torch.promote_types(x.dtype, torch.float32))
        here: dict[int, Tensor] = {}  # by owner
        uses: dict[int, int] = {}  # remaining, by owner
        waiting: list[int] = []  # for multiplication

        def room(owner: int) -> Tensor:
            size = int(self.offsets[owner + 1] - self.offsets[owner])
            return self._buffers.take((size, x.size(1)), x.dtype)

        def arrives(owner: int, rows: Tensor) -> None:
            here[owner], uses[owner] = rows, 1 + (owner in self._passes)
            waiting.append(owner)

        def release(owner: int) -> None:
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
            release(owner)

        # Gather the rows of this process row at the rank that broadcasts them.
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
                release(passed)
            if coming is not None and into is not None:
                arrives(coming, into)
        if not self._stages:
            gather()
            for owner, rows in others.items():
                arrives(owner, rows)
        while waiting:
            add()
        out = self._reduce_sums(total, messages)
        messages.end()
        self.world.watch.stage = ""
        return out

    def _reduce_sums(self, total: Tensor, messages: ProductMessages) -> Tensor:
        """Reduce the partial sums of a process row to the owners, in the order of ranks."""
        ranks = self.grid.in_row(self.row)
        if len(ranks) == 1:
            return total
        parts = total.split(np.diff(self.offsets[ranks.start : ranks.stop + 1]).tolist())
        return messages.sum(ranks, parts)


class ProductMessages:
    """Messages of one product: adds them to the traffic and labels them for errors."""

    def __init__(self, world: World, meter: Meter, call: Call) -> None:
        self._world, self._meter, self._call = world, meter, call
        self._open: list[Callable[[], None]] = []

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Callable[[], None]:
        """Starts messages, without empty ones; returns a function that waits for them.

        Call :meth:`end` if the returned function is not called.
        """
        began = Moment.now(self._world.device, "send", self._call.layer, self._call.direction)
        sends = [(peer, rows) for peer, rows in sends if rows.numel()]
        receives = [(peer, into) for peer, into in receives if into.numel()]
        waiting = start_messages(self._world, self._meter, self._call, sends, receives, began)

        def finish() -> None:
            if finish in self._open:
                self._open.remove(finish)
                waiting()

        self._open.append(finish)
        return finish

    def swap(self, ranks: Sequence[int], out: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Send ``out[i]`` to ``ranks[i]``, receive ``into[i]`` from it, and wait; entries for this rank are skipped."""
        others = [index for index, rank in enumerate(ranks) if rank != self._world.rank]
        self.start([(ranks[i], out[i]) for i in others], [(ranks[i], into[i]) for i in others])()

    def sum(self, ranks: Sequence[int], parts: Sequence[Tensor]) -> Tensor:
        """Returns the sum of the parts that two or more `ranks` have for this rank, in the order of `ranks`.

        Args:
            parts: ``parts[i]`` is this rank's part for ``ranks[i]``.
        """
        own = parts[ranks.index(self._world.rank)]
        addends = [own if rank == self._world.rank else torch.empty_like(own) for rank in ranks]
        self.swap(ranks, parts, addends)
        out = addends[0] + addends[1]
        for part in addends[2:]:
            out += part
        return out

    def end(self) -> None:
        """Wait for all asynchronous messages."""
        for finish in list(self._open):
            finish()


@dataclass(frozen=True)
class _Form:
    """Layout of a packed block of the matrix: as sent and stored, without empty rows.

    With many ranks, most rows of a block are empty. The packed bytes are: ids of rows with entries and their numbers of entries,
    int32 ``[R]`` each; columns, int32, and values, ``[E]`` each. Source: doubly compressed sparse rows, Buluc and Gilbert
    (IPDPS'08).

    Attributes:
        shape: rows and columns of the block.
        filled, entries: R, E.
        dtype: dtype of the values; None if all are 1.
    """

    shape: tuple[int, int]
    filled: int
    entries: int
    dtype: torch.dtype | None

    @property
    def sizes(self) -> list[int]:
        """Bytes of each field."""
        item = 0 if self.dtype is None else self.dtype.itemsize
        return [4 * self.filled, 4 * self.filled, 4 * self.entries, item * self.entries]

    def unpack(self, packed: Tensor) -> tuple[CSR, Tensor | None]:
        """Returns the entries of a block, and their values in slot order."""
        *parts, values = packed.split(self.sizes)
        rows, counts, indices = (part.view(torch.int32) for part in parts)
        indptr = torch.zeros(self.shape[0] + 1, dtype=torch.int64, device=packed.device)
        indptr[rows.long() + 1] = counts.long()
        csr = CSR(indptr.cumsum(0), indices, None, self.shape[1])
        return csr, None if self.dtype is None else values.clone().view(self.dtype)  # a copy, for alignment


def _pack(csr: CSR, values: Tensor | None) -> tuple[_Form, Tensor]:
    counts = csr.indptr.diff()
    rows = counts.nonzero().view(-1)
    parts = [rows.int(), counts[rows].int(), csr.indices, *([] if values is None else [values])]
    form = _Form((csr.num_rows, csr.num_cols), len(rows), csr.num_edges, None if values is None else values.dtype)
    return form, torch.cat([part.contiguous().view(torch.uint8) for part in parts])


class SummaMatrix(Matrix):
    """Blocks of a matrix over all nodes and of its transpose, for 2D and 3D products.

    Memory in addition to the operands: the matrix blocks of this rank's row and layer, or of three stages; the blocks of rows of
    three stages; and the partial sums of a block row's columns.

    Args:
        entries: entries of the matrix whose row this rank owns, in relabeled ids.
        cube: process grid.
        offsets: first node of each rank and the end, ``[P + 1]``.
        world, meter: the ranks, and the traffic counter.
        keep_blocks: whether blocks of the matrix are sent once, at distribution, since the matrix is constant. If False, they are
            sent in each product.
    """

    def __init__(
        self, entries: Triples, cube: ProcessCube, offsets: Ids, world: World, meter: Meter, keep_blocks: bool = True
    ) -> None:
        self.keep_blocks = keep_blocks
        self.cube, self.offsets, self.world, self.meter = cube, offsets, world, meter
        self.row, self.column, self.layer = cube.place(world.rank)
        self._sizes = np.diff(offsets[:: cube.side]).tolist()  # of each block
        self._dtype = None if entries.value is None else entries.value.dtype
        self._blocks = [self._distribute(entries), self._distribute(entries.transpose())]

    def _distribute(self, entries: Triples) -> list[tuple[_Form, Tensor | None]]:
        """Returns by stage the packed blocks of this rank's row and layer; None for blocks of other ranks that are not kept."""
        cube, world = self.cube, self.world
        starts = torch.from_numpy(np.ascontiguousarray(self.offsets[:: cube.side]))
        mine = distribute(entries, on_grid(cube, self.offsets), world)
        # Offset from ids to rows of the block row, which has blocks of several layers.
        shift = torch.zeros(cube.num_blocks, dtype=torch.int64)
        total = 0
        for block in cube.blocks_of_row(self.row):
            shift[block] = total - int(starts[block])
            total += self._sizes[block]
        block_of = torch.bucketize(mine.row.cpu().contiguous(), starts, right=True) - 1
        rows = mine.row + shift[block_of].to(mine.row.device)
        here = self.layer * cube.side + self.column
        csr = CSR.from_coo(rows, mine.col - int(starts[here]), total, self._sizes[here])
        form, own = _pack(csr.to_slot_order(), None if mine.value is None else csr.permute(mine.value))
        counts = torch.tensor([form.filled, form.entries], device=world.device)
        filled, num_entries = world.all_gather(counts, "Distributing a matrix").T.tolist()
        in_row = [cube.rank(self.row, stage, self.layer) for stage in range(cube.side)]
        widths = self._sizes[self.layer * cube.side :]
        forms = [_Form((total, width), filled[peer], num_entries[peer], self._dtype) for peer, width in zip(in_row, widths)]
        if not self.keep_blocks:
            return [(form, own if peer == world.rank else None) for peer, form in zip(in_row, forms)]
        blocks = [own if peer == world.rank else own.new_empty(sum(form.sizes)) for peer, form in zip(in_row, forms)]
        others = [(peer, block) for peer, block in zip(in_row, blocks) if peer != world.rank]
        sends = [(peer, own) for peer, _ in others if len(own)]
        world.transport.start_each(sends, [(peer, block) for peer, block in others if len(block)])()
        return list(zip(forms, blocks))

    @override
    def multiply(self, x: Tensor, call: Call) -> Tensor:
        cube, rank = self.cube, self.world.rank
        messages = ProductMessages(self.world, self.meter, call)
        blocks = self._blocks[call.direction == "backward"]
        columns = cube.widths(x.size(1))
        width = columns[self.column]
        rows = self._rows_to_columns(x, columns, messages)
        in_row = [cube.rank(self.row, stage, self.layer) for stage in range(cube.side)]
        in_column = [cube.rank(stage, self.column, self.layer) for stage in range(cube.side)]
        total = x.new_zeros((blocks[0][0].shape[0], width), dtype=torch.promote_types(x.dtype, torch.float32))

        def fetch(turn: int) -> tuple[Callable[[], None], _Form, Tensor, Tensor]:
            stage, to_row, to_column = cube.stage(rank, turn), *cube.readers(rank, turn)
            sends, receives, into = [(in_column[to_column], rows)], [], rows
            form, block = blocks[stage]
            if not self.keep_blocks:
                own = blocks[self.column][1]
                assert own is not None
                sends.append((in_row[to_row], own))
            if block is None:
                block = x.new_empty(sum(form.sizes), dtype=torch.uint8)
                receives.append((in_row[stage], block))
            if stage != self.row:
                into = x.new_empty((form.shape[1], width))
                receives.append((in_column[stage], into))
            return messages.start([(peer, each) for peer, each in sends if peer != rank], receives), form, block, into

        # Two turns ahead: if a rank already has the blocks of a turn, it transfers the next turn's at once.
        coming = [fetch(turn) for turn in range(min(2, cube.side))]
        for turn in range(cube.side):
            wait, form, block, into = coming.pop(0)
            wait()
            if turn + 2 < cube.side:
                coming.append(fetch(turn + 2))
            csr, values = form.unpack(block)
            spmm(csr, into, values, out=total, accumulate=True)
        out = self._columns_to_rows(self._sum_layers(total, messages), columns, messages)
        messages.end()
        return out

    def _rows_to_columns(self, x: Tensor, columns: list[int], messages: ProductMessages) -> Tensor:
        """Returns this rank's columns of all rows of its block, from whole rows ``[N, f]``."""
        ranks = self.cube.owners(self.layer * self.cube.side + self.row)
        counts = np.diff(self.offsets[ranks.start : ranks.stop + 1]).tolist()
        parts = [part.contiguous() for part in x.split(columns, 1)]
        block = x.new_empty((sum(counts), columns[self.column]))
        pieces = block.split(counts)
        pieces[self.column].copy_(parts[self.column])
        messages.swap(ranks, parts, pieces)
        return block

    def _columns_to_rows(self, block: Tensor, columns: list[int], messages: ProductMessages) -> Tensor:
        """Returns this rank's whole rows, ``[N, f]``, from its columns of all rows of its block."""
        ranks = self.cube.owners(self.layer * self.cube.side + self.row)
        counts = np.diff(self.offsets[ranks.start : ranks.stop + 1]).tolist()
        pieces = block.split(counts)
        parts = [block.new_empty((counts[self.column], width)) for width in columns]
        parts[self.column] = pieces[self.column]
        messages.swap(ranks, pieces, parts)
        return torch.cat(parts, 1)

    def _sum_layers(self, total: Tensor, messages: ProductMessages) -> Tensor:
        """Returns the sum over layers of the rows of this rank's block, in the order of layers."""
        cube = self.cube
        if cube.layers == 1:
            return total
        pieces = total.split([self._sizes[block] for block in cube.blocks_of_row(self.row)])
        return messages.sum([cube.rank(self.row, self.column, layer) for layer in range(cube.layers)], pieces)
