"""Steps as users write them give what one device gives on three ranks, or are refused at their own line (float64).

Test tiers: ranks of one process.
"""

from __future__ import annotations

import re

import pytest
import torch
from common import campaign

from lightning_gnn import NotExactError
from rows.programs import FORMS, all_programs, assert_same, make_net, reference
from rows.ranks import on_ranks

REFUSED = {
    "sums and means by hand: builtin sum of rows": "gather_global",
    "sizes: loop_over_rows": "gather_global",
    "sizes: loop_over_pairs": "gather_global",
    "rows by their places: unbind": "gather_global",
    "numbers of Python: tolist of rows": "gather_global",
    "numbers of Python: tolist of labels": "gather_global",
    "numbers of Python: numpy of rows": "gather_global",
    "detached and cast: new_leaf": "manual_backward",
    "autograd: kept_gradient_of_rows": "manual_backward",
    "autograd: backward_of_rows": "manual_backward",
    "autograd: two_backwards": "manual_backward",
}
"""What the error says, beside file and line."""
DIFFERENTIATED_TWICE = {
    "autograd: gradient_penalty",
    "autograd: gradient_penalty_by_row",
    "autograd: gradient_of_hidden_rows",
    "autograd: gradients_of_parameters",
    "autograd: hessian_times_vector",
}
"""Bound convs compute first derivatives only, which torch says, or we where autograd.grad meets it."""
OF_FLOAT32 = {"metrics: cosine similarity"}


@pytest.mark.parametrize("size", [*campaign(1, 2, 4), 3])
@pytest.mark.parametrize("group", sorted(FORMS))
def test_programs(group, size):
    programs = all_programs()
    for name in (f"{group}: {each}" for each in FORMS[group]):
        expected, found = reference(programs[name]), on_ranks(programs[name], make_net(), size)
        if name in REFUSED:
            errors = [each for each in found if isinstance(each, NotExactError)]
            assert errors and all(re.search(r"programs\.py:\d+: ", str(each)) for each in errors), (name, found)
            assert all(REFUSED[name] in str(each) for each in errors), (name, errors)
            continue
        if name in DIFFERENTIATED_TWICE:
            assert any(re.search("create_graph|once_differentiable", str(each)) for each in found), (name, found)
            continue
        rtol = 1e-5 if name in OF_FLOAT32 else 1e-9
        for rank in found:
            assert not isinstance(rank, BaseException), (name, rank)
            value, gradients = rank
            assert_same(value, expected.value, name, rtol)
            wanted = {
                key: torch.zeros_like(gradients[key]) if g is None else g for key, g in expected.gradients.items()
            }
            assert_same(
                {key: gradients[key] for key in wanted},
                wanted,
                f"{name}, gradients",
                rtol,
                1e-7 * (rtol > 1e-9) + 1e-11,
            )
