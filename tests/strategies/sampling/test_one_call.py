"""Batches that compiled loops make in few calls, and steps that compute only the rows of their seeds, are those of single hops
and of PyG's own layers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from common import CLASSES, FEATURES, awkward_graph, build, quiet_trainer
from test_exchanges import assert_equal, cut_of, on_threads
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import trim_to_layer

from lightning_gnn import GraphDataModule, NodeClassifier, SamplingStrategy
from lightning_gnn.partition.layout import ONE_TYPE
from lightning_gnn.strategies.sampling import loops, one_call
from lightning_gnn.strategies.sampling.binding import BatchBinding
from lightning_gnn.strategies.sampling.graph_store import GraphStore
from lightning_gnn.strategies.sampling.hops import Numbering
from lightning_gnn.strategies.sampling.loader import BatchMaker
from lightning_gnn.strategies.sampling.one_call import Buffers

# Batches ######################################################################


def dense_graph(nodes: int = 300, edges: int = 9000) -> Data:
    numbers = torch.Generator().manual_seed(3)
    graph = Data(
        x=torch.randn(nodes, 5, generator=numbers),
        y=torch.randint(0, 3, (nodes,), generator=numbers),
        edge_index=torch.randint(0, nodes, (2, edges), generator=numbers),
        strength=torch.rand(edges, 2, generator=numbers),
    )
    graph.train_mask = torch.rand(nodes, generator=numbers) < 0.5
    return graph


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("fanouts", "replace", "dense"),
    [([3, 2], False, True), ([40, 35], False, True), ([-1, 2], False, False), ([4, 33], True, False), ([0, 3], False, True)],
)
def test_all_hops_in_one_call_draw_what_single_hops_draw(tmp_path, parts, fanouts, replace, dense):
    """The seeds of later batches are more, so that buffers grow, then fewer."""
    cut = cut_of(dense_graph(), parts, tmp_path)

    def of_rank(rank: int, world: Any, near: Sequence[int]) -> None:
        store = GraphStore(cut, world, near)
        makers = [BatchMaker(store, {ONE_TYPE: fanouts}, replace) for _ in range(2)]
        numbering = Numbering(store.types.total(ONE_TYPE[0]), dense)
        makers[0]._hop_sampler = store.hop_sampler(fanouts, replace, numbering)
        makers[1]._hop_sampler = None
        for batch, count in enumerate((2, 60, 7, 150, 1)):
            seeds = torch.randperm(300, generator=torch.Generator().manual_seed(batch))[:count]
            one, other = (maker.make(seeds, [batch + 10 * rank] * world.size) for maker in makers)
            assert_equal(one.to_dict(), other.to_dict())

    on_threads([list(range(parts))], of_rank)


def test_a_batch_takes_three_calls(tmp_path, monkeypatch):
    """Single hops, and rows of each attribute, took a call and several tensors each."""
    calls = list[str]()
    for name in ("sample_hops", "gather", "draw_uniform", "take", "number_in_array"):
        loop = getattr(loops, name)
        assert loop.targetoptions["nogil"]
        monkeypatch.setattr(loops, name, lambda *args, loop=loop, name=name: (calls.append(name), loop(*args))[1])
    cut = cut_of(dense_graph(), 1, tmp_path)
    [maker], _ = on_threads([[0]], lambda rank, world, near: BatchMaker(GraphStore(cut, world, near), {ONE_TYPE: [3, 2]}))
    maker.make(torch.arange(20), [1])
    calls.clear()
    maker.make(torch.arange(20), [2])
    assert calls == ["number_in_array", "sample_hops", "gather", "gather"]  # the first numbers the seeds


def test_memory_is_used_again_only_after_the_tensors_over_it(monkeypatch):
    monkeypatch.setattr(one_call, "_SMALL", 0)
    buffers, like = Buffers(), torch.empty(0, 4)
    first = buffers.empty(like, 100, 4)
    address, view = first.data_ptr(), first[3:5]
    view.fill_(7)
    del first
    second = buffers.empty(like, 100, 4)
    assert second.data_ptr() != address and second.shape == (100, 4)
    second.fill_(0)
    assert bool((view == 7).all())
    del view
    third = buffers.empty(like.to(torch.bfloat16), 190, 4)
    assert third.data_ptr() == address and third.dtype == torch.bfloat16
    del second, third
    assert buffers.empty(like, 5000, 4).numel() == 20000 and len(buffers._blocks) == 2


@pytest.mark.parametrize("source", [torch.randn(9, 3).t().contiguous().t(), torch.rand(9) < 0.5, torch.empty(9, 0)])
def test_rows_of_any_layout_are_gathered(source):
    ids = torch.tensor([8, 0, 8, 3])
    [found] = Buffers().gather([(source, ids)])
    assert_equal(found, source[ids])
    [none] = Buffers().gather([(source, ids[:0])])
    assert_equal(none, source[:0])


# Steps ########################################################################


class Trimmed(torch.nn.Module):
    """A model that trims its batches itself, as PyG documents."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convs = torch.nn.ModuleList([SAGEConv(FEATURES, 8), SAGEConv(8, CLASSES)])
        self.out_channels = CLASSES

    def forward(self, x: Any, edge_index: Any, batch: Any = None) -> Any:
        for layer, conv in enumerate(self.convs):
            if batch is not None:
                x, edge_index, _ = trim_to_layer(layer, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index)
            x = conv(x, edge_index).relu()
        return x


class OfSeeds(NodeClassifier):
    """A module with a step of its own, which gets all rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.model(batch.x, batch.edge_index, batch) if isinstance(self.model, Trimmed) else self(batch)
        loss = torch.nn.functional.cross_entropy(rows[: batch.batch_size], batch.y[: batch.batch_size])
        return loss if isinstance(self.model, Trimmed) else loss + rows.square().mean()


def trained(rank: int, size: int, model: str, own_step: bool, by_kernels: bool) -> dict[str, Any]:
    kind = OfSeeds if own_step else NodeClassifier
    built = Trimmed() if model == "trimmed" else build(model)
    # Adam would enlarge the rounding of gradients that are 0, as of a bias before BatchNorm.
    module = kind(built, num_classes=CLASSES, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.5)).double()
    seen = dict[str, Any](kernels=set[str](), rows=0)
    convs = [part for part in module.modules() if hasattr(part, "propagate")]

    class Watch(SamplingStrategy):
        def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            out = super().training_step(batch, *args, **kwargs)
            seen["kernels"] |= {type(conv).__name__ for conv in convs if "propagate" in vars(conv) or "forward" in vars(conv)}
            return out

    count = convs[0].register_forward_hook(lambda conv, given, out: seen.update(rows=seen["rows"] + len(out)))
    patch = nullcontext() if by_kernels else pytest.MonkeyPatch.context()
    with patch as patched:
        if patched is not None:
            patched.setattr(BatchBinding, "begin", lambda self, batch: None)
        options: dict[str, Any] = {"max_epochs": 3, "limit_val_batches": 0, "num_sanity_val_steps": 0}
        trainer = quiet_trainer(Watch([3, 2], batch_size=6, self_check=False), size, False, **options)
        trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    count.remove()
    assert not any("forward" in vars(part) for part in module.modules())
    return {**seen, "weights": {name: value.detach().clone() for name, value in module.named_parameters()}}


TRIMMED = ("sage", "sage_sum", "sage_max", "gin", "gat", "gatv2", "gat_edges")
WHOLE = ("gcn", "gcn_batch_norm", "gin_batch_norm", "pna", "transformer", "graphconv", "own_mean", "relations")


@pytest.mark.parametrize(("size", "model"), [(1, model) for model in (*TRIMMED, *WHOLE)] + [(2, "sage"), (2, "gat")])
def test_steps_by_kernels_are_those_of_pyg(ranks, size, model):
    ours, theirs = (ranks.run(size, trained, model, False, by_kernels) for by_kernels in (True, False))
    for one, other in zip(ours, theirs):
        assert one["weights"].keys() == other["weights"].keys()
        for name, value in one["weights"].items():
            torch.testing.assert_close(value, other["weights"][name], rtol=1e-9, atol=1e-11)
        assert one["kernels"] or model in ("own_mean", "relations")
        assert not other["kernels"]
        assert (one["rows"] < other["rows"]) == (model in TRIMMED), "trimmed"


@pytest.mark.parametrize("model", ["sage", "gcn", "trimmed"])
def test_steps_of_users_get_all_rows(ranks, model):
    [ours], [theirs] = (ranks.run(1, trained, model, True, by_kernels) for by_kernels in (True, False))
    assert ours["rows"] == theirs["rows"] and ours["kernels"]
    for name, value in ours["weights"].items():
        torch.testing.assert_close(value, theirs["weights"][name], rtol=1e-9, atol=1e-11)
