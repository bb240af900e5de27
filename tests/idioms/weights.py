"""Weights that are more than parameters: pruning, weight and spectral norm, low-rank adapters, hooks, subclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch_geometric import nn

from idioms.convs import HIDDEN, Layers, mlp, two
from idioms.harness import CLASSES, FEATURES, Case, graph
from idioms.plain import idiom
from idioms.steps import Classifier

Change = Callable[[torch.nn.Module], Any]

PNA = partial(nn.PNAConv, aggregators=["mean", "max"], scalers=["identity"], deg=torch.tensor([3, 5, 9]))


def all_kinds() -> torch.nn.Module:
    """Convs whose linear maps may be put on the other side of the sum, and PNA and attention.

    Not TAGConv, which itself calls its maps past their hooks.
    """
    wide = 2 * HIDDEN
    return Layers(
        nn.GCNConv(FEATURES, wide),
        nn.SAGEConv(wide, HIDDEN),
        nn.GraphConv(HIDDEN, 6),
        nn.GINConv(mlp(6, HIDDEN)),
        nn.SGConv(HIDDEN, 6, K=2),
        PNA(6, HIDDEN),
        nn.GATConv(HIDDEN, CLASSES),
    )


def maps_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [each for each in module.modules() if isinstance(each, (torch.nn.Linear, nn.Linear))]


def changed(change: Change) -> Case:
    """A model whose linear maps are changed before training."""
    model = all_kinds().double()
    for each in maps_of(model):
        change(each)
    return Case(Classifier(model), graph())


class During(L.Callback):
    """Changes linear maps when an epoch starts."""

    def __init__(self, epoch: int, change: Change) -> None:
        self.epoch, self.change = epoch, change

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            for each in maps_of(pl_module):
                self.change(each)


def during(change: Change, epoch: int = 1) -> Case:
    return Case(Classifier(all_kinds()), graph(), {"callbacks": [During(epoch, change)]})


@idiom(source="torch.nn.utils.weight_norm")
def weight_norm_before() -> Case:
    return changed(weight_norm)


@idiom(source="torch.nn.utils.spectral_norm", rtol=1e-6)
def spectral_norm_before() -> Case:
    return changed(spectral_norm)


@idiom(source="torch.nn.utils.parametrizations.weight_norm")
def weight_norm_as_parametrization() -> Case:
    return changed(parametrizations.weight_norm)


@idiom(source="torch.nn.utils.parametrizations.spectral_norm", rtol=1e-6)
def spectral_norm_as_parametrization() -> Case:
    return changed(parametrizations.spectral_norm)


@idiom(source="torch.nn.utils.prune before training")
def pruned_before() -> Case:
    return changed(lambda each: prune.l1_unstructured(each, "weight", 0.4))


@idiom(source="torch.nn.utils.prune during fit")
def pruned_during_fit() -> Case:
    return during(lambda each: prune.l1_unstructured(each, "weight", 0.4))


@idiom(source="torch.nn.utils.prune, made permanent during fit")
def pruned_and_made_permanent() -> Case:
    def change(each: torch.nn.Module) -> None:
        prune.l1_unstructured(each, "weight", 0.4)
        prune.remove(each, "weight")

    return during(change)


@idiom(source="lightning ModelPruning")
def pruned_by_lightning() -> Case:
    callback = ModelPruning("l1_unstructured", amount=0.3, use_global_unstructured=True, verbose=0)
    return Case(Classifier(all_kinds()), graph(), {"callbacks": [callback]})


@idiom(source="lightning ModelPruning of one layer, with the lottery ticket hypothesis")
def model_pruning_of_a_layer() -> Case:
    model = two(nn.GCNConv)
    callback = ModelPruning("l1_unstructured", parameters_to_prune=[(model.convs[0].lin, "weight")], amount=0.5)
    return Case(Classifier(model), graph(), {"callbacks": [callback]})


@idiom(source="spectral_norm added during fit", rtol=1e-6, stages=("fit",))
def spectral_norm_during_fit() -> Case:
    # Its parameters are in no optimizer, as on one device.
    return during(spectral_norm)


@idiom(source="weights quantised by a parametrization during fit")
def quantised_during_fit() -> Case:
    class Rounded(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight + ((weight * 64).round() / 64 - weight).detach()

    return during(lambda each: parametrize.register_parametrization(each, "weight", Rounded()))


class LowRank(torch.nn.Linear):
    """A linear map beside which another of low rank learns."""

    def __init__(self, base: Any) -> None:
        super().__init__(base.weight.size(1), base.weight.size(0), base.bias is not None)
        self.load_state_dict(base.state_dict())
        self.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(2, self.in_features) / 4)
        self.b = torch.nn.Parameter(torch.randn(self.out_features, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.t() @ self.b.t()


@idiom(source="LoRA: a subclass of Linear in the place of a conv's map")
def low_rank_adapters() -> Case:
    model = two(nn.GCNConv)
    for conv in model.convs:
        conv.lin = LowRank(conv.lin)
    return Case(Classifier(model), graph())


@idiom(source="LoRA for SAGEConv, GraphConv and GINConv")
def low_rank_adapters_of_other_convs() -> Case:
    model = Layers(nn.SAGEConv(FEATURES, HIDDEN), nn.GraphConv(HIDDEN, 6), nn.GINConv(mlp(6, 4)), PNA(4, CLASSES))
    model.convs[0].lin_l, model.convs[1].lin_rel = LowRank(model.convs[0].lin_l), LowRank(model.convs[1].lin_rel)
    model.convs[2].nn[0] = LowRank(model.convs[2].nn[0])
    model.convs[3].pre_nns[0][0] = LowRank(model.convs[3].pre_nns[0][0])
    return Case(Classifier(model), graph())


@idiom(source="a forward hook that changes what a map returns")
def forward_hooks() -> Case:
    return during(lambda each: each.register_forward_hook(lambda _, given, out: out.tanh()))


@idiom(source="a forward hook on the network of a GINConv, and on a layer before PNA's aggregation")
def hooks_on_containers() -> Case:
    model = Layers(nn.GINConv(mlp(FEATURES, 6)), PNA(6, CLASSES))
    model.convs[0].nn.register_forward_pre_hook(lambda _, given: (given[0].sin(),))
    model.convs[1].pre_nns[0].register_forward_hook(lambda _, given, out: out.square())
    return Case(Classifier(model), graph())


@idiom(source="full backward hooks: gradients halved", refused="of unknown origin")
def backward_hooks() -> Case:
    def hook(module: Any, grad_input: Any, grad_output: Any) -> Any:
        return tuple(None if grad is None else grad / 2 for grad in grad_input)

    return during(lambda each: each.register_full_backward_hook(hook), epoch=0)


@idiom(source="activations watched by hooks")
def activations_by_hook() -> Case:
    model, seen = all_kinds(), []

    def keep(module: Any, given: Any, out: Tensor) -> None:
        seen.append(float(out.shape[-1]))

    for conv in model.convs:
        conv.register_forward_hook(keep)
    return Case(Classifier(model), graph())


@idiom(source="hooks of MessagePassing, added during fit")
def message_hooks() -> Case:
    class Adds(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                for conv in pl_module.model.convs:
                    conv.register_aggregate_forward_hook(lambda conv, given, out: out * 0.5)
                    conv.register_message_forward_hook(lambda conv, given, out: out.tanh())

    model = Layers(nn.SAGEConv(FEATURES, HIDDEN), nn.GATConv(HIDDEN, HIDDEN), nn.GCNConv(HIDDEN, CLASSES))
    return Case(Classifier(model), graph(), {"callbacks": [Adds()]})


@idiom(source="weights tied between convs")
def tied_weights() -> Case:
    model = Layers(nn.GCNConv(FEATURES, FEATURES), nn.GCNConv(FEATURES, FEATURES), nn.SAGEConv(FEATURES, CLASSES))
    model.convs[1].lin.weight = model.convs[0].lin.weight
    return Case(Classifier(model), graph())


@idiom(source="weights that another network makes")
def weights_that_a_network_makes() -> Case:
    class Hyper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.make = torch.nn.Parameter(torch.randn(4)), torch.nn.Linear(4, FEATURES * CLASSES)
            self.conv = nn.SimpleConv(aggr="mean", combine_root="self_loop")

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index) @ self.make(self.code).view(FEATURES, CLASSES)

    return Case(Classifier(Hyper()), graph())


@idiom(source="functional_call with other weights, as MAML has it")
def functional_call() -> Case:
    class Inner(Classifier):
        def forward(self, batch: Any) -> Tensor:
            weights = {name: 0.9 * value for name, value in self.model.named_parameters()}
            return torch.func.functional_call(self.model, weights, (batch.x, batch.edge_index))

    return Case(Inner(two(nn.GCNConv)), graph())


@idiom(
    source="the gradient penalty of double backward",
    refused="create_graph=True",
    stages=("fit",),
)
def double_backward() -> Case:
    class Penalised(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            grads = torch.autograd.grad(loss, list(self.model.parameters()), create_graph=True)
            return loss + 0.1 * sum(grad.square().sum() for grad in grads)

    return Case(Penalised(two(nn.GCNConv)), graph())


@idiom(source="adversarial noise on the input: FLAG, by the gradient of the loss", stages=("fit",))
def gradient_of_the_input() -> Case:
    class Saliency(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.inference_mode(False), torch.enable_grad():
                x = batch.x.clone().requires_grad_()
                out = self.model(x, batch.edge_index)
                return torch.autograd.grad(out.sum(), x)[0]

    return Case(Saliency(two(nn.GCNConv)), graph(), {"inference_mode": False})


# Subclasses ###################################################################


class Activated(nn.SAGEConv):
    def forward(self, x: Any, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, edge_index).relu()


class OtherMessages(nn.SAGEConv):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.sigmoid()


@idiom(source="subclasses of SAGEConv with a forward, or messages, of their own")
def subclasses_of_sage() -> Case:
    return Case(Classifier(Layers(Activated(FEATURES, HIDDEN), OtherMessages(HIDDEN, CLASSES))), graph())


class ActivatedGCN(nn.GCNConv):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, edge_index).relu()


@idiom(source="a subclass of GCNConv that calls super().forward", refused="ActivatedGCN.forward calls super")
def subclass_of_gcn() -> Case:
    return Case(Classifier(Layers(ActivatedGCN(FEATURES, HIDDEN), nn.GCNConv(HIDDEN, CLASSES))), graph())


class Heads(torch.nn.BatchNorm1d):
    """Normalises each head's columns alike."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(-1, HIDDEN // 2)).view(len(x), -1)


@idiom(source="a subclass of BatchNorm1d with a forward of its own")
def subclass_of_batch_norm() -> Case:
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = Layers(nn.SAGEConv(FEATURES, HIDDEN, bias=False), nn.SAGEConv(HIDDEN, CLASSES)).convs
            self.norm = Heads(HIDDEN // 2)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.convs[1](self.norm(self.convs[0](x, edge_index)).relu(), edge_index)

    return Case(Classifier(Normed()), graph())


@idiom(source="forward replaced on a conv", refused="had its forward replaced")
def forward_replaced_on_a_conv() -> Case:
    model = two(nn.SAGEConv)
    plain = model.convs[0].forward
    model.convs[0].forward = lambda x, edge_index: plain(x, edge_index).tanh()
    return Case(Classifier(model), graph())


@idiom(source="an ensemble of copies")
def ensemble() -> Case:
    class Ensemble(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = two(nn.GCNConv)
            self.members = torch.nn.ModuleList(copy.deepcopy(first) for _ in range(3))
            for each in self.members[1:]:
                for conv in each.convs:
                    conv.reset_parameters()

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return torch.stack([each(x, edge_index) for each in self.members]).logsumexp(0)

    return Case(Classifier(Ensemble()), graph())


@idiom(source="parameters registered by hand, and a conv inside a list in a dict")
def odd_containers() -> Case:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = torch.nn.ModuleDict({"a": torch.nn.ModuleList([nn.GraphConv(FEATURES, CLASSES)])})
            self.register_parameter("scale", torch.nn.Parameter(torch.ones(CLASSES)))
            self.register_buffer("shift", torch.linspace(0, 1, CLASSES))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.branches["a"][0](x, edge_index) * self.scale + self.shift

    return Case(Classifier(Odd()), graph())


@idiom(source="a conv made in forward")
def conv_made_in_forward() -> Case:
    class Made(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.lin(nn.SimpleConv(aggr="mean")(x, edge_index))

    return Case(Classifier(Made()), graph())
