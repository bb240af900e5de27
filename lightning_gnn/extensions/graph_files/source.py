"""A folder of files as the source of a datamodule: its graph is mapped, sorted and cut in memory that grows with its nodes."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from typing_extensions import override

from lightning_gnn.console import progress_bar
from lightning_gnn.data.loading import Assign, Assigned, GraphSource
from lightning_gnn.data.shards import Graph
from lightning_gnn.data.store import writing
from lightning_gnn.devices import available_bytes
from lightning_gnn.extensions.graph_files.folders import Split, read_folder
from lightning_gnn.extensions.graph_files.in_edges import InEdges, write_parts
from lightning_gnn.extensions.graph_files.partitioner import Streaming
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.registry import cutter_of


class FolderSource(GraphSource):
    """The path of a folder; see :func:`~lightning_gnn.extensions.graph_files.folders.read_folder`.

    Args:
        source: the path.
        memory: bytes that sorting edges may take beside what grows with nodes; None: a third of what is available.
    """

    short_ids = True

    def __init__(self, source: str, memory: int | None = None) -> None:
        super().__init__(source)
        self._folder, self._memory = source, memory or (available_bytes() or 3 << 30) // 3

    @override
    def load(self, args: Mapping[str, Any] | None, store: Path) -> tuple[Graph, Split | None]:
        if args:
            raise ValueError(
                f"source_args={dict(args)} needs a callable or an import path as source (got the folder {self._folder})."
            )
        scratch = self._converted(store)
        with writing(store):
            try:
                return read_folder(Path(self._folder), scratch)
            except ValueError:  # of other files, when they are mended, nothing here would be found again
                shutil.rmtree(scratch, ignore_errors=True)
                raise

    @override
    def method(self, layout: LayoutSpec) -> str:
        return "auto" if layout.kind == "edge_cut" else layout.method or "auto"

    @override
    def partitioners(self, work: Path) -> Mapping[str, Streaming]:
        return {"streaming": Streaming(work, self._memory)}

    @override
    def _defined_by(self) -> list[str]:
        return [self._folder]

    def _converted(self, store: Path) -> Path:
        """Returns where files are written anew that cannot be memory-mapped."""
        return store / f"{self.key()}.files"

    @contextmanager
    @override
    def cut(self, folder: Path, data: Graph, layout: LayoutSpec, assign: Assign) -> Iterator[tuple[Assigned, Any]]:
        """As for graphs in memory; steps that an interrupted run has finished are not done again."""
        store, work = folder.parent, folder.parent / f"{folder.name}.work"
        edge_index, owners, ranks = data.edge_index.numpy(), work / "part.npy", work / "holders.npy"
        with writing(store), progress_bar("Sorting edges", 2 * data.num_edges) as told:
            work.mkdir(parents=True, exist_ok=True)
            in_edges = InEdges.sorted_in(work, edge_index, data.num_nodes, self._memory, told)
        if not owners.exists():
            began, holders = time.perf_counter(), None
            if layout.kind == "vertex_cut":
                with writing(store, data.num_edges), ranks.open("wb+") as file:
                    dtype = cutter_of(layout.kind).part_dtype(layout.parts)
                    holders = open_memmap(ranks, "w+", dtype, (data.num_edges,))
                    os.posix_fallocate(file.fileno(), 0, ranks.stat().st_size)  # fails where writing would kill
            part, _, report = assign(self.partitioners(work), holders)
            report["seconds"] = time.perf_counter() - began
            with writing(store):
                if holders is not None:
                    holders.flush()
                (work / "report.json").write_text(json.dumps(report))
                np.save(work / ".part.npy", part)
                (work / ".part.npy").replace(owners)
        report = json.loads((work / "report.json").read_text())
        holders = np.load(ranks, mmap_mode="r") if layout.kind == "vertex_cut" else None
        with progress_bar("Writing parts", data.num_edges) as told:
            yield (np.load(owners), holders, report), partial(write_parts, in_edges, told)
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(self._converted(store), ignore_errors=True)
