"""Execution of the runs of a comparison, one after the other in separate processes, with cached results."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Group

from lightning_gnn.console import plain_width, progress_bar, shows_bars, text_console
from lightning_gnn.data.store import write_atomically
from lightning_gnn.tools.comparing.cells import Again, Cell, Comparison, make_cells, resolve_sections, section_of
from lightning_gnn.tools.comparing.results import ComparisonTable, number, parity, parity_text, summarize
from lightning_gnn.tools.local_ranks import LAUNCHER_VARIABLES
from lightning_gnn.tools.parser import check_folder

LAST_LINES = 15
"""Number of output lines of a failed run in the JSON and the report."""

IN_CELL = "LIGHTNING_GNN_CELL"
"""Environment variable that is set in the processes of a run."""

GRACE_S = 5.0
"""Seconds between the termination signal and the kill signal to a run."""

WIDTH = 200
"""Width of output to a file, in characters."""

Progress = Callable[[str], None]


def compare(
    model: Any,
    data: Any,
    runs: Sequence[str | Mapping[str, Any]],
    *,
    devices: int | Sequence[int] = 2,
    epochs: int = 10,
    warmup: int = 1,
    seed: int = 0,
    output: str | os.PathLike[str] = "comparison",
    timeout: float = 3600.0,
    rerun: Again = "none",
    loss: str = "train_loss",
    tolerance: float = 1e-4,
    trainer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train one model on one graph under several strategies, and return the results.

    In a script, call it under ``if __name__ == "__main__":``. Runs execute one after the other, each in separate processes on
    this machine, with the same seed and initial weights. Finished runs are cached in `output`. The folder gets
    ``comparison.json`` and ``comparison.html`` (docs/compare.md).

    Args:
        model: LightningModule: a class or function of a module that returns it, called without arguments; its import path; or
            ``{"class_path": ..., "init_args": ...}`` as in YAML. It is created in each process.
        data: :class:`~lightning_gnn.GraphDataModule` in the same form, or its arguments: ``{"source": ..., "source_kwargs":
            ...}``.
        runs: names of strategies, or ``{"strategy": "dgcl", "codec": "int8"}``: strategy, its arguments, and optionally
            ``devices``, one number or a list, and ``label``. The first is the reference of parity: ``{"strategy": "auto",
            "devices": 1}`` is Lightning on a single device.
        devices: number of ranks of runs without ``devices``; a list gives one run for each.
        epochs: number of epochs of each run.
        warmup: number of initial epochs excluded from times, bytes and messages.
        seed: seed of weights and random numbers.
        output: folder for results, created if missing.
        timeout: maximum seconds of a run; then it is terminated and counts as failed.
        rerun: cached runs to repeat: ``"none"``, ``"failed"`` or ``"all"``.
        loss: logged value of the loss curves.
        tolerance: maximum relative difference of losses at which an exact scheme matches the reference.
        trainer: further arguments of the Trainer, the same for all runs: ``{"accelerator": "cpu", "precision": "bf16-mixed"}``.

    Returns:
        The contents of ``comparison.json``.

    Raises:
        ValueError: for an invalid argument, an unknown strategy or argument, or an `output` that is not writable.
        BlockingIOError: if another comparison is writing to `output`.
    """
    task = section_of(model, "model"), section_of(data, "data"), make_cells(runs, devices)
    options: Any = (epochs, warmup, seed, Path(output), timeout, rerun, loss, tolerance, trainer or {})
    return run(check(Comparison(*task, *options)))


def run(comparison: Comparison) -> dict[str, Any]:
    """Execute the uncached runs of a checked comparison, print the table, and return the contents of ``comparison.json``."""
    if IN_CELL in os.environ:
        raise RuntimeError(
            'compare was called by one of its own cells, which import this file. Call it under `if __name__ == "__main__":`.'
        )
    console = text_console(plain_width(WIDTH))
    output = comparison.output
    try:
        lock = FileLock(output / ".lock", timeout=0).acquire()
    except Timeout as error:
        raise BlockingIOError(f"Another comparison is writing to {output}. Wait for it, or set another output.") from error
    with lock:
        folders = [output / "runs" / comparison.key(cell) for cell in comparison.runs]
        states = [_status(folder).get("status", "has to run") for folder in folders]
        if comparison.rerun != "none":
            states = ["has to run" if comparison.rerun == "all" or state != "finished" else state for state in states]
        title = f"{len(folders)} cells, {comparison.epochs} epochs each ({comparison.warmup} of warm-up), seed {comparison.seed}"

        def collect_results() -> dict[str, Any]:
            return collect(comparison, folders, states)

        above: list[ComparisonTable] = []
        with progress_bar("Comparing", states.count("has to run"), "runs", above=lambda: Group(*above)) as advance:
            for index, (cell, folder) in enumerate(zip(comparison.runs, folders)):
                if states[index] != "has to run":
                    continue
                rows = collect_results()["runs"]

                def report(state: str, row: dict[str, Any] = rows[index], rows: Any = rows) -> None:
                    row["status"] = state
                    above[:] = [ComparisonTable(rows, title)]

                report("starts")
                states[index] = _run_cell(comparison, cell, folder, report)["status"]
                advance(1)
                result = collect_results()
                write_json(output, result)
                if not (console.is_terminal and shows_bars()):
                    place = f"[{index + 1} of {len(folders)}] {cell.name}: "
                    console.print(place + _in_a_line(result["runs"][index]), markup=False, highlight=False)
        result = collect_results()
        write_json(output, result)
        # Imported late: matplotlib takes long to import.
        from lightning_gnn.tools.comparing.report import report_html

        write_atomically(output / "comparison.html", report_html(result))
    console.print(ComparisonTable(result["runs"], title))
    for cell in result["runs"]:
        if cell["status"] != "finished":
            console.print(f"{cell['name']}: {_in_a_line(cell)}", markup=False, highlight=False)
    for file in ("comparison.json", "comparison.html"):
        console.print(f"Written: {output / file}", markup=False, highlight=False, soft_wrap=True)
    return result


def check(comparison: Comparison) -> Comparison:
    """Returns the comparison with defaults of model and data filled in, so that explicit defaults do not change keys."""
    comparison = replace(comparison, **resolve_sections({"model": comparison.model, "data": comparison.data}))
    for cell in comparison.runs:
        strategy = cell.trainer_strategy()
        if not isinstance(strategy, str):
            try:
                resolve_sections({"strategy": strategy})
            except ValueError as error:
                raise ValueError(f"cell {cell.name!r}: {error}") from error
    names: dict[str, str] = {}
    for cell in comparison.runs:
        other = names.setdefault(comparison.key(cell), cell.name)
        if other != cell.name:
            raise ValueError(f"The runs {other!r} and {cell.name!r} are equal. Remove one.")
    check_folder("output", comparison.output)
    return comparison


def _status(folder: Path) -> dict[str, Any]:
    """Returns the final status of a run; ``{}`` if it has not ended."""
    try:
        return json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return {}


def _run_cell(comparison: Comparison, cell: Cell, folder: Path, report: Progress) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    task = {**comparison.task(cell), "parent": os.getpid(), "started": time.time()}
    (folder / "task.json").write_text(json.dumps(task, indent=1))
    # With a launcher's variables, the run would join its ranks.
    env = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER_VARIABLES, "SLURM_NTASKS")}
    env[IN_CELL] = folder.name
    env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    began = time.monotonic()
    with (folder / "output.txt").open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_gnn.tools.comparing.run_cell", str(folder)],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            late = _watch(process, began + comparison.timeout, folder, comparison.epochs, report)
        finally:
            _end(process)
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", (folder / "output.txt").read_text(errors="replace"))
    lines = [line.rstrip() for line in text.splitlines() if line.strip()][-LAST_LINES:]
    status: dict[str, Any] = {"status": "finished", "error": [], "seconds": time.monotonic() - began}
    if late:
        error = f"TimeoutError: not finished within timeout={comparison.timeout:g} s"
        status |= {"status": "timed out", "error": [*lines, error]}
    elif process.returncode != 0:
        status |= {"status": "failed", "error": lines or [f"ended with status {process.returncode}, and no output"]}
    write_atomically(folder / "status.json", json.dumps(status, indent=1))
    return status


def _watch(process: subprocess.Popen[bytes], deadline: float, folder: Path, epochs: int, report: Progress) -> bool:
    """Wait for a run and report its epochs; return whether it still runs at the deadline."""
    reported = 0
    while process.poll() is None:
        if time.monotonic() > deadline:
            return True
        with suppress(OSError):
            done = (folder / "epochs.jsonl").read_text().count("\n")
            if done > reported:
                reported = done
                report(f"epoch {done} of {epochs}")
        time.sleep(0.1)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    for signal_number, seconds in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal_number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # kills ranks that outlived the first process


def collect(comparison: Comparison, folders: Sequence[Path], states: Sequence[str]) -> dict[str, Any]:
    """Returns the contents of ``comparison.json`` for the runs that have ended; `states` has the state of each run."""
    cells: list[dict[str, Any]] = []
    for each, folder, state in zip(comparison.runs, folders, states):
        status = _status(folder)
        row: dict[str, Any] = {name: getattr(each, name) for name in ("name", "strategy", "devices")}
        row |= {"key": folder.name, "arguments": dict(each.arguments)}
        row |= {"status": state, "error": [], "seconds_in_all": None}
        if status.get("status") == state:
            row |= {"error": status["error"], "seconds_in_all": status["seconds"]}
        if state == "finished":
            files = (folder / f"rank-{rank}.json" for rank in range(each.devices))
            # Workers of gossip may have been lost.
            ranks = [json.loads(file.read_text()) for file in files if file.exists()]
            numbers = summarize(ranks, comparison.warmup)
            row |= {**numbers, "final_loss": numbers["curves"][comparison.loss][-1]}
        cells.append(row)
    reference = cells[0] if cells[0]["status"] == "finished" else None
    weights = reference and _weights(folders[0])
    for cell, folder in zip(cells, folders):
        if cell["status"] == "finished":
            options = comparison.loss, comparison.tolerance
            cell["parity"] = parity(cell, reference, _weights(folder), weights, *options)
    if reference is not None:
        reference["parity"]["kind"] = "reference"
    first = comparison.task(comparison.runs[0])
    names = ("epochs", "warmup", "seed", "loss", "tolerance", "trainer", "model", "data")
    settings = {name: getattr(comparison, name) for name in names}
    return {**settings, "versions": first["versions"], "machine": first["machine"], "runs": cells}


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "weights.pt", weights_only=True)


def write_json(output: Path, results: Mapping[str, Any]) -> None:
    """Write ``comparison.json`` atomically; values that are not finite become null."""
    finite = json.loads(json.dumps(results), parse_constant=lambda name: None)  # for NaN and infinities
    write_atomically(output / "comparison.json", json.dumps(finite, indent=1) + "\n")


def _in_a_line(cell: Mapping[str, Any]) -> str:
    if cell["status"] == "finished":
        return f"{number(cell['epoch_seconds'])} s per epoch, parity {parity_text(cell['parity'])}"
    errors = [line for line in cell["error"] if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return f"{cell['status']}: {(errors or cell['error'] or ['no word'])[-1]}"
