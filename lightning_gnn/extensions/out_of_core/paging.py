"""Paging of a rank's tensors to a file, from which the system reads them on use.

To limit a rank's memory, the pager writes the pages of large tensors to a file and maps the file at the same addresses. Code that
holds a tensor is not affected: layers, autograd and user code compute bitwise the same results. The system reads used pages from
the file, and may drop pages that it has read.

Ranks of a machine compute in turns. A rank frees the memory of its turn before another rank gets that room. More ranks have a
turn than there are cores: while one rank waits for the disk, another computes.

Sources: GriNNder (arXiv 2605.11517) and HongTu (arXiv 2311.14898) also compute a graph part by part. They store activations of
other parts in a file and in host memory, and need layers written for that purpose.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import tempfile
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from lightning_gnn.comm.group import World
from lightning_gnn.heap import HEADER_BYTES, end_of_own_mapping, freed_at_once
from lightning_gnn.private_torch import TorchDispatchMode, storage_id, tree_leaves

_LOOK_S = 1e-3  # polling interval; only the next rank polls


class Turns:
    """Turns of a rank: one lasts while :meth:`take_turn` is open, except while the rank waits for others.

    In its turn, a rank has room in memory, and a core except while it waits for the disk. Turns are locks of a file, which the
    system releases when a process ends. Collective: all ranks construct it.

    Args:
        world: the ranks.
        local_ranks: ranks of this machine, including this one.
        rooms: number of ranks that have turns at the same time.
        cores: number of these that compute at the same time.
        folder: folder of the file, which is unlinked once all ranks have opened it.

    Attributes:
        behind: called at the end of a turn, before another rank gets the room.
    """

    def __init__(self, world: World, local_ranks: Sequence[int], rooms: int, cores: int, folder: Path) -> None:
        self.behind: Callable[[], None] = lambda: None
        first, own = min(local_ranks), ""
        if world.rank == first:
            descriptor, own = tempfile.mkstemp(prefix=".turns.", dir=folder)
            os.close(descriptor)
        name = world.all_gather_object(own)[first]
        self._file = os.open(name, os.O_RDWR)
        world.all_gather_object("")  # all ranks have opened it
        if own:
            os.unlink(own)
        self._room, self._core = _Lock(self._file, 0, rooms), _Lock(self._file, rooms + 1, cores)

    @contextmanager
    def take_turn(self) -> Iterator[None]:
        """Context manager that waits for this rank's turn and ends it on exit; no effect within an open turn."""
        if self._room.is_held:
            yield
            return
        self._begin()
        try:
            yield
        finally:
            if self._room.is_held:
                self._end()

    @contextmanager
    def release_turn(self) -> Iterator[None]:
        """Context manager that gives up this rank's turn, so that other ranks have theirs."""
        if not self._room.is_held:
            yield
            return
        self._end()
        yield
        self._begin()  # not after an error: other ranks may never end their turns

    @contextmanager
    def release_core(self) -> Iterator[None]:
        """Context manager that releases this rank's core to other ranks; the rank keeps its room."""
        if not self._core.is_held:
            yield
            return
        self._core.give()
        yield
        self._core.take()

    def _begin(self) -> None:
        self._room.take()
        self._core.take()

    def _end(self) -> None:
        self._core.give()
        self.behind()
        self._room.give()

    def close(self) -> None:
        """End the turns; afterwards, this rank computes concurrently with others."""
        self.behind = lambda: None
        if self._room.is_held:
            self._end()
        os.close(self._file)


class _Lock:
    """Semaphore with one byte of a file per place; the byte after them is the lock of the next process in line.

    Attributes:
        is_held: whether this process holds a place.
    """

    def __init__(self, file: int, begin: int, places: int) -> None:
        self._file, self._begin, self._places, self._place = file, begin, places, -1

    @property
    def is_held(self) -> bool:
        return self._place >= 0

    def take(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._begin + self._places)  # this process is next in line
        while not self.is_held:
            for place in range(self._begin, self._begin + self._places):
                try:
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                except OSError:  # held by another process
                    continue
                self._place = place
                break
            else:
                time.sleep(_LOOK_S)
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._begin + self._places)

    def give(self) -> None:
        if self.is_held:  # not held after an error at the disk
            place, self._place = self._place, -1
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)


_LEAST_ROOM = 16 << 20
LEAST_BYTES = 1 << 20
"""Minimum size of a tensor that is moved to the file. glibc gives each a separate mapping, removed when it is freed."""

LONG = 8 << 20
"""Size of a block from which reads and writes take long enough to let another rank compute meanwhile."""

_PAGE = mmap.PAGESIZE
_HUGE = 2 << 20
_PIECE = 1 << 28  # bytes per write
_FIXED_IN_FILE = mmap.MAP_SHARED | 0x10  # MAP_FIXED
_IN_MEMORY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
_WILLNEED, _DONTNEED, _DONTFORK, _HUGEPAGE, _POPULATE_READ = 3, 4, 10, 14, 22  # madvise flags, see `man madvise`


@dataclass
class _Block:
    """Whole pages of a tensor's storage, and their location.

    Attributes:
        begin, end: addresses.
        stays: whether it is not private memory of this process, for example a mapped file of features.
        moves: number of moves to the file so far.
        op: number of the last op that used it.
        untouched: whether nothing has been written to it, as in a buffer for rows not received yet; it takes no memory.
    """

    begin: int
    end: int
    storage: StorageWeakRef
    in_file: bool = False
    offset: int = 0
    stays: bool = False
    moves: int = 0
    op: int = 0
    untouched: bool = False

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def unnamed_file(folder: Path, flags: int = 0) -> int:
    """Returns a descriptor of a new unlinked file in a folder, for reading and writing.

    The file is deleted when nothing has it open or mapped.
    """
    descriptor, name = tempfile.mkstemp(prefix=".lightning_gnn.", dir=folder)
    try:
        return os.open(name, os.O_RDWR | flags)
    finally:
        os.close(descriptor)
        os.unlink(name)


def full_disk(error: OSError) -> Exception:
    """Returns the exception to raise if a file of memory_limit could not be written."""
    if error.errno != errno.ENOSPC:
        return error
    return RuntimeError("The disk of spill_dir is full. Set spill_dir to a folder on a larger disk, or increase memory_limit.")


@contextmanager
def in_turns(world: World, folder: Path, most_bytes: int) -> Iterator[Pager]:
    """Context manager that makes ranks of this machine compute in turns, within `most_bytes` of total memory. Collective.

    As many ranks compute at the same time as there are cores. One more rank has room in memory, so that cores are not idle during
    reads and writes. Ranks in their turns store tensors in two thirds of the memory that the rank processes do not need
    themselves. A sixteenth is for tensors of the other ranks. The rest is for results of ops before anything can be moved.

    Raises:
        ValueError: if the rank processes alone need the memory; also see :class:`Pager`.
        RuntimeError: if this process does not use glibc's malloc.
    """
    local_ranks = world.ranks_here()
    cores = min(len(local_ranks), max(1, (os.cpu_count() or 1) // torch.get_num_threads()))
    rooms = min(len(local_ranks), cores + 1)
    with ExitStack() as stack:
        if not stack.enter_context(freed_at_once(LEAST_BYTES)):
            raise RuntimeError("memory_limit needs the malloc of glibc, but this process uses another. Remove memory_limit.")
        own = world.all_gather_object(own_bytes())
        used = sum(own[rank] for rank in local_ranks)
        room = most_bytes - used
        if room < _LEAST_ROOM * rooms:
            raise ValueError(
                f"memory_limit must exceed the {used / 1e9:.3g} GB that {len(local_ranks)} ranks use "
                f"themselves, got {most_bytes / 1e9:.3g} GB. Increase it, use fewer ranks, or use less memory per rank "
                '(start_method="fork").'
            )
        turns = Turns(world, local_ranks, rooms, cores, folder)
        stack.callback(turns.close)
        pager = Pager(folder, turns, 2 * room // (3 * rooms), room // (16 * len(local_ranks)))
        stack.callback(pager.close)
        stack.enter_context(pager)
        yield pager


def own_bytes(process: int | str = "self") -> int:
    """Returns the memory of a process, without files; shared memory counts proportionally."""
    found = re.search(r"^Pss_Anon: +(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


class Pager(TorchDispatchMode):
    """Dispatch mode that keeps tensors of ops in memory up to a number of bytes, and moves others to a file.

    The least recently used tensors are moved first, such as activations of early layers, which the backward pass uses last.

    Args:
        folder: folder of the file, which has no name. It must be on a disk whose file system supports direct I/O.
        turns: turns of this rank.
        most_bytes: maximum bytes of tensors in memory during this rank's turn.
        kept_bytes: maximum bytes of tensors in memory outside its turn.

    Raises:
        ValueError: if the folder is not suitable.

    Attributes:
        turns: turns of this rank.
        bytes_written: bytes written so far.
    """

    def __init__(self, folder: Path, turns: Turns, most_bytes: int, kept_bytes: int) -> None:
        super().__init__()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        try:
            # Direct I/O: writes use no page cache.
            self._file = unnamed_file(folder, os.O_DIRECT)
        except OSError as error:
            raise ValueError(
                f"spill_dir={str(folder)!r} cannot store the memory of ranks ({error.strerror}). Use a folder on a local disk."
            ) from error
        if _is_in_memory(os.fstat(self._file).st_dev):
            os.close(self._file)
            raise ValueError(f"spill_dir={str(folder)!r} is in memory (tmpfs). Use a folder on a disk.")
        device, inode = _key_in_maps(self._file)
        # Groups: begin, end, and offset and inode of the file; private anonymous memory has neither offset nor inode.
        self._lines = re.compile(
            rf"^(\w+)-(\w+) (?:\S{{4}} (\w+) {device} ({inode}) .*|rw-p \w+ \S+ 0 *)$".encode(), re.MULTILINE
        )
        self.turns, self._most_bytes, self._kept_bytes = turns, most_bytes, kept_bytes
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # by address; least recently used first
        self._in_memory = 0  # upper bound: includes freed blocks
        self._op = 0  # number of the current op
        self.bytes_written = 0
        turns.behind = self._leave

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs or {})
        self._op += 1
        for tensor in _tensors(args):
            self._use(tensor)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors((out,)):
            self._use(tensor)
        if self._in_memory > self._most_bytes:
            self._shrink(self._most_bytes)
        return out

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch collective, which Lightning, metrics and user code may call; other ranks have their turns meanwhile."""
        with self.turns.release_turn():
            out = func(*args, **kwargs)
            if not func.__name__.startswith(("send", "recv")):
                for work in tree_leaves(out):
                    if isinstance(work, torch.ScriptObject):
                        work.wait()  # type: ignore[attr-defined]
        return out

    def _use(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES:
            return
        address = storage.data_ptr()
        block = self._blocks.get(address)
        if block is None or block.storage.cdata != storage_id(storage):
            begin, end = -(-address // _PAGE) * _PAGE, (address + storage.nbytes()) // _PAGE * _PAGE
            self._blocks[address] = block = _Block(begin, end, StorageWeakRef(storage))
            self._in_memory += block.nbytes
        elif block.untouched:
            block.untouched = False
            self._in_memory += block.nbytes
        elif block.in_file and not self._read(block) and tensor.is_contiguous():
            # All pages at once: reading page by page on use takes several times as long.
            begin = max(block.begin, tensor.data_ptr() // _PAGE * _PAGE)
            end = min(block.end, tensor.data_ptr() + tensor.nbytes)
            if end > begin:
                with self._release_core(end - begin):
                    self._libc.madvise(begin, end - begin, _WILLNEED)
                    self._libc.madvise(begin, end - begin, _POPULATE_READ)
        self._blocks.move_to_end(address)
        block.op = self._op

    def _shrink(self, most_bytes: int) -> None:
        """Move tensors to the file until at most `most_bytes` are in memory, except tensors of the current op."""
        for address in [address for address, block in self._blocks.items() if block.storage.expired()]:
            del self._blocks[address]
        for block in self._blocks.values():
            block.untouched = block.untouched and self._is_untouched(block)  # loops may have written to it since
        self._in_memory = sum(
            block.nbytes for block in self._blocks.values() if not (block.in_file or block.stays or block.untouched)
        )
        if self._in_memory <= most_bytes:
            return
        memory, in_file = self._mappings()
        begins, used = [begin for begin, _ in memory], sorted((low, low + end - begin) for begin, end, low in in_file)
        for address, block in self._blocks.items():
            if block.in_file or block.stays or block.untouched or block.op == self._op:
                continue
            if self._in_memory <= most_bytes:
                return
            if not block.moves and self._is_untouched(block):
                block.untouched = True
                self._in_memory -= block.nbytes
                continue
            self._in_memory -= block.nbytes  # its counted size, before it grows below
            place = bisect_right(begins, address - HEADER_BYTES) - 1
            if place >= 0 and block.end <= memory[place][1] and (end := end_of_own_mapping(address)) >= block.end:
                # Includes the whole last huge page, which is not freed in parts.
                block.end = min(end, -(-block.end // _HUGE) * _HUGE, memory[place][1])
                block.offset = _gap(used, block.nbytes)
                with self._release_core(block.nbytes):
                    self._move(block, block.offset)
                block.in_file, block.moves = True, block.moves + 1
            else:
                block.stays = True

    def _mappings(self) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """Returns the address ranges of private anonymous memory, and the address ranges of the file with their offsets."""
        memory, in_file = list[tuple[int, int]](), list[tuple[int, int, int]]()
        for first, last, offset, inode in self._lines.findall(Path("/proc/self/maps").read_bytes()):
            begin, end = int(first, 16), int(last, 16)
            if inode:
                in_file.append((begin, end, int(offset, 16)))
            else:
                if memory and memory[-1][1] == begin:
                    begin = memory.pop()[0]
                memory.append((begin, end))
        return memory, in_file

    def _is_untouched(self, block: _Block) -> bool:
        """Returns whether the system has not allocated any page of a block, see proc_pid_pagemap(5)."""
        first, last = block.begin // _PAGE, block.end // _PAGE
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            entries = np.frombuffer(os.pread(pages.fileno(), 8 * (last - first), 8 * first), np.uint64)
        return len(entries) == last - first and not (entries >> np.uint64(62)).any()  # present, or swapped

    def _move(self, block: _Block, offset: int) -> None:
        data = memoryview((ctypes.c_char * block.nbytes).from_address(block.begin))
        if os.fstat(self._file).st_size < offset + block.nbytes:
            os.ftruncate(self._file, offset + block.nbytes)
        done = 0
        while done < block.nbytes:
            try:
                done += os.pwrite(self._file, data[done : done + _PIECE], offset + done)
            except OSError as error:
                raise full_disk(error) from error
        self.bytes_written += done
        self._map(block, _FIXED_IN_FILE, self._file, offset)
        # A forked process could change the file's pages; now it does not inherit them.
        self._libc.madvise(block.begin, block.nbytes, _DONTFORK)

    def _read(self, block: _Block) -> bool:
        """Read a large block back into memory, bypassing the page cache, if it was moved once; faster than mapped pages.

        A block that is moved a second time stays in the file and is read through the mapping. It is not written again unless it
        changes.

        Returns:
            Whether the block was read.
        """
        if block.nbytes < LONG or block.moves > 1:
            return False
        block.op = self._op
        if self._in_memory + block.nbytes > self._most_bytes:
            self._shrink(self._most_bytes - block.nbytes)
        if self._in_memory + block.nbytes > self._most_bytes or not _is_there(block, self._mappings()[1]):
            return False
        self._map(block, _IN_MEMORY, -1, 0)
        self._libc.madvise(block.begin, block.nbytes, _HUGEPAGE)
        data, done = memoryview((ctypes.c_char * block.nbytes).from_address(block.begin)), 0
        with self.turns.release_core():
            while done < block.nbytes:
                done += os.preadv(self._file, [data[done : done + _PIECE]], block.offset + done)
        block.in_file = False
        self._in_memory += block.nbytes
        return True

    def _release_core(self, num_bytes: int) -> AbstractContextManager[None]:
        return self.turns.release_core() if num_bytes >= LONG else nullcontext()

    def _map(self, block: _Block, flags: int, file: int, offset: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if self._libc.mmap(block.begin, block.nbytes, protection, flags, file, offset) != block.begin:
            raise OSError(ctypes.get_errno(), "mmap could not restore a tensor at its address")

    def _leave(self) -> None:
        self._op += 1
        self._shrink(self._kept_bytes)
        _, in_file = self._mappings() if any(block.in_file for block in self._blocks.values()) else ([], [])
        for address, block in [*self._blocks.items()]:
            if not block.in_file:
                continue
            if _is_there(block, in_file):
                self._libc.madvise(block.begin, block.nbytes, _DONTNEED)
                os.posix_fadvise(self._file, block.offset, block.nbytes, os.POSIX_FADV_DONTNEED)
            else:
                del self._blocks[address]

    def close(self) -> None:
        """End paging; tensors in the file remain there."""
        self.turns.behind = lambda: None
        os.close(self._file)


def _key_in_maps(file: int) -> tuple[str, str]:
    """Returns the device and inode of an open file as in /proc/self/maps; on overlays they differ from stat."""
    os.ftruncate(file, _PAGE)
    with mmap.mmap(file, _PAGE) as page:
        first = ctypes.c_char.from_buffer(page)
        begin = ctypes.addressof(first)
        del first
        for line in Path("/proc/self/maps").read_text().splitlines():
            found = _LINE.match(line)
            if found is not None and int(found[1], 16) <= begin < int(found[2], 16):
                return found[5], found[6]
    raise RuntimeError("/proc/self/maps does not list mapped files, which memory_limit needs. Remove memory_limit.")


def _is_in_memory(device: int) -> bool:
    """Returns whether the file system with this device number is in memory."""
    key = f"{os.major(device)}:{os.minor(device)}"
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[2] == key and line.partition(" - ")[2].split()[0] in ("tmpfs", "ramfs") for line in lines)


_LINE = re.compile(r"(\w+)-(\w+) (\S{4}) (\w+) (\w+:\w+) (\d+)\s*(\S*)")
"""Line of /proc/self/maps: begin, end, permissions, offset, device, inode and name."""


def _is_there(block: _Block, in_file: list[tuple[int, int, int]]) -> bool:
    """Returns whether a block is still mapped to its place in the file.

    A storage may have been given other memory, for example by resize_, and its old addresses may be in other use.
    """
    place = bisect_right(in_file, block.begin, key=itemgetter(0)) - 1
    begin, end, offset = in_file[place] if place >= 0 else (0, 0, 0)
    return block.end <= end and block.offset - offset == block.begin - begin


def _gap(used: list[tuple[int, int]], size: int) -> int:
    """Returns the first offset of `size` unused bytes, and marks them as used."""
    begin = 0
    for place, (low, high) in enumerate(used):
        if low - begin >= size:
            used.insert(place, (begin, begin + size))
            return begin
        begin = max(begin, high)
    used.append((begin, begin + size))
    return begin


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if type(value) in (Tensor, torch.nn.Parameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
