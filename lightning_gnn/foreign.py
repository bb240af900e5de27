"""Messages of other packages that are about their own code, or of no use here: each is left out by its text and its place.

Nothing else of these packages is touched. Filters of the user's that come later, such as ``warnings.simplefilter("error")``, win.
"""

from __future__ import annotations

import logging
import re
import warnings

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
