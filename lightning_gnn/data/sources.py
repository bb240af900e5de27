"""Validation of PyG graphs for training, and conversion of masks to boolean tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.storage import BaseStorage
from typing_extensions import override

from lightning_gnn.arguments import quote

Kind = Literal["node", "edge", "graph"]

SPLITS = {"train": "train_mask", "val": "val_mask", "valid": "val_mask", "validation": "val_mask", "test": "test_mask"}
"""Mask by name of a split part."""

OF_BATCHES = ("n_id", "e_id", "num_owned", "batch_size")
"""Names of attributes that batches set themselves."""

_NO_SEEDS = (
    "a full-graph batch does not begin with seed nodes, so out[:batch.batch_size] would be nodes of all masks. Use "
    "out[batch.train_mask], which is also correct in mini-batches, where masks select seed nodes only. Remove batch_size from "
    "self.log, whose values are weighted by the nodes of the stage's mask"
)


class LeftOutError(ValueError, AttributeError):
    """Error for an attribute of the user's graph that no batch can have: gives the reason and an alternative."""


class GraphData(Data):
    """PyG ``Data`` with the kind of each attribute, and with reasons for missing attributes of the user's graph.

    Args:
        kinds: kind of each attribute by name.
        left_out: reasons of missing attributes by name.
        **values: attributes.
    """

    def __init__(self, kinds: Mapping[str, Kind] | None = None, left_out: Mapping[str, str] | None = None, **values: Any) -> None:
        super().__init__()
        # Not as attributes, whose names belong to the user.
        self.__dict__.update(_kinds=dict(kinds or {}), _left_out=dict(left_out or {}))
        for name, value in values.items():
            self[name] = value

    @override
    def __getattr__(self, key: str) -> Any:
        self._check(key)
        return super().__getattr__(key)

    @override
    def __getitem__(self, key: str) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def _check(self, key: str) -> None:
        reason = self.__dict__.get("_left_out", {}).get(key)
        if reason is not None and key not in self.__dict__["_store"]:
            raise LeftOutError(f"The batch has no {key}: {reason}.")


def left_out_of(data: Data) -> dict[str, str]:
    """Returns the attributes that a prepared graph lacks, with reasons."""
    return dict(data.__dict__.get("_left_out", {}))


def full_graph_left_out(left_out: Mapping[str, str]) -> dict[str, str]:
    """Returns the attributes that a full-graph batch lacks, with reasons: also the number of seed nodes."""
    return {**left_out, "batch_size": _NO_SEEDS}


def kinds_of(data: Data) -> dict[str, Kind]:
    """Returns the kind of each tensor of a graph with features, except its edges."""
    tensors = {name: value for name, value in data.to_dict().items() if isinstance(value, Tensor) and name != "edge_index"}
    known = data.__dict__.get("_kinds", {})
    num_nodes, num_edges = data.x.size(0), data.edge_index.size(1)
    return {name: known.get(name) or kind_by_rows(name, value, num_nodes, num_edges) for name, value in tensors.items()}


_OF_NODES = re.compile(r"x|y|z|pos|batch|[xy]_.*|.*(node|n_id).*|.+_mask")
"""Names of node attributes, unless they contain "edge": PyG's own, and names that contain "node"."""


def tell_kinds(data: Data, kind: Kind, names: Iterable[str]) -> None:
    """Record the kind of attributes of a graph, if its source defines it and the number of rows may not."""
    data.__dict__.setdefault("_kinds", {}).update(dict.fromkeys(names, kind))


def check_kinds(ambiguous: Sequence[str], num_nodes: int) -> None:
    """Raises ValueError for attributes that may belong to nodes or edges, in a graph with as many nodes as edges."""
    if ambiguous:
        first = ambiguous[0]
        raise ValueError(
            f"{', '.join(ambiguous)}: {num_nodes} rows, and the graph has as many nodes as edges, so these may belong to nodes "
            f"or edges. A rank has the rows of its nodes, or of its edges. Rename them: data.node_{first} = data.{first}, or "
            f"data.edge_{first} = data.{first}, and del data.{first}."
        )


def kind_by_rows(name: str, value: Tensor, num_nodes: int | None, num_edges: int | None) -> Kind:
    """Returns the kind of a tensor by its number of rows; with as many nodes as edges, by name."""
    rows = value.size(0) if value.dim() else None
    if rows is None or rows not in (num_nodes, num_edges):
        return "graph"
    if num_nodes == num_edges:
        return "edge" if "edge" in name or name == "e_id" else "node"
    return "node" if rows == num_nodes else "edge"


def why_left_out(name: str, value: Any, num_nodes: int | None, num_edges: int | None) -> str | None:
    """Returns the reason why a prepared graph lacks an attribute; None if it has the attribute.

    Args:
        name: name of the attribute.
        value: value of the attribute.
        num_nodes, num_edges: numbers of nodes and edges of the graph; for a type, None for the other kind.
    """
    if isinstance(value, (str, int, float, np.generic)):
        return _NO_SEEDS if name == "batch_size" else None
    if isinstance(value, np.ndarray):
        return f"it is a numpy array, and only tensors are partitioned. Set data.{name} = torch.from_numpy(data.{name})"
    if not isinstance(value, Tensor):
        return (
            f"it is a {type(value).__name__}, and only tensors, numbers and strings are kept. Store it in your module, and "
            "select the entries of a batch by batch.n_id and batch.e_id, which are ids in the whole graph"
        )
    if value.layout != torch.strided:
        return "it is a sparse matrix over all nodes. Use batch.edge_index, with edge_weight or edge_attr for values"
    if name == "ptr":
        return "it has the first node of each of several graphs, and a batch is one graph"
    if _holds_ids(name, value):
        rows = value.size(0) if value.dim() else -1
        if rows in (num_nodes, num_edges) and torch.equal(value.cpu(), torch.arange(rows, dtype=value.dtype)):
            return None  # ids that equal the positions
        return _ids_left_out(name, value)
    if re.match(r"(pos_|neg_)?edge_label", name) and value.dim() and value.size(0) != num_edges:
        return f"it has values of node pairs, and a batch has no pairs. {TO_PREDICT_LINKS}"
    return None


def _holds_ids(name: str, value: Tensor) -> bool:
    """Returns whether a tensor has a name of ids of nodes or edges, with PyG's naming rules."""
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        return False
    return "index" in name or name == "face" or re.search(r"(^|_)(idx|indices)(_|\d*$)", name) is not None


TO_PREDICT_LINKS = (
    "To predict links, split the edges of the graph, GraphDataModule(split_edges(data)) of lightning_gnn, and use "
    "LinkPredictor (docs/links.md)"
)


def _ids_left_out(name: str, value: Tensor) -> str:
    holds = "it holds ids of the whole graph, which a batch would read as its own rows"
    stem = re.sub(r"_?(edge_)?(index|idx|indices)$", "", name) or name
    fetched = f"for gather_nodes(x, ids), rename it to {stem}_n_id: names that end in n_id hold ids of the whole graph"
    if "label" in name and "edge" in name:
        return f"{holds}. {TO_PREDICT_LINKS}; or {fetched}"
    if value.dim() == 2 and value.size(0) == 2:
        return (
            f"{holds}. Put all edges into data.edge_index, with an attribute such as data.edge_kind that distinguishes them, and "
            f"use batch.edge_index[:, batch.edge_kind == 0]. {TO_PREDICT_LINKS}; or {fetched}"
        )
    if "edge" in name:
        return f"{holds}. Make a mask of them, one entry per edge: data.{stem}_mask[data.{name}] = True"
    return f"{holds}. Make a mask of them, one entry per node: data.{stem}_mask[data.{name}] = True; or {fetched}"


def looks_like_ids(name: str, value: Tensor, limit: int) -> bool:
    """Returns whether a graph-level tensor may contain ids: integers in the range of ids."""
    if value.numel() < 2 or value.is_floating_point() or value.is_complex() or value.dtype in (torch.bool, torch.uint8):
        return False
    if re.search(r"(^|_)[ne]_id$", name):
        return False
    low, high = value.aminmax()
    return int(low) >= 0 and int(high) < limit


def kept_attributes(
    attributes: Mapping[str, Any], num_nodes: int, num_edges: int, data: object
) -> tuple[dict[str, Any], dict[str, Kind], dict[str, str]]:
    """Returns the kept attributes of a graph on the CPU, the kinds of its tensors, and reasons for the other attributes.

    Warns about omitted and ambiguous attributes, unless `data` was prepared before. Raises ValueError for attributes that may
    belong to nodes or edges.
    """
    kept: dict[str, Any] = {}
    known_kinds = data.__dict__.get("_kinds", {})
    kinds: dict[str, Kind] = dict(known_kinds) if isinstance(data, GraphData) else {}
    left_out: dict[str, str] = {}
    warnings, ambiguous = [], []
    for name, value in attributes.items():
        if name in OF_BATCHES and isinstance(value, Tensor):
            warnings.append(f"{name} is reserved for the ids that batches set: rename the attribute to keep it")
            continue
        is_known = name in kinds or name == "edge_index"
        reason = None if is_known else why_left_out(name, value, num_nodes, num_edges)
        if reason is not None:
            left_out[name] = reason
            continue
        kept[name] = value.item() if isinstance(value, np.generic) else value
        if not isinstance(value, Tensor) or name == "edge_index":
            continue
        check_storable(name, value)
        kept[name] = value.detach().cpu()
        if name in kinds:
            continue
        kind = kinds[name] = kind_by_rows(name, value, num_nodes, num_edges)
        if kind == "graph" and looks_like_ids(name, kept[name], max(num_nodes, num_edges)):
            warnings.append(
                f"{name} {list(value.shape)} does not have one row per node or edge, so every rank has all of it. If it holds "
                "ids of nodes or edges, these are ids in the whole graph, not rows of a batch (docs/models.md)"
            )
        elif num_nodes == num_edges and kind != "graph" and name in known_kinds:
            kinds[name] = known_kinds[name]
        elif num_nodes == num_edges and kind == "node" and not _OF_NODES.fullmatch(name):
            ambiguous.append(name)
    check_kinds(ambiguous, num_nodes)
    if not isinstance(data, GraphData):
        for text in warnings:
            rank_zero_warn(f"{text}.")
        warn_of_left_out(left_out, "the graph")
    return kept, kinds, left_out


def warn_of_left_out(left_out: Mapping[str, str], of: str) -> None:
    """Warn about attributes of a graph or a type that batches lack; `left_out` has the reasons by name."""
    if left_out:
        name, reason = next(iter(left_out.items()))
        rank_zero_warn(f"Batches do not have {', '.join(left_out)} of {of}. Reason for {name}: {reason}.")


def check_storable(name: str, value: Tensor) -> None:
    """Raises ValueError for a tensor that the files of a partitioned graph cannot store."""
    if re.fullmatch(r"[\w .+-]+", name) is None or len(name.encode()) > 100:  # no path, no control characters
        raise ValueError(
            f"The graph has an attribute {name!r}, and files are named after attributes. Rename it: at most 100 letters, "
            "digits, spaces, '_', '-', '+' and '.'."
        )
    try:
        torch.empty(0, dtype=value.dtype).numpy()
    except TypeError as error:
        raise ValueError(
            f"{name} is {str(value.dtype).removeprefix('torch.')}, which the files of a partitioned graph cannot hold. "
            f"Convert it: data.{name} = data.{name}.float()."
        ) from error


# Index splits #################################################################

_ID = r"(?:idx|index|indices|ids?|nodes?)"
_PART = f"({'|'.join(SPLITS)})"
_SPLIT_NAME = re.compile(f"{_PART}_{_ID}|{_ID}_{_PART}")
_LABELS_NAME = re.compile(f"{_PART}_(?:y|labels?)")


def split_ids(name: str, value: Any) -> dict[str, Any]:
    """Returns the id lists, by split part, of an attribute with the name of a split, or of a dict of parts; else empty."""
    if isinstance(value, Mapping):
        return dict(value) if "train" in value and all(part in SPLITS for part in value) else {}
    found = _SPLIT_NAME.fullmatch(name)
    return {found[1] or found[2]: value} if found is not None else {}


def split_labels(name: str) -> str | None:
    """Returns the split part of an attribute with a name of labels, such as ``train_y``; else None."""
    found = _LABELS_NAME.fullmatch(name)
    return found and found[1]


def mask_of_ids(ids: Any, num_nodes: int) -> Tensor | None:
    """Returns the mask, bool ``[N]``, of a list of node ids; None unless `ids` is certainly such a list."""
    try:
        found = torch.as_tensor(ids).cpu()
    except (TypeError, ValueError, RuntimeError):
        return None
    if found.dtype == torch.bool:
        return found if found.shape == (num_nodes,) else None
    if found.is_floating_point() or found.is_complex() or found.dim() != 1 or len(found) == num_nodes:
        return None  # one entry per node is not a list of some nodes
    if len(found) and (int(found.min()) < 0 or int(found.max()) >= num_nodes):
        return None
    mask = torch.zeros(num_nodes, dtype=torch.bool).index_fill_(0, found.long(), True)
    return mask if int(mask.sum()) == len(found) else None


def with_masks_of_ids(attributes: Mapping[str, Any], num_nodes: int, needed: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the attributes of a graph with masks, bool ``[N]``, in place of index splits, and reasons for the removal.

    ``train_idx`` and similar attributes, or a dict of them, replace missing masks; ``train_y`` replaces a missing y.

    Args:
        attributes: of a graph or a type, by name.
        num_nodes: number of nodes of the graph or the type.
        needed: whether an unreadable split is an error if there are no masks.
    """
    rest = dict(attributes)
    left_out: dict[str, str] = {}
    for name in ("valid_mask", "validation_mask"):
        if name in rest and "val_mask" not in rest:
            rest["val_mask"] = rest.pop(name)
            left_out[name] = "it is batch.val_mask"
    labeled = "y" in attributes or any(split_labels(name) for name in attributes)
    masks: dict[str, Tensor] = {}
    lists: dict[str, Tensor] = {}
    for name, value in attributes.items():
        parts = split_ids(name, value)
        found = {part: mask_of_ids(ids, num_nodes) if labeled else None for part, ids in parts.items()}
        if not parts:
            continue
        del rest[name]
        if any(mask is None for mask in found.values()):
            left_out[name] = (
                f"it is named as a part of a split, but it is not a list of distinct ids of some of the {num_nodes} nodes of a "
                "graph with labels y. Set masks: data.train_mask, data.val_mask and data.test_mask (bool, one entry per node)"
            )
            if needed and "train_mask" not in attributes:
                raise ValueError(f"{name} cannot be read: {left_out[name]}.")
            continue
        lists.update({part: torch.as_tensor(ids).cpu() for part, ids in parts.items()})
        for part, mask in found.items():
            assert mask is not None
            masks[SPLITS[part]] = masks[SPLITS[part]] | mask if SPLITS[part] in masks else mask
        names = " and ".join(dict.fromkeys(SPLITS[part] for part in parts))
        left_out[name] = f"the batch has {names} instead, over its own rows: out[batch.{SPLITS[next(iter(parts))]}]"
    labels_of = {name: found_part for name in attributes if (found_part := split_labels(name)) and found_part in lists}
    for name, of_part in labels_of.items():
        value, ids = rest[name], lists[of_part]
        if ids.dtype == torch.bool or not isinstance(value, Tensor) or value.shape[:1] != ids.shape:
            continue
        del rest[name]
        if "y" not in attributes:
            unknown = float("nan") if value.is_floating_point() else -1
            rest.setdefault("y", value.new_full((num_nodes, *value.shape[1:]), unknown))[ids] = value
        left_out[name] = f"labels of all parts of the split are in y: batch.y[batch.{SPLITS[of_part]}]"
    return {**masks, **rest}, left_out


MASKS = ("train_mask", "val_mask", "test_mask")
EDGE_MASKS = tuple(f"edge_{name}" for name in MASKS)


def counted_mask(mask: str, module: object) -> str:
    """Returns the mask over which a module's losses and metrics are means: the edge mask if it ``predicts_edges``."""
    return f"edge_{mask}" if getattr(module, "predicts_edges", False) else mask


def prepare_graph(
    data: Data,
    split: Mapping[str, Any] | None = None,
    fractions: Sequence[float] | None = None,
    split_index: int = 0,
    seed: int = 0,
    masks_needed: bool = True,
    short_ids: bool = False,
    features_needed: bool = True,
) -> Data:
    """Returns a checked copy of `data` with boolean masks ``[N]``, ``x`` floating, ``edge_index`` and class labels int64.

    Args:
        data: graph.
        split: index split in OGB's form: ``{"train": ids, "valid": ids, "test": ids}``.
        fractions: fractions of training, validation and test nodes for a random split over the labeled nodes; replaces masks.
        split_index: column of masks of shape ``[N, splits]``.
        seed: seed of the random split.
        masks_needed: whether a graph without masks is an error; else its masks are empty, for prediction.
        short_ids: whether int32 edges stay int32, to avoid a copy of memory-mapped edges.
        features_needed: whether a graph without x is an error; else x is ``[N, 0]``.

    Raises:
        ValueError: the graph is incomplete or invalid; the message names the fix.
    """
    if data.edge_index is None:
        of_split = [name for name in data.to_dict() if "pos_edge" in name]
        hint = f" Its {of_split[0]} is from a split of edges. {TO_PREDICT_LINKS}." if of_split else ""
        raise ValueError(
            "The graph has no edge_index. If it holds an adjacency `adj_t`, convert it first: "
            f"row, col, _ = data.adj_t.t().coo(); data.edge_index = torch.stack([row, col]).{hint}"
        )
    if data.x is None and features_needed:
        raise ValueError(
            "The graph has no node features x. Add them: data.x = torch.randn(data.num_nodes, 128), "
            "or apply torch_geometric.transforms.OneHotDegree."
        )
    for name in ("x", "edge_index", "y", "edge_weight", "edge_attr", *MASKS):
        check_tensor(name, data.get(name))
    given = {name: value for name, value in data.to_dict().items() if value is not None}
    x = torch.empty(data.num_nodes or 0, 0) if data.x is None else features(data.x.cpu())
    num_nodes = x.size(0)
    if given.pop("num_nodes", num_nodes) != num_nodes:
        raise ValueError(
            f"The graph has num_nodes={data.num_nodes}, but x has {num_nodes} rows. Set one row of x per node, "
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
    for name, mask in masks_of(result, y, num_nodes, split, fractions, split_index, seed, masks_needed).items():
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
            "Fill them in: data.x = torch.nan_to_num(data.x, 0.0, 0.0, 0.0), or remove these nodes."
        )
    return x


def checked_edges(edge_index: Tensor, num_nodes: int, short: bool = False) -> Tensor:
    """Returns ``edge_index`` int64 ``[2, E]``; with `short`, int32 edges unchanged."""
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
    """Returns edge weights ``[E]``, floating point, or attributes ``[E]`` or ``[E, D]``."""
    if values.dim() == 0 or values.size(0) != num_edges:
        rows = f"{values.size(0)} rows" if values.dim() else "a single value"
        raise ValueError(
            f"{name} has {rows}, but edge_index has {num_edges} columns: one row per edge is needed. Compute it "
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
    """Returns class labels, ``[N]`` or OGB's ``[N, 1]``, as int64; other targets ``[N]`` and ``[N, C]`` unchanged."""
    of_classes = y.dim() == 1 or y.shape[1:] == (1,)
    if y.dim() not in (1, 2) or 0 in y.shape[1:]:
        raise ValueError(
            f"y must have shape [N] for classes or [N, C] for targets (got {list(y.shape)}). One row per node is needed."
        )
    if y.size(0) != num_nodes:
        hint = " Labels of whole graphs are not supported." if y.size(0) == 1 else ""
        raise ValueError(
            f"y has {y.size(0)} rows, but x has {num_nodes}: node labels are needed, one row per node, "
            f"-1 for unlabeled nodes.{hint}"
        )
    if y.is_complex():
        raise ValueError(f"y is {_dtype(y)}; labels must be integers, and targets real numbers. Convert it first.")
    if not y.is_floating_point():
        low, _ = _range(y) if y.dtype != torch.bool else (0, 1)
        if low < -1:
            first = (y < -1).view(num_nodes, -1).any(1).nonzero()[0].item()
            raise ValueError(
                f"y holds labels down to {low}, first in row {first}. Labels start at 0, and -1 marks an unlabeled "
                "node: data.y[data.y < 0] = -1."
            )
        return y.long() if of_classes else y
    bad = _non_finite_rows(y)
    if not len(bad):
        return y
    unlabeled = y[bad].isnan()
    if of_classes and unlabeled.all() and torch.equal(y.nan_to_num().trunc(), y.nan_to_num()):
        return labels(torch.where(y.isnan(), -1, y).long(), num_nodes)  # OGB's unlabeled nodes
    raise ValueError(
        f"y holds NaN or infinite targets in {len(bad)} of {num_nodes} rows, first in row {bad[0]}. NaN marks an unlabeled "
        "node only if y is [N] and all else is whole numbers. Replace these targets, and exclude the rows from the masks."
    )


def _is_whole(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _range(values: Tensor) -> tuple[int, int]:
    """Returns the minimum and maximum of an integer tensor; 0 for both if it is empty."""
    low, high = values.aminmax() if values.numel() else (0, 0)
    return int(low), int(high)


def _non_finite_rows(values: Tensor) -> Tensor:
    """Returns the rows of a floating-point tensor with NaN or infinite values."""
    # Both appear in the minimum or maximum: one pass at memory bandwidth, without temporary tensors of this size.
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
            "The graph has no train_mask. Use a random split, GraphDataModule(..., split=(0.6, 0.2, 0.2)), "
            "or set data.train_mask, data.val_mask and data.test_mask (bool, one entry per node). To predict links, split the "
            "edges: GraphDataModule(split_edges(data))."
        )
    return {name: masks.get(name, torch.zeros(num_nodes, dtype=torch.bool)) for name in MASKS}


def set_edge_masks(data: Data | BaseStorage, num_edges: int, complete: bool = True) -> None:
    """Check the edge masks of a graph, or of an edge type; with `complete`, add missing masks, which are all False."""
    advice = "split_edges(data) of lightning_gnn creates all three"
    for name in EDGE_MASKS if complete else [name for name in EDGE_MASKS if name in data]:
        mask = data.get(name)
        if mask is None:
            mask = data[name] = torch.zeros(num_edges, dtype=torch.bool)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (num_edges,):
            found = f"{_dtype(mask)} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"{name} must be bool, one entry per edge, [{num_edges}] (got {found}). Compute it after the last change of "
                f"edge_index; {advice}."
            )
    held = torch.stack([data[name] for name in EDGE_MASKS if name in data]).sum(0)
    if (held > 1).any():
        first = int((held > 1).nonzero()[0])
        raise ValueError(
            f"{int((held > 1).sum())} edges are in more than one of {', '.join(EDGE_MASKS)}, first edge {first}, so test edges "
            f"would be used for training. Remove the overlap; {advice}."
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
            raise ValueError(f"split_index={column}, but {name} has {mask.size(1)} columns: choose 0 to {mask.size(1) - 1}.")
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
        raise ValueError(f"The index split must have keys in {sorted(SPLITS)}, got {unknown}. Rename or remove these keys.")
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
                "Remove duplicates: ids.unique()."
            )
        masks[SPLITS[key]] |= mask
    return masks


def checked_fractions(fractions: Any) -> tuple[float, float, float]:
    """Returns the fractions of training, validation and test nodes."""
    given = tuple(fractions) if isinstance(fractions, Sequence) else (fractions,)
    numbers = [float(value) for value in given if isinstance(value, Real) and not isinstance(value, bool)]
    if len(given) != 3 or len(numbers) != 3 or not min(numbers) >= 0 or not 0 < sum(numbers) <= 1 + 1e-9:
        raise ValueError(f"split needs three fractions that sum to at most 1, such as (0.6, 0.2, 0.2) (got {quote(fractions)}).")
    return numbers[0], numbers[1], numbers[2]


def _random_masks(y: Tensor | None, num_nodes: int, fractions: Sequence[float], seed: int) -> dict[str, Tensor]:
    labeled = torch.ones(num_nodes, dtype=torch.bool) if y is None else is_labeled(y)
    ids = labeled.nonzero().view(-1)
    ids = ids[torch.from_numpy(np.random.default_rng(seed).permutation(len(ids)))]
    ends = [round(len(ids) * share) for share in np.cumsum([0.0, *checked_fractions(fractions)])]
    none = torch.zeros(num_nodes, dtype=torch.bool)
    return {name: none.index_fill(0, ids[low:high], True) for name, (low, high) in zip(MASKS, pairwise(ends))}


def count_labeled(y: Tensor | None, mask: Tensor) -> int:
    """Returns the number of rows of `mask` that count in a mean loss: rows with a label; -1 marks unlabeled nodes."""
    return int(mask.sum() if y is None else (mask & is_labeled(y)).sum())


def class_labels(y: Tensor) -> Tensor | None:
    """Returns integer labels, ``[N]`` or ``[N, 1]``, as a view ``[N]``; None for other targets."""
    if y.is_floating_point() or not (y.dim() == 1 or y.shape[1:] == (1,)):
        return None
    return y.view(-1)


def is_labeled(y: Tensor) -> Tensor:
    """Returns the mask of labeled rows, bool ``[N]``: -1 marks unlabeled nodes."""
    classes = class_labels(y)
    return torch.ones(y.size(0), dtype=torch.bool, device=y.device) if classes is None else classes >= 0


def num_classes(y: Tensor | None) -> int:
    """Returns the number of classes of integer labels ``[N]`` or ``[N, 1]``, or of columns of targets ``[N, C]``; else 0."""
    if y is None or y.numel() == 0:
        return 0
    classes = class_labels(y)
    return int(classes.max()) + 1 if classes is not None else y.size(1) if y.dim() == 2 else 0
