# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Reading a comparison
#
# `compare` trains one model on one graph in several ways, and puts side by side what they gave and what they took.
# This page reads such a comparison column by column.

# %%
import matplotlib.pyplot as plt

from lightning_gnn import compare

# %%
model = {"in_channels": 32, "hidden_channels": 64, "num_layers": 2, "out_channels": 8}
found = compare(
    {
        "class_path": "lightning_gnn.NodeClassifier",
        "init_args": {"model": {"class_path": "torch_geometric.nn.models.GraphSAGE", "init_args": model}},
    },
    {
        "source": "lightning_gnn.planted_partition",
        "source_kwargs": {"num_nodes": 10_000, "num_features": 32, "num_classes": 8},
    },
    [
        {"strategy": "auto", "devices": 1, "label": "one device"},  # the first is what the others are held against
        "dgcl",
        {"strategy": "dgcl", "codec": "int8", "label": "8 bits"},
        {"strategy": "sampling", "num_neighbors": [10, 5], "batch_size": 1024, "label": "sampling"},
    ],
    devices=2,
    epochs=10,
    trainer={"accelerator": "cpu"},
)
cells = {cell["name"]: cell for cell in found["runs"]}
assert all(cell["status"] == "finished" for cell in cells.values())

# %% [markdown]
# The same numbers, with plots, are in the folder `comparison`: open `comparison.html` in a browser.
#
# ## First look: is it the same model?
#
# *parity* holds each row against the first.

# %%
for name, cell in cells.items():
    parity = cell["parity"]
    print(f"{name:12} {parity['kind']:12} {parity['loss']:8.1e}  {parity['why']}")

# %% [markdown]
# - `exact`, and a difference of 1e-7 or so: the same training, to rounding. Only time and bytes are left to compare.
# - `approximate`: how far its losses are from those of the reference. That is no error, but whether it matters must be
#   seen in the test accuracy.
# - `random`: your model draws dropout, and each rank draws its own. Set it to 0 while you compare.
# - `exact`, but beyond the tolerance, is a mistake, in the model or in this library: [does my model give the numbers
#   of one device?](../check.md)
#
# ## Second look: losses, by epochs and by seconds

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
for name, cell in cells.items():
    losses = cell["curves"]["train_loss"]
    seconds = [(epoch + 1) * cell["epoch_seconds"] for epoch in range(len(losses))]
    wide = name == "one device"
    for axis, at in zip(axes, (range(len(losses)), seconds)):
        axis.plot(at, losses, label=name, linewidth=6 if wide else 1.5, alpha=0.3 if wide else 1)
axes[0].set(xlabel="epoch", ylabel="training loss")
axes[1].set(xlabel="seconds", xscale="log")
axes[0].legend(fontsize=8)
# %% [markdown]
# `sampling` falls faster per epoch, because its epoch has several steps. So epochs are not comparable there; seconds
# are.
#
# ## Third look: where do the seconds go?

# %%
figure, axis = plt.subplots(figsize=(9, 2.2))
left = [0.0] * len(cells)
for part in ("compute", "communication", "waiting"):
    width = [1e3 * (cell["seconds"][part] or 0) for cell in cells.values()]
    axis.barh([*cells], width, left=left, label=part)
    left = [a + b for a, b in zip(left, width)]
axis.invert_yaxis()
axis.set_xlabel("milliseconds of an epoch, mean over ranks")
axis.legend(fontsize=8)
# %% [markdown]
# - *compute* large: more ranks or fewer threads per rank will not hurt each other; look at the model.
# - *communication* large: another scheme or a codec may send less.
# - *waiting* large: one rank is late, and the others wait for it. [Why is it slow?](slow.py) finds which.
#
# ## Fourth look: bytes and memory

# %%
for name, cell in cells.items():
    rows, gradients = (cell[key] / 1e6 for key in ("row_bytes", "gradient_bytes"))
    peak = max(cell["memory_bytes"]) / 1e6
    print(f"{name:12} {rows:8.2f} MB of rows, {gradients:6.2f} MB of gradients in an epoch; {peak:6.0f} MB a process")

# %% [markdown]
# On a small graph most of a process's memory is Python and its libraries: `memory_at_start_bytes` says how much that
# was.
#
# ## How far to trust it
#
# - One run on a shared machine can be off by a fifth. Differences smaller than that say nothing: run it longer,
#   `epochs=50`, and again.
# - Nothing else should run meanwhile.
# - *set-up* is paid once per run, or once per graph: leave it out when you think of a long training.
# - What has finished is not run again; `rerun="all"` does.
#
# [Comparing strategies](../compare.md) says of each column how it is measured.
