"""Bindings for graphs with node and edge types: each call of a conv is bound to the edge type of its edges.

A call on (source type, relation, target type) is ``Z = A S H`` of a bipartite graph. Its sources are the local and halo nodes of
one type, its targets the local nodes of another. So a rank has one graph per edge type, with the exchange of the source type.
Convs are bound to it like to a graph without types. Several edge types may read the same rows in a layer, such as an author's
papers and affiliations. Then S is computed once, and the gradients are summed once.

N local and H halo nodes of the source type, T local nodes of the target type, F columns.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric import nn as pyg_nn
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import EdgeType, NodeType
from typing_extensions import override

from lightning_gnn import private_pyg as pyg
from lightning_gnn.comm.call import Step
from lightning_gnn.comm.exchange import Exchange, HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Shard
from lightning_gnn.extensions.node_types.shards import TypedShard
from lightning_gnn.nn.adapters import patch_globals
from lightning_gnn.nn.bind import Binding, bound_methods, check_module
from lightning_gnn.nn.context import GraphContext, UnsupportedModelError
from lightning_gnn.nn.convs import rule_of
from lightning_gnn.nn.norms import OVER_ALL, STATE, Statistics, global_methods
from lightning_gnn.partition.shard import HaloPlan
from lightning_gnn.private_torch import version_counter


class TypedGraph(GraphContext):
    """Graph with types of one rank, as seen by bound convs.

    Args:
        shard: shard of this rank, on its device.
        world: the ranks.
        make: returns the rank's graph of one edge type, from :meth:`TypedShard.edge_shard`.

    Attributes:
        relations: the rank's graph of each edge type.
    """

    def __init__(self, shard: TypedShard, world: World, make: Callable[[Shard], GraphContext]) -> None:
        self.relations = {kind: make(shard.edge_shard(kind, world.rank)) for kind in shard.types.edges}
        first = next(iter(self.relations.values()))
        super().__init__(first.exchange, torch.empty(0, 0), torch.empty(2, 0, dtype=torch.int64), None, 0)
        self._kinds = {id(relation.edge_index): kind for kind, relation in self.relations.items()}
        readers: dict[NodeType, list[GraphContext]] = {}
        for (source, *_), relation in self.relations.items():
            readers.setdefault(source, []).append(relation)
        self._num_readers = {name: len(of) for name, of in readers.items()}
        # In products distributed over ranks, each relation sends rows of its own.
        shared = {name: of for name, of in readers.items() if len(of) > 1 and of[0].exchange.products is None}
        self._expanded: dict[EdgeType, GraphContext] = {}
        for kind, relation in self.relations.items():
            if kind[0] in shared:
                relation.share = partial(self._share_rows, kind[0], shared[kind[0]][0])
                self._expanded[kind] = _expanded_graph(relation)
        self._shared_rows: dict[tuple[NodeType, torch.Size], tuple[Tensor, tuple[int, bool], Tensor]] = {}
        self._in_layer = 0

    def kind_of(self, arguments: Sequence[Any], layer: str) -> EdgeType:
        """Returns the edge type whose edges are among the arguments of a conv.

        Raises:
            UnsupportedModelError: if no argument has edges of the batch.
        """
        for each in arguments:
            kind = self._kinds.get(id(each))
            if kind is not None:
                return kind
        raise UnsupportedModelError(
            f"'{layer}' was called with other edges than the batch's, which is not supported on a graph with types. Pass "
            "batch[...].edge_index or batch.edge_index_dict unchanged, and select edges in the data."
        )

    def with_halo(self, kind: EdgeType, x: Tensor, layer: str, columns: int | None) -> tuple[GraphContext, Tensor] | None:
        """Returns the edges of a type over the rows S x, and S x, computed once for all edge types that read x.

        Returns None if rows are not shared; all ranks agree.

        Args:
            kind: edge type.
            x: features of the sources, ``[N, F]``.
            layer: name of the layer for errors and traffic.
            columns: number of columns that this edge type would exchange otherwise; None for the columns of x.
        """
        relation, expanded = self.relations[kind], self._expanded.get(kind)
        if expanded is None or relation.share is None:
            return None
        relation.check_rows(x.size(0), layer)
        kept = relation.cache.widths > 0 and relation.cache.is_constant(x)
        if not kept and columns is not None and columns * self._num_readers[kind[0]] < x.size(1):
            return None
        rows = relation.share(x, layer)
        if rows is None:
            return None
        if kept and rows is not expanded.x:
            expanded.turn_to(rows, relation.edge_index, relation.edge_weight)
        return expanded, rows

    def _share_rows(self, name: NodeType, first: GraphContext, x: Tensor, layer: str) -> Tensor | None:
        """Returns S x for all edge types that read a node type; None if in-place changes of x cannot be detected.

        `first` is the graph of the first edge type that reads the node type. The last tensor of each shape is cached.
        """
        if first.cache.widths and first.cache.is_constant(x):
            return first.expand(x, layer, unshared=True)
        is_inference = x.is_inference()  # inference tensors have no version counter
        if is_inference and not self._in_layer:
            return None
        key, seen = (name, x.shape[1:]), (0 if is_inference else version_counter(x), torch.is_grad_enabled())
        cached = self._shared_rows.get(key)
        if cached is None or cached[0] is not x or cached[1] != seen:
            cached = self._shared_rows[key] = x, seen, first.expand(x, layer, unshared=True)
        return cached[2]

    @contextmanager
    def one_layer(self) -> Iterator[None]:
        """Context manager that marks PyG code which calls convs in sequence without changing rows in between."""
        self._in_layer += 1
        try:
            yield
        finally:
            self._in_layer -= 1
            if not self._in_layer:
                self._shared_rows = {key: cached for key, cached in self._shared_rows.items() if not cached[0].is_inference()}

    @override
    def begin_step(self, step: Step | None = None) -> None:
        self._shared_rows.clear()
        for relation in (*self.relations.values(), *self._expanded.values()):
            relation.propagations.clear()
        super().begin_step(step)

    @property
    @override
    def exchanges(self) -> list[Exchange]:
        return [exchange for relation in self.relations.values() for exchange in relation.exchanges]

    # Methods used by helpers, which need a graph with rows of one type.

    @override
    def check_rows(self, rows: int, layer: str, per_target: bool = False) -> None:
        raise UnsupportedModelError(
            f"{layer} does not support graphs with types: the type of its rows is unknown. Use convs, whose edges define the "
            "type."
        )

    @override
    def check_expanded_rows(self, rows: int, layer: str) -> None:
        self.check_rows(rows, layer)

    @override
    def cache_selection(self, name: str, edge_index: Tensor, choose: Callable[[], Any]) -> Any:
        self.check_rows(0, "select_edges")

    @property
    @override
    def all_on_loaded_edges(self) -> set[str]:
        return {layer for relation in self.relations.values() for layer in relation.on_loaded_edges}


def _expanded_graph(relation: GraphContext) -> GraphContext:
    """Returns the edges of a type over rows S x, without an exchange."""
    exchange, rows = relation.exchange, relation.num_owned + relation.num_halo
    nothing = np.empty(0, np.int64)
    plan = HaloPlan(rows, (0,) * exchange.world.size, (nothing,) * exchange.world.size)
    return GraphContext(
        HaloExchange(plan, exchange.world, exchange.meter),
        torch.empty(0, 0),
        relation.edge_index,
        relation.edge_weight,
        relation.cache.widths,
        num_targets=relation.num_targets,
    )


class _TypedConv:
    """Data of the methods of one conv; shared, not copied, when the model is copied."""

    def __init__(self, graph: TypedGraph, layer: str) -> None:
        self.graph, self.layer = graph, layer
        self._methods: dict[int, dict[str, Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _TypedConv:
        return self

    @contextmanager
    def bound(self, conv: MessagePassing, context: GraphContext) -> Iterator[None]:
        """Context manager that binds a conv to the rank's graph of one edge type."""
        own = {name: conv.__dict__.pop(name) for name in ("forward", "propagate", STATE) if name in conv.__dict__}
        try:
            if id(context) not in self._methods:
                self._methods[id(context)] = bound_methods(conv, self.layer, context)
            methods = self._methods[id(context)]
            for name, method in methods.items():
                is_method = isinstance(method, types.MethodType)
                object.__setattr__(conv, name, types.MethodType(method.__func__, conv) if is_method else method)
            yield
        finally:
            for name in self._methods.get(id(context), ()):
                conv.__dict__.pop(name, None)
            conv.__dict__.update(own)


def check_typed_module(module: torch.nn.Module) -> None:
    """Raises :class:`UnsupportedModelError` for the first module that is not exact on a partitioned graph with types."""
    check_module(module, True, _refuse_for_one_type)


def _refuse_for_one_type(where: str, child: torch.nn.Module) -> None:
    if isinstance(child, (pyg_nn.DirGNNConv, pyg_nn.GPSConv)) or (isinstance(child, tuple(OVER_ALL)) and global_methods(child)):
        raise UnsupportedModelError(f"{where} does not support graphs with types. Use convs that are called on an edge type.")


class TypedBinding(Binding):
    """Binding of every conv of `module` to the edge types that it is called on, and of every norm to the rank's rows."""

    context: TypedGraph
    check = staticmethod(check_typed_module)

    @override
    def bind(self) -> None:
        if self._patches:
            return
        super().bind()
        graph = self.context

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            with graph.one_layer():
                return type(self).forward(self, *args, **kwargs)

        for child in self._module.modules():
            if isinstance(child, pyg_nn.HeteroConv):
                self._patch(child, {"forward": types.MethodType(forward, child)})

    @override
    def _bind(self, conv: MessagePassing, layer: str, context: GraphContext) -> None:
        assert isinstance(context, TypedGraph)
        self.check_unbound(conv, layer)
        self._patch(conv, _methods_of(conv, context, layer), _TypedConv(context, layer))


def _forward(self: MessagePassing, *args: Any, **kwargs: Any) -> Any:
    """Forward method of a conv that is called on one edge type at a time."""
    state: _TypedConv = self.__dict__[STATE]
    graph, layer = state.graph, state.layer
    kind = graph.kind_of((*args, *kwargs.values()), layer)
    if kind[0] != kind[2] and getattr(self, "add_self_loops", False):
        raise UnsupportedModelError(
            f"'{layer}' ({type(self).__name__}) does not support self-loops on edges {kind}, whose ends have two types. Set "
            "add_self_loops=False."
        )
    context: GraphContext = graph.relations[kind]
    x = args[0] if args else kwargs.get("x")
    source, target = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, x)
    columns = rule_of(type(self), "forward", "message").halo_columns
    if isinstance(source, Tensor) and source.dim() == 2 and columns is not None and not _is_watched(self):
        taken = graph.with_halo(kind, source, layer, columns(self))
        if taken is not None:
            context, rows = taken
            if args:
                args = ((rows, target), *args[1:])
            else:
                kwargs = {**kwargs, "x": (rows, target)}
    with state.bound(self, context):
        return self.forward(*args, **kwargs)


def _is_watched(conv: MessagePassing) -> bool:
    """Returns whether a submodule of a conv has hooks, which would receive S x instead of x."""
    return any(map(pyg.is_watched, list(conv.modules())[1:]))


# Convs of all types at once ###################################################


def _hgt(conv: Any, graph: TypedGraph, layer: str) -> dict[str, Any]:
    """Returns methods that exchange keys and values of halo nodes, one message per source type; queries are local."""

    def construct(
        self: Any, k_dict: Mapping[str, Tensor], v_dict: Mapping[str, Tensor], edge_index_dict: Mapping[EdgeType, Any]
    ) -> Any:
        keys, values = dict(k_dict), dict(v_dict)
        seen = set[NodeType]()
        for edge_index in edge_index_dict.values():
            kind = graph.kind_of((edge_index,), layer)
            relation, name = graph.relations[kind], kind[0]
            relation.on_loaded_edges.add(layer)
            if name not in seen:
                seen.add(name)
                relation.check_rows(k_dict[name].size(0), layer)
                keys[name], values[name] = relation.exchange.expand_all([k_dict[name], v_dict[name]], layer)
        return getattr(type(self), pyg.HGT_SOURCES)(self, keys, values, edge_index_dict)

    return {pyg.HGT_SOURCES: types.MethodType(construct, conv)}


def _han(conv: Any, graph: TypedGraph, layer: str) -> dict[str, Any]:
    """Returns methods whose attention between edge types uses global means over the nodes of all ranks."""
    take = Statistics(graph, layer)

    def group(xs: list[Tensor], q: Tensor, k_lin: torch.nn.Module) -> tuple[Tensor | None, Tensor | None]:
        if not xs:
            return None, None
        out = torch.stack(xs)
        mean, _ = take.mean(torch.tanh(k_lin(out)), (1,))
        attention = torch.softmax((q * mean.squeeze(1)).sum(-1), dim=0)
        return torch.sum(attention.view(len(xs), 1, -1) * out, dim=0), attention

    run = patch_globals(conv.forward, group=group).__func__  # type: ignore[attr-defined]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with graph.one_layer():
            return run(self, *args, **kwargs)

    def propagate(self: Any, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        state: _TypedConv = self.__dict__[STATE]
        context = state.graph.relations[state.graph.kind_of((edge_index,), state.layer)]
        with state.bound(self, context):
            return self.propagate(edge_index, size=size, **kwargs)

    return {"forward": types.MethodType(forward, conv), "propagate": types.MethodType(propagate, conv)}


@singledispatch
def _methods_of(conv: MessagePassing, graph: TypedGraph, layer: str) -> dict[str, Any]:
    """Returns the methods that replace a bound conv's, by name; HANConv and HGTConv, which get all types at once, differ."""
    return {"forward": types.MethodType(_forward, conv)}


_methods_of.register(pyg_nn.HANConv, _han)
_methods_of.register(pyg_nn.HGTConv, _hgt)
