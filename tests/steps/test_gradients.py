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

CASES = ["plain", "one skips", "all skip", "reentrant", "late, in place", "late, other tensor"]
BUCKETS = {1: 8, 200: 2, 1 << 20: 1}
"""How many buckets there are, by their size in bytes."""


def make_layers() -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    return [torch.nn.Linear(4, 4).double() for _ in range(4)]


def parameters_of(layers: Sequence[torch.nn.Linear]) -> list[torch.nn.Parameter]:
    return [parameter for layer in layers for parameter in layer.parameters()]


def add_late(layer: torch.nn.Linear, case: str) -> None:
    """Adds to a gradient that has been sent: in place, or as another tensor."""
    if layer.weight.grad is not None:
        if case == "late, in place":
            layer.weight.grad.add_(1.0)
        else:
            layer.weight.grad = layer.weight.grad + 1.0


def backward(layers: Sequence[torch.nn.Linear], rank: int, case: str) -> None:
    """One rank's backward: of another input, and through other layers if the case says so."""
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    skips = case == "all skip" or (case == "one skips" and rank == 1)
    for index, layer in enumerate(layers):
        if not (skips and index == 2):
            x = layer(x).tanh()
        if index == 0 and rank == 1 and "late" in case:  # the backward gets here last
            x.register_hook(lambda _: add_late(layers[3], case))
    if case == "reentrant":  # each is a backward within the backward, and adds to the same gradient
        for _ in range(2):
            x = checkpoint(layers[3], x, use_reentrant=True)
    x.square().sum().backward()


def summed(rank: int, world_size: int, shared_memory: bool) -> dict[tuple[int, str], tuple[int, list[int]]]:
    """Returns what :func:`summed_in` does, by size of buckets and case."""
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30), shared_memory)
    before = gradients.BUCKET_BYTES
    found: dict[tuple[int, str], tuple[int, list[int]]] = {}
    try:
        for bucket_bytes in BUCKETS:
            gradients.BUCKET_BYTES = bucket_bytes
            found.update({(bucket_bytes, case): summed_in(world, case) for case in CASES})
    finally:
        world.close()
        gradients.BUCKET_BYTES = before
    return found


def summed_in(world: World, case: str) -> tuple[int, list[int]]:
    """Returns how many buckets there are and how many were sent while each backward ran, once all sums are right."""
    layers = make_layers()
    total = GradientSum(world, lambda: parameters_of(layers))
    expected = make_layers()
    early = []

    def check(what: str) -> None:
        for number, (parameter, wanted) in enumerate(zip(parameters_of(layers), parameters_of(expected))):
            if wanted.grad is None:
                assert parameter.grad is None
            else:
                where = f"{case}, {what}, {len(total._buckets)} buckets, parameter {number}"
                torch.testing.assert_close(parameter.grad, wanted.grad, msg=lambda m, w=where: f"{w}: {m}")

    for _ in range(2):  # the second adds to what the first left
        total.before()
        backward(layers, world.rank, case)
        early.append(total._next)
        total.after()
        for other in range(world.size):
            backward(expected, other, case)
        check("summed")
    with total.pause():
        total.before()
        backward(layers, world.rank, case)
        total.after()
    total.before()
    backward(layers, world.rank, case)
    total.after()
    for other in range(world.size):
        for _ in range(2):
            backward(expected, other, case)
    check("after one that was not")
    total.release()
    return len(total._buckets), early


@pytest.mark.parametrize("shared_memory", [True, False])
def test_gradients_are_summed(ranks, shared_memory):
    """All cases in one job: the ranks connect once."""
    found: list[Any] = ranks.run(2, summed, shared_memory)
    for (bucket_bytes, case), (count, early) in [item for each in found for item in each.items()]:
        assert count == BUCKETS[bucket_bytes]
        if case == "plain" and bucket_bytes == 1:
            assert early == [7, 7], "buckets did not leave while the backward ran"
