# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A scheme of my own
#
# A *scheme* says who holds what, and how rows get from one rank to another. The rest is there: starting ranks,
# partitioning, losses, gradients, metrics, checkpoints. Here is the plainest scheme of all, in thirty lines: every
# rank sends all of its rows to every other one.

# %%
import lightning as L
import torch
from torch_geometric.nn.models import GCN

from lightning_gnn import GNNStrategy, GraphDataModule, NodeClassifier, planted_partition
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies import Scheme, register

# %% [markdown]
# ## What has to be moved
#
# A rank owns N rows, one for each of its nodes. Its edges read H more, which other ranks own: the *halo*. An
# *exchange* has two sides:
#
# - `start_expand(x, halo, call)` fills `halo` `[H, ...]`, with rows of the other ranks' `x` `[N, ...]`. This is the
#   forward pass.
# - `start_reduce(halo, call)` is the way back, for gradients: what this rank has for halo rows is added to the rows of
#   their owners.
#
# Both only *start*, and return a function that waits. In between, the rank computes what needs nobody else.


# %%
class BlocksExchange(Exchange):
    """Every rank sends its whole block of rows to every other."""

    def __init__(self, shard, world, meter):
        ids = shard.halos[world.rank]  # which nodes' rows this rank reads of others, ascending
        super().__init__(shard.plan.num_owned, len(ids), world, meter, idle=world.size == 1)
        self.others = [rank for rank in range(world.size) if rank != world.rank]
        self.mine = [self.num_owned * (rank in self.others) for rank in range(world.size)]  # rows that go to each rank
        self.theirs = [shard.counts[rank] * (rank in self.others) for rank in range(world.size)]  # and come from it
        # Blocks arrive one behind the other, without this rank's own: where among them is each halo row?
        self.rows = torch.from_numpy(ids - self.num_owned * (ids >= shard.offsets[world.rank]))

    def start_expand(self, x, halo, call):
        blocks = x.new_empty((sum(self.theirs), *x.shape[1:]))
        wait = self.send(torch.cat([x] * len(self.others)), self.mine, blocks, self.theirs, call, self.now(call))

        def finish():
            wait()
            halo.copy_(blocks[self.rows])

        return finish

    def start_reduce(self, halo, call):
        blocks = halo.new_zeros((sum(self.theirs), *halo.shape[1:]))
        blocks[self.rows] = halo
        arrived = halo.new_empty((sum(self.mine), *halo.shape[1:]))
        wait = self.send(blocks, self.theirs, arrived, self.mine, call, self.now(call))

        def finish(own):
            wait()
            for block in arrived.split(self.num_owned):
                own += block

        return finish


# %% [markdown]
# `self.send(rows, how many go to each rank, room, how many come from each rank, ...)` is the only thing that touches
# the network.
#
# ## The scheme, and its name
#
# The layout says who holds what: an *edge cut*, where each rank owns some nodes and has all edges into them.


# %%
class BlocksScheme(Scheme):
    def layout(self, world_size, num_hosts=1):
        return LayoutSpec("edge_cut", world_size)

    def exchange(self, shard, world, meter):
        return BlocksExchange(shard, world, meter)


class BlocksStrategy(GNNStrategy):
    strategy_name = "blocks"

    def __init__(self, **options):
        super().__init__(BlocksScheme(), **options)


register(BlocksStrategy)  # "blocks" for scripts, "blocks_spawn", and "blocks_notebook"

# %% [markdown]
# ## Is it right?
#
# Train on one device and under the scheme, in float64, and compare. If `start_reduce` were not the exact reverse of
# `start_expand`, gradients would be wrong, and losses would part after the first step. The self-check, which runs
# before training, would find it, too.

# %%
graph = planted_partition(5_000, num_features=32, num_classes=8)
graph.x = graph.x.double()


def train(strategy, devices):
    L.seed_everything(0, verbose=False)
    data, model = GraphDataModule(graph), NodeClassifier(GCN(32, 64, num_layers=2, out_channels=8)).double()
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        max_epochs=10,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, model.state_dict()


logged, weights = train("auto", 1)
logged_of_blocks, weights_of_blocks = train("blocks_notebook", 3)

# %%
difference = max(float((weights[name] - weights_of_blocks[name]).abs().max()) for name in weights)
print(f"largest difference of a weight after 10 epochs: {difference:.1e}")
print(f"losses: {logged['train_loss']:.12f} and {logged_of_blocks['train_loss']:.12f}")

assert difference < 1e-9

# %% [markdown]
# ## What does it cost?
#
# All bytes were counted, because they went through `self.send`. `dgcl` sends only the rows that somebody reads:

# %%
logged_of_dgcl, _ = train("dgcl_notebook", 3)
for name, found in (("blocks", logged_of_blocks), ("dgcl", logged_of_dgcl)):
    print(f"{name:8} {found['comm/bytes_sent'] / 1e6:.2f} MB per epoch")

# %% [markdown]
# ## Where to go next
#
# [Writing your own scheme](../own-scheme.md) has the whole contract, and three schemes to start from: a ring, one in
# which only some rows travel, and one that computes with the rows of the last step. If yours is approximate, say so in
# `Scheme.approximation`.
