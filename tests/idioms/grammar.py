"""A grammar of user code: LightningModules, drawn from a seed, as strangers might write them; most are odd, and all are legal.

A production is text. ``<name>`` in it is replaced by one of the productions of that name, ``#`` by the number of the statement,
and `` ;; `` parts its lines, each of which may begin with the method that it goes to. What a statement does, it does in place of
``x``, rows of 8 columns, so any statement may be left out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

HEADERS = {
    "__init__": "def __init__(self):",
    "setup": "def setup(self, stage):",
    "forward": "def forward(self, batch):",
    "training_step": "def training_step(self, batch, batch_idx):",
    "validation_step": "def validation_step(self, batch, batch_idx):",
    "test_step": "def test_step(self, batch, batch_idx):",
    "predict_step": "def predict_step(self, batch, batch_idx):",
    "configure_optimizers": "def configure_optimizers(self):",
    "on_before_batch_transfer": "def on_before_batch_transfer(self, batch, dataloader_idx):",
    "on_after_batch_transfer": "def on_after_batch_transfer(self, batch, dataloader_idx):",
    "on_before_backward": "def on_before_backward(self, loss):",
    "on_after_backward": "def on_after_backward(self):",
    "on_before_optimizer_step": "def on_before_optimizer_step(self, optimizer):",
    "on_before_zero_grad": "def on_before_zero_grad(self, optimizer):",
    "configure_gradient_clipping": (
        "def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):"
    ),
    "backward": "def backward(self, loss, *args, **kwargs):",
    "optimizer_step": "def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):",
    "lr_scheduler_step": "def lr_scheduler_step(self, scheduler, metric):",
    "on_train_batch_start": "def on_train_batch_start(self, batch, batch_idx):",
    "on_train_batch_end": "def on_train_batch_end(self, outputs, batch, batch_idx):",
    "on_validation_batch_end": "def on_validation_batch_end(self, outputs, batch, batch_idx):",
    **{
        name: f"def {name}(self):"
        for name in (
            "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_start",
            "on_validation_epoch_end", "on_test_epoch_end", "on_train_end",
        )
    },
}  # fmt: skip
FIRST = {
    "__init__": ("super().__init__()",),
    "forward": ("x, edge_index = batch.x, batch.edge_index",),
    "training_step": ("out, y, mask = self(batch), batch.y, batch.train_mask",),
    "validation_step": (
        "out, y, mask = self(batch), batch.y, batch.val_mask",
        "loss = F.cross_entropy(out[mask], y[mask], ignore_index=-1)",
    ),
    "test_step": (
        "out, y, mask = self(batch), batch.y, batch.test_mask",
        "loss = F.cross_entropy(out[mask], y[mask], ignore_index=-1)",
    ),
    "predict_step": ("out = self(batch)",),
    "configure_optimizers": (),
}
LAST = {
    "__init__": "self.head = torch.nn.Linear(8, CLASSES)",
    "forward": "return self.head(x)",
    "training_step": "return loss",
    "predict_step": "return out",
    "configure_optimizers": "return torch.optim.SGD(self.parameters(), lr=0.1)",
    "on_before_batch_transfer": "return batch",
    "on_after_batch_transfer": "return batch",
}
"""What a method ends with, unless it returns something already."""

IMPORTS = """\
import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import callbacks
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch_geometric import nn
from torch_geometric import transforms as T
from torch_geometric.utils import degree, scatter
from torchmetrics.functional import classification as functional

from idioms.harness import CLASSES, Case, directed, graph
from idioms.own_conv import OwnConv
from lightning_gnn import gather_halo, gather_nodes, reduce_halo
"""

GRAMMAR: dict[str, list[str]] = {
    # Rows of a node, from its own row and those of its neighbours.
    "conv": [
        "init: self.conv# = nn.GCNConv(8, 8) ;; x = self.conv#(x, edge_index)",
        "init: self.conv# = nn.GCNConv(8, 8, cached=True) ;; x = self.conv#(x, edge_index)",
        "init: self.conv# = nn.SAGEConv(8, 8, aggr='<aggr>') ;; x = self.conv#(x, edge_index)",
        "init: self.conv# = nn.SAGEConv(8, 8, project=True) ;; x = self.conv#(x, edge_index)",
        "init: self.conv# = nn.GATConv(8, 4, heads=2) ;; x = self.conv#(x, edge_index)",
        "init: self.conv# = nn.GATv2Conv(8, 8) ;; x = self.conv#(x, edge_index)",
        "init: self.conv# = nn.TransformerConv(8, 8) ;; x = self.conv#(x, edge_index)",
        "init: self.conv# = nn.GINConv(torch.nn.Linear(8, 8), train_eps=True) ;; x = self.conv#(x, edge_index).tanh()",
        "init: self.conv# = nn.GraphConv(8, 8, aggr='<aggr>') ;; x = self.conv#(x, edge_index).tanh()",
        "init: self.conv# = nn.APPNP(2, 0.2) ;; x = self.conv#(x, edge_index)",
        "init: self.conv# = nn.SGConv(8, 8, K=2) ;; x = self.conv#(x, edge_index)",
        "init: self.conv# = nn.TAGConv(8, 8, K=2) ;; x = self.conv#(x, edge_index)",
        "init: self.conv# = nn.ResGatedGraphConv(8, 8) ;; x = self.conv#(x, edge_index).tanh()",
        "init: self.conv# = nn.EdgeConv(torch.nn.Linear(16, 8)) ;; x = self.conv#(x, edge_index)",
        "init: self.conv# = OwnConv(8, 8, '<aggr>') ;; x = self.conv#(x, edge_index)",
        "init: self.conv# = nn.Sequential('x, e', [(nn.GCNConv(8, 8), 'x, e -> x'), torch.nn.ReLU()]) ;; "
        "x = self.conv#(x, edge_index)",
    ],
    "edge_conv": [
        "init: self.conv# = nn.GCNConv(8, 8) ;; x = self.conv#(x, edge_index, batch.edge_weight)",
        "init: self.conv# = nn.GraphConv(8, 8) ;; x = self.conv#(x, edge_index, batch.edge_weight).tanh()",
        "init: self.conv# = nn.GATConv(8, 8, edge_dim=3) ;; x = self.conv#(x, edge_index, batch.edge_attr)",
        "init: self.conv# = nn.GINEConv(torch.nn.Linear(8, 8), edge_dim=3) ;; "
        "x = self.conv#(x, edge_index, batch.edge_attr).tanh()",
        "init: self.conv# = nn.TransformerConv(8, 8, edge_dim=3) ;; x = self.conv#(x, edge_index, batch.edge_attr)",
        "init: self.conv# = nn.GCNConv(8, 8) ;; init: self.gate# = torch.nn.Linear(3, 1) ;; "
        "x = self.conv#(x, edge_index, self.gate#(batch.edge_attr).sigmoid().view(-1))",
        "init: self.conv# = nn.GCNConv(8, 8) ;; weight = batch.edge_weight * (batch.edge_weight > 0.3) ;; "
        "x = self.conv#(x, edge_index, weight)",
        "init: self.conv# = nn.GraphConv(8, 8) ;; keep = batch.edge_attr[:, 0] > 0 ;; "
        "x = self.conv#(x, edge_index[:, keep]).tanh()",
    ],
    "aggr": ["mean", "max", "sum"],
    # Rows that stay where they are.
    "local": [
        "x = x.<act>()",
        "x = F.elu(x)",
        "x = x * 2",
        "x = x.softmax(-1)",
        "x = x - x.mean(-1, keepdim=True)",
        "x = F.normalize(x, dim=-1)",
        "x = F.dropout(x, p=0.0, training=self.training)",
        "x = x[:, :4].repeat(1, 2)",
        "x = x.clamp(-1, 1)",
        "x = 0.5 * x.detach() + x",
        "x = x + batch.x",
        "x = x * (batch.n_id % 2 == 0)[:, None] + x",
        "x = x + F.one_hot(batch.y.clamp(min=0), 8) * batch.train_mask[:, None]",
        "x = torch.where(batch.<mask>[:, None], x, 2 * x)",
        "x = x.clone() ;; x[batch.<mask>] *= 2",
        "x = x.clone() ;; x[batch.train_mask] = 0.0",
        "x = torch.stack([row for row in x.unbind(1)], 1)",
        "init: self.lin# = torch.nn.Linear(8, 8) ;; x = self.lin#(x)",
        "init: self.lin# = torch.nn.Linear(8, 8) ;; x = x + self.lin#(x).relu()",
        "init: self.lin# = torch.nn.Linear(16, 8) ;; x = self.lin#(torch.cat([x, batch.x], -1))",
        "init: self.lin# = torch.nn.utils.<reparametrized>(torch.nn.Linear(8, 8)) ;; x = self.lin#(x)",
        "init: self.scale# = torch.nn.Parameter(torch.ones(8)) ;; x = x * self.scale#",
        "init: self.lin# = torch.nn.Linear(8, 8) ;; "
        "x = torch.utils.checkpoint.checkpoint(self.lin#, x, use_reentrant=False)",
        "init: self.gru# = torch.nn.GRUCell(8, 8) ;; x = self.gru#(x)",
        "init: self.emb# = torch.nn.Embedding(CLASSES, 8) ;; "
        "x = x + self.emb#(batch.y.clamp(min=0)) * batch.train_mask[:, None]",
        "init: self.register_buffer('calls#', torch.zeros(())) ;; self.calls# += 1 ;; x = x * (1 + 0.1 * self.calls#)",
    ],
    "act": ["relu", "tanh", "sigmoid", "sin"],
    "mask": ["train_mask", "val_mask", "test_mask"],
    "reparametrized": ["weight_norm", "parametrizations.weight_norm", "parametrizations.spectral_norm"],
    "norm": [
        "init: self.norm# = torch.nn.BatchNorm1d(8) ;; x = self.norm#(x)",
        "init: self.norm# = torch.nn.BatchNorm1d(8, track_running_stats=False) ;; x = self.norm#(x)",
        "init: self.norm# = nn.BatchNorm(8) ;; x = self.norm#(x)",
        "init: self.norm# = nn.GraphNorm(8) ;; x = self.norm#(x)",
        "init: self.norm# = nn.PairNorm() ;; x = self.norm#(x)",
        "init: self.norm# = nn.MeanSubtractionNorm() ;; x = self.norm#(x)",
        "init: self.norm# = nn.LayerNorm(8) ;; x = self.norm#(x)",
        "init: self.norm# = nn.LayerNorm(8, mode='node') ;; x = self.norm#(x)",
        "init: self.norm# = nn.InstanceNorm(8) ;; x = self.norm#(x)",
        "init: self.norm# = torch.nn.LayerNorm(8) ;; x = self.norm#(x)",
        "init: self.norm# = torch.nn.GroupNorm(2, 8) ;; x = self.norm#(x)",
        "init: self.norm# = nn.DiffGroupNorm(8, 3) ;; x = self.norm#(x)",
    ],
    # Rows of all nodes, as the helpers and modules for it have them.
    "helped": [
        "x = x - x.sum(0) / x.new_tensor(float(len(x)))",
        "x = x + scatter(gather_halo(x)[edge_index[0]], edge_index[1], 0, len(x), 'mean')",
        "x = x - x.mean(0, keepdim=True)",
        "x = x + x[batch.y == <class>].mean(0)",
        "x = x + F.one_hot(batch.y.clamp(min=0), 8) * batch.train_mask[:, None]",
        "x = x + gather_nodes(x, batch.n_id * 0 + 3)",
        "x = x + gather_nodes(x, (batch.n_id + 7) % 40)",
        "ones = reduce_halo(degree(edge_index[0], len(gather_halo(x)), x.dtype)) ;; x = x / ones.clamp(min=1)[:, None]",
        "init: self.pool# = nn.MeanAggregation() ;; x = x + self.pool#(x)",
        "init: self.pool# = nn.MaxAggregation() ;; x = x - self.pool#(x)",
        "x = x / degree(edge_index[1], len(x), x.dtype).clamp(min=1)[:, None]",
    ],
    # Rows of all nodes, as strangers have them.
    "mixing": [
        "x = x - x.mean(0)",
        "x = x + x.mean(0, keepdim=True)",
        "x = x / x.std(0).clamp(min=0.1)",
        "x = x / x.norm()",
        "x = x.cumsum(0) / 10",
        "x = x.sort(0).values",
        "x = x.flip(0)",
        "x = x.roll(1, 0)",
        "x = x + x[0]",
        "x = x + x[-1]",
        "x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]",
        "x = x.softmax(0)",
        "x = F.normalize(x, dim=0)",
        "x = x - x.max(0).values",
        "x = x * (x > x.median())",
        "x = x @ (x.T @ x) / 100",
        "x = (x @ x.T).softmax(-1) @ x",
        "x = x + nn.global_mean_pool(x, None)",
        "x = x / len(x)",
        "x = x / batch.num_nodes",
        "x = x * edge_index.size(1) / 100",
        "x = x + torch.arange(len(x))[:, None] / len(x)",
        "x = x + x[batch.train_mask].mean(0)",
        "x = x + x[edge_index[0]].mean(0)",
        "x = x + scatter(x[edge_index[0]], edge_index[1], 0, len(x), 'sum')",
        "x = x + scatter(x[edge_index[1]], edge_index[0], 0, len(x), 'sum')",
        "x = x / degree(edge_index[0], len(x)).clamp(min=1)[:, None]",
        "means = scatter(x, batch.y.clamp(min=0), 0, CLASSES, 'mean') ;; x = x - means[batch.y]",
        "x = x * (x[:, :1] >= x[:, 0].topk(5).values[-1])",
        "x = x * batch.train_mask.sum() / 20",
        "x = x + F.one_hot(batch.y.clamp(min=0)).double().std()",
        "x = F.batch_norm(x, None, None, training=True)",
        "x = F.layer_norm(x, list(x.shape))",
        "x = x + torch.linspace(0, 1, len(x))[:, None]",
        "x = x.T.reshape(len(x), 8)",
        "for _ in range(len(x) % 3): x = x + 1",
        "if x.mean() > 0: x = 2 * x",
        "x = x * (1 + batch.n_id.max() / 100)",
        "init: self.seen# = None ;; if self.seen# is None: self.seen# = x.detach().mean(0) ;; x = x - self.seen#",
        "init: self.register_buffer('running#', torch.zeros(8)) ;; "
        "if self.training: self.running#.lerp_(x.detach().mean(0), 0.1) ;; x = x - self.running#",
        "init: self.norm# = torch.nn.Linear(8, 8) ;; x = x - self.norm#(x).mean(0)",
        "init: self.attention# = torch.nn.MultiheadAttention(8, 2) ;; x = self.attention#(x, x, x)[0]",
        "init: self.gru# = torch.nn.GRU(8, 8) ;; x = self.gru#(x)[0]",
        "init: self.lin# = torch.nn.Conv1d(8, 8, 3, padding=1) ;; x = self.lin#(x.T).T",
    ],
    "edge_mixing": [
        "x = x + batch.edge_weight.mean()",
        "x = x * batch.edge_attr.std()",
        "x = x + degree(edge_index[0], len(x))[:, None] * 0.1",
    ],
    "condition": [
        "self.training",
        "not self.training",
        "self.current_epoch > 0",
        "self.current_epoch == 1",
        "self.current_epoch % 2 == 0",
        "self.global_step > 0",
        "self.trainer.validating or self.trainer.testing",
        "self.trainer.state.fn == 'fit'",
        "torch.is_grad_enabled()",
    ],
    # Losses; what a mean is over is said, where it is not the mask.
    "loss": [
        "loss = F.cross_entropy(out[mask], y[mask], ignore_index=-1)",
        "loss = F.cross_entropy(out[mask], y[mask], ignore_index=-1)",
        "loss = F.cross_entropy(out[mask], y[mask], ignore_index=-1, label_smoothing=0.1)",
        "loss = F.nll_loss(out.log_softmax(-1)[mask], y[mask], ignore_index=-1)",
        "loss = F.cross_entropy(out[mask], y[mask], reduction='sum') / mask.sum()",
        "loss = (F.cross_entropy(out, y, reduction='none', ignore_index=-1) * mask).sum() / mask.sum()",
        "loss = F.cross_entropy(out, y, reduction='none', ignore_index=-1)[mask].mean()",
        "loss = F.binary_cross_entropy_with_logits(out[mask], F.one_hot(y, CLASSES)[mask].double())",
        "loss = F.mse_loss(out[mask], batch.x[mask][:, :CLASSES])",
        "loss = F.smooth_l1_loss(out[mask, 0], batch.x[mask].mean(-1))",
        "loss = F.multi_margin_loss(out[mask], y[mask])",
        "loss = (1 - out[mask].gather(1, y[mask][:, None])).relu().mean()",
        "init: self.criterion = torch.nn.CrossEntropyLoss(ignore_index=-1) ;; "
        "loss = self.criterion(out[mask], y[mask])",
        "init: self.criterion = torch.nn.KLDivLoss(reduction='batchmean') ;; "
        "loss = self.criterion(out[mask].log_softmax(-1), batch.x[mask][:, :CLASSES].softmax(-1))",
        "ids = mask.nonzero().view(-1) ;; loss = F.cross_entropy(out[ids], y[ids])",
        "mask = mask & (y >= 0) ;; loss = F.cross_entropy(out[mask], y[mask])",
        "mask = mask & (y != 1) ;; "
        "loss = F.cross_entropy(out[mask], y[mask], reduction='sum') / mask.sum().clamp(min=1) ;; "
        "return {'loss': loss, 'loss_weight': mask.sum()}",
        "chosen = batch.n_id % 3 == 0 ;; "
        "loss = F.cross_entropy(out[chosen], y[chosen], reduction='sum') / chosen.sum().clamp(min=1) ;; "
        "return {'loss': loss, 'loss_weight': chosen.sum()}",
        "init: self.register_buffer('weight', torch.arange(1.0, CLASSES + 1)) ;; "
        "loss = F.cross_entropy(out[mask], y[mask], self.weight) ;; "
        "return {'loss': loss, 'loss_weight': self.weight[y[mask]].sum()}",
        "loss = F.cross_entropy(out[mask], y[mask], reduction='sum')",
        "total = F.cross_entropy(out[mask], y[mask], reduction='sum') ;; "
        "loss = total / mask.sum().double() ;; return {'loss': loss, 'loss_weight': 1}",
        "loss = out.pow(2).mean() ;; return {'loss': loss, 'loss_weight': len(out)}",
        "each = F.cross_entropy(out, y, reduction='none', ignore_index=-1) ;; "
        "loss = each[batch.train_mask].mean() + out.pow(2).sum(-1).mean()",
        "mask = batch.train_mask & (y != <class>) ;; "
        "loss = F.cross_entropy(out[mask], y[mask], reduction='sum') / mask.sum().clamp(min=1) ;; "
        "return {'loss': loss, 'loss_weight': mask.sum()}",
    ],
    "wrong_loss": [
        "mask = mask & (y != <class>) ;; loss = F.cross_entropy(out[mask], y[mask])",
        "mask = mask & (y != <class>) ;; "
        "loss = F.cross_entropy(out[mask], y[mask], reduction='sum') / mask.sum().clamp(min=1)",
        "mask = batch.n_id % <class> == 0 ;; loss = F.cross_entropy(out[mask], y[mask])",
        "mask = mask & (batch.n_id % 20 != 0) ;; loss = F.cross_entropy(out[mask], y[mask])",
        "loss = F.cross_entropy(out[mask], y[mask], torch.arange(1.0, CLASSES + 1).double())",
        "loss = F.cross_entropy(out[mask], y[mask], reduction='sum')",
        "loss = F.cross_entropy(out[mask], y[mask], reduction='sum') / len(out)",
        "loss = F.cross_entropy(out, y, ignore_index=-1)",
        "loss = (F.cross_entropy(out, y, reduction='none', ignore_index=-1) * mask).mean()",
        "loss = F.cross_entropy(out[mask], y[mask]) ;; return {'loss': loss, 'loss_weight': len(out)}",
        "loss = F.cross_entropy(out[mask], y[mask]) ;; return {'loss': loss, 'loss_weight': 1}",
        "sure = ~mask & (out.softmax(-1).max(-1).values > 0.22) ;; targets = torch.where(mask, y, out.argmax(-1)) ;; "
        "mask = mask | sure ;; loss = F.cross_entropy(out[mask], targets[mask])",
        "mask = batch.train_mask | batch.val_mask ;; loss = F.cross_entropy(out[mask], y[mask], ignore_index=-1)",
        "each = F.cross_entropy(out[mask], y[mask], reduction='none') ;; loss = each[each > each.median()].mean()",
        "each = F.cross_entropy(out[mask], y[mask], reduction='none') ;; loss = each.topk(3).values.mean()",
        "each = F.cross_entropy(out[mask], y[mask], reduction='none') ;; loss = each.max()",
        "loss = F.cross_entropy(out[mask], y[mask]).sqrt()",
        "z = F.normalize(out[mask], dim=-1) ;; loss = (z @ z.T).logsumexp(-1).mean()",
        "loss = out[mask].var(0).mean()",
        "keep = torch.ones(len(y), dtype=torch.bool) ;; keep[::4] = False ;; mask = mask & keep ;; "
        "loss = F.cross_entropy(out[mask], y[mask])",
        "ids = mask.nonzero().view(-1)[:10] ;; loss = F.cross_entropy(out[ids], y[ids])",
    ],
    "class": ["2", "3", "4"],
    "term": [
        "loss = loss + 0.01 * sum(p.pow(2).sum() for p in self.parameters())",
        "loss = loss + 0.01 * self.head.weight.abs().sum()",
        "loss = 2 * loss",
        "loss = loss + 0.1 * out[mask].pow(2).mean()",
        "p = out[mask].softmax(-1) ;; loss = loss - 0.1 * (p * p.log()).sum(-1).mean()",
        "loss = loss * min(1.0, (self.current_epoch + 1) / 2)",
        "loss = loss + 0.1 * out.pow(2).sum() / out.new_tensor(len(out))",
    ],
    "wrong_term": [
        "loss = loss + 0.1 * out.pow(2).mean()",
        "p = out.softmax(-1) ;; loss = loss - 0.1 * (p * p.log()).sum(-1).mean()",
        "z = expand(out) ;; loss = loss + 0.1 * (z[batch.edge_index[0]] - z[batch.edge_index[1]]).pow(2).mean()",
        "loss = loss + 0.1 * out.norm()",
        "loss = loss + 0.1 * out[batch.val_mask].pow(2).mean()",
        "loss = loss + 0.01 * out.pow(2).sum()",
        "loss = loss + 0.1 * out[mask].mean(0).pow(2).sum()",
    ],
    # Logging, in any step; END is the end of its epoch.
    "log": [
        "self.log('loss#', loss)",
        "self.log('loss#', loss, sync_dist=True)",
        "self.log('loss#', loss, prog_bar=True, on_step=True, on_epoch=True)",
        "self.log('loss#', loss, batch_size=int(mask.sum()))",
        "self.log('loss#', loss.item())",
        "self.log('acc#', (out[mask].argmax(-1) == y[mask]).double().mean())",
        "self.log('acc#', (out[mask].argmax(-1) == y[mask]).double().mean(), <options>)",
        "self.log('acc#', functional.multiclass_accuracy(out[mask], y[mask], CLASSES, average='micro'))",
        "self.log('right#', (out[mask].argmax(-1) == y[mask]).double().sum(), reduce_fx='sum')",
        "self.log('all#', out.sum(), reduce_fx='sum')",
        "self.log('top#', out[mask].max(), reduce_fx='max')",
        "self.log('low#', out[mask].min(), reduce_fx=torch.min)",
        "self.log('size#', out.pow(2).mean(), batch_size=len(out))",
        "self.log_dict({'loss#': loss, 'twice#': 2 * loss}, on_epoch=True)",
        "self.log('epoch#', float(self.current_epoch))",
        "self.log('weight#', self.head.weight.norm())",
        "self.log('lr#', self.trainer.optimizers[0].param_groups[0]['lr'] if self.trainer.optimizers else 0.0)",
        "init: self.metric# = torchmetrics.MeanMetric() ;; self.metric#(loss) ;; self.log('mean#', self.metric#)",
        "init: self.metric# = torchmetrics.MeanMetric() ;; self.metric#.update(loss, int(mask.sum())) ;; "
        "self.log('mean#', self.metric#, on_epoch=True)",
        "init: self.metric# = torchmetrics.MeanMetric() ;; self.metric#.update(out[mask]) ;; "
        "self.log('mean#', self.metric#)",
        "init: self.metric# = torchmetrics.SumMetric() ;; self.metric#(out[mask].sum()) ;; "
        "self.log('sum#', self.metric#)",
        "init: self.metric# = torchmetrics.<extreme>() ;; self.metric#(out[mask]) ;; self.log('top#', self.metric#)",
        "init: self.metric# = torchmetrics.classification.<metric> ;; self.metric#.update(out[mask], y[mask]) ;; "
        "self.log('metric#', self.metric#, <options>)",
        "init: self.metric# = torchmetrics.classification.<metric> ;; self.metric#(out[mask], y[mask]) ;; "
        "self.log('metric#', self.metric#)",
        "init: self.metric# = torchmetrics.classification.<metric> ;; "
        "self.log('metric#', self.metric#(out[mask], y[mask]))",
        "init: self.metric# = torchmetrics.<regression> ;; self.metric#.update(out[mask, 0], batch.x[mask, 0]) ;; "
        "self.log('metric#', self.metric#)",
        "init: self.metrics# = torchmetrics.MetricCollection([torchmetrics.classification.<metric>]) ;; "
        "self.metrics#.update(out[mask], y[mask]) ;; self.log_dict(self.metrics#)",
        "init: self.metric# = torchmetrics.classification.<metric> ;; self.metric#.update(out[mask], y[mask]) ;; "
        "END: self.log('metric#', self.metric#.compute()) ;; END: self.metric#.reset()",
        "init: self.kept# = [] ;; self.kept#.append(loss.detach()) ;; "
        "END: self.log('kept#', torch.stack(self.kept#).mean()) ;; END: self.kept#.clear()",
        "init: self.kept# = [] ;; self.kept#.append((out[mask].argmax(-1) == y[mask]).double()) ;; "
        "END: self.log('kept#', torch.cat(self.kept#).mean()) ;; END: self.kept#.clear()",
        "END: self.log('constant#', 1.0 + self.current_epoch)",
    ],
    "wrong_log": [
        "self.log('f1_#', functional.multiclass_f1_score(out[mask], y[mask], CLASSES))",
        "self.log('macro#', functional.multiclass_accuracy(out[mask], y[mask], CLASSES))",
        "self.log('auroc#', functional.multiclass_auroc(out[mask].softmax(-1), y[mask], CLASSES), <options>)",
        "self.log('count#', mask.sum().double())",
        "self.log('count#', float(len(out)))",
        "self.log('right#', (out[mask].argmax(-1) == y[mask]).double().sum())",
        "self.log('top#', out[mask].max())",
        "self.log('size#', out.pow(2).mean())",
        "self.log('rmse#', (out[mask, 0] - batch.x[mask, 0]).pow(2).mean().sqrt())",
        "self.log('variance#', out[mask].var())",
        "self.log('median#', out[mask].median())",
        "self.log('share#', mask.double().mean())",
        "self.log('acc#', (out[mask].argmax(-1) == y[mask]).double().mean(), batch_size=1)",
        "self.log('acc#', (out.argmax(-1) == y).double().mean())",
        "self.log('perplexity#', loss.exp())",
        "self.log('loss#', loss, rank_zero_only=True)",
        "self.log('class0_#', (out[mask].argmax(-1) == 0)[y[mask] == 0].double().sum())",
        "init: self.kept# = [] ;; self.kept#.append((out[mask].argmax(-1), y[mask])) ;; "
        "END: self.log('f1_#', functional.multiclass_f1_score(*map(torch.cat, zip(*self.kept#)), CLASSES)) ;; "
        "END: self.kept#.clear()",
        "init: self.kept# = [] ;; self.kept#.append(out[mask]) ;; "
        "END: self.log('kept#', torch.cat(self.kept#).std()) ;; END: self.kept#.clear()",
        "init: self.best# = float('inf') ;; self.best# = min(self.best#, float(loss)) ;; "
        "END: self.log('best#', self.best#)",
    ],
    "options": [
        "sync_dist=True", "on_step=True, on_epoch=True", "on_step=False, on_epoch=True", "prog_bar=True",
        "batch_size=int(mask.sum())", "add_dataloader_idx=False",
    ],
    "extreme": ["MaxMetric", "MinMetric"],
    "metric": [
        "MulticlassAccuracy(CLASSES, average='micro')",
        "MulticlassAccuracy(CLASSES)",
        "MulticlassF1Score(CLASSES)",
        "MulticlassAUROC(CLASSES)",
        "MulticlassRecall(CLASSES, average='weighted')",
        "MulticlassCohenKappa(CLASSES)",
        "MulticlassCalibrationError(CLASSES)",
        "MulticlassAveragePrecision(CLASSES, thresholds=5)",
        "MulticlassMatthewsCorrCoef(CLASSES)",
        "MulticlassPrecision(CLASSES)",
    ],
    "regression": [
        "MeanSquaredError()", "MeanAbsoluteError()", "R2Score()", "PearsonCorrCoef()", "SpearmanCorrCoef()",
    ],
    # Hooks.
    "hook": [
        "on_after_backward: clip_grad_norm_(self.parameters(), 0.05)",
        "on_after_backward: clip_grad_value_(self.parameters(), 0.01)",
        "on_after_backward: for p in self.parameters(): p.grad = None if p.grad is None else p.grad.sign() * 0.01",
        "on_after_backward: for p in self.parameters(): p.grad = None if p.grad is None else p.grad / (1e-3 + p.grad.norm())",
        "on_after_backward: self.head.weight.grad += 0.01 * torch.randn_like(self.head.weight)",
        "on_after_backward: self.log('grad#', self.head.weight.grad.norm())",
        "on_after_backward: self.head.bias.grad.zero_()",
        "init: self.head_grads# = [] ;; on_after_backward: self.head_grads#.append(self.head.weight.grad.norm()) ;; "
        "on_train_epoch_end: self.log('grad#', torch.stack(self.head_grads#).mean())",
        "on_train_start: self.head.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))",
        "on_before_backward: self.log('before#', loss)",
        "on_before_optimizer_step: self.log('norm#', clip_grad_norm_(self.parameters(), 0.1))",
        "on_before_optimizer_step: for p in self.parameters(): p.grad = None if p.grad is None else 0.5 * p.grad",
        "on_before_zero_grad: self.head.bias.data.mul_(0.9)",
        "configure_gradient_clipping: clip_grad_norm_(self.parameters(), 0.05)",
        "configure_gradient_clipping: self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm='norm')",
        "backward: (2 * loss).backward()",
        "backward: loss.backward(*args, **kwargs)",
        "optimizer_step: for group in optimizer.param_groups: group['lr'] = 0.05 / (1 + self.global_step) ;; "
        "optimizer_step: optimizer.step(closure=optimizer_closure)",
        "optimizer_step: optimizer_closure() ;; optimizer_step: optimizer.step()",
        "on_fit_start: torch.nn.init.constant_(self.head.bias, 0.1)",
        "on_train_start: torch.nn.init.normal_(self.head.weight)",
        "on_train_epoch_start: self.head.reset_parameters()",
        "on_train_epoch_start: if self.current_epoch == 1: self.head.reset_parameters()",
        "on_train_epoch_start: self.trainer.optimizers[0].param_groups[0]['lr'] *= 0.5",
        "on_train_epoch_start: self.head.requires_grad_(self.current_epoch > 0)",
        "on_train_epoch_end: self.head.weight.data.mul_(0.9)",
        "on_train_epoch_end: with torch.no_grad(): self.head.weight.add_(torch.randn_like(self.head.weight), alpha=0.1)",
        "init: self.register_buffer('average#', torch.zeros(CLASSES)) ;; "
        "on_train_batch_end: self.average#.lerp_(self.head.bias.detach(), 0.1)",
        "on_train_batch_end: self.log('end#', outputs['loss'])",
        "on_train_batch_end: with torch.no_grad(): self.head.weight.clamp_(-0.2, 0.2)",
        "on_train_epoch_end: self.log('grown#', self.head.weight.norm())",
        "on_validation_epoch_end: self.log('both#', self.trainer.callback_metrics.get('loss0', torch.zeros(())))",
        "on_validation_epoch_end: if self.current_epoch == 0: self.head.bias.data += 0.1",
        "on_validation_epoch_start: self.extra# = self.current_epoch",
        "on_train_end: self.head.bias.data += 1.0",
        "on_after_batch_transfer: batch.x = batch.x + 1",
        "on_after_batch_transfer: batch.x = F.normalize(batch.x, dim=-1)",
        "on_after_batch_transfer: batch.x.mul_(1.1)",
        "on_after_batch_transfer: batch.train_mask = batch.train_mask & (batch.n_id % 2 == 0)",
        "on_after_batch_transfer: batch.val_mask = batch.val_mask & (batch.n_id % 5 != 0)",
        "on_after_batch_transfer: batch.y = (batch.y + 1) % CLASSES",
        "on_after_batch_transfer: batch.train_mask[batch.y == 2] = False",
        "on_after_batch_transfer: batch.edge_index = batch.edge_index[:, batch.e_id % 3 != 0]",
        "on_before_batch_transfer: batch.x = batch.x * (1 + self.current_epoch)",
        "on_before_batch_transfer: batch.degrees = degree(batch.edge_index[1], len(batch.x))",
        "on_train_batch_start: batch.x = batch.x * 0.5",
        "on_train_batch_start: batch.x[batch.val_mask] = 0",
        "setup: self.prepared# = stage",
    ],
    "edge_hook": [
        "on_after_batch_transfer: batch.edge_weight = batch.edge_weight * 0.5",
        "on_after_batch_transfer: batch.edge_weight.mul_(0.9)",
        "on_after_batch_transfer: batch.edge_weight[batch.edge_weight < 0.4] = 0",
        "on_train_batch_end: batch.edge_weight.mul_(0.9)",
    ],
    "wrong_hook": [
        "on_after_batch_transfer: batch.x = batch.x - batch.x.mean(0)",
        "on_after_batch_transfer: batch.x = (batch.x - batch.x.mean(0)) / batch.x.std(0)",
        "on_before_batch_transfer: batch.x = batch.x / batch.x.abs().max()",
        "on_train_batch_start: batch.x = batch.x - batch.x.mean(0)",
        "on_train_batch_start: batch.x.sub_(batch.x.mean(0))",
        "on_before_backward: self.log('before#', loss.exp())",
        "on_before_backward: self.last_loss = float(loss) ;; "
        "on_before_optimizer_step: optimizer.param_groups[0]['lr'] = 0.01 * self.last_loss",
        "on_train_batch_end: if outputs['loss'] > 1.5: self.head.bias.data += 0.1",
        "on_train_batch_end: self.head.bias.data += 0.01 * outputs['loss']",
        "on_train_batch_end: self.log('rows#', float(len(batch.x)))",
        "init: self.register_buffer('center#', torch.zeros(8)) ;; "
        "on_train_batch_end: self.center#.lerp_(batch.x.mean(0), 0.1)",
        "on_before_batch_transfer: batch.train_mask = batch.train_mask & (torch.arange(len(batch.x)) % 2 == 0)",
        "on_after_batch_transfer: batch.edge_index = batch.edge_index.flip(0)",
        "on_after_batch_transfer: batch.edge_index = batch.edge_index[:, ::2]",
        "on_validation_batch_end: self.rows# = float(batch.val_mask.sum()) ;; "
        "on_validation_epoch_end: self.log('rows#', self.rows#)",
        "backward: loss.backward() ;; backward: self.head.bias.grad += float(loss)",
    ],
    # The rest.
    "optimizer": [
        "return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)",
        "return torch.optim.Adam(self.parameters(), lr=0.02)",
        "return torch.optim.AdamW(self.parameters(), lr=0.02, amsgrad=True)",
        "return torch.optim.RMSprop(self.parameters(), lr=0.01)",
        "return torch.optim.Adam([{'params': self.head.parameters(), 'lr': 0.1}, "
        "{'params': [p for n, p in self.named_parameters() if 'head' not in n]}], lr=0.01)",
        "optimizer = torch.optim.SGD(self.parameters(), lr=0.1) ;; "
        "return [optimizer], [torch.optim.lr_scheduler.<scheduler>]",
        "optimizer = torch.optim.Adam(self.parameters(), lr=0.02) ;; "
        "return {'optimizer': optimizer, "
        "'lr_scheduler': {'scheduler': torch.optim.lr_scheduler.<scheduler>, 'interval': 'step'}}",
        "validation_step: self.log('watched', loss) ;; optimizer = torch.optim.SGD(self.parameters(), lr=0.1) ;; "
        "plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0) ;; "
        "return {'optimizer': optimizer, 'lr_scheduler': {'scheduler': plateau, 'monitor': 'watched'}}",
        "return torch.optim.SGD(self.head.parameters(), lr=0.1)",
    ],
    "scheduler": [
        "StepLR(optimizer, 1, 0.5)",
        "ExponentialLR(optimizer, 0.9)",
        "CosineAnnealingLR(optimizer, 3)",
        "OneCycleLR(optimizer, 0.2, total_steps=4)",
        "LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))",
    ],
    "manual": [
        "init: self.automatic_optimization = False ;; optimizer = self.optimizers() ;; optimizer.zero_grad() ;; "
        "self.manual_backward(loss) ;; optimizer.step()",
        "init: self.automatic_optimization = False ;; optimizer = self.optimizers() ;; self.manual_backward(loss) ;; "
        "clip_grad_norm_(self.parameters(), 0.05) ;; optimizer.step() ;; optimizer.zero_grad()",
        "init: self.automatic_optimization = False ;; optimizer = self.optimizers() ;; for _ in range(2): ;; "
        "    optimizer.zero_grad() ;;     again = F.cross_entropy(self(batch)[mask], y[mask]) ;; "
        "    self.manual_backward(again) ;;     optimizer.step()",
        "init: self.automatic_optimization = False ;; self.manual_backward(loss) ;; "
        "if self.current_epoch % 2 == 1: ;;     self.optimizers().step() ;;     self.optimizers().zero_grad()",
        "init: self.automatic_optimization = False ;; first, second = self.optimizers() ;; "
        "first.zero_grad(); second.zero_grad() ;; self.manual_backward(loss) ;; first.step(); second.step() ;; "
        "configure_optimizers: rest = [p for n, p in self.named_parameters() if 'head' not in n] ;; "
        "configure_optimizers: return [torch.optim.SGD(rest + [self.head.bias], lr=0.1), "
        "torch.optim.Adam([self.head.weight], lr=0.01)]",
    ],
    "predict": [
        "return out",
        "return out.softmax(-1)",
        "return out.argmax(-1)",
        "return {'out': out, 'rows': batch.n_id}",
        "return out, batch.y",
        "return out[batch.test_mask]",
        "return out[batch.test_mask], batch.n_id[batch.test_mask]",
        "return out[batch.test_mask].argmax(-1)",
        "return (out.argmax(-1) == batch.y).double().mean()",
        "return float(out.sum())",
        "return out.mean(0)",
        "return [out[:, 0], out[:, 1]]",
        "return out.argsort(0)",
        "return out[out[:, 0] > 0]",
        "return None",
        "return self.forward(batch).relu().tolist()",
    ],
    "trainer": [
        "'gradient_clip_val': 0.05",
        "'gradient_clip_val': 0.01, 'gradient_clip_algorithm': 'value'",
        "'accumulate_grad_batches': 2",
        "'check_val_every_n_epoch': 2",
        "'num_sanity_val_steps': 2",
        "'limit_val_batches': 0",
        "'max_steps': 1",
        "'max_epochs': 4",
        "'detect_anomaly': True",
        "'inference_mode': False",
        "'callbacks': [callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)]",
        "'callbacks': [callbacks.GradientAccumulationScheduler({0: 2, 1: 1})]",
        "'callbacks': [callbacks.EarlyStopping('watched', patience=1)] ;; validation_step: self.log('watched', loss)",
        "'callbacks': [callbacks.EarlyStopping('watched', patience=0, mode='max')] ;; "
        "training_step: self.log('watched', loss)",
        "'callbacks': [callbacks.ModelPruning('l1_unstructured', amount=0.3)]",
        "'callbacks': [callbacks.LearningRateMonitor()]",
    ],
    "data": [
        "data.y[::7] = -1",
        "data.y[data.y == 2] = -1",
        "data.train_mask = data.train_mask & (data.y < 3)",
        "data.train_mask[:] = False ;; data.train_mask[:6] = True",
        "data.val_mask = data.val_mask & (data.y == 4)",
        "data.y = data.y[:, None]",
        "data.x[data.y == 1] = 0.0",
        "data.x = data.x.abs()",
        "data.edge_index = data.edge_index.flip(0)",
        "data = data.edge_subgraph(data.edge_index[0] > 10)",
        "data = data.edge_subgraph(torch.arange(data.num_edges + 20) % data.num_edges)",
        "data = data.edge_subgraph(data.edge_index[0] < 0)",
        "data = T.ToUndirected()(data)",
    ],
    "graph": [
        "graph(48)", "graph(64, 3)", "graph(80)", "directed(48)", "directed(64, 3)", "directed(80)",
    ],
    "scheme": [
        "dgcl", "dgcl", "dgcl", "dgcl", "dgcl", "spmm_1d", "spmm_15d", "spmm_15d", "vertex_cut", "vertex_cut",
    ],
    "partition": [
        "sorted", "sorted", "sorted", "one without training nodes",
    ],
}  # fmt: skip

METHODS = {
    **dict.fromkeys(("conv", "edge_conv", "local", "norm", "helped", "mixing", "edge_mixing"), "forward"),
    **dict.fromkeys(("loss", "wrong_loss", "term", "wrong_term", "manual"), "training_step"),
    **dict.fromkeys(("log", "wrong_log"), "STEP"),
    "optimizer": "configure_optimizers",
    "predict": "predict_step",
    "trainer": "trainer",
    "data": "data",
}
"""By name of productions, where lines go that do not say so."""

NAME = re.compile(r"<(\w+)>")
_METHOD = re.compile("(" + "|".join([*HEADERS, "init", "data", "trainer", "strategy", "STEP", "END"]) + "): ")


@dataclass(frozen=True)
class Statement:
    """Lines that stand or fall together.

    Attributes:
        kind: the name of its productions.
        lines: each with the method that it goes to.
    """

    kind: str
    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Program:
    """A LightningModule, its graph and how it is run.

    Attributes:
        seed: it was drawn from.
        scheme, partition, stages: see :mod:`idioms.harness`.
        graph: the call that makes it.
        statements: in order.
        imports: what its file begins with.
        ranks: that it runs on.
    """

    seed: int
    scheme: str
    partition: str
    stages: tuple[str, ...]
    graph: str
    statements: tuple[Statement, ...] = field(repr=False)
    imports: str = field(default=IMPORTS, repr=False)
    ranks: int = 2

    @property
    def source(self) -> str:
        """The program as a file, whose function ``case`` builds it."""
        by_method = {method: list(lines) for method, lines in FIRST.items()}
        for statement in self.statements:
            for method, line in statement.lines:
                by_method.setdefault(method, []).append(line)
        data, trainer, strategy = (by_method.pop(name, []) for name in ("data", "trainer", "strategy"))
        text = [self.imports, "", "class Net(L.LightningModule):"]
        for method in (name for name in HEADERS if name in by_method):
            # What a step returns comes behind all that it logs.
            lines = sorted(by_method[method], key=lambda line: line.startswith("return"))
            if method in LAST and not any(line.startswith("return") for line in lines):
                lines.append(LAST[method])
            text += [f"    {HEADERS[method]}", *(f"        {line}" for line in lines), ""]
        text += ["", "def case() -> Case:", "    torch.manual_seed(0)", f"    data = {self.graph}"]
        text += [f"    {line}" for line in data]
        trainer = ["'max_epochs': 2, 'num_sanity_val_steps': 0", *trainer]
        text += [f"    return Case(Net(), data, {{{', '.join(trainer)}}}, {{{', '.join(strategy)}}})", ""]
        return "\n".join(text)


WRONG = ("mixing", "wrong_loss", "wrong_term", "wrong_log", "wrong_log", "wrong_hook")
STAGES = (("fit",), ("fit",), ("fit", "test"), ("fit", "predict"), ("fit", "validate", "test", "predict"))
ENDS = {
    "training_step": "on_train_epoch_end",
    "validation_step": "on_validation_epoch_end",
    "test_step": "on_test_epoch_end",
}


def draw(seed: int) -> Program:
    """Returns the program of a seed: half are as they should be, in the others one thing mixes rows, or is not what it seems."""
    g = random.Random(seed)
    graph, stages = g.choice(GRAMMAR["graph"]), g.choice(STAGES)
    of_edges = graph.startswith("directed")
    wrong = g.choice(WRONG) if g.random() < 0.45 else ""

    def some(kind: str, chance: float, most: int = 1) -> list[str]:
        return [kind for _ in range(most) if g.random() < chance]

    def conv() -> str:
        return "edge_conv" if of_edges and g.random() < 0.5 else "conv"

    layers = [conv() for _ in range(g.choice([1, 2, 2]))]
    layers += g.choices(["local", "norm", "helped"], [8, 2, 1], k=g.choice([0, 1, 2, 3]))
    if wrong == "mixing":
        layers.append("edge_mixing" if of_edges and g.random() < 0.3 else wrong)
    g.shuffle(layers)
    loss = [wrong if wrong == "wrong_loss" else "loss", *some("term", 0.2)]
    other = [wrong] * (wrong in ("wrong_term", "wrong_log", "wrong_hook"))
    other += some("log", 0.5, 4) + some("hook", 0.3, 3) + some("edge_hook", 0.2 * of_edges)
    other += some("manual", 0.08) or some("optimizer", 0.6)
    other += some("trainer", 0.25) + some("data", 0.15) + ["predict"] * ("predict" in stages)
    g.shuffle(other)
    statements = tuple(
        statement(kind, _filled(g.choice(GRAMMAR[kind]), g).replace("#", str(number)), stages, g)
        for number, kind in enumerate(layers + loss + other)
    )
    return Program(seed, g.choice(GRAMMAR["scheme"]), g.choice(GRAMMAR["partition"]), stages, graph, statements)


def _filled(text: str, g: random.Random) -> str:
    while found := NAME.search(text):
        text = text[: found.start()] + g.choice(GRAMMAR[found[1]]) + text[found.end() :]
    return text


def statement(
    kind: str, text: str, stages: Sequence[str], g: random.Random, methods: Mapping[str, str] = METHODS
) -> Statement:
    """Returns a statement of a production, whose ``STEP`` is one of the steps that run; every seventh layer has a condition."""
    step = g.choice([name for name in ENDS if name != "test_step" or "test" in stages])
    place = {"init": "__init__", "STEP": step, "END": ENDS[step]}
    condition = _filled("<condition>", g) if g.random() < 0.15 else ""
    lines: list[tuple[str, str]] = []
    for line in text.split(" ;; "):
        named = _METHOD.match(line)
        method, code = (named[1], line[named.end() :]) if named else (methods[kind], line)
        if method == "forward" and condition:
            lines += [(method, f"if {condition}:"), (method, f"    {code}")]
        else:
            lines.append((place.get(method, method), code))
    return Statement(kind, tuple(lines))
