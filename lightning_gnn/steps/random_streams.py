"""Random numbers that ranks share, and random numbers of each rank."""

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
    """Random streams of torch: one shared by all ranks outside of steps, and one per rank inside; used on every rank.

    Draws in hooks, such as new weights in ``on_train_epoch_start``, are then equal on all ranks. They equal the draws of one
    device if its steps draw nothing, since rank 0's stream continues unchanged. Inside a step, where draws are for local rows,
    ranks draw different numbers. Python's and numpy's generators have the state of rank 0 on all ranks, inside and outside of
    steps, since code may branch on them.
    """

    def __init__(self, world: World) -> None:
        self._device, self._rank = world.device, world.rank
        self._inside = False
        self._inactive_states: list[Tensor] | None = None
        self.seed = torch.initial_seed()
        if world.size == 1:
            return
        states = random.getstate(), np.random.get_state(), random_states(world.device)  # noqa: NPY002 (what users draw from)
        python, numpy, common = world.broadcast_object(states)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        # Computed from the state: drawing a seed would advance the stream further than on one device.
        digest = hashlib.blake2b(b"".join(each.numpy().tobytes() for each in common), digest_size=7)
        self.seed = int.from_bytes(digest.digest(), "little") + world.rank
        torch.manual_seed(self.seed)
        self._inactive_states = random_states(world.device)
        set_random_states(world.device, common)

    @contextmanager
    def inside(self, step: bool = True) -> Iterator[None]:
        """Context manager that uses the rank's own stream; with ``step=False`` the shared one, as in hooks within a step."""
        before = self._inside
        self._change(step)
        try:
            yield
        finally:
            self._change(before)

    @contextmanager
    def seed_draws(self, number: int) -> Iterator[None]:
        """Context manager like :meth:`inside` whose draws depend only on the seed and `number`; both streams are restored."""
        with self.inside():
            before, inactive = random_states(self._device), self._inactive_states
            if inactive is not None:
                self._seed_from(self.seed - self._rank, number, 1)
                self._inactive_states = random_states(self._device)
            self._seed_from(self.seed, number)
            try:
                yield
            finally:
                set_random_states(self._device, before)
                self._inactive_states = inactive

    @staticmethod
    def _seed_from(*numbers: int) -> None:
        torch.manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]))

    def _change(self, inside: bool) -> None:
        if inside != self._inside and self._inactive_states is not None:
            self._inside, state = inside, random_states(self._device)
            set_random_states(self._device, self._inactive_states)
            self._inactive_states = state

    def state(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the shared stream and the rank's own, see :func:`~lightning_gnn.devices.random_states`."""
        now = random_states(self._device)
        inactive = now if self._inactive_states is None else self._inactive_states
        return (inactive, now) if self._inside else (now, inactive)

    def load(self, common: list[Tensor], rank_states: list[Tensor]) -> None:
        """Restore streams from :meth:`state`; called outside of steps."""
        set_random_states(self._device, common)
        if self._inactive_states is not None:
            self._inactive_states = rank_states
