"""Independent training: every batch is done once an epoch, nobody waits for all, and whoever is left comes to one result.

Test tiers: without ranks; gloo ranks in the pool; real processes, of which some are slow or die.
"""

from __future__ import annotations

import copy
import csv
import itertools
import json
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from common import (
    CLASSES,
    awkward_graph,
    build,
    campaign,
    examples,
    one_training_node,
    quiet_trainer,
    strategy_of_config,
)
from gossiping import CLUSTERS, EPOCHS, WORKERS, done, new_trainer
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EarlyStopping, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from processes import REPOSITORY, Finished, run
from torch_geometric.data import Data
from torch_geometric.utils import subgraph

from lightning_gnn import (
    ClusterAllReduceStrategy,
    GossipStrategy,
    GraphDataModule,
    LinkPredictor,
    NodeClassifier,
    split_edges,
)
from lightning_gnn.comm.group import CommunicationError
from lightning_gnn.data.shards import cut_graph
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.extensions.codecs.codec import make_codec
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.gossip.clusters import Clusters
from lightning_gnn.strategies.gossip.differences import Difference, Differences, Whole
from lightning_gnn.strategies.gossip.fit import WorkerFit
from lightning_gnn.strategies.gossip.metrics import progress
from lightning_gnn.strategies.gossip.pairing import Pairing
from lightning_gnn.strategies.gossip.peers import LOCAL, Heartbeat, Mailbox, PeerServer, SharedKeys
from lightning_gnn.strategies.gossip.pool import Pool
from lightning_gnn.strategies.gossip.push_sum import Mass, PushSum
from lightning_gnn.strategies.gossip.worker import Peers, Worker, distance, sketch

# Without ranks ################################################################


@pytest.mark.parametrize("method", ["random", "metis"])
@pytest.mark.parametrize("chosen", [[0], [3, 1], [0, 1, 2, 3]])
def test_a_batch_is_the_induced_subgraph(method, chosen):
    graph = prepare_graph(awkward_graph(), None, None, 0, 0)
    part = assign_nodes(graph.edge_index.numpy(), 60, 4, method).part
    batch = Clusters(cut_graph(graph, part, 4), 1, 0).batch(chosen)
    nodes = torch.isin(torch.from_numpy(part), torch.tensor(chosen, dtype=torch.int32)).nonzero().view(-1)
    assert torch.equal(batch.n_id.sort().values, nodes) and batch.num_owned == len(nodes)
    _, _, kept = subgraph(nodes, graph.edge_index, num_nodes=60, return_edge_mask=True)
    assert torch.equal(batch.e_id.sort().values, kept.nonzero().view(-1))
    assert torch.equal(batch.n_id[batch.edge_index], graph.edge_index[:, batch.e_id])
    for name in ("x", "y", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(batch[name], graph[name][batch.n_id])
    for name in ("edge_weight", "edge_attr"):
        assert torch.equal(batch[name], graph[name][batch.e_id])


def test_an_epoch_has_every_cluster_once_in_an_order_of_its_own():
    graph = prepare_graph(awkward_graph(), None, None, 0, 0)
    cut = cut_graph(graph, assign_nodes(graph.edge_index.numpy(), 60, 7, "random").part, 7)
    clusters = Clusters(cut, 3, 5)
    assert clusters.batches == 3
    epochs = [[clusters.draw_clusters(epoch * 3 + batch) for batch in range(3)] for epoch in range(2)]
    for epoch in epochs:
        assert sorted(cluster for batch in epoch for cluster in batch) == list(range(7)) and list(map(len, epoch)) == [
            3,
            3,
            1,
        ]
    assert epochs[0] != epochs[1] and epochs[0] != [Clusters(cut, 3, 6).draw_clusters(batch) for batch in range(3)]


def test_clusters_without_training_nodes_are_left_out():
    graph, part = one_training_node()
    clusters = Clusters(cut_graph(prepare_graph(graph, None, None, 0, 0), part.numpy(), 4), 1, 0)
    assert clusters.trained.tolist() == [0] and clusters.batches == 1


def test_a_peer_server_answers_only_whom_it_awaits():
    server = PeerServer("127.0.0.1", 0.5)
    own = torch.zeros(3)
    assert server.wait(1, 7, Whole(own), 0.05) is None  # nobody comes
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(server.visit, server.address, 2, 6, Whole(torch.ones(3)))
        right = pool.submit(server.visit, server.address, 1, 7, Whole(torch.full((3,), 2.0)))
        assert server.wait(1, 7, Whole(own), 20.0).tolist() == [2.0, 2.0, 2.0]
        assert right.result().tolist() == [0.0, 0.0, 0.0]
        server.close()
        assert late.result() is None
    assert server.visit(server.address, 1, 8, Whole(own)) is None  # nobody is there


def test_the_distance_of_replicas():
    torch.manual_seed(0)
    layer = torch.nn.Linear(300, 100)
    assert distance([sketch(layer.parameters())] * 3) == 0
    mean = torch.cat([each.detach().reshape(-1) for each in layer.parameters()])
    away = torch.randn_like(mean)
    away *= 0.05 * mean.norm() / away.norm()  # each 5 % away from the mean
    assert distance([mean + away, mean - away]) == pytest.approx(0.05, rel=1e-5)
    sketches = [sketch([part[:7], part[7:]]) for part in (mean + away, mean - away)]
    assert distance(sketches) == pytest.approx(0.05, rel=0.1)
    assert sketches[0].norm() == pytest.approx(float((mean + away).norm()), rel=0.1)


@pytest.fixture
def tied() -> Iterator[Callable[..., list[Worker]]]:
    """Makes workers of this process that share a store, and end with the test."""
    server = torch.distributed.TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
    made: list[Worker] = []

    def make(size: int, kind: Callable[[int, Peers], Worker]) -> list[Worker]:
        place = f"{LOCAL}:{server.port} test"
        for me in range(size):
            own = PeerServer(LOCAL, 30.0)
            made.append(kind(me, Peers(place, SharedKeys(place), Heartbeat(place, me, 30.0), own)))
            made[-1].enter()
        return made

    yield make
    for worker in made:
        worker.close()


def test_vectors_are_summed_and_come_back_if_nobody_is_there():
    one, other = PeerServer(LOCAL, 5.0), PeerServer(LOCAL, 5.0)
    sends, takes = Mailbox(one, torch.zeros(2)), Mailbox(other, torch.zeros(2))

    def send(number: float) -> None:
        sends.send(other.address, torch.full((2,), number))
        while sends.sending:
            time.sleep(0.01)

    send(1.0)
    send(2.0)
    total = torch.zeros(2)
    while total[0] < 3:  # a vector on its way is not lost
        total += found if (found := takes.take()) is not None else 0
        time.sleep(0.01)
    assert total.tolist() == [3.0, 3.0] and takes.take() is None and sends.take() is None
    takes.close()
    other.close()
    send(4.0)
    assert sends.take().tolist() == [4.0, 4.0]
    sends.close()
    one.close()


@examples(60)
@given(st.integers(2, 5), st.integers(0, 2**32))
def test_push_sum_neither_makes_nor_loses_mass(workers, seed):
    """In any order of sending and taking in; what is on its way counts. And all tend to one mean."""
    rng = random.Random(seed)
    own = [torch.tensor([rng.gauss(0, 1), rng.gauss(0, 1), 1.0], dtype=torch.float64) for _ in range(workers)]
    masses, arriving = [Mass() for _ in range(workers)], [torch.zeros(3, dtype=torch.float64) for _ in range(workers)]
    mean = torch.stack(own).mean(0)

    def check() -> None:
        total = sum(arriving) + sum(mass.weight * each for mass, each in zip(masses, own))
        torch.testing.assert_close(total / workers, mean, rtol=1e-12, atol=1e-12)

    for _ in range(150 * workers):
        me, other = rng.sample(range(workers), 2)
        if rng.random() < 0.5:
            arriving[other] = arriving[other] + masses[me].half(own[me])
        else:
            total = masses[me].add(own[me], arriving[me])
            own[me], arriving[me] = total / total[-1], torch.zeros_like(total)
        check()
    for each in own:
        torch.testing.assert_close(each, mean, rtol=0, atol=0.2)


def test_push_sum_between_workers_keeps_the_mass(tied):
    """Over peer servers, from threads: with three workers of different pace."""
    everyone = tied(3, lambda me, peers: PushSum(Pool(1, 1), Pairing(me, 3), 1 + me, peers, 0.0, 0))
    values = [torch.tensor([float(me), 1.0], dtype=torch.float64) for me in range(3)]

    def batch(me: int) -> None:
        total = everyone[me].meet(lambda: values[me])
        if total is not None:
            values[me] = total / total[-1]

    turn, deadline = 0, time.monotonic() + 10
    # A busy machine has messages on their way for long, and who has one there sends none.
    while turn < 60 or (
        any(sum(each.counts.partners.values()) < 2 for each in everyone) and time.monotonic() < deadline
    ):
        batch(turn % 3)
        turn += 1
        time.sleep(0.0 if turn < 60 else 0.001)
    for worker in everyone:
        worker.interval = 10**9  # takes in, and sends nothing any more
    deadline = time.monotonic() + 10
    while sum(worker.mass.weight for worker in everyone) != 3 and time.monotonic() < deadline:
        for me in range(3):
            batch(me)
        time.sleep(0.01)
    assert sum(worker.mass.weight for worker in everyone) == 3
    mean = sum(worker.mass.weight * each[0] for worker, each in zip(everyone, values)) / 3
    assert float(mean) == pytest.approx(1.0, rel=1e-12)
    assert all(sum(worker.counts.partners.values()) > 1 and worker.counts.waits == 0 for worker in everyone)


def test_the_newest_snapshot_is_another_worker_s(tied):
    one, other, third = tied(3, lambda me, peers: Worker(Pool(1, 1), Pairing(me, 3), 1, peers, 0.0, 0))
    one.leave_snapshot(b"first")
    assert third.newest_snapshot() == (0, b"first")
    for snapshot in (b"second", b"3", b"fourth"):  # each in the place of the last but one
        other.leave_snapshot(snapshot)
        assert one.newest_snapshot() == third.newest_snapshot() == (1, snapshot)
    assert other.newest_snapshot() == (0, b"first")


def test_progress_is_that_of_all_workers(tied):
    one, other = tied(2, lambda me, peers: Worker(Pool(4, 8), Pairing(me, 2), 1, peers, 0.0, 0))
    seen = []
    for worker in (one, other, other, other, one):
        worker.take()
        seen.append(progress(one))
    assert seen == ["12 %", "12 %", "12 %", "12 %", "62 %"]
    one.pool.end = None
    assert progress(one) == "1.2 epochs"


@pytest.mark.parametrize(("pairing", "prompt"), [("any", False), ("prompt", True)])
def test_a_prompt_worker_serves_between_its_intervals(tied, pairing, prompt):
    """Worker 0 chooses after its first batch; worker 1 is far from its own interval."""
    one, other = tied(2, lambda me, peers: Worker(Pool(1, 1), Pairing(me, 2, pairing), 1 + 99 * me, peers, 20.0, 0))
    with ThreadPoolExecutor(1) as pool:
        chooses = pool.submit(one.meet, lambda: torch.ones(2))
        while not other.peers.keys.get("worker/1").startswith("chosen"):
            time.sleep(0.01)
        for _ in range(98):
            if (found := other.meet(lambda: torch.full((2,), 2.0))) is not None:
                break
            time.sleep(0.01)
        if not prompt:
            assert found is None and not chooses.done()
            while found is None:  # to its own interval
                found = other.meet(lambda: torch.full((2,), 2.0))
        assert found.tolist() == chooses.result().tolist() == [3.0, 3.0]
    assert (other.counts.batches < 99) == prompt
    assert not other.peers.server.read_notifications()


@pytest.mark.parametrize("pairing", ["any", "prompt"])
def test_all_meet_all(tied, pairing):
    """Workers choose in turns while the others are free: each pair comes to 80 / 3 of 160 meetings in the mean.

    Of uniform draws, one of the six pairs has fewer than 12 with a probability of 0.0004; the seed draws the same in each run.
    """
    everyone = tied(4, lambda me, peers: Worker(Pool(1, 1), Pairing(me, 4, pairing), 1, peers, 20.0, 0))
    with ThreadPoolExecutor(1) as pool:
        for turn in range(160):
            chooser = everyone[turn % 4]
            for worker in everyone:  # of "any", each looks at its interval only
                worker.interval = 1 if worker is chooser or pairing == "any" else 10**9
            chooses = pool.submit(chooser.meet, lambda: torch.ones(1))
            while not chooses.done():
                for worker in everyone:
                    state = worker.peers.keys.get(f"worker/{worker.me}")
                    if worker is not chooser and state.startswith("chosen"):
                        worker.meet(lambda: torch.ones(1))
    check_pairs(everyone, 160, 12)


def test_push_sum_sends_to_all(tied):
    """Of a worker's 60 vectors, each other one gets 20 in the mean; of uniform draws, any of four workers sends another fewer
    than 6 with a probability of 0.0001, and draws are those of the seed."""
    everyone = tied(4, lambda me, peers: PushSum(Pool(1, 1), Pairing(me, 4), 1, peers, 0.0, 0))
    sent: list[Counter[str]] = [Counter() for _ in everyone]
    deadline = time.monotonic() + 30
    while min(each.total() for each in sent) < 60 and time.monotonic() < deadline:
        for worker, partners in zip(everyone, sent):
            worker.meet(lambda: torch.ones(2, dtype=torch.float64))
            if partners.total() < 60:
                partners.update(Counter(worker.counts.partners) - partners)
    assert all(partners.total() == 60 and min(partners.values()) >= 6 and len(partners) == 3 for partners in sent), sent


SIZES = [3000, 64, 10, 3]
"""Of tensors whose values make a vector: whole blocks and what is left of them."""


def meet_in_differences(tied, codec: str | None, size: int, meetings: int) -> tuple[list[torch.Tensor], list[Worker]]:
    """Has random pairs of workers meet, which learn nothing in between; returns their vectors and themselves."""
    everyone = tied(size, lambda me, peers: Worker(Pool(1, 1), Pairing(me, size), 1, peers, 20.0, 0))
    torch.manual_seed(0)
    values = [torch.cat([torch.randn(3074) + torch.linspace(-5, 5, 3074), torch.ones(3)]) for _ in range(size)]
    for worker in everyone:
        if codec is not None:
            worker.differences = Differences(make_codec(codec), SIZES)
    rng = random.Random(0)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(meetings):
            me, other = rng.sample(range(size), 2)
            before = (values[me] + values[other]).double()
            for away in everyone:  # but for these two
                away.leave(lambda: pytest.fail("it has no part"), for_good=False)
            everyone[other].come_back()
            chooses = pool.submit(everyone[me].meet, lambda: values[me])  # noqa: B023
            while not everyone[me].peers.keys.get(f"worker/{other}").startswith("chosen"):
                time.sleep(0.001)
            values[other] = everyone[other].meet(lambda: values[other]) / 2  # noqa: B023
            values[me] = chooses.result() / 2
            after = (values[me] + values[other]).double()
            assert float((after - before).norm() / before.norm()) < 1e-6
            assert values[me][-3:].tolist() == values[other][-3:].tolist() == [1.0] * 3
    return values, everyone


@pytest.mark.parametrize(("codec", "share", "floor"), [("int8", 0.26, 1e-6), *campaign(("bfp8", 0.26, 1e-6))])
def test_differences_keep_the_mean_and_leave_no_floor(tied, codec, share, floor):
    """Of pairs, at every meeting, and so of all; rounded values would stay apart by the codec's step, 2e-3 of a block's range."""
    values, everyone = meet_in_differences(tied, codec, 3, 45)
    torch.manual_seed(0)
    mean = torch.stack([torch.randn(3074) + torch.linspace(-5, 5, 3074) for _ in range(3)]).double().mean(0)
    for each in values:
        torch.testing.assert_close(each[:-3].double(), mean, rtol=1e-5, atol=1e-4)
    assert distance(values) < floor
    assert all(set(worker.differences.met) == {0, 1, 2} - {worker.me} for worker in everyone)
    for worker in everyone:  # counted where it is sent
        each = worker.peers.server.sent_bytes / worker.counts.averages
        assert each <= share * values[0].nbytes + 4 * 8  # the ends of the small ones


def test_those_that_know_different_things_of_each_other_send_all(tied):
    """As after a message that got lost, or when one has been started again."""
    one, other = tied(2, lambda me, peers: Worker(Pool(1, 1), Pairing(me, 2), 1, peers, 20.0, 0))
    torch.manual_seed(0)
    own = [torch.randn(3077)]
    own.append(own[0] + 0.01 * torch.randn(3077))

    def meets(meeting: int) -> list[torch.Tensor]:
        brings = [Difference(own[me], worker.differences, 1 - me, meeting) for me, worker in enumerate((one, other))]
        with ThreadPoolExecutor(1) as pool:
            visit = pool.submit(other.peers.server.visit, one.peers.server.address, 1, meeting, brings[1])
            come = one.peers.server.wait(1, meeting, brings[0], 20.0)
            return [brings[0].total(come), brings[1].total(visit.result())]

    for worker in (one, other):
        worker.differences = Differences(make_codec("int8"), SIZES)
    first = meets(1)
    again = meets(2)  # of what is known, less is off
    assert (again[0] - sum(own)).norm() < 0.05 * (first[0] - sum(own)).norm()
    one.differences.met[1] = 1, one.differences.met[1][1]
    for total, expected in zip(meets(3), first, strict=True):
        assert torch.equal(total, expected)
    other.differences.met.clear()
    for total, expected in zip(meets(4), first, strict=True):
        assert torch.equal(total, expected)


def check_pairs(everyone: list[Worker], meetings: int, least: int) -> None:
    """Each pair of workers has met so often at least, and both know of it."""
    met = [[worker.counts.partners.get(str(other), 0) for other in range(len(everyone))] for worker in everyone]
    for one, other in itertools.combinations(range(len(everyone)), 2):
        assert met[one][other] == met[other][one] >= least, met
    assert sum(map(sum, met)) == 2 * meetings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_every_n_batches": 0}, "average_every_n_batches must be at least 1 .got 0"),
        ({"num_clusters": 0}, "num_clusters must be at least 1"),
        ({"clusters_per_batch": -1}, "clusters_per_batch must be at least 1"),
        ({"assignment": "louvain"}, "assignment must be 'random' or 'metis' .got 'louvain'"),
        ({"pairing": "all"}, "pairing must be 'any', 'prompt' or 'active_passive' .got 'all'"),
        ({"average": "losses"}, "average must be 'gradients', 'parameters' or 'push_sum' .got 'losses'"),
        ({"final_weights": "last"}, "final_weights must be 'auto', 'best' or 'average' .got 'last'"),
        ({"mode": "up", "monitor": "val_acc"}, "mode must be 'min' or 'max'"),
        ({"mode": "max"}, "mode='max' is not supported without monitor"),
        ({"partner_timeout": -1}, "partner_timeout must be at least 0 seconds"),
        ({"average": "push_sum", "pairing": "any"}, "pairing='any' is not supported with average='push_sum'"),
        ({"heartbeat_timeout": 1}, "heartbeat_timeout must be at least 2 seconds"),
        ({"codec": "int3"}, "codec must be one of .* .got 'int3'"),
        ({"codec": "int8", "average": "push_sum"}, "codec='int8' is not supported with average='push_sum'"),
        ({"max_restarts": -1}, "max_restarts must be at least 0 .got -1"),
        ({"max_restarts": 0.5}, "max_restarts must be an integer .got 0.5"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        GossipStrategy(**options)


def test_all_at_once_nothing_is_encoded():
    with pytest.raises(ValueError, match="all workers average together, .* Remove codec, or use strategy=.gossip"):
        ClusterAllReduceStrategy(codec="int8")


def test_yaml(tmp_path):
    entry = "{class_path: lightning_gnn.GossipStrategy, init_args: {average_every_n_batches: 5, pairing: active_passive}}"
    found = strategy_of_config(tmp_path / "config.yaml", entry)
    assert (found.average_every_n_batches, found.pairing, found.num_clusters) == (5, "active_passive", 40)
    for name in ("gossip", "gossip_spawn", "gossip_notebook"):
        assert isinstance(strategy_of_config(tmp_path / "config.yaml", name), GossipStrategy)


# One device ###################################################################


class Kept(L.Callback):
    def __init__(self) -> None:
        self.batches: list[Data] = []
        self.validated: list[tuple[int, list[int]]] = []  # in which epoch, and the least node of each batch
        self.own = torch.zeros(0)  # at the end, before workers come to one result
        self.training_loss: float | None = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.own = torch.nn.utils.parameters_to_vector(pl_module.parameters()).detach().clone()
        [fit] = [each for each in trainer.callbacks if isinstance(each, WorkerFit)]
        self.training_loss = fit.comparison.training_loss

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Data, batch_idx: int) -> None:
        self.batches.append(batch)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.validated.append((trainer.current_epoch, []))

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Data, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validated[-1][1].append(int(batch.n_id.min()))


def module_of(model: str = "sage", lr: float = 0.05, kind: type[NodeClassifier] = NodeClassifier) -> NodeClassifier:
    return kind(build(model), num_classes=CLASSES, lr=lr).double()


def test_on_one_device_it_is_cluster_gcn(tmp_path, caplog):
    """Algorithm 1: the same weights as a loop written by hand."""
    kept, module, by_hand = Kept(), module_of(), module_of()
    data = GraphDataModule(awkward_graph(), partition_dir=tmp_path)
    strategy = GossipStrategy(num_clusters=5, clusters_per_batch=2, seed=3)
    quiet_trainer(strategy, 1, callbacks=[kept], max_epochs=2).fit(module, datamodule=data)
    graph = prepare_graph(awkward_graph(), None, None, 0, 0)
    cut = Clusters(_cut(data, LayoutSpec("edge_cut", 5, method="random")), 2, 3)
    optimizer = by_hand.configure_optimizers()
    for item in range(6):
        nodes = cut.batch(cut.draw_clusters(item)).n_id
        edge_index, edge_weight = subgraph(nodes, graph.edge_index, graph.edge_weight, num_nodes=60)
        local = torch.full((60,), -1).index_copy_(0, nodes, torch.arange(len(nodes)))
        del edge_weight
        mask, y = graph.train_mask[nodes], graph.y[nodes]
        loss = F.cross_entropy(by_hand.model(graph.x[nodes], local[edge_index])[mask], y[mask], ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert len(kept.batches) == 6
    assert "Validation during fit is approximate" in caplog.text
    torch.testing.assert_close(module.state_dict(), by_hand.state_dict(), rtol=1e-9, atol=1e-11)


class BarMetrics(L.Callback):
    """What the progress bar shows after each batch."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shown.append(trainer.progress_bar_callback.get_metrics(trainer, pl_module)["pool"])


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_the_bar_shows_the_pool(bar, capfd):
    kept, bar = BarMetrics(), bar()
    trainer = L.Trainer(
        strategy=GossipStrategy(num_clusters=5),
        devices=1,
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        callbacks=[kept, bar],
    )
    trainer.fit(module_of(), datamodule=GraphDataModule(awkward_graph()))
    # Lightning asks for one batch ahead.
    assert kept.shown[:4] == ["20 %", "30 %", "40 %", "50 %"] and kept.shown[-1] == "100 %"
    assert "get_metrics" not in vars(bar)
    assert ("pool=100 %" if isinstance(bar, TQDMProgressBar) else "pool: 100 %") in "".join(capfd.readouterr())


def _cut(data: GraphDataModule, layout: LayoutSpec) -> Any:
    data.prepare_for(layout)
    return data.stored_cut()


# Ranks ########################################################################


def trained(
    rank: int,
    world_size: int,
    folder: Path,
    options: dict[str, Any],
    model: str = "sage",
    event: str = "",
    save: Path | None = None,
    load: Path | None = None,
    kind: type[NodeClassifier] = NodeClassifier,
    **trainer: Any,
) -> dict[str, Any]:
    module, kept = module_of(model, kind=kind), Kept()
    strategy = GossipStrategy(**{"num_clusters": CLUSTERS, "timeout": 60, "seed": 1, **options})
    run = new_trainer(folder, event, strategy, world_size, **trainer)
    run.callbacks.append(kept)
    data = GraphDataModule(awkward_graph())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run.fit(module, datamodule=data, ckpt_path=load, weights_only=False)
    told = [re.findall("validation logged (.*), but neither val_loss", str(each.message)) for each in warned]
    weights, logged = copy.deepcopy(module.state_dict()), {**run.callback_metrics}
    if save is not None:
        run.save_checkpoint(save)
    [tested] = run.test(module, datamodule=data, verbose=False)
    return {
        "weights": weights,
        "tested": tested,
        "report": strategy.report,
        "consensus": strategy.consensus,
        "own": kept.own,
        "validated": kept.validated,
        "said": strategy.result,
        "warned": [*itertools.chain(*told)],
        "every": run.check_val_every_n_epoch,
        "result": torch.nn.utils.parameters_to_vector(module.parameters()).detach(),
        "logged": {name: float(value) for name, value in logged.items()},
        "training_loss": kept.training_loss,
        "steps": run.global_step,
        "epoch": run.current_epoch,
        "groups": torch.distributed.is_initialized(),
    }


def check_all_done(folder: Path, epochs: int = EPOCHS) -> None:
    counts = Counter(cluster for batches in done(folder).values() for cluster in batches)
    assert len(counts) == CLUSTERS and set(counts.values()) == {epochs}, counts


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        *campaign((2, {"average_every_n_batches": 1, "final_weights": "average", "average": "parameters"})),
        (3, {"average_every_n_batches": 2}),
        *campaign((3, {"average_every_n_batches": 1, "pairing": "active_passive", "monitor": "val_acc", "mode": "max"})),
        (4, {"average_every_n_batches": 3, "pairing": "prompt", "assignment": "metis", "codec": "int8"}),
    ],
    ids=["parameters", "any", "active and passive", "prompt, metis, int8"],
)
def test_every_batch_is_done_once_and_there_is_one_result(ranks, tmp_path, world_size, options):
    everyone = ranks.run(world_size, trained, tmp_path, options)
    check_all_done(tmp_path)
    batches = {rank: len(found) for rank, found in done(tmp_path).items()}
    for rank, found in enumerate(everyone):
        torch.testing.assert_close(found["weights"], everyone[0]["weights"], rtol=0, atol=0)
        assert found["tested"] == everyone[0]["tested"]
        assert {rank: counts.batches for rank, counts in found["report"].items()} == batches
        assert found["steps"] == batches.get(rank, 0) and found["epoch"] == EPOCHS and not found["groups"]
    report = everyone[0]["report"]
    assert sum(counts.averages for counts in report.values()) > 0
    pairs = {(min(me, int(you)), max(me, int(you))) for me, counts in report.items() for you in counts.partners}
    for one, other in pairs:  # both know of it
        assert report[one].partners[str(other)] == report[other].partners[str(one)]
    if options.get("pairing") == "active_passive":
        assert all((one + other) % 2 for one, other in pairs)
    # The test is exact: that of one device with the same weights.
    alone = module_of()
    alone.load_state_dict(everyone[0]["weights"])
    [expected] = quiet_trainer("auto", 1).test(alone, datamodule=GraphDataModule(awkward_graph()), verbose=False)
    assert everyone[0]["tested"] == pytest.approx(expected, rel=1e-6)


class LogsNothing(NodeClassifier):
    def validation_step(self, batch, batch_idx):
        pass


class LogsAnother(NodeClassifier):
    def validation_step(self, batch, batch_idx):
        right = (self(batch).argmax(1) == batch.y)[batch.val_mask]
        self.log("val/error", 1 - right.double().mean(), on_step=True, on_epoch=True)


class Hooked(NodeClassifier):
    """All that it trains on, its hook has seen first."""

    def on_before_batch_transfer(self, batch: Data, dataloader_idx: int) -> Data:
        batch.largest = batch.x.abs().max()
        return batch

    def training_step(self, batch: Data, *args: Any) -> torch.Tensor:
        assert batch.x.abs().max() == batch.largest
        return super().training_step(batch, *args)


class NeverValidates(NodeClassifier):
    validation_step = L.LightningModule.validation_step


def check_result(everyone: list[dict[str, Any]], chosen_by: str, best: Callable[..., float]) -> None:
    """Of workers that differ, the best one's weights, bit for bit."""
    own = [found["own"] for found in everyone]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(own, 2))
    scores = [each["training_loss"] if "training" in chosen_by else each["logged"][chosen_by] for each in everyone]
    worker = scores.index(best(scores))
    assert len({*scores}) > 1 or chosen_by not in ("val_loss", "training loss")
    for found in everyone:
        assert found["said"] == f"worker {worker}'s weights, of best {chosen_by} ({best(scores):.4g})"
        assert torch.equal(found["result"], own[worker])


APART = {"average_every_n_batches": 1000}
"""Hardly ever average."""


@pytest.mark.parametrize("kind", [NeverValidates, LogsNothing, LogsAnother])
def test_without_val_loss_the_result_is_by_training_loss(ranks, tmp_path, kind):
    """Whether there is a sanity check, which would find nothing to compare by, or not."""
    everyone = ranks.run(3, trained, tmp_path, APART, kind=kind, max_epochs=3)
    check_result(everyone, "training loss", min)
    assert [*everyone[0]["warned"]] == (
        ["val/error, val/error_epoch"] if kind is LogsAnother else ["nothing"] if kind is LogsNothing else []
    )


@pytest.mark.parametrize(
    ("options", "run", "chosen_by", "best"),
    [
        ({}, {}, "val_loss", min),
        ({"monitor": "val/error_epoch"}, {"kind": LogsAnother}, "val/error_epoch", min),
        ({}, {"callbacks": [EarlyStopping("val_acc", mode="max", patience=99)]}, "val_acc", max),
        ({}, {"callbacks": [EarlyStopping("train_loss", patience=99)]}, "val_loss", min),  # not of validation
        ({"monitor": "val_f1", "mode": "max"}, {}, "val_f1", max),
        ({}, {"limit_val_batches": 0}, "training loss", min),
        ({"final_weights": "average"}, {}, "", None),
        ({"final_weights": "best"}, {}, "val_loss", min),
    ],
    ids=["val_loss", "named of two", "monitored", "another is monitored", "named", "nothing logged", "average", "best"],
)
def test_what_the_result_is(ranks, tmp_path, options, run, chosen_by, best):
    run = {"max_epochs": 3, "num_sanity_val_steps": 0, **run}
    everyone = ranks.run(3, trained, tmp_path, {**APART, **options}, **run)
    if best is not None:
        check_result(everyone, chosen_by, best)
        return
    mean = torch.stack([found["own"] for found in everyone]).mean(0)
    for found in everyone:
        assert found["said"] == "the average of all workers' weights"
        torch.testing.assert_close(found["result"], mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("every", [5, 2])
def test_workers_that_validate_seldom_or_on_a_sample_can_be_compared(ranks, tmp_path, every):
    """All validate in the last epoch, and all on the same clusters."""
    run = {"check_val_every_n_epoch": every, "limit_val_batches": 3, "num_sanity_val_steps": 0, "max_epochs": 3}
    everyone = ranks.run(2, trained, tmp_path, {}, **run)
    seen = everyone[0]["validated"]
    assert [epoch for epoch, _ in seen] == ([1, 2] if every == 2 else [2])
    assert len(seen[0][1]) == 3 and all(
        batches == seen[0][1] for found in everyone for _, batches in found["validated"]
    )
    scores = [found["logged"]["val_loss"] for found in everyone]
    for found in everyone:
        assert found["every"] == every  # the Trainer is as it was
        assert torch.equal(found["result"], everyone[scores.index(min(scores))]["own"])


def in_lockstep(
    rank: int, world_size: int, folder: Path, clusters: int, interval: int, **trainer: Any
) -> dict[str, Any]:
    module, weights = module_of(), Weights()
    strategy = ClusterAllReduceStrategy(interval, num_clusters=clusters, timeout=60, seed=1)
    run = new_trainer(folder, "", strategy, world_size, max_epochs=3, **trainer)
    run.callbacks.append(weights)
    run.fit(module, datamodule=GraphDataModule(awkward_graph()))
    return {
        "weights": module.state_dict(),
        "after": weights.after,
        "report": strategy.report,
        "epoch": run.current_epoch,
    }


class Weights(L.Callback):
    """Keeps the weights before the first batch and after each."""

    def __init__(self) -> None:
        self.after: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after.append(torch.nn.utils.parameters_to_vector(pl_module.parameters()).detach().clone())


@pytest.mark.parametrize(("clusters", "interval"), [(8, 1), *campaign((7, 2))])
def test_in_lockstep_all_make_as_many_steps(ranks, tmp_path, clusters, interval):
    everyone = ranks.run(3, in_lockstep, tmp_path, clusters, interval)
    steps = 3 * -(-clusters // 3)
    assert [len(found) for found in done(tmp_path).values()] == [steps] * 3
    for batches in zip(*(zip(*[iter(found)] * (steps // 3)) for found in done(tmp_path).values())):
        assert len({cluster for share in batches for cluster in share}) == clusters  # each epoch has them all
    first = everyone[0]
    for found in everyone:
        torch.testing.assert_close(found["weights"], first["weights"], rtol=0, atol=0)
        assert {counts.averages for counts in found["report"].values()} == {steps // interval}
        # Averaged gradients make equal steps, from equal weights.
        same = [bool(torch.allclose(own, other)) for own, other in zip(found["after"], first["after"])]
        assert all(same) if interval == 1 or found is first else not same[0]


def test_in_lockstep_a_step_is_that_of_the_mean_gradient(ranks, tmp_path):
    """Algorithm 4: the same first step as one device makes of the mean of the losses."""
    everyone = ranks.run(2, in_lockstep, tmp_path, 4, 1, limit_train_batches=1)
    data, module = GraphDataModule(awkward_graph()), module_of()
    clusters = Clusters(_cut(data, LayoutSpec("edge_cut", 4, method="random")), 1, 1)
    optimizer, losses = module.configure_optimizers(), []
    for item in (0, 1):
        batch = clusters.batch(clusters.draw_clusters(item))
        out = module.model(batch.x, batch.edge_index)[batch.train_mask]
        losses.append(F.cross_entropy(out, batch.y[batch.train_mask], ignore_index=-1))
    torch.stack(losses).mean().backward()
    optimizer.step()
    expected = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    for found in everyone:
        torch.testing.assert_close(found["after"][0], expected, rtol=1e-9, atol=1e-11)


def test_in_lockstep_all_stop_together(ranks, tmp_path):
    stop = EarlyStopping("val_loss", min_delta=100, patience=1)
    assert {found["epoch"] for found in ranks.run(2, in_lockstep, tmp_path, 4, 1, callbacks=[stop])} == {2}


def test_one_that_stops_early_leaves_its_batches_to_the_others(ranks, tmp_path):
    everyone = ranks.run(3, trained, tmp_path, {"average_every_n_batches": 1}, event="early", kind=Hooked)
    check_all_done(tmp_path)
    assert everyone[1]["epoch"] < everyone[0]["epoch"] == EPOCHS


@pytest.mark.campaign
@pytest.mark.parametrize("average", [*campaign("parameters"), "push_sum"])
def test_workers_that_average_agree_more(ranks, tmp_path, average):
    """And how far they are from each other is estimated well, and logged."""
    apart = {}
    for interval in (1, 1000):
        folder = tmp_path / str(interval)
        folder.mkdir()
        logger = CSVLogger(folder, "", "")
        options = {"average_every_n_batches": interval, "average": average, "final_weights": "average"}
        everyone = ranks.run(3, trained, folder, options, logger=logger)
        check_all_done(folder)
        apart[interval] = distance([found["own"] for found in everyone])
        assert all(found["consensus"] == pytest.approx(apart[interval], rel=0.15) for found in everyone)
        report = everyone[0]["report"]
        assert (sum(counts.averages for counts in report.values()) > 0) == (interval == 1)
        assert average == "parameters" or not any(counts.waits for counts in report.values())
        rows = csv.DictReader((folder / "metrics.csv").open())
        logged = [float(row["gossip/consensus"]) for row in rows if row["gossip/consensus"]]
        assert len(logged) == EPOCHS and logged[-1] > 0
    assert apart[1] < 0.7 * apart[1000]


def test_batch_norm_is_averaged_with_the_weights(ranks, tmp_path):
    options = {"average_every_n_batches": 1, "average": "parameters", "final_weights": "average"}
    one, other = ranks.run(2, trained, tmp_path, options, "gin_batch_norm")
    assert any("running_mean" in name for name in one["weights"])
    torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)


def test_resumes_with_what_is_left_of_the_pool(ranks, tmp_path):
    """Rank 0 saves in the middle of an epoch; the resumed run, of more workers, does what had not been done then."""
    path, first, second = tmp_path / "some.ckpt", tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    ranks.run(2, saving, first, path)
    pool = torch.load(path, weights_only=True)["lightning_gnn"]["pool"]
    assert 0 < pool["begin"] < CLUSTERS * EPOCHS
    ranks.run(3, trained, second, {}, load=path)
    left = CLUSTERS * EPOCHS - pool["begin"] - len(pool["done"])
    assert sum(map(len, done(second).values())) == left


@pytest.mark.campaign
def test_resumes_with_other_clusters_at_the_epoch(ranks, tmp_path):
    path, first, second = tmp_path / "some.ckpt", tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    ranks.run(2, saving, first, path)
    ranks.run(2, trained, second, {"num_clusters": 5}, load=path)
    counts = Counter(cluster for batches in done(second).values() for cluster in batches)
    assert len(counts) == 5 and set(counts.values()) == {EPOCHS - 3}


class Saves(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            trainer.save_checkpoint(self.path)


def saving(rank: int, world_size: int, folder: Path, path: Path) -> None:
    strategy = GossipStrategy(num_clusters=CLUSTERS, timeout=60, seed=1)
    run = new_trainer(folder, "", strategy, world_size)
    run.callbacks.append(Saves(path))
    run.fit(module_of(), datamodule=GraphDataModule(awkward_graph()))


def refusing(rank: int, world_size: int, what: str) -> str:
    options: dict[str, Any] = {"num_clusters": 4, "timeout": 30}
    module: Any = module_of()
    data, trainer = GraphDataModule(awkward_graph()), {}
    if what == "num_clusters":
        options["num_clusters"] = 1
    elif what == "batches":
        options["clusters_per_batch"] = 3
        options["num_clusters"] = 3
    elif what == "accumulate":
        trainer["accumulate_grad_batches"] = 2
    elif what == "monitor":
        options["monitor"] = "val_auc"
    elif what == "validation":
        trainer["limit_val_batches"], options["final_weights"] = 0, "best"
    elif what == "partition":
        data = GraphDataModule(awkward_graph(), partition=[0, 1] * 30)
    elif what == "links":
        module = LinkPredictor(build("sage")).double()
        data = GraphDataModule(split_edges(awkward_graph(), 0.2, 0.2))
    elif what == "manual":
        module.automatic_optimization = False
    try:
        quiet_trainer(GossipStrategy(**options), world_size, **trainer).fit(module, datamodule=data)
    except (ValueError, CommunicationError) as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("num_clusters", "num_clusters must be at least 2 .one per worker., got 1"),
        ("batches", "one per worker .2., got 1: .* clusters_per_batch=3"),
        ("accumulate", "accumulate_grad_batches must be 1 with .*, got 2"),
        ("monitor", "monitor='val_auc', which validation_step did not log .logged: .*val_loss"),
        ("validation", 'which this run does not have.*final_weights="auto" or "average"'),
        ("partition", "it assigns nodes to clusters itself"),
        ("links", "does not support LinkPredictor, which trains on edges"),
        ("manual", "manual optimization"),
    ],
)
def test_refused_runs(ranks, what, message):
    first, other = ranks.run(2, refusing, what)
    assert re.search(message, first), first
    # What is seen in a worker's own validation only, another may not come to see: rank 0 keeps the store here.
    assert what == "monitor" or re.search(message, other), other


# Real processes ###############################################################


def gossip(folder: Path, event: str, start_method: str = "fork") -> Finished:
    return run(REPOSITORY / "tests" / "gossiping.py", folder, event, start_method, cwd=folder, timeout=280)


def check_outcome(folder: Path, output: str, lost: tuple[int, ...] = ()) -> None:
    """What the workers have done came back to the process that has started them."""
    [line] = re.findall(r"^outcome (.*)$", output, re.MULTILINE)
    batches, consensus, result = json.loads(line)
    noted = {str(rank): len(found) for rank, found in done(folder).items()}
    assert {rank: count for rank, count in batches.items() if int(rank) not in lost} == {
        rank: count for rank, count in noted.items() if int(rank) not in lost
    }
    assert 0 < consensus < 2 and re.fullmatch(r"worker \d's weights, of best val_loss \([\d.]+\)", result)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.program(runs=gossip)
@pytest.mark.parametrize("event", ["kill 0", *campaign("kill 2")])
def test_the_others_live(ran, event):
    """Of any worker that is killed, the first included: all batches are done, and there is a result."""
    folder, finished = ran
    output = finished.succeeded().output
    told = rf"Rank {event[-1]} was ended by SIGKILL in epoch \d, the optimizer's step: .*; the others go on\."
    assert re.search(told, output) and output.count("tested") == 1
    assert f"{event[-1]} (lost)" in output and "left undone" not in output
    killed = int(event[-1])
    check_outcome(folder, output, (killed,))
    batches = done(folder)
    assert len(batches[killed]) == 3
    counts = Counter(cluster for found in batches.values() for cluster in found)
    # Its last batch it had not said to be done; what it held and others took over, they did in one batch.
    assert len(counts) == CLUSTERS and sum(counts.values()) >= CLUSTERS * EPOCHS - 2


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.program(runs=gossip)
@pytest.mark.parametrize(("event", "start_method"), [("return 1", "fork"), *campaign(("return 2", "popen"))])
def test_one_that_was_killed_comes_back(ran, event, start_method):
    """With the weights and the optimizer that another had at an epoch's start; it takes batches, averages, and is tested with."""
    folder, finished = ran
    output, rank = finished.succeeded().output, int(event[-1])
    assert re.search(rf"Rank {rank} was ended by SIGKILL .*; it is started again, and the others go on\.", output)
    assert f"{rank} (started again)" in output and "lost" not in output and "left undone" not in output
    check_outcome(folder, output, (rank,))
    [lives] = re.findall(r"^lives (.*)$", output, re.MULTILINE)
    for each, (life, averages) in enumerate(json.loads(lives)):
        assert life == (each == rank) and averages > 0
    assert output.count("tested") == 1

    back = torch.load(folder / "back.pt", weights_only=True)
    others = [
        torch.load(path, weights_only=True) for path in folder.glob("kept-*-[1-9].pt") if path.name[5] != str(rank)
    ]
    same = [
        each for each in others if all(torch.equal(*pair) for pair in zip(*map(tensors, (back, each)), strict=True))
    ]
    assert same
    batches = done(folder)
    assert len(batches[rank]) > 3
    counts = Counter(cluster for found in batches.values() for cluster in found)
    # As where it stays away; and the batch that it was killed in may be done again.
    assert len(counts) == CLUSTERS and CLUSTERS * EPOCHS - 2 <= sum(counts.values()) <= CLUSTERS * EPOCHS + 1


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    """Returns weights and what Adam keeps of each."""
    [optimizer] = state["optimizers"]
    kept = [each[name] for _, each in sorted(optimizer["state"].items()) for name in sorted(each)]
    return [*state["weights"].values(), *kept]


FIRST_PROCESS = """
import subprocess, sys
first = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
print(first.stdout.read())  # of all that it has started, the store included
print("first process:", first.wait())
"""


def script(folder: Path) -> Finished:
    started = (REPOSITORY / "tests" / "gossiping.py", folder, "kill 0", "popen")
    return run("-c", FIRST_PROCESS, *started, cwd=folder, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.program(runs=script)
def test_a_script_goes_on_without_its_first_process(ran):
    """Rank 0 is killed, which had started the others and their store; they come to a result, and the first of them saves it."""
    folder, finished = ran
    output = finished.succeeded().output
    assert "first process: -9" in output and "0 (lost)" in output and "left undone" not in output
    check_outcome(folder, output, (0,))
    check_saved(folder, output)


def check_saved(folder: Path, output: str) -> None:
    """The first of those that are left has written the result."""
    assert "weights, of best val_loss" in output
    found = torch.load(folder / "result.ckpt", weights_only=True)
    assert any(key.endswith("lin_l.weight") for key in found["state_dict"]) and found["epoch"] == EPOCHS


AGENTS = """
import socket, subprocess, sys, time
with socket.create_server(("127.0.0.1", 0)) as free:
    where = ["--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]
ranks = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *where]
agents = [subprocess.Popen([*ranks, "--node-rank", str(agent), *sys.argv[1:]]) for agent in range(2)]
ended = {}
while len(ended) < 2:
    time.sleep(0.1)
    ended |= {which: time.monotonic() for which, agent in enumerate(agents) if which not in ended and agent.poll() is not None}
print("agents:", *(agent.returncode for agent in agents), "apart:", max(ended.values()) - min(ended.values()))
"""


def torchrun(folder: Path, agent: int) -> Finished:
    started = (REPOSITORY / "tests" / "gossiping.py", folder, f"agent {2 * agent}", "popen")
    return run("-c", AGENTS, *started, cwd=folder, timeout=380)


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.program(runs=torchrun)
@pytest.mark.parametrize("agent", [0, 1])
def test_after_a_lost_agent_of_torchrun_the_other_ends(ran, agent):
    """By itself, with the result, and without the 300 s that torchrun's agents wait for each other; with agent 0, rank 0 and the
    store of torchrun are gone, too."""
    folder, finished = ran
    output = finished.succeeded().output
    codes, seconds = re.findall(r"agents: (.*) apart: (.*)", output)[0]
    assert codes == ("-9 0" if agent == 0 else "0 -9") and float(seconds) < 150
    lost = (2 * agent, 2 * agent + 1)
    assert all(f"{rank} (lost)" in output for rank in lost) and "left undone" not in output
    check_outcome(folder, output, lost)
    check_saved(folder, output)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.program(runs=gossip)
@pytest.mark.parametrize(("event", "start_method"), campaign(("slow 1", "spawn")))
def test_a_slow_worker_does_fewer_batches(ran, event, start_method):
    folder, finished = ran
    check_outcome(folder, finished.succeeded().output)
    check_all_done(folder)
    batches = {rank: len(found) for rank, found in done(folder).items()}
    assert len(batches) == WORKERS and batches[1] < min(batches[0], batches[2])
