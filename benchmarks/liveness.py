"""Seconds from the loss of rank 1 to the end of all processes, for each way to start ranks and each event.

python benchmarks/liveness.py [--starts launcher torchrun by-hand] [--package FOLDER] [--bound 60] [--json FILE]

``--package`` is a folder with another version of the package, for comparisons. The deadline is 5 s where a rank is stopped or
sleeps. "stuck": the other rank is in a call that never returns and holds the interpreter lock; on the emulated device, every wait
for a lost rank is such a call. Runs that exceed ``--bound`` seconds are ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import ROOT, report

SCRIPT = ROOT / "tests" / "dying.py"
STARTS = {
    "launcher": [SCRIPT],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT],
    "by-hand": [SCRIPT, "by-hand"],
}
EVENTS = {
    "killed": ("kill", 100.0),
    "killed, other stuck": ("kill while others are stuck", 100.0),
    "raises": ("raise", 100.0),
    "stopped": ("stop", 5.0),
    "stopped, other stuck": ("stop while others are stuck", 5.0),
    "sleeps": ("sleep", 5.0),
}
DEVICE = {"DYING_ON_DEVICE": "1", "LIGHTNING_GNN_TEST_NEVER_RETURNS": "1"}


def processes_of(mark: str) -> list[int]:
    """Returns the processes that were started with a mark in their environment, and run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def seconds_to_end(start: str, event: str, deadline: float, package: str, bound: float, more: dict[str, str]) -> float | None:
    """Returns the seconds from the event to the end of all processes; None if they exceed `bound`."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": package, "LIVENESS_RUN": mark, "OMP_NUM_THREADS": "1", **more}
        command = [sys.executable, *map(str, STARTS[start]), event, "shared", str(deadline), folder]
        with open(Path(folder) / "output", "w") as output:
            subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True)
        when = Path(folder) / "when"
        end = time.monotonic() + 180
        while processes_of(mark) and time.monotonic() < end:
            if when.exists():
                end = min(end, time.monotonic() + bound) if end - time.monotonic() > bound else end
            time.sleep(0.05)
        took = time.time() - float(when.read_text()) if when.exists() else None
        left = processes_of(mark)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while processes_of(mark):
            time.sleep(0.05)
        return None if left else took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=[*STARTS])
    parser.add_argument("--package", default=str(ROOT))
    parser.add_argument("--bound", type=float, default=60.0)
    parser.add_argument("--json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, (event, deadline) in EVENTS.items():
        row: dict[str, Any] = {"event": name, "deadline (s)": deadline if deadline < 100 else None}
        for start in options.starts:
            row[start] = seconds_to_end(start, event, deadline, options.package, options.bound, {})
        if name in ("killed", "stopped"):
            row["emulated device"] = seconds_to_end("by-hand", event, deadline, options.package, options.bound, DEVICE)
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    columns = ["event", "deadline (s)", *options.starts, "emulated device"]
    report(f"Seconds to the end of all processes; none: more than {options.bound:.0f}", rows, columns, options.json)


if __name__ == "__main__":
    main()
