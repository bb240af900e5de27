"""Where ranks are: alike on all of them, whatever they did apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from lightning_gnn.comm.call import Step
from lightning_gnn.steps.loop import Progress


def test_steps_are_counted_anew_in_each_stage():
    """Messages carry the step's number: after workers have trained apart, theirs would differ."""
    trainer: Any = SimpleNamespace(
        sanity_checking=False, current_epoch=0, state=SimpleNamespace(fn=TrainerFn.VALIDATING)
    )
    places = []
    for apart in (3, 7):
        progress, world = Progress(), SimpleNamespace(watch=SimpleNamespace(place=""))
        for number in range(apart):
            assert progress.begin_step("validation", trainer, world) == Step("validation", 0, number)
        progress = Progress()  # as each stage has
        assert progress.begin_step("validation", trainer, world).number == 0
        places.append(world.watch.place)
    assert places[0] == places[1] == "validation step 1"
