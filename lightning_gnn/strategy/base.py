"""`GNNStrategy`: base class of all strategies; the communication scheme is a replaceable part."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gnn.arguments import check_choice, check_flags, quote
from lightning_gnn.callbacks.communication import CommunicationMetrics
from lightning_gnn.callbacks.loggers import log_config
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Cut, Shard
from lightning_gnn.datamodules.graph import GraphDataModule, GraphLoader, check_fits, check_links
from lightning_gnn.heap import StepMemory
from lightning_gnn.kernels.warm_up import warm_up
from lightning_gnn.launching import StartMethod
from lightning_gnn.lightning_packages import check_callbacks, is_instance
from lightning_gnn.nn.convs import kernel_groups
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.private_lightning import reduce_over
from lightning_gnn.registry import codecs, feature, out_of_core, transport_wrappers
from lightning_gnn.rows.graph import whole_value
from lightning_gnn.rows.mode import active_mode, local_rows, place, placement_of
from lightning_gnn.rows.placement import FROM_ROWS
from lightning_gnn.steps.gradients import SharedModel
from lightning_gnn.steps.predictions import Predictions
from lightning_gnn.steps.weights import gather_rows
from lightning_gnn.strategy.checks import Checks, Run, RunChecks
from lightning_gnn.strategy.graph_kinds import check_for_layout, check_model
from lightning_gnn.strategy.ranks import MeshShape, RankStrategy
from lightning_gnn.strategy.run_config import log_run, part_sizes
from lightning_gnn.strategy.scheme import EdgeCutScheme, Scheme, bind_module
from lightning_gnn.strategy.steps import NoSteps, Steps


def refuse_options(options: Mapping[str, Any], names: Sequence[str], because: str) -> None:
    """Raises ValueError if an option is set that the scheme does not support.

    Args:
        options: options of the strategy by name; None and False count as not set.
        names: unsupported options.
        because: end of the error message: the reason and a fix.
    """
    for name in names:
        if options.get(name) not in (None, False):
            raise ValueError(f"{name}={options[name]!r} is not supported. {because}")


class GNNStrategy(RankStrategy):
    """Base strategy: trains an unmodified PyG model on one graph over several ranks, with the results of one device.

    Every node has one owner. A rank's batch contains its local nodes. Inside a full-graph step, a tensor of local rows stands for
    the tensor of all rows (docs/rows.md). Gradients are summed over ranks.

    Args:
        scheme: communication scheme: the layout and the exchange.
        start_method: launcher of the ranks. ``"popen"`` runs the script once per rank. ``"spawn"`` and ``"fork"`` start processes
            that run only the call of the Trainer. Use ``"fork"`` in notebooks. Under ``torchrun`` and SLURM the ranks already
            run.
        predictions: return value of ``trainer.predict`` for tensors with one row per node or edge. ``"all"``: all rows in the
            original order, on every rank. ``"rank0"``: all rows on rank 0 only. ``"shards"``: the local rows of each rank, with
            the original ids in ``batch.n_id`` and ``batch.e_id``. ``"file"``: all rows, memory-mapped; each rank writes its rows
            to a ``.npy`` file in the folder ``predictions`` of the Trainer's ``default_root_dir``, which must be visible to all
            machines.
        shared_memory: whether CPU ranks of one machine exchange data through shared memory; otherwise they use sockets.
        timeout: seconds to wait for another rank before an error that names operation, layer and rank. Diverging ranks raise an
            error earlier (docs/errors.md, "When a run hangs").
        self_check: whether the step of a phase runs on a small random graph, unpartitioned and split in two, before the phase
            starts. Models whose results differ raise an error.
        reuse_buffers: whether CPU ranks keep the memory that a step frees for the next step instead of returning it to the
            system. Steps are faster and need more memory. Requires 3.5 times the memory of the first step; otherwise ignored.
        codec: lossy encoding of messages in training steps; the last epoch is exact. ``"int8"``, ``"int4"`` and ``"int2"``
            quantize between the least and largest entry of a row, ``"bfp8"`` and ``"bfp4"`` around 0; ``"bf16"`` rounds. None: no
            encoding. Use it where the network is the bottleneck (docs/codecs.md).
        stochastic_rounding: whether the codec rounds up or down at random, so that the mean of its errors is 0.
        cache_input_aggregation: whether the first layers cache the aggregation of the graph's input features, which is equal in
            every step. The cache takes at most four times the memory of the features. Without it, the aggregation is exchanged
            and computed in every step.
        checkpoint_convs: whether each conv stores only its arguments and is recomputed in the backward pass, where halo features
            are exchanged again, as in SAR. This takes less memory and more time and bytes, with equal results (docs/memory.md).
            Full-graph strategies only.
        memory_limit: memory limit of all ranks together, for several CPU ranks of one machine, in bytes or such as ``"4GB"``.
            Tensors beyond it are in files (docs/out-of-core.md), and `reuse_buffers` has no effect. None: no limit.
        spill_dir: folder of these files; needs `memory_limit`. Default: the Trainer's ``default_root_dir``.
        elastic: whether the other ranks continue when a rank is lost (docs/elastic.md).
        min_ranks: with `elastic`, least number of ranks that continue.
        balance: with `elastic`, whether nodes move from slow ranks to fast ranks while the model trains. Speeds are measured on
            CPU ranks, or given: the relative speed of each rank, such as ``[1.0, 0.5]``.
        graph_ranks: number of ranks that divide the graph; a value below the number of ranks requires `samples`. The number of
            ranks is a multiple, and data ranks of `graph_ranks` ranks each divide the samples of
            :class:`~lightning_gnn.GraphDataModule`. None: all ranks. ``"auto"``: the smallest number for which 1.2 times the
            predicted peak memory is free; requires ``global_batch_size``.
        **plugins: arguments of Lightning's ``ParallelStrategy``.
    """

    strategy_name = "gnn"
    equal_buffers = True
    """True if module buffers, like parameters, are equal on all ranks during training."""

    @classmethod
    def variants(cls, ranks: int, links_alike: bool = True) -> Iterable[Mapping[str, Any]]:
        """Returns the argument sets under which ``lightning-gnn advise`` compares the strategy; empty if it cannot run.

        Args:
            ranks: number of ranks.
            links_alike: whether all links between ranks are equal; if not, plans with relays may be faster.
        """
        return [{}]

    samples_unsupported_reason: str | None = None
    """Reason why the datamodule may not have samples; None if it may."""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """Reduction of the losses of mini-batch steps; a loss of a full-graph step is used unchanged."""
    dropout_seed_every_n_epochs = 1
    """Number of epochs whose training steps draw the same random numbers; with 1, each step continues the rank's stream."""
    trains_on_batches = False
    """True if an epoch has many mini-batch steps; False if it has one full-graph step."""

    def __init__(
        self,
        scheme: Scheme,
        start_method: StartMethod = "popen",
        predictions: Predictions = "all",
        shared_memory: bool = True,
        timeout: float = 1800.0,
        self_check: bool = True,
        reuse_buffers: bool = True,
        codec: str | None = None,
        stochastic_rounding: bool = False,
        cache_input_aggregation: bool = True,
        checkpoint_convs: bool = False,
        memory_limit: int | str | None = None,
        spill_dir: str | Path | None = None,
        elastic: bool = False,
        min_ranks: int = 1,
        balance: bool | Sequence[float] = False,
        graph_ranks: int | Literal["auto"] | None = None,
        **plugins: Any,
    ) -> None:
        if plugins:
            from lightning_gnn.old_names import check_argument_names

            check_argument_names(type(self), plugins)
        super().__init__(start_method, shared_memory, timeout, **plugins)
        check_choice("predictions", predictions, get_args(Predictions))
        check_flags(self_check=self_check, reuse_buffers=reuse_buffers, stochastic_rounding=stochastic_rounding)
        check_flags(cache_input_aggregation=cache_input_aggregation, checkpoint_convs=checkpoint_convs, elastic=elastic)
        if codec is not None or stochastic_rounding:
            codecs().make_codec(codec, stochastic_rounding)
        self.ranks = out_of_core(memory_limit, spill_dir, shared_memory) or self.ranks
        self.memory_limit, self.spill_dir = self.ranks.most_bytes, spill_dir
        if checkpoint_convs and stochastic_rounding:
            raise ValueError(
                "checkpoint_convs=True is not supported with stochastic_rounding=True: recomputed layers round differently. "
                "Remove one of them."
            )
        self.scheme = scheme
        self.codec, self.stochastic_rounding = codec, stochastic_rounding
        self.cache_input_aggregation, self.checkpoint_convs = cache_input_aggregation, checkpoint_convs
        self.predictions: Predictions = predictions
        self.self_check, self.reuse_buffers = self_check, reuse_buffers and memory_limit is None
        if graph_ranks is not None:
            feature("check_graph_ranks")(graph_ranks)
        self.graph_ranks, self.mesh_shape = graph_ranks, MeshShape(self, graph_ranks == "auto")
        if elastic:
            self.samples_unsupported_reason = "elastic=True continues full-graph runs only. Set elastic=False."
        elif memory_limit is not None:
            self.samples_unsupported_reason = "memory_limit pages one graph's features. Remove it; a smaller batch saves memory."
        self.meter = Meter()
        self.checks = Checks()
        self.steps: Steps = NoSteps()
        if balance is not False:
            feature("check_balance")(balance, elastic)
        if elastic:
            self.recovery = feature("Recovery")(self, min_ranks, balance)
        elif min_ranks != 1:
            raise ValueError(f"min_ranks={quote(min_ranks)} is supported with elastic=True only. Set elastic=True, or remove it.")
        self._saved: Mapping[str, Any] | None = None

    @property
    def approximation(self) -> str:
        """Short description of the differences from training on one device; empty if there are none."""
        return ", ".join(filter(None, [self.scheme.approximation, f"codec {self.codec}" if self.codec else ""]))

    def layout(self) -> LayoutSpec:
        """Returns the layout that the datamodule must provide."""
        return self.scheme.layout(self.mesh_shape.graph_ranks, self.mesh_shape.hosts)

    def checked_stages(self, trainer: pl.Trainer) -> Sequence[str]:
        """Returns the stages of the Trainer's current call whose steps must give the results of one device."""
        assert trainer.state.fn is not None
        return ("fit", "validate") if trainer.state.fn == TrainerFn.FITTING else (trainer.state.fn.value,)

    def binds(self, shard: Shard) -> bool:
        """Returns whether layers use the rank's part of the graph; otherwise steps use only their batches."""
        return True

    def check_model(self, module: torch.nn.Module, of: Shard | Cut) -> None:
        """Raises :class:`UnsupportedModelError` if the model cannot run on the graph; called on every rank."""
        check_model(module, of, self.checkpoint_convs)

    def check_data(self, data: Any) -> GraphDataModule:
        """Returns the datamodule of a run; raises ValueError if it is not a `GraphDataModule`."""
        if not isinstance(data, GraphDataModule):
            given = "no datamodule" if data is None else type(data).__name__
            raise ValueError(
                f"{type(self).__name__} needs a graph that it can split (got {given}). "
                "Pass datamodule=GraphDataModule(your_dataset) to fit, validate, test or predict."
            )
        if self.graph_ranks is not None:
            feature("check_mesh")(self, data.sample_data)
        return data

    def _run_for_checks(self, module: pl.LightningModule, trainer: pl.Trainer, data: GraphDataModule) -> Run:
        """Returns the description of the run for checks."""
        first, on_batches = self.global_rank - self.local_rank, self.trains_on_batches or data.has_samples
        of_call = type(self).__name__, self.scheme, module, trainer, self.checked_stages(trainer), on_batches
        options = self.self_check, self.cache_input_aggregation, self.checkpoint_convs
        ranks: Any = self.root_device, self.world_size, self.num_nodes, range(first, first + self.num_processes), self.layout()
        return Run(*of_call, *options, *(*ranks, data.sample_data and feature("SampleGraphs")(data, self.mesh_shape)))

    def before_ranks_start(self, trainer: pl.Trainer | None, arguments: Sequence[Any], self_check: bool = True) -> None:
        """Checks data, model and memory before ranks start; called by launchers in the process that starts the ranks.

        Args:
            trainer: Trainer of the call.
            arguments: arguments of the call.
            self_check: whether the self-check may run here.
        """
        if trainer is None or self.world_size == 1:
            return
        check_callbacks(trainer)
        module = next((value for value in arguments if is_instance(value, "LightningModule")), trainer.lightning_module)
        found = next((value for value in arguments if is_instance(value, "LightningDataModule")), None)
        data = self.check_data(found or getattr(trainer, "datamodule", None))
        if module is None:
            return  # Lightning raises an error
        if self.mesh_shape.is_auto and not feature("choose_ahead")(self, module, trainer, data):
            return
        if self.recovery is not None:
            self.recovery.check(trainer, module)
        layout = self.layout()
        if not layout.samples:  # otherwise the supported models depend on the graph
            check_for_layout(module, layout)
        if self.num_nodes > 1:
            return  # machines receive the graph only after their ranks have connected
        data.prepare_ahead(layout)
        cut = data.stored_cut()
        check_fits(module, cut)
        check_links(module, cut, layout.samples)
        self.check_model(module, cut)
        if not layout.reads_edges(cut.types):
            return
        self._warm_up(module, trainer)
        run = self._run_for_checks(module, trainer, data)
        if self.memory_limit is None:
            self.checks.memory_ahead(run, cut)
        if self_check:
            self.checks.check_ahead(run, cut)

    @override
    def _configure_launcher(self) -> None:
        if self.recovery is None:
            super()._configure_launcher()
        else:
            self.recovery.check_balance()
            self._launcher = feature("ElasticLauncher")(self)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.mesh_shape.is_auto:
            feature("agree_on_graph_ranks")(self)
        if self.recovery is not None:
            self.recovery.move_nodes()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self._module
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True converts BatchNorm to a layer that averages over ranks, not over nodes. "
                "Set sync_batchnorm=False."
            )
        check_callbacks(trainer)
        data = self.check_data(getattr(trainer, "datamodule", None))
        shard = data.shard
        log_run(self, trainer, shard)
        run = self._run_for_checks(module, trainer, data)
        self.checks.module_alike(run, self.world)
        self.check_model(module, shard)
        if self.binds(shard):
            # One rank of a machine compiles; the others load the compiled kernels from the cache.
            if self.local_rank == 0:
                self._warm_up(module, trainer)
            self.world.barrier()
            if self.local_rank != 0:
                self._warm_up(module, trainer)
            self.checks.before_stage(run, self.world, shard)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.checks.optimizers(run, self.world, data, self.optimizers, self.lr_scheduler_configs)
        self.begin_stage(trainer, shard)

    def _warm_up(self, module: pl.LightningModule, trainer: pl.Trainer) -> None:
        """Compile the kernels of layers, unless PyG's own code runs in all steps; then no stage is checked either."""
        if self.root_device.type != "cpu" or not self.checked_stages(trainer):
            return
        dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
        if "bf16" in str(trainer.precision):
            dtypes.add(torch.bfloat16)
        wrappers = [*transport_wrappers(), *([] if self.codec is None else [codecs().EncodingTransport])]
        seconds = warm_up(kernel_groups(module), dtypes, [each.warm_up for each in wrappers])
        if seconds:
            rank_zero_info(f"Compiled in {seconds:.1f} s")

    def begin_stage(self, trainer: pl.Trainer, shard: Shard) -> None:
        """Bind the model, which is on its device, and wrap the outputs of its steps; called on all ranks."""
        module, world, in_parts = self._module, self.world, self.binds(shard)
        samples = feature("SampleRun")(self, module, world, shard) if self._trainer.datamodule.has_samples else None
        steps = self.steps = Steps(trainer, world, self.ranks.turn, self.dropout_seed_every_n_epochs, samples)
        if self.codec is not None:
            steps.rounding = codecs().make_codec(self.codec, self.stochastic_rounding, steps.random.seed)
            steps.graph_world.wrap_transport(partial(codecs().EncodingTransport, codec=steps.rounding))
        if in_parts:
            shard.batch.to(self.root_device)
        if self.recovery is not None:
            steps.must_change = self.recovery.must_change
        of_run = len(self.optimizers), self.precision_plugin, self.equal_buffers
        steps.share(SharedModel(module, world, shard, *of_run))
        if in_parts:
            of_layers = shard if samples is None else samples.begin_stage(steps)
            binding = bind_module(self.scheme, module, of_layers, steps.graph_world, self.meter, self.cache_input_aggregation)
            if self.checkpoint_convs:
                binding.recompute()
            steps.bind(binding)
            steps.see_whole_graph(module, shard)
            if steps.rows is not None:
                steps.keep_compiled(module, self._compiler, self.checkpoint_convs)
        steps.begin(module, shard, self.loss_reduction, self.trains_on_batches)
        if self.root_device.type == "cpu" and self.memory_limit is None:
            steps.add_callbacks(StepMemory(steps.in_use, self.num_processes if self.reuse_buffers else None))
        steps.add_callbacks(*self.stage_callbacks(shard), RunChecks())
        if in_parts:
            self.log_exchange(trainer, shard)

    def log_exchange(self, trainer: pl.Trainer, shard: Shard) -> None:
        """Log the communication plan of the run if arguments do not determine it."""
        if isinstance(self.scheme, EdgeCutScheme):
            log_config(trainer, {"plan": {"name": "p2p"}})

    def stage_callbacks(self, shard: Shard) -> list[pl.Callback]:
        """Returns the callbacks that a stage adds to the callbacks of the user."""
        steps = self.steps
        step_counter = None if steps.rows is None else steps.rows.ranks
        worlds = self.world, steps.graph_world
        metrics = CommunicationMetrics(self.meter, *worlds, part_sizes(shard), steps.shared.replicas, step_counter)
        return [metrics, steps.progress, self.checks, *([] if self.recovery is None else self.recovery.callbacks())]

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if not isinstance(dataloader, GraphLoader) and dataloader != []:  # a stage without nodes or samples has an empty list
            raise ValueError(
                f"{type(self).__name__} trains on its rank's part of the graph and cannot use a {type(dataloader).__name__}. "
                "Pass datamodule=GraphDataModule(...) in place of dataloaders."
            )
        return dataloader

    @override
    def on_train_start(self) -> None:
        state, self._saved = self._saved, None
        if state is not None:
            self.scheme.load_state_dict(state.get("scheme", {}))
            self.steps.load(state, self.global_rank, self.world_size)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.steps.end_training()

    @override
    def teardown(self) -> None:
        data = getattr(self._trainer, "datamodule", None)
        if self._start_method != "popen" and isinstance(data, GraphDataModule):
            data.tell_of_changes("its process ends with this call")
        self.steps.end()
        self.steps = NoSteps()
        super().teardown()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.recovery is not None:
            self.recovery.files.save(self._trainer.current_epoch, str(filepath))
        checkpoint["lightning_gnn"] = self.kept_state()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.recovery is None:
            super().remove_checkpoint(filepath)
        else:
            self.recovery.files.remove(self._trainer.current_epoch, str(filepath))

    def kept_state(self) -> dict[str, Any]:
        """Returns the state that checkpoints store in addition to Lightning's; called on all ranks."""
        return {"scheme": self.scheme.state_dict(), **self.steps.state()}

    def outcome(self) -> dict[str, Any]:
        """Returns attributes that a call of the Trainer has set; processes started for one call send them to the caller."""
        return {}

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        found = None if self.recovery is None else self.recovery.load(checkpoint_path)
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only) if found is None else found
        self._saved = checkpoint.get("lightning_gnn")
        return checkpoint

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.steps.train(super().training_step, batch, *args, **kwargs)

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.steps.evaluate(super().validation_step, "validation", "val_mask", batch, *args, **kwargs)

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.steps.evaluate(super().test_step, "test", "test_mask", batch, *args, **kwargs)

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = self.steps.evaluate(super().predict_step, "prediction", None, batch, *args, **kwargs)
        return self.steps.gather_predictions(output, self.predictions)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # Equal to Lightning's, except that gradients are summed before on_after_backward, which precision.post_backward calls,
        # and on_before_backward receives the loss as the step returned it.
        module, precision, steps = self._module, self.precision_plugin, self.steps
        with steps.in_backward():
            with steps.random.inside(False):
                self.pre_backward(closure_loss)
                loss = precision.pre_backward(closure_loss, module)
            differentiate = steps.differentiate if steps.graphs is None else steps.graphs.backward
            differentiate(lambda x: precision.backward(x, module, optimizer, *args, **kwargs), loss, closure_loss)
            with steps.random.inside(False):
                loss = precision.post_backward(loss, module)
                self.post_backward(loss)
        return loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with self.steps.random.inside(False):
            return self.precision_plugin.optimizer_step(optimizer, model=model or self._module, closure=closure, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator:
        """Context manager that skips gradient sums: accumulated gradients are summed once, in the last backward pass."""
        with self.steps.shared.gradients.pause():
            yield None

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Returns the sum over ranks, or the mean.

        The mean weights each rank by its labeled nodes in the mask of the stage, as in logs.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        if active_mode() is not None:
            return whole_value(tensor, reduce_op)
        is_mean, weights = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"), self.steps.weights
        if is_mean and weights is not None and self.world.size > 1 and group in (None, self.world.everyone):
            return weights.mean(tensor, "A mean over ranks")
        return reduce_over(tensor.to(self.root_device), group, reduce_op=reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        with local_rows():  # counts one decision per rank
            return super().reduce_boolean_decision(decision, all)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensors of all ranks, which may have different numbers of rows; see `gather_rows`.

        The function is :func:`~lightning_gnn.steps.weights.gather_rows`.
        """
        if self._world is None or self._world.size == 1:
            return tensor
        if group not in (None, self.world.everyone):
            return super().all_gather(tensor, group, sync_grads)
        mode = active_mode()
        of = placement_of(tensor)
        if mode is not None and tensor.requires_grad and of is not None and of.rows is None:
            return tensor.expand(self.world.size, *tensor.shape)  # its gradient is the gradient of one value
        with local_rows():
            found = gather_rows(tensor, self.world, self.steps.weights if mode is None else None, sync_grads)
        return found if mode is None else place(found, FROM_ROWS)
