"""Programs of a grammar: each gives the numbers of one device on ranks, or is refused by name (two gloo ranks, float64).

The campaign is ``python tests/idioms/fuzz.py --programs 10000``; ``--show SEED --shrink`` finds what of a program is to blame.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from common import campaign
from torch_geometric.nn import Sequential

from idioms.fuzz import BAD, BATCH, GRAMMARS, Fuzzer, Verdict, build, shrink
from idioms.grammar import Program, Statement
from idioms.harness import generated_modules, run


def program(*statements: tuple[str, str]) -> Program:
    """Returns a program with these lines, and a log that has nothing to do with them."""
    said = [Statement("", (line,)) for line in statements]
    log = Statement("log", (("training_step", "self.log('epoch', float(self.current_epoch))"),))
    return Program(0, "dgcl", "sorted", ("fit",), "graph(48)", (LOSS, CONV, log, *said))


LOSS = Statement("loss", (("training_step", "loss = F.cross_entropy(out[mask], y[mask])"),))
LEAVES = "forward", "x = x + float(x.detach().numpy().mean())"
CONV = Statement("conv", (("__init__", "self.conv = nn.SAGEConv(8, 8)"), ("forward", "x = self.conv(x, edge_index)")))


@pytest.mark.parametrize(("first", "count"), [(0, 3), *campaign(*((first, BATCH) for first in range(0, 200, BATCH)))])
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_programs_are_exact_or_refused(ranks, grammar, first, count):
    found = [*Fuzzer(ranks).judge([GRAMMARS[grammar](seed) for seed in range(first, first + count)])]
    assert [verdict for verdict in found if verdict.outcome in BAD] == []
    assert sum(verdict.outcome == "discarded" for verdict in found) <= count // 3


def test_the_grammar_of_rows_gives_python():
    for seed in range(100):
        compile(GRAMMARS["rows"](seed).source, "program.py", "exec")


def test_a_program_leaves_the_class_of_its_models():
    lines = (("__init__", "self.conv = nn.Sequential('x, e', [(nn.GCNConv(8, 8), 'x, e -> x'), torch.nn.ReLU()])"), CONV.lines[1])
    source, before = program(*lines).source, Sequential.forward
    assert not run(partial(build, source), "auto", 1, "sorted", ("fit",)).error
    assert Sequential.forward is before and not generated_modules()


def test_the_fuzzer_sees_what_is_wrong(ranks):
    checked, unchecked = Fuzzer(ranks), Fuzzer(ranks, self_check=False)
    refused = program(LEAVES)
    no_halo = program(
        ("data", "from idioms.broken import NoHalo"), ("trainer", "'callbacks': [NoHalo()], 'limit_val_batches': 0")
    )
    raises = program(("on_train_epoch_end", "assert self.trainer.world_size == 1"))
    raises_everywhere = program(("on_train_epoch_end", "assert self.trainer.world_size == 0"))
    verdicts = checked.judge([program(), refused, no_halo, raises, raises_everywhere])
    assert [verdict.outcome for verdict in verdicts] == ["exact", "refused", "WRONG", "foreign", "discarded"]
    assert [verdict.outcome for verdict in unchecked.judge([program(), no_halo])] == ["exact", "WRONG"]


@pytest.mark.campaign
def test_the_fuzzer_leaves_out_what_is_not_to_blame(ranks):
    whole = program(("on_train_epoch_end", "self.log('grown', self.head.weight.norm())"), LEAVES)
    small = shrink(
        Fuzzer(ranks), replace(whole, stages=("fit", "test"), graph="directed(64, 3)"), Verdict(0, "refused")
    )
    # On one device a program without loss does not run.
    assert [line for each in small.statements for line in each.lines] == [*LOSS.lines, LEAVES]
    assert (small.stages, small.graph) == (("fit",), "graph(48)")
