"""Transfer of partitioned graphs to machines that lack them: broadcast in pieces, with verification on arrival.

A partition directory entry is sent as a whole, because the rows of all ranks are in one file per attribute. Any rank may read any
row: for predictions in the original order, samples, clusters, or the graph on one device. A machine with the files of some ranks
only would have an entry that looks complete but is not.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, starmap
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gnn.comm.group import World, raise_together
from lightning_gnn.console import progress_bar
from lightning_gnn.data.store import StoreError, read_manifest, write_copy

_CHUNK = 1 << 24
_WHAT = "The partitioned graph could not be brought to all machines"


def spread_entry(world: World, leads: bool, folder: Path, lock: Callable[[str], AbstractContextManager[None]]) -> None:
    """Copy an entry of the partition directory to all machines that lack it; all ranks call it.

    Rank 0 broadcasts the entry. Without effect if all machines have the entry, for example on a shared file system.

    Args:
        leads: whether this rank sends and receives for its machine.
        folder: folder of the entry on this machine, with the same name on all machines.
        lock: context manager factory that serializes writers of the entry name.

    Raises:
        StoreError: the entry could not be read or written, or arrived corrupted; the other ranks raise RuntimeError. Nothing of
            the entry is kept. All ranks raise it if a machine has another partition of the same graph, from an earlier run.
    """
    with world.shared_failures(_WHAT):
        has = leads and (folder / "manifest.json").exists()
        own = platform.node(), read_manifest(folder)["digest"] if has else "" if leads else None
    told = world.all_gather_object(own)
    [_, digest] = told[0]
    others = [f"{host} (rank {rank})" for rank, (host, found) in enumerate(told) if found not in (None, "", digest)]
    if digest and others:
        raise StoreError(
            f"Stores hold different partitions of the same graph under {folder.name}: {', '.join(others)} made theirs in "
            f"earlier runs. Remove {folder} there and run again: it is then fetched from {told[0][0]}."
        )
    lacking = [rank for rank, (_, found) in enumerate(told) if found == ""]
    if digest and lacking:
        _broadcast(world, lacking, folder, lock)


def _broadcast(world: World, lacking: Sequence[int], folder: Path, lock: Callable[[str], AbstractContextManager[None]]) -> None:
    """Broadcast the entry of rank 0 to the ranks in `lacking`; the other ranks only synchronize before each piece.

    Before each piece, all ranks exchange their failures. No rank waits for a failed rank, or longer than a piece takes.
    """
    group = dist.new_group([0, *lacking], timeout=world.group_timeout, backend="gloo")
    with world.shared_failures(_WHAT):
        own = (platform.node(), _read_text(folder)) if world.rank == 0 else ("", b"")
    host, text = world.broadcast_object(own)
    buffer, began, ended = torch.empty(_CHUNK, dtype=torch.uint8), time.monotonic(), False

    def go_on(failure: Exception | None = None) -> None:
        """Raises on all ranks if one rank passes a failure."""
        nonlocal ended
        ended = True
        raise_together(world, failure, _WHAT)
        ended = False

    def pieces(name: str, size: int) -> Iterator[memoryview]:
        """Yields the bytes of a file in a buffer that the next piece overwrites."""
        for low in range(0, size, _CHUNK):
            piece = buffer[: min(_CHUNK, size - low)]
            if world.rank == 0:
                _read(folder / name, low, piece.numpy().data)
            go_on()
            if world.rank == 0 or world.rank in lacking:
                dist.broadcast(piece, 0, group=group)
            told(len(piece))
            yield piece.numpy().data

    files = {name: size for name, (size, _) in json.loads(text)["files"].items()}
    try:
        bar = progress_bar("Sending the partitioned graph", sum(files.values()), "bytes")
        with bar as told, lock(folder.name) if world.rank in lacking else nullcontext():
            if world.rank in lacking and not (folder / "manifest.json").exists():
                write_copy(folder, text, host, pieces)
            else:
                for _ in chain.from_iterable(starmap(pieces, files.items())):
                    pass
        go_on()
    except Exception as error:
        if ended:
            raise
        go_on(error)
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    seconds = time.monotonic() - began
    rank_zero_info(f"Sent {folder.name} to {len(lacking)} machine(s): {sum(files.values()):,} bytes in {seconds:.1f} s")


def _read_text(folder: Path) -> bytes:
    return (folder / "manifest.json").read_bytes()


def _read(file: Path, low: int, into: memoryview) -> None:
    """Fill `into` with the bytes of a file from offset `low`."""
    try:
        with file.open("rb") as opened:
            opened.seek(low)
            if opened.readinto(into) != len(into):
                raise OSError("it is shorter than it was")
    except OSError as error:
        raise StoreError(f"{file} cannot be read ({error}), and other machines need it.") from error
