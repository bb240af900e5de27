"""Graph allgather without Lightning: the library interface of DGCL (EuroSys'21, section 4.2 and Listing 1).

::

    import lightning_gnn.functional as dgcl

    with dgcl.init() as ranks:  # in each process that torchrun starts
        part = dgcl.build_comm_info(graph, topology="dgx1")
        x, y, train = map(dgcl.dispatch_features, (graph.x, graph.y, graph.train_mask))
        ...
        h = conv((dgcl.graph_allgather(h), h), part.edge_index)  # one layer, an unmodified PyG conv
        ...
        loss.backward()
        dgcl.sum_gradients(model)

Each process has one :class:`Session`, from :func:`init` to :func:`shutdown`. The functions that take rows use the graph of the
last :func:`build_comm_info`. With several graphs, use the methods of the returned :class:`CommInfo`.

All functions except :func:`init` and :func:`shutdown` are collective: every rank must call them, in the same order.

N nodes of the graph, E edges; on this rank N_p local nodes, H halo nodes, E_p edges. ``...`` stands for any trailing dimensions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn.comm.exchange import Exchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.sources import checked_edges
from lightning_gnn.extensions.plans.detect import detect
from lightning_gnn.extensions.plans.plan import p2p
from lightning_gnn.extensions.plans.planned_exchange import SwapExchange
from lightning_gnn.extensions.plans.presets import find_topology
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.scheme import NO_TOPOLOGY, PlanName, looks_at_links
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.ways import PricedPlan, Way, follow, make_plans
from lightning_gnn.nn.norms import SumOverRanks
from lightning_gnn.partition.budget import COSTS
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.layout import has_equal_machines
from lightning_gnn.partition.shard import HaloPlan, Ids, edge_cut_parts, halo_plan, local_relabelling
from lightning_gnn.registry import PARTITIONERS
from lightning_gnn.steps.gradients import GradientSum

T = TypeVar("T")

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class CommInfo:
    """This rank's part of a graph, and its halo exchange.

    Attributes:
        edge_index: edges into local nodes, int64 ``[2, E_p]``, targets ascending; sources number local nodes first, then halo
            nodes, as returned by :meth:`gather`.
        n_id: original id of each local node, int64 ``[N_p]``.
        e_id: position of each edge in the edge list of the whole graph, int64 ``[E_p]``; edge weights are ``weight[e_id]``.
        counts: number of local nodes of each rank.
        report: quality of the partition, for logs.
        exchange: halo exchange; ``exchange.meter`` counts its traffic.
    """

    edge_index: Tensor
    n_id: Tensor
    e_id: Tensor
    counts: tuple[int, ...]
    report: Mapping[str, Any]
    exchange: Exchange

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the graph, N."""
        return sum(self.counts)

    @property
    def num_owned(self) -> int:
        """Number of local nodes of this rank, N_p."""
        return self.exchange.num_owned

    @property
    def num_halo(self) -> int:
        """Number of halo nodes of this rank, H."""
        return self.exchange.num_halo

    def gather(self, x: Tensor) -> Tensor:
        """Returns rows of local and halo nodes, ``[N_p + H, ...]``, local nodes first, then halo nodes.

        Differentiable: the gradients of halo rows are sent back and added to the gradients of their owners. The
        order of addition is fixed, so runs are bitwise reproducible.

        Args:
            x: rows of local nodes, ``[N_p, ...]``, on the rank's device.

        Raises:
            ValueError: `x` does not have one row per local node, or is on another device.
            CommunicationError: if another rank has ended or exceeds the timeout.
        """
        self._check_owned(x, "graph_allgather")
        return self.exchange.expand(x, "graph_allgather")

    def dispatch(self, x: Tensor | None = None) -> Tensor:
        """Returns this rank's rows of a tensor over all nodes, ``[N_p, ...]``, on the rank's device. Not differentiable.

        Args:
            x: ``[N, ...]``, any dtype: features, labels, boolean masks. It may be None on some ranks; then the first rank that
                has it sends each rank its rows.

        Raises:
            ValueError: on all ranks: if no rank has the tensor, it does not have one row per node, or ranks have different ones.
        """
        world = self.exchange.world
        given = None if x is None else (tuple(x.shape), x.dtype)
        everyone = world.all_gather_object(given)
        source, (shape, dtype) = _holder(everyone, "dispatch_features", "tensor")
        if not shape or shape[0] != self.num_nodes:
            raise ValueError(
                f"x of dispatch_features must have one row per node of the whole graph, {self.num_nodes} rows, got {list(shape)}."
            )
        if None not in everyone:
            assert x is not None
            return x.detach()[self.n_id.to(x.device)].to(world.device)
        # No rank needs to store the order of all nodes, except the sender, which has room for one row per node anyway.
        order, pieces = _gather_rows(world, self.n_id, self.counts, source), None
        if order is not None:
            assert x is not None
            rows = x.detach()
            pieces = (rows[ids] for ids in order.to(rows.device).split(list(self.counts)))
        return _scatter_rows(world, pieces, (self.num_owned, *shape[1:]), dtype, source)

    def collect(self, x: Tensor) -> Tensor:
        """Returns the rows of all ranks in the graph's original order, ``[N, ...]``, on every rank; not differentiable.

        Args:
            x: rows of local nodes, ``[N_p, ...]``, with the same dtype and trailing shape on all ranks.

        Raises:
            ValueError: for another number of rows, or another device.
        """
        self._check_owned(x, "collect_rows")
        world = self.exchange.world
        rows = world.all_gather_rows(x.detach().contiguous(), self.counts)
        return torch.empty_like(rows).index_copy_(0, world.all_gather_rows(self.n_id, self.counts), rows)

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum over ranks of equal-shaped tensors, bitwise the same on every rank; differentiable."""
        return SumOverRanks.apply(x, self.exchange, "sum_over_ranks")

    def _check_owned(self, x: Tensor, function: str) -> None:
        if x.dim() == 0 or x.size(0) != self.num_owned:
            raise ValueError(
                f"x of {function} must have one row per local node, {self.num_owned} rows on rank {self.exchange.world.rank}, "
                f"got {list(x.shape)}. dispatch_features(x) returns these rows of a tensor over all nodes."
            )
        if x.device != self.exchange.world.device:
            raise ValueError(f"x of {function} must be on {self.exchange.world.device}, the device of init(), got {x.device}.")


@dataclass(eq=False)
class Session:
    """State of :func:`init` in this process; ends with its ``with`` block or with :func:`shutdown`.

    Attributes:
        world: the ranks.
        info: result of the last :func:`build_comm_info`, or None.
    """

    world: World
    info: CommInfo | None = None

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.world.device

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if _session is self:
            shutdown()


_session: Session | None = None


def init(device: str | torch.device | None = None, *, timeout: float = 1800.0, shared_memory: bool = True) -> Session:
    """Join the ranks (section 4.2) and return this process's session.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as set by torchrun. Without RANK and WORLD_SIZE, there is one rank. An
    existing default process group is used, and left open by :func:`shutdown`.

    Args:
        device: device of this rank. None: GPU number LOCAL_RANK if CUDA is available, else the CPU.
        timeout: seconds after which waiting for another rank raises an error.
        shared_memory: whether CPU ranks of one machine use shared memory; other CPU ranks use gloo, and CUDA ranks NCCL.

    Raises:
        RuntimeError: if called twice without :func:`shutdown`, or if not all ranks join in time.
        ValueError: if some of the variables are missing, or the device does not exist.
    """
    global _session
    if _session is not None:
        raise RuntimeError("init() was called before in this process. Call shutdown() first, or leave the `with` block.")
    missing = [name for name in _VARIABLES if name not in os.environ]
    # Some shells set MASTER_ADDR and MASTER_PORT permanently; without a rank they are ignored.
    if "RANK" in missing and "WORLD_SIZE" in missing:
        rank, size = 0, 1
    elif missing:
        raise ValueError(
            f"init() found only some of the environment variables of a rank: {', '.join(missing)} is missing. Start the "
            "script with torchrun --nproc-per-node 2 script.py, or set all of " + ", ".join(_VARIABLES) + "."
        )
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _session = Session(World(rank, size, _device(device), timedelta(seconds=timeout), shared_memory))
    return _session


def shutdown() -> None:
    """Leave the ranks and drop the graph; no effect without :func:`init`."""
    global _session
    if _session is not None:
        ending, _session = _session, None
        ending.world.close()


def build_comm_info(
    graph: Data | Tensor | None = None,
    topology: str | Path | Topology | None = None,
    plan: PlanName = "auto",
    partition: str | Any = "metis",
    *,
    num_nodes: int | None = None,
    seed: int = 0,
) -> CommInfo:
    """Partition a graph, plan the exchange (buildCommInfo, section 4.2) and return this rank's part.

    The first rank that has the graph partitions and plans with its own arguments. The other ranks receive their part and follow
    its plan. So only that rank needs memory for the whole graph.

    Args:
        graph: a PyG ``Data``, or ``edge_index`` ``[2, E]``, source and target, with `num_nodes`. It may be None on some ranks.
        topology: links between the ranks, where rank i is device i. ``"auto"`` detects machines by host name and GPU links by
            NVML. Other values: ``"dgx1"``, ``"dgx1x2"``, ``"pcie8"``, ``"summit"``, ``"uniform"``, the path of a JSON file, or a
            topology (docs/planning.md). None for uniform links.
        plan: ``"p2p"``: direct. ``"spst"``: along shortest path spanning trees over `topology` (section 5.2), if faster by the
            cost model. ``"swap"``: through the memory of one machine. ``"auto"``: direct between GPUs, or if links are uniform or
            unknown; otherwise ``"spst"``.
        partition: ``"metis"``, first between the machines and sockets of `topology` with several machines (section 4.1);
            ``"random"``; or the rank of every node, int ``[N]``.
        num_nodes: N, for an ``edge_index``.
        seed: seed of the partition.

    Raises:
        RuntimeError: before :func:`init`.
        ValueError: on all ranks: if no rank has the graph, ranks have different graphs, or node ids are invalid. Also for an
            unknown plan, SPST without a topology, a missing or too small topology, or a partition that does not fit.
    """
    session = _require_session("build_comm_info")
    world = session.world
    own = _share_failures(world, lambda: None if graph is None else _checked_graph(graph, num_nodes))
    sizes = world.all_gather_object(None if own is None else (own[1], own[0].size(1)))
    source, _ = _holder(sizes, "build_comm_info", "graph")

    mine = own if world.rank == source else None
    seen = detect(world) if world.broadcast_object(isinstance(topology, str) and topology == "auto", source) else None

    def cut() -> tuple[list[_Part], list[Tensor]] | None:
        if mine is None:
            return None
        links = seen if seen is not None or topology is None else find_topology(topology, world.size)
        return _cut_graph(mine, world, links, plan, partition, seed)

    parts, edges_of = _share_failures(world, cut) or (None, None)
    part = world.scatter_object(parts, source)
    edges = _scatter_rows(world, edges_of, (part.num_edges, 3), torch.int64, source)
    session.info = CommInfo(
        edge_index=edges[:, :2].t().contiguous(),
        n_id=torch.from_numpy(part.n_id).to(world.device),
        e_id=edges[:, 2].contiguous(),
        counts=tuple(np.diff(part.offsets).tolist()),
        report=part.report,
        exchange=part.exchange(world),
    )
    return session.info


def dispatch_features(x: Tensor | None = None) -> Tensor:
    """Returns this rank's rows of features, labels or masks over all nodes: see :meth:`CommInfo.dispatch`."""
    return _require_info("dispatch_features").dispatch(x)


def graph_allgather(x: Tensor) -> Tensor:
    """Returns one tensor of local rows followed by halo rows from their owners, differentiable: see :meth:`CommInfo.gather`."""
    return _require_info("graph_allgather").gather(x)


def collect_rows(x: Tensor) -> Tensor:
    """Returns the rows of all ranks in original order, on every rank: see :meth:`CommInfo.collect`."""
    return _require_info("collect_rows").collect(x)


def sum_over_ranks(x: Tensor) -> Tensor:
    """Returns the sum of `x` over ranks, on every rank, differentiable: see :meth:`CommInfo.sum`."""
    return _require_info("sum_over_ranks").sum(x)


def sum_gradients(parameters: torch.nn.Module | Iterable[Tensor]) -> None:
    """Replace each parameter's ``grad`` by its sum over ranks; call it once, between the backward pass and the optimizer step.

    If the losses of all ranks add up to the loss on a single device, the result is the single-device gradient. A parameter
    without a gradient on any rank keeps None; with a gradient on some rank, all ranks get it. The call also ends a step, which
    the omission of zero rows depends on (:mod:`lightning_gnn.extensions.zero_rows.transport`).

    Args:
        parameters: a module, or its parameters in the same order on every rank.

    Raises:
        RuntimeError: before :func:`init`.
    """
    world = _require_session("sum_gradients").world
    found = list(parameters.parameters() if isinstance(parameters, torch.nn.Module) else parameters)
    gradients = GradientSum(world, lambda: found)
    try:
        gradients.after()
    finally:
        gradients.release()
    world.begin_step(replace(world.step, number=world.step.number + 1))


def broadcast_parameters(module: torch.nn.Module, source: int = 0) -> None:
    """Copy the parameters and buffers of rank `source` to all ranks, as training needs equal models.

    Raises:
        RuntimeError: before :func:`init`.
    """
    _require_session("broadcast_parameters").world.broadcast_tensors_([*module.parameters(), *module.buffers()], source)


# The cut ######################################################################


@dataclass(frozen=True)
class _Part:
    """Part of a partitioned graph for one rank, without its edges.

    Attributes:
        offsets: first row of each rank and the end, int64 ``[P + 1]``.
        report: quality of the partition.
        num_edges: E_p.
        n_id: original ids of its local nodes, int64 ``[N_p]``.
        rows: rows to send and receive in the direct exchange.
        halo: relabeled ids of its halo nodes, ascending, for exchanges through host memory; None for others.
        ways: plans to choose from, unless the exchange uses host memory.
    """

    offsets: Ids
    report: Mapping[str, Any]
    num_edges: int
    n_id: Ids
    rows: HaloPlan
    halo: Ids | None
    ways: tuple[Way, ...]

    def exchange(self, world: World) -> Exchange:
        """Returns this rank's exchange."""
        if self.halo is not None:
            return SwapExchange(self.rows, self.halo, self.offsets, world, Meter())
        return follow(self.ways, self.rows, world, Meter())


def _cut_graph(
    graph: tuple[Tensor, int], world: World, links: Topology | None, plan: PlanName, partition: Any, seed: int
) -> tuple[list[_Part], list[Tensor]]:
    """Returns the part of each rank, and its edges, int64 ``[E_p, 3]``: source, target, position. Runs on one rank for all.

    METIS, KaMinPar and ``"streaming"`` partition between the machines of `links` first, then between their sockets. This needs
    several machines with equal numbers of ranks (DGCL section 4.1), as in
    :class:`~lightning_gnn.strategies.dgcl.strategy.DGCLStrategy`.
    """
    if plan not in get_args(PlanName):
        raise ValueError(f"plan must be one of {', '.join(map(repr, get_args(PlanName)))} (got {plan!r}).")
    if plan == "spst" and links is None:
        raise ValueError(NO_TOPOLOGY.format('plan="spst"'))
    size, edge_index = world.size, graph[0].numpy()
    by_levels = isinstance(partition, str) and partition in ("auto", *COSTS, *PARTITIONERS)
    groups = links.groups if by_levels and links is not None and has_equal_machines(links.groups) else None
    assignment = assign_nodes(edge_index, graph[1], size, partition, seed=seed, groups=groups)
    relabelling = local_relabelling(edge_index, assignment.part, size)
    pieces = list(edge_cut_parts(edge_index, relabelling))
    halos, offsets = [piece.halo for piece in pieces], relabelling.offsets
    plans: list[PricedPlan] = []
    if plan != "swap" and looks_at_links(plan, links, world):
        assert links is not None
        relation = Relation.from_halos(halos, offsets)
        if plan == "p2p":
            p2p(relation, links)  # raises if rows cannot be sent directly
        else:
            plans = make_plans(relation, links)
    report = assignment.report.as_dict()
    parts = [
        _Part(
            offsets,
            report,
            len(pieces[rank].edge_ids),
            relabelling.n_id[offsets[rank] : offsets[rank + 1]],
            halo_plan(rank, offsets, halos),
            halos[rank] if plan == "swap" else None,
            tuple(Way.of(each.plan, each.cost.price, rank) for each in plans) or (Way(),),
        )
        for rank in range(size)
    ]
    return parts, [torch.from_numpy(np.stack([*piece.edge_index, piece.edge_ids], 1)) for piece in pieces]


def _checked_graph(graph: Data | Tensor, num_nodes: int | None) -> tuple[Tensor, int]:
    """Returns ``edge_index``, int64 ``[2, E]``, on the CPU, and N."""
    edge_index = graph if isinstance(graph, Tensor) else getattr(graph, "edge_index", None)
    if not isinstance(edge_index, Tensor):
        raise ValueError(f"graph must be a PyG Data with an edge_index, or an edge_index, got {type(graph).__name__}.")
    if num_nodes is None:
        if isinstance(graph, Tensor):
            raise ValueError(
                "build_comm_info cannot infer the number of nodes from edges: the last nodes may be isolated. Pass num_nodes=..."
            )
        num_nodes = graph.num_nodes
    if not num_nodes or num_nodes < 1:
        raise ValueError(f"build_comm_info needs a graph with at least one node, got num_nodes={num_nodes}.")
    return checked_edges(edge_index.detach().cpu(), num_nodes), num_nodes


# Ranks ########################################################################


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", 0)) if chosen.index is None else chosen.index
        chosen = torch.device("cuda", index)
        if chosen.index >= torch.cuda.device_count():
            raise ValueError(
                f"init() needs {chosen}, but there are {torch.cuda.device_count()} CUDA devices. Start fewer ranks per "
                'machine, or compute on the CPU: init("cpu").'
            )
        torch.cuda.set_device(chosen)
    return chosen


def _holder(everyone: list[T | None], function: str, noun: str) -> tuple[int, T]:
    """Returns the first rank with a value, and its value; the values of all ranks that have one must be equal."""
    found = [(rank, each) for rank, each in enumerate(everyone) if each is not None]
    if not found:
        raise ValueError(f"{function} got no {noun} on any rank. At least one rank must pass it; the others may pass None.")
    for (rank, each), (other, another) in pairwise(found):
        if each != another:
            raise ValueError(
                f"{function} got different {noun}s: {each} on rank {rank}, {another} on rank {other}. Pass the same on all "
                "ranks, or None on all but one."
            )
    return found[0]


def _scatter_rows(world: World, pieces: Iterable[Tensor] | None, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
    """Returns this rank's piece, on its device; rank `source` has the pieces of all ranks, other ranks pass None.

    Args:
        pieces: one piece per rank in order, on `source`; consumed one by one, so that not all need to be in memory.
        shape, dtype: shape and dtype of this rank's piece.
        source: sending rank.

    Raises:
        CommunicationError: if `source`, or a rank that it sends to, does not respond.
    """
    own = torch.empty(*shape, dtype=dtype, device=world.device)
    with world.all_take_part(f"Sending node rows of rank {source}"):
        if pieces is None:
            world.transport.start_each([], [(source, own)] if own.numel() else [])()
            return own
        for peer, piece in enumerate(pieces):
            if peer == world.rank:
                own.copy_(piece)
            elif piece.numel():
                world.transport.start_each([(peer, piece.to(world.device).contiguous())], [])()
    return own


def _gather_rows(world: World, rows: Tensor, counts: Sequence[int], target: int) -> Tensor | None:
    """Returns the rows of all ranks in rank order, ``[sum(counts), ...]``, on rank `target`; None on other ranks.

    Rank r provides ``counts[r]`` rows.

    Raises:
        CommunicationError: if a rank does not respond.
    """
    with world.all_take_part(f"Gathering node rows on rank {target}"):
        if world.rank != target:
            world.transport.start_each([(target, rows.contiguous())] if rows.numel() else [], [])()
            return None
        out = rows.new_empty((sum(counts), *rows.shape[1:]))
        pieces = list(enumerate(out.split(list(counts))))
        pieces[world.rank][1].copy_(rows)
        world.transport.start_each([], [each for each in pieces if each[0] != target and each[1].numel()])()
        return out


def _share_failures(world: World, work: Callable[[], T]) -> T:
    """Returns the result of `work`; an error on one rank is raised on all ranks, so that no rank waits for others."""
    result: Any = None
    problem = None
    try:
        result = work()
    except (ValueError, OSError, MemoryError) as error:
        problem = error
    for each in world.all_gather_object(problem):
        if each is not None:
            raise problem or each
    return result


def _require_session(function: str) -> Session:
    if _session is None:
        raise RuntimeError(f"{function}() was called before init(). Call lightning_gnn.functional.init() first.")
    return _session


def _require_info(function: str) -> CommInfo:
    info = _require_session(function).info
    if info is None:
        raise RuntimeError(f"{function}() was called before build_comm_info(graph), which partitions the graph.")
    return info
