"""CDFGNN's ablation: messages, bytes, epoch time and accuracy of a vertex cut with and without cache and codec.

Rows, bytes and test accuracy, on ranks that are threads of one process::

    python benchmarks/vertex_cut.py [--graphs computers github cornell5 power-law] [--seeds 0 1 2] [--jobs 4]
        [--json FILE]

Epoch time on two emulated hosts of two ranks, by netlab (root only), a host's link 2.7 times as slow as one inside::

    python benchmarks/vertex_cut.py --netlab NETLAB.py --epochs 20 [--cells baseline largest dgcl] [--json FILE]

A GCN of 2 layers and 64 hidden columns, Adam at 0.01, splits of 60/20/20 by seed. Rows and bytes are means over the epochs but
for the first, in which what layers keep travels too, and the last, which is exact.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from itertools import product
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import mean
from typing import Any

from common import SHARED, report, run_on_hosts, run_row
from vertex_cut_runs import (
    CELLS,
    GRAPHS,
    OTHERS,
    REDRAWN,
    THRESHOLDS,
    load_graph,
    single,
    summary,
    train,
    train_in_process,
)

USUAL = ("computers", "github", "cornell5", "power-law")
WEIGHTS = (0.1, 0.0)
BESIDE = {"full-batch": 1, "mini-batch": 10}
"""Runs on a single device, by the parts of ``RandomNodeLoader``."""
COLUMNS = [
    "graph",
    "cell",
    "host weight",
    "rows",
    "% fewer",
    "MB",
    "% fewer bytes",
    "ms/epoch",
    "test acc",
    "points",
    "by seed",
]


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns what was measured, in this process or, on a cluster, as one of its ranks."""
    cluster = "NETLAB_TOPO" in os.environ
    found = []
    for graph in options.graphs:
        root = str(Path(options.root) / GRAPHS[graph][0])
        for seed in options.seeds:
            for cell in options.cells:
                of_ebv = cell not in (*BESIDE, *OTHERS)
                for weight in options.weights if of_ebv else options.weights[:1]:
                    row: dict[str, Any] = {"graph": graph, "cell": cell, "host weight": weight, "seed": seed}
                    arguments = (CELLS | REDRAWN | THRESHOLDS).get(cell, {})
                    if of_ebv:
                        arguments = {"partition": "ebv", **arguments, "host_weight": weight}
                    if cell in BESIDE:
                        row |= single(graph, root, seed, options.epochs, BESIDE[cell])
                    elif cluster:
                        ran = train(graph, root, arguments, seed, options.epochs, False, True)
                        if ran is None:
                            continue
                        row |= {**summary(ran), "report": ran["report"]}
                    else:
                        given = arguments, seed, options.epochs, options.dropout, options.layers
                        ran = train_in_process(graph, root, *given)
                        row |= {**summary(ran), "epochs": ran["epochs"]}
                    row["load"] = os.getloadavg()[0]
                    found.append(row)
                    print({name: value for name, value in row.items() if name not in ("epochs", "report")}, flush=True)
    return found


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns what a run in a process of its own, or one on the cluster, has measured."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_GNN_STORE"] = f"{folder}/store"
        for source in {GRAPHS[graph][0] for graph in options.graphs} - {""}:
            shutil.copytree(SHARED / "data" / source, f"{folder}/{source}")  # PyG writes beside the data
        arguments = ["--graphs", *options.graphs, "--cells", *options.cells, "--epochs", str(options.epochs)]
        arguments += ["--seeds", *map(str, options.seeds), "--weights", *map(str, options.weights), "--root", folder]
        arguments += ["--dropout", str(options.dropout), "--layers", str(options.layers)]
        for graph in options.graphs:  # PyG's files are made once, not by several processes at a time
            load_graph(graph, f"{folder}/{GRAPHS[graph][0]}")
        if options.netlab:
            return run_on_hosts(options.netlab, options.inner_mbit, __file__, arguments)

        def of(one: tuple[str, int]) -> list[dict[str, Any]]:
            row_file = Path(folder) / f"{one[0].replace('/', '-')}-{one[1]}.json"
            chosen = ["--graphs", one[0], "--seeds", str(one[1])]  # the last ones count
            run_row(__file__, [*arguments, *chosen, "--row", str(row_file)], 1, timeout=86400)
            return json.loads(row_file.read_text())

        with ThreadPool(options.jobs) as pool:
            return [row for rows in pool.imap(of, product(options.graphs, options.seeds)) for row in rows]


def table(found: list[dict[str, Any]], timed: bool) -> list[dict[str, Any]]:
    """Returns a line for each graph, cell and weight: means over seeds, beside the exact run of the same seed."""
    lines = []
    for graph, cell, weight in dict.fromkeys((row["graph"], row["cell"], row["host weight"]) for row in found):
        chosen = [row for row in found if (row["graph"], row["cell"], row["host weight"]) == (graph, cell, weight)]
        exact = {row["seed"]: row for row in found if row["graph"] == graph and row["cell"] == "baseline"}
        line: dict[str, Any] = {"graph": graph, "cell": cell, "host weight": weight, "of seeds": len(chosen)}
        if timed:
            line["ms/epoch"] = 1e3 * mean(row["seconds"] for row in chosen)
        if "rows" in chosen[0]:
            line |= {"rows": mean(row["rows"] for row in chosen), "MB": mean(row["bytes"] for row in chosen) / 1e6}
        if chosen[0].get("test_acc") is not None:
            line["test acc"] = mean(row["test_acc"] for row in chosen)
        if exact and "rows" in line:
            line["% fewer"] = round(100 * (1 - line["rows"] / mean(row["rows"] for row in exact.values())), 6)
            line["% fewer bytes"] = round(
                100 * (1 - line["MB"] * 1e6 / mean(row["bytes"] for row in exact.values())), 6
            )
        both = [row for row in chosen if row["seed"] in exact and row.get("test_acc") is not None]
        if both:
            points = [100 * (row["test_acc"] - exact[row["seed"]]["test_acc"]) for row in both]
            line |= {
                "points": round(mean(points), 2),
                "by seed": ", ".join(f"{round(each, 2) + 0.0:+.2f}" for each in points),
            }
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", choices=[*GRAPHS], default=USUAL)
    usual = [cell for cell in CELLS if cell not in OTHERS]
    every = [*CELLS, *REDRAWN, *THRESHOLDS, *BESIDE]
    parser.add_argument("--cells", nargs="+", choices=every, default=[*usual, *BESIDE])
    parser.add_argument("--weights", nargs="+", type=float, default=WEIGHTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--dropout", type=float, default=0.0, help="of the model; not on emulated hosts")
    parser.add_argument("--layers", type=int, default=2, help="of the model; not on emulated hosts")
    parser.add_argument("--jobs", type=int, default=1, help="graphs and seeds at a time; not on emulated hosts")
    parser.add_argument("--json")
    parser.add_argument("--netlab", help="netlab.py: measure epoch time on emulated hosts")
    parser.add_argument("--inner-mbit", type=float, default=135.0, help="of a link inside a host")
    parser.add_argument(
        "--read", nargs="+", type=Path, help="measure nothing: the table of what --json wrote"
    )
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        found = run(options)
        if found:
            Path(options.row).write_text(json.dumps(found))
            print(json.dumps(True))
        return
    found = [row for path in options.read or () for row in json.loads(path.read_text())["runs"]] or measured(options)
    lines = table(found, timed=options.netlab is not None)
    where = "on two emulated hosts" if options.netlab else "ranks as threads"
    title = f"GCN of {options.layers} layers, {options.epochs} epochs, 4 ranks, {where}"
    columns = [name for name in COLUMNS if any(line.get(name) is not None for line in lines)]
    report(title, lines, columns, options.json, runs=found)


if __name__ == "__main__":
    main()
