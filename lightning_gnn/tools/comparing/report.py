"""Report of a comparison as one self-contained HTML file: the table, plots, and errors of failed runs."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, PackageLoader
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_gnn.callbacks.pictures import GREY, INK, KINDS, new_figure
from lightning_gnn.tools.comparing.results import PARTS, columns, number

Cells = Sequence[Mapping[str, Any]]

PART_COLORS = dict(zip(PARTS, ("#2f6fb5", "#e07b39", "#c9ccd1")))
STYLES = ("-", "--", ":", "-.")
BAR = 0.36
"""Inches per run in a bar plot."""


def report_html(comparison: Mapping[str, Any]) -> str:
    """Returns the report as HTML with embedded SVG pictures."""
    finished = [cell for cell in comparison["runs"] if cell["status"] == "finished"]
    template = Environment(loader=PackageLoader("lightning_gnn.tools.comparing", ""), autoescape=True)
    return template.get_template("report.html.jinja").render(
        comparison=comparison,
        finished=finished,
        columns=columns(comparison["runs"], comparison["loss"]),
        plots=[(title, note, _svg(figure, title)) for title, note, figure in plots(finished, comparison)] if finished else [],
        settings=json.dumps({name: value for name, value in comparison.items() if name != "runs"}, indent=1),
    )


def _svg(figure: Figure, title: str) -> str:
    """Returns a figure as a base64-encoded SVG image; deterministic."""
    file = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return base64.b64encode(file.getvalue()).decode()


def plots(cells: Cells, comparison: Mapping[str, Any]) -> Iterator[tuple[str, str, Figure]]:
    """Yields title, note and figure of each plot of the finished runs."""
    yield (
        "Loss",
        "Against epochs, and against seconds of training, without validation; an epoch of warm-up counts as the mean of the "
        "others.",
        draw_loss(cells, comparison["loss"], comparison["warmup"]),
    )
    yield (
        "Time per epoch",
        "Means over ranks. Waiting is for other ranks and for batches, communication the rest of what exchanges of rows and "
        "sums of gradients took, compute all else. Communication that is hidden behind computation is not seen.",
        _draw_stacked(cells, ((part, [cell["seconds"][part] for cell in cells], PART_COLORS[part]) for part in PARTS), "s"),
    )
    rows, gradients = ([cell[name] / 1e6 for cell in cells] for name in ("row_bytes", "gradient_bytes"))
    yield (
        "Bytes per epoch",
        "Sent by all ranks: rows of nodes, and gradients handed to their sum.",
        _draw_stacked(cells, (("rows", rows, KINDS[0]), ("gradients", gradients, KINDS[2])), "MB"),
    )
    yield (
        "Memory per rank",
        "The most that a process held: on CUDA what torch allocated there, else all of it, of which libraries are grey.",
        draw_memory(cells),
    )
    yield (
        "Partition",
        "The heaviest part over the mean, 1 is even; and rows held by all parts over nodes, 1 if nothing is cut.",
        draw_partition(cells),
    )


def draw_loss(cells: Cells, loss: str, warmup: int) -> Figure:
    """Draw the logged value `loss` against epochs and against seconds; a warm-up epoch counts as a mean epoch."""
    figure = new_figure(11, 4.2)
    by_epoch, by_time = figure.subplots(1, 2, sharey=True)
    for index, cell in enumerate(cells):
        curve = np.array(cell["curves"][loss], float)
        # Curves of exact schemes coincide: the first is the widest, so that all are visible.
        width = 1.4 + 3.0 * (1 - index / max(1, len(cells) - 1))
        style = {"color": KINDS[index % len(KINDS)], "ls": STYLES[index // len(KINDS) % len(STYLES)], "lw": width}
        by_epoch.plot(np.arange(1, len(curve) + 1), curve, label=cell["name"], **style)
        seconds = np.array(cell["epoch_seconds_by_epoch"])
        seconds[:warmup] = cell["epoch_seconds"]
        by_time.plot(np.cumsum(seconds), curve, **style)
    curves = [value for cell in cells for value in cell["curves"][loss] if np.isfinite(value)]
    if min(curves, default=0) > 0 and max(curves) > 20 * min(curves):
        by_epoch.set_yscale("log")
    by_epoch.set(xlabel="epochs", ylabel=loss)
    by_time.set(xlabel="seconds of training")
    figure.legend(loc="outside lower center", ncols=min(3, len(cells)), frameon=False, fontsize=9)
    return figure


def _draw_stacked(cells: Cells, pieces: Iterable[tuple[str, Sequence[float], str]], unit: str) -> Figure:
    """Draw a stacked bar per run; each piece has a label, a value for each run, and a color."""
    figure, axes = _bars(cells, f"{unit} per epoch")
    left = np.zeros(len(cells))
    for name, values, color in pieces:
        axes.barh(range(len(cells)), values, left=left, color=color, label=name, height=0.7)
        left += values
    _number_bars(axes, left, [f"{number(value)} {unit}" for value in left])
    _legend(figure)
    return figure


def _memory(cell: Mapping[str, Any]) -> Sequence[int]:
    return cell["memory_cuda_bytes"] or cell["memory_bytes"]


def draw_memory(cells: Cells) -> Figure:
    figure, axes = _bars(cells, "peak MB of each rank")
    for place, cell in enumerate(cells):
        memory = np.array(_memory(cell)) / 1e6
        height = 0.8 / len(memory)
        places = place - 0.4 + height * (np.arange(len(memory)) + 0.5)
        axes.barh(places, memory, height=0.85 * height, color=KINDS[0])
        if not cell["memory_cuda_bytes"]:
            libraries = np.array(cell["memory_at_start_bytes"]) / 1e6
            axes.barh(places, libraries, height=0.85 * height, color=PART_COLORS["waiting"])
    most = np.array([max(_memory(cell)) / 1e6 for cell in cells])
    _number_bars(axes, most, [f"{number(value)} MB" for value in most])
    return figure


def draw_partition(cells: Cells) -> Figure:
    figure, axes = _bars(cells, "1 is even, or nothing cut")
    names = (("node_balance", "nodes, max / mean", "o"), ("edge_balance", "edges, max / mean", "s"))
    for index, (name, label, marker) in enumerate((*names, ("replication", "replication", "D"))):
        values = ((cell["partition"] or {}).get(name) for cell in cells)
        found = [(value, place) for place, value in enumerate(values) if value is not None]
        if found:
            balances, places = zip(*found)
            axes.scatter(balances, places, color=KINDS[index], marker=marker, s=34, label=label, zorder=3)
    for place, cell in enumerate(cells):
        if not cell["partition"]:
            axes.text(1, place, " not cut", va="center", fontsize=9, color=GREY)
    axes.axvline(1, color=GREY, lw=0.8)
    axes.set_xlim(left=min(0.98, axes.get_xlim()[0]))
    axes.grid(axis="x", color="#e5e7eb")
    _legend(figure)
    return figure


def _bars(cells: Cells, label: str) -> tuple[Figure, Axes]:
    figure = new_figure(11, 1.3 + BAR * len(cells))
    axes = figure.subplots()
    axes.set_yticks(range(len(cells)), [cell["name"] for cell in cells])
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _number_bars(axes: Axes, ends: np.ndarray, texts: Sequence[str]) -> None:
    axes.set_xlim(0, 1.12 * max(float(ends.max(initial=0)), 1e-9))
    for place, (end, text) in enumerate(zip(ends, texts)):
        axes.text(end, place, f" {text}", va="center", fontsize=9, color=INK)


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside upper right", ncols=3, frameon=False, fontsize=9)
