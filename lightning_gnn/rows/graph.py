"""Row sets of a shard, the row semantics of a module's state, and bound layers under row semantics."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal
from uuid import uuid4

import torch
from torch import Tensor
from torch_geometric.nn.aggr import Aggregation

from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import BatchRows, Shard
from lightning_gnn.data.sources import kinds_of
from lightning_gnn.heap import tensors_now
from lightning_gnn.rows.mode import NotExactError, RowsMode, active_mode, place, placement_of, rows_of, tensors_in, unknown_origin
from lightning_gnn.rows.placement import ATTRIBUTE, FROM_ROWS, REPLICATED, Placement, RowPlacement, RowSet, axis
from lightning_gnn.rows.ranks import Ranks, digest_of


class GraphRows:
    """Row sets of a rank's shard, and the mode of its steps; one object per run.

    Args:
        shard: shard of this rank, on its device.
        world: all ranks.
        common_draws: context manager in which random numbers are equal on all ranks.
        expand, reduce: halo operations of bound layers, see :mod:`lightning_gnn.nn.helpers`; None if there are none.

    Attributes:
        batch_size: number of samples of the last placed batch on all ranks; None for a batch without samples.
    """

    def __init__(
        self,
        shard: Shard,
        world: World,
        common_draws: Callable[[], AbstractContextManager[Any]] = nullcontext,
        expand: Callable[[Tensor], Tensor] | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        # Tensors that the user stores from an earlier run on the same batch have the row sets of that run.
        self.ranks = _ranks_of(shard.batch, world)
        self._expand, self._reduce = expand, reduce
        self.mode = RowsMode(self.ranks, common_draws, expand, reduce)
        self.batch_size: int | None = None
        self.hold(shard)

    def hold(self, shard: Shard) -> None:
        """Set the row sets of steps to the rows of a shard."""
        self._shard, ranks = shard, self.ranks

        def make(part: BatchRows) -> RowSet:
            name, ids, all_ids, counts, rows, replicas, _ = part
            known = rows_of(ids)
            if known is not None and known.rows.ranks is ranks:
                return known.rows
            every = lambda: (all_ids, list(counts))  # noqa: E731
            return RowSet(ranks, rows, lambda: ids.long(), counts[ranks.world.rank], sum(counts), every, name, replicas)

        self.nodes: dict[Any, RowSet] = {name: make(part) for name, part in shard.nodes_held().items()}
        self.edges: dict[Any, RowSet] = {}
        for kind, part in shard.edges_held().items():
            self.edges[kind] = make(part)
            self.edges[kind].targets = self.nodes[part.targets]
        self._kinds: Mapping[str, str] = {}
        if None in self.nodes:
            self._kinds = kinds_of(shard.batch)
            self.mode.nodes = nodes = self.nodes[None]
            if self._expand is not None:
                num_halo = len(shard.halos[shard.rank])
                self.mode.halo_rows = RowSet(
                    ranks, nodes.count + num_halo, self._keys_with_halo, nodes.owned, nodes.total, nodes.all_keys, "nodes"
                )
        self.place(shard.batch)

    def _keys_with_halo(self) -> Tensor:
        """Returns the ids of local and halo nodes; collective."""
        assert self._expand is not None
        with self.mode.pause():
            return self._expand(self.nodes[None].keys.double().unsqueeze(1)).view(-1).long()

    def activate(self, in_backward: bool = False) -> AbstractContextManager[Any]:
        """Context manager with row semantics, see :meth:`RowsMode.activate`."""
        return self.mode.activate(in_backward)

    def placements_of(self, x: Tensor, compares: bool = False) -> list[Placement | None]:
        """Returns the placement of a tensor on each axis of ranks; None if it is unknown.

        With `compares`, ranks compare constants; this is collective.
        """
        found = list[Placement | None]()
        for mode in self.modes:
            with mode.reading():
                found.append(placement_of(x) or (mode.placement_of_constant(x) if compares else None))
        return found

    @property
    def modes(self) -> list[RowsMode]:
        """Modes of all axes of ranks; torch calls the last one first."""
        return [self.mode]

    def place(self, batch: Any) -> Any:
        """Set the placements of a batch's tensors, unless they have one; returns the batch."""
        sets = self.edges | self.nodes
        for kind, store in self._shard.stores(batch).items():
            self._place(store.to_dict(), sets[kind])
        return batch

    def _place(self, values: Mapping[str, Any], rows: RowSet) -> None:
        for name, value in values.items():
            if not isinstance(value, Tensor) or self._is_placed(value):
                continue
            if name == "edge_index":
                of = rows if rows.targets is not None else self.edges[None]
                place(value, RowPlacement(of, 1, local_ids="both"))
                continue
            kind = self._kinds.get(name, "" if self._kinds else "row")
            of = self.edges[None] if kind == "edge" else rows
            if kind == "graph":
                place(value, REPLICATED)
            elif kind and value.dim() and value.size(0) == of.count:
                place(value, of.at(0))

    def _is_placed(self, x: Tensor) -> bool:
        placement = x.__dict__.get(axis.attribute)
        return placement is not None and (placement.rows is None or placement.rows.ranks is self.ranks)

    def place_state(self, module: torch.nn.Module, world: World, now: Iterable[Tensor] | None = None) -> None:
        """Mark a module's buffers and tensor attributes as replicated if they are equal on all ranks.

        Tensors in `now`, by default all tensors of the process, are compared between ranks when they are first combined with
        rows.
        """
        state = dict(_state(module))
        if now is None and world.stand_ins:  # threads share their tensors: rank 0 collects them
            now = world.all_gather_object(tensors_now() if world.rank == 0 else [])[0]
        now = list(tensors_now() if now is None else now)
        for mode in self.modes:
            with mode.reading():
                mode.note_constants(now, tensors_in([store.to_dict() for store in self._shard.batch.stores]))
        by_rank = world.all_gather_object({name: digest_of(x) for name, x in state.items()})
        for name, x in state.items():
            if all(each.get(name) == by_rank[0].get(name) for each in by_rank):
                place_replicated(x, self)

    def note_constant(self, x: Tensor) -> None:
        """Record a tensor that is a constant if it is equal on all ranks."""
        for mode in self.modes:
            with mode.reading():
                mode.note_constant(x)

    def release(self, module: torch.nn.Module) -> None:
        """Remove the placements of a module's buffers and other tensors, and the references to tensors from before the run."""
        for mode in self.modes:
            mode.forget_constants()  # weak references would prevent torch from moving their module
            with mode.reading():
                for _, x in _state(module):
                    mode.remove_placement(x)


def _ranks_of(batch: Any, world: World) -> Ranks:
    """Returns the ranks of an earlier run on a batch, with the current world, if all ranks have them; otherwise new ones.

    Ranks are new, for example, if one rank has loaded its part again.
    """
    placement = rows_of(batch.node_stores[0].n_id)
    known = None if placement is None else placement.rows.ranks
    if known is not None and (known.size, known.world.rank) != (world.size, world.rank):
        known = None
    found = world.all_gather_object((None if known is None else known.name, uuid4().hex))
    names = {name for name, _ in found}
    if known is None or len(names) > 1:
        return Ranks(world, name=found[0][1])
    known.world, known.device = world, world.device
    return known


_OF_ANY_MODULE = vars(torch.nn.Module()).keys()
"""Attributes of any module: parameters, submodules and buffers, which are visited separately, and hooks."""


def _state(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields buffers and tensor attributes by name."""
    for prefix, part in module.named_modules():
        for name, value in {**vars(part), **dict(part.named_buffers(recurse=False, remove_duplicate=False))}.items():
            if name in _OF_ANY_MODULE:
                continue
            for number, x in enumerate(tensors_in((value,))):
                if not isinstance(x, torch.nn.Parameter):
                    yield f"{prefix}.{name}.{number}", x


def place_replicated(x: Tensor, rows: GraphRows | None) -> None:
    """Mark a tensor that is equal on all ranks, on each axis of `rows`, unless it has a placement."""
    for attribute in [ATTRIBUTE] if rows is None else [mode.attribute for mode in rows.modes]:
        x.__dict__.setdefault(attribute, REPLICATED)


def place_selected(of: Tensor, mask: Tensor, *values: Tensor | None) -> None:
    """Set the placement of tensors with one row for each entry of a mask, bool ``[n]``, over the rows of `of`.

    No-op without row semantics.
    """
    placement = rows_of(of)
    if placement is not None:
        rows = placement.rows.select(mask)
        for each in values:
            if each is not None:
                place(each, rows.at(0))


def whole_value(value: Any, reduce_op: Any) -> Any:
    """Returns the result of ``strategy.reduce`` for a value of the whole graph: the value as a mean.

    Raises:
        NotExactError: the reduction is a sum, which would count the value once for each rank.
    """
    if isinstance(value, Tensor) and str(reduce_op).lower() not in ("mean", "avg"):
        raise NotExactError(
            f"reduce(..., {reduce_op!r}) would count a value of the whole graph once for each rank. Remove it: "
            "x.sum(), x.mean() and similar functions include the rows of all ranks."
        )
    return value


def check_loss(output: Any, rows: GraphRows) -> None:
    """Raises :class:`NotExactError` on all ranks unless a step's loss is None or known to be equal on all ranks."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        return
    for placement in rows.placements_of(loss, compares=True):
        if placement is None:
            raise NotExactError(f"The step returned as its loss {unknown_origin(loss)}")
        if isinstance(placement, RowPlacement) and loss.numel() != 1:
            raise NotExactError(
                f"The step returned a loss with one entry for each of the {placement.rows.name}. Return its mean or sum."
            )


# Bound layers #################################################################

Returns = Literal["arguments", "edges", "targets"]


def wrap_method(method: Callable[..., Any], name: str, returns: Returns) -> Callable[..., Any]:
    """Returns a method of a bound layer, which communicates itself: its functions have no rules, and its output has rows.

    Args:
        method: function of the module.
        name: name of the method.
        returns: rows of the output: the rows of the first argument, the edges that the method uses, or their targets.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode = active_mode()
        if mode is None:
            return method(self, *args, **kwargs)
        uses_edges = returns != "arguments"
        if uses_edges and not mode.has_nodes:
            return mode.run_per_sample(partial(call, self), args, kwargs)
        row_args = mode.row_tensors(args, kwargs)
        is_along = not uses_edges and (mode.norms_by_rules or any(of.dim for _, of in row_args))
        if not row_args or is_along or isinstance(self, Aggregation):
            return getattr(type(self), name)(self, *args, **kwargs)
        if uses_edges and _edges_of(row_args) is None:
            args, kwargs = _own_edges(mode, args, kwargs)
            row_args = mode.row_tensors(args, kwargs)
        with mode.pause():
            if uses_edges:
                args, kwargs = _whole_inputs(mode, self, args, kwargs, row_args)
            out = method(self, *args, **kwargs)
        return _place_output(mode, self, out, row_args, returns)

    return call


def _own_edges(mode: RowsMode, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns arguments in which edges of the whole graph, computed from ``edge_index``, are replaced by this rank's edges.

    The rank's edges end at its local nodes.
    """
    given = [*args, *kwargs.values()]
    whole = next((x for x in given if isinstance(x, Tensor) and x.dtype == torch.int64 and x.dim() == 2 and len(x) == 2), None)
    nodes, halo = mode.nodes, mode.halo_rows
    if whole is None or placement_of(whole) is None or nodes is None or halo is None:
        return args, kwargs
    with mode.pause():
        places = whole.new_full((nodes.total,), -1)
        places[halo.positions] = torch.arange(halo.count, device=whole.device)
        source, target = places[whole]
        where = ((target >= 0) & (target < nodes.count)).nonzero().view(-1)
        edges = torch.stack([source[where], target[where]])
        is_unknown = bool(nodes.replicas or mode.ranks.gather((edges[:1] < 0).any().view(1), "edges").any())
    if is_unknown:
        raise mode.refuse(
            "a conv was given edges that were made in the step, and this rank does not have the rows of all their sources. Add "
            "them to the graph before the run, with a transform: data = T.ToUndirected()(data)"
        )
    rows = RowSet(mode.ranks, len(where), lambda: where, total=whole.size(1), name="edges")
    rows.targets = nodes
    place(edges, RowPlacement(rows, 1, local_ids="both"))
    args = tuple(edges if x is whole else x for x in args)
    return args, {name: edges if x is whole else x for name, x in kwargs.items()}


def _node_dim(layer: Any) -> int:
    """Returns the dimension of nodes in a layer's tensors; a DirGNNConv has convs."""
    dim: int = getattr(getattr(layer, "conv_in", layer), "node_dim", 0)
    return dim


def _edges_of(row_args: list[tuple[Tensor, RowPlacement]]) -> RowSet | None:
    return next((of.rows for _, of in row_args if of.local_ids), None)


def _whole_inputs(mode: RowsMode, layer: Any, args: Any, kwargs: Any, row_args: Any) -> tuple[Any, Any]:
    """Returns the inputs of a layer in local form.

    A replicated tensor with a row per node, such as the weight of an embedding, becomes the rank's rows. Tensors that were
    reduced from rows get gradients from all ranks.
    """
    edges = _edges_of(row_args)
    targets = None if edges is None else edges.targets

    def dim_of(x: Tensor) -> int:  # of nodes or edges
        return _node_dim(layer) % x.dim() if x.dim() > 1 else 0

    def change(x: Any) -> Any:
        of = placement_of(x) if isinstance(x, Tensor) else None
        if of is None:
            return x
        if isinstance(of, RowPlacement):
            if of.local_ids or of.rows.all_keys is not None or of.rows is edges or targets is None:
                return x
            # Possibly in another order: joined or shuffled.
            x, of = mode.place(mode.gather_rows(x, of, "layer"), FROM_ROWS), FROM_ROWS
            dim = dim_of(x)
            if edges is not None and targets is not None and x.size(dim) == edges.total != targets.total:
                return mode.take(x, dim, edges, "layer")
        dim = dim_of(x)
        if targets is not None and x.dim() > 1 and x.size(dim) == targets.total:
            return mode.take(x, dim, targets, "layer")
        if edges is not None and x.dim() and x.size(dim) == edges.total:
            return mode.take(x, dim, edges, "layer")
        return mode.enter(x, of, "layer")

    def change_nested(value: Any) -> Any:
        return tuple(map(change_nested, value)) if type(value) is tuple else change(value)

    return tuple(map(change_nested, args)), {name: change_nested(value) for name, value in kwargs.items()}


def _place_output(mode: RowsMode, layer: Any, out: Any, row_args: Any, returns: Returns) -> Any:
    if returns == "arguments":
        of = row_args[0][1]
        return mode.place(out, of.rows.at(of.dim))
    if isinstance(out, dict):
        nodes = {of.rows.name: of.rows for _, of in row_args if not of.local_ids}
        for name, each in out.items():
            rows = nodes.get(f"nodes of {name!r}")
            if isinstance(each, Tensor) and rows is not None and each.size(0) == rows.count:
                place(each, rows.at(0))
        return out
    edges = _edges_of(row_args)
    rows = edges if edges is None or returns == "edges" else edges.targets
    first, *others = out if isinstance(out, tuple) else (out,)
    if isinstance(first, Tensor) and rows is not None:
        dim = _node_dim(layer) % max(1, first.dim())
        if first.dim() and first.size(dim) == rows.count:
            place(first, rows.at(dim))
    for each in tensors_in(others):
        each.__dict__.pop(axis.attribute, None)
    return out


def wrap_layer(layer: torch.nn.Module, name: str = "forward", returns: Returns = "targets") -> Any:
    """Returns a layer's method, whether or not the layer is bound to a graph, wrapped by :func:`wrap_method`."""
    before = layer.__dict__.get(name)
    method = getattr(type(layer), name) if before is None else before.__func__
    return types.MethodType(wrap_method(method, name, returns), layer)
