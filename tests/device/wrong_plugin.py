"""The emulated device, whose sums are a little off."""

from typing import Any

from emulated import NAME
from emulated_plugin import launched, recorded  # noqa: F401

from lightning_gnn.kernels.run import BACKENDS

_right = BACKENDS[NAME]


def _wrong(name: str, arguments: tuple[Any, ...]) -> None:
    _right(name, arguments)
    if name == "spmm":
        arguments[5].mul_(1.001)


BACKENDS[NAME] = _wrong
