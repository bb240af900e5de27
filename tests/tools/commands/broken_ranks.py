"""A rank of ``lightning-gnn test`` in which the variable BROKEN breaks something: ``python broken_ranks.py PART DEVICE``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.tools.commands import self_test_rank

start_expand, step, fit = HaloExchange.start_expand, torch.optim.SGD.step, L.Trainer.fit


def start_wrong_rows(self: HaloExchange, rows: Any, into: Any, call: Any) -> Callable[[], None]:
    wait = start_expand(self, rows, into, call)

    def wait_and_change() -> None:
        wait()
        into[-1:] += 1

    return wait_and_change


def make_shorter_step(self: torch.optim.SGD, *args: Any, **kwargs: Any) -> Any:
    for group in self.param_groups:
        group["lr"] *= 1 - 1e-8 * torch.distributed.is_initialized()
    return step(self, *args, **kwargs)


def fail_without_a_name(*args: Any, **kwargs: Any) -> None:
    try:
        fit(*args, **kwargs)
    except Exception:
        raise RuntimeError("Connection reset by peer") from None


def hang_after_failure(*args: Any, **kwargs: Any) -> None:
    try:
        fit(*args, **kwargs)
    except Exception:
        time.sleep(60)


def main() -> None:
    broken = os.environ["BROKEN"]
    if broken == "rows" and os.environ["RANK"] == "1":  # the other rank must report it, too
        HaloExchange.start_expand = start_wrong_rows  # type: ignore[method-assign, assignment]
    elif broken == "steps":
        torch.optim.SGD.step = make_shorter_step  # type: ignore[method-assign, assignment]
    elif broken == "names":
        L.Trainer.fit = fail_without_a_name  # type: ignore[method-assign, assignment]
    elif broken == "ends":
        L.Trainer.fit, self_test_rank.END_S = hang_after_failure, 2  # type: ignore[method-assign, assignment]
    self_test_rank.main()


if __name__ == "__main__":
    main()
