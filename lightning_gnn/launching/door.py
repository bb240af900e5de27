"""A door where ranks wait that were started early: they import, while the process that starts them looks for what is wrong.

Whatever they are to have is sent through it, with file descriptors: tensors in shared memory, and what else multiprocessing hands
to a process that it starts, such as locks and queues.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

_HEADER = struct.Struct("QQ")  # bytes, and descriptors
_AT_ONCE = 128
"""Descriptors of one message; Linux takes 253."""

_received: list[int] = []  # while a message is unpickled


class Door:
    """One end of it."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Door, socket.socket]:
        """Returns the starting process's end, and what the rank makes its own of."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def open(self, payload: Any) -> None:
        """Lets the rank in, with a value.

        Raises:
            OSError: the rank has gone.
        """
        handles = _Handles()
        set_spawning_popen(handles)  # type: ignore[arg-type]
        try:
            data = ForkingPickler.dumps(payload)
        finally:
            set_spawning_popen(None)
        self._end.sendall(_HEADER.pack(len(data), len(handles.descriptors)))
        for first in range(0, len(handles.descriptors), _AT_ONCE):
            socket.send_fds(self._end, [b"-"], handles.descriptors[first : first + _AT_ONCE])
        self._end.sendall(data)
        self.close()

    def close(self) -> None:
        """Whoever waits is not let in any more."""
        self._end.close()

    def wait(self) -> Any:
        """Returns what it is opened with; ends this process, without a word, if it never is."""
        with self._end:
            length, count = _HEADER.unpack(self._take(_HEADER.size))
            while len(_received) < count:
                _, found, _, _ = socket.recv_fds(self._end, 1, _AT_ONCE)
                if not found:
                    os._exit(1)
                _received.extend(found)
            data = self._take(length)
        try:
            return pickle.loads(data)
        finally:
            _received.clear()

    def _take(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self._end.recv_into(view)
            except OSError:
                count = 0
            if not count:
                os._exit(1)
            view = view[count:]
        return data


class _Handles:
    """Stands for the process that is being started, where multiprocessing asks for it: collects descriptors."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        self.descriptors.append(descriptor)
        return len(self.descriptors) - 1

    @staticmethod
    def DupFd(index: int) -> _Handle:
        return _Handle(index)


class _Handle:
    """A descriptor on its way, by its place among those of a message."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        """Returns it, in the process that has received it."""
        return _received[self._index]


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is started inside does not hear Ctrl-C until :func:`hear_interrupts`: it would end with the traceback of an import."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def hears_interrupts() -> bool:
    """Returns whether Ctrl-C ends this process, as it does but for what a shell starts in the background."""
    return signal.getsignal(signal.SIGINT) != signal.SIG_IGN


def hear_interrupts() -> None:
    """Has Ctrl-C end this process, as Python has it."""
    if threading.current_thread() is threading.main_thread() and not hears_interrupts():
        signal.signal(signal.SIGINT, signal.default_int_handler)
