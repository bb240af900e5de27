"""Bytes and seconds of graph traffic, counted once, where they are sent."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Traffic:
    """What one rank sent, and how long it waited; sums with ``+``."""

    bytes_sent: int = 0
    """Payload bytes handed to the transport."""
    messages: int = 0
    """Messages sent to other ranks."""
    rows: int = 0
    """Node rows sent to other ranks."""
    seconds: float = 0.0
    """Wall seconds spent in packing, sending and waiting (not those hidden behind computation)."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes_sent + other.bytes_sent,
            self.messages + other.messages,
            self.rows + other.rows,
            self.seconds + other.seconds,
        )


@dataclass
class Meter:
    """Traffic of one rank by (layer, direction); direction is ``"forward"`` or ``"backward"``."""

    by_layer: dict[tuple[str, str], Traffic] = field(default_factory=dict)

    def direction(self, direction: str) -> str:
        """Returns the direction of the pass that messages in `direction` of an exchange belong to."""
        return direction

    def record(self, layer: str, direction: str, traffic: Traffic) -> None:
        """Adds `traffic` to what this layer has sent in this direction."""
        self.by_layer[layer, direction] = self.by_layer.get((layer, direction), Traffic()) + traffic

    def total(self) -> Traffic:
        """Returns the sum over layers and directions."""
        return sum(self.by_layer.values(), Traffic())

    def take(self) -> dict[tuple[str, str], Traffic]:
        """Returns what was counted since the last call and starts again at zero."""
        taken, self.by_layer = self.by_layer, {}
        return taken
