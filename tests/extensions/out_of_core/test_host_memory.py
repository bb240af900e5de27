"""Ranks that compute in turns, with tensors in files: the same numbers, bit for bit, and who has what in memory when."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from common import CLASSES, FEATURES, assert_same, build, campaign, quiet_trainer, single, train
from conftest import RankFailed
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import REPOSITORY
from torch_geometric.data import Data

import lightning_gnn
from lightning_gnn import CoverStrategy, DGCLStrategy, SamplingStrategy, SpMM1DStrategy, VertexCutStrategy
from lightning_gnn.data.shards import Cut
from lightning_gnn.extensions.out_of_core import paging
from lightning_gnn.extensions.out_of_core.paging import Pager, _Lock, unnamed_file
from lightning_gnn.extensions.out_of_core.run import FileSegment
from lightning_gnn.heap import freed_at_once

pytestmark = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="memory_limit is for Linux")

LEAST = 1 << 15
"""Bytes of tensors that are moved in these tests."""


def graph(num_nodes: int = 1500, features: int = FEATURES) -> Data:
    draw = torch.Generator().manual_seed(0)
    edge_index = torch.randint(num_nodes, (2, 4 * num_nodes), generator=draw)
    edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    x = torch.randn(num_nodes, features, generator=draw, dtype=torch.float64)
    data = Data(x=x, edge_index=edge_index, y=torch.randint(CLASSES, (num_nodes,), generator=draw))
    part = torch.rand(num_nodes, generator=draw)
    data.train_mask, data.val_mask, data.test_mask = part < 0.5, (part >= 0.5) & (part < 0.8), part >= 0.8
    return data


def paged(
    rank: int,
    world_size: int,
    *given: Any,
    options: dict[str, Any],
    cores: int = 2,
    long: int = paging.LONG,
    **kwargs: Any,
) -> Any:
    """As `train`, with small tensors in the file, too. Returns also what ranks hold after turns, when they have a room and when
    a core, bytes written."""
    left, times, written = [], ([], []), [0]
    take, give, leave, move = _Lock.take, _Lock.give, Pager._leave, Pager._move

    def taking(self: _Lock) -> None:
        take(self)
        times[self._begin > 0].append([time.monotonic()])

    def giving(self: _Lock) -> None:
        if self.is_held:
            times[self._begin > 0][-1].append(time.monotonic())
        give(self)

    def leaving(self: Pager) -> None:
        leave(self)
        left.append((self._in_memory, self._kept_bytes))

    def moving(self: Pager, block: Any, offset: int) -> None:
        move(self, block, offset)
        written[0] += block.nbytes

    with ExitStack() as stack:
        for owner, name, value in (
            (paging, "LEAST_BYTES", LEAST),
            (paging, "LONG", long),
            (paging, "_LEAST_ROOM", 1),
            (paging, "own_bytes", lambda: 0),
            (os, "cpu_count", lambda: cores * torch.get_num_threads()),
            (_Lock, "take", taking),
            (_Lock, "give", giving),
            (Pager, "_leave", leaving),
            (Pager, "_move", moving),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        outcome = train(rank, world_size, *given, options=options, **kwargs)
    return outcome, left, times, written[0]


def in_memory(rank: int, world_size: int, *given: Any, **kwargs: Any) -> Any:
    return train(rank, world_size, *given, **kwargs)


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return bool(found == expected)


@pytest.fixture(scope="module")
def disk():
    """A folder that is not in memory, as temporary ones may be."""
    with tempfile.TemporaryDirectory(dir=REPOSITORY, prefix=".disk.") as folder:
        try:
            os.close(unnamed_file(Path(folder), os.O_DIRECT))
        except OSError as error:
            pytest.skip(f"the repository's file system has no direct input and output ({error})")
        yield Path(folder)


MODELS = ["gcn", "sage", "gin", "gat"]
OTHERS = ["pna", "sage_max", "transformer"], ["own", "gatv2", "sage_several"]


@pytest.mark.parametrize("models", [MODELS, *campaign(*OTHERS)], ids=" ".join)
def test_bit_for_bit(ranks, disk, models):
    """And as one device, but for rounding; each rank writes more than it may have in memory."""
    given, options = (graph(), models), {"memory_limit": "300KB", "spill_dir": str(disk)}
    expected = ranks.run(3, in_memory, *given)
    found = ranks.run(3, paged, *given, options=options)
    for (outcome, left, (rooms, _), written), in_memory_outcome in zip(found, expected):
        assert equal(outcome, in_memory_outcome)
        assert written > 1e6
        assert all(holds <= may for holds, may in left) and len(rooms) > 20
    assert_same(found[0][0], single(graph(), models), rtol=1e-8, atol=1e-10)
    assert not list(disk.iterdir())


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (VertexCutStrategy, {}),
        *campaign(
            (DGCLStrategy, {"checkpoint_convs": True}),
            (SpMM1DStrategy, {}),
            (CoverStrategy, {}),
            (DGCLStrategy, {"predictions": "file"}),
            (DGCLStrategy, {"plan": "spst", "topology": "dgx1"}),
        ),
    ],
)
def test_schemes(ranks, disk, tmp_path, strategy, options):
    given, trainer = (graph(), ["gcn", "gat"]), {"default_root_dir": str(tmp_path)}
    paging_options = {"memory_limit": "200KB", "spill_dir": str(disk), **options}
    expected = ranks.run(3, in_memory, *given, strategy=strategy, options=options, trainer=trainer)
    found_on_ranks = ranks.run(3, paged, *given, strategy=strategy, options=paging_options, trainer=trainer)
    for found, of_rank in zip(found_on_ranks, expected):
        assert equal(found[0], of_rank)
        assert found[3] > 1e5


def at_once(found: Any, lock: int) -> int:
    """Returns the most ranks that held a lock at the same time."""
    times = [time for _, _, times, _ in found for time in times[lock]]
    changes = sorted([(begin, 1) for begin, _ in times] + [(end, -1) for _, end in times])
    return max(accumulate(change for _, change in changes))


def test_turns(ranks, disk):
    """With one core, no two ranks compute at the same time, and one more has its turn, which reads and writes meanwhile; all have
    many turns, between exchanges, and have the core more often: not while they read and write."""
    options = {"memory_limit": "1MB", "spill_dir": str(disk)}
    found = ranks.run(4, paged, graph(), "gcn", options=options, cores=1, long=0)
    assert all(map(equal, [outcome for outcome, *_ in found], ranks.run(4, in_memory, graph(), "gcn")))
    assert (at_once(found, 0), at_once(found, 1)) == (2, 1)
    assert all(10 < len(rooms) < len(cores) for _, _, (rooms, cores), _ in found)


def holds_turns(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, set[bool]]:
    """Returns whether it was this rank's turn where it read its part of the graph, computed, and was in between."""
    found: dict[str, set[bool]] = {name: set() for name in ("reading", "step", "backward", "between")}
    strategy = DGCLStrategy(**options)

    def note(where: str) -> None:
        found[where].add(strategy.world.turns._room.is_held)  # type: ignore[attr-defined]

    class Model(lightning_gnn.NodeClassifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            note("step")
            loss = super().training_step(batch, batch_idx)
            loss.register_hook(lambda grad: note("backward"))
            return loss

        def on_train_batch_start(self, *_: Any) -> None:
            note("between")

    class Reading(Cut):
        def shard(self, *args: Any) -> Any:
            note("reading")
            return read(self, *args)

    read, model = Cut.shard, Model(build("gcn", FEATURES, CLASSES), num_classes=CLASSES).double()
    trainer = quiet_trainer(strategy, world_size, False, max_epochs=2)
    with mock.patch.object(Cut, "shard", Reading.shard):
        trainer.fit(model, datamodule=lightning_gnn.GraphDataModule(graph()))
    return found


def test_what_ranks_do_in_their_turns(ranks, disk):
    for found in ranks.run(2, holds_turns, {"memory_limit": "8GB", "spill_dir": str(disk)}):
        assert found == {"reading": {True}, "step": {True}, "backward": {True}, "between": {False}}


def message_files(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[str], int, int]:
    """Returns where messages are, what the exchange keeps of what it received, and how often files of messages were emptied."""
    found: list[str] = []
    kept, emptied = [0], list[bool]()
    give_up = FileSegment.give_up

    def counted(segment: FileSegment) -> None:
        reserved = bool(segment._reserved)
        give_up(segment)
        emptied.append(reserved and not os.fstat(segment.fd).st_blocks)

    class Look(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            boxes = trainer.strategy.world._memory._outboxes  # type: ignore[attr-defined]
            exchange: Any = trainer.strategy.steps.binding.context.exchange  # type: ignore[attr-defined]
            kept[0] = sum(map(len, exchange.buffers._free.values()))
            found.extend(os.readlink(f"/proc/self/fd/{box.segment.fd}") for box in boxes if box.segment is not None)

    model = lightning_gnn.NodeClassifier(build("gcn", FEATURES, CLASSES), num_classes=CLASSES).double()
    trainer = quiet_trainer(DGCLStrategy(**options), world_size, False, callbacks=[Look()])
    with mock.patch.object(FileSegment, "give_up", counted):
        trainer.fit(model, datamodule=lightning_gnn.GraphDataModule(graph()))
    return found, kept[0], sum(emptied)


def test_messages_are_in_files(ranks, disk):
    """And what they are received into is not kept between calls, nor are messages that were taken."""
    for options, where in (({}, "/memfd:"), ({"memory_limit": "8GB", "spill_dir": str(disk)}, str(disk))):
        for found, kept, emptied in ranks.run(2, message_files, options):
            assert (kept == 0) == (emptied > 0) == bool(options)
            assert found and all(each.startswith(where) for each in found)


def test_a_file_of_messages_has_its_place_before_it_is_written(disk, monkeypatch):
    """Else a full disk would end the process without a word."""
    segment = FileSegment.create_in(disk, 1 << 20)
    segment.reserve(1 << 19)
    assert os.fstat(segment.fd).st_blocks * 512 >= 1 << 19
    segment.bytes[: 1 << 19] = 7
    segment.give_up()
    assert os.fstat(segment.fd).st_blocks == 0 and not segment.bytes[: 1 << 19].any()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RuntimeError, match="The disk of spill_dir is full"):
        segment.reserve(1)


def fails_in_a_turn(rank: int, world_size: int, folder: str) -> None:
    def step(self: Any, batch: Any, _: int) -> torch.Tensor:
        if rank == 1 and self.current_epoch == 1:
            raise ArithmeticError("of rank 1")
        return forward(self, batch, _)

    forward = lightning_gnn.NodeClassifier.training_step
    with mock.patch.object(lightning_gnn.NodeClassifier, "training_step", step):
        paged(rank, world_size, graph(), "gcn", options={"memory_limit": "1MB", "spill_dir": folder})


def test_an_error_ends_all(ranks, disk):
    with pytest.raises(RankFailed, match="of rank 1"):
        ranks.run(3, fails_in_a_turn, str(disk), timeout=60)


# The pager ####################################################################


@contextmanager
def paging_in(folder: Path, most_bytes: int, release_core: Any = nullcontext) -> Iterator[Pager]:
    """A pager of small tensors, too, with room for so many bytes while it has a turn, and for none after it."""
    turns: Any = SimpleNamespace(release_turn=nullcontext, release_core=release_core)
    with mock.patch.object(paging, "LEAST_BYTES", LEAST), freed_at_once(LEAST):
        made = Pager(folder, turns, most_bytes, 0)
        with made:
            yield made
        made.close()


@pytest.fixture
def pager(disk):
    with paging_in(disk, 0) as made:
        yield made


@pytest.fixture
def roomy(disk):
    with paging_in(disk, 1 << 28) as made:
        yield made


def test_memory_is_given_back(pager):
    before = paging.own_bytes()
    tensors = [torch.arange(1 << 20) + each for each in range(16)]
    pager._leave()
    assert pager.bytes_written > 15 << 23
    assert paging.own_bytes() - before < 16 << 20
    assert all(torch.equal(tensor - each, torch.arange(1 << 20)) for each, tensor in enumerate(tensors))


def test_what_is_not_written_yet_takes_no_place(pager):
    """As buffers of rows that have not come: they are neither moved nor counted, until something is written to them."""
    tensor = torch.empty(1 << 20)
    pager._leave()
    assert pager.bytes_written == 0 and pager._in_memory == 0 and not of_the_file(pager, tensor)
    tensor.fill_(2)
    assert pager._in_memory > 3 << 20
    pager._leave()
    assert pager.bytes_written > 3 << 20 and of_the_file(pager, tensor) and bool((tensor == 2).all())


def test_what_loops_have_written_to_is_moved(pager):
    tensor = torch.empty(1 << 20)
    array = tensor.numpy()
    pager._leave()
    array[1 << 19] = 3  # by no op of torch's
    pager._leave()
    assert of_the_file(pager, tensor) and tensor[1 << 19] == 3


def test_a_full_disk_is_told(pager, monkeypatch):
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    tensor = torch.ones(1 << 20)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="The disk of spill_dir is full"):
        patched.setattr(os, "pwrite", full)
        pager._leave()
    assert bool((tensor == 1).all())


def test_files_have_room_for_what_comes_later(pager):
    for each in range(100):
        tensor = torch.full((1 << 18,), float(each))
        pager._leave()
        assert tensor[0] == tensor[-1] == each
    assert os.fstat(pager._file).st_size <= 8 << 20
    assert pager.bytes_written > 90 << 20


def test_what_is_mapped_stays(pager, tmp_path):
    """A file of features that is mapped, and changed in memory, as batches of the store are."""
    np.save(tmp_path / "x.npy", np.zeros(1 << 18))
    x = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))
    x[:] = 1
    y = x + 1
    pager._leave()
    assert bool((x == 1).all()) and bool((y == 2).all())
    assert not np.load(tmp_path / "x.npy").any()


def test_memory_that_a_storage_has_left(pager):
    """resize_ gives a storage other memory; what comes to lie at the old place is not of the file."""
    tensor = torch.ones(1 << 20)
    pager._leave()
    storage, page = tensor.untyped_storage(), -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    storage.resize_(0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    assert pager._libc.mmap(page, 1 << 20, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == page
    other = (ctypes.c_char * (1 << 20)).from_address(page)
    ctypes.memset(page, 7, 1 << 20)
    pager._leave()
    assert bytes(other) == b"\7" * (1 << 20)
    storage.resize_(4 << 20)
    tensor.fill_(3)
    pager._leave()
    assert bool((tensor == 3).all())


def of_the_file(pager: Pager, tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's memory is the file's."""
    place = tensor.data_ptr() + tensor.nbytes // 2
    return any(begin <= place < end for begin, end, _ in pager._mappings()[1])


def test_read_back_once(disk):
    """What was moved once is read into memory, whole; what was moved again stays in the file, and is not written once more."""
    waits: list[str] = []
    with paging_in(disk, 1 << 28, lambda: nullcontext(waits.append("disk"))) as pager:
        tensor = torch.arange(1 << 21)
        for moves in (1, 2, 3):
            pager._leave()
            assert of_the_file(pager, tensor)
            assert torch.equal(tensor + 0, torch.arange(1 << 21))
            assert of_the_file(pager, tensor) == (moves > 1)
        assert pager._blocks[tensor.data_ptr()].moves == 2
        assert 2 * tensor.nbytes - (1 << 14) < pager.bytes_written < 2 * (tensor.nbytes + (1 << 21))
        assert len(waits) == 5  # written twice, read once, mapped twice


def test_changes_through_the_map(roomy):
    """What code that is no op of torch's writes while a tensor is in the file, as through numpy, is read back with the rest."""
    tensor = torch.zeros(1 << 24, dtype=torch.uint8)
    array = tensor.numpy()
    roomy._leave()
    array[5_000_000:6_000_000] = 3
    assert int((tensor + 0).sum()) == 3_000_000 and not of_the_file(roomy, tensor)


def test_no_room_to_read_back(pager):
    """Nothing is read into memory that there is no room for; what an op uses comes through the map then."""
    tensor = torch.arange(1 << 22)
    pager._leave()
    assert torch.equal(tensor + 0, torch.arange(1 << 22)) and of_the_file(pager, tensor)
    assert pager._blocks[tensor.data_ptr()].moves == 1


def test_other_memory_is_not_read_over(roomy):
    """Of a storage that was given other memory, at the same place as before."""
    tensor = torch.zeros(1 << 24, dtype=torch.uint8)
    roomy._leave()
    page = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    assert roomy._libc.mmap(page, 1 << 23, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == page
    ctypes.memset(page, 7, 1 << 23)
    assert int((tensor + 0).sum()) == 7 << 23


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_ops(disk, data):
    """Tensors that are made, changed in place, cut and freed, in any order, are what they are without."""
    ops = data.draw(
        st.lists(
            st.tuples(st.sampled_from(["new", "add", "view", "cut", "free", "leave"]), st.integers(0, 99)), max_size=40
        )
    )

    def run(leave: Any) -> list[torch.Tensor]:
        tensors = [torch.arange(20000.0)]
        for name, number in ops:
            at = number % len(tensors)
            if name == "new":
                tensors.append(tensors[at] * 0.5 + number)
            elif name == "add":
                tensors[at].add_(number)
            elif name == "view":
                tensors.append(tensors[at][number % 7 :])
            elif name == "cut":
                tensors.append(torch.cat([tensors[at], tensors[0][:1500]])[:20000])
            elif name == "free" and len(tensors) > 1:
                del tensors[at]
            elif name == "leave":
                leave()
        return [tensor.clone() for tensor in tensors]

    expected = run(lambda: None)
    long, most = data.draw(st.sampled_from([LEAST, paging.LONG])), data.draw(st.sampled_from([0, 1 << 17, 1 << 20]))
    with mock.patch.object(paging, "LONG", long), paging_in(disk, most) as pager:
        found = run(pager._leave)
    assert all(map(torch.equal, found, expected))


# What is refused ##############################################################


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DGCLStrategy(memory_limit="a lot"), "memory_limit must be a number of bytes"),
        (lambda: DGCLStrategy(spill_dir="/tmp"), "spill_dir is not supported without memory_limit"),
        (lambda: DGCLStrategy(memory_limit="1GB", shared_memory=False), "not supported with shared_memory=False"),
        (lambda: SamplingStrategy(memory_limit="1GB"), "is not supported"),
        (
            lambda: L.Trainer(strategy=DGCLStrategy(memory_limit="1GB"), devices=1, accelerator="cpu"),
            "several CPU ranks",
        ),
    ],
)
def test_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def too_little(rank: int, world_size: int, options: dict[str, Any]) -> str:
    try:
        train(rank, world_size, graph(), "gcn", options=options)
    except ValueError as error:
        return str(error)
    return ""


def test_too_little_memory(ranks, disk):
    for found in ranks.run(2, too_little, {"memory_limit": "1MB", "spill_dir": str(disk)}):
        assert re.search(r"must exceed the .* GB that 2 ranks use themselves", found)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a folder in memory")
def test_a_folder_in_memory(ranks):
    for found in ranks.run(2, too_little, {"memory_limit": "4GB", "spill_dir": "/dev/shm"}):
        assert "is in memory (tmpfs)" in found
