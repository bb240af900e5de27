"""Python values that a step may read: everything that its code can reach by its names. A change of one invalidates a captured step.

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
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn.extensions.graphs.source import Source, is_known_builtin, is_users, library_of, module_of
from lightning_gnn.private_torch import MODULES, hooks_of_calls, hooks_on_gradient, version_counter

_MOST = 20_000
"""Number of values above which a step is not captured."""

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.Size,
    type(...),
    range,
    slice,
)
_FIXED = (*_PLAIN, enum.Enum, re.Pattern, PurePath, torch.memory_format, BaseException, property)
_TABLES = ("_parameters", "_buffers", MODULES)
_MODULE_STATE = ("training", *_TABLES, "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STATEFUL = ("random", "time", "numpy.random", "datetime", "secrets", "uuid", "logging", "os", "threading", "socket")
_MISSING = object()

_Read = Callable[[Any, Any], Any]


def _item(owner: Any, key: Any) -> Any:
    return owner.get(key, _MISSING)


def _length(owner: Any, key: Any) -> int:
    return len(owner)


def _element(owner: Any, key: Any) -> Any:
    return owner[key] if key < len(owner) else _MISSING


def _attribute(owner: Any, key: Any) -> Any:
    return getattr(owner, key, _MISSING)


def is_same(found: Any, expected: Any) -> bool:
    """Returns whether a value is the expected object, or an equal number, text or tuple of these."""
    if found is expected:
        return True
    if type(found) is not type(expected):
        return False
    if isinstance(found, tuple):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    return isinstance(found, _PLAIN) and repr(found) == repr(expected)


class Reads:
    """Values that a step may read, as they are now.

    Args:
        source: code of the step.
        module: module of the step.
        batch: batch of the step; the batch of a later step may be another object with the same content.

    Attributes:
        obstacle: description of the first value that cannot be compared; empty if there is none.
    """

    def __init__(self, source: Source, module: torch.nn.Module, batch: Any) -> None:
        self._source, self._names = source, source.names()
        self._values: list[tuple[_Read, Any, Any, Any, str]] = []
        self._tensors: dict[int, tuple[Tensor, str]] = {}
        self._seen: dict[int, Any] = {}
        self.obstacle = ""
        self._visit(module, "self")
        for names, name in source.globals():
            self._read(_item, names, name, name)
        for function in source.functions():
            self._visit(function, function.__name__)
        self._batch = list(_content(batch))
        for label, value in self._batch:
            self._visit(value, label)
        self.note_versions()

    def note_versions(self, changing: Sequence[Tensor] = ()) -> None:
        """Take the present contents of tensors as known; the step itself changes some of them."""
        ignored = {id(each) for each in changing}
        versions = (
            (each, None if id(each) in ignored else version_counter(each), label) for each, label in self._tensors.values()
        )
        self._versions = [(each, version, each.data_ptr(), label) for each, version, label in versions]

    def changed(self, batch: Any, versions: bool = True) -> str:
        """Returns the first value that has changed, with a line that uses it; empty if none has.

        Args:
            batch: batch of the next step.
            versions: whether tensors that were changed in place count.
        """
        for read, owner, key, expected, label in self._values:
            found = read(owner, key)
            if found is not expected and not is_same(found, expected):
                return self._describe(label)
        content = list(_content(batch))
        if len(content) != len(self._batch):
            return "the batch"
        for (label, found), (expected_label, expected) in zip(content, self._batch):
            if label != expected_label or not is_same(found, expected):
                return self._describe(label)
        for tensor, version, pointer, label in self._versions:
            counts = versions and version is not None and not tensor.requires_grad
            if tensor.data_ptr() != pointer or (counts and version_counter(tensor) != version):
                return self._describe(label)
        return ""

    def changed_tensors(self) -> list[Tensor]:
        """Returns the tensors that were changed in place since :meth:`note_versions`."""
        return [tensor for tensor, version, _, _ in self._versions if version_counter(tensor) != version]

    def _describe(self, label: str) -> str:
        line = self._source.line_of(re.split(r"[.\[]", label.rstrip("]'"))[-1].strip("'")) or self._source.line_of(label)
        return f"{line}: {label}" if line else label

    def _refuse(self, label: str, reason: str) -> None:
        self.obstacle = self.obstacle or f"{self._describe(label)} {reason}"

    def _read(self, read: _Read, owner: Any, key: Any, label: str) -> None:
        value = read(owner, key)
        if len(self._values) >= _MOST:
            return self._refuse("self", f"has more than {_MOST:,} values that the step may read")
        self._values.append((read, owner, key, value, label))
        self._visit(value, label)

    def _visit(self, value: Any, label: str) -> None:
        if isinstance(value, _FIXED) or value is _MISSING or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._visit_tensor(value, label)
        elif isinstance(value, (list, tuple)):
            self._visit_elements(value, label)
        elif isinstance(value, Mapping) and hasattr(value, "get"):
            self._values.append((_length, value, None, len(value), label))
            for key in list(value):
                self._read(_item, value, key, f"{label}[{key!r}]")
        elif isinstance(value, (set, frozenset)):
            if not all(isinstance(each, _FIXED) for each in value):
                self._refuse(label, "is a set of objects, which cannot be compared")
            self._values.append(
                (lambda owner, _: tuple(sorted(map(repr, owner))), value, None, tuple(sorted(map(repr, value))), label)
            )
        elif isinstance(value, ModuleType):
            self._visit_module_of_python(value, label)
        elif isinstance(value, MethodType):
            self._visit(value.__func__, label)
            if is_users(value.__func__):
                self._visit(value.__self__, label)
        elif isinstance(value, functools.partial):
            for each in (value.func, value.args, value.keywords):
                self._visit(each, label)
        elif isinstance(value, FunctionType):
            self._visit_function(value, label)
        elif isinstance(value, BuiltinFunctionType):
            if not is_known_builtin(value):
                self._refuse(label, "may read or change anything")
        elif isinstance(value, type):
            if is_users(value):
                self._visit_class(value, value, label)
        else:
            self._visit_object(value, label)

    def _visit_elements(self, value: Any, label: str) -> None:
        self._values.append((_length, value, None, len(value), label))
        for place, each in enumerate(value):
            if isinstance(value, list):
                self._read(_element, value, place, f"{label}[{place}]")
            else:
                self._visit(each, f"{label}[{place}]")

    def _visit_tensor(self, x: Tensor, label: str) -> None:
        self._tensors[id(x)] = x, label
        for hooks in hooks_on_gradient(x):
            if any(library_of(module_of(hook)) != "lightning_gnn" for hook in (hooks or {}).values()):
                self._refuse(label, "has a hook, which runs Python code in the backward pass")
        if x.device.type == "cpu" and x.numel() == 1:
            self._values.append((lambda owner, _: owner.item(), x, None, x.item(), label))

    def _visit_function(self, function: FunctionType, label: str) -> None:
        if not is_users(function):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                self._read(_attribute, cell, "cell_contents", name)
            except ValueError:
                continue
        self._visit(function.__defaults__, label)
        self._visit(function.__kwdefaults__, label)
        for name in self._names & vars(function).keys():
            self._read(_item, vars(function), name, f"{label}.{name}")

    def _visit_module_of_python(self, module: ModuleType, label: str) -> None:
        name = module.__name__
        if name in _STATEFUL:
            self._refuse(label, "is a module whose functions read or change anything")
        elif not library_of(name):
            for attribute in self._names & vars(module).keys():
                self._read(_item, vars(module), attribute, f"{label}.{attribute}")
        elif name == "numpy" and "random" in self._names:
            self._refuse("random", "draws random numbers that a replay would repeat")

    def _visit_object(self, value: Any, label: str) -> None:
        kind = type(value)
        if isinstance(value, (Data, HeteroData)):
            for name, each in _content(value):
                self._visit(each, name)
            return
        if isinstance(value, torch.nn.Module):
            self._visit_layer(value, label)
        elif not hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
            if not module_of(value).startswith(("torch", "typing")) or isinstance(value, torch.Generator):
                self._refuse(label, f"is a {kind.__name__}, which cannot be compared")
            return
        if library_of(module_of(kind)) == "lightning_gnn" and not is_users(kind):
            return
        own = getattr(value, "__dict__", {})
        if is_users(kind):
            self._values.append((_length, own, None, len(own), label))
        for name in self._names & own.keys():
            self._read(_item, own, name, f"{label}.{name}")
        self._visit_class(kind, value, label, own)

    def _visit_class(self, kind: type, owner: Any, label: str, own: Mapping[str, Any] = {}) -> None:  # noqa: B006 (not changed)
        """Read the attributes that a class defines, of an object or of the class itself."""
        for name in self._names - own.keys():
            base = next((each for each in kind.__mro__ if name in vars(each)), None)
            if base is None:
                continue
            found = vars(base)[name]
            if inspect.isdatadescriptor(found):
                getter = getattr(found, "fget", None)
                if owner is not kind and (getter is None or not is_users(getter)):
                    self._read_property(owner, name, f"{label}.{name}")
            elif is_users(base) and not isinstance(found, classmethod):
                self._read(_attribute, kind, name, f"{label}.{name}")

    def _read_property(self, owner: Any, name: str, label: str) -> None:
        try:
            self._read(_attribute, owner, name, label)
        except Exception:  # a property that is not available now, which code could not have read
            return

    def _visit_layer(self, layer: torch.nn.Module, label: str) -> None:
        own, is_read = vars(layer), id(layer) in self._source.touched
        for name in _TABLES:
            table = own[name]
            for key in table if is_read and name != MODULES else self._names & table.keys():
                self._read(_item, table, key, f"{label}.{key}")
        if not is_read:
            return
        if any(hooks_of_calls(layer)[2:]):
            self._refuse(label, "has a hook, which runs Python code in the backward pass")
        for name in _MODULE_STATE:
            if name not in _TABLES:
                self._read(_item, own, name, f"{label}.{name}")
            elif name == MODULES:
                for key, child in own[name].items():
                    self._values.append((_item, own[name], key, child, f"{label}.{key}"))
                    if id(child) in self._source.touched or not is_users(type(layer)):
                        self._visit(child, f"{label}.{key}")
        if not is_users(type(layer)) and not isinstance(layer, _LIGHTNING):
            for name in own.keys() - set(_MODULE_STATE):
                if isinstance(own[name], (*_FIXED, Tensor, list, tuple, dict, torch.nn.Module)):
                    self._read(_item, own, name, f"{label}.{name}")


def _content(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a batch by name; of other arguments, themselves."""
    if isinstance(batch, (Data, HeteroData)):
        for store in batch.stores:
            prefix = f"batch[{store._key!r}]" if getattr(store, "_key", None) is not None else "batch"
            for name, value in store.items():
                yield f"{prefix}.{name}", value
    elif isinstance(batch, (list, tuple)):
        for place, each in enumerate(batch):
            yield from _content(each) if isinstance(each, (Data, HeteroData)) else [(f"argument {place}", each)]
    else:
        yield "batch", batch


import lightning.pytorch as pl  # noqa: E402

_LIGHTNING = (pl.LightningModule,)
