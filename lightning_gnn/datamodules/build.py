"""``python -m lightning_gnn.datamodules.build``: partitions one graph, described in JSON on standard input.

A separate process releases the memory of the whole graph and of the partitioner before training starts.
The last line of the output is JSON: the folder in the partition directory and whether the source drew random numbers, or the
error. The traceback goes to standard error.
The process ends with its parent, since the result is useless without the run.
"""

from __future__ import annotations

import json
import sys
import traceback

from lightning_gnn.comm.processes import end_with_parent
from lightning_gnn.datamodules.graph import GraphDataModule
from lightning_gnn.partition.layout import LayoutSpec


def main() -> None:
    request = json.load(sys.stdin)
    end_with_parent(request["parent"])
    try:
        datamodule = GraphDataModule(**request["datamodule"])
        datamodule.predicting = request["predicting"]
        vars(datamodule).update(request["loaded"])
        answer = {"folder": datamodule.build(LayoutSpec.from_dict(request["layout"])), "drew": datamodule.drew}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
