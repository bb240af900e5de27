"""Rows of zeros are left out of messages of the backward: what arrives has the same bits, whatever a module's gradients are."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import CLASSES, FEATURES, all_rows_sent, awkward_graph, campaign, examples, quiet_trainer, random_cut
from hypothesis import given
from hypothesis import strategies as st
from planning import chain
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv

from lightning_gnn import CoverStrategy, DGCLStrategy, GraphDataModule, SpMM15DStrategy, VertexCutStrategy
from lightning_gnn.comm.call import Call, Step
from lightning_gnn.comm.exchange import Exchange, HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.traffic import Meter, Traffic
from lightning_gnn.extensions.plans.planned_exchange import PlannedExchange
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.spst import spst
from lightning_gnn.extensions.plans.tables import rank_plan
from lightning_gnn.extensions.zero_rows.transport import nonzero_rows, pack_rows, unpack_rows
from lightning_gnn.partition.shard import halo_plan
from lightning_gnn.strategies.vertex_cut.strategy import CachedVertexCutStrategy

NODES = 40
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def bits(rows: Tensor) -> list[int]:
    return rows.contiguous().view(-1).view(torch.uint8).tolist()


# Packing ######################################################################


@examples(60)
@given(
    num_rows=st.integers(1, 70),
    shape=st.sampled_from([(), (1,), (3,), (17,), (2, 5), (33,)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
)
def test_what_is_packed_is_unpacked(num_rows, shape, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    rows = (torch.randn(num_rows, *shape, generator=g) * 10).to(dtype)
    zero = torch.rand(num_rows, generator=g) < float(torch.rand((), generator=g))
    rows[zero] = 0
    whole = torch.randn(3, *shape, generator=g).to(dtype)
    kept, (data, rest) = packed(torch.cat([rows, whole]), [num_rows, 3], [True, False])
    found = torch.full_like(rows, 7)
    assert kept[0] == nonzero_rows(rows, [num_rows])[0] == int(rows.view(num_rows, -1).any(1).sum())
    size = -(-num_rows // 8) + kept[0] * rows[0].nbytes
    assert unpack_rows(torch.cat([data[:size], 255 - data]), found) == kept[0]  # what lies behind does not matter
    assert bits(found) == bits(rows) and bits(rest[: whole.nbytes]) == bits(whole)


def packed(rows: Tensor, counts: list[int], which: list[bool]) -> tuple[list[int], tuple[Tensor, ...]]:
    """Returns how many rows of each part are not zero, and memory with the parts."""
    room = [count * rows[0].nbytes + -(-count // 8) + 3 for count in counts]
    out = torch.full((sum(room),), 255, dtype=torch.uint8)
    places = np.cumsum([0, *room])[:-1].tolist()
    return pack_rows(rows, counts, which, places, out), out.split(room)


@pytest.mark.parametrize("width", [1, 5, 16, 40])
def test_a_row_is_zero_only_if_all_its_bits_are(width):
    for value in (-0.0, float("nan"), float("inf"), 1e-45):
        for place in range(width):
            rows = torch.zeros(3, width)
            rows[1, place] = value
            assert nonzero_rows(rows, [1, 2]) == [0, 1]
            found = torch.ones_like(rows)
            unpack_rows(packed(rows, [3], [True])[1][0], found)
            assert bits(found) == bits(rows)


# Exchanges ####################################################################


def gradients(step: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Returns rows of all nodes: zero from few to all of them, and then not, from step to step; some -0.0 and NaN."""
    g = torch.Generator().manual_seed(1000 * seed + step)
    rows = torch.randn(NODES, 6, generator=g).to(dtype)
    share = [0.9, 0.9, 0.95, 1.0, 1.0, 0.0, 0.0, 0.5, 0.05, 0.9, 0.9, 0.5][step]
    rows[torch.rand(NODES, generator=g) < share] = 0
    if step % 3 == 1:
        rows[torch.rand(NODES, generator=g) < 0.2] = -0.0
    if step == 10:
        rows[torch.rand(NODES, generator=g) < 0.1] = float("nan")
    return rows


STEPS = 12


def exchange_of(world: World, seed: int, planned: bool) -> tuple[Exchange, slice, np.ndarray]:
    offsets, halos = random_cut(NODES, world.size, seed)
    own, halo = slice(*offsets[world.rank : world.rank + 2]), halos[world.rank]
    if planned:
        plan = spst(Relation.from_halos(halos, offsets), chain(world.size))
        return PlannedExchange(rank_plan(plan, world.rank), world, Meter()), own, halo
    return HaloExchange(halo_plan(world.rank, offsets, halos), world, Meter()), own, halo


def both_ways(world: World, seed: int, planned: bool, dtype: torch.dtype) -> tuple[list[Any], list[tuple[int, int]]]:
    """Returns the bits that come home and that come to halo rows in each step, and the bytes and rows sent by this rank."""
    exchange, own, halo_ids = exchange_of(world, seed, planned)
    found: list[Any] = []
    sent = []
    for step in range(STEPS):
        world.begin_step(Step(number=step))
        rows = gradients(step, seed, dtype)
        home, halo = torch.ones_like(rows[own]), rows[halo_ids].contiguous()
        arrived = torch.empty_like(halo)
        exchange.start_reduce(halo, Call("reduced", direction="backward"))(home)
        # A product multiplies with the transpose, and expands gradients.
        exchange.start_expand(rows[own].contiguous(), arrived, Call("expanded", direction="backward"))()
        assert bits(arrived) == bits(rows[halo_ids])
        found.append(bits(home))
        total = sum(exchange.meter.take().values(), Traffic())
        sent.append((total.bytes_sent, total.rows))
    return found, sent


def on_threads(size: int, work: Callable[[World], Any]) -> list[Any]:
    meeting = Meeting(size)
    found = meeting.run(lambda rank: work(InProcessWorld(rank, meeting)))
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def expected_bytes(size: int, seed: int, dtype: torch.dtype) -> list[list[tuple[int, int]]]:
    """Returns by rank and step the bytes and rows of direct messages, of which each has the form that the last one was worth."""
    offsets, halos = random_cut(NODES, size, seed)
    plans = [halo_plan(rank, offsets, halos) for rank in range(size)]
    expected = [[(0, 0)] * STEPS for _ in range(size)]
    width = 6 * dtype.itemsize
    for rank, plan in enumerate(plans):
        bounds = np.searchsorted(halos[rank], offsets)
        owned = [rows + offsets[rank] for rows in plan.send_rows]
        read = [halos[rank][low:high] for low, high in pairwise(bounds)]
        for ids in (*owned, *read):
            short = False
            for step in range(STEPS if len(ids) else 0):
                rows = gradients(step, seed, dtype)[ids]
                kept = sum(any(bits(row)) for row in rows)
                front = -(-len(ids) // 8)
                num_bytes, num_rows = expected[rank][step]
                sent = (front + kept * width, kept) if short else (len(ids) * width, len(ids))
                expected[rank][step] = num_bytes + sent[0], num_rows + sent[1]
                short = 8 * ((len(ids) - kept) * width - front) >= len(ids) * width and (short or step < 9)
    return expected


@examples(20)
@given(size=st.integers(2, 4), seed=st.integers(0, 2**10), dtype=st.sampled_from(DTYPES[:3]))
def test_the_same_bits_arrive_and_no_others_are_sent(size, seed, dtype):
    found = on_threads(size, lambda world: both_ways(world, seed, False, dtype))
    with all_rows_sent():
        whole = on_threads(size, lambda world: both_ways(world, seed, False, dtype))
    assert [sent for _, sent in found] == expected_bytes(size, seed, dtype)
    assert [each for each, _ in found] == [each for each, _ in whole]


@examples(10)
@given(size=st.integers(2, 4), seed=st.integers(0, 2**10))
def test_the_same_bits_arrive_by_plans(size, seed):
    found = on_threads(size, lambda world: both_ways(world, seed, True, torch.float32))
    with all_rows_sent():
        whole = on_threads(size, lambda world: both_ways(world, seed, True, torch.float32))
    assert [each for each, _ in found] == [each for each, _ in whole]
    for (_, sent), (_, most) in zip(found, whole):
        rows, all_rows = (np.array([count for _, count in each]) for each in (sent, most))
        assert (rows <= all_rows).all() and (rows.sum() < all_rows.sum() or not all_rows.any())


def with_and_without(rank: int, size: int, shared_memory: bool, seed: int) -> Any:
    world = World(rank, size, torch.device("cpu"), timedelta(seconds=30), shared_memory)
    try:
        found = [both_ways(world, seed, planned, torch.float32) for planned in (False, True)]
        with all_rows_sent():
            whole = [both_ways(world, seed, planned, torch.float32) for planned in (False, True)]
    finally:
        world.close()
    assert [each for each, _ in found] == [each for each, _ in whole]
    return found[0][1]


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_processes(ranks, size, shared_memory):
    assert ranks.run(size, with_and_without, shared_memory, 3) == expected_bytes(size, 3, torch.float32)


def late(world: World) -> tuple[list[Any], int]:
    """Waits for what comes home in a step only in the next one."""
    exchange, own, halo_ids = exchange_of(world, 3, False)
    found, before = [], None
    for step in range(STEPS):
        world.begin_step(Step(number=step))
        rows = gradients(step, 3, torch.float32)
        finish = exchange.start_reduce(rows[halo_ids].contiguous(), Call("reduced", direction="backward"))
        if before is not None:
            home = torch.zeros_like(rows[own])
            before(home)
            found.append(bits(home))
        before = finish
    before(rows[own].clone())
    return found, exchange.meter.total().rows


def late_on_ranks(rank: int, size: int, shared_memory: bool) -> None:
    world = World(rank, size, torch.device("cpu"), timedelta(seconds=30), shared_memory)
    try:
        found, rows = late(world)
        with all_rows_sent():
            whole, most = late(world)
    finally:
        world.close()
    assert found == whole and rows < most


@pytest.mark.parametrize("shared_memory", [True, False])
def test_messages_may_be_under_way_for_a_step(ranks, shared_memory):
    ranks.run(3, late_on_ranks, shared_memory)


def test_who_has_no_messages_in_a_step_knows_those_of_the_step_before():
    rows = torch.zeros(64, 4)
    rows[5] = 1

    def work(world: World) -> Any:
        exchange, *_ = exchange_of(world, 3, False)
        for step in range(4):
            world.begin_step(Step(number=step))
            sender, receiver = ((0, 1), (2, 1))[step % 2]
            counts, none = [[64 * (rank == other) for rank in range(3)] for other in (receiver, sender)], [0, 0, 0]
            into, call = torch.ones_like(rows), Call("a", direction="backward")
            if world.rank == sender:
                exchange.send(rows, counts[0], rows[:0], none, call, exchange.now(call))()
            elif world.rank == receiver:
                exchange.send(rows[:0], none, into, counts[1], call, exchange.now(call))()
                assert torch.equal(into, rows)
        return exchange.meter.total().rows

    assert on_threads(3, work) == [65, 0, 65]


# Training #####################################################################


def few_labels() -> Data:
    graph = awkward_graph(dtype=torch.float32)
    graph.train_mask = torch.zeros(60, dtype=torch.bool)
    graph.train_mask[[1, 12, 25, 40]] = True
    graph.y[[1, 12, 25, 40]] = 2
    return graph


class Penalised(L.LightningModule):
    """Gradients at labelled nodes; from epoch 2 on at all of them, by a penalty, a mean and a norm; from epoch 4 on as before."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        L.seed_everything(1)
        self.first, self.norm = GCNConv(FEATURES, 8), torch.nn.BatchNorm1d(8)
        self.second = GATConv(8, 8) if attention else GCNConv(8, 8)
        self.third = GCNConv(8, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        everywhere = self.current_epoch in (2, 3)
        h = self.first(batch.x, batch.edge_index)
        h = self.second((self.norm(h) if everywhere else h).relu(), batch.edge_index)
        if everywhere:
            h = h - h.sum(0) / 60
        out = self.third(h, batch.edge_index)
        loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])
        self.log("train_loss", loss)
        return loss + 0.01 * h.square().sum() if everywhere else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def trained(rank: int, size: int, strategy: type, options: dict[str, Any], attention: bool) -> Any:
    """Returns losses, weights, and what was sent in the backward of each epoch, with all rows and without those of zeros."""
    options = {"topology": chain(size), **options} if options.get("plan") == "spst" else options

    def run() -> Any:
        losses, sent = [], []

        class Look(L.Callback):
            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                losses.append(float(trainer.callback_metrics["train_loss"]))
                counted = trainer.callbacks[0].by_layer.items()
                sent.append(
                    {layer: (each.bytes_sent, each.rows) for (layer, way), each in counted if way == "backward"}
                )

        module = Penalised(attention)
        trainer = quiet_trainer(
            strategy(timeout=60, self_check=False, **options),
            size,
            max_epochs=7,
            limit_val_batches=0,
            callbacks=[Look()],
        )
        trainer.fit(module, datamodule=GraphDataModule(few_labels()))
        return losses, [bits(value) for value in module.state_dict().values()], sent

    with all_rows_sent():
        whole = run()
    return whole, run()


SCHEMES = [
    (2, DGCLStrategy, {}, True),
    (3, DGCLStrategy, {"shared_memory": False}, False),
    (3, DGCLStrategy, {"plan": "spst"}, False),
    (2, VertexCutStrategy, {"shared_memory": False}, False),
    (3, CachedVertexCutStrategy, {}, False),
    (3, SpMM15DStrategy, {"replication_factor": 1}, False),
    (2, DGCLStrategy, {"codec": "int8"}, False),
    (3, CoverStrategy, {"shared_memory": False}, False),
    *campaign(
        (2, DGCLStrategy, {"shared_memory": False, "checkpoint_convs": True}, True),
        (3, DGCLStrategy, {"plan": "spst", "shared_memory": False}, True),
        (3, CoverStrategy, {}, True),
        (3, VertexCutStrategy, {}, True),
        (2, CachedVertexCutStrategy, {"shared_memory": False}, False),
        (4, SpMM15DStrategy, {"replication_factor": 2, "shared_memory": False}, False),
    ),
]


@pytest.mark.parametrize(("size", "strategy", "options", "attention"), SCHEMES)
def test_training_is_the_same_to_the_bit(ranks, size, strategy, options, attention):
    """Also where gradients come at all nodes after some epochs, for some."""
    results = ranks.run(size, trained, strategy, options, attention)
    approximate = "codec" in options or strategy is CachedVertexCutStrategy
    for (losses, weights, most), (found, same, sent) in results:
        assert found == losses and same == weights
        assert [each.keys() for each in sent] == [each.keys() for each in most]
        for epoch, layers in enumerate(most):
            for layer, (num_bytes, rows) in layers.items():
                if approximate or epoch == 0 or (epoch, layer) == (3, "second"):  # there was no zero row in epoch 2
                    assert sent[epoch][layer] == (num_bytes, rows)
                less = num_bytes - sent[epoch][layer][0], rows - sent[epoch][layer][1]
                if rows and num_bytes % rows == 0:  # those that are not there, but for a bit of each row of one width
                    assert 0 <= less[1] * num_bytes / rows - less[0] <= rows / 8 + 4 * size
    if not approximate:
        for epoch in (1, 6):
            rows, all_rows = (
                sum(count for result in results for _, count in result[way][2][epoch].values()) for way in (1, 0)
            )
            assert rows < 0.8 * all_rows


def reached(rank: int, size: int) -> Any:
    rows = []

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            counted = trainer.callbacks[0].by_layer
            rows.append({layer: each.rows for (layer, way), each in counted.items() if way == "backward"})

    data, module = GraphDataModule(few_labels(), partition="random"), Penalised(False)
    module.second = GCNConv(8, 8)
    trainer = quiet_trainer(DGCLStrategy(self_check=False), size, max_epochs=2, limit_val_batches=0, callbacks=[Look()])
    trainer.fit(module, datamodule=data)
    shard = data.shard
    return rows[-1], shard.batch.n_id.numpy(), shard.node_ids(rank), shard.batch.n_id


@pytest.mark.parametrize("size", [3])
def test_no_row_is_sent_from_which_no_label_is_reached(ranks, size):
    """Of rows that other ranks own, those that edges read of which some end reaches a labelled node in the layers left."""
    graph, results = few_labels(), ranks.run(size, reached)
    owner = np.full(60, -1)
    for rank, (_, n_id, *_) in enumerate(results):
        owner[n_id] = rank
    source, target = graph.edge_index.numpy()
    has_gradient = graph.train_mask.numpy().copy()
    for layer in ("third", "second"):
        live = has_gradient[target]
        for rank, (rows, *_) in enumerate(results):
            expected = np.unique(source[live & (owner[target] == rank) & (owner[source] != rank)])
            assert rows[layer] == len(expected), layer
        has_gradient[source[live]] = True
