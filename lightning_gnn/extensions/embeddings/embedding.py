"""Learnable embeddings for nodes without features, each stored on the owner of its node.

Source: DistDGL (2020) section III-C, sparse embeddings.

N nodes of the whole graph, P ranks, n ids of a call or rows of a rank, D columns.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from threading import Lock
from typing import Any, Literal, get_args
from weakref import WeakSet

import numpy as np
import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch_geometric.typing import NodeType
from typing_extensions import override

from lightning_gnn.arguments import check_choice
from lightning_gnn.comm.group import World, num_ranks
from lightning_gnn.comm.rows import AnyRows, OwnedRows
from lightning_gnn.data.ahead import Background
from lightning_gnn.data.shards import Cut, Shard
from lightning_gnn.extensions.embeddings.channel import GroupChannel
from lightning_gnn.nn.learned_rows import LearnedRows, are_untrained
from lightning_gnn.rows.mode import active_mode, place, placement_of
from lightning_gnn.rows.placement import REPLICATED

SparseOptimizer = Literal["adam", "sgd"]

_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ()}
"""Optimizer state of each row, by the names of torch.optim.SparseAdam."""

_BETAS, _EPS = (0.9, 0.999), 1e-8
"""Defaults of torch.optim.SparseAdam."""

_ON_RANK_0 = "between runs of several ranks, rank 0 stores all rows. Use them there, or save and load a checkpoint."

_PICKLED = "it was pickled while several ranks trained it. Load a checkpoint, or pickle it after training."

_ROWS_AT_ONCE = 1 << 16
"""Number of initial rows drawn at once; limits the memory for random bits."""


@dataclass
class Rows:
    """Embedding rows and their optimizer state.

    Attributes:
        weight: ``[n, D]``.
        moments: ``[n, D]`` each, see `_MOMENTS`.
        step: number of updates so far, of any rows.
    """

    weight: Tensor
    moments: tuple[Tensor, ...]
    step: int = 0

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """Returns a copy with `change` applied to weight and moments."""
        return replace(self, weight=change(self.weight), moments=tuple(change(each) for each in self.moments))

    def update(self, rows: Tensor, grads: Tensor, lr: float) -> None:
        """Make one optimizer step: Adam if there are moments, else SGD; rows that are not in `rows` do not change.

        Args:
            rows: distinct rows, ``[m]``.
            grads: gradients, ``[m, D]``.
            lr: learning rate.
        """
        self.step += 1
        if not self.moments:
            self.weight.index_add_(0, rows, grads, alpha=-lr)
            return
        # The order of operations is the order in torch.optim.SparseAdam, for equal rounding.
        exp_avg, exp_avg_sq = self.moments
        means = grads.sub(exp_avg[rows]).mul_(1 - _BETAS[0]).add_(exp_avg[rows])
        squares = grads.pow(2).sub_(exp_avg_sq[rows]).mul_(1 - _BETAS[1]).add_(exp_avg_sq[rows])
        exp_avg[rows], exp_avg_sq[rows] = means, squares
        corrections = 1 - _BETAS[0] ** self.step, 1 - _BETAS[1] ** self.step
        size = lr * math.sqrt(corrections[1]) / corrections[0]
        self.weight.index_add_(0, rows, means / squares.sqrt().add_(_EPS), alpha=-size)


class EmbeddingRows(AnyRows):
    """Embedding rows on the CPU: read and updated in the background, gathered and scattered over ranks.

    Args:
        n_id, counts, world: see :class:`AnyRows`.
        batch_ids: the tensor ``batch.n_id`` of full-graph steps, if it has this rank's nodes in order.

    Attributes:
        local_ids: original ids of this rank's nodes, in the order of its rows.
        channels: channels for reads and for updates.
        background: thread that sends gradients to owners; in the same order on all ranks.
    """

    def __init__(self, world: World, n_id: Tensor, counts: Sequence[int], batch_ids: Tensor | None = None) -> None:
        # Two groups, because rows of the next step are read while gradients of the last steps are being sent.
        self.channels = GroupChannel(world, "Reading rows"), GroupChannel(world, "Changing rows")
        OwnedRows.__init__(self, torch.tensor([0, *counts]).cumsum(0), self.channels[0].exchange)
        self._changed = OwnedRows(self._first, self.channels[1].exchange)
        self._world, self._batch_ids, self._place = world, batch_ids, None
        self.num_nodes, self._n_id = len(n_id), n_id
        self.local_ids = n_id.split(list(counts))[world.rank]
        self._is_open = True
        self.background = Background("lightning_gnn rows", stops=False)

    @classmethod
    def from_shard(cls, name: NodeType | None, world: World, shard: Shard) -> EmbeddingRows:
        """Returns the rows for the nodes of a type, on the rank of `shard`; the type is None for a graph without types."""
        held = shard.nodes_held()[name]
        others = world.size - len(held.counts)  # the first data rank owns the rows, and data ranks read the same nodes
        return cls(world, held.all_ids, [*held.counts, *[0] * others], None if held.replicas or others else held.ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingRows:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickle does not include other ranks

    def are_local(self, ids: Tensor) -> bool:
        """Returns whether ids are each rank's local nodes, so that nothing is sent; all ranks agree."""
        return ids is self._batch_ids

    def read(self, ids: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the rows of original ids, ``[n, D]``, each read once from its owner.

        Args:
            ids: original ids, ``[n]``.
            read: function that returns copies of local rows.
        """
        places, inverse = self._places()[ids].unique(return_inverse=True)
        return self.pull(self.request(places), read)[inverse]

    def sum(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sums over all ranks of values for this rank's rows: rows, ascending ``[m]``, and sums, ``[m, D]``.

        Values are summed on each rank first, then over ranks in rank order.

        Args:
            ids: original ids, ``[n]``, with duplicates.
            values: ``[n, D]``.
        """
        places, sums = sum_rows(self._places()[ids], values)
        request = self._changed.request(places)
        return sum_rows(torch.cat(request.rows), torch.cat(self._changed.push(request, sums)))

    def gather(self, rows: Tensor) -> Tensor:
        """Returns the rows of all nodes in original order, ``[N, ...]``, on rank 0; an empty tensor ``[0, ...]`` on other ranks.

        Args:
            rows: rows of this rank's nodes.
        """
        size = self._world.size
        found = torch.cat(self._exchange([rows if peer == 0 else rows[:0] for peer in range(size)], None, "", "forward"))
        return found if self._world.rank else torch.empty_like(found).index_copy_(0, self._n_id, found)

    def scatter(self, rows: Tensor) -> Tensor:
        """Returns the rows of this rank's nodes: the transpose of :meth:`gather`.

        Args:
            rows: rows of all nodes in original order on rank 0; an empty tensor ``[0, ...]`` on other ranks.
        """
        parts = [rows] * self._world.size
        if self._world.rank == 0:
            parts = [rows[ids] for ids in self._n_id.split(self._first.diff().tolist())]
        return self._exchange(parts, None, "", "forward")[0]

    def close(self) -> None:
        """End the thread and groups, once: several embeddings of a type share them."""
        if not self._is_open:
            return
        self._is_open = False
        self.background.end()
        self.background.join(1.0)
        for channel in self.channels:
            channel.close()


def sum_rows(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distinct rows, ascending, and the sum of the values of each, in the given order.

    Args:
        rows: ``[n]``.
        values: ``[n, D]``.
    """
    distinct, inverse = rows.unique(return_inverse=True)
    return distinct, values.new_zeros((len(distinct), values.size(1))).index_add_(0, inverse, values)


_creation = count()
_with_gradients: WeakSet[DistributedEmbedding] = WeakSet()


class DistributedEmbedding(LearnedRows):
    """Learnable embeddings for nodes without features, like ``torch.nn.Embedding(sparse=True)`` with its own optimizer.

    Call it with original node ids, ``embedding(batch.n_id)``. Under a strategy of this package, each row is stored on the owner
    of its node. Calls receive rows from the owners. Gradients are sent to the owners, which sum the gradients of all ranks and
    apply a sparse optimizer. On a single device, all rows are local.

    The rows are not a parameter: the module's own optimizer does not update them, and gradient clipping ignores them. They are
    updated after each optimizer step, after any number of backward passes; without an optimizer, call :meth:`step`.

    Rows and optimizer state are in host memory, in the dtype that the module was converted to. ``state_dict`` has the rows of all
    nodes in original order: ``weight``, ``step`` and Adam's ``exp_avg`` and ``exp_avg_sq``. Any number of ranks can load it.
    During training, ``state_dict()`` is collective and returns the rows on rank 0 only. After training, rank 0 stores all rows.

    Args:
        num_nodes: N, number of nodes.
        dim: D, number of columns.
        optimizer: ``"adam"``, as torch.optim.SparseAdam, which does not update rows without a gradient; or ``"sgd"``.
        lr: learning rate; the attribute may be changed between steps.
        staleness: maximum number of pending gradient pushes, applied in the background during training; 0 waits for each push,
            with exact results. Evaluation and checkpoints wait for all.
        seed: seed of the initial rows, which are standard normal as in torch.nn.Embedding, independent of the number of ranks.
        node_type: node type of a ``HeteroData`` that has these rows, ``embedding(batch["author"].n_id)``; N is its number of
            nodes.

    Shapes:
        ids int64 ``[n]``, in any order and with duplicates, to ``[n, D]`` on their device, a leaf that requires gradients.

    Raises:
        ValueError: for sizes below 1, an unknown optimizer, a negative lr or staleness, or invalid ids. The datamodule and the
            strategy raise it before training for another number of nodes (of `node_type`) than the graph, several optimizers, or
            a loss scaler.
        RuntimeError: for several ranks without a strategy of this package, or rows that are on another rank.

    Source: DistDGL section III-C: sparse embeddings, whose owner applies gradients on arrival.
    """

    def __init__(
        self,
        num_nodes: int,
        dim: int,
        optimizer: SparseOptimizer = "adam",
        lr: float = 0.01,
        staleness: int = 0,
        seed: int = 0,
        node_type: NodeType | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (("num_nodes", num_nodes, 1), ("dim", dim, 1), ("staleness", staleness, 0)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
        check_choice("optimizer", optimizer, get_args(SparseOptimizer))
        if lr < 0:
            raise ValueError(f"lr must be at least 0, got {lr}.")
        self.num_nodes, self.dim, self.optimizer, self.lr = num_nodes, dim, optimizer, lr
        self.staleness, self.seed, self.node_type = staleness, seed, node_type
        self._names = ("weight", *_MOMENTS[optimizer])
        self._number = next(_creation)  # ranks update their embeddings in this order
        self._dtype = torch.get_default_dtype()
        # All rows, if they were changed or loaded; and in a run of several ranks, the rows that this rank owns.
        self._all: Rows | None = None
        self._local: Rows | None = None
        self._owners: EmbeddingRows | None = None
        self._missing_reason = ""
        self._changed = False  # in this run of several ranks
        self._reset()

    def _reset(self) -> None:
        self._gradients: list[tuple[Tensor, Tensor, bool]] = []
        self._pushes: deque[Future[None]] = deque()
        self._lock = Lock()
        self._idle = False  # this step's batch is a placeholder for a batch of other ranks, and is ignored

    def extra_repr(self) -> str:
        of = "" if self.node_type is None else f", node_type={self.node_type!r}"
        return f"{self.num_nodes}, {self.dim}, optimizer={self.optimizer!r}, lr={self.lr}, staleness={self.staleness}{of}"

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickles, without gradients to be applied; in the self-check, also without rows."""
        state = self.__dict__.copy()
        for name in ("_gradients", "_pushes", "_lock"):
            del state[name]
        if are_untrained():
            state.update(_all=None, _local=None, _owners=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()
        if self._local is not None and self._owners is None:  # from a pickle of one of several ranks
            self._missing_reason = _PICKLED if self._changed else self._missing_reason
            self._local, self._changed = None, False

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DistributedEmbedding:
        self._dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        if self._all is not None:
            self._all = self._all.map(lambda rows: rows.to(self._dtype))
        if self._local is not None:
            self._local = self._local.map(lambda rows: rows.to(self._dtype))
        return super()._apply(fn, recurse)  # type: ignore[return-value]

    @override
    def row_bytes(self, of: Shard | Cut) -> list[int]:
        own = self.node_type or of.types.input_type
        return [len(self._names) * self.dim * self._dtype.itemsize * (name == own) for name in of.types.nodes]

    # Reading ##################################################################

    @override
    def forward(self, ids: Tensor) -> Tensor:
        """Returns the rows of original ids, ``[n, D]``; see the class."""
        mode = active_mode()
        if mode is not None:  # calls and gradients are of local ids, and the rows have their placement
            of = placement_of(ids)
            with mode.pause():
                rows = self.forward(ids)
            if of is not None:
                place(rows, REPLICATED if of.rows is None else of.with_view(None))  # as parameters: owners sum all gradients
            return rows
        if ids.dim() != 1 or ids.dtype != torch.long:
            raise ValueError(f"ids must be int64 of shape [n], such as batch.n_id, got {ids.dtype} {list(ids.shape)}.")
        here = ids.cpu()
        low, high = (int(each) for each in here.aminmax()) if len(here) else (0, 0)
        if low < 0 or high >= self.num_nodes:
            raise ValueError(f"ids must be from 0 to {self.num_nodes - 1} (num_nodes={self.num_nodes}), got {low} to {high}.")
        if not self.training:
            self.flush()
        owned = self._owners is not None and self._owners.are_local(ids)
        rows = self._read(here, owned).to(ids.device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            # The rows of an idle rank have gradients of 0, which Adam would apply as an update.
            counts = not are_untrained() and not self._idle
            if self._owners is not None and not are_untrained():
                # All ranks step together, even if a loss does not need these rows, as a batch may have no nodes of the type.
                self._collect_of(here[:0], rows.detach()[:0].cpu(), owned)
            rows.register_post_accumulate_grad_hook(partial(self._collect, here if counts else here[:0], owned))
        return rows

    def _read(self, ids: Tensor, owned: bool) -> Tensor:
        if are_untrained():
            return self._initial(ids)
        if self._owners is not None:
            return self._read_local() if owned else self._owners.read(ids, self._read_local)
        self._check_here()
        return self._initial(ids) if self._all is None else self._all.weight[ids]

    def _read_local(self, rows: Tensor | None = None) -> Tensor:
        assert self._local is not None
        with self._lock:  # reads a row entirely before or after an update
            return self._local.weight.clone() if rows is None else self._local.weight[rows]

    def _check_here(self) -> None:
        """Raises RuntimeError if this process does not have the rows, or must not change them."""
        if self._missing_reason:
            raise RuntimeError(f"The rows of this DistributedEmbedding are not in this process: {self._missing_reason}")
        if num_ranks() > 1:
            raise RuntimeError(
                f"DistributedEmbedding on {num_ranks()} ranks needs a strategy of this package, which defines the owners of "
                'nodes. Use Trainer(strategy="sampling").'
            )

    def _initial(self, ids: Tensor) -> Tensor:
        """Returns the initial rows of these nodes, ``[n, D]``; never needed for all nodes at once."""
        # Nodes of two types with the same id have different initial rows.
        seed = self.seed if self.node_type is None else self.seed ^ zlib.crc32(self.node_type.encode()) << 30
        with torch.inference_mode(False):
            out = torch.empty(len(ids), self.dim, dtype=self._dtype)
            for some, into in zip(ids.split(_ROWS_AT_ONCE), out.split(_ROWS_AT_ONCE)):
                into.copy_(torch.from_numpy(_normal(seed, some.numpy(), self.dim)))
        return out

    def _new_rows(self, ids: Tensor) -> Rows:
        weight = self._initial(ids)
        return Rows(weight, tuple(torch.zeros_like(weight) for _ in self._names[1:]))

    # Learning #################################################################

    def _collect(self, ids: Tensor, owned: bool, rows: Tensor) -> None:
        """Store the gradient of a call's rows from a backward pass."""
        grad, rows.grad = rows.grad, None
        if are_untrained():
            return
        assert grad is not None
        self._collect_of(ids, grad.detach()[: len(ids)].cpu(), owned)

    def _collect_of(self, ids: Tensor, grads: Tensor, owned: bool) -> None:
        self._gradients.append((ids, grads, owned))
        _with_gradients.add(self)

    def step(self) -> None:
        """Apply the sparse optimizer once to the gradients since the last call; no effect without gradients.

        Called automatically after each step of a torch optimizer. Collective: all ranks must call it.
        """
        _with_gradients.discard(self)
        gradients, self._gradients = self._gradients, []
        if not gradients:
            return
        ids = torch.cat([ids for ids, _, _ in gradients])
        grads = torch.cat([grads for _, grads, _ in gradients])
        if self._owners is None:
            self._check_here()
            if self._all is None:
                self._all = self._new_rows(torch.arange(self.num_nodes))
            self._all.update(*sum_rows(ids, grads), self.lr)
            return
        self._all, self._changed = None, True
        only_local = all(owned for _, _, owned in gradients)  # the same on all ranks
        work = partial(self._push, self._owners, ids, grads, only_local, self.lr)
        self._pushes.append(self._owners.background.begin(work))
        self.flush(self.staleness)

    def _push(self, owners: EmbeddingRows, ids: Tensor, grads: Tensor, only_local: bool, lr: float) -> None:
        """Send gradients to their owners, and apply the gradients received for local rows."""
        assert self._local is not None
        if only_local:
            rows = torch.arange(len(self._local.weight))
            sums = grads.view(len(grads) // max(len(rows), 1), *self._local.weight.shape).sum(0)  # each call read all rows
        else:
            rows, sums = owners.sum(ids, grads)
        with self._lock:
            self._local.update(rows, sums, lr)

    def flush(self, under_way: int = 0) -> None:
        """Wait until all pushes of this rank and to this rank are applied, except the last `under_way` pushes."""
        while len(self._pushes) > under_way:
            self._pushes.popleft().result()

    # Ranks ####################################################################

    @override
    def check_fits(self, name: str, of: Shard | Cut) -> None:
        types = of.types
        of_types = f"node_type={self.node_type!r}, but the graph has "
        if types.is_hetero and self.node_type not in types.nodes:
            raise ValueError(
                f"'{name}' is a DistributedEmbedding with {of_types}node types {list(types.nodes)}. Set the type of its nodes: "
                f"DistributedEmbedding(..., node_type={next(iter(types.nodes))!r})."
            )
        if not types.is_hetero and self.node_type is not None:
            raise ValueError(f"'{name}' is a DistributedEmbedding with {of_types}no types. Remove node_type.")
        num_nodes = types.total(self.node_type or types.input_type)
        if self.num_nodes != num_nodes:
            of_type = "" if self.node_type is None else f" of type {self.node_type!r}"
            raise ValueError(
                f"'{name}' is a DistributedEmbedding of num_nodes={self.num_nodes}, but the graph has {num_nodes} "
                f"nodes{of_type}. Set num_nodes={num_nodes}."
            )

    @override
    def check_training(self, num_optimizers: int, precision: Precision | None) -> None:
        if num_optimizers > 1:
            raise ValueError(
                f"DistributedEmbedding does not support {num_optimizers} optimizers: it steps with the optimizer. Use one "
                "optimizer for all parameters."
            )
        if getattr(precision, "scaler", None) is not None:
            raise ValueError(
                "DistributedEmbedding does not support precision='16-mixed', which scales its gradients. Use "
                "precision='bf16-mixed' or 32."
            )

    @override
    def distribute(self, world: World, shard: Shard, before: Sequence[LearnedRows]) -> None:
        same = (each for each in before if isinstance(each, DistributedEmbedding) and each.node_type == self.node_type)
        owners = next((each._owners for each in same), None) or EmbeddingRows.from_shard(self.node_type, world, shard)
        lost = world.all_gather_object(bool(self._missing_reason))
        if any(lost):
            if lost[0]:
                raise RuntimeError(f"The rows of DistributedEmbedding are lost: {self._missing_reason or 'see rank 0'}")
            whole = self._all or self._new_rows(torch.arange(self.num_nodes if world.rank == 0 else 0))
            if world.rank:
                whole = whole.map(lambda rows: rows[:0])
            self._local = replace(whole.map(owners.scatter), step=world.broadcast_object(whole.step))
        else:
            ids = owners.local_ids
            self._local = self._new_rows(ids) if self._all is None else self._all.map(lambda rows: rows[ids])
        if world.rank and self._all is not None:
            self._all = None
            self._missing_reason = _ON_RANK_0
        self._owners = owners

    @override
    def begin_step(self, idle: bool) -> None:
        self._idle = idle and self._owners is not None

    @override
    def collect(self) -> None:
        if not self._changed:
            return
        self._changed = False
        whole = self._whole()
        self._all = whole if len(whole.weight) else None
        self._missing_reason = "" if len(whole.weight) else _ON_RANK_0

    @override
    def release(self) -> None:
        if self._owners is not None:
            self._owners.close()
        if self._changed:
            self._missing_reason = "training did not finish. Load a checkpoint."
        self._changed = False
        self._local = self._owners = None
        _with_gradients.discard(self)
        self._reset()

    # Checkpoints ##############################################################

    def _whole(self) -> Rows:
        """Returns the rows of all nodes in original order; with several ranks only on rank 0, none on other ranks."""
        self.flush()
        if self._owners is not None:
            assert self._local is not None
            return self._local.map(self._owners.gather)
        if self._all is None and not self._missing_reason:
            self._all = self._new_rows(torch.arange(self.num_nodes))
        if self._all is not None:
            return self._all
        if self._missing_reason != _ON_RANK_0:
            self._check_here()
        return self._new_rows(torch.arange(0))

    @override
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        whole = self._whole()
        destination.update({prefix + name: rows for name, rows in zip(self._names, (whole.weight, *whole.moments))})
        destination[f"{prefix}step"] = torch.tensor(whole.step)

    @override
    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        wanted = {prefix + name for name in (*self._names, "step")}
        missing_keys += sorted(wanted - state_dict.keys())
        unexpected_keys += sorted(key for key in state_dict if key.startswith(prefix) and key not in wanted)
        if prefix + "weight" not in state_dict:
            return
        shape = torch.Size((self.num_nodes, self.dim))
        found = {name: state_dict[prefix + name] for name in self._names if prefix + name in state_dict}
        for name, rows in found.items():
            if rows.shape != shape:
                hint = " It was saved on a rank other than 0, which has no rows." if len(rows) == 0 else ""
                error_msgs.append(f"{prefix}{name} is {list(rows.shape)}, but the embedding is {list(shape)}.{hint}")
                return
        self.flush()
        selected: Any = slice(None) if self._owners is None else self._owners.local_ids

        def copy_rows(rows: Tensor) -> Tensor:
            return rows.detach()[selected].to("cpu", self._dtype, copy=True)

        weight = copy_rows(found["weight"])
        moments = tuple(copy_rows(found[name]) if name in found else torch.zeros_like(weight) for name in self._names[1:])
        loaded = Rows(weight, moments, int(state_dict.get(f"{prefix}step", 0)))
        self._changed = self._owners is not None
        self._all, self._local = (None, loaded) if self._changed else (loaded, None)
        self._missing_reason = ""
        self._gradients = []


def _step_all(*_: Any) -> None:
    """Update the embeddings that have gradients, in the same order on all ranks."""
    for each in sorted(_with_gradients, key=lambda embedding: embedding._number):
        each.step()


# The only hook shared by plain loops, and Lightning's automatic and manual optimization.
register_optimizer_step_post_hook(_step_all)


# Initial rows #################################################################


def _random_bits(numbers: np.ndarray) -> np.ndarray:
    """Returns random bits that depend on each number alone: the finalizer of SplitMix64 (Steele et al., OOPSLA 2014)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _normal(seed: int, ids: np.ndarray, dim: int) -> np.ndarray:
    """Returns standard normal rows that depend on seed and id alone, float64 ``[n, D]``, by the Box-Muller method."""
    seed_bits = _random_bits(np.array([seed], np.int64).view(np.uint64))
    row_bits = _random_bits(ids.astype(np.uint64) ^ seed_bits)[:, None]
    bits = _random_bits(row_bits + np.arange(2 * dim, dtype=np.uint64))
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.sqrt(-2 * np.log(uniform[:, :dim])) * np.cos(2 * np.pi * uniform[:, dim:])
