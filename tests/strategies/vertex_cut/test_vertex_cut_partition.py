"""Vertex cuts: edges, masters, and the report of both. No ranks."""

from __future__ import annotations

import math
import tracemalloc
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import campaign, examples
from conftest import SHARED
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.partition import adjacency
from lightning_gnn.partition.adjacency import mix
from lightning_gnn.registry import baseline_cutter
from lightning_gnn.strategies.vertex_cut import cutters, loops
from lightning_gnn.strategies.vertex_cut.cutters import (
    EDGE_BOUND,
    METHODS,
    STREAM_BOUND,
    VertexCutReport,
    assign_edges,
    cut_edges,
    edge_predictions,
    vertex_cut_report,
)

Graph = tuple[np.ndarray, int]
TWO_HOSTS = ((0, 1, 2, 3), (4, 5, 6, 7))


@st.composite
def graphs(draw: Any, most_parts: int = 12) -> tuple[np.ndarray, int, int, np.random.Generator]:
    """Directed, with self-loops, duplicates and nodes without edges; parts may be as many as edges."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    nodes, parts = draw(st.integers(1, 40)), draw(st.integers(1, most_parts))
    edges = draw(st.integers(parts, 150))
    return rng.integers(0, draw(st.integers(1, nodes)), (2, edges)), nodes, parts, rng


def power_law(num_edges: int, num_nodes: int) -> Graph:
    """Ends drawn in proportion to Pareto weights: hubs, and no structure besides."""
    rng = np.random.default_rng(0)
    weight = np.cumsum(np.minimum(rng.random(num_nodes) ** (-1 / 1.8), 2000))
    return np.searchsorted(weight, rng.random((2, num_edges)) * weight[-1]), num_nodes


def web(num_nodes: int, degree: int) -> Graph:
    """Hosts of power-law sizes, whose pages link to the first of their host, and to the hubs of all, in the order of URLs."""
    rng = np.random.default_rng(0)
    sizes = np.minimum(10 * rng.random(num_nodes // 20) ** (-1 / 1.1), num_nodes // 20).astype(np.int64)
    start, num_nodes = np.cumsum(sizes) - sizes, int(sizes.sum())
    source = np.repeat(
        np.arange(num_nodes), np.minimum(degree / 3 * rng.random(num_nodes) ** (-1 / 1.5), 1000).astype(np.int64)
    )
    host = np.repeat(np.arange(len(sizes)), sizes)[source]
    weight = np.cumsum(rng.random(num_nodes) ** (-1 / 1.1))
    inside = start[host] + (sizes[host] * rng.random(len(source)) ** 4).astype(np.int64)
    outside = np.searchsorted(weight, rng.random(len(source)) * weight[-1])
    return np.stack([source, np.where(rng.random(len(source)) < 0.85, inside, outside)]), num_nodes


def edge_list(name: str) -> Graph:
    path = SHARED / "data" / "edges" / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"needs {path.name} in the data folder (set LIGHTNING_GNN_SHARED)")
    arrays = np.load(path)
    return np.stack([arrays["src"], arrays["dst"]]).astype(np.int64), int(arrays["num_nodes"])


def hosts_of(parts: int) -> tuple[tuple[int, ...], ...]:
    """Ranks dealt out over as many hosts as go, so that a host's ranks do not follow each other."""
    number = next(number for number in (3, 2, 1) if parts % number == 0)
    return tuple(tuple(range(host, parts, number)) for host in range(number))


@examples(200)
@given(graphs(), st.sampled_from(METHODS), st.booleans())
def test_every_edge_has_a_rank_and_every_node_a_master_that_holds_it(graph, method, grouped):
    edge_index, nodes, parts, _ = graph
    options = {"groups": hosts_of(parts)} if grouped else {}
    found = assign_edges(edge_index, nodes, parts, method, **options)
    assert found.part.shape == edge_index.shape[1:] and found.part.dtype == np.uint8 and found.part.max() < parts
    assert found.master.shape == (nodes,) and found.master.dtype == np.int32
    assert found.master.min() >= 0 and found.master.max() < parts
    for node in range(nodes):
        holders = found.part[(edge_index == node).any(0)]
        assert len(holders) == 0 or found.master[node] in holders
    again = assign_edges(edge_index.copy(order="F"), nodes, parts, method, **options)
    assert np.array_equal(found.part, again.part) and np.array_equal(found.master, again.master)


@examples(100)
@given(graphs())
def test_report_against_a_loop(graph):
    edge_index, nodes, parts, rng = graph
    part, master = rng.integers(0, parts, edge_index.shape[1]), rng.integers(0, parts, nodes)
    host = rng.integers(0, 3, parts)
    report = vertex_cut_report(edge_index, part, master, parts, host)
    names = ("masters", "replicas", "edges", "in_edges", "copies", "partials", "inner", "outer")
    expected = {name: [0] * parts for name in names}
    for rank, target in zip(part, edge_index[1]):
        expected["edges"][rank] += 1
        expected["in_edges"][master[target]] += 1
    for node in range(nodes):
        owner = master[node]
        expected["masters"][owner] += 1
        readers, adders = ({int(rank) for rank in part[ends == node]} for ends in edge_index)
        for rank in readers | adders | {owner}:
            expected["replicas"][rank] += 1
        for rank in readers - {owner}:
            expected["copies"][rank] += 1
            expected["inner" if host[rank] == host[owner] else "outer"][owner] += 1
        for rank in adders - {owner}:
            expected["partials"][rank] += 1
            expected["inner" if host[rank] == host[owner] else "outer"][rank] += 1
    values = report.as_dict()
    assert {name: values[name] for name in expected} == expected
    sent = report.inner.sum() + report.outer.sum()
    assert sent == report.copies.sum() + report.partials.sum() <= 2 * (report.replicas.sum() - nodes)
    assert report.replication_factor == sum(expected["replicas"]) / nodes
    assert VertexCutReport.from_dict(values).as_dict() == values
    assert report.table().row_count == parts


def by_equation_24(edge_index: np.ndarray, nodes: int, groups: Any, weight: float) -> list[int]:
    """CDFGNN section 6 as it stands, in the module's fixed point."""
    one, (source, target) = 1 << 36, edge_index
    hosts = [list(group) for group in groups]
    ranks = [rank for host in hosts for rank in host]  # of equal scores, the first of these wins
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    degree = np.bincount(edge_index.ravel(), minlength=nodes)
    on_rank, on_host = round((1 - weight) * one), round(weight * one)
    per_edge, per_replica = round(one * len(ranks) / len(source)), round(one * len(ranks) / nodes)
    held: list[set[int]] = [set() for _ in range(nodes)]
    load, part = dict.fromkeys(ranks, 0), [0] * len(source)
    for edge in np.argsort(degree[source] + degree[target], kind="stable"):
        ends = [held[source[edge]], held[target[edge]]]

        def score(rank: int, ends: list[set[int]] = ends) -> int:
            new = sum(on_rank * (rank not in end) for end in ends)
            return new + sum(on_host * (host_of[rank] not in {host_of[r] for r in end}) for end in ends) + load[rank]

        best = min(ranks, key=score)
        before = sum(map(len, {id(end): end for end in ends}.values()))
        for end in ends:
            end.add(best)
        after = sum(map(len, {id(end): end for end in ends}.values()))
        load[best] += per_edge + (after - before) * per_replica
        part[edge] = best
    return part


@examples(100)
@given(graphs(most_parts=1), st.sampled_from([(1, 5), (2, 4), (3, 2), (5, 3), (2, 9), (3, 12), (9, 1)]), st.booleans())
def test_ebv_is_equation_24(graph, shape, plain):
    """Hosts that share a block of lanes, that leave gaps in one, and that fill several."""
    edge_index, nodes, _, rng = graph
    number, size = shape
    edge_index = np.concatenate([edge_index, rng.integers(0, nodes, (2, number * size))], 1)
    groups = tuple(tuple(range(host, number * size, number)) for host in range(number))
    weight = 0.0 if plain else 0.1
    found = assign_edges(edge_index, nodes, number * size, groups=groups, host_weight=weight)
    one_host = (tuple(range(number * size)),)
    expected = by_equation_24(edge_index, nodes, one_host if plain or number == 1 else groups, weight * (number > 1))
    assert found.part.tolist() == expected


def elected(edge_index: np.ndarray, nodes: int, part: np.ndarray, hosts: list[int], far: float) -> dict[int, int]:
    """Masters of the nodes that have edges, as ``loops.elect`` chooses them, counted anew for each."""
    degree = np.bincount(edge_index[1], minlength=nodes)
    reads, adds = ([{int(rank) for rank in part[ends == node]} for node in range(nodes)] for ends in edge_index)
    master: dict[int, int] = {}
    rows = 1 + sum(len(r) + len(a) - 2 * bool(r | a) for r, a in zip(reads, adds))

    def load(rank: int) -> tuple[float, float, float]:
        mine = [node for node, owner in master.items() if owner == rank]
        sent = sum(rank in each for each in adds) + sum(
            len(reads[node]) - (rank in reads[node]) - (rank in adds[node]) for node in mine
        )
        per_row, per_node, per_edge = (len(hosts) / total for total in (max(rows, 1), nodes, len(part)))
        return per_row * sent, per_node * len(mine), per_edge * int(degree[mine].sum())

    def score(node: int, rank: int) -> float:
        away = sum(hosts[peer] != hosts[rank] for each in (reads[node], adds[node]) for peer in each)
        sent, owned, loaded = load(rank)
        size = degree[node] * nodes / len(part)
        found = 2 - (rank in reads[node]) - (rank in adds[node]) + away * far
        found += sent + owned + size * loaded
        return found + 1e4 * (max(owned - EDGE_BOUND, 0) + size * max(loaded - EDGE_BOUND, 0))

    for turn in range(17):
        before = dict(master)
        for node in np.argsort(-degree, kind="stable").tolist():
            holders = reads[node] | adds[node]
            if holders and (len(holders) > 1) == (turn > 0):
                master.pop(node, None)
                master[node] = min(sorted(holders), key=lambda rank, node=node: score(node, rank))
        if turn and (master == before or max(max(load(rank)[1:]) for rank in range(len(hosts))) <= EDGE_BOUND):
            break
    return master


@examples(60)
@given(graphs(), st.booleans())
def test_masters_cost_few_rows_and_even_out_loads(graph, grouped):
    edge_index, nodes, parts, _ = graph
    groups = hosts_of(parts) if grouped else (tuple(range(parts)),)
    found = assign_edges(edge_index, nodes, parts, "random", groups=groups)
    host = [next(number for number, ranks in enumerate(groups) if rank in ranks) for rank in range(parts)]
    expected = elected(edge_index, nodes, found.part, host, 0.1)
    assert {node: int(found.master[node]) for node in expected} == expected


@examples(50)
@given(graphs(most_parts=20))
def test_hdrf_is_the_papers_score(graph):
    """Petroni et al., section 3.2 with lambda = 1, epsilon = 1 and known degrees, in the module's fixed point; within a bound."""
    edge_index, nodes, parts, _ = graph
    one, degree = 1 << 36, np.bincount(edge_index.ravel(), minlength=nodes).tolist()
    held: list[set[int]] = [set() for _ in range(nodes)]
    size, limit = [0] * parts, math.ceil(1.05 * edge_index.shape[1] / parts)
    found = assign_edges(edge_index, nodes, parts, "hdrf")
    for (u, v), rank in zip(edge_index.T.tolist(), found.part):
        share_u, share_v = one * degree[v] // (degree[u] + degree[v]), one - one * degree[v] // (degree[u] + degree[v])
        unit = one // (1 + max(size) - min(size))
        scores = [
            (one + share_u) * (each in held[u]) + (one + share_v) * (each in held[v]) + (max(size) - size[each]) * unit
            for each in range(parts)
        ]
        assert rank == max(
            (each for each in range(parts) if size[each] < limit), key=lambda each: (scores[each], -each)
        )
        held[u].add(int(rank))
        held[v].add(int(rank))
        size[rank] += 1


def test_cutters_to_compare_with_are_imported_when_named():
    """No module of the scheme imports them; the registry has them all."""
    folder = Path(cutters.__file__).parent
    assert not [file for file in folder.glob("*.py") if "vertex_cut.baselines" in file.read_text()]
    of_the_scheme = {"auto", "ebv", "ne", "random", "streaming"}
    for method in set(METHODS) - of_the_scheme:
        assert "vertex_cut.baselines." in baseline_cutter(method).__module__


@examples(50)
@given(graphs(most_parts=20))
def test_dne_is_the_papers_expansion(graph):
    """Hanai et al., Algorithms 1 to 4 with lambda = 0.1 and alpha = 1.1, with workers that take their turns in one order."""
    edge_index, nodes, parts, _ = graph
    found = assign_edges(edge_index, nodes, parts, "dne", seed=3)
    edges = edge_index.T.tolist()
    of: list[list[int]] = [[] for _ in range(nodes)]
    for edge, (u, v) in enumerate(edges):
        for node in dict.fromkeys((u, v)):
            of[node].append(edge)
    starts = iter(np.random.default_rng(3).permutation(nodes).tolist())
    part: dict[int, int] = {}
    size, holds, boundaries = [0] * parts, [set[int]() for _ in range(parts)], [list[int]() for _ in range(parts)]

    def free(node: int) -> list[int]:
        return [edge for edge in of[node] if edge not in part]

    while len(part) < len(edges):
        for rank in range(parts):
            if size[rank] > 1.1 * len(edges) / parts or len(part) == len(edges):
                continue
            boundary = [node for node in boundaries[rank] if free(node)]
            if not boundary:
                boundary = [next(node for node in starts if free(node))]
                holds[rank].add(boundary[0])
            order = sorted(range(len(boundary)), key=lambda k: len(free(boundary[k])))
            taken = sorted(order[: max(1, int(0.1 * len(boundary)))])
            joined = []
            for core in (boundary[k] for k in taken):
                for edge in free(core):
                    part[edge] = rank
                    size[rank] += 1
                    other = sum(edges[edge]) - core
                    if other not in holds[rank]:
                        holds[rank].add(other)
                        joined.append(other)
            for node in joined:
                for edge in free(node):
                    both = [each for each in range(parts) if holds[each] >= set(edges[edge])]
                    if both:
                        part[edge] = min(both, key=size.__getitem__)  # of the worker with least edges
                        size[part[edge]] += 1
            boundaries[rank] = [node for k, node in enumerate(boundary) if k not in taken] + joined
    assert found.part.tolist() == [part[edge] for edge in range(len(edges))]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("parts", [65, *campaign(300)])
def test_many_parts(method, parts):
    edge_index, nodes = power_law(20_000, 2000)
    found = assign_edges(edge_index, nodes, parts, method)
    assert found.part.dtype == (np.uint8 if parts < 256 else np.uint16)
    assert found.report.edges.sum() == 20_000
    if method in ("ebv", "hdrf", "ne"):
        assert found.report.edge_balance < (1.2 if parts == 65 else 1.5)  # of 308 and of 67 edges a part


def test_edges_that_come_sorted_are_divided():
    edge_index, nodes = GRAPHS["soc-slashdot0902"]()
    order = np.lexsort(edge_index[::-1])
    assert assign_edges(edge_index[:, order], nodes, 8, "hdrf").report.edge_balance < 1.06


GRAPHS = {
    "power law": lambda: power_law(200_000, 10_000),
    "web": lambda: web(10_000, 16),
    **{name: partial(edge_list, name) for name in ("ego-twitter", "cnr-2000", "soc-slashdot0902")},
}


@pytest.mark.parametrize(
    ("name", "method", "parts"),
    [
        *(("power law", method, 8) for method in ("ebv", "ne")),
        ("cnr-2000", "ne", 8),
        *campaign(*(each for each in product(GRAPHS, ("ebv", "ne"), (4, 8)) if each != ("cnr-2000", "ne", 8))),
    ],
)
def test_ranks_load_as_evenly_as_they_compute(name, method, parts):
    """What a rank loads, its masters' in-edges, is as even as what it computes; for that hardly more rows are sent."""
    edge_index, nodes = GRAPHS[name]()
    found = assign_edges(edge_index, nodes, parts, method)
    report, in_degree = found.report, np.bincount(edge_index[1], minlength=nodes)
    assert np.array_equal(report.in_edges, np.bincount(found.master, in_degree, parts))
    assert report.edge_balance <= 1.05 and report.loaded_balance <= 1.10
    # In 4 parts of cnr-2000, one has all edges of 1.12 times the average of nodes.
    assert report.master_balance <= (1.15 if (name, method, parts) == ("cnr-2000", "ne", 4) else 1.10)
    reads, adds = (np.zeros((nodes, parts), bool) for _ in range(2))
    reads[edge_index[0], found.part] = adds[edge_index[1], found.part] = True
    ends = reads + adds.astype(int)
    least = (ends.sum(1) - ends.max(1)).sum()
    few = (name, method) == ("cnr-2000", "ne")  # of whose nodes 96 % and more lie on one rank, and send nothing
    assert report.copies.sum() + report.partials.sum() <= (1.2 if few else 1.01) * least


def test_a_node_with_more_in_edges_than_a_rank_should_load():
    """Its edges are computed evenly; its master loads them all, and is given little beside."""
    rng = np.random.default_rng(0)
    to_hub = np.stack([np.arange(1, 2000), np.zeros(1999, np.int64)])
    edge_index = np.concatenate([to_hub, rng.integers(0, 2000, (2, 4000))], 1)
    report = assign_edges(edge_index, 2000, 8, "ne").report
    assert report.edge_balance <= 1.05 and report.in_edges.max() < 1.1 * 1999 and report.master_balance <= 1.10


@pytest.mark.parametrize("method", [each for each in METHODS if each != "dne"])  # whose own tables have 1.15 to 1.75
def test_balances_on_a_power_law_graph(method):
    edge_index, nodes = power_law(200_000, 10_000)
    report = assign_edges(edge_index, nodes, 8, method, groups=TWO_HOSTS).report
    bounds = {"ebv": (1.05, 1.05), "hdrf": (1.05, 1.2), "ne": (1.06, 1.1)}.get(method, (1.15, 1.1))
    assert report.edge_balance < bounds[0] and report.replica_balance < bounds[1]
    assert report.master_balance < 1.1 and report.sent_balance < 1.1


def test_methods_order_as_they_should():
    edge_index, nodes = power_law(200_000, 10_000)
    factor = {method: assign_edges(edge_index, nodes, 8, method).report.replication_factor for method in METHODS}
    assert factor["ne"] < factor["ebv"] < factor["dbh"] < factor["random"]
    assert factor["ne"] < 0.9 * factor["ebv"] and factor["grid"] < factor["random"]


@pytest.mark.parametrize("name", ["power law", "ego-twitter", "cnr-2000"])
def test_knowing_hosts_sends_fewer_rows_between_them(name):
    edge_index, nodes = power_law(200_000, 10_000) if name == "power law" else edge_list(name)
    flat, by_host = (
        assign_edges(edge_index, nodes, 8, groups=TWO_HOSTS, host_weight=weight).report for weight in (0, 0.1)
    )
    assert by_host.outer.max() < 0.9 * flat.outer.max() and by_host.outer.sum() < 0.9 * flat.outer.sum()
    assert by_host.replication_factor < 1.06 * flat.replication_factor
    assert max(flat.edge_balance, by_host.edge_balance) < 1.05


@pytest.mark.parametrize("name", ["ego-twitter", "cnr-2000"])
def test_expansion_finds_structure_and_balances_rows(name):
    edge_index, nodes = edge_list(name)
    grown, streamed = (assign_edges(edge_index, nodes, 8, method).report for method in ("ne", "ebv"))
    assert grown.replication_factor - 1 < 0.3 * (streamed.replication_factor - 1)
    assert grown.edge_balance < 1.06 and grown.replica_balance < 1.2


@examples(60)
@given(graphs(), st.sampled_from(METHODS))
def test_every_rank_is_master_of_a_node_of_each_mask(graph, method):
    edge_index, nodes, parts, rng = graph
    split = rng.integers(0, 3, nodes)
    masks = {name: split == value for value, name in enumerate(("train", "val", "test"))}
    found = assign_edges(edge_index, nodes, parts, method, masks=masks)
    for mask in masks.values():
        if mask.sum() >= parts:
            assert (np.bincount(found.master[mask], minlength=parts) > 0).all()
    expected = vertex_cut_report(edge_index, found.part, found.master, parts)
    assert found.report.as_dict() == expected.as_dict()


def test_nodes_without_edges_even_out_what_ranks_own():
    edge_index = np.array([[0, 1, 2, 3], [1, 2, 3, 0]])
    found = assign_edges(edge_index, 100, 4)
    assert found.report.masters.tolist() == [25] * 4


@pytest.mark.parametrize("method", METHODS)
def test_one_part_holds_everything(method):
    edge_index, nodes = power_law(1000, 100)
    report = assign_edges(edge_index, nodes, 1, method).report
    assert report.edges.tolist() == [1000] and report.replicas.tolist() == [100]
    assert report.inner.sum() + report.outer.sum() == 0


def test_hosts_that_leave_too_many_gaps_are_named():
    edge_index, nodes = power_law(5000, 500)
    groups = tuple(tuple(range(5 * host, 5 * host + 5)) for host in range(800))
    with pytest.raises(ValueError, match="800 hosts of 5 parts do not fit.*Use host_weight=0"):
        assign_edges(edge_index, nodes, 4000, groups=groups)
    assert assign_edges(edge_index, nodes, 4000, groups=groups, host_weight=0).report.edges.sum() == 5000


RING = np.stack([np.arange(10), (np.arange(10) + 1) % 10])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"method": "metis"},
            r"one of 'auto', 'ebv', 'hdrf', 'dbh', 'grid', 'random', 'ne', 'dne', 'streaming', or the rank of .*, got 'metis'",
        ),
        ({"num_parts": 0}, "num_parts must be at least 1, got 0"),
        ({"num_parts": 5000}, "at most 4096, got 5000"),
        ({"num_parts": 11}, "got 10 edges for 11 parts. Use at most 10 parts"),
        ({"num_nodes": 9}, "from 0 to 8, for 9 nodes, got 0 to 9"),
        ({"edge_index": RING.T}, r"int64 or int32 of shape \[2, E\] \(got int64 of \[10, 2\]\)"),
        ({"edge_index": RING.astype(np.int16)}, r"int64 or int32 of shape \[2, E\] \(got int16 of \[2, 10\]\)"),
        ({"edge_index": RING[:, :0]}, "got 0 edges for 4 parts. Use a strategy with an edge cut"),
        ({"host_weight": 1.5}, r"from 0, which ignores hosts, to 1 \(got 1.5\)"),
        ({"groups": ((0, 1), (2, 4))}, "name the parts 0 to 3, each once"),
        ({"groups": ((0, 1), (1, 2, 3))}, "name the parts 0 to 3, each once"),
        ({"groups": ((0,), (1, 2, 3))}, "same number of parts, got .* Use the same number of parts per machine"),
    ],
)
def test_errors_say_what_to_do(options, words):
    arguments = {"edge_index": RING, "num_nodes": 10, "num_parts": 4, **options}
    with pytest.raises(ValueError, match=words):
        assign_edges(**arguments)


def test_a_given_cut():
    edges = np.array([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])
    found = assign_edges(edges, 5, 3, np.array([0, 0, 1, 2, 2]))
    assert found.method == "given" and found.part.tolist() == [0, 0, 1, 2, 2]
    assert found.report.edges.tolist() == [2, 1, 2]
    with pytest.raises(ValueError, match=r"each of 5 edges, got shape \[4\]. An edge cut, with a rank for each node"):
        assign_edges(edges, 5, 3, np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="from 0 to 2, for 3 parts, got 0 to 3"):
        assign_edges(edges, 5, 3, np.array([0, 0, 1, 2, 3]))


@given(graphs(), st.integers(1, 40))
@examples(40)
def test_clusters_of_bounded_volume(graph, most):
    edge_index, num_nodes, _, _ = graph
    source, target = edge_index
    degree = np.bincount(edge_index.ravel(), minlength=num_nodes).astype(np.int32)
    of, volume = np.arange(num_nodes, dtype=np.int32), degree.astype(np.int64)
    loops.cluster(source, target, degree, most, of, volume)
    assert np.array_equal(np.bincount(of, degree, num_nodes), volume)
    several = np.bincount(of, minlength=num_nodes) > 1
    assert (volume[several] <= most).all()


@examples(60)
@given(graphs(most_parts=20), st.integers(1, 200), st.integers(0, 9))
def test_two_phases_are_the_papers(graph, piece, seed):
    """Mayer et al., Algorithms 1 and 2, read whole; the edges come in pieces, and as files have them."""
    edge_index, nodes, parts, _ = graph
    edges, share = edge_index.T.tolist(), edge_index.shape[1] / parts
    degree = np.bincount(edge_index.ravel(), minlength=nodes).tolist()
    of, volume, largest = [*range(nodes)], [*degree], int(2 * share / 8)
    for u, v in edges + edges:
        if of[u] != of[v] and max(volume[of[u]], volume[of[v]]) <= largest:
            small, large = (u, v) if volume[of[u]] - degree[u] <= volume[of[v]] - degree[v] else (v, u)
            if volume[of[large]] + degree[small] <= largest:
                volume[of[small]] -= degree[small]
                volume[of[large]] += degree[small]
                of[small] = of[large]
    home, load = [0] * nodes, [0] * parts
    for each in sorted(filter(volume.__getitem__, range(nodes)), key=lambda each: -volume[each]):
        home[each] = load.index(min(load))
        load[home[each]] += volume[each]
    size, held, most = [0] * parts, [set[int]() for _ in range(nodes)], np.ceil(STREAM_BOUND * share)
    expected = {}
    for between in (False, True):
        for number, (u, v) in enumerate(edges):
            ends = [(u, v), (v, u)]
            if between == (home[of[u]] == home[of[v]]):
                continue

            def score(rank: int, ends: Any = ends) -> float:
                found = next(volume[of[a]] for a, _ in ends if home[of[a]] == rank) / sum(
                    volume[of[a]] for a, _ in ends
                )
                for a, b in ends:
                    found += (1 + degree[b] / (degree[a] + degree[b])) * (rank in held[a])
                return found

            where = sorted((home[of[u]], home[of[v]]), key=score, reverse=True)
            hashed = int(mix(max(u, v, key=degree.__getitem__) ^ (seed << 40)) % np.uint64(parts))
            rank = next((each for each in (*where, hashed) if size[each] < most), size.index(min(size)))
            expected[number] = rank
            size[rank] += 1
            held[u].add(rank)
            held[v].add(rank)
    part = np.empty(len(edges), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adjacency, "COPIED", piece)
        cut_edges(edge_index.astype(np.int32), nodes, [[*range(parts)]], "streaming", seed=seed, part=part)
    assert part.tolist() == [expected[number] for number in range(len(edges))] and max(size) <= most


def test_memory_of_two_phases_does_not_grow_with_edges(tmp_path, monkeypatch):
    """Edges and their ranks lie in files; masters and the report are made as well."""
    monkeypatch.setattr(adjacency, "COPIED", 1000)
    peaks = []
    for num_edges in (5000, 160_000) * 4:  # the first time loads what is compiled; other threads add to some
        np.save(tmp_path / "edges.npy", np.random.default_rng(0).integers(0, 500, (2, num_edges), np.int32))
        edges = np.load(tmp_path / "edges.npy", mmap_mode="r")
        ranks = np.lib.format.open_memmap(tmp_path / "ranks.npy", "w+", np.uint8, (num_edges,))
        tracemalloc.start()
        found = assign_edges(edges, 500, 4, "streaming", part=ranks)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.part is ranks and found.report.edges.sum() == num_edges
    assert min(peaks[3::2]) < 1.2 * min(peaks[2::2]) < 160_000, peaks


def test_auto_takes_the_first_that_fits(monkeypatch):
    edge_index, nodes = power_law(20_000, 2000)
    needed = {each.method: each.bytes for each in edge_predictions(edge_index, nodes, 4)}
    assert [*needed.values()] == sorted(needed.values(), reverse=True)
    for free, method in ((None, "ne"), *((amount, each) for each, amount in needed.items())):
        monkeypatch.setattr(cutters, "available_bytes", lambda free=free: free)
        found = assign_edges(edge_index, nodes, 4, "auto")
        assert found.method == method and np.array_equal(found.part, assign_edges(edge_index, nodes, 4, method).part)
    monkeypatch.setattr(cutters, "available_bytes", lambda: needed["streaming"] - 1)
    with pytest.raises(MemoryError, match=r"No partitioner fits: 'streaming' needs the least"):
        assign_edges(edge_index, nodes, 4, "auto")


def test_two_phases_find_what_is_apart():
    """Cliques of 12 in any order of edges: no node is replicated, though other streams of edges cut them."""
    clique = np.stack(np.nonzero(~np.eye(12, dtype=bool)))
    edges = np.concatenate([clique + 12 * number for number in range(64)], 1)
    edges = edges[:, np.random.default_rng(0).permutation(edges.shape[1])]
    reports = {method: assign_edges(edges, 768, 4, method).report for method in ("streaming", "hdrf", "ebv")}
    assert reports["streaming"].replication_factor == 1
    assert min(reports[method].replication_factor for method in ("hdrf", "ebv")) > 1.02


def test_two_phases_of_fewer_clusters_than_parts():
    part = cut_edges(np.zeros((2, 5), np.int64), 1, [[0, 1, 2]], "streaming")
    assert np.bincount(part, minlength=3).max() == 2
