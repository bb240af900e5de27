"""Communication as logged metrics."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_gnn.comm.traffic import Meter, Traffic


class CommunicationMetrics(pl.Callback):
    """Logs what the ranks exchanged in each training epoch; every `lightning_gnn` strategy brings one.

    ``comm/bytes_sent``: payload bytes of graph traffic sent by all ranks, forward and backward, since the last training
    epoch ended (so a validation epoch in between counts too). ``comm/seconds``: the longest time that a rank spent in it.
    ``comm/halo_rows``: rows sent by all ranks. ``comm/messages``: messages sent by all ranks.

    Args:
        meter: where the strategy counts.

    Attributes:
        by_layer: this rank's traffic of the last epoch by (layer, direction).
        epoch: its sum.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.by_layer: dict[tuple[str, str], Traffic] = {}
        self.epoch = Traffic()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._meter.take()  # what the sanity check sent belongs to no epoch

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.by_layer = self._meter.take()
        self.epoch = sum(self.by_layer.values(), Traffic())
        values: dict[str, tuple[float, str]] = {
            "comm/bytes_sent": (self.epoch.bytes_sent, "sum"),
            "comm/halo_rows": (self.epoch.rows, "sum"),
            "comm/messages": (self.epoch.messages, "sum"),
            "comm/seconds": (self.epoch.seconds, "max"),
        }
        for name, (value, how) in values.items():
            options: dict[str, Any] = {"on_epoch": True, "on_step": False, "reduce_fx": how, "batch_size": 1}
            pl_module.log(name, float(value), **options)
