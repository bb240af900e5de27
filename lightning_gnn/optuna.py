"""Optuna studies whose trials are equal on all ranks: rank 0 draws, records and prunes, and the other ranks follow."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_gnn.launching.failures import Failure, set_report
from lightning_gnn.tools.channel import Key, num_ranks, open_channel

try:
    import optuna
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("lightning_gnn.optuna needs Optuna, which is not installed. Run pip install optuna.") from error

__all__ = ["PruningCallback", "create_study"]

_END_S = 60.0
"""Seconds for which rank 0, which may serve the store, waits at the end of a search for the other ranks."""


def create_study(**options: Any) -> optuna.Study:
    """Returns a study like ``optuna.create_study``, whose trials are equal on all ranks.

    Rank 0 has the study. Other ranks receive values, pruning decisions and results, and never open the storage. After
    ``study.optimize``, the trials of the study are equal on all ranks. With one device, and with strategies whose names end in
    ``_spawn`` or ``_notebook``, the study is Optuna's.

    Args:
        **options: arguments of ``optuna.create_study``. Other ranks ignore sampler, pruner and storage. An existing study is
            loaded with ``load_if_exists=True``.
    """
    channel = open_channel()
    key = channel.next_study()
    if channel.rank > 0:
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # rank 0 logs the trials
        name, directions, *state = channel.receive(key, "study")
        options = {"study_name": name, "directions": directions, "storage": _Received()}
    elif not isinstance(options.get("storage"), optuna.storages.BaseStorage):
        url = options.get("storage")
        options["storage"] = optuna.storages.RDBStorage(url) if url else optuna.storages.InMemoryStorage()
    created = optuna.create_study(**options)
    study = _Study(created.study_name, options["storage"], created.sampler, created.pruner)
    study.key = key
    if channel.rank > 0:
        study.receive(*state)
    else:
        channel.send(key, "study", (study.study_name, study.directions, *study.state()))
    return study


class PruningCallback(pl.Callback):
    """Callback that reports a metric after each validation, and ends the trial on all ranks if the pruner decides so.

    Args:
        trial: trial of the objective's argument.
        monitor: name of a logged metric.
    """

    def __init__(self, trial: Any, monitor: str) -> None:
        self.trial, self.monitor = trial, monitor

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if self.monitor not in trainer.callback_metrics:
            raise ValueError(
                f"monitor must be a logged metric, got {self.monitor!r}. Logged: {', '.join(sorted(trainer.callback_metrics))}."
            )
        is_pruned = False
        if trainer.is_global_zero:
            self.trial.report(float(trainer.callback_metrics[self.monitor]), trainer.current_epoch)
            is_pruned = self.trial.should_prune()
        if trainer.strategy.broadcast(is_pruned):
            raise optuna.TrialPruned(f"Pruned after epoch {trainer.current_epoch}.")


class _Study(optuna.Study):
    """Study of rank 0, or of a rank that follows it.

    Attributes:
        key: key of the study.
    """

    key: Key = ()
    _searches = 0

    @override
    def optimize(
        self,
        func: Callable[[Any], Any],
        n_trials: int | None = None,
        timeout: float | None = None,
        n_jobs: int = 1,
        catch: Iterable[type[Exception]] | type[Exception] = (),
        callbacks: Iterable[Callable[[optuna.Study, Any], None]] | None = None,
        gc_after_trial: bool = False,
        show_progress_bar: bool = False,
    ) -> None:
        """Run trials like ``optuna.Study.optimize``, on all ranks; callbacks run on rank 0 only.

        Args:
            func: objective; each rank calls it with its trial.
            n_trials: number of trials.
            timeout: seconds after which no trial starts.
            n_jobs: 1, since ranks train one model at a time.
            catch: exceptions after which the search continues, if all ranks raise them.
            callbacks: functions that rank 0 calls after each trial.
            gc_after_trial: whether to collect garbage after each trial.
            show_progress_bar: whether rank 0 shows a progress bar.
        """
        if n_jobs != 1:
            raise ValueError(f"n_jobs must be 1, because all ranks train the same trial, got {n_jobs}. Remove it.")
        key = (*self.key, self._searches)
        self._searches += 1
        if open_channel().rank > 0:
            self._follow(key, func)
            return
        options = {"gc_after_trial": gc_after_trial, "show_progress_bar": show_progress_bar}
        self._lead(key, func, [*(callbacks or ())], n_trials=n_trials, timeout=timeout, catch=catch, **options)

    def _lead(self, key: Key, func: Callable[[Any], Any], callbacks: list[Callable[..., None]], **options: Any) -> None:
        """Run the search on rank 0."""
        channel, numbers, failures = open_channel(), count(), list[Exception]()

        def objective(trial: optuna.Trial) -> Any:
            of_trial, error = (*key, next(numbers)), None
            channel.send(of_trial, "begin", (trial.number, trial.user_attrs))
            channel.start_ranks_at(of_trial)
            try:
                return func(_Trial(trial, of_trial))
            except Exception as raised:
                error = raised
                raise
            finally:
                for value, step in channel.list_of(of_trial):
                    trial.report(value, step)
                try:
                    channel.check_alike(of_trial, error)
                except Exception as different:
                    failures.append(different)

        def end_if_different(*_: Any) -> None:
            for failure in failures:
                raise failure

        error: BaseException | None = None
        try:
            super().optimize(objective, callbacks=[end_if_different, *callbacks], **options)
        except BaseException as raised:
            error = raised
            raise
        finally:
            channel.send((*key, next(numbers)), "begin", None)
            failed = None if error is None else Failure.of(0, error)
            channel.send(key, "end", (failed and (failed.exception or failed.error()), *self.state()))
            for rank in range(1, num_ranks()) if error is None else ():
                with suppress(TimeoutError):  # under gossip, a rank may be lost
                    channel.receive(key, f"received {rank}", seconds=_END_S)

    def _follow(self, key: Key, func: Callable[[Any], Any]) -> None:
        """Run the trials of rank 0 on another rank."""
        channel = open_channel()
        for number in count():
            of_trial = (*key, number)
            begin = channel.receive(of_trial, "begin")
            if begin is None:
                break
            if of_trial < channel.first:
                continue
            error = None
            try:
                func(_FollowingTrial(self, of_trial, *begin))
            except Exception as raised:
                error = raised
            channel.check_alike(of_trial, error)
        failed, *state = channel.receive(key, "end")
        self.receive(*state)
        channel.send(key, f"received {channel.rank}", None)
        if failed is not None:
            set_report(failed, "", "")  # rank 0 shows it
            raise failed

    @override
    def ask(self, *args: Any, **kwargs: Any) -> optuna.Trial:
        """Returns a new trial; on rank 0 only."""
        if open_channel().rank > 0:
            raise RuntimeError("The study does not support ask and tell on several ranks. Use study.optimize.")
        return super().ask(*args, **kwargs)

    def state(self) -> tuple[list[Any], dict[str, Any]]:
        """Returns trials and attributes for :meth:`receive` of other ranks."""
        return self.get_trials(deepcopy=False), self.user_attrs

    def receive(self, trials: list[Any], user_attrs: dict[str, Any]) -> None:
        """Set trials and attributes of rank 0."""
        vars(self._storage)["received"] = trials
        for name, value in user_attrs.items():
            self.set_user_attr(name, value)


class _Received(optuna.storages.InMemoryStorage):
    """Storage of a rank that follows, with the trials of rank 0."""

    received: Sequence[Any] = ()

    @override
    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[Any]:
        found = [each for each in self.received if states is None or each.state in states]
        return copy.deepcopy(found) if deepcopy else found

    get_best_trial = optuna.storages.BaseStorage.get_best_trial


class _Trial(optuna.Trial):
    """Trial of rank 0, which sends its values."""

    def __init__(self, trial: optuna.Trial, key: Key) -> None:
        self.__dict__.update(vars(trial))
        self._key, self._decisions, self._pid = key, 0, os.getpid()

    def _share(self, name: str, value: Any) -> Any:
        open_channel().send(self._key, name, value)
        return value

    @override
    def suggest_float(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._share(f"value {name}", super().suggest_float(name, *args, **kwargs))

    @override
    def suggest_int(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._share(f"value {name}", super().suggest_int(name, *args, **kwargs))

    @override
    def suggest_categorical(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._share(f"value {name}", super().suggest_categorical(name, *args, **kwargs))

    @override
    def report(self, value: float, step: int) -> None:
        super().report(value, step)
        if self._pid != os.getpid():  # a copy in a spawned rank
            open_channel().append(self._key, (value, step))

    @override
    def should_prune(self) -> bool:
        self._decisions += 1
        return self._share(f"decision {self._decisions}", super().should_prune())


class _FollowingTrial(optuna.trial.FixedTrial):
    """Trial of another rank, which receives the values of rank 0."""

    def __init__(self, study: _Study, key: Key, number: int, user_attrs: dict[str, Any]) -> None:
        super().__init__(_Values(key), number)
        self.study, self._key, self._decisions = study, key, 0
        for name, value in user_attrs.items():
            self.set_user_attr(name, value)

    @override
    def should_prune(self) -> bool:
        self._decisions += 1
        return _receive(self._key, f"decision {self._decisions}", "should_prune")


class _Values(dict[str, Any]):
    """Parameters of a trial, received when they are read."""

    def __init__(self, key: Key) -> None:
        self._key = key

    @override
    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Any:
        self[name] = value = _receive(self._key, f"value {name}", f"a value of {name!r}")
        return value


def _receive(key: Key, name: str, request: str) -> Any:
    try:
        return open_channel().receive(key, name, end="outcome 0")
    except TimeoutError:
        raise RuntimeError(
            f"The objective must use its trial equally on all ranks, got a request for {request}, which rank 0 did not make. "
            "Remove branches on the rank around it."
        ) from None
