"""Which random numbers ranks share, and which are each rank's own."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from lightning_gnn.comm.group import World
from lightning_gnn.devices import random_states, set_random_states


class RandomStreams:
    """Gives torch one stream for all ranks outside steps, and one of each rank's own inside; runs on every rank.

    What hooks draw, such as new weights in ``on_train_epoch_start``, is then the same on all ranks, and what one device draws if
    its steps draw nothing: rank 0's stream goes on as it was. Inside a step, where rows are drawn for, ranks draw different
    numbers. Python's and numpy's generators are those of rank 0 on all ranks, inside steps and outside, since code may branch
    on them.
    """

    def __init__(self, world: World) -> None:
        self._device, self._rank = world.device, world.rank
        self._inside = False
        self._other: list[Tensor] | None = None
        self.seed = torch.initial_seed()
        if world.size == 1:
            return
        states = random.getstate(), np.random.get_state(), random_states(world.device)  # noqa: NPY002 (what users draw from)
        python, numpy, common = world.broadcast_object(states)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        # Made of the state, since drawing a seed would leave the stream elsewhere than on one device.
        digest = hashlib.blake2b(b"".join(each.numpy().tobytes() for each in common), digest_size=7)
        self.seed = int.from_bytes(digest.digest(), "little") + world.rank
        torch.manual_seed(self.seed)
        self._other = random_states(world.device)
        set_random_states(world.device, common)

    @contextmanager
    def inside(self, step: bool = True) -> Iterator[None]:
        """Draws from the rank's own stream while open; with ``step=False`` from the common one, as in hooks within a step."""
        before = self._inside
        self._change(step)
        try:
            yield
        finally:
            self._change(before)

    @contextmanager
    def repeated(self, number: int) -> Iterator[None]:
        """As :meth:`inside`, but draws what follows from the seed and `number` alone; both streams stay where they were."""
        with self.inside():
            before, other = random_states(self._device), self._other
            if other is not None:
                self._seed_from(self.seed - self._rank, number, 1)
                self._other = random_states(self._device)
            self._seed_from(self.seed, number)
            try:
                yield
            finally:
                set_random_states(self._device, before)
                self._other = other

    @staticmethod
    def _seed_from(*numbers: int) -> None:
        torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))

    def _change(self, inside: bool) -> None:
        if inside != self._inside and self._other is not None:
            self._inside, state = inside, random_states(self._device)
            set_random_states(self._device, self._other)
            self._other = state

    def state(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the common stream and the rank's own, see :func:`~lightning_gnn.devices.random_states`."""
        now = random_states(self._device)
        other = now if self._other is None else self._other
        return (other, now) if self._inside else (now, other)

    def load(self, common: list[Tensor], own: list[Tensor]) -> None:
        """Goes on with streams as :meth:`state` returned them; called outside steps."""
        set_random_states(self._device, common)
        if self._other is not None:
            self._other = own
