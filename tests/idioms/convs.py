"""PyG's examples that are about one conv: two layers of it, or what the example has, on nodes with classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, ModuleList, ReLU, Sequential
from torch_geometric import nn
from torch_geometric.data import Data
from torch_geometric.nn import models
from torch_geometric.utils import softmax

from idioms.harness import CLASSES, FEATURES, Case, directed, graph, idiom
from idioms.steps import Classifier

HIDDEN = 8


class Layers(torch.nn.Module):
    """Convs one after the other, each called with the edges and what belongs to these."""

    def __init__(self, *convs: torch.nn.Module, act: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.convs, self.act = ModuleList(convs), act

    def forward(self, x: Tensor, edge_index: Tensor, *edges: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.dropout(self.act(conv(x, edge_index, *edges)), p=0.0, training=self.training)
        return self.convs[-1](x, edge_index, *edges)


def two(conv: Callable[[int, int], torch.nn.Module], **options: Any) -> Layers:
    return Layers(conv(FEATURES, HIDDEN), conv(HIDDEN, CLASSES), **options)


class Between(torch.nn.Module):
    """Convs of one width between two linear maps; each is called with x, what `first` says of the input, and the edges."""

    def __init__(self, *convs: torch.nn.Module, with_first: bool = False) -> None:
        super().__init__()
        self.lin1, self.lin2, self.convs = Linear(FEATURES, HIDDEN), Linear(HIDDEN, CLASSES), ModuleList(convs)
        self.with_first = with_first

    def forward(self, x: Tensor, edge_index: Tensor, *edges: Tensor) -> Tensor:
        x = x_0 = self.lin1(x).relu()
        for conv in self.convs:
            x = conv(x, *((x_0,) if self.with_first else ()), edge_index, *edges).relu()
        return self.lin2(x).log_softmax(-1)


class DNA(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = Linear(FEATURES, HIDDEN), Linear(HIDDEN, CLASSES)
        self.convs = ModuleList(nn.DNAConv(HIDDEN, heads=2, groups=4, dropout=0.0, cached=True) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x_all = self.lin1(x).relu().view(-1, 1, HIDDEN)
        for conv in self.convs:
            x_all = torch.cat([x_all, conv(x_all, edge_index).relu().view(-1, 1, HIDDEN)], dim=1)
        return self.lin2(x_all[:, -1]).log_softmax(-1)


class MixHop(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A bias in front of a norm has no gradient but rounding, of which Adam makes whole steps.
        self.conv1 = nn.MixHopConv(FEATURES, HIDDEN, powers=[0, 1, 2], bias=False)
        self.norm1 = nn.BatchNorm(3 * HIDDEN)
        self.conv2, self.lin = nn.MixHopConv(3 * HIDDEN, HIDDEN, powers=[0, 1, 2]), Linear(3 * HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x, edge_index))
        return self.lin(self.conv2(x, edge_index))


class GeniePath(torch.nn.Module):
    """Attention for the breadth, an LSTM over layers for the depth (PyG examples/geniepath.py, GeniePathLazy)."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.lin1, self.lin2 = Linear(FEATURES, HIDDEN), Linear(HIDDEN, CLASSES)
        self.breadths = ModuleList(nn.GATConv(HIDDEN, HIDDEN, heads=1) for _ in range(layers))
        self.depths = ModuleList(torch.nn.LSTM(2 * HIDDEN, HIDDEN, bias=False) for _ in range(layers))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin1(x)
        h = c = torch.zeros(1, x.shape[0], HIDDEN, device=x.device, dtype=x.dtype)
        heard = [torch.tanh(breadth(x, edge_index)) for breadth in self.breadths]
        x = x[None, :]
        for each, depth in zip(heard, self.depths):
            x, (h, c) = depth(torch.cat((each[None, :], x), -1), (h, c))
        return self.lin2(x[0])


class LGC(torch.nn.Module):
    """The mean of all layers' rows, as LightGCN takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = Linear(FEATURES, HIDDEN), Linear(HIDDEN, CLASSES)
        self.convs = ModuleList(nn.LGConv() for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = [self.lin1(x)]
        for conv in self.convs:
            rows.append(conv(rows[-1], edge_index))
        return self.lin2(torch.stack(rows).mean(0))


class PointNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.PointNetConv(Sequential(Linear(FEATURES + 3, HIDDEN), ReLU()), Linear(HIDDEN, HIDDEN))
        self.conv2 = nn.PointTransformerConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, pos, edge_index).relu(), pos, edge_index)


class PointGNN(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = FEATURES
        self.conv = nn.PointGNNConv(Linear(width, 3), Linear(width + 3, HIDDEN), Linear(HIDDEN, width))
        self.ppf = nn.PPFConv(Linear(width + 4, HIDDEN), Linear(HIDDEN, CLASSES))

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor, normal: Tensor) -> Tensor:
        return self.ppf(self.conv(x, pos, edge_index).relu(), pos, normal, edge_index)


class Signed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.SignedConv(FEATURES, HIDDEN // 2, first_aggr=True)
        self.conv2 = nn.SignedConv(HIDDEN // 2, HIDDEN // 2, first_aggr=False)
        self.lin = Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        pos, neg = edge_index[:, edge_type == 0], edge_index[:, edge_type != 0]
        x = self.conv1(x, pos, neg).relu()
        return self.lin(self.conv2(x, pos, neg).relu())


class HEAT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.HEATConv(FEATURES, HIDDEN, 2, 3, edge_type_emb_dim=4, edge_dim=3, edge_attr_emb_dim=4, heads=2)
        self.lin = Linear(2 * HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, node_type: Tensor, edge_type: Tensor, attr: Tensor) -> Tensor:
        return self.lin(self.conv(x, edge_index, node_type, edge_type, attr).relu())


class SuperGAT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"attention_type": "MX", "edge_sample_ratio": 0.8, "is_undirected": True}
        self.conv1 = nn.SuperGATConv(FEATURES, HIDDEN, heads=2, **options)
        self.conv2 = nn.SuperGATConv(2 * HIDDEN, CLASSES, heads=2, concat=False, **options)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(F.elu(self.conv1(x, edge_index)), edge_index)


class Attention(nn.MessagePassing):
    """Attention of one's own: softmax over the edges of a node, by PyG's function."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.lin, self.att = nn.Linear(in_channels, out_channels, bias=False), nn.Linear(2 * out_channels, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, ptr: Tensor | None, size_i: int | None) -> Tensor:
        score = F.leaky_relu(self.att(torch.cat([x_i, x_j], dim=-1)), 0.2)
        return softmax(score, index, ptr, size_i) * x_j


class OwnAggregate(nn.MessagePassing):
    """Methods of MessagePassing of one's own, as PyG's tutorial has them."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="add")
        self.lin, self.bias = (
            Linear(in_channels, out_channels, bias=False),
            torch.nn.Parameter(torch.zeros(out_channels)),
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x)) + self.bias

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.tanh()

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int | None = None) -> Tensor:
        summed = inputs.new_zeros(dim_size, inputs.size(1)).index_add_(0, index, inputs)
        largest = inputs.new_zeros(dim_size, inputs.size(1)).scatter_reduce_(
            0, index.view(-1, 1).expand_as(inputs), inputs, "amax", include_self=False
        )
        return summed + largest

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return inputs + x


class Fused(nn.MessagePassing):
    """`message_and_aggregate` for sparse adjacencies, beside `message`."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="mean")
        self.lin = Linear(in_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.lin(self.propagate(edge_index, x=x, edge_weight=edge_weight)) + self.lin(x)

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight.view(-1, 1) * x_j

    def message_and_aggregate(self, edge_index: Any, x: Tensor) -> Tensor:
        from torch_geometric.utils import spmm

        return spmm(edge_index, x, reduce=self.aggr)


class EdgeUpdates(nn.MessagePassing):
    """Scores of edges by `edge_updater`, then a weighted sum."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(aggr="add")
        self.lin, self.score = Linear(in_channels, out_channels), Linear(2 * out_channels + 3, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.lin(x)
        alpha = self.edge_updater(edge_index, x=x, edge_attr=edge_attr)
        return self.propagate(edge_index, x=x, alpha=alpha)

    def edge_update(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.score(torch.cat([x_i, x_j, edge_attr], -1)).sigmoid()

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return alpha * x_j


def types() -> Data:
    data = directed()
    data.edge_type = torch.arange(data.num_edges) % 3
    data.node_type = torch.arange(data.num_nodes) % 2
    return data


def points() -> Data:
    data, g = graph(), torch.Generator().manual_seed(3)
    data.pos = torch.randn(data.num_nodes, 3, generator=g).double()
    data.normal = F.normalize(torch.randn(data.num_nodes, 3, generator=g).double(), dim=-1)
    return data


def mlp(width: int, out: int) -> Sequential:
    return Sequential(Linear(width, HIDDEN), ReLU(), Linear(HIDDEN, out))


def _gine(width: int, out: int) -> torch.nn.Module:
    return nn.GINEConv(mlp(width, out), edge_dim=3, train_eps=True)


def _nn_conv(width: int, out: int) -> torch.nn.Module:
    return nn.NNConv(width, out, Sequential(Linear(3, 4), ReLU(), Linear(4, width * out)), aggr="mean")


def _film(width: int, out: int) -> torch.nn.Module:
    return nn.FiLMConv(width, out, num_relations=3)


def _pna(width: int, out: int) -> torch.nn.Module:
    scalers = ["identity", "amplification", "attenuation"]
    return nn.PNAConv(width, out, ["mean", "min", "max", "std"], scalers, torch.tensor([3, 5, 9, 9, 6, 2]), edge_dim=3)


def _pna_towers(width: int, out: int) -> torch.nn.Module:
    return nn.PNAConv(width, out, ["mean", "max", "var"], ["identity", "linear"], torch.tensor([3, 5, 9, 9, 6, 2]))


def _gcn2() -> torch.nn.Module:
    convs = (nn.GCN2Conv(HIDDEN, 0.1, 0.5, layer + 1, shared_weights=layer % 2 == 0) for layer in range(4))
    return Between(*convs, with_first=True)


def _gps() -> torch.nn.Module:
    # Without biases in front of a norm, and of keys, which softmax takes away.
    return Between(nn.GPSConv(HIDDEN, nn.GCNConv(HIDDEN, HIDDEN), heads=2, norm=None, attn_kwargs={"bias": False}))


def _rgcn(width: int, out: int) -> torch.nn.Module:
    return nn.RGCNConv(width, out, num_relations=3, num_bases=2)


def _rgat(width: int, out: int) -> torch.nn.Module:
    conv = nn.RGATConv(width, out, num_relations=3, num_bases=2, edge_dim=3)
    torch.nn.init.ones_(conv.l2)  # PyG leaves it as the memory was
    return conv


class _RGAT(Layers):
    def forward(self, x: Tensor, edge_index: Tensor, *edges: Tensor) -> Tensor:
        edge_type, edge_attr = edges
        x = self.convs[0](x, edge_index, edge_type, edge_attr).relu()
        return self.convs[1](x, edge_index, edge_type, edge_attr)


Row = tuple[str, Callable[[], torch.nn.Module], Callable[[], Data], Sequence[str]]
WEIGHT, ATTR, TYPE = ("edge_weight",), ("edge_attr",), ("edge_type",)
GRAPHS: dict[str, Row] = {
    "gcn": ("examples/gcn.py", lambda: two(partial(nn.GCNConv, cached=True)), graph, ()),
    "gcn_with_weights": ("examples/gcn.py, --use_gdc", lambda: two(nn.GCNConv), directed, WEIGHT),
    "gcn_improved": ("GCNConv's options", lambda: two(partial(nn.GCNConv, improved=True)), graph, ()),
    "gcn_without_normalisation": (
        "GCNConv's options",
        lambda: two(partial(nn.GCNConv, normalize=False)),
        directed,
        WEIGHT,
    ),
    "sage": ("examples/graph_sage", lambda: two(partial(nn.SAGEConv, normalize=True, project=True)), graph, ()),
    "sage_max": ("SAGEConv's options", lambda: two(partial(nn.SAGEConv, aggr="max")), graph, ()),
    "sage_lstm_like_several": (
        "SAGEConv's options",
        lambda: two(partial(nn.SAGEConv, aggr=["mean", "max"])),
        graph,
        (),
    ),
    "gat": (
        "examples/gat.py",
        lambda: Layers(nn.GATConv(FEATURES, 8, heads=4), nn.GATConv(32, CLASSES, heads=2, concat=False), act=F.elu),
        graph,
        (),
    ),
    "gatv2": ("GATv2Conv", lambda: two(partial(nn.GATv2Conv, share_weights=True)), graph, ()),
    "gatv2_edges": ("GATv2Conv", lambda: two(partial(nn.GATv2Conv, edge_dim=3)), directed, ATTR),
    "gat_residual": ("GATConv's options", lambda: two(partial(nn.GATConv, residual=True)), graph, ()),
    "transformer": ("examples/unimp_arxiv.py", lambda: two(partial(nn.TransformerConv, beta=True)), graph, ()),
    "transformer_edges": ("TransformerConv", lambda: two(partial(nn.TransformerConv, edge_dim=3)), directed, ATTR),
    "gcn2": ("examples/gcn2_cora.py", _gcn2, graph, ()),
    "appnp": ("APPNP", lambda: Between(nn.APPNP(K=5, alpha=0.1)), graph, ()),
    "arma": (
        "examples/arma.py",
        lambda: two(partial(nn.ARMAConv, num_stacks=3, num_layers=2, shared_weights=True)),
        graph,
        (),
    ),
    "sgc": ("examples/sgc.py", lambda: nn.SGConv(FEATURES, CLASSES, K=2, cached=True), graph, ()),
    "ssgc": ("SSGConv", lambda: nn.SSGConv(FEATURES, CLASSES, alpha=0.1, K=3), graph, ()),
    "tagcn": ("examples/tagcn.py", lambda: two(nn.TAGConv), graph, ()),
    "agnn": (
        "examples/agnn.py",
        lambda: Between(nn.AGNNConv(requires_grad=False), nn.AGNNConv(requires_grad=True)),
        graph,
        (),
    ),
    "super_gat_without_its_loss": ("examples/super_gat.py", SuperGAT, graph, ()),
    "dna": ("examples/dna.py", DNA, graph, ()),
    "mixhop": ("examples/mixhop.py", MixHop, graph, ()),
    "pna": ("examples/pna.py", lambda: two(_pna), directed, ATTR),
    "pna_of_rows": ("PNAConv", lambda: two(_pna_towers), graph, ()),
    "cheb": ("ChebConv", lambda: two(partial(nn.ChebConv, K=3)), graph, ()),
    "film": ("examples/film.py", lambda: two(_film), types, TYPE),
    "faconv": ("FAConv", lambda: Between(nn.FAConv(HIDDEN, eps=0.3), nn.FAConv(HIDDEN), with_first=True), graph, ()),
    "egc": (
        "examples/egc.py",
        lambda: Between(nn.EGConv(HIDDEN, HIDDEN, ["sum", "max", "symnorm"], num_heads=4, num_bases=2)),
        graph,
        (),
    ),
    "lightgcn_convs": ("LightGCN", LGC, graph, ()),
    "geniepath": ("examples/geniepath.py", GeniePath, graph, ()),
    "rgcn": ("examples/rgcn.py", lambda: two(_rgcn), types, TYPE),
    "fast_rgcn": (
        "examples/rgcn.py",
        lambda: two(partial(nn.FastRGCNConv, num_relations=3)),
        types,
        TYPE,
    ),
    "rgat": ("examples/rgat.py", lambda: _RGAT(_rgat(FEATURES, HIDDEN), _rgat(HIDDEN, CLASSES)), types, TYPE + ATTR),
    "gin": ("examples/mutag_gin.py", lambda: two(lambda i, o: nn.GINConv(mlp(i, o), train_eps=True)), graph, ()),
    "gin_batch_norm": (
        "examples/mutag_gin.py",
        lambda: two(lambda i, o: nn.GINConv(nn.MLP([i, HIDDEN, o], norm="batch_norm", bias=False))),
        graph,
        (),
    ),
    "gine": ("GINEConv", lambda: two(_gine), directed, ATTR),
    "nnconv": ("examples/qm9_nn_conv.py", lambda: two(_nn_conv), directed, ATTR),
    "gated_graph": ("GatedGraphConv", lambda: Between(nn.GatedGraphConv(HIDDEN, num_layers=3)), directed, WEIGHT),
    "edge_conv": ("examples/dgcnn_classification.py", lambda: two(lambda i, o: nn.EdgeConv(mlp(2 * i, o))), graph, ()),
    "pointnet": ("examples/pointnet2_classification.py", PointNet, points, ("pos",)),
    "point_gnn": ("PointGNNConv, PPFConv", PointGNN, points, ("pos", "normal")),
    "cluster_gcn_conv": ("ClusterGCNConv", lambda: two(partial(nn.ClusterGCNConv, diag_lambda=0.5)), graph, ()),
    "feast": ("FeaStConv", lambda: two(partial(nn.FeaStConv, heads=2)), graph, ()),
    "gmm": ("GMMConv", lambda: two(partial(nn.GMMConv, dim=3, kernel_size=2)), directed, ATTR),
    "leconv": ("LEConv", lambda: two(nn.LEConv), directed, WEIGHT),
    "mfconv": ("MFConv", lambda: two(partial(nn.MFConv, max_degree=4)), graph, ()),
    "resgated": ("ResGatedGraphConv", lambda: two(partial(nn.ResGatedGraphConv, edge_dim=3)), directed, ATTR),
    "pdn": ("PDNConv", lambda: two(partial(nn.PDNConv, edge_dim=3, hidden_channels=4)), directed, ATTR),
    "general": (
        "GeneralConv",
        lambda: two(partial(nn.GeneralConv, in_edge_channels=3, attention=True, heads=2)),
        directed,
        ATTR,
    ),
    "cgconv": ("CGConv", lambda: Between(nn.CGConv(HIDDEN, dim=3, batch_norm=False)), directed, ATTR),
    "genconv": (
        "examples/ogbn_proteins_deepgcn.py",
        lambda: two(partial(nn.GENConv, aggr="softmax", learn_t=True, edge_dim=3)),
        directed,
        ATTR,
    ),
    "gen_powermean": ("GENConv", lambda: two(partial(nn.GENConv, aggr="powermean", learn_p=True)), graph, ()),
    "heat": ("HEATConv", HEAT, types, ("node_type", "edge_type", "edge_attr")),
    "signed": ("examples/signed_gcn.py", Signed, types, TYPE),
    "wl_continuous": ("WLConvContinuous", lambda: Between(nn.WLConvContinuous()), directed, WEIGHT),
    "antisymmetric": ("AntiSymmetricConv", lambda: Between(nn.AntiSymmetricConv(HIDDEN, num_iters=2)), graph, ()),
    "dir_gnn": ("examples/dir_gnn.py", lambda: two(lambda i, o: nn.DirGNNConv(nn.SAGEConv(i, o))), directed, ()),
    "gps": (
        "examples/graph_gps.py",
        _gps,
        graph,
        (),
    ),
    "own_attention": ("utils.softmax in a message", lambda: two(Attention), graph, ()),
    "own_aggregate_and_update": ("PyG's tutorial on message passing", lambda: two(OwnAggregate), graph, ()),
    "own_message_and_aggregate": ("PyG's tutorial on sparse tensors", lambda: two(Fused), directed, WEIGHT),
    "own_edge_updates": ("MessagePassing.edge_updater", lambda: two(EdgeUpdates), directed, ATTR),
    "basic_gcn": (
        "nn.models",
        lambda: models.GCN(FEATURES, HIDDEN, 3, CLASSES, norm="batch_norm", jk="cat", bias=False),
        graph,
        (),
    ),
    "edge_cnn": ("nn.models", lambda: models.EdgeCNN(FEATURES, HIDDEN, 2, CLASSES), graph, ()),
}


def _case(name: str) -> Case:
    _, model, data, passed = GRAPHS[name]
    return Case(Classifier(model(), *passed), data())


for _name, (_source, *_) in GRAPHS.items():
    idiom(source=f"PyG {_source}", name=_name)(partial(_case, _name))


# Refused ######################################################################


@idiom(source="PyG examples/super_gat.py", refused="get_attention_loss")
def super_gat() -> Case:
    class WithAttention(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            model: Any = self.model
            return loss + 4.0 * (model.conv1.get_attention_loss() + model.conv2.get_attention_loss())

    return Case(WithAttention(SuperGAT()), graph())


def _refused(name: str, source: str, says: str, model: Callable[[], torch.nn.Module], *passed: str) -> None:
    GRAPHS[name] = source, model, graph, passed
    idiom(source=f"PyG {source}", refused=says, name=name)(partial(_case, name))


_refused("hypergraph", "HypergraphConv", "against the direction", lambda: two(nn.HypergraphConv))
_refused(
    "target_to_source",
    "MessagePassing(flow=...)",
    "flow='target_to_source'",
    lambda: two(partial(nn.GCNConv, flow="target_to_source")),
)
