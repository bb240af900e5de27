"""``gossip`` and ``cluster_allreduce``: workers train on clusters of the graph; averages in pairs, or of all workers at once.

Source: Zhang, "Efficient Asynchronous GCN Training on a GPU Cluster" (2021), Algorithms 3 to 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from typing_extensions import override

from lightning_gnn.arguments import check_numbers, check_whole
from lightning_gnn.strategies.gossip.cluster_strategy import Average, ClusterStrategy
from lightning_gnn.strategies.gossip.lockstep import Lockstep
from lightning_gnn.strategies.gossip.pairing import Pairing, Rule
from lightning_gnn.strategies.gossip.pool import Pool
from lightning_gnn.strategies.gossip.push_sum import PushSum
from lightning_gnn.strategies.gossip.worker import Peers, Worker

GossipAverage = Literal["gradients", "parameters", "push_sum"]


class GossipStrategy(ClusterStrategy):
    """Asynchronous training on clusters with averages in pairs; ``Trainer(strategy="gossip")``.

    Each free worker takes the next batch of a common pool and steps with a separate optimizer. After every
    `average_every_n_batches` batches, it averages with one other worker, if one is available. Nothing in `fit` waits for all
    workers. A slow worker delays only a partner, for a bounded time. If a worker dies, the others take over its batches. An epoch
    is one pass over the pool by all workers together.

    During `fit`, each worker validates its own weights on the clusters, without edges between them: approximately. Afterwards all
    workers have the same result, and ``trainer.validate``, ``test`` and ``predict`` are exact, with the exchange of ``dgcl``.

    Args:
        average_every_n_batches: number of batches between two averages of a worker. Increase it if averages cost more than they
            gain.
        pairing: choice of partners.

            - ``"prompt"``: any available worker. The chosen worker checks after each batch whether it was chosen, so a worker
              waits at most for one batch of its partner.
            - ``"any"``: any available worker, which checks after `average_every_n_batches` batches only (Algorithm 6).
            - ``"active_passive"``: workers of even rank choose workers of odd rank, which check after each batch (Algorithm 5).
        average: averaged values.

            - ``"parameters"``: parameters before the step, as in AD-PSGD; keeps workers closer together.
            - ``"gradients"``: gradients before the step, as in the thesis.
            - ``"push_sum"``: parameters, without pairs (Stochastic Gradient Push). A worker sends half of its mass to any other
              worker, adds received mass after each batch, and never waits. `pairing` and `partner_timeout` do not apply.
        partner_timeout: seconds that a worker waits for a partner before it continues alone.
        heartbeat_timeout: seconds without a heartbeat after which a worker counts as dead, and others take over its batches.
        max_restarts: number of restarts during `fit` of each worker whose process was killed, except rank 0; only for ranks
            started by this package. A restarted worker continues with the weights and optimizer of another worker.
        codec: codec for parameters, approximate. Workers send encoded differences to what both partners have of each other; the
            mean of the two stays exact (docs/gossip.md). Set it for slow networks.
        **options: see :class:`~lightning_gnn.strategies.gossip.cluster_strategy.ClusterStrategy`.

    Attributes:
        report, consensus, result: see :class:`~lightning_gnn.strategies.gossip.cluster_strategy.ClusterStrategy`.

    Raises:
        ValueError: an invalid argument, or a number that is too small.
    """

    strategy_name = "gossip"
    others_go_on = True
    averages = get_args(GossipAverage)

    @classmethod
    @override
    def variants(cls, ranks: int, links_alike: bool = True) -> Iterator[Mapping[str, Any]]:
        return iter(())  # as fast as cluster_allreduce if all workers are equally fast

    def __init__(
        self,
        average_every_n_batches: int = 20,
        pairing: Rule = "prompt",
        average: GossipAverage = "parameters",
        partner_timeout: float = 60.0,
        heartbeat_timeout: float = 10.0,
        max_restarts: int = 0,
        codec: str | None = None,
        **options: Any,
    ) -> None:
        check_numbers(partner_timeout=partner_timeout, heartbeat_timeout=heartbeat_timeout)
        check_whole(0, max_restarts=max_restarts)
        if max_restarts and options.get("historical_embeddings"):
            raise ValueError("max_restarts is not supported with historical_embeddings=True. Remove one of them.")
        Pairing(0, 1, pairing)
        if average == "push_sum" and pairing != "prompt":
            raise ValueError(f"pairing={pairing!r} is not supported with average='push_sum', which has no pairs. Remove pairing.")
        for name, seconds, least in (("partner_timeout", partner_timeout, 0.0), ("heartbeat_timeout", heartbeat_timeout, 2.0)):
            if seconds < least:
                raise ValueError(f"{name} must be at least {least:g} seconds, got {seconds}.")
        if codec is not None and average != "parameters":
            raise ValueError(
                f"codec={codec!r} is not supported with average={average!r}: it encodes differences of the parameters of two "
                'workers. Remove it, or use average="parameters".'
            )
        super().__init__(average_every_n_batches, average, heartbeat_timeout, codec=codec, **options)
        self.pairing, self.partner_timeout, self.max_restarts = pairing, partner_timeout, max_restarts

    @override
    def _make_worker(self, pool: Pool, peers: Peers | None) -> Worker:
        pairing = Pairing(self.global_rank, self.world_size, self.pairing)
        kind = PushSum if self.average == "push_sum" else Worker
        return kind(pool, pairing, self.average_every_n_batches, peers, self.partner_timeout, self.seed)


class ClusterAllReduceStrategy(ClusterStrategy):
    """Synchronous training on clusters; ``Trainer(strategy="cluster_allreduce")``. On one device, plain Cluster-GCN.

    Each worker has an equal share of the clusters, and steps with a separate optimizer after each batch. Every
    `average_every_n_batches` batches, all workers average at once (Algorithms 3 and 4). A worker that fails ends the run.
    Otherwise as :class:`GossipStrategy`.

    Args:
        average_every_n_batches: see :class:`GossipStrategy`.
        average: ``"gradients"`` or ``"parameters"``, before the step.
        **options: see :class:`~lightning_gnn.strategies.gossip.cluster_strategy.ClusterStrategy`; `timeout` is the limit of waits
            for other workers.

    Raises:
        ValueError: an invalid argument, or a number below 1.
    """

    strategy_name = "cluster_allreduce"

    @classmethod
    @override
    def variants(cls, ranks: int, links_alike: bool = True) -> Iterator[Mapping[str, Any]]:
        yield {"average_every_n_batches": 1}

    def __init__(self, average_every_n_batches: int = 1, average: Average = "gradients", **options: Any) -> None:
        if options.get("codec") is not None:
            raise ValueError(
                f"codec={options['codec']!r} is not supported with cluster_allreduce: all workers average together, and only "
                'messages between two workers are encoded. Remove codec, or use strategy="gossip".'
            )
        super().__init__(average_every_n_batches, average, heartbeat_timeout=10.0, **options)

    @override
    def _make_worker(self, pool: Pool, peers: Peers | None) -> Worker:
        timeout = self.timeout.total_seconds()
        return Lockstep(pool, self.global_rank, self.world_size, self.average_every_n_batches, peers, timeout)
