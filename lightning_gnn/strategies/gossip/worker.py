"""Worker: executes the operations of pool and pairing between processes, and counts them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from lightning_gnn.strategies.gossip.differences import Difference, Differences, Whole
from lightning_gnn.strategies.gossip.operations import (
    Await,
    IsAlive,
    Notified,
    Notify,
    Operation,
    Pick,
    Steps,
    Visit,
    answer,
    carry_out,
)
from lightning_gnn.strategies.gossip.pairing import Meeting, Pairing
from lightning_gnn.strategies.gossip.peers import Heartbeat, MessageSource, PeerServer, SharedKeys
from lightning_gnn.strategies.gossip.pool import Pool

T = TypeVar("T")

Scores: TypeAlias = tuple[float | None, ...]
"""Values by which workers are compared: the first value that any worker has decides, and the lowest is best."""

_LOOK_S = 0.5
"""Seconds between two checks whether an awaited partner is alive."""

_REST_S = 0.02
"""Seconds between two checks of an idle worker whether others need help."""

SKETCH_SIZE = 1024
"""Numbers in a sketch. Squared distances are unbiased; their standard deviation is at most sqrt(2 / 1024), 4.4 %."""


@dataclass
class Counts:
    """Work done by a worker (Tables 4.8 and 4.9 of the thesis, and times).

    Attributes:
        batches: batches trained on.
        averages: exchanges with others; with push-sum, additions of received mass.
        partners: exchanges by partner; with push-sum, messages by receiver.
        waits, in_vain: partners that it waited for, and the ones of these that did not come in time.
        waited, idle, seconds: seconds of waiting for partners, of idling at the end, and in total.
        taken_over: batches of workers that had died or stopped.
        sent: bytes of vectors sent to others.
        lives: number of restarts; the counts since the last end of an epoch before a restart are lost.
    """

    batches: int = 0
    averages: int = 0
    partners: dict[str, int] = field(default_factory=dict)
    waits: int = 0
    in_vain: int = 0
    waited: float = 0.0
    idle: float = 0.0
    seconds: float = 0.0
    taken_over: int = 0
    sent: int = 0
    lives: int = 0

    def add_partner(self, partner: int) -> None:
        self.partners[str(partner)] = self.partners.get(str(partner), 0) + 1


@dataclass
class Peers:
    """Connections of a worker to the others.

    Attributes:
        place: address of the shared store, with the prefix of the keys.
        keys: keys in the store.
        heartbeat: heartbeats of the workers.
        server: server of this worker that others connect to.
        life: number of restarts of this worker.
    """

    place: str
    keys: SharedKeys
    heartbeat: Heartbeat
    server: PeerServer
    life: int = 0

    def address_of(self, worker: int) -> str:
        """Returns the address of a worker's server; it changes when the worker is restarted."""
        found = self.keys.find(f"address/{worker}")
        assert found is not None
        return found.decode()


class Worker:
    """One worker of a run.

    Args:
        pool: pool of batches.
        pairing: choice of partners.
        interval: number of batches between two averages.
        peers: connections to the others; None without others.
        patience: seconds that it waits for a partner.
        seed: random seed of the choice of partners.

    Attributes:
        differences: codec state, if partners send each other encoded differences; None for plain vectors.
    """

    differences: Differences | None = None

    through_host = True
    """Whether averaged values are transferred through host memory."""

    def __init__(self, pool: Pool, pairing: Pairing, interval: int, peers: Peers | None, patience: float, seed: int) -> None:
        self.pool, self.pairing, self.interval = pool, pairing, interval
        self.peers = peers
        self.me, self.size = pairing.me, pairing.size
        self.pairs = self.size > 1  # may meet another worker
        self.counts = Counts()
        self.has_left = False
        self.reached = 0  # items taken by all workers when this worker took its last one
        self.keys = SharedKeys() if peers is None else peers.keys
        self.life = self.pairing.life = 0 if peers is None else peers.life
        self._patience = patience
        self._random = random.Random(seed * 1_000_003 + self.me)
        self._began, self._sent_before = time.perf_counter(), 0

    def take(self) -> int | None:
        item = self._carry_out(self.pool.take(self.me))
        self.reached = item + 1 if item is not None else self.pool.end or 0
        return item

    def mark_done(self, item: int) -> None:
        self._carry_out(self.pool.mark_done(self.me, item))

    def give_back(self, item: int) -> None:
        self._carry_out(self.pool.give_back(self.me, item))

    def left_over(self) -> list[int]:
        """Wait until all items are done; returns earlier with items of dead workers, which are now this worker's."""
        began = time.perf_counter()
        while True:
            mine, others = self._carry_out(self.pool.take_over(self.me))
            if mine or not others:
                self.counts.idle += time.perf_counter() - began
                self.counts.taken_over += len(mine)
                return mine
            time.sleep(_REST_S)

    def position(self) -> tuple[int, list[int]]:
        """Returns the position of the pool: see :meth:`~lightning_gnn.strategies.gossip.pool.Pool.position`."""
        return self._carry_out(self.pool.position())

    def undone(self) -> int:
        """Returns the number of items that are not done; 0 if the number of epochs is unlimited."""
        if self.pool.end is None:
            return 0
        begin, done = self.position()
        return self.pool.end - begin - len(done)

    def give_back_all(self) -> None:
        """See :meth:`~lightning_gnn.strategies.gossip.pool.Pool.give_back_all`."""
        self._carry_out(self.pool.give_back_all(self.me))

    def enter(self, make_vector: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Join the other workers; after a restart, restore the counts. Returns as :meth:`meet`."""
        if self.peers is None or not self.pairs:
            return None
        self.keys.put(f"address/{self.me}", self.peers.server.address.encode())
        if self.life and (before := self.all_counts().get(self.me)) is not None:
            self.counts = before
            self._began -= before.seconds
            self._sent_before = before.sent
        self.counts.lives = self.life
        return self._meet(self.pairing.enter(), make_vector)

    def meet(self, make_vector: Callable[[], Tensor]) -> Tensor | None:
        """Meet after a batch; returns the sum of both workers' vectors, None if it is not due or there is no partner.

        Args:
            make_vector: function that returns the vector for the partner, float, on the CPU if it is transferred through host
                memory. With `differences`, the partner gets it rounded.
        """
        self.counts.batches += 1
        if self.has_left:
            return None
        return self._meet(self.pairing.meet(due=self.counts.batches % self.interval == 0), make_vector)

    def leave(self, make_vector: Callable[[], Tensor], for_good: bool = True) -> None:
        """Become unavailable; send this worker's vector to a worker that waits for it."""
        if self.pairs and not self.has_left:
            self._meet(self.pairing.leave(for_good), make_vector)
        self.has_left = self.has_left or for_good

    def come_back(self) -> None:
        if self.pairs and not self.has_left:
            self._carry_out(self.pairing.come_back())

    def _meet(self, steps: Steps[Any], make_vector: Callable[[], Tensor] | None) -> Tensor | None:
        totals: list[Tensor] = []

        def exchange(operation: Await | Visit) -> bool:
            assert self.peers is not None and make_vector is not None
            mine: Whole | Difference = Whole(make_vector())
            if self.differences is not None:
                mine = Difference(make_vector(), self.differences, operation.partner, operation.meeting)
            if isinstance(operation, Visit):
                address = self.peers.address_of(operation.partner)
                found = self.peers.server.visit(address, self.me, operation.meeting, mine)
            else:
                found = self._await(operation, mine)
            if found is not None:
                totals.append(mine.total(found))
            return found is not None

        meeting: Meeting | None = self._carry_out(steps, exchange)
        if meeting is not None and meeting.partner is not None:
            self.counts.averages += meeting.exchanged
            self.counts.waits += meeting.waited
            self.counts.in_vain += meeting.waited and not meeting.exchanged
            if meeting.exchanged:
                self.counts.add_partner(meeting.partner)
        return totals[0] if totals else None

    def _await(self, operation: Await, source: MessageSource) -> Tensor | None:
        assert self.peers is not None
        began = time.perf_counter()
        try:
            while (left := began + self._patience - time.perf_counter()) > 0:
                found = self.peers.server.wait(operation.partner, operation.meeting, source, min(left, _LOOK_S))
                if found is not None or not self.peers.heartbeat.is_alive(operation.partner):
                    return found
            return None
        finally:
            self.counts.waited += time.perf_counter() - began

    def _carry_out(self, steps: Steps[T], exchange: Callable[[Any], bool] | None = None) -> T:
        def how(operation: Operation) -> Any:
            if isinstance(operation, Pick):
                return self._random.choice(operation.options)
            if isinstance(operation, Await | Visit):
                assert exchange is not None
                return exchange(operation)
            if not isinstance(operation, IsAlive | Notify | Notified):
                return answer(self.keys, operation)
            assert self.peers is not None  # a single worker needs no others
            if isinstance(operation, IsAlive):
                return self.peers.heartbeat.is_alive(operation.worker)
            if isinstance(operation, Notified):
                return self.peers.server.read_notifications()
            return self.peers.server.notify(self.peers.address_of(operation.worker))

        return carry_out(steps, how)

    def agrees(self, decision: bool, all: bool) -> bool:
        """Returns the result of a decision that Lightning requires of all ranks: each worker decides for itself."""
        return decision

    def publish(self, parameters: Iterable[Tensor]) -> None:
        """Publish this worker's counts and a sketch of its parameters for the others."""
        self.counts.seconds = time.perf_counter() - self._began
        if self.peers is not None:
            self.counts.sent = self._sent_before + self.peers.server.sent_bytes
            self.keys.put(f"sketch/{self.me}", sketch(parameters).numpy().tobytes())
        self.keys.put(f"counts/{self.me}", json.dumps(asdict(self.counts)).encode())

    def all_counts(self) -> dict[int, Counts]:
        """Returns the last published :class:`Counts` (batches, averages, waits) of all workers, by rank."""
        found = {worker: self.keys.find(f"counts/{worker}") for worker in range(self.size)}
        return {worker: Counts(**json.loads(text)) for worker, text in found.items() if text is not None}

    def consensus(self, workers: Collection[int]) -> float:
        """Returns the :func:`distance` of the workers' last published parameters, estimated from sketches (:func:`sketch`)."""
        found = [self.keys.find(f"sketch/{worker}") for worker in workers]
        sketches = [torch.frombuffer(bytearray(each), dtype=torch.float64) for each in found if each is not None]
        return distance(sketches) if sketches else 0.0

    def leave_snapshot(self, snapshot: bytes) -> None:
        """Publish the state for a restarted worker, in two slots in turn, so that a slot does not change while it is read."""
        keys, number = self.keys, self.keys.add("snapshots", 1)
        before = keys.get(f"snapshot/{self.me}")
        slot = 1 - int(before.split()[1]) if before else 0
        keys.put(f"snapshot/{self.me}/{slot}", snapshot)
        keys.swap(f"snapshot/{self.me}", before, f"{number} {slot}")

    def newest_snapshot(self) -> tuple[int, bytes]:
        """Returns the newest snapshot of the other workers: its worker and its bytes."""
        keys = self.keys
        while True:
            left = {worker: keys.get(f"snapshot/{worker}") for worker in range(self.size) if worker != self.me}
            worker, newest = max(left.items(), key=lambda entry: int((entry[1] or "0").split()[0]))
            found = keys.find(f"snapshot/{worker}/{newest.split()[1]}")
            if found is not None and keys.get(f"snapshot/{worker}") == newest:
                return worker, found

    def agree(self, scores: Scores, weights: bytes, seconds: float) -> dict[int, Scores]:
        """Returns the scores of each worker that reached the end, equal on all workers.

        Waits for workers that are alive, for `seconds` seconds at most. Their weights are then available by :meth:`weights_of`.
        """
        keys, deadline = self.keys, time.monotonic() + seconds
        if not keys.get(f"score/{self.me}"):  # else it was killed after this point, and others may already read
            keys.put(f"weights/{self.me}", weights)
            keys.put(f"score/{self.me}", json.dumps(scores).encode())
        while not (agreed := keys.get("agreed")):
            found = {worker: keys.find(f"score/{worker}") for worker in range(self.size)}
            missing = [worker for worker, text in found.items() if text is None]
            waits = self.peers is not None and any(self.peers.heartbeat.is_alive(worker) for worker in missing)
            if time.monotonic() > deadline or not waits:
                scores_of = {worker: json.loads(text) for worker, text in found.items() if text is not None}
                # The first worker decides which workers reached the end.
                keys.swap("agreed", "", json.dumps(scores_of))
            else:
                time.sleep(_REST_S)
        return {int(worker): tuple(each) for worker, each in json.loads(agreed).items()}

    def weights_of(self, worker: int) -> bytes:
        found = self.keys.find(f"weights/{worker}")
        assert found is not None
        return found

    def part(self) -> None:
        """Leave the other workers at the end of the run."""
        if self.peers is not None:
            self.peers.keys.add(f"gone/{self.me}", 1)
        self.close()

    def close(self) -> None:
        if self.peers is not None:
            self.peers.heartbeat.stop()
            self.peers.server.close()


def sketch(tensors: Iterable[Tensor]) -> Tensor:
    """Returns a projection of all values of some tensors, float64 ``[SKETCH_SIZE]``, which preserves distances.

    Each value is added, with a random sign, to a random entry; signs and entries are the same for all workers. Source: count
    sketch, Charikar, Chen and Farach-Colton (2002); as a random projection, Weinberger et al., "Feature Hashing for Large Scale
    Multitask Learning" (ICML 2009), Lemma 2.
    """
    values = torch.cat([torch.zeros(0), *(each.detach().reshape(-1).cpu() for each in tensors)]).double()
    drawn = torch.randint(2 * SKETCH_SIZE, values.shape, generator=torch.Generator().manual_seed(0))
    signs = 1.0 - 2.0 * (drawn % 2)
    return torch.zeros(SKETCH_SIZE, dtype=torch.float64).index_add_(0, drawn // 2, values * signs)


def distance(vectors: Sequence[Tensor]) -> float:
    """Returns the distance of vectors x_1..x_P to their mean m, relative to it: sqrt(sum of ``|x_r - m|^2`` / P) / ``|m|``."""
    rows = torch.stack(list(vectors)).double()
    offsets = rows - rows[0]  # exactly 0 for equal vectors, regardless of rounding
    root = (offsets - offsets.mean(0)).square().sum(1).mean().sqrt()
    return float(root / rows.mean(0).norm()) if root else 0.0
