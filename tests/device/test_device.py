"""The emulated device and the queued group can fail: else nothing that passes on them says anything."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from common import assert_same, awkward_graph, campaign, single, train
from conftest import RankFailed

ranks = on_device.ranks


def trained(rank: int, size: int, *args: Any, **options: Any) -> Any:
    import emulated

    found = train(rank, size, *args, **options)
    assert all(isinstance(each, emulated.DeviceTensor) for each in found["gradients"])
    return found


@pytest.mark.parametrize(
    ("size", "model"), [(1, "gcn"), (2, ["gcn", "gat", "gatv2", "transformer", "sage_max", "pna"])]
)
def test_training_is_on_the_device_and_exact(ranks, size, model):
    found = ranks.run(size, trained, awkward_graph(), model)
    expected = single(awkward_graph(), model)
    for each in found:
        assert_same(each, expected, 1e-9, 1e-11)


def device(rank: int, size: int) -> None:
    import emulated

    x = torch.ones(3, device="emulated")
    assert x.device.type == "emulated" and x.cpu().device.type == "cpu"
    with pytest.raises(RuntimeError, match="on the same device"):
        x + torch.ones(3)
    assert (x + torch.tensor(1.0)).sum() == 6  # a number of the CPU may be mixed, as on CUDA
    with pytest.raises(RuntimeError, match="numpy"):
        x.numpy()
    # Random numbers are the device's own.
    torch.manual_seed(0)
    drawn = torch.rand(3, device="emulated").cpu()
    assert not torch.equal(drawn, torch.rand(3))
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3, device="emulated").cpu(), drawn)
    state = torch.get_rng_state()
    torch.rand(3, device="emulated")
    assert torch.equal(torch.get_rng_state(), state)
    # What waits for the device is counted, and what does not is not.
    with emulated.recorded() as syncs:
        y = (x * 2).cumsum(0)[torch.tensor([0, 1], device="emulated")]
        assert not syncs
        for wait in (y.sum().item, y.tolist, y.cpu, y.nonzero, lambda: y[y > 0], lambda: bool(y.sum() > 0), y.unique):
            before = sum(syncs.values())
            wait()
            assert sum(syncs.values()) > before, wait
    emulated.made["largest"] = 0
    x.unsqueeze(1) * x
    assert emulated.made["largest"] == 9 * 4


def test_the_device_is_a_device(ranks):
    ranks.run(1, device)


def group(rank: int, size: int) -> None:
    import queued

    store = dist.TCPStore("127.0.0.1", int(__import__("os").environ["MASTER_PORT"]), size, rank == 0)
    dist.init_process_group("queued", store=store, rank=rank, world_size=size, device_id=torch.device("emulated", 0))
    peer = 1 - rank
    ones, into = torch.ones(4, device="emulated"), torch.zeros(4, device="emulated")
    operations = [dist.P2POp(dist.irecv, into, peer), dist.P2POp(dist.isend, ones * rank, peer)]
    works = dist.batch_isend_irecv(operations)
    assert into.raw.isnan().all()  # nothing there until it is waited for
    for work in works:
        work.wait()
    assert into.tolist() == [float(peer)] * 4
    with pytest.raises(RuntimeError, match="device type cpu"):
        dist.all_reduce(torch.ones(2))
    dist.all_reduce(ones)
    assert ones.tolist() == [2.0] * 4
    wrong = dist.P2POp(dist.isend, ones, peer), dist.P2POp(dist.irecv, torch.zeros(3, device="emulated"), peer)
    with pytest.raises(RuntimeError, match=f"rank {rank} expects 12 bytes of rank {peer}, which sends 16"):
        dist.batch_isend_irecv([*wrong])[0].wait()
    assert not queued.counts["lazy connections"]


def test_the_group_has_nccls_rules(ranks):
    ranks.run(2, group)


def without_waiting(rank: int, size: int) -> Any:
    from lightning_gnn.comm.transport import ProcessTransport

    start = ProcessTransport.start_each
    ProcessTransport.start_each = lambda *args: start(*args) and (lambda: None)  # type: ignore[method-assign]
    try:
        return train(rank, size, awkward_graph(), "gat", trainer={"num_sanity_val_steps": 0})
    finally:
        ProcessTransport.start_each = start  # type: ignore[method-assign]


def test_a_wait_that_is_left_out_is_seen(ranks):
    with pytest.raises((RankFailed, AssertionError)):
        for each in ranks.run(2, without_waiting):
            assert_same(each, single(awkward_graph(), "gat"), 1e-9, 1e-11)
    ranks.close()  # messages are under way


def receiving_first(rank: int, size: int) -> Any:
    import queued

    from lightning_gnn.comm.transport import ProcessTransport

    queued.LIMIT_S = 3.0
    init = ProcessTransport.__init__

    def early(self: Any, *args: Any) -> None:
        init(self, *args)
        self.receives_early = True

    ProcessTransport.__init__ = early  # type: ignore[method-assign]
    # Under "dgx1" rows as narrow as these travel directly.
    return train(rank, size, awkward_graph(), "gat", options={"plan": "spst", "topology": "uniform"})


@pytest.mark.parametrize("size", campaign(4))
def test_receiving_before_sending_comes_to_a_standstill(ranks, size):
    with pytest.raises(RankFailed):
        ranks.run(size, receiving_first)
    ranks.close()


def fits_and_threads(rank: int, size: int) -> int:
    import threading

    for _ in range(3):
        train(rank, size, awkward_graph(), "gcn")
    return sum(thread.name == "queued" for thread in threading.enumerate())


@pytest.mark.campaign
def test_groups_end(ranks):
    assert max(ranks.run(2, fits_and_threads)) <= 1
