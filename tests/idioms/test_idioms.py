"""The corpus: programs of strangers give the numbers of one device on ranks, or are refused by name (gloo ranks, float64).

Some of the programs are run every day, all of them by ``make test-all``.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from idioms import broken
from idioms.harness import IDIOMS, Idiom, complaints

for path in sorted(Path(__file__).parent.glob("*.py")):
    if path.stem not in ("__init__", "test_idioms", "test_fuzz"):
        import_module(f"idioms.{path.stem}")


EVERY = 48


def _parameter(one: Idiom) -> object:
    marks: list[pytest.MarkDecorator] = [pytest.mark.xfail(strict=True, reason=one.xfail)] if one.xfail else []
    if zlib.crc32(one.name.encode()) % EVERY:
        marks.append(pytest.mark.campaign)
    return pytest.param(one, id=one.name, marks=marks)


@pytest.mark.parametrize("one", [_parameter(one) for one in IDIOMS.values()])
def test_idiom(ranks, one):
    found = complaints(ranks, one)
    assert not found, "\n".join(found)


ONE = Idiom("one", broken.intact, "", None, None, ("fit", "test"), ("dgcl",), 1e-7, False, None)


@pytest.mark.campaign
def test_the_harness_sees_that_something_differs(ranks):
    assert complaints(ranks, ONE) == []
    [found] = complaints(ranks, replace(ONE, build=broken.without_halo))
    assert found.startswith("one under dgcl (sorted), rank 0: 'fit' 'values' epoch 0, on_validation_end 'train_loss'")
    [found] = complaints(ranks, replace(ONE, build=broken.without_sums))
    assert found.startswith("one under dgcl (sorted), rank 0: raises NotExactError: The loss must be equal on all ranks")


def test_the_harness_sees_what_is_not_refused_or_by_a_foreign_error(ranks):
    [found] = complaints(ranks, replace(ONE, build=broken.not_refused, refused="mixes rows"))
    assert "is not refused; it gives the numbers of one device" in found
    [found] = complaints(ranks, replace(ONE, build=broken.without_halo, refused="mixes rows"))
    assert "is not refused; 'fit' 'values'" in found
    [found] = complaints(ranks, replace(ONE, build=broken.foreign_error, refused="index"))
    assert "raises an error that is not ours: IndexError" in found
    [found] = complaints(ranks, replace(ONE, build=broken.foreign_error))
    assert "raises IndexError" in found
