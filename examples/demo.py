"""A PyG model on two processes, on a graph made on the spot: what `make demo` runs."""

import lightning as L
from torch_geometric.nn.models import GCN

from lightning_gnn import GraphDataModule, NodeClassifier

if __name__ == "__main__":
    L.seed_everything(0)
    data = GraphDataModule(
        "lightning_gnn.planted_partition", {"num_nodes": 20_000, "num_features": 64, "num_classes": 8, "seed": 0}
    )
    model = NodeClassifier(GCN(in_channels=64, hidden_channels=64, num_layers=2, out_channels=8, dropout=0.5))
    trainer = L.Trainer(
        strategy="dgcl",
        devices=2,
        accelerator="cpu",
        max_epochs=30,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=data)
    sent = trainer.callback_metrics["comm/bytes_sent"]
    [result] = trainer.test(model, datamodule=data)
    if trainer.is_global_zero:
        print(f"Test accuracy {result['test_acc']:.3f} on 2 ranks, which exchanged {sent / 1e6:.2f} MB per epoch.")
