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
from lightning_gnn.modules.node_classifier import NodeClassifier
from lightning_gnn.nn.bind import Binding, bound_methods
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.nn.convs import rule_of
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


class _CallGraph(GraphContext):
    """Graph of the current call of a conv."""

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


class BatchBinding(Binding):
    """Binding of the convs of a module that have kernels, for training steps on batches.

    If the module reads only the seeds' rows of its model, and the model's layers allow it, each layer computes only the rows that
    later layers need. Other rows of the result are 0.

    Args:
        module: module that is trained.
        world, meter: see :class:`~lightning_gnn.comm.exchange.Exchange`.
    """

    _batch: Data | None = None

    def __init__(self, module: torch.nn.Module, world: World, meter: Meter) -> None:
        none, no_edges = torch.empty(0, 0), torch.empty(2, 0, dtype=torch.int64)
        self._graph = _CallGraph(_NoExchange(0, 0, world, meter, idle=True), none, no_edges, None, 0)
        super().__init__(module, self._graph)

    def begin(self, batch: Data) -> None:
        """Bind the convs, if they are not bound, for a step on a batch."""
        self._batch = batch
        self.bind()

    @staticmethod
    @override
    def check(module: torch.nn.Module) -> None:
        """No-op: other convs remain PyG's."""

    @override
    def bind(self) -> None:
        """Bind all unbound modules, once there is a batch."""
        module: Any = self._module
        if self._patches or self._batch is None:
            return
        # A device would make the matrices of edges itself, and the host would wait for it.
        for name, child in module.named_modules() if self._batch.edge_index.device.type == "cpu" else ():
            if isinstance(child, MessagePassing) and child.flow == "source_to_target":
                self._bind(child, name, self._graph)
        if _can_trim(module):
            self._patches.put(module.model, {"forward": types.MethodType(self._forward, module.model), TRIM: _trim})

    @override
    def _bind(self, conv: MessagePassing, layer: str, context: GraphContext) -> None:
        graph, rule = self._graph, rule_of(type(conv), "message")
        fused = rule_of(type(conv), "forward", "message", "edge_update")
        has_forward = fused.forward is not None and fused.fits(conv)
        if not has_forward and (not rule.sends_rows or rule.adapter is not None):
            return
        bound = bound_methods(conv, layer, context)

        def forward(self: Any, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
            weight = kwargs.get("edge_weight", args[0] if args and fused.weight else None)
            run = bound["forward"].__func__ if graph.turn(x, edge_index, weight) else type(self).forward
            return run(self, x, edge_index, *args, **kwargs)

        def propagate(self: Any, edge_index: Any, size: Any = None, **kwargs: Any) -> Any:
            supported = graph.turn(kwargs.get("x"), edge_index, kwargs.get(rule.weight or ""))
            run = bound["propagate"].__func__ if supported else type(self).propagate
            return run(self, edge_index, size=size, **kwargs)

        kept = [forward] * has_forward + [propagate] * rule.sends_rows
        self._patch(conv, {each.__name__: types.MethodType(each, conv) for each in kept}, bound[STATE])

    def _forward(self, model: Any, x: Any, edge_index: Any, **options: Any) -> Any:
        """Returns the model's rows; for a batch of neighborhoods, the rows of seeds, and 0 for other nodes."""
        batch: Any = self._batch
        nodes, edges = batch.get("num_sampled_nodes"), batch.get("num_sampled_edges") or ()
        several = {"edge_weight", "edge_attr"} <= options.keys()  # PyG trims one of them
        if x is batch.x and edge_index is batch.edge_index and len(edges) >= model.num_layers and not several:
            options |= {"num_sampled_nodes_per_hop": nodes, "num_sampled_edges_per_hop": edges}
        out = type(model).forward(model, x, edge_index, **options)
        return F.pad(out, (0, 0, 0, len(x) - len(out)))


def _can_trim(module: Any) -> bool:
    """Returns whether training steps read only the seeds' rows of ``module.model``, and its layers can omit the other rows.

    Layers must compute rows from their in-edges only, and accept fewer target rows than source rows. GCN reads degrees of
    sources, and BatchNorm the rows of all nodes.
    """
    return (
        all(getattr(type(module), name, None) is getattr(NodeClassifier, name) for name in ("training_step", "forward"))
        and isinstance(module.model, BasicGNN)
        and type(module.model).forward is BasicGNN.forward
        and module.model.jk_mode is None
        and all(rule_of(type(conv), "forward", "message", "edge_update").halo_columns for conv in module.model.convs)
        and all("Norm" not in type(part).__name__ or isinstance(part, torch.nn.LayerNorm) for part in module.model.modules())
    )


def _trim(
    layer: int, nodes: list[int], edges: list[int], x: Tensor, edge_index: Tensor, values: Tensor | None
) -> tuple[Any, Tensor, Tensor | None]:
    """Returns the arguments of a layer's conv, as PyG's ``TrimToLayer``, but with the target rows of this layer only."""
    hops = max(len(edges) - layer, 0)
    count, targets = sum(edges[:hops]), sum(nodes[:hops])
    return (x, x[:targets]), edge_index[:, :count], None if values is None else values[:count]
