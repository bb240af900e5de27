# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A graph larger than memory
#
# The graph is a folder of files. Nothing here holds its edges or features in memory: files are mapped, parts are
# written piece by piece, and each rank reads from the disk what its batches need. The graph on this page is small, so
# that the page is quick; the steps are the same for one of a billion edges.

# %%
from pathlib import Path

import lightning as L
import numpy as np
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import GraphDataModule, NodeClassifier, SamplingStrategy, planted_partition

# %% [markdown]
# ## The folder
#
# One `.npy` file per attribute, named as in PyG's `Data`. Parquet and CSV files, OGB's downloads and DGL's formats are
# read as well: [what may be in the folder](../large-graphs.md#graph-file-formats).

# %%
folder = Path("my_graph")
folder.mkdir()
graph = planted_partition(20_000, num_features=32, num_classes=8)
np.save(folder / "edge_index.npy", graph.edge_index.numpy())  # [2, E]
np.save(folder / "x.npy", graph.x.numpy().astype(np.float16))  # [N, 32], half the bytes on disk and between ranks
np.save(folder / "y.npy", graph.y.numpy())  # [N]
for name in ("train_mask", "val_mask", "test_mask"):
    np.save(folder / f"{name}.npy", graph[name].numpy())  # [N], bool
del graph

for file in sorted(folder.iterdir()):
    print(f"{file.name:16} {file.stat().st_size / 1e6:6.2f} MB")

# %% [markdown]
# Your own data comes from a program that writes such files, a piece at a time: `np.lib.format.open_memmap` gives an
# array on disk.
#
# ## Partition once
#
# This can be done ahead of time, from a shell, on a machine without GPUs. Training later finds the parts; without this
# step, it makes them itself.

# %%
# !lightning-gnn partition --source my_graph/ --parts 2 --trainer.strategy sampling

# %% [markdown]
# The table shows what each part owns, and how many rows of others it reads. Name the strategy that you will train with:
# its parts are the ones that training looks for.
#
# ## Train in batches
#
# Under `sampling`, a step takes some training nodes, draws some of their neighbours (here 10), and some of theirs (5),
# and trains on those only. `evaluation="minibatch"` evaluates in batches, too, of all neighbours: so accuracies are
# exact, and nothing of the graph's size is held. `feature_dtype="float32"` turns the float16 features of a batch into
# what the model expects.

# %%
L.seed_everything(0, verbose=False)
data = GraphDataModule("my_graph/", num_neighbors=[10, 5], batch_size=1024, feature_dtype="float32")
model = NodeClassifier(GraphSAGE(32, 64, num_layers=2, out_channels=8))
trainer = L.Trainer(
    strategy=SamplingStrategy(evaluation="minibatch", start_method="fork"),  # in a script, without start_method
    devices=2,
    accelerator="cpu",
    max_epochs=5,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, datamodule=data)
[tested] = trainer.test(model, datamodule=data, verbose=False)
print(f"test accuracy {tested['test_acc']:.3f}")

assert tested["test_acc"] > 0.8

# %% [markdown]
# ## When it does not go well
#
# - *Memory while partitioning*: `GraphDataModule(partition_memory_limit="4GB")` says how much sorting edges may take; with
#   less it reads the disk more often. The partitioner itself needs memory, too: [how much, and what to
#   do](../data.md).
# - *Interrupted*: run it again. It goes on behind the last step that it had finished.
# - *Files that do not fit together* are errors with file and row, before anything long begins.
# - *Several machines*: rank 0 partitions, and the others [fetch the parts](../launching.md#several-machines).
#
# [Graphs larger than memory](../large-graphs.md) has the whole story: what each step reads, holds and writes.
# [Sampling](../sampling.md) has other ways to draw.
