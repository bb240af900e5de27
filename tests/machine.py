"""One of several emulated machines, run by netlab in a network namespace of its own: HOW SCRIPT ARGUMENTS...

HOW is ``torchrun`` or ``lightning``, and ``shared`` or ``own``: whether machines share a store.
"""

import os
import subprocess
import sys

import warm

how, stores, *command = sys.argv[1:]
node, address = os.environ["RANK"], os.environ["MASTER_ADDR"]
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)
os.environ.update(NODE_RANK=node, MASTER_PORT="29511", LIGHTNING_GNN_STORE=os.environ["LIGHTNING_GNN_STORE"])
if stores == "own":
    os.environ["LIGHTNING_GNN_STORE"] += f"-{node}"
prefix = [sys.executable]
if how == "torchrun":
    prefix += ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", node]
    prefix += ["--master-addr", address, "--master-port", "29511"]
warm.start(os.environ)  # in this namespace
sys.exit(subprocess.call([*prefix, *command]))
