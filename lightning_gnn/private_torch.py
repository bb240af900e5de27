"""Private names of torch that the package uses, accessed only in this file.

Tested with torch 2.13.0, alone and with the lowest versions in constraints-lowest.txt; `tests/test_private_names.py` checks that
the names exist, and that no other file has any.
"""

# ruff: noqa: F401  names for other files

from __future__ import annotations

from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch._C import TensorBase
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverloadPacket
from torch.autograd import profiler
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as AnyInstanceNorm
from torch.overrides import _get_current_function_mode as current_function_mode
from torch.overrides import _pop_mode_temporarily as without_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_map_only, tree_unflatten

without_torch_functions = torch._C.DisableTorchFunction
"""Context manager in which torch calls neither modes nor subclasses."""

VERSION = "_version"
version_counter = attrgetter(VERSION)
"""Number of in-place changes of a tensor; not available for inference tensors."""

base_of = attrgetter("_base")
"""Base tensor of a view, or None."""

storage_id = attrgetter("_cdata")
"""Id of a storage, also without memory."""

copy_all = torch._foreach_copy_
"""Function that copies the second list of tensors into the first."""

_LISTS = "add add_ addcmul_ div_ lerp_ maximum_ mul mul_ neg sqrt"
FOREACH = SimpleNamespace(**{name: getattr(torch, f"_foreach_{name}") for name in _LISTS.split()})
"""Functions of lists of tensors, by the name of the function of a tensor."""

make_wrapper = torch.Tensor._make_wrapper_subclass
"""Function that makes a tensor of a subclass, without memory."""

parse_to = torch._C._nn._parse_to
"""Function that parses the arguments of ``Tensor.to``: device, dtype, non_blocking, memory format."""

graph_task = torch._C._current_graph_task_id
"""Function that returns the id of the backward pass of this thread, or -1."""

profiler_is_on = partial(attrgetter("_is_profiler_enabled"), profiler)
"""Function that returns whether a profiler is active."""

FORWARD_CLASS = "_forward_cls"
"""Attribute of an autograd node: the user's ``autograd.Function``."""

OPERATOR = "_opoverload"
"""Attribute of a function of ``torch.library.custom_op``: its operator."""

COMPILER = "torch._dynamo"
"""Module of ``torch.compile``, whose import is slow."""

ORIGINAL = "_orig_mod"
"""Attribute of the result of ``torch.compile(module)``: the module."""

compiled_call = attrgetter("_compiled_call_impl")
"""Function that ``Module.compile`` stores in a module; None for other modules."""

COMPILED_FUNCTION = "torch._functorch._aot_autograd.runtime_wrappers"
"""Module of the autograd functions of compiled code."""

_excluded = torch._C._dispatch_tls_local_exclude_set()


def autograd_in_operator() -> Any:
    """Context manager in an operator's implementation in which autograd records, as outside of operators."""
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _excluded)


def ordered_effect() -> Any:
    """Returns the effect of operators that a compiler must neither remove nor reorder; None if this torch has no effects."""
    try:
        from torch._library.effects import EffectType
    except ImportError:
        return None
    return EffectType.ORDERED


def optimized_module() -> Any:
    """Returns the class of the result of ``torch.compile(module)``; importing it is slow."""
    from torch._dynamo import OptimizedModule

    return OptimizedModule


def backend_of(context: Any) -> Any:
    """Returns the backend of ``torch.compile``, a function of a graph and its inputs, from its context ``dynamo_ctx``."""
    from torch._dynamo.eval_frame import innermost_backend

    return innermost_backend(context.callback)


def backend_without_code() -> Any:
    """Returns the backend ``"aot_eager"``, which needs no C++ compiler."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager


MODULES = "_modules"
"""Attribute of a module: its submodules, by name."""

TABLES = ("_parameters", "_buffers", MODULES)
"""Attributes of a module: its parameters, buffers and submodules, by name."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module: its hooks on calls."""

LOAD_HOOKS = "_load_state_dict_pre_hooks"
"""Attribute of a module: hooks called before it is loaded."""

hooks_of_calls = attrgetter(*HOOKS)
"""Hooks on calls of a module, forward and backward."""

hooks_on_gradient = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""Hooks of a parameter on its gradient, and on itself after accumulation; each a dict, or None."""

input_check = attrgetter("_check_input_dim")
"""Method of a norm that raises an error for inputs of unsupported dimensions."""

default_store = attrgetter("distributed_c10d._get_default_store")
"""Function of :mod:`torch.distributed`: returns the store of the default group."""

make_group = attrgetter("distributed_c10d._new_process_group_helper")
"""Function of :mod:`torch.distributed`: makes a process group, with or without a default group."""

call_counter = attrgetter("_get_sequence_number_for_group")
"""Method of a process group: returns the number of calls."""

barrier_of_agents = attrgetter("_barrier_nonblocking")
"""Function of torch elastic's ``utils.store``: signals the arrival of an agent at a barrier."""

end_of_agents = attrgetter("_TERMINAL_STATE_SYNC_ID")
"""Constant of torch elastic's ``agent.server.api``: barrier of the agents at their end."""
