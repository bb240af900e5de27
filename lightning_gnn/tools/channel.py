"""Store by which ranks follow rank 0 through a script between calls of the Trainer.

Such code may begin before the other ranks are started, and outlives process groups. Started ranks find a store of rank 0 by an
environment variable. Ranks that already run use the store at which they meet.
"""

from __future__ import annotations

import os
import pickle
import time
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_gnn.comm.group import next_store
from lightning_gnn.comm.listening import listen_for_ranks
from lightning_gnn.launching import RankFailedError
from lightning_gnn.launching.failures import set_report
from lightning_gnn.launching.script import num_script_ranks

_VARIABLE = "LIGHTNING_GNN_CHANNEL"
"""Environment variable of a started rank: process id of rank 0, port of its store, and the key of its position."""
_LOCAL = "127.0.0.1"
_ALIKE_S = 10.0
"""Seconds by which ranks may differ in the time at which they raise an error."""
_MEET = timedelta(minutes=30)
"""Time for ranks that already run to meet."""

Key = tuple[int, ...]
"""Numbers of Hydra's job (0 for none), and of the study, search and trial in it."""


class Channel:
    """Values that rank 0 sends to the other ranks.

    Attributes:
        rank: this rank.
        first: key of the position of rank 0 in the script when this rank was started.
    """

    def __init__(self, rank: int, store: dist.Store, first: Key = ()) -> None:
        self.rank, self.first, self._store = rank, first, store
        self._job = self._studies = 0

    def next_job(self) -> Key:
        """Returns the key of the next job of Hydra."""
        self._job, self._studies = self._job + 1, 0
        return (self._job,)

    def next_study(self) -> Key:
        """Returns the key of the next study of a job."""
        self._studies += 1
        return (self._job, self._studies - 1)

    def start_ranks_at(self, key: Key) -> None:
        """Let ranks that are started from here on begin at a position."""
        if _VARIABLE in os.environ:
            parent, port, *_ = os.environ[_VARIABLE].split()
            os.environ[_VARIABLE] = " ".join([parent, port, *map(str, key)])

    def send(self, key: Key, name: str, value: Any) -> None:
        self._store.set(f"{key}/{name}", pickle.dumps(value).hex())

    def append(self, key: Key, value: Any) -> None:
        """Add a value to the list of :meth:`list_of`."""
        self.send(key, f"item {self._store.add(f'{key}/items', 1)}", value)

    def list_of(self, key: Key) -> list[Any]:
        """Returns the list of values that any process has added."""
        return [self.receive(key, f"item {each}") for each in range(1, self._store.add(f"{key}/items", 0) + 1)]

    def receive(self, key: Key, name: str, end: str | None = None, seconds: float = float("inf")) -> Any:
        """Returns a value that another rank sends.

        Args:
            key: key of the trial, search or study.
            name: name of the value.
            end: name of another value, after which this value is not sent any more.
            seconds: timeout.

        Raises:
            TimeoutError: the value was not sent.
            RankFailedError: rank 0 has ended.
        """
        deadline = time.monotonic() + seconds
        try:
            while True:
                late = time.monotonic() > deadline or (end is not None and self._store.check([f"{key}/{end}"]))
                if self._store.check([f"{key}/{name}"]):
                    return pickle.loads(bytes.fromhex(self._store.get(f"{key}/{name}").decode()))
                if late:
                    raise TimeoutError
                time.sleep(0.005)
        except dist.DistError:
            failed = RankFailedError("Rank 0 ended during the search.")
            set_report(failed, "", "")  # rank 0 shows the cause
            raise failed from None

    def check_alike(self, key: Key, error: Exception | None) -> None:
        """Raises an error if the objective ended with different types of errors on different ranks."""
        own = "no error" if error is None else type(error).__name__
        self.send(key, f"outcome {self.rank}", own)
        if isinstance(error, RankFailedError):
            raise error
        others = [0] if self.rank else range(1, num_ranks()) if error is not None else ()
        for rank in others:
            try:
                other = self.receive(key, f"outcome {rank}", seconds=float("inf") if error is None else _ALIKE_S)
            except TimeoutError:
                other = "no end of the objective"
            if other != own:
                failed = RuntimeError(
                    f"The objective must end equally on all ranks, got {own} on rank {self.rank} and {other} on rank {rank}. "
                    "Raise errors on all ranks; use PruningCallback to prune."
                )
                if error is None:
                    set_report(failed, "", "")  # rank 0 shows the cause
                raise failed from error


def num_ranks() -> int:
    """Returns the number of ranks that run the script at this time."""
    return num_script_ranks() or int(os.environ.get("SLURM_NTASKS" if SLURMEnvironment.detect() else "WORLD_SIZE", "1"))


@cache
def open_channel() -> Channel:
    """Returns the channel of this process.

    Raises:
        RuntimeError: this process is the first of a further machine, without torchrun or SLURM.
    """
    variables = os.environ
    parent, *numbers = map(int, variables.get(_VARIABLE, "0").split())
    if parent == os.getppid() and "LOCAL_RANK" in variables:
        return Channel(int(variables["LOCAL_RANK"]), dist.TCPStore(_LOCAL, numbers[0]), tuple(numbers[1:]))
    if SLURMEnvironment.detect():
        slurm = SLURMEnvironment()
        variables.update(MASTER_ADDR=slurm.main_address, MASTER_PORT=str(slurm.main_port))
        return Channel(slurm.global_rank(), next_store(slurm.global_rank(), num_ranks(), _MEET))
    if {"LOCAL_RANK", "MASTER_PORT"} <= variables.keys():
        rank = int(variables.get("RANK", variables["LOCAL_RANK"]))
        return Channel(rank, next_store(rank, num_ranks(), _MEET))
    if variables.get("NODE_RANK", "0") != "0":
        raise RuntimeError("lightning_gnn.optuna and .hydra do not support several machines with NODE_RANK. Use torchrun.")
    listener = listen_for_ranks(_LOCAL, 0, 1)
    assert listener is not None
    port = listener.getsockname()[1]
    store = dist.TCPStore(_LOCAL, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    variables[_VARIABLE] = f"{os.getpid()} {port}"
    return Channel(0, store)
