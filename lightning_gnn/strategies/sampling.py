"""``sampling``: mini-batches of sampled neighbourhoods on a partitioned graph.

Source: DistDGL, "Distributed Graph Neural Network Training for Billion-Scale Graphs" (2020): sections III-B (partition, split of
seeds), III-C (feature store), III-D (samplers), III-E (trainer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.nn.models.basic_gnn import BasicGNN
from typing_extensions import override

from lightning_gnn.callbacks.sampling import SamplingMetrics
from lightning_gnn.comm.graph_store import GraphStore
from lightning_gnn.datamodules.graph import GraphDataModule
from lightning_gnn.datamodules.shards import Cut
from lightning_gnn.datamodules.sources import EDGE_MASKS, counted_mask, is_labelled
from lightning_gnn.nn.helpers import graph_in_use
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.sampling.loader import BatchMaker, EdgeBatchMaker, SampledBatches
from lightning_gnn.sampling.neighbors import check_batches
from lightning_gnn.sampling.seeds import SeedBatches, split_seeds
from lightning_gnn.sampling.variants import (
    METHODS,
    Draw,
    EgoBatchMaker,
    Method,
    SubgraphBatchMaker,
    cluster_draw,
    saint_draw,
)
from lightning_gnn.strategies.base import GNNStrategy
from lightning_gnn.strategies.dgcl import DGCLScheme

T = TypeVar("T")

_OF_NEIGHBORS = METHODS[:2]


class SamplingScheme(DGCLScheme):
    """The edge cut of ``dgcl``, whose parts also have their share of the training, validation and test nodes.

    Args:
        keep_constant: see :class:`SamplingStrategy`.
    """

    def __init__(self, keep_constant: bool = True) -> None:
        super().__init__(keep_constant, plan="p2p", topology=None)

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        return replace(super().layout(world_size, num_hosts), method="metis_masks")


class SamplingStrategy(GNNStrategy):
    """Training in mini-batches of sampled neighbourhoods; ``Trainer(strategy="sampling")``.

    Each rank trains on seeds of its own, whose sampled neighbourhoods come to it as a PyG ``Data`` like those of PyG's
    NeighborLoader: seeds first, ``batch_size``, ``n_id``, ``e_id``, ``num_sampled_nodes``; masks are true for seeds. A module
    that predicts edges, such as :class:`~lightning_gnn.LinkPredictor`, gets batches of edges like those of PyG's
    LinkNeighborLoader: ``edge_label_index``, ``edge_label``. Gradients are summed over ranks, weighted by seeds. Validation, test
    and prediction use whole neighbourhoods, exactly as under ``dgcl``.

    Args:
        fanouts: in-edges that are drawn of each node, per hop, the seeds' first; -1 for all. One per layer of the model. By
            default the datamodule's, or else (15, 10).
        batch_size: seeds, nodes or edges, of a batch on each rank, at most; of GraphSAINT what is drawn, nodes, edges or
            walks; of clusters the nodes in them, about. By default the datamodule's, or else 1024.
        replace: draw with replacement.
        directed: keep the edges that were drawn; False for all between the nodes that were reached.
        method: ``"neighbor"``; or, for modules that predict nodes, ``"shadow"``, ego graphs of the seeds that share no nodes
            (ShaDow, NeurIPS 2021); ``"saint_node"``, ``"saint_edge"`` or ``"saint_walk"``, subgraphs of nodes drawn from the
            whole graph (GraphSAINT, ICLR 2020); ``"cluster"``, clusters of the rank's own nodes (Cluster-GCN, KDD 2019).
        walk_length: steps of a walk of ``"saint_walk"``.
        clusters: in a batch of ``"cluster"``.
        samplers: threads that make batches (DistDGL, section III-D); batches do not depend on how many.
        prefetch: batches that are made ahead in the background; 0 for none. At least as many as samplers, if these are several.
        cache_mb: memory for features of nodes on other machines that are read often, in MB.
        seed: of sampling and of the order of seeds.
        keep_constant: in evaluation, see :class:`~lightning_gnn.strategies.dgcl.DGCLStrategy`.
        **options: see :class:`~lightning_gnn.strategies.base.GNNStrategy`.

    Raises:
        ValueError: no fan-outs or such as are none, a batch size below 1, a negative number of batches or of megabytes, an
            unknown method, or one that does not go with other arguments; from ``setup``, other fan-outs or another batch size
            on the datamodule, a method that does not go with the module.
    """

    strategy_name = "sampling"

    def __init__(
        self,
        fanouts: Sequence[int] | None = None,
        batch_size: int | None = None,
        replace: bool = False,
        directed: bool = True,
        prefetch: int = 2,
        cache_mb: float = 64.0,
        seed: int = 0,
        keep_constant: bool = True,
        method: Method = "neighbor",
        walk_length: int = 2,
        clusters: int = 10,
        samplers: int = 1,
        **options: Any,
    ) -> None:
        check_batches(fanouts, batch_size)
        if method not in METHODS:
            raise ValueError(f"method is one of {', '.join(METHODS)} (got {method!r}).")
        for name, count in (("walk_length", walk_length), ("clusters", clusters), ("samplers", samplers)):
            if count < 1:
                raise ValueError(f"{name} is at least 1 (got {count}).")
        for name, value in (("prefetch", prefetch), ("cache_mb", cache_mb)):
            if value < 0:
                raise ValueError(f"{name} is at least 0 (got {value}).")
        if samplers > 1 and prefetch < samplers:
            raise ValueError(
                f"samplers={samplers} make as many batches at a time, but prefetch={prefetch}. Use prefetch={samplers} or more."
            )
        if method not in _OF_NEIGHBORS and (replace or not directed):
            raise ValueError(
                f"replace and directed tell how neighbours are drawn, and method={method!r} takes all edges between its nodes."
            )
        super().__init__(SamplingScheme(keep_constant), **options)
        self.replace, self.directed, self.method = replace, directed, method
        self.walk_length, self.clusters, self.samplers = walk_length, clusters, samplers
        self.prefetch, self.cache_mb, self.seed = prefetch, cache_mb, seed
        self._given = None if fanouts is None else list(fanouts), batch_size
        self._choose(None, None)
        self._stores: list[GraphStore] = []
        self._batches: SampledBatches | None = None
        self._depth_known = False

    # Batches ##################################################################

    def _choose(self, fanouts: list[int] | None, batch_size: int | None) -> None:
        """Takes fan-outs and batch size from the datamodule where they are not given here."""
        if self.method not in _OF_NEIGHBORS and (self._given[0] or fanouts):
            raise ValueError(f"fanouts tell how neighbours are drawn, and method={self.method!r} draws none.")
        self.fanouts = _one_of("fanouts", self._given[0], fanouts, [15, 10])
        self.batch_size = _one_of("batch_size", self._given[1], batch_size, 1024)

    @override
    def _check_data(self, data: Any) -> GraphDataModule:
        data = super()._check_data(data)
        self._choose(data.fanouts, data.batch_size)
        return data

    def training_batches(self, data: GraphDataModule) -> SampledBatches:
        """Returns this rank's loader; asked for by the datamodule, on all ranks."""
        self._close_store()
        cut, rank, module = data.stored_cut(), self.global_rank, self.lightning_module
        assert module is not None
        name = counted_mask("train_mask", module)
        edges = name in EDGE_MASKS
        # What is learnt of edges must not be read off those that are held out.
        messages = name if edges else None
        store = GraphStore(cut, self.world, self.world.ranks_here(), int(self.cache_mb * 1e6), messages)
        self._stores = [store, *(store.beside() for _ in range(1, self.samplers))]
        mask = cut.attributes["edge" if edges else "node"][name]
        y = cut.attributes["node"].get("y")
        if not edges and y is not None:
            mask = mask & is_labelled(y)
        seeds = mask.nonzero().view(-1)
        if self.method in _OF_NEIGHBORS:
            split = split_seeds(seeds.numpy(), cut.edge_offsets if edges else cut.offsets, self.num_processes)
            own, batches = torch.from_numpy(split[rank]), SeedBatches([len(each) for each in split], self.batch_size)
            kind = BatchMaker if self.method == "neighbor" else EgoBatchMaker
            make: Callable[..., BatchMaker] = kind
            if edges:
                make = partial(EdgeBatchMaker, cut.ends, getattr(module, "sampled_negatives", 0))
            how: tuple[Any, ...] = (self.fanouts, self.replace, self.directed)
        else:
            own, batches, draw = self._drawn(cut, rank)
            make, how = partial(SubgraphBatchMaker, draw, mask, seeds[:1]), ()
        makers = [make(each, cut.n_id, cut.e_id, *how) for each in self._stores]
        trainer = module.trainer
        self._batches = SampledBatches(
            makers, batches, own, seeds[:1], rank, self.seed, self.prefetch, lambda: trainer.current_epoch
        )
        return self._batches

    def _drawn(self, cut: Cut, rank: int) -> tuple[Tensor, SeedBatches, Draw]:
        """Returns seeds and batches for a method that draws nodes, and how it does; on all ranks as many steps.

        An epoch draws about as many nodes as the graph has.
        """
        most = int(np.diff(cut.offsets).max())
        if self.method == "cluster":
            count, per_step = self.clusters * max(1, -(-most // self.batch_size)), self.clusters
            draw = cluster_draw(cut, rank, count, self.seed)
        else:
            draw, nodes = saint_draw(cut, self.method, self.batch_size, self.walk_length)
            count, per_step = max(1, -(-most // nodes)), 1
        return torch.arange(count), SeedBatches([count] * self.world_size, per_step), draw

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return dataloader if isinstance(dataloader, SampledBatches) else super().process_dataloader(dataloader)

    @override
    def _counts(self, batch: Any, mask: str) -> Sequence[int]:
        return batch.seed_counts if "seed_counts" in batch else super()._counts(batch, mask)

    # Steps ####################################################################

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        if self.method != "neighbor" and counted_mask("train_mask", self.lightning_module) in EDGE_MASKS:
            raise ValueError(
                f"method={self.method!r} makes batches of nodes, and {type(self.lightning_module).__name__} predicts edges. "
                'Use method="neighbor".'
            )
        super().setup(trainer)
        depths = [part.num_layers for part in self.lightning_module.modules() if isinstance(part, BasicGNN)]
        self._depth_known = False
        if len(depths) == 1:
            self._compare_depth(depths[0])
        ours = [SamplingMetrics(lambda: self._batches, self.world), _EpochEnd(self._end_training)]
        self._callbacks.extend(ours)
        trainer.callbacks[1:1] = ours  # type: ignore[attr-defined]

    def _compare_depth(self, propagations: int) -> None:
        """Warns once of fan-outs that are too few or too many for the model."""
        # The depth of ego graphs is a choice of its own, and subgraphs have none.
        if self._depth_known or not propagations or self.method != "neighbor":
            return
        self._depth_known = True
        if propagations != len(self.fanouts):
            too_few = propagations > len(self.fanouts)
            outcome = "neighbours of the farthest nodes are missing" if too_few else "the last are sampled in vain"
            rank_zero_warn(
                f"fanouts={self.fanouts} sample {len(self.fanouts)} hops, but the model propagates along edges {propagations} "
                f"times: {outcome}. Give one fan-out per layer."
            )

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._binding is not None
        self._binding.release()
        if "num_seeds" in batch:
            own = torch.tensor([batch.num_seeds], device=self.root_device)
            batch.seed_counts = tuple(self.world.all_gather(own, "Counting training nodes").view(-1).tolist())
        if self._owners is not None:
            self._owners.idle = batch.seed_counts[self.global_rank] == 0
        with graph_in_use(None):
            return super().training_step(batch, *args, **kwargs)

    def _end_training(self) -> None:
        """Lets layers see the whole graph, by the edge-cut exchange, until the next step of training.

        Running statistics, which each rank has taken of its own batches, are averaged.
        """
        assert self._binding is not None and self.lightning_module is not None
        if self._binding.is_bound:
            return
        for buffer in self.lightning_module.buffers():
            if buffer.is_floating_point():
                self.world.all_reduce_(buffer, "Averaging running statistics").div_(self.world_size)
        self._binding.bind()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._end_training()
        output = super().validation_step(*args, **kwargs)
        assert self._binding is not None
        self._compare_depth(self._binding.context.propagations)
        return output

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._end_training()
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._end_training()
        return super().predict_step(*args, **kwargs)

    @override
    def _checked_stage(self, module: pl.LightningModule, trainer: pl.Trainer) -> str | None:
        """Training on samples is not that of one device; what must be is the evaluation within it."""
        stage = super()._checked_stage(module, trainer)
        if stage != "fit":
            return stage
        return "validate" if is_overridden("validation_step", module) else None

    def _close_store(self) -> None:
        if self._batches is not None:
            self._batches.close()
        for store in self._stores:
            store.close()
        self._stores, self._batches = [], None

    @override
    def teardown(self) -> None:
        self._close_store()
        super().teardown()


def _one_of(name: str, own: T | None, of_data: T | None, default: T) -> T:
    """Returns what is given to the strategy or to the datamodule."""
    if own is None:
        return default if of_data is None else of_data
    if of_data is not None and own != of_data:
        raise ValueError(
            f"{name}={of_data} is given to GraphDataModule, but {name}={own} to SamplingStrategy. Give one of them."
        )
    return own


class _EpochEnd(pl.Callback):
    """Calls a function after each training epoch, before checkpoints are written."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._function()
