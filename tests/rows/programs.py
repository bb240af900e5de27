"""Small step programs, as plain data: forms that a training step may have, and what each gives on one device.

A program takes a net and a batch, ``program(net, g)``, and draws no random numbers. It returns a scalar with a gradient, which is
differentiated, or tensors, numbers and strings without one, which are compared. Most are one expression of what the net gives,
``lambda r, g: ...``, see :class:`Made`.

``g`` has N nodes and E edges: ``x [N, 8]``, ``target [N, 4]`` and ``t [N]``, float64, the last with ties; ``y [N]`` of 4 classes;
``train_mask``, ``val_mask``, ``test_mask`` and ``n_id``, ``[N]``; ``edge_index [2, E]``. ``python -m rows.programs`` in the
folder of the tests runs all of them.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torchmetrics.functional as metrics
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv, global_add_pool, global_max_pool, global_mean_pool
from torch_geometric.utils import degree, scatter, to_dense_batch
from torch_geometric.utils import softmax as softmax_by

FEATURES, CLASSES, NODES = 8, 4, 41

# What programs get #############################################################


class Net(torch.nn.Module):
    """Two convs and a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = SAGEConv(FEATURES, FEATURES), SAGEConv(FEATURES, CLASSES)
        self.head = torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.b(self.a(x, edge_index).relu(), edge_index)


def make_net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net().double()


def make_graph() -> Data:
    """Returns a directed graph with self-loops, duplicate edges and isolated nodes, in any order."""
    draw = torch.Generator().manual_seed(3)
    edge_index = torch.randint(0, NODES - 5, (2, 150), generator=draw)
    edge_index = torch.cat([edge_index, torch.arange(4).repeat(2, 1), edge_index[:, :10]], 1)
    split = torch.rand(NODES, generator=draw)
    return Data(
        x=torch.randn(NODES, FEATURES, generator=draw, dtype=torch.float64),
        edge_index=edge_index,
        y=torch.randint(0, CLASSES, (NODES,), generator=draw),
        target=torch.randn(NODES, CLASSES, generator=draw, dtype=torch.float64),
        t=torch.randint(-6, 7, (NODES,), generator=draw).double() / 4,
        train_mask=split < 0.5,
        val_mask=(split >= 0.5) & (split < 0.75),
        test_mask=split >= 0.75,
        n_id=torch.arange(NODES),
    )


class _kept:
    """functools.cached_property without its lock, which would hold up ranks that are threads."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __get__(self, instance: Any, owner: Any) -> Any:
        found = instance.__dict__[self.function.__name__] = self.function(instance)
        return found


class Made:
    """What programs take of a net and a batch; each is computed once, when it is first asked for."""

    def __init__(self, net: Net, g: Any) -> None:
        self.net, self._g = net, g

    @_kept
    def h(self) -> Tensor:
        """Hidden rows, ``[N, 8]``; half of the entries are 0."""
        return self.net.a(self._g.x, self._g.edge_index).relu()

    @_kept
    def s(self) -> Tensor:
        """Hidden rows without ties, ``[N, 8]``."""
        return self.net.a(self._g.x, self._g.edge_index).tanh()

    @_kept
    def z(self) -> Tensor:
        """Logits, ``[N, 4]``."""
        return self.net.b(self.h, self._g.edge_index)

    @_kept
    def losses(self) -> Tensor:
        """The loss of each row, ``[N]``."""
        return F.cross_entropy(self.z, self._g.y, reduction="none")

    @_kept
    def loss(self) -> Tensor:
        """The loss of the training rows."""
        return F.cross_entropy(self.z[self._g.train_mask], self._g.y[self._g.train_mask])

    @_kept
    def tied(self) -> Tensor:
        """A number for each row, ``[N]``, with ties between rows whose gradients differ."""
        return self._g.t + (self.z[:, 0] - self.z[:, 0].detach())


Program = Callable[[Net, Any], Any]
Expression = Callable[[Made, Any], Any]
FORMS: dict[str, dict[str, Expression]] = defaultdict(dict)
"""Programs by group and name."""


def form(group: str) -> Callable[[Expression], Expression]:
    """Adds a function under its own name."""

    def added(function: Expression) -> Expression:
        assert function.__name__ not in FORMS[group]
        FORMS[group][function.__name__] = function
        return function

    return added


def all_programs() -> dict[str, Program]:
    """Returns all programs, by ``"group: name"``."""
    return {
        f"{group}: {name}": lambda net, g, expression=expression: expression(Made(net, g), g)
        for group, expressions in FORMS.items()
        for name, expression in expressions.items()
    }


# The runner ####################################################################


@dataclass(frozen=True)
class Result:
    """What a program gave.

    Attributes:
        value: what it returned, without a gradient.
        gradients: of the net's parameters, by name, None where there is none; empty if it returned nothing with a gradient.
    """

    value: Any
    gradients: dict[str, Tensor | None]


def evaluate(run: Program, net: Net, g: Any) -> Result:
    """Runs a program on a net and a batch, both of which it may change, and differentiates what it returns."""
    value = run(net, g)
    if not isinstance(value, Tensor) or not value.requires_grad:
        return Result(value, {})
    assert value.dim() == 0, f"a program returned {tuple(value.shape)} with a gradient: return a scalar, or detach it"
    value.backward()
    return Result(value.detach(), {name: parameter.grad for name, parameter in net.named_parameters()})


def reference(run: Program) -> Result:
    """Returns what a program gives on one device."""
    return evaluate(run, make_net(), make_graph())


def assert_same(found: Any, expected: Any, name: str = "", rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """Compares results, or values in lists, tuples and dicts; texts and whole numbers must be equal, float32 to its digits."""
    if isinstance(expected, Result):
        assert_same(found.value, expected.value, f"{name}, value", rtol, atol)
        assert_same(found.gradients, expected.gradients, f"{name}, gradients", rtol, atol)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{name}: {[*found]} in place of {[*expected]}"
        for key in expected:
            assert_same(found[key], expected[key], f"{name}, {key}", rtol, atol)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{name}: {len(found)} in place of {len(expected)}"
        for place, (one, other) in enumerate(zip(found, expected)):
            assert_same(one, other, f"{name}, {place}", rtol, atol)
    elif isinstance(expected, Tensor):
        if expected.dtype == torch.float32:
            rtol, atol = max(rtol, 1e-5), max(atol, 1e-6)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{name}: {m}")
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=rtol, abs_tol=atol), f"{name}: {found} in place of {expected}"
    else:
        assert found == expected, f"{name}: {found!r} in place of {expected!r}"


def check_one(name: str, run: Program) -> None:
    """Raises unless a program runs on one device, twice alike, and gives finite values, and gradients that are not all 0."""
    found = reference(run)
    assert_same(reference(run), found, name, 0.0, 0.0)
    for what, value in {"value": found.value, **found.gradients}.items():
        for tensor in _tensors(value):
            assert bool(tensor.isfinite().all()), f"{name}: {what} is not finite"
    if found.gradients:
        sizes = [float(grad.abs().max()) for grad in found.gradients.values() if grad is not None]
        assert max(sizes, default=0.0) > 1e-9, f"{name}: all gradients are 0"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return [torch.as_tensor(value)] if isinstance(value, (Tensor, float)) else []


def main() -> None:
    torch.set_num_threads(1)
    for name, run in all_programs().items():
        check_one(name, run)
    for group, expressions in FORMS.items():
        print(f"{len(expressions):4} {group}")
    print(f"{len(all_programs()):4} in all")


# What programs share ###########################################################


def dot(value: Tensor) -> Tensor:
    """Returns a sum of what is not of rows, whose gradient differs from entry to entry."""
    weights = torch.linspace(1, 2, value.numel(), dtype=value.dtype)
    return (value * weights.view(value.shape)).sum()


def of_rows(value: Tensor, g: Any) -> Tensor:
    """Returns a sum of rows, ``[N, 8]``, ``[N, 4]`` or ``[N]``, whose gradient differs from entry to entry."""
    weights = g.t if value.dim() == 1 else g.x[:, : value.size(1)]
    return (value * weights).sum()


def signs(y: Tensor) -> Tensor:
    return (y > 1).double() * 2 - 1


def hot(y: Tensor) -> Tensor:
    return F.one_hot(y, CLASSES).double()


def by_class(weights: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64)


# Losses ########################################################################


def rows_of(r: Made, g: Any, mask: Tensor | None = None) -> SimpleNamespace:
    """Returns what losses take, of the rows in a mask, or of all."""
    found = {"z": r.z, "y": g.y, "target": g.target, "t": g.t}
    return SimpleNamespace(**(found if mask is None else {name: value[mask] for name, value in found.items()}))


def of_ctc(r: Any) -> tuple[Tensor, ...]:
    """Rows as sequences of three, which end in one class each."""
    log_probabilities = r.z.log_softmax(1).unsqueeze(0).expand(3, -1, -1)
    lengths = torch.full((len(r.y),), 3), torch.ones_like(r.y)
    return (log_probabilities, r.y.clamp(min=1).unsqueeze(1), *lengths)


LOSSES: dict[str, tuple[Any, Any, Callable[[Any], tuple[Tensor, ...]]]] = {
    "cross entropy": (F.cross_entropy, torch.nn.CrossEntropyLoss, lambda r: (r.z, r.y)),
    "nll": (F.nll_loss, torch.nn.NLLLoss, lambda r: (r.z.log_softmax(1), r.y)),
    "bce": (F.binary_cross_entropy, torch.nn.BCELoss, lambda r: (r.z[:, 0].sigmoid(), (r.y > 1).double())),
    "bce with logits": (F.binary_cross_entropy_with_logits, torch.nn.BCEWithLogitsLoss, lambda r: (r.z, hot(r.y))),
    "mse": (F.mse_loss, torch.nn.MSELoss, lambda r: (r.z, r.target)),
    "l1": (F.l1_loss, torch.nn.L1Loss, lambda r: (r.z, r.target)),
    "smooth l1": (F.smooth_l1_loss, torch.nn.SmoothL1Loss, lambda r: (r.z, r.target)),
    "huber": (F.huber_loss, torch.nn.HuberLoss, lambda r: (r.z[:, 0], r.t)),
    "kl div": (F.kl_div, torch.nn.KLDivLoss, lambda r: (r.z.log_softmax(1), r.target.softmax(1))),
    "poisson nll": (F.poisson_nll_loss, torch.nn.PoissonNLLLoss, lambda r: (r.z, r.target.abs())),
    "gaussian nll": (F.gaussian_nll_loss, torch.nn.GaussianNLLLoss, lambda r: (r.z, r.target, r.z.square() + 0.1)),
    "hinge embedding": (F.hinge_embedding_loss, torch.nn.HingeEmbeddingLoss, lambda r: (r.z[:, 0], signs(r.y))),
    "margin ranking": (F.margin_ranking_loss, torch.nn.MarginRankingLoss, lambda r: (r.z[:, 0], r.z[:, 1], signs(r.y))),
    "cosine embedding": (F.cosine_embedding_loss, torch.nn.CosineEmbeddingLoss, lambda r: (r.z, r.target, signs(r.y))),
    "triplet margin": (F.triplet_margin_loss, torch.nn.TripletMarginLoss, lambda r: (r.z, r.target, r.z.roll(1, 1))),
    "triplet margin with distance": (
        F.triplet_margin_with_distance_loss,
        torch.nn.TripletMarginWithDistanceLoss,
        lambda r: (r.z, r.target, r.z.roll(1, 1)),
    ),
    "multi margin": (F.multi_margin_loss, torch.nn.MultiMarginLoss, lambda r: (r.z, r.y)),
    "multilabel margin": (
        F.multilabel_margin_loss,
        torch.nn.MultiLabelMarginLoss,
        lambda r: (r.z, F.pad(r.y.unsqueeze(1), (0, 3), value=-1)),
    ),
    "multilabel soft margin": (
        F.multilabel_soft_margin_loss,
        torch.nn.MultiLabelSoftMarginLoss,
        lambda r: (r.z, hot(r.y)),
    ),
    "soft margin": (F.soft_margin_loss, torch.nn.SoftMarginLoss, lambda r: (r.z[:, 0], signs(r.y))),
    "ctc": (F.ctc_loss, torch.nn.CTCLoss, of_ctc),
}
"""By name: the function, its module, and what both take."""


def of_function(function: Any, inputs: Any, reduction: str, r: Made, g: Any) -> Tensor:
    """The loss of training rows."""
    return function(*inputs(rows_of(r, g, g.train_mask)), reduction=reduction).mean()


def of_module(module: Any, inputs: Any, reduction: str, r: Made, g: Any) -> Tensor:
    """The loss of all rows."""
    return module(reduction=reduction)(*inputs(rows_of(r, g))).mean()


for _name, (_function, _module, _inputs) in LOSSES.items():
    for _reduction in ("mean", "sum", "none", *(["batchmean"] if _name == "kl div" else [])):
        _text = f"{_name}, {'none, then mean' if _reduction == 'none' else _reduction}"
        FORMS["losses: functions"][_text] = partial(of_function, _function, _inputs, _reduction)
        FORMS["losses: modules"][_text] = partial(of_module, _module, _inputs, _reduction)


@form("losses: modules")
def adaptive_log_softmax(r: Made, g: Any) -> Tensor:
    kind, options = torch.nn.AdaptiveLogSoftmaxWithLoss, {"cutoffs": [2], "dtype": torch.float64}
    module = torch.nn.utils.skip_init(kind, FEATURES, CLASSES, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return module(r.h, g.y).loss


if hasattr(F, "linear_cross_entropy"):
    for _reduction in ("mean", "sum", "none"):
        FORMS["losses: functions"][f"linear cross entropy, {_reduction}"] = lambda r, g, reduction=_reduction: (
            F.linear_cross_entropy(r.h, r.net.head.weight, g.y, linear_bias=r.net.head.bias, reduction=reduction).mean()
        )

FORMS["losses: arguments"] |= {
    "weight": lambda r, g: F.cross_entropy(r.z, g.y, weight=by_class()),
    "weight, sum": lambda r, g: F.cross_entropy(r.z, g.y, weight=by_class(), reduction="sum"),
    "weight, none": lambda r, g: F.cross_entropy(r.z, g.y, weight=by_class(), reduction="none").mean(),
    "weight of a module": lambda r, g: torch.nn.CrossEntropyLoss(by_class())(r.z, g.y),
    "weight by how many": lambda r, g: F.cross_entropy(
        r.z, g.y, weight=len(g.y) / (CLASSES * torch.bincount(g.y, minlength=CLASSES).double())
    ),
    "ignore_index": lambda r, g: F.cross_entropy(r.z, g.y, ignore_index=2),
    "ignore_index of a module": lambda r, g: torch.nn.CrossEntropyLoss(ignore_index=0)(r.z, g.y),
    "ignored outside the mask": lambda r, g: F.cross_entropy(
        r.z, torch.where(g.train_mask, g.y, torch.full_like(g.y, -100))
    ),
    "label_smoothing": lambda r, g: F.cross_entropy(r.z, g.y, label_smoothing=0.1),
    "weight, ignore_index and label_smoothing": lambda r, g: F.cross_entropy(
        r.z[g.train_mask], g.y[g.train_mask], weight=by_class(), ignore_index=1, label_smoothing=0.2
    ),
    "probabilities": lambda r, g: F.cross_entropy(r.z, g.target.softmax(1)),
    "probabilities, sum": lambda r, g: F.cross_entropy(r.z, g.target.softmax(1), reduction="sum"),
    "probabilities, none": lambda r, g: F.cross_entropy(r.z, hot(g.y), reduction="none").mean(),
    "probabilities and weight": lambda r, g: F.cross_entropy(r.z, g.target.softmax(1), weight=by_class()),
    "probabilities and label_smoothing": lambda r, g: F.cross_entropy(r.z, hot(g.y), label_smoothing=0.3),
    "two losses a row": lambda r, g: F.cross_entropy(
        r.z.view(-1, 2, 2), torch.stack([g.y, 3 - g.y], 1) % 2, weight=by_class((1.0, 3.0))
    ),
    "nll, weight and ignore_index": lambda r, g: F.nll_loss(r.z.log_softmax(1), g.y, weight=by_class(), ignore_index=3),
    "nll of a module, weight, sum": lambda r, g: torch.nn.NLLLoss(by_class(), reduction="sum")(
        F.log_softmax(r.z, dim=-1), g.y
    ),
    "bce, weight by row": lambda r, g: F.binary_cross_entropy(
        r.z[:, 0].sigmoid(), (g.y > 1).double(), weight=g.t.abs()
    ),
    "pos_weight": lambda r, g: F.binary_cross_entropy_with_logits(r.z, hot(g.y), pos_weight=by_class()),
    "pos_weight of a module": lambda r, g: torch.nn.BCEWithLogitsLoss(pos_weight=by_class())(r.z, hot(g.y)),
    "pos_weight by how many": lambda r, g: F.binary_cross_entropy_with_logits(
        r.z[:, 0], (g.y > 1).double(), pos_weight=(g.y <= 1).sum() / (g.y > 1).sum().double()
    ),
    "weight and pos_weight": lambda r, g: F.binary_cross_entropy_with_logits(
        r.z, hot(g.y), weight=g.t.abs().unsqueeze(1), pos_weight=by_class(), reduction="sum"
    ),
    "kl div, log_target": lambda r, g: F.kl_div(
        r.z.log_softmax(1), g.target.log_softmax(1), reduction="batchmean", log_target=True
    ),
    "kl div, log_target, mean": lambda r, g: torch.nn.KLDivLoss(log_target=True)(
        r.z.log_softmax(1), g.target.log_softmax(1)
    ),
    "poisson nll, full": lambda r, g: F.poisson_nll_loss(r.z.exp(), g.target.abs() * 3, log_input=False, full=True),
    "gaussian nll, full": lambda r, g: F.gaussian_nll_loss(r.z[:, :1], g.target[:, :1], r.z[:, 1:2].exp(), full=True),
    "smooth l1, beta": lambda r, g: F.smooth_l1_loss(r.z, g.target, beta=0.3),
    "huber, delta": lambda r, g: F.huber_loss(r.z, g.target, delta=0.3, reduction="sum"),
    "multi margin, p and weight": lambda r, g: F.multi_margin_loss(r.z, g.y, p=2, margin=0.5, weight=by_class()),
    "multilabel soft margin, weight": lambda r, g: F.multilabel_soft_margin_loss(r.z, hot(g.y), weight=by_class()),
    "cosine embedding, margin": lambda r, g: F.cosine_embedding_loss(
        r.z, g.target, signs(g.y), margin=0.2, reduction="sum"
    ),
    "triplet margin, swap": lambda r, g: F.triplet_margin_loss(r.z, g.target, r.z.flip(1), margin=2.0, p=1, swap=True),
    "triplet margin with a distance": lambda r, g: F.triplet_margin_with_distance_loss(
        r.z, g.target, r.z.roll(1, 1), distance_function=lambda a, b: 1 - F.cosine_similarity(a, b)
    ),
    "column targets that broadcast": lambda r, g: F.mse_loss(r.z, g.t.unsqueeze(1).expand(-1, CLASSES)),
    "targets that are one row": lambda r, g: F.mse_loss(r.z, by_class().expand(len(g.y), -1)),
}
if "weight" in inspect.signature(F.mse_loss).parameters:
    FORMS["losses: arguments"] |= {
        "mse, weight by row": lambda r, g: F.mse_loss(r.z, g.target, weight=g.t.abs().unsqueeze(1).expand(-1, CLASSES))
    }

FORMS["losses: several, over different rows"] |= {
    "two masks": lambda r, g: r.loss + 0.5 * F.cross_entropy(r.z[g.val_mask], g.y[g.val_mask]),
    "a mask and all rows": lambda r, g: r.loss + 0.1 * F.mse_loss(r.net.head(r.h), g.target),
    "a sum and a mean": lambda r, g: r.loss + 0.01 * F.mse_loss(r.z, g.target, reduction="sum"),
    "without one class": lambda r, g: F.cross_entropy(r.z[g.y != 2], g.y[g.y != 2]),
    "without one class, in the mask": lambda r, g: F.cross_entropy(
        r.z[g.train_mask & (g.y != 2)], g.y[g.train_mask & (g.y != 2)]
    ),
    "without one class, twice indexed": lambda r, g: F.cross_entropy(
        r.z[g.train_mask][g.y[g.train_mask] != 1], g.y[g.train_mask][g.y[g.train_mask] != 1]
    ),
    "a mean by class": lambda r, g: sum(F.cross_entropy(r.z[g.y == c], g.y[g.y == c]) for c in range(4)) / 4,
    "the row losses of one mask over those of another": lambda r, g: (
        F.cross_entropy(r.z, g.y, reduction="none")[g.train_mask].mean()
        / F.cross_entropy(r.z, g.y, reduction="none")[g.val_mask].detach().mean()
    ),
    "of the first and of the last layer": lambda r, g: r.loss + F.cross_entropy(r.net.head(r.h), g.y),
    "of columns": lambda r, g: sum(F.mse_loss(r.z[:, c], g.target[:, c]) * c for c in range(CLASSES)),
    "stacked": lambda r, g: torch.stack([r.loss, F.l1_loss(r.z, g.target)]).mean(),
    "the largest of two": lambda r, g: torch.max(r.loss, F.l1_loss(r.z, g.target)),
    "of distilled rows": lambda r, g: (
        r.loss + 4 * F.kl_div((r.z / 2).log_softmax(1), (g.target / 2).softmax(1), reduction="batchmean")
    ),
    "of one row": lambda r, g: F.cross_entropy(r.z[7:8], g.y[7:8]),
    "focal": lambda r, g: (
        (1 - r.z.softmax(1).gather(1, g.y.unsqueeze(1)).squeeze(1)).square()
        * F.cross_entropy(r.z, g.y, reduction="none")
    ).mean(),
    "of confident rows": lambda r, g: (
        F.cross_entropy(r.z, r.z.argmax(1), reduction="none") * (r.z.softmax(1).amax(1) > 0.4)
    ).mean(),
}

# Sums and means by hand ########################################################

FORMS["sums and means by hand"] |= {
    "masked, over the mask": lambda r, g: (r.losses * g.train_mask).sum() / g.train_mask.sum(),
    "masked, over the mask as numbers": lambda r, g: (
        (r.losses * g.train_mask.double()).sum() / g.train_mask.double().sum().clamp(min=1)
    ),
    "masked, over its mean": lambda r, g: (r.losses * g.train_mask / g.train_mask.double().mean()).mean(),
    "masked, over count_nonzero": lambda r, g: r.losses[g.train_mask].sum() / torch.count_nonzero(g.train_mask),
    "weighted mean": lambda r, g: (r.losses * g.t.abs()).sum() / g.t.abs().sum(),
    "rmse": lambda r, g: (r.z - g.target).square().mean().sqrt(),
    "rmse of a mask": lambda r, g: torch.sqrt(F.mse_loss(r.z[g.val_mask], g.target[g.val_mask])),
    "rmse over a deviation": lambda r, g: (r.z - g.target).pow(2).mean().sqrt() / g.target.std(),
    "mean absolute error": lambda r, g: (r.z - g.target).abs().mean(),
    "log likelihood": lambda r, g: -(hot(g.y) * r.z.log_softmax(1)).sum(1).mean(),
    "gathered": lambda r, g: -r.z.log_softmax(1).gather(1, g.y.view(-1, 1)).mean(),
    "picked": lambda r, g: -r.z.log_softmax(1)[range(len(g.y)), g.y].mean(),
    "picked by arange": lambda r, g: -r.z.log_softmax(1)[torch.arange(len(g.y)), g.y].mean(),
    "over size(0)": lambda r, g: r.losses.sum() / r.losses.size(0),
    "over len of an index": lambda r, g: r.losses[g.train_mask.nonzero().view(-1)].sum() / len(g.train_mask.nonzero()),
    "over shape[0]": lambda r, g: r.losses.sum() / g.x.shape[0],
    "over shape[0] of masked rows": lambda r, g: r.losses[g.val_mask].sum() / g.x[g.val_mask].shape[0],
    "over numel": lambda r, g: (r.z - g.target).square().sum() / g.target.numel(),
    "over the product of a shape": lambda r, g: r.z.square().sum() / math.prod(r.z.shape),
    "over num_nodes": lambda r, g: r.losses.sum() / g.num_nodes,
    "over num_edges": lambda r, g: r.losses.sum() / g.num_edges,
    "over a row's sum": lambda r, g: (r.h / (r.h.sum(1, keepdim=True) + 1)).square().sum(),
    "over the sum of all rows": lambda r, g: of_rows(r.s / r.s.abs().sum(0), g),
    "the sum of a sum": lambda r, g: r.z.square().sum(0).sum(),
    "the mean of means": lambda r, g: r.z.square().mean(1).mean(0),
    "the mean of the largest": lambda r, g: r.z.max(1).values.mean() - r.z.min(1)[0].mean(),
    "the product of two means": lambda r, g: r.z.mean() * r.h.mean(),
    "a mean minus its square": lambda r, g: r.z.square().mean() - r.z.mean().square(),
    "torch functions": lambda r, g: torch.div(torch.sum(torch.mul(r.losses, g.t)), torch.sum(g.t.abs())),
    "builtin sum of columns": lambda r, g: sum(r.z.unbind(1)).square().mean(),
    "builtin sum of rows": lambda r, g: sum(r.z).square().sum(),
}

# Sizes #########################################################################


@form("sizes")
def if_no_rows(r: Made, g: Any) -> Tensor:
    index = (g.train_mask & (g.y == 3)).nonzero().view(-1)
    if len(index) == 0:
        return r.z.sum()
    return r.losses[index].mean() / len(index)


@form("sizes")
def if_no_rows_at_all(r: Made, g: Any) -> Tensor:
    none = g.train_mask & (g.y == 7)
    if r.z[none].numel() == 0:
        return r.loss
    return r.losses[none].mean()


@form("sizes")
def unpacked_shape(r: Made, g: Any) -> Tensor:
    rows, columns = r.s.shape
    return r.s.sum() / (rows * columns) + r.s.view(rows, columns // 2, 2).prod(2).sum() / rows


@form("sizes")
def loop_over_rows(r: Made, g: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for number, row in enumerate(r.z):
        total = total + row.sum() * number
    return total / g.num_nodes


@form("sizes")
def loop_over_pairs(r: Made, g: Any) -> Tensor:
    return torch.stack([row[label] for row, label in zip(r.z, g.y)]).square().mean()


@form("sizes")
def batches_of_rows(r: Made, g: Any) -> Tensor:
    out, losses = r.z, []
    for begin in range(0, len(out), 10):
        losses.append(F.cross_entropy(out[begin : begin + 10], g.y[begin : begin + 10]))
    return sum(losses) / len(losses)


FORMS["sizes"] |= {
    "as numbers": lambda r, g: (
        len(g.x),
        g.x.size(0),
        g.x.shape[0],
        g.x.numel(),
        g.x.nelement(),
        g.num_nodes,
        g.num_edges,
    ),
    "as a shape": lambda r, g: tuple(r.z.shape),
    "of masked rows": lambda r, g: (len(g.x[g.train_mask]), g.y[g.val_mask].shape[0], int(g.test_mask.sum())),
    "of edges": lambda r, g: (g.edge_index.size(1), tuple(g.edge_index.shape), g.edge_index[0].numel()),
    "a shape that is compared": lambda r, g: (g.x.shape == (NODES, FEATURES), r.z.size() == g.target.size()),
    "range": lambda r, g: sum(r.z[i, 0] * i for i in range(len(g.x))) / 100,
    "range of a number of nodes": lambda r, g: sum(r.losses[i] for i in range(0, g.num_nodes, 3)),
    "math.log": lambda r, g: r.z.square().sum() / math.log(g.num_nodes),
    "math.sqrt": lambda r, g: r.z.square().sum() / math.sqrt(len(g.x)),
    "half of them": lambda r, g: r.z[: g.num_nodes // 2].square().sum(),
    "a share of them": lambda r, g: r.losses.topk(int(0.3 * len(g.x))).values.mean(),
    "a remainder": lambda r, g: r.losses.sum() * (1 + len(g.x) % 7),
    "torch.tensor": lambda r, g: r.losses.sum() / torch.tensor(len(g.x), dtype=torch.float64),
    "torch.tensor of several": lambda r, g: r.z.sum(0) @ (1 / torch.tensor([len(g.x), 2.0, 3.0, 4.0]).double()),
    "f-string": lambda r, g: f"{len(g.x)} nodes, {g.num_edges} edges, {tuple(g.x.shape)}, {g.x.shape[0]:,}",
    "f-string of a loss": lambda r, g: f"loss {float(r.loss):.6f}, {r.loss.item():.3e}",
    "f-string of a tensor": lambda r, g: f"{r.z.detach().mean():.6f}",
    "str and format": lambda r, g: (str(g.num_nodes), "{:5d}".format(len(g.x)), "%d" % g.x.size(0)),  # noqa: UP031,UP032
    "max with 1": lambda r, g: r.losses[g.train_mask].sum() / max(1, int(g.train_mask.sum())),
    "if it is large": lambda r, g: r.z.mean() if len(g.x) > 30 else r.z.square().sum(),
    "eye": lambda r, g: (r.h @ r.h.t() - torch.eye(len(g.x), dtype=torch.float64)).square().mean(),
    "not eye": lambda r, g: (r.s @ r.s.T)[~torch.eye(g.num_nodes, dtype=torch.bool)].square().mean(),
    "arange": lambda r, g: (r.z * torch.arange(len(g.x)).unsqueeze(1) / len(g.x)).square().sum(),
    "arange of a size": lambda r, g: (r.losses * torch.arange(g.x.size(0), dtype=torch.float64)).sum(),
    "linspace": lambda r, g: (r.z[:, 0] * torch.linspace(0, 1, g.num_nodes, dtype=torch.float64)).sum(),
    "of numpy": lambda r, g: (r.z[:, 0] * torch.from_numpy(np.linspace(0, 1, len(g.x)))).sum(),
    "of a list": lambda r, g: (r.z[:, 0] * torch.tensor([float(i) for i in range(len(g.x))])).sum(),
    "zeros": lambda r, g: torch.cat([r.z, torch.zeros(len(g.x), 2, dtype=torch.float64)], 1).logsumexp(1).mean(),
    "ones": lambda r, g: (torch.ones(1, g.num_nodes, dtype=torch.float64) @ r.z).square().sum(),
    "full": lambda r, g: F.cross_entropy(r.z, torch.full((len(g.x),), 2)),
    "zeros of a shape": lambda r, g: F.mse_loss(r.z, torch.zeros(r.z.shape, dtype=torch.float64)),
    "zeros_like": lambda r, g: F.mse_loss(r.z, torch.zeros_like(g.target)),
    "ones_like": lambda r, g: F.binary_cross_entropy_with_logits(r.z[:, 0], torch.ones_like(g.t)),
    "full_like": lambda r, g: F.cross_entropy(r.z, torch.full_like(g.y, 1)),
    "new_zeros": lambda r, g: torch.maximum(r.z, r.z.new_zeros(len(g.x), 1)).square().mean(),
    "new_full": lambda r, g: F.mse_loss(r.z[:, 0], g.t.new_full((g.x.size(0),), 0.5)),
    "filled rows of ones": lambda r, g: (r.z * torch.empty(len(g.x), 1, dtype=torch.float64).fill_(2)).square().sum(),
    "each row is a class": lambda r, g: F.cross_entropy(r.s @ r.s.t(), torch.arange(len(g.x))),
    "each row is a class, n_id": lambda r, g: F.cross_entropy(r.s @ r.s.t() / 0.5, g.n_id),
    "positions": lambda r, g: (r.s + torch.sin(torch.arange(len(g.x)).unsqueeze(1) / 10)).square().mean(),
    "n_id as a number": lambda r, g: (r.losses * g.n_id).sum() / g.n_id.max(),
    "mean degree": lambda r, g: r.losses.mean() * (g.num_edges / g.num_nodes),
}

# Reductions over rows ##########################################################

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "mean, keepdim": lambda x: x.mean(dim=0, keepdim=True)[0],
    "mean, dim=-2": lambda x: torch.mean(x, -2),
    "mean, axis": lambda x: x.mean(axis=0),
    "nanmean": lambda x: x.nanmean(0),
    "nansum": lambda x: torch.nansum(x, 0),
    "std": lambda x: x.std(0),
    "std, biased": lambda x: x.std(0, unbiased=False),
    "std, correction": lambda x: x.std(dim=0, correction=2),
    "var": lambda x: x.var(0),
    "var, biased": lambda x: torch.var(x, 0, correction=0),
    "var_mean": lambda x: torch.cat(torch.var_mean(x, 0)),
    "std_mean": lambda x: torch.cat(torch.std_mean(x, dim=0)),
    "norm": lambda x: x.norm(dim=0),
    "norm, p=1": lambda x: x.norm(1, 0),
    "norm, inf": lambda x: x.norm(p=float("inf"), dim=0),
    "norm, p=3": lambda x: torch.norm(x, 3, 0),
    "linalg.norm": lambda x: torch.linalg.norm(x, dim=0),
    "linalg.vector_norm": lambda x: torch.linalg.vector_norm(x, 1, dim=0),
    "max": lambda x: x.max(0).values,
    "max, unpacked": lambda x: torch.max(x, 0)[0],
    "min": lambda x: x.min(dim=0).values,
    "amax": lambda x: x.amax(0),
    "amin": lambda x: torch.amin(x, dim=0),
    "aminmax": lambda x: torch.cat(torch.aminmax(x, dim=0)),
    "prod": lambda x: (1 + x / 20).prod(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "median": lambda x: x.median(0).values,
    "root of a mean of squares": lambda x: x.square().mean(0).sqrt(),
    "norm of differences": lambda x: (x - x.mean(0)).norm(dim=0),
}
"""Of ``[N, C]`` over rows."""
OVER_ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.square().sum(),
    "sum, dims": lambda x: torch.sum(x.square(), (0, 1)),
    "mean": lambda x: x.exp().mean(),
    "mean, dims": lambda x: x.exp().mean((0, 1)),
    "std": lambda x: x.std(),
    "var": lambda x: x.var(),
    "norm": lambda x: x.norm(),
    "norm, fro": lambda x: torch.norm(x, p="fro"),
    "linalg.matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "linalg.vector_norm": lambda x: torch.linalg.vector_norm(x),
    "max": lambda x: x.max(),
    "min": lambda x: torch.min(x),
    "amax": lambda x: x.amax(),
    "amin, dims": lambda x: x.amin((0, 1)),
    "prod": lambda x: (1 + x / 50).prod(),
    "logsumexp, dims": lambda x: torch.logsumexp(x, (0, 1)),
    "median": lambda x: x.median(),
}
for _name, _reduce in REDUCTIONS.items():
    FORMS["reductions over rows"][_name] = lambda r, g, reduce=_reduce: dot(reduce(r.s))
for _name, _reduce in OVER_ALL.items():
    FORMS["reductions over all"][_name] = lambda r, g, reduce=_reduce: reduce(r.s)
FORMS["reductions over rows"] |= {
    "argmax": lambda r, g: r.s.argmax(0),
    "argmin": lambda r, g: torch.argmin(r.s, dim=0),
    "argmax of a mask": lambda r, g: r.s[g.train_mask].argmax(0),
    "indices of max": lambda r, g: r.s.max(0).indices,
    "row of the largest": lambda r, g: r.z[r.s[:, 0].argmax()].square().sum(),
    "rows of the largest": lambda r, g: dot(r.z[r.s.argmax(0)]),
    "all and any": lambda r, g: (g.train_mask.all(), g.train_mask.any(), (g.x > 0).any(0), (g.x > -9).all(0)),
    "count_nonzero": lambda r, g: (torch.count_nonzero(r.h), torch.count_nonzero(r.h, dim=0)),
    "of bool": lambda r, g: (g.train_mask.sum(), g.train_mask.double().mean(), (g.y == 2).sum().item()),
    "of whole numbers": lambda r, g: (g.y.sum(), g.y.max(), g.y.double().mean(), g.n_id.sum(), g.y.prod()),
    "of three dimensions": lambda r, g: dot(r.s.view(-1, 2, 4).mean(0)),
    "of three dimensions, two": lambda r, g: dot(r.s.view(-1, 2, 4).std((0, 2))),
    "of masked rows": lambda r, g: dot(r.s[g.train_mask].mean(0) - r.s[g.val_mask].std(0)),
    "of one row": lambda r, g: dot(r.s[4:5].mean(0)),
    "dtype": lambda r, g: (g.train_mask.sum(dtype=torch.float64), g.x.float().sum(0, dtype=torch.float64)),
}
FORMS["reductions over all"] |= {
    "argmax": lambda r, g: (r.s.argmax(), torch.argmin(r.s)),
    "ratio of a sum and a maximum": lambda r, g: r.s.square().sum() / r.s.abs().max(),
    "distance of means": lambda r, g: torch.dist(r.s[g.train_mask].mean(0), r.s[g.val_mask].mean(0)),
    "dist of rows": lambda r, g: torch.dist(r.z, g.target),
}
FORMS["reductions with ties"] |= {
    "max": lambda r, g: r.tied.max(),
    "min": lambda r, g: r.tied.min(),
    "amax": lambda r, g: r.tied.amax(0),
    "amin of relu": lambda r, g: dot(r.h.amin(0)) + dot(r.h.amax(0)),
    "max of relu over rows": lambda r, g: dot(r.h.max(0).values + r.h.min(0).values),
    "max along a dimension": lambda r, g: r.tied.max(0).values - torch.min(r.tied, dim=0)[0],
    "max, with indices": lambda r, g: (g.t.max(0), g.t.min(0)),
    "sort, stable": lambda r, g: (r.tied.sort(stable=True).values * g.x[:, 1]).sum(),
    "cummax": lambda r, g: (r.tied.cummax(0).values * g.x[:, 1]).sum(),
    "scatter, max": lambda r, g: dot(scatter(r.tied, g.y, reduce="max") + scatter(r.tied, g.y, reduce="min")),
    "amax by class": lambda r, g: dot(torch.zeros(4).double().scatter_reduce(0, g.y, r.tied, "amax")),
    "argmax": lambda r, g: (g.t.argmax(), g.t.argmin(), g.y.argmax(), g.train_mask.long().argmax()),
    "row at argmax": lambda r, g: r.z[g.t.argmax()].square().sum(),
    "aminmax": lambda r, g: torch.stack(torch.aminmax(r.tied)).square().sum(),
    "norm, inf": lambda r, g: r.tied.norm(float("inf")),
    "median": lambda r, g: (g.t.median(), g.y.median(), g.t.nanmedian()),
    "amax over columns and rows": lambda r, g: r.h.clamp(max=0.2).amax() + r.tied.amax(),
    "how many are largest": lambda r, g: (g.t == g.t.max()).sum(),
}

# Along rows ####################################################################

FORMS["along rows"] |= {
    "softmax": lambda r, g: of_rows(r.z.softmax(0), g),
    "softmax of a vector": lambda r, g: (r.z[:, 0].softmax(0) * g.t).sum(),
    "softmax, functional": lambda r, g: of_rows(F.softmax(r.z, dim=-2), g),
    "softmax, module": lambda r, g: of_rows(torch.nn.Softmax(dim=0)(r.z), g),
    "softmin": lambda r, g: of_rows(F.softmin(r.z, dim=0), g),
    "log_softmax": lambda r, g: of_rows(r.z.log_softmax(0), g),
    "log_softmax, functional": lambda r, g: of_rows(F.log_softmax(r.z, 0), g),
    "logsumexp": lambda r, g: of_rows(r.z - r.z.logsumexp(0, keepdim=True), g),
    "softmax of masked rows": lambda r, g: (r.z[g.train_mask].softmax(0) * g.target[g.train_mask]).sum(),
    "softmax of all": lambda r, g: of_rows(r.z.flatten().softmax(0).view(-1, CLASSES), g),
    "cumsum": lambda r, g: of_rows(r.z.cumsum(0), g),
    "cumsum of a mask": lambda r, g: g.train_mask.cumsum(0).max() + g.train_mask.long().cumsum(0)[20],
    "cumprod": lambda r, g: of_rows((1 + r.z / 30).cumprod(0), g),
    "cummax": lambda r, g: of_rows(r.z.cummax(0).values, g),
    "cummin": lambda r, g: of_rows(torch.cummin(r.z, 0)[0], g),
    "logcumsumexp": lambda r, g: of_rows(r.z.logcumsumexp(0), g),
    "diff": lambda r, g: r.z.diff(dim=0).square().sum(),
    "normalize": lambda r, g: of_rows(F.normalize(r.z, dim=0), g),
    "attention over rows": lambda r, g: dot((r.z[:, :1].softmax(0) * r.h).sum(0)),
    "trapezoid": lambda r, g: torch.trapezoid(r.z[:, 0].square()),
}
FORMS["sort and count"] |= {
    "sort": lambda r, g: of_rows(r.z.sort(0).values, g),
    "sort, descending": lambda r, g: of_rows(torch.sort(r.z, 0, descending=True)[0], g),
    "sort of a vector": lambda r, g: (r.z[:, 0].sort().values * g.t).sum(),
    "sort, stable": lambda r, g: g.t.sort(stable=True),
    "msort": lambda r, g: of_rows(torch.msort(r.z), g),
    "sort of masked rows": lambda r, g: r.z[g.train_mask, 0].sort().values[:5].sum(),
    "topk": lambda r, g: dot(r.z.topk(3, dim=0).values),
    "topk, indices": lambda r, g: r.z.topk(4, dim=0, largest=False).indices,
    "topk of row losses": lambda r, g: r.losses.topk(10).values.mean(),
    "topk of small row losses": lambda r, g: torch.topk(r.losses[g.train_mask], 5, largest=False)[0].mean(),
    "kthvalue": lambda r, g: dot(r.z.kthvalue(4, dim=0).values),
    "median": lambda r, g: r.z[:, 1].median(),
    "median of a mask": lambda r, g: r.losses[g.val_mask].median(),
    "quantile": lambda r, g: r.z.quantile(0.3),
    "quantile over rows": lambda r, g: dot(torch.quantile(r.z, 0.75, dim=0)),
    "quantiles": lambda r, g: dot(torch.quantile(r.z[:, 0], by_class((0.1, 0.5, 0.9)))),
    "nanquantile": lambda r, g: r.z.nanquantile(0.6),
    "mode": lambda r, g: g.y.mode().values,
    "unique": lambda r, g: (g.y.unique(), g.t.unique()),
    "unique, inverse and counts": lambda r, g: torch.unique(g.y, return_inverse=True, return_counts=True),
    "unique rows": lambda r, g: torch.unique(torch.stack([g.y, g.train_mask.long()], 1), dim=0),
    "unique_consecutive": lambda r, g: torch.unique_consecutive(g.y),
    "how many classes": lambda r, g: r.losses.sum() / g.y.unique().numel(),
    "bincount": lambda r, g: g.y.bincount(),
    "bincount, minlength": lambda r, g: torch.bincount(g.y[g.train_mask], minlength=6),
    "bincount, weights": lambda r, g: torch.bincount(g.y, weights=g.t, minlength=CLASSES),
    "bincount as weights": lambda r, g: (r.losses / g.y.bincount()[g.y]).sum(),
    "histc": lambda r, g: g.t.histc(5, -1.5, 1.5),
    "bucketize": lambda r, g: (r.losses * torch.bucketize(g.t, by_class((-1.0, 0.0, 1.0)))).sum(),
    "searchsorted": lambda r, g: torch.searchsorted(g.t.sort().values, by_class((-1.0, 0.0, 0.5))),
    "isin": lambda r, g: r.losses[torch.isin(g.y, torch.tensor([1, 3]))].mean(),
    "ranks": lambda r, g: (r.losses * r.z[:, 0].argsort().argsort()).mean(),
    "trimmed mean": lambda r, g: r.losses.sort().values[4:-4].mean(),
    "clipped at a quantile": lambda r, g: r.losses.clamp(max=r.losses.detach().quantile(0.9)).mean(),
}

# Products over rows ############################################################

FORMS["products over rows"] |= {
    "x.t() @ y": lambda r, g: dot(r.h.t() @ g.target),
    "x.T @ x": lambda r, g: dot(r.s.T @ r.s) / len(g.x),
    "x.mT @ x": lambda r, g: dot(r.s.mT @ r.z),
    "one_hot.t() @ h": lambda r, g: dot(hot(g.y).t() @ r.h),
    "one_hot.t() @ h, means": lambda r, g: dot(hot(g.y).t() @ r.h / hot(g.y).sum(0).unsqueeze(1)),
    "vector @ rows": lambda r, g: dot(g.t @ r.z),
    "dot of vectors": lambda r, g: torch.dot(r.z[:, 0], r.z[:, 1]),
    "mm, mv and addmm": lambda r, g: (
        torch.mm(g.target.t(), r.z).sum()
        + torch.mv(r.z.t(), g.t).square().sum()
        + dot(torch.addmm(r.net.head.weight, g.target.t(), r.h))
    ),
    "einsum over rows": lambda r, g: dot(torch.einsum("nd,ne->de", r.h, g.target)),
    "einsum to one row": lambda r, g: dot(torch.einsum("nd,n->d", r.h, g.t)),
    "einsum to a number": lambda r, g: torch.einsum("nd,nd->", r.z, g.target),
    "einsum of rows with a matrix": lambda r, g: of_rows(torch.einsum("nd,cd->nc", r.h, r.net.head.weight), g),
    "einsum of all pairs": lambda r, g: torch.einsum("nd,md->nm", r.s, r.s).square().mean(),
    "tensordot": lambda r, g: dot(torch.tensordot(r.h, g.target, dims=([0], [0]))),
    "outer": lambda r, g: torch.outer(r.z[:, 0], g.t).square().sum(),
    "heads": lambda r, g: dot(r.h.view(-1, 2, 4).permute(1, 2, 0) @ g.x.view(-1, 2, 4).transpose(0, 1)),
    "bmm": lambda r, g: dot(torch.bmm(r.h.view(-1, 2, 4).permute(1, 2, 0), g.x.view(-1, 2, 4).transpose(0, 1))),
    "cov": lambda r, g: dot(torch.cov(r.s.t())),
    "corrcoef": lambda r, g: dot(torch.corrcoef(r.z.T)),
    "cov by hand": lambda r, g: dot((r.s - r.s.mean(0)).t() @ (r.s - r.s.mean(0)) / (r.s.size(0) - 1)),
    "pearson by hand": lambda r, g: F.cosine_similarity(r.z[:, 0] - r.z[:, 0].mean(), g.t - g.t.mean(), dim=0),
    "cosine similarity over rows": lambda r, g: dot(F.cosine_similarity(r.z, g.target, dim=0)),
    "cosine similarity of rows": lambda r, g: F.cosine_similarity(r.z, g.target).mean(),
    "cdist": lambda r, g: torch.cdist(r.z, r.z + 1).mean(),
    "cdist to some": lambda r, g: torch.cdist(r.s, r.s[:5] + 0.1).mean(),
    "pdist": lambda r, g: F.pdist(r.z).mean(),
    "pairwise distance": lambda r, g: F.pairwise_distance(r.z, g.target).mean(),
    "z @ z.t()": lambda r, g: (r.z @ r.z.t()).sigmoid().mean(),
    "z @ z.t(), diagonal": lambda r, g: (r.z @ r.z.t()).diagonal().mean(),
    "z @ z.t(), trace": lambda r, g: torch.trace(r.z @ r.z.t()),
    "z @ z.t(), a softmax of rows": lambda r, g: dot(((r.z @ r.z.t()).softmax(1) @ r.h).mean(0)),
    "z @ z.t(), filled diagonal": lambda r, g: (r.z @ r.z.t()).fill_diagonal_(0).square().mean(),
    "z @ z.t(), upper triangle": lambda r, g: (r.z @ r.z.t()).triu(1).square().sum(),
    "differences of all pairs": lambda r, g: (r.z[:, None] - r.z[None]).square().sum(-1).exp().add(1).log().mean(),
    "same class": lambda r, g: ((g.y[:, None] == g.y[None, :]) * torch.cdist(r.z, g.target)).sum(),
    "logdet": lambda r, g: torch.logdet(torch.eye(8).double() + r.s.t() @ r.s / len(g.x)),
    "solve": lambda r, g: dot(torch.linalg.solve(r.h.t() @ r.h + torch.eye(8).double(), r.h.t() @ g.target)),
    "svdvals": lambda r, g: torch.linalg.svdvals(r.s).sum(),
    "nuclear norm": lambda r, g: torch.linalg.matrix_norm(r.z, "nuc"),
    "qr": lambda r, g: torch.linalg.qr(r.s).R.abs().diagonal().sum(),
    "eigvalsh": lambda r, g: dot(torch.linalg.eigvalsh(r.s.t() @ r.s)),
    "cka": lambda r, g: (r.s.t() @ g.target).square().sum() / (r.s.t() @ r.s).norm(),
}

# By class, pooling, edges ######################################################


def new_rows(x: Tensor) -> Tensor:
    return torch.zeros(CLASSES, x.size(1), dtype=x.dtype)


REDUCES = ("sum", "mean", "max", "min", "mul")
for _reduce_name in REDUCES:
    FORMS["scatter and pooling"] |= {
        f"scatter, {_reduce_name}": lambda r, g, how=_reduce_name: dot(
            scatter(1 + r.s / 9, g.y, dim=0, dim_size=CLASSES, reduce=how)
        )
    }
for _reduce_name in ("sum", "mean", "amax", "amin", "prod"):
    FORMS["scatter and pooling"] |= {
        f"scatter_reduce, {_reduce_name}": lambda r, g, how=_reduce_name: dot(
            new_rows(g.x).scatter_reduce(0, g.y[:, None].expand(-1, 8), 1 + r.s / 9, how, include_self=False)
        )
    }
FORMS["scatter and pooling"] |= {
    "scatter without a size": lambda r, g: dot(scatter(r.h, g.y)),
    "scatter of numbers": lambda r, g: dot(scatter(r.losses, g.y, reduce="mean")),
    "scatter of a mask": lambda r, g: dot(scatter(r.h[g.train_mask], g.y[g.train_mask], dim_size=CLASSES)),
    "scatter_add": lambda r, g: dot(new_rows(g.x).scatter_add(0, g.y[:, None].expand_as(g.x), r.h)),
    "scatter_add_": lambda r, g: dot(new_rows(g.x).scatter_add_(0, g.y.unsqueeze(1).repeat(1, 8), r.h)),
    "torch.scatter_add of numbers": lambda r, g: dot(torch.scatter_add(by_class(), 0, g.y, r.losses)),
    "index_add": lambda r, g: dot(new_rows(g.x).index_add(0, g.y, r.h)),
    "index_add_": lambda r, g: dot(new_rows(g.x).index_add_(0, g.y, r.h, alpha=2)),
    "index_reduce": lambda r, g: dot(new_rows(g.x).index_reduce(0, g.y, r.s, "mean", include_self=False)),
    "index_put, accumulate": lambda r, g: dot(new_rows(g.x).index_put((g.y,), r.h, accumulate=True)),
    "sum by class, by hand": lambda r, g: dot(torch.stack([r.h[g.y == c].sum(0) for c in range(CLASSES)])),
    "mean by class, back to rows": lambda r, g: of_rows(scatter(r.s, g.y, reduce="mean")[g.y], g),
    "softmax by class": lambda r, g: of_rows(softmax_by(r.z, g.y, num_nodes=CLASSES), g),
    "global_add_pool": lambda r, g: dot(global_add_pool(r.s, None)),
    "global_mean_pool": lambda r, g: dot(global_mean_pool(r.s, None)),
    "global_max_pool": lambda r, g: dot(global_max_pool(r.s, None)),
    "global_mean_pool of zeros": lambda r, g: dot(global_mean_pool(r.s, torch.zeros_like(g.y))),
    "global_mean_pool of a new vector": lambda r, g: dot(global_mean_pool(r.s, torch.zeros(len(g.x)).long())),
    "global_add_pool by class": lambda r, g: dot(global_add_pool(r.s, g.y)),
    "global_mean_pool by class, size": lambda r, g: dot(global_mean_pool(r.s, g.y, CLASSES)),
    "global_max_pool by class": lambda r, g: dot(global_max_pool(r.s, g.y, size=5)),
    "to_dense_batch": lambda r, g: to_dense_batch(r.s)[0].square().mean(),
    "degree of classes": lambda r, g: degree(g.y, CLASSES),
}
FORMS["edges"] |= {
    "in-degree": lambda r, g: (r.losses / (1 + degree(g.edge_index[1], g.num_nodes))).sum(),
    "out-degree": lambda r, g: (r.losses * degree(g.edge_index[0], g.num_nodes).double()).sum(),
    "degree by hand": lambda r, g: (
        r.losses * torch.zeros(len(g.x)).double().index_add_(0, g.edge_index[1], torch.ones(g.num_edges).double())
    ).sum(),
    "smoothness": lambda r, g: (r.z[g.edge_index[0]] - r.z[g.edge_index[1]]).square().sum(1).mean(),
    "homophily": lambda r, g: (g.y[g.edge_index[0]] == g.y[g.edge_index[1]]).double().mean(),
    "dot product of ends": lambda r, g: F.binary_cross_entropy_with_logits(
        (r.z[g.edge_index[0]] * r.z[g.edge_index[1]]).sum(-1), torch.ones(g.edge_index.size(1)).double()
    ),
    "messages by hand": lambda r, g: of_rows(
        scatter(r.z[g.edge_index[0]], g.edge_index[1], dim_size=g.num_nodes, reduce="mean"), g
    ),
    "messages by index_add": lambda r, g: of_rows(
        torch.zeros_like(r.z).index_add(0, g.edge_index[1], r.z[g.edge_index[0]]), g
    ),
    "how many edges": lambda r, g: (g.num_edges, g.edge_index.size(1) / len(g.x)),
    "edges between classes": lambda r, g: torch.bincount(
        g.y[g.edge_index[0]] * CLASSES + g.y[g.edge_index[1]], minlength=CLASSES**2
    ),
    "edges without loops": lambda r, g: r.z[g.edge_index[0]][g.edge_index[0] != g.edge_index[1]].square().mean(),
}

# Norms as functions ############################################################

FORMS["norms as functions"] |= {
    "batch_norm": lambda r, g: of_rows(F.batch_norm(r.s, None, None, training=True), g),
    "batch_norm, affine": lambda r, g: of_rows(
        F.batch_norm(r.z, None, None, r.net.head.bias, r.net.head.bias * 2, True, 0.1, 1e-3), g
    ),
    "batch_norm in evaluation": lambda r, g: of_rows(F.batch_norm(r.s, g.x.mean(0), g.x.var(0), training=False), g),
    "layer_norm of rows": lambda r, g: of_rows(F.layer_norm(r.s, (FEATURES,)), g),
    "layer_norm of all": lambda r, g: of_rows(F.layer_norm(r.s, r.s.shape), g),
    "layer_norm of all, list": lambda r, g: of_rows(F.layer_norm(r.s, [*r.s.size()]), g),
    "instance_norm": lambda r, g: of_rows(F.instance_norm(r.s.t().unsqueeze(0))[0].t(), g),
    "group_norm of rows": lambda r, g: of_rows(F.group_norm(r.s, 2), g),
    "group_norm over rows": lambda r, g: of_rows(F.group_norm(r.s.t().unsqueeze(0), 2)[0].t(), g),
    "rms_norm of rows": lambda r, g: of_rows(F.rms_norm(r.s, (FEATURES,)), g),
    "rms_norm of all": lambda r, g: of_rows(F.rms_norm(r.s, r.s.shape), g),
    "normalize rows": lambda r, g: of_rows(F.normalize(r.s, dim=1), g),
    "normalize over rows": lambda r, g: of_rows(F.normalize(r.s, p=1, dim=0), g),
    "renorm": lambda r, g: of_rows(r.s.renorm(2, 1, 1.5), g),
    "z-score": lambda r, g: of_rows((r.s - r.s.mean(0)) / r.s.std(0), g),
    "min-max": lambda r, g: of_rows((r.s - r.s.amin(0)) / (r.s.amax(0) - r.s.amin(0)), g),
}


@form("norms as functions")
def batch_norm_with_running_statistics(r: Made, g: Any) -> Any:
    mean, variance = torch.zeros(FEATURES).double(), torch.ones(FEATURES).double()
    F.batch_norm(r.s.detach(), mean, variance, training=True)
    return mean, variance


# Rows by their places ##########################################################

PLACES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "x[:20]": lambda x, g: x[:20],
    "x[5:]": lambda x, g: x[5:],
    "x[3:30:4]": lambda x, g: x[3:30:4],
    "x[::2]": lambda x, g: x[::2],
    "x[1::2, :2]": lambda x, g: x[1::2, :2],
    "x[-10:]": lambda x, g: x[-10:],
    "x[:-3]": lambda x, g: x[:-3],
    "x[10:10]": lambda x, g: torch.cat([x[10:10], x[2:4]]),
    "x[-1]": lambda x, g: x[-1],
    "x[0]": lambda x, g: x[0],
    "x[7, 1]": lambda x, g: x[7, 1],
    "x[None]": lambda x, g: x[None, 4:6],
    "x[..., 0]": lambda x, g: x[..., 0],
    "x[:, 1:]": lambda x, g: x[:, 1:],
    "x[:, [0, 2]]": lambda x, g: x[:, [0, 2]],
    "x[[3, 1, 7]]": lambda x, g: x[[3, 1, 7]],
    "x[[3, 1, 7], [0, 1, 1]]": lambda x, g: x[[3, 1, 7], [0, 1, 1]],
    "x[torch.tensor([3, 1, 7])]": lambda x, g: x[torch.tensor([3, 1, 7])],
    "x[torch.tensor([-1, 0, 0])]": lambda x, g: x[torch.tensor([-1, 0, 0])],
    "x[numpy]": lambda x, g: x[np.array([2, 9])],
    "x[range]": lambda x, g: x[range(4, 9)],
    "x[a number]": lambda x, g: x[torch.tensor(6)],
    "x[arange]": lambda x, g: x[torch.arange(0, len(x), 3)],
    "x[n_id]": lambda x, g: x[g.n_id],
    "x[mask]": lambda x, g: x[g.train_mask],
    "x[~mask]": lambda x, g: x[~g.train_mask],
    "x[mask | mask]": lambda x, g: x[g.train_mask | g.val_mask],
    "x[mask, 1]": lambda x, g: x[g.train_mask, 1],
    "x[mask][:, 0]": lambda x, g: x[g.train_mask][:, 0],
    "x[mask][:5]": lambda x, g: x[g.train_mask][:5],
    "x[mask][-1]": lambda x, g: x[g.train_mask][-1],
    "x[mask][[0, 2]]": lambda x, g: x[g.train_mask][[0, 2]],
    "x[mask][mask]": lambda x, g: x[g.train_mask][g.y[g.train_mask] > 1],
    "x[class]": lambda x, g: x[g.y == 2],
    "x[computed mask]": lambda x, g: x[x[:, 0] > x[:, 0].mean()],
    "x[mask of all entries]": lambda x, g: x[x > 0.1],
    "x[y]": lambda x, g: x[g.y],
    "chunk": lambda x, g: x.chunk(3)[1],
    "all of chunk": lambda x, g: torch.stack([each.sum(0) for each in x.chunk(4)]),
    "chunk of columns": lambda x, g: x.chunk(2, dim=1)[1],
    "split": lambda x, g: x.split(15)[2],
    "split by sizes": lambda x, g: torch.split(x, [10, 20, len(x) - 30])[1],
    "tensor_split": lambda x, g: torch.tensor_split(x, 4)[3],
    "unbind": lambda x, g: torch.stack(x.unbind(0)[2:5]),
    "unbind of columns": lambda x, g: x.unbind(1)[1],
    "unpacked columns": lambda x, g: (lambda first, second, *_: first * second)(*x.t()),
    "narrow": lambda x, g: x.narrow(0, 3, 9),
    "select": lambda x, g: x.select(0, 11),
    "index_select": lambda x, g: x.index_select(0, torch.tensor([5, 5, 0])),
    "gather": lambda x, g: x.gather(0, torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]])),
    "take": lambda x, g: x.take(torch.tensor([0, 17, 50])),
    "take_along_dim": lambda x, g: torch.take_along_dim(x, x.argsort(0), 0)[:4],
    "masked_select": lambda x, g: x[:, 0].masked_select(g.val_mask),
    "flip": lambda x, g: x.flip(0)[:6],
    "flipud": lambda x, g: torch.flipud(x) * x,
    "roll": lambda x, g: x.roll(1, 0) * x,
    "roll by many": lambda x, g: torch.roll(x, shifts=-13, dims=0) * x,
    "rot90": lambda x, g: torch.rot90(x)[0],
    "argsort as an index": lambda x, g: x[x[:, 0].argsort()] * x,
    "argsort of a constant": lambda x, g: x[torch.argsort(g.t, stable=True)][:9],
    "argsort, descending": lambda x, g: x[x[:, 1].argsort(descending=True)][:3],
    "topk as an index": lambda x, g: x[x[:, 0].topk(5).indices],
    "indices of sort": lambda x, g: x[:, 1][x[:, 0].sort().indices],
    "inverse permutation": lambda x, g: x[x[:, 0].argsort()][x[:, 0].argsort().argsort()],
    "nonzero as an index": lambda x, g: x[g.train_mask.nonzero().squeeze(1)],
    "nonzero, as_tuple": lambda x, g: x[g.train_mask.nonzero(as_tuple=True)[0]],
    "nonzero, as_tuple, whole": lambda x, g: x[g.val_mask.nonzero(as_tuple=True)],
    "where as an index": lambda x, g: x[torch.where(g.y == 1)[0]],
    "part of nonzero": lambda x, g: x[g.train_mask.nonzero().view(-1)[:4]],
    "every other of nonzero": lambda x, g: x[g.train_mask.nonzero().flatten()[::2]],
    "n_id of a mask": lambda x, g: x[g.n_id[g.val_mask]],
    "argwhere": lambda x, g: x[torch.argwhere(g.y == 3)[:, 0]],
    "last rows": lambda x, g: x[len(x) - 4 :],
    "one after another": lambda x, g: x[1:] - x[:-1],
    "first half and second": lambda x, g: x[:20] * x[20:40],
    "first of each class": lambda x, g: torch.stack([x[g.y == c][0] for c in range(CLASSES)]),
}
"""Of rows, ``[N, 4]``: some of them."""
for _name, _place in PLACES.items():
    FORMS["rows by their places"][_name] = lambda r, g, place=_place: dot(place(r.z.tanh(), g))
FORMS["rows by their places"] |= {
    "places themselves": lambda r, g: (
        g.train_mask.nonzero(),
        g.train_mask.nonzero().view(-1)[3],
        torch.where(g.y == 1),
        g.n_id[g.val_mask],
        g.x[:, 0].argsort()[:5],
    ),
    "values of constants": lambda r, g: (g.y[:6], g.t[[3, 1, 7]], g.train_mask[-5:], g.y[-1].item(), g.x[2, 3]),
    "loss of listed rows": lambda r, g: F.cross_entropy(r.z[[3, 1, 7]], g.y[[3, 1, 7]]),
    "loss of the first rows": lambda r, g: F.cross_entropy(r.z[:20], g.y[:20]),
    "loss of a permutation": lambda r, g: F.cross_entropy(r.z[g.t.argsort(stable=True)], g.y.flip(0)),
    "conv of flipped rows": lambda r, g: r.net.b(r.h.flip(0), g.edge_index).square().mean(),
    "conv of sliced and joined rows": lambda r, g: F.mse_loss(
        r.net.b(torch.cat([r.h[10:], r.h[:10]]), g.edge_index), g.target
    ),
}

# Rows that are written #########################################################


def written(change: Callable[[Tensor, Any], Any]) -> Expression:
    """Returns a program that changes rows in place, and uses them in a conv."""

    def run(r: Made, g: Any) -> Tensor:
        rows = r.s * 1.5
        change(rows, g)
        return F.mse_loss(r.net.b(rows, g.edge_index), g.target) + rows.square().mean()

    return run


def assign(key: Callable[[Tensor, Any], Any], value: Callable[[Tensor, Any], Any]) -> Expression:
    return written(lambda x, g: x.__setitem__(key(x, g), value(x, g)))


FORMS["rows that are written"] |= {
    "x[mask] = 0": assign(lambda x, g: g.train_mask, lambda x, g: 0),
    "x[mask] = a row": assign(lambda x, g: g.val_mask, lambda x, g: x.detach().mean(0)),
    "x[mask] = rows": assign(lambda x, g: g.val_mask, lambda x, g: x[g.val_mask] * 2),
    "x[mask] = rows of another": assign(lambda x, g: g.train_mask, lambda x, g: g.x[g.train_mask]),
    "x[mask, 1] = a number": assign(lambda x, g: (g.train_mask, 1), lambda x, g: 0.5),
    "x[:, 0] = a column": assign(lambda x, g: (slice(None), 0), lambda x, g: g.t),
    "x[:, 2:4] = a number": assign(lambda x, g: (slice(None), slice(2, 4)), lambda x, g: -1.0),
    "x[:5] = 0": assign(lambda x, g: slice(5), lambda x, g: 0.0),
    "x[:5] = rows": assign(lambda x, g: slice(5), lambda x, g: x[5:10].clone()),
    "x[::3] = rows": assign(lambda x, g: slice(None, None, 3), lambda x, g: g.x[::3]),
    "x[-1] = a row": assign(lambda x, g: -1, lambda x, g: x[0].clone()),
    "x[[3, 1, 7]] = a number": assign(lambda x, g: [3, 1, 7], lambda x, g: 2.0),
    "x[[3, 1, 7]] = rows": assign(lambda x, g: torch.tensor([3, 1, 7]), lambda x, g: g.x[:3]),
    "x[nonzero] = 0": assign(lambda x, g: g.train_mask.nonzero().view(-1), lambda x, g: 0.0),
    "x[x > 0] = 0": assign(lambda x, g: x > 0, lambda x, g: 0.0),
    "x[argmax] = 0": assign(lambda x, g: x[:, 0].argmax(), lambda x, g: 0.0),
    "x[mask] += 1": written(lambda x, g: x.__setitem__(g.train_mask, x[g.train_mask] + 1)),
    "x[[2, 4]] *= 2": written(lambda x, g: x.__setitem__([2, 4], x[[2, 4]] * 2)),
    "swapped rows": written(lambda x, g: x.__setitem__([0, 9], x[[9, 0]])),
    "x += rows": written(lambda x, g: x.__iadd__(g.x)),
    "x -= mean": written(lambda x, g: x.__isub__(x.mean(0))),
    "x /= norm": written(lambda x, g: x.__itruediv__(x.detach().norm())),
    "add_ and mul_": written(lambda x, g: x.add_(g.x, alpha=0.5).mul_(0.9)),
    "div_ by a standard deviation": written(lambda x, g: x.sub_(x.mean(0)).div_(x.detach().std(0))),
    "relu_": written(lambda x, g: x.relu_()),
    "clamp_ and tanh_": written(lambda x, g: x.clamp_(-0.5, 0.5).tanh_()),
    "masked_fill_": written(lambda x, g: x.masked_fill_(g.train_mask.unsqueeze(1), 0.1)),
    "masked_scatter_": written(lambda x, g: x.masked_scatter_(g.val_mask.unsqueeze(1), g.x[g.val_mask])),
    "copy_": written(lambda x, g: x[:, :4].copy_(g.target)),
    "fill_ of a slice": written(lambda x, g: x[2:6].fill_(0.3)),
    "zero_ of a column": written(lambda x, g: x[:, 1].zero_()),
    "mul_ of a slice": written(lambda x, g: x[10:20].mul_(2)),
    "index_fill_": written(lambda x, g: x.index_fill_(0, torch.tensor([1, 5]), 0.0)),
    "index_copy_": written(lambda x, g: x.index_copy_(0, torch.tensor([1, 5]), g.x[:2])),
    "index_add_": written(lambda x, g: x.index_add_(0, torch.tensor([1, 1, 5]), g.x[:3])),
    "index_put_": written(lambda x, g: x.index_put_((torch.tensor([0, 2]), torch.tensor([1, 1])), by_class()[:2])),
    "scatter_": written(lambda x, g: x.scatter_(1, g.y.unsqueeze(1), 1.0)),
    "lerp_": written(lambda x, g: x.lerp_(g.x, 0.3)),
    "masked_fill": lambda r, g: F.mse_loss(r.z.masked_fill(~g.train_mask.unsqueeze(1), 0.0), g.target),
    "where": lambda r, g: F.mse_loss(torch.where(g.train_mask.unsqueeze(1), r.z, g.target), g.target * 2),
    "where, a number": lambda r, g: torch.where(r.z > 0, r.z, 0.1 * r.z).square().mean(),
    "where, a row": lambda r, g: of_rows(torch.where(g.val_mask[:, None], r.z, r.z.mean(0)), g),
    "index_fill": lambda r, g: r.z.index_fill(0, torch.tensor([3, 8]), 1.0).square().mean(),
    "index_put": lambda r, g: r.z.index_put((torch.tensor([3, 8]),), by_class()).square().mean(),
    "slice_scatter": lambda r, g: torch.slice_scatter(r.z, g.target[:4], 0, 2, 6).square().mean(),
    "select_scatter": lambda r, g: torch.select_scatter(r.z, by_class(), 0, 5).square().mean(),
    "masked input": lambda r, g: F.mse_loss(
        r.net(torch.where(g.val_mask.unsqueeze(1), torch.zeros_like(g.x), g.x), g.edge_index)[g.val_mask],
        g.target[g.val_mask],
    ),
    "new rows that are filled": lambda r, g: F.mse_loss(
        torch.zeros_like(g.target).index_put((g.train_mask,), r.z[g.train_mask]), g.target
    ),
}


@form("rows that are written")
def two_views(r: Made, g: Any) -> Any:
    x = g.x * 1
    first, second = x[:4], x[4:]
    first.mul_(2)
    second.add_(1)
    return of_rows(x, g)


@form("rows that are written")
def two_views_with_gradients(r: Made, g: Any) -> Any:
    x = r.s * 1.5
    first, second, row = x[:6], x[4:], x[5]
    first.mul_(2)
    second.add_(first.mean(0))
    row.add_(second[0])
    return F.mse_loss(r.net.b(x, g.edge_index), g.target) + first.square().mean() + row.sum()


@form("rows that are written")
def view_that_is_read_after_a_change(r: Made, g: Any) -> Any:
    x = g.x * 1
    first, row, part = x[:5], x[3], x[2:4][0]
    x.add_(1)
    return first.sum(0), row * 1, part * 1, torch.cat([first, row[None]]), first.shape


@form("rows that are written")
def views_of_copies_that_are_read_after_a_change(r: Made, g: Any) -> Any:
    x = g.x * 1
    turned, part, entries = x[:5].t(), x[3][:4], x[:6].view(-1, 4)
    x.add_(1)
    return turned.sum(1), part * 1, entries.sum()


@form("rows that are written")
def view_of_gathered_rows_that_is_read_after_a_change(r: Made, g: Any) -> Any:
    x = g.x * 1
    flat = x.view(-1)[:24].view(3, 8)
    x.mul_(2)
    before = flat * 1
    flat.add_(1)
    return before, flat, x.sum(0)


@form("rows that are written")
def label_input(r: Made, g: Any) -> Tensor:
    """Labels of half the training rows as features, the loss over the others."""
    known = g.train_mask & (torch.arange(g.num_nodes) % 2 == 0)
    labels = torch.zeros(g.num_nodes, CLASSES, dtype=torch.float64)
    labels[known] = hot(g.y[known])
    rest = g.train_mask & ~known
    return F.cross_entropy(r.net(torch.cat([g.x[:, :4], labels], 1), g.edge_index)[rest], g.y[rest])


@form("rows that are written")
def out_of_results(r: Made, g: Any) -> Any:
    rows, total, mean = torch.empty_like(g.x), torch.empty(8).double(), torch.empty(8).double()
    torch.add(g.x, 1.0, out=rows)
    torch.sum(rows, 0, out=total)
    torch.mean(g.x, 0, out=mean)
    return total, mean, torch.mul(g.x, g.x, out=torch.empty_like(g.x)).sum()


@form("rows that are written")
def out_of_products(r: Made, g: Any) -> Any:
    product = torch.empty(FEATURES, CLASSES).double()
    torch.matmul(g.x.t(), g.target, out=product)
    largest, where = torch.empty(8).double(), torch.empty(8).long()
    torch.max(g.x, 0, out=(largest, where))
    return product, largest, where


@form("rows that are written")
def a_batch_that_changes(r: Made, g: Any) -> Tensor:
    g.x = g.x - g.x.mean(0)
    g.x[g.val_mask] = 0
    g.y[g.y == 3] = 0
    return r.loss


@form("rows that are written")
def a_mask_that_changes(r: Made, g: Any) -> Tensor:
    mask = g.train_mask.clone()
    mask[:10] = False
    mask &= g.y != 1
    return r.losses[mask].sum() / mask.sum()


# Rows that are joined ##########################################################

FORMS["rows that are joined"] |= {
    "cat of columns": lambda r, g: of_rows(r.net.head(torch.cat([r.z, g.target], 1)), g),
    "cat of rows": lambda r, g: torch.cat([r.z, g.target]).std(0).sum(),
    "cat of masked rows": lambda r, g: F.cross_entropy(
        torch.cat([r.z[g.train_mask], r.z[g.val_mask]]), torch.cat([g.y[g.train_mask], g.y[g.val_mask]])
    ),
    "cat with a row": lambda r, g: dot(torch.cat([r.z, r.z.mean(0, keepdim=True)]).logsumexp(0)),
    "cat with zeros": lambda r, g: torch.cat([torch.zeros(3, CLASSES).double(), r.z])[1:6].square().sum(),
    "cat of slices": lambda r, g: of_rows(torch.cat([r.z[30:], r.z[:30]]), g),
    "concat of vectors": lambda r, g: torch.concat([r.z[:, 0], g.t]).var(),
    "stack": lambda r, g: of_rows(torch.stack([r.z, g.target]).amax(0), g),
    "stack of columns": lambda r, g: of_rows(torch.stack([r.z[:, 0], g.t], 1), g),
    "stack, last dimension": lambda r, g: of_rows(torch.stack([r.z, g.target], -1).mean(-1), g),
    "stack of rows": lambda r, g: torch.stack([r.z[3], r.z[20], g.target[1]]).square().sum(),
    "vstack": lambda r, g: torch.vstack([r.z, g.target]).norm(),
    "hstack": lambda r, g: torch.hstack([r.z, g.target]).var(0).sum(),
    "column_stack": lambda r, g: torch.column_stack([r.z, g.t, g.y]).mean(0).square().sum(),
    "tile": lambda r, g: r.z.tile(2, 1)[35:50].square().sum(),
    "repeat": lambda r, g: (r.z.repeat(3, 1) - torch.cat([g.target] * 3)).square().mean(),
    "repeat of columns": lambda r, g: of_rows(r.z.repeat(1, 2), g),
    "repeat_interleave": lambda r, g: F.cross_entropy(
        r.z.repeat_interleave(2, dim=0), torch.stack([g.y, 3 - g.y], 1).flatten()
    ),
    "expand of a row": lambda r, g: of_rows(r.z.mean(0).expand(len(g.x), -1) * r.z, g),
    "expand of a column": lambda r, g: of_rows(r.z[:, :1].expand(-1, 4) * g.target, g),
    "pad of columns": lambda r, g: of_rows(F.pad(r.z, (2, 1)), g),
    "pad of rows": lambda r, g: F.pad(r.z, (0, 0, 1, 2), value=1.0).std(),
    "a row beside each": lambda r, g: of_rows(r.net.head(torch.cat([r.z, r.z.mean(0).expand_as(r.z)], -1)), g),
    "meshgrid": lambda r, g: torch.stack(torch.meshgrid(r.z[:, 0], g.t, indexing="ij")).prod(0).sum(),
    "combinations": lambda r, g: torch.combinations(r.z[:, 0]).prod(1).mean(),
    "broadcast_tensors": lambda r, g: torch.broadcast_tensors(r.z[:, :1], g.target)[0].square().mean(),
    "jumping knowledge": lambda r, g: torch.stack([r.net.head(r.h), r.z]).max(0).values.square().mean(),
}

# Between two convs #############################################################


def between(code: Callable[[Tensor, Any], Tensor]) -> Expression:
    """Returns a program with code between its convs."""
    return lambda r, g: F.cross_entropy(r.net.b(code(r.s, g), g.edge_index)[g.train_mask], g.y[g.train_mask])


def pair_norm(x: Tensor, g: Any) -> Tensor:
    x = x - x.mean(0)
    return x / (1e-6 + x.square().sum(1).mean()).sqrt()


def whitened(x: Tensor, g: Any) -> Tensor:
    centred = x - x.mean(0, keepdim=True)
    cov = centred.t() @ centred / (len(x) - 1) + 0.1 * torch.eye(x.size(1), dtype=x.dtype)
    return centred @ torch.linalg.inv(torch.linalg.cholesky(cov)).t()


def diff_group_norm(x: Tensor, g: Any) -> Tensor:
    share = x[:, :2].softmax(1)
    groups = [share[:, k : k + 1] * x for k in range(2)]
    return x + sum((each - each.mean(0)) / each.std(0) for each in groups)


def virtual_node(x: Tensor, g: Any) -> Tensor:
    return x + x.sum(0, keepdim=True).tanh() / 2


def attention_of_all_pairs(x: Tensor, g: Any) -> Tensor:
    return x + (x @ x.t() / math.sqrt(x.size(-1))).softmax(-1) @ x


def linear_attention(x: Tensor, g: Any) -> Tensor:
    keys = x / x.norm()
    return (keys @ (keys.t() @ x) + x) / (keys @ keys.sum(0) + len(x)).unsqueeze(1)


def clusters_of_columns(x: Tensor, g: Any) -> Tensor:
    share = x[:, :3].softmax(1)
    return x + share @ (share.t() @ x / share.sum(0).unsqueeze(1))


def squeezed_and_excited(x: Tensor, g: Any) -> Tensor:
    return x * x.mean(0).sigmoid()


def mean_of_class(x: Tensor, g: Any) -> Tensor:
    means = torch.stack([x[g.train_mask & (g.y == c)].mean(0) for c in range(CLASSES)])
    return x + (x @ means.t()).softmax(1) @ means


FORMS["between two convs"] |= {
    "centring": between(lambda x, g: x - x.mean(0)),
    "centring and scaling": between(lambda x, g: (x - x.mean(0)) / (1 + x.std(0))),
    "scaling by the largest": between(lambda x, g: x / x.abs().max()),
    "scaling by a norm": between(lambda x, g: x / x.norm(dim=0)),
    "a mean of masked rows": between(lambda x, g: x - x[g.train_mask].mean(0)),
    "a moment of a column": between(lambda x, g: x * (x[:, :1] - x[:, 0].mean()).square().mean()),
    "batch norm as a function": between(lambda x, g: F.batch_norm(x, None, None, training=True)),
    "PairNorm": between(pair_norm),
    "whitening": between(whitened),
    "DiffGroupNorm": between(diff_group_norm),
    "virtual node": between(virtual_node),
    "attention of all pairs": between(attention_of_all_pairs),
    "scaled_dot_product_attention": between(lambda x, g: F.scaled_dot_product_attention(x[None], x[None], x[None])[0]),
    "linear attention": between(linear_attention),
    "clusters": between(clusters_of_columns),
    "squeeze and excite": between(squeezed_and_excited),
    "means of classes": between(mean_of_class),
    "softmax over rows": between(lambda x, g: x.softmax(0) * len(x)),
    "cumsum over rows": between(lambda x, g: x.cumsum(0) / 10),
    "sorted rows": between(lambda x, g: x[x[:, 0].argsort()]),
    "one row for all": between(lambda x, g: x + x[5]),
    "the largest row for all": between(lambda x, g: x + x.amax(0)),
    "conditioned on a number": between(lambda x, g: x.relu() if x.mean() > 0 else x.sigmoid()),
    "gated by a mean of t": between(lambda x, g: x * (g.t - g.t.mean()).sigmoid().unsqueeze(1)),
    "rolled rows": between(lambda x, g: x + x.roll(2, 0)),
    "flipped rows": between(lambda x, g: x + x.flip(0)),
}

# Self-supervision ##############################################################


def views(r: Made, g: Any) -> tuple[Tensor, Tensor]:
    """Returns logits of the features, and of features without two columns."""
    columns = torch.ones(FEATURES, dtype=torch.float64)
    columns[:2] = 0
    return r.z, r.net(g.x * columns, g.edge_index)


@form("self-supervision")
def contrast_of_two_views(r: Made, g: Any) -> Tensor:
    one, other = (F.normalize(each, dim=1) for each in views(r, g))
    similar = one @ other.t() / 0.5
    labels = torch.arange(similar.size(0))
    return (F.cross_entropy(similar, labels) + F.cross_entropy(similar.t(), labels)) / 2


@form("self-supervision")
def contrast_of_all_pairs(r: Made, g: Any) -> Tensor:
    both = F.normalize(torch.cat(views(r, g)), dim=1)
    n = len(both) // 2
    similar = (both @ both.t() / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(similar, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


@form("self-supervision")
def contrast_by_hand(r: Made, g: Any) -> Tensor:
    one, other = (F.normalize(each, dim=1) for each in views(r, g))
    within, across = (one @ one.t()).exp(), (one @ other.t()).exp()
    return -torch.log(across.diag() / (within.sum(1) + across.sum(1) - within.diag())).mean()


@form("self-supervision")
def contrast_of_classes(r: Made, g: Any) -> Tensor:
    rows, labels = F.normalize(r.z[g.train_mask], dim=1), g.y[g.train_mask]
    others = ~torch.eye(len(rows), dtype=torch.bool)
    same = (labels[:, None] == labels[None, :]) & others
    log_share = (rows @ rows.t()) - (rows @ rows.t()).exp().mul(others).sum(1, keepdim=True).log()
    return -(log_share * same).sum(1).div(same.sum(1).clamp(min=1)).mean()


@form("self-supervision")
def contrast_with_the_summary(r: Made, g: Any) -> Tensor:
    """As Deep Graph Infomax, with flipped rows as the corruption."""
    positive, negative = r.h, r.net.a(g.x.flip(0), g.edge_index).relu()
    summary = r.net.head(positive.mean(0).sigmoid())
    scores = torch.cat([r.net.head(positive) @ summary, r.net.head(negative) @ summary])
    return F.binary_cross_entropy_with_logits(
        scores, torch.cat([torch.ones(len(positive)), torch.zeros(len(negative))]).double()
    )


@form("self-supervision")
def cross_correlation(r: Made, g: Any) -> Tensor:
    """As Barlow Twins."""
    one, other = ((each - each.mean(0)) / each.std(0) for each in views(r, g))
    c = one.t() @ other / one.shape[0]
    off_diagonal = c - torch.diag(torch.diagonal(c))
    return (torch.diagonal(c) - 1).pow(2).sum() + 0.1 * off_diagonal.pow(2).sum()


@form("self-supervision")
def variance_and_covariance(r: Made, g: Any) -> Tensor:
    """As VICReg."""
    one, other = views(r, g)
    centred = one - one.mean(dim=0)
    cov = (centred.T @ centred) / (len(one) - 1)
    off_diagonal = cov.flatten()[:-1].view(CLASSES - 1, CLASSES + 1)[:, 1:]
    return F.mse_loss(one, other) + F.relu(1 - one.var(0).add(1e-4).sqrt()).mean() + off_diagonal.pow(2).sum() / CLASSES


@form("self-supervision")
def covariance_of_two_views(r: Made, g: Any) -> Tensor:
    """As CCA-SSG."""
    one, other = ((each - each.mean(0)) / each.std(0) / len(each) ** 0.5 for each in views(r, g))
    unit = torch.eye(CLASSES, dtype=one.dtype)
    return (one - other).square().sum() + 0.1 * sum((each.t() @ each - unit).square().sum() for each in (one, other))


@form("self-supervision")
def bootstrap(r: Made, g: Any) -> Tensor:
    """As BGRL: of a copy of the r.net."""
    target = copy.deepcopy(r.net)
    with torch.no_grad():
        wanted = target(g.x * 0.9, g.edge_index)
    return 2 - 2 * F.cosine_similarity(r.z, wanted.detach(), dim=-1).mean()


@form("self-supervision")
def class_means(r: Made, g: Any) -> Tensor:
    rows = r.h
    means = torch.stack([rows[g.train_mask & (g.y == c)].mean(0) for c in range(CLASSES)])
    return F.cross_entropy(-torch.cdist(rows[g.val_mask], means), g.y[g.val_mask])


@form("self-supervision")
def class_means_by_scatter(r: Made, g: Any) -> Tensor:
    rows = r.h
    means = scatter(rows[g.train_mask], g.y[g.train_mask], dim=0, dim_size=CLASSES, reduce="mean")
    distances = (rows.unsqueeze(1) - means.unsqueeze(0)).square().sum(-1)
    return F.cross_entropy(-distances, g.y)


@form("self-supervision")
def center_loss(r: Made, g: Any) -> Tensor:
    centres = hot(g.y).t() @ r.h / hot(g.y).sum(0)[:, None]
    return r.loss + 0.1 * (r.h - centres[g.y]).square().sum(1).mean()


@form("self-supervision")
def assigned_clusters(r: Made, g: Any) -> Tensor:
    """As DeepCluster: rows are assigned to means of all rows, and the assignment is learnt."""
    rows = r.s
    with torch.no_grad():
        centres = rows[[0, 5, 9, 13]].clone()
        for _ in range(3):
            nearest = torch.cdist(rows, centres).argmin(1)
            for c in range(CLASSES):
                if (nearest == c).any():
                    centres[c] = rows[nearest == c].mean(0)
    return F.cross_entropy(r.net.head(rows), nearest)


@form("self-supervision")
def balanced_clusters(r: Made, g: Any) -> Tensor:
    """As SwAV: Sinkhorn's iterations over all rows."""
    out, rows = r.z, r.h
    with torch.no_grad():
        q = torch.exp(out / 0.5).t()
        q /= q.sum()
        for _ in range(3):
            q /= q.sum(dim=1, keepdim=True) * q.shape[0]
            q /= q.sum(dim=0, keepdim=True) * q.shape[1]
        q = (q * q.shape[1]).t()
    return -(q * r.net.head(rows).log_softmax(1)).sum(1).mean()


@form("self-supervision")
def sharpened_clusters(r: Made, g: Any) -> Tensor:
    """As deep embedded clustering."""
    q = 1 / (1 + torch.cdist(r.s, r.net.head.weight).square())
    q = q / q.sum(1, keepdim=True)
    p = q.square() / q.sum(0)
    p = (p / p.sum(1, keepdim=True)).detach()
    return F.kl_div(q.log(), p, reduction="batchmean")


@form("self-supervision")
def cut_loss(r: Made, g: Any) -> Tensor:
    """As MinCut pooling, of edges."""
    share, (source, target) = r.z.softmax(1), g.edge_index
    cut = (share[source] * share[target]).sum() / (share.square().sum(1) * degree(target, len(share)).double()).sum()
    gram = share.t() @ share
    return -cut + (gram / gram.norm() - torch.eye(CLASSES).double() / CLASSES**0.5).norm()


@form("self-supervision")
def mixup_by_roll(r: Made, g: Any) -> Tensor:
    mixed = r.net(0.7 * g.x + 0.3 * g.x.roll(1, 0), g.edge_index)
    return 0.7 * F.cross_entropy(mixed, g.y) + 0.3 * F.cross_entropy(mixed, g.y.roll(1, 0))


@form("self-supervision")
def mixup_of_training_rows(r: Made, g: Any) -> Tensor:
    rows, labels = r.h[g.train_mask], hot(g.y[g.train_mask])
    return F.cross_entropy(r.net.head(0.6 * rows + 0.4 * rows.flip(0)), 0.6 * labels + 0.4 * labels.flip(0))


@form("self-supervision")
def label_propagation(r: Made, g: Any) -> Tensor:
    known = torch.zeros(g.num_nodes, CLASSES).double()
    known[g.train_mask] = hot(g.y[g.train_mask])
    spread, (source, target) = known, g.edge_index
    for _ in range(3):
        spread = 0.8 * scatter(spread[source], target, dim_size=g.num_nodes, reduce="mean") + 0.2 * known
        spread[g.train_mask] = known[g.train_mask]
    return F.cross_entropy(r.z[g.val_mask], spread[g.val_mask])


@form("self-supervision")
def label_propagation_with_a_conv(r: Made, g: Any) -> Tensor:
    known = hot(g.y) * g.train_mask.unsqueeze(1)
    spread = known
    for _ in range(2):
        spread = r.net.b(torch.cat([spread, known], 1), g.edge_index).softmax(1)
        spread = torch.where(g.train_mask.unsqueeze(1), known, spread)
    return -(spread[g.val_mask].log() * hot(g.y[g.val_mask])).sum(1).mean()


@form("self-supervision")
def pseudo_labels(r: Made, g: Any) -> Tensor:
    confidence, label = r.z.detach().softmax(1).max(1)
    sure = (confidence > confidence.median()) & ~g.train_mask
    return r.loss + F.cross_entropy(r.z[sure], label[sure]) * sure.sum() / len(sure)


@form("self-supervision")
def hard_triplets(r: Made, g: Any) -> Tensor:
    rows, labels = r.z[g.train_mask], g.y[g.train_mask]
    distances, same = torch.cdist(rows, rows + 0.01), labels[:, None] == labels[None, :]
    positive = (distances * same).amax(1)
    negative = distances.masked_fill(same, 1e3).amin(1)
    return F.relu(positive - negative + 1).mean()


@form("self-supervision")
def masked_features(r: Made, g: Any) -> Tensor:
    """As GraphMAE."""
    x, masked = g.x.clone(), torch.arange(g.num_nodes) % 3 == 0
    x[masked] = r.net.head.weight.mean(0)
    rebuilt = r.net(x, g.edge_index)
    return (1 - F.cosine_similarity(rebuilt[masked], g.target[masked])).pow(2).mean()


FORMS["self-supervision"] |= {
    "entropy": lambda r, g: -(r.z.softmax(1) * r.z.log_softmax(1)).sum(1).mean(),
    "entropy of the mean": lambda r, g: (r.z.softmax(1).mean(0) * r.z.softmax(1).mean(0).log()).sum(),
    "uniformity": lambda r, g: torch.pdist(F.normalize(r.z, dim=1)).pow(2).mul(-2).exp().mean().log(),
    "alignment": lambda r, g: (views(r, g)[0] - views(r, g)[1]).norm(dim=1).pow(2).mean(),
    "consistency": lambda r, g: F.kl_div(
        views(r, g)[0].log_softmax(1), views(r, g)[1].softmax(1).detach(), reduction="batchmean"
    ),
    "maximum mean discrepancy": lambda r, g: torch.cdist(r.z[g.train_mask], r.z[g.val_mask]).neg().exp().mean(),
    "difference of groups": lambda r, g: (
        (r.z[g.t > 0].softmax(1).mean(0) - r.z[g.t <= 0].softmax(1).mean(0)).abs().max()
    ),
    "coding rate": lambda r, g: (
        -0.5 * torch.logdet(torch.eye(CLASSES).double() + CLASSES / (len(g.x) * 0.5) * r.z.t() @ r.z)
    ),
    "decorrelated columns": lambda r, g: (torch.corrcoef(r.s.t()) - torch.eye(8).double()).square().sum(),
}

# Parameters ####################################################################

FORMS["regularisation of parameters"] |= {
    "squares": lambda r, g: r.loss + 0.01 * sum(p.square().sum() for p in r.net.parameters()),
    "absolute values": lambda r, g: r.loss + 0.01 * sum(p.abs().sum() for p in r.net.parameters()),
    "norms": lambda r, g: r.loss + 0.01 * torch.stack([p.norm() for p in r.net.parameters()]).sum(),
    "norm of all": lambda r, g: r.loss + torch.cat([p.flatten() for p in r.net.parameters()]).norm(),
    "of one layer": lambda r, g: r.loss + 0.1 * r.net.head.weight.pow(2).mean(),
    "parameters alone": lambda r, g: sum(p.square().sum() for p in r.net.parameters()),
    "orthogonality": lambda r, g: r.loss + (r.net.head.weight @ r.net.head.weight.t() - torch.eye(4).double()).norm(),
    "parameters_to_vector": lambda r, g: r.loss + torch.nn.utils.parameters_to_vector(r.net.parameters()).std(),
    "scaled by the loss": lambda r, g: r.loss * r.net.head.weight.norm(),
    "scaled by how many": lambda r, g: r.loss + r.net.head.weight.square().sum() / len(g.x),
    "distance to a copy": lambda r, g: r.loss + (r.net.head.weight - r.net.head.weight.detach() * 0.9).norm(),
    "named": lambda r, g: r.loss + sum(p.square().mean() for n, p in r.net.named_parameters() if "weight" in n),
    "over rows and parameters": lambda r, g: (r.h @ r.net.head.weight.t()).square().mean() + r.net.head.bias.max(),
    "a parameter as a class": lambda r, g: F.cross_entropy(r.h @ F.normalize(r.net.head.weight, dim=1).t(), g.y),
    "singular values": lambda r, g: r.loss + torch.linalg.svdvals(r.net.head.weight)[0],
}

# Numbers of Python #############################################################


@form("numbers of Python")
def if_the_loss_is_large(r: Made, g: Any) -> Tensor:
    loss = r.loss
    return loss.sqrt() if loss.item() > 1 else loss.square()


@form("numbers of Python")
def if_a_tensor_is_large(r: Made, g: Any) -> Tensor:
    return r.z.square().mean() if g.x.mean() > 0 and not (g.t > 2).any() else r.z.abs().mean()


@form("numbers of Python")
def until_it_is_small(r: Made, g: Any) -> Tensor:
    rows = r.z
    while float(rows.norm()) > 1:
        rows = rows / 2
    return rows.exp().mean()


@form("numbers of Python")
def weights_of_two_losses(r: Made, g: Any) -> Tensor:
    losses = [r.loss, F.mse_loss(r.z, g.target)]
    total = sum(loss.item() for loss in losses)
    return sum(loss * (loss.item() / total) for loss in losses)


@form("numbers of Python")
def classes_that_there_are(r: Made, g: Any) -> Tensor:
    losses = [r.losses[g.y == c].mean() * (c + 1) for c in g.y.unique().tolist()]
    return torch.stack(losses).mean() / (int(g.y.max()) + 1)


@form("numbers of Python")
def accuracy_by_hand(r: Made, g: Any) -> Any:
    right = (r.z.argmax(dim=-1) == g.y)[g.val_mask]
    return int(right.sum()) / int(g.val_mask.sum()), right.double().mean().item(), float(right.sum()) / len(right)


FORMS["numbers of Python"] |= {
    "item": lambda r, g: r.loss / r.z.std().item(),
    "float": lambda r, g: r.loss * float(r.z.mean()),
    "int": lambda r, g: r.loss / int(g.train_mask.sum()),
    "bool": lambda r, g: r.loss * (2 if bool((g.x > 2).any()) else 3),
    "not": lambda r, g: r.loss * (2 if not g.train_mask.all() else 3),
    "math of a mean": lambda r, g: r.loss * math.exp(r.z.mean()),
    "power": lambda r, g: r.loss ** (1 + float(g.train_mask.double().mean())),
    "round": lambda r, g: r.loss * round(float(r.z.square().sum()), 3),
    "abs and max": lambda r, g: r.loss * max(abs(float(r.z.min())), float(r.z.max())),
    "tolist of a mean": lambda r, g: r.z.mean(0).tolist(),
    "tolist of rows": lambda r, g: sum(row[0] for row in g.target.tolist()),
    "tolist of labels": lambda r, g: [g.y.tolist().count(c) for c in range(CLASSES)],
    "numpy of a mean": lambda r, g: float(r.z.detach().mean(0).numpy().sum()),
    "numpy of rows": lambda r, g: float(np.median(r.z.detach().numpy()[:, 0])),
    "a temperature": lambda r, g: F.cross_entropy(r.z / float(r.z.std()), g.y),
    "a margin": lambda r, g: F.relu(r.z - r.z.mean().item()).mean(),
    "how many are right": lambda r, g: (r.z.argmax(1) == g.y).sum().item(),
    "as many as are positive": lambda r, g: r.z[:, 0].topk(int((g.t > 0).sum())).values.sum(),
    "equal and allclose": lambda r, g: (
        torch.equal(g.y, g.y.clone()),
        torch.equal(g.y, g.y.flip(0)),
        torch.allclose(g.x, g.x + 1e-12),
        bool((g.y == g.y[0]).all()),
    ),
    "is finite": lambda r, g: bool(r.z.isfinite().all()) and not torch.isnan(r.z).any().item(),
    "in": lambda r, g: (2 in g.y, 9 in g.y),
    "a class by index": lambda r, g: r.z[:, int(g.y.mode().values)].square().mean(),
    "a row by index": lambda r, g: r.z[int(g.t.argmax())].square().sum(),
    "a slice by numbers": lambda r, g: r.z[int(g.y.min()) : int(g.n_id.max()) // 2].square().mean(),
    "divmod": lambda r, g: divmod(int(g.y.sum()), int(g.val_mask.sum())),
    "sum of items": lambda r, g: sum(float(each) for each in r.z.mean(0)),
    "complex comparison": lambda r, g: 0.0 < float(r.z.var()) < 1e3 and float(g.t.max()) == 1.5,
}

# Metrics #######################################################################

OF_CLASSES: dict[str, Any] = {"task": "multiclass", "num_classes": CLASSES}
METRICS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "accuracy": lambda z, y: metrics.accuracy(z, y, **OF_CLASSES),
    "accuracy, macro": lambda z, y: metrics.accuracy(z, y, **OF_CLASSES, average="macro"),
    "accuracy, top 2": lambda z, y: metrics.accuracy(z, y, **OF_CLASSES, top_k=2),
    "accuracy, ignore_index": lambda z, y: metrics.accuracy(z, y, **OF_CLASSES, ignore_index=1),
    "f1": lambda z, y: metrics.f1_score(z, y, **OF_CLASSES, average="macro"),
    "f1, none": lambda z, y: metrics.f1_score(z, y, **OF_CLASSES, average="none"),
    "f1, weighted": lambda z, y: metrics.f1_score(z, y, **OF_CLASSES, average="weighted"),
    "precision and recall": lambda z, y: (
        metrics.precision(z, y, **OF_CLASSES, average="macro"),
        metrics.recall(z, y, **OF_CLASSES, average="macro"),
    ),
    "auroc": lambda z, y: metrics.auroc(z.softmax(1), y, **OF_CLASSES),
    "auroc, binary": lambda z, y: metrics.auroc(z[:, 0].sigmoid(), (y > 1).long(), task="binary"),
    "auroc, thresholds": lambda z, y: metrics.auroc(z.softmax(1), y, **OF_CLASSES, thresholds=7),
    "average precision": lambda z, y: metrics.average_precision(z.softmax(1), y, **OF_CLASSES),
    "confusion matrix": lambda z, y: metrics.confusion_matrix(z.argmax(1), y, **OF_CLASSES),
    "confusion matrix, normalised": lambda z, y: metrics.confusion_matrix(z, y, **OF_CLASSES, normalize="all"),
    "cohen kappa": lambda z, y: metrics.cohen_kappa(z, y, **OF_CLASSES),
    "matthews": lambda z, y: metrics.matthews_corrcoef(z, y, **OF_CLASSES),
    "jaccard": lambda z, y: metrics.jaccard_index(z, y, **OF_CLASSES),
    "calibration error": lambda z, y: metrics.calibration_error(z.softmax(1), y, **OF_CLASSES, n_bins=5),
    "stat scores": lambda z, y: metrics.stat_scores(z, y, **OF_CLASSES, average="none"),
}
for _name, _metric in METRICS.items():
    FORMS["metrics"] |= {
        _name: lambda r, g, metric=_metric: metric(r.z.detach(), g.y),
        f"{_name}, of a mask": lambda r, g, metric=_metric: metric(r.z.detach()[g.val_mask], g.y[g.val_mask]),
    }
FORMS["metrics"] |= {
    "mean squared error": lambda r, g: metrics.mean_squared_error(r.z, g.target),
    "root mean squared error": lambda r, g: metrics.mean_squared_error(r.z, g.target, squared=False),
    "mean absolute error": lambda r, g: metrics.mean_absolute_error(r.z[g.val_mask], g.target[g.val_mask]),
    "r2": lambda r, g: metrics.r2_score(r.z, g.target),
    "r2, by column": lambda r, g: metrics.r2_score(r.z.detach(), g.target, multioutput="raw_values"),
    "pearson": lambda r, g: metrics.pearson_corrcoef(r.z[:, 0], g.t),
    "spearman, with ties": lambda r, g: metrics.spearman_corrcoef(r.z.detach()[:, 0], g.t),
    "concordance": lambda r, g: metrics.concordance_corrcoef(r.z[:, 0], g.t).squeeze(),
    "explained variance": lambda r, g: metrics.explained_variance(r.z, g.target),
    "cosine similarity": lambda r, g: metrics.cosine_similarity(r.z, g.target, reduction="mean"),
    "kl divergence": lambda r, g: metrics.kl_divergence(r.z.softmax(1), g.target.softmax(1)),
    "pairwise cosine similarity": lambda r, g: metrics.pairwise_cosine_similarity(r.z).square().mean(),
    "hinge loss": lambda r, g: metrics.hinge_loss(r.z, g.y, **OF_CLASSES),
}

# Detached, cast, viewed ########################################################


@form("detached and cast")
def within_no_grad(r: Made, g: Any) -> Tensor:
    out = r.z
    with torch.no_grad():
        scale = out.square().mean().sqrt()
        best = out.argmax(1)
    return (out / scale).square().mean() + F.cross_entropy(out, best)


@form("detached and cast")
def new_leaf(r: Made, g: Any) -> Tensor:
    leaf = r.z.detach().clone().requires_grad_()
    F.cross_entropy(leaf, g.y).backward()
    return (r.z * leaf.grad).sum()


FORMS["detached and cast"] |= {
    "detach": lambda r, g: F.mse_loss(r.z, r.z.detach().mean(0).expand_as(g.target)),
    "data": lambda r, g: (r.z * r.z.data.std(0)).square().mean(),
    "clone": lambda r, g: r.z.clone().sub(r.z.mean(0).clone()).square().mean(),
    "to(float32)": lambda r, g: r.z.to(torch.float32).double().square().mean(),
    "float": lambda r, g: g.x.float().mean(0),
    "half of a mask": lambda r, g: g.train_mask.half().double().mean(),
    "long of rows": lambda r, g: (g.t * 4).long().sum(),
    "int of a comparison": lambda r, g: ((r.z.argmax(1) == g.y).int().sum(), (g.t > 0).float().mean()),
    "bool of labels": lambda r, g: r.losses[g.y.bool()].mean(),
    "type_as": lambda r, g: (g.train_mask.type_as(g.x) * r.losses).sum(),
    "to another": lambda r, g: (g.y.to(g.x) * r.losses).mean(),
    "to a device": lambda r, g: r.z.to("cpu").cpu().contiguous().square().mean(),
    "a float32 scale": lambda r, g: (r.z * torch.tensor(0.5)).square().mean(),
    "straight-through": lambda r, g: of_rows(hot(r.z.argmax(1)) - r.z.detach() + r.z, g),
    "detached statistics": lambda r, g: ((r.z - r.z.mean(0).detach()) / r.z.std(0).detach()).exp().mean(),
    "as_tensor": lambda r, g: (torch.as_tensor(g.t) * r.losses).mean(),
    "deepcopy of rows": lambda r, g: (copy.deepcopy(g.t) * r.losses).mean(),
    "nan_to_num": lambda r, g: torch.nan_to_num(r.z / (g.t.unsqueeze(1) * 0 + 1)).mean(),
}
SHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(-1, 2, 4).softmax(1).std(0),
    "view of two rows": lambda x: x.view(2, -1)[0],
    "view(-1)": lambda x: x.contiguous().view(-1)[3:19],
    "view, len": lambda x: x.view(len(x), 4, 2).amax(2).mean(0),
    "view_as": lambda x: x.view(-1, 4, 2).view_as(x).mean(0),
    "reshape": lambda x: x.reshape(x.size(0), 2, 4).prod(1).sum(0),
    "reshape to twice the rows": lambda x: x.reshape(-1, 4).std(0),
    "reshape to half the columns": lambda x: x.reshape(-1, 2).softmax(1).mean(0),
    "flatten": lambda x: x.flatten()[::7],
    "flatten of heads": lambda x: x.view(-1, 2, 4).flatten(1).std(0),
    "flatten of rows and heads": lambda x: x.view(-1, 2, 4).flatten(0, 1).std(0),
    "unflatten": lambda x: x.unflatten(1, (4, 2)).amax(0),
    "ravel": lambda x: x.ravel().view(-1, 8).mean(0),
    "squeeze and unsqueeze": lambda x: x.unsqueeze(0).squeeze(0).unsqueeze(-1).mean(0).squeeze(-1),
    "t()": lambda x: x.t().softmax(0).mean(1),
    "T": lambda x: x.T.std(dim=1),
    "t(), indexed": lambda x: x.t()[1:3].mean(-1),
    "transpose": lambda x: x.transpose(0, 1).norm(dim=1),
    "swapaxes": lambda x: x.view(-1, 2, 4).swapaxes(1, 2).softmax(2).std(0),
    "permute": lambda x: x.view(-1, 2, 4).permute(1, 0, 2).mean(1),
    "permute, then a view": lambda x: x.view(-1, 2, 4).permute(1, 2, 0).reshape(8, -1).std(1),
    "permute, then rows": lambda x: x.view(-1, 2, 4).permute(1, 0, 2).contiguous().view(2, -1).std(1),
    "movedim": lambda x: x.view(-1, 2, 4).movedim(0, 2).sum(2),
    "contiguous": lambda x: x.t().contiguous().t().std(0),
    "einsum with heads": lambda x: torch.einsum("nhc,nhd->hcd", x.view(-1, 2, 4), x.view(-1, 2, 4)),
    "einsum of heads with rows": lambda x: (
        torch.einsum("nhc,mhc->nmh", x.view(-1, 2, 4), x.view(-1, 2, 4)).softmax(1).std((0, 1))
    ),
    "mean of heads": lambda x: x.view(-1, 2, 4).mean(1).std(0),
    "cat of heads": lambda x: torch.cat([*x.view(-1, 2, 4).unbind(1)], 1).std(0),
    "stack of chunks": lambda x: torch.stack(x.chunk(2, 1)).std(1),
    "three dimensions, one row": lambda x: x.view(-1, 2, 4)[5],
    "three dimensions, an index": lambda x: x.view(-1, 2, 4)[[5, 0], 1],
    "expand": lambda x: x[:, :, None].expand(-1, -1, 3).mean((0, 2)),
    "unfold of columns": lambda x: x.unfold(1, 2, 2).prod(-1).std(0),
    "as a picture": lambda x: F.avg_pool1d(x.unsqueeze(1), 2).squeeze(1).std(0),
    "conv1d of columns": lambda x: F.conv1d(x.unsqueeze(1), torch.ones(1, 1, 3).double()).mean(0),
    "glu": lambda x: F.glu(x, 1).std(0),
    "tril of a product": lambda x: (x.t() @ x).tril(),
    "diag of a product": lambda x: torch.diag(x.t() @ x),
    "take of a transposed": lambda x: x.t()[:, :6].mean(1),
}
"""Of ``[N, 8]``: something that is not of rows."""
for _name, _shape in SHAPED.items():
    FORMS["views"][_name] = lambda r, g, shape=_shape: dot(shape(r.s))

# Autograd ######################################################################


def loss_of(r: Made, g: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(r.net(x, g.edge_index)[g.train_mask], g.y[g.train_mask])


@form("autograd")
def gradient_penalty(r: Made, g: Any) -> Tensor:
    x = g.x.clone().requires_grad_()
    loss = loss_of(r, g, x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


@form("autograd")
def gradient_penalty_by_row(r: Made, g: Any) -> Tensor:
    x = g.x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(r.net(x, g.edge_index).sum(), x, create_graph=True)
    return ((grad.square().sum(1) + 1e-6).sqrt() - 1).square().mean()


@form("autograd")
def gradient_of_hidden_rows(r: Made, g: Any) -> Tensor:
    rows = r.s
    loss = F.cross_entropy(r.net.b(rows, g.edge_index), g.y)
    (grad,) = torch.autograd.grad(loss, rows, create_graph=True)
    return loss + grad.norm()


@form("autograd")
def gradient_of_rows_without_graph(r: Made, g: Any) -> Any:
    x = g.x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(r, g, x), x)
    return grad.norm(), grad.abs().sum(0), grad[:5]


@form("autograd")
def adversarial_rows(r: Made, g: Any) -> Tensor:
    x = g.x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(r, g, x), x)
    return loss_of(r, g, g.x + 0.3 * grad / grad.norm())


@form("autograd")
def virtual_adversarial_rows(r: Made, g: Any) -> Tensor:
    d = (0.1 * g.x.flip(0)).requires_grad_()
    wanted = r.z.detach().softmax(1)
    loss = F.kl_div(r.net(g.x + d, g.edge_index).log_softmax(1), wanted, reduction="batchmean")
    (grad,) = torch.autograd.grad(loss, d)
    moved = r.net(g.x + F.normalize(grad, dim=1), g.edge_index)
    return F.kl_div(moved.log_softmax(1), wanted, reduction="batchmean")


@form("autograd")
def gradients_of_parameters(r: Made, g: Any) -> Tensor:
    loss = r.loss
    grads = torch.autograd.grad(loss, [r.net.a.lin_l.weight, r.net.b.lin_l.weight], create_graph=True)
    return loss + sum(grad.square().sum() for grad in grads)


@form("autograd")
def gradients_of_parameters_without_graph(r: Made, g: Any) -> Any:
    return [grad.norm() for grad in torch.autograd.grad(r.loss, [*r.net.a.parameters(), *r.net.b.parameters()])]


@form("autograd")
def inner_step(r: Made, g: Any) -> Tensor:
    """As MAML, of the head."""
    rows = r.h
    inner = F.cross_entropy(r.net.head(rows[g.train_mask]), g.y[g.train_mask])
    (grad,) = torch.autograd.grad(inner, r.net.head.weight, create_graph=True)
    outer = F.linear(rows[g.val_mask], r.net.head.weight - 0.5 * grad, r.net.head.bias)
    return F.cross_entropy(outer, g.y[g.val_mask])


@form("autograd")
def weights_by_gradients(r: Made, g: Any) -> Tensor:
    losses = [r.loss, F.mse_loss(r.z, g.target)]
    norms = [torch.autograd.grad(loss, r.net.b.lin_l.weight, retain_graph=True)[0].norm() for loss in losses]
    return sum(loss / norm for loss, norm in zip(losses, norms))


@form("autograd")
def conflicting_gradients(r: Made, g: Any) -> Tensor:
    losses = [r.loss, -F.mse_loss(r.z, g.target)]
    one, other = (torch.autograd.grad(loss, r.net.b.lin_l.weight, retain_graph=True)[0] for loss in losses)
    return losses[0] - losses[1] * (1.0 if (one * other).sum() < 0 else 0.5)


@form("autograd")
def hessian_times_vector(r: Made, g: Any) -> Tensor:
    (grad,) = torch.autograd.grad(r.loss, r.net.b.lin_l.weight, create_graph=True)
    return (grad * grad.detach()).sum()


@form("autograd")
def hook_that_scales(r: Made, g: Any) -> Tensor:
    rows = r.s
    rows.register_hook(lambda grad: grad / grad.norm())
    return F.cross_entropy(r.net.b(rows, g.edge_index), g.y)


@form("autograd")
def hook_that_centres(r: Made, g: Any) -> Tensor:
    rows = r.s
    rows.register_hook(lambda grad: grad - grad.mean(0))
    return F.cross_entropy(r.net.b(rows, g.edge_index), g.y)


@form("autograd")
def hook_that_clips(r: Made, g: Any) -> Tensor:
    rows = r.s
    rows.register_hook(lambda grad: grad * min(1.0, 0.01 / float(grad.norm())))
    return F.cross_entropy(r.net.b(rows, g.edge_index), g.y)


@form("autograd")
def hook_by_row(r: Made, g: Any) -> Tensor:
    rows = r.s
    rows.register_hook(lambda grad: grad * g.train_mask.unsqueeze(1))
    return F.cross_entropy(r.net.b(rows, g.edge_index), g.y)


@form("autograd")
def hook_on_the_logits(r: Made, g: Any) -> Tensor:
    out = r.z
    out.register_hook(lambda grad: grad.clamp(-0.005, 0.005) * len(grad))
    return F.cross_entropy(out[g.train_mask], g.y[g.train_mask])


@form("autograd")
def hook_on_the_loss(r: Made, g: Any) -> Tensor:
    loss = r.loss
    loss.register_hook(lambda grad: grad * 3)
    return loss


@form("autograd")
def hook_on_a_mean(r: Made, g: Any) -> Tensor:
    mean = r.s.mean(0)
    mean.register_hook(lambda grad: grad / grad.norm())
    return dot(mean.square())


@form("autograd")
def hook_on_rows_differentiated_again(r: Made, g: Any) -> Tensor:
    rows = r.s
    rows.register_hook(lambda grad: grad - grad.mean(0))
    (grad,) = torch.autograd.grad(r.net.head(rows).pow(3).mean(), rows, create_graph=True)
    return dot(grad.square().sum(0))


@form("autograd")
def hook_on_a_mean_differentiated_again(r: Made, g: Any) -> Tensor:
    rows = r.s
    mean = rows.mean(0)
    mean.register_hook(lambda grad: grad * grad.norm())
    (grad,) = torch.autograd.grad(mean.pow(3).sum(), rows, create_graph=True)
    return dot(grad.square().sum(0))


@form("autograd")
def reversed_gradient(r: Made, g: Any) -> Tensor:
    rows = r.s
    backwards = rows * 1.0
    backwards.register_hook(lambda grad: -0.5 * grad)
    return F.cross_entropy(r.net.b(rows, g.edge_index), g.y) + F.cross_entropy(r.net.head(backwards), (g.t > 0).long())


@form("autograd")
def hook_on_a_parameter(r: Made, g: Any) -> Any:
    weight, bias = r.net.head.weight, r.net.head.bias
    hooks = [weight.register_hook(lambda grad: grad.clamp(-0.005, 0.005)), weight.register_hook(lambda grad: grad * grad.norm())]
    seen: list[Tensor] = []
    hooks.append(bias.register_hook(lambda grad: seen.append(grad.norm())))
    loss = F.cross_entropy(r.net.head(r.s), (g.t > 0).long())
    grads = torch.autograd.grad(loss, (weight, bias, weight), retain_graph=True)
    again = torch.autograd.grad(loss, weight)
    for hook in hooks:
        hook.remove()
    return *grads, *again, *seen, grads[0].norm() + again[0].sum()


@form("autograd")
def kept_gradient_of_rows(r: Made, g: Any) -> Any:
    rows = r.s
    rows.retain_grad()
    F.cross_entropy(r.net.b(rows, g.edge_index), g.y).backward()
    return rows.grad.norm(), rows.grad[7]


@form("autograd")
def backward_of_rows(r: Made, g: Any) -> Any:
    out = r.z
    out.backward(g.target / len(out))
    return r.net.b.lin_l.weight.grad, r.net.a.lin_r.weight.grad


@form("autograd")
def two_backwards(r: Made, g: Any) -> Any:
    r.loss.backward()
    F.mse_loss(r.net(g.x, g.edge_index), g.target).backward()
    return [parameter.grad for parameter in r.net.b.parameters()]


FORMS["autograd"] |= {
    "checkpoint": lambda r, g: F.cross_entropy(checkpoint(r.net, g.x, g.edge_index, use_reentrant=False), g.y),
    "checkpoint of a conv": lambda r, g: F.cross_entropy(
        checkpoint(r.net.b, r.h, g.edge_index, use_reentrant=False)[g.train_mask], g.y[g.train_mask]
    ),
    "checkpoint, reentrant": lambda r, g: F.cross_entropy(
        checkpoint(r.net.b, r.h, g.edge_index, use_reentrant=True), g.y
    ),
    "checkpoint of a reduction": lambda r, g: of_rows(
        checkpoint(lambda x: (x - x.mean(0)) / x.std(0), r.s, use_reentrant=False), g
    ),
    "checkpoint of a reduction, reentrant": lambda r, g: of_rows(
        checkpoint(lambda x: (x - x.mean(0)) / x.std(0), r.s, use_reentrant=True), g
    ),
    "checkpoint of a loss, reentrant": lambda r, g: checkpoint(F.cross_entropy, r.z, g.y, use_reentrant=True),
    "checkpoint of what was reduced, reentrant": lambda r, g: (
        checkpoint(lambda x, mean: (x * mean).tanh(), r.s, r.s.mean(0), use_reentrant=True).pow(2).mean()
    ),
    "checkpoint of a loss": lambda r, g: checkpoint(F.cross_entropy, r.z, g.y, use_reentrant=False),
    "gradient of one row": lambda r, g: torch.autograd.grad(r.z[7].sum(), [*r.net.b.parameters()]),
    "gradient of a row by rows": lambda r, g: (
        lambda x: torch.autograd.grad(r.net(x, g.edge_index)[7, 1], x)[0].abs().sum(1)[:10]
    )(g.x.clone().requires_grad_()),
    "grad_outputs": lambda r, g: torch.autograd.grad(r.z, r.net.b.lin_r.weight, g.target)[0],
}

if __name__ == "__main__":
    main()
