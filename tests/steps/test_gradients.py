"""The sum of gradients over ranks: buckets, overlap, what has no gradient, what gets more after it was sent."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_gnn.comm.group import World
from lightning_gnn.steps import gradients
from lightning_gnn.steps.gradients import GradientSum


def make_layers() -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    return [torch.nn.Linear(4, 4).double() for _ in range(4)]


def parameters_of(layers: Sequence[torch.nn.Linear]) -> list[torch.nn.Parameter]:
    return [parameter for layer in layers for parameter in layer.parameters()]


def backward(layers: Sequence[torch.nn.Linear], rank: int, case: str) -> None:
    """One rank's backward: of another input, and through other layers if the case says so."""
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    skips = case == "all skip" or (case == "one skips" and rank == 1)
    for index, layer in enumerate(layers):
        if not (skips and index == 2):
            x = layer(x).tanh()
    if case == "reentrant":  # each is a backward within the backward, and adds to the same gradient
        for _ in range(2):
            x = checkpoint(layers[3], x, use_reentrant=True)
    x.square().sum().backward()


def summed(rank: int, world_size: int, bucket_bytes: int, shared_memory: bool, case: str) -> tuple[int, list[int]]:
    """Returns how many buckets there are and how many were sent while each backward ran, once all sums are right."""
    before, gradients.BUCKET_BYTES = gradients.BUCKET_BYTES, bucket_bytes
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30), shared_memory)
    try:
        layers = make_layers()
        total = GradientSum(world, lambda: parameters_of(layers))
        expected = make_layers()
        early = []
        for _ in range(2):  # the second adds to what the first left
            total.before()
            backward(layers, rank, case)
            early.append(total._next)
            total.after()
            for other in range(world_size):
                backward(expected, other, case)
            for parameter, wanted in zip(parameters_of(layers), parameters_of(expected)):
                if wanted.grad is None:
                    assert parameter.grad is None
                else:
                    torch.testing.assert_close(parameter.grad, wanted.grad)
        with total.blocked():
            total.before()
            backward(layers, rank, case)
            total.after()
        total.before()
        backward(layers, rank, case)
        total.after()
        for other in range(world_size):
            for _ in range(2):
                backward(expected, other, case)
        for parameter, wanted in zip(parameters_of(layers), parameters_of(expected)):
            if wanted.grad is not None:
                torch.testing.assert_close(parameter.grad, wanted.grad)
        total.release()
        return len(total._buckets), early
    finally:
        world.close()
        gradients.BUCKET_BYTES = before


@pytest.mark.parametrize("case", ["plain", "one skips", "all skip", "reentrant"])
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, 8), (200, 2), (1 << 20, 1)])
def test_gradients_are_summed(ranks, bucket_bytes, buckets, shared_memory, case):
    found: list[Any] = ranks.run(2, summed, bucket_bytes, shared_memory, case)
    for count, early in found:
        assert count == buckets
        if case == "plain" and bucket_bytes == 1:
            assert early == [7, 7], "buckets did not leave while the backward ran"
