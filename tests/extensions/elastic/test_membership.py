"""Exhaustive check of the membership protocol: all orders of messages, losses, cuts and deadlines, for few hosts and failures.

A state has the members, the ranks that run, and the messages on each connection, which arrive in order. The search visits each
state that is reachable once. The properties and rules are in docs/elastic-protocol.md.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from lightning_gnn.extensions.elastic.membership import (
    Accepted,
    Decided,
    Generation,
    HostReport,
    Member,
    Message,
    Messages,
    Outcome,
    Promise,
    Refused,
)

NAMES = "ABCD"


class Violation(AssertionError):
    """State that violates a property, with the events that lead to it."""


def report_of(host: str, admits_hosts: bool = False) -> HostReport:
    return HostReport(host, "127.0.0.1", 1, ((0, 1),), admits_hosts)


class State(NamedTuple):
    """State of all hosts; members, messages and generations are numbers of the search's tables.

    Attributes:
        members: member of each host; -1 after a crash.
        runs: numbers of the generations whose ranks run, for each host.
        queues: messages on the way from one host to another.
        cuts: connections that carry no messages.
        notices: connections whose loss one end, the first, has yet to notice.
        values: decided values, by number of the generation.
        budget: failures that may still happen: ranks, crashes, cuts, heals.
        was_healed: whether connections were healed.
    """

    members: tuple[int, ...]
    runs: tuple[frozenset[int], ...]
    queues: tuple[tuple[int, ...], ...]
    values: tuple[int, ...]
    budget: tuple[int, int, int, int]
    cuts: frozenset[frozenset[int]] = frozenset()
    notices: frozenset[tuple[int, int]] = frozenset()
    was_healed: bool = False


class Search:
    """Search of all states.

    Args:
        num_hosts: number of hosts of generation 1.
        ranks: number of ranks that fail.
        crashes: number of hosts that crash.
        cuts: number of times that connections are cut.
        heals: number of times that all connections are healed.
        num_joining: number of further hosts that join.
        is_early: whether deadlines may pass at any time; else only if nothing else can happen.
        groups: whether a cut separates groups of hosts; else it can be any set of connections.
        member: class of members, perhaps without a rule.
        waits_for_ranks: whether a host reports only when its ranks have left.
        is_prompt: whether ranks leave as soon as their host learns of a loss; else at any later time.
        is_late: whether connections are healed only when nothing else happens any more; else at any time.
        cut_sets: connections of each possible cut, such as "AB AC"; all by default.
    """

    def __init__(
        self,
        num_hosts: int,
        ranks: int = 0,
        crashes: int = 0,
        cuts: int = 0,
        heals: int = 0,
        num_joining: int = 0,
        is_early: bool = False,
        groups: bool = True,
        member: type[Member] = Member,
        waits_for_ranks: bool = True,
        is_prompt: bool = False,
        is_late: bool = False,
        cut_sets: list[str] | None = None,
    ) -> None:
        self.size, self.is_early, self.waits_for_ranks = num_hosts + num_joining, is_early, waits_for_ranks
        self.num_hosts = num_hosts
        self.is_prompt, self.is_late = is_prompt, is_late
        self.names = NAMES[: self.size]
        self.pairs = list(itertools.permutations(range(self.size), 2))
        self.index = {pair: index for index, pair in enumerate(self.pairs)}
        self.cut_sets, self.groups = self.find_cuts(groups), groups
        if cut_sets is not None:
            self.cut_sets = [frozenset(frozenset(map(NAMES.index, pair)) for pair in some.split()) for some in cut_sets]
        self.tables: dict[Any, int] = {}
        self.objects: list[Any] = []
        self.steps: dict[Any, tuple[int, list[tuple[int, int]]]] = {}
        self.results: dict[str, int] = {}
        self.stale: dict[tuple[int, int], bool] = {}
        first = Generation(1, tuple(map(report_of, self.names[:num_hosts])))
        none = Generation(0)
        members = tuple(self.number_of(member(name, first if name in first.hosts else none)) for name in self.names)
        runs = tuple(frozenset({1} if name in first.hosts else ()) for name in self.names)
        queues: tuple[tuple[int, ...], ...] = ((),) * len(self.pairs)
        self.start = State(members, runs, queues, (-1, self.number_of(first)), (ranks, crashes, cuts, heals))

    def find_cuts(self, groups: bool) -> list[frozenset[frozenset[int]]]:
        connections = [frozenset(pair) for pair in itertools.combinations(range(self.size), 2)]
        if not groups:
            return [frozenset(some) for n in range(1, len(connections)) for some in itertools.combinations(connections, n)]
        sides = [set(side) for n in range(1, self.size) for side in itertools.combinations(range(self.size), n) if 0 in side]
        return [frozenset(pair for pair in connections if len(pair & side) == 1) for side in sides]

    def number_of(self, thing: Any) -> int:
        key = thing
        if isinstance(thing, Member):
            values = vars(thing).values()
            key = tuple(frozenset(value.items()) if isinstance(value, dict) else value for value in values)
        if key not in self.tables:
            self.tables[key] = len(self.objects)
            self.objects.append(thing)
        return self.tables[key]

    def call(self, number: int, method: str, *arguments: Any) -> tuple[int, list[tuple[int, int]]]:
        """Returns a member after a call, and the receivers and messages; each pair of member and call is computed once."""
        key = number, method, arguments
        if key not in self.steps:
            member = copy.copy(self.objects[number])
            given = [self.objects[each] if isinstance(each, int) else each for each in arguments]
            messages = getattr(member, method)(*given) or []
            sent = [(self.names.index(receiver), self.number_of(message)) for receiver, message in messages]
            self.steps[key] = self.number_of(member), sent
        return self.steps[key]

    def act(self, state: State, host: int, method: str, *arguments: Any) -> State:
        """Returns the state after a call of a host's member."""
        before: Member = self.objects[state.members[host]]
        number, sent = self.call(state.members[host], method, *arguments)
        member: Member = self.objects[number]
        queues = list(state.queues)
        values = state.values
        for receiver, message in sent:
            if isinstance(self.objects[message], Decided):
                values = self.record(values, self.objects[message].generation)
            if self.is_alive(state, receiver) and not self.is_stale(state.members[receiver], message):
                queues[self.index[host, receiver]] += (message,)
        members, runs, notices = list(state.members), list(state.runs), state.notices
        members[host] = number
        if member.generation is not before.generation:
            runs[host] |= {member.generation.number}
            values = self.record(values, member.generation)
        if member.outcome is not None and before.outcome is None:
            runs[host] = frozenset()
            others = [other for other in range(self.size) if other != host]
            for other in others:
                queues[self.index[other, host]] = ()
            notices |= {(other, host) for other in others if self.is_alive(state, other)}
        for each, (_, receiver) in enumerate(self.pairs):
            if receiver == host and queues[each]:
                queues[each] = tuple(message for message in queues[each] if not self.is_stale(number, message))
        state = state._replace(members=tuple(members), runs=tuple(runs), queues=tuple(queues), notices=notices, values=values)
        self.check(state)
        if self.is_prompt and member.outcome is None and member.report is None and member.has_changed:
            return next(self.leave(state, host))[1]
        return state

    def is_stale(self, number: int, message: int) -> bool:
        """Returns whether a message has no effect on a member, now and later; removing it leaves fewer states."""
        key = number, message
        if key not in self.stale:
            member, given = self.objects[number], self.objects[message]
            if isinstance(given, Decided):
                self.stale[key] = given.generation.number <= member.generation.number
            elif isinstance(given, Promise | Accepted | Refused):
                is_old = given.number == member.generation.number and given.ballot < member._ballot
                self.stale[key] = given.number < member.generation.number or is_old
            else:
                self.stale[key] = False
        return self.stale[key]

    def is_alive(self, state: State, host: int) -> bool:
        return state.members[host] >= 0 and self.objects[state.members[host]].outcome is None

    def record(self, values: tuple[int, ...], generation: Generation) -> tuple[int, ...]:
        """Returns the decided values with a further one: one value for each number, which contains a quorum."""
        number = self.number_of(generation)
        if number in values or not generation.number:
            return values
        known = values[generation.number] if generation.number < len(values) else None
        if known is not None:
            raise Violation("one value")
        previous = self.objects[values[-1]].hosts
        kept = [host for host in previous if host in generation.hosts]
        if not is_quorum(kept, previous):
            raise Violation("tie" if 2 * len(kept) == len(previous) else "majority")
        return (*values, number)

    def check(self, state: State) -> None:
        running = 0
        for number, value in enumerate(state.values[1:], 1):
            hosts = [self.names.index(host) for host in self.objects[value].hosts]
            running += all(number in state.runs[host] for host in hosts)
            if any(number in each for each in state.runs) and any(
                min(state.runs[host], default=number) < number for host in hosts
            ):
                raise Violation("no old rank")
        if running > 1:
            raise Violation("one side")

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Yields events and states after them; failures first, which need not happen."""
        yield from self.failures(state)
        was_any = False
        for event, after in self.events(state):
            was_any = True
            yield event, after
        late = [] if was_any and not self.is_early else self.deadlines(state)
        yield from late
        if not was_any and not late:
            self.check_end(state)

    def failures(self, state: State) -> Iterator[tuple[str, State]]:
        ranks, crashes, cuts, heals = state.budget
        for host in filter(lambda host: self.is_alive(state, host), range(self.size)):
            member: Member = self.objects[state.members[host]]
            if ranks and member.report is None and member.generation.number:
                yield from self.leave(state._replace(budget=(ranks - 1, crashes, cuts, heals)), host)
            if crashes:
                others = [other for other in range(self.size) if other != host]
                queues = tuple(() if host in pair else queue for pair, queue in zip(self.pairs, state.queues))
                yield (
                    f"crash {host}",
                    state._replace(
                        members=tuple(-1 if each == host else number for each, number in enumerate(state.members)),
                        runs=tuple(frozenset() if each == host else run for each, run in enumerate(state.runs)),
                        queues=queues,
                        notices=state.notices | {(other, host) for other in others if self.is_alive(state, other)},
                        budget=(ranks, crashes - 1, cuts, heals),
                    ),
                )
        if cuts and not state.cuts:
            for some in self.cut_sets:
                ends = {pair for pair in self.pairs if frozenset(pair) in some}
                notices = state.notices | {pair for pair in ends if self.is_alive(state, pair[0])}
                yield (
                    f"cut {sorted(map(sorted, some))}",
                    state._replace(cuts=some, notices=notices, budget=(ranks, crashes, cuts - 1, heals)),
                )
        if heals and state.cuts and not (self.is_late and next(self.events(state), None)):
            healed = state._replace(cuts=frozenset(), budget=(ranks, crashes, cuts, heals - 1), was_healed=True)
            unseen = {pair for pair in state.notices if frozenset(pair) in state.cuts and self.is_alive(state, pair[1])}
            yield "heal", healed._replace(notices=state.notices - unseen)
            if not unseen:
                connected = {pair for pair in self.pairs if frozenset(pair) in state.cuts}
                queues = tuple(() if pair in connected else queue for pair, queue in zip(self.pairs, state.queues))
                after = healed._replace(queues=queues)
                for one, other in sorted(connected):
                    if self.is_alive(after, one) and self.is_alive(after, other):
                        after = self.act(after, one, "on_connect", self.names[other])
                yield "connect again", after

    def events(self, state: State) -> Iterator[tuple[str, State]]:
        for pair, queue in zip(self.pairs, state.queues):
            if queue and frozenset(pair) not in state.cuts:
                sender, receiver = pair
                queues = list(state.queues)
                queues[self.index[pair]] = queue[1:]
                event = f"{self.names[sender]} to {self.names[receiver]}: {text_of(self.objects[queue[0]])}"
                yield event, self.act(state._replace(queues=tuple(queues)), receiver, "on_message", self.names[sender], queue[0])
        for pair in state.notices:
            host, lost = pair
            if not self.is_alive(state, host):
                continue
            if not state.queues[self.index[lost, host]] or frozenset(pair) in state.cuts:
                after = state._replace(notices=state.notices - {pair})
                yield f"{self.names[host]} loses {self.names[lost]}", self.act(after, host, "on_lost", self.names[lost])
        for host in filter(lambda host: self.is_alive(state, host), range(self.size)):
            member: Member = self.objects[state.members[host]]
            if not self.is_prompt and member.report is None and member.has_changed:
                yield from self.leave(state, host)
            if not member.generation.number and member.report is None:
                after = self.act(state, host, "on_ready", self.number_of(report_of(self.names[host])))
                for other in filter(lambda other: other != host and self.is_alive(state, other), range(self.size)):
                    after = self.act(after, host, "on_connect", self.names[other])
                yield f"{self.names[host]} joins", after
            old = {number for number in state.runs[host] if number < member.generation.number or member.report is not None}
            if old:
                runs = tuple(run - old if each == host else run for each, run in enumerate(state.runs))
                yield f"ranks of {host} leave {old}", state._replace(runs=runs)

    def leave(self, state: State, host: int) -> Iterator[tuple[str, State]]:
        if self.waits_for_ranks:
            state = state._replace(runs=tuple(frozenset() if each == host else run for each, run in enumerate(state.runs)))
        report = self.number_of(report_of(self.names[host], admits_hosts=host == 0 and self.size > self.num_hosts))
        yield f"{self.names[host]} is ready", self.act(state, host, "on_ready", report)

    def deadlines(self, state: State) -> list[tuple[str, State]]:
        alive = [host for host in range(self.size) if self.is_alive(state, host)]
        members = {host: self.objects[state.members[host]] for host in alive}
        waiting = [host for host, member in members.items() if member.report is not None and member.generation.number]
        return [(f"deadline of {self.names[host]}", self.act(state, host, "on_deadline")) for host in waiting]

    def check_end(self, state: State) -> None:
        """Check a state in which nothing happens any more, without further failures."""
        members = {self.names[host]: self.objects[number] for host, number in enumerate(state.members) if number >= 0}
        for host, member in members.items():
            result = member.outcome.value if member.outcome else f"generation {member.generation.number}"
            self.results[result] = self.results.get(result, 0) + 1
            runs = state.runs[self.names.index(host)]
            if member.outcome is None and runs != {member.generation.number} - {0}:
                raise Violation("an end")
            if member.outcome is Outcome.EXCLUDED and host in self.objects[state.values[-1]].hosts:
                raise Violation("an end")
            if self.groups and not state.was_healed and not self.is_early and member.outcome is not None:
                hosts = member.generation.hosts
                mine = self.names.index(host)
                near = [each for each in members if frozenset({mine, self.names.index(each)}) not in state.cuts]
                if is_quorum([each for each in hosts if each in near], hosts):
                    raise Violation("an end")

        if not state.was_healed and not self.is_early and not any(member.outcome is None for member in members.values()):
            hosts = max((member.generation for member in members.values()), key=lambda each: each.number).hosts
            for some in (some for n in range(1, len(hosts) + 1) for some in itertools.combinations(hosts, n)):
                links = {frozenset(map(self.names.index, pair)) for pair in itertools.combinations(some, 2)}
                if is_quorum(list(some), hosts) and members.keys() >= set(some) and not links & state.cuts:
                    raise Violation("an end")

    def run(self, limit: int = 10_000_000) -> int:
        """Visit all states; returns their number."""
        parents: dict[State, tuple[State, str] | None] = {self.start: None}
        front = [self.start]
        while front:
            following = []
            for state in front:
                last = "at the end"
                try:
                    for last, after in self.successors(state):
                        if after not in parents:
                            parents[after] = state, last
                            following.append(after)
                except Violation as violation:
                    raise Violation(self.describe(str(violation), state, parents)) from None
            front = following
            assert len(parents) < limit, f"more than {limit} states"
        return len(parents)

    def describe(self, text: str, state: State, parents: dict[State, tuple[State, str] | None]) -> str:
        events = []
        step = parents[state]
        while step is not None:
            state, event = step
            events.append(event)
            step = parents[state]
        return "\n".join([text, *reversed(events)])


def text_of(message: Message) -> str:
    value = getattr(message, "value", None) or getattr(message, "generation", None)
    details = [f"{getattr(message, 'ballot', '')}", "".join(value.hosts) if value else "", "".join(getattr(message, "lost", ""))]
    return " ".join([type(message).__name__, *filter(None, details)])


def is_quorum(hosts: list[str], previous: tuple[str, ...]) -> bool:
    return 2 * len(hosts) > len(previous) or (2 * len(hosts) == len(previous) and previous[0] in hosts)


class WithoutQuorum(Member):
    """Decides with any vote."""

    def _is_decisive(self, votes: Any) -> bool:
        return bool(votes)


class WithoutTieRule(Member):
    """Accepts each half as a quorum."""

    def _is_decisive(self, votes: Any) -> bool:
        return 2 * len({*votes}) >= len(self.generation.hosts)

    def _may_continue(self, hosts: Any) -> bool:
        return 2 * len({*hosts} & {*self.generation.hosts}) >= len(self.generation.hosts)


class WithoutPromise(Member):
    """Accepts earlier rounds than it has promised."""

    def _vote(self, message: Any) -> Message:
        self._promised = min(self._promised, message.ballot)
        return super()._vote(message)


class WithoutAdoption(Member):
    """Proposes its own value even if another one was accepted."""

    def _select_value(self) -> Generation:
        return self._value


class WithoutMajority(Member):
    """Proposes the hosts that are ready, however few."""

    def _may_continue(self, hosts: Any) -> bool:
        return True


class WithLateReports(Member):
    """Counts the report of a joining host after it has joined."""

    def _receive_report(self, sender: str, message: Any) -> Messages:
        if not message.generation.number and self.generation.number:
            message = replace(message, generation=self.generation)
        return super()._receive_report(sender, message)


CASES: dict[str, dict[str, Any]] = {
    "2 hosts, all failures": dict(num_hosts=2, ranks=1, crashes=1, cuts=1, heals=1, is_early=True),
    "3 hosts, rank and host": dict(num_hosts=3, ranks=1, crashes=1),
    "3 hosts, two hosts": dict(num_hosts=3, crashes=2),
    "3 hosts, cut and host": dict(num_hosts=3, crashes=1, cuts=1, is_prompt=True),
    "3 hosts, late hosts": dict(num_hosts=3, cuts=1, heals=1, is_late=True),
    "1 host, two join": dict(num_hosts=1, num_joining=2, ranks=1, crashes=1),
    "2 hosts, one joins": dict(num_hosts=2, num_joining=1, ranks=1, crashes=1),
    "3 hosts, some connections": dict(num_hosts=3, cuts=1, heals=1, groups=False, is_late=True),
}


LONG_CASES: dict[str, dict[str, Any]] = {
    "3 hosts, cut, host and late hosts": dict(num_hosts=3, crashes=1, cuts=1, heals=1, is_late=True, is_prompt=True),
    "3 hosts, some connections and host": dict(num_hosts=3, crashes=1, cuts=1, groups=False, is_prompt=True),
    "3 hosts, some connections and rank": dict(num_hosts=3, ranks=1, cuts=1, groups=False, is_prompt=True),
    "3 hosts, healed at any time": dict(num_hosts=3, cuts=1, heals=1, cut_sets=["AC BC"], is_prompt=True),
    "3 hosts, any deadline": dict(num_hosts=3, crashes=1, cuts=1, is_early=True, is_prompt=True),
    "4 hosts, host": dict(num_hosts=4, crashes=1),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.campaign) for case in LONG_CASES)])
def test_properties(case: str) -> None:
    search = Search(**{**CASES, **LONG_CASES}[case])
    print(f"{case}: {search.run()} states, ends of hosts: {search.results}")


RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "quorum": ("one value", dict(num_hosts=3, cuts=1, groups=False, member=WithoutQuorum)),
    "tie": ("tie", dict(num_hosts=2, cuts=1, member=WithoutTieRule)),
    "promise": ("one value", dict(num_hosts=3, cuts=1, groups=False, member=WithoutPromise)),
    "adoption": ("one value", dict(num_hosts=3, cuts=1, groups=False, member=WithoutAdoption)),
    "ranks left": ("no old rank", dict(num_hosts=2, crashes=1, waits_for_ranks=False)),
    "late report": ("no old rank", dict(num_hosts=2, num_joining=1, ranks=1, crashes=1, member=WithLateReports)),
    "majority": ("majority", dict(num_hosts=3, cuts=1, heals=1, member=WithoutMajority)),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_is_necessary(rule: str) -> None:
    found, case = RULES[rule]
    with pytest.raises(Violation, match=found) as error:
        Search(**case).run()
    print(error.value)
