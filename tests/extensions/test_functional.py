"""Training by hand equals one process: losses, gradients and results; and calls that cannot work say why (gloo ranks)."""

from __future__ import annotations

import os
import pickle
import re
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from common import CLASSES, FEATURES, awkward_graph
from conftest import RankFailed
from planning import chain
from test_planned import slow_pair
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GraphConv, SAGEConv

import lightning_gnn.functional as dgcl
from lightning_gnn.extensions.plans.planned_exchange import PlannedExchange
from lightning_gnn.extensions.plans.wiring import topology_from_dict


@contextmanager
def session(rank: int, **options: Any):
    os.environ["RANK"] = str(rank)
    with dgcl.init("cpu", timeout=30, **options) as ranks:
        yield ranks


class Model(torch.nn.Module):
    """Unchanged PyG convs, called with the rows that sources and targets are numbered by."""

    def __init__(self) -> None:
        super().__init__()
        self.sage = SAGEConv(FEATURES, 8, aggr="max")
        self.gat = GATConv((8, 8), 4, heads=2)  # adds self-loops: sources number the owned rows first
        self.graph = GraphConv(8, CLASSES)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, x, edge_index, weight, gather):
        x = self.sage((gather(x), x), edge_index).relu()
        x = self.gat((gather(x), x), edge_index).relu()
        return self.graph((gather(x), x), edge_index, weight)


def steps(
    model: Model, x, y, train, edge_index, weight, gather, total, sum_gradients, count: int = 3
) -> dict[str, Any]:
    """Returns losses, the first gradients, and the rows that the last weights give."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, gradients = [], []
    for _ in range(count):
        optimizer.zero_grad()
        out = model(x, edge_index, weight, gather)
        loss = F.cross_entropy(out[train], y[train], reduction="sum") / total(train.sum())
        loss.backward()
        sum_gradients(model)
        losses.append(float(total(loss.detach())))
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return {"losses": losses, "gradients": gradients, "rows": model(x, edge_index, weight, gather).detach()}


def labelled_graph() -> Data:
    graph = awkward_graph()
    graph.y = graph.y.clamp(min=0)
    return graph


def new_model() -> Model:
    torch.manual_seed(1)
    return Model().double()


@cache
def alone() -> dict[str, Any]:
    graph = labelled_graph()
    same: Any = lambda x: x  # noqa: E731
    given = graph.x, graph.y, graph.train_mask, graph.edge_index, graph.edge_weight
    return steps(new_model(), *given, same, same, same)


def by_hand(rank: int, world_size: int, everywhere: bool, shared_memory: bool, options: dict[str, Any]) -> Any:
    graph = labelled_graph()
    weight = graph.edge_weight
    holder = everywhere or rank == world_size - 1
    with session(rank, shared_memory=shared_memory):
        part = dgcl.build_comm_info(graph if holder else None, **(options if holder else {}))
        x, y, train, ids = (
            dgcl.dispatch_features(tensor if holder else None)
            for tensor in (graph.x, graph.y, graph.train_mask, torch.arange(graph.num_nodes))
        )
        assert torch.equal(ids, part.n_id) and train.dtype == torch.bool and x.dtype == torch.float64
        assert torch.equal(dgcl.collect_rows(ids), torch.arange(graph.num_nodes))
        ends = torch.stack([dgcl.graph_allgather(ids)[part.edge_index[0]], ids[part.edge_index[1]]])
        assert torch.equal(ends, graph.edge_index[:, part.e_id])
        model = new_model() if rank == 0 else Model().double()
        dgcl.broadcast_parameters(model)
        found = steps(
            model,
            x,
            y,
            train,
            part.edge_index,
            weight[part.e_id],
            dgcl.graph_allgather,
            dgcl.sum_over_ranks,
            dgcl.sum_gradients,
        )
        found["rows"] = dgcl.collect_rows(found["rows"])
        assert part.num_nodes == graph.num_nodes == sum(part.counts)
    return found, isinstance(part.exchange, PlannedExchange), part.exchange.meter.total().rows


OPTIONS: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"plan": "p2p", "topology": slow_pair(3), "partition": "random"}, False),
    ({"plan": "spst", "topology": slow_pair(3), "partition": "random"}, True),
    ({"topology": chain(4)}, True),
]


def what_arrives(rank: int, world_size: int, nodes: int, options: dict[str, Any]) -> tuple[int, int, Any]:
    """Bytes that this rank is given until features are dispatched, how many rows it owns, and which."""
    values: list[Any] = []
    with session(rank) as ranks, pytest.MonkeyPatch.context() as patch:
        world = ranks.world
        of_world = ("broadcast_object", "scatter_object", "all_gather_object", "all_gather_rows")
        for owner, name in (*((world, name) for name in of_world), (dgcl, "_scatter_rows"), (dgcl, "_gather_rows")):
            original = getattr(owner, name)

            def kept(*given: Any, original: Any = original) -> Any:
                values.append(original(*given))
                return values[-1]

            patch.setattr(owner, name, kept)
        graph = ring(nodes) if rank == 0 else None
        part = dgcl.build_comm_info(graph, **(options if rank == 0 else {}))
        x = dgcl.dispatch_features(torch.arange(nodes, dtype=torch.float64) if rank == 0 else None)
        given = sum(len(pickle.dumps(value)) for value in values)
        assert torch.equal(x.long(), part.n_id)
        assert torch.equal(dgcl.collect_rows(x), torch.arange(nodes, dtype=torch.float64))
        gathered = dgcl.graph_allgather(x)
        assert torch.equal((x - gathered[part.edge_index[0]]).abs().remainder(nodes - 2), torch.ones(part.num_owned))
    return given, part.num_owned, part.n_id


def ring(nodes: int) -> Data:
    ids = torch.arange(nodes)
    return Data(edge_index=torch.stack([ids, (ids + 1) % nodes]), num_nodes=nodes)


HOSTS = topology_from_dict(
    {
        "devices": 4,
        "hosts": [{"devices": [0, 2]}, {"devices": [1, 3]}],
        "links": [{"a": a, "b": b, "gb_per_s": 1.0} for a, b in combinations(range(4), 2)],
    }
)


@pytest.mark.parametrize("options", [{}, {"plan": "spst", "topology": chain(4)}, {"plan": "swap"}])
def test_a_rank_is_given_its_own_part_only(ranks, options):
    """A ring has few cut edges: what a rank is given grows with its own nodes and edges, not with the graph."""
    few, many = ([each[0] for each in ranks.run(4, what_arrives, nodes, options)] for nodes in (400, 4000))
    for rank in range(1, 4):
        grown = (many[rank] - few[rank]) / 3600
        assert grown < 1.2 * (8 + 24 + 8) / 4, (
            "more than an id, an edge and a feature for each of a quarter of the nodes"
        )


def test_metis_cuts_between_machines_first(ranks):
    """As section 4.1 has it: the two ranks of a machine own one half of the ring, which is cut in two places only."""
    results = ranks.run(4, what_arrives, 400, {"topology": HOSTS})
    of_first = torch.zeros(400, dtype=torch.bool)
    of_first[torch.cat([results[0][2], results[2][2]])] = True
    cut = (of_first != of_first.roll(1)).sum()
    assert cut == 2
    flat = ranks.run(4, what_arrives, 400, {"topology": "auto"})  # one machine
    assert sum(each[1] for each in flat) == 400


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("options", "planned", "everywhere", "shared_memory"),
    [
        *((*each, True, True) for each in OPTIONS),
        *((*each, False, shared_memory) for each in OPTIONS[2:3] for shared_memory in (True, False)),
    ],
)
def test_equals_one_process(ranks, world_size, options, planned, everywhere, shared_memory):
    results = ranks.run(world_size, by_hand, everywhere, shared_memory, options)
    for found, is_planned, rows in results:
        torch.testing.assert_close(found, alone(), rtol=1e-9, atol=1e-11)
        assert found["gradients"][0][-1] is None
        assert is_planned == (planned and world_size > 2)  # between two ranks no other can relay
        assert (rows > 0) == (world_size > 1)


def several_graphs(rank: int, world_size: int) -> None:
    """Parts of several graphs work side by side; a rank may own nothing."""
    edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 2]])
    with session(rank):
        first = dgcl.build_comm_info(edge_index, num_nodes=4, partition=[0, 0, 0, 0])
        second = dgcl.build_comm_info(edge_index, num_nodes=5, partition=[0, 1, 0, 1, 1])
        assert (first.num_owned, first.num_halo) == ((4, 0) if rank == 0 else (0, 0))
        assert sorted(second.n_id.tolist()) == [[0, 2], [1, 3, 4]][rank]
        x = torch.arange(5.0, dtype=torch.float64)[:, None].repeat(1, 2)
        own = second.dispatch(x).requires_grad_()
        everything = dgcl.graph_allgather(own)  # of the last one
        assert everything[second.num_owned :].tolist() == [[[1.0, 1.0]], [[0.0, 0.0]]][rank]
        everything.sum().backward()
        assert own.grad is not None  # node 0 has a copy on rank 1, node 1 on rank 0
        assert own.grad[:, 0].tolist() == [2.0 if node == rank else 1.0 for node in second.n_id.tolist()]
        assert first.gather(torch.ones(first.num_owned, 3)).shape == (first.num_owned, 3)
        assert first.collect(first.dispatch(x[:4])).tolist() == x[:4].tolist()


def test_several_graphs(ranks):
    ranks.run(2, several_graphs)


def wrong(rank: int, world_size: int, case: str) -> None:
    edge_index = torch.tensor([[0, 1], [1, 2]])
    graph = Data(edge_index=edge_index, num_nodes=3)
    with session(rank):
        if case == "no graph":
            dgcl.build_comm_info(None)
        elif case == "before":
            dgcl.graph_allgather(torch.ones(3))
        elif case == "twice":
            dgcl.init("cpu")
        elif case == "plan":
            dgcl.build_comm_info(graph, plan="fastest")  # type: ignore[arg-type]
        elif case == "no topology":
            dgcl.build_comm_info(graph, plan="spst")
        elif case == "small topology":
            dgcl.build_comm_info(graph if rank == 1 else None, topology=chain(1))
        elif case == "no such topology":
            dgcl.build_comm_info(graph, topology="dgx2")
        elif case == "different":
            dgcl.build_comm_info(edge_index, num_nodes=3 + rank)
        elif case == "num_nodes":
            dgcl.build_comm_info(edge_index if rank == 0 else None)
        elif case == "ids":
            dgcl.build_comm_info(edge_index if rank == 0 else None, num_nodes=2)
        elif case == "kind":
            dgcl.build_comm_info([[0], [1]])  # type: ignore[arg-type]
        elif case == "partition":
            dgcl.build_comm_info(graph, partition=[0, 1])
        else:
            part = dgcl.build_comm_info(graph, partition=[0, 1, 0])
            {
                "rows": lambda: dgcl.graph_allgather(torch.ones(part.num_owned + 1, 2)),
                "scalar": lambda: dgcl.collect_rows(torch.tensor(1.0)),
                "dispatched rows": lambda: dgcl.dispatch_features(torch.ones(2, 2) if rank == 0 else None),
                "nothing": lambda: dgcl.dispatch_features(None),
                "device": lambda: dgcl.graph_allgather(torch.ones(part.num_owned, 2, device="meta")),
            }[case]()


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no graph", "ValueError: build_comm_info got no graph on any rank"),
        ("before", r"RuntimeError: graph_allgather\(\) was called before build_comm_info"),
        ("twice", r"RuntimeError: init\(\) was called before"),
        ("plan", r"ValueError: plan must be one of 'auto', 'p2p', 'spst', 'swap' \(got 'fastest'\)"),
        ("no topology", 'ValueError: plan="spst" needs a topology, got None'),
        ("small topology", "ValueError: Topology 'chain' has 1 devices, but there are 2 ranks"),
        ("no such topology", "ValueError: topology must be one of dgx1"),
        ("different", r"ValueError: build_comm_info got different graphs: \(3, 2\) on rank 0, \(4, 2\) on rank 1"),
        ("num_nodes", "ValueError: build_comm_info cannot infer the number of nodes"),
        ("ids", "ValueError: edge_index holds ids from 0 to 2, but there are 2 nodes"),
        ("kind", r"ValueError: graph must be a PyG Data with an edge_index, or an edge_index, got list"),
        ("partition", "ValueError: partition must have one rank for each of the 3 nodes"),
        ("rows", r"ValueError: x of graph_allgather must have one row per local node, \d rows on rank \d"),
        ("scalar", "ValueError: x of collect_rows must have one row per local node"),
        (
            "dispatched rows",
            r"ValueError: x of dispatch_features must have one row per node.*, 3 rows, got \[2, 2\]",
        ),
        ("nothing", "ValueError: dispatch_features got no tensor on any rank"),
        ("device", r"ValueError: x of graph_allgather must be on cpu, the device of init\(\), got meta"),
    ],
)
def test_refused_on_all_ranks(ranks, case, message):
    with pytest.raises(RankFailed) as caught:
        ranks.run(2, wrong, case)
    for rank in range(2):
        assert re.match(message, caught.value.errors[rank])
    assert dgcl._session is None


@pytest.mark.parametrize("function", ["graph_allgather", "sum_gradients", "broadcast_parameters", "build_comm_info"])
def test_before_init(function):
    with pytest.raises(RuntimeError, match=rf"{function}\(\) was called before init\(\)"):
        getattr(dgcl, function)(torch.nn.Linear(1, 1))


def test_half_an_environment(monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK, MASTER_ADDR, MASTER_PORT is missing.*torchrun"):
        dgcl.init("cpu")
    dgcl.shutdown()  # nothing to do


def test_one_process_without_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    graph = labelled_graph()
    with dgcl.init("cpu") as ranks:
        part = dgcl.build_comm_info(graph)
        assert (ranks.rank, ranks.size, part.num_owned, part.num_halo) == (0, 1, graph.num_nodes, 0)
        assert torch.equal(dgcl.collect_rows(dgcl.dispatch_features(graph.x)), graph.x)
    with pytest.raises(RuntimeError, match="before init"):
        dgcl.graph_allgather(graph.x)
