"""Tensors shared by the ranks of a machine."""

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


def one_copy(world: World, local_ranks: Sequence[int], tensors: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """Returns the tensors of each rank of this machine, memory-mapped by all of them; all ranks of all machines call it.

    The tensors are in files in the temporary folder, ``$TMPDIR``, which are unlinked when this returns. If memory is scarce, the
    system may write them to disk, and the limit of ``/dev/shm`` does not apply. Changes of a tensor are private to the process.

    Args:
        world: the ranks.
        local_ranks: ranks of this machine, including this rank.
        tensors: CPU tensors of this rank; the same number on all ranks.

    Raises:
        OSError: no space for the files.
    """
    if world.size == 1:
        return {local_ranks[0]: list(tensors)}
    with tempfile.TemporaryDirectory(prefix="lightning_gnn-") as folder:
        for number, tensor in enumerate(tensors):
            np.save(_file(folder, number), tensor.numpy())
        folders = world.all_gather_object(folder)
        found = {rank: [_map_array(folders[rank], number) for number in range(len(tensors))] for rank in local_ranks}
        world.all_gather_object("")  # all ranks have opened them
    return found


def shared_zeros(world: World, local_ranks: Sequence[int], num_bytes: int) -> Tensor:
    """Returns zeros, uint8 ``[num_bytes]``, that all ranks of this machine read and write; all ranks of all machines call it.

    They stay in memory; unused pages take none. The memory is freed once no rank has the tensor, or one derived from it.

    Args:
        world: the ranks.
        local_ranks: ranks of this machine, including this rank.
        num_bytes: size, the same for all of them.
    """
    if world.size == 1:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    first = min(local_ranks)
    own = Segment.create(max(1, num_bytes)) if world.rank == first else None
    pid, fd = world.all_gather_object((os.getpid(), -1 if own is None else own.fd))[first]
    segment = own or Segment.open(pid, fd)
    world.all_gather_object("")  # all ranks have opened it
    segment.close()
    return segment.bytes[:num_bytes]


def _file(folder: str, number: int) -> Path:
    return Path(folder) / f"{number}.npy"


def _map_array(folder: str, number: int) -> Tensor:
    return torch.from_numpy(read_array(_file(folder, number)))
