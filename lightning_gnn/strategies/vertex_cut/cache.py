"""Cached messages: only rows that changed enough since they were last sent.

Source: CDFGNN section 4.1, Algorithm 2. Both ends of a message store the rows that the receiver has. A row is *active*, and is
sent, if it differs from the stored row by more than a share of its size. In the top-k cache (not in the paper), the rows with the
largest differences are active. Both ends then apply the same update: with a codec (section 5), the decoded difference. Therefore
they always agree on the stored rows.

The paper caches one partial aggregate Z per replica. Here both messages of a layer are cached: features that masters send to
mirrors (S), and partial aggregates that mirrors send to masters (R). The same applies to their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.call import Call
from lightning_gnn.comm.exchange import HaloExchange, count_messages
from lightning_gnn.comm.group import World
from lightning_gnn.comm.traffic import Meter, Moment
from lightning_gnn.comm.transport import by_peer
from lightning_gnn.extensions.codecs.codec import Codec
from lightning_gnn.extensions.codecs.transport import EncodingTransport
from lightning_gnn.partition.shard import HaloPlan, Ids

_FLAGS = 64
"""Number of flags is padded to a multiple of this, so that the data after them is aligned."""


class NotFiniteError(ValueError):
    """Error for rows to be sent that include nan or infinity, from which caches would not recover."""


@dataclass
class RowCounts:
    """Number of rows of a message that were sent, and of all its rows."""

    rows: int = 0
    total: int = 0


class MessageCache:
    """State and settings that all cached messages of a rank share.

    Args:
        epsilon: a row is sent if an entry differs by more than this share of the largest entry of the row as last sent.
        factors: by ``LAYER``, ``DIRECTION`` or ``LAYER/DIRECTION``; the threshold of a message is epsilon times all matching
            factors.
        exact_ranks: ranks of this machine, with which all rows are exchanged unchanged: finding rows to omit takes longer than it
            saves.

    Attributes:
        row_counts: rows sent since :meth:`take`, by (layer, direction).
        loss: this rank's part of the loss since :meth:`take_loss`, a scalar; None before the first backward pass.
        guesses: whether both ends transform all stored rows by a scale and an offset that are part of the message.
    """

    guesses = False

    def __init__(self, epsilon: float, exact_ranks: Collection[int] = (), factors: Mapping[str, float] | None = None) -> None:
        self.epsilon, self.exact_ranks, self.factors = epsilon, frozenset(exact_ranks), factors or {}
        self.row_counts: dict[tuple[str, str], RowCounts] = {}
        self.loss: Tensor | None = None

    def threshold(self, layer: str, direction: str) -> float:
        """Returns the threshold of a layer's messages in a direction."""
        names = layer, direction, f"{layer}/{direction}"
        return self.epsilon * math.prod(self.factors.get(name, 1.0) for name in names)

    def active(self, change: Tensor, size: Tensor, call: Call) -> Tensor:
        """Returns which rows of a message to send, bool ``[n]``; called by the sender only.

        Args:
            change: largest absolute change of an entry of each row since it was last sent, ``[n]``.
            size: largest absolute entry of each row as last sent, ``[n]``.
            call: exchange of the step that the message belongs to.
        """
        return change > self.threshold(call.layer, call.direction) * size

    def record(self, layer: str, direction: str, rows: int, total: int) -> None:
        """Add to the counts of a layer's messages."""
        counts = self.row_counts.setdefault((layer, direction), RowCounts())
        counts.rows, counts.total = counts.rows + rows, counts.total + total

    def take(self) -> dict[tuple[str, str], RowCounts]:
        """Returns the numbers of sent and skipped rows since the last call, and resets them."""
        taken, self.row_counts = self.row_counts, {}
        return taken

    def add_loss(self, part: Tensor) -> None:
        """Add this rank's part of a loss, a scalar; the parts of all ranks sum to the single-device loss."""
        self.loss = part if self.loss is None else self.loss + part

    def take_loss(self) -> float:
        """Returns this rank's part of the loss since the last call, nan if there is none, and resets it."""
        taken, self.loss = self.loss, None
        return math.nan if taken is None else float(taken)

    def make_exchange(self, rows: HaloPlan, halos: Sequence[Ids], offsets: Ids, world: World, meter: Meter) -> CachedExchange:
        """Returns an exchange with cached messages; see :data:`~lightning_gnn.comm.matrix.MakeExchange`."""
        return CachedExchange(rows, world, meter, self)


class LargestChangesCache(MessageCache):
    """Cache that sends a given share of each message: the rows that differ most from the receiver's estimate.

    The estimate, which both ends compute, is each column of the stored rows times a scale plus an offset. Scales and offsets are
    part of the message. They capture the common change of all rows between epochs, as weights change. Without them, delayed rows
    can make training unstable.

    Args:
        share: maximum share of a message's rows; may change from step to step.
        exact_ranks: see :class:`MessageCache`.
    """

    guesses = True

    def __init__(self, share: float, exact_ranks: Collection[int] = ()) -> None:
        super().__init__(0.0, exact_ranks)
        self.share = share

    @override
    def active(self, change: Tensor, size: Tensor, call: Call) -> Tensor:
        count = math.ceil(self.share * len(change))
        active = torch.zeros_like(change, dtype=torch.bool)
        active[change.topk(count).indices] = True
        return active & (change > 0)


class CachedExchange(HaloExchange):
    """:class:`HaloExchange` that sends active rows only, if its transport may be approximate.

    Rows are encoded by the transport's codec, if it has one. The first message of an exchange is complete and exact.
    """

    def __init__(self, plan: HaloPlan, world: World, meter: Meter, cache: MessageCache) -> None:
        super().__init__(plan, world, meter)
        self._cache = cache
        self._channels: dict[tuple[Any, ...], _Channel] = {}

    @override
    def send(
        self, out: Tensor, out_counts: Sequence[int], into: Tensor, into_counts: Sequence[int], call: Call, began: Moment
    ) -> Callable[[], None]:
        transport, exact = self.world.transport, self._cache.exact_ranks
        if not transport.approximate or not out.is_floating_point():
            return super().send(out, out_counts, into, into_counts, call, began)
        sends, receives = by_peer(out, out_counts), by_peer(into, into_counts)
        whole = [(peer, part) for peer, part in sends if peer in exact]
        out_sizes, into_sizes = ([0 if peer in exact else n for peer, n in enumerate(each)] for each in (out_counts, into_counts))
        # Overwritten in each step.
        key = (call, into.shape[1:], into.dtype)
        if key not in self._channels:
            with torch.inference_mode(False):
                self._channels[key] = _Channel(into, out_sizes, into_sizes)
        channel, codec = self._channels[key], transport.codec if isinstance(transport, EncodingTransport) else None
        rows = torch.cat([into.new_empty(0, *into.shape[1:]), *(part for peer, part in sends if peer not in exact)])
        try:
            messages = channel.messages(rows.view(channel.sent_rows.shape), self._cache, codec, call)
        except NotFiniteError as error:
            raise NotFiniteError(
                f"Messages of layer '{call.layer}' ({call.direction}) have nan or infinity on rank {self.world.rank}. Check "
                "the learning rate, divisions by zero, and the features."
            ) from error
        with transport.approximating(False):
            traffic = transport.traffic(whole)
        self._cache.record(call.layer, call.direction, channel.num_active + traffic.rows, len(rows) + traffic.rows)
        traffic += transport.traffic(messages, channel.num_active)
        with self.world.watch.during(call.name, joint=False):
            with transport.approximating(False):
                wait_exact = transport.start_each(whole, [each for each in receives if each[0] in exact])
            wait = transport.start_varied(messages, [peer for peer, count in enumerate(into_sizes) if count])

        def receive() -> None:
            wait_exact()
            for peer, data in wait().items():
                channel.receive(peer, data, self._cache, codec)
            for peer, part in receives:
                if peer not in exact:
                    part.copy_(channel.received_rows[peer].view(part.shape))
            channel.fresh = False

        return count_messages(self.world, self.meter, call, began, traffic, receive)


class _Channel:
    """Both ends of one message of a rank: rows as last sent to peers, and rows as last received from peers.

    Attributes:
        sent_rows: rows as last sent, ``[rows out, F]``.
        received_rows: rows as last received, ``[rows in, F]``, by peer.
        fresh: whether nothing was sent yet.
        num_active: number of rows of the last :meth:`messages`.
    """

    def __init__(self, like: Tensor, out_counts: Sequence[int], into_counts: Sequence[int]) -> None:
        width = like.shape[1:].numel()
        self.sent_rows, received = (like.new_zeros(sum(counts), width) for counts in (out_counts, into_counts))
        self._out_counts, self.received_rows = list(out_counts), received.split(list(into_counts))
        self.fresh, self.num_active = True, 0

    def messages(self, rows: Tensor, cache: MessageCache, codec: Codec | None, call: Call) -> list[tuple[int, Tensor]]:
        """Returns the message to each peer, uint8: scales and offsets, if any, one bit per row for active rows, and these rows.

        Args:
            rows: current rows, ``[rows out, F]``.
            cache: determines the active rows.
            codec: encodes the rows; None sends them unchanged.
            call: exchange that the rows belong to.

        Raises:
            NotFiniteError: a row is not finite.
        """
        guess = rows.new_empty(0)
        if cache.guesses and not self.fresh:
            guess = _fit(self.sent_rows, rows)
            _move(self.sent_rows, guess)
        difference = rows - self.sent_rows
        change, size = (torch.linalg.vector_norm(each, torch.inf, 1) for each in (difference, self.sent_rows))
        active = torch.ones_like(change, dtype=torch.bool) if self.fresh else cache.active(change, size, call)
        which = active.split(self._out_counts)
        # One transfer to the host for all sizes.
        finite, *counts = torch.stack([change.isfinite().all(), *(each.sum() for each in which)]).tolist()
        if not finite:
            raise NotFiniteError
        self.num_active = sum(counts)
        ids = active.nonzero_static(size=self.num_active).view(-1)
        codec = _choose_codec(codec, rows, self.fresh)
        if codec is None:
            chosen = rows[ids]
            self.sent_rows[ids] = chosen
            data = chosen.view(torch.uint8)
        else:
            difference = difference[ids]
            data = rows.new_empty((len(ids), codec.row_bytes(rows.size(1), rows.dtype)), dtype=torch.uint8)
            codec.encode(difference, data)
            decoded = torch.empty_like(difference)
            codec.decode(data, decoded)
            self.sent_rows[ids] += decoded
        parts = data.split(counts)
        return [
            (peer, torch.cat([guess.view(torch.uint8), _bits(flags), part.reshape(-1)]))
            for peer, (flags, part) in enumerate(zip(which, parts))
            if len(flags)
        ]

    def receive(self, peer: int, data: Tensor, cache: MessageCache, codec: Codec | None) -> None:
        """Update the stored rows of `peer` by its message."""
        stored = self.received_rows[peer]
        if cache.guesses and not self.fresh:
            num_bytes = 2 * stored.size(1) * stored.element_size()
            _move(stored, data[:num_bytes].clone().view(stored.dtype))
            data = data[num_bytes:]
        num_bytes = -(-len(stored) // _FLAGS) * _FLAGS // 8
        if data.numel() == num_bytes:
            return
        codec = _choose_codec(codec, stored, self.fresh)
        width = stored[0].nbytes if codec is None else codec.row_bytes(stored.size(1), stored.dtype)
        payload = data[num_bytes:].view(-1, width)
        ids = _flags(data[:num_bytes], len(stored)).nonzero_static(size=len(payload)).view(-1)
        decoded = stored.new_empty(len(ids), stored.size(1))
        if codec is None:
            decoded.view(torch.uint8).copy_(payload)
            stored[ids] = decoded
        else:
            codec.decode(payload, decoded)
            stored[ids] += decoded


def _fit(old: Tensor, new: Tensor) -> Tensor:
    """Returns per column the scale and the offset that bring `old` closest to `new`, ``[2 F]``."""
    before, now = old.double(), new.double()
    mean, off = before.mean(0), before - before.mean(0)
    spread = off.square().sum(0)
    factor = torch.where(spread > 0, (off * now).sum(0) / spread, 1.0)
    guess = torch.cat([factor, now.mean(0) - factor * mean]).to(old.dtype)
    none = torch.cat([torch.ones_like(guess[: len(factor)]), torch.zeros_like(guess[: len(factor)])])
    return torch.where(guess.isfinite().all(), guess, none)


def _move(rows: Tensor, guess: Tensor) -> None:
    """Apply the result of :func:`_fit` in place.

    Two operations, not a fused one: multiplication and addition round equally on every machine, a fused operation may not.
    """
    factor, shift = guess.view(2, -1)
    rows.mul_(factor).add_(shift)


def _choose_codec(codec: Codec | None, rows: Tensor, fresh: bool) -> Codec | None:
    """Returns the codec for these rows; None if it does not shorten them, and for the first message."""
    if codec is None or fresh or codec.row_bytes(rows.size(1), rows.dtype) >= rows.size(1) * rows.element_size():
        return None
    return codec


def _weights(device: torch.device) -> Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _bits(flags: Tensor) -> Tensor:
    """Returns booleans ``[n]`` as bits, uint8 ``[8 * ceil(n / 64)]``."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -len(flags) % _FLAGS)).view(-1, 8)
    return (padded * _weights(flags.device)).sum(1, dtype=torch.uint8)


def _flags(bits: Tensor, count: int) -> Tensor:
    """Returns the first `count` of :func:`_bits` as booleans."""
    return (bits.unsqueeze(1) & _weights(bits.device)).view(-1)[:count] != 0
