"""Memory predictions, ``check`` and ``advise`` on graphs with types."""

from __future__ import annotations

import copy
import re
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from common import campaign, quiet_trainer
from lightning.pytorch.trainer.states import TrainerFn
from test_hetero import STRATEGIES, module
from test_hetero_sampling import CITES, SIZES, WRITES, typed_graph
from test_typed_self_check import Wrong, made, neighbours
from torch_geometric.data import HeteroData

from lightning_gnn import DGCLStrategy, DistributedEmbedding, GraphDataModule, advise, check_parity
from lightning_gnn.checks.footprint import Footprint, Sizes, _steps
from lightning_gnn.checks.small_graph import SmallGraph
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import cut_graph
from lightning_gnn.extensions.node_types.graph import prepare_hetero
from lightning_gnn.extensions.node_types.small_graph import typed_small_graph
from lightning_gnn.strategy.memory import memory_advice
from lightning_gnn.strategy.memory_checks import predicted_steps
from lightning_gnn.strategy.scheme import bind_module
from lightning_gnn.tools.parity import _Check, ball

MAKE = partial(typed_small_graph, input_type="paper")


def data_of(**options: Any) -> GraphDataModule:
    return GraphDataModule(typed_graph(), input_type="paper", **options)


# Memory #######################################################################


@pytest.mark.parametrize("vertex_cut", [False, True])
def test_sizes_by_type(vertex_cut):
    """Sizes of all ranks equal counts of owners, halo nodes and edges of each type."""
    graph, g = prepare_hetero(typed_graph()), np.random.default_rng(0)
    part, holders = g.integers(0, 3, graph.num_nodes), g.integers(0, 3, graph.num_edges) if vertex_cut else None
    cut, model = cut_graph(graph, part, 3, holders, "paper"), module("mixed")
    owners = dict(zip(graph.node_types, np.split(part, np.cumsum([graph[name].num_nodes for name in graph.node_types])[:-1])))
    counts = [graph[kind].num_edges for kind in graph.edge_types]
    held = dict(zip(graph.edge_types, np.split(part[:0] if holders is None else holders, np.cumsum(counts)[:-1])))
    for rank, sizes in enumerate(Sizes.from_cut(cut, model)):
        assert sizes.rows.tolist() == [(owner == rank).sum() for owner in owners.values()]
        pairs: dict[str, set[tuple[int, int]]] = {name: set() for name in owners}
        edges = []
        for kind in graph.edge_types:
            source, target = graph[kind].edge_index.numpy()
            into = owners[kind[2]][target]
            edges.append(int((into == rank).sum()))
            far = owners[kind[0]][source] != into
            pairs[kind[0]] |= {*zip(source[far].tolist(), into[far].tolist())}
        assert sizes.edges.tolist() == edges
        assert sizes.held_edges.tolist() == ([(held[kind] == rank).sum() for kind in held] if vertex_cut else edges)
        assert sizes.halo_rows.tolist() == [sum(reader == rank for _, reader in each) for each in pairs.values()]
        sent = [sum(owners[name][node] == rank for node, _ in each) for name, each in pairs.items()]
        assert sizes.sent_rows.tolist() == sent
        of_shard = Sizes.of(cut.shard(rank), sizes.targets)
        assert all(np.array_equal(*each) for each in zip(of_shard[:-1], sizes[:-1], strict=True))


def larger_graph() -> SmallGraph:
    """Two parts of a graph whose types have very different numbers of nodes and edges; ids are those of the original graph."""
    graph, g = prepare_hetero(typed_graph()), torch.Generator().manual_seed(2)
    sizes = dict(zip(graph.node_types, (1500, 200, 40), strict=True))
    for name, size in sizes.items():
        ids = torch.randint(graph[name].num_nodes, (size,), generator=g)
        for key, value in graph[name].items():
            graph[name][key] = value[ids] if isinstance(value, torch.Tensor) else size
        graph[name].n_id = ids
    for kind, size in zip(graph.edge_types, (9000, 300, 2500, 60, 1200), strict=True):
        if "edge_attr" in graph[kind]:
            graph[kind].edge_attr = torch.randn(size, 2, generator=g).double()
        graph[kind].edge_index = torch.stack([torch.randint(0, sizes[end], (size,), generator=g) for end in kind[::2]])
    part = (torch.rand(sum(sizes.values()), generator=g) < 0.3).long().numpy()
    holders = (torch.rand(graph.num_edges, generator=g) < 0.4).long().numpy()
    return SmallGraph(graph, part, holders, {"input_type": "paper"})


@pytest.mark.parametrize("strategy", ["dgcl", *campaign("vertex_cut", "spmm_1d")])
@pytest.mark.parametrize("name", ["mixed", "hgt"])
def test_memory_of_small_graphs_predicts_larger_graphs(name, strategy):
    tolerance = 0.2 if strategy == "vertex_cut" else 0.05  # the numbers of rows that edges of a vertex cut send are not known
    scheme = memory_advice(STRATEGIES[strategy]().scheme).rehearsed
    data = data_of()
    data.prepare_for(scheme.layout(2))
    shard, model = data.stored_cut().shard(0), module(name)
    steps = memory_advice(scheme).steps(model, shard.batch, make=MAKE)
    ran = _steps([model, copy.deepcopy(model)], larger_graph(), partial(bind_module, scheme, meter=Meter()), scheme.layout(2))
    holders = [each.holders for each, _ in ran if each.holders is not None]
    held: Any = ran[0][0].types.count_held(torch.cat(holders)) if holders else (None, None)
    for (of_rank, found), held_edges in zip(ran, held, strict=True):
        sizes = Sizes.of(of_rank, of_rank.mask_counts["train_mask"][of_rank.rank], held_edges)
        expected: Footprint = steps.footprint(sizes)
        for phase in ("setup", "forward", "backward", "evaluation"):
            assert getattr(expected.peak(), phase) == pytest.approx(getattr(found.peak(), phase), rel=tolerance)


def heard(monkeypatch: pytest.MonkeyPatch, available: int, model: torch.nn.Module | None = None) -> list[str]:
    """Returns warnings before two ranks start, given the available bytes."""
    monkeypatch.setattr("lightning_gnn.devices.available_bytes", lambda: available)
    strategy = DGCLStrategy(self_check=False)
    trainer = quiet_trainer(strategy, 2)
    trainer.state.fn = TrainerFn.FITTING
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        strategy.before_ranks_start(trainer, [model or module("mixed"), data_of()])
    return [str(each.message) for each in found if "predicted to need" in str(each.message)]


def test_fit_predicts_memory(monkeypatch):
    strategy, data = DGCLStrategy(), data_of()
    data.prepare_for(strategy.scheme.layout(2))
    trainer, cut = quiet_trainer(strategy, 2), data.stored_cut()
    trainer.state.fn = TrainerFn.FITTING
    run = strategy._run_for_checks(module("mixed"), trainer, data)
    steps = predicted_steps(run, cut.shard(0))
    peak = sum(steps.footprint(each).peak().max_bytes for each in Sizes.from_cut(cut, run.module))
    assert heard(monkeypatch, int(1.01 * peak)) == []
    [said] = heard(monkeypatch, int(0.99 * peak))
    assert "The 2 ranks on this machine are predicted to need" in said and 'strategy="sampling"' in said
    assert "checkpoint_convs" not in said  # which does not support types
    with pytest.raises(ValueError, match="The 2 ranks on this machine need at least .* but 1e-06 GB are available"):
        heard(monkeypatch, 1000)


def test_tables_take_memory_for_the_nodes_of_their_type(monkeypatch):
    """Tables of equal types add up; other memory is at most a hundredth of these."""
    model = module("mixed")
    kinds = ("topic", "topic", "author")
    model.tables = torch.nn.ModuleList(DistributedEmbedding(SIZES[kind], 20_000, node_type=kind) for kind in kinds)
    needed = sum(SIZES[kind] * 3 * 20_000 * 4 for kind in kinds)  # rows and two states of Adam
    with pytest.raises(ValueError, match=r"need at least [\d.]+ GB") as error:
        heard(monkeypatch, 1000, model)
    found = float(re.search(r"need at least ([\d.]+) GB", str(error.value))[1])
    assert needed < 1e9 * found * 1.01 < 1.03 * needed


# Check and advise #############################################################


@pytest.mark.parametrize("nodes", [None, 50])
def test_right_steps_are_the_same(nodes):
    report = check_parity(module("mixed"), data_of(), ["dgcl", "vertex_cut", "spmm_1d", "sampling", "cover"], nodes=nodes)
    assert report.ok and [each.verdict for each in report.schemes] == [*["same"] * 3, "evaluation same", "not compared"]
    assert all(len(each.steps) == 4 for each in report.schemes[:3])
    assert "a HeteroData requires" in report.schemes[-1].not_compared
    assert (report.nodes, report.of_nodes) == (nodes or 71, 71)


def test_wrong_steps_are_found():
    [found] = check_parity(made(Wrong(neighbours)), data_of(), ["dgcl"]).schemes
    assert found.verdict == "differs" and found.finding is not None


def test_samples_of_nodes_of_all_types():
    """A sample has all edges between its nodes, and original ids; it begins at a training node."""
    graph = prepare_hetero(typed_graph())
    for name in graph.node_types:
        graph[name].n_id = torch.arange(graph[name].num_nodes)
    for number in (1, 30):
        found, ids = ball(graph, number, seed=1, input_type="paper")
        assert isinstance(found, HeteroData) and len(ids) == sum(len(found[name].n_id) for name in found.node_types) == number
        firsts = dict(zip(graph.node_types, np.cumsum([0, *(graph[name].num_nodes for name in graph.node_types)])))
        assert ids.tolist() == [int(node) + firsts[name] for name in found.node_types for node in found[name].n_id]
        assert found["paper"].train_mask.any()
        for kind in (CITES, WRITES):
            chosen = [torch.isin(row, found[end].n_id) for row, end in zip(graph[kind].edge_index, (kind[0], kind[2]))]
            assert found[kind].num_edges == int((chosen[0] & chosen[1]).sum())


def test_a_given_partition_is_that_of_the_sample():
    part = torch.arange(71) % 2
    check = _Check(module("sage"), data_of(partition=part), 2, 1, 40, 0)
    ids, given = [], part.split([SIZES[name] for name in check.graph.node_types])
    for name, of_type in zip(check.graph.node_types, given):
        ids += of_type[check.graph[name].n_id].tolist()
    assert check._data.partition.tolist() == ids and len(ids) == 40


def test_advice():
    found = {str(each.candidate): each for each in advise(module("mixed"), data_of(), devices=2)}
    dgcl, vertex_cut = found["dgcl plan=p2p"], found["vertex_cut"]
    assert dgcl.applies and vertex_cut.applies and found["sampling"].applies
    assert dgcl.bytes_sent and len(dgcl.peaks) == 2 and 1 < dgcl.replication <= 2
    assert not found["cover"].applies and "HeteroData" in found["cover"].reason
