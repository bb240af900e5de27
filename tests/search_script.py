"""A user's search with Optuna, started by test_optuna.py: STRATEGY DEVICES EVENT STORAGE FOLDER."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import optuna
from launched import GRAPH
from torch_geometric.nn.models import GCN

from lightning_gnn import GraphDataModule, NodeClassifier
from lightning_gnn.optuna import PruningCallback, create_study

STRATEGY, DEVICES, EVENT, STORAGE, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5])
RANK = int(os.environ.get("SLURM_PROCID", os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))))


def no_graph() -> Any:
    """Loaded by rank 0 while the others wait to start."""
    time.sleep(4)  # the others have begun to follow it
    raise ValueError("there is no graph")


class PruneThird(optuna.pruners.BasePruner):
    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.number == 2 and trial.last_step == 1


class Fails(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        raise ValueError("all ranks fail in training")


def new_storage() -> Any:
    if STORAGE == "journal":
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(FOLDER / "journal")))
    return None if STORAGE == "memory" else f"sqlite:///{FOLDER}/study.db"


def fit(trial: Any, columns: int, lr: float = 0.01, *callbacks: L.Callback) -> float:
    fails = EVENT == "first fails in the check" and trial.number == 0
    data = GraphDataModule(no_graph) if fails else GraphDataModule("lightning_gnn.planted_partition", GRAPH)
    model = NodeClassifier(GCN(GRAPH["num_features"], columns, num_layers=2, out_channels=GRAPH["num_classes"]), lr=lr)
    trainer = L.Trainer(
        strategy=STRATEGY,
        devices=DEVICES,
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, *([] if trial is None else [PruningCallback(trial, "val_acc")])],
    )
    trainer.fit(model, datamodule=data)
    return float(trainer.callback_metrics["val_acc"])


def main() -> None:
    seen = []

    def objective(trial: Any) -> float:
        seen.append(trial.number)
        columns = trial.suggest_int("columns", 4, 64)
        lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
        assert EVENT == "plain" or trial.user_attrs.get("order") == ("first" if trial.number == 0 else None)
        if EVENT == "first fails before training" and trial.number == 0:
            raise ValueError("all ranks fail before training")
        if f"raise on {RANK}" == EVENT and trial.number == 1:
            raise ValueError(f"the data of rank {RANK} is spoilt")
        value = fit(trial, columns, lr, *([Fails()] if trial.number in (3, 7) else []))
        drawn = trial.suggest_categorical("drawn after training", ["a", "b"])
        assert trial.params == {"columns": columns, "lr": lr, "drawn after training": drawn}
        return value

    if EVENT == "fit before":
        fit(None, 8)
    if EVENT == "plain":
        study = optuna.create_study()
    else:
        options = {"storage": new_storage(), "study_name": "search", "direction": "maximize", "pruner": PruneThird()}
        study = create_study(**options)
    study.enqueue_trial({"columns": 16}, user_attrs={"order": "first"})
    study.optimize(objective, n_trials=5, catch=(ValueError, RuntimeError))
    found = {
        "seen": seen,
        "trials": [repr(trial) for trial in study.trials],
        "states": [trial.state.name for trial in study.trials],
        "reports": [len(trial.intermediate_values) for trial in study.trials],
        "columns": [trial.params["columns"] for trial in study.trials],
        "best": [study.best_params, study.best_value, repr(study.best_trial)],
    }
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))
    if STRATEGY == "dgcl_spawn":
        return
    try:
        study.optimize(objective, n_trials=5)
    except ValueError:
        return
    raise AssertionError("the error of all ranks is raised")


if __name__ == "__main__":
    main()
