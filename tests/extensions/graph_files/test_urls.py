"""Graphs at URLs: downloads, resumed transfers, checks, errors and later runs."""

from __future__ import annotations

import hashlib
import multiprocessing as mp
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from test_folders import GRAPH, own, trained

from lightning_gnn import GraphDataModule
from lightning_gnn.extensions.graph_files import urls
from lightning_gnn.extensions.graph_files.urls import UrlSource
from lightning_gnn.partition.layout import LayoutSpec

TWO = LayoutSpec("edge_cut", 2)
BLOCK = 1000


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "BLOCK", BLOCK)
    monkeypatch.setattr(urls, "PAUSES_S", (0.0, 0.0))


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder, with ranges, ETags or modification times; `server.plan` has the faults."""

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        server: Any = self.server
        name, file = self.path.lstrip("/"), Path(self.translate_path(self.path))
        ranged = self.headers.get("Range")
        if body:
            server.requests.append((name, ranged))
        if not file.is_file():
            self.send_error(server.missing)
            return
        data = file.read_bytes()
        size, begin, end = len(data), 0, len(data)
        if ranged and server.ranges:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", ranged).groups()  # type: ignore[union-attr]
            begin, end = int(first), min(int(last) + 1, size)
        self.send_response(206 if (begin, end) != (0, size) else 200)
        if server.tag:
            self.send_header("ETag", hashlib.md5(data + str(file.stat().st_mtime_ns).encode()).hexdigest())
        if (begin, end) != (0, size):
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        sent = data[begin:end]
        fault = server.faults.get(name) if body else None
        if fault is not None:
            sent = fault(begin, sent) or sent
        self.send_header("Content-Length", str(len(sent) if getattr(fault, "shortens", False) else end - begin))
        self.end_headers()
        if body:
            self.wfile.write(sent)
            self.wfile.flush()
            if len(sent) < end - begin:
                self.close_connection = True


@contextmanager
def serving(handler: Callable[..., Any], **attributes: Any) -> Iterator[Any]:
    """Context manager of a local server with these attributes and the `requests` that its handler notes."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    vars(server).update(attributes, requests=[])
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def served(folder: Path, ranges: bool = True, tag: bool = True) -> Iterator[Any]:
    """Context manager of a server of a folder, with its `url`, the `requests` for contents, and `faults` by file."""

    def handler(*args: Any) -> Handler:
        return Handler(*args, directory=str(folder))

    with serving(handler, ranges=ranges, tag=tag, faults={}, missing=404) as server:
        server.url = f"http://127.0.0.1:{server.server_port}/"
        yield server


def summed(folder: Path) -> Path:
    """Writes checksums.txt as sha256sum does."""
    files = sorted(each for each in folder.rglob("*") if each.is_file() and each.name != "checksums.txt")
    lines = [f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.relative_to(folder)}\n" for each in files]
    (folder / "checksums.txt").write_text("".join(lines))
    return folder


def load(url: str, store: Path) -> UrlSource:
    source = UrlSource(url, store)
    source.load(None, store)
    return source


def local(store: Path) -> dict[str, bytes]:
    """Returns the local copies of the only URL in a store."""
    [folder] = store.glob("*.url")
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.name not in urls.LISTS}


def requests_of(server: Any, name: str) -> list[str | None]:
    return [ranged for each, ranged in server.requests if each == name]


def breaks(times: int, after: int) -> Callable[[int, bytes], bytes | None]:
    """Returns a fault: the connection ends in the middle of the block with byte `after`, some times."""
    left = [times]

    def fault(begin: int, sent: bytes) -> bytes | None:
        if left[0] and begin <= after < begin + len(sent):
            left[0] -= 1
            return sent[: after - begin]
        return None

    return fault


# Files ########################################################################


@pytest.mark.parametrize("ranges", [True, False])
def test_files_are_downloaded_once_and_again_if_they_change(ranges, tmp_path):
    folder, store = summed(own(tmp_path / "g")), tmp_path / "s"
    with served(folder, ranges) as server:
        load(server.url, store)
        assert local(store) == contents(folder)
        server.requests.clear()
        load(server.url, store)
        assert {name for name, _ in server.requests} == {"checksums.txt"}
        np.save(folder / "y.npy", GRAPH.y.numpy()[::-1].copy())  # of the same size
        (folder / "val_mask.npy").unlink()
        summed(folder)
        server.requests.clear()
        load(server.url, store)
        assert {name for name, _ in server.requests} == {"checksums.txt", "y.npy"}
        assert local(store) == contents(folder)
        [copy] = store.glob("*.url/x.npy")
        copy.write_bytes(b"")  # damaged here
        load(server.url, store)
        assert local(store) == contents(folder)


def test_a_list_without_checksums_and_the_tag_shows_changes(tmp_path):
    folder, store = own(tmp_path / "g"), tmp_path / "s"
    (folder / "files.txt").write_text("\n".join(contents(folder)))
    with served(folder) as server:
        before = load(server.url, store).key()
        assert local(store) == contents(folder)
        np.save(folder / "y.npy", GRAPH.y.numpy()[::-1].copy())
        assert load(server.url, store).key() != before
        assert local(store) == contents(folder)


def test_a_broken_transfer_continues_in_this_run(tmp_path):
    folder, store = summed(own(tmp_path / "g")), tmp_path / "s"
    with served(folder) as server:
        server.faults["edge_index.npy"] = breaks(1, after=2 * BLOCK + 300)
        load(server.url, store)
        assert local(store) == contents(folder)
        blocks = requests_of(server, "edge_index.npy")
    assert blocks[:5] == [f"bytes={begin * BLOCK}-{(begin + 1) * BLOCK - 1}" for begin in (0, 1, 2, 2, 3)]


@pytest.mark.parametrize("changes", [False, True])
def test_a_broken_transfer_continues_in_the_next_run_unless_the_file_has_changed(changes, tmp_path):
    folder, store = own(tmp_path / "g"), tmp_path / "s"
    (folder / "files.txt").write_text("\n".join(contents(folder)))
    with served(folder) as server:
        server.faults["edge_index.npy"] = breaks(3, after=BLOCK + 10)
        with pytest.raises(ValueError, match=r"File edge_index.npy of http://.* 3 attempts \(ClientPayloadError"):
            load(server.url, store)
        assert not [*store.glob("*.url/edge_index.npy")]
        if changes:
            np.save(folder / "edge_index.npy", GRAPH.edge_index.numpy()[::-1].copy())
        server.requests.clear()
        load(server.url, store)
        first = 0 if changes else BLOCK
        assert requests_of(server, "edge_index.npy")[0] == f"bytes={first}-{first + BLOCK - 1}"
    assert local(store) == contents(folder)
    assert [each.name for each in next(store.glob("*.parts")).iterdir()] == ["files.json"]


def test_a_broken_transfer_without_a_version_starts_anew(tmp_path):
    folder, store = summed(own(tmp_path / "g")), tmp_path / "s"
    with served(folder, tag=False) as server:
        server.faults["edge_index.npy"] = breaks(1, after=BLOCK + 10)
        load(server.url, store)
        first = f"bytes=0-{BLOCK - 1}"
        assert requests_of(server, "edge_index.npy").count(first) == 2
    assert local(store) == contents(folder)


def test_a_file_that_changes_during_the_transfer_starts_anew(tmp_path):
    folder, store = own(tmp_path / "g"), tmp_path / "s"
    (folder / "files.txt").write_text("\n".join(contents(folder)))
    changed = GRAPH.x.numpy() + 1

    def change(begin: int, sent: bytes) -> None:
        if begin == BLOCK and not np.array_equal(np.load(folder / "x.npy"), changed):
            np.save(folder / "x.npy", changed)

    with served(folder) as server:
        server.faults["x.npy"] = change
        load(server.url, store)
    assert local(store) == contents(folder)


def test_a_short_file_without_an_error_of_the_connection(tmp_path):
    """A server that sends fewer bytes than the size that it reports."""
    folder, store = own(tmp_path / "g"), tmp_path / "s"
    (folder / "files.txt").write_text("\n".join(contents(folder)))

    def shorten(begin: int, sent: bytes) -> bytes:
        return sent[:-8]

    shorten.shortens = True  # type: ignore[attr-defined]
    size = (folder / "y.npy").stat().st_size
    with served(folder, ranges=False) as server:
        server.faults["y.npy"] = shorten
        with pytest.raises(ValueError, match=rf"File y.npy of http://\S+ cannot be .* bytes arrived of {size}\)\. Check the URL"):
            load(server.url, store)
    assert not [*store.glob("*.url/y.npy")]


def test_a_file_with_another_checksum_never_appears(tmp_path):
    folder, store = summed(own(tmp_path / "g")), tmp_path / "s"
    data = bytearray((folder / "x.npy").read_bytes())
    data[-1] ^= 1
    (folder / "x.npy").write_bytes(data)
    with served(folder) as server, pytest.raises(ValueError, match=r"File x.npy of .*its sha256 differs from checksums.txt"):
        load(server.url, store)
    assert not [*store.glob("*.url/x.npy")] and [*store.glob("*.url/edge_index.npy")]


def test_incomplete_files_are_never_in_the_folder(tmp_path, monkeypatch):
    """While blocks arrive, the folder has complete files only."""
    folder, store = summed(own(tmp_path / "g")), tmp_path / "s"
    seen: list[bool] = []

    def look(begin: int, sent: bytes) -> None:
        [copies] = store.glob("*.url")
        seen.append((copies / "edge_index.npy").exists())

    with served(folder) as server:
        server.faults["edge_index.npy"] = look
        load(server.url, store)
    assert len(seen) > 3 and not any(seen)


def _load_and_count(url: str, store: str) -> None:
    load(url, Path(store))


def test_one_process_downloads_while_others_wait(tmp_path):
    folder, store = summed(own(tmp_path / "g")), tmp_path / "s"
    with served(folder) as server:
        processes = [mp.get_context("fork").Process(target=_load_and_count, args=(server.url, str(store))) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(50)
        assert [process.exitcode for process in processes] == [0, 0]
        assert len(requests_of(server, "y.npy")) == len({*requests_of(server, "y.npy")})
    assert local(store) == contents(folder)


# Refused ######################################################################


@pytest.mark.parametrize("missing", [404, 403])
def test_http_needs_a_list(missing, tmp_path):
    with served(own(tmp_path / "g")) as server:
        server.missing = missing
        with pytest.raises(ValueError, match=r"must have a file checksums.txt \(or files.txt\) .* HTTP servers do not list"):
            load(server.url, tmp_path / "s")


def test_no_server(tmp_path):
    with served(tmp_path) as server:
        url = server.url
    with pytest.raises(ValueError, match=f"{url} cannot be downloaded in 3 attempts \\(checksums.txt: "):
        load(url, tmp_path / "s")


@pytest.mark.parametrize("name", ["../x.npy", "a/../../x.npy", "/etc/x.npy", "C:x.npy", "C:\\x.npy", "..\\x.npy", ".", "a\x1bb"])
@pytest.mark.parametrize("listed", ["checksums.txt", "files.txt"])
def test_names_outside_the_folder(name, listed, tmp_path):
    folder = own(tmp_path / "g")
    (folder / listed).write_text(f"{'0' * 64}  {name}\n" if listed == "checksums.txt" else f"{name}\n")
    with served(folder) as server, pytest.raises(ValueError, match=r"but names must be paths of files in the folder"):
        load(server.url, tmp_path / "s")
    assert not (tmp_path / "s").exists() or not [*(tmp_path / "s").glob("*.url/*")]


def test_lines_that_are_no_checksums(tmp_path):
    folder = own(tmp_path / "g")
    (folder / "checksums.txt").write_text(f"{'0' * 32}  x.npy\n")
    with served(folder) as server, pytest.raises(ValueError, match=r"checksums.txt must have lines of sha256sum, got '0000"):
        load(server.url, tmp_path / "s")


def test_other_urls(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"source='nothing://a/b' must be a URL of fsspec"):
        load("nothing://a/b", tmp_path)
    monkeypatch.setitem(urls.known_implementations, "s4", {"class": "s3fs_of_nobody.S3", "err": "Install s3fs"})
    with pytest.raises(ModuleNotFoundError, match=r"Reading s4://a/b needs a package .* Run pip install s3fs_of_nobody\."):
        load("s4://a/b", tmp_path)
    with pytest.raises(ValueError, match=r"source_kwargs=\['anon'\] does not support memory://a. Set options"):
        UrlSource("memory://a", tmp_path).load({"anon": True}, tmp_path)


# Listings and training ########################################################


def test_a_filesystem_that_lists_its_files(tmp_path):
    memory, folder, store = fsspec.filesystem("memory"), own(tmp_path / "g"), tmp_path / "s"
    memory.pipe({f"/bucket/graph/{name}": data for name, data in contents(folder).items()})
    memory.pipe({"/bucket/graph/more/note.csv": b"1", "/bucket/graph2/x.npy": b""})
    try:
        data = GraphDataModule("memory://bucket/graph", partition_dir=store)
        graph = data.load()
        assert torch.equal(graph.x, GRAPH.x) and torch.equal(graph.edge_index.long(), GRAPH.edge_index)
        assert local(store) == {**contents(folder), "more/note.csv": b"1"}
        before = data.origin.key()
        memory.pipe({"/bucket/graph/y.npy": contents(folder)["y.npy"]})
        assert data.origin.key() == before != GraphDataModule("memory://bucket/graph", partition_dir=store).origin.key()
        memory.rm("/bucket/graph/edge_index.npy")
        with pytest.raises(ValueError, match=r"memory://bucket/graph: .* must have one of graph.json"):
            load("memory://bucket/graph", store)
    finally:
        memory.rm("/bucket", recursive=True)


def test_a_stored_partition_is_found_without_a_download(tmp_path):
    folder, store = summed(own(tmp_path / "g")), tmp_path / "s"
    with served(folder) as server:
        entry = GraphDataModule(server.url, partition_dir=store).partition_for(TWO)
        for copy in store.glob("*.url/*"):
            copy.unlink()
        server.requests.clear()
        assert GraphDataModule(server.url, partition_dir=store).partition_for(TWO) == entry
        assert {name for name, _ in server.requests} == {"checksums.txt"}


def test_a_url_trains_as_the_folder(ranks, tmp_path):
    folder = summed(own(tmp_path / "g"))
    wanted = ranks.run(2, trained, str(folder), str(tmp_path / "of_folder"), "dgcl")
    with served(folder) as server:
        found = ranks.run(2, trained, server.url, str(tmp_path / "of_url"), "dgcl")
    for of_folder, of_url in zip(wanted, found):
        assert torch.equal(of_url["out"], of_folder["out"]) and of_url["logged"] == of_folder["logged"]
    assert local(tmp_path / "of_url") == contents(folder) and os.listdir(tmp_path / "of_url")
