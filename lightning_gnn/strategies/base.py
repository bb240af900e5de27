"""GNNStrategy: launching, groups, loss weighting, gradient sums; the communication scheme is a replaceable part."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch_geometric.data import Data
from typing_extensions import override

from lightning_gnn.arguments import check_flags, check_numbers, is_one_of, shown
from lightning_gnn.callbacks.communication import CommunicationMetrics
from lightning_gnn.callbacks.loggers import log_config, log_files, uploads
from lightning_gnn.checkpoints import WholeCheckpointIO
from lightning_gnn.checks.footprint import memory_of
from lightning_gnn.comm.codec import CodecName, make_codec
from lightning_gnn.comm.group import World, wait_for_all
from lightning_gnn.comm.processes import here
from lightning_gnn.comm.replicas import Replicas
from lightning_gnn.comm.rows import EmbeddingRows
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.hetero import NO_TYPES
from lightning_gnn.data.shards import Shard
from lightning_gnn.data.sources import MASKS, counted_mask
from lightning_gnn.datamodules.graph import GraphDataModule, OneBatch, check_fits
from lightning_gnn.kernels.warm_up import warm_up
from lightning_gnn.launching import StartMethod, make_launcher
from lightning_gnn.nn.bind import Binding, check_module
from lightning_gnn.nn.embedding import DistributedEmbedding, embeddings_of
from lightning_gnn.nn.fused import kernel_groups
from lightning_gnn.nn.helpers import graph_in_use, labelled
from lightning_gnn.nn.offload import Offloaded
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.types import Types
from lightning_gnn.steps.gathering import gather_rows
from lightning_gnn.steps.gradients import GradientSum
from lightning_gnn.steps.logs import GlobalLogs
from lightning_gnn.steps.predictions import PredictedRows, Predictions
from lightning_gnn.steps.random_streams import RandomStreams
from lightning_gnn.steps.step_loss import loss_in_outputs
from lightning_gnn.strategies.heap import keeping_freed_memory
from lightning_gnn.strategies.memory import check_memory, check_own_memory
from lightning_gnn.strategies.run_config import part_sizes, partition_report, run_config
from lightning_gnn.strategies.scheme import Scheme
from lightning_gnn.strategies.self_checks import SelfChecks

MOST_SECONDS = 10**8
"""Three years; torch counts deadlines in milliseconds, in 64 bits of nanoseconds in places."""


class GNNStrategy(ParallelStrategy):
    """Trains any PyG model, unchanged, on one graph over several ranks, with the numbers of one device.

    Every node has one owner. A rank's batch holds the rows that it owns; its loss is weighted by its share of the
    stage's labelled nodes, and gradients are summed over ranks, so that a mean over ``batch.train_mask`` is the mean over
    all training nodes.

    Args:
        scheme: how rows travel between ranks.
        start_method: how ranks are started: ``"popen"`` runs the script once per rank, ``"spawn"`` and ``"fork"`` start
            processes that run the Trainer's call only. Raise it to ``"fork"`` in notebooks. Under ``torchrun`` and SLURM
            ranks are there already.
        loss_reduction: ``"mean"`` if the step's loss is a mean over the labelled nodes of the stage's mask, ``"sum"`` if it
            is a sum. A step that takes a mean over something else returns ``{"loss": loss, "loss_weight": count}``.
        predictions: what ``trainer.predict`` returns for tensors with one row per node or per edge: ``"all"`` all rows in
            original order on every rank, ``"rank0"`` the same on rank 0 only, ``"shards"`` each rank's own rows
            (``batch.n_id`` and ``batch.e_id`` tell which).
        shared_memory: let CPU ranks on one machine exchange through shared memory; sockets otherwise.
        timeout: seconds after which a wait for another rank is an error that names operation, layer and rank; ranks that have
            taken different ways are told before (docs/errors.md, "When a run hangs").
        self_check: before a stage starts, run its step on a small random graph, whole and split in two, and refuse a
            model that gives other numbers on the parts.
        keep_memory: let CPU ranks keep what a step frees for the next one instead of giving it back to the system: faster
            steps, somewhat more memory.
        codec: send rows in fewer bytes in training steps, approximately: as ``"int8"``, ``"int4"`` or ``"int2"`` between a row's
            least and largest entry, as ``"bfp8"`` or ``"bfp4"`` around 0, or as ``"bf16"``;
            exactly in the last epoch. None sends them as they are. Set it where the
            network is what you wait for (docs/codecs.md).
        stochastic_rounding: let the codec round up or down at random, so that its errors are 0 in the mean.
        recompute: let each conv keep its arguments only, and make the rest again in the backward, where halo rows are fetched
            once more, as in SAR: less memory, more time and bytes, the same numbers (docs/memory.md). Full-graph strategies.
        offload: keep what layers leave for the backward in the host's memory, for ranks on CUDA devices. CPU ranks have it
            there already, and warn. Full-graph strategies; not tried on CUDA so far.
    """

    strategy_name = "gnn"
    no_stage_because = ""
    """Why it cannot be a stage of :class:`~lightning_gnn.StagedStrategy`; empty if it can."""
    trains_on_batches = False
    """An epoch has many steps, on parts of the graph; else one step, on all of it."""

    @classmethod
    def variants(cls, ranks: int, links_alike: bool = True) -> Iterable[Mapping[str, Any]]:
        """Returns arguments under which ``lightning-gnn advise`` compares the strategy with others, if it can run so.

        Args:
            ranks: how many.
            links_alike: between all of them; else plans over relays may be worth a look.
        """
        return [{}]

    def __init__(
        self,
        scheme: Scheme,
        start_method: StartMethod = "popen",
        loss_reduction: Literal["mean", "sum"] = "mean",
        predictions: Predictions = "all",
        shared_memory: bool = True,
        timeout: float = 1800.0,
        self_check: bool = True,
        keep_memory: bool = True,
        codec: CodecName | None = None,
        stochastic_rounding: bool = False,
        recompute: bool = False,
        offload: bool = False,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        if start_method is None or not is_one_of(start_method, get_args(StartMethod)):
            raise ValueError(f"start_method must be 'popen', 'spawn' or 'fork' (got {shown(start_method)}).")
        if not is_one_of(loss_reduction, ("mean", "sum")):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum' (got {loss_reduction!r}).")
        if not is_one_of(predictions, ("all", "rank0", "shards")):
            raise ValueError(f"predictions must be 'all', 'rank0' or 'shards' (got {predictions!r}).")
        check_numbers(timeout=timeout)
        if not 0 < timeout <= MOST_SECONDS:
            raise ValueError(f"timeout is a number of seconds above 0, at most {MOST_SECONDS:,} (got {timeout}).")
        check_flags(
            shared_memory=shared_memory,
            self_check=self_check,
            keep_memory=keep_memory,
            stochastic_rounding=stochastic_rounding,
            recompute=recompute,
            offload=offload,
        )
        make_codec(codec, stochastic_rounding)
        if codec is not None and scheme.takes_no_codec:
            raise ValueError(f"codec={codec!r} encodes the rows that ranks send each other. {scheme.takes_no_codec}")
        if (recompute or offload) and scheme.keeps_layers:
            raise ValueError(f"{'recompute' if recompute else 'offload'}=True is of no use. {scheme.keeps_layers}")
        if recompute and stochastic_rounding:
            raise ValueError(
                "recompute=True fetches rows again in the backward, and stochastic_rounding=True would round them otherwise than "
                "in the forward. Leave one of them out."
            )
        self.scheme = scheme
        self.codec, self.stochastic_rounding = codec, stochastic_rounding
        self.recompute, self.offload = recompute, offload
        self.loss_reduction, self.predictions = loss_reduction, predictions
        self.shared_memory = shared_memory
        self.timeout = timedelta(seconds=timeout)
        self.self_check, self.keep_memory = self_check, keep_memory
        self.num_nodes = 1
        self.meter = Meter()
        self._start_method: StartMethod = start_method
        self._world: World | None = None
        self._places: Counter[str] = Counter()
        self._shard: Shard | None = None
        self._binding: Binding | None = None
        self._logs: GlobalLogs | None = None
        self._gradients: GradientSum | None = None
        self._replicas: Replicas | None = None
        self.random: RandomStreams | None = None
        self.loss: Tensor | None = None  # of all ranks, after the step's backward
        self._owners: EmbeddingRows | None = None
        self._callbacks: list[pl.Callback] = []
        self._loss_scale = 1.0
        self._in_use = ExitStack()
        self._steps = 0
        self._checks = SelfChecks(self)
        self._versions: dict[str, int] = {}
        self._goes_on = False
        self._saved: Mapping[str, Any] | None = None

    # Devices and processes ####################################################

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Tells Lightning that ranks may differ in what they log."""
        return True

    @property
    def approximation(self) -> str:
        """What makes training differ from that of one device, in a few words; empty if nothing does."""
        return ", ".join(filter(None, [self.scheme.approximation, f"codec {self.codec}" if self.codec else ""]))

    def layout(self) -> LayoutSpec:
        """Returns what the datamodule must give each rank."""
        return self.scheme.layout(self.world_size, self.num_nodes)

    @override
    def _configure_launcher(self) -> None:
        if any(device.type == "mps" for device in self.parallel_devices or []):
            raise ValueError(
                f"{type(self).__name__} cannot use MPS devices, which exchange nothing among processes. "
                'Use Trainer(accelerator="cpu").'
            )
        self._launcher = make_launcher(self, self._start_method)

    def set_world_ranks(self) -> None:
        """Tells the environment which rank this is; called by Lightning before and after ranks are started."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for decorator in (rank_zero_only, fabric_rank_zero_only):
            decorator.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        here().at("set-up")
        super().setup_environment()
        self.set_world_ranks()
        expected = self.num_nodes * self.num_processes
        if self.world_size != expected:
            raise RuntimeError(
                f"The Trainer asks for num_nodes={self.num_nodes} x devices={self.num_processes} = {expected} ranks, but "
                f"{type(self.cluster_environment).__name__} says that there are {self.world_size}. "
                f"{_how_to_start(self.cluster_environment, self.num_nodes, self.num_processes)}"
            )
        environment = self.cluster_environment
        assert environment is not None
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        self._world = World(self.global_rank, self.world_size, self.root_device, self.timeout, self.shared_memory)

    @property
    def world(self) -> World:
        """All ranks; there between ``setup_environment`` and ``teardown``."""
        if self._world is None:
            raise RuntimeError("The strategy's ranks are connected during fit, validate, test and predict only.")
        return self._world

    @property
    def gradient_seconds(self) -> tuple[float, float]:
        """Seconds spent after backwards on sums of gradients until now, and of these in collectives."""
        total = self._gradients
        return (0.0, 0.0) if total is None else (total.seconds, total.collective_seconds)

    # Set-up and teardown ######################################################

    def before_ranks_start(self, trainer: pl.Trainer | None, given: Sequence[Any], self_check: bool = True) -> None:
        """Finds what is wrong while there is one process only; called by launchers in the process that starts the ranks.

        Args:
            trainer: whose call it is.
            given: the arguments of the call.
            self_check: whether the self-check may run here.
        """
        if trainer is None or self.world_size == 1:
            return
        module = next((value for value in given if isinstance(value, pl.LightningModule)), trainer.lightning_module)
        data = next((value for value in given if isinstance(value, pl.LightningDataModule)), None)
        data = self._check_data(data or getattr(trainer, "datamodule", None))
        if module is None:
            return  # Lightning says so
        layout = self.layout()
        if not layout.takes_types:  # else the graph decides what the model may be
            check_module(module)
        data.prepare_for(layout)
        types = data.stored_cut().types
        check_fits(module, types)
        self._check_model(module, types)
        if types.is_hetero:
            return
        self._warm_up(module, trainer)
        check_memory(self, data, module, trainer)
        if self_check:
            self._checks.ahead(module, data.stored_cut(), trainer)

    def _warm_up(self, module: pl.LightningModule, trainer: pl.Trainer) -> None:
        if self.root_device.type != "cpu":
            return
        dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        if "bf16" in str(trainer.precision):
            dtypes.add(torch.bfloat16)
        groups = kernel_groups(module) | ({"codes"} if self.codec is not None else set())
        seconds = warm_up(groups, dtypes)
        if seconds:
            rank_zero_info(f"Compiled in {seconds:.1f} s")

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True converts BatchNorm to a layer that averages over ranks, not over nodes. "
                "Set sync_batchnorm=False."
            )
        shard = self._shard = self._take_shard(trainer)
        self._check_model(module, shard.types)
        if not shard.types.is_hetero:
            # One rank of a machine compiles, and the others load what it has kept.
            if self.local_rank == 0:
                self._warm_up(module, trainer)
            self.world.barrier()
            if self.local_rank != 0:
                self._warm_up(module, trainer)
            self._checks.before_stage(module, shard, trainer)
            check_own_memory(self, trainer, shard)
        super().setup(trainer)
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError("LBFGS decides by the loss of one rank how far to step. Use Adam, AdamW or SGD.")
        self.world.broadcast_tensors_([*module.parameters(), *module.buffers()])
        self.random = self.random or RandomStreams(self.world)  # else those of the stage before
        codec = make_codec(self.codec, self.stochastic_rounding, self.random.seed)
        if codec is not None:
            self.world.use_codec(codec)

        self._in_use = ExitStack()
        if not shard.types.is_hetero:
            shard.batch.to(self.root_device)
            if self.offload and self.root_device.type == "cpu":
                rank_zero_warn(
                    "offload=True moves what layers leave for the backward to the host's memory, where CPU ranks have it "
                    "already: nothing changes. recompute=True takes less."
                )
            self._distribute_embeddings(module, shard)
            self._binding = self.bind(self.scheme, module, shard, self.world, self.meter)
            self._in_use.enter_context(graph_in_use(self._binding.context))
            if self.world_size > 1:
                self._in_use.enter_context(_without_example(module))
            self._versions = {
                name: shard.batch[name]._version
                for name in ("y", *shard.mask_counts)
                if shard.batch.get(name) is not None
            }
        self._steps = 0
        self._gradients = GradientSum(self.world, module.parameters)
        self._replicas = Replicas(self.world, self._replicated)
        self._logs = GlobalLogs(module, self.world, trainer.callbacks)  # type: ignore[attr-defined]
        metrics = CommunicationMetrics(self.meter, self.world, part_sizes(shard), self._replicas)
        self._callbacks = [metrics, self._noting(), self._checks, *self.scheme.callbacks(self.world)]
        trainer.callbacks[:0] = self._callbacks  # type: ignore[attr-defined]
        self._in_use.enter_context(loss_in_outputs(trainer, lambda: self.loss))
        self._log_plan(trainer, shard)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        goes_on, self._goes_on = self._goes_on, False
        if not goes_on:
            super().setup_optimizers(trainer)

    def run_like(self, other: GNNStrategy) -> None:
        """Takes devices, processes and plugins, as a Trainer has given them to another strategy."""
        for name in ("_accelerator", "_checkpoint_io", "_precision_plugin", "_launcher", "_layer_sync", "num_nodes"):
            setattr(self, name, getattr(other, name))
        self.parallel_devices, self.cluster_environment = other.parallel_devices, other.cluster_environment

    def check_ahead(self, trainer: pl.Trainer, before: GNNStrategy) -> None:
        """Refuses what :meth:`setup` would refuse later; on all ranks, while those of another strategy are connected."""
        assert before.lightning_module is not None
        self.connect(before.lightning_module)
        data = self._check_data(getattr(trainer, "datamodule", None))
        types = data.shard.types
        if types.is_hetero and not self.layout().takes_types:
            raise ValueError(NO_TYPES)
        self._check_model(before.lightning_module, types)
        if not types.is_hetero:
            self._world = before.world
            try:
                self._checks.ahead_of_stage(before.lightning_module, data.shard, trainer)
            finally:
                self._world = None

    def take_over(self, other: GNNStrategy, random: RandomStreams | None) -> None:
        """Goes on with model, optimizers and schedulers of another strategy, which has been torn down, and its checkpoint.

        Args:
            other: the strategy.
            random: its random numbers.
        """
        assert other.lightning_module is not None
        self.connect(other.lightning_module)
        self._saved, other._saved = other._saved, None
        self.random = random
        self.optimizers, self.lr_scheduler_configs = other.optimizers, other.lr_scheduler_configs
        other.optimizers, other.lr_scheduler_configs = [], []
        self._goes_on = True

    def bind(self, scheme: Scheme, module: torch.nn.Module, shard: Shard, world: World, meter: Meter) -> Binding:
        """Returns the module bound as this strategy has it."""
        binding = scheme.bind(module, shard, world, meter)
        if self.recompute:
            binding.recompute()
        return binding

    def _check_model(self, module: torch.nn.Module, types: Types) -> None:
        """Raises :class:`UnsupportedModelError` for a model that cannot run on such a graph; on every rank."""
        check_module(module)

    def _distribute_embeddings(self, module: pl.LightningModule, shard: Shard) -> None:
        """Leaves rows of embeddings to the owners of their nodes."""
        embeddings = embeddings_of(module, sum(shard.counts))
        if not embeddings:
            return
        if len(self.optimizers) > 1:
            raise ValueError(
                f"DistributedEmbedding steps when the optimizer has stepped, but there are {len(self.optimizers)} optimizers. "
                "Give one that has all parameters."
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "precision='16-mixed' scales the loss, and DistributedEmbedding would learn from scaled gradients. "
                "Use precision='bf16-mixed' or 32."
            )
        if self.world_size > 1:
            batch_ids = shard.batch.n_id if shard.rows == shard.counts else None
            self._owners = EmbeddingRows(self.world, shard.n_id, shard.counts, batch_ids)
            for each in embeddings:
                each.distribute(self._owners)

    def _release_embeddings(self) -> None:
        if self._owners is not None:
            assert self.lightning_module is not None
            self._owners.close()
            for each in embeddings_of(self.lightning_module, self._owners.num_nodes):
                each.release()
            self._owners = None

    def _take_shard(self, trainer: pl.Trainer) -> Shard:
        shard = self._check_data(getattr(trainer, "datamodule", None)).shard
        digests = self.world.all_gather_object(shard.digest)
        if len(set(digests)) > 1:
            raise RuntimeError(
                f"The ranks hold parts of different partitions (digests {digests}): machines with stores of their own have "
                "partitioned differently. Put the store on a file system that all share, GraphDataModule(store=...)."
            )
        self._log_run(trainer, shard)
        return shard

    def _log_run(self, trainer: pl.Trainer, shard: Shard) -> None:
        """Tells the loggers what is trained, on which parts of which graph."""
        log_config(trainer, run_config(self, shard))
        if trainer.is_global_zero and trainer.state.fn == TrainerFn.FITTING and self.world_size > 1:
            log_files(trainer, "partition", partition_report(shard, uploads(trainer)))

    def _log_plan(self, trainer: pl.Trainer, shard: Shard) -> None:
        """Tells the loggers what rows follow in this run."""
        followed = self.scheme.followed()
        if followed:
            log_config(trainer, {"plan": followed})
        if trainer.is_global_zero and trainer.state.fn == TrainerFn.FITTING and uploads(trainer):
            picture = self.scheme.picture(shard)
            if picture is not None:
                log_files(trainer, "plan", {"plan.json": json.dumps(followed, indent=1) + "\n", "plan.png": picture})

    def _check_data(self, data: Any) -> GraphDataModule:
        if not isinstance(data, GraphDataModule):
            given = "no datamodule" if data is None else type(data).__name__
            raise ValueError(
                f"{type(self).__name__} needs a graph that it can split (got {given}). "
                "Pass datamodule=GraphDataModule(your_dataset) to fit, validate, test or predict."
            )
        return data

    def checked_stages(self, trainer: pl.Trainer) -> Sequence[str]:
        """Returns the stages whose steps must give the numbers of one device in what the Trainer does now."""
        assert trainer.state.fn is not None
        return ("fit", "validate") if trainer.state.fn == TrainerFn.FITTING else (trainer.state.fn.value,)

    @contextmanager
    def unbound(self) -> Iterator[None]:
        """While open, the module is as its user made it."""
        module = self.lightning_module
        assert module is not None and self._logs is not None
        self._logs.release()
        if self._binding is not None:
            self._binding.release()
        try:
            yield
        finally:
            if self._binding is not None:
                self._binding.bind()
            self._logs = GlobalLogs(module, self.world, module.trainer.callbacks)  # type: ignore[attr-defined]

    def _replicated(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what must be the same on all ranks, by name."""
        module = self.lightning_module
        assert module is not None
        own_rows = {
            id(each)
            for part in module.modules()
            if isinstance(part, DistributedEmbedding)
            for each in part.parameters()
        }
        yield from (named for named in module.named_parameters() if id(named[1]) not in own_rows)
        yield from module.named_buffers()

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def teardown(self) -> None:
        trainer = getattr(self.lightning_module, "_trainer", None)
        if trainer is not None:
            for callback in self._callbacks:
                trainer.callbacks.remove(callback)
        self._in_use.close()
        self._release_embeddings()
        for part in (self._logs, self._gradients, self._binding):
            if part is not None:
                part.release()
        self._callbacks = []
        self._logs = self._binding = self._gradients = self._shard = None
        self._replicas = self.random = self.loss = None
        self._checks.release()
        self.scheme.unbind()
        super().teardown()
        if self._world is not None:
            self._world.close()
            self._world = None
        here().at("")

    # Steps ####################################################################

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._steps += 1
        # From the second on: the first frees much that no later one needs.
        if self._steps == 2 and self.keep_memory and self.root_device.type == "cpu":
            self._in_use.enter_context(keeping_freed_memory())
        self.loss = None
        counts = self._enter(batch, "train_mask", "training")
        assert self._logs is not None
        self._loss_scale = self._logs.scale(self.loss_reduction)  # for manual_backward, inside the step
        rows = self._checks.rows_of_loss(batch, counted_mask("train_mask", self.lightning_module), counts)
        with self._drawing(), self._approximating(), self._offloading(batch):
            output = super().training_step(batch, *args, **kwargs)
        assert self.lightning_module is not None
        if output is None and self.lightning_module.automatic_optimization:
            raise ValueError("training_step returned None. To skip a step on all ranks alike, return a loss times 0.")
        self._loss_scale = self._logs.leave(output, self.loss_reduction)
        if rows is not None:
            again = super().training_step
            with self._drawing(), self._approximating():
                rows.check(output, self._loss_scale, lambda same: again(same, *args, **kwargs))
        return output

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._enter(batch, "val_mask", "validation")
        with self._drawing():
            output = super().validation_step(batch, *args, **kwargs)
        self._leave(output)
        return output

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._enter(batch, "test_mask", "test")
        with self._drawing():
            output = super().test_step(batch, *args, **kwargs)
        self._leave(output)
        return output

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._shard is not None
        self._begin_step("prediction")
        with self._drawing():
            output = super().predict_step(batch, *args, **kwargs)
        rows_of = batch if isinstance(batch, Data) else self._shard.batch
        return PredictedRows(self.world, self._shard, rows_of, self.predictions)(output)

    def _drawing(self, step: bool = True) -> AbstractContextManager[None]:
        """While open, random numbers are those of a step, or those of a hook within one."""
        return nullcontext() if self.random is None else self.random.inside(step)

    def _enter(self, batch: Any, mask: str, stage: str) -> Sequence[int]:
        """Tells logs and metrics what this rank's values weigh in this step; returns the mask's labelled rows by rank."""
        assert self._shard is not None and self._logs is not None
        self._begin_step(stage)
        mask = counted_mask(mask, self.lightning_module)
        counts = self._counts(batch, mask)
        empty = not counts[self.global_rank] and mask in MASKS
        shard, rank = self._shard, self.global_rank
        sizes = shard.counts[rank], shard.rows[rank], shard.edge_counts[rank], shard.edges[rank]
        self._logs.enter(counts, self._stand_ins(batch, mask) if empty else 0, sizes)
        return counts

    def _leave(self, output: Any) -> None:
        """Logs what a step that returned `output` has logged."""
        assert self._logs is not None
        self._logs.leave(output)

    def _begin_step(self, stage: str) -> None:
        self._places[stage] += 1
        self.world.watch.place = f"{stage} step {self._places[stage]}"
        self._now_in("forward" if stage == "training" else stage)
        if self._binding is not None:  # none where a step takes its batch as it is
            self._binding.context.begin_step()

    def _now_in(self, phase: str) -> None:
        """Notes where this rank is, for those that ask once it has ended."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        phase = "the sanity check" if trainer.sanity_checking else phase
        here().at(phase, trainer.current_epoch if trainer.state.fn == TrainerFn.FITTING else None)

    def _noting(self) -> pl.Callback:
        """Returns a callback that notes where this rank is between steps."""
        return LambdaCallback(
            on_train_epoch_start=lambda *_: self._now_in("the epoch's start"),
            on_train_epoch_end=lambda *_: self._now_in("the epoch's end"),
        )

    def _stand_ins(self, batch: Any, mask: str) -> int:
        """Returns the rows in the mask of a rank that has no labelled node of it."""
        return int(batch[mask].sum())

    def _counts(self, batch: Any, mask: str) -> Sequence[int]:
        """Returns how many labelled nodes, or edges, of the mask each rank has in this step."""
        assert self._shard is not None
        counts = self._shard.mask_counts[mask]
        if not self._untouched(batch, mask):  # changed by the user, in a hook or a transform
            own = int(labelled(batch, mask).sum() if mask in MASKS else batch[mask].sum())
            counts = tuple(self.world.all_gather_object(own))
        return counts

    def _untouched(self, batch: Any, mask: str) -> bool:
        """Returns whether a mask and the labels are those that were counted, neither replaced nor changed in place."""
        assert self._shard is not None
        own = self._shard.batch
        labels = ("y",) if mask in MASKS and own.get("y") is not None else ()
        return all(
            batch[name] is own[name] and self._versions.get(name) in (None, own[name]._version)
            for name in (mask, *labels)
        )

    def _approximating(self) -> AbstractContextManager[None]:
        """Rows may travel approximately while this is open, except in the last epoch: what it learns is exact."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        return self.world.wire.coding(trainer.current_epoch + 1 != trainer.max_epochs)

    def _offloading(self, batch: Any) -> AbstractContextManager[Any]:
        """What layers leave for the backward lies on the host, where the strategy has it so."""
        if not self.offload or self.root_device.type == "cpu" or self._binding is None:
            return nullcontext()
        assert self.lightning_module is not None
        return Offloaded(memory_of(self._binding.context, batch, list(self.lightning_module.parameters())))

    # Loss and gradients #######################################################

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # As Lightning's, but gradients are summed before on_after_backward, which precision.post_backward calls, and
        # on_before_backward is given the loss as the step returned it.
        self._now_in("backward")
        gradients, module, precision = self._gradients, self.lightning_module, self.precision_plugin
        assert gradients is not None and module is not None
        with self._drawing(False):  # hooks draw alike on all ranks, in manual optimisation too
            self.pre_backward(closure_loss)
            loss = precision.pre_backward(closure_loss, module)
        gradients.before()
        self.scheme.hear_loss(closure_loss.detach() * self._loss_scale)
        with self._approximating():
            precision.backward(loss * self._loss_scale, module, optimizer, *args, **kwargs)
        with self._drawing(False):
            self.loss = gradients.after(closure_loss.detach() * self._loss_scale)
            loss = precision.post_backward(loss, module)
            self.post_backward(loss)
        self._now_in("the optimizer's step")
        return loss

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._drawing(False):
            return super().optimizer_step(*args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator:
        """Leaves gradients unsummed while open: those of an accumulation are summed once, at its end."""
        assert self._gradients is not None
        with self._gradients.blocked():
            yield None

    # Collectives that Lightning asks for ######################################

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Returns the mean over ranks, by the labelled rows of the stage's mask as in logs, or the sum, as `reduce_op` says."""
        if not isinstance(tensor, Tensor):
            return tensor
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if is_mean and self._logs is not None and self.world.size > 1 and group in (None, self.world.everyone):
            return self._logs.weights.mean(tensor, "A mean over ranks")
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensors of all ranks, which may have different numbers of rows; see
        :func:`~lightning_gnn.steps.gathering.gather_rows`."""
        if self._world is None or self._world.size == 1:
            return tensor
        if group not in (None, self.world.everyone):
            return super().all_gather(tensor, group, sync_grads)
        return gather_rows(tensor, self.world, None if self._logs is None else self._logs.weights, sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._world is not None:
            self._world.barrier(f"Barrier {name}" if name else "Barrier")
        elif self.world_size > 1:  # after fit: others read what rank 0 writes
            wait_for_all(self.global_rank, self.world_size, self.timeout)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._world is None else self._world.broadcast_object(obj, src)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if not isinstance(dataloader, OneBatch) and dataloader != []:  # nothing, where no node is in the mask
            raise ValueError(
                f"{type(self).__name__} trains on its rank's part of the graph and cannot use a {type(dataloader).__name__}. "
                "Pass datamodule=GraphDataModule(...) in place of dataloaders."
            )
        return dataloader

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.world.watch.place = "end of training"
        # Ranks that come here from another number of steps are told so, and do not wait for those that still train.
        assert self._replicas is not None
        digests = self.world.all_gather(self._replicas.digest(), "End of training")
        self._replicas.check(digests, "At the end of training")
        if self._owners is not None:
            assert self.lightning_module is not None
            for each in embeddings_of(self.lightning_module, self._owners.num_nodes):
                each.collect()

    # Checkpoints ##############################################################

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """Ours, unless ``Trainer(plugins=...)`` names another; under a wrapper, such as AsyncCheckpointIO, too."""
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeCheckpointIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = WholeCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        kept: dict[str, Any] = {"scheme": self.scheme.state_dict()}
        if self._world is not None and self.world_size > 1 and self.random is not None:
            kept["common_random_state"], own = self.random.state()
            kept["random_states"] = list(self.world.all_gather(own.to(self.root_device)).cpu())
        checkpoint["lightning_gnn"] = kept
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._saved = checkpoint.get("lightning_gnn")
        return checkpoint

    @override
    def on_train_start(self) -> None:
        state, self._saved = self._saved, None
        if state is None:
            return
        self.scheme.load_state_dict(state.get("scheme", {}))
        random_states = state.get("random_states", [])
        if len(random_states) == self.world_size and "common_random_state" in state and self.random is not None:
            self.random.load(state["common_random_state"], random_states[self.global_rank])


@contextmanager
def _without_example(module: pl.LightningModule) -> Iterator[None]:
    """While open, a module that is bound to its part of the graph has no ``example_input_array``, which is a graph of its own:
    summaries leave sizes out."""
    given, module._example_input_array = module._example_input_array, None
    try:
        yield
    finally:
        module._example_input_array = given


def _how_to_start(environment: ClusterEnvironment | None, machines: int, ranks: int) -> str:
    """Returns what to type so that there are as many ranks as the Trainer asks for."""
    kind = type(environment).__name__
    if kind == "SLURMEnvironment":
        return (
            f"In the batch script write `#SBATCH --nodes={machines}` and `#SBATCH --ntasks-per-node={ranks}`, and start with "
            "`srun python script.py`; or change devices and num_nodes."
        )
    if kind == "TorchElasticEnvironment":
        return f"Start with `torchrun --nnodes {machines} --nproc-per-node {ranks} script.py`, or change devices and num_nodes."
    return "Start as many processes, or change devices and num_nodes."
