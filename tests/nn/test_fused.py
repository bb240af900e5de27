"""Convs that get a forward of their own: the same numbers as PyG's, by kernels. No ranks (tests/nn/test_convs.py has those)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import FEATURES
from torch_geometric import nn
from torch_geometric.nn import MessagePassing

from lightning_gnn.nn import Binding

DEGREES = torch.tensor([3, 5, 9, 12, 8, 4, 2])
FOUR = ["mean", "min", "max", "std"]
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]

CONVS: dict[str, Any] = {
    "gat": lambda: nn.GATConv(FEATURES, 5, heads=3),
    "gat, mean of heads": lambda: nn.GATConv(FEATURES, 5, heads=3, concat=False, add_self_loops=False, residual=True),
    "gat, pair": lambda: nn.GATConv((FEATURES, FEATURES), 5, heads=2),
    "gat, edges": lambda: nn.GATConv(FEATURES, 5, heads=2, edge_dim=2),
    "gat, edges without loops": lambda: nn.GATConv(FEATURES, 5, heads=2, edge_dim=2, add_self_loops=False),
    "gatv2": lambda: nn.GATv2Conv(FEATURES, 5, heads=3),
    "gatv2, shared": lambda: nn.GATv2Conv(FEATURES, 5, heads=3, share_weights=True, concat=False, residual=True),
    "transformer": lambda: nn.TransformerConv(FEATURES, 5, heads=3),
    "transformer, beta": lambda: nn.TransformerConv(FEATURES, 5, heads=3, concat=False, beta=True),
    "transformer, no root": lambda: nn.TransformerConv(FEATURES, 5, heads=1, root_weight=False),
    "pna": lambda: nn.PNAConv(FEATURES, 6, FOUR, SCALERS, DEGREES),
    "pna, towers": lambda: nn.PNAConv(FEATURES, 6, [*FOUR, "sum", "var"], ["identity"], DEGREES, towers=2),
    "pna, divided": lambda: nn.PNAConv(FEATURES, 6, FOUR, SCALERS, DEGREES, towers=2, divide_input=True),
    "sage, max": lambda: nn.SAGEConv(FEATURES, 6, aggr="max"),
    "sage, several": lambda: nn.SAGEConv(FEATURES, 6, aggr=["mean", "max", "min", "std", "var", "sum"]),
    "graph, min": lambda: nn.GraphConv(FEATURES, 6, aggr="min"),
    "simple, several": lambda: nn.SimpleConv(aggr=["max", "mean"], combine_root="cat"),
    "gin": lambda: nn.GINConv(torch.nn.Linear(FEATURES, 5)),
}


class Layer(torch.nn.Module):
    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv


@pytest.fixture
def no_rows_per_edge(monkeypatch) -> Any:
    """PyG lifts rows to edges by this."""

    def forbid() -> None:
        def lift(*_: Any, **__: Any) -> Any:
            raise AssertionError("rows were lifted to edges")

        monkeypatch.setattr(MessagePassing, "_lift", lift)
        monkeypatch.setattr(MessagePassing, "_index_select", lift, raising=False)

    return forbid


# PNA's extremes are of products, whose ties are up to rounding.
CASES = [(name, ties) for name in CONVS for ties in (False, True) if not (ties and "pna" in name)]


@pytest.mark.parametrize(("name", "ties"), CASES)
def test_same_as_pyg_without_rows_per_edge(context, no_rows_per_edge, name, ties):
    torch.manual_seed(0)
    layer = Layer(CONVS[name]()).double()
    rows = torch.randn(context.num_owned, FEATURES, dtype=torch.float64)
    rows = (rows.round() if ties else rows).requires_grad_()
    attributes = torch.randn(context.edge_index.size(1), 2, dtype=torch.float64, requires_grad=True)
    inputs = [rows, context.edge_index, *([attributes] if "edges" in name else [])]
    learned = [*layer.parameters(), rows, *([attributes] if "edges" in name else [])]

    def run() -> tuple[torch.Tensor, Any]:
        given = [(rows, rows) if "pair" in name else rows, *inputs[1:]]
        out = layer.conv(*given)
        weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
        return out, torch.autograd.grad((out * weights).sum(), learned, allow_unused=True)

    expected, wanted = run()
    binding = Binding(layer, context)
    no_rows_per_edge()
    out, found = run()
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for one, other in zip(found, wanted):
        if one is not None or other is not None:
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
    binding.release()


@pytest.mark.parametrize("make", [nn.GATConv, nn.GATv2Conv, nn.TransformerConv])
def test_attention_weights_are_those_of_pyg(context, make):
    torch.manual_seed(0)
    layer = Layer(make(FEATURES, 5, heads=3)).double()
    rows = torch.randn(context.num_owned, FEATURES, dtype=torch.float64)
    expected, (edges, wanted) = layer.conv(rows, context.edge_index, return_attention_weights=True)
    Binding(layer, context)
    out, (same, found) = layer.conv(rows, context.edge_index, return_attention_weights=True)
    assert torch.equal(same, edges)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(out, expected)


def test_attention_over_edges_that_change(context):
    """Dropped edges differ in each step; their matrix is made for the step."""
    layer = Layer(nn.GATConv(FEATURES, 5, heads=2)).double()
    rows = torch.randn(context.num_owned, FEATURES, dtype=torch.float64)
    for drop in (0.0, 0.3, 0.6):
        kept = context.edge_index[:, torch.rand(context.edge_index.size(1)) >= drop]
        expected = layer.conv(rows, kept)
        binding = Binding(layer, context)
        torch.testing.assert_close(layer.conv(rows, kept), expected)
        binding.release()


def test_dropped_attention_has_the_same_mean(context):
    torch.manual_seed(0)
    layer = Layer(nn.GATConv(FEATURES, 5, heads=2, dropout=0.5)).double()
    rows = torch.randn(context.num_owned, FEATURES, dtype=torch.float64)
    layer.eval()
    expected = layer.conv(rows, context.edge_index)
    layer.train()
    Binding(layer, context)
    drawn = torch.stack([layer.conv(rows, context.edge_index) for _ in range(400)])
    assert drawn.std(0).max() > 0
    torch.testing.assert_close(drawn.mean(0), expected, rtol=0, atol=0.5 * float(drawn.detach().std(0).max()))


def test_a_watched_conv_keeps_its_forward(context):
    layer = Layer(nn.GATConv(FEATURES, 5)).double()
    seen = []
    layer.conv.register_message_forward_hook(lambda conv, inputs, out: seen.append(out.shape))
    Binding(layer, context)
    layer.conv(torch.randn(context.num_owned, FEATURES, dtype=torch.float64), context.edge_index)
    assert seen
