"""Loses ranks of elastic trainings at random moments of every phase, and compares the results of the others with one device.

python benchmarks/elastic.py [--kills 200] [--first 0] [--only NUMBER ...] [--seed 0] [--patience 90] [--json FILE]
                             [--planetoid ROOT] [--large]

A trial passes if its script ends with status 0 in time and leaves no process and no temporary file. The losses of all epochs
and of the test must be those of one device within 1e-10. No finished epoch is lost, and a rank that is continued after it was
lost prints nothing. ``--planetoid`` and ``--large`` measure the seconds from a SIGKILL to the next finished step instead: on
Cora, which is in the folder ROOT, and on a graph of 200,000 nodes and four million edges.

Moments: a phase is a number of calls of functions, counted in an undisturbed run; a signal falls on one of them at random.
During a recovery, another process also sends signals after random times. Exit status 1 if a trial fails; its folder is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", WANDB_MODE="disabled", PYTHONWARNINGS="ignore")

import lightning as L
import torch
from common import report
from killing import start
from kills import _is_used
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.nn.models import GCN

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, planted_partition

PHASES = (
    "set-up",
    "epoch start",
    "forward",
    "backward",
    "optimizer step",
    "validation",
    "epoch end",
    "checkpoint",
    "recovery",
    "end of fit",
    "test",
)
MANNERS = "kill", "kill", "kill", "stop", "continue", "pause"
"""Signals: SIGKILL; SIGSTOP; SIGSTOP, and SIGCONT after the others have continued; SIGSTOP, and SIGCONT after random time."""
EPOCHS, COUNTED_EPOCH = 6, 2
ACCURACY = 1e-10
MARK = "LIGHTNING_GNN_ELASTIC_TRIAL"

# PyG leaves the functions that it generates in files; torch and numba make folders for those that they compile.
_OF_OTHERS = re.compile(r".*_(propagate|edge_updater)_\w+\.py|torchinductor_|__pycache__")


@dataclass(frozen=True)
class Event:
    """Signal to a rank.

    Attributes:
        rank: rank that is lost, by its number at the begin.
        phase: phase in which it happens.
        epoch: epoch from which on it happens.
        share: part of the phase that is over, 0 to 1.
        manner: one of :data:`MANNERS`.
        after: index of an event that must have happened before; -1 for none.
        delay_s: seconds after that event at which another process sends the signal; negative: at the moment of the phase.
        paused_s: for ``pause``, seconds until SIGCONT.
    """

    rank: int
    phase: str
    epoch: int = 0
    share: float = 0.0
    manner: str = "kill"
    after: int = -1
    delay_s: float = -1.0
    paused_s: float = 0.0


@dataclass(frozen=True)
class Trial:
    """One run of the script.

    Attributes:
        ranks: number of ranks; 1 for the reference.
        model: ``"GCN"``, or ``"BatchNorm"`` for one with these layers.
        shared_memory: as of the strategy.
        timeout: as of the strategy, seconds.
        events: signals.
        graph: ``"small"``, ``"large"``, or the root folder of Cora.
        counts: whether calls of functions are counted.
    """

    ranks: int
    model: str = "GCN"
    shared_memory: bool = True
    timeout: float = 1800.0
    events: tuple[Event, ...] = ()
    graph: str = "small"
    counts: bool = False


# In each process ##############################################################

_calls: dict[str, int] = {}


class Moments:
    """Calls of functions in the phases of this rank; sends the signals of a trial to it."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self._trial, self._folder, self._rank = trial, folder, int(os.environ.get("LOCAL_RANK", "-1"))
        self._counts: Counter[str] = Counter()
        self.phase = ""

    def begin(self, phase: str, epoch: int = EPOCHS) -> None:
        """Begin a phase, and end the last."""
        self.end()
        self.phase = phase
        if self._trial.counts and epoch in (COUNTED_EPOCH, EPOCHS):
            self._counts[phase] = 0
            sys.setprofile(self._count)
        for number, event in enumerate(self._trial.events):
            again = event.phase == "recovery" and phase == "set-up"
            chosen = event.rank == self._rank and (event.phase == phase or again) and epoch >= event.epoch and event.delay_s < 0
            ready = event.after < 0 or (self._folder / f"when{event.after}").exists()
            if chosen and ready and not (self._folder / f"when{number}").exists():
                left = max(1, int(event.share * _calls.get(phase, 1)))

                def look(frame: Any, kind: str, argument: Any, number: int = number) -> None:
                    nonlocal left
                    left -= 1
                    if left == 0:
                        self._fire(number)

                self._due = number
                sys.setprofile(look)

    _due = -1

    def end(self) -> None:
        """End the phase, and send a signal that is still due."""
        if self._due >= 0:
            self._fire(self._due)
        sys.setprofile(None)
        if self._trial.counts:
            (self._folder / f"calls{self._rank}.json").write_text(json.dumps(self._counts))

    def _count(self, frame: Any, kind: str, argument: Any) -> None:
        self._counts[self.phase] += 1

    def _fire(self, number: int) -> None:
        sys.setprofile(None)
        self._due = -1
        (self._folder / f"when{number}").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL if self._trial.events[number].manner == "kill" else signal.SIGSTOP)


def say(trainer: Any, kind: str, value: float = 0.0) -> None:
    """Print a line in one piece: kind, time, process, rank, number of ranks, epoch and a number."""
    numbers = time.time(), os.getpid(), trainer.global_rank, trainer.world_size, trainer.current_epoch, float(value).hex()
    os.write(1, f"@{kind} {' '.join(map(str, numbers))}\n".encode())


class Phases(L.Callback):
    """Callback that announces the phases of training and prints losses."""

    def __init__(self, moments: Moments) -> None:
        self._moments, self._loss = moments, 0.0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        say(trainer, "begin")
        self._moments.begin("epoch start", trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._moments.begin("forward", trainer.current_epoch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._moments.begin("backward", trainer.current_epoch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._moments.begin("optimizer step", trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._loss = outputs["loss"]
        self._moments.end()
        say(trainer, "step", self._loss)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._moments.begin("validation", trainer.current_epoch)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._moments.end()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        say(trainer, "epoch", self._loss)
        self._moments.begin("epoch end", trainer.current_epoch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._moments.begin("end of fit")

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._moments.begin("test")

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        self._moments.end()


class Saver(ModelCheckpoint):
    """Writing checkpoints is a phase."""

    def __init__(self, moments: Moments, folder: Path) -> None:
        super().__init__(folder / "checkpoints", save_last=True, save_on_train_epoch_end=True)
        self._moments = moments

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._moments.begin("checkpoint", trainer.current_epoch)
        super().on_train_epoch_end(trainer, pl_module)
        self._moments.end()


class Strategy(DGCLStrategy):
    """Strategy whose set-up is a phase."""

    moments: Moments

    def setup_environment(self) -> None:
        self.moments.begin("set-up")
        super().setup_environment()


def graph_of(trial: Trial) -> Data:
    """Returns the graph of a trial, float64."""
    if trial.graph == "large":
        data = planted_partition(200_000, average_degree=20)
    elif trial.graph == "small":
        data = planted_partition(2000)
    else:
        data = Planetoid(trial.graph, "Cora")[0]
    data.x = data.x.double()
    return data


def train(trial: Trial, folder: Path) -> None:
    """Fit and test a model, as the script of a user does."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    L.seed_everything(1, verbose=False)
    data, moments = graph_of(trial), Moments(trial, folder)
    if "LOCAL_RANK" in os.environ:
        (folder / f"pid{os.environ['LOCAL_RANK']}").write_text(str(os.getpid()))
    # A bias before BatchNorm has a gradient of rounding errors only, which Adam amplifies.
    norm = {"norm": "batch_norm", "bias": False} if trial.model == "BatchNorm" else {}
    model = NodeClassifier(GCN(data.num_features, 16, 2, int(data.y.max()) + 1, **norm), lr=0.05)
    options = (
        {"elastic": True, "self_check": False, "timeout": trial.timeout, "shared_memory": trial.shared_memory}
        if trial.ranks > 1
        else {}
    )
    strategy = Strategy(**options)
    strategy.moments = moments
    measures = trial.graph != "small"
    trainer = L.Trainer(
        strategy=strategy,
        devices=trial.ranks,
        accelerator="cpu",
        precision="64-true",
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=not measures,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[Phases(moments), *([] if measures else [Saver(moments, folder)])],
    )
    datamodule = GraphDataModule(data, partition_dir=folder / "store")
    trainer.fit(model, datamodule=datamodule)
    found = trainer.test(model, datamodule=datamodule, verbose=False)
    say(trainer, "test", found[0]["test_loss"])


# The benchmark ################################################################


@dataclass
class Line:
    """A line that the script has printed."""

    kind: str
    at: float
    pid: int
    rank: int
    size: int
    epoch: int
    value: float


@dataclass
class Ended:
    """End of a trial.

    Attributes:
        code: exit status of the first process; None if it has not ended in time.
        output: everything printed.
        lines: the lines of :func:`say`.
        orphans: command lines of processes that remained.
        when: time of each signal.
        pids: process of each rank.
        continued: time of SIGCONT by process that existed.
    """

    code: int | None
    output: str
    lines: list[Line]
    orphans: list[str]
    when: list[float | None]
    pids: dict[int, int]
    continued: dict[int, float]
    seconds: float


def processes_of(session: int, mark: str) -> list[int]:
    """Returns the running processes of a session, or with a mark in the environment that they were started with."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            state, _, _, own = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:4]
            marked = int(own) == session or mark.encode() in Path(f"/proc/{name}/environ").read_bytes()
            if marked and state not in "ZX" and int(name) != os.getpid():
                found.append(int(name))
    return found


def lines_of(output: str) -> list[Line]:
    """Returns the lines of :func:`say` in an output."""
    pattern = r"@(\w+) ([\d.]+) (\d+) (\d+) (\d+) (\d+) (\S+)"
    return [
        Line(kind, float(at), int(pid), int(rank), int(size), int(epoch), float.fromhex(value))
        for kind, at, pid, rank, size, epoch, value in re.findall(pattern, output)
    ]


def run(trial: Trial, folder: Path, patience: float) -> Ended:
    """Runs a trial to the end of all its processes; ends them after `patience` seconds."""
    folder.mkdir(exist_ok=True)
    output, mark = folder / "output.txt", uuid.uuid4().hex

    def main() -> None:
        os.environ[MARK] = mark
        train(trial, folder)

    began = time.monotonic()
    first, deadline = start(main, folder, output), began + patience
    code, continued, sent = None, dict[int, float](), set[int]()

    def moment(number: int) -> float | None:
        text = (folder / f"when{number}").read_text() if (folder / f"when{number}").exists() else ""
        return float(text) if text else None

    def process(rank: int) -> int:
        text = (folder / f"pid{rank}").read_text() if (folder / f"pid{rank}").exists() else ""
        return int(text or 0)

    while time.monotonic() < deadline:
        if code is None:
            ended, status = os.waitpid(first, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.monotonic() + 10)
        if code is not None and not processes_of(first, mark):
            break
        for number, event in enumerate(trial.events):
            pid, now, since = process(event.rank), time.time(), moment(number)
            cause = moment(event.after) if event.after >= 0 else None
            if event.delay_s >= 0 and since is None and cause is not None and now > cause + event.delay_s and pid:
                (folder / f"when{number}").write_text(str(now))
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if event.manner == "kill" else signal.SIGSTOP)
            if since is None or number in sent:
                continue
            due = event.manner == "pause" and now > since + event.paused_s
            if event.manner == "continue":
                lines = lines_of(output.read_text(errors="replace"))
                size = min([line.size for line in lines if line.at < since], default=trial.ranks)
                due = any(line.at > since and line.size < size and line.kind in ("step", "test") for line in lines)
            if due:
                sent.add(number)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                    continued[pid] = now
        time.sleep(0.02)
    left = processes_of(first, mark)
    orphans = []
    for pid in left:
        with suppress(OSError):
            orphans.append(f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()[:200]}".replace("\0", " "))
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(first, 0)
    text = output.read_text(errors="replace")
    when = [moment(number) for number in range(len(trial.events))]
    pids = {rank: process(rank) for rank in range(trial.ranks)}
    return Ended(code, text, lines_of(text), orphans, when, pids, continued, time.monotonic() - began)


def files_left(folder: Path, shared_memory: set[str], pids: Collection[int]) -> list[str]:
    """Returns temporary files that a trial has left behind."""
    found = [str(path) for path in (folder / "tmp").iterdir() if not _OF_OTHERS.match(path.name)]
    found += [str(path) for path in (folder / "checkpoints").glob("*") if path.suffix != ".ckpt"]
    found += [str(path) for path in (folder / "store").glob("*") if path.name.startswith(".") or path.suffix == ".owner"]
    known = re.compile(r"output.txt|tmp|store|checkpoints|(when|pid)\d")
    found += [str(path) for path in folder.iterdir() if not known.fullmatch(path.name)]
    deadline = time.monotonic() + 3  # other programs create and remove files
    while True:
        new = [name for name in set(os.listdir("/dev/shm")) - shared_memory if not _is_used(name)]
        new = [name for name in new if not (of := re.search(r"-(\d+)$", name)) or int(of[1]) in pids]
        if not new or time.monotonic() > deadline:
            return found + [f"/dev/shm/{name}" for name in new]
        time.sleep(0.1)


def problems_of(trial: Trial, ended: Ended, reference: Ended) -> list[str]:
    """Returns the failed conditions of a trial, apart from files."""
    found = [f"left: {line}" for line in ended.orphans]
    if ended.code is None:
        found.append("hangs")
    elif ended.code != 0:
        found.append(f"exit status {ended.code}")
    for kind in ("step", "epoch", "test"):
        expected = {line.epoch: line.value for line in reference.lines if line.kind == kind}
        lines = [line for line in ended.lines if line.kind == kind]
        if missing := sorted(expected.keys() - {line.epoch for line in lines}):
            found.append(f"{kind} {missing} missing")
        wrong = [line for line in lines if abs(line.value - expected[line.epoch]) > ACCURACY * abs(expected[line.epoch])]
        found += [f"{kind} {line.epoch} of {line.pid} is {line.value!r}, not {expected[line.epoch]!r}" for line in wrong[:2]]
    newest = -1
    for line in ended.lines:
        if line.kind == "epoch":
            newest = max(newest, line.epoch)
        if line.kind == "begin" and line.epoch < newest:
            found.append(f"finished epoch {newest} lost: {line.epoch} begins")
    for pid, at in ended.continued.items():
        rank = next(rank for rank, own in ended.pids.items() if own == pid)
        if any(line.pid == pid and line.at > at for line in ended.lines):
            manner = next(event.manner for event in trial.events if event.rank == rank)
            if manner == "continue":
                found.append(f"rank {rank} writes after it was continued")
    for number, (event, at) in enumerate(zip(trial.events, ended.when)):
        if at is None and event.after < 0:
            found.append(f"event {number} did not happen")
    return found


def seconds_of(ended: Ended) -> list[float]:
    """Returns the seconds from each signal to the next finished step of the others."""
    found = []
    happened = sorted(at for at in ended.when if at is not None)
    for number, at in enumerate(happened):
        until = happened[number + 1] if number + 1 < len(happened) else float("inf")
        steps = [line.at - at for line in ended.lines if line.kind == "step" and at < line.at < until]
        first = [line.at for line in ended.lines if line.kind == "begin" and at < line.at < until]
        if steps and first:
            found.append(min(line.at for line in ended.lines if line.kind == "step" and line.at >= min(first)) - at)
    return found


def repeats_of(ended: Ended) -> int:
    """Returns how many finished epochs rank 0 has printed more than once, whichever process that was."""
    counts = Counter(line.epoch for line in ended.lines if line.kind == "epoch" and line.rank == 0)
    return sum(count - 1 for count in counts.values())


def draw(seed: int, number: int) -> Trial:
    """Returns trial `number`."""
    rng = random.Random(f"{seed}/{number}")
    phase, ranks = PHASES[number % len(PHASES)], rng.choice((2, 3, 4))
    who = rng.sample(range(ranks), min(2, ranks - 1))
    if rng.random() < 0.3 and 0 not in who:
        who[0] = 0
    manner = rng.choice(MANNERS)
    in_epoch = phase in PHASES[1:8]
    epoch = rng.randrange(EPOCHS if in_epoch else 1)

    def event(rank: int, phase: str, epoch: int, **more: Any) -> Event:
        return Event(rank, phase, epoch, rng.random(), manner, paused_s=rng.uniform(0, 8), **more)

    if phase == "recovery":
        if len(who) == 1:
            ranks, who = 3, rng.sample(range(3), 2)
        second = {"delay_s": rng.uniform(0, 1.5)} if rng.random() < 0.5 else {}
        events = [event(who[0], rng.choice(PHASES[1:8]), rng.randrange(EPOCHS)), event(who[1], phase, 0, after=0, **second)]
    else:
        events = [event(who[0], phase, epoch)]
        several = rng.choice(("one", "one", "at once", "one after another"))
        if len(who) == 2 and several == "at once":
            events.append(event(who[1], phase, epoch))
        elif len(who) == 2 and several == "one after another":
            later = rng.choice(PHASES[1:8]) if epoch < EPOCHS - 1 and in_epoch else rng.choice(PHASES[-2:])
            events.append(event(who[1], later, epoch + 1 if later in PHASES[1:8] else 0, after=0))
    timeout = 1800.0 if manner == "kill" else 5.0
    return Trial(ranks, rng.choice(("GCN", "BatchNorm")), rng.random() < 0.5, timeout, tuple(events))


@dataclass
class Cell:
    """Outcomes of the trials of one phase."""

    trials: int = 0
    passed: int = 0
    signals: int = 0
    continued: int = 0
    repeats: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"kill": [], "stop": []})

    def row(self, phase: str) -> dict[str, Any]:
        row: dict[str, Any] = {"phase": phase, **{name: vars(self)[name] for name in list(vars(self))[:-1]}}
        for manner, seconds in self.seconds.items():
            if seconds:
                row[f"{manner} (s)"] = f"{min(seconds):.1f} / {statistics.median(seconds):.1f} / {max(seconds):.1f}"
        return row


def import_all(folder: Path) -> None:
    """Import what trials need in this process, of which they are forks."""
    folder.mkdir()
    kept = os.dup(1)
    os.dup2(2, 1)
    train(Trial(1), folder)
    os.dup2(kept, 1)
    os.close(kept)
    import_module("lightning_gnn.extensions.elastic.launcher")
    import_module("lightning_gnn.extensions.elastic.recovery")
    import_module("lightning_gnn.extensions.liveness")


def lose_ranks(options: argparse.Namespace) -> bool:
    """Runs the trials; returns whether all passed."""
    base = Path(tempfile.mkdtemp(prefix="elastic-"))
    import_all(base / "imports")
    references = {}
    for model in ("GCN", "BatchNorm"):
        references[model] = run(Trial(1, model), base / f"one-{model}", 100)
        assert references[model].code == 0, references[model].output[-3000:]
    counted = run(Trial(3, counts=True), base / "undisturbed", 200)
    assert counted.code == 0, counted.output[-3000:]
    _calls.update(json.loads((base / "undisturbed" / "calls1.json").read_text()))
    numbers = options.only or range(options.first, options.first + options.kills)
    cells: dict[str, Cell] = {}
    notes = []
    for number in numbers:
        trial, folder = draw(options.seed, number), base / f"{number:04d}"
        shared_memory = set(os.listdir("/dev/shm"))
        ended = run(trial, folder, options.patience)
        problems = problems_of(trial, ended, references[trial.model])
        problems += [f"file {name}" for name in files_left(folder, shared_memory, ended.pids.values())]
        seconds, repeats = seconds_of(ended), repeats_of(ended)
        phase = PHASES[number % len(PHASES)]
        for cell in (cells.setdefault(phase, Cell()), cells.setdefault("all", Cell())):
            cell.trials += 1
            cell.passed += not problems
            cell.signals += sum(at is not None for at in ended.when)
            cell.continued += len(ended.continued)
            cell.repeats += repeats
            cell.seconds["kill" if trial.events[0].manner == "kill" else "stop"] += seconds
        note = {"trial": number, **asdict(trial), "seconds": seconds, "repeats": repeats, "problems": problems}
        notes.append({**note, "took": ended.seconds})
        events = "; ".join(
            f"{e.manner} {e.rank} {e.phase} {e.epoch}" + (f" after {e.delay_s:.2f} s" if e.delay_s >= 0 else "")
            for e in trial.events
        )
        how = f"{trial.ranks} ranks, {trial.model}, {'memory' if trial.shared_memory else 'sockets'}"
        took = ", ".join(f"{each:.1f}" for each in seconds)
        print(f"{number} {how}: {events}: [{took}] of {ended.seconds:.1f} s {problems or ''}", file=sys.stderr, flush=True)
        rows = [cells[name].row(name) for name in (*PHASES, "all") if name in cells]
        if options.json:
            Path(options.json).write_text(json.dumps({"rows": rows, "trials": notes}, indent=1))
        if not problems:
            shutil.rmtree(folder)
    title = f"Ranks lost in {len(notes)} trials, seed {options.seed}; seconds: least / median / most"
    columns = ["phase", "trials", "passed", "signals", "continued", "repeats", "kill (s)", "stop (s)"]
    report(title, rows, columns, options.json, trials=notes)
    if cells["all"].passed == cells["all"].trials:
        shutil.rmtree(base)
        return True
    print(f"{cells['all'].trials - cells['all'].passed} trials failed; see {base}")
    return False


def measure(options: argparse.Namespace) -> None:
    """Measures the seconds from a SIGKILL to the next finished step."""
    base = Path(tempfile.mkdtemp(prefix="elastic-"))
    rows = []
    for graph in [*([options.planetoid] if options.planetoid else []), *(["large"] if options.large else [])]:
        for lost in (0, 1):
            trial = Trial(3, graph=graph, events=(Event(lost, "forward", 3, 0.5),))
            ended = run(trial, base / f"{len(rows)}", 600)
            assert ended.code == 0 and not ended.orphans, ended.output[-3000:]
            epochs = sorted(line.at for line in ended.lines if line.kind == "step" and line.rank == 0)
            name = "Cora" if graph == options.planetoid else "200,000 nodes"
            rows.append({"graph": name, "lost rank": lost, "seconds": seconds_of(ended)[0], "epoch (s)": epochs[2] - epochs[1]})
            print(rows[-1], file=sys.stderr, flush=True)
    report("Seconds from SIGKILL to the next finished step", rows, [*rows[0]], options.json)
    shutil.rmtree(base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="number of trials")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=90.0, help="seconds for a trial")
    parser.add_argument("--planetoid", help="root folder of Cora")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.planetoid or options.large:
        measure(options)
    elif not lose_ranks(options):
        sys.exit(1)


if __name__ == "__main__":
    main()
