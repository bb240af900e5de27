"""CPU ranks keep what they free while they train, partitioners do not. Needs glibc."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import lightning as L
import pytest
import torch
from common import awkward_graph, build, quiet_trainer

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.heap import keeping_freed_memory
from lightning_gnn.strategy import steps

PAGES = 4096  # of 4 KB: 16 MB
SETTLING = 30  # blocks that were freed do not fit again at first


def new_pages() -> int:
    """Returns how many pages the system gave for a tensor of 16 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(PAGES * 1024)  # 4 bytes each
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_memory_is_used_again_and_given_back():
    with keeping_freed_memory() as possible:
        if not possible:
            pytest.skip("needs glibc")
        for _ in range(SETTLING):
            new_pages()
        assert min(new_pages() for _ in range(10)) <= 2
    # Once: the next tensor may take the same hole between blocks in use again. Huge pages, given unasked, are 8.
    assert new_pages() > 4


IN_A_PROCESS_OF_ITS_OWN = """
import resource
from lightning_gnn.heap import giving_back_freed_memory

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * (16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(2):
    with giving_back_freed_memory():
        print(min(new_pages() for _ in range(10)))
    print(min(new_pages() for _ in range(10)))
"""


def test_what_partitioners_free_is_given_back():
    with keeping_freed_memory() as possible:
        if not possible:
            pytest.skip("needs glibc")
    # After other tests, blocks may fit a hole between blocks in use, which has pages whatever the options are.
    ran = subprocess.run([sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN], capture_output=True, text=True, check=True)
    within, after, again, after_again = (int(pages) for pages in ran.stdout.split())
    assert min(within, again) > 4  # each time; huge pages are 8
    assert max(after, after_again) <= 2  # kept, as after a large block


@pytest.mark.parametrize("keep", [True, False])
def test_from_the_first_step_until_teardown(monkeypatch, keep):
    events: list[Any] = []

    class Kept:
        def __enter__(self) -> None:
            events.append("kept")

        def __exit__(self, *_: Any) -> None:
            events.append("given back")

    class Steps(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            events.append("step")

    monkeypatch.setattr(steps, "keeping_freed_memory", Kept)
    trainer = quiet_trainer(DGCLStrategy(reuse_buffers=keep, self_check=False), 1, callbacks=[Steps()])
    trainer.fit(NodeClassifier(build("gcn").double()), datamodule=GraphDataModule(awkward_graph()))
    kept = ["kept", "step", "step", "step", "given back"]
    assert events == (kept if keep else ["step", "step", "step"])
