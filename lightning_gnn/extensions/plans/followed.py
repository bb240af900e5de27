"""What loggers are told of the plan that rows follow in a run."""

from __future__ import annotations

import json
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.trainer.states import TrainerFn

from lightning_gnn.callbacks.loggers import log_config, log_files, uploads
from lightning_gnn.comm.exchange import Exchange, HaloExchange
from lightning_gnn.data.shards import Shard
from lightning_gnn.extensions.plans.topology import Hosts, Topology


def log_plan(
    trainer: pl.Trainer, shard: Shard, exchange: Exchange, between: Topology | Hosts | None, name: str | None = None
) -> None:
    """Tells the loggers what rows of the width of features follow, and draws the load of the links.

    Args:
        shard: of this rank.
        exchange: of the module's edges.
        between: what the ranks are joined by.
        name: of a plan that sends nothing along links; None for direct rows and trees.
    """
    features = next(iter(shard.batch.x_dict.values())) if shard.types.is_hetero else shard.batch.x
    row_bytes = features[:1].nbytes
    followed = _followed(exchange, between, row_bytes) | ({"name": name} if name else {})
    log_config(trainer, {"plan": followed})
    if not (trainer.is_global_zero and trainer.state.fn == TrainerFn.FITTING and uploads(trainer)):
        return
    if name is None and isinstance(between, Topology) and between.num_devices > 1:
        from lightning_gnn.extensions.plans.by_width import route_of  # most runs draw nothing, and load no plans
        from lightning_gnn.extensions.plans.pictures import draw_links
        from lightning_gnn.extensions.plans.plan import p2p
        from lightning_gnn.extensions.plans.plan_cost import link_loads
        from lightning_gnn.extensions.plans.relation import Relation

        route = route_of(exchange, row_bytes)
        if route is None:
            route = p2p(Relation.from_halos(shard.halos, np.cumsum([0, *shard.rows])), between)
        title = f"{route.name} over {between.name}, rows of {row_bytes:,} bytes"
        picture = draw_links(link_loads(route, between, row_bytes), between, title)
        log_files(trainer, "plan", {"plan.json": json.dumps(followed, indent=1) + "\n", "plan.png": picture})


def _followed(exchange: Exchange, between: Topology | Hosts | None, row_bytes: int) -> dict[str, Any]:
    topology = {} if between is None else {"topology": between.name}
    if isinstance(exchange, HaloExchange):
        return {"name": "p2p", **topology}
    from lightning_gnn.extensions.plans.by_width import relayed_by

    relayed = relayed_by(exchange, row_bytes)
    if relayed is None:
        return {"name": "p2p", **topology}
    if relayed.route is None:  # of another rank, or of a plan that no rank knows whole
        return {"name": "spst", **topology}
    route = relayed.route
    return {"name": "spst", **topology, "stages": route.num_stages, "rows_per_exchange": int(route.traffic.sum())}
