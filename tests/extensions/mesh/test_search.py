"""BatchSizeFinder with samples: one rank runs out of memory, and all ranks decide together (gloo ranks)."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from common import campaign, quiet_trainer
from conftest import RankFailed
from lightning.pytorch.callbacks import BatchSizeFinder
from sample_runs import MODELS, SampleModule, Samples, graph_of_samples
from torch_geometric.data import Data

from lightning_gnn import DGCLStrategy, GraphDataModule

ERRORS = {
    "device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "cpu": lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "numpy": lambda: MemoryError("Unable to allocate 9 bytes"),
    "other": lambda: KeyError("spoilt"),
}

SEARCH = {"mode": "binsearch", "margin": 0.0}


class Limited(SampleModule):
    """A rank runs out of memory between two layers, or in a backward pass or validation, with more samples than a limit."""

    def __init__(self, rank: int, limit: int, kind: str = "device", place: str = "forward") -> None:
        super().__init__(MODELS["gcn"]())
        self.rank, self.limit, self.kind, self.place = rank, limit, kind, place
        self.sizes: list[int] = []

    def exhaust(self, place: str, size: int) -> None:
        if self.global_rank == self.rank and place == self.place and size > self.limit:
            raise ERRORS[self.kind]()

    def loss(self, batch: Data) -> torch.Tensor:
        size = len(batch.sample_info.indices)
        model = self.model
        h = model.first(batch.x, batch.edge_index, batch.edge_weight)
        self.exhaust("forward", size)
        out = model.second(h, batch.edge_index, batch.edge_weight)
        if self.place == "backward" and out.requires_grad:
            h.register_hook(lambda _: self.exhaust("backward", size))
        return (out - batch.y).square().mean().sqrt()

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch.sample_info.indices))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        self.exhaust("validation", len(batch.sample_info.indices))
        super().validation_step(batch, batch_idx)


class OwnFinder(BatchSizeFinder):
    """A callback of the user, whose hooks have row semantics."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)


def search(
    rank: int,
    world_size: int,
    graph_ranks: int,
    module: dict[str, Any],
    finder: dict[str, Any] | None,
    shared_memory: bool = True,
    **data: Any,
) -> dict[str, Any]:
    """Trains two epochs; after a search, if `finder` has arguments."""
    L.seed_everything(0, verbose=False)
    net = Limited(**module).double()
    samples = Samples(size=24)
    of_run = GraphDataModule(graph_of_samples(), samples=samples, val_samples=samples, partition="random", **data)
    kind = BatchSizeFinder if shared_memory else OwnFinder
    callbacks = [] if finder is None else [kind(**{"steps_per_trial": 1, **finder})]
    strategy = DGCLStrategy(graph_ranks=graph_ranks, timeout=30, shared_memory=shared_memory)
    trainer = quiet_trainer(strategy, world_size, max_epochs=2, num_sanity_val_steps=0, callbacks=callbacks)
    trainer.fit(net, datamodule=of_run)
    steps = 2 * -(-24 // (of_run.batch_size * world_size // graph_ranks))
    return {
        "size": of_run.batch_size,
        "losses": net.losses[-steps:],
        "sizes": net.sizes[-steps:],
        "tried": max(net.sizes),
        "weights": {name: value.clone() for name, value in net.state_dict().items()},
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items() if name.endswith("_loss")},
        "names": sorted(trainer.callback_metrics),
    }


@pytest.mark.parametrize(
    ("graph_ranks", "kind", "place", "finder", "size"),
    [
        (1, "device", "forward", {}, 4),
        (2, "cpu", "backward", SEARCH, 5),
        *campaign((2, "device", "forward", {}, 4), (1, "numpy", "validation", SEARCH | {"steps_per_trial": 3}, 5)),
    ],
)
def test_joint_decision(ranks, graph_ranks, kind, place, finder, size):
    """Rank 1 runs out of memory with more than 5 samples; the run then equals a run with the size that was found."""
    module = {"rank": 1, "limit": 5, "kind": kind, "place": place}
    found = ranks.run(2, search, graph_ranks, module, finder, place != "backward", batch_size=2)
    expected = ranks.run(2, search, graph_ranks, module, None, place != "backward", batch_size=size)
    for ours, theirs in zip(found, expected):
        assert ours["tried"] > 5 and ours["size"] == size
        del ours["tried"], theirs["tried"]
        assert ours.pop("names") == theirs.pop("names")
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("module", "data", "message"),
    [
        (
            {"rank": 1, "limit": 5, "kind": "other"},
            {"batch_size": 2},
            {0: "rank 1", 1: "KeyError: 'spoilt'"},
        ),
        (
            {"rank": 0, "limit": 99},
            {"global_batch_size": 4},
            dict.fromkeys(range(2), "BatchSizeFinder requires GraphDataModule(batch_size=...): global_batch_size fixes the size"),
        ),
    ],
)
def test_errors(ranks, module, data, message):
    with pytest.raises(RankFailed) as failed:
        ranks.run(2, search, 1, module, {}, **data)
    assert all(text in failed.value.errors[rank] for rank, text in message.items()), failed.value.errors


def test_a_size_without_limit(ranks):
    """No rank runs out of memory: the search ends after its trials."""
    found = ranks.run(2, search, 1, {"rank": 0, "limit": 99}, {"max_trials": 2}, batch_size=2)
    assert [each["size"] for each in found] == [4, 4]
