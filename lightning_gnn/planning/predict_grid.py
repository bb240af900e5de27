"""What training is predicted to take with products on a process grid (``spmm_1d`` to ``spmm_3d``), and what a product moves.

Layers add up to epochs as described at the top of ``planning/predict.py``. Stages follow each other as in a plan, so a product
takes the sum over its stages of their busiest hop. Each rank sums over the entries that it was dealt, not over its own nodes'.
Where edges have weights, blocks of the matrix (2D and 3D) carry them. A backward product is taken to cost what the forward one
does, though the transpose of a directed graph is dealt differently where blocks travel.

n nodes, P ranks, c the replication factor, f columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.partition.grid import ProcessCube, ProcessGrid, legal_replications
from lightning_gnn.partition.shard import Ids
from lightning_gnn.planning.grid_cost import GridCost, block_cost, choose, sparse_cost
from lightning_gnn.planning.grid_traffic import (
    block_traffic,
    matrix_traffic,
    sparse_traffic,
    summa_traffic,
    summa_work,
)
from lightning_gnn.planning.plan import check_devices
from lightning_gnn.planning.plan_cost import PlanCost, direct_cost
from lightning_gnn.planning.predict import Prediction, Workload, predicted
from lightning_gnn.planning.topology import Topology

Counts = NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True)
class Product:
    """One form of the product, and what it moves.

    Attributes:
        scheme: the strategy, its replication factor and form: ``"spmm_15d c=2 blocks"``.
        rows: that all ranks together send in one product; of 2D and 3D words over columns.
        matrix_bytes: of the matrix's blocks, sent in each product (2D and 3D).
        paper_rows: by the count of the paper's algorithm, which sends whole blocks; None where it has no formula.
        cost: what ``spmm_15d`` knows of it when it chooses its replication factor; None of 2D and 3D. Its `rows` are an upper
            bound if sparsity-aware.
        edge_balance: edges that the rank with most sums over, over the mean; of 2D and 3D by columns too.
        prediction: on a topology; None without one.
    """

    scheme: str
    rows: int
    matrix_bytes: int
    paper_rows: int | None
    cost: GridCost | None
    edge_balance: float
    prediction: Prediction | None

    @property
    def seconds(self) -> float | None:
        """Of one product; None without a topology, or if its links do not allow it."""
        return self.prediction.exchange_seconds if self.prediction is not None and self.prediction.applies else None

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers, for JSON; None for what is unknown."""
        cost = self.cost
        return {
            "scheme": self.scheme,
            "replication": None if cost is None else cost.grid.replication,
            "rows": self.rows,
            "rows_to_choose_by": None if cost is None else cost.rows,
            "paper_rows": self.paper_rows,
            "matrix_bytes": self.matrix_bytes,
            "edge_balance": self.edge_balance,
            "bytes_held": None if cost is None else cost.bytes_held,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Products:
    """All products that so many ranks can make.

    Attributes:
        sparse, blocks: 1D and 1.5D by legal replication factor, ascending.
        cubes: 2D and 3D, as far as P is a square or a cube.
        chosen: the replication factor that ``spmm_15d`` chooses, sparsity-aware and not, if memory does not limit it.
    """

    sparse: tuple[Product, ...]
    blocks: tuple[Product, ...]
    cubes: tuple[Product, ...]
    chosen: tuple[int, int]

    @property
    def replications(self) -> tuple[int, ...]:
        """All legal replication factors."""
        return tuple(each.cost.grid.replication for each in self.sparse if each.cost is not None)

    @property
    def all(self) -> tuple[Product, ...]:
        return tuple(each for pair in zip(self.sparse, self.blocks) for each in pair) + self.cubes

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and lists, for JSON."""
        names = ("sparse", "blocks", "cubes")
        chosen = dict(zip(names[:2], self.chosen))
        return {name: [each.as_dict() for each in getattr(self, name)] for name in names} | {"chosen": chosen}


def grid_name(replication: int, sparsity_aware: bool) -> str:
    """Returns what a product of 1D or 1.5D is called."""
    name = "spmm_1d" if replication == 1 else f"spmm_15d c={replication}"
    return name if sparsity_aware else f"{name} blocks"


def predict_products(work: Workload, topology: Topology | None) -> Products:
    """Returns all products of as many ranks as the graph has parts; their times if there is a topology.

    Raises:
        ValueError: the topology is of another number of devices than the workload.
    """
    ranks = work.relation.num_devices
    if topology is not None:
        check_devices(work.relation, topology)
    halos = [work.relation.halo(rank) for rank in range(ranks)]
    sparse, blocks = [], []
    for c in legal_replications(ranks):
        grid = ProcessGrid(ranks, c)
        edges = np.bincount(
            grid.holders(work.relation.offsets, work.edge_index[1], work.edge_index[0]), minlength=ranks
        )
        sparse.append(_sparse(work, grid, halos, edges, topology))
        blocks.append(_blocks(work, grid, edges, topology))
    cubes = []
    for dimensions in (2, 3):
        try:
            cube = ProcessCube.of(ranks, dimensions)
        except ValueError:  # no square, no cube
            continue
        cubes.append(_summa(work, cube, f"spmm_{dimensions}d", topology))
    chosen = [choose([each.cost for each in form if each.cost is not None], None) for form in (sparse, blocks)]
    replications = chosen[0].grid.replication, chosen[1].grid.replication
    return Products(tuple(sparse), tuple(blocks), tuple(cubes), replications)


def _sparse(work: Workload, grid: ProcessGrid, halos: list[Ids], edges: Counts, topology: Topology | None) -> Product:
    offsets = work.relation.offsets
    traffic = sparse_traffic(grid, offsets, work.edge_index)
    nodes = int(offsets[-1])
    held = float((nodes + traffic[0].sum()) / max(1, nodes))
    name, rows = grid_name(grid.replication, True), int(traffic.sum())
    cost = sparse_cost(grid, offsets, halos, int(traffic[1].sum()), work.feature_bytes)
    prediction = _predicted(work, name, lambda _: traffic, rows, edges, held, topology)
    return Product(name, rows, 0, grid.paper_words(nodes, 1), cost, _balance(edges), prediction)


def _blocks(work: Workload, grid: ProcessGrid, edges: Counts, topology: Topology | None) -> Product:
    offsets = work.relation.offsets
    traffic = block_traffic(grid, offsets)
    name, rows = grid_name(grid.replication, False), int(traffic.sum())
    cost = block_cost(grid, offsets, work.feature_bytes)
    prediction = _predicted(work, name, lambda _: traffic, rows, edges, 0.0, topology)
    return Product(name, rows, 0, grid.paper_words(int(offsets[-1]), 1), cost, _balance(edges), prediction)


def _summa(work: Workload, cube: ProcessCube, name: str, topology: Topology | None) -> Product:
    offsets = work.relation.offsets
    matrix = matrix_traffic(cube, offsets, work.edge_index, work.value_bytes)

    def in_rows(row_bytes: int) -> Counts:
        """Words and the matrix in units of rows: the narrower these are, the more the matrix counts."""
        columns = row_bytes // work.element_bytes
        return summa_traffic(cube, offsets, columns) / columns + matrix / row_bytes

    edges = summa_work(cube, offsets, work.edge_index, work.columns) / work.columns
    rows = round(cube.words(offsets, work.columns) / work.columns)
    prediction = _predicted(work, name, in_rows, rows, edges, 0.0, topology)
    return Product(name, rows, int(matrix.sum()), None, None, _balance(edges), prediction)


def _balance(edges: Counts) -> float:
    return float(edges.max() / edges.mean()) if edges.any() else 1.0


def _predicted(
    work: Workload,
    name: str,
    traffic: Callable[[int], Counts],
    rows: int,
    edges: Counts,
    held: float,
    topology: Topology | None,
) -> Prediction | None:
    """Returns the prediction for rows that travel as `traffic` says for their bytes, ``[S, P, P]``."""
    if topology is None:
        return None

    def cost(row_bytes: int) -> PlanCost:
        return direct_cost(traffic(row_bytes), topology)

    try:
        of_layer = cost(work.row_bytes)
        return predicted(
            work,
            name,
            lambda row_bytes: cost(row_bytes).seconds(row_bytes),
            rows,
            edges=edges,
            held=held,
            cost=of_layer,
        )
    except ValueError as error:  # two devices without a link
        return Prediction(name, str(error))
