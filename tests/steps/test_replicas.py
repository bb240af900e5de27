"""One model on all ranks: gradients are summed before hooks see them, random numbers outside steps are common, and ranks whose
models part are told (gloo ranks)."""

from __future__ import annotations

import copy
import re
import time
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from common import CLASSES, FEATURES, Recorder, awkward_graph, quiet_trainer
from conftest import RankFailed
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.models import GCN

from lightning_gnn import GraphDataModule, local_rows


class Module(L.LightningModule):
    """A user's module; subclasses add what they do around the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GCN(FEATURES, 16, 2, CLASSES).double()
        self.heard: list[float] = []

    def loss(self, batch: Data) -> Tensor:
        out = self.model(batch.x, batch.edge_index)
        return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class ClipsAfterBackward(Module):
    def on_after_backward(self) -> None:
        self.heard.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)))


class ClampsInHooks(Module):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
            parameter.register_post_accumulate_grad_hook(lambda p: self.heard.append(float(p.grad.norm())))


class StepsInHooks(Module):
    """An optimizer for each parameter, which steps in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        for parameter in self.parameters():
            optimizer = torch.optim.Adam([parameter], lr=0.01)

            def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)

    def training_step(self, batch: Data, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.manual_backward(loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class ResetsALayer(Module):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.model.convs[1].reset_parameters()


class AddsNoise(Module):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad += 0.01 * torch.randn_like(parameter)


class AddsNoiseByHand(Module):
    """Manual optimisation, within whose step hooks draw."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad += 0.01 * torch.randn_like(parameter)

    def training_step(self, batch: Data, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Unfreezes(Module):
    """Parameters that learn from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.model.convs[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.model.convs[0].requires_grad_(self.current_epoch > 0)


class HearsTheLoss(Module):
    def on_before_backward(self, loss: Tensor) -> None:
        self.log("loss_before_backward", loss)


class ReadsTheLoss(Module):
    """Stops once the loss is low enough, as the step's outputs tell it."""

    def on_train_batch_end(self, outputs: Any, batch: Data, batch_idx: int) -> None:
        self.heard.append(float(outputs["loss"]))
        self.trainer.should_stop = bool(outputs["loss"] < 1.59)


class StopsAlone(Module):
    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.global_rank == 1


class DrawsInTheStep(Module):
    """Weights that each rank changes with numbers of its own."""

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        if self.current_epoch == 1:
            with torch.no_grad(), local_rows():
                self.model.convs[1].lin.weight += 0.01 * torch.randn_like(self.model.convs[1].lin.weight)
        return super().training_step(batch, batch_idx)


class OwnBackward(AddsNoiseByHand):
    """Gradients that nobody sums."""

    def training_step(self, batch: Data, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


class FollowsAMean(Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(FEATURES, dtype=torch.float64))

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        with local_rows():
            self.centre.copy_(batch.x.mean(0))
        return super().training_step(batch, batch_idx)


class KeepsTheBest(Module):
    """A copy that one rank alone has registered; what it has learned is that of one device."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(FEATURES).double()

    def loss(self, batch: Data) -> Tensor:
        batch.x = self.norm(batch.x)
        return super().loss(batch)

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.best = copy.deepcopy(self.norm)

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            del self.best


class SkipsAStep(Module):
    """Without a loss there is no backward, nor its hooks."""

    def training_step(self, batch: Data, batch_idx: int) -> Tensor | None:
        return None if self.current_epoch == 1 else super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        self.heard.append(float(loss))

    def on_after_backward(self) -> None:
        self.heard.append(float(self.model.convs[0].lin.weight.grad.norm()))


class SkipsAlone(Module):
    def training_step(self, batch: Data, batch_idx: int) -> Tensor | None:
        return None if self.global_rank == 1 else super().training_step(batch, batch_idx)


class UsesALateLayer(Module):
    """A layer that no optimizer has, and learns."""

    def on_train_epoch_start(self) -> None:
        self.late = torch.nn.Linear(CLASSES, CLASSES).double()

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.late(batch.x[:, :CLASSES]).pow(2).mean()


EXACT = [
    KeepsTheBest,
    SkipsAStep,
    ClipsAfterBackward,
    ClampsInHooks,
    StepsInHooks,
    ResetsALayer,
    AddsNoise,
    AddsNoiseByHand,
    Unfreezes,
    HearsTheLoss,
    ReadsTheLoss,
]


def fitted(rank: int, world_size: int, kind: type[Module], strategy: str, **options: Any) -> dict[str, Any]:
    L.seed_everything(5, verbose=False)
    graph, recorder = awkward_graph(), Recorder()
    module = kind()
    part = (torch.arange(60) > 40).long() if world_size > 1 else None
    run = quiet_trainer(strategy, world_size, callbacks=[recorder], **options)
    if strategy != "auto":
        run.strategy.self_check = False  # what it finds, it finds before ranks can part
    run.fit(module, datamodule=GraphDataModule(graph, partition=part))
    drawn = torch.rand(3)
    return {
        "weights": module.state_dict(),
        "epochs": recorder.epochs,
        "heard": sorted(module.heard),
        "gradients": recorder.gradients,
        "drawn": drawn,
    }


@pytest.mark.parametrize("kind", EXACT)
def test_hooks_see_what_one_device_has(ranks, kind):
    expected = fitted(0, 1, kind, "auto")
    if kind is ReadsTheLoss:
        assert len(expected["heard"]) == 2, "it stops in the middle"
    for found in ranks.run(2, fitted, kind, "dgcl"):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "named", "cause"),
    [
        (DrawsInTheStep, r"After epoch 1, the parameter 'model.convs.1.lin.weight' of rank 1", "random numbers"),
        (FollowsAMean, r"After epoch 0, the buffer 'centre' of rank 1", r"local_rows\(\)"),
    ],
)
def test_ranks_that_part_are_told(ranks, kind, named, cause):
    with pytest.raises(RankFailed) as raised:
        ranks.run(2, fitted, kind, "dgcl")
    for error in raised.value.errors.values():
        assert error.startswith("ReplicaError: ")
    assert re.search(named, str(raised.value)), raised.value.errors
    assert re.search(cause, str(raised.value)), raised.value.errors


def test_a_backward_of_its_own_is_refused_at_its_line(ranks):
    with pytest.raises(
        RankFailed, match=r"test_replicas.py:\d+: loss.backward\(\) .* Call self.manual_backward\(loss\)"
    ):
        ranks.run(2, fitted, OwnBackward, "dgcl")


def test_a_layer_that_no_optimizer_has_is_refused(ranks):
    with pytest.raises(RankFailed, match=r"'late.weight' was registered during the run and is in no optimizer"):
        ranks.run(2, fitted, UsesALateLayer, "dgcl")


def test_a_rank_that_skips_a_step_alone_is_told(ranks):
    with pytest.raises(RankFailed, match="belongs to another operation"):
        ranks.run(2, fitted, SkipsAlone, "dgcl")


def test_a_rank_that_stops_alone_is_told(ranks):
    with pytest.raises(RankFailed, match=r"After epoch 0, trainer.should_stop is set on ranks \[1\] and not on \[0\]"):
        ranks.run(2, fitted, StopsAlone, "dgcl")


class Sparse(Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(60, FEATURES, sparse=True)


def test_sparse_gradients_are_refused(ranks):
    with pytest.raises(RankFailed, match=r"'rows' \(Embedding\) has sparse=True"):
        ranks.run(2, fitted, Sparse, "dgcl")


def saved_after_fit(rank: int, world_size: int, path: str) -> list[str]:
    run = quiet_trainer("dgcl", world_size, max_epochs=1)
    run.fit(Module(), datamodule=GraphDataModule(awkward_graph()))
    if rank == 0:
        time.sleep(1.0)
    found = []
    for number in range(2):
        run.save_checkpoint(f"{path}-{number}")
        found += torch.load(f"{path}-{number}", weights_only=False)["state_dict"]
    return found


def test_what_is_saved_after_fit_is_there_on_all_ranks(ranks, tmp_path):
    for found in ranks.run(2, saved_after_fit, str(tmp_path / "saved")):
        assert "model.convs.0.bias" in found


def own_draws(rank: int, world_size: int) -> Any:
    """Returns what a step draws for its rows and a hook for all, and what a step draws for all."""
    drawn: list[torch.Tensor] = []
    common: list[torch.Tensor] = []

    class Draws(Module):
        def training_step(self, batch: Data, batch_idx: int) -> Tensor:
            drawn.append(torch.rand_like(batch.x[:, 0])[batch.y >= 0].detach())
            common.append(torch.rand(4))
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            drawn.append(torch.rand(4))

    L.seed_everything(7 + rank, verbose=False)
    run = quiet_trainer("dgcl", world_size, max_epochs=2)
    run.strategy.self_check = False
    run.fit(Draws(), datamodule=GraphDataModule(awkward_graph()))
    return [each[:4] for each in drawn], common


def test_steps_draw_apart_for_rows_and_alike_for_all(ranks):
    (here, common), (there, of_other) = ranks.run(2, own_draws)
    assert all(torch.equal(one, other) for one, other in zip(common, of_other)) and not torch.equal(*common[:2])
    in_steps, in_hooks = slice(0, None, 2), slice(1, None, 2)
    assert all(not torch.equal(one, other) for one, other in zip(here[in_steps], there[in_steps]))
    assert all(torch.equal(one, other) for one, other in zip(here[in_hooks], there[in_hooks]))
    assert not torch.equal(here[0], here[2]), "a step draws what the one before it drew"


def rounded(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Returns a weight that ranks have rounded differently, before and after the epoch."""
    found = []

    class Rounds(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                self.model.convs[0].lin.weight.mul_(1 + rank * 1e-15)
            found.append(self.model.convs[0].lin.weight.detach().clone())

        def on_train_epoch_end(self) -> None:
            found.append(self.model.convs[0].lin.weight.detach().clone())

    run = quiet_trainer("dgcl", world_size, max_epochs=1)
    run.fit(Rounds(), datamodule=GraphDataModule(awkward_graph()))
    return found[0], found[1]


def test_rounding_is_evened_out(ranks):
    (before, after), (before_1, after_1) = ranks.run(2, rounded)
    assert not torch.equal(before, before_1)
    assert torch.equal(after, before) and torch.equal(after_1, before)


class Ordered(Module):
    """Ranks tell each other the order of rows, once for each selection."""

    def loss(self, batch: Data) -> Tensor:
        return super().loss(batch) + self.model(batch.x, batch.edge_index)[batch.train_mask].cumsum(0).mean()


def again_after_one_device(rank: int, world_size: int) -> Tensor:
    """Returns the weights of two runs, between which rank 0 alone has run on the whole graph."""
    module, data = Ordered(), GraphDataModule(awkward_graph())
    for number in range(2):
        run = quiet_trainer("dgcl", world_size, max_epochs=1)
        run.fit(module, datamodule=data)
        if rank == 0 and number == 0:
            quiet_trainer("auto", 1, max_epochs=1, limit_train_batches=0).fit(module, datamodule=data)
    return module.model.convs[0].lin.weight.detach()


def test_a_rank_may_load_its_part_again(ranks):
    first, second = ranks.run(2, again_after_one_device)
    assert torch.equal(first, second)
