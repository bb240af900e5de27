"""Parity check: compares a module's steps on the user's graph between a single device and each scheme, in one process.

Ranks are threads that take turns. Each runs the scheme's own code, so it sends, sums, weights and logs as in training. The
transport is not covered; ``lightning-gnn doctor`` checks it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from rich.table import Table
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import NodeType

from lightning_gnn.checks.record import (
    LOGGED_TOLERANCE,
    STATE,
    TOLERANCES,
    UNKNOWN,
    Finding,
    Outcome,
    Parted,
    compare_events,
    differences,
    differing,
    first_difference,
)
from lightning_gnn.checks.small_graph import SmallGraph
from lightning_gnn.checks.stand_ins import QuietTrainer, copy_module, disable_compile, draws_random_numbers, isolate, quiet
from lightning_gnn.checks.trial import STAGES, Trial, in_dtype, in_one_line
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.console import progress_bar, text_of, text_table
from lightning_gnn.data.shards import Graph, JoinedGraph, Predicted, Shard, whole_graph
from lightning_gnn.data.sources import counted_mask
from lightning_gnn.datamodules.graph import GraphDataModule
from lightning_gnn.extensions.samples.small_graph import first_samples, select_nodes, with_samples
from lightning_gnn.lightning_packages import is_overridden
from lightning_gnn.nn.context import UnsupportedModelError
from lightning_gnn.partition.layout import NO_TYPES
from lightning_gnn.partition.shard import Ids
from lightning_gnn.strategies import registered
from lightning_gnn.strategy.base import GNNStrategy
from lightning_gnn.strategy.scheme import bind_module
from lightning_gnn.tools.advising.advice import coding, quiet_trainer, silence
from lightning_gnn.tools.explanation import Explanation

GROUPS = ("outputs", "loss", "gradients", "metrics")


@dataclass(frozen=True)
class SchemeParity:
    """Comparison of one scheme with a single device.

    Attributes:
        scheme: strategy name, with its distinguishing options.
        approximation: reason for differences by design; empty if exact.
        not_compared: parts that were not compared, with the reason; empty if all were compared.
        steps: names of the compared steps.
        differences: for each of `GROUPS`, the largest difference relative to the largest value; None if nothing was compared.
        finding: first difference of a scheme that should be exact.
    """

    scheme: str
    approximation: str = ""
    not_compared: str = ""
    steps: Sequence[str] = ()
    differences: Mapping[str, float | None] = field(default_factory=dict)
    finding: Finding | None = None

    @property
    def verdict(self) -> str:
        """``"same"``, ``"differs"``, ``"approximate"``, ``"evaluation same"`` or ``"not compared"``."""
        if self.finding is not None:
            return "differs"
        if not self.steps or self.approximation:
            return "approximate" if self.steps else "not compared"
        return "evaluation same" if self.not_compared else "same"


@dataclass(frozen=True)
class ParityReport:
    """Result of a parity check.

    Attributes:
        schemes: results of the schemes in the given order.
        ranks: number of ranks.
        nodes, edges: number of compared nodes and edges.
        of_nodes: number of nodes of the graph.
        dtype: dtype of the computation.
        tolerance: maximum difference of equal values.
        seconds: duration.
        notes: further notes.
    """

    schemes: Sequence[SchemeParity]
    ranks: int
    nodes: int
    edges: int
    of_nodes: int
    dtype: str
    tolerance: float
    seconds: float
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether something was compared, and no scheme that should be exact differs from a single device."""
        return any(each.steps for each in self.schemes) and not self.findings

    @property
    def findings(self) -> dict[str, list[str]]:
        """Descriptions of differences, each with the schemes that have it."""
        alike: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
        for each in self.schemes:
            if (found := each.finding) is not None:
                alike.setdefault((found.step, found.where, found.why), []).append((str(found), each.scheme))
        return {group[0][0]: [scheme for _, scheme in group] for group in alike.values()}

    def as_dict(self) -> dict[str, Any]:
        """Returns a dict of plain values, for JSON."""
        schemes = [{**asdict(each), "verdict": each.verdict} for each in self.schemes]
        return {**asdict(self), "schemes": schemes, "ok": self.ok}

    def table(self) -> Table:
        """Returns a table with a row per scheme."""
        looked_at = f"{self.nodes:,} nodes" + (f" of {self.of_nodes:,}" if self.nodes < self.of_nodes else "")
        title = f"{self.ranks} ranks against one device: {looked_at}, {self.edges:,} edges, {self.dtype}"
        made = Table("scheme", *GROUPS, "verdict", title=title, title_justify="left")
        for column in made.columns[1:5]:
            column.justify = "right"
        for each in self.schemes:
            cells = [each.differences.get(group) for group in GROUPS]
            made.add_row(each.scheme, *("-" if cell is None else f"{cell:.1e}" for cell in cells), each.verdict)
        return made

    def lines(self) -> list[str]:
        """Returns details that do not fit into the table: differences with their causes, and omissions."""
        found = [f"{', '.join(schemes)}: {text}" for text, schemes in self.findings.items()]
        for kind in ("approximation", "not_compared"):
            how = "" if kind == "not_compared" else "approximate by design, after a few training steps; "
            for text in dict.fromkeys(filter(None, (getattr(each, kind) for each in self.schemes))):
                schemes = [each.scheme for each in self.schemes if getattr(each, kind) == text]
                found.append(f"{', '.join(schemes)}: {how}{text}.")
        steps = dict.fromkeys(step for each in self.schemes for step in each.steps)
        summary = f"Compared: {', '.join(steps) or 'nothing'}; the same up to {self.tolerance:.0e}. Took {self.seconds:.1f} s"
        return [*found, *self.notes, summary]

    def __str__(self) -> str:
        return text_of(self.table(), *self.lines(), width=120).rstrip()


def explanation_table(explanations: Sequence[Explanation], title: str) -> Table:
    """Returns a table with a row for each communicating operation; messages and bytes are maxima over ranks."""
    heads = "step", "pass", "line", "operation", "rows", "messages", "bytes per rank"
    made = text_table(*heads, title=title, num_left=5)
    for each in explanations:
        for sender, sent in each.bytes_sent.items():
            numbers = (f"{max(counts):,}" for counts in (each.messages[sender], sent))
            line = Path(sender.line).name or "-"
            made.add_row(each.step, sender.direction, line, sender.operation, sender.rows or "-", *numbers)
        total = [sum(of_rank) for of_rank in zip(*each.bytes_sent.values())]
        made.add_row(each.step, "", "", "all", "", "", f"{max(total, default=0):,}", end_section=True)
    return made


_ALL_RANKS = "Strategies without a number of graph_ranks were compared with one data rank: all ranks divided the graph."
STEPS = 3
"""Number of training steps of approximate schemes; in the first, caches send everything."""
MAX_VALUES = 20_000_000
"""Maximum of nodes times features for using the whole graph: 160 MB in float64, with a few copies."""
MAX_EDGES = 1_000_000
"""Maximum number of edges for using the whole graph: on a single device, PyG creates a row for each edge."""


def check_parity(
    module: pl.LightningModule,
    datamodule: GraphDataModule,
    strategies: Sequence[str | GNNStrategy] | None = None,
    devices: int = 2,
    num_nodes: int = 1,
    nodes: int | None = None,
    seed: int = 0,
) -> ParityReport:
    """Returns the differences of outputs, loss, gradients and metrics between one step of each scheme and a single device.

    ::

        report = lightning_gnn.check_parity(module, datamodule)
        print(report)
        assert report.ok

    The training step runs forward and backward, the module's other steps forward; no optimizer steps. Copies of the module run,
    so the module does not change, nor do random streams and loggers.

    Args:
        module: the module, trained or untrained.
        datamodule: the graph; its ``partition`` is used, if given.
        strategies: names, or strategies with arguments; default: all registered strategies that support this number of ranks.
        devices: devices per machine, as in the Trainer.
        num_nodes: number of machines, as in the Trainer; ranks are `devices` times `num_nodes`.
        nodes: number of nodes of a subgraph, see :func:`~lightning_gnn.tools.parity.ball`. Default: the whole graph, or a
            subgraph if it is too large.
        seed: seed of the subgraph and of random numbers, which are equal for a node or an edge on any number of ranks.

    Raises:
        ValueError: for an unknown strategy, no step to compare, or a model that a single device does not support either.
        RuntimeError: if no step of the module runs on a single device; the cause is the error.
    """
    began = time.perf_counter()
    if nodes is not None and nodes < 1:
        raise ValueError(f"nodes must be at least 1, got {nodes}.")
    if devices * num_nodes < 2:
        raise ValueError(f"A check needs at least 2 ranks, got {devices * num_nodes}.")
    given = make_strategies() if strategies is None else strategies
    chosen = [each if isinstance(each, GNNStrategy) else make_strategies([each])[0] for each in given]
    with progress_bar("Comparing with one device", len(chosen), "strategies") as advance, isolate(), disable_compile(), silence():
        check, schemes = _Check(module, datamodule, devices, num_nodes, nodes, seed), []
        check.run_references()
        for strategy in chosen:
            schemes.append(check.scheme(strategy))
            advance(1)
    graph, dtype = check.graph, "float64" if check.dtype is not None else "dtypes as they are"
    sizes = check.num_nodes, graph.num_edges, check.graph_size
    seconds = time.perf_counter() - began
    return ParityReport(schemes, devices * num_nodes, *sizes, dtype, check.tolerance, seconds, check.notes)


def explain_steps(
    module: pl.LightningModule,
    datamodule: GraphDataModule,
    strategy: GNNStrategy,
    devices: int = 2,
    num_nodes: int = 1,
    nodes: int | None = None,
    seed: int = 0,
) -> list[Explanation]:
    """Returns the messages that ranks send each other in each step of a module under one scheme, in the dtypes of training.

    :func:`check_parity` describes the arguments and the steps.

    Raises:
        ValueError: for no step, or a scheme that does not support this number of ranks.
        RuntimeError: if a step does not run on parts of the graph; the cause is the error.
    """
    with isolate(), disable_compile(), silence():
        check = _Check(module, datamodule, devices, num_nodes, nodes, seed)
        return [check.explain(stage, strategy) for stage in check.stages()]


def make_strategies(names: Sequence[str] | None = None, **options: Any) -> list[GNNStrategy]:
    """Returns strategies with these names; default: all registered strategies that name a scheme.

    Raises:
        ValueError: for an unknown name.
    """
    known = {name: kind for name, kind in registered().items() if name == kind.strategy_name != "auto_gnn"}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"schemes must be among {', '.join(known)}, got {unknown[0]!r}.")
    return [known[name](**options) for name in (known if names is None else names)]


@dataclass
class _Reference:
    """Single-device run of a step, and its problem if it is not usable as a reference."""

    trial: Trial
    whole: Outcome
    finding: Finding | None

    @cached_property
    def later(self) -> Outcome:
        """Result of the last of `STEPS` steps."""
        return self.trial.on_whole(STEPS)


class _Check:
    """Steps of one module on one graph; see :func:`check_parity`."""

    def __init__(
        self, module: pl.LightningModule, datamodule: GraphDataModule, devices: int, num_nodes: int, nodes: int | None, seed: int
    ) -> None:
        self._module, graph = module, datamodule.load()
        self.graph_size = JoinedGraph.of(graph).num_nodes
        self._options = {"input_type": datamodule.masks_and_labels(graph).node_type} if isinstance(graph, HeteroData) else {}
        self.notes: list[str] = []
        self._concatenates = datamodule.sample_data is not None and datamodule.sample_data.concatenates
        found = first_samples(datamodule, graph) if datamodule.has_samples else {}
        values = max((sum(each.numel() for each in tensors.values()) for tensors, _ in found.values()), default=0)
        self.graph, n_id = some_of(graph, nodes, seed, values, **self._options)
        self._samples = {stage: select_nodes(*each, self.graph) for stage, each in found.items()}
        self._ranks, self._hosts, self._seed = devices * num_nodes, num_nodes, seed
        self._data = copy.copy(datamodule)
        self._data.trainer = self._data.sample_data = None
        source = copy.copy(self.graph)
        if isinstance(source, Data) and not source.x.size(1):  # added to a graph without features
            del source.x
            source.num_nodes = len(source.n_id)
        self._data.source, self._data.source_kwargs, self._data.split = source, None, None
        if datamodule.partition is not None and not isinstance(datamodule.partition, str):
            self._data.partition = np.asarray(datamodule.partition)[n_id]
        self._data.setup("check")
        self.num_nodes = len(n_id)
        if self.num_nodes < self.graph_size:
            self.notes.append(
                f"A subgraph of {self.num_nodes:,} of {self.graph_size:,} nodes was compared: training nodes, their neighbors, "
                "and all edges between these nodes. Set another number with nodes=N, or --nodes N."
            )
        if draws_random_numbers(module):
            self.notes.append("Dropout was off: each rank draws its own in training, so digits differ.")
        self.dtype: torch.dtype | None = torch.float64
        self._references: list[_Reference] = []

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]

    def stages(self) -> list[str]:
        """Returns the stages whose steps the module has; raises ValueError if there is none."""
        module, stages = self._module, list[str]()
        counts = whole_graph(self.graph, **self._options).mask_counts
        for stage, (step, mask) in STAGES.items():
            if not is_overridden(step, module):
                continue
            if self._data.has_samples and stage not in self._samples:
                self.notes.append(f"{step} was skipped: the datamodule has no samples of this stage.")
            elif self._data.has_samples:
                stages.append(stage)
            elif mask is not None and not counts[counted_mask(mask, module)]:
                self.notes.append(f"{step} was skipped: {counted_mask(mask, module)} is empty in the compared nodes.")
            else:
                stages.append(stage)
        if not stages:
            raise ValueError("There is no step to compare: the module has none, or no node is in a mask.")
        return stages

    def run_references(self) -> None:
        """Run the steps on a single device."""
        stages = self.stages()
        tried: list[tuple[torch.dtype | None, Graph, list[_Reference], dict[str, Exception]]] = []
        given = self.graph
        for self.dtype in TOLERANCES:
            self.graph = in_dtype(given, self.dtype)
            found: list[_Reference] = []
            errors: dict[str, Exception] = {}
            for stage in stages:
                try:
                    found.append(self._reference(stage))
                except UnsupportedModelError:
                    raise
                except Exception as problem:
                    errors[stage] = problem
            tried.append((self.dtype, self.graph, found, errors))
            if not errors:
                break
        self.dtype, self.graph, found, errors = min(tried, key=lambda attempt: len(attempt[-1]))
        if not found:
            stage, error = next(iter(errors.items()))
            raise RuntimeError(f"{STAGES[stage][0]} does not run on one device: {in_one_line(error)}") from error
        if self.dtype is None:
            self.notes.append(
                "The module does not run in float64, so float32 rounding may hide small differences: create constants "
                "with the dtype of the tensors that they are combined with."
            )
        self.notes += [
            f"{STAGES[stage][0]} was skipped: on one device, it raises {in_one_line(error)}." for stage, error in errors.items()
        ]
        self._references = found

    def _trial(self, stage: str, explanation: Explanation | None = None) -> Trial:
        trainer = QuietTrainer(quiet_trainer(), stage, self._data)
        prepared = quiet(copy_module(self._module), trainer)
        prepared.configure_model()
        prepared.setup(stage)
        dtype = self.dtype if explanation is None else None
        small = self._small(stage, np.zeros(0), None)
        return Trial(prepared, small.graph, stage, trainer, dtype, small.whole, explanation)

    def _small(self, stage: str, part: np.ndarray, holders: np.ndarray | None, data_ranks: int = 1) -> SmallGraph:
        """Returns the compared graph, with samples of a stage if there are any, and its division."""
        small = SmallGraph(self.graph, part, holders, self._options)  # type: ignore[arg-type]
        options: dict[str, Any] = {"concatenates": self._concatenates, "data_ranks": data_ranks}
        return with_samples(small, *self._samples[stage], **options) if self._samples else small

    def _reference(self, stage: str) -> _Reference:
        trial = self._trial(stage)
        whole, again = trial.on_whole(seed=self._seed), trial.on_whole(seed=self._seed)
        kept = first_difference(whole, again, self.tolerance)
        return _Reference(trial, whole, None if kept is None else Finding(trial.step, kept.where, kept.size, f"{STATE}."))

    def explain(self, stage: str, strategy: GNNStrategy) -> Explanation:
        """Returns the messages that ranks send each other in a step under a scheme."""
        explanation = Explanation(STAGES[stage][0], self._ranks)
        trial = self._trial(stage, explanation)
        try:
            self._on_parts(strategy, self._split(strategy), trial, 1)
        except Parted as error:
            raise RuntimeError(str(Finding.from_error(error, trial.step))) from error
        return explanation

    def _split(self, strategy: GNNStrategy) -> Callable[[Trial], list[Shard]]:
        """Returns a function that splits the graph of a trial for a scheme."""
        graph_ranks = self._graph_ranks(strategy)
        layout = strategy.scheme.layout(graph_ranks, self._hosts if graph_ranks % self._hosts == 0 else 1)
        if not layout.takes(isinstance(self.graph, HeteroData)):
            raise ValueError(NO_TYPES)
        part, holders, _ = self._data.assign(self.graph, layout)
        data_ranks = self._ranks // graph_ranks
        return lambda trial: self._small(trial.stage, np.asarray(part), holders, data_ranks).shards(trial.graph, layout)

    def _graph_ranks(self, strategy: GNNStrategy) -> int:
        """Returns the number of ranks that divide the graph; raises ValueError if it does not divide the number of ranks."""
        graph_ranks = strategy.graph_ranks
        if not self._samples or not isinstance(graph_ranks, int):
            return self._ranks
        if self._ranks % graph_ranks:
            raise ValueError(f"The number of ranks must be a multiple of graph_ranks={graph_ranks}.")
        return graph_ranks

    def scheme(self, strategy: GNNStrategy) -> SchemeParity:
        """Returns the comparison of a scheme with a single device."""
        label, in_batches, graph_ranks = strategy.strategy_name, strategy.trains_on_batches, strategy.graph_ranks
        if isinstance(graph_ranks, int):
            label = f"{label} graph_ranks={graph_ranks}"
        elif self._samples and _ALL_RANKS not in self.notes:
            self.notes.append(_ALL_RANKS)
        approximation, not_compared = strategy.approximation, ""
        if in_batches:
            not_compared = (
                f"training on {approximation} takes other steps than one device on the whole graph, so its steps "
                "cannot be compared; lightning-gnn compare compares trained models. Evaluation was compared"
            )
            approximation = ""
        references = [each for each in self._references if not (in_batches and each.trial.training)]
        if self._samples and (reason := strategy.samples_unsupported_reason) is not None:
            return SchemeParity(label, not_compared=f"samples are not supported: {reason.removesuffix('.')}")
        try:
            split = self._split(strategy)
        except ValueError as error:
            return SchemeParity(label, not_compared=f"on {self._ranks} ranks, {str(error)[:1].lower()}{str(error)[1:-1]}")
        differences: dict[str, float | None] = dict.fromkeys(GROUPS)
        finding: Finding | None = None
        run = partial(self._on_parts, strategy, split)
        for reference in references:
            trial = reference.trial
            steps = STEPS if approximation and trial.training else 1
            try:
                found = run(trial, steps)
            except Parted as error:
                finding = finding or Finding.from_error(error, trial.step)
                continue
            whole = reference.whole if steps == 1 else reference.later
            here = self._differences(whole, found)
            for group, difference in here.items():
                differences[group] = max(differences[group] or 0.0, difference)
            if not approximation:
                least = {"metrics": max(self.tolerance, LOGGED_TOLERANCE)}
                differs = any(difference > least.get(group, self.tolerance) for group, difference in here.items())
                finding = finding or reference.finding
                if differs and finding is None:
                    first = first_difference(whole, found, self.tolerance)
                    finding = Finding(trial.step, first.where, first.size, f"{UNKNOWN}.") if first else None
        compared_steps = [each.trial.step for each in references]
        return SchemeParity(label, approximation, not_compared, compared_steps, differences, finding)

    def _on_parts(self, strategy: GNNStrategy, split: Callable[[Trial], list[Shard]], trial: Trial, steps: int) -> Outcome:
        bind = partial(bind_module, strategy.scheme, meter=Meter(), cache_input_aggregation=strategy.cache_input_aggregation)
        prepare = coding(strategy) if trial.training else None
        return trial.on_parts(split(trial), bind, prepare, steps, self._seed)

    def _differences(self, whole: Outcome, parts: Outcome) -> dict[str, float]:
        """Returns the largest difference of each group that has something to compare."""
        events = compare_events(whole.ranks[0].events, [each.events for each in parts.ranks])
        each: dict[str, list[float]] = {
            "outputs": [*(size for _, size in events), *(value for _, value in differing(parts.buffers, whole.buffers, -1))],
            "loss": [value for _, value in differing({"": parts.loss}, {"": whole.loss}, -1)],
            "gradients": [value for _, value in differing(parts.gradients, whole.gradients, -1)],
            "metrics": [each.size for each in differences(whole, parts, -1) if each.group == "metrics"],
        }
        return {group: max(values) for group, values in each.items() if values}


def some_of(
    data: Graph, num_nodes: int | None, seed: int = 0, more_values: int = 0, input_type: NodeType | None = None
) -> tuple[Graph, Ids]:
    """Returns the graph, or a subgraph, and the ids of its nodes; with types, of all nodes, type after type.

    In the graph, ``n_id`` and ``e_id`` are the original ids of nodes and edges.

    Args:
        data: the graph.
        num_nodes: number of nodes. None: the whole graph if ``x`` and `more_values` have at most `MAX_VALUES` entries, and edges
            are at most `MAX_EDGES`; else a subgraph within both limits.
        seed: seed of the subgraph.
        more_values: number of further values of all nodes.
        input_type: predicted node type of a heterogeneous graph.
    """
    data = data.clone()
    for nodes in data.node_stores:
        nodes.n_id = torch.arange(nodes.num_nodes)
    for edges in data.edge_stores:
        edges.e_id = torch.arange(edges.edge_index.size(1))
    total = JoinedGraph.of(data).num_nodes
    values = more_values + sum(nodes.x.numel() for nodes in data.node_stores if "x" in nodes)
    size = max(1, min(total, MAX_VALUES * total // max(1, values))) if num_nodes is None else num_nodes
    found, n_id = ball(data, size, seed, input_type)
    while num_nodes is None and found.num_edges > MAX_EDGES and size > 1:
        size //= 2
        found, n_id = ball(data, size, seed, input_type)
    return found, n_id


def ball(data: Graph, num_nodes: int, seed: int = 0, input_type: NodeType | None = None) -> tuple[Graph, Ids]:
    """Returns a subgraph of `num_nodes` nodes: a training node, its neighbors in both directions, their neighbors, and so on.

    The last hop is sampled. If no neighbors are left, other nodes start further balls, training nodes first: one, then two, then
    four. The second result and `input_type` are described in :func:`some_of`.
    """
    joined = JoinedGraph.of(data)
    total = joined.num_nodes
    if num_nodes >= total:
        return data, np.arange(total)
    rng = np.random.default_rng(seed)
    source, target = joined.edge_index
    labeled, _ = joined.masks_of(Predicted.of(data, input_type))
    order = rng.permutation(total)
    order = order[np.argsort(~labeled.get("train_mask", np.ones(total, bool))[order], kind="stable")]
    taken, starts = np.zeros(total, dtype=bool), 1
    new = np.empty(0, dtype=np.int64)
    while (room := num_nodes - int(taken.sum())) > 0:
        if len(new):
            last = np.zeros(total, dtype=bool)
            last[new] = True
            reached = np.unique(np.concatenate([target[last[source]], source[last[target]]]))
            new = reached[~taken[reached]]
        else:
            new = order[~taken[order]][:starts]
            starts *= 2
        new = new if len(new) <= room else rng.choice(new, room, replace=False)
        taken[new] = True
    chosen = torch.from_numpy(taken)
    firsts = [*(joined.node_firsts or {}).values()]
    of_types = dict(zip(joined.node_firsts or (), chosen.tensor_split(firsts[1:])))
    return data.subgraph(of_types or chosen), taken.nonzero()[0]
