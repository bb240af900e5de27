"""What an epoch takes under every scheme, before any is run: seconds, bytes and memory, and why.

Full-graph schemes are rehearsed (``rehearsal.py``) and priced (``machine.py``); those that train on batches are run for a few of
them on one device. Nothing trains: the module stays as it is. For more ranks than a topology has devices, advice for fewer is
continued as a power of their number.
"""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
from torch_geometric.nn.models import GCN

from lightning_gnn.checks.footprint import PHASES, Peak
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.console import progress_bar
from lightning_gnn.data.shards import Cut
from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.datamodules.graph import GraphDataModule
from lightning_gnn.extensions.codecs.codec import make_codec
from lightning_gnn.extensions.codecs.transport import EncodingTransport
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.modules import NodeClassifier
from lightning_gnn.strategies import GNNStrategy, registered
from lightning_gnn.strategies.dgcl.strategy import DGCLStrategy
from lightning_gnn.strategy.scheme import bind_module
from lightning_gnn.tools.advising.machine import Machine, timing, with_trainer_messages
from lightning_gnn.tools.advising.rehearsal import Rehearsal, rehearse


@dataclass(frozen=True)
class Candidate:
    """A strategy and its arguments, plain values."""

    kind: type[GNNStrategy]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def full_graph(self) -> bool:
        """Whether a step is an epoch; else epochs have many steps, and learn more."""
        return not self.kind.trains_on_batches

    @property
    def exact(self) -> bool:
        """Whether every number is that of one device."""
        return not self.strategy().approximation

    @property
    def name(self) -> str:
        return self.kind.strategy_name

    def strategy(self, **options: Any) -> GNNStrategy:
        return self.kind(**self.arguments, **options)

    def __str__(self) -> str:
        return f"{self.name} {' '.join(f'{name}={value}' for name, value in self.arguments.items())}".rstrip()


def candidates(ranks: int, links_alike: bool = True) -> Iterator[Candidate]:
    """Yields what can run on so many ranks, see :meth:`~lightning_gnn.strategy.base.GNNStrategy.variants`."""
    for name, kind in registered().items():
        if name != kind.strategy_name:  # another way to start its ranks
            continue
        for arguments in kind.variants(ranks, links_alike):
            candidate = Candidate(kind, dict(arguments))
            try:
                candidate.strategy().scheme.layout(ranks)
            except (TypeError, ValueError):  # it needs arguments, or another number of ranks
                continue
            yield candidate


def chosen(names: Sequence[str] | None, ranks: int, links_alike: bool = True) -> list[Candidate]:
    """Returns those :func:`candidates` whose strategies have these names, all for None; a ValueError if there is none."""
    every = list(candidates(ranks, links_alike))
    found = [each for each in every if names is None or each.name in names]
    if not found:
        known = ", ".join(dict.fromkeys(each.name for each in every))
        raise ValueError(f"None of {', '.join(names or ())} runs on {ranks} ranks; {known} do.")
    return found


TRAINED_BATCHES = 6
"""Of those that train on batches; the first compiles and loads."""

CLOSE = 0.1
"""Of an epoch's time: by this much another scheme must be faster to be preferred to the usual one."""

UNEVEN = 1.1
"""How much longer than the mean the slowest rank computes before it is worth a word."""


@dataclass(frozen=True)
class Advice:
    """What is predicted for one scheme; all else is 0 if it does not apply.

    Attributes:
        candidate: the strategy and its arguments.
        reason: why it does not apply; empty if it does.
        seconds: of an epoch; of these, what it computes (with what ranks wait for slower ones), and what messages add.
        compute_seconds, exchange_seconds: see `seconds`.
        steps: of an epoch, on each rank.
        bytes_sent: by all ranks in an epoch, gradients included; None where batches decide.
        messages: of all ranks in an epoch.
        peaks: the most bytes that each rank holds, by phase; empty where batches decide.
        peaks_recomputed: the same with ``checkpoint_convs=True``.
        balance: the rank that computes longest, over the mean.
        replication: rows held by all ranks, halo and mirrors included, over the nodes.
        why: in words.
        extrapolated_from: numbers of ranks that were rehearsed, where these were others.
    """

    candidate: Candidate
    reason: str = ""
    seconds: float = 0.0
    compute_seconds: float = 0.0
    exchange_seconds: float = 0.0
    steps: int = 1
    bytes_sent: int | None = 0
    messages: int = 0
    peaks: tuple[Peak, ...] = ()
    peaks_recomputed: tuple[Peak, ...] = ()
    balance: float = 1.0
    replication: float = 1.0
    why: str = ""
    extrapolated_from: tuple[int, ...] = ()

    @property
    def applies(self) -> bool:
        return not self.reason

    @property
    def peak_bytes(self) -> int:
        """Of the rank and phase that take most; 0 where batches decide."""
        return max((peak.most for peak in self.peaks), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and texts, for JSON."""
        names = ("seconds", "compute_seconds", "exchange_seconds", "steps", "bytes_sent", "messages", "peak_bytes")
        numbers = {name: getattr(self, name) for name in (*names, "balance", "replication", "why", "extrapolated_from")}
        for name in ("peaks", "peaks_recomputed"):
            numbers[name] = [asdict(peak) for peak in getattr(self, name)]
        chosen = {"strategy": self.candidate.name, "arguments": self.candidate.arguments, "exact": self.candidate.exact}
        return {**chosen, "applies": self.applies, **(numbers if self.applies else {"reason": self.reason})}


def advise(
    module: pl.LightningModule,
    datamodule: GraphDataModule,
    devices: int,
    num_nodes: int = 1,
    topology: str | Path | Topology | None = None,
    cores: int | None = None,
    speed: float = 1.0,
) -> list[Advice]:
    """Returns what an epoch would take under each scheme: first those that give the numbers of one device, the fastest first.

    But ``dgcl`` goes before what is hardly faster, see :func:`explained`.

    ::

        for each in lightning_gnn.advise(module, datamodule, devices=4):
            print(each.candidate, each.seconds, each.why)

    Args:
        module: untrained or not; copies of it run.
        datamodule: the graph; it is partitioned, and kept, as a later ``fit`` looks for it.
        devices, num_nodes: as of the Trainer.
        topology, cores, speed: of another machine than this, see :meth:`~lightning_gnn.tools.advising.machine.Machine.of`.

    Raises:
        ValueError: an argument is none of these.
    """
    return advise_on(Machine.of(devices * num_nodes, num_nodes, topology, cores, speed), module, datamodule)


def advise_on(
    machine: Machine,
    module: pl.LightningModule,
    data: GraphDataModule,
    trainer: pl.Trainer | None = None,
    only: Sequence[Candidate] | None = None,
    overhead: float | None = None,
) -> list[Advice]:
    """Returns what :func:`advise` does, for a machine with one device per rank.

    Args:
        trainer: what steps find as ``self.trainer``; by default one of one device.
        only: these schemes; by default all that so many ranks can run.
        overhead: seconds of an epoch beside the model's; None to measure them, by a Trainer of one device.
    """
    wanted = [*candidates(machine.ranks, machine.topology.uniform)] if only is None else only
    found = []
    with progress_bar(f"Rehearsing steps of {machine.ranks} ranks", len(wanted), "strategies") as told:
        overhead = overhead_seconds() if overhead is None else overhead
        job = _Job(module, data, machine, trainer or quiet_trainer(), overhead)
        for candidate in wanted:
            try:
                found.append((_full_graph if candidate.full_graph else _in_batches)(candidate, job))
            except (ValueError, RuntimeError) as error:
                found.append(Advice(candidate, reason=(str(error).splitlines() or [type(error).__name__])[0]))
            told(1)
    return explained(found)


class _Job(NamedTuple):
    module: pl.LightningModule
    data: GraphDataModule
    machine: Machine
    trainer: pl.Trainer
    overhead: float


def _full_graph(candidate: Candidate, job: _Job) -> Advice:
    topology, ranks = job.machine.topology, job.machine.ranks
    options: dict[str, Any] = {"topology": topology} if candidate.arguments.get("plan") == "spst" else {}
    strategy, hosts = candidate.strategy(**options), len(topology.hosts)
    data = copy.copy(job.data)  # whoever else has it finds it as it was
    data.prepare_for(strategy.scheme.layout(ranks, hosts if ranks % hosts == 0 else 1))
    cut = data.stored_cut()
    if cut.types.is_hetero:
        raise ValueError(
            'Steps are rehearsed on graphs of one type, and this one is a HeteroData. Name a strategy: "dgcl", "vertex_cut", '
            '"spmm_1d" or "sampling".'
        )
    shards = [cut.shard(rank) for rank in range(ranks)]
    bind = partial(bind_module, strategy.scheme, meter=Meter(), cache_input_aggregation=strategy.cache_input_aggregation)
    rehearsal = rehearse(job.module, shards, bind, job.trainer, threads=job.machine.threads, prepare=coding(strategy))
    return _priced(candidate, cut, rehearsal, job)


def coding(strategy: GNNStrategy) -> Callable[[World], AbstractContextManager[None]]:
    """Returns what lets rows of a rank's world travel as in the strategy's training steps, which may be approximately."""
    codec = make_codec(strategy.codec, strategy.stochastic_rounding)

    def prepare(world: World) -> AbstractContextManager[None]:
        if codec is not None:
            world.wrap_transport(partial(EncodingTransport, codec=codec))
        return world.transport.approximating()

    return prepare


def _priced(candidate: Candidate, cut: Cut, rehearsal: Rehearsal, job: _Job) -> Advice:
    step, busy = timing(with_trainer_messages(rehearsal.events), job.machine), rehearsal.compute_seconds
    overhead = job.overhead * job.machine.crowding
    of_vertex_cut = cut.report.get("replication_factor")
    rows = sum(owned + halo for owned, halo, _ in cut.sizes())
    return Advice(
        candidate,
        seconds=step.seconds + overhead,
        compute_seconds=step.compute_seconds + overhead,
        exchange_seconds=step.exchange_seconds,
        bytes_sent=sum(rehearsal.bytes_sent),
        messages=rehearsal.messages,
        peaks=tuple(each.peak() for each in rehearsal.footprints),
        peaks_recomputed=tuple(each.peak(recompute=True) for each in rehearsal.footprints),
        balance=max(busy) / (sum(busy) / len(busy)),
        replication=float(of_vertex_cut or rows / max(1, int(cut.offsets[-1]))),
    )


class _Clock(pl.Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Of a batch, without the first."""
        return float(median(np.diff(self.times)))


def _in_batches(candidate: Candidate, job: _Job) -> Advice:
    machine, ranks, clock = job.machine, job.machine.ranks, _Clock()
    strategy = candidate.strategy(self_check=False)
    with quietly():
        runner = quiet_trainer(max_epochs=-1, max_steps=TRAINED_BATCHES, strategy=strategy, callbacks=[clock])
        runner.fit(copy.deepcopy(job.module), datamodule=copy.copy(job.data))
    of_one = runner.num_training_batches  # infinite where workers share a pool of clusters
    steps = -(-int(of_one if np.isfinite(of_one) else strategy.num_clusters) // ranks)  # type: ignore[attr-defined]
    gradients = sum(each.nbytes for each in job.module.parameters() if each.requires_grad)
    slowest = min((hop.gb_per_s for hop in machine.topology.hops), default=np.inf) * 1e9
    # A ring: each rank sends all gradients nearly twice.
    exchange = steps * (2 * machine.latency + 2 * (ranks - 1) / ranks * gradients / slowest)
    compute = steps * clock.seconds * machine.crowding / machine.speed
    return Advice(candidate, "", compute + exchange, compute, exchange, steps, bytes_sent=None)


def quiet_trainer(**options: Any) -> pl.Trainer:
    """Returns a Trainer of one CPU device that shows, keeps and validates nothing."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(accelerator="cpu", devices=1, limit_val_batches=0, num_sanity_val_steps=0, **{**silent, **options})


@contextmanager
def quietly() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def overhead_seconds() -> float:
    """Returns what an epoch takes beside the model: a graph of a few nodes and one small layer, on one device."""
    data, clock = planted_partition(64, 4.0, 2, 4), _Clock()
    with quietly():
        runner = quiet_trainer(max_epochs=30, strategy=DGCLStrategy(self_check=False), callbacks=[clock])
        runner.fit(NodeClassifier(GCN(4, 2, num_layers=1)), datamodule=GraphDataModule(data))
    return float(np.diff(clock.times).min())


def explained(found: Sequence[Advice]) -> list[Advice]:
    """Returns advice in order, with reasons: what gives the numbers of one device first, the fastest first.

    The usual scheme goes before those that are less than `CLOSE` faster: predictions are not that exact.
    """
    usual = next((each for each in found if each.applies and each.candidate.name == "dgcl"), None)

    def place(each: Advice) -> tuple[bool, bool, float]:
        return not each.applies, not each.candidate.exact, each.seconds / (1 + CLOSE if each is usual else 1.0)

    found = sorted(found, key=place)
    return [replace(each, why=_why(each, usual)) if each.applies else each for each in found]


def _why(advice: Advice, usual: Advice | None) -> str:
    if not advice.candidate.full_graph:
        return f"an epoch is {advice.steps} steps of each rank, {_time(advice.seconds / advice.steps)} each"
    reasons = []
    if usual is advice:
        reasons.append(f"each layer receives {100 * (advice.replication - 1):.0f} % of the graph's rows from other ranks")
    elif usual is not None and usual.bytes_sent and advice.bytes_sent is not None:
        reasons.append(f"sends {advice.bytes_sent / usual.bytes_sent:.2g} times the bytes of dgcl")
    if "codec" in advice.candidate.arguments:
        reasons.append("vertex_cut_cached sends fewer, which is known only in training")
    if advice.balance > UNEVEN:
        reasons.append(f"its slowest rank computes {advice.balance:.2f} times the mean")
    share = advice.exchange_seconds / advice.seconds
    reasons.append(f"messages are {100 * share:.0f} % of the time" if share > 0.005 else "messages are hidden by computing")
    return "; ".join(reasons)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


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
