"""Runs programs of the grammar on one device and on ranks: each is exact, or refused by name.

    python tests/idioms/fuzz.py --programs 10000 --seed 0 --out fuzz.jsonl    # goes on where it was stopped
    python tests/idioms/fuzz.py --show 123 --shrink
    python tests/idioms/fuzz.py --grammar rows --programs 300    # programs whose rows are mixed

Real gloo ranks, two or as many as a program says, float64, lopsided partitions, the self-check on. The last line is JSON:
how many programs had which outcome.
"""

from __future__ import annotations

import argparse
import json
import linecache
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from conftest import RankFailed, RankPool

from idioms import grammar, row_grammar
from idioms.grammar import Program
from idioms.harness import EXACTLY, RTOL, STRATEGIES, Case, Result, difference, run

OUTCOMES = {
    "exact": "one device's values, weights and predictions",
    "refused": "by an error of ours on all ranks, before an optimizer has stepped",
    "refused late": "by an error of ours on all ranks, later",
    "warned": "only values differ that a warning names, or it says that nothing is known about the numbers",
    "discarded": "raises on one device, too",
    "unstable": "differs, but on one device, too, if x is changed in its 14th digit",
    "foreign": "raises something else",
    "hang": "a rank did not answer, or died",
    "WRONG": "differs, and nobody says so",
}
GRAMMARS = {"modules": grammar.draw, "rows": row_grammar.draw}
BAD = ("foreign", "hang", "WRONG")
TIMEOUT = 60.0
"""Seconds that a rank waits for another."""
BATCH = 20
"""Programs of one job; the ranks start anew after `FRESH` of them."""
FRESH = 1000
ALL = "all"
"""In place of the names of values that warnings speak of: one says that nothing is known of any."""


@dataclass(frozen=True)
class Verdict:
    """What a program has come to.

    Attributes:
        seed: of the program.
        outcome: a key of `OUTCOMES`.
        reason: the error, or what differs first.
        falsely: of a program that was refused, whether it gives the numbers of one device without the self-check.
        seconds: of computing, on the busier rank.
    """

    seed: int
    outcome: str
    reason: str = ""
    falsely: bool | None = None
    seconds: float = 0.0


def build(source: str, off_by: float = 0.0, **strategy: Any) -> Case:
    """Returns the case of a program's source, as if it were a file; `off_by` is the relative noise of ``x``."""
    module, name = ModuleType("program"), "program.py"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    sys.modules["program"] = module
    exec(compile(source, name, "exec"), module.__dict__)
    case: Case = module.case()
    case.strategy.update(timeout=TIMEOUT, **strategy)
    if off_by:
        generator = torch.Generator().manual_seed(0)
        case.data.x = case.data.x * (1 + off_by * torch.randn(case.data.x.shape, generator=generator).double())
    return case


def one_device(rank: int, world_size: int, programs: Sequence[Program], off_by: float) -> dict[int, Result]:
    """Returns what every `world_size`-th program gives on one device, by its place."""
    return {
        place: run(partial(build, programs[place].source, off_by), "auto", 1, "sorted", programs[place].stages)
        for place in range(rank, len(programs), world_size)
    }


@dataclass(frozen=True)
class OnRank:
    """What a program has come to on one rank.

    Attributes:
        result: without what it has seen; what is said are names of logged values that warnings speak of.
        differs: what differs first from one device, in words.
        rest: the same, without the values that warnings speak of.
        seconds: of computing.
    """

    result: Result
    differs: str | None
    rest: str | None
    seconds: float


def on_ranks(
    rank: int, world_size: int, todo: Sequence[tuple[Program, Any]], port: int, **strategy: Any
) -> list[OnRank]:
    """Returns what each program has come to on this rank."""
    import lightning_gnn

    meeting = torch.distributed.TCPStore("127.0.0.1", port, timeout=timedelta(minutes=5))
    found = []
    for place, (program, expected) in enumerate(todo):
        name, _ = STRATEGIES[program.scheme]
        options = {**EXACTLY.get(program.scheme, {}), **strategy}
        case, began = partial(build, program.source, **options), time.process_time()
        result = run(case, getattr(lightning_gnn, name), world_size, program.partition, program.stages)
        seconds = time.process_time() - began
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        # Rank 0 alone is heard to warn. And a rank that has raised is ahead of one that still waits for it.
        meeting.set(f"{place} {rank}", json.dumps(_warned_of(result)))
        warned = [name for each in range(world_size) for name in json.loads(meeting.get(f"{place} {each}"))]
        differs = None if result.error else difference(result.seen, expected, RTOL)
        rest = differs and difference(_without(result.seen, warned), _without(expected, warned), RTOL)
        if ALL in warned:
            rest = None
        found.append(OnRank(replace(result, seen={}, said=warned), differs, rest, seconds))
    return found


def _warned_of(result: Result) -> list[str]:
    """Returns the names of logged values that warnings of ours speak of; `ALL` if one says that the check could not run."""
    ours = [text for text in result.said if "It is recommended to use `self.log(" not in text]
    if any("so its results on" in text for text in ours):
        return [ALL]
    names = {name for found in result.seen.values() for _, values in found["values"] for name in values}
    return sorted(name for name in names if any(f"'{re.sub('_(step|epoch)$', '', name)}'" in text for text in ours))


def _without(found: Any, names: Sequence[str]) -> Any:
    """Returns nested dicts and lists without keys of these names."""
    if isinstance(found, Mapping):
        return {name: _without(value, names) for name, value in found.items() if name not in names}
    if isinstance(found, (list, tuple)):
        return type(found)(_without(each, names) for each in found)
    return found


class Fuzzer:
    """Judges programs on ranks that stay warm.

    Args:
        strategy: arguments of all strategies, in place of the programs'.
    """

    def __init__(self, pool: RankPool | None = None, **strategy: Any) -> None:
        self._pool, self._strategy = pool or RankPool(), strategy

    def close(self) -> None:
        """Ends the ranks."""
        self._pool.close()

    def judge(self, programs: Sequence[Program], is_false: bool = False) -> Iterator[Verdict]:
        """Yields a verdict on each program.

        Args:
            programs: in batches of `BATCH`.
            is_false: run those that are refused again without the self-check.
        """
        for first in range(0, len(programs), BATCH):
            if first and first % FRESH == 0:
                self._pool.close()
            yield from self._batch(programs[first : first + BATCH], is_false)

    def _batch(self, programs: Sequence[Program], is_false: bool) -> list[Verdict]:
        references = self._references(programs, 0.0)
        found: dict[int, Verdict] = {}
        for place, reference in references.items():
            if reference.error:
                found[place] = Verdict(programs[place].seed, "discarded", reference.error)
        places = [place for place in range(len(programs)) if place not in found]
        todo = [(programs[place], references[place].seen) for place in places]
        found |= zip(places, self._on_ranks(todo, **self._strategy))

        wrong = [place for place in places if found[place].outcome == "WRONG"]
        noisy = self._references([programs[place] for place in wrong], 1e-14)
        for number, place in enumerate(wrong):
            if difference(noisy[number].seen, references[place].seen, RTOL / 10) is not None:
                found[place] = replace(found[place], outcome="unstable")
        refused = [place for place in places if is_false and found[place].outcome == "refused"]
        todo = [(programs[place], references[place].seen) for place in refused]
        for place, again in zip(refused, self._on_ranks(todo, **{**self._strategy, "self_check": False})):
            found[place] = replace(found[place], falsely=again.outcome == "exact")
        return [found[place] for place in range(len(programs))]

    def _references(self, programs: Sequence[Program], off_by: float) -> dict[int, Result]:
        both = self._pool.run(2, one_device, programs, off_by, timeout=300) if programs else []
        return {place: result for each in both for place, result in each.items()}

    def _on_ranks(self, todo: Sequence[tuple[Program, Any]], **strategy: Any) -> list[Verdict]:
        if not todo:
            return []
        size = todo[0][0].ranks
        other = [place for place, (program, _) in enumerate(todo) if program.ranks != size]
        if other:  # those on as many ranks first
            same = [each for each in todo if each[0].ranks == size]
            found = iter(self._on_ranks(same, **strategy)), iter(self._on_ranks([todo[each] for each in other], **strategy))
            return [next(found[place in other]) for place in range(len(todo))]
        meeting = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            ranks = self._pool.run(size, on_ranks, todo, meeting.port, timeout=2 * TIMEOUT + 5 * len(todo), **strategy)
        except (RankFailed, EOFError, OSError) as error:
            self._pool.close()
            if len(todo) > 1:
                return [verdict for one in todo for verdict in self._on_ranks([one], **strategy)]
            return [Verdict(todo[0][0].seed, "hang", f"{type(error).__name__}: {error}")]
        return [_verdict(program, results) for (program, _), *results in zip(todo, *ranks)]


def _verdict(program: Program, ranks: Sequence[OnRank]) -> Verdict:
    """Returns what all ranks' results come to."""
    seconds = round(max(each.seconds for each in ranks), 3)
    errors = [each.result for each in ranks if each.result.error]
    if errors:
        first = next((result for result in errors if not result.is_ours), errors[0])
        is_late = any(each.result.steps for each in ranks)
        outcome = (
            ("refused late" if is_late else "refused") if all(each.result.is_ours for each in ranks) else "foreign"
        )
        return Verdict(program.seed, outcome, first.error, seconds=seconds)
    for outcome, text in (*(("WRONG", each.rest) for each in ranks), *(("warned", each.differs) for each in ranks)):
        if text is not None:
            return Verdict(program.seed, outcome, text, seconds=seconds)
    warned = ranks[0].result.said
    return Verdict(program.seed, "exact", f"warns of {warned}" if warned else "", seconds=seconds)


def shrink(fuzzer: Fuzzer, program: Program, wanted: Verdict) -> Program:
    """Returns a program with the same outcome, and as falsely refused, that has no statement to spare."""

    def or_simpler(simpler: Program) -> Program:
        [found] = fuzzer.judge([simpler], is_false=bool(wanted.falsely))
        return simpler if (found.outcome, bool(found.falsely)) == (wanted.outcome, bool(wanted.falsely)) else program

    for name, value in (("stages", ("fit",)), ("graph", "graph(48)"), ("scheme", "dgcl"), ("ranks", 2), ("partition", "sorted")):
        if getattr(program, name) != value:
            program = or_simpler(replace(program, **{name: value}))
    size = (len(program.statements) + 1) // 2
    while size:
        before = program
        for first in reversed(range(0, len(program.statements), size)):
            rest = program.statements[:first] + program.statements[first + size :]
            program = or_simpler(replace(program, statements=rest))
        size = size if program != before and size == 1 else size // 2
    return program


def kind_of(reason: str) -> str:
    """Returns what an error says without names and numbers."""
    text = reason.rpartition("in two parts: ")[2]
    text = re.sub(r"'[^']*'( \(\w+\))?", "'…'", text)
    return re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "0", text)[:120]


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Returns how many programs had which outcome, and why they were refused."""
    refused = [verdict for verdict in verdicts if verdict.outcome.startswith("refused")]
    asked = [verdict for verdict in refused if verdict.falsely is not None]
    return {
        "programs": len(verdicts),
        "outcomes": {name: sum(verdict.outcome == name for verdict in verdicts) for name in OUTCOMES},
        "refused because": dict(Counter(kind_of(verdict.reason) for verdict in refused).most_common()),
        "refused falsely": f"{sum(bool(verdict.falsely) for verdict in asked)} of {len(asked)}",
        "seconds per program": round(sum(verdict.seconds for verdict in verdicts) / max(len(verdicts), 1), 3),
        "bad": {name: [verdict.seed for verdict in verdicts if verdict.outcome == name] for name in BAD},
    }


def campaign(
    programs: int, seed: int, out: Path, is_false: bool, draw: Callable[[int], Program] = grammar.draw
) -> dict[str, Any]:
    """Returns the summary of programs `seed` to `seed + programs - 1`; their verdicts are in `out`, which is gone on with."""
    known = [Verdict(**json.loads(line)) for line in out.read_text().splitlines()] if out.exists() else []
    wanted = range(seed, seed + programs)
    done = {verdict.seed: verdict for verdict in known if verdict.seed in wanted}
    fuzzer = Fuzzer()
    try:
        with out.open("a") as file:
            for verdict in fuzzer.judge([draw(each) for each in wanted if each not in done], is_false):
                done[verdict.seed] = verdict
                file.write(json.dumps(asdict(verdict)) + "\n")
                file.flush()
                if verdict.outcome in BAD:
                    print(f"{verdict.seed}: {verdict.outcome}: {verdict.reason[:300]}", flush=True)
    finally:
        fuzzer.close()
    return summary([done[each] for each in wanted])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others count up from it")
    parser.add_argument("--grammar", choices=GRAMMARS, default="modules", help="that programs are drawn from")
    parser.add_argument("--out", type=Path, default=Path("fuzz.jsonl"))
    parser.add_argument(
        "--false-refusals", action="store_true", help="run refused programs without the self-check, too"
    )
    parser.add_argument("--show", type=int, metavar="SEED", help="print one program and its verdict")
    parser.add_argument(
        "--shrink", action="store_true", help="with --show: leave out what is not needed for its outcome"
    )
    options = parser.parse_args()
    draw = GRAMMARS[options.grammar]
    if options.show is None:
        print(json.dumps(campaign(options.programs, options.seed, options.out, options.false_refusals, draw), indent=1))
        return
    fuzzer = Fuzzer()
    try:
        program = draw(options.show)
        [verdict] = fuzzer.judge([program], is_false=True)
        if options.shrink:
            program = shrink(fuzzer, program, verdict)
            [verdict] = fuzzer.judge([program], is_false=True)
    finally:
        fuzzer.close()
    print(f"# {program.scheme} on {program.ranks}, {program.partition}, stages {program.stages}\n{program.source}\n{verdict}")


if __name__ == "__main__":
    os.environ.setdefault("LIGHTNING_GNN_STORE", "build/fuzz-store")
    import idioms.fuzz  # as ranks know it

    idioms.fuzz.main()
