"""Predictions of an epoch under every scheme without training: seconds, bytes and memory, with reasons.

Steps of full-graph schemes are simulated (``rehearsal.py``) and timed by a cost model (``machine.py``). Mini-batch schemes run a
few batches on a single device. The module does not change. If there are more ranks than a topology supports, predictions are
extrapolated from fewer ranks by power laws.
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
from lightning.pytorch.plugins.environments import LightningEnvironment
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
from lightning_gnn.extensions.plans.topology import MAX_DEVICES, Topology
from lightning_gnn.extensions.samples.data import SampleData
from lightning_gnn.extensions.samples.small_graph import sample_shards
from lightning_gnn.modules import NodeClassifier
from lightning_gnn.strategies import GNNStrategy, registered
from lightning_gnn.strategies.dgcl.strategy import DGCLStrategy
from lightning_gnn.strategy.scheme import bind_module
from lightning_gnn.tools.advising.machine import Machine, timing, with_trainer_messages
from lightning_gnn.tools.advising.rehearsal import Event, Rehearsal, Send, Take, rehearse
from lightning_gnn.tools.local_ranks import as_single_rank


@dataclass(frozen=True)
class Candidate:
    """Strategy with arguments as plain values."""

    kind: type[GNNStrategy]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def full_graph(self) -> bool:
        """Whether an epoch is one step; otherwise, epochs have many steps and make more progress."""
        return not self.kind.trains_on_batches

    @property
    def exact(self) -> bool:
        """Whether results equal a single device up to rounding."""
        return not self.strategy().approximation

    @property
    def name(self) -> str:
        return self.kind.strategy_name

    def strategy(self, **options: Any) -> GNNStrategy:
        return self.kind(**self.arguments, **options)

    def __str__(self) -> str:
        return f"{self.name} {' '.join(f'{name}={value}' for name, value in self.arguments.items())}".rstrip()


def candidates(ranks: int, links_alike: bool = True, samples: SampleData | None = None) -> Iterator[Candidate]:
    """Yields the strategies that support `ranks` ranks, see :meth:`~lightning_gnn.strategy.base.GNNStrategy.variants`.

    With samples, yields each strategy with each number of graph ranks.
    """
    for name, kind in registered().items():
        if name != kind.strategy_name:  # another launch mode of the same strategy
            continue
        if samples is not None and kind.samples_unsupported_reason is not None:
            continue
        for graph_ranks in [ranks] if samples is None else samples.graph_ranks_of(ranks):
            for arguments in kind.variants(graph_ranks, links_alike):
                of_mesh = {} if samples is None else {"graph_ranks": graph_ranks}
                candidate = Candidate(kind, {**of_mesh, **arguments})
                try:
                    candidate.strategy().scheme.layout(graph_ranks)
                except (TypeError, ValueError):  # needs arguments, or another number of ranks
                    continue
                yield candidate


def choose_candidates(
    names: Sequence[str] | None, ranks: int, links_alike: bool = True, samples: SampleData | None = None
) -> list[Candidate]:
    """Returns the :func:`candidates` with these strategy names, all for None; raises ValueError if there is none."""
    every = list(candidates(ranks, links_alike, samples))
    found = [each for each in every if names is None or each.name in names]
    if not found:
        supported = ", ".join(dict.fromkeys(each.name for each in every))
        raise ValueError(f"None of {', '.join(names or ())} runs on {ranks} ranks; {supported} do.")
    return found


TRAINED_BATCHES = 6
"""Number of batches run for mini-batch schemes; the first compiles and loads."""

CLOSE = 0.1
"""Minimum relative gain in epoch time at which another scheme is preferred to the default scheme."""

UNEVEN = 1.1
"""Ratio of the slowest rank's computation to the mean from which it is mentioned."""


@dataclass(frozen=True)
class Advice:
    """Prediction for one scheme; other attributes are 0 if the scheme does not apply.

    Attributes:
        candidate: strategy and arguments.
        reason: why the scheme does not apply; empty if it does.
        seconds: time of an epoch, the sum of computation (including waiting for slower ranks) and additional time for messages.
        compute_seconds, exchange_seconds: see `seconds`.
        steps: number of steps of an epoch on each rank.
        bytes_sent: bytes sent by all ranks in an epoch, including gradients; None for mini-batch schemes.
        messages: number of messages of all ranks in an epoch.
        peaks: peak bytes of each rank, by phase; empty for mini-batch schemes.
        peaks_recomputed: the same with ``checkpoint_convs=True``.
        balance: computation of the slowest rank divided by the mean.
        replication: rows stored by all ranks, including halo and mirrors, divided by the number of nodes.
        why: explanation.
        extrapolated_from: numbers of simulated ranks, if extrapolated.
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
        """Peak bytes of the rank and phase with the highest value; 0 for mini-batch schemes."""
        return max((peak.max_bytes for peak in self.peaks), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Returns a dict of plain numbers and strings, for JSON."""
        names = ("seconds", "compute_seconds", "exchange_seconds", "steps", "bytes_sent", "messages", "peak_bytes")
        values = {name: getattr(self, name) for name in (*names, "balance", "replication", "why", "extrapolated_from")}
        for name in ("peaks", "peaks_recomputed"):
            values[name] = [asdict(peak) for peak in getattr(self, name)]
        choice = {"strategy": self.candidate.name, "arguments": self.candidate.arguments, "exact": self.candidate.exact}
        return {**choice, "applies": self.applies, **(values if self.applies else {"reason": self.reason})}


def advise(
    module: pl.LightningModule,
    datamodule: GraphDataModule,
    devices: int,
    num_nodes: int = 1,
    topology: str | Path | Topology | None = None,
    cores: int | None = None,
    speed: float = 1.0,
) -> list[Advice]:
    """Returns predictions of an epoch under each scheme: exact schemes first, then by time.

    ``dgcl`` precedes schemes that are only slightly faster, see :func:`explain_advice`.

    ::

        for each in lightning_gnn.advise(module, datamodule, devices=4):
            print(each.candidate, each.seconds, each.why)

    Args:
        module: the module, trained or untrained; copies of it run.
        datamodule: the graph; its partition is stored for a later ``fit``.
        devices: devices per machine, as in the Trainer.
        num_nodes: number of machines, as in the Trainer.
        topology: hardware topology of another machine, see :meth:`~lightning_gnn.tools.advising.machine.Machine.of`.
        cores: number of cores shared by the ranks of a machine. Default: this machine's, or one per rank with a topology.
        speed: speed of a core relative to a core of this machine.

    Raises:
        ValueError: for an invalid argument.
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
    """Returns the result of :func:`advise` for a machine with one device per rank.

    Args:
        trainer: value of ``self.trainer`` in steps; default: a Trainer with a single device.
        only: schemes to predict; default: all that support this number of ranks.
        overhead: seconds of an epoch in addition to the model's time; None to measure them with a Trainer on a single device.
    """
    wanted = [*candidates(machine.ranks, machine.topology.uniform, data.sample_data)] if only is None else only
    found = []
    with as_single_rank(), progress_bar(f"Rehearsing steps of {machine.ranks} ranks", len(wanted), "strategies") as advance:
        overhead = overhead_seconds() if overhead is None else overhead
        job = _Job(module, data, machine, trainer or quiet_trainer(), overhead)
        for candidate in wanted:
            try:
                found.append((_full_graph if candidate.full_graph else _in_batches)(candidate, job))
            except (ValueError, RuntimeError) as error:
                found.append(Advice(candidate, reason=(str(error).splitlines() or [type(error).__name__])[0]))
            advance(1)
    return explain_advice(found)


class _Job(NamedTuple):
    module: pl.LightningModule
    data: GraphDataModule
    machine: Machine
    trainer: pl.Trainer
    overhead: float


def _full_graph(candidate: Candidate, job: _Job) -> Advice:
    topology, ranks = job.machine.topology, int(candidate.arguments.get("graph_ranks", job.machine.ranks))
    options: dict[str, Any] = {"topology": topology} if candidate.arguments.get("plan") == "spst" else {}
    strategy, hosts = candidate.strategy(**options), len(topology.hosts)
    data = copy.copy(job.data)  # other users of the datamodule are not affected
    data.partition_for(strategy.scheme.layout(ranks, hosts if ranks % hosts == 0 else 1))
    cut = data.stored_cut()
    shards = [cut.shard(rank) for rank in range(ranks)]
    if data.has_samples:
        shards = sample_shards(data, shards, job.machine.ranks // ranks)
    bind = partial(bind_module, strategy.scheme, meter=Meter(), cache_input_aggregation=strategy.cache_input_aggregation)
    rehearsal = rehearse(job.module, shards, bind, job.trainer, threads=job.machine.threads, prepare=coding(strategy))
    return _predict(candidate, cut, rehearsal, job)


def coding(strategy: GNNStrategy) -> Callable[[World], AbstractContextManager[None]]:
    """Returns a function that prepares a rank's world to send rows as in training steps, with the strategy's codec."""
    codec = make_codec(strategy.codec, strategy.stochastic_rounding)

    def prepare(world: World) -> AbstractContextManager[None]:
        if codec is not None:
            world.wrap_transport(partial(EncodingTransport, codec=codec))
        return world.transport.approximating()

    return prepare


def _predict(candidate: Candidate, cut: Cut, rehearsal: Rehearsal, job: _Job) -> Advice:
    ranks, samples, steps = job.machine.ranks, job.data.sample_data, 1
    events, groups = rehearsal.events, ranks // len(rehearsal.events)
    if samples is not None:
        steps = -(-samples.sizes["samples"] // (groups * samples.samples_per_data_rank(job.data.batch_size, groups)))
        events = repeat_groups(events, groups, sum(each.nbytes for each in job.module.parameters() if each.requires_grad))
    sends = [event.num_bytes for each in events for event in each if isinstance(event, Send)]
    step, busy = timing(with_trainer_messages(events), job.machine), rehearsal.compute_seconds
    overhead = job.overhead * job.machine.crowding
    of_vertex_cut = cut.report.get("replication_factor")
    rows = len(cut.n_id) + sum(map(len, cut.halos))
    return Advice(
        candidate,
        seconds=steps * step.seconds + overhead,
        compute_seconds=steps * step.compute_seconds + overhead,
        exchange_seconds=steps * step.exchange_seconds,
        steps=steps,
        bytes_sent=steps * sum(sends),
        messages=steps * len(sends),
        peaks=tuple(each.peak() for each in rehearsal.footprints) * groups,
        peaks_recomputed=tuple(each.peak(recompute=True) for each in rehearsal.footprints) * groups,
        balance=max(busy) / (sum(busy) / len(busy)),
        replication=float(of_vertex_cut or rows / max(1, int(cut.offsets[-1]))),
    )


def repeat_groups(events: Sequence[Sequence[Event]], groups: int, gradient_bytes: int) -> tuple[tuple[Event, ...], ...]:
    """Returns the events of all data ranks, each as the given graph ranks, with a sum of gradients over data ranks."""
    size, found = len(events), list[tuple[Event, ...]]()
    for rank in range(groups * size):
        first = rank - rank % size
        own: list[Event] = [replace_peer(event, first) for event in events[rank % size]]
        ends = (rank + size) % (groups * size), (rank - size) % (groups * size)
        ring: list[Event] = [Send(ends[0], gradient_bytes // groups), Take(ends[1])] * (2 * (groups - 1))
        found.append((*own, *ring))
    return tuple(found)


def replace_peer(event: Event, first: int) -> Event:
    """Returns an event whose peer is counted from rank `first`."""
    if isinstance(event, Send):
        return Send(first + event.to, event.num_bytes)
    return Take(first + event.sender) if isinstance(event, Take) else event


class _Clock(pl.Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Median time of a batch, without the first."""
        return float(median(np.diff(self.times)))


def _in_batches(candidate: Candidate, job: _Job) -> Advice:
    machine, ranks, clock = job.machine, job.machine.ranks, _Clock()
    strategy = candidate.strategy(self_check=False)
    with silence():
        runner = quiet_trainer(max_epochs=-1, max_steps=TRAINED_BATCHES, strategy=strategy, callbacks=[clock])
        runner.fit(copy.deepcopy(job.module), datamodule=copy.copy(job.data))
    of_one = runner.num_training_batches  # infinite if workers share a pool of clusters
    steps = -(-int(of_one if np.isfinite(of_one) else strategy.num_clusters) // ranks)  # type: ignore[attr-defined]
    gradients = sum(each.nbytes for each in job.module.parameters() if each.requires_grad)
    slowest = min((hop.gb_per_s for hop in machine.topology.hops), default=np.inf) * 1e9
    # Ring all-reduce: each rank sends all gradients nearly twice.
    exchange = steps * (2 * machine.latency + 2 * (ranks - 1) / ranks * gradients / slowest)
    compute = steps * clock.seconds * machine.crowding / machine.speed
    return Advice(candidate, "", compute + exchange, compute, exchange, steps, bytes_sent=None)


def quiet_trainer(**options: Any) -> pl.Trainer:
    """Returns a Trainer with a single CPU device, without output, checkpoints and validation."""
    silent: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    silent |= {"limit_val_batches": 0, "num_sanity_val_steps": 0}
    return pl.Trainer(accelerator="cpu", devices=1, plugins=LightningEnvironment(), **{**silent, **options})


@contextmanager
def silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def overhead_seconds() -> float:
    """Returns the time of an epoch except the model's: for a tiny graph and one small layer, on a single device."""
    data, clock = planted_partition(64, 4.0, 2, 4), _Clock()
    with silence():
        runner = quiet_trainer(max_epochs=30, strategy=DGCLStrategy(self_check=False), callbacks=[clock])
        runner.fit(NodeClassifier(GCN(4, 2, num_layers=1)), datamodule=GraphDataModule(data))
    return float(np.diff(clock.times).min())


def explain_advice(predictions: Sequence[Advice]) -> list[Advice]:
    """Returns predictions with explanations, sorted: exact schemes first, then by time.

    The default scheme precedes schemes that are less than `CLOSE` faster, as predictions are not accurate enough.
    """
    usual = next((each for each in predictions if each.applies and each.candidate.name == "dgcl"), None)

    def place(advice: Advice) -> tuple[bool, bool, float]:
        return not advice.applies, not advice.candidate.exact, advice.seconds / (1 + CLOSE if advice is usual else 1.0)

    predictions = sorted(predictions, key=place)
    return [replace(each, why=_why(each, usual)) if each.applies else each for each in predictions]


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
"""Numbers of ranks that are simulated for extrapolation; schemes that support only one of them are omitted."""


def smaller(ranks: int, hosts: int, cores: int | None, speed: float, sizes: Sequence[int] = SIZES) -> list[Machine]:
    """Returns a model of each cluster of `sizes` ranks: with as many ranks per host, or with one host if fewer ranks suffice."""
    on_each = ranks // hosts
    if ranks % hosts or any(size % on_each and on_each % size for size in sizes):
        raise ValueError(
            f"Beyond {max(sizes)} ranks, advice is extrapolated from {', '.join(map(str, sizes))}: there must be a power of two "
            f"on each machine, got {ranks} ranks on {hosts} machines."
        )
    return [Machine.of(size, max(1, size // on_each), cores=cores, speed=speed) for size in sizes]


def extrapolate(
    ranks: int,
    machines: Sequence[Machine],
    module: pl.LightningModule,
    data: GraphDataModule,
    schemes: Sequence[str] | None = None,
) -> list[Advice]:
    """Returns predictions for `ranks` ranks: seconds, bytes and messages are each ``a * ranks ** b``, fitted to `machines`.

    `machines` are two or more, in ascending order of ranks. The other arguments are described in
    :func:`~lightning_gnn.tools.advising.advice.advise`.
    """
    if data.has_samples:
        raise ValueError(f"Advice with samples supports at most {MAX_DEVICES} ranks, got {ranks}. Use fewer ranks.")
    wanted, rehearsed = set(map(str, choose_candidates(schemes, ranks, machines[-1].topology.uniform))), []
    with as_single_rank(), progress_bar("Rehearsing, to extrapolate", len(machines), "numbers of ranks") as advance:
        overhead = overhead_seconds()
        for machine in machines:
            only = [each for each in candidates(machine.ranks, machine.topology.uniform) if str(each) in wanted]
            advice = advise_on(machine, module, data, only=only, overhead=overhead)
            rehearsed.append({str(each.candidate): each for each in advice})
            advance(1)
    found = []
    for name, last in rehearsed[-1].items():
        runs = [
            (machine.ranks, advice[name])
            for machine, advice in zip(machines, rehearsed)
            if name in advice and advice[name].applies
        ]
        if len(runs) < 2:
            continue

        def at(value: Callable[[Advice], float], runs: Sequence[tuple[int, Advice]] = runs) -> float:
            values = np.array([value(advice) or 0 for _, advice in runs], np.float64)
            if not values.all():
                return float(values[-1])
            sizes = np.log([size for size, _ in runs])
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
        found.append(replace(last, **values, extrapolated_from=tuple(size for size, _ in runs)))
    return explain_advice(found)


def _largest(kind: str, phase: str) -> Callable[[Advice], float]:
    return lambda advice: max((getattr(peak, phase) for peak in getattr(advice, kind)), default=0)
