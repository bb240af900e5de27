"""Maps from a few observations: from irregular sites to a mesh and back, to the sites without an observation.

python examples/observations.py [--devices 4 --graph-ranks 2] [--picture observations.png]

A sample is one field, observed at other sites each time. Graph ranks have parts of both sites and mesh, data ranks have different
fields. Losses equal the losses of one device, although each sample has another number of observations.
"""

import argparse

import lightning as L
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphConv
from torch_geometric.utils import grid

from lightning_gnn import DGCLStrategy, GraphDataModule

UP, ON, DOWN = ("site", "to", "mesh"), ("mesh", "to", "mesh"), ("mesh", "to", "site")


def network(num_sites, points_per_side):
    """Random sites in the unit square, a square mesh, and edges between each site and the four nearest nodes of the mesh."""
    graph, g, n = HeteroData(), torch.Generator().manual_seed(0), points_per_side
    edge_index, mesh = grid(n, n)
    sites, mesh = torch.rand(num_sites, 2, generator=g), mesh.to(torch.get_default_dtype()) / (n - 1)
    graph["site"].place, graph["site"].num_nodes, graph["mesh"].num_nodes = sites, num_sites, n * n
    distances, nearest = torch.cdist(sites, mesh).topk(4, largest=False)
    up = torch.stack([torch.arange(num_sites).repeat_interleave(4), nearest.flatten()])
    weight = torch.exp(-n * distances.flatten())
    graph[UP].edge_index, graph[UP].edge_weight = up, weight
    graph[ON].edge_index = edge_index
    graph[DOWN].edge_index, graph[DOWN].edge_weight = up.flip(0), weight
    return graph


class Fields(torch.utils.data.Dataset):
    """Samples: ``x [N, 2]`` of the sites, value and 1 if a site is observed, else zeros; values ``y [N]``; ``seen [N]``."""

    def __init__(self, sites, size, seed):
        self.sites, self.size, self.seed = sites, size, seed

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(self.seed + index)
        waves, shifts = 4 * torch.randn(2, 6, generator=g), 6.3 * torch.rand(6, generator=g)
        y = torch.sin(self.sites @ waves + shifts).mean(1)
        seen = torch.rand(len(y), generator=g) < 0.6
        return {"site": {"x": torch.stack([y, torch.ones(len(y))], 1) * seen.view(-1, 1), "y": y, "seen": seen}}


class Interpolation(torch.nn.Module):
    """Encoder to the mesh, processors, and decoder to the sites."""

    def __init__(self, size=16, num_processors=4):
        super().__init__()
        self.encoder = GraphConv((2, 1), size, aggr="add")
        self.processors = torch.nn.ModuleList(GraphConv(size, size, aggr="mean") for _ in range(num_processors))
        self.decoder, self.out = GraphConv((size, 2), size, aggr="add"), torch.nn.Linear(size, 1)

    def forward(self, batch):
        x = batch["site"].x
        nothing = x.new_zeros(x.size(0), batch["mesh"].num_nodes, 1)  # the mesh itself has no values
        mesh = self.encoder((x, nothing), batch[UP].edge_index, batch[UP].edge_weight).tanh()
        for processor in self.processors:
            mesh = mesh + processor(mesh, batch[ON].edge_index).tanh()
        return self.out(self.decoder((mesh, x), batch[DOWN].edge_index, batch[DOWN].edge_weight).tanh()).squeeze(-1)


class Maps(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = Interpolation(), []

    def training_step(self, batch, batch_idx):
        site = batch["site"]
        error = (self.model(batch) - site.y).square()
        loss = (error * ~site.seen).sum() / (~site.seen).sum()
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(site.x))
        return loss

    def on_train_epoch_end(self):
        self.print(f"Epoch {self.current_epoch}: squared error {self.trainer.callback_metrics['train_loss']:.4f}")

    def predict_step(self, batch, batch_idx):
        return self.model(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def make(num_sites=1000, points_per_side=32, num_samples=64, global_batch_size=4):
    """Returns the module, the data, and the samples that are predicted."""
    L.seed_everything(0)
    graph = network(num_sites, points_per_side)
    train, test = (Fields(graph["site"].place, size, seed) for size, seed in ((num_samples, 0), (4, 10_000)))
    return Maps(), GraphDataModule(graph, samples=train, predict_samples=test, global_batch_size=global_batch_size), test


def draw(file, prediction, sample, places):
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10, 3.3), layout="tight", sharey=True)
    y, seen = sample["y"], sample["seen"]
    for axis, of, values, title in zip(axes, (seen, ~seen, ~seen), (y, y, prediction), ("Observed", "Truth", "Prediction")):
        axis.scatter(*places[of].t(), c=values[of], s=8, vmin=float(y.min()), vmax=float(y.max()))
        axis.set(title=title, aspect="equal")
    figure.savefig(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--graph-ranks", type=int, default=2)
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--picture", help="file for a picture of a prediction")
    options = parser.parse_args()

    module, data, test = make(options.sites)
    trainer = L.Trainer(
        strategy=DGCLStrategy(graph_ranks=options.graph_ranks) if options.devices > 1 else "auto",
        devices=options.devices,
        accelerator="cpu",
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, datamodule=data)
    if options.picture:
        predictions = torch.cat(trainer.predict(module, datamodule=data))
        if trainer.is_global_zero:
            draw(options.picture, predictions[0], test[0]["site"], test.sites)
