"""Independent training on clusters of the graph: common base of ``gossip`` and ``cluster_allreduce``.

Source: Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster" (2021); batches: Cluster-GCN (Chiang et al., KDD 2019).
"""

from __future__ import annotations

import json
import os
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gnn.arguments import check_choice, check_flags, check_seed, check_whole, check_words, quote
from lightning_gnn.comm.group import World, next_store
from lightning_gnn.data.shards import Shard
from lightning_gnn.data.sources import EDGE_MASKS, counted_mask
from lightning_gnn.datamodules.graph import OneBatch
from lightning_gnn.extensions.codecs.codec import make_codec
from lightning_gnn.nn.learned_rows import learned_rows
from lightning_gnn.nn.patches import Patches
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.private_lightning import batches_of
from lightning_gnn.steps.loop import hooks_move_batches
from lightning_gnn.steps.random_streams import RandomStreams
from lightning_gnn.strategies.gossip.averaging import Comparison, Final, Mode
from lightning_gnn.strategies.gossip.clusters import Clusters, LeftOver, PendingBatch
from lightning_gnn.strategies.gossip.fit import WorkerFit
from lightning_gnn.strategies.gossip.history import History, HistoryBinding, HistoryExchange
from lightning_gnn.strategies.gossip.launcher import REJOIN_VARIABLE, end_for_lost_agents, surviving
from lightning_gnn.strategies.gossip.metrics import GossipMetrics, show
from lightning_gnn.strategies.gossip.peers import EXCHANGE_S, Heartbeat, PeerServer, SharedKeys, own_address
from lightning_gnn.strategies.gossip.pool import Pool
from lightning_gnn.strategies.gossip.store_process import StoreProcess
from lightning_gnn.strategies.gossip.worker import Counts, Peers, Worker
from lightning_gnn.strategy.base import GNNStrategy, refuse_options
from lightning_gnn.strategy.scheme import EdgeCutScheme

Assignment = Literal["random", "metis"]
Average = Literal["gradients", "parameters"]


class ClusterScheme(EdgeCutScheme):
    """Scheme with clusters of the graph for training, and the edge cut of ``dgcl`` otherwise."""

    @override
    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        return replace(super().layout(world_size, num_hosts), takes_types=False)


class ClusterStrategy(GNNStrategy):
    """Base of strategies whose workers train independently on clusters of the graph, and evaluate together on the whole.

    In `fit`, each worker is a separate run for Lightning: there are no collectives in its loop, callbacks or loggers. Subclasses
    define the communication between workers by :meth:`_make_worker`.

    Args:
        average_every_n_batches: number of batches between two averages of a worker.
        average: averaged values, before the step: one of :attr:`averages`.
        heartbeat_timeout: seconds without a heartbeat after which a worker counts as dead.
        num_clusters: number of clusters of the graph.
        assignment: assignment of nodes to clusters: ``"random"``, as in the thesis, or ``"metis"``, as in Cluster-GCN.
        clusters_per_batch: number of clusters whose nodes, with all edges between them, form a batch.
        historical_embeddings: whether edges from nodes outside a batch use historical embeddings: the embeddings of these nodes
            when they were last in a batch of any worker of the machine. False omits these edges, like Cluster-GCN.
        seed: random seed of the order of clusters.
        final_weights: weights of the result.

            - ``"best"``: weights of the worker whose `monitor` was best in its last validation.
            - ``"average"``: mean of all workers' weights.
            - ``"auto"``: the best. If validation logs no value to compare workers by: the worker with the lowest mean training
              loss in its last epoch. The loss need not be logged.
        monitor, mode: value logged in validation that workers are compared by; the lowest (``"min"``, the default) or the highest
            (``"max"``) is best. None: the monitor and mode of the Trainer's ModelCheckpoint or EarlyStopping, if validation logs
            it, else ``val_loss``.
        **options: see :class:`~lightning_gnn.strategy.base.GNNStrategy`.

    Attributes:
        report: work of each worker in the last `fit`, by rank; see :class:`~lightning_gnn.strategies.gossip.worker.Counts`.
        consensus: distance between the workers' parameters at its end, relative to their mean; see
            :meth:`~lightning_gnn.strategies.gossip.worker.Worker.consensus`.
        result: description of the weights that the module got; empty for one worker.

    Raises:
        ValueError: an invalid argument, or a number below 1.
    """

    samples_unsupported_reason = "its workers train on clusters of one graph. Use DGCLStrategy."
    trains_on_batches = True
    others_go_on = False
    """Whether workers continue without a worker that fails in `fit`."""
    max_restarts = 0
    """Maximum number of restarts of each killed worker."""
    survives_lost_ranks = False
    """Whether this call of the Trainer is a fit whose workers continue without failed ones."""
    most_restarts = 0
    """Maximum number of restarts of each worker in this call."""
    averages: tuple[str, ...] = get_args(Average)

    def __init__(
        self,
        average_every_n_batches: int,
        average: str,
        heartbeat_timeout: float,
        num_clusters: int = 40,
        assignment: Assignment = "random",
        clusters_per_batch: int = 1,
        historical_embeddings: bool = False,
        seed: int = 0,
        final_weights: Final = "auto",
        monitor: str | None = None,
        mode: Mode | None = None,
        **options: Any,
    ) -> None:
        check_whole(
            1, average_every_n_batches=average_every_n_batches, num_clusters=num_clusters, clusters_per_batch=clusters_per_batch
        )
        check_seed(seed)
        if monitor is not None:
            check_words(monitor=monitor)
        elif mode is not None:
            raise ValueError(f"mode={quote(mode)} is not supported without monitor. Set monitor to the name of a logged value.")
        check_choice("average", average, self.averages)
        check_choice("assignment", assignment, get_args(Assignment))
        check_flags(historical_embeddings=historical_embeddings)
        if historical_embeddings and not hasattr(os, "posix_fallocate"):
            raise ValueError("historical_embeddings=True needs files in shared memory, as on Linux. Remove it on this system.")
        check_choice("final_weights", final_weights, get_args(Final))
        check_choice("mode", mode or "min", get_args(Mode))
        because = "Batches have only a few clusters of the graph: increase num_clusters to make them smaller."
        refuse_options(options, ["checkpoint_convs", "memory_limit"], because)
        super().__init__(ClusterScheme(), **options)
        self.average_every_n_batches, self.average, self.heartbeat_timeout = average_every_n_batches, average, heartbeat_timeout
        self.num_clusters, self.assignment = num_clusters, assignment
        self.clusters_per_batch, self.historical_embeddings, self.seed = clusters_per_batch, historical_embeddings, seed
        self.final_weights, self.monitor, self.mode = final_weights, monitor, mode
        self.report: dict[int, Counts] = {}
        self.consensus = 0.0
        self.result = ""
        self._fit: WorkerFit | None = None  # in fit only
        self._history: HistoryExchange | None = None
        self._store: StoreProcess | None = None
        self._fits = False  # whether this call of the Trainer is a fit
        self._lost: list[int] = []
        self._first = 0  # first remaining rank
        self._rejoins = ""  # in a restarted rank: the place of the others' store

    @property
    @override
    def approximation(self) -> str:
        stale = ", stale halo rows" if self.historical_embeddings else ""
        return f"clusters as mini-batches{stale}" + (f", codec {self.codec}" if self.codec else "")

    @abstractmethod
    def _make_worker(self, pool: Pool, peers: Peers | None) -> Worker:
        """Returns this rank's worker; `peers` is None if it is the only one."""

    def _check_fit(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Raises ValueError for modules and settings that cannot be trained on clusters."""
        name = type(self).__name__
        if counted_mask("train_mask", module) in EDGE_MASKS:
            raise ValueError(f'{name} does not support {type(module).__name__}, which trains on edges. Use "sampling".')
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"accumulate_grad_batches must be 1 with {name}, got {trainer.accumulate_grad_batches}: it averages every "
                "average_every_n_batches batches and steps after each. Raise clusters_per_batch for larger batches."
            )
        if not module.automatic_optimization:
            raise ValueError(
                f"{name} does not support manual optimization: it averages the gradients of one backward pass per batch. Use "
                '"sampling" or "dgcl".'
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError("precision='16-mixed' scales each worker's gradients differently. Use precision='bf16-mixed' or 32.")

    @property
    @override
    def is_global_zero(self) -> bool:
        """Whether this rank writes for all: rank 0, or the first remaining rank after a fit that rank 0 did not survive."""
        return self.global_rank == self._first

    @override
    def layout(self) -> LayoutSpec:
        """Returns, in a fit, a layout whose partitions are the clusters."""
        if not self._fits:
            return super().layout()
        data = getattr(self._trainer, "datamodule", None)
        if data is not None and data.partition is not None and not isinstance(data.partition, str):
            raise ValueError(
                f"{type(self).__name__} does not support GraphDataModule(partition=...): it assigns nodes to clusters itself. "
                f'Remove it, or pass assignment="metis" or "random" to {type(self).__name__}.'
            )
        if self.num_clusters < self.world_size:
            raise ValueError(f"num_clusters must be at least {self.world_size} (one per worker), got {self.num_clusters}.")
        return LayoutSpec("edge_cut", self.num_clusters, method=self.assignment)

    @override
    def before_ranks_start(self, trainer: pl.Trainer | None, arguments: Sequence[Any], self_check: bool = True) -> None:
        self._begin_call(trainer)
        super().before_ranks_start(trainer, arguments, self_check)

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self.others_go_on:
            self._launcher = surviving(self._launcher)

    def _begin_call(self, trainer: pl.Trainer | None) -> None:
        """Set whether this call may lose workers: only in a fit, since ranks otherwise wait for each other in every layer."""
        self._fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        self.survives_lost_ranks = self.others_go_on and self._fits and self.world_size > 1
        self.most_restarts = self.max_restarts if self.survives_lost_ranks else 0

    @override
    def setup_environment(self) -> None:
        if self._lost:
            raise RuntimeError(
                f"Rank(s) {', '.join(map(str, self._lost))} ended during fit, but this call needs all {self.world_size} ranks. "
                "The module has the result: save a checkpoint, and validate, test or predict in a new run."
            )
        self._begin_call(self._trainer)
        self.layout()  # raises its errors on all ranks
        self._rejoins = os.environ.pop(REJOIN_VARIABLE, "")
        super().setup_environment()
        self._run = uuid.uuid4().hex
        if self._fits and self.world_size > 1 and self.global_rank == 0:
            # It starts while the graph is partitioned.
            self._store = StoreProcess(self._host(), self._run, self.world_size, self.heartbeat_timeout)

    @override
    def _make_world(self) -> World:
        if not self._rejoins:
            return super()._make_world()
        if self._start_method == "popen":  # the script's next call runs on all ranks again
            next_store(self.global_rank, self.world_size, self.timeout)
        data = self.check_data(getattr(self._trainer, "datamodule", None))
        known = SharedKeys(self._rejoins).find("graph")
        assert known is not None
        vars(data).update(json.loads(known))
        data.prepare_for(self.layout())
        return World(0, 1, self.root_device, self.timeout)

    def _host(self) -> str:
        return own_address(os.environ["MASTER_ADDR"], self.num_nodes)

    @override
    def checked_stages(self, trainer: pl.Trainer) -> Sequence[str]:
        return () if self._fits else super().checked_stages(trainer)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self._fits:
            self._check_fit(trainer, self._module)
        super().setup(trainer)

    @override
    def binds(self, shard: Shard) -> bool:
        return not self._fits and super().binds(shard)

    @override
    def begin_stage(self, trainer: pl.Trainer, shard: Shard) -> None:
        if self._fits:
            self._separate(trainer, shard)
        super().begin_stage(trainer, shard)
        if self._fits:
            for owner in (self._module, getattr(trainer, "datamodule", None)):
                self.steps.in_use.enter_context(self._left_over_first(owner))
        if self._history is not None:
            self.steps.bind(HistoryBinding(self._module, self._history))

    def _turn_to(self, batch: Any) -> None:
        """Switch layers, and the history, to a batch."""
        if self._history is not None:
            assert self._fit is not None
            halo = batch.halo
            self._history.turn_to(torch.from_numpy(halo.local_ids), torch.from_numpy(halo.ids), self._fit.worker.reached)
            self.steps.binding.turn_to(batch.x, halo.x, batch.edge_index, batch.get("edge_weight"))

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._turn_to(batch)
        return super().training_step(batch, *args, **kwargs)

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._turn_to(batch)
        return super().validation_step(batch, *args, **kwargs)

    def _separate(self, trainer: pl.Trainer, shard: Shard) -> None:
        """Make this rank a worker: from now on, Lightning, torchmetrics and loggers see a run of one rank."""
        module = self._module
        if learned_rows(module, shard):
            raise ValueError(
                "DistributedEmbedding is not supported with gossip: one rank owns the row of each node, but workers train "
                'independently on any node. Use strategy="sampling".'
            )
        validates = trainer.enable_validation and any(shard.mask_counts["val_mask"])
        if self.final_weights == "best" and self.world_size > 1 and not validates:
            raise ValueError(
                'final_weights="best" needs validation, which this run does not have. Define validation_step, nodes in '
                'val_mask and limit_val_batches, or use final_weights="auto" or "average".'
            )
        data = self.check_data(getattr(trainer, "datamodule", None))
        clusters = Clusters(data.stored_cut(), self.clusters_per_batch, self.seed, self.historical_embeddings)
        if clusters.batches < self.world_size:
            raise ValueError(
                f"Batches must be at least one per worker ({self.world_size}), got {clusters.batches}: {len(clusters.trained)} "
                f"clusters with training nodes, clusters_per_batch={self.clusters_per_batch}. Raise num_clusters."
            )
        self.world.broadcast_tensors_([*module.parameters(), *module.buffers()])
        seed = RandomStreams(self.world).seed  # workers are independent, in hooks and in steps
        epochs = trainer.max_epochs
        pool = Pool(clusters.batches, None if epochs is None or epochs < 0 else epochs * clusters.batches)
        worker = self._make_worker(pool, self._connect() if self.world_size > 1 else None)
        comparison = Comparison(self.final_weights, self.monitor, self.mode)
        codec = make_codec(self.codec, self.stochastic_rounding, seed)
        # On the CPU, a thread would slow down training by the time that it saves.
        ahead = self.root_device if self.root_device.type != "cpu" and not hooks_move_batches(module, data) else None
        of_fit = self.average == "gradients", comparison, ahead, self.most_restarts > 0, codec
        self._fit = WorkerFit(module, worker, clusters, *of_fit)
        if self._rejoins:
            seed = (seed + self.global_rank + worker.life * self.world_size) % 2**63  # different from all others
        else:
            worker.enter()
            if worker.peers is not None and self.global_rank == 0:
                worker.keys.put("graph", json.dumps(data.loading_state()).encode())
                self._fit.leave_snapshot(trainer)
        torch.manual_seed(seed)
        history = History.create_shared(sum(shard.counts), self.world, worker.keys) if self.historical_embeddings else None
        self.world.barrier()
        if worker.peers is not None and self.survives_lost_ranks:
            launcher: Any = self._launcher
            launcher.ranks_are_independent(worker.peers.place)
        self.world.close()
        self._world = World(0, 1, self.root_device, self.timeout)
        if history is not None:
            self._history = HistoryExchange(history, self.world, self.meter)

    @override
    def stage_callbacks(self, shard: Shard) -> list[pl.Callback]:
        if self._fit is None:
            return super().stage_callbacks(shard)
        return [self.steps.progress, GossipMetrics(self._fit.worker, self._history), self._fit]

    def _connect(self) -> Peers:
        """Connect this worker to the others; runs on every rank."""
        known = "" if self._store is None else f"{self._store.address()} {self._run}"
        place = self._rejoins or self.world.broadcast_object(known)  # rank 0's
        keys = SharedKeys(place)
        life = keys.add(f"lives/{self.global_rank}", 1) - 1
        return Peers(
            place, keys, Heartbeat(place, self.global_rank, self.heartbeat_timeout), PeerServer(self._host(), EXCHANGE_S), life
        )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        if self._fit is None or not isinstance(dataloader, OneBatch):
            return dataloader
        batches = self._fit.batches(dataloader.mask, (self._saved or {}).get("pool", {}))
        return dataloader if batches is None else batches

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, PendingBatch):
            assert self._fit is not None
            batch = self._fit.pop_batch()
        return super().batch_to_device(batch, device, dataloader_idx)

    @contextmanager
    def _left_over_first(self, owner: Any) -> Iterator[None]:
        """Context manager that passes batches that others left undone, not placeholders, to the first hook of `owner`.

        `owner` is the module or the datamodule.
        """
        hook = owner.on_before_batch_transfer

        @wraps(hook)
        def on_before_batch_transfer(batch: Any, dataloader_idx: int) -> Any:
            if isinstance(batch, LeftOver):
                assert self._fit is not None
                batch = self._fit.left_over()
                if batch is None:
                    self._end_epoch()
            return hook(batch, dataloader_idx)

        patches = Patches()
        patches.put(owner, {"on_before_batch_transfer": on_before_batch_transfer})
        try:
            yield
        finally:
            patches.release()

    def _end_epoch(self) -> None:
        """End the epoch in place of a batch, with the work that is due after the last batch, above all validation."""
        loop: Any = self._module.trainer.fit_loop
        loop.epoch_loop.on_advance_end(batches_of(loop))
        raise StopIteration

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self._fit is not None
        self._fit.comparison.losses.append(closure_loss.detach())
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Hook called after the backward pass; averages with others before gradients are clipped."""
        assert self._fit is not None
        self._fit.average()

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._lost:
            super().barrier(name)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._fit is None:
            return super().reduce_boolean_decision(decision, all)
        return self._fit.worker.agrees(decision, all)

    @override
    def on_train_end(self) -> None:
        """Hook called at the end of training; computes the result with the other workers that are alive."""
        super().on_train_end()
        assert self._fit is not None
        fit, worker = self._fit, self._fit.worker
        scores = fit.end(self.timeout.total_seconds())
        self.report, self.consensus = worker.all_counts(), worker.consensus(scores)
        self._lost = [rank for rank in range(self.world_size) if rank not in scores]
        if worker.peers is not None:
            undone = 0 if self._module.trainer.should_stop else worker.undone()
            self.result = fit.load_result(scores)
            worker.part()
            self._first = min(scores)
            if self.is_global_zero:
                end_for_lost_agents({rank // self.num_processes for rank in self._lost})
                show(self.report, self._lost, undone, self.consensus, self.result)

    @override
    def outcome(self) -> dict[str, Any]:
        return {"report": self.report, "consensus": self.consensus, "result": self.result}

    @override
    def kept_state(self) -> dict[str, Any]:
        return super().kept_state() | ({} if self._fit is None else {"pool": self._fit.position()})

    @override
    def teardown(self) -> None:
        if self._fit is not None:
            self._fit.worker.close()
            self._fit.release(self._trainer)
        if self._store is not None:
            self._store.leave()
        if self._history is not None:
            self._history.history.close()
        self._fit = self._store = self._history = None
        super().teardown()
