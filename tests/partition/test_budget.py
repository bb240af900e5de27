"""What partitioners take, as predicted, and which is chosen. No ranks."""

from __future__ import annotations

import numpy as np
import pytest
from common import examples
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.partition import budget, edge_cut, kaminpar
from lightning_gnn.partition.adjacency import Adjacency
from lightning_gnn.partition.budget import COSTS, Prediction, choose, count_entries, predict, predictions
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.sampling import variants

NODES = 2000
EDGES = np.random.default_rng(0).integers(0, NODES, (2, 20_000))


def free(monkeypatch: pytest.MonkeyPatch, amount: int | None) -> None:
    for module in (budget, edge_cut):
        monkeypatch.setattr(module, "available_bytes", lambda: amount)


@examples(100)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(0, 200))
def test_entries_are_those_of_the_symmetric_graph(seed, nodes, edges):
    edge_index = np.random.default_rng(seed).integers(0, nodes, (2, edges))
    assert count_entries(edge_index) == len(Adjacency.of(edge_index, nodes).indices)


def test_entries_of_many_edges_are_estimated(monkeypatch):
    edges = np.random.default_rng(0).integers(0, 3000, (2, 100_000))
    edges = np.concatenate([edges, edges[::-1, :50_000]], 1)
    monkeypatch.setattr(budget, "SAMPLED", 10_000)
    assert count_entries(edges) == pytest.approx(len(Adjacency.of(edges, 3000).indices), rel=0.03)


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
    found = {each.method: each for each in predictions(EDGES, NODES)}
    for method in ("metis", *(["kaminpar"] if kaminpar.is_installed() else []), "streaming"):
        amount = found[method].bytes
        if any(each.fits(amount) for each in list(found.values())[: list(COSTS).index(method)]):
            continue  # of so small a graph, another before it takes less
        free(monkeypatch, amount)
        taken = assign_nodes(EDGES, NODES, 2, "auto")
        assert taken.method == method
        if method not in kaminpar.METHODS:  # which does not always repeat its parts
            assert np.array_equal(taken.part, assign_nodes(EDGES, NODES, 2, method).part)
    free(monkeypatch, None)
    assert assign_nodes(EDGES, NODES, 2, "auto").method == "metis"
    free(monkeypatch, 1)
    with pytest.raises(MemoryError, match="No partitioner fits"):
        assign_nodes(EDGES, NODES, 2, "auto")


@pytest.mark.parametrize("installed", [False, True])
def test_memory_is_checked_before_metis_starts(monkeypatch, installed):
    monkeypatch.setattr(kaminpar, "is_installed", lambda: installed)
    monkeypatch.setitem(COSTS, "metis", budget.Cost(1e12, 0, 0, 0, 0))
    free(monkeypatch, 10**9)
    fits = (
        r'"kaminpar" \(0\.0 GB\), .*"streaming"' if installed else r'"streaming".*pip install lightning-gnn\[kaminpar\]'
    )
    with pytest.raises(MemoryError, match=rf'METIS needs about 1000\.0 GB.*Use partition="auto"; these fit: {fits}'):
        assign_nodes(EDGES, NODES, 2)
    free(monkeypatch, 1)
    with pytest.raises(MemoryError, match='None of the others fits. Use partition="random"'):
        assign_nodes(EDGES, NODES, 2)
    assert variants.check_metis is budget.check_metis  # of clusters, too


def test_large_graphs_take_less_and_less():
    """The order of the table, at any degree: what comes later takes less memory."""
    for degree in (2, 8, 20, 100):
        needed = [predict(method, 10**8, degree * 10**8, degree * 10**8).bytes for method in COSTS]
        assert needed == sorted(needed, reverse=True), (degree, needed)
