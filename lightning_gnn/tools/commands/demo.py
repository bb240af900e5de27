"""``lightning-gnn demo``: three strategies on a graph made on the spot."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning_gnn.tools.comparing import compare
from lightning_gnn.tools.parser import Parser

DESCRIPTION = (
    "Train a GraphSAGE on a graph made on the spot, on one device and then under dgcl, vertex_cut and sampling on two processes, "
    "each live; print a table, and leave plots in one page. About a minute on two cores."
)
FEATURES, CLASSES = 32, 8


def demo(arguments: Sequence[str]) -> None:
    parser = Parser(prog="lightning-gnn demo", description=DESCRIPTION)
    parser.add_argument("--nodes", type=int, default=20_000, help="Of the graph, whose nodes have 20 edges in the mean.")
    parser.add_argument("--epochs", type=int, default=10, help="Of each strategy.")
    parser.add_argument("--output", type=str, default="demo", help="Folder for the page, and for results.")
    asked = parser.parse_args(list(arguments))
    sage = {"in_channels": FEATURES, "hidden_channels": 64, "num_layers": 2, "out_channels": CLASSES}
    graph = {"num_nodes": asked.nodes, "num_features": FEATURES, "num_classes": CLASSES}
    try:
        found = compare(
            {
                "class_path": "lightning_gnn.NodeClassifier",
                "init_args": {"model": {"class_path": "torch_geometric.nn.models.GraphSAGE", "init_args": sage}},
            },
            {"source": "lightning_gnn.planted_partition", "source_args": graph},
            [
                {"strategy": "auto", "devices": 1, "label": "one device"},
                "dgcl",
                "vertex_cut",
                {"strategy": "sampling", "fanouts": [10, 5], "batch_size": 1024},
            ],
            devices=2,
            epochs=asked.epochs,
            output=asked.output,
            trainer={"accelerator": "cpu"},
        )
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    sys.exit(any(cell["status"] != "finished" for cell in found["cells"]))
