"""Every name that torch_geometric.nn.conv exports: exact on ranks, or refused by name (gloo ranks, float64)."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.nn.conv
from common import campaign
from torch.nn import Linear, ReLU, Sequential
from torch_geometric import nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.attention import PolynormerAttention, SGFormerAttention
from torch_geometric.nn.models.linkx import SparseLinear

import lightning_gnn
from lightning_gnn import CommNetConv, register_adapter
from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.matrix import SparseMatrix
from lightning_gnn.comm.rows import AnyRows
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard, split_graph
from lightning_gnn.data.sources import MASKS
from lightning_gnn.nn import Binding, GraphContext, UnsupportedModelError, convs
from lightning_gnn.nn.bind import bound_methods, check_module, context_of
from lightning_gnn.nn.convs import CONVS, ConvRule, exact_convs, rule_of
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.cover.strategy import CoverScheme
from lightning_gnn.strategies.spmm.strategy import CubeScheme, SpMMScheme
from lightning_gnn.strategies.vertex_cut.strategy import VertexCutScheme
from lightning_gnn.strategy.scheme import Scheme, bind_module

N, F, A, R = 40, 8, 3, 4  # nodes, columns, columns of edge attributes, relations
ABSTRACT = {
    "MessagePassing",
    "HeteroConv",
    "DirGNNConv",
    "AntiSymmetricConv",
    "GPSConv",
}  # the last four hold other convs
OVER_ALL = {"SGFormerAttention", "PolynormerAttention", "CorrectAndSmooth"}  # no convs
REFUSED = {str(name): rule.refused for name, rule in CONVS.items() if rule.refused}


def whole_graph() -> Data:
    """A random directed graph with self-loops, isolated nodes and duplicate edges."""
    g = torch.Generator().manual_seed(3)
    edge_index = torch.randint(0, N - 6, (2, 150), generator=g)
    loops = torch.arange(5).repeat(2, 1)
    edge_index = torch.cat([edge_index, loops, edge_index[:, :10]], 1)
    edges = edge_index.size(1)
    return Data(
        x=torch.randn(N, F, generator=g, dtype=torch.float64),
        x0=torch.randn(N, F, generator=g, dtype=torch.float64),
        pos=torch.randn(N, 3, generator=g, dtype=torch.float64),
        normal=torch.randn(N, 3, generator=g, dtype=torch.float64),
        node_type=torch.randint(0, 2, (N,), generator=g),
        edge_index=edge_index,
        w=torch.rand(edges, generator=g, dtype=torch.float64) + 0.1,
        a=torch.randn(edges, A, generator=g, dtype=torch.float64),
        u=torch.rand(edges, A, generator=g, dtype=torch.float64),
        t=torch.randint(0, R, (edges,), generator=g),
        t_of_node=torch.randint(0, F, (N,), generator=g),
        **{name: torch.ones(N, dtype=torch.bool) for name in MASKS},
    )


def mlp(inputs: int, outputs: int = F) -> Sequential:
    return Sequential(Linear(inputs, outputs), ReLU(), Linear(outputs, outputs))


def plain(conv: Any, g: Data) -> Any:
    return conv(g.x, g.edge_index)


def weighted(conv: Any, g: Data) -> Any:
    return conv(g.x, g.edge_index, g.w)


def attributed(conv: Any, g: Data) -> Any:
    return conv(g.x, g.edge_index, g.a)


def typed(conv: Any, g: Data) -> Any:
    return conv(g.x, g.edge_index, g.t)


def moved(conv: Any, g: Data) -> Any:
    """Rows that are not the batch's own: nothing of them is kept."""
    return conv(g.x * 1.5, g.edge_index)


def moved_weighted(conv: Any, g: Data) -> Any:
    return conv(g.x * 1.5, g.edge_index, g.w)


def in_float64(call: Callable[[Any, Data], Any]) -> Callable[[Any, Data], Any]:
    """Where PyG makes tensors of the default dtype."""

    @wraps(call)
    def run(conv: Any, g: Data) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            return call(conv, g)
        finally:
            torch.set_default_dtype(torch.float32)

    return run


@in_float64
def propagated(conv: Any, g: Data) -> Any:
    return conv(g.t_of_node, g.edge_index, g.train_mask, post_step=lambda y: y.clamp(0.0, 0.3))


@in_float64
def of_one_graph(attention: Any, g: Data) -> Any:
    return attention(g.x.unsqueeze(0), torch.ones(1, len(g.x), dtype=torch.bool))[0]


def smoothed(conv: Any, g: Data) -> Any:
    known = g.node_type == 1
    return conv(g.x.softmax(1), g.t_of_node[known], known, g.edge_index, g.w)


def degrees() -> torch.Tensor:
    return torch.bincount(torch.bincount(whole_graph().edge_index[1], minlength=N))


MANY = ["sum", "mean", "max", "min", "std", "var", "softmax", "powermean", "median", "mul"]
PNA_OPTIONS: dict[str, Any] = {
    "aggregators": ["mean", "max", "std"],
    "scalers": ["identity", "amplification", "linear"],
}
Recipe = tuple[Callable[[], Any], Callable[[Any, Data], Any]]
RECIPES: dict[str, list[Recipe]] = {
    "AGNNConv": [(lambda: nn.AGNNConv(), plain)],
    "APPNP": [(lambda: nn.APPNP(3, 0.1), plain), (lambda: nn.APPNP(2, 0.2, cached=True), weighted)],
    "ARMAConv": [(lambda: nn.ARMAConv(F, 5, num_stacks=2, num_layers=2), weighted)],
    "CGConv": [(lambda: nn.CGConv(F, A), attributed)],
    "ChebConv": [
        (lambda: nn.ChebConv(F, 5, K=3), weighted),
        (lambda: nn.ChebConv(F, 5, K=2, normalization="rw"), plain),
        (lambda: nn.ChebConv(F, 5, K=3, normalization=None), weighted),
        (lambda: nn.ChebConv(F, 5, K=3, normalization=None), lambda c, g: c(g.x, g.edge_index, lambda_max=7.5)),
    ],
    "ClusterGCNConv": [(lambda: nn.ClusterGCNConv(F, 5, diag_lambda=0.3), plain)],
    "CommNetConv": [(lambda: CommNetConv(F, 5), plain)],
    "DNAConv": [(lambda: nn.DNAConv(F, heads=2), lambda c, g: c(torch.stack([g.x, g.x0], 1), g.edge_index, g.w))],
    "EGConv": [
        (lambda: nn.EGConv(F, 8, aggregators=["symnorm", "max", "std"], num_heads=2), plain),
        (lambda: nn.EGConv(F, 8, aggregators=["mean"], num_heads=4, add_self_loops=False), plain),
    ],
    "EdgeConv": [(lambda: nn.EdgeConv(mlp(2 * F)), plain)],
    "FAConv": [(lambda: nn.FAConv(F), lambda c, g: c(g.x, g.x0, g.edge_index))],
    "FastRGCNConv": [(lambda: nn.FastRGCNConv(F, 5, R, num_bases=2), typed)],
    "FeaStConv": [(lambda: nn.FeaStConv(F, 5, heads=2), plain)],
    "FiLMConv": [(lambda: nn.FiLMConv(F, 5, num_relations=R), typed)],
    "GATConv": [(lambda: nn.GATConv(F, 5, heads=2), plain), (lambda: nn.GATConv(F, 5, edge_dim=A), attributed)],
    "GATv2Conv": [
        (lambda: nn.GATv2Conv(F, 5, heads=2, share_weights=True), plain),
        (lambda: nn.GATv2Conv(F, 5, edge_dim=A, residual=True), attributed),
    ],
    "GCN2Conv": [(lambda: nn.GCN2Conv(F, 0.1, theta=0.5, layer=1), lambda c, g: c(g.x, g.x0, g.edge_index, g.w))],
    "GCNConv": [
        *[(lambda out=out: nn.GCNConv(F, out), call) for out in (5, 13) for call in (moved, moved_weighted)],
        (lambda: nn.GCNConv(F, 5, improved=True), weighted),
        (lambda: nn.GCNConv(F, 5, add_self_loops=False, aggr="mean"), plain),
        (lambda: nn.GCNConv(F, 5, normalize=False, aggr="max"), weighted),
    ],
    "GENConv": [
        (lambda: nn.GENConv(F, 5, aggr="softmax", learn_t=True, norm=None), plain),
        (lambda: nn.GENConv(F, 5, msg_norm=True, learn_msg_scale=True), plain),  # MessageNorm, BatchNorm inside
        (lambda: nn.GENConv(F, 5, aggr="powermean", learn_p=True, norm=None, edge_dim=A), attributed),
    ],
    "GINConv": [(lambda: nn.GINConv(mlp(F), train_eps=True), plain)],
    "GINEConv": [(lambda: nn.GINEConv(mlp(F), edge_dim=A), attributed)],
    "GMMConv": [(lambda: nn.GMMConv(F, 5, A, 2), lambda c, g: c(g.x, g.edge_index, g.u))],
    "GatedGraphConv": [(lambda: nn.GatedGraphConv(F, 2), weighted)],
    "GeneralConv": [(lambda: nn.GeneralConv(F, 8, A, attention=True, heads=2), attributed)],
    "GraphConv": [
        *[(lambda aggr=aggr: nn.GraphConv(F, 5, aggr=aggr), weighted) for aggr in ("add", "mean", "max")],
        *[(lambda out=out: nn.GraphConv(F, out, aggr="mean"), moved_weighted) for out in (5, 13)],
    ],
    "HEATConv": [
        (
            lambda: nn.HEATConv(F, 5, 2, R, 4, A, 4, heads=2),
            lambda c, g: c(g.x, g.edge_index, g.node_type, g.t, g.a),
        )
    ],
    "LEConv": [(lambda: nn.LEConv(F, 5), weighted)],
    "LabelPropagation": [
        (lambda: nn.LabelPropagation(3, 0.8), propagated),
        (lambda: nn.LabelPropagation(2, 0.5), lambda c, g: c(g.x, g.edge_index, edge_weight=g.w)),
    ],
    "LGConv": [(lambda: nn.LGConv(), weighted)],
    "MFConv": [(lambda: nn.MFConv(F, 5, max_degree=4), plain)],
    "MixHopConv": [(lambda: nn.MixHopConv(F, 5, powers=[0, 1, 2]), weighted)],
    "NNConv": [(lambda: nn.NNConv(F, 5, mlp(A, F * 5)), attributed)],
    "PDNConv": [(lambda: nn.PDNConv(F, 5, A, 6), attributed)],
    "PNAConv": [
        (lambda: nn.PNAConv(F, 6, deg=degrees(), towers=2, **PNA_OPTIONS), plain),
        (lambda: nn.PNAConv(F, 6, deg=degrees(), edge_dim=A, **PNA_OPTIONS), attributed),
    ],
    "PPFConv": [(lambda: nn.PPFConv(mlp(F + 4)), lambda c, g: c(g.x, g.pos, g.normal, g.edge_index))],
    "PointGNNConv": [
        (lambda: nn.PointGNNConv(mlp(F, 3), mlp(F + 3), mlp(F)), lambda c, g: c(g.x, g.pos, g.edge_index))
    ],
    "PointNetConv": [(lambda: nn.PointNetConv(mlp(F + 3)), lambda c, g: c(g.x, g.pos, g.edge_index))],
    "PointTransformerConv": [(lambda: nn.PointTransformerConv(F, 5), lambda c, g: c(g.x, g.pos, g.edge_index))],
    "RGATConv": [(lambda: nn.RGATConv(F, 5, R, num_bases=2), typed)],
    "RGCNConv": [(lambda: nn.RGCNConv(F, 8, R, num_blocks=4), typed), (lambda: nn.RGCNConv(F, 5, R), typed)],
    "ResGatedGraphConv": [(lambda: nn.ResGatedGraphConv(F, 5, edge_dim=A), attributed)],
    "SAGEConv": [
        *[(lambda aggr=aggr: nn.SAGEConv(F, 5, aggr=aggr, project=True), plain) for aggr in (*MANY[:-1], MANY)],
        *[(lambda out=out: nn.SAGEConv(F, out, normalize=True), call) for out in (5, 13) for call in (plain, moved)],
    ],
    "SGConv": [
        *[(lambda cached=cached: nn.SGConv(F, 5, K=2, cached=cached), weighted) for cached in (False, True)],
        *[(lambda out=out: nn.SGConv(F, out, K=2, add_self_loops=False), moved) for out in (5, 13)],
    ],
    "SSGConv": [(lambda: nn.SSGConv(F, 5, alpha=0.2, K=2), weighted)],
    "SignedConv": [
        (lambda: nn.SignedConv(F, 5, True), lambda c, g: c(g.x, g.edge_index[:, g.t > 1], g.edge_index[:, g.t <= 1])),
        (lambda: nn.SignedConv(4, 5, False), lambda c, g: c(g.x, g.edge_index[:, g.t > 1], g.edge_index[:, g.t <= 1])),
    ],
    "SimpleConv": [(lambda root=root: nn.SimpleConv("mean", root), weighted) for root in ("sum", "cat", "self_loop")],
    "SuperGATConv": [
        (lambda kind=kind: nn.SuperGATConv(F, 5, heads=2, attention_type=kind, edge_sample_ratio=0.8), plain)
        for kind in ("MX", "SD")
    ],
    "TAGConv": [
        *[(lambda out=out: nn.TAGConv(F, out, K=3), call) for out in (5, 13) for call in (weighted, moved)],
        (lambda: nn.TAGConv(F, 5, K=2, normalize=False), moved_weighted),
    ],
    "TransformerConv": [
        (lambda: nn.TransformerConv(F, 5, heads=2, edge_dim=A, beta=True), attributed),
        (lambda: nn.TransformerConv(F, 5, heads=2), plain),
    ],
    "WLConvContinuous": [(lambda: nn.WLConvContinuous(), weighted)],
    # Not MessagePassing themselves: the conv inside is bound.
    "AntiSymmetricConv": [(lambda: nn.AntiSymmetricConv(F, num_iters=2), plain)],
    "DirGNNConv": [
        (lambda: nn.DirGNNConv(nn.GCNConv(F, 5), alpha=0.3), plain),
        (lambda: nn.DirGNNConv(nn.SAGEConv(F, 5), root_weight=False), moved),
        (lambda: nn.DirGNNConv(nn.SAGEConv(F, 5, aggr="max")), moved),
        (lambda: nn.DirGNNConv(nn.GATConv(F, 5, heads=2, concat=False)), plain),
    ],
    "GPSConv": [
        (lambda: nn.GPSConv(F, nn.GINConv(mlp(F)), heads=2), plain),
        (lambda: nn.GPSConv(F, None, norm=None, attn_type="performer", attn_kwargs={"head_channels": 4}), plain),
    ],
    "SGFormerAttention": [(lambda: SGFormerAttention(F, heads=2, head_channels=4), of_one_graph)],
    "PolynormerAttention": [
        (lambda: PolynormerAttention(F, heads=2, head_channels=4), of_one_graph),
        (lambda: PolynormerAttention(F, heads=1, head_channels=4, qk_shared=False), of_one_graph),
    ],
    "CorrectAndSmooth": [
        (lambda: nn.CorrectAndSmooth(3, 0.7, 2, 0.6), smoothed),
        (lambda: nn.CorrectAndSmooth(3, 0.7, 2, 0.6, autoscale=False, scale=0.9), smoothed),
    ],
}


def outputs(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


Bind = Callable[[torch.nn.Module, Shard, World], Binding]


def to_halo(module: torch.nn.Module, shard: Shard, world: World) -> Binding:
    """As under ``dgcl``: every conv reads the halo."""

    def context(shard: Shard) -> GraphContext:
        exchange, batch = HaloExchange(shard.plan, world, Meter()), shard.batch
        rows = AnyRows(shard.n_id, shard.counts, world, Meter())
        return GraphContext(exchange, batch.x, batch.edge_index, batch.get("edge_weight"), rows=rows)

    return Binding(module, context_of(module, shard, world, context))


def to_dealt(scheme: Scheme, module: torch.nn.Module, shard: Shard, world: World) -> Binding:
    """As under ``spmm_*`` and ``vertex_cut``: edges are dealt over ranks, and what cannot be shared reads the halo."""
    return bind_module(scheme, module, shard, world, Meter())


def compare(rank: int, world_size: int, names: Iterable[str], bind: Bind, all_options: bool = True) -> dict[str, str]:
    """Returns the differences found, by name and recipe; every rank compares its own rows.

    Without `all_options`, only of the first recipe of each name, in training.
    """
    graph = whole_graph()
    part = np.random.default_rng(world_size).integers(0, world_size, N)
    part[graph.edge_index[1, 0]] = 0
    holders = np.random.default_rng(world_size).integers(0, world_size, graph.edge_index.size(1))
    mine = split_graph(graph, part, LayoutSpec("vertex_cut", world_size), holders)[rank]
    shard, owned = mine.batch, mine.batch.n_id
    shard.edge_weight = shard.w
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30))
    found: dict[str, str] = {}
    try:
        for name in names:
            for number, (make, call) in enumerate(RECIPES[name] if all_options else RECIPES[name][:1]):
                for train in (True, False) if all_options else (True,):
                    torch.manual_seed(7)
                    reference = make().double().train(train)
                    torch.manual_seed(7)
                    conv = make().double().train(train)
                    target = torch.randn(N, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
                    binding = bind(torch.nn.Sequential(conv), mine, world)
                    problem = ""
                    for _ in range(2):  # what is kept from the first call serves the second
                        reference.zero_grad()
                        conv.zero_grad()
                        expected, out = outputs(call(reference, graph)), outputs(call(conv, shard))
                        rows = target[:, : expected[0].numel()].view_as(expected)
                        if expected.requires_grad:
                            (expected * rows).sum().backward()
                            (out * rows[owned]).sum().backward()
                        error = float((out - expected[owned]).detach().abs().max()) if len(owned) else 0.0
                        scale = float(expected.detach().abs().max()) + 1
                        if not error < 1e-9 * scale:
                            problem += f"outputs differ by {error:.1e}; "
                        for (key, ours), theirs in zip(conv.named_parameters(), reference.parameters()):
                            if theirs.grad is None:
                                continue
                            total = torch.zeros_like(ours) if ours.grad is None else ours.grad.clone()
                            world.all_reduce_(total)
                            error = float((total - theirs.grad).abs().max())
                            if not error < 1e-9 * (float(theirs.grad.abs().max()) + 1):
                                problem += f"gradient of {key} differs by {error:.1e}; "
                    binding.release()
                    if problem:
                        found[f"{name}[{number}] train={train}"] = problem
    finally:
        world.close()
    return found


HOW: dict[str, tuple[int, Bind]] = {
    "2 ranks": (2, to_halo),
    "3 ranks": (3, to_halo),
    "4 ranks, replication 2, sparse": (4, partial(to_dealt, SpMMScheme(2, True, None))),
    "3 ranks, blocks": (3, partial(to_dealt, SpMMScheme(1, False, None))),
    "4 ranks, 2D": (4, partial(to_dealt, CubeScheme(2, None))),
    "3 ranks, vertex cut": (3, partial(to_dealt, VertexCutScheme("random", None, 0.0, None, ""))),
    "3 ranks, cover": (3, partial(to_dealt, CoverScheme(topology=None))),
}


EVERY_DAY = ("3 ranks", "4 ranks, replication 2, sparse", "3 ranks, vertex cut", "3 ranks, cover")


@pytest.mark.parametrize(
    ("how", "all_options"), [*((how, False) for how in EVERY_DAY), *campaign(*((how, True) for how in HOW))]
)
def test_exact(ranks, how, all_options):
    """All of them in one job: the ranks connect once."""
    world_size, bind = HOW[how]
    found = ranks.run(world_size, compare, list(RECIPES), bind, all_options, timeout=280)
    assert found == [{}] * world_size


CHANGED = {"GATConv", "GCNConv", "GraphConv", "SAGEConv"}


def change_edges(rank: int, world_size: int) -> None:
    """Weights and then edges change in place between steps; the features, whose change is seen by itself, stay."""
    graph, part = whole_graph(), np.arange(N) % world_size
    # In the order of the parts: of several self-loops of a node, the last counts.
    order = torch.from_numpy(np.lexsort((graph.edge_index[1], part[graph.edge_index[1]])))
    graph.edge_index, graph.w, graph.a = graph.edge_index[:, order], graph.w[order], graph.a[order]
    graph.number = torch.arange(len(order))
    holders = np.arange(graph.edge_index.size(1)) % world_size
    shards = split_graph(graph, part, LayoutSpec("vertex_cut", world_size), holders)
    shard = shards[rank].batch
    shard.edge_weight = shard.w
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30))
    convs = [(name, number) for name in sorted(CHANGED) for number, _ in enumerate(RECIPES[name][:3])]

    def results(batch: Data, modules: list[Any]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [outputs(RECIPES[name][n][1](conv, batch)) for (name, n), conv in zip(convs, modules)]

    def made() -> list[Any]:
        torch.manual_seed(7)
        return [RECIPES[name][number][0]().double() for name, number in convs]

    def compare_rows(where: str) -> None:
        for each, found, expected in zip(convs, results(shard, ours), results(graph, theirs)):
            torch.testing.assert_close(found, expected[shard.n_id], msg=lambda m, e=each: f"{where}, {e}: {m}")

    try:
        for how, (count, bind) in HOW.items():
            if count != world_size:
                continue
            ours, theirs = made(), made()
            binding = bind(torch.nn.ModuleList(ours), shards[rank], world)
            compare_rows(f"{how}, before")
            graph.w.mul_(1.5).add_(0.2)
            shard.w.mul_(1.5).add_(0.2)
            compare_rows(f"{how}, other weights")
            for each in shards:  # their edges stay on their ranks, so no rank reads new rows
                graph.edge_index[:, each.batch.number] = graph.edge_index[:, each.batch.number.roll(1)]
            shard.edge_index[0] = shard.edge_index[0].roll(1)
            shard.edge_index[1] = shard.edge_index[1].roll(1)
            compare_rows(f"{how}, other edges")
            binding.release()
    finally:
        world.close()


def test_edges_changed_in_place_are_seen(ranks):
    ranks.run(3, change_edges)


def deals(monkeypatch: pytest.MonkeyPatch, scheme: Scheme, name: str, shard: Shard, world: World) -> bool:
    """Returns whether a conv deals edges over the ranks, under any of the options compared above."""
    seen = []
    init = SparseMatrix.__init__
    monkeypatch.setattr(SparseMatrix, "__init__", lambda *args, **options: [seen.append(1), init(*args, **options)][1])
    for make, call in RECIPES[name]:
        binding = to_dealt(scheme, torch.nn.Sequential(conv := make().double()), shard, world)
        call(conv, shard.batch)
        binding.release()
    monkeypatch.undo()
    return bool(seen)


def test_the_table_says_what_is_dealt(monkeypatch):
    """The others are as exact, but read the halo."""
    text = (Path(__file__).parents[2] / "docs" / "convs.md").read_text()
    world = World(0, 1, torch.device("cpu"), timedelta(seconds=5))
    [shard] = split_graph(
        whole_graph(), np.zeros(N, np.int64), LayoutSpec("vertex_cut", 1), np.zeros(whole_graph().edge_index.size(1))
    )
    shard.batch.edge_weight = shard.batch.w
    for name in sorted(set(RECIPES) - ABSTRACT - OVER_ALL):
        product = deals(monkeypatch, SpMMScheme(1, True, None), name, shard, world)
        mirrors = deals(monkeypatch, VertexCutScheme("random", None, 0.0, None, ""), name, shard, world)
        row = f"| `{name}` | exact | {'product' if product else 'halo'} | {'mirrors' if mirrors else 'halo'} |"
        assert row in text, row
    world.close()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name, monkeypatch):
    """Most cannot be built here without their extras: a module of that class is enough to be recognised."""
    kind: Any = getattr(torch_geometric.nn.conv, name, SparseLinear)
    for each in (kind, type(name, (kind,), {})):  # and a subclass
        conv = each.__new__(each)
        torch.nn.Module.__init__(conv)
        with pytest.raises(UnsupportedModelError, match=rf"'0' \({name}\) is not exact on a partitioned graph: "):
            check_module(torch.nn.Sequential(conv))


def test_the_published_table_is_current():
    text = (Path(__file__).parents[2] / "docs" / "convs.md").read_text()
    for name in exact_convs():
        assert f"| `{name}` | exact |" in text, name
    for name, reason in REFUSED.items():
        assert f"| `{name}` | refused: {reason} |" in text, name


def test_every_exported_conv_has_an_answer():
    exported = set(torch_geometric.nn.conv.__all__) - ABSTRACT
    answered = {*exact_convs(), *REFUSED}
    assert exported <= answered, f"no answer for {sorted(exported - answered)}"
    untested = set(exact_convs()) - set(RECIPES)
    assert not untested, f"said to be exact, but not compared: {sorted(untested)}"


CONV_NAMES = {*torch_geometric.nn.conv.__all__, "LabelPropagation", "SparseLinear"} - ABSTRACT


def named_convs(node: ast.AST | None) -> set[str]:
    """Returns the conv classes that an entry of a table names: by name, as ``pyg_nn.GCNConv``, or several in a string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return set(node.value.split()) if set(node.value.split()) <= CONV_NAMES else set()
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return {name} & CONV_NAMES


def test_no_other_file_has_a_table_of_convs():
    """Nor a list of some; the table says what is known of a class."""
    package = Path(lightning_gnn.__file__).parent
    found = []
    texts = {file: file.read_text() for file in package.rglob("*.py") if file != package / "nn" / "convs.py"}
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)) if any(name in text for name in CONV_NAMES) else ():
            keys = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", ())
            names = set[str]().union(
                *map(named_convs, keys), named_convs(node) if isinstance(node, ast.Constant) else ()
            )
            if len(names) > 1 or (names and isinstance(node, ast.Dict)):
                found.append(f"{file.relative_to(package)}:{node.lineno}: {sorted(names)}")
    assert not found


def test_versions_of_pyg_without_these_convs_import(monkeypatch):
    for name in CONV_NAMES & set(CONVS):
        for package in (torch_geometric.nn, torch_geometric.nn.conv):
            monkeypatch.delattr(package, name, raising=False)
    assert set(runpy.run_path(convs.__file__)["CONVS"]) == set(CONVS)


def test_rules_are_of_the_nearest_class():
    class Same(nn.GATConv):
        pass

    class Other(nn.GATConv):
        def message(self, *args: Any) -> Any:
            return super().message(*args)

    assert rule_of(Same, "message") is rule_of(Other) is rule_of(nn.GATConv)
    assert rule_of(nn.GATConv).forward and rule_of(Other, "message") == ConvRule() == rule_of(Linear)
    assert rule_of(nn.FastRGCNConv) != rule_of(nn.RGCNConv)


KNOWN = [(nn.GATConv, 2), (nn.SGConv, 2), (nn.HypergraphConv, 2), (nn.models.attentive_fp.GATEConv, 4)]


@pytest.mark.parametrize(("kind", "arguments"), KNOWN)
@pytest.mark.parametrize("of_subclass", [False, True])
def test_a_registered_adapter_comes_before_what_is_known(monkeypatch, kind, arguments, of_subclass):
    """Also of a class that is refused or not known; a subclass may have one of its own."""

    class Mine(kind):
        pass

    monkeypatch.setattr(convs, "CONVS", dict(CONVS))
    conv, before = Mine(*[2] * arguments), rule_of(kind)
    register_adapter(Mine if of_subclass else kind)(lambda conv, graph, layer: {"forward": MethodType(len, [layer])})
    check_module(Sequential(conv))
    assert bound_methods(conv, "mine", None)["forward"]() == 1
    after = rule_of(Mine)
    assert after == replace(
        before,
        adapter=after.adapter,
        forward=None,
        halo_columns=None,
        several_hops=bool(before.several_hops),
        refused="",
        sends_rows=before.sends_rows and kind is nn.SGConv,
    )
    assert of_subclass == (rule_of(kind) == before)


def test_messages_of_a_registered_class_may_be_other_than_rows(monkeypatch):
    class Rows(MessagePassing):
        pass

    class Scaled(MessagePassing):
        def message(self, x_j: torch.Tensor) -> torch.Tensor:
            return 2 * x_j

    monkeypatch.setattr(convs, "CONVS", dict(CONVS))
    for kind in (Rows, Scaled):
        register_adapter(kind)(lambda conv, graph, layer: {})
    assert rule_of(Rows).sends_rows and not rule_of(Scaled).sends_rows
