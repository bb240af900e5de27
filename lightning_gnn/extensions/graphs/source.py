"""Code that a step runs outside of known libraries: the user's code, and libraries whose functions may read or change anything.

A profiling hook sees each call of a Python function and of a C function in the thread of the step.
"""

# ruff: noqa: SIM905  tables of names

from __future__ import annotations

import dis
import gc
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from lightning_gnn.private_torch import FORWARD_CLASS

KNOWN = """torch torch_geometric lightning pytorch_lightning lightning_fabric lightning_utilities lightning_gnn numpy numba triton
torchmetrics contextlib functools collections typing typing_extensions enum abc dataclasses operator types warnings weakref copy
inspect importlib linecache re""".split()
"""Libraries whose functions compute from their arguments and attributes, except for `_REFUSED`; others are like user code."""

_USERS = ("lightning_gnn.modules",)
"""Modules of this package with training steps."""

_LIGHTNING = ("lightning", "pytorch_lightning")
_REFUSED = {
    "it depends on the device, the Trainer or other ranks": (*_LIGHTNING, *"torch.cuda torch.distributed torch.optim".split()),
    "it reads or changes the state of random numbers": ("torch.random", "torch_geometric.seed", "numpy.random"),
    "it uses files or processes": "torch.serialization torch.multiprocessing torch.utils.data torch_geometric.loader".split(),
    "a metric counts its updates": ("torchmetrics.metric", "torchmetrics.collections"),
    "it runs Python code in the backward pass": ("torch.utils.checkpoint",),
}
"""Modules whose functions a captured step cannot call, by the reason."""

_ANYWHERE = ("torchmetrics.metric", "torchmetrics.collections", "torch.utils.checkpoint")
"""Modules of `_REFUSED` that known libraries cannot call for a step, either."""

_ALLOWED = "log log_dict forward __call__ __getattr__ __setattr__ __init__".split()
"""Functions of Lightning that a step may call, in addition to properties, which are read again before a replay."""

_WRAPPERS = "torch._compile torch.utils._contextlib torch._dynamo.eval_frame contextlib functools".split()
_C_MODULES = (
    "builtins math cmath _operator operator itertools _functools _collections _abc _weakref _struct torch _typing".split()
)
_C_CLASSES = "builtins collections _collections functools".split()
_REFUSED_BUILTINS = """print input open exec eval compile __import__ globals locals vars dir getattr setattr delattr hasattr
breakpoint""".split()


@cache
def library_of(module: str) -> str:
    """Returns the known library that has a module; empty for the user's code and other libraries."""
    top = module.partition(".")[0]
    return top if top in KNOWN and not module.startswith(_USERS) else ""


def module_of(value: Any) -> str:
    """Returns the name of the module of a function, class or object."""
    module = getattr(value, "__module__", None)
    return module if isinstance(module, str) else type(value).__module__


def is_users(value: Any) -> bool:
    """Returns whether a function or class is not from a known library or built in."""
    module = module_of(value)
    return library_of(module) == "" and module not in _C_CLASSES


@cache
def _refusal(module: str) -> tuple[str, str]:
    """Returns the entry of `_REFUSED` for a module, and the reason; empty if there is none."""
    entries = ((each, reason) for reason, modules in _REFUSED.items() for each in modules)
    return next(((each, reason) for each, reason in entries if f"{module}.".startswith(f"{each}.")), ("", ""))


def is_known_builtin(function: Any) -> bool:
    """Returns whether a C function only computes from its arguments, and changes at most its own object."""
    owner, name = getattr(function, "__self__", None), function.__name__
    if owner is None or isinstance(owner, ModuleType):
        module = module_of(function) if owner is None else owner.__name__
        return (module in _C_MODULES and name not in _REFUSED_BUILTINS) or _is_torch(module)
    kinds = (owner if isinstance(owner, type) else type(owner)).__mro__
    module = next((kind for kind in kinds if name in vars(kind)), kinds[0]).__module__
    return module in _C_CLASSES or (_is_torch(module) and not isinstance(owner, (torch.Generator, torch.Stream)))


def _is_torch(module: str) -> bool:
    return library_of(module) == "torch" and not _refusal(module)[0]


def is_of_user(frame: FrameType | None) -> bool:
    """Returns whether the code of a frame is the user's, or of a standard library that the user's code called."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if library_of(module):
            return False
        if module.partition(".")[0] not in sys.stdlib_module_names:
            return True
        frame = frame.f_back
    return False


class Source:
    """Code of the user that a step ran.

    Attributes:
        codes: code objects of functions with their global names, in the order of their first call.
        owners: ids of objects on which known libraries called methods, such as layers.
        obstacle: description of the first call that cannot be captured, with its line; empty if there is none.
    """

    def __init__(self) -> None:
        self.codes: dict[CodeType, dict[str, Any]] = {}
        self.owners, self.obstacle = set[int](), ""

    @contextmanager
    def record(self) -> Iterator[None]:
        """Context manager that records the calls of this thread."""
        before = sys.getprofile()
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _see(self, frame: FrameType, event: str, value: Any) -> None:
        if event == "call":
            self._see_call(frame)
        elif event == "c_call" and not self.obstacle and not is_known_builtin(value) and is_of_user(frame):
            owner = getattr(value, "__self__", None)
            name = f"{owner.__name__}.{value.__name__}" if isinstance(owner, ModuleType) else value.__qualname__
            self._refuse(frame, f"calls {name}, which may read or change anything")

    def _see_call(self, frame: FrameType) -> None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if is_of_user(frame):
            self.codes.setdefault(code, frame.f_globals)
            if hasattr(type(first), FORWARD_CLASS):
                self._refuse(frame, f"calls {code.co_name}, whose backward pass runs Python code")
            return
        if isinstance(first, torch.nn.Module):
            self.owners.add(id(first))
        name, (entry, reason) = code.co_name, _refusal(module)
        if name == "register_hook" and module == "torch._tensor":
            entry, reason = module, "it runs Python code in the backward pass"
        if not entry or module in _WRAPPERS or (entry in _LIGHTNING and _is_allowed(first, name)):
            return
        caller = frame.f_back
        while caller is not None and caller.f_globals.get("__name__", "") in _WRAPPERS:
            caller = caller.f_back
        if entry in _ANYWHERE or is_of_user(caller):
            self._refuse(frame, f"calls {name} of {module}: {reason}")

    def _refuse(self, frame: FrameType, reason: str) -> None:
        self.obstacle = self.obstacle or f"{line_of_frame(frame)} {reason}"

    def names(self) -> set[str]:
        """Returns the names of attributes in the code."""
        return {name for code in self.codes for name in _names(code)[1]}

    def globals(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yields the global names that the code uses, after the dicts of their modules."""
        for code, names in self.codes.items():
            yield from ((names, name) for name in _names(code)[0] if name in names)

    def functions(self) -> list[FunctionType]:
        """Returns the functions that have the code, for their closures and defaults."""
        gc.collect()
        owners = gc.get_referrers(*self.codes) if self.codes else []
        return [each for each in owners if isinstance(each, FunctionType) and each.__code__ in self.codes]

    def line_of(self, name: str) -> str:
        """Returns the first line that uses a name, ``file:number``; empty if there is none."""
        for code in self.codes:
            starts, line = dict(dis.findlinestarts(code)), code.co_firstlineno
            for each in dis.get_instructions(code):
                line = starts.get(each.offset) or line
                if each.argval == name:
                    return f"{code.co_filename}:{line}"
        return ""


def _is_allowed(owner: Any, name: str) -> bool:
    return name in _ALLOWED or name.startswith("<") or isinstance(getattr(type(owner), name, None), property)


@cache
def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """Returns the global names of a code object, and its names of attributes."""
    uses = [(each.argval, each.opname) for each in dis.get_instructions(code) if isinstance(each.argval, str)]
    names = {name for name, operation in uses if operation.endswith(("_GLOBAL", "_NAME"))}
    attributes = {name for name, operation in uses if operation.endswith(("_ATTR", "_METHOD"))}
    return names, attributes | (set(code.co_names) - names)


def line_of_frame(frame: FrameType | None) -> str:
    """Returns file and line of the innermost calling code outside of libraries, with a colon; empty if there is none."""
    while frame is not None:
        file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        is_library = library_of(module) or "site-packages" in file or file.startswith("<")
        if not is_library and module.partition(".")[0] not in sys.stdlib_module_names:
            return f"{file}:{frame.f_lineno}:"
        frame = frame.f_back
    return ""


@cache
def _loaded_names(code: CodeType) -> frozenset[str]:
    """Returns the names of local variables that code reads."""
    values = (each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD_"))
    names = {name for value in values for name in (value if isinstance(value, tuple) else (value,)) if isinstance(name, str)}
    return frozenset(names.union(code.co_cellvars))


def loads_argument(method: Any, place: int) -> bool:
    """Returns whether a method may read an argument, given its place after ``self``, which is 0."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return code is None or place >= code.co_argcount or code.co_varnames[place] in _loaded_names(code)
