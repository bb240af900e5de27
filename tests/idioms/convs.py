"""PyG's examples that are about one conv."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import nn

from idioms.harness import CLASSES, FEATURES, Case, graph, idiom
from idioms.steps import Classifier

HIDDEN = 8


class TwoLayers(torch.nn.Module):
    def __init__(self, first: torch.nn.Module, second: torch.nn.Module, act=torch.relu) -> None:
        super().__init__()
        self.conv1, self.conv2, self.act = first, second, act

    def forward(self, x: Tensor, edge_index: Tensor, *edges: Tensor) -> Tensor:
        x = F.dropout(x, p=0.0, training=self.training)
        x = self.act(self.conv1(x, edge_index, *edges))
        return self.conv2(x, edge_index, *edges)


@idiom(source="PyG examples/gcn.py")
def gcn() -> Case:
    return Case(Classifier(TwoLayers(nn.GCNConv(FEATURES, HIDDEN), nn.GCNConv(HIDDEN, CLASSES))), graph())


@idiom(source="PyG examples/gat.py")
def gat() -> Case:
    convs = nn.GATConv(FEATURES, HIDDEN, heads=4), nn.GATConv(4 * HIDDEN, CLASSES, heads=1, concat=False)
    return Case(Classifier(TwoLayers(*convs, F.elu)), graph())
