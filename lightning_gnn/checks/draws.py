"""Random numbers in checks: the same on parts of a graph as on the whole."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
}  # fmt: skip


class NoDropout(TorchFunctionMode):
    """Dropout does nothing while it is open, in this thread: bound layers draw for the rank's own rows. Generators of the user's
    are read and stay where they are, since ranks that are threads share them."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[torch.Generator, torch.Generator] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        given = kwargs.get("generator")
        if given is not None:
            if given not in self._copies:
                self._copies[given] = torch.Generator(given.device)
                self._copies[given].set_state(given.get_state())
            kwargs = {**kwargs, "generator": self._copies[given]}
        return func(*args, **kwargs)


def seed_all(seed: int) -> None:
    """Seeds the generators of torch, numpy and Python that users draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def draws_random_numbers(module: torch.nn.Module) -> bool:
    """Returns whether a model has dropout, which each rank draws for itself."""
    for part in module.modules():
        rate = getattr(part, "p", 0) if "Dropout" in type(part).__name__ else getattr(part, "dropout", 0)
        if isinstance(rate, (int, float)) and rate > 0:
            return True
    return False
