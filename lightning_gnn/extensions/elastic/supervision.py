"""Supervision of the ranks of a host: they continue without lost ranks, together with the ranks of other hosts."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lightning_gnn.comm.listening import serve_store
from lightning_gnn.comm.processes import is_stopped
from lightning_gnn.extensions.elastic import membership
from lightning_gnn.extensions.elastic.environment import Place
from lightning_gnn.extensions.elastic.hosts import Hosts, NoQuorumError
from lightning_gnn.extensions.elastic.recovery import Departure, End, Generation
from lightning_gnn.launching.failures import GRACE_S, STOP_S, Failure
from lightning_gnn.launching.supervisor import Supervisor

_LOOK_S, _FOREVER_S = 0.02, 10.0**9
_IDLE_S = 0.1  # the ranks have the cores
_STEPS = 1 << 32  # above all numbers of epochs


@dataclass
class Notes:
    """Parts of a host's report that only the supervisors read.

    Attributes:
        left: for each rank that continues, its call of the Trainer, its epochs, whether it has finished the call, and the least
            number of ranks, as in :class:`~lightning_gnn.extensions.elastic.recovery.Departure`.
        positions: on the host of rank 0, call, epoch, and positions of the loggers at its start, for the last starts of epochs.
    """

    left: list[list[Any]] = field(default_factory=list)
    positions: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Decision:
    """State with which the ranks of a generation continue; equal on all hosts.

    Attributes:
        again: whether the call of the Trainer begins again.
        source: rank whose state all ranks take; -1 for none.
        epoch: epoch that begins again; -1 for the start of the call.
        positions: call, epoch and positions of the loggers at its start; empty if they are unknown.
        reason: reason against continuing; empty if the ranks continue.
    """

    again: bool
    source: int
    epoch: int
    positions: Sequence[Any]
    reason: str

    @classmethod
    def of(cls, generation: membership.Generation) -> Decision:
        """Returns the decision for a generation, from the notes of its hosts."""
        notes = [Notes(**json.loads(report.notes or "{}")) for report in generation.reports]
        left = [Departure(*each) for note in notes for each in note.left]  # [] where ranks start or join
        known = [each for each in left if each.call]
        calls = sorted({each.call for each in known}) or [0]
        known_at = [each for note in notes for each in note.positions if each[0] == calls[-1]]
        # Without its start on rank 0, which writes the logs, an epoch of other ranks has not begun.
        last = max((epoch for _, epoch, _ in known_at), default=_STEPS)
        epoch = min(last, max((max(each.epochs, default=-1) for each in known), default=-1))
        again = not known or not all(each.finished for each in known)
        source = next((rank for rank, each in enumerate(left) if epoch in each.epochs), -1)
        epoch = -1 if source < 0 else epoch
        least, size = max((each.least for each in left), default=1), len(left)
        reason = f"{size} ranks remain, and min_ranks={least}" if size < least else ""
        if len(calls) > 1 or (len(known) < size and calls[0] > 1):
            reason = f"ranks are in different calls of the Trainer ({', '.join(map(str, calls))})"
        at = [each for each in known_at if not again or each[1] <= epoch]
        return cls(again, source, epoch, at[-1] if at else (), reason)


class Supervision:
    """Ranks of this host.

    Args:
        supervisor: their processes.
        hosts: all hosts of the run.
        timeout_s: seconds to wait for a rank.
    """

    def __init__(self, supervisor: Supervisor, hosts: Hosts, timeout_s: float) -> None:
        self._supervisor, self._hosts, self._timeout_s = supervisor, hosts, timeout_s
        self._generation = membership.Generation(0)
        self._positions: list[list[Any]] = []
        self._store: Any = None
        self._has_changed = False
        self._tried: tuple[int, ...] = (0, -1)  # call and epoch in which ranks left although none was lost

    def start(self, seconds: float) -> int:
        """Begin the first generation, when the ranks have arrived at their first call; returns the port of its store.

        Args:
            seconds: seconds to wait for the ranks.
        """
        children = self._supervisor.children
        notes = json.dumps(asdict(Notes([[0, [], False, 1] for _ in children])))
        self._hosts.connect()
        report = self._hosts.make_report(self._serve(), [(number, -1) for number in range(len(children))], notes=notes)
        self._hosts.on_change(self._note_change)
        self._generation = self._hosts.start(report)
        places = list(self._places())
        for child, place in zip(children, places):
            child.rank = place.rank
            child.handlers["epoch"] = self._keep_positions
        self._supervisor.start_all(self._messages(places, Decision.of(self._generation), ()), seconds)
        return places[0].port

    def run(self) -> int:
        """Supervise the ranks until they end; returns the exit status of this process.

        Raises:
            RankFailedError: the code of a rank failed, or the run cannot continue.
        """
        supervisor = self._supervisor
        try:
            while supervisor.running():
                supervisor.wait_for(self._must_act, _FOREVER_S, _IDLE_S)
                if supervisor.stopping:
                    supervisor.end(STOP_S)
                self._raise_failure()
                if supervisor.running():
                    self._continue()
        except BaseException:
            supervisor.end(STOP_S if supervisor.stopping else GRACE_S)
            raise
        finally:
            self._hosts.close()
        self._raise_failure()
        codes = [child.exit_code() or 0 for child in supervisor.children]
        ended = [code for code in codes if code >= 0]
        return max(ended) if ended else max(map(abs, codes))

    def forward(self, number: int) -> None:
        """Forward a signal to all ranks, which then end."""
        self._supervisor.stopping = True
        for child in self._supervisor.running():
            child.signal(number)

    def _note_change(self) -> None:
        self._has_changed = True

    def _keep_positions(self, value: tuple[int, tuple[int, Any]]) -> None:
        """Keep the positions of the loggers at the last starts of epochs, which rank 0 sends; tell it of hosts that join."""
        call, (epoch, positions) = value
        self._positions = [*self._positions[-3:], [call, epoch, positions]]
        if self._hosts.wants_join and call == 1:
            for child in self._supervisor.children[:1]:
                with suppress(OSError):
                    child.connection.send(None)

    def _must_act(self) -> bool:
        """Returns whether a rank has left or finished a call, failed, or ended; or another host has."""
        supervisor = self._supervisor
        ended = len(supervisor.running()) < len(supervisor.children)
        left = any("left" in each.received for each in supervisor.children)
        in_call = any("began" in each.received for each in supervisor.children)
        return bool(supervisor.look() or ended or left or (self._has_changed and in_call))

    def _raise_failure(self) -> None:
        """Raises RankFailedError if the code of a rank has failed: the others would fail as well."""
        for failure in self._supervisor.look():
            if failure.what in ("failed", "left"):
                raise failure.error()

    def _serve(self) -> int:
        self._store, port = serve_store(self._hosts.address)
        return port

    def _places(self) -> Iterator[Place]:
        """Yields the places of the ranks of this host."""
        generation, name = self._generation, self._hosts.name
        address, port = generation.rendezvous
        ranks, hosts = generation.ranks_of(name), len(generation.reports)
        for number, rank in enumerate(ranks):
            host = generation.hosts.index(name)
            yield Place(rank, generation.size, number, len(ranks), host, hosts, address, port)

    def _continue(self) -> None:
        """Wait until every rank has left or finished the call, or ended; then begin the next generation with the others."""
        supervisor, children, before = self._supervisor, self._supervisor.children, self._generation
        self._wait_for_all()
        survivors = supervisor.running()
        lost = [child for child in children if child not in survivors]
        for failure in supervisor.look():
            print(failure, file=sys.stderr)
        if not survivors:
            return
        left = [child.received.pop("left") for child in survivors]
        supervisor.children = survivors
        again = not all(each.finished for each in left)
        if len(before.hosts) == 1 and not lost and again and not self._hosts.wants_join:
            # Communication has failed, or ranks disagree: that would happen again at the same place.
            tried, self._tried = self._tried, (left[0].call, max((max(each.epochs, default=-1) for each in left), default=-1))
            if self._tried <= tried:
                return self._send([End()] * len(survivors))
        steps = [each.call * _STEPS + (_STEPS // 2 if each.finished else max(each.epochs, default=-1)) for each in left]
        notes = Notes([[each.call, list(each.epochs), each.finished, each.least] for each in left], self._positions)
        ranks = [(child.rank, step) for child, step in zip(survivors, steps)]
        admits = self._hosts.wants_join and again and left[0].call == 1
        report = self._hosts.make_report(self._serve(), ranks, admits, json.dumps(asdict(notes)))
        try:
            self._generation, self._has_changed = self._hosts.next_generation(report), False
            decision = Decision.of(self._generation)
        except NoQuorumError as error:
            self._generation = membership.Generation(0, (report,))
            decision = replace(Decision.of(self._generation), reason=str(error).rstrip("."))
        first_lost, places = lost[0].rank if lost else 0, list(self._places())
        for child, place in zip(survivors, places):
            child.rank = place.rank
        if decision.reason:
            self._end(decision, first_lost)
        if (now := self._generation).size != before.size:
            sizes = f"Ranks: {before.size} before, {now.size} now. Hosts: {len(before.hosts)} before, {len(now.hosts)} now."
            print(f"The run continues. {sizes}", file=sys.stderr, flush=True)
        for child in survivors:
            child.failures.clear()
            if not decision.again:
                del child.received["began"]
        self._positions = [[*decision.positions]] if decision.positions else []
        new = {old: rank for r in self._generation.reports if r.host in before.hosts for (old, _), rank in
               zip(r.ranks, self._generation.ranks_of(r.host))}  # fmt: skip
        self._send(self._messages(places, decision, [new.get(rank) for rank in range(before.size)]))

    def _messages(self, places: Sequence[Place], decision: Decision, new_ranks: Sequence[int | None]) -> list[Generation]:
        positions = decision.positions[2] if decision.positions else None
        same = new_ranks, decision.again, decision.source, decision.epoch, positions
        return [Generation(self._generation.number, place, *same) for place in places]

    def _send(self, messages: Sequence[Generation | End]) -> None:
        for child, message in zip(self._supervisor.children, messages):
            with suppress(OSError):  # it has ended
                child.connection.send(message)

    def _end(self, decision: Decision, lost: int) -> None:
        """End the run, after the source has written its state; raises RankFailedError."""
        children = self._supervisor.children
        self._send([End(decision.epoch if child.rank == decision.source else -1) for child in children])
        writer = next((child for child in children if child.rank == decision.source), None)

        def has_saved() -> bool:
            self._supervisor.look()
            return writer is None or "saved" in writer.received or writer.exit_code() is not None

        self._supervisor.wait_for(has_saved, STOP_S)
        path = None if writer is None else writer.received.get("saved", (0, None))[1]
        saved = "" if path is None else (
            f'. The state at the start of epoch {decision.epoch} is in {path}: continue with trainer.fit(..., ckpt_path="{path}")'
        )  # fmt: skip
        raise Failure(lost, "is lost", decision.reason + saved).error()

    def _wait_for_all(self) -> None:
        """Wait until every rank has left or finished the call, or ended; end ranks that are stopped or late."""
        supervisor = self._supervisor
        limit, late_since = self._timeout_s + GRACE_S, dict[int, float]()
        while late := [child for child in supervisor.running() if "left" not in child.received]:
            self._raise_failure()
            interrupted = any("left" in each.received and not each.received["left"].finished for each in supervisor.children)
            if interrupted or self._has_changed or len(supervisor.running()) < len(supervisor.children):
                self._store = None  # ranks that meet do not wait for a lost one
            ranks = {child.rank for child in supervisor.children}
            peer = next(rank for rank in range(self._generation.size + 1) if rank not in ranks)
            for child in late:
                if child.progress is not None and self._hosts.has_lost:  # if the network is cut, no connection is closed
                    child.progress.loss = peer, "is on a host that is lost"
                stopped, inside = is_stopped(child.pid), "began" in child.received
                since = late_since.setdefault(child.pid, time.monotonic()) if stopped or inside else time.monotonic()
                if (stopped and interrupted) or time.monotonic() - since > limit:
                    child.signal(signal.SIGKILL)
            time.sleep(_LOOK_S)
