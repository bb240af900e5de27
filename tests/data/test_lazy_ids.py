"""Ids of edges are PyG's int64 to whoever reads them, and are kept as they are stored until then."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning as L
import pytest
import torch
from common import CLASSES, UserModule, awkward_graph, build, examples, quiet_trainer
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.utils import add_self_loops, coalesce, degree, to_undirected

from lightning_gnn import GraphDataModule, NodeClassifier, local_rows
from lightning_gnn.data import lazy_ids
from lightning_gnn.data.lazy_ids import LazyIds, kept_as, plain_ids, stored_ids
from lightning_gnn.nn.edges import SplitEdges, Sum

OPERATIONS = [
    lambda ids: ids[0],
    lambda ids: torch.stack(list(ids)),
    lambda ids: ids + 1,
    lambda ids: ids.t().contiguous(),
    lambda ids: torch.zeros(8)[ids],
    lambda ids: torch.from_numpy(ids.numpy()),
    lambda ids: torch.tensor(ids.tolist()),
    lambda ids: ids.to(torch.int32),
    lambda ids: ids.to("cpu", copy=True),
    lambda ids: ids.to(torch.long, False, True),
    lambda ids: degree(ids[1], 8),
    lambda ids: to_undirected(ids),
    lambda ids: add_self_loops(ids, num_nodes=8)[0],
    lambda ids: coalesce(ids),
    lambda ids: EdgeIndex(ids, sparse_size=(8, 8)).sort_by("col")[0].as_tensor(),
    lambda ids: Data(edge_index=ids, num_nodes=8).subgraph(torch.arange(4)).edge_index,
    lambda ids: Batch.from_data_list([Data(edge_index=ids, num_nodes=8)] * 2).edge_index,
    lambda ids: torch.sparse_coo_tensor(ids, torch.ones(ids.size(1)), (8, 8)).to_dense(),
    lambda ids: torch.from_dlpack(ids),
    lambda ids: torch.add(ids, 1, out=torch.empty(0, dtype=torch.long)),
    lambda ids: ids.new_ones(2) + ids.max(),
    lambda ids: ids == ids.flip(0),
    lambda ids: pickle.loads(pickle.dumps(ids)),
    lambda ids: copy.deepcopy(ids),
    lambda ids: torch.vmap(lambda row: row.sum())(ids),
]


def ids() -> LazyIds:
    return LazyIds(torch.tensor([[0, 1, 2, 7], [1, 1, 0, 3]], dtype=torch.int32), "edge_index")


@examples(50)
@given(st.sampled_from(OPERATIONS), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1))
def test_whatever_reads_them_gets_what_pyg_has(operation, edges):
    plain = torch.tensor(edges).t().contiguous()
    lazy = LazyIds(plain.int(), "edge_index")
    found, expected = operation(lazy), operation(plain)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_their_shape_and_device_are_known_without_reading_them():
    lazy, plain = ids(), ids().ids.long()
    for name in (
        "shape",
        "ndim",
        "dtype",
        "device",
        "layout",
        "is_cuda",
        "is_sparse",
        "nbytes",
        "requires_grad",
        "grad",
    ):
        assert getattr(lazy, name) == getattr(plain, name), name
    assert (lazy.size(1), lazy.dim(), lazy.numel(), len(lazy), lazy.stride()) == (4, 2, 8, 2, plain.stride())
    assert isinstance(lazy, torch.Tensor) and isinstance(lazy, torch.LongTensor) and hash(lazy) == id(lazy)
    assert not lazy.were_read
    batch = Data(edge_index=lazy)
    assert batch.to("cpu").edge_index is lazy and batch.num_edges == 4 and not lazy.were_read
    moved = lazy.to("meta", non_blocking=True)
    assert isinstance(moved, LazyIds) and moved.device.type == "meta" and moved.ids.dtype == torch.int32


@pytest.mark.parametrize("read", [False, True])
def test_where_nothing_changes_they_are_themselves(read):
    """As tensors are; layers know their edges by identity."""
    lazy = ids()
    if read:
        lazy[0]
    for same in (lazy.to("cpu"), lazy.cpu(), lazy.long(), lazy.contiguous(), lazy.to(torch.long), lazy.to(lazy)):
        assert same is lazy
    assert Data(edge_index=lazy).to("cpu").edge_index is lazy
    assert lazy.add_(0) is lazy


def test_what_changes_them_in_place_is_seen():
    lazy = ids()
    assert lazy._version == 0 and stored_ids(lazy).dtype == torch.int32
    with torch.inference_mode():  # evaluation first
        lazy[0].sum()
    assert lazy.were_read and not lazy.is_inference() and lazy._version == 0
    lazy[0, 0] = 5
    assert lazy._version == 1 and lazy[0, 0] == 5 and stored_ids(lazy)[0, 0] == 5 and plain_ids(lazy)[0, 0] == 5


def test_what_is_read_once_is_not_kept():
    lazy = ids()
    assert plain_ids(lazy).dtype == torch.long and plain_ids(lazy) is not plain_ids(lazy)
    made = kept_as(plain_ids(lazy).flip(0), lazy)
    assert isinstance(made, LazyIds) and torch.equal(made.ids.flip(0), lazy.ids) and not lazy.were_read
    plain = plain_ids(lazy)
    assert kept_as(plain, plain) is plain and plain_ids(plain) is plain and stored_ids(plain) is plain


def test_without_room_the_error_says_what_they_take(monkeypatch):
    monkeypatch.setattr(lazy_ids, "available_bytes", lambda: 63)
    with pytest.raises(
        MemoryError, match=r"batch.edge_index as int64 takes 6.4e-08 GB on this rank, and 6.3e-08 GB are"
    ):
        ids()[0]
    monkeypatch.setattr(lazy_ids, "available_bytes", lambda: 64)
    ids()[0]


class Seen(L.Callback):
    """Which ids of the batch were read, after each step."""

    def __init__(self) -> None:
        self.read: list[tuple[bool, bool]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(batch.edge_index, LazyIds) and isinstance(batch.e_id, LazyIds)
        self.read.append((batch.edge_index.were_read, batch.e_id.were_read))

    def on_test_batch_end(self, *args: Any) -> None:
        self.on_train_batch_end(*args[:5])


class Lists(L.Callback):
    """The edges that were made of the batch's and are kept."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        made = trainer.strategy.steps.binding.context.cache.edge_values()
        self.kept = [
            type(each) is LazyIds and not each.were_read for pair in made if type(pair) is tuple for each in pair
        ]


def lists(rank: int, world_size: int) -> list[bool]:
    found = Lists()
    trainer = quiet_trainer("dgcl", world_size, callbacks=[found], max_epochs=1)
    trainer.fit(UserModule(build("gat")).double(), datamodule=GraphDataModule(awkward_graph()))
    return found.kept


def test_edges_with_self_loops_are_as_short(ranks):
    assert ranks.run(2, lists) == [[True], [True]]


class Matrices(L.Callback):
    """Bytes of an edge that this rank's matrices have had, without rows' begins."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        kept = trainer.strategy.steps.binding.context.cache.edge_values()
        made = [each.edges if isinstance(each, Sum) else each for each in kept]
        made = [each for each in made if isinstance(each, SplitEdges)]
        (edges,) = {id(each): each for each in made}.values()
        with local_rows():
            parts = [csr for half in (edges.owned, edges.halo) for csr in (half, half.transpose(in_list=False))]
            listed = [csr.edge for csr in parts if csr.edge is not None]
            self.bytes = sum(ids.nbytes for ids in [*(csr.indices for csr in parts), *listed]) / int(
                edges.in_degree.sum()
            )


def matrices(rank: int, world_size: int, model: str, weighted: bool) -> float:
    found, graph = Matrices(), awkward_graph()
    if not weighted:
        del graph.edge_weight
    trainer = quiet_trainer("dgcl", world_size, callbacks=[found], max_epochs=1)
    trainer.fit(NodeClassifier(build(model), num_classes=CLASSES).double(), datamodule=GraphDataModule(graph))
    return float(found.bytes)


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "sage_max"])
def test_sums_without_weights_keep_eight_bytes_an_edge(ranks, model):
    """Columns both ways, and no places in the list."""
    assert ranks.run(2, matrices, model, False) == [8.0, 8.0]


def test_sums_with_weights_keep_places_in_the_list(ranks):
    assert ranks.run(2, matrices, "graphconv", True) == [16.0, 16.0]


def what_is_read(rank: int, world_size: int, strategy: str, model: str) -> set[tuple[bool, bool]]:
    seen = Seen()
    trainer = quiet_trainer(strategy, world_size, callbacks=[seen])
    module, data = UserModule(build(model)).double(), GraphDataModule(awkward_graph())
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    assert len(seen.read) == 4
    return set(seen.read)


@pytest.mark.parametrize("strategy", ["dgcl", "cover", "spmm_15d", "vertex_cut"])
def test_layers_of_our_kernels_read_none(ranks, strategy):
    for model in ("gcn", "sage", "gin", "gat", "sage_max", "pna"):
        assert ranks.run(2, what_is_read, strategy, model) == [{(False, False)}] * 2, model


def test_products_in_two_dimensions_read_none(ranks):
    assert ranks.run(4, what_is_read, "spmm_2d", "gcn") == [{(False, False)}] * 4


def test_pygs_own_messages_read_edges_and_no_ids_of_edges(ranks):
    assert ranks.run(2, what_is_read, "dgcl", "own") == [{(True, False)}] * 2
