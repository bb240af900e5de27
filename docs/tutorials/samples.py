# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Many samples on one graph
#
# A power grid, a road network or the mesh of a weather model is one graph with thousands of samples. Here, four ranks
# form a mesh: two *data ranks* have different samples, and the two *graph ranks* of each have parts of the graph.

# %%
import csv

import lightning as L
import matplotlib.pyplot as plt
import torch
from lightning.pytorch.loggers import CSVLogger
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv

from lightning_gnn import DGCLStrategy, GraphDataModule, split_by_time

# %% [markdown]
# ## A graph and its samples
#
# 1,000 buses of a power grid, with lines between near buses. The graph has no features: samples have these.

# %%
g = torch.Generator().manual_seed(0)
places = torch.rand(1_000, 2, generator=g)
near = torch.cdist(places, places).topk(5, largest=False).indices[:, 1:]
lines = torch.stack([near.flatten(), torch.arange(1_000).repeat_interleave(4)])
graph = Data(edge_index=torch.cat([lines, lines.flip(0)], 1), num_nodes=1_000)
graph

# %% [markdown]
# A sample is an hour: the load of each bus in the last six hours, `x [N, 6]`, and in the next hour, `y [N, 1]`. Any
# dataset with `__len__` and `__getitem__` will do. `hour` is one value per sample.

# %%
hours = torch.arange(24.0 * 14).view(-1, 1)
evening = torch.exp(-((hours % 24 - 17 - 3 * places[:, 0]) ** 2) / 8)
loads = 1 + evening + 0.5 * torch.exp(-((hours % 24 - 8) ** 2) / 6) + 0.05 * torch.randn(len(hours), 1_000, generator=g)


class Hours(torch.utils.data.Dataset):
    def __len__(self):
        return len(loads) - 6

    def __getitem__(self, index):
        return {"x": loads[index : index + 6].t(), "y": loads[index + 6].view(-1, 1), "hour": (index + 6) % 24 / 24}


# %% [markdown]
# The splits are in the order of time. Six hours between splits are left out, so that no load is in two splits.

# %%
train, val, test = split_by_time(Hours(), (0.6, 0.2, 0.2), gap=6)
len(train), len(val), len(test)

# %% [markdown]
# ## A module
#
# A batch has the tensors of all its samples, `x [B, N, 6]`, and the graph once. PyG's layers with `node_dim=-2` accept
# these tensors. The loss is a root of a mean over samples and nodes: with Lightning's DDP, it would be the mean of the
# ranks' roots, which is another number.


# %%
class Forecast(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = GraphConv(7, 32, aggr="mean"), GraphConv(32, 1, aggr="mean")

    def forward(self, batch):
        hour = batch.hour.view(-1, 1, 1).expand(-1, batch.x.size(1), 1).to(batch.x.dtype)
        h = self.first(torch.cat([batch.x, hour], -1), batch.edge_index).relu()
        return batch.x[..., -1:] + self.second(h, batch.edge_index)

    def training_step(self, batch, batch_idx):
        loss = (self(batch) - batch.y).square().mean().sqrt()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_error", (self(batch) - batch.y).abs().mean(), batch_size=len(batch.x))

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.005)


# %% [markdown]
# ## One device, then a mesh of four ranks
#
# `global_batch_size` is the number of samples per step of all data ranks together, so both runs take the same steps.


# %%
def fit(name, strategy, devices):
    L.seed_everything(0, verbose=False)
    module = Forecast()
    data = GraphDataModule(graph, samples=train, val_samples=val, predict_samples=test, global_batch_size=8)
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        max_epochs=6,
        log_every_n_steps=1,
        logger=CSVLogger("logs", name=name, version=0),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    with open(f"{trainer.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    trainer.logger = None
    predictions = torch.cat(trainer.predict(module, datamodule=data))
    return rows, predictions


def values(rows, name):
    return [float(row[name]) for row in rows if row.get(name)]


one, predictions_of_one = fit("one", "auto", 1)

# %%
mesh, predictions = fit("mesh", DGCLStrategy(graph_ranks=2, start_method="fork"), 4)

# %% [markdown]
# ## Is it the same?

# %%
loss_of_one, loss_of_mesh = values(one, "train_loss"), values(mesh, "train_loss")
figure, axes = plt.subplots(1, 2, figsize=(10, 3), layout="tight")
axes[0].plot(loss_of_one, label="one device", linewidth=6, alpha=0.3)
axes[0].plot(loss_of_mesh, label="two data ranks x two graph ranks")
axes[0].set(xlabel="step", ylabel="training loss", yscale="log")
axes[1].plot([test[index]["y"][0, 0] for index in range(len(test))], label="load of bus 0")
axes[1].plot(predictions[:, 0, 0], label="predicted an hour before")
axes[1].set(xlabel="hour")
for axis in axes:
    axis.legend()

# %%
difference = max(abs(a - b) for a, b in zip(loss_of_one, loss_of_mesh, strict=True))
print(f"largest difference of a loss: {difference:.1e}")
print(f"largest difference of a prediction: {(predictions - predictions_of_one).abs().max():.1e}")
print(f"validation error: {values(mesh, 'val_error')[-1]:.4f}")

assert difference < 1e-4

# %% [markdown]
# They differ by rounding only. Predictions `[samples, N, 1]` are in the order of the dataset and of the graph's nodes.
#
# ## Where to go next
#
# - [Many samples on one graph](../samples.md): the mesh, batches, random numbers, folders of arrays, limits.
# - [From a PyG script to four ranks](four_ranks.py): one graph without samples.
