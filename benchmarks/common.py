"""What the benchmarks share: the common graph, processes of their own for each row, memory, one table and JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch_geometric.data import Data

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("LIGHTNING_GNN_SHARED", ROOT.parent / "shared"))
PLANTED_LOSSES = (3.159921, 2.042211, 1.358023, 0.838087, 0.490894, 0.288732)
"""Of the first epochs of a 2-layer GCN from the graph's own weights; see ``tools/planted_graph.py`` beside the data."""


def planted_file(num_nodes: int = 200_000) -> Path:
    """Returns the common benchmark graph as an ``.npz``, made at first use."""
    folder = Path(os.environ.get("LIGHTNING_GNN_STORE", Path.home() / ".cache" / "lightning_gnn"))
    path = folder / f"planted-{num_nodes}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        script = SHARED / "tools" / "planted_graph.py"
        subprocess.run([sys.executable, str(script), str(path), str(num_nodes)], check=True)
    return path


def load_planted(path: str, double: bool = False) -> Data:
    """Returns the common benchmark graph; a source for GraphDataModule."""
    arrays = np.load(path)
    x = torch.from_numpy(arrays["x"])
    return Data(
        x=x.double() if double else x,
        edge_index=torch.from_numpy(np.stack([arrays["src"], arrays["dst"]])),
        y=torch.from_numpy(arrays["y"]),
        train_mask=torch.from_numpy(arrays["train"]),
        val_mask=torch.from_numpy(arrays["val"]),
        test_mask=torch.from_numpy(arrays["test"]),
    )


def planted_weights(path: str) -> list[torch.Tensor]:
    """Returns the fixed weights of the benchmark's GCN, as ``[in, out]``."""
    arrays = np.load(path)
    return [torch.from_numpy(arrays[name]) for name in ("W1", "W2")]


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}
"""Trainer options of a measured run."""


class PeakMemory:
    """The most memory that this process held above what it held when this was made (make it after the imports)."""

    def __init__(self) -> None:
        self.reset()
        self._start = self._read("VmRSS")

    def reset(self) -> None:
        """Forgets the peak, but not what was held at the start."""
        Path("/proc/self/clear_refs").write_text("5")
        self._resets = len(self._resets_of_runs())

    def megabytes(self) -> float:
        peaks = [each // 1024 for each in self._resets_of_runs()[self._resets :]]
        return (max(self._read("VmHWM"), *peaks, 0) - self._start) / 1024

    @staticmethod
    def _resets_of_runs() -> list[int]:
        """Returns the peaks that training runs have reset; older versions reset none."""
        return getattr(sys.modules.get("lightning_gnn.heap"), "peaks", [])

    def of_others(self) -> float:
        """Returns how many of these are others' part of shared memory: a page that two ranks have mapped is half of each."""
        return (self._read("RssShmem") - self._read("Pss_Shmem", "smaps_rollup")) / 1024

    @staticmethod
    def _read(field: str, file: str = "status") -> int:
        for line in Path("/proc/self", file).read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
        raise RuntimeError(f"{field} is not in /proc/self/{file}")


def run_row(
    script: str, arguments: Sequence[str], threads: int, timeout: float = 1800, package: Path = ROOT
) -> dict[str, Any]:
    """Runs ``script arguments`` in a process of its own and returns the JSON object on its last line.

    Args:
        script, arguments: a benchmark, and what it is given.
        threads: of torch, in the process.
        timeout: seconds.
        package: a checkout, from which `lightning_gnn` is imported.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join([str(package), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
    }
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "NODE_RANK"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, script, *arguments], env=environment, stdout=subprocess.PIPE, text=True, timeout=timeout
    )
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _on_hosts(inner_mbit: float, hosts: int, ranks: int) -> dict[str, Any]:
    """Returns hosts of so many ranks together in netlab's format; all that leaves a host shares its link (CDFGNN Table 2)."""
    outer, each = inner_mbit / 2.7, ranks // hosts

    def link(a: int, b: int) -> dict[str, Any]:
        if a // each == b // each:
            return {"a": a, "b": b, "bandwidth_mbit": inner_mbit}
        return {"a": a, "b": b, "bandwidth_mbit": outer, "via": [f"nic{a // each}", f"-nic{b // each}"]}

    return {
        "ranks": ranks,
        "hosts": [{"name": f"host{i}", "ranks": list(range(each * i, each * (i + 1)))} for i in range(hosts)],
        "hops": [{"name": f"nic{i}", "bandwidth_mbit": outer} for i in range(hosts)],
        "links": [link(a, b) for b in range(ranks) for a in range(b)],
    }


def run_on_hosts(
    netlab: str, inner_mbit: float, script: str, arguments: Sequence[str], hosts: int = 2, ranks: int = 4
) -> Any:
    """Runs ``script arguments --row FILE`` as ranks on emulated hosts; returns the JSON that it writes to the file.

    Args:
        netlab: netlab.py.
        inner_mbit: Mbit/s of a link inside a host; that of a host is 2.7 times as slow, the ratio of CDFGNN's cluster.
        hosts, ranks: how many; as many ranks on each host.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, found = Path(folder) / "hosts.json", Path(folder) / "row.json"
        path.write_text(json.dumps(_on_hosts(inner_mbit, hosts, ranks)))
        own = [sys.executable, script, *arguments, "--row", str(found)]
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": "netlab", "PYTHONWARNINGS": "ignore"}
        subprocess.run(
            [sys.executable, netlab, "run", str(path), "--timeout", "3000", "--", *own], env=environment, check=True
        )
        return json.loads(found.read_text())


def machine() -> dict[str, Any]:
    """Returns what the figures depend on."""
    import torch_geometric

    found = {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
    }
    return found | ({"gpu": torch.cuda.get_device_name(0)} if torch.cuda.is_available() else {})


def report(
    title: str, rows: Sequence[dict[str, Any]], columns: Sequence[str], json_file: str | None, **more: Any
) -> None:
    """Prints one table of `columns`, and writes everything to `json_file`: the table as it is `shown`, and what else is given."""
    shown = [[*columns], *([_show(row.get(column)) for column in columns] for row in rows)]
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for cells in shown[1:]:
        table.add_row(*cells)
    Console(width=150).print(table)
    if json_file:
        found = {"title": title, "machine": machine(), "rows": list(rows), "shown": shown, **more}
        Path(json_file).write_text(json.dumps(found, indent=1))


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if type(value) is int else str(value)
