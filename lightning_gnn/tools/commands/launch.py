"""``lightning-gnn launch``: supervises the ranks of a script on one of several hosts, which continue without lost hosts."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe

from lightning_gnn.extensions.elastic.hosts import ExcludedError, Hosts, NoQuorumError
from lightning_gnn.extensions.elastic.supervision import Supervision
from lightning_gnn.launching import STARTED_BY
from lightning_gnn.launching.failures import GRACE_S, IMPORT_S, show_once
from lightning_gnn.launching.supervisor import Child, Supervisor

TOKEN = "LIGHTNING_GNN_TOKEN"
"""Environment variable: word that all hosts of a run have."""


def _count_range(text: str) -> tuple[int, int]:
    """Returns the least and greatest number of hosts, ``"1:4"`` or ``"2"``."""
    least, _, most = text.partition(":")
    found = int(least), int(most or least)
    if not 1 <= found[0] <= found[1]:
        raise ValueError(text)
    return found


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lightning-gnn launch",
        description="Start the ranks of this host, and supervise them. Run it on each host, with the same script.",
        epilog=f"With several hosts, set the environment variable {TOKEN} to the same word on each.",
    )
    parser.add_argument("--nnodes", type=_count_range, default=(1, 1), metavar="MIN:MAX", help="number of hosts (default: 1)")
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="number of ranks of this host (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="N", help="number of this host, 0 for the first (default: 0)")
    parser.add_argument("--master-addr", default="127.0.0.1", metavar="HOST", help="address of the first host")
    parser.add_argument("--master-port", type=int, default=29400, metavar="PORT", help="free port of the first host")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="deadline for another host (default: 60)")
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time for hosts to connect at the start (default: 60)",
    )
    parser.add_argument("script", help="Python file whose Trainer has a strategy with elastic=True")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(arguments)
    if options.nproc_per_node < 1 or options.timeout <= 2 * GRACE_S:
        parser.error(f"--nproc-per-node must be at least 1, and --timeout above {2 * GRACE_S:.0f}.")
    if options.nnodes[1] > 1 and TOKEN not in os.environ:
        parser.error(
            f"several hosts need the environment variable {TOKEN}, the same word on each. Set it, such as {TOKEN}=RUN-1."
        )
    return options


def launch(arguments: Sequence[str]) -> None:
    options = _options(arguments)
    show_once()
    address, token = (options.master_addr, options.master_port), os.environ.get(TOKEN, "")
    hosts = Hosts(*address, options.nnodes, options.timeout, number=options.node_rank, token=token, start_s=options.start_timeout)
    supervisor = Supervisor([_start(options, number) for number in range(options.nproc_per_node)])
    supervision = Supervision(supervisor, hosts, options.timeout - 2 * GRACE_S)
    signal.signal(signal.SIGTERM, lambda number, _: supervision.forward(number))
    try:
        try:
            supervision.start(IMPORT_S)
        except BaseException:
            supervisor.end(grace=0.0)
            raise
        sys.exit(supervision.run())
    except (ExcludedError, NoQuorumError) as error:
        sys.exit(f"lightning-gnn launch: {error}")


def _start(options: argparse.Namespace, number: int) -> Child:
    """Run the script as one of the ranks of this host."""
    ours, theirs = Pipe()
    count = options.nproc_per_node
    variables = {"LOCAL_RANK": str(number), "NODE_RANK": str(options.node_rank), "WORLD_SIZE": str(count)}
    variables |= {"MASTER_ADDR": options.master_addr, STARTED_BY: f"{os.getpid()} {number} {count} {theirs.fileno()}"}
    command = [sys.executable, options.script, *options.arguments]
    with theirs:
        process = subprocess.Popen(command, env={**os.environ, **variables}, pass_fds=[theirs.fileno()])
    return Child(number, process.pid, process.poll, ours)
