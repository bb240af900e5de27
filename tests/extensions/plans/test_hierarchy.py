"""Plans in two stages between machines: rows cross once, arrive everywhere, and cost what the cost model says of them."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from common import examples
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.extensions.plans import detect
from lightning_gnn.extensions.plans.hierarchy import loads, plan_through_hosts, prices
from lightning_gnn.extensions.plans.plan_cost import PlanCost
from lightning_gnn.extensions.plans.planned_exchange import PlannedExchange
from lightning_gnn.extensions.plans.scheme import make_exchange
from lightning_gnn.extensions.plans.topology import Hosts
from lightning_gnn.extensions.plans.ways import ExchangeByWidth, Way, follow
from lightning_gnn.extensions.plans.wiring import machines
from lightning_gnn.partition.shard import halo_plan
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme


def a_problem(rng: np.random.Generator, sizes: list[int], nodes: int, share: float) -> tuple:
    """Returns machines of these sizes, offsets, and halos in which a part of the nodes is read by many."""
    ends = np.cumsum([0, *sizes])
    hosts = Hosts(tuple(tuple(range(low, high)) for low, high in pairwise(ends)))
    size = int(ends[-1])
    offsets = np.cumsum([0, *rng.integers(0, 2 * nodes, size)])
    popular = rng.random(offsets[-1]) ** 2 * 2 * share
    halos = []
    for rank in range(size):
        reads = rng.random(offsets[-1]) < popular
        reads[offsets[rank] : offsets[rank + 1]] = False
        halos.append(np.flatnonzero(reads))
    return hosts, offsets, halos


@st.composite
def problems(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    return a_problem(rng, sizes, draw(st.integers(1, 6)), draw(st.sampled_from([0.0, 0.1, 0.4, 0.9])))


@examples(100)
@given(problems())
def test_rows_cross_once_and_reach_each_reader_once(drawn):
    hosts, offsets, halos = drawn
    size, host_of = len(offsets) - 1, hosts.host_of
    rows = [halo_plan(rank, offsets, halos) for rank in range(size)]
    tables = [plan_through_hosts(rank, hosts, rows[rank], halos, offsets) for rank in range(size)]
    ids = [np.concatenate([np.arange(*offsets[rank : rank + 2]), halos[rank]]) for rank in range(size)]
    crossed, known = Counter(), [set(range(*offsets[rank : rank + 2])) for rank in range(size)]
    traffic = np.zeros((2, size, size), np.int64)
    for number in range(2):
        arrived: list[set[int]] = [set() for _ in range(size)]
        for p in range(size):
            for q in range(size):
                sent = ids[p][tables[p].forward[number].sends[q]].tolist()
                assert sent == ids[q][tables[q].forward[number].receives[p]].tolist()
                assert known[p].issuperset(sent)  # owned, or here since an earlier stage
                assert known[q].isdisjoint(sent) and arrived[q].isdisjoint(sent)
                arrived[q].update(sent)
                traffic[number, p, q] = len(sent)
                if host_of[p] != host_of[q]:
                    crossed.update((row, host_of[q]) for row in sent)
        for q in range(size):
            known[q] |= arrived[q]
    assert [known[q] for q in range(size)] == [set(ids[q].tolist()) for q in range(size)]
    owner = np.repeat(np.arange(size), np.diff(offsets))
    needed = {(row, host_of[q]) for q in range(size) for row in halos[q].tolist() if host_of[owner[row]] != host_of[q]}
    assert set(crossed) == needed and set(crossed.values()) <= {1}
    for each in tables:
        assert [(s.receives, s.sends) for s in reversed(each.backward)] == [(s.sends, s.receives) for s in each.forward]
    # And it costs what the cost model says of these rows over the topology of such machines.
    if len(hosts.ranks) > 1:
        topology = machines([len(ranks) for ranks in hosts.ranks])
        direct = np.array([[[len(each) for each in rows[p].send_rows] for p in range(size)]])
        found = prices(hosts, np.stack([loads(rank, hosts, rows[rank], tables[rank]) for rank in range(size)]))
        for price, moved in zip(found, (direct, traffic)):
            assert price == pytest.approx(PlanCost.of(moved, topology).price)


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_72_ranks_on_9_machines_as_directly(share, monkeypatch):
    """More ranks than plans are searched for: the scheme finds machines; rows, sums and maxima are those of direct rows."""
    hosts, offsets, halos = a_problem(np.random.default_rng(0), [8] * 9, 4, share)
    size, meeting = 72, Meeting(72)
    monkeypatch.setattr(detect, "machine_key", lambda: str(int(threading.current_thread().name.split()[1]) // 8))
    everyone = torch.randn(int(offsets[-1]), 3, dtype=torch.float64)

    def work(rank: int) -> tuple[int, int]:
        world, meters = InProcessWorld(rank, meeting), [Meter(), Meter()]
        found = DGCLScheme(plan="spst").links(world)
        assert found == hosts
        rows = halo_plan(rank, offsets, halos)
        tables = plan_through_hosts(rank, hosts, rows, halos, offsets)
        direct = HaloExchange(rows, world, meters[0])
        staged = follow([Way(tables=tables)], rows, world, meters[1])
        assert isinstance(staged, PlannedExchange)
        generator = torch.Generator().manual_seed(rank)
        upstream = torch.randn(rows.num_owned + len(halos[rank]), 3, dtype=torch.float64, generator=generator)
        results = []
        for exchange in (direct, staged):
            x = everyone[offsets[rank] : offsets[rank + 1]].clone().requires_grad_()
            out = exchange.expand(x, "layer")
            out.backward(upstream)
            largest = exchange.reduce_max(upstream, "layer")
            results.append((out.detach(), x.grad, largest))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][2], results[1][2])
        torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=1e-12)
        chosen = make_exchange("spst", found, rows, halos, offsets, world, Meter())
        assert isinstance(
            chosen, (PlannedExchange, ExchangeByWidth) if share == 0.5 else (HaloExchange, ExchangeByWidth)
        )
        assert isinstance(make_exchange("p2p", found, rows, halos, offsets, world, Meter()), HaloExchange)
        return 0

    assert meeting.run(work) == [0] * size


def test_a_plan_by_name_needs_machines():
    assert DGCLScheme(plan="spst").layout(72, num_hosts=9).groups is not None
    for asked, num_hosts in (({}, 1), ({"topology": "uniform"}, 9)):
        with pytest.raises(ValueError, match="at most 64 ranks, got 72. Use plan=.auto"):
            DGCLScheme(plan="spst", **asked).layout(72, num_hosts=num_hosts)
