"""A scheme of your own: rows go around a ring, so each rank talks to its two neighbours only; as exact as `dgcl`."""

import time

import lightning as L
import numpy as np
import torch
from torch_geometric.nn.models import GCN

from lightning_gnn import GNNStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.comm.exchange import RowExchange
from lightning_gnn.comm.rows import AnyRows
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies import Scheme, register


# --8<-- [start:exchange]
class RingExchange(RowExchange):
    """In P - 1 steps every rank sees the block of rows of every other, and keeps the rows that its edges read."""

    def __init__(self, shard, world, meter):
        halo = shard.halos[world.rank]  # ascending ids, so the rows of one owner lie together
        super().__init__(shard.plan.num_owned, len(halo), world.size == 1, world, meter)
        self.counts = shard.counts
        by_owner = np.split(halo, np.searchsorted(halo, shard.offsets[1:-1]))
        self.reads = [torch.from_numpy(ids - first).to(world.device) for ids, first in zip(by_owner, shard.offsets)]

    def pass_on(self, block, whose, layer, direction):
        """Starts to send `block` to the next rank, and to receive that of rank `whose` from the one before."""
        arriving = block.new_empty((self.counts[whose], *block.shape[1:]))
        send, receive = [0] * self.world.size, [0] * self.world.size  # rows for and from each rank
        send[(self.world.rank + 1) % self.world.size] = len(block)
        receive[self.world.rank - 1] = len(arriving)
        return arriving, self.start(block, send, arriving, receive, layer, direction, time.perf_counter())

    def whose(self, step):
        """Returns the rank that lies `step` ranks before this one."""
        return (self.world.rank - step) % self.world.size

    def start_fetch(self, x, halo, layer):
        parts = halo.split([len(rows) for rows in self.reads])
        arriving, wait = self.pass_on(x.contiguous(), self.whose(1), layer, "forward")

        def finish():  # what does not depend on other ranks is computed before this is called
            block, ready = arriving, wait
            for step in range(1, self.world.size):
                ready()
                parts[self.whose(step)].copy_(block[self.reads[self.whose(step)]])
                if step + 1 < self.world.size:
                    block, ready = self.pass_on(block, self.whose(step + 1), layer, "forward")

        return finish

    def outgoing(self, shape, dtype):
        return self.buffer("outgoing", shape, dtype)

    def start_return(self, halo_grad, layer):
        parts = halo_grad.split([len(rows) for rows in self.reads])

        def finish(grad):  # each rank adds what it has for a block, which arrives at its owner after P - 1 steps
            block = grad.new_zeros((self.counts[self.whose(1)], *grad.shape[1:]))
            for step in range(1, self.world.size):
                block.index_add_(0, self.reads[self.whose(step)], parts[self.whose(step)])
                block, ready = self.pass_on(block, self.whose(step + 1), layer, "backward")
                ready()
            grad += block

        return finish


# --8<-- [end:exchange]
# --8<-- [start:strategy]
class RingScheme(Scheme):
    takes_no_codec = "Around a ring a row would be encoded at every step."

    def layout(self, world_size, num_hosts=1):
        return LayoutSpec("edge_cut", world_size)

    def context(self, shard, world, meter):
        batch = shard.batch
        rows = AnyRows(shard.n_id, shard.counts, world, meter)  # for models that call fetch_rows
        weight = batch.get("edge_weight")
        return GraphContext(RingExchange(shard, world, meter), batch.x, batch.edge_index, weight, rows=rows)


class RingStrategy(GNNStrategy):
    strategy_name = "ring"

    def __init__(self, **options):
        super().__init__(RingScheme(), **options)


register(RingStrategy)  # Trainer(strategy="ring"), "ring_spawn" and "ring_notebook"
# --8<-- [end:strategy]

if __name__ == "__main__":
    L.seed_everything(0)
    data = GraphDataModule("lightning_gnn.planted_partition", {"num_nodes": 2_000, "num_features": 32, "seed": 0})
    model = NodeClassifier(GCN(in_channels=32, hidden_channels=32, num_layers=2, out_channels=8))
    trainer = L.Trainer(
        strategy="ring", devices=3, accelerator="cpu", max_epochs=20, logger=False, enable_checkpointing=False
    )
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    if trainer.is_global_zero:
        print(f"Test accuracy {result['test_acc']:.3f}")
