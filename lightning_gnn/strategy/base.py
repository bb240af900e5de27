"""GNNStrategy: launching, groups, row semantics, gradient sums; the communication scheme is a replaceable part."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
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

from lightning_gnn.arguments import check_choice, check_flags, refuse_old_names, renamed
from lightning_gnn.callbacks.communication import CommunicationMetrics
from lightning_gnn.callbacks.loggers import log_config
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Cut, Shard
from lightning_gnn.datamodules.graph import GraphDataModule, OneBatch, check_fits, check_links
from lightning_gnn.kernels.warm_up import warm_up
from lightning_gnn.launching import StartMethod
from lightning_gnn.nn.convs import kernel_groups
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.private_lightning import reduce_over
from lightning_gnn.registry import codecs, out_of_core, transport_wrappers
from lightning_gnn.rows.graph import whole_value
from lightning_gnn.rows.mode import active_mode, local_rows, place, placement_of
from lightning_gnn.rows.placement import FROM_ROWS
from lightning_gnn.steps.gradients import SharedModel
from lightning_gnn.steps.predictions import Predictions
from lightning_gnn.steps.weights import gather_rows
from lightning_gnn.strategy.checks import Checks, Run, RunChecks
from lightning_gnn.strategy.graph_kinds import check_for_layout, check_model
from lightning_gnn.strategy.ranks import RankStrategy
from lightning_gnn.strategy.run_config import log_run, part_sizes
from lightning_gnn.strategy.scheme import EdgeCutScheme, Scheme, bind_module
from lightning_gnn.strategy.steps import NoSteps, Steps

_REMOVED = {
    "offload": "Run the model in `with torch.autograd.graph.save_on_cpu(pin_memory=True):` in your step (docs/memory.md)",
    "replan": "Plans are made once: pass topology= with a file that `lightning-gnn topology measure` has written",
    **renamed("""averaging_interval=average_every_n_batches cache_mb=remote_cache clusters=num_clusters fanouts=num_neighbors
feature_cache=local_cache final=final_weights halo=historical_embeddings hops=num_hops host_memory=memory_limit
host_memory_dir=spill_dir hosts=num_machines keep_constant=cache_input_aggregation keep_memory=reuse_buffers
lease=heartbeat_timeout method=sampler patience=partner_timeout permute=node_order prefetch=prefetch_batches
recompute=checkpoint_convs redraw_every=dropout_seed_every_n_epochs replication=replication_factor restarts=max_restarts
samplers=num_workers score=edge_score_fn"""),
}
"""Arguments of earlier versions, and their replacements."""


def refuse_options(options: Mapping[str, Any], names: Sequence[str], because: str) -> None:
    """Raises ValueError if an option of a strategy is set that its scheme cannot have; the text says why, and what to do."""
    for name in names:
        if options.get(name) not in (None, False):
            raise ValueError(f"{name}={options[name]!r} is of no use. {because}")


class GNNStrategy(RankStrategy):
    """Trains any PyG model, unchanged, on one graph over several ranks, with the numbers of one device.

    Every node has one owner. A rank's batch holds the rows that it owns. Inside a step on the whole graph, every tensor stands
    for that of the whole graph (docs/rows.md), and gradients are summed over ranks.

    Args:
        scheme: how rows travel between ranks.
        start_method: how ranks are started: ``"popen"`` runs the script once per rank, ``"spawn"`` and ``"fork"`` start
            processes that run the Trainer's call only. Raise it to ``"fork"`` in notebooks. Under ``torchrun`` and SLURM
            ranks are there already.
        predictions: what ``trainer.predict`` returns for tensors with one row per node or per edge: ``"all"`` all rows in
            original order on every rank, ``"rank0"`` the same on rank 0 only, ``"shards"`` each rank's own rows
            (``batch.n_id`` and ``batch.e_id`` tell which); ``"file"`` all rows, memory-mapped: each rank writes its own to a
            ``.npy`` file in the folder ``predictions`` of the Trainer's ``default_root_dir``, which all machines see.
        shared_memory: let CPU ranks on one machine exchange through shared memory; sockets otherwise.
        timeout: seconds after which a wait for another rank is an error that names operation, layer and rank; ranks that have
            taken different ways are told before (docs/errors.md, "When a run hangs").
        self_check: before a stage starts, run its step on a small random graph, whole and split in two, and refuse a
            model that gives other numbers on the parts.
        reuse_buffers: let CPU ranks keep what a step frees for the next one instead of giving it back to the system: faster
            steps, somewhat more memory.
        codec: send rows in fewer bytes in training steps, approximately: as ``"int8"``, ``"int4"`` or ``"int2"`` between a row's
            least and largest entry, as ``"bfp8"`` or ``"bfp4"`` around 0, or as ``"bf16"``;
            exactly in the last epoch. None sends them as they are. Set it where the
            network is what you wait for (docs/codecs.md).
        stochastic_rounding: let the codec round up or down at random, so that its errors are 0 in the mean.
        cache_input_aggregation: keep what the layers' sums over neighbours make of the graph's own features, which is the same in
            every step: at most four times the memory of the features. Without, it is computed and sent anew.
        checkpoint_convs: let each conv keep its arguments only, and make the rest again in the backward, where halo rows are
            fetched once more, as in SAR: less memory, more time and bytes, the same numbers (docs/memory.md). Full-graph
            strategies.
    """

    strategy_name = "gnn"
    equal_buffers = True
    """Whether buffers are the same on all ranks while it trains, as parameters are."""

    @classmethod
    def variants(cls, ranks: int, links_alike: bool = True) -> Iterable[Mapping[str, Any]]:
        """Returns arguments under which ``lightning-gnn advise`` compares the strategy with others, if it can run so.

        Args:
            ranks: how many.
            links_alike: between all of them; else plans over relays may be worth a look.
        """
        return [{}]

    loss_reduction: Literal["mean", "sum"] = "mean"
    """What the losses of steps on a rank's own batch are over its rows; a loss of the whole graph is taken as it is."""
    dropout_seed_every_n_epochs = 1
    """Epochs whose training steps draw the same random numbers; 1: each draws on from the rank's stream."""
    trains_on_batches = False
    """An epoch has many steps, on parts of the graph; else one step, on all of it."""

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
        **plugins: Any,
    ) -> None:
        refuse_old_names(type(self), plugins, _REMOVED)
        super().__init__(start_method, shared_memory, timeout, **plugins)
        check_choice("predictions", predictions, get_args(Predictions))
        check_flags(self_check=self_check, reuse_buffers=reuse_buffers, stochastic_rounding=stochastic_rounding)
        check_flags(cache_input_aggregation=cache_input_aggregation, checkpoint_convs=checkpoint_convs)
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
        self.meter = Meter()
        self.checks = Checks()
        self.steps: Steps = NoSteps()
        self._saved: Mapping[str, Any] | None = None

    @property
    def approximation(self) -> str:
        """What makes training differ from that of one device, in a few words; empty if nothing does."""
        return ", ".join(filter(None, [self.scheme.approximation, f"codec {self.codec}" if self.codec else ""]))

    def layout(self) -> LayoutSpec:
        """Returns what the datamodule must give each rank."""
        return self.scheme.layout(self.world_size, self.num_nodes)

    def checked_stages(self, trainer: pl.Trainer) -> Sequence[str]:
        """Returns the stages whose steps must give the numbers of one device in what the Trainer does now."""
        assert trainer.state.fn is not None
        return ("fit", "validate") if trainer.state.fn == TrainerFn.FITTING else (trainer.state.fn.value,)

    def binds(self, shard: Shard) -> bool:
        """Returns whether layers see the rank's part of the graph; else steps see nothing but their batches."""
        return True

    def check_model(self, module: torch.nn.Module, of: Shard | Cut) -> None:
        """Raises :class:`UnsupportedModelError` for a model that cannot run on such a graph; on every rank."""
        check_model(module, of, self.checkpoint_convs)

    def check_data(self, data: Any) -> GraphDataModule:
        """Returns the datamodule of a run; raises ValueError for any that has no graph."""
        if not isinstance(data, GraphDataModule):
            given = "no datamodule" if data is None else type(data).__name__
            raise ValueError(
                f"{type(self).__name__} needs a graph that it can split (got {given}). "
                "Pass datamodule=GraphDataModule(your_dataset) to fit, validate, test or predict."
            )
        return data

    def _run_for_checks(self, module: pl.LightningModule, trainer: pl.Trainer) -> Run:
        """Returns what checks look at."""
        first = self.node_rank * self.num_processes
        return Run(
            type(self).__name__,
            self.scheme,
            module,
            trainer,
            self.checked_stages(trainer),
            self.trains_on_batches,
            self.self_check,
            self.cache_input_aggregation,
            self.checkpoint_convs,
            self.root_device,
            self.world_size,
            self.num_nodes,
            range(first, first + self.num_processes),
        )

    def before_ranks_start(self, trainer: pl.Trainer | None, given: Sequence[Any], self_check: bool = True) -> None:
        """Finds what is wrong while there is one process only; called by launchers in the process that starts the ranks.

        Args:
            trainer, given: whose call it is, and its arguments.
            self_check: whether the self-check may run here.
        """
        if trainer is None or self.world_size == 1:
            return
        module = next((value for value in given if isinstance(value, pl.LightningModule)), trainer.lightning_module)
        found = next((value for value in given if isinstance(value, pl.LightningDataModule)), None)
        data = self.check_data(found or getattr(trainer, "datamodule", None))
        if module is None:
            return  # Lightning says so
        layout = self.layout()
        if not layout.samples:  # else the graph decides what the model may be
            check_for_layout(module, layout)
        if self.num_nodes > 1:
            return  # the graph comes to machines when their ranks have met, and none waits for one that stops here
        data.prepare_ahead(layout)
        cut = data.stored_cut()
        check_fits(module, cut)
        check_links(module, cut, layout.samples)
        self.check_model(module, cut)
        if not layout.reads_edges(cut.types):
            return
        self._warm_up(module, trainer)
        run = self._run_for_checks(module, trainer)
        if self.memory_limit is None:
            self.checks.memory_ahead(run, cut)
        if self_check:
            self.checks.ahead(run, cut)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self._module
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True converts BatchNorm to a layer that averages over ranks, not over nodes. "
                "Set sync_batchnorm=False."
            )
        data = self.check_data(getattr(trainer, "datamodule", None))
        shard = data.shard
        log_run(self, trainer, shard)
        run = self._run_for_checks(module, trainer)
        self.checks.module_alike(run, self.world)
        self.check_model(module, shard)
        if self.binds(shard):
            # One rank of a machine compiles, and the others load what it has kept.
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
        """Compiles what layers run, unless PyG's own code runs in all steps: then there is none to check either."""
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
        """Binds the model, which is on its device, and wraps what its steps give; on all ranks."""
        module, world, in_parts = self._module, self.world, self.binds(shard)
        keeps_memory = self.reuse_buffers and self.root_device.type == "cpu"
        steps = self.steps = Steps(trainer, world, self.ranks.turn, keeps_memory, self.dropout_seed_every_n_epochs)
        if self.codec is not None:
            steps.rounding = codecs().make_codec(self.codec, self.stochastic_rounding, steps.random.seed)
            world.wrap_transport(partial(codecs().EncodingTransport, codec=steps.rounding))
        if in_parts:
            shard.batch.to(self.root_device)
        of_run = len(self.optimizers), self.precision_plugin, self.equal_buffers
        steps.share(SharedModel(module, world, shard, *of_run))
        if in_parts:
            binding = bind_module(self.scheme, module, shard, world, self.meter, self.cache_input_aggregation)
            if self.checkpoint_convs:
                binding.recompute()
            steps.bind(binding)
            steps.see_whole_graph(module, shard)
        steps.begin(module, shard, self.loss_reduction, self.trains_on_batches)
        steps.add_callbacks(*self.stage_callbacks(shard), RunChecks())
        if in_parts:
            self.log_exchange(trainer, shard)

    def log_exchange(self, trainer: pl.Trainer, shard: Shard) -> None:
        """Tells the loggers how rows travel in this run, where arguments do not."""
        if isinstance(self.scheme, EdgeCutScheme):
            log_config(trainer, {"plan": {"name": "p2p"}})

    def stage_callbacks(self, shard: Shard) -> list[pl.Callback]:
        """Returns the callbacks that a stage adds to the user's."""
        steps = self.steps
        of_steps = None if steps.rows is None else steps.rows.ranks
        metrics = CommunicationMetrics(self.meter, self.world, part_sizes(shard), steps.shared.replicas, of_steps)
        return [metrics, steps.progress, self.checks]

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if not isinstance(dataloader, OneBatch) and dataloader != []:  # nothing, where no node is in the mask
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
        checkpoint["lightning_gnn"] = self.kept_state()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def kept_state(self) -> dict[str, Any]:
        """Returns what checkpoints keep beside Lightning's; on all ranks."""
        return {"scheme": self.scheme.state_dict(), **self.steps.state()}

    def outcome(self) -> dict[str, Any]:
        """Returns attributes that a call of the Trainer has set; ranks that last for one call send them back to the caller."""
        return {}

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
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
        return self.steps.predicted(output, self.predictions)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        # As Lightning's, but gradients are summed before on_after_backward, which precision.post_backward calls, and
        # on_before_backward is given the loss as the step returned it.
        module, precision, steps = self._module, self.precision_plugin, self.steps
        with steps.in_backward():
            with steps.random.inside(False):
                self.pre_backward(closure_loss)
                loss = precision.pre_backward(closure_loss, module)
            with steps.differentiating():
                precision.backward(loss * steps.values.scale, module, optimizer, *args, **kwargs)
            with steps.random.inside(False):
                steps.sum_gradients(closure_loss)
                loss = precision.post_backward(loss, module)
                self.post_backward(loss)
        return loss

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.steps.random.inside(False):
            return super().optimizer_step(*args, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator:
        """Leaves gradients unsummed while open: those of an accumulation are summed once, at its end."""
        with self.steps.shared.gradients.blocked():
            yield None

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Returns the mean over ranks, by the labelled rows of the stage's mask as in logs, or the sum, as `reduce_op` says."""
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
        with local_rows():  # decisions of ranks are counted
            return super().reduce_boolean_decision(decision, all)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Returns the tensors of all ranks, which may have different numbers of rows; see
        :func:`~lightning_gnn.steps.weights.gather_rows`."""
        if self._world is None or self._world.size == 1:
            return tensor
        if group not in (None, self.world.everyone):
            return super().all_gather(tensor, group, sync_grads)
        mode = active_mode()
        of = placement_of(tensor)
        if mode is not None and tensor.requires_grad and of is not None and of.rows is None:
            return tensor.expand(self.world.size, *tensor.shape)  # whose gradient is that of one value
        with local_rows():
            found = gather_rows(tensor, self.world, self.steps.weights if mode is None else None, sync_grads)
        return found if mode is None else place(found, FROM_ROWS)
