"""Random numbers that a part of a graph and the whole of it share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
}  # fmt: skip


class SharedDraws(TorchFunctionMode):
    """While open, in this thread: dropout does nothing, and a draw per node or edge is this rank's rows of a common one.

    The k-th draw is the same on all ranks and on the whole graph, so an augmentation such as ``dropout_edge`` drops the
    same edges everywhere. Draws of other shapes are the same on all ranks.

    Args:
        rows: by a first dimension that means nodes or edges here, the dimension of the whole graph and this rank's ids.
        seed: of all draws.
        own: seed of what the model's own code draws here, other than by dropout and PyG's augmentations; None shares that, too.
        share_rows: share such draws all the same where they are per node or edge.

    Attributes:
        own_draws: what was drawn from `own`, in words.
    """

    def __init__(
        self, rows: Mapping[int, tuple[int, Tensor]], seed: int = 0, own: int | None = None, share_rows: bool = False
    ) -> None:
        super().__init__()
        self._share_rows = share_rows
        self._rows, self._seed, self._own, self._count = rows, seed, own, 0
        self._drawing: str | None = None
        self.own_draws: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        drawn = _DRAWS.get(func)
        if drawn is None:
            return func(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        self._drawing = None if self._own is None or caller in ("torch", "torch_geometric") else func.__name__
        return drawn(self, *args, **kwargs)

    def draw(self, shape: Sequence[int], normal: bool = False) -> Tensor:
        """Returns uniform or standard normal numbers of that shape, float64."""
        self._count += 1
        make = torch.randn if normal else torch.rand
        of_rows = len(shape) > 0 and shape[0] in self._rows
        if self._drawing is not None and not (of_rows and self._share_rows):
            self.own_draws.append(f"{self._drawing} {list(shape)}")
            generator = torch.Generator().manual_seed(self._own * 100_003 + self._count)  # type: ignore[operator]
            return make(tuple(shape), generator=generator, dtype=torch.float64)
        generator = torch.Generator().manual_seed(self._seed * 100_003 + self._count)
        whole, ids = self._rows[shape[0]] if of_rows else (0, None)
        shape = tuple(shape) if ids is None else (whole, *shape[1:])
        values = make(shape, generator=generator, dtype=torch.float64)
        return values if ids is None else values[ids]


def _made(normal: bool) -> Callable[..., Tensor]:
    def make(draws: SharedDraws, *size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        shape = options.get("size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        return _finished(draws.draw(shape, normal).to(dtype or torch.get_default_dtype()), options)

    return make


def _made_like(normal: bool) -> Callable[..., Tensor]:
    def make(draws: SharedDraws, input: Tensor, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return _finished(draws.draw(input.shape, normal).to(dtype or input.dtype), options)

    return make


def _finished(values: Tensor, options: Mapping[str, Any]) -> Tensor:
    return values.requires_grad_() if options.get("requires_grad") else values


def _bernoulli(draws: SharedDraws, input: Tensor, p: float | Tensor | None = None, **options: Any) -> Tensor:
    return (draws.draw(input.shape) < (input if p is None else p)).to(input.dtype)


def _bernoulli_(draws: SharedDraws, input: Tensor, p: float | Tensor = 0.5, **options: Any) -> Tensor:
    return input.copy_(draws.draw(input.shape) < p)


def _uniform_(draws: SharedDraws, input: Tensor, low: float = 0.0, high: float = 1.0, **options: Any) -> Tensor:
    low, high = options.get("from", low), options.get("to", high)
    return input.copy_(low + (high - low) * draws.draw(input.shape))


def _normal_(draws: SharedDraws, input: Tensor, mean: float = 0.0, std: float = 1.0, **options: Any) -> Tensor:
    return input.copy_(mean + std * draws.draw(input.shape, normal=True))


_DRAWS: dict[Any, Callable[..., Tensor]] = {
    torch.rand: _made(False),
    torch.randn: _made(True),
    torch.rand_like: _made_like(False),
    torch.randn_like: _made_like(True),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
}
