"""The exchange: S and its transpose are adjoint, move exactly the halo, and end in an error when a peer is missing."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import CLASSES, FEATURES, Recorder, all_rows_sent, awkward_graph, build, quiet_trainer
from conftest import RankFailed

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.partition.metrics import edge_cut_report
from lightning_gnn.partition.shard import Relabelling, edge_cut_parts, halo_plan


def connect(rank: int, world_size: int, seed: int, shared_memory: bool, timeout: float = 30) -> tuple[Any, ...]:
    """Returns this rank's exchange over a random cut of a random graph, and what it must fetch."""
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 40))
    edge_index = rng.integers(0, num_nodes, (2, int(rng.integers(0, 150))))
    part = rng.integers(0, world_size, num_nodes).astype(np.int32)
    relabelling = Relabelling.from_assignment(part, world_size)
    parts = list(edge_cut_parts(edge_index, relabelling))
    plan = halo_plan(rank, relabelling.offsets, [piece.halo for piece in parts])
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=timeout), shared_memory)
    exchange = HaloExchange(plan, world, Meter())
    owned = relabelling.n_id[relabelling.offsets[rank] : relabelling.offsets[rank + 1]]
    return exchange, world, num_nodes, owned, relabelling.n_id[parts[rank].halo]


def adjoint(rank: int, world_size: int, seeds: range, shared_memory: bool) -> None:
    for seed in seeds:
        exchange, world, num_nodes, owned, halo = connect(rank, world_size, seed, shared_memory)
        try:
            for shape, dtype in (
                ((3,), torch.float64),
                ((2, 5), torch.float64),
                ((), torch.float64),
                ((4,), torch.float32),
            ):
                everyone = torch.randn(num_nodes, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
                x = everyone[owned].requires_grad_()
                expanded = exchange.expand(x, "layer")
                assert torch.equal(expanded, everyone[np.concatenate([owned, halo])])
                y = torch.randn(expanded.shape, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)
                expanded.backward(y)
                # <S x, y> = <x, S^T y>, summed over ranks
                sides = torch.tensor([float((expanded * y).sum()), float((x * x.grad).sum())], dtype=torch.float64)
                left, right = world.all_reduce_(sides)
                assert float(left) == pytest.approx(
                    float(right), rel=1e-5 if dtype == torch.float32 else 1e-12, abs=1e-5
                )
            if x.dim() == 2:
                wide = everyone.t()[:, owned].unsqueeze(0)  # nodes along the last dimension but one of [1, 4, N]
                moved = exchange.expand(wide, "layer", dim=-1)
                assert torch.equal(moved[0], everyone.t()[:, np.concatenate([owned, halo])])
        finally:
            world.close()


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_adjoint_and_exact_rows(ranks, world_size, shared_memory):
    ranks.run(world_size, adjoint, range(8), shared_memory)


def collectives(rank: int, world_size: int, shared_memory: bool) -> None:
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30), shared_memory)
    try:
        assert world.transport.all_local == shared_memory
        big = torch.full((300_000,), float(rank))
        assert torch.equal(world.all_reduce_(big), torch.full((300_000,), float(sum(range(world_size)))))
        for size in (1, 5, 100_000, 2):  # buffers grow, and small messages follow large ones
            gathered = world.all_gather(torch.arange(size) + rank)
            assert torch.equal(gathered, torch.arange(size) + torch.arange(world_size).view(-1, 1))
        counts = [3, 0, 2, 1][:world_size]
        rows = torch.full((counts[rank], 2), rank, dtype=torch.bfloat16)
        expected = torch.repeat_interleave(torch.arange(world_size), torch.tensor(counts)).to(torch.bfloat16)
        assert torch.equal(world.all_gather_rows(rows, counts)[:, 0], expected)
        values = [torch.full((2, 2), rank), torch.tensor(rank > 0), torch.tensor(3.0 * rank)]
        world.broadcast_tensors_(values)
        assert values[0].sum() == 0 and not values[1] and values[2] == 0
        assert world.broadcast_object({"from": rank}, 1) == {"from": 1}
    finally:
        world.close()


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives(ranks, world_size, shared_memory):
    ranks.run(world_size, collectives, shared_memory)


def late(rank: int, world_size: int, shared_memory: bool, goes: str) -> None:
    exchange, world, _, owned, _ = connect(rank, world_size, 3, shared_memory, timeout=2)
    try:
        if rank == 1:
            if goes == "sleeps":
                time.sleep(5)
            if goes == "raises":
                raise KeyError("user code")
        exchange.expand(torch.randn(len(owned), 4), "encoder.convs.1")
    finally:
        world.close()


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("goes", ["sleeps", "raises"])
def test_missing_peer_is_named(ranks, shared_memory, goes):
    began = time.perf_counter()
    with pytest.raises(RankFailed) as caught:
        ranks.run(2, late, shared_memory, goes)
    line = caught.value.errors[0]
    for words in ("Halo exchange (forward)", "layer 'encoder.convs.1'", "on rank 0", "rank 1"):
        assert words in line
    assert time.perf_counter() - began < 20


def counted(rank: int, world_size: int, epochs: int, model: str) -> Any:
    """Bytes of each epoch as logged, and by layer as counted on this rank."""
    recorder = Recorder()
    seen: list[tuple[float, Any]] = []

    class Look(type(recorder)):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            by_layer = {key: traffic.bytes_sent for key, traffic in trainer.callbacks[0].by_layer.items()}
            seen.append((float(trainer.callback_metrics["comm/bytes_sent"]), by_layer))

    module = NodeClassifier(build(model), num_classes=CLASSES).double()
    trainer = quiet_trainer(
        DGCLStrategy(timeout=30), world_size, callbacks=[Look()], max_epochs=epochs, limit_val_batches=0
    )
    data = GraphDataModule(awkward_graph(), partition="random")
    with all_rows_sent():
        trainer.fit(module, datamodule=data)
    return seen, data.shard.plan


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_equal_the_lower_bound(ranks, world_size):
    """Distinct remote neighbours x columns x element size: 5 in a GCN's second layer, none in its first but once."""
    graph = awkward_graph()
    results = ranks.run(world_size, counted, 3, "gcn")
    part = np.random.default_rng(0).permutation(np.arange(60) % world_size)
    halo = int(edge_cut_report(graph.edge_index.numpy(), part, world_size).halo_rows.sum())
    assert halo == sum(sum(plan.recv_counts) for _, plan in results)
    bound = 2 * halo * CLASSES * 8
    for seen, plan in results:
        logged = [total for total, _ in seen]
        assert logged[1] == logged[2] == bound
        # Once: the degrees, which both layers' normalisation shares, and the features.
        assert logged[0] == bound + halo * (1 + FEATURES) * 8
        assert ("model.convs.0", "forward") not in seen[-1][1]
        assert seen[-1][1]["model.convs.1", "forward"] == sum(map(len, plan.send_rows)) * CLASSES * 8
        assert seen[-1][1]["model.convs.1", "backward"] == sum(plan.recv_counts) * CLASSES * 8


def test_constant_input_is_fetched_once(ranks):
    """GraphSAGE's first layer sums the features: their halo never changes and is not sent again."""
    results = ranks.run(2, counted, 3, "sage")
    halo = sum(sum(plan.recv_counts) for _, plan in results)
    for seen, _ in results:
        totals = [total for total, _ in seen]
        assert totals[1] == totals[2] == 2 * halo * CLASSES * 8  # the second layer's, forward and back
        assert totals[0] == totals[1] + halo * FEATURES * 8
        assert ("model.convs.0", "backward") not in seen[-1][1]


def closed_world(rank: int, world_size: int) -> dict[str, int]:
    """Closes a world that something still refers to; returns by how many of each name the threads of gloo have grown."""

    def threads() -> Counter[str]:
        names = [each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm")]
        return Counter(name for name in names if "gloo" in name)

    before = threads()
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30))
    assert threads() - before
    world.close()
    deadline = time.monotonic() + 5  # threads may take a moment to end
    while threads() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert world.closed
    return dict(threads() - before)


def test_a_closed_world_leaves_no_threads(ranks):
    """Tensors that users keep lead to the world of their run."""
    assert ranks.run(2, closed_world) == [{}, {}]
