"""``lightning-gnn plan``: predicts link loads of a plan and the time of one exchange; ``plan_report.py`` prints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from lightning_gnn.checks.footprint import Peak, Sizes
from lightning_gnn.data.shards import Cut
from lightning_gnn.extensions.plans.exchanges import Workload
from lightning_gnn.extensions.plans.presets import PRESETS, find_topology
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.topology import MAX_DEVICES, Topology
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.strategy.memory import memory_advice
from lightning_gnn.strategy.memory_checks import feature_bytes, working_bytes
from lightning_gnn.tools.advising.advice import quiet_trainer
from lightning_gnn.tools.commands.graph_cli import JSON, GraphCLI, Option, in_a_line
from lightning_gnn.tools.commands.plan_report import PlanReport, memory_table, report_lines
from lightning_gnn.tools.parser import check_folder

PAPER_LAYERS = 2
"""Number of layers in DGCL section 7."""


class PlanCLI(GraphCLI):
    """Options of ``plan``, checked before anything is loaded."""

    name = "plan"
    usage = """lightning-gnn plan --config FILE [--topology NAME|FILE] [--parts N] [--columns N] [--layers K]
                          [--output FOLDER] [--json FILE] [--KEY VALUE ...]"""
    description = (
        "Say what a plan puts on each link, and what an exchange of rows takes under it and under other schemes, without "
        "starting ranks. Files and keys are those of fit; used are data, trainer.strategy, trainer.devices, trainer.num_nodes, "
        "and for memory model. lightning-gnn advise predicts epochs."
    )
    options: ClassVar = {
        "topology": Option(
            str,
            f"{', '.join(PRESETS)}, or a JSON file (docs/planning.md). (default: the strategy's; strategies that follow no plan: "
            "none, and no times)",
        ),
        "columns": Option(int, "Width of the rows that layers exchange. (default: the model's hidden_channels, or features)"),
        "layers": Option(int, f"Propagations of the model. (default: the model's num_layers, or {PAPER_LAYERS})"),
        "output": Option(str, "Folder for pictures, PNG and SVG. (default: none are drawn)"),
        "json": JSON,
    }
    width = 160
    wants_module = True

    @override
    def prepare(self, parts: int) -> None:
        config, scheme = self.config, self.scheme
        if parts < 2:
            raise ValueError(f"plans need at least 2 parts, got {parts}. Pass --parts.")
        if parts > MAX_DEVICES:
            raise ValueError(f"plans support at most {MAX_DEVICES} parts, got {parts}. Pass --parts.")
        for name in ("layers", "columns"):
            if config[name] is not None and config[name] < 1:
                raise ValueError(f"--{name} must be above 0, got {config[name]}.")
        self.topology = self._topology(parts)
        if isinstance(scheme, DGCLScheme) and self.topology is not None:
            self.scheme = scheme.over(self.topology)
        layers, columns = (_model_option(config.model, name) for name in ("num_layers", "hidden_channels"))
        self.layers = config.layers or layers or PAPER_LAYERS
        self.layers_from = "--layers" if config.layers else "the model's" if layers else "DGCL's"
        self.columns = config.columns or columns or 0
        self.columns_from = "--columns" if config.columns else "the model's" if columns else "the features'"
        self.output = None if config.output is None else Path(config.output)
        if self.output is not None:
            if not isinstance(scheme, DGCLScheme):
                raise ValueError(f"--output draws a plan, and {self.strategy.strategy_name} has none. Remove it.")
            check_folder("--output", self.output)

    def _topology(self, parts: int) -> Topology | None:
        """Returns the topology of `parts` devices; None for a scheme without plans if none is given."""
        source = self.config.topology
        if isinstance(self.scheme, DGCLScheme):
            source = source or self.scheme.topology
            if source in (None, "auto", "measured"):
                raise ValueError(
                    f"a topology is needed. Pass --topology, one of {', '.join(PRESETS)} or a JSON file (docs/planning.md), or "
                    "set one in the strategy: DGCLStrategy(topology=...)."
                )
        return None if source is None else find_topology(source, parts)

    def peaks(self, cut: Cut) -> tuple[list[tuple[str, Peak, Peak]], str]:
        """Returns each rank's peak memory, without and with ``checkpoint_convs=True``; or an empty list and the reason."""
        if self.module is None:
            return [], "pass --model, or a file that names one, as for fit."
        try:
            advice = memory_advice(self.scheme)
            steps = advice.steps(self.module, cut.shard(0).batch, quiet_trainer(), None, self.strategy.cache_input_aggregation)
        except RuntimeError as error:
            return [], str(error)
        working = working_bytes(self.scheme, cut, feature_bytes(cut))
        footprints = [steps.footprint(each, working) for each in Sizes.from_cut(cut, self.module, self.layout.replicas)]
        return [(str(rank), each.peak(), each.peak(recompute=True)) for rank, each in enumerate(footprints)], ""


def _model_option(config: Any, name: str) -> int | None:
    """Returns the first positive integer with this name in the model's configuration, outermost first; None if there is none."""
    values = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    value = values.get(name)
    if isinstance(value, int) and value > 0:
        return value
    return next((found for each in values.values() if (found := _model_option(each, name)) is not None), None)


def plan(arguments: Sequence[str]) -> None:
    cli = PlanCLI(arguments)
    data, console = cli.datamodule, cli.console
    with in_a_line():
        data.prepare_for(cli.layout)
        cut = data.stored_cut()
        if cut.types.is_hetero:
            raise ValueError("plan does not support HeteroData. Use lightning-gnn partition, which prints halo nodes and bytes.")
        x, weight = cut.attributes["node"]["x"], cut.attributes["edge"].get("edge_weight")
        work = Workload(
            Relation.from_halos(cut.halos, cut.offsets),
            cut.edge_index(),
            cli.layers,
            cli.columns or x.size(1),
            x.size(1),
            x.element_size(),
            0 if weight is None else weight.element_size(),
            None if cut.holders is None else cut.holders.numpy().astype(np.int64),
        )
        report = PlanReport.of(cli.strategy.strategy_name, cli.scheme, work, cli.topology, cut)
        peaks, unknown = cli.peaks(cut)
        drawn = [] if cli.output is None else _draw(report, cli.output)
    console.print(*report_lines(report, cli.layers_from, cli.columns_from), sep="\n")
    if peaks:
        console.print("", memory_table("Predicted peak memory of a rank, by phase", "rank", peaks), sep="\n")
    else:
        console.print(f"Skipped the memory prediction for training: {unknown}", soft_wrap=True)
    memory = [{**asdict(peak), "checkpoint_convs": asdict(again)} for _, peak, again in peaks]
    cli.write_json({**report.as_dict(), "memory": memory})
    for file in drawn:
        console.print(f"Written: {file}", soft_wrap=True)


def _draw(report: PlanReport, folder: Path) -> list[Path]:
    # Imported late: all commands import this file, and matplotlib takes long to import.
    from lightning_gnn.callbacks.pictures import save_picture
    from lightning_gnn.extensions.plans.pictures import draw_links, draw_stages

    assert report.topology is not None
    row_bytes, exchange = report.work.row_bytes, report.followed_exchange
    title = f"{exchange.scheme} over {report.topology.name}, rows of {row_bytes:,} bytes"
    links = draw_links(report.links, report.topology, title)
    costs = {each.scheme: each.cost or each.reason for each in report.exchanges if each.scheme in ("p2p", "spst")}
    stages = draw_stages(costs, report.topology, row_bytes)
    return [*save_picture(links, folder / "links"), *save_picture(stages, folder / "stages")]
