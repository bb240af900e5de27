"""Process groups and small control messages. Only ``comm/`` imports torch.distributed."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn.comm.call import Call, Step, known_call
from lightning_gnn.comm.listening import gloo_beside, meeting_store
from lightning_gnn.comm.processes import current_progress, meet
from lightning_gnn.comm.shared_memory import SharedMemory, machine_key
from lightning_gnn.comm.traffic import span
from lightning_gnn.comm.transport import Buffers, ProcessTransport, Transport
from lightning_gnn.comm.watchdog import GROUP_MARGIN_S, CommunicationError, PeerError, Watchdog
from lightning_gnn.devices import backend_of, copy_to_host
from lightning_gnn.private_torch import call_counter, default_store
from lightning_gnn.registry import feature, wrap_transport

T = TypeVar("T")

# One rendezvous store per process and address. It outlives the groups, each of which has its own prefix. A rank in its next `fit`
# therefore never uses a store that rank 0 is about to close.
_stores: dict[tuple[str, str, int], dist.Store] = {}
_groups_made: Counter[tuple[str, str, int]] = Counter()
_waits: Counter[tuple[str, str, int]] = Counter()


@contextmanager
def no_process_group() -> Iterator[None]:
    """Context manager that hides the process group: collectives raise at once instead of waiting for other ranks."""
    before = dist.GroupMember.WORLD
    dist.GroupMember.WORLD = None
    try:
        yield
    finally:
        dist.GroupMember.WORLD = before


def available_backends() -> dict[str, bool]:
    """Returns the availability of each torch backend by name."""
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}


def num_ranks() -> int:
    """Returns the number of ranks of the default process group: 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def next_store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Returns the store for the next process group of these ranks; all ranks call it equally often.

    A rank that replaces a lost rank calls it for the group that the other ranks have already made.

    Raises:
        RuntimeError: the rendezvous timed out.
    """
    key = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], size)
    if key not in _stores:
        began = time.monotonic()
        try:
            _stores[key] = meeting_store(rank, size, timeout)
        except Exception as error:
            kind = CommunicationError if current_progress().outlives_others else RuntimeError
            raise kind(_why_not_met(error, rank, size, key, time.monotonic() - began)) from error
    _groups_made[key] += 1
    # torchrun keeps its store when it restarts the ranks, and with it the addresses of the ended ranks.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"lightning_gnn/{attempt}/{_groups_made[key]}", _stores[key])


def gather_numbers(rank: int, size: int, timeout: timedelta, number: int) -> list[int]:
    """Returns the numbers of all ranks in rank order, before they have a process group."""
    store = next_store(rank, size, timeout)
    store.set(f"{rank}", f"{number}")
    store.wait([f"{peer}" for peer in range(size)], timeout)
    return [int(store.get(f"{peer}")) for peer in range(size)]


def forget_stores() -> None:
    """Forget the stores of this process: ranks that continue without a lost one meet in another, perhaps at an equal port."""
    for each in (_stores, _groups_made, _waits):
        each.clear()


def _why_not_met(error: Exception, rank: int, size: int, key: tuple[str, str, int], waited_s: float) -> str:
    """Returns an error message for a failed rendezvous."""
    place = f"{key[0]}:{key[1]}"
    if rank == 0 and "EADDRINUSE" in str(error):
        return (
            f"Rank 0 cannot listen at {place}, where ranks meet: another process does (address in use). Set MASTER_PORT to a "
            "free port, or leave it out where this package starts the ranks."
        )
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    return (
        f"Rank {rank} of {size} could not meet the others at {place} in {waited_s:.0f} s ({said}). Are all ranks started, with "
        "the same MASTER_ADDR and MASTER_PORT, and does no other program listen there?"
    )


def _meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Wait for all ranks of a new group; raises CommunicationError if ranks are missing after the timeout."""
    try:
        meet(store, rank, size, machine_key())
    except dist.DistStoreError:
        absent = [str(peer) for peer in range(size) if not store.check([f"process/{peer}"])]
        raise CommunicationError(
            f"Rank {rank} has waited {timeout.total_seconds():.0f} s for rank(s) {', '.join(absent)}, which have not come to "
            "this call. The deadline is the argument `timeout` of the strategy. Look at their output first: each may have "
            "stopped, be slower than the deadline, or have taken another branch of the code."
        ) from None


def wait_for_all(rank: int, size: int, timeout: timedelta) -> None:
    """Wait until all ranks of this process's last run have called it; needs no process group.

    Without effect in a process that was not a rank, for example a process that started ranks. Ranks that outlive others return
    if one is lost.

    Raises:
        RuntimeError: the wait timed out, or rank 0, which keeps the store, has ended.
    """
    key = (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), size)
    if key not in _stores:
        return
    _waits[key] += 1
    store = dist.PrefixStore(f"lightning_gnn/waits/{_waits[key]}", _stores[key])
    try:
        # Two phases: rank 0 ends its store only when no other rank uses it any more.
        for name in ("come", "gone"):
            if store.add(name, 1) == size:
                store.set(f"all {name}", "")
            if name == "come" or rank == 0:
                store.wait([f"all {name}"], timeout)
    except RuntimeError as error:
        if current_progress().outlives_others:
            return  # the next call of the Trainer continues without the lost rank
        raise RuntimeError(f"Rank {rank} waited for the other ranks of the last run, which did not all come: {error}") from error


def is_about_peers(error: BaseException) -> bool:
    """Returns whether an error only reports that other ranks are gone or late."""
    if isinstance(error, (CommunicationError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "TCPStore"))


class World:
    """All ranks of a run: the default process group (for Lightning and torchmetrics) and a separate group for graph traffic.

    Args:
        rank: global rank of this process.
        size: number of ranks.
        device: device of this rank; selects the backend, see :func:`~lightning_gnn.devices.backend_of`.
        timeout: maximum wait for another rank; process groups have a slightly longer timeout.
        shared_memory: whether CPU ranks of one machine communicate through shared memory.

    Attributes:
        step: current step.
        calls: number of exchanges that each layer has started in this step, by layer name.

    Raises:
        RuntimeError: a process group of another size exists already, or the rendezvous timed out.
    """

    collectives_s = 0.0
    """Seconds that this rank has spent in all-reduce and all-gather operations so far, including waits."""
    stand_ins = False
    """Whether ranks are threads of one process that simulate ranks on any machines."""
    buffers = Buffers
    """Factory of receive buffer pools on a device."""
    _watchdog = Watchdog
    _waited_s = 0.0

    def __init__(self, rank: int, size: int, device: torch.device, timeout: timedelta, shared_memory: bool = True) -> None:
        self.rank, self.size, self.device, self.timeout = rank, size, device, timeout
        self.step, self.calls = Step(), Counter[str]()
        self.watch = self._watchdog(rank, size, timeout.total_seconds())
        self.backend = backend_of(device)
        self._owns_default = not dist.is_initialized()
        if not self._owns_default and dist.get_world_size() != size:
            raise RuntimeError(
                f"A process group of {dist.get_world_size()} ranks exists already, but this Trainer needs {size}. "
                "End the other one first with torch.distributed.destroy_process_group(), or set devices to that number."
            )
        self.closed, self._waited_s = False, 0.0
        self.graph_group, self.host_group, self.gradient_group = None, None, None
        self._helper, self._memory, self._ranks = None, None, None
        try:
            self._connect(shared_memory)
        except BaseException:
            self.close()
            raise

    graph_group: Any
    host_group: Any
    gradient_group: Any
    _helper: Any
    _memory: SharedMemory | None
    _ranks: Any

    def _connect(self, shared_memory: bool) -> None:
        """Connect the ranks."""
        rank, size, device, timeout = self.rank, self.size, self.device, self.timeout
        if self._owns_default:
            store = self._store()
            if size > 1:
                _meet(store, rank, size, timeout)
            with self._beside_others():
                dist.init_process_group(
                    self.backend,
                    store=store,
                    rank=rank,
                    world_size=size,
                    timeout=self.group_timeout,
                    device_id=device if self.backend != "gloo" else None,
                )
        self.graph_group = self.new_group(self.backend)
        # On the CPU: control messages do not wait for a device.
        self.host_group = self.new_group("gloo") if self.backend != "gloo" else None
        if size > 1 and self.backend != "gloo":
            # A collective connects all ranks; some ranks may have no messages in the first exchange. A user's default group may
            # have no device_id, and NCCL then connects at the first message.
            dist.all_reduce(torch.zeros(1, device=device), group=self.graph_group)
        if size > 1:
            self._helper = feature("RankHelper")(rank, self._share, timeout.total_seconds())
            shared: Any = default_store(dist)()
            name = f"lightning_gnn/watchdog/{self.graph_group.group_name}"
            abort = None if self.backend == "gloo" else self._abort
            self.watch.start(dist.PrefixStore(name, shared.clone()), call_counter(dist.group.WORLD), self._helper.tell, abort)
        if shared_memory and size > 1 and device.type == "cpu":
            self._memory = self._make_memory()
        hosts = None
        if self.host_group is not None:
            hosts = ProcessTransport(size, self.host_group, None, self.watch, torch.device("cpu"))
        self._ranks = ProcessTransport(size, self.graph_group, self._memory, self.watch, device, hosts, rank)
        self.transport: Any = wrap_transport(self._ranks)
        apart = size > 1 and not self._ranks.all_local
        self.gradient_group = self.new_group(self.backend) if apart else None

    def _make_memory(self) -> SharedMemory:
        return SharedMemory(self.rank, self.all_gather_object, self.watch)

    @contextmanager
    def shared_failures(self, message: str) -> Iterator[None]:
        """Context manager that raises on all ranks if its body fails on one, because the other ranks would wait."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        raise_together(self, failure, message)

    def begin_step(self, step: Step) -> None:
        """Start another step and reset the numbering of exchanges."""
        self.step = step
        self.calls.clear()

    def call(self, layer: str) -> Call:
        """Returns the identifier of the next forward exchange of a layer in this step."""
        self.calls[layer] += 1
        return known_call(layer, self.calls[layer] - 1)

    @property
    def is_connected(self) -> bool:
        """Whether collectives are available: not inside :func:`no_process_group`."""
        return dist.is_initialized()

    @property
    def everyone(self) -> Any:
        """Default process group of all ranks."""
        return dist.group.WORLD

    def ranks_here(self) -> list[int]:
        """Returns the ranks of this machine, including this rank; all ranks call it."""
        hosts = self.all_gather_object(machine_key() or socket.gethostname())
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]

    def wrap_transport(self, wrapper: Callable[[Transport], Transport]) -> None:
        """Replace the transport of rows by ``wrapper(transport)``."""
        self.transport = wrapper(self.transport)

    def _beside_others(self) -> AbstractContextManager[None]:
        return gloo_beside("localhost" if self.size == 1 else os.environ.get("MASTER_ADDR", ""))

    @property
    def group_timeout(self) -> timedelta:
        """Timeout of process groups, longer than the deadline of the watchdog."""
        return self.timeout + timedelta(seconds=GROUP_MARGIN_S)

    def _share(self, text: str) -> str:
        """Returns the text of rank 0."""
        shared = [text]
        dist.broadcast_object_list(shared, 0, self.host_group or self.graph_group)
        return shared[0]

    def new_group(self, backend: str, ranks: Sequence[int] | None = None) -> Any:
        """Returns a new process group of `ranks`, by default of all; called by all ranks."""
        with self._beside_others():
            return dist.new_group(ranks, timeout=self.group_timeout, backend=backend)

    def global_rank(self, rank: int) -> int:
        """Returns the rank among all ranks of the run."""
        return rank

    def _group_of(self, tensor: Tensor) -> Any:
        """Returns the group for a tensor: CPU tensors of runs on devices have their own; None for the default group."""
        return self.host_group if tensor.device.type == "cpu" else None

    def _store(self) -> dist.Store:
        return dist.HashStore() if self.size == 1 else next_store(self.rank, self.size, self.timeout)

    @property
    def waited_s(self) -> float | None:
        """Seconds that this rank has waited for other ranks so far; None on devices, where streams wait."""
        if self.backend != "gloo":
            return None
        return self._waited_s + self._ranks.waited_s + (0.0 if self._memory is None else self._memory.waited_s)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Context manager that counts the time of a torch collective as waiting: most of it is."""
        began = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - began

    @contextmanager
    def all_take_part(self, operation: str) -> Iterator[None]:
        """Context manager of a collective operation that all ranks run in the same order; counts its time."""
        began = time.perf_counter()
        with self.watch.during(operation, RuntimeError, joint=True), span(operation):
            yield
        self.collectives_s += time.perf_counter() - began

    def all_reduce_(self, tensor: Tensor, operation: str = "Sum over ranks") -> Tensor:
        """Sum `tensor` over all ranks in place; the result is bit-identical on every rank. Errors name `operation`."""
        if self.size > 1:
            with self.all_take_part(operation):
                if self._ranks.all_local:
                    # In rank order, so that all ranks round equally.
                    parts = self._ranks.gather(tensor)
                    total = parts[0].clone()
                    for part in parts[1:]:
                        total += part
                    tensor.copy_(total)
                else:
                    with self._waiting():
                        dist.all_reduce(tensor, group=self._group_of(tensor))
        return tensor

    def start_all_reduce_(self, tensor: Tensor, operation: str) -> Callable[[], Any]:
        """Starts to sum `tensor` over all ranks in place; returns a function that waits.

        The all-reduce uses a separate group and overlaps with other messages. Between ranks of one machine, where copying is the
        work, the sum is computed in the wait.
        """
        if self.gradient_group is None:
            return partial(self.all_reduce_, tensor, operation)
        group = self.gradient_group if tensor.device.type == self.device.type else self.host_group
        with self.watch.during(operation, RuntimeError):
            request = dist.all_reduce(tensor, group=group, async_op=True)

        def wait() -> None:
            with self.all_take_part(operation), self._waiting():
                request.wait()

        return wait

    def all_gather(self, tensor: Tensor, operation: str = "Gathering from all ranks") -> Tensor:
        """Returns the equal-shaped tensors of all ranks in rank order, ``[P, *shape]``, on every rank."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        with self.all_take_part(operation):
            if self._ranks.all_local:
                return torch.stack(self._ranks.gather(tensor))
            out = tensor.new_empty((self.size, *tensor.shape))
            with self._waiting():
                dist.all_gather(list(out.unbind(0)), tensor.contiguous(), group=self._group_of(tensor))
            return out

    def to_host(self, tensor: Tensor, operation: str) -> Tensor:
        """Returns a copy of a tensor on the CPU, once its device has computed it; errors name `operation`.

        Raises:
            CommunicationError: the device has not computed it before the timeout, because it waits for other ranks.
        """
        if tensor.device.type == "cpu":
            return tensor
        with self.watch.during(operation, TimeoutError):
            return copy_to_host(tensor, self.timeout.total_seconds())

    def all_gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns the rows of all ranks in rank order, ``[sum(counts), ...]``, on every rank; rank r has ``counts[r]``."""
        if self.size == 1:
            return rows
        # As bytes, because backends do not support every dtype. One broadcast per rank, because counts differ.
        out = rows.new_empty((sum(counts), *rows.shape[1:]))
        for source, piece in enumerate(out.split(list(counts))):
            if source == self.rank:
                piece.copy_(rows)
            if piece.numel():
                with self.all_take_part(f"Gathering node rows of rank {source}"):
                    dist.broadcast(piece.view(-1).view(torch.uint8), self.global_rank(source), group=self._group_of(piece))
        return out

    def scatter_object(self, values: Sequence[T] | None, source: int = 0) -> T:
        """Returns this rank's entry of the picklable values that `source` passes for all ranks; the other ranks pass None."""
        if self.size == 1:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        with self.all_take_part(f"Values of rank {source} for each rank"):
            dist.scatter_object_list(mine, None if values is None else [*values], self.global_rank(source), group=self.host_group)
        return mine[0]

    def all_gather_object(self, value: T) -> list[T]:
        """Returns the picklable values of all ranks in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.all_take_part("Gathering values"), self._waiting():
            dist.all_gather_object(values, value, group=self.host_group)
        return values

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Returns the value of `source` on every rank."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        with self.all_take_part(f"A value of rank {source}"), self._waiting():
            dist.broadcast_object_list(values, self.global_rank(source), group=self.host_group)
        return values[0]

    def broadcast_number(self, value: int, operation: str) -> int:
        """Returns the value of rank 0, by the broadcast on the default group that Lightning uses to stop a run."""
        number = torch.tensor([value], dtype=torch.int64, device=self.device)
        with self.all_take_part(operation), self._waiting(), self.watch.waiting(0 if self.rank else None):
            request = dist.broadcast(number, 0, async_op=True)
            try:
                request.wait(*([self.timeout] if self.backend == "gloo" else []))  # on devices the host waits below
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    raise
                waited = f"for {self.timeout.total_seconds():.1f} s"
                if self.rank:
                    raise PeerError(0, f"nothing from rank 0 {waited}", astray=True) from None
                raise RuntimeError(f"timed out: another rank has not called this operation {waited}") from None
        return int(self.to_host(number, operation))

    def broadcast_tensors_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite `tensors` with the tensors of `source`, on every rank."""
        if self.size == 1:
            return
        with self.all_take_part(f"Tensors of rank {source}"):
            for tensor in tensors:
                # As bytes: integer and bool buffers are sent, too.
                flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
                if flat.numel():
                    dist.broadcast(flat, self.global_rank(source), group=self._group_of(flat))
                    tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))

    def barrier(self, name: str = "Barrier") -> None:
        """Wait until all ranks have called it."""
        if self.size > 1:
            with self.all_take_part(name), self._waiting():
                dist.barrier(group=self.host_group)

    def _abort(self) -> None:
        """Abort the communicators of a device: their operations would wait for a lost rank, and the host for the device."""
        groups: Any = self.graph_group, self.gradient_group, dist.group.WORLD
        for group in groups:
            with suppress(RuntimeError, AttributeError):  # aborted already; before torch 2.6
                group.abort()

    def close(self) -> None:
        """Destroy the groups that this object made; a default group that existed before stays."""
        if self.closed:
            return
        self.closed = True
        self.watch.stop()
        if self._memory is not None:
            self._memory.close()
        if dist.is_initialized() and self._owns_default:
            dist.destroy_process_group()
        elif dist.is_initialized():
            for group in (self.graph_group, self.gradient_group, self.host_group):
                if group is not None:
                    dist.destroy_process_group(group)
        # The threads of a group end with its last reference, and tensors of the user may refer to this object.
        if self._ranks is not None:
            self._ranks.close()
        self.graph_group = self.gradient_group = self.host_group = None
        if self._helper is not None:
            self._helper.close(sys.exc_info()[1])


def raise_together(world: World, failure: Exception | None, message: str) -> None:
    """Raises on all ranks if one rank has a failure, because the other ranks would wait."""
    failures = world.all_gather_object(failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {found}" for rank, found in enumerate(failures) if found]
    if failed:
        raise RuntimeError(f"{message}, see {'; '.join(failed)}")
