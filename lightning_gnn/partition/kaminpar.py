"""KaMinPar, an optional package: cuts like METIS's in a fraction of its memory, with one balance constraint.

Source: Gottesbueren et al., ESA 2021; compressed graphs: TeraPart, IPDPS 2025.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gnn.partition.adjacency import Adjacency

INSTALL = "pip install lightning-gnn[kaminpar]"

IMBALANCE = 0.03
"""Allowed imbalance above the mean, equal to METIS's default."""

_NO_EDGE_WEIGHTS, _NO_NODE_WEIGHTS, _NODE_IDS_32 = 1, 2, 8  # bits of a ParHiP file's first number
_CLEAN_ALL_BUFFERS = 0  # TBBMALLOC_CLEAN_ALL_BUFFERS, tbb/scalable_allocator.h


def is_installed() -> bool:
    return importlib.util.find_spec("kaminpar") is not None


def check_installed() -> None:
    """Raises ModuleNotFoundError with the install command unless KaMinPar is installed."""
    if not is_installed():
        raise ModuleNotFoundError(f'partition="kaminpar" needs the package kaminpar, which is not installed: {INSTALL}')


def part_graph(
    graph: Adjacency, num_parts: int, seed: int, weights: NDArray[np.integer] | None = None, compress: bool = False
) -> NDArray[np.int32]:
    """Returns the part of each node, int32 ``[N]``, with balanced nodes or, if given, balanced node weights ``[N]``.

    Results may differ for equal seeds, even on the one thread that it uses. The library reads only files, so the graph is written
    to the folder for temporary files, 4 bytes per entry and 8 per node.

    Args:
        graph: graph to partition.
        num_parts: number of parts.
        seed: random seed.
        weights: node weights, ``[N]``.
        compress: whether to compress the graph in memory, which takes longer.

    Raises:
        OSError: no space for the file.
    """
    import kaminpar

    with tempfile.TemporaryDirectory(prefix="lightning_gnn_") as folder:
        path = Path(folder) / "graph.parhip"
        try:
            _write(path, graph, weights)
        except OSError as error:
            size = 4 * len(graph.indices) + 8 * graph.num_nodes
            raise OSError(
                f"KaMinPar reads the graph from a file of {size / 1e9:.1f} GB, and {folder} could not be written ({error}). "
                "Set TMPDIR to a folder with more free space."
            ) from error
        kaminpar.reseed(seed)
        loaded = kaminpar.load_graph(str(path), kaminpar.GraphFileFormat.PARHIP, compress=compress)
    found: Any = kaminpar.KaMinPar(1, kaminpar.default_context()).compute_partition(loaded, num_parts, IMBALANCE)
    part = np.array(found, np.int32)
    del found, loaded
    _give_back()
    return part


def _give_back() -> None:
    """Return freed memory that KaMinPar's allocator keeps to the system: up to as much as a cut takes."""
    library = ctypes.CDLL(importlib.import_module("kaminpar.kaminpar_python").__file__)
    if hasattr(library, "scalable_allocation_command"):  # else built with another allocator than oneTBB's
        library.scalable_allocation_command(_CLEAN_ALL_BUFFERS, None)


def _write(path: Path, graph: Adjacency, weights: NDArray[np.integer] | None) -> None:
    """Write a graph in ParHiP's binary format: flags, N and E; file offsets of each node's ids; ids; node weights."""
    num_nodes, flags = graph.num_nodes, _NO_EDGE_WEIGHTS | _NODE_IDS_32
    head = np.array([flags | (_NO_NODE_WEIGHTS if weights is None else 0), num_nodes, len(graph.indices)], np.uint64)
    with path.open("wb") as file:
        head.tofile(file)
        (8 * (num_nodes + 4) + 4 * graph.indptr).astype(np.uint64).tofile(file)
        graph.indices.view(np.uint32).tofile(file)  # a copy would be 4 bytes per entry
        if weights is not None:
            weights.astype(np.int64).tofile(file)
