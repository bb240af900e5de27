"""The product that goes over one process grid or another: by its direction, and by what a row and a partial sum of it take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange, Matrix, Triples
from lightning_gnn.comm.group import World
from lightning_gnn.comm.matrix import SparseMatrix
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.partition.shard import HaloPlan, Ids, owners_of
from lightning_gnn.strategies.spmm.grid import ProcessCube
from lightning_gnn.strategies.spmm.summa import SummaMatrix
from lightning_gnn.strategies.spmm.traffic import Product, busiest, own_edge_traffic, product_words, products


class MatrixByCall(Matrix):
    """Multiplies in the way in which the busiest rank sends or receives the fewest bytes, of equals all ranks.

    Rows travel as they are, and partial sums in at least float32. So float32 rows take one way whatever their width, and bfloat16
    ones may take another one backward than forward: the one in which rows travel rather than sums.

    A matrix is distributed in a way when a product first takes it. All ranks know what each way sends, so they choose alike.

    Memory beside the matrices: the entries of this rank's rows.

    Args:
        entries, offsets, world, meter: see :class:`~lightning_gnn.strategies.spmm.blocks.BlockMatrix`.
        plan: the rows that others read of this rank's.
    """

    def __init__(self, entries: Triples, plan: HaloPlan, offsets: Ids, world: World, meter: Meter) -> None:
        self._entries, self._offsets, self._world, self._meter = entries, offsets, world, meter
        self._products = products(world.size)
        reach = _reach(entries, plan, offsets, world)
        own = np.stack([own_edge_traffic(product, reach, world.rank) for product in self._products])
        of_all = world.all_gather(torch.from_numpy(own).to(world.device), "Counting what products send").cpu().numpy()
        # By product, what, sender and receiver: own rows go to others, and others' partial sums come to their owner.
        sent, summed = of_all[:, :, 0].transpose(1, 0, 2), of_all[:, :, 1].transpose(1, 2, 0)
        self._rows = np.stack([sent, summed], 1)
        self._taken: dict[tuple[int, torch.dtype, bool], Product] = {}
        self._made: dict[Product, Matrix] = {}

    def product(self, columns: int, dtype: torch.dtype, backward: bool) -> Product:
        """Returns the way that rows of so many columns take."""
        key = columns, dtype, backward
        if key not in self._taken:
            row_bytes = self._world.transport.row_bytes
            of_row = row_bytes(columns, dtype) / max(1, columns)
            of_sum = row_bytes(columns, torch.promote_types(dtype, torch.float32)) / max(1, columns)
            costs = [
                busiest(product_words(product, self._offsets, rows, columns, backward), of_row, of_sum)
                for product, rows in zip(self._products, self._rows)
            ]
            self._taken[key] = self._products[costs.index(min(costs))]
        return self._taken[key]

    @property
    @override
    def exchanges(self) -> Sequence[Exchange]:
        return [each for matrix in self._made.values() for each in matrix.exchanges]

    @override
    def multiply(self, x: Tensor, call: Call) -> Tensor:
        product = self.product(x.size(1), x.dtype, call.direction == "backward")
        if product not in self._made:
            # Evaluation may come first, and an inference tensor could not take part in training later.
            with torch.inference_mode(False), torch.no_grad():
                self._made[product] = self._make(product)
        return self._made[product].multiply(x, call)

    def _make(self, product: Product) -> Matrix:
        if isinstance(product.grid, ProcessCube):
            return SummaMatrix(self._entries, product.grid, self._offsets, self._world, self._meter)
        holders = partial(product.holders, self._offsets)
        return SparseMatrix(self._entries, holders, self._offsets, self._world, self._meter)


def _reach(entries: Triples, plan: HaloPlan, offsets: Ids, world: World) -> np.ndarray:
    """Returns whether each own node has an entry in its column, then in its row, with a node of each rank, ``[2, N, P]``."""
    first, stop = offsets[world.rank : world.rank + 2]
    row, col = entries.row.cpu().numpy(), entries.col.cpu().numpy()
    reach = np.zeros((2, int(stop - first), world.size), np.bool_)
    for rank, rows in enumerate(plan.send_rows):
        reach[0, rows, rank] = True
    reach[0, col[(col >= first) & (col < stop)] - first, world.rank] = True
    reach[1, row - first, owners_of(offsets, col)] = True
    return reach
