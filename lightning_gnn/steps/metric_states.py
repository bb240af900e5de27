"""Where metrics are, and their states: joined over ranks in one message, or begun anew for a while."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from lightning_gnn.comm.group import World

_Form = tuple[torch.dtype, tuple[int, ...]]

_MOST_KEPT = 100_000
"""Objects that are looked through for metrics."""

_LIBRARIES = {
    "builtins",
    "lightning",
    "lightning_gnn",
    "numpy",
    "pytorch_lightning",
    "torch",
    "torch_geometric",
    "weakref",
}

_NOT_KEPT = {"_trainer", "_defaults", *vars(torch.nn.Module())} - {"_modules"}
"""What holds no metrics in a module."""


_GUESSED = (
    "{0} takes the scores that it is given for logits if one of a call lies outside 0 to 1, and ranks {1} have taken theirs for "
    "probabilities, others for logits. Give it probabilities: metric.update(out[mask].softmax(-1), y[mask]), or sigmoid()."
)


def states_of_ranks(metric: Metric, world: World) -> list[dict[str, Any]]:
    """Returns the states of the ranks that have seen something, or of all if none has.

    Raises:
        ValueError: ranks have taken scores for logits and for probabilities, in the same calls.
    """
    states = {name: getattr(metric, name) for name in metric._reductions}
    for name, reduce in metric._reductions.items():
        if reduce is dim_zero_cat and isinstance(states[name], list) and states[name]:
            states[name] = [dim_zero_cat(states[name])]
    parts = {name: state if isinstance(state, list) else [state] for name, state in states.items()}
    form = {name: [(each.dtype, tuple(each.shape)) for each in part] for name, part in parts.items()}
    raw = [each.detach().to(world.device).reshape(-1).view(torch.uint8) for each in chain(*parts.values())]
    packed = torch.cat([*raw, torch.empty(0, dtype=torch.uint8, device=world.device)])
    operation = f"States of {type(metric).__name__}"
    own = torch.tensor([zlib.crc32(repr(form).encode()), is_new(metric), 0, 0], dtype=torch.int64, device=world.device)
    own[2:] += getattr(metric, "_guesses", 0)
    digests, new, logits, probabilities = world.all_gather(own, operation).cpu().unbind(1)
    if probabilities.any() and (logits[(logits + probabilities) > 0].unique().numel()) > 1:
        raise ValueError(_GUESSED.format(type(metric).__name__, probabilities.nonzero().view(-1).tolist()))
    if bool((digests == digests[0]).all()):
        forms = [form] * world.size
        pieces: Sequence[Tensor] = world.all_gather(packed, operation).unbind(0)
    else:
        forms = world.all_gather_object(form)
        sizes = [sum(_num_bytes(each) for each in chain(*of.values())) for of in forms]
        pieces = world.all_gather_rows(packed, sizes).split(sizes)
    found = [_unpacked(piece, form_of, metric) for piece, form_of in zip(pieces, forms)]
    return [states for states, nothing in zip(found, new.tolist()) if not nothing] or found


def _unpacked(packed: Tensor, form: dict[str, list[_Form]], metric: Metric) -> dict[str, Any]:
    """Returns the states that were packed as bytes."""
    raw = iter(packed.split([_num_bytes(each) for each in chain(*form.values())]))
    states: dict[str, Any] = {}
    for name, parts in form.items():
        # Copies, which begin where their dtype may.
        tensors = [next(raw).clone().view(dtype).view(shape).to(metric.device) for dtype, shape in parts]
        states[name] = tensors if isinstance(metric._defaults[name], list) else tensors[0]
    return states


def _num_bytes(form: _Form) -> int:
    dtype, shape = form
    return dtype.itemsize * torch.Size(shape).numel()


@contextmanager
def begun_anew(metrics: Sequence[Metric]) -> Iterator[None]:
    """Inside, metrics have seen nothing; afterwards they are as before."""
    # Not copies: states may be part of an autograd graph.
    before = [dict(vars(metric)) for metric in metrics]
    for metric in metrics:
        for name, default in metric._defaults.items():
            setattr(metric, name, [] if isinstance(default, list) else default.clone().to(metric.device))
        metric._update_count, metric._computed = 0, None
    try:
        yield
    finally:
        for metric, known in zip(metrics, before):
            vars(metric).clear()
            vars(metric).update(known)


def is_new(metric: Metric) -> bool:
    """Returns whether a metric's states are those that it began with."""
    states = [(getattr(metric, name), default) for name, default in metric._defaults.items()]
    return all(
        not state if isinstance(default, list) else isinstance(state, Tensor) and torch.equal(state, default.to(state))
        for state, default in states
    )


def metrics_in(roots: Sequence[Any]) -> Iterator[Any]:
    """Yields the metrics and collections of modules and callbacks, each once: parts, and what they keep in lists and objects."""
    seen: set[int] = set()
    waiting = list(reversed(roots))
    while waiting and len(seen) < _MOST_KEPT:
        value = waiting.pop()
        if id(value) in seen:
            continue
        if isinstance(value, (list, tuple, dict)):
            inside: Sequence[Any] = list(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, torch.nn.Module) or (hasattr(value, "__dict__") and _is_of_user(type(value))):
            if isinstance(value, (Metric, MetricCollection)):
                yield value
            inside = [each for name, each in vars(value).items() if name not in _NOT_KEPT]
        else:
            continue
        seen.add(id(value))
        waiting += reversed(inside[:_MOST_KEPT])


def _is_of_user(kind: type) -> bool:
    """Returns whether a class is none of the libraries', whose objects keep no metrics."""
    is_callback = issubclass(kind, pl.Callback)
    return is_callback or (kind.__module__.partition(".")[0] not in _LIBRARIES and not issubclass(kind, type))
