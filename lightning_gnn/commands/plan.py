"""``lightning-gnn plan``: what a plan puts on each link, and what training would take under it and under other schemes.

Found out in ``plan_report.py``, printed by ``plan_print.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_gnn.advising.advice import quiet_trainer
from lightning_gnn.checks.footprint import Peak, Predicted, Sizes
from lightning_gnn.commands.graph_cli import GraphCLI, check_folder, file_of, working
from lightning_gnn.commands.memory_table import memory_table
from lightning_gnn.commands.plan_print import printed
from lightning_gnn.commands.plan_report import PlanReport
from lightning_gnn.console import plain_width, text_console
from lightning_gnn.data.shards import Cut
from lightning_gnn.planning.predict import Workload
from lightning_gnn.planning.presets import PRESETS, find_topology
from lightning_gnn.planning.relation import Relation
from lightning_gnn.planning.topology import MAX_DEVICES, Topology
from lightning_gnn.strategies.dgcl import DGCLScheme
from lightning_gnn.strategies.scheme import Scheme
from lightning_gnn.strategies.spmm import ProductScheme

USAGE = """lightning-gnn plan --config FILE [--topology NAME|FILE] [--parts N] [--columns N] [--layers K]
                          [--output FOLDER] [--json FILE] [--KEY VALUE ...]"""
DESCRIPTION = (
    "Say what a plan puts on each link, and what epochs would take under it and under other schemes, without starting "
    "ranks. Files and keys are those of fit; used are data, trainer.strategy, trainer.devices, trainer.num_nodes, and for "
    "memory model."
)
WIDTH = 160
"""Columns of what is printed to a file."""

PAPER_LAYERS = 2
"""DGCL section 7."""


class PlanCLI(GraphCLI):
    """The options of ``plan``, checked before anything is loaded."""

    wants_module = True

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__("plan", arguments, USAGE, DESCRIPTION)

    @override
    def add_options(self, parser: LightningArgumentParser) -> None:
        options = {
            "topology": (
                str,
                f"{', '.join(PRESETS)}, or a JSON file (docs/planning.md). (default: the strategy's; spmm_ strategies: none, and "
                "no times)",
            ),
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
        if not isinstance(scheme, DGCLScheme | ProductScheme):
            raise ValueError(
                f"{type(scheme).__name__} follows no plan and makes no products. Use trainer.strategy=dgcl, or one of "
                "products, such as spmm_15d; lightning-gnn partition tells what a vertex cut sends."
            )
        if parts < 2:
            raise ValueError(f"plans are for several parts (got {parts}): give --parts.")
        if parts > MAX_DEVICES:
            raise ValueError(f"plans are for at most {MAX_DEVICES} parts (got {parts}): give --parts.")
        for name in ("layers", "columns"):
            if config[name] is not None and config[name] < 1:
                raise ValueError(f"--{name} is a number above 0 (got {config[name]}).")
        self.topology = self._topology(scheme, parts)
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
        if self.output is not None:
            if not isinstance(scheme, DGCLScheme):
                raise ValueError("--output draws a plan, and products on a process grid follow none: leave it out.")
            check_folder("--output", self.output)
        self.json = file_of("--json", config.json)

    def _topology(self, scheme: DGCLScheme | ProductScheme, parts: int) -> Topology | None:
        """Returns the topology asked for, of so many devices; None if products may do without."""
        asked = self.config.topology
        if isinstance(scheme, DGCLScheme):
            if asked is not None:
                scheme.topology = asked
            asked = scheme.topology
            if asked in (None, "auto"):
                raise ValueError(
                    f"which topology? Give --topology, one of {', '.join(PRESETS)} or a JSON file (docs/planning.md), or name "
                    "one in the strategy: DGCLStrategy(topology=...)."
                )
        return None if asked is None else find_topology(asked, parts)

    def report(self, work: Workload, cut: Cut) -> PlanReport:
        """Returns what the strategy would do with this cut.

        Raises:
            ValueError: its plan does not apply to the topology.
        """
        if isinstance(self.scheme, ProductScheme):
            return PlanReport.of_product(work, self.topology, self.scheme)
        assert isinstance(self.scheme, DGCLScheme) and self.topology is not None
        return PlanReport.of(work, self.topology, self.scheme.plan, cut)

    def peaks(self, cut: Cut) -> tuple[list[tuple[str, Peak, Peak]], str]:
        """Returns each rank's peak memory, kept and with ``recompute=True``; or nothing, and why."""
        if self.module is None:
            return [], "give --model, or a file that names one, as for fit."
        try:
            steps = Predicted(self.module, cut.shard(0).batch, quiet_trainer(), self.keep_constant)
        except RuntimeError as error:
            return [], str(error)
        row_bytes = cut.attributes["node"]["x"][:1].nbytes
        more = self.scheme.working_bytes(np.diff(cut.offsets).tolist(), row_bytes)
        sizes = Sizes.of_ranks(cut, self.module, self.layout.replicas)
        footprints = [steps.footprint(each, more) for each in sizes]
        return [(str(rank), each.peak(), each.peak(recompute=True)) for rank, each in enumerate(footprints)], ""


def _first(*choices: tuple[int | None, str]) -> tuple[int, str]:
    return next((value, source) for value, source in choices if value is not None)


def _of_model(config: Any, name: str) -> int | None:
    """Returns the first positive integer of that name in the model's configuration, the outermost; None if there is none."""
    values = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    value = values.get(name)
    if isinstance(value, int) and value > 0:
        return value
    return next((found for each in values.values() if (found := _of_model(each, name)) is not None), None)


def plan(arguments: Sequence[str]) -> None:
    """Runs ``lightning-gnn plan`` with these arguments."""
    cli = PlanCLI(arguments)
    data, console = cli.datamodule, text_console(plain_width(WIDTH), highlight=False, markup=False)
    with working(f"Loading the graph in {cli.layout.parts} parts, and planning"):
        data.prepare_for(cli.layout)
        cut = data.stored_cut()
        if cut.types.is_hetero:
            raise ValueError(
                "plan tells what layers exchange; a graph with types is trained on samples (docs/sampling.md)."
            )
        x = cut.attributes["node"]["x"]
        work = Workload(
            Relation.from_halos(cut.halos, cut.offsets),
            cut.edge_index(),
            cli.layers,
            cli.columns or x.size(1),
            x.size(1),
            x.element_size(),
            cli.keep_constant,
            _value_bytes(cut),
        )
        report = cli.report(work, cut)
        peaks, unknown = cli.peaks(cut)
        if cli.json is not None:
            memory = [{**peak.as_dict(), "recompute": again.as_dict()} for _, peak, again in peaks]
            cli.json.write_text(json.dumps({**report.as_dict(), "memory": memory}, indent=1) + "\n")
        drawn = [] if cli.output is None else _draw(report, cli.output)
    console.print(*printed(report, cli.layers_from, cli.columns_from), sep="\n")
    if peaks:
        console.print("", memory_table("Predicted peak memory of a rank, by phase", "rank", peaks), sep="\n")
    else:
        console.print(f"Memory in training is not predicted: {unknown}", soft_wrap=True)
    for file in (*([] if cli.json is None else [cli.json]), *drawn):
        console.print(f"Written: {file}", soft_wrap=True)


def _value_bytes(cut: Cut) -> int:
    """Returns the bytes of an edge's weight; 0 if edges have none."""
    weight = cut.attributes["edge"].get("edge_weight")
    return 0 if weight is None else weight.element_size()


def _draw(report: PlanReport, folder: Path) -> list[Path]:
    # Here, since all commands import this file, and matplotlib takes its time.
    from lightning_gnn.planning.pictures import draw_links, draw_stages, save_picture

    assert report.plan is not None and report.topology is not None
    row_bytes, name = report.work.row_bytes, report.plan.plan.name
    title = f"{name} over {report.topology.name}, rows of {row_bytes:,} bytes"
    links = draw_links(report.plan.links, report.topology, title)
    plans = {scheme: report.prediction(scheme) for scheme in ("p2p", "spst")}
    stages = draw_stages(
        {scheme: each.cost or each.reason for scheme, each in plans.items()}, report.topology, row_bytes
    )
    return [*save_picture(links, folder / "links"), *save_picture(stages, folder / "stages")]
