"""What ``vertex_cut.py`` measures: graphs, cells of the grid, one training run of each, and those it is compared with."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torch_geometric.datasets as D
from common import QUIET
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import RandomNodeLoader
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.models import GCN
from typing_extensions import override

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, SpMM15DStrategy, VertexCutStrategy
from lightning_gnn.comm.call import Call
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.traffic import Meter, Traffic
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.data.store import read_cut
from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.extensions.codecs.codec import make_codec
from lightning_gnn.extensions.codecs.transport import EncodingTransport
from lightning_gnn.nn.helpers import graph_in_use
from lightning_gnn.steps.random_streams import RandomStreams
from lightning_gnn.strategies.vertex_cut.cache import MessageCache
from lightning_gnn.strategies.vertex_cut.strategy import VertexCutScheme
from lightning_gnn.strategies.vertex_cut.thresholds import AdaptiveThreshold, TopKChanges
from lightning_gnn.strategy.base import GNNStrategy
from lightning_gnn.strategy.scheme import bind_module

SPLIT = (0.6, 0.2, 0.2)
EVERY = 5
"""Epochs between two validations, where accuracy is a curve."""

COLUMNS = 128
"""Of cornell5's 4,735 one-hot features: their product with random signs, a row's length kept in the mean."""

GRAPHS = {
    "computers": ("amazon", lambda root: D.Amazon(root, "Computers")),
    "github": ("github_social", D.GitHub),
    "cornell5": ("linkx", lambda root: D.LINKXDataset(root, "cornell5")),
    "photo": ("amazon", lambda root: D.Amazon(root, "Photo")),
    "dblp": ("citation_full", lambda root: D.CitationFull(root, "DBLP")),
    "cora": ("planetoid", lambda root: D.Planetoid(root, "Cora")),
    "power-law": ("", lambda root: [planted_partition(30_000, 20.0, 8, 64, homophily=0.5, noise=6.0)]),
    "products/8": ("", lambda root: [planted_partition(306_000, 50.5, 47, 100, noise=8.0)]),
    "reddit/8": ("", lambda root: [planted_partition(29_100, 492.0, 41, 602, noise=8.0)]),
}
"""Folder of the data, and how it is loaded. The last two have an eighth of the nodes and edges of ogbn-products and Reddit,
and their degrees, classes and columns."""
SIZES = {
    "computers": (767, 10),
    "github": (128, 2),
    "cornell5": (COLUMNS, 2),
    "photo": (745, 8),
    "dblp": (1639, 4),
    "cora": (1433, 7),
    "power-law": (64, 8),
    "products/8": (100, 47),
    "reddit/8": (602, 41),
}


def load_graph(name: str, root: str) -> Data:
    """Returns a graph of the table; a source for GraphDataModule."""
    data = GRAPHS[name][1](root)[0]
    x = data.x
    if name == "cornell5":
        signs = torch.randn(x.size(1), COLUMNS, generator=torch.Generator().manual_seed(0)).sign()
        x = x @ signs / COLUMNS**0.5
    return Data(x=x.contiguous(), edge_index=data.edge_index, y=data.y)


def build(name: str, seed: int, dropout: float = 0.0, layers: int = 2) -> GCN:
    """Returns the paper's model (section 7.1), which has 2 layers and no dropout."""
    torch.manual_seed(seed)
    columns, classes = SIZES[name]
    return GCN(columns, 64, num_layers=layers, out_channels=classes, dropout=dropout)


class StaleCache(MessageCache):
    """SANCUS (VLDB'22), as its published code means to skip broadcasts: gradients always go, embeddings in the first 50 epochs
    and in every other one after that.

    Attributes:
        epoch: from 0.
    """

    epoch = 0

    @override
    def active(self, change: Tensor, size: Tensor, call: Call) -> Tensor:
        sends = call.direction == "backward" or self.epoch < 50 or self.epoch % 2 == 1
        return torch.full_like(change, sends, dtype=torch.bool)


class StaleScheme(VertexCutScheme):
    """A vertex cut with a :class:`StaleCache`, to which epochs are told."""

    @override
    def _make_cache(self, exact_ranks: Sequence[int]) -> MessageCache:
        return StaleCache(0.0)


CELLS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "cache": {"cache": "adaptive"},
    "codec": {"codec": "int8"},
    "both": {"cache": "adaptive", "codec": "int8"},
    "both, loss": {"cache": "adaptive", "codec": "int8", "monitor": None},
    **{f"both, {start}": {"cache": {"epsilon": start}, "codec": "int8"} for start in (0.03, 0.1, 0.3)},
    "both, printed": {"cache": {"rule": "printed"}, "codec": "int8"},
    "largest": {"cache": "topk", "codec": "bfp4"},
    "stale": {"stale": True},
    **{cut: {"partition": cut} for cut in ("ne", "dne")},
    **{f"both, {cut}": {"partition": cut, "cache": "adaptive", "codec": "int8"} for cut in ("ne", "dne")},
    "dgcl": {"dgcl": True},
    "CAGNET 1D": {"products": 1},
    "CAGNET 1.5D": {"products": 2},
}
"""Arguments of the strategy: CDFGNN's ablation, its threshold by accuracy or by the loss, and from other starts; equation 6 as
printed; the largest changes; SANCUS; other cuts; other schemes, CAGNET's with whole blocks, as it sends them."""

OTHERS = [name for name, options in CELLS.items() if options.keys() & {"partition", "dgcl", "products"}]
"""Those that are not of EBV's cut, which has a weight of hosts, and run as processes only."""

REDRAWN = {
    f"both, {epochs} epochs": {"cache": "adaptive", "codec": "int8", "dropout_seed_every_n_epochs": epochs}
    for epochs in (5, 10, 20, 50)
}
"""With ``--dropout``: the epochs for which its masks stay."""

FACTORS = {
    "backward x 4": {"backward": 4.0},
    "forward x 4": {"forward": 4.0},
    "first x 4": {"convs.1": 4.0},
    "last x 4": {"convs.2": 4.0},
}
THRESHOLDS = {f"both, {what}": {"cache": {"factors": factors}, "codec": "int8"} for what, factors in FACTORS.items()}
"""With ``--layers 3``, of which the second and the third send rows in each epoch: other thresholds for some of their messages."""


def strategy_of(options: dict[str, Any], cluster: bool) -> GNNStrategy:
    """Returns the strategy of a cell: arguments of VertexCutStrategy, or ``dgcl``, ``stale`` or ``products``."""
    options = {"timeout": 300, "self_check": False, **options}
    if isinstance(options.get("cache"), dict):
        options["cache"] = AdaptiveThreshold(**options["cache"])
    if cluster:
        options["shared_memory"] = False
    if options.pop("dgcl", False):
        return DGCLStrategy(**options)
    if "products" in options:
        return SpMM15DStrategy(options.pop("products"), sparsity_aware=False, **options)
    stale = options.pop("stale", False)
    machines: dict[str, Any] = {} if cluster else {"num_machines": 2, "cache_within_hosts": True}
    if stale:
        made = VertexCutStrategy(**machines, **options)
        made.scheme = StaleScheme(made.scheme.partition, made.scheme.num_machines, 0.1, 0.0, "train_acc", True, not cluster)
        return made
    return VertexCutStrategy(**machines, **{"monitor": "train_acc", **options})


class Watch(L.Callback):
    """Keeps what each epoch logs, and its seconds."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = time.perf_counter()
        scheme = getattr(trainer.strategy, "scheme", None)
        if isinstance(scheme, StaleScheme):
            scheme.messages.epoch = trainer.current_epoch

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seconds = time.perf_counter() - self._began
        kept = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.epochs.append({**kept, "seconds": seconds})


def train(
    graph: str, root: str, options: dict[str, Any], seed: int, epochs: int, test: bool = True, cluster: bool = False
) -> dict[str, Any] | None:
    """Trains one cell; returns what it logged, by epoch, and its test accuracy, on rank 0."""
    watch = Watch()
    ranks = {"num_nodes": 2, "devices": 2} if cluster else {"devices": 4}
    trainer = L.Trainer(
        strategy=strategy_of(options, cluster),
        max_epochs=epochs,
        **{**QUIET, **ranks},
        callbacks=[watch],
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    module = NodeClassifier(build(graph, seed), weight_decay=0.0)
    data = GraphDataModule("vertex_cut_runs.load_graph", {"name": graph, "root": root}, split=SPLIT, seed=seed)
    trainer.fit(module, datamodule=data)
    found: dict[str, Any] = {"report": data.shard.report, "epochs": watch.epochs}
    if test:
        found["test_acc"] = trainer.test(module, datamodule=data, verbose=False)[0]["test_acc"]
    return found if trainer.is_global_zero else None


def train_in_process(
    graph: str, root: str, options: dict[str, Any], seed: int, epochs: int, dropout: float = 0.0, layers: int = 2
) -> dict[str, Any]:
    """As :func:`train`, but with ranks that are threads of this process, one at a time: their rows and bytes, not their time."""
    strategy = strategy_of(options, False)
    data = GraphDataModule("vertex_cut_runs.load_graph", {"name": graph, "root": root}, split=SPLIT, seed=seed)
    cut = read_cut(data.partition_for(strategy.scheme.layout(4, 2)))
    shards, meeting = [cut.shard(rank) for rank in range(4)], Meeting(4)
    # By epoch and rank. Ranks share memory here, so that only what they would exchange anyway goes through the meeting.
    logged: list[list[dict[str, Any]]] = [[{} for _ in range(4)] for _ in range(epochs + 1)]

    def total(epoch: int, name: Any) -> float:
        return sum(each.get(name, 0) for each in logged[epoch])

    def on_rank(rank: int) -> None:
        world, meter, scheme, shard = InProcessWorld(rank, meeting), Meter(), copy.copy(strategy.scheme), shards[rank]
        codec = make_codec(strategy.codec, strategy.stochastic_rounding, rank)
        if codec is not None:
            world.wrap_transport(partial(EncodingTransport, codec=codec))
        model, batch = build(graph, seed, dropout, layers), shard.batch
        random, drawn_every = RandomStreams(world), strategy.dropout_seed_every_n_epochs
        context = bind_module(scheme, model, shard, world, meter).context
        cache, rule = scheme.messages, scheme._rule
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        mask, val, test = (batch[f"{name}_mask"] & (batch.y >= 0) for name in ("train", "val", "test"))

        @torch.no_grad()
        def evaluate(chosen: Tensor) -> dict[str, int]:
            context.begin_step()
            model.eval()
            out = model(batch.x, batch.edge_index)[chosen]
            model.train()
            return {"right": int((out.argmax(1) == batch.y[chosen]).sum()), "of": len(out)}

        with graph_in_use(context, this_thread_only=True):
            for epoch in range(epochs):
                if isinstance(rule, AdaptiveThreshold) and epoch:
                    if scheme.monitor is None:
                        rule.update_by_loss(total(epoch - 1, "loss"))
                    else:
                        rule.update(total(epoch - 1, "right") / total(epoch - 1, "of"))
                    cache.epsilon = rule.epsilon
                elif isinstance(rule, TopKChanges):
                    cache.share = rule.share_in(epoch, epochs)
                elif isinstance(cache, StaleCache):
                    cache.epoch = epoch
                context.begin_step()
                drawing = random.inside() if drawn_every == 1 else random.seed_draws(epoch // drawn_every)
                with drawing, world.transport.approximating(epoch + 1 < epochs):
                    out = model(batch.x, batch.edge_index)[mask]
                    loss = F.cross_entropy(out, batch.y[mask], reduction="sum") / sum(shard.mask_counts["train_mask"])
                    optimizer.zero_grad()
                    loss.backward()
                traffic = sum(meter.take().values(), Traffic())
                mine = logged[epoch][rank]
                mine |= {"right": int((out.argmax(1) == batch.y[mask]).sum()), "of": len(out), "loss": float(loss)}
                mine |= {"rows": traffic.rows, "bytes": traffic.bytes_sent}
                if cache is not None:
                    mine["epsilon"] = cache.epsilon / 4
                    for key, sent in cache.take().items():
                        mine[key, "sent"], mine[key, "of"] = sent.rows, sent.total
                grads = [parameter.grad for parameter in model.parameters()]
                flat = world.all_reduce_(torch.cat([grad.view(-1) for grad in grads]), "gradients")
                for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
                    grad.copy_(part.view_as(grad))
                optimizer.step()
                if epoch % EVERY == 0:
                    mine |= {f"val_{name}": value for name, value in evaluate(val).items()}
                    meter.take()
            logged[epochs][rank] = evaluate(test)

    for error in meeting.run(on_rank):
        if isinstance(error, BaseException):
            raise error
    figures = []
    for epoch in range(epochs):
        each = {"comm/halo_rows": total(epoch, "rows"), "comm/bytes_sent": total(epoch, "bytes")}
        each |= {"train_loss": total(epoch, "loss"), "train_acc": total(epoch, "right") / total(epoch, "of")}
        if epoch % EVERY == 0:
            each["val_acc"] = total(epoch, "val_right") / total(epoch, "val_of")
        each["cache/epsilon"] = total(epoch, "epsilon")
        for key in {name[0] for rank in logged[epoch] for name in rank if isinstance(name, tuple)}:
            each["comm/sent_fraction/" + "/".join(key)] = total(epoch, (key, "sent")) / max(
                1, total(epoch, (key, "of"))
            )
        figures.append(each)
    return {"report": cut.report, "epochs": figures, "test_acc": total(epochs, "right") / total(epochs, "of")}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Returns means over the epochs but for the first, in which constants travel too, and the last, which is exact."""
    middle = found["epochs"][1:-1]
    mean = {name: sum(each[name] for each in middle) / len(middle) for name in ("comm/halo_rows", "comm/bytes_sent")}
    return {
        "rows": mean["comm/halo_rows"],
        "bytes": mean["comm/bytes_sent"],
        "seconds": median(each.get("seconds", 0.0) for each in middle),
        "test_acc": found.get("test_acc"),
    }


def csr_of(data: Data) -> Tensor:
    """Returns the normalised adjacency as ``torch.sparse_csr``, which is several times as fast as ``edge_index``."""
    edge_index, weight = gcn_norm(data.edge_index, None, data.num_nodes)
    order = torch.argsort(edge_index[1], stable=True)
    counts = torch.bincount(edge_index[1], minlength=data.num_nodes)
    pointer = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
    return torch.sparse_csr_tensor(pointer, edge_index[0][order], weight[order], (data.num_nodes,) * 2)


def use_csr(model: GCN, on: bool) -> None:
    """Has the convs take a normalised adjacency, or ``edge_index``."""
    for conv in model.convs:
        conv.normalize = not on


def single(graph: str, root: str, seed: int, epochs: int, parts: int) -> dict[str, Any]:
    """Trains on one device as a PyG user would: full-batch for one part, else over RandomNodeLoader's parts."""
    data = prepare_graph(load_graph(graph, root), fractions=SPLIT, seed=seed)
    model = build(graph, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    adjacency = csr_of(data)
    loader = [data] if parts == 1 else RandomNodeLoader(data, num_parts=parts, shuffle=True)
    torch.manual_seed(seed)
    seconds, logged = [], []

    @torch.no_grad()
    def accuracy(mask: Tensor) -> float:
        use_csr(model, True)
        right = model(data.x, adjacency).argmax(1) == data.y
        return float(right[mask].float().mean())

    for epoch in range(epochs):
        began = time.perf_counter()
        for batch in loader:
            use_csr(model, parts == 1)
            optimizer.zero_grad()
            out = model(batch.x, adjacency if parts == 1 else batch.edge_index)
            chosen = batch.train_mask & (batch.y >= 0)
            F.cross_entropy(out[chosen], batch.y[chosen]).backward()
            optimizer.step()
        seconds.append(time.perf_counter() - began)
        logged.append({"val_acc": accuracy(data.val_mask & (data.y >= 0))} if epoch % EVERY == 0 else {})
    test = accuracy(data.test_mask & (data.y >= 0))
    return {"test_acc": test, "seconds": median(seconds[1:]), "epochs": logged}
