"""What the attributes of a graph belong to: its nodes, its edges, the graph; and what no part of it could have.

Rows of nodes and edges go with these. What is of the graph is the same on every rank. What holds ids of the whole graph would be
read as rows of a batch, and is left out: splits by ids become masks, and of anything else an error says what to write.
N nodes, E edges.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch_geometric.data import Data
from typing_extensions import override

Kind = Literal["node", "edge", "graph"]

SPLITS = {"train": "train_mask", "val": "val_mask", "valid": "val_mask", "validation": "val_mask", "test": "test_mask"}
"""By the name of a part of a split, the mask."""

OF_BATCHES = ("n_id", "e_id", "num_owned", "batch_size")
"""What a batch has of its own under these names."""

_NO_SEEDS = (
    "a batch of the full graph has no seed nodes that come first, so out[:batch.batch_size] would be nodes of all masks. Write "
    "out[batch.train_mask], which is right in mini-batches, too, where masks are of the seeds alone; and leave batch_size out of "
    "self.log, whose values are weighted by the nodes of the stage's mask"
)


class LeftOutError(ValueError, AttributeError):
    """Something of the user's graph was read from a batch, and no part of the graph can have it: says why, and what to write."""


class GraphData(Data):
    """A PyG ``Data`` that knows what its attributes belong to, and says why others of the user's graph are missing.

    Args:
        kinds: by attribute, what it belongs to.
        left_out: by name, why the graph has it no more.
        **values: the attributes.
    """

    def __init__(self, kinds: Mapping[str, Kind] | None = None, left_out: Mapping[str, str] | None = None, **values: Any) -> None:
        super().__init__()
        # Beside the attributes, whose names are the user's.
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
    """Returns by name what a graph has been prepared without, and why."""
    return dict(data.__dict__.get("_left_out", {}))


def of_full_graph(left_out: Mapping[str, str]) -> dict[str, str]:
    """Returns what a batch of the full graph is without: beside what the graph is, a number of seeds."""
    return {**left_out, "batch_size": _NO_SEEDS}


def kinds_of(data: Data) -> dict[str, Kind]:
    """Returns what each tensor of a graph with features belongs to, beside its edges."""
    tensors = {name: value for name, value in data.to_dict().items() if isinstance(value, Tensor) and name != "edge_index"}
    known = data.__dict__.get("_kinds", {})
    num_nodes, num_edges = data.x.size(0), data.edge_index.size(1)
    return {name: known.get(name) or kind_by_rows(name, value, num_nodes, num_edges) for name, value in tensors.items()}


_OF_NODES = re.compile(r"x|y|z|pos|batch|[xy]_.*|.*(node|n_id).*|.+_mask")
"""Names that are of nodes where they have no "edge" in them: PyG's own, and those that say so."""


def tell_kinds(data: Data, kind: Kind, names: Iterable[str]) -> None:
    """Notes what attributes of a graph belong to, where its source says so and their rows may not."""
    data.__dict__.setdefault("_kinds", {}).update(dict.fromkeys(names, kind))


def check_kinds(ambiguous: Sequence[str], num_nodes: int) -> None:
    """Raises ValueError for attributes with a row for each node and for each edge of a graph with as many nodes as edges."""
    if ambiguous:
        first = ambiguous[0]
        raise ValueError(
            f"{', '.join(ambiguous)}: {num_nodes} rows, and the graph has as many nodes as edges, so these may be of either. A "
            f"rank has the rows of its nodes, or of its edges. Say which by the name: data.node_{first} = data.{first}, or "
            f"data.edge_{first} = data.{first}, and del data.{first}."
        )


def kind_by_rows(name: str, value: Tensor, num_nodes: int | None, num_edges: int | None) -> Kind:
    """Returns what a tensor belongs to by its rows; where there are as many nodes as edges, edges if its name says so."""
    rows = value.size(0) if value.dim() else None
    if rows is None or rows not in (num_nodes, num_edges):
        return "graph"
    if num_nodes == num_edges:
        return "edge" if "edge" in name or name == "e_id" else "node"
    return "node" if rows == num_nodes else "edge"


def why_left_out(name: str, value: Any, num_nodes: int | None, num_edges: int | None) -> str | None:
    """Returns why an attribute is no part of a prepared graph; None if it is.

    Args:
        num_nodes, num_edges: of the graph; of a type, None for what it has not.
    """
    if isinstance(value, (str, int, float, np.generic)):
        return _NO_SEEDS if name == "batch_size" else None
    if isinstance(value, np.ndarray):
        return f"it is a numpy array, and only tensors go with nodes and edges. Set data.{name} = torch.from_numpy(data.{name})"
    if not isinstance(value, Tensor):
        return (
            f"it is a {type(value).__name__}, and only tensors, numbers and words are kept. batch.n_id and batch.e_id are ids in "
            "the whole graph: they tell which of its entries a batch has, where your module holds it"
        )
    if value.layout != torch.strided:
        return "it is a sparse matrix over all nodes. Layers take batch.edge_index, with edge_weight or edge_attr for values"
    if name == "ptr":
        return "it says where graphs begin in a list of nodes, and a batch is of one graph"
    if _holds_ids(name, value):
        rows = value.size(0) if value.dim() else -1
        if rows in (num_nodes, num_edges) and torch.equal(value.cpu(), torch.arange(rows, dtype=value.dtype)):
            return None  # its own id for each
        return _ids_left_out(name, value)
    if re.match(r"(pos_|neg_)?edge_label", name) and value.dim() and value.size(0) != num_edges:
        return f"it belongs to pairs of nodes, of which a batch has none. {TO_PREDICT_LINKS}"
    return None


def _holds_ids(name: str, value: Tensor) -> bool:
    """Returns whether a tensor holds ids of nodes or edges by its name, as PyG reads names."""
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        return False
    return "index" in name or name == "face" or re.search(r"(^|_)(idx|indices)(_|\d*$)", name) is not None


TO_PREDICT_LINKS = (
    "To predict links, split the edges of the graph itself, GraphDataModule(split_edges(data)) of lightning_gnn, and use "
    "LinkPredictor (docs/links.md)"
)


def _ids_left_out(name: str, value: Tensor) -> str:
    holds = "it holds ids of the whole graph, which a batch would read as its own rows"
    stem = re.sub(r"_?(edge_)?(index|idx|indices)$", "", name) or name
    fetched = (
        f"rows of any nodes come by fetch_rows(x, ids): call it {stem}_n_id, as a name that ends in n_id says that it holds ids "
        "of the whole graph"
    )
    if "label" in name and "edge" in name:
        return f"{holds}. {TO_PREDICT_LINKS}; or {fetched}"
    if value.dim() == 2 and value.size(0) == 2:
        return (
            f"{holds}. Put all edges into data.edge_index, with an attribute that tells them apart, data.edge_kind say, and take "
            f"batch.edge_index[:, batch.edge_kind == 0]. {TO_PREDICT_LINKS}; or {fetched}"
        )
    if "edge" in name:
        return f"{holds}. Make a mask of them, one entry per edge: data.{stem}_mask[data.{name}] = True"
    return f"{holds}. Make a mask of them, one entry per node: data.{stem}_mask[data.{name}] = True; or {fetched}"


def looks_like_ids(name: str, value: Tensor, most: int) -> bool:
    """Returns whether a tensor that belongs to the graph may hold ids all the same: whole numbers, none too large for one."""
    if value.numel() < 2 or value.is_floating_point() or value.is_complex() or value.dtype in (torch.bool, torch.uint8):
        return False
    if re.search(r"(^|_)[ne]_id$", name):
        return False
    low, high = value.aminmax()
    return int(low) >= 0 and int(high) < most


def kept_attributes(
    given: Mapping[str, Any], num_nodes: int, num_edges: int, data: object
) -> tuple[dict[str, Any], dict[str, Kind], dict[str, str]]:
    """Returns what is kept of a graph, on the CPU, what its tensors belong to, and why others are left out.

    Warns of what is left out, and of what may be meant otherwise, but not of `data` that was prepared before. Raises ValueError
    for what may be of nodes or of edges.
    """
    kept: dict[str, Any] = {}
    told = data.__dict__.get("_kinds", {})
    kinds: dict[str, Kind] = dict(told) if isinstance(data, GraphData) else {}
    left_out: dict[str, str] = {}
    warnings, ambiguous = [], []
    for name, value in given.items():
        if name in OF_BATCHES and isinstance(value, Tensor):
            warnings.append(f"{name} is what a batch calls ids of its own, in the graph that it is part of: rename it to keep it")
            continue
        if name == "edge_index":
            kept[name] = value
            continue
        reason = None if name in kinds else why_left_out(name, value, num_nodes, num_edges)
        if reason is not None:
            left_out[name] = reason
            continue
        kept[name] = value.item() if isinstance(value, np.generic) else value
        if not isinstance(value, Tensor):
            continue
        check_storable(name, value)
        kept[name] = value.detach().cpu()
        if name in kinds:
            continue
        kind = kinds[name] = kind_by_rows(name, value, num_nodes, num_edges)
        if kind == "graph" and looks_like_ids(name, kept[name], max(num_nodes, num_edges)):
            warnings.append(
                f"{name} {list(value.shape)} has a row neither per node nor per edge, so every rank gets all of it: if it holds "
                "ids of nodes or edges, these are ids in the whole graph, and no rows of a batch (docs/models.md)"
            )
        elif num_nodes == num_edges and kind != "graph" and name in told:
            kinds[name] = told[name]
        elif num_nodes == num_edges and kind == "node" and not _OF_NODES.fullmatch(name):
            ambiguous.append(name)
    check_kinds(ambiguous, num_nodes)
    if not isinstance(data, GraphData):
        for text in warnings:
            rank_zero_warn(f"{text}.")
        warn_of_left_out(left_out, "the graph")
    return kept, kinds, left_out


def rows_of_type(given: Mapping[str, Any], num_nodes: int | None, num_edges: int | None, of: str) -> dict[str, Tensor]:
    """Returns the tensors that have a row per node or edge of a type, on the CPU; warns of others, which batches lack.

    `num_nodes` and `num_edges` are those of the type, None for what it has not; `of` is the type, in words.
    """
    kept, left_out = {}, {}
    for name, value in given.items():
        if value is None or name == "num_nodes" or (name in OF_BATCHES and isinstance(value, Tensor)):
            continue
        reason = why_left_out(name, value, num_nodes, num_edges)
        of_rows = isinstance(value, Tensor) and kind_by_rows(name, value, num_nodes, num_edges) != "graph"
        if reason is None and not of_rows:
            reason = "it has no row for each node or edge of its type, which are all that batches of a HeteroData have"
        if reason is None:
            check_storable(name, value)
            kept[name] = value.detach().cpu()
        else:
            left_out[name] = reason
    warn_of_left_out(left_out, of)
    return kept


def warn_of_left_out(left_out: Mapping[str, str], of: str) -> None:
    """Warns of what batches will not have of a graph, or of a type; `left_out` says why, by name."""
    if left_out:
        name, reason = next(iter(left_out.items()))
        rank_zero_warn(f"Of {of}, batches will not have {', '.join(left_out)}. Of {name}: {reason}.")


def is_name(name: Any) -> bool:
    """Returns whether a file may be called after an attribute: no path, no control characters, not too long."""
    return isinstance(name, str) and re.fullmatch(r"[\w .+-]+", name) is not None and len(name.encode()) <= 100


def check_storable(name: str, value: Tensor) -> None:
    """Raises ValueError for a tensor that the files of a partitioned graph could not hold."""
    if not is_name(name):
        raise ValueError(
            f"The graph has an attribute {name!r}, and files are called after attributes. Rename it: at most 100 letters, "
            "digits, spaces, '_', '-', '+' and '.'."
        )
    try:
        torch.empty(0, dtype=value.dtype).numpy()
    except TypeError as error:
        raise ValueError(
            f"{name} is {str(value.dtype).removeprefix('torch.')}, which the files of a partitioned graph cannot hold. "
            f"Convert it: data.{name} = data.{name}.float()."
        ) from error


# Splits by ids ################################################################

_ID = r"(?:idx|index|indices|ids?|nodes?)"
_PART = f"({'|'.join(SPLITS)})"
_SPLIT_NAME = re.compile(f"{_PART}_{_ID}|{_ID}_{_PART}")
_LABELS_NAME = re.compile(f"{_PART}_(?:y|labels?)")


def split_ids(name: str, value: Any) -> dict[str, Any]:
    """Returns the lists of ids in an attribute that is a split by its name, or a dict of its parts; by part. Mostly nothing."""
    if isinstance(value, Mapping):
        return dict(value) if "train" in value and all(part in SPLITS for part in value) else {}
    found = _SPLIT_NAME.fullmatch(name)
    return {found[1] or found[2]: value} if found is not None else {}


def split_labels(name: str) -> str | None:
    """Returns the part of a split whose labels an attribute holds by its name, such as ``train_y``; None for none."""
    found = _LABELS_NAME.fullmatch(name)
    return found and found[1]


def mask_of_ids(ids: Any, num_nodes: int) -> Tensor | None:
    """Returns the mask, bool ``[N]``, that a list of node ids stands for; None for what is no such list beyond doubt."""
    try:
        found = torch.as_tensor(ids).cpu()
    except (TypeError, ValueError, RuntimeError):
        return None
    if found.dtype == torch.bool:
        return found if found.shape == (num_nodes,) else None
    if found.is_floating_point() or found.is_complex() or found.dim() != 1 or len(found) == num_nodes:
        return None  # one entry for each node is no list of some
    if len(found) and (int(found.min()) < 0 or int(found.max()) >= num_nodes):
        return None
    mask = torch.zeros(num_nodes, dtype=torch.bool).index_fill_(0, found.long(), True)
    return mask if int(mask.sum()) == len(found) else None


def with_masks_of_ids(given: Mapping[str, Any], num_nodes: int, needed: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the attributes of a graph with masks, bool ``[N]``, in place of a split by ids, and why this is left out.

    ``train_idx`` and its like, or a dict of them, become masks that are not there yet; ``train_y`` becomes y where there is none.

    Args:
        given: the attributes.
        num_nodes: of the graph, or of the type.
        needed: a split that cannot be read is an error if there are no masks.
    """
    rest = dict(given)
    left_out: dict[str, str] = {}
    for name in ("valid_mask", "validation_mask"):
        if name in rest and "val_mask" not in rest:
            rest["val_mask"] = rest.pop(name)
            left_out[name] = "it is batch.val_mask"
    labelled = "y" in given or any(split_labels(name) for name in given)
    masks: dict[str, Tensor] = {}
    lists: dict[str, Tensor] = {}
    for name, value in given.items():
        parts = split_ids(name, value)
        found = {part: mask_of_ids(ids, num_nodes) if labelled else None for part, ids in parts.items()}
        if not parts:
            continue
        del rest[name]
        if any(mask is None for mask in found.values()):
            left_out[name] = (
                f"it is named as a part of a split, but it is not a list of distinct ids of some of the {num_nodes} nodes of a "
                "graph with labels y. Set masks: data.train_mask, data.val_mask and data.test_mask (bool, one entry per node)"
            )
            if needed and "train_mask" not in given:
                raise ValueError(f"{name} cannot be read: {left_out[name]}.")
            continue
        lists.update({part: torch.as_tensor(ids).cpu() for part, ids in parts.items()})
        for part, mask in found.items():
            assert mask is not None
            masks[SPLITS[part]] = masks[SPLITS[part]] | mask if SPLITS[part] in masks else mask
        names = " and ".join(dict.fromkeys(SPLITS[part] for part in parts))
        left_out[name] = f"the batch has {names} for it, over its own rows: out[batch.{SPLITS[next(iter(parts))]}]"
    labels_of = {name: found_part for name in given if (found_part := split_labels(name)) and found_part in lists}
    for name, of_part in labels_of.items():
        value, ids = rest[name], lists[of_part]
        if ids.dtype == torch.bool or not isinstance(value, Tensor) or value.shape[:1] != ids.shape:
            continue
        del rest[name]
        if "y" not in given:
            unknown = float("nan") if value.is_floating_point() else -1
            rest.setdefault("y", value.new_full((num_nodes, *value.shape[1:]), unknown))[ids] = value
        left_out[name] = f"labels of all parts of the split are in y: batch.y[batch.{SPLITS[of_part]}]"
    return {**masks, **rest}, left_out
