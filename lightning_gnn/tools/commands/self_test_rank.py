"""Rank of ``lightning-gnn test``: ``python -m lightning_gnn.tools.commands.self_test_rank PART DEVICE``."""

from __future__ import annotations

import os
import re
import sys
import threading
from datetime import timedelta
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch_geometric.nn import GCN
from typing_extensions import override

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, planted_partition
from lightning_gnn.comm.group import World
from lightning_gnn.tools.exchange_check import check_exchange, odd_graph, split_odd_graph

STRATEGIES = "dgcl", "spmm", "vertex_cut"
TOLERANCE = 1e-10
"""Maximum difference of losses and weights, relative to the largest value of a tensor."""

END_S = 30
"""Seconds that ranks may take to end after a rank was lost."""

FEATURES, CLASSES = 16, 4


def check_exchanges(rank: int, size: int, device: str) -> str:
    """Check the exchange of rows over shared memory, which only CPU ranks use, and over the process group of the device."""
    strategy = DGCLStrategy()
    layout = strategy.scheme.layout(size)
    shards = split_odd_graph(odd_graph(layout), layout)
    used = []
    for shared_memory in (True, False):
        place = torch.device("cpu")
        if device == "cuda" and not shared_memory:
            place = torch.device(device, int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(place)
        world = World(rank, size, place, timedelta(minutes=4), shared_memory)
        try:
            used.append("shared memory" if world.transport.all_local else world.backend)
            with world.shared_failures(f"the exchange over {used[-1]} failed"):
                check_exchange(strategy, shards, world)
        finally:
            world.close()
    return f"exact over {' and '.join(dict.fromkeys(used))}"


def _give_up() -> None:
    print(f"error: ranks must end within {END_S} s after the loss of a rank, but still run", file=sys.stderr, flush=True)
    os._exit(1)


class _Losses(L.Callback):
    """Callback that stores the loss of each epoch, and ends the process of the last rank, as if killed.

    Args:
        last_epoch: epoch in which the process ends, before the backward pass; None for no end.
    """

    def __init__(self, last_epoch: int | None = None) -> None:
        self.values: list[float] = []
        self._last_epoch = last_epoch

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if trainer.current_epoch == self._last_epoch:
            if trainer.global_rank == trainer.world_size - 1:
                os._exit(0)
            timer = threading.Timer(END_S, _give_up)
            timer.daemon = True
            timer.start()

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.values.append(float(trainer.callback_metrics["train_loss"]))


def _train(losses: _Losses, **trainer: Any) -> list[Tensor]:
    """Returns the losses and the weights after two epochs in float64, on the CPU."""
    L.seed_everything(0, verbose=False)
    graph = planted_partition(600, num_classes=CLASSES, num_features=FEATURES)
    graph.x = graph.x.double()
    # Adam would amplify rounding of gradients that are 0, such as the gradient of a bias before BatchNorm.
    model = NodeClassifier(GCN(FEATURES, 16, 2, CLASSES, norm="batch_norm"), optimizer=partial(torch.optim.SGD, lr=0.1)).double()
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    run = L.Trainer(max_epochs=2, log_every_n_steps=1, callbacks=[losses], **quiet, **trainer)
    run.fit(model, datamodule=GraphDataModule(graph))
    return [
        torch.tensor(losses.values, dtype=torch.float64),
        *(each.detach().cpu().double() for each in model.state_dict().values()),
    ]


def _all_ranks(size: int, device: str) -> dict[str, Any]:
    """Returns the arguments of a Trainer on all ranks."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return {"accelerator": device, "devices": local, "num_nodes": size // local}


def check_training(rank: int, size: int, device: str) -> str:
    """Compare losses and weights after two epochs under each strategy with one CPU device."""
    expected = _train(_Losses(), strategy="auto", accelerator="cpu", devices=1)
    largest = 0.0
    for name in STRATEGIES:
        found = _train(_Losses(), strategy=name, **_all_ranks(size, device))
        off = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in zip(found, expected, strict=True))
        if not off <= TOLERANCE:
            raise RuntimeError(f"strategy={name!r} must give losses and weights of one device, got a difference of {off:.1e}.")
        largest = max(largest, off)
    return f"{', '.join(STRATEGIES)} equal one device (largest difference {largest:.0e})"


def check_lost_rank(rank: int, size: int, device: str) -> str:
    """Train until the last rank ends; the other ranks must raise an error that names it, and end in :data:`END_S` seconds."""
    try:
        _train(_Losses(last_epoch=1), strategy="dgcl", **_all_ranks(size, device))
    except Exception as error:
        if not re.search(rf"\brank(\(s\))? {size - 1}\b", str(error), re.IGNORECASE):
            raise RuntimeError(f"the error of rank {rank} must name rank {size - 1}, got {error}") from error
        return f"rank {size - 1} ended, and the other ranks raised an error that names it"
    raise RuntimeError(f"rank {rank} must raise an error after rank {size - 1} has ended, got none.")


def main() -> None:
    part, device = sys.argv[1:]
    checks = {"exchanges": check_exchanges, "training": check_training, "lost rank": check_lost_rank}
    print(checks[part](int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device))


if __name__ == "__main__":
    main()
