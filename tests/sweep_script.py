"""A script that asks W&B itself for the sweep's choice, started by test_loggers.py: STRATEGY FOLDER."""

import sys
from pathlib import Path

import lightning as L
import wandb
from launched import GRAPH, new_trainer
from lightning.pytorch.loggers import WandbLogger
from torch_geometric.nn.models import GCN

from lightning_gnn import GraphDataModule, NodeClassifier


def main() -> None:
    strategy, folder = sys.argv[1], Path(sys.argv[2])
    wandb.init(project="test", dir=folder)
    columns = wandb.config.columns
    L.seed_everything(0)
    data = GraphDataModule("lightning_gnn.planted_partition", GRAPH)
    model = NodeClassifier(GCN(GRAPH["num_features"], columns, num_layers=2, out_channels=GRAPH["num_classes"]))
    trainer = new_trainer(strategy, 2, max_epochs=1, logger=WandbLogger())
    trainer.fit(model, datamodule=data)
    print(f"rank {trainer.global_rank} trained {columns} columns")


if __name__ == "__main__":
    main()
