"""``vertex_cut``: each edge is on one rank; a node on several ranks has one master and mirrors.

Source: CDFGNN, "Cache-based Distributed Full-batch GNN training": sections 3 (vertex cut), 4 (adaptive cache), 5 (quantized
messages) and 6 (hierarchical partition).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import NoneType
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from lightning_gnn.arguments import check_flags, check_numbers, check_whole, check_words, is_one_of, quote
from lightning_gnn.callbacks.of_strategies import StrategyCallback
from lightning_gnn.comm.exchange import Exchange, Products
from lightning_gnn.comm.group import World
from lightning_gnn.comm.matrix import MakeExchange, send_directly, spread_edges
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Cut, Shard
from lightning_gnn.extensions.plans.detect import hosts_of
from lightning_gnn.partition.layout import LayoutSpec, by_machine
from lightning_gnn.rows import local_rows
from lightning_gnn.strategies.vertex_cut.cache import LargestChangesCache, MessageCache
from lightning_gnn.strategies.vertex_cut.cutters import METHODS
from lightning_gnn.strategies.vertex_cut.thresholds import AdaptiveThreshold, CacheSchedule, TopKChanges
from lightning_gnn.strategy.base import GNNStrategy
from lightning_gnn.strategy.scheme import Scheme, twin_of

EdgeMethod = Literal["auto", "ebv", "hdrf", "dbh", "random", "grid", "ne", "dne", "streaming"]


@dataclass(eq=False)
class VertexCutScheme(Scheme):
    """Scheme of a vertex cut. See :class:`VertexCutStrategy`.

    S sends features from masters to the mirrors that need them. R adds partial aggregates at masters.
    """

    partition: EdgeMethod | None
    num_machines: int | None
    host_weight: float
    cache: AdaptiveThreshold | TopKChanges | float | None
    monitor: str | None
    cache_within_hosts: bool = False

    def __post_init__(self) -> None:
        self.approximation = "" if self.cache is None else "cached messages"
        self.messages: MessageCache | None = None  # cached messages of a run
        self._rule: AdaptiveThreshold | TopKChanges | None = None
        self._world: World | None = None

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        hosts = self.num_machines or num_hosts
        if world_size % hosts:
            legal = [count for count in range(1, world_size + 1) if world_size % count == 0]
            raise ValueError(
                f"num_machines must divide the number of ranks, {world_size}, got {hosts}. Use one of "
                f"{', '.join(map(str, legal))}."
            )
        groups = by_machine(world_size, hosts)
        weight = self.host_weight if groups else 0.0
        types = self.cache is None
        return LayoutSpec("vertex_cut", world_size, groups, self.partition, host_weight=weight, takes_types=types)

    @override
    def exchange(self, shard: Shard, world: World, meter: Meter) -> Exchange:
        assert shard.holders is not None
        make_exchange: MakeExchange = send_directly
        if self.cache is not None:
            if self.messages is None or self._world is not world:  # one cache for both directions of edges
                self._rule = None if isinstance(self.cache, float) else replace(self.cache)
                self.messages, self._world = self._make_cache(self._find_exact_ranks(world)), world
            make_exchange = self.messages.make_exchange
        make = spread_edges(shard, shard.holders.numpy().astype(np.int64), world, meter, make_exchange)
        exchange = make_exchange(shard.plan, shard.halos, shard.offsets, world, meter)
        return exchange.with_products(Products(make, lambda copy_bytes, result_bytes: make))

    def _find_exact_ranks(self, world: World) -> Sequence[int]:
        """Returns the ranks with which all rows are exchanged unchanged: by default, the ranks of this machine."""
        if self.cache_within_hosts or world.stand_ins:
            return ()
        hosts = hosts_of(world) if self.num_machines is None else np.arange(world.size).reshape(self.num_machines, -1).tolist()
        if len(hosts) == 1:
            rank_zero_info(
                "All ranks are on one machine: messages are neither cached nor encoded, to save time. Set "
                "cache_within_hosts=True to cache them anyway."
            )
        return next(ranks for ranks in hosts if world.rank in ranks)

    def _make_cache(self, exact_ranks: Sequence[int]) -> MessageCache:
        cache: Any = self.cache
        if isinstance(cache, TopKChanges):
            return LargestChangesCache(cache.share, exact_ranks)
        if isinstance(cache, float):
            return MessageCache(cache, exact_ranks)
        return MessageCache(cache.epsilon, exact_ranks, cache.factors)

    def release(self) -> None:
        """Delete the caches at the end of a run."""
        self.messages = self._world = None

    def schedule(self, world: World) -> list[pl.Callback]:
        """Returns the callback that updates the threshold during training; empty without a cache."""
        return [] if self.messages is None else [CacheSchedule(self.messages, self._rule, self.monitor, world)]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"threshold": asdict(self._rule)} if isinstance(self._rule, AdaptiveThreshold) else {}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the threshold. Cached rows are not restored, so the first epoch sends all rows."""
        if isinstance(self._rule, AdaptiveThreshold) and "threshold" in state:
            saved = state["threshold"]
            self._rule.epsilon, self._rule.mean, self._rule.first = saved["epsilon"], saved["mean"], saved.get("first")


@twin_of.register
def _(scheme: VertexCutScheme) -> VertexCutScheme:
    return VertexCutScheme("random", None, 0.0, None, scheme.monitor)


class VertexCutStrategy(GNNStrategy):
    """Full-graph training over a vertex cut, exact by default; ``Trainer(strategy="vertex_cut")``.

    Each edge is on one rank, so that edges are balanced regardless of node degrees: use it for graphs with hubs. A node has one
    master, its owner, and mirrors on the other ranks with edges of the node. Masters send features to the mirrors that need them,
    and mirrors send partial aggregates to masters. Nothing else is sent. The loaded edges, which are the in-edges of a rank's
    masters, are about as balanced as the computed edges (docs/vertex-cut-internals.md).

    Args:
        partition: partitioner of the edges. None: ``"auto"`` for a folder of files, else ``"ne"``.

            - ``"ne"``: fewest replicas; rows balanced within 15 %.
            - ``"ebv"``, from CDFGNN: best balance of rows, and fastest.
            - ``"streaming"`` (2PS-L): needs memory per node, not per edge.
            - ``"auto"``: the first of these three that fits into memory.
            - ``"dne"``, ``"hdrf"``, ``"dbh"``, ``"grid"``, ``"random"``: for comparison.
        num_machines: number of machines, with equal numbers of ranks, between which ``"ebv"`` and the choice of masters avoid
            traffic. By default the Trainer's ``num_nodes``.
        host_weight: gamma of equation 24, 0 to 1: weight of a replica on a new machine; a replica on a new rank has the weight 1
            - gamma. 0 ignores machines.
        cache: rows that are sent. None sends all rows: exact. The last epoch, validation, test and predict are exact for all
            values.

            - a number: rows with an entry that changed by more than this share of the row's size.
            - ``"adaptive"``: the same with a threshold that follows the training loss, or `monitor` (CDFGNN 4.1). An
              :class:`~lightning_gnn.strategies.vertex_cut.thresholds.AdaptiveThreshold` sets its parameters.
            - ``"topk"``, or a :class:`~lightning_gnn.strategies.vertex_cut.thresholds.TopKChanges`: a given share of each
              message, the rows that changed most.
        monitor: name of an accuracy that the module logs in training, such as ``"train_acc"``. ``"adaptive"`` follows it instead
            of the loss, as in CDFGNN; it must rise from 0 to 1. None: the loss that ``training_step`` returns or passes to
            ``manual_backward``, which need not be logged. See
            :class:`~lightning_gnn.strategies.vertex_cut.thresholds.AdaptiveThreshold`.
        cache_within_hosts: with a `cache`, whether to cache and encode messages between ranks of one machine too. By default
            these are sent unchanged and exactly: finding rows to omit takes longer than sending all rows through shared memory.
        dropout_seed_every_n_epochs: with a `cache`, number of epochs whose training steps draw the same random numbers. Dropout
            masks then stay constant, and rows change only as weights change. Otherwise dropout changes nearly all rows in each
            epoch, and a cache sends them. This is an additional approximation: training averages over fewer masks
            (docs/vertex-cut-internals.md). 1 draws new numbers in each epoch.
        **options: see :class:`~lightning_gnn.strategy.base.GNNStrategy`.

    Raises:
        ValueError: an unknown partitioner; a threshold, weight or number of epochs out of range. Raised once the number of ranks
            is known: a number of machines that does not divide it. Raised once the model is known: factors of an
            :class:`~lightning_gnn.strategies.vertex_cut.thresholds.AdaptiveThreshold` for layers that it does not have.
    """

    strategy_name = "vertex_cut"
    scheme: VertexCutScheme

    @classmethod
    @override
    def variants(cls, ranks: int, links_alike: bool = True) -> Iterator[Mapping[str, Any]]:
        yield {}
        # Upper bound for vertex_cut_cached: the number of unchanged rows is known only in training.
        yield {"codec": "int8"}

    def __init__(
        self,
        partition: EdgeMethod | None = None,
        num_machines: int | None = None,
        host_weight: float = 0.1,
        cache: Literal["adaptive", "topk"] | float | AdaptiveThreshold | TopKChanges | None = None,
        monitor: str | None = None,
        cache_within_hosts: bool = False,
        dropout_seed_every_n_epochs: int = 1,
        **options: Any,
    ) -> None:
        if partition is not None and not is_one_of(partition, METHODS):
            raise ValueError(f"partition must be one of {', '.join(map(repr, METHODS))} (got {quote(partition)}).")
        if num_machines is not None:
            check_whole(1, num_machines=num_machines)
        check_whole(1, dropout_seed_every_n_epochs=dropout_seed_every_n_epochs)
        check_numbers(host_weight=host_weight)
        if monitor is not None:
            check_words(monitor=monitor)
        check_flags(cache_within_hosts=cache_within_hosts)
        if not 0 <= host_weight <= 1:
            raise ValueError(f"host_weight must be from 0 to 1, got {host_weight}.")
        if isinstance(cache, str) and cache == "adaptive":
            cache = AdaptiveThreshold()
        elif isinstance(cache, str) and cache == "topk":
            cache = TopKChanges()
        elif isinstance(cache, (int, float)) and not isinstance(cache, bool) and 0 <= cache < math.inf:
            cache = float(cache)
        elif not isinstance(cache, (AdaptiveThreshold, TopKChanges, NoneType)):
            what = "'adaptive', 'topk', a threshold of at least 0, or None"
            raise ValueError(f"cache must be {what} (got {quote(cache)}).")
        if dropout_seed_every_n_epochs > 1 and cache is None:
            raise ValueError(
                f"dropout_seed_every_n_epochs={dropout_seed_every_n_epochs} is not supported without a cache. "
                'Add cache="adaptive", or remove it.'
            )
        if cache is not None and options.get("checkpoint_convs") is True:
            raise ValueError(
                "checkpoint_convs=True is not supported with a cache: recomputed layers would read other halo nodes. "
                "Remove one of them."
            )
        scheme = VertexCutScheme(partition, num_machines, host_weight, cache, monitor, cache_within_hosts)
        super().__init__(scheme, **options)
        self.dropout_seed_every_n_epochs = dropout_seed_every_n_epochs
        if cache is not None:
            self.samples_unsupported_reason = "its cache keeps rows of the last step, of other samples. Set cache=None."

    @override
    def check_model(self, module: torch.nn.Module, of: Shard | Cut) -> None:
        super().check_model(module, of)
        if isinstance(self.scheme.cache, AdaptiveThreshold):
            layers = [name for name, child in module.named_modules() if isinstance(child, MessagePassing)]
            self.scheme.cache.check_names([*layers, "gather_halo", "reduce_halo"])

    @override
    def stage_callbacks(self, shard: Shard) -> list[pl.Callback]:
        self._has_logged_edges = False
        loaded = StrategyCallback(on_train_batch_end=lambda *_: self._log_loaded_edges(shard.edge_counts))
        return [*super().stage_callbacks(shard), loaded, *self.scheme.schedule(self.world)]

    def _log_loaded_edges(self, counts: Sequence[int]) -> None:
        """Log, once after the first training step, the layers that aggregate over loaded edges instead of the vertex cut.

        Args:
            counts: number of loaded edges of each rank.
        """
        layers = [] if self._has_logged_edges or len(counts) == 1 else sorted(self.steps.binding.context.all_on_loaded_edges)
        self._has_logged_edges = True
        if layers:
            names, most, average = ", ".join(map(repr, layers)), max(counts), max(1, sum(counts) / len(counts))
            rank_zero_info(
                f"Layers that compute loaded edges instead of the edges of the vertex cut: {names}. They have edge features, "
                f"messages of their own, or edges or weights that change between steps. Rank {counts.index(most)} loads most "
                f"edges: {most:,}, {most / average:.2f} times the average."
            )

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.scheme.messages is not None:
            with local_rows():
                self.scheme.messages.add_loss(closure_loss.detach() * self.steps.values.scale)
        return super().backward(closure_loss, *args, **kwargs)

    @override
    def teardown(self) -> None:
        super().teardown()
        self.scheme.release()

    @property
    @override
    def approximation(self) -> str:
        every = self.dropout_seed_every_n_epochs
        drawn = f"random numbers drawn every {every} epochs" if every > 1 else ""
        return ", ".join(filter(None, [super().approximation, drawn]))


class CachedVertexCutStrategy(VertexCutStrategy):
    """:class:`VertexCutStrategy` with CDFGNN's cache: adaptive, 8 bits; ``Trainer(strategy="vertex_cut_cached")``.

    ``cache="topk", codec="bfp4"`` sends far fewer bytes, but reduced the accuracy on two of four graphs
    (docs/vertex-cut-internals.md).

    Args:
        cache: see :class:`VertexCutStrategy`.
        codec: see :class:`~lightning_gnn.strategy.base.GNNStrategy`.
        **options: see :class:`VertexCutStrategy`.
    """

    strategy_name = "vertex_cut_cached"

    @classmethod
    @override
    def variants(cls, ranks: int, links_alike: bool = True) -> Iterator[Mapping[str, Any]]:
        return iter(())  # see VertexCutStrategy

    def __init__(
        self,
        cache: Literal["adaptive", "topk"] | float | AdaptiveThreshold | TopKChanges | None = "adaptive",
        codec: str | None = "int8",
        **options: Any,
    ) -> None:
        super().__init__(cache=cache, codec=codec, **options)
