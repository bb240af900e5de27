"""The emulated device and the queued group can fail: without these, nothing that passes on them says anything."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
from common import assert_same, awkward_graph, single, train

ranks = on_device.ranks


def trained(rank: int, size: int, *args: Any, **options: Any) -> Any:
    import emulated

    found = train(rank, size, *args, **options)
    assert all(isinstance(each, emulated.DeviceTensor) for each in found["gradients"])
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_gcn(ranks, size):
    found = ranks.run(size, trained, awkward_graph(), "gcn")
    expected = single(awkward_graph(), "gcn")
    for each in found:
        assert_same(each, expected, 1e-9, 1e-11)


def fits_and_threads(rank: int, size: int) -> int:
    import threading

    for _ in range(3):
        train(rank, size, awkward_graph(), "gcn")
    return sum(thread.name == "queued" for thread in threading.enumerate())


def test_groups_end(ranks):
    assert max(ranks.run(2, fits_and_threads)) <= 3
