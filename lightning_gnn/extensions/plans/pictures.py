"""Pictures of plans: the load of links on a topology, and the load of hops over time. No display is needed.

Functions return a figure; :func:`~lightning_gnn.callbacks.pictures.save_picture` writes it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Patch, Wedge
from numpy.typing import NDArray

from lightning_gnn.callbacks.pictures import GREY, INK, KINDS, PALE, new_figure
from lightning_gnn.extensions.plans.plan_cost import LinkLoad, PlanCost, hop_labels
from lightning_gnn.extensions.plans.topology import Topology

DEVICE = 0.24
"""Radius of a device; the unit of all lengths is about the distance of two devices."""

SPACING, MARGIN = 1.25, 0.5
"""Distance of a host's devices along their circle, and distance between the circle and the host's frame."""

GATE, BETWEEN, LEAST = 0.1, 1.9, 4.2
"""Half the width of a host's gate, the distance between two hosts' frames, and the minimum width of a picture."""

HOPS = 18
"""Maximum number of hops drawn, over time and next to the links."""


def draw_links(loads: Sequence[LinkLoad], topology: Topology, title: str) -> Figure:
    """Returns a picture of the devices by host and socket, with links colored by the time of their busiest hop.

    Links between hosts are combined at a gate of each host (a gray square). Arrows between devices and gates show the time of the
    device's own rows.
    """
    figure = new_figure(12, 6.8)
    figure.suptitle(title, fontsize=13, color=INK)
    map_axes, bar_axes = figure.subplots(1, 2, width_ratios=(3.2, 1))
    longest = max((load.hop_seconds for load in loads), default=0.0) or 1.0
    colormap = ListedColormap(mpl.colormaps["plasma_r"](np.linspace(0.12, 0.95, 256)))
    _draw_map(map_axes, loads, topology, longest, colormap)
    _draw_busiest(bar_axes, loads, topology, longest, colormap)
    return figure


def _draw_map(axes: Axes, loads: Sequence[LinkLoad], topology: Topology, longest: float, colormap: Colormap) -> None:
    places, centers, radii = _places(topology)
    reach = np.array(radii) + DEVICE + MARGIN
    low, high = (centers - reach[:, None]).min(0), (centers + reach[:, None]).max(0)
    spare = np.maximum(0, LEAST - (high - low)) / 2
    low, high = low - spare, high + spare
    axes.set(xlim=(low[0], high[0]), ylim=(low[1] - 0.25, high[1] + 0.25), aspect="equal")
    axes.axis("off")
    points = 72 * min(8.6 / (high[0] - low[0]), 6.0 / (high[1] - low[1]))  # points per unit
    for number, (center, size) in enumerate(zip(centers, reach)):
        _draw_host(axes, topology, number, center, radii[number], size, places, points)
    used = {frozenset((load.sender, load.receiver)) for load in loads}
    for (a, b), via in topology.links.items():
        if a < b and len(via) == 1 and frozenset((a, b)) not in used:
            axes.plot(*zip(places[a], places[b]), color="#d5d9df", lw=0.7, zorder=1)
    gates = centers.copy()
    gated = len(centers) > 1 and any(radii)
    if gated:
        note = "between hosts: devices to gate, their own rows' time; gate to gate, the busiest hop's"
        axes.text((low[0] + high[0]) / 2, low[1] - 0.2, note, ha="center", va="bottom", fontsize=9, color=GREY)
    for number, center in enumerate(centers):
        if gated and radii[number]:
            gates[number] -= center / np.linalg.norm(center) * (reach[number] + 0.25)
            axes.plot(*gates[number], "s", color=GREY, ms=points * 0.1, zorder=4)
    arrows = _arrows(loads, topology, places, gates, np.array(radii) == 0)
    thin = min(1.0, points / 70 + 0.35) * min(1.0, math.sqrt(40 / max(1, len(arrows))))
    for seconds, begin, end, rounds in sorted(arrows, key=lambda arrow: arrow[0]):  # draws the busiest on top
        axes.add_patch(
            FancyArrowPatch(
                tuple(begin),
                tuple(end),
                connectionstyle="arc3,rad=0.13",  # to the right of the direction, so that both directions are visible
                arrowstyle="-|>",
                mutation_scale=max(4.0, points * 0.12),
                shrinkA=points * rounds[0],
                shrinkB=points * rounds[1],
                color=colormap(seconds / longest),
                lw=(0.6 + 2.6 * seconds / longest) * thin,
                zorder=2 + seconds / longest,
            )
        )
    for device, place in enumerate(places):
        axes.add_patch(Circle(tuple(place), DEVICE, facecolor="white", edgecolor=INK, lw=1.3, zorder=4))
        centred: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": INK, "zorder": 5}
        axes.text(place[0], place[1], str(device), fontsize=points * 0.2, **centred)


Point: TypeAlias = NDArray[np.float64]
Arrow: TypeAlias = tuple[float, Point, Point, tuple[float, float]]
"""Seconds, start, end, and the radii of the markers at both ends."""


def _arrows(loads: Sequence[LinkLoad], topology: Topology, places: Point, gates: Point, single: NDArray[np.bool_]) -> list[Arrow]:
    """Returns an arrow for each link inside a host; links between hosts are combined at the hosts' gates.

    Links between hosts are too many to distinguish, and they share hops. An arrow between a device and its gate has the time of
    the device's own rows. An arrow between gates has the time of the busiest hop. A host with one device has no gate.
    """
    host = topology.host_of
    arrows: list[Arrow] = []
    between: dict[tuple[int, int], float] = {}
    own = np.zeros((2, topology.num_devices))  # sent and received over gates
    for load in loads:
        a, b = load.sender, load.receiver
        if host[a] == host[b]:
            arrows.append((load.hop_seconds, places[a], places[b], (DEVICE, DEVICE)))
            continue
        pair = int(host[a]), int(host[b])
        between[pair] = max(between.get(pair, 0.0), load.hop_seconds)
        own[0, a] += load.seconds
        own[1, b] += load.seconds
    for device in np.flatnonzero(~single[host]):
        gate, place = gates[host[device]], places[device]
        if own[0, device]:
            arrows.append((own[0, device], place, gate, (DEVICE, GATE)))
        if own[1, device]:
            arrows.append((own[1, device], gate, place, (GATE, DEVICE)))
    rounds = np.where(single, DEVICE, GATE).tolist()
    return arrows + [(seconds, gates[i], gates[j], (rounds[i], rounds[j])) for (i, j), seconds in between.items()]


def _draw_host(
    axes: Axes, topology: Topology, number: int, center: Point, radius: float, size: float, places: Point, points: float
) -> None:
    frame: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.25", "facecolor": "white", "edgecolor": GREY}
    side = 2 * size - 0.2
    axes.add_patch(FancyBboxPatch(tuple(center - side / 2), side, side, lw=1, zorder=0, **frame))
    font = min(11.0, points * 0.16)
    if len(topology.hosts) > 1:
        axes.text(center[0], center[1] + size + 0.02, f"host {number}", ha="center", fontsize=font, color=INK)
    sockets = topology.groups[number]
    if len(sockets) == 1:
        return
    for index, socket in enumerate(sockets):
        offsets = places[list(socket)] - center
        turn = math.atan2(*offsets.mean(0)[::-1])
        angles = np.degrees((np.arctan2(offsets[:, 1], offsets[:, 0]) - turn + math.pi) % (2 * math.pi) - math.pi)
        side = math.degrees(1.5 * DEVICE / radius)
        begin, end = math.degrees(turn) + angles.min() - side, math.degrees(turn) + angles.max() + side
        ring = Wedge(tuple(center), radius + 1.5 * DEVICE, begin, end, width=3 * DEVICE, facecolor=PALE, zorder=0.5)
        axes.add_patch(ring)
        away = radius + 1.5 * DEVICE + 0.17
        place = center + away * np.array([math.cos(turn), math.sin(turn)])
        upright = (math.degrees(turn) + 90 + 90) % 180 - 90  # along the ring, not upside down
        centred: dict[str, Any] = {"ha": "center", "va": "center", "color": GREY, "zorder": 3.5}
        axes.text(place[0], place[1], f"socket {index}", rotation=upright, fontsize=0.9 * font, **centred)


def _places(topology: Topology) -> tuple[Point, Point, list[float]]:
    """Returns the positions of devices, ``[P, 2]``, the centers of hosts, ``[hosts, 2]``, and the radii of their circles.

    The devices of a host are on a circle, so that no three are on one line; hosts are, too.
    """
    radii = []
    for sockets in topology.groups:
        slots = sum(map(len, sockets)) + 0.6 * len(sockets) * (len(sockets) > 1)
        radii.append(0.0 if slots == 1 else max(0.5, slots * SPACING / (2 * math.pi)))
    hosts = len(topology.hosts)
    distance = 2 * (max(radii) + DEVICE + MARGIN) + BETWEEN
    around = distance / 2 * (hosts > 1)
    if hosts > 2:
        around *= math.sqrt(2) / math.sin(math.pi / hosts)
    turns = math.pi - 2 * math.pi * np.arange(hosts) / hosts
    centers = around * np.stack([np.cos(turns), np.sin(turns)], 1)
    places = np.zeros((topology.num_devices, 2))
    for sockets, center, radius in zip(topology.groups, centers, radii):
        gap = 0.6 * (len(sockets) > 1)
        step = 2 * math.pi / (sum(map(len, sockets)) + gap * len(sockets))
        angle = math.pi / 2 + step * (gap / 2 + 0.5)  # counterclockwise from the top
        for index, socket in enumerate(sockets):
            # With two sockets, both count from the top, so that corresponding devices are side by side.
            ordered = socket[::-1] if len(sockets) == 2 and index == 1 else socket
            for device in ordered:
                places[device] = center + radius * np.array([math.cos(angle), math.sin(angle)])
                angle += step
            angle += step * gap
    return places, centers, radii


def _draw_busiest(axes: Axes, loads: Sequence[LinkLoad], topology: Topology, longest: float, colormap: Colormap) -> None:
    """Draw one bar for the busiest hop of each link, in the link's color, so that the bars are a legend of the links."""
    kind = dict(zip(hop_labels(topology), (hop.kind for hop in topology.hops)))
    seconds: dict[str, float] = {}
    for load in loads:
        seconds.setdefault(load.busiest_hop, load.hop_seconds)
    shown = list(seconds.items())[:HOPS]
    factor, unit = _unit(longest)
    axes.barh(range(len(shown)), [value * factor for _, value in shown], color=[colormap(v / longest) for _, v in shown])
    axes.set_yticks(range(len(shown)), [f"{name} ({kind[name]})" for name, _ in shown], fontsize=8, color=INK)
    axes.set(ylim=(HOPS - 0.4, -0.6), xlim=(0, longest * factor * 1.02))
    more = len(seconds) - len(shown)
    axes.set_title("Busiest hops of the links" + f",\n{len(shown)} of {len(seconds)}" * (more > 0), fontsize=10, color=INK)
    axes.set_xlabel(f"busy in one exchange, {unit}", fontsize=9)
    _plain(axes)


def draw_stages(costs: Mapping[str, PlanCost | str], topology: Topology, row_bytes: float) -> Figure:
    """Returns a picture of the busy times of hops under several plans, stacked on one time axis.

    A plan that is much shorter than the longest is drawn a second time, enlarged.

    Args:
        costs: for each plan name, the cost, or the reason why the plan does not apply.
    """
    made = {name: cost for name, cost in costs.items() if isinstance(cost, PlanCost)}
    shown = _chosen_hops(list(made.values()), topology)
    longest = max((cost.seconds(row_bytes) for cost in made.values()), default=0.0)
    panels = [(name, cost, shown, longest) for name, cost in costs.items()]
    for name, short in made.items():
        if 0 < short.seconds(row_bytes) < 0.35 * longest:
            panels.append((f"{name}, enlarged", short, _chosen_hops([short], topology), short.seconds(row_bytes)))
    heights = [1.1 + 0.19 * len(hops) if isinstance(cost, PlanCost) else 1.2 for _, cost, hops, _ in panels]
    figure = new_figure(11, sum(heights) + 1.1)
    figure.suptitle(f"One exchange over {topology.name}, rows of {row_bytes:,} bytes: when hops are busy", fontsize=13, color=INK)
    kinds = list(dict.fromkeys(hop.kind for hop in topology.hops))
    colors = {kind: KINDS[number % len(KINDS)] for number, kind in enumerate(kinds)}
    rows = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, cost, hops, until) in zip(rows, panels):
        if isinstance(cost, PlanCost):
            _draw_panel(axes, name, cost, hops, row_bytes, until, colors)
        else:
            axes.axis("off")
            axes.set_title(name, loc="left", fontsize=11, color=INK)
            axes.text(0, 0.8, textwrap.fill(f"does not apply: {cost}", 110), va="top", fontsize=9, color=INK)
    handles: list[Any] = [Patch(color=colors[kind], label=kind) for kind in kinds]
    note = "the busiest hops of each kind" if len(shown) < len(topology.hops) else None
    style: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "title_fontsize": 9, "fontsize": 9}
    figure.legend(handles=handles, ncols=len(kinds), title=note, **style)
    return figure


def _draw_panel(
    axes: Axes, name: str, cost: PlanCost, hops: Sequence[int], row_bytes: float, until: float, colors: Mapping[str, str]
) -> None:
    factor, unit = _unit(until)
    lengths = cost.stage_seconds(row_bytes) * factor
    starts = np.cumsum(lengths) - lengths
    labels = hop_labels(cost.topology)
    for stage, (start, length) in enumerate(zip(starts, lengths)):
        axes.axvspan(start, start + length, color=PALE if stage % 2 == 0 else "white", lw=0, zorder=0)
        axes.axvline(start + length, color=GREY, lw=0.8, ls=":", zorder=1)
        if length > 0.06 * until * factor:
            style: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 8, "color": GREY}
            axes.text(start + length / 2, 1.01, f"stage {stage}", transform=axes.get_xaxis_transform(), **style)
        busy = cost.hop_seconds[stage, list(hops)] * row_bytes * factor
        bar_colors = [colors[cost.topology.hops[hop].kind] for hop in hops]
        axes.barh(range(len(hops)), busy, left=start, height=0.72, color=bar_colors, zorder=2)
    axes.set_yticks(range(len(hops)), [labels[hop] for hop in hops], fontsize=8, color=INK)
    axes.set(ylim=(len(hops) - 0.4, -0.6), xlim=(0, until * factor * 1.005 or 1))
    stages = f"{len(lengths)} stage{'' if len(lengths) == 1 else 's'}"
    axes.set_title(f"{name}: {lengths.sum():,.3g} {unit} in {stages}", loc="left", fontsize=11, color=INK, pad=14)
    axes.set_xlabel(unit, fontsize=9)
    _plain(axes)


def _chosen_hops(costs: Sequence[PlanCost], topology: Topology) -> list[int]:
    """Returns the busiest hops of each kind, by their share of the plan in which they are busiest, in topology order."""
    share = np.zeros(len(topology.hops))
    for cost in costs:
        share = np.maximum(share, cost.hop_seconds.sum(0) / (cost.seconds_per_byte or 1.0))
    kinds = np.array([hop.kind for hop in topology.hops])
    names = list(dict.fromkeys(kinds.tolist()))
    each = max(2, HOPS // max(1, len(names)))
    chosen: list[int] = []
    for kind in names:
        of_kind = np.flatnonzero((kinds == kind) & (share > 0))
        chosen += sorted(of_kind[np.argsort(-share[of_kind], kind="stable")][:each].tolist())
    return chosen


def _plain(axes: Axes) -> None:
    axes.tick_params(length=0, labelsize=8)
    axes.grid(axis="x", color="#dddddd", lw=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _unit(seconds: float) -> tuple[float, str]:
    return next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if seconds * f >= 1), (1e6, "µs"))
