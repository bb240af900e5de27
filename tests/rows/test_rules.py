"""What users register with register_row_rule has the values and gradients of one device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lightning_gnn import register_row_rule
from lightning_gnn.rows.mode import RowsMode, rows_of
from rows.harness import DAILY, Graph, Layout, compare, made_graph, on_ranks


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


def kept_gradients(graph: Graph, mode: RowsMode | None, ranks: int = 1) -> list[float]:
    """Returns norms of gradients that rows and a replicated tensor have kept."""
    with mode or nullcontext():
        rows, shared = graph.x @ graph.w, graph.x.mean(0).detach().clone().requires_grad_() * 2
        whole = rows.cumsum(0)
        for each in (rows, shared, whole):
            each.retain_grad()
        loss = (whole * rows).mean() + (graph.x * shared).pow(2).mean()
    with nullcontext() if mode is None else mode.activate(in_backward=True):
        (loss / ranks).backward()
    with mode or nullcontext():
        return [float(each.grad.norm()) for each in (rows, shared, whole)]


def test_gradients_that_tensors_keep_are_those_of_one_device():
    expected = kept_gradients(made_graph(), None)
    for found in on_ranks(Layout(3), lambda graph, mode: kept_gradients(graph, mode, 3)):
        assert found == pytest.approx(expected, rel=1e-12), found


def test_views_of_a_batch_without_samples_keep_their_rows():
    """They are not gathered: a conv could not read gathered sources of another type."""

    def view(graph: Graph, mode: RowsMode) -> list[int | None]:
        with mode:
            x = graph.x.unsqueeze(0)[:0]
            total, columns = map(int, x.shape[1:])
            made = x.reshape(1, 0, total, columns), x.view(0, total, 1, columns), torch.stack([x, x], 1)
        return [getattr(rows_of(each), "dim", None) for each in made]

    assert on_ranks(Layout(3), view) == [[2, 1, 2]] * 3


def test_changes_of_a_view_change_rows_beside_samples():
    def program(graph: Graph) -> Any:
        rows = torch.stack([graph.table, 2 * graph.table, graph.table]) + graph.t[None, :, None]
        rows.view(-1, 2).mul_(0.5)
        return rows.sum(0)

    assert not compare(program, DAILY)


@pytest.mark.parametrize("view", [lambda x: x.view(-1), lambda x: x.view_as(x.t().reshape(-1, 3))])
def test_a_view_of_rows_that_are_not_contiguous_raises_as_on_one_device(view):
    """A copy in its place would lose changes in place."""

    def columns_first(graph: Graph, mode: RowsMode | None) -> str:
        with mode or nullcontext(), pytest.raises(RuntimeError) as raised:
            view(graph.x.detach().t().contiguous().t())
        return str(raised.value)

    for found in (columns_first(made_graph(), None), *on_ranks(Layout(3), columns_first)):
        assert "view size is not compatible" in found
