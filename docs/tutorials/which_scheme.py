# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Which scheme for my graph?
#
# A *scheme* decides who holds which nodes and edges, and what ranks send each other. Which is the fastest depends on
# your graph, your model and your machine. So ask: `advise` predicts it without starting any rank, `compare` measures
# it.

# %%
import matplotlib.pyplot as plt
import torch
from torch_geometric.nn.models import GCN

from lightning_gnn import GraphDataModule, NodeClassifier, advise, compare, planted_partition

# %% [markdown]
# ## Two graphs
#
# In the first, nearly all edges stay within communities, so it can be cut into parts that have little to do with each
# other. In the second, edges run anywhere.

# %%
options = {"num_nodes": 5_000, "average_degree": 20, "num_features": 32, "num_classes": 8}
with_communities = planted_partition(**options, homophily=0.95)
without = planted_partition(**options, homophily=0.125)

# %% [markdown]
# ## Predicted
#
# A few training steps run for each scheme, with all ranks in this one process: what they compute is timed, and what
# they send is counted.


# %%
def predicted(graph):
    torch.manual_seed(0)
    model = NodeClassifier(GCN(32, 64, num_layers=2, out_channels=8))
    found = [each for each in advise(model, GraphDataModule(graph), devices=4) if each.applies]
    print(f"{'scheme':42} {'':12} {'ms/epoch':>9} {'MB/epoch':>9} {'steps':>6}")
    for each in found:
        exact = "exact" if each.candidate.exact else "approximate"
        sent = "" if each.bytes_sent is None else f"{each.bytes_sent / 1e6:.2f}"
        print(f"{each.candidate!s:42} {exact:12} {1e3 * each.seconds:9.1f} {sent:>9} {each.steps:6}")
    return {str(each.candidate): each for each in found}


first = predicted(with_communities)

# %%
second = predicted(without)

# %% [markdown]
# How to read this:
#
# - *exact*: every loss, gradient and prediction is that of one device. Exact schemes come first; among them, the
#   fastest first.
# - *MB per epoch* is what all ranks send. On the second graph, each rank reads nearly all rows of the others, and most
#   schemes send more.
# - *steps*: schemes that train on batches may take several steps in an epoch. Their epochs are longer and learn more:
#   do not compare them with epochs of one step.

# %%
names = [name for name, each in first.items() if each.candidate.exact and name in second]
figure, axis = plt.subplots(figsize=(7, 4))
for shift, label, found in ((-0.2, "communities", first), (0.2, "none", second)):
    places = [place + shift for place in range(len(names))]
    axis.barh(places, [found[name].bytes_sent / 1e6 for name in names], height=0.4, label=label)
axis.set_yticks(range(len(names)), names)
axis.invert_yaxis()
axis.set_xlabel("MB that all ranks send in an epoch")
axis.legend()
# %% [markdown]
# On this machine all ranks share memory, and sending is cheap. On a slow network, the bytes decide. `advise(...,
# topology="dgx1")` predicts for [another machine](../planning.md#topologies), also one that you do not have.
#
# ## Measured
#
# `compare` trains under each scheme that you name, one after the other, with the same seed and the same initial
# weights. It starts processes of its own, so it takes model and graph as they stand in a YAML file.

# %%
model = {"in_channels": 32, "hidden_channels": 64, "num_layers": 2, "out_channels": 8}
found = compare(
    {
        "class_path": "lightning_gnn.NodeClassifier",
        "init_args": {"model": {"class_path": "torch_geometric.nn.models.GCN", "init_args": model}},
    },
    {"source": "lightning_gnn.planted_partition", "source_kwargs": {**options, "homophily": 0.95}},
    ["dgcl", "cover"],
    devices=2,
    epochs=10,
    trainer={"accelerator": "cpu"},
)
assert all(cell["status"] == "finished" for cell in found["runs"])

# %% [markdown]
# [Reading a comparison](comparison.py) explains this table.
#
# ## In short
#
# - Start with `dgcl`.
# - Ask `lightning-gnn advise --config FILE --parts 4`; columns and options are in [Choosing a strategy](../choosing.md)
# - Measure the two or three best with `lightning-gnn compare`; keep the machine free of other work meanwhile.
# - Or leave it to `Trainer(strategy="auto_gnn")`, which takes the fastest exact one.
# - If a step on the whole graph takes too much memory, train [in batches](large_graph.py).
