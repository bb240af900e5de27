"""What makes numbers differ, told by how they differ: where values part first, N rows of the graph, n of them on a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn.checks.record import Compared, Rows, relative_difference
from lightning_gnn.checks.trial import Outcome
from lightning_gnn.datamodules.shards import Shard

FIT = 1e-6
"""Up to this part of the largest value, one thing is taken to be another: rounding is far smaller in float64."""
_COLUMNS = 64
"""Looked at, of wide rows."""


@dataclass(frozen=True)
class Cause:
    """What makes numbers differ.

    Attributes:
        kind: in a few words.
        text: what was seen, and what to do.
    """

    kind: str
    text: str


COUNT, STATISTICS = "mean over the wrong count", "batch statistics"
ACROSS, RANDOM, STATE = "an op that looks across nodes outside message passing", "random numbers", "state between steps"

_HELP = "expand, reduce, fetch_rows and sum_over_ranks of lightning_gnn are made for such code (docs/models.md)"
ACROSS_NODES = Cause(ACROSS, f"A rank has some of the nodes only, and this code sees no others; {_HELP}.")
NEIGHBOURS = Cause(
    ACROSS,
    "Only nodes with an edge to another rank's node differ: the code reads neighbours, as x[edge_index[0]] or "
    f"degree(edge_index[0]) do; {_HELP}.",
)
_SCALED = Cause(
    ACROSS,
    "A rank's rows are those of one device times a factor of that rank: they are divided by a total over its own nodes, as by "
    "softmax(dim=0), x / x.sum(0) or x / x.norm(). Take the total by lightning_gnn.sum_over_ranks.",
)
_COUNTED = Cause(
    COUNT,
    "A rank's rows are those of one device times the ratio of the graph's nodes to its own, or its inverse: something is divided "
    "by the rank's number of nodes, such as x.size(0). Use sum_over_ranks(torch.tensor(float(len(x)))) of lightning_gnn.",
)
_OWN_MEAN = Cause(
    COUNT,
    "It is the mean over the rank's own nodes. The mean over all is sum_over_ranks(x.sum(0)) / "
    "sum_over_ranks(torch.tensor(float(len(x)))) of lightning_gnn, and torch_geometric.nn.MeanAggregation() as a module.",
)
_OWN_SUM = Cause(
    ACROSS,
    "It is the sum over the rank's own nodes. The sum over all is lightning_gnn.sum_over_ranks(x.sum(0)), and "
    "torch_geometric.nn.SumAggregation() as a module.",
)
_CENTRED = Cause(
    STATISTICS,
    "A rank's rows are those of one device but for a constant of that rank: what is subtracted is taken over its own nodes, as "
    "by x - x.mean(0). Use torch.nn.BatchNorm1d or PyG's norms, or take the mean by lightning_gnn.sum_over_ranks.",
)
_NORMALISED = Cause(
    STATISTICS,
    "A rank's rows are those of one device but for a constant and a factor of that rank: it normalises by mean and variance of "
    "its own nodes. Use torch.nn.BatchNorm1d or PyG's norms, whose statistics are taken over all ranks.",
)
BUFFER = Cause(
    STATISTICS, "It follows the rank's own nodes. Take what it is made of over all, by lightning_gnn.sum_over_ranks."
)
BACKWARD = Cause(
    ACROSS,
    "Outputs and loss agree, so it is something in the backward, such as a torch.autograd.Function or a hook of your own "
    "that looks at several rows, or a gradient inside of the step (torch.autograd.grad), which is a rank's own.",
)
LOGGED = Cause(
    COUNT,
    "Modules, loss and gradients agree, so the value is weighted by other counts than its mean is over. Say "
    "self.log(..., batch_size=how many it is over); reduce_fx='sum' if it is a sum; and log a metric of torchmetrics in place of "
    "what is no mean, such as F1 or AUROC.",
)
DRAWN = Cause(
    RANDOM,
    "Each rank draws numbers of its own. With the same numbers on all ranks everything else agrees. If they are drawn for each "
    "node or edge, as in dropout, this is how it is meant to be, and --share_draws leaves it out; a number that all nodes share "
    "must be the same on all ranks: draw it in the datamodule or on the CPU from a generator with a seed of its own.",
)
DRAWN_ELSEWHERE = Cause(
    RANDOM,
    "With another seed, one device gives something else, too: it draws numbers that are not one for each node or edge, as "
    "torch.randperm, torch.randint or numpy do, and which are others on each rank.",
)
KEPT = Cause(
    STATE,
    "Run a second time on the same graph with the same seeds, one device gives something else: the module keeps something "
    "outside of its parameters and buffers, such as a count or the last output.",
)


def of_values(found: Compared, cut: Tensor) -> Cause:
    """Returns what may have made values differ whose inputs agree.

    Args:
        found: the first values that differ.
        cut: the nodes that an edge joins to another rank's, bool ``[N]``.
    """
    first, expected, _ = found.parts[0]
    if len(expected) not in (first.owned_nodes, first.owned_edges):
        return _of_readout(found)
    if len(expected) == first.owned_nodes and _only_cut(found, cut):
        return NEIGHBOURS
    return next((cause for cause in _of_rows(found.parts)), ACROSS_NODES)


def _only_cut(found: Compared, cut: Tensor) -> bool:
    """Returns whether no nodes differ but those at cut edges, and others were looked at."""
    others = 0
    for rows, expected, value in found.parts:
        inside = ~cut[rows.nodes[: rows.owned_nodes]]
        others += int(inside.sum())
        if inside.any() and relative_difference(value[inside], expected[inside], _size(expected)) > FIT:
            return False
    return others > 0


def _of_readout(found: Compared) -> Cause:
    """Returns the cause where all ranks should have the same value, of all nodes."""
    values = torch.stack([value for _, _, value in found.parts]).double()
    expected = found.parts[0][1].double()
    nodes = values.new_tensor([rows.owned_nodes for rows, _, _ in found.parts])
    weights = (nodes / nodes.sum()).view(-1, *[1] * expected.dim())
    for combined, cause in (((values * weights).sum(0), _OWN_MEAN), (values.sum(0), _OWN_SUM)):
        if relative_difference(combined, expected, _size(expected)) < FIT:
            return cause
    return ACROSS_NODES


def _of_rows(parts: Sequence[tuple[Rows, Tensor, Tensor]]) -> Iterator[Cause]:
    """Yields the cause, if on each rank all rows differ by one factor and one constant per column."""
    fits = [_line(expected, value) for _, expected, value in parts if len(expected)]
    lines = [fit for fit in fits if fit is not None]
    if not lines or len(lines) < len(fits):
        return
    scaled = any(bool(((slope - 1).abs() > FIT).any()) for slope, _ in lines)
    if any(bool((offset.abs() > FIT).any()) for _, offset in lines):
        yield _NORMALISED if scaled else _CENTRED
    elif scaled:
        factors = [float(slope[0]) for slope, _ in lines]
        if all(bool(((slope - factor).abs() < FIT).all()) for (slope, _), factor in zip(lines, factors)):
            shares = [rows.owned_nodes / rows.num_nodes for rows, expected, _ in parts if len(expected)]
            for power in (1, -1):
                if all(abs(factor * share**power - 1) < FIT for factor, share in zip(factors, shares)):
                    yield _COUNTED
        yield _SCALED


def _line(expected: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns by column what rows are multiplied with and what, of the largest value, is added; None if that is not all."""
    x, y = (each.reshape(len(each), -1)[:, :_COLUMNS].double() for each in (expected, value))
    used = (x != 0) & (y != 0) & x.isfinite() & y.isfinite()  # behind a ReLU, 0 says nothing
    x, y, count = x.where(used, 0.0), y.where(used, 0.0), used.sum(0).clamp(min=1)
    centred = (x - x.sum(0) / count).where(used, 0.0)
    spread = centred.square().sum(0)
    told = (used.sum(0) > 3) & (spread > (FIT * _size(x)) ** 2)
    if not told.any():
        return None
    slope = (centred * y).sum(0) / spread.clamp(min=1e-300)
    offset = (y.sum(0) - slope * x.sum(0)) / count
    size = _size(y)
    off = (y - slope * x - offset).where(used, 0.0)[:, told]
    return None if float(off.abs().max()) > FIT * size else (slope[told], offset[told] / size)


def _size(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def of_loss(whole: Outcome, found: Outcome, shards: Sequence[Shard]) -> Cause:
    """Returns over what the loss is a mean, if one of the counts that a rank knows gives that of one device."""
    losses = [each.loss for each in found.ranks]
    expected = whole.loss
    if expected is not None and all(loss is not None for loss in losses):
        values = torch.stack([loss.detach().double() for loss in losses if loss is not None])
        ways = list(_weights(shards))
        if relative_difference(values, values[:1], _size(values)) < FIT:
            ways = ways[-1:]  # any weights would do
        for what, say, weights in ways:
            total = float(weights.sum()) or 1.0
            combined = (values * weights).sum() / (1.0 if say.startswith("loss_reduction") else total)
            if relative_difference(combined, expected, _size(expected)) < FIT:
                return Cause(COUNT, f"All modules agree, and the loss is {what}: {say}.")
    return Cause(
        COUNT,
        "All modules agree, and the loss is no mean over the labelled nodes of the mask: return "
        "{'loss': loss, 'loss_weight': how many it is over}.",
    )


def _weights(shards: Sequence[Shard]) -> Iterator[tuple[str, str, Tensor]]:
    """Yields over what a loss may be a mean, how to say so, and how many of these each rank has."""
    first, returned = shards[0], "return {{'loss': loss, 'loss_weight': {}}}"
    ones = torch.ones(len(shards), dtype=torch.float64)
    yield "a sum", "loss_reduction='sum' of the strategy", ones
    yield "a mean over all nodes", returned.format("batch.num_owned"), ones.new_tensor(first.counts)
    for mask in first.mask_counts:
        inside = ones.new_tensor([float(shard.batch[mask].sum()) for shard in shards])
        yield f"a mean over {mask}", returned.format(f"batch.{mask}.sum()"), inside
    yield "a mean over all edges", returned.format("batch.edge_index.size(1)"), ones.new_tensor(first.edge_counts)
    yield "one value that all ranks have", returned.format("1"), ones
