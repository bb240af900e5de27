"""Runs of a comparison ("cells"), checked before any starts, and their cache keys."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import lightning as L
import torch
import torch_geometric
from lightning.pytorch.strategies import StrategyRegistry

from lightning_gnn.datamodules import GraphDataModule
from lightning_gnn.private_torch import tree_leaves
from lightning_gnn.strategies import GNNStrategy, registered
from lightning_gnn.tools.parser import Parser, did_you_mean, unknown_word

Again: TypeAlias = Literal["none", "failed", "all"]

OWN_TRAINER_KEYS = (
    *("strategy", "devices", "num_nodes", "max_epochs", "max_steps", "callbacks", "logger", "default_root_dir"),
    *("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps"),
)
"""Arguments of the Trainer that are fixed for all runs or set by each run."""

PACKAGE = Path(__file__).parent.parent

FORMAT = 2
"""Version of the files that ranks write; runs with another version are repeated."""

MAKES = "make"
"""Key of a model or datamodule created by a function; its value is the function's import path."""


@dataclass(frozen=True)
class Cell:
    """Run of a comparison.

    Attributes:
        strategy: name of the strategy.
        devices: number of ranks.
        arguments: arguments of the strategy.
        label: name in tables and plots.
    """

    strategy: str
    devices: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        """Label, if given; else strategy, arguments and number of ranks."""
        if self.label:
            return self.label
        given = ", ".join(f"{name}={_short(value)}" for name, value in self.arguments.items())
        return f"{self.strategy}{f' {given}' if given else ''} x {self.devices}"

    def trainer_strategy(self) -> str | dict[str, Any]:
        """Returns the strategy in the form that the Trainer, or its parser, takes."""
        kind = registered().get(self.strategy)
        if kind is None:
            return self.strategy
        return {"class_path": f"{kind.__module__}.{kind.__name__}", "init_args": dict(self.arguments)}


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "class_path" in value:
        given = ", ".join(f"{name}={_short(each)}" for name, each in (value.get("init_args") or {}).items())
        return f"{value['class_path'].rpartition('.')[2]}({given})"
    return str(value)


def make_cells(cells: Sequence[str | Mapping[str, Any]], devices: int | Sequence[int]) -> list[Cell]:
    """Returns the runs of a configuration, one for each number of ranks.

    Args:
        cells: names of strategies, or ``{"strategy": ..., "devices": ..., "label": ...}`` with further keys for the strategy's
            arguments.
        devices: numbers of ranks of runs without ``devices``.
    """
    made = []
    if isinstance(cells, (str, Mapping)) or not cells:
        raise ValueError(
            "runs must be a list of strategies and their arguments, such as "
            f"[{{strategy: auto, devices: 1}}, dgcl, {{strategy: dgcl, codec: int8}}], got {cells!r}."
        )
    for given in cells:
        if not isinstance(given, (str, Mapping)) or (isinstance(given, Mapping) and "strategy" not in given):
            raise ValueError(f"Each entry of runs must be a name, or have the key strategy: {{strategy: dgcl}}, got {given!r}.")
        options = {"strategy": given} if isinstance(given, str) else dict(given)
        strategy, label = str(options.pop("strategy")).lower(), options.pop("label", "")
        _check_strategy(strategy, options.keys() - {"devices"})
        counts = options.pop("devices", devices)
        _check_plain(options, f"arguments of {strategy!r}")
        for count in counts if isinstance(counts, (list, tuple)) else [counts]:
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"devices of {strategy!r} must be a number of ranks, at least 1, or a list, got {counts!r}.")
            numbered = label and isinstance(counts, (list, tuple))
            made.append(Cell(strategy, count, options, f"{label} x {count}" if numbered else label))
    names = [cell.name for cell in made]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"runs has two entries {twice!r}. Remove one, or set a label for each.")
    return made


def _check_plain(values: Any, name: str) -> None:
    try:
        json.dumps(values)
    except TypeError as error:
        raise ValueError(
            f"{name} must be numbers, texts, lists and dicts, which can be sent to other processes ({error}). Pass an object as "
            "{'class_path': ..., 'init_args': ...}."
        ) from error


def _check_strategy(name: str, arguments: Any) -> None:
    known, ours = StrategyRegistry.available_strategies(), registered()
    if name not in (*known, "auto"):
        message = f"unknown strategy {name!r}" + did_you_mean(name, ["auto", *known])
        raise ValueError(message if message.endswith("?") else f"{message} There are auto, {', '.join(known)}.")
    for ending in ("_spawn", "_notebook"):
        if name in ours and name.endswith(ending):
            raise ValueError(f"Each cell starts new processes: use {name.removesuffix(ending)!r} instead of {name!r}.")
    if arguments and name not in ours:
        raise ValueError(f"{name!r} does not support arguments here, got {', '.join(sorted(arguments))}. Remove them.")


@dataclass(frozen=True)
class Comparison:
    """Settings of :func:`~lightning_gnn.tools.comparing.run.compare`; the first run is the reference of the others.

    Attributes:
        model: LightningModule, as ``{"class_path": ..., "init_args": ...}``, or ``{"make": path of a function}``.
        data: datamodule in the same form.
    """

    model: Mapping[str, Any]
    data: Mapping[str, Any]
    runs: Sequence[Cell]
    epochs: int = 10
    warmup: int = 1
    seed: int = 0
    output: Path = Path("comparison")
    timeout: float = 3600.0
    rerun: Again = "none"
    loss: str = "train_loss"
    tolerance: float = 1e-4
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs has no entries: devices is an empty list. Set numbers of ranks.")
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {self.epochs}.")
        if not 0 <= self.warmup < self.epochs:
            raise ValueError(
                f"warmup must be at least 0 and below epochs={self.epochs}, got {self.warmup}. Times exclude these epochs."
            )
        for name, value in (("timeout", self.timeout), ("tolerance", self.tolerance)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}.")
        if self.rerun not in get_args(Again):
            raise ValueError(f"rerun must be one of {', '.join(get_args(Again))}, got {self.rerun!r}.")
        _check_plain(self.trainer, "trainer: its values")
        taken = sorted(set(self.trainer) & set(OWN_TRAINER_KEYS))
        if taken:
            raise ValueError(
                f"trainer: {', '.join(taken)} cannot be set here. Set strategy and devices in runs, and the length with epochs; "
                "nothing is logged or checkpointed."
            )

    def task(self, cell: Cell) -> dict[str, Any]:
        """Returns the task of a run as plain values: everything that determines its results or that its processes need."""
        return {
            **{name: dict(getattr(self, name)) for name in ("model", "data", "trainer")},
            **{name: getattr(self, name) for name in ("epochs", "seed", "loss")},
            "strategy": cell.trainer_strategy(),
            "devices": cell.devices,
            "versions": {
                "lightning_gnn": importlib.import_module("lightning_gnn").__version__,
                "lightning": L.__version__,
                "torch": torch.__version__,
                "torch_geometric": torch_geometric.__version__,
            },
            "machine": {
                "cores": os.cpu_count(),
                "threads": os.environ.get("OMP_NUM_THREADS"),
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            },
            "format": FORMAT,
            "code": _own_code([dict(each) for each in (self.model, self.data, cell.arguments)]),
        }

    def key(self, cell: Cell) -> str:
        return hashlib.blake2b(json.dumps(self.task(cell), sort_keys=True).encode(), digest_size=8).hexdigest()


def _own_code(values: Any) -> dict[str, str]:
    """Returns digests of the files that define the import paths in `values`; installed packages have versions instead."""
    found: dict[str, str] = {}
    for value in tree_leaves(values):
        if not isinstance(value, str) or "." not in value or not all(map(str.isidentifier, value.split("."))):
            continue
        try:
            spec = importlib.util.find_spec(value.rpartition(".")[0])
        except (ImportError, ValueError, AttributeError):
            continue
        file = Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None
        if file is not None and "site-packages" not in file.parts and PACKAGE not in file.parents:
            found[value] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    return found


def task_parser() -> Parser:
    """Returns a parser for model, data and strategy of a task, which raises its errors."""
    parser = Parser(exit_on_error=False)
    add_task(parser)
    parser.add_subclass_arguments(GNNStrategy, "strategy", required=False)
    return parser


def add_task(parser: Parser) -> None:
    parser.add_lightning_class_args(L.LightningModule, "model", subclass_mode=True, required=False)
    parser.add_lightning_class_args(GraphDataModule, "data", subclass_mode=True, required=False)


def resolve_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sections of a task as plain values, with defaults filled in."""
    parser = task_parser()
    try:
        given = {name: value for name, value in sections.items() if MAKES not in value}
        made = parser.parse_object(given)
        plain = json.loads(parser.dump(made, format="json"))
    except Exception as error:  # raised by jsonargparse, or by an import of user code
        raise ValueError(unknown_word(parser, given) or str(error)) from error
    return {name: value if MAKES in value else plain[name] for name, value in sections.items()}


def section_of(value: Any, name: str) -> dict[str, Any]:
    """Returns a model or datamodule given to the Python function as a section of a task.

    Args:
        value: ``{"class_path": ..., "init_args": ...}``, the import path of a class or function, or a class or function that
            takes no arguments. For data, also the arguments of GraphDataModule.
        name: ``"model"`` or ``"data"``, for errors.
    """
    if isinstance(value, Mapping):
        if "class_path" in value or name == "model":
            return dict(value)
        return {"class_path": "lightning_gnn.GraphDataModule", "init_args": dict(value)}
    if isinstance(value, str):
        return {MAKES: value}
    if not callable(value) or isinstance(value, torch.nn.Module):
        raise ValueError(
            f"{name} must be a function of a module that returns it, its import path, or {{'class_path': ..., 'init_args': ...}}"
            f", got a {type(value).__name__}. Each cell's processes create it."
        )
    return {MAKES: _path_of(value, name)}


def _path_of(function: Callable[..., Any], section: str) -> str:
    name, module = getattr(function, "__qualname__", "<"), getattr(function, "__module__", "")
    if module == "__main__":  # the script's module name, under which runs import it
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "<").stem
    path = f"{module}.{name}"
    if "<" in path:
        raise ValueError(
            f"{section}: {path} cannot be imported by the runs' processes. Write a function at the top of a file, not a lambda, "
            "a function inside another, or one in a notebook."
        )
    return path
