"""Kernels for convs in steps on sampled neighborhoods, and steps without rows that the seeds do not need.

Each call of a conv is computed on its own arguments: N source rows, T target rows, ``edge_index [2, E]``. Nothing is exchanged.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.kernels import CSR
from lightning_gnn.nn.bind import Binding, bound_methods
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.nn.convs import rule_of
from lightning_gnn.nn.edges import SplitEdges
from lightning_gnn.nn.norms import STATE
from lightning_gnn.private_pyg import TRIM


class _NoExchange(Exchange):
    """Exchange without halo nodes."""

    @override
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        return lambda: None

    @override
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        return lambda out: None

    @override
    def max_over_ranks(self, x: Tensor, operation: str) -> Tensor:
        return x


class _SortedCSR(CSR):
    """Matrix of edges that are sorted by target, on a device that the host does not wait for."""

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor, num_rows: int, num_cols: int) -> CSR:
        bounds = torch.arange(num_rows + 1, dtype=rows.dtype, device=rows.device)
        return cls(torch.searchsorted(rows.contiguous(), bounds), columns.int(), None, num_cols)

    @override
    def _transpose(self, in_list: bool) -> CSR:
        order = self.indices.argsort(stable=True)
        made = _SortedCSR.of(self.indices[order], self.row_of_slot()[order], self.num_cols, self.num_rows)
        return CSR(made.indptr, made.indices, order.int() if in_list else None, self.num_rows)


class _CallGraph(GraphContext):
    """Graph of the current call of a conv."""

    edges_of_batch = torch.empty(2, 0, dtype=torch.int64)

    def turn(self, x: Any, edge_index: Any, edge_weight: Any = None) -> bool:
        """Switch to the arguments of a call; returns whether kernels support them."""
        source, target = x if isinstance(x, tuple) else (x, x)
        rows = [each for each in (source, target) if isinstance(each, Tensor) and each.dim() == 2]
        if len(rows) < 2 or not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            return False
        sizes = [len(each) for each in rows]
        weight = edge_weight if isinstance(edge_weight, Tensor) else None
        if edge_index is not self.edge_index or weight is not self.edge_weight or sizes != [self.num_owned, self.num_targets]:
            self.exchange = _NoExchange(sizes[0], 0, self.exchange.world, self.exchange.meter, idle=True)
            self._given_targets = sizes[1]
            self.turn_to(source, edge_index, weight)
        return True

    def _is_sorted(self, edge_index: Tensor) -> bool:
        """Returns whether edges are on a device, and are the first edges of the batch, which are sorted by target."""
        batch = self.edges_of_batch
        same = edge_index.data_ptr() == batch.data_ptr() and edge_index.stride() == batch.stride()
        return edge_index.device.type != "cpu" and same

    @override
    def split_edges(self, edge_index: Tensor, in_list: bool = False) -> SplitEdges | None:
        if not self._is_sorted(edge_index):
            return super().split_edges(edge_index, in_list)

        def make() -> SplitEdges:
            csr, none = self.matrix(edge_index), edge_index[0, :0]
            return SplitEdges(csr, _SortedCSR.of(none, none, self.num_targets, 0), csr.indptr.diff())

        return self.cache.derive("split", [edge_index], make)

    @override
    def matrix(self, edge_index: Tensor) -> CSR:
        if not self._is_sorted(edge_index):
            return super().matrix(edge_index)
        source, target = edge_index
        made = self.cache.derive("matrix", [edge_index], lambda: _SortedCSR.of(target, source, self.num_targets, self.num_owned))
        assert made is not None
        return made


class BatchBinding(Binding):
    """Binding of the convs of a module that have kernels, for training steps on batches.

    Args:
        module: module that is trained.
        world, meter: see :class:`~lightning_gnn.comm.exchange.Exchange`.
        model: model that computes ``model(batch.x, batch.edge_index)``, and whose rows of other nodes than the seeds are not
            read; None if there is none. If its layers allow it, each layer computes only the rows that later layers need, and the
            other rows of the result are 0.
    """

    def __init__(self, module: torch.nn.Module, world: World, meter: Meter, model: torch.nn.Module | None) -> None:
        none, no_edges = torch.empty(0, 0), torch.empty(2, 0, dtype=torch.int64)
        self._graph = _CallGraph(_NoExchange(0, 0, world, meter, idle=True), none, no_edges, None, 0)
        self._model = model if model is not None and _can_trim(model) else None
        super().__init__(module, self._graph)

    def begin(self, batch: Data) -> None:
        """Bind the convs, if they are not bound, for a step on a batch."""
        self._graph.edges_of_batch, self._batch = batch.edge_index, batch
        self.bind()

    @staticmethod
    @override
    def check(module: torch.nn.Module) -> None:
        """No-op: other convs remain PyG's."""

    @override
    def bind(self) -> None:
        if self._patches:
            return
        for name, child in self._module.named_modules():
            if isinstance(child, MessagePassing) and child.flow == "source_to_target":
                self._bind(child, name, self._graph)
        if self._model is not None:
            self._patches.put(self._model, {"forward": types.MethodType(self._forward, self._model), TRIM: _trim})

    @override
    def _bind(self, conv: MessagePassing, layer: str, context: GraphContext) -> None:
        graph, rule = self._graph, rule_of(type(conv), "message")
        fused = rule_of(type(conv), "forward", "message", "edge_update")
        has_forward = fused.forward is not None and fused.fits(conv)
        if not has_forward and (not rule.sends_rows or rule.adapter is not None):
            return
        methods = bound_methods(conv, layer, context)
        forward, propagate = methods.get("forward"), methods["propagate"]
        kept: dict[str, Any] = {}

        def run(self: Any, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
            weight = kwargs.get("edge_weight", args[0] if args and fused.weight else None)
            original = types.MethodType(type(self).forward, self)
            return (forward if graph.turn(x, edge_index, weight) else original)(x, edge_index, *args, **kwargs)

        def run_propagate(self: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
            supported = graph.turn(kwargs.get("x"), edge_index, kwargs.get(rule.weight or ""))
            original = types.MethodType(type(self).propagate, self)
            return (propagate if supported else original)(edge_index, size=size, **kwargs)

        if has_forward:
            kept["forward"] = types.MethodType(run, conv)
        if rule.sends_rows:
            kept["propagate"] = types.MethodType(run_propagate, conv)
        self._patch(conv, kept, methods[STATE])

    def _forward(self, model: Any, x: Any, edge_index: Any, **options: Any) -> Any:
        """Returns the rows of the seeds of a batch, and 0 for the rows of other nodes."""
        batch = self._batch
        if x is not batch.x or edge_index is not batch.edge_index or {"edge_weight", "edge_attr"} <= options.keys():
            return type(model).forward(model, x, edge_index, **options)
        nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
        out = type(model).forward(
            model, x, edge_index, **options, num_sampled_nodes_per_hop=nodes, num_sampled_edges_per_hop=edges
        )
        return F.pad(out, (0, 0, 0, len(x) - len(out)))


def _can_trim(model: Any) -> bool:
    """Returns whether each layer computes rows from its in-edges only, and accepts fewer target rows than source rows.

    GCN reads degrees of sources, and BatchNorm the rows of all nodes.
    """
    return (
        isinstance(model, BasicGNN)
        and type(model).forward is BasicGNN.forward
        and model.jk_mode is None
        and all(rule_of(type(conv), "forward", "message", "edge_update").halo_columns is not None for conv in model.convs)
        and all(isinstance(norm, (torch.nn.Identity, torch.nn.LayerNorm)) for norm in model.norms)
    )


def _trim(
    layer: int, nodes: list[int], edges: list[int], x: Tensor, edge_index: Tensor, values: Tensor | None
) -> tuple[Any, Tensor, Tensor | None]:
    """Returns the arguments of a layer's conv, as PyG's ``TrimToLayer``, but with the target rows of this layer only."""
    hops = max(len(edges) - layer, 0)
    count, targets = sum(edges[:hops]), sum(nodes[:hops])
    return (x, x[:targets]), edge_index[:, :count], None if values is None else values[:count]
