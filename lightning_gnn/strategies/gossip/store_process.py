"""The store of independent workers, in a process of its own, which outlives the rank that starts it: see
:class:`~lightning_gnn.strategies.gossip.peers.StoreProcess`.

    python store_process.py HOST RUN SIZE LEASE

It imports nothing of this package, so that it is there soon.
"""

from __future__ import annotations

import socket
import sys
import time

import torch.distributed as dist

_LOOK_S = 0.5


def serve(host: str, run: str, size: int, lease: float) -> None:
    """Keeps the store, prints its port, and ends once standard input is closed and no worker is left.

    Args:
        host: of this machine, as the workers know it.
        run: prefix of their keys.
        size: how many workers there are.
        lease: seconds without a heartbeat after which a worker counts as dead.
    """
    listener = socket.create_server((host, 0), backlog=128)
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False)
    print(port, flush=True)
    sys.stdin.read()
    keys, seen = dist.PrefixStore(run, store), dict[int, tuple[int, float]]()
    while True:
        here = [worker for worker in range(size) if not keys.add(f"gone/{worker}", 0)]
        for worker in here:
            beats = keys.add(f"heartbeat/{worker}", 0)
            if worker not in seen or seen[worker][0] != beats:
                seen[worker] = beats, time.monotonic() if beats else 0.0
        if all(time.monotonic() - seen[worker][1] > lease for worker in here):
            return
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
