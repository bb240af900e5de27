"""What a check has found, as plain data, and as a table and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_gnn.checks.differences import Finding
from lightning_gnn.checks.explanation import Explanation
from lightning_gnn.console import text_of, text_table

GROUPS = ("outputs", "loss", "gradients", "metrics")


@dataclass(frozen=True)
class SchemeParity:
    """One scheme held against one device.

    Attributes:
        scheme: the strategy's name, and what marks it out.
        approximation: what makes it differ by design; empty if nothing does.
        not_compared: what was not compared, and why; empty if all was.
        steps: those that were compared.
        differences: by `GROUPS`, the largest, of the largest value; None where there is none.
        finding: the first place that differs, of a scheme that should not.
    """

    scheme: str
    approximation: str = ""
    not_compared: str = ""
    steps: Sequence[str] = ()
    differences: Mapping[str, float | None] = field(default_factory=dict)
    finding: Finding | None = None

    @property
    def verdict(self) -> str:
        """``"same"``, ``"differs"``, ``"approximate"``, ``"evaluation same"`` or ``"not compared"``."""
        if self.finding is not None:
            return "differs"
        if not self.steps or self.approximation:
            return "approximate" if self.steps else "not compared"
        return "evaluation same" if self.not_compared else "same"


@dataclass(frozen=True)
class ParityReport:
    """What was compared, and what was found.

    Attributes:
        schemes: in the order given.
        ranks: that the graph was split over.
        nodes, edges: looked at.
        of_nodes: that the graph has.
        dtype: that all was computed in.
        tolerance: up to which difference numbers are the same.
        seconds: that it took.
        notes: what else is to be known.
    """

    schemes: Sequence[SchemeParity]
    ranks: int
    nodes: int
    edges: int
    of_nodes: int
    dtype: str
    tolerance: float
    seconds: float
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether something was compared, and no scheme that should give the numbers of one device gives others."""
        return any(each.steps for each in self.schemes) and not self.findings

    @property
    def findings(self) -> dict[str, list[str]]:
        """What differs, in words, and under which schemes."""
        found: dict[str, list[str]] = {}
        first: dict[tuple[str, str, str], str] = {}
        for each in self.schemes:
            if each.finding is not None:
                key = (each.finding.step, each.finding.where, each.finding.why)
                found.setdefault(first.setdefault(key, str(each.finding)), []).append(each.scheme)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        schemes = [{**asdict(each), "verdict": each.verdict} for each in self.schemes]
        return {**asdict(self), "schemes": schemes, "ok": self.ok}

    def table(self) -> Table:
        """Returns a row per scheme."""
        looked_at = f"{self.nodes:,} nodes" + (f" of {self.of_nodes:,}" if self.nodes < self.of_nodes else "")
        title = f"{self.ranks} ranks against one device: {looked_at}, {self.edges:,} edges, {self.dtype}"
        made = Table("scheme", *GROUPS, "verdict", title=title, title_justify="left")
        for column in made.columns[1:5]:
            column.justify = "right"
        for each in self.schemes:
            cells = [each.differences.get(group) for group in GROUPS]
            made.add_row(each.scheme, *("-" if cell is None else f"{cell:.1e}" for cell in cells), each.verdict)
        return made

    def lines(self) -> list[str]:
        """Returns what the table has no room for: what differs and why, what was left out."""
        found = [f"{', '.join(schemes)}: {text}" for text, schemes in self.findings.items()]
        for kind in ("approximation", "not_compared"):
            by_text: dict[str, list[str]] = {}
            for each in self.schemes:
                if getattr(each, kind):
                    by_text.setdefault(getattr(each, kind), []).append(each.scheme)
            how = "" if kind == "not_compared" else "approximate by design, after a few training steps; "
            found += [f"{', '.join(schemes)}: {how}{text}." for text, schemes in by_text.items()]
        steps = dict.fromkeys(step for each in self.schemes for step in each.steps)
        compared = f"Compared: {', '.join(steps) or 'nothing'}; the same up to {self.tolerance:.0e}. Took {self.seconds:.1f} s"
        return [*found, *self.notes, compared]

    def __str__(self) -> str:
        return text_of(self.table(), *self.lines(), width=120).rstrip()


def explanation_table(explanations: Sequence[Explanation], title: str) -> Table:
    """Returns a row for each operation that communicates; messages and bytes are those of the rank that sends the most."""
    heads = "step", "pass", "line", "operation", "rows", "messages", "bytes per rank"
    made = text_table(*heads, title=title, left=5)
    for each in explanations:
        for sender, sent in each.bytes_sent.items():
            numbers = (f"{max(counts):,}" for counts in (each.messages[sender], sent))
            line = Path(sender.line).name or "-"
            made.add_row(each.step, sender.direction, line, sender.operation, sender.rows or "-", *numbers)
        total = [sum(of_rank) for of_rank in zip(*each.bytes_sent.values())]
        made.add_row(each.step, "", "", "all", "", "", f"{max(total, default=0):,}", end_section=True)
    return made
