"""Pipelining: layers compute with the halo rows and gradients of the last step, while those of this step travel.

Source: Wan et al., "PipeGCN: Efficient Full-Graph Training of Graph Convolutional Networks with Pipelined Feature
Communication" (ICLR'22), arXiv 2203.10428, Algorithm 1, without its smoothing.
"""

from dataclasses import astuple

import lightning as L
import torch
from torch_geometric.nn.models import GCN

from lightning_gnn import GNNStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies import Scheme, register
from lightning_gnn.strategy.base import refuse_options


# --8<-- [start:exchange]
class PipelinedExchange(HaloExchange):
    """Gives each call what the same call of the last step has brought; the first time, and where it must be exact, it waits."""

    def __init__(self, plan, world, meter):
        super().__init__(plan, world, meter)
        self.under_way = {}  # by call: what waits for the messages of the last step, and returns what they bring
        self.last = {}  # by call: what they brought, once waited for

    def arrived(self, call):
        """Returns what the call brought in the last step, or None."""
        if call in self.under_way:
            self.last[call] = self.under_way.pop(call)()
        return self.last.get(call)

    def start_expand(self, x, halo, call):
        arriving = torch.empty_like(halo)
        wait = super().start_expand(x, arriving, call)

        def bring():
            wait()
            return arriving

        return self.later(call, bring, lambda rows: halo.copy_(rows))

    def start_reduce(self, halo, call):
        halo = halo.clone()  # its memory is used again before it has been sent
        finish = super().start_reduce(halo, call)
        shape = (self.num_owned, *halo.shape[1:])

        def bring(halo=halo):  # which stays until then
            gradients = halo.new_zeros(shape)
            finish(gradients)
            return gradients

        return lambda own: self.later(call, bring, own.add_)()

    def later(self, call, bring, use):
        """Returns what hands over the rows of the last step; those of this one come by the next."""
        if not self.approximate:
            return lambda: use(bring())
        rows = self.arrived(call)
        if rows is None:
            rows = self.last[call] = bring()
        else:
            self.under_way[call] = bring
        return lambda: use(rows)

    def drain(self):
        for call in list(self.under_way):
            self.arrived(call)

    def state_dict(self):
        self.drain()
        return {"last": {astuple(call): rows for call, rows in self.last.items()}}

    def load_state_dict(self, state):
        self.last = {Call(*key): rows.to(self.world.device) for key, rows in state.get("last", {}).items()}


# --8<-- [end:exchange]
class Pipelined(Scheme):
    approximation = "halo rows and gradients of the last step"

    def layout(self, world_size, num_hosts=1):
        return LayoutSpec("edge_cut", world_size)

    def exchange(self, shard, world, meter):
        return PipelinedExchange(shard.plan, world, meter)


class PipelinedStrategy(GNNStrategy):
    strategy_name = "pipelined"

    def __init__(self, **options):
        refuse_options(options, ["checkpoint_convs"], "Layers made again would take other rows than the first time.")
        super().__init__(Pipelined(), **options)


register(PipelinedStrategy)

if __name__ == "__main__":
    L.seed_everything(0)
    data = GraphDataModule("lightning_gnn.planted_partition", {"num_nodes": 2_000, "num_features": 32, "seed": 0})
    model = NodeClassifier(GCN(in_channels=32, hidden_channels=32, num_layers=3, out_channels=8))
    trainer = L.Trainer(
        strategy="pipelined", devices=2, accelerator="cpu", max_epochs=20, logger=False, enable_checkpointing=False
    )
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    if trainer.is_global_zero:
        print(f"Test accuracy {result['test_acc']:.3f}")
