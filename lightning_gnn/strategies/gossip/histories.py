"""Binding to batches of a graph whose halo rows are those of a history: what layers made of these nodes in other batches.

Source: Fey et al., "GNNAutoScale" (ICML 2021), section 3: a layer's input rows of halo nodes are historical, and what the layer
itself makes of them is not. So weights learn of all messages that reach the batch, and only what lies behind a halo row is taken
as given. A conv therefore computes on N + H rows, of the batch and of its halo, and gives N.

N nodes of the batch, H halo nodes; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.nn import DirGNNConv, MessagePassing

from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.nn.bind import Binding
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.nn.convs import rule_of
from lightning_gnn.nn.rank_graph import UnsupportedModelError
from lightning_gnn.partition.shard import HaloPlan
from lightning_gnn.strategies.gossip.history import HistoryExchange


class _Beside(GraphContext):
    """N + H rows as one graph in which edges end at the first N only; there is nothing to exchange."""

    history: HistoryExchange

    def scale_of_rows(self, scale: Tensor, layer: str) -> Tensor:
        return self.history.expand(scale[: self.history.num_owned], layer)


class HistoryBinding(Binding):
    """Binds `module` to batches, one after the other: see :meth:`turn_to`.

    Raises:
        UnsupportedModelError: a layer reads out-edges; see :func:`~lightning_gnn.nn.bind.check_module` for others.
    """

    def __init__(self, module: torch.nn.Module, exchange: HistoryExchange) -> None:
        for name, child in module.named_modules():
            if isinstance(child, DirGNNConv):
                raise UnsupportedModelError(
                    f"'{name}' (DirGNNConv) reads out-edges, of which a batch has those inside it only. Use halo=None, which "
                    "leaves all others out."
                )
        nothing = HaloPlan(0, (0,), (np.empty(0, np.int64),))
        none, no_edges = torch.empty(0, 0), torch.empty(2, 0, dtype=torch.int64)
        self._beside = _Beside(HaloExchange(nothing, exchange.world, exchange.meter), none, no_edges, None, 0)
        self._beside.history = self.exchange = exchange
        self._inside = False
        self._x = self._halo_x = none
        super().__init__(module, GraphContext(exchange, none, no_edges, None, 0))

    def turn_to(self, x: Tensor, halo_x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> None:
        """Takes another batch, of which the exchange has been told.

        Args:
            x, halo_x: features, ``[N, F]`` and ``[H, F]``, which are right for halo nodes, too, where a conv reads x itself.
            edge_index: ``[2, E]``, halo nodes from N on.
            edge_weight: ``[E]``.
        """
        self._x, self._halo_x = x, halo_x
        self._beside.exchange.num_owned = len(x) + len(halo_x)
        for context in (self.context, self._beside):
            context.turn_to(x, edge_index, edge_weight)

    def _bind(self, conv: MessagePassing, layer: str, context: GraphContext) -> None:
        several_hops = rule_of(type(conv)).several_hops
        if several_hops:  # those of halo nodes come from the history each time
            super()._bind(conv, layer, context)
            return
        super()._bind(conv, layer, self._beside)
        forward, signature = conv.forward.__func__, inspect.signature(type(conv).forward)

        def run(conv: MessagePassing, *args: Any, **kwargs: Any) -> Any:
            if self._inside:  # of a conv that has this one as a part, and has the rows
                return forward(conv, *args, **kwargs)
            given, known = signature.bind(conv, *args, **kwargs), dict[int, Tensor]()
            for name, value in given.arguments.items():
                if not name.startswith("edge"):
                    given.arguments[name] = self._with_halo(value, conv, layer, known)
            before, self._inside = self._beside.propagations[layer], True
            try:
                out = forward(*given.args, **given.kwargs)
            finally:
                self._inside = False
            if several_hops is None and self._beside.propagations[layer] > before + 1:
                raise UnsupportedModelError(
                    f"'{layer}' ({type(conv).__name__}) propagates several times in a call, of which the second would read "
                    "rows of halo nodes that are not there. Make it of several convs, or use halo=None."
                )
            rows = slice(0, self.context.num_owned)
            return out[rows] if isinstance(out, Tensor) else (out[0][rows], *out[1:])

        self._patch(conv, {"forward": types.MethodType(run, conv)})

    def _with_halo(self, value: Any, conv: MessagePassing, layer: str, known: dict[int, Tensor]) -> Any:
        """Returns an argument with the rows of halo nodes behind those of the batch's, where it has a row for each of these."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._with_halo(each, conv, layer, known) for each in value)
        dim = conv.node_dim if isinstance(value, Tensor) and value.dim() > 1 else 0
        if not isinstance(value, Tensor) or not value.dim() or value.size(dim) != self.context.num_owned:
            return value
        if id(value) not in known:  # what is given twice stays one
            own = value is self._x
            known[id(value)] = torch.cat([value, self._halo_x]) if own else self.exchange.expand(value, layer, dim)
        return known[id(value)]
