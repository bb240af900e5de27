"""Features of Lightning with samples on a mesh of ranks: parts of epochs, metrics, checkpoints, resumed runs (gloo ranks)."""

from __future__ import annotations

import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from common import quiet_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sample_runs import MODELS, SampleModule, Samples, graph_of_samples
from torch_geometric.data import Data
from torchmetrics import MeanAbsoluteError, R2Score

from lightning_gnn import DGCLStrategy, GraphDataModule, local_rows


class Measured(SampleModule):
    """Metric objects over all samples and nodes, an activation checkpoint, and a schedule per step."""

    def __init__(self) -> None:
        super().__init__(MODELS["conv_gru"]())
        self.error, self.r2 = MeanAbsoluteError(), R2Score()
        self.batches: list[list[int]] = []

    def loss(self, batch: Data) -> torch.Tensor:
        out = torch.utils.checkpoint.checkpoint(self.model, batch, use_reentrant=False)
        return (out - batch.y).square().mean().sqrt()

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        self.batches.append(batch.sample_info.indices)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        out = self.model(batch)
        self.error.update(out, batch.y)
        self.r2.update(out.reshape(-1), batch.y.reshape(-1))
        self.log_dict({"error": self.error, "r2": self.r2})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def run(
    rank: int,
    world_size: int,
    graph_ranks: int,
    folder: Path | None = None,
    resume: Path | None = None,
    size: int = 4,
    **options: Any,
) -> dict[str, Any]:
    """Trains on 12 samples, three batches per epoch."""
    L.seed_everything(0, verbose=False)
    module = Measured().double()
    samples = Samples(4, size=12)
    data = GraphDataModule(graph_of_samples(), samples=samples, val_samples=samples, global_batch_size=size)
    strategy: Any = DGCLStrategy(graph_ranks=graph_ranks, timeout=60) if graph_ranks else "auto"
    callbacks = [] if folder is None else [ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1, filename="{step}")]
    trainer = quiet_trainer(
        strategy, world_size, callbacks=callbacks, enable_checkpointing=folder is not None, **{"max_epochs": 2, **options}
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name in ("error", "r2", "train_loss")}
    return {"losses": module.losses, "logged": logged, "batches": module.batches, "step": trainer.global_step}


@pytest.mark.parametrize(
    "options", [{"val_check_interval": 2, "limit_train_batches": 2}, {"limit_val_batches": 2, "num_sanity_val_steps": 1}]
)
def test_parts_of_epochs(ranks, options):
    expected = run(0, 1, 0, **options)
    for found in ranks.run(4, run, 2, **options):
        del found["batches"]
        torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-10, atol=1e-10)


def test_checkpoints(ranks, tmp_path):
    """A run of two epochs that stops within the second continues on other meshes, and on one device, with the same batches."""
    whole = run(0, 1, 0)
    ranks.run(4, run, 2, folder=tmp_path, max_steps=4)
    [file] = tmp_path.glob("step=4*.ckpt")
    ranks.run(2, run, 2, folder=tmp_path / "one_group", max_steps=4)
    [other] = (tmp_path / "one_group").glob("step=4*.ckpt")
    for size, graph_ranks, file in ((1, 0, file), (2, 1, file), (4, 2, file), (2, 1, other)):  # noqa: B020
        of_ranks = ranks.run(size, run, graph_ranks, resume=file) if graph_ranks else [run(0, 1, 0, resume=file)]
        for found in of_ranks:
            torch.testing.assert_close(found["losses"], whole["losses"][4:], rtol=1e-10, atol=1e-10)
            assert found["step"] == 6
        batches = [sorted(chain(*each)) for each in zip(*(found["batches"] for found in of_ranks[:: graph_ranks or 1]))]
        assert batches == [sorted(each) for each in whole["batches"][4:]]


class Noisy(SampleModule):
    """Draws a number per sample in each step."""

    def __init__(self) -> None:
        super().__init__(MODELS["graph_conv"]())
        self.draws: dict[int, list[float]] = {}

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        self.noise = torch.rand(batch.x.size(0), 1, 1)
        return super().training_step(batch, batch_idx) * (1 + self.noise.mean())

    def on_train_batch_end(self, *_: Any) -> None:
        with local_rows():
            self.draws[self.trainer.global_step] = self.noise.flatten().tolist()


def draw(rank: int, world_size: int, graph_ranks: int, folder: Path | None = None, resume: Path | None = None) -> Any:
    """Returns the numbers that a rank draws per sample, by training step."""
    L.seed_everything(0, verbose=False)
    module = Noisy().double()
    data = GraphDataModule(graph_of_samples(), samples=Samples(size=12), global_batch_size=4)
    callbacks = [] if folder is None else [ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1, filename="{step}")]
    strategy = DGCLStrategy(graph_ranks=graph_ranks, timeout=60)
    trainer = quiet_trainer(strategy, world_size, max_epochs=1, callbacks=callbacks, enable_checkpointing=folder is not None)
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    return module.draws


def test_resumed_draws_per_sample(ranks, tmp_path):
    """They continue on the same mesh. On a mesh of another shape, they still differ on data ranks only."""
    whole = {parts: ranks.run(4, draw, parts, folder=tmp_path / str(parts)) for parts in (1, 2)}
    for before, parts in ((1, 1), (2, 2), (1, 2), (2, 1)):
        [file] = (tmp_path / str(before)).glob("step=1*.ckpt")
        found = ranks.run(4, draw, parts, resume=file)
        assert len({str(each) for each in found}) == 4 // parts
        assert all(found[rank] == found[rank // parts * parts] and [*found[rank]] == [2, 3] for rank in range(4))
        if before == parts:
            assert found == [{step: each[step] for step in (2, 3)} for each in whole[parts]]


def test_another_batch_size_is_an_error_within_an_epoch(tmp_path):
    """Batches that were read would otherwise be counted as batches of another size, and samples repeated or skipped."""
    run(0, 1, 0, folder=tmp_path, max_epochs=1)
    of_step = {number: next(iter(tmp_path.glob(f"step={number}*.ckpt"))) for number in (1, 3)}
    with pytest.raises(ValueError, match="per global batch, got 6, and the checkpoint has 4. Set global_batch_size=4"):
        run(0, 1, 0, resume=of_step[1], size=6)
    assert run(0, 1, 0, resume=of_step[3], size=6)["step"] == 5


def compile_model(rank: int, world_size: int, strategy: str) -> tuple[list[float], list[str]]:
    """Returns the losses of a compiled model, and its warnings about the compiler."""
    L.seed_everything(0, verbose=False)
    module = SampleModule(torch.compile(MODELS["gcn"](), backend="eager")).double()
    data = GraphDataModule(graph_of_samples(), samples=Samples(size=8), global_batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        of_ranks: Any = strategy if strategy == "auto" else DGCLStrategy(graph_ranks=1, timeout=60)
        quiet_trainer(of_ranks, world_size).fit(module, datamodule=data)
    return module.losses, [str(each.message) for each in caught if "without a compiler" in str(each.message)]


def test_compiled_models_on_data_ranks(ranks):
    expected, _ = compile_model(0, 1, "auto")
    for rank, (losses, found) in enumerate(ranks.run(2, compile_model, "dgcl")):
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
        text = "TwoConvs runs without a compiler: several data ranks divide the samples. Set graph_ranks to the number of ranks."
        assert found == [text] * (rank == 0)


class OnGraph(SampleModule):
    """Mean over samples, whose gradient is the mean of the ranks' gradients; with the graph in the module for DDP."""

    def __init__(self, graph: Data | None) -> None:
        super().__init__(MODELS["gcn"]())
        self.graph = graph

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch  # a mean over all ranks' samples would differ from DDP's

    def on_train_batch_end(self, *_: Any) -> None:
        """No-op."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.graph is not None:
            batch = Data(**self.graph.to_dict(), **batch)
        return (self.model(batch) - batch.y).square().mean()


def train_as_ddp(rank: int, world_size: int, strategy: str) -> dict[str, torch.Tensor]:
    L.seed_everything(0, verbose=False)
    samples, graph = Samples(size=8), graph_of_samples()
    module = OnGraph(graph if strategy == "ddp" else None).double()
    if strategy == "ddp":
        sampler = torch.utils.data.DistributedSampler(samples, world_size, rank, shuffle=False)
        loader = torch.utils.data.DataLoader(samples, batch_size=2, sampler=sampler)
        quiet_trainer("ddp", world_size, use_distributed_sampler=False).fit(module, loader)
    else:
        data = GraphDataModule(graph, samples=samples, batch_size=2, shuffle=False)
        quiet_trainer(DGCLStrategy(graph_ranks=1, timeout=60), world_size).fit(module, datamodule=data)
    return module.state_dict()


def test_ddp(ranks):
    """With one graph rank, a mean over samples, and batches of equal sizes, weights equal DDP's."""
    [expected, _], found = ranks.run(2, train_as_ddp, "ddp"), ranks.run(2, train_as_ddp, "dgcl")
    for weights in found:
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-10)
