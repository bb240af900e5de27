"""What the modules of a model were given and returned, and where two runs of it part."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.typing import NodeType
from torchmetrics import Metric

from lightning_gnn.data.shards import Shard
from lightning_gnn.nn.fused import may_be_fused
from lightning_gnn.partition.types import ONE_TYPE

_CONVS = "torch_geometric.nn.conv."


@dataclass(frozen=True)
class Event:
    """A tensor that went into or came out of a module, or that a step has returned; where, in words, and a key that is equal in
    runs of copies of one model."""

    where: str
    key: tuple[Any, ...]
    value: Tensor


class Recorder:
    """Records the floating tensors that go into and come out of every module of a model, in order of time. Its hooks stay."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.events: list[Event] = []
        self._kept: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        # Calls that are going on: of which module, in words; which one it is; how often it has called others by name.
        self._calls: list[tuple[str, tuple[Any, ...], Counter[str]]] = [("", (), Counter())]
        convs = [conv for conv in module.modules() if isinstance(conv, MessagePassing)]
        inside = {
            id(part)
            for conv in convs
            for part in conv.modules()
            # A conv of PyG's is exact for all that is known.
            if part is not conv
            and (may_be_fused(conv) or type(conv).__module__.startswith(_CONVS) or isinstance(part, Aggregation))
        }
        for name, child in module.named_modules():
            # A metric's value is of the rows that it saw; what is inside a fused conv sees other rows, and what is inside PyG's
            # convs, or aggregates for a conv, may see some of the nodes or edges (those of one degree, or of one relation, say),
            # which no length tells from others.
            if child is not module and not isinstance(child, Metric) and id(child) not in inside:
                child.register_forward_pre_hook(self._before(name, child), with_kwargs=True)
                child.register_forward_hook(self._after)

    @property
    def inside(self) -> str | None:
        """The innermost module that is at work, in words; None outside all."""
        return self._calls[-1][0] or None

    def _before(self, name: str, child: torch.nn.Module) -> Any:
        who = f"'{name}' ({type(child).__name__})"

        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caller, call, made = self._calls[-1]
            made[name] += 1
            # Numbered within the caller's call: a bound conv need not call what is inside it each time.
            key = (*call, name, made[name])
            self.record(f"what {caller or 'the step'} gives to {who}", (*key, "in"), [*args, *kwargs.values()])
            self._calls.append((who, key, Counter()))

        return hook

    def _after(self, _: Any, args: Any, output: Any) -> None:
        who, key, _ = self._calls.pop()
        self.record(f"what {who} returns", (*key, "out"), [output])

    def record(self, where: str, key: tuple[Any, ...], values: Any, whole_numbers: bool = False) -> None:
        """Records the floating tensors in `values`, and with `whole_numbers` those of integers and truth values, as float64."""
        for index, value in enumerate(torch.utils._pytree.tree_leaves(values)):
            if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_complex():
                continue
            if value.is_floating_point():
                self.events.append(Event(where, (*key, index), self._copy(value)))
            elif whole_numbers:
                self.events.append(Event(where, (*key, index), value.double()))

    def _copy(self, value: Tensor) -> Tensor:
        """Returns a copy, the same one as long as nothing has changed: what a module returns, the next one is given."""
        if value.is_inference():  # knows no version
            return value.clone()
        known = self._kept.get(id(value))
        if known is None or known[0]() is not value or known[1] != value._version:
            known = self._kept[id(value)] = weakref.ref(value), value._version, value.detach().clone()
        return known[2]


@dataclass(frozen=True)
class Rows:
    """Which nodes and edges of the whole graph a part has, by their ids, and how many the whole has; with types, those of one
    edge type and of the type that it ends at.

    Attributes:
        kind: the node type.
        nodes, edges: ids, owned ones first and replicas behind them.
        owned_nodes, owned_edges: how many are no replicas, whose rows need not be right in every layer.
    """

    nodes: Tensor
    edges: Tensor
    owned_nodes: int
    owned_edges: int
    num_nodes: int
    num_edges: int
    kind: NodeType = ONE_TYPE[0]

    @classmethod
    def of_shard(cls, shard: Shard, rank: int) -> list[Rows]:
        """Returns those of a rank's batch, by edge type; node types that no edges end at are there, too."""
        batch, types = shard.batch, shard.types
        if not isinstance(batch, HeteroData):
            owned = shard.counts[rank], shard.edge_counts[rank]
            return [cls(batch.n_id, batch.e_id, *owned, sum(shard.counts), sum(shard.edge_counts))]
        nothing, targets = torch.empty(0, dtype=torch.long), {kind[2] for kind in types.edges}
        ends = [(kind[2], batch[kind].e_id, types.total(kind)) for kind in types.edges]
        ends += [(name, nothing, 0) for name in types.nodes if name not in targets]
        return [
            cls(batch[name].n_id, e_id, len(batch[name].n_id), len(e_id), types.total(name), num_edges, name)
            for name, e_id, num_edges in ends
        ]

    def of(self, whole: Tensor, part: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns what `part` should be according to `whole`, and what it is; None where their shapes say nothing.

        What has no dimension, or one that is not rows, may be a loss or the like: of a part's rows, and right so. What has as
        many rows as on the whole may be a readout, which all parts have alike; :func:`compared` looks at those.
        """
        if whole.dim() == 0 or part.dim() == 0 or whole.shape[1:] != part.shape[1:]:
            return None
        found, own = whole.size(0), part.size(0)
        nodes, edges = self.nodes[: self.owned_nodes], self.edges[: self.owned_edges]
        if (found, own) == (self.num_nodes, len(self.nodes)):
            return whole[nodes], part[: len(nodes)]
        if (found, own) == (self.num_edges, len(self.edges)):
            return whole[edges], part[: len(edges)]
        both = self.num_edges + self.num_nodes, len(self.edges) + len(self.nodes)
        if (found, own) == both:  # self-loops at the end
            loops, own_loops = whole[self.num_edges :][nodes], part[len(self.edges) :][: len(nodes)]
            return torch.cat([whole[: self.num_edges][edges], loops]), torch.cat([part[: len(edges)], own_loops])
        return None

    def of_masks(self, batch: Any) -> dict[int, tuple[int, Tensor]]:
        """Returns of how many nodes of a mask there are which they are, where no other dimension is likely to be as large; of the
        batch, or of what it has of the type."""
        tensors = [value for value in batch.to_dict().values() if isinstance(value, Tensor)]
        masks = [self.nodes[each] for each in tensors if each.dtype == torch.bool and each.shape == self.nodes.shape]
        return {len(inside): (self.num_nodes, inside) for inside in reversed(masks) if len(inside) > 8}


@dataclass(frozen=True)
class Compared:
    """A value of the whole run; which part should have what in its place, and has what; the largest difference, of the largest
    value."""

    event: Event
    parts: Sequence[tuple[Rows, Tensor, Tensor]]
    difference: float


def compared(whole: Sequence[Event], parts: Sequence[tuple[Sequence[Rows], Sequence[Event]]]) -> Iterator[Compared]:
    """Yields what can be compared of the events of the whole run, in their order."""
    found = [(rows, {event.key: event.value for event in events}) for rows, events in parts]
    floor = _FLOOR * max((largest(event.value) for event in whole), default=0.0)
    # A value is often recorded several times, as the same copy.
    known: dict[tuple[int, ...], tuple[list[tuple[Rows, Tensor, Tensor]], float]] = {}
    matched: list[tuple[Rows, Tensor, Tensor]]
    for event in whole:
        copies = id(event.value), *(id(values.get(event.key)) for _, values in found)
        if copies not in known:
            size, matched = max(largest(event.value), floor), []
            # A bound conv need not call what is inside it.
            there = [(rows, values[event.key]) for rows, values in found if event.key in values]
            for kinds, value in there:
                pairs = ((rows, rows.of(event.value, value)) for rows in kinds)
                matched += [(rows, *pair) for rows, pair in pairs if pair is not None][:1]
            if not matched and event.value.dim() > 1 and all(value.shape == event.value.shape for _, value in there):
                matched = [(kinds[0], event.value, value) for kinds, value in there]
            differences = [relative_difference(value, expected, size) for _, expected, value in matched]
            known[copies] = matched, max(differences, default=0.0)
        matched, difference = known[copies]
        if matched:
            yield Compared(event, matched, difference)


# Where values cancel out, as in the gradient of a bias before a norm, only rounding is left. What is smaller than this
# part of the largest value is measured against that part.
_FLOOR = 1e-6


def largest(values: Tensor) -> float:
    """Returns the largest finite magnitude, 0 if there is none."""
    found = float(values.abs().max()) if values.numel() else 0.0
    if math.isfinite(found):
        return found
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def relative_difference(found: Tensor, expected: Tensor, size: float) -> float:
    """Returns the largest absolute difference over `size`; infinite if only one of them is finite somewhere."""
    difference = float((found - expected).abs().max()) if found.numel() else 0.0
    if not math.isfinite(difference):
        finite = expected.isfinite()
        if not torch.equal(finite, found.isfinite()):
            return float("inf")
        difference = largest(found[finite] - expected[finite])
    return difference / (size or 1.0)


def differing(
    found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], tolerance: float
) -> Iterator[tuple[str, float]]:
    """Yields names and differences of floating tensors that differ; None counts as zeros."""
    floor = _FLOOR * max((largest(value) for value in expected.values() if value is not None), default=0.0)
    for name, wanted in expected.items():
        value = found.get(name)
        if wanted is None and value is None:
            continue
        value = torch.zeros_like(wanted) if value is None else value  # type: ignore[arg-type]
        wanted = torch.zeros_like(value) if wanted is None else wanted
        if value.shape == wanted.shape and value.is_floating_point():
            difference = relative_difference(value, wanted, max(largest(wanted), floor))
            if difference > tolerance:
                yield name, difference
