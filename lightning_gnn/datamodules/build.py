"""``python -m lightning_gnn.datamodules.build``: partitions one graph, described in JSON on standard input.

A process of its own, so that the whole graph and the partitioner's memory are gone when training starts.
Prints JSON as its last line: the folder under the store and whether the source drew random numbers, or the error, whose
traceback goes to standard error.
Ends with the process that has started it: what it makes would be of no use to a run that is gone, and nobody would end it.
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
