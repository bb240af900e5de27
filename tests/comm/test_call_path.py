"""The way of a row: how many functions of this package stand between a conv and the wire, and how many are called."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from test_contract import Own, shards
from torch_geometric import nn

import lightning_gnn
from lightning_gnn.comm.call import DIRECTIONS
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.strategy.scheme import bind_module

PACKAGE = str(Path(lightning_gnn.__file__).parent)
WIRES = {"post": "shared_memory.py", "batch_isend_irecv": "distributed_c10d.py"}
"""Functions that hand bytes on, ours or torch's, and their files."""

CONVS: dict[str, Callable[[], torch.nn.Module]] = {
    "GCNConv": lambda: nn.GCNConv(8, 8),
    "SAGEConv": lambda: nn.SAGEConv(8, 8),
    "GATConv": lambda: nn.GATConv(8, 8),
    "own": Own,
}


LIMITS = json.loads((Path(__file__).parents[2] / ".ci/limits.json").read_text())
"""By ``"frames"``, ``"files"`` and ``"calls"``, and by direction, the most that there may be; calls also by conv."""


@dataclass
class Way:
    """What was seen of one direction of an exchange, from start to end.

    Attributes:
        frames: functions of this package on the stack at the wire, the outermost first, of the deepest such stack.
        calls: of functions of this package; of what a wait looks at again and again, the first.
    """

    frames: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    _waits: list[FrameType] = field(default_factory=list)

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Looks at what this thread calls while open."""
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if WIRES.get(code.co_name) == Path(code.co_filename).name:
            self.frames = max(self.frames, list(_ours(frame)), key=len)
        if code.co_filename.startswith(PACKAGE) and not self._is_looked_at_again(frame):
            self.calls.append(_name(frame))

    def _is_looked_at_again(self, frame: FrameType) -> bool:
        """Returns whether a wait in shared memory calls this, and has called something before."""
        wait = frame.f_back
        while wait is not None and wait.f_code.co_name != "_wait":
            wait = wait.f_back
        if wait is None or any(wait is known for known in self._waits):
            return wait is not None
        self._waits.append(wait)  # held, so that another one is another
        return False


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_filename.removeprefix(PACKAGE + '/')}:{code.co_qualname}"


def _ours(frame: FrameType | None) -> Iterator[str]:
    if frame is not None:
        yield from _ours(frame.f_back)
        if frame.f_code.co_filename.startswith(PACKAGE):
            yield _name(frame)


def ways(rank: int, world_size: int, conv: str, shared_memory: bool) -> list[Any]:
    """Returns frames and calls, forward and backward, of the second layer in the third step."""
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=60), shared_memory)
    try:
        shard = shards(world_size)[rank]
        torch.manual_seed(0)
        model = torch.nn.ModuleList([CONVS[conv](), CONVS[conv]()]).double()
        x, edge_index = shard.batch.x, shard.batch.edge_index
        binding = bind_module(DGCLScheme(topology=None), model, shard, world, Meter())
        for _ in range(3):
            binding.context.begin_step()
            rows = model[0](x, edge_index).detach().requires_grad_()
            forward, backward = Way(), Way()
            world.barrier()
            with forward.seen():
                out = model[1](rows, edge_index)
            world.barrier()
            with backward.seen():
                out.sum().backward()
        binding.release()
        return [(way.frames, way.calls) for way in (forward, backward)]
    finally:
        world.close()


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("conv", CONVS)
def test_the_way_of_a_row_is_short(ranks, conv, shared_memory):
    for found in ranks.run(2, ways, conv, shared_memory):
        for direction, (frames, calls) in zip(DIRECTIONS, found):
            assert frames, "no message was seen"
            files = {frame.partition(":")[0] for frame in frames}
            assert len(frames) <= LIMITS["frames"][direction], frames
            assert len(files) <= LIMITS["files"][direction], sorted(files)
            assert len(calls) <= LIMITS["calls"][direction][conv], calls
