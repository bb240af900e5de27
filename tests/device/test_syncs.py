"""How often the host waits for its device in a training step."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import emulated
import lightning as L
import on_device
import pytest
import torch
from common import CLASSES, awkward_graph, build, quiet_trainer

from lightning_gnn import (
    CachedVertexCutStrategy,
    ClusterAllReduceStrategy,
    GossipStrategy,
    GraphDataModule,
    NodeClassifier,
)
from lightning_gnn.devices import copy_to_host

ranks = on_device.ranks


class Steps(L.Callback):
    """Records the waits of the third step."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self.open = emulated.recorded()
            self.open.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            self.open.__exit__(None, None, None)
            self.found = Counter(emulated.syncs)


class FromBatchOn(Steps):
    """Records the waits from the end of the second step to the end of the third, with those for its batch."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        pass

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        super().on_train_batch_end(trainer)
        super().on_train_batch_start(trainer)


def waits(rank: int, size: int, model: str, strategy: Any, graph: Any = None, steps: Any = None) -> dict[str, int]:
    torch.manual_seed(1)
    module = NodeClassifier(build(model), num_classes=CLASSES).double()
    steps = steps or Steps()
    trainer = quiet_trainer(
        strategy, size, False, max_epochs=4, limit_val_batches=0, num_sanity_val_steps=0, callbacks=[steps]
    )
    trainer.fit(module, datamodule=GraphDataModule(graph or awkward_graph()))
    return {f"{what} in {where}": count for (what, where), count in steps.found.items()}


@pytest.mark.parametrize(
    ("model", "strategy"),
    [("gcn_batch_norm", "dgcl"), ("pna", "dgcl"), ("sage_graph_norm", "dgcl"), ("gcn", "spmm_1d")],
)
def test_a_step_waits_once(ranks, model, strategy):
    """For the values that it logs."""
    for found in ranks.run(2, waits, model, strategy):
        assert sum(found.values()) == 1 and "devices.py" in next(iter(found)), found


def test_a_message_that_data_decide_waits_once(ranks):
    """Two layers' partial sums or rows, there and back; and the one of every step."""
    for found in ranks.run(2, waits, "gcn", CachedVertexCutStrategy(cache_within_hosts=True)):
        assert sum(count for where, count in found.items() if "strategies/vertex_cut/cache.py" in where) == 4, found
        assert sum(found.values()) == 5, found


@pytest.mark.parametrize("kind", [GossipStrategy, ClusterAllReduceStrategy])
def test_a_batch_of_a_cluster_waits_for_its_labelled_nodes(ranks, kind):
    """Where they are, how many, and how many of the worker's: three times. Averages in lockstep add nothing, those with one other
    worker the copy to the host."""
    for found in ranks.run(2, waits, "sage", kind(1, num_clusters=12, timeout=60)):
        copied = sum(count for where, count in found.items() if "devices.py" in where)
        assert sum(found.values()) - copied == 3, found
        assert copied == 0 or (copied == 1 and kind is GossipStrategy), found


def meeting(rank: int, size: int, through_host: bool) -> list[int]:
    from lightning_gnn.strategies.gossip.averaging import Averages

    found = []
    for gradients in (False, True):
        torch.manual_seed(2)
        here = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        here(torch.ones(5, 3))[:, 0].sum().backward()
        there = copy.deepcopy(here).to("emulated")
        for own, other in zip(here.parameters(), there.parameters()):
            other.grad = own.grad.to("emulated")
        here[0].bias.grad = there[0].bias.grad = None
        averages, alone = Averages(there, gradients, through_host), Averages(here, gradients, True)
        with emulated.recorded() as syncs:
            vector = averages.vector()
            found.append(sum(syncs.values()))
            averages.take(vector * 2)
            found.append(sum(syncs.values()) - found[-1])
        expected = alone.vector()
        torch.testing.assert_close(vector.cpu(), expected, rtol=0, atol=0)
        alone.take(expected * 2)
        for own, other in zip(here.parameters(), there.parameters()):
            torch.testing.assert_close(other.detach().cpu(), own.detach(), rtol=0, atol=0)
            assert (other.grad is None and own.grad is None) or torch.equal(other.grad.cpu(), own.grad)
    return found


def test_a_meeting_waits_once(ranks):
    """For the copy of all values to the host, and once more for each gradient that this worker has not: whether others have it.
    Between devices there is nothing else to wait for."""
    assert ranks.run(1, meeting, True)[0] == [1, 0, 1, 1]
    assert ranks.run(1, meeting, False)[0] == [0, 0, 0, 1]


def timed(rank: int, size: int) -> float:
    from lightning_gnn.comm.traffic import Meter, Moment

    device, meter = torch.device("emulated", 0), Meter()
    with emulated.recorded() as syncs:
        began = Moment.now(device)
        began.device._at -= 2.0  # the device's time, not the host's
        assert meter.since(began, device, "layer", "forward") == 0.0
        assert not syncs
        found = meter.take()["layer", "forward"].seconds
        assert sum(syncs.values()) == 1 and not meter.take()
    return found


def test_seconds_are_the_devices_and_waited_for_when_read(ranks):
    assert ranks.run(1, timed)[0] == pytest.approx(2.0, abs=0.5)


def stuck(rank: int, size: int) -> None:
    from datetime import timedelta

    from lightning_gnn.comm.group import CommunicationError, World

    device = torch.device("emulated", 0)
    with pytest.raises(TimeoutError, match="timed out: emulated:0 did not finish a copy within 0 s"):
        emulated.Event.stuck = True
        copy_to_host(torch.ones(2, device=device), 0.1)
    world = World(rank, size, device, timedelta(seconds=1))
    try:
        with pytest.raises(CommunicationError, match="Logged values on rank 0: timed out"):
            world.to_host(torch.ones(2, device=device), "Logged values")
        emulated.Event.stuck = False
        assert world.to_host(torch.ones(2, device=device), "Logged values").device.type == "cpu"
    finally:
        emulated.Event.stuck = False
        world.close()


def test_a_device_that_waits_for_others_is_an_error_in_time(ranks):
    ranks.run(1, stuck)


EDGES = 8000


def without_loops(rank: int, size: int, model: str) -> list[str]:
    import warnings

    from lightning_gnn.kernels.run import BACKENDS

    graph = awkward_graph()
    graph.edge_index = torch.randint(0, 60, (2, EDGES))
    del graph.edge_weight, graph.edge_attr
    kept = BACKENDS.pop("emulated")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            waits(rank, size, model, "dgcl", graph)
    finally:
        BACKENDS["emulated"] = kept
    return [str(each.message) for each in heard if "no kernels on emulated" in str(each.message)]


def test_rows_of_edges_are_told_once(ranks):
    """Of all convs and steps, in a process that has not been told before; the first layer has 16 columns."""
    ranks.close()
    [said] = ranks.run(1, without_loops, "gat")[0]
    assert f"each of {EDGES * 16 * 8 / 1e6:,.1f} MB in the first layer" in said
    assert ranks.run(1, without_loops, "gat")[0] == []


def sampled(rank: int, size: int, workers: int, local_cache: str | None) -> dict[str, int]:
    from lightning_gnn import SamplingStrategy

    strategy = SamplingStrategy(
        [3, 2], batch_size=4, num_workers=workers, prefetch_batches=2 * workers, local_cache=local_cache, timeout=60
    )
    return waits(rank, size, "sage", strategy, steps=FromBatchOn())


@pytest.mark.parametrize(("workers", "local_cache"), [(1, None), (3, None), (1, "1MB")])
def test_making_a_batch_waits_for_nothing(ranks, workers, local_cache):
    """The step waits for its labelled nodes, and Lightning for the values that it logs."""
    others = "modules/node_classifier.py", "launching/script.py", "devices.py"
    for found in ranks.run(1, sampled, workers, local_cache):
        assert found and all(any(other in where for other in others) for where in found), found
