"""The pictures of these pages: python docs/figures/draw.py [FOLDER], by default docs/images.

``docs/numbers.json`` has what benchmarks measured (``benchmarks/reproduce.py --write``), ``runs.json`` beside this file what
``measure.py`` did. Pictures are 8 inches wide, 768 pixels in a browser.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import networkx as nx
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import ConnectionPatch, FancyArrowPatch, FancyBboxPatch, Patch

from lightning_gnn.extensions.plans.plan import p2p
from lightning_gnn.extensions.plans.plan_cost import plan_cost
from lightning_gnn.extensions.plans.presets import find_topology
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.spst import spst
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.strategies.cover.covers import cover_edges
from lightning_gnn.strategies.vertex_cut.cutters import assign_edges

HERE = Path(__file__).parent
COLORS = ("#1f77b4", "#ff7f0e")  # of ranks
GREEN, GREY, LIGHT = "#2ca02c", "#9a9a9a", "#9ecae1"
MEMORY = "Peak memory per process\n(MB, excluding imports)"
# The same file whenever it is drawn.
plt.rcParams.update(
    {
        "svg.hashsalt": "lightning_gnn",
        "font.size": 10,
        "axes.titlesize": 10.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)
plt.rcParams.update({"figure.titlesize": 12, "figure.titleweight": "bold"})


def measured(command: str) -> list[dict[str, Any]]:
    """Returns the rows of a benchmark's table."""
    records = json.loads((HERE.parent / "numbers.json").read_text())
    return next(each["result"]["rows"] for each in records if each["text"] == command)


def runs(name: str) -> Any:
    return json.loads((HERE / "runs.json").read_text())[name]


def two_ranks() -> Any:
    """A graph, and the local and halo nodes of two ranks."""
    graph = nx.Graph(nx.karate_club_graph().edges)
    place = nx.kamada_kawai_layout(graph)
    both = np.array([*graph.edges, *((b, a) for a, b in graph.edges)]).T
    owner = assign_nodes(both, len(graph), 2).part
    cut = [edge for edge in graph.edges if owner[edge[0]] != owner[edge[1]]]
    figure, axes = plt.subplots(1, 3, figsize=(8, 3.6))
    figure.suptitle("Each rank stores its local nodes, and receives the features of its halo nodes")

    def nodes(axis: Any, some: list[int], colors: Any, **how: Any) -> None:
        nx.draw_networkx_nodes(graph, place, some, node_size=75, node_color=colors, ax=axis, **how)

    axis = axes[0]
    nx.draw_networkx_edges(graph, place, edge_color=GREY, width=0.7, ax=axis)
    nodes(axis, [*graph], [COLORS[owner[node]] for node in graph])
    axis.set_title("the graph")
    halos = []
    for rank, axis in enumerate(axes[1:]):
        local = [node for node in graph if owner[node] == rank]
        halos.append(sorted({end for edge in cut for end in edge} - {*local}))
        inside = [edge for edge in graph.edges if owner[edge[0]] == owner[edge[1]] == rank]
        nx.draw_networkx_edges(graph, place, inside, edge_color=GREY, width=0.7, ax=axis)
        nx.draw_networkx_edges(graph, place, cut, edge_color=COLORS[1 - rank], width=0.9, style="dashed", ax=axis)
        nodes(axis, local, COLORS[rank])
        nodes(axis, halos[rank], "white", edgecolors=COLORS[1 - rank], linewidths=1.6)
        axis.set_title(f"rank {rank}: {len(local)} local nodes,\n{len(halos[rank])} halo nodes")
    for axis in axes:
        axis.set(xlim=(-0.8, 0.8), ylim=(-1.25, 1.15))
        axis.axis("off")
    sent = max(halos[1], key=lambda node: place[node][0])  # one of the local nodes of rank 0, and its copy
    style = {"arrowstyle": "-|>", "mutation_scale": 16, "color": "black", "linewidth": 1.6, "shrinkA": 5, "shrinkB": 5}
    ends = {"xyA": place[sent], "xyB": place[sent], "coordsA": "data", "coordsB": "data"}
    figure.add_artist(ConnectionPatch(axesA=axes[1], axesB=axes[2], connectionstyle="arc3,rad=0.42", zorder=9, **ends, **style))
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.text(0.667, 0.115, "halo features are sent\nbefore each layer", ha="center", va="bottom")
    mark = {"marker": "o", "linestyle": "", "markersize": 8}
    marks = [Line2D([], [], color=color, **mark) for color in COLORS]
    marks.append(Line2D([], [], markerfacecolor="white", markeredgecolor="black", markeredgewidth=1.4, **mark))
    names = ("local nodes of rank 0", "local nodes of rank 1", "halo nodes, in the color of the owner")
    figure.legend(marks, names, ncols=3, loc="lower center", frameon=False)
    return figure


def mesh() -> Any:
    """Four ranks with samples on a graph: rows have equal samples, columns equal nodes."""
    graph = nx.Graph(nx.karate_club_graph().edges)
    place = nx.kamada_kawai_layout(graph)
    both = np.array([*graph.edges, *((b, a) for a, b in graph.edges)]).T
    owner = assign_nodes(both, len(graph), 2).part
    figure, axes = plt.subplots(2, 2, figsize=(8, 5))
    figure.suptitle("Graph ranks have parts of the same samples, data ranks have different samples")
    for rank, axis in enumerate(axes.flat):
        data, part = divmod(rank, 2)
        local = {node for node in graph if owner[node] == part}
        halo = sorted({end for edge in graph.edges if len(local & {*edge}) == 1 for end in edge} - local)
        edges = [edge for edge in graph.edges if local & {*edge}]
        nx.draw_networkx_edges(graph, place, edges, edge_color=GREY, width=0.6, ax=axis)
        nx.draw_networkx_nodes(graph, place, [*local], node_size=40, node_color=COLORS[part], ax=axis)
        hollow = {"node_color": "white", "edgecolors": COLORS[1 - part], "linewidths": 1.3}
        nx.draw_networkx_nodes(graph, place, halo, node_size=40, ax=axis, **hollow)
        axis.set_title(f"rank {rank}: samples {data}, {data + 2}, ..., nodes of part {part}")
        axis.axis("off")
    figure.tight_layout(rect=(0, 0.02, 1, 1), w_pad=7, h_pad=3)
    arrow = {"arrowstyle": "<|-|>", "mutation_scale": 14, "color": "black", "linewidth": 1.4}
    for row in (0, 1):
        box = axes[row, 0].get_position()
        y = (box.y0 + box.y1) / 2
        figure.add_artist(FancyArrowPatch((0.445, y), (0.555, y), transform=figure.transFigure, **arrow))
        figure.text(0.5, y + 0.02, "halo rows,\neach layer", ha="center", va="bottom", fontsize=9)
    bottom, top = axes[1, 0].get_position().y1 + 0.065, axes[0, 0].get_position().y0 - 0.005
    for x in (0.25, 0.75):
        figure.add_artist(FancyArrowPatch((x, bottom), (x, top), transform=figure.transFigure, **arrow))
    figure.text(0.5, (bottom + top) / 2, "gradients: all ranks, each step", ha="center", va="center", fontsize=9)
    return figure


_PYG, _DGL = "PyG, torch.sparse_csr", "DGL 2.1.0"
EPOCHS = (  # time_and_memory: number of cores; system and "ranks x threads" in docs/numbers.json; label; whether it is cached
    ("1 core", "PyG, edge_index", "1x1", "PyG, edge_index", False),
    ("1 core", _PYG, "1x1", "PyG, sparse_csr", False),
    ("1 core", _DGL, "1x1", "DGL", False),
    ("1 core", "dgcl anew", "1x1", "dgcl", False),
    ("1 core", f"{_PYG}, precomputed", "1x1", "PyG, sparse_csr", True),
    ("1 core", f"{_DGL}, precomputed", "1x1", "DGL", True),
    ("1 core", "dgcl", "1x1", "dgcl", True),
    ("2 cores", _PYG, "1x2", "PyG, sparse_csr", False),
    ("2 cores", _DGL, "1x2", "DGL", False),
    ("2 cores", "dgcl anew", "1x2", "dgcl", False),
    ("2 cores", "dgcl anew", "2x1", "dgcl", False),
    ("2 cores", f"{_PYG}, precomputed", "1x2", "PyG, sparse_csr", True),
    ("2 cores", f"{_DGL}, precomputed", "1x2", "DGL", True),
    ("2 cores", "dgcl", "1x2", "dgcl", True),
    ("2 cores", "dgcl", "2x1", "dgcl", True),
)
_PALE = "0.82"


def time_and_memory() -> Any:
    """Epoch time and memory of dgcl, PyG and DGL, each with and without a cached aggregation of the input."""
    rows = {(row["system"], row["ranks x threads"]): row for row in measured("python benchmarks/epoch_time.py")}
    labels = [f"{label}{', cached' * cached}, {size.replace('x', ' x ')}" for _, _, size, label, cached in EPOCHS]
    at = [number + 0.9 * (each[0] == "2 cores") for number, each in enumerate(EPOCHS)]
    colors = [(LIGHT if each[4] else COLORS[0]) if each[3] == "dgcl" else _PALE if each[4] else GREY for each in EPOCHS]
    figure, axes = plt.subplots(1, 2, figsize=(8, 6.2), sharey=True)
    limits = {"s/epoch": 3.3, "peak MB/rank above imports": 1600}
    for axis, (name, limit), title in zip(axes, limits.items(), ("Epoch time (s)\n", MEMORY)):
        values = [rows[system, size][name] for _, system, size, *_ in EPOCHS]
        axis.barh(at, [min(value, limit) for value in values], color=colors)
        for y, value, (_, _, size, *_) in zip(at, values, EPOCHS):
            text = f"{value:.3g}" if name == "s/epoch" else f"{value:,.0f}"
            text += " in each of 2" if name != "s/epoch" and size == "2x1" else ""
            if value > limit:
                axis.text(limit * 0.97, y, f"{text}, bar cut off", ha="right", va="center", color="white", weight="bold")
                axis.plot([limit] * 2, [y - 0.4, y + 0.4], color="white", linestyle=(0, (2, 2)), linewidth=4)
            else:
                axis.text(value + limit * 0.02, y, text, va="center")
        axis.set(title=title, xticks=[], xlim=(0, limit * 1.05))
        axis.spines.bottom.set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0].set_yticks(at, labels)
    axes[0].invert_yaxis()
    for cores in ("1 core", "2 cores"):
        first = min(y for y, each in zip(at, EPOCHS) if each[0] == cores)
        axes[0].text(-0.03, first - 0.72, cores, weight="bold", ha="right", va="center", transform=axes[0].get_yaxis_transform())
    ratios = [
        100 * rows["dgcl" + " anew" * (not cached), "2x1"]["s/epoch"] / rows[_DGL + ", precomputed" * cached, "1x2"]["s/epoch"]
        for cached in (False, True)
    ]
    figure.suptitle(
        f"On 2 cores, a dgcl epoch takes {ratios[0]:.0f} % of DGL's time,\nand {ratios[1]:.0f} % if both cache the first layer"
    )
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    marks = [Patch(color=color) for color in (GREY, _PALE, COLORS[0], LIGHT)]
    names = ("PyG and DGL", "PyG and DGL, cached", "dgcl", "dgcl, cached (default)")
    figure.legend(marks, names, ncols=4, loc="lower center", frameon=False, bbox_to_anchor=(0.5, 0.06))
    note = "cached: the first layer's aggregation of the constant input is computed once; with PyG and DGL, users write this.\n"
    note += "2 x 1 is two processes of one thread each, 1 x 2 is one process of two threads."
    figure.text(0.5, 0.015, note, ha="center", va="bottom", fontsize=9, color="0.3")
    return figure


def by_ranks() -> Any:
    """Epoch time and memory of 1, 2 and 4 ranks on two cores, of three models."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.7))
    models, sizes = ("gcn", "sage", "gat"), ("1x1", "2x1", "4x1")
    for axis, name, label in zip(axes, ("s/epoch", "peak MB/rank above imports"), ("Epoch time (s)\n", MEMORY)):
        for number, model in enumerate(models):
            found = measured("python benchmarks/epoch_time.py" + ("" if model == "gcn" else f" --model {model}"))
            values = {row["ranks x threads"]: row[name] for row in found if row["system"] == "dgcl"}
            for place, (size, color) in enumerate(zip(sizes, (LIGHT, COLORS[0], COLORS[1]))):
                bars = axis.bar(number + 0.31 * (place - 1), values[size], 0.29, color=color)
                axis.bar_label(bars, fmt="{:.2f}" if name == "s/epoch" else "{:,.0f}", fontsize=8, padding=1)
        axis.set_xticks(range(len(models)), [model.upper() for model in models])
        axis.tick_params(axis="x", length=0)
        axis.set(title=label, yticks=[])
        axis.margins(y=0.1)
        axis.spines.left.set_visible(False)
    figure.suptitle("Oversubscribed: N ranks on 2 cores\n4 ranks are slower than 2, but each needs less memory")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    marks = [Patch(color=color) for color in (LIGHT, *COLORS)]
    names = ("1 rank, 1 core", "2 ranks, 2 cores", "4 ranks, 2 cores (oversubscribed)")
    figure.legend(marks, names, ncols=3, loc="lower center", frameon=False)
    return figure


# Questions; yes leads to a strategy, no to the next question.
QUESTIONS = (
    ("Does a rank run out of memory,\neven with memory_limit?", "sampling", "mini-batches of neighbors"),
    ("Does the log name a rank that keeps\nothers waiting, or do ranks fail?", "gossip", "workers train independently"),
    ("Is comm/wait_fraction\nbelow 0.3?", "dgcl", "keep it: ranks rarely wait"),
    ("Are approximate results\nacceptable?", 'dgcl, codec="int8"\nvertex_cut_cached', "fewer bytes,\nor fewer features"),
    ("lightning-gnn partition: is each\nhalo nearly the whole graph?", "spmm", "products on a process grid"),
    ("Do a few nodes (hubs) have\nmost of the edges?", "vertex_cut", "divides the edges of a node"),
)


def which_strategy() -> Any:
    """Questions that lead to a strategy."""
    figure, axis = plt.subplots(figsize=(8, 7.4))
    figure.suptitle("Start with dgcl; change the strategy when the logs show a reason")
    arrow = {"arrowstyle": "-|>", "color": "0.35", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 14, "linewidth": 1.3}
    height, half, left, right = 0.31, 1.75, 2.7, 4.9  # half the height and width of a question, the sides of an answer

    def box(x: float, y: float, half: float, text: str, **how: Any) -> None:
        code = "color" in how
        style = {"facecolor": "#eaf3fa" if code else "white", "edgecolor": how.get("color", "0.35"), "linewidth": 1.2}
        low = (x - half, y - height)
        axis.add_patch(FancyBboxPatch(low, 2 * half, 2 * height, "round,pad=0,rounding_size=0.12", **style))
        axis.text(x, y, text, ha="center", va="center", **(how | {"family": "monospace", "weight": "bold"} if code else how))

    def down(row: float, text: str) -> None:
        axis.annotate("", (0, -row - 1 + height), (0, -row - height), arrowprops=arrow)
        axis.text(0.1, -row - 0.5, text, va="center", color="0.35")

    box(0, 1, 1.0, "start: dgcl", color=COLORS[0])
    down(-1, "")
    for row, (question, strategy, why) in enumerate(QUESTIONS):
        box(0, -row, half, question)
        axis.annotate("", (left, -row), (half, -row), arrowprops=arrow)
        axis.text((half + left) / 2, 0.06 - row, "yes", ha="center", va="bottom", color="0.35")
        box((left + right) / 2, -row, (right - left) / 2, strategy, color=COLORS[0])
        axis.text(right + 0.12, -row, why, va="center", color="0.35")
        down(row, "no")
    box(0, -len(QUESTIONS), 1.0, "cover", color=COLORS[0])
    axis.text(1.12, -len(QUESTIONS), "sends the fewest features and partial aggregates", va="center", color="0.35")
    axis.set(xlim=(-half - 0.05, 7.5), ylim=(-len(QUESTIONS) - 0.4, 1.4))
    axis.axis("off")
    figure.tight_layout()
    return figure


def losses() -> Any:
    """Training losses of one device and of several ranks, on one another."""
    curves = runs("losses")
    first, *others = curves
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    figure.suptitle("Training losses on 2 and 4 ranks equal the losses of one device up to rounding")
    for (name, losses), width, color in zip(curves.items(), (7, 3.5, 1.2), (GREY, *COLORS)):
        axes[0].plot(losses, label=name, linewidth=width, color=color, alpha=0.6 if name == first else 1)
    for name, color in zip(others, COLORS):
        difference = np.abs(np.subtract(curves[name], curves[first]))
        axes[1].semilogy(np.maximum(difference, 1e-9), ".", label=name, color=color)
    axes[0].set(title="training loss", xlabel="epoch")
    axes[1].set(title="absolute difference to one device", xlabel="epoch (0 is drawn at 1e-9)", ylim=(5e-10, 1))
    for axis in axes:
        axis.legend(frameon=False)
    figure.tight_layout()
    return figure


def losses_by_seconds() -> Any:
    """Validation losses of strategies against training time; ``gossip`` validates on clusters, so it is not comparable."""
    figure, axis = plt.subplots(figsize=(8, 3.4))
    curves = {name: curve for name, curve in runs("losses_by_seconds").items() if name != "gossip"}
    figure.suptitle("Full-graph steps reach a lower loss on this graph, sooner than sampling")
    for (name, curve), color, dashes in zip(curves.items(), (*COLORS, GREEN), ("-", "--", "-")):
        label = f"{name}: {curve['loss'][-1]:.2f} after {curve['seconds'][-1]:.1f} s"
        axis.plot(curve["seconds"], curve["loss"], dashes, label=label, color=color, linewidth=2)
        axis.plot(curve["seconds"][-1], curve["loss"][-1], "o", color=color)
    axis.set(
        xlabel="training time (s): 40 epochs on 2 ranks, 50,000 nodes", ylabel="validation loss", xscale="log", ylim=(0, 2.1)
    )
    ticks = (0.2, 0.5, 1, 2, 5, 10, 20)
    axis.set_xticks(ticks, map(str, ticks), minor=False)
    axis.minorticks_off()
    axis.legend(frameon=False)
    figure.tight_layout()
    return figure


KIND = {
    "cnr-2000": "web graph",
    "ego-twitter": "social network",
    "gowalla-bipartite": "check-ins",
    "soc-slashdot0902": "social network",
}


def cover_and_halo() -> Any:
    """Rows that ``cover`` sends relative to ``dgcl``, by number of ranks."""
    figure, axis = plt.subplots(figsize=(8, 3.6))
    found = runs("rows_of_cover")
    shares = {name: [100 * cover / halo for halo, cover in by_parts.values()] for name, by_parts in found.items()}
    low, high = (end(end(each) for each in shares.values()) for end in (min, max))
    figure.suptitle(f"cover sends {low:.0f} to {high:.0f} % of what dgcl sends for the same partition")
    axis.axhline(100, color=GREY, linestyle="--")
    axis.text(2, 98, "dgcl", va="top", color="0.35")
    labels: list[tuple[float, str, str]] = []
    for (name, share), color, mark in zip(shares.items(), (*COLORS, GREEN, "#9467bd"), "os^D"):
        axis.plot([*map(int, found[name])], share, mark + "-", color=color)
        labels.append((share[-1], f"{name} ({KIND[name]})", color))
    at = -np.inf
    for last, label, color in sorted(labels):
        at = max(last, at + 8)  # on a line of its own
        axis.text(35, at, label, va="center", color=color)
    ticks = (2, 4, 8, 16, 32)
    axis.set(xlabel="ranks", ylabel="features sent, % of dgcl\n(lower is better)", xscale="log", ylim=(0, 105))
    axis.set_xticks(ticks, map(str, ticks), minor=False)
    axis.minorticks_off()
    figure.tight_layout()
    return figure


# A small graph of directed edges. Under an edge cut, rank 0 owns the nodes of the first line.
SMALL = {"a": (0.1, 0.75), "b": (0, 2.75), "c": (0.75, 2.1), "h": (0.25, 1.45)}
SMALL |= {"d": (2.0, 0.1), "e": (2.5, 0.5), "f": (2.55, 1.1), "g": (2.0, 1.75), "i": (2.35, 2.45)}
SMALL_EDGES = ("ha", "ab", "hi", "ch", "gi", "bi", "ae", "ci", "af", "bc", "ag", "ad")
APART = 4.6  # of the two ranks


def _draw_scheme(axis: Any, ends: Any, computed_by: Any, owner: Any, whole: bool) -> tuple[int, int]:
    """Draws what two ranks have and send under a scheme; returns the numbers of features and partial aggregates sent."""
    names = [*SMALL]
    sent = [0, 0]
    for rank in range(2):
        mine = ends[:, computed_by == rank]
        needed = np.arange(len(names)) if whole else np.unique(mine[0])
        copies, results = ({int(node) for node in some if owner[node] != rank} for some in (needed, np.unique(mine[1])))
        held = {int(node) for node in np.flatnonzero(owner == rank)} | copies | results
        place = {node: (SMALL[names[node]][0] + APART * rank, SMALL[names[node]][1]) for node in held}
        edge = {"arrowstyle": "-|>", "color": "0.6", "shrinkA": 6, "shrinkB": 7, "linewidth": 0.9}
        for source, target in mine.T:
            axis.annotate("", place[target], place[source], arrowprops=edge)
        for node, (x, y) in place.items():
            local, color = owner[node] == rank, COLORS[owner[node]]
            face = color if local else "white"
            axis.plot(x, y, "s" if node in results - copies else "o", ms=11, color=face, mec=color, mew=1.5, zorder=4)
            axis.text(
                x, y - 0.01, names[node], ha="center", va="center", fontsize=8, color="white" if local else "black", zorder=5
            )
        away = APART if rank == 0 else -APART  # to the other rank
        message = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 7, "shrinkB": 7, "linewidth": 1.5}
        for some, style in ((copies, "-"), (results, (0, (3, 2)))):
            for node in some:
                here, there = place[node], (place[node][0] + away, place[node][1])
                begin, end = (there, here) if some is copies else (here, there)
                color = COLORS[owner[node]] if some is copies else GREEN
                axis.annotate("", end, begin, arrowprops=message | {"color": color, "linestyle": style}, zorder=3)
        sent[0] += len(copies)
        sent[1] += len(results)
        count = int((computed_by == rank).sum())
        axis.text(1.25 + APART * rank, 3.2, f"rank {rank}: {count} edges", ha="center", va="center", color=COLORS[rank])
    return sent[0], sent[1]


def steps_of_schemes() -> Any:
    """The edges that two ranks compute, and what they send, under four strategies."""
    names = [*SMALL]
    ends = np.array([[names.index(end) for end in edge] for edge in SMALL_EDGES]).T
    owner = np.array([0] * 4 + [1] * 5)
    cut = assign_edges(ends, len(names), 2, "ebv")
    assert (cut.master == owner).all()  # nodes have the same colors in all panels
    schemes = {
        "dgcl": (owner[ends[1]], "halo nodes only"),
        "spmm_1d": (owner[ends[1]], "all nodes"),
        "cover": (cover_edges(ends, owner, 2), "features or partial aggregates"),
        "vertex_cut": (cut.part, "edges balanced"),
    }
    figure, axes = plt.subplots(2, 2, figsize=(8, 7.4))
    figure.suptitle("One layer on two ranks: what each strategy sends")
    for axis, (name, (computed_by, why)) in zip(axes.flat, schemes.items()):
        features, partial = _draw_scheme(axis, ends, computed_by, owner, name == "spmm_1d")
        text = f"{features} feature{'s' * (features > 1)}"
        text += f", {partial} partial aggregate{'s' * (partial > 1)}" * (partial > 0)
        name += " (sparsity_aware=False)" * (name == "spmm_1d")
        axis.set_title(f"{name}: {why}\n{text} sent", weight="bold")
        border = (2.75 + APART) / 2
        axis.axvline(border, color="0.75", linewidth=1, linestyle=":")
        axis.set(xlim=(-0.4, APART + 3), ylim=(-0.25, 3.4))
        axis.axis("off")
    figure.tight_layout(rect=(0, 0.09, 1, 1), h_pad=2)
    mark = {"linestyle": "", "markersize": 9, "markeredgewidth": 1.4, "markeredgecolor": "black"}
    marks = [
        Line2D([], [], marker="o", markerfacecolor="black", **mark),
        Line2D([], [], marker="o", markerfacecolor="white", **mark),
        Line2D([], [], marker="s", markerfacecolor="white", **mark),
        Line2D([], [], color="0.6", linewidth=1),
        Line2D([], [], color=COLORS[0], linewidth=1.8),
        Line2D([], [], color=GREEN, linewidth=1.8, linestyle="--"),
    ]
    texts = ("local node", "copy of another rank's node", "partial aggregate for another rank's node")
    texts += ("edge", "features sent, owner's color", "partial aggregate sent to the owner")
    order = (0, 3, 1, 4, 2, 5)
    figure.legend([marks[k] for k in order], [texts[k] for k in order], ncols=3, loc="lower center", frameon=False)
    return figure


def plan_on_dgx1() -> Any:
    """The load of each link of a DGX-1 in an exchange, under two plans."""
    graph = nx.barabasi_albert_graph(4000, 8, seed=0)
    both = np.array([*graph.edges, *((b, a) for a, b in graph.edges)]).T
    part = assign_nodes(both, len(graph), 8).part
    order = np.argsort(part, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    offsets = np.concatenate([[0], np.bincount(part, minlength=8).cumsum()])
    topology, row_bytes = find_topology("dgx1", num_ranks=8), 256
    relation = Relation.from_edges(number[both], offsets)
    costs = {"p2p": plan_cost(p2p(relation, topology), topology), "SPST": plan_cost(spst(relation, topology), topology)}
    loads = {name: 1e6 * row_bytes * cost.hop_seconds.sum(0) for name, cost in costs.items()}
    kinds = {"qpi": "QPI, between sockets", "pcie": "PCIe", "nvlink": "NVLink"}
    place = sorted(range(len(topology.hops)), key=lambda hop: ([*kinds].index(topology.hops[hop].kind), -loads["p2p"][hop]))
    colors = dict(zip(kinds, ("#d62728", COLORS[1], COLORS[0])))
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.8), sharey=True)
    busiest = {name: load.max() for name, load in loads.items()}
    figure.suptitle(
        f"On a DGX-1, SPST spreads the load: busiest link {busiest['p2p']:.0f} µs before, {busiest['SPST']:.0f} µs after"
    )
    titles = {"p2p": "before: p2p, direct messages", "SPST": "after: SPST, relayed over NVLink"}
    inner = axes[1].inset_axes((0.14, 0.4, 0.84, 0.42))
    for axis, name in ((axes[0], "p2p"), (axes[1], "SPST"), (inner, "SPST")):
        axis.bar(range(len(place)), loads[name][place], 0.8, color=[colors[topology.hops[hop].kind] for hop in place])
        axis.set(xticks=[], xlim=(-1, len(place)))
    for axis, name in zip(axes, costs):
        axis.set_title(f"{titles[name]}\npredicted exchange: {1e6 * costs[name].seconds(row_bytes):.0f} µs")
        axis.set_xlabel(f"{len(place) // 2} links, each in two directions")
    axes[0].set_ylabel("load: time that a link is busy\nin one exchange (µs)")
    inner.set_title("the same bars, enlarged", fontsize=9)
    inner.set_ylim(0, 6)
    marks = [Patch(color=color) for color in colors.values()]
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.legend(marks, kinds.values(), ncols=3, loc="lower center", frameon=False)
    return figure


def trace_of_an_epoch() -> Any:
    """What two ranks do in an epoch, as a profiler's trace has it; the optimizer's step has forward and backward in it."""
    events = runs("trace")
    colors = {"forward": COLORS[0], "backward": COLORS[1], "optimizer": "#2ca02c"}
    colors |= {"send": "#9467bd", "wait": "#d62728", "sum of gradients": "0.6"}
    begin = min(each["ts"] for each in events)
    figure, axis = plt.subplots(figsize=(8, 2.6))
    for each in events:
        at, width, row = (each["ts"] - begin) / 1e3, each["dur"] / 1e3, 2.3 * each["pid"] + each["tid"]
        if each["cat"] in colors:
            axis.broken_barh([(at, width)], (row, 0.9), color=colors[each["cat"]])
        else:  # a conv, within the forward pass
            axis.broken_barh([(at, width)], (row + 0.25, 0.4), color="white", alpha=0.45, zorder=2)
            axis.text(
                at + width / 2,
                row + 0.45,
                each["args"]["layer"].removeprefix("model."),
                ha="center",
                va="center",
                fontsize=7,
                zorder=3,
            )
    axis.set_yticks([0.45, 1.45, 2.75, 3.75], ["rank 0: compute", "communication", "rank 1: compute", "communication"])
    axis.set_xlabel("time (ms)")
    axis.invert_yaxis()
    marks = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    narrow = {"columnspacing": 1.3, "handlelength": 1.2}
    axis.legend(marks, colors, ncols=len(colors), frameon=False, loc="lower center", bbox_to_anchor=(0.45, 1), **narrow)
    figure.tight_layout()
    return figure


PICTURES: dict[str, Callable[[], Any]] = {
    "two-ranks": two_ranks,
    "mesh": mesh,
    "time-and-memory": time_and_memory,
    "by-ranks": by_ranks,
    "which-strategy": which_strategy,
    "losses": losses,
    "losses-by-seconds": losses_by_seconds,
    "cover-and-halo": cover_and_halo,
    "steps-of-schemes": steps_of_schemes,
    "plan-on-dgx1": plan_on_dgx1,
    "trace-of-an-epoch": trace_of_an_epoch,
}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent / "images"
    for name, draw in PICTURES.items():
        figure = draw()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
