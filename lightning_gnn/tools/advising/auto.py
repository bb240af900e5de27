"""``auto_gnn``: the exact full-graph scheme with the best prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.strategies.dgcl.strategy import DGCLScheme
from lightning_gnn.strategy.base import GNNStrategy
from lightning_gnn.tools.advising.advice import Advice, Candidate, advise_on, candidates
from lightning_gnn.tools.advising.machine import Machine, available_cores


class AutoStrategy(GNNStrategy):
    """Exact full-graph training under the scheme with the best prediction; ``Trainer(strategy="auto_gnn")``.

    Before the first ``fit`` (or other call), rank 0 simulates a few training steps of each scheme and predicts epoch times, as
    ``lightning-gnn advise`` does. All ranks use the best scheme. For CPU ranks.

    Args:
        topology: links between the ranks, where rank i is device i: a name, the path of a JSON file, or a topology
            (docs/planning.md). Default: CPU ranks of this machine, or of the Trainer's ``num_nodes`` machines like it.
        **options: see :class:`~lightning_gnn.strategy.base.GNNStrategy`.

    Attributes:
        advice: predictions, in the order of :func:`~lightning_gnn.tools.advising.advice.advise`, on rank 0; initially empty.

    Raises:
        ValueError: if devices are not CPUs, or the topology does not exist.
        RuntimeError: if the model could not be simulated under any scheme.
    """

    strategy_name = "auto_gnn"
    samples_unsupported_reason = 'it predicts full-graph steps. Use DGCLStrategy(graph_ranks="auto").'

    @classmethod
    @override
    def variants(cls, ranks: int, links_alike: bool = True) -> Iterable[Mapping[str, Any]]:
        return []  # it selects one of the other strategies

    def __init__(self, topology: str | Topology | None = None, **options: Any) -> None:
        super().__init__(DGCLScheme(), **options)
        self.topology = topology
        self.advice: list[Advice] = []
        self._candidate: Candidate | None = None

    @override
    def setup_environment(self) -> None:
        if self.root_device.type != "cpu":
            raise ValueError(
                f"auto_gnn does not support {self.root_device.type}: it measures steps on the CPU. Set a strategy, such as "
                'strategy="dgcl". To predict times on faster devices, run lightning-gnn advise --speed SPEED.'
            )
        super().setup_environment()
        if self._candidate is None and self.world_size > 1:
            candidate = self.world.broadcast_object(self._choose() if self.global_rank == 0 else "")
            if isinstance(candidate, str):
                raise RuntimeError(candidate)
            self._candidate = candidate
            self.scheme = candidate.strategy().scheme

    def _choose(self) -> Candidate | str:
        module, ranks, hosts = self.lightning_module, self.world_size, self.num_nodes
        assert module is not None
        machine = Machine.of(ranks, hosts, self.topology, available_cores())
        exact = [each for each in candidates(ranks) if each.exact]
        data = self.check_data(getattr(module.trainer, "datamodule", None))
        self.advice = advise_on(machine, module, data, module.trainer, exact, overhead=0.0)  # the same for all
        first, *others = self.advice
        if not first.applies:
            return f"auto_gnn could not rehearse the model under any scheme. {first.candidate}: {first.reason}"
        rest = ", ".join(f"{each.candidate} {1e3 * each.seconds:.3g}" for each in others if each.applies)
        rank_zero_info(f"auto_gnn chose {first.candidate}: {1e3 * first.seconds:.3g} ms an epoch predicted; {first.why} ({rest})")
        return first.candidate
