"""Adapters: replacement methods of convs that read the structure of the whole graph."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from lightning_gnn import private_pyg as pyg
from lightning_gnn.nn.context import GraphContext, UnsupportedModelError

Adapter = Callable[[MessagePassing, GraphContext, str], dict[str, Any]]
"""Returns replacement methods for a bound conv, by name. Arguments: conv, graph context of the rank, name of the layer."""


def patch_globals(method: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Returns a bound method in which some global names of its function are replaced, for this instance only.

    ``patch_globals(conv.forward, degree=mine)`` is ``conv.forward`` in which ``degree`` refers to ``mine``.

    Raises:
        UnsupportedModelError: the method belongs to a subclass, uses none of the names and calls ``super()``, whose function
            cannot be replaced.
    """
    function = method.__func__  # type: ignore[attr-defined]
    code, known = function.__code__, {**function.__globals__, **names}
    if "super" in code.co_names and not set(names) & set(code.co_names):
        raise UnsupportedModelError(
            f"{function.__qualname__} calls super().{function.__name__}(), which needs another {', '.join(names)} on a "
            "partitioned graph and cannot receive it. Do not derive from that class: store a conv of it, and call that."
        )
    replaced = types.FunctionType(code, known, function.__name__, function.__defaults__, function.__closure__)
    replaced.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(replaced, method.__self__)  # type: ignore[attr-defined]


@contextmanager
def overridden(module: torch.nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Context manager that replaces a method of one instance."""
    object.__setattr__(module, name, method)
    try:
        yield
    finally:
        module.__dict__.pop(name)


def gcn(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    def gcn_norm(
        edge_index: Tensor,
        edge_weight: Tensor | None = None,
        num_nodes: int | None = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert num_nodes is not None and dtype is not None
        return context.gcn_norm(layer, edge_index, edge_weight, num_nodes, improved, add_self_loops, dtype)

    return {"forward": patch_globals(conv.forward, gcn_norm=gcn_norm)}


def commnet(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    return {"forward": patch_globals(conv.forward, without_self_loops=context.without_self_loops)}


def cheb(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    def norm(
        self: MessagePassing,
        edge_index: Tensor,
        num_nodes: int,
        edge_weight: Tensor | None,
        normalization: str | None,
        lambda_max: float | Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        batch: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the Laplacian scaled to eigenvalues from -1 to 1, like ChebConv."""
        context.check_rows(num_nodes, layer)
        if batch is not None:
            raise UnsupportedModelError(f"'{layer}' does not support a batch vector: all ranks share one graph. Remove it.")

        def compute() -> tuple[Tensor, Tensor]:
            edges, weight = context.laplacian(layer, edge_index, edge_weight, normalization, dtype)
            largest = lambda_max
            if largest is None:
                own = weight.max() if weight.numel() else weight.new_tensor(float("-inf"))
                largest = 2.0 * context.exchange.max_over_ranks(own, f"Largest entry of the Laplacian of '{layer}'")
            weight = 2.0 * weight / largest
            weight = weight.masked_fill(weight == float("inf"), 0.0)
            return edges, torch.where(edges[0] == edges[1], weight - 1, weight)

        if isinstance(lambda_max, Tensor):
            return compute()
        return context.once(("Laplacian", normalization, lambda_max, dtype), edge_index, edge_weight, compute)

    return {pyg.CHEB_NORM: types.MethodType(norm, conv)}


def supergat(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    def no_pairs(self: MessagePassing, edge_index: Tensor, *_: Any) -> Tensor:
        return edge_index[:, :0]

    def attention_loss(self: MessagePassing) -> Tensor:
        raise UnsupportedModelError(
            f"'{layer}' does not support get_attention_loss(), which samples pairs of all nodes. Remove the call; "
            "docs/recipes.md, 'Pairs of nodes', has losses of pairs."
        )

    return {
        "positive_sampling": types.MethodType(no_pairs, conv),
        "negative_sampling": types.MethodType(no_pairs, conv),
        "get_attention_loss": types.MethodType(attention_loss, conv),
    }


def label_propagation(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    def one_hot(y: Tensor) -> Tensor:
        own = y.max() if len(y) else y.new_tensor(0)
        classes = int(context.exchange.max_over_ranks(own, f"Classes of '{layer}'")) + 1
        return torch.nn.functional.one_hot(y, classes).to(torch.get_default_dtype())

    def gcn_norm(edge_index: Tensor, num_nodes: int, add_self_loops: bool) -> tuple[Tensor, Tensor]:
        # The default dtype, as in PyG: scales would round differently from weights.
        dtype = torch.get_default_dtype()
        return context.gcn_norm(layer, edge_index, None, num_nodes, False, add_self_loops, dtype, as_scales=False)

    method = types.MethodType(conv.forward.__wrapped__, conv)  # inside torch.no_grad()
    forward = patch_globals(method, gcn_norm=gcn_norm, one_hot=one_hot)
    return {"forward": types.MethodType(torch.no_grad()(forward.__func__), conv)}  # type: ignore[attr-defined]


def rgcn(conv: MessagePassing, context: GraphContext, layer: str) -> dict[str, Any]:
    run = conv.forward.__func__

    def forward(self: MessagePassing, *args: Any, **kwargs: Any) -> Tensor:
        with context.read_once():  # otherwise the same rows would be sent once per relation
            return run(self, *args, **kwargs)

    return {"forward": types.MethodType(forward, conv)}
