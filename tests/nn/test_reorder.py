"""Fewest columns, and what constant input makes computed once: which sums are taken, on how many columns. No ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import FEATURES, build
from torch_geometric import nn

import lightning_gnn.nn.edges
from lightning_gnn.nn import Binding, CommNetConv


@pytest.fixture
def widths(monkeypatch) -> list[int]:
    """The columns of every sum over edges."""
    taken: list[int] = []
    spmm = lightning_gnn.nn.edges.spmm

    def counted(csr: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        taken.append(x.size(1))
        return spmm(csr, x, *args, **kwargs)

    monkeypatch.setattr(lightning_gnn.nn.edges, "spmm", counted)
    return taken


class Layer(torch.nn.Module):
    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv


CONVS: dict[str, Any] = {
    "gcn": nn.GCNConv,
    "sage": nn.SAGEConv,
    "sage_sum": lambda i, o: nn.SAGEConv(i, o, aggr="sum"),
    "graph": nn.GraphConv,
    "sg": lambda i, o: nn.SGConv(i, o, K=1),
    "tag": lambda i, o: nn.TAGConv(i, o, K=1),
    "commnet": CommNetConv,
    "gin": lambda i, o: nn.GINConv(nn.MLP([i, o, 3], norm="batch_norm"), eps=0.3, train_eps=True),
    "gin, sequential": lambda i, o: nn.GINConv(torch.nn.Sequential(torch.nn.Linear(i, o), torch.nn.ReLU())),
    "gin, one map": lambda i, o: nn.GINConv(torch.nn.Linear(i, o, bias=False)),
}


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize(("inputs", "outputs"), [(FEATURES, 4), (FEATURES, 20)])
def test_the_narrower_side_is_summed(context, widths, name, inputs, outputs):
    layer = Layer(CONVS[name](inputs, outputs)).double()
    rows = torch.randn(60, inputs, dtype=torch.float64, requires_grad=True)
    expected = layer.conv(rows, context.edge_index)
    [wanted] = torch.autograd.grad(expected.square().sum(), rows)
    Binding(layer, context)
    out = layer.conv(rows, context.edge_index)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), rows)[0], wanted)
    assert widths and set(widths) == {min(inputs, outputs)}


@pytest.mark.parametrize("name", [*CONVS, "own_sum_of_sources"])
def test_constant_input_is_summed_once(context, widths, name):
    make = {"own_sum_of_sources": lambda i, o: nn.SimpleConv()}
    layer = Layer({**CONVS, **make}[name](FEATURES, 4)).double()
    expected = layer.conv(context.x, context.edge_index)
    Binding(layer, context)
    for step in range(3):
        if step == 1:
            del widths[:]
        with torch.inference_mode(step == 0):  # evaluation may come first
            out = layer.conv(context.x, context.edge_index)
        torch.testing.assert_close(out, expected.detach(), check_device=False)
        if step and out.requires_grad:
            out.sum().backward()
    assert widths == []


def test_changed_input_is_summed_again(context, widths):
    model = build("gcn").double()
    Binding(model, context)
    first = model(context.x, context.edge_index)
    context.x.mul_(2.0)
    del widths[:]
    second = model(context.x, context.edge_index)
    assert FEATURES in widths and not torch.allclose(first, second)
    torch.testing.assert_close(model(context.x, context.edge_index), second)


def test_what_is_kept_survives_a_conv_that_changes_it(context):
    class InPlace(nn.MessagePassing):
        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.propagate(edge_index, x=x).add_(1.0)

    layer = Layer(InPlace())
    expected = layer.conv(context.x, context.edge_index)
    Binding(layer, context)
    for _ in range(3):
        torch.testing.assert_close(layer.conv(context.x, context.edge_index), expected)


def test_what_is_kept_is_bounded(context, widths):
    layer = Layer(nn.SGConv(FEATURES, 4, K=9)).double()
    Binding(layer, context)
    layer.conv(context.x, context.edge_index)
    assert context.cache._columns <= 4 * FEATURES
    del widths[:]
    layer.conv(context.x, context.edge_index)
    assert 0 < len(widths) <= 9


def test_input_that_learns_or_is_dropped_out_is_not_kept(context, widths):
    layer = Layer(nn.SAGEConv(FEATURES, 20)).double()
    Binding(layer, context)
    for _ in range(2):
        layer.conv(torch.nn.functional.dropout(context.x), context.edge_index)
        layer.conv(context.x * torch.ones(FEATURES, dtype=torch.float64, requires_grad=True), context.edge_index)
    assert len([width for width in widths if width]) == 4
    assert context.cache._columns == 0


def test_a_hook_on_the_map_sees_what_it_would_see(context):
    layer = Layer(nn.GraphConv(FEATURES, 4)).double()
    seen: list[torch.Tensor] = []
    layer.conv.lin_rel.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    rows = torch.randn(60, FEATURES, dtype=torch.float64)
    layer.conv(rows, context.edge_index)
    Binding(layer, context)
    layer.conv(rows, context.edge_index)
    torch.testing.assert_close(*seen)


def test_keeping_can_be_switched_off(context, widths):
    context.cache.widths = 0
    layer = Layer(nn.GCNConv(FEATURES, 4)).double()
    Binding(layer, context)
    for _ in range(3):
        layer.conv(context.x, context.edge_index)
    assert widths == [4, 4, 4] and context.cache._columns == 0
