"""Names of earlier versions, and their replacements."""

from __future__ import annotations

from collections.abc import Iterable


def _parse_pairs(pairs: str) -> dict[str, str]:
    return {old: f"renamed to {new}" for old, new in (each.split("=") for each in pairs.split())}


OF_PACKAGE = {
    "CommunicationTrace": "removed. Trainer(profiler=PyTorchProfiler(...)) writes a trace with these spans (docs/profiling.md)",
    "StagedStrategy": "removed. Fit under the first strategy, and continue under the second with another Trainer, "
    "fit(..., ckpt_path=...): docs/stages.md",
    "labelled": "removed. Use batch.train_mask: a rank may have no labeled nodes",
    "mean_over_ranks": "removed. Inside a step, x.mean(0) is the mean over the rows of all ranks",
    "sum_over_ranks": "removed. Inside a step, x.sum(0) is the sum over the rows of all ranks",
    **_parse_pairs("""LargestChanges=TopKChanges choose_edges=select_edges expand=gather_halo fetch_rows=gather_nodes
num_nodes=global_num_nodes reduce=reduce_halo substitute=patch_globals"""),
}
"""Names of the package, with the end of the error message."""

OF_ARGUMENTS = {
    "offload": "removed. Run the model in `with torch.autograd.graph.save_on_cpu(pin_memory=True):` in a step (docs/memory.md)",
    "replan": "removed. Plans are made once: pass topology= with a file that `lightning-gnn topology measure` has written",
    **_parse_pairs("""averaging_interval=average_every_n_batches cache_mb=remote_cache clusters=num_clusters fanouts=num_neighbors
feature_cache=local_cache final=final_weights halo=historical_embeddings hops=num_hops host_memory=memory_limit
host_memory_dir=spill_dir hosts=num_machines keep_constant=cache_input_aggregation keep_memory=reuse_buffers
lease=heartbeat_timeout method=sampler patience=partner_timeout permute=node_order prefetch=prefetch_batches
recompute=checkpoint_convs redraw_every=dropout_seed_every_n_epochs replication=replication_factor restarts=max_restarts
samplers=num_workers score=edge_score_fn
partition_memory=partition_memory_limit source_args=source_kwargs split_column=split_index store=partition_dir"""),
}
"""Arguments of strategies and of GraphDataModule, with the end of the error message."""


def check_argument_names(kind: type, names: Iterable[str]) -> None:
    """Raises TypeError for an argument of an earlier version; the error has its replacement."""
    for name in OF_ARGUMENTS.keys() & set(names):
        raise TypeError(f"The argument {name} of {kind.__name__} was {OF_ARGUMENTS[name]}.")
