"""What code of one's own does with rows and edges beside its convs: what mixes rows of all nodes, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, ModuleList
from torch_geometric import nn
from torch_geometric import transforms as T
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import (
    add_remaining_self_loops,
    add_self_loops,
    coalesce,
    degree,
    dropout_edge,
    remove_self_loops,
    scatter,
    softmax,
    sort_edge_index,
    subgraph,
    to_undirected,
)

from idioms.convs import HIDDEN, two
from idioms.harness import CLASSES, FEATURES, Case, directed, graph, idiom
from idioms.steps import Classifier
from lightning_gnn import gather_halo, reduce_halo

Forward = Callable[[Any, Tensor, Tensor], Tensor]


class Coded(torch.nn.Module):
    """Two convs, or a linear map each, and code between them."""

    def __init__(
        self, forward: Forward, conv: Callable[[int, int], torch.nn.Module] = nn.GCNConv, **parts: Any
    ) -> None:
        super().__init__()
        self.first, self.second = conv(FEATURES, HIDDEN), conv(HIDDEN, CLASSES)
        self.parts, self.code = torch.nn.ModuleDict(parts), forward

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.code(self, x, edge_index)


def between(code: Callable[[Tensor], Tensor]) -> Forward:
    """Returns a forward with code between the convs."""
    return lambda model, x, edges: model.second(code(model.first(x, edges)).relu(), edges)


def on_edges(code: Callable[[Tensor, int], Tensor]) -> Forward:
    """Returns a forward whose convs take edges that code has made of the batch's."""

    def forward(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = code(edge_index, x.size(0))
        return model.second(model.first(x, edges).relu(), edges)

    return forward


def case(forward: Forward, conv: Callable[[int, int], torch.nn.Module] = nn.GCNConv, data: Data | None = None) -> Case:
    return Case(Classifier(Coded(forward, conv)), graph() if data is None else data)


MIXES = "does not match single-device results"

# Rows of all nodes ############################################################


@idiom(source="centring")
def centred() -> Case:
    return case(between(lambda x: x - x.mean(0)), partial(nn.GCNConv, bias=False))


@idiom(source="centring, by the number of rows")
def centred_by_sum_and_length() -> Case:
    return case(between(lambda x: x - x.sum(0) / x.new_tensor(float(len(x)))), partial(nn.GCNConv, bias=False))


@idiom(source="standardising")
def standardised() -> Case:
    return case(between(lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5)), partial(nn.GCNConv, bias=False))


@idiom(source="normalising columns")
def normalised_columns() -> Case:
    return case(between(lambda x: F.normalize(x, dim=0)))


@idiom(source="normalising rows")
def normalised_rows() -> Case:
    return case(between(lambda x: F.normalize(x, dim=1)))


@idiom(source="scaling by the largest entry")
def scaled_by_the_largest() -> Case:
    return case(between(lambda x: x / x.abs().max()))


@idiom(source="softmax over nodes, as attention pooling has it")
def softmax_over_nodes() -> Case:
    return case(between(lambda x: x * x.sum(-1, keepdim=True).softmax(0)))


@idiom(source="softmax over classes")
def softmax_over_columns() -> Case:
    return case(between(lambda x: x * x.softmax(-1)))


@idiom(source="ranking nodes")
def ranks_of_nodes() -> Case:
    return case(between(lambda x: x * x.sum(-1).argsort().argsort().view(-1, 1).to(x.dtype)))


@idiom(source="cumulative sums")
def cumulative_sum() -> Case:
    return case(between(lambda x: x.cumsum(0)))


@idiom(source="clustering around centres that learn")
def distances_to_centres() -> Case:
    class Centres(Coded):
        def __init__(self) -> None:
            super().__init__(lambda m, x, e: m.second(torch.cdist(m.first(x, e), m.centres).neg().softmax(-1), e))
            self.centres = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN))

    return Case(Classifier(Centres()), graph())


@idiom(source="distances between all nodes")
def distances_between_nodes() -> Case:
    # Products would give the distance of a row to itself the size of an error of rounding.
    exactly = "donot_use_mm_for_euclid_dist"
    return case(
        between(lambda x: torch.cdist(x, x, compute_mode=exactly).softmax(-1) @ x), partial(nn.GCNConv, bias=False)
    )


@idiom(source="shuffled rows, as contrastive methods have them")
def shuffled_rows() -> Case:
    return case(between(lambda x: x + x[torch.randperm(len(x))]))


@idiom(source="noise on rows", stages=("test", "predict"))
def noise_in_training_only() -> Case:
    class Noisy(Coded):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x) if self.training else x, edge_index)

    return Case(Classifier(Noisy(between(lambda x: x))), graph())


# Edges ########################################################################

BY_HAND = f"{MIXES}|on a part of the graph"


@idiom(source="message passing by hand: scatter")
def scatter_by_hand() -> Case:
    def forward(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        x = scatter(model.first(x)[source], target, dim=0, dim_size=len(x), reduce="mean").relu()
        return scatter(model.second(x)[source], target, dim=0, dim_size=len(x), reduce="sum")

    return case(forward, Linear)


@idiom(source="message passing by hand, by docs/models.md")
def scatter_by_expand() -> Case:
    def forward(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        x = scatter(gather_halo(model.first(x))[source], target, dim=0, dim_size=len(x), reduce="mean").relu()
        return scatter(gather_halo(model.second(x))[source], target, dim=0, dim_size=len(x), reduce="sum")

    return case(forward, Linear)


@idiom(source="attention by hand: index_add_ and utils.softmax, by expand")
def attention_by_hand() -> Case:
    def forward(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        rows = model.first(x)
        sent = gather_halo(rows)[source]
        share = softmax((sent * rows[target]).sum(-1), target, num_nodes=len(x))
        heard = torch.zeros_like(rows).index_add_(0, target, share.view(-1, 1) * sent)
        return model.second(heard.relu())

    return case(forward, Linear)


@idiom(source="a dense adjacency made of edges")
def dense_adjacency() -> Case:
    def forward(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        adjacency = torch.zeros(len(x), len(x), dtype=x.dtype)
        adjacency[edge_index[1], edge_index[0]] = 1.0
        return model.second((adjacency @ model.first(x)).relu())

    return case(forward, Linear)


@idiom(source="torch.sparse adjacency made of edges")
def sparse_adjacency() -> Case:
    def forward(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        ones = torch.ones(edge_index.size(1), dtype=x.dtype)
        adjacency = torch.sparse_coo_tensor(edge_index.flip(0), ones, (len(x), len(x)))
        return model.second(torch.sparse.mm(adjacency, model.first(x)).relu())

    return case(forward, Linear)


@idiom(source="in-degrees as input")
def in_degrees() -> Case:
    def forward(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        count = degree(edge_index[1], len(x), x.dtype).view(-1, 1)
        return model.second(model.first(x / (count + 1), edge_index).relu(), edge_index)

    return case(forward)


@idiom(source="out-degrees as input")
def out_degrees() -> Case:
    def forward(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        count = degree(edge_index[0], len(x), x.dtype).view(-1, 1)
        return model.second(model.first(x / (count + 1), edge_index).relu(), edge_index)

    return case(forward)


@idiom(source="out-degrees, by docs/models.md")
def out_degrees_by_reduce() -> Case:
    def forward(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        count = reduce_halo(degree(edge_index[0], len(gather_halo(x)), x.dtype)).view(-1, 1)
        return model.second(model.first(x / (count + 1), edge_index).relu(), edge_index)

    return case(forward, data=directed())


@idiom(source="PyG's gcn_norm called in forward")
def gcn_norm_by_hand() -> Case:
    def forward(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        edges, weight = gcn_norm(edge_index, None, len(x), dtype=x.dtype)
        return model.second(model.first(x, edges, weight).relu(), edges, weight)

    return case(forward, lambda i, o: nn.GCNConv(i, o, normalize=False))


@idiom(source="utils.add_self_loops with num_nodes")
def self_loops_added() -> Case:
    return case(on_edges(lambda edges, count: add_self_loops(edges, num_nodes=count)[0]), nn.GATConv)


@idiom(source="utils.add_self_loops without num_nodes")
def self_loops_added_without_num_nodes() -> Case:
    return case(on_edges(lambda edges, count: add_self_loops(edges)[0]), nn.SAGEConv, _connected())


@idiom(source="utils.add_remaining_self_loops")
def remaining_self_loops_added() -> Case:
    return case(on_edges(lambda edges, count: add_remaining_self_loops(edges, num_nodes=count)[0]), nn.SAGEConv)


@idiom(source="utils.remove_self_loops")
def self_loops_removed() -> Case:
    data = T.AddSelfLoops()(graph())
    return case(on_edges(lambda edges, count: remove_self_loops(edges)[0]), nn.SAGEConv, data)


@idiom(source="utils.to_undirected in forward", refused="Add them to the graph before the run")
def made_undirected() -> Case:
    return case(on_edges(lambda edges, count: to_undirected(edges)), nn.SAGEConv, directed())


@idiom(source="edge_index.flip(0) in forward", refused="Add them to the graph before the run")
def transposed_edges() -> Case:
    return case(on_edges(lambda edges, count: edges.flip(0)), nn.SAGEConv, directed())


@idiom(source="utils.coalesce in forward")
def coalesced() -> Case:
    data = directed()
    data.edge_index = torch.cat([data.edge_index, data.edge_index[:, :40]], 1)
    del data.edge_weight, data.edge_attr
    return case(on_edges(lambda edges, count: coalesce(edges)), nn.SAGEConv, data)


@idiom(source="utils.sort_edge_index in forward")
def sorted_edges() -> Case:
    return case(on_edges(lambda edges, count: sort_edge_index(edges, sort_by_row=False)), nn.GATConv)


@idiom(source="utils.subgraph of the training nodes")
def induced_subgraph() -> Case:
    class OnSubgraph(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            edges, _ = subgraph(batch.train_mask, batch.edge_index)
            out = self.model(batch.x, edges)
            loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])
            self.log("train_loss", loss)
            return loss

    return Case(OnSubgraph(two(nn.GCNConv)), graph())


@idiom(source="utils.dropout_edge with p=0")
def edges_dropped() -> Case:
    class Drops(Coded):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x, dropout_edge(edge_index, p=0.0, training=self.training)[0])

    return Case(Classifier(Drops(between(lambda x: x))), graph())


@idiom(source="DropEdge", stages=("test", "predict"))
def edges_dropped_in_training_only() -> Case:
    class Drops(Coded):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x, dropout_edge(edge_index, p=0.5, training=self.training)[0])

    return Case(Classifier(Drops(between(lambda x: x))), graph())


@idiom(source="heavy edges only")
def edges_by_weight() -> Case:
    class Heavy(Classifier):
        def forward(self, batch: Any) -> Tensor:
            heavy = batch.edge_weight > 0.4
            return self.model(batch.x, batch.edge_index[:, heavy], batch.edge_weight[heavy])

    return Case(Heavy(two(nn.GraphConv)), directed())


@idiom(source="edge weights that learn, one of each edge", warns="could not run")
def weight_of_each_edge() -> Case:
    class Weighted(Classifier):
        def __init__(self, count: int) -> None:
            super().__init__(two(nn.GraphConv))
            self.weight = torch.nn.Parameter(torch.ones(count))

        def forward(self, batch: Any) -> Tensor:
            return self.model(batch.x, batch.edge_index, self.weight)

    data = graph()
    return Case(Weighted(data.num_edges), data)


@idiom(source="edge weights that learn, one of each edge, by batch.e_id")
def weight_of_each_edge_by_e_id() -> Case:
    class Weighted(Classifier):
        def __init__(self, count: int) -> None:
            super().__init__(two(nn.GraphConv))
            self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, count))

        def forward(self, batch: Any) -> Tensor:
            return self.model(batch.x, batch.edge_index, self.weight[batch.e_id].sigmoid())

    data = graph()
    return Case(Weighted(data.num_edges), data)


@idiom(source="edge weights of edge features, that learn")
def weights_of_edge_features() -> Case:
    class Weighted(Classifier):
        def __init__(self) -> None:
            super().__init__(two(nn.GCNConv))
            self.score = Linear(3, 1)

        def forward(self, batch: Any) -> Tensor:
            return self.model(batch.x, batch.edge_index, self.score(batch.edge_attr).sigmoid().view(-1))

    return Case(Weighted(), directed())


@idiom(source="edge weights of the ends' rows")
def weights_of_ends() -> Case:
    class Weighted(Classifier):
        def forward(self, batch: Any) -> Tensor:
            source, target = batch.edge_index
            weight = (batch.x[source] * batch.x[target]).sum(-1).sigmoid()
            return self.model(batch.x, batch.edge_index, weight)

    return Case(Weighted(two(nn.GCNConv)), graph())


@idiom(source="edge weights of the ends' rows, by expand")
def weights_of_ends_by_expand() -> Case:
    class Weighted(Classifier):
        def forward(self, batch: Any) -> Tensor:
            source, target = batch.edge_index
            weight = (gather_halo(batch.x)[source] * batch.x[target]).sum(-1).sigmoid()
            return self.model(batch.x, batch.edge_index, weight)

    return Case(Weighted(two(nn.GCNConv)), graph())


@idiom(source="adj_t in place of edges", refused="sparse|adj_t|SparseTensor")
def adjacency_of_torch_sparse() -> Case:
    class Sparse(Classifier):
        def forward(self, batch: Any) -> Tensor:
            size = len(batch.x), len(batch.x)
            ones = torch.ones(batch.edge_index.size(1), dtype=batch.x.dtype)
            adj_t = torch.sparse_coo_tensor(batch.edge_index.flip(0), ones, size).to_sparse_csr()
            return self.model(batch.x, adj_t)

    return Case(Sparse(two(nn.SAGEConv)), graph())


def _connected() -> Data:
    """A graph whose last node has edges, so that ids of edges tell how many nodes there are."""
    data = graph()
    data.edge_index = torch.cat([data.edge_index, torch.tensor([[79, 3], [3, 79]])], 1)
    return data


# In place #####################################################################


@idiom(source="edge weights that decay in place", stages=("fit",))
def weights_decay_in_place() -> Case:
    class Decays(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch.edge_weight.mul_(0.8)
            return super().training_step(batch, batch_idx)

    return Case(Decays(two(nn.GraphConv), "edge_weight"), directed())


@idiom(source="edge weights that decay in place, GCNConv", stages=("fit",))
def weights_of_gcn_decay_in_place() -> Case:
    class Decays(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch.edge_weight[batch.edge_weight < 0.5] *= 0.5
            return super().training_step(batch, batch_idx)

    return Case(Decays(two(nn.GCNConv), "edge_weight"), directed())


@idiom(source="edges rewired in place", stages=("fit",))
def edges_rewired_in_place() -> Case:
    class Rewires(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            chosen = batch.e_id % 3 == 0
            batch.edge_index[0, chosen] = batch.edge_index[1, chosen]
            return super().training_step(batch, batch_idx)

    return Case(Rewires(two(nn.SAGEConv)), graph())


@idiom(source="edges rewired in place, attention and extremes", stages=("fit",))
def edges_rewired_in_place_under_attention() -> Case:
    class Rewires(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            chosen = batch.e_id % 4 == self.trainer.current_epoch
            batch.edge_index[0, chosen] = batch.edge_index[1, chosen]
            return super().training_step(batch, batch_idx)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.GATConv(FEATURES, HIDDEN), nn.SAGEConv(HIDDEN, HIDDEN, aggr="max")
            self.c = nn.GCNConv(HIDDEN, CLASSES)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.c(self.b(self.a(x, edge_index).relu(), edge_index), edge_index)

    return Case(Rewires(Model()), graph())


@idiom(source="features changed in place", stages=("fit",))
def features_changed_in_place() -> Case:
    class Fades(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch.x.mul_(0.9)
            return super().training_step(batch, batch_idx)

    return Case(Fades(two(nn.SAGEConv)), graph())


@idiom(source="another tensor in the batch's place: batch.x = ...")
def features_replaced() -> Case:
    class Replaced(Classifier):
        def forward(self, batch: Any) -> Tensor:
            batch.x = F.normalize(batch.x, dim=-1)
            batch.edge_weight = batch.edge_weight.sqrt()
            return super().forward(batch)

    return Case(Replaced(two(nn.GraphConv), "edge_weight"), directed())


class Transformed(Classifier):
    transform: Callable[[Any], Any]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.transform(batch)


@idiom(source="T.AddSelfLoops, T.Constant in on_after_batch_transfer")
def transform_of_the_batch() -> Case:
    module = Transformed(two(nn.SAGEConv))
    module.model.convs[0] = nn.SAGEConv(FEATURES + 1, HIDDEN)
    module.transform = T.Compose([T.Constant(), T.RemoveSelfLoops()])
    return Case(module, graph())


@idiom(source="T.NormalizeFeatures in on_after_batch_transfer: it takes the least entry of all rows")
def features_normalised_in_a_hook() -> Case:
    module = Transformed(two(nn.SAGEConv))
    module.transform = T.NormalizeFeatures()
    return Case(module, graph())


# Norms ########################################################################


class Normed(torch.nn.Module):
    def __init__(self, *norms: torch.nn.Module) -> None:
        super().__init__()
        self.convs = ModuleList([nn.SAGEConv(FEATURES, HIDDEN, bias=False), nn.SAGEConv(HIDDEN, CLASSES)])
        self.norms = ModuleList(norms)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.convs[0](x, edge_index)
        for norm in self.norms:
            x = norm(x)
        return self.convs[1](x.relu(), edge_index)


@idiom(source="torch BatchNorm1d")
def batch_norm() -> Case:
    return Case(Classifier(Normed(BatchNorm1d(HIDDEN))), graph())


@idiom(source="BatchNorm1d(momentum=None, affine=False)")
def batch_norm_with_a_cumulative_mean() -> Case:
    return Case(Classifier(Normed(BatchNorm1d(HIDDEN, momentum=None, affine=False))), graph())


@idiom(source="BatchNorm1d(track_running_stats=False)")
def batch_norm_without_running_statistics() -> Case:
    return Case(Classifier(Normed(BatchNorm1d(HIDDEN, track_running_stats=False))), graph())


@idiom(source="PyG BatchNorm, GraphNorm, PairNorm")
def pyg_norms() -> Case:
    return Case(Classifier(Normed(nn.PairNorm(), nn.BatchNorm(HIDDEN, affine=False), nn.GraphNorm(HIDDEN))), graph())


@idiom(source="PyG LayerNorm over the graph, and over nodes")
def layer_norms() -> Case:
    return Case(Classifier(Normed(nn.LayerNorm(HIDDEN, mode="graph"), nn.LayerNorm(HIDDEN, mode="node"))), graph())


@idiom(source="PyG DiffGroupNorm")
def diff_group_norm() -> Case:
    return Case(Classifier(Normed(nn.DiffGroupNorm(HIDDEN, groups=3))), graph())


@idiom(source="PyG InstanceNorm, MeanSubtractionNorm")
def instance_norm() -> Case:
    return Case(Classifier(Normed(nn.InstanceNorm(HIDDEN), nn.MeanSubtractionNorm())), graph())


@idiom(source="PyG GraphSizeNorm")
def graph_size_norm() -> Case:
    return Case(Classifier(Normed(nn.GraphSizeNorm())), graph())


@idiom(source="torch LayerNorm, GroupNorm, LocalResponseNorm: of each row alone")
def norms_of_rows() -> Case:
    norms = torch.nn.LayerNorm(HIDDEN), torch.nn.GroupNorm(2, HIDDEN), torch.nn.RMSNorm(HIDDEN)
    return Case(Classifier(Normed(*norms)), graph())


@idiom(source="torch InstanceNorm1d: statistics over all nodes")
def torch_instance_norm() -> Case:
    class Turned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.InstanceNorm1d(HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.t()[None])[0].t()

    return Case(Classifier(Normed(Turned())), graph())


@idiom(source="F.batch_norm called as a function")
def functional_batch_norm() -> Case:
    return case(between(lambda x: F.batch_norm(x, None, None, training=True)), partial(nn.GCNConv, bias=False))


@idiom(source="F.layer_norm called as a function")
def functional_layer_norm() -> Case:
    return case(between(lambda x: F.layer_norm(x, (HIDDEN,))))


@idiom(source="statistics kept by hand in a buffer", stages=("fit",))
def running_mean_by_hand() -> Case:
    class Running(Coded):
        def __init__(self) -> None:
            super().__init__(lambda m, x, e: m.second(m.follow(m.first(x, e)).relu(), e))
            self.register_buffer("mean", torch.zeros(HIDDEN))

        def follow(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.lerp_(x.detach().mean(0), 0.1)
            return x - self.mean

    return Case(Classifier(Running()), graph())


# Readouts #####################################################################


@idiom(source="global_mean_pool", stages=("fit",))
def pooled_by_a_function() -> Case:
    def forward(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        x = model.first(x, edge_index).relu()
        pooled = nn.global_mean_pool(x, torch.zeros(len(x), dtype=torch.long))
        return model.second(x + pooled, edge_index)

    return case(forward)


@idiom(source="docs/models.md: readouts as modules")
def pooled_by_modules() -> Case:
    class Pools(Coded):
        def __init__(self) -> None:
            pools = {"mean": nn.MeanAggregation(), "max": nn.MaxAggregation(), "sum": nn.SumAggregation()}
            super().__init__(lambda m, x, e: m.second(m.joined(m.first(x, e).relu()), e), **pools)

        def joined(self, x: Tensor) -> Tensor:
            return x + sum(pool(x) for pool in self.parts.values()) / 80

    return Case(Classifier(Pools()), graph())


class OfTheGraph(Classifier):
    """One target of the whole graph."""

    def __init__(self, says: bool) -> None:
        super().__init__(nn.GCNConv(FEATURES, HIDDEN))
        self.pool, self.head, self.says = nn.MeanAggregation(), Linear(HIDDEN, 1), says

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.head(self.pool(self.model(batch.x, batch.edge_index).relu())), batch.target.view(1, 1))
        self.log("loss", loss)
        return {"loss": loss, "loss_weight": 1} if self.says else loss


@idiom(source="docs/models.md: a head over the graph", stages=("fit",))
def loss_of_the_graph() -> Case:
    module = OfTheGraph(True)
    module.validation_step = None  # type: ignore[assignment]
    data = graph()
    data.target = torch.tensor([0.7]).double()
    return Case(module, data, {"limit_val_batches": 0})


@idiom(source="a head over the graph, without loss_weight", stages=("fit",))
def loss_of_the_graph_without_weight() -> Case:
    data = graph()
    data.target = torch.tensor([0.7]).double()
    return Case(OfTheGraph(False), data, {"limit_val_batches": 0})


@idiom(source="torch_geometric.nn.TopKPooling", refused="pool", stages=("fit",))
def top_k_pooling() -> Case:
    class Pools(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = nn.GCNConv(FEATURES, CLASSES), nn.TopKPooling(CLASSES)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = self.conv(x, edge_index)
            pooled, _, _, _, chosen, _ = self.pool(x, edge_index)
            return x.index_add(0, chosen, pooled)

    return Case(Classifier(Pools()), graph())


@idiom(source="nn.AttentionalAggregation as a readout", stages=("fit",))
def attentional_readout() -> Case:
    class Pools(Coded):
        def __init__(self) -> None:
            super().__init__(
                lambda m, x, e: m.second(x_of(m, x, e), e), pool=nn.AttentionalAggregation(Linear(HIDDEN, 1))
            )

    def x_of(model: Any, x: Tensor, edge_index: Tensor) -> Tensor:
        x = model.first(x, edge_index).relu()
        return x + model.parts["pool"](x)

    return Case(Classifier(Pools()), graph())
