# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # From a PyG script to four ranks
#
# You have a PyTorch Geometric model that trains on one device. Here it trains on four processes, and what it learns
# stays the same: the same losses, the same predictions.

# %%
import csv

import lightning as L
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import GraphDataModule, planted_partition

# %% [markdown]
# ## What you have
#
# A graph: a PyG `Data` with `x`, `edge_index`, `y` and masks. This one is made on the spot; yours may be
# `Planetoid(...)[0]` or any other.

# %%
graph = planted_partition(10_000, num_features=32, num_classes=8)
graph

# %% [markdown]
# A LightningModule. It knows nothing of processes, and stays as it is to the end of this page.


# %%
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GraphSAGE(32, 64, num_layers=2, out_channels=8)

    def forward(self, batch):
        return self.model(batch.x, batch.edge_index)

    def training_step(self, batch, batch_idx):
        out, y = self(batch)[batch.train_mask], batch.y[batch.train_mask]
        loss = F.cross_entropy(out, y)
        self.log("train_loss", loss, batch_size=len(y))
        return loss

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


# %% [markdown]
# ## One device, then four ranks
#
# Only the Trainer's `strategy` and `devices` differ. A *rank* is a process that owns a part of the graph. In a
# notebook the strategy's name ends in `_notebook`; in a script, write `strategy="dgcl"` and run it with `python`.


# %%
def train(strategy, devices):
    L.seed_everything(0, verbose=False)
    net, data = Net(), GraphDataModule(graph)
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        max_epochs=30,
        log_every_n_steps=1,
        logger=CSVLogger("logs", name=strategy, version=0),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, datamodule=data)
    with open(f"{trainer.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    trainer.logger = None  # nothing more is logged
    [logits] = trainer.predict(net, datamodule=data)  # [10000, 8], in the graph's own order of nodes
    return rows, logits


def values(rows, name):
    return [float(row[name]) for row in rows if row.get(name)]


one, logits_of_one = train("auto", 1)

# %%
four, logits_of_four = train("dgcl_notebook", 4)

# %% [markdown]
# Before the first epoch, it says what it does:
#
# - *Partitioning*: METIS decides who owns which nodes, so that few edges run between ranks. This is done once and kept
#   for later runs.
# - *Self-check*: your steps run on a small graph, whole and cut in two. Code that would give other numbers on several
#   ranks is an error now, not a wrong result later.
#
# In a step, `batch.x` has a rank's own rows, and stands for those of the whole graph: a mean over it is over the nodes
# of all ranks ([row semantics](../rows.md)).
#
# ## Is it the same?

# %%
loss_of_one, loss_of_four = values(one, "train_loss"), values(four, "train_loss")
figure, axis = plt.subplots(figsize=(6, 3))
axis.plot(loss_of_one, label="one device", linewidth=6, alpha=0.3)
axis.plot(loss_of_four, label="four ranks")
axis.set(xlabel="epoch", ylabel="training loss")
axis.legend()
# %%
difference = max(abs(a - b) for a, b in zip(loss_of_one, loss_of_four, strict=True))
print(f"largest difference of a loss: {difference:.1e}")
print(f"largest difference of a logit: {(logits_of_one - logits_of_four).abs().max():.1e}")
correct = logits_of_four.argmax(-1) == graph.y
print(f"test accuracy: {correct[graph.test_mask].float().mean():.3f}")

assert difference < 1e-3

# %% [markdown]
# They differ by rounding only: sums are added up in another order.
#
# ## What the ranks exchanged
#
# A layer sums over neighbours. Some of them belong to other ranks, and their rows are fetched: the *halo*. The logger
# was told how many.

# %%
for name in ("comm/halo_rows", "comm/bytes_sent", "throughput/nodes_per_s"):
    print(f"{name:24} {values(four, name)[-1]:12,.0f}")

# %% [markdown]
# ## Where to go next
#
# - [Which scheme for my graph?](which_scheme.py) `dgcl` is one of several.
# - [Your own module](../models.md#batch-contents): what a step gets, and what it must not do.
# - [Starting ranks](../launching.md): scripts, torchrun, SLURM, several machines.
