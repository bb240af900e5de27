"""Your own LightningModule with your own conv, on two processes; nothing in the model knows of ranks."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch_geometric.nn import MessagePassing
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn import GraphDataModule


class DifferenceConv(MessagePassing):
    """Each node takes the mean of a small network of itself and what its neighbour differs by."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="mean")
        self.own = torch.nn.Linear(in_channels, out_channels)
        self.message_net = torch.nn.Linear(2 * in_channels, out_channels)

    def forward(self, x, edge_index):
        return self.own(x) + self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return self.message_net(torch.cat([x_i, x_j - x_i], -1)).relu()


class OwnModule(L.LightningModule):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.first = DifferenceConv(num_features, 32)
        self.second = DifferenceConv(32, num_classes)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)

    def training_step(self, batch, batch_idx):
        out = self(batch.x, batch.edge_index)
        loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        out = self(batch.x, batch.edge_index)
        self.accuracy(out[batch.test_mask], batch.y[batch.test_mask])
        self.log("test_acc", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args()

    L.seed_everything(0)
    data = GraphDataModule(
        "lightning_gnn.planted_partition", {"num_nodes": 2_000, "num_features": 32, "num_classes": 8, "seed": 0}
    )
    model = OwnModule(num_features=32, num_classes=8)
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
    if trainer.is_global_zero:
        print(f"Test accuracy {result['test_acc']:.3f}")
