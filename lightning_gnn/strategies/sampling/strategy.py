"""``sampling``: mini-batches of sampled neighborhoods on a partitioned graph.

Source: DistDGL, "Distributed Graph Neural Network Training for Billion-Scale Graphs" (2020): sections III-B (partition, split of
seeds), III-C (feature store), III-D (samplers), III-E (trainer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.typing import EdgeType, NodeType
from typing_extensions import override

from lightning_gnn.arguments import (
    Fanouts,
    check_choice,
    check_flags,
    check_seed,
    check_whole,
    check_words,
    checked_batches,
    checked_bytes,
    is_one_of,
    quote,
)
from lightning_gnn.callbacks.of_strategies import StrategyCallback
from lightning_gnn.data.draws import OtherNodes
from lightning_gnn.data.shards import Cut, Shard
from lightning_gnn.data.sources import EDGE_MASKS, counted_mask
from lightning_gnn.datamodules.graph import GraphDataModule, OneBatch
from lightning_gnn.nn.bind import check_columns
from lightning_gnn.nn.helpers import graph_in_use
from lightning_gnn.partition.layout import ONE_TYPE, LayoutSpec, Types, by_machine
from lightning_gnn.private_torch import keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten
from lightning_gnn.steps.loop import hooks_move_batches
from lightning_gnn.steps.predictions import file_name, write_rows
from lightning_gnn.strategies.sampling.binding import BatchBinding
from lightning_gnn.strategies.sampling.graph_store import Choice, GraphStore
from lightning_gnn.strategies.sampling.loader import (
    BatchMaker,
    EdgeBatchMaker,
    Links,
    SampledBatches,
    SeedBatches,
    SplitSeeds,
    part_of,
    seeds_in,
)
from lightning_gnn.strategies.sampling.metrics import SamplingMetrics
from lightning_gnn.strategies.sampling.neighbors import Score, check_choices
from lightning_gnn.strategies.sampling.sampler import fanouts_by_type
from lightning_gnn.strategies.sampling.variants import METHODS, EgoBatchMaker, Method, SubgraphBatchMaker, node_draw
from lightning_gnn.strategy.base import GNNStrategy, refuse_options
from lightning_gnn.strategy.scheme import EdgeCutScheme

T = TypeVar("T")

_NEIGHBORHOODS, _OF_NEIGHBORS = METHODS[:2], METHODS[:3]


class SamplingScheme(EdgeCutScheme):
    """Scheme with the edge cut of ``dgcl``, partitioned between machines first.

    Each mask and each node type is balanced between partitions.
    """

    def __init__(self, in_batches: bool | None = None) -> None:
        self._in_batches = in_batches

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        groups, layout = by_machine(world_size, num_hosts), super().layout(world_size, num_hosts)
        return replace(layout, groups=groups, method="metis_masks", takes_types=True, samples=True, in_batches=self._in_batches)


class SamplingStrategy(GNNStrategy):
    """Training in mini-batches of sampled neighborhoods; ``Trainer(strategy="sampling")``.

    Each rank trains on its own seed nodes. Batches have the format of PyG's NeighborLoader: a ``Data`` with seed nodes first,
    ``batch_size``, ``n_id``, ``e_id`` and ``num_sampled_nodes``; masks are True for seed nodes. A module that predicts edges,
    such as :class:`~lightning_gnn.LinkPredictor`, gets batches in the format of PyG's LinkNeighborLoader: ``edge_label_index``,
    ``edge_label``. Gradients are summed over ranks, weighted by the numbers of seeds. Validation, test and prediction use
    complete neighborhoods, exactly as under ``dgcl``.

    For a ``HeteroData``, batches are ``HeteroData``. Validation, test and prediction then also run in batches, with all neighbors
    over the number of hops in `num_neighbors`. This is exact for models with the same number of layers. Exceptions are layers
    that use the degrees of sources, such as GCN: nodes of the last hop have no in-edges in the batch. With
    ``evaluation="layerwise"``, these phases run as under ``dgcl``: a step gets the rank's shard, and each layer computes each row
    once.

    Args:
        num_neighbors: in-edges drawn per node in each hop, starting at the seeds; -1 for all. One number per layer of the model.
            For a ``HeteroData``: one list for all edge types, or a mapping by edge type, ``("author", "writes", "paper")`` or
            ``"author__writes__paper"``; 0 then omits a type in a hop. By default the datamodule's, else (15, 10).
        batch_size: maximum number of seeds, nodes or edges, per batch and rank. For GraphSAINT: number of draws of nodes, edges
            or walks. For clusters: approximate number of nodes. By default the datamodule's, else 1024.
        replace: whether to draw with replacement.
        directed: whether to keep only the edges drawn. If False, a batch has all edges between its nodes.
        sampler: method that makes batches. All except the first two are for modules that predict nodes.

            - ``"neighbor"``: neighborhoods of the seeds.
            - ``"labor"``: the same with one random number per source, shared by all nodes of a batch. Batches then have fewer
              nodes (LABOR-0 with the same number of edges, NeurIPS 2023, appendix A.3).
            - ``"shadow"``: ego graphs of the seeds that share no nodes (ShaDow, NeurIPS 2021).
            - ``"saint_node"``, ``"saint_edge"``, ``"saint_walk"``: subgraphs of nodes drawn from the whole graph (GraphSAINT,
              ICLR 2020).
            - ``"cluster"``: clusters of the rank's local nodes (Cluster-GCN, KDD 2019).
        walk_length: number of steps of a walk of ``"saint_walk"``.
        num_clusters: number of clusters in a batch of ``"cluster"``.
        num_workers: number of threads that make batches (DistDGL, section III-D); batches do not depend on it.
        prefetch_batches: number of batches made in advance in the background; 0 for none. At least `num_workers`, if that is
            above 1.
        remote_cache: memory per rank for features of nodes on other machines, in bytes or as ``"64MB"``. In the first epoch, it
            has the nodes that most edges read; afterwards, the nodes that the first epoch's batches requested most often.
        local_cache: memory per machine for features of its own nodes, in bytes or as ``"2GB"``, shared by its ranks. Nodes are
            chosen as for `remote_cache`; an index takes 4 bytes per node of it. Other features are read from the store, whose
            pages may or may not be in memory. By default, or with 0, all are read from the store.
        loss_reduction: ``"mean"`` if the loss of a training step is a mean over the seeds of the rank's batch, ``"sum"`` if it is
            a sum. A step with a mean over other elements returns ``{"loss": loss, "loss_weight": count}``.
        seed: random seed of sampling and of the order of seeds.
        weight_attr: name of edge weights. In-edges are drawn with probabilities proportional to them; edges of weight 0 are never
            drawn. Edge types without weights are drawn uniformly. Evaluation uses all edges; in batches, all edges with weights
            above 0.
        time_attr: name of times, int64, of nodes (an edge has the time of its source) or of edges, as in PyG. Each seed has a
            separate tree of edges that are no later than the seed. The seed needs a time of this name; seed edges may have
            ``edge_label_time`` instead. Types without times are not restricted. Validation, test and prediction then also run in
            batches, with all neighbors that are no later.
        temporal_strategy: ``"uniform"``, or ``"last"`` for the latest edges, also in evaluation.
        edge_score_fn: function that replaces random draws. It gets :class:`~lightning_gnn.strategies.sampling.InEdges` and
            returns a score for each, ``[S]``. For each node, the in-edges with the highest scores are drawn, and edges with a
            score of -inf never. Edges excluded by weights of 0 or by times are removed first. It is not called if all edges are
            used: in evaluation, or for -1 in `num_neighbors`.
        evaluation: how validation, test and prediction run. By default ``"minibatch"`` for a ``HeteroData`` and with times, else
            ``"layerwise"``.

            - ``"layerwise"``: steps on the whole graph, layer by layer, which require a model that ``dgcl`` supports.
            - ``"minibatch"``: batches with all neighbors over the number of hops in `num_neighbors`. Exact if the model has no
              more layers. Ranks need no memory for their edges, but nodes in several batches are computed in each.
        **options: see :class:`~lightning_gnn.strategy.base.GNNStrategy`.

    Raises:
        ValueError: invalid `num_neighbors`, batch size, number of batches or number of bytes; an unknown sampler, or options that
            it does not support. Raised by ``setup``: a different `num_neighbors` or batch size of the datamodule, a sampler that
            does not support the module or the graph, `num_neighbors` for other edge types. Raised by the first stage: a
            ``local_cache`` that is too small for features or larger than the available memory.
    """

    strategy_name = "sampling"
    samples_unsupported_reason = "it trains on sampled neighborhoods of one graph. Use DGCLStrategy."
    trains_on_batches = True
    equal_buffers = False  # each rank has the running statistics of its own batches until training ends

    def __init__(
        self,
        num_neighbors: Sequence[int] | Mapping[Any, Sequence[int]] | None = None,
        batch_size: int | None = None,
        replace: bool = False,
        directed: bool = True,
        prefetch_batches: int = 2,
        remote_cache: int | str = "64MB",
        seed: int = 0,
        sampler: Method = "neighbor",
        walk_length: int = 2,
        num_clusters: int = 10,
        num_workers: int = 1,
        weight_attr: str | None = None,
        time_attr: str | None = None,
        temporal_strategy: Literal["uniform", "last"] = "uniform",
        edge_score_fn: Score | None = None,
        evaluation: Literal["layerwise", "minibatch"] | None = None,
        local_cache: int | str | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        **options: Any,
    ) -> None:
        self._arguments = checked_batches(num_neighbors, batch_size), batch_size
        if sampler is None or not is_one_of(sampler, METHODS):
            raise ValueError(f"sampler must be one of {', '.join(METHODS)}, got {quote(sampler)}.")
        check_flags(replace=replace, directed=directed)
        check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
        check_whole(1, walk_length=walk_length, num_clusters=num_clusters, num_workers=num_workers)
        check_whole(0, prefetch_batches=prefetch_batches)
        check_seed(seed)
        if num_workers > 1 and prefetch_batches < num_workers:
            raise ValueError(f"prefetch_batches must be at least num_workers={num_workers}, got {prefetch_batches}.")
        if sampler not in _OF_NEIGHBORS and (replace or not directed):
            raise ValueError(f"sampler={sampler!r} supports neither replace=True nor directed=False. Remove these arguments.")
        names, labor = {"weight_attr": weight_attr, "time_attr": time_attr}.items(), sampler == "labor"
        check_words(**{key: name for key, name in names if name is not None})
        check_choices(replace, weight_attr is not None, time_attr is not None, temporal_strategy, labor)
        if edge_score_fn is not None and (not callable(edge_score_fn) or replace or labor or temporal_strategy == "last"):
            raise ValueError(
                "edge_score_fn must be a function of in-edges that selects edges without replacement, got "
                f"{quote(edge_score_fn)} with replace={replace}, temporal_strategy={temporal_strategy!r}. Remove the others."
            )
        if sampler not in (_NEIGHBORHOODS if time_attr else _OF_NEIGHBORS) and (weight_attr or time_attr or edge_score_fn):
            raise ValueError(
                f"weight_attr, time_attr and edge_score_fn are not supported with sampler={sampler!r}. Use sampler='neighbor'."
            )
        if evaluation not in ("layerwise", "minibatch", None):
            raise ValueError(f"evaluation must be 'layerwise' or 'minibatch', got {quote(evaluation)}.")
        if evaluation == "layerwise" and time_attr:
            raise ValueError("evaluation='layerwise' is not supported with time_attr. Remove one of them.")
        because = "Batches have sampled neighborhoods only: set a smaller batch_size, or smaller num_neighbors."
        refuse_options(options, ["checkpoint_convs", "memory_limit"], because)
        refuse_options(options, ["codec"], "Sampled features are sent exactly. Remove it.")
        scheme = SamplingScheme(in_batches=None if evaluation is None else evaluation == "minibatch")
        super().__init__(scheme, **options)
        self.loss_reduction, self.evaluation = loss_reduction, evaluation
        self.choice = Choice(weight_attr, time_attr, temporal_strategy, edge_score_fn, labor)
        self.replace, self.directed, self.sampler = replace, directed, sampler
        self.walk_length, self.num_clusters, self.num_workers = walk_length, num_clusters, num_workers
        self.prefetch_batches, self.seed = prefetch_batches, seed
        self.remote_cache = checked_bytes("remote_cache", remote_cache, 0)
        self.local_cache = checked_bytes("local_cache", 0 if local_cache is None else local_cache, 0)
        self._choose(None, None)
        self._loaders: dict[str | None, SampledBatches] = {}
        self._predicted: tuple[Tensor, list[int]] | None = None
        self._depth_known = self._trained = False
        self._batch_binding: BatchBinding | None = None

    @property
    @override
    def approximation(self) -> str:
        return "sampled mini-batches"

    def _choose(self, num_neighbors: Fanouts | None, batch_size: int | None) -> None:
        """Set num_neighbors and batch_size from the datamodule if they are not arguments of the strategy."""
        if self.sampler not in _OF_NEIGHBORS and (self._arguments[0] or num_neighbors):
            raise ValueError(f"num_neighbors is not supported with sampler={self.sampler!r}, which draws none. Remove it.")
        usual: Fanouts = [15, 10]
        self.num_neighbors = _one_of("num_neighbors", self._arguments[0], num_neighbors, usual)
        self.batch_size = _one_of("batch_size", self._arguments[1], batch_size, 1024)

    @override
    def check_data(self, data: Any) -> GraphDataModule:
        data = super().check_data(data)
        self._choose(data.num_neighbors, data.batch_size)
        if isinstance(data.source, HeteroData):  # known before partitioning
            fanouts_by_type(self.num_neighbors, data.source.edge_types)
        return data

    def _batches(self, data: GraphDataModule, mask: str | None) -> SampledBatches | None:
        """Returns this rank's loader for the nodes of a mask, None for all nodes; runs on every rank.

        The loader samples for training. In evaluation, it has all neighbors if layers do not exchange; otherwise the result is
        None.
        """
        cut, module, rank = data.stored_cut(by_rows=True), self._module, self.global_rank
        types, training = cut.types, mask == "train_mask"
        if not training and not self._evaluates_in_batches(types):
            return None
        name = None if mask is None else counted_mask(mask, module)
        edges = name in EDGE_MASKS
        kind: Any = (cut.edge_type or ONE_TYPE) if edges else types.input_type
        self._check_choice(cut, kind)
        split = SplitSeeds.of(cut, kind, name, self.num_processes)
        if self.sampler in _OF_NEIGHBORS:
            own, size = split.seeds(rank), self.batch_size
            if mask is None:
                everyone = torch.cat([split.seeds(each) for each in range(self.world_size)])
                self._predicted = cut.ids_of(kind)[everyone], split.sizes
            make: Callable[..., BatchMaker] = EgoBatchMaker if self.sampler == "shadow" else BatchMaker
            if edges:
                make, size = self._edge_batches(cut, kind, training)
            batches = SeedBatches(split.sizes, size)
            how: tuple[Any, ...] = (self._fanouts_of(types), self.replace, self.directed)
            if not training and self.choice.temporal_strategy != "last":
                how = (dict.fromkeys(types.edges, [-1] * self.num_hops),)
        else:
            draw, count, per_step = node_draw(
                cut, rank, self.sampler, self.batch_size, self.walk_length, self.num_clusters, self.seed
            )
            own, batches = torch.arange(count), SeedBatches([count] * self.world_size, per_step)
            training_nodes = torch.zeros(types.total(kind), dtype=torch.bool)
            training_nodes[seeds_in(cut, kind, name)] = True
            make, how = partial(SubgraphBatchMaker, draw, training_nodes, split.first), ()
        # Edges that are held out must not carry messages.
        messages = counted_mask("train_mask", module)
        makers = [make(store, *how) for store in self._stores(cut, mask, messages if messages in EDGE_MASKS else None)]
        has_peer_seeds = make is BatchMaker and self.choice.time_attr is None
        peer_seeds = {peer: split.seeds(peer) for peer in makers[0].store.askers} if has_peer_seeds else None
        seed, trainer = self.seed if training else None, module.trainer
        # trainer.current_epoch is briefly one too low if a run resumes from a checkpoint of an epoch's end.
        progress: Any = trainer.fit_loop.epoch_progress.current
        device = torch.device("cpu") if hooks_move_batches(module, data) else self.root_device
        options = seed, self.prefetch_batches, lambda: progress.processed
        self._loaders[mask] = SampledBatches(makers, batches, own, split.first, rank, *options, device, peer_seeds)
        return self._loaders[mask]

    def _stores(self, cut: Cut, mask: str | None, messages: str | None) -> list[GraphStore]:
        """Returns a graph store for each sampler of a stage's loader; the threads of several loaders may run at the same time."""
        self._close(mask)
        known = [maker.store for loader in self._loaders.values() for maker in loader.makers]
        if known:
            return [known[0].clone() for _ in range(self.num_workers)]
        near, cache_bytes = self.world.ranks_here(), self.remote_cache
        store = GraphStore(cut, self.world, near, cache_bytes, messages, self.choice, self.local_cache)
        return [store, *(store.clone() for _ in range(1, self.num_workers))]

    def _edge_batches(self, cut: Cut, kind: EdgeType, training: bool) -> tuple[Callable[..., BatchMaker], int]:
        """Returns a function that creates makers of batches of edges of a type, and the number of edges per batch."""
        count, moment = getattr(self._module, "sampled_negatives", 0), self.choice.time_attr
        links, size = Links(partial(cut.ends, kind=kind), count, kind), self.batch_size
        if moment is not None or not training:
            times = cut.attributes[cut.types.key(kind[2])].get(moment) if moment else None
            links = replace(links, others=OtherNodes(cut.ids_of(kind[2]), times))
        if not training:
            compared = getattr(self._module, "eval_negatives", count)
            size = max(1, size * (2 + count) // (2 + compared))  # for about the same number of nodes
            links = replace(links, num_negatives=compared, held_out=(self.seed, -1))
        return partial(EdgeBatchMaker, links), size

    def _check_choice(self, cut: Cut, seeded: NodeType | EdgeType) -> None:
        """Raises ValueError unless the graph has the weights and times that the strategy uses, for seeds of a type."""
        types, choice = cut.types, self.choice
        of_nodes, of_edges = ({kind: cut.attributes[types.key(kind)] for kind in kinds} for kinds in (types.nodes, types.edges))

        def check(name: str, values: Tensor, label: str, wanted: bool) -> None:
            if values.dim() != 1 or not wanted:
                raise ValueError(f"{name!r} of {label} must be one number each (got {values.dtype} {list(values.shape)}).")

        if choice.weight_attr:
            found = {kind: of[choice.weight_attr] for kind, of in of_edges.items() if choice.weight_attr in of}
            if not found:
                raise ValueError(f"weight_attr={choice.weight_attr!r} must name an attribute of edges, but no edge type has it.")
            for kind, values in found.items():
                check(choice.weight_attr, values, f"edges {kind}", values.is_floating_point())
        if choice.time_attr == "edge_label_time":
            raise ValueError(
                "time_attr='edge_label_time' is not supported: it has the times of seeds. Store times of edges or nodes under "
                "another name."
            )
        if choice.time_attr:
            every: dict[Any, Any] = {**of_nodes, **of_edges}
            names = ["edge_label_time", choice.time_attr] if seeded in of_edges else [choice.time_attr]
            for kind, of in every.items():
                for name in {choice.time_attr, *(names if kind == seeded else ())} & of.keys():
                    check(name, of[name], f"{kind}", of[name].dtype == torch.long)
            if choice.time_attr not in {name for of in every.values() for name in of}:
                raise ValueError(f"time_attr={choice.time_attr!r} must name an attribute of nodes or edges, and none has it.")
            if not every[seeded].keys() & {*names}:
                of_what = f"nodes of type {seeded!r}" if seeded in of_nodes else "edges"
                raise ValueError(
                    f"time_attr={choice.time_attr!r} needs a time for each seed, but {of_what} have no attribute "
                    f"{' or '.join(names)}. Add it, as int64."
                )

    def _fanouts_of(self, types: Types) -> dict[EdgeType, list[int]]:
        """Returns num_neighbors of each edge type of the graph."""
        if isinstance(self.num_neighbors, dict) and not types.is_hetero:
            raise ValueError("num_neighbors must be a list for a graph without types, got one per edge type. Use one list.")
        return fanouts_by_type(self.num_neighbors, list(types.edges))

    @property
    def num_hops(self) -> int:
        """Number of hops of the sampled neighborhoods."""
        return len(next(iter(self.num_neighbors.values())) if isinstance(self.num_neighbors, dict) else self.num_neighbors)

    @override
    def binds(self, shard: Shard) -> bool:
        return not self._evaluates_in_batches(shard.types)

    @override
    def begin_stage(self, trainer: pl.Trainer, shard: Shard) -> None:
        self._input_type = shard.types.input_type
        super().begin_stage(trainer, shard)
        in_parts = self.binds(shard) and not shard.types.is_hetero
        self._batch_binding = BatchBinding(self._module, self.world, self.meter) if in_parts else None
        if shard.types.is_hetero and not self.binds(shard):
            self.log_exchange(trainer, shard)

    def _evaluates_in_batches(self, types: Types) -> bool:
        """Returns whether evaluation runs in batches; if not, layers exchange halo features in evaluation."""
        by_default = types.is_hetero or self.choice.time_attr is not None
        return self.evaluation == "minibatch" or (by_default and self.evaluation is None)

    @override
    def check_model(self, module: torch.nn.Module, of: Shard | Cut) -> None:
        types = of.types
        self._fanouts_of(types)
        if self.evaluation == "minibatch" and not self._evaluates_in_batches(types):
            raise ValueError(
                "evaluation='minibatch' needs a HeteroData, or time_attr. Remove it: layers then compute each row of the "
                "whole graph once."
            )
        if self.evaluation == "layerwise" and types.is_hetero and counted_mask("val_mask", module) in EDGE_MASKS:
            raise ValueError(
                f"evaluation='layerwise' does not support {type(module).__name__}, which predicts edges of a HeteroData in "
                "batches. Remove it."
            )
        if self.sampler not in _NEIGHBORHOODS and types.is_hetero:
            raise ValueError(f'sampler={self.sampler!r} does not support a HeteroData. Use sampler="neighbor".')
        if self.sampler not in _NEIGHBORHOODS and counted_mask("train_mask", module) in EDGE_MASKS:
            raise ValueError(
                f"sampler={self.sampler!r} does not support {type(module).__name__}: it samples batches of nodes, not of "
                'edges. Use sampler="neighbor".'
            )
        if not self._evaluates_in_batches(types):
            super().check_model(module, of)
            return
        check_columns(module)  # layers run on complete samples, so none needs to be exact on a shard

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        if not isinstance(dataloader, OneBatch):
            return dataloader
        batches = self._batches(dataloader.data, dataloader.mask)
        if batches is None:
            return dataloader
        return batches if dataloader.mask is not None else OneBatch(batches, dataloader.data, None)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        depths = [part.num_layers for part in self._module.modules() if isinstance(part, BasicGNN)]
        self._depth_known = self._trained = False
        if len(depths) == 1:
            self._compare_depth(depths[0])
        ours = [
            SamplingMetrics(lambda: self._loaders.get("train_mask"), self.world),
            StrategyCallback(on_train_epoch_end=lambda *_: self._end_training()),
        ]
        self.steps.add_callbacks(*ours, place=1)

    def _depth(self, propagations: Mapping[str, int]) -> int:
        """Returns the number of hops that a model propagates, from the number of propagations of each layer.

        Propagations of one layer, one per relation, are a single hop.
        """
        layers = dict(self._module.named_modules())
        relations = {name: getattr(layers.get(name), "num_relations", 1) for name in propagations}
        # Scoring edges reads the features of their sources, which are not propagated further.
        ends = ("gather_halo",) if getattr(self._module, "predicts_edges", False) else ()
        return sum(max(1, count // relations[name]) for name, count in propagations.items() if name not in ends)

    def _compare_depth(self, propagations: int) -> None:
        """Warn once if num_neighbors has fewer or more hops than the model."""
        # The depth of ego graphs is an independent choice, and subgraphs have none.
        if self._depth_known or not propagations or self.sampler not in _NEIGHBORHOODS:
            return
        self._depth_known = True
        if propagations != self.num_hops:
            too_few = propagations > self.num_hops
            outcome = "neighbors of the farthest nodes are missing" if too_few else "the last hops are not used"
            rank_zero_warn(
                f"num_neighbors={self.num_neighbors} sample {self.num_hops} hops, but the model propagates along edges "
                f"{propagations} "
                f"times: {outcome}. Set one fan-out per layer."
            )

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._trained = True
        self.steps.binding.release()
        if self._batch_binding is not None:
            self._batch_binding.begin(batch)
        if "num_seeds" in batch:
            own = torch.tensor([batch.num_seeds], device=self.root_device)
            batch.seed_counts = tuple(self.world.all_gather(own, "Counting training nodes").view(-1).tolist())
        for rows in self.steps.shared.learned_rows:
            rows.begin_step(idle=batch.seed_counts[self.global_rank] == 0)
        with graph_in_use(None):
            return super().training_step(batch, *args, **kwargs)

    def _end_training(self) -> None:
        """Switch layers to the whole graph, with the edge-cut exchange, until the next training step; with types, to batches.

        Running statistics, which each rank has computed from its own batches, are averaged.
        """
        if not self._trained:
            return
        self._trained = False
        if self._batch_binding is not None:
            self._batch_binding.release()
        for buffer in self._module.buffers():
            if buffer.is_floating_point():
                self.world.all_reduce_(buffer, "Averaging running statistics").div_(self.world_size)
        self.steps.binding.bind()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._end_training()
        output = super().validation_step(*args, **kwargs)
        self._compare_depth(self._depth(self.steps.binding.context.propagations))
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
        pieces: list[list[Tensor]] = []
        spec: Any = None
        for batch in batches:
            batch = self.batch_to_device(self.precision_plugin.convert_input(batch), self.root_device)
            leaves, spec = tree_flatten(super(GNNStrategy, self).predict_step(batch, *args, **kwargs))
            nodes = part_of(batch, self._input_type)
            for leaf in leaves:
                found: Any = list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
                if not isinstance(leaf, Tensor) or found[:1] not in ([len(nodes.n_id)], [nodes.batch_size]):
                    raise ValueError(
                        f"predict_step returned {found} for a batch of {len(nodes.n_id)} nodes of type {self._input_type!r}. "
                        f"Return a row for each of them, such as out['{self._input_type}'], or for the batch.batch_size seeds."
                    )
            pieces.append([leaf[: batch.seed_counts[self.global_rank]] for leaf in leaves])
        return tree_unflatten([torch.cat(each) for each in zip(*pieces)], spec)

    def _gather_predictions(self, output: Any) -> Any:
        """Returns the rows of all ranks in the graph's order, on the ranks given by ``predictions``."""
        if self.predictions == "shards":
            return output
        assert self._predicted is not None
        ids, counts = self._predicted[0].to(self.root_device), self._predicted[1]
        if self.predictions == "file":
            own = ids.split(counts)[self.global_rank].cpu()
            found, spec = tree_flatten_with_path(output)
            files = [self.steps.predictions_folder / f"{file_name(keystr(path))}.npy" for path, _ in found]
            return tree_unflatten([write_rows(self.world, file, x, own, len(ids)) for file, (_, x) in zip(files, found)], spec)

        def gather(leaf: Tensor) -> Tensor:
            rows = self.world.all_gather_rows(leaf.contiguous(), counts)
            return torch.empty_like(rows).index_copy_(0, ids, rows)

        gathered = tree_map(gather, output)
        return gathered if self.predictions == "all" or self.is_global_zero else None

    @override
    def checked_stages(self, trainer: pl.Trainer) -> Sequence[str]:
        # Training on samples differs from single-device training; only the evaluation within it must be equal. With times,
        # evaluation runs in batches too.
        stages = super().checked_stages(trainer) if self.choice.time_attr is None else ()
        return [stage for stage in stages if stage != "fit"]

    def _close(self, mask: str | None) -> None:
        """Close the loader of a stage, if there is one; all ranks call it."""
        loader = self._loaders.pop(mask, None)
        if loader is not None:
            loader.close()
            for maker in loader.makers:
                maker.store.close()

    @override
    def teardown(self) -> None:
        for mask in list(self._loaders):
            self._close(mask)
        if self._batch_binding is not None:
            self._batch_binding.release()
        super().teardown()


def _one_of(name: str, value: T | None, data: T | None, default: T) -> T:
    if value is None:
        return default if data is None else data
    if data is not None and value != data:
        raise ValueError(f"{name} is set twice: {data} in GraphDataModule, {value} in SamplingStrategy. Remove one of them.")
    return value
