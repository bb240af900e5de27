"""Report of ``lightning-gnn plan``: exchanges, link loads and tables; also tables of predicted memory for commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from lightning_gnn.checks.footprint import PHASES, Peak, least_bytes
from lightning_gnn.console import text_table
from lightning_gnn.data.shards import Cut
from lightning_gnn.extensions.plans.exchanges import ExchangeCost, Workload
from lightning_gnn.extensions.plans.plan import Plan
from lightning_gnn.extensions.plans.plan_cost import Balance, LinkLoad, PlanCost, balance, link_loads
from lightning_gnn.extensions.plans.tables import rank_plan
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.registry import costs_of
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.strategies.spmm.traffic import choose
from lightning_gnn.strategy.scheme import Scheme
from lightning_gnn.tools.advising.advice import candidates

UNEVEN = 2.0
"""Ratio of the busiest rank's edges to the mean from which a default is mentioned."""

STAGES = 6
"""Maximum number of columns for stages."""

BUSIEST = 20
"""Maximum number of links that are printed separately; the JSON has all."""


@dataclass(frozen=True)
class PlanReport:
    """Output of ``plan``.

    Attributes:
        work, topology: workload and topology; times need a topology.
        exchanges: exchanges of the strategy first, then of all other registered strategies.
        links: links of the followed plan, busiest first; empty without a plan, as are the attributes below.
        balance: balance between kinds of hops.
        table_bytes: bytes of the send and receive tables of each rank.
        training_bytes: lower bound of each rank's peak: data without weights, each layer's output and gradient, and a buffer of
            halo and relayed rows with its gradient.
    """

    work: Workload
    topology: Topology | None
    exchanges: tuple[ExchangeCost, ...]
    links: tuple[LinkLoad, ...] = ()
    balance: Balance | None = None
    table_bytes: tuple[int, ...] = ()
    training_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, scheme: Scheme, work: Workload, topology: Topology | None, cut: Cut) -> PlanReport:
        """Returns the report on a strategy's scheme."""
        costs = [replace(each, scheme=each.scheme or name) for each in costs_of(scheme, work, topology)]
        if not costs:
            reason = f"no prediction, since {type(scheme).__name__} registers no exchange_costs (docs/own-scheme.md)"
            costs = [ExchangeCost(name, followed=True, reason=reason)]
        report = cls(work, topology, (*costs, *_other_costs(costs, scheme, work, topology)))
        exchange = report.followed_exchange
        if exchange.plan is None or topology is None:
            if isinstance(scheme, DGCLScheme) and exchange.reason:
                raise ValueError(exchange.reason)
            return report
        ranks = [rank_plan(exchange.plan, rank) for rank in range(topology.num_devices)]
        peaks = (
            least_bytes(rows, halo_rows, edges, work.feature_bytes)
            + 2 * (work.num_layers * rows + halo_rows + rank.num_relayed) * work.row_bytes
            for (rows, halo_rows, edges), rank in zip(cut.sizes(), ranks)
        )
        assert exchange.cost is not None
        return replace(
            report,
            links=tuple(link_loads(exchange.plan, topology, work.row_bytes)),
            balance=balance(exchange.cost, work.row_bytes),
            table_bytes=tuple(rank.table_bytes for rank in ranks),
            training_bytes=tuple(peaks),
        )

    @property
    def followed_exchange(self) -> ExchangeCost:
        return next(each for each in self.exchanges if each.followed)

    @property
    def largest_share(self) -> float:
        """Largest ratio over ranks of table memory to training memory (DGCL Figure 11); an upper bound."""
        return max(tables / peak for tables, peak in zip(self.table_bytes, self.training_bytes))

    def as_dict(self) -> dict[str, Any]:
        """Returns a dict of plain numbers and lists, for JSON: seconds, bytes, rows; None for unknown values."""
        work, plan, cost = self.work, self.followed_exchange.plan, self.followed_exchange.cost
        found = {
            "topology": self.topology and self.topology.name,
            "parts": work.relation.num_devices,
            "nodes": int(work.relation.offsets[-1]),
            "edges": int(work.edge_index.shape[1]),
            "layers": work.num_layers,
            "columns": work.columns,
            "features": work.features,
            "row_bytes": work.row_bytes,
            "follows": self.followed_exchange.scheme,
            "exchanges": [each.as_dict() for each in self.exchanges],
            "replication_factors": list(work.replication_factors),
        }
        if plan is None or cost is None or self.balance is None:
            return found
        return found | {
            "plan": plan.name,
            "stages": plan.num_stages,
            "stage_seconds": cost.stage_seconds(work.row_bytes).tolist(),
            "links": [load.as_dict(work.row_bytes) for load in self.links],
            "balance": asdict(self.balance),
            "tables": {
                "table_bytes": list(self.table_bytes),
                "training_bytes": list(self.training_bytes),
                "largest_share": self.largest_share,
            },
        }


def _other_costs(costs: Sequence[ExchangeCost], scheme: Scheme, work: Workload, topology: Topology | None) -> list[ExchangeCost]:
    found, seen = {each.scheme: each for each in costs}, {type(scheme)}
    kind = scheme.layout(work.relation.num_devices).kind
    for candidate in candidates(work.relation.num_devices):
        other = candidate.strategy().scheme
        if type(other) in seen or not candidate.full_graph or other.layout(work.relation.num_devices).kind != kind:
            continue
        seen.add(type(other))
        for each in costs_of(other, work, topology):
            name = each.scheme or candidate.name
            found.setdefault(name, replace(each, scheme=name, followed=False))
    return list(found.values())[len(costs) :]


def report_lines(report: PlanReport, layers_from: str, columns_from: str) -> Iterator[Any]:
    """Yields tables and lines; `layers_from` and `columns_from` are the origins of the two numbers."""
    work, topology, exchange = report.work, report.topology, report.followed_exchange
    yield (
        f"{work.relation.offsets[-1]:,} nodes and {work.edge_index.shape[1]:,} edges in {work.relation.num_devices} parts"
        f"{'' if topology is None else f' on {topology.name}'}; {work.num_layers} layers ({layers_from}), rows of "
        f"{work.columns:,} columns ({columns_from}), {work.row_bytes:,} bytes"
    )
    if exchange.plan is not None and exchange.cost is not None:
        yield _link_table(exchange.plan, exchange.cost, report.links, work.row_bytes)
    if topology is None:
        yield "No times, since there is no topology: give --topology, such as uniform, to see them."
    yield _exchange_table(report)
    # A missing link affects many products.
    for reason in dict.fromkeys(each.reason for each in report.exchanges if each.reason):
        schemes = [each.scheme for each in report.exchanges if each.reason == reason]
        yield f"{', '.join(schemes)} {'does' if len(schemes) == 1 else 'do'} not apply: {reason}"
    yield from _notes(report)
    if report.balance is not None:
        yield _balance_table(exchange.scheme, report.balance)
    factors = (f"{factor:.2f} after {hop}" for hop, factor in enumerate(work.replication_factors, 1))
    yield f"Replication factor by hops (DGCL Figure 4): {', '.join(factors)}"
    if not report.table_bytes:
        return
    yield (
        f"Send and receive tables: {_bytes(sum(report.table_bytes))}, {_bytes(max(report.table_bytes))} on the rank with most; "
        f"at most {report.largest_share:.4f} of a rank's memory in training (DGCL Figure 11: below 0.002). Counted as memory "
        f"are features, halo, edges, {work.num_layers} outputs of {work.columns:,} columns and their gradients: "
        f"{_bytes(sum(report.training_bytes))}; weights and what a model keeps beside come on top."
    )


def _link_table(plan: Plan, cost: PlanCost, links: Sequence[LinkLoad], row_bytes: int) -> Table:
    count = plan.num_stages
    # The last stages have the fewest rows; if there are many stages, they are printed together.
    bounds = [*range(min(count, STAGES - (count > STAGES))), *[STAGES - 1] * (count > STAGES), count]
    names = [str(low) if low + 1 == high else f"{low} to {high - 1}" for low, high in pairwise(bounds)]
    if names:
        names[0] = f"stage {names[0]}"
    title = f"Plan {plan.name}: rows of {row_bytes:,} bytes by link and stage"
    table = text_table("link", "over", *names, "all", "bytes", "busiest hop", "busy", title=title, num_left=2)
    table.columns[-2].justify = "left"

    def sum_stages(by_stage: NDArray[Any]) -> list[Any]:
        return [by_stage[low:high].sum() for low, high in pairwise(bounds)]

    def line(name: str, loads: Sequence[LinkLoad], over: str, *end: str) -> None:
        by_stage = np.array([load.rows for load in loads], np.int64).reshape(-1, count).sum(0)
        rows = (f"{rows:,}" if rows else "-" for rows in (*sum_stages(by_stage), by_stage.sum()))
        table.add_row(name, over, *rows, _bytes(by_stage.sum() * row_bytes), *end)

    for load in links[:BUSIEST]:
        end = load.busiest_hop, _seconds(load.hop_seconds)
        line(f"{load.sender}→{load.receiver}", [load], "+".join(load.kinds), *end)
    rest = links[BUSIEST:]
    if rest:
        line(f"{len(rest)} others", rest, "", "", f"≤ {_seconds(rest[0].hop_seconds)}")
    table.add_section()
    line("all", links, "", "", "")
    by_stage = plan.traffic.sum((1, 2)) * row_bytes
    table.add_row("bytes", "", *map(_bytes, sum_stages(by_stage)), _bytes(by_stage.sum()), "", "", "")
    seconds = cost.stage_seconds(row_bytes)
    table.add_row("time", "", *map(_seconds, sum_stages(seconds)), _seconds(seconds.sum()), "", "", "")
    table.caption = f"{len(links)} links are used. busy: a link's busiest hop in all stages, with what other links send over it"
    return table


def _exchange_table(report: PlanReport) -> Table:
    headings = ("scheme", "rows", "paper's rows", "time", "edges", "most edges", "replication", "held")
    table = text_table(*headings, title="One exchange of rows by scheme, forward or backward")
    fewest = report.work.edge_index.shape[1]
    for each in report.exchanges:
        name, edges = each.scheme + " *" * each.followed, round(each.edges.sum())
        if each.reason and not each.rows:
            table.add_row(name, *["-"] * 7)
            continue
        more = edges - fewest
        table.add_row(
            name,
            f"{each.rows:,}",
            _or_dash(each.paper_rows, "{:,}".format),
            _or_dash(each.seconds, _seconds),
            f"+ {more:,} ({more / max(1, fewest):.0%})" if more else f"{edges:,}",
            f"{each.edge_balance:.2f}",
            _or_dash(each.replication, "{:.2f}".format),
            _or_dash(each.choice and each.choice.bytes_held, _bytes),
        )
    table.caption = (
        "* followed by fit. edges: that all ranks sum over; most edges: of a rank, over the mean. replication: rows held by all "
        "ranks over the nodes. Of products, paper's rows: n (P/c - 1) of broadcasts and 2 n (c - 1) of all-reduces; held: by the "
        f"rank that holds most, beside its operands, for rows of {report.work.features:,} columns, the features'."
    )
    return table


def _or_dash(value: Any, text: Callable[[Any], str]) -> str:
    return "-" if value is None else text(value)


def _notes(report: PlanReport) -> Iterator[str]:
    products = [each for each in report.exchanges if each.choice is not None]
    forms = [[each for each in products if each.scheme.endswith(" blocks") == blocks] for blocks in (False, True)]
    if all(forms):
        costs = [[each.choice for each in form if each.choice is not None] for form in forms]
        sparse, blocks = (choose(each, None) for each in costs)
        counts = ", ".join(f"{cost.rows:,} (c={cost.grid.replication})" for cost in costs[0])
        yield (
            f"spmm_15d default: replication_factor={sparse.grid.replication} if sparsity-aware, {blocks.grid.replication} with "
            "whole blocks: the fewest rows of those that fit into memory (not looked at here) and let all ranks multiply, "
            f"c <= sqrt(P). fit knows sparsity-aware rows by an upper bound: {counts}."
        )
        for each in products:
            if each.choice in (sparse, blocks) and each.edge_balance > UNEVEN:
                yield (
                    f"{each.scheme} leaves the busiest rank {each.edge_balance:.3g} times its share of the edges: set "
                    "replication to another where that matters."
                )
    for each in report.exchanges:
        if each.matrix_bytes:
            yield f"{each.scheme}: {_bytes(each.matrix_bytes)} of the matrix travel too in each product, and are in its time."
    yield "What epochs would take: lightning-gnn advise."


def _balance_table(plan: str, balance: Balance) -> Table:
    heads = ("kind of hop", "time of an exchange if other kinds took none")
    table = text_table(*heads, title=f"Plan {plan}: balance between kinds")
    for kind, seconds in balance.kinds.items():
        table.add_row(kind, _seconds(seconds))
    if balance.others_seconds is not None:
        table.add_row("all but nvlink", _seconds(balance.others_seconds))
    spread = "a kind is idle" if balance.spread is None else f"{balance.spread:.1%}"
    table.caption = f"slowest over fastest kind: {spread}"
    if balance.paper_spread is not None:
        table.caption += f"; nvlink and all others: {balance.paper_spread:.1%} (DGCL Table 7: within 12.6%)"
    return table


def _seconds(value: float) -> str:
    if not value:
        return "0"
    factor, unit = next(((f, u) for f, u in ((1, "s"), (1e3, "ms"), (1e6, "µs")) if value * f >= 1), (1e9, "ns"))
    return f"{value * factor:,.3g} {unit}" if value * factor < 1000 else f"{value * factor:,.0f} {unit}"


def _bytes(count: float) -> str:
    factor, unit = next(((f, u) for f, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= f), (1, "B"))
    return f"{count / factor:,.3g} {unit}" if count < 1000 * factor else f"{count / factor:,.0f} {unit}"


def memory_table(title: str, first: str, rows: Sequence[tuple[str, Peak, Peak]]) -> Table:
    """Returns a table with a row per name: the peak of each phase in MB, and the maximum with ``checkpoint_convs=True``."""
    table = text_table(first, *PHASES, "with recompute", title=title)
    for name, peak, recomputed in rows:
        table.add_row(name, *(_megabytes(getattr(peak, phase)) for phase in PHASES), _megabytes(recomputed.max_bytes))
    table.caption = "Of tensors, in MB; python and libraries come on top (docs/memory.md)."
    return table


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.3g}" if count < 1e9 else f"{count / 1e6:,.0f}"
