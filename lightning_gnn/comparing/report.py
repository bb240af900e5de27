"""A comparison as one HTML file that needs nothing beside it: the table, plots, and why cells have failed."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lightning_gnn.comparing.results import PARTS
from lightning_gnn.comparing.table import accuracy_name, number, parity_text
from lightning_gnn.data.store import write_atomically
from lightning_gnn.planning.pictures import GREY, INK, KINDS

Cells = Sequence[Mapping[str, Any]]

PART_COLOURS = dict(zip(PARTS, ("#2f6fb5", "#e07b39", "#c9ccd1")))
STYLES = ("-", "--", ":", "-.")
BAR = 0.36
"""Inches of a cell in a plot of bars."""

STYLE = """body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:1180px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}img{max-width:100%;display:block;margin:.5em 0}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px}
th,td{padding:.3em .6em;border-bottom:1px solid #dde;text-align:right;white-space:nowrap;vertical-align:bottom}
th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}
.ok{color:#1d7a45}.off{color:#b3261e}.approx{color:#8a5a00}p.note{color:#555;max-width:62em}
pre{background:#f5f6f8;padding:.8em;overflow-x:auto;font-size:12px}"""


def write_report(path: Path, found: Mapping[str, Any]) -> None:
    """Writes the report of what ``comparison.json`` holds to `path`."""
    write_atomically(path, report_html(found))


def report_html(found: Mapping[str, Any]) -> str:
    """Returns the report as HTML; pictures are SVG inside it."""
    cells: Cells = found["cells"]
    done = [cell for cell in cells if cell["status"] == "finished"]
    parts = [
        "<h1>Comparison of strategies</h1>",
        f"<p>{html.escape(_about(found, done))}</p>",
        f'<div class="wide">{_table(cells, found)}</div>',
    ]
    for title, note, draw in plots(found) if done else ():
        parts += [f"<h2>{title}</h2>", f'<p class="note">{note}</p>', _picture(draw(done), title)]
    for cell in cells:
        if cell["status"] != "finished":
            lines = html.escape("\n".join(cell["error"]))
            parts += [f"<h2>{html.escape(cell['name'])}: {html.escape(cell['status'])}</h2>", f"<pre>{lines}</pre>"]
    settings = {name: value for name, value in found.items() if name != "cells"}
    parts += ["<h2>Settings</h2>", f"<pre>{html.escape(json.dumps(settings, indent=1))}</pre>"]
    head = f'<meta charset="utf-8"><title>Comparison of strategies</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _about(found: Mapping[str, Any], done: Cells) -> str:
    graph = f"{done[0]['nodes']:,} nodes and {done[0]['edges']:,} edges, " if done else ""
    return (
        f"{graph}{found['epochs']} epochs from the same weights (seed {found['seed']}). Times, bytes and messages leave out "
        f"{found['warmup']} epochs of warm-up. Times are means of the middle half. {found['machine']['cores']} cores"
        f"{', ' + found['machine']['gpu'] if found['machine']['gpu'] else ''}; "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        + "."
    )


def _table(cells: Cells, found: Mapping[str, Any]) -> str:
    accuracy = accuracy_name(cells)
    heads = (
        *("cell", f"parity, of {found['loss']}", accuracy or "test", found["loss"], "weights off by", "s per epoch"),
        *("compute, s", "communication, s", "waiting, s", "rows, MB", "gradients, MB", "messages", "edges cut"),
        *("replication", "edges, max / mean", "peak MB per rank", "set-up, s"),
    )
    lines = [_html_row(map(html.escape, heads), "th")]
    for cell in cells:
        name = html.escape(cell["name"])
        if cell["status"] != "finished":
            lines.append(_html_row([name, f'<span class="off">{html.escape(cell["status"])}</span>'], "td"))
            continue
        cut = cell["partition"] or {}
        values = (
            *(cell["test"].get(accuracy), cell["final_loss"], cell["parity"]["weights"], cell["epoch_seconds"]),
            *(cell["seconds"][part] for part in PARTS),
            *(cell["row_bytes"] / 1e6, cell["gradient_bytes"] / 1e6, cell["messages"], cut.get("cut_fraction")),
            *(cut.get("replication"), cut.get("edge_balance"), max(_memory(cell)) / 1e6, cell["setup_seconds"]),
        )
        lines.append(_html_row([name, _parity(cell["parity"]), *(number(value, 4) for value in values)], "td"))
    return f"<table>{''.join(lines)}</table>"


def _html_row(values: Iterable[str], kind: str) -> str:
    return "<tr>" + "".join(f"<{kind}>{value}</{kind}>" for value in values) + "</tr>"


def _parity(found: Mapping[str, Any]) -> str:
    colour = {True: "ok", False: "off", None: "approx"}[found["ok"]]
    text, why = html.escape(parity_text(found)), html.escape(found["why"] or "")
    return f'<span class="{colour}" title="{why}">{text}</span>'


def _memory(cell: Mapping[str, Any]) -> Sequence[int]:
    return cell["memory_cuda_bytes"] or cell["memory_bytes"]


# Pictures #####################################################################


def plots(found: Mapping[str, Any]) -> list[tuple[str, str, Callable[[Cells], Figure]]]:
    """Returns title, note and function of each plot; the function takes the finished cells."""
    loss = found["loss"]
    return [
        (
            "Loss",
            "Against epochs, and against seconds of training, without validation; an epoch of warm-up counts as the mean of the "
            "others.",
            lambda cells: draw_loss(cells, loss, found["warmup"]),
        ),
        (
            "Time per epoch",
            "Means over ranks. Waiting is for other ranks and for batches, communication the rest of what exchanges of rows and "
            "sums of gradients took, compute all else. Communication that is hidden behind computation is not seen.",
            draw_time,
        ),
        ("Bytes per epoch", "Sent by all ranks: rows of nodes, and gradients handed to their sum.", draw_bytes),
        (
            "Memory per rank",
            "The most that a process held: on CUDA what torch allocated there, else all of it, of which libraries are grey.",
            draw_memory,
        ),
        (
            "Partition",
            "The heaviest part over the mean, 1 is even; and rows held by all parts over nodes, 1 if nothing is cut.",
            draw_partition,
        ),
    ]


def draw_loss(cells: Cells, loss: str, warmup: int) -> Figure:
    """Draws the curves of the logged value `loss` against epochs and against seconds, a warm-up epoch being as long as others."""
    figure = _figure(11, 4.2)
    by_epoch, by_time = figure.subplots(1, 2, sharey=True)
    for index, cell in enumerate(cells):
        curve = np.array(cell["curves"][loss], float)
        # Those of exact schemes lie on each other: the first is widest, so that all are seen.
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


def draw_time(cells: Cells) -> Figure:
    """Draws a stacked bar per cell."""
    of_parts = [(part, [cell["seconds"][part] for cell in cells], PART_COLOURS[part]) for part in PARTS]
    return _stacked(cells, of_parts, "s", "seconds per epoch")


def draw_bytes(cells: Cells) -> Figure:
    """Draws the megabytes of rows and gradients per cell."""
    rows, gradients = ([cell[name] / 1e6 for cell in cells] for name in ("row_bytes", "gradient_bytes"))
    return _stacked(cells, [("rows", rows, KINDS[0]), ("gradients", gradients, KINDS[2])], "MB", "MB per epoch")


def _stacked(cells: Cells, pieces: Iterable[tuple[str, Sequence[float], str]], unit: str, label: str) -> Figure:
    """Draws a bar per cell of pieces, each a label, a value for each cell, and a colour."""
    figure, axes = _bars(cells, label)
    left = np.zeros(len(cells))
    for name, values, colour in pieces:
        axes.barh(range(len(cells)), values, left=left, color=colour, label=name, height=0.7)
        left += values
    _number_bars(axes, left, [f"{number(value)} {unit}" for value in left])
    _legend(figure)
    return figure


def draw_memory(cells: Cells) -> Figure:
    """Draws a bar per rank."""
    figure, axes = _bars(cells, "peak MB of each rank")
    for place, cell in enumerate(cells):
        memory = np.array(_memory(cell)) / 1e6
        height = 0.8 / len(memory)
        places = place - 0.4 + height * (np.arange(len(memory)) + 0.5)
        axes.barh(places, memory, height=0.85 * height, color=KINDS[0])
        if not cell["memory_cuda_bytes"]:
            libraries = np.array(cell["memory_at_start_bytes"]) / 1e6
            axes.barh(places, libraries, height=0.85 * height, color=PART_COLOURS["waiting"])
    most = np.array([max(_memory(cell)) / 1e6 for cell in cells])
    _number_bars(axes, most, [f"{number(value)} MB" for value in most])
    return figure


def draw_partition(cells: Cells) -> Figure:
    """Draws balances and replication of each partition."""
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


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.08)
    return figure


def _bars(cells: Cells, label: str) -> tuple[Figure, Axes]:
    """Returns a picture with a line for each cell, from top to bottom."""
    figure = _figure(11, 1.3 + BAR * len(cells))
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


def _picture(figure: Figure, title: str) -> str:
    """Returns a figure as an image of a page; the same figure gives the same text."""
    file = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return f'<img alt="{title}" src="data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}">'
