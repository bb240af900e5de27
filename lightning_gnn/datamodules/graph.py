"""GraphDataModule: any PyG graph, laid out as the Trainer's strategy needs it."""

from __future__ import annotations

import copy
import hashlib
import json
import math
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
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from typing_extensions import override

from lightning_gnn.arguments import checked_batches, shown
from lightning_gnn.comm.group import World
from lightning_gnn.data.attributes import left_out_of
from lightning_gnn.data.hetero import NO_TYPES, JoinedGraph, input_type_of, prepare_hetero
from lightning_gnn.data.shards import Cut, Shard, versions_of, whole_graph, whole_graph_with_types
from lightning_gnn.data.sources import (
    EDGE_MASKS,
    MASKS,
    Source,
    check_same_graph,
    checked_fractions,
    counted_mask,
    described,
    description_key,
    graph_digests,
    is_labelled,
    load_source,
    num_labelled,
    prepare_graph,
    seeded,
)
from lightning_gnn.data.store import (
    FORMAT,
    check_space,
    default_root,
    read_cut,
    read_manifest,
    write_atomically,
    write_store,
    writing,
)
from lightning_gnn.foreign import leave_out_missing_validation
from lightning_gnn.nn.embedding import DistributedEmbedding, embeddings_of
from lightning_gnn.partition import assign_nodes
from lightning_gnn.partition.edge_cut import checked_method
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.types import Types
from lightning_gnn.partition.vertex_cut import assign_edges

Partition: TypeAlias = str | Sequence[int] | np.ndarray | Tensor


EDGE_S = 1.5e-6
"""Seconds that partitioning takes for an edge, about: METIS takes 0.5e-6 to 2e-6, and others less."""

STAGE_MASKS = {"fit": "train_mask", "validate": "val_mask", "test": "test_mask"}


class OneBatch:
    """The loader of a full-graph scheme: one batch an epoch, the rank's part of the graph.

    Args:
        batch: the part; in prediction with types, the loader whose batches are predicted one after the other.
        data: that it is of. A strategy that trains on other batches takes it from here, and gives its own loader in place
            of this one, by Lightning's ``process_dataloader``.
        mask: whose nodes, or edges, count; None for all.
    """

    def __init__(self, batch: Any, data: GraphDataModule, mask: str | None) -> None:
        self.batch, self.data, self.mask = batch, data, mask

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        # A shallow copy: a step may set attributes on its batch without changing the next epoch's.
        yield copy.copy(self.batch)


class GraphDataModule(L.LightningDataModule):
    """One graph for any strategy: whole on one device, partitioned over the ranks of a `lightning_gnn` strategy.

    Partitioned once per machine: the result is stored and memory-mapped by all ranks, and found again in later runs.

    One datamodule has one graph, in all stages and on all ranks, also where its source draws at random, such as a dataset with
    ``transform=T.RandomNodeSplit()``: what is drawn while it is loaded follows from torch's seed and `seed`, and takes nothing
    from the random numbers of the run.

    Args:
        source: a PyG dataset with one graph, a ``Data`` or ``HeteroData``, a callable that returns one of these, or its dotted
            path, e.g. ``"torch_geometric.datasets.Planetoid"``. A dataset or ``Data`` is in the memory of every rank that builds
            it; a dotted path is loaded only where it must be partitioned, in a process of its own. Changes of a ``Data`` between
            stages are followed; those of rank 0, where ranks are processes of their own.
        source_args: keyword arguments of a callable or dotted path; numbers, strings, lists and dicts.
        split: fractions of training, validation and test nodes, ``(0.6, 0.2, 0.2)``, for a random split of the labelled
            nodes. Without it, the graph's masks or the dataset's ``get_idx_split()`` (OGB) are used.
        split_column: which split, where masks have shape ``[N, splits]``.
        partition: ``"metis"``, ``"random"``, ``"contiguous"`` (ranges of the graph's own order), or the rank of every node,
            ``[N]``. By default what suits the strategy, in most cases METIS.
        seed: of the random split and of the partitioner; added to torch's seed for what the source draws.
        input_type: of a ``HeteroData``, the node type whose nodes are predicted; by default the one that has a ``train_mask``.
        store: folder for partitioned graphs; default ``$LIGHTNING_GNN_STORE`` or ``~/.cache/lightning_gnn``.
        fanouts, batch_size: of mini-batches, for a strategy that trains on samples, see
            :class:`~lightning_gnn.SamplingStrategy`; by default what the strategy says.

    Raises:
        ValueError: an argument, or the graph, is not as described; the source gave another graph when it was loaded once more, as
            on another machine; fan-outs or a batch size are given and the strategy trains on no samples; from ``setup``, on all
            ranks.
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
        leave_out_missing_validation()
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
        self._shard_of: tuple[str, LayoutSpec] | None = None  # the entry and layout that it was read for
        self._versions: Mapping[str, int] = {}  # of its tensors, before the first step
        # The graph, where this process has it whole; what it is known by, and its entries in the store by what they are.
        self._graph: Data | HeteroData | None = None
        self._digests: Mapping[str, str] | None = None
        self._entries: dict[str, str] = {}
        self._draw_seed: int | None = None
        self._drew = False

    # Layout ###################################################################

    def _asked_for(self) -> LayoutSpec | None:
        """Returns what a strategy of this package asks for; None for any other."""
        return getattr(getattr(self.trainer, "strategy", None), "layout", lambda: None)()

    def _layout(self) -> LayoutSpec:
        """Returns what the Trainer's strategy wants; the whole graph for one device of any other strategy."""
        layout, strategy = self._asked_for(), getattr(self.trainer, "strategy", None)
        if layout is not None:
            return layout
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
        self._failure = None
        layout, prepared, self._prepared = self._asked_for(), self._prepared, None
        if layout is None or layout == prepared:  # before the ranks were started, for this call
            return
        try:
            self.prepare_for(layout)
        except Exception as error:
            self._failure = error

    def prepare_for(self, layout: LayoutSpec) -> None:
        """Loads and partitions the graph for a layout, unless the store holds it; one process of each machine."""
        self._folder = self.partition_for(layout).name
        if self._shard_of is None:  # the whole graph, of an earlier run on one device
            self._shard = None
        self._prepared = layout

    @override
    def setup(self, stage: str) -> None:
        layout = self._layout()
        if stage == "fit":
            self._check_sampled(layout)
        if layout.kind == "whole":
            self._shard = self._shard_of = None
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

    def _check_sampled(self, layout: LayoutSpec) -> None:
        """Refuses fan-outs and batch sizes that a strategy would ignore, and to look for one where a batch is the graph."""
        callbacks = [] if self.trainer is None else self.trainer.callbacks  # type: ignore[attr-defined]
        if self.batch_size is None and any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
            raise ValueError(
                "BatchSizeFinder has nothing to find: GraphDataModule has no batch_size, so the whole graph is one batch. Leave "
                "the callback out."
            )
        given = {"fanouts": self.fanouts, "batch_size": self.batch_size}
        told = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        if told and self.trainer is not None and not layout.samples:
            strategy = type(self.trainer.strategy).__name__
            raise ValueError(
                f"GraphDataModule({told}) asks for batches of sampled neighbourhoods, and {strategy} makes none. "
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
        # The first rank of each machine has prepared it; what others know of it is of the stage before.
        loaded = self._digests if strategy.local_rank == 0 else None
        told = world.all_gather_object((self._folder, loaded, self._draw_seed))
        folder, digests, self._draw_seed = told[0]
        for rank, (_, found, _) in enumerate(told):
            if found is not None:
                check_same_graph(found, digests, f"On rank {rank}, {described(self.source)}")
        self._folder, self._digests = folder, digests
        self._entries[self._entry_key(layout)] = folder
        shard = failure = None
        try:
            if self._shard is not None and self._shard_of == (folder, layout):
                shard = self._shard  # as the last stage has left it, like the whole graph on one device
                shard.batch.cpu()
            else:
                self.tell_of_changes("the parts are other ones now")
                self._shard = None  # in the middle of a run, before the next one takes its memory
                shard = read_cut(self.store / folder, layout).shard(self.trainer.global_rank, layout.replicas)
        except Exception as error:
            failure = error
        _raise_together(world, failure, "The partitioned graph could not be read")
        assert shard is not None
        self._shard_of = folder, layout
        return shard

    def train_dataloader(self) -> Any:
        return self._batches("train_mask")

    def val_dataloader(self) -> Any:
        # No validation nodes: no validation, rather than a mean over nothing.
        return self._batches("val_mask") if sum(self.shard.mask_counts[self._counted("val_mask")]) else []

    def test_dataloader(self) -> Any:
        return self._batches("test_mask")

    def predict_dataloader(self) -> OneBatch:
        return self._batches(None)

    def _batches(self, mask: str | None) -> OneBatch:
        if not self._versions:
            self._versions = versions_of(self.shard.batch)
        return OneBatch(self.shard.batch, self, mask)

    def tell_of_changes(self, why: str) -> None:
        """Warns of changes of the batch in place, which are lost now; on one device they would have stayed."""
        versions, self._versions = self._versions, {}
        if self._shard is None or self._shard_of is None:
            return
        now = versions_of(self._shard.batch)
        changed = [name for name, version in versions.items() if now.get(name, version) != version]
        if changed:
            rank_zero_warn(
                f"batch.{', batch.'.join(changed)} changed in place during this stage, and the next one begins with the graph as "
                f"it was loaded: {why}. On one device such a change stays. Make a new tensor in each step that needs it, such as "
                f"batch.{changed[0]} = batch.{changed[0]} * 0.5, which changes nothing for later steps."
            )

    # Loading and partitioning #################################################

    def _predicts(self) -> bool:
        """Returns whether the graph is predicted on only, and may have neither masks nor labels."""
        return self.predicting or getattr(getattr(self.trainer, "state", None), "fn", None) == TrainerFn.PREDICTING

    @property
    def _is_given(self) -> bool:
        """Whether the source is the graph itself, which gives no other when it is asked again unless the user has changed it."""
        return isinstance(self.source, (Data, HeteroData))

    def load(self) -> Data | HeteroData:
        """Returns the whole graph, checked, with boolean masks; the same in all stages.

        Raises:
            ValueError: it cannot be trained on, or is another than this datamodule has loaded before.
        """
        if self._graph is None or self._is_given:
            self._graph = self._read_back() or self._load()
        return self._graph

    def _read_back(self) -> Data | HeteroData | None:
        """Returns the graph from one of its entries in the store; None where there is none any more."""
        known = None if self._is_given else self._digests
        for folder in self._entries.values() if known else ():
            if (self.store / folder / "manifest.json").exists() and read_manifest(self.store / folder)[
                "graph"
            ] == known:
                return read_cut(self.store / folder).graph()
        return None

    def _load(self) -> Data | HeteroData:
        if self._draw_seed is None:
            self._draw_seed = self._new_draw_seed()
        with seeded(self._draw_seed) as has_drawn:
            graph = self._prepared_graph()
            self._drew = has_drawn()
        if self._digests is not None and not self._is_given:
            check_same_graph(graph_digests(graph), self._digests, f"{described(self.source)}, loaded once more,")
        return graph

    def _new_draw_seed(self) -> int:
        return (torch.initial_seed() + self.seed) % 2**63

    def _prepared_graph(self) -> Data | HeteroData:
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
        """Returns the folder's name under the store; loads and partitions only if nothing before has. Rank 0 of each machine."""
        key = self._entry_key(layout)
        if not self._is_given:
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
                write_atomically(self.store / f"{notes[self._drew]}.known", _note(notes[self._drew], folder))
        return folder

    def _options(self, layout: LayoutSpec) -> list[Any]:
        """Returns what decides the stored form of a graph, beside the graph."""
        return [layout.stored.as_dict(), self._partition_key(layout), self.seed, self.input_type, FORMAT]

    def _entry_key(self, layout: LayoutSpec) -> str:
        return json.dumps(self._options(layout))

    def _notes(self, layout: LayoutSpec) -> list[str]:
        """Returns the keys under which an entry of a source that is given by its path is found without loading it.

        The first is of a source that draws no random numbers, the second of one that does. None for other sources.
        """
        if not isinstance(self.source, str):
            return []
        told = [self.split, self.split_column, self._options(layout)]
        seed = self._new_draw_seed() if self._draw_seed is None else self._draw_seed
        keys = [description_key(self.source, self.source_args, each) for each in (told, [*told, seed])]
        return [key for key in keys if key is not None]

    def build(self, layout: LayoutSpec) -> str:
        """Loads and partitions the graph in this process, unless the store holds it; returns the folder's name."""
        data = self.load()
        hetero = isinstance(data, HeteroData)
        if hetero and not layout.takes_types:
            raise ValueError(NO_TYPES)
        digests = graph_digests(data)
        left_out = {} if hetero else left_out_of(data)
        told = json.dumps([digests, left_out, self._options(layout)])
        digest = hashlib.blake2b(told.encode(), digest_size=12).hexdigest()
        name = f"{layout.kind}-{layout.parts}-{digest}"
        folder = self.store / name
        # Not kept: what is read from now on is the entry.
        self._graph, self._digests = None, digests
        with self._lock(name):
            if folder.exists():
                read_manifest(folder, layout)
                return name
            check_space(self.store, data)
            method = self._method(layout)
            rank_zero_info(
                f"Partitioning {data.num_nodes:,} nodes and {data.num_edges:,} edges into {layout.parts} parts "
                f"({method if isinstance(method, str) else 'as given'}): about {math.ceil(EDGE_S * data.num_edges)} s"
            )
            began = time.perf_counter()
            part, holders, report = self.assigned(data, layout)
            seconds = time.perf_counter() - began
            input_type = self._input_type(data) if hetero else None
            report = {**report, "seconds": seconds}
            write_store(folder, data, part, layout.stored, report, holders, input_type, digests)
            rank_zero_info(f"Partitioned in {seconds:.1f} s; kept in {folder}")
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
        if self._draw_seed is None:
            self._draw_seed = self._new_draw_seed()
        rank_zero_info(f"Loading {self.source}, in a process of its own, to partition it")
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
                    "loaded": {"_draw_seed": self._draw_seed, "_digests": self._digests, "_entries": self._entries},
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
        answer: dict[str, Any] = (
            json.loads(done.stdout.splitlines()[-1]) if done.stdout else {"error": "see the error above."}
        )
        if "error" in answer:
            raise RuntimeError(f"Loading or partitioning {self.source} failed: {answer['error']}")
        folder, self._drew = answer["folder"], bool(answer["drew"])
        self._digests = read_manifest(self.store / folder, layout)["graph"]
        return folder

    def _method(self, layout: LayoutSpec) -> str | np.ndarray:
        return layout.method if self.partition is None else self.partition

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
        if manifest["types"] is not None and not layout.takes_types:
            return False  # loaded again, and refused
        if self._digests is None:
            self._digests = manifest["graph"]
        return self._digests == manifest["graph"]

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
