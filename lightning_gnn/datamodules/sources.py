"""From whatever describes a graph to one checked PyG ``Data``, and to a key that tells whether it has changed."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, Dataset

Source: TypeAlias = str | Dataset | Data | Callable[..., Any]
"""A PyG dataset, a ``Data``, a callable that returns either, or the dotted path of one."""

MASKS = ("train_mask", "val_mask", "test_mask")
_INDEX_SPLIT = {"train": "train_mask", "valid": "val_mask", "val": "val_mask", "test": "test_mask"}


def load_source(source: Source, args: Mapping[str, Any] | None = None) -> tuple[Data, Mapping[str, Any] | None]:
    """Returns the graph of `source` and its index split, if it has one.

    Args:
        source: see :data:`Source`.
        args: keyword arguments of a callable or a dotted path.

    Raises:
        ValueError: the path cannot be imported, or the result is not a single PyG graph.
    """
    described = _describe(source)
    if isinstance(source, str):
        module, _, name = source.rpartition(".")
        try:
            source = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"source={source!r} cannot be imported ({error}). Give the dotted path of a class or function, "
                "such as 'torch_geometric.datasets.Planetoid'."
            ) from error
    loaded: Any = source
    if callable(source) and not isinstance(source, (Data, Dataset)):
        loaded = source(**(args or {}))
    elif args:
        raise ValueError(f"source_args={dict(args)} needs a callable or a dotted path as source (got {described}).")
    if isinstance(loaded, Data):
        return loaded, None
    if hasattr(loaded, "__len__") and len(loaded) != 1:
        raise ValueError(
            f"{described} holds {len(loaded)} graphs; GraphDataModule trains on one large graph. "
            "Pick one: GraphDataModule(dataset[0])."
        )
    split = loaded.get_idx_split() if hasattr(loaded, "get_idx_split") else None
    data = loaded[0]
    if not isinstance(data, Data):
        raise ValueError(
            f"{described} gives a {type(data).__name__}; GraphDataModule takes homogeneous graphs "
            "(torch_geometric.data.Data). For a HeteroData, try `.to_homogeneous()`."
        )
    return data, split


def _describe(source: Source) -> str:
    if isinstance(source, str):
        return source
    return getattr(source, "__qualname__", None) or type(source).__name__


def prepare_graph(
    data: Data,
    split: Mapping[str, Any] | None = None,
    fractions: Sequence[float] | None = None,
    split_column: int = 0,
    seed: int = 0,
) -> Data:
    """Returns a checked copy of `data` with boolean masks ``[N]``, ``x`` floating and ``edge_index`` int64.

    Args:
        data: the graph.
        split: index split as OGB gives it: ``{"train": ids, "valid": ids, "test": ids}``.
        fractions: of train, validation and test nodes for a random split over the labelled nodes; replaces masks.
        split_column: which column of masks of shape ``[N, splits]``.
        seed: of the random split.

    Raises:
        ValueError: says what is missing or wrong, and what to do.
    """
    edge_index = data.edge_index
    if edge_index is None:
        raise ValueError(
            "The graph has no edge_index. If it holds an adjacency `adj_t`, convert it first: "
            "row, col, _ = data.adj_t.t().coo(); data.edge_index = torch.stack([row, col])."
        )
    if data.x is None:
        raise ValueError(
            "The graph has no node features x. Add some before: data.x = torch.randn(data.num_nodes, 128), "
            "or apply torch_geometric.transforms.OneHotDegree."
        )
    num_nodes = data.x.size(0)
    if num_nodes == 0:
        raise ValueError("The graph has no nodes.")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(f"edge_index must have shape [2, E] (got {list(edge_index.shape)}).")
    if edge_index.numel() and (int(edge_index.min()) < 0 or int(edge_index.max()) >= num_nodes):
        raise ValueError(
            f"edge_index holds ids from {int(edge_index.min())} to {int(edge_index.max())}, but there are {num_nodes} nodes "
            f"(rows of x): valid ids are 0 to {num_nodes - 1}."
        )
    kept = {key: value for key, value in data.to_dict().items() if isinstance(value, (Tensor, int, float))}
    kept.pop("num_nodes", None)  # the rows of x say it, on every rank its own
    result = Data(**kept)
    result.edge_index = edge_index.long()
    if not torch.is_floating_point(data.x):
        result.x = data.x.float()
    if data.y is not None:
        y = data.y
        if y.dim() == 2 and y.size(1) == 1:  # OGB's [N, 1]
            y = y.view(-1)
        if y.size(0) != num_nodes:
            raise ValueError(
                f"y has {y.size(0)} rows, but x has {num_nodes}: node labels are needed, one row per node."
            )
        if y.is_floating_point() and y.dim() == 1 and y.isnan().any():  # OGB's unlabelled nodes
            y = torch.where(y.isnan(), -1, y).long()
        result.y = y
    for name, mask in _masks(data, result.get("y"), num_nodes, split, fractions, split_column, seed).items():
        result[name] = mask
    return result


def _masks(
    data: Data,
    y: Tensor | None,
    num_nodes: int,
    split: Mapping[str, Any] | None,
    fractions: Sequence[float] | None,
    column: int,
    seed: int,
) -> dict[str, Tensor]:
    if fractions is not None:
        return _random_masks(y, num_nodes, fractions, seed)
    if split is not None:
        unknown = sorted(set(split) - set(_INDEX_SPLIT))
        if unknown:
            raise ValueError(f"The index split has keys {unknown}; known are {sorted(_INDEX_SPLIT)}.")
        masks = {name: torch.zeros(num_nodes, dtype=torch.bool) for name in MASKS}
        for key, ids in split.items():
            masks[_INDEX_SPLIT[key]][torch.as_tensor(ids)] = True
        return masks
    masks = {}
    for name in MASKS:
        mask = data.get(name)
        if mask is None:
            continue
        if mask.dim() == 2:
            if not 0 <= column < mask.size(1):
                raise ValueError(f"split_column={column}, but {name} has {mask.size(1)} columns.")
            mask = mask[:, column]
        if mask.size(0) != num_nodes:
            raise ValueError(f"{name} has {mask.size(0)} entries, but x has {num_nodes} rows.")
        masks[name] = mask.bool()
    if "train_mask" not in masks:
        raise ValueError(
            "The graph has no train_mask. Give a random split, GraphDataModule(..., split=(0.6, 0.2, 0.2)), "
            "or set data.train_mask, data.val_mask and data.test_mask (bool, one entry per node)."
        )
    return {name: masks.get(name, torch.zeros(num_nodes, dtype=torch.bool)) for name in MASKS}


def _random_masks(y: Tensor | None, num_nodes: int, fractions: Sequence[float], seed: int) -> dict[str, Tensor]:
    if len(fractions) != 3 or min(fractions) < 0 or not 0 < sum(fractions) <= 1 + 1e-9:
        raise ValueError(
            f"split needs three fractions that sum to at most 1, such as (0.6, 0.2, 0.2) (got {fractions})."
        )
    labelled = torch.ones(num_nodes, dtype=torch.bool) if y is None or y.dim() > 1 else y >= 0
    ids = labelled.nonzero().view(-1)
    ids = ids[torch.from_numpy(np.random.default_rng(seed).permutation(len(ids)))]
    ends = [round(len(ids) * share) for share in np.cumsum([0.0, *fractions])]
    masks = {}
    for name, low, high in zip(MASKS, ends[:-1], ends[1:]):
        masks[name] = torch.zeros(num_nodes, dtype=torch.bool)
        masks[name][ids[low:high]] = True
    return masks


def num_labelled(y: Tensor | None, mask: Tensor) -> int:
    """Returns how many rows of `mask` count in a mean loss: those with a label; -1 marks a node without one."""
    return int(mask.sum() if y is None else (mask & is_labelled(y)).sum())


def is_labelled(y: Tensor) -> Tensor:
    """Returns which rows have a label, bool ``[N]``: -1 marks a node without one."""
    if y.is_floating_point() or y.dim() != 1:
        return torch.ones(y.size(0), dtype=torch.bool, device=y.device)
    return y >= 0


def num_classes(y: Tensor | None) -> int:
    """Returns the number of classes of integer labels ``[N]``, or of columns of multi-label targets ``[N, C]``; else 0."""
    if y is None or y.numel() == 0:
        return 0
    if y.dim() == 2:
        return y.size(1)
    return 0 if y.is_floating_point() else int(y.max()) + 1


def graph_key(data: Data) -> str:
    """Returns a digest of every tensor of the graph: another graph has another key."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(data.to_dict().items()):
        if isinstance(value, Tensor):
            array = value.detach().cpu().contiguous()
            digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
            digest.update(array.view(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(f"{name} {value!r}".encode())
    return digest.hexdigest()


def description_key(source: str, args: Mapping[str, Any] | None, split: Any) -> str | None:
    """Returns a digest of a source given by its path, of the file that defines it and of the files that its arguments name.

    It stands for the graph without loading it. Files are told apart by name, size and time of change. None if the
    arguments are no JSON.
    """
    try:
        described = json.dumps([source, dict(args or {}), split], sort_keys=True)
    except TypeError:
        return None
    digest = hashlib.blake2b(described.encode(), digest_size=16)
    named = [value for value in (args or {}).values() if isinstance(value, str)]
    try:
        code = importlib.util.find_spec(source.rpartition(".")[0])
    except (ImportError, ValueError):
        return None  # load_source says what is wrong with it
    for path in map(Path, [*named, *([code.origin] if code is not None and code.origin else [])]):
        for file in sorted([path, *path.rglob("*")]) if path.exists() else []:
            if file.is_file():
                stat = file.stat()
                digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()
