"""Tensors of a rank in a file, from which the system reads them when they are used.

A rank's memory is limited by giving its large tensors another place, at the same addresses: what lies there is written to a
file, and the file is mapped over it. Nothing that holds a tensor notices: layers, autograd and the user's own code compute what
they would compute otherwise, bit for bit. The system reads from the file what is used again, and may drop what it has read.

Ranks of a machine compute in turns: what one has in memory in its turn, it gives up before another has that room. More ranks
have a turn than there are cores for: while one waits for the disk, another computes.

Sources: GriNNder (arXiv 2605.11517) and HongTu (arXiv 2311.14898) compute a graph part by part too, with activations of the
others in a file and in the host's memory; there layers are written for it.
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

_LOOK_S = 1e-3  # between looks whether there is a turn; only the next rank looks


class Turns:
    """A rank's turns: it has one while :meth:`taken` is open, but not while it waits for others. In its turn it has room in
    memory, and a core, but not while it waits for the disk.

    Locks of a file, which the system takes away from a process that ends. All ranks make it.

    Args:
        world: the ranks.
        near: those of this machine, this one among them.
        rooms: how many of them have their turns at the same time.
        cores: how many of those compute at the same time.
        folder: where the file is, which has no name once all have opened it.

    Attributes:
        behind: called before another rank has this one's room, and while another may have its core.
    """

    def __init__(self, world: World, near: Sequence[int], rooms: int, cores: int, folder: Path) -> None:
        self.behind: Callable[[], None] = lambda: None
        first, own = min(near), ""
        if world.rank == first:
            descriptor, own = tempfile.mkstemp(prefix=".turns.", dir=folder)
            os.close(descriptor)
        name = world.all_gather_object(own)[first]
        self._file = os.open(name, os.O_RDWR)
        world.all_gather_object("")  # all have opened it
        if own:
            os.unlink(own)
        self._room, self._core = _Lock(self._file, 0, rooms), _Lock(self._file, rooms + 1, cores)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for this rank's turn, which ends with the context; part of one that is open already."""
        if self._room.held:
            yield
            return
        self._begin()
        try:
            yield
        finally:
            if self._room.held:
                self._end()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """While open, others have their turns."""
        if not self._room.held:
            yield
            return
        self._end()
        yield
        self._begin()  # not after an error: others may never end their turns

    @contextmanager
    def at_the_disk(self) -> Iterator[None]:
        """While open, another rank may have this one's core; its room it keeps."""
        if not self._core.held:
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
        """Ends it; what this rank still does, it does beside others."""
        self.behind = lambda: None
        if self._room.held:
            self._end()
        os.close(self._file)


class _Lock:
    """Places of which each may be held by one process, as bytes of a file; the byte behind them is who takes the next.

    Attributes:
        held: whether this process holds one.
    """

    def __init__(self, file: int, begin: int, places: int) -> None:
        self._file, self._begin, self._places, self._place = file, begin, places, -1

    @property
    def held(self) -> bool:
        return self._place >= 0

    def take(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._begin + self._places)  # then it is the next
        while not self.held:
            for place in range(self._begin, self._begin + self._places):
                try:
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                except OSError:  # another's
                    continue
                self._place = place
                break
            else:
                time.sleep(_LOOK_S)
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._begin + self._places)

    def give(self) -> None:
        if self.held:  # as it is not after an error at the disk
            place, self._place = self._place, -1
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)


_LEAST_ROOM = 16 << 20
LEAST_BYTES = 1 << 20
"""Of a tensor that is moved to the file. glibc has each in a mapping of its own, and ends that when the tensor is freed."""

LONG = 8 << 20
"""Of a block whose reading or writing takes so long that another rank computes meanwhile."""

_PAGE = mmap.PAGESIZE
_HUGE = 2 << 20
_PIECE = 1 << 28  # bytes that are written at once
_FIXED_IN_FILE = mmap.MAP_SHARED | 0x10  # MAP_FIXED
_IN_MEMORY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
_WILLNEED, _DONTNEED, _DONTFORK, _HUGEPAGE, _POPULATE_READ = 3, 4, 10, 14, 22  # of madvise, see `man madvise`


@dataclass
class _Block:
    """Memory of a tensor's storage: whole pages of it, and where they are.

    Attributes:
        begin, end: addresses.
        stays: it is not this process's alone, as a file of features that is mapped.
        moves: to the file, until now.
        op: number of the one that used it last.
        untouched: nothing has been written to it, as to a buffer of rows that have not come: it takes no memory.
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
    """Returns a descriptor of a new file in a folder, to read and write, which is gone when nothing has it open or mapped."""
    descriptor, name = tempfile.mkstemp(prefix=".lightning_gnn.", dir=folder)
    try:
        return os.open(name, os.O_RDWR | flags)
    finally:
        os.close(descriptor)
        os.unlink(name)


def full_disk(error: OSError) -> Exception:
    """Returns what to raise where a file of memory_limit could not be written."""
    if error.errno != errno.ENOSPC:
        return error
    return RuntimeError("The disk of spill_dir is full. Name a folder on a larger one, or give ranks more memory_limit.")


@contextmanager
def in_turns(world: World, folder: Path, most_bytes: int) -> Iterator[Pager]:
    """While open, ranks of this machine compute in turns, and have so many bytes in memory, all together; all ranks open it.

    As many compute at once as there are cores for, and one more has room in memory, so that cores are not idle while ranks read
    and write. Of what ranks do not take themselves, two thirds are for tensors of those, a sixteenth for tensors of the others,
    and the rest for what ops make before anything can be moved.

    Raises:
        ValueError: ranks take as much without a tensor; or see :class:`Pager`.
        RuntimeError: this process's memory is not as glibc has it.
    """
    near = world.ranks_here()
    cores = min(len(near), max(1, (os.cpu_count() or 1) // torch.get_num_threads()))
    rooms = min(len(near), cores + 1)
    with ExitStack() as stack:
        if not stack.enter_context(freed_at_once(LEAST_BYTES)):
            raise RuntimeError("memory_limit needs the malloc of glibc, and this process has another. Leave it out.")
        own = world.all_gather_object(own_bytes())
        room = most_bytes - sum(own[rank] for rank in near)
        if room < _LEAST_ROOM * rooms:
            raise ValueError(
                f"memory_limit leaves no room: {len(near)} ranks take {sum(own[rank] for rank in near) / 1e9:.3g} GB themselves "
                f"(got {most_bytes / 1e9:.3g} GB). Give them more, or take fewer; ranks that are forks take less "
                '(start_method="fork").'
            )
        turns = Turns(world, near, rooms, cores, folder)
        stack.callback(turns.close)
        pager = Pager(folder, turns, 2 * room // (3 * rooms), room // (16 * len(near)))
        stack.callback(pager.close)
        stack.enter_context(pager)
        yield pager


def own_bytes(process: int | str = "self") -> int:
    """Returns the memory that a process takes, beside files; of what it has in common with others, its share."""
    found = re.search(r"^Pss_Anon: +(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


class Pager(TorchDispatchMode):
    """While active, tensors that ops make and take are in memory up to a number of bytes, and beyond it in a file.

    Those go first that have not been used for longest: layers' activations, which the backward uses last of all.

    Args:
        folder: where the file is; it has no name. On a disk: its system must have direct input and output.
        turns: of this rank.
        most_bytes: of tensors in memory, while it is this rank's turn.
        kept_bytes: while it is not.

    Raises:
        ValueError: the folder is none for it.

    Attributes:
        turns: of this rank.
        bytes_written: until now.
    """

    def __init__(self, folder: Path, turns: Turns, most_bytes: int, kept_bytes: int) -> None:
        super().__init__()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        try:
            # Direct: what is written takes no memory of the system's.
            self._file = unnamed_file(folder, os.O_DIRECT)
        except OSError as error:
            raise ValueError(
                f"spill_dir={str(folder)!r} cannot hold what ranks have no memory for ({error.strerror}). Name a folder on "
                "a local disk."
            ) from error
        if _is_in_memory(os.fstat(self._file).st_dev):
            os.close(self._file)
            raise ValueError(f"spill_dir={str(folder)!r} is itself in memory (tmpfs). Name a folder on a disk.")
        device, inode = _key_in_maps(self._file)
        # begin, end, offset and inode of the file, or of memory of this process alone, which has neither
        self._lines = re.compile(
            rf"^(\w+)-(\w+) (?:\S{{4}} (\w+) {device} ({inode}) .*|rw-p \w+ \S+ 0 *)$".encode(), re.MULTILINE
        )
        self.turns, self._most, self._kept = turns, most_bytes, kept_bytes
        self._blocks: OrderedDict[int, _Block] = OrderedDict()  # by address, the one that was used last at the end
        self._in_memory = 0  # at most: of blocks that are gone, too
        self._op = 0  # that runs
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
        if self._in_memory > self._most:
            self._shrink(self._most)
        return out

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls one of torch's collectives, which Lightning, metrics and the user's code call too; others have their turns."""
        with self.turns.given_up():
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
            # All at once: page by page, as it is used, takes several times as long.
            begin = max(block.begin, tensor.data_ptr() // _PAGE * _PAGE)
            end = min(block.end, tensor.data_ptr() + tensor.nbytes)
            if end > begin:
                with self._at_the_disk(end - begin):
                    self._libc.madvise(begin, end - begin, _WILLNEED)
                    self._libc.madvise(begin, end - begin, _POPULATE_READ)
        self._blocks.move_to_end(address)
        block.op = self._op

    def _shrink(self, most_bytes: int) -> None:
        """Moves tensors to the file until so many bytes are in memory, but not what the op that runs uses."""
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
            self._in_memory -= block.nbytes  # as it was counted, before it has more of its last page
            place = bisect_right(begins, address - HEADER_BYTES) - 1
            if place >= 0 and block.end <= memory[place][1] and (end := end_of_own_mapping(address)) >= block.end:
                # With all of its last huge page, which is not given back in parts.
                block.end = min(end, -(-block.end // _HUGE) * _HUGE, memory[place][1])
                block.offset = _gap(used, block.nbytes)
                with self._at_the_disk(block.nbytes):
                    self._move(block, block.offset)
                block.in_file, block.moves = True, block.moves + 1
            else:
                block.stays = True

    def _mappings(self) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """Returns from where to where there is memory of this process alone; and the file, and at which offset of it."""
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
        """Returns whether the system has given none of a block's pages yet, see proc_pid_pagemap(5)."""
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
        # A fork would change it here, too; now it has none of it.
        self._libc.madvise(block.begin, block.nbytes, _DONTFORK)

    def _read(self, block: _Block) -> bool:
        """Reads a large block into memory that was moved to the file once, past the page cache: that takes less time than mapped
        pages do. Returns whether that was possible.

        What is moved a second time stays in the file, and is read through the map: it is not written again unless it changes.
        """
        if block.nbytes < LONG or block.moves > 1:
            return False
        block.op = self._op
        if self._in_memory + block.nbytes > self._most:
            self._shrink(self._most - block.nbytes)
        if self._in_memory + block.nbytes > self._most or not _is_there(block, self._mappings()[1]):
            return False
        self._map(block, _IN_MEMORY, -1, 0)
        self._libc.madvise(block.begin, block.nbytes, _HUGEPAGE)
        data, done = memoryview((ctypes.c_char * block.nbytes).from_address(block.begin)), 0
        with self.turns.at_the_disk():
            while done < block.nbytes:
                done += os.preadv(self._file, [data[done : done + _PIECE]], block.offset + done)
        block.in_file = False
        self._in_memory += block.nbytes
        return True

    def _at_the_disk(self, num_bytes: int) -> AbstractContextManager[None]:
        return self.turns.at_the_disk() if num_bytes >= LONG else nullcontext()

    def _map(self, block: _Block, flags: int, file: int, offset: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if self._libc.mmap(block.begin, block.nbytes, protection, flags, file, offset) != block.begin:
            raise OSError(ctypes.get_errno(), "a tensor's memory could not be mapped at its place")

    def _leave(self) -> None:
        self._op += 1
        self._shrink(self._kept)
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
        """Ends it; tensors that are in the file stay there."""
        self.turns.behind = lambda: None
        os.close(self._file)


def _key_in_maps(file: int) -> tuple[str, str]:
    """Returns device and inode by which /proc/self/maps names an open file; on overlays they are not those of stat."""
    os.ftruncate(file, _PAGE)
    with mmap.mmap(file, _PAGE) as page:
        first = ctypes.c_char.from_buffer(page)
        begin = ctypes.addressof(first)
        del first
        for line in Path("/proc/self/maps").read_text().splitlines():
            found = _LINE.match(line)
            if found is not None and int(found[1], 16) <= begin < int(found[2], 16):
                return found[5], found[6]
    raise RuntimeError("/proc/self/maps does not tell where files are mapped, which memory_limit needs. Leave it out.")


def _is_in_memory(device: int) -> bool:
    """Returns whether the file system of this device number is in memory."""
    key = f"{os.major(device)}:{os.minor(device)}"
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[2] == key and line.partition(" - ")[2].split()[0] in ("tmpfs", "ramfs") for line in lines)


_LINE = re.compile(r"(\w+)-(\w+) (\S{4}) (\w+) (\w+:\w+) (\d+)\s*(\S*)")
"""Of /proc/self/maps: begin, end, permissions, offset, device, inode and name."""


def _is_there(block: _Block, in_file: list[tuple[int, int, int]]) -> bool:
    """Returns whether a block is mapped to its place in the file; a storage may have been given other memory, as by resize_,
    and what lies where it was may be anyone's."""
    place = bisect_right(in_file, block.begin, key=itemgetter(0)) - 1
    begin, end, offset = in_file[place] if place >= 0 else (0, 0, 0)
    return block.end <= end and block.offset - offset == block.begin - begin


def _gap(used: list[tuple[int, int]], size: int) -> int:
    """Returns the first offset at which so many bytes are not used, and notes that they are."""
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
