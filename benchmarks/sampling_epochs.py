"""Training in mini-batches: batches/s against PyG's loader under DDP, what the partition and the cache are worth, accuracy.

    python benchmarks/sampling_epochs.py [--large] [--ranks 1 2 4] [--batches 20] [--json FILE]
    python benchmarks/sampling_epochs.py --ablation [--ranks 4]
    python benchmarks/sampling_epochs.py --caches [--graphs computers twitter cnr-2000] [--batch-size 256]
    python benchmarks/sampling_epochs.py --netlab NETLAB.py [--batches 5]
    python benchmarks/sampling_epochs.py --accuracy [--graphs computers github cornell5] [--seeds 5] [--ranks 1 2 4]

Every row runs in processes of its own. Where neither torch-sparse nor pyg-lib can be imported, PyG's NodeLoader is given our
sampler. The ablation makes an epoch's batches without training on them; ranks are threads there, each as if on a
machine of its own: it asks others for what it does not own. What they receive is counted, and does not depend on the machine.
So it is for caches, where four ranks are on two machines.
With netlab (root only), four ranks train on two emulated hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import QUIET, SHARED, load_planted, planted_file, report, run_on_hosts, run_row
from sampling_threads import Meeting
from torch_geometric import typing as pyg
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.nn.models import GraphSAGE
from vertex_cut_runs import GRAPHS, SIZES, load_graph

from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier, SamplingStrategy
from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Cut, cut_graph
from lightning_gnn.data.sources import MASKS, prepare_graph
from lightning_gnn.partition.edge_cut import assign_nodes
from lightning_gnn.partition.layout import ONE_TYPE, by_machine
from lightning_gnn.strategies.sampling import NeighborSampler, graph_store
from lightning_gnn.strategies.sampling.loader import BatchMaker, SampledBatches, SeedBatches, SplitSeeds

FANOUTS, BATCH_SIZE, FEATURES = [15, 10, 5], 1000, 100


def load(name: str) -> Data:
    """Returns a graph by name; a source for GraphDataModule."""
    if name.startswith("planted-"):
        data = load_planted(str(planted_file(int(name.removeprefix("planted-")))))
        data.x = data.x[:, :FEATURES].contiguous()
        return data
    if name == "twitter":
        return _twitter()
    if name == "cnr-2000":
        return _edges("cnr-2000", 0.1)
    with tempfile.TemporaryDirectory() as folder:  # PyG writes beside the raw files
        source = GRAPHS[name][0]
        shutil.copytree(SHARED / "data" / source, f"{folder}/{source}")
        data = load_graph(name, f"{folder}/{source}")
    data.x = F.normalize(data.x)
    return data


def _edges(name: str, share: float) -> Data:
    """Returns a graph of edges alone, a share of whose nodes is for training; one feature stands for all."""
    arrays = np.load(SHARED / f"data/edges/{name}.npz")
    nodes, rng = int(arrays["num_nodes"]), np.random.default_rng(0)
    train = torch.from_numpy(rng.random(nodes) < share)
    edge_index = torch.from_numpy(np.stack([arrays["src"], arrays["dst"]]).astype(np.int64))
    labels = torch.zeros(nodes, dtype=torch.long)
    return Data(
        x=torch.zeros(nodes, 1), edge_index=edge_index, y=labels, train_mask=train, val_mask=~train, test_mask=~train
    )


def _twitter() -> Data:
    """Twitter follows, with random features; most training nodes lie among the first quarter of the ids, which are crawled
    together."""
    arrays = np.load(SHARED / "data/edges/ego-twitter.npz")
    nodes, rng = int(arrays["num_nodes"]), np.random.default_rng(0)
    train = rng.random(nodes) < np.where(np.arange(nodes) < nodes // 4, 0.4, 0.05)
    return Data(
        x=torch.from_numpy(rng.standard_normal((nodes, FEATURES), np.float32)),
        edge_index=torch.from_numpy(np.stack([arrays["src"], arrays["dst"]]).astype(np.int64)),
        y=torch.from_numpy(rng.integers(0, 16, nodes)),
        train_mask=torch.from_numpy(train),
        val_mask=torch.from_numpy(~train & (rng.random(nodes) < 0.1)),
        test_mask=torch.from_numpy(~train & (rng.random(nodes) < 0.1)),
    )


def make_model(data_width: int, hidden: int, classes: int, layers: int = 3, dropout: float = 0.0) -> GraphSAGE:
    return GraphSAGE(data_width, hidden, num_layers=layers, out_channels=classes, dropout=dropout)


# PyG ##########################################################################


def pyg_rank(rank: int, ranks: int, graph: str, batches: int, hidden: int, answer: str, port: int) -> None:
    """PyG's loader under DistributedDataParallel: each rank has the whole graph and its share of the seeds."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if ranks > 1:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    data = load(graph)
    torch.manual_seed(0)
    model: Any = make_model(data.x.size(1), hidden, 16)
    if ranks > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    seeds = data.train_mask.nonzero().view(-1)[rank::ranks]
    choices: dict[str, Any] = {"input_nodes": seeds, "batch_size": BATCH_SIZE, "shuffle": True}
    if pyg.WITH_PYG_LIB or pyg.WITH_TORCH_SPARSE:
        loader: Any = NeighborLoader(data, FANOUTS, **choices)
    else:
        loader = NodeLoader(data, NeighborSampler.from_data(data, FANOUTS), **choices)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seconds, cpu, losses, began = [], [time.process_time()], [], time.perf_counter()
    for step, batch in enumerate(loader):
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        now = time.perf_counter()
        seconds.append(now - began)
        cpu.append(time.process_time())
        began = now
        if step + 1 == batches:
            break
    if rank == 0:
        Path(answer).write_text(json.dumps({"seconds": seconds, "cpu": cpu, "losses": losses, "steps": len(loader)}))
    if ranks > 1:
        dist.destroy_process_group()


def pyg_row(ranks: int, graph: str, batches: int, hidden: int) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile() as answer:
        arguments = (ranks, graph, batches, hidden, answer.name, 20000 + os.getpid() % 20000)
        if ranks == 1:
            pyg_rank(0, *arguments)
        else:
            torch.multiprocessing.spawn(pyg_rank, arguments, ranks)
        return json.loads(Path(answer.name).read_text())


# Ours #########################################################################


class Clock(L.Callback):
    """Seconds from one batch's end to the next, losses, and what the strategy logs after an epoch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last = time.perf_counter()
        self.cpu.append(time.process_time())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self.cpu.append(time.process_time())
        self.losses.append(float(outputs["loss"]))
        self._last = now

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        values = trainer.callback_metrics.items()
        self.logged.append({name: float(value) for name, value in values if name.startswith("sampling/")})


def our_row(
    ranks: int,
    graph: str,
    batches: int,
    hidden: int,
    epochs: int = 1,
    partition: str | None = None,
    **options: Any,
) -> dict[str, Any] | None:
    """``Trainer(strategy="sampling")``; returns the row on rank 0."""
    torch.manual_seed(0)
    devices: dict[str, int] = {"devices": ranks}
    if "NETLAB_TOPO" in os.environ:
        devices = {"num_nodes": 2, "devices": ranks // 2}
        # All ranks are processes of one machine; only those of an emulated host may read each other's files.
        here = [rank for rank in range(ranks) if rank // (ranks // 2) == int(os.environ["NODE_RANK"])]
        World.ranks_here = lambda world: here  # type: ignore[method-assign]
        options["shared_memory"] = False
    module = NodeClassifier(make_model(FEATURES, hidden, 16), lr=0.01, weight_decay=0.0)
    clock = Clock()
    data = GraphDataModule("sampling_epochs.load", {"name": graph}, partition=partition)
    trainer = L.Trainer(
        strategy=SamplingStrategy(FANOUTS, BATCH_SIZE, timeout=1200, self_check=False, **options),
        **devices,
        max_epochs=epochs,
        limit_train_batches=batches or 1.0,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        callbacks=[clock],
        **QUIET,
    )
    trainer.fit(module, datamodule=data)
    if not trainer.is_global_zero:
        return None
    return {
        "seconds": clock.seconds,
        "cpu": clock.cpu,
        "losses": clock.losses,
        "logged": clock.logged,
        "steps": len(trainer.train_dataloader),
    }


# Ranks as threads #############################################################


def epoch_bytes(cut: Cut, seeds: list[torch.Tensor], cache_bytes: int, most: int | None) -> tuple[float, float]:
    """Returns the bytes that ranks receive for a batch of each, without filling the cache, and the share of rows that it spares.

    All batches of an epoch are made, or the first `most`.
    """
    size = len(seeds)
    meeting = Meeting([[rank] for rank in range(size)])
    graph_store.GroupChannel = meeting.channel  # type: ignore[assignment,misc]
    batches = SeedBatches([len(each) for each in seeds], BATCH_SIZE)

    def rank_epoch(rank: int) -> tuple[int, int, int]:
        store = graph_store.GraphStore(cut, meeting.world(rank), [rank], cache_bytes)
        store.take_counts()
        maker, own = BatchMaker(store, {ONE_TYPE: FANOUTS}), seeds[rank]
        for batch in islice(SampledBatches([maker], batches, own, own[:1], rank, 0, 0, lambda: 0), most):
            assert batch.x.size(1) == FEATURES
        return store.take_counts()[:3]

    with ThreadPoolExecutor(size) as pool:
        asked, hits, received = np.sum(list(pool.map(rank_epoch, range(size))), 0)
    return float(received) / min(batches.steps, most or batches.steps), float(hits / max(1, asked))


def far_draws(
    cut: Cut, batch_size: int, cache_rows: Sequence[int], labor: bool = False
) -> tuple[list[list[np.ndarray]], np.ndarray, int, float]:
    """Makes two epochs of batches on two machines of two ranks.

    Returns:
        Of each rank the nodes of its batches that lie on the other machine; by epoch and rank, how many of these were not in
        its cache of so many rows, ``[2, 4]``; batches of an epoch; the mean number of nodes of a batch.
    """
    machines = [[0, 1], [2, 3]]
    meeting = Meeting(machines)
    graph_store.GroupChannel = meeting.channel  # type: ignore[assignment,misc]
    split = SplitSeeds.of(cut, ONE_TYPE[0], "train_mask", 2)
    batches, place = SeedBatches(split.sizes, batch_size), torch.empty_like(cut.n_id)
    place[cut.n_id] = torch.arange(len(place))
    row_bytes = cut.attributes["node"]["x"][:1].nbytes

    def rank_epochs(rank: int) -> tuple[list[np.ndarray], list[int], int]:
        near = machines[rank // 2]
        choice = graph_store.Choice(labor=labor)
        world = meeting.world(rank)
        store = graph_store.GraphStore(cut, world, near, cache_rows[rank] * row_bytes, choice=choice)
        epoch, own = iter(range(2)), split.seeds(rank)
        others = {peer: split.seeds(peer) for peer in store.askers}
        maker = BatchMaker(store, {ONE_TYPE: FANOUTS})
        loader = SampledBatches([maker], batches, own, own[:1], rank, 0, 0, lambda: next(epoch), peer_seeds=others)
        far, missed, nodes = [], [], 0
        for _ in range(2):
            for batch in loader:
                ids = place[batch.n_id]
                far.append(ids[store.machines_of(ONE_TYPE[0], ids) != store.local_machine].numpy())
                nodes += len(ids)
            asked, hits, *_ = store.take_counts()
            missed.append(asked - hits)
        return far, missed, nodes

    with ThreadPoolExecutor(4) as pool:
        far, missed, nodes = zip(*pool.map(rank_epochs, range(4)))
    return list(far), np.array(missed).T, batches.steps, sum(nodes) / (8 * batches.steps)


def belady(far: list[np.ndarray], cache_rows: int, begin: int, num_nodes: int) -> int:
    """Returns how many rows are missed from batch `begin` on where those that are needed soonest are kept: no policy misses
    fewer (Belady, IBM Systems Journal 5(2), 1966)."""
    never, nodes = len(far), np.concatenate(far)
    step = np.repeat(np.arange(len(far)), [len(each) for each in far])
    order = np.lexsort((step, nodes))
    again = nodes[order][1:] == nodes[order][:-1]
    later = np.full(len(nodes), never)
    later[order[:-1][again]] = step[order[1:][again]]
    cached, needed, missed = np.zeros(num_nodes, bool), np.full(num_nodes, never), 0
    for number, (ids, nexts) in enumerate(zip(far, np.split(later, np.cumsum([len(each) for each in far])[:-1]))):
        missed += int((~cached[ids]).sum()) if number >= begin else 0
        cached[ids], needed[ids] = True, nexts
        kept = (cached & (needed < never)).nonzero()[0]
        cached[:] = False
        cached[kept[np.argsort(needed[kept], kind="stable")[:cache_rows]]] = True
    return missed


# Accuracy #####################################################################


def accuracy_row(graph: str, ranks: int, seeds: int, epochs: int, **options: Any) -> dict[str, Any] | None:
    """Test accuracy in the epoch that validates best, by seed; 0 ranks train the full graph on one device."""
    found = []
    for seed in range(seeds):
        L.seed_everything(seed, verbose=False)
        columns, classes = SIZES[graph]
        module = NodeClassifier(make_model(columns, 64, classes, layers=2, dropout=0.2), lr=0.01, weight_decay=0.0)
        data = GraphDataModule("sampling_epochs.load", {"name": graph}, split=(0.6, 0.2, 0.2), seed=0)
        best = L.pytorch.callbacks.ModelCheckpoint(monitor="val_acc", mode="max", save_weights_only=True)
        strategy: Any = DGCLStrategy(self_check=False)
        if ranks:
            strategy = SamplingStrategy([10, 10], 1024 // ranks, seed=seed, self_check=False, **options)
        with tempfile.TemporaryDirectory() as folder:
            trainer = L.Trainer(
                strategy=strategy,
                devices=max(1, ranks),
                max_epochs=epochs if ranks else 10 * epochs,
                default_root_dir=folder,
                callbacks=[best],
                num_sanity_val_steps=0,
                check_val_every_n_epoch=1 if ranks else 5,
                **{**QUIET, "enable_checkpointing": True},
            )
            trainer.fit(module, datamodule=data)
            [tested] = trainer.test(datamodule=data, ckpt_path="best", verbose=False, weights_only=False)
        found.append(tested["test_acc"])
    return {"accuracies": found} if trainer.is_global_zero else None


# Tables #######################################################################


def asked(what: str, **arguments: Any) -> dict[str, Any]:
    """Runs one row in a process of its own."""
    began = time.perf_counter()
    row = run_row(str(Path(__file__)), ["--cell", json.dumps([what, arguments])], threads=1)
    load_1, _, _ = os.getloadavg()
    print(f"{what} {arguments}: {time.perf_counter() - began:.0f} s, load {load_1:.0f}", file=sys.stderr, flush=True)
    return {**row, "load": load_1}


def epochs_table(options: argparse.Namespace) -> None:
    graph = (options.graphs or [f"planted-{1_000_000 if options.large else 200_000}"])[0]
    library = "pyg-lib" if pyg.WITH_PYG_LIB else "torch-sparse" if pyg.WITH_TORCH_SPARSE else "our sampler"
    rows = []
    sizes = {"graph": graph, "batches": options.batches, "hidden": options.hidden}
    for ranks in options.ranks:
        theirs = f"PyG, {library}" + (", DDP" if ranks > 1 else "")
        plan = [(theirs, "pyg", {}), ("sampling", "ours", {}), ("sampling, prefetch=0", "ours", {"prefetch_batches": 0})]
        against = None
        for name, what, choices in plan:
            found = asked(what, ranks=ranks, **sizes, **choices)
            seconds = median(found["seconds"][1:])
            against = against or seconds
            logged = found.get("logged", [{}])[-1]
            row = {"system": name, "ranks": ranks, "s/batch": seconds, "batches/s": ranks / seconds}
            # Of rank 0, all threads; the first batch loads and compiles. What others do to the machine shows less in it.
            row["CPU s/batch"] = (found["cpu"][-1] - found["cpu"][1]) / (len(found["cpu"]) - 2)
            row["s/epoch"] = seconds * found["steps"]
            row["times PyG's"] = against / seconds
            row["making s"], row["waited s"] = logged.get("sampling/seconds"), logged.get("sampling/wait_s")
            rows.append({**row, "load": found["load"], **found})
            print(row, file=sys.stderr, flush=True)
    title = (
        f"3-layer SAGE {options.hidden}, {FANOUTS}, {BATCH_SIZE} seeds a rank, {graph}; batches/s of all ranks together"
    )
    columns = [
        "system",
        "ranks",
        "s/batch",
        "CPU s/batch",
        "batches/s",
        "s/epoch",
        "times PyG's",
        "making s",
        "waited s",
        "load",
    ]
    report(title, rows, columns, options.json)


def hosts_table(options: argparse.Namespace) -> None:
    rows = []
    cells: list[dict[str, Any]] = [
        {"partition": "random"},
        {"partition": "metis"},
        {},
        {"remote_cache": 0},
        {"prefetch_batches": 0},
    ]
    for cell in cells:
        asked = {
            "ranks": 4,
            "graph": "planted-200000",
            "batches": options.batches or 5,
            "hidden": options.hidden,
            **cell,
        }
        found = run_on_hosts(options.netlab, options.inner_mbit, __file__, ["--cell", json.dumps(["ours", asked])])
        logged = found["logged"][-1]
        row = {"partition": "metis_masks", "cache MB": 64.0, "prefetch_batches": 2, **cell}
        row["cache MB"] = row.pop("remote_cache", row["cache MB"])
        row |= {"s/batch": median(found["seconds"][1:]), "load": os.getloadavg()[0]}
        row["MB/batch"] = logged["sampling/remote_bytes"] / asked["batches"] / 1e6
        row["hits"] = logged.get("sampling/cache_hit_rate")
        row["making s"], row["waited s"] = logged["sampling/seconds"], logged["sampling/wait_s"]
        rows.append({**row, **found})
        print(row, file=sys.stderr, flush=True)
    title = (
        f"3-layer SAGE {options.hidden}, {FANOUTS}, {BATCH_SIZE} seeds a rank, 200 k nodes, on two emulated hosts of two ranks; "
        f"a host's link {options.inner_mbit / 2.7:.0f} Mbit/s"
    )
    columns = ["partition", "cache MB", "prefetch", "s/batch", "MB/batch", "hits", "making s", "waited s", "load"]
    report(title, rows, columns, options.json)


def ablation_table(options: argparse.Namespace) -> None:
    rows, ranks = [], options.ranks[-1]
    for graph in options.graphs or ["planted-200000", "twitter"]:
        data = prepare_graph(load(graph), None, None, 0, 0)
        masks = {name: data[name].numpy() for name in MASKS}
        for method in ("random", "metis", "metis_masks"):
            began = time.process_time()
            nodes = assign_nodes(data.edge_index.numpy(), data.x.size(0), ranks, method, masks=masks)
            seconds = time.process_time() - began
            cut = cut_graph(data, nodes.part, ranks)
            split = SplitSeeds.of(cut, ONE_TYPE[0], "train_mask")
            seeds = [split.seeds(rank) for rank in range(ranks)]
            home = sum(np.histogram(each, cut.offsets)[0][rank] for rank, each in enumerate(seeds))
            own = nodes.report.masks["train_mask"]
            row = {"graph": graph, "partition": method, "CPU s": seconds, "balance": nodes.balance}
            row |= {"cut": nodes.report.cut_fraction, "edge balance": nodes.report.edge_balance}
            row |= {"train balance": float(own.max() / own.mean()), "seeds away": float(1 - home / sum(split.sizes))}
            for megabytes in (0.0, 4.0, 16.0):
                received, row[f"hits, {megabytes:g} MB"] = epoch_bytes(
                    cut, seeds, int(megabytes * 1e6), options.batches or None
                )
                row[f"MB, {megabytes:g} MB"] = received / 1e6
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    title = f"{ranks} ranks, each on a machine of its own; {FANOUTS}; received for {BATCH_SIZE} seeds of each, by cache"
    report(title, rows, [name for name in rows[0] if name != "balance"], options.json)


def caches_table(options: argparse.Namespace) -> None:
    rows, shares = [], (0.05, 0.1, 0.25)
    for graph in options.graphs or ["computers", "twitter", "cnr-2000"]:
        data = load(graph)
        data.x = data.x[:, :1].contiguous()
        data = prepare_graph(data, None, None if "train_mask" in data else (0.6, 0.2, 0.2), 0, 0)
        masks = {name: data[name].numpy() for name in MASKS}
        edges, nodes = data.edge_index.numpy(), data.x.size(0)
        part = assign_nodes(edges, nodes, 4, "metis_masks", masks=masks, groups=by_machine(4, 2)).part
        cut = cut_graph(data, part, 4)
        away = [nodes - int(cut.offsets[low + 2] - cut.offsets[low]) for low in (0, 0, 2, 2)]
        for labor in (False, True):
            none = far_draws(cut, options.batch_size, [0] * 4, labor)[1].sum(1).tolist()
            for share in shares:
                sizes = [int(share * each) for each in away]
                far, missed, steps, mean_nodes = far_draws(cut, options.batch_size, sizes, labor)
                asked = sum(len(each) for of_rank in far for each in of_rank[steps:])
                first, second = missed.sum(1).tolist()
                best = sum(belady(of, size, steps, nodes) for of, size in zip(far, sizes))
                # The first epoch's cache, of the rows that most edges read, in an epoch of as many draws.
                row = {"graph": graph, "method": "labor" if labor else "neighbor", "batches": steps}
                row |= {"nodes a batch": mean_nodes, "cache, % of far rows": 100 * share, "far rows, no cache": asked}
                row |= {"by edges, %": 100 * first / none[0], "by draws, %": 100 * second / asked}
                row |= {"Belady, %": 100 * best / asked, "draws of edges": second / asked * none[0] / first}
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    title = f"Feature rows that four ranks on two machines receive in an epoch; {FANOUTS}, {options.batch_size} seeds"
    report(title, rows, [*rows[0]], options.json)


def accuracy_table(options: argparse.Namespace) -> None:
    rows = []
    for graph in options.graphs or ["computers", "github", "cornell5"]:
        for ranks in [0, *options.ranks]:
            sizes = {"graph": graph, "ranks": ranks, "seeds": options.seeds, "epochs": options.epochs}
            found = asked("accuracy", **sizes, method=options.method)["accuracies"]
            rows.append(
                {
                    "graph": graph,
                    "trained": f"sampling, {ranks} rank(s)" if ranks else "full graph, one device",
                    "test accuracy, %": 100 * mean(found),
                    "+-": 100 * stdev(found) if len(found) > 1 else None,
                    "accuracies": found,
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    title = f"2-layer SAGE 64, fan-outs 10, 10, 1,024 seeds a step on all ranks; {options.seeds} seeds"
    report(title, rows, ["graph", "trained", "test accuracy, %", "+-"], options.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ablation", action="store_true", help="partitions and cache, on a community and a skewed graph"
    )
    parser.add_argument("--accuracy", action="store_true", help="of sampling against the full graph")
    parser.add_argument("--caches", action="store_true", help="which rows are cached, and nodes that LABOR spares")
    parser.add_argument("--batch-size", type=int, default=256, help="of --caches")
    parser.add_argument("--method", default="neighbor", help="of sampling, for --accuracy")
    parser.add_argument("--large", action="store_true", help="1 M nodes and 20 M edges instead of 200 k and 4 M")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--batches", type=int, default=0, help="of an epoch that are measured; 0 for all")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--graphs", nargs="*")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--epochs", type=int, default=20, help="of sampling, for accuracy; ten times as many on the full graph"
    )
    parser.add_argument("--json")
    parser.add_argument("--netlab", help="netlab.py: train on emulated hosts")
    parser.add_argument("--inner-mbit", type=float, default=2700.0, help="of a link inside an emulated host")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        what, arguments = json.loads(options.cell)
        row = {"pyg": pyg_row, "ours": our_row, "accuracy": accuracy_row}[what](**arguments)
        if row is not None:
            print(json.dumps(row))
            if options.row:
                Path(options.row).write_text(json.dumps(row))
        return
    tables = {"caches": caches_table, "netlab": hosts_table, "ablation": ablation_table, "accuracy": accuracy_table}
    next((table for name, table in tables.items() if getattr(options, name)), epochs_table)(options)


if __name__ == "__main__":
    main()
