"""Hydra applications on all ranks: rank 0 runs Hydra, and the other ranks receive the configuration of each job."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import update_wrapper, wraps
from typing import Any

from lightning_gnn.tools.channel import open_channel

try:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("lightning_gnn.hydra needs Hydra, which is not installed. Run pip install hydra-core.") from error

__all__ = ["main"]

Task = Callable[[Any], Any]


def main(*arguments: Any, **options: Any) -> Callable[[Task], Callable[..., Any]]:
    """Returns a decorator like ``hydra.main``, under which all ranks use the configuration and the output folder of rank 0.

    Only rank 0 parses the command line, and writes folders and logs. This includes ``--multirun`` with any sweeper; the jobs
    must run in the process that the user started, as under Hydra's basic launcher.

    Args:
        *arguments: arguments of ``hydra.main``.
        **options: further arguments of ``hydra.main``.
    """

    def decorate(task: Task) -> Callable[..., Any]:
        run = hydra.main(*arguments, **options)(_Job(task))

        @wraps(task)
        def start(config: Any = None) -> Any:
            if config is not None:
                return task(config)
            channel = open_channel()
            if channel.rank > 0:
                return _follow(task)
            try:
                return run()
            finally:
                channel.send(channel.next_job(), "job", None)

        return start

    return decorate


class _Job:
    """Function of rank 0 that sends the job's configuration, and runs the job."""

    def __init__(self, task: Task) -> None:
        update_wrapper(self, task)
        self._task, self.__code__ = task, task.__code__  # Hydra finds the folder of configurations by the code's file

    def __call__(self, config: Any) -> Any:
        channel = open_channel()
        key = channel.next_job()
        channel.start_ranks_at(key)
        with suppress(OmegaConfBaseException):  # caches values that differ between evaluations, such as ${now:%S}
            OmegaConf.to_container(config, resolve=True)
        channel.send(key, "job", (config, HydraConfig.instance().cfg, os.getcwd()))
        return self._task(config)


def _follow(task: Task) -> None:
    """Run the jobs of rank 0 on another rank."""
    setup_globals()
    channel = open_channel()
    while (job := channel.receive(key := channel.next_job(), "job")) is not None:
        if key < channel.first[:1]:
            continue
        config, of_hydra, folder = job
        HydraConfig.instance().set_config(of_hydra)
        os.chdir(folder)
        task(config)
