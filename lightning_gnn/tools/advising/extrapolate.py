"""Advice for more ranks than a topology has devices: what fewer ranks take, continued as a power of their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
import numpy as np

from lightning_gnn.checks.footprint import PHASES, Peak
from lightning_gnn.console import progress_bar
from lightning_gnn.datamodules.graph import GraphDataModule
from lightning_gnn.tools.advising.advice import Advice, advise_on, explained, overhead_seconds
from lightning_gnn.tools.advising.candidates import candidates, chosen
from lightning_gnn.tools.advising.machine import Machine

SIZES = (16, 32, 64)
"""Numbers of ranks that are rehearsed; a scheme that runs on one of them only is left out."""


def smaller(ranks: int, hosts: int, cores: int | None, speed: float, sizes: Sequence[int] = SIZES) -> list[Machine]:
    """Returns machines of `sizes` ranks with as many of them on a host, or all on one."""
    on_each = ranks // hosts
    if ranks % hosts or any(size % on_each and on_each % size for size in sizes):
        raise ValueError(
            f"Beyond {max(sizes)} ranks, advice is continued from {', '.join(map(str, sizes))}, so there must be a power of two "
            f"on each machine (got {ranks} ranks on {hosts})."
        )
    return [Machine.of(size, max(1, size // on_each), cores=cores, speed=speed) for size in sizes]


def extrapolate(
    ranks: int,
    machines: Sequence[Machine],
    module: pl.LightningModule,
    data: GraphDataModule,
    schemes: Sequence[str] | None = None,
) -> list[Advice]:
    """Returns what is predicted for so many ranks: seconds, bytes and messages are each ``a * ranks ** b``, fitted to `machines`.

    These are two or more, of ascending numbers of ranks. For other arguments see
    :func:`~lightning_gnn.tools.advising.advice.advise`.
    """
    wanted, rehearsed = set(map(str, chosen(schemes, ranks, machines[-1].topology.uniform))), []
    with progress_bar("Rehearsing, to extrapolate", len(machines), "numbers of ranks") as told:
        overhead = overhead_seconds()
        for machine in machines:
            only = [each for each in candidates(machine.ranks, machine.topology.uniform) if str(each) in wanted]
            advice = advise_on(machine, module, data, only=only, overhead=overhead)
            rehearsed.append({str(each.candidate): each for each in advice})
            told(1)
    found = []
    for name, last in rehearsed[-1].items():
        known = [
            (machine.ranks, advice[name])
            for machine, advice in zip(machines, rehearsed)
            if name in advice and advice[name].applies
        ]
        if len(known) < 2:
            continue

        def at(value: Callable[[Advice], float], known: Sequence[tuple[int, Advice]] = known) -> float:
            values = np.array([value(advice) or 0 for _, advice in known], np.float64)
            if not values.all():
                return float(values[-1])
            sizes = np.log([size for size, _ in known])
            slope, begin = np.polyfit(sizes, np.log(values), 1)
            return float(np.exp(begin + slope * np.log(ranks)))

        values: dict[str, Any] = {name: at(attrgetter(name)) for name in ("compute_seconds", "exchange_seconds", "replication")}
        values |= {name: round(at(attrgetter(name))) for name in ("steps", "bytes_sent", "messages")}
        values["seconds"] = values["compute_seconds"] + values["exchange_seconds"]
        values["steps"] = max(1, values["steps"])
        if last.bytes_sent is None:
            values["bytes_sent"] = None
        for kind in ("peaks", "peaks_recomputed"):
            if getattr(last, kind):
                values[kind] = (Peak(**{phase: round(at(_largest(kind, phase))) for phase in PHASES}),)
        found.append(replace(last, **values, extrapolated_from=tuple(size for size, _ in known)))
    return explained(found)


def _largest(kind: str, phase: str) -> Callable[[Advice], float]:
    return lambda advice: max((getattr(peak, phase) for peak in getattr(advice, kind)), default=0)
