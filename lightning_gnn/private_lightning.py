"""The private names of Lightning that the package uses, read in this file only; and messages of Lightning's that are left out.

Tested with lightning 2.6.6 and 2.5.1; `tests/test_private_names.py` checks that the names are there, and that no other file has
any.

Messages that are about Lightning's own code, or of no use here, are known by text and place. Nothing else of Lightning is
touched. Filters of the user's that come later, such as ``warnings.simplefilter("error")``, win.
"""

# ruff: noqa: F401  names for other files

from __future__ import annotations

import logging
import re
import warnings
from operator import attrgetter

from lightning.fabric.plugins.precision.utils import _DtypeContextManager as DtypeContext
from lightning.fabric.strategies.launchers.subprocess_script import _HYDRA_AVAILABLE as HYDRA_AVAILABLE
from lightning.fabric.strategies.launchers.subprocess_script import _hydra_subprocess_cmd as hydra_command
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads
from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_over
from lightning.fabric.utilities.seed import _collect_rng_states as collect_random_states
from lightning.fabric.utilities.seed import _set_rng_states as set_random_states
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher

HOOK = "_current_fx_name"
"""Of a module: the name of the hook or step that runs, whose logs are its."""

TRAINER = "_trainer"
"""Of a module: its Trainer, or None."""

EXAMPLE = "_example_input_array"
"""Of a module: what ``example_input_array`` returns."""

compilation = attrgetter("_compiler_ctx")
"""Of a module: what ``torch.compile`` was told, or None."""

checkpoint_parser = attrgetter("_checkpoint_connector._parse_ckpt_path")
"""Of a Trainer: returns the file that ``ckpt_path`` means."""

results_of = attrgetter("_results")
"""Of a Trainer: the collection of what is logged in this epoch, or None."""

metrics_so_far = attrgetter("_logger_connector._callback_metrics")
"""Of a Trainer: the last ``callback_metrics``; nobody else is asked for them."""

batches_of = attrgetter("_data_fetcher")
"""Of the loop of a fit: what it takes batches from."""

END_QUESTION = "_broadcast_sigterm_tensor"
"""Of the loop of an epoch, since Lightning 2.6: asks whether rank 0 was asked to end."""

PORT = "_main_port"
"""Of a ``LightningEnvironment``: the port at which ranks meet."""

_LIGHTNING = "lightning.pytorch"

_WARNINGS: tuple[tuple[str, type[Warning], str], ...] = (
    # Lightning's own code, under torch 2.13: once in each evaluation.
    ("`isinstance(treespec, LeafSpec)` is deprecated, use", FutureWarning, f"{_LIGHTNING}.utilities._pytree"),
    # What Lightning 1.9 has changed. CSVLogger stands in, see docs/logging.md.
    (
        "Starting from v1.9.0, `tensorboardX` has been removed as a dependency of the `lightning.pytorch` package",
        UserWarning,
        f"{_LIGHTNING}.trainer.connectors.logger_connector.logger_connector",
    ),
)

_TIPS = (
    "💡 Tip: For seamless cloud logging and experiment tracking, try installing [litlogger]",
    "💡 Tip: For seamless cloud uploads and versioning, try installing [litmodels]",
)


def leave_out() -> None:
    for text, category, module in _WARNINGS:
        _ignore(text, category, module)
    logging.getLogger(f"{_LIGHTNING}.utilities.rank_zero").addFilter(_no_tip)


def leave_out_missing_validation() -> None:
    """Leaves out that a module has no ``validation_step``: a graph has a ``val_dataloader`` whether one asks for it or not."""
    _ignore(
        "You passed in a `val_dataloader` but have no `validation_step`. Skipping val loop.",
        UserWarning,
        f"{_LIGHTNING}.trainer.configuration_validator",
    )


def _ignore(text: str, category: type[Warning], module: str) -> None:
    warnings.filterwarnings("ignore", re.escape(text), category, re.escape(module) + r"\Z")


def _no_tip(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_TIPS)
