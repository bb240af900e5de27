"""Heat in a plate: one triangular mesh, and a sample for each state of a simulation; MeshGraphNet, whose blocks update edges.

python examples/mesh_simulation.py [--devices 4 --graph-ranks 2] [--picture mesh.png]

Graph ranks have parts of the plate, data ranks have different states. Losses equal the losses of one device.
"""

import argparse

import lightning as L
import torch
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.transforms import FaceToEdge

from lightning_gnn import DGCLStrategy, GraphDataModule


def triangular_mesh(points_per_side):
    """A unit square of triangles, with moved nodes inside."""
    g, n = torch.Generator().manual_seed(0), points_per_side
    line = torch.linspace(0, 1, n)
    places = torch.cartesian_prod(line, line)
    boundary = ((places == 0) | (places == 1)).any(1)
    places = places + ~boundary[:, None] * 0.6 / n * (torch.rand(n * n, 2, generator=g) - 0.5)
    low = torch.cartesian_prod(torch.arange(n - 1), torch.arange(n - 1)) @ torch.tensor([n, 1])
    face = torch.cat([torch.stack([low, low + 1, low + n]), torch.stack([low + 1, low + n, low + n + 1])], 1)
    mesh = FaceToEdge(remove_faces=False)(Data(pos=places, face=face, num_nodes=n * n))
    offsets = places[mesh.edge_index[0]] - places[mesh.edge_index[1]]
    edge_attr = n * torch.cat([offsets, offsets.norm(dim=1, keepdim=True)], 1)
    return Data(edge_index=mesh.edge_index, edge_attr=edge_attr, wall=boundary, num_nodes=n * n), places, face


class States(torch.utils.data.Dataset):
    """Samples: ``x [N, 2]``, temperature and heating, and ``y [N, 1]``, the change of the temperature in the next step."""

    def __init__(self, mesh, places, num_steps, seed):
        g = torch.Generator().manual_seed(seed)
        source, target = mesh.edge_index
        conductance = 1 / mesh.edge_attr[:, 2] ** 2
        temperature, self.x, self.y = torch.zeros(len(places)), [], []
        for step in range(num_steps):
            if step % 10 == 0:  # a lamp moves
                lamp = torch.rand(2, generator=g)
            heating = torch.exp(-40 * (places - lamp).square().sum(1))
            flow = conductance * (temperature[source] - temperature[target])
            change = 0.05 * torch.zeros_like(temperature).index_add(0, target, flow) + 0.2 * heating
            change = torch.where(mesh.wall, -temperature, change)  # walls stay cold
            self.x.append(torch.stack([temperature, heating], 1))
            self.y.append(10 * change.view(-1, 1))
            temperature = temperature + change

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


def mlp(columns, size):
    layers = torch.nn.Linear(columns, size), torch.nn.ReLU(), torch.nn.Linear(size, size), torch.nn.LayerNorm(size)
    return torch.nn.Sequential(*layers)


class Block(MessagePassing):
    """Block of MeshGraphNet: updates edges, then nodes."""

    def __init__(self, size):
        super().__init__(aggr="sum")
        self.of_edges, self.of_nodes = mlp(3 * size, size), mlp(2 * size, size)

    def forward(self, x, edge_index, edges):
        new_edges = self.edge_updater(edge_index, x=x, edges=edges)
        return x + self.of_nodes(torch.cat([x, self.propagate(edge_index, edges=new_edges, x=x)], -1)), edges + new_edges

    def edge_update(self, x_i, x_j, edges):
        return self.of_edges(torch.cat([x_i, x_j, edges], -1))

    def message(self, edges):
        return edges


class MeshGraphNet(torch.nn.Module):
    def __init__(self, size=16, num_blocks=3):
        super().__init__()
        self.nodes, self.edges, self.out = mlp(3, size), mlp(3, size), torch.nn.Linear(size, 1)
        self.blocks = torch.nn.ModuleList(Block(size) for _ in range(num_blocks))

    def forward(self, batch):
        wall = batch.wall.to(batch.x.dtype).view(-1, 1)
        x = self.nodes(torch.cat([batch.x, wall.expand(*batch.x.shape[:-1], 1)], -1))
        edges = self.edges(batch.edge_attr)
        edges = edges.expand(x.size(0), *edges.shape)  # each sample has its own edges
        for block in self.blocks:
            x, edges = block(x, batch.edge_index, edges)
        return self.out(x)


class Simulator(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = MeshGraphNet(), []

    def training_step(self, batch, batch_idx):
        inside = ~batch.wall.view(-1, 1)
        loss = ((self.model(batch) - batch.y).square() * inside).mean()
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch.x))
        return loss

    def on_train_epoch_end(self):
        self.print(f"Epoch {self.current_epoch}: mean square error {self.trainer.callback_metrics['train_loss']:.5f}")

    def predict_step(self, batch, batch_idx):
        return self.model(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.003)


def make(points_per_side=40, num_steps=40, global_batch_size=4):
    """Returns the module, the data, and the samples that are predicted, with the places of nodes and the triangles."""
    L.seed_everything(0)
    mesh, places, face = triangular_mesh(points_per_side)
    train, test = States(mesh, places, num_steps, 0), States(mesh, places, 8, 1)
    data = GraphDataModule(mesh, samples=train, predict_samples=test, global_batch_size=global_batch_size)
    return Simulator(), data, test, places, face


def draw(file, prediction, truth, places, face):
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="tight")
    for axis, values, title in zip(axes, (truth, prediction), ("Simulated", "Predicted")):
        axis.tripcolor(*places.t(), face.t(), values, vmin=float(truth.min()), vmax=float(truth.max()), shading="gouraud")
        axis.set(title=f"{title} change of temperature", aspect="equal", xticks=[], yticks=[])
    figure.savefig(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--graph-ranks", type=int, default=2)
    parser.add_argument("--points", type=int, default=40, help="points per side of the plate")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--picture", help="file for a picture of a prediction")
    options = parser.parse_args()

    module, data, test, places, face = make(options.points)
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
            inside = ((places > 0) & (places < 1)).all(1)
            draw(options.picture, predictions[-1, :, 0].where(inside, 0), test[-1]["y"][:, 0].where(inside, 0), places, face)
