"""What edges of a node add up to, and which of several self-loops counts. One process."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.utils import add_remaining_self_loops, scatter

from lightning_gnn.nn.edges import LastLoops, last_loops, mean_by, sum_by

EDGES = torch.tensor([[0, 1, 1, 2, 1, 0, 1], [0, 1, 2, 2, 1, 3, 1]])
"""Node 1 has three self-loops, nodes 0 and 2 one each."""


def looped(weight: Tensor, alike: bool) -> tuple[Tensor, Tensor]:
    """Weights with remaining self-loops, and the gradient of the edges' own."""
    weight = weight.clone().requires_grad_()
    _, found = add_remaining_self_loops(
        EDGES, LastLoops.apply(weight, *last_loops(EDGES, 4)) if alike else weight, 1.0, 4
    )
    found.backward(torch.arange(1.0, len(found) + 1))
    assert weight.grad is not None
    return found.detach(), weight.grad


def test_the_last_self_loop_of_a_node_counts_as_in_pyg_on_one_cpu():
    weight = torch.rand(7)
    for ours, theirs in zip(looped(weight, True), looped(weight, False)):
        assert torch.equal(ours, theirs)
    # Whichever PyG takes, it is the last one's weight, and no other edge's has changed.
    alike = LastLoops.apply(weight, *last_loops(EDGES, 4))
    assert alike[[1, 4, 6]].tolist() == [float(weight[6])] * 3
    assert torch.equal(alike[[0, 2, 3, 5]], weight[[0, 2, 3, 5]])


def test_sums_and_means_are_pygs():
    values = torch.rand(7, 2)
    for make, how in ((sum_by, "sum"), (mean_by, "mean")):
        assert torch.equal(make(EDGES[1], values, 5), scatter(values, EDGES[1], 0, dim_size=5, reduce=how))
