"""Boundary sampling: in each training step only a random share of the halo rows travels.

Source: Wan et al., "BNS-GCN: Efficient Full-Graph Training of Graph Convolutional Networks with Partition-Parallelism and
Random Boundary Node Sampling" (MLSys'22), arXiv 2203.10983, Algorithm 1: a share p of the boundary nodes, whose rows count 1 / p.
"""

import lightning as L
import numpy as np
import torch
from torch_geometric.nn.models import GraphSAGE

from lightning_gnn import GNNStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies import Scheme, register


# --8<-- [start:exchange]
class SampledExchange(HaloExchange):
    """Transport each halo row with probability `share`; owner and reader draw alike, so nothing is said about which."""

    def __init__(self, plan, world, meter, share, seed):
        super().__init__(plan, world, meter)
        self.share, self.seed, self.scale = share, seed, 1 / share

    def drawn(self, owner, reader, count):
        """Returns which of the rows that `reader` reads of `owner` travel in this step, bool `[count]`."""
        random = np.random.default_rng([self.seed, self.world.step.number, owner, reader])
        return torch.from_numpy(random.random(count) < self.share)

    def begin_step(self, step):
        rank, counts = self.world.rank, enumerate(zip(self.send_counts, self.recv_counts))
        drawn = [(self.drawn(rank, peer, out), self.drawn(peer, rank, into)) for peer, (out, into) in counts]
        self.outgoing, self.incoming = [int(out.sum()) for out, _ in drawn], [int(into.sum()) for _, into in drawn]
        self.rows = self.send_rows[torch.cat([out for out, _ in drawn]).to(self.world.device)]
        self.drawn_halo = torch.cat([into for _, into in drawn]).to(self.world.device)

    @property
    def present(self):
        """Which halo rows come: all of them where nothing may be approximate, as in evaluation and the last epoch."""
        return self.drawn_halo if self.approximate and self.share < 1 else None

    def start_expand(self, x, halo, call):
        if self.present is None:
            return super().start_expand(x, halo, call)
        arrived = halo.new_empty((sum(self.incoming), *halo.shape[1:]))
        wait = self.send(x[self.rows], self.outgoing, arrived, self.incoming, call, self.now(call))

        def finish():
            wait()
            halo.zero_()
            halo[self.drawn_halo] = arrived

        return finish

    def start_reduce(self, halo, call):
        if self.present is None:
            return super().start_reduce(halo, call)
        arrived = halo.new_empty((len(self.rows), *halo.shape[1:]))
        wait = self.send(halo[self.drawn_halo], self.incoming, arrived, self.outgoing, call, self.now(call))

        def finish(own):
            wait()
            own.index_add_(0, self.rows, arrived)

        return finish


# --8<-- [end:exchange]
class BoundarySampling(Scheme):
    def __init__(self, share, seed):
        self.share, self.seed = share, seed
        self.approximation = "" if share == 1 else f"{share:g} of the halo rows, drawn in each step"

    def layout(self, world_size, num_hosts=1):
        return LayoutSpec("edge_cut", world_size)

    def exchange(self, shard, world, meter):
        return SampledExchange(shard.plan, world, meter, self.share, self.seed)


class BoundarySamplingStrategy(GNNStrategy):
    strategy_name = "boundary_sampling"

    def __init__(self, share=0.1, seed=0, **options):
        super().__init__(BoundarySampling(share, seed), **options)


register(BoundarySamplingStrategy)

if __name__ == "__main__":
    L.seed_everything(0)
    data = GraphDataModule("lightning_gnn.planted_partition", {"num_nodes": 2_000, "num_features": 32, "seed": 0})
    model = NodeClassifier(GraphSAGE(in_channels=32, hidden_channels=32, num_layers=3, out_channels=8))
    trainer = L.Trainer(
        strategy=BoundarySamplingStrategy(share=0.1),
        devices=2,
        accelerator="cpu",
        max_epochs=20,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, datamodule=data)
    [result] = trainer.test(model, datamodule=data)
    if trainer.is_global_zero:
        print(f"Test accuracy {result['test_acc']:.3f}")
