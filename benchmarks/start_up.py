"""Start-up of a script: seconds from ``python script.py`` to the end of the first epoch, GCN on Cora.

python benchmarks/start_up.py [--runs 9] [--json FILE]

Runs are interleaved: plain PyG with Lightning in one process, ``"dgcl"`` on one rank, on two ranks, and on two ranks that import
by themselves. A first run, which is not counted, leaves partition and kernels on disk. A column has the time when a phase ends.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from common import ROOT, SHARED, report

SCRIPT = """
import os
import sys
import time
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch_geometric.datasets import Planetoid
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv
IMPORT

rank = int(os.environ.get("LOCAL_RANK", "0"))

def note(phase):
    os.write(1, f"PHASE {rank} {time.time()} {phase}\\n".encode())

note("imports")

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(1433, 16), GCNConv(16, 7)

    def training_step(self, batch, index):
        h = F.relu(self.first(batch.x, batch.edge_index))
        h = self.second(h, batch.edge_index)
        return F.cross_entropy(h[batch.train_mask], batch.y[batch.train_mask])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

class Notes(pl.Callback):
    def on_fit_start(self, trainer, module):
        note("set-up")

    def on_train_epoch_end(self, trainer, module):
        note("epoch")

data = Planetoid(sys.argv[1], "Cora")[0]
options = dict(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(accelerator="cpu", callbacks=Notes(), STRATEGY, **options)
note("script")
trainer.fit(Model(), DATA)
"""
PLAIN = "plain PyG and Lightning, 1 process"
OURS = "dgcl, 1 rank", "dgcl, 2 ranks", "dgcl, 2 ranks, LIGHTNING_GNN_PRELOAD=0"


def start(name: str, folder: Path) -> dict[str, float]:
    """Returns the seconds at which the phases of one run ended, over all ranks."""
    ranks = 2 if "2 ranks" in name else 1
    plain = name == PLAIN
    text = SCRIPT.replace("IMPORT", "" if plain else "from lightning_gnn import GraphDataModule")
    text = text.replace("STRATEGY", "devices=1" if plain else f'strategy="dgcl", devices={ranks}')
    script = folder / f"script{hash(text)}.py"
    script.write_text(text.replace("DATA", "DataLoader([data], batch_size=1)" if plain else "GraphDataModule(data)"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    environment["LIGHTNING_GNN_PRELOAD"] = "0" if name.endswith("=0") else "1"
    began = time.time()
    command = [sys.executable, str(script), str(SHARED / "data" / "planetoid")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, float] = {}
    for line in done.stdout.splitlines():
        if line.startswith("PHASE"):
            _, _, at, phase = line.split()
            found[phase] = max(found.get(phase, 0.0), float(at) - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json")
    options = parser.parse_args()
    names = [PLAIN, *OURS]
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(ROOT / "lightning_gnn")], check=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            start(name, Path(folder))
        runs = [{name: start(name, Path(folder)) for name in names} for _ in range(options.runs)]
    rows = []
    for name in names:
        found = {phase: median(run[name][phase] for run in runs) for phase in ("imports", "script", "set-up", "epoch")}
        ratio = median(run[name]["epoch"] / run[PLAIN]["epoch"] for run in runs)
        rows.append({"run": name, **{f"{phase} (s)": at for phase, at in found.items()}, "ratio": ratio})
    columns = ["run", "imports (s)", "script (s)", "set-up (s)", "epoch (s)", "ratio"]
    report(f"Start-up, median of {options.runs} runs", rows, columns, options.json)


if __name__ == "__main__":
    main()
