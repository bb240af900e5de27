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

import lightning as L
import matplotlib.pyplot as plt
import torch
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import CommunicationTrace, GraphDataModule, NodeClassifier, planted_partition

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
        callbacks=[CommunicationTrace(f"{name}.json", first_epoch=5, epochs=1)],
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
for name in ("comm/waited_share", "comm/seconds", "comm/bytes_sent", "throughput/nodes_per_s"):
    print(f"{name:24} {slow[name]:14,.3f}")

# %% [markdown]
# `comm/waited_share` is the largest share of its time that a rank waited for another. Much above 0.3 is worth a look.
#
# ## Then at the trace
#
# `CommunicationTrace` has written down when each rank did what in one epoch. Open the file at
# <https://ui.perfetto.dev>, or draw it:


# %%
COLORS = {"forward": "C0", "backward": "C1", "optimizer": "C2", "send": "C4", "wait": "C3", "sum of gradients": "0.7"}


def draw(name):
    with open(f"{name}.json") as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X" and event["cat"] in COLORS]
    begin = min(event["ts"] for event in events)
    _, axis = plt.subplots(figsize=(9, 2.4))
    for event in events:  # of each rank two lines: what it computes, and what it sends and waits for
        bar = [((event["ts"] - begin) / 1e3, event["dur"] / 1e3)]
        axis.broken_barh(bar, (2.2 * event["pid"] + event["tid"], 0.9), color=COLORS[event["cat"]])
    axis.set_yticks([0.45, 1.45, 2.65, 3.65], ["rank 0 computes", "communicates", "rank 1 computes", "communicates"])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    axis.legend(handles, COLORS, ncols=len(COLORS), fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1))


draw("slow")

# %% [markdown]
# Red is waiting. Rank 1, with its small part, waits for rank 0 in every step: in its exchanges (*wait*), or for the
# *sum of gradients* at the end. A rank that hardly waits is the one that all wait for.
#
# ## Mend it
#
# Leave the division to METIS, the default: it gives ranks equal numbers of nodes and edges, and cuts few edges.

# %%
better = train("better", "metis")
draw("better")

# %%
for name in ("comm/waited_share", "comm/bytes_sent", "throughput/nodes_per_s"):
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
# All of this is described in [Logging](../logging.md#what-happens-when).
