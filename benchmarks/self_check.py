"""What the self-check costs: 3-layer models on Cora, beside one plain PyG training step on the whole graph.

python benchmarks/self_check.py [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch_geometric.nn.models as pyg
from common import SHARED, report, run_row
from torch_geometric.datasets import Planetoid

from lightning_gnn import NodeClassifier
from lightning_gnn.checks.self_check import self_check
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import split_graph, whole_graph
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.strategy.scheme import bind_module

DEGREES = torch.tensor([0, 485, 583, 553, 389, 281, 131, 82, 57, 25, 26])
MODELS: dict[str, dict[str, Any]] = {
    "GCN": {},
    "GraphSAGE": {},
    "GIN": {"norm": "batch_norm"},
    "GAT": {"heads": 4},
    "EdgeCNN": {},
    "PNA": {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"], "deg": DEGREES},
}


def one(name: str) -> dict[str, Any]:
    """Returns one model's row, in this fresh process."""
    torch.set_num_threads(1)
    data = prepare_graph(Planetoid(str(SHARED / "data" / "planetoid"), "Cora")[0])
    model = getattr(pyg, name)(data.x.size(1), 64, num_layers=3, out_channels=7, **MODELS[name])
    module = NodeClassifier(model)
    batch = split_graph(data, np.arange(data.num_nodes) % 2, LayoutSpec("edge_cut", 2))[0].batch
    checks = [self_check(module, batch, partial(bind_module, DGCLScheme(), meter=Meter())) for _ in range(4)]
    assert all((check.problem, check.not_run) == (None, None) for check in checks)
    whole = whole_graph(data).batch
    times = []
    for _ in range(4):
        began = time.perf_counter()
        module.training_step(whole, 0).backward()
        times.append(time.perf_counter() - began)
    first, again = checks[0].seconds, min(check.seconds for check in checks[1:])
    return {"model": name, "first (s)": first, "later (s)": again, "plain step (s)": min(times[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.one:
        import json
        import warnings

        warnings.filterwarnings("ignore")
        print(json.dumps(one(options.one)))
        return
    rows = [run_row(__file__, ["--one", name], threads=1) for name in MODELS]
    for row in rows:
        row["later / plain step"] = row["later (s)"] / row["plain step (s)"]
    columns = ["model", "first (s)", "later (s)", "plain step (s)", "later / plain step"]
    report("Self-check of 3 layers, Cora's features", rows, columns, options.json)


if __name__ == "__main__":
    main()
