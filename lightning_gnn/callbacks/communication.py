"""Communication, throughput and wait time as logged metrics, and traffic between ranks as pictures."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_gnn.callbacks.loggers import log_files, log_picture, log_values, uploads
from lightning_gnn.comm.group import World
from lightning_gnn.comm.replicas import Replicas
from lightning_gnn.comm.traffic import ByLayer, Meter, Traffic
from lightning_gnn.rows.ranks import Ranks

ENOUGH_S, ENOUGH_EPOCHS = 1.0, 2
"""Minimal seconds and epochs of a run, after its first epoch, for a statement about wait times."""

TOO_MUCH = 0.3
"""Share of the time that a rank may wait before a warning."""

LIGHT = 1.1
"""Size of a part relative to the average up to which the part is not the cause of a slow rank."""


@dataclass(frozen=True)
class PartSize:
    """Work of a rank: its nodes, their in-edges, and its halo nodes."""

    nodes: int
    edges: int
    halo_rows: int


class CommunicationMetrics(pl.Callback):
    """Callback that logs communication and throughput of each training epoch; added by strategies that exchange features.

    ``comm/bytes_sent``: payload bytes of graph traffic sent by all ranks, forward and backward, since the end of the last
    training epoch (including a validation epoch in between). ``comm/halo_rows``: rows sent by all ranks. ``comm/seconds``:
    maximum over ranks of the time spent in it. ``comm/step_messages``, ``comm/step_bytes_sent``: number of messages of operations
    in steps, such as a mean loss, and the bytes that all ranks sent for them. ``comm/wait_fraction``: maximum over ranks of the
    share of training time spent waiting for other ranks; not on CUDA, where the devices wait. ``codec/error``, with a codec:
    relative error of all encoded values, sqrt(sum of squared errors / sum of squares).

    ``throughput/nodes_per_s``, ``throughput/edges_per_s``: nodes and edges of all batches on all ranks, divided by the time of
    the slowest rank, without validation.

    Warns once, early in a run, if a rank waits too long, and names the rank that it waits for. Loggers store the traffic between
    ranks in the last epoch as ``communication.json``.

    Args:
        meter: traffic counter of the strategy.
        world: all ranks.
        graph_world: ranks that exchange rows of the graph with this rank.
        parts: sizes of each rank's part.
        replicas: comparison of the ranks' models at the end of each epoch.
        step_counter: counter of messages of steps; None for mini-batch steps.

    Attributes:
        by_layer: this rank's traffic of the last epoch by (layer, direction).
        epoch: sum of `by_layer`.
    """

    def __init__(
        self,
        meter: Meter,
        world: World,
        graph_world: World,
        parts: Sequence[PartSize],
        replicas: Replicas,
        step_counter: Ranks | None = None,
    ) -> None:
        self._meter, self._world, self._graph_world, self._parts, self._replicas = meter, world, graph_world, parts, replicas
        self._step_counter, self._steps_before = step_counter, (0, 0)
        self.by_layer: ByLayer = {}
        self.epoch = Traffic()
        self._epochs, self._warned = 0, False
        self._all_waited, self._all_seconds = torch.zeros(world.size, dtype=torch.float64), 0.0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._nodes = self._edges = 0
        self._seconds = self._waited = 0.0
        self._pause()

    def _pause(self) -> None:
        """Exclude the time since the last batch from the training time."""
        self._since, self._waited_since = time.perf_counter(), self._world.waited_s or 0.0

    def _take_steps(self) -> tuple[int, int]:
        """Returns the number of messages and bytes of steps since the last call."""
        if self._step_counter is None:
            return 0, 0
        (messages, sent), before = (self._step_counter.messages.total(), self._step_counter.bytes_sent), self._steps_before
        self._steps_before = messages, sent
        return messages - before[0], sent - before[1]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._graph_world.transport.take_sums()
        self._take_steps()
        self._meter.take()  # exclude the traffic of the sanity check

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin_epoch()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seconds += time.perf_counter() - self._since
        self._waited += (self._world.waited_s or 0.0) - self._waited_since
        owned = getattr(batch, "num_owned", None)
        self._nodes += getattr(batch, "num_nodes", 0) if owned is None else owned
        self._edges += getattr(batch, "num_edges", 0)
        self._pause()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.by_layer = self._meter.take()
        self.epoch = sum(self.by_layer.values(), Traffic())
        own = [float(self.epoch.bytes_sent), float(self.epoch.rows), self.epoch.seconds]
        own += [self._seconds, self._waited, float(self._nodes), float(self._edges), *map(float, self._take_steps())]
        own += self._graph_world.transport.take_sums()
        mine = torch.tensor(own, dtype=torch.float64, device=self._world.device)
        digest = torch.cat([self._replicas.digest(), mine.new_tensor([trainer.should_stop])])
        by_rank = self._world.all_gather(torch.cat([mine, digest]), "Communication metrics").cpu()
        by_rank, digests = by_rank.split([len(mine), len(digest)], 1)
        self._replicas.check(digests[:, :2], f"After epoch {trainer.current_epoch}")
        if (stop := digests[:, 2].bool()).any() and not stop.all():
            those, others = (each.nonzero().view(-1).tolist() for each in (stop, ~stop))
            raise RuntimeError(
                f"After epoch {trainer.current_epoch}, trainer.should_stop is set on ranks {those} and not on {others}, which "
                'would wait for them. Use a value that all ranks have, such as trainer.callback_metrics["train_loss"] in '
                "on_train_epoch_end."
            )
        total, longest = by_rank.sum(0), by_rank.amax(0)
        seconds = longest[3].clamp(min=1e-9)
        values = {
            "comm/bytes_sent": total[0],
            "comm/halo_rows": total[1],
            "comm/seconds": longest[2],
            "comm/step_messages": longest[7],
            "comm/step_bytes_sent": total[8],
            "throughput/nodes_per_s": total[5] / seconds,
            "throughput/edges_per_s": total[6] / seconds,
        }
        if self._world.waited_s is not None:
            values["comm/wait_fraction"] = longest[4] / seconds
            self._watch(by_rank[:, 4], float(seconds))
        log_values(trainer, values | self._graph_world.transport.metrics(total[9:]))

    def _watch(self, waited: torch.Tensor, seconds: float) -> None:
        """Warn once about long waits. The first epoch, which includes initialization, does not count."""
        self._epochs += 1
        if self._warned or self._world.size == 1 or self._epochs == 1:
            return
        self._all_waited += waited
        self._all_seconds += seconds
        if self._all_seconds < ENOUGH_S or self._epochs <= ENOUGH_EPOCHS:
            return
        if (found := explain_waiting(self._all_waited.tolist(), self._all_seconds, self._parts)) is not None:
            self._warned = True
            rank_zero_warn(found)

    def gather_traffic(self) -> list[ByLayer]:
        """Returns the traffic of all ranks in the last epoch, ``[P]``; collective."""
        return self._world.all_gather_object(self.by_layer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.loggers or self._world.size == 1:
            return
        by_rank = self.gather_traffic()
        if trainer.is_global_zero and any(by_rank):
            files: dict[str, Any] = {"communication.json": json.dumps(traffic_table(by_rank), indent=1) + "\n"}
            if uploads(trainer):
                from lightning_gnn.callbacks.pictures import draw_traffic

                files["communication.png"] = draw_traffic(by_rank, "Last epoch")
            log_files(trainer, "communication", files)


def traffic_table(by_rank: Sequence[ByLayer]) -> list[dict[str, Any]]:
    """Returns the traffic of each rank as plain values, with an entry for each layer, direction and rank."""
    keys = dict.fromkeys(key for by_layer in by_rank for key in by_layer)
    return [
        {
            "layer": layer,
            "direction": direction,
            "rank": rank,
            "bytes_sent": sent.bytes_sent,
            "messages": sent.messages,
            "rows": sent.rows,
            "seconds": sent.seconds,
            "bytes_to": {str(peer): count for peer, count in sorted(sent.to.items())},
        }
        for layer, direction in keys
        for rank, by_layer in enumerate(by_rank)
        if (sent := by_layer.get((layer, direction))) is not None
    ]


def explain_waiting(waited: Sequence[float], seconds: float, parts: Sequence[PartSize]) -> str | None:
    """Returns a warning about ranks that wait too long; None if no rank does.

    The straggler is the rank with the least wait time while another rank waits long. If all ranks wait for similar times,
    communication is the bottleneck.

    Args:
        waited: seconds that each rank waited for others, ``[P]``.
        seconds: seconds of training steps.
        parts: sizes of each rank's part.
    """
    ranks = range(len(waited))
    slowest, most = min(ranks, key=waited.__getitem__), max(ranks, key=waited.__getitem__)
    if waited[most] <= TOO_MUCH * seconds:
        return None
    found = (
        f"Rank {most} waited for others in {waited[most] / seconds:.0%} of the time ({waited[most]:.1f} of {seconds:.1f} s "
        "of training steps)"
    )
    if waited[slowest] > waited[most] / 2:
        return (
            f"{found}, and no rank waited less than {waited[slowest] / seconds:.0%}: communication is the bottleneck. Use "
            "fewer ranks or another strategy; between machines, also a codec (docs/choosing.md)."
        )
    shares = [own * len(parts) / max(1, sum(of)) for own, of in zip(astuple(parts[slowest]), zip(*map(astuple, parts)))]
    size = ", ".join(
        f"{count:,} {name} ({share:.2f} of the average)"
        for count, share, name in zip(astuple(parts[slowest]), shares, ("nodes", "in-edges", "halo rows"))
    )
    advice = (
        "That is not more than other ranks have. Check its machine: other processes, a slower core, fewer threads."
        if max(shares) <= LIGHT
        else "Balance the parts: another `partition` of GraphDataModule, or the strategy vertex_cut for graphs with hubs."
    )
    return f"{found}: rank {slowest} is the slowest and waited {waited[slowest] / seconds:.0%}. Its part: {size}. {advice}"


def metrics_of(trainer: pl.Trainer, asker: object) -> CommunicationMetrics:
    """Returns the strategy's own callback; raises ValueError if its ranks exchange nothing and it has none."""
    found = next((each for each in trainer.callbacks if isinstance(each, CommunicationMetrics)), None)  # type: ignore[attr-defined]
    if found is None:
        raise ValueError(
            f"{type(asker).__name__} requires messages of layers, and {type(trainer.strategy).__name__} sends none in "
            "training steps. Remove it, or use a strategy such as dgcl or sampling."
        )
    return found


class CommunicationMonitor(pl.Callback):
    """Callback that draws a heat map of bytes between ranks for each layer and direction.

    The pictures go to W&B and TensorBoard, and to a file in the folder of CSV logs.

    Args:
        every_n_epochs: number of epochs between pictures, which show one epoch each. The last epoch is always drawn.

    Raises:
        ValueError: a number below 1; from ``fit``, a strategy whose ranks exchange no features.
    """

    def __init__(self, every_n_epochs: int = 50) -> None:
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs must be at least 1 (got {every_n_epochs}).")
        self.every_n_epochs = every_n_epochs
        self._last_epoch = -1

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics_of(trainer, self)
        self._last_epoch = -1

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch % self.every_n_epochs == 0:
            self._draw(trainer, trainer.current_epoch)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # current_epoch is already incremented.
        self._draw(trainer, trainer.current_epoch - 1)

    def _draw(self, trainer: pl.Trainer, epoch: int) -> None:
        metrics = metrics_of(trainer, self)
        if epoch == self._last_epoch or not trainer.loggers:
            return
        self._last_epoch = epoch
        by_rank = metrics.gather_traffic()
        if trainer.is_global_zero and any(by_rank):
            from lightning_gnn.callbacks.pictures import draw_traffic

            log_picture(trainer, "communication/heat_map", draw_traffic(by_rank, f"Epoch {epoch}"))
