"""Names, shapes, dtypes and node dimensions of a dataset's samples.

A tensor of a node type has the name ``"type.name"``. N nodes of the whole graph or of the type, B samples in a batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn.arguments import quote

ALL_NODES = ""
"""Node type of a graph without types."""


def flat_name(name: Any) -> str:
    """Returns the name of a tensor: a name, or a pair of a node type and a name."""
    return ".".join(name) if isinstance(name, tuple) else str(name)


def _flat_values(item: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values of an item by name, also those in dicts of node types."""
    if isinstance(item, (Data, HeteroData)):
        stores = {"": item.stores[0], **({} if isinstance(item, Data) else dict((*item.node_items(), *item.edge_items())))}
        tensors = {kind: {name: x for name, x in store.items() if name != "num_nodes"} for kind, store in stores.items()}
        item = {**tensors.pop(""), **tensors}
    for name, value in item.items():
        if isinstance(value, Mapping):
            kind = "__".join(name) if isinstance(name, tuple) else name
            yield from ((f"{kind}.{inner}", each) for inner, each in value.items())
        else:
            yield str(name), value


def values_of(item: Any, where: str) -> dict[str, Tensor | np.ndarray]:
    """Returns the tensors and arrays of a dataset's item by name; numbers become tensors.

    Raises:
        ValueError: the item is no dict and no ``Data``, or a value is no tensor, array or number; `where` names the item.
    """
    if not isinstance(item, (Mapping, Data, HeteroData)):
        raise ValueError(f"{where} must be a dict of tensors or a Data, got {type(item).__name__}. Return {{'x': x, 'y': y}}.")
    found: dict[str, Tensor | np.ndarray] = {}
    for name, value in _flat_values(item):
        try:
            value = value if isinstance(value, (Tensor, np.ndarray)) else torch.as_tensor(value)
            _dtype_of(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{where} must have tensors, arrays and numbers, got {name}={quote(value)} ({error}). Convert or remove it."
            ) from error
        found[name] = value
    return found


def _dtype_of(value: Tensor | np.ndarray) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) else torch.from_numpy(np.empty(0, value.dtype)).dtype


@dataclass(frozen=True)
class SampleTensor:
    """Format of a tensor that each sample has.

    Attributes:
        shape: shape in a sample.
        dtype: dtype.
        node_dim: dimension of the nodes in a sample, from the left; None for one value per sample.
        node_type: type of these nodes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    node_dim: int | None
    node_type: str = ALL_NODES

    def resize(self, num_rows: Mapping[str, int]) -> SampleTensor:
        """Returns the format with other numbers of nodes, by type."""
        if self.node_dim is None:
            return self
        return replace(self, shape=(*self.shape[: self.node_dim], num_rows[self.node_type], *self.shape[self.node_dim + 1 :]))

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class SampleFormat:
    """Format of all samples of a dataset, which its first sample defines.

    Attributes:
        dataset: name of the dataset in messages.
        tensors: format of each tensor, by name.
    """

    dataset: str
    tensors: Mapping[str, SampleTensor]

    @classmethod
    def of(
        cls,
        dataset: str,
        item: Any,
        num_nodes: int | Mapping[str, int],
        num_edges: int,
        node_dims: Mapping[str, int | None] | None = None,
    ) -> SampleFormat:
        """Returns the format of a dataset.

        Args:
            dataset: name of the dataset in messages.
            item: first item of the dataset.
            num_nodes, num_edges: size of the whole graph; numbers of nodes by type.
            node_dims: given node dimensions by name; by default 0 for 1-D tensors, else -2, if the size is `num_nodes`.

        Raises:
            ValueError: no tensor has rows of nodes, a given dimension has another size, or a tensor has rows of edges.
        """
        values, given = values_of(item, f"{dataset}[0]"), node_dims or {}
        sizes = num_nodes if isinstance(num_nodes, Mapping) else {ALL_NODES: num_nodes}
        tensors = {}
        for name, value in values.items():
            shape, kind = tuple(value.shape), _type_of(f"{dataset}[0]", name, sizes)
            size = sizes.get(kind, -1)  # -1 outside of types
            dim = given[name] if name in given else _default_dim(f"{dataset}[0]", name, shape, size, num_edges, kind)
            if dim is not None:
                if kind not in sizes:
                    raise ValueError(
                        f"node_dims[{name!r}] must be None, got {dim}: {name} of {dataset}[0] does not belong to a node type: "
                        "it is one value per sample. Remove it."
                    )
                if not -len(shape) <= dim < len(shape) or shape[dim] != size:
                    raise ValueError(
                        f"node_dims[{_key(name, kind)}] must be a dimension of size N={size}, got {dim}: {name} of {dataset}[0] "
                        f"has shape {list(shape)}. Correct it, or use None for one value per sample."
                    )
                dim %= len(shape)
            tensors[name] = SampleTensor(shape, _dtype_of(value), dim, kind)
        having = {tensor.node_type for tensor in tensors.values()} & sizes.keys()
        for kind in having or sizes:
            named = {name: each for name, each in tensors.items() if each.node_type == kind} or tensors
            if all(tensor.node_dim is None for tensor in named.values()):
                shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())
                dims = {
                    _key(name, kind): each.shape.index(sizes[kind]) for name, each in named.items() if sizes[kind] in each.shape
                }
                given_dims = next((f", or pass node_dims={{{key}: {dim}}}" for key, dim in dims.items()), "")
                raise ValueError(
                    f"{dataset}: no tensor of sample 0 has N={sizes[kind]} entries along its node dimension (got {shapes}). "
                    f"Check the number of nodes{given_dims}."
                )
        return cls(dataset, tensors)

    @property
    def node_dims(self) -> dict[str, int | None]:
        """Dimension of the nodes in batches ``[B, ...]``, by name; None for one value per sample."""
        return {name: None if each.node_dim is None else each.node_dim + 1 for name, each in self.tensors.items()}

    def resize(self, num_rows: Mapping[str, int]) -> SampleFormat:
        """Returns the format of samples with other numbers of nodes, by type."""
        return replace(self, tensors={name: each.resize(num_rows) for name, each in self.tensors.items()})

    def local_rows(self, index: int, item: Any, rows: Mapping[str, np.ndarray] | None) -> dict[str, Tensor]:
        """Returns the tensors of an item, with a rank's node rows.

        Args:
            index: dataset index of the item.
            item: item of the dataset.
            rows: original ids of the nodes by type, int64 ``[rows]``; None for all entries of the item.

        Raises:
            ValueError: a name, shape or dtype differs from the first sample.
        """
        values = values_of(item, f"{self.dataset}[{index}]")
        if values.keys() != self.tensors.keys():
            raise ValueError(
                f"{self.dataset}[{index}] has {sorted(values)}, but {self.dataset}[0] has {sorted(self.tensors)}. "
                "Return the same names for each sample."
            )
        found = {}
        for name, expected in self.tensors.items():
            value = values[name]
            actual = replace(expected, shape=tuple(value.shape), dtype=_dtype_of(value))
            if actual != expected:
                raise ValueError(
                    f"{name} of {self.dataset}[{index}] is {actual}, but {name} of {self.dataset}[0] is {expected}. "
                    f"Return {name} with one shape and dtype for all samples."
                )
            found[name] = _select_rows(value, expected.node_dim, None if rows is None else rows.get(expected.node_type))
        return found

    def stack(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the tensors ``[B, ...]`` of a batch; a batch may have no samples."""
        if not samples:
            return {name: torch.empty((0, *each.shape), dtype=each.dtype) for name, each in self.tensors.items()}
        return {name: torch.stack([sample[name] for sample in samples]) for name in self.tensors}


def digest_of(item: Any) -> int:
    """Returns a checksum of the names and values of an item."""
    found = 0
    for name, value in values_of(item, "item").items():
        if isinstance(value, Tensor):  # NumPy does not support all dtypes
            content = value.detach().reshape(-1).view(torch.uint8).numpy()
        else:
            content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        found = zlib.crc32(content.data, zlib.crc32(f"{name} {tuple(value.shape)}".encode(), found))
    return found


def _type_of(where: str, name: str, sizes: Mapping[str, int]) -> str:
    """Returns the node type of a tensor; ALL_NODES for values outside of types."""
    kind, dot, _ = name.rpartition(".")
    if ALL_NODES in sizes or not dot:
        return ALL_NODES
    if kind not in sizes:
        raise ValueError(f"{where} must have tensors of node types {sorted(sizes)}, got {name}. Rename or remove it.")
    return kind


def _key(name: str, kind: str) -> str:
    """Returns the key of a tensor in `node_dims`, for messages."""
    return repr((kind, name.removeprefix(f"{kind}.")) if kind else name)


def _default_dim(where: str, name: str, shape: tuple[int, ...], num_nodes: int, num_edges: int, kind: str) -> int | None:
    """Returns the node dimension of a tensor; None for one value per sample."""
    if not shape:
        return None
    dim = 0 if len(shape) == 1 else -2
    if shape[dim] == num_nodes:
        return dim
    if shape[dim] == num_edges:
        raise ValueError(
            f"{name} of {where} has shape {list(shape)}, and the graph has {num_edges} edges. Samples do not support tensors "
            f"with one row per edge. If {name} is equal in all samples, remove it from the samples and add it to the graph. If "
            f"it is one value per sample, pass GraphDataModule(..., node_dims={{{_key(name, kind)}: None}})."
        )
    if num_nodes in shape:
        rank_zero_warn(
            f"{name} of {where} has shape {list(shape)}: one value per sample, since dimension {dim} does not have N={num_nodes} "
            f"entries. If another dimension has the nodes, pass node_dims={{{_key(name, kind)}: {shape.index(num_nodes)}}}."
        )
    return None


def _select_rows(value: Tensor | np.ndarray, dim: int | None, rows: np.ndarray | None) -> Tensor:
    if isinstance(value, np.ndarray):
        if dim is not None and rows is not None:
            value = value.take(rows, dim)
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    return value if dim is None or rows is None else value.index_select(dim, torch.from_numpy(rows))
