"""One model and graph under several strategies, each on two processes, and a report of what they took.

python examples/compare_schemes.py                        the table, and comparison/comparison.html
python examples/compare_schemes.py --output elsewhere     what has finished there is not run again
"""

import argparse

from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import NodeClassifier, compare

FEATURES, CLASSES = 32, 8


def make_model():
    """Called in each cell's processes, which import this file."""
    return NodeClassifier(GraphSAGE(FEATURES, 64, num_layers=2, out_channels=CLASSES))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", default="comparison")
    options = parser.parse_args()

    graph = {"num_nodes": options.nodes, "num_features": FEATURES, "num_classes": CLASSES}
    found = compare(
        make_model,
        {"source": "lightning_gnn.planted_partition", "source_kwargs": graph},
        [
            {"strategy": "auto", "devices": 1},  # the reference
            "dgcl",
            {"strategy": "dgcl", "codec": "int8", "label": "dgcl in 8 bits"},
        ],
        devices=2,
        epochs=options.epochs,
        output=options.output,
        trainer={"accelerator": "cpu"},
    )
    fastest = min(
        (cell for cell in found["runs"] if cell["status"] == "finished"), key=lambda cell: cell["epoch_seconds"]
    )
    print(f"Fastest here: {fastest['name']}, {fastest['epoch_seconds']:.3f} s per epoch.")
