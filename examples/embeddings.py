"""A graph whose nodes have no features: each learns a row of its own, on two processes, in sampled mini-batches."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch_geometric.nn.models import GraphSAGE
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn import DistributedEmbedding, GraphDataModule, SamplingStrategy, planted_partition

NODES, CLASSES = 2_000, 4


def graph():
    data = planted_partition(num_nodes=NODES, num_classes=CLASSES, homophily=0.9)
    data.x = torch.zeros(NODES, 1)  # a graph has some x; this one says nothing
    return data


class Embedded(L.LightningModule):
    def __init__(self, staleness: int = 0) -> None:
        super().__init__()
        self.embedding = DistributedEmbedding(NODES, 32, lr=0.05, staleness=staleness)
        self.model = GraphSAGE(32, 32, num_layers=2, out_channels=CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, batch):
        return self.model(self.embedding(batch.n_id), batch.edge_index)

    def training_step(self, batch, batch_idx):
        out, y = self(batch)[batch.train_mask], batch.y[batch.train_mask]
        loss = F.cross_entropy(out, y)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(y))
        return loss

    def test_step(self, batch, batch_idx):
        self.accuracy(self(batch)[batch.test_mask], batch.y[batch.test_mask])
        self.log("test_acc", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--staleness", type=int, default=0)
    options = parser.parse_args()

    L.seed_everything(0)
    data, model = GraphDataModule(graph), Embedded(options.staleness)
    trainer = L.Trainer(
        strategy=SamplingStrategy(num_neighbors=[10, 10], batch_size=100),
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
