# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Why is it slow?
#
# More ranks, and no faster? There are three usual reasons: one rank has more to do than the others, messages take
# long, or the graph is too small to be worth it. A trace shows which. Here is a run that is slow on purpose.

# %%
import json
from pathlib import Path

import lightning as L
import matplotlib.pyplot as plt
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition

# %% [markdown]
# Someone has divided the graph by hand: rank 0 owns four nodes of five.

# %%
graph = planted_partition(20_000, average_degree=20, num_features=64, num_classes=8)
by_hand = (torch.arange(graph.num_nodes) % 5 == 4).long()  # the rank of every node
by_hand.bincount()


# %%
def train(name, partition):
    L.seed_everything(0, verbose=False)
    data = GraphDataModule(graph, partition=partition)
    model = NodeClassifier(GraphSAGE(64, 64, num_layers=2, out_channels=8))
    trainer = L.Trainer(
        strategy="dgcl_notebook",
        devices=2,
        accelerator="cpu",
        max_epochs=40,
        profiler=PyTorchProfiler(name, "trace", schedule=torch.profiler.schedule(wait=4, warmup=1, active=2, repeat=1)),
        limit_val_batches=0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


slow = train("slow", by_hand)

# %% [markdown]
# ## Look at the numbers first
#
# They are logged in every epoch: [all of them](../logging.md#metrics). If ranks wait a lot, a warning says which rank
# is late, and how large its part is.

# %%
for name in ("comm/wait_fraction", "comm/seconds", "comm/bytes_sent", "throughput/nodes_per_s"):
    print(f"{name:24} {slow[name]:14,.3f}")

# %% [markdown]
# `comm/wait_fraction` is the largest share of its time that a rank waited for another. Much above 0.3 is worth a look.
#
# ## Then at the trace
#
# The profiler has written down when each rank did what in two epochs. Open a rank's file at
# <https://ui.perfetto.dev>, or draw those of both ranks:


# %%
COLORS = {"Optimizer.step": "C2", "training_step": "C0", "backward": "C1", "send": "C4", "wait": "C3", "Sum of": "0.7"}


def draw(name):
    bars = []
    for file in Path(name).glob("*training_step*.json"):
        trace = json.loads(file.read_text())
        rank = trace["distributedInfo"]["rank"]
        for event in trace["traceEvents"]:
            for kind in COLORS if event.get("cat") == "user_annotation" else ():
                if event["name"].startswith(kind) or event["name"].endswith(f"Strategy.{kind}"):
                    row = 2.2 * rank + (kind in ("send", "wait", "Sum of"))
                    bars.append((event["ts"], event["dur"], row, COLORS[kind]))
    _, axis = plt.subplots(figsize=(9, 2.4))
    for begin, duration, row, color in sorted(bars):  # the optimizer's step has forward and backward in it
        axis.broken_barh([((begin - min(bars)[0]) / 1e3, duration / 1e3)], (row, 0.9), color=color)
    axis.set_yticks([0.45, 1.45, 2.65, 3.65], ["rank 0 computes", "communicates", "rank 1 computes", "communicates"])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    axis.legend(handles, COLORS, ncols=len(COLORS), fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1))


draw("slow")

# %% [markdown]
# Red is waiting. Rank 1, with its small part, waits for rank 0 in every step: in its exchanges (*wait*), or for the
# *Sum of gradients* at the end. A rank that hardly waits is the one that all wait for.
#
# ## Mend it
#
# Leave the division to METIS, the default: it gives ranks equal numbers of nodes and edges, and cuts few edges.

# %%
better = train("better", "metis")
draw("better")

# %%
for name in ("comm/wait_fraction", "comm/bytes_sent", "throughput/nodes_per_s"):
    print(f"{name:24} {slow[name]:14,.3f} {better[name]:14,.3f}")

assert better["comm/bytes_sent"] < slow["comm/bytes_sent"]

# %% [markdown]
# ## What you see, and what to do
#
# | in the trace | what it is | what helps |
# |---|---|---|
# | one rank hardly waits, all others do | its part is larger, or its machine is slower | another `partition`; other processes on that machine |
# | all ranks wait alike, `wait` is long | messages take long | another [scheme](which_scheme.py), a [codec](../codecs.md), a plan for your [links](../planning.md) |
# | short bars with gaps between them | the graph is small: Python and Lightning take the time | fewer ranks; on a graph like Cora, one |
# | the first epoch is long, the others are not | kernels are compiled, and what does not change is made once | nothing |
#
# All of this is described in [Logging](../profiling.md).
