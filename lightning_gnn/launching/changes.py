"""Changes of a rank to module and callbacks, sent to the process that started it for one call of the Trainer.

The rank starts with a copy of the caller's objects. At its end it sends the attributes that differ, as pickles. Modules,
parameters, callbacks and the Trainer are pickled as names, since the caller has these objects and changes them in place.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from lightning_gnn.lightning_packages import is_instance
from lightning_gnn.private_torch import LOAD_HOOKS, MODULES, version_counter

MOST_BYTES = 1 << 30
"""Maximal bytes of the attributes that a rank sends."""

_SAMPLE = 64
"""Number of entries per dimension that identify a tensor, together with its address and its version."""

_OF_RUN = vars(pl.LightningModule()).keys() - vars(torch.nn.Module()).keys()
"""Attributes of a LightningModule that Lightning sets for one process."""

_MADE_UP = _CLASS, _PARAMETRIZATIONS = "__class__", "parametrizations"
"""Keys that are not attributes of the module itself."""

_Place = tuple[str, str]  # name of an object and name of an attribute


class _RemovedAttribute:
    """Placeholder for a removed attribute."""


class Shared:
    """Objects shared by a caller and its ranks, by name; created in both before the call."""

    def __init__(self, trainer: pl.Trainer) -> None:
        module: Any = torch.nn.Module() if trainer.lightning_module is None else trainer.lightning_module
        data = getattr(trainer, "datamodule", None)
        self._owners: dict[str, Any] = {}
        self._labels: dict[str, str] = {}
        for path, each in module.named_modules():
            self._add_owner(f"module {path}", each, ".".join(filter(None, [type(module).__name__, path])))
        for number, callback in enumerate(trainer.callbacks):  # type: ignore[attr-defined]
            self._add_owner(f"callback {number}", callback, type(callback).__name__)
        tensors = chain(module.named_parameters(), module.named_buffers())
        self._objects = {
            **{f"tensor {name}": each for name, each in tensors},
            **{f"logger {number}": each for number, each in enumerate(trainer.loggers)},
            **{"trainer": trainer, "strategy": trainer.strategy, **({} if data is None else {"datamodule": data})},
            **self._owners,
        }
        self._names = {id(each): name for name, each in self._objects.items()}
        self._owners["trainer"], self._labels["trainer"] = trainer, "Trainer"

    def _add_owner(self, name: str, owner: Any, label: str) -> None:
        self._owners[name], self._labels[name] = owner, label

    def digests(self) -> dict[_Place, bytes]:
        """Returns a checksum for the value of each attribute."""
        return {place: _digest(value, self._names) for place, value in self._attributes()}

    def _attributes(self) -> Iterator[tuple[_Place, Any]]:
        from lightning_gnn.nn.learned_rows import LearnedRows  # local import, since it is slow

        for name, owner in self._owners.items():
            if not isinstance(owner, LearnedRows):  # its state_dict contains its rows
                yield from (((name, attribute), value) for attribute, value in _attributes_of(owner).items())

    def changes(self, before: Mapping[_Place, bytes]) -> tuple[bytes, dict[str, str]]:
        """Returns, in a rank, the attributes that differ from `before`, and the reasons why some cannot be sent, by name."""
        changed = {
            place: value
            for place, value in self._attributes()
            if place not in before or before[place] != _digest(value, self._names)
        }
        gone = [(name, attribute) for name, attribute in before if attribute not in _MADE_UP]
        changed |= {place: _RemovedAttribute() for place in gone if place[1] not in vars(self._owners[place[0]])}
        lost: dict[str, str] = {}
        try:
            return self._pickle(changed), lost
        except Exception:  # pickling may raise any error
            kept = {}
            for place, value in changed.items():
                try:
                    self._pickle(value)
                    kept[place] = value
                except Exception as error:
                    lost[f"{self._labels[place[0]]}.{place[1]}"] = str(error).partition("\n")[0]
        return self._pickle(kept), lost

    def _pickle(self, value: Any) -> bytes:
        file = _Limited()
        _Sender(file, self._names).dump(value)
        return file.getvalue()

    def apply(self, changes: bytes) -> dict[str, str]:
        """Apply the changes of a rank to the caller's objects; returns the reasons of failures, by name."""
        try:
            found: dict[_Place, Any] = _Receiver(io.BytesIO(changes), self._objects).load()
        except Exception as error:  # for example, this process lacks the class
            return {"attributes": f"{type(error).__name__}: {error}"}
        for (name, attribute), value in sorted(found.items(), key=lambda entry: entry[0][1] != _PARAMETRIZATIONS):
            _put(self._owners[name], attribute, value)
        return {}


def warn_of_lost(lost: Mapping[str, str], strategy: str) -> None:
    """Warn once about attributes that could not be sent."""
    if lost:
        named = ", ".join(f"{name} ({why})" for name, why in lost.items())
        rank_zero_warn(
            f"The ranks changed {named}, which could not be sent to this process: it keeps the earlier values. Use values that "
            f"can be pickled, or run a script with strategy='{strategy}'."
        )


def _attributes_of(owner: Any) -> dict[str, Any]:
    """Returns the attributes of an object that pickles contain, with the class of a module."""
    if is_instance(owner, "Trainer"):
        return {"callbacks": owner.callbacks}  # type: ignore[attr-defined]
    if not isinstance(owner, torch.nn.Module):
        return {name: value for name, value in _state_of(owner).items() if name in vars(owner)}
    if is_parametrized(owner):  # torch made a class for this module
        modules = {name: each for name, each in getattr(owner, MODULES).items() if name != _PARAMETRIZATIONS}
        lists: Any = owner.parametrizations
        made = {name: list(each) for name, each in lists.items()}
        kind, state = type(owner).__bases__[0], {**vars(owner), MODULES: modules, _PARAMETRIZATIONS: made}
        del state[LOAD_HOOKS]  # torch's weight norm adds a local function, for older checkpoints
    else:
        kind, state = type(owner), _state_of(owner)
    left_out = _OF_RUN if is_instance(owner, "LightningModule") else ()
    return {_CLASS: kind, **{name: value for name, value in state.items() if name not in left_out}}


def _state_of(owner: Any) -> dict[str, Any]:
    """Returns the attributes that a pickle of an object contains, or all if it cannot be pickled."""
    try:
        reduced = owner.__reduce_ex__(2)
    except Exception:  # it may raise any error
        return vars(owner)
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    return state if isinstance(state, dict) else {}


def _put(owner: Any, attribute: str, value: Any) -> None:
    """Set an attribute; lists, dicts and sets are changed in place, since other objects may refer to them."""
    if attribute == _CLASS:
        if not is_parametrized(owner):
            owner.__class__ = value
        return
    if attribute == _PARAMETRIZATIONS:
        known = owner.parametrizations if is_parametrized(owner) else {}
        for name, parts in value.items():
            for part in parts[len(known[name]) if name in known else 0 :]:
                register_parametrization(owner, name, part, unsafe=True)
        return
    before = vars(owner).get(attribute)
    if isinstance(value, _RemovedAttribute):
        vars(owner).pop(attribute, None)
        return
    if attribute == MODULES and _PARAMETRIZATIONS in before:
        value = {**value, _PARAMETRIZATIONS: before[_PARAMETRIZATIONS]}
    if type(before) is type(value) and isinstance(value, list):
        before[:] = value
    elif type(before) is type(value) and isinstance(value, (dict, set)):
        before.clear()
        before.update(value)
    else:
        vars(owner)[attribute] = value


class _Limited(io.BytesIO):
    """File that does not grow beyond :data:`MOST_BYTES`."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES >> 30} GiB")
        return super().write(data)


class _Pickler(pickle.Pickler):
    """Pickler with shared objects as names."""

    def __init__(self, file: Any, names: Mapping[int, str]) -> None:
        super().__init__(file, protocol=4)
        self._names = names

    def persistent_id(self, value: Any) -> Any:
        return self._names.get(id(value))


class _Looker(_Pickler):
    """Pickler for checksums: large objects and objects that cannot be pickled are represented by their address."""

    def persistent_id(self, value: Any) -> Any:
        if (name := super().persistent_id(value)) is not None:
            return name
        if isinstance(value, Tensor):
            version = 0 if value.is_inference() else version_counter(value)
            return "tensor", id(value), version, str(value.dtype), tuple(value.shape), _sample(value)
        if isinstance(value, np.ndarray) and value.size > _SAMPLE:
            part = value[(slice(0, _SAMPLE),) * value.ndim]
            return "array", id(value), str(value.dtype), value.shape, part.tolist()
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (FunctionType, type)):
            known = getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
        else:
            try:
                known = value.__reduce_ex__(4) is not None
            except Exception:  # any object may raise any error
                known = False
        return NotImplemented if known else (str, (f"{type(value).__name__} {id(value)}",))


def _sample(value: Tensor) -> list[Any]:
    """Returns the first entries of a tensor; empty if it is not dense."""
    if value.layout is not torch.strided or value.is_meta or value.is_quantized:
        return []
    return value.detach()[(slice(0, _SAMPLE),) * value.dim()].reshape(-1)[: _SAMPLE**2].tolist()


def _digest(value: Any, names: Mapping[int, str]) -> bytes:
    """Returns a checksum of a value; a random one if it cannot be computed."""
    file = io.BytesIO()
    try:
        _Looker(file, names).dump(value)
    except Exception:  # pickling may raise any error
        return os.urandom(16)
    return hashlib.blake2b(file.getbuffer(), digest_size=16).digest()


class _Sender(_Pickler):
    """Pickler that sends tensors of devices as CPU tensors."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return NotImplemented
        here = value.detach().cpu().requires_grad_(value.requires_grad)
        return (torch.nn.Parameter(here) if isinstance(value, torch.nn.Parameter) else here).__reduce_ex__(4)


class _Receiver(pickle.Unpickler):
    def __init__(self, file: Any, objects: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, name: str) -> Any:
        return self._objects[name]
