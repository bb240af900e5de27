"""A search for hyperparameters with Optuna: all ranks train the trials of rank 0, and end unpromising trials early.

pip install optuna
python examples/search.py
"""

from __future__ import annotations

import lightning as L
import optuna
from lightning.pytorch.utilities import rank_zero_only
from torch_geometric.nn.models import GCN

from lightning_gnn import GraphDataModule, NodeClassifier, planted_partition
from lightning_gnn.optuna import PruningCallback, create_study


def objective(trial: optuna.Trial) -> float:
    columns, lr = trial.suggest_int("columns", 2, 32, log=True), trial.suggest_float("lr", 1e-4, 0.1, log=True)
    trainer = L.Trainer(
        strategy="dgcl",
        accelerator="cpu",
        devices=2,
        max_epochs=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[PruningCallback(trial, monitor="val_acc")],
    )
    trainer.fit(NodeClassifier(GCN(32, columns, num_layers=2, out_channels=8), lr=lr), datamodule=GraphDataModule(graph))
    return float(trainer.callback_metrics["val_acc"])


if __name__ == "__main__":
    graph = planted_partition(2000)
    study = create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=8)
    if rank_zero_only.rank == 0:
        print(f"Best trial {study.best_trial.number}: {study.best_params}")
        print(f"Validation accuracy {study.best_value:.3f}")
