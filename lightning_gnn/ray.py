"""Ray Train: one worker of ``ray.train.torch.TorchTrainer`` is one rank of any strategy of this package.

Ray starts, supervises and restarts the workers, and connects them with torch.distributed. Ray's own ``prepare_trainer`` accepts
only strategies that inherit from DDP, FSDP or DeepSpeed; :func:`prepare_trainer` replaces it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from typing_extensions import override

from lightning_gnn.arguments import check_whole
from lightning_gnn.strategy.ranks import RankStrategy

CHECKPOINT_NAME = "checkpoint.ckpt"
"""File in a reported checkpoint, as of Ray's ``RayTrainReportCallback``."""


def import_ray() -> Any:
    """Returns the module ``ray``; raises ImportError with the command that installs it."""
    try:
        import ray.train.collective
        import ray.train.lightning
        import ray.train.torch
    except ImportError as error:
        raise ImportError(
            "lightning_gnn.ray needs Ray Train, which is not installed. Run pip install lightning-gnn[ray]."
        ) from error
    return ray


def prepare_trainer(trainer: pl.Trainer) -> pl.Trainer:
    """Returns the Trainer after a check, with the devices and the number of machines that Ray has assigned to its workers.

    All workers call it. It ends the process group of Ray, because each call of the Trainer makes its own.

    Args:
        trainer: Trainer with a strategy of this package and ``plugins=[RayLightningEnvironment()]``. Its `devices` and
            `num_nodes` are replaced.

    Raises:
        ValueError: strategy, plugin or accelerator are not supported, or machines have different numbers of workers.
    """
    ray = import_ray()
    strategy, device, context = trainer.strategy, ray.train.torch.get_device(), ray.train.get_context()
    if not isinstance(strategy, RankStrategy):
        raise ValueError(
            f"strategy must be a strategy of lightning_gnn, got {type(strategy).__name__}. Use Trainer(strategy='dgcl'), or "
            "ray.train.lightning.prepare_trainer for the strategies of Ray."
        )
    environment, ranks, machine = strategy.cluster_environment, context.get_local_world_size(), context.get_node_rank()
    if not isinstance(environment, ray.train.lightning.RayLightningEnvironment):
        raise ValueError(
            f"plugins must contain a RayLightningEnvironment, got {type(environment).__name__}. "
            "Use Trainer(plugins=[ray.train.lightning.RayLightningEnvironment()])."
        )
    if {device.type} != {each.type for each in strategy.parallel_devices or []}:
        raise ValueError(
            f"accelerator must be for the {device.type} device of this Ray worker, got {type(trainer.accelerator).__name__}. "
            f"Use Trainer(accelerator='{device.type}'), or change use_gpu of ScalingConfig."
        )
    if context.get_world_rank() != machine * ranks + context.get_local_rank():
        raise ValueError(
            f"Each machine must have the same number of Ray workers, got {ranks} on machine {machine}, which has rank "
            f"{context.get_world_rank()}. Set resources_per_worker of ScalingConfig so that each machine has room for them."
        )
    strategy.parallel_devices, strategy.num_nodes = [device] * ranks, context.get_world_size() // ranks
    strategy.ranks.check(strategy.parallel_devices, strategy.num_nodes)
    if dist.is_initialized():
        place = ray.util.get_node_ip_address(), str(find_free_network_port())
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = ray.train.collective.broadcast_from_rank_zero(place)
        dist.destroy_process_group()
    return trainer


@contextmanager
def last_checkpoint() -> Iterator[str | None]:
    """Context manager with the ``ckpt_path`` of the last reported checkpoint; None if there is none, as in a first attempt."""
    checkpoint = import_ray().train.get_checkpoint()
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield os.path.join(folder, CHECKPOINT_NAME)


class RayReportCallback(pl.Callback):
    """Callback that reports metrics and a checkpoint to Ray at the end of training epochs.

    All ranks wait for each other in a report. Rank 0 writes the checkpoint for all ranks.

    Args:
        every_n_epochs: number of epochs from one report to the next.
    """

    def __init__(self, every_n_epochs: int = 1) -> None:
        check_whole(1, every_n_epochs=every_n_epochs)
        self.every_n_epochs = every_n_epochs

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        train = import_ray().train
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(os.path.join(folder, CHECKPOINT_NAME))  # on all ranks; rank 0 writes
            train.report(metrics, train.Checkpoint.from_directory(folder) if trainer.is_global_zero else None)
