"""Norms over ranks equal one device: outputs, gradients, running statistics (gloo ranks, float64)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from common import assert_same, awkward_graph, single, train
from torch import nn
from torch_geometric import nn as pyg

from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.nn import Binding, GraphContext
from lightning_gnn.partition.shard import HaloPlan

NORMS: dict[str, Any] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(6),
    "BatchNorm1d of cubes": lambda: nn.BatchNorm1d(3),
    "BatchNorm1d, average": lambda: nn.BatchNorm1d(6, momentum=None),
    "BatchNorm1d, plain": lambda: nn.BatchNorm1d(6, affine=False, track_running_stats=False),
    "BatchNorm": lambda: pyg.BatchNorm(6),
    "DiffGroupNorm": lambda: pyg.DiffGroupNorm(6, groups=3),
    "GraphNorm": lambda: pyg.GraphNorm(6),
    "GraphSizeNorm": lambda: pyg.GraphSizeNorm(),
    "InstanceNorm": lambda: pyg.InstanceNorm(6, affine=True, track_running_stats=True),
    "LayerNorm of the graph": lambda: pyg.LayerNorm(6),
    "LayerNorm of nodes": lambda: pyg.LayerNorm(6, mode="node"),
    "MeanSubtractionNorm": lambda: pyg.MeanSubtractionNorm(),
    "PairNorm": lambda: pyg.PairNorm(),
    "PairNorm, individually": lambda: pyg.PairNorm(scale_individually=True),
}


def compare(rank: int, world_size: int, counts: list[int]) -> None:
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30))
    try:
        for name in NORMS:
            compare_norm(name, counts, world)
    finally:
        world.close()


def compare_norm(name: str, counts: list[int], world: World) -> None:
    """Two steps of training and one of evaluation: rows, gradients and buffers."""
    rank, size = world.rank, world.size
    rows = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    shape = (sum(counts), 3, 2) if "cubes" in name else (sum(counts), 6)
    torch.manual_seed(0)
    whole = (3 + 2 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    weight = torch.randn(shape, dtype=torch.float64)
    reference, norm = (NORMS[name]().double() for _ in range(2))
    with torch.no_grad():
        for p, q in zip(norm.parameters(), reference.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
            q.copy_(p)
    plan = HaloPlan(counts[rank], (0,) * size, tuple(torch.empty(0).long().numpy() for _ in counts))
    empty = torch.empty(2, 0, dtype=torch.long)
    binding = Binding(nn.Sequential(norm), GraphContext(HaloExchange(plan, world, Meter()), whole, empty, None))
    mine = whole.detach()[rows].clone().requires_grad_()

    def check(found: Any, expected: Any, rtol: float, atol: float) -> None:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")

    for step in range(3):
        reference.train(step < 2)
        norm.train(step < 2)
        for parameter in (*norm.parameters(), *reference.parameters(), whole, mine):
            parameter.grad = None
        expected, out = reference(whole), norm(mine)
        (expected * weight).sum().backward()
        (out * weight[rows]).sum().backward()
        check(out, expected[rows], 1e-9, 1e-11)
        check(mine.grad, whole.grad[rows], 1e-8, 1e-10)
        for p, q in zip(norm.parameters(), reference.parameters()):
            check(world.all_reduce_(p.grad), q.grad, 1e-8, 1e-10)
        check(norm.state_dict(), reference.state_dict(), 1e-10, 1e-12)
    binding.release()
    assert "forward" not in vars(norm)


@pytest.mark.parametrize("counts", [[5, 9], [7, 0, 1], [20, 1, 4]])
def test_equals_one_device(ranks, counts):
    """All norms in one job: the ranks connect once."""
    ranks.run(len(counts), compare, counts)


@pytest.mark.parametrize("model", ["gcn_batch_norm", "gin_batch_norm", "sage_graph_norm"])
def test_models_with_norms_train_alike(ranks, model):
    graph = awkward_graph()
    expected = single(graph, model)
    for found in ranks.run(3, train, graph, model):
        # A bias before BatchNorm has no gradient but rounding, which Adam scales up.
        assert_same(found, expected, rtol=1e-5, atol=1e-5)
        losses = [[epoch["train_loss"] for epoch in result["epochs"]] for result in (found, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-11)
