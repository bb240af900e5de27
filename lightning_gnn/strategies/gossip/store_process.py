"""Store of independent workers, in a separate process that outlives the rank that starts it.

    python store_process.py HOST RUN SIZE LEASE

runs it. It does not import this package, so that it starts fast.
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
    """Process of the store; it ends soon after the last worker.

    Args:
        host: address of this machine for the workers.
        run: prefix of their keys.
        size: number of workers.
        lease: seconds without a heartbeat after which a worker counts as dead.
    """

    def __init__(self, host: str, run: str, size: int, lease: float) -> None:
        self._host = host
        self._process = subprocess.Popen(
            [sys.executable, __file__, host, run, str(size), str(lease)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # torchrun and Ctrl-C end whole process groups
        )

    def address(self) -> str:
        """Returns ``host:port`` once the store is running; raises CommunicationError if it does not start."""
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
        """Detach the store from this rank; it ends with the remaining workers."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        threading.Thread(target=self._process.wait, daemon=True, name="waits for the workers' store").start()


def serve(host: str, run: str, size: int, lease: float) -> None:
    """Run the store, print its port, and return once standard input is closed and no worker is left.

    Args:
        host: address of this machine for the workers.
        run: prefix of their keys.
        size: number of workers.
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
