"""Temporary attributes of modules for a run; a pickle contains the original module.

Users pickle modules at any time: hyperparameters in a checkpoint, or ``torch.save(self.model)`` in a hook. The attributes refer
to process groups and to the rank's shard, which no other process has.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

_REDUCE = "__reduce_ex__"  # pickle and copy look it up on the object itself


class Patches:
    """Temporary attributes of modules or other objects, until :meth:`release`.

    A copy by ``copy.deepcopy`` has the attributes, too. They refer to the copy, and :meth:`release` removes them from it.
    """

    def __init__(self) -> None:
        # Modules keep the entries of these sets alive.
        self._patched, self._copies = WeakSet[_Patched](), WeakSet[_Patched]()

    def __bool__(self) -> bool:
        return bool(self._patched)

    @property
    def modules(self) -> list[Any]:
        """Modules with attributes of this object."""
        return [patched.module for patched in self._patched]

    def put(self, module: Any, attributes: Mapping[str, Any]) -> None:
        """Set attributes of `module`; a later call replaces earlier values."""
        patched = module.__dict__.get(_REDUCE) or _Patched(module)
        patched.put(attributes, self)
        self._patched.add(patched)

    def release(self) -> None:
        """Restore the original attributes of every module and every copy."""
        for patched in (*self._patched, *self._copies):
            patched.release(self)
        self._patched.clear()


class _Patched:
    """Original attributes of a module, by name: owner of the new value, and a tuple of the old value, empty for none.

    The module has it as its ``__reduce_ex__``.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._before: dict[str, tuple[Patches, tuple[Any, ...]]] = {}

    def put(self, attributes: Mapping[str, Any], owner: Patches) -> None:
        own = self.module.__dict__
        for name, value in attributes.items():
            self._before.setdefault(name, (owner, (own[name],) if name in own else ()))
            own[name] = value
        own[_REDUCE] = self

    def release(self, owner: Patches) -> None:
        own = self.module.__dict__
        for name in [name for name, (by, _) in self._before.items() if by is owner]:
            own.pop(name, None)
            own.update((name, value) for value in self._before.pop(name)[1])
        if not self._before:
            own.pop(_REDUCE, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Patched:
        """Returns the record of the module's copy, which is in progress."""
        twin = _Patched(copy.deepcopy(self.module, memo))
        for name, (owner, before) in self._before.items():
            twin._before[name] = owner, copy.deepcopy(before, memo)
            owner._copies.add(twin)
        return twin

    def __call__(self, protocol: Any) -> Any:
        kind: Any = type(self.module)
        reduced = kind.__reduce_ex__(self.module, protocol)
        if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
            return *reduced[:2], _State(reduced[2], self), *reduced[3:]
        return reduced

    def original_items(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yields the attributes of a state without patches."""
        for name, value in state.items():
            _, before = self._before.get(name, (None, (value,)))
            yield from ((name, kept) for kept in before)


class _State(dict[str, Any]):
    """Attributes that ``copy`` copies; a pickle contains the original attributes.

    Only ``copy.deepcopy`` copies the ``__reduce_ex__``: on a shallow copy it would reduce the original.
    """

    def __init__(self, state: Mapping[str, Any], patched: _Patched) -> None:
        super().__init__({name: value for name, value in state.items() if name != _REDUCE})
        self._patched = patched

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy({**self, _REDUCE: self._patched}, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # An OrderedDict, which torch.load also accepts with weights_only=True.
        return OrderedDict, (), None, None, self._patched.original_items(self)
