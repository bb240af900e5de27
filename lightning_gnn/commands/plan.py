"""``lightning-gnn plan``: what a plan puts on each link, and what training would take under it and under other schemes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.cli import LightningArgumentParser
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_gnn.checks.memory import training_bytes
from lightning_gnn.commands.graph_cli import GraphCLI, working
from lightning_gnn.datamodules.shards import Cut
from lightning_gnn.planning.cost import SECONDS_PER_EDGE_COLUMN
from lightning_gnn.planning.plan import Plan
from lightning_gnn.planning.plan_cost import PlanCost, direct_is_as_fast
from lightning_gnn.planning.predict import (
    Balance,
    LinkLoad,
    Prediction,
    Workload,
    balance,
    break_even_seconds,
    link_loads,
    predict,
)
from lightning_gnn.planning.presets import PRESETS, find_topology
from lightning_gnn.planning.relation import Relation
from lightning_gnn.planning.tables import rank_plan
from lightning_gnn.planning.topology import Topology
from lightning_gnn.strategies.base import Scheme
from lightning_gnn.strategies.dgcl import DGCLScheme

USAGE = """lightning-gnn plan --config FILE [--topology NAME|FILE] [--parts N] [--columns N] [--layers K]
                          [--output FOLDER] [--json FILE] [--KEY VALUE ...]"""
DESCRIPTION = (
    "Say what a plan puts on each link, and what epochs would take under it and under other schemes, without starting "
    "ranks. Files and keys are those of fit; used are data, trainer.strategy, trainer.devices and trainer.num_nodes."
)
WIDTH = 150
"""Columns of what is printed to a file."""

STAGES = 6
"""So many columns are for stages."""

BUSIEST = 20
"""So many links are printed one by one; the JSON has all."""

PAPER_LAYERS = 2
"""DGCL section 7."""


class PlanCLI(GraphCLI):
    """The options of ``plan``, checked before anything is loaded."""

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__("plan", arguments, USAGE, DESCRIPTION)

    @override
    def add_options(self, parser: LightningArgumentParser) -> None:
        options = {
            "topology": (str, f"{', '.join(PRESETS)}, or a JSON file (docs/planning.md). (default: the strategy's)"),
            "columns": (
                int,
                "Width of the rows that layers exchange. (default: the model's hidden_channels, or features)",
            ),
            "layers": (int, f"Propagations of the model. (default: the model's num_layers, or {PAPER_LAYERS})"),
            "output": (str, "Folder for pictures, PNG and SVG. (default: none are drawn)"),
            "json": (str, "File for all numbers. (default: none is written)"),
        }
        for name, (kind, text) in options.items():
            parser.add_argument(f"--{name}", type=kind, help=text)

    @override
    def prepare(self, scheme: Scheme, parts: int) -> None:
        config = self.config
        if not isinstance(scheme, DGCLScheme):
            raise ValueError(f"{type(scheme).__name__} follows no plan. Use trainer.strategy=dgcl.")
        if parts < 2:
            raise ValueError(f"plans are for several parts (got {parts}): give --parts.")
        for name in ("layers", "columns"):
            if config[name] is not None and config[name] < 1:
                raise ValueError(f"--{name} is a number above 0 (got {config[name]}).")
        if config.topology is not None:
            scheme.topology = config.topology
        if scheme.topology in (None, "auto"):
            raise ValueError(
                f"which topology? Give --topology, one of {', '.join(PRESETS)} or a JSON file (docs/planning.md), or name one "
                "in the strategy: DGCLStrategy(topology=...)."
            )
        self.topology = find_topology(scheme.topology, parts)
        self.asked = scheme.plan
        self.keep_constant = scheme.keep_constant
        self.layers, self.layers_from = _first(
            (config.layers, "--layers"),
            (_of_model(config.model, "num_layers"), "the model's"),
            (PAPER_LAYERS, "DGCL's"),
        )
        self.columns, self.columns_from = _first(
            (config.columns, "--columns"),
            (_of_model(config.model, "hidden_channels"), "the model's"),
            (0, "the features'"),
        )
        self.output = None if config.output is None else Path(config.output)
        self.json = None if config.json is None else Path(config.json)
        if self.output is not None:
            _check_folder("--output", self.output)
        if self.json is not None:
            _check_folder("--json", self.json.parent)
            if self.json.is_dir():
                raise ValueError(f"--json {self.json} is a folder; name a file.")


def _first(*choices: tuple[int | None, str]) -> tuple[int, str]:
    return next((value, source) for value, source in choices if value is not None)


def _of_model(config: Any, name: str) -> int | None:
    """Returns the first positive integer of that name in the model's configuration, the outermost; None if there is none."""
    values = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    value = values.get(name)
    if isinstance(value, int) and value > 0:
        return value
    return next((found for each in values.values() if (found := _of_model(each, name)) is not None), None)


def _check_folder(option: str, folder: Path) -> None:
    """Makes a folder and writes to it; a ValueError names the option that gave it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{option}: the folder {folder} cannot be written ({error}). Name another.") from error


@dataclass(frozen=True)
class Tables:
    """Memory of the send and receive tables against that of training (DGCL Figure 11), bytes per rank, ``[P]`` each.

    Attributes:
        table_bytes: of both directions.
        training_bytes: a low estimate of the peak, see :func:`~lightning_gnn.checks.memory.training_bytes`.
    """

    table_bytes: tuple[int, ...]
    training_bytes: tuple[int, ...]

    @property
    def largest_share(self) -> float:
        """Of the rank where tables weigh most; rather too large, since the estimate is low."""
        return max(tables / peak for tables, peak in zip(self.table_bytes, self.training_bytes))

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and lists, for JSON."""
        return {
            "table_bytes": list(self.table_bytes),
            "training_bytes": list(self.training_bytes),
            "largest_share": self.largest_share,
        }


@dataclass(frozen=True)
class PlanReport:
    """All that ``plan`` tells.

    Attributes:
        plan, cost: the one that is followed.
        predictions: of all schemes.
        links: of the plan, the busiest first.
        balance: of the plan.
        tables: of the plan.
    """

    work: Workload
    topology: Topology
    plan: Plan
    cost: PlanCost
    predictions: tuple[Prediction, ...]
    links: tuple[LinkLoad, ...]
    balance: Balance
    tables: Tables

    @classmethod
    def of(cls, work: Workload, topology: Topology, asked: str, cut: Cut) -> PlanReport:
        """Returns the report on the plan of that name; of SPST for names that have no plan of their own.

        Raises:
            ValueError: the plan does not apply: two devices exchange rows but have no link.
        """
        predictions = predict(work, topology)
        by_name = {each.scheme: each for each in predictions}
        planned = by_name["spst"].plan
        direct = asked == "auto" and planned is not None and direct_is_as_fast(planned, topology)
        chosen = by_name["p2p" if direct else asked if asked in ("p2p", "dgcl_r") else "spst"]
        if chosen.plan is None or chosen.cost is None:
            raise ValueError(chosen.reason)
        ranks = [rank_plan(chosen.plan, rank) for rank in range(topology.num_devices)]
        peaks = (
            training_bytes(*size, work.feature_bytes, work.row_bytes, work.num_layers, rank.num_relayed)
            for size, rank in zip(cut.sizes(), ranks)
        )
        return cls(
            work,
            topology,
            chosen.plan,
            chosen.cost,
            tuple(predictions),
            tuple(link_loads(chosen.plan, topology, work.row_bytes)),
            balance(chosen.cost, work.row_bytes),
            Tables(tuple(rank.table_bytes for rank in ranks), tuple(peaks)),
        )

    def prediction(self, scheme: str) -> Prediction:
        """Returns the prediction of one scheme."""
        return next(each for each in self.predictions if each.scheme == scheme)

    @property
    def break_even_seconds(self) -> float | None:
        """Seconds per edge and column below which replication beats the plan; see ``planning/predict.py``."""
        return break_even_seconds(self.prediction(self.plan.name), self.prediction("replicate"))

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and lists, for JSON: seconds, bytes, rows."""
        work = self.work
        return {
            "topology": self.topology.name,
            "parts": self.topology.num_devices,
            "nodes": int(work.relation.offsets[-1]),
            "edges": int(work.edge_index.shape[1]),
            "layers": work.num_layers,
            "columns": work.columns,
            "features": work.features,
            "row_bytes": work.row_bytes,
            "keep_constant": work.keep_constant,
            "seconds_per_edge_column": SECONDS_PER_EDGE_COLUMN,
            "plan": self.plan.name,
            "stages": self.plan.num_stages,
            "stage_seconds": self.cost.stage_seconds(work.row_bytes).tolist(),
            "links": [load.as_dict(work.row_bytes) for load in self.links],
            "predictions": [each.as_dict() for each in self.predictions],
            "break_even_seconds_per_edge_column": self.break_even_seconds,
            "balance": self.balance.as_dict(),
            "replication_factors": list(work.replication_factors),
            "tables": self.tables.as_dict(),
        }


def plan(arguments: Sequence[str]) -> None:
    """Runs ``lightning-gnn plan`` with these arguments."""
    cli = PlanCLI(arguments)
    # Where nobody watches, rich would take 80 columns and cut tables short.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH
    data, console = cli.datamodule, Console(highlight=False, markup=False, width=width)
    try:
        with working(Console(stderr=True), f"Loading the graph in {cli.layout.parts} parts, and planning"):
            data.prepare_for(cli.layout)
            cut = data.stored_cut()
            x = cut.attributes["node"]["x"]
            work = Workload(
                Relation.from_halos(cut.halos, cut.offsets),
                cut.edge_index(),
                cli.layers,
                cli.columns or x.size(1),
                x.size(1),
                x.element_size(),
                cli.keep_constant,
            )
            report = PlanReport.of(work, cli.topology, cli.asked, cut)
        if cli.json is not None:
            cli.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
        drawn = [] if cli.output is None else _draw(report, cli.output)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")
    console.print(*_printed(report, cli.layers_from, cli.columns_from), sep="\n")
    for file in (*([] if cli.json is None else [cli.json]), *drawn):
        console.print(f"Written: {file}", soft_wrap=True)


def _draw(report: PlanReport, folder: Path) -> list[Path]:
    # Here, since all commands import this file, and matplotlib takes its time.
    from lightning_gnn.planning.pictures import draw_links, draw_stages, save_picture

    row_bytes, name = report.work.row_bytes, report.plan.name
    title = f"{name} over {report.topology.name}, rows of {row_bytes:,} bytes"
    links = draw_links(report.links, report.topology, title)
    plans = {scheme: report.prediction(scheme) for scheme in ("p2p", "spst")}
    stages = draw_stages(
        {scheme: each.cost or each.reason for scheme, each in plans.items()}, report.topology, row_bytes
    )
    return [*save_picture(links, folder / "links"), *save_picture(stages, folder / "stages")]


# Printing ####################################################################


def _printed(report: PlanReport, layers_from: str, columns_from: str) -> Iterator[Any]:
    work, topology = report.work, report.topology
    yield (
        f"{work.relation.offsets[-1]:,} nodes and {work.edge_index.shape[1]:,} edges in {topology.num_devices} parts on "
        f"{topology.name}; {work.num_layers} layers ({layers_from}), rows of {work.columns:,} columns ({columns_from}), "
        f"{work.row_bytes:,} bytes"
    )
    yield _link_table(report)
    yield _prediction_table(report)
    yield from (f"{each.scheme} does not apply: {each.reason}" for each in report.predictions if not each.applies)
    yield from _counted(report)
    yield ""
    yield _balance_table(report)
    factors = (f"{factor:.2f} after {hop}" for hop, factor in enumerate(work.replication_factors, 1))
    yield f"Replication factor by hops (DGCL Figure 4): {', '.join(factors)}"
    tables = report.tables
    yield (
        f"Send and receive tables: {_bytes(sum(tables.table_bytes))}, {_bytes(max(tables.table_bytes))} on the rank with most; "
        f"at most {tables.largest_share:.4f} of a rank's memory in training (DGCL Figure 11: below 0.002). Counted as memory "
        f"are features, halo, edges, {work.num_layers} outputs of {work.columns:,} columns and their gradients: "
        f"{_bytes(sum(tables.training_bytes))}; weights and what a model keeps beside come on top."
    )


def _link_table(report: PlanReport) -> Table:
    row_bytes, count = report.work.row_bytes, report.plan.num_stages
    # The last stages carry least: of many, they are printed together.
    bounds = [*range(min(count, STAGES - (count > STAGES))), *[STAGES - 1] * (count > STAGES), count]
    names = [str(low) if low + 1 == high else f"{low} to {high - 1}" for low, high in pairwise(bounds)]
    if names:
        names[0] = f"stage {names[0]}"
    title = f"Plan {report.plan.name}: rows of {row_bytes:,} bytes by link and stage"
    table = Table("link", "over", *names, "all", "bytes", "busiest hop", "busy", title=title, title_justify="left")
    for column in table.columns:
        column.overflow = "fold"  # a number that is cut short is a wrong one
    for column in (*table.columns[2:-2], table.columns[-1]):
        column.justify = "right"

    def together(by_stage: NDArray[Any]) -> list[Any]:
        return [by_stage[low:high].sum() for low, high in pairwise(bounds)]

    def line(name: str, loads: Sequence[LinkLoad], over: str, *end: str) -> None:
        by_stage = np.array([load.rows for load in loads], np.int64).reshape(-1, count).sum(0)
        rows = (f"{rows:,}" if rows else "-" for rows in (*together(by_stage), by_stage.sum()))
        table.add_row(name, over, *rows, _bytes(by_stage.sum() * row_bytes), *end)

    for load in report.links[:BUSIEST]:
        end = load.busiest_hop, _seconds(load.hop_seconds)
        line(f"{load.sender}→{load.receiver}", [load], "+".join(load.kinds), *end)
    rest = report.links[BUSIEST:]
    if rest:
        line(f"{len(rest)} others", rest, "", "", f"≤ {_seconds(rest[0].hop_seconds)}")
    table.add_section()
    line("all", report.links, "", "", "")
    by_stage = report.plan.traffic.sum((1, 2)) * row_bytes
    table.add_row("bytes", "", *map(_bytes, together(by_stage)), _bytes(by_stage.sum()), "", "", "")
    seconds = report.cost.stage_seconds(row_bytes)
    table.add_row("time", "", *map(_seconds, together(seconds)), _seconds(seconds.sum()), "", "", "")
    table.caption = (
        f"{len(report.links)} links are used. "
        + "busy: a link's busiest hop in all stages, with what other links send over it"
    )
    return table


def _prediction_table(report: PlanReport) -> Table:
    headings = (
        *("scheme", "rows", "layer: exchange", "layer: sums", "epoch: exchange", "epoch: sums", "epoch", "first epoch"),
        *("replication", "edges"),
    )
    title = "Predicted time by scheme; a layer in one direction"
    table = Table(*headings, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    edges = report.work.edges.sum()
    for each in report.predictions:
        if not each.applies:
            table.add_row(each.scheme, *["-"] * 9)
            continue
        more = each.edges - edges
        table.add_row(
            each.scheme + " *" * (each.scheme == report.plan.name),
            f"{each.rows:,}",
            _seconds(each.exchange_seconds),
            _seconds(each.compute_seconds),
            _seconds(each.epoch_exchange_seconds),
            _seconds(each.epoch_compute_seconds),
            _seconds(each.epoch_seconds),
            f"+ {_seconds(each.first_exchange_seconds)}",
            f"{each.replication:.2f}",
            f"+ {more:,} ({more / max(1, edges):.0%})" if more else f"{edges:,}",
        )
    table.caption = "* followed by fit. The first epoch also exchanges the features, at their own width."
    return table


def _counted(report: PlanReport) -> Iterator[str]:
    work = report.work
    layers, backward = work.num_layers, work.num_layers - work.skipped
    features = (
        f"the {work.features:,} columns of features are exchanged once; models that attend, such as GAT: {layers} and {layers}"
        if work.keep_constant
        else "keep_constant is off: layers are taken to map before they exchange"
    )
    yield (
        f"An epoch: {backward} forward and {backward} backward exchanges ({features}), {layers} forward and {backward} "
        f"backward sums over edges at {SECONDS_PER_EDGE_COLUMN * 1e9:g} ns per edge and column (one CPU core); no overlap, no "
        "maps with weights. Replication: rows of features held by all devices over the nodes of the graph."
    )
    limit = report.break_even_seconds
    if limit is not None:
        yield f"Replication is faster than {report.plan.name} where sums take less than {limit * 1e9:.2g} ns per edge and column."


def _balance_table(report: PlanReport) -> Table:
    found = report.balance
    table = Table("kind of hop", "time of an exchange if other kinds took none", title_justify="left")
    table.title = f"Plan {report.plan.name}: balance between kinds"
    table.columns[1].justify = "right"
    for kind, seconds in found.kinds.items():
        table.add_row(kind, _seconds(seconds))
    if found.others_seconds is not None:
        table.add_row("all but nvlink", _seconds(found.others_seconds))
    spread = "a kind is idle" if found.spread is None else f"{found.spread:.1%}"
    table.caption = f"slowest over fastest kind: {spread}"
    if found.paper_spread is not None:
        table.caption += f"; nvlink and all others: {found.paper_spread:.1%} (DGCL Table 7: within 12.6%)"
    return table


def _seconds(value: float) -> str:
    if not value:
        return "0"
    factor, unit = next(((f, u) for f, u in ((1, "s"), (1e3, "ms"), (1e6, "µs")) if value * f >= 1), (1e9, "ns"))
    return f"{value * factor:,.3g} {unit}" if value * factor < 1000 else f"{value * factor:,.0f} {unit}"


def _bytes(count: float) -> str:
    factor, unit = next(((f, u) for f, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= f), (1, "B"))
    return f"{count / factor:,.3g} {unit}" if count < 1000 * factor else f"{count / factor:,.0f} {unit}"
