"""Plans that are made anew between epochs: all ranks change at once, numbers stay, and nothing changes for little."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from common import assert_same, awkward_graph, single, train
from conftest import RankFailed
from test_planned import slow_pair

from lightning_gnn import DGCLStrategy
from lightning_gnn.comm import replan
from lightning_gnn.planning.presets import uniform
from lightning_gnn.strategies import dgcl
from lightning_gnn.strategies.dgcl import DGCLScheme

LINKS = {"slow pair": slow_pair(3), "uniform": replace(uniform(3, 10.0), stage_seconds=1e-3)}  # rows go directly there
PART = torch.arange(60) % 2
PART[50:] = 2  # nodes without edges, whose rank relays the rows of others, or has nothing to do


def trained(
    rank: int, size: int, graph: Any, model: str, told: str, links: str, gain: float = 0.2, deaf: int = -1
) -> dict[str, Any]:
    """Trains over what the topology was told to be, and finds the links to be others after the second epoch and the fourth."""
    seen: dict[str, Any] = {"measured": 0, "said": [], "stages": []}

    def measured(world: Any) -> Any:
        seen["measured"] += 1
        return LINKS[links]

    def noted(exchange: Any, topology: Any) -> bool:
        changed = again(exchange, topology)
        seen["stages"].append([getattr(each, "route", None) is not None for each in exchange._exchanges])
        return changed

    again = replan.ReplannedExchange.replan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dgcl, "measured", measured)
        patch.setattr(replan, "rank_zero_info", seen["said"].append)
        patch.setattr(replan, "GAIN", gain)
        patch.setattr(replan.ReplannedExchange, "replan", noted)
        if rank == deaf:
            patch.setattr(replan.ReplannedExchange, "take", deaf_to_changes)
        options = {"plan": "spst", "topology": LINKS[told], "replan": 2}
        found = train(rank, size, graph, model, options=options, trainer={"max_epochs": 5}, data={"partition": PART})
        return {"result": found, **seen}


take = replan.ReplannedExchange.take


def deaf_to_changes(exchange: Any, choices: Any) -> None:
    if not hasattr(exchange, "_prices"):
        take(exchange, choices)


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_all_ranks_follow_the_new_plan(ranks, model):
    graph = awkward_graph()
    expected = single(graph, model, trainer={"max_epochs": 5})
    found = ranks.run(3, trained, graph, model, "uniform", "slow pair")
    for each in found:
        assert each["measured"] == 2  # after epochs 2 and 4
        assert_same(each["result"], expected, rtol=1e-9, atol=1e-11)
    assert "followed from now on" in found[0]["said"][0] and "these stay" in found[0]["said"][1]
    assert any(found[0]["stages"][0])  # relays, of which uniform links have none


@pytest.mark.parametrize(("told", "links", "gain"), [("slow pair", "slow pair", 0.2), ("uniform", "slow pair", 0.999)])
def test_plans_stay_for_little(ranks, told, links, gain):
    found = ranks.run(3, trained, awkward_graph(), "gcn", told, links, gain)
    assert ["these stay" in said for said in found[0]["said"]] == [True, True]
    assert found[0]["stages"] == [found[0]["stages"][0]] * 2 and any(found[0]["stages"][0]) == (told == "slow pair")


def test_back_to_direct_rows(ranks):
    found = ranks.run(3, trained, awkward_graph(), "gcn", "slow pair", "uniform")
    said = found[0]["said"][0]
    assert "followed from now on" in said and not any(found[0]["stages"][0])


@pytest.mark.campaign  # a minute, until the others give up
def test_a_rank_that_keeps_its_plan_is_an_error(ranks):
    with pytest.raises(RankFailed, match="CommunicationError"):
        ranks.run(3, trained, awkward_graph(), "gcn", "uniform", "slow pair", 0.2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replan": 2}, 'follows another plan="spst" if they are others .got plan="auto"'),
        ({"replan": 0, "plan": "spst"}, "replan=0 measures links after so many epochs, one or more"),
        ({"replan": 1.5, "plan": "spst"}, "replan"),
    ],
)
def test_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        DGCLStrategy(**options)


def test_more_ranks_than_are_measured():
    with pytest.raises(ValueError, match="replan=3 measures the links of at most 64 ranks .got 66."):
        DGCLScheme(plan="spst", replan=3).layout(66, num_hosts=2)
