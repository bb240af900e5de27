"""Random numbers that a part of a graph and the whole of it share, and those that ranks would not share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Rows = Mapping[int, tuple[int, Tensor]]

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout,
}  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """A draw that is none of one number per node or edge; nodes or edges may be chosen or shuffled by it."""

    function: str
    shape: tuple[int, ...]
    chooses: bool = False


class SharedDraws(TorchFunctionMode):
    """While open, in this thread: dropout does nothing, and a draw per node or edge is this rank's rows of a common one.

    The k-th draw is the same on all ranks and on the whole graph, so an augmentation such as ``dropout_edge`` drops the
    same edges everywhere. Draws of other shapes are the same on all ranks here, though not in training, and noted. Draws of a
    generator that is given, or after a seed that is set meanwhile, are the same in training, too: they are not noted, and
    those for all nodes or edges of the whole graph are its on each part.

    Args:
        rows: by a dimension that means nodes or edges here, the dimension of the whole graph and this rank's ids.
        some_rows: the same by a dimension that means some of them, such as those in a mask, drawn where nothing is `constant`.
        own: seed of what the model's own code draws here, other than by dropout and PyG's augmentations; None shares that, too.
        share_rows: share such draws all the same where they are per node or edge.
        constant: what noted draws give instead, between 0 and 1: the share of numbers that are smaller; None draws them.

    Attributes:
        outside: whether to give all draws to all ranks alike, as in hooks of epochs, where training does so, too.
        sizes: dimensions that mean all nodes or all edges here.
        own_draws: what was drawn from `own`, in words.
        noted: draws that are not per node or edge.
    """

    def __init__(
        self,
        rows: Rows,
        some_rows: Rows,
        seed: int = 0,
        own: int | None = None,
        share_rows: bool = False,
        constant: float | None = None,
    ) -> None:
        super().__init__()
        self.constant, self.outside = constant, False
        self._share_rows = share_rows
        self.sizes, self._of_whole = {*rows}, {whole: (whole, torch.arange(whole)) for whole, _ in rows.values()}
        self._known = {**some_rows, **rows} if constant is None else rows
        self._seed, self._own, self._count = seed, own, 0
        self._function, self._is_own, self._is_seeded = "", False, False
        self._seeded = torch.initial_seed()
        self._generators: dict[torch.Generator | int, torch.Generator] = {}
        self.own_draws: list[str] = []
        self.noted: list[Draw] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        drawn = _DRAWS.get(func)
        if drawn is None:
            return func(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        self._function = getattr(func, "__name__", str(func))
        self._is_own = self._own is not None and caller not in ("torch", "torch_geometric") and not self.outside
        generator = kwargs.get("generator")
        # Outside steps all ranks draw the same numbers anyhow; and those that are threads share torch's stream.
        self._is_seeded = generator is not None or (torch.initial_seed() != self._seeded and not self.outside)
        if self._is_seeded:
            result = self._seeded_draw(func, args, kwargs, generator)
            if self._is_own and not self._share_rows:  # as it will be on ranks
                if any(size in self._known and size not in self._of_whole for size in result.shape):
                    self.own_draws.append(f"{self._function} {list(result.shape)}")
                return result
            self._is_own = False
            if not any(size in self._rows for size in result.shape):
                return result
        return drawn(self, *args, **kwargs)

    @property
    def _rows(self) -> Rows:
        """What dimensions mean in the draw that is at work."""
        if self.outside:
            return {}
        return {**self._of_whole, **self._known} if self._is_seeded else self._known

    @property
    def is_common(self) -> bool:
        """Whether the draw that is at work may be for all nodes or edges of the whole graph, and the same on all ranks."""
        return self._is_seeded and self.sizes == {*self._of_whole}

    def _seeded_draw(self, func: Any, args: Any, kwargs: Any, generator: torch.Generator | None) -> Any:
        """Returns what a generator draws that goes on from the state of the user's, which stays where it is, for all ranks."""
        key = torch.initial_seed() if generator is None else generator
        if key not in self._generators:
            self._generators[key] = torch.Generator("cpu" if generator is None else generator.device)
            if generator is None:  # torch's own, which ranks that are threads share
                self._generators[key].manual_seed(torch.initial_seed())
            else:
                self._generators[key].set_state(generator.get_state())
        try:
            return func(*args, **{**kwargs, "generator": self._generators[key]})
        except TypeError:  # it takes none
            return func(*args, **kwargs)

    def note(self, shape: Sequence[int], chooses: bool = False) -> None:
        if not self.outside:
            self.noted.append(Draw(self._function, tuple(shape), chooses))

    def generator(self, shape: Sequence[int], share: bool = False) -> torch.Generator:
        """Returns one for the next draw: the same on all ranks and on the whole graph, or, if not to `share`, this rank's own."""
        self._count += 1
        if self._own is None or not self._is_own or share:
            return torch.Generator().manual_seed(self._seed * 100_003 + self._count)
        self.own_draws.append(f"{self._function} {list(shape)}")
        return torch.Generator().manual_seed(self._own * 100_003 + self._count)

    def draw(self, shape: Sequence[int], normal: bool = False) -> Tensor:
        """Returns uniform or standard normal numbers of that shape, float64."""
        shape = tuple(shape)
        place = next((place for place, size in enumerate(shape) if size in self._rows), None)
        of_rows = place is not None
        if not of_rows:
            self.note(shape)
            if self.constant is not None and not self.outside:
                value = torch.tensor(self.constant, dtype=torch.float64)
                return (torch.special.ndtri(value) if normal else value).expand(shape).clone()
        make = partial(torch.randn if normal else torch.rand, dtype=torch.float64)
        generator = self.generator(shape, share=of_rows and self._share_rows)
        if place is None or (self._is_own and not self._share_rows):
            return make(shape, generator=generator)
        whole, ids = self._rows[shape[place]]
        values = make((*shape[:place], whole, *shape[place + 1 :]), generator=generator)
        return values.index_select(place, ids)


def _made(draws: SharedDraws, *size: Any, normal: bool = False, **options: Any) -> Tensor:
    shape = options.get("size", size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    return _made_like(draws, torch.empty(0), shape, normal=normal, **options)


def _made_like(
    draws: SharedDraws, input: Tensor, shape: Sequence[int] | None = None, normal: bool = False, **options: Any
) -> Tensor:
    values = draws.draw(input.shape if shape is None else shape, normal).to(options.get("dtype") or input.dtype)
    return values.requires_grad_() if options.get("requires_grad") else values


def _bernoulli(draws: SharedDraws, input: Tensor, p: float | Tensor | None = None, **options: Any) -> Tensor:
    return (draws.draw(input.shape) < (input if p is None else p)).to(input.dtype)


def _uniform_(draws: SharedDraws, input: Tensor, low: float = 0.0, high: float = 1.0, **options: Any) -> Tensor:
    low, high = options.get("from", low), options.get("to", high)
    return input.copy_(low + (high - low) * draws.draw(input.shape))


def _normal_(draws: SharedDraws, input: Tensor, mean: float = 0.0, std: float = 1.0, **options: Any) -> Tensor:
    return input.copy_(mean + std * draws.draw(input.shape, normal=True))


def _normal(draws: SharedDraws, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    shape = torch.broadcast_shapes(*(each.shape for each in (mean, std) if isinstance(each, Tensor)))
    values = mean + std * draws.draw(shape if size is None else size, normal=True)
    return values.to(next((each.dtype for each in (mean, std) if isinstance(each, Tensor)), torch.get_default_dtype()))


def _kaiming_uniform_(draws: SharedDraws, tensor: Tensor, **options: Any) -> Tensor:
    draws.note(tensor.shape)
    return torch.nn.init.kaiming_uniform_(tensor, **{**options, "generator": draws.generator(tensor.shape)})


def _gamma(draws: SharedDraws, concentration: Tensor, *_: Any, **options: Any) -> Tensor:
    # Of another form than the true one, which does not matter here.
    return concentration * -(1 - draws.draw(concentration.shape)).log().to(concentration.dtype)


def _dirichlet(draws: SharedDraws, concentration: Tensor, *_: Any, **options: Any) -> Tensor:
    values = _gamma(draws, concentration)
    if draws.constant is not None and values.size(-1) > 1:
        values = torch.full_like(values, (1 - draws.constant) / (values.size(-1) - 1))
        values[..., 0] = draws.constant
    return values / values.sum(-1, keepdim=True)


def _gumbel_softmax(
    draws: SharedDraws, logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Tensor:
    noise = -(-(1 - draws.draw(logits.shape)).log()).log()
    soft = ((logits + noise.to(logits.dtype)) / tau).softmax(dim)
    if not hard:
        return soft
    chosen = torch.zeros_like(logits).scatter_(dim, soft.max(dim, keepdim=True)[1], 1.0)
    return chosen - soft.detach() + soft


def _integers(draws: SharedDraws, bounds: Sequence[Any], options: Mapping[str, Any], shape: Sequence[int]) -> Tensor:
    """Returns integers from the first bound, or 0, to the last one - 1, float64; of nodes or edges where there are so many."""
    low, high = map(int, [0, *bounds, *(options[name] for name in ("low", "high") if name in options)][-2:])
    if high - low in draws.sizes:
        draws.note(shape, chooses=True)
    return (low + (high - low) * draws.draw(shape)).floor()


def _randint(draws: SharedDraws, *given: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    *bounds, size = (*given, options["size"]) if "size" in options else given
    return _integers(draws, bounds, options, size).to(dtype or torch.int64)


def _randint_like(draws: SharedDraws, input: Tensor, *bounds: Any, dtype: Any = None, **options: Any) -> Tensor:
    return _integers(draws, bounds, options, input.shape).to(dtype or input.dtype)


def _randperm(draws: SharedDraws, n: int, *, dtype: torch.dtype = torch.int64, **options: Any) -> Tensor:
    if n in draws.sizes and not draws.is_common:
        draws.note((n,), chooses=True)
    if draws.constant is None or draws.outside:
        return torch.randperm(n, generator=draws.generator((n,))).to(dtype)
    return torch.arange(n, dtype=dtype) if draws.constant <= 0.5 else torch.arange(n, dtype=dtype).flip(0)


def _multinomial(
    draws: SharedDraws, input: Tensor, num_samples: int, replacement: bool = False, **options: Any
) -> Tensor:
    if input.size(-1) in draws.sizes:
        draws.note(input.shape, chooses=True)
    if not replacement:
        noise = -(-(1 - draws.draw(input.shape)).log()).log()
        return (input.double().log() + noise).topk(num_samples, -1)[1]
    below = input.double().cumsum(-1)
    drawn = draws.draw((*input.shape[:-1], num_samples)) * below[..., -1:]
    return torch.searchsorted(below, drawn, right=True).clamp(max=input.size(-1) - 1)


_DRAWS: dict[Any, Callable[..., Tensor]] = {
    torch.rand: _made,
    torch.randn: partial(_made, normal=True),
    torch.rand_like: _made_like,
    torch.randn_like: partial(_made_like, normal=True),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: lambda draws, input, p=0.5, **_: input.copy_(draws.draw(input.shape) < p),
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    # Which torch hands over whole, with what they draw inside.
    torch.nn.init.uniform_: torch.no_grad()(lambda draws, tensor, a, b, **_: _uniform_(draws, tensor, a, b)),
    torch.nn.init.normal_: torch.no_grad()(lambda draws, tensor, mean, std, **_: _normal_(draws, tensor, mean, std)),
    torch.nn.init.kaiming_uniform_: _kaiming_uniform_,
    torch.normal: _normal,
    Tensor.exponential_: lambda draws, input, lambd=1.0, **_: input.copy_(-(1 - draws.draw(input.shape)).log() / lambd),
    F.gumbel_softmax: _gumbel_softmax,
    torch._standard_gamma: _gamma,
    torch._sample_dirichlet: _dirichlet,
    torch.poisson: lambda draws, input, *_, **__: _gamma(draws, input).floor(),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
}


def draws_random_numbers(module: torch.nn.Module) -> bool:
    """Returns whether a model has dropout, which each rank draws for itself."""
    for part in module.modules():
        rate = getattr(part, "p", 0) if "Dropout" in type(part).__name__ else getattr(part, "dropout", 0)
        if isinstance(rate, (int, float)) and rate > 0:
            return True
    return False
