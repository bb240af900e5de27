"""What is left to gain in the messages of a cached vertex cut: their entropy, zlib at level 1, and a prediction of rows.

    python benchmarks/vertex_cut_entropy.py [--graphs photo dblp] [--epochs 60] [--json FILE]

A GCN of 3 layers, whose second and third send rows in each epoch. *zlib* is
the share of the bytes that is left; seconds are the processor's; *momentum*: bits by which a number is further off from twice
the last row less the one before than from the row that was sent last.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import zlib
from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np
from common import SHARED, report
from torch import Tensor
from vertex_cut_runs import CELLS, GRAPHS, train_in_process

from lightning_gnn.strategies.vertex_cut.cache import _Channel, _choose_codec

EVERY = 15
"""Epochs from one that is looked at to the next."""

found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
exact: dict[int, deque[Tensor]] = defaultdict(lambda: deque(maxlen=3))
steps = Counter[int]()
messages = _Channel.messages


def entropy(codes: Any) -> float:
    """Returns the bits of codes if each is as long as its frequency asks for."""
    counts = np.unique(codes, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def looked_at(channel: Any, rows: Tensor, cache: Any, codec: Any, call: Any) -> list[tuple[int, Tensor]]:
    """As ``_Channel.messages``, and counts what could be made of them."""
    before, history = channel.sent_rows.clone(), exact[id(channel)]
    sent = messages(channel, rows, cache, codec, call)
    history.append(rows.clone())
    steps[id(channel)] += 1
    if steps[id(channel)] % EVERY == 0 and channel.num_active and (used := _choose_codec(codec, rows, False)) is not None:
        of, (older, last, now) = found[call.layer, call.direction], history
        width, ends = used.row_bytes(rows.size(1), rows.dtype), 8 if used.name == "int8" else 1
        for _, data in sent:
            plain, began = data.numpy().tobytes(), time.thread_time()
            packed, packed_at = zlib.compress(plain, 1), time.thread_time()
            zlib.decompress(packed)
            of["bytes"] += len(plain)
            of["zlib"] += len(packed)
            of["coding"] += packed_at - began
            of["decoding"] += time.thread_time() - packed_at
        guess = 2 * rows[0].nbytes if cache.guesses else 0
        heads = {peer: guess + -(-count // 64) * 8 for peer, count in enumerate(channel._out_counts)}
        codes = np.concatenate([data[heads[peer] :].view(-1, width)[:, ends:].numpy() for peer, data in sent])
        codes = np.stack([codes & 15, codes >> 4]) if used.name == "bfp4" else codes
        of["codes"] += codes.size
        of["bits"] += entropy(codes)
        of["off"] += float((now - before).double().square().sum())
        of["off, momentum"] += float((now - 2 * last + older).double().square().sum())
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", choices=[*GRAPHS], default=["photo", "dblp"])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--json")
    options = parser.parse_args()
    _Channel.messages = looked_at  # type: ignore[method-assign,assignment]
    lines = []
    for graph in options.graphs:
        for cell in ("both", "largest"):
            found.clear()
            exact.clear()
            steps.clear()
            given = {"partition": "ebv", **CELLS[cell]}
            with tempfile.TemporaryDirectory() as folder:  # PyG writes beside the data
                root = shutil.copytree(SHARED / "data" / GRAPHS[graph][0], f"{folder}/data")
                train_in_process(graph, root, given, 0, options.epochs, layers=3)
            total = sum(found.values(), Counter())
            for message, of in [
                *((f"{layer} {direction}", of) for (layer, direction), of in found.items()),
                ("all", total),
            ]:
                line = {"graph": graph, "cell": cell, "message": message, "MB": of["bytes"] / 1e6}
                line |= {"bits/number": of["bits"] / of["codes"], "zlib": of["zlib"] / of["bytes"]}
                line |= {f"{name} ms/MB": 1e9 * of[name] / of["bytes"] for name in ("coding", "decoding")}
                line["saved ms/MB"] = 160 * (1 - line["zlib"])
                lines.append(line | {"momentum": np.log2(of["off, momentum"] / of["off"]) / 2})
    report("Messages of a cached vertex cut, 4 ranks as threads; saved: at 50 Mbit/s", lines, [*lines[0]], options.json)


if __name__ == "__main__":
    main()
