"""Training apart on clusters of the graph: what ``gossip`` and ``cluster_allreduce`` share.

Source: Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster" (2021); batches: Cluster-GCN (Chiang et al., KDD 2019).
"""

from __future__ import annotations

import io
import math
import os
import uuid
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch_geometric.data import Data
from typing_extensions import override

from lightning_gnn.arguments import check_seed, check_whole, check_words, is_one_of, shown
from lightning_gnn.callbacks.gossip import GossipMetrics, show
from lightning_gnn.comm.group import World
from lightning_gnn.comm.meetings import ADDRESS, Door, Life, Place, SharedKeys, StoreServer, own_address
from lightning_gnn.data.sources import EDGE_MASKS, counted_mask, num_labelled
from lightning_gnn.datamodules.graph import GraphDataModule, OneBatch
from lightning_gnn.gossip.clusters import Clusters
from lightning_gnn.gossip.pool import Pool
from lightning_gnn.gossip.worker import Counts, Scores, Ties, Worker
from lightning_gnn.nn.bind import check_module
from lightning_gnn.nn.embedding import embeddings_of
from lightning_gnn.nn.helpers import graph_in_use
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.steps.random_streams import RandomStreams
from lightning_gnn.steps.values import StepValues
from lightning_gnn.strategies.base import GNNStrategy
from lightning_gnn.strategies.dgcl import DGCLScheme

Assignment = Literal["random", "metis"]
Average = Literal["gradients", "parameters"]
Final = Literal["auto", "best", "average"]
Mode = Literal["min", "max"]

EXCHANGE_S = 30.0
"""Seconds that a worker may be silent in an exchange before the other goes on without."""


class ClusterScheme(DGCLScheme):
    """Clusters of the graph for training; the edge cut of ``dgcl`` for everything else."""

    keeps_layers = "Layers see a few clusters of the graph: raise clusters, and each is smaller."

    def __init__(self) -> None:
        super().__init__(plan="p2p", topology=None)


class ClusterStrategy(GNNStrategy):
    """What strategies have in common whose workers train apart, on clusters of the graph, and evaluate together on the whole.

    In `fit`, each worker is alone for Lightning: no collective hides in its loop, callbacks or loggers. A subclass says what
    workers do together, by its :meth:`_make_worker`.

    Args:
        averaging_interval: batches that a worker trains on between two averages.
        average: what: one of :attr:`averages`, before the step.
        clusters: how many the graph is split into.
        assignment: of nodes to clusters: ``"random"``, as in the thesis, or ``"metis"``, as in Cluster-GCN.
        clusters_per_batch: whose nodes, and all edges between them, make a batch.
        seed: of the order of clusters.
        final: the result: ``"best"``: the weights of the worker whose `monitor` was best when it validated last; ``"average"``:
            the mean of all workers' weights; ``"auto"``: the best, and where validation logs nothing to compare workers by, the
            worker whose training loss was least in the mean over its last epoch, for which nothing need be logged.
        monitor, mode: what workers are compared by: a value that the module logs in validation, of which the least (``"min"``,
            the default) or the largest (``"max"``) is best. None: what a ModelCheckpoint or EarlyStopping of the Trainer
            monitors, with its mode, if validation logs that, else ``val_loss``.
        lease: seconds without a sign of life after which a worker counts as dead.
        **options: see :class:`~lightning_gnn.strategies.base.GNNStrategy`.

    Attributes:
        report: what each worker has done in the last `fit`, by rank; see :class:`~lightning_gnn.gossip.worker.Counts`.
        consensus: how far the workers' parameters were from each other at its end, relative to their mean; see
            :meth:`~lightning_gnn.gossip.worker.Worker.consensus`.

    Raises:
        ValueError: an argument is none of these, or a number below 1.
    """

    trains_in_batches = True
    no_stage_because = "Its workers train apart, each with an optimizer of its own."
    others_go_on = False
    """Whether workers do without one that fails in `fit`."""
    averages: tuple[str, ...] = get_args(Average)

    def __init__(
        self,
        averaging_interval: int,
        average: str,
        clusters: int,
        assignment: Assignment,
        clusters_per_batch: int,
        seed: int,
        final: Final,
        monitor: str | None,
        mode: Mode | None,
        lease: float,
        **options: Any,
    ) -> None:
        counts = {
            "averaging_interval": averaging_interval,
            "clusters": clusters,
            "clusters_per_batch": clusters_per_batch,
        }
        check_whole(**counts)
        check_seed(seed)
        if monitor is not None:
            check_words(monitor=monitor)
        elif mode is not None:
            raise ValueError(f"mode={shown(mode)} says which value of monitor is best: name that, too.")
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1 (got {value}).")
        for name, chosen, known in (
            ("average", average, self.averages),
            ("assignment", assignment, get_args(Assignment)),
            ("final", final, get_args(Final)),
            ("mode", mode or "min", get_args(Mode)),
        ):
            if chosen is None or not is_one_of(chosen, known):
                *others, last = map(repr, known)
                raise ValueError(f"{name} must be {', '.join(others)} or {last} (got {shown(chosen)}).")
        super().__init__(ClusterScheme(), **options)
        self.averaging_interval, self.average, self.lease = averaging_interval, average, lease
        self.num_clusters, self.assignment = clusters, assignment
        self.clusters_per_batch, self.seed = clusters_per_batch, seed
        self.final, self.monitor, self.mode = final, monitor, mode
        self.report: dict[int, Counts] = {}
        self.consensus = 0.0
        self._clusters: Clusters | None = None
        self._worker: Worker | None = None
        self._batches: PooledBatches | None = None
        self._server: StoreServer | None = None
        self._starting: TrainerFn | None = None
        self._score: float | None = None
        self._chosen_by: tuple[str, str] | None = None
        self._losses: list[Tensor] = []  # of the steps of an epoch
        self._training_loss: float | None = None
        self._lost: list[int] = []

    @property
    @override
    def approximation(self) -> str:
        return "clusters as mini-batches"

    @abstractmethod
    def _make_worker(self, pool: Pool, ties: Ties | None) -> Worker:
        """Returns this rank's worker; `ties` are None where it is the only one."""

    def _cluster_layout(self, data: GraphDataModule | None) -> LayoutSpec:
        """Returns a layout whose parts are the clusters."""
        if data is not None and data.partition is not None and not isinstance(data.partition, str):
            raise ValueError(
                f"{type(self).__name__} assigns nodes to clusters by itself, and GraphDataModule(partition=...) gives a rank for "
                f'every node. Leave it out, or pass assignment="metis" or "random" to {type(self).__name__}.'
            )
        if self.num_clusters < self.world_size:
            raise ValueError(f"{self.num_clusters} clusters are too few for {self.world_size} workers. Raise clusters.")
        return LayoutSpec("edge_cut", self.num_clusters, method=self.assignment)

    def _check_clusters(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Refuses what cannot be trained on clusters."""
        name = type(self).__name__
        if counted_mask("train_mask", module) in EDGE_MASKS:
            raise ValueError(
                f'{name} trains on nodes of clusters, and {type(module).__name__} on edges. Use "sampling".'
            )
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"{name} averages every averaging_interval batches and steps after each: accumulate_grad_batches must be 1 "
                f"(got {trainer.accumulate_grad_batches}). Raise clusters_per_batch for larger batches."
            )
        if not module.automatic_optimization:
            raise ValueError(
                f"{name} averages what one backward of a batch has given, which manual optimisation does not tell apart. "
                'Use "sampling" or "dgcl".'
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "precision='16-mixed' scales each worker's gradients differently. Use precision='bf16-mixed' or 32."
            )

    def _make_clusters(self, data: GraphDataModule) -> Clusters:
        clusters = Clusters(data.stored_cut(), self.clusters_per_batch, self.seed)
        if clusters.batches < self.world_size:
            raise ValueError(
                f"{len(clusters.trained)} clusters with training nodes make {clusters.batches} batches of "
                f"clusters_per_batch={self.clusters_per_batch}, fewer than the {self.world_size} workers. Raise clusters."
            )
        return clusters

    # What differs between fit and the rest ####################################

    @property
    def _fits(self) -> bool:
        trainer = getattr(self.lightning_module, "_trainer", None)
        return (self._starting or getattr(getattr(trainer, "state", None), "fn", None)) == TrainerFn.FITTING

    @override
    def layout(self) -> LayoutSpec:
        if not self._fits:
            return super().layout()
        trainer = getattr(self.lightning_module, "_trainer", None)
        return self._cluster_layout(getattr(trainer, "datamodule", None))

    @override
    def before_ranks_start(self, trainer: pl.Trainer | None, given: Sequence[Any], self_check: bool = True) -> None:
        self._starting = None if trainer is None else trainer.state.fn
        # Workers of a fit do without each other; all others wait for each other in every layer.
        self.scheme.survives_lost_ranks = self.others_go_on and self._fits and self.world_size > 1
        try:
            super().before_ranks_start(trainer, given, self_check)
        finally:
            self._starting = None

    @override
    def setup_environment(self) -> None:
        if self._lost:
            raise RuntimeError(
                f"Rank(s) {', '.join(map(str, self._lost))} ended during fit, and this needs all {self.world_size}. The "
                "result is in the module: save a checkpoint, and validate, test or predict in a new run."
            )
        self.layout()  # what it refuses, it refuses here on all ranks
        super().setup_environment()

    @override
    def checked_stages(self, trainer: pl.Trainer) -> Sequence[str]:
        return () if self._fits else super().checked_stages(trainer)

    # Set-up ###################################################################

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if not self._fits:
            super().setup(trainer)
            return
        module = self.lightning_module
        assert module is not None
        if self._layer_sync is not None:
            raise ValueError("sync_batchnorm=True averages over all workers at once. Set sync_batchnorm=False.")
        check_module(module)
        self._check_clusters(trainer, module)
        data = self.check_data(getattr(trainer, "datamodule", None))
        shard = self._shard = self._checks.take_shard(trainer)
        if embeddings_of(module, sum(shard.counts)):
            raise ValueError(
                "DistributedEmbedding leaves each node's row to one owner, and workers of gossip train on any node, apart. "
                'Use strategy="sampling".'
            )
        self._clusters = self._make_clusters(data)
        validates = trainer.enable_validation and any(shard.mask_counts["val_mask"])
        if self.final == "best" and self.world_size > 1 and not validates:
            raise ValueError(
                'final="best" compares workers by what validation logs, and there is none in this run. Give '
                'validation_step, nodes in val_mask and limit_val_batches, or use final="auto" or "average".'
            )
        ParallelStrategy.setup(self, trainer)  # not GNNStrategy's: nothing is bound
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            raise ValueError(
                "LBFGS evaluates a batch several times, between which averages fall. Use Adam, AdamW or SGD."
            )
        self.world.broadcast_tensors_([*module.parameters(), *module.buffers()])
        torch.manual_seed(RandomStreams(self.world).seed)  # workers are apart, in hooks as in steps
        self._score = self._chosen_by = self._training_loss = None
        self._worker = self._new_worker(trainer, self._clusters)
        # From here on each worker is alone: what Lightning, torchmetrics and loggers ask of all ranks, they ask of one.
        if self.world_size > 1:
            launcher: Any = self._launcher
            launcher.ranks_are_apart()
        self.world.close()
        self._world = World(0, 1, self.root_device, self.timeout)
        self._values = StepValues(module, self._world, shard)
        ours = [self.progress, GossipMetrics(self._worker), _Hooks(self)]
        self._callbacks = [*ours]
        trainer.callbacks[:0] = ours  # type: ignore[attr-defined]

    def _new_worker(self, trainer: pl.Trainer, clusters: Clusters) -> Worker:
        epochs = trainer.max_epochs
        pool = Pool(clusters.batches, None if epochs is None or epochs < 0 else epochs * clusters.batches)
        ties = self._tie() if self.world_size > 1 else None
        worker = self._make_worker(pool, ties)
        worker.enter()
        self.world.barrier()
        return worker

    def _tie(self) -> Ties:
        """Ties this worker to the others; runs on every rank."""
        world, host = self.world, own_address(os.environ["MASTER_ADDR"], self.num_nodes)
        given = os.environ.get(ADDRESS)
        if given is None and self.global_rank == 0:
            self._server = StoreServer(host)
            self._server.start()
            given = f"{host}:{self._server.port}"
        address, run = world.broadcast_object((given or "", uuid.uuid4().hex))
        host_of_store, _, port = address.rpartition(":")
        place = Place(host_of_store, int(port), run, EXCHANGE_S)
        door, life = Door(host, EXCHANGE_S), Life(place, self.global_rank, self.lease)
        return Ties(place, SharedKeys(place), life, door, world.all_gather_object(door.address))

    # Batches ##################################################################

    def _loader(self, mask: str | None) -> PooledBatches | ClusterBatches | None:
        """Returns this worker's loader.

        Args:
            mask: whose nodes count; None for all.

        Returns:
            In `fit` the pool's batches, or the clusters with validation nodes, one by one. Else None: its part of the graph.
        """
        if not self._fits or mask not in ("train_mask", "val_mask"):
            return None
        if mask == "train_mask":
            return self._training_batches()
        assert self._clusters is not None
        return ClusterBatches(self._clusters, self._clusters.labelled("val_mask"))

    def _training_batches(self) -> PooledBatches:
        """Returns the same loader when Lightning asks again."""
        assert self._worker is not None and self._clusters is not None and self.lightning_module is not None
        if self._batches is not None:
            return self._batches
        trainer, pool = self.lightning_module.trainer, self._worker.pool

        def epoch() -> int:
            # trainer.current_epoch is one behind for a moment, when a run resumes with a checkpoint of an epoch's end.
            progress: Any = trainer.fit_loop.epoch_progress.current
            return progress.processed

        # Only now is a checkpoint's epoch known.
        saved = (self._saved or {}).get("pool", {})
        pool.begin = epoch() * pool.size
        if saved.get("size") == pool.size:
            pool.begin, pool.done_before = saved["begin"], frozenset(saved["done"])
        self._batches = PooledBatches(
            self._worker,
            self._clusters,
            lambda: (epoch(), epoch() + 1 == trainer.max_epochs),
        )
        return self._batches

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        own = self._loader(dataloader.mask) if isinstance(dataloader, OneBatch) else None
        return dataloader if own is None else own

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, LeftOver):
            assert self._batches is not None and self._worker is not None
            self._worker.leave(self._vector)
            batch = self._batches.left_over()
            if batch is None:
                self._end_epoch()
        return super().batch_to_device(batch, device, dataloader_idx)

    def _end_epoch(self) -> None:
        """Ends the epoch in place of a batch; what is due after the last batch is due now, validation above all."""
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop
        assert loop._data_fetcher is not None
        loop.epoch_loop.on_advance_end(loop._data_fetcher)
        raise StopIteration

    # Steps ####################################################################

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self._alone(batch, "train_mask"):
            return ParallelStrategy.training_step(self, batch, *args, **kwargs)

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._worker is None:
            return super().validation_step(batch, *args, **kwargs)
        with self._alone(batch, "val_mask"):
            return ParallelStrategy.validation_step(self, batch, *args, **kwargs)

    @contextmanager
    def _alone(self, batch: Any, mask: str) -> Iterator[None]:
        """What a step logs is of this worker's batch alone, and layers see nothing but the batch."""
        assert self._values is not None
        self.progress.at("forward" if mask == "train_mask" else "validation", self._module.trainer)
        self._values.logs.enter([num_labelled(batch.get("y"), batch[mask])])
        with graph_in_use(None):
            yield
        self._values.logs.leave()

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        self._losses.append(closure_loss.detach())
        self.progress.at("backward", self._module.trainer)
        loss = ParallelStrategy.backward(self, closure_loss, optimizer, *args, **kwargs)
        self.progress.at("the optimizer's step", self._module.trainer)
        return loss

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Averages with others, if it is time to; before gradients are clipped."""
        assert self._worker is not None
        total = self._worker.meet(self._vector)
        if total is not None:
            self._average(total)

    def _tensors(self) -> list[Tensor]:
        """Returns what is averaged."""
        module = self.lightning_module
        assert module is not None
        parameters: list[Tensor] = [each for each in module.parameters() if each.requires_grad]
        if self.average == "gradients":
            return parameters
        return parameters + [each for each in module.buffers() if each.is_floating_point()]

    def _vector(self) -> Tensor:
        """Returns what others get: the values, ``[n]``, 0 where there are none, and whether there are, ``[tensors]``."""
        tensors = self._tensors()
        found = [each.grad if self.average == "gradients" else each.detach() for each in tensors]
        dtype = torch.float64 if any(each.dtype == torch.float64 for each in tensors) else torch.float32
        pieces = [
            torch.zeros(each.numel(), dtype=dtype) if value is None else value.reshape(-1).to("cpu", dtype)
            for each, value in zip(tensors, found)
        ]
        return torch.cat([*pieces, torch.tensor([value is not None for value in found], dtype=dtype)])

    @torch.no_grad()
    def _average(self, total: Tensor) -> None:
        """Replaces own values by the mean of those that met, given their sum; of each tensor, of those that have it."""
        tensors = self._tensors()
        *pieces, counts = total.split([*(each.numel() for each in tensors), len(tensors)])
        for each, piece, count in zip(tensors, pieces, counts.tolist()):
            if not count:
                continue
            mean = (piece / count).view(each.shape).to(each)
            if self.average == "gradients":
                each.grad = mean
            else:
                each.copy_(mean)

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._lost:
            super().barrier(name)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._worker is None:
            return super().reduce_boolean_decision(decision, all)
        return self._worker.agrees(decision, all)

    # The end ##################################################################

    def _validated(self, trainer: pl.Trainer) -> None:
        """Keeps what the result is chosen by."""
        if self.final == "average" or self.world_size == 1:
            return
        asked = self._compared_by(trainer)
        logged = {each.meta.name for each in (trainer._results or {}).values()}
        self._chosen_by = next(((name, mode) for name, mode in asked if name in logged), None)
        if self._chosen_by is not None:
            name, mode = self._chosen_by
            if not trainer.sanity_checking:
                found = float(trainer.callback_metrics[name])
                self._score = found if mode == "min" else -found
        elif self.final == "best" or self.monitor is not None:
            names = ", ".join(sorted(logged)) or "nothing"
            raise ValueError(
                f"final={self.final!r} compares workers by monitor={asked[0][0]!r}, which validation_step has not logged (it "
                f'logged {names}). Name one of these, with its mode, or use final="average".'
            )

    def _epoch_ended(self) -> None:
        """Keeps the mean loss of the epoch's steps, if there were any."""
        losses, self._losses = self._losses, []
        if losses:
            self._training_loss = float(torch.stack(losses).double().mean())

    def _compared_by(self, trainer: pl.Trainer) -> list[tuple[str, str]]:
        """Returns values that workers may be compared by, and which of each is best; the first that is logged counts."""
        if self.monitor is not None:
            return [(self.monitor, self.mode or "min")]
        callbacks: list[Any] = [*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks]
        monitored = [(each.monitor, each.mode) for each in callbacks if getattr(each, "monitor", None) is not None]
        return [*monitored, ("val_loss", "min")]

    @override
    def on_train_end(self) -> None:
        """Comes to a result with the other workers; none of them waits for one that has died."""
        worker, module = self._worker, self.lightning_module
        assert worker is not None and module is not None and self._batches is not None
        worker.leave(self._vector)
        self._batches.give_back()
        worker.tell(module.parameters())
        file = io.BytesIO()
        torch.save({name: value.cpu() for name, value in module.state_dict().items()}, file)
        scores = worker.agree(self._scores(), file.getvalue(), self.timeout.total_seconds())
        self.report, self.consensus = worker.everyones(), worker.consensus(scores)
        self._lost = [rank for rank in range(self.world_size) if rank not in scores]
        undone = 0 if module.trainer.should_stop else worker.undone()
        if worker.ties is None:
            return
        chosen, result = self._result_of(scores)
        module.load_state_dict(_mean([_load(worker.weights_of(rank)) for rank in chosen]))
        worker.part(list(scores), self._server is not None, EXCHANGE_S)
        if self.global_rank == min(scores):
            show(self.report, self._lost, undone, self.consensus, result)

    def _scores(self) -> Scores:
        """Returns what workers are compared by, the least being best; None for what this one has not."""
        score, loss = self._score, self._training_loss
        return (score, loss) if self.final == "auto" else (score if self.final == "best" else None,)

    def _result_of(self, scores: Mapping[int, Scores]) -> tuple[list[int], str]:
        """Returns the workers whose weights make the result, and what that is, in words."""
        name, mode = self._chosen_by or ("what validation logs", "min")
        for column, what in enumerate((name, "training loss")[: len(self._scores())]):
            # Neither those that have not validated, nor those that have diverged.
            ranked = [(score, rank) for rank, each in scores.items() if (score := each[column]) is not None]
            score, best = min((each for each in ranked if math.isfinite(each[0])), default=(math.nan, -1))
            if best >= 0:
                value = -score if column == 0 and mode == "max" else score
                return [best], f"worker {best}'s weights, of best {what} ({value:.4g})"
        if self.final != "average" and self.global_rank == min(scores):
            warnings.warn(f"No worker has a number in {name} to compare: the result is the average.", stacklevel=2)
        return sorted(scores), "the average of all workers' weights"

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Writes this worker's weights, on rank 0, and where the pool is; after fit, the result."""
        if self._worker is None or self._batches is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        begin, done = self._worker.position()
        pool = {"size": self._worker.pool.size, "begin": begin, "done": done}
        checkpoint["lightning_gnn"] = {"scheme": self.scheme.state_dict(), "pool": pool}
        ParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    @override
    def teardown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._server is not None:
            self._server.stop()
        self._worker = self._batches = self._server = self._clusters = None
        super().teardown()


class ClusterBatches:
    """Some clusters, one by one."""

    def __init__(self, clusters: Clusters, chosen: Sequence[int]) -> None:
        self._clusters, self._chosen = clusters, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __iter__(self) -> Iterator[Data]:
        for cluster in self._chosen:
            yield self._clusters.batch([cluster])


class LeftOver(Data):
    """Stands at the end of the last epoch for what others may leave undone, which is known only when its turn comes."""


class PooledBatches:
    """The training loader of a worker: of each epoch, the batches that it got.

    It has no length: Lightning then asks for one batch ahead, to know which is an epoch's last.

    Args:
        worker: takes items from the pool.
        clusters: makes them batches.
        epoch: returns the number of the epoch that is asked for, and whether it is the last.
    """

    def __init__(self, worker: Worker, clusters: Clusters, epoch: Callable[[], tuple[int, bool]]) -> None:
        self._worker, self._clusters, self._epoch = worker, clusters, epoch
        self._held: list[int] = []
        self._given: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[Data]:
        epoch, last = self._epoch()
        self._given.clear()
        # Taken, and not trained on: they belong to a later epoch, or the last was left early.
        waiting = deque(self._held)
        while True:
            if waiting:
                item: int | None = waiting.popleft()
            elif (item := self._worker.take()) is not None:
                self._held.append(item)
            if item is None:
                break
            if item // self._clusters.batches > epoch:
                return
            self._given.append([item])
            yield self._clusters.batch(self._clusters.of_item(item))
        if last and self._worker.size > 1:
            yield LeftOver()

    def left_over(self) -> Data | None:
        """Returns a batch of all clusters that nobody will do else; None once all is done."""
        self._held += (items := self._worker.left_over())
        if not items:
            return None
        self._given.append(items)
        return self._clusters.batch(sorted({cluster for item in items for cluster in self._clusters.of_item(item)}))

    def trained(self) -> None:
        """Says that the batch that was given first is done."""
        for item in self._given.popleft():
            self._worker.done(item)
            self._held.remove(item)

    def give_back(self) -> None:
        """Leaves what was taken and not done to others."""
        for item in self._held:
            self._worker.give_back(item)
        self._held.clear()


class _Hooks(pl.Callback):
    """Tells the strategy where the loop is."""

    def __init__(self, strategy: ClusterStrategy) -> None:
        self._strategy = strategy

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.enable_validation:
            rank_zero_info(
                "Validation during fit is approximate: each worker validates its own weights, on clusters without the edges "
                "between them. trainer.validate and trainer.test, after fit, are exact."
            )

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self._strategy._batches is not None
        self._strategy._batches.trained()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._strategy._epoch_ended()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._strategy._worker is not None
        self._strategy._worker.leave(self._strategy._vector, for_good=False)  # nobody shall wait meanwhile

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._strategy._worker is not None
        self._strategy._worker.come_back()
        self._strategy._validated(trainer)


def _load(weights: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(weights), weights_only=True)


def _mean(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the mean of weights; of what is no floating-point tensor, the first."""
    first = states[0]
    return {
        name: torch.stack([state[name] for state in states]).mean(0)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in first.items()
    }
