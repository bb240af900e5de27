"""The watchdog: no alarm while ranks do the same, whatever their pace; soon an alarm where they do not. Real processes, too."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from common import campaign, examples
from hypothesis import given
from hypothesis import strategies as st
from processes import REPOSITORY, Finished, run

from lightning_gnn.comm.watchdog import Passed, State, difference, summary

# What follows from what ranks say ##############################################

JOINT, ROWS, CALL = "joint", "rows", "call"
Step = tuple[str, str]


@dataclass
class Rank:
    """Goes through a program: ``(JOINT, name)``, ``(ROWS, name)`` to and from its peer, ``(CALL, "")`` of torch.distributed."""

    program: list[Step]
    peer: int
    at: int = -1
    number: int = 0
    calls: int = 0
    passed: list[Passed] = field(default_factory=list)

    def begin(self) -> None:
        self.at += 1
        if self.at < len(self.program):
            kind, name = self.program[self.at]
            self.number += kind == JOINT
            self.calls += kind == CALL
            if kind != CALL:
                self.passed.append(Passed(self.number, f"{name}, step {self.at}", kind == JOINT, self.calls))

    def count(self) -> int:
        """Returns how often it has begun what it is in."""
        return sum(each.name == self.passed[-1].name for each in self.passed)

    def may_go_on(self, ranks: list[Rank]) -> bool:
        if not 0 <= self.at < len(self.program):
            return self.at < len(self.program)
        kind = self.program[self.at][0]
        if kind == CALL:
            return all(other.calls >= self.calls for other in ranks)
        if kind == JOINT:
            return all(self.passed[-1] in other.passed for other in ranks)
        name = self.passed[-1].name
        return sum(each.name == name for each in ranks[self.peer].passed) >= self.count()

    def state(self) -> State:
        waits = 0 <= self.at < len(self.program) and self.program[self.at][0] != CALL
        operation = self.passed[-1].name if waits else ""
        peer = self.peer if waits and self.program[self.at][0] == ROWS else None
        return State(operation, 2.0 if waits else 0.0, peer, "", self.number, self.calls, self.passed[-100:], "")


def stuck(programs: list[list[Step]], seed: int) -> tuple[list[Rank], set[str]]:
    """Runs ranks in a random order until none can go on; returns them, and what was found in what they said, however old."""
    draw = random.Random(seed)
    ranks = [Rank(program, (rank + 1) % len(programs)) for rank, program in enumerate(programs)]
    said = [rank.state() for rank in ranks]
    found = set()
    while able := [rank for rank in ranks if rank.may_go_on(ranks)]:
        draw.choice(able).begin()
        for number in range(len(ranks)):
            if draw.random() < 0.3:
                said[number] = ranks[number].state()
        found |= {difference(a, said[a], b, said[b]) for a in range(len(ranks)) for b in range(len(ranks)) if a != b}
    return ranks, found - {""}


steps = st.lists(
    st.sampled_from([(JOINT, "sum"), (JOINT, "gather"), (ROWS, "a"), (ROWS, "b"), (CALL, "")]), max_size=30
)


@examples(200)
@given(steps, st.integers(2, 4), st.integers(0, 10_000))
def test_no_alarm_whatever_the_pace(program, size, seed):
    ranks, found = stuck([program] * size, seed)
    assert all(rank.at == len(program) for rank in ranks)
    assert not found


@examples(200)
@given(steps, steps, st.sampled_from([(ROWS, "c"), (JOINT, "other"), (CALL, "")]), st.integers(0, 10_000))
def test_alarm_where_ranks_part(before, after, extra, seed):
    """One rank leaves something out; what follows it differs by its step, as in a training."""
    # A call of torch.distributed is known by the next operation of all ranks only.
    after = [
        *([(JOINT, "next")] if extra[0] == CALL else []),
        *(each for each in after if each[0] != CALL),
        (JOINT, "end"),
    ]
    before = [*before, (JOINT, "start")]
    ranks, _ = stuck([[*before, extra, *after], [*before, *after]], seed)
    assert difference(0, ranks[0].state(), 1, ranks[1].state())


def waits(operation: str, peer: int | None, number: int, *passed: Passed, calls: int = 0) -> State:
    return State(operation, 3.0, peer, "", number, calls, [*passed], "forward, model.py:7")


START, SUM = Passed(1, "start", True, 0), Passed(2, "sum", True, 0)
ROWS_A, ROWS_B = Passed(1, "rows of a", False, 0), Passed(1, "rows of b", False, 0)


def test_the_three_proofs():
    same = waits("sum", None, 2, START, ROWS_A, SUM)
    other = waits("gather", None, 2, START, ROWS_A, Passed(2, "gather", True, 0))
    assert difference(0, same, 1, other) == "Rank 0 started: sum; rank 1 started: gather."
    in_rows = waits("rows of a", 1, 1, START, ROWS_A)
    without = waits("sum", None, 2, START, SUM)
    assert difference(0, in_rows, 1, without) == "Rank 0 waits for rank 1 in: rows of a; but rank 1 is in: sum."
    in_others = waits("rows of b", 0, 1, START, ROWS_B)
    assert "in: rows of a; but rank 1 is in: rows of b." in difference(0, in_rows, 1, in_others)
    in_call = State("", 0.0, None, "", 1, 1, [START], "")
    assert "Rank 1 is in a call of torch.distributed" in difference(0, same, 1, in_call)
    # The same, but a message may still be on its way, or too much is forgotten to tell.
    assert not difference(0, in_rows, 1, same)
    assert not difference(0, in_rows, 1, waits("", None, 1, START))
    many = [Passed(1, "rows of b", False, 0)] * 100
    assert not difference(0, in_rows, 1, waits("sum", None, 2, *many, SUM))


def test_summary_names_who_is_missing():
    busy = State("", 0.0, None, "", 1, 0, [START], "forward, model.py:9")
    text = summary("Rank 0 has waited.", {0: waits("sum", None, 2, START, SUM), 1: busy}, 3)
    assert "rank 0: waits for the others, for 3.0 s now, in: sum; its code is in forward, model.py:7" in text
    assert "rank 1: is in no operation of this package, after: start; its code is in forward, model.py:9" in text
    assert "rank 2: does not respond" in text and text.endswith("Missing: rank 1, rank 2.")


# Real processes ###############################################################

SCRIPT = REPOSITORY / "tests" / "straying.py"


def stray(folder: Path, event: str, memory: str, timeout: float) -> Finished:
    return run(SCRIPT, event, memory, timeout, cwd=folder, timeout=120)


straying = pytest.mark.program(runs=stray)


def failed(ran: tuple[Path, Finished]) -> str:
    finished = ran[1]
    assert finished.code != 0, finished.output
    assert not finished.left_over and not finished.files, (finished.left_over, finished.files)
    return finished.output


@pytest.mark.slow
@straying
@pytest.mark.parametrize(("event", "memory", "timeout"), [("sleep", "shared", 5.0)])
def test_deadline(ran, event, memory, timeout):
    output = failed(ran)
    waits = r"rank 0: waits for rank 1, for \d+\.\d s now, in: Halo exchange \(forward\) of layer 'second', training step 3;"
    assert re.search(waits, output), output
    assert "Missing: rank 1." in output
    assert "its code is in forward" in output and "time.sleep(600)" in output  # the stack of the one that sleeps


@pytest.mark.slow
@straying
@pytest.mark.parametrize(("event", "memory", "timeout"), [("hook", "shared", 5.0), *campaign(("hook", "sockets", 5.0))])
def test_one_deadline_for_a_rank_that_sleeps_between_steps(ran, event, memory, timeout):
    """Lightning asks rank 0 something before each step, and would take a time-out for an answer."""
    output = failed(ran)
    asleep = float(re.search(r"asleep at (\S+)", output)[1])
    assert ran[1].ended - asleep < 30, output  # 10 on a machine that does nothing else
    waits = r"rank 1: waits for rank 0, for \d+\.\d s now, in: Lightning's check for SIGTERM"
    assert re.search(waits, output), output
    assert re.search(r"Rank 0 is not waiting for another rank, in on_train_epoch_start, .*straying.py", output), output


# The deadline is far: what ranks do tells before.
@pytest.mark.slow
@straying
@pytest.mark.parametrize(
    ("event", "memory", "timeout"),
    [("swap", "shared", 100.0), ("swap", "sockets", 100.0), ("skip", "sockets", 100.0)],
)
def test_another_branch(ran, event, memory, timeout):
    output = failed(ran)
    # The first layer exchanges nothing: what it makes of the features is kept.
    first, second = ("second", "first") if event == "swap" else ("second", "last")
    layers = "in: Halo exchange (forward) of layer '{}', training step 3; its code is in forward"
    lines = output.splitlines()
    assert any(line.startswith("  rank 0: ") and layers.format(first) in line for line in lines), output
    assert any(line.startswith("  rank 1: ") and layers.format(second) in line for line in lines), output


@pytest.mark.slow
@straying
@pytest.mark.parametrize(
    ("event", "memory", "timeout"), [("uneven", "shared", 100.0), *campaign(("uneven", "sockets", 100.0))]
)
def test_uneven_steps(ran, event, memory, timeout):
    output = failed(ran)
    assert "  rank 1: waits for" in output and "in: End of training, end of training" in output
