"""Machines without a shared file system: those that lack an entry of the store fetch it, whole and checked, or not at all.

Machines are folders here, and NODE_RANK. Test tiers: without ranks; gloo ranks in the pool.
"""

from __future__ import annotations

import copy
import errno
import os
import shutil
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import awkward_graph, quiet_trainer
from conftest import RankFailed
from torch_geometric.nn.models import GCN

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.comm import entries
from lightning_gnn.comm.entries import spread_entry
from lightning_gnn.comm.group import World
from lightning_gnn.data import store
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.data.store import StoreError, read_manifest, write_store
from lightning_gnn.partition.layout import LayoutSpec

NAME = "edge_cut-2-graph"


def entry(root: Path, seed: int = 1) -> Path:
    """The awkward graph in two parts, in a store."""
    part = np.random.default_rng(seed).integers(0, 2, 60)
    write_store(root / NAME, prepare_graph(awkward_graph()), part, LayoutSpec("edge_cut", 2), {})
    return root / NAME


def files_of(root: Path) -> dict[str, bytes]:
    """What the entries of a store hold, but for the note of what has been read."""
    found = [file for file in root.glob("*/*") if file.name != "verified.json"]
    return {str(file.relative_to(root)): file.read_bytes() for file in found}


def folders(root: Path) -> list[str]:
    return sorted(each.name for each in root.glob("*") if each.is_dir())


class Noted:
    """Counts the bytes of files that this rank reads to send them, and may do something to them."""

    def __init__(self, fault: str = "") -> None:
        self.sent, self._fault, self._read, self._read_text = 0, fault, entries._read, entries._read_text

    def text(self, folder: Path) -> bytes:
        text = self._read_text(folder)
        self.sent += len(text)
        return text.replace(b'"seconds"', b'"secondz"') if self._fault == "altered manifest" else text

    def read(self, file: Path, low: int, into: memoryview) -> None:
        self._read(file, low, into)
        self.sent += len(into)
        if self._fault == "slow":
            time.sleep(0.24)
        if file.name == "node.x.npy" and self._fault == "altered":
            into[-1] ^= 1
        elif file.name == "node.x.npy" and self._fault == "unreadable":
            raise StoreError(f"{file} cannot be read (a bad disk), and other machines need it.")

    def patch(self, patched: pytest.MonkeyPatch) -> Noted:
        patched.setattr(entries, "_read", self.read)
        patched.setattr(entries, "_read_text", self.text)
        patched.setattr(entries, "_CHUNK", 1000)
        return self


def train(rank: int, size: int, roots: list[Path], devices: int) -> tuple[list[torch.Tensor], int, int]:
    """Trains on machines with a store each; returns weights, bytes of files that this rank has sent, and graphs it has loaded."""
    loaded = []

    def source() -> Any:
        loaded.append(rank)
        return awkward_graph()

    torch.manual_seed(3)
    machine, local = divmod(rank, devices)
    os.environ.update(NODE_RANK=str(machine), LOCAL_RANK=str(local))
    model = NodeClassifier(GCN(12, 8, num_layers=2, out_channels=5)).double()
    with pytest.MonkeyPatch.context() as patched:
        noted = Noted().patch(patched)
        strategy: Any = DGCLStrategy(timeout=60) if size > 1 else "auto"
        trainer = quiet_trainer(strategy, devices, num_nodes=len(roots))
        data = GraphDataModule(source, partition_dir=roots[machine])
        trainer.fit(model, datamodule=data)
        trainer.test(model, datamodule=data, verbose=False)
    return [copy.deepcopy(each.detach()) for each in model.parameters()], noted.sent, len(loaded)


def assert_trained_alike(found: list[tuple[list[torch.Tensor], int, int]], folder: Path) -> None:
    [whole, *_] = train(0, 1, [folder / "one"], 1)
    for weights, *_ in found:
        torch.testing.assert_close(weights, whole, rtol=1e-9, atol=1e-11)
    assert [loaded for *_, loaded in found] == [1] + [0] * (len(found) - 1)  # rank 0 alone


def test_another_machine_fetches_what_it_lacks_once(ranks, tmp_path):
    first, second = roots = [tmp_path / "first", tmp_path / "second"]
    stale = entry(second)  # of another run, under another name
    before = files_of(second)
    found = ranks.run(4, train, roots, 2)
    assert_trained_alike(found, tmp_path)
    sent = files_of(first)
    assert {name: text for name, text in files_of(second).items() if name not in before} == sent
    assert files_of(second).keys() - sent.keys() == before.keys() and stale.is_dir()
    assert [count for _, count, _ in found] == [sum(map(len, sent.values())), 0, 0, 0]
    assert [count for _, count, _ in ranks.run(4, train, roots, 2)] == [0, 0, 0, 0]  # found again


def test_nothing_is_sent_where_all_see_the_store(ranks, tmp_path):
    found = ranks.run(2, train, [tmp_path / "shared"] * 2, 1)
    assert_trained_alike(found, tmp_path)
    assert [count for _, count, _ in found] == [0, 0] and len(folders(tmp_path / "shared")) == 1


def spread(
    rank: int, size: int, root: Path, faults: dict[int, str], seconds: float = 60, machines: int = 9
) -> tuple[int, list[str]]:
    """Brings the entry of rank 0 to the first ranks, a machine each; returns the bytes that this one sent, and what it says."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    world = World(rank, size, torch.device("cpu"), timedelta(seconds=seconds), shared_memory=False)
    own, fault, told = root / str(rank), faults.get(rank, ""), []
    own.mkdir(exist_ok=True)

    def lock(name: str) -> AbstractContextManager[None]:
        return GraphDataModule(awkward_graph(), partition_dir=own)._lock(name)

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    try:
        with pytest.MonkeyPatch.context() as patched:
            noted = Noted(fault).patch(patched)
            patched.setattr(entries, "rank_zero_info", told.append)
            if fault == "full":
                patched.setattr(store.Summed, "write", full)
            elif fault == "small":
                patched.setattr(shutil, "disk_usage", lambda root: shutil._ntuple_diskusage(9, 9, 5))
            elif fault == "other version":
                patched.setattr(store, "FORMAT", store.FORMAT + 1)
            spread_entry(world, rank < machines, own / NAME, lock)
            assert not world.watch.alarm
    finally:
        world.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return noted.sent, told


def test_all_that_lack_it_get_it_at_once(ranks, tmp_path):
    size = sum(file.stat().st_size for file in entry(tmp_path / "0").iterdir() if file.name != "verified.json")
    found = ranks.run(4, spread, tmp_path, {})
    assert [count for count, _ in found] == [size, 0, 0, 0]
    assert all(files_of(tmp_path / str(rank)) == files_of(tmp_path / "0") for rank in range(4))
    assert all((tmp_path / str(rank) / NAME / "verified.json").is_file() for rank in range(4))
    total = sum(size for size, _ in read_manifest(tmp_path / "3" / NAME)["files"].values())
    [said] = found[0][1]
    assert said.startswith(f"Sent {NAME} to 3 machine(s): {total:,} bytes in")


HOST = os.uname().nodename
FAULTS = {
    "altered manifest": (
        {0: "altered manifest"},
        1,
        f"manifest.json of {NAME} arrived from {HOST} with different bytes",
    ),
    "unreadable": ({0: "unreadable"}, 0, "node.x.npy cannot be read (a bad disk), and other machines need it"),
    "full": ({1: "full"}, 1, "is full. The partitioned graph needs at least"),
    "small": ({1: "small"}, 1, "is full. The partitioned graph needs at least"),
    "other version": ({1: "other version"}, 1, f"Use one version of lightning_gnn on {HOST} and here."),
    "altered": ({0: "altered"}, 1, f"node.x.npy of {NAME} arrived from {HOST} with different bytes than were written"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_is_told_on_all_ranks_and_leaves_nothing(ranks, tmp_path, fault):
    entry(tmp_path / "0")
    faults, where, words = FAULTS[fault]
    began = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        ranks.run(3, spread, tmp_path, faults)
    assert time.monotonic() - began < 20 and sorted(failed.value.errors) == [0, 1, 2]
    errors = failed.value.errors
    assert words in errors[where] and words in errors[2] and errors[where].startswith("StoreError: ")
    elsewhere = "RuntimeError: The partitioned graph could not be brought to all machines, see rank "
    assert all(error.startswith((elsewhere, "StoreError: ")) for error in errors.values())
    assert errors[0].startswith("StoreError: " if where == 0 else elsewhere)
    assert not folders(tmp_path / "1") and not folders(tmp_path / "2")
    ranks.run(3, spread, tmp_path, {})
    assert files_of(tmp_path / "2") == files_of(tmp_path / "0")


def test_another_partition_of_the_same_graph_is_left_alone(ranks, tmp_path):
    entry(tmp_path / "0"), entry(tmp_path / "1", seed=2)
    before = files_of(tmp_path / "1")
    with pytest.raises(RankFailed) as failed:
        ranks.run(3, spread, tmp_path, {})
    for error in failed.value.errors.values():
        assert f"Stores hold different partitions of the same graph under {NAME}: {HOST} (rank 1) made theirs" in error
    assert files_of(tmp_path / "1") == before and not folders(tmp_path / "2")


def test_a_transfer_may_take_longer_than_the_deadline(ranks, tmp_path):
    entry(tmp_path / "0")
    began = time.monotonic()
    ranks.run(3, spread, tmp_path, {0: "slow"}, 2.5, 2)  # the third waits
    assert time.monotonic() - began > 2.5
    assert files_of(tmp_path / "1") == files_of(tmp_path / "0")
