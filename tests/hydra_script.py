"""A user's application of Hydra, started by test_hydra.py: overrides of hydra_conf/config.yaml, and FOLDER in the environment."""

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
from hydra.core.hydra_config import HydraConfig
from launched import GRAPH
from torch_geometric.nn.models import GCN

from lightning_gnn import GraphDataModule, NodeClassifier
from lightning_gnn.hydra import main


@main(version_base=None, config_path="hydra_conf", config_name="config")
def train(config: Any) -> None:
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    if config.epochs:  # 0: the ranks are not started yet
        model = NodeClassifier(GCN(GRAPH["num_features"], config.columns, num_layers=2, out_channels=GRAPH["num_classes"]))
        trainer = L.Trainer(
            strategy="dgcl",
            devices=2,
            accelerator="cpu",
            max_epochs=config.epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(model, datamodule=GraphDataModule("lightning_gnn.planted_partition", GRAPH))
        rank = trainer.global_rank
    found = [config.columns, config.name, HydraConfig.get().runtime.output_dir, os.getcwd()]
    with (Path(os.environ["FOLDER"]) / f"{rank}.jsonl").open("a") as lines:
        lines.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    train()
