"""Rules of functions of layers: batch norm, convolutions and recurrent layers, whose rows may be along any dimension."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import wraps
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_gnn.rows.elementwise import along, pass_row_tensors, register, rows_beside
from lightning_gnn.rows.mode import RULES, RowsMode, placement_of
from lightning_gnn.rows.placement import RowPlacement

_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


@pass_row_tensors
def _batch_norm(mode: RowsMode, func: Any, args: Any, kwargs: Any, row_args: Any) -> Any:
    """Rule of F.batch_norm: its formula, by functions that have rules; statistics include the rows of all ranks."""
    given = {"training": False, "momentum": 0.1, "eps": 1e-5, **dict(zip(_BATCH_NORM, args)), **kwargs}
    x, mean, var = given["input"], given["running_mean"], given["running_var"]
    with mode.activate(in_rule=True):
        dims = [dim for dim in range(x.dim()) if dim != 1]
        count = prod(x.size(dim) for dim in dims)
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if given["training"] or mean is None:
            if count == 1:
                raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
            running, (mean, var) = (mean, var), (wide.mean(dims), None)
            centered = wide - mean.view(shape)
            var = centered.square().mean(dims)
            if running[0] is not None and count:  # torch's keeps them without rows
                with torch.no_grad():
                    for kept, value in zip(running, (mean, var * (count / (count - 1)))):
                        kept.copy_(torch.lerp(kept, value.to(kept.dtype), given["momentum"]))
        else:
            centered = wide - mean.view(shape)
        out = centered * (var + given["eps"]).rsqrt().view(shape)
        if given["weight"] is not None:
            out = out * given["weight"].view(shape)
        if given["bias"] is not None:
            out = out + given["bias"].view(shape)
        return out.to(x.dtype)


RULES[F.batch_norm] = _batch_norm

# Convolutions #################################################################

_CONV = ("input", "weight", "bias", "stride", "padding")


def _convolved_dims(x: Tensor, args: Any, kwargs: Any) -> Iterable[int]:
    """Returns the dimensions that a convolution mixes: channels, and those along which its kernel has several entries."""
    given = {"stride": 1, "padding": 0, **dict(zip(_CONV, args)), **kwargs}
    kernel = given["weight"].shape[2:]
    first = x.dim() - len(kernel)

    def of(name: str, place: int) -> Any:
        value = given[name]
        return value if not isinstance(value, (tuple, list)) else value[place if len(value) > 1 else 0]

    still = [size == 1 and of("stride", at) == 1 and of("padding", at) in (0, "same", "valid") for at, size in enumerate(kernel)]
    return [first - 1, *(first + at for at, is_still in enumerate(still) if not is_still)]


def _padded_dims(x: Tensor, args: Any, kwargs: Any) -> Iterable[int]:
    pad: Sequence[int] = kwargs.get("pad", args[1] if len(args) > 1 else ())
    return [x.dim() - 1 - place // 2 for place, size in enumerate(pad) if size]


_convolve = along(_convolved_dims)


def _conv(mode: RowsMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Rule of convolutions: torch's raise for a rank without rows, if these are not along the batch dimension."""

    @wraps(func)
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dim = next((dim for dim in range(2, x.dim()) if not x.size(dim)), None)
        if dim is None:
            return func(x, *args, **kwargs)
        one = x.new_zeros([1 if at == dim else size for at, size in enumerate(x.shape)])
        return func(one, *args, **kwargs).narrow(dim, 0, 0) + 0 * x.sum()  # so that the backward pass reaches x

    if "input" in kwargs:
        args, kwargs = (kwargs["input"],), {name: each for name, each in kwargs.items() if name != "input"}
    return _convolve(mode, run, args, kwargs)


register(_conv, "conv1d conv2d conv3d")
register(along(_padded_dims), "pad", (F,))

# Recurrent layers #############################################################


def _recurrent(name: str) -> Any:
    """Returns the rule of ``torch.gru`` and similar functions for rows along the batch dimension."""

    @pass_row_tensors
    def rule(mode: RowsMode, func: Any, args: Any, kwargs: Any, row_args: Any) -> Any:
        x, hx, *others = args
        states = hx if isinstance(hx, (tuple, list)) else [hx]
        is_batched = x.dim() == 3 and isinstance(others[-1], bool) and not kwargs and isinstance(others[0], (tuple, list))
        of = next(of for _, of in row_args)
        dim = 0 if others[-1] is True else 1
        if not is_batched or not all(rows_beside(each, of.rows, at) for each, at in ((x, dim), *((each, 1) for each in states))):
            return mode.on_all_rows(func, args, kwargs)
        weights = [mode.enter(each, placement_of(each), name) for each in others[0]]
        first, *last = func(x, hx, weights, *others[1:])
        return (mode.place(first, of.rows.at(dim)), *(mode.place(each, of.rows.at(1)) for each in last))

    return rule


@pass_row_tensors
def _cell(mode: RowsMode, func: Any, args: Any, kwargs: Any, row_args: Any) -> Any:
    """Rule of ``torch.gru_cell`` and similar functions for rows along dimension 0."""
    x, hx = args[:2]
    states = hx if isinstance(hx, (tuple, list)) else [hx]
    of: RowPlacement = row_args[0][1]
    if kwargs or x.dim() != 2 or not all(rows_beside(each, of.rows, 0) for each in (x, *states)):
        return mode.on_all_rows(func, args, kwargs)
    weights = [mode.enter(each, placement_of(each), "cell") if isinstance(each, Tensor) else each for each in args[2:]]
    return mode.place(func(x, hx, *weights), of.rows.at(0))


for _name in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
    RULES[getattr(torch, _name)] = _recurrent(_name)
    RULES[getattr(torch, f"{_name}_cell")] = _cell
