"""Historical embeddings: rows of all nodes as last computed, for batches whose halo nodes are computed in other batches.

Sources:

- Fey et al., "GNNAutoScale: Scalable and Expressive Graph Neural Networks via Historical Embeddings" (ICML 2021), section 3.
- Chen et al., "Stochastic Training of Graph Convolutional Networks with Variance Reduction" (ICML 2018), section 4.

The inputs of a layer for halo nodes are historical; the layer's computations on these inputs are not. Gradients of weights
therefore include all messages into the batch; only the history of a halo row is constant. A conv therefore computes on N + H
rows, of the batch and of its halo, and returns N.

N nodes of the batch, its local rows; H halo nodes; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

import inspect
import mmap
import os
import tempfile
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.nn import DirGNNConv, MessagePassing
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange, HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.context import GraphContext, UnsupportedModelError
from lightning_gnn.nn.convs import rule_of
from lightning_gnn.partition.shard import HaloPlan
from lightning_gnn.strategies.gossip.peers import SharedKeys


@dataclass(frozen=True)
class Table:
    """Rows of all nodes, on the CPU, which other workers may write at any time.

    Attributes:
        rows: rows of all nodes, ``[num_nodes, ...]``; 0 until they are written.
        written: time of the last write, as a number of batches of all workers from 1, int64 ``[num_nodes]``; 0 for never.
    """

    rows: Tensor
    written: Tensor


class History:
    """Tables shared by the workers of one machine, in memory that is freed when the last of them ends, for any reason.

    Reads and writes are not synchronized: a row that is read during a write may have entries of both versions.

    Args:
        num_nodes: number of nodes of the whole graph.
        file: descriptor for reading and writing of an unlinked file; the same file on all workers.
        keys: keys of all workers, for the positions of tables.
        machine: number of the machine.
    """

    def __init__(self, num_nodes: int, file: int, keys: SharedKeys, machine: int = 0) -> None:
        self.num_nodes, self._file = num_nodes, file
        self._keys, self._name = keys, f"history/{machine}"
        self._tables: dict[Hashable, Table] = {}

    @classmethod
    def create_shared(cls, num_nodes: int, world: World, keys: SharedKeys) -> History:
        """Returns the history that this rank shares with the ranks of its machine; runs on every rank."""
        here = world.ranks_here()
        path = ""
        if world.rank == here[0]:
            handle, path = tempfile.mkstemp(prefix="lightning_gnn_history_", dir=_folder())
            os.close(handle)
        path = world.all_gather_object(path)[here[0]]
        try:
            history = cls(num_nodes, os.open(path, os.O_RDWR), keys, here[0])
            world.barrier()
        finally:
            if world.rank == here[0]:
                os.unlink(path)
        return history

    def table(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> Table:
        """Returns the table with a name and a shape of rows, the same for all workers; created at the first request."""
        key = (name, *shape, dtype)
        if key not in self._tables:
            row_bytes = dtype.itemsize * int(np.prod(shape))
            begin = self._place(repr(key), self.num_nodes * (8 + row_bytes))
            end_of_times = begin + 8 * self.num_nodes
            rows = self._map_bytes(end_of_times, self.num_nodes * row_bytes).view(dtype).view(self.num_nodes, *shape)
            self._tables[key] = Table(rows, self._map_bytes(begin, 8 * self.num_nodes).view(torch.int64))
        return self._tables[key]

    def _place(self, name: str, num_bytes: int) -> int:
        """Returns the position of the table with a name; if several workers request it at once, the first position is used."""
        key, size = f"{self._name}/{name}", -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if not self._keys.get(key):
            self._keys.swap(key, "", str(self._keys.add(self._name, size) - size))
        begin = int(self._keys.get(key))
        try:
            os.posix_fallocate(self._file, begin, num_bytes)  # never shrinks it; raises if a later write would kill
        except OSError as error:
            raise RuntimeError(
                f"Historical embeddings need {(begin + num_bytes) / 1e6:,.0f} MB in {_folder()}, which does not have enough "
                f"space ({error}). Enlarge it, for example by docker run --shm-size, or set historical_embeddings=False."
            ) from error
        return begin

    def _map_bytes(self, begin: int, num_bytes: int) -> Tensor:
        with open(self._file, "r+b", closefd=False) as file:
            return torch.from_numpy(np.memmap(file, np.uint8, "r+", begin, (num_bytes,)))

    def close(self) -> None:
        """Release the memory, once the last tensor over it is deleted."""
        self._tables.clear()
        os.close(self._file)


def _folder() -> str:
    return "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()


class HistoryExchange(Exchange):
    """Exchange in which S reads halo rows from the history, and in training writes local rows; S^T returns no gradients.

    Only nodes of the batch contribute gradients: rows that were computed earlier are constant.

    Args:
        history: history of this machine.
        world, meter: see :class:`~lightning_gnn.comm.exchange.Exchange`.
    """

    one_way = True

    def __init__(self, history: History, world: World, meter: Meter) -> None:
        super().__init__(0, 0, world, meter)
        self.history = history
        self._ages = self._num_known = self._num_unknown = 0
        self._local_ids = self._halo_ids = torch.empty(0, dtype=torch.int64)
        self._now = 0

    def turn_to(self, local_ids: Tensor, halo_ids: Tensor, now: int) -> None:
        """Switch to another batch.

        Args:
            local_ids, halo_ids: positions of its nodes in the tables, int64 ``[N]`` and ``[H]``, on the CPU.
            now: time, as a number of batches of all workers.
        """
        self._local_ids, self._halo_ids, self._now = local_ids, halo_ids, now
        self.num_owned, self.num_halo = len(local_ids), len(halo_ids)

    def take_ages(self) -> tuple[float, float]:
        """Returns statistics of the halo rows that training has read since the last call.

        The first is the mean age of rows that had been computed, in batches of all workers. The second is the share of rows that
        had not been computed, which are 0.
        """
        age = self._ages / max(self._num_known, 1)
        share = self._num_unknown / max(self._num_known + self._num_unknown, 1)
        self._ages = self._num_known = self._num_unknown = 0
        return age, share

    @override
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        table = self.history.table((call.layer, call.index), x.shape[1:], x.dtype)
        if self.world.step.phase == "train":
            table.rows.index_copy_(0, self._local_ids, x.detach().cpu())
            table.written[self._local_ids] = self._now
            written = table.written[self._halo_ids]
            written = written[written > 0]
            self._num_known += len(written)
            self._num_unknown += len(self._halo_ids) - len(written)
            self._ages += len(written) * self._now - int(written.sum())
        halo.copy_(table.rows.index_select(0, self._halo_ids))
        return lambda: None

    @override
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        return lambda _: None

    @override
    def reduce(self, x: Tensor, layer: str) -> Tensor:
        raise ValueError(
            f"'{layer}' reads out-edges, which historical_embeddings=True does not support. Remove historical_embeddings: then "
            "a batch has only the edges inside it."
        )


# Binding ######################################################################


class _HaloGraph(GraphContext):
    """N + H rows as one graph in which edges end at the first N rows only; nothing is exchanged."""

    history: HistoryExchange

    def scale_of_rows(self, scale: Tensor, layer: str) -> Tensor:
        return self.history.expand(scale[: self.history.num_owned], layer)


class HistoryBinding(Binding):
    """Binding of `module` to one batch after the other: see :meth:`turn_to`.

    Raises:
        UnsupportedModelError: a layer reads out-edges; see :func:`~lightning_gnn.nn.bind.check_module` for others.
    """

    def __init__(self, module: torch.nn.Module, exchange: HistoryExchange) -> None:
        for name, child in module.named_modules():
            if isinstance(child, DirGNNConv):
                raise UnsupportedModelError(
                    f"'{name}' (DirGNNConv) reads out-edges, which historical_embeddings=True does not support. Remove "
                    "historical_embeddings: then a batch has only the edges inside it."
                )
        nothing = HaloPlan(0, (0,), (np.empty(0, np.int64),))
        none, no_edges = torch.empty(0, 0), torch.empty(2, 0, dtype=torch.int64)
        self._halo_graph = _HaloGraph(HaloExchange(nothing, exchange.world, exchange.meter), none, no_edges, None, 0)
        self._halo_graph.history = self.exchange = exchange
        self._inside = False
        self._x = self._halo_x = none
        super().__init__(module, GraphContext(exchange, none, no_edges, None, 0))

    def turn_to(self, x: Tensor, halo_x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> None:
        """Switch to another batch; the exchange must have been switched before.

        Args:
            x, halo_x: features, ``[N, F]`` and ``[H, F]``. If a conv reads x itself, halo nodes have exact features.
            edge_index: ``[2, E]``, halo nodes from N on.
            edge_weight: ``[E]``.
        """
        self._x, self._halo_x = x, halo_x
        self._halo_graph.exchange.num_owned = len(x) + len(halo_x)
        for context in (self.context, self._halo_graph):
            context.turn_to(x, edge_index, edge_weight)

    def _bind(self, conv: MessagePassing, layer: str, context: GraphContext) -> None:
        several_hops = rule_of(type(conv)).several_hops
        if several_hops:  # each hop reads halo rows from the history
            super()._bind(conv, layer, context)
            return
        super()._bind(conv, layer, self._halo_graph)
        forward, signature = conv.forward.__func__, inspect.signature(type(conv).forward)

        def run(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
            if self._inside:  # part of another conv, which already has the halo rows
                return forward(conv, *args, **kwargs)
            bound, cache = signature.bind(conv, *args, **kwargs), dict[int, Tensor]()
            for name, value in bound.arguments.items():
                if not name.startswith("edge"):
                    bound.arguments[name] = self._with_halo(value, conv, layer, cache)
            before, self._inside = self._halo_graph.propagations[layer], True
            try:
                out = forward(*bound.args, **bound.kwargs)
            finally:
                self._inside = False
            if several_hops is None and self._halo_graph.propagations[layer] > before + 1:
                raise UnsupportedModelError(
                    f"'{layer}' ({type(conv).__name__}) propagates several times in a call, which historical_embeddings=True "
                    "does not support: later propagations have no halo nodes. Use a conv for each, or remove the option."
                )
            rows = slice(0, self.context.num_owned)
            return out[rows] if isinstance(out, Tensor) else (out[0][rows], *out[1:])

        self._patch(conv, {"forward": types.MethodType(run, conv)})

    def _with_halo(self, value: Any, conv: MessagePassing, layer: str, cache: dict[int, Tensor]) -> Any:
        """Returns an argument with the rows of halo nodes appended, if it has one row for each node of the batch."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._with_halo(each, conv, layer, cache) for each in value)
        dim = conv.node_dim if isinstance(value, Tensor) and value.dim() > 1 else 0
        if not isinstance(value, Tensor) or not value.dim() or value.size(dim) != self.context.num_owned:
            return value
        if id(value) not in cache:  # an argument that is given twice remains one tensor
            own = value is self._x
            cache[id(value)] = torch.cat([value, self._halo_x]) if own else self.exchange.expand(value, layer, dim)
        return cache[id(value)]
