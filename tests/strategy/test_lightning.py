"""Lightning's features under `dgcl` behave as on one device (gloo ranks)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import CLASSES, FEATURES, Recorder, UserModule, awkward_graph, build, campaign, quiet_trainer
from conftest import RankFailed
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch_geometric.data import HeteroData
from torch_geometric.nn import GINConv
from torch_geometric.nn.models import GAT

from lightning_gnn import CoverStrategy, DGCLStrategy, GraphDataModule, NodeClassifier, VertexCutStrategy


def same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def run(rank: int, world_size: int, kind: str, strategy: str = "dgcl") -> dict[str, Any]:
    """One training run with a feature of Lightning in it; returns the weights and what the feature decided."""
    data = GraphDataModule(awkward_graph())
    module: L.LightningModule = FEATURED.get(kind, Plain)(build("sage", FEATURES, CLASSES)).double()
    recorder = Recorder()
    callbacks: list[L.Callback] = [recorder]
    options: dict[str, Any] = {"max_epochs": 6}
    if kind == "early_stopping":
        callbacks.append(EarlyStopping("val_loss", patience=1))
        options["max_epochs"] = 60
    if kind == "clip":
        options["gradient_clip_val"] = 0.05
    if kind == "accumulate":
        options["accumulate_grad_batches"] = 4
    if kind == "several_validations":
        options["check_val_every_n_epoch"] = 2
    trainer = quiet_trainer(
        DGCLStrategy(timeout=60) if strategy == "dgcl" else strategy, world_size, callbacks=callbacks, **options
    )
    trainer.fit(module, datamodule=data)
    return {
        "weights": module.state_dict(),
        "epoch": trainer.current_epoch,
        "steps": trainer.global_step,
        "lr": trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None,
        "losses": [epoch.get("val_loss") for epoch in recorder.epochs],
    }


class Plain(UserModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Plateau(UserModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Eager(UserModule):
    """Overfits at once, so that early stopping has something to stop."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.3)


class Manual(UserModule):
    """Two backward passes a step, and one of them twice: gradients must be summed over ranks once each."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        out = self.model(batch.x, batch.edge_index)[batch.train_mask]
        y = batch.y[batch.train_mask]
        self.manual_backward(F.cross_entropy(out, y, ignore_index=-1), retain_graph=True)
        self.manual_backward(0.5 * F.cross_entropy(2 * out, y, ignore_index=-1))
        optimizer.step()


class TwoOptimizers(UserModule):
    """One for each layer, which take turns."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            out = self.model(batch.x, batch.edge_index)[batch.train_mask]
            self.manual_backward(F.cross_entropy(out, batch.y[batch.train_mask], ignore_index=-1))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(conv.parameters(), lr=0.5) for conv in self.model.convs]


class ChangingEdges(UserModule):
    """All edges and some of them, turn by turn."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        edges = batch.edge_index
        if self.current_epoch % 2:
            edges = edges[:, batch.edge_weight > 0.4]
        out = self.model(batch.x, edges)[batch.train_mask]
        return F.cross_entropy(out, batch.y[batch.train_mask], ignore_index=-1)


class OwnWeight(UserModule):
    """A mean over something else than the mask: every owned node."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.model(batch.x, batch.edge_index)
        return {"loss": out.square().mean(), "loss_weight": len(out)}


class Unused(UserModule):
    """A parameter without a gradient: weight decay must leave it alone, as on one device."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.unused = torch.nn.Parameter(torch.ones(3))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


FEATURED = {
    "plateau": Plateau,
    "early_stopping": Eager,
    "manual": Manual,
    "two_optimizers": TwoOptimizers,
    "changing_edges": ChangingEdges,
    "own_weight": OwnWeight,
    "unused": Unused,
}


@pytest.mark.parametrize(
    "kind",
    [
        *campaign("plain"),
        "clip",
        "accumulate",
        "plateau",
        "early_stopping",
        "manual",
        "two_optimizers",
        "changing_edges",
        "own_weight",
        "unused",
        "several_validations",
    ],
)
def test_feature(ranks, kind):
    expected = run(0, 1, kind, "auto")
    for found in ranks.run(3, run, kind):
        assert_same_run(found, expected)
    if kind == "early_stopping":
        assert expected["epoch"] < 60
    if kind == "plateau":
        assert expected["lr"] < 0.3


@pytest.mark.parametrize("kind", [*campaign("accumulate", "two_optimizers"), "manual", "changing_edges"])
def test_feature_with_products(ranks, kind):
    expected = run(0, 1, kind, "auto")
    for found in ranks.run(4, run, kind, "spmm_15d"):
        assert_same_run(found, expected)


def assert_same_run(found: dict[str, Any], expected: dict[str, Any]) -> None:
    same_weights(found["weights"], expected["weights"])
    for decided in ("epoch", "steps", "lr"):
        assert found[decided] == expected[decided]
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-9, atol=1e-11)


def checkpointed(rank: int, world_size: int, folder: str, strategy: str, epochs: int, resume: str | None) -> Any:
    torch.manual_seed(0)
    data = GraphDataModule(awkward_graph())
    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    saver = ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    trainer = quiet_trainer(
        DGCLStrategy(timeout=60) if strategy == "dgcl" else strategy,
        world_size,
        callbacks=[saver],
        max_epochs=epochs,
        enable_checkpointing=True,
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    [tested] = trainer.test(module, datamodule=data, ckpt_path="best", verbose=False)
    return {
        "weights": module.state_dict(),
        "test": tested,
        "last": saver.last_model_path,
        "best": saver.best_model_path,
    }


def test_checkpoint_of_one_world_size_resumes_in_another(ranks, tmp_path):
    expected = checkpointed(0, 1, str(tmp_path / "whole"), "auto", 6, None)
    half = ranks.run(3, checkpointed, str(tmp_path / "three"), "dgcl", 3, None)
    assert len({result["last"] for result in half}) == 1
    for world_size, strategy in ((2, "dgcl"), (4, "spmm_15d")):
        for found in ranks.run(world_size, checkpointed, str(tmp_path / strategy), strategy, 6, half[0]["last"]):
            same_weights(found["weights"], expected["weights"])
            torch.testing.assert_close(found["test"], expected["test"], rtol=1e-6, atol=1e-7)
    again = checkpointed(0, 1, str(tmp_path / "one"), "auto", 6, half[0]["last"])
    same_weights(again["weights"], expected["weights"])
    loaded = NodeClassifier.load_from_checkpoint(half[0]["best"], model=build("gcn"), weights_only=True)
    saved = torch.load(half[0]["best"], weights_only=True)["state_dict"]
    same_weights(loaded.state_dict(), {name: value.float() for name, value in saved.items()})


MIXED = ("gcn", "gat", "gatv2", "transformer", "pna", "sage_max")


def bf16(rank: int, world_size: int, models: Sequence[str], strategy: Any, precision: str = "bf16-mixed") -> Any:
    """Returns each model's loss in training, and what it predicts then."""
    found = []
    for model in models:
        torch.manual_seed(0)
        module = NodeClassifier(build(model).float(), num_classes=CLASSES, lr=0.001)
        chosen = strategy if isinstance(strategy, str) else strategy(timeout=60)
        trainer = quiet_trainer(chosen, world_size, precision=precision)
        data = GraphDataModule(awkward_graph(dtype=torch.float32))
        trainer.fit(module, datamodule=data)
        loss = float(trainer.callback_metrics["train_loss"])
        [predicted] = trainer.predict(module, datamodule=data)
        found.append((loss, predicted.float()))
    return found


@pytest.mark.parametrize("strategy", [DGCLStrategy, *campaign(VertexCutStrategy, CoverStrategy)])
def test_bf16_mixed(ranks, strategy):
    """As far from float32 as one device is."""
    expected, exact = bf16(0, 1, MIXED, "auto"), bf16(0, 1, MIXED, "auto", "32-true")
    for found in ranks.run(2, bf16, MIXED, strategy):
        for name, (loss, predicted), (one_loss, one), (_, wide) in zip(MIXED, found, expected, exact):
            assert loss == pytest.approx(one_loss, rel=0.01), name
            own, allowed = (float((each - wide).abs().max() / wide.abs().max()) for each in (predicted, one))
            assert own < max(0.02, 3 * allowed), (name, own, allowed)


def aftermath(rank: int, world_size: int) -> dict[str, Any]:
    graph = awkward_graph()
    model = build("gat")
    before = {name: set(vars(child)) for name, child in model.named_modules()}
    module = UserModule(model).double()
    own_log, own_update = module.log, module.acc.update
    trainer = quiet_trainer(DGCLStrategy(timeout=60), world_size)
    trainer.fit(module, datamodule=GraphDataModule(graph))
    after = {name: set(vars(child)) for name, child in model.named_modules()}
    one = quiet_trainer("auto", 1)
    one.fit(module, datamodule=GraphDataModule(graph))
    result = one.validate(module, datamodule=GraphDataModule(graph), verbose=False)
    second = quiet_trainer(DGCLStrategy(timeout=60), world_size)
    second.fit(module, datamodule=GraphDataModule(graph))
    return {
        "attributes": before == after,
        "log": module.log == own_log,
        "metric": module.acc.update == own_update,
        "group": dist.is_initialized(),
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
        "one_device": result[0]["val_acc"],
    }


def test_teardown_leaves_nothing(ranks):
    for found in ranks.run(2, aftermath):
        assert found["attributes"] and found["log"] and found["metric"]
        assert not found["group"]
        assert "CommunicationMetrics" not in found["callbacks"]


def draws(rank: int, world_size: int) -> tuple[float, list[float]]:
    seen: list[float] = []

    class Look(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            seen.append(float(torch.rand(())))

    L.seed_everything(1)
    trainer = quiet_trainer(DGCLStrategy(timeout=60), world_size, callbacks=[Look()])
    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    return float(trainer.callback_metrics["train_loss"]), seen


class LeavesOwnCallbacks(L.Callback):
    """As Lightning's LearningRateFinder, whose trial has callbacks of its own, where that fails."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.callbacks = []
        raise KeyError("the cause")


def test_an_error_stays_the_last_where_callbacks_are_others():
    trainer = quiet_trainer("dgcl", 1, max_epochs=1, callbacks=[LeavesOwnCallbacks()])
    with pytest.raises(KeyError, match="the cause"):
        trainer.fit(UserModule(build("gcn")).double(), datamodule=GraphDataModule(awkward_graph()))


def test_hooks_draw_alike_and_runs_repeat(ranks):
    first = ranks.run(2, draws)
    assert first[0][1] == first[1][1]
    assert first == ranks.run(2, draws)


DRAWING: dict[str, Callable[[], Any]] = {
    "dropout": lambda: DGCLStrategy(timeout=60),
    "rounding": lambda: DGCLStrategy(codec="int8", stochastic_rounding=True, timeout=60),
    # Of differences of 0 a cache leaves nothing out.
    "masks that stay": lambda: VertexCutStrategy(cache=0.0, cache_within_hosts=True, dropout_seed_every_n_epochs=4, timeout=60),
}


def interrupted(rank: int, world_size: int, folder: Path, resumes: bool) -> dict[str, list[torch.Tensor]]:
    """Returns the weights after four epochs, of which the first two may be another run's, by what is drawn."""
    found = {}
    for name, strategy in DRAWING.items():
        L.seed_everything(12 if resumes else 11)
        model = GAT(FEATURES, 16, num_layers=2, out_channels=CLASSES, heads=2, dropout=0.5)
        saver = ModelCheckpoint(folder / name, filename="{epoch}", save_top_k=-1)
        trainer = quiet_trainer(strategy(), world_size, callbacks=[saver], max_epochs=4, enable_checkpointing=True)
        module = NodeClassifier(model, num_classes=CLASSES).double()
        begun = str(folder / name / "epoch=1.ckpt") if resumes else None
        trainer.fit(module, datamodule=GraphDataModule(awkward_graph()), ckpt_path=begun)
        found[name] = list(module.state_dict().values())
    return found


def test_resuming_goes_on_with_the_same_random_numbers(ranks, tmp_path):
    """What is drawn after a resume is what the uninterrupted run draws: each rank's generators and seed are in the checkpoint."""
    through = ranks.run(2, interrupted, tmp_path, False)
    resumed = ranks.run(2, interrupted, tmp_path, True)
    for found, expected in zip(resumed, through):
        for name in DRAWING:
            assert all(torch.equal(a, b) for a, b in zip(found[name], expected[name])), name


def predict_with(rank: int, world_size: int, predictions: Any) -> Any:
    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    data = GraphDataModule(awkward_graph())
    trainer = quiet_trainer(DGCLStrategy(timeout=60, predictions=predictions), world_size)
    [found] = trainer.predict(module, datamodule=data)
    return found, data.shard.batch.n_id


def test_predictions(ranks):
    graph = awkward_graph()
    model = build("gcn").double().eval()
    expected = model(graph.x, graph.edge_index, edge_weight=graph.edge_weight).detach()
    for found, _ in ranks.run(3, predict_with, "all"):
        torch.testing.assert_close(found, expected)
    on_rank0, *others = (found for found, _ in ranks.run(3, predict_with, "rank0"))
    torch.testing.assert_close(on_rank0, expected)
    assert others == [None, None]
    for found, n_id in ranks.run(3, predict_with, "shards"):
        torch.testing.assert_close(found, expected[n_id])


# Refusals #####################################################################


def of_one_type() -> HeteroData:
    graph, data = awkward_graph(), HeteroData()
    for name, value in graph.to_dict().items():
        store = data["a", "to", "a"] if name.startswith("edge") else data["a"]
        store[name] = value
    return data


def refused(rank: int, world_size: int, kind: str) -> None:
    module: Any = UserModule(build("sage")).double()
    strategy: dict[str, Any] = {"timeout": 30}
    trainer: dict[str, Any] = {}
    fit: dict[str, Any] = {"datamodule": GraphDataModule(awkward_graph())}
    if kind == "dataloader":
        fit = {"train_dataloaders": torch.utils.data.DataLoader([1, 2])}
    if kind == "sync_batchnorm":
        trainer["sync_batchnorm"] = True
    if kind == "batchnorm":
        module.norm = GINConv(torch.nn.BatchNorm2d(4))
    if kind == "types":
        fit["datamodule"] = GraphDataModule(of_one_type())
    if kind == "overridden_loader":
        fit["datamodule"].train_dataloader = lambda: torch.utils.data.DataLoader([1, 2])
    quiet_trainer(DGCLStrategy(**strategy), world_size, self_check=True, **trainer).fit(module, **fit)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dataloader", "Pass datamodule=GraphDataModule"),
        ("overridden_loader", "cannot use a DataLoader"),
        ("types", "UserModule.training_step reads batch.x, but a HeteroData stores it by type"),
        ("sync_batchnorm", "sync_batchnorm=False"),
        ("batchnorm", "'norm.nn' (BatchNorm2d) computes statistics over all nodes"),
    ],
)
def test_refused_with_a_way_out(ranks, kind, words):
    with pytest.raises(RankFailed) as caught:
        ranks.run(2, refused, kind)
    assert all(words in line for line in caught.value.errors.values())
    assert len(caught.value.errors) == 2


class Lbfgs(UserModule):
    """LBFGS asks for the loss several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.2, max_iter=4, line_search_fn="strong_wolfe")


class Skips(UserModule):
    """Trains in every second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.trainer.current_epoch % 2 else super().training_step(batch, batch_idx)


def stepped(rank: int, world_size: int, kind: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    module = kind(build("gcn")).double()
    strategy = DGCLStrategy(timeout=60) if world_size > 1 else "auto"
    trainer = quiet_trainer(strategy, world_size, max_epochs=3)
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    return [each.detach() for each in module.parameters()]


@pytest.mark.parametrize("kind", [Lbfgs, Skips])
def test_all_ranks_step_by_one_loss(ranks, kind):
    expected = stepped(0, 1, kind)
    for found in ranks.run(3, stepped, kind):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def refused_when_sampling(rank: int, world_size: int) -> None:
    module = Lbfgs(build("gcn")).double()
    quiet_trainer("sampling", world_size).fit(module, datamodule=GraphDataModule(awkward_graph()))


def test_lbfgs_of_sampled_batches_is_refused(ranks):
    with pytest.raises(RankFailed, match="LBFGS is not supported on batches"):
        ranks.run(2, refused_when_sampling)


def test_other_strategies_refuse_to_copy_the_graph(ranks):
    with pytest.raises(RankFailed, match="copies of the whole graph"):
        ranks.run(2, run, "plain", "ddp")


def without_validation(rank: int, world_size: int, strategy: str) -> float:
    graph = awkward_graph()
    graph.val_mask[:] = False
    trainer = quiet_trainer(strategy, world_size, max_epochs=2)
    trainer.fit(NodeClassifier(build("gcn"), num_classes=CLASSES).double(), datamodule=GraphDataModule(graph))
    return float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize("strategy", ["dgcl", "vertex_cut", "sampling"])
def test_a_graph_without_validation_nodes_trains(ranks, strategy):
    one, other = ranks.run(2, without_validation, strategy)
    assert one == other > 0
