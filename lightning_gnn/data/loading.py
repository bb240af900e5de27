"""Loading of graphs from any source, and comparison of graphs and sources."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch_geometric.data import Dataset, FeatureStore, GraphStore
from torch_geometric.data.data import BaseData

from lightning_gnn.console import progress_bar
from lightning_gnn.data.shards import Graph
from lightning_gnn.data.sources import TO_PREDICT_LINKS
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.private_pyg import key_of
from lightning_gnn.private_torch import version_counter
from lightning_gnn.registry import feature

if TYPE_CHECKING:
    from lightning_gnn.partition.budget import Partitioner

Source: TypeAlias = str | Dataset | Graph | tuple[FeatureStore, GraphStore] | Callable[..., Any]
"""Source of a graph.

A PyG dataset, ``Data``, ``HeteroData``, pair of PyG's stores, callable that returns one of these, import path, or a source of the
registry: see :func:`~lightning_gnn.registry.source_of`.
"""


def load_source(source: Source, args: Mapping[str, Any] | None = None) -> tuple[Graph, Mapping[str, Any] | None]:
    """Returns the graph of `source` and its index split, if it has one.

    Args:
        source: source of the graph.
        args: arguments of a callable or an import path.

    Raises:
        ValueError: the path cannot be imported, the callable raises, or the result is not a single PyG graph.
    """
    name = source_name(source)
    if isinstance(source, str):
        module, _, function = source.rpartition(".")
        try:
            source = getattr(importlib.import_module(module), function)
        except Exception as error:  # the import of a user's module may raise anything
            raise ValueError(
                f"source={source!r} cannot be imported ({error}). Use the import path of a class or function, "
                "such as 'torch_geometric.datasets.Planetoid'."
            ) from error
    loaded: Any = source
    if callable(source) and not isinstance(source, (BaseData, Dataset)):
        try:
            loaded = source(**(args or {}))
        except Exception as error:
            called = ", ".join(f"{key}={value!r}" for key, value in (args or {}).items())
            raise ValueError(
                f"Loading the graph failed: {name}({called}) raised {type(error).__name__}: {error}. Call it directly "
                "to debug it; its arguments are GraphDataModule's source_kwargs."
            ) from error
    elif args:
        raise ValueError(f"source_kwargs={dict(args)} needs a callable or an import path as source (got {name}).")
    if isinstance(loaded, Graph):
        return loaded, None
    if isinstance(loaded, (tuple, list)) and [*map(_kind_of_store, loaded)] == [FeatureStore, GraphStore]:
        return feature("graph_in_stores")(*loaded), None
    is_dataset = hasattr(loaded, "__getitem__") and hasattr(loaded, "__len__")
    graphs = loaded if is_dataset and not isinstance(loaded, (BaseData, Mapping, str)) else [loaded]
    try:
        first = graphs[0] if len(graphs) else None
        split = graphs.get_idx_split() if hasattr(graphs, "get_idx_split") else None
    except Exception as error:
        raise ValueError(
            f"{name} cannot load its graph: {type(error).__name__}: {error}. Check dataset[0] and "
            "dataset.get_idx_split(), or pass the graph itself, a torch_geometric.data.Data."
        ) from error
    of_links = first if isinstance(first, (tuple, list)) else loaded if isinstance(loaded, (tuple, list)) else ()
    if any(isinstance(each, BaseData) and "edge_label" in " ".join(each.keys()) for each in of_links):
        raise ValueError(
            f"{name} returned {len(of_links)} graphs with edge_label_index, as from RandomLinkSplit. Remove that transform. "
            f"{TO_PREDICT_LINKS}."
        )
    if len(graphs) and not isinstance(first, Graph):
        raise ValueError(
            f"{name} returned a {type(first).__name__}; GraphDataModule requires a torch_geometric.data.Data or HeteroData."
        )
    if len(graphs) != 1:
        raise ValueError(
            f"{name} holds {len(graphs)} graphs; GraphDataModule trains on one large graph. "
            "Pick one: GraphDataModule(dataset[0])."
        )
    return first, split


def _kind_of_store(value: object) -> type | None:
    kinds = () if isinstance(value, BaseData) else (FeatureStore, GraphStore)
    return next((kind for kind in kinds if isinstance(value, kind)), None)


def source_name(source: Source) -> str:
    if isinstance(source, str):
        return source
    return getattr(source, "__qualname__", None) or type(source).__name__


def graph_digests(data: Graph) -> dict[str, str]:
    """Returns a digest of every attribute of the graph, by name: equal digests mean equal graphs."""
    digests = {}
    for store in data.stores:
        kind = key_of(store)
        of = "" if kind is None else f"{kind if isinstance(kind, str) else ' '.join(kind)}."
        for name, value in sorted(store.items()):
            digest = hashlib.blake2b(digest_size=16)
            if isinstance(value, Tensor):
                array = value.detach().cpu().contiguous()
                digest.update(f"{array.dtype} {tuple(array.shape)}".encode())
                digest.update(array.view(-1).view(torch.uint8).numpy().data)
            else:
                digest.update(f"{value!r}".encode())
            digests[f"{of}{name}"] = digest.hexdigest()
    return digests


class Versions:
    """Version counters of a graph's tensors, to detect in-place changes.

    Tensors without other references are dropped, and all tensors in another process. Changes by numpy are not detected.
    """

    def __init__(self, data: Graph | None = None) -> None:
        stores = [] if data is None else data.stores
        tensors = [(name, value) for store in stores for name, value in store.items() if isinstance(value, Tensor)]
        self._counters = [(name, ref(value), version_counter(value)) for name, value in tensors if not value.is_inference()]

    def renew(self) -> None:
        """Reset the counters to the current versions."""
        self._counters = [(name, ref(tensor), version_counter(tensor)) for name, tensor, _ in self._living()]

    def changed_names(self) -> list[str]:
        """Returns the names of tensors that have changed in place since the last reset."""
        return [*dict.fromkeys(name for name, tensor, version in self._living() if version_counter(tensor) != version)]

    def names_by_id(self) -> dict[int, str]:
        """Returns the names of tensors by :func:`id`."""
        return {id(tensor): name for name, tensor, _ in self._living()}

    def _living(self) -> Iterator[tuple[str, Tensor, int]]:
        for name, weak, version in self._counters:
            tensor = weak()
            if tensor is not None:
                yield name, tensor, version

    def __getstate__(self) -> dict[str, Any]:
        return {"_counters": []}


def check_same_graph(digests: Mapping[str, str], expected: Mapping[str, str], where: str) -> None:
    """Raises ValueError if two :func:`graph_digests` differ; `where` describes the graph of `digests`."""
    differing = sorted(name for name in {*digests, *expected} if digests.get(name) != expected.get(name))
    if differing:
        raise ValueError(
            f"{where} differs from the graph that this run began with: {', '.join(differing[:5])}"
            f"{', ...' if len(differing) > 5 else ''}. All stages and ranks need the same graph. For random values, use the "
            "global generators of torch, numpy and python, which are seeded while the graph is loaded, or a seeded generator. "
            "For a random split, use GraphDataModule(..., split=(0.6, 0.2, 0.2))."
        )


@contextmanager
def seed_rngs(seed: int) -> Iterator[Callable[[], bool]]:
    """Context manager that seeds the global random streams of Python, numpy and torch, and restores their states.

    Yields a function that returns whether random numbers have been drawn from them.
    """

    def states() -> tuple[Any, ...]:
        name, keys, *place = np.random.get_state()  # noqa: NPY002 (what users draw from)
        return random.getstate(), (name, bytes(keys), *place), bytes(torch.get_rng_state().numpy())  # type: ignore[arg-type]

    with isolate_rng(include_cuda=False):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which also seeds GPUs
        began = states()
        yield lambda: states() != began


Assigned: TypeAlias = tuple[np.ndarray, np.ndarray | None, dict[str, Any]]
"""Owners of nodes, ranks of the edges of a vertex cut, and a report, see
:meth:`~lightning_gnn.datamodules.graph.GraphDataModule.assign`.
"""

Assign: TypeAlias = Callable[..., Assigned]


class GraphSource:
    """Source of a datamodule's graph, and its partitioning in memory.

    Attributes:
        short_ids: whether int32 edges stay int32; in memory, int64 would be a copy.
    """

    short_ids = False

    def __init__(self, source: Source) -> None:
        self.source = source

    def load(self, args: Mapping[str, Any] | None, store: Path) -> tuple[Graph, Mapping[str, Any] | None]:
        """Returns the graph and its index split, if it has one; files that loading must write go to the folder `store`."""
        return load_source(self.source, args)

    def method(self, layout: LayoutSpec) -> str:
        """Returns the default partitioner of a layout."""
        return layout.method or "ne"

    def partitioners(self, work: Path) -> Mapping[str, Partitioner] | None:
        """Returns partitioners that replace the registry's, by name, or None; `work` is a folder for their files."""
        return None

    @contextmanager
    def cut(self, folder: Path, data: Graph, layout: LayoutSpec, assign: Assign) -> Iterator[tuple[Assigned, Any]]:
        """Context manager of a partitioned graph while its edges are written to `folder`.

        Yields the result of `assign`, with the partitioner's seconds in the report, and the edge writer of
        :func:`~lightning_gnn.data.store.write_store`.
        """
        began = time.perf_counter()
        part, holders, report = assign()
        report["seconds"] = time.perf_counter() - began
        with progress_bar("Writing parts"):
            yield (part, holders, report), None

    def key(self, args: Mapping[str, Any] | None = None, split: Any = None) -> str | None:
        """Returns a digest of a source given by its path, of the file that defines it, and of the files that its arguments name.

        It identifies the graph without loading it. Files are compared by name, size and modification time. None if the arguments
        are not JSON.
        """
        try:
            text = json.dumps([self.source, dict(args or {}), split], sort_keys=True)
            defined_by = self._defined_by()
        except Exception:
            return None  # load_source reports the error
        digest = hashlib.blake2b(text.encode(), digest_size=16)
        named = [value for value in (args or {}).values() if isinstance(value, str)]
        for path in map(Path, [*named, *defined_by]):
            for file in sorted([path, *path.rglob("*")]) if path.exists() else []:
                if file.is_file():
                    stat = file.stat()
                    digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}".encode())
        return digest.hexdigest()

    def _defined_by(self) -> list[str]:
        """Returns the files that define a source given by its path."""
        code = importlib.util.find_spec(str(self.source).rpartition(".")[0])
        return [code.origin] if code is not None and code.origin else []
