"""A PyG graph as it is trained on: checked, with boolean masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.storage import BaseStorage

from lightning_gnn.arguments import shown
from lightning_gnn.data.attributes import (
    SPLITS,
    TO_PREDICT_LINKS,
    GraphData,
    kept_attributes,
    left_out_of,
    with_masks_of_ids,
)

MASKS = ("train_mask", "val_mask", "test_mask")
EDGE_MASKS = tuple(f"edge_{name}" for name in MASKS)


def counted_mask(mask: str, module: object) -> str:
    """Returns the mask whose entries a module's losses and values are means over: that of edges if it ``predicts_edges``."""
    return f"edge_{mask}" if getattr(module, "predicts_edges", False) else mask


def prepare_graph(
    data: Data,
    split: Mapping[str, Any] | None = None,
    fractions: Sequence[float] | None = None,
    split_column: int = 0,
    seed: int = 0,
    masks_needed: bool = True,
    short_ids: bool = False,
) -> Data:
    """Returns a checked copy of `data` with boolean masks ``[N]``, ``x`` floating, ``edge_index`` and class labels int64.

    Args:
        data: the graph.
        split: index split as OGB gives it: ``{"train": ids, "valid": ids, "test": ids}``.
        fractions: of train, validation and test nodes for a random split over the labelled nodes; replaces masks.
        split_column: which column of masks of shape ``[N, splits]``.
        seed: of the random split.
        masks_needed: a graph without masks is an error, and not one to predict on, whose masks are empty.
        short_ids: edges of int32 stay that, where int64 would be a copy in memory of what is not.

    Raises:
        ValueError: says what is missing or wrong, and what to do.
    """
    if data.edge_index is None:
        of_split = [name for name in data.to_dict() if "pos_edge" in name]
        hint = f" Its {of_split[0]} is of a split of edges. {TO_PREDICT_LINKS}." if of_split else ""
        raise ValueError(
            "The graph has no edge_index. If it holds an adjacency `adj_t`, convert it first: "
            f"row, col, _ = data.adj_t.t().coo(); data.edge_index = torch.stack([row, col]).{hint}"
        )
    if data.x is None:
        raise ValueError(
            "The graph has no node features x. Add some before: data.x = torch.randn(data.num_nodes, 128), "
            "or apply torch_geometric.transforms.OneHotDegree."
        )
    for name in ("x", "edge_index", "y", "edge_weight", "edge_attr", *MASKS):
        check_tensor(name, data.get(name))
    given = {name: value for name, value in data.to_dict().items() if value is not None}
    x = features(data.x.cpu())
    num_nodes = x.size(0)
    if given.pop("num_nodes", num_nodes) != num_nodes:
        raise ValueError(
            f"The graph says num_nodes={data.num_nodes}, but x has {num_nodes} rows. Give x one row per node, "
            "zeros where a node has no features."
        )
    edge_index = checked_edges(data.edge_index.cpu(), num_nodes, short_ids)
    replaced = fractions is not None or split is not None
    given, left_out = with_masks_of_ids(given, num_nodes, masks_needed and not replaced)
    kept, kinds, others = kept_attributes(given, num_nodes, edge_index.size(1), data)
    result = GraphData(kinds, {**left_out_of(data), **others, **left_out}, **kept)
    result.x, result.edge_index = x, edge_index
    for name in ("edge_weight", "edge_attr"):
        if result.get(name) is not None:
            result[name] = edge_values(name, result[name], result.edge_index.size(1), result.x.dtype)
    if result.get("edge_train_mask") is not None:
        set_edge_masks(result, result.edge_index.size(1))
        masks_needed = False
    y = None
    if result.get("y") is not None:
        y = result.y = labels(result.y, num_nodes)
    for name, mask in masks_of(result, y, num_nodes, split, fractions, split_column, seed, masks_needed).items():
        result[name] = mask
    return result


def check_tensor(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, Tensor):
        raise ValueError(
            f"{name} must be a tensor (got {type(value).__name__}). Convert it: data.{name} = torch.as_tensor(data.{name})."
        )
    if value is not None and value.layout != torch.strided:
        raise ValueError(f"{name} must be dense (got {value.layout}). Convert it: data.{name} = data.{name}.to_dense().")


def features(x: Tensor) -> Tensor:
    if x.dim() != 2 or x.size(1) == 0:
        hint = " A single feature is a column: data.x = data.x.view(-1, 1)." if x.dim() == 1 else ""
        raise ValueError(f"x must have shape [N, F], one row of features per node (got {list(x.shape)}).{hint}")
    if x.size(0) == 0:
        raise ValueError("The graph has no nodes: x has no rows.")
    if x.is_complex():
        raise ValueError(
            f"x is {_dtype(x)}; features must be real numbers. Split it: data.x = torch.view_as_real(data.x).flatten(1)."
        )
    if not x.is_floating_point():
        return x.float()
    bad = _non_finite_rows(x)
    if len(bad):
        raise ValueError(
            f"x holds NaN or infinite values in {len(bad)} of {x.size(0)} rows, first in row {bad[0]}. "
            "Fill them in: data.x = torch.nan_to_num(data.x, 0.0, 0.0, 0.0), or leave these nodes out."
        )
    return x


def checked_edges(edge_index: Tensor, num_nodes: int, short: bool = False) -> Tensor:
    """Returns ``edge_index`` int64 ``[2, E]``; if it may be `short`, int32 as it is."""
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        hint = " Transpose it: data.edge_index = data.edge_index.t()." if edge_index.shape[1:] == (2,) else ""
        raise ValueError(f"edge_index must have shape [2, E] (got {list(edge_index.shape)}).{hint}")
    if not _is_whole(edge_index):
        raise ValueError(
            f"edge_index must hold integers (got {_dtype(edge_index)}). Convert it: data.edge_index = data.edge_index.long()."
        )
    edge_index = edge_index if short and edge_index.dtype == torch.int32 else edge_index.long()
    low, high = _range(edge_index)
    if low < 0 or high >= num_nodes:
        wrong = ((edge_index < 0) | (edge_index >= num_nodes)).any(0).nonzero().view(-1)
        raise ValueError(
            f"edge_index holds ids from {low} to {high}, but there are {num_nodes} nodes (rows of x): valid ids are 0 to "
            f"{num_nodes - 1}. {len(wrong)} edges are wrong, first column {wrong[0]}. Number the nodes from 0, "
            "or remove these edges."
        )
    return edge_index


def edge_values(name: str, values: Tensor, num_edges: int, dtype: torch.dtype) -> Tensor:
    """Returns weights ``[E]``, floating, or attributes ``[E]`` or ``[E, D]``."""
    if values.dim() == 0 or values.size(0) != num_edges:
        rows = f"{values.size(0)} rows" if values.dim() else "a single value"
        raise ValueError(
            f"{name} has {rows}, but edge_index has {num_edges} columns: one row per edge is needed. Make it again "
            "after the last change of edge_index, such as added self-loops."
        )
    if name == "edge_weight" and values.dim() != 1:
        hint = f"data.{name}.view(-1)" if values.numel() == num_edges else f"data.{name}[:, 0], or call it edge_attr"
        raise ValueError(f"{name} must have shape [E], one weight per edge (got {list(values.shape)}). Try data.{name} = {hint}.")
    if values.is_complex():
        raise ValueError(f"{name} is {_dtype(values)}; it must be real. Split it with torch.view_as_real.")
    if values.is_floating_point():
        bad = _non_finite_rows(values)
        if len(bad):
            raise ValueError(
                f"{name} holds NaN or infinite values for {len(bad)} of {num_edges} edges, first for edge {bad[0]}. "
                f"Fill them in with torch.nan_to_num, or remove these edges."
            )
    return values.to(dtype) if name == "edge_weight" and not values.is_floating_point() else values


def labels(y: Tensor, num_nodes: int) -> Tensor:
    """Returns class labels, ``[N]`` or OGB's ``[N, 1]``, as int64; targets ``[N]`` and ``[N, C]`` of other types as they are."""
    of_classes = y.dim() == 1 or y.shape[1:] == (1,)
    if y.dim() not in (1, 2) or 0 in y.shape[1:]:
        raise ValueError(
            f"y must have shape [N] for classes or [N, C] for targets (got {list(y.shape)}). One row per node is needed."
        )
    if y.size(0) != num_nodes:
        hint = " A label of the whole graph cannot be learned here." if y.size(0) == 1 else ""
        raise ValueError(
            f"y has {y.size(0)} rows, but x has {num_nodes}: node labels are needed, one row per node, "
            f"-1 for nodes without one.{hint}"
        )
    if y.is_complex():
        raise ValueError(f"y is {_dtype(y)}; labels are integers, targets real numbers. Convert it first.")
    if not y.is_floating_point():
        low, _ = _range(y) if y.dtype != torch.bool else (0, 1)
        if low < -1:
            first = (y < -1).view(num_nodes, -1).any(1).nonzero()[0].item()
            raise ValueError(
                f"y holds labels down to {low}, first in row {first}. Labels are numbered from 0, and -1 marks a node without "
                "one: data.y[data.y < 0] = -1."
            )
        return y.long() if of_classes else y
    bad = _non_finite_rows(y)
    if not len(bad):
        return y
    unlabelled = y[bad].isnan()
    if of_classes and unlabelled.all() and torch.equal(y.nan_to_num().trunc(), y.nan_to_num()):
        return labels(torch.where(y.isnan(), -1, y).long(), num_nodes)  # OGB's nodes without a label
    raise ValueError(
        f"y holds NaN or infinite targets in {len(bad)} of {num_nodes} rows, first in row {bad[0]}. NaN marks a node without "
        "a class only where y is [N] and holds whole numbers. Fill these targets in, and leave the rows out of the masks."
    )


def _is_whole(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _range(values: Tensor) -> tuple[int, int]:
    """Returns the smallest and the largest value of an integer tensor; 0 for both if there is none."""
    low, high = values.aminmax() if values.numel() else (0, 0)
    return int(low), int(high)


def _non_finite_rows(values: Tensor) -> Tensor:
    """Returns the rows of a floating tensor that hold NaN or infinite values."""
    # Both show in the smallest and the largest value: one pass at the speed of memory, with nothing of the tensor's size.
    if values.numel() == 0 or torch.stack(values.aminmax()).isfinite().all():
        return torch.empty(0, dtype=torch.long)
    rows = [~part.isfinite().view(len(part), -1).all(1) for part in values.split(65_536)]
    return torch.cat(rows).nonzero().view(-1)


def masks_of(
    data: Data,
    y: Tensor | None,
    num_nodes: int,
    split: Mapping[str, Any] | None,
    fractions: Sequence[float] | None,
    column: int,
    seed: int,
    needed: bool,
) -> dict[str, Tensor]:
    if fractions is not None:
        return _random_masks(y, num_nodes, fractions, seed)
    if split is not None:
        return _masks_of_ids(split, num_nodes)
    masks = {name: _mask(name, data[name], num_nodes, column) for name in MASKS if data.get(name) is not None}
    if "train_mask" not in masks and needed:
        raise ValueError(
            "The graph has no train_mask. Give a random split, GraphDataModule(..., split=(0.6, 0.2, 0.2)), "
            "or set data.train_mask, data.val_mask and data.test_mask (bool, one entry per node). To predict links, split the "
            "edges: GraphDataModule(split_edges(data))."
        )
    return {name: masks.get(name, torch.zeros(num_nodes, dtype=torch.bool)) for name in MASKS}


def set_edge_masks(data: Data | BaseStorage, num_edges: int, complete: bool = True) -> None:
    """Checks the masks of a graph's edges, or of those of a type; if `complete`, those that are not there are empty ones."""
    advice = "split_edges(data) of lightning_gnn makes all three"
    for name in EDGE_MASKS if complete else [name for name in EDGE_MASKS if name in data]:
        mask = data.get(name)
        if mask is None:
            mask = data[name] = torch.zeros(num_edges, dtype=torch.bool)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (num_edges,):
            found = f"{_dtype(mask)} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"{name} must be bool, one entry per edge, [{num_edges}] (got {found}). Make it again after the last change of "
                f"edge_index; {advice}."
            )
    held = torch.stack([data[name] for name in EDGE_MASKS if name in data]).sum(0)
    if (held > 1).any():
        first = int((held > 1).nonzero()[0])
        raise ValueError(
            f"{int((held > 1).sum())} edges are in more than one of {', '.join(EDGE_MASKS)}, first edge {first}: what is tested "
            f"would be learnt. {advice[0].upper()}{advice[1:]}, without overlap."
        )


def _mask(name: str, mask: Tensor, num_nodes: int, column: int) -> Tensor:
    from_ids = f"mask = torch.zeros({num_nodes}, dtype=torch.bool); mask[ids] = True"
    if mask.dim() not in (1, 2):
        raise ValueError(f"{name} must have shape [N] or [N, splits] (got {list(mask.shape)}).")
    if mask.size(0) != num_nodes:
        hint = "" if mask.dtype == torch.bool else f" If it lists node ids, make a mask of them: {from_ids}."
        raise ValueError(f"{name} has {mask.size(0)} entries, but x has {num_nodes} rows: one entry per node is needed.{hint}")
    if mask.dim() == 2:
        if not 0 <= column < mask.size(1):
            raise ValueError(f"split_column={column}, but {name} has {mask.size(1)} columns: choose 0 to {mask.size(1) - 1}.")
        mask = mask[:, column]
    if mask.dtype != torch.bool:
        if not _is_whole(mask):
            raise ValueError(f"{name} must be bool (got {_dtype(mask)}). Convert it: data.{name} = data.{name} > 0.")
        low, high = _range(mask)
        if low < 0 or high > 1:
            raise ValueError(
                f"{name} must be bool or hold 0 and 1 (got values from {low} to {high}). If it lists node ids, "
                f"make a mask of them: {from_ids}."
            )
    return mask.bool()


def _masks_of_ids(split: Mapping[str, Any], num_nodes: int) -> dict[str, Tensor]:
    if not isinstance(split, Mapping):
        raise ValueError(
            f'The index split must be a dict, {{"train": ids, "valid": ids, "test": ids}} (got {type(split).__name__}).'
        )
    unknown = sorted(map(str, set(split) - set(SPLITS)))
    if unknown:
        raise ValueError(f"The index split has keys {unknown}; known are {sorted(SPLITS)}. Rename or remove them.")
    if "train" not in split:
        raise ValueError(f"The index split has no 'train' (got {sorted(split)}). Add the ids of the training nodes.")
    masks = {name: torch.zeros(num_nodes, dtype=torch.bool) for name in MASKS}
    for key, given in split.items():
        where = f"The index split's {key!r}"
        try:
            ids = torch.as_tensor(given).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{where} must be a list of node ids ({error}).") from error
        if ids.dim() != 1 or (len(ids) and not _is_whole(ids)):
            raise ValueError(
                f"{where} must hold integer node ids, shape [n] (got {_dtype(ids)}, {list(ids.shape)}). "
                "Ids of a mask are mask.nonzero().view(-1)."
            )
        ids = ids.long()
        low, high = _range(ids)
        if low < 0 or high >= num_nodes:
            raise ValueError(
                f"{where} holds node ids from {low} to {high}, but there are {num_nodes} nodes: 0 to {num_nodes - 1}. "
                "Is it the split of another graph?"
            )
        mask = torch.zeros(num_nodes, dtype=torch.bool).index_fill_(0, ids, True)
        if int(mask.sum()) != len(ids):
            first = int(ids.bincount().gt(1).nonzero()[0])
            raise ValueError(
                f"{where} lists {len(ids) - int(mask.sum())} node ids more than once, first id {first}. "
                "Give each once: ids.unique()."
            )
        masks[SPLITS[key]] |= mask
    return masks


def checked_fractions(fractions: Any) -> tuple[float, float, float]:
    """Returns the fractions of training, validation and test nodes."""
    given = tuple(fractions) if isinstance(fractions, Sequence) else (fractions,)
    numbers = [float(value) for value in given if isinstance(value, Real) and not isinstance(value, bool)]
    if len(given) != 3 or len(numbers) != 3 or not min(numbers) >= 0 or not 0 < sum(numbers) <= 1 + 1e-9:
        raise ValueError(f"split needs three fractions that sum to at most 1, such as (0.6, 0.2, 0.2) (got {shown(fractions)}).")
    return numbers[0], numbers[1], numbers[2]


def _random_masks(y: Tensor | None, num_nodes: int, fractions: Sequence[float], seed: int) -> dict[str, Tensor]:
    labelled = torch.ones(num_nodes, dtype=torch.bool) if y is None else is_labelled(y)
    ids = labelled.nonzero().view(-1)
    ids = ids[torch.from_numpy(np.random.default_rng(seed).permutation(len(ids)))]
    ends = [round(len(ids) * share) for share in np.cumsum([0.0, *checked_fractions(fractions)])]
    none = torch.zeros(num_nodes, dtype=torch.bool)
    return {name: none.index_fill(0, ids[low:high], True) for name, (low, high) in zip(MASKS, pairwise(ends))}


def num_labelled(y: Tensor | None, mask: Tensor) -> int:
    """Returns how many rows of `mask` count in a mean loss: those with a label; -1 marks a node without one."""
    return int(mask.sum() if y is None else (mask & is_labelled(y)).sum())


def class_labels(y: Tensor) -> Tensor | None:
    """Returns integer labels, ``[N]`` or ``[N, 1]``, as ``[N]``, sharing memory; None for targets of other kinds."""
    if y.is_floating_point() or not (y.dim() == 1 or y.shape[1:] == (1,)):
        return None
    return y.view(-1)


def is_labelled(y: Tensor) -> Tensor:
    """Returns which rows have a label, bool ``[N]``: -1 marks a node without one."""
    classes = class_labels(y)
    return torch.ones(y.size(0), dtype=torch.bool, device=y.device) if classes is None else classes >= 0


def num_classes(y: Tensor | None) -> int:
    """Returns the number of classes of integer labels ``[N]`` or ``[N, 1]``, or of columns of targets ``[N, C]``; else 0."""
    if y is None or y.numel() == 0:
        return 0
    classes = class_labels(y)
    return int(classes.max()) + 1 if classes is not None else y.size(1) if y.dim() == 2 else 0
