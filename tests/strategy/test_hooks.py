"""Hooks of callback, module, strategy and logger run in the order of plain Lightning on one device, with equal arguments.

Two differences are intended. Loggers also get the strategy's arguments, its plan and throughput, in calls of their own. A rank's
``module.backward`` gets the loss divided by the number of ranks, because gradients are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from common import UserModule, awkward_graph, build
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_gnn import DGCLStrategy, GraphDataModule

MINIMAL: dict[str, Any] = {"enable_checkpointing": False, "logger": False, "enable_progress_bar": False}
CALLBACK_HOOKS = [name for name in vars(L.Callback) if not name.startswith("_") and callable(getattr(L.Callback, name))]
MODULE_HOOKS = [
    *(name for name in dir(L.LightningModule) if name.startswith("on_") and name != "on_gpu"),
    *("setup", "teardown", "training_step", "validation_step", "optimizer_step", "optimizer_zero_grad", "backward"),
    *("transfer_batch_to_device", "configure_gradient_clipping", "configure_optimizers", "configure_callbacks"),
]
STRATEGY_HOOKS = [name for name in dir(Strategy) if name.startswith("on_") or name.endswith("_step")]
STRATEGY_HOOKS += ["backward", "pre_backward", "post_backward", "setup", "teardown", "save_checkpoint"]
STRATEGY_HOOKS += ["setup_optimizers", "process_dataloader", "batch_to_device", "lightning_module_state_dict"]
LOGGER_HOOKS = ["log_metrics", "log_hyperparams", "log_graph", "after_save_checkpoint", "save", "finalize"]
ADDED = ("strategy", "plan", "comm/")
"""Beginnings of the names that loggers get from this package."""


def described(value: Any) -> Any:
    """Returns the type and the value of an argument; of objects, the name of their class."""
    if isinstance(value, Tensor):
        return "tensor", value.dtype, round(float(value.detach().double().sum()), 8) if value.dim() == 0 else value.dim()
    if isinstance(value, Mapping):
        return {name: described(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    if isinstance(value, float):
        return round(value, 8)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return type(value).__name__


class Record:
    """Calls of hooks: owner, name and arguments; `added`: first names in calls of loggers that this package adds."""

    def __init__(self, size: int) -> None:
        self.calls, self.added, self._size = list[Any](), list[str](), size

    def watch(self, owner: Any, kind: str, names: Sequence[str]) -> None:
        """Record the calls of an object's methods from now on."""
        for name in dict.fromkeys(names):
            if callable(getattr(owner, name, None)):
                setattr(owner, name, self._recorded(kind, name, getattr(owner, name)))

    def _recorded(self, kind: str, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            names = args[0] if kind == "logger" and args and isinstance(args[0], Mapping) else {}
            first = next(iter(names), "")
            if first.startswith(ADDED):
                self.added.append(first)
            else:
                whole = (args[0] * self._size, *args[1:]) if (kind, name) == ("module", "backward") else args
                self.calls.append((kind, name, described(whole), described(kwargs)))
            return method(*args, **kwargs)

        return call


class Silent(Logger):
    """Logger that stores nothing."""

    name, version = "silent", 0

    def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def record(rank: int, size: int, strategy: str, minimal: bool, folder: str) -> tuple[list[str], list[str]]:
    """Returns the calls of hooks in a fit of two epochs with validation, and the names in added calls of loggers."""
    torch.manual_seed(1)
    module, calls, callback, logger = UserModule(build("gcn")).double(), Record(size), L.Callback(), Silent()
    options = MINIMAL if minimal else {"logger": logger, "default_root_dir": folder}
    trainer = L.Trainer(
        strategy=DGCLStrategy(timeout=60, self_check=False) if strategy == "dgcl" else strategy,
        accelerator="cpu",
        devices=size,
        max_epochs=2,
        callbacks=[callback],
        log_every_n_steps=1,
        **options,
    )
    calls.watch(callback, "callback", CALLBACK_HOOKS)
    calls.watch(module, "module", MODULE_HOOKS)
    calls.watch(trainer.strategy, "strategy", STRATEGY_HOOKS)
    calls.watch(logger, "logger", LOGGER_HOOKS)
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    return [str(each).replace(folder, "folder") for each in calls.calls], calls.added


@pytest.mark.parametrize("minimal", [False, True], ids=["default", "minimal"])
@pytest.mark.parametrize("size", [1, 2])
def test_hooks_run_as_on_one_device(ranks, tmp_path, size, minimal):
    [(plain, nothing)] = ranks.run(1, record, "auto", minimal, str(tmp_path / "plain"))
    assert not nothing and len(plain) > 150
    for owner in ("callback", "module", "strategy", *([] if minimal else ["logger"])):
        assert any(each.startswith(f"('{owner}'") for each in plain)
    for rank, (found, added) in enumerate(ranks.run(size, record, "dgcl", minimal, str(tmp_path / "dgcl"))):
        # Lightning calls it on rank 0 only.
        assert found == [each for each in plain if rank == 0 or "after_save_checkpoint" not in each]
        of_rank_0 = ["strategy", "plan"] if rank == 0 else []
        assert added == ([] if minimal else [*of_rank_0, *["comm/bytes_sent"] * 2])
