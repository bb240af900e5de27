"""What makes numbers differ, found by how they differ, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import NodeType

from lightning_gnn.checks.differences import Difference
from lightning_gnn.checks.draws import Draw
from lightning_gnn.checks.record import Compared, Rows, largest, relative_difference
from lightning_gnn.checks.trial import Outcome, Parted, Trial
from lightning_gnn.data.shards import Shard
from lightning_gnn.nn.rank_graph import UnsupportedModelError
from lightning_gnn.steps.predictions import UnknownRowsError

FIT = 1e-6
"""Up to this part of the largest value, one thing is taken to be another: rounding is far smaller in float64."""
_COLUMNS = 64
"""Looked at, of wide rows."""


@dataclass(frozen=True)
class Cause:
    """What makes numbers differ: its kind in a few words; what was seen, and what to do."""

    kind: str
    text: str


@dataclass(frozen=True)
class Finding:
    """Where a run differs from that of one device.

    Attributes:
        step: the module's method.
        where: what differs first, in words that name the layer.
        difference: the largest, of the largest value; None where the run ended there.
        cause: the likely one.
    """

    step: str
    where: str
    difference: float | None
    cause: Cause

    @classmethod
    def at(cls, difference: Difference, trial: Trial, cause: Cause) -> Finding:
        """Returns the finding of a trial whose runs differ."""
        return cls(trial.step, difference.where, difference.size, cause)

    @classmethod
    def of_error(cls, error: Parted, trial: Trial) -> Finding:
        """Returns the finding of a run on parts that ended before its time."""
        raised = error.__cause__
        cause = NEIGHBOURS if isinstance(raised, IndexError) else ACROSS_NODES
        if isinstance(raised, UnknownRowsError):
            return cls(trial.step, "on parts of the graph", None, Cause(OF_UNKNOWN, str(raised)))
        if isinstance(raised, UnsupportedModelError):
            cause = Cause("a model that is refused", str(raised))
        return cls(trial.step, f"on a part of the graph, {error}", None, cause)

    @property
    def what(self) -> str:
        """What differs, and by how much."""
        if self.difference is None:
            return self.where
        return f"{self.where} differs by {self.difference:.1e} of the largest value"

    def __str__(self) -> str:
        return f"{self.step}: {self.what}. Likely cause: {self.cause.kind}. {self.cause.text}"


COUNT, STATISTICS = "mean over the wrong count", "batch statistics"
ACROSS, RANDOM, STATE = "an op that looks across nodes outside message passing", "random numbers", "state between steps"
NOT_KNOWN, OF_UNKNOWN = "a value that no rank can know", "rows of unknown nodes"

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
    "It is the mean over the rank's own nodes. The mean over all is lightning_gnn.mean_over_ranks(x), and "
    "torch_geometric.nn.MeanAggregation() as a module.",
)
_OWN_SUM = Cause(
    ACROSS,
    "It is the sum over the rank's own nodes. The sum over all is lightning_gnn.sum_over_ranks(x.sum(0)), and "
    "torch_geometric.nn.SumAggregation() as a module.",
)
_CENTRED = Cause(
    STATISTICS,
    "A rank's rows are those of one device but for a constant of that rank: what is subtracted is taken over its own nodes, as "
    "by x - x.mean(0). Use torch.nn.BatchNorm1d or PyG's norms, or take the mean by lightning_gnn.mean_over_ranks(x).",
)
_NORMALISED = Cause(
    STATISTICS,
    "A rank's rows are those of one device but for a constant and a factor of that rank: it normalises by mean and variance of "
    "its own nodes. Use torch.nn.BatchNorm1d or PyG's norms, whose statistics are taken over all ranks.",
)
BUFFER = Cause(
    STATISTICS,
    "The buffer follows the rank's own nodes, and would be another on each rank. Take what it is made of over all, by "
    "lightning_gnn.sum_over_ranks.",
)
BACKWARD = Cause(
    ACROSS,
    "Outputs and loss agree, so it is something in the backward, such as a torch.autograd.Function or a hook of your own "
    "that looks at several rows, or a gradient inside of the step (torch.autograd.grad), which is a rank's own.",
)
BY_ITSELF = Cause(
    ACROSS,
    "The step calls loss.backward(), which leaves each rank the gradients of its own nodes. Write self.manual_backward(loss).",
)
KEPT = Cause(
    STATE,
    "Run a second time on the same graph with the same seeds, one device gives something else: the module keeps something "
    "outside of its parameters and buffers, such as a count or the last output.",
)
DRAWN = Cause(
    RANDOM,
    "Each rank draws numbers of its own. With the same numbers on all ranks everything else agrees. If they are drawn for each "
    "node or edge, as in dropout, this is how it is meant to be, and --share_draws leaves it out; a number that all nodes share "
    "must be the same on all ranks: draw it by Python's random or numpy, or from a torch.Generator with a seed of its own.",
)
DRAWN_ELSEWHERE = Cause(
    RANDOM,
    "With another seed, one device gives something else, too: it draws numbers that are not one for each node or edge, "
    "and which are others on each rank.",
)
STANDS_IN = Cause(
    ACROSS,
    "It differs only where a part has no labelled node of a mask. One row then stands in there, so that no mean is over nothing: "
    "it weighs nothing in losses, metrics and logged values, but the step uses the mask for something else. Give every rank "
    'nodes of each mask: GraphDataModule(..., partition="metis_masks").',
)
CHOSEN = Cause(
    OF_UNKNOWN,
    "It has as many rows as there are nodes or edges, or as a mask has, but they are others, or in another order. Return "
    'their ids, too: {"n_id": batch.n_id[rows], "out": out[rows]}, or "e_id" of edges.',
)


def of(difference: Difference, whole: Outcome, found: Outcome, shards: Sequence[Shard], trial: Trial) -> Cause:
    """Returns what may have made a run on parts differ from that of one device, first in `difference`."""
    if difference.values is not None:
        return of_values(difference.values, at_cut_edges(trial.graph, shards[0]))
    if difference.group == "loss":
        return of_loss(whole, found, shards, trial.mask)
    if difference.group == "metrics":
        return of_logged(difference.name, whole, found, shards)
    if difference.group == "buffers":
        return BUFFER
    if difference.group == "predictions":
        return CHOSEN
    return BY_ITSELF if found.ranks[0].backwards == 0 else BACKWARD


def of_draws(draws: Sequence[Draw]) -> Cause:
    """Returns the cause where all agrees once nothing is drawn but numbers per node and edge."""
    names = ", ".join(dict.fromkeys(f"torch.{draw.function} {list(draw.shape)}" for draw in draws))
    if any(draw.chooses for draw in draws):
        return Cause(
            RANDOM,
            f"The step draws {names}: it chooses among, or shuffles, the rank's own nodes or edges, which are others than those "
            "of one device. Draw ids of all nodes by numpy or Python's random, whose streams are the same on all ranks, "
            "and take their rows by lightning_gnn.fetch_rows(x, ids[batch.n_id]).",
        )
    return Cause(
        RANDOM,
        f"The step draws {names}, which differs from rank to rank. A number that all nodes share must be the same on all ranks: "
        "draw it by Python's random or numpy, whose streams are, from a torch.Generator with a seed of its own, or in a hook "
        "such as on_train_batch_start. Numbers for each node or edge, as in dropout, may differ.",
    )


def at_cut_edges(graph: Data | HeteroData, shard: Shard) -> dict[NodeType, Tensor]:
    """Returns which nodes of each type an edge joins to another rank's, bool ``[N]``."""
    types, ranks = shard.types, torch.arange(len(shard.counts))
    owner = {name: torch.empty(types.total(name), dtype=torch.long) for name in types.nodes}
    cut = {name: torch.zeros(len(of), dtype=torch.bool) for name, of in owner.items()}
    for name, counts in types.nodes.items():
        owner[name][shard.n_id[types.place(name)]] = ranks.repeat_interleave(torch.from_numpy(counts))
    for kind in types.edges:
        first, last = kind[0], kind[2]
        source, target = (graph[kind] if isinstance(graph, HeteroData) else graph).edge_index
        across = owner[first][source] != owner[last][target]
        cut[first][source[across]] = cut[last][target[across]] = True
    return cut


def of_values(found: Compared, cut: Mapping[NodeType, Tensor]) -> Cause:
    """Returns what may have made values differ whose inputs agree; `cut` as :func:`at_cut_edges` returns it."""
    first, expected, _ = found.parts[0]
    if len(expected) not in (first.owned_nodes, first.owned_edges):
        return _of_readout(found)
    if len(expected) == first.owned_nodes and _only_cut(found, cut):
        return NEIGHBOURS
    return next(_of_rows(found.parts), ACROSS_NODES)


def _only_cut(found: Compared, cut: Mapping[NodeType, Tensor]) -> bool:
    """Returns whether no nodes differ but those at cut edges, and others were looked at."""
    others = 0
    for rows, expected, value in found.parts:
        inside = ~cut[rows.kind][rows.nodes[: rows.owned_nodes]]
        others += int(inside.sum())
        if inside.any() and relative_difference(value[inside], expected[inside], largest(expected)) > FIT:
            return False
    return others > 0


def _of_readout(found: Compared) -> Cause:
    """Returns the cause where all ranks should have the same value, of all nodes."""
    values = torch.stack([value for _, _, value in found.parts]).double()
    expected = found.parts[0][1].double()
    nodes = values.new_tensor([rows.owned_nodes for rows, _, _ in found.parts])
    weights = (nodes / nodes.sum()).view(-1, *[1] * expected.dim())
    for combined, cause in (((values * weights).sum(0), _OWN_MEAN), (values.sum(0), _OWN_SUM)):
        if relative_difference(combined, expected, largest(expected)) < FIT:
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
    known = (used.sum(0) > 3) & (spread > (FIT * largest(x)) ** 2)
    if not known.any():
        return None
    slope = (centred * y).sum(0) / spread.clamp(min=1e-300)
    offset = (y.sum(0) - slope * x.sum(0)) / count
    size = largest(y)
    off = (y - slope * x - offset).where(used, 0.0)[:, known]
    return None if float(off.abs().max()) > FIT * size else (slope[known], offset[known] / size)


_ONE_VALUE = "one value that all ranks have"


def of_loss(whole: Outcome, found: Outcome, shards: Sequence[Shard], mask: str | None) -> Cause:
    """Returns over what the loss is a mean, if one of the counts that a rank knows gives that of one device."""
    losses = [each.loss for each in found.ranks if each.loss is not None]
    if whole.loss is not None and len(losses) == len(shards):
        values = torch.stack([loss.detach().double() for loss in losses])
        ways = [*_weights(shards)]
        counts = [each.found_rows for each in found.ranks]
        if None not in counts:
            what = f"a mean over other rows ({_listed(counts)} on the two parts)"
            say = "return {'loss': loss, 'loss_weight': how many rows it is over}"
            ways.append((what, say, torch.tensor(counts, dtype=torch.float64)))
        if relative_difference(values, values[:1], largest(values)) < FIT:
            ways = [way for way in ways if way[0] == _ONE_VALUE]  # any weights would do
        for what, say, weights in ways:
            total = 1.0 if say.startswith("loss_reduction") else float(weights.sum()) or 1.0
            if relative_difference((values * weights).sum() / total, whole.loss, largest(whole.loss)) < FIT:
                return Cause(COUNT, f"All modules agree, and the loss is {what}: {say}.")
    counts, rows = [each.found_rows for each in found.ranks], ""
    if mask is not None and None not in counts:
        of_mask = _listed(shards[0].mask_counts[mask])
        rows = f" It is over {_listed(counts)} rows on the two parts, whose {mask} has {of_mask} labelled nodes."
    return Cause(
        COUNT,
        f"All modules agree, and the loss is no mean over the labelled nodes of the mask.{rows} Return {{'loss': loss, "
        "'loss_weight': how many it is over}, or the sum of their weights where they have some, as in "
        "cross_entropy(weight=...): weight[y].sum(). Make each of several means that of all ranks before you add them, by "
        "lightning_gnn.mean_over_ranks.",
    )


def _listed(values: Sequence[object]) -> str:
    return " and ".join(map(str, values))


def _weights(shards: Sequence[Shard]) -> Iterator[tuple[str, str, Tensor]]:
    """Yields over what a loss may be a mean, how to say so, and how many of these each rank has."""
    returned, ones = "return {{'loss': loss, 'loss_weight': {}}}", torch.ones(len(shards), dtype=torch.float64)
    yield "a sum", "loss_reduction='sum' of the strategy", ones
    for what, count, weights in _counts(shards):
        yield f"a mean over {what}", returned.format(count), weights
    yield _ONE_VALUE, returned.format("1"), ones


def _counts(shards: Sequence[Shard]) -> Iterator[tuple[str, str, Tensor]]:
    """Yields what a value may be a mean over, how to count it, and how many of these each rank has."""
    first, ones = shards[0], torch.ones(len(shards), dtype=torch.float64)
    types = first.types
    of = f"batch[{types.input_type!r}]" if types.is_hetero else "batch"
    nodes, count = (types.input_type, "num_nodes") if types.is_hetero else ("all", "num_owned")
    yield f"{nodes} nodes", f"{of}.{count}", ones.new_tensor(types.nodes[types.input_type].tolist())
    for mask in first.mask_counts:
        inside = ones.new_tensor([float(shard.predicted(shard.batch)[mask].sum()) for shard in shards])
        yield mask, f"{of}.{mask}.sum()", inside
    if not types.is_hetero:
        yield "all edges", "batch.edge_index.size(1)", ones.new_tensor(first.edge_counts)


_METRICS = {
    "f1": "F1Score", "auroc": "AUROC", "auc": "AUROC", "roc": "AUROC", "ap": "AveragePrecision", "acc": "Accuracy",
    "prec": "Precision", "recall": "Recall", "r2": "R2Score", "mcc": "MatthewsCorrCoef", "kappa": "CohenKappa",
    "jaccard": "JaccardIndex", "iou": "JaccardIndex", "corr": "PearsonCorrCoef", "pearson": "PearsonCorrCoef",
    "spearman": "SpearmanCorrCoef", "mrr": "RetrievalMRR", "rmse": "MeanSquaredError(squared=False)",
}  # fmt: skip
"""By parts of names, what torchmetrics calls it."""


def of_logged(name: str, whole: Outcome, found: Outcome, shards: Sequence[Shard]) -> Cause:
    """Returns what may have made a logged value differ."""
    expected, value = whole.ranks[0].logged[name], found.ranks[0].logged[name]
    numbers = f"({float(value):.4g} against {float(expected):.4g} on a small graph)" if value.numel() == 1 else ""
    calls = [each.calls.get(name) for each in found.ranks]
    own = [call.value for call in calls if call is not None and call.value is not None and call.value.numel() == 1]
    call = calls[0]
    if call is not None and call.options.get("to_logger"):
        return Cause(
            NOT_KNOWN,
            f"{call.method} gives '{name.removesuffix(' of self.logger')}' to self.logger, which is the value of rank 0's nodes "
            f"{numbers}. Log it by self.log, which gives the loggers that of the whole graph.",
        )
    if call is None or len(own) < len(calls):
        return Cause(
            NOT_KNOWN,
            f"What '{name}' is of all ranks together is not the value of the whole graph {numbers}. If it is a metric of your "
            "own, its states must be added with dist_reduce_fx, and its update must see labelled rows only.",
        )
    values, method = torch.stack([each.reshape(()) for each in own]), call.method
    if call.options.get("rank_zero_only"):
        return Cause(
            NOT_KNOWN,
            f"{method} logs '{name}' with rank_zero_only=True, which is the value of rank 0's nodes {numbers}. Leave it out.",
        )
    how = str(call.options.get("reduce_fx", "mean"))
    is_now = f"{method} logs '{name}' as a {how} over ranks, which is not the value of the whole graph {numbers}."
    near = 1e-4  # torchmetrics and others compute in float32
    for what, count, weights in _counts(shards):
        if relative_difference((values * weights).sum() / weights.sum(), expected, largest(expected)) < near:
            return Cause(COUNT, f"{is_now} It is a mean over {what}: self.log('{name}', ..., batch_size={count}).")
    for other, combined in (("sum", values.sum()), ("max", values.max()), ("min", values.min())):
        if other != how and relative_difference(combined, expected, largest(expected)) < near:
            return Cause(COUNT, f"{is_now} It is the {other} of theirs: self.log('{name}', ..., reduce_fx='{other}').")
    kind = next((kind for part, kind in _METRICS.items() if part in name.lower()), None)
    use = f"torchmetrics.{kind}" if kind else "a metric object of torchmetrics, such as torchmetrics.F1Score"
    return Cause(
        NOT_KNOWN,
        f"{is_now} No rank can know it of its own nodes. Use {use}: update it in the step with the rows of the mask, and log the "
        f"object itself, self.log('{name}', self.metric). For a sum or a count say reduce_fx='sum', for a mean over other rows "
        "batch_size=how many it is over.",
    )
