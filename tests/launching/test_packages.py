"""Scripts that use `pytorch_lightning` in place of `lightning`: the results of one device, in both orders of imports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = """
import json, sys
IMPORTS
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from torch_geometric.nn import GCNConv


class Net(pl.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        self.convs = torch.nn.ModuleList([GCNConv(8, width), GCNConv(width, 4)])
        self.weight = torch.tensor([1.0, 2.0, 1.0, 0.5])

    def forward(self, batch):
        return self.convs[1](self.convs[0](batch.x, batch.edge_index).relu(), batch.edge_index)

    def training_step(self, batch, batch_idx):
        out, mask = self(batch), batch.train_mask
        loss = torch.nn.functional.cross_entropy(out[mask], batch.y[mask], self.weight.to(out))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch).argmax(1) == batch.y)[batch.val_mask].double().mean())

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def main(strategy):
    pl.seed_everything(0)
    graph = lightning_gnn.planted_partition(300, num_classes=4, num_features=8)
    graph.x = graph.x.double()
    data, ranks = lightning_gnn.GraphDataModule(graph), 1 if strategy == "auto" else 2
    made = lightning_gnn.DGCLStrategy() if strategy == "object" else strategy
    checkpoints = ModelCheckpoint(monitor="val_acc", mode="max", save_last=True)
    options = dict(strategy=made, devices=ranks, accelerator="cpu", enable_progress_bar=False, log_every_n_steps=1)
    callbacks = [checkpoints, EarlyStopping("val_acc", mode="max", patience=50)]
    plugins = [AsyncCheckpointIO()]
    trainer = pl.Trainer(max_epochs=4, callbacks=callbacks, logger=CSVLogger(strategy), plugins=plugins, **options)
    trainer.fit(Net(8).double(), datamodule=data)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name in ("train_loss", "val_acc")}
    if strategy != "object":  # a second Trainer goes on from the checkpoint
        trainer = pl.Trainer(max_epochs=6, logger=False, enable_checkpointing=False, **options)
        trainer.fit(Net(8).double(), datamodule=data, ckpt_path=checkpoints.last_model_path)
        logged["epochs"] = trainer.current_epoch
        logged["resumed_loss"] = float(trainer.callback_metrics["train_loss"])
    predictions = trainer.predict(trainer.lightning_module, datamodule=data)[0]
    logged["sum"] = float(predictions.abs().sum())
    if trainer.is_global_zero:
        print("RESULT " + json.dumps(logged))


if __name__ == "__main__":
    main(sys.argv[1])
"""
ORDERS = ("import pytorch_lightning as pl\nimport lightning_gnn", "import lightning_gnn\nimport pytorch_lightning as pl")


def result(folder: Path, strategy: str, imports: str) -> dict[str, float]:
    pytest.importorskip("pytorch_lightning")
    (folder / "script.py").write_text(SCRIPT.replace("IMPORTS", imports))
    output = run(folder / "script.py", strategy, cwd=folder).succeeded().output
    [line] = [line for line in output.splitlines() if line.startswith("RESULT ")]
    found: dict[str, float] = json.loads(line.removeprefix("RESULT "))
    return found


def test_scripts_of_pytorch_lightning(tmp_path):
    expected = result(tmp_path, "auto", ORDERS[0])
    assert expected["epochs"] == 6
    assert result(tmp_path, "dgcl", ORDERS[0]) == pytest.approx(expected, rel=1e-9)
    found = result(tmp_path, "object", ORDERS[1])
    assert found == pytest.approx({name: expected[name] for name in ("train_loss", "val_acc")} | {"sum": found["sum"]}, rel=1e-9)


@pytest.mark.campaign
@pytest.mark.parametrize("strategy", ["dgcl_spawn", "cover", "vertex_cut", "spmm_15d"])
def test_strategies_under_pytorch_lightning(tmp_path, strategy):
    expected = result(tmp_path, "auto", ORDERS[1])
    assert result(tmp_path, strategy, ORDERS[1]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("imports", ["import lightning, lightning_gnn", "import lightning_gnn, lightning"])
def test_messages_belong_to_the_logger_of_lightning(tmp_path, imports):
    """Each package of Lightning sets one logger at import, which users silence by its name."""
    (tmp_path / "script.py").write_text(f"{imports}; from lightning_utilities.core import rank_zero; print(rank_zero.log.name)")
    output = run(tmp_path / "script.py", cwd=tmp_path, warm=False).succeeded().output
    assert output.split()[-1] == "lightning.pytorch.utilities.rank_zero"
