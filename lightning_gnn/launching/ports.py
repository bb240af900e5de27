"""Where ranks of a run meet: a port that no other process can take between its choice and its use."""

from __future__ import annotations

import os
import socket

from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment

from lightning_gnn.comm.listening import listen_for_ranks


def listener_of(environment: ClusterEnvironment, size: int) -> socket.socket | None:
    """Returns a socket, for rank 0 of this machine, that listens where the ranks of an environment will meet; None elsewhere.

    Unless the port is given (MASTER_PORT), the environment has another one after each call.
    """
    if environment.node_rank() > 0:
        return None
    is_given = not isinstance(environment, LightningEnvironment) or {"MASTER_PORT", "STANDALONE_PORT"} & os.environ.keys()
    listener = listen_for_ranks(environment.main_address, environment.main_port if is_given else 0, size)
    if listener is not None and not is_given:
        environment._main_port = listener.getsockname()[1]  # type: ignore[attr-defined]
    return listener
