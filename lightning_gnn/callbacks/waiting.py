"""Who keeps the others waiting.

P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

TOO_MUCH = 0.3
"""Share of the time that a rank may wait before a warning."""

LIGHT = 1.1
"""A part no larger than this, of the average, is not what makes its rank slow."""


@dataclass(frozen=True)
class PartSize:
    """What a rank has to compute and to receive: its nodes, their in-edges, and its halo rows."""

    nodes: int
    edges: int
    halo_rows: int


def explain_waiting(waited: Sequence[float], seconds: float, parts: Sequence[PartSize]) -> str | None:
    """Returns what to tell of ranks that wait too much; None if none does.

    The straggler is the rank that waits least while another waits much. Where all wait alike, it is for messages.

    Args:
        waited: seconds that each rank has waited for others, ``[P]``.
        seconds: the time in which they did.
        parts: of each rank.
    """
    slowest, most = min(range(len(waited)), key=lambda r: waited[r]), max(range(len(waited)), key=lambda r: waited[r])
    if waited[most] <= TOO_MUCH * seconds:
        return None
    found = (
        f"Rank {most} waited for others in {waited[most] / seconds:.0%} of the time ({waited[most]:.1f} of {seconds:.1f} s "
        "of training steps)"
    )
    if waited[slowest] > waited[most] / 2:
        return (
            f"{found}, and no rank waited less than {waited[slowest] / seconds:.0%}: what holds all up are the messages. Use "
            "fewer ranks, or send less: another strategy, or codec (docs/codecs.md)."
        )
    shares = [own * len(parts) / max(1, sum(of)) for own, of in zip(astuple(parts[slowest]), zip(*map(astuple, parts)))]
    size = ", ".join(
        f"{count:,} {name} ({share:.2f} of the average)"
        for count, share, name in zip(astuple(parts[slowest]), shares, ("nodes", "in-edges", "halo rows"))
    )
    advice = (
        "That is no more than others have, so look at its machine: other processes, a slower core, fewer threads."
        if max(shares) <= LIGHT
        else "Balance the parts: another `partition` of GraphDataModule, or the strategy vertex_cut for graphs with hubs."
    )
    return (
        f"{found}: rank {slowest} keeps the others waiting; it waited {waited[slowest] / seconds:.0%}. Its part: {size}. "
        f"{advice}"
    )
