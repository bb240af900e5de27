"""What users register with register_row_rule has the values and gradients of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_gnn import register_row_rule
from rows.harness import DAILY, Graph, compare


def operator(name: str, centres: bool) -> Any:
    """Returns an operator with a backward, row by row or over all rows."""

    @torch.library.custom_op(f"rowtests::{name}", mutates_args=())
    def made(x: torch.Tensor) -> torch.Tensor:
        return x * x - (x * x).mean(0) if centres else x * x

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * (grad - grad.mean(0) if centres else grad)

    made.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))
    return made


row_wise, centred, not_said = operator("row_wise", False), operator("centred", True), operator("not_said", False)
register_row_rule(row_wise)
register_row_rule(torch.ops.rowtests.centred, "all_rows")


@pytest.mark.parametrize("call", [row_wise, torch.ops.rowtests.row_wise, centred])
def test_operators_with_a_rule(call):
    def program(graph: Graph) -> Any:
        return (call(graph.x) * graph.t.unsqueeze(1)).sum(), call(graph.x)

    assert not compare(program, DAILY)


def test_operators_without_a_rule_name_themselves():
    def program(graph: Graph) -> Any:
        return not_said(graph.x).sum()

    assert "register_row_rule(torch.ops.rowtests.not_said)" in str(compare(program, DAILY))
