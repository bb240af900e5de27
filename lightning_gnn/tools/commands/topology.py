"""``lightning-gnn topology``: measures the links between ranks, and shows topologies."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from lightning_gnn.comm.group import World
from lightning_gnn.console import text_console, text_table
from lightning_gnn.data.store import write_atomically
from lightning_gnn.extensions.plans.measure import measure
from lightning_gnn.extensions.plans.presets import find_topology
from lightning_gnn.extensions.plans.topology import MAX_DEVICES, Topology
from lightning_gnn.extensions.plans.wiring import topology_to_dict
from lightning_gnn.tools.local_ranks import run_ranks
from lightning_gnn.tools.parser import Parser, did_you_mean

HELP = """usage: lightning-gnn topology measure --output FILE [--ranks N] [options]
       lightning-gnn topology show FILE|PRESET [--ranks N]

Measure how fast the links between ranks are, or show a topology.

examples:
  torchrun --nproc-per-node 8 -m lightning_gnn.tools.cli topology measure --output cluster.json
  lightning-gnn topology measure --output machine.json --ranks 4
  lightning-gnn topology show cluster.json

All options: lightning-gnn topology measure --help, lightning-gnn topology show --help
"""
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def topology(arguments: Sequence[str]) -> None:
    commands = {"measure": measure_command, "show": show_command}
    command, *rest = arguments or [""]
    if command in commands:
        commands[command](rest)
        return
    if command in ("", "-h", "--help"):
        print(HELP, end="")
        sys.exit(0 if command else 2)
    print(f"error: unknown command {f'topology {command}'!r}{did_you_mean(command, commands)}\n", file=sys.stderr)
    print(HELP, end="", file=sys.stderr)
    sys.exit(2)


def measure_command(arguments: Sequence[str]) -> None:
    """Run ``lightning-gnn topology measure`` in each rank, or, without a launcher, in the process that starts the ranks."""
    parser = Parser(
        prog="lightning-gnn topology measure",
        description="Time messages between each two ranks, and write the topology of their links. Run it under the launcher "
        "that training will use, on machines that do nothing else; without one, --ranks starts processes on this machine.",
    )
    parser.add_argument("--output", type=str, required=True, help="JSON file to write, for topology=FILE in a strategy.")
    parser.add_argument("--ranks", type=int, help="Number of ranks to start on this machine.")
    parser.add_argument("--seconds", type=float, default=0.1, help="Time of a message: longer is more exact.")
    parser.add_argument("--megabytes", type=float, default=64.0, help="Most that a message may have.")
    parser.add_argument(
        "--device", type=str, default="auto", help="cpu or cuda: what the ranks train on. (default: cuda if there is one)"
    )
    parser.add_argument("--no-shared-memory", action="store_true", help="Use sockets within a machine, too.")
    parser.add_argument("--timeout", type=float, default=120.0, help="Seconds to wait for another rank.")
    options = parser.parse_args(list(arguments))
    for name in ("seconds", "megabytes", "timeout"):
        if not options[name] > 0:
            parser.error(f"--{name} must be above 0, got {options[name]}.")
    if options.device not in ("auto", "cpu", "cuda"):
        parser.error(f"--device must be auto, cpu or cuda, got {options.device!r}.")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no CUDA device. Run lightning-gnn doctor for details.")
    try:
        size = _num_ranks(options.ranks)
        if size < 2:
            raise ValueError("a measurement needs at least two ranks: one rank has no links. Use the ranks that will train")
        if size > MAX_DEVICES:
            raise ValueError(f"a topology supports at most {MAX_DEVICES} ranks, got {size}")
        if "RANK" not in os.environ:
            check_writable(Path(options.output))
            printed = run_ranks(["-m", "lightning_gnn.tools.cli", "topology", "measure", *arguments], size, show_errors=True)
            print(printed, end="")
        else:
            _measure_as_rank(options, size)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)


def _num_ranks(num_ranks: int | None) -> int:
    """Returns the number of ranks, from the launcher or as `num_ranks`."""
    there = [name for name in LAUNCHED if name in os.environ]
    if not there:
        if num_ranks is None:
            raise ValueError("the number of ranks is unknown. Pass --ranks N, or use the launcher that training will use")
        return num_ranks
    missing = [name for name in LAUNCHED if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(there)} set, but not {', '.join(missing)}: a launcher such as torchrun sets all four; unset them to "
            "start ranks on this machine with --ranks N"
        )
    size = int(os.environ["WORLD_SIZE"])
    if num_ranks not in (None, size):
        raise ValueError(f"--ranks {num_ranks}, but the launcher has started {size}: remove --ranks under a launcher")
    return size


def check_writable(path: Path) -> None:
    """Raises ValueError unless a file can be written later."""
    if path.is_dir():
        raise ValueError(f"--output {path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"--output {path}: there is no folder {path.parent.absolute()}; make it, or name another")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"--output {path}: cannot write to {path.parent.absolute()} ({error.strerror})") from error


def _reporter() -> Callable[[int, int], None]:
    """Returns a function that prints the progress of the measurement to standard error."""
    began = reported = time.monotonic()

    def report(num_done: int, total: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if num_done in (1, total) or now - reported > 10:
            reported, left = now, (now - began) / num_done * (total - num_done)
            soon = f", about {left:.0f} s left" if num_done < total else ""
            print(f"messages from rank to rank: {num_done} of {total}{soon}", file=sys.stderr, flush=True)

    return report


def _measure_as_rank(options: Any, size: int) -> None:
    rank, path = int(os.environ["RANK"]), Path(options.output)
    device = torch.device("cpu")
    if options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    world = World(rank, size, device, timedelta(seconds=options.timeout), not options.no_shared_memory)
    try:
        wrong = None
        if rank == 0:
            try:
                check_writable(path)
            except ValueError as error:
                wrong = str(error)
        if (wrong := world.broadcast_object(wrong)) is not None:
            raise ValueError(wrong) if rank == 0 else SystemExit(2)  # printed once
        if rank == 0:
            seconds = 4 * options.seconds * size * (size - 1)
            print(f"{size} ranks on {device.type}: about {seconds:.0f} s", file=sys.stderr)
        found = measure(
            world,
            options.seconds,
            int(options.megabytes * 1e6),
            _reporter() if rank == 0 else lambda num_done, total: None,
            path.stem,
        )
        if rank == 0:
            write_atomically(path, json.dumps(topology_to_dict(found), indent=1) + "\n")
            print_topology(found, text_console(highlight=False))
            print(f"Written to {path}; use it as topology={str(path)!r} in a strategy.")
        world.barrier()
    finally:
        world.close()


def show_command(arguments: Sequence[str]) -> None:
    parser = Parser(prog="lightning-gnn topology show", description="Show hosts, hops and links of a topology.")
    parser.add_argument("topology", type=str, help="A JSON file, or the name of a preset: dgx1, dgx1x2, pcie8, summit, uniform.")
    parser.add_argument("--ranks", type=int, help="Number of ranks. (default: the topology's devices)")
    options = parser.parse_args(list(arguments))
    try:
        found = find_topology(options.topology, options.ranks)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print_topology(found, text_console(highlight=False))


def print_topology(topology: Topology, console: Console) -> None:
    hosts = text_table("host", "devices by socket", title=escape(topology.name), num_left=2)
    for index, sockets in enumerate(topology.groups):
        hosts.add_row(str(index), escape(" | ".join(", ".join(map(str, socket)) for socket in sockets)))
    users = topology.passes.sum((0, 1))
    hops = text_table("hop", "kind", "GB/s each way", "links, forward", num_left=4)
    for hop, count in list(zip(topology.hops, users))[::2]:
        hops.add_row(escape(hop.name), escape(hop.kind), f"{hop.gb_per_s:.4g}", str(count))
    links = text_table("link", "via", "GB/s", num_left=3)
    for (a, b), via in sorted(topology.links.items()):
        if a < b:
            names = ", ".join(topology.hops[hop].name for hop in via)
            links.add_row(f"{a}-{b}", escape(names), f"{min(topology.hops[hop].gb_per_s for hop in via):.4g}")
    console.print(hosts)
    console.print(hops)
    console.print(links)
    stage, message = (1e6 * each for each in (topology.stage_seconds, topology.message_seconds))
    console.print(f"Each stage {stage:.4g} us, and {message:.4g} us for each further message of a device in it")
