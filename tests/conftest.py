"""Fixtures: a pool of rank processes, started once per session, and the real graphs beside the checkout.

Test tiers: without ranks; gloo ranks in the pool; GPU.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before numba and torch are imported, here and in every rank.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest
import torch.multiprocessing as mp

TESTS = Path(__file__).parent
_FOLDERS = sorted(each.parent for each in TESTS.glob("*/**/test_*.py") if not (each.parent / "__init__.py").exists())
sys.path[:0] = dict.fromkeys(map(str, [TESTS, *_FOLDERS]))  # some tests share what is in those of other folders
SHARED = Path(os.environ.get("LIGHTNING_GNN_SHARED", TESTS.parent.parent / "shared"))


def _serve(connection: Any, rank: int, begin: Callable[[], None] | None, forked: bool) -> None:
    """One rank of the pool: runs the functions that it is sent."""
    import warnings

    import torch
    import warm

    if forked:
        warm.serve_from_here()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for deprecated in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
        warnings.filterwarnings("error", category=deprecated, module="lightning_gnn")
    if begin is not None:
        begin()
    gc.freeze()  # each run looks for the tensors of its process: those of imported modules are no one's
    while True:
        job = connection.recv()
        if job is None:
            return
        function, world_size, port, args, kwargs = job
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            LOCAL_RANK=str(rank),
            NODE_RANK="0",
            WORLD_SIZE=str(world_size),
        )
        try:
            connection.send(("done", function(rank, world_size, *args, **kwargs)))
        except BaseException as error:
            connection.send(("failed", f"{type(error).__name__}: {error}", traceback.format_exc()))
        # What Lightning leaves behind: DDP its group, and Trainer(deterministic=True) functions that other ranks do not take.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.use_deterministic_algorithms(False)


class RankFailed(AssertionError):
    """A rank raised; the message carries every failed rank's traceback, `errors` their last lines."""

    def __init__(self, failures: dict[int, tuple[str, str]]) -> None:
        self.errors = {rank: line for rank, (line, _) in failures.items()}
        super().__init__("\n".join(f"rank {rank}:\n{text}" for rank, (_, text) in failures.items()))


class RankPool:
    """Processes that have imported torch, Lightning and PyG, and run functions ``f(rank, world_size, ...)`` together.

    There are as many as any test has asked for until now.

    Args:
        begin: what each runs first.
    """

    start_method = "forkserver"

    def __init__(self, begin: Callable[[], None] | None = None) -> None:
        self._begin = begin
        self._ranks: list[tuple[Any, Any]] = []

    def _start(self, size: int) -> None:
        context = mp.get_context(self.start_method)
        if self.start_method == "forkserver":
            context.set_forkserver_preload(["common"])  # imported once for all
        for rank in range(len(self._ranks), size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self._begin, self.start_method == "forkserver"), daemon=True
            )
            process.start()
            self._ranks.append((process, ours))

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any
    ) -> list[Any]:
        """Returns what `function` returns on each rank; raises `RankFailed` with the tracebacks, or on a time-out."""
        self._start(world_size)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = self._ranks[:world_size]
        for _, connection in ranks:
            connection.send((function, world_size, port, args, kwargs))
        results, failures = [], {}
        for rank, (_, connection) in enumerate(ranks):
            if not connection.poll(timeout):
                self.close()
                failures[rank] = ("timeout", f"no answer within {timeout} s; the pool was restarted")
                raise RankFailed(failures)
            try:
                answer = connection.recv()
            except EOFError:
                self.close()
                failures[rank] = ("died", "its process has ended; the pool was restarted")
                raise RankFailed(failures) from None
            if answer[0] == "failed":
                failures[rank] = answer[1:]
            else:
                results.append(answer[1])
        if failures:
            raise RankFailed(failures)
        return results

    def close(self) -> None:
        """Ends the processes."""
        for process, connection in self._ranks:
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
        self._ranks = []


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def context() -> Iterator[Any]:
    """The awkward graph as convs that are bound to its one part see it; the graph's own edges, no weights."""
    # Imported here: a rank of the pool imports this file, too.
    from datetime import timedelta

    import torch
    from common import awkward_graph

    from lightning_gnn.comm.exchange import HaloExchange
    from lightning_gnn.comm.group import World
    from lightning_gnn.comm.traffic import Meter
    from lightning_gnn.data.shards import whole_graph
    from lightning_gnn.nn import GraphContext

    shard = whole_graph(awkward_graph())
    world = World(0, 1, torch.device("cpu"), timedelta(seconds=5))
    yield GraphContext(HaloExchange(shard.plan, world, Meter()), shard.batch.x, shard.batch.edge_index, None)
    world.close()


@pytest.fixture(scope="session", autouse=True)
def _own_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    from processes import ENVIRONMENT

    os.environ["LIGHTNING_GNN_STORE"] = str(tmp_path_factory.mktemp("store"))
    ENVIRONMENT.update(os.environ)


def pytest_configure(config: pytest.Config) -> None:
    import warm
    from processes import environment

    if not hasattr(config, "workerinput"):  # xdist's workers are forked, too
        warm.start(environment())


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several cases of a program, all but the first are of the campaign; of a test over ranks, all but the last."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if {"ranks", "ran"} & {*getattr(item, "fixturenames", ())} and item.get_closest_marker("campaign") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for alike in cases.values():
        for item in alike[1:] if "ran" in alike[0].fixturenames else alike[:-1]:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.campaign)
    # What is of every day on the CPU is of the campaign on the emulated device.
    again = [item for item in items if item.path.name == "test_again.py"]
    left_out = {item for item in again if item.get_closest_marker("campaign") is not None}
    items[:] = [item for item in items if item not in left_out]
    for item in again:
        item.add_marker(pytest.mark.campaign)


@pytest.fixture
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder that the function in this test's mark ``program`` was given, beside the test's parameters, and its result."""
    mark, folder = request.node.get_closest_marker("program"), tmp_path_factory.mktemp("ran")
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    return folder, mark.kwargs["runs"](folder, **parameters)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Trainers set MASTER_PORT, LOCAL_RANK and the like; the next test must not see them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What launched.py gives under Lightning's own strategy, on one device."""
    from launched import results
    from processes import REPOSITORY, run

    folder = tmp_path_factory.mktemp("one_device")
    run(REPOSITORY / "tests" / "launched.py", "auto", 1, folder, cwd=folder).succeeded()
    return results(folder)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A writable copy of the small real graphs (PyG writes processed files beside the raw ones)."""
    if not (SHARED / "data").is_dir():
        pytest.skip(
            f"needs the data folder {SHARED / 'data'} (set LIGHTNING_GNN_SHARED to the folder that holds data/)"
        )
    import shutil

    folder = tmp_path_factory.mktemp("shared")
    for name in ("planetoid", "amazon/Computers"):
        shutil.copytree(SHARED / "data" / name, folder / name)
    return folder
