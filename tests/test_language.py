"""Each rule of .ci/language.py finds a bad example and passes a good one."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from processes import REPOSITORY

_SPEC = spec_from_file_location("language", REPOSITORY / ".ci" / "language.py")
assert _SPEC is not None and _SPEC.loader is not None
language = module_from_spec(_SPEC)
_SPEC.loader.exec_module(language)

LONG = " ".join(["word"] * 31)
PAGES = {
    "banned": ("Gradients are those of one device.", "Gradients equal single-device gradients."),
    "speech": ("The error says which layer differs.", "The error names the layer."),
    "what clause": ("Training keeps what the layers compute.", "Training keeps the activations. What is a halo node?"[:31]),
    "spelling": ("Neighbours are labelled.", "Neighbors are labeled."),
    "opener": ("Of attention, copies are cheaper.", "For attention, copies are cheaper. `Of` is code."),
    "long sentence": (f"It is {LONG}.", f"It is {LONG[:100]}. It is {LONG[:100]}."),
    "long cell": (f"| a | {LONG} |", f"| a | {LONG[:100]} |"),
}
NAMES = {
    "participle": ("def _counted(): ...", "def count_rows(seed): ..."),
    "adverb or pronoun": ("def f(own): ...", "class A:\n    def f(self, x): self.owner = x"),
    "preposition": ("self.of_rows = 1", "self.num_rows = 1"),
    "spelling": ("class Neighbour: ...", "class Neighbor: ..."),
}


def rules(findings) -> set[tuple[str, str]]:
    return {(each.area, each.rule) for each in findings}


@pytest.mark.parametrize("rule", PAGES)
def test_text(rule):
    bad, good = PAGES[rule]
    assert ("docs", rule) in rules(language.check_page("a.md", bad)) and not rules(language.check_page("a.md", good))
    if rule != "long cell":
        for area, code in (("docstrings", '"""{}"""'), ("docstrings", "x = 1  # {}"), ("messages", "raise ValueError('{}')")):
            assert (area, rule) in rules(language.check_code("a.py", code.format(bad)))
            assert not rules(language.check_code("a.py", code.format(good)))


@pytest.mark.parametrize("rule", NAMES)
def test_names(rule):
    bad, good = NAMES[rule]
    assert rules(language.check_code("a.py", bad)) == {("names", rule)} and not rules(language.check_code("a.py", good))


def test_docstrings():
    """A docstring's first word, and its arguments, which are checked one by one."""
    assert rules(language.check_code("a.py", '"""Lets layers wait."""')) == {("docstrings", "docstring opener")}
    half = LONG[:100]
    good = f'"""Returns rows.\n\nArgs:\n    a: {half}\n    b (int): {half}\n    **c: {half}\n\nReturns:\n    Rows\n"""'
    assert not rules(language.check_code("a.py", good))


def test_skipped_parts():
    """Code blocks, comments and tables that benchmarks have made; line numbers stay."""
    skipped = [
        "```\nalike\n```",
        "text:\n\n    alike\n    anew\n",
        "<!-- alike -->",
        "<!-- python a.py -->\n| alike |\n<!-- end -->",
    ]
    for each in skipped:
        [found] = language.check_page("a.md", f"{each}\n\nalike\n")
        assert found.line == each.count("\n") + 3
    assert rules(language.check_page("a.md", "- one\n- of two\n  alike\n")) == {("docs", "banned")}
    [found] = language.check_code("a.py", "warn(f'{x} goes anew {y}')")
    assert found.text == "anew"


@pytest.mark.parametrize(
    "subject, good",
    [
        ("docs: rewrite the README", True),
        ("nn: seed dropout per layer", True),
        ("docs: the README in plain English", False),
        ("comm: cached halo rows", False),
        ("Rewrite the README", False),
        (f"docs: rewrite {'a' * 60}", False),
    ],
)
def test_subjects(subject, good):
    assert bool(rules(language.check_subject("1234567", subject))) != good


def test_the_limits():
    """Few words are allowed, each with a reason, and limits name rules only."""
    lists = language.LISTS
    assert len(lists["allowed"]) <= 20 and all(lists["allowed"].values())
    text, names = {*lists["text"], "opener", "long sentence"}, {*lists["names"]}
    known = {"docs": text | {"long cell"}, "docstrings": text | {"docstring opener"}, "messages": text, "names": names}
    limits = json.loads((REPOSITORY / ".ci" / "limits.json").read_text())["language"]
    assert {area: {*counts} for area, counts in limits.items()} == known


def test_the_program():
    """It shows the findings of a path."""
    command = [sys.executable, REPOSITORY / ".ci" / "language.py", "--show", "docs/style.md"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(line.startswith("docs/style.md:") for line in shown.splitlines() if line)
