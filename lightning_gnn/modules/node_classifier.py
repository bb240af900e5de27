"""`NodeClassifier`: a LightningModule for node classification with any PyG model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MultilabelAccuracy, MultilabelF1Score
from typing_extensions import override

from lightning_gnn.arguments import check_choice
from lightning_gnn.datamodules import GraphDataModule
from lightning_gnn.modules.base import GraphModule, OptimizerCallable, check_width, edge_inputs
from lightning_gnn.nn.context import UnsupportedModelError

UNLABELED = -1


class NodeClassifier(GraphModule):
    """Trains a PyG model to classify nodes: cross-entropy for integer labels, binary cross-entropy for ``[N, C]`` targets.

    Logs ``train_loss``, ``train_acc``, ``val_loss``, ``val_acc``, ``val_f1``, ``test_loss``, ``test_acc``, ``test_f1``; predicts
    logits.

    Args:
        model: model called as ``model(x, edge_index)``, with ``edge_weight`` and ``edge_attr`` if the graph has them and the
            model accepts them; returns logits ``[N, C]``. With `node_type`: called as ``model(x_dict, edge_index_dict)``, with
            ``edge_weight_dict`` and ``edge_attr_dict`` if they are arguments of its forward; returns a dict with logits of that
            type.
        num_classes: number of classes C. Default: ``model.out_channels``.
        task: ``"multiclass"`` for labels ``y [N]`` or ``[N, 1]``, ``"multilabel"`` for targets ``y [N, C]``.
        optimizer: function from the parameters to an optimizer. Default: Adam with `lr` and `weight_decay`.
        lr: learning rate of the default optimizer.
        weight_decay: weight decay of the default optimizer.
        node_type: node type of a ``HeteroData`` to classify: the datamodule's ``input_type``. Types without ``x`` are not in
            ``x_dict``.

    Raises:
        ValueError: from ``setup``, if labels are missing, do not match `task`, or have more than C classes. Also if
            ``model.in_channels`` differs from the number of features.
        UnsupportedModelError: the model does not return ``[N, C]``. Raised from a step, and from the strategy's self-check before
            it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        num_classes: int | None = None,
        task: Literal["multiclass", "multilabel"] = "multiclass",
        optimizer: OptimizerCallable | None = None,
        lr: float = 0.01,
        weight_decay: float = 5e-4,
        node_type: str | None = None,
    ) -> None:
        super().__init__()
        # Modules are excluded: hyperparameters with a module could not be loaded with weights_only.
        self.save_hyperparameters(ignore=["model", "optimizer"])
        num_classes = num_classes or getattr(model, "out_channels", None)
        if num_classes is None:
            raise ValueError(f"{type(model).__name__} has no out_channels. Use NodeClassifier(model, num_classes=...).")
        self.model, self.task, self.optimizer, self.num_classes = model, task, optimizer, num_classes
        self.lr, self.weight_decay, self.node_type = lr, weight_decay, node_type
        kinds: dict[str, tuple[Any, Any]] = {
            "multiclass": (MulticlassAccuracy, MulticlassF1Score),
            "multilabel": (MultilabelAccuracy, MultilabelF1Score),
        }
        check_choice("task", task, list(kinds))
        accuracy, f1 = kinds[task]
        for stage in ("val", "test"):
            setattr(self, f"{stage}_acc", accuracy(num_classes, average="micro", ignore_index=UNLABELED))
            setattr(self, f"{stage}_f1", f1(num_classes, average="macro", ignore_index=UNLABELED))
        self._takes = edge_inputs(model, by_type=node_type is not None)

    @override
    def setup(self, stage: str) -> None:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, GraphDataModule):
            return
        # The checked values are global or equal in all parts, so all ranks raise the error.
        if self.node_type is None:
            check_width(self.model, data.num_features)
        if stage != "predict":
            self._check_labels(self._nodes(data.shard.batch).get("y"), data.num_classes)

    def _nodes(self, batch: Data | HeteroData) -> Any:
        """Returns the object of a batch that has the masks and labels."""
        return batch if self.node_type is None else batch[self.node_type]

    def _check_labels(self, y: Tensor | None, classes: int) -> None:
        """Raises ValueError for labels that do not match the task; `classes` is the number of classes in the whole graph."""
        if y is None:
            raise ValueError("NodeClassifier needs labels, but the graph has no y. Set data.y, one row per node.")
        found = f"y is {str(y.dtype).removeprefix('torch.')} {['N', *y.shape[1:]]}".replace("'", "")
        if self.task == "multiclass":
            if y.dim() != 1 and y.shape[1:] != (1,):
                raise ValueError(
                    f"task='multiclass' needs one integer label per node, but {found}. For targets of 0 and 1 per class, "
                    "use NodeClassifier(model, task='multilabel')."
                )
            if y.is_floating_point():
                raise ValueError(
                    f"task='multiclass' needs integer labels, but {found}. Convert it: data.y = data.y.long(). For "
                    "regression, write a LightningModule with a regression loss."
                )
            if classes > self.num_classes:
                raise ValueError(
                    f"The graph has {classes} classes, with labels 0 to {classes - 1}, but {self._name} has "
                    f"{self.num_classes} outputs. Create the model with out_channels={classes}, or correct the labels."
                )
        elif y.dim() != 2:
            raise ValueError(
                f"task='multilabel' needs targets [N, C] of 0 and 1, but {found}. For one class per node, use "
                "NodeClassifier(model)."
            )
        elif classes != self.num_classes:
            raise ValueError(
                f"The graph's targets have {classes} columns, but {self._name} has {self.num_classes} outputs. "
                f"Create the model with out_channels={classes}."
            )

    @property
    def _name(self) -> str:
        return type(self.model).__name__

    @override
    def forward(self, batch: Data | HeteroData) -> Tensor:
        wanted = (self._nodes(batch).num_nodes, self.num_classes)
        if isinstance(batch, HeteroData):
            known = {f"{name}_dict": batch.collect(name, allow_empty=True) for name in self._takes}
            out = self.model(batch.x_dict, batch.edge_index_dict, **known)
            if not isinstance(out, Mapping) or self.node_type not in out:
                what = f"a dict of {', '.join(out)}" if isinstance(out, Mapping) else f"a {type(out).__name__}"
                raise UnsupportedModelError(
                    f"{self._name} returned {what}, but NodeClassifier needs a dict with logits of {self.node_type!r}, as models "
                    "of to_hetero and layers of HeteroConv return it."
                )
            out = out[self.node_type]
        else:
            extra = {name: batch[name] for name in self._takes if batch.get(name) is not None}
            out = self.model(batch.x, batch.edge_index, **extra)
        if not isinstance(out, Tensor) or out.shape != wanted:
            found = list(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise UnsupportedModelError(
                f"{self._name} returned {found} for a batch of {wanted[0]} nodes, but NodeClassifier needs logits "
                f"{list(wanted)}: one row per node and one column per class. Return all rows, in the order of x; a readout "
                "over nodes belongs in a LightningModule of your own. Columns are model.out_channels or num_classes=."
            )
        return out

    def _loss(self, out: Tensor, y: Tensor) -> Tensor:
        if self.task == "multilabel":
            return F.binary_cross_entropy_with_logits(out, y.to(out.dtype))
        return F.cross_entropy(out, y, ignore_index=UNLABELED)

    def _select_labels(self, batch: Data, stage: str) -> tuple[Tensor, Tensor]:
        """Returns the mask of a stage, bool ``[N]``, and the labels, ``[n]``, or targets, ``[n, C]``, of its nodes."""
        nodes = self._nodes(batch)
        mask = nodes[f"{stage}_mask"]
        y = nodes.y[mask]
        return mask, y.view(-1) if self.task == "multiclass" else y  # OGB labels are [n, 1]

    @override
    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        mask, y = self._select_labels(batch, "train")
        out = self(batch)[mask]
        loss = self._loss(out, y)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(y))
        self.log("train_acc", self._share_right(out, y), on_step=False, on_epoch=True, batch_size=len(y))
        return loss

    def _share_right(self, out: Tensor, y: Tensor) -> Tensor:
        """Returns the accuracy as in ``val_acc``: the share of correct predictions for labeled nodes, or for their targets."""
        if self.task == "multilabel":
            return ((out > 0) == (y > 0.5)).to(torch.promote_types(out.dtype, torch.float32)).mean()
        right = (out.argmax(1) == y).to(torch.promote_types(out.dtype, torch.float32))
        return right.sum() / (y >= 0).sum().clamp(min=1)

    @override
    def _evaluate(self, batch: Data, stage: str) -> None:
        mask, y = self._select_labels(batch, stage)
        out = self(batch)[mask]
        self.log(f"{stage}_loss", self._loss(out, y), prog_bar=True, batch_size=len(y))
        for name in ("acc", "f1"):
            metric = getattr(self, f"{stage}_{name}")
            metric.update(out, y)
            self.log(f"{stage}_{name}", metric, prog_bar=name == "acc", batch_size=len(y))
