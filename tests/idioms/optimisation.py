"""Optimisers, schedulers, manual optimisation, and what people do to gradients and weights."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import lr_scheduler
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

from idioms.harness import CLASSES, FEATURES, Case, graph
from idioms.plain import HIDDEN, Net, idiom

EPOCHS = {"max_epochs": 6}


class Manual(Net):
    """Steps its optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def loss(self, batch: Any) -> Tensor:
        out = self(batch.x, batch.edge_index)
        return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])


# Manual optimisation ##########################################################


@idiom(source="Lightning docs: manual optimization")
def manual_optimisation() -> Case:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            self.log("train_loss", loss)

    return Case(Module(), graph())


@idiom(source="Lightning docs: manual optimization, gradients accumulated over batches and clipped by hand")
def accumulation_by_hand() -> Case:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch) / 2)
            if self.current_epoch % 2:
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()

    return Case(Module(), graph(), EPOCHS)


@idiom(source="Lightning docs: manual optimization, a scheduler stepped by hand")
def scheduler_stepped_by_hand() -> Case:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            scheduler.step()
            self.log("lr", scheduler.get_last_lr()[0])

        def on_train_epoch_end(self) -> None:
            plateau = self.trainer.callback_metrics["val_loss"]
            self.log("val_loss_seen", plateau)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
            return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Case(Module(), graph())


@idiom(source="Lightning docs: GAN, two optimizers toggled in one step")
def adversarial_training() -> Case:
    class Module(Manual):
        def __init__(self) -> None:
            super().__init__()
            self.critic = torch.nn.Linear(CLASSES, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            out = self(batch.x, batch.edge_index)[batch.train_mask]
            fooled = F.softplus(-self.critic(out)).mean()
            first.zero_grad()
            self.manual_backward(F.cross_entropy(out, batch.y[batch.train_mask]) + 0.1 * fooled)
            first.step()
            self.untoggle_optimizer(first)

            self.toggle_optimizer(second)
            with torch.no_grad():
                out = self(batch.x, batch.edge_index)[batch.train_mask]
            judged = F.softplus(self.critic(out)).mean()
            second.zero_grad()
            self.manual_backward(judged)
            second.step()
            self.untoggle_optimizer(second)
            self.log_dict({"fooled": fooled, "judged": judged})

        def configure_optimizers(self) -> Any:
            body = [*self.conv1.parameters(), *self.conv2.parameters()]
            return torch.optim.SGD(body, lr=0.2), torch.optim.Adam(self.critic.parameters(), lr=0.05)

    return Case(Module(), graph())


@idiom(source="Lightning docs: several optimizers with a closure each")
def optimizers_with_closures() -> Case:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():

                def closure(optimizer: Any = optimizer) -> Tensor:
                    optimizer.zero_grad()
                    loss = self.loss(batch)
                    self.manual_backward(loss)
                    return loss

                optimizer.step(closure=closure)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(conv.parameters(), lr=0.2) for conv in (self.conv1, self.conv2)]

    return Case(Module(), graph())


@idiom(
    source="SAM (Foret et al.): two forward and backward passes in one step",
)
def sharpness_aware_minimisation() -> Case:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.log("train_loss", loss)
            norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
            steps = [0.05 * p.grad / norm for p in self.parameters()]
            with torch.no_grad():
                for p, step in zip(self.parameters(), steps):
                    p.add_(step)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            with torch.no_grad():
                for p, step in zip(self.parameters(), steps):
                    p.sub_(step)
            optimizer.step()

    return Case(Module(), graph())


@idiom(
    source="multi-task learning: gradient norms of two losses balanced by hand",
)
def two_losses_with_balanced_gradients() -> Case:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            out = self(batch.x, batch.edge_index)[batch.train_mask]
            y = batch.y[batch.train_mask]
            gradients = []
            for loss in (F.cross_entropy(out, y), F.multi_margin_loss(out, y)):
                optimizer.zero_grad()
                self.manual_backward(loss, retain_graph=True)
                gradients.append([p.grad.clone() for p in self.parameters()])
            norms = [torch.stack([g.norm() for g in each]).norm() for each in gradients]
            for p, *each in zip(self.parameters(), *gradients):
                p.grad = sum(g / norm for g, norm in zip(each, norms)) / 2
            optimizer.step()
            self.log_dict({"norm_of_first": norms[0], "norm_of_second": norms[1]})

    return Case(Module(), graph())


@idiom(
    source="a plain PyTorch loop moved into training_step: loss.backward() in place of manual_backward",
    refused="manual_backward",
)
def backward_without_lightning() -> Case:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.loss(batch).backward()
            optimizer.step()

    return Case(Module(), graph())


# Optimisers and schedulers ####################################################


def _with(optimizer: Any, **trainer: Any) -> Case:
    class Module(Net):
        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters())

    return Case(Module(), graph(), {**EPOCHS, **trainer})


@idiom(source="PyTorch docs: Adagrad", stages=("fit",))
def adagrad() -> Case:
    return _with(partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1))


@idiom(source="PyTorch docs: Rprop, which looks at signs of gradients", stages=("fit",))
def rprop() -> Case:
    return _with(partial(torch.optim.Rprop, lr=0.01))


@idiom(source="PyTorch docs: AdamW, amsgrad, foreach", stages=("fit",))
def adamw() -> Case:
    return _with(partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1, amsgrad=True, foreach=True))


@idiom(source="PyTorch docs: LBFGS", stages=("fit",))
def lbfgs() -> Case:
    return _with(partial(torch.optim.LBFGS, lr=0.1))


@idiom(source="PyTorch docs: RMSprop with gradients clipped by norm", stages=("fit",))
def clipped_by_norm() -> Case:
    return _with(partial(torch.optim.RMSprop, lr=0.01), gradient_clip_val=0.05)


@idiom(source="Lightning docs: gradient_clip_algorithm='value'", stages=("fit",))
def clipped_by_value() -> Case:
    return _with(partial(torch.optim.SGD, lr=0.5), gradient_clip_val=0.01, gradient_clip_algorithm="value")


@idiom(source="Lightning docs: accumulate_grad_batches", stages=("fit",))
def accumulated_batches() -> Case:
    return _with(partial(torch.optim.SGD, lr=0.5), accumulate_grad_batches=3)


@idiom(
    source="PyTorch docs: nn.Embedding(sparse=True) with SparseAdam, rows of nodes looked up by id",
    refused="'embedding' .* has sparse=True",
    stages=("fit",),
)
def sparse_adam() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(80, FEATURES, sparse=True)

        def shared_step(self, batch: Any, mask: Tensor, stage: str) -> Tensor:
            out = self(batch.x + self.embedding(batch.n_id), batch.edge_index)
            loss = F.cross_entropy(out[mask], batch.y[mask])
            self.log(f"{stage}_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SparseAdam(self.embedding.parameters(), lr=0.1)

    return Case(Module(), graph())


@idiom(source="PyG examples: parameter groups with weight decay on the first conv only")
def parameter_groups() -> Case:
    class Module(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(
                [
                    {"params": self.conv1.parameters(), "weight_decay": 5e-2},
                    {"params": self.conv2.parameters(), "weight_decay": 0, "lr": 0.001},
                ],
                lr=0.05,
            )

    return Case(Module(), graph(), EPOCHS)


def _scheduled(make: Any, **config: Any) -> Case:
    class Module(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.log("lr", self.optimizers().param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **config}}

    return Case(Module(), graph(), EPOCHS)


@idiom(source="Lightning docs: ReduceLROnPlateau with monitor, loss that overfits", stages=("fit",))
def learning_rate_on_plateau() -> Case:
    plateau = partial(lr_scheduler.ReduceLROnPlateau, factor=0.3, patience=0, threshold=0.05)
    return _scheduled(plateau, monitor="val_loss", interval="epoch", frequency=1)


@idiom(source="PyTorch docs: SequentialLR of LinearLR and ExponentialLR, on steps", stages=("fit",))
def sequence_of_schedulers() -> Case:
    def make(optimizer: Any) -> Any:
        schedulers = [lr_scheduler.LinearLR(optimizer, 0.2, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.7)]
        return lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[3])

    return _scheduled(make, interval="step")


@idiom(source="PyTorch docs: OneCycleLR on steps, LambdaLR on epochs", stages=("fit",))
def one_cycle() -> Case:
    return _scheduled(partial(lr_scheduler.OneCycleLR, max_lr=0.8, total_steps=6), interval="step", name="cycle")


@idiom(source="Lightning docs: two optimizers with a scheduler each, frequency of 2", stages=("fit",))
def schedulers_of_two_optimizers() -> Case:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()

        def on_train_epoch_end(self) -> None:
            step, plateau = self.lr_schedulers()
            step.step()
            plateau.step(self.trainer.callback_metrics["val_loss"])
            self.log_dict({f"lr{i}": each.param_groups[0]["lr"] for i, each in enumerate(self.optimizers())})

        def configure_optimizers(self) -> Any:
            first, second = (torch.optim.Adam(conv.parameters(), lr=0.2) for conv in (self.conv1, self.conv2))
            schedulers = [
                {"scheduler": lr_scheduler.LambdaLR(first, lambda epoch: 0.9**epoch), "frequency": 2},
                {"scheduler": lr_scheduler.ReduceLROnPlateau(second, patience=0, threshold=0.5), "monitor": "val_loss"},
            ]
            return [first, second], schedulers

    return Case(Module(), graph(), EPOCHS)


# What is done to gradients and weights ########################################


@idiom(source="PyTorch forum: gradients clamped by a hook on the parameter")
def gradients_clamped_by_hooks() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            for p in self.parameters():
                p.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))

    return Case(Module(), graph())


@idiom(source="PyTorch docs: register_post_accumulate_grad_hook, norms kept as they arrive")
def norms_kept_by_hooks() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norms: dict[str, float] = {}
            for name, p in self.named_parameters():
                p.register_post_accumulate_grad_hook(
                    lambda p, name=name: self.norms.update({name: float(p.grad.norm())})
                )

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log_dict({f"norm of {name}": value for name, value in self.norms.items()})

    return Case(Module(), graph())


@idiom(source="Neelakantan et al.: noise added to gradients, from a generator of its own")
def noise_on_gradients() -> Case:
    class Module(Net):
        def on_after_backward(self) -> None:
            g = torch.Generator().manual_seed(self.global_step)
            for p in self.parameters():
                p.grad += 0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype)

    return Case(Module(), graph())


@idiom(source="lottery tickets and restarts: layers reset in an epoch hook, after torch.manual_seed")
def parameters_reset_in_an_epoch_hook() -> Case:
    class Module(Net):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                torch.manual_seed(7)
                self.conv2.reset_parameters()

    return Case(Module(), graph())


@idiom(source="WGAN-GP: gradient penalty by torch.autograd.grad(create_graph=True)", refused="create_graph=True")
def gradient_penalty() -> Case:
    class Module(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch.x.clone().requires_grad_()
            out = self(x, batch.edge_index)[batch.train_mask]
            loss = F.cross_entropy(out, batch.y[batch.train_mask])
            [gradient] = torch.autograd.grad(loss, x, create_graph=True)
            return loss + gradient.norm(dim=1)[batch.train_mask].mean()

    return Case(Module(), graph())


@idiom(source="FGSM: features moved along the sign of their gradient, then a second forward")
def adversarial_features() -> Case:
    class Module(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch.x.clone().requires_grad_()
            loss = F.cross_entropy(
                self(x, batch.edge_index)[batch.train_mask], batch.y[batch.train_mask], reduction="sum"
            )
            [gradient] = torch.autograd.grad(loss, x)
            out = self(x.detach() + 0.1 * gradient.sign(), batch.edge_index)
            return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])

    return Case(Module(), graph())


@idiom(source="exponential moving average of the weights by hand, used in validation")
def moving_average_of_weights_by_hand() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.average = torch.nn.ModuleList([copy.deepcopy(self.conv1), copy.deepcopy(self.conv2)]).requires_grad_(
                False
            )

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            learned = [*self.conv1.parameters(), *self.conv2.parameters()]
            with torch.no_grad():
                for slow, fast in zip(self.average.parameters(), learned):
                    slow.lerp_(fast, 0.3)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.average
            out = second(first(batch.x, batch.edge_index).relu(), batch.edge_index)[batch.val_mask]
            self.log("val_loss", F.cross_entropy(out, batch.y[batch.val_mask]))

    return Case(Module(), graph())


@idiom(source="Lookahead (Zhang et al.) by hand, through p.data")
def lookahead_by_hand() -> Case:
    class Module(Net):
        def on_train_start(self) -> None:
            self.slow = [p.detach().clone() for p in self.parameters()]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step % 2 == 0:
                for slow, p in zip(self.slow, self.parameters()):
                    slow += 0.5 * (p.data - slow)
                    p.data.copy_(slow)

    return Case(Module(), graph(), EPOCHS)


@idiom(source="weight decay by hand before the step, and weights clipped after it (WGAN)")
def weights_decayed_and_clipped() -> Case:
    class Module(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for p in self.parameters():
                p.grad.add_(p.detach(), alpha=0.05)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            for p in self.parameters():
                p.data.clamp_(-0.4, 0.4)

    return Case(Module(), graph())


@idiom(source="a penalty on the weights in the loss, beside the mean over the mask")
def penalty_on_all_weights() -> Case:
    class Module(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            penalty = sum(p.abs().sum() for p in self.parameters())
            self.log("penalty", penalty)
            return super().training_step(batch, batch_idx) + 0.01 * penalty

    return Case(Module(), graph())


@idiom(source="a loss weight per epoch (annealing), a parameter that only the loss has (temperature)")
def annealed_loss_with_a_temperature() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = torch.nn.Parameter(torch.tensor(1.5))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            out = self(batch.x, batch.edge_index)[batch.train_mask] / self.temperature
            return F.cross_entropy(out, batch.y[batch.train_mask]) * (1 + self.current_epoch)

        def on_train_epoch_end(self) -> None:
            self.log("temperature", self.temperature)

    return Case(Module(), graph())


@idiom(source="frozen first layer, a parameter that nothing uses, AdamW with weight decay")
def frozen_and_unused_parameters() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Linear(3, 3)
            self.conv1.requires_grad_(False)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)

    return Case(Module(), graph())


@idiom(source="one weight in two layers")
def shared_weights() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.encode = torch.nn.Linear(FEATURES, HIDDEN)
            self.conv1, self.conv3 = GCNConv(HIDDEN, HIDDEN), GCNConv(HIDDEN, HIDDEN)
            self.conv3.lin.weight = self.conv1.lin.weight

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = self.conv1(self.encode(x), edge_index).relu()
            return self.conv2(self.conv3(x, edge_index).relu(), edge_index)

    return Case(Module(), graph())


@idiom(source="weights written in a hook of the graph's gradient: a straight-through estimator")
def straight_through_estimator() -> Case:
    class Module(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = self.conv1(x, edge_index)
            return self.conv2(x + (x.sign() - x).detach(), edge_index)

    return Case(Module(), graph())


# Weights that are computed ####################################################


@idiom(source="PyTorch docs: parametrizations.weight_norm of convs' linear layers")
def weight_norm() -> Case:
    module = Net()
    parametrizations.weight_norm(module.conv1.lin)
    parametrizations.weight_norm(module.conv2.lin_l)
    return Case(module, graph())


@idiom(
    source="PyTorch docs: torch.nn.utils.weight_norm, the older one, of GATConv's linear layer",
)
def older_weight_norm() -> Case:
    module = Net()
    module.conv1 = GATConv(FEATURES, HIDDEN)
    torch.nn.utils.weight_norm(module.conv1.lin)
    torch.nn.utils.weight_norm(module.conv2.lin_r)
    return Case(module, graph())


@idiom(source="PyTorch docs: parametrizations.spectral_norm")
def spectral_norm() -> Case:
    module = Net()
    parametrizations.spectral_norm(module.conv1.lin)
    return Case(module, graph())


@idiom(source="PyTorch docs: a parametrization of one's own, symmetric weights")
def own_parametrisation() -> Case:
    class Symmetric(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).T

    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.conv0 = SAGEConv(FEATURES, FEATURES)
            parametrize.register_parametrization(self.conv0.lin_l, "weight", Symmetric())

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(self.conv0(x, edge_index), edge_index)

    return Case(Module(), graph())


@idiom(source="PyTorch docs: torch.nn.utils.prune before training")
def pruned_before_training() -> Case:
    module = Net()
    prune.l1_unstructured(module.conv1.lin, "weight", amount=0.3)
    prune.random_unstructured(module.conv2.lin_l, "weight", amount=0.2)
    return Case(module, graph())


@idiom(source="PyTorch docs: torch.nn.utils.prune in an epoch hook, made permanent at the end")
def pruned_in_an_epoch_hook() -> Case:
    class Module(Net):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                prune.l1_unstructured(self.conv1.lin, "weight", amount=0.5)

        def on_train_end(self) -> None:
            prune.remove(self.conv1.lin, "weight")

    return Case(Module(), graph())


@idiom(source="PyTorch docs: weight norm added in on_fit_start")
def weight_norm_added_during_fit() -> Case:
    class Module(Net):
        def on_fit_start(self) -> None:
            self.conv2.lin_l = parametrizations.weight_norm(self.conv2.lin_l)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.conv1.parameters(), lr=0.2)

    return Case(Module(), graph())


@idiom(source="gradient checkpointing of a conv, torch.utils.checkpoint")
def checkpointed_convs() -> Case:
    from torch.utils.checkpoint import checkpoint

    class Module(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = checkpoint(self.conv1, x, edge_index, use_reentrant=False).relu()
            return checkpoint(self.conv2, x, edge_index, use_reentrant=False)

    return Case(Module(), graph())


@idiom(source="a layer's output hooked: activations penalised, and halved by a forward hook")
def forward_hooks_on_layers() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.conv1.register_forward_hook(lambda module, args, output: output * 0.5)
            self.conv2.register_forward_pre_hook(lambda module, args: (args[0] + 0.1, *args[1:]))

    return Case(Module(), graph())


@idiom(
    source="gradients clamped between layers: full backward hooks of modules, hooks on tensors",
    refused="BackwardHookFunction",
)
def gradients_clamped_between_layers() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.conv2.register_full_backward_hook(lambda module, given, out: (given[0].clamp(-0.01, 0.01), *given[1:]))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out = super().forward(x, edge_index)
            if out.requires_grad:
                out.register_hook(lambda gradient: gradient * 2)
            return out

    return Case(Module(), graph())


@idiom(source="a BatchNorm that stays as it is: train() overridden")
def frozen_batch_norm() -> Case:
    class Module(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(HIDDEN)
            self.norm.running_mean += 0.3

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv2(self.norm(self.conv1(x, edge_index)).relu(), edge_index)

    return Case(Module(), graph())


@idiom(source="Lightning docs: toggled_optimizer in manual optimisation")
def toggled_optimizers() -> Case:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                with self.toggled_optimizer(optimizer):
                    optimizer.zero_grad()
                    self.manual_backward(self.loss(batch))
                    optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(conv.parameters(), lr=0.2) for conv in (self.conv1, self.conv2)]

    return Case(Module(), graph())
