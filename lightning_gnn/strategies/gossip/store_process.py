"""The store of independent workers, in a process of its own, which outlives the rank that starts it.

    python store_process.py HOST RUN SIZE LEASE

runs it. It imports nothing of this package, so that it is there soon.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import torch.distributed as dist

_LOOK_S = 0.5


class StoreProcess:
    """Starts the store, and leaves it to the other workers: it ends soon after the last of them.

    Args:
        host: of this machine, as the workers know it.
        run: prefix of their keys.
        size: how many workers there are.
        lease: seconds without a heartbeat after which a worker counts as dead.
    """

    def __init__(self, host: str, run: str, size: int, lease: float) -> None:
        self._host = host
        self._process = subprocess.Popen(
            [sys.executable, __file__, host, run, str(size), str(lease)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # torchrun and Ctrl-C end whole groups of processes
        )

    def address(self) -> str:
        """Returns ``host:port``, once it answers; raises CommunicationError if it does not."""
        assert self._process.stdout is not None
        port = self._process.stdout.readline().decode().strip()
        if not port:
            from lightning_gnn.comm.group import CommunicationError

            raise CommunicationError(
                f"The store of the workers could not be started on {self._host}: its process ended with status "
                f"{self._process.wait()}."
            )
        return f"{self._host}:{port}"

    def leave(self) -> None:
        """Leaves it to the workers that are left."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        threading.Thread(target=self._process.wait, daemon=True, name="waits for the workers' store").start()


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
