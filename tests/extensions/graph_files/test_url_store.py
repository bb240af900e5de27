"""Partition directories at URLs: uploads, downloads, resumed transfers, checks, errors, and training.

Test tiers: without ranks; gloo ranks in the pool.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from test_folders import GRAPH, own, trained
from test_urls import BLOCK, breaks, requests_of, served

from lightning_gnn import GraphDataModule
from lightning_gnn.data.store import StoreError, read_cut
from lightning_gnn.datamodules import graph as datamodule
from lightning_gnn.extensions.graph_files import urls
from lightning_gnn.partition.layout import LayoutSpec

TWO = LayoutSpec("edge_cut", 2)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "BLOCK", BLOCK)
    monkeypatch.setattr(urls, "PAUSES_S", (0.0, 0.0))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Returns a function that begins a machine without local files."""

    def begin(name: str) -> Path:
        monkeypatch.setenv("LIGHTNING_GNN_STORE", str(tmp_path / name))
        return tmp_path / name

    return begin


def partition(location: Any, source: Any = GRAPH) -> Path:
    """Returns the entry of a graph in a partition directory; partitions it in this process unless it is there."""
    data = GraphDataModule(source, partition_dir=location, partition="random")
    return data.partition_dir / data.build(TWO)


def never(*_: Any) -> None:
    raise AssertionError("the graph is partitioned again")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "verified.json"}


def test_a_second_machine_reads_the_entry_of_the_first(machine, tmp_path, monkeypatch):
    url = f"file://{tmp_path}/bucket/store/"
    machine("a")
    first = partition(url)
    assert contents(tmp_path / "bucket" / "store" / first.name) == contents(first)
    second_root = machine("b")
    monkeypatch.setattr(datamodule, "write_store", never)
    second = partition(url)
    assert second.parent.parent == second_root and contents(second) == contents(first)
    assert torch.equal(read_cut(second).graph().edge_index, GRAPH.edge_index)
    left = {path.name for path in second.parent.iterdir() if path.suffix not in (".lock", ".owner")}
    assert left == {second.name}, "temporary files are removed"


def test_a_source_by_its_path_is_found_without_loading_the_graph(machine, tmp_path, monkeypatch):
    """By the note of the first machine, through $LIGHTNING_GNN_STORE; the local copy is in the cache of the user."""
    folder, url = own(tmp_path / "graph"), f"file://{tmp_path}/bucket"
    monkeypatch.setenv("LIGHTNING_GNN_STORE", url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    first = GraphDataModule(str(folder)).partition_for(TWO)
    assert tmp_path / "a" / "lightning_gnn" in first.parents
    assert [*(tmp_path / "bucket").glob("*.known")] and not [*tmp_path.glob("file:*")]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setattr(GraphDataModule, "_build_in_subprocess", never)
    second = GraphDataModule(str(folder)).partition_for(TWO)
    assert contents(second) == contents(first)
    assert pickle.loads(pickle.dumps(GraphDataModule(str(folder))._store)).location == url


def test_an_upload_without_its_manifest_is_no_entry(machine, tmp_path):
    machine("a")
    name = partition(f"file://{tmp_path}/bucket").name
    (tmp_path / "bucket" / name / "manifest.json").unlink()
    (tmp_path / "bucket" / name / "n_id.npy").write_bytes(b"incomplete")
    machine("b")
    again = partition(f"file://{tmp_path}/bucket")
    assert contents(tmp_path / "bucket" / name) == contents(again)


def test_the_manifest_is_uploaded_last(machine, tmp_path, monkeypatch):
    uploaded, system = [], fsspec.filesystem("file")
    put = type(system).put_file
    monkeypatch.setattr(type(system), "put_file", lambda self, a, b, **_: (uploaded.append(Path(b).name), put(self, a, b)))
    machine("a")
    entry = partition(f"file://{tmp_path}/bucket")
    assert uploaded[-1] == "manifest.json" and {*uploaded} == {*contents(entry)}


def test_an_upload_that_fails_is_a_warning(machine, tmp_path, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr(type(fsspec.filesystem("file")), "put_file", fail)
    machine("a")
    with pytest.warns(
        UserWarning, match=r"File \S+ of file://\S+ cannot be uploaded in 3 .*read only.* The entry is in \S+ only"
    ):
        entry = partition(f"file://{tmp_path}/bucket")
    assert read_cut(entry).types.total("node") == GRAPH.num_nodes


def test_a_server_that_hides_missing_files(machine, tmp_path, monkeypatch):
    """Object stores refuse access to missing files if the user may not list the folder."""
    monkeypatch.setattr(
        type(fsspec.filesystem("file")), "cat_file", lambda *_, **__: (_ for _ in ()).throw(PermissionError("403"))
    )
    machine("a")
    entry = partition(f"file://{tmp_path}/bucket")
    assert contents(tmp_path / "bucket" / entry.name) == contents(entry)


# HTTP #########################################################################


def on_server(tmp_path: Path) -> Path:
    """A partition directory to serve, with an entry."""
    return partition(tmp_path / "server")


def test_https_is_read_only(machine, tmp_path, monkeypatch):
    entry = on_server(tmp_path)
    machine("a")
    with served(tmp_path / "server") as server:
        other = GraphDataModule(GRAPH, partition_dir=server.url, partition="contiguous")
        assert (other.partition_dir / other.build(TWO)).exists() and len([*(tmp_path / "server").glob("edge_cut*/")]) == 1
        monkeypatch.setattr(datamodule, "write_store", never)
        assert contents(partition(server.url)) == contents(entry)


def test_a_broken_transfer_continues_in_the_next_run(machine, tmp_path, monkeypatch):
    entry = on_server(tmp_path)
    cache, name = machine("a"), f"{entry.name}/node.x.npy"
    monkeypatch.setattr(datamodule, "write_store", never)
    with served(tmp_path / "server") as server:
        server.faults[name] = breaks(3, after=BLOCK + 10)
        with pytest.raises(ValueError, match=r"File node.x.npy of http://\S+ cannot be downloaded in 3 attempts"):
            partition(server.url)
        assert not [*cache.glob(f"*/{entry.name}")], "an incomplete entry never appears"
        server.requests.clear()
        found = partition(server.url)
        assert requests_of(server, name)[0].startswith(f"bytes={BLOCK}-")
        assert not requests_of(server, f"{entry.name}/e_id.npy"), "complete files are kept"
    assert contents(found) == contents(entry)


def test_a_file_with_another_checksum_never_appears(machine, tmp_path):
    entry = on_server(tmp_path)
    data = bytearray((entry / "node.x.npy").read_bytes())
    data[-1] ^= 1
    (entry / "node.x.npy").write_bytes(data)
    cache = machine("a")
    error = r"File node.x.npy of .*its checksum differs from manifest.json"
    with served(tmp_path / "server") as server, pytest.raises(ValueError, match=error):
        partition(server.url)
    assert not [*cache.glob(f"*/{entry.name}")]


@pytest.mark.parametrize("text", ["{", "[]", '{"files": {"../x.npy": [1, 2]}}', '{"files": {"x.npy": 1}}', ""])
def test_manifests_that_are_none(text, machine, tmp_path):
    entry = on_server(tmp_path)
    (entry / "manifest.json").write_text(text)
    machine("a")
    with served(tmp_path / "server") as server, pytest.raises(ValueError, match=r"has no readable manifest.json \(.*Remove the"):
        partition(server.url)


def test_an_entry_that_was_changed_with_its_checksums_is_read_with_the_checks_of_other_entries(machine, tmp_path):
    entry = on_server(tmp_path)
    manifest = json.loads((entry / "manifest.json").read_text())
    (entry / "manifest.json").write_text(json.dumps({**manifest, "num_classes": 9}))
    machine("a")
    with served(tmp_path / "server") as server, pytest.raises(StoreError, match="has been altered: its checksum differs"):
        partition(server.url)


def test_no_server_and_no_package(machine, tmp_path, monkeypatch):
    machine("a")
    with served(tmp_path) as server:
        url = server.url
    with pytest.raises(ValueError, match=r"http://\S+/edge_cut-2-\w+ cannot be downloaded in 3 attempts \(manifest.json: Client"):
        partition(url)
    monkeypatch.setitem(urls.known_implementations, "s4", {"class": "s3fs_of_nobody.S3", "err": "Install s3fs"})
    monkeypatch.setenv("LIGHTNING_GNN_STORE", "s4://bucket/store")
    with pytest.raises(ModuleNotFoundError, match=r"Reading s4://bucket/store/\S+ needs .* Run pip install s3fs_of_nobody\."):
        GraphDataModule(GRAPH).build(TWO)
    assert not Path("s4:").exists()
    for wrong in ("", "a\0b", 3):
        with pytest.raises(ValueError, match="partition_dir must be the path or URL of a folder"):
            GraphDataModule(GRAPH, partition_dir=wrong)


# Training #####################################################################


def on_machine(rank: int, world_size: int, root: str, source: Any, url: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_GNN_STORE", root)
        return trained(rank, world_size, source, url, "dgcl")


def test_ranks_train_from_a_url(ranks, tmp_path):
    wanted = ranks.run(2, trained, GRAPH, str(tmp_path / "local"), "dgcl")
    for name in ("a", "b"):
        found = ranks.run(2, on_machine, str(tmp_path / name), GRAPH, f"file://{tmp_path}/bucket")
        for of_url, of_folder in zip(found, wanted):
            assert torch.equal(of_url["out"], of_folder["out"]) and of_url["logged"] == of_folder["logged"]
    assert len([*tmp_path.glob("bucket/*/manifest.json")]) == 1
    assert np.load(next(tmp_path.glob("b/*/*/n_id.npy"))).size == GRAPH.num_nodes
