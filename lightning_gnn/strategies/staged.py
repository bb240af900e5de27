"""Several schemes one after the other in one ``fit``: sampled batches first, say, and then the exact full graph."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from lightning_gnn.callbacks.loggers import log_config
from lightning_gnn.callbacks.of_strategies import StrategyCallback
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.steps.random_streams import RandomStreams
from lightning_gnn.strategies import registered, run_checks
from lightning_gnn.strategies.base import GNNStrategy
from lightning_gnn.strategies.run_config import arguments_of


class StagedStrategy(GNNStrategy):
    """Trains under several strategies, one after the other, in one ``fit``: ``Trainer(strategy=StagedStrategy(...))``.

    ``StagedStrategy([{"strategy": "sampling", "epochs": 5}, "dgcl"])`` samples for five epochs, and trains on the full graph from
    the sixth on. Weights, optimizer and schedulers are those of one run, and so are epochs, steps, callbacks, loggers and
    checkpoints. A checkpoint resumes under the strategy of the next epoch. ``trainer.validate``, ``test`` and ``predict`` are
    exact, as under each of them.

    To all other code it is the strategy of its current stage.

    Args:
        stages: names of strategies, or ``{"strategy": name, "epochs": number}`` with the strategy's arguments beside; in Python,
            ``"strategy"`` may be a strategy itself. Only the last has no epochs: it trains until the Trainer's ``max_epochs``.

    Attributes:
        stages: the strategies.
        first_epochs: of each stage, counted from 0.

    Raises:
        ValueError: no stages, an unknown strategy or argument, epochs below 1, a strategy that cannot be a stage, or ranks that
            are started in different ways; before training starts, whatever a stage does not take.
    """

    def __init__(self, stages: Sequence[str | Mapping[str, Any]]) -> None:
        # Not the base's: what a strategy keeps belongs to the stages.
        if isinstance(stages, (str, Mapping)) or not stages:
            raise ValueError(
                "stages is a list of strategies, such as [{'strategy': 'sampling', 'epochs': 5}, 'dgcl'] "
                f"(got {stages!r})."
            )
        made = [_stage(given, number, number == len(stages)) for number, given in enumerate(stages, 1)]
        self.stages = [strategy for strategy, _ in made]
        self.first_epochs = [sum(epochs for _, epochs in made[:index]) for index in range(len(made))]
        self._current = self.stages[0]
        self._switch: pl.Callback | None = None
        if len(set(map(id, self.stages))) < len(self.stages):
            raise ValueError("A strategy object stands for one stage. Make one for each.")
        ways = [strategy._start_method for strategy in self.stages]
        if len(set(ways)) > 1:
            raise ValueError(
                f"Ranks are started once, for all stages, but these have start_method {', '.join(ways)}. Give all the same: "
                "names that end in _spawn, or in _notebook, or none that does."
            )

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:
            return object.__getattribute__(self, name)
        return getattr(self._current, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._current, name, value)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _others(self, trainer: pl.Trainer) -> list[GNNStrategy]:
        """Returns the strategies, beside the current one, that the Trainer's call may come to."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        return [strategy for strategy in self.stages if fitting and strategy is not self._current]

    @property
    @override
    def approximation(self) -> str:
        return ", ".join(filter(None, dict.fromkeys(strategy.approximation for strategy in self.stages)))

    @override
    def layout(self) -> LayoutSpec:
        layouts = [each.layout() for each in self.stages]
        samples = any(each.samples for each in layouts)
        in_batches = min(
            (each.in_batches for each in layouts), key=[False, None, True].index
        )  # what reads edges decides
        return replace(self._current.layout(), samples=samples, in_batches=in_batches)

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        for strategy in self.stages:
            if strategy is not self._current:
                _run_like(strategy, self._current)

    @override
    def before_ranks_start(self, trainer: pl.Trainer | None, given: Sequence[Any], self_check: bool = True) -> None:
        others = [] if trainer is None else self._others(trainer)
        for strategy in [*others, self._current]:  # what is prepared last is used first
            strategy.before_ranks_start(trainer, given, self_check)

    @override
    def setup_environment(self) -> None:
        for strategy in self.stages:
            strategy.layout()  # complains of a number of ranks
        self._current.setup_environment()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        for strategy in self._others(trainer):
            _check_ahead(strategy, trainer, self._current)
        self._current.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            last = self.first_epochs[-1]
            if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= last:
                rank_zero_warn(
                    f"max_epochs={trainer.max_epochs}, but the last of {len(self.stages)} stages begins after epoch {last}: "
                    "it will not be reached."
                )
            stages = zip(self.first_epochs, self.stages)
            config = [
                {"first_epoch": epoch, "name": each.strategy_name, **arguments_of(each)} for epoch, each in stages
            ]
            log_config(trainer, {"stages": config})
            self._switch = StrategyCallback(on_train_epoch_start=lambda trainer, _: self._go_on(trainer))
            trainer.callbacks.insert(0, self._switch)  # type: ignore[attr-defined]

    @override
    def teardown(self) -> None:
        trainer = self._current._trainer
        if trainer is not None and self._switch in trainer.callbacks:
            trainer.callbacks.remove(self._switch)
        self._switch = None
        self._current.teardown()

    @override
    def on_train_start(self) -> None:
        self._go_on(self._current._module.trainer)  # a checkpoint may be of any stage
        self._current.on_train_start()

    def _go_on(self, trainer: pl.Trainer) -> None:
        """Changes to the strategy of the epoch that begins, unless it is the current one; on all ranks."""
        loop, before, module = trainer.fit_loop, self._current, trainer.lightning_module
        epoch = loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        stage = self.stages[bisect_right(self.first_epochs, epoch) - 1]
        if stage is before:
            return
        # Random numbers go on as if nothing had been set up: a run that resumes here does that at another time.
        with isolate_rng():
            for callback in list(before._callbacks):
                callback.on_train_end(trainer, module)
            before.on_train_end()
            _end_epoch_and_data(loop)
            random = before.random  # teardown ends them
            before.teardown()
            _take_over(stage, before, random)
            self._current = stage
            stage.setup_environment()
            trainer._data_connector.prepare_data()
            trainer.datamodule.setup(TrainerFn.FITTING.value)  # type: ignore[attr-defined]
            stage.setup(trainer)
            # First again, so that Lightning, which is going through the list, comes to the new ones.
            trainer.callbacks.remove(self._switch)  # type: ignore[attr-defined]
            trainer.callbacks.insert(0, self._switch)  # type: ignore[attr-defined]
            for callback in stage._callbacks:
                callback.on_train_start(trainer, module)
            loop.setup_data()
        rank_zero_info(f"From epoch {epoch} on: {stage.strategy_name} (before: {before.strategy_name})")


_OWN = frozenset(vars(StagedStrategy)) | {"stages", "first_epochs", "_current", "_switch"}


def _run_like(strategy: GNNStrategy, other: GNNStrategy) -> None:
    """Gives a strategy devices, processes and plugins, as a Trainer has given them to another one."""
    for name in ("_accelerator", "_checkpoint_io", "_precision_plugin", "_launcher", "_layer_sync", "num_nodes"):
        setattr(strategy, name, getattr(other, name))
    strategy.parallel_devices, strategy.cluster_environment = other.parallel_devices, other.cluster_environment


def _check_ahead(strategy: GNNStrategy, trainer: pl.Trainer, before: GNNStrategy) -> None:
    """Refuses what a strategy's set-up would refuse later; on all ranks, while those of another one are connected."""
    strategy.connect(before._module)
    shard = strategy.check_data(getattr(trainer, "datamodule", None)).shard
    strategy._world = before.world
    try:
        run_checks.ahead_of_stage(strategy, before._module, shard, trainer)
    finally:
        strategy._world = None


def _take_over(strategy: GNNStrategy, before: GNNStrategy, random: RandomStreams | None) -> None:
    """Goes on with model, optimizers, schedulers, checkpoint and random numbers of a strategy that has been torn down."""
    strategy.connect(before._module)
    strategy._saved, before._saved = before._saved, None
    strategy.random = random
    strategy.optimizers, strategy.lr_scheduler_configs = before.optimizers, before.lr_scheduler_configs
    before.optimizers, before.lr_scheduler_configs = [], []
    strategy.has_optimizers = True


def _end_epoch_and_data(loop: _FitLoop) -> None:
    """Has Lightning's loops forget the batches of a stage, and what was logged in it."""
    steps = loop.epoch_loop
    if steps.restarting and steps.batch_progress.is_last_batch:
        # From a checkpoint of an epoch's last step: the loop would compare steps done with those of the next stage.
        steps.reset()
        for each in (loop, steps):
            each.on_iteration_done()  # nothing of a checkpoint is left to be done
    loaded: Any
    for loaded in (loop, steps.val_loop):
        if loaded._data_fetcher is not None:
            loaded._data_fetcher.teardown()
        loaded._data_fetcher = loaded._combined_loader = None
    for results in (steps._results, steps.val_loop._results):
        results.clear()  # they know the strategy that reduces them


def _stage(given: str | Mapping[str, Any], number: int, last: bool) -> tuple[GNNStrategy, int]:
    """Returns the strategy of a stage, and for how many epochs; 0 for the last."""
    what = f"Stage {number}"
    options = dict(given) if isinstance(given, Mapping) else {"strategy": given}
    if "strategy" not in options:
        raise ValueError(f"{what} is the name of a strategy, or has the key 'strategy' (got {given!r}).")
    strategy: Any = options.pop("strategy")
    epochs: Any = options.pop("epochs", None)
    what += f", {strategy if isinstance(strategy, str) else type(strategy).__name__},"
    taken = sorted({"devices", "num_nodes", "accelerator"} & options.keys())
    if taken:
        raise ValueError(f"{what} cannot have {taken[0]} of its own: all stages run on the Trainer's. Set it there.")
    if last and epochs is not None:
        raise ValueError(f"{what} is the last and trains until the Trainer's max_epochs. Leave epochs={epochs!r} out.")
    if not last and (not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1):
        raise ValueError(f"{what} needs epochs, an integer of at least 1: others follow (got {epochs!r}).")
    if isinstance(strategy, StagedStrategy):
        raise ValueError(f"{what} has stages itself. Put them into this list.")
    if isinstance(strategy, GNNStrategy) and options:
        raise ValueError(f"{what} is made already: give {', '.join(options)} to it.")
    known, name = registered(), strategy.lower() if isinstance(strategy, str) else ""
    if not isinstance(strategy, GNNStrategy):
        if name not in known:
            names = ", ".join(dict.fromkeys(kind.strategy_name for kind in known.values()))
            raise ValueError(f"{what} is none of this package's strategies (got {strategy!r}). There are {names}.")
        try:
            strategy = known[name](**{**StrategyRegistry[name]["init_params"], **options})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{what} cannot be made: {error}") from error
    if strategy.no_stage_because:
        raise ValueError(f"{what} cannot be a stage. {strategy.no_stage_because}")
    return strategy, epochs or 0
