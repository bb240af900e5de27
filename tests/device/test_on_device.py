"""What goes wrong on a device and not on the CPU."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import on_device
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import FEATURES, assert_same, awkward_graph, build, campaign, quiet_trainer, single, three_nodes, train
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

from lightning_gnn import (
    ClusterAllReduceStrategy,
    DGCLStrategy,
    GraphDataModule,
    LinkPredictor,
    SamplingStrategy,
    local_rows,
)
from lightning_gnn.devices import backend_of, free_bytes

ranks = on_device.ranks

ROUNDED: dict[str, float] = {"rtol": 1e-11, "atol": 1e-15}
"""Of layers whose sums PyG adds up itself: on CUDA, atomically, in another order each time."""


class Dropped(torch.nn.Module):
    """Dropout inside the first layer, whose input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = DroppedConv(FEATURES, 8), GCNConv(8, 5)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class DroppedConv(GCNConv):
    def message(self, x_j: torch.Tensor, edge_weight: Any) -> torch.Tensor:
        return F.dropout(super().message(x_j, edge_weight), 0.5)


class Module(L.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.found = model, []

    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        out = self.model(batch.x, batch.edge_index)
        return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask], ignore_index=-1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.found.append([each.grad.cpu().clone() for each in self.parameters()])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def gradients(rank: int, size: int, recompute: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    module = Module(Dropped()).double()
    trainer = quiet_trainer(DGCLStrategy(timeout=60, checkpoint_convs=recompute), size, max_epochs=2)
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    return [each for step in module.found for each in step]


def test_recomputed_layers_draw_what_they_drew(ranks):
    plain, recomputed = (ranks.run(2, gradients, recompute)[0] for recompute in (False, True))
    torch.testing.assert_close(recomputed, plain, **ROUNDED)


def largest(rank: int, size: int, models: list[str], loops: bool) -> dict[str, float]:
    """Returns the largest tensor of a training step, in numbers per edge."""
    import emulated

    from lightning_gnn.kernels.run import BACKENDS

    class Largest(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            emulated.made["largest"] = 0

        def on_before_optimizer_step(self, *_: Any) -> None:
            self.found = emulated.made["largest"]

    graph, edges = awkward_graph(), 8_000
    found: dict[str, float] = {}
    graph.edge_index = torch.randint(0, 60, (2, edges))
    del graph.edge_weight, graph.edge_attr
    kept = BACKENDS["emulated"]
    if not loops:
        del BACKENDS["emulated"]
    for model in models:
        callback = Largest()
        trainer = quiet_trainer("dgcl", size, max_epochs=2, callbacks=[callback])
        trainer.fit(Module(build(model)).double(), datamodule=GraphDataModule(graph))
        found[model] = callback.found / 8 / edges
    BACKENDS["emulated"] = kept
    return found


def test_no_tensor_has_a_row_per_edge(ranks):
    """There are numbers of each edge and head; layers are 16 columns wide, or 4 heads of those."""
    models = ["gcn", "sage_max", "gat", "gatv2", "transformer", "pna"]
    [found] = ranks.run(1, largest, models, True)
    assert max(found.values()) <= 4, found
    [without] = ranks.run(1, largest, ["gat", "pna"], False)
    assert min(without.values()) > 12, without


class Summed(Module):
    def training_step(self, batch: Data, batch_idx: int) -> torch.Tensor:
        self.count = torch.ones(len(batch.x), 1).sum(0)
        with local_rows():
            self.reduced = self.trainer.strategy.reduce(torch.tensor(2.0), reduce_op="sum")
        self.gathered = self.all_gather(torch.tensor([1.0]))
        return super().training_step(batch, batch_idx)


def sums(rank: int, size: int) -> Any:
    module = Summed(build("gcn")).double()
    trainer = quiet_trainer("dgcl", size, max_epochs=1)
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    return module.count, module.reduced, module.gathered


def test_tensors_of_the_cpu_are_summed(ranks):
    for count, reduced, gathered in ranks.run(2, sums):
        assert count.tolist() == [60.0] and float(reduced) == 4 and gathered.flatten().tolist() == [1.0, 1.0]


def resumed(rank: int, size: int, folder: Path) -> Any:
    weights = []
    for stop in (False, True):
        torch.manual_seed(3)
        module, data = Module(Dropped()).double(), GraphDataModule(awkward_graph())
        if stop:
            keep = ModelCheckpoint(folder, "half", save_weights_only=False)
            trainer = quiet_trainer("dgcl", size, max_epochs=2, enable_checkpointing=True, callbacks=[keep])
            trainer.fit(module, datamodule=data)
            torch.manual_seed(8)  # another process starts elsewhere
        trainer = quiet_trainer("dgcl", size, max_epochs=4)
        trainer.fit(module, datamodule=data, ckpt_path=folder / "half.ckpt" if stop else None)
        weights.append([each.detach().cpu().clone() for each in module.parameters()])
    return weights


def test_resumed_runs_draw_what_would_have_been_drawn(ranks, tmp_path):
    for through, again in ranks.run(2, resumed, tmp_path):
        torch.testing.assert_close(again, through, **ROUNDED)


def in_a_group_of_the_users(rank: int, size: int) -> Any:
    import queued

    queued.counts["lazy connections"] = 0
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0)
    dist.init_process_group("queued", store=store, rank=rank, world_size=size)  # no device_id
    found = train(rank, size, three_nodes(), "gcn")
    assert queued.counts["lazy connections"]
    return found


def test_a_group_made_without_a_device_and_a_rank_without_rows(ranks):
    """NCCL connects in the first operation, to which all ranks must come: the first exchange has nothing for some."""
    for each in ranks.run(4, in_a_group_of_the_users):
        assert_same(each, single(three_nodes(), "gcn"), 1e-9, 1e-11)


def on_two_machines(rank: int, size: int, options: dict[str, Any]) -> Any:
    import queued

    from lightning_gnn.comm import group

    machine, local = divmod(rank, size // 2)
    os.environ.update(NODE_RANK=str(machine), LOCAL_RANK=str(local))
    queued.counts.clear()
    given, init = [], dist.init_process_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "machine_key", lambda: f"machine {machine}")
        patch.setattr(
            dist, "init_process_group", lambda *args, **kw: [given.append(kw["device_id"]), init(*args, **kw)]
        )
        data, trainer = {"partition": np.array([2, 0, 3])}, {"num_nodes": 2}
        found = train(rank, size // 2, three_nodes(), "gcn", options=options, data=data, trainer=trainer)
    assert given and all(each.type == "emulated" for each in given)
    assert not queued.counts["lazy connections"]
    return found, queued.counts["batches"]


@pytest.mark.parametrize("options", [{}, {"plan": "spst", "topology": "dgx1x2"}], ids=["direct", "planned"])
def test_two_machines_of_two_devices(ranks, options):
    """Groups are connected when they are made; one rank of four has no node, and nothing to send."""
    found = ranks.run(4, on_two_machines, options)
    assert [bool(batches) for _, batches in found] == [True, False, True, True]
    for each, _ in found:
        assert_same(each, single(three_nodes(), "gcn"), 1e-9, 1e-11)


def memory(rank: int, size: int) -> None:
    import emulated

    device = torch.device("emulated", 0)
    torch.emulated.memory_reserved = lambda device=None: 500
    torch.emulated.memory_allocated = lambda device=None: 200
    assert free_bytes(device) == emulated.MEMORY + 300
    torch.emulated.memory_reserved = torch.emulated.memory_allocated = lambda device=None: 0


def test_what_the_allocator_keeps_is_free(ranks):
    ranks.run(1, memory)


def on_cpu_and_device(rank: int, size: int) -> Any:
    from lightning.pytorch.accelerators import CPUAccelerator
    from test_links import graph_with_links

    torch.manual_seed(3)
    module, found = LinkPredictor(build("sage"), eval_negatives=9, filtered=True).double(), []
    for accelerator in (CPUAccelerator(), "emulated"):
        trainer = quiet_trainer("dgcl", size, accelerator=accelerator)
        found += trainer.test(module, datamodule=GraphDataModule(graph_with_links()), verbose=False)
    return found, {key[1].type for key in module._known_edges}


def test_what_a_module_keeps_is_of_its_device(ranks):
    """LinkPredictor keeps which pairs are known, for a trainer on the CPU and then for one on the device."""
    for (there, here), kinds in ranks.run(2, on_cpu_and_device):
        assert here == pytest.approx(there) and kinds == {"cpu", "emulated"}


def test_backends():
    assert backend_of(torch.device("cpu")) == "gloo" and backend_of(torch.device("cuda", 1)) == "nccl"
    for kind in ("mps", "meta"):
        with pytest.raises(ValueError, match=f"Ranks on {kind} devices cannot exchange tensors"):
            backend_of(torch.device(kind))


class Hooked(Module):
    """Its hook sees batches before they are moved."""

    def on_before_batch_transfer(self, batch: Data, dataloader_idx: int) -> Data:
        assert batch.x.device.type == "cpu"
        return batch


@dataclass
class Taken:
    """What became of the batches of a training epoch: threads that pinned and copied them, copies that somebody waited for, and
    tensors copied on streams beside the device's own, and kept for that."""

    pinned_by: list[str] = field(default_factory=list)
    copied_by: list[str] = field(default_factory=list)
    waited_for: int = 0
    tensors: Counter[str] = field(default_factory=Counter)
    found: list[torch.Tensor] = field(default_factory=list)


SAMPLED = {"num_neighbors": [3, 3], "batch_size": 8}


def taken(rank: int, size: int, kind: type[Module], strategy: Any, pins: bool = True) -> Taken:
    import emulated

    from lightning_gnn.data import ahead

    seen, known_by = Taken(), "batch_size" if isinstance(strategy, SamplingStrategy) else "num_owned"

    def pin(self: Data) -> Data:
        seen.pinned_by.append(threading.current_thread().name)
        return self

    def move(self: Data, device: Any, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Data:
        if known_by in self and torch.device(device).type != "cpu" and self.n_id.device.type == "cpu":
            seen.copied_by.append(threading.current_thread().name)
            seen.waited_for += not non_blocking
        return to(self, device, *args, non_blocking=non_blocking, **kwargs)

    to = Data.to
    emulated.Stream.counts.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Data, "pin_memory", pin)
        patch.setattr(Data, "to", move)
        patch.setattr(ahead, "can_pin", lambda device: pins and device.type != "cpu")
        trainer = quiet_trainer(strategy, size, max_epochs=1, limit_val_batches=0, num_sanity_val_steps=0)
        torch.manual_seed(4)
        module = kind(build("sage")).double()
        trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    return replace(seen, tensors=Counter(emulated.Stream.counts), found=module.found)


def test_batches_arrive_while_the_device_computes(ranks):
    """Samplers pin and copy them, on streams of theirs; the device's own stream waits for the copy, and no host."""
    strategy = SamplingStrategy(**SAMPLED, timeout=60)
    for seen, without in zip(ranks.run(2, taken, Module, strategy), ranks.run(2, taken, Module, strategy, False)):
        assert len(seen.pinned_by) == 2 and seen.copied_by == seen.pinned_by and not seen.waited_for
        assert all(name.startswith("lightning_gnn sampler") for name in seen.pinned_by)
        assert seen.tensors["copied"] >= 2 * 3 and seen.tensors["recorded"] == seen.tensors["copied"]
        assert not without.pinned_by and set(without.copied_by) == {"MainThread"} and not without.tensors
        assert len(seen.found) == 2
        torch.testing.assert_close(seen.found, without.found, **ROUNDED)


def test_a_hook_of_the_user_before_the_copy_gets_batches_on_the_cpu(ranks):
    everyone = ranks.run(2, taken, Hooked, SamplingStrategy(**SAMPLED, timeout=60))
    for seen in [*everyone, *ranks.run(1, taken, Hooked, ClusterAllReduceStrategy(num_clusters=2, timeout=60))]:
        assert not seen.pinned_by and seen.copied_by == ["MainThread"] * 2 and not seen.tensors


@pytest.mark.parametrize("size", [1, *campaign(2)])
def test_clusters_arrive_while_the_device_computes(ranks, size):
    """A thread pins and copies the next one while this one is trained on; what is learnt is the same."""
    strategy = ClusterAllReduceStrategy(num_clusters=4, timeout=60)
    for seen, without in zip(ranks.run(size, taken, Module, strategy), ranks.run(size, taken, Module, strategy, False)):
        assert seen.pinned_by == seen.copied_by == ["lightning_gnn clusters"] * (4 // size) and not seen.waited_for
        assert seen.tensors["copied"] >= 3 * len(seen.found) and seen.tensors["recorded"] == seen.tensors["copied"]
        assert not without.pinned_by and set(without.copied_by) == {"MainThread"} and not without.tensors
        assert len(seen.found) == 4 // size
        torch.testing.assert_close(seen.found, without.found, **ROUNDED)


class Summing(Module):
    """Notes what devices have summed until each step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        import queued

        super().on_before_optimizer_step(optimizer)
        self.sums = [*getattr(self, "sums", []), queued.counts["allreduce"]]


def averaged(rank: int, size: int, average: str) -> Any:
    import queued

    torch.manual_seed(4)
    module = Summing(build("sage")).double()
    queued.counts["allreduce"] = 0
    strategy = ClusterAllReduceStrategy(2, num_clusters=8, average=average, timeout=60)
    trainer = quiet_trainer(strategy, size, max_epochs=1, limit_val_batches=0, num_sanity_val_steps=0)
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    return module.sums, [each.detach().cpu() for each in module.parameters()], module.found


@pytest.mark.parametrize("average", ["gradients", *campaign("parameters")])
def test_workers_in_lockstep_average_over_the_devices_group(ranks, average):
    """Every second step, and in no other; as NCCL would, not over the CPU."""
    everyone = ranks.run(2, averaged, average)
    for sums, *_ in everyone:
        assert [after - before for before, after in itertools.pairwise(sums)] == [1, 0, 1]
    one, other = ((weights, gradients) for _, weights, gradients in everyone)
    if average == "gradients":
        for step in (1, 3):
            torch.testing.assert_close(one[1][step], other[1][step], rtol=0, atol=0)
        assert not torch.equal(one[1][0][0], other[1][0][0])
