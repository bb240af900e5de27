"""PyG's examples that are about more than a conv: depth, labels as input, link prediction, what looks at all nodes."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import BatchNorm1d, LayerNorm, Linear, ModuleList, ReLU, Sequential
from torch_geometric import nn
from torch_geometric import transforms as T
from torch_geometric.data import HeteroData
from torch_geometric.nn import models
from torch_geometric.utils import negative_sampling

from idioms.convs import HIDDEN, Between, Layers, two
from idioms.harness import CLASSES, FEATURES, Case, directed, graph, idiom
from idioms.steps import Classifier
from lightning_gnn import GraphDataModule, LinkPredictor, split_edges

# Depth ########################################################################


class JK(torch.nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        sizes = [FEATURES, HIDDEN, HIDDEN]
        self.convs = ModuleList(nn.GCNConv(a, HIDDEN) for a in sizes)
        self.jump = nn.JumpingKnowledge(mode, channels=HIDDEN, num_layers=3)
        self.lin = Linear(3 * HIDDEN if mode == "cat" else HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        rows = []
        for conv in self.convs:
            x = conv(x, edge_index).relu()
            rows.append(x)
        return self.lin(self.jump(rows))


@idiom(source="PyG examples/jump_knowledge: cat")
def jk_cat() -> Case:
    return Case(Classifier(JK("cat")), graph())


@idiom(source="PyG examples/jump_knowledge: max")
def jk_max() -> Case:
    return Case(Classifier(JK("max")), graph())


@idiom(source="PyG examples/jump_knowledge: lstm")
def jk_lstm() -> Case:
    return Case(Classifier(JK("lstm")), graph())


class DeeperGCN(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.node_encoder, self.edge_encoder = Linear(FEATURES, HIDDEN), Linear(3, HIDDEN)
        self.layers = ModuleList()
        for layer in range(1, 4):
            conv = nn.GENConv(HIDDEN, HIDDEN, aggr="softmax", t=1.0, learn_t=True, num_layers=2, norm="layer")
            norm, act = LayerNorm(HIDDEN, elementwise_affine=True), ReLU(inplace=True)
            self.layers.append(models.DeepGCNLayer(conv, norm, act, block="res+", dropout=0.0, ckpt_grad=layer % 3))
        self.lin = Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x, edge_attr = self.node_encoder(x), self.edge_encoder(edge_attr)
        x = self.layers[0].conv(x, edge_index, edge_attr)
        for layer in self.layers[1:]:
            x = layer(x, edge_index, edge_attr)
        return self.lin(self.layers[0].act(self.layers[0].norm(x)))


@idiom(source="PyG examples/ogbn_proteins_deepgcn.py")
def deepergcn() -> Case:
    return Case(Classifier(DeeperGCN(), "edge_attr"), directed())


class RevBlock(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = LayerNorm(width), nn.SAGEConv(width, width)

    def reset_parameters(self) -> None:
        self.norm.reset_parameters()
        self.conv.reset_parameters()

    def forward(self, x: Tensor, edge_index: Tensor, dropout_mask: Tensor | None = None) -> Tensor:
        x = self.norm(x).relu()
        if self.training and dropout_mask is not None:
            x = x * dropout_mask
        return self.conv(x, edge_index)


class RevGNN(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2, self.norm = Linear(FEATURES, HIDDEN), Linear(HIDDEN, CLASSES), LayerNorm(HIDDEN)
        self.convs = ModuleList(models.GroupAddRev(RevBlock(HIDDEN // 2), num_groups=2) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin1(x)
        mask = torch.ones_like(x[:, : HIDDEN // 2])  # 1 - dropout drawn, with dropout 0
        for conv in self.convs:
            x = conv(x, edge_index, mask)
        return self.lin2(self.norm(x).relu())


@idiom(source="PyG examples/rev_gnn.py")
def rev_gnn() -> Case:
    return Case(Classifier(RevGNN()), graph())


class ResidualGCN(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = Linear(FEATURES, HIDDEN), Linear(HIDDEN, CLASSES)
        self.convs = ModuleList(nn.GCNConv(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.norms = ModuleList(BatchNorm1d(HIDDEN) for _ in range(4))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.encode(x)
        for conv, norm in zip(self.convs, self.norms):
            x = x + norm(conv(x, edge_index)).relu()
        return self.decode(x)


@idiom(source="OGB's leaderboards: GCN with residuals and BatchNorm")
def gcn_residual() -> Case:
    return Case(Classifier(ResidualGCN()), graph())


class Recurrent(torch.nn.Module):
    """One conv, used until nothing new comes, with a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = Linear(FEATURES, HIDDEN), Linear(HIDDEN, CLASSES)
        self.conv, self.gru = nn.GraphConv(HIDDEN, HIDDEN), torch.nn.GRUCell(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.encode(x)
        for _ in range(3):
            x = self.gru(self.conv(x, edge_index).relu(), x)
        return self.decode(x)


@idiom(source="PyG examples/qm9_nn_conv.py: a GRU over steps of one conv")
def gru_updates() -> Case:
    return Case(Classifier(Recurrent()), graph())


@idiom(source="PyG examples: nn.Sequential with names of arguments")
def sequential() -> Case:
    first, second = (
        (nn.GCNConv(FEATURES, HIDDEN), "x, edge_index -> h"),
        (nn.GCNConv(HIDDEN, CLASSES), "h, edge_index -> h"),
    )
    return Case(Classifier(nn.Sequential("x, edge_index", [first, torch.nn.ReLU(inplace=True), second])), graph())


@idiom(source="an MLP beside GNNs, as a baseline")
def mlp_only() -> Case:
    class Alone(Classifier):
        def forward(self, batch: Any) -> Tensor:
            return self.model(batch.x)

    return Case(Alone(nn.MLP([FEATURES, HIDDEN, CLASSES], norm="layer_norm")), graph())


@idiom(source="PyG examples/pmlp.py")
def pmlp() -> Case:
    class Trained(Classifier):
        """Without edges in training, with them afterwards."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self.model(batch.x)[batch.train_mask], batch.y[batch.train_mask])
            self.log("train_loss", loss)
            return loss

    return Case(Trained(models.PMLP(FEATURES, HIDDEN, CLASSES, num_layers=2, dropout=0.0, norm=False)), graph())


@idiom(source="PyG examples/linkx.py", refused="SparseLinear|LINKX")
def linkx() -> Case:
    data = graph()
    return Case(Classifier(models.LINKX(data.num_nodes, FEATURES, HIDDEN, CLASSES, num_layers=2)), data)


# Labels #######################################################################


class UniMP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.label_emb = nn.MaskLabel(CLASSES, FEATURES)
        self.convs = ModuleList([nn.TransformerConv(FEATURES, HIDDEN, beta=True), nn.TransformerConv(HIDDEN, CLASSES)])
        self.norm = LayerNorm(HIDDEN)

    def forward(self, x: Tensor, y: Tensor, edge_index: Tensor, label_mask: Tensor) -> Tensor:
        x = self.label_emb(x, y, label_mask)
        return self.convs[1](self.norm(self.convs[0](x, edge_index)).relu(), edge_index)


class LabelsAsInput(Classifier):
    """Some training labels are input, the loss is over the others."""

    def forward(self, batch: Any, mask: Tensor | None = None) -> Tensor:
        return self.model(batch.x, batch.y, batch.edge_index, batch.train_mask if mask is None else mask)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out, asked = self(batch, batch.label_mask), batch.train_mask & ~batch.label_mask
        loss = F.cross_entropy(out[asked], batch.y[asked], reduction="sum") / asked.sum().clamp(min=1)
        self.log("train_loss", loss, batch_size=int(asked.sum()))
        return {"loss": loss, "loss_weight": asked.sum()}


@idiom(source="PyG examples/unimp_arxiv.py, with a fixed choice of labels")
def unimp() -> Case:
    data = graph()
    data.label_mask = data.train_mask & (torch.arange(80) % 3 != 0)
    return Case(LabelsAsInput(UniMP()), data)


@idiom(source="PyG examples/unimp_arxiv.py")
def unimp_drawn() -> Case:
    class Drawn(LabelsAsInput):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            chosen = batch.train_mask.clone()
            chosen[batch.train_mask] = torch.rand(int(batch.train_mask.sum())) < 0.65
            out, asked = self(batch, chosen), batch.train_mask & ~chosen
            return F.cross_entropy(out[asked], batch.y[asked])

    return Case(Drawn(UniMP()), graph())


class Distilled(L.LightningModule):
    """An MLP that learns from a GNN's outputs (PyG examples/glnn.py)."""

    def __init__(self, lam: float = 0.3) -> None:
        super().__init__()
        self.mlp, self.lam = nn.MLP([FEATURES, HIDDEN, CLASSES], norm=None), lam

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out, teacher = self.mlp(batch.x).log_softmax(-1), batch.y_soft.log_softmax(-1)
        loss1 = F.nll_loss(out[batch.train_mask], batch.y[batch.train_mask])
        loss2 = F.kl_div(out[batch.train_mask], teacher[batch.train_mask], reduction="batchmean", log_target=True)
        loss = self.lam * loss1 + (1 - self.lam) * loss2
        self.log_dict({"loss": loss, "ce": loss1, "kl": loss2})
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.mlp(batch.x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def _with_teacher() -> Any:
    data = graph()
    data.y_soft = torch.randn(80, CLASSES, generator=torch.Generator().manual_seed(5)).double()
    return data


@idiom(source="PyG examples/glnn.py, both losses over the training nodes", stages=("fit", "predict"))
def glnn_over_training_nodes() -> Case:
    return Case(Distilled(), _with_teacher())


@idiom(source="PyG examples/glnn.py", stages=("fit",))
def glnn() -> Case:
    class OfAll(Distilled):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out, teacher = self.mlp(batch.x).log_softmax(-1), batch.y_soft.log_softmax(-1)
            loss1 = F.nll_loss(out[batch.train_mask], batch.y[batch.train_mask])
            return loss1 + F.kl_div(out, teacher, reduction="batchmean", log_target=True)

    return Case(OfAll(), _with_teacher())


class Smoothed(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        post = models.CorrectAndSmooth(3, 0.8, 3, 0.9, autoscale=True)
        y_soft = self(batch).softmax(-1)
        y_soft = post.correct(y_soft, batch.y[batch.train_mask], batch.train_mask, batch.edge_index)
        return post.smooth(y_soft, batch.y[batch.train_mask], batch.train_mask, batch.edge_index)


@idiom(source="PyG examples/correct_and_smooth.py", stages=("predict",))
def correct_and_smooth() -> Case:
    return Case(Smoothed(nn.MLP([FEATURES, CLASSES])), graph())


@idiom(source="PyG examples/label_prop.py", stages=("test",))
def label_propagation() -> Case:
    class Propagated(Classifier):
        def forward(self, batch: Any) -> Tensor:
            return self.model(batch.y, batch.edge_index, mask=batch.train_mask)

    return Case(Propagated(models.LabelPropagation(num_layers=3, alpha=0.9)), graph())


# All nodes at once ############################################################


class GlobalAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.qkv, self.out = Linear(FEATURES, HIDDEN), Linear(HIDDEN, 3 * HIDDEN), Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(x + (q @ k.t() / HIDDEN**0.5).softmax(-1) @ v)


@idiom(source="a graph transformer of one's own")
def attention_over_all_nodes() -> Case:
    return Case(Classifier(GlobalAttention()), graph())


@idiom(source="PyG examples/graph_gps.py with torch.nn.MultiheadAttention")
def multihead_attention() -> Case:
    class Attends(GlobalAttention):
        def __init__(self) -> None:
            super().__init__()
            self.att = torch.nn.MultiheadAttention(HIDDEN, 2, bias=False, batch_first=True)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = self.lin(x)[None]
            return self.out((x + self.att(x, x, x, need_weights=False)[0])[0])

    return Case(Classifier(Attends()), graph())


class VirtualNode(torch.nn.Module):
    """A row of all nodes together, added to each of them in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = ModuleList([nn.GCNConv(FEATURES, HIDDEN), nn.GCNConv(HIDDEN, HIDDEN)])
        self.mlp, self.lin = nn.MLP([HIDDEN, HIDDEN], norm=None), Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).relu()
            x = x + self.mlp(x.sum(0).view(1, -1) / 80)
        return self.lin(x)


@idiom(source="OGB's virtual node")
def virtual_node() -> Case:
    return Case(Classifier(VirtualNode()), graph())


@idiom(source="PyG T.VirtualNode: a node of the graph")
def virtual_node_as_transform() -> Case:
    data = T.VirtualNode()(graph())
    for name in ("train_mask", "val_mask", "test_mask"):
        data[name][-1] = False
    return Case(Classifier(two(lambda i, o: nn.RGCNConv(i, o, 3)), "edge_type"), data)


@idiom(source="PyG examples/infomax_transductive.py", stages=("fit",))
def infomax() -> Case:
    class Infomax(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            encoder = Layers(nn.GCNConv(FEATURES, HIDDEN))
            self.model = nn.DeepGraphInfomax(
                HIDDEN,
                encoder,
                summary=lambda z, *_, **__: z.mean(dim=0).sigmoid(),
                corruption=lambda x, edge_index: (x[torch.randperm(x.size(0))], edge_index),
            )

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model.loss(*self.model(batch.x, batch.edge_index))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.001)

    return Case(Infomax(), graph())


@idiom(source="PyG nn.models.GraphUNet", refused="pool", stages=("fit",))
def graph_unet() -> Case:
    return Case(Classifier(models.GraphUNet(FEATURES, HIDDEN, CLASSES, depth=2)), graph())


# Links ########################################################################


class Autoencoder(L.LightningModule):
    """PyG examples/autoencoder.py: an inner product says which nodes are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.GAE(two(nn.GCNConv))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self.model.encode(batch.x, batch.edge_index)
        loss = self.model.recon_loss(z, batch.pos_edge_label_index)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def _link_split() -> Any:
    data = graph()
    options: dict[str, Any] = {"split_labels": True, "add_negative_train_samples": False, "is_undirected": True}
    torch.manual_seed(1)
    train, _, _ = T.RandomLinkSplit(num_val=0.1, num_test=0.2, **options)(data)
    return train


@idiom(source="PyG examples/autoencoder.py", refused="split_edges", stages=("fit",))
def autoencoder() -> Case:
    return Case(Autoencoder(), _link_split())


@idiom(source="PyG examples/autoencoder.py, --variational", refused="split_edges", stages=("fit",))
def variational_autoencoder() -> Case:
    class Variational(Autoencoder):
        def __init__(self) -> None:
            super().__init__()
            self.model = models.VGAE(_Gaussian())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + self.model.kl_loss() / 80

    return Case(Variational(), _link_split())


class _Gaussian(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mu, self.std = nn.GCNConv(FEATURES, HIDDEN), nn.GCNConv(HIDDEN, 4), nn.GCNConv(HIDDEN, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x, edge_index).relu()
        return self.mu(x, edge_index), self.std(x, edge_index)


@idiom(source="PyG examples/link_pred.py", refused="split_edges", stages=("fit",))
def link_prediction() -> Case:
    class Links(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = two(nn.GCNConv)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            z = self.model(batch.x, batch.edge_index)
            negative = negative_sampling(batch.edge_index, batch.num_nodes, batch.edge_label_index.size(1))
            pairs = torch.cat([batch.edge_label_index, negative], dim=-1)
            label = torch.cat([batch.edge_label, batch.edge_label.new_zeros(negative.size(1))])
            out = (z[pairs[0]] * z[pairs[1]]).sum(-1)
            return F.binary_cross_entropy_with_logits(out, label)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    torch.manual_seed(1)
    train, _, _ = T.RandomLinkSplit(0.1, 0.2, is_undirected=True, add_negative_train_samples=False)(graph())
    return Case(Links(), train)


@idiom(source="docs/links.md", stages=("fit", "test"))
def link_predictor() -> Case:
    data = split_edges(graph(), val=0.1, test=0.2)
    return Case(LinkPredictor(models.GCN(FEATURES, HIDDEN, 2, HIDDEN)), GraphDataModule(data))


# Nodes without features #######################################################


class Embeds(Classifier):
    def __init__(self, exact: bool) -> None:
        super().__init__(Layers(nn.SAGEConv(HIDDEN, HIDDEN), nn.SAGEConv(HIDDEN, CLASSES)))
        self.emb, self.exact = torch.nn.Embedding(80, HIDDEN), exact

    def forward(self, batch: Any) -> Tensor:
        return self.model(self.emb(batch.n_id) if self.exact else self.emb.weight, batch.edge_index)


@idiom(source="a row per node, as Node2Vec's and LightGCN's", warns="could not run")
def embedding_of_all_nodes() -> Case:
    return Case(Embeds(False), graph())


@idiom(source="a row per node, looked up by batch.n_id as PyG's loaders have it")
def embedding_by_n_id() -> Case:
    return Case(Embeds(True), graph())


@idiom(source="PyG examples/rgcn.py: x is None", refused="no node features x", stages=("fit",))
def no_features() -> Case:
    class OfIds(Classifier):
        def forward(self, batch: Any) -> Tensor:
            return self.model(None, batch.edge_index, batch.edge_type)

    data = graph()
    data.edge_type = torch.arange(data.num_edges) % 2
    data.num_nodes, data.x = 80, None
    return Case(OfIds(Layers(nn.RGCNConv(80, HIDDEN, 2), nn.RGCNConv(HIDDEN, CLASSES, 2))), data)


# Positions ####################################################################


class WithPositions(Classifier):
    def forward(self, batch: Any) -> Tensor:
        return self.model(torch.cat([batch.x, batch[self.passed[0]]], -1), batch.edge_index)


@idiom(source="PyG T.AddLaplacianEigenvectorPE")
def laplacian_positions() -> Case:
    data = T.AddLaplacianEigenvectorPE(k=3, attr_name="pe")(graph())
    return Case(WithPositions(Layers(nn.GINConv(nn.MLP([FEATURES + 3, CLASSES], norm=None))), "pe"), data)


@idiom(source="PyG T.AddRandomWalkPE")
def random_walk_positions() -> Case:
    data = T.AddRandomWalkPE(walk_length=4, attr_name="pe")(graph())
    return Case(WithPositions(Layers(nn.GCNConv(FEATURES + 4, HIDDEN), nn.GCNConv(HIDDEN, CLASSES)), "pe"), data)


# Types ########################################################################


def _hetero() -> HeteroData:
    data, g = HeteroData(), torch.Generator().manual_seed(4)
    one = graph()
    data["paper"].x, data["paper"].y = one.x, one.y
    for name in ("train_mask", "val_mask", "test_mask"):
        data["paper"][name] = one[name]
    data["author"].x = torch.randn(30, FEATURES, generator=g).double()
    data["author", "writes", "paper"].edge_index = torch.stack(
        [torch.randint(0, 30, (150,), generator=g), torch.randint(0, 80, (150,), generator=g)]
    )
    return T.ToUndirected()(data)


class OnPapers(Classifier):
    def forward(self, batch: Any) -> Tensor:
        return self.model(batch.x_dict, batch.edge_index_dict)["paper"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        paper = batch["paper"]
        return F.cross_entropy(self(batch)[paper.train_mask], paper.y[paper.train_mask])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        paper = batch["paper"]
        loss = F.cross_entropy(self(batch)[paper.val_mask], paper.y[paper.val_mask])
        self.log("val_loss", loss, batch_size=int(paper.val_mask.sum()))


@idiom(source="PyG examples/hetero/to_hetero_mag.py", stages=("fit",), schemes=("dgcl", "spmm_1d", "vertex_cut"))
def to_hetero() -> Case:
    data = _hetero()
    return Case(
        OnPapers(nn.to_hetero(models.GraphSAGE(FEATURES, HIDDEN, 2, CLASSES), data.metadata())), GraphDataModule(data)
    )


@idiom(source="PyG examples/hetero/hetero_conv_dblp.py", stages=("fit",), schemes=("dgcl", "spmm_1d", "vertex_cut"))
def hetero_conv() -> Case:
    class Convs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = [("author", "writes", "paper"), ("paper", "rev_writes", "author")]
            self.conv = nn.HeteroConv({kind: nn.SAGEConv((FEATURES, FEATURES), CLASSES) for kind in kinds})

        def forward(self, x: Any, edges: Any) -> Any:
            return self.conv(x, edges)

    return Case(OnPapers(Convs()), GraphDataModule(_hetero()))


# Weights that are shared, frozen or copied ####################################


@idiom(source="a frozen encoder, as in fine-tuning", warns=None)
def frozen_first_layer() -> Case:
    model = two(nn.GCNConv)
    for parameter in model.convs[0].parameters():
        parameter.requires_grad = False
    return Case(Classifier(model), graph())


@idiom(source="BYOL-like: a slow copy of the model, updated in training_step")
def slow_copy() -> Case:
    class Slow(Classifier):
        def __init__(self) -> None:
            super().__init__(two(nn.GCNConv))
            self.slow = copy.deepcopy(self.model).requires_grad_(False)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.model.parameters()):
                    slow.mul_(0.9).add_(fast, alpha=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                aim = self.slow(batch.x, batch.edge_index).softmax(-1)
            out, mask = self(batch), batch.train_mask
            loss = F.cross_entropy(out[mask], batch.y[mask]) + F.mse_loss(out[mask].softmax(-1), aim[mask])
            self.log("train_loss", loss)
            return loss

    return Case(Slow(), graph())


@idiom(source="two branches that share a conv")
def siamese() -> Case:
    class Siamese(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.SAGEConv(FEATURES, HIDDEN), nn.GATConv(HIDDEN, CLASSES)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            left, right = self.conv(x, edge_index), self.conv(x.flip(-1), edge_index)
            return self.last((left - right).abs(), edge_index)

    return Case(Classifier(Siamese()), graph())


@idiom(source="Between: log_softmax and nll_loss, as the older examples have it")
def nll_of_log_softmax() -> Case:
    class Nll(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.nll_loss(self(batch)[batch.train_mask], batch.y[batch.train_mask])
            self.log("loss", loss, prog_bar=True)
            return loss

    return Case(Nll(Between(nn.GCNConv(HIDDEN, HIDDEN))), graph())


@idiom(source="PyG examples: Sequential(Linear, BatchNorm1d, ReLU) in a GINConv")
def gin_of_sequential() -> Case:
    def conv(width: int, out: int) -> torch.nn.Module:
        mlp = Sequential(Linear(width, HIDDEN, bias=False), BatchNorm1d(HIDDEN), ReLU(), Linear(HIDDEN, out), ReLU())
        return nn.GINConv(mlp)

    return Case(Classifier(two(conv)), graph())
