"""Pictures of partitions and of traffic between ranks, drawn without a display.

Functions return a figure; :func:`save_picture` writes it as PNG and SVG, with text as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lightning_gnn.comm.traffic import ByLayer

INK, GREY, PALE = "#222222", "#8a8f98", "#eef1f5"
KINDS = ("#2f6fb5", "#e07b39", "#3a9d6e", "#b0468c", "#8c6d31", "#5b5bd6", "#c9a227", "#7f7f7f")

NUMBERED = 8
"""Maximal number of ranks for which cells show their bytes."""


def save_picture(figure: Figure, path: Path) -> list[Path]:
    """Write `figure` to `path` with suffixes ``.png`` and ``.svg``; returns the files. Equal figures give equal SVGs."""
    files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(files[0], dpi=150)
        figure.savefig(files[1], metadata={"Date": None})
    return files


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of `width` and `height` in inches that is drawn without a display."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    return figure


def traffic_matrices(by_rank: Sequence[ByLayer]) -> dict[tuple[str, str], NDArray[np.int64]]:
    """Returns by (layer, direction) the bytes that rank i sent to rank j, ``[P, P]``."""
    found: dict[tuple[str, str], NDArray[np.int64]] = {}
    for rank, by_layer in enumerate(by_rank):
        for key, sent in by_layer.items():
            matrix = found.setdefault(key, np.zeros((len(by_rank), len(by_rank)), np.int64))
            for peer, count in sent.to.items():
                matrix[rank, peer] += count
    return found


def draw_traffic(by_rank: Sequence[ByLayer], title: str) -> Figure:
    """Returns a heat map of bytes between ranks for each layer and direction, all on one scale."""
    matrices = traffic_matrices(by_rank)
    layers, directions = list(dict.fromkeys(key[0] for key in matrices)), ["forward", "backward"]
    size = max(2.6, 0.28 * len(by_rank))
    figure = Figure(figsize=(2 * size + 2, max(1, len(layers)) * size + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}: bytes sent", fontsize=13, color=INK)
    most = max((int(matrix.max()) for matrix in matrices.values()), default=0) or 1
    factor, unit = (1e6, "MB") if most >= 1e6 else (1e3, "kB")
    image = None
    for row, layer in zip(figure.subplots(max(1, len(layers)), 2, squeeze=False), layers):
        for axes, direction in zip(row, directions):
            matrix = matrices.get((layer, direction))
            if matrix is None:
                axes.axis("off")
                continue
            image = axes.imshow(matrix / factor, cmap="YlOrRd", vmin=0, vmax=most / factor)
            axes.set_title(f"{layer}, {direction}", fontsize=9, color=INK)
            axes.set_xlabel("to rank", fontsize=8)
            axes.set_ylabel("from rank", fontsize=8)
            ticks = range(len(by_rank)) if len(by_rank) <= 2 * NUMBERED else range(0, len(by_rank), 8)
            axes.set_xticks(ticks)
            axes.set_yticks(ticks)
            axes.tick_params(labelsize=7)
            if len(by_rank) <= NUMBERED:
                for (i, j), count in np.ndenumerate(matrix):
                    color = "white" if count > 0.6 * most else INK
                    axes.text(j, i, f"{count / factor:.3g}", ha="center", va="center", fontsize=7, color=color)
    if image is not None:
        figure.colorbar(image, ax=figure.axes, label=unit, shrink=0.6)
    return figure


def draw_parts(counts: Mapping[str, Sequence[int]], title: str) -> Figure:
    """Returns a bar chart of the parts' sizes relative to their averages; `counts` has the sizes of each rank by name."""
    num_parts = len(next(iter(counts.values())))
    figure = Figure(figsize=(min(16.0, 3 + 0.5 * num_parts * len(counts)), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(counts)
    for number, (name, values) in enumerate(counts.items()):
        average = max(1e-9, sum(values) / num_parts)
        places = np.arange(num_parts) + (number - (len(counts) - 1) / 2) * width
        axes.bar(places, np.array(values) / average, width, label=f"{name} ({average:,.0f})", color=KINDS[number])
    axes.axhline(1, color=INK, lw=0.6)
    axes.set_xlabel("part")
    axes.set_ylabel("of the average")
    axes.set_xticks(range(0, num_parts, max(1, num_parts // 16)))
    figure.legend(fontsize=8, frameon=False, ncols=len(counts), loc="outside lower center", title="average", title_fontsize=8)
    axes.set_title(title, fontsize=12, color=INK)
    return figure
