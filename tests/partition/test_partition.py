"""Partitioners, their report and the shards that follow from them. No ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from common import examples
from conftest import SHARED
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.partition import kaminpar, layout, metis
from lightning_gnn.partition.adjacency import Adjacency
from lightning_gnn.partition.edge_cut import assign_nodes, metis_candidates
from lightning_gnn.partition.layout import METHODS
from lightning_gnn.partition.metrics import edge_cut_report
from lightning_gnn.partition.shard import Relabelling, edge_cut_parts, halo_plan, local_relabelling, recent_reads


@st.composite
def graphs(draw: Any) -> tuple[np.ndarray, int, int, np.random.Generator]:
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    nodes, parts = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    return rng.integers(0, nodes, (2, draw(st.integers(0, 120)))), nodes, parts, rng


CUTS_OF_KAMINPAR = layout.KAMINPAR if kaminpar.is_installed() else ()


@examples(100)
@given(graphs(), st.sampled_from(["metis", "streaming", "auto", "random", *CUTS_OF_KAMINPAR]))
def test_every_part_gets_its_share_of_each_mask(graph, method):
    edge_index, nodes, parts, rng = graph
    split = rng.integers(0, 3, nodes)
    masks = {name: split == value for value, name in enumerate(("train", "val", "test"))}
    found = assign_nodes(edge_index, nodes, parts, method, masks=masks)
    assert found.part.shape == (nodes,) and found.part.dtype == np.int32
    assert found.part.min() >= 0 and found.part.max() < parts
    if method not in CUTS_OF_KAMINPAR:  # which does not always repeat its parts
        assert np.array_equal(found.part, assign_nodes(edge_index, nodes, parts, method, masks=masks).part)
    for mask in masks.values():
        if mask.sum() >= parts:
            assert (np.bincount(found.part[mask], minlength=parts) > 0).all()


@examples(60)
@given(graphs())
def test_report_against_a_loop(graph):
    edge_index, nodes, parts, rng = graph
    part = rng.integers(0, parts, nodes)
    report = edge_cut_report(edge_index, part, parts)
    halos: list[set[int]] = [set() for _ in range(parts)]
    edges, cut = [0] * parts, 0
    for source, target in edge_index.T:
        edges[part[target]] += 1
        if part[source] != part[target]:
            cut += 1
            halos[part[target]].add(int(source))
    assert report.edges.tolist() == edges and report.cut_edges == cut
    assert report.halo_rows.tolist() == [len(halo) for halo in halos]
    assert report.nodes.tolist() == np.bincount(part, minlength=parts).tolist()
    assert report.table().row_count == parts


def original_order(edge_index: np.ndarray, part: np.ndarray, parts: int) -> Relabelling:
    return Relabelling.from_assignment(part, parts)


@examples(100)
@given(graphs(), st.sampled_from([original_order, local_relabelling]))
def test_shards_hold_the_graph_and_agree_on_what_travels(graph, relabel):
    edge_index, nodes, parts, rng = graph
    part = rng.integers(0, parts, nodes)
    order = relabel(edge_index, part, parts)
    assert np.array_equal(order.n_id[order.new_ids()], np.arange(nodes))
    assert np.array_equal(part[order.n_id], np.sort(part))
    shards = list(edge_cut_parts(edge_index, order))
    assert sorted(np.concatenate([shard.edge_ids for shard in shards])) == list(range(edge_index.shape[1]))
    plans = [halo_plan(rank, order.offsets, [shard.halo for shard in shards]) for rank in range(parts)]
    for rank, (shard, plan) in enumerate(zip(shards, plans)):
        low, high = order.offsets[rank : rank + 2]
        rows = order.n_id[np.concatenate([np.arange(low, high), shard.halo])]  # original ids of local rows
        assert np.array_equal(rows[shard.edge_index], edge_index[:, shard.edge_ids])
        assert (shard.edge_index[1] < high - low).all()
        slots = list(zip(shard.edge_index[1].tolist(), shard.edge_ids.tolist()))
        assert slots == sorted(slots)  # a CSR's: by target, in the list's order for each
        remote = {int(s) for s, t in edge_index.T if part[t] == rank and part[s] != rank}
        assert set(order.n_id[shard.halo].tolist()) == remote and len(shard.halo) == len(remote)
        assert plan.num_owned == high - low and sum(plan.recv_counts) == len(shard.halo)
        arriving = [
            order.n_id[order.offsets[peer] + plans[peer].send_rows[rank]] for peer in range(parts)
        ]  # what the peers send, in their order
        assert [len(rows) for rows in arriving] == list(plan.recv_counts)
        assert np.array_equal(np.concatenate(arriving), order.n_id[shard.halo])
        for rows in plan.send_rows:
            assert len(set(rows.tolist())) == len(rows)  # distinct: the backward sum relies on it


@examples(60)
@given(graphs())
def test_the_order_of_rows_repeats_and_parts_do_not_matter_to_each_other(graph):
    edge_index, nodes, parts, rng = graph
    part = rng.integers(0, parts, nodes)
    order = local_relabelling(edge_index, part, parts)
    assert np.array_equal(order.n_id, local_relabelling(edge_index, part.astype(np.int32), parts).n_id)
    crossing = part[edge_index[0]] != part[edge_index[1]]
    assert np.array_equal(order.n_id, local_relabelling(edge_index[:, ~crossing], part, parts).n_id)


@examples(60)
@given(graphs(), st.integers(1, 10))
def test_recent_reads_against_a_loop(graph, window):
    edge_index, nodes, parts, rng = graph
    part = rng.integers(0, parts, nodes)
    order = Relabelling.from_assignment(part, parts)
    recent = total = 0
    reads: list[int] = []
    for row in order.n_id:
        for source in edge_index[0, edge_index[1] == row]:
            if part[source] == part[row]:
                recent += source in reads[-window:]
                reads.append(source)
                total += 1
    assert recent_reads(edge_index, order, window) == (recent / total if total else 1.0)


@pytest.mark.parametrize(
    ("nodes", "edges"),
    [(1, []), (5, []), (3, [(0, 0), (1, 1)]), (4, [(2, 3), (2, 3), (3, 2)]), (2, [(0, 1)])],
    ids=["one node", "no edges", "self-loops", "duplicates", "parts of one node"],
)
def test_orders_of_graphs_without_communities(nodes, edges):
    edge_index = np.array(edges, np.int64).reshape(-1, 2).T
    part = np.arange(nodes) % 3
    order = local_relabelling(edge_index, part, 5)  # the last two parts are empty
    assert sorted(order.n_id.tolist()) == list(range(nodes)) and np.array_equal(part[order.n_id], np.sort(part))
    assert order.offsets.tolist() == Relabelling.from_assignment(part, 5).offsets.tolist()
    assert 0 <= recent_reads(edge_index, order) <= 1


def test_communities_lie_together():
    """Cliques whose nodes are dealt out over the ids: each is a run of rows afterwards."""
    cliques, size = 50, 20
    member = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij")).reshape(2, -1)
    member = member[:, member[0] != member[1]]
    edge_index = np.concatenate([member * cliques + clique for clique in range(cliques)], 1)
    part = (np.arange(cliques * size) % cliques % 2).astype(np.int32)
    order = local_relabelling(edge_index, part, 2)
    runs = (order.n_id % cliques).reshape(cliques, size)
    assert (runs == runs[:, :1]).all()
    assert runs[:, 0].tolist() == [*range(0, cliques, 2), *range(1, cliques, 2)]  # by their first nodes
    before = recent_reads(edge_index, Relabelling.from_assignment(part, 2), window=2 * size)
    assert before < 0.1 and recent_reads(edge_index, order, window=2 * size) > 0.9


def edge_list(name: str) -> tuple[np.ndarray, int]:
    path = SHARED / "data" / "edges" / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"needs {path.name} in the data folder (set LIGHTNING_GNN_SHARED)")
    arrays = np.load(path)
    return np.stack([arrays["src"], arrays["dst"]]).astype(np.int64), int(arrays["num_nodes"])


def test_edges_are_balanced_on_a_skewed_graph():
    edge_index, nodes = edge_list("ego-twitter")
    found = assign_nodes(edge_index, nodes, 8)
    _, nodes_only = next(metis_candidates(edge_index, nodes, tuple(range(8)), 0))
    before = edge_cut_report(edge_index, nodes_only, 8)
    assert before.edge_balance > 1.2  # otherwise this test shows nothing
    assert found.report.edge_balance < 1.1
    assert found.report.predicted_seconds < before.predicted_seconds
    assert found.balance == "nodes and edges within 1.05"


def ring(nodes: int) -> np.ndarray:
    ids = np.arange(nodes)
    return np.stack([ids, (ids + 1) % nodes])


@pytest.mark.parametrize("method", ["metis", "streaming", *CUTS_OF_KAMINPAR])
def test_the_cut_of_a_ring(method):
    assert assign_nodes(ring(100), 100, 2, method).report.cut_edges == 2


@examples(60)
@given(graphs())
def test_adjacency_has_each_neighbour_once(graph):
    edge_index, nodes, _, rng = graph
    near: list[set[int]] = [set() for _ in range(nodes)]
    for source, target in edge_index.T.tolist():
        if source != target:
            near[source].add(target)
            near[target].add(source)
    found = Adjacency.of(edge_index, nodes)
    assert [row.tolist() for row in np.split(found.indices, found.indptr[1:-1])] == [sorted(each) for each in near]
    chosen = np.flatnonzero(rng.random(nodes) < 0.5)
    among = found.among(chosen)
    rows = np.split(among.indices, among.indptr[1:-1]) if len(chosen) else []
    assert [chosen[row].tolist() for row in rows] == [sorted(near[node] & {*chosen.tolist()}) for node in chosen]


@pytest.mark.skipif(not CUTS_OF_KAMINPAR, reason="needs kaminpar")
def test_kaminpar_balances_what_it_is_given():
    rng = np.random.default_rng(0)
    skewed = np.stack([rng.integers(0, 2000, 20_000), (2000 * rng.random(20_000) ** 3).astype(np.int64)])
    graph = Adjacency.of(np.concatenate([skewed, ring(2000)], 1), 2000)
    degree = np.diff(graph.indptr)
    for compress in (False, True):
        for weights in (np.ones(2000, np.int64), degree):
            part = kaminpar.part_graph(graph, 4, 0, weights, compress)
            load = np.bincount(part, weights, 4)
            assert load.max() <= 1.03 * load.mean() + weights.max()


@pytest.mark.skipif(not CUTS_OF_KAMINPAR, reason="needs kaminpar")
def test_kaminpar_says_where_its_file_finds_no_room(monkeypatch):
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(kaminpar, "_write", full)
    with pytest.raises(OSError, match=r"from a file of 0\.0 GB.*No space left.*Set TMPDIR"):
        assign_nodes(ring(100), 100, 2, "kaminpar")


def test_kaminpar_says_how_it_is_installed(monkeypatch):
    monkeypatch.setattr(kaminpar, "is_installed", lambda: False)
    with pytest.raises(ModuleNotFoundError, match=r"not installed: pip install lightning-gnn\[kaminpar\]"):
        assign_nodes(ring(100), 100, 2, "kaminpar")


def test_several_constraints_hold_at_once():
    rng = np.random.default_rng(0)
    graph = Adjacency.of(rng.integers(0, 500, (2, 4000)), 500)
    weights = np.stack([np.ones(500, np.int64), (np.arange(500) < 50) * 1], 1)  # a tenth of the nodes weighs
    part = metis.part_graph_constrained(graph, 4, 0, weights, np.array([1.05, 1.1], np.float32))
    for weight in weights.T:
        load = np.bincount(part, weight, minlength=4)
        assert load.max() / load.mean() < 1.25


def test_falls_back_with_a_warning_where_metis_cannot_be_called(monkeypatch):
    def missing() -> Any:
        raise metis.MetisUnavailable("no symbol")

    monkeypatch.setattr(metis, "_library", missing)
    hub = np.stack([np.arange(1, 300), np.zeros(299, np.int64)])
    with pytest.warns(UserWarning, match="one summed weight of nodes and edges instead of each: no symbol"):
        found = assign_nodes(np.concatenate([hub, ring(300)], 1), 300, 4)
    assert found.part.shape == (300,)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("louvain", f"partition must be {', '.join(map(repr, METHODS))} or the rank of every node"),
        (np.zeros(3, np.int64), r"one rank for each of the 10 nodes \(got shape \[3\]\)"),
        (np.zeros(10), "must hold integers"),
        (np.full(10, 2), "ranks from 0 to 1 .got 2 to 2"),
    ],
)
def test_errors_say_what_to_do(method, words):
    with pytest.raises(ValueError, match=words):
        assign_nodes(ring(10), 10, 2, method)


def test_metis_balances_masks_and_the_report_counts_them():
    """Half of the training nodes lie in a sixteenth of a ring of cliques."""
    rng = np.random.default_rng(0)
    cliques = np.arange(1600) // 20
    edges = rng.integers(0, 20, (2, 16_000)) + 20 * np.repeat(np.arange(80), 200)
    edge_index = np.concatenate([edges, edges[::-1], ring(1600)], 1)
    masks = {"train_mask": (cliques < 5) | (rng.random(1600) < 0.06), "val_mask": rng.random(1600) < 0.3}
    plain, balanced = (assign_nodes(edge_index, 1600, 4, method, masks=masks) for method in ("metis", "metis_masks"))
    for found in (plain, balanced):
        report = found.report
        for name, mask in masks.items():
            assert report.masks[name].tolist() == np.bincount(found.part[mask], minlength=4).tolist()
        assert type(report).from_dict(report.as_dict()).as_dict() == report.as_dict()
        headings = [column.header for column in report.table().columns]
        assert headings == ["part", "nodes", "train nodes", "val nodes", "in-edges", "halo rows"]

    def heaviest(counts: np.ndarray) -> float:
        return counts.max() / counts.mean()

    assert heaviest(plain.report.masks["train_mask"]) > 1.6
    assert all(heaviest(counts) < 1.4 for counts in balanced.report.masks.values())
    assert balanced.report.edge_balance < 1.4 and "masks" in balanced.balance
    assert np.array_equal(balanced.part, assign_nodes(edge_index, 1600, 4, "metis_masks", masks=masks).part)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_parts", [1, 2, 7, 64])
def test_metis_without_pythons_lock_gives_the_parts_of_pymetis(num_parts, weighted, monkeypatch):
    rng = np.random.default_rng(num_parts)
    graph = Adjacency.of(rng.integers(0, 300, (2, 1500)), 300)
    weights = rng.integers(1, 50, 300) if weighted else None
    found = metis.part_graph(graph, num_parts, 3, weights)

    def unavailable(*args):
        raise metis.MetisUnavailable("no symbol")

    monkeypatch.setattr(metis, "part_graph_constrained", unavailable)
    assert np.array_equal(found, metis.part_graph(graph, num_parts, 3, weights))
