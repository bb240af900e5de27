"""Runs programs as strangers write them, on one device and on ranks, and says what first differs.

An *idiom* is a function that builds a :class:`Case` afresh: a LightningModule, a graph and arguments of the Trainer. On ranks
it either gives the values, weights and predictions of one device, or is refused by an error of ours before it has trained.
"""

from __future__ import annotations

import copy
import linecache
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from conftest import RankFailed, RankPool
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import Sequential

import lightning_gnn
from lightning_gnn import GraphDataModule
from lightning_gnn.comm.group import CommunicationError

CLASSES, FEATURES = 5, 8
OURS = ("comm/", "cache/", "codec/", "sampling/", "throughput/", "check/")
"""Begins of the names that this package logs by itself."""
RTOL, RTOL_OF_FLOAT32, ATOL = 1e-7, 1e-5, 1e-8

EVERYTHING = ("fit", "test", "predict")

STRATEGIES: dict[str, tuple[str, int]] = {
    "dgcl": ("DGCLStrategy", 2),
    "spmm_1d": ("SpMM1DStrategy", 2),
    "spmm_15d": ("SpMM15DStrategy", 2),
    "vertex_cut": ("VertexCutStrategy", 2),
    "vertex_cut_cached": ("CachedVertexCutStrategy", 2),
    "cover": ("CoverStrategy", 2),
    "dgcl on 3": ("DGCLStrategy", 3),
    "spmm_2d": ("SpMM2DStrategy", 4),
    "spmm_3d": ("SpMM3DStrategy", 8),
}
"""By name of a scheme, its strategy's class and the number of ranks."""
EXACTLY: dict[str, dict[str, Any]] = {
    "vertex_cut_cached": {"cache": 0.0, "codec": None, "cache_within_hosts": True},
}
"""By name of a scheme that is not exact by itself, arguments with which it is."""
ALL = ("dgcl", "spmm_1d", "spmm_15d", "vertex_cut")
TWO = ("dgcl", "another")
"""Beside `dgcl` one scheme more, turn by turn: for what depends little on the scheme."""
SAMPLED = ("dgcl on 3", "spmm_2d")
"""Tried with every eighth idiom."""


@dataclass
class Case:
    """One program.

    Attributes:
        module: anything, with weights from a fixed seed; the harness makes it float64.
        data: a graph, which the harness makes float64; or a datamodule, which is partitioned as lopsidedly unless it says how.
        trainer: arguments of the Trainer.
        strategy: arguments of this package's strategies.
        also: called after each stage; what it returns is compared, too.
        apart: begins of names of logged values that depend on time and are not compared.
        program: run in place of the stages, with a function that makes a Trainer of `trainer` and more arguments, the module and
            the datamodule; what it returns is compared, too.
    """

    module: L.LightningModule
    data: Data | L.LightningDataModule
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    also: Callable[[], Any] | None = None
    apart: tuple[str, ...] = ()
    program: Callable[[Callable[..., L.Trainer], L.LightningModule, GraphDataModule], Any] | None = None


Build = Callable[[], Case]


@dataclass(frozen=True)
class Idiom:
    """A program and what is true of it; see :func:`idiom`."""

    name: str
    build: Build
    source: str
    refused: str | None
    warns: str | None
    stages: Sequence[str]
    schemes: Sequence[str]
    rtol: float
    late: bool
    xfail: str | None

    def runs(self) -> list[tuple[str, str, Sequence[str]]]:
        """Returns scheme, partition and stages of each run on ranks."""
        more = SAMPLED if zlib.crc32(self.name.encode()) % 8 == 0 and tuple(self.schemes) == ALL else ()
        found: list[tuple[str, str, Sequence[str]]] = []
        for number, scheme in enumerate([*self.schemes, *more]):
            # Other stages than the first cost as much as it does, and depend little on the scheme.
            stages = self.stages if number == 0 else self.stages[:1]
            empty = number > 0 and number == min(2, len(self.schemes) - 1)
            found.append((scheme, "one without training nodes" if empty else "sorted", stages))
        return found


IDIOMS: dict[str, Idiom] = {}


def idiom(
    source: str,
    refused: str | None = None,
    warns: str | None = None,
    stages: Sequence[str] = EVERYTHING,
    schemes: Sequence[str] = ALL,
    rtol: float = RTOL,
    late: bool = False,
    xfail: str | None = None,
    name: str | None = None,
) -> Callable[[Build], Build]:
    """Adds a function that builds a case, from fixed seeds, to the corpus.

    Args:
        source: where people write it so.
        refused: what our error says, as a regular expression, on every rank and scheme; None if it gives one device's numbers.
        warns: what a warning of ours says on the first scheme.
        stages: of ``"fit"``, ``"validate"``, ``"test"``, ``"predict"``, in order, run with one Trainer. Schemes after the first
            run the first of them only.
        schemes: keys of `STRATEGIES`, `ALL` or `TWO`.
        rtol: of floating values; those in float32 have `RTOL_OF_FLOAT32` at least.
        late: it is refused after an optimizer has stepped.
        xfail: why it fails today.
        name: of the idiom, after its file's; the function's by default.
    """

    def add(build: Build) -> Build:
        function: Any = getattr(build, "func", build)  # of a partial
        known = f"{function.__module__.rpartition('.')[2]}.{name or function.__name__}"
        assert known not in IDIOMS, known
        another = ALL[1 + zlib.crc32(known.encode()) % (len(ALL) - 1)]
        chosen = tuple(another if scheme == "another" else scheme for scheme in schemes)
        IDIOMS[known] = Idiom(known, build, source, refused, warns, stages, chosen, rtol, late, xfail)
        return build

    return add


# Graphs #######################################################################


def graph(num_nodes: int = 80, seed: int = 0, **more: Any) -> Data:
    """Returns an undirected graph with isolated nodes, a hub, self-loops and masks, float64; no weights of edges."""
    g = torch.Generator().manual_seed(seed)
    busy = num_nodes * 9 // 10
    ends = torch.randint(0, busy, (2, 2 * num_nodes), generator=g)
    hub = torch.stack([torch.arange(0, busy, 3), torch.full((len(range(0, busy, 3)),), 5)])
    ends = torch.cat([ends, hub], 1).unique(dim=1)
    edge_index = torch.cat([ends, ends.flip(0)], 1).unique(dim=1)
    edge_index = edge_index[:, torch.randperm(edge_index.size(1), generator=g)]
    y = torch.randint(0, CLASSES, (num_nodes,), generator=g)
    y[:CLASSES] = torch.arange(CLASSES)
    split = torch.rand(num_nodes, generator=g)
    x = torch.randn(num_nodes, FEATURES, generator=g).double() + y.view(-1, 1) / 3
    masks = {"train_mask": split < 0.4, "val_mask": (split >= 0.4) & (split < 0.6), "test_mask": split >= 0.6}
    return Data(x=x, edge_index=edge_index, y=y, **masks, **more)


def directed(num_nodes: int = 80, seed: int = 1) -> Data:
    """Returns a directed graph with edge weights and edge features, float64."""
    data = graph(num_nodes, seed)
    g = torch.Generator().manual_seed(seed)
    data.edge_index = data.edge_index[:, torch.rand(data.edge_index.size(1), generator=g) < 0.7]
    data.edge_weight = torch.rand(data.edge_index.size(1), generator=g).double() + 0.1
    data.edge_attr = torch.randn(data.edge_index.size(1), 3, generator=g).double()
    return data


def partition_of(data: Data, kind: str, ranks: int) -> Tensor:
    """Returns the rank of each node: rank 0 has four fifths, and the last have the highest labels, or no training node."""
    assert data.num_nodes is not None
    key = torch.zeros(data.num_nodes) if data.get("y") is None else data.y.view(data.num_nodes, -1)[:, 0].double()
    if kind != "sorted":
        key = key + 1000 * (data.test_mask & ~(data.train_mask | data.val_mask))
    place = torch.empty_like(key).long()
    place[key.argsort(stable=True)] = torch.arange(len(key))
    first = len(key) * 4 // 5
    return torch.where(place < first, 0, 1 + (place - first) * (ranks - 1) // (len(key) - first))


def partition_lopsided(datamodule: GraphDataModule, kind: str) -> None:
    """Has a datamodule partition its graph so, unless it is told how, or its graph has types."""
    if datamodule.partition is not None:
        return
    assign, datamodule.partition_dir = datamodule.assign, datamodule.partition_dir / kind

    def lopsided(data: Any, layout: Any) -> Any:
        if isinstance(data, HeteroData) or layout.parts == 1:
            return assign(data, layout)
        part = partition_of(data, kind, layout.parts)
        if layout.kind == "vertex_cut":  # of each edge: where it ends, every third where it begins
            source, target = data.edge_index
            part = torch.where(torch.arange(len(source)) % 3 == 0, part[source], part[target])
        datamodule.partition = part.numpy()
        try:
            return assign(data, layout)
        finally:
            datamodule.partition = None

    datamodule.assign = lopsided  # type: ignore[method-assign]


# One run ######################################################################


class _Seen(L.Callback):
    """Keeps what is logged, whenever an epoch or a stage ends, and counts the optimizers' steps."""

    def __init__(self) -> None:
        self.apart = OURS
        self.values: list[tuple[str, dict[str, Any]]] = []
        self.steps = 0

    def _keep(self, trainer: L.Trainer, when: str) -> None:
        found = {**trainer.logged_metrics, **trainer.callback_metrics}
        kept = {name: copy.deepcopy(value) for name, value in found.items() if not name.startswith(self.apart)}
        self.values.append((f"epoch {trainer.current_epoch}, {when}", kept))

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.steps += 1

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._keep(trainer, "on_train_epoch_start")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._keep(trainer, "on_train_epoch_end")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._keep(trainer, "on_validation_end")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._keep(trainer, "on_train_end")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._keep(trainer, "on_test_end")


class _Log(Logger):
    """Keeps what loggers are given."""

    name, version = "log", 0  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.apart = OURS
        self.given: list[tuple[str, dict[str, Any]]] = []

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        kept = {name: value for name, value in metrics.items() if not name.startswith(self.apart)}
        if kept.keys() - {"epoch"}:
            self.given.append((f"logged at step {step}", kept))

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


_DEFAULTS = {
    "max_epochs": 3,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


@dataclass
class Result:
    """What a run has come to: what it has seen, or its error."""

    seen: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    is_ours: bool = False
    steps: int = 0
    said: list[str] = field(default_factory=list)


@contextmanager
def _sequential_restored() -> Iterator[None]:
    """Removes the code that PyG generates for a Sequential, which the next program may run.

    PyG sets it in the class, and finds modules by names that are drawn after ``seed_everything``.
    """
    _remove_generated_modules()  # of other tests
    with patch.object(Sequential, "forward", Sequential.forward):
        try:
            yield
        finally:
            _remove_generated_modules()


def generated_modules() -> list[str]:
    """Returns the names of modules with code for a Sequential."""
    return [name for name in sys.modules if name.startswith(f"{Sequential.__module__}_")]


def _remove_generated_modules() -> None:
    for name in generated_modules():
        del sys.modules[name]


def run(build: Build, strategy: Any, devices: int, partition: str, stages: Sequence[str]) -> Result:
    """Returns what a program gives; `strategy` is a name that Lightning knows, or makes a strategy of options."""
    result, seen, log = Result(), _Seen(), _Log()
    with warnings.catch_warnings(record=True) as caught, TemporaryDirectory() as folder, _sequential_restored():
        warnings.simplefilter("always")
        try:
            torch.manual_seed(0)
            case = build()
            module, data = case.module.double(), case.data
            seen.apart = log.apart = (*OURS, *case.apart)
            if isinstance(data, Data):
                data.apply(lambda value: value.double() if value.is_floating_point() else value)
                data = GraphDataModule(data)
            if isinstance(data, GraphDataModule):
                partition_lopsided(data, partition)

            def make_trainer(**more: Any) -> L.Trainer:
                options = {**_DEFAULTS, "logger": log, "default_root_dir": folder, **case.trainer, **more}
                options["callbacks"] = [*options.get("callbacks", ()), seen]
                made = strategy if isinstance(strategy, str) else strategy(**{"timeout": 60, **case.strategy})
                return L.Trainer(strategy=made, devices=devices, accelerator="cpu", **options)

            def call(stage: str) -> Any:
                quiet = {"verbose": False} if stage in ("validate", "test") else {}
                return getattr(trainer, stage)(module, datamodule=data, **quiet)

            if case.program is None:
                trainer = make_trainer()
                left_out = () if is_overridden("test_step", module) else ("test",)
                calls = {stage: partial(call, stage) for stage in stages if stage not in left_out}
            else:
                calls = {"program": partial(case.program, make_trainer, module, data)}
            for stage, work in calls.items():
                found = {"returned": copy.deepcopy(work()), "values": seen.values, "logger": log.given}
                if stage in ("fit", "program"):
                    found["weights"] = copy.deepcopy(module.state_dict())
                if case.also is not None:
                    found["also"] = copy.deepcopy(case.also())
                result.seen[stage if stage not in result.seen else f"{stage} again"] = found
                seen.values, log.given = [], []
        except BaseException as error:
            result.error, result.is_ours = f"{type(error).__name__}: {error}", _is_ours(error)
    result.steps = seen.steps
    result.said = [str(warning.message) for warning in caught]
    return result


_PACKAGE = str(Path(lightning_gnn.__file__).parent)


def _is_ours(error: BaseException) -> bool:
    """Returns whether this package raised an error that tells users what is wrong with their program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or isinstance(error, CommunicationError):
        return False
    file = trace.tb_frame.f_code.co_filename
    return file.startswith(_PACKAGE) and linecache.getline(file, trace.tb_lineno).lstrip().startswith("raise")


def run_on_rank(
    rank: int,
    world_size: int,
    build: Build,
    strategy: str,
    partition: str,
    stages: Sequence[str],
    self_check: bool = True,
    **compared: Any,
) -> tuple[Result, str | None]:
    """Returns what :func:`run` gives on one rank without what it has seen, and what of that first differs from one device.

    The self-check is left out if `self_check` says so and the case does not.
    """
    make = partial(getattr(lightning_gnn, strategy), self_check=self_check)
    result = run(build, make, world_size, partition, stages)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    differs = None if result.error else difference(result.seen, **compared)
    result.seen = {}
    return result, differs


def difference(found: Any, expected: Any, rtol: float, where: str = "") -> str | None:
    """Returns in words what of two nested objects first differs, None if nothing does. Only stages that `found` has count.

    Numbers differ by more than `rtol` of the largest of their tensor, `RTOL_OF_FLOAT32` where either is float32.
    """
    if where == "" and isinstance(found, dict):
        expected = {name: expected[name] for name in found}
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if found.keys() != expected.keys():
            return f"{where}: keys {[*found]}, on one device {[*expected]}"
        pairs = [(f"{where} {name!r}", found[name], expected[name]) for name in expected]
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(expected) == 2 and isinstance(expected[0], str) and expected[0] == found[0]:
            pairs = [(f"{where} {expected[0]}", found[1], expected[1])]
        elif len(found) != len(expected):
            return f"{where}: {len(found)} entries, on one device {len(expected)}: {str(found)[:300]}, {str(expected)[:300]}"
        else:
            # What is named needs no number.
            named = [isinstance(each, tuple) and isinstance(each[0], str) for each in found]
            places = [where if has_name else f"{where}[{place}]" for place, has_name in enumerate(named)]
            pairs = list(zip(places, found, expected))
    elif isinstance(expected, (Tensor, float, int)) and isinstance(found, (Tensor, float, int)):
        return _numbers_differ(torch.as_tensor(found), torch.as_tensor(expected), rtol, where)
    else:
        same = found is expected or (type(found) is type(expected) and found == expected)
        return None if same else f"{where}: {str(found)[:300]}, on one device {str(expected)[:300]}"
    texts = (difference(ours, theirs, rtol, place.strip()) for place, ours, theirs in pairs)
    return next((text for text in texts if text is not None), None)


def _numbers_differ(found: Tensor, expected: Tensor, rtol: float, where: str) -> str | None:
    if found.shape != expected.shape:
        return f"{where}: shape {[*found.shape]}, on one device {[*expected.shape]}"
    if torch.float32 in (found.dtype, expected.dtype):
        rtol = max(rtol, RTOL_OF_FLOAT32)
    a, b = found.detach().double().reshape(-1), expected.detach().double().reshape(-1)
    if torch.equal(a.isfinite(), b.isfinite()) and torch.equal(
        a[~a.isfinite()].nan_to_num(), b[~b.isfinite()].nan_to_num()
    ):
        a, b = a[a.isfinite()], b[b.isfinite()]
        size = max(float(b.abs().max()), ATOL) if len(b) else 1.0
        off = float((a - b).abs().max()) if len(b) else 0.0
        if off <= max(rtol * size, ATOL):
            return None
        place = int((a - b).abs().argmax())
        return f"{where}: {float(a[place])!r}, on one device {float(b[place])!r} (off by {off / size:.1e})"
    return f"{where}: {found}, on one device {expected}"


# The verdict ##################################################################


def complaints(pool: RankPool, one: Idiom, runs: Sequence[tuple[str, str, Sequence[str]]] | None = None) -> list[str]:
    """Returns what is not as `one` says, in words; nothing if all is.

    Args:
        pool: of ranks.
        one: an idiom, in the corpus or not, whose `build` can be pickled.
        runs: scheme, partition and stages of each run; all of the idiom's by default.
    """
    reference = run(one.build, "auto", 1, "sorted", one.stages)
    refused = one.refused is not None and reference.is_ours  # whatever the strategy
    if reference.error and not refused:
        return [f"{one.name} does not run on one device: {reference.error}"]
    found: list[str] = []
    for number, (scheme, partition, stages) in enumerate(one.runs() if runs is None else runs):
        strategy, size = STRATEGIES[scheme]
        where = f"{one.name} under {scheme} ({partition})"
        try:
            # The self-check takes longer than all else, and what it may miss is compared here.
            checked = number == 0 or one.refused is not None or scheme in SAMPLED
            compared = {"expected": reference.seen, "rtol": one.rtol}
            results = pool.run(size, run_on_rank, one.build, strategy, partition, stages, checked, **compared)
        except RankFailed as failed:
            found.append(f"{where}: {failed}")
            continue
        for rank, (result, differs) in enumerate(results):
            wrong = _wrong(one, result, differs)
            if wrong:
                found.append(f"{where}, rank {rank}: {wrong}")
                break
        found.extend(f"{where}: {text}" for text in _unexpected(one, results[0][0], number == 0))
    return found


def _wrong(one: Idiom, result: Result, differs: str | None) -> str | None:
    if one.refused is None:
        return f"raises {result.error}" if result.error else differs
    if not result.error:
        return f"is not refused; {differs or 'it gives the numbers of one device'}"
    if not result.is_ours:
        return f"raises an error that is not ours: {result.error}"
    if not re.search(one.refused, result.error):
        return f"is refused without {one.refused!r}: {result.error}"
    if result.steps and not one.late:
        return f"is refused after {result.steps} steps: {result.error}"
    return None


def _unexpected(one: Idiom, result: Result, is_first: bool) -> list[str]:
    """Returns what is wrong with the warnings of rank 0: one is missing, or the self-check says what it should not."""
    found = []
    if one.warns is not None and is_first and not any(re.search(one.warns, text) for text in result.said):
        found.append(f"does not warn of {one.warns!r}; it says {result.said}")
    for text in result.said:
        if "elf-check" in text and one.refused is None and (one.warns is None or not re.search(one.warns, text)):
            found.append(f"warns: {text}")
    return found
