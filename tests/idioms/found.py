"""What the fuzzer has found to be silently wrong, or refused though it is exact."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.classification import multiclass_auroc

from idioms.harness import CLASSES, FEATURES, Case, graph
from idioms.plain import Net, idiom


@idiom(source="fuzzer: nodes mixed only while the Trainer is validating", refused="differs", stages=("fit",))
def mixes_while_validating() -> Case:
    class Module(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x / len(x) if self.trainer.validating else x, edge_index)

    return Case(Module(), graph())


@idiom(source="fuzzer: places of nodes among all, predicted as integers", refused="predict_step", stages=("predict",))
def order_of_nodes_predicted() -> Case:
    class Module(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch.x, batch.edge_index).argsort(0)

    return Case(Module(), graph())


@idiom(source="fuzzer: a layer made anew in an epoch hook, of random numbers")
def layer_drawn_anew_in_a_hook() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(5, 5)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.head(super().forward(x, edge_index))

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.head.reset_parameters()

    return Case(Module(), graph())


@idiom(
    source="fuzzer: labels of training nodes as inputs from the second step on",
    lopsided="does not give the numbers of one device",
    stages=("fit",),
)
def labels_fed_later() -> Case:
    class Module(Net):
        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            known = batch.train_mask if self.global_step else torch.zeros_like(batch.train_mask)
            x = batch.x + F.one_hot(batch.y, batch.x.size(1)) * known.unsqueeze(1)
            loss = F.cross_entropy(self(x, batch.edge_index)[mask], batch.y[mask])
            self.log(f"{stage}_loss", loss)
            return loss

    return Case(Module(), graph())


@idiom(
    source="fuzzer: rows counted in a hook after the step, logged in one after the epoch",
    refused="rows",
    stages=("fit",),
)
def counted_in_one_hook_logged_in_another() -> Case:
    class Module(Net):
        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.rows = float(batch.val_mask.sum())

        def on_validation_epoch_end(self) -> None:
            self.log("rows", self.rows)

    return Case(Module(), graph())


@idiom(
    source="fuzzer: a score of ranks' rows, many of which tie",
    refused="logs 'auroc' as a mean over ranks",
    stages=("fit",),
)
def score_of_rows_that_tie() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(FEATURES, CLASSES)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out, y, mask = self.lin(batch.x), batch.y, batch.train_mask
            self.log("auroc", multiclass_auroc(out[mask].softmax(-1), y[mask], CLASSES))
            return F.cross_entropy(out[mask], y[mask])

    data = graph()
    data.x[data.y == 1] = 0.0
    return Case(Module(), data)
