"""DirGNNConv: its second conv reads the targets of each node's out-edges, while a rank has the in-edges of its nodes.

Out-edges are the in-edges of the reversed graph. Each rank therefore also gets its shard of the reversed graph: nodes stay at
their owners, and every edge is sent, once, to the owner of its source.
"""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import DirGNNConv

from lightning_gnn.comm.call import halo_exchange
from lightning_gnn.comm.group import World
from lightning_gnn.data.lazy_ids import stored_ids
from lightning_gnn.data.shards import Shard
from lightning_gnn.nn.context import GraphContext, UnsupportedModelError
from lightning_gnn.partition.shard import owners_of


def reversed_shard(shard: Shard, world: World) -> Shard:
    """Returns this rank's shard of the reversed graph, with `x` as the only node or edge data; communicates.

    Raises:
        UnsupportedModelError: ranks hold replicated neighborhoods, which consist of in-edges.
    """
    if shard.rows != shard.counts:
        raise UnsupportedModelError(
            'DirGNNConv reads out-edges, but plan="replicate" and "dgcl_r" store only the in-edges of replicas, copies of other '
            'ranks\' nodes. Use plan="p2p" or "spst".'
        )
    batch, rank, offsets = shard.batch, world.rank, shard.offsets
    source, target = shard.node_ids(rank)[stored_ids(batch.edge_index).cpu().numpy()]
    holders = np.zeros_like(source) if shard.holders is None else shard.holders.numpy().astype(np.int64)
    of_owner = owners_of(offsets, source)
    told = torch.from_numpy(np.stack([source, target, holders], 1))
    parts = {peer: told[torch.from_numpy(of_owner == peer)] for peer in range(world.size)}
    # The number of edges goes first, so that no message is empty.
    sends = [
        (peer, torch.cat([edges.new_tensor([len(edges)]), edges.view(-1)]).view(torch.uint8).to(world.device))
        for peer, edges in parts.items()
        if peer != rank
    ]
    with world.watch.during(halo_exchange("DirGNNConv", "out-edges"), joint=False):
        arrived = world.transport.start_varied(sends, [peer for peer, _ in sends])()
    for peer, message in arrived.items():
        parts[peer] = message.cpu().view(torch.int64)[1:].view(-1, 3)
    # In the order of target rows, as in a CSR matrix.
    to, at, held_by = torch.cat(list(parts.values())).numpy().T
    order = np.lexsort((at, to))
    to, at = to[order] - offsets[rank], at[order]
    remote = owners_of(offsets, at) != rank
    halo, position = np.unique(at[remote], return_inverse=True)
    local = at - offsets[rank]
    local[remote] = shard.counts[rank] + position
    halos = tuple(world.all_gather_object(halo))
    edge_index = torch.from_numpy(np.stack([local, to])).to(world.device)
    return replace(
        shard,
        batch=Data(x=batch.x, edge_index=edge_index),
        halos=halos,
        holders=None if shard.holders is None else torch.from_numpy(held_by[order]),
    )


def both_ways(conv: DirGNNConv, context: GraphContext, layer: str) -> dict[str, Any]:
    """Returns the forward of a bound DirGNNConv, like an adapter."""
    reverse = context.reverse
    if reverse is None:
        raise UnsupportedModelError(
            f"'{layer}' (DirGNNConv) reads out-edges, which this scheme does not store on its ranks: its bind() predates "
            "lightning_gnn.nn.bind.context_of."
        )

    def forward(self: DirGNNConv, x: Tensor, edge_index: Tensor) -> Tensor:
        if edge_index is not context.edge_index:
            raise UnsupportedModelError(
                f"'{layer}' (DirGNNConv) requires batch.edge_index: no rank has all out-edges of other edges. "
                "Select edges in the data; docs/recipes.md, 'Directed graphs', has both directions of each."
            )
        out = self.alpha * self.conv_out(x, reverse.edge_index) + (1 - self.alpha) * self.conv_in(x, edge_index)
        return out if self.lin is None else out + self.lin(x)

    return {"forward": types.MethodType(forward, conv)}
