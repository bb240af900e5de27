"""The neighbour sampler: against counting, against the whole graph, against itself. No ranks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from common import examples
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, chisquare
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkLoader, NodeLoader
from torch_geometric.loader.utils import filter_data, filter_hetero_data
from torch_geometric.nn import SAGEConv, to_hetero
from torch_geometric.nn.models import GraphSAGE
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput
from torch_geometric.utils import index_to_mask, k_hop_subgraph, subgraph, trim_to_layer

from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.kernels.csr import CSR
from lightning_gnn.strategies.sampling import (
    NeighborSampler,
    Numbering,
    random_walks,
    saint_edges,
    saint_nodes,
    saint_norms,
    saint_walks,
    sample_hops,
    sample_neighbors,
)


def star(degree: int) -> CSR:
    """Returns a graph in which node 0 has edges from 0 to `degree` - 1, in slots of these numbers."""
    return CSR.from_coo(torch.zeros(degree, dtype=torch.long), torch.arange(degree), degree, degree)


def random_graph(nodes: int = 200, edges: int = 3_000, seed: int = 0) -> Data:
    """Returns a graph with isolated nodes, self-loops, duplicate edges and a hub."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(0, max(nodes - 5, 1), (2, edges), generator=generator)
    edge_index[1, : edges // 10] = 3
    x = torch.randn(nodes, 4, generator=generator, dtype=torch.float64)
    return Data(x=x, edge_index=edge_index, edge_attr=torch.arange(edges).double().view(-1, 1))


def to_batch(
    data: Data | HeteroData,
    output: SamplerOutput | HeteroSamplerOutput,
    input_id: Tensor,
    input_type: str | None = None,
) -> Data | HeteroData:
    """Returns the part of `data` that was sampled, as PyG's NeighborLoader does.

    Its rows are those of the sampled nodes and edges; ``n_id``, ``e_id``, ``num_sampled_nodes``, ``num_sampled_edges``; seeds
    are the first ``batch_size`` rows (of `input_type`), and ``input_id`` says which.
    """
    if isinstance(output, SamplerOutput):
        batch = filter_data(data, output.node, output.row, output.col, output.edge)
        batch.n_id, batch.e_id, batch.batch = output.node, output.edge, output.batch
        batch.num_sampled_nodes, batch.num_sampled_edges = output.num_sampled_nodes, output.num_sampled_edges
        batch.input_id, batch.batch_size = input_id, len(input_id)
        return batch
    batch = filter_hetero_data(data, output.node, output.row, output.col, output.edge)
    for name, values in (("n_id", output.node), ("e_id", output.edge)):
        for kind, ids in values.items():
            batch[kind][name] = ids
    for name in ("batch", "num_sampled_nodes", "num_sampled_edges"):
        batch.set_value_dict(name, getattr(output, name))
    batch[input_type].input_id, batch[input_type].batch_size = input_id, len(input_id)
    return batch


# One hop ######################################################################


@pytest.mark.parametrize("labor", [False, True])
@pytest.mark.parametrize("fanout, degree", [(1, 7), (3, 7), (6, 7), (5, 40), (31, 40), (33, 40), (50, 200), (100, 101)])
def test_uniform_without_replacement(fanout, degree, labor):
    """Each edge is drawn equally often, and, of small degrees, each set of edges; by Floyd's way with and without a table, and
    by numbers of sources, where targets have none in common."""
    times = 4_000
    if labor:
        sources = torch.arange(times * degree)
        csr = CSR.from_coo(sources // degree, sources, times, len(sources))
        found = sample_neighbors(csr, torch.arange(times), fanout, seed=fanout, source_keys=sources)
    else:
        found = sample_neighbors(star(degree), torch.zeros(times, dtype=torch.long), fanout, seed=fanout)
    drawn = found.sources.view(times, fanout) % degree
    assert (drawn.sort(1).values.diff(dim=1) > 0).all()
    # Draws of one target exclude each other: counts vary by less than a multinomial's, by this factor.
    counts = torch.bincount(drawn.flatten(), minlength=degree).double()
    spread = ((counts - counts.mean()) ** 2 / counts.mean()).sum() / (1 - fanout / degree) * (degree - 1) / degree
    assert 1e-4 < chi2.sf(float(spread), degree - 1) < 1 - 1e-4
    if degree == 7:
        sets = Counter(map(tuple, drawn.sort(1).values.tolist()))
        possible = len(list(torch.combinations(torch.arange(degree), fanout)))
        assert len(sets) == possible
        assert chisquare(list(sets.values())).pvalue > 1e-4


def test_uniform_with_replacement():
    found = sample_neighbors(star(20), torch.zeros(3_000, dtype=torch.long), 30, seed=1, replace=True)
    assert (found.counts == 30).all()
    assert chisquare(torch.bincount(found.sources, minlength=20).numpy()).pvalue > 1e-4
    pairs = found.sources.view(-1, 2)  # draws do not depend on each other
    assert chisquare(torch.bincount(pairs[:, 0] * 20 + pairs[:, 1], minlength=400).numpy()).pvalue > 1e-4


def test_targets_do_not_depend_on_each_other():
    first, second = (
        sample_neighbors(star(20), torch.zeros(20_000, dtype=torch.long), 1, seed).sources for seed in (5, 6)
    )
    for one, other in ((first[:-1], first[1:]), (first, second)):
        assert chisquare(torch.bincount(one * 20 + other, minlength=400).numpy()).pvalue > 1e-4


@pytest.mark.parametrize("labor", [False, True])
def test_weighted_without_replacement(labor):
    """The first draw is in proportion to weights; pairs are as by drawing one after the other; weight 0 is never drawn."""
    weight = torch.tensor([1.0, 2.0, 0.0, 4.0, 3.0])
    zeros = torch.zeros(20_000, dtype=torch.long)

    def drawn(fanout: int, seed: int) -> Tensor:
        if not labor:
            return sample_neighbors(star(5), zeros, fanout, seed, weight=weight).sources
        sources = torch.arange(100_000)  # of which targets have none in common
        csr = CSR.from_coo(sources // 5, sources, 20_000, 100_000)
        odds = weight.repeat(20_000)
        return sample_neighbors(csr, sources[:20_000], fanout, seed, weight=odds, source_keys=sources).sources % 5

    one = drawn(1, 2)
    share = weight / weight.sum()
    counts = torch.bincount(one, minlength=5).numpy()
    assert counts[2] == 0
    assert chisquare(counts[[0, 1, 3, 4]], (share * 20_000)[[0, 1, 3, 4]].numpy()).pvalue > 1e-4
    two = drawn(2, 3).view(-1, 2).sort(1).values
    expected = {
        (i, j): float(share[i] * share[j] / (1 - share[i]) + share[j] * share[i] / (1 - share[j]))
        for i in range(5)
        for j in range(i + 1, 5)
        if 2 not in (i, j)
    }
    sets = Counter(map(tuple, two.tolist()))
    assert set(sets) == set(expected)
    odds = np.array([expected[pair] for pair in sets])
    assert chisquare(list(sets.values()), odds / odds.sum() * 20_000).pvalue > 1e-4
    every = sample_neighbors(star(5), zeros[:1], -1, weight=weight)
    assert every.sources.tolist() == [0, 1, 3, 4]


def test_targets_share_sources_by_labor():
    """Targets with the same sources draw the same, and no more nodes than one; those of many sources hold those of few."""
    sources, targets = torch.arange(100).repeat(50), torch.arange(50).repeat_interleave(100)
    csr, keys = CSR.from_coo(targets, sources, 50, 100), torch.arange(100) + 7
    found = sample_neighbors(csr, torch.arange(50), 8, 3, source_keys=keys)
    assert (found.counts == 8).all() and len(found.sources.unique()) == 8
    assert len(sample_neighbors(csr, torch.arange(50), 8, 3).sources.unique()) > 90
    more = sample_neighbors(csr, torch.arange(50), 9, 3, source_keys=keys)
    assert set(found.sources.tolist()) < set(more.sources.tolist())
    assert not torch.equal(sample_neighbors(csr, torch.arange(50), 8, 4, source_keys=keys).sources, found.sources)
    swapped = sample_neighbors(csr, torch.arange(50), 8, 3, source_keys=keys.flip(0))
    assert torch.equal(swapped.sources.unique(), 99 - found.sources.unique().flip(0))


def test_labor_estimates_the_mean():
    """Each in-edge of a target is drawn equally often, also where several have one source, and so the mean is the true one."""
    graph = random_graph(60, 900)
    csr, nodes, times, fanout = (
        CSR.from_coo(graph.edge_index[1], graph.edge_index[0], 60, 60),
        torch.arange(60),
        4_000,
        5,
    )
    drawn = torch.zeros(900)
    for seed in range(times):
        drawn[sample_neighbors(csr, nodes, fanout, seed, source_keys=nodes).edges] += 1
    odds = (fanout / torch.bincount(graph.edge_index[1], minlength=60)).clamp(max=1)[graph.edge_index[1]]
    assert (drawn[odds == 1] == times).all()
    error = ((drawn - times * odds) / (times * odds * (1 - odds)).sqrt())[odds < 1]
    assert float(error.abs().max()) < 4.5 and 0.85 < float(error.square().mean()) < 1.15
    pairs = torch.unique(graph.edge_index, dim=1, return_counts=True)[1]
    assert int((pairs > 1).sum()) > 50


def test_batches_have_fewer_nodes_by_labor():
    graph, seeds = random_graph(3_000, 60_000), torch.arange(100)
    sizes = {}
    for labor in (False, True):
        out = NeighborSampler.from_data(graph, [5, 5], labor=labor).sample(seeds, 1)
        sizes[labor] = len(out.node)
        assert torch.equal(graph.edge_index[:, out.edge], out.node[torch.stack([out.row, out.col])])
    assert sizes[True] < 0.8 * sizes[False]


def test_times():
    time = torch.tensor([5, 1, 9, 3, 7, 3])
    targets, until = torch.zeros(4, dtype=torch.long), torch.tensor([0, 3, 6, 9])
    last = sample_neighbors(star(6), targets, 2, time=time, until=until, strategy="last")
    assert last.counts.tolist() == [0, 2, 2, 2]
    assert [sorted(part.tolist()) for part in last.sources.split(last.counts.tolist())] == [[], [3, 5], [0, 3], [2, 4]]
    every = sample_neighbors(star(6), targets, -1, time=time, until=until)
    assert every.counts.tolist() == [0, 3, 4, 6]
    many = sample_neighbors(
        star(6), torch.zeros(6_000, dtype=torch.long), 2, time=time, until=torch.full((6_000,), 6), seed=1
    )
    counts = torch.bincount(many.sources, minlength=6)
    assert counts[[2, 4]].sum() == 0
    assert chisquare(counts[[0, 1, 3, 5]].numpy()).pvalue > 1e-4


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", [{}, {"replace": True}, {"weight": True}, {"labor": True}])
def test_same_for_any_number_of_threads_and_order(options, index_dtype):
    data = random_graph(2_000, 60_000)
    csr = CSR.from_coo(data.edge_index[1], data.edge_index[0], 2_000, 2_000)
    csr = CSR(csr.indptr, csr.indices.to(index_dtype), csr.edge, csr.num_cols)
    if "weight" in options:
        options = {"weight": torch.rand(60_000, generator=torch.Generator().manual_seed(0))}
    if "labor" in options:
        options = {"source_keys": torch.arange(2_000)}
    targets = torch.arange(2_000)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(sample_neighbors(csr, targets, 40, 7, **options))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(results[0].sources, other.sources) and torch.equal(results[0].edges, other.edges)
    assert torch.equal(data.edge_index[0, results[0].edges], results[0].sources)
    assert torch.equal(data.edge_index[1, results[0].edges], results[0].targets())
    assert not torch.equal(sample_neighbors(csr, targets, 40, 8, **options).edges, results[0].edges)
    keyed = sample_neighbors(csr, targets, 40, 7, keys=targets, **options)
    assert torch.equal(keyed.edges, results[0].edges)
    halves = [sample_neighbors(csr, part, 40, 7, keys=part, **options).edges for part in (targets[900:], targets[:900])]
    assert torch.equal(torch.cat(halves[::-1]), keyed.edges)


def test_all_neighbours():
    data = random_graph()
    csr = CSR.from_coo(data.edge_index[1], data.edge_index[0], 200, 200)
    for fanout, replace in ((-1, False), (-1, True), (1_000, False)):
        found = sample_neighbors(csr, torch.arange(200), fanout, replace=replace)
        assert torch.equal(found.counts, torch.bincount(data.edge_index[1], minlength=200))
        assert torch.equal(found.edges.sort().values, torch.arange(3_000))


# Numbering ####################################################################


@examples(60)
@given(st.lists(st.lists(st.integers(0, 40), max_size=30), min_size=1, max_size=6), st.booleans())
def test_numbering_by_first_occurrence(batches, dense):
    numbering = Numbering(41, dense)
    for _ in range(2):  # its buffers are used again
        numbering.start(torch.tensor(batches[0], dtype=torch.long))
        ids = list(batches[0])
        for batch in batches[1:]:
            unknown = numbering.find(torch.tensor(batch, dtype=torch.long))
            assert unknown.tolist() == [ids.index(i) if i in ids else -1 for i in batch]
            found = numbering.add(torch.tensor(batch, dtype=torch.long))
            for i in batch:
                if i not in ids:
                    ids.append(i)
            assert found.tolist() == [ids.index(i) for i in batch]
        assert numbering.ids.tolist() == ids and len(numbering) == len(ids)


def test_a_table_of_ids_grows():
    numbering, ids = Numbering(1 << 60, dense=False), torch.arange(100_000) * 7_919_003
    numbering.start(ids[:10])
    assert torch.equal(numbering.add(ids), torch.arange(100_000))
    assert torch.equal(numbering.find(ids.flip(0)), torch.arange(100_000).flip(0))
    numbering.start(ids[50:60])
    assert numbering.find(ids[45:55]).tolist() == [-1] * 5 + [0, 1, 2, 3, 4]


def test_an_array_starts_over_before_numbers_run_out():
    numbering = Numbering(10, dense=True)
    numbering._base = 2**30 - 4
    for _ in range(4):
        numbering.start(torch.tensor([3, 1, 4]))
        assert numbering.add(torch.tensor([4, 9, 3])).tolist() == [2, 3, 0]


# Several hops #################################################################


@st.composite
def awkward(draw: Any) -> tuple[Data, Tensor]:
    nodes, edges = draw(st.integers(1, 12)), draw(st.integers(0, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    data = Data(edge_index=torch.randint(0, nodes, (2, edges), generator=generator), num_nodes=nodes)
    seeds = draw(st.lists(st.integers(0, nodes - 1), min_size=1, max_size=6))
    return data, torch.tensor(seeds)


def check_batch(data: Data, seeds: Tensor, num_neighbors: list[int], out: Any, replace: bool = False) -> None:
    """Every edge is one of the graph's, targets are of the hop before, nobody has more edges than it may."""
    source, target = data.edge_index
    assert torch.equal(out.node[: len(seeds)], seeds)
    assert len(out.node[len(seeds) :].unique()) == len(out.node) - len(seeds)
    assert not set(out.node[len(seeds) :].tolist()) & set(seeds.tolist())
    assert torch.equal(out.node[out.row], source[out.edge]) and torch.equal(out.node[out.col], target[out.edge])
    assert sum(out.num_sampled_nodes) == len(out.node) and sum(out.num_sampled_edges) == len(out.edge)
    assert out.num_sampled_nodes[0] == len(seeds) and len(out.num_sampled_nodes) == len(num_neighbors) + 1
    degree = torch.bincount(target, minlength=data.num_nodes)
    low, begin, end = 0, 0, len(seeds)
    for hop, fanout in enumerate(num_neighbors):
        edges = slice(low, low + out.num_sampled_edges[hop])
        col, row = out.col[edges], out.row[edges]
        assert (col.diff() >= 0).all()
        wanted = degree[out.node[begin:end]]
        if fanout != -1:
            wanted = torch.where(wanted > 0, fanout, 0) if replace else wanted.clamp(max=fanout)
        assert torch.equal(torch.bincount(col - begin, minlength=end - begin), wanted)
        if not replace:
            pairs = torch.stack([col, out.edge[edges]])
            assert pairs.unique(dim=1).size(1) == len(col)
        low, begin, end = edges.stop, end, end + out.num_sampled_nodes[hop + 1]
        assert not len(row) or int(row.max()) < end


@examples(80)
@given(awkward(), st.lists(st.sampled_from([-1, 1, 2, 3]), min_size=1, max_size=3), st.booleans(), st.integers(0, 99))
def test_awkward_graphs(graph, num_neighbors, replace, seed):
    data, seeds = graph
    sampler = NeighborSampler.from_data(data, num_neighbors, replace=replace)
    out = sampler.sample(seeds, seed)
    check_batch(data, seeds, num_neighbors, out, replace)
    again = sampler.sample(seeds, seed)
    assert torch.equal(out.edge, again.edge) and torch.equal(out.node, again.node)
    whole = NeighborSampler.from_data(data, [-1] * len(num_neighbors)).sample(seeds)
    nodes = k_hop_subgraph(seeds, len(num_neighbors), data.edge_index, num_nodes=data.num_nodes)[0]
    assert torch.equal(whole.node.unique(), nodes)


@examples(40)
@given(awkward(), st.integers(0, 99))
def test_all_edges_between_what_was_sampled(graph, seed):
    data, seeds = graph
    seeds = seeds.unique()
    drawn = NeighborSampler.from_data(data, [2, 1]).sample(seeds, seed)
    out = NeighborSampler.from_data(data, [2, 1], directed=False).sample(seeds, seed)
    assert torch.equal(out.node, drawn.node) and out.num_sampled_edges is None
    inside = index_to_mask(out.node, data.num_nodes)
    kept = inside[data.edge_index].all(0).nonzero().view(-1)
    assert torch.equal(out.edge.sort().values, kept)
    assert torch.equal(out.node[torch.stack([out.row, out.col])], data.edge_index[:, out.edge])


def test_a_hop_is_asked_for_without_targets_too():
    """Where hops are exchanges, a rank whose seeds have no neighbours must take part in those of others."""
    csr, asked = star(5), []

    def hop(kind: Any, targets: Tensor, fanout: int) -> Any:
        asked.append((kind, len(targets), fanout))
        return sample_neighbors(csr, targets, fanout)

    kind = ("node", "to", "node")
    for seeds in (torch.tensor([4]), torch.empty(0, dtype=torch.long)):
        out = sample_hops({"node": seeds}, {kind: [3, 2]}, hop, {"node": Numbering(5)})
        assert asked == [(kind, len(seeds), 3), (kind, 0, 2)]
        assert out.num_sampled_nodes == {"node": [len(seeds), 0, 0]} and out.num_sampled_edges == {kind: [0, 0]}
        asked.clear()


@examples(40)
@given(awkward(), st.integers(0, 99))
def test_disjoint_trees(graph, seed):
    data, seeds = graph
    out = NeighborSampler.from_data(data, [2, 2], disjoint=True).sample(seeds, seed)
    assert torch.equal(out.batch[: len(seeds)], torch.arange(len(seeds)))
    assert torch.equal(out.batch[out.row], out.batch[out.col])
    assert torch.equal(out.node[torch.stack([out.row, out.col])], data.edge_index[:, out.edge])
    assert torch.stack([out.batch, out.node]).unique(dim=1).size(1) == len(out.node)


@examples(30)
@given(awkward(), st.integers(0, 99))
def test_ego_graphs(graph, seed):
    """ShaDow: the trees of a sample with all edges between the nodes of each."""
    data, seeds = graph
    options = {"disjoint": True}
    out = NeighborSampler.from_data(data, [2, 2], directed=False, **options).sample(seeds, seed)
    drawn = NeighborSampler.from_data(data, [2, 2], **options).sample(seeds, seed)
    assert torch.equal(out.node, drawn.node) and torch.equal(out.batch, drawn.batch)
    for tree in range(len(seeds)):
        inside = index_to_mask(out.node[out.batch == tree], data.num_nodes)
        kept = inside[data.edge_index].all(0).nonzero().view(-1)
        assert torch.equal(out.edge[out.batch[out.row] == tree].sort().values, kept)


def test_a_larger_graph_and_threads():
    data = planted_partition(3_000, 12.0, seed=1)
    sampler = NeighborSampler.from_data(data, [15, 10, 5])
    seeds = data.train_mask.nonzero().view(-1)[:300]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(sampler.sample(seeds, 5))
    finally:
        torch.set_num_threads(before)
    check_batch(data, seeds, [15, 10, 5], results[0])
    assert torch.equal(results[0].edge, results[1].edge) and torch.equal(results[0].row, results[1].row)
    assert not torch.equal(sampler.sample(seeds, 6).edge[: len(seeds)], results[0].edge[: len(seeds)])
    flipped = sampler.sample(seeds.flip(0), 5)  # a node's draws are its own
    hop = results[0].num_sampled_edges[0]
    assert torch.equal(flipped.edge[:hop].sort().values, results[0].edge[:hop].sort().values)


class Trimmed(torch.nn.Module):
    """GraphSAGE that computes what each layer needs only."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(4, 8), SAGEConv(8, 8), SAGEConv(8, 3)]).double()

    def forward(self, x: Tensor, edge_index: Tensor, nodes: Any = None, edges: Any = None) -> Tensor:
        for layer, conv in enumerate(self.convs):
            if nodes is not None:
                x, edge_index, _ = trim_to_layer(layer, nodes, edges, x, edge_index)
            x = conv(x, edge_index).tanh()
        return x


def test_trimming_and_the_whole_graph():
    """Outputs and gradients of the seeds: trimmed as not trimmed; with all neighbours as on the whole graph."""
    torch.manual_seed(0)
    data, model, seeds = random_graph(), Trimmed(), torch.randperm(200)[:20]

    def values(out: Tensor) -> list[Tensor]:
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), list(model.parameters()))]

    whole = values(model(data.x, data.edge_index)[seeds])
    for num_neighbors in ([5, 3, 2], [-1, -1, -1]):
        out = NeighborSampler.from_data(data, num_neighbors).sample(seeds, 1)
        batch = to_batch(data, out, torch.arange(20))
        plain = values(model(batch.x, batch.edge_index)[: batch.batch_size])
        trimmed = model(batch.x, batch.edge_index, batch.num_sampled_nodes, batch.num_sampled_edges)
        assert len(trimmed) < batch.num_nodes
        for one, other in zip(values(trimmed[: batch.batch_size]), plain):
            torch.testing.assert_close(one, other)
        if num_neighbors[0] == -1:
            for one, other in zip(plain, whole):
                torch.testing.assert_close(one, other)
    basic = GraphSAGE(4, 8, 3, 3).double()  # PyG's own model knows the numbers too
    args = {"num_sampled_nodes_per_hop": batch.num_sampled_nodes, "num_sampled_edges_per_hop": batch.num_sampled_edges}
    torch.testing.assert_close(basic(batch.x, batch.edge_index, **args)[:20], basic(data.x, data.edge_index)[seeds])


def test_batches_in_pygs_loaders():
    data = random_graph()
    data.label = torch.arange(200)
    loader = NodeLoader(
        data, NeighborSampler.from_data(data, [4, 3]), input_nodes=torch.arange(100, 150), batch_size=20
    )
    torch.manual_seed(3)
    batches = list(loader)
    torch.manual_seed(3)
    assert all(torch.equal(one.e_id, other.e_id) for one, other in zip(batches, loader))
    assert [batch.batch_size for batch in batches] == [20, 20, 10]
    for number, batch in enumerate(batches):
        assert torch.equal(batch.input_id, torch.arange(20 * number, 20 * number + batch.batch_size))
        assert torch.equal(batch.n_id[: batch.batch_size], 100 + batch.input_id)
        assert torch.equal(batch.label, batch.n_id) and torch.equal(batch.edge_attr.view(-1).long(), batch.e_id)
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        ours = to_batch(data, loader.node_sampler.sample(batch.n_id[: batch.batch_size], 1), batch.input_id)
        assert set(ours.keys()) == set(batch.keys()) - {"seed_time"}
    workers = NodeLoader(data, loader.node_sampler, input_nodes=torch.arange(60), batch_size=20, num_workers=1)
    assert [batch.batch_size for batch in workers] == [20, 20, 20]
    links = LinkLoader(
        data, loader.node_sampler, edge_label_index=data.edge_index[:, :60], neg_sampling="binary", batch_size=30
    )
    for number, batch in enumerate(links):
        positive = batch.n_id[batch.edge_label_index[:, batch.edge_label == 1]]
        assert torch.equal(positive, data.edge_index[:, 30 * number : 30 * number + 30])
        assert batch.edge_label.numel() == 60


# Types ########################################################################


def typed_graph() -> HeteroData:
    generator = torch.Generator().manual_seed(0)
    data, sizes = HeteroData(), {"paper": 60, "author": 30, "topic": 8}
    for name, size in sizes.items():
        data[name].x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    for kind, count in (
        (("author", "writes", "paper"), 200),
        (("paper", "cites", "paper"), 300),
        (("paper", "written", "author"), 200),
        (("topic", "of", "paper"), 90),
        (("paper", "has", "topic"), 90),
    ):
        ends = [torch.randint(0, sizes[kind[i]], (count,), generator=generator) for i in (0, 2)]
        data[kind].edge_index = torch.stack(ends)
        data[kind].edge_attr = torch.arange(count).view(-1, 1).double()
    return data


def test_types():
    """Each node type has numbers of its own; fan-outs by edge type; trimming as without; all neighbours as the whole graph."""
    torch.manual_seed(0)
    data, seeds = typed_graph(), torch.tensor([5, 59, 0, 7])
    num_neighbors = {kind: [3, 2, 2] for kind in data.edge_types}
    num_neighbors["topic", "of", "paper"] = [-1, 0, 1]
    model = to_hetero(GraphSAGE((-1, -1), 8, 3, 3).double(), data.metadata())
    for chosen in (num_neighbors, [-1, -1, -1]):
        out = NeighborSampler.from_data(data, chosen).sample({"paper": seeds}, 3)
        batch = to_batch(data, out, torch.arange(4), "paper")
        assert torch.equal(batch["paper"].n_id[:4], seeds) and batch["paper"].batch_size == 4
        for name in data.node_types:
            assert torch.equal(batch[name].x, data[name].x[batch[name].n_id])
            assert len(batch[name].n_id.unique()) == len(batch[name].n_id) == sum(batch[name].num_sampled_nodes)
            assert len(batch[name].num_sampled_nodes) == 4
        for kind in data.edge_types:
            source, target = batch[kind].edge_index
            found = torch.stack([batch[kind[0]].n_id[source], batch[kind[2]].n_id[target]])
            assert torch.equal(found, data[kind].edge_index[:, batch[kind].e_id])
            assert torch.equal(batch[kind].edge_attr.view(-1).long(), batch[kind].e_id)
            assert sum(batch[kind].num_sampled_edges) == len(source)
        if chosen is num_neighbors:
            wanted = torch.isin(data["topic", "of", "paper"].edge_index[1], seeds).sum()
            counts = batch["topic", "of", "paper"].num_sampled_edges
            assert counts[0] == int(wanted) and counts[1] == 0 < counts[2]
        plain = model(batch.x_dict, batch.edge_index_dict)["paper"][:4]
        x, edge_index = batch.x_dict, batch.edge_index_dict
        # Of another layer than the first, what the last hop found is not needed any more.
        x, edge_index, _ = trim_to_layer(
            1, batch.collect("num_sampled_nodes"), batch.collect("num_sampled_edges"), x, edge_index
        )
        two = to_hetero(GraphSAGE((-1, -1), 8, 2, 3).double(), data.metadata())
        before = two(batch.x_dict, batch.edge_index_dict)["paper"][:4]
        torch.testing.assert_close(two(x, edge_index)["paper"][:4], before)
    torch.testing.assert_close(plain, model(data.x_dict, data.edge_index_dict)["paper"][seeds])


def test_types_in_pygs_loader():
    data = typed_graph()
    sampler = NeighborSampler.from_data(data, [3, 2])
    for batch in NodeLoader(data, sampler, input_nodes=("author", torch.arange(10)), batch_size=5):
        assert batch["author"].batch_size == 5 and len(batch["author"].input_id) == 5
        for kind in data.edge_types:
            source, target = batch[kind].edge_index
            found = torch.stack([batch[kind[0]].n_id[source], batch[kind[2]].n_id[target]])
            assert torch.equal(found, data[kind].edge_index[:, batch[kind].e_id])


def test_types_share_no_draws():
    """Two relations with the same edges: what a node draws from one says nothing of the other."""
    data = HeteroData()
    data["a"].num_nodes = data["b"].num_nodes = 400
    edge_index = torch.stack([torch.arange(4_000) % 400, torch.arange(4_000) // 10])
    data["a", "one", "b"].edge_index = data["a", "two", "b"].edge_index = edge_index
    out = NeighborSampler.from_data(data, [1]).sample({"b": torch.arange(400)}, 1)
    same = (out.edge["a", "one", "b"] == out.edge["a", "two", "b"]).double().mean()
    assert 0.03 < float(same) < 0.2


# Times and weights ############################################################


def test_times_of_edges_and_of_nodes():
    data = random_graph()
    data.time = torch.randint(0, 50, (3_000,), generator=torch.Generator().manual_seed(1))
    seeds, until = torch.tensor([3, 3, 9]), torch.tensor([10, 40, 25])
    for strategy in ("uniform", "last"):
        out = NeighborSampler.from_data(data, [4, 3], time_attr="time", strategy=strategy).sample(seeds, 1, until)
        assert (data.time[out.edge] <= until[out.batch[out.col]]).all() and len(out.edge)
        assert torch.equal(out.node[:3], seeds)
    first = data.time[out.edge[out.col == 1]]
    allowed = data.time[(data.edge_index[1] == 3) & (data.time <= 40)]
    assert torch.equal(first.sort().values, allowed.sort().values[-4:])
    of_nodes = Data(edge_index=data.edge_index, num_nodes=200, born=torch.arange(200))
    sampler = NeighborSampler.from_data(of_nodes, [4, 3], time_attr="born")
    out = sampler.sample(seeds, 1, until)
    assert (out.node[out.row] <= until[out.batch[out.col]]).all() and len(out.edge)
    loader = NodeLoader(of_nodes, sampler, input_nodes=seeds, input_time=until, batch_size=2)
    assert [batch.batch_size for batch in loader] == [2, 1]


def test_weights_of_edges():
    data = random_graph()
    data.edge_weight = (torch.arange(3_000) % 3).double()
    out = NeighborSampler.from_data(data, [4, 3], weight_attr="edge_weight").sample(torch.arange(20), 1)
    assert len(out.edge) and (data.edge_weight[out.edge] > 0).all()


# Subgraphs ####################################################################


def test_clusters():
    data, part = random_graph(), torch.arange(200) % 7
    nodes = torch.isin(part, torch.tensor([2, 5])).nonzero().view(-1)
    out = NeighborSampler.from_data(data, [1]).induced(nodes)
    edge_index, _, kept = subgraph(nodes, data.edge_index, relabel_nodes=True, num_nodes=200, return_edge_mask=True)
    order = out.edge.argsort()
    assert torch.equal(torch.stack([out.row, out.col])[:, order], edge_index)
    assert torch.equal(out.edge[order], kept.nonzero().view(-1)) and torch.equal(out.node, nodes)
    batch = to_batch(data, out, torch.arange(len(nodes)))
    assert torch.equal(batch.x, data.x[nodes])


def test_walks():
    data = random_graph(50, 150)
    csr = CSR.from_coo(data.edge_index[1], data.edge_index[0], 50, 50)
    walks = random_walks(csr, torch.arange(50), 5, seed=1)
    edges = set(map(tuple, data.edge_index.t().tolist()))
    dead_ends = set(range(50)) - set(data.edge_index[1].tolist())
    for one in walks.tolist():
        for here, there in pairwise(one):
            assert (there, here) in edges or (here in dead_ends and here == there)
    steps = random_walks(star(20), torch.zeros(4_000, dtype=torch.long), 1, seed=2)[:, 1]
    assert chisquare(torch.bincount(steps, minlength=20).numpy()).pvalue > 1e-4


def test_graphsaint():
    """Degrees and their inverses decide what is drawn, and the norms undo it."""
    data = planted_partition(300, 8.0, seed=1)
    sampler = NeighborSampler.from_data(data, [1])
    [csr] = sampler.csr.values()
    degree = csr.indptr.diff().double()
    draws = torch.stack([index_to_mask(saint_nodes(csr, 30, seed), 300) for seed in range(2_000)]).double().mean(0)
    expected = 1 - (1 - degree / degree.sum()) ** 30
    assert (draws - expected).abs().max() < 5 * 0.5 / 2_000**0.5
    odds = 1 / degree[data.edge_index[0]] + 1 / degree[data.edge_index[1]]
    share = torch.zeros(300, dtype=torch.float64)
    for end in data.edge_index:
        share.index_add_(0, end, odds / odds.sum())
    draws = torch.stack([index_to_mask(saint_edges(csr, 20, seed), 300) for seed in range(2_000)]).double().mean(0)
    assert (draws - (1 - (1 - share) ** 20)).abs().max() < 5 * 0.5 / 2_000**0.5
    walked = saint_walks(csr, 20, 3, seed=1)
    assert len(walked) <= 80 and torch.equal(walked, walked.unique())
    # The mean over batches of weighted sums is what it would be over the whole graph.
    node_norm, edge_norm = saint_norms(sampler, lambda seed: saint_nodes(csr, 300, seed), 400)
    values, total, messages = torch.rand(300), torch.zeros(()), torch.zeros(300)
    for seed in range(400):
        out = sampler.induced(saint_nodes(csr, 300, seed))
        total += (values * node_norm)[out.node].sum() / 400
        messages.index_add_(0, out.node[out.col], (edge_norm[out.edge] * values[out.node[out.row]]) / 400)
    torch.testing.assert_close(total, values[degree > 0].sum() / 300, rtol=1e-3, atol=1e-3)
    seen = 1 / (node_norm * 300)  # how often each node was there
    wanted = torch.zeros(300).index_add_(0, data.edge_index[1], values[data.edge_index[0]])
    found = messages / seen
    often = seen > 0.5
    torch.testing.assert_close(found[often], wanted[often], rtol=0.05, atol=0.05)


# Bad input ####################################################################


def test_errors():
    data, types = random_graph(), typed_graph()
    csr = CSR.from_coo(data.edge_index[1], data.edge_index[0], 200, 200)
    for num_neighbors in ([5, 0], [-2]):
        with pytest.raises(ValueError, match=rf"A fan-out must be at least 1, or -1 for all edges \(got {num_neighbors[-1]}\)"):
            NeighborSampler(csr, num_neighbors)
    with pytest.raises(ValueError, match=r"such as \[15, 10\] \(got \[\]\)"):
        NeighborSampler(csr, [])
    sampler = NeighborSampler(csr, [2])
    with pytest.raises(ValueError, match="at least one node, got none"):
        sampler.sample(torch.empty(0, dtype=torch.long))
    for seeds in ([0, 200], [-1]):
        with pytest.raises(ValueError, match="Seeds must be from 0 to 199, got"):
            sampler.sample(torch.tensor(seeds))
    with pytest.raises(ValueError, match="int64 of one dimension"):
        sampler.sample(torch.tensor([1.0]))
    with pytest.raises(ValueError, match="Fan-outs are given for"):
        NeighborSampler.from_data(types, {("paper", "cites", "paper"): [2]})
    with pytest.raises(ValueError, match="the same number of hops"):
        NeighborSampler.from_data(types, {kind: [2] * (1 + (kind[1] == "of")) for kind in types.edge_types})
    with pytest.raises(ValueError, match="No edge type has nodes of type 'venue'"):
        NeighborSampler.from_data(types, [2]).sample({"venue": torch.tensor([0])})
    with pytest.raises(ValueError, match="no attribute 'when'"):
        NeighborSampler.from_data(data, [2], time_attr="when")
    with pytest.raises(ValueError, match="2 seeds must have a time, .* got none"):
        NeighborSampler(csr, [2], time=torch.zeros(3_000, dtype=torch.long)).sample(torch.arange(2))
    with pytest.raises(ValueError, match="weight must have 3000 entries"):
        sample_neighbors(csr, torch.arange(2), 2, weight=torch.ones(3))
    with pytest.raises(ValueError, match="replace=True is not supported with weight"):
        sample_neighbors(csr, torch.arange(2), 2, weight=torch.ones(3_000), replace=True)
    with pytest.raises(ValueError, match='"uniform" or "last"'):
        sample_neighbors(csr, torch.arange(2), 2, strategy="first")
    with pytest.raises(ValueError, match="set together"):
        sample_neighbors(csr, torch.arange(2), 2, time=torch.ones(3_000, dtype=torch.long))
    with pytest.raises(ValueError, match="must be used with time"):
        NeighborSampler(csr, [2], strategy="last")
    with pytest.raises(ValueError, match="LABOR does not support replace=True"):
        NeighborSampler(csr, [2], labor=True, replace=True)
    with pytest.raises(ValueError, match="labor=True, which shares nodes"):
        NeighborSampler(csr, [2], labor=True, disjoint=True)
    with pytest.raises(ValueError, match="LABOR does not support time"):
        NeighborSampler(csr, [2], labor=True, time=torch.ones(3_000, dtype=torch.long))
    with pytest.raises(ValueError, match="source_keys must have 200 entries, got 3"):
        sample_neighbors(csr, torch.arange(2), 2, source_keys=torch.arange(3))
    with pytest.raises(ValueError, match="weight must have 3000 entries for .*, got 3"):
        NeighborSampler(csr, [2], weight=torch.ones(3))
    with pytest.raises(ValueError, match="An induced subgraph has no seeds"):
        NeighborSampler(csr, [2], disjoint=True).induced(torch.arange(3))
