"""Transport that encodes messages in fewer bytes and decodes received messages, for any scheme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_gnn.comm.transport import ALIGNED, Messages, Receive, TransportWrapper, UpTo
from lightning_gnn.extensions.codecs.codec import Codec, dequantise, make_codec, quantise, shorten

__all__ = ["EncodingTransport", "make_codec"]


class EncodingTransport(TransportWrapper):
    """Wrapper of a transport that encodes rows while :meth:`approximating` is open, which all ranks open at the same points.

    Rows are floating-point tensors of two or more dimensions, of which all after the first are flattened. Other tensors, and rows
    that would not become shorter, are sent unchanged. Operations that gather or show data use the wrapped transport directly and
    are exact.

    Args:
        transport: transport of the encoded bytes.
        codec: codec of the rows.
    """

    def __init__(self, transport: Any, codec: Codec) -> None:
        super().__init__(transport)
        self.codec = codec

    @override
    @staticmethod
    def warm_up(dtype: torch.dtype) -> None:
        rows = torch.ones(1, 2, dtype=dtype)
        for noise in (None, 1):
            ends, packed, _ = quantise(rows, 8, noise)
            shorten(rows, torch.empty(1, 2, dtype=torch.bfloat16), noise)
        dequantise(ends, packed, 8, rows)

    @override
    def messages(self, *rows: Any) -> Messages:
        return super().messages(*rows) if self.approximate else self._transport.messages(*rows)

    def _row_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int | None:
        """Returns the bytes of an encoded row of such a tensor; None if it is sent unchanged."""
        if not (self.approximate and dtype.is_floating_point and len(shape) > 1):
            return None
        width = prod(shape[1:])
        coded = self.row_bytes(width, dtype)
        return coded if coded < width * dtype.itemsize else None

    @override
    def row_bytes(self, width: int, dtype: torch.dtype) -> int:
        return min(self.codec.row_bytes(width, dtype), width * dtype.itemsize)

    @override
    def message_bytes(self, rows: Tensor) -> int:
        coded = self._row_bytes(rows.shape, rows.dtype)
        return super().message_bytes(rows) if coded is None else len(rows) * coded

    @override
    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a buffer for the rows of the next :meth:`start_each`; from the wrapped transport only if sent unchanged."""
        if self._row_bytes(shape, dtype) is None:
            return self._transport.scratch(shape, dtype)
        with torch.inference_mode(False):
            return torch.empty(*shape, dtype=dtype, device=self._transport.device)

    @override
    def start_each(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Receive]]) -> Callable[[], None]:
        arriving: list[tuple[int, Receive]] = []
        decodes: list[tuple[Tensor, Tensor]] = []
        for peer, into in receives:
            coded = None if isinstance(into, UpTo) else self._row_bytes(into.shape, into.dtype)
            if coded is not None:
                assert isinstance(into, Tensor)
                rows, into = into.detach().view(len(into), -1), into.new_empty((len(into), coded), dtype=torch.uint8)
                decodes.append((into, rows))
            arriving.append((peer, into))
        wait = self._transport.start_each(self._encode_messages(sends), arriving)
        if not decodes:
            return wait

        def finish() -> None:
            wait()
            for data, rows in decodes:
                self.codec.decode(data, rows)

        return finish

    def _encode_messages(self, sends: Sequence[tuple[int, Tensor]]) -> Sequence[tuple[int, Tensor]]:
        """Returns the messages to send; if some are encoded, all use the wrapped transport's buffer. Encodes a tensor once."""
        distinct = {id(rows): rows for _, rows in sends}
        widths = {key: self._row_bytes(rows.shape, rows.dtype) for key, rows in distinct.items()}
        if all(width is None for width in widths.values()):
            return sends
        sizes = [self.message_bytes(rows) for rows in distinct.values()]
        room = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        scratch = self._transport.scratch((sum(room),), torch.uint8)
        messages: dict[int, Tensor] = {}
        for (key, rows), part, size in zip(distinct.items(), scratch.split(room), sizes):
            into, width = part[:size], widths[key]
            if width is None:
                into = into.view(rows.dtype).view(rows.shape).copy_(rows.detach())
            else:
                into = into.view(len(rows), width)
                self.codec.encode(rows.detach().reshape(len(rows), -1), into)
            messages[key] = into
        return [(peer, messages[id(rows)]) for peer, rows in sends]

    @override
    def take_sums(self) -> tuple[float, ...]:
        return self.codec.take_squares()

    @override
    def metrics(self, sums: Tensor) -> dict[str, Tensor]:
        return {"codec/error": (sums[0] / sums[1]).sqrt() if sums[1] else torch.zeros_like(sums[1])}
