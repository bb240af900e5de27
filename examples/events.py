"""Will a customer buy within a month? Tables with times, as in RelBench: each answer sees only what was known when it was asked.

python examples/events.py
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv
from torchmetrics.classification import BinaryAccuracy

from lightning_gnn import GraphDataModule, SamplingStrategy

MONTH = 30
BY, OF = ("purchase", "by", "customer"), ("customer", "of", "question")


def tables(customers: int = 2000, months: int = 24) -> HeteroData:
    """Customers that buy more and less in turns; and questions, one of each customer for each of some months."""
    g = torch.Generator().manual_seed(0)
    phase, period = 6 * torch.rand(customers, generator=g), 6 + 12 * torch.rand(customers, generator=g)
    month = torch.arange(months)
    keen = torch.sin(2 * torch.pi * (month + phase[:, None]) / period[:, None]) > 0.3
    bought = torch.poisson(2.0 * keen + 0.1, generator=g).long()  # by customer and month
    customer, at = bought.nonzero().T
    count = bought[customer, at]
    customer, at = customer.repeat_interleave(count), at.repeat_interleave(count)
    data = HeteroData()
    data["customer"].x = torch.ones(customers, 1)
    data["purchase"].x = torch.rand(len(customer), 1, generator=g)  # its price
    data["purchase"].time = MONTH * at + torch.randint(MONTH, (len(at),), generator=g)
    data[BY].edge_index = torch.stack([torch.arange(len(customer)), customer])
    asked = torch.arange(6, months)
    who = torch.arange(customers).repeat_interleave(len(asked))
    question = data["question"]
    question.time = MONTH * asked.repeat(customers) - 1  # on the last day of the month before
    question.y = (bought[:, asked] > 0).long().flatten()
    question.x = torch.zeros(len(who), 1)
    last = question.time // MONTH + 1
    question.train_mask, question.val_mask, question.test_mask = last < 18, last == 18, last > 18
    data[OF].edge_index = torch.stack([who, torch.arange(len(who))])
    return data


class Buyers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.by, self.of = SAGEConv((3, 1), 32, aggr="sum"), SAGEConv((32, 1), 1)
        self.accuracy = BinaryAccuracy()

    def forward(self, batch: HeteroData) -> Tensor:
        purchase, question = batch["purchase"], batch["question"]
        ago = (question.seed_time[purchase.batch] - purchase.time) / MONTH
        rows = torch.stack([torch.exp(-ago), torch.exp(-ago / 3), torch.exp(-ago) * purchase.x[:, 0]], 1)
        customers = self.by((rows, batch["customer"].x), batch[BY].edge_index).relu()
        return self.of((customers, question.x), batch[OF].edge_index).view(-1)

    def training_step(self, batch: HeteroData, batch_idx: int) -> Tensor:
        mask = batch["question"].train_mask
        return F.binary_cross_entropy_with_logits(self(batch)[mask], batch["question"].y[mask].float())

    def test_step(self, batch: HeteroData, batch_idx: int) -> None:
        mask = batch["question"].test_mask
        self.accuracy.update(self(batch)[mask], batch["question"].y[mask])
        self.log("test_acc", self.accuracy, batch_size=int(mask.sum()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    L.seed_everything(0)
    num_neighbors = {OF: [1, 0], BY: [0, 20]}  # the customer of a question, and the last twenty purchases
    strategy = SamplingStrategy(num_neighbors=num_neighbors, batch_size=512, time_attr="time", temporal_strategy="last")
    data, model = GraphDataModule(tables()), Buyers()
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=4, logger=False, enable_checkpointing=False
    )
    trainer.fit(model, datamodule=data)
    [tested] = trainer.test(model, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        print(f"Test accuracy {tested['test_acc']:.3f}")
