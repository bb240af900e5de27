"""Batches of one machine, made in two calls of compiled loops that run without the interpreter lock.

The first call samples all hops; the second copies the rows of all attributes. Threads that make batches therefore do not wait for
each other, or for the thread that trains.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput

from lightning_gnn.partition.layout import ONE_TYPE
from lightning_gnn.strategies.sampling import loops
from lightning_gnn.strategies.sampling.hops import Numbering

_SMALL = 1 << 16
"""Bytes below which memory is not kept."""


class HopSampler:
    """Sampler of uniform neighborhoods in a graph without types, with the draws of :func:`sample_neighbors`.

    The memory of sampled edges is reused by the next sample. Not thread-safe.

    Args:
        parts: arrays and numbers of all parts of the graph, see :func:`loops.sample_hops`.
        offsets: first node of each part and the end, int64 ``[P + 1]``.
        fanouts: in-edges per node, by hop; -1 for all.
        replace: whether to draw with replacement.
        numbering: numbering of the nodes.
    """

    def __init__(self, parts: Any, offsets: np.ndarray, fanouts: Sequence[int], replace: bool, numbering: Numbering) -> None:
        table = [[*(each.data_ptr() if len(each) else 0 for each in arrays), *numbers] for arrays, numbers in parts]
        self._graph = np.array(table), np.asarray(offsets, np.int64), parts[0][0][1][:1].numpy()
        self._draws, self._numbering, self._parts = (np.array(fanouts), replace), numbering, parts
        self._edges = torch.empty(3, 0, dtype=torch.long)

    def sample(self, seeds: Tensor, seed: int) -> HeteroSamplerOutput:
        """Returns the result of :func:`~lightning_gnn.strategies.sampling.hops.sample_hops` for `seeds` and a random seed."""
        fanouts, replace = self._draws
        sizes = np.empty((len(fanouts), 2), np.int64)
        while True:
            row, col, edge = self._edges
            known = self._numbering.open(seeds, len(row))
            out = row.numpy(), col.numpy(), edge.numpy(), sizes
            count = loops.sample_hops(*self._graph, fanouts, seed & (2**63 - 1), replace, *known, len(seeds), *out)
            if count >= 0:
                break
            self._numbering.close(len(seeds) + len(row))  # the next start releases all numbers of this attempt
            self._edges = torch.empty(3, -count + -count // 4, dtype=torch.long)  # a batch rarely has a quarter more edges
        ids = self._numbering.close(count)
        (nodes, edges), sampled = sizes.T.tolist(), int(sizes[-1, 1])
        return HeteroSamplerOutput(
            {ONE_TYPE[0]: ids},
            *({ONE_TYPE: each[:sampled]} for each in (row, col, edge)),
            num_sampled_nodes={ONE_TYPE[0]: np.diff([0, len(seeds), *nodes]).tolist()},
            num_sampled_edges={ONE_TYPE: np.diff([0, *edges]).tolist()},
        )


class Buffers:
    """Memory of tensors, used again once all tensors over it are deleted: new pages would take longer than copying the rows.

    Args:
        pin: whether memory is pinned; torch then reuses it.
    """

    def __init__(self, pin: bool = False) -> None:
        self._pin, self._blocks = pin, list[tuple[np.ndarray, weakref.ref[np.ndarray]]]()

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """Returns an uninitialized tensor with the dtype of `like`."""
        num_bytes = like.element_size() * math.prod(shape)
        if self._pin or num_bytes < _SMALL:
            return like.new_empty(shape, pin_memory=self._pin)
        free = [place for place, (_, used) in enumerate(self._blocks) if used() is None]
        fits = [place for place in free if num_bytes <= len(self._blocks[place][0]) <= 2 * num_bytes]
        block = self._blocks.pop((fits or free)[0])[0] if free else None
        if not fits or block is None:
            block = np.empty(num_bytes + num_bytes // 8, np.uint8)
        memory = block[:num_bytes]  # the tensor's storage refers to it
        self._blocks.append((block, weakref.ref(memory)))
        return torch.from_numpy(memory).view(like.dtype).view(shape)

    def gather(self, reads: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Returns rows of some tensors, ``[n, ...]`` each, in one call without the interpreter lock.

        Args:
            reads: for each result, the tensor ``[N, ...]`` and the rows to copy, int64 ``[n]``, which are not checked.
        """
        found, table = list[Tensor](), list[tuple[int, ...]]()
        for source, ids in reads:
            out = self.empty(source, len(ids), *source.shape[1:])
            if source.is_contiguous() and out.numel():
                table.append((ids.data_ptr(), source.data_ptr(), out.data_ptr(), len(ids), out[:1].nbytes))
            elif out.numel():
                torch.index_select(source, 0, ids, out=out)
            found.append(out)
        if table:
            loops.gather(np.array(table))
        return found
