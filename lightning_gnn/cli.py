"""``lightning-gnn fit | validate | test | predict --config FILE``: LightningCLI with the strategies registered."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from typing_extensions import override

import lightning_gnn  # noqa: F401  registers the strategies
from lightning_gnn.datamodules import GraphDataModule


class SaveConfig(SaveConfigCallback):
    """Keeps the run's configuration beside its logs; without a logger there is no folder of the run, and nothing is kept."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


def main() -> None:
    """Runs the command line; see ``lightning-gnn --help``."""
    LightningCLI(
        L.LightningModule,
        GraphDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=SaveConfig,
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
