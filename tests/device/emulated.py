"""A second device in Python alone, "emulated", for tests of what differs from the CPU; and Lightning's accelerator for it.

Its tensors hold CPU memory, but mixing them with tensors of the CPU raises, as does reading them as numpy arrays; it draws
random numbers from a generator of its own, and does in another order each time what CUDA does atomically. What a program that
runs on CUDA would wait for (:data:`syncs`) and the largest tensor that an operation made (:data:`made`) are recorded.
"""

from __future__ import annotations

import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
import torch.utils.checkpoint
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from lightning_gnn.kernels import CSR, loops
from lightning_gnn.kernels.run import BACKENDS

NAME = "emulated"

MEMORY = 10**10
"""Bytes of the device; all are free."""

recording = False
syncs: Counter[tuple[str, str]] = Counter()
"""How often the host would have waited for the device while recording: by what, and where in our code or the user's."""

capturing: CUDAGraph | None = None

made = {"largest": 0}
"""Bytes of the largest tensor that an operation made."""

_MIXES = {
    "copy_",
    "_to_copy",
    "_copy_from",
    "index",
    "_unsafe_index",
    "index_put_",
    "_index_put_impl_",
    "set_",
    "is_same_size",
}
_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "masked_select",
    "equal",
}


@contextmanager
def recorded() -> Iterator[Counter[tuple[str, str]]]:
    """Counts while open."""
    global recording
    syncs.clear()
    recording = True
    try:
        yield syncs
    finally:
        recording = False


def _where() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/device/" not in frame.filename]
    for package in ("/lightning_gnn/", "/site-packages/torch_geometric/", "/site-packages/"):
        for frame in reversed(frames):
            if package in frame.filename and "/site-packages/torch/" not in frame.filename:
                return f"{frame.filename.rpartition(package)[2]}:{frame.lineno}"
    return "elsewhere"


class CUDAGraph:
    """What :func:`graph` has captured: operations that run again, in the same memory, with :meth:`replay`.

    As on CUDA, nothing runs while it is captured: what was changed is changed back, and new tensors contain NaN until the first
    replay.
    """

    replays = 0

    def __init__(self) -> None:
        self.operations: list[tuple[str, Callable[[], Any]]] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made: list[torch.Tensor] = []

    def note(self, name: str, run: Callable[[], Any], changed: Iterable[torch.Tensor]) -> None:
        """Notes an operation before it runs, and raws that it changes."""
        self.operations.append((name, run))
        self._before += [(raw, raw.clone()) for raw in changed]

    def keep(self, raws: Iterable[torch.Tensor]) -> None:
        self._made += raws

    def undo(self) -> None:
        for raw, before in reversed(self._before):
            raw.copy_(before)
        for raw in self._made:
            raw.fill_(float("nan") if raw.is_floating_point() else 0)
        self._before, self._made = [], []

    def replay(self) -> None:
        CUDAGraph.replays += 1
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for _, run in self.operations:
                run()


@contextmanager
def graph(into: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    """Captures the operations of the device in its context; raises for operations that a graph cannot contain, as CUDA does."""
    global capturing
    assert capturing is None, "a stream is capturing already"
    state, capturing = _get_state(), into
    try:
        yield
    finally:
        capturing = None
        with torch._C.DisableTorchFunction(), torch.no_grad():
            into.undo()
        _state[0] = state


def _check_capture(function: Any, name: str, args: Any, kwargs: Any, others: list[Any], to_device: bool) -> None:
    """Raises for tensors of the CPU, except numbers that an operation reads, and for sizes that depend on data."""
    moves = name in ("_to_copy", "copy_", "_copy_from", "index", "index_put_", "_index_put_impl_", "_unsafe_index")
    if to_device and any(each.numel() and (each.dim() or moves) for each in others):
        _refuse(f"{function} reads a tensor of the CPU")
    if torch.Tag.dynamic_output_shape in function.tags and name not in ("index", "_unsafe_index", "repeat_interleave"):
        _refuse(f"the size of {function} depends on data")


def _written(function: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the raws of the arguments that an operation changes."""
    named = {each.name: value for each, value in zip(function._schema.arguments, args)} | kwargs
    found = [
        named.get(each.name) for each in function._schema.arguments if each.alias_info is not None and each.alias_info.is_write
    ]
    return [each for each in tree_flatten(found)[0] if isinstance(each, torch.Tensor)]


def _captured(function: Any, name: str, args: Any, kwargs: dict[str, Any], draws: Any, compute: Callable[[], Any]) -> Any:
    """Runs an operation on raws, and notes it."""
    assert capturing is not None
    changed = _written(function, args, kwargs)
    given = {each.untyped_storage().data_ptr() for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)}
    target: list[Any] = []

    def again() -> None:
        with draws(), torch.no_grad():
            for into, value in zip(target, [each for each in tree_flatten(compute())[0] if isinstance(each, torch.Tensor)]):
                if into is not None:
                    into.copy_(value)

    capturing.note(name, again, changed)
    with draws():
        out = compute()
    for each in tree_flatten(out)[0]:
        if isinstance(each, torch.Tensor):
            is_new = each.untyped_storage().data_ptr() not in given and not function._schema.is_mutable
            target.append(each if is_new and each.numel() else None)
    if name.startswith(("empty", "new_empty")):
        capturing.operations.pop()
    elif not changed and not any(each is not None for each in target) and target:
        capturing.operations.pop()  # a view
    capturing.keep(each for each in target if each is not None)
    return out


class DeviceTensor(torch.Tensor):
    """A tensor of the device; `raw` is its memory."""

    raw: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> DeviceTensor:
        strided = raw.layout == torch.strided
        places: Any = {"strides": raw.stride(), "storage_offset": raw.storage_offset()} if strided else {}
        made = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), dtype=raw.dtype, device=torch.device(NAME, 0), **places
        )
        made.raw = raw
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.raw})"

    def __format__(self, spec: str) -> str:
        return format(self.raw.item() if self.dim() == 0 else self.raw, spec)

    def __reduce_ex__(self, protocol: Any) -> Any:  # arrives as a tensor of the CPU
        return self.raw.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                copied = DeviceTensor(self.raw.clone())
            copied.requires_grad_(self.requires_grad)
            is_parameter = isinstance(self, torch.nn.Parameter) or getattr(self, "_is_param", False)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        return memo[id(self)]

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        _record("tolist")
        return self.raw.tolist()

    def record_stream(self, stream: Any) -> None:
        Stream.counts["recorded"] += 1

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _refuse(what: str) -> None:
    if capturing is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def _record(what: str) -> None:
    _refuse(f"{what} waits for the device")
    if recording:
        syncs[what, _where()] += 1


_state: list[Any] = [None]


def _seed(seed: int) -> None:
    _refuse("random numbers are seeded")
    generator = torch.Generator()
    generator.manual_seed((int(seed) + 12345) % (1 << 63))
    _state[0] = generator.get_state()


@contextmanager
def _own_numbers() -> Iterator[None]:
    if _state[0] is None:
        _seed(0)
    before = torch.get_rng_state()
    torch.set_rng_state(_state[0])
    try:
        yield
    finally:
        _state[0] = torch.get_rng_state()
        torch.set_rng_state(before)


def _numbers(function: Any, kwargs: dict[str, Any]) -> Any:
    drawn = torch.Tag.nondeterministic_seeded in function.tags and kwargs.get("generator") is None
    return _own_numbers() if drawn else nullcontext()


def raw_of(tensor: Any) -> Any:
    return tensor.raw if isinstance(tensor, DeviceTensor) else tensor


def _waits(name: str, args: Any, kwargs: dict[str, Any], to_device: bool) -> bool:
    if name in _WAITS or (name == "_to_copy" and kwargs.get("device") is not None and not to_device):
        return True
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("index", "index_put_", "_index_put_impl_"):
        # On CUDA a number that is assigned is copied from the host.
        return any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in args[1]) or (
            name != "index" and args[2].dim() == 0
        )
    return False


def _in_any_order(name: str, args: Any) -> Any:
    """Has what CUDA does atomically done in another order: floats are rounded otherwise, another of several values is kept."""
    if name in ("scatter_add", "scatter_add_", "index_add", "index_add_"):
        into, dim, index, values = args
        along = dim if index.dim() > 1 else 0
        order = torch.from_numpy(np.random.default_rng().permutation(index.size(along)))
        return into, dim, index.index_select(along, order), values.index_select(dim, order)
    if name in ("index_put_", "_index_put_impl_") and not (len(args) > 3 and args[3]):
        into, [*where], values, *others = args
        ids = [each for each in where if each is not None]
        one = len(ids) == 1 and where[0] is not None and ids[0].dtype != torch.bool
        if one and values.dim() == into.dim() and len(values) == len(ids[0]):
            return into, [ids[0].flip(0), *where[1:]], values.flip(0), *others
    return args


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = function._schema.name.split("::")[1]
    if (
        torch.is_inference_mode_enabled()
        and name not in ("matmul", "einsum", "linear")
        and function._can_decompose()
        and (found := function.decompose(*args, **kwargs)) is not NotImplemented
    ):
        return found
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    ours = [each for each in tensors if isinstance(each, DeviceTensor)]
    # A number of the CPU may be read, but not changed in place.
    changed = args[0] if name.endswith("_") else None
    others = [each for each in tensors if not isinstance(each, DeviceTensor) and (each.dim() > 0 or each is changed)]
    if ours and others and name not in _MIXES:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! ({function})"
        )
    device = kwargs.get("device")
    to_device = torch.device(device).type == NAME if device is not None else bool(ours)
    if name in ("copy_", "_copy_from"):
        into, source = args[:2] if name == "copy_" else args[1::-1]
        if isinstance(source, DeviceTensor) and not isinstance(into, DeviceTensor) and source.numel():
            _record("copy to the host")
        _copy(into, source)
        return args[0] if name == "copy_" else args[1]
    if ours and _waits(name, args, kwargs, to_device):
        _record(name)
    raw_args, raw_kwargs = tree_map(raw_of, args), tree_map(raw_of, _on_cpu(kwargs))

    def compute() -> Any:
        return function(*(_in_any_order(name, raw_args) if ours else raw_args), **raw_kwargs)

    def draws() -> Any:
        return _numbers(function, raw_kwargs) if to_device else nullcontext()

    if capturing is not None and (to_device or ours):
        _check_capture(function, name, args, kwargs, [each for each in tensors if not isinstance(each, DeviceTensor)], to_device)
        # Numbers of the CPU are read once.
        numbers = {id(each): each.clone() for each in others if each.dim() == 0}
        raw_args = tree_map(lambda each: numbers.get(id(each), each), raw_args)
        out = _captured(function, name, raw_args, raw_kwargs, draws, compute)
    else:
        with draws():
            out = compute()
    if not to_device or name == "_local_scalar_dense":
        return out

    def wrap(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DeviceTensor):
            return tensor
        if tensor.layout == torch.strided and not function._schema.is_mutable and not tensor._is_view():
            made["largest"] = max(made["largest"], tensor.nbytes)
        return DeviceTensor(tensor)

    out = tree_map(wrap, out)
    everything = [raw_of(each) for each in tree_flatten((out, args))[0] if isinstance(each, DeviceTensor)]
    if any(each.layout != torch.strided for each in everything):
        return out
    try:
        return return_and_correct_aliasing(function, args, kwargs, out)
    except Exception:
        if function._schema.is_mutable:
            return args[0]
        return out


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    moved = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if moved.get("device") is not None:
        moved["device"] = torch.device("cpu")
    return moved


def _random_state(device: Any = None) -> torch.Tensor:
    _refuse("random state")
    return _get_state()


def _set_random_state(state: torch.Tensor, device: Any = None) -> None:
    _refuse("random state")
    _state[0] = state.clone()


def _get_state() -> torch.Tensor:
    if _state[0] is None:
        _seed(0)
    return _state[0].clone()


class Event:
    """Of a device that has done everything as soon as it is told, or never comes to it, while `stuck`."""

    stuck = False

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()
        if stream is not None:
            self.copies = list(stream.copies)

    def synchronize(self) -> None:
        _record("synchronize an event")

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later._at - self._at)

    def query(self) -> bool:
        _refuse("an event is queried")
        return not Event.stuck


class Stream:
    """One beside the device's own: what the CPU gives to it arrives when an event recorded after that has been waited for. Until
    then there are NaN and zeros in its place.

    Attributes:
        counts: tensors copied, and tensors whose memory another stream has a say in, of all streams.
    """

    counts: ClassVar[Counter[str]] = Counter()
    here = threading.local()

    def __init__(self, device: Any = None) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def wait_event(self, event: Event) -> None:
        for into, values in event.copies:
            into.copy_(values)

    def __enter__(self) -> Stream:
        Stream.here.stream = self
        return self

    def __exit__(self, *_: Any) -> None:
        Stream.here.stream = None


_OWN_STREAM = Stream()


def _copy(into: Any, source: Any) -> None:
    stream = getattr(Stream.here, "stream", None)
    if capturing is not None and isinstance(into, DeviceTensor):
        if not isinstance(source, DeviceTensor) and source.numel():
            _refuse("a copy reads a tensor of the CPU")
        to, values = into.raw, raw_of(source)
        capturing.note("copy_", lambda: to.copy_(values), [to])
    if stream is None or isinstance(source, DeviceTensor) or not isinstance(into, DeviceTensor):
        raw_of(into).copy_(raw_of(source))
        return
    Stream.counts["copied"] += 1
    stream.copies.append((into.raw, source.clone()))
    into.raw.fill_(float("nan") if into.dtype.is_floating_point else 0)


def _module() -> Any:
    """Returns what is at ``torch.cuda`` for CUDA."""
    module = types.ModuleType(f"torch.{NAME}")
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: _record("synchronize"),
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "get_rng_state": _random_state,
        "set_rng_state": _set_random_state,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: capturing is not None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "empty_cache": lambda: None,
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: stream,
        "current_stream": lambda device=None: _OWN_STREAM,
        "device": lambda device: nullcontext(),
    }
    vars(module).update(functions, _initialized=True)
    return module


def _factories() -> Iterator[tuple[str, Any]]:
    skipped = ("sparse", "quantized", "cudnn", "mkldnn", "nested", "_make_dep_token", "from_file")
    for full in torch._C._dispatch_get_all_op_names():
        if not full.startswith("aten::") or any(each in full for each in skipped):
            continue
        name, _, overload = full.removeprefix("aten::").partition(".")
        try:
            operator = getattr(getattr(torch.ops.aten, name), overload or "default")
        except (AttributeError, RuntimeError):
            continue
        arguments, returns = operator._schema.arguments, operator._schema.returns
        makes = len(returns) == 1 and "Tensor" in str(returns[0].type)
        on_device = any(each.name == "device" for each in arguments)
        if makes and on_device and not any("Tensor" in str(each.type) for each in arguments):
            yield full.removeprefix("aten::"), operator


class EmulatedAccelerator(Accelerator):
    """``Trainer(accelerator="emulated")``; each rank has the device for itself."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return list(range(int(devices))) if isinstance(devices, (int, str)) else devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, 0) for _ in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


def _loops(name: str, arguments: tuple[Any, ...]) -> None:
    """Runs a loop of the CPU in the device's memory, in place of Triton's; on 16-bit numbers in float32."""
    first, *others = arguments
    over_edges = isinstance(first, CSR)
    raws = [raw_of(each) for each in (first.indptr if over_edges else first, *others)]
    short = [isinstance(each, torch.Tensor) and each.dtype in (torch.bfloat16, torch.float16) for each in raws]
    wide = [each.float() if of_16_bits else each for each, of_16_bits in zip(raws, short)]

    def run() -> None:
        for raw, found, of_16_bits in zip(raws, wide, short):
            if of_16_bits:
                found.copy_(raw)
        arrays = [each.detach().numpy() if isinstance(each, torch.Tensor) else each for each in wide]
        getattr(loops, name)(*arrays, 0, num_rows)
        for raw, found, of_16_bits in zip(raws, wide, short):
            if of_16_bits:
                raw.copy_(found)

    num_rows = first.num_rows if over_edges else len(first)
    if capturing is not None:
        capturing.note(name, run, [each for each in raws if isinstance(each, torch.Tensor)])
    run()


_library: list[Any] = []


def install() -> None:
    """Makes the device known to torch, to Lightning and to what runs kernels, in this process, for good."""
    if _library:
        return
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_module())
    library = torch.library.Library("aten", "IMPL")
    for name, operator in _factories():

        def make(*args: Any, operator: Any = operator, **kwargs: Any) -> DeviceTensor:
            moved = _on_cpu({**kwargs, "device": "cpu"})

            def draws() -> Any:
                return _numbers(operator, moved)

            def compute() -> Any:
                return operator(*args, **moved)

            if capturing is not None:
                tensor = _captured(operator, operator._schema.name.split("::")[1], args, moved, draws, compute)
            else:
                with draws():
                    tensor = compute()
            made["largest"] = max(made["largest"], tensor.nbytes)
            return DeviceTensor(tensor)

        try:
            library.impl(name, make, "PrivateUse1")
        except RuntimeError:  # there is one already
            continue

    def copy_from(source: Any, into: Any, non_blocking: bool = False) -> Any:
        _copy(into, source)
        return into

    library.impl("_copy_from", copy_from, "PrivateUse1")
    _library.append(library)
    torch.__future__.set_swap_module_params_on_conversion(True)
    AcceleratorRegistry.register(NAME, EmulatedAccelerator, override=True)
    BACKENDS[NAME] = _loops
