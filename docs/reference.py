"""Generates the tables of options.md, support.md and api.md from the code, and the site's page of each public name.

Tables stand between ``<!-- reference: NAME -->`` and ``<!-- end -->``. ``python docs/reference.py --write`` writes them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch

import lightning_gnn
from lightning_gnn.datamodules.graph import check_links
from lightning_gnn.nn.learned_rows import LearnedRows
from lightning_gnn.partition.layout import ONE_TYPE
from lightning_gnn.registry import STRATEGIES
from lightning_gnn.strategies import registered
from lightning_gnn.strategies.gossip.cluster_strategy import ClusterStrategy
from lightning_gnn.strategy.base import GNNStrategy

DOCS = Path(__file__).parent
PAGES = ("options.md", "support.md", "api.md")
MAX_WORDS = 25
"""Words of a table cell."""

RANKS = (4, 8)
"""Numbers of ranks, of which each strategy takes at least one, also on two machines."""

PROBES: Mapping[str, Mapping[str, Any]] = {
    "checkpoint_convs": {"checkpoint_convs": True},
    "memory_limit": {"memory_limit": "4GB"},
    "spill_dir": {"memory_limit": "4GB", "spill_dir": "."},
    "codec": {"codec": "int8"},
    "stochastic_rounding": {"codec": "int8", "stochastic_rounding": True},
}
"""Arguments by which a strategy is constructed to find out whether it accepts the first one; others by their default."""

_ONE_RANK, _SHARED = "1 rank, or ranks that share a GPU", "ranks that share a GPU"
GPU = {"dgcl": _ONE_RANK, "spmm_15d": _SHARED, "vertex_cut": _SHARED, "vertex_cut_cached": _SHARED, "sampling": _SHARED}
"""Tested on a GPU by training runs that gpus.md lists by strategy."""

EDGE_FEATURES = {"spmm": "yes, by halo exchange", "vertex_cut": "yes, on the target's rank"}
"""By the beginning of a strategy's name; from spmm.md and vertex-cut.md, "Limits"."""

NOT_DERIVED = {("auto_gnn", "HeteroData"): "no", ("auto_gnn", "embeddings"): "untested"}
"""From choosing.md: auto_gnn rehearses steps, on graphs of one type."""

GROUPS: Mapping[str, Callable[[str], bool] | tuple[str, ...]] = {
    "Strategies": lambda name: name.endswith("Strategy"),
    "Data": ("GraphDataModule", "planted_partition", "split_by_time", "split_edges"),
    "Modules": ("NodeClassifier", "LinkPredictor", "CommNet", "CommNetConv", "DistributedEmbedding"),
    "Choosing and checking": ("advise", "compare", "check_parity", "CommunicationMonitor"),
    "Errors": lambda name: name.endswith("Error"),
    "Helpers and extensions": lambda name: True,
}
"""Public names by the heading of api.md's table; a name is in the first group that takes it."""

OTHER_NAMES = {
    "functional": "lightning_gnn.functional",
    "Scheme": "lightning_gnn.strategy.scheme.Scheme",
    "Exchange": "lightning_gnn.comm.exchange.Exchange",
    "Call": "lightning_gnn.comm.call.Call",
    "Step": "lightning_gnn.comm.call.Step",
    "register": "lightning_gnn.strategies.register",
    "conformance": "lightning_gnn.testing.conformance",
}
"""Names that have a page, and are not in ``lightning_gnn.__all__``."""


@cache
def strategies() -> dict[str, type[GNNStrategy]]:
    """Returns the strategies of this package by name."""
    return {name: kind for name, kind in registered().items() if name in STRATEGIES}


def accepts(kind: Callable[..., GNNStrategy], arguments: Mapping[str, Any]) -> bool:
    """Returns whether a strategy can be constructed with these arguments."""
    try:
        kind(**arguments)
    except (TypeError, ValueError):
        return False
    return True


def parameters(kind: type[GNNStrategy]) -> dict[str, inspect.Parameter]:
    """Returns the arguments that a strategy accepts; those of Lightning's own base class are left out."""
    found: dict[str, inspect.Parameter] = {}
    for each in kind.__mro__:
        if each.__module__.startswith("lightning_gnn") and "__init__" in vars(each):
            for name, parameter in inspect.signature(vars(each)["__init__"]).parameters.items():
                if name != "self" and parameter.default is not parameter.empty:
                    found.setdefault(name, parameter)
    probes = {name: PROBES.get(name, {name: parameter.default}) for name, parameter in found.items()}
    return {name: parameter for name, parameter in found.items() if accepts(kind, probes[name])}


def described(kind: type) -> dict[str, str]:
    """Returns the text of each argument in the Args of a class."""
    _, _, text = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")
    text = re.split(r"\n\S", text)[0]
    found = {}
    for entry in re.split(r"\n(?= {4}\S)", text.rstrip()):
        names, _, meaning = re.sub(r" \([^)]*\)(?=:)", "", entry).partition(": ")
        found.update({name.strip(): " ".join(meaning.split()) for name in names.split(",")})
    return found


def meaning(kind: type, name: str) -> str:
    """Returns the text of an argument; references to another class are followed."""
    for each in kind.__mro__:
        text = described(each).get(name)
        if text is None:
            continue
        reference = re.match(r"[Ss]ee :class:`~?([\w.]+)`", text)
        if reference is None:
            return text
        path, _, last = reference[1].rpartition(".")
        other = getattr(import_module(path or each.__module__), last)
        return meaning(other, name)
    raise LookupError(f"{kind.__name__} does not document {name!r}: add it to Args")


def brief(text: str) -> str:
    """Returns the first sentence of a docstring's text as Markdown for a table cell."""
    text = " ".join(re.split(r"\n\s*\n|::\n", text)[0].split())
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    sentence = re.split(r"(?<!e\.g)\.\s+(?=[A-Z`(])", text)[0].rstrip(".:;")
    if len(sentence.split()) > MAX_WORDS:  # the name's own page has the rest
        sentence = re.split(r"[,;:](?= [^,;:]*$)", " ".join(sentence.split()[:MAX_WORDS]))[0] + " ..."
    return re.sub(r"^[a-z](?![,.])", lambda match: match[0].upper(), sentence).replace("|", r"\|")


def value(default: Any) -> str:
    """Returns a default as code."""
    return f"`{default!r}`".replace("'", '"')


def rows(head: tuple[str, ...], *lines: tuple[str, ...]) -> str:
    """Returns a Markdown table."""
    first, *others = ("| " + " | ".join(line) + " |" for line in (head, *lines))
    return "\n".join([first, "|---" * len(head) + "|", *others])


def named(names: list[str]) -> str:
    """Returns strategies as a cell."""
    others = [name for name in strategies() if name not in names]
    if not others:
        return "all"
    text = ", ".join(f"`{name}`" for name in names)
    return f"all except {', '.join(f'`{name}`' for name in others)}" if len(others) <= 4 else text


def table_of_options() -> str:
    """Returns one line for each argument, default and meaning."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for strategy, kind in strategies().items():
        for name, parameter in parameters(kind).items():
            if name == "graph_ranks" and kind().samples_unsupported_reason is not None:
                continue
            found[name, value(parameter.default), brief(meaning(kind, name))].append(strategy)
    lines = ((f"`{name}`", named(names), default, text) for (name, default, text), names in sorted(found.items()))
    return rows(("argument", "strategies", "default", "meaning"), *lines)


def table_of_data_options() -> str:
    """Returns one line for each argument of GraphDataModule."""
    kind, lines = lightning_gnn.GraphDataModule, []
    given = [*inspect.signature(vars(kind)["__init__"]).parameters.items()][1:]
    for name, each in [(name, each) for name, each in given if each.kind is not each.VAR_KEYWORD]:
        default = "required" if each.default is each.empty else value(each.default)
        lines.append((f"`{name}`", default, brief(meaning(kind, name))))
    return rows(("argument", "default", "meaning"), *lines)


def raises(check: Callable[..., Any], *arguments: Any) -> bool:
    """Returns whether a check of the code raises ValueError."""
    try:
        check(*arguments)
    except ValueError:
        return True
    return False


def layout(strategy: GNNStrategy, machines: int) -> Any:
    """Returns the layout on a number of ranks that the strategy supports; None if there is none."""
    for ranks in RANKS:
        try:
            return strategy.scheme.layout(ranks, machines)
        except ValueError:
            continue
    return None


_ABSTRACT = dict.fromkeys(LearnedRows.__abstractmethods__, lambda *_, **__: None)


class _WithLearnedRows(pl.LightningModule):
    """Module with learned node embeddings that fit any graph."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = type("Rows", (LearnedRows,), _ABSTRACT)()


def supported_links(strategy: GNNStrategy) -> str:
    """Returns whether modules that predict edges can be trained, and on which graphs."""
    module = lightning_gnn.LinkPredictor(torch.nn.Linear(1, 1), edge_type=ONE_TYPE)
    trainer = SimpleNamespace(accumulate_grad_batches=1)
    if isinstance(strategy, ClusterStrategy) and raises(strategy._check_fit, trainer, module):
        return "no"
    types = SimpleNamespace(is_hetero=True, edges={ONE_TYPE: 1})
    of = SimpleNamespace(types=types, edge_type=ONE_TYPE)
    return "not on HeteroData" if raises(check_links, module, of, layout(strategy, 1).samples) else "yes"


def supports_embeddings(strategy: GNNStrategy) -> bool:
    """Returns whether modules with learned node embeddings can be trained."""
    if not isinstance(strategy, ClusterStrategy):
        return True
    strategy._lightning_module = _WithLearnedRows()
    return not raises(strategy._separate, SimpleNamespace(), SimpleNamespace())


def supports_cuda(strategy: GNNStrategy) -> bool:
    """Returns False for auto_gnn, which raises before it connects ranks."""
    strategy.parallel_devices = [torch.device("cuda", 0)]
    is_auto = isinstance(strategy, lightning_gnn.AutoStrategy)
    return not (is_auto and raises(strategy.setup_environment))


def capabilities(name: str, kind: Any) -> Iterator[tuple[str, str]]:
    """Yields the features of the support matrix, and what the code answers."""
    strategy, known = kind(), parameters(kind)
    yes_or_no = {True: "yes", False: "no"}
    yield "exact training", "yes" if not strategy.approximation else f"no: {strategy.approximation}"
    yield "HeteroData", yes_or_no[layout(strategy, 1).takes_types]
    yield "samples", yes_or_no[strategy.samples_unsupported_reason is None]
    yield "links", supported_links(strategy)
    yield "embeddings", yes_or_no[supports_embeddings(strategy)]
    yield "edge features", next((text for start, text in EDGE_FEATURES.items() if name.startswith(start)), "yes")
    yield "tested on a GPU", GPU.get(name, "test suite only") if supports_cuda(kind()) else "no: CPU only"
    yield "several machines", yes_or_no[layout(strategy, 2) is not None]
    yield "`codec`", yes_or_no["codec" in known]
    yield "`checkpoint_convs`", yes_or_no["checkpoint_convs" in known]
    yield "out-of-core", yes_or_no["memory_limit" in known]


def table_of_support() -> str:
    """Returns one line for each strategy."""
    found = {name: {**dict(capabilities(name, kind))} for name, kind in strategies().items()}
    for (name, feature), text in NOT_DERIVED.items():
        found[name][feature] = text
    features = list(next(iter(found.values())))
    return rows(("strategy", *features), *((f"`{name}`", *each.values()) for name, each in found.items()))


def source_of(name: str) -> str:
    """Returns the file of a public name, relative to docs/."""
    found = getattr(lightning_gnn, name)
    return "../" + sys.modules[found.__module__].__name__.replace(".", "/") + ".py"


def link(name: str) -> str:
    """Returns the link of a public name, to its source; hooks.py leads it to its page on the site."""
    file = source_of(name)
    return f"[`{name}`]({file if (DOCS / file).exists() else file.replace('.py', '/__init__.py')})"


def tables_of_api() -> str:
    """Returns a table of public names for each group."""
    left, parts = list(lightning_gnn.__all__), []
    for title, takes in GROUPS.items():
        names = [name for name in left if (takes(name) if callable(takes) else name in takes)]
        left = [name for name in left if name not in names]
        lines = ((link(name), brief(inspect.getdoc(getattr(lightning_gnn, name)) or "")) for name in names)
        parts.append(f"## {title}\n\n{rows(('name', 'summary'), *lines)}")
    return "\n\n".join(parts)


TABLES: Mapping[str, Callable[[], str]] = {
    "strategies": table_of_options,
    "datamodule": table_of_data_options,
    "support": table_of_support,
    "api": tables_of_api,
}


def updated(page: str) -> str:
    """Returns a page with its tables as the code has them now."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}"

    return re.sub(r"(<!-- reference: (\w+) -->\n).*?\n?(<!-- end -->)", table, page, flags=re.DOTALL)


def public_pages() -> dict[str, str]:
    """Returns the site's page of each public name: its file and its Markdown."""
    homes = {name: f"lightning_gnn.{name}" for name in lightning_gnn.__all__} | OTHER_NAMES
    options = "    options: {show_root_heading: true, show_root_toc_entry: true, heading_level: 1}\n"
    return {f"api/{name}.md": f"---\ntitle: {name}\n---\n\n::: {home}\n{options}" for name, home in homes.items()}


def with_links_to_pages(markdown: str) -> str:
    """Returns api.md for the site, whose names are links to their pages in place of their sources."""
    return re.sub(r"\[`(\w+)`\]\(\.\./lightning_gnn/[\w/]+\.py\)", r"[`\1`](api/\1.md)", markdown)


if __name__ == "__main__":
    for each in PAGES:
        text = updated((DOCS / each).read_text(encoding="utf-8"))
        if "--write" in sys.argv:
            (DOCS / each).write_text(text, encoding="utf-8")
        else:
            print(text)
