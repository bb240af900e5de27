"""Runs programs on the rows of a small graph: whole, and on ranks that are threads; compares values and gradients."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lightning_gnn.extensions.samples.layers  # noqa: F401  its rules register themselves
from lightning_gnn.comm.group import CommunicationError
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.rows import RowsMode, gather_global, placement_of
from lightning_gnn.rows.mode import place, tensors_in
from lightning_gnn.rows.placement import REPLICATED, RowSet
from lightning_gnn.rows.ranks import Ranks

CLASSES, FEATURES = 4, 6


@dataclass
class Graph:
    """Tensors of a graph: of its nodes, of its edges (names with ``e``), and replicated ones."""

    x: Tensor  # [N, 6], learned
    xt: Tensor  # [N, 6] with ties, learned
    s: Tensor  # [N], learned
    t: Tensor  # [N]
    i: Tensor  # [N, 6] of integers
    y: Tensor  # [N] of classes
    m: Tensor  # [N] of bools
    n_id: Tensor  # [N]
    e: Tensor  # [E, 3], learned
    em: Tensor  # [E] of bools
    w: Tensor  # [6, 4], a parameter
    c: Tensor  # [6]
    table: Tensor  # [N, 2]: replicated, one row for each node
    mode: RowsMode | None = None

    OF_NODES = ("x", "xt", "s", "t", "i", "y", "m", "n_id")
    OF_EDGES = ("e", "em")
    LEARNED = ("x", "xt", "s", "e", "w")

    def draw_as_one_device(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        if self.mode is not None:
            self.mode.exact_draws = True


@cache
def whole_graph(num_nodes: int = 23, num_edges: int = 31) -> Graph:
    """Returns a graph, drawn once."""
    g = torch.Generator().manual_seed(num_nodes)
    x = torch.randn(num_nodes, FEATURES, generator=g, dtype=torch.float64)
    ties = x.clone()
    if num_nodes > 9:
        ties[3], ties[[7, 9], 2] = ties[5], ties[:, 2].max() + 1
    m = torch.rand(num_nodes, generator=g) < 0.5
    return Graph(
        x=x,
        xt=ties,
        s=torch.randn(num_nodes, generator=g, dtype=torch.float64),
        t=torch.randn(num_nodes, generator=g, dtype=torch.float64),
        i=torch.randint(-5, 9, (num_nodes, FEATURES), generator=g),
        y=torch.randint(0, CLASSES, (num_nodes,), generator=g),
        m=m,
        n_id=torch.arange(num_nodes),
        e=torch.randn(num_edges, 3, generator=g, dtype=torch.float64),
        em=torch.rand(num_edges, generator=g) < 0.4,
        w=torch.randn(FEATURES, CLASSES, generator=g, dtype=torch.float64),
        c=torch.randn(FEATURES, generator=g, dtype=torch.float64),
        table=torch.randn(num_nodes, 2, generator=g, dtype=torch.float64),
    )


@dataclass(eq=False)
class Layout:
    """Which rank has which rows.

    Args:
        ranks: number of ranks.
        empty: this rank has no row.
        replicas: each rank has replicas of some rows that other ranks own.
    """

    ranks: int
    empty: int | None = None
    replicas: bool = False
    whole: Graph = field(default_factory=whole_graph, repr=False)

    def __str__(self) -> str:
        return f"{self.ranks} ranks{f', {self.empty} is empty' if self.empty is not None else ''}{', replicas' * self.replicas}"

    @cached_property
    def nodes(self) -> list[Tensor]:
        return self._drawn(self.whole.m)

    @cached_property
    def edges(self) -> list[Tensor]:
        return self._drawn(self.whole.em)

    def _drawn(self, mask: Tensor) -> list[Tensor]:
        """Returns rows of each rank; the last rank has none in the mask."""
        g = torch.Generator().manual_seed(self.ranks)
        owner = torch.randint(0, self.ranks, (len(mask),), generator=g)
        if self.empty is not None:
            owner[owner == self.empty] = (self.empty + 1) % self.ranks
        owner[mask & (owner == self.ranks - 1)] = 0
        found = [(owner == rank).nonzero().view(-1) for rank in range(self.ranks)]
        return [each[torch.randperm(len(each), generator=g)] for each in found]

    def with_replicas(self, parts: list[Tensor]) -> list[Tensor]:
        """Returns the rows of each rank with every third row of the next rank behind them."""
        if not self.replicas:
            return parts
        return [torch.cat([own, parts[(rank + 1) % self.ranks][::3]]) for rank, own in enumerate(parts)]


DAILY = (Layout(2), Layout(3), Layout(4, empty=1))
ALL = (Layout(1), *DAILY, Layout(3, empty=0), Layout(3, replicas=True))
Program = Callable[[Graph], Any]


def made_graph(layout: Layout | None = None, ranks: Ranks | None = None, whole: Graph | None = None) -> Graph:
    """Returns the whole graph, or the rows of one rank with their placements."""
    if layout is None or ranks is None:
        whole = whole or whole_graph()
        values = {each.name: getattr(whole, each.name) for each in fields(Graph)}
        graph = Graph(**{name: x.clone() if isinstance(x, Tensor) else x for name, x in values.items()})
    else:
        whole, rank = layout.whole, ranks.world.rank
        graph = Graph(**{each.name: getattr(whole, each.name) for each in fields(Graph)})
        for names, parts, kind in ((Graph.OF_NODES, layout.nodes, "nodes"), (Graph.OF_EDGES, layout.edges, "edges")):
            ids = layout.with_replicas(parts)[rank]
            total, keys = sum(map(len, parts)), known_keys(parts)
            rows = RowSet(ranks, len(ids), lambda ids=ids: ids, len(parts[rank]), total, keys, kind, layout.replicas)
            for name in names:
                setattr(graph, name, place(getattr(whole, name)[ids], rows.at(0)))
        for name in ("c", "table"):
            setattr(graph, name, place(getattr(whole, name).clone(), REPLICATED))
    graph.w = torch.nn.Parameter(graph.w.clone())
    for name in Graph.LEARNED:
        getattr(graph, name).requires_grad_()
    return graph


def known_keys(parts: Sequence[Tensor]) -> Callable[[], tuple[Tensor, list[int]]]:
    return lambda: (torch.cat(list(parts)), [len(each) for each in parts])


def on_ranks(layout: Layout, work: Callable[[Graph, RowsMode], Any]) -> list[Any]:
    """Returns what ``work(graph, mode)`` returns or raises on each rank."""
    meeting = Meeting(layout.ranks)

    def run(rank: int) -> Any:
        ranks = Ranks(InProcessWorld(rank, meeting))
        graph, mode = made_graph(layout, ranks), RowsMode(ranks)
        graph.mode = mode
        return work(graph, mode)

    return meeting.run(run)


@dataclass
class Result:
    """What a program returned and which gradients its loss has, whole."""

    values: list[Tensor]
    gradients: dict[str, Tensor]


def run_program(program: Program, graph: Graph, mode: RowsMode | None) -> Result:
    """Runs a program, and a loss of what it returns."""
    with mode or nullcontext():
        found = list(_tensors_of(program(graph)))
        for number, each in enumerate(found):
            assert mode is None or placement_of(each) is not None, f"the placement of result {number} is unknown"
        found = [gather_global(each) for each in found]
        loss: Any = sum(map(_loss_of, filter(lambda each: each.requires_grad, found)))
    if not isinstance(loss, Tensor):
        return Result([each.detach() for each in found], {})
    if mode is None:
        loss.backward()
        return Result([each.detach() for each in found], {name: _gradient(graph, name) for name in Graph.LEARNED})
    with mode.activate(in_backward=True):
        (loss / mode.ranks.size).backward()
    return Result([each.detach() for each in found], {name: _gradient(graph, name) for name in Graph.LEARNED})


def joined(layout: Layout, results: Sequence[Any]) -> list[Any]:
    """Returns the results of ranks with gradients of the whole graph: parameters' are partial, rows' are at their ranks."""
    if not all(isinstance(each, Result) and each.gradients for each in results):
        return list(results)
    whole = {"w": sum(each.gradients["w"] for each in results)}
    for name in set(Graph.LEARNED) - {"w"}:
        parts = layout.with_replicas(layout.edges if name in Graph.OF_EDGES else layout.nodes)
        whole[name] = torch.zeros_like(getattr(layout.whole, name))
        for ids, each in zip(parts, results):
            whole[name].index_add_(0, ids, each.gradients[name])
    return [Result(each.values, whole) for each in results]


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, (bool, int, float, str)):
        yield torch.tensor(float(value), dtype=torch.float64)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_of(each)
    else:
        yield from tensors_in((value,))


def _loss_of(x: Tensor) -> Tensor:
    x = x.reshape(-1)
    x = x.real + x.imag if x.is_complex() else x.double()
    finite = torch.where(x.isfinite(), x, torch.zeros_like(x))
    weights = torch.linspace(0.5, 2, max(1, x.numel()), dtype=torch.float64)[: x.numel()]
    return (finite * weights).sum() + (finite * finite).sum() * 0.1


def _gradient(graph: Graph, name: str) -> Tensor:
    x = getattr(graph, name)
    return torch.zeros_like(x) if x.grad is None else x.grad.detach()


def difference(found: Result, expected: Result, tolerance: float = 1e-10) -> str:
    """Returns where two results differ, or nothing."""
    if len(found.values) != len(expected.values):
        return f"{len(found.values)} results, not {len(expected.values)}"
    pairs = {f"result {number}": each for number, each in enumerate(zip(found.values, expected.values))}
    if found.gradients.keys() != expected.gradients.keys():
        return f"gradients of {sorted(found.gradients)}, not {sorted(expected.gradients)}"
    pairs |= {f"gradient of {name}": (found.gradients[name], each) for name, each in expected.gradients.items()}
    coarse = max((_ROUNDED.get(each.dtype, 0.0) for each in expected.values), default=0.0)  # its gradient is as coarse
    tolerance = max(tolerance, coarse)
    for name, (a, b) in pairs.items():
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {tuple(a.shape)} of {a.dtype}, not {tuple(b.shape)} of {b.dtype}"
        if not torch.allclose(_wide(a), _wide(b), rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"{name} is {a.flatten()[:5].tolist()}, not {b.flatten()[:5].tolist()}"
    return ""


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128) if x.is_complex() else x.double()


_ROUNDED = {
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
    torch.complex32: 1e-2,
}


def on_one_device(program: Program, whole: Graph | None = None) -> Result | Exception:
    """Returns the result of one device, or what it raises."""
    try:
        return run_program(program, made_graph(whole=whole), None)
    except Exception as error:
        return error


def compare(program: Program, layouts: Sequence[Layout] = DAILY, expected: Result | Exception | None = None) -> str:
    """Returns how ranks differ from one device, or nothing; where one device raises, ranks must raise the same kind of error."""
    for layout in layouts:
        want = on_one_device(program, layout.whole) if expected is None else expected
        ranks = joined(layout, on_ranks(layout, lambda graph, mode: run_program(program, graph, mode)))
        told = [(rank, _contrast(found, want)) for rank, found in enumerate(ranks)]
        told = [(rank, each) for rank, each in told if each]
        if told:  # a rank that waits for one that has failed says less
            rank, text = next((each for each in told if not isinstance(ranks[each[0]], CommunicationError)), told[0])
            return f"{layout}, rank {rank}: {text}"
    return ""


def _contrast(found: Any, want: Result | Exception) -> str:
    if isinstance(want, Exception):
        return "" if isinstance(found, type(want)) else f"{_shown(found)}, where one device raises {_shown(want)}"
    return _shown(found) if isinstance(found, BaseException) else difference(found, want)


def _shown(found: Any) -> str:
    if not isinstance(found, BaseException):
        return "returned a result"
    where = traceback.extract_tb(found.__traceback__)[-1]
    return f"{type(found).__name__} ({where.filename.rpartition('/')[2]}:{where.lineno}): {str(found)[:300]}"


def expression(text: str, **names: Any) -> Program:
    """Returns the program of an expression, behind statements, in which the tensors of the graph are variables."""
    statements, _, last = text.rpartition("; ")
    before, code = compile(statements, "program", "exec"), compile(last.strip(), "program", "eval")

    def program(graph: Graph) -> Any:
        variables = {each.name: getattr(graph, each.name) for each in fields(Graph)}
        space = {
            "torch": torch,
            "F": torch.nn.functional,
            "math": math,
            "copy": copy,
            "checkpoint": checkpoint,
            "graph": graph,
        }
        space |= variables | names
        exec(before, space)
        return eval(code, space)

    return program
