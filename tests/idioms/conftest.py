"""The corpus takes long, and not all of it holds yet: `make corpus` runs it."""

import os

collect_ignore = [] if os.environ.get("LIGHTNING_GNN_CORPUS") else ["test_idioms.py", "test_fuzz.py"]
