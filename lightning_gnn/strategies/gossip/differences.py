"""What two workers bring to a meeting: their vectors as they are, or in fewer bytes, by what both know already.

Source: Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication"
(ICML 2019), Algorithm 1 (CHOCO-Gossip): a worker i sends Q(x_i - y_i), where y_i is what the others know of x_i, and moves by the
difference of what is known, y_j - y_i. There each neighbour keeps a y for each other. Here, where any two may meet, and the more
seldom the more there are, the two of a pair keep one vector: the mean of what they knew of each other at the end of their last
meeting. What rounding has left stays in x_i, and so in the next difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn.extensions.codecs.codec import Codec

_WIDTH = 256
"""Numbers of a tensor that are rounded together, between the same ends; those at its end may be fewer."""


class Whole:
    """A vector as it is."""

    known = 0

    def __init__(self, own: Tensor) -> None:
        self._own = own

    def message(self, agreed: bool) -> Tensor:
        return self._own

    def total(self, theirs: Tensor) -> Tensor:
        """Returns the sum of both workers' vectors, given the other's message."""
        return self._own + theirs


class Differences:
    """What this worker and each other one knew of each other when they met last; one vector for each partner.

    Args:
        codec: of the differences.
        sizes: of the tensors whose values make a vector, one after the other.
    """

    def __init__(self, codec: Codec, sizes: Sequence[int]) -> None:
        self._codec = codec
        self._rows: list[tuple[int, int, int]] = []  # where they begin in a vector, how many, how wide
        begin = 0
        for size in sizes:
            rows, rest = divmod(size, _WIDTH)
            self._rows += [piece for piece in ((begin, rows, _WIDTH), (begin + rows * _WIDTH, 1, rest)) if piece[1] and piece[2]]
            begin += size
        self.met: dict[int, tuple[int, Tensor]] = {}

    def encode(self, vector: Tensor) -> Tensor:
        """Returns a vector ``[n]`` as bytes, uint8, as many for all."""
        pieces = []
        for begin, rows, width in self._rows:
            num_bytes = self._codec.row_bytes(width, vector.dtype)
            pieces.append(torch.empty(rows, num_bytes, dtype=torch.uint8))
            self._codec.encode(vector[begin : begin + rows * width].view(rows, width), pieces[-1])
        return torch.cat([each.view(-1) for each in pieces])

    def decode(self, data: Tensor, like: Tensor) -> Tensor:
        """Returns the vector, of the shape and dtype of `like`, that was encoded to `data`, with what rounding has made of it."""
        found, place = torch.empty_like(like), 0
        for begin, rows, width in self._rows:
            end = place + rows * self._codec.row_bytes(width, like.dtype)
            out = found[begin : begin + rows * width].view(rows, width)
            self._codec.decode(data[place:end].clone().view(rows, -1), out)  # at an even address
            place = end
        return found


class Difference:
    """A vector as its difference to what this worker and its partner in a meeting knew of each other."""

    def __init__(self, own: Tensor, differences: Differences, partner: int, meeting: int) -> None:
        self._own, self._all, self._partner, self._meeting = own, differences, partner, meeting
        self.known = differences.met[partner][0] if partner in differences.met else 0
        self._base, self._sent = own, torch.empty(0, dtype=torch.uint8)

    def message(self, agreed: bool) -> Tensor:
        """Returns the bytes for the partner; `agreed`: it knows of the same last meeting."""
        common = agreed and self.known > 0
        self._base = self._all.met[self._partner][1] if common else torch.zeros_like(self._own)
        self._sent = self._all.encode(self._own - self._base)
        return self._sent

    def total(self, theirs: Tensor) -> Tensor:
        """Returns a sum whose half is what this worker goes on with, given the partner's message.

        Both move by half the difference of what is known of them now, in opposite directions: the sum of their vectors stays.
        """
        mine, other = (self._base + self._all.decode(each, self._own) for each in (self._sent, theirs))
        self._all.met[self._partner] = self._meeting, (mine + other) / 2
        return 2 * self._own + (other - mine)
