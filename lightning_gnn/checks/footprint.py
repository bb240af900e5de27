"""Memory of a training step on a rank: measured while it runs, and predicted from steps on small graphs.

A saved tensor of a layer has a row per local node, per local and halo node, or per edge. Its bytes are an affine function of
these numbers, which steps on small graphs determine. Nothing of the size of the graph is allocated.

N local nodes, H halo nodes, E edges of a rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.nn import MessagePassing
from typing_extensions import override

from lightning_gnn.checks.small_graph import Form, SmallGraph, small_graph
from lightning_gnn.checks.stand_ins import QuietTrainer, copy_module, isolate, join_results, quiet, run_step, without_optimizers
from lightning_gnn.checks.trial import Bind, join_ranks, limit_ids
from lightning_gnn.comm.group import World
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.data.lazy_ids import stored_ids
from lightning_gnn.data.shards import Cut, Graph, Shard
from lightning_gnn.data.sources import counted_mask
from lightning_gnn.kernels.run import in_place_of
from lightning_gnn.nn.helpers import graph_in_use
from lightning_gnn.partition.layout import Counts, LayoutSpec, Replicas
from lightning_gnn.private_torch import tree_leaves

Numbers: TypeAlias = "int | Counts"


def least_bytes(
    rows: Numbers, halo_rows: Numbers, edges: Numbers, row_bytes: Numbers, module: torch.nn.Module | None = None
) -> int:
    """Returns the minimal memory of a rank for any model: features, halo features, edges in CSR both ways, weights and gradients.

    Activations are not included. Numbers of nodes and edges may be arrays, see :class:`Sizes`.

    Args:
        rows: number of local nodes, including replicas.
        halo_rows: number of halo nodes.
        edges: number of edges of the rank, including replicas.
        row_bytes: bytes of a node's features.
        module: module with the weights.
    """
    columns = np.sum(edges) * 8  # columns, for A and its transpose
    parameters = 0 if module is None else sum(2 * parameter.nbytes for parameter in module.parameters())
    return int(np.sum((rows + halo_rows) * row_bytes) + columns + parameters)


SORTING_BYTES = 40
"""Bytes per edge while matrices are made from the edge list: a copy of its endpoints, its position, and its part."""

_FORMS = (  # linearly independent sizes
    Form((6, 18), (15, 45), (5, 6), varied=True),
    Form((8, 16), (60, 100), (2, 12), varied=True),
    Form((20, 30), (30, 90), (6, 24), varied=True),
    Form((10, 25), (40, 20), (8, 16), varied=True),
    Form((25, 12), (50, 120), (10, 9), varied=True),
    Form((40, 30), (200, 90), (20, 14), varied=True),
)


@dataclass(frozen=True)
class Peak:
    """Peak memory of tensors on a rank by phase, in bytes; python and libraries are not included."""

    setup: int
    forward: int
    backward: int
    evaluation: int

    @property
    def max_bytes(self) -> int:
        return max(astuple(self))


PHASES = ("setup", "forward", "backward", "evaluation")


class Sizes(NamedTuple):
    """Quantities that determine a rank's memory: numbers, or in general int64 arrays with a number per node or edge type.

    Attributes:
        rows: local nodes.
        halo_rows: halo nodes.
        sent_rows: rows that the rank sends to other ranks.
        edges: edges of the rank.
        targets: labeled nodes, or edges, in the training mask, of one type.
        held_edges: edges that the rank computes; in a vertex cut they differ from the edges of its local nodes.
    """

    rows: Numbers
    halo_rows: Numbers
    sent_rows: Numbers
    edges: Numbers
    targets: int
    held_edges: Numbers

    @classmethod
    def of(cls, shard: Shard, targets: int, held_edges: Numbers | None = None) -> Sizes:
        """Returns the sizes of a rank with its shard; by default it computes the edges of its local nodes."""
        counts: Any = (each[shard.rank] for each in shard.types.count(shard.halos))
        if shard.rows != shard.counts:  # with replicas
            plan = shard.plan
            counts = plan.num_owned, sum(plan.recv_counts), sum(map(len, plan.send_rows)), shard.edges[shard.rank]
        rows, halo_rows, sent_rows, edges = counts
        return cls(rows, halo_rows, sent_rows, edges, targets, edges if held_edges is None else held_edges)

    @classmethod
    def from_cut(
        cls, cut: Cut, module: torch.nn.Module, replicas: Replicas | None = None, reads_holders: bool = True
    ) -> list[Sizes]:
        """Returns the sizes of every rank of a partitioned graph.

        Args:
            cut: the graph.
            module: module of the training step.
            replicas: replicas of the layout; sent rows are then assumed to equal halo rows.
            reads_holders: whether a vertex cut's file of all edges is read; if not, `held_edges` are the edges of local nodes.
        """
        targets = cut.mask_counts[counted_mask("train_mask", module)]
        if replicas is not None:
            sizes = zip(cut.sizes(replicas), targets)
            return [cls(rows, halo, halo, edges, count, edges) for (rows, halo, edges), count in sizes]
        counts = cut.types.count(cut.halos)
        held_edges = cut.types.count_held(cut.holders) if reads_holders and cut.holders is not None else counts[-1]
        return [cls(*each) for each in zip(*counts, targets, held_edges)]

    def among(self, ranks: int) -> Sizes:
        """Returns the sizes of one of several ranks that share this rank's part; halo rows are kept, an upper bound."""
        rows, halo_rows, sent_rows, edges, targets, held_edges = self
        return Sizes(rows // ranks, halo_rows, sent_rows, edges // ranks, targets // ranks, held_edges // ranks)


@dataclass(frozen=True)
class Piece:
    """Memory that a forward pass allocated and that exists at its end, or an argument of a conv.

    Attributes:
        bytes: size.
        conv: conv in which it was first saved; empty for none.
        saved: whether the backward pass needs it.
        argument: whether it is an argument of a conv, which is stored when the rest is recomputed.
    """

    bytes: float
    conv: str
    saved: bool
    argument: bool


@dataclass(frozen=True)
class Footprint:
    """Memory of a step on a rank.

    Attributes:
        held_bytes: memory that persists between steps: graph, matrices, buffers, messages, weights, gradients, two values per
            weight for the optimizer.
        edges: edges of the rank, of all copies of the graph.
        pieces: memory of a forward pass, without held memory.
    """

    held_bytes: float
    edges: float
    pieces: tuple[Piece, ...]

    def peak(self, recompute: bool = False) -> Peak:
        """Returns the peak of each phase, with `recompute` under the strategy's ``checkpoint_convs``.

        In addition to saved memory, an operation needs memory for its inputs and outputs. In the forward pass this is one more
        piece of the largest size. In the backward pass, these are the gradients of its output and of its input; in evaluation,
        all three.
        """
        kept = [piece.bytes for piece in self.pieces if piece.saved]
        largest, again = max(kept, default=0.0), 0.0
        if recompute:
            kept = [piece.bytes for piece in self.pieces if piece.argument or (piece.saved and not piece.conv)]
            inside: dict[str, float] = defaultdict(float)
            for piece in self.pieces:
                if piece.saved and piece.conv and not piece.argument:
                    inside[piece.conv] += piece.bytes
            again = max(inside.values(), default=0.0)
        base = self.held_bytes + sum(kept)
        return Peak(
            setup=int(self.held_bytes + SORTING_BYTES * self.edges),
            forward=int(base + largest),
            backward=int(base + again + 2 * largest),
            evaluation=int(self.held_bytes + 3 * largest),
        )


class Counted(torch.autograd.graph.saved_tensors_hooks):
    """Context manager that records the memory that a forward pass saves, in this thread.

    Each storage is counted once, with the conv of a bound module in which it is saved. Convs are patched until :meth:`release`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        # Keeps the storages, so that no address is used twice.
        self._pieces_by_address: dict[int, tuple[torch.UntypedStorage, Piece]] = {}
        self._inside, self._open = "", False
        self._convs: list[tuple[MessagePassing, Any]] = []
        for name, conv in module.named_modules():
            if isinstance(conv, MessagePassing):
                self._convs.append((conv, conv.__dict__.get("forward")))
                object.__setattr__(conv, "forward", self._wrap_forward(name, conv.forward))
        super().__init__(self._pack, lambda tensor: tensor)

    @override
    def __enter__(self) -> None:
        self._open = True
        super().__enter__()

    @override
    def __exit__(self, *error: object) -> None:
        self._open = False
        super().__exit__(*error)

    def _wrap_forward(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside or not self._open:
                return forward(*args, **kwargs)
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Tensor) and each.requires_grad:
                    self._note(each, argument=True)
            self._inside = name
            try:
                return forward(*args, **kwargs)
            finally:
                self._inside = ""

        return run

    def release(self) -> None:
        for conv, before in self._convs:
            conv.__dict__.pop("forward")
            if before is not None:
                object.__setattr__(conv, "forward", before)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._note(tensor, saved=True)
        return tensor

    def _note(self, tensor: Tensor, saved: bool = False, argument: bool = False) -> None:
        tensor = stored_ids(tensor)
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return  # no address
        _, known = self._pieces_by_address.get(storage.data_ptr(), (None, Piece(storage.nbytes(), self._inside, False, False)))
        piece = Piece(known.bytes, known.conv, known.saved or saved, known.argument or argument)
        self._pieces_by_address[storage.data_ptr()] = storage, piece

    def take(self, held_memory: Mapping[int, int]) -> tuple[Piece, ...]:
        """Returns and clears the recorded pieces in order of time, without memory in `held_memory`."""
        pieces, self._pieces_by_address = self._pieces_by_address, {}
        return tuple(piece for place, (_, piece) in pieces.items() if place not in held_memory)


def memory_of(*objects: Any) -> dict[int, int]:
    """Returns address and bytes of all tensors and arrays in objects, and in objects of this package that they contain."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    left = list(objects)
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (str, int, float, type, ModuleType, World)):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            each = stored_ids(each)
            place = each.untyped_storage().data_ptr()
            found[place] = max(found.get(place, 0), each.nbytes)  # for a mapped file, only this part
            left.append(each.grad if each.is_leaf else None)
        elif isinstance(each, np.ndarray):
            found[each.ctypes.data] = each.nbytes
        elif isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, (list, tuple, set, frozenset)):
            left += each
        elif isinstance(each, BaseData):
            left += each.to_dict().values()
        elif type(each).__module__.startswith("lightning_gnn."):
            left += vars(each).values()
    return found


class RankStep:
    """Training step of one rank of several threads, forward and backward, with recorded memory.

    Args:
        module: module of this rank, on the CPU; this object binds it.
        shard: shard of the rank, on the CPU.
        world: all ranks.
        bind: function that binds a module to a rank's shard for the scheme.
        graph: small graph that was split, whose ids are limited; None for the user's graph.
    """

    def __init__(
        self, module: pl.LightningModule, shard: Shard, world: InProcessWorld, bind: Bind, graph: Graph | None = None
    ) -> None:
        self.module, self.shard, self.world, self._graph = module, shard, world, graph
        self.binding, self._rows = join_ranks(module, shard, world, bind)
        self._counted = Counted(module)
        self._rows.place_state(module, world)
        if not module.automatic_optimization:
            without_optimizers(module, self._backward)

    def bound(self) -> AbstractContextManager[Any]:
        """Returns a context manager in which steps of this thread run on the rank's graph."""
        return graph_in_use(self.binding.context, this_thread_only=True)

    def run(self, counts: bool = False) -> None:
        """Run the step; with `counts`, record the memory that its forward pass saves."""
        batch = self.shard.step_batch()
        if self._graph is not None:
            limit_ids(self.shard, batch, self._graph)
        with self._counted if counts else nullcontext(), self._rows.activate():
            output = run_step(self.module, "training_step", self._rows.place(batch))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if self.module.automatic_optimization and isinstance(loss, Tensor):
            self._backward(loss)

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self._rows.activate(in_backward=True):
            (loss / self.world.size).backward(*args, **kwargs)

    def footprint(self) -> Footprint:
        """Returns the recorded memory, after the backward pass."""
        weights = [*self.module.parameters()]
        held = memory_of(self.binding.context, self.shard.step_batch(), weights, [*self.module.buffers()])
        of_optimizer = 2 * sum(each.nbytes for each in weights if each.requires_grad)
        edges, messages = sum(each.count for each in self._rows.edges.values()), self.world.transport.most_bytes
        return Footprint(sum(held.values()) + of_optimizer + messages, edges, self._counted.take(held))

    def release(self) -> None:
        """Restore the module."""
        self._rows.release(self.module)
        self._counted.release()
        self.binding.release()


class Predicted:
    """Predicted memory of steps for a rank of any size, from steps on small graphs.

    Args:
        module: unbound module; its copies run on the CPU, with the code path of `device`.
        batch: a rank's part of the graph, on the CPU; attributes of the small graphs are sampled from its rows.
        bind: function that binds a module to a rank's shard for the scheme.
        layout: layout of the scheme for two ranks.
        trainer: value of ``self.trainer`` in the step; its loggers record nothing.
        device: training device. Without attention kernels (CUDA without Triton), layers save rows of edges, which are counted.
        make: function that makes a small graph of this batch, as :func:`~lightning_gnn.checks.small_graph.small_graph` does.

    Raises:
        RuntimeError: the step fails on a small graph, or the number of saved tensors differs between small graphs.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        batch: Graph,
        bind: Bind,
        layout: LayoutSpec,
        trainer: pl.Trainer | None = None,
        device: torch.device | None = None,
        make: Callable[..., SmallGraph] = small_graph,
    ) -> None:
        quiet_trainer = None if trainer is None else QuietTrainer(trainer)
        models = [quiet(copy_module(module).cpu(), quiet_trainer) for _ in range(2)]
        for each in models if trainer is not None else ():
            trainer.precision_plugin.convert_module(each)  # type: ignore[union-attr]
        mask = counted_mask("train_mask", module)
        sizes, found = list[Counts](), list[Footprint]()
        with isolate(), in_place_of(device or torch.device("cpu")):
            # A small graph gives an equation for each of its ranks; there are a few more than unknowns.
            while len(found) < 2 * len(_FORMS) or len(found) < len(sizes[0]) + 5:
                seed = len(found) // 2
                small = make(batch, [mask], _FORMS[seed % len(_FORMS)], seed)
                steps = _steps(models, small, bind, layout)
                holders = [shard.holders for shard, _ in steps if shard.holders is not None]
                held: Any = steps[0][0].types.count_held(torch.cat(holders)) if holders else (None, None)
                for (shard, footprint), held_edges in zip(steps, held):
                    sizes.append(_as_row(Sizes.of(shard, shard.mask_counts[mask][shard.rank], held_edges)))
                    found.append(footprint)
        self._pieces = found[0].pieces
        if any(len(each.pieces) != len(self._pieces) for each in found):
            raise RuntimeError("The number of tensors that a step stores depends on the graph. This does not affect training.")
        counted = [[each.edges, each.held_bytes, *(piece.bytes for piece in each.pieces)] for each in found]
        # Bytes of each piece per local node, halo node and so on, by type, and a constant term.
        self._per, *_ = np.linalg.lstsq(np.array(sizes, float), np.array(counted), rcond=None)

    def footprint(self, sizes: Sizes, working_bytes: int = 0) -> Footprint:
        """Returns the memory of a rank of these sizes; `working_bytes` is its memory in addition to its part of the graph."""
        edges, held, *pieces = (_as_row(sizes) @ self._per).clip(0)
        kept = (replace(piece, bytes=size) for piece, size in zip(self._pieces, pieces))
        return Footprint(held + working_bytes, edges, tuple(kept))


def _as_row(sizes: Sizes) -> Counts:
    """Returns all numbers, and the factor 1 of a constant term."""
    return np.hstack([*sizes, 1])


def _steps(
    models: Sequence[pl.LightningModule], small: SmallGraph, bind: Bind, layout: LayoutSpec
) -> list[tuple[Shard, Footprint]]:
    """Returns the memory of a step on two parts of a graph, by rank; the step changes only buffers of the models."""
    meeting = Meeting(2)
    shards = small.shards(small.graph, layout)

    def on_rank(rank: int) -> Footprint:
        step = RankStep(models[rank], shards[rank], InProcessWorld(rank, meeting), bind, small.graph)
        with step.bound():
            step.run(counts=True)
        found = step.footprint()
        models[rank].zero_grad()
        step.release()
        return found

    return list(zip(shards, join_results(meeting.run(on_rank))))
