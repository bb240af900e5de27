"""Speeds of cars at the sensors of a road network: one graph, and a sample for each window of 12 steps in and 12 steps out.

python examples/traffic.py [--devices 4 --graph-ranks 2] [--picture traffic.png]

Graph ranks have parts of the road network, data ranks have different windows. Losses equal the losses of one device.
"""

import argparse

import lightning as L
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv
from torchmetrics import MeanMetric

from lightning_gnn import DGCLStrategy, GraphDataModule, split_by_time

DAY, STEPS = 288, 12  # steps of five minutes
HORIZONS = (3, 6, 12)


def road_network(num_sensors):
    """Sensors in the unit square, with roads from their nearest sensors."""
    g = torch.Generator().manual_seed(0)
    places = torch.rand(num_sensors, 2, generator=g)
    distances, nearest = torch.cdist(places, places).topk(6, largest=False)
    weights = torch.softmax(-distances[:, 1:] * num_sensors**0.5, 1)
    edge_index = torch.stack([nearest[:, 1:].flatten(), torch.arange(num_sensors).repeat_interleave(5)])
    return Data(edge_index=edge_index, edge_weight=weights.flatten(), num_nodes=num_sensors), places


def measure_speeds(graph, places, num_days):
    """Speeds [steps, sensors]: rush hours that depend on the place, jams that spread along roads, and 0 where a sensor failed."""
    g = torch.Generator().manual_seed(1)
    hours = torch.arange(num_days * DAY).view(-1, 1) / DAY * 24 % 24
    center = 1 - (places - 0.5).norm(dim=1)
    rush = torch.exp(-((hours - 8 - places[:, 0]) ** 2) / 2) + torch.exp(-((hours - 17 - places[:, 1]) ** 2) / 4)
    (source, target), jam, jams = graph.edge_index, torch.zeros(len(places)), []
    for _ in range(len(hours)):
        begins = torch.rand(len(places), generator=g) < 0.002
        jam = 0.6 * jam + 0.35 * jam.new_zeros(len(jam)).index_add(0, target, graph.edge_weight * jam[source]) + begins
        jams.append(jam)
    speeds = 65 - 30 * rush * center - 20 * torch.stack(jams).clamp(max=1.5) + torch.randn(rush.shape, generator=g)
    return speeds.clamp(min=3) * (torch.rand(rush.shape, generator=g) > 0.05)


class Windows(torch.utils.data.Dataset):
    """Samples: ``x [12, N, 2]``, speeds and time of day, and ``y [N, 12]``, the speeds of the next hour."""

    def __init__(self, speeds):
        self.speeds = speeds

    def __len__(self):
        return len(self.speeds) - 2 * STEPS + 1

    def __getitem__(self, index):
        past = self.speeds[index : index + STEPS]
        time = (torch.arange(index, index + STEPS) % DAY / DAY).view(-1, 1).expand_as(past)
        return {"x": torch.stack([past / 60, time], -1), "y": self.speeds[index + STEPS : index + 2 * STEPS].t()}


class STGCN(torch.nn.Module):
    """Convolutions over time, before and after a convolution over the road network."""

    def __init__(self, size=16):
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(2, size, (1, 4)), torch.nn.BatchNorm2d(size)
        self.roads = GraphConv(size, size)
        self.last, self.out = torch.nn.Conv2d(size, 2 * size, (1, 9)), torch.nn.Linear(2 * size, STEPS)

    def forward(self, x, edge_index, edge_weight):
        h = self.norm(self.first(x.permute(0, 3, 2, 1))).relu()  # [B, 16, N, 9]
        h = self.roads(h.permute(0, 3, 2, 1), edge_index, edge_weight).relu()  # [B, 9, N, 16]
        h = self.last(h.permute(0, 3, 2, 1)).relu().squeeze(-1)  # [B, 32, N]
        return 60 * (1 + self.out(h.transpose(1, 2)))  # [B, N, 12]


class Forecast(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = STGCN(), []
        self.errors = torch.nn.ModuleList(MeanMetric() for _ in HORIZONS)

    def forward(self, batch):
        return self.model(batch.x, batch.edge_index, batch.edge_weight)

    def masked_error(self, batch):
        seen = batch.y > 0
        return ((self(batch) - batch.y).abs() * seen).sum() / seen.sum()

    def training_step(self, batch, batch_idx):
        loss = self.masked_error(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch.x))
        return loss

    def on_train_epoch_end(self):
        self.print(f"Epoch {self.current_epoch}: mean absolute error {self.trainer.callback_metrics['train_loss']:.3f} mph")

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.masked_error(batch), batch_size=len(batch.x))

    def test_step(self, batch, batch_idx):
        seen, error = batch.y > 0, (self(batch) - batch.y).abs()
        for metric, step in zip(self.errors, HORIZONS):
            metric.update(error[..., step - 1], seen[..., step - 1])
            self.log(f"mae_{5 * step}_minutes", metric, batch_size=len(batch.x))

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.003)


def make(num_sensors=2_000, num_days=3, global_batch_size=8):
    """Returns the module, the data and the test samples."""
    L.seed_everything(0)
    graph, places = road_network(num_sensors)
    parts = split_by_time(Windows(measure_speeds(graph, places, num_days)), (0.5, 0.25, 0.25), gap=2 * STEPS - 1)
    train, val, test = (torch.utils.data.Subset(part, range(0, len(part), 6)) for part in parts)  # every sixth window
    samples = {"samples": train, "val_samples": val, "test_samples": test, "predict_samples": test}
    data = GraphDataModule(graph, **samples, global_batch_size=global_batch_size)
    return Forecast(), data, test


def draw(file, predictions, test, sensor=0):
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 3), layout="tight")
    observed = torch.stack([test[index]["y"][sensor, -1] for index in range(len(test))])
    axis.plot(observed.where(observed > 0, torch.nan), label="observed")
    axis.plot(predictions[:, sensor, -1], label="predicted an hour before")
    axis.set(xlabel="step of 30 minutes", ylabel="mph", title=f"Speed at sensor {sensor}")
    axis.legend()
    figure.savefig(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--graph-ranks", type=int, default=2)
    parser.add_argument("--sensors", type=int, default=2_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--picture", help="file for a picture of the predictions")
    options = parser.parse_args()

    module, data, test = make(options.sensors)
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
    trainer.test(module, datamodule=data)
    if options.picture:
        predictions = torch.cat(trainer.predict(module, datamodule=data))
        if trainer.is_global_zero:
            draw(options.picture, predictions, test)
