"""The history: rows of all nodes as they were computed last, for batches whose halo nodes are computed in other batches.

Source: Fey et al., "GNNAutoScale: Scalable and Expressive Graph Neural Networks via Historical Embeddings" (ICML 2021), section
3; Chen et al., "Stochastic Training of Graph Convolutional Networks with Variance Reduction" (ICML 2018), section 4.

N owned rows, H halo rows; ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter

_HEAD = 1 << 16
"""Bytes at the beginning of the file: how many tables there are, then the name of each, as a number, and where it begins."""


@dataclass(frozen=True)
class Table:
    """Rows of all nodes, on the CPU, which other workers may write at any time.

    Attributes:
        rows: of each node, ``[num_nodes, ...]``; 0 until they are written.
        written: when, in batches of all workers from 1, int64 ``[num_nodes]``; 0 for never.
    """

    rows: Tensor
    written: Tensor


class History:
    """Tables that workers of one machine share, in memory that is given back when the last of them ends, however it does.

    Nobody waits for anybody to read or write rows: a row that is read while it is written may be of both.

    Args:
        num_nodes: of the whole graph.
        file: opened for reading and writing, of no name any more; the same on all workers.
    """

    def __init__(self, num_nodes: int, file: int) -> None:
        self.num_nodes, self._file = num_nodes, file
        self._tables: dict[Hashable, Table] = {}
        self._grow(_HEAD)

    @classmethod
    def shared(cls, num_nodes: int, world: World) -> History:
        """Returns the history that this rank shares with those of its machine; runs on every rank."""
        here = world.ranks_here()
        path = ""
        if world.rank == here[0]:
            handle, path = tempfile.mkstemp(prefix="lightning_gnn_history_", dir=_folder())
            os.close(handle)
        path = world.all_gather_object(path)[here[0]]
        try:
            history = cls(num_nodes, os.open(path, os.O_RDWR))
            world.barrier()
        finally:
            if world.rank == here[0]:
                os.unlink(path)
        return history

    def table(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> Table:
        """Returns the table of a name, with rows of a shape, the same for all workers; made when one of them asks first."""
        key = (name, *shape, dtype)
        if key not in self._tables:
            row_bytes = dtype.itemsize * int(np.prod(shape))
            begin = self._place(repr(key), self.num_nodes * (8 + row_bytes))
            end_of_times = begin + 8 * self.num_nodes
            rows = self._mapped(end_of_times, self.num_nodes * row_bytes).view(dtype).view(self.num_nodes, *shape)
            self._tables[key] = Table(rows, self._mapped(begin, 8 * self.num_nodes).view(torch.int64))
        return self._tables[key]

    def _place(self, name: str, num_bytes: int) -> int:
        """Returns where the table of a name begins; one worker at a time may make one."""
        import fcntl  # not on all systems

        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        head = self._mapped(0, _HEAD).view(torch.int64)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            count, entries = int(head[0]), head[2:].view(-1, 2)
            known = (entries[:count, 0] == number).nonzero()
            if len(known):
                return int(entries[int(known), 1])
            begin = -(-os.fstat(self._file).st_size // mmap.PAGESIZE) * mmap.PAGESIZE
            self._grow(begin + num_bytes)
            entries[count, 0], entries[count, 1] = number, begin
            head[0] = count + 1
            return begin
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _grow(self, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self._file, 0, num_bytes)  # never shrinks it, and fails where writing would kill
        except OSError as error:
            raise RuntimeError(
                f"The history of halo rows needs {num_bytes / 1e6:,.0f} MB in {_folder()}, which has no room for it ({error}). "
                "Make it larger, as by docker run --shm-size, or train without: halo=None."
            ) from error

    def _mapped(self, begin: int, num_bytes: int) -> Tensor:
        with open(self._file, "r+b", closefd=False) as file:
            return torch.from_numpy(np.memmap(file, np.uint8, "r+", begin, (num_bytes,)))

    def close(self) -> None:
        """Gives the memory back, once the last tensor over it is gone."""
        self._tables.clear()
        os.close(self._file)


def _folder() -> str:
    return "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()


class HistoryExchange(Exchange):
    """S reads halo rows from the history, and in training writes the owned ones; S^T brings nothing back.

    What is learnt of a batch is learnt of its own nodes: there is no gradient in rows that were computed before.

    Args:
        history: of this machine.
        world, meter: see :class:`~lightning_gnn.comm.exchange.Exchange`.

    """

    one_way = True

    def __init__(self, history: History, world: World, meter: Meter) -> None:
        super().__init__(0, 0, world, meter)
        self.history = history
        self._ages = self._known = self._unknown = 0
        self._own = self._halo = torch.empty(0, dtype=torch.int64)
        self._now = 0

    def turn_to(self, own: Tensor, halo: Tensor, now: int) -> None:
        """Takes another batch: the places of its nodes in the tables, int64 ``[N]`` and ``[H]``, on the CPU, and when it is."""
        self._own, self._halo, self._now = own, halo, now
        self.num_owned, self.num_halo = len(own), len(halo)

    def take_ages(self) -> tuple[float, float]:
        """Returns of the halo rows that training has read since the last call: the mean age of those that had been computed, in
        batches of all workers, and the share of those that had not, which are 0."""
        age = self._ages / max(self._known, 1)
        share = self._unknown / max(self._known + self._unknown, 1)
        self._ages = self._known = self._unknown = 0
        return age, share

    @override
    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        table = self.history.table((call.layer, call.index), x.shape[1:], x.dtype)
        if self.world.step.phase == "train":
            table.rows.index_copy_(0, self._own, x.detach().cpu())
            table.written[self._own] = self._now
            written = table.written[self._halo]
            written = written[written > 0]
            self._known += len(written)
            self._unknown += len(self._halo) - len(written)
            self._ages += len(written) * self._now - int(written.sum())
        halo.copy_(table.rows.index_select(0, self._halo))
        return lambda: None

    @override
    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        return lambda own: None

    @override
    def reduce(self, x: Tensor, layer: str) -> Tensor:
        raise ValueError(
            f"'{layer}' sums over the out-edges of each node, of which a batch has those inside it only. Use halo=None, which "
            "leaves all others out."
        )
