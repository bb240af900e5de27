"""Faulty inputs by the thousand: each is refused by an error of ours that names the field, or gives what it says.

Graphs, graphs with types, arguments of datamodule and strategies, options of the command line, topology files, and entries of the
store, made wrong at random. Outcomes:

- refused: raised by a line of this package (or printed by the command line's parser), of a documented type, naming the field;
- worked: nothing was raised, and the result passes a check of its own, written apart from the package's;
- raw: any other error; hung: 20 s have passed; wrong: taken, although the check says that it must not be.

``python benchmarks/bad_input.py [--cases 1500] [--seed 0] [--json FILE]``; the exit status is 1 if one is raw, hung or wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData

import lightning_gnn
from lightning_gnn import GraphDataModule, strategies
from lightning_gnn.data.shards import Cut
from lightning_gnn.data.store import StoreError, read_cut
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.wiring import load_topology
from lightning_gnn.partition.layout import LayoutSpec
from lightning_gnn.strategies.vertex_cut.thresholds import AdaptiveThreshold, TopKChanges
from lightning_gnn.tools import cli

OURS = Path(lightning_gnn.__file__).parent
DOCUMENTED = (ValueError, TypeError, FileNotFoundError, StoreError)
GOOD, BAD = ("refused", "worked"), ("raw", "hung", "wrong")
DEADLINE_S = 20.0
TWO = LayoutSpec("edge_cut", 2)
Rng = np.random.Generator


@dataclass(frozen=True)
class Case:
    """A faulty input.

    Attributes:
        kind: of input.
        name: what was done, in words.
        run: uses it; returns what came of it.
        field: a pattern of which an error's message must have one occurrence.
        fits: of what `run` has returned: whether it may have been taken.
    """

    kind: str
    name: str
    run: Callable[[], Any]
    field: str
    fits: Callable[[Any], bool]


class Said(Exception):
    """The command line has printed an error, and ended with status 2."""


class Hung(BaseException):
    """A case has not come to its end; no ``except Exception`` may hold it up."""


def judge(case: Case) -> tuple[str, str]:
    """Returns the outcome of a case, and what was said."""

    def alarm(*_: Any) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = case.run()
    except Hung:
        return "hung", f"nothing within {DEADLINE_S:.0f} s"
    except Said as error:
        named = re.search(case.field, str(error)) is not None
        return ("refused", str(error)) if named else ("raw", f"{error} (does not name {case.field})")
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error}"
        by_python = isinstance(error, TypeError) and "unexpected keyword argument" in said  # as for any function
        if not by_python and not Path(last.filename).is_relative_to(OURS):
            return "raw", f"{said} (raised in {last.filename}:{last.lineno})"
        if not isinstance(error, DOCUMENTED):
            return "raw", f"{said} (no documented type)"
        if re.search(case.field, str(error)) is None:
            return "raw", f"{said} (does not name {case.field})"
        return "refused", said
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    try:
        return ("worked", "") if case.fits(result) else ("wrong", "it was taken")
    except Exception as error:
        return "wrong", f"it was taken, and gives {type(error).__name__}: {error}"


# Graphs #######################################################################

FLOATS = (math.nan, math.inf, -math.inf)
IDS = (-1, -(2**31), 2**31, 2**62, 10**6)
DTYPES = tuple(
    getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float64", "complex64")
)
NAMES = ("../x", "a/b", "..", "/etc/passwd", "x" * 300, "a\0b", "a\nb", "", "my_index", "edge_label_index", "batch")
NOT_TENSORS = ("x", 5, [[1.0]], np.ones(3), {"a": 1}, 1.5, object)


def graph(rng: Rng) -> Data:
    """A small graph in which nothing is wrong."""
    num_nodes, num_edges = int(rng.integers(4, 12)), int(rng.integers(1, 30))
    masks = torch.from_numpy(rng.permutation(np.arange(num_nodes) % 3))
    return Data(
        x=torch.from_numpy(rng.normal(size=(num_nodes, 3)).astype(np.float32)),
        edge_index=torch.from_numpy(rng.integers(0, num_nodes, (2, num_edges))),
        edge_weight=torch.from_numpy(rng.random(num_edges).astype(np.float32)),
        edge_attr=torch.from_numpy(rng.random((num_edges, 2)).astype(np.float32)),
        y=torch.from_numpy(rng.integers(0, 3, num_nodes)),
        **{f"{name}_mask": masks == number for number, name in enumerate(("train", "val", "test"))},
    )


def spoiled(value: torch.Tensor, rng: Rng) -> tuple[str, Any]:
    """Returns a tensor made wrong in one way, and how."""
    value = value.view(-1, 1) if value.dim() == 0 else value
    rows = len(value)
    at = tuple(int(rng.integers(size)) for size in value.shape)
    way = rng.integers(10)
    if way == 0:
        size = int(rng.choice([0, 1, rows - 1, rows + 1, 2 * rows]))
        return f"{size} rows", value[torch.arange(size) % rows]
    if way == 1:
        return "another dimension", value.unsqueeze(int(rng.integers(-1, 1)))
    if way == 2:
        return "flat", value.flatten()
    if way == 3:
        return "transposed", value.transpose(0, -1) if value.dim() > 1 else value[None]
    if way == 4:
        dtype = DTYPES[rng.integers(len(DTYPES))]
        return f"as {dtype}", value.to(dtype)
    if way == 5:
        found = value.double().clone() if not value.is_floating_point() else value.clone()
        found[at] = float(rng.choice(FLOATS))
        return f"{found[at]} at {at}", found
    if way == 6:
        found = value.long().clone()
        found[at] = int(rng.choice(IDS))
        return f"{found[at]} at {at}", found
    if way == 7:
        return "empty", value[..., :0] if rng.integers(2) else value[:0]
    if way == 8:
        return "a scalar", value.flatten()[0]
    return "sparse", value.float().to_sparse()


def graph_case(rng: Rng) -> Case:
    """A graph of which one or two fields are wrong."""
    data = graph(rng)
    done, fields = [], []
    for _ in range(int(rng.choice([1, 1, 2]))):
        field = str(rng.choice(["x", "edge_index", "edge_weight", "edge_attr", "y", "train_mask", "val_mask"]))
        way = rng.integers(8)
        if way == 0:
            data[field], how = None, "left out"
        elif way == 1:
            data[field] = NOT_TENSORS[rng.integers(len(NOT_TENSORS))]
            how = f"{data[field]!r}"
        elif way == 2:
            field = NAMES[rng.integers(len(NAMES))]
            sizes = {"nodes": (len(graph_rows(data)),), "edges": (2, 5), "any": (3, 1)}
            shape = sizes[str(rng.choice(list(sizes)))]
            data[field], how = torch.ones(shape), f"attribute of shape {shape}"
        elif isinstance(data.get(field), torch.Tensor) and data[field].layout == torch.strided and data[field].numel():
            how, data[field] = spoiled(data[field], rng)
        else:
            continue
        done.append(f"{field[:20]!r}: {how}")
        fields.append(field)
    store_it = bool(rng.integers(2))

    def run() -> tuple[Data, list[Any]]:
        module = GraphDataModule(data, partition_dir=tempfile.mkdtemp(dir=_scratch()))
        module.setup("fit")
        loaded = module.load()
        shards = []
        if store_it:
            cut = read_cut(module.partition_dir / module.build(TWO))
            shards = [cut.shard(rank) for rank in range(2)]
            shutil.rmtree(module.partition_dir)
        return loaded, shards

    said = "|".join(re.escape(repr(field) if field in NAMES else field) for field in fields)
    # What depends on a field is named by the one that shows it: labels by masks, x by all that has a row per node.
    related = "|edge_index|edge_weight|edge_attr|train_mask|val_mask|^y |^x |num_nodes|no nodes"
    return Case("graph", ", ".join(done), run, said + related, lambda found: graph_fits(data, *found))


def graph_rows(data: Data) -> list[int]:
    x = data.get("x")
    return list(range(len(x))) if isinstance(x, torch.Tensor) and x.dim() else [0]


def graph_fits(given: Data, found: Data, shards: list[Any]) -> bool:
    """Whether a graph that was taken is one, and the one that was given, whole and in parts."""
    x, edges = found.x.numpy(), found.edge_index.numpy()
    num_nodes, num_edges = len(x), edges.shape[1]
    ok = x.ndim == 2 and x.shape[1] > 0 and np.isfinite(x.astype(np.float64)).all()
    ok = ok and edges.shape[0] == 2 and edges.dtype == np.int64 and bool(((edges >= 0) & (edges < num_nodes)).all())
    ok = ok and np.array_equal(x, np.asarray(given.x.to(found.x.dtype)))
    ok = ok and np.array_equal(edges, np.asarray(given.edge_index.long()))
    for name in ("train_mask", "val_mask", "test_mask"):
        ok = ok and found[name].dtype == torch.bool and found[name].shape == (num_nodes,)
        if given.get(name) is not None:
            ok = ok and torch.equal(found[name], given[name].view(num_nodes, -1)[:, 0].bool())
    if given.get("y") is not None:
        ok = ok and found.y.size(0) == num_nodes and bool(found.y.isfinite().all()) and float(found.y.min()) >= -1
    for name in ("edge_weight", "edge_attr"):
        if given.get(name) is not None:
            ok = ok and len(found[name]) == num_edges and bool(found[name].isfinite().all())
    if shards:
        n_id = torch.cat([shard.batch.n_id for shard in shards])
        ok = ok and sorted(n_id.tolist()) == list(range(num_nodes))
        ok = ok and torch.equal(torch.cat([shard.batch.x for shard in shards]), found.x[n_id])
        ok = ok and shards[0].n_id.tolist() == n_id.tolist()
        joined = []
        for rank, shard in enumerate(shards):
            joined.append(shard.n_id.numpy()[shard.node_ids(rank)][shard.batch.edge_index.numpy()])
        e_id = torch.cat([shard.batch.e_id for shard in shards]).numpy()
        ok = ok and np.array_equal(np.concatenate(joined, 1), edges[:, e_id])
    return bool(ok)


def hetero_case(rng: Rng) -> Case:
    """A graph with types of which one field is wrong."""
    data, one = HeteroData(), graph(rng)
    data["a"].x, data["a"].y, data["a"].train_mask = one.x, one.y, one.train_mask
    data["b"].x = one.x[:3].clone()
    data["a", "to", "a"].edge_index = one.edge_index
    data["b", "to", "a"].edge_index = one.edge_index % 3
    data["b", "to", "a"].edge_weight = one.edge_weight
    key: Any = [("a", "x"), ("a", "y"), ("a", "train_mask"), ("b", "x")][rng.integers(4)]
    if rng.integers(2):
        key = (("b", "to", "a"), str(rng.choice(["edge_index", "edge_weight"])))
    kind, field = key
    way = rng.integers(8)
    if way == 0:
        del data[kind][field]
        how = "left out"
    elif way == 1:
        kind, field = "b", "num_nodes"
        value = VALUES[rng.integers(len(VALUES))]
        data["b"].num_nodes, how = value, repr(value)
    elif way == 2:
        field = NAMES[rng.integers(len(NAMES))]
        data[kind][field], how = torch.ones(3), "an attribute"
    elif way == 3:
        value = NOT_TENSORS[rng.integers(len(NOT_TENSORS))]
        data[kind][field], how = value, repr(value)
    else:
        how, data[kind][field] = spoiled(data[kind][field], rng)

    def run() -> HeteroData:
        module = GraphDataModule(data, partition_dir=tempfile.mkdtemp(dir=_scratch()))
        module.setup("fit")
        cut = read_cut(module.partition_dir / module.build(LayoutSpec("edge_cut", 2, takes_types=True)))
        for rank in range(2):
            cut.shard(rank)
        return module.load()

    def fits(found: HeteroData) -> bool:
        ok = True
        for source, _, target in found.edge_types:
            ends = found[source, "to", target].edge_index
            for row, end in enumerate((source, target)):
                ok = ok and (
                    ends.numel() == 0 or 0 <= int(ends[row].min()) <= int(ends[row].max()) < found[end].num_nodes
                )
        xs = [found[name].x for name in found.node_types if "x" in found[name]]
        return ok and all(x.dim() == 2 and bool(x.isfinite().all()) for x in xs) and "train_mask" in found["a"]

    name = f"{kind} {field}: {how}"
    return Case(
        "graph with types", name, run, f"{re.escape(field)}|num_nodes|train_mask|edge_index|\\bx\\b|attribute", fits
    )


# Arguments ####################################################################

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        3,
        2**31,
        2**70,
        1.5,
        -0.5,
        0.5,
        *FLOATS,
        "",
        "auto",
        "metis",
        "int8",
        "no such word",
    ),
    *(
        [],
        [0],
        [1, "a"],
        {},
        {"a": 1},
        (),
        (0.6, 0.2, 0.2),
        object(),
        b"x",
        np.ones(3),
        torch.ones(2),
        lambda: None,
        "a\0b",
    ),
)
CLASSES: tuple[type, ...] = (
    *(strategies.DGCLStrategy, strategies.SpMM1DStrategy, strategies.SpMM15DStrategy, strategies.SpMM2DStrategy),
    *(strategies.SpMM3DStrategy, strategies.VertexCutStrategy, strategies.CachedVertexCutStrategy),
    *(strategies.SamplingStrategy, strategies.GossipStrategy, strategies.ClusterAllReduceStrategy),
    *(AdaptiveThreshold, TopKChanges, GraphDataModule),
)
_NOT_OURS = {"self", "options", "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"}
_NOT_OURS |= {"precision_plugin", "scheme", "source", "mean"}
_AT_LEAST = {
    **dict.fromkeys(("average_every_n_batches", "num_clusters", "clusters_per_batch", "walk_length"), 1),
    **dict.fromkeys(("num_workers", "num_machines"), 1),
    **dict.fromkeys(("replication_factor", "batch_size"), 1),
    **dict.fromkeys(("num_hops", "seed", "split_index", "prefetch_batches", "remote_cache", "local_cache"), 0),
    **dict.fromkeys(("partner_timeout", "epsilon", "host_weight"), 0),
}


def argument_case(rng: Rng) -> Case:
    """A class of ours with one or two odd arguments."""
    kind = CLASSES[rng.integers(len(CLASSES))]
    known = {name: hint for name, hint in arguments_of(kind).items() if name not in _NOT_OURS}
    chosen = rng.choice(sorted(known), int(rng.choice([1, 1, 2])), replace=False).tolist()
    given = {name: VALUES[rng.integers(len(VALUES))] for name in chosen}
    if rng.integers(12) == 0:
        given["no_such_argument"] = 1
    extra = {"source": graph(rng)} if kind is GraphDataModule else {}

    def fits(_: Any) -> bool:
        return all(name in known and matches(value, known[name], name) for name, value in given.items())

    told = ", ".join(f"{name}={value!r:.40}" for name, value in given.items())
    # A method or plan may rule out what another argument says; both are named.
    field = "|".join(given) + "|fan-out|share|growth"
    return Case("argument", f"{kind.__name__}({told})", lambda: kind(**extra, **given), field, fits)


def arguments_of(kind: type) -> dict[str, Any]:
    """Returns annotations of all arguments of a class, those that it hands on to its bases, too."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if "__init__" in vars(base) and base.__module__.startswith("lightning_gnn"):
            hints = typing.get_type_hints(base.__init__, vars(sys.modules[base.__module__]))
            names = inspect.signature(base.__init__).parameters
            hands_on = "options" in names
            found = {**(found if hands_on else {}), **{name: hints.get(name, Any) for name in names}}
    if kind is strategies.CachedVertexCutStrategy:
        found = {**arguments_of(strategies.VertexCutStrategy), **found}
    return found


def matches(value: Any, hint: Any, name: str) -> bool:
    """Whether a value is of an annotated type and in the range that its name implies."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, each, name) for each in args)
    if origin is typing.Literal:
        return isinstance(value, str) and value in args
    if hint in (int, float):
        numbers = (int, np.integer) if hint is int else (int, float)
        ok = isinstance(value, numbers) and not isinstance(value, bool)
        return ok and math.isfinite(value) and value >= _AT_LEAST.get(name, -math.inf)
    if origin is not None:
        if isinstance(value, str) or not isinstance(value, origin):
            return False
        items = list(value.values()) if isinstance(value, Mapping) else list(value)
        return all(matches(each, args[-1], name) for each in items) if args else True
    return value is None if hint in (None, type(None)) else isinstance(value, hint)


# The command line #############################################################

WORDS = (
    "dgcl",
    "dgclx",
    "spmm_2d",
    "DGCLStrategy",
    "lightning_gnn.DGCLStrategy",
    "no.such.Class",
    "5",
    "",
    "[1",
    "{}",
    "null",
)
KEYS = (
    "trainer.max_epochs",
    "trainer.devices",
    "trainer.strategy",
    "data.seed",
    "data.split",
    "data.partition",
    "data.sed",
)
KEYS += (
    "trainer.strategy.timeout",
    "trainer.strategy.plan",
    "model",
    "model.init_args.lr",
    "data.source_kwargs",
    "seed_everything",
)


def command_case(rng: Rng) -> Case:
    """Options, or a file of options, that do not fit."""
    file = Path(tempfile.mkdtemp(dir=_scratch())) / "config.yaml"
    config = {
        "model": {
            "class_path": "lightning_gnn.NodeClassifier",
            "init_args": {
                "model": {
                    "class_path": "torch_geometric.nn.models.GCN",
                    "init_args": {"in_channels": 3, "hidden_channels": 4, "num_layers": 2, "out_channels": 3},
                }
            },
        },
        "data": {"class_path": "lightning_gnn.GraphDataModule", "init_args": {"source": "no.such.source"}},
        "trainer": {"strategy": "dgcl", "devices": 2, "accelerator": "cpu", "max_epochs": 1},
    }
    text = json.dumps(config, indent=1)
    arguments = ["fit", "--config", str(file), "--print_config"]
    key = ""
    if rng.integers(3) == 0:
        places = [match.start() for match in re.finditer(r'[:,"{}\[]', text)]
        at = places[rng.integers(len(places))]
        word = WORDS[rng.integers(len(WORDS))]
        text, name = f"{text[:at]}{word}{text[at + 1 :]}", f"the file has {word!r} at {at}"
    else:
        key, word = KEYS[rng.integers(len(KEYS))], WORDS[rng.integers(len(WORDS))]
        arguments += [f"--{key}", word]
        name = f"--{key} {word}"
    file.write_text(text)

    def run() -> Any:
        said = io.StringIO()
        before, sys.argv = sys.argv, ["lightning-gnn", *arguments]
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                cli.main()
        except SystemExit as ended:
            if ended.code == 2 and said.getvalue().startswith("error: ") and "Traceback" not in said.getvalue():
                raise Said(said.getvalue()) from ended
            if ended.code:
                raise RuntimeError(f"status {ended.code}: {said.getvalue()[:300]}") from ended
            return None
        finally:
            sys.argv = before
        return None

    # Of options, the key or the word; a file that is none is told by its name, a part of it by a key.
    field = (
        "|".join([re.escape(key.rpartition(".")[2]), re.escape(word)])
        if key
        else r"config\.yaml|\w+_path|init_args|\w+\.\w+|key"
    )
    return Case("command line", name, run, field, lambda _: True)


# Topologies ###################################################################

HOSTILE: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        65,
        2**31,
        10**18,
        10**400,
        1.5,
        1e-320,
        1e308,
        *FLOATS,
        "",
        "-",
        "hop0",
        "--hop0",
        "x" * 10**5,
    ),
    *([], [[]], {}, [0] * 10**4, [None], {"a": 0}, [1, [2, [3]]], [-1], ["hop0"] * 1000, "../../etc/passwd", "\x00"),
)
TOPOLOGY: dict[str, Any] = {
    "name": "two machines",
    "devices": 4,
    "hosts": [{"name": "h0", "devices": [0, 1]}, {"name": "h1", "devices": [2, 3], "sockets": [[2], [3]]}],
    "hops": [{"name": "hop0", "kind": "ib", "gb_per_s": 6.4}, {"name": "hop1", "bandwidth_mbit": 100.0}],
    "links": [
        {"a": 0, "b": 1, "kind": "nvlink", "gb_per_s": 48.0},
        {"a": 2, "b": 3, "gb_per_s": 48, "reference": {"type": "NV1"}},
        *({"a": a, "b": b, "via": ["hop0", "-hop1"]} for a in (0, 1) for b in (2, 3)),
    ],
    "memory": [{"device": device, "via": ["hop0"]} for device in range(4)],
}


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the ways to all values inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        yield (*path, key)
        yield from places_of(inside, (*path, key))


def mutated(value: Any, rng: Rng) -> tuple[str, Any]:
    """Returns a JSON value of which one part is replaced, taken away or doubled, and which."""
    value = json.loads(json.dumps(value))
    ways = list(places_of(value))
    way = ways[rng.integers(len(ways))]
    parent = value
    for key in way[:-1]:
        parent = parent[key]
    what = rng.integers(4)
    if what == 0:
        del parent[way[-1]]
        return f"without {way}", value
    if what == 1 and isinstance(parent, list):
        parent.append(parent[way[-1]])
        return f"twice {way}", value
    parent[way[-1]] = HOSTILE[rng.integers(len(HOSTILE))]
    return f"{way} = {str(parent[way[-1]])[:30]}", value


def topology_case(rng: Rng) -> Case:
    """A topology's file in which one or two things are wrong."""
    name, value = mutated(TOPOLOGY, rng)
    if rng.integers(2) and isinstance(value, dict) and value:
        more, value = mutated(value, rng)
        name = f"{name}, {more}"
    content = json.dumps(value).encode()
    way = rng.integers(10)
    if way == 0:
        content = content[: rng.integers(len(content))]
        name = f"cut after {len(content)} bytes"
    elif way == 1:
        content = bytes(rng.integers(0, 256, 200, dtype=np.uint8))
        name = "random bytes"
    elif way == 2:
        depth = int(rng.choice([100, 100_000]))
        content, name = b"[" * depth + b"]" * depth, f"{depth} lists in each other"
    path = Path(tempfile.mkdtemp(dir=_scratch())) / "topology.json"
    path.write_bytes(content)

    def fits(found: Topology) -> bool:
        num, links = found.num_devices, found.links
        reach = np.eye(num, dtype=bool)
        for a, b in links:
            reach[a, b] = True
        for _ in range(num):
            reach = reach @ reach
        ok = (
            1 <= num <= 64
            and bool(reach.all())
            and bool(np.isfinite(found.gb_per_s).all() and (found.gb_per_s > 0).all())
        )
        ok = ok and all(0 <= hop < len(found.hops) for via in links.values() for hop in via)
        ok = ok and found.passes.shape == (num, num, len(found.hops))
        return ok and sorted(sum(found.hosts, ())) == sorted(sum(found.sockets, ())) == list(range(num))

    words = "devices|links|hops|hosts|socket|memory|name|via|gb_per_s|bandwidth|[Ll]ink|Hop|JSON|not connected|bytes"
    return Case("topology", name, lambda: load_topology(path), words, fits)


# The store ####################################################################


def store_case(rng: Rng) -> Case:
    """An entry of the store of which a file was altered."""
    folder = Path(shutil.copytree(_entry(), Path(tempfile.mkdtemp(dir=_scratch())) / _entry().name, symlinks=True))
    files = sorted(file for file in folder.iterdir() if file.name != "verified.json")
    arrays = [file for file in files if file.suffix == ".npy"]
    file = files[rng.integers(len(files))]
    array, other = (arrays[index] for index in rng.choice(len(arrays), 2, replace=False))
    content = bytearray(file.read_bytes())
    way = str(rng.choice(["flip", "cut", "zeros", "swap", "manifest", "link", "longer", "missing"]))
    if way == "flip":
        at = int(rng.integers(len(content)))
        content[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(content)
        name = f"{file.name}: a bit at {at}"
    elif way in ("cut", "zeros", "longer"):
        at = int(rng.integers(len(content)))
        file.write_bytes(
            {"cut": content[:at], "zeros": content[:at] + bytes(len(content) - at), "longer": content + b"x"}[way]
        )
        name = f"{file.name}: {way} {at}"
    elif way == "missing":
        file.unlink()
        name = f"{file.name}: missing"
    elif way == "swap":
        shutil.copy(array, folder / "swapped")
        shutil.copy(other, array)
        shutil.move(folder / "swapped", other)
        name = f"{array.name} and {other.name} swapped"
    elif way == "link":
        target = Path(tempfile.mkdtemp(dir=_scratch())) / file.name
        shutil.move(file, target)
        if rng.integers(3):
            file.symlink_to(target)
        else:
            os.mkfifo(file)
        name = f"{file.name}: a link or a pipe"
    else:
        manifest = json.loads((folder / "manifest.json").read_text())
        name, manifest = mutated(manifest, rng)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    def run() -> Cut:
        cut = read_cut(folder)
        for rank in range(len(cut.halos)):
            shard = cut.shard(rank)
            shard.node_ids(rank)
        return cut

    word = r"manifest|\.npy|attributes|format|name|layout|groups|parts|kind|verified|written as"
    return Case("store", name, run, word, cut_fits)


def cut_fits(cut: Cut) -> bool:
    """Whether what was read is what was written."""
    was = read_cut(_entry())
    same = torch.equal(cut.n_id, was.n_id) and np.array_equal(cut.edge_index(), was.edge_index())
    same = same and torch.equal(cut.attributes["node"]["x"], was.attributes["node"]["x"])
    return same and cut.mask_counts == was.mask_counts


# All of them ##################################################################

KINDS: dict[str, tuple[Callable[[Rng], Case], float]] = {
    "graph": (graph_case, 0.27),
    "graph with types": (hetero_case, 0.08),
    "argument": (argument_case, 0.3),
    "command line": (command_case, 0.04),
    "topology": (topology_case, 0.16),
    "store": (store_case, 0.15),
}
"""What makes cases of a kind, and their share."""

_made: dict[str, Path] = {}


def _scratch() -> Path:
    if "scratch" not in _made:
        _made["scratch"] = Path(tempfile.mkdtemp(prefix="bad_input."))
    return _made["scratch"]


def _entry() -> Path:
    """An entry of the store in which nothing is wrong."""
    if "entry" not in _made:
        module = GraphDataModule(graph(np.random.default_rng(7)), partition_dir=_scratch() / "good")
        _made["entry"] = module.partition_dir / module.build(TWO)
    return _made["entry"]


def cases(count: int, seed: int, kind: str | None = None) -> Iterator[Case]:
    """Yields cases of all kinds, or of one; each depends on the seed and its number only."""
    for name, (make, share) in KINDS.items():
        if kind in (None, name):
            for number in range(round(count * share) if kind is None else count):
                yield make(np.random.default_rng([seed, number, *name.encode()]))


def clean_up() -> None:
    """Removes all files."""
    for path in _made.values():
        shutil.rmtree(path, ignore_errors=True)
    _made.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=list(KINDS))
    parser.add_argument("--json", help="write tally and bad cases to this file")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    from common import report

    tally: dict[str, Counter[str]] = {}
    bad, began = [], time.perf_counter()
    for case in cases(options.cases, options.seed, options.kind):
        outcome, said = judge(case)
        tally.setdefault(case.kind, Counter())[outcome] += 1
        if outcome in BAD:
            bad.append({"kind": case.kind, "input": case.name, "outcome": outcome, "said": said[:500]})
            print(f"{outcome}: {case.kind}: {case.name[:200]}\n    {said[:300]}", flush=True)
    clean_up()
    rows: list[dict[str, Any]] = [{"input": kind, **counts} for kind, counts in tally.items()]
    total = sum(tally.values(), Counter())
    rows.append({"input": f"all {total.total():,}", **total})
    title = f"Faulty inputs, seed {options.seed}, {time.perf_counter() - began:.0f} s"
    for row in rows:
        row["anything else"] = sum(row.get(outcome, 0) for outcome in BAD)
    report(title, rows, ["input", *GOOD, "anything else"], options.json, bad=bad)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
