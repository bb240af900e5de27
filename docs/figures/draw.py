"""The pictures of these pages: python docs/figures/draw.py [FOLDER], by default docs/images.

``measured.json`` beside this file has what ``benchmarks/epoch_time.py --json`` wrote.
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

from lightning_gnn.partition.edge_cut import assign_nodes

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


def time_and_memory() -> Any:
    """Seconds of an epoch and memory of a process, beside PyG."""
    measured = json.loads((HERE / "measured.json").read_text())
    rows = [row for row in measured["rows"] if row["system"] in ("PyG, edge_index", "PyG, torch.sparse_csr", "dgcl")]
    labels = [
        row["system"] + ("" if "PyG" in row["system"] else f", {row['ranks x threads'].replace('x', ' x ')}")
        for row in rows
    ]
    colors = [GREY if label.startswith("PyG") else COLORS[0] for label in labels]
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 2.6), sharey=True)
    for axis, name, title in zip(
        axes, ("s/epoch", "peak MB/rank"), ("seconds of an epoch", "MB of a process above imports")
    ):
        bars = axis.barh(labels, [row[name] for row in rows], color=colors)
        axis.bar_label(bars, fmt="{:,.3g}" if name == "s/epoch" else "{:,.0f}", padding=3, fontsize=8)
        axis.set(title=title, xticks=[])
        axis.spines.bottom.set_visible(False)
        axis.margins(x=0.12)
    axes[0].invert_yaxis()
    return figure


PICTURES: dict[str, Callable[[], Any]] = {"two-ranks": two_ranks, "time-and-memory": time_and_memory}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent / "images"
    for name, draw in PICTURES.items():
        figure = draw()
        figure.tight_layout()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
