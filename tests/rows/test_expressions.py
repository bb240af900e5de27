"""Programs on the rows of ranks have the values, gradients and errors of one device: the table is in expressions.txt."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from common import CAMPAIGN

from rows.harness import ALL, DAILY, Layout, compare, expression, on_one_device, whole_graph

EVERYWHERE = ("common",)
"""Groups that run on all layouts of ranks; others run on one each, and on all in ``make test-all``."""
OF_MANY_ROWS = ("h.squeeze_()", "linalg.solve(")
"""In programs that are refused where there is one row, or whose matrix is singular where there are few."""


def read_groups() -> dict[str, list[str]]:
    """Returns the programs of each group."""
    groups: dict[str, list[str]] = {}
    for line in (Path(__file__).parent / "expressions.txt").read_text().splitlines()[1:]:
        if line.startswith("# "):
            found = groups[line[2:]] = []
        elif line:
            found.append(line)
    return groups


GROUPS = read_groups()


def layouts_of(group: str, number: int) -> tuple[Layout, ...]:
    if CAMPAIGN:
        return ALL
    return DAILY if group in EVERYWHERE else (ALL[number % len(ALL)],)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("group", GROUPS)
def test_a_program_on_ranks_is_that_of_one_device(group: str) -> None:
    failures = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, line in enumerate(GROUPS[group]):
            program = expression(line)
            raises = isinstance(on_one_device(program), Exception)
            if raises != (group == "errors"):
                failures.append(f"{line}\n    raises on one device: {raises}")
            elif different := compare(program, layouts_of(group, number)):
                failures.append(f"{line}\n    {different}")
    assert not failures, f"{len(failures)} of {len(GROUPS[group])} programs:\n" + "\n".join(failures)


@pytest.mark.parametrize(("num_nodes", "num_edges"), [(6, 6), (1, 3), (4, 1)])
def test_a_program_on_few_rows_is_that_of_one_device(num_nodes: int, num_edges: int) -> None:
    """As many rows as features, as classes, and one."""
    whole, failures = whole_graph(num_nodes, num_edges), []
    lines = [line for group in GROUPS for line in GROUPS[group] if group != "errors"]
    lines = [line for line in lines if not any(part in line for part in OF_MANY_ROWS)]
    layout = Layout(3, whole=whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for line in lines if CAMPAIGN else lines[num_nodes::8]:
            program = expression(line)
            found = on_one_device(program, whole)
            if not isinstance(found, Exception) and (different := compare(program, (layout,))):
                failures.append(f"{line}\n    {different}")
    assert not failures, f"{len(failures)} programs:\n" + "\n".join(failures)
