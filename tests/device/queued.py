"""A process group over gloo with NCCL's rules, "queued", for tensors of the emulated device.

A communicator does one operation after another, and operations end later than they are started. A batch of sends and receives
ends when every peer has started its batch. Messages have no tags, and sizes must agree. A receive buffer contains NaN until the
wait for its message ends. A send buffer is read late, too.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import emulated
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

NAME = "queued"
DELAY_S = 0.001
LIMIT_S = 25.0

NEVER_RETURNS = "LIGHTNING_GNN_TEST_NEVER_RETURNS"
"""Set in the environment to "1": a wait for a peer that is gone does not raise; it holds the main thread and the interpreter
lock. Set to "abort": it ends when the communicator is aborted.
"""

ONE_QUEUE = "LIGHTNING_GNN_TEST_ONE_QUEUE"
"""Set in the environment: all communicators of a process share one queue, as kernels of a busy GPU may."""

counts: Counter[str] = Counter()
"""Operations that were started, by what they are; and "lazy connections": communicators that their first operation made."""


class _Queue:
    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None ends it
        self.aborted = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="queued").start()

    def _run(self) -> None:
        while (task := self.jobs.get()) is not None:
            job, done = task
            try:
                time.sleep(DELAY_S)
                job()
            except BaseException as error:
                if os.environ.get(NEVER_RETURNS):
                    _lost.set()
                    if os.environ[NEVER_RETURNS] == "abort":
                        self._end_when_aborted(error, done)
                    return
                done(error)
            else:
                done(None)


    def _end_when_aborted(self, error: BaseException, done: Callable[[BaseException], None]) -> None:
        """The operation that failed and those behind it end with an error once the communicator is aborted."""
        self.aborted.wait()
        done(error)
        while (task := self.jobs.get()) is not None:
            task[1](RuntimeError("communicator was aborted"))


_lost = threading.Event()


def never_return() -> None:
    """Holds the interpreter lock for ever; signals do not end it, either."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


_shared: list[_Queue] = []


def _queue() -> _Queue:
    if not os.environ.get(ONE_QUEUE):
        return _Queue()
    if not _shared:
        _shared.append(_Queue())
    return _shared[0]


class _Messages:
    """What waits for a batch of sends and receives."""

    def __init__(self) -> None:
        self._ended, self._error = threading.Event(), None

    def done(self, error: Any) -> None:
        self._error = error
        self._ended.set()

    def wait(self, timeout: Any = None) -> bool:
        while not self._ended.wait(0.1):
            if _lost.is_set() and os.environ[NEVER_RETURNS] == "1":
                never_return()
        if self._error is not None:
            raise RuntimeError(f"NCCL (emulated): {self._error}") from self._error
        return True


class QueuedGroup(dist.ProcessGroup):
    """The process group; `connected` tells whether its communicator has been made (with a device_id: at once)."""

    made = 0

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=LIMIT_S))
        self._queue, self._rank, self._size, self._calls = _queue(), rank, size, 0
        self._sent: Counter[tuple[bool, int]] = Counter()
        self.connected = False
        QueuedGroup.made += 1
        self._name = f"queued{QueuedGroup.made}"

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def getSize(self) -> int:
        return self._size

    size = getSize

    def rank(self) -> int:
        return self._rank

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def close(self) -> None:
        """Ends its threads."""
        if self._queue not in _shared:
            self._queue.jobs.put(None)
        self.gloo = None  # type: ignore[assignment]

    def abort(self) -> None:
        """Ends its operations with errors, if their peers are gone."""
        self._queue.aborted.set()

    def connect(self) -> None:
        """Make the communicator; every rank must call it."""
        if not self.connected:
            self.connected = True
            self.gloo.barrier(dist.BarrierOptions()).wait()

    def _raw(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, emulated.DeviceTensor):
            raise RuntimeError("No backend type associated with device type cpu")
        if not tensor.raw.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        return tensor.raw

    def _start(self, what: str, job: Callable[[], None], result: Any, changed: Any = ()) -> Any:
        self._calls += 1
        counts[what] += 1
        if not self.connected:
            counts["lazy connections"] += 1
        future: Any = Future()

        def run() -> None:
            self.connect()
            job()

        def done(error: BaseException | None) -> None:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(RuntimeError(f"NCCL (emulated) {what}: {error}"))

        if emulated.capturing is not None:
            emulated.capturing.note(what, job, changed)
        self._queue.jobs.put((run, done))
        return _create_work_from_future(future)

    # Collectives ##############################################################

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        raw = self._raw(tensors[0])
        options = opts or dist.AllreduceOptions()
        return self._start("allreduce", lambda: self.gloo.allreduce([raw], options).wait(), tensors, [raw])

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        raw = self._raw(tensors[0])
        return self._start("broadcast", lambda: self.gloo.broadcast([raw], opts).wait(), tensors, [raw])

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        into, mine = [self._raw(each) for each in outs[0]], self._raw(ins[0])

        def job() -> None:
            parts = [torch.empty_like(mine) for _ in into]
            self.gloo.allgather([parts], [mine]).wait()
            for out, part in zip(into, parts):
                out.copy_(part)

        return self._start("allgather", job, outs, into)

    def _allgather_base(self, out: Any, mine: Any, opts: Any = None) -> Any:
        into, raw = self._raw(out), self._raw(mine)

        def job() -> None:
            parts = [torch.empty_like(raw) for _ in range(self._size)]
            self.gloo.allgather([parts], [raw]).wait()
            into.view(self._size, -1).copy_(torch.stack([part.view(-1) for part in parts]))

        return self._start("allgather", job, out, [into])

    def barrier(self, opts: Any = None) -> Any:
        return self._start("barrier", lambda: self.gloo.barrier(dist.BarrierOptions()).wait(), [])

    # Point to point ###########################################################

    def batch(self, operations: Any) -> list[_Messages]:
        """Starts sends and receives as one operation: ``batch_isend_irecv``."""
        counts["batches"] += 1
        counts["messages"] += len(operations)
        if not self.connected:
            counts["lazy connections"] += 1
        messages: list[tuple[bool, torch.Tensor, int, int]] = []
        for each in operations:
            send, raw = each.op is dist.isend, self._raw(each.tensor)
            number = self._sent[send, each.peer]
            self._sent[send, each.peer] += 1
            raw = raw.view(-1).view(torch.uint8)
            if not send:
                if emulated.capturing is not None:
                    emulated.capturing.note("receive", lambda: None, [raw])
                raw.fill_(255)
            messages.append((send, raw, each.peer, number))
        work = _Messages()

        def together(tag: int, tensor_of: Callable[[int, bool], torch.Tensor]) -> None:
            started = []
            for place, (send, _, peer, number) in enumerate(messages):
                go = self.gloo.send if send else self.gloo.recv
                started.append(go([tensor_of(place, send)], peer, 4 * number + tag))
            for each in started:
                each.wait()

        def run() -> None:
            self.connect()
            sizes = [
                torch.tensor([raw.numel()]) if send else torch.empty(1, dtype=torch.int64) for send, raw, *_ in messages
            ]
            together(0, lambda place, send: sizes[place])
            for size, (_, raw, peer, _) in zip(sizes, messages):
                if int(size) != raw.numel():
                    raise RuntimeError(
                        f"rank {self._rank} expects {raw.numel()} bytes of rank {peer}, which sends {int(size)}"
                    )
            together(1, lambda place, send: messages[place][1])
            # A receiver sends an answer, so that a send ends after its peer has received the message.
            answers = [torch.zeros(1) for _ in messages]
            started = []
            for (send, _, peer, number), answer in zip(messages, answers):
                started.append((self.gloo.recv if send else self.gloo.send)([answer], peer, 4 * number + 2))
            for each in started:
                each.wait()

        if emulated.capturing is not None:
            emulated.capturing.note("batch", run, [])
        self._queue.jobs.put((run, work.done))
        return [work]


def install() -> None:
    """Makes the group known to torch as that of the emulated device, in this process, for good."""
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, QueuedGroup, devices=[emulated.NAME])
    module: Any = dist.distributed_c10d
    batch, object_device = dist.batch_isend_irecv, module._get_object_coll_device
    init, new, destroy = dist.init_process_group, dist.new_group, dist.destroy_process_group

    def batched(operations: Any) -> Any:
        group = operations[0].group
        return group.batch(operations) if isinstance(group, QueuedGroup) else batch(operations)

    def device_of_objects(group: Any = None) -> Any:
        ours = isinstance(group or module._get_default_group(), QueuedGroup)
        return emulated.NAME if ours else object_device(group)

    def initialised(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init(*args, **kwargs)
        group = module._get_default_group()
        if isinstance(group, QueuedGroup):
            group.device_id = device_id
            if device_id is not None:
                group.connect()

    def made(*args: Any, **kwargs: Any) -> Any:
        group = new(*args, **kwargs)
        if isinstance(group, QueuedGroup) and getattr(module._get_default_group(), "device_id", None) is not None:
            group.connect()  # split from a connected communicator
        return group

    def destroyed(group: Any = None) -> None:
        before = [*module._world.pg_map]
        destroy(group)
        for each in before:
            if isinstance(each, QueuedGroup) and each not in module._world.pg_map:
                each.close()

    dist.batch_isend_irecv, module._get_object_coll_device = batched, device_of_objects
    dist.init_process_group, dist.new_group, dist.destroy_process_group = initialised, made, destroyed
