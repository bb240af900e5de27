"""Tracers in the wind on a sphere: from a grid to an icosahedral mesh and back, as in GraphCast; gradients through four steps.

python examples/weather.py [--devices 4 --graph-ranks 2] [--picture weather.png]

A sample is the weather at the nodes of the grid. Graph ranks have parts of the globe, of both grid and mesh, and data ranks have
different samples. Losses equal the losses of one device, although a root of a mean is not the mean of the ranks' roots.
"""

import argparse

import lightning as L
import torch
from torch_geometric.data import HeteroData
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import coalesce

from lightning_gnn import DGCLStrategy, GraphDataModule

STEPS, ANGLE = 4, 0.15  # steps of a rollout; radians that the wind turns the air per step
UP, ON, DOWN = ("grid", "to", "mesh"), ("mesh", "to", "mesh"), ("mesh", "to", "grid")


def icosahedral_mesh(num_refinements):
    """Nodes on the unit sphere, and the edges of all refinements; 2,562 nodes after four."""
    golden = (1 + 5**0.5) / 2
    corners = [(0, a, b * golden) for a in (-1, 1) for b in (-1, 1)]
    places = torch.tensor([point[turn:] + point[:turn] for turn in range(3) for point in corners])
    near = torch.cdist(places, places) < 2.1
    triangles = [(a, b, c) for a in range(12) for b in range(a) for c in range(b) if near[a, b] and near[b, c] and near[a, c]]
    points, edges = [point / point.norm() for point in places], []
    for level in range(num_refinements + 1):
        edges += [pair for a, b, c in triangles for pair in ((a, b), (b, c), (c, a))]
        if level == num_refinements:
            break
        middles, finer = {}, []
        for triangle in triangles:
            mids = []
            for a, b in zip(triangle, triangle[1:] + triangle[:1]):
                key = min(a, b), max(a, b)
                if key not in middles:
                    middles[key] = len(points)
                    points.append((points[a] + points[b]) / (points[a] + points[b]).norm())
                mids.append(middles[key])
            (a, b, c), (ab, bc, ca) = triangle, mids
            finer += [(a, ab, ca), (b, bc, ab), (c, ca, bc), (ab, bc, ca)]
        triangles = finer
    places, both = torch.stack(points), torch.tensor(edges).t()
    return places, coalesce(torch.cat([both, both.flip(0)], 1), num_nodes=len(places))


def globe(num_refinements):
    """A grid of latitudes and longitudes, a mesh, and edges between each node of the grid and the three nearest of the mesh."""
    graph, num_latitudes = HeteroData(), 9 * 2**num_refinements // 4
    latitudes = ((torch.arange(num_latitudes) + 0.5) / num_latitudes - 0.5) * torch.pi
    north, east = torch.meshgrid(latitudes, torch.arange(2 * num_latitudes) * torch.pi / num_latitudes, indexing="ij")
    grid = torch.stack([north.cos() * east.cos(), north.cos() * east.sin(), north.sin()], -1).view(-1, 3)
    mesh, edge_index = icosahedral_mesh(num_refinements)
    nearest = torch.cdist(grid, mesh).topk(3, largest=False).indices.flatten()
    up = torch.stack([torch.arange(len(grid)).repeat_interleave(3), nearest])
    for name, places in (("grid", grid), ("mesh", mesh)):
        graph[name].place, graph[name].num_nodes = places, len(places)
    graph["grid"].area = north.cos().view(-1, 1) / north.cos().mean()
    for kind, edges in ((UP, up), (ON, edge_index), (DOWN, up.flip(0))):
        offsets = graph[kind[0]].place[edges[0]] - graph[kind[2]].place[edges[1]]
        graph[kind].edge_index, graph[kind].edge_attr = edges, torch.cat([offsets, offsets.norm(dim=1, keepdim=True)], 1)
    return graph


class Weathers(torch.utils.data.Dataset):
    """Samples: ``x [N, 2]`` of the grid, two tracers, and ``y [4, N, 2]``, their values in the next steps."""

    def __init__(self, places, size, seed):
        self.places, self.size, self.seed = places, size, seed

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(self.seed + index)
        clouds = torch.nn.functional.normalize(torch.randn(2, 5, 3, generator=g), dim=-1)
        angles = ANGLE * torch.arange(STEPS + 1)  # the clouds turn around the axis of the globe
        cos, sin, zero, one = angles.cos(), angles.sin(), torch.zeros(STEPS + 1), torch.ones(STEPS + 1)
        turns = torch.stack([cos, -sin, zero, sin, cos, zero, zero, zero, one], 1).view(-1, 1, 3, 3)
        moved = turns @ clouds.transpose(1, 2)  # [5, 2, 3, clouds]
        states = torch.exp(6 * (self.places @ moved - 1)).sum(-1).transpose(1, 2)  # [5, N, 2]
        return {"grid": {"x": states[0], "y": states[1:]}}


class Wind(MessagePassing):
    """Messages from both nodes and the offset of an edge; then an update of targets. Sources may be of another type."""

    def __init__(self, size):
        super().__init__(aggr="mean")
        self.of_edges = torch.nn.Sequential(torch.nn.Linear(2 * size + 4, size), torch.nn.SiLU(), torch.nn.Linear(size, size))
        self.of_nodes = torch.nn.Sequential(torch.nn.Linear(2 * size, size), torch.nn.SiLU(), torch.nn.LayerNorm(size))

    def forward(self, h, edge_index, edge_attr):
        return h[1] + self.of_nodes(torch.cat([h[1], self.propagate(edge_index, h=h, edge_attr=edge_attr)], -1))

    def message(self, h_i, h_j, edge_attr):
        return self.of_edges(torch.cat([h_i, h_j, edge_attr.expand(*h_j.shape[:-1], 4)], -1))


class Step(torch.nn.Module):
    """Encoder to the mesh, two processors, and decoder to the grid: the change of the tracers in one step."""

    def __init__(self, size=16):
        super().__init__()
        self.of_grid, self.of_mesh, self.out = torch.nn.Linear(5, size), torch.nn.Linear(3, size), torch.nn.Linear(size, 2)
        self.encoder, self.decoder = Wind(size), Wind(size)
        self.processors = torch.nn.ModuleList(Wind(size) for _ in range(2))

    def forward(self, state, batch):
        edges = {kind: (batch[kind].edge_index, batch[kind].edge_attr) for kind in (UP, ON, DOWN)}
        grid, mesh = (place.expand(state.size(0), *place.shape) for place in (batch["grid"].place, batch["mesh"].place))
        grid, mesh = self.of_grid(torch.cat([state, grid], -1)), self.of_mesh(mesh)
        mesh = self.encoder((grid, mesh), *edges[UP])
        for processor in self.processors:
            mesh = processor((mesh, mesh), *edges[ON])
        return state + self.out(self.decoder((mesh, grid), *edges[DOWN]))


class Forecast(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = Step(), []

    def forward(self, batch):
        state, states = batch["grid"].x, []
        for _ in range(STEPS):
            state = self.model(state, batch)
            states.append(state)
        return torch.stack(states, 1)  # [B, 4, N, 2]

    def training_step(self, batch, batch_idx):
        grid = batch["grid"]
        loss = ((self(batch) - grid.y).square() * grid.area).mean().sqrt()
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(grid.x))
        return loss

    def on_train_epoch_end(self):
        self.print(f"Epoch {self.current_epoch}: root mean square error {self.trainer.callback_metrics['train_loss']:.4f}")

    def predict_step(self, batch, batch_idx):
        return self(batch)[:, -1]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.005)


def make(num_refinements=4, num_samples=32, global_batch_size=4):
    """Returns the module, the data, and the samples that are predicted."""
    L.seed_everything(0)
    graph = globe(num_refinements)
    train, test = (Weathers(graph["grid"].place, size, seed) for size, seed in ((num_samples, 0), (4, 10_000)))
    return Forecast(), GraphDataModule(graph, samples=train, predict_samples=test, global_batch_size=global_batch_size), test


def draw(file, prediction, truth):
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="tight", sharey=True)
    for axis, values, title in zip(axes, (truth, prediction), ("Truth", "Prediction")):
        values = values.view(-1, round((2 * len(values)) ** 0.5))
        axis.imshow(values, origin="lower", extent=(0, 360, -90, 90), vmin=0, vmax=float(truth.max()))
        axis.set(title=f"{title} after {STEPS} steps", xlabel="degrees east", ylabel="degrees north")
    figure.savefig(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--graph-ranks", type=int, default=2)
    parser.add_argument("--refinements", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--picture", help="file for a picture of a prediction")
    options = parser.parse_args()

    module, data, test = make(options.refinements)
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
            draw(options.picture, predictions[0, :, 0], test[0]["grid"]["y"][-1, :, 0])
