"""Push-sum: averages without waiting.

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
    """Weight of one worker's parameters.

    A worker stores ``x``, the parameters in use, and its weight ``w``; Assran's algorithm stores ``w x`` and ``w``. A worker that
    sends half of both therefore continues with the same ``x``. Exchanges preserve the sums of ``w x`` and ``w`` over all workers
    and all vectors in transit, so ``x`` tends to the mean of all.
    """

    weight: float = 1.0

    @property
    def is_enough(self) -> bool:
        """Whether the weight suffices to send half: without received mass, it must not reach 0 or the limits of float32."""
        return self.weight > _LEAST

    def half(self, vector: Tensor) -> Tensor:
        """Halve the weight and return the other half: ``(w x, w)``; `vector` is ``(x, 1)``."""
        self.weight /= 2
        return vector * self.weight

    def add(self, vector: Tensor, received: Tensor) -> Tensor:
        """Returns the sum of `vector`, ``(x, 1)``, and received mass, as ``(w x, w)``, which becomes this worker's mass."""
        total = vector * self.weight + received
        self.weight = float(total[-1])
        return total


class PushSum(Worker):
    """Worker that sends half of its mass to another at intervals, adds received mass after each batch, and never waits.

    The pairing is only used to find participating workers.
    """

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.mass = Mass()
        self._mailbox: Mailbox | None = None

    @override
    def meet(self, make_vector: Callable[[], Tensor]) -> Tensor | None:
        """Send half of the mass, if due, after a batch; returns the sum of own and received mass, None if nothing was received.

        The last entry of the result of `make_vector` is 1.
        """
        self.counts.batches += 1
        if self.has_left or self.peers is None:
            return None
        if self._mailbox is None:
            self._mailbox = Mailbox(self.peers.server, make_vector())
        received, total = self._mailbox.take(), None
        if received is not None:
            total = self.mass.add(make_vector(), received)
            self.counts.averages += 1
        # If the last vector is still in transit, its receiver is slow: no mass is sent.
        if self.counts.batches % self.interval == 0 and self.mass.is_enough and not self._mailbox.sending:
            other = self._carry_out(self.pairing.any_other())
            if other is not None:
                mean = make_vector() if total is None else total / self.mass.weight
                self._mailbox.send(self.peers.address_of(other), self.mass.half(mean))
                self.counts.add_partner(other)
        return total

    @override
    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
        super().close()
