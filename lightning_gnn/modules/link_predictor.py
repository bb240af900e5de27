"""`LinkPredictor`: a LightningModule for link prediction with any PyG model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import EdgeType, NodeType
from torchmetrics import Metric
from typing_extensions import override

from lightning_gnn.arguments import check_choice
from lightning_gnn.data.draws import draw_others
from lightning_gnn.data.lazy_ids import stored_ids
from lightning_gnn.datamodules import GraphDataModule
from lightning_gnn.datamodules.known_edges import known_edges
from lightning_gnn.modules.base import GraphModule, OptimizerCallable, check_width, edge_inputs
from lightning_gnn.nn.context import UnsupportedModelError
from lightning_gnn.nn.helpers import gather_halo, gather_nodes, global_num_nodes, select_edges
from lightning_gnn.rows.graph import place_selected
from lightning_gnn.rows.mode import local_rows

_SCORED_AT_ONCE = 1 << 16
"""Number of pairs whose embeddings are in memory at once in evaluation."""
_EVALUATION = -1
"""Value for the step number in evaluation, which draws equal negatives each time."""


class MeanOfRanks(Metric):
    """Mean of a function of each edge's rank among its negatives.

    The values equal RetrievalMRR and RetrievalHitRate of torchmetrics, which gather all scores on every rank and iterate over
    edges. This class does not use MeanMetric of torchmetrics. MeanMetric adds in float32, because moving it to a device resets
    ``set_dtype``, and a float32 sum depends on the partition of the edges.
    """

    full_state_update = False
    higher_is_better = True
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    @override
    def update(self, values: Tensor) -> None:
        self.total += values.double().sum()
        self.count += len(values)

    @override
    def compute(self) -> Tensor:
        return self.total / self.count


class LinkPredictor(GraphModule):
    """Trains a PyG model to distinguish edges from other pairs of nodes by scores.

    The model computes an embedding of each node from messages over training edges only, also in evaluation. The decoder scores
    pairs of embeddings. Each edge ``(s, t)`` is compared with negatives ``(s, t')``, where ``t'`` is drawn from all nodes except
    t; some negatives may be edges. The draws depend only on the edge, the step and the seed, not on the number of ranks.

    Logs ``train_loss``, ``val_loss``, ``val_mrr``, ``val_hits@10``, and the corresponding values of ``test``. ``mrr`` is the mean
    of 1 / rank of an edge among its negatives, with ties before it. ``hits@10`` is the share of edges with a rank of at most 10.
    Predicts the embeddings, ``[N, F]``.

    The graph must have ``edge_train_mask``, ``edge_val_mask`` and ``edge_test_mask``, as returned by
    :func:`~lightning_gnn.split_edges`.

    In a ``HeteroData``, edges of one type are predicted, under ``strategy="sampling"``: ``s`` and ``t'`` are nodes of the types
    at its ends. The model is called as ``model(x_dict, edge_index_dict)``, like models of ``to_hetero``, and returns embeddings
    by type. Types without ``x`` are not in ``x_dict``. Predictions are the embeddings of the datamodule's ``input_type``, by
    default the target type of the edges.

    Args:
        model: model called as ``model(x, edge_index)``, with ``edge_weight`` and ``edge_attr`` if the graph has them and the
            model accepts them; returns ``[N, F]``.
        decoder: ``"dot"``: dot product of the embeddings. ``"distmult"``: dot product weighted by a learned vector per edge type
            (Yang et al., ICLR 2015), for graphs with ``edge_type``, int64 ``[E]``, and models with ``out_channels``. Or a module
            of two tensors ``[..., F]`` that returns scores ``[...]``.
        negatives: ``"uniform"``, or ``"in_batch"``: the targets of other edges of the mini-batch, at no extra cost, for
            ``strategy="sampling"``. Evaluation always draws uniformly.
        num_negatives: negatives per edge in training.
        eval_negatives: negatives per edge in validation and test.
        hits: values of k in ``hits@k``.
        seed: seed of the negatives.
        loss: ``"bce"``: binary cross-entropy of an edge and its negatives. ``"margin"``: mean of max(0, margin - score of the
            edge + score of a negative).
        margin: margin of the loss, above 0.
        num_relations: number of edge types, numbered from 0, for ``"distmult"``.
        filtered: whether the ranking excludes negatives that are edges of the graph, in any mask, and for ``"distmult"`` of the
            same type (Bordes et al., NeurIPS 2013). The loss includes them.
        edge_type: type of the predicted edges of a ``HeteroData``, the type with edge masks. ``"distmult"`` and ``filtered`` are
            only for graphs of one type.
        optimizer: function from the parameters to an optimizer. Default: Adam with `lr` and `weight_decay`.
        lr: learning rate of the default optimizer.
        weight_decay: weight decay of the default optimizer.

    Raises:
        ValueError: unknown decoder, negatives or loss; counts below 1; a margin of 0 or less; ``num_relations`` without
            ``"distmult"`` or the reverse; an edge type with options for graphs of one type. From ``setup``: a model that does not
            match the graph.
        UnsupportedModelError: the model does not return ``[N, F]``, by type if there are types, or the decoder does not return a
            score per pair. Raised from a step, and from the strategy's self-check before it.
    """

    predicts_edges = True
    """Marker for strategies and the datamodule: means are over edges in a mask, not over nodes."""

    def __init__(
        self,
        model: torch.nn.Module,
        decoder: Literal["dot", "distmult"] | torch.nn.Module = "dot",
        negatives: Literal["uniform", "in_batch"] = "uniform",
        num_negatives: int = 1,
        eval_negatives: int = 50,
        hits: Sequence[int] = (1, 3, 10),
        seed: int = 0,
        optimizer: OptimizerCallable | None = None,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        loss: Literal["bce", "margin"] = "bce",
        margin: float = 1.0,
        num_relations: int | None = None,
        filtered: bool = False,
        edge_type: EdgeType | None = None,
    ) -> None:
        super().__init__()
        if decoder not in ("dot", "distmult") and not isinstance(decoder, torch.nn.Module):
            raise ValueError(f"decoder must be 'dot', 'distmult' or a torch.nn.Module (got {decoder!r}).")
        check_choice("loss", loss, ("bce", "margin"))
        if margin <= 0:
            raise ValueError(f"margin must be above 0 (got {margin}).")
        if (decoder == "distmult") != (num_relations is not None):
            raise ValueError(
                f"num_relations requires decoder='distmult', and the reverse (got {decoder!r}, num_relations={num_relations})."
            )
        if edge_type is not None and (num_relations is not None or filtered):
            raise ValueError(
                f"decoder='distmult' and filtered=True require a graph without types (got edge_type={edge_type}). Use another "
                "decoder, and filtered=False."
            )
        check_choice("negatives", negatives, ("uniform", "in_batch"))
        counts = [("num_negatives", num_negatives), ("eval_negatives", eval_negatives), *(("hits", k) for k in hits)]
        for name, count in [*counts, ("num_relations", 1 if num_relations is None else num_relations)]:
            if count < 1:
                raise ValueError(f"{name} must be at least 1 (got {count}).")
        # Modules are excluded: hyperparameters with a module could not be loaded with weights_only.
        self.save_hyperparameters(ignore=["model", "decoder", "optimizer"])
        self.model, self.decoder, self.negatives, self.optimizer = model, decoder, negatives, optimizer
        self.num_negatives, self.eval_negatives, self.seed = num_negatives, eval_negatives, seed
        self.lr, self.weight_decay = lr, weight_decay
        self.loss, self.margin, self.filtered = loss, margin, filtered
        self.relations: torch.nn.Embedding | None = None
        if num_relations is not None:
            width = getattr(model, "out_channels", None)
            if not isinstance(width, int):
                raise ValueError(f"{type(model).__name__} must have out_channels for decoder='distmult' (got {width!r}).")
            self.relations = torch.nn.Embedding(num_relations, width)
            torch.nn.init.xavier_uniform_(self.relations.weight)
        self._known_edges: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}
        self.hits = sorted(set(hits))
        names = ["mrr", *(f"hits@{k}" for k in self.hits)]
        self.metrics = torch.nn.ModuleDict({f"{stage}_{name}": MeanOfRanks() for stage in ("val", "test") for name in names})
        self.edge_type = None if edge_type is None else (edge_type[0], edge_type[1], edge_type[2])
        self._takes = edge_inputs(model, by_type=edge_type is not None)

    @override
    def setup(self, stage: str) -> None:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, GraphDataModule):
            return
        types = data.shard.types
        if self.edge_type is None:
            check_width(self.model, data.num_features)
        if (sum(data.shard.counts) if self.edge_type is None else types.total(self.edge_type[2])) < 2:
            raise ValueError("LinkPredictor requires at least 2 target nodes: negative edges need another target.")
        if self.relations is not None:
            _check_types(data.shard.batch.get("edge_type"), self.relations.num_embeddings)
        in_batches = getattr(self.trainer.strategy, "trains_on_batches", False)
        if stage == "fit" and self.negatives == "in_batch" and not in_batches:
            raise ValueError(
                'negatives="in_batch" uses targets of other edges of a mini-batch, but this strategy has full-graph steps. '
                'Use negatives="uniform", or Trainer(strategy="sampling").'
            )
        choice = getattr(self.trainer.strategy, "choice", None)
        if choice is not None and choice.time_attr is not None and (self.filtered or self.negatives == "in_batch"):
            raise ValueError(
                f"time_attr requires negatives='uniform' and filtered=False, since negatives are nodes at the time of their edge "
                f"(got negatives={self.negatives!r}, filtered={self.filtered})."
            )

    @property
    def sampled_negatives(self) -> int:
        """Number of negatives to sample for each edge of a mini-batch."""
        return self.num_negatives if self.negatives == "uniform" else 0

    # Embeddings and scores ##########################################################

    @override
    def forward(self, batch: Data | HeteroData) -> Any:
        """Returns the embeddings of the batch's nodes, ``[N, F]``; with types, a mapping by type as the model returns it."""
        if isinstance(batch, HeteroData):
            return self._rows_by_type(batch)
        names = [name for name in self._takes if batch.get(name) is not None]
        if batch.get("edge_train_mask") is None or _is_sampled(batch):
            edges = (batch.edge_index, *(batch[name] for name in names))
        else:
            edges = select_edges(batch, "edge_train_mask", names)
        out = self.model(batch.x, edges[0], **dict(zip(names, edges[1:])))
        if not isinstance(out, Tensor) or out.dim() != 2 or len(out) != len(batch.x):
            found = list(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise UnsupportedModelError(
                f"{type(self.model).__name__} returned {found} for a batch of {len(batch.x)} nodes, but LinkPredictor needs one "
                f"row per node, [{len(batch.x)}, F], in the order of x."
            )
        return out

    def _rows_by_type(self, batch: HeteroData) -> Mapping[NodeType, Tensor]:
        known = {f"{name}_dict": batch.collect(name, allow_empty=True) for name in self._takes}
        out = self.model(batch.x_dict, batch.edge_index_dict, **known)
        assert self.edge_type is not None
        for name in (self.edge_type[0], self.edge_type[2]):
            rows = out.get(name) if isinstance(out, Mapping) else None
            if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != batch[name].num_nodes:
                what = f"a dict of {', '.join(out)}" if isinstance(out, Mapping) else f"a {type(out).__name__}"
                found = f"{what}, of {name!r} {list(rows.shape)}" if isinstance(rows, Tensor) else what
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} returned {found}, but LinkPredictor needs a dict with rows of {name!r}, "
                    f"[{batch[name].num_nodes}, F] for this batch, as models of to_hetero and layers of HeteroConv return it."
                )
        return out

    def _decode(self, source: Tensor, target: Tensor) -> Tensor:
        if not isinstance(self.decoder, torch.nn.Module):
            return (source * target).sum(-1)
        out = self.decoder(source, target)
        if not isinstance(out, Tensor) or out.shape != source.shape[:-1]:
            found = list(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise UnsupportedModelError(
                f"{type(self.decoder).__name__} returned {found} for two tensors {list(source.shape)}, but LinkPredictor needs a "
                f"score per pair, {list(source.shape[:-1])}."
            )
        return out

    def _apply_relations(self, sources: Tensor, types: Tensor | None) -> Tensor:
        """Returns the source embeddings of edges, multiplied by the vectors of their types if there are types, ``[n, F]``."""
        return sources if self.relations is None else sources * self.relations(types)

    def _scores(self, batch: Data, mask: str, count: int, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the scores of this rank's edges in a mask, ``[n]``, and of their negatives, ``[n, count]``.

        For a mini-batch, these are the scores of its own edges. With `filtered`, in evaluation, the third result is bool ``[n,
        count]``: whether a negative is an edge; otherwise None.
        """
        if isinstance(batch, HeteroData) or _is_sampled(batch):
            return *self._sampled_scores(batch), None
        z = self(batch)
        with local_rows():
            chosen = batch[mask] & (stored_ids(batch.edge_index)[1] < batch.num_owned)  # replicated edges count on another rank
            source, target = stored_ids(batch.edge_index)[:, chosen].long()
            types = None if self.relations is None else batch.edge_type[chosen]
            sources, targets = self._apply_relations(gather_halo(z)[source], types), z[target]
            e_id = stored_ids(batch.e_id)[chosen].long()
            negatives = draw_others(e_id, batch.n_id[target], count, global_num_nodes(z), self.seed, step)
            known = self._known_of(e_id, negatives) if self.filtered and step == _EVALUATION else None
            # gather_nodes is collective: ranks without edges call it too.
            negatives, place = negatives.unique(return_inverse=True)
            scores = self._decode(sources, targets), self._score_each(sources, gather_nodes(z, negatives), place)
            place_selected(batch.edge_index, chosen, *scores, known)
        return *scores, known

    def _known_of(self, edges: Tensor, negatives: Tensor) -> Tensor:
        """Returns whether negatives of evaluation are edges; looked up once, since they are equal each time."""
        # The key has the number of edges, since validation and test alternate. The self-check uses another graph, whose edges are
        # looked up in the same way. It has the device, since the next Trainer may use another.
        key = len(edges), edges.device
        kept, known = self._known_edges.get(key, (None, None))
        if kept is None or known is None or not torch.equal(kept, edges):
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            known = known_edges(data, edges.cpu(), negatives.cpu(), self.relations is not None).to(edges.device)
            self._known_edges[key] = edges, known
        return known

    def _sampled_scores(self, batch: Data | HeteroData) -> tuple[Tensor, Tensor]:
        """Returns the scores of a mini-batch, ``[n]`` and ``[n, count]``.

        The batch has its positive pairs first, then the negatives of each, unless negatives are in-batch.
        """
        z, edges = self(batch), batch if self.edge_type is None else batch[self.edge_type]
        z_source, z = (z, z) if self.edge_type is None else (z[self.edge_type[0]], z[self.edge_type[2]])
        num = len(edges.input_id)
        source, target = edges.edge_label_index
        place = target[num:].view(num, -1)
        if self.negatives == "in_batch" and not place.numel():
            shifts = range(1, min(self.num_negatives, num - 1) + 1)
            place = torch.stack([target.roll(shift) for shift in shifts], 1) if shifts else target.new_empty((num, 0))
        sources = self._apply_relations(z_source[source[:num]], edges.get("edge_label_type"))
        return self._decode(sources, z[target[:num]]), self._score_each(sources, z, place)

    def _score_each(self, sources: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        """Returns the scores of source i with embeddings ``rows[place[i]]``, ``[n, K]``."""
        at_once = max(1, _SCORED_AT_ONCE // max(1, place.size(1)))
        parts = zip(sources.split(at_once), place.split(at_once))
        return torch.cat([self._decode(a.unsqueeze(1).expand(*b.shape, -1), rows[b]) for a, b in parts])

    def _loss(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Returns the mean over edges of the loss of an edge plus the mean loss of its negatives."""
        if self.loss == "margin":
            own, each = torch.zeros_like(positive), (self.margin - positive.unsqueeze(1) + negative).relu()
        else:
            own, each = F.softplus(-positive), F.softplus(negative)
        return (own + each.sum(1) / max(1, negative.size(1))).sum() / max(1, len(positive))

    # Steps ####################################################################

    @override
    def predict_step(self, batch: Data | HeteroData, batch_idx: int) -> Tensor:
        if isinstance(batch, Data):
            return self(batch)
        [of] = [name for name in batch.node_types if "batch_size" in batch[name]]
        rows = self(batch)
        if of not in rows:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} returned rows of {', '.join(rows)}, but not of {of!r}, the predicted type. "
                "Return these rows, too, or set GraphDataModule(..., input_type=...)."
            )
        return rows[of]

    @override
    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        positive, negative, _ = self._scores(batch, "edge_train_mask", self.num_negatives, self.global_step)
        loss = self._loss(positive, negative)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(positive))
        return loss

    @override
    def _evaluate(self, batch: Data, stage: str) -> None:
        positive, negative, known = self._scores(batch, f"edge_{stage}_mask", self.eval_negatives, _EVALUATION)
        count = len(positive)
        self.log(f"{stage}_loss", self._loss(positive, negative), prog_bar=True, batch_size=count)
        # Ties count as ranked before the edge: otherwise a model with constant scores would be perfect. NaN scores rank last.
        ahead = ~(negative < positive.unsqueeze(1))
        rank = 1 + (ahead if known is None else ahead & ~known).sum(1)
        values = {"mrr": 1 / rank.double(), **{f"hits@{k}": (rank <= k).double() for k in self.hits}}
        for name, value in values.items():
            metric: Any = self.metrics[f"{stage}_{name}"]
            metric.update(value)
            self.log(f"{stage}_{name}", metric, prog_bar=name == "mrr", batch_size=count)


def _is_sampled(batch: Data) -> bool:
    return batch.get("edge_label_index") is not None


def _check_types(types: Tensor | None, num_relations: int) -> None:
    """Raises ValueError if edge types, ``[E]``, are missing or outside of the relations."""
    if types is None or types.is_floating_point() or types.dim() != 1:
        found = "none" if types is None else f"{types.dtype} {list(types.shape)}"
        raise ValueError(f"decoder='distmult' needs edge_type of the graph, one integer per edge (got {found}).")
    if len(types) and (int(types.min()) < 0 or int(types.max()) >= num_relations):
        raise ValueError(
            f"edge_type runs from {int(types.min())} to {int(types.max())}, but num_relations={num_relations}: types are 0 to "
            f"{num_relations - 1}."
        )
