"""What partitioners take, as predicted, and which is chosen. No ranks."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from pathlib import Path

import numba
import numpy as np
import pytest
from common import examples
from conftest import SHARED
from hypothesis import given
from hypothesis import strategies as st
from processes import REPOSITORY

from benchmarks.common import run_row
from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.extensions.graph_files import partitioner
from lightning_gnn.partition import adjacency, budget, edge_cut, kaminpar
from lightning_gnn.partition.adjacency import Adjacency
from lightning_gnn.partition.budget import COSTS, Levels, Prediction, choose, predict, predictions
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.layout import KAMINPAR
from lightning_gnn.registry import partitioners
from lightning_gnn.strategies.sampling import variants
from lightning_gnn.strategies.vertex_cut import cutters, loops

NODES = 2000
EDGES = np.random.default_rng(0).integers(0, NODES, (2, 20_000))


def free(monkeypatch: pytest.MonkeyPatch, amount: int | None) -> None:
    for module in (budget, edge_cut):
        monkeypatch.setattr(module, "available_bytes", lambda: amount)


@examples(100)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(0, 200))
def test_entries_are_those_of_the_symmetric_graph(seed, nodes, edges):
    edge_index = np.random.default_rng(seed).integers(0, nodes, (2, edges))
    assert Levels.of(edge_index, nodes).entries[0] == len(Adjacency.of(edge_index, nodes).indices)


def test_entries_of_many_edges_are_estimated(monkeypatch):
    edges = np.random.default_rng(0).integers(0, 3000, (2, 100_000))
    edges = np.concatenate([edges, edges[::-1, :50_000]], 1)
    looked_at = Levels.of(edges, 3000)
    monkeypatch.setattr(budget, "SAMPLED", 10_000)
    monkeypatch.setattr(adjacency, "COPIED", 1000)
    estimated = Levels.of(edges, 3000)
    assert estimated.nodes == pytest.approx(looked_at.nodes) and looked_at.nodes[0] == 3000
    assert estimated.entries == pytest.approx(looked_at.entries, rel=0.1)


@examples(60)
@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(0, 200))
def test_levels_halve_what_has_neighbours(seed, nodes, edges):
    """Each level merges two nodes of the one before at most, and leaves none single that has one beside it as single."""
    edge_index = np.random.default_rng(seed).integers(0, nodes, (2, edges))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "FEWEST", 1)
        levels = Levels.of(edge_index, nodes)
    pairs = {frozenset(edge) for edge in edge_index.T.tolist() if edge[0] != edge[1]}
    assert (len(levels.nodes) > 1) == (bool(pairs) and nodes > 1)
    for before, after in pairwise(levels.nodes[:5]):
        assert before / 2 <= after < before
    assert list(levels.entries) == sorted(levels.entries, reverse=True)
    most = Levels.upper_bound(nodes, edges)
    assert most.entries[0] >= levels.entries[0] and most.coarse() >= 0


def test_graphs_of_one_size_shrink_as_they_are_made():
    """Cliques go into one node each; a random graph's entries stay."""
    clique = np.stack(np.nonzero(~np.eye(16, dtype=bool)))
    cliques = np.concatenate([clique + 16 * each for each in range(200)], 1)
    drawn = np.random.default_rng(0).integers(0, 3200, cliques.shape)
    apart, random = (Levels.of(edges, 3200).coarse() for edges in (cliques, drawn))
    assert apart < 0.5 * cliques.shape[1] and random > 4 * apart


def real_graph(name: str) -> tuple[np.ndarray, int]:
    path = SHARED / "data" / "edges" / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"needs {path.name} in the data folder (set LIGHTNING_GNN_SHARED)")
    arrays = np.load(path)
    return np.stack([arrays["src"], arrays["dst"]]).astype(np.int64), int(arrays["num_nodes"])


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("cnr-2000", {"metis": 353, "kaminpar": 113, "kaminpar_compressed": 78, "streaming": 40.9}),
        ("ego-twitter", {"metis": 201, "kaminpar": 84, "kaminpar_compressed": 65, "streaming": 25.1}),
        ("soc-slashdot0902", {"metis": 141, "streaming": 22.1}),
    ],
)
def test_predictions_on_real_graphs(name, megabytes):
    """Peaks that ``benchmarks/partitioners.py --all`` measured."""
    found = {each.method: each.bytes / 1e6 for each in predictions(*real_graph(name), 8)}
    for method, measured in megabytes.items():
        assert found[method] == pytest.approx(measured, rel=0.15), method


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
@pytest.mark.parametrize("method", ["kaminpar", "kaminpar_compressed", "streaming"])
def test_predicted_memory_is_what_is_taken(method, tmp_path):
    """In a process of its own: others have freed memory that would be used."""
    if method in KAMINPAR and not kaminpar.is_installed():
        pytest.skip("needs kaminpar")
    graph = planted_partition(40_000, 40, num_features=1, num_classes=16)
    np.save(tmp_path / "edges.npy", graph.edge_index.numpy())
    asked = ["--row", str(tmp_path / "edges.npy"), method, "--all"]
    row = run_row(str(REPOSITORY / "benchmarks" / "partitioners.py"), asked, threads=1)
    assert 0.85 < row["predicted"] < 1.15


def test_memory_of_a_vertex_cut():
    edge_index, nodes = np.random.default_rng(0).integers(0, 20_000, (2, 400_000)), 20_000
    cutters.assign_edges(edge_index[:, :1000], nodes, 8, "ne")
    for each in cutters.edge_predictions(edge_index, nodes, 8):
        cutters.assign_edges(edge_index[:, :1000], nodes, 8, each.method)  # loads what is compiled
        tracemalloc.start()
        cutters.assign_edges(edge_index, nodes, 8, each.method)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert each.bytes == pytest.approx(peak, rel=0.3), each.method


def test_the_first_that_fits_is_chosen():
    found = [
        Prediction("metis", 100, 1),
        Prediction("kaminpar", 30, 1, installed=False),
        Prediction("streaming", 10, 1),
    ]
    assert choose(found, None).method == choose(found, 100).method == "metis"
    assert choose(found, 99).method == choose(found, 10).method == "streaming"
    with pytest.raises(MemoryError, match=r"'streaming' needs the least, about 0\.0 GB.*partition=\"random\""):
        choose(found, 9)


def test_auto_is_what_it_takes(monkeypatch):
    found = {each.method: each for each in predictions(EDGES, NODES, 2)}
    for method in ("metis", *(["kaminpar"] if kaminpar.is_installed() else []), "streaming"):
        amount = found[method].bytes
        if any(each.fits(amount) for each in list(found.values())[: list(found).index(method)]):
            continue  # of so small a graph, another before it takes less
        free(monkeypatch, amount)
        taken = assign_nodes(EDGES, NODES, 2, "auto")
        assert taken.method == method
        if method not in KAMINPAR:  # which does not always repeat its parts
            assert np.array_equal(taken.part, assign_nodes(EDGES, NODES, 2, method).part)
    free(monkeypatch, None)
    assert assign_nodes(EDGES, NODES, 2, "auto").method == "metis"
    free(monkeypatch, 1)
    with pytest.raises(MemoryError, match="No partitioner fits"):
        assign_nodes(EDGES, NODES, 2, "auto")


@pytest.mark.parametrize("installed", [False, True])
def test_memory_is_checked_before_metis_starts(monkeypatch, installed):
    monkeypatch.setattr(kaminpar, "is_installed", lambda: installed)
    monkeypatch.setitem(COSTS, "metis", budget.Cost(node=1e12 / NODES))
    free(monkeypatch, 10**9)
    fits = (
        r'"kaminpar" \(0\.0 GB\), .*"streaming"' if installed else r'"streaming".*pip install lightning-gnn\[kaminpar\]'
    )
    with pytest.raises(MemoryError, match=rf'METIS needs about 1000\.0 GB.*Use partition="auto"; these fit: {fits}'):
        assign_nodes(EDGES, NODES, 2)
    free(monkeypatch, 1)
    with pytest.raises(MemoryError, match='Only partition="random" fits'):
        assign_nodes(EDGES, NODES, 2)
    assert variants.check_metis is budget.check_metis  # of clusters, too


def test_large_graphs_take_less_and_less():
    """The order of the table, at any degree: what comes later takes less memory."""
    for degree in (2, 8, 20, 100):
        levels = Levels.upper_bound(10**8, degree * 10**8)
        needed = [predict(method, degree * 10**8, levels).bytes for method in COSTS]
        needed += [each.upper_bound(10**8, degree * 10**8, 8).bytes for each in partitioners().values()]
        assert needed == sorted(needed, reverse=True), (degree, needed)


@pytest.mark.parametrize("loop", [budget._match_over_two, partitioner._gather_single, loops.cluster])
def test_loops_over_edges_do_not_count_references(loop):
    """numba leaves its counting in where a helper hands arrays on: ten times as slow, and nothing else tells."""
    fresh = numba.njit(nogil=True)(loop.py_func)
    ids, of = np.empty(0, np.int64), np.empty(0, np.int32)
    rest = {
        budget._match_over_two: (of, of),
        loops.cluster: (1, of, ids),
        partitioner._gather_single: (of, ids, ids, 1, 1, of, np.empty(0, np.bool_)),
    }
    fresh(ids, ids, of, *rest[loop])
    [code] = fresh.inspect_llvm().values()
    loop_itself = code.split("\ndefine ")[1]  # then follow its wrappers and what it calls
    assert "@NRT_incref" not in loop_itself
