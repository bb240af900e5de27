"""``lightning-gnn compare`` and ``lightning-gnn demo``: measure strategies on one model and graph.

``demo`` compares three strategies on a synthetic graph.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile

from lightning_gnn.tools import comparing
from lightning_gnn.tools.comparing.cells import Comparison, add_task, make_cells
from lightning_gnn.tools.comparing.run import check, run
from lightning_gnn.tools.parser import Parser

USAGE = "lightning-gnn compare --config FILE [--output FOLDER] [--rerun failed] [--KEY VALUE ...]"
DESCRIPTION = (
    "Train one model on one graph under several strategies, each in processes of its own, and compare what they took. The "
    "sections model and data are those of fit. docs/compare.md explains keys and columns."
)


def compare(arguments: Sequence[str]) -> None:
    parser = compare_parser()
    config = parser.parse_args(list(arguments))
    given = json.loads(parser.dump(config, format="json"))
    for section in ("model", "data"):
        if given.get(section) is None:
            parser.error(f"the section {section} is missing: pass a file for fit that has it, --config FILE.")
    given.pop("config", None)
    devices, output = given.pop("devices"), Path(given.pop("output"))
    try:
        cells = make_cells(given.pop("runs", None) or [], devices)
        comparison = check(Comparison(**given, runs=cells, output=output))
    except ValueError as error:
        parser.error(str(error))
    try:
        found = run(comparison)
    except OSError as error:
        sys.exit(f"error: {error}")
    sys.exit(any(cell["status"] != "finished" for cell in found["runs"]))


def compare_parser() -> Parser:
    """Returns the parser of the command's options; most are arguments of :func:`~lightning_gnn.compare`."""
    parser = Parser(prog="lightning-gnn compare", usage=USAGE, description=DESCRIPTION)
    parser.add_argument("-c", "--config", action=ActionConfigFile, help="YAML file with any of these keys.")
    add_task(parser)
    parser.add_argument("--runs", type=list[str | dict[str, Any]], help="What to compare, the reference first: docs/compare.md.")
    parser.add_argument("--devices", type=int | list[int], default=2, help="Ranks of cells that do not say; each of a list.")
    parser.add_argument("--output", type=str, default="comparison", help="Folder for results; those there are used.")
    own: set[str | int] = {"model", "data", "runs", "devices", "output", "trainer"}
    parser.add_function_arguments(comparing.compare, as_group=False, skip=own)
    parser.add_argument("--trainer", type=dict[str, Any], default={}, help="More arguments of the Trainer.")
    return parser


DEMO = (
    "Train a GraphSAGE on a graph made on the spot, on one device and then under dgcl, vertex_cut and sampling on two processes, "
    "each live; print a table, and leave plots in one page. About a minute on two cores."
)
FEATURES, CLASSES = 32, 8


def demo(arguments: Sequence[str]) -> None:
    parser = Parser(prog="lightning-gnn demo", description=DEMO)
    parser.add_argument("--nodes", type=int, default=20_000, help="Of the graph, whose nodes have 20 edges in the mean.")
    parser.add_argument("--epochs", type=int, default=10, help="Of each strategy.")
    parser.add_argument("--output", type=str, default="demo", help="Folder for the page, and for results.")
    asked = parser.parse_args(list(arguments))
    sage = {"in_channels": FEATURES, "hidden_channels": 64, "num_layers": 2, "out_channels": CLASSES}
    graph = {"num_nodes": asked.nodes, "num_features": FEATURES, "num_classes": CLASSES}
    try:
        found = comparing.compare(
            {
                "class_path": "lightning_gnn.NodeClassifier",
                "init_args": {"model": {"class_path": "torch_geometric.nn.models.GraphSAGE", "init_args": sage}},
            },
            {"source": "lightning_gnn.planted_partition", "source_kwargs": graph},
            [
                {"strategy": "auto", "devices": 1, "label": "one device"},
                "dgcl",
                "vertex_cut",
                {"strategy": "sampling", "num_neighbors": [10, 5], "batch_size": 1024},
            ],
            devices=2,
            epochs=asked.epochs,
            output=asked.output,
            trainer={"accelerator": "cpu"},
        )
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    sys.exit(any(cell["status"] != "finished" for cell in found["runs"]))
