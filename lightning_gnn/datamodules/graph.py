"""GraphDataModule: any PyG graph, laid out as the Trainer's strategy needs it."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, repeat
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias

import lightning as L
import numpy as np
import torch
from filelock import FileLock, Timeout
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from typing_extensions import override

from lightning_gnn.arguments import shown
from lightning_gnn.comm.group import World
from lightning_gnn.datamodules.hetero import NO_TYPES, JoinedGraph, input_type_of, prepare_hetero
from lightning_gnn.datamodules.shards import Cut, Shard, whole_graph, whole_graph_with_types
from lightning_gnn.datamodules.sources import (
    EDGE_MASKS,
    MASKS,
    Source,
    checked_fractions,
    counted_mask,
    description_key,
    graph_key,
    is_labelled,
    load_source,
    num_labelled,
    prepare_graph,
)
from lightning_gnn.datamodules.store import (
    FORMAT,
    check_space,
    default_root,
    read_cut,
    read_manifest,
    write_atomically,
    write_store,
    writing,
)
from lightning_gnn.nn.embedding import DistributedEmbedding, embeddings_of
from lightning_gnn.partition import assign_nodes
from lightning_gnn.partition.edge_cut import checked_method
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.types import Types
from lightning_gnn.partition.vertex_cut import assign_edges
from lightning_gnn.sampling.neighbors import checked_batches

Partition: TypeAlias = str | Sequence[int] | np.ndarray | Tensor


STAGE_MASKS = {"fit": "train_mask", "validate": "val_mask", "test": "test_mask"}


class OneBatch:
    """The loader of a full-graph scheme: one batch an epoch, the rank's part of the graph.

    Args:
        batch: the part; in prediction with types, the loader whose batches are predicted one after the other.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        # A shallow copy: a step may set attributes on its batch without changing the next epoch's.
        yield copy.copy(self.batch)


class GraphDataModule(L.LightningDataModule):
    """One graph for any strategy: whole on one device, partitioned over the ranks of a `lightning_gnn` strategy.

    Partitioned once per machine: the result is stored and memory-mapped by all ranks, and found again in later runs.

    Args:
        source: a PyG dataset with one graph, a ``Data`` or ``HeteroData``, a callable that returns one of these, or its dotted
            path, e.g. ``"torch_geometric.datasets.Planetoid"``. A dataset or ``Data`` is in the memory of every rank that builds
            it; a dotted path is loaded only where it must be partitioned, in a process of its own.
        source_args: keyword arguments of a callable or dotted path; numbers, strings, lists and dicts.
        split: fractions of training, validation and test nodes, ``(0.6, 0.2, 0.2)``, for a random split of the labelled
            nodes. Without it, the graph's masks or the dataset's ``get_idx_split()`` (OGB) are used.
        split_column: which split, where masks have shape ``[N, splits]``.
        partition: ``"metis"``, ``"random"``, ``"contiguous"`` (ranges of the graph's own order), or the rank of every node,
            ``[N]``. By default what suits the strategy, in most cases METIS.
        seed: of the random split and of the partitioner.
        input_type: of a ``HeteroData``, the node type whose nodes are predicted; by default the one that has a ``train_mask``.
        store: folder for partitioned graphs; default ``$LIGHTNING_GNN_STORE`` or ``~/.cache/lightning_gnn``.
        fanouts, batch_size: of mini-batches, for a strategy that trains on samples, see
            :class:`~lightning_gnn.SamplingStrategy`; by default what the strategy says.

    Raises:
        ValueError: an argument, or the graph, is not as described, fan-outs or a batch size are given and the strategy trains on
            no samples; from ``setup``, on all ranks.
        StoreError: the store is full, cannot be written, or has been altered; from ``setup``, on all ranks.

    Labels of -1 mark nodes without a label. Every tensor of the graph with one row per node or edge goes with its node
    or edge. The batch of a step is a PyG ``Data``: ``x [N, F]``, ``edge_index [2, E]`` (local ids), ``y``,
    ``train_mask``, ``val_mask``, ``test_mask``, ``n_id [N]`` (original ids), ``num_owned`` (N). A graph whose links are to be
    predicted has ``edge_train_mask``, ``edge_val_mask``, ``edge_test_mask`` (bool ``[E]``) and needs none of nodes.

    A ``HeteroData`` is for ``sampling``, whose batches are ``HeteroData``, and for one device.
    """

    def __init__(
        self,
        source: Source,
        source_args: dict[str, Any] | None = None,
        split: Sequence[float] | None = None,
        split_column: int = 0,
        partition: Partition | None = None,
        seed: int = 0,
        store: str | os.PathLike[str] | None = None,
        fanouts: Sequence[int] | Mapping[Any, Sequence[int]] | None = None,
        batch_size: int | None = None,
        input_type: str | None = None,
    ) -> None:
        super().__init__()
        self.fanouts, self.batch_size = checked_batches(fanouts, batch_size), batch_size
        if not isinstance(source_args, (Mapping, NoneType)):
            raise ValueError(f"source_args must be a dict of keyword arguments (got {shown(source_args)}).")
        for name, number in (("split_column", split_column), ("seed", seed)):
            if not isinstance(number, Integral) or isinstance(number, bool) or not 0 <= number < 2**31:
                raise ValueError(f"{name} must be an integer of at least 0 (got {shown(number)}), and below 2^31.")
        if not isinstance(input_type, (str, NoneType)):
            raise ValueError(f"input_type must be the name of a node type (got {shown(input_type)}).")
        if not isinstance(store, (str, os.PathLike, NoneType)) or "\0" in str(store) or store == "":
            raise ValueError(f"store must be the path of a folder (got {shown(store)}).")
        self.source, self.source_args = source, source_args
        self.split = None if split is None else checked_fractions(split)
        self.split_column, self.seed, self.input_type = int(split_column), int(seed), input_type
        self.partition = None if partition is None else checked_method(partition)
        self.store = Path(store) if store is not None else default_root()
        self.predicting = False
        self._folder: str | None = None
        self._prepared: LayoutSpec | None = None
        self._failure: Exception | None = None
        self._shard: Shard | None = None

    # Layout ###################################################################

    def _layout(self) -> LayoutSpec:
        """Returns what the Trainer's strategy wants; the whole graph for one device of any other strategy."""
        strategy = getattr(self.trainer, "strategy", None)
        if strategy is not None and hasattr(strategy, "layout"):
            return strategy.layout()
        size = getattr(strategy, "world_size", 1)
        if size > 1:
            raise ValueError(
                f"strategy={type(strategy).__name__} would train {size} copies of the whole graph. "
                'Use Trainer(strategy="dgcl"), which splits it, or devices=1.'
            )
        return LayoutSpec("whole")

    @property
    def shard(self) -> Shard:
        """What this rank holds; there from ``setup`` on."""
        if self._shard is None:
            raise RuntimeError("GraphDataModule has no data before setup(): pass it to the Trainer, datamodule=...")
        return self._shard

    @property
    def is_whole(self) -> bool:
        """Whether this process holds the whole graph, uncut, on one device of a strategy that knows nothing of graphs."""
        return self._layout().kind == "whole"

    @property
    def num_classes(self) -> int:
        """Number of classes in the whole graph; there from ``setup`` on."""
        return self.shard.num_classes

    @property
    def num_features(self) -> int:
        """Columns of ``x``, of the input type if there are types; there from ``setup`` on."""
        types, batch = self.shard.types, self.shard.batch
        return (batch[types.input_type] if types.is_hetero else batch).x.size(1)

    # Lightning's hooks ########################################################

    @override
    def prepare_data(self) -> None:
        # Runs on one rank of each machine while the others wait without a deadline: an error must reach them as well,
        # so it is raised in setup(), on all.
        strategy = getattr(self.trainer, "strategy", None)
        if strategy is None or not hasattr(strategy, "layout"):
            return
        self._failure = None
        layout, prepared, self._prepared = strategy.layout(), self._prepared, None
        if layout == prepared:  # before the ranks were started, for this call
            return
        try:
            self.prepare_for(layout)
        except Exception as error:
            self._failure = error

    def prepare_for(self, layout: LayoutSpec) -> None:
        """Loads and partitions the graph for a layout, unless the store holds it; one process of each machine."""
        if layout.kind != "whole":
            self._folder = self.partition_for(layout).name
        self._prepared = layout

    @override
    def setup(self, stage: str) -> None:
        if stage == "fit":
            self._check_sampled()
        self._shard = None  # in the middle of a run, before the next one takes its memory
        layout = self._layout()
        if layout.kind == "whole":
            data = self.load()
            hetero = isinstance(data, HeteroData)
            self._shard = whole_graph_with_types(data, self._input_type(data)) if hetero else whole_graph(data)
        else:
            self._shard = self._read_shard(layout)
        if self.trainer is not None and self.trainer.lightning_module is not None:
            check_fits(self.trainer.lightning_module, self._shard.types)
        if stage not in STAGE_MASKS:
            return
        mask = self._counted(STAGE_MASKS[stage])
        if mask in EDGE_MASKS and not sum(self._shard.mask_counts.get(mask, ())):
            raise ValueError(
                f"The graph has no edges in {mask}, and links are to be predicted. Split them, "
                "GraphDataModule(split_edges(data, val=0.05, test=0.1)), or set data.edge_train_mask, data.edge_val_mask and "
                "data.edge_test_mask (bool, one entry per edge)."
            )
        if sum(self._shard.mask_counts[mask]) == 0:
            raise ValueError(
                f"{mask} holds no labelled node. Give another split=(train, val, test), or set data.{mask}."
            )

    def _check_sampled(self) -> None:
        """Refuses fan-outs and batch sizes that a strategy would ignore."""
        given = {"fanouts": self.fanouts, "batch_size": self.batch_size}
        told = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        strategy = getattr(self.trainer, "strategy", None)
        if told and strategy is not None and not hasattr(strategy, "fanouts"):
            raise ValueError(
                f"GraphDataModule({told}) asks for batches of sampled neighbourhoods, and {type(strategy).__name__} makes none. "
                'Use Trainer(strategy="sampling"), or leave it out.'
            )

    def _counted(self, mask: str) -> str:
        return counted_mask(mask, getattr(self.trainer, "lightning_module", None))

    def _read_shard(self, layout: LayoutSpec) -> Shard:
        """Returns this rank's part of the partitioned graph; raises on all ranks if one of them has none."""
        assert self.trainer is not None
        strategy: Any = self.trainer.strategy
        world = strategy.world
        _raise_together(world, self._failure, "The graph could not be loaded and partitioned")
        self._folder = folder = world.all_gather_object(self._folder)[0]
        shard = failure = None
        try:
            shard = read_cut(self.store / folder, layout).shard(self.trainer.global_rank, layout.replicas)
        except Exception as error:
            failure = error
        _raise_together(world, failure, "The partitioned graph could not be read")
        assert shard is not None
        return shard

    def train_dataloader(self) -> Any:
        return self._batches("train_mask")

    def val_dataloader(self) -> Any:
        # No validation nodes: no validation, rather than a mean over nothing.
        return self._batches("val_mask") if sum(self.shard.mask_counts[self._counted("val_mask")]) else []

    def test_dataloader(self) -> Any:
        return self._batches("test_mask")

    def predict_dataloader(self) -> OneBatch:
        batches = self._batches(None)
        return batches if isinstance(batches, OneBatch) else OneBatch(batches)

    def _batches(self, mask: str | None) -> Any:
        """Returns the strategy's loader of mini-batches whose seeds are in a mask, None for all nodes; else the one batch."""
        batches = getattr(getattr(self.trainer, "strategy", None), "batches", None)
        found = None if batches is None else batches(self, mask)
        return OneBatch(self.shard.batch) if found is None else found

    # Loading and partitioning #################################################

    def _predicts(self) -> bool:
        """Returns whether the graph is predicted on only, and may have neither masks nor labels."""
        return self.predicting or getattr(getattr(self.trainer, "state", None), "fn", None) == TrainerFn.PREDICTING

    def load(self) -> Data | HeteroData:
        """Returns the whole graph, checked, with boolean masks."""
        data, index_split = load_source(self.source, self.source_args)
        needed = not self._predicts()
        if isinstance(data, HeteroData):
            return prepare_hetero(data, self.input_type, self.split, self.split_column, self.seed, needed)
        if self.input_type is not None:
            raise ValueError(
                f"input_type={self.input_type!r} is of a HeteroData, but the graph has no types. Leave it out."
            )
        return prepare_graph(data, index_split, self.split, self.split_column, self.seed, masks_needed=needed)

    def _input_type(self, data: HeteroData) -> str:
        return input_type_of(data, self.input_type)

    def stored_cut(self) -> Cut:
        """Returns the graph as it has been cut; there after :meth:`prepare_for`."""
        assert self._folder is not None
        return read_cut(self.store / self._folder)

    def partition_for(self, layout: LayoutSpec) -> Path:
        """Partitions the graph, unless the store holds it, and returns the folder of its entry; needs no Trainer."""
        return self.store / self._ensure_stored(layout)

    def _ensure_stored(self, layout: LayoutSpec) -> str:
        """Returns the folder's name under the store, partitioning only if no earlier run has. Rank 0 of each machine."""
        known = self._remembered(self._description_key(layout), layout)
        if known is not None:
            return known
        if self._description_key(layout) is not None and isinstance(self._method(layout), str):
            folder = self._build_in_subprocess(layout)
        else:
            folder = self.build(layout)
        # Made again: loading may have written processed files beside the raw ones.
        key = self._description_key(layout)
        if key is not None:
            with writing(self.store):
                write_atomically(self.store / f"{key}.known", _note(key, folder))
        return folder

    def _options(self, layout: LayoutSpec) -> list[Any]:
        """Returns what decides the stored form of a graph, beside the graph."""
        return [layout.stored.as_dict(), self._partition_key(layout), self.seed, self.input_type, FORMAT]

    def _description_key(self, layout: LayoutSpec) -> str | None:
        """Returns a key for a source given by its path, without loading it; None for other sources."""
        if not isinstance(self.source, str):
            return None
        return description_key(self.source, self.source_args, [self.split, self.split_column, self._options(layout)])

    def build(self, layout: LayoutSpec) -> str:
        """Loads and partitions the graph in this process, unless the store holds it; returns the folder's name."""
        data = self.load()
        hetero = isinstance(data, HeteroData)
        if hetero and not layout.takes_types:
            raise ValueError(NO_TYPES)
        digest = hashlib.blake2b(
            json.dumps([graph_key(data), self._options(layout)]).encode(), digest_size=12
        ).hexdigest()
        name = f"{layout.kind}-{layout.parts}-{digest}"
        folder = self.store / name
        with self._lock(name):
            if folder.exists():
                read_manifest(folder, layout)
                return name
            check_space(self.store, data)
            began = time.perf_counter()
            part, holders, report = self.assigned(data, layout)
            seconds = time.perf_counter() - began
            input_type = self._input_type(data) if hetero else None
            write_store(folder, data, part, layout.stored, {**report, "seconds": seconds}, holders, input_type)
            rank_zero_info(
                f"Partitioned {data.num_nodes:,} nodes and {data.num_edges:,} edges into {layout.parts} parts "
                f"({report['method']}) in {seconds:.1f} s; kept in {folder}"
            )
        return name

    def assigned(
        self, data: Data | HeteroData, layout: LayoutSpec
    ) -> tuple[np.ndarray, np.ndarray | None, dict[str, Any]]:
        """Returns the owner of each node, the rank of each edge in a vertex cut, and a report."""
        method = self._method(layout)
        joined = JoinedGraph.of(data)
        edge_index, num_nodes = joined.edge_index, joined.num_nodes
        predicted: Any = data[self._input_type(data)] if isinstance(data, HeteroData) else data
        masks = {
            mask: _labelled_mask(predicted, mask) for mask in MASKS if num_labelled(predicted.get("y"), predicted[mask])
        }
        if isinstance(data, HeteroData):
            masks = {name: joined.among_nodes(mask, self._input_type(data)) for name, mask in masks.items()}
        if layout.kind == "vertex_cut":
            edges = assign_edges(
                edge_index,
                num_nodes,
                layout.parts,
                method,
                groups=layout.groups,
                host_weight=layout.host_weight,
                seed=self.seed,
                masks=masks,
            )
            return edges.master, edges.part, {**edges.report.as_dict(), "method": edges.method}
        nodes = assign_nodes(
            edge_index, num_nodes, layout.parts, method, seed=self.seed, masks=masks, groups=layout.groups
        )
        report = replace(nodes.report, types=joined.types_per_part(nodes.part, layout.parts))
        return nodes.part, None, {**report.as_dict(), "method": nodes.method, "balance": nodes.balance}

    def _build_in_subprocess(self, layout: LayoutSpec) -> str:
        """Runs :meth:`build` in a process of its own, whose memory is given back when it is done."""
        spec = {
            "source": self.source,
            "source_args": self.source_args,
            "split": self.split,
            "split_column": self.split_column,
            "partition": self.partition,
            "seed": self.seed,
            "store": str(self.store),
            "input_type": self.input_type,
        }
        done = subprocess.run(
            [sys.executable, "-m", "lightning_gnn.datamodules.build"],
            input=json.dumps(
                {
                    "datamodule": spec,
                    "layout": layout.as_dict(),
                    "predicting": self._predicts(),
                    "parent": os.getpid(),
                }
            ),
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
        answer = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {"error": "see the error above."}
        if "error" in answer:
            raise RuntimeError(f"Loading or partitioning {self.source} failed: {answer['error']}")
        return answer["folder"]

    def _method(self, layout: LayoutSpec) -> str | np.ndarray:
        return layout.method if self.partition is None else self.partition

    def _partition_key(self, layout: LayoutSpec) -> str:
        method = self._method(layout)
        if isinstance(method, str):
            return method
        array = np.ascontiguousarray(method, dtype=np.int64)
        return hashlib.blake2b(array.data, digest_size=16).hexdigest()

    def _remembered(self, key: str | None, layout: LayoutSpec) -> str | None:
        """Returns the folder that an earlier run made from the same description, if it is still there."""
        note = self.store / f"{key}.known"
        if key is None or not note.is_file():
            return None
        text = note.read_text(errors="replace")
        folder = text.partition(" ")[0]
        if text != _note(key, folder) or not (self.store / folder / "manifest.json").exists():
            return None
        types = read_manifest(self.store / folder, layout)["types"]
        return folder if types is None or layout.takes_types else None  # loaded again, and refused

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Lets one process partition; others are told whom they wait for. Freed by the system if its owner dies."""
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
    """Returns in words who holds a lock, and for how long."""
    with suppress(OSError):  # gone in between: it has finished, or has not written it yet
        return f"{owner.read_text(errors='replace')[:200]} (for {time.time() - owner.stat().st_mtime:.0f} s)"
    return "another process"


def check_fits(module: torch.nn.Module, types: Types) -> None:
    """Raises ValueError for a module that cannot be trained on a graph of these types."""
    if not types.is_hetero:
        embeddings_of(module, types.total(types.input_type))
        return
    name = type(module).__name__
    if not getattr(module, "takes_types", True):
        raise ValueError(
            f"{name} calls model(x, edge_index) and takes graphs of one type. For a HeteroData write a LightningModule, whose "
            "steps get batch.x_dict and batch.edge_index_dict (docs/sampling.md has one)."
        )
    if getattr(module, "predicts_edges", False):
        raise ValueError(
            f"{name} predicts edges, which is for graphs of one type; of a HeteroData, nodes are predicted."
        )
    if any(isinstance(each, DistributedEmbedding) for each in module.modules()):
        raise ValueError(
            f"{name} has a DistributedEmbedding, which is for graphs of one type. Use torch.nn.Embedding for the nodes of a "
            "type, embedding(batch['author'].n_id)."
        )


def _raise_together(world: World, failure: Exception | None, what: str) -> None:
    """Raises on all ranks where one has a failure: they would wait for each other."""
    failures = world.all_gather_object(failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {found}" for rank, found in enumerate(failures) if found]
    if failed:
        raise RuntimeError(f"{what}, see {'; '.join(failed)}")


def _note(key: str, folder: str) -> str:
    """Returns what is written under `key` of the entry that it stands for; a copied or altered note is another."""
    return f"{folder} {hashlib.blake2b(f'{key} {folder}'.encode(), digest_size=8).hexdigest()}"


def _labelled_mask(data: Any, name: str) -> np.ndarray:
    y = data.get("y")
    mask = data[name]
    return (mask if y is None else mask & is_labelled(y)).numpy()
