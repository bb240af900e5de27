"""The built-in generator. No ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.nn.models import GCN, MLP

from lightning_gnn import planted_partition


def test_graph_is_what_it_says():
    graph = planted_partition(5000, average_degree=8.0, num_classes=4, num_features=16, split=(0.5, 0.2, 0.1))
    source, target = graph.edge_index
    key = source * 5000 + target
    assert len(key.unique()) == len(key) and not (source == target).any()
    assert torch.equal(key.sort().values, (target * 5000 + source).sort().values)
    assert graph.edge_index.size(1) == pytest.approx(8.0 * 5000, rel=0.02)
    assert graph.x.shape == (5000, 16) and graph.x.dtype == torch.float32
    assert set(graph.y.tolist()) == {0, 1, 2, 3}
    masks = torch.stack([graph.train_mask, graph.val_mask, graph.test_mask])
    assert int(masks.sum(0).max()) == 1
    assert masks.float().mean(1).tolist() == pytest.approx([0.5, 0.2, 0.1], abs=0.03)
    inside = float((graph.y[source] == graph.y[target]).float().mean())
    assert inside == pytest.approx(0.7 + 0.3 / 4, abs=0.05)


def test_seed_decides():
    one, same, other = (planted_partition(500, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.x, same.x) and torch.equal(one.edge_index, same.edge_index)
    assert not torch.equal(one.y, other.y)


def test_tiny_and_dense_graphs():
    assert planted_partition(2, average_degree=1.0).edge_index.size(1) in (0, 2)
    dense = planted_partition(30, average_degree=20.0)
    assert dense.edge_index.size(1) <= 30 * 29


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_nodes": 1}, "at least 2 nodes"),
        ({"homophily": 1.5}, "must be from 0 to 1"),
        ({"average_degree": 0}, "between 0 and num_nodes"),
        ({"split": (0.9, 0.9, 0.1)}, "three fractions"),
    ],
)
def test_errors(options, words):
    with pytest.raises(ValueError, match=words):
        planted_partition(**options)


def accuracy(model: torch.nn.Module, *extra: torch.Tensor) -> float:
    graph = planted_partition()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        out = model(graph.x, *([graph.edge_index] if isinstance(model, GCN) else []))
        F.cross_entropy(out[graph.train_mask], graph.y[graph.train_mask]).backward()
        optimizer.step()
    return float((out.argmax(-1) == graph.y)[graph.test_mask].float().mean())


@pytest.mark.campaign
@pytest.mark.slow
def test_the_graph_helps():
    torch.manual_seed(0)
    with_graph, without = accuracy(GCN(32, 32, 2, 8)), accuracy(MLP([32, 32, 8], norm=None))
    assert with_graph > 0.8 and without < with_graph - 0.15
