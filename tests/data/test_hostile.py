"""Input from places that nobody vouches for: a part of the campaign in ``benchmarks/bad_input.py``, and the store under attack,
after a loss of power, on a full disk and among other runs. No ranks."""

from __future__ import annotations

import errno
import importlib.util
import json
import multiprocessing as mp
import os
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from common import examples
from hypothesis import given
from hypothesis import strategies as st
from processes import REPOSITORY
from test_bad_input import TWO, built, flip, rewrite, small
from torch_geometric.data import HeteroData

from lightning_gnn import GraphDataModule
from lightning_gnn.data import store
from lightning_gnn.data.store import StoreError, read_array, read_cut
from lightning_gnn.extensions.plans.wiring import topology_from_dict
from lightning_gnn.partition.layout import LayoutSpec


@pytest.fixture(scope="module")
def campaign() -> Any:
    spec = importlib.util.spec_from_file_location("bad_input", REPOSITORY / "benchmarks" / "bad_input.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules["bad_input"] = module
    spec.loader.exec_module(module)
    yield module
    module.clean_up()
    del sys.modules["bad_input"]


KINDS = {"graph": 60, "graph with types": 40, "argument": 150, "command line": 2, "topology": 80, "store": 60}


@pytest.mark.parametrize("kind", KINDS)
def test_part_of_the_campaign(campaign, kind):
    assert KINDS.keys() == campaign.KINDS.keys()
    for case in campaign.cases(KINDS[kind], 11, kind):
        outcome, said = campaign.judge(case)
        assert outcome in campaign.GOOD, f"{case.kind}: {case.name}: {outcome}: {said}"


def test_the_campaign_finds_what_is_bad(campaign, monkeypatch):
    outcomes: dict[str, Callable[[], Any]] = {
        "raw": lambda: torch.ones(2)[5],
        "hung": lambda: time.sleep(5),
        "wrong": lambda: "taken",
        "refused": lambda: GraphDataModule(small(), seed=-1),
    }
    for expected, run in outcomes.items():
        monkeypatch.setattr(campaign, "DEADLINE_S", 0.2 if expected == "hung" else 20.0)
        assert campaign.judge(campaign.Case("", "", run, "seed", lambda _: False))[0] == expected
    unnamed = campaign.Case("", "", outcomes["refused"], "split_index", lambda _: False)
    assert campaign.judge(unnamed)[0] == "raw"


# The store ####################################################################


def same(folder: Path, was: Any) -> bool:
    cut = read_cut(folder)
    arrays = [cut.n_id, cut.e_id, *(value for of in cut.attributes.values() for value in of.values())]
    others = [was.n_id, was.e_id, *(value for of in was.attributes.values() for value in of.values())]
    return np.array_equal(cut.edge_index(), was.edge_index()) and all(map(torch.equal, arrays, others))


def test_a_loss_of_power_at_any_byte_is_found(tmp_path, monkeypatch):
    """500 files that end early, or hold zeros from some byte on, which is what a disk has that was not told to keep them."""
    monkeypatch.setattr(GraphDataModule, "_build_in_subprocess", GraphDataModule.build)
    module = GraphDataModule("test_bad_input.small", partition_dir=tmp_path)
    folder = tmp_path / module._ensure_stored(TWO)
    was = read_cut(shutil.copytree(folder, tmp_path / "elsewhere" / folder.name))
    files = [file for file in (*folder.iterdir(), *tmp_path.glob("*.known"))]
    rng, found = np.random.default_rng(0), 0
    for number in range(500):
        file = files[rng.integers(len(files))]
        content = file.read_bytes()
        at = int(rng.integers(len(content)))
        damaged = content[:at] + (bytes(len(content) - at) if number % 2 else b"")
        if damaged == content:
            continue
        file.write_bytes(damaged)
        if file.name == "verified.json" or file.suffix == ".known":  # say nothing, so all is read, or built, again
            assert tmp_path / module._ensure_stored(TWO) == folder and same(folder, was)
        else:
            with pytest.raises(StoreError, match=file.name.replace("manifest.json", "manifest")):
                read_cut(folder)
            found += 1
        file.write_bytes(content)
    assert found > 300 and same(folder, was)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("code", [errno.ENOSPC, None])
def test_writing_that_ends_at_any_byte(tmp_path, monkeypatch, share, code):
    """The disk fills up, or the power goes (nothing is cleaned up), after a share of all bytes; the next run makes the entry."""
    write, total = store.Summed.write, [0]

    def counted(file: Any, chunk: bytes) -> int:
        total[0] += len(chunk)
        return write(file, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(store.Summed, "write", counted)
        folder = built(tmp_path / "whole")
    left = [int(share * total[0])]

    class PowerLoss(BaseException):
        pass

    def ending(file: Any, chunk: bytes) -> int:
        if len(chunk) > left[0]:
            write(file, bytes(chunk)[: left[0]])
            raise OSError(code, os.strerror(code)) if code else PowerLoss
        left[0] -= len(chunk)
        return write(file, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(store.Summed, "write", ending)
        if code is None:
            patch.setattr(store.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(StoreError if code else PowerLoss, match="is full.* bytes are free" if code else None):
            built(tmp_path / "cut")
    folders = [path.name for path in (tmp_path / "cut").iterdir() if path.is_dir()]
    assert folders == [] if code else len(folders) == 1 and folders[0].startswith(".")
    assert same(built(tmp_path / "cut"), read_cut(folder))
    assert [path.name for path in (tmp_path / "cut").iterdir() if path.is_dir()] == [folder.name]


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        done.append(("sync", Path(f"/proc/self/fd/{descriptor}").resolve().name))

    def renamed(path: Path, target: Path) -> Path:
        done.append(("rename", Path(target).name))
        return replace(path, target)

    monkeypatch.setattr(store.os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    folder = built(tmp_path)
    at = done.index(("rename", folder.name))
    before = {name for what, name in done[:at] if what == "sync"}
    assert {file.name for file in folder.iterdir()} - {"verified.json"} <= before
    assert any(name.startswith(f".{folder.name}.") for name in before)  # the folder itself
    assert ("sync", tmp_path.name) in done[at:]


def test_a_store_that_cannot_be_written_is_read_once_by_each_process(tmp_path, monkeypatch):
    folder, read = shutil.copytree(built(tmp_path), tmp_path / "copy" / built(tmp_path).name), []
    checksum = store.checksum_of
    monkeypatch.setattr(store, "checksum_of", lambda file: read.append(file.name) or checksum(file))

    def read_only(*_: Any) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(store, "write_atomically", read_only)
    read_cut(folder)
    assert "node.x.npy" in read
    read.clear()
    read_cut(folder)
    assert read == []
    flip(folder / "node.x.npy", -1)
    with pytest.raises(StoreError, match="node.x.npy has been altered"):
        read_cut(folder)


def test_an_entry_from_elsewhere_is_read_whatever_it_says_of_itself(tmp_path):
    """Its notes say that all has been read; so say its times, which archives keep."""
    folder = built(tmp_path / "theirs")
    stat = (folder / "node.x.npy").stat()
    flip(folder / "node.x.npy", -1)
    os.utime(folder / "node.x.npy", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    ours = shutil.copytree(folder, tmp_path / "ours" / folder.name)  # with times
    with pytest.raises(StoreError, match="node.x.npy has been altered or damaged"):
        read_cut(ours)


def sign(folder: Path) -> None:
    """Works sizes and checksums out again, as anybody can who may write to the store."""

    def again(manifest: dict[str, Any]) -> None:
        for name in manifest["files"]:
            manifest["files"][name] = [(folder / name).stat().st_size, store.checksum_of(folder / name)]

    rewrite(folder, again, sign=True)


@pytest.mark.parametrize("where", ["files", "attributes", "both"])
@pytest.mark.parametrize("name", ["/../../secret", "x/../../../secret"])
def test_nothing_outside_the_folder_is_read(tmp_path, name, where, monkeypatch):
    folder, opened = built(tmp_path), []
    np.save(tmp_path / "secret.npy", np.ones((6, 2), np.float32))

    def add(manifest: dict[str, Any]) -> None:
        if where != "files":
            manifest["attributes"]["node"].append(name)
        if where != "attributes":
            manifest["files"][f"node.{name}.npy"] = [0, 0]

    rewrite(folder, add, sign=True)
    monkeypatch.setattr(store, "plain_size", opened.append)
    monkeypatch.setattr(store, "_parse", lambda file: json.loads(file.read_text()))
    with pytest.raises(StoreError, match="files has missing or unexpected names, such as .*secret"):
        read_cut(folder)
    assert opened == []


@pytest.mark.parametrize("name", ["../../secret", "/etc/secret", "x/../../../secret", "a\0b", "x" * 300])
def test_no_attribute_is_written_outside_the_folder(tmp_path, name):
    with pytest.raises(ValueError, match="The graph has an attribute"):
        GraphDataModule(small(**{name: torch.ones(6)}), partition_dir=tmp_path).build(TWO)


@pytest.mark.parametrize("name", ["node.x.npy", "manifest.json"])
@pytest.mark.parametrize("make", [Path.symlink_to, lambda path, _: os.mkfifo(path)], ids=["link", "pipe"])
def test_links_and_pipes_are_not_opened(tmp_path, name, make):
    folder = built(tmp_path)
    elsewhere = (folder / name).rename(tmp_path / name)
    make(folder / name, elsewhere)
    with pytest.raises(StoreError, match=f"{name} is not a regular file"):
        read_cut(folder)


class Runs:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_nothing_is_unpickled(tmp_path):
    folder, file = built(tmp_path), tmp_path / "was run"
    np.save(folder / "node.x.npy", np.array([Runs(file)] * 6, object), allow_pickle=True)
    sign(folder)
    with pytest.raises(StoreError, match="node.x.npy has no header of a .npy file of numbers"):
        read_cut(folder)
    assert not file.exists()


def typed() -> HeteroData:
    graph = HeteroData()
    graph["a"].x, graph["b"].num_nodes = torch.rand(5, 2), 4
    graph["a"].y, graph["a"].train_mask = torch.zeros(5, dtype=torch.long), torch.ones(5, dtype=torch.bool)
    graph["a"].val_mask = graph["a"].test_mask = graph["a"].train_mask
    graph["a", "to", "b"].edge_index = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 0, 3, 0]])
    graph["b", "to", "a"].edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 4, 3]])
    return graph


LAYOUTS = {
    "edge_cut": (small, TWO),
    "vertex_cut": (small, LayoutSpec("vertex_cut", 2, method="ne")),
    "types": (typed, LayoutSpec("edge_cut", 2, takes_types=True)),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_ids_out_of_range_are_found(tmp_path, kind):
    """In each array of ids, and at both of its ends; so are too few rows of any array."""
    make, layout = LAYOUTS[kind]
    folder = tmp_path / GraphDataModule(make(), partition_dir=tmp_path).build(layout)
    read_cut(folder)
    offsets = json.loads((folder / "manifest.json").read_text())["offsets"]
    tried = set()
    for file in sorted(folder.glob("*.npy")):
        kept, was = file.read_bytes(), np.load(file)
        part = int(file.name[4]) if file.name.startswith("part") else 0
        own, halo = offsets[part + 1] - offsets[part], len(np.load(folder / f"part{part}.halo.npy"))
        for at in (0, -1) if was.size else ():
            values = was.copy()
            wrong: list[tuple[Any, int]] = [(at, -1)]
            if file.name.startswith("part") and "edge_index" in file.name:
                wrong = [((0, at), -1), ((0, at), own + halo), ((1, at), -1), ((1, at), own)]
            elif file.name in ("n_id.npy", "e_id.npy"):  # ids of the first type lie first, those of the last one last
                wrong.append((at, (5 if at == 0 else 4) if kind == "types" else len(was)))
            elif file.name == "holders.npy":
                wrong.append((at, 2))
            elif "halo" in file.name:
                wrong.append((at, offsets[-1]))
            else:
                break
            for place, value in wrong:
                values[:] = was
                values[place] = value
                np.save(file, values)
                sign(folder)
                with pytest.raises(StoreError, match=rf"{file.name} holds ids from .* not from 0 to"):
                    read_cut(folder)
                tried.add(file.name)
        if "halo" not in file.name:  # which has any number
            np.save(file, was[:, :-1] if "edge_index" in file.name else was[:-1])
            sign(folder)
            with pytest.raises(StoreError, match=rf"{file.name} must have \d+ rows"):
                read_cut(folder)
        file.write_bytes(kept)
        sign(folder)
    ids = {file.name for file in folder.glob("*.npy") if not file.name.startswith(("node", "edge"))}
    assert tried == {name for name in ids if np.load(folder / name).size}
    read_cut(folder)


DTYPES = st.sampled_from(["<f4", "<i8", "|b1", "|O", ">i8", "<U9", "|V4", "<f16", "[('a', '<i8')]"])
SHAPES = st.lists(st.one_of(st.integers(-2, 9), st.integers(2**40, 2**70)), max_size=4).map(tuple)


@examples(150)
@given(
    DTYPES,
    SHAPES,
    st.binary(max_size=64),
    st.binary(max_size=4),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 3, 9]),
)
def test_headers(tmp_path_factory, dtype, shape, data, junk, length, version):
    """A file is read as numpy reads it, or refused; never is more memory taken than the file has bytes."""
    header = (
        f"{{'descr': {dtype if dtype[0] == '[' else repr(dtype)}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    )
    if length % 3:
        length = len(header) + len(junk) + 1
    packed = struct.pack("<H", length % 2**16) if version == 1 else struct.pack("<I", length)
    path = tmp_path_factory.mktemp("header") / "a.npy"
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + packed + header + junk + b"\n" + data)
    try:
        found = read_array(path)
    except ValueError as error:
        assert "a.npy" in str(error)
    else:
        assert found.shape == shape and found.tobytes() == data and found.dtype.kind in "fib"


@pytest.mark.parametrize("shape", [(4,), (2, 3), (6,), (1000000000000,), (0, 2**40, 2**40), ()])
def test_headers_that_lie(tmp_path, shape):
    path = tmp_path / "a.npy"
    np.save(path, np.ones(5))
    path.write_bytes(path.read_bytes().replace(b"'shape': (5,), }", f"'shape': {shape}, }}".encode()))
    content = path.read_bytes()[: -40 if 0 in shape else None]
    path.write_bytes(content[:8] + struct.pack("<H", content.index(b"\n", 10) - 9) + content[10:])
    with pytest.raises(ValueError, match="a.npy has .* bytes, but by its header"):
        read_array(path)


KEYS = ["devices", "ranks", "links", "hops", "hosts", "sockets", "memory", "a", "b", "via", "name", "gb_per_s", "kind"]
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.integers(0, 4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from([*KEYS, "bandwidth_mbit", "device", "reference"]), inner, max_size=6),
    ),
    max_leaves=30,
)


@examples(100)
@given(JSON)
def test_topologies_of_any_content(value):
    try:
        found = topology_from_dict(value)
    except ValueError as error:
        assert str(error)
    else:
        assert 1 <= found.num_devices <= 64 and found.passes.shape[2] == len(found.hops)


# Several runs at once #########################################################


def build_slowly(root: Path, dies: bool) -> None:
    """Partitions, which takes a while; may be killed in the middle, with the lock in hand."""
    save = store.Summed.write

    def slow(file: Any, chunk: bytes) -> int:
        time.sleep(0.01)
        if dies and (root / "waits").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return save(file, chunk)

    store.Summed.write = slow  # type: ignore[method-assign]
    told: list[str] = []
    store_check_space = store.check_space

    def noted(*args: Any) -> None:
        (root / f"partitions.{os.getpid()}").touch()
        store_check_space(*args)
        while dies and not (root / "waits").exists():
            time.sleep(0.01)

    from lightning_gnn.datamodules import graph as datamodule

    datamodule.check_space = noted  # type: ignore[assignment]
    datamodule.rank_zero_info = told.append  # type: ignore[assignment]
    folder = built(root)
    (root / f"done.{os.getpid()}").write_text(json.dumps([folder.name, told]))


def test_runs_that_want_the_same_partition(tmp_path):
    """One that is killed at work is succeeded by another; all others wait, are told for whom, and find the one entry."""
    context = mp.get_context("fork")
    first = context.Process(target=build_slowly, args=(tmp_path, True))
    first.start()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("partitions.*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    others = [context.Process(target=build_slowly, args=(tmp_path, False)) for _ in range(3)]
    for other in others:
        other.start()
    time.sleep(2.5)  # beyond the first wait
    (tmp_path / "waits").touch()
    for process in (first, *others):
        process.join(60)
    assert [process.exitcode for process in (first, *others)] == [-signal.SIGKILL, 0, 0, 0]
    results = [json.loads(file.read_text()) for file in tmp_path.glob("done.*")]
    assert len({name for name, _ in results}) == 1 and len(results) == 3
    assert len(list(tmp_path.glob("partitions.*"))) == 2  # the killed one's, and one other's
    waited = [line for _, told in results for line in told if line.startswith("Waiting for process")]
    assert any(f"process {first.pid} on " in line and "which partitions the same graph" in line for line in waited)
    assert all(" (for " in line for line in waited)
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert [path.name for path in folders] == [results[0][0]]
    read_cut(folders[0], TWO).shard(1)
