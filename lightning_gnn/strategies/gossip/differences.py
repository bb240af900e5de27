"""Messages of a meeting: plain vectors, or encoded differences to a state that both workers have.

Source: Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication"
(ICML 2019), Algorithm 1 (CHOCO-Gossip). A worker i sends Q(x_i - y_i), where y_i is the others' copy of x_i. It moves by the
difference of the copies, y_j - y_i. There, each neighbor stores a y for each other neighbor.

Here, any two workers may meet. The number of meetings of a pair decreases with the number of workers. The two workers of a pair
store one vector: the mean of their copies of each other at the end of their last meeting. Rounding errors remain in x_i, and so
in the next difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn.extensions.codecs.codec import Codec

_WIDTH = 256
"""Numbers of a tensor that are encoded together, in one range; the last group of a tensor may have fewer."""


class Whole:
    """Plain vector."""

    state_id = 0

    def __init__(self, vector: Tensor) -> None:
        self._vector = vector

    def message(self, agreed: bool) -> Tensor:
        return self._vector

    def total(self, theirs: Tensor) -> Tensor:
        """Returns the sum of both workers' vectors, given the partner's message."""
        return self._vector + theirs


class Differences:
    """State shared with each partner at the last meeting; one vector for each partner.

    Args:
        codec: codec of the differences.
        sizes: sizes of the tensors whose values form a vector, one after the other.
    """

    def __init__(self, codec: Codec, sizes: Sequence[int]) -> None:
        self._codec = codec
        self._rows: list[tuple[int, int, int]] = []  # start in a vector, number of groups, and width
        begin = 0
        for size in sizes:
            rows, rest = divmod(size, _WIDTH)
            self._rows += [piece for piece in ((begin, rows, _WIDTH), (begin + rows * _WIDTH, 1, rest)) if piece[1] and piece[2]]
            begin += size
        self.met: dict[int, tuple[int, Tensor]] = {}

    def encode(self, vector: Tensor) -> Tensor:
        """Returns a vector ``[n]`` as bytes, uint8, with the same number of bytes for all vectors."""
        pieces = []
        for begin, rows, width in self._rows:
            num_bytes = self._codec.row_bytes(width, vector.dtype)
            pieces.append(torch.empty(rows, num_bytes, dtype=torch.uint8))
            self._codec.encode(vector[begin : begin + rows * width].view(rows, width), pieces[-1])
        return torch.cat([each.view(-1) for each in pieces])

    def decode(self, data: Tensor, like: Tensor) -> Tensor:
        """Returns the vector, of the shape and dtype of `like`, that was encoded to `data`, with rounding errors."""
        found, place = torch.empty_like(like), 0
        for begin, rows, width in self._rows:
            end = place + rows * self._codec.row_bytes(width, like.dtype)
            out = found[begin : begin + rows * width].view(rows, width)
            self._codec.decode(data[place:end].clone().view(rows, -1), out)  # a copy, for alignment
            place = end
        return found


class Difference:
    """Vector as its difference to the state that this worker and its partner share."""

    def __init__(self, vector: Tensor, differences: Differences, partner: int, meeting: int) -> None:
        self._vector, self._all, self._partner, self._meeting = vector, differences, partner, meeting
        self.state_id = differences.met[partner][0] if partner in differences.met else 0
        self._base, self._message = vector, torch.empty(0, dtype=torch.uint8)

    def message(self, agreed: bool) -> Tensor:
        """Returns the bytes for the partner; `agreed`: whether both have the state of the same last meeting."""
        common = agreed and self.state_id > 0
        self._base = self._all.met[self._partner][1] if common else torch.zeros_like(self._vector)
        self._message = self._all.encode(self._vector - self._base)
        return self._message

    def total(self, theirs: Tensor) -> Tensor:
        """Returns a sum whose half is this worker's new vector, given the partner's message.

        Both workers move by half the difference of their current copies, in opposite directions, so the sum of their vectors is
        preserved.
        """
        mine, other = (self._base + self._all.decode(each, self._vector) for each in (self._message, theirs))
        self._all.met[self._partner] = self._meeting, (mine + other) / 2
        return 2 * self._vector + (other - mine)
