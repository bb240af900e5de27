"""``lightning-gnn partition``: partitions a graph ahead of time, for a later ``fit`` with the same data."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lightning_gnn.data.store import read_manifest
from lightning_gnn.devices import available_bytes
from lightning_gnn.partition.budget import Prediction, choose, table
from lightning_gnn.partition.metrics import EdgeCutReport
from lightning_gnn.partition.shard import Locality
from lightning_gnn.strategies.vertex_cut.cutters import VertexCutReport
from lightning_gnn.tools.commands.graph_cli import GraphCLI, Option, in_a_line


class PartitionCLI(GraphCLI):
    """Options of ``partition``."""

    name = "partition"
    usage = """lightning-gnn partition --config FILE [--parts N] [--columns N] [--dry-run] [--KEY VALUE ...]
       lightning-gnn partition --source FOLDER --parts N [--columns N] [--dry-run]
       lightning-gnn partition --data.source PATH --data.source_kwargs JSON --parts N [--columns N] [--dry-run]"""
    description = (
        "Partition a graph ahead of time, and print what came out. Files and keys are those of fit, which then finds the "
        "parts in the store; used are data, trainer.strategy, trainer.devices and trainer.num_nodes."
    )
    options: ClassVar = {
        "columns": Option(int, "Width of the rows whose bytes are told. (default: the graph's features)"),
        "dry-run": Option(
            bool, "Load the graph, print what each partitioner would take and which would be used, and stop.", False
        ),
    }


def partition(arguments: Sequence[str]) -> None:
    # Short form of the most frequent option.
    cli = PartitionCLI([re.sub(r"^--source(=|$)", r"--data.source\1", word) for word in arguments])
    data, layout, console = cli.datamodule, cli.layout, cli.console
    if cli.config.dry_run:
        with in_a_line():
            predictions, method = data.predictions(layout)
        console.print(*_prediction_lines(predictions, method), sep="\n", soft_wrap=True)
        return
    began = time.perf_counter()
    before = {manifest.parent.name for manifest in data.partition_dir.glob("*/manifest.json")}
    with in_a_line():
        folder = data.partition_for(layout)
    console.print(*_report(folder, cli.config.columns), sep="\n", soft_wrap=True)
    elapsed, partitioning = time.perf_counter() - began, read_manifest(folder)["report"]["seconds"]
    if folder.name in before:
        console.print(f"The store had it already: {folder}", soft_wrap=True)
    else:
        console.print(f"Kept in {folder}", soft_wrap=True)
        console.print(f"Took {elapsed:.1f} s, of which the partitioner {partitioning:.2g} s", soft_wrap=True)


def _prediction_lines(predictions: Sequence[Prediction], method: str | np.ndarray) -> Iterator[Any]:
    """Yields the table of predicted costs of partitioners, and the selected one with the reason."""
    free, taken, why = available_bytes(), None, "has no row: it takes little"
    if not isinstance(method, str):
        method, why = "as given", "cuts nothing"
    elif method == "auto":
        try:
            taken, why = choose(predictions, free).method, "takes the first that fits"
        except MemoryError as error:
            why = f"would fail: {error}"
    else:
        row = next((each for each in predictions if each.method == method.removesuffix("_masks").removesuffix("_cover")), None)
        if row is not None:
            taken = row.method
            why = "is asked for" if row.fits(free) else 'is asked for and does not fit: use "auto"'
    yield table(predictions, free, taken)
    yield f"partition: {method}, {why}"


def _report(folder: Path, columns: int | None) -> Iterator[Any]:
    manifest = read_manifest(folder)
    report = manifest["report"]
    if manifest["types"] is not None:
        cut = EdgeCutReport.from_dict(report)
        yield from (cut.table(), cut.table_of_types(), f"{report['method']}, balance: {report['balance']}")
    else:
        x = np.load(folder / "node.x.npy", mmap_mode="r")
        width = columns or x.shape[1]
        if manifest["layout"]["kind"] == "vertex_cut":
            yield VertexCutReport.from_dict(report).table()
            yield f"{report['method']}; a row of {width:,} columns, {x.dtype}, has {width * x.itemsize:,} bytes"
        else:
            yield EdgeCutReport.from_dict(report).table(width * x.itemsize)
            yield f"Rows of {width:,} columns, {x.dtype}; {report['method']}, balance: {report['balance']}"
    if manifest["locality"] is not None:
        yield str(Locality(**manifest["locality"]))
