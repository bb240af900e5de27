"""A process group for several ranks on one GPU, which NCCL does not take: tensors travel through host memory, by gloo.

For tests of ranks' CUDA tensors where there is one GPU. Operations are over when they return.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

NAME = "staged"


def _done(result: Any) -> Any:
    future: Any = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class StagedGroup(dist.ProcessGroup):
    """What NCCL has that this package asks for, over gloo."""

    made = 0

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo, self._rank, self._size = dist.ProcessGroupGloo(store, rank, size, timeout), rank, size
        StagedGroup.made += 1
        self._name = f"{NAME}{StagedGroup.made}"

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def getSize(self) -> int:
        return self._size

    size = getSize

    def rank(self) -> int:
        return self._rank

    # A group that is written in Python has no backends; torch asks for that of a device.
    supports_splitting = False

    def _get_backend(self, device: Any) -> Any:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        host = _on_host(tensors[0])
        self._gloo.allreduce([host], opts or dist.AllreduceOptions()).wait()
        tensors[0].copy_(host)
        return _done(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        host = _on_host(tensors[0])
        self._gloo.broadcast([host], opts).wait()
        tensors[0].copy_(host)
        return _done(tensors)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        host = _on_host(ins[0])
        parts = [torch.empty_like(host) for _ in outs[0]]
        self._gloo.allgather([parts], [host]).wait()
        for out, part in zip(outs[0], parts):
            out.copy_(part)
        return _done(outs)

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier(dist.BarrierOptions()).wait()
        return _done([])

    def batch(self, operations: Any) -> list[Any]:
        """Sends and receives: ``batch_isend_irecv``."""
        hosts = [_on_host(each.tensor) for each in operations]
        works = [
            (self._gloo.send if each.op is dist.isend else self._gloo.recv)([host], each.peer, 0)
            for each, host in zip(operations, hosts)
        ]
        for work, each, host in zip(works, operations, hosts):
            work.wait()
            if each.op is not dist.isend:
                each.tensor.copy_(host)
        return [_done([])]


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        raise RuntimeError("tensors of the CPU have a group of their own")
    return tensor.detach().to("cpu", copy=True)


def install(device: str) -> None:
    """Has the ranks of this process exchange such tensors through host memory from now on."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, StagedGroup, devices=[device])
        batch = dist.batch_isend_irecv

        def batched(operations: Any) -> Any:
            group = operations[0].group
            return group.batch(operations) if isinstance(group, StagedGroup) else batch(operations)

        dist.batch_isend_irecv = batched
    dist.Backend.default_device_backend_map[device] = NAME
