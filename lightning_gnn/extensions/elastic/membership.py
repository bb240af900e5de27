"""Membership of an elastic run: how hosts agree on the hosts and ranks of the next generation (docs/elastic-protocol.md).

There are no sockets, threads or clocks here: methods return the messages to send. Attributes are replaced, never changed in
place, so that a copy of a :class:`Member` is cheap for the exhaustive test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

Ballot = tuple[int, str]
"""Round of a proposal and its proposer; later rounds are greater."""

_NO_BALLOT: Ballot = (0, "")


@dataclass(frozen=True)
class HostReport:
    """A host's part of a generation.

    Attributes:
        host: name of the host, unique in the run.
        address: address that the other hosts reach.
        port: free port of the host, for the rendezvous of ranks if its first rank becomes rank 0.
        ranks: for each rank that continues: its number in the previous generation, and its newest finished step. A joining host
            numbers its ranks from 0, with step -1.
        admits_hosts: whether joining hosts may be in the next generation: this host is at the end of an epoch.
        notes: text for the supervisors, which the protocol does not read.
    """

    host: str
    address: str
    port: int
    ranks: tuple[tuple[int, int], ...]
    admits_hosts: bool = False
    notes: str = ""


@dataclass(frozen=True)
class Generation:
    """Hosts and ranks that train together.

    Attributes:
        number: number of the generation, from 1; 0 before the first.
        reports: reports of its hosts, in order.
    """

    number: int
    reports: tuple[HostReport, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts, in order."""
        return tuple(report.host for report in self.reports)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(len(report.ranks) for report in self.reports)

    @property
    def source(self) -> int:
        """Rank whose state all ranks take: the newest finished step, and the lowest rank at a tie."""
        steps = [step for report in self.reports for _, step in report.ranks]
        return steps.index(max(steps))

    @property
    def rendezvous(self) -> tuple[str, int]:
        """Address and port of the host of rank 0."""
        return next((report.address, report.port) for report in self.reports if report.ranks)

    def ranks_of(self, host: str) -> range:
        """Returns the ranks of a host in this generation, in the order of its report."""
        index = self.hosts.index(host)
        first = sum(len(report.ranks) for report in self.reports[:index])
        return range(first, first + len(self.reports[index].ranks))


@dataclass(frozen=True)
class Ready:
    """All ranks of the sender have left its generation, or are dead.

    Attributes:
        generation: the sender's generation, from which a receiver may learn a decision that it has missed.
        report: report of the sender.
        lost: hosts that the sender has lost.
    """

    generation: Generation
    report: HostReport
    lost: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Prepare:
    """A proposer starts a round for the generation after `number`."""

    number: int
    ballot: Ballot


@dataclass(frozen=True)
class Promise:
    """The sender refuses earlier rounds; `value` is the value that it accepted in round `accepted`."""

    number: int
    ballot: Ballot
    accepted: Ballot
    value: Generation | None


@dataclass(frozen=True)
class Accept:
    """Request of a proposer to accept a value."""

    number: int
    ballot: Ballot
    value: Generation


@dataclass(frozen=True)
class Accepted:
    """The sender has accepted the value of a round."""

    number: int
    ballot: Ballot


@dataclass(frozen=True)
class Refused:
    """The sender has promised the later round `ballot`."""

    number: int
    ballot: Ballot


@dataclass(frozen=True)
class Decided:
    """The value of a generation is decided."""

    generation: Generation


Message = Ready | Prepare | Promise | Accept | Accepted | Refused | Decided
Messages = list[tuple[str, Message]]
"""Receivers and messages."""


class Outcome(Enum):
    """End of a host's membership."""

    NO_QUORUM = "no quorum"
    EXCLUDED = "excluded"


def has_quorum(hosts: Iterable[str], previous: tuple[str, ...]) -> bool:
    """Returns whether hosts are more than half of the previous generation's hosts, or half of them with the first host."""
    count = 2 * len(set(hosts) & set(previous))
    return count > len(previous) or (count == len(previous) > 0 and previous[0] in hosts)


class Member:
    """State of one host.

    Args:
        host: name of the host.
        generation: generation 0 with the report of the host, for the first host of a run; generation 0 without hosts for others.

    Attributes:
        generation: the present generation.
        report: this host's report for the next generation, once it is ready; None before.
        reports: reports of ready hosts, with the hosts that each has lost.
        lost: hosts that this host has lost.
        outcome: end of the membership; None as long as the host takes part.
    """

    def __init__(self, host: str, generation: Generation) -> None:
        self.host, self.generation = host, generation
        self.report: HostReport | None = None
        self.reports: Mapping[str, tuple[HostReport, frozenset[str]]] = {}
        self.lost: frozenset[str] = frozenset()
        self.outcome: Outcome | None = None
        self._clear_votes()

    @property
    def joining(self) -> tuple[str, ...]:
        """Hosts that are ready to join."""
        return tuple(sorted(self.reports.keys() - {*self.generation.hosts, self.host} - self.lost))

    @property
    def has_changed(self) -> bool:
        """Whether a host of the generation is lost or has left it, so that the ranks of this host must leave it."""
        hosts = self.generation.hosts
        return self.outcome is not None or any(host in self.lost or host in self.reports for host in hosts)

    def on_ready(self, report: HostReport) -> Messages:
        """Take part in the next generation: all ranks of this host have left the present one, or are dead."""
        self.report = report
        return self._send_all(Ready(self.generation, report, self.lost))

    def on_lost(self, host: str) -> Messages:
        """Continue without a host whose connection closed, or whose deadline passed; it remains lost."""
        self.lost |= {host}
        if host not in self.generation.hosts:
            self.reports = {name: ready for name, ready in self.reports.items() if name != host}
        elif self.report is not None and self.outcome is None:
            return self._send_all(Ready(self.generation, self.report, self.lost))
        return []

    def on_connect(self, host: str) -> Messages:
        """Returns the messages for a host to which a connection was made."""
        messages: Messages = [(host, Decided(self.generation))] if self.generation.number else []
        return messages if self.report is None else [*messages, (host, Ready(self.generation, self.report, self.lost))]

    def on_deadline(self) -> None:
        """End the membership unless the next generation is decided: no quorum can be reached."""
        if self.report is not None and self.outcome is None:
            self.outcome = Outcome.NO_QUORUM

    def on_message(self, sender: str, message: Message) -> Messages:
        """Returns the messages that follow from a message."""
        learned = self._learn(message.generation) if isinstance(message, (Ready, Decided)) else []
        if self.outcome is not None or isinstance(message, Decided):
            return learned
        if isinstance(message, Ready):
            return learned + self._receive_report(sender, message)
        if isinstance(message, (Prepare, Accept)):
            if message.number == self.generation.number:
                return self._deliver([(sender, self._vote(message))])
            return [(sender, Decided(self.generation))] if message.number < self.generation.number else []
        if message.number != self.generation.number:
            return []
        if isinstance(message, Refused):
            return self._retry(message)
        return self._count(sender, message) if message.ballot == self._ballot else []

    def _clear_votes(self) -> None:
        self._promised, self._accepted = _NO_BALLOT, _NO_BALLOT
        self._accepted_value: Generation | None = None
        self._round, self._ballot = 0, _NO_BALLOT
        self._value = self.generation  # of this host's round; of no meaning before it
        self._promises: Mapping[str, Promise] = {}
        self._acceptances: frozenset[str] = frozenset()

    def _send_all(self, message: Message) -> Messages:
        """Send a message to the hosts of the generation, to this host last."""
        others = [host for host in self.generation.hosts if host != self.host]
        return self._deliver([(host, message) for host in (*others, self.host)])

    def _deliver(self, messages: Messages) -> Messages:
        """Returns the messages to other hosts; delivers messages to this host."""
        found: Messages = []
        for receiver, message in messages:
            found += self.on_message(self.host, message) if receiver == self.host else [(receiver, message)]
        return found

    def _learn(self, generation: Generation) -> Messages:
        """Enter a later generation, or end if it excludes this host; a joining host waits for a generation with it."""
        before = self.generation.hosts
        if generation.number <= self.generation.number or self.outcome is not None:
            return []
        if self.host in generation.hosts:
            self.generation, self.report = generation, None
            self.reports = {name: self.reports[name] for name in self.reports if name not in (*before, *generation.hosts)}
            self._clear_votes()
        elif self.host in before:
            self.outcome = Outcome.EXCLUDED
        # Each host sends the decision: the proposer may have ended, or may not reach all hosts.
        receivers = dict.fromkeys((*before, *generation.hosts))
        return [(host, Decided(generation)) for host in receivers if host != self.host]

    def _receive_report(self, sender: str, message: Ready) -> Messages:
        if message.generation.number > self.generation.number:  # this host joins, and does not vote
            return []
        is_member = sender in message.generation.hosts
        is_old = message.generation.number < self.generation.number
        if is_old and (is_member or sender in self.generation.hosts):
            return [(sender, Decided(self.generation))]
        self.reports = {**self.reports, sender: (message.report, message.lost)}
        if self.host in message.lost and sender not in self.lost:
            return self.on_lost(sender)
        return self._propose() if is_member else []

    def _propose(self) -> Messages:
        """Start a round, if this is the first host that it has not lost, and all such hosts are ready."""
        present = [host for host in self.generation.hosts if host not in self.lost]
        if present[0] != self.host or any(host not in self.reports for host in present):
            return []
        lost = {host: lost for host, (_, lost) in self.reports.items()}
        if any(other in lost[host] and host not in lost[other] for host in present for other in present):
            return []  # if the other host has not ended, it soon loses the first, too
        admits_hosts = any(self.reports[host][0].admits_hosts for host in present)
        chosen: list[str] = []
        for host in (*present, *self.joining) if admits_hosts else present:
            if not any(host in lost[name] or name in lost[host] for name in chosen):
                chosen.append(host)
        reports = tuple(self.reports[host][0] for host in chosen)
        if not self._may_continue(chosen) or not any(report.ranks for report in reports):
            return []
        self._round += 1
        self._ballot = (self._round, self.host)
        self._value = Generation(self.generation.number + 1, reports)
        self._promises, self._acceptances = {}, frozenset()
        return self._send_all(Prepare(self.generation.number, self._ballot))

    def _retry(self, message: Refused) -> Messages:
        """Start a later round than a proposer that follows this host in the order; wait for an earlier one."""
        order, (number, proposer) = self.generation.hosts, message.ballot
        if message.ballot < self._ballot:
            return []
        self._round = max(self._round, number)
        return self._propose() if order.index(self.host) < order.index(proposer) else []

    def _vote(self, message: Prepare | Accept) -> Message:
        if message.ballot < self._promised:
            return Refused(message.number, self._promised)
        self._promised = message.ballot
        if isinstance(message, Prepare):
            return Promise(message.number, message.ballot, self._accepted, self._accepted_value)
        self._accepted, self._accepted_value = message.ballot, message.value
        return Accepted(message.number, message.ballot)

    def _count(self, sender: str, message: Promise | Accepted) -> Messages:
        """Count a vote for this host's round; each part of the round ends with a quorum."""
        if isinstance(message, Promise):
            had_quorum = self._is_decisive(self._promises)
            self._promises = {**self._promises, sender: message}
            if had_quorum or not self._is_decisive(self._promises):
                return []
            self._value = self._select_value()
            return self._send_all(Accept(message.number, message.ballot, self._value))
        self._acceptances |= {sender}
        return self._learn(self._value) if self._is_decisive(self._acceptances) else []

    def _is_decisive(self, votes: Iterable[str]) -> bool:
        return has_quorum(votes, self.generation.hosts)

    def _may_continue(self, hosts: Iterable[str]) -> bool:
        return has_quorum(hosts, self.generation.hosts)

    def _select_value(self) -> Generation:
        """Returns the value that was accepted in the latest round of all promises, else this host's own value."""
        latest = max(self._promises.values(), key=lambda promise: promise.accepted)
        return latest.value or self._value
