"""A ready LightningModule around a ready PyG model, on two processes.

python examples/library.py                          on a graph made on the spot
python examples/library.py --root data/planetoid    on Cora, which PyG downloads to that folder unless it is there
"""

import argparse

import lightning as L
from torch_geometric.datasets import Planetoid
from torch_geometric.nn.models import GAT

from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder of PyG's Planetoid datasets")
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()

    L.seed_everything(0)
    graph = Planetoid(options.root, "Cora")[0] if options.root else planted_partition(2_000, num_classes=7)

    data = GraphDataModule(graph)
    model = NodeClassifier(GAT(graph.num_features, 64, num_layers=2, out_channels=7, heads=4))
    trainer = L.Trainer(
        strategy="dgcl",
        devices=2,
        accelerator="cpu",
        max_epochs=options.epochs,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    [logits] = trainer.predict(model, datamodule=data)  # all nodes, original order
    if trainer.is_global_zero:
        right = (logits.argmax(-1) == graph.y)[graph.test_mask].float().mean()
        print(f"Test accuracy {result['test_acc']:.3f}; from the predictions of all {len(logits)} nodes {right:.3f}.")
