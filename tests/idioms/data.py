"""Graphs and datasets as people have them: splits, transforms, shapes, dtypes, attributes of odd names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import nn
from torch_geometric import transforms as T
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.loader import DataLoader, RandomNodeLoader

from idioms.convs import HIDDEN, Layers, two
from idioms.harness import CLASSES, FEATURES, Case, directed, graph
from idioms.plain import idiom
from idioms.steps import Classifier
from lightning_gnn import GraphDataModule


class Dataset(InMemoryDataset):
    """A dataset of one graph, whose transform runs whenever it is asked for it."""

    def __init__(self, data: Data, transform: Callable[[Any], Any] | None = None) -> None:
        super().__init__(None, transform)
        self.data, self.slices = self.collate([data])


def gcn(*passed: str) -> Classifier:
    return Classifier(two(nn.GraphConv if passed else nn.GCNConv), *passed)


def without_masks() -> Data:
    data = graph()
    for name in ("train_mask", "val_mask", "test_mask"):
        del data[name]
    return data


# Splits #######################################################################


@idiom(source="PyG examples: RandomNodeSplit as transform")
def random_split_as_transform() -> Case:
    return Case(gcn(), GraphDataModule(Dataset(without_masks(), T.RandomNodeSplit(num_val=0.2, num_test=0.3))))


@idiom(source="PyG: RandomNodeSplit applied once")
def random_split_once() -> Case:
    return Case(gcn(), T.RandomNodeSplit(num_val=0.2, num_test=0.3)(without_masks()))


@idiom(source="GraphDataModule(split=...)")
def random_split_of_the_datamodule() -> Case:
    return Case(gcn(), GraphDataModule(without_masks(), split=(0.5, 0.2, 0.3)))


@idiom(source="PyG: masks of several splits, [N, 10]")
def several_splits() -> Case:
    data = T.RandomNodeSplit(num_splits=3, num_val=0.2, num_test=0.3)(without_masks())
    return Case(gcn(), GraphDataModule(data, split_index=1))


@idiom(source="PyG examples/dna.py, rgcn.py: data.train_idx", refused="train_idx")
def index_splits() -> Case:
    class ByIds(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch)[batch.train_idx], batch.y[batch.train_idx])

    data = graph()
    data.train_idx = data.train_mask.nonzero().view(-1)
    data.test_idx = data.test_mask.nonzero().view(-1)
    return Case(ByIds(two(nn.GCNConv)), data)


@idiom(
    source="PyG examples/rgcn.py: train_idx, train_y",
    refused="train_idx",
    stages=("fit",),
)
def index_splits_with_labels() -> Case:
    class ByIds(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = two(lambda i, o: nn.RGCNConv(i, o, 2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self.model(batch.x, batch.edge_index, batch.edge_type)
            return F.nll_loss(out[batch.train_idx].log_softmax(-1), batch.train_y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    data = graph()
    data.train_idx = data.train_mask.nonzero().view(-1)
    data.train_y = data.y[data.train_idx]
    data.edge_type = torch.arange(data.num_edges) % 2
    return Case(ByIds(), data)


@idiom(source="get_idx_split() of OGB's datasets")
def ogb_split() -> Case:
    class OGB(Dataset):
        def get_idx_split(self) -> dict[str, Tensor]:
            ids = torch.randperm(80, generator=torch.Generator().manual_seed(2))
            return {"train": ids[:40], "valid": ids[40:60], "test": ids[60:]}

    return Case(gcn(), GraphDataModule(OGB(without_masks())))


@idiom(source="no validation nodes", stages=("fit", "test"))
def no_validation_nodes() -> Case:
    data = graph()
    data.val_mask[:] = False
    return Case(gcn(), data)


@idiom(source="no test nodes", refused="test_mask holds no labeled node", stages=("test",))
def no_test_nodes() -> Case:
    data = graph()
    data.test_mask[:] = False
    return Case(gcn(), data)


@idiom(source="predicting without masks and labels", stages=("predict",))
def predicting_without_labels() -> Case:
    data = without_masks()
    del data.y
    return Case(gcn(), GraphDataModule(data))


@idiom(source="Trainer.validate before fit", stages=("validate", "fit", "validate"))
def validate_before_fit() -> Case:
    return Case(gcn(), graph())


@idiom(source="masks of 0 and 1, uint8")
def masks_of_numbers() -> Case:
    data = graph()
    for name in ("train_mask", "val_mask", "test_mask"):
        data[name] = data[name].to(torch.uint8)
    return Case(gcn(), data)


# Transforms ###################################################################


def transformed(*transforms: Any, data: Data | None = None, module: L.LightningModule | None = None) -> Case:
    made = GraphDataModule(Dataset(graph() if data is None else data, T.Compose([*transforms])))
    return Case(gcn() if module is None else module, made)


@idiom(source="PyG T.NormalizeFeatures of the dataset")
def normalize_features() -> Case:
    data = graph()
    data.x = data.x.abs()
    return transformed(T.NormalizeFeatures(), data=data)


@idiom(source="PyG T.ToUndirected, T.AddSelfLoops")
def to_undirected_and_self_loops() -> Case:
    data = directed()
    del data.edge_attr
    return transformed(T.ToUndirected(), T.AddSelfLoops(attr="edge_weight"), data=data, module=gcn("edge_weight"))


@idiom(source="PyG T.GCNNorm, then normalize=False")
def gcn_norm_as_transform() -> Case:
    conv = lambda i, o: nn.GCNConv(i, o, normalize=False)  # noqa: E731
    return transformed(T.GCNNorm(), module=Classifier(two(conv), "edge_weight"))


@idiom(source="PyG T.ToSparseTensor: adj_t", refused="adj_t")
def to_sparse_tensor() -> Case:
    class OnAdjacency(Classifier):
        def forward(self, batch: Any) -> Tensor:
            return self.model(batch.x, batch.adj_t)

    return transformed(T.ToSparseTensor(layout=torch.sparse_csr), module=OnAdjacency(two(nn.SAGEConv)))


@idiom(source="PyG T.SIGN: features of hops, then an MLP")
def sign() -> Case:
    class Sign(Classifier):
        def forward(self, batch: Any) -> Tensor:
            return self.model(torch.cat([batch.x, batch.x1, batch.x2], -1))

    data = graph()
    hops = T.SIGN(2)(data.clone().apply(lambda t: t.float() if t.is_floating_point() else t))
    data.x1, data.x2 = hops.x1.double(), hops.x2.double()
    return Case(Sign(nn.MLP([3 * FEATURES, HIDDEN, CLASSES], norm=None)), data)


@idiom(source="PyG T.GDC")
def diffusion() -> Case:
    data = T.GDC(
        self_loop_weight=1,
        normalization_in="sym",
        normalization_out="col",
        diffusion_kwargs={"method": "ppr", "alpha": 0.05},
        sparsification_kwargs={"method": "topk", "k": 8, "dim": 0},
        exact=True,
    )(graph().apply(lambda t: t.float() if t.is_floating_point() else t))
    data.edge_weight, data.edge_attr = data.edge_attr, None
    return Case(gcn("edge_weight"), data)


@idiom(source="PyG T.OneHotDegree, T.LocalDegreeProfile, T.Constant")
def degrees_as_features() -> Case:
    data = T.Constant(cat=True)(T.LocalDegreeProfile()(T.OneHotDegree(60)(graph())))
    return Case(Classifier(Layers(nn.SAGEConv(data.x.size(1), CLASSES))), data)


@idiom(source="PyG T.SVDFeatureReduction, T.RemoveIsolatedNodes, T.LargestConnectedComponents")
def smaller_graph() -> Case:
    data = T.LargestConnectedComponents()(T.RemoveIsolatedNodes()(graph()))
    return Case(gcn(), T.SVDFeatureReduction(FEATURES)(data))


@idiom(source="PyG T.HalfHop", stages=("fit",))
def half_hop() -> Case:
    torch.manual_seed(0)
    data = T.HalfHop(alpha=0.5)(graph())
    for name in ("train_mask", "val_mask", "test_mask"):
        data[name] = F.pad(data[name], (0, data.num_nodes - 80))
    data.y = F.pad(data.y, (0, data.num_nodes - 80), value=-1)
    del data.slow_node_mask
    return Case(gcn(), data)


@idiom(source="a random transform of the dataset: noise on features")
def noise_as_transform() -> Case:
    def noise(data: Data) -> Data:
        data.x = data.x + 0.1 * torch.randn(data.x.shape).double()
        return data

    return transformed(noise)


@idiom(source="a random transform of the dataset: edges dropped")
def edges_dropped_as_transform() -> Case:
    def drop(data: Data) -> Data:
        data.edge_index = data.edge_index[:, torch.rand(data.edge_index.size(1)) < 0.8]
        return data

    return transformed(drop)


# Edges ########################################################################


@idiom(source="no edges at all", schemes=("dgcl", "spmm_1d", "spmm_15d"))
def no_edges() -> Case:
    data = graph()
    data.edge_index = data.edge_index[:, :0]
    return Case(gcn(), data)


@idiom(source="self-loops only")
def self_loops_only() -> Case:
    data = graph()
    data.edge_index = torch.arange(80).repeat(2, 1)
    return Case(Classifier(Layers(nn.GATConv(FEATURES, HIDDEN), nn.SAGEConv(HIDDEN, CLASSES))), data)


@idiom(source="every edge several times")
def duplicate_edges() -> Case:
    data = directed()
    data.edge_index = torch.cat([data.edge_index] * 3, 1)
    data.edge_weight = torch.cat([data.edge_weight, 2 * data.edge_weight, data.edge_weight])
    del data.edge_attr
    model = Layers(nn.GCNConv(FEATURES, HIDDEN), nn.GraphConv(HIDDEN, HIDDEN, aggr="mean"), nn.GCNConv(HIDDEN, CLASSES))
    return Case(Classifier(model, "edge_weight"), data)


@idiom(source="ties: equal rows under max, min, median", rtol=1e-6)
def ties() -> Case:
    data = graph()
    data.x = (data.x > 0).double()
    model = Layers(nn.SAGEConv(FEATURES, HIDDEN, aggr="max"), nn.SAGEConv(HIDDEN, CLASSES, aggr=["min", "mean"]))
    return Case(Classifier(model), data)


@idiom(source="a star: one node joined with all")
def star() -> Case:
    data = graph()
    leaves, hub = torch.arange(1, 80), torch.zeros(79, dtype=torch.long)
    data.edge_index = torch.cat([torch.stack([leaves, hub]), torch.stack([hub, leaves])], 1)
    return Case(Classifier(Layers(nn.GATConv(FEATURES, HIDDEN, heads=2), nn.GCNConv(2 * HIDDEN, CLASSES))), data)


@idiom(source="negative and zero edge weights")
def negative_weights() -> Case:
    data = directed()
    data.edge_weight = data.edge_weight - 0.5
    data.edge_weight[::7] = 0
    return Case(gcn("edge_weight"), data)


@idiom(source="edge_attr of one column, as weights")
def weights_in_edge_attr() -> Case:
    data = directed()
    data.edge_attr = data.edge_weight.view(-1, 1)
    del data.edge_weight

    class Squeezed(Classifier):
        def forward(self, batch: Any) -> Tensor:
            return self.model(batch.x, batch.edge_index, batch.edge_attr.squeeze(-1))

    return Case(Squeezed(two(nn.GCNConv)), data)


@idiom(source="edge_index of int32, not contiguous")
def edges_of_int32() -> Case:
    data = graph()
    data.edge_index = data.edge_index.t().contiguous().t().int()
    return Case(gcn(), data)


# Features, labels, attributes #################################################


@idiom(source="categories as features: x int64 [N, 1], embedded")
def categories() -> Case:
    class Embedded(Classifier):
        def __init__(self) -> None:
            super().__init__(two(nn.SAGEConv))
            self.emb = torch.nn.Embedding(7, FEATURES)

        def forward(self, batch: Any) -> Tensor:
            return self.model(self.emb(batch.x.long().view(-1)), batch.edge_index)

    data = graph()
    data.x = torch.arange(80).view(-1, 1) % 7
    return Case(Embedded(), data)


@idiom(source="bool features, int32 labels")
def bool_features() -> Case:
    data = graph()
    data.x, data.y = data.x > 0, data.y.int()

    class Converts(Classifier):
        def forward(self, batch: Any) -> Tensor:
            return self.model(batch.x.double(), batch.edge_index)

    return Case(Converts(two(nn.GCNConv)), data)


@idiom(source="nodes without a label, -1, outside of the masks")
def unlabelled_nodes() -> Case:
    data = graph()
    data.y[~(data.train_mask | data.val_mask | data.test_mask)] = -1
    data.y[data.train_mask.nonzero()[:3]] = -1
    data.train_mask &= data.y >= 0
    return Case(gcn(), data)


@idiom(source="labels that are no classes in a row: 0, 3, 4")
def gaps_between_classes() -> Case:
    data = graph()
    data.y[(data.y == 1) | (data.y == 2)] = 3
    return Case(gcn(), data)


@idiom(source="attributes of odd names and kinds")
def odd_attributes() -> Case:
    class Reads(Classifier):
        def forward(self, batch: Any) -> Tensor:
            scale = batch.scale * batch.one + batch.count
            return self.model(torch.cat([batch.x, batch["second x"]], -1), batch.edge_index) * scale

    data = graph()
    data["second x"] = data.x.flip(-1) * 2
    data.scale, data.count, data.one = 0.5, 2, torch.tensor(1.5).double()
    data.title, data.names, data.time = "citation", ["a", "b"], torch.tensor([2020])
    return Case(Reads(Layers(nn.GCNConv(2 * FEATURES, HIDDEN), nn.GCNConv(HIDDEN, CLASSES))), data)


@idiom(source="a table of the whole graph: class weights as an attribute")
def table_of_the_graph() -> Case:
    class Weighted(Classifier):
        def forward(self, batch: Any) -> Tensor:
            return self.model(batch.x, batch.edge_index) + batch.prior.log()

    data = graph()
    data.prior = torch.bincount(data.y, minlength=CLASSES).double() / 80
    return Case(Weighted(two(nn.GCNConv)), data)


@idiom(source="node features in another tensor: [N, T, F], a series of each node")
def series_of_each_node() -> Case:
    class OverTime(Classifier):
        def __init__(self) -> None:
            super().__init__(Layers(nn.SAGEConv(HIDDEN, CLASSES)))
            self.gru = torch.nn.GRU(4, HIDDEN, batch_first=True)

        def forward(self, batch: Any) -> Tensor:
            return self.model(self.gru(batch.series)[1][0], batch.edge_index)

    data = graph()
    data.series = torch.randn(80, 6, 4, generator=torch.Generator().manual_seed(8)).double()
    return Case(OverTime(), data)


@idiom(source="PyG examples/pytorch_lightning: batch.batch_size", refused="batch_size")
def batch_size() -> Case:
    class OfSeeds(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self(batch)[: batch.batch_size]
            mask = batch.train_mask[: batch.batch_size]
            loss = F.cross_entropy(out[mask], batch.y[: batch.batch_size][mask])
            self.log("train_loss", loss)
            return loss

    return Case(OfSeeds(two(nn.GCNConv)), graph())


@idiom(source="batch.num_nodes, batch.size(), batch.num_edges in the step")
def num_nodes_of_the_batch() -> Case:
    class Counts(Classifier):
        def forward(self, batch: Any) -> Tensor:
            zeros = torch.zeros(batch.num_nodes, 1, dtype=batch.x.dtype)
            ones = torch.ones(batch.num_edges, dtype=batch.x.dtype)
            return self.model(torch.cat([batch.x, zeros], -1), batch.edge_index, ones)

    return Case(Counts(Layers(nn.GraphConv(FEATURES + 1, HIDDEN), nn.GraphConv(HIDDEN, CLASSES))), graph())


@idiom(source="batch.batch of one graph: zeros")
def batch_vector() -> Case:
    class Norms(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.last = (
                nn.SAGEConv(FEATURES, HIDDEN),
                nn.GraphNorm(HIDDEN),
                nn.GCNConv(HIDDEN, CLASSES),
            )

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            return self.last(self.norm(self.conv(x, edge_index), batch).relu(), edge_index)

    data = graph()
    data.batch = torch.zeros(80, dtype=torch.long)
    return Case(Classifier(Norms(), "batch"), data)


@idiom(source="y of the whole graph", refused="y has 1 rows", stages=("fit",))
def label_of_the_graph() -> Case:
    data = graph()
    data.y = torch.tensor([1])
    return Case(gcn(), data)


@idiom(source="the module's own table of nodes, by batch.n_id")
def table_in_the_module() -> Case:
    class Table(Classifier):
        def __init__(self) -> None:
            super().__init__(two(nn.GCNConv))
            self.register_buffer("table", torch.linspace(-1, 1, 80 * FEATURES).view(80, FEATURES))

        def forward(self, batch: Any) -> Tensor:
            return self.model(batch.x + self.table[batch.n_id], batch.edge_index)

    return Case(Table(), graph())


@idiom(source="the module's own table of nodes, without batch.n_id")
def table_without_ids() -> Case:
    class Table(Classifier):
        def __init__(self) -> None:
            super().__init__(two(nn.GCNConv))
            self.register_buffer("table", torch.linspace(-1, 1, 200 * FEATURES).view(200, FEATURES))

        def forward(self, batch: Any) -> Tensor:
            return self.model(batch.x + self.table[: len(batch.x)], batch.edge_index)

    return Case(Table(), graph(200))


# Loaders ######################################################################


class Loaders(L.LightningDataModule):
    def __init__(self, loader: Callable[[], Any]) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader()

    def val_dataloader(self) -> Any:
        return self.loader()


@idiom(source="PyG DataLoader of one graph", refused="GraphDataModule", stages=("fit",))
def data_loader_of_one_graph() -> Case:
    return Case(gcn(), Loaders(lambda: DataLoader([graph()], batch_size=1)))


@idiom(source="PyG RandomNodeLoader, ClusterLoader, NeighborLoader", refused="GraphDataModule", stages=("fit",))
def random_node_loader() -> Case:
    return Case(gcn(), Loaders(lambda: RandomNodeLoader(graph(), num_parts=2)))
