"""Code that a step ran outside of known libraries: the user's code, and libraries whose functions may read or change anything.

A profiling hook sees each call of a Python function and of a C function in the thread of the step.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from lightning_gnn.private_torch import FORWARD_CLASS

KNOWN = """torch torch_geometric lightning pytorch_lightning lightning_fabric lightning_utilities lightning_gnn numpy numba
triton torchmetrics contextlib functools collections typing typing_extensions enum abc dataclasses operator types warnings weakref
copy inspect importlib importlib._bootstrap importlib._bootstrap_external linecache re traceback""".split()
"""Libraries whose functions only compute from their arguments and attributes, except for `_REFUSED`; others are like user code."""

_USERS = ("lightning_gnn.modules",)
"""Modules of this package with training steps."""

_REFUSED = {
    "torch.cuda": "it controls the device",
    "torch.random": "it reads or changes the state of random numbers",
    "torch.distributed": "it communicates",
    "torch.serialization": "it reads or writes files",
    "torch.optim": "it changes an optimizer",
    "torch.multiprocessing": "it uses other processes",
    "torch.utils.data": "it loads data",
    "torch._dynamo": "compiled code is not captured",
    "torchmetrics.metric": "a metric counts its updates",
    "torchmetrics.collections": "a metric counts its updates",
    "torch.utils.checkpoint": "it runs Python code in the backward pass",
    "lightning": "it depends on the Trainer",
    "pytorch_lightning": "it depends on the Trainer",
    "torch_geometric.seed": "it reads or changes the state of random numbers",
    "torch_geometric.loader": "it loads data",
    "numpy.random": "it draws random numbers",
}
"""Modules whose functions a captured step cannot call, with the reason."""

_ANYWHERE = ("torchmetrics.metric", "torchmetrics.collections", "torch.utils.checkpoint")
"""Modules of `_REFUSED` that known libraries cannot call for a step, either."""

_STEPS = """log log_dict __getattr__ forward __setattr__ current_epoch global_step device dtype trainer hparams global_rank local_rank
example_input_array automatic_optimization logger loggers on_gpu fabric strict_loading __call__ max_epochs max_steps training
num_training_batches accumulate_grad_batches world_size node_rank num_devices log_every_n_steps
is_last_batch sanity_checking state strategy callbacks datamodule callback_metrics logged_metrics __jit_unused_properties__""".split()
"""Names of functions of Lightning that a step may call: logging, and properties, which are read again before a replay."""

_LIGHTNING = ("lightning", "pytorch_lightning")

_WRAPPERS = ("torch._compile", "torch.utils._contextlib", "torch._dynamo.eval_frame", "contextlib", "functools")

_C_MODULES = """builtins math cmath _operator operator itertools _functools _collections _abc _weakref _struct _bisect _heapq torch _warnings
_typing""".split()
_REFUSED_BUILTINS = """print input open exec eval compile __import__ globals locals vars dir getattr setattr delattr hasattr breakpoint
warn""".split()


@cache
def library_of(module: str) -> str:
    """Returns the known library that has a module; empty for the user's code and other libraries."""
    if module.startswith(_USERS):
        return ""
    top = module.partition(".")[0]
    return top if top in KNOWN or module in KNOWN else ""


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


def _caller(frame: FrameType) -> FrameType | None:
    """Returns the frame that called a function, without wrappers of torch."""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__", "") in _WRAPPERS:
        caller = caller.f_back
    return caller


def module_of(value: Any) -> str:
    """Returns the name of the module of a function, class or object."""
    module = getattr(value, "__module__", None)
    return module if isinstance(module, str) else getattr(type(value), "__module__", "") or ""


def is_users(value: Any) -> bool:
    """Returns whether a function or class is not from a known library or built in."""
    module = module_of(value)
    return library_of(module) == "" and module not in ("builtins", "_collections", "_functools", "functools")


@cache
def _refusal(module: str) -> tuple[str, str]:
    """Returns the entry of `_REFUSED` for a module, and the reason; empty if there is none."""
    found = next((each for each in _REFUSED if module == each or module.startswith(f"{each}.")), "")
    return found, _REFUSED.get(found, "")


def is_known_builtin(function: Any) -> bool:
    """Returns whether a C function only computes from its arguments, and changes at most its own object."""
    owner = getattr(function, "__self__", None)
    name = function.__name__
    if owner is None or isinstance(owner, ModuleType):
        module = owner.__name__ if owner is not None else module_of(function)
        is_torch = module.startswith("torch") and not _refusal(module)[0]
        return (module in _C_MODULES and name not in _REFUSED_BUILTINS) or is_torch
    if isinstance(owner, (torch.Generator, torch.Stream)):
        return False
    kinds = (owner if isinstance(owner, type) else type(owner)).__mro__
    defined = next((kind for kind in kinds if name in vars(kind)), kinds[0])
    return defined.__module__ in ("builtins", "collections", "_collections", "functools") or (
        defined.__module__.startswith("torch") and not _refusal(defined.__module__)[0]
    )


@dataclass
class Source:
    """Code of the user that a step ran.

    Attributes:
        codes: code objects of functions with their global names, in the order of their first call.
        touched: ids of objects on which known libraries called methods, such as layers.
        obstacle: description of the first call that cannot be captured, with its line; empty if there is none.
    """

    codes: dict[CodeType, dict[str, Any]] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    obstacle: str = ""

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
            self._refuse(frame, f"calls {_name_of(value)}, which may read or change anything")

    def _see_call(self, frame: FrameType) -> None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if is_of_user(frame):
            self.codes.setdefault(code, frame.f_globals)
            if hasattr(type(first), FORWARD_CLASS):
                self._refuse(frame, f"calls {code.co_name}, whose backward pass runs Python code")
            return
        if isinstance(first, torch.nn.Module):
            self.touched.add(id(first))
        if module in _WRAPPERS:
            return
        refused, reason = _refusal(module)
        if module == "torch._tensor" and code.co_name == "register_hook":
            refused, reason = module, "it runs Python code in the backward pass"
        is_fine = refused in _LIGHTNING and (code.co_name in _STEPS or code.co_name.startswith("<"))
        if refused and not is_fine and (refused in _ANYWHERE or is_of_user(_caller(frame))):
            self._refuse(frame, f"calls {code.co_name} of {module}: {reason}")

    def _refuse(self, frame: FrameType, reason: str) -> None:
        if not self.obstacle:
            self.obstacle = f"{line_of_frame(frame)} {reason}"

    def names(self) -> set[str]:
        """Returns the names of attributes in the code."""
        return {name for code in self.codes for name in _names(code)[1]}

    def globals(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Yields the global names that the code uses, and the dicts of their modules."""
        for code, names in self.codes.items():
            for name in _names(code)[0]:
                if name in names:
                    yield names, name

    def functions(self) -> list[FunctionType]:
        """Returns the functions that have the code, for their closures and defaults."""
        gc.collect()
        found = gc.get_referrers(*self.codes) if self.codes else []
        return [each for each in found if isinstance(each, FunctionType) and each.__code__ in self.codes]

    def line_of(self, name: str) -> str:
        """Returns the first line that uses a name, ``file:number``; empty if there is none."""
        for code in self.codes:
            line = code.co_firstlineno
            for each in dis.get_instructions(code):
                line = each.starts_line if type(each.starts_line) is int else getattr(each, "line_number", line) or line
                if each.argval == name:
                    return f"{code.co_filename}:{line}"
        return ""


@cache
def _names(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the global names of a code object, and its names of attributes."""
    instructions = [each for each in dis.get_instructions(code) if isinstance(each.argval, str)]
    world = {each.argval for each in instructions if each.opname.endswith(("_GLOBAL", "_NAME"))}
    others = {name for name in code.co_names if name not in world}
    others |= {each.argval for each in instructions if each.opname.endswith(("_ATTR", "_METHOD"))}
    return tuple(world), tuple(others)


def _name_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{function.__name__}"
    return getattr(function, "__qualname__", function.__name__)


def line_of_frame(frame: FrameType | None) -> str:
    """Returns file and line of the innermost calling code outside of installed libraries; empty if there is none."""
    while frame is not None and _is_installed(frame.f_code.co_filename, frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}:"


@cache
def _is_installed(file: str, module: str) -> bool:
    return (
        "site-packages" in file
        or file.startswith(("<", sys.base_prefix))
        or bool(library_of(module))
        or module in sys.stdlib_module_names
    )
