"""Binding: what is refused, by name; what is undone; which private fields of PyG it reads. No ranks."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch_geometric
from common import FEATURES, OwnConv, awkward_graph, build
from torch_geometric import nn as pyg_nn
from torch_geometric.nn import GATConv, GCNConv, MessagePassing

from lightning_gnn import private_pyg as internals
from lightning_gnn.data.shards import split_graph
from lightning_gnn.nn import Binding, GraphContext, UnsupportedModelError
from lightning_gnn.nn.directed import reversed_shard
from lightning_gnn.partition.layout import LayoutSpec, Replicas


def bound(module: torch.nn.Module, context: GraphContext) -> torch.nn.Module:
    Binding(module, context)
    return module


class Lookup(torch.nn.Module):
    def __init__(self, *layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)


class BothWays(MessagePassing):
    def message(self, x_j: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x_j


REFUSED = {
    "refused conv": (lambda: pyg_nn.WLConv(), r"'layers.0' \(WLConv\) is not exact .* colors"),
    "out-edges": (lambda: GCNConv(4, 4, flow="target_to_source"), "needs the out-edges .* docs/recipes.md"),
    "aggregation": (lambda: OwnConv(4, 4, aggr=pyg_nn.LSTMAggregation(4, 4)), "supported are sum, mean, max, min"),
    "both": (lambda: BothWays(), "'x' in its message function both per node and per edge"),
    "lazy": (lambda: GCNConv(-1, 4), "has an unknown number of input columns"),
    "batch norm of pictures": (lambda: pyg_nn.GINConv(torch.nn.BatchNorm2d(4)), "computes statistics over all nodes"),
    "batch norm of one row": (lambda: pyg_nn.BatchNorm(4, allow_single_element=True), "allow_single_element=True"),
    "batch norm by type": (lambda: pyg_nn.HeteroBatchNorm(4, num_types=2), "computes statistics over all nodes"),
    "pooling": (lambda: pyg_nn.TopKPooling(4), "creates another graph .* 'Clusters'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name_and_nothing_stays_bound(context, kind):
    make, words = REFUSED[kind]
    fine = GCNConv(4, 4)
    with pytest.raises(UnsupportedModelError, match=words):
        bound(Lookup(fine, make()) if "layers.0" not in words else Lookup(make(), fine), context)
    assert "propagate" not in vars(fine)


@pytest.mark.parametrize("conv", [lambda: pyg_nn.LayerNorm(4, mode="node"), lambda: torch.nn.LayerNorm(4)])
def test_per_node_norms_are_allowed(context, conv):
    bound(Lookup(conv()), context)


def test_wrong_rows_are_named(context):
    model = bound(Lookup(OwnConv(4, 4), GCNConv(4, 4)), context)
    for layer in model.layers:
        with pytest.raises(UnsupportedModelError, match="was given 7 node rows, but this rank has 60 local nodes"):
            layer(torch.randn(7, 4), context.edge_index)


def test_sparse_adjacency_is_refused(context):
    model = bound(Lookup(GCNConv(FEATURES, 4, normalize=False)), context)
    with pytest.raises(UnsupportedModelError, match="Pass batch.edge_index"):
        model.layers[0](torch.randn(60, FEATURES), torch.eye(60).to_sparse_csr())


@pytest.mark.parametrize("name", ["gcn_cached", "gat", "commnet", "own", "transformer"])
def test_release_restores_everything(context, name):
    model = build(name).double()
    graph = awkward_graph()
    before = {key: dict(vars(child)) for key, child in model.named_modules()}
    keys = list(model.state_dict())
    expected = model(graph.x, graph.edge_index)
    binding = Binding(model, context)
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(context.x, context.edge_index), expected)
    binding.release()
    for key, child in model.named_modules():
        assert set(vars(child)) == set(before[key]), key
    smaller = awkward_graph(num_nodes=40, seed=9)  # nothing cached of the other graph
    model(smaller.x, smaller.edge_index)


def test_bound_twice_is_refused(context):
    model = bound(build("gcn"), context)
    with pytest.raises(RuntimeError, match="is already bound to a graph"):
        bound(model, context)


@pytest.mark.parametrize("name", ["gat", "own", "transformer", "batch_norm"])
def test_copies_are_bound_too(context, name):
    model = torch.nn.BatchNorm1d(FEATURES) if name == "batch_norm" else build(name)
    bound(model.double(), context)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    out = twin(context.x) if name == "batch_norm" else twin(context.x, context.edge_index)
    assert float(out.detach().abs().sum()) == 0.0  # the copy's own weights, not the original's
    if name == "batch_norm":
        assert int(twin.num_batches_tracked) == 1 and int(model.num_batches_tracked) == 0


@pytest.mark.parametrize("name", ["gcn_cached", "gat", "own", "transformer", "gin_batch_norm", "pna"])
def test_pickles_are_of_the_plain_model(context, name):
    """They know nothing of this package, of the rank's graph, or of what a conv has kept of it; copies lose it at the end."""
    model, graph = build(name).double(), awkward_graph(num_nodes=40, seed=9)
    plain = {key: set(vars(child)) for key, child in model.named_modules()}
    binding = Binding(model, context)
    expected = model(context.x, context.edge_index)
    twin, file = copy.deepcopy(model), io.BytesIO()
    torch.save(model, file)
    for number, data in enumerate((pickle.dumps(model), pickle.dumps(twin), file.getvalue())):
        assert b"lightning_gnn" not in data
        found = torch.load(io.BytesIO(data), weights_only=False) if number == 2 else pickle.loads(data)
        assert {key: set(vars(child)) for key, child in found.named_modules()} == plain
        binding.check_unbound(found, "")
        torch.testing.assert_close(found.state_dict(), model.state_dict())
        found.eval()(graph.x, graph.edge_index)  # of another size than the rank's
    torch.testing.assert_close(model(context.x, context.edge_index), expected)  # bound as before
    binding.release()
    assert {key: set(vars(child)) for key, child in twin.named_modules()} == plain
    twin.eval()(graph.x, graph.edge_index)


def test_edges_of_a_step_work_beside_the_batch_own(context):
    """An augmentation's edge subset takes PyG's path; the batch's own edges the kept CSR."""
    model, graph = build("gcn").double(), awkward_graph()
    subset = graph.edge_index[:, ::2]
    expected = [model(graph.x, edges) for edges in (graph.edge_index, subset, graph.edge_index)]
    bound(model, context)
    for edges, wanted in zip((context.edge_index, subset, context.edge_index), expected):
        torch.testing.assert_close(model(context.x, edges), wanted)


def test_features_changed_in_place_are_fetched_again(context):
    conv = build("sage").double()
    first = bound(conv, context)(context.x, context.edge_index)
    context.x.mul_(2.0)
    second = conv(context.x, context.edge_index)
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("conv", [pyg_nn.GraphConv, GCNConv])
def test_weights_that_are_learnt_later_are_not_kept(context, conv):
    weight = torch.rand(context.edge_index.size(1), dtype=context.x.dtype)
    weighted = GraphContext(context.exchange, context.x, context.edge_index, weight)
    layer = conv(FEATURES, 4).double()
    twin = copy.deepcopy(layer)
    bound(layer, weighted)(context.x, context.edge_index, weight)
    learnt = weight.clone().requires_grad_()
    twin(context.x, context.edge_index, learnt).square().sum().backward()
    weight.requires_grad_()
    layer(context.x, context.edge_index, weight).square().sum().backward()
    torch.testing.assert_close(weight.grad, learnt.grad)


def test_private_fields_of_this_torch_geometric():
    """If this fails, read `lightning_gnn/private_pyg.py` against the installed version."""
    assert tuple(map(int, torch_geometric.__version__.split(".")[:2])) >= (2, 7)
    gat, gcn, own = GATConv(4, 4), GCNConv(4, 4, cached=True), OwnConv(4, 4)
    assert internals.lifted_arguments(own)[:2] == ({"x"}, {"x"})
    assert internals.lifted_arguments(gcn) == ({"x"}, set(), {"edge_weight"})
    assert internals.lifted_arguments(gat, edge_update=True)[:2] == ({"alpha"}, {"alpha"})
    assert internals.implements_edge_update(gat) and not internals.implements_edge_update(gcn)
    assert internals.is_plain(gcn) and internals.linear_aggregation(gcn) == "sum"
    assert internals.linear_aggregation(own) is None
    gcn(torch.randn(3, 4), torch.tensor([[0, 1], [1, 2]]))
    assert gcn._cached_edge_index is not None
    internals.clear_caches(gcn)
    assert gcn._cached_edge_index is None
    gcn.register_message_forward_hook(lambda *_: None)
    assert not internals.is_plain(gcn)
    assert hasattr(pyg_nn.ChebConv, internals.CHEB_NORM) and hasattr(pyg_nn.HGTConv, internals.HGT_SOURCES)
    assert callable(getattr(pyg_nn.models.GraphSAGE(2, 2, 2), internals.TRIM))


def test_both_directions_want_the_edges_of_the_batch(context):
    conv = pyg_nn.DirGNNConv(GCNConv(FEATURES, 4)).double()
    with pytest.raises(UnsupportedModelError, match=r"'layers.0' \(DirGNNConv\) reads out-edges, which this scheme"):
        bound(Lookup(conv), context)
    context.reverse = context
    bound(Lookup(conv), context)
    conv(context.x, context.edge_index)
    with pytest.raises(UnsupportedModelError, match="requires batch.edge_index"):
        conv(context.x, context.edge_index[:, ::2])
    replicated = split_graph(
        awkward_graph(), np.arange(60) % 2, LayoutSpec("edge_cut", 2, replicas=Replicas(1, ((0,), (1,))))
    )
    with pytest.raises(UnsupportedModelError, match="store only the in-edges of replicas"):
        reversed_shard(replicated[0], context.exchange.world)
