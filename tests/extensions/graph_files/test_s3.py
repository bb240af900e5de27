"""Graphs and partition directories at S3: the real protocol, by moto's server and s3fs, and transfers that break half-way."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_folders import GRAPH, own, trained
from test_urls import BLOCK, TWO, serving

from lightning_gnn import GraphDataModule
from lightning_gnn.data.store import read_cut
from lightning_gnn.datamodules import graph as datamodule
from lightning_gnn.extensions.graph_files import urls

s3fs = pytest.importorskip("s3fs", reason="needs s3fs: pip install s3fs")
moto_server = pytest.importorskip("moto.server", reason="needs moto: pip install moto[server]")

pytestmark = pytest.mark.campaign


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on to the server; `server.cut` names a file whose contents end half-way."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def _pass_on(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        upstream = HTTPConnection("127.0.0.1", server.port, timeout=30)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        data, name = answer.read(), self.path.partition("?")[0].rpartition("/")[2]
        server.requests.append((self.command, name, self.headers.get("Range")))
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in ("transfer-encoding", "content-length", "connection", "date", "server"):
                self.send_header(key, value)
        self.send_header("Content-Length", answer.headers.get("Content-Length", str(len(data))) if not data else str(len(data)))
        self.end_headers()
        breaks = name == server.cut and self.command == "GET" and len(server.ranges(name)) > 1
        self.wfile.write(data[: len(data) // 2] if breaks else data)
        self.close_connection = self.close_connection or breaks
        upstream.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on


@contextmanager
def proxy(port: int) -> Iterator[Any]:
    with serving(Proxy, port=port, cut=None) as server:
        server.ranges = lambda name: [of for command, each, of in server.requests if (command, each) == ("GET", name)]
        yield server


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server with an empty bucket, of which `requests` and `cut` are of the proxy before it."""
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(urls, "BLOCK", BLOCK)
    monkeypatch.setattr(urls, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    of_moto = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    of_moto.start()
    try:
        with proxy(of_moto.get_host_and_port()[1]) as server:
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
            s3fs.S3FileSystem.clear_instance_cache()
            HTTPConnection("127.0.0.1", server.port).request("POST", "/moto-api/reset")
            server.files = s3fs.S3FileSystem()
            server.files.mkdir("bucket")
            server.requests.clear()
            yield server
    finally:
        of_moto.stop()
        s3fs.S3FileSystem.clear_instance_cache()


def upload(s3: Any, folder: Path) -> None:
    for file in folder.iterdir():
        s3.files.put_file(str(file), f"bucket/graph/{file.name}")
    s3.requests.clear()


def test_a_graph_whose_transfer_breaks_continues(s3, tmp_path):
    folder = own(tmp_path / "graph")
    upload(s3, folder)
    s3.cut, data = "edge_index.npy", GraphDataModule("s3://bucket/graph", partition_dir=tmp_path / "s")
    with pytest.raises(ValueError, match=r"File edge_index.npy of s3://bucket/graph cannot be downloaded in 3 attempts"):
        data.load()
    assert s3.ranges("edge_index.npy")[0] == f"bytes=0-{BLOCK - 1}"
    assert not [*tmp_path.glob("s/*.url/edge_index.npy")]
    s3.cut = None
    s3.requests.clear()
    graph = GraphDataModule("s3://bucket/graph", partition_dir=tmp_path / "s").load()
    assert s3.ranges("edge_index.npy")[0] == f"bytes={BLOCK}-{2 * BLOCK - 1}"
    assert torch.equal(graph.edge_index.long(), GRAPH.edge_index) and torch.equal(graph.x, GRAPH.x)


def test_a_partition_directory_whose_transfer_breaks_continues(s3, tmp_path, monkeypatch):
    def partition(name: str) -> Path:
        monkeypatch.setenv("LIGHTNING_GNN_STORE", str(tmp_path / name))
        data = GraphDataModule(GRAPH, partition_dir="s3://bucket/store", partition="random")
        return data.partition_dir / data.build(TWO)

    first = partition("a")
    puts = [name for command, name, _ in s3.requests if command == "PUT"]
    assert puts[-1] == "manifest.json" and {*puts} == {file.name for file in first.iterdir()} - {"verified.json"}
    monkeypatch.setattr(datamodule, "write_store", None)
    s3.cut = "part1.edge_index.npy"
    with pytest.raises(
        ValueError, match=r"File part1.edge_index.npy of s3://bucket/store/\S+ cannot be downloaded in 3 attempts"
    ):
        partition("b")
    assert not [*tmp_path.glob(f"b/*/{first.name}")]
    s3.cut = None
    s3.requests.clear()
    second = partition("b")
    assert s3.ranges("part1.edge_index.npy")[0].startswith(f"bytes={BLOCK}-") and not s3.ranges("part0.edge_index.npy")
    for file in first.iterdir():
        assert file.name == "verified.json" or file.read_bytes() == (second / file.name).read_bytes()
    assert torch.equal(read_cut(second).graph().edge_index, GRAPH.edge_index)


def test_ranks_train_from_s3_and_partition_once(s3, ranks, tmp_path, monkeypatch):
    """Graph, notes and entry at S3; ranks of the pool get the environment of this test."""
    upload(s3, own(tmp_path / "graph"))
    wanted = ranks.run(2, trained, GRAPH, str(tmp_path / "local"), "dgcl", partition="contiguous")
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    for name in ("a", "b"):
        found = ranks.run(2, on_machine, {**environment, "LIGHTNING_GNN_STORE": str(tmp_path / name)})
        for of_s3, of_memory in zip(found, wanted):
            assert torch.allclose(of_s3["out"], of_memory["out"], atol=1e-5)
            assert of_s3["logged"] == pytest.approx(of_memory["logged"], abs=1e-5)
    entries = s3.files.glob("bucket/store/*/manifest.json")
    assert len(entries) == 1 and json.loads(s3.files.cat_file(entries[0]))["report"]["method"] == "contiguous"
    assert not [*tmp_path.glob("b/*/*.url")], "the second machine needs no graph"
    assert np.load(next(tmp_path.glob("b/*/*/n_id.npy"))).size == GRAPH.num_nodes


def on_machine(rank: int, world_size: int, environment: dict[str, str]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        return trained(rank, world_size, "s3://bucket/graph", "s3://bucket/store", "dgcl", partition="contiguous")
