"""The planned exchange equals the direct one, over relays too, and moves exactly what its plan says (gloo ranks)."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from common import (
    CLASSES,
    FEATURES,
    Recorder,
    all_rows_sent,
    assert_same,
    awkward_graph,
    build,
    campaign,
    examples,
    quiet_trainer,
    single,
    strategy_of_config,
    train,
)
from conftest import RankFailed
from hypothesis import given
from planning import chain, problems, random_topology, rows_of

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.extensions.plans.plan import Plan, p2p
from lightning_gnn.extensions.plans.planned_exchange import PlannedExchange
from lightning_gnn.extensions.plans.presets import find_topology
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.scheme import make_exchange
from lightning_gnn.extensions.plans.spst import spst
from lightning_gnn.extensions.plans.tables import rank_plan
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.ways import fastest, fastest_plans
from lightning_gnn.extensions.plans.wiring import topology_from_dict
from lightning_gnn.partition.shard import Relabelling, edge_cut_parts, halo_plan
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme


def slow_pair(num_devices: int) -> Topology:
    """All pairs are joined; the link of 0 and 1 is 100 times as slow as those to the last device."""
    links = [{"a": a, "b": b, "gb_per_s": 0.1 if b == 1 else 10.0} for b in range(1, num_devices) for a in range(b)]
    return topology_from_dict({"name": "slow pair", "devices": num_devices, "links": links})


def a_topology(world_size: int, seed: int) -> Topology:
    if seed == 0:
        return slow_pair(world_size)
    return random_topology(np.random.default_rng(seed), world_size, [0.0, 0.3, 1.0][seed % 3])


def connect(
    rank: int, world_size: int, seed: int, topology: Topology, world: World
) -> tuple[HaloExchange, PlannedExchange, Plan]:
    """Returns this rank's exchanges over a random cut of a random graph, direct and planned."""
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.integers(1, 40))
    edge_index = rng.integers(0, num_nodes, (2, int(rng.integers(0, 150))))
    part = rng.integers(0, world_size - (seed % 4 == 0), num_nodes)  # at times the last rank owns nothing
    relabelling = Relabelling.from_assignment(part.astype(np.int32), world_size)
    halos = [piece.halo for piece in edge_cut_parts(edge_index, relabelling)]
    plan = spst(Relation.from_halos(halos, relabelling.offsets), topology)
    direct = HaloExchange(halo_plan(rank, relabelling.offsets, halos), world, Meter())
    return direct, PlannedExchange(rank_plan(plan, rank), world, Meter()), plan


def both_ways(rank: int, world_size: int, seeds: range, shared_memory: bool) -> int:
    """Compares the exchanges; returns how many rows this rank relayed without needing them."""
    relayed = 0
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30), shared_memory)
    try:
        for seed in seeds:
            direct, planned, plan = connect(rank, world_size, seed, a_topology(world_size, seed), world)
            relayed += planned.num_relayed
            assert (planned.num_owned, planned.num_halo) == (direct.num_owned, direct.num_halo)
            for shape, dtype in (
                ((3,), torch.float64),
                ((2, 5), torch.float32),
                ((), torch.float64),
                ((4,), torch.bfloat16),
                ((2,), torch.int64),
            ):
                random = torch.Generator().manual_seed(seed + 100 * rank)
                x = torch.randn(planned.num_owned, *shape, generator=random, dtype=torch.float64).mul(100).to(dtype)
                planned.meter.take()
                assert torch.equal(planned.expand(x, "layer"), direct.expand(x, "layer"))
                row_bytes = dtype.itemsize * torch.Size(shape).numel()
                assert planned.meter.total().bytes_sent == plan.traffic[:, rank].sum() * row_bytes
                assert planned.meter.total().rows == plan.traffic[:, rank].sum()
                if dtype not in (torch.float64, torch.float32):
                    continue
                close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
                x.requires_grad_()
                expanded = planned.expand(x, "layer")
                y = torch.randn(expanded.shape, generator=random, dtype=torch.float64).to(dtype)
                planned.meter.take()
                [grad] = torch.autograd.grad(expanded, x, y)
                assert planned.meter.total().rows == plan.traffic[:, :, rank].sum()
                # <S x, y> = <x, S^T y>, summed over ranks
                sides = torch.stack([(expanded * y).sum(), (x * grad).sum()]).double().detach()
                left, right = world.all_reduce_(sides)
                assert float(left) == pytest.approx(float(right), rel=1e-9 if dtype == torch.float64 else 1e-4, abs=0.1)
                untouched = y.clone()
                torch.testing.assert_close(planned.reduce(y, "layer"), direct.reduce(y, "layer"), **close)
                torch.testing.assert_close(planned.reduce(y, "layer"), grad, rtol=0, atol=0)
                assert torch.equal(y, untouched)
                several = [x, x.flatten(), 2 * x] if x.dim() == 1 else [x, x[..., 0], x.unsqueeze(1)]
                for ours, theirs in zip(planned.expand_all(several, "layer"), direct.expand_all(several, "layer")):
                    assert torch.equal(ours, theirs)
            wide = torch.randn(1, 4, planned.num_owned).transpose(0, 1)
            assert torch.equal(planned.expand(wide, "layer", dim=-1), direct.expand(wide, "layer", dim=-1))
            in_sub_stages = rank_plan(plan, rank, sub_stages=True)
            y = torch.randn(planned.num_owned + planned.num_halo, 3, dtype=torch.float64)
            expected = direct.reduce(y, "layer")
            torch.testing.assert_close(
                PlannedExchange(in_sub_stages, world, Meter()).reduce(y, "layer"), expected, rtol=1e-12, atol=1e-12
            )
    finally:
        world.close()
    return relayed


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equals_the_direct_exchange(ranks, world_size, shared_memory):
    relayed = ranks.run(world_size, both_ways, range(8), shared_memory)
    assert sum(relayed) > 0 or world_size == 2


def around_a_slow_link(rank: int, world_size: int) -> None:
    """Ranks 0 and 1 read all of each other; rank 2 reads nothing, and carries nearly everything."""
    offsets = np.array([0, 30, 50, 60])
    halos = [np.arange(30, 50), np.arange(30), np.empty(0, np.int64)]
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30))
    try:
        plan = spst(Relation.from_halos(halos, offsets), slow_pair(3))
        exchange = PlannedExchange(rank_plan(plan, rank), world, Meter())
        assert not exchange.idle
        x = torch.arange(60.0).view(60, 1)[offsets[rank] : offsets[rank + 1]].requires_grad_()
        expanded = exchange.expand(x, "layer")
        assert expanded[exchange.num_owned :].flatten().tolist() == halos[rank].tolist()
        expanded.sum().backward()
        assert x.grad is not None and x.grad.unique().tolist() == [1.0 if rank == 2 else 2.0]
        if rank == 2:
            assert exchange.num_halo == 0 and exchange.num_relayed > 40
            assert exchange.meter.by_layer["layer", "forward"].rows == exchange.num_relayed
            assert exchange.meter.by_layer["layer", "backward"].rows == exchange.num_relayed
    finally:
        world.close()


def test_relays(ranks):
    ranks.run(3, around_a_slow_link)


@examples(40)
@given(problems())
def test_up_to_16_ranks(problem):
    """In one process: S and its transpose on random topologies, against rows and sums taken from the whole."""
    relation, topology = problem
    plan, offsets = spst(relation, topology), relation.offsets
    meeting = Meeting(plan.num_devices)
    everyone = torch.randn(int(offsets[-1]), 2, dtype=torch.float64)
    gradients = [torch.randn(len(rows_of(plan, rank)), 2, dtype=torch.float64) for rank in range(meeting.size)]
    total = torch.zeros_like(everyone)
    for rank, gradient in enumerate(gradients):
        total.index_add_(0, torch.from_numpy(rows_of(plan, rank)), gradient)

    def work(rank: int) -> None:
        exchange = PlannedExchange(rank_plan(plan, rank), InProcessWorld(rank, meeting), Meter())
        own = slice(*offsets[rank : rank + 2])
        for _ in range(2):  # buffers are used again
            assert torch.equal(exchange.expand(everyone[own], "layer"), everyone[rows_of(plan, rank)])
            torch.testing.assert_close(exchange.reduce(gradients[rank], "layer"), total[own], rtol=1e-12, atol=1e-12)

    assert meeting.run(work) == [None] * meeting.size


def by_width(rank: int, world: World) -> list[tuple[int, int]]:
    """Rows that this rank sends forward and backward, narrow ones and wide ones, where a stage takes 10 us."""
    offsets, everyone = np.array([0, 30, 50, 60]), torch.arange(60.0)
    halos = (np.arange(30, 50), np.arange(30), np.empty(0, np.int64))
    topology = replace(slow_pair(3), stage_seconds=1e-5)
    meter = Meter()
    exchange = make_exchange("auto", topology, halo_plan(rank, offsets, halos), halos, offsets, world, meter)
    assert not exchange.idle
    found = []
    for columns in (2, 200):
        x = everyone[offsets[rank] : offsets[rank + 1], None].repeat(1, columns).requires_grad_()
        expanded = exchange.expand(x, "layer")
        assert torch.equal(expanded[exchange.num_owned :, -1], everyone[halos[rank]])
        expanded.sum().backward()
        assert x.grad is not None and x.grad.unique().tolist() == [1.0 if rank == 2 else 2.0]
        found.append((meter.by_layer["layer", "forward"].rows, meter.by_layer["layer", "backward"].rows))
        assert meter.take()
    return found


def test_narrow_rows_go_directly_and_wide_ones_over_a_relay():
    meeting = Meeting(3)
    found = meeting.run(lambda rank: by_width(rank, InProcessWorld(rank, meeting)))
    narrow, wide = zip(*found)
    assert narrow == ((30, 20), (20, 30), (0, 0))  # rank 2 carries nothing
    assert wide[2][0] > 40 and wide[2][0] == wide[2][1]
    assert wide[0][0] >= 30 and wide[1][0] >= 20


def late(rank: int, world_size: int, shared_memory: bool, seconds: float = 0.0) -> None:
    """Rank 1, over which all else goes, fails before the exchange, to which the others come later."""
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=3), shared_memory)
    try:
        relation = Relation.from_halos([np.array([2]), np.empty(0, np.int64), np.array([0])], np.arange(4))
        exchange = PlannedExchange(rank_plan(spst(relation, chain(3)), rank), world, Meter())
        if rank == 1:
            raise KeyError("user code")
        time.sleep(seconds)
        exchange.expand(torch.randn(1, 4), "encoder.convs.1")
    finally:
        world.close()


@pytest.mark.campaign
@pytest.mark.parametrize("shared_memory", [True, False])
def test_missing_relay_is_named(ranks, shared_memory, seconds=0.0):
    with pytest.raises(RankFailed) as caught:
        ranks.run(3, late, shared_memory, seconds)
    for words in ("Halo exchange (forward)", "layer 'encoder.convs.1'", "on rank 0", "rank 1"):
        assert words in caught.value.errors[0]


@pytest.mark.campaign
def test_relay_that_is_gone_before_is_named(ranks):
    """Then gloo raises where a message is started, not where it is waited for."""
    test_missing_relay_is_named(ranks, False, 1.0)


TOPOLOGIES = {"dgx1": "dgx1", "chain": chain(4), "slow pair": slow_pair(4)}


MODELS = ("gcn", "gat", "transformer", "sage_max")


@cache
def on_one_device(model: Any) -> dict[str, Any]:
    return single(awkward_graph(), model)


@pytest.mark.parametrize("topology", ["dgx1", "chain"])
@pytest.mark.parametrize("model", [pytest.param(MODELS, id="together"), *campaign(*MODELS)])
def test_trained_as_on_one_device(ranks, model, topology):
    options = {"plan": "spst", "topology": TOPOLOGIES[topology]}
    for found in ranks.run(4, train, awkward_graph(), model, options=options):
        assert_same(found, on_one_device(model), rtol=1e-9, atol=1e-11)


def test_a_relay_without_nodes(ranks):
    part = torch.arange(60) % 2
    part[50:] = 2
    for found in ranks.run(
        4, train, awkward_graph(), "gcn", options={"topology": slow_pair(4)}, data={"partition": part}
    ):
        assert_same(found, on_one_device("gcn"), rtol=1e-9, atol=1e-11)


def test_same_bits_in_every_run(ranks):
    options = {"plan": "spst", "topology": chain(4)}
    first, second = [ranks.run(4, train, awkward_graph(), "gat", options=options, self_check=False) for _ in range(2)]
    for one, other in zip(first, second):
        assert_same(one, other, rtol=0, atol=0)


def counted(rank: int, world_size: int, strategy: dict[str, Any]) -> Any:
    """Bytes of each epoch as logged, and by layer as counted on this rank; the shard."""
    seen: list[tuple[float, Any]] = []

    class Look(Recorder):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            by_layer = {key: traffic.bytes_sent for key, traffic in trainer.callbacks[0].by_layer.items()}
            seen.append((float(trainer.callback_metrics["comm/bytes_sent"]), by_layer))

    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    trainer = quiet_trainer(DGCLStrategy(timeout=30, **strategy), world_size, callbacks=[Look()], limit_val_batches=0)
    data = GraphDataModule(awkward_graph(), partition="random")
    with all_rows_sent():
        trainer.fit(module, datamodule=data)
    return seen, data.shard.halos, data.shard.counts


@pytest.mark.parametrize("name", ["dgx1", "chain", "direct"])
def test_logged_bytes_are_the_planned_ones(ranks, name):
    topology = TOPOLOGIES.get(name, "uniform")  # "auto" is direct then
    results = ranks.run(4, counted, {"topology": topology})
    _, halos, counts = results[0]
    relation, topology = Relation.from_halos(halos, np.cumsum([0, *counts])), find_topology(topology, 4)

    def traffic(columns: int) -> np.ndarray:
        """Returns the rows between ranks of an exchange of so many columns, which follows the fastest plan for these."""
        if name == "direct":
            return p2p(relation, topology).traffic.sum(0)
        return fastest(fastest_plans(relation, topology), columns * 8).plan.traffic.sum(0)

    hidden = traffic(CLASSES)
    assert hidden.sum() > relation.pair_rows.sum() or name != "chain"
    for rank, (seen, _, _) in enumerate(results):
        logged = [total for total, _ in seen]
        assert logged[1] == logged[2] == 2 * hidden.sum() * CLASSES * 8
        once = sum(traffic(columns).sum() * columns * 8 for columns in (1, FEATURES))  # degrees and features
        assert logged[0] == logged[1] + once
        assert seen[-1][1]["model.convs.1", "forward"] == hidden[rank].sum() * CLASSES * 8
        assert seen[-1][1]["model.convs.1", "backward"] == hidden[:, rank].sum() * CLASSES * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": "fastest"}, r"plan must be one of 'auto', 'p2p', .*'dgcl_r' \(got 'fastest'\)"),
        ({"partition": "metis"}, r"partition must be one of 'auto', 'flat', 'hierarchical' \(got 'metis'\)"),
        (
            {"partition": "hierarchical", "topology": None},
            'partition="hierarchical" needs a topology, got None',
        ),
        ({"plan": "spst", "topology": None}, r'plan="spst" needs a topology, got None.*topology="dgx1"'),
    ],
)
def test_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        DGCLStrategy(**options)


def test_new_plans_between_epochs_were_removed():
    with pytest.raises(TypeError, match=r"argument replan of \w+ was removed.*topology= .*`lightning-gnn topology measure`"):
        DGCLStrategy(plan="spst", replan=2)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("dgx2", "topology must be one of dgx1, .* or a JSON file .got 'dgx2'."),
        (chain(2), "Topology 'chain' has 2 devices, but there are 4 ranks"),
        (slow_pair(3), "has 3 devices, but there are 4 ranks"),
    ],
)
def test_refused_before_ranks_start(topology, message):
    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    trainer = quiet_trainer(DGCLStrategy(topology=topology), 4)
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))


def test_unconnected_first_devices():
    star = topology_from_dict({"devices": 5, "links": [{"a": a, "b": 4, "gb_per_s": 1.0} for a in range(4)]})
    with pytest.raises(ValueError, match="not connected"):
        DGCLStrategy(topology=star).scheme.layout(4)


def test_from_yaml(tmp_path):
    asked = "{class_path: lightning_gnn.DGCLStrategy, init_args: {plan: spst, topology: dgx1}}"
    scheme = strategy_of_config(tmp_path / "config.yaml", asked).scheme
    assert (scheme.plan, scheme.topology) == ("spst", "dgx1")


@pytest.mark.parametrize("topology", ["auto", "uniform", None])
def test_more_ranks_than_plans_are_made_for(topology):
    """65 ranks in one process: rows go directly, and nothing but a plan by name is refused."""
    size, offsets = 65, 2 * np.arange(66)
    scheme = DGCLScheme(topology=topology)
    assert scheme.layout(size).groups is None
    by_host = scheme.layout(66, num_hosts=2).groups
    assert by_host == ((tuple(range(33)), tuple(range(33, 66))) if topology == "auto" else None)
    halos = [np.array(sorted({(offsets[rank] + 2) % 130, (offsets[rank] + 65) % 130})) for rank in range(size)]
    everyone = torch.arange(130.0)
    meeting = Meeting(size)

    def work(rank: int) -> None:
        world = InProcessWorld(rank, meeting)
        found = make_exchange(
            "auto", scheme.links(world), halo_plan(rank, offsets, halos), tuple(halos), offsets, world, Meter()
        )
        x = everyone[offsets[rank] : offsets[rank + 1], None]
        assert torch.equal(found.expand(x, "layer")[2:, 0], everyone[halos[rank]])

    assert meeting.run(work) == [None] * size
    if topology is not None:
        for plan in ({"plan": "spst"}, {"plan": "dgcl_r", "num_hops": 2}):
            with pytest.raises(ValueError, match="at most 64 ranks, got 65. Use plan=.auto"):
                DGCLScheme(topology=topology, **plan).layout(size)
