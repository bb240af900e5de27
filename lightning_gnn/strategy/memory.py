"""Whether a run will fit into memory, said before it starts, with what would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch_geometric.data import Data

from lightning_gnn.checks.footprint import PHASES, Peak, Predicted, Sizes, memory_of
from lightning_gnn.checks.memory import least_bytes
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.data.shards import Shard
from lightning_gnn.data.sources import counted_mask
from lightning_gnn.datamodules.graph import GraphDataModule
from lightning_gnn.devices import available_bytes, free_bytes
from lightning_gnn.nn.learned_rows import learned_rows
from lightning_gnn.strategy.scheme import Scheme, bind_module, twin_of

if TYPE_CHECKING:
    from lightning_gnn.strategy.steps import StepStrategy


@dataclass(frozen=True)
class MemoryAdvice:
    """What is known of the memory that ranks need under a scheme.

    Attributes:
        rehearsed: the scheme whose steps on two ranks tell what each rank keeps.
        working_bytes: given the owned rows of each rank, and the bytes of a node's features, returns what a rank needs beside
            its part of the graph, at the least.
        less: given the number of ranks, says how a run takes less memory.
    """

    rehearsed: Scheme
    working_bytes: Callable[[Sequence[int], int], int] = lambda counts, row_bytes: 0
    less: Callable[[int], str] = lambda ranks: "Use more machines (num_nodes), fewer columns, or float16 features."

    def steps(
        self,
        module: pl.LightningModule,
        batch: Data,
        trainer: pl.Trainer | None = None,
        device: torch.device | None = None,
        keep_constant: bool = True,
    ) -> Predicted:
        """Returns what training steps keep; arguments as of :class:`~lightning_gnn.checks.footprint.Predicted`."""
        bind = partial(bind_module, self.rehearsed, meter=Meter(), keep_constant=keep_constant)
        return Predicted(module, batch, bind, self.rehearsed.layout(2), trainer, device)


@singledispatch
def memory_advice(scheme: Scheme) -> MemoryAdvice:
    """Returns what is known of the memory of a scheme; ``@memory_advice.register`` adds a function for a class of schemes."""
    return MemoryAdvice(twin_of(scheme))


_TIMES_RANKS = (2, 4, 8, 16, 32, 64)

_PLENTY = 1000
"""Times what ranks hold at the least: more than layers ever keep, so nothing is predicted where so much is available."""


def check_memory(strategy: StepStrategy, data: GraphDataModule, module: pl.LightningModule, trainer: pl.Trainer) -> None:
    """Refuses a run whose graph and weights do not fit into this machine's memory, and warns if training will not.

    In the process that starts the ranks, which are CPU ranks; others look at their devices themselves.
    """
    available = available_bytes()
    if strategy.root_device.type != "cpu" or available is None:
        return
    cut, replicas = data.stored_cut(), strategy.layout().replicas
    first = strategy.node_rank * strategy.num_processes
    row_bytes = cut.attributes["node"]["x"][:1].nbytes
    sizes = cut.sizes(replicas)[first : first + strategy.num_processes]
    advice = memory_advice(strategy.scheme)
    working = advice.working_bytes(np.diff(cut.offsets).tolist(), row_bytes)
    needed = sum(least_bytes(*size, row_bytes, module) + working for size in sizes)
    rows = sum(owned for owned, _, _ in sizes)
    needed += rows * sum(each.row_bytes for each in learned_rows(module, cut))
    if needed > available:
        parts = "their parts of the graph"
        if replicas is not None:
            parts += f" with all that lies within {replicas.hops} hops"
        raise ValueError(
            f"The {strategy.num_processes} ranks on this machine need at least {needed / 1e9:.3g} GB for {parts} and their "
            f"weights, without activations, but {available / 1e9:.3g} GB are available. "
            f"{advice.less(strategy.world_size)}"
        )
    worth_a_look = trainer.state.fn == TrainerFn.FITTING and not strategy.trains_on_batches
    if worth_a_look and available < _PLENTY * needed:
        of_ranks = Sizes.of_ranks(cut, module, replicas)[first : first + strategy.num_processes]
        warn_of_memory(strategy, module, trainer, cut.shard(first), of_ranks, available, working)


def check_own_memory(strategy: StepStrategy, trainer: pl.Trainer, shard: Shard) -> None:
    """Warns if what a rank needs does not fit onto its device; several CPU ranks were looked at before they were started."""
    on_cpu = strategy.root_device.type == "cpu"
    if strategy.trains_on_batches or (on_cpu and strategy.world_size > 1) or trainer.state.fn != TrainerFn.FITTING:
        return
    module = strategy._module
    own = Sizes.of(shard, shard.mask_counts[counted_mask("train_mask", module)][strategy.global_rank])
    free = available_bytes() if on_cpu else free_bytes(strategy.root_device)
    here = sum(memory_of(shard.batch).values())  # of the graph; on a device it is not there yet
    found = [(free + here * on_cpu, own)] if free is not None and free < _PLENTY * here else []
    found = [each for of_rank in strategy.world.all_gather_object(found) for each in of_rank]
    if found and strategy.global_rank == 0:  # the rank that holds most, on the device that has least
        least, _ = min(found, key=lambda each: each[0])
        warn_of_memory(strategy, module, trainer, shard, [max((sizes for _, sizes in found), key=sum)], least)


def warn_of_memory(
    strategy: StepStrategy,
    module: pl.LightningModule,
    trainer: pl.Trainer,
    shard: Shard,
    sizes: Sequence[Sizes],
    available: int,
    working_bytes: int = 0,
) -> None:
    """Warns if ranks that share memory will need more than there is; names what would fit.

    Args:
        shard: of one of the ranks, on the CPU.
        sizes: of the ranks that share the memory.
        available: bytes of it.
        working_bytes: that each rank needs beside.
    """
    try:
        advice = memory_advice(strategy.scheme)
        steps = advice.steps(module, shard.batch, trainer, strategy.root_device, strategy.keep_constant)
    except RuntimeError as error:
        rank_zero_info(f"How much memory training takes is not predicted: {error}")
        return

    def peaks(recompute: bool, times: int = 1) -> list[Peak]:
        return [steps.footprint(each.among(times), working_bytes).peak(recompute) for each in sizes]

    def needed(recompute: bool, times: int = 1) -> int:
        return sum(each.most for each in peaks(recompute, times))

    total = needed(strategy.recompute)
    if total <= available:
        return
    largest = max(peaks(strategy.recompute), key=lambda peak: peak.most)
    phase = max(PHASES, key=lambda name: getattr(largest, name))
    when = {"setup": "before the first step", "evaluation": "in evaluation"}.get(phase, f"in the {phase}")
    who = f"The {len(sizes)} ranks on this machine are" if len(sizes) > 1 else "A rank is"
    of_one = f", {_gb(largest.most)} of them on one," if len(sizes) > 1 else ""
    less = "; ".join(_ways(strategy, needed, available))
    rank_zero_warn(
        f"{who} predicted to need {_gb(total)}{of_one} ({when}), but {_gb(available)} are available. Training may "
        f"become very slow, or be ended. What takes less: {less}. docs/memory.md has more."
    )


def _ways(strategy: StepStrategy, needed: Callable[..., int], available: int) -> Iterator[str]:
    """Yields what would fit, and what takes less in any case."""
    least = needed(True)
    if least <= available:
        yield f"{type(strategy).__name__}(recompute=True), about {_gb(least)}"
    replication = getattr(strategy.scheme, "replication", None)
    if replication is not None and replication > 1:
        yield f"a smaller replication than {replication}"
    for times in _TIMES_RANKS:
        # As many halo rows for each as now, which is more than there will be.
        least = needed(strategy.recompute, times)
        if least <= available:
            more, each = f"num_nodes={times * strategy.num_nodes}", "a machine"
            if strategy.root_device.type != "cpu":
                more, each = f"devices={times * strategy.num_processes}", "a device"
            yield f"{more}, at most {_gb(least)} on {each}"
            break
    yield 'strategy="sampling", which trains on batches'


def _gb(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
