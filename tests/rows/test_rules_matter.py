"""Each rule is needed: without it, where each row is treated by itself, a program of expressions.txt fails."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch

from lightning_gnn.rows.mode import RULES, RowsMode, map_leaves, name_of
from lightning_gnn.rows.placement import REPLICATED, RowCount
from rows.harness import Layout, compare, expression
from rows.test_expressions import GROUPS

ROW_WISE = ("rowwise", "rowwise_", "keep_placement", "like", "draw", "run_unchanged", "_new_tensor", "_leave", "_init")
"""Names of rules that are right where each row is treated by itself, or draw other values, or concern values without rows, or
raise."""
OF_OTHERS = (
    "unbind",
    "set_",
    "resize_",
    "resize_as_",
    "as_strided_",
    "squeeze_",
    "is_nonzero",
    "backward",
    "special_",
    "sinc_",
    "nelement",
    "new_empty",
)
"""Functions that raise, or have the rule of another one; tests/rows/programs.py has those that raise."""
LAYOUT = Layout(3)


def by_itself(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """The rule of a function that does to a rank's rows what it does to all."""
    found = mode.row_tensors(args, kwargs)

    def own(value: Any) -> Any:
        return value.rows.count if isinstance(value, RowCount) else value

    out = func(*map_leaves(args, own), **map_leaves(kwargs, own))
    if not found:
        return mode.place(out, REPLICATED)
    rows = found[0][1].rows
    return mode.place(out, rows.at(0))  # type: ignore[union-attr]


def rules() -> dict[str, list[Any]]:
    """Returns the functions whose rule is another one, by name; not draws, which have other values, and no properties."""
    found: dict[str, list[Any]] = {}
    for function, rule in RULES.items():
        name = name_of(function).removeprefix("linalg_")
        is_property = getattr(function, "__name__", "") in ("__get__", "__set__", "__delete__")
        is_users = rule is RowsMode.run_without_rule or "rowtests" in str(function)
        is_apart = is_users or is_property or name.startswith(("__", *OF_OTHERS))
        if rule.__name__ not in ROW_WISE and not is_apart:
            found.setdefault(name, []).append(function)
    return found


LINES = [line for group in GROUPS for line in GROUPS[group] if group != "errors"]


def programs_of(name: str) -> list[str]:
    return [line for line in LINES if re.search(rf"\b{re.escape(name)}\(", line)]


@pytest.mark.campaign
@pytest.mark.parametrize("name", sorted(name for name in rules() if programs_of(name)))
def test_a_rule_matters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    for function in rules()[name]:
        monkeypatch.setitem(RULES, function, by_itself)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert any(compare(expression(line), (LAYOUT,)) for line in programs_of(name))


def test_each_rule_has_a_program() -> None:
    assert [name for name in rules() if not programs_of(name)] == []
