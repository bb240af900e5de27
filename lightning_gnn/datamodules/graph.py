"""`GraphDataModule`: any PyG graph, in the layout that the Trainer's strategy needs."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from filelock import FileLock, Timeout
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data
from typing_extensions import Never, override

from lightning_gnn.arguments import checked_batches, checked_bytes, checked_dtype, quote
from lightning_gnn.comm.entries import spread_entry
from lightning_gnn.comm.group import World, raise_together
from lightning_gnn.console import handed_over
from lightning_gnn.data.loading import GraphSource, Source, Versions, check_same_graph, graph_digests, seed_rngs, source_name
from lightning_gnn.data.shards import Cut, Graph, JoinedGraph, Predicted, Shard, restore_order, whole_graph
from lightning_gnn.data.sources import EDGE_MASKS, checked_fractions, counted_mask, left_out_of, prepare_graph
from lightning_gnn.data.store import (
    FORMAT,
    check_space,
    default_root,
    read_cut,
    read_manifest,
    stored_bytes,
    write_atomically,
    write_store,
    writing,
)
from lightning_gnn.lightning_packages import LightningDataModule, is_instance
from lightning_gnn.nn.learned_rows import learned_rows
from lightning_gnn.partition.layout import NO_TYPES, LayoutSpec, checked_method
from lightning_gnn.private_lightning import leave_out_missing_validation
from lightning_gnn.registry import cutter_of, feature, source_of, store_of

if TYPE_CHECKING:
    from lightning_gnn.partition.budget import Partitioner, Prediction

EDGE_S = 1.5e-6
"""Approximate seconds of partitioning per edge: METIS takes 0.5e-6 to 2e-6, other partitioners less."""

Partition: TypeAlias = str | Sequence[int] | np.ndarray | Tensor


STAGE_MASKS = {"fit": "train_mask", "validate": "val_mask", "test": "test_mask"}


SAMPLES = {"train_mask": "samples", "val_mask": "val_samples", "test_mask": "test_samples", None: "predict_samples"}
"""Argument with the samples of a stage, by the mask of the stage."""


class GraphLoader:
    """Loader of batches with the rank's part of the graph."""


class OneBatch(GraphLoader):
    """Loader of a full-graph scheme: one batch per epoch, the rank's part of the graph.

    Args:
        batch: the part; in prediction with types, a loader whose batches are predicted in sequence.
        data: its datamodule. Strategies with mini-batches use it to make their own loader in Lightning's ``process_dataloader``.
        mask: mask of the nodes or edges that count; None for all.
    """

    def __init__(self, batch: Any, data: GraphDataModule, mask: str | None) -> None:
        self.batch, self.data, self.mask = batch, data, mask

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        # A shallow copy: attributes that a step sets on its batch do not persist to the next epoch.
        yield copy.copy(self.batch)


class GraphDataModule(LightningDataModule):
    """One graph for any strategy: unpartitioned on one device, partitioned over the ranks of a `lightning_gnn` strategy.

    Rank 0 partitions the graph once. The result is stored, memory-mapped by all ranks, and reused in later runs. Machines without
    the stored partition receive it from other machines.

    A datamodule has one graph, in all phases and on all ranks. This includes sources that draw at random, such as a dataset with
    ``transform=T.RandomNodeSplit()``. Their draws depend on torch's seed and on `seed`, and leave the random streams of the run
    unchanged.

    Args:
        source: a PyG dataset with one graph, a ``Data`` or ``HeteroData``, or a pair ``(feature_store, graph_store)`` as in PyG's
            loaders. Also a callable that returns one of these, or its dotted path, such as
            ``"torch_geometric.datasets.Planetoid"``. Also the path or URL of a folder with the files of a graph, such as
            ``"s3://bucket/graph"``; these files are memory-mapped (docs/large-graphs.md). A dataset or ``Data`` is in the memory
            of every rank that builds it. An import path, a folder or a URL is loaded only where the graph must be partitioned, in
            a separate process. Changes of a ``Data`` between calls take effect; if ranks are separate processes, only the changes
            on rank 0.
        source_kwargs: keyword arguments of a callable or import path; numbers, strings, lists and dicts.
        split: fractions of training, validation and test nodes, such as ``(0.6, 0.2, 0.2)``, for a random split of the labeled
            nodes. Default: the masks of the graph or the dataset's ``get_idx_split()`` (OGB).
        split_index: index of the split, if masks have shape ``[N, splits]``.
        partition: ``"metis"``, ``"metis_masks"``, ``"metis_cover"``, ``"kaminpar"``, ``"kaminpar_compressed"``, ``"streaming"``,
            ``"auto"`` (the best of these that fits into memory), ``"random"``, ``"contiguous"`` (ranges of the original node
            order), or the rank of every node, ``[N]``. Default: the choice of the strategy, in most cases METIS; for a folder,
            ``"auto"``. For a vertex cut: one of the names in
            :class:`~lightning_gnn.strategies.vertex_cut.strategy.VertexCutStrategy`; default the choice of the strategy, also for
            a folder.
        seed: seed of the random split, the partitioner, the order of samples, and random numbers in ``__getitem__`` of samples;
            added to torch's seed for the draws of the source.
        input_type: node type of a ``HeteroData`` whose nodes are predicted. Default: the type with a ``train_mask``, or the
            target type of the predicted edges.
        partition_dir: partition directory, a local folder or a URL such as ``"s3://bucket/partitions"``, whose entries are stored
            locally, too. Default: ``$LIGHTNING_GNN_STORE`` or ``~/.cache/lightning_gnn``.
        num_neighbors: neighbors per hop of a strategy that samples, see :class:`~lightning_gnn.SamplingStrategy`. Default: the
            value of the strategy.
        batch_size: seeds per batch of a strategy that samples, by default its own value; or with `samples`, samples per batch and
            data rank.
        partition_memory_limit: memory for sorting the edges of a graph in files, in bytes or such as ``"4GB"``; memory that grows
            with the number of nodes is not included. Default: a third of the available memory.
        feature_dtype: dtype of ``x`` in batches, such as ``"float32"`` for stored float16. Default: the stored dtype.
        samples: training samples on the graph, a map-style dataset. Its items are dicts of tensors, arrays and numbers, or a
            ``Data``. Or a folder of ``.npy`` files ``[S, N, F]`` or ``[S, T, N, F]``, or ``(folder, slice)``. The graph needs
            only ``edge_index`` and ``num_nodes``. For a ``HeteroData``, items are dicts by node type,
            ``{"grid": {"x": x}, "hour": 3.0}``, or a ``HeteroData``, and files have names such as ``grid.x.npy``.
        val_samples: samples of validation. A stage without samples has no batches.
        test_samples: samples of the test stage.
        predict_samples: samples of prediction.
        global_batch_size: samples per batch of all data ranks together, in place of `batch_size`.
        shuffle: whether training samples are in random order, which depends on `seed` and the epoch.
        node_dims: dimension of the nodes in a sample's tensor by name, or by ``(node_type, name)``; None for one value per
            sample. Default: dimension 0 of 1-D tensors and -2 of others, if its size is N; else one value per sample.
        num_workers: processes that read samples, as in ``torch.utils.data.DataLoader``.
        persistent_workers: whether these processes continue after an epoch.
        prefetch_factor: batches that each of these processes reads ahead.
        concatenate: whether samples are concatenated as in PyG's batches, ``x [B * N, F]``, with one copy of the graph per
            sample. Default: stacked, ``x [B, N, F]``.

    Raises:
        ValueError: invalid argument or graph; a different graph when the source is loaded again; `num_neighbors` or `batch_size`
            with a strategy that does not sample. Raised from ``setup``, on all ranks.
        StoreError: the partition directory is full, not writable or modified, or a partition could not be received from another
            machine. Raised from ``setup``, on all ranks.

    Nodes with label -1 are unlabeled. Tensors of the graph with one row per node or edge are partitioned with the nodes or edges.
    The batch of a step is a PyG ``Data``: ``x [N, F]``, ``edge_index [2, E]`` (local ids), ``y``, ``train_mask``, ``val_mask``,
    ``test_mask``, ``n_id [N]`` (original ids), ``num_owned`` (N). A graph for link prediction has ``edge_train_mask``,
    ``edge_val_mask``, ``edge_test_mask`` (bool ``[E]``) and needs no node masks. In a ``HeteroData``, one edge type has these
    masks.

    With `samples`, a step reads the tensors of the B samples of a global batch, ``x [B, N, F]``, and the graph once.
    ``sample_info`` has the dataset indices of this data rank's samples, and their positions in the global batch. In shapes of
    samples, S counts the samples of a dataset, N the nodes of the graph, T the time steps, and F the features. Random numbers in
    ``__getitem__`` depend only on `seed`, the epoch and the index.

    For a ``HeteroData``, batches are ``HeteroData``: a rank's part of the whole graph under ``dgcl``, ``vertex_cut`` and
    ``spmm_1d``, samples under ``sampling``.
    """

    built_from = ("source", "source_kwargs", "split", "split_index", "partition", "seed", "input_type", "partition_memory_limit")

    def __init__(
        self,
        source: Source,
        source_kwargs: dict[str, Any] | None = None,
        split: Sequence[float] | None = None,
        split_index: int = 0,
        partition: Partition | None = None,
        seed: int = 0,
        partition_dir: str | os.PathLike[str] | None = None,
        num_neighbors: Sequence[int] | Mapping[Any, Sequence[int]] | None = None,
        batch_size: int | None = None,
        input_type: str | None = None,
        partition_memory_limit: int | str | None = None,
        feature_dtype: str | torch.dtype | None = None,
        samples: Any = None,
        val_samples: Any = None,
        test_samples: Any = None,
        predict_samples: Any = None,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        node_dims: Mapping[str, int | None] | None = None,
        num_workers: int = 0,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        concatenate: bool = False,
        **removed: Never,
    ) -> None:
        if removed:
            from lightning_gnn.old_names import check_argument_names

            check_argument_names(type(self), removed)
        super().__init__(**removed)
        leave_out_missing_validation()
        self.prepare_data_per_node = False  # other machines receive the partition of rank 0
        self.num_neighbors, self.batch_size = checked_batches(num_neighbors, batch_size), batch_size
        if not isinstance(source_kwargs, (Mapping, NoneType)):
            raise ValueError(f"source_kwargs must be a dict of keyword arguments (got {quote(source_kwargs)}).")
        for name, number in (("split_index", split_index), ("seed", seed)):
            if not isinstance(number, Integral) or isinstance(number, bool) or not 0 <= number < 2**31:
                raise ValueError(f"{name} must be an integer of at least 0 (got {quote(number)}), and below 2^31.")
        if not isinstance(input_type, (str, NoneType)):
            raise ValueError(f"input_type must be the name of a node type (got {quote(input_type)}).")
        if not isinstance(partition_dir, (str, os.PathLike, NoneType)) or partition_dir == "" or "\0" in str(partition_dir):
            raise ValueError(f"partition_dir must be the path or URL of a folder (got {quote(partition_dir)}).")
        self.source, self.source_kwargs = source, source_kwargs
        self.split = None if split is None else checked_fractions(split)
        self.split_index, self.seed, self.input_type = int(split_index), int(seed), input_type
        limit = partition_memory_limit
        self.partition_memory_limit = None if limit is None else checked_bytes("partition_memory_limit", limit)
        self.feature_dtype = None if feature_dtype is None else checked_dtype("feature_dtype", feature_dtype)
        self.partition = None if partition is None else checked_method(partition)
        self._store = store_of(str(partition_dir or os.environ.get("LIGHTNING_GNN_STORE") or default_root()))
        self.partition_dir: Path = self._store.folder
        datasets = dict(zip(SAMPLES.values(), (samples, val_samples, test_samples, predict_samples)))
        options = global_batch_size, shuffle, node_dims, num_workers, persistent_workers, prefetch_factor, concatenate
        self.has_samples = any(each is not None for each in datasets.values())
        if not self.has_samples and options != (None, True, None, 0, False, None, False):
            raise ValueError(
                "global_batch_size, shuffle, node_dims, num_workers, persistent_workers, prefetch_factor and concatenate require "
                "GraphDataModule(samples=...). Remove them, or pass samples."
            )
        self.sample_data = feature("SampleData")(datasets, batch_size, *options) if self.has_samples else None
        self.predicting = False
        self._folder: str | None = None
        # The graph, if this process has it unpartitioned; its digests; and its stored partitions by description.
        self._graph: Graph | None = None
        self._digests: Mapping[str, str] | None = None
        self._entries: dict[str, str] = {}
        self._draw_seed: int | None = None
        self.drew = False
        self._versions_of_source = Versions()  # of the graph loaded in this process
        self._prepared_ahead: LayoutSpec | None = None
        self._failure: Exception | None = None
        self._shard: Shard | None = None
        self._shard_of: tuple[str, LayoutSpec] | None = None  # folder and layout of the shard
        self._versions: Mapping[str, int] = {}  # of the shard's tensors, before the first step

    def masks_and_labels(self, data: Graph) -> Predicted:
        return Predicted.of(data, self.input_type)

    def _options(self, layout: LayoutSpec) -> list[Any]:
        return [layout.storage_layout.as_dict(), self._partition_key(layout), self.seed, self.input_type, FORMAT]

    def _asked_for(self) -> LayoutSpec | None:
        """Returns the layout of a strategy of this package; None for other strategies."""
        return getattr(getattr(self.trainer, "strategy", None), "layout", lambda: None)()

    def _layout(self) -> LayoutSpec:
        """Returns the layout of the Trainer's strategy; for other strategies, the whole graph on one device."""
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
        """Shard of this rank; available after ``setup``."""
        if self._shard is None:
            raise RuntimeError("GraphDataModule has no data before setup(): pass it to the Trainer, datamodule=...")
        return self._shard

    @property
    def is_whole(self) -> bool:
        """True if this process has the unpartitioned graph, for one device and a strategy of another package."""
        return self._layout().kind == "whole"

    @property
    def num_classes(self) -> int:
        """Number of classes in the whole graph; available after ``setup``."""
        return self.shard.num_classes

    @property
    def num_features(self) -> int:
        """Number of columns of ``x``, with types of the input type; available after ``setup``."""
        return self.shard.masks_and_labels(self.shard.batch).x.size(1)

    @override
    def prepare_data(self) -> None:
        # Runs on rank 0 while the others wait without a timeout. An error must reach all ranks, so setup() raises it.
        self._failure = None
        layout, ahead, self._prepared_ahead = self._asked_for(), self._prepared_ahead, None
        if layout is None or layout == ahead:
            return
        try:
            self.prepare_for(layout)
        except Exception as error:
            self._failure = error

    def prepare_for(self, layout: LayoutSpec) -> None:
        """Load and partition the graph for a layout, unless it is stored; called on rank 0."""
        partition = self.partition_for(layout)
        if self.sample_data is not None:
            self.sample_data.convert(self.seed, self.stored_cut(), partition, self._lock)
        if self._shard_of is None:  # the unpartitioned graph of an earlier run on one device
            self._shard = None

    def prepare_ahead(self, layout: LayoutSpec) -> None:
        """Call :meth:`prepare_for` before ranks start, so that ``prepare_data`` of the same call skips it.

        Later calls check the graph again, since it may have changed.
        """
        self.prepare_for(layout)
        self._prepared_ahead = layout

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._prepared_ahead = None  # the call ended, possibly before its prepare_data

    @override
    def setup(self, stage: str) -> None:
        layout = self._layout()
        if self.sample_data is not None:
            self.sample_data.check_strategy(getattr(self.trainer, "strategy", None))
        if stage == "fit":
            self._check_sampled(layout)
        if layout.kind == "whole":
            self._shard = self._shard_of = None
            data = self.load()
            for store in data.node_stores if self.feature_dtype is not None else ():
                store.update({"x": store.x.to(self.feature_dtype)} if "x" in store else {})
            for store in data.edge_stores:
                store.edge_index = store.edge_index.long()  # may be int32 for a graph in files
            self._shard = whole_graph(data, self.input_type)
        else:
            self._shard = self._read_shard(layout)
            if self.is_given:
                self._versions_of_source = Versions(self.source)
        if self.trainer is not None and self.trainer.lightning_module is not None:
            check_fits(self.trainer.lightning_module, self._shard)
            check_links(self.trainer.lightning_module, self._shard, layout.samples)
        if self.sample_data is not None:
            partition = None if self._shard_of is None else self.partition_dir / self._shard_of[0]
            self.sample_data.setup(self.seed, self._shard, stage, partition, self._lock)
        if stage not in STAGE_MASKS or self.has_samples:
            return
        mask = self._counted_mask(STAGE_MASKS[stage])
        if mask in EDGE_MASKS and not sum(self._shard.mask_counts.get(mask, ())):
            raise ValueError(
                f"The graph has no edges in {mask}, which link prediction requires. Split them, "
                "GraphDataModule(split_edges(data, val=0.05, test=0.1)), or set data.edge_train_mask, data.edge_val_mask and "
                "data.edge_test_mask (bool, one entry per edge)."
            )
        if sum(self._shard.mask_counts[mask]) == 0:
            raise ValueError(f"{mask} holds no labeled node. Use another split=(train, val, test), or set data.{mask}.")

    def _check_sampled(self, layout: LayoutSpec) -> None:
        """Raises ValueError for sampling options that the strategy ignores, and for BatchSizeFinder without a batch size."""
        callbacks = [] if self.trainer is None else self.trainer.callbacks  # type: ignore[attr-defined]
        for finder in callbacks:
            if is_instance(finder, "callbacks.BatchSizeFinder"):
                feature("prepare_finder")(finder, self)
        given = {"num_neighbors": self.num_neighbors, "batch_size": None if self.has_samples else self.batch_size}
        options = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        if options and self.trainer is not None and not layout.samples:
            strategy = type(self.trainer.strategy).__name__
            raise ValueError(
                f"GraphDataModule({options}) requires sampled mini-batches, and {strategy} does not support them. "
                'Use Trainer(strategy="sampling"), or remove the options.'
            )

    def _counted_mask(self, mask: str) -> str:
        return counted_mask(mask, getattr(self.trainer, "lightning_module", None))

    def _read_shard(self, layout: LayoutSpec) -> Shard:
        """Returns this rank's shard; raises on all ranks if a rank cannot read its shard."""
        assert self.trainer is not None
        strategy: Any = self.trainer.strategy
        world = strategy.world
        raise_together(world, self._failure, "The graph could not be loaded and partitioned")
        folder = self.agree(world, layout, leads=strategy.local_rank == 0)
        with world.shared_failures("The partitioned graph could not be read"):
            if self._shard is not None and self._shard_of == (folder, layout):
                shard = self._shard  # unchanged since the last stage, like the whole graph on one device
                shard.batch.cpu()
            else:
                self.tell_of_changes("the partition has changed")
                self._shard = None  # release the memory before the next shard is read
                cut = self._read_cut(folder, layout)
                with_edges = layout.reads_edges(cut.types)
                shape = getattr(self.trainer.strategy, "mesh_shape", self.trainer.strategy)
                shard = cut.shard(getattr(shape, "graph_rank", self.trainer.global_rank), layout.replicas, with_edges)
                if self.has_samples and layout.parts == 1:
                    shard = restore_order(shard, cut.graph(), self.input_type)
        self._shard_of = folder, layout
        return shard

    def train_dataloader(self) -> Any:
        failure = None if self.trainer is None else self.trained_by(self.trainer.optimizers)
        if failure is not None:
            raise failure
        return self._batches("train_mask")

    def val_dataloader(self) -> Any:
        # Without validation nodes there is no validation, since the mean is undefined.
        is_empty = self.sample_data is None and not sum(self.shard.mask_counts[self._counted_mask("val_mask")])
        return [] if is_empty else self._batches("val_mask")

    def test_dataloader(self) -> Any:
        return self._batches("test_mask")

    def predict_dataloader(self) -> Any:
        return self._batches(None)

    def _batches(self, mask: str | None) -> Any:
        if not self._versions:
            self._versions = self.shard.versions()
        if self.sample_data is not None:
            return self.sample_data.loader(self, SAMPLES[mask])
        return OneBatch(self.shard.batch, self, mask)

    def trained_by(self, optimizers: Iterable[torch.optim.Optimizer]) -> ValueError | None:
        """Returns an error if an optimizer has a tensor of the graph as a parameter: batches contain copies of it."""
        of_graph = self._versions_of_source.names_by_id()
        for optimizer in optimizers:
            names = [of_graph.get(id(each)) for group in optimizer.param_groups for each in group["params"]]
            name = next(filter(None, names), None)
            if name is not None:
                return ValueError(
                    f"{type(optimizer).__name__} optimizes {name} of the graph, but batches have copies of it, whose gradients "
                    "do not reach it. To learn one row per node, use DistributedEmbedding(num_nodes, dim), called with "
                    f"batch.n_id (docs/embeddings.md). If {name} is a parameter of the module, pass the graph a copy: "
                    f"data.{name} = data.{name}.detach().clone()."
                )
        return None

    def tell_of_changes(self, why: str) -> None:
        """Warn about in-place changes of the batch, which are discarded now; on one device they persist."""
        versions, self._versions = self._versions, {}
        if self._shard is None or self._shard_of is None:
            return
        now = self._shard.versions()
        changed = [name for name, version in versions.items() if now.get(name, version) != version]
        if changed:
            rank_zero_warn(
                f"batch.{', batch.'.join(changed)} changed in place during this stage, but the next stage starts with the graph "
                f"as it was loaded: {why}. On one device such a change persists. Create a new tensor in each step that needs it, "
                f"such as batch.{changed[0]} = batch.{changed[0]} * 0.5, which does not affect later steps."
            )

    # Loading and storing the graph ##################################

    @property
    def origin(self) -> GraphSource:
        """Loader of the source's graph."""
        return source_of(self)

    def loading_state(self) -> dict[str, Any]:
        """Returns the attributes with which another process loads an equal graph."""
        names = "_draw_seed", "_digests", "_entries", "has_samples"
        return {name: getattr(self, name) for name in names}

    def agree(self, world: World, layout: LayoutSpec, leads: bool) -> str:
        """Returns the folder of the stored partition of rank 0; sets it and the seed on all ranks.

        Machines without the partition receive it; on each, the rank with `leads` does so.
        """
        self._folder, self._digests, self._draw_seed = world.broadcast_object((self._folder, self._digests, self._draw_seed))
        assert self._folder is not None
        spread_entry(world, leads, self.partition_dir / self._folder, self._lock)
        self._entries[self._entry_key(layout)] = self._folder
        return self._folder

    @property
    def is_given(self) -> bool:
        """True if the source is the graph itself, which changes only if the user modifies it."""
        return isinstance(self.source, Graph)

    def load(self) -> Graph:
        """Returns the whole graph, checked, with boolean masks; equal in all phases.

        Raises:
            ValueError: the graph cannot be trained on, or differs from the graph that was loaded before.
        """
        if self._graph is None or self.is_given:
            self._graph = self._read_back() or self._load()
        return self._graph

    def _read_back(self) -> Graph | None:
        """Returns the graph from one of its stored partitions; None if no partition is left."""
        known = None if self.is_given else self._digests
        self._check_unchanged()
        for folder in self._entries.values() if known else ():
            entry = self.partition_dir / folder
            if (entry / "manifest.json").exists() and read_manifest(entry)["graph"] == known:
                return read_cut(entry).graph()
        return None

    def _prepared_graph(self) -> Graph:
        """Returns the graph of the source, checked, with masks."""
        data, index_split = self.origin.load(self.source_kwargs, self.partition_dir)
        self._versions_of_source = Versions(data)
        options = self.split, self.split_index, self.seed, not self.predicts()
        if not isinstance(data, Data):
            return feature("prepare_hetero")(data, self.input_type, *options, self.origin.short_ids)
        if self.input_type is not None:
            raise ValueError(f"input_type={self.input_type!r} needs a HeteroData, but the graph has no types. Remove input_type.")
        return prepare_graph(data, index_split, *options, self.origin.short_ids, not self.has_samples)

    def _load(self) -> Graph:
        self._draw_seed = self._seed_of_draws()
        with seed_rngs(self._draw_seed) as has_drawn:
            graph = self._prepared_graph()
            self.drew = has_drawn()
        if self._digests is not None and not self.is_given:
            check_same_graph(graph_digests(graph), self._digests, f"{source_name(self.source)}, loaded again,")
        return graph

    def changed_in_stage(self) -> list[str]:
        """Returns the names of the given graph's tensors that changed in place since the stage began on this rank."""
        return self._versions_of_source.changed_names()

    def _check_unchanged(self) -> None:
        """Raises ValueError if the graph of a source that is loaded once changed in place since it was partitioned."""
        changed = [] if self.is_given or self._digests is None else self._versions_of_source.changed_names()
        if changed:
            raise ValueError(
                f"{', '.join(changed)} of the graph that {source_name(self.source)} returned changed in place after it was "
                "partitioned, but a source is loaded once. Pass the graph itself, GraphDataModule(data), whose changes between "
                "calls of the Trainer take effect, or create a new GraphDataModule after each change."
            )

    def _seed_of_draws(self) -> int:
        return (torch.initial_seed() + self.seed) % 2**63 if self._draw_seed is None else self._draw_seed

    def predicts(self) -> bool:
        """Returns whether the graph is only used for prediction or has samples, and may lack masks and labels."""
        call = getattr(getattr(self.trainer, "state", None), "fn", None)
        return self.predicting or self.has_samples or call == TrainerFn.PREDICTING

    @property
    def is_stored(self) -> bool:
        """Whether :meth:`stored_cut` is available."""
        return self._folder is not None

    def stored_cut(self, by_rows: bool = False) -> Cut:
        """Returns the partitioned graph as ``read_cut`` of the store does; available after :meth:`prepare_for`."""
        assert self._folder is not None
        return self._read_cut(self._folder, by_rows=by_rows)

    def _read_cut(self, folder: str, layout: LayoutSpec | None = None, by_rows: bool = False) -> Cut:
        return replace(read_cut(self.partition_dir / folder, layout, by_rows), feature_dtype=self.feature_dtype)

    def partition_for(self, layout: LayoutSpec) -> Path:
        """Partition the graph, unless it is stored, and return the folder of the partition; needs no Trainer."""
        self._folder = self._ensure_stored(layout)
        return self.partition_dir / self._folder

    def predictions(self, layout: LayoutSpec) -> tuple[list[Prediction], str | np.ndarray]:
        """Returns the predicted costs of partitioners, and the selected one; loads the graph, and needs no Trainer."""
        from lightning_gnn.partition.budget import predictions

        joined, method = JoinedGraph.of(self.load()), self._method(layout)
        cut = joined.edge_index, joined.num_nodes, layout.parts
        if layout.kind == "vertex_cut":
            return cutter_of(layout.kind).edge_predictions(*cut), method
        return predictions(*cut, self.origin.partitioners(self.partition_dir)), method

    def _ensure_stored(self, layout: LayoutSpec) -> str:
        """Returns the folder's name in the partition directory; loads and partitions only if it is not stored. Rank 0."""
        key = self._entry_key(layout)
        self._check_unchanged()
        if not self.is_given:
            for folder in (self._entries.get(key), *map(self._read_note, self._notes(layout))):
                if folder is not None and self._is_entry(folder, layout):
                    self._entries[key] = folder
                    return folder
        if self._graph is None and self._notes(layout) and isinstance(self._method(layout), str):
            folder = self._build_in_subprocess(layout)
        else:
            folder = self.build(layout)
        self._entries[key] = folder
        # Computed again: loading may have written processed files next to the raw files.
        notes = self._notes(layout)
        if notes:
            with writing(self.partition_dir):
                write_atomically(self.partition_dir / f"{notes[self.drew]}.known", _note(notes[self.drew], folder))
            self._store.publish(f"{notes[self.drew]}.known")
        return folder

    def _entry_key(self, layout: LayoutSpec) -> str:
        return json.dumps(self._options(layout))

    def _notes(self, layout: LayoutSpec) -> list[str]:
        """Returns up to two keys by which a stored partition is found without loading the graph, for a source given as a string.

        The first key is for graphs without random numbers, such as random splits; the second key includes the seed. Returns []
        for other sources.
        """
        if not isinstance(self.source, str):
            return []
        options = [self.split, self.split_index, self._options(layout)]
        each_way = options, [*options, self._seed_of_draws()]
        keys = [self.origin.key(self.source_kwargs, each) for each in each_way]
        return [key for key in keys if key is not None]

    def build(self, layout: LayoutSpec) -> str:
        """Load and partition the graph in this process, unless it is stored; returns the folder's name."""
        data = self.load()
        predicted = self.masks_and_labels(data)
        if not layout.takes(predicted.has_types):
            raise ValueError(NO_TYPES)
        digests = graph_digests(data)
        described_as = json.dumps([digests, left_out_of(data), self._options(layout)])
        name = f"{layout.kind}-{layout.parts}-{hashlib.blake2b(described_as.encode(), digest_size=12).hexdigest()}"
        folder = self.partition_dir / name
        # Not kept: from now on the stored partition is read.
        self._graph, self._digests = None, digests
        self._versions_of_source.renew()
        with self._lock(name):
            self._store.fetch(name)
            if folder.exists():
                read_manifest(folder, layout)
                return name
            check_space(self.partition_dir, stored_bytes(data))
            method = self._method(layout)
            rank_zero_info(
                f"Partitioning {data.num_nodes:,} nodes and {data.num_edges:,} edges into {layout.parts} parts "
                f"({method if isinstance(method, str) else 'as given'}): about {math.ceil(EDGE_S * data.num_edges)} s"
            )
            with self.origin.cut(folder, data, layout, partial(self.assign, data, layout)) as ((part, holders, report), edges):
                write_store(folder, data, part, layout.storage_layout, report, holders, predicted, digests, edges)
            rank_zero_info(f"Partitioned in {report['seconds']:.1f} s, stored in {folder}")
            self._store.publish(name)
        return name

    def assign(
        self, data: Graph, layout: LayoutSpec, plugins: Mapping[str, Partitioner] | None = None, holders: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray | None, dict[str, Any]]:
        """Returns the owner of each node, the rank of each edge, and a report.

        The second result is None except for a vertex cut; `holders` is an optional array for it.
        """
        method = self._method(layout)
        joined = JoinedGraph.of(data)
        predicted = self.masks_and_labels(data)
        masks, edge_masks = joined.masks_of(predicted)
        cut: Any = (joined.edge_index, joined.num_nodes, layout.parts, method)
        options: dict[str, Any] = {"seed": self.seed, "masks": masks, "groups": layout.groups}
        if layout.kind == "vertex_cut":
            edges = cutter_of(layout.kind).assign_edges(*cut, host_weight=layout.host_weight, **options, part=holders)
            return edges.master, edges.part, {**edges.report.as_dict(), "method": edges.method}
        from lightning_gnn.partition.edge_cut import assign_nodes  # ranks with a stored graph skip this import

        nodes = assign_nodes(*cut, **options, edge_masks=edge_masks, node_kinds=joined.node_kinds, plugins=plugins)
        report = {**nodes.report.as_dict(), "method": nodes.method, "balance": nodes.balance}
        if predicted.has_types:
            report["types"] = joined.types(nodes.part, layout.parts, predicted.node_type).by_name()
        return nodes.part, None, report

    def _build_in_subprocess(self, layout: LayoutSpec) -> str:
        """Run :meth:`build` in a separate process, which releases its memory at the end."""
        self._draw_seed = self._seed_of_draws()
        rank_zero_info(f"Loading {self.source} in a separate process to partition it")
        request = {
            "datamodule": {name: getattr(self, name) for name in self.built_from} | {"partition_dir": self._store.location},
            "layout": layout.as_dict(),
            "predicting": self.predicts(),
            "loaded": self.loading_state(),
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
        # The user's code may print, too; the answer is the last line.
        lines = done.stdout.splitlines() or ['{"error": "see the error above."}']
        answer = json.loads(lines[-1])
        if "error" in answer:
            raise RuntimeError(f"Loading or partitioning {self.source} failed: {answer['error']}")
        folder, self.drew = answer["folder"], bool(answer["drew"])
        self._digests = read_manifest(self.partition_dir / folder, layout)["graph"]
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

    def _read_note(self, key: str) -> str | None:
        """Returns the folder that an earlier run made from an equal description."""
        note = self.partition_dir / f"{key}.known"
        self._store.fetch(note.name)
        if not note.is_file():
            return None
        text = note.read_text(errors="replace")
        folder = text.partition(" ")[0]
        return folder if text == _note(key, folder) else None

    def _is_entry(self, folder: str, layout: LayoutSpec) -> bool:
        """Returns whether a folder is in the partition directory, with the graph of this datamodule if it is loaded."""
        self._store.fetch(folder)
        if not (self.partition_dir / folder / "manifest.json").exists():
            return False
        manifest = read_manifest(self.partition_dir / folder, layout)
        if not layout.takes(manifest["types"] is not None):
            return False  # loading the source again raises the error
        if self._digests is None:
            self._digests = manifest["graph"]
        return self._digests == manifest["graph"]

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Context manager that lets one process partition; waiting processes log the owner.

        The system frees the lock if the owner dies.
        """
        owner = self.partition_dir / f"{name}.owner"
        lock = FileLock(self.partition_dir / f"{name}.lock")
        with writing(self.partition_dir):
            self.partition_dir.mkdir(parents=True, exist_ok=True)
            for seconds in chain([2], repeat(300)):
                with suppress(Timeout):
                    lock.acquire(timeout=seconds)
                    break
                rank_zero_info(f"Waiting for {_held_by(owner)}, which partitions the same graph.")
        try:
            with writing(self.partition_dir):
                write_atomically(owner, f"process {os.getpid()} on {platform.node()}")
            yield
        finally:
            owner.unlink(missing_ok=True)
            lock.release()

    def remove_remains(self) -> None:
        """Remove what ended processes have left in the partition directory: their lock is free."""
        for owner in self.partition_dir.glob("*.owner"):
            name = owner.name.removesuffix(".owner")
            with suppress(Timeout), FileLock(self.partition_dir / f"{name}.lock", timeout=0):
                for left in self.partition_dir.glob(f".{name}.*"):
                    shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
                owner.unlink(missing_ok=True)


def check_links(module: torch.nn.Module, of: Shard | Cut, samples: bool) -> None:
    """Raises ValueError for a link predictor whose edges are missing in the graph or not supported by the strategy.

    Args:
        module: module of the run.
        of: the graph.
        samples: whether the strategy trains on samples.
    """
    if not getattr(module, "predicts_edges", False):
        return
    name = type(module).__name__
    ready = hasattr(module, "is_ready_made")  # a module of this package
    edge_type: Any = getattr(module, "edge_type", None) if ready else None
    if not of.types.is_hetero:
        if edge_type is not None:
            raise ValueError(f"{name}(edge_type={edge_type}) needs a HeteroData, but the graph has no types. Remove edge_type.")
        return
    if not samples:
        raise ValueError(
            f"{name} predicts edges, and edges of a HeteroData are predicted in mini-batch steps only. Use "
            'Trainer(strategy="sampling"); with other strategies, predict nodes.'
        )
    if of.edge_type is None:
        raise ValueError(
            f"{name} predicts edges of one type: the type with an edge_val_mask or an edge_test_mask, or else the only type "
            "with an edge_train_mask. The graph has none, or several. Split one, GraphDataModule(split_edges(data, edge_type="
            f"{next(iter(of.types.edges))})), or set the edge masks (bool, one entry per edge) of one type."
        )
    if ready and edge_type != of.edge_type:
        given = "calls model(x, edge_index)" if edge_type is None else f"has edge_type={edge_type}"
        raise ValueError(
            f"{name} {given}, but the edge masks of this HeteroData select type {of.edge_type}. Use "
            f"{name}(model, edge_type={of.edge_type}), or split the edges of another type."
        )


def check_fits(module: torch.nn.Module, of: Shard | Cut) -> None:
    """Raises ValueError for a module that cannot be trained on a graph of these types."""
    types = of.types
    name, node_type = type(module).__name__, getattr(module, "node_type", None)
    ready = hasattr(module, "is_ready_made")  # a module of this package
    if not types.is_hetero:
        if ready and node_type is not None:
            raise ValueError(f"{name}(node_type={node_type!r}) needs a HeteroData, but the graph has no types. Remove node_type.")
    elif ready and not getattr(module, "predicts_edges", False) and node_type != types.input_type:
        given = "calls model(x, edge_index)" if node_type is None else f"has node_type={node_type!r}"
        raise ValueError(
            f"{name} {given}, but the input_type of this HeteroData is {types.input_type!r}. Use "
            f"{name}(model, node_type={types.input_type!r}), or GraphDataModule(..., input_type=...) for another type."
        )
    learned_rows(module, of)


def _held_by(owner: Path) -> str:
    with suppress(OSError):  # the file may be deleted or not yet written
        return f"{owner.read_text(errors='replace')[:200]} (for {time.time() - owner.stat().st_mtime:.0f} s)"
    return "another process"


def _note(key: str, folder: str) -> str:
    """Returns the content of the note under `key`, with a checksum that detects copied or modified notes."""
    return f"{folder} {hashlib.blake2b(f'{key} {folder}'.encode(), digest_size=8).hexdigest()}"
