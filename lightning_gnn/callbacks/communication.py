"""Communication as logged metrics."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_gnn.comm.coded import CodedWire
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter, Traffic


class CommunicationMetrics(pl.Callback):
    """Logs what the ranks exchanged in each training epoch; every `lightning_gnn` strategy brings one.

    ``comm/bytes_sent``: payload bytes of graph traffic sent by all ranks, forward and backward, since the last training
    epoch ended (so that a validation epoch in between counts too). ``comm/halo_rows``: rows sent by all ranks.
    ``comm/seconds``: the longest time that a rank spent in it. With a codec ``codec/error``: the error of all that was encoded,
    sqrt(sum of squared errors / sum of squares).

    Args:
        meter: where the strategy counts.
        world: the ranks.

    Attributes:
        by_layer: this rank's traffic of the last epoch by (layer, direction).
        epoch: its sum.
    """

    def __init__(self, meter: Meter, world: World) -> None:
        self._meter, self._world = meter, world
        self.by_layer: dict[tuple[str, str], Traffic] = {}
        self.epoch = Traffic()

    def _codec_squares(self) -> tuple[float, ...]:
        """Returns the sums of squares of errors and numbers since the last call; nothing without a codec."""
        wire = self._world.wire
        return wire.codec.take_squares() if isinstance(wire, CodedWire) else ()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._codec_squares()
        self._meter.take()  # what the sanity check sent belongs to no epoch

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.by_layer = self._meter.take()
        self.epoch = sum(self.by_layer.values(), Traffic())
        own = [float(self.epoch.bytes_sent), float(self.epoch.rows), self.epoch.seconds, *self._codec_squares()]
        mine = torch.tensor(own, dtype=torch.float64, device=self._world.device)
        everyone = self._world.all_gather(mine, "Communication metrics").cpu()
        total, longest = everyone.sum(0), everyone.amax(0)
        values = {"comm/bytes_sent": total[0], "comm/halo_rows": total[1], "comm/seconds": longest[2]}
        if len(own) > 3:
            values["codec/error"] = (total[3] / total[4]).sqrt() if total[4] else torch.zeros_like(total[4])
        # Past `self.log`, which would reduce over ranks what is global already, at a millisecond an epoch.
        trainer.callback_metrics.update(values)
        for logger in trainer.loggers:
            logger.log_metrics({name: float(value) for name, value in values.items()}, step=trainer.global_step)
