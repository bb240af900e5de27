"""A scheme of your own: rows go around a ring, so each rank talks to its two neighbours only; as exact as `dgcl`."""

import lightning as L
import numpy as np
import torch
from torch_geometric.nn.models import GCN

from lightning_gnn import GNNStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies import Scheme, register


# --8<-- [start:exchange]
class RingExchange(Exchange):
    """In P - 1 steps every rank sees the block of rows of every other, and keeps the rows that its edges read."""

    in_stages = True  # blocks are passed on in the wait

    def __init__(self, shard, world, meter):
        halo = shard.halos[world.rank]  # ascending ids, so the rows of one owner lie together
        super().__init__(shard.plan.num_owned, len(halo), world, meter, idle=world.size == 1)
        self.counts, by_owner = shard.counts, np.split(halo, np.searchsorted(halo, shard.offsets[1:-1]))
        self.rows = [torch.from_numpy(ids - first).to(world.device) for ids, first in zip(by_owner, shard.offsets)]
        self.whose = [(world.rank - step) % world.size for step in range(world.size)]  # whose block is here, by step

    def pass_on(self, block, whose, call):
        """Starts to send `block` to the next rank, and to receive that of rank `whose` from the one before."""
        arriving = block.new_empty((self.counts[whose], *block.shape[1:]))
        send, receive = [0] * self.world.size, [0] * self.world.size  # rows for and from each rank
        send[(self.world.rank + 1) % self.world.size] = len(block)
        receive[self.world.rank - 1] = len(arriving)
        return arriving, self.send(block, send, arriving, receive, call, self.now(call))

    def start_expand(self, x, halo, call):
        parts = halo.split([len(rows) for rows in self.rows])
        arriving, wait = self.pass_on(x, self.whose[1], call)

        def finish():  # what does not depend on other ranks is computed before this is called
            block, ready = arriving, wait
            for owner, following in zip(self.whose[1:], [*self.whose[2:], None]):
                ready()
                parts[owner].copy_(block[self.rows[owner]])
                if following is not None:
                    block, ready = self.pass_on(block, following, call)

        return finish

    def start_reduce(self, halo, call):
        parts = halo.split([len(rows) for rows in self.rows])

        def finish(own):  # each rank adds what it has for a block, which arrives at its owner after P - 1 steps
            block = own.new_zeros((self.counts[self.whose[1]], *own.shape[1:]))
            for owner, following in zip(self.whose[1:], [*self.whose[2:], self.whose[0]]):
                block.index_add_(0, self.rows[owner], parts[owner])
                block, ready = self.pass_on(block, following, call)
                ready()
            own += block

        return finish


# --8<-- [end:exchange]
# --8<-- [start:strategy]
class RingScheme(Scheme):
    def layout(self, world_size, num_hosts=1):
        return LayoutSpec("edge_cut", world_size)  # each rank has all in-edges of its nodes

    def exchange(self, shard, world, meter):
        return RingExchange(shard, world, meter)


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
