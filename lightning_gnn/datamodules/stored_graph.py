"""The graph of a datamodule, loaded and partitioned once: its entries in the store."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gnn.comm.entries import spread_entry
from lightning_gnn.comm.group import World
from lightning_gnn.console import handed_over
from lightning_gnn.data.attributes import left_out_of
from lightning_gnn.data.joined import Graph, JoinedGraph, Predicted
from lightning_gnn.data.loading import GraphSource, Source, Versions, check_same_graph, described, graph_digests, seeded
from lightning_gnn.data.shards import Cut
from lightning_gnn.data.store import (
    check_space,
    read_cut,
    read_manifest,
    stored_bytes,
    write_atomically,
    write_store,
    writing,
)
from lightning_gnn.partition.budget import Partitioner, Prediction, predictions
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.layout import NO_TYPES, LayoutSpec
from lightning_gnn.registry import cutter_of, source_of

EDGE_S = 1.5e-6
"""Seconds that partitioning takes for an edge, about: METIS takes 0.5e-6 to 2e-6, and others less."""


class StoredGraph:
    """The part of a datamodule that loads its graph and keeps it partitioned in its store; attributes are its arguments."""

    source: Source
    source_args: Mapping[str, Any] | None
    split: tuple[float, float, float] | None
    split_column: int
    partition: str | np.ndarray | None
    seed: int
    built_from: tuple[str, ...]
    """Names of attributes from which another process makes the same datamodule, beside the store."""
    feature_dtype: torch.dtype | None
    store: Path
    trainer: Any

    @property
    def origin(self) -> GraphSource:
        """What gives the graph of the source."""
        return source_of(self)

    def __init__(self) -> None:
        self.predicting = False
        self._folder: str | None = None
        # The graph, where this process has it whole; what it is known by, and its entries in the store by what they are.
        self._graph: Graph | None = None
        self._digests: Mapping[str, str] | None = None
        self._entries: dict[str, str] = {}
        self._draw_seed: int | None = None
        self.drew = False
        self._versions_of_source = Versions()  # of the graph that the source gave in this process

    def known(self) -> dict[str, Any]:
        """Returns the attributes by which another process loads the same graph."""
        return {"_draw_seed": self._draw_seed, "_digests": self._digests, "_entries": self._entries}

    def agree(self, world: World, layout: LayoutSpec, leads: bool) -> str:
        """Takes the entry and the seed of rank 0 on all ranks, has one that `leads` its machine fetch the entry where it is not,
        and returns the entry's folder."""
        self._folder, self._digests, self._draw_seed = world.broadcast_object((self._folder, self._digests, self._draw_seed))
        assert self._folder is not None
        spread_entry(world, leads, self.store / self._folder, self._lock)
        self._entries[self._entry_key(layout)] = self._folder
        return self._folder

    @property
    def is_given(self) -> bool:
        """Whether the source is the graph itself, which stays the same unless the user changes it."""
        return isinstance(self.source, Graph)

    def load(self) -> Graph:
        """Returns the whole graph, checked, with boolean masks; the same in all stages.

        Raises:
            ValueError: it cannot be trained on, or is another than this datamodule has loaded before.
        """
        if self._graph is None or self.is_given:
            self._graph = self._read_back() or self._load()
        return self._graph

    def _read_back(self) -> Graph | None:
        """Returns the graph from one of its entries in the store; None where there is none any more."""
        known = None if self.is_given else self._digests
        self._check_unchanged()
        for folder in self._entries.values() if known else ():
            entry = self.store / folder
            if (entry / "manifest.json").exists() and read_manifest(entry)["graph"] == known:
                return read_cut(entry).graph()
        return None

    def _load(self) -> Graph:
        self._draw_seed = self._seed_of_draws()
        with seeded(self._draw_seed) as has_drawn:
            graph = self._prepared_graph()
            self.drew = has_drawn()
        if self._digests is not None and not self.is_given:
            check_same_graph(graph_digests(graph), self._digests, f"{described(self.source)}, loaded once more,")
        return graph

    def changed_in_stage(self) -> list[str]:
        """Returns what has been changed in place of the graph that was given, since the stage has begun on this rank."""
        return self._versions_of_source.changed()

    def _check_unchanged(self) -> None:
        """Raises ValueError if the graph of a source that is asked once has changed in place since it was partitioned."""
        changed = [] if self.is_given or self._digests is None else self._versions_of_source.changed()
        if changed:
            raise ValueError(
                f"{', '.join(changed)} of the graph that {described(self.source)} gave changed in place after it was "
                "partitioned, and a source is asked for its graph once. Give the graph itself, GraphDataModule(data), whose "
                "changes between calls of the Trainer are followed, or make a new GraphDataModule after each change."
            )

    def _seed_of_draws(self) -> int:
        return (torch.initial_seed() + self.seed) % 2**63 if self._draw_seed is None else self._draw_seed

    def _prepared_graph(self) -> Graph:
        data, index_split = self.origin.load(self.source_args, self.store)
        self._versions_of_source = Versions(data)
        return self._prepared(data, index_split, self.origin.short_ids)

    @abstractmethod
    def predicted(self, data: Graph) -> Predicted:
        """Returns what is predicted of the graph."""

    @abstractmethod
    def _prepared(self, data: Graph, index_split: Mapping[str, Any] | None, short_ids: bool) -> Graph:
        """Returns the graph checked, with masks."""

    def predicts(self) -> bool:
        """Returns whether the graph is predicted on only, and may have neither masks nor labels."""
        return self.predicting or getattr(getattr(self.trainer, "state", None), "fn", None) == TrainerFn.PREDICTING

    def stored_cut(self, by_rows: bool = False) -> Cut:
        """Returns the graph as it has been cut, as ``read_cut`` of the store does; there after :meth:`prepare_for`."""
        assert self._folder is not None
        return self._read_cut(self._folder, by_rows=by_rows)

    def _read_cut(self, folder: str, layout: LayoutSpec | None = None, by_rows: bool = False) -> Cut:
        return replace(read_cut(self.store / folder, layout, by_rows), feature_dtype=self.feature_dtype)

    def partition_for(self, layout: LayoutSpec) -> Path:
        """Partitions the graph, unless the store holds it, and returns the folder of its entry; needs no Trainer."""
        self._folder = self._ensure_stored(layout)
        return self.store / self._folder

    def predictions(self, layout: LayoutSpec) -> tuple[list[Prediction], str | np.ndarray]:
        """Returns what partitioners would take, and which is asked for; loads the graph, and needs no Trainer."""
        joined, method = JoinedGraph.of(self.load()), self._method(layout)
        cut = joined.edge_index, joined.num_nodes, layout.parts
        if layout.kind == "vertex_cut":
            return cutter_of(layout.kind).edge_predictions(*cut), method
        return predictions(*cut, self.origin.partitioners(self.store)), method

    def _ensure_stored(self, layout: LayoutSpec) -> str:
        """Returns the folder's name under the store; loads and partitions only if nothing before has. Rank 0."""
        key = self._entry_key(layout)
        self._check_unchanged()
        if not self.is_given:
            for folder in (self._entries.get(key), *map(self._noted, self._notes(layout))):
                if folder is not None and self._is_entry(folder, layout):
                    self._entries[key] = folder
                    return folder
        if self._graph is None and self._notes(layout) and isinstance(self._method(layout), str):
            folder = self._build_in_subprocess(layout)
        else:
            folder = self.build(layout)
        self._entries[key] = folder
        # Made again: loading may have written processed files beside the raw ones.
        notes = self._notes(layout)
        if notes:
            with writing(self.store):
                write_atomically(self.store / f"{notes[self.drew]}.known", _note(notes[self.drew], folder))
        return folder

    @abstractmethod
    def _options(self, layout: LayoutSpec) -> list[Any]:
        """Returns what decides the stored form of a graph, beside the graph."""

    def _entry_key(self, layout: LayoutSpec) -> str:
        return json.dumps(self._options(layout))

    def _notes(self, layout: LayoutSpec) -> list[str]:
        """Returns the keys under which an entry of a source that is given by its path is found without loading it.

        The first is of a source that draws no random numbers, the second of one that does. None for other sources.
        """
        if not isinstance(self.source, str):
            return []
        options = [self.split, self.split_column, self._options(layout)]
        each_way = options, [*options, self._seed_of_draws()]
        keys = [self.origin.key(self.source_args, each) for each in each_way]
        return [key for key in keys if key is not None]

    def build(self, layout: LayoutSpec) -> str:
        """Loads and partitions the graph in this process, unless the store holds it; returns the folder's name."""
        data = self.load()
        predicted = self.predicted(data)
        if not layout.takes(predicted.has_types):
            raise ValueError(NO_TYPES)
        digests = graph_digests(data)
        described_as = json.dumps([digests, left_out_of(data), self._options(layout)])
        name = f"{layout.kind}-{layout.parts}-{hashlib.blake2b(described_as.encode(), digest_size=12).hexdigest()}"
        folder = self.store / name
        # Not kept: what is read from now on is the entry.
        self._graph, self._digests = None, digests
        self._versions_of_source.renew()
        with self._lock(name):
            if folder.exists():
                read_manifest(folder, layout)
                return name
            check_space(self.store, stored_bytes(data))
            method = self._method(layout)
            rank_zero_info(
                f"Partitioning {data.num_nodes:,} nodes and {data.num_edges:,} edges into {layout.parts} parts "
                f"({method if isinstance(method, str) else 'as given'}): about {math.ceil(EDGE_S * data.num_edges)} s"
            )

            def save(part: np.ndarray, report: Mapping[str, Any], holders: np.ndarray | None, **edges: Any) -> None:
                write_store(folder, data, part, layout.stored, report, holders, predicted, digests, **edges)

            seconds = self.origin.write(folder, data, layout, partial(self.assigned, data, layout), save)
            rank_zero_info(f"Partitioned in {seconds:.1f} s; kept in {folder}")
        return name

    def assigned(
        self,
        data: Graph,
        layout: LayoutSpec,
        others: Mapping[str, Partitioner] | None = None,
        holders: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None, dict[str, Any]]:
        """Returns the owner of each node, the rank of each edge in a vertex cut, in `holders` if given, and a report."""
        method = self._method(layout)
        joined = JoinedGraph.of(data)
        masks, edge_masks = joined.masks_of(self.predicted(data))
        cut: Any = (joined.edge_index, joined.num_nodes, layout.parts, method)
        options: dict[str, Any] = {"seed": self.seed, "masks": masks, "groups": layout.groups}
        if layout.kind == "vertex_cut":
            edges = cutter_of(layout.kind).assign_edges(*cut, host_weight=layout.host_weight, **options, part=holders)
            return edges.master, edges.part, {**edges.report.as_dict(), "method": edges.method}
        nodes = assign_nodes(*cut, **options, edge_masks=edge_masks, node_kinds=joined.node_kinds, others=others)
        report = replace(nodes.report, types=joined.types_per_part(nodes.part, layout.parts))
        return nodes.part, None, {**report.as_dict(), "method": nodes.method, "balance": nodes.balance}

    def _build_in_subprocess(self, layout: LayoutSpec) -> str:
        """Runs :meth:`build` in a process of its own, whose memory is given back when it is done."""
        self._draw_seed = self._seed_of_draws()
        rank_zero_info(f"Loading {self.source}, in a process of its own, to partition it")
        request = {
            "datamodule": {name: getattr(self, name) for name in self.built_from} | {"store": str(self.store)},
            "layout": layout.as_dict(),
            "predicting": self.predicts(),
            "loaded": self.known(),
            "parent": os.getpid(),
        }
        with handed_over():
            done = subprocess.run(
                [sys.executable, "-m", "lightning_gnn.datamodules.build"],
                input=json.dumps(request),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
                stdout=subprocess.PIPE,
                text=True,
            )
        if done.returncode < 0:
            raise RuntimeError(
                f"Loading or partitioning {self.source} failed: its process was ended by signal {-done.returncode}. "
                "If that is 9, most likely this machine has too little memory for the graph and its partitioner."
            )
        # The user's own code may print, too; the answer is the last line.
        lines = done.stdout.splitlines() or ['{"error": "see the error above."}']
        answer = json.loads(lines[-1])
        if "error" in answer:
            raise RuntimeError(f"Loading or partitioning {self.source} failed: {answer['error']}")
        folder, self.drew = answer["folder"], bool(answer["drew"])
        self._digests = read_manifest(self.store / folder, layout)["graph"]
        return folder

    def _method(self, layout: LayoutSpec) -> str | np.ndarray:
        if self.partition is not None:
            return self.partition
        return self.origin.method(layout)

    def _partition_key(self, layout: LayoutSpec) -> str:
        method = self._method(layout)
        if isinstance(method, str):
            return method
        array = np.ascontiguousarray(method, dtype=np.int64)
        return hashlib.blake2b(array.data, digest_size=16).hexdigest()

    def _noted(self, key: str) -> str | None:
        """Returns the folder that an earlier run made from the same description."""
        note = self.store / f"{key}.known"
        if not note.is_file():
            return None
        text = note.read_text(errors="replace")
        folder = text.partition(" ")[0]
        return folder if text == _note(key, folder) else None

    def _is_entry(self, folder: str, layout: LayoutSpec) -> bool:
        """Returns whether the store still has a folder, with the graph that this datamodule has, if it has one already."""
        if not (self.store / folder / "manifest.json").exists():
            return False
        manifest = read_manifest(self.store / folder, layout)
        if not layout.takes(manifest["types"] is not None):
            return False  # loaded again, and refused
        if self._digests is None:
            self._digests = manifest["graph"]
        return self._digests == manifest["graph"]

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Lets one process partition; others log whom they wait for. Freed by the system if its owner dies."""
        owner = self.store / f"{name}.owner"
        lock = FileLock(self.store / f"{name}.lock")
        with writing(self.store):
            self.store.mkdir(parents=True, exist_ok=True)
            for seconds in chain([2], repeat(300)):
                with suppress(Timeout):
                    lock.acquire(timeout=seconds)
                    break
                rank_zero_info(f"Waiting for {_held_by(owner)}, which partitions the same graph.")
        try:
            with writing(self.store):
                write_atomically(owner, f"process {os.getpid()} on {platform.node()}")
            yield
        finally:
            owner.unlink(missing_ok=True)
            lock.release()


def _held_by(owner: Path) -> str:
    with suppress(OSError):  # gone in between: it has finished, or has not written it yet
        return f"{owner.read_text(errors='replace')[:200]} (for {time.time() - owner.stat().st_mtime:.0f} s)"
    return "another process"


def _note(key: str, folder: str) -> str:
    """Returns what is written under `key` of the entry that it stands for; a copied or altered note is another."""
    return f"{folder} {hashlib.blake2b(f'{key} {folder}'.encode(), digest_size=8).hexdigest()}"
