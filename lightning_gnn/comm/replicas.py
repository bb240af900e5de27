"""Check that all ranks have the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lightning_gnn.comm.group import World

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Relative difference by dtype up to which ranks differ by rounding, as between kinds of machines; 1e-2 for shorter dtypes."""


class ReplicaError(RuntimeError):
    """Error for models that differ between ranks; names the first differing tensor and possible causes on one rank."""


class Replicas:
    """Comparison of the parameters and buffers of all ranks, which must stay equal; runs on every rank.

    Args:
        tensors: function that returns the named tensors that must be equal, in the same order on all ranks.
    """

    def __init__(self, world: World, tensors: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._world, self._tensors = world, tensors

    def digest(self) -> Tensor:
        """Returns two numbers that are equal on all ranks if all bits of the model are, float64 ``[2]``, on the rank's device."""
        sums = [_sum_of_bits(tensor) for _, tensor in self._tensors()]
        if not sums:
            return torch.zeros(2, dtype=torch.float64, device=self._world.device)
        each = torch.stack(sums)
        total = (each * (2 * torch.arange(len(each), device=each.device) + 1)).sum()
        return torch.stack([total >> 32, total & 0xFFFFFFFF]).to(torch.float64)

    def check(self, digests: Tensor, when: str) -> None:
        """Raises :class:`ReplicaError` if the models of ranks differ.

        If ranks differ by rounding only, all ranks get the values of rank 0.

        Args:
            digests: digests of all ranks, ``[P, 2]``.
            when: time of the check, for the error.
        """
        if bool((digests == digests[0]).all()):
            return
        named = list(self._tensors())
        of_rank_0 = [tensor.detach().clone() for _, tensor in named]
        self._world.broadcast_tensors_(of_rank_0)
        own = torch.stack([_difference(tensor, other) for (_, tensor), other in zip(named, of_rank_0)])
        differences = self._world.all_gather(own.to(self._world.device), "Comparing replicas")  # [P, tensors]
        allowed = own.new_tensor([ROUNDING.get(tensor.dtype, 1e-2) for _, tensor in named])
        parted = (differences > allowed.to(differences.device)).nonzero()
        if len(parted):
            first = int(parted[:, 1].min())
            rank = int(parted[parted[:, 1] == first][0, 0])
            raise ReplicaError(
                _message(named[first], rank, float(differences[rank, first]), len(set(parted[:, 1].tolist())), when)
            )
        with torch.no_grad():
            for (_, tensor), other in zip(named, of_rank_0):
                tensor.copy_(other)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Returns the sum of a tensor's bits as integers, int64 ``[]``."""
    flat = tensor.detach().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return flat.view(kind).sum(dtype=torch.int64)


def _difference(tensor: Tensor, reference: Tensor) -> Tensor:
    """Returns the largest difference of two tensors, relative to the second's largest value, float64 ``[]``."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    own, reference = (torch.nan_to_num(each.detach().to(torch.float64), nan=0.0) for each in (tensor, reference))
    return (own - reference).abs().max() / reference.abs().max().clamp(min=1e-30)


def _message(named: tuple[str, Tensor], rank: int, difference: float, count: int, when: str) -> str:
    name, tensor = named
    more = f" ({count - 1} more differ)" if count > 1 else ""
    if isinstance(tensor, torch.nn.Parameter):
        kind = "parameter"
        causes = (
            "A step may have changed it inside lightning_gnn.local_rows(), by values of this rank's rows, or by random numbers "
            "that were drawn for rows. Or a hook has changed it on some ranks only."
        )
    else:
        kind = "buffer"
        causes = (
            "A buffer that is computed inside lightning_gnn.local_rows() is of this rank's rows: compute it outside of it, where "
            "batch.x.mean(0) is of all rows."
        )
    return (
        f"{when}, the {kind} '{name}' of rank {rank} differs from rank 0's by {difference:.1e} of its largest value{more}. "
        f"{causes}"
    )
