"""``lightning-gnn advise``: predicts an epoch under every scheme without training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

from rich.table import Table
from typing_extensions import override

from lightning_gnn.console import text_table
from lightning_gnn.extensions.plans.presets import PRESETS
from lightning_gnn.extensions.plans.topology import MAX_DEVICES
from lightning_gnn.tools.advising.advice import Advice, advise_on, choose_candidates, extrapolate, smaller
from lightning_gnn.tools.advising.machine import Machine
from lightning_gnn.tools.commands.graph_cli import JSON, GraphCLI, Option, in_a_line
from lightning_gnn.tools.commands.plan_report import memory_table


class AdviseCLI(GraphCLI):
    """Options of ``advise``, checked before anything is loaded."""

    name = "advise"
    usage = """lightning-gnn advise --config FILE [--parts N] [--topology NAME|FILE] [--cores N] [--speed X] [--json FILE]
                            [--KEY VALUE ...]"""
    description = (
        "Say what an epoch would take under every scheme, and why, without starting ranks: a few steps of the model are "
        "rehearsed in this process. Files and keys are those of fit; used are model, data, trainer.devices and trainer.num_nodes."
    )
    options: ClassVar = {
        "topology": Option(
            str,
            f"{', '.join(PRESETS)}, or a JSON file (docs/planning.md). (default: CPU ranks of this machine, or of "
            "trainer.num_nodes like it)",
        ),
        "cores": Option(int, "That the ranks of a host share. (default: this machine's; with --topology, one each)"),
        "speed": Option(float, "How many times faster a device computes than a core here. (default: 1)", 1.0),
        "schemes": Option(list[str], "Only these, such as [dgcl,spmm_15d]. (default: all that so many ranks can run)"),
        "json": JSON,
    }
    width = 150
    wants_module = needs_module = True

    @override
    def prepare(self, parts: int) -> None:
        config = self.config
        hosts, self.ranks = config.trainer.num_nodes, parts
        if config.topology is None and parts > MAX_DEVICES:
            self.machines = smaller(parts, hosts, config.cores, config.speed)
        else:
            self.machines = [Machine.of(parts, hosts, config.topology, config.cores, config.speed)]
        self.candidates = choose_candidates(config.schemes, parts, self.machines[0].topology.uniform, self.datamodule.sample_data)

    def predictions(self) -> list[Advice]:
        if self.machines[-1].ranks < self.ranks:
            return extrapolate(self.ranks, self.machines, self.module, self.datamodule, self.config.schemes)
        return advise_on(self.machines[0], self.module, self.datamodule, only=self.candidates)


def advise(arguments: Sequence[str]) -> None:
    cli = AdviseCLI(arguments)
    console = cli.console
    with in_a_line():
        advice = cli.predictions()
    console.print(table(advice, cli.ranks, cli.machines))
    largest = partial(max, key=attrgetter("max_bytes"))
    peaks = [(str(each.candidate), largest(each.peaks), largest(each.peaks_recomputed)) for each in advice if each.peaks]
    if peaks:
        console.print(memory_table("Predicted peak memory of the rank that holds most, by phase", "scheme", peaks))
    for each in advice:
        why = f"{each.why}." if each.applies else f"does not apply. {each.reason}"
        console.print(f"{each.candidate}: {why}", soft_wrap=True)
    cli.write_json([each.as_dict() for each in advice])


def table(advice: Sequence[Advice], ranks: int, machines: Sequence[Machine]) -> Table:
    machine = machines[-1]
    cores = "one core each" if machine.cores is None else f"{machine.cores} cores a host"
    on = f"{ranks} ranks, {machine.topology.name}"
    if machine.ranks < ranks:
        on = f"{ranks} ranks, extrapolated from {', '.join(str(each.ranks) for each in machines)}"
    title = f"An epoch on {on}, {cores}; predicted"
    heads = ("exact", "s/epoch", "computing", "messages take", "steps", "MB/epoch", "messages", "peak MB/rank")
    rows = text_table("scheme", *heads, title=title)
    for each in advice:
        rows.add_row(str(each.candidate), "yes" if each.candidate.exact else "no", *_cells(each))
    return rows


def _cells(advice: Advice) -> Sequence[Any]:
    if not advice.applies:
        return ["-", *[""] * 6]
    whole = advice.candidate.full_graph
    return (
        f"{advice.seconds:.4g}",
        f"{advice.compute_seconds:.4g}",
        f"{advice.exchange_seconds:.2g}",
        str(advice.steps),
        f"{(advice.bytes_sent or 0) / 1e6:,.3g}" if whole else "-",
        f"{advice.messages:,}" if whole else "-",
        f"{advice.peak_bytes / 1e6:,.3g}" if whole else "-",
    )
