"""The contract of exchanges: all rows of all layers pass through its two methods, which are told step and call."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_convs import ABSTRACT, OVER_ALL, RECIPES, N, outputs, whole_graph
from test_exchange import connect
from torch import Tensor
from torch_geometric import nn

import lightning_gnn
from lightning_gnn.comm.call import Call, Step
from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.in_process import InProcessTransport, InProcessWorld, Meeting
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import split_graph
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.strategy.scheme import bind_module

CONVS = sorted(set(RECIPES) - OVER_ALL - {"GPSConv"})  # whose dense attention takes rows of all nodes
IN_PROCESS = sorted(set(CONVS) - ABSTRACT)


class Zeroed(HaloExchange):
    """Halo rows and what is reduced are zero, and nothing travels."""

    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        halo.zero_()
        return lambda: None

    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        return lambda own: None


class Seen(HaloExchange):
    """Counts the bytes of halo rows that it brings and takes, and notes what it is told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_bytes, self.told = Counter[str](), []

    def begin_step(self, step: Step) -> None:
        self.told.append(step)

    def start_expand(self, x: Tensor, halo: Tensor, call: Call) -> Callable[[], None]:
        self.told.append(("expand", call))
        self.num_bytes[call.direction] += len(self.send_rows) * x[:1].nbytes
        return super().start_expand(x, halo, call)

    def start_reduce(self, halo: Tensor, call: Call) -> Callable[[Tensor], None]:
        self.told.append(("reduce", call))
        self.num_bytes[call.direction] += halo.nbytes
        return super().start_reduce(halo, call)


class With(DGCLScheme):
    """``dgcl`` by another exchange."""

    def __init__(self, kind: type[HaloExchange]) -> None:
        super().__init__(topology=None)
        self.kind = kind

    def exchange(self, shard: Any, world: Any, meter: Meter) -> HaloExchange:
        return self.kind(shard.plan, world, meter)


def on_ranks(size: int, work: Callable[[int, InProcessWorld], Any]) -> list[Any]:
    meeting = Meeting(size)
    found = meeting.run(lambda rank: work(rank, InProcessWorld(rank, meeting)))
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def shards(size: int) -> list[Any]:
    graph = whole_graph()
    part = np.random.default_rng(size).integers(0, size, N)
    found = split_graph(graph, part, LayoutSpec("edge_cut", size))
    for shard in found:
        shard.batch.edge_weight = shard.batch.w
    return found


def outputs_of(name: str, kind: type[HaloExchange], moved: bool) -> list[Any]:
    """Returns each rank's outputs and input gradients of all recipes of a conv, its exchange, and what the transport has sent.

    Args:
        moved: other rows on rank 1.
    """

    def work(rank: int, world: InProcessWorld) -> Any:
        shard, meter = shards(2)[rank], Meter()
        batch = shard.batch
        if moved and rank == 1:
            for key in ("x", "x0", "pos", "normal"):
                batch[key] = batch[key] + 1
        found = []
        for make, call in RECIPES[name]:
            torch.manual_seed(7)
            conv = make().double().eval()
            batch.x = batch.x.detach().requires_grad_()
            binding = bind_module(With(kind), torch.nn.Sequential(conv), shard, world, meter, cache_input_aggregation=False)
            binding.context.begin_step()
            out = outputs(call(conv, batch))
            if out.requires_grad:
                out.sum().backward()
            found += [out.detach(), batch.x.grad]
            binding.release()
        return found, binding.context.exchange, meter

    return on_ranks(2, work)


@pytest.mark.parametrize("name", IN_PROCESS)
def test_without_its_rows_no_conv_sees_another_rank(name):
    still, moved = (outputs_of(name, Zeroed, moved)[0][0] for moved in (False, True))
    for one, other in zip(still, moved):
        assert one is other is None or torch.equal(one, other)
    true_still, true_moved = (outputs_of(name, HaloExchange, moved)[0][0] for moved in (False, True))
    assert not all(one is None or torch.equal(one, other) for one, other in zip(true_still, true_moved))


@pytest.mark.parametrize("name", IN_PROCESS)
def test_an_exchange_sees_every_byte(monkeypatch, name):
    sent = Counter[int]()
    start_each = InProcessTransport.start_each

    def counting(self: InProcessTransport, sends: Any, receives: Any) -> Any:
        sent[self._rank] += sum(rows.nbytes for _, rows in sends)
        return start_each(self, sends, receives)

    monkeypatch.setattr(InProcessTransport, "start_each", counting)
    for rank, (_, exchange, meter) in enumerate(outputs_of(name, Seen, False)):
        by_direction = Counter[str]()
        for (_, direction), traffic in meter.by_layer.items():
            by_direction[direction] += traffic.bytes_sent
        assert by_direction.total() == sent[rank] > 0
        if len(RECIPES[name]) == 1:  # of several, the last one's exchange is seen
            assert exchange.num_bytes == by_direction


def test_several_tensors_in_one_message_pass_through_it():
    def work(rank: int, world: InProcessWorld) -> Any:
        shard = shards(3)[rank]
        zeroed = bind_module(With(Zeroed), torch.nn.Module(), shard, world, Meter()).context
        one, other = (torch.ones(shard.plan.num_owned, *shape, requires_grad=True) for shape in ((3,), (2, 4)))
        for out in zeroed.exchange.expand_all([one, other], "layer"):
            assert (out[: shard.plan.num_owned] == 1).all() and not out[shard.plan.num_owned :].any()
            out.sum().backward()
        assert (one.grad == 1).all() and (other.grad == 1).all()
        return zeroed.num_halo

    assert all(on_ranks(3, work))


def test_step_and_call_are_told_before_anything_travels():
    def work(rank: int, world: InProcessWorld) -> Any:
        shard = shards(2)[rank]
        model = torch.nn.ModuleList([nn.SAGEConv(8, 8), nn.TransformerConv(8, 8)]).double()
        binding = bind_module(With(Seen), model, shard, world, Meter(), cache_input_aggregation=False)
        for step in (Step("train", 0, 0), Step("train", 0, 1), Step("validation", 0, 0)):
            binding.context.begin_step(step)
            x = shard.batch.x.clone().requires_grad_()
            x = model[0](model[0](x, shard.batch.edge_index), shard.batch.edge_index)
            model[1](x, shard.batch.edge_index).sum().backward()
        exchange: Any = binding.context.exchange
        return exchange.told

    one, other = on_ranks(2, work)
    calls = [
        ("expand", Call("0", 0)), ("expand", Call("0", 1)), ("expand", Call("1", 0)),
        ("reduce", Call("1", 0, "backward")), ("reduce", Call("0", 1, "backward")), ("reduce", Call("0", 0, "backward")),
    ]  # fmt: skip
    steps = [Step("train", 0, 0), Step("train", 0, 1), Step("validation", 0, 0)]
    assert one == other == [each for step in steps for each in (step, *calls)]


def frames_of_ours() -> list[tuple[str, str]]:
    """Returns files and functions of this package on the stack, the innermost first, up to the autograd or conv that called."""
    found, frame = [], sys._getframe(2)
    package = str(Path(lightning_gnn.__file__).parent)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(package):
            found.append((code.co_filename, code.co_name))
            if code.co_name in ("_propagate", "backward"):
                return found
        frame = frame.f_back
    return []


class Own(nn.MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.tanh()


@pytest.mark.parametrize("make", [lambda: nn.GraphConv(8, 8), lambda: nn.GINConv(torch.nn.Linear(8, 8)), Own])
def test_the_way_of_a_row_is_short(monkeypatch, make):
    """From propagate to the transport, and back in the backward."""
    seen: dict[str, list[Any]] = {}
    start_each = InProcessTransport.start_each

    def looking(self: InProcessTransport, sends: Any, receives: Any) -> Any:
        frames = frames_of_ours()
        if frames:
            seen[frames[-1][1]] = frames
        return start_each(self, sends, receives)

    monkeypatch.setattr(InProcessTransport, "start_each", looking)

    def work(rank: int, world: InProcessWorld) -> None:
        shard = shards(2)[rank]
        conv = make().double()
        bind_module(With(HaloExchange), torch.nn.Sequential(conv), shard, world, Meter(), cache_input_aggregation=False)
        conv(shard.batch.x.clone().requires_grad_(), shard.batch.edge_index).sum().backward()

    on_ranks(2, work)
    forward, backward = seen["_propagate"], seen["backward"]
    assert len(forward) <= 8 and len({file for file, _ in forward}) <= 4, forward
    assert len(backward) <= 6 and len({file for file, _ in backward}) <= 4, backward


def started_together(exchange: Any, world: Any, num_nodes: int, owned: Any, halo: Any, seed: int) -> None:
    """Starts exchanges and sums of all kinds, and waits for them in an order of this rank's own."""
    everyone = torch.arange(num_nodes, dtype=torch.float64)
    waits: list[Callable[[], None]] = []
    for number in range(12):
        call = Call(f"layer {number % 3}", number // 3)
        x = (everyone * (number + 1)).view(-1, 1).repeat(1, 1 + number % 4)
        if number % 5 == 4:
            assert float(world.all_reduce_(torch.ones(3))[0]) == world.size
        if number % 2 == 0:
            into = x.new_empty(len(halo), x.size(1))
            wait = exchange.start_expand(x[owned], into, call)

            def expanded(wait: Any = wait, into: Tensor = into, expected: Tensor = x[halo]) -> None:
                wait()
                assert torch.equal(into, expected)

            waits.append(expanded)
        else:
            finish = exchange.start_reduce(x[halo], call.backward())

            def reduced(finish: Any = finish, x: Tensor = x) -> None:
                own = x[owned].clone()
                finish(own)
                readers = exchange.send_rows.bincount(minlength=len(owned)).view(-1, 1)
                assert torch.equal(own, x[owned] * (1 + readers))

            waits.append(reduced)
    random.Random(seed * 100 + world.rank).shuffle(waits)
    for wait in waits:
        wait()


def many_under_way(rank: int, world_size: int, shared_memory: bool) -> None:
    for seed in range(4):
        exchange, world, *what = connect(rank, world_size, seed, shared_memory)
        try:
            started_together(exchange, world, *what, seed)
        finally:
            world.close()


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_under_way_in_any_order(ranks, world_size, shared_memory):
    ranks.run(world_size, many_under_way, shared_memory)


@settings(max_examples=15, deadline=None)
@given(size=st.integers(2, 4), seed=st.integers(0, 2**20))
def test_any_order_between_threads(size, seed):
    def work(rank: int, world: InProcessWorld) -> None:
        shard = shards(size)[rank]
        exchange = HaloExchange(shard.plan, world, Meter())
        offsets, ids = shard.offsets, shard.node_ids(rank)
        owned = ids[: offsets[rank + 1] - offsets[rank]]
        started_together(exchange, world, N, owned, ids[len(owned) :], seed)

    on_ranks(size, work)
