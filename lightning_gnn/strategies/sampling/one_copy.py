"""Tensors of which the ranks of a machine have one copy."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.comm.group import World
from lightning_gnn.comm.shared_memory import Segment
from lightning_gnn.data.store import read_array


def one_copy(world: World, near: Sequence[int], own: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """Returns the tensors of each rank of this machine, which all of them map into memory; all ranks of all machines call it.

    They pass through files in the folder for temporary ones, that of ``$TMPDIR``, whose names are gone when this returns. So
    where memory is scarce the system may put them back on the disk; and there is no limit as of ``/dev/shm``. A change of a
    tensor stays in the process that makes it.

    Args:
        near: the ranks of this machine, this one among them.
        own: this rank's tensors, of the CPU; as many on all ranks.

    Raises:
        OSError: there is no room for the files.
    """
    if world.size == 1:
        return {near[0]: list(own)}
    with tempfile.TemporaryDirectory(prefix="lightning_gnn-") as folder:
        for number, tensor in enumerate(own):
            np.save(_file(folder, number), tensor.numpy())
        folders = world.all_gather_object(folder)
        found = {rank: [_mapped(folders[rank], number) for number in range(len(own))] for rank in near}
        world.all_gather_object("")  # all have opened them
    return found


def shared_zeros(world: World, near: Sequence[int], num_bytes: int) -> Tensor:
    """Returns zeros, uint8 ``[num_bytes]``, which all ranks of this machine read and write; all ranks of all machines call it.

    They are in memory and stay there; pages that nobody touches take none. It is free again when no rank has the tensor, or one
    made of it, any more.

    Args:
        near: the ranks of this machine, this one among them.
        num_bytes: the same for all of them.
    """
    if world.size == 1:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    first = min(near)
    own = Segment.create(max(1, num_bytes)) if world.rank == first else None
    pid, fd = world.all_gather_object((os.getpid(), -1 if own is None else own.fd))[first]
    segment = own or Segment.open(pid, fd)
    world.all_gather_object("")  # all have opened it
    segment.close()
    return segment.bytes[:num_bytes]


def _file(folder: str, number: int) -> Path:
    return Path(folder) / f"{number}.npy"


def _mapped(folder: str, number: int) -> Tensor:
    return torch.from_numpy(read_array(_file(folder, number)))
