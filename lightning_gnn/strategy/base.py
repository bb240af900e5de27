"""GNNStrategy: launching, groups, row semantics, gradient sums; the communication scheme is a replaceable part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_gnn.arguments import check_choice, check_flags
from lightning_gnn.callbacks.communication import CommunicationMetrics
from lightning_gnn.callbacks.loggers import log_config
from lightning_gnn.checks.alike import check_alike, module_and_trainer, optimizers_and_schedulers
from lightning_gnn.checks.unregistered import unregistered
from lightning_gnn.comm.group import World, raise_together
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Cut, Shard
from lightning_gnn.datamodules.graph import GraphDataModule, OneBatch, check_fits, check_links
from lightning_gnn.kernels.warm_up import warm_up
from lightning_gnn.launching import StartMethod
from lightning_gnn.nn.context import GraphContext
from lightning_gnn.nn.convs import kernel_groups
from lightning_gnn.nn.helpers import expand, graph_in_use, reduce
from lightning_gnn.registry import codecs, out_of_core, transport_wrappers
from lightning_gnn.rows.graph import GraphRows
from lightning_gnn.rows.hooks import in_hooks
from lightning_gnn.steps.loop import asking_whether_to_end, loss_in_outputs, without_example
from lightning_gnn.steps.model import SharedModel
from lightning_gnn.steps.predictions import Predictions
from lightning_gnn.steps.random_streams import RandomStreams
from lightning_gnn.steps.values import StepValues
from lightning_gnn.strategy.edge_cut import EdgeCutScheme
from lightning_gnn.strategy.graph_kinds import check_for_layout, check_model, predicts_memory
from lightning_gnn.strategy.memory import check_memory, check_own_memory
from lightning_gnn.strategy.run_checks import RunChecks
from lightning_gnn.strategy.run_config import log_run, part_sizes
from lightning_gnn.strategy.scheme import Scheme, bind_module
from lightning_gnn.strategy.self_checks import SelfChecks
from lightning_gnn.strategy.steps import StepStrategy

_REMOVED = {
    "offload": "Run the model in `with torch.autograd.graph.save_on_cpu(pin_memory=True):` in your step (docs/memory.md)",
    "replan": "Plans are made once: pass topology= with a file that `lightning-gnn topology measure` has written",
}
"""Arguments of earlier versions, and what replaces them."""


def refuse_options(options: Mapping[str, Any], names: Sequence[str], because: str) -> None:
    """Raises ValueError if an option of a strategy is set that its scheme cannot have; the text says why, and what to do."""
    for name in names:
        if options.get(name) not in (None, False):
            raise ValueError(f"{name}={options[name]!r} is of no use. {because}")


class GNNStrategy(StepStrategy):
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
        keep_memory: let CPU ranks keep what a step frees for the next one instead of giving it back to the system: faster
            steps, somewhat more memory.
        codec: send rows in fewer bytes in training steps, approximately: as ``"int8"``, ``"int4"`` or ``"int2"`` between a row's
            least and largest entry, as ``"bfp8"`` or ``"bfp4"`` around 0, or as ``"bf16"``;
            exactly in the last epoch. None sends them as they are. Set it where the
            network is what you wait for (docs/codecs.md).
        stochastic_rounding: let the codec round up or down at random, so that its errors are 0 in the mean.
        keep_constant: keep what the layers' sums over neighbours make of the graph's own features, which is the same in every
            step: at most four times the memory of the features. Without, it is computed and sent anew.
        recompute: let each conv keep its arguments only, and make the rest again in the backward, where halo rows are fetched
            once more, as in SAR: less memory, more time and bytes, the same numbers (docs/memory.md). Full-graph strategies.
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

    def __init__(
        self,
        scheme: Scheme,
        start_method: StartMethod = "popen",
        predictions: Predictions = "all",
        shared_memory: bool = True,
        timeout: float = 1800.0,
        self_check: bool = True,
        keep_memory: bool = True,
        codec: str | None = None,
        stochastic_rounding: bool = False,
        keep_constant: bool = True,
        recompute: bool = False,
        host_memory: int | str | None = None,
        host_memory_dir: str | Path | None = None,
        **plugins: Any,
    ) -> None:
        for name in _REMOVED.keys() & plugins.keys():
            raise TypeError(f"{type(self).__name__}({name}=...) was removed. {_REMOVED[name]}.")
        super().__init__(start_method, shared_memory, timeout, **plugins)
        check_choice("predictions", predictions, get_args(Predictions))
        check_flags(self_check=self_check, keep_memory=keep_memory, keep_constant=keep_constant, recompute=recompute)
        check_flags(stochastic_rounding=stochastic_rounding)
        if codec is not None or stochastic_rounding:
            codecs().make_codec(codec, stochastic_rounding)
        self._out_of_core = out_of_core(host_memory, host_memory_dir, shared_memory)
        self.host_memory, self.host_memory_dir = self._out_of_core and self._out_of_core.most_bytes, host_memory_dir
        if recompute and stochastic_rounding:
            raise ValueError(
                "recompute=True fetches rows again in the backward, and stochastic_rounding=True would round them otherwise than "
                "in the forward. Leave one of them out."
            )
        self.scheme = scheme
        self.codec, self.stochastic_rounding = codec, stochastic_rounding
        self.keep_constant, self.recompute = keep_constant, recompute
        self.predictions = predictions
        self.self_check, self.keep_memory = self_check, keep_memory and host_memory is None
        self.meter = Meter()
        self._codec: Any = None
        self._shard: Shard | None = None
        self._checks = SelfChecks(self)
        self._callbacks: list[pl.Callback] = []

    @property
    def approximation(self) -> str:
        """What makes training differ from that of one device, in a few words; empty if nothing does."""
        return ", ".join(filter(None, [self.scheme.approximation, f"codec {self.codec}" if self.codec else ""]))

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
        if self._out_of_core is None and predicts_memory(cut):
            check_memory(self, data, module, trainer)
        if self_check:
            self._checks.ahead(module, cut, trainer)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self._module
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True converts BatchNorm to a layer that averages over ranks, not over nodes. "
                "Set sync_batchnorm=False."
            )
        shard = self._shard = self.check_data(getattr(trainer, "datamodule", None)).shard
        log_run(self, trainer, shard)
        self._check_stage(module, shard, trainer)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_optimizers(trainer)
        self.begin_stage(trainer, shard)

    def _check_stage(self, module: pl.LightningModule, shard: Shard, trainer: pl.Trainer) -> None:
        """Checks on ranks, whose parts of the graph are there."""
        check_alike(self.world, module_and_trainer(module, trainer))
        self.check_model(module, shard)
        if not self.binds(shard):
            return
        # One rank of a machine compiles, and the others load what it has kept.
        if self.local_rank == 0:
            self._warm_up(module, trainer)
        self.world.barrier()
        if self.local_rank != 0:
            self._warm_up(module, trainer)
        self._checks.before_stage(module, shard, trainer)
        if predicts_memory(shard):
            check_own_memory(self, trainer, shard)

    def _check_optimizers(self, trainer: pl.Trainer) -> None:
        """Refuses, on all ranks, what ``configure_optimizers`` has returned, if ranks could not train it together."""
        failure: ValueError | None = None
        if self.trains_on_batches and any(isinstance(each, torch.optim.LBFGS) for each in self.optimizers):
            failure = ValueError(
                "LBFGS decides by the loss of a rank's own batch how far to step. Use Adam, AdamW or SGD, or a strategy whose "
                "steps are of the whole graph."
            )
        elif self.world_size > 1:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            failure = data.trained_by(self.optimizers) or unregistered(self._module, self.optimizers)
        raise_together(self.world, failure, "The optimizers cannot be used on ranks")
        made = optimizers_and_schedulers(self._module, self.optimizers, self.lr_scheduler_configs)
        check_alike(self.world, made)

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

    def binds(self, shard: Shard) -> bool:
        """Returns whether layers see the rank's part of the graph; else steps see nothing but their batches."""
        return True

    def begin_stage(self, trainer: pl.Trainer, shard: Shard) -> None:
        """Binds the model, which is on its device, and wraps what its steps give; on all ranks."""
        module = self._module
        self.progress.begin_stage()
        self.random = RandomStreams(self.world)
        if self.codec is not None:
            self._codec = codecs().make_codec(self.codec, self.stochastic_rounding, self.random.seed)
            self.world.wrap_transport(partial(codecs().EncodingTransport, codec=self._codec))
        in_parts = self.binds(shard)
        self._in_use = ExitStack()
        if in_parts:
            shard.batch.to(self.root_device)
        of_run = len(self.optimizers), self.precision_plugin, self.equal_buffers
        self._shared = SharedModel(module, self.world, shard, *of_run)
        if in_parts:
            self._binding = bind_module(self.scheme, module, shard, self.world, self.meter, self.keep_constant)
            if self.recompute:
                self._binding.recompute()
            self._in_use.enter_context(graph_in_use(self._binding.context))
            if self.world_size > 1:
                self._in_use.enter_context(without_example(module))
            draws = partial(self.random.inside, False)
            self._rows = GraphRows(shard, self.world, draws, expand, reduce)
            self._rows.place_state(module, self.world)
        self._steps = 0
        values = self._values = StepValues(module, self.world, shard, self.loss_reduction, self._rows)
        self._in_use.enter_context(in_hooks(trainer, lambda: values.hook(not (self.trains_on_batches and trainer.training))))
        self._callbacks = [*self.stage_callbacks(shard), RunChecks()]
        trainer.callbacks[:0] = self._callbacks  # type: ignore[attr-defined]
        self._in_use.enter_context(loss_in_outputs(trainer, lambda: self.loss))
        self._in_use.enter_context(asking_whether_to_end(trainer, self.world))
        if in_parts:
            self.log_exchange(trainer, shard)

    @property
    def bound(self) -> GraphContext:
        """What bound layers know of this rank; there while a stage binds the model."""
        assert self._binding is not None
        return self._binding.context

    def log_exchange(self, trainer: pl.Trainer, shard: Shard) -> None:
        """Tells the loggers how rows travel in this run, where arguments do not."""
        if isinstance(self.scheme, EdgeCutScheme):
            log_config(trainer, {"plan": {"name": "p2p"}})

    def stage_callbacks(self, shard: Shard) -> list[pl.Callback]:
        """Returns the callbacks that a stage adds to the user's."""
        assert self._shared is not None
        of_steps = None if self._rows is None else self._rows.ranks
        metrics = CommunicationMetrics(self.meter, self.world, part_sizes(shard), self._shared.replicas, of_steps)
        return [metrics, self.progress, self._checks]

    @override
    def _configure_launcher(self) -> None:
        if self._out_of_core is not None:
            self._out_of_core.check(self.parallel_devices or [], self.num_nodes)
        super()._configure_launcher()

    @override
    def _make_world(self) -> World:
        if self._out_of_core is None:
            return super()._make_world()
        of_run = self.global_rank, self.world_size, self.root_device, self.timeout
        return self._out_of_core.make_world(self._trainer.default_root_dir, *of_run)

    @contextmanager
    @override
    def _step(self, name: str) -> Iterator[None]:
        with nullcontext() if self._out_of_core is None else self._out_of_core.turn(), super()._step(name):
            yield

    @override
    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with nullcontext() if self._out_of_core is None else self._out_of_core.turn():
            return super().backward(*args, **kwargs)

    def check_model(self, module: torch.nn.Module, of: Shard | Cut) -> None:
        """Raises :class:`UnsupportedModelError` for a model that cannot run on such a graph; on every rank."""
        check_model(module, of, self.recompute)

    def check_data(self, data: Any) -> GraphDataModule:
        """Returns the datamodule of a run; raises ValueError for any that has no graph."""
        if not isinstance(data, GraphDataModule):
            given = "no datamodule" if data is None else type(data).__name__
            raise ValueError(
                f"{type(self).__name__} needs a graph that it can split (got {given}). "
                "Pass datamodule=GraphDataModule(your_dataset) to fit, validate, test or predict."
            )
        return data

    def hooks_move_batches(self, data: Any) -> bool:
        """Returns whether a hook of the user's module or datamodule sees batches before they are on the device, or moves them
        there: then they are left to Lightning."""
        users = ((self._module, pl.LightningModule), (data, pl.LightningDataModule))
        hooks = "on_before_batch_transfer", "transfer_batch_to_device"
        return any(is_overridden(hook, owner, base) for owner, base in users for hook in hooks)

    @contextmanager
    def unbound(self) -> Iterator[None]:
        """While open, the module is as its user made it."""
        assert self._values is not None
        with self._values.released(), ExitStack() as stack:
            if self._binding is not None:
                self._binding.release(for_good=False)
                stack.callback(self._binding.bind)
            yield

    @override
    def teardown(self) -> None:
        trainer = self._trainer
        if trainer is not None:
            # A LearningRateFinder that fails leaves others in their place.
            trainer.callbacks[:] = [each for each in trainer.callbacks if each not in self._callbacks]
            data = getattr(trainer, "datamodule", None)
            if self._start_method != "popen" and isinstance(data, GraphDataModule):
                data.tell_of_changes("its process ends with this call")
        self._in_use.close()
        for part in (self._values, self._shared, self._binding):
            if part is not None:
                part.release()
        if self._rows is not None:
            self._rows.release(self._module)
        self._callbacks = []
        self._values = self._shared = self._binding = self._shard = self.random = self.loss = self._checks.shard = None
        self._rows = self._codec = None
        super().teardown()

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
        if self._binding is not None:
            self._binding.context.drain()
        assert self._shared is not None
        self._shared.end_training()

    @override
    def kept_state(self) -> dict[str, Any]:
        kept: dict[str, Any] = {"scheme": self.scheme.state_dict()}
        if self._world is not None and self._world.size > 1 and self.random is not None:
            common, own = self.random.state()
            rounding = self._codec.random_state() if self._codec is not None else None
            streams, seeds, roundings = zip(*self.world.all_gather_object((own, self.random.seed, rounding)))
            kept["random_streams"] = {"common": common, "own": [*streams], "seeds": [*seeds], "rounding": [*roundings]}
        if self._binding is not None:
            exchanges = self.world.all_gather_object(self._binding.context.state_dict())
            if any(exchanges):
                kept["exchanges"] = exchanges
        return kept

    @override
    def take_state(self, state: Mapping[str, Any]) -> None:
        self.scheme.load_state_dict(state.get("scheme", {}))
        exchanges = state.get("exchanges", [])
        if len(exchanges) == self.world_size and self._binding is not None:
            self._binding.context.load_state_dict(exchanges[self.global_rank])
        streams = state.get("random_streams", {"own": []})
        if len(streams["own"]) == self.world_size and self.random is not None:
            self.random.load(streams["common"], streams["own"][self.global_rank])
            if "seeds" in streams:
                self.random.seed = streams["seeds"][self.global_rank]
            if self._codec is not None and "rounding" in streams:
                self._codec.set_random_state(streams["rounding"][self.global_rank])
