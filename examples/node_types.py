"""Authors, papers and venues, each with features of its own: a HeteroData on two processes, whole, by `HeteroConv`.

``--strategy`` names another scheme: vertex_cut, spmm_1d, sampling, or auto for one device.
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HeteroConv, SAGEConv
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn import GraphDataModule

AUTHORS, PAPERS, VENUES, CLASSES, HIDDEN = 1_000, 3_000, 20, 4, 32


def graph():
    """Authors write about one field, venues publish one; papers are found by who writes and publishes them."""
    g = torch.Generator().manual_seed(0)
    data = HeteroData()
    field = torch.randint(0, CLASSES, (AUTHORS,), generator=g)
    data["author"].x = F.one_hot(field, CLASSES) * 0.5 + torch.randn(AUTHORS, CLASSES, generator=g)
    by = torch.randint(0, AUTHORS, (PAPERS,), generator=g)
    of_field = (torch.randint(0, VENUES // CLASSES, (PAPERS,), generator=g) * CLASSES + field[by]) % VENUES
    data["paper"].x = torch.randn(PAPERS, 8, generator=g)
    data["paper"].y = field[by]
    data["venue"].num_nodes = VENUES
    papers = torch.arange(PAPERS)
    data["author", "writes", "paper"].edge_index = torch.stack([by, papers])
    data["paper", "by", "author"].edge_index = torch.stack([papers, by])
    data["venue", "publishes", "paper"].edge_index = torch.stack([of_field, papers])
    data["paper", "in", "venue"].edge_index = torch.stack([papers, of_field])
    return data


class Model(torch.nn.Module):
    def __init__(self, edge_types):
        super().__init__()
        self.venues = torch.nn.Embedding(VENUES, 8)  # venues have no features
        self.convs = torch.nn.ModuleList(
            HeteroConv({kind: self.conv(kind) for kind in edge_types}, aggr="sum") for _ in range(2)
        )
        self.lin = torch.nn.LazyLinear(CLASSES)

    def conv(self, kind):
        if kind[0] == "venue":
            return GATConv((-1, -1), HIDDEN, add_self_loops=False)
        return SAGEConv((-1, -1), HIDDEN)

    def forward(self, batch):
        x = {**batch.x_dict, "venue": self.venues(batch["venue"].n_id)}
        for conv in self.convs:
            x = {name: rows.relu() for name, rows in conv(x, batch.edge_index_dict).items()}
        return self.lin(x["paper"])


class Papers(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch, batch_idx):
        paper = batch["paper"]
        loss = F.cross_entropy(self.model(batch)[paper.train_mask], paper.y[paper.train_mask])
        self.log("train_loss", loss, prog_bar=True, batch_size=int(paper.train_mask.sum()))
        return loss

    def test_step(self, batch, batch_idx):
        paper = batch["paper"]
        self.accuracy(self.model(batch)[paper.test_mask], paper.y[paper.test_mask])
        self.log("test_acc", self.accuracy, batch_size=int(paper.test_mask.sum()))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--strategy", default="dgcl")
    options = parser.parse_args()

    L.seed_everything(0)
    whole = graph()
    model = Model(whole.edge_types)
    whole["venue"].n_id = torch.arange(VENUES)
    with torch.no_grad():
        model(whole)  # layers of -1 columns look at their input once
    del whole["venue"].n_id
    data = GraphDataModule(whole, split=(0.3, 0.1, 0.6), input_type="paper")
    trainer = L.Trainer(
        strategy=options.strategy,
        devices=1 if options.strategy == "auto" else 2,
        accelerator="cpu",
        max_epochs=options.epochs,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
    )
    papers = Papers(model)
    trainer.fit(papers, datamodule=data)
    [result] = trainer.test(papers, datamodule=data)
    if trainer.is_global_zero:
        print(f"Test accuracy {result['test_acc']:.3f}")
