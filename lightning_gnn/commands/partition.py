"""``lightning-gnn partition``: partitions a graph ahead of time, as a later ``fit`` with the same data looks for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typing_extensions import override

from lightning_gnn.commands.parser import Parser, check_names
from lightning_gnn.datamodules import GraphDataModule
from lightning_gnn.datamodules.store import read_manifest
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.partition.locality import Locality
from lightning_gnn.partition.metrics import EdgeCutReport
from lightning_gnn.strategies import DGCLStrategy, GNNStrategy

USAGE = """lightning-gnn partition --config FILE [--parts N] [--columns N] [--KEY VALUE ...]
       lightning-gnn partition --data.source PATH --data.source_args JSON --parts N [--columns N]"""
DESCRIPTION = (
    "Partition a graph ahead of time, and print what came out. Files and keys are those of fit, which then finds the "
    "parts in the store; used are data, trainer.strategy, trainer.devices and trainer.num_nodes."
)


class PartitionCLI(LightningCLI):
    """Parses what ``fit`` takes, so that its files and overrides serve here too; makes data and strategy only."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        super().__init__(
            L.LightningModule,
            GraphDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=False,
            parser_class=Parser,
            parser_kwargs={"prog": "lightning-gnn partition", "usage": USAGE, "description": DESCRIPTION},
            run=False,
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(self._arguments)

    @override
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--parts", type=int, help="Number of parts. (default: trainer.devices x trainer.num_nodes)")
        parser.add_argument(
            "--columns", type=int, help="Width of the rows whose bytes are told. (default: the graph's features)"
        )
        parser.add_lightning_class_args(L.Trainer, "trainer")
        parser.add_lightning_class_args(L.LightningModule, "model", subclass_mode=True, required=False)
        parser.add_lightning_class_args(GraphDataModule, "data", subclass_mode=True)
        parser.add_method_arguments(L.Trainer, "fit", skip=set(self.subcommands()["fit"]))

    @override
    def instantiate_classes(self) -> None:
        check_names(self.parser, self.config.trainer.strategy, self.config.trainer.accelerator)
        # Loggers and callbacks may start something, and the Trainer wants devices that this machine need not have.
        chosen = self.config.clone()
        for key in vars(chosen.trainer).keys() - {"strategy"}:
            chosen.trainer[key] = None
        chosen.model = chosen.optimizer = chosen.lr_scheduler = None
        made = self.parser.instantiate_classes(chosen)
        self.datamodule = made.data
        self.layout = self._layout(made.trainer.strategy)

    def _layout(self, strategy: Any) -> LayoutSpec:
        trainer = self.config.trainer
        if isinstance(strategy, str):
            strategy = DGCLStrategy() if strategy == "auto" else StrategyRegistry.get(strategy.lower())
        if not isinstance(strategy, GNNStrategy):
            self.parser.error(f"{type(strategy).__name__} does not split the graph. Use trainer.strategy=dgcl.")
        parts = self.config.parts if self.config.parts is not None else num_ranks(trainer.devices, trainer.num_nodes)
        if parts is None:
            self.parser.error(
                f"how many parts? trainer.devices={trainer.devices} depends on the machine: give --parts."
            )
        if parts < 1:
            self.parser.error(f"--parts is a number above 0 (got {parts}).")
        return strategy.scheme.layout(parts)


def num_ranks(devices: Any, num_nodes: int) -> int | None:
    """Returns the number of ranks of a Trainer with these `devices`, without a look at any; None if they decide."""
    if isinstance(devices, str):
        if devices.strip().lstrip("-").isdigit():
            devices = int(devices)
        elif devices.replace(",", "").replace(" ", "").isdigit():
            devices = [device for device in devices.split(",") if device.strip()]
        else:
            return None
    count = devices if isinstance(devices, int) else len(devices)
    return None if count < 0 else count * num_nodes


@contextmanager
def _working(console: Console, text: str) -> Iterator[None]:
    """Shows a spinner and the seconds so far; nothing where nobody watches."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(text, total=None)
        yield


def partition(arguments: Sequence[str]) -> None:
    """Runs ``lightning-gnn partition`` with these arguments."""
    cli = PartitionCLI(arguments)
    data, layout, console = cli.datamodule, cli.layout, Console(highlight=False, markup=False)
    began = time.perf_counter()
    before = {manifest.parent.name for manifest in data.store.glob("*/manifest.json")}
    try:
        with _working(Console(stderr=True), f"Loading the graph and partitioning it into {layout.parts} parts"):
            folder = data.partition_for(layout)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"error: {error}")
    console.print(*_report(folder, cli.config.columns), sep="\n", soft_wrap=True)
    elapsed, partitioning = time.perf_counter() - began, read_manifest(folder)["report"]["seconds"]
    if folder.name in before:
        console.print(f"The store had it already: {folder}", soft_wrap=True)
    else:
        console.print(f"Kept in {folder}", soft_wrap=True)
        console.print(f"Took {elapsed:.1f} s, of which the partitioner {partitioning:.2g} s", soft_wrap=True)


def _report(folder: Path, columns: int | None) -> Iterator[Any]:
    manifest = read_manifest(folder)
    x = np.load(folder / "node.x.npy", mmap_mode="r")
    width = columns or x.shape[1]
    yield EdgeCutReport.from_dict(manifest["report"]).table(width * x.itemsize)
    yield f"Rows of {width:,} columns, {x.dtype}; {manifest['report']['method']}, balance: {manifest['report']['balance']}"
    yield str(Locality(**manifest["locality"]))
