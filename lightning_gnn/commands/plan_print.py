"""How ``lightning-gnn plan`` prints a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from lightning_gnn.commands.plan_report import PlanDetails, PlanReport
from lightning_gnn.partition.cost import SECONDS_PER_EDGE_COLUMN
from lightning_gnn.planning.predict import LinkLoad
from lightning_gnn.planning.predict_grid import Product

UNEVEN = 2.0
"""Edges of the busiest rank over the mean from which a default is worth a word."""

STAGES = 6
"""So many columns are for stages."""

BUSIEST = 20
"""So many links are printed one by one; the JSON has all."""


def printed(report: PlanReport, layers_from: str, columns_from: str) -> Iterator[Any]:
    """Returns tables and lines.

    Args:
        report: what to print.
        layers_from, columns_from: who said how many there are.
    """
    work, topology, details = report.work, report.topology, report.plan
    yield (
        f"{work.relation.offsets[-1]:,} nodes and {work.edge_index.shape[1]:,} edges in {work.relation.num_devices} parts"
        f"{'' if topology is None else f' on {topology.name}'}; {work.num_layers} layers ({layers_from}), rows of "
        f"{work.columns:,} columns ({columns_from}), {work.row_bytes:,} bytes"
    )
    if details is not None:
        yield _link_table(details, work.row_bytes)
    if topology is None:
        yield "No times, since there is no topology: give --topology, such as uniform, to see them and other schemes."
    else:
        yield _prediction_table(report)
        reasons: dict[str, list[str]] = {}  # a link that is missing rules out many products
        for each in report.predictions:
            if not each.applies:
                reasons.setdefault(each.reason, []).append(each.scheme)
        for reason, schemes in reasons.items():
            yield f"{', '.join(schemes)} {'does' if len(schemes) == 1 else 'do'} not apply: {reason}"
        yield from _counted(report)
    yield ""
    yield _product_table(report)
    yield from _chosen(report)
    yield ""
    if details is not None:
        yield _balance_table(details)
    factors = (f"{factor:.2f} after {hop}" for hop, factor in enumerate(work.replication_factors, 1))
    yield f"Replication factor by hops (DGCL Figure 4): {', '.join(factors)}"
    if details is None:
        return
    tables = details.tables
    yield (
        f"Send and receive tables: {_bytes(sum(tables.table_bytes))}, {_bytes(max(tables.table_bytes))} on the rank with most; "
        f"at most {tables.largest_share:.4f} of a rank's memory in training (DGCL Figure 11: below 0.002). Counted as memory "
        f"are features, halo, edges, {work.num_layers} outputs of {work.columns:,} columns and their gradients: "
        f"{_bytes(sum(tables.training_bytes))}; weights and what a model keeps beside come on top."
    )


def _link_table(details: PlanDetails, row_bytes: int) -> Table:
    count = details.plan.num_stages
    # The last stages carry least: of many, they are printed together.
    bounds = [*range(min(count, STAGES - (count > STAGES))), *[STAGES - 1] * (count > STAGES), count]
    names = [str(low) if low + 1 == high else f"{low} to {high - 1}" for low, high in pairwise(bounds)]
    if names:
        names[0] = f"stage {names[0]}"
    title = f"Plan {details.plan.name}: rows of {row_bytes:,} bytes by link and stage"
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

    for load in details.links[:BUSIEST]:
        end = load.busiest_hop, _seconds(load.hop_seconds)
        line(f"{load.sender}→{load.receiver}", [load], "+".join(load.kinds), *end)
    rest = details.links[BUSIEST:]
    if rest:
        line(f"{len(rest)} others", rest, "", "", f"≤ {_seconds(rest[0].hop_seconds)}")
    table.add_section()
    line("all", details.links, "", "", "")
    by_stage = details.plan.traffic.sum((1, 2)) * row_bytes
    table.add_row("bytes", "", *map(_bytes, together(by_stage)), _bytes(by_stage.sum()), "", "", "")
    seconds = details.cost.stage_seconds(row_bytes)
    table.add_row("time", "", *map(_seconds, together(seconds)), _seconds(seconds.sum()), "", "", "")
    table.caption = (
        f"{len(details.links)} links are used. "
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
            each.scheme + " *" * (each.scheme == report.follows),
            f"{each.rows:,}",
            _seconds(each.exchange_seconds),
            _seconds(each.compute_seconds),
            _seconds(each.epoch_exchange_seconds),
            _seconds(each.epoch_compute_seconds),
            _seconds(each.epoch_seconds),
            f"+ {_seconds(each.first_exchange_seconds)}",
            f"{each.replication:.2f}" if each.replication else "-",
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
        yield f"Replication is faster than {report.follows} where sums take less than {limit * 1e9:.2g} ns per edge and column."


def _product_table(report: PlanReport) -> Table:
    products, timed = report.products, report.topology is not None
    forms = ("sparsity-aware", "whole blocks")
    headings = ["product", *(f"rows, {form}" for form in forms), "paper's rows", "most edges"]
    headings += [f"time, {form}" for form in forms] if timed else []
    headings += [f"held, {form}" for form in forms]
    table = Table(*headings, title="Products on a process grid: one product, forward or backward", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"

    def line(name: str, *pair: Product | None) -> None:
        paper = next((each.paper_rows for each in pair if each is not None), None)
        table.add_row(
            name + " *" * (report.follows in [each.scheme for each in pair if each is not None]),
            *(_or_dash(each and each.rows, "{:,}".format) for each in pair),
            _or_dash(paper, "{:,}".format),
            next(f"{each.edge_balance:.2f}" for each in pair if each is not None),
            *(_or_dash(each and each.seconds, _seconds) for each in pair if timed),
            *(_or_dash(each and each.cost and each.cost.bytes_held, _bytes) for each in pair),
        )

    for sparse, blocks in zip(products.sparse, products.blocks):
        line(sparse.scheme, sparse, blocks)
    for each in products.cubes:
        line(each.scheme, None, each)
    table.caption = (
        "paper's rows: n (P/c - 1) of broadcasts and 2 n (c - 1) of all-reduces. most edges: of a rank, over the mean. held: by "
        f"the rank that holds most, beside its operands, for rows of {report.work.features:,} columns, the features'."
    )
    if report.plan is None:
        table.caption = f"* followed by fit, as {report.follows}. {table.caption}"
    return table


def _or_dash(value: Any, text: Callable[[Any], str]) -> str:
    return "-" if value is None else text(value)


def _chosen(report: PlanReport) -> Iterator[str]:
    products = report.products
    sparse, blocks = products.chosen
    costs = [each.cost for each in products.sparse if each.cost is not None]
    counts = ", ".join(f"{cost.rows:,} (c={cost.grid.replication})" for cost in costs)
    yield (
        f"spmm_15d by default: replication={sparse} if sparsity-aware, {blocks} with whole blocks: the fewest rows of those "
        "that fit into memory (not looked at here) and let all ranks multiply, c <= sqrt(P). fit knows "
        f"sparsity-aware rows by an upper bound: {counts}."
    )
    for product in (
        products.sparse[products.replications.index(sparse)],
        products.blocks[products.replications.index(blocks)],
    ):
        if product.edge_balance > UNEVEN:
            yield (
                f"{product.scheme} leaves the busiest rank {product.edge_balance:.3g} times its share of the edges: set "
                "replication to another where that matters."
            )
    for each in products.cubes:
        yield f"{each.scheme}: {_bytes(each.matrix_bytes)} of the matrix travel too in each product, and are in its time."


def _balance_table(details: PlanDetails) -> Table:
    found = details.balance
    table = Table("kind of hop", "time of an exchange if other kinds took none", title_justify="left")
    table.title = f"Plan {details.plan.name}: balance between kinds"
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
