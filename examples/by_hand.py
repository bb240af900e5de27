"""A plain training loop without Lightning: torchrun --nproc-per-node 2 examples/by_hand.py"""

import torch
import torch.nn.functional as F
from torch_geometric.nn import SAGEConv

import lightning_gnn.functional as dgcl
from lightning_gnn import planted_partition

with dgcl.init("cpu") as ranks:
    graph = planted_partition(5_000, num_classes=7)
    part = dgcl.build_comm_info(graph)
    x, y, train = map(dgcl.dispatch_features, (graph.x, graph.y, graph.train_mask))
    torch.manual_seed(0)  # the same weights on all ranks
    convs = torch.nn.ModuleList([SAGEConv(32, 64), SAGEConv(64, 7)])
    optimizer = torch.optim.Adam(convs.parameters(), lr=0.01)

    def model(h):
        h = convs[0]((dgcl.graph_allgather(h), h), part.edge_index).relu()
        return convs[1]((dgcl.graph_allgather(h), h), part.edge_index)

    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x)[train], y[train], reduction="sum") / graph.train_mask.sum()
        loss.backward()
        dgcl.sum_gradients(convs)
        optimizer.step()

    predicted = dgcl.collect_rows(model(x).argmax(-1))  # all nodes, original order
    if ranks.rank == 0:
        right = (predicted == graph.y)[graph.test_mask].float().mean()
        print(f"Test accuracy {right:.3f} on {ranks.size} ranks")
