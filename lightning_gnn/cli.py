"""``lightning-gnn fit | validate | test | predict --config FILE``: LightningCLI with the strategies registered."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.cli import LightningCLI

import lightning_gnn  # noqa: F401  registers the strategies
from lightning_gnn.datamodules import GraphDataModule
from lightning_gnn.modules import NodeClassifier


def main() -> None:
    """Runs the command line; see ``lightning-gnn --help``."""
    LightningCLI(
        L.LightningModule,
        GraphDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()

__all__ = ["NodeClassifier", "main"]
