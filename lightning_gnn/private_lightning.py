"""Private names of Lightning that the package uses, accessed only in this file; and suppressed messages of Lightning.

Tested with lightning 2.6.6 and 2.5.1; `tests/test_private_names.py` checks that the names exist, and that no other file has any.

Suppressed messages concern Lightning's own code, or do not apply here; they are matched by text and place. Nothing else of
Lightning is changed. Later filters of the user, such as ``warnings.simplefilter("error")``, take precedence.
"""

# ruff: noqa: F401  names for other files

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from copy import copy
from operator import attrgetter
from typing import Any

from lightning.fabric.plugins.precision.utils import _DtypeContextManager as DtypeContext
from lightning.fabric.strategies.launchers.subprocess_script import _HYDRA_AVAILABLE as HYDRA_AVAILABLE
from lightning.fabric.strategies.launchers.subprocess_script import _hydra_subprocess_cmd as hydra_command
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_over
from lightning.fabric.utilities.seed import _collect_rng_states as collect_random_states
from lightning.fabric.utilities.seed import _set_rng_states as set_random_states
from lightning.pytorch import Trainer
from lightning.pytorch.loops.loop import _Loop as Loop
from lightning.pytorch.loops.progress import _BaseProgress as BaseProgress
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher

HOOK = "_current_fx_name"
"""Attribute of a module: the name of the running hook or step, to which logs are attributed."""

TRAINER = "_trainer"
"""Attribute of a module: its Trainer, or None."""

MESH = "_device_mesh"
"""Attribute of a module: value of ``device_mesh``."""

EXAMPLE = "_example_input_array"
"""Attribute of a module: value of ``example_input_array``."""

COMPILATION = "_compiler_ctx"
"""Attribute of a module: its compiler as ``"dynamo_ctx"``, and its original forward and steps; None if it is not compiled."""

checkpoint_parser = attrgetter("_checkpoint_connector._parse_ckpt_path")
"""Method of a Trainer: returns the file of ``ckpt_path``."""

results_of = attrgetter("_results")
"""Attribute of a Trainer: the collection of values logged in this epoch, or None."""

metrics_so_far = attrgetter("_logger_connector._callback_metrics")
"""Attribute of a Trainer: the last ``callback_metrics``, without communication."""

METRICS_SO_FAR = tuple(attrgetter(f"_logger_connector.{name}") for name in ("_callback_metrics", "_logged_metrics"))
"""Attributes of a Trainer: the last ``callback_metrics`` and ``logged_metrics``, without communication."""

EXPERIMENT = "_experiment"
"""Attribute of a logger: its writer, or None."""

WANDB_RUN = "_attach_id"
"""Attribute of a ``WandbLogger``, and of W&B's runs: name of a run that another process has started."""

LOGGER_VERSION = "_version"
"""Attribute of a logger with versions: its version, or None before the first use."""

SAVED_AT, SAVED_FILE = "_last_global_step_saved", "_last_checkpoint_saved"
"""Attributes of a ``ModelCheckpoint``: step and file of its last checkpoint, which its state does not include."""

batches_of = attrgetter("_data_fetcher")
"""Attribute of the loop of a fit: its source of batches."""

SIGTERM_CHECK = "_broadcast_sigterm_tensor"
"""Method of the loop of an epoch, since Lightning 2.6: checks whether rank 0 received SIGTERM."""

PORT = "_main_port"
"""Attribute of a ``LightningEnvironment``: the rendezvous port of ranks."""


class Checkpoints:
    """Checkpoints of a fit without the state of the strategy, as Lightning makes them, but faster.

    ``dataclasses.asdict`` and protocol checks would take most of the time of the states of loops.

    Args:
        trainer: the Trainer, while it fits.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._loops = {f"{name}_loop": getattr(trainer, f"{name}_loop") for name in ("fit", "validate", "test", "predict")}
        self._fields = list[dict[str, Any]]()
        self._have_states = list[Any]()
        for loop in self._loops.values():
            self._find(loop)
        connector: Any = copy(trainer._checkpoint_connector)
        connector._get_loops_state_dict = self._states_of_loops
        self._connector = connector

    def dump(self) -> dict[str, Any]:
        """Returns a checkpoint; :meth:`complete` completes its entry "loops"."""
        found: dict[str, Any] = self._connector.dump_checkpoint(False)
        return found

    def complete(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns the entry "loops" of Lightning's checkpoint."""
        by_owner = dict(zip(map(id, [*self._fields, *self._have_states]), states))
        return {name: self._complete(loop, by_owner) for name, loop in self._loops.items()}

    def _find(self, value: Any) -> None:
        """Find the fields of progress in a loop, and the loops that have states."""
        if isinstance(value, Loop) and value.on_save_checkpoint():
            self._have_states.append(value)
        elif hasattr(value, "__dict__") and not isinstance(value, Loop):
            self._fields.append(vars(value))
        for each in vars(value).values():
            if isinstance(each, (Loop, BaseProgress)):
                self._find(each)

    def _states_of_loops(self) -> list[dict[str, Any]]:
        return [each.copy() for each in self._fields] + [loop.on_save_checkpoint() for loop in self._have_states]

    def _complete(self, loop: Any, states: dict[int, dict[str, Any]], prefix: str = "") -> dict[str, Any]:
        """Returns ``loop.state_dict()`` with known states."""
        found: dict[str, Any] = {f"{prefix}state_dict": states.get(id(loop), {})}
        for name, value in vars(loop).items():
            if isinstance(value, BaseProgress):
                found[prefix + name] = _values(value, states)
            elif isinstance(value, Loop):
                found |= self._complete(value, states, f"{prefix}{name}.")
        return found


def _values(value: Any, states: dict[int, dict[str, Any]]) -> Any:
    if not hasattr(value, "__dict__"):
        return value
    return {name: _values(each, states) for name, each in states[id(vars(value))].items()}


RESTARTING = "_restarting"
"""Attribute of a loop: whether it continues inside an epoch; always True with ``max_steps`` alone."""

tear_down = attrgetter("_teardown")
"""Method of a Trainer: undoes the set-up of a call."""

_PACKAGES = "lightning.pytorch", "pytorch_lightning"

_WARNINGS: tuple[tuple[str, type[Warning], str], ...] = (
    # Lightning's own code under torch 2.13, once in each evaluation.
    ("`isinstance(treespec, LeafSpec)` is deprecated, use", FutureWarning, "utilities._pytree"),
    # A change of Lightning 1.9. CSVLogger is used instead, see docs/logging.md.
    (
        "Starting from v1.9.0, `tensorboardX` has been removed as a dependency of the `lightning.pytorch` package",
        UserWarning,
        "trainer.connectors.logger_connector.logger_connector",
    ),
)

_TIPS = (
    "💡 Tip: For seamless cloud logging and experiment tracking, try installing [litlogger]",
    "💡 Tip: For seamless cloud uploads and versioning, try installing [litmodels]",
)


def leave_out() -> None:
    for text, category, module in _WARNINGS:
        _ignore(text, category, module)
    for package in _PACKAGES:
        logging.getLogger(f"{package}.utilities.rank_zero").addFilter(_no_tip)


def leave_out_missing_validation() -> None:
    """Suppress the warning about a missing ``validation_step``: a graph always has a ``val_dataloader``."""
    _ignore(
        "You passed in a `val_dataloader` but have no `validation_step`. Skipping val loop.",
        UserWarning,
        "trainer.configuration_validator",
    )


def _ignore(text: str, category: type[Warning], module: str) -> None:
    for package in _PACKAGES:
        warnings.filterwarnings("ignore", re.escape(text), category, re.escape(f"{package}.{module}") + r"\Z")


def _no_tip(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_TIPS)
