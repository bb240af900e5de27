"""Comparison of the run between ranks before any step: module, hyperparameters, optimizers and Trainer."""

from __future__ import annotations

import hashlib
import re
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_gnn.comm.group import World
from lightning_gnn.lightning_packages import is_overridden

Description = Mapping[str, str]
"""Description of a rank's run: values as text, by name."""

_OF_A_RANK = re.compile(
    r"(^|.*[._])(rank|main|master|zero|leader|process|host|hostname|device|gpu|seed|port|pid|uuid|id|time|timestamp|date|dir"
    r"|directory|folder|path|file|root|url|version|run_name|verbose|debug)s?(\.\d+)*"
)
"""Names of values that may differ between ranks, such as values of a process or a run."""
_OF_A_RUN = re.compile(r"/|\d{6}|\d\d[-:]\d\d")
"""Parts of texts that may differ between runs: paths, dates and times."""
_LIBRARIES = ("torch.", "torch_geometric.", "lightning_gnn.")
"""Modules whose public attributes only define their computation."""
_LIMITS = tuple(f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict"))
_LOOPS = ("max_epochs", "max_steps", "min_epochs", "min_steps", "overfit_batches", "num_sanity_val_steps", *_LIMITS)
_STEPS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision")
_OF_TRAINER = (*_LOOPS, *_STEPS, "check_val_every_n_epoch", "val_check_interval")
_ATTRIBUTE = "the attribute"
_SHOWN = 4
"""Maximal number of further differences that a message names."""
_SHORT = 100
"""Maximal number of entries of a list that are compared."""


def check_alike(world: World, description: Description) -> None:
    """Raises ValueError on all ranks if their descriptions differ; names the differences, with the values of two ranks."""
    if world.size == 1:
        return
    digest = hashlib.blake2b(repr(sorted(description.items())).encode()).digest()
    digests = world.all_gather_object(digest)
    if len(set(digests)) == 1:
        return
    first, *others = world.all_gather_object(dict(description))
    for rank, second in enumerate(others, 1):
        differing = [name for name in {**first, **second} if _differs(first.get(name), second.get(name), name)]
        if differing:
            raise ValueError(_text(first, second, rank, differing))


def _differs(first: str | None, second: str | None, name: str) -> bool:
    """Returns whether two ranks have different values; an attribute that one rank lacks does not count."""
    return first != second and not (None in (first, second) and name.startswith(_ATTRIBUTE))


def _text(first: Description, second: Description, rank: int, differing: list[str]) -> str:
    name, more = differing[0], differing[1:]
    others = f"; {len(more)} more differ, {', '.join(more[:_SHOWN])}{', ...' if len(more) > _SHOWN else ''}" if more else ""
    texts = _cut(first.get(name, "missing")), _cut(second.get(name, "missing"))
    return (
        f"The run must be the same on all ranks: {name} is {texts[0]} on rank 0 and {texts[1]} on rank {rank}{others}. Each rank "
        "runs the whole script, so random numbers and values of its environment can differ. Use a generator with a seed, such as "
        "random.Random(0), or lightning_gnn.optuna.create_study for Optuna; or run the script once, with strategy='dgcl_spawn'. "
        "The name of an attribute that may differ must begin with an underscore."
    )


def module_and_trainer(module: pl.LightningModule, trainer: pl.Trainer, has_begun: bool) -> Description:
    """Returns the description of a module and a Trainer, without parameter values, which ranks get from rank 0.

    Args:
        module: module of the run.
        trainer: Trainer of the run.
        has_begun: whether an earlier stage ran with the module; its steps may have stored values of a rank in attributes.
    """
    found = {"the strategy": type(trainer.strategy).__name__, "the module": type(module).__name__}
    # Only rank 0 runs prepare_data, which may set attributes.
    compared = has_begun or is_overridden("prepare_data", module)
    for name, value in _leaves(module.hparams):
        if not _is_of_a_rank(name, value):
            found[f"the hyperparameter {name!r}"] = repr(value)
    for name, part in module.named_modules():
        kind = type(part)
        if name:
            found[f"the layer {name!r}"] = kind.__name__
        of_library = kind.__module__.startswith(_LIBRARIES)
        for attribute, value in _attributes(part) if of_library or not compared else ():
            if of_library or not _is_of_a_rank(attribute, value):
                found[f"{_ATTRIBUTE} {f'{name}.{attribute}' if name else attribute!r}"] = repr(value)
    for kind_of, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            found[f"the {kind_of} {name!r}"] = _describe(tensor)
    found["automatic_optimization"] = repr(module.automatic_optimization)
    for name in _OF_TRAINER:
        found[f"{name} of the Trainer"] = repr(getattr(trainer, name))
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    for name in ("num_neighbors", "batch_size"):
        found[f"{name} of the GraphDataModule"] = repr(getattr(data, name))
    return found


def optimizers_and_schedulers(module: torch.nn.Module, optimizers: Iterable[Optimizer], schedulers: Iterable[Any]) -> Description:
    """Returns the description of optimizers and schedulers: classes, options by parameter group, and names of parameters."""
    found, names = {}, {id(parameter): name for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        found[f"optimizer {number}"] = kind
        for index, group in enumerate(optimizer.param_groups):
            of = f"of {kind}'s parameter group {index}"
            for name, value in group.items():
                if name != "params":
                    found.update({f"{each} {of}": repr(plain) for each, plain in _leaves({name: value})})
            parameters = [names.get(id(each), "unknown") for each in group["params"]]
            found[f"the list of parameters {of}"] = ", ".join(parameters)
    for number, config in enumerate(schedulers):
        kind = type(config.scheduler).__name__
        found[f"scheduler {number}"] = kind
        for name in ("interval", "frequency", "monitor"):
            found[f"{name} of {kind}"] = repr(getattr(config, name))
        found.update({f"{name} of {kind}": repr(value) for name, value in _attributes(config.scheduler)})
    return found


def _attributes(of: object) -> Iterator[tuple[str, Any]]:
    """Yields an object's public attributes that are numbers and strings, or lists of them."""
    return _leaves({name: value for name, value in vars(of).items() if not name.startswith("_")})


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields numbers and strings in nested mappings, namespaces and short lists, by name."""
    if isinstance(values, Mapping):
        items: Iterable[tuple[Any, Any]] = values.items()
    else:
        items = enumerate(values[:_SHORT]) if isinstance(values, (list, tuple)) else vars(values).items()
    for key, value in items:
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.dim() == 0):
            value = value.item()
        if isinstance(value, (bool, int, float, complex, str)) or value is None:
            yield name, value
        elif isinstance(value, (Mapping, Namespace, list, tuple)) or _is_record(value):
            yield from _leaves(value, name)


def _is_record(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _is_of_a_rank(name: str, value: Any) -> bool:
    if isinstance(value, float) and value > 1000:
        return min(abs(value - now()) for now in (time.time, time.perf_counter, time.monotonic)) < 86400
    return bool(_OF_A_RANK.fullmatch(name)) or (isinstance(value, str) and bool(_OF_A_RUN.search(value)))


def _describe(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return "not initialized"
    frozen = "" if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter) else ", frozen"
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{frozen}"


def _cut(text: str, max_length: int = 120) -> str:
    return text if len(text) <= max_length else f"{text[:max_length]}..."
