"""What a rank does first whose Trainers are to run on the emulated device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import emulated
import lightning as L
import pytest
import queued
from conftest import RankPool


def begin() -> None:
    """Has this process's Trainers for the CPU run on the emulated device, whose ranks meet in queued groups."""
    emulated.install()
    queued.install()
    init = L.Trainer.__init__

    def on_device(self: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("accelerator") == "cpu":
            kwargs["accelerator"] = emulated.NAME
        kwargs.setdefault("inference_mode", False)
        init(self, *args, **kwargs)

    L.Trainer.__init__ = on_device  # type: ignore[method-assign]


def begin_with_one_queue() -> None:
    os.environ[queued.ONE_QUEUE] = "1"
    begin()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Ranks on the emulated device, joined by queued groups; for modules that import it."""
    pool = RankPool(begin)
    yield pool
    pool.close()
