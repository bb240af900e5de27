"""How ranks are started."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils._pytree import tree_map
from typing_extensions import override

if TYPE_CHECKING:
    from lightning_gnn.strategies.base import GNNStrategy

StartMethod = Literal["popen", "spawn", "fork"]


def make_launcher(strategy: GNNStrategy, start_method: StartMethod) -> _Launcher | None:
    """Returns what starts the ranks, or None where this process is the only one."""
    environment = strategy.cluster_environment
    assert environment is not None
    if start_method not in ("popen", "spawn", "fork"):
        raise ValueError(f"start_method must be 'popen', 'spawn' or 'fork' (got {start_method!r}).")
    ranks = strategy.num_processes * strategy.num_nodes
    if ranks == 1 and not environment.creates_processes_externally:
        return None
    if start_method == "popen":
        return _SubprocessScriptLauncher(environment, strategy.num_processes, strategy.num_nodes)
    if environment.creates_processes_externally:
        raise ValueError(
            f"The ranks have been started already ({type(environment).__name__}), and start_method={start_method!r} would start "
            'each of them again. Use strategy="dgcl" under torchrun and SLURM.'
        )
    return ProcessLauncher(strategy, start_method)


class ProcessLauncher(_Launcher):
    """Starts processes that each run one call of the Trainer, and brings rank 0's results back to the caller.

    The caller's model gets the trained weights; metrics, the best checkpoint's path, the loop's progress and
    predictions come back as well.

    Args:
        strategy: whose ranks are started.
        start_method: ``"spawn"``, or ``"fork"``, the one that works in notebooks.
    """

    def __init__(self, strategy: GNNStrategy, start_method: Literal["spawn", "fork"]) -> None:
        self._strategy, self._start_method = strategy, start_method
        self._processes: list[Any] = []

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self._start_method == "fork"

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        if self._start_method == "fork" and torch.cuda.is_initialized():
            raise RuntimeError(
                "CUDA is in use in this process, and a fork of it cannot use CUDA. Restart the kernel and create no CUDA "
                "tensor before trainer.fit, or run a script with strategy='dgcl'."
            )
        environment = self._strategy.cluster_environment
        assert environment is not None
        os.environ["MASTER_PORT"] = str(environment.main_port)  # chosen once, here
        folder = Path(tempfile.mkdtemp(prefix="lightning_gnn."))
        random_states = _collect_rng_states() if self._start_method == "spawn" else None
        try:
            running = mp.start_processes(
                self._run,
                args=(folder, random_states, trainer, function, args, kwargs),
                nprocs=self._strategy.num_processes,
                start_method=self._start_method,
                join=False,
            )
            assert running is not None
            self._processes = running.processes
            while not running.join():
                pass
            # Through a file: a pipe would block on results that nobody reads before the processes have ended.
            results = torch.load(folder / "results.pt", weights_only=False)
        finally:
            self._processes = []
            shutil.rmtree(folder, ignore_errors=True)
            os.environ.pop("MASTER_PORT", None)
        if trainer is not None:
            _restore(trainer, results)
        return results["output"]

    def _run(
        self,
        local_rank: int,
        folder: Path,
        random_states: dict[str, Any] | None,
        trainer: pl.Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> None:
        """Runs in each started process."""
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        if random_states is not None:
            _set_rng_states(random_states)
        if self._start_method == "fork":
            torch.set_num_threads(1)  # OpenMP's threads did not come along, and waiting for them would hang
        else:
            _set_num_threads_if_needed(num_processes=self._strategy.num_processes)
        os.environ["LOCAL_RANK"] = str(local_rank)
        if self._start_method == "spawn":  # parameters arrive in shared memory: each rank needs its own
            for module in (a for a in (*args, *kwargs.values()) if isinstance(a, torch.nn.Module)):
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.data = tensor.data.clone()
        output = function(*args, **kwargs)
        if local_rank == 0:
            results = {"output": output} if trainer is None else {**_collect(trainer), "output": output}
            torch.save(tree_map(_to_cpu, results), folder / "results.pt")

    @override
    def kill(self, signum: Any) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signum)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_processes": []}


def _end_with(parent: int) -> None:
    """Ends this process once its parent is gone: nobody would wait for its results, or end it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _to_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _collect(trainer: pl.Trainer) -> dict[str, Any]:
    module = trainer.lightning_module
    return {
        "state": trainer.state,
        "weights": module.state_dict() if trainer.state.fn == TrainerFn.FITTING else None,
        "best_model_path": getattr(trainer.checkpoint_callback, "best_model_path", None),
        "callback_metrics": dict(trainer.callback_metrics),
        "fit_loop": trainer.fit_loop.state_dict(),
    }


def _restore(trainer: pl.Trainer, results: dict[str, Any]) -> None:
    if results["weights"] is not None:
        trainer.lightning_module.load_state_dict(results["weights"])
        trainer.fit_loop.load_state_dict(results["fit_loop"])
    if results["best_model_path"] is not None and trainer.checkpoint_callback is not None:
        trainer.checkpoint_callback.best_model_path = results["best_model_path"]  # type: ignore[attr-defined]
    trainer.state = results["state"]
    trainer.callback_metrics.update(results["callback_metrics"])
