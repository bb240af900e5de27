"""``lightning-gnn test --ranks N``: tests the installation by exchanges, training and a lost rank."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
from rich.markup import escape

from lightning_gnn.console import progress_bar, text_console, text_table
from lightning_gnn.tools.local_ranks import Machine, run_ranks
from lightning_gnn.tools.parser import Parser

PARTS = {
    "exchanges": "Run lightning-gnn doctor. On several machines, open ports, and set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.",
    "training": "Run lightning-gnn doctor, and install versions that docs/install.md lists. Report a difference as an issue.",
    "lost rank": "Set timeout=SECONDS in strategies: it bounds waits for lost ranks. Report the error as an issue.",
}
"""Parts of the test, and a fix for a failure of each."""

OPTIONS = ("--ranks", "--hosts", "--device", "--timeout")
PORT = 29500


def is_self_test(arguments: Sequence[str]) -> bool:
    """Returns whether ``lightning-gnn test`` tests the installation instead of a model."""
    return not arguments or any(each.partition("=")[0] in OPTIONS for each in arguments)


def self_test(arguments: Sequence[str]) -> None:
    """Run ``lightning-gnn test`` with these arguments; the exit status is 1 if a part fails."""
    parser = Parser(
        prog="lightning-gnn test --ranks 2",
        usage="lightning-gnn test [--ranks N] [--hosts A,B] [--device cpu|cuda] [--timeout SECONDS]",
        description="Test this installation on a synthetic graph: exchanges between ranks, training under three strategies "
        "against one device, and the end of ranks after a rank is lost. To evaluate a model: lightning-gnn test --config FILE.",
    )
    parser.add_argument("--ranks", type=int, help="Ranks per machine. (default: one per GPU, at least 2)")
    parser.add_argument(
        "--hosts", type=str, default="", help="Addresses of machines, the first of rank 0: prints their commands."
    )
    parser.add_argument("--device", type=str, default="auto", help="cpu or cuda. (default: cuda if each rank has its own GPU)")
    parser.add_argument("--timeout", type=float, default=300.0, help="Seconds that a part may take.")
    options = parser.parse_args(list(arguments))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = max(2, gpus) if options.ranks is None else options.ranks
    hosts = [each.strip() for each in options.hosts.split(",")] if options.hosts else ["127.0.0.1"]
    device = ("cuda" if gpus >= ranks else "cpu") if options.device == "auto" else options.device
    if ranks < 1:
        parser.error(f"--ranks must be at least 1, got {ranks}.")
    if not all(hosts):
        parser.error(f"--hosts must be addresses with commas between, such as 10.0.0.1,10.0.0.2, got {options.hosts!r}.")
    if device not in ("cpu", "cuda"):
        parser.error(f"--device must be auto, cpu or cuda, got {device!r}.")
    if device == "cuda" and gpus < ranks:
        parser.error(f"--device cuda needs a GPU for each of {ranks} ranks, got {gpus}. Set --device cpu, or fewer --ranks.")
    if "RANK" in os.environ:
        parser.error("a launcher has started this command once per rank. Start it once per machine, without torchrun or srun.")
    if not options.timeout > 0:
        parser.error(f"--timeout must be above 0, got {options.timeout}.")
    if len(hosts) > 1 and "NODE_RANK" not in os.environ:
        for number, host in enumerate(hosts):
            variables = f"MASTER_ADDR={hosts[0]} MASTER_PORT={PORT} NODE_RANK={number}"
            print(f"{variables} lightning-gnn test {shlex.join(arguments)}  # on {host}")
        return
    node_rank = os.environ.get("NODE_RANK", "") if len(hosts) > 1 else "0"
    if not node_rank.isdecimal() or int(node_rank) >= len(hosts):
        parser.error(f"NODE_RANK must be at least 0 and below the number of --hosts, {len(hosts)}, got {node_rank}.")
    sys.exit(not _test(ranks, hosts, int(node_rank), device, options.timeout))


def _test(ranks: int, hosts: Sequence[str], node_rank: int, device: str, timeout: float) -> bool:
    """Run the parts and print their results; returns whether all passed. Other machines than the first print only failures."""
    address, port = os.environ.get("MASTER_ADDR", hosts[0]), int(os.environ.get("MASTER_PORT", PORT))
    size = ranks * len(hosts)
    console = text_console(highlight=False)
    table = text_table("part", "ranks", "result", "seconds", title=f"lightning-gnn test: {device}", num_left=3)
    failures: list[str] = []
    parts = [part for part in PARTS if size > 1 or part == "training"]
    with tempfile.TemporaryDirectory() as folder, progress_bar("Testing", len(parts), "parts") as advance:
        os.environ["LIGHTNING_GNN_STORE"] = folder
        for number, part in enumerate(parts):
            if failures and len(hosts) > 1:
                break  # other machines may have ended
            # Each part uses another port: machines do not start a part at the same time.
            machine = Machine(address, port + number, node_rank, len(hosts)) if len(hosts) > 1 else Machine()
            began = time.monotonic()
            try:
                command = ["-m", "lightning_gnn.tools.commands.self_test_rank", part, device]
                result = f"[green]ok[/]  {escape(run_ranks(command, ranks, timeout, machine=machine).strip())}"
            except RuntimeError as error:
                result = "[red]failed[/]"
                failures.append(f"{part}: {error}\n  {PARTS[part]}")
            table.add_row(part, str(size), result, f"{time.monotonic() - began:.1f}")
            advance(1)
    if node_rank == 0:
        console.print(table)
    for failure in failures:
        console.print(failure, markup=False, soft_wrap=True)
    return not failures
