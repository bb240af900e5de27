"""Says that loops are compiled before they are: the first run on a machine stands still meanwhile."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from numba.core import event
from numba.core.dispatcher import Dispatcher
from typing_extensions import override

PACKAGE = __name__.partition(".")[0]


class _Announcer(event.Listener):
    """Hears of each loop that numba compiles; of those that it finds on disk, it does not."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    @override
    def on_start(self, event: Any) -> None:
        loop = event.data["dispatcher"]
        module = loop.py_func.__module__
        if module in self._told or module.partition(".")[0] != PACKAGE:
            return
        self._told.add(module)
        count = sum(isinstance(each, Dispatcher) for each in vars(sys.modules[module]).values())
        rank_zero_info(
            f"Compiling loops of {module} for this machine, once: up to {count}, about half a second each on an idle core; "
            f"kept in {loop.stats.cache_path}"
        )

    @override
    def on_end(self, event: Any) -> None:
        """Nothing is said then."""


def announce_compiling() -> None:
    """From now on, each module's first compilation in this process is said on rank 0, before it begins."""
    event.register("numba:compile", _Announcer())
