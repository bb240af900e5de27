"""The emulated device in a process in which something happens, named in the environment as TROUBLE.

Parts: ``waits`` hangs, ``kernels`` ends its process. Cases of ranks: ``dgcl, gcn`` hangs on rank 1, ``dgcl, gat`` ends rank 1.
Steps: ``wait`` adds one wait for the device to each training step of NodeClassifier.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from emulated_plugin import launched, recorded  # noqa: F401

from lightning_gnn import NodeClassifier

TROUBLE = os.environ.get("TROUBLE", "")
_step = NodeClassifier.training_step


def _hang(*_: Any) -> None:
    time.sleep(600)


def _end(*_: Any) -> None:
    os._exit(7)


def _waiting_step(self: NodeClassifier, *args: Any) -> Any:
    loss = _step(self, *args)
    loss.item()
    return loss


if TROUBLE == "parts" and "waits" in sys.argv[1:3]:
    _hang()
if TROUBLE == "parts" and "kernels" in sys.argv[1:3]:
    _end()
if TROUBLE == "steps":
    NodeClassifier.training_step = _waiting_step  # type: ignore[method-assign]
if TROUBLE == "cases" and os.environ.get("RANK") == "1" and "emulated" in sys.argv[1]:
    main: Any = sys.modules["__main__"]
    main.CASES |= {"dgcl, gcn": main.Case(_hang), "dgcl, gat": main.Case(_end)}
