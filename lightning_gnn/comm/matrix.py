"""Matrix over all nodes whose entries are distributed over ranks, and the exchanges of its products.

n nodes, N local nodes of a rank, P ranks, E entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange, HaloExchange, Matrix, Triples
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.comm.transport import by_peer
from lightning_gnn.data.lazy_ids import stored_ids
from lightning_gnn.data.shards import Shard
from lightning_gnn.kernels import CSR, spmm, take_rows
from lightning_gnn.partition.shard import HaloPlan, Ids, halo_plan

MakeExchange = Callable[[HaloPlan, Sequence[Ids], Ids, World, Meter], Exchange]
"""Factory of an exchange of rows; all ranks call it.

Arguments: plan of the direct messages of this rank, halo of each rank, first id of each rank and the end, world, meter.
"""


def send_directly(rows: HaloPlan, halos: Sequence[Ids], offsets: Ids, world: World, meter: Meter) -> Exchange:
    """Returns the exchange by direct messages between owners and ranks that read rows; see :data:`MakeExchange`."""
    return HaloExchange(rows, world, meter)


Holders = Callable[[Ids, Ids], Ids]
"""Returns the rank that multiplies each entry, ``[E]``, from its row and column."""


class EdgeHolders:
    """Function that maps edges to the ranks that compute them; this rank computes the self-loops that layers add.

    Args:
        target, source: relabeled ids of this rank's in-edges, ``[E_r]``.
        holders: rank of each edge, ``[E_r]``; parallel edges are matched in order.
        rank: this rank.
        num_nodes: number of nodes of the graph.
    """

    def __init__(self, target: Ids, source: Ids, holders: Ids, rank: int, num_nodes: int) -> None:
        keys = target * num_nodes + source
        order = np.argsort(keys, kind="stable")
        self._keys, self._holders = keys[order], holders[order]
        self._has_parallel = bool((self._keys[1:] == self._keys[:-1]).any())
        self._rank, self._num_nodes = rank, num_nodes

    def __call__(self, row: Ids, col: Ids) -> Ids:
        if not len(self._keys):
            return np.full(len(row), self._rank)
        keys = row * self._num_nodes + col
        places = np.searchsorted(self._keys, keys)
        if self._has_parallel:
            order = np.argsort(keys, kind="stable")
            in_order = keys[order]
            before = np.arange(len(keys)) - np.searchsorted(in_order, in_order)  # number of earlier parallel entries
            last = np.searchsorted(self._keys, in_order, side="right") - 1
            places[order] = np.minimum(places[order] + before, np.maximum(last, places[order]))
        places = places.clip(max=len(self._keys) - 1)
        return np.where(self._keys[places] == keys, self._holders[places], self._rank)


def distribute(entries: Triples, holders: Holders, world: World) -> Triples:
    """Send each entry to the rank that multiplies it; returns the entries of this rank, in rank order. All ranks must call it.

    Args:
        entries: entries of this rank's rows, on its device.
        holders: function that returns the rank that multiplies an entry.
    """
    holder = torch.from_numpy(holders(entries.row.cpu().numpy(), entries.col.cpu().numpy()))
    sent = torch.bincount(holder, minlength=world.size).to(world.device)
    counts = sent.tolist()
    arriving = world.all_gather(sent, "Distributing a matrix over the ranks")[:, world.rank].tolist()
    sorted_entries = entries[torch.argsort(holder, stable=True).to(entries.row.device)]

    def exchange(values: Tensor) -> Tensor:
        into = values.new_empty(sum(arriving))
        into.split(arriving)[world.rank].copy_(values.split(counts)[world.rank])
        sends, receives = (_messages(*each, world.rank) for each in ((values, counts), (into, arriving)))
        world.transport.start_each(sends, receives)()
        return into

    value = None if sorted_entries.value is None else exchange(sorted_entries.value)
    return Triples(exchange(sorted_entries.row), exchange(sorted_entries.col), value)


def _messages(values: Tensor, counts: Sequence[int], rank: int) -> list[tuple[int, Tensor]]:
    return [(peer, part) for peer, part in by_peer(values, counts) if peer != rank]


class JoinedExchange:
    """Fused exchange: S of one exchange and the transpose of another, with half the messages for latency-bound steps.

    N local nodes, C halo rows of `copies`, R of `results`.

    Args:
        copies: exchange that gathers halo rows.
        results: exchange that adds values for halo rows at their owners.
    """

    def __init__(self, copies: HaloExchange, results: HaloExchange) -> None:
        self._copies, self._results = copies, results
        device = copies.world.device
        self._out_counts, self._out = _side_by_side(copies.send_counts, results.recv_counts, device)
        self._into_counts, self._into = _side_by_side(copies.recv_counts, results.send_counts, device)

    def start(self, x: Tensor, halo: Tensor, partial: Tensor, call: Call) -> Callable[[], Callable[[Tensor], None]]:
        """Starts both exchanges; returns a function that waits for both.

        Args:
            x: local rows, ``[N, F]``, contiguous.
            halo: receive buffer of the halo rows of `copies`, ``[C, F]``.
            partial: values for the halo rows of `results`, ``[R, F]``, of the dtype of `x`.
            call: identifier of the exchange.

        Returns:
            ``wait()``, which fills `halo` and returns ``X adds the received values to ``own`` ``[N, F]``.
        """
        copies, results, width = self._copies, self._results, x.shape[1:]
        began = copies.now(call)
        message = copies.world.transport.scratch((sum(self._out_counts), *width), x.dtype)
        for places, rows in zip(self._out, (x.index_select(0, copies.send_rows), partial)):
            message.index_copy_(0, places, rows)
        into = copies.buffers.take((sum(self._into_counts), *width), x.dtype)
        wait = copies.send(message, self._out_counts, into, self._into_counts, call, began)

        def wait_for_both() -> Callable[[Tensor], None]:
            wait()
            of_copies, of_results = self._into
            take_rows(into, of_copies, halo)
            arrived = into.index_select(0, of_results)
            copies.buffers.give_back(into)
            return lambda out: results.add_arrived(out, arrived, call)

        return wait_for_both


def _side_by_side(first: Sequence[int], second: Sequence[int], device: torch.device) -> tuple[list[int], Sequence[Tensor]]:
    """Returns the row counts per rank, ``[P]``, and the positions of the rows of both exchanges in the joint messages.

    Each message holds the rows of the first exchange, then the rows of the second.
    """
    peer = torch.cat([torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)) for counts in (first, second)])
    places = peer.argsort(stable=True).argsort().to(device)
    return [sum(both) for both in zip(first, second)], places.split([sum(first), sum(second)])


class SparseMatrix(Matrix):
    """Matrix product that sends only rows read by a nonzero and only partial sums of a nonzero, for any distribution of nonzeros.

    On a process grid, this is the later sparsity-aware communication of CAGNET's authors. For a vertex cut, it is the scatter
    from masters to mirrors and the gather back (CDFGNN section 3). Rows are sent between their owner and each rank that reads
    or adds to them, directly or down the trees of a plan. Partial results are sent up such trees, and relays add them.

    Args:
        entries, offsets: see :class:`~lightning_gnn.strategies.spmm.matrices.BlockMatrix`.
        holders: function that returns the rank that multiplies an entry.
        make_exchange: factory of the exchanges of columns and of partial results.
        row_offsets: offsets of the nodes of the rows, if they are other nodes than the columns; the matrix is then not square.

    Attributes:
        columns: exchange that gathers the rows of columns.
        rows: exchange that reduces partial results of rows; for the transpose, it gathers rows.
    """

    def __init__(
        self,
        entries: Triples,
        holders: Holders,
        offsets: Ids,
        world: World,
        meter: Meter,
        make_exchange: MakeExchange = send_directly,
        row_offsets: Ids | None = None,
    ) -> None:
        self.world, self._make_exchange = world, make_exchange
        mine = distribute(entries, holders, world)
        self.columns, self._col = self._exchange(mine.col, offsets, meter)
        self.rows, self._row = self._exchange(mine.row, offsets if row_offsets is None else row_offsets, meter)
        self._value = mine.value
        # Partial results that read no halo rows need not wait for them: one message per rank carries both.
        self._reads_others = bool(((self._row >= self.rows.num_owned) & (self._col >= self.columns.num_owned)).any())
        of_all = world.all_gather_object((self._reads_others, self.columns.num_halo, self.rows.num_halo))
        some_read_others, copies, results = (any(each) for each in zip(*of_all))
        direct = all(type(each) is HaloExchange for each in self.exchanges)
        self._joins = direct and copies and results and not some_read_others

    @property
    @override
    def exchanges(self) -> Sequence[Exchange]:
        return self.columns, self.rows

    @cached_property
    def csr(self) -> CSR:
        """This rank's block as one matrix: local rows and rows that it adds to, by local columns and columns that it reads."""
        shape = [of.num_owned + of.num_halo for of in (self.rows, self.columns)]
        return CSR.from_coo(self._row, self._col, *shape).to_slot_order()

    @cached_property
    def _parts(self) -> dict[tuple[bool, bool], _Part]:
        """Blocks by local row and local column, so that local blocks are multiplied while halo rows arrive."""
        return {(own_row, own_col): self._part(own_row, own_col) for own_row in (True, False) for own_col in (True, False)}

    def _part(self, own_row: bool, own_col: bool) -> _Part:
        """Returns the entries of local or halo rows and local or halo columns."""
        row, col, rows, columns = self._row, self._col, self.rows, self.columns
        ids = (((row < rows.num_owned) == own_row) & ((col < columns.num_owned) == own_col)).nonzero().view(-1)
        csr = CSR.from_coo(
            row[ids] - (0 if own_row else rows.num_owned),
            col[ids] - (0 if own_col else columns.num_owned),
            rows.num_owned if own_row else rows.num_halo,
            columns.num_owned if own_col else columns.num_halo,
        )
        values = None if self._value is None else csr.permute(self._value[ids])
        csr = csr.to_slot_order()
        return _Part(csr, values, None if values is None else csr.transpose().permute(values))

    def _exchange(self, ids: Tensor, offsets: Ids, meter: Meter) -> tuple[Exchange, Tensor]:
        """Returns the exchange for the halo nodes in `ids`, and `ids`, in their order, as local ids: halo nodes last."""
        first, end = map(int, offsets[self.world.rank : self.world.rank + 2])
        own = (ids >= first) & (ids < end)
        halo, position = torch.unique(ids[~own], return_inverse=True)
        halos = self.world.all_gather_object(halo.cpu().numpy())
        rows = halo_plan(self.world.rank, offsets, halos)
        exchange = self._make_exchange(rows, halos, offsets, self.world, meter)
        local = ids - first
        local[~own] = end - first + position
        return exchange, local

    @cached_property
    def _joined_exchanges(self) -> dict[bool, JoinedExchange]:
        """Fused exchanges by whether the matrix is transposed."""
        assert isinstance(self.columns, HaloExchange) and isinstance(self.rows, HaloExchange)
        return {False: JoinedExchange(self.columns, self.rows), True: JoinedExchange(self.rows, self.columns)}

    @override
    def multiply(self, x: Tensor, call: Call) -> Tensor:
        transposed = call.direction == "backward"
        sources, targets = (self.rows, self.columns) if transposed else (self.columns, self.rows)
        dtype = torch.promote_types(x.dtype, torch.float32)
        arrived = sources.buffers.take((sources.num_halo, x.size(1)), x.dtype)
        joins = self._joins and x.dtype == dtype
        wait = None if sources.idle or joins else sources.start_expand(x, arrived, call)

        def add(own_row: bool, own_col: bool, out: Tensor) -> None:
            """Multiply with local rows, which come first and overwrite, or with received rows."""
            part = self._parts[(own_col, own_row) if transposed else (own_row, own_col)]
            if own_col or part.csr.num_edges:
                csr, values = part.csr, part.values
                if transposed:
                    csr, values = csr.transpose(in_list=values is not None), part.values_transposed
                spmm(csr, x if own_col else arrived, values, out=out, accumulate=not own_col)

        own = x.new_empty((targets.num_owned, x.size(1)), dtype=dtype)
        partial = targets.buffers.take((targets.num_halo, x.size(1)), dtype)
        if len(partial):
            add(False, True, partial)
        if joins:
            both = self._joined_exchanges[transposed].start(x, arrived, partial, call)
            add(True, True, own)
            add_arrived = both()
            add(True, False, own)
            add_arrived(own)
        else:
            # Partial sums that read no halo rows are sent at once, while halo rows arrive, unless that exchange has several
            # stages.
            later = not targets.idle and (self._reads_others or sources.in_stages)
            finish = None if targets.idle or later else targets.start_reduce(partial, call)
            # Local products overlap with the halo rows in progress or, without any, with the partial sums.
            if wait is not None:
                add(True, True, own)
                wait()
            if self._reads_others:
                add(False, False, partial)
            if later:
                finish = targets.start_reduce(partial, call)
            if wait is None:
                add(True, True, own)
            add(True, False, own)
            if finish is not None:
                finish(own)
        sources.buffers.give_back(arrived)
        targets.buffers.give_back(partial)
        return own


@dataclass(frozen=True)
class _Part:
    """Entries of a matrix, and their values in the slot order of the matrix and of its transpose, ``[E]``; None for ones."""

    csr: CSR
    values: Tensor | None
    values_transposed: Tensor | None


def spread_edges(
    shard: Shard, holders: Ids, world: World, meter: Meter, make_exchange: MakeExchange = send_directly
) -> Callable[[Triples], SparseMatrix]:
    """Returns a matrix factory of a rank whose in-edges other ranks compute: they receive rows and return partial results.

    Args:
        shard: shard of this rank.
        holders: rank that computes each in-edge, ``[E_r]``.
        world: ranks.
        meter: traffic meter.
        make_exchange: factory of the exchanges of copies and of partial results.
    """
    offsets, edge_index = shard.offsets, stored_ids(shard.batch.edge_index).cpu().numpy()
    source, target = shard.node_ids(world.rank)[edge_index[0]], shard.target_ids(world.rank)[edge_index[1]]
    of_edges = EdgeHolders(target, source, holders, world.rank, int(offsets[-1]))
    row_offsets = None if shard.targets is None else shard.target_offsets
    return partial(
        SparseMatrix,
        holders=of_edges,
        offsets=offsets,
        world=world,
        meter=meter,
        make_exchange=make_exchange,
        row_offsets=row_offsets,
    )
