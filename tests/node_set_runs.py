"""Samples on a graph with two node sets, models of them, and training runs that tests share; importable in every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from common import quiet_trainer
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import GraphConv, HeteroConv, MessagePassing, SAGEConv

from lightning_gnn import DGCLStrategy, GraphDataModule

SITES, NODES, SAMPLES, FEATURES, TARGETS = 31, 17, 9, 5, 3
UP, ON, DOWN = ("site", "to", "mesh"), ("mesh", "to", "mesh"), ("mesh", "to", "site")


def graph_of_node_sets() -> HeteroData:
    """Sites with a static feature, and nodes of a mesh without features."""
    g = torch.Generator().manual_seed(1)
    graph = HeteroData()
    graph["site"].place, graph["site"].num_nodes = torch.randn(SITES, 2, generator=g).double(), SITES
    graph["mesh"].place, graph["mesh"].num_nodes = torch.randn(NODES, 2, generator=g).double(), NODES
    sizes = {"site": SITES, "mesh": NODES}
    for number, kind in enumerate((UP, ON, DOWN)):
        ends = [torch.randint(0, sizes[end], (90 + number,), generator=g) for end in kind[::2]]
        graph[kind].edge_index = torch.stack(ends)
        graph[kind].edge_attr = torch.randn(90 + number, 2, generator=g).double()
    return graph


class TypedSamples(torch.utils.data.Dataset[Any]):
    """Random samples with values of both node types, over time at the sites, and one number ``hour``."""

    def __init__(self, size: int = SAMPLES, as_hetero: bool = False) -> None:
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, SITES, FEATURES, generator=g).double()
        self.y = torch.randn(size, 2, SITES, TARGETS, generator=g).double()
        self.z = torch.randn(size, NODES, FEATURES, generator=g).double()
        self.seen, self.as_hetero = torch.rand(size, SITES, generator=g) < 0.7, as_hetero

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        site = {"x": self.x[index], "y": self.y[index], "seen": self.seen[index]}
        item = {"site": site, "mesh": {"x": self.z[index]}, "hour": torch.tensor(float(index % 24)).double()}
        return HeteroData(item) if self.as_hetero else item


# Models #######################################################################


class Interaction(MessagePassing):
    """Messages from both ends and the features of an edge; then an update of targets."""

    def __init__(self, size: int) -> None:
        super().__init__(aggr="mean")
        self.of_edges, self.of_nodes = torch.nn.Linear(2 * size + 2, size), torch.nn.Linear(2 * size, size)

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        return x[1] + self.of_nodes(torch.cat([x[1], out], -1)).relu()

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.of_edges(torch.cat([x_i, x_j, edge_attr.expand(*x_j.shape[:-1], 2)], -1)).relu()


class EncodeProcessDecode(torch.nn.Module):
    """Encoder from sites to the mesh, processor on the mesh, decoder to sites; called twice, the second time on its output."""

    def __init__(self, make: Callable[..., torch.nn.Module], with_edges: bool = False, size: int = 6) -> None:
        super().__init__()
        self.of_sites, self.of_mesh = torch.nn.Linear(FEATURES + 2, size), torch.nn.Linear(FEATURES, size)
        self.of_place = torch.nn.Linear(2, size)
        self.convs = torch.nn.ModuleList(make(size) for _ in range(3))
        self.out, self.back, self.with_edges = torch.nn.Linear(size, TARGETS), torch.nn.Linear(TARGETS, FEATURES), with_edges

    def step(self, x: Tensor, batch: HeteroData) -> Tensor:
        place = batch["site"].place
        site = self.of_sites(torch.cat([x, place.expand(x.size(0), *place.shape)], -1))
        mesh = self.of_mesh(batch.x_dict["mesh"]) * (1 + batch.hour.view(-1, 1, 1) / 24)

        def of(kind: tuple[str, str, str]) -> list[Tensor]:
            return [batch[kind].edge_index, *([batch[kind].edge_attr] if self.with_edges else [])]

        start = self.of_place(batch["mesh"].place)
        start = start.expand(len(x), *start.shape)  # has all samples of all data ranks
        mesh = mesh + self.convs[0]((site, start), *of(UP))
        mesh = self.convs[1]((mesh, mesh), *of(ON))
        return self.out(self.convs[2]((mesh, site), *of(DOWN)))

    def forward(self, batch: HeteroData) -> Tensor:
        first = self.step(batch["site"].x, batch)
        return torch.stack([first, self.step(batch["site"].x + self.back(first), batch)], 1)  # [B, 2, N, F]


class Hetero(torch.nn.Module):
    """Two ``HeteroConv`` over all edge types, with ``x_dict`` and ``edge_index_dict``."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()

        def layer(inputs: int, outputs: int) -> HeteroConv:
            sizes = (inputs, inputs), outputs
            return HeteroConv({UP: SAGEConv(*sizes), ON: GraphConv(inputs, outputs), DOWN: SAGEConv(*sizes, aggr="max")})

        self.first, self.second = layer(FEATURES, size), layer(size, 2 * TARGETS)

    def forward(self, batch: HeteroData) -> Tensor:
        x = {name: each.tanh() for name, each in self.first(batch.x_dict, batch.edge_index_dict).items()}
        out = self.second(x, batch.edge_index_dict)["site"]
        return torch.stack(out.split(TARGETS, -1), 1)


TYPED_MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "graph_conv": lambda: EncodeProcessDecode(lambda size: GraphConv((size, size), size)),
    "sage": lambda: EncodeProcessDecode(lambda size: SAGEConv((size, size), size)),
    "interaction": lambda: EncodeProcessDecode(Interaction, with_edges=True),
    "hetero": Hetero,
}


class TypedModule(L.LightningModule):
    """Masked errors of both steps, and a root of a mean over samples, which is not the mean of ranks' roots."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.losses = model, list[float]()

    def training_step(self, batch: HeteroData, batch_idx: int) -> Tensor:
        site = batch["site"]
        error = (self.model(batch) - site.y).square().mean((1, 3))
        loss = ((error * site.seen).sum() / site.seen.sum()).sqrt() + 0.1 * error.mean((0, 1))
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(site.x), sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: HeteroData, batch_idx: int) -> None:
        loss = (self.model(batch) - batch["site"].y).abs().mean()
        self.log("val_loss", loss, batch_size=len(batch["site"].x))
        self.log("inferred_loss", loss)  # weighted by the batch size that Lightning infers on one device
        sizes = float(batch["site"].num_nodes + batch["mesh"].num_nodes)
        self.log("sizes", sizes, batch_size=len(batch["site"].x))

    def predict_step(self, batch: HeteroData, batch_idx: int) -> dict[str, Tensor]:
        return {"site": self.model(batch), "mesh": batch["mesh"].x.sum(-1)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.002)


def train_typed_samples(
    rank: int,
    world_size: int,
    names: Sequence[str],
    graph_ranks: int = 1,
    strategy: Any = DGCLStrategy,
    folder: str | None = None,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Trains for six steps, validates and predicts with each model on one rank; returns everything that must equal one device."""
    found = {}
    for name in names:
        L.seed_everything(0, verbose=False)
        module = TypedModule(TYPED_MODELS[name]()).double()
        samples = TypedSamples(as_hetero=name == "sage") if folder is None else folder
        data = GraphDataModule(
            graph_of_node_sets(),
            partition="random",
            samples=samples,
            val_samples=samples,
            predict_samples=samples,
            global_batch_size=4,
            **options,
        )
        of_ranks = "auto" if strategy == "auto" else strategy(graph_ranks=graph_ranks, timeout=60)
        trainer = quiet_trainer(of_ranks, world_size, max_epochs=2)
        trainer.fit(module, datamodule=data)
        logged = {key: float(value) for key, value in trainer.callback_metrics.items() if "/" not in key}
        weights = {key: value.clone() for key, value in module.state_dict().items()}
        parts = trainer.predict(module, datamodule=data)
        predictions = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        found[name] = {"losses": module.losses, "logged": logged, "weights": weights, "predictions": predictions}
    return found
