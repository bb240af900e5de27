"""A grammar of steps whose rows are mixed, as row semantics has them: every program has 2 to 5 statements of it.

Its productions are as those of :mod:`idioms.grammar`, beside which they stand. ``$`` is the rows that a method has: ``x`` in
``forward``, ``out`` in steps, ``batch.x`` in hooks.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from idioms.grammar import FIRST, GRAMMAR, IMPORTS, METHODS, NAME, STAGES, Program, Statement, statement

MORE_IMPORTS = """\
import math

import numpy as np
import torchmetrics.functional as metrics
from torch.utils.checkpoint import checkpoint
from torch_geometric.utils import softmax

from lightning_gnn import gather_global, register_row_rule


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad


register_row_rule(Reversed)
"""

EXPRESSIONS: dict[str, list[str]] = {
    "size": ["len($)", "$.size(0)", "$.shape[0]", "batch.num_nodes", "len(batch.y)", "batch.x.size(0)"],
    "count": [
        "int(batch.<mask>.sum())", "len($[batch.<mask>])", "batch.<mask>.nonzero().size(0)",
        "batch.y[batch.<mask>].numel()", "max(1, len($) // 3)", "math.sqrt(len($))", "torch.tensor(len($))",
        "batch.edge_index.size(1)", "batch.num_edges", "math.prod($.shape)", "torch.count_nonzero(batch.<mask>)",
        "sum(i for i in range($.size(1)))",
    ],
    # A number, or truth, for each node.
    "v": [
        "$[:, 0]", "$[:, 1]", "$.sum(1)", "$.logsumexp(1)", "$.amax(1)", "($ * batch.x[:, :1]).mean(-1)",
        "($ - batch.x[:, :$.size(1)]).pow(2).mean(1)", "F.cosine_similarity($, batch.x[:, :$.size(1)])",
        "$ @ batch.x[3, :$.size(1)]", "F.cross_entropy($, batch.y, reduction='none')",
        "-$.log_softmax(1).gather(1, batch.y[:, None]).squeeze(1)", "$.log_softmax(1)[torch.arange(<size>), batch.y]",
        "$[:, 0] * <w>", "$[:, 1] - <w>", "$.unbind(1)[0]", "torch.gather($, 1, batch.y[:, None].clamp(max=4))[:, 0]",
        "torch.take_along_dim($, $.argmax(1, keepdim=True), 1).view(-1)", "$[torch.arange(<size>), batch.y]",
        "$[range(<size>), batch.y]", "F.embedding(batch.y, $[:CLASSES]).mean(1)", "$.T[1]", "$.select(1, 2)",
        "torch.einsum('nf,nf->n', $, <all>)", "$.flatten()[::$.size(1)]", "$.contiguous().view(-1)[: <size>]",
        "$.split(2, 1)[0].reshape(-1)[::2]",
    ],
    "w": [
        "batch.x[:, 2]", "batch.y.double()", "batch.train_mask.double()", "degree(batch.edge_index[1], <size>)",
        "degree(batch.edge_index[0], len($), torch.double)", "torch.arange(<size>) / 50", "batch.n_id / <size>",
        "torch.linspace(0, 1, <size>, dtype=torch.double)", "torch.ones(<size>).double()",
        "$.new_full((<size>,), 0.5)", "torch.ones_like(batch.x[:, 0])", "batch.y.bincount()[batch.y].double()",
        "torch.bucketize(batch.x[:, 0], torch.tensor([-1.0, 0.0, 1.0]).double()).double()",
        "batch.y.argsort(stable=True).argsort() / 40", "batch.train_mask.cumsum(0) / 20",
        "batch.y.unique(return_inverse=True)[1].double()", "torch.tensor([float(i % 3) for i in range(<size>)])",
        "scatter(batch.x[batch.edge_index[0], 0], batch.edge_index[1], dim=0, dim_size=<size>)",
        "torch.from_numpy(np.arange(<size>) / 40)",
    ],
    "sel": [
        "batch.<mask>", "batch.<mask>", "~batch.<mask>", "(batch.train_mask & (batch.y != <class>))",
        "(batch.train_mask | batch.val_mask)", "(batch.y == <class>)", "(batch.n_id % <class> == 0)",
        "($[:, 0] > $[:, 0].mean())", "torch.isin(batch.y, torch.tensor([0, 2]))", "(torch.arange(<size>) % 3 == 0)",
        "(batch.y < 3).logical_and(batch.x[:, 0] > 0)", "(batch.train_mask ^ (batch.y > 1))",
        "(batch.y != batch.y[0])", "batch.<mask>.roll(1)", "batch.<mask>.flip(0)",
        "(batch.x[:, 0] >= batch.x[:, 0].median())", "(batch.<mask>.cumsum(0) > 4)",
        "(F.one_hot(batch.y, CLASSES)[:, <class>] > 0)", "~(batch.val_mask | batch.test_mask)",
        "(degree(batch.edge_index[1], <size>) > 2)",
        "torch.zeros(<size>, dtype=torch.bool).index_fill(0, torch.tensor([1, 5, 9, 12]), True)",
        "torch.zeros_like(batch.<mask>).index_fill(0, batch.<mask>.nonzero().view(-1)[:5], True)",
    ],
    # Rows as an index; what is behind it has some of the rows, or all in another order.
    "index": [
        "<sel>", "<sel>", "<sel>.nonzero().view(-1)", "<sel>.nonzero(as_tuple=True)[0]", "torch.where(<sel>)[0]",
        "[3, 1, 7]", "torch.tensor([4, 4, 0])", "$[:, 0].argsort()[:10]", "$[:, 0].topk(6).indices", "[-1, 0]",
        "torch.randperm(<size>, generator=torch.Generator().manual_seed(1))[:9]", "batch.y.argsort(stable=True)",
        "(batch.n_id + 7) % <size>", "torch.arange(<size>)", "torch.arange(1, 9)", "<sel>.nonzero().view(-1)[:6]",
        "batch.<mask>.nonzero().squeeze()", "batch.edge_index[0, :12]", "torch.tensor([[0, 1], [2, 3]]).view(-1)",
        "torch.where(<sel>)[0].flip(0)", "torch.argsort($[:, 1], descending=True)", "$[:, 0].sort().indices[-8:]",
        "torch.unique(batch.edge_index[1])[:9]", "range(2, 8)",
    ],
    "slice": [":20", "::2", "5:", ":-3", "3:17:2", "-6:", ": len($) // 2", "-1:", "4:5"],
    "pick": ["<index>", "<index>", "<slice>"],
    # Rows of all nodes, and of some.
    "all": [
        "$", "$", "$.tanh()", "($ * <w>[:, None])", "($ - $.mean(0))", "(($ - $.mean(0)) / (1 + $.std(0)))",
        "F.normalize($, dim=1)", "F.normalize($, dim=0)", "$.softmax(1)", "$.softmax(0)", "$.log_softmax(0)",
        "$.clone()", "$.flip(0)", "$.roll(1, 0)", "torch.where(batch.<mask>[:, None], $, 0.5 * $)",
        "$.view(<size>, -1)", "($ - $[-1])", "($ + 0.1 * $.detach())", "$.masked_fill(batch.<mask>[:, None], 0.3)",
        "F.batch_norm($, None, None, training=True)", "F.layer_norm($, $.shape)", "F.layer_norm($, $.shape[1:])",
        "$.cumsum(0) / 10", "$.sort(0).values", "torch.stack([$, batch.x[:, :$.size(1)]]).mean(0)",
        "torch.cat([$[5:], $[:5]])", "($ @ $.t()).softmax(1) @ $",
        "scatter($[batch.edge_index[0]], batch.edge_index[1], dim=0, dim_size=<size>, reduce='<aggr>')",
        "scatter($, batch.y, dim=0, dim_size=CLASSES, reduce='mean')[batch.y]", "$.view(-1).view(<size>, -1)",
        "torch.zeros_like($).index_add(0, batch.edge_index[1], $[batch.edge_index[0]])", "$[batch.n_id]", "$.t().t()",
        "torch.lerp($, batch.x[:, :$.size(1)], 0.3)", "$.renorm(2, 0, 1.0)", "F.embedding(batch.n_id, $)",
        "$.gather(0, batch.n_id[:, None].expand(-1, $.size(1)))", "$.cummax(0).values", "F.pad($[1:], (0, 0, 1, 0))",
        "F.scaled_dot_product_attention($[None], $[None], <all>[None])[0]", "$.contiguous().view(<size>, -1)",
        "$[torch.randperm(<size>, generator=torch.Generator().manual_seed(2))]",
        "$.unsqueeze(1).expand(-1, 3, -1).mean(1)", "$.reshape(-1, 1, $.size(1)).squeeze(1)",
        "$.expand(2, -1, -1)[0]", "($ @ ($.t() @ $) / 50)", "$.transpose(0, 1).contiguous().t()",
        "torch.vstack([$[batch.n_id % 2 == 0], $[batch.n_id % 2 == 1]])",
        "torch.zeros(<size>, $.size(1)).double().scatter_add(0, batch.n_id[:, None].expand(-1, $.size(1)), $)",
        "torch.cat($.unbind(1)).view($.size(1), -1).t()", "torch.index_select($, 0, batch.y)", "$[batch.y]",
        "($ - nn.global_mean_pool($, batch.y)[batch.y])",
        "$.masked_scatter(batch.train_mask[:, None], batch.x[batch.train_mask, :$.size(1)])",
        "torch.stack([row * 2 for row in $.unbind(1)], 1)", "$.index_copy(0, torch.tensor([1, 5]), $[:2])",
        "$.diff(dim=0, prepend=$[:1])", "$.logcumsumexp(0)",
    ],
    "rows": [
        "<all>", "<all>[<pick>]", "<all>[<pick>]", "<all>[<pick>]", "$.chunk(2)[1]", "$[<sel>][:5]", "$.split(7)[2]",
        "torch.cat([$[<sel>], $[<sel>]])", "torch.cat([$, $.mean(0, keepdim=True)])",
        "torch.vstack([$[:3], $[<sel>]])", "$[<sel>].flip(0)", "$.repeat(2, 1)", "$.narrow(0, 2, 9)",
        "$.index_select(0, torch.tensor([5, 2, 2]))", "$[<sel>][:, 1:].contiguous()", "$[<sel>].view(-1, $.size(1))",
        "torch.cat($.chunk(3)[::2])", "$[<sel>].roll(1, 0)", "$.unflatten(1, (1, -1)).flatten(1)",
        "$.repeat_interleave(2, dim=0)", "$.view(-1)[: 4 * $.size(1)].view(4, -1)", "$[batch.edge_index[0]]",
        "$[batch.edge_index[1]][:15]", "torch.cat([$[batch.edge_index[0]], $])",
        "$[<sel>].t().reshape($.size(1), -1).t()", "$.masked_select(batch.train_mask[:, None]).view(-1, $.size(1))",
        "torch.cat([$[<slice>], $[<slice>]])",
    ],
    # What is the same on all ranks.
    "table": [
        "<rows>.mean(0)", "<rows>.mean(0)", "<rows>.sum(0) / <size>", "$[<sel>].std(0)",
        "<all>.var(0, unbiased=False)", "<all>.norm(dim=0)", "<rows>.max(0).values", "<rows>.amin(0)",
        "<rows>.logsumexp(0)", "<rows>.median(0).values", "<rows>.quantile(0.3, dim=0)", "<rows>.sort(0).values[0]",
        "<rows>.topk(1, 0).values[-1]", "<rows>.cumsum(0)[-1] / 10", "torch.var_mean($, 0)[0]",
        "torch.einsum('nf,ng->fg', $, <all>) / <size>", "torch.einsum('nf,n->f', $, <w>.double()) / 50",
        "F.one_hot(batch.y, CLASSES).double().t() @ <all> / 20", "$.t() @ batch.x / <size>", "<w>.double() @ $ / 50",
        "torch.cov($.t())", "torch.corrcoef($.t())",
        "scatter(<all>, batch.y, dim=0, dim_size=CLASSES, reduce='<aggr>')",
        "torch.zeros(CLASSES, $.size(1)).double().index_add_(0, batch.y, <all>) / 20",
        "torch.zeros(CLASSES).double().scatter_add(0, batch.y, <v>) / 20",
        "torch.zeros(CLASSES).double().scatter_reduce(0, batch.y, <v>, 'amax')", "nn.global_<pool>_pool($, None)",
        "nn.global_<pool>_pool(<all>, torch.zeros_like(batch.y))",
        "nn.global_mean_pool($, torch.zeros(<size>).long())", "nn.global_<pool>_pool(<all>, batch.y, CLASSES)",
        "torch.bincount(batch.y, minlength=CLASSES) / <size>", "torch.bincount(batch.y, weights=<w>) / 20",
        "batch.y.unique().double()", "batch.y.unique(return_counts=True)[1] / 20",
        "<v>[<index>].mean(0, keepdim=True)", "$[<sel>].mean(0) - $[batch.train_mask].mean(0)", "$[5]",
        "$[0] * $[-1]", "$[$[:, 0].argmax()]", "torch.stack([$[batch.y == c].mean(0) for c in range(CLASSES)])",
        "$.max(dim=0)[0]", "torch.quantile(<v>.detach(), torch.tensor([0.25, 0.75]).double())",
        "torch.linalg.vector_norm(<all>, 1, dim=0) / 50", "<rows>.kthvalue(1, dim=0).values", "<all>.prod(0).tanh()",
        "<rows>.nanmean(0)", "torch.stack(torch.aminmax(<all>, dim=0))", "torch.std_mean($, 0)[1]",
        "torch.tensordot($, <all>, dims=([0], [0])) / 50", "torch.bmm($.t()[None], <all>[None])[0] / 50",
        "<v>.histc(4, -2, 2) / <size>", "<v>.detach().topk(3).values",
        "torch.linalg.solve($.t() @ $ + torch.eye($.size(1)).double(), $.t() @ <all>)",
        "torch.linalg.eigvalsh($.t() @ $) / 50", "batch.y.mode().values * $.mean(0)",
        "torch.searchsorted(<v>.detach().sort().values, torch.tensor([-0.5, 0.5]).double()) / <size>",
        "torch.trapezoid($, dim=0) / 50", "<v>.argmax() / <size>", "$.median(0).indices.double() / <size>",
        "$.argsort(0)[0].double() / <size>", "<v>.cummin(0).values[-3:]", "torch.ones(<size>).double() @ $ / 50",
        "$.t()[:, batch.train_mask].sum(1) / 20", "F.linear($.t(), batch.x.t()) / 50",
        "torch.zeros(2, $.size(1)).double().index_put((batch.train_mask.long(),), $, accumulate=True) / 20",
        "F.normalize($.sum(0), dim=0)", "$.sum(0) / ($.abs().sum(0) + 1)", "$.max(0).values - $.min(0).values",
        "F.adaptive_avg_pool1d($.t()[None], 3)[0]",
    ],
    "pool": ["mean", "max", "add"],
    "edge": [
        "(<all>[batch.edge_index[0]] - $[batch.edge_index[1]]).pow(2).sum(-1)", "<v>[batch.edge_index[0]]",
        "($[batch.edge_index[0]] * <all>[batch.edge_index[1]]).sum(-1)",
        "(batch.y[batch.edge_index[0]] == batch.y[batch.edge_index[1]]).double()",
        "softmax($[batch.edge_index[0], 0], batch.edge_index[1], num_nodes=<size>)",
        "(batch.edge_index[0] < batch.edge_index[1]).double()", "$[batch.edge_index[1]][:, 0].sigmoid()",
        "degree(batch.edge_index[0], <size>)[batch.edge_index[1]].rsqrt().nan_to_num(posinf=0)",
    ],
    "number": [
        "<table>.tanh().mean()", "<table>.tanh().mean()", "<table>.tanh().pow(2).sum()", "<rows>.tanh().mean()",
        "<v>[<pick>].mean()", "<v>.sum() / <size>", "<v>[<index>].sum() / <count>", "<v>.tanh().std()", "<v>.var()",
        "<rows>.tanh().norm() / 10", "<v>.max().tanh()", "<v>.median()", "<v>.sort().values[:9].mean()",
        "<v>.topk(4).values.mean()", "<v>.quantile(0.6)", "(<v>.softmax(0) * <v>).sum()", "<v>.logsumexp(0)",
        "<v>.cumsum(0).mean() / 10", "(<v> * <sel>).sum() / <count>", "<edge>.mean()", "<edge>[:30].mean()",
        "<edge>.tanh().std()", "<edge>.sum() / <count>", "<edge>.max().tanh()", "($ @ $.t()).tanh().mean()",
        "($ @ <all>.t()).softmax(1).diagonal().mean()", "torch.cdist($, $[:4] + 1).tanh().mean()",
        "F.cross_entropy($ @ $.t(), torch.arange(<size>))",
        "($ @ $.t() - torch.eye(<size>).double()).tanh().pow(2).mean()",
        "F.cross_entropy(F.normalize($, dim=1) @ F.normalize(<all>, dim=1).t(), torch.arange(len($)))",
        "torch.where(<sel>, <v>, <v>).tanh().mean()", "(<v> > <v>.mean()).double().mean()", "<sel>.double().mean()",
        "<v>.mean() if len($[<sel>]) else <v>.sum()", "(<v> - <w>).tanh().mean()",
        "torch.dot(<v>, <w>.double()) / 100", "F.mse_loss(<all>[:6], <all>[[5, 4, 3, 2, 1, 0]]).tanh()",
        "($[:8] * $[8:16].flip(0)).mean()", "torch.outer(<v>, <w>).tanh().mean()",
        "torch.linalg.svdvals($.t() @ $ / <size>).sum()", "$.view(-1)[: $.size(1)].mean()", "<v>.view(-1, 1).mean()",
        "F.cosine_similarity(<v>, <w>, dim=0)", "F.pairwise_distance($, <all>).tanh().mean()",
        "<v>[1:].sub(<v>[:-1]).tanh().mean()", "torch.trace($ @ $.t()) / <size>",
        "($[:, None] - $[None]).pow(2).sum(-1).add(1).log().mean()",
        "torch.pdist($ + 0.1 * batch.x[:, :$.size(1)]).tanh().mean()",
        "((batch.y[:, None] == batch.y[None]) * ($ @ $.t())).tanh().mean()",
        "($ @ $.t()).masked_fill(torch.eye(<size>, dtype=torch.bool), -9.0).logsumexp(1).mean()",
        "($ @ $.t())[<sel>][:, <sel>].tanh().mean()", "($ @ $.t()).topk(3, dim=1).values.tanh().mean()",
        "($ @ $.t())[torch.triu_indices(<size>, <size>, 1).unbind()].tanh().mean()", "torch.dist($, <all>) / <size>",
        "<rows>.flatten().tanh().mean()", "<rows>.contiguous().view(-1).tanh().sum() / <count>",
        "sum($[i].tanh().sum() for i in range(3))", "$.sum().tanh()", "<edge>.sort().values[:9].tanh().mean()",
        "<edge>.median().tanh()", "(<edge> * <edge>).tanh().mean()", "<edge>[batch.edge_index[0] < 9].tanh().sum()",
        "<edge>.view(-1, 1).tanh().mean()",
        "scatter(<edge>, batch.edge_index[1], dim=0, dim_size=<size>, reduce='<aggr>').tanh().mean()",
        "softmax(<edge>, batch.edge_index[1], num_nodes=<size>).pow(2).sum() / <size>",
        "(scatter(<edge>, batch.edge_index[0], dim=0, dim_size=<size>) * <w>).tanh().mean()",
        "F.mse_loss($[:5], $[5:10]).tanh()", "math.log(len($)) * <v>.mean()",
        "<v>.double()[<sel>].var(0, unbiased=False)", "torch.stack([<v>.mean(), <v>.max()]).tanh().sum()",
        "max(float(<v>.max()), 0.0) * <v>.mean()", "sum(<v>[batch.y == c].mean() for c in batch.y.unique().tolist())",
    ],
    "plain": [
        "float(<number>)", "<number>.item()", "float(<count>)", "float((<sel> & batch.<mask>).sum())",
        "float(<size>)", "math.exp(-float($.std()))", "<number>.detach()", "(<number>).double()",
        "float($.argmax(1).bincount(minlength=8)[2])", "$.argmax(1)[batch.<mask>].double().mean()",
        "len(set(batch.y.unique().tolist())) / 2", "abs(<number>.item())",
    ],
    # Of a step.
    "labelled": [
        "out[mask], y[mask]", "out[mask], y[mask]", "out, y", "out[:20], y[:20]", "out[y != 2], y[y != 2]",
        "out[::2], y[::2]", "out[mask][:6], y[mask][:6]",
        "torch.cat([out[mask], out[~mask]]), torch.cat([y[mask], y[~mask]])",
        "out[mask.nonzero().view(-1)], y[mask.nonzero().view(-1)]", "out[y.argsort(stable=True)], y.sort().values",
        "out.flip(0), y.flip(0)", "out[mask], out[mask].softmax(1).detach().roll(1, 0)",
        "torch.cat([out, out * 2]), torch.cat([y, y])", "out, torch.where(mask, y, -100)",
        "out[mask], F.one_hot(y, CLASSES)[mask].double()",
    ],
    "hard": [
        "out[mask], y[mask]", "out, y", "out[:20], y[:20]", "out[y != 3], y[y != 3]", "out[mask][:6], y[mask][:6]",
        "out.flip(0), y.flip(0)",
    ],
    "two": [
        "out[mask], batch.x[mask, :CLASSES]", "out, batch.x[:, :CLASSES]", "out[:20], batch.x[:20, :CLASSES]",
        "out, out.mean(0).expand_as(out)", "out.std(0), batch.x[:, :CLASSES].std(0)", "out[:, 0], batch.x.mean(1)",
        "out - out.mean(0), batch.x[:, 3:]", "out, out.roll(1, 0)",
        "out[mask].mean(0), batch.x[mask].mean(0)[:CLASSES]", "out, out.flip(0).detach()",
        "out[::3], batch.x[::3, -CLASSES:]",
    ],
    "binary": [
        "out[mask, 0], (y[mask] > 2).double()", "out[:, 1], batch.train_mask.double()",
        "out, F.one_hot(y, CLASSES).double()", "out[mask], F.one_hot(y[mask], CLASSES).double()",
        "out[:, 0][::2], (y > 1).double()[::2]", "(out @ out.t())[:6], torch.eye(len(out))[:6].double()",
        "(out[batch.edge_index[0]] * out[batch.edge_index[1]]).sum(-1), "
        "torch.ones(batch.edge_index.size(1)).double()",
    ],
    "signs": ["((y > 1) * 2 - 1)", "torch.where(batch.train_mask, 1, -1)", "(mask.double() * 2 - 1)"],
    "weights": [
        "torch.arange(1.0, CLASSES + 1).double()",
        "len(y) / (CLASSES * torch.bincount(y, minlength=CLASSES).double())",
        "torch.tensor([1.0, 2.0, 1.0, 0.5, 3.0]).double()",
        "y.bincount(minlength=CLASSES).clamp(min=1).double().reciprocal()",
    ],
    "cost": [
        "F.cross_entropy(<labelled>)", "F.cross_entropy(<labelled>, label_smoothing=0.1)",
        "F.cross_entropy(<labelled>, weight=<weights>)", "F.cross_entropy(<hard>, ignore_index=<class>)",
        "F.cross_entropy(<hard>, weight=<weights>, ignore_index=1, label_smoothing=0.2)",
        "F.cross_entropy(<labelled>, reduction='sum') / <count>", "F.cross_entropy(<hard>, reduction='none').mean()",
        "F.cross_entropy(<hard>, weight=<weights>, reduction='none').pow(2).mean()",
        "F.cross_entropy(<hard>, reduction='none').topk(5).values.mean()",
        "torch.nn.CrossEntropyLoss(weight=<weights>)(<labelled>)",
        "torch.nn.CrossEntropyLoss(reduction='none')(<hard>).sort().values[2:-2].mean()",
        "F.nll_loss(out.log_softmax(-1)[mask], y[mask], weight=<weights>)",
        "F.nll_loss(out.log_softmax(1), y, reduction='sum') / <size>", "F.multi_margin_loss(<hard>)",
        "F.multi_margin_loss(<hard>, weight=<weights>, reduction='<less>').<less>()",
        "F.binary_cross_entropy_with_logits(<binary>)",
        "F.binary_cross_entropy_with_logits(<binary>, pos_weight=torch.tensor(2.0).double())",
        "F.binary_cross_entropy_with_logits(<binary>, reduction='<less>').<less>() / 10",
        "torch.nn.BCEWithLogitsLoss()(<binary>)",
        "F.binary_cross_entropy_with_logits(out, F.one_hot(y, CLASSES).double(), pos_weight=<weights>)",
        "F.binary_cross_entropy(out[mask].sigmoid(), F.one_hot(y, CLASSES)[mask].double())", "F.mse_loss(<two>)",
        "F.mse_loss(<two>).sqrt()", "F.l1_loss(<two>)", "F.smooth_l1_loss(<two>, beta=0.3)",
        "F.huber_loss(<two>, delta=0.3)", "F.mse_loss(<two>, reduction='<less>').<less>() / 50",
        "torch.nn.L1Loss(reduction='sum')(<two>) / <size>",
        "F.kl_div(out.log_softmax(1), batch.x[:, :CLASSES].softmax(1), reduction='batchmean')",
        "torch.nn.KLDivLoss(reduction='<less>')(out[mask].log_softmax(1), batch.x[mask, 3:].softmax(1)).<less>()",
        "F.poisson_nll_loss(out[mask].tanh(), batch.x[mask, :CLASSES].abs())",
        "F.gaussian_nll_loss(out, batch.x[:, :CLASSES], out.pow(2) + 0.1)",
        "F.hinge_embedding_loss(out[:, 0], <signs>)",
        "F.margin_ranking_loss(out[:, 0], out[:, 1], <signs>, margin=0.1)",
        "F.cosine_embedding_loss(out, batch.x[:, :CLASSES], <signs>)", "F.soft_margin_loss(out[:, 0], <signs>)",
        "F.triplet_margin_loss(out, batch.x[:, :CLASSES], out.roll(1, 0))",
        "F.multilabel_soft_margin_loss(out, F.one_hot(y, CLASSES).double())",
        "(F.cross_entropy(out, y, reduction='none') * mask).sum() / mask.sum()", "(<v> * <sel>).sum().pow(2) / 5000",
        "((1 - out.softmax(1).gather(1, y[:, None]).squeeze(1)).square() * F.cross_entropy(out, y, "
        "reduction='none'))[mask].mean()",
        "-(F.one_hot(y, CLASSES) * out.log_softmax(1)).sum(1)[mask].mean()",
        "-out.log_softmax(1)[torch.arange(len(y)), y].sum() / y.size(0)",
        "sum(F.cross_entropy(out[y == c], y[y == c]) for c in range(CLASSES)) / CLASSES",
        "(out - batch.x[:, :CLASSES]).pow(2).mean().sqrt()",
        "((out[mask] - batch.x[mask, :CLASSES]).pow(2).sum() / mask.sum()).sqrt()",
        "(out @ out.t())[mask][:, mask].logsumexp(1).mean() / 5",
    ],
    "less": ["sum", "mean"],
    "slope": [
        "loss", "out.tanh().mean(0).pow(2).sum()", "(out @ out.t()).pow(2).mean()", "out[<pick>].pow(3).mean()",
        "(out - out.mean(0)).pow(2).sum() / 50", "F.mse_loss(out, batch.x[:, :CLASSES])", "out.logsumexp(0).sum()",
        "F.cross_entropy(out[mask], y[mask])", "(out.softmax(0) * out).sum()",
    ],
    "how": [
        "sync_dist=True", "on_step=True, on_epoch=True", "on_step=False, on_epoch=True",
        "reduce_fx='<reduced>', on_epoch=True", "prog_bar=True", "batch_size=<size>", "on_epoch=True, sync_dist=True",
        "batch_size=int(mask.sum())",
    ],
    "reduced": ["sum", "max", "min", "mean"],
    "functional": [
        "functional.multiclass_accuracy(<hard>, CLASSES, average='macro')",
        "functional.multiclass_f1_score(<hard>, CLASSES)",
        "functional.multiclass_auroc(out[mask].softmax(-1), y[mask], CLASSES)",
        "functional.binary_auroc(out[:, 0].sigmoid(), (y > 2).long())",
        "functional.multiclass_confusion_matrix(<hard>, CLASSES).diag().double().mean()",
        "functional.multiclass_jaccard_index(<hard>, CLASSES)",
        "functional.multiclass_calibration_error(out.softmax(1), y, CLASSES)",
        "metrics.mean_squared_error(out[mask], batch.x[mask, :CLASSES])",
        "metrics.r2_score(out[:, 0], batch.x[:, 0])", "metrics.pearson_corrcoef(out[:, 0], batch.x[:, 0])",
        "metrics.explained_variance(out[:, 1], batch.x[:, 1])",
        "metrics.spearman_corrcoef(out[mask, 0], batch.x[mask, 0])", "metrics.mean_absolute_error(<two>)",
        "metrics.accuracy(out.argmax(1), y, 'multiclass', num_classes=CLASSES)",
    ],
    "counted": [
        "MulticlassAccuracy(CLASSES)", "MulticlassF1Score(CLASSES)", "MulticlassAUROC(CLASSES)",
        "MulticlassAccuracy(CLASSES, top_k=2)", "MulticlassJaccardIndex(CLASSES)",
        "MulticlassAveragePrecision(CLASSES)",
    ],
    "array": [
        "float(np.median(z#[:, 0]))", "float(np.linalg.svd(z# - z#.mean(0), compute_uv=False)[0])",
        "float(np.percentile(z#, 30))", "float(np.histogram(z#[:, 0], bins=4)[0].std())",
        "float(np.corrcoef(z#.T)[0, 1])", "float(np.sort(z#[:, 1])[:5].mean())",
        "float(np.linalg.norm(z#[:, None] - z#[None], axis=-1).mean())",
        "float(np.unique(z#.argmax(1), return_counts=True)[1].max())",
        "float(sum(np.linalg.norm(z#[i] - z#.mean(0)) for i in range(len(z#))))",
        "float(np.cov(z#, rowvar=False).trace())",
    ],
}  # fmt: skip
STATEMENTS: dict[str, list[str]] = {
    "row_layer": [
        "x = x + 0.1 * <all>", "x = 0.5 * x + <all>.tanh()", "x = x + 0.1 * <number>", "x = x * (1 + 0.1 * <number>)",
        "x = x + 0.1 * <rows>.mean(0)", "x = x / (1 + <count> / 100)", "x = x + 0.1 * <w>[:, None]",
        "x = torch.where(<sel>[:, None], x, 0.5 * x)", "x = x * <sel>[:, None] + 0.1 * x",
        "x = x * 1 ;; x[<pick>] *= 0.5", "x = x * 1 ;; x[<sel>] = 0.1", "x = x * 1 ;; x[<sel>] = x.detach().mean(0)",
        "x = x * 1 ;; x[:6] = batch.x[6:12]", "x = x * 1 ;; x -= x.mean(0)",
        "x = x * 1 ;; x.add_(<w>[:, None], alpha=0.1).mul_(0.9)", "x = x * 1 ;; x[:, 0] = <v>.tanh()",
        "x = x * 1 ;; first# = x[:, :2] ;; first#.mul_(0.5) ;; first#.add_(first#.mean(0))",
        "x = x * 1 ;; x.view(-1)[::3] *= 0.5", "x = x * 1 ;; x.data.mul_(0.9)",
        "mean#, std# = x.mean(0), x.std(0) ;; x = (x - mean#) / (1 + std#)",
        "norm# = x.norm(dim=1, keepdim=True).mean() ;; x = x / (1 + norm#)",
        "idx# = <index> ;; x = x.index_fill(0, torch.arange(len(x))[idx#], 0.2)",
        "idx# = <index> ;; x = x + x[idx#].mean(0) / max(1, len(x[idx#]))", "if len(x[<sel>]) == 0: x = 2 * x",
        "if <number> > 0: x = 0.5 * x", "if float(<v>.max()) > 0.1: x = x.tanh()",
        "for c in range(2): x = x + 0.1 * x[batch.y == c].mean(0)",
        "x = checkpoint(lambda x: x - 0.5 * x.mean(0), x, use_reentrant=False)",
        "x = checkpoint(lambda x: <all>, x, use_reentrant=False)",
        "init: self.lin# = torch.nn.Linear(8, 8) ;; "
        "x = x + checkpoint(lambda x: self.lin#(x - x.mean(0)).relu(), x, use_reentrant=False)",
        "init: self.lin# = torch.nn.Linear(8, 8) ;; x = x + self.lin#(<rows>.mean(0)).tanh()",
        "init: self.lin# = torch.nn.Linear(16, 8) ;; x = self.lin#(torch.cat([x, x.mean(0).expand_as(x)], -1))",
        "init: self.att# = torch.nn.Linear(8, 1) ;; x = x + (self.att#(x).softmax(0) * x).sum(0)",
        "init: self.centres# = torch.nn.Parameter(torch.eye(8)[:3]) ;; "
        "share# = (-torch.cdist(x, self.centres#)).softmax(1) ;; "
        "x = x + share# @ (share#.t() @ x) / (1 + share#.sum())",
        "init: self.gate# = torch.nn.Parameter(torch.ones(8)) ;; x = x * (self.gate# * x.mean(0)).sigmoid()",
        "init: self.emb# = torch.nn.Embedding(CLASSES, 8) ;; "
        "x = x + 0.1 * self.emb#(batch.y) * batch.train_mask[:, None]",
        "init: self.register_buffer('center#', torch.zeros(8)) ;; "
        "if self.training: self.center#.mul_(0.9).add_(0.1 * x.detach().mean(0)) ;; x = x - self.center#",
        "x = x + 0.1 * scatter(x[edge_index[0]], edge_index[1], dim=0, dim_size=<size>, reduce='<aggr>')",
        "source#, target# = edge_index ;; e# = (x[source#] * x[target#]).sum(-1) / 8 ;; "
        "a# = softmax(e#, target#, num_nodes=<size>) ;; "
        "x = x + scatter(a#[:, None] * x[source#], target#, dim=0, dim_size=<size>)",
        "deg# = degree(edge_index[1], <size>, x.dtype).clamp(min=1).rsqrt() ;; "
        "w# = deg#[edge_index[0]] * deg#[edge_index[1]] ;; "
        "x = x + scatter(w#[:, None] * x[edge_index[0]], edge_index[1], dim=0, dim_size=len(x))",
        "init: self.weighted# = nn.GCNConv(8, 8) ;; "
        "w# = (x[edge_index[0]] - x[edge_index[1]]).abs().sum(-1).neg().exp() ;; "
        "x = self.weighted#(x, edge_index, w#)",
        "init: self.weighted# = nn.GraphConv(8, 8) ;; w# = <edge>.tanh() ;; "
        "x = self.weighted#(x, edge_index, w#).tanh()",
        "init: self.conv# = nn.SAGEConv(8, 8) ;; keep# = <edge> > 0.3 ;; x = x + self.conv#(x, edge_index[:, keep#])",
        "x = Reversed.apply(x)", "x = x + 0.1 * Reversed.apply(<all>)",
        "if x.requires_grad: x.register_hook(lambda grad: <hooked>)",
        "x = x + 0.1 * torch.randn(8, generator=torch.Generator().manual_seed(3)).double()",
        "x = x + 0.1 * torch.randn(<size>, 1, generator=torch.Generator().manual_seed(3)).double()",
        "x = F.dropout(x, p=0.0, training=self.training) - <all>.mean(0)", "x = x + 0.1 * torch.rand(8)",
        "x = x + 0.1 * torch.from_numpy(gather_global(x).detach().numpy().mean(0))",
        "x = torch.stack([x, 0.5 * <all>]).sum(0)", "x = torch.cat([x[:, :4], <v>[:, None], x[:, 5:]], 1)",
        "x = x + 0.1 * F.one_hot(batch.y, 8).double() @ x[:8].detach()",
        "x = x.t().contiguous().view(8, -1).t().contiguous() * 0.9",
        "x = x * 1 ;; x[<index>] = 0.5 * x[<index>].mean(0)",
        "x = x * 1 ;; x.index_add_(0, torch.tensor([1, 1, 4]), 0.1 * batch.x[:3])",
        "x = x * 1 ;; x.masked_fill_(<sel>[:, None], 0.1)", "x = x * 1 ;; x[torch.arange(<size>), batch.y] += 0.5",
        "x = x * 1 ;; x.copy_(<all>)",
        "x = x * 1 ;; x.index_put_((<sel>.nonzero().view(-1)[:3],), torch.tensor(0.2).double())",
        "x = x * 1 ;; x.scatter_(1, batch.y[:, None], 0.5)",
        "x = x * 1 ;; top#, rest# = x[:4], x[4:] ;; top#.mul_(0.5) ;; rest#.add_(0.1)",
        "x = x * 1 ;; x.t()[0].mul_(0.5)", "x = x * 1 ;; x.select(1, 1).add_(<w>, alpha=0.1)",
        "h# = torch.zeros_like(x) ;; h#[<sel>] = 1 ;; x = x + 0.1 * h# * x.mean(0)",
        "h# = x.new_zeros(<size>, 8) ;; h#[:, :3] = x[:, :3] ;; x = x + h#.flip(0)",
        "h# = torch.empty(<size>, 8).double() ;; h#.copy_(x) ;; x = h# * 0.9",
        "mean# = <table> ;; x = x * (1 + 0.1 * mean#.tanh().mean())",
        "with torch.no_grad(): h# = <all> ;; x = x + 0.1 * h#",
        "init: self.multi# = torch.nn.MultiheadAttention(8, 2, batch_first=True) ;; "
        "x = x + self.multi#(x[None], x[None], x[None])[0][0]",
        "init: self.pool# = nn.aggr.<aggregation> ;; x = x + 0.1 * self.pool#(x, torch.zeros_like(batch.y))",
        "init: self.pool# = nn.aggr.<aggregation> ;; "
        "x = x + 0.1 * self.pool#(x[edge_index[0]], edge_index[1], dim_size=<size>)",
        "init: self.virtual# = torch.nn.Linear(8, 8) ;; x = x + self.virtual#(nn.global_<pool>_pool(x, None)).tanh()",
    ],
    "aggregation": [
        "MeanAggregation()", "MaxAggregation()", "StdAggregation()", "SoftmaxAggregation(learn=True)",
        "MedianAggregation()",
    ],
    "hooked": [
        "grad / (1e-3 + grad.norm())", "grad - grad.mean(0)", "grad.clamp(-0.01, 0.01)", "2 * grad",
        "grad / grad.abs().max().clamp(min=1e-3)",
        "grad * torch.linspace(0.5, 1, len(grad), dtype=grad.dtype).view(-1, 1)", "grad.cumsum(0) / 10",
    ],
    "row_loss": [
        "loss = <cost>", "loss = <cost>", "loss = <cost>", "loss = <cost> + 0.1 * <cost>",
        "loss = 0.5 * (<cost> + <cost>)", "loss = torch.stack([<cost>, <cost>]).mean()",
        "each = F.cross_entropy(out, y, reduction='none') ;; loss = each[<index>].mean()",
        "each = F.cross_entropy(out, y, reduction='none') ;; loss = (each * <w>.abs()).sum() / (1 + <w>.abs().sum())",
        "each = F.cross_entropy(out, y, reduction='none') ;; loss = each[each > each.detach().quantile(0.4)].mean()",
        "idx = <index> ;; loss = F.cross_entropy(out[idx], y[idx])",
        "idx = mask.nonzero().view(-1) ;; loss = out.pow(2).sum() if len(idx) == 0 else F.cross_entropy(out[idx], "
        "y[idx], reduction='sum') / len(idx)",
        "init: self.criterion = torch.nn.CrossEntropyLoss(weight=torch.arange(1.0, CLASSES + 1)) ;; "
        "loss = self.criterion(<labelled>)",
        "init: self.criterion = torch.nn.<criterion>() ;; loss = self.criterion(<two>)",
        "loss = <cost> ;; loss = loss / (loss.detach() + 1)",
        "loss = <cost> ;; loss = loss * (2 if loss.item() > 1 else 3)",
    ],
    "criterion": ["MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss"],
    "row_term": [
        "loss = loss + 0.1 * <number>", "loss = loss + 0.1 * <number>", "loss = loss + 0.1 * <number> ** 2",
        "loss = loss + 0.1 * <cost>", "loss = loss + 0.1 * <number> + 0.1 * <number>",
        "t# = <table>.tanh() ;; loss = loss + 0.1 * (t# * t#.detach()).sum()", "loss = loss * (1 + <count> / 1000)",
        "loss = loss + 0.1 * <number> / <count>",
        "s# = <sel> ;; loss = loss + 0.1 * (<v> * s#).sum() / s#.sum().clamp(min=1)",
        "with torch.no_grad(): t# = <number> ;; loss = loss * (1 + 0.1 * t#)", "if <number> > 0.2: loss = 2 * loss",
        "if <plain> > 1: loss = loss + 0.1 * out.pow(2).mean()", "loss = loss + 0.01 * <plain>",
        "p# = out.softmax(1).mean(0) ;; loss = loss + 0.1 * (p# * p#.log()).sum()",
        "idx# = <index> ;; loss = loss + 0.1 * out[idx#].pow(2).sum() / out[idx#].size(0)",
        "means# = scatter(out[mask], y[mask], dim=0, dim_size=CLASSES, reduce='mean') ;; "
        "loss = loss + 0.1 * F.cross_entropy(-torch.cdist(out + 1, means#), y)",
        "z# = F.normalize(out, dim=1) ;; loss = loss + 0.1 * F.cross_entropy(z# @ z#.t() / 0.5, "
        "torch.arange(<size>))",
        "z# = F.normalize(out[mask], dim=1) ;; "
        "loss = loss + 0.1 * F.cross_entropy(z# @ z#.t(), torch.arange(len(z#)))",
        "source#, target# = batch.edge_index ;; "
        "loss = loss + 0.1 * (out[source#] - out[target#]).pow(2).sum() / <size>",
        "loss = loss + 0.1 * checkpoint(lambda out: <number>, out, use_reentrant=False)",
        "h# = out.clone() ;; h#[<pick>] *= 0.5 ;; loss = loss + 0.1 * h#.mean(0).pow(2).sum()",
        "h# = torch.zeros_like(out) ;; h#[mask] = out[mask] ;; "
        "loss = loss + 0.1 * F.mse_loss(h#, batch.x[:, :CLASSES])",
        "h# = out.view(<size>, -1) * 1 ;; h#.sub_(h#.mean(0)) ;; loss = loss + 0.1 * h#.pow(2).mean()",
        "half# = torch.rand(<size>, generator=torch.Generator().manual_seed(1)) < 0.5 ;; "
        "loss = loss + 0.1 * out[half#].pow(2).mean()",
        "some# = torch.randperm(<size>)[:10] ;; loss = loss + 0.1 * out[some#].pow(2).mean()",
        "loss = loss + 0.1 * (out @ torch.randn(CLASSES).double()).pow(2).mean()",
        "loss = loss + 0.01 * sum(p.norm() for p in self.parameters()) * <number>",
        "loss = loss + 0.01 * self.head.weight.norm() * len(out) / 50",
        "if self.current_epoch == 1 and <number> > -5: return None", "if <number> < -1e6: return None",
        "loss = loss + 0.01 * float(np.median(gather_global(<all>).detach().numpy()))",
        "loss = loss + 0.1 * gather_global(<all>)[:7].tanh().mean()",
        "loss = loss + 0.1 * sum(out[i].tanh().sum() for i in range(3))",
        "loss = loss + 0.1 * F.mse_loss(Reversed.apply(out), batch.x[:, :CLASSES])",
        "lo#, hi# = out.min(0).values.detach(), out.max(0).values.detach() ;; "
        "loss = loss + 0.1 * ((out - lo#) / (hi# - lo# + 1)).mean()",
    ],
    "row_grad": [
        "grad#, = torch.autograd.grad(<slope>, out, create_graph=True) ;; loss = loss + 0.1 * grad#.pow(2).sum()",
        "grad#, = torch.autograd.grad(<slope>, out, create_graph=True) ;; "
        "loss = loss + 0.1 * (grad#.norm() - 1) ** 2",
        "grad#, = torch.autograd.grad(<slope>, out, retain_graph=True) ;; loss = loss + 0.1 * (grad# * out).sum()",
        "grad#, = torch.autograd.grad(<slope>, self.head.weight, retain_graph=True) ;; "
        "self.log('grad#', grad#.norm())",
        "grad#, = torch.autograd.grad(<slope>, self.head.weight, create_graph=True) ;; "
        "loss = loss + 0.1 * grad#.pow(2).sum()",
        "grads# = torch.autograd.grad(<slope>, [out, self.head.bias], retain_graph=True) ;; "
        "self.log('grad#', grads#[0].std() + grads#[1].sum())",
        "h# = out.detach().requires_grad_() ;; "
        "grad#, = torch.autograd.grad((h# - h#.mean(0)).pow(3).sum() / 50, h#) ;; "
        "loss = loss + 0.1 * (grad# * out).mean()",
        "m# = out.mean(0) ;; grad#, = torch.autograd.grad((out - m#).pow(3).mean() + m#.pow(2).sum(), m#, "
        "create_graph=True) ;; loss = loss + 0.1 * grad#.pow(2).sum()",
        "grad#, = torch.autograd.grad(out, self.head.bias, grad_outputs=out.detach().tanh(), "
        "retain_graph=True) ;; loss = loss + 0.01 * (grad# * self.head.bias).sum()",
        "out.register_hook(lambda grad: <hooked>)", "loss = 1 * loss ;; loss.register_hook(lambda grad: 0.5 * grad)",
        "m# = out.mean(0) ;; m#.register_hook(lambda grad: grad / (1e-3 + grad.norm())) ;; "
        "loss = loss + m#.pow(2).sum()",
        "seen# = [] ;; out.register_hook(lambda grad: seen#.append(grad.norm().item())) ;; "
        "torch.autograd.grad(loss, out, retain_graph=True) ;; self.log('seen#', seen#[0])",
        "out.retain_grad() ;; self.out# = out ;; "
        "on_after_backward: self.log('rowgrad#', self.out#.grad.norm() if self.out#.grad is not None else 0.0)",
        "on_train_start: self.head.weight.register_hook(lambda grad: grad / (1e-2 + grad.norm()))",
        "with torch.no_grad(): p# = self(batch).softmax(1) ;; "
        "loss = loss + 0.1 * F.kl_div(out.log_softmax(1), p#.roll(1, 0), reduction='batchmean')",
    ],
    "row_log": [
        "self.log('n#', <number>)", "self.log('n#', <number>)", "self.log('n#', <number>, <how>)",
        "self.log('n#', <number>, <how>)", "self.log('p#', <plain>, <how>)", "self.log('p#', <plain>)",
        "self.log('c#', <cost>, <how>)", "self.log('f#', <functional>, <how>)", "self.log('f#', <functional>)",
        "self.log_dict({'a#': <number>, 'b#': <plain>}, <how>)", "self.log('k#', float(<count>), <how>)",
        "if <number> > 0: self.log('if#', <plain>, <how>)",
        "pred# = out.argmax(1) ;; self.log('acc#', (pred#[<sel>] == y[<sel>][:1]).double().mean(), <how>)",
        "right# = (out.argmax(1) == y)[mask] ;; self.log('acc#', right#.sum() / len(right#), <how>)",
        "right# = (out.argmax(1) == y)[mask] ;; self.log('acc#', right#.sum().item() / max(1, int(mask.sum())))",
        "init: self.metric# = torchmetrics.classification.<counted> ;; self.metric#.update(<hard>) ;; "
        "self.log('metric#', self.metric#, <how>)",
        "init: self.metric# = torchmetrics.classification.<counted> ;; "
        "self.log('metric#', self.metric#(out[mask], y[mask]), <how>)",
        "init: self.metric# = torchmetrics.classification.MulticlassConfusionMatrix(CLASSES) ;; "
        "self.metric#.update(<hard>) ;; END: self.log('matrix#', "
        "self.metric#.compute().diag().double().mean()) ;; END: self.metric#.reset()",
        "init: self.metric# = torchmetrics.<held>() ;; self.metric#.update(<number>) ;; "
        "self.log('held#', self.metric#, <how>)",
        "init: self.metric# = torchmetrics.<held>() ;; self.metric#.update(<v>[<pick>]) ;; "
        "self.log('held#', self.metric#)",
        "init: self.metric# = torchmetrics.MeanMetric() ;; self.metric#.update(<v>, <w>.abs() + 1) ;; "
        "self.log('held#', self.metric#)",
        "init: self.metric# = torchmetrics.MeanMetric() ;; self.metric#.update(<number>, <count>) ;; "
        "self.log('held#', self.metric#)",
        "init: self.metric# = torchmetrics.CatMetric() ;; self.metric#.update(<v>[<pick>]) ;; "
        "END: self.log('cat#', self.metric#.compute().tanh().sum()) ;; END: self.metric#.reset()",
        "init: self.metric# = torchmetrics.CatMetric() ;; self.metric#.update(<number>) ;; "
        "END: self.log('cat#', self.metric#.compute().mean()) ;; END: self.metric#.reset()",
        "init: self.metric# = torchmetrics.<regression> ;; self.metric#.update(out[:, 0], <v>) ;; "
        "self.log('metric#', self.metric#)",
        "init: self.kept# = [] ;; self.kept#.append(<rows>.detach()) ;; "
        "END: self.log('kept#', torch.cat(self.kept#).tanh().<kept>) ;; END: self.kept#.clear()",
        "init: self.kept# = [] ;; self.kept#.append((out[mask].detach(), y[mask])) ;; "
        "END: z#, l# = map(torch.cat, zip(*self.kept#)) ;; "
        "END: self.log('kept#', functional.multiclass_f1_score(z#, l#, CLASSES)) ;; END: self.kept#.clear()",
        "init: self.kept# = [] ;; self.kept#.append(<number>.detach()) ;; "
        "END: self.log('kept#', torch.stack(self.kept#).mean()) ;; END: self.kept#.clear()",
        "init: self.best# = -1e9 ;; self.best# = max(self.best#, float(<number>)) ;; "
        "END: self.log('best#', self.best#)",
        "z# = gather_global(<all>).detach().numpy() ;; self.log('array#', <array>)",
        "z# = gather_global(out[mask]).detach().numpy() ;; self.log('array#', <array>, <how>)",
        "z#, l# = gather_global(out).detach().numpy(), gather_global(y).numpy() ;; "
        "centres# = np.stack([z#[l# == c].mean(0) for c in range(CLASSES)]) ;; "
        "self.log('nearest#', float((np.linalg.norm(z#[:, None] - centres#[None], axis=-1).argmin(1) == l#).mean()))",
    ],
    "held": ["MeanMetric", "SumMetric", "MaxMetric", "MinMetric"],
    "kept": ["mean()", "std()", "sum(0).norm()", "median()", "sort(0).values[:3].sum()", "cumsum(0).mean()", "max()"],
    "row_hook": [
        "on_train_batch_end: self.log('end#', outputs['loss'] + <number>)",
        "on_train_batch_end: self.log('end#', <plain>)", "on_train_batch_end: self.head.bias.data += 0.01 * <number>",
        "on_train_batch_end: if outputs['loss'] > <number>: self.head.bias.data += 0.1",
        "init: self.register_buffer('center#', torch.zeros(8)) ;; "
        "on_train_batch_end: self.center#.lerp_(<rows>.mean(0), 0.1)",
        "on_validation_batch_end: self.log('vend#', <number>, on_epoch=True)",
        "on_before_backward: self.log('before#', loss.exp())",
        "on_before_backward: self.bloss# = loss.detach() * 2 ;; on_after_backward: self.log('after#', self.bloss#)",
        "on_after_backward: self.log('gnorm#', "
        "torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None] or [torch.zeros(())]).norm())",
        "on_after_backward: self.head.weight.grad.div_(1 + self.head.weight.grad.norm())",
        "on_after_backward: self.log('g#', self.head.bias.grad.abs().max().item())",
        "on_after_backward: if self.head.weight.grad.norm() > 0.1: self.head.weight.grad.mul_(0.5)",
        "on_before_optimizer_step: optimizer.param_groups[0]['lr'] = 0.05 / (1 + "
        "float(self.head.weight.grad.norm()))",
        "init: self.kept# = [] ;; validation_step: self.kept#.append(<all>[mask]) ;; "
        "on_validation_epoch_end: z# = torch.cat(self.kept#) ;; "
        "on_validation_epoch_end: self.log('kept#', z#.tanh().<kept>) ;; on_validation_epoch_end: self.kept#.clear()",
        "init: self.kept# = [] ;; validation_step: self.kept#.append(out[mask].softmax(1)) ;; "
        "validation_step: self.label# = y[mask] ;; "
        "on_validation_epoch_end: self.log('auroc#', functional.multiclass_auroc(torch.cat(self.kept#), "
        "self.label#, CLASSES)) ;; on_validation_epoch_end: self.kept#.clear()",
        "init: self.kept# = [] ;; training_step: self.kept#.append(<all>.detach()) ;; "
        "on_train_epoch_end: self.log('kept#', torch.cat(self.kept#).tanh().<kept>) ;; "
        "on_train_epoch_end: self.kept#.clear()",
        "init: self.memory# = None ;; training_step: if self.memory# is not None: loss = loss + "
        "0.1 * F.mse_loss(out, self.memory#) ;; training_step: self.memory# = out.detach()",
        "init: self.memory# = None ;; training_step: self.memory# = <table>.detach() ;; "
        "on_train_epoch_end: self.log('memory#', self.memory#.tanh().sum())",
        "on_after_batch_transfer: batch.x = (batch.x - batch.x.mean(0)) / (1 + batch.x.std(0))",
        "on_after_batch_transfer: batch.x = <all>", "on_after_batch_transfer: batch.x[<sel>] = 0",
        "on_train_batch_start: batch.x = batch.x - batch.x[<sel>].mean(0)",
        "on_after_batch_transfer: batch.x = batch.x.clone() ;; on_after_batch_transfer: batch.x -= batch.x.mean(0)",
        "on_after_batch_transfer: batch.x = batch.x + 0.1 * <number>",
        "on_before_batch_transfer: batch.x = batch.x / batch.x.abs().max()",
    ],
    "row_optimizer": [
        "configure_optimizers: return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)",
        "configure_optimizers: return torch.optim.LBFGS(self.head.parameters(), lr=0.05, max_iter=2, history_size=3)",
        "init: self.automatic_optimization = False ;; opt = self.optimizers() ;; opt.zero_grad() ;; "
        "self.manual_backward(loss + 0.1 * <number>) ;; opt.step()",
        "init: self.automatic_optimization = False ;; opt = self.optimizers() ;; opt.zero_grad() ;; "
        "self.manual_backward(loss, retain_graph=True) ;; "
        "self.manual_backward(0.1 * (out - out.mean(0)).pow(2).mean()) ;; opt.step()",
        "init: self.automatic_optimization = False ;; opt = self.optimizers() ;; opt.zero_grad() ;; "
        "self.manual_backward(loss) ;; if self.head.weight.grad.norm() > 0.05: clip_grad_norm_(self.parameters(), "
        "0.05) ;; opt.step()",
        "init: self.automatic_optimization = False ;; opt = self.optimizers() ;; for _ in range(2): ;; "
        "    opt.zero_grad() ;;     again = self(batch) ;; "
        "    self.manual_backward(F.cross_entropy(again[mask], y[mask]) + 0.1 * again.std(0).sum()) ;; "
        "    opt.step()",
    ],
    "row_predict": [
        "return <all>", "return <rows>", "return <table>", "return {'out': out, 'mean': <table>}", "return <v>",
        "return out, <number>", "return <plain>", "return out[<sel>]", "return out - out.mean(0), batch.y",
        "keep = <sel> ;; return out[keep].softmax(1), batch.y[keep]", "return [<all>, <v>]",
        "return out.argmax(1)[<sel>]", "z = gather_global(out).numpy() ;; return float(np.median(z))",
        "return (out @ out.t()).argmax(1)", "return {'top': out[:, 0].topk(5).values, 'n': <count>}",
        "return out.cpu()[:10]", "return <sel>.double()",
    ],
    "small_data": [
        "data.train_mask[:] = False ;; data.train_mask[:6] = True",
        "data.train_mask = data.train_mask & (data.y < 3)", "data.x = data.x.abs()", "data.x[data.y == 1] = 0.1",
        "data = data.edge_subgraph(data.edge_index[0] > 10)", "data = T.ToUndirected()(data)",
    ],
    "graph": ["graph(48)", "graph(64, 3)", "graph(80)", "directed(48)", "directed(64, 3)", "directed(80)"],
    "scheme": [
        "dgcl", "dgcl", "dgcl", "cover", "spmm_1d", "spmm_15d", "spmm_15d", "vertex_cut", "vertex_cut",
        "vertex_cut_cached",
    ],
}  # fmt: skip
ROWS = {**GRAMMAR, **EXPRESSIONS, **STATEMENTS}
ROW_METHODS = {
    **METHODS,
    "row_layer": "forward",
    **dict.fromkeys(("row_loss", "row_term", "row_grad", "row_optimizer"), "training_step"),
    "row_log": "STEP",
    "row_predict": "predict_step",
    "small_data": "data",
}
KINDS = {
    "row_layer": 6, "mixing": 1, "row_term": 5, "row_grad": 2, "row_log": 6, "row_hook": 3, "row_loss": 3, "row_optimizer": 1,
}  # fmt: skip
"""What the statements are drawn from, as often."""
GRIDS = {"spmm_2d": 4, "spmm_3d": 8}
"""Schemes of a square or a cube of ranks, and how many these are."""


def draw(seed: int) -> Program:
    """Returns the program of a seed."""
    g = random.Random(f"rows {seed}")
    graph, stages = g.choice(ROWS["graph"]), g.choice(STAGES)
    kinds = g.choices([*KINDS], [*KINDS.values()], k=g.choice([2, 3, 4, 5]))
    if "predict" in stages and g.random() < 0.7:
        kinds[-1] = "row_predict"
    for kind in ("row_loss", "row_optimizer"):  # a step has one
        kinds = ["row_term" if each == kind in kinds[:place] else each for place, each in enumerate(kinds)]

    def once(kind: str, otherwise: list[str]) -> list[str]:
        return [kind] if kind in kinds else otherwise

    layers = ["conv"] * g.choice([1, 2]) + ["local", "norm"][: g.choice([0, 0, 1, 2])]
    layers += [kind for kind in kinds if kind in ("row_layer", "mixing")]
    g.shuffle(layers)
    other = [kind for kind in kinds if kind in ("row_term", "row_grad", "row_log", "row_hook")]
    other += ["log"] * (g.random() < 0.3) + ["hook"] * (g.random() < 0.15) + ["small_data"] * (g.random() < 0.15)
    g.shuffle(other)
    # A step's own backward comes behind what it adds to the loss.
    last = once("row_optimizer", ["optimizer"] * (g.random() < 0.4)) + once("row_predict", [])
    statements = tuple(
        _rows_named(statement(kind, _filled(g.choice(ROWS[kind]), g).replace("#", str(number)), stages, g, ROW_METHODS))
        for number, kind in enumerate(layers + once("row_loss", ["loss"]) + other + last)
    )
    scheme, partition = g.choice(ROWS["scheme"]), g.choice(ROWS["partition"])
    g = random.Random(f"ranks {seed}")  # so that a program of a seed stays what it was
    ranks = g.choices([1, 2, 3, 4], [1, 15, 2, 2])[0]
    for grid, size in GRIDS.items():
        if g.random() < 0.03:
            scheme, ranks = grid, size
    return Program(seed, scheme, partition, stages, graph, statements, IMPORTS + MORE_IMPORTS, ranks)


_BINDS = re.compile(r"^-|^~| ([-+*/@<>&|^]|==|!=|if) ")


def _filled(text: str, g: random.Random) -> str:
    """Returns a production without names of others, in parentheses where an operator or a dot is beside them."""
    while found := NAME.search(text):
        before, part, after = text[: found.start()], _filled(g.choice(ROWS[found[1]]), g), text[found.end() :]
        outside = part
        while (shorter := re.sub(r"[(\[{][^()\[\]{}]*[)\]}]", "", outside)) != outside:
            outside = shorter
        beside = re.match(r"[.\[]| ([-+*/@<>&|^]|[=!]=|if) ", after) or re.search(r"[-+*/@<>&|^~] ?$", before)
        text = before + (f"({part})" if beside and _BINDS.search(outside) else part) + after
    return text


def _rows_named(whole: Statement) -> Statement:
    """Returns a statement with the name of a method's rows in place of ``$``."""
    names = {"forward": "x", **{step: "out" for step in FIRST if step.endswith("_step")}}
    lines = tuple((method, line.replace("$", names.get(method, "batch.x"))) for method, line in whole.lines)
    return replace(whole, lines=lines)
