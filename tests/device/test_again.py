"""Tests of ranks on the CPU once more, on the emulated device."""

from __future__ import annotations

import importlib
import inspect

import on_device

ranks = on_device.ranks

MODULES = (
    "strategies.test_exact",
    "strategies.test_spmm",
    "strategies.test_vertex_cut",
    "strategies.test_checkpoints",
    "strategies.test_lightning",
    "strategies.test_stages",
    "strategies.test_sampling_strategy",
    "strategies.test_real_graphs",
    "comm.test_exchange",
    "comm.test_contract",
    "comm.test_planned",
    "comm.test_replicated",
    "comm.test_cache",
    "comm.test_codec",
    "nn.test_norms",
    "nn.test_convs",
    "nn.test_recipes",
    "nn.test_any_model",
    "nn.test_any_module",
    "nn.test_embedding",
    "steps.test_gradients",
    "steps.test_logs",
    "steps.test_replicas",
    "steps.test_predictions",
    "sampling.test_sampling",
    "sampling.test_hetero_sampling",
    "sampling.test_sampling_variants",
    "modules.test_heads",
    "modules.test_links",
    "gossip.test_gossip",
)


EVERY_DAY = {"test_awkward_graph_of_exact"}
"""Those of ``make test``; ``make test-all`` has all of them."""

for _module in MODULES:
    for _name, _test in vars(importlib.import_module(_module.rpartition(".")[2])).items():
        if _name.startswith("test_") and inspect.isfunction(_test) and "ranks" in inspect.signature(_test).parameters:
            globals()[f"{_name}_of_{_module.partition('.test_')[2]}"] = _test
