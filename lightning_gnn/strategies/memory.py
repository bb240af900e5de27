"""Whether training will fit into memory, said before it starts, with what would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_gnn.checks.footprint import PHASES, Peak, Predicted, Sizes
from lightning_gnn.datamodules.shards import Shard

if TYPE_CHECKING:
    from lightning_gnn.strategies.base import GNNStrategy

_TIMES_RANKS = (2, 4, 8, 16, 32, 64)


def warn_of_memory(
    strategy: GNNStrategy,
    module: pl.LightningModule,
    trainer: pl.Trainer,
    shard: Shard,
    sizes: Sequence[Sizes],
    available: int,
    working_bytes: int = 0,
) -> None:
    """Warns if ranks that share memory will need more than there is; names what would fit.

    Args:
        strategy: as it will train.
        module, trainer: of the run.
        shard: of one of the ranks, on the CPU.
        sizes: of the ranks that share the memory.
        available: bytes of it.
        working_bytes: that each rank needs beside, see :meth:`~lightning_gnn.strategies.base.Scheme.working_bytes`.
    """
    try:
        steps = Predicted(module, shard.batch, trainer, getattr(strategy.scheme, "keep_constant", True))
    except RuntimeError as error:
        rank_zero_info(f"How much memory training takes is not predicted: {error}")
        return
    on_device = strategy.root_device.type != "cpu"

    def peaks(recompute: bool, offload: bool, times: int = 1) -> list[Peak]:
        parts = (steps.footprint(each.among(times), working_bytes) for each in sizes)
        return [part.peak(recompute, offload and on_device) for part in parts]

    def needed(recompute: bool, offload: bool, times: int = 1) -> int:
        return sum(each.most for each in peaks(recompute, offload, times))

    total = needed(strategy.recompute, strategy.offload)
    if total <= available:
        return
    largest = max(peaks(strategy.recompute, strategy.offload), key=lambda peak: peak.most)
    phase = max(PHASES, key=lambda name: getattr(largest, name))
    who = f"The {len(sizes)} ranks on this machine are" if len(sizes) > 1 else "A rank is"
    of_one = f", {_gb(largest.most)} of them on one," if len(sizes) > 1 else ""
    less = "; ".join(_ways(strategy, needed, available))
    rank_zero_warn(
        f"{who} predicted to need {_gb(total)}{of_one} ({_PHASE_NAMES[phase]}), but {_gb(available)} are available. Training may "
        f"become very slow, or be ended. What takes less: {less}. docs/memory.md has more."
    )


_PHASE_NAMES = {
    "setup": "before the first step",
    "forward": "in the forward",
    "backward": "in the backward",
    "evaluation": "in evaluation",
}


def _ways(strategy: GNNStrategy, needed: Callable[..., int], available: int) -> Iterator[str]:
    """Yields what would fit, and what takes less in any case."""
    name, on_device = type(strategy).__name__, strategy.root_device.type != "cpu"
    now = needed(strategy.recompute, strategy.offload)
    for recompute, offload in ((True, False), *([(False, True), (True, True)] if on_device else [])):
        recompute, offload = recompute or strategy.recompute, offload or strategy.offload
        least = needed(recompute, offload)
        if least < now and least <= available:
            set_to = ", ".join(
                f"{option}=True" for option, on in (("recompute", recompute), ("offload", offload)) if on
            )
            yield f"{name}({set_to}), about {_gb(least)}"
            break
    replication = getattr(strategy.scheme, "replication", None)
    if replication is not None and replication > 1:
        yield f"a smaller replication than {replication}"
    for times in _TIMES_RANKS:
        # As many halo rows for each as now, which is more than there will be.
        least = needed(strategy.recompute, strategy.offload, times)
        if least <= available:
            more = (
                f"devices={times * strategy.num_processes}" if on_device else f"num_nodes={times * strategy.num_nodes}"
            )
            yield f"{more}, at most {_gb(least)} on {'a device' if on_device else 'a machine'}"
            break
    yield 'strategy="sampling", which trains on batches'


def _gb(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def free_bytes(device: torch.device) -> int:
    """Returns how much memory a CUDA device can still give."""
    return int(torch.cuda.mem_get_info(device)[0])
