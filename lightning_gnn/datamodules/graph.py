"""GraphDataModule: any PyG graph, laid out as the Trainer's strategy needs it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data
from typing_extensions import override

from lightning_gnn.arguments import checked_batches, checked_bytes, checked_dtype, shown
from lightning_gnn.comm.group import raise_together
from lightning_gnn.data.joined import Graph, Predicted
from lightning_gnn.data.loading import Source, Versions
from lightning_gnn.data.shards import Cut, Shard, whole_graph
from lightning_gnn.data.sources import EDGE_MASKS, checked_fractions, counted_mask, prepare_graph
from lightning_gnn.data.store import FORMAT, default_root
from lightning_gnn.datamodules.stored_graph import StoredGraph
from lightning_gnn.foreign import leave_out_missing_validation
from lightning_gnn.nn.learned_rows import learned_rows
from lightning_gnn.partition.edge_cut import checked_method
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.registry import feature

Partition: TypeAlias = str | Sequence[int] | np.ndarray | Tensor


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


class GraphDataModule(StoredGraph, L.LightningDataModule):
    """One graph for any strategy: whole on one device, partitioned over the ranks of a `lightning_gnn` strategy.

    Partitioned once, by rank 0: the result is stored, memory-mapped by all ranks, and found again in later runs. Machines whose
    stores lack it fetch it from others.

    One datamodule has one graph, in all stages and on all ranks, also where its source draws at random, such as a dataset with
    ``transform=T.RandomNodeSplit()``: what is drawn while it is loaded follows from torch's seed and `seed`, and takes nothing
    from the random numbers of the run.

    Args:
        source: a PyG dataset with one graph, a ``Data`` or ``HeteroData``, a pair ``(feature_store, graph_store)`` as
            PyG's loaders take it, a callable that returns one of these, or its dotted path, e.g.
            ``"torch_geometric.datasets.Planetoid"``; or the path of a folder with a graph's files, which are
            memory-mapped (docs/large-graphs.md). A dataset or ``Data`` is in the memory of every rank that builds it; an
            import path or a folder is loaded only where it must be partitioned, in a process of its own. Changes of a
            ``Data`` between stages are followed; those of rank 0, where ranks are processes of their own.
        source_args: keyword arguments of a callable or import path; numbers, strings, lists and dicts.
        split: fractions of training, validation and test nodes, ``(0.6, 0.2, 0.2)``, for a random split of the labelled
            nodes. Without it, the graph's masks or the dataset's ``get_idx_split()`` (OGB) are used.
        split_column: which split, where masks have shape ``[N, splits]``.
        partition: ``"metis"``, ``"metis_masks"``, ``"metis_cover"``, ``"kaminpar"``, ``"kaminpar_compressed"``, ``"streaming"``,
            ``"auto"`` (the best of these for which there is memory), ``"random"``, ``"contiguous"`` (ranges of the graph's own
            order), or the rank of every node, ``[N]``. By default what suits the strategy, in most cases METIS; of a folder,
            ``"auto"``. Of a vertex cut one of
            :class:`~lightning_gnn.strategies.vertex_cut.strategy.VertexCutStrategy`'s that have these names, and by default the
            strategy's own, of a folder too.
        seed: of the random split and of the partitioner; added to torch's seed for what the source draws.
        input_type: of a ``HeteroData``, the node type whose nodes are predicted; by default the one that has a ``train_mask``, or
            that of the targets of edges that are predicted.
        store: folder for partitioned graphs; default ``$LIGHTNING_GNN_STORE`` or ``~/.cache/lightning_gnn``.
        fanouts, batch_size: of mini-batches, for a strategy that trains on samples, see
            :class:`~lightning_gnn.SamplingStrategy`; by default what the strategy says.
        partition_memory: bytes that sorting the edges of a graph in files may take beside what grows with its nodes, such as
            ``"4GB"``; by default a third of what is available.
        feature_dtype: of ``x`` in batches, such as ``"float32"`` where the store has float16; by default that of the store.

    Raises:
        ValueError: an argument, or the graph, is not as described; the source gave another graph when it was loaded once more;
            fan-outs or a batch size are given and the strategy trains on no samples; from ``setup``, on all
            ranks.
        StoreError: the store is full, cannot be written, has been altered, or another machine's could not be fetched; from
            ``setup``, on all ranks.

    Labels of -1 mark nodes without a label. Every tensor of the graph with one row per node or edge goes with its node
    or edge. The batch of a step is a PyG ``Data``: ``x [N, F]``, ``edge_index [2, E]`` (local ids), ``y``,
    ``train_mask``, ``val_mask``, ``test_mask``, ``n_id [N]`` (original ids), ``num_owned`` (N). A graph whose links are to be
    predicted has ``edge_train_mask``, ``edge_val_mask``, ``edge_test_mask`` (bool ``[E]``) and needs none of nodes; of a
    ``HeteroData``, one edge type has them.

    Of a ``HeteroData``, batches are ``HeteroData``: under ``dgcl``, ``vertex_cut`` and ``spmm_1d`` a rank's part of the whole
    graph, under ``sampling`` samples.
    """

    built_from = ("source", "source_args", "split", "split_column", "partition", "seed", "input_type", "partition_memory")

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
        partition_memory: int | str | None = None,
        feature_dtype: str | torch.dtype | None = None,
    ) -> None:
        L.LightningDataModule.__init__(self)
        StoredGraph.__init__(self)
        leave_out_missing_validation()
        self.prepare_data_per_node = False  # other machines get what rank 0 has made
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
        self.partition_memory = None if partition_memory is None else checked_bytes("partition_memory", partition_memory)
        self.feature_dtype = None if feature_dtype is None else checked_dtype("feature_dtype", feature_dtype)
        self.partition = None if partition is None else checked_method(partition)
        self.store = Path(store) if store is not None else default_root()
        self._prepared_ahead: LayoutSpec | None = None
        self._failure: Exception | None = None
        self._shard: Shard | None = None
        self._shard_of: tuple[str, LayoutSpec] | None = None  # the entry and layout that it was read for
        self._versions: Mapping[str, int] = {}  # of its tensors, before the first step

    @override
    def predicted(self, data: Graph) -> Predicted:
        return Predicted.of(data, self.input_type)

    @override
    def _prepared(self, data: Graph, index_split: Mapping[str, Any] | None, short_ids: bool) -> Graph:
        options = self.split, self.split_column, self.seed, not self.predicts()
        if not isinstance(data, Data):
            return feature("prepare_hetero")(data, self.input_type, *options)
        if self.input_type is not None:
            raise ValueError(f"input_type={self.input_type!r} is of a HeteroData, but the graph has no types. Leave it out.")
        return prepare_graph(data, index_split, *options, short_ids)

    @override
    def _options(self, layout: LayoutSpec) -> list[Any]:
        return [layout.stored.as_dict(), self._partition_key(layout), self.seed, self.input_type, FORMAT]

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
        return self.shard.predicted(self.shard.batch).x.size(1)

    @override
    def prepare_data(self) -> None:
        # Runs on rank 0 while the others wait without a deadline: an error must reach them as well, so it is raised in setup(),
        # on all.
        self._failure = None
        layout, ahead, self._prepared_ahead = self._asked_for(), self._prepared_ahead, None
        if layout is None or layout == ahead:
            return
        try:
            self.prepare_for(layout)
        except Exception as error:
            self._failure = error

    def prepare_for(self, layout: LayoutSpec) -> None:
        """Loads and partitions the graph for a layout, unless the store holds it; on rank 0, where there are ranks."""
        self.partition_for(layout)
        if self._shard_of is None:  # the whole graph, of an earlier run on one device
            self._shard = None

    def prepare_ahead(self, layout: LayoutSpec) -> None:
        """As :meth:`prepare_for`, before ranks are started: ``prepare_data`` of the same call does not look at the graph again.

        That of any later call does, since the graph may have changed.
        """
        self.prepare_for(layout)
        self._prepared_ahead = layout

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._prepared_ahead = None  # the call has ended, perhaps before its prepare_data

    @override
    def setup(self, stage: str) -> None:
        layout = self._layout()
        if stage == "fit":
            self._check_sampled(layout)
        if layout.kind == "whole":
            self._shard = self._shard_of = None
            data = self.load()
            if isinstance(data, Data):
                data.x = data.x if self.feature_dtype is None else data.x.to(self.feature_dtype)
                data.edge_index = data.edge_index.long()  # of a graph in files, perhaps int32
            self._shard = whole_graph(data, self.input_type)
        else:
            self._shard = self._read_shard(layout)
            if self.is_given:
                self._versions_of_source = Versions(self.source)
        if self.trainer is not None and self.trainer.lightning_module is not None:
            check_fits(self.trainer.lightning_module, self._shard)
            check_links(self.trainer.lightning_module, self._shard, layout.samples)
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
            raise ValueError(f"{mask} holds no labelled node. Give another split=(train, val, test), or set data.{mask}.")

    def _check_sampled(self, layout: LayoutSpec) -> None:
        """Refuses fan-outs and batch sizes that a strategy would ignore, and to look for one where a batch is the graph."""
        callbacks = [] if self.trainer is None else self.trainer.callbacks  # type: ignore[attr-defined]
        if self.batch_size is None and any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
            raise ValueError(
                "BatchSizeFinder has nothing to find: GraphDataModule has no batch_size, so the whole graph is one batch. Leave "
                "the callback out."
            )
        given = {"fanouts": self.fanouts, "batch_size": self.batch_size}
        options = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        if options and self.trainer is not None and not layout.samples:
            strategy = type(self.trainer.strategy).__name__
            raise ValueError(
                f"GraphDataModule({options}) asks for batches of sampled neighbourhoods, and {strategy} makes none. "
                'Use Trainer(strategy="sampling"), or leave it out.'
            )

    def _counted(self, mask: str) -> str:
        return counted_mask(mask, getattr(self.trainer, "lightning_module", None))

    def _read_shard(self, layout: LayoutSpec) -> Shard:
        """Returns this rank's part of the partitioned graph; raises on all ranks if one of them has none."""
        assert self.trainer is not None
        strategy: Any = self.trainer.strategy
        world = strategy.world
        raise_together(world, self._failure, "The graph could not be loaded and partitioned")
        folder = self.agree(world, layout, leads=strategy.local_rank == 0)
        with world.together("The partitioned graph could not be read"):
            if self._shard is not None and self._shard_of == (folder, layout):
                shard = self._shard  # as the last stage has left it, like the whole graph on one device
                shard.batch.cpu()
            else:
                self.tell_of_changes("the parts are other ones now")
                self._shard = None  # before the next one takes its memory
                cut = self._read_cut(folder, layout)
                with_edges = layout.reads_edges(cut.types)
                shard = cut.shard(self.trainer.global_rank, layout.replicas, with_edges)
        self._shard_of = folder, layout
        return shard

    def train_dataloader(self) -> Any:
        failure = None if self.trainer is None else self.trained_by(self.trainer.optimizers)
        if failure is not None:
            raise failure
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
            self._versions = self.shard.versions()
        return OneBatch(self.shard.batch, self, mask)

    def trained_by(self, optimizers: Iterable[torch.optim.Optimizer]) -> ValueError | None:
        """Returns an error for an optimizer that is to train a tensor of the graph, of which batches have copies."""
        of_graph = self._versions_of_source.named()
        for optimizer in optimizers:
            names = [of_graph.get(id(each)) for group in optimizer.param_groups for each in group["params"]]
            name = next(filter(None, names), None)
            if name is not None:
                return ValueError(
                    f"{type(optimizer).__name__} is to train {name} of the graph, and batches have copies of it, whose gradients "
                    "do not reach it. Let the module learn a row per node: DistributedEmbedding(num_nodes, dim), called with "
                    f"batch.n_id (docs/embeddings.md). If the module learns {name} by itself, give the graph a copy: "
                    f"data.{name} = data.{name}.detach().clone()."
                )
        return None

    def tell_of_changes(self, why: str) -> None:
        """Warns of changes of the batch in place, which are lost now; on one device they would have stayed."""
        versions, self._versions = self._versions, {}
        if self._shard is None or self._shard_of is None:
            return
        now = self._shard.versions()
        changed = [name for name, version in versions.items() if now.get(name, version) != version]
        if changed:
            rank_zero_warn(
                f"batch.{', batch.'.join(changed)} changed in place during this stage, and the next one begins with the graph as "
                f"it was loaded: {why}. On one device such a change stays. Make a new tensor in each step that needs it, such as "
                f"batch.{changed[0]} = batch.{changed[0]} * 0.5, which changes nothing for later steps."
            )


def check_links(module: torch.nn.Module, of: Shard | Cut, samples: bool) -> None:
    """Raises ValueError for a module that predicts edges which the graph has none of, or not under this strategy, which `samples`
    or does not."""
    if not getattr(module, "predicts_edges", False):
        return
    name = type(module).__name__
    ready = hasattr(module, "is_ready_made")  # a module of this package, and none of the user's
    edge_type: Any = getattr(module, "edge_type", None) if ready else None
    if not of.types.is_hetero:
        if edge_type is not None:
            raise ValueError(f"{name}(edge_type={edge_type}) is for a HeteroData, but the graph has no types. Leave it out.")
        return
    if not samples:
        raise ValueError(
            f'{name} predicts edges, and those of a HeteroData are predicted on samples only: use Trainer(strategy="sampling"). '
            "With other strategies, nodes are predicted."
        )
    if of.edge_type is None:
        raise ValueError(
            f"{name} predicts edges of one type: the one with an edge_val_mask or an edge_test_mask, or else the only one with "
            "an edge_train_mask, and the graph has none, or several. Split one, GraphDataModule(split_edges(data, edge_type="
            f"{next(iter(of.types.edges))})), or set the masks of edges (bool, one entry per edge) of one type."
        )
    if ready and edge_type != of.edge_type:
        given = "calls model(x, edge_index)" if edge_type is None else f"has edge_type={edge_type}"
        raise ValueError(
            f"{name} {given}, but of this HeteroData edges of type {of.edge_type} are predicted, as their masks tell. Say "
            f"{name}(model, edge_type={of.edge_type}), or split those of another type."
        )


def check_fits(module: torch.nn.Module, of: Shard | Cut) -> None:
    """Raises ValueError for a module that cannot be trained on a graph of these types."""
    types = of.types
    name, node_type = type(module).__name__, getattr(module, "node_type", None)
    ready = hasattr(module, "is_ready_made")  # a module of this package
    if not types.is_hetero:
        if ready and node_type is not None:
            raise ValueError(f"{name}(node_type={node_type!r}) is for a HeteroData, but the graph has no types. Leave it out.")
    elif ready and not getattr(module, "predicts_edges", False) and node_type != types.input_type:
        given = "calls model(x, edge_index)" if node_type is None else f"has node_type={node_type!r}"
        raise ValueError(
            f"{name} {given}, but of this HeteroData nodes of type {types.input_type!r} are predicted. Say "
            f"{name}(model, node_type={types.input_type!r}), or GraphDataModule(..., input_type=...) for another type."
        )
    learned_rows(module, of)
