"""Binding: connects the convs and norms of an unmodified model to all ranks through an exchange, and undoes it.

Each layer computes ``Z = A S H``. The methods `message` and `edge_update` read arguments at an edge's source (``x_j``). For each
of these, the bound conv replaces ``x`` by ``(S x, x)`` before PyG lifts rows to edges. The exchange sends the arguments of
`propagate`: rows after the linear map if the layer applies it first.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric import nn as pyg_nn
from torch_geometric.nn import DirGNNConv, GPSConv, MessagePassing, aggr
from torch_geometric.nn.models.rev_gnn import InvertibleModule

from lightning_gnn import private_pyg as pyg
from lightning_gnn.comm.group import World
from lightning_gnn.data.lazy_ids import LazyIds
from lightning_gnn.data.shards import Shard
from lightning_gnn.nn.adapters import overridden
from lightning_gnn.nn.aggregations import aggregations
from lightning_gnn.nn.context import GraphContext, UnsupportedModelError, as_columns, as_samples
from lightning_gnn.nn.convs import ConvRule, exact_convs, fused_methods, known_kind, rule_of
from lightning_gnn.nn.learned_rows import LearnedRows
from lightning_gnn.nn.norms import NORMS, STATE, Statistics, dense_attention, global_methods
from lightning_gnn.nn.patches import Patches
from lightning_gnn.private_torch import COMPILER, AnyBatchNorm, AnyInstanceNorm
from lightning_gnn.rows.graph import wrap_layer

# Aggregations over the edges of one node, all of which are at its owner.
_PER_NODE = "Sum Mean Max Min Mul Var Std Softmax PowerMean Median"
_AGGREGATIONS = tuple(getattr(aggr, f"{name}Aggregation") for name in _PER_NODE.split())

# Modules over all nodes that convs may not contain, unlike those in `norms.NORMS`. Outside of convs, row semantics applies.
_ACROSS_NODES = AnyBatchNorm, AnyInstanceNorm


@dataclass
class _BoundConv:
    """State of the wrapped methods of one conv; shared, not copied, when the model is copied."""

    context: GraphContext
    layer: str
    rule: ConvRule
    """Properties of the conv's messages."""
    functions: dict[str, Any]
    """Original methods as functions of the conv, which a copy of the conv calls on itself."""
    sources: Set[str]
    targets: Set[str]
    """Arguments of `propagate` that are read at edge sources, and at edge targets."""
    of_update: Set[str]
    """Arguments among `sources` and `targets` that `update` reads, and neither message nor aggregation."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _BoundConv:
        return self


class Binding:
    """Binding of all convs and norms of `module` to a rank's graph; :meth:`release` undoes it, :meth:`bind` restores it.

    Args:
        module: any module that contains PyG convs. Parameters, buffers and ``state_dict`` do not change.
        context: graph context of the rank.

    Raises:
        UnsupportedModelError: see :func:`check_module`; nothing is bound then.
    """

    def __init__(self, module: torch.nn.Module, context: GraphContext) -> None:
        self.check(module)
        self.context, self._module, self._recompute = context, module, False
        self._patches = Patches()
        self.bind()

    def bind(self) -> None:
        """Bind all unbound modules; caches of the graph context remain valid."""
        if self._patches:
            return
        module, context = self._module, self.context
        try:
            convs = [child for child in module.modules() if isinstance(child, MessagePassing)]
            reversed_convs = [child.conv_out for child in module.modules() if isinstance(child, DirGNNConv)]
            in_convs, out = ({id(part) for conv in of for part in conv.modules()} for of in (convs, reversed_convs))
            for name, child in module.named_modules():
                if isinstance(child, DirGNNConv):
                    from lightning_gnn.nn.directed import both_ways

                    self._patch(child, both_ways(child, context, name))
                elif isinstance(child, MessagePassing):
                    self._bind(child, name, context.reverse if id(child) in out and context.reverse else context)
                elif isinstance(child, GPSConv) and isinstance(child.attn, torch.nn.MultiheadAttention):
                    self._patch(child.attn, dense_attention(child, context, f"{name}.attn"))
                elif methods := global_methods(child, reads_out=id(child) not in in_convs):
                    bound = {key: types.MethodType(method, child) for key, method in methods.items()}
                    self._patch(child, bound, Statistics(context, name))
            tables = [child for child in module.modules() if isinstance(child, LearnedRows)]
            for child in (*self._patches.modules, *tables):
                if _returns_edges(child):
                    methods = {"propagate": wrap_layer(child, "propagate")}
                    self._patch(child, methods | {"edge_updater": wrap_layer(child, "edge_updater", "edges")})
                else:
                    is_conv = isinstance(child, (MessagePassing, DirGNNConv))
                    self._patch(child, {"forward": wrap_layer(child, returns="targets" if is_conv else "arguments")})
            for child in module.modules():
                # Its backward would compute rows that row semantics do not follow.
                if isinstance(child, InvertibleModule):
                    self._patches.put(child, {"disable": True})
        except BaseException:
            self.release()
            raise

    @property
    def layers(self) -> list[Any]:
        """Bound layers."""
        return [layer for layer in self._patches.modules if "forward" in layer.__dict__]

    @staticmethod
    def check(module: torch.nn.Module) -> None:
        """Raises UnsupportedModelError for a module that cannot be bound."""
        check_module(module)

    def recompute(self) -> None:
        """Switch to checkpointed convs, which store their arguments only and recompute the rest; see ``nn/recompute.py``."""
        self.release()
        self._recompute = True
        self.bind()

    @staticmethod
    def check_unbound(conv: MessagePassing, layer: str) -> None:
        """Raises RuntimeError if a conv is bound."""
        if STATE in conv.__dict__:
            raise RuntimeError(f"'{layer}' is already bound to a graph: is the model in another running Trainer?")

    def _bind(self, conv: MessagePassing, layer: str, context: GraphContext) -> None:
        self.check_unbound(conv, layer)
        methods = bound_methods(conv, layer, context)
        if self._recompute:
            from lightning_gnn.nn.recompute import recompute_in_backward

            forward = methods.get("forward", conv.forward)
            methods["forward"] = types.MethodType(recompute_in_backward(forward.__func__, context), conv)
        self._patch(conv, methods, methods.pop(STATE))

    def _patch(self, module: torch.nn.Module, methods: dict[str, Any], state: Any = None) -> None:
        """Replace methods of a module and attach their state. Caches of the rank's graph in a conv are set aside, too."""
        attributes: dict[str, Any] = {} if state is None else {STATE: state}
        if isinstance(module, MessagePassing):
            pyg.clear_caches(module)
            attributes.update(pyg.caches(module))
        attributes.update({name: _left_eager(method) for name, method in methods.items()})
        self._patches.put(module, attributes)

    def release(self) -> None:
        """Restore the original methods of every module and of every copy of it."""
        self._patches.release()


def context_of(module: torch.nn.Module, shard: Shard, world: World, make: Callable[[Shard], GraphContext]) -> GraphContext:
    """Returns ``make(shard)``, with the context of the reversed graph if the module reads it; runs on every rank."""
    reads_out_edges = any(isinstance(part, DirGNNConv) for part in module.modules())
    if not reads_out_edges:
        return make(shard)
    from lightning_gnn.nn.directed import reversed_shard

    reverse = make(reversed_shard(shard, world))
    context = make(shard)
    context.reverse = reverse
    return context


def bound_methods(conv: MessagePassing, layer: str, context: GraphContext) -> dict[str, Any]:
    """Returns the methods of a conv that is bound to a rank's graph, by name, and their state as ``STATE``."""
    wrapped: dict[str, Callable[..., Any]] = {"propagate": _propagate}
    if pyg.implements_edge_update(conv):
        wrapped["edge_updater"] = _edge_updater
    rule = rule_of(type(conv), "message")
    sources, targets, _ = pyg.lifted_arguments(conv)
    functions = {name: getattr(conv, name).__func__ for name in wrapped}
    state = _BoundConv(context, layer, rule, functions, sources, targets, pyg.read_by_update(conv) & (sources | targets))
    adapter = rule_of(type(conv)).adapter
    methods = adapter(conv, context, layer) if adapter is not None else {}
    methods.update(fused_methods(conv, context, layer, methods.get("forward", conv.forward).__func__))
    methods.update({name: types.MethodType(method, conv) for name, method in wrapped.items()})
    return {**methods, STATE: state}


def _returns_edges(module: torch.nn.Module) -> bool:
    """Returns whether a bound module may return rows of edges: a conv of the user that updates edges.

    Its forward runs under row semantics, which follows the rows that it returns.
    """
    is_own = isinstance(module, MessagePassing) and not type(module).__module__.startswith("torch_geometric.")
    return is_own and "forward" not in module.__dict__ and pyg.implements_edge_update(module)


def _left_eager(method: Any) -> Any:
    """Returns the method with torch.compile disabled, because the method communicates and runs custom kernels."""
    if COMPILER not in sys.modules:  # then nothing is compiled, and the import takes seconds
        return method
    return types.MethodType(torch.compiler.disable(method.__func__), method.__self__)


# Checks #######################################################################


def check_module(
    module: torch.nn.Module,
    takes_all_types: bool = False,
    check: Callable[[str, torch.nn.Module], None] = lambda where, child: None,
) -> None:
    """Raises :class:`UnsupportedModelError` for the first module that is not exact on a part of a graph.

    Args:
        module: module to check, with its submodules.
        takes_all_types: whether to accept convs that are called on all node and edge types at once.
        check: function called with the description of each submodule and the submodule, before other checks; raises the same
            error.
    """
    check_columns(module)
    in_convs = {id(part) for conv in module.modules() if isinstance(conv, MessagePassing) for part in conv.modules()}
    for name, child in module.named_modules():
        where = f"'{name}' ({type(child).__name__})"
        check(where, child)
        rule = rule_of(type(child))
        if takes_all_types and rule.takes_all_types:
            continue
        if rule.refused:
            raise UnsupportedModelError(f"{where} is not exact on a partitioned graph: {rule.refused}.")
        if isinstance(child, MessagePassing):
            _check_conv(where, child)
        is_across = isinstance(child, _ACROSS_NODES) and id(child) in in_convs and not isinstance(child, tuple(NORMS))
        if is_across or isinstance(child, pyg_nn.norm.HeteroBatchNorm):
            raise UnsupportedModelError(
                f"{where} computes statistics over all nodes, which are on several ranks. Use torch.nn.BatchNorm1d or a PyG "
                "norm for nodes, whose statistics include all ranks."
            )
        elif isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and child.sparse:
            raise UnsupportedModelError(
                f"{where} has sparse=True, and sparse gradients are not summed over ranks. Set it to False; or use "
                "lightning_gnn.DistributedEmbedding, which has one row per node of the graph, each at its owner."
            )
        elif isinstance(child, pyg_nn.norm.BatchNorm) and child.allow_single_element:
            raise UnsupportedModelError(
                f"{where} has allow_single_element=True, and would treat a rank with one node differently. Set it to False."
            )
        elif type(child).__module__.startswith("torch_geometric.nn.pool"):
            raise UnsupportedModelError(
                f"{where} creates another graph from nodes of several ranks. For a readout of the whole graph, use "
                "MeanAggregation or MaxAggregation; docs/recipes.md, 'Clusters', has losses of dense pooling."
            )


def check_columns(module: torch.nn.Module) -> None:
    """Raises :class:`UnsupportedModelError` for the first layer with uninitialized weights."""
    for name, child in module.named_modules():
        if any(isinstance(parameter, torch.nn.UninitializedParameter) for parameter in child.parameters(recurse=False)):
            raise UnsupportedModelError(
                f"'{name}' ({type(child).__name__}) has an unknown number of input columns (-1). Set it, or run the model once "
                "on one device first: model(data.x, data.edge_index), or model(data.x_dict, data.edge_index_dict)."
            )


def _is_per_node(aggregation: Any) -> bool:
    """Returns whether an aggregation reads the edges of one node at a time; True for None, which the conv handles."""
    if isinstance(aggregation, aggr.MultiAggregation):
        return all(_is_per_node(child) for child in aggregation.aggrs)
    if isinstance(aggregation, aggr.DegreeScalerAggregation):
        return _is_per_node(aggregation.aggr)
    return aggregation is None or isinstance(aggregation, _AGGREGATIONS)


def _check_conv(where: str, conv: MessagePassing) -> None:
    library = next(kind for kind in type(conv).__mro__ if kind.__module__.startswith("torch_geometric."))
    known: Any = known_kind(type(conv))
    if not issubclass(known, library):
        raise UnsupportedModelError(
            f"{where} is not supported on partitioned graphs. Supported are {', '.join(exact_convs())}, and your own "
            "convs that derive from MessagePassing and pass edge_index to propagate."
        )
    if STATE not in conv.__dict__ and "forward" in conv.__dict__:
        raise UnsupportedModelError(
            f"{where} had its forward replaced, but on a partitioned graph lightning_gnn may need to replace it, too. Call the "
            "conv from a module of your own instead."
        )
    if conv.flow != "source_to_target":
        raise UnsupportedModelError(
            f"{where} has flow='{conv.flow}' and needs the out-edges of its nodes, but a rank has their in-edges. Use "
            "DirGNNConv, or put both directions of each edge into the graph: docs/recipes.md, 'Directed graphs'."
        )
    if not _is_per_node(conv.aggr_module):
        raise UnsupportedModelError(
            f"{where} aggregates by {conv.aggr_module}; supported are sum, mean, max, min, mul, var, std, softmax, powermean, "
            "median, and several of these at once."
        )
    for sources, targets, plain in (pyg.lifted_arguments(conv), pyg.lifted_arguments(conv, edge_update=True)):
        both = sorted((sources | targets) & plain - pyg.read_by_update(conv))
        if both:
            raise UnsupportedModelError(
                f"{where} reads '{both[0]}' in its message function both per node and per edge "
                f"('{both[0]}_j' or '{both[0]}_i'). Pass the first under another name."
            )


# Wrapped methods ##############################################################


def _propagate(self: MessagePassing, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
    """`propagate` of a bound conv: kernels if messages are rows and edges are constant, else PyG's own over (S x, x)."""
    state: _BoundConv = self.__dict__[STATE]
    context = state.context
    context.check_edges(edge_index, state.layer, kwargs.get("edge_weight"))
    reductions = pyg.reductions(self.aggr_module) if state.rule.sends_rows else None
    rows = None if reductions is None else _rows_of_messages(self, state, kwargs)
    if reductions is not None and rows is not None:
        weight = kwargs.get(state.rule.weight) if state.rule.weight is not None else None
        if reductions in (["sum"], ["mean"]):
            edge_sum = context.sum_of(edge_index, weight, reductions == ["mean"])
            if edge_sum is not None:
                return context.total(rows, edge_sum, state.layer)
        elif weight is None:
            parts = aggregations(context, as_columns(rows), edge_index, reductions, state.layer)
            if parts is not None:
                parts = [as_samples(part, rows) for part in parts]
                several = isinstance(self.aggr_module, aggr.MultiAggregation)
                return self.aggr_module.combine(parts) if several else parts[0]
    if context.exchange.present is not None:
        raise UnsupportedModelError(
            f"'{state.layer}' computes its own messages, which does not support steps without some halo nodes. Only sums, max, "
            "min and attention do: docs/convs.md lists the convs that compute these by kernels."
        )
    context.count_propagation(state.layer)
    context.on_loaded_edges.add(state.layer)
    lifted = _with_halo(self, state, kwargs, state.sources, state.targets)
    size = (context.num_owned + context.num_halo, context.num_targets)
    given = {name: kwargs[name] for name in state.of_update if name in kwargs} if state.of_update else {}
    update = self.update

    def update_local(out: Any, **kwargs: Any) -> Any:
        """`update` with the original arguments of `propagate`, for local nodes only."""
        return update(out, **{**kwargs, **given})

    with overridden(self, "update", update_local) if given else nullcontext():
        # PyG reads the ids many times, and each read would be a call of LazyIds.
        ids = edge_index.read() if isinstance(edge_index, LazyIds) else edge_index
        return state.functions["propagate"](self, ids, size=size, **lifted)


def _edge_updater(self: MessagePassing, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Any:
    """`edge_updater` of a bound conv: PyG's own over (S x, x)."""
    state: _BoundConv = self.__dict__[STATE]
    lifted = _with_halo(self, state, kwargs, *pyg.lifted_arguments(self, edge_update=True)[:2])
    return state.functions["edge_updater"](self, edge_index, size=size, **lifted)


def _rows_of_messages(conv: MessagePassing, state: _BoundConv, kwargs: dict[str, Any]) -> Tensor | None:
    """Returns the source rows that are the messages, possibly weighted; None for other messages, equally on all ranks."""
    if not pyg.is_plain(conv):
        return None
    x = kwargs["x"]
    source, target = x if isinstance(x, (tuple, list)) else (x, x)
    if not isinstance(source, Tensor) or source.dim() < 2 or not source.is_floating_point():
        return None
    if source.dim() > 2 and conv.node_dim != -2:
        return None
    for rows in (source,) if target is source else (source, target):
        if rows is not None:
            state.context.check_rows(rows.size(-2), state.layer, per_target=rows is not source)
    return source


def _with_halo(
    conv: MessagePassing, state: _BoundConv, kwargs: dict[str, Any], sources: Set[str], targets: Set[str]
) -> dict[str, Any]:
    """Returns `kwargs` with ``(S value, value)`` for each value that is read at edge sources."""
    lifted = dict(kwargs)
    # Sorted: all ranks must exchange in the same order.
    for name in sorted(sources | targets):
        value = kwargs.get(name)
        source, target = value if isinstance(value, (tuple, list)) else (value, value)
        for rows in (source,) if target is source else (source, target):
            if isinstance(rows, Tensor):
                state.context.check_rows(rows.size(conv.node_dim), state.layer, per_target=rows is not source)
        if name in sources and isinstance(source, Tensor):
            lifted[name] = (state.context.expand(source, state.layer, conv.node_dim), target)
    return lifted
