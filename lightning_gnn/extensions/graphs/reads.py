"""Python values that a step may read: everything that its code can reach by its names. A change invalidates a captured step.

The values are found after a step has run, from the module, the batch, and the globals, closures and defaults of the user's code.
An attribute counts if its name occurs in this code; all entries of a container count. This includes values that the step did not
read, and all values that it read, except results of calls, which :mod:`lightning_gnn.extensions.graphs.source` checks.
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn.extensions.graphs.source import Source, is_users, library_of, module_of
from lightning_gnn.private_torch import HOOKS, MODULES, TABLES, hooks_of_calls, hooks_on_gradient, version_counter

_MOST = 20_000
"""Number of values above which a step is not captured."""

_NUMBERS = (type(None), bool, int, float, complex, str, bytes, np.generic, np.ufunc, range, slice, BuiltinFunctionType)
_PLAIN = (*_NUMBERS, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum, re.Pattern, PurePath)
_OF_LAYERS = (*_PLAIN, Tensor, list, tuple, dict, torch.nn.Module, FunctionType, functools.partial)
_STATEFUL = {"random", "time", "datetime", "secrets", "uuid", "logging", "os", "threading", "socket", "numpy.random"}
_PYTHON = "runs Python code in the backward pass"
_ABSENT = object()

_Read = Callable[[Any, Any], Any]


def _item(owner: Any, key: Any) -> Any:
    return owner.get(key, _ABSENT)


def _element(owner: Any, key: Any) -> Any:
    return owner[key] if key < len(owner) else _ABSENT


def _attribute(owner: Any, key: Any) -> Any:
    return getattr(owner, key, _ABSENT)


def _call(owner: Any, key: str) -> Any:
    return getattr(owner, key)()


def is_same(value: Any, expected: Any) -> bool:
    """Returns whether a value is the expected object, or an equal number, text or tuple of these."""
    if value is expected:
        return True
    if type(value) is not type(expected):
        return False
    if type(value) is tuple:
        return len(value) == len(expected) and all(map(is_same, value, expected))
    return bool(value == expected) if isinstance(value, set) else isinstance(value, _PLAIN) and repr(value) == repr(expected)


class Reads:
    """Values that a step may read, as they are now.

    Args:
        source: code of the step.
        module: module of the step.
        arguments: arguments of the step; the batch of a later step may be another object with the same content.
        settings: function that returns settings on which the step depends.

    Attributes:
        obstacle: description of the first value that cannot be compared; empty if there is none.
    """

    def __init__(self, source: Source, module: torch.nn.Module, arguments: Any, settings: Callable[[], Any]) -> None:
        self._source, self._names, self.obstacle = source, source.names(), ""
        self._values: list[tuple[_Read, Any, Any, Any, str]] = []
        self._tensors: dict[int, tuple[Tensor, str]] = {}
        self._objects: dict[int, Any] = {}
        self._read(lambda *_: settings(), None, None, "a setting of torch or of the strategy")
        self._visit(module, "self")
        for names, name in source.globals():
            self._read(_item, names, name, name)
        for function in source.functions():
            self._visit(function, function.__name__)
        self._content = list(_content(arguments))
        self._samples = [x for x, *_ in getattr(arguments[0], "sample_tensors", ())]  # with other values in each step
        for label, value in self._content:
            self._visit(value, label)
        self.note_versions()

    def note_versions(self, changing: Sequence[Tensor] = ()) -> None:
        """Take the present contents of tensors as known; the step itself changes some of them."""
        ignored = {id(each) for each in (*changing, *self._samples)}
        self._versions = [
            (x, None if id(x) in ignored else version_counter(x), (x.data_ptr(), x.requires_grad), label)
            for x, label in self._tensors.values()
        ]

    def difference(self, arguments: Any, versions: bool = True) -> str:
        """Returns the first value that has changed, with a line that uses it; empty if none has.

        Args:
            arguments: arguments of the next step.
            versions: whether tensors that were changed in place count.
        """
        for read, owner, key, expected, label in self._values:
            value = read(owner, key)
            if value is not expected and not is_same(value, expected):
                return self._describe(label)
        content = list(_content(arguments))
        for (label, value), (name, expected) in zip(content, self._content):
            if label != name or not is_same(value, expected):
                return self._describe(label)
        for x, version, place, label in self._versions:
            counts = versions and version is not None and not x.requires_grad
            if (x.data_ptr(), x.requires_grad) != place or (counts and version_counter(x) != version):
                return self._describe(label)
        return "" if len(content) == len(self._content) else "the batch"

    def changing_tensors(self) -> list[Tensor]:
        """Returns the tensors that were changed in place since :meth:`note_versions`."""
        return [x for x, version, _, _ in self._versions if version is not None and version_counter(x) != version]

    def _describe(self, label: str) -> str:
        line = self._source.line_of(re.split(r"[.\[]", label)[-1].strip("']"))
        return f"{line}: {label}" if line else label

    def _refuse(self, label: str, reason: str) -> None:
        self.obstacle = self.obstacle or f"{self._describe(label)} {reason}"

    def _read(self, read: _Read, owner: Any, key: Any, label: str) -> None:
        value = read(owner, key)
        self._values.append((read, owner, key, value, label))
        if len(self._values) > _MOST:
            self._refuse("self", f"has more than {_MOST:,} values that the step may read")
        else:
            self._visit(value, label)

    def _read_names(self, owner: Mapping[str, Any], label: str) -> None:
        for name in self._names & owner.keys():
            self._read(_item, owner, name, f"{label}.{name}")

    def _visit(self, value: Any, label: str) -> None:
        if isinstance(value, _PLAIN) or value is _ABSENT or value is ... or id(value) in self._objects:
            return
        self._objects[id(value)] = value
        module = value.__name__ if isinstance(value, ModuleType) else module_of(value)
        if module in _STATEFUL or module.startswith("numpy.random"):
            self._refuse(label, "may read or change anything")
        elif isinstance(value, Tensor):
            self._visit_tensor(value, label)
        elif isinstance(value, (list, tuple)):
            self._read(_call, value, "__len__", label)
            for place in range(len(value)):
                self._read(_element, value, place, f"{label}[{place}]")
        elif isinstance(value, (set, frozenset)):
            self._values.append((_call, value, "copy", value.copy(), label))
        elif isinstance(value, Mapping):
            self._read(_call, value, "__len__", label)
            for key in list(value):
                self._read(_item, value, key, f"{label}[{key!r}]")
        elif isinstance(value, ModuleType):
            self._read_names({} if library_of(module) and module != "numpy" else vars(value), label)
        elif isinstance(value, functools.partial):
            self._visit((value.func, value.args, value.keywords), label)
        elif isinstance(value, MethodType):
            if is_users(value.__func__):
                self._visit((value.__func__, value.__self__), label)
        elif isinstance(value, FunctionType):
            self._visit_function(value, label)
        elif isinstance(value, type):
            self._visit_class(value, value, label)
        elif isinstance(value, torch.nn.Module):
            self._visit_layer(value, label)
        elif isinstance(value, (Data, HeteroData)):
            for name, each in _content(value):
                self._visit(each, name)
        else:
            self._visit_object(value, label)

    def _visit_tensor(self, x: Tensor, label: str) -> None:
        self._tensors[id(x)] = x, label
        hooks = (hook for table in hooks_on_gradient(x) for hook in (table or {}).values())
        if any(library_of(module_of(hook)) != "lightning_gnn" for hook in hooks):
            self._refuse(label, f"has a hook, which {_PYTHON}")
        if x.device.type == "cpu" and x.numel() == 1:
            self._read(_call, x, "item", label)

    def _visit_function(self, function: FunctionType, label: str) -> None:
        if is_users(function):
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                self._read(_attribute, cell, "cell_contents", name)
            self._visit((function.__defaults__, function.__kwdefaults__), label)
            self._read_names(vars(function), label)

    def _visit_object(self, value: Any, label: str) -> None:
        kind = type(value)
        if not hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
            if not module_of(value).startswith(("torch", "typing")) or isinstance(value, torch.Generator):
                self._refuse(label, f"is a {kind.__name__}, which cannot be compared")
        elif library_of(kind.__module__) != "lightning_gnn":
            attributes = getattr(value, "__dict__", {})
            if is_users(kind):
                self._read(_call, attributes, "__len__", label)
            self._read_names(attributes, label)
            self._visit_class(kind, value, label, attributes)

    def _visit_class(self, kind: type, owner: Any, label: str, attributes: Any = ()) -> None:
        """Read the attributes that a class defines, of an object or of the class itself."""
        for name in self._names.difference(attributes):
            base = next((each for each in kind.__mro__ if name in vars(each)), object)
            entry = vars(base).get(name)
            if inspect.isdatadescriptor(entry) and owner is not kind:
                if not is_users(getattr(entry, "fget", None) or torch):  # a getter of the user is part of the code
                    with suppress(Exception):  # not available now, so code could not have read it
                        self._read(_attribute, owner, name, f"{label}.{name}")
            elif is_users(base) and not isinstance(entry, classmethod):
                self._read(_attribute, kind, name, f"{label}.{name}")

    def _visit_layer(self, layer: torch.nn.Module, label: str) -> None:
        kind, attributes, runs = type(layer), vars(layer), id(layer) in self._source.owners
        for name in TABLES:
            self._read_names(attributes[name], label)
        if is_users(kind) or isinstance(layer, pl.LightningModule):
            self._visit_object(layer, label)
        elif runs:
            for name in attributes.keys() - {*TABLES, *HOOKS}:
                if isinstance(attributes[name], _OF_LAYERS):
                    self._read(_item, attributes, name, f"{label}.{name}")
        if runs:
            if any(hooks_of_calls(layer)[2:]):
                self._refuse(label, f"has a hook, which {_PYTHON}")
            for name in ("training", *HOOKS, *(each for each in TABLES if each != MODULES)):
                self._read(_item, attributes, name, f"{label}.{name}")
            for name, child in attributes[MODULES].items():
                if id(child) in self._source.owners:
                    self._read(_item, attributes[MODULES], name, f"{label}.{name}")


def _content(value: Any, label: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yields the attributes of batches in arguments, and other arguments, with labels."""
    if type(value) is tuple:
        for place, each in enumerate(value):
            yield from _content(each, f"argument {place}" if place else label)
    elif isinstance(value, (Data, HeteroData)):
        for place, store in enumerate(value.stores):
            yield from ((f"{label}[{place}].{name}", each) for name, each in store.items())
    else:
        yield label, value
