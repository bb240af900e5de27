"""A graph that no rank holds whole: cut once and kept on disk, from which each rank maps its own part.

python examples/large_graph.py                                     on 300,000 nodes
python examples/large_graph.py --nodes 5000000 --ranks 4           for as much as memory and patience allow
python examples/large_graph.py --strategy sampling                 trained on in mini-batches of sampled neighbourhoods
"""

import argparse

import lightning as L
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import GraphDataModule, NodeClassifier
from lightning_gnn.tools.comparing.run_cell import peak_memory

FEATURES, CLASSES = 64, 16

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=300_000)
    parser.add_argument("--degree", type=float, default=10.0, help="edges per node")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", default="dgcl")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    L.seed_everything(0)
    # An import path: one process makes the graph, cuts it and ends. The next run finds the parts in the store.
    data = GraphDataModule(
        "lightning_gnn.planted_partition",
        {
            "num_nodes": options.nodes,
            "average_degree": options.degree,
            "num_features": FEATURES,
            "num_classes": CLASSES,
            "homophily": 0.9,
        },
    )
    model = NodeClassifier(GraphSAGE(FEATURES, 64, num_layers=2, out_channels=CLASSES))
    trainer = L.Trainer(
        strategy=options.strategy,
        devices=options.ranks,
        accelerator="cpu",
        max_epochs=options.epochs,
        limit_val_batches=0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=data)
    sent = trainer.callback_metrics["comm/bytes_sent"]

    rank, shard = trainer.global_rank, data.shard  # what follows runs on every rank
    mapped = sum(each.nbytes for _, each in shard.batch if hasattr(each, "nbytes"))
    print(
        f"Rank {rank} holds {shard.counts[rank]:,} nodes and their {shard.edge_counts[rank]:,} in-edges, {mapped / 1e6:.1f} MB, "
        f"and reads {len(shard.halos[rank]):,} rows of others; its process took {peak_memory() / 1e6:.0f} MB."
    )
    [result] = trainer.test(model, datamodule=data)
    if trainer.is_global_zero:
        folder = data.partition_for(trainer.strategy.layout())  # found there, not made again
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"All parts take {size / 1e6:.1f} MB on disk, in {folder}")
        print(
            f"Test accuracy {result['test_acc']:.3f} on {options.ranks} ranks, which exchanged {sent / 1e6:.2f} MB per epoch."
        )
