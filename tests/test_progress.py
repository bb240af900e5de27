"""Long work at a terminal, a pseudo-terminal here: bar, rate and remaining time; nothing where there is none."""

from __future__ import annotations

import logging
import os
import pty
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from common import CLASSES, awkward_graph, build
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from numba import njit

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, check_parity, compare
from lightning_gnn import console as console_module
from lightning_gnn.console import progress_bar
from lightning_gnn.extensions.plans.presets import dgx1
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.ways import fastest_plans
from lightning_gnn.kernels import run as run_module
from lightning_gnn.partition import edge_cut
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.strategies.vertex_cut.cutters import assign_edges
from lightning_gnn.tools.advising import advice as advice_module
from lightning_gnn.tools.advising.advice import quiet_trainer
from lightning_gnn.tools.comparing import run as comparing_run

HIDDEN_CURSOR = "\x1b[?25l"
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A pseudo-terminal as standard error, of this process and those that it starts."""

    def __init__(self) -> None:
        self.read, self._slave = pty.openpty()
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._listen)
        self._reader.start()

    def _listen(self) -> None:
        while True:
            try:
                part = os.read(self.read, 1 << 16)
            except OSError:  # nobody has it open any more
                return
            self._parts.append(part)

    @contextmanager
    def as_stderr(self) -> Iterator[None]:
        sys.stderr.flush()
        kept, before = os.dup(2), sys.stderr
        os.dup2(self._slave, 2)
        sys.stderr = os.fdopen(os.dup(self._slave), "w")
        try:
            yield
        finally:
            sys.stderr.close()
            sys.stderr = before
            os.dup2(kept, 2)
            os.close(kept)
            os.close(self._slave)
            self._reader.join()
            os.close(self.read)

    @property
    def shown(self) -> str:
        return b"".join(self._parts).decode()

    def lines(self) -> list[str]:
        """What was on a line at some time."""
        found = (re.sub("[━╸╺ ]+", " ", line).strip() for line in re.split(r"[\r\n]+", CODES.sub("", self.shown)))
        return [line for line in found if line]


@pytest.fixture
def each_step_is_shown(monkeypatch):
    """However fast it is: small graphs take less than a refresh."""
    update = console_module._Bars.update

    def shown(self, *args, **kwargs):
        update(self, *args, **kwargs)
        self.refresh()

    monkeypatch.setattr(console_module._Bars, "update", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(edge_cut, "GOOD_EDGE_BALANCE", 0.0)  # so that all balance settings are tried


def at_terminal(work: Callable[[], object]) -> Terminal:
    """Returns what a terminal has shown of work, which leaves it as it was."""
    terminal, streams = Terminal(), sys.stdout
    with terminal.as_stderr():
        stderr = sys.stderr
        try:
            work()
        finally:
            assert sys.stderr is stderr and sys.stdout is streams
    assert not any(thread.name == "progress_bar" for thread in threading.enumerate())
    assert HIDDEN_CURSOR not in terminal.shown
    return terminal


def graph(num_nodes: int = 300) -> tuple[np.ndarray, int]:
    rng = np.random.default_rng(0)
    heads = (num_nodes * rng.random((2, 8 * num_nodes)) ** 3).astype(np.int64)
    return heads[:, heads[0] != heads[1]], num_nodes


def relation() -> Relation:
    rng = np.random.default_rng(1)
    return Relation.from_masks(rng.integers(1, 256, 400).astype(np.uint64), np.arange(0, 401, 50))


def module() -> NodeClassifier:
    return NodeClassifier(build("gcn"), num_classes=CLASSES).double()


WORK: dict[str, tuple[Callable[[], object], list[str]]] = {
    "metis": (
        lambda: assign_nodes(*graph(), 4, "metis"),
        [
            r"Partitioning \(metis\) 0 of 3 .*of up to about",
            r"Partitioning \(metis\) 1 of 3 \S+ balance settings/s .*left",
        ],
    ),
    "metis_cover": (
        lambda: assign_nodes(*graph(), 4, "metis_cover"),
        [r"Partitioning \(metis_cover\) 1 of 3", r"Moving nodes for a cover \S+ rounds/s"],
    ),
    "streaming": (
        lambda: assign_nodes(*graph(), 4, "streaming"),
        [r"Partitioning \(streaming\) 1 of 2 \S+ balance settings/s .*left"],
    ),
    "ne": (
        lambda: assign_edges(*graph(), 4, "ne"),
        [r"Partitioning \(ne\) [1-9]\d* % [\d,]+ edges/s .*left"],
    ),
    "vertex cut, streaming": (
        lambda: assign_edges(*graph(), 4, "streaming"),
        [r"Partitioning \(streaming\) 25 % [\d,]+ edges/s .*left", r"Partitioning \(streaming\) 100 %"],
    ),
    "ebv": (lambda: assign_edges(*graph(), 4, "ebv"), [r"Partitioning \(ebv\) 00:00 of up to about"]),
    "planning": (
        lambda: fastest_plans(relation(), dgx1()),
        [r"Planning over \S+ 1 of 4 \S+ plans/s .*left"],
    ),
    "advising": (
        lambda: advice_module.advise_on(
            advice_module.Machine.of(2),
            module(),
            GraphDataModule(awkward_graph()),
            only=[*advice_module.candidates(2)][:2],
            overhead=0.0,
        ),
        [r"Rehearsing steps of 2 ranks 1 of 2 \S+ strategies/s .*left", r"Partitioning \(metis\)"],
    ),
    "checking": (
        lambda: check_parity(module(), GraphDataModule(awkward_graph()), ["dgcl", "spmm_1d"]),
        [r"Comparing with one device 1 of 2 \S+ strategies/s .*left"],
    ),
}


@pytest.mark.parametrize("work, expected", WORK.values(), ids=WORK)
def test_work_shows_progress(work, expected, each_step_is_shown, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_GNN_STORE", str(tmp_path))
    lines = at_terminal(work).lines()
    for each in expected:
        assert any(re.search(each, line) for line in lines), (each, lines)


@pytest.mark.parametrize("work", [work for work, _ in WORK.values()], ids=WORK)
def test_it_is_quiet_without_a_terminal(work, each_step_is_shown, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("LIGHTNING_GNN_STORE", str(tmp_path))
    monkeypatch.setattr(console_module._Bars, "start", lambda self: pytest.fail("a display"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        work()
    written = capfd.readouterr().err
    assert not any(mark in written for mark in ("━", "\x1b", "\r")), written


def test_what_is_printed_meanwhile_has_lines_of_its_own(each_step_is_shown, monkeypatch):
    """Log handlers have the standard error that was there when they were made, which is a line with a bar by now."""
    logger = logging.getLogger("a.library")

    def work() -> None:
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        try:
            with progress_bar("Sorting", 3, "edges") as told:
                told(1)
                logger.error("a record")
                warnings.warn("a warning", stacklevel=1)
                print("to standard error", file=sys.stderr)
                told(1)
            assert handler.stream is sys.stderr
        finally:
            logger.removeHandler(handler)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *rest: print(message, file=sys.stderr))
        lines = at_terminal(work).lines()
    for text in ("a record", "a warning", "to standard error"):
        assert text in lines
    assert any(re.fullmatch(r"Sorting 2 of 3 \S+ edges/s 00:00 00:01 left", line) for line in lines)


def test_standard_output_in_a_file_gets_what_it_is_told(each_step_is_shown, capfd):
    def work() -> None:
        with progress_bar("Sorting", 3):
            print("an answer")

    terminal = at_terminal(work)
    assert "an answer" not in terminal.shown and capfd.readouterr().out == "an answer\n"


def test_work_inside_other_work_is_another_line(each_step_is_shown):
    def work() -> None:
        with progress_bar("Outer", 2, "strategies") as outer:
            with progress_bar("Inner", 4, "edges") as inner:
                inner(2)
            outer(1)

    lines = at_terminal(work).lines()
    inside = next(place for place, line in enumerate(lines) if line.startswith("Inner 2 of 4"))
    assert lines[inside - 1].startswith("Outer 0 of 2")
    after = next(place for place, line in enumerate(lines) if line.startswith("Outer 1 of 2"))
    assert not any(line.startswith("Inner") for line in lines[after:])


def bar() -> None:
    with progress_bar("Sorting", 2) as told:
        told(1)


def off_main_thread() -> None:
    thread = threading.Thread(target=bar)
    thread.start()
    thread.join()


@pytest.mark.parametrize("what", ["another rank", "another thread", "a dumb terminal"])
def test_where_no_bar_is_shown(what, each_step_is_shown, monkeypatch):
    if what == "another rank":
        monkeypatch.setattr(rank_zero_only, "rank", 1)
    elif what == "a dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
    assert not at_terminal(off_main_thread if what == "another thread" else bar).shown
    monkeypatch.undo()


@pytest.fixture
def interrupts():
    """Interrupts raise KeyboardInterrupt, also in a process that a shell started in the background, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_leaves_the_terminal_as_it_was(each_step_is_shown, interrupts):
    """Checked by at_terminal: streams are restored, no thread goes on, the cursor was never hidden."""

    def work() -> None:
        with progress_bar("Outer", 2), progress_bar("Sorting", 2) as told:
            told(1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        at_terminal(work)
    assert console_module._display is None
    assert any(line.startswith("Sorting 1 of 2") for line in at_terminal(bar).lines())


@pytest.mark.parametrize("where", ["in a bar", "in set-up", "in training"])
def test_compiling_is_shown_in_set_up_alone(where, each_step_is_shown):
    def doubled(x):
        return 2 * x

    doubled.__module__ = "lightning_gnn.kernels.loops"
    loop = njit(doubled)
    around = {"in a bar": lambda: progress_bar("Outer", 2), "in set-up": run_module._announcer.in_set_up}

    def work() -> None:
        with around.get(where, nullcontext)():
            assert loop(2) == 4
            loop(3)

    shown = [line for line in at_terminal(work).lines() if re.match("Compiling loops.doubled, once 00:0", line)]
    assert bool(shown) == (where != "in training")
    assert not run_module._announcer._bars


def test_compare_shows_its_cells(each_step_is_shown, tmp_path, monkeypatch, capfd):
    def run_cell(comparison, cell, folder, report):
        folder.mkdir(parents=True)
        report("epoch 1 of 3")
        time.sleep(0.25)
        return {"status": "failed"}

    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(comparing_run, "_run_cell", run_cell)
    model = {"class_path": "lightning_gnn.NodeClassifier", "init_args": {"model": "test_progress.gcn"}}
    monkeypatch.setattr(comparing_run, "check", lambda comparison: comparison)
    cells = ["dgcl", "cover", "spmm"]
    lines = at_terminal(lambda: compare(model, {"source": "karate"}, cells, output=tmp_path)).lines()
    assert any(re.search(r"Comparing 1 of 3 \S+ runs/s .*left", line) for line in lines)
    assert any("epoch 1 of 3" in line for line in lines)
    written = capfd.readouterr().out
    assert "[2 of 3] cover x 2: failed" in written and "Comparing" not in written


def test_rank_0_of_a_trainer_shows_the_bars_of_its_graph(each_step_is_shown, tmp_path):
    data = GraphDataModule(awkward_graph(), partition_dir=tmp_path)
    trainer = quiet_trainer(max_epochs=1, strategy=DGCLStrategy(self_check=False))
    lines = at_terminal(lambda: trainer.fit(module(), datamodule=data)).lines()
    assert any(line.startswith("Partitioning (metis)") for line in lines)
    assert any(line.startswith("Writing parts") for line in lines)


def test_a_graph_that_another_process_partitions(tmp_path, monkeypatch):
    """It has the terminal meanwhile, and shows its bars there."""
    monkeypatch.setenv("TERM", "xterm")
    data = GraphDataModule("lightning_gnn.planted_partition", {"num_nodes": 20_000}, partition_dir=tmp_path)

    def work() -> None:
        with progress_bar("Outer", 2):
            time.sleep(0.25)
            data.partition_for(DGCLStrategy().scheme.layout(4))
            time.sleep(0.25)

    terminal = at_terminal(work)
    lines = [re.match(r"\w+", line)[0] for line in terminal.lines()]
    inside = [place for place, word in enumerate(lines) if word in ("Partitioning", "Writing")]
    outside = [place for place, word in enumerate(lines) if word == "Outer"]
    assert inside and outside[0] < inside[0] and inside[-1] < outside[-1]
    assert not any(inside[0] < place < inside[-1] for place in outside)
    after = terminal.shown.rpartition("Writing parts")[2].partition("Outer")[0]
    assert "\x1b[1A" not in after.partition("Partitioned in")[2]  # what that process has written stays
