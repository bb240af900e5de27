"""Checks before a run whether it fits into memory, with suggestions that would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_gnn import devices
from lightning_gnn.checks.footprint import PHASES, Peak, Predicted, Sizes, least_bytes, memory_of
from lightning_gnn.comm.group import World
from lightning_gnn.data.shards import Cut, Shard
from lightning_gnn.data.sources import counted_mask
from lightning_gnn.nn.learned_rows import learned_rows
from lightning_gnn.partition.layout import Counts
from lightning_gnn.strategy.graph_kinds import make_small_graph, supports_checkpoints
from lightning_gnn.strategy.memory import PLENTY, memory_advice
from lightning_gnn.strategy.scheme import Run, Scheme

_TIMES_RANKS = (2, 4, 8, 16, 32, 64)


def check_memory(run: Run, cut: Cut) -> None:
    """Raises an error if graph and weights exceed this machine's memory; warns if training is predicted to exceed it.

    Called in the process that starts CPU ranks. Ranks on other devices check their own device.
    """
    available = devices.available_bytes()
    if run.device.type != "cpu" or available is None:
        return
    replicas, module, here = run.layout.replicas, run.module, [rank % run.layout.parts for rank in run.here]
    every, row_bytes = Sizes.from_cut(cut, module, replicas, reads_holders=False), feature_bytes(cut)
    sizes = [every[part] for part in here]
    working = working_bytes(run.scheme, cut, row_bytes)
    needed = sum(least_bytes(each.rows, each.halo_rows, each.edges, row_bytes, module) + working for each in sizes)
    in_addition = sample_bytes(run, cut) + sum(np.array(each.row_bytes(cut)) for each in learned_rows(module, cut))
    needed += int(sum(np.sum(each.rows * in_addition) for each in sizes))
    if needed > available:
        parts = "their parts of the graph"
        if replicas is not None:
            parts += f", including all nodes within {replicas.hops} hops,"
        raise ValueError(
            f"The {len(run.here)} ranks on this machine need at least {needed / 1e9:.3g} GB for {parts} and their weights, "
            f"without activations, but {available / 1e9:.3g} GB are available. {memory_advice(run.scheme).less(run.world_size)}"
        )
    if run.keeps_activations and available < PLENTY * needed:
        predicted = Sizes.from_cut(cut, module, replicas)
        warn_of_memory(run, cut.shard(here[0]), [predicted[part] for part in here], available, working)


def check_own_memory(run: Run, world: World, shard: Shard) -> None:
    """Warns if the predicted memory of a rank exceeds its device."""
    on_cpu = run.device.type == "cpu"
    own = Sizes.of(shard, shard.mask_counts[counted_mask("train_mask", run.module)][shard.rank])
    free = devices.available_bytes() if on_cpu else devices.free_bytes(run.device)
    here = sum(memory_of(shard.batch).values())  # bytes of the graph, which is not on a device yet
    least = here + np.sum(own.rows * sample_bytes(run, shard))
    found = [(free + here * on_cpu, own)] if free is not None and free < PLENTY * least else []
    found = [pair for of_rank in world.all_gather_object(found) for pair in of_rank]
    if found and world.rank == 0:  # the largest rank, on the device with the least free memory
        least, _ = min(found, key=lambda pair: pair[0])
        warn_of_memory(run, shard, [max((sizes for _, sizes in found), key=lambda sizes: np.hstack(sizes).sum())], least)


def feature_bytes(cut: Cut) -> Counts:
    """Returns the bytes of ``x`` of a node, by node type."""
    stores = [cut.attributes[cut.types.key(name)] for name in cut.types.nodes]
    return np.array([store["x"][:1].nbytes if "x" in store else 0 for store in stores])


def sample_bytes(run: Run, of: Shard | Cut) -> Counts:
    """Returns the bytes of a node in the training samples of a rank's batch, by node type."""
    is_known = run.samples is not None and run.keeps_activations
    return np.array(run.samples.row_bytes(of) if is_known else [0] * len(of.types.nodes))


def working_bytes(scheme: Scheme, cut: Cut, row_bytes: Counts) -> int:
    """Returns the minimal memory of a rank in addition to its part of the graph, given the bytes of a node by node type."""
    working = memory_advice(scheme).working_bytes
    return max(working(counts.tolist(), size) for counts, size in zip(cut.types.nodes.values(), row_bytes.tolist()))


def predicted_steps(run: Run, shard: Shard) -> Predicted:
    """Returns the memory of training steps; raises as :class:`~lightning_gnn.checks.footprint.Predicted` does."""
    make, advice = make_small_graph(shard, run.samples, whole_batch=True), memory_advice(run.scheme)
    return advice.steps(run.module, shard.batch, run.trainer, run.device, run.cache_input_aggregation, make=make)


def warn_of_memory(run: Run, shard: Shard, sizes: Sequence[Sizes], available: int, working_bytes: int = 0) -> None:
    """Warns if ranks that share memory are predicted to need more than is available, and suggests changes that would fit.

    Args:
        run: the call of the Trainer.
        shard: shard of one of the ranks, on the CPU.
        sizes: sizes of the ranks that share the memory.
        available: available bytes.
        working_bytes: bytes that each rank needs in addition.
    """
    try:
        steps = predicted_steps(run, shard)
    except RuntimeError as error:
        rank_zero_info(f"Skipped the memory prediction for training: {error}")
        return

    def peaks(recompute: bool, times: int = 1) -> list[Peak]:
        return [steps.footprint(each.among(times), working_bytes).peak(recompute) for each in sizes]

    def sum_peaks(recompute: bool, times: int = 1) -> int:
        return sum(each.max_bytes for each in peaks(recompute, times))

    total = sum_peaks(run.checkpoint_convs)
    if total <= available:
        return
    largest = max(peaks(run.checkpoint_convs), key=lambda peak: peak.max_bytes)
    phase = max(PHASES, key=lambda name: getattr(largest, name))
    when = {"setup": "before the first step", "evaluation": "in evaluation"}.get(phase, f"in the {phase}")
    who = f"The {len(sizes)} ranks on this machine are" if len(sizes) > 1 else "A rank is"
    of_one = f", at most {in_gb(largest.max_bytes)} on one rank" if len(sizes) > 1 else ""
    less = "; ".join(_ways(run, sum_peaks, available, supports_checkpoints(shard)))
    rank_zero_warn(
        f"{who} predicted to need {in_gb(total)}{of_one} ({when}), but {in_gb(available)} are available. Training may "
        f"become very slow, or the system may end it. To use less memory: {less}. See docs/memory.md."
    )


def _ways(run: Run, sum_peaks: Callable[..., int], available: int, checkpoints: bool) -> Iterator[str]:
    """Yields suggestions that would fit, and suggestions that reduce memory in any case."""
    if checkpoints and (least := sum_peaks(True)) <= available:
        yield f"{run.strategy}(checkpoint_convs=True), about {in_gb(least)}"
    replication = getattr(run.scheme, "replication_factor", None)
    if replication is not None and replication > 1:
        yield f"replication_factor below {replication}"
    for times in _TIMES_RANKS if run.samples is None else ():
        # Assumes the current number of halo nodes for each rank, an upper bound.
        least = sum_peaks(run.checkpoint_convs, times)
        if least <= available:
            more, each = f"num_nodes={times * run.machines}", "a machine"
            if run.device.type != "cpu":
                more, each = f"devices={times * len(run.here)}", "a device"
            yield f"{more}, at most {in_gb(least)} on {each}"
            break
    by_batches = 'strategy="sampling", which trains on batches'
    yield by_batches if run.samples is None else run.samples.ways_to_fit


def in_gb(count: float) -> str:
    """Returns a number of bytes in GB or MB."""
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
