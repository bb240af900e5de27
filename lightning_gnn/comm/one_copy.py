"""Tensors of which the ranks of a machine have one copy."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.comm.group import World
from lightning_gnn.data.store_check import read_array


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


def _file(folder: str, number: int) -> Path:
    return Path(folder) / f"{number}.npy"


def _mapped(folder: str, number: int) -> Tensor:
    return torch.from_numpy(read_array(_file(folder, number)))
