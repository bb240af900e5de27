"""Kills one process of a training by SIGKILL, at random moments of every phase, and looks at what becomes of the rest.

python benchmarks/kills.py [--kills 200] [--seed 0] [--strategies dgcl gossip ...] [--starts script notebook torchrun]
                           [--phases forward ...] [--json FILE]

Of each kill: the others must end within 30 s with an error that says which rank was ended and how (``gossip`` carries on),
without processes or temporary files left; and a run that goes on from the last checkpoint must come to the weights of a run that
nobody disturbed, digit by digit, or to its end, for strategies that do not repeat themselves. torchrun starts the ranks again
by itself. Exit status 1 if anything was otherwise; the folder of that trial is kept, and named.

Moments: a phase is a number of calls of functions, counted in the undisturbed run; the kill falls on one of them at random.
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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", WANDB_MODE="disabled", PYTHONWARNINGS="ignore")

import torch
from common import report
from killing import EPOCHS, KINDS, PHASES, STARTS, Trial, module, start_trial

from lightning_gnn.extensions.codecs.transport import EncodingTransport
from lightning_gnn.kernels.warm_up import warm_up
from lightning_gnn.nn.convs import kernel_groups

WITHIN_S = 30.0
"""How long the others may take to end."""

# PyG leaves the functions that it generates in files; torch and numba make folders for those that they compile.
_OF_OTHERS = re.compile(
    r".*_(propagate|edge_updater)_\w+\.py|torchinductor_|torchelastic_|pytorch-errorfile|pymp-|__pycache__"
)


def processes_of(session: int) -> list[int]:
    """Returns the processes of a session that have not ended."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            state, _, _, own = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:4]
            if int(own) == session and state not in "ZX":
                found.append(int(name))
    return found


@dataclass
class Ended:
    """How the processes of a trial ended.

    Attributes:
        code: of the first, negative for a signal.
        output: of all.
        at: when the last had ended.
        orphans: command lines of what was still there after :data:`WITHIN_S` seconds.
    """

    code: int
    output: str
    at: float
    orphans: list[str]


def run(trial: Trial, patience: float, undisturbed: bool = False) -> Ended:
    """Runs a trial to the end of all its processes; ends them after `patience` seconds, or 30 after the first has ended."""
    output = trial.folder / ("again.txt" if undisturbed else "output.txt")
    first = start_trial(trial, output, undisturbed)
    deadline, code = time.monotonic() + patience, None
    while time.monotonic() < deadline:
        if code is None:
            ended, status = os.waitpid(first, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.monotonic() + WITHIN_S)
        if code is not None and not processes_of(first):
            break
        time.sleep(0.05)
    at = time.time()
    orphans = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in processes_of(first)]
    for pid in processes_of(first):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if code is None:
        code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    text = re.sub(r"\[rank\d\]: ", "", output.read_text(errors="replace"))  # torch's mark on the lines of errors
    return Ended(code, text, at, orphans)


def files_left(trial: Trial, shared_memory: set[str]) -> list[str]:
    """Returns temporary files that a trial has left behind."""
    found = [str(path) for path in (trial.folder / "tmp").iterdir() if not _OF_OTHERS.match(path.name)]
    found += [str(path) for path in (trial.folder / "checkpoints").glob("*") if path.suffix != ".ckpt"]
    found += [str(path) for path in trial.store.glob("*") if path.name.startswith(".") or path.suffix == ".owner"]
    new = set(os.listdir("/dev/shm")) - shared_memory
    return found + [f"/dev/shm/{name}" for name in new if not _is_used(name)]


def _is_used(name: str) -> bool:
    """Returns whether a file of shared memory is in use by a process, which is then not ours: ours have ended."""
    try:
        inode = os.stat(f"/dev/shm/{name}").st_ino
    except OSError:
        return True
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if any(int(line.split()[4]) == inode for line in maps.read_text().splitlines() if "/dev/shm/" in line):
                return True
    return False


def is_clear(trial: Trial, ended: Ended) -> bool:
    """Returns whether the user is told which process was ended, and how, and the exit status says so."""
    names = f"Rank {trial.rank} was ended by SIGKILL"
    if trial.start == "torchrun":  # tells by itself, and starts anew
        told = (
            re.search(rf"exitcode: -9\) local_rank: {trial.rank} |rank {trial.rank} (has|was) ended", ended.output)
            is not None
        )
        if trial.phase == "partition" and trial.rank == 0:
            told = "its process was ended by signal 9" in ended.output
        elif trial.phase == "partition":
            told = re.search(r"exitcode: -9\) local_rank: 0 ", ended.output) is not None
        return told and ended.code == 0
    if trial.phase == "partition":
        failed = "its process was ended by signal 9" in ended.output
        return failed and ended.code == 1 if trial.rank == 0 else ended.code == -signal.SIGKILL
    if trial.start == "script" and trial.rank == 0:  # the user's own process
        return ended.code == -signal.SIGKILL
    going = re.search(rf"{names}.*; the others go on\.", ended.output) is not None
    if KINDS[trial.strategy].goes_on and going:
        return ended.code == 0
    if KINDS[trial.strategy].goes_on and trial.phase != "set-up":  # until ranks have met, they need each other
        return False
    return names in ended.output and ended.code == 1


@dataclass
class Cell:
    """What came of the kills of one phase of a strategy."""

    kills: int = 0
    seconds: list[float] = field(default_factory=list)
    clear: int = 0
    orphans: int = 0
    files: int = 0
    restarts: int = 0
    wrong: int = 0


class Campaign:
    """Trials in one folder.

    Args:
        folder: of all.
        patience: seconds for a trial; a busy machine takes its time.
    """

    def __init__(self, folder: Path, patience: float) -> None:
        self.folder, self.patience = folder, patience
        self.cells: dict[tuple[str, str], Cell] = {}
        self.notes: list[dict[str, Any]] = []
        self._references: dict[tuple[str, str], tuple[dict[str, torch.Tensor], list[dict[str, int]]]] = {}

    def reference(self, strategy: str, how: str) -> tuple[dict[str, torch.Tensor], list[dict[str, int]]]:
        """Returns the weights of an undisturbed run, and the calls of each rank in each phase."""
        if (strategy, how) not in self._references:
            folder = self.folder / f"{strategy}-{how}"
            folder.mkdir()
            ended = run(Trial(strategy, how, folder, folder / "store"), 3 * self.patience)
            if ended.code or ended.orphans:
                raise RuntimeError(
                    f"{strategy} from {how} does not run undisturbed, see {folder}\n{ended.output[-3000:]}"
                )
            calls = [json.loads((folder / f"calls{rank}.json").read_text()) for rank in range(KINDS[strategy].ranks)]
            calls[0].update(json.loads((folder / "partition.json").read_text()))
            self._references[strategy, how] = torch.load(folder / "result.pt", weights_only=True), calls
        return self._references[strategy, how]

    def trial(self, number: int, strategy: str, how: str, phase: str, rng: random.Random) -> None:
        """Kills once, and notes what came of it."""
        weights, calls = self.reference(strategy, how)
        rank = rng.randrange(2 if phase == "partition" else KINDS[strategy].ranks)
        folder = self.folder / f"{number:04d}-{strategy}-{how}-{phase}-{rank}"
        folder.mkdir()
        store = folder / "store" if phase == "partition" else self.folder / f"{strategy}-{how}" / "store"
        count = calls[0 if phase == "partition" else rank].get(phase, 1)
        epoch, share = rng.randrange(1, EPOCHS), rng.random()
        trial = Trial(strategy, how, folder, store, phase, rank, epoch, share, count)
        shared_memory = set(os.listdir("/dev/shm"))
        ended = run(trial, self.patience)
        cell = self.cells.setdefault((strategy, phase), Cell())
        when, anew = folder / "when", folder / "anew"
        at = float(anew.read_text()) if anew.exists() else ended.at if ended.code else None  # None: it went on
        seconds = at - float(when.read_text()) if when.exists() and at else None
        clear = is_clear(trial, ended)
        repeated, again = ended, None
        if not (folder / "result.pt").exists():
            again = repeated = run(trial, self.patience, undisturbed=True)
        equal = repeated.code == 0 and not repeated.orphans and self._is_right(trial, weights)
        left = files_left(trial, shared_memory)
        wrong = [
            *(["not killed"] if not when.exists() else []),
            *(["late"] if seconds is not None and seconds > WITHIN_S else []),
            *(["unclear"] if not clear else []),
            *ended.orphans,
            *left,
            *(["restart differs"] if not equal else []),
        ]
        cell.kills += 1
        cell.seconds += [] if seconds is None else [seconds]
        cell.clear += clear
        cell.orphans += len(ended.orphans)
        cell.files += len(left)
        cell.restarts += equal
        cell.wrong += bool(wrong)
        note = {
            "trial": folder.name,
            "epoch": epoch,
            "share": share,
            "code": ended.code,
            "seconds": seconds,
            "wrong": wrong,
        }
        self.notes.append({**note, "again": None if again is None else again.code})
        took = "went on" if seconds is None else f"{seconds:.1f} s"
        print(f"{folder.name} epoch {epoch} at {share:.0%}: {took} {wrong or ''}", file=sys.stderr, flush=True)
        if not wrong:
            shutil.rmtree(folder)

    def _is_right(self, trial: Trial, expected: dict[str, torch.Tensor]) -> bool:
        file = trial.folder / "result.pt"
        if not file.exists():
            return False
        found = torch.load(file, weights_only=True)
        if KINDS[trial.strategy].repeats:
            return all(torch.equal(found[name], value) for name, value in expected.items())
        return all(bool(torch.isfinite(value).all()) for value in found.values())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Returns the table, by strategy and phase, and its sum."""
        everything = Cell()
        for (strategy, phase), cell in sorted(
            self.cells.items(), key=lambda each: (each[0][0], PHASES.index(each[0][1]))
        ):
            for name, value in vars(cell).items():
                setattr(everything, name, getattr(everything, name) + value)
            yield _row(strategy, phase, cell)
        yield _row("all", "", everything)


def _row(strategy: str, phase: str, cell: Cell) -> dict[str, Any]:
    kills = cell.kills
    return {
        "strategy": strategy,
        "phase": phase,
        "kills": kills,
        "ended (s, median)": statistics.median(cell.seconds) if cell.seconds else None,
        "ended (s, most)": max(cell.seconds, default=None),
        "clear": f"{cell.clear}/{kills}",
        "orphans": cell.orphans,
        "files": cell.files,
        "restart": f"{cell.restarts}/{kills}",
        "wrong": cell.wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategies", nargs="+", choices=KINDS, default=[name for name in KINDS])
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=[*STARTS])
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=[*PHASES])
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for a trial")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm_up(kernel_groups(module()), {torch.float32}, [EncodingTransport.warm_up])
    rng = random.Random(options.seed)
    cases = [(strategy, phase) for phase in options.phases for strategy in options.strategies]
    rng.shuffle(cases)
    campaign = Campaign(Path(tempfile.mkdtemp(prefix="kills-")), options.patience)
    for number in range(options.kills):
        lap, case = divmod(number, len(cases))
        strategy, phase = cases[case]
        how = options.starts[(lap + case) % len(options.starts)]
        campaign.trial(number, strategy, how, phase, rng)
        if number % 10 == 9 or number + 1 == options.kills:
            rows = list(campaign.rows())
            if options.json:
                Path(options.json).write_text(json.dumps({"rows": rows, "trials": campaign.notes}, indent=1))
    title = f"SIGKILL of one process, {options.kills} times, seed {options.seed}"
    report(title, rows, [*rows[0]], None)
    wrong = sum(row["wrong"] for row in rows[:-1])
    if wrong:
        print(f"{wrong} of {options.kills} were not as they should be; see {campaign.folder}")
        sys.exit(1)
    shutil.rmtree(campaign.folder)


if __name__ == "__main__":
    main()
