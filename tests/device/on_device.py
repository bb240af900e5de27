"""What a rank does first whose Trainers are to run on the emulated device, or on a GPU where the environment asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import emulated
import lightning as L
import pytest
import queued
import torch
from conftest import RankPool
from lightning.pytorch.accelerators import AcceleratorRegistry, CUDAAccelerator
from torch.multiprocessing.reductions import reduce_tensor

ON_GPU = bool(os.environ.get("LIGHTNING_GNN_TEST_GPU"))
"""All ranks share the first GPU, and exchange through host memory, since NCCL refuses."""


class SharedGPU(CUDAAccelerator):
    """As many devices as are asked for, which are all the first one."""

    parse_devices = staticmethod(emulated.EmulatedAccelerator.parse_devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cuda", 0) for _ in devices]

    @staticmethod
    def name() -> str:
        return "shared_gpu"


def _share_the_gpu() -> str:
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    import staged_group

    staged_group.install("cuda")
    AcceleratorRegistry.register(SharedGPU.name(), SharedGPU, override=True)
    for kind in (torch.Tensor, torch.nn.Parameter):  # what a rank returns arrives on the CPU
        ForkingPickler.register(kind, lambda tensor: reduce_tensor(tensor.detach().cpu()))
    return SharedGPU.name()


def _emulate() -> str:
    emulated.install()
    queued.install()
    return emulated.NAME


def begin() -> None:
    """Has this process's Trainers for the CPU run on the device, whose ranks meet in groups for it."""
    name = _share_the_gpu() if ON_GPU else _emulate()
    init = L.Trainer.__init__

    def on_device(self: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("accelerator") == "cpu":
            kwargs["accelerator"] = name
        kwargs.setdefault("inference_mode", False)
        init(self, *args, **kwargs)

    L.Trainer.__init__ = on_device  # type: ignore[method-assign]


def begin_with_one_queue() -> None:
    os.environ[queued.ONE_QUEUE] = "1"
    begin()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Ranks on the device; for modules that import it."""
    pool = RankPool(begin)
    yield pool
    pool.close()
