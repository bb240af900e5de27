"""Averages that nobody waits for: push-sum.

Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning" (ICML 2019), Algorithm 1; Kempe, Dobra and Gehrke,
"Gossip-Based Computation of Aggregate Information" (FOCS 2003).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_gnn.strategies.gossip.peers import Mailbox
from lightning_gnn.strategies.gossip.worker import Worker

_LEAST = 2.0**-10


@dataclass
class Mass:
    """How much the parameters of one worker weigh.

    A worker keeps ``x``, the parameters in use, and its weight ``w``; Assran's algorithm keeps ``w x`` and ``w``. So who gives
    half of both away goes on with the same ``x``. What all workers and all vectors on their way hold of ``w x`` and ``w`` is
    neither made nor lost by exchanges: ``x`` tends to the mean of all.
    """

    weight: float = 1.0

    @property
    def is_enough(self) -> bool:
        """Whether there is some to give away; one that gets none back must not come to nothing, nor to the end of float32."""
        return self.weight > _LEAST

    def half(self, own: Tensor) -> Tensor:
        """Gives half away, and returns it: ``(w x, w)``; `own` is ``(x, 1)``."""
        self.weight /= 2
        return own * self.weight

    def add(self, own: Tensor, come: Tensor) -> Tensor:
        """Returns the sum of `own`, ``(x, 1)``, and what has come: ``(w x, w)``, which is this worker's from now on."""
        total = own * self.weight + come
        self.weight = float(total[-1])
        return total


class PushSum(Worker):
    """A worker that sends half of its mass to another now and then, takes in what has come after each batch, and never waits; the
    pairing tells who takes part."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.mass = Mass()
        self._mailbox: Mailbox | None = None

    @override
    def meet(self, own: Callable[[], Tensor]) -> Tensor | None:
        """After a batch: sends half away, if it is time to; returns the sum of own and what has come, None for nothing. The last
        entry of what `own` returns is 1."""
        self.counts.batches += 1
        if self.left or self.peers is None:
            return None
        if self._mailbox is None:
            self._mailbox = Mailbox(self.peers.server, own())
        come, total = self._mailbox.take(), None
        if come is not None:
            total = self.mass.add(own(), come)
            self.counts.averages += 1
        # Where the last vector is still on its way, its receiver is slow: the mass stays here.
        if self.counts.batches % self.interval == 0 and self.mass.is_enough and not self._mailbox.sending:
            other = self._carry_out(self.pairing.any_other())
            if other is not None:
                mean = own() if total is None else total / self.mass.weight
                self._mailbox.send(self.peers.address_of(other), self.mass.half(mean))
                self.counts.add_partner(other)
        return total

    @override
    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
        super().close()
