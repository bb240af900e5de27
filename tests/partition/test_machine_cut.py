"""Cuts between machines first, then between the ranks of each: fewer edges cross, and parts have their share of everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnn import GraphDataModule
from lightning_gnn.data.store import read_manifest
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.metrics import balance
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.strategies.sampling.strategy import SamplingScheme

NODES, MACHINES = 2400, ((0, 1), (2, 3))
IDS = np.arange(NODES)


def cliques() -> np.ndarray:
    rng = np.random.default_rng(1)
    source = np.repeat(IDS, 10)
    inside = np.stack([source, source // 20 * 20 + rng.integers(0, 20, 10 * NODES)])
    return np.concatenate([inside, rng.integers(0, NODES, (2, 3000))], 1)


EDGES = cliques()
CROWDED = np.random.default_rng(2).random(NODES) < np.where(IDS < NODES // 16, 0.9, 0.05)
"""Most are in a sixteenth of the cliques."""


@pytest.mark.parametrize("what", ["masks", "node_kinds", "edge_masks"])
def test_what_is_balanced_is_so_on_both_levels_and_less_crosses_machines(what):
    given: dict[str, Any] = {
        "masks": {"train_mask": CROWDED, "val_mask": ~CROWDED & (IDS % 3 == 0)},
        "node_kinds": CROWDED.astype(np.int16),
        "edge_masks": {"edge_train_mask": CROWDED[EDGES[1]]},
    }
    edges = [np.bincount(EDGES[1, mask], minlength=NODES) for mask in given["edge_masks"].values()]
    weights = {"masks": list(given["masks"].values()), "node_kinds": [CROWDED, ~CROWDED], "edge_masks": edges}[what]
    shares = {what: given[what]}
    flat, found, without = (
        assign_nodes(EDGES, NODES, 4, method, groups=groups, **shares)
        for method, groups in (("metis_masks", None), ("metis_masks", MACHINES), ("metis", MACHINES))
    )
    for part, parts in ((found.part, 4), (found.part // 2, 2)):
        for weight in (np.ones(NODES), np.bincount(EDGES[1], minlength=NODES), *weights):
            assert balance(np.bincount(part, weight, parts)) < 1.06
    # Otherwise this test shows nothing.
    assert max(balance(np.bincount(without.part, weight, 4)) for weight in weights) > 1.2

    def crossing(part: np.ndarray) -> int:
        return np.count_nonzero((part // 2)[EDGES[0]] != (part // 2)[EDGES[1]])

    assert crossing(found.part) < 0.97 * crossing(flat.part)


def of_one_type() -> Data:
    x = torch.zeros(NODES, 1)
    data = Data(x=x, y=torch.zeros(NODES, dtype=torch.long), edge_index=torch.from_numpy(EDGES))
    return data


def with_masks() -> Data:
    data, train = of_one_type(), torch.from_numpy(CROWDED)
    data.train_mask, data.val_mask, data.test_mask = train, ~train, torch.zeros_like(train)
    return data


def with_links() -> Data:
    data, train = of_one_type(), torch.from_numpy(CROWDED[EDGES[1]])
    del data.y
    data.edge_train_mask, data.edge_val_mask = train, ~train
    return data


def with_types() -> HeteroData:
    data, kinds, place = HeteroData(), {"a": CROWDED, "b": ~CROWDED}, np.zeros(NODES, np.int64)
    for name, mask in kinds.items():
        place[mask] = np.arange(mask.sum())
        data[name].x = torch.zeros(int(mask.sum()), 1)
    data["a"].y = torch.zeros(int(CROWDED.sum()), dtype=torch.long)
    data["a"].train_mask = torch.from_numpy(IDS[CROWDED] >= NODES // 16)  # balanced by itself, types are not
    for source, target in ((s, t) for s in kinds for t in kinds):
        chosen = kinds[source][EDGES[0]] & kinds[target][EDGES[1]]
        data[source, "to", target].edge_index = torch.from_numpy(place[EDGES[:, chosen]])
    return data


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (with_masks, ["train_mask", "val_mask"]),
        (with_links, ["edge_train_mask", "edge_val_mask"]),
        (with_types, ["a nodes", "b nodes", "train_mask"]),
    ],
)
def test_sampling_balances_what_the_graph_has(make, names, tmp_path):
    layout = SamplingScheme().layout(4, 2)
    assert layout.groups == MACHINES
    folder = GraphDataModule(make(), partition_dir=tmp_path).partition_for(layout)
    report = read_manifest(folder)["report"]
    counts = {**report["masks"], **report["types"]}
    for name in names:
        each = np.array(counts[name])
        assert balance(each) < 1.06 and balance(each.reshape(2, 2).sum(1)) < 1.06, name


def test_groups_of_ranks_are_machines_where_there_are_several():
    for scheme in (SamplingScheme(), DGCLScheme()):
        assert scheme.layout(4).groups is None
        found: LayoutSpec = scheme.layout(6, 3)
        assert [np.ravel(each).tolist() for each in found.groups or ()] == [[0, 1], [2, 3], [4, 5]]
