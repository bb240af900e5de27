"""``lightning-gnn check``: compares a model's steps under every scheme with a single device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from lightning_gnn.tools.commands.graph_cli import JSON, GraphCLI, Option, in_a_line
from lightning_gnn.tools.parity import check_parity, explain_steps, explanation_table, make_strategies


class CheckCLI(GraphCLI):
    """Options of ``check``, checked before anything is loaded."""

    name = "check"
    usage = (
        "lightning-gnn check --config FILE [--parts N] [--nodes N] [--schemes NAMES] [--explain] [--json FILE] [--KEY VALUE ...]"
    )
    description = (
        "Run each step of the model once under every scheme and once on one device, compare outputs, loss, gradients and "
        "metrics, and say where they differ and why. Nothing is trained. Files and keys are those of fit; used are model, data, "
        "trainer.strategy, trainer.devices and trainer.num_nodes. The exit status is 0 if all is the same."
    )
    options: ClassVar = {
        "nodes": Option(int, "Of a subgraph. (default: the whole graph, if it is not too large)"),
        "seed": Option(int, "Of the subgraph and of random numbers. (default: 0)", 0),
        "schemes": Option(list[str], "Only these, such as [dgcl,spmm_15d]. (default: all)"),
        "explain": Option(bool, "Compare nothing: list what ranks send under trainer.strategy. (default: false)", False),
        "json": JSON,
    }
    width = 130
    wants_module = True

    @override
    def prepare(self, parts: int) -> None:
        hosts = self.config.trainer.num_nodes
        self.ranks, self.hosts = parts, hosts if parts % hosts == 0 else 1
        configured = self.strategy
        made = make_strategies(self.config.schemes)
        self.strategies = [configured if each.strategy_name == configured.strategy_name else each for each in made]


def check(arguments: Sequence[str]) -> None:
    cli = CheckCLI(arguments)
    if cli.config.explain:
        return explain(cli)
    with in_a_line():
        report = check_parity(cli.module, cli.datamodule, cli.strategies, *_size(cli))
    cli.console.print(report.table())
    for line in report.lines():
        cli.console.print(line, soft_wrap=True)
    cli.write_json(report.as_dict())
    sys.exit(not report.ok)


def _size(cli: CheckCLI) -> tuple[int, int, int | None, int]:
    """Returns ranks per machine, machines, nodes of the subgraph, and the seed."""
    return cli.ranks // cli.hosts, cli.hosts, cli.config.nodes, cli.config.seed


def explain(cli: CheckCLI) -> None:
    """Print the rows and bytes that ranks send each other in each step under the configured strategy."""
    with in_a_line():
        found = explain_steps(cli.module, cli.datamodule, cli.strategy, *_size(cli))
    cli.console.print(explanation_table(found, f"{cli.strategy.strategy_name}: what {cli.ranks} ranks send each other"))
    cli.write_json([each.as_dict() for each in found])
