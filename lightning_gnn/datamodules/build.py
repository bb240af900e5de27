"""``python -m lightning_gnn.datamodules.build``: partitions one graph, described in JSON on standard input.

A process of its own, so that the whole graph and the partitioner's memory are gone when training starts.
Prints the name of the folder under the store as its last line.
"""

from __future__ import annotations

import json
import sys

from lightning_gnn.datamodules.graph import GraphDataModule
from lightning_gnn.partition.layout import LayoutSpec


def main() -> None:
    request = json.load(sys.stdin)
    kind, parts = request["layout"]
    print(GraphDataModule(**request["datamodule"]).build(LayoutSpec(kind, parts)))


if __name__ == "__main__":
    main()
