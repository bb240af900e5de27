"""``sampling``: mini-batches of sampled neighbourhoods on a partitioned graph.

Source: DistDGL, "Distributed Graph Neural Network Training for Billion-Scale Graphs" (2020): sections III-B (partition, split of
seeds), III-C (feature store), III-D (samplers), III-E (trainer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.typing import EdgeType, NodeType
from typing_extensions import override

from lightning_gnn.callbacks.sampling import SamplingMetrics
from lightning_gnn.comm.graph_store import GraphStore
from lightning_gnn.datamodules.graph import GraphDataModule
from lightning_gnn.datamodules.shards import Cut
from lightning_gnn.datamodules.sources import EDGE_MASKS, counted_mask, is_labelled
from lightning_gnn.nn.bind import check_columns
from lightning_gnn.nn.helpers import graph_in_use
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.types import ONE_TYPE, Types
from lightning_gnn.sampling.loader import BatchMaker, EdgeBatchMaker, SampledBatches
from lightning_gnn.sampling.sampler import fanouts_by_type
from lightning_gnn.sampling.seeds import SeedBatches, split_seeds
from lightning_gnn.strategies.base import GNNStrategy
from lightning_gnn.strategies.dgcl import DGCLScheme


class SamplingScheme(DGCLScheme):
    """The edge cut of ``dgcl``, whose parts also have their share of the training, validation and test nodes.

    Args:
        keep_constant: see :class:`SamplingStrategy`.
    """

    def __init__(self, keep_constant: bool = True) -> None:
        super().__init__(keep_constant, plan="p2p", topology=None)

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        return replace(super().layout(world_size, num_hosts), method="metis_masks", takes_types=True)


class SamplingStrategy(GNNStrategy):
    """Training in mini-batches of sampled neighbourhoods; ``Trainer(strategy="sampling")``.

    Each rank trains on seeds of its own, whose sampled neighbourhoods come to it as a PyG ``Data`` like those of PyG's
    NeighborLoader: seeds first, ``batch_size``, ``n_id``, ``e_id``, ``num_sampled_nodes``; masks are true for seeds. A module
    that predicts edges, such as :class:`~lightning_gnn.LinkPredictor`, gets batches of edges like those of PyG's
    LinkNeighborLoader: ``edge_label_index``, ``edge_label``. Gradients are summed over ranks, weighted by seeds. Validation, test
    and prediction use whole neighbourhoods, exactly as under ``dgcl``.

    Of a ``HeteroData``, batches are ``HeteroData``. Validation, test and prediction then take their nodes in batches as well, of
    all neighbours over as many hops as there are fan-outs: exact for models with as many layers, but for those that look at the
    degrees of sources, as GCN does: of nodes of the last hop, the batch has no in-edges.

    Args:
        fanouts: in-edges that are drawn of each node, per hop, the seeds' first; -1 for all. One per layer of the model. Of a
            ``HeteroData`` for each edge type, or by edge type, ``("author", "writes", "paper")`` or
            ``"author__writes__paper"``; 0 then leaves a type out of a hop.
        batch_size: seeds, nodes or edges, of a batch on each rank, at most.
        replace: draw with replacement.
        directed: keep the edges that were drawn; False for all between the nodes that were reached.
        prefetch: batches that are made ahead in the background; 0 for none.
        cache_mb: memory for features of nodes on other machines that are read often, in MB.
        seed: of sampling and of the order of seeds.
        keep_constant: in evaluation, see :class:`~lightning_gnn.strategies.dgcl.DGCLStrategy`.
        **options: see :class:`~lightning_gnn.strategies.base.GNNStrategy`.

    Raises:
        ValueError: no fan-outs or such as are none, a batch size below 1, a negative number of batches or of megabytes; once the
            graph is known, fan-outs for other edge types than it has.
    """

    strategy_name = "sampling"

    def __init__(
        self,
        fanouts: Sequence[int] | Mapping[Any, Sequence[int]] = (15, 10),
        batch_size: int = 1024,
        replace: bool = False,
        directed: bool = True,
        prefetch: int = 2,
        cache_mb: float = 64.0,
        seed: int = 0,
        keep_constant: bool = True,
        **options: Any,
    ) -> None:
        if not fanouts:
            raise ValueError("fanouts are numbers of edges, one per layer of the model, such as [15, 10] (got none).")
        by_type: dict[EdgeType, Any] = {ONE_TYPE: fanouts}
        if isinstance(fanouts, Mapping):
            by_type = {
                tuple(kind.split("__")) if isinstance(kind, str) else tuple(kind): fanouts[kind] for kind in fanouts
            }
        checked = fanouts_by_type(by_type, list(by_type), hetero=isinstance(fanouts, Mapping))
        if batch_size < 1:
            raise ValueError(f"batch_size is a number of seeds, at least 1 (got {batch_size}).")
        for name, value in (("prefetch", prefetch), ("cache_mb", cache_mb)):
            if value < 0:
                raise ValueError(f"{name} is at least 0 (got {value}).")
        super().__init__(SamplingScheme(keep_constant), **options)
        self.fanouts = checked if isinstance(fanouts, Mapping) else checked[ONE_TYPE]
        self.batch_size, self.replace, self.directed = batch_size, replace, directed
        self.prefetch, self.cache_mb, self.seed = prefetch, cache_mb, seed
        self._loaders: dict[str | None, SampledBatches] = {}
        self._predicted: tuple[Tensor, list[int]] | None = None
        self._depth_known = self._trained = False

    # Batches ##################################################################

    def batches(self, data: GraphDataModule, mask: str | None) -> SampledBatches | None:
        """Returns this rank's loader; asked for by the datamodule, on all ranks.

        Args:
            data: the graph.
            mask: the seeds; None for all nodes.

        Returns:
            Samples for training. For the rest, all neighbours where the graph has types; else None: layers exchange.
        """
        cut, module = data.stored_cut(), self.lightning_module
        types, training = cut.types, mask == "train_mask"
        assert module is not None
        if not training and not types.is_hetero:
            return None
        name = None if mask is None else counted_mask(mask, module)
        edges = name in EDGE_MASKS
        kind: Any = ONE_TYPE if edges else types.input_type
        # What is learnt of edges must not be read off those that are held out.
        how: list[Any] = [self._store_for(cut, mask, name if edges else None)]
        if training:
            how += [self._fanouts_of(types), self.replace, self.directed]
        else:
            how += [dict.fromkeys(types.edges, [-1] * self.num_hops)]
        maker = EdgeBatchMaker(cut.ends, getattr(module, "sampled_negatives", 0), *how) if edges else BatchMaker(*how)
        seeds = _seeds(cut, kind, name)
        split = [torch.from_numpy(ids) for ids in split_seeds(seeds.numpy(), types.offsets(kind), self.num_processes)]
        trainer = module.trainer
        self._loaders[mask] = SampledBatches(
            maker,
            SeedBatches([len(each) for each in split], self.batch_size),
            split[self.global_rank],
            seeds[:1],
            self.global_rank,
            self.seed if training else None,
            self.prefetch,
            lambda: trainer.current_epoch,
        )
        if mask is None:
            self._predicted = cut.ids_of(kind)[torch.cat(split)], [len(each) for each in split]
        return self._loaders[mask]

    def _store_for(self, cut: Cut, mask: str | None, messages: str | None) -> GraphStore:
        """Returns the graph for the loader of a stage; loaders run ahead in threads of their own."""
        self._close(mask)
        for loader in self._loaders.values():
            return loader.maker.store.beside()
        return GraphStore(cut, self.world, self.world.ranks_here(), int(self.cache_mb * 1e6), messages)

    def _fanouts_of(self, types: Types) -> dict[EdgeType, list[int]]:
        """Returns the fan-outs of each edge type of the graph."""
        if isinstance(self.fanouts, dict) and not types.is_hetero:
            raise ValueError("fanouts by edge type are for a HeteroData; the graph has no types: give one list.")
        return fanouts_by_type(self.fanouts, list(types.edges), types.is_hetero)

    @property
    def num_hops(self) -> int:
        """How far neighbourhoods reach."""
        return len(next(iter(self.fanouts.values())) if isinstance(self.fanouts, dict) else self.fanouts)

    @override
    def _check_data(self, data: Any) -> GraphDataModule:
        found = super()._check_data(data)
        if isinstance(found.source, HeteroData):  # known before it is partitioned
            fanouts_by_type(self.fanouts, found.source.edge_types, hetero=True)
        return found

    @override
    def _check_model(self, module: torch.nn.Module, types: Types) -> None:
        self._fanouts_of(types)
        # Layers see whole samples: none needs to be exact on a part.
        check_columns(module) if types.is_hetero else super()._check_model(module, types)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return dataloader if isinstance(dataloader, SampledBatches) else super().process_dataloader(dataloader)

    @override
    def _counts(self, batch: Any, mask: str) -> Sequence[int]:
        return batch.seed_counts if "seed_counts" in batch else super()._counts(batch, mask)

    @override
    def _stand_ins(self, batch: Any, mask: str) -> int:
        return 1 if "seed_counts" in batch else super()._stand_ins(batch, mask)

    # Steps ####################################################################

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        assert self.lightning_module is not None
        depths = [part.num_layers for part in self.lightning_module.modules() if isinstance(part, BasicGNN)]
        self._depth_known = self._trained = False
        if len(depths) == 1:
            self._compare_depth(depths[0])
        ours = [SamplingMetrics(lambda: self._loaders.get("train_mask"), self.world), _EpochEnd(self._end_training)]
        self._callbacks.extend(ours)
        trainer.callbacks[1:1] = ours  # type: ignore[attr-defined]

    def _compare_depth(self, propagations: int) -> None:
        """Warns once of fan-outs that are too few or too many for the model."""
        if self._depth_known or not propagations:
            return
        self._depth_known = True
        if propagations != self.num_hops:
            too_few = propagations > self.num_hops
            outcome = "neighbours of the farthest nodes are missing" if too_few else "the last are sampled in vain"
            rank_zero_warn(
                f"fanouts={self.fanouts} sample {self.num_hops} hops, but the model propagates along edges {propagations} "
                f"times: {outcome}. Give one fan-out per layer."
            )

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._trained = True
        if self._binding is not None:
            self._binding.release()
        if self._owners is not None:
            self._owners.idle = batch.seed_counts[self.global_rank] == 0
        with graph_in_use(None):
            return super().training_step(batch, *args, **kwargs)

    def _end_training(self) -> None:
        """Lets layers see the whole graph, by the edge-cut exchange, until the next step of training; with types, batches do.

        Running statistics, which each rank has taken of its own batches, are averaged.
        """
        assert self.lightning_module is not None
        if not self._trained:
            return
        self._trained = False
        for buffer in self.lightning_module.buffers():
            if buffer.is_floating_point():
                self.world.all_reduce_(buffer, "Averaging running statistics").div_(self.world_size)
        if self._binding is not None:
            self._binding.bind()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._end_training()
        output = super().validation_step(*args, **kwargs)
        if self._binding is not None:
            self._compare_depth(self._binding.context.propagations)
        return output

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._end_training()
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._end_training()
        if not isinstance(batch, SampledBatches):
            return super().predict_step(batch, *args, **kwargs)
        return self._gather_predictions(self._predict_batches(batch, *args, **kwargs))

    def _predict_batches(self, batches: SampledBatches, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module predicts for this rank's nodes, batch after batch."""
        assert self._shard is not None
        pieces: list[list[Tensor]] = []
        spec: Any = None
        for batch in batches:
            batch = self.batch_to_device(self.precision_plugin.convert_input(batch), self.root_device)
            output = super(GNNStrategy, self).predict_step(batch, *args, **kwargs)
            leaves, spec = torch.utils._pytree.tree_flatten(output)
            nodes = batch[batch_type := self._shard.types.input_type]
            for leaf in leaves:
                if (
                    not isinstance(leaf, Tensor)
                    or not leaf.dim()
                    or len(leaf) not in (len(nodes.n_id), nodes.batch_size)
                ):
                    found = list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                    raise ValueError(
                        f"predict_step returned {found} for a batch of {len(nodes.n_id)} nodes of type {batch_type!r}. Return "
                        "tensors with a row for each of them, such as out['"
                        + batch_type
                        + "'], or for the first batch_size."
                    )
            pieces.append([leaf[: batch.seed_counts[self.global_rank]] for leaf in leaves])
        return torch.utils._pytree.tree_unflatten([torch.cat(each) for each in zip(*pieces)], spec)

    def _gather_predictions(self, output: Any) -> Any:
        """Returns rows of all ranks in original order, as far as they were asked for; see ``predictions``."""
        if self.predictions == "shards":
            return output
        assert self._predicted is not None
        ids, counts = self._predicted[0].to(self.root_device), self._predicted[1]

        def gather(leaf: Tensor) -> Tensor:
            rows = self.world.all_gather_rows(leaf.contiguous(), counts)
            return torch.empty_like(rows).index_copy_(0, ids, rows)

        gathered = torch.utils._pytree.tree_map(gather, output)
        return gathered if self.predictions == "all" or self.is_global_zero else None

    @override
    def _checked_stage(self, module: pl.LightningModule, trainer: pl.Trainer) -> str | None:
        """Training on samples is not that of one device; what must be is the evaluation within it."""
        stage = super()._checked_stage(module, trainer)
        if stage != "fit":
            return stage
        return "validate" if is_overridden("validation_step", module) else None

    def _close(self, mask: str | None) -> None:
        """Ends the loader of a stage, if there is one; all ranks call it."""
        loader = self._loaders.pop(mask, None)
        if loader is not None:
            loader.close()
            loader.maker.store.close()

    @override
    def teardown(self) -> None:
        for mask in list(self._loaders):
            self._close(mask)
        super().teardown()


def _seeds(cut: Cut, kind: NodeType | EdgeType, mask: str | None) -> Tensor:
    """Returns the ids of the nodes of a type, or the edges, that are in a mask and not without a label; None takes all."""
    if mask is None:
        return torch.arange(cut.types.total(kind))
    attributes = cut.attributes[cut.types.key(kind)]
    chosen, y = attributes[mask], attributes.get("y") if isinstance(kind, str) else None
    return (chosen if y is None else chosen & is_labelled(y)).nonzero().view(-1)


class _EpochEnd(pl.Callback):
    """Calls a function after each training epoch, before checkpoints are written."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._function()
