"""The emulated device and its queued groups, for programs that import a module by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import emulated
import queued
from emulated import recorded  # noqa: F401

from lightning_gnn.extensions.graphs import source
from lightning_gnn.kernels.run import BACKENDS

emulated.install()
queued.install()
source.KNOWN.extend(["emulated", "queued"])  # in place of torch.cuda


@contextmanager
def launched() -> Iterator[Counter[str]]:
    """Counts what CUDA would launch kernels for while open: operations that are not views, and the package's loops."""
    counts: Counter[str] = Counter()
    run, loops = emulated._run, BACKENDS[emulated.NAME]

    def counted_run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        schema = function._schema
        if schema.is_mutable or not any(each.alias_info for each in schema.arguments):
            counts[schema.name] += 1
        return run(function, args, kwargs)

    def counted_loops(name: str, arguments: tuple[Any, ...]) -> None:
        counts[name] += 1
        loops(name, arguments)

    emulated._run, BACKENDS[emulated.NAME] = counted_run, counted_loops
    try:
        yield counts
    finally:
        emulated._run, BACKENDS[emulated.NAME] = run, loops
