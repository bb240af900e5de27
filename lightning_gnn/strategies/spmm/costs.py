"""Communication volume and time of one exchange of each product on a process grid, for ``lightning-gnn plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_gnn.extensions.plans.exchanges import (
    ExchangeCost,
    Workload,
    edge_exchange,
    edge_traffic,
    exchange_costs,
    sent_directly,
)
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.strategies.spmm.grid import ProcessCube, ProcessGrid, legal_replications
from lightning_gnn.strategies.spmm.strategy import AnyProductScheme, CubeScheme, SpMMScheme
from lightning_gnn.strategies.spmm.traffic import (
    block_cost,
    block_traffic,
    busiest,
    choose,
    matrix_traffic,
    product_words,
    products,
    sparse_cost,
    summa_traffic,
    summa_work,
)


@exchange_costs.register
def _(scheme: SpMMScheme, work: Workload, topology: Topology | None) -> Sequence[ExchangeCost]:
    found = grid_exchanges(work, topology)
    own = [each.choice for each in found[not scheme.sparsity_aware :: 2] if each.choice is not None]
    name = grid_name(scheme.replication_factor or choose(own, None).grid.replication, scheme.sparsity_aware)
    return [replace(each, followed=each.scheme == name) for each in found]


@exchange_costs.register
def _(scheme: CubeScheme, work: Workload, topology: Topology | None) -> Sequence[ExchangeCost]:
    try:
        cube = ProcessCube.of(work.relation.num_devices, scheme.dimensions)
    except ValueError:  # neither a square nor a cube
        return []
    return [replace(cube_exchange(work, topology, cube, scheme.keep_blocks), followed=True)]


@exchange_costs.register
def _(scheme: AnyProductScheme, work: Workload, topology: Topology | None) -> Sequence[ExchangeCost]:
    return product_exchanges(work, topology)


def grid_name(replication: int, sparsity_aware: bool) -> str:
    name = "spmm_1d" if replication == 1 else f"spmm_15d c={replication}"
    return name if sparsity_aware else f"{name} blocks"


def grid_exchanges(work: Workload, topology: Topology | None) -> list[ExchangeCost]:
    """Returns the exchanges of CAGNET's 1D and 1.5D products by legal replication factor, sparsity-aware and in blocks."""
    offsets, ranks = work.relation.offsets, work.relation.num_devices
    halos = [work.relation.halo(rank) for rank in range(ranks)]
    found = []
    for c in legal_replications(ranks):
        grid = ProcessGrid(ranks, c)
        holder = grid.holders(offsets, work.edge_index[1], work.edge_index[0])
        paper_rows = grid.paper_words(int(offsets[-1]), 1)
        sums = int(edge_traffic(holder, offsets, work.edge_index)[1].sum())
        choice = sparse_cost(grid, offsets, halos, sums, work.feature_bytes)
        sparse = edge_exchange(grid_name(c, True), work, topology, holder, paper_rows=paper_rows, choice=choice)
        blocks = sent_directly(
            grid_name(c, False),
            block_traffic(grid, offsets),
            work,
            topology,
            edges=sparse.edges,
            paper_rows=paper_rows,
            choice=block_cost(grid, offsets, work.feature_bytes),
        )
        found += [sparse, blocks]
    return found


def product_exchanges(work: Workload, topology: Topology | None) -> list[ExchangeCost]:
    """Returns the exchange of each of :func:`~lightning_gnn.strategies.spmm.traffic.products`.

    The exchange that a forward product uses is marked ``followed``. Mirrored products are omitted if they exchange the same
    number of rows, as in undirected graphs.
    """
    offsets, (source, target) = work.relation.offsets, work.edge_index
    named = {each.scheme: each for each in grid_exchanges(work, topology)}
    found: list[ExchangeCost] = []
    costs: list[tuple[float, float]] = []
    for product in products(work.relation.num_devices):
        holder = product.holders(offsets, target, source)
        words = product_words(product, offsets, edge_traffic(holder, offsets, work.edge_index), work.columns, False)
        costs.append(busiest(words, work.element_bytes, max(4, work.element_bytes)))
        if isinstance(product.grid, ProcessGrid):
            each = named.get(str(product)) or edge_exchange(str(product), work, topology, holder)
        else:
            each = cube_exchange(work, topology, product.grid)
        least = costs[-1] < min(costs[:-1], default=(np.inf, np.inf))
        if least:
            found = [replace(other, followed=False) for other in found]
        if least or not product.mirrored or each.rows != found[-1].rows:
            found.append(replace(each, followed=least))
    return found


def cube_exchange(work: Workload, topology: Topology | None, cube: ProcessCube, keep_blocks: bool = True) -> ExchangeCost:
    """Returns the exchange of the 2D or 3D product. With `keep_blocks`, the matrix is not sent again."""
    offsets, columns = work.relation.offsets, work.columns
    matrix = matrix_traffic(cube, offsets, work.edge_index, work.value_bytes)
    if keep_blocks:
        matrix[:] = 0
    # Words and the matrix, in units of rows: narrower rows give the matrix a larger share.
    traffic = summa_traffic(cube, offsets, columns) / columns + matrix / work.row_bytes
    return sent_directly(
        f"spmm_{cube.dimensions}d",
        traffic,
        work,
        topology,
        rows=round(cube.words(offsets, columns) / columns),
        edges=summa_work(cube, offsets, work.edge_index, columns) / columns,
        matrix_bytes=int(matrix.sum()),
    )
