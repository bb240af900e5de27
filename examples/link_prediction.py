"""Which nodes are joined: a GraphSAGE and a LinkPredictor on two processes.

python examples/link_prediction.py                        on the whole graph
python examples/link_prediction.py --strategy sampling    in mini-batches of edges
"""

import argparse

import lightning as L
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import GraphDataModule, LinkPredictor, planted_partition, split_edges

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="dgcl")
    parser.add_argument("--nodes", type=int, default=2_000)
    parser.add_argument("--epochs", type=int, default=40)
    options = parser.parse_args()

    L.seed_everything(0)
    graph = planted_partition(options.nodes, num_classes=8, homophily=0.95, noise=1.0)

    data = GraphDataModule(split_edges(graph, val=0.05, test=0.1))
    model = LinkPredictor(GraphSAGE(graph.num_features, 32, num_layers=2, out_channels=32))
    trainer = L.Trainer(
        strategy=options.strategy,
        devices=2,
        accelerator="cpu",
        max_epochs=options.epochs,
        check_val_every_n_epoch=10,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    if trainer.is_global_zero:
        print(f"Test MRR {result['test_mrr']:.3f}, hits@10 {result['test_hits@10']:.3f}, among 50 other nodes each.")
