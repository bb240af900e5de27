"""Tests of ranks on the CPU once more, on the emulated device; in ``make test-all``."""

from __future__ import annotations

import importlib
import inspect

import on_device

ranks = on_device.ranks

MODULES = (
    "strategies.test_exact",
    "strategies.spmm.test_spmm",
    "strategies.vertex_cut.test_vertex_cut",
    "strategies.test_checkpoints",
    "strategies.test_lightning",
    "strategies.test_stages",
    "strategies.sampling.test_sampling_strategy",
    "strategies.test_real_graphs",
    "comm.test_exchange",
    "comm.test_contract",
    "comm.test_planned",
    "strategies.dgcl.test_replicated",
    "strategies.vertex_cut.test_cache",
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
    "strategies.sampling.test_sampling",
    "strategies.sampling.test_hetero_sampling",
    "strategies.sampling.test_sampling_variants",
    "modules.test_heads",
    "modules.test_links",
    "strategies.gossip.test_gossip",
    "strategies.gossip.test_history",
)


LEFT_OUT = {
    # Of ranks on the CPU alone
    "swap_writes_all_rows_once_of_replicated": "an exchange through shared memory",
    "trained_as_on_one_device_of_replicated": "an exchange through shared memory",
    "other_numbers_of_ranks_with_the_users_module_of_replicated": "an exchange through shared memory",
    "any_module_trains_of_any_module": "auto_gnn does not support",
    # What the emulated device lacks
    "bf16_mixed_of_spmm": "autocast changes nothing on it",
    "gradients_of_two_bytes_travel_as_rows_of_spmm": "autocast changes nothing on it",
    "together_they_equal_one_device_of_any_model": "no LSTM; and a model of its own makes a tensor on the CPU",
    "stochastic_rounding_repeats_of_codec": "no torch.Generator",
    "training_of_codec": "no torch.Generator",
    "nan_stops_the_run_with_the_layers_name_of_vertex_cut": "modules do not come back from it after an error",
    "what_cannot_be_exact_on_ranks_is_refused_of_embedding": "modules do not come back from it after an error",
    "models_among_hyperparameters_are_saved_and_resumed_of_checkpoints": "its checkpoint is loaded where there is no such device",
    "refused_by_name_of_logs": "modules do not come back from it after an error",
    "equals_one_device_of_real_graphs": "its fixtures are of another module",
    "products_equal_one_device_of_real_graphs": "its fixtures are of another module",
    "a_layer_that_no_optimizer_has_is_refused_of_replicas": "its late layer is on the CPU",
    "a_rank_that_skips_a_step_alone_is_told_of_replicas": "its messages end in torch's error if their sizes differ",
    # Tests that know the CPU only
    "predictions_are_those_of_one_device_of_predictions": "its step makes an array of a tensor",
    "predictions_in_files_of_predictions": "its step makes an array of a tensor",
    "the_cache_learns_from_the_first_epoch_for_all_samplers_of_sampling_strategy": "same bits, where PyG's layers add atomically",
    "batches_do_not_depend_on_the_number_of_samplers_of_sampling_variants": "same bits, where PyG's layers add atomically",
    "callbacks_and_schedulers_decide_alike_of_logs": "a metric of its own stays on the CPU",
    "trained_as_on_one_device_of_spmm": "sums in another order: 1.6e-10 from one device where 1e-10 is asked for",
}
"""Why tests are not run here."""

for _module in MODULES:
    for _name, _test in vars(importlib.import_module(_module.rpartition(".")[2])).items():
        _known = f"{_name}_of_{_module.partition('.test_')[2]}"
        if not _name.startswith("test_") or not inspect.isfunction(_test) or _known[5:] in LEFT_OUT:
            continue
        if "ranks" in inspect.signature(_test).parameters:
            globals()[_known] = _test
