"""Tensors from before a run, which steps take from closures, lists and globals, are the same on all ranks, or refused.

Test tiers: ranks of one process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_gnn import NotExactError, gather_nodes
from lightning_gnn.kernels import sums
from lightning_gnn.rows import local_rows
from lightning_gnn.rows.mode import active_mode
from rows.programs import CLASSES, Net, Program, make_graph, make_net, reference
from rows.ranks import assert_of_one_device, on_ranks

DRAWN = torch.Generator().manual_seed(7)


def drawn(*size: int) -> Tensor:
    return torch.rand(size, generator=DRAWN, dtype=torch.float64) + 0.5


GRAPH = make_graph()
OF_CLASSES, OF_LOSSES, TABLE = drawn(CLASSES), [drawn(), drawn()], {"rows": {"w": drawn(len(GRAPH.y))}}
IDS, CHOSEN, OF_EDGES = torch.tensor([3, 1, 17, 30]), drawn(len(GRAPH.y)) > 1, drawn(GRAPH.edge_index.size(1))
OF_RANKS = [drawn(CLASSES) for _ in range(3)]


def two_losses(net: Net, g: Any) -> Tensor:
    out = net(g.x, g.edge_index)
    first, second = F.cross_entropy(out[g.train_mask], g.y[g.train_mask]), out.square().mean()
    return OF_LOSSES[0] * first + OF_LOSSES[1] * second


class Weighs(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * OF_CLASSES


PROGRAMS: dict[str, Program] = {
    "weights of classes": lambda net, g: F.cross_entropy(net(g.x, g.edge_index), g.y, OF_CLASSES),
    "made of a constant": lambda net, g: (net(g.x, g.edge_index) * (OF_CLASSES.float() / 2).to(g.x)).sum(),
    "a global of another module": lambda net, g: Weighs()(net(g.x, g.edge_index)).sum(),
    "one of each node": lambda net, g: (net(g.x, g.edge_index).sum(-1) * TABLE["rows"]["w"]).sum(),
    "ids": lambda net, g: F.cross_entropy(net(g.x, g.edge_index)[IDS], g.y[IDS]),
    "a mask": lambda net, g: F.cross_entropy(net(g.x, g.edge_index)[CHOSEN], g.y[CHOSEN]),
    "weights of losses": two_losses,
    "constants and parameters": lambda net, g: (net.head.weight.square().sum(1) * OF_CLASSES).sum(),
    "rows of any nodes": lambda net, g: gather_nodes(net(g.x, g.edge_index), (g.n_id + 7) % 40).square().sum(),
    "every other edge": lambda net, g: net(g.x, g.edge_index[:, ::2]).square().sum(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_constants_are_those_of_one_device(name):
    assert_of_one_device(on_ranks(PROGRAMS[name], make_net(), 3), reference(PROGRAMS[name]), name)


def refused(program: Callable[[Net, Any], Any]) -> str:
    errors = on_ranks(program, make_net(), 3)
    assert all(isinstance(each, NotExactError) for each in errors), errors
    [text] = {str(each) for each in errors}
    assert re.search(r"test_constants\.py:\d+: ", text)
    return text


def test_what_ranks_have_made_differently_is_refused():
    def program(net: Net, g: Any) -> Tensor:
        mode = active_mode()
        assert mode is not None
        return (net(g.x, g.edge_index) * OF_RANKS[mode.ranks.world.rank]).sum()

    assert "differs between ranks" in refused(program)


def test_what_a_rank_makes_of_its_own_rows_is_refused():
    def program(net: Net, g: Any) -> Tensor:
        with local_rows():
            own = torch.ones(CLASSES).double()  # equal on all ranks by chance
        return (net(g.x, g.edge_index) * own).sum()

    assert "of unknown origin" in refused(program)


def test_lines_of_generated_code_are_not_the_users():
    generated: dict[str, Any] = {}
    file = "/tmp/torch_geometric.nn.sequential_Sequential_8743d4_x.py"
    exec(compile("def run(net, g, weight):\n    return net(g.x, g.edge_index) * weight", file, "exec"), generated)
    assert "unknown" in refused(
        lambda net, g: generated["run"](net, g, torch.func.vmap(torch.ones_like)(torch.ones(4)))
    )


def test_what_is_found_out_once_in_a_process_sends_no_message():
    class Raises(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    sums._zero_is_a_tie.cache_clear()
    with Raises():
        assert sums._zero_is_a_tie() in (True, False)
