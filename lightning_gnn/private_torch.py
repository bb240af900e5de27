"""The private names of torch that the package uses, read in this file only.

Tested with torch 2.13.0, alone and with the lowest versions in constraints-lowest.txt; `tests/test_private_names.py` checks that
the names are there, and that no other file has any.
"""

# ruff: noqa: F401  names for other files

from __future__ import annotations

from functools import partial
from operator import attrgetter

import torch
from torch._C import TensorBase
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverloadPacket
from torch.autograd import profiler
from torch.autograd.graph import _engine_run_backward as run_backward
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as AnyInstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_map_only, tree_unflatten

VERSION = "_version"
version_counter = attrgetter(VERSION)
"""How often a tensor has been changed in place; not of one that was made in inference mode."""

base_of = attrgetter("_base")
"""The tensor that a tensor is a view of, or None."""

storage_id = attrgetter("_cdata")
"""The number of a storage, also where it has no memory."""

make_wrapper = torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass, without memory."""

parse_to = torch._C._nn._parse_to
"""What the arguments of ``Tensor.to`` say: device, dtype, non_blocking, memory format."""

graph_task = torch._C._current_graph_task_id
"""The number of the backward that this thread is in, or -1."""

profiler_is_on = partial(attrgetter("_is_profiler_enabled"), profiler)
"""Whether a profiler is active."""

FORWARD_CLASS = "_forward_cls"
"""Of a node of autograd: the user's ``autograd.Function``."""

OPERATOR = "_opoverload"
"""Of a function of ``torch.library.custom_op``: its operator."""

MODULES = "_modules"
"""Of a module: its parts, by name."""

LOAD_HOOKS = "_load_state_dict_pre_hooks"
"""Of a module: what is called before it is loaded."""

hooks_of_calls = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The hooks that see calls of a module, forward and backward."""

hooks_on_gradient = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""The hooks of a parameter that are called with its gradient, and with itself; each a dict, or None."""

input_check = attrgetter("_check_input_dim")
"""What a norm says of inputs with other dimensions than it takes."""

default_store = attrgetter("distributed_c10d._get_default_store")
"""Of :mod:`torch.distributed`: returns the store of the default group."""

make_group = attrgetter("distributed_c10d._new_process_group_helper")
"""Of :mod:`torch.distributed`: makes a group of processes, whether there is a default group or not."""

call_counter = attrgetter("_get_sequence_number_for_group")
"""Of a group of processes: returns how many calls there were."""

barrier_of_agents = attrgetter("_barrier_nonblocking")
"""Of torch elastic's ``utils.store``: tells other agents that one has come."""

end_of_agents = attrgetter("_TERMINAL_STATE_SYNC_ID")
"""Of torch elastic's ``agent.server.api``: where agents meet at their end."""
