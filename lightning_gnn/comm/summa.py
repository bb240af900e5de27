"""2D and 3D products: blocks of the matrix travel as well as blocks of rows.

Source: CAGNET (SC'20) sections 4.3 and 4.4, SUMMA on a square of ranks, and on each layer of a cube; see
:class:`~lightning_gnn.partition.grid.ProcessCube` for who holds what. Rows come in and go out whole, as each rank owns them,
so that dense layers see all columns of a node: they are turned into columns of blocks inside a block's owners, and back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.grid import ProductMessages
from lightning_gnn.comm.group import World
from lightning_gnn.comm.matrix import Matrix, Triples, distribute, on_grid
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.kernels import CSR, spmm
from lightning_gnn.partition.grid import ProcessCube
from lightning_gnn.partition.shard import Ids


class _Block:
    """A block of the matrix as it travels: one piece of memory for its numbers.

    Attributes:
        packed: where rows begin, columns and values, as bytes.
        csr: its entries, in `packed`.
        values: in slot order, ``[E]``; None for ones.
    """

    def __init__(self, packed: Tensor, rows: int, cols: int, entries: int, dtype: torch.dtype | None) -> None:
        sizes = [8 * (rows + 1), 4 * entries]
        indptr, indices, values = packed.split([*sizes, len(packed) - sum(sizes)])
        self.packed = packed
        self.csr = CSR(indptr.view(torch.int64), indices.view(torch.int32), None, cols)
        self.values = None if dtype is None else values.clone().view(dtype)  # a copy, since it must be aligned

    @classmethod
    def of(cls, csr: CSR, values: Tensor | None) -> _Block:
        """Returns the block of entries and their values in slot order, packed once."""
        parts = [csr.indptr, csr.indices, *([] if values is None else [values])]
        packed = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
        return cls(packed, csr.num_rows, csr.num_cols, csr.num_edges, None if values is None else values.dtype)


class SummaMatrix(Matrix):
    """One rank's block of a matrix over all nodes and of its transpose.

    Memory beside the operands: a stage's block of the matrix and of rows, twice, and the partial sums of a block row's columns.

    Args:
        entries: the matrix's entries whose row this rank owns, in relabelled ids.
        cube: who stands where.
        offsets: first node of each rank and the end, ``[P + 1]``.
        world, meter: the ranks, and where traffic is counted.
    """

    def __init__(self, entries: Triples, cube: ProcessCube, offsets: Ids, world: World, meter: Meter) -> None:
        self.cube, self.offsets, self.world, self.meter = cube, offsets, world, meter
        self.row, self.column, self.layer = cube.place(world.rank)
        self._sizes = np.diff(offsets[:: cube.side]).tolist()  # of each block
        self._dtype = None if entries.value is None else entries.value.dtype
        self._blocks = [self._distribute(entries), self._distribute(entries.transpose())]

    def _distribute(self, entries: Triples) -> tuple[_Block, list[int]]:
        """Returns this rank's block, and how many entries those of its row and layer have."""
        cube = self.cube
        starts = torch.from_numpy(np.ascontiguousarray(self.offsets[:: cube.side]))
        mine = distribute(entries, on_grid(cube, self.offsets), self.world)
        # From ids to rows of the block row, which is blocks of several layers, and to columns of the block.
        shift = torch.zeros(cube.num_blocks, dtype=torch.int64)
        total = 0
        for block in cube.blocks_of_row(self.row):
            shift[block] = total - int(starts[block])
            total += self._sizes[block]
        block_of = torch.bucketize(mine.row.cpu().contiguous(), starts, right=True) - 1
        rows = mine.row + shift[block_of].to(mine.row.device)
        here = self.layer * cube.side + self.column
        csr = CSR.from_coo(rows, mine.col - int(starts[here]), total, self._sizes[here])
        values = None if mine.value is None else csr.permute(mine.value)
        counts = self.world.all_gather(torch.tensor([csr.num_edges], device=self.world.device), "Distributing a matrix")
        same_row = [int(counts[cube.rank(self.row, stage, self.layer)]) for stage in range(cube.side)]
        return _Block.of(csr, values), same_row

    @override
    def multiply(self, x: Tensor, call: Call) -> Tensor:
        cube, rank = self.cube, self.world.rank
        messages = ProductMessages(self.world, self.meter, call)
        own, counts = self._blocks[call.direction == "backward"]
        columns = cube.widths(x.size(1))
        width = columns[self.column]
        rows = self._turned(x, columns, messages)
        in_row = [cube.rank(self.row, stage, self.layer) for stage in range(cube.side)]
        in_column = [cube.rank(stage, self.column, self.layer) for stage in range(cube.side)]
        packed = own.packed
        total = x.new_zeros((own.csr.num_rows, width), dtype=torch.promote_types(x.dtype, torch.float32))

        def fetch(stage: int) -> tuple[Callable[[], None], Callable[[], tuple[_Block, Tensor]]]:
            size = self._sizes[self.layer * cube.side + stage]
            sends, receives = [], []
            block, into = packed, rows
            if stage == self.column:
                sends += [(peer, packed) for peer in in_row if peer != rank]
            else:
                item = 0 if self._dtype is None else self._dtype.itemsize
                block = packed.new_empty(8 * (own.csr.num_rows + 1) + (4 + item) * counts[stage])
                receives.append((in_row[stage], block))
            if stage == self.row:
                sends += [(peer, rows) for peer in in_column if peer != rank]
            else:
                into = x.new_empty((size, width))
                receives.append((in_column[stage], into))

            def take() -> tuple[_Block, Tensor]:
                if stage == self.column:
                    return own, into
                return _Block(block, own.csr.num_rows, size, counts[stage], self._dtype), into

            return messages.start(sends, receives), take

        coming = fetch(0)
        for stage in range(cube.side):
            wait, take = coming
            wait()
            if stage + 1 < cube.side:
                coming = fetch(stage + 1)
            block, into = take()
            spmm(block.csr, into, block.values, out=total, accumulate=True)
        out = self._turned_back(self._summed(total, messages), columns, messages)
        messages.end()
        return out

    def _turned(self, x: Tensor, columns: list[int], messages: ProductMessages) -> Tensor:
        """Returns this rank's columns of all rows of its block, of whole rows ``[N, f]``."""
        ranks = self.cube.owners(self.layer * self.cube.side + self.row)
        counts = np.diff(self.offsets[ranks.start : ranks.stop + 1]).tolist()
        parts = [part.contiguous() for part in x.split(columns, 1)]
        block = x.new_empty((sum(counts), columns[self.column]))
        pieces = block.split(counts)
        pieces[self.column].copy_(parts[self.column])
        messages.swap(ranks, parts, pieces)
        return block

    def _turned_back(self, block: Tensor, columns: list[int], messages: ProductMessages) -> Tensor:
        """Returns this rank's whole rows, ``[N, f]``, of its columns of all rows of its block."""
        ranks = self.cube.owners(self.layer * self.cube.side + self.row)
        counts = np.diff(self.offsets[ranks.start : ranks.stop + 1]).tolist()
        pieces = block.split(counts)
        parts = [block.new_empty((counts[self.column], width)) for width in columns]
        parts[self.column] = pieces[self.column]
        messages.swap(ranks, pieces, parts)
        return torch.cat(parts, 1)

    def _summed(self, total: Tensor, messages: ProductMessages) -> Tensor:
        """Returns the sum over layers of the rows of this rank's block, in the order of layers."""
        cube = self.cube
        if cube.layers == 1:
            return total
        pieces = total.split([self._sizes[block] for block in cube.blocks_of_row(self.row)])
        return messages.sum([cube.rank(self.row, self.column, layer) for layer in range(cube.layers)], pieces)
