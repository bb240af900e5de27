"""What a rank does first whose Trainers are to run on the emulated device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import emulated
import lightning as L
import pytest
import queued
import torch
from conftest import RankPool

from lightning_gnn.kernels import CSR, loops
from lightning_gnn.kernels.run import BACKENDS


def _loops(name: str, arguments: tuple[Any, ...]) -> None:
    """Runs a loop of the CPU in the device's memory, in place of Triton's; on 16-bit numbers in float32."""
    first, *others = arguments
    over_edges = isinstance(first, CSR)
    raws = [emulated.raw_of(each) for each in (first.indptr if over_edges else first, *others)]
    short = [isinstance(each, torch.Tensor) and each.dtype in (torch.bfloat16, torch.float16) for each in raws]
    wide = [each.float() if of_16_bits else each for each, of_16_bits in zip(raws, short)]
    arrays = [each.detach().numpy() if isinstance(each, torch.Tensor) else each for each in wide]
    getattr(loops, name)(*arrays, 0, first.num_rows if over_edges else len(first))
    for raw, found, of_16_bits in zip(raws, wide, short):
        if of_16_bits:
            raw.copy_(found)


def begin() -> None:
    """Has this process's Trainers for the CPU run on the emulated device, whose ranks meet in queued groups."""
    emulated.install()
    BACKENDS[emulated.NAME] = _loops
    queued.install()
    init = L.Trainer.__init__

    def on_device(self: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("accelerator") == "cpu":
            kwargs["accelerator"] = emulated.NAME
        kwargs.setdefault("inference_mode", False)
        init(self, *args, **kwargs)

    L.Trainer.__init__ = on_device  # type: ignore[method-assign]


def begin_with_one_queue() -> None:
    os.environ[queued.ONE_QUEUE] = "1"
    begin()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Ranks on the emulated device, joined by queued groups; for modules that import it."""
    pool = RankPool(begin)
    yield pool
    pool.close()
