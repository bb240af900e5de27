"""Embeddings whose rows lie at their owners learn what torch.nn.Embedding(sparse=True) learns on one device.

Without ranks; gloo ranks in the pool.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from common import awkward_graph, build, one_training_node, quiet_trainer
from conftest import RankFailed
from torch.utils.checkpoint import checkpoint

from lightning_gnn import (
    DGCLStrategy,
    DistributedEmbedding,
    GraphDataModule,
    SamplingStrategy,
    SpMM1DStrategy,
    SpMM2DStrategy,
    VertexCutStrategy,
)

NODES, DIM, EPOCHS = 60, 8, 3
OPTIMIZERS = {"adam": torch.optim.SparseAdam, "sgd": torch.optim.SGD}
TIGHT = {"rtol": 1e-9, "atol": 1e-11}


def graph(seeds: int | None = None) -> Any:
    """Returns the awkward graph without features; with so many training nodes, if they are told."""
    found = awkward_graph()
    found.x = torch.zeros(NODES, 1, dtype=torch.float64)
    if seeds is not None:
        chosen = found.train_mask.nonzero().view(-1)
        found.train_mask[chosen[chosen != 3][seeds:]] = False
    return found


def sparse_embedding(optimizer: str = "adam", **options: Any) -> DistributedEmbedding:
    return DistributedEmbedding(NODES, DIM, optimizer=optimizer, lr=0.05, **options).double()


def torchs_embedding(optimizer: str) -> tuple[torch.nn.Embedding, torch.optim.Optimizer]:
    """Returns torch's own with the same initial rows, and its optimizer."""
    rows = sparse_embedding()(torch.arange(NODES)).detach()
    embedding = torch.nn.Embedding.from_pretrained(rows, freeze=False, sparse=True)
    return embedding, OPTIMIZERS[optimizer](embedding.parameters(), lr=0.05)


class Embedded(L.LightningModule):
    """A GraphSAGE on embeddings; keeps which nodes and seeds this rank's steps had."""

    def __init__(self, kind: str = "plain", **options: Any) -> None:
        super().__init__()
        self.embedding, self.kind = sparse_embedding(**options), kind
        self.model = build("sage", DIM).double()
        self.automatic_optimization = kind != "manual"
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, batch: Any) -> torch.Tensor:
        if self.kind == "twice":
            x = (3 * self.embedding(batch.n_id) + self.embedding(batch.n_id.flip(0)).flip(0)) / 4
        elif self.kind == "manual":
            x = checkpoint(lambda ids: self.embedding(ids) * 1.0, batch.n_id, use_reentrant=False)
        else:
            x = self.embedding(batch.n_id)
        return self.model(x, batch.edge_index)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        counts = batch.get("seed_counts")
        if counts is None or counts[self.global_rank]:
            chosen = batch.train_mask & (batch.y >= 0)
            self.steps.append((batch.n_id, batch.n_id[chosen]))
        else:
            self.steps.append((batch.n_id[:0], batch.n_id[:0]))
        loss = F.cross_entropy(self(batch)[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch)[batch.val_mask], batch.y[batch.val_mask], ignore_index=-1))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch)

    def on_train_end(self) -> None:
        steps = getattr(self.trainer.strategy, "steps", None)
        channels = [channel for each in steps.shared.learned_rows for channel in each._owners.channels] if steps else []
        self.received = sum(channel.bytes_received for channel in channels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=0.01)


def learned(
    rank: int,
    world_size: int,
    strategy: str,
    kind: str = "plain",
    seeds: int | None = None,
    parts: bool = False,
    batch_size: int = 1000,
    epochs: int = EPOCHS,
    load: str | None = None,
    save: str | None = None,
    self_check: bool = False,
    accumulate: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Trains on one rank; returns its steps and predictions, and the state that rank 0 has afterwards."""
    module = Embedded(kind, **options)
    data = GraphDataModule(graph(seeds), partition=one_training_node()[1] if parts else None)  # rank 1 owns nothing
    of_all: Any = {"timeout": 60, "self_check": self_check}
    chosen: Any = {
        "sampling": lambda: SamplingStrategy([-1, -1], batch_size, **of_all),
        "dgcl": lambda: DGCLStrategy(**of_all),
        "replicate": lambda: DGCLStrategy(plan="replicate", num_hops=2, **of_all),
        "vertex_cut": lambda: VertexCutStrategy(**of_all),
        "spmm_1d": lambda: SpMM1DStrategy(**of_all),
        "spmm_2d": lambda: SpMM2DStrategy(**of_all),
        "auto": lambda: "auto",
    }[strategy]()
    trainer = quiet_trainer(chosen, world_size, self_check, max_epochs=epochs, accumulate_grad_batches=accumulate)
    trainer.fit(module, datamodule=data, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    [predicted] = trainer.predict(module, datamodule=data)
    state = {name: each.clone() for name, each in module.embedding.state_dict().items()}
    return {"steps": module.steps, "state": state, "predictions": predicted, "received": module.received}


def reference(found: list[dict[str, Any]], optimizer: str, accumulate: int = 1) -> dict[str, torch.Tensor]:
    """Trains torch's embedding on one device, on what the ranks' batches were together."""
    data, model = graph(), build("sage", DIM).double()
    embedding, sparse = torchs_embedding(optimizer)
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    for number, batches in enumerate(zip(*(each["steps"] for each in found))):
        touched = torch.cat([n_id for n_id, _ in batches]).unique()
        seeds = torch.cat([seeds for _, seeds in batches])
        x = torch.zeros(NODES, DIM, dtype=torch.float64).index_copy(0, touched, embedding(touched))
        loss = F.cross_entropy(model(x, data.edge_index)[seeds], data.y[seeds])
        (loss / accumulate).backward()
        if (number + 1) % accumulate == 0:
            for each in (dense, sparse):
                each.step()
                each.zero_grad()
    rows = embedding.weight.detach()
    kept = sparse.state[embedding.weight]
    return {"weight": rows, **kept, "predictions": model(rows, data.edge_index).detach()}


def check(found: list[dict[str, Any]], optimizer: str, accumulate: int = 1) -> None:
    expected = reference(found, optimizer, accumulate)
    state = found[0]["state"]
    names = ["weight", "exp_avg", "exp_avg_sq"] if optimizer == "adam" else ["weight"]
    assert [*state] == [*names, "step"]
    for name in names:
        torch.testing.assert_close(state[name], expected[name], **TIGHT)
    for each in found:
        torch.testing.assert_close(each["predictions"], expected["predictions"], **TIGHT)
    for other in found[1:]:
        assert all(len(other["state"][name]) == 0 for name in names)


# Without ranks ################################################################


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_plain_loop_with_duplicates_and_accumulation_is_torchs(optimizer):
    ours, (theirs, sparse) = sparse_embedding(optimizer), torchs_embedding(optimizer)
    lin = torch.nn.Linear(DIM, 1).double()
    dense = torch.optim.SGD(lin.parameters(), lr=0.0)
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        sparse.zero_grad()
        for _ in range(2):
            ids = torch.randint(NODES // 2, (40,), generator=g)
            lin(ours(ids)).pow(2).sum().backward()
            lin(theirs(ids)).pow(2).sum().backward()
        dense.step()
        sparse.step()
    torch.testing.assert_close(ours(torch.arange(NODES)).detach(), theirs.weight.detach(), rtol=1e-12, atol=1e-14)


def test_initial_rows_depend_on_seed_and_node_and_are_standard_normal():
    one, two = DistributedEmbedding(20_000, 16, seed=1), DistributedEmbedding(20_000, 16, seed=2)
    ids = torch.arange(20_000)
    rows = one(ids).detach()
    assert torch.equal(one(ids[[17, 5]]).detach(), rows[[17, 5]])
    assert abs(rows.mean()) < 0.01 and abs(rows.std() - 1) < 0.01
    correlation = torch.corrcoef(torch.cat([rows.T, two(ids).detach().T, rows.roll(1, 0).T]))
    assert (correlation - torch.eye(48)).abs().max() < 0.05


def test_rows_are_no_parameters_and_survive_weights_only(tmp_path):
    embedding = sparse_embedding()
    assert not list(embedding.parameters()) and not list(embedding.buffers())
    embedding(torch.tensor([2, 2, 7])).sum().backward()
    embedding.step()
    torch.save(embedding.state_dict(), tmp_path / "rows.pt")
    other = DistributedEmbedding(NODES, DIM, seed=9).double()
    other.load_state_dict(torch.load(tmp_path / "rows.pt", weights_only=True))
    for name, rows in embedding.state_dict().items():
        assert torch.equal(rows, other.state_dict()[name])
    plain = torch.nn.Embedding(NODES, DIM, dtype=torch.float64)
    plain.load_state_dict(embedding.state_dict(), strict=False)
    assert torch.equal(plain.weight, embedding(torch.arange(NODES)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_nodes": 0}, "num_nodes must be an integer of at least 1, got 0."),
        ({"dim": 0}, "dim must be an integer of at least 1, got 0."),
        ({"optimizer": "lbfgs"}, "optimizer must be 'adam' or 'sgd' .got 'lbfgs'."),
        ({"staleness": -1}, "staleness must be an integer of at least 0"),
        ({"lr": -1.0}, "lr must be at least 0"),
    ],
)
def test_bad_choices_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        DistributedEmbedding(**{"num_nodes": 3, "dim": 2, **options})


def test_bad_ids_are_refused():
    embedding = DistributedEmbedding(5, 2)
    with pytest.raises(ValueError, match="ids must be from 0 to 4 .num_nodes=5., got 1 to 5"):
        embedding(torch.tensor([1, 5]))
    with pytest.raises(ValueError, match=r"ids must be int64 of shape \[n\]"):
        embedding(torch.tensor([1.0]))


def test_states_that_do_not_fit_are_refused():
    with pytest.raises(RuntimeError, match=r"weight is \[5, 2\], but the embedding is \[6, 2\]"):
        DistributedEmbedding(6, 2).load_state_dict(DistributedEmbedding(5, 2).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        DistributedEmbedding(5, 2).load_state_dict(DistributedEmbedding(5, 2, "sgd").state_dict())


def test_another_number_of_nodes_than_the_graphs_is_refused():
    module = Embedded()
    module.embedding = DistributedEmbedding(NODES + 1, DIM)
    with pytest.raises(ValueError, match="num_nodes=61, but the graph has 60 nodes"):
        quiet_trainer("auto", 1).fit(module, datamodule=GraphDataModule(graph()))


# Ranks ########################################################################


@pytest.mark.parametrize(
    ("world_size", "strategy", "options"),
    [
        (1, "sampling", {"batch_size": 10}),
        (2, "sampling", {"self_check": True}),
        (2, "sampling", {"batch_size": 5, "optimizer": "sgd"}),
        (3, "sampling", {"batch_size": 4, "kind": "twice"}),
        (2, "sampling", {"batch_size": 6, "kind": "manual"}),
        (2, "sampling", {"batch_size": 8, "accumulate": 2}),
        (2, "sampling", {"seeds": 1}),
        (2, "dgcl", {"self_check": True}),
        (4, "dgcl", {"parts": True}),
        (4, "sampling", {"parts": True, "batch_size": 4}),
        (2, "replicate", {}),
        (2, "vertex_cut", {}),
        (4, "spmm_2d", {"optimizer": "sgd"}),
    ],
)
def test_ranks_learn_what_torch_learns_on_one_device(ranks, world_size, strategy, options):
    found = ranks.run(world_size, learned, strategy, **options)
    if strategy == "sampling" and "batch_size" in options:
        assert len(found[0]["steps"]) > EPOCHS
    # Where a step has a rank's own nodes in order, no rows travel.
    travels = world_size > 1 and strategy in ("sampling", "replicate")
    assert (sum(each["received"] for each in found) > 0) == travels
    check(found, options.get("optimizer", "adam"), options.get("accumulate", 1))


def test_checkpoints_go_from_two_ranks_to_three_to_one(ranks, tmp_path):
    files = [str(tmp_path / f"{name}.ckpt") for name in ("two", "three", "one")]
    found = [ranks.run(2, learned, "dgcl", epochs=2, save=files[0])]
    found.append(ranks.run(3, learned, "sampling", epochs=4, load=files[0], save=files[1]))
    found.append(ranks.run(1, learned, "auto", epochs=6, load=files[1]))
    whole = [{"steps": [step for each in found for step in _together(each)]}]
    expected = reference(whole, "adam")
    torch.testing.assert_close(found[2][0]["state"]["weight"], expected["weight"], **TIGHT)
    saved = torch.load(files[1], weights_only=True)["state_dict"]
    assert saved["embedding.weight"].shape == (NODES, DIM) and int(saved["embedding.step"]) == 4
    torch.testing.assert_close(saved["embedding.weight"], found[1][0]["state"]["weight"], rtol=0, atol=0)


def _together(found: list[dict[str, Any]]) -> list[Any]:
    """Returns the steps of all ranks as if one had made them."""
    return [tuple(torch.cat(each) for each in zip(*batches)) for batches in zip(*(one["steps"] for one in found))]


def late(rank: int, world_size: int, staleness: int) -> dict[str, Any]:
    """Trains with an owner that is as late with updates as it may be; returns how many it lacked after each step."""
    push, begun, applied, lags = DistributedEmbedding._push, [], [], []

    def slow(*args: Any) -> None:
        deadline = time.monotonic() + 0.5  # the last ones wait in vain
        while rank == 1 and len(begun) < len(applied) + 1 + staleness and time.monotonic() < deadline:
            time.sleep(0.001)
        push(*args)
        applied.append(None)

    class Lag(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            lags.append(len(lags) + 1 - len(applied))

    module = Embedded(staleness=staleness, optimizer="sgd")
    step = module.embedding.step
    module.embedding.step = lambda: (begun.append(None), step())  # type: ignore[method-assign]
    trainer = quiet_trainer(SamplingStrategy([-1, -1], 4, timeout=60, self_check=False), world_size, callbacks=[Lag()])
    DistributedEmbedding._push = slow  # type: ignore[method-assign]
    try:
        trainer.fit(module, datamodule=GraphDataModule(graph()))
    finally:
        DistributedEmbedding._push = push  # type: ignore[method-assign]
    return {"lags": lags, "applied": len(applied), "weight": module.embedding.state_dict()["weight"]}


def test_an_owner_is_at_most_as_late_as_allowed(ranks):
    [exact, _], [stale, slow] = ranks.run(2, late, 0), ranks.run(2, late, 2)
    assert set(exact["lags"]) == {0}
    assert max(slow["lags"]) == 2 and max(stale["lags"]) <= 2
    assert stale["applied"] == slow["applied"] == len(slow["lags"])
    moved = (exact["weight"] - sparse_embedding()(torch.arange(NODES)).detach()).norm()
    assert 0 < (stale["weight"] - exact["weight"]).norm() < 0.3 * moved


def crashed(rank: int, world_size: int, folder: str) -> str:
    module = Embedded()
    module.on_train_epoch_end = lambda: 1 / 0  # type: ignore[method-assign]
    trainer = quiet_trainer(DGCLStrategy(timeout=20, self_check=False), world_size)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, datamodule=GraphDataModule(graph()))
    with pytest.raises(RuntimeError) as raised:
        module.embedding(torch.arange(3))
    return str(raised.value)


def test_rows_of_a_training_that_failed_are_not_used(ranks, tmp_path):
    for said in ranks.run(2, crashed, str(tmp_path)):
        assert "training did not finish" in said


def pickled(rank: int, world_size: int) -> list[Any]:
    """Pickles the module before the first epoch, at its end, and after training; returns whether rows are those of then."""
    module, rows, data = Embedded(), list[torch.Tensor](), list[bytes]()

    def keep() -> None:
        rows.append(module.embedding.state_dict()["weight"])
        data.append(pickle.dumps(module.embedding))

    module.on_train_start = module.on_train_epoch_end = keep  # type: ignore[method-assign]
    trainer = quiet_trainer(DGCLStrategy(timeout=20, self_check=False), world_size, max_epochs=1)
    trainer.fit(module, datamodule=GraphDataModule(graph()))
    keep()
    found: list[Any] = []
    for each, expected in zip(map(pickle.loads, data), rows):
        try:
            found.append(torch.equal(each(torch.arange(NODES)), expected))
        except RuntimeError as error:
            found.append(str(error))
        each.load_state_dict(sparse_embedding().state_dict())
        assert torch.equal(each(torch.arange(3)), sparse_embedding()(torch.arange(3)))
    return found


def test_pickles_have_the_rows_that_one_rank_knows(ranks):
    """One rank alone cannot ask the others for theirs: then the pickle is of no rows, and says so."""
    (before, during, after), *_ = ranks.run(2, pickled)
    assert before is True and after is True
    assert "are not in this process: it was pickled while several ranks trained it" in during


def without_owners(rank: int, world_size: int) -> None:
    trainer = quiet_trainer("ddp", world_size)
    batch = graph()
    batch.n_id = torch.arange(NODES)
    trainer.fit(Embedded(), torch.utils.data.DataLoader([batch], batch_size=None))


def two_optimizers(rank: int, world_size: int) -> None:
    module = Embedded("manual")
    module.configure_optimizers = lambda: [  # type: ignore[method-assign]
        torch.optim.SGD(module.model.parameters(), lr=0.1) for _ in range(2)
    ]
    trainer = quiet_trainer(DGCLStrategy(timeout=20, self_check=False), world_size)
    trainer.fit(module, datamodule=GraphDataModule(graph()))


@pytest.mark.parametrize(
    ("run", "said"), [(without_owners, "on 2 ranks needs a strategy"), (two_optimizers, "does not support 2 optimizers")]
)
def test_what_cannot_be_exact_on_ranks_is_refused(ranks, run, said):
    with pytest.raises(RankFailed, match=said):
        ranks.run(2, run)
