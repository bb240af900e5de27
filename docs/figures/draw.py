"""The pictures of these pages: python docs/figures/draw.py [FOLDER], by default docs/images.

``docs/numbers.json`` has what benchmarks measured (``benchmarks/reproduce.py --write``), ``runs.json`` beside this file what
``measure.py`` did.
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

from lightning_gnn.extensions.plans.pictures import draw_links
from lightning_gnn.extensions.plans.plan_cost import link_loads
from lightning_gnn.extensions.plans.presets import find_topology
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.spst import spst
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.strategies.cover.covers import cover_edges
from lightning_gnn.strategies.vertex_cut.cutters import assign_edges

HERE = Path(__file__).parent
COLORS = ("#1f77b4", "#ff7f0e")  # of ranks
GREY = "#9a9a9a"
# The same file whenever it is drawn.
plt.rcParams.update(
    {"svg.hashsalt": "lightning_gnn", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
)


def two_ranks() -> Any:
    """A graph on one device, and what two ranks hold of it."""
    graph = nx.Graph(nx.karate_club_graph().edges)
    place = nx.kamada_kawai_layout(graph)
    both = np.array([*graph.edges, *((b, a) for a, b in graph.edges)]).T
    owner = assign_nodes(both, len(graph), 2).part
    cut = [edge for edge in graph.edges if owner[edge[0]] != owner[edge[1]]]
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 3.3))

    def nodes(axis: Any, some: list[int], colors: Any, **how: Any) -> None:
        nx.draw_networkx_nodes(graph, place, some, node_size=75, node_color=colors, ax=axis, **how)

    axis = axes[0]
    nx.draw_networkx_edges(graph, place, edge_color=GREY, width=0.7, ax=axis)
    nodes(axis, [*graph], [COLORS[owner[node]] for node in graph])
    axis.set_title("the graph: each node has one owner")
    for rank, axis in enumerate(axes[1:]):
        owned = [node for node in graph if owner[node] == rank]
        halo = sorted({end for edge in cut for end in edge} - {*owned})
        inside = [edge for edge in graph.edges if owner[edge[0]] == owner[edge[1]] == rank]
        nx.draw_networkx_edges(graph, place, inside, edge_color=GREY, width=0.7, ax=axis)
        nx.draw_networkx_edges(graph, place, cut, edge_color=COLORS[1 - rank], width=0.9, style="dashed", ax=axis)
        nodes(axis, owned, COLORS[rank])
        nodes(axis, halo, "white", edgecolors=COLORS[1 - rank], linewidths=1.4)
        axis.set_title(f"rank {rank}: owns {len(owned)} nodes, halo of {len(halo)}")
    limits = axes[0].get_xlim(), axes[0].get_ylim()
    for axis in axes:
        axis.set(xlim=limits[0], ylim=limits[1])
        axis.axis("off")
    return figure


def measured(command: str) -> list[dict[str, Any]]:
    """Returns the rows of a benchmark's table."""
    records = json.loads((HERE.parent / "numbers.json").read_text())
    return next(each["result"]["rows"] for each in records if each["text"] == command)


def runs(name: str) -> Any:
    return json.loads((HERE / "runs.json").read_text())[name]


def time_and_memory() -> Any:
    """Seconds of an epoch and memory of a process, beside PyG."""
    rows = [
        row
        for row in measured("python benchmarks/epoch_time.py")
        if row["system"] == "dgcl" or row["system"].startswith(("PyG", "DGL"))
    ]
    labels = [f"{row['system']}, {row['ranks x threads'].replace('x', ' x ')}" for row in rows]
    colors = [COLORS[0] if label.startswith("dgcl") else GREY for label in labels]
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 2.6), sharey=True)
    for axis, name, title in zip(
        axes, ("s/epoch", "peak MB/rank above imports"), ("seconds of an epoch", "MB of a process above imports")
    ):
        bars = axis.barh(labels, [row[name] for row in rows], color=colors)
        axis.bar_label(bars, fmt="{:,.3g}" if name == "s/epoch" else "{:,.0f}", padding=3, fontsize=8)
        axis.set(title=title, xticks=[])
        axis.spines.bottom.set_visible(False)
        axis.margins(x=0.12)
    axes[0].invert_yaxis()
    return figure


def by_ranks() -> Any:
    """Seconds of an epoch and memory of a process against the number of ranks, of three models."""
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 2.8))
    for model, color in zip(("gcn", "sage", "gat"), (*COLORS, "#2ca02c")):
        found = measured("python benchmarks/epoch_time.py" + ("" if model == "gcn" else f" --model {model}"))
        runs_of = [row for row in found if row["system"] == "dgcl" and row["ranks x threads"].endswith("x1")]
        rows = {int(row["ranks x threads"].split("x")[0]): row for row in runs_of}
        for axis, name in zip(axes, ("s/epoch", "peak MB/rank above imports")):
            axis.plot([*rows], [row[name] for row in rows.values()], "o-", color=color, label=model.upper())
    for axis, title in zip(axes, ("seconds of an epoch", "MB of a process above imports")):
        axis.set(title=title, xlabel="ranks, of one thread each, on 2 cores", xticks=(1, 2, 4), yscale="log")
        axis.legend(frameon=False)
    return figure


# Questions, whose answers lead to a strategy or to the next question.
QUESTIONS = (
    ("Does a step on the whole graph\nfit into your devices' memory?", "no", "sampling", "batches of neighbourhoods"),
    ("Are all ranks equally fast, and\ndo they live through the training?", "no", "gossip", "nobody waits for all"),
    ("Do ranks wait for messages?", "no", "dgcl", "the rows that are read"),
    ("Must all numbers be exact?", "no", 'dgcl, codec="int8"\nvertex_cut_cached', "fewer bytes a row; fewer rows"),
    ("Does a rank read nearly all rows\nof the others?", "yes", "spmm", "a matrix on a grid of ranks"),
    ("Do a few nodes have\nmost of the edges?", "yes", "vertex_cut", "edges of hubs are divided"),
)


def which_strategy() -> Any:
    """A tree that leads to a strategy."""
    figure, axis = plt.subplots(figsize=(7.5, 5.6))
    box = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": GREY}
    arrow = {"arrowstyle": "-|>", "color": GREY, "shrinkA": 0, "shrinkB": 3}
    last = len(QUESTIONS)
    for row, (question, leaves, strategy, why) in enumerate(QUESTIONS):
        axis.text(0, -row, question, ha="center", va="center", bbox=box)
        axis.annotate("", (1.15, -row), (0.62, -row), arrowprops=arrow)
        axis.text(0.87, 0.05 - row, leaves, ha="center", va="bottom", color=COLORS[1])
        axis.text(1.2, -row, strategy, va="center", family="monospace", color=COLORS[0], weight="bold")
        axis.text(2.15, -row, why, va="center", color="0.35")
        axis.annotate("", (0, -row - 0.7), (0, -row - 0.3), arrowprops=arrow)
        axis.text(0.05, -row - 0.5, "yes" if leaves == "no" else "no", va="center", color=COLORS[1])
    axis.text(0, -last, "cover", ha="center", va="center", family="monospace", color=COLORS[0], weight="bold")
    axis.text(0.25, -last, "the fewest rows", va="center", color="0.35")
    axis.set(xlim=(-0.75, 3.1), ylim=(-last - 0.3, 0.5))
    axis.axis("off")
    return figure


def losses() -> Any:
    """Training losses of one device and of several ranks, on one another."""
    curves = runs("losses")
    first, *others = curves
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 2.8))
    for (name, losses), width, color in zip(curves.items(), (7, 3.5, 1.2), (GREY, *COLORS)):
        axes[0].plot(losses, label=name, linewidth=width, color=color, alpha=0.6 if name == first else 1)
    for name, color in zip(others, COLORS):
        difference = np.abs(np.subtract(curves[name], curves[first]))
        axes[1].semilogy(np.maximum(difference, 1e-9), ".", label=name, color=color)
    axes[0].set(title="training loss", xlabel="epoch")
    axes[1].set(title="its difference from that of one device (0 is drawn at 1e-9)", xlabel="epoch", ylim=(5e-10, 1))
    for axis in axes:
        axis.legend(frameon=False)
    return figure


def losses_by_seconds() -> Any:
    """Validation losses of strategies against seconds of training."""
    figure, axis = plt.subplots(figsize=(7.5, 2.8))
    for (name, curve), color in zip(runs("losses_by_seconds").items(), (*COLORS, "#2ca02c", "#9467bd")):
        axis.plot(curve["seconds"], curve["loss"], label=name, color=color)
    axis.set(xlabel="seconds of training, 2 ranks", ylabel="validation loss", xscale="log")
    axis.legend(frameon=False)
    return figure


def cover_and_halo() -> Any:
    """Rows that ``cover`` sends of those that ``dgcl`` does, by parts."""
    figure, axis = plt.subplots(figsize=(7.5, 2.8))
    for name, by_parts in runs("rows_of_cover").items():
        axis.plot([*map(int, by_parts)], [100 * cover / halo for halo, cover in by_parts.values()], "o-", label=name)
    ticks = (2, 4, 8, 16, 32)
    axis.set(xlabel="parts", ylabel="% of the halo rows", xscale="log", ylim=(0, 100))
    axis.set_xticks(ticks, map(str, ticks), minor=False)
    axis.minorticks_off()
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


# A small graph of directed edges. Under an edge cut, rank 0 owns the nodes of the first line.
SMALL = {"a": (0, 0.7), "b": (0.3, 2.6), "c": (0.8, 2.0), "h": (0.2, 1.5)}
SMALL |= {"d": (2.2, 0.1), "e": (2.7, 0.5), "f": (2.6, 1.1), "g": (2.1, 1.5), "i": (2.2, 2.4)}
SMALL_EDGES = ("ad", "ae", "af", "ag", "bi", "ci", "hi", "bc", "ch", "ha", "de", "ef", "fg", "gi")


def steps_of_schemes() -> Any:
    """Expand, aggregate and reduce of four schemes: which edges each rank computes, and the rows that travel before and after."""
    names = [*SMALL]
    ends = np.array([[names.index(end) for end in edge] for edge in SMALL_EDGES]).T
    part = np.array([0] * 4 + [1] * 5)
    cut = assign_edges(ends, len(names), 2, "dbh")
    schemes = {
        "dgcl": (part[ends[1]], part),
        "spmm_1d, whole blocks": (part[ends[1]], part),
        "cover": (cover_edges(ends, part, 2), part),
        "vertex_cut": (cut.part, cut.master),
    }
    figure, axes = plt.subplots(2, 2, figsize=(9.5, 6.6))
    for axis, (name, (computed_by, owner)) in zip(axes.flat, schemes.items()):
        counts = [0, 0]
        for rank in range(2):
            mine = ends[:, computed_by == rank]
            needed = np.arange(len(names)) if "blocks" in name else np.unique(mine[0])
            copies, results = ({node for node in some if owner[node] != rank} for some in (needed, np.unique(mine[1])))
            held = {int(node) for node in np.flatnonzero(owner == rank)} | copies | results
            place = {node: (SMALL[names[node]][0] + 4.2 * rank, SMALL[names[node]][1]) for node in held}
            for source, target in mine.T:
                axis.annotate(
                    "",
                    place[target],
                    place[source],
                    arrowprops={
                        "arrowstyle": "-|>",
                        "color": COLORS[rank],
                        "shrinkA": 6,
                        "shrinkB": 6,
                        "linewidth": 0.9,
                    },
                )
            for node, at in place.items():
                own = owner[node] == rank
                axis.plot(*at, "o", ms=11, color=COLORS[rank] if own else "white", mec=COLORS[owner[node]], mew=1.3)
                axis.text(*at, names[node], ha="center", va="center", fontsize=7, color="white" if own else "black")
                if node in copies:  # it comes before the sum ...
                    axis.text(at[0] + 0.2, at[1] - 0.32, "S", fontsize=8, color=COLORS[owner[node]], weight="bold")
                if node in results:  # ... or leaves after it
                    axis.text(at[0] + 0.2, at[1] + 0.14, "R", fontsize=8, color="#2ca02c", weight="bold")
            counts[0] += len(copies)
            counts[1] += len(results)
            axis.text(1.4 + 4.2 * rank, 3.0, f"rank {rank}", ha="center", color=COLORS[rank])
        axis.axvline(3.5, color="0.85", linewidth=1)
        axis.set_title(f"{name}: rows moved by S {counts[0]}, by R {counts[1]}")
        axis.set(xlim=(-0.4, 7.4), ylim=(-0.4, 3.2))
        axis.axis("off")
    return figure


def plan_on_dgx1() -> Any:
    """What a plan puts on the links of a DGX-1."""
    graph = nx.barabasi_albert_graph(4000, 8, seed=0)
    both = np.array([*graph.edges, *((b, a) for a, b in graph.edges)]).T
    part = assign_nodes(both, len(graph), 8).part
    order = np.argsort(part, kind="stable")
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    offsets = np.concatenate([[0], np.bincount(part, minlength=8).cumsum()])
    topology, row_bytes = find_topology("dgx1", num_ranks=8), 256
    plan = spst(Relation.from_edges(number[both], offsets), topology)
    title = f"spst over {topology.name}, rows of {row_bytes} bytes"
    return draw_links(link_loads(plan, topology, row_bytes), topology, title)


def trace_of_an_epoch() -> Any:
    """What two ranks do in an epoch, as a profiler's trace has it; the optimizer's step has forward and backward in it."""
    events = runs("trace")
    colors = {"forward": COLORS[0], "backward": COLORS[1], "optimizer": "#2ca02c"}
    colors |= {"send": "#9467bd", "wait": "#d62728", "sum of gradients": "0.6"}
    begin = min(each["ts"] for each in events)
    figure, axis = plt.subplots(figsize=(9.5, 2.6))
    for each in events:
        at, width, row = (each["ts"] - begin) / 1e3, each["dur"] / 1e3, 2.3 * each["pid"] + each["tid"]
        if each["cat"] in colors:
            axis.broken_barh([(at, width)], (row, 0.9), color=colors[each["cat"]])
        else:  # a conv, within the forward pass
            axis.broken_barh([(at, width)], (row + 0.25, 0.4), color="white", alpha=0.45, zorder=2)
            axis.text(at + width / 2, row + 0.45, each["args"]["layer"], ha="center", va="center", fontsize=7, zorder=3)
    axis.set_yticks([0.45, 1.45, 2.75, 3.75], ["rank 0: compute", "communication", "rank 1: compute", "communication"])
    axis.set_xlabel("milliseconds")
    axis.invert_yaxis()
    marks = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    axis.legend(marks, colors, ncols=len(colors), frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


PICTURES: dict[str, Callable[[], Any]] = {
    "two-ranks": two_ranks,
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
        if figure.get_layout_engine() is None:
            figure.tight_layout()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
