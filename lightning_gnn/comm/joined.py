"""Copies of rows and partial results in one message to each rank, where both are there at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.transport import rows_of
from lightning_gnn.kernels import take_rows


class JoinedExchange:
    """S by one exchange and the transpose of another at once: half the messages, which is what short ones wait for.

    N owned rows, C halo rows of `copies`, R of `results`.

    Args:
        copies: whose owned rows others read.
        results: whose halo rows are added up at their owners.
    """

    def __init__(self, copies: HaloExchange, results: HaloExchange) -> None:
        self._copies, self._results = copies, results
        device = copies.world.device
        self._out_counts, self._out = _side_by_side(copies.send_counts, results.recv_counts, device)
        self._into_counts, self._into = _side_by_side(copies.recv_counts, results.send_counts, device)

    def start(self, x: Tensor, halo: Tensor, partial: Tensor, call: Call) -> Callable[[], Callable[[Tensor], None]]:
        """Starts both; returns the function that waits.

        Args:
            x: owned rows, ``[N, F]``, contiguous.
            halo: receives the halo rows of `copies` in place, ``[C, F]``.
            partial: what this rank has for those of `results`, ``[R, F]``, of the dtype of `x`.
            call: which exchange of the step this is.

        Returns:
            ``wait()``, which fills `halo` and returns ``finish(own)``, which adds what has arrived to ``own`` ``[N, F]``.
        """
        copies, results, width = self._copies, self._results, x.shape[1:]
        began = copies.now(call)
        message = copies.world.scratch((sum(self._out_counts), *width), x.dtype)
        for places, rows in zip(self._out, (x.index_select(0, copies.send_rows), partial)):
            rows_of(message).index_copy_(0, places, rows)
        into = copies.buffers.take((sum(self._into_counts), *width), x.dtype)
        wait = copies.send(message, self._out_counts, into, self._into_counts, call, began)

        def waited() -> Callable[[Tensor], None]:
            wait()
            of_copies, of_results = self._into
            take_rows(into, of_copies, halo)
            arrived = into.index_select(0, of_results)
            copies.buffers.give_back(into)
            return lambda own: results.add_arrived(own, arrived, call)

        return waited


def _side_by_side(first: Sequence[int], second: Sequence[int], device: torch.device) -> tuple[list[int], Sequence[Tensor]]:
    """Returns how many rows both have for each rank, ``[P]``, and the places of the rows of either in messages that hold those of
    the first and then those of the second."""
    peer = torch.cat([torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)) for counts in (first, second)])
    places = peer.argsort(stable=True).argsort().to(device)
    return [sum(both) for both in zip(first, second)], places.split([sum(first), sum(second)])
