"""Lazily imported modules: the only file that names modules by strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

STRATEGIES = {
    "dgcl": ("lightning_gnn.strategies.dgcl.strategy", "DGCLStrategy"),
    "cover": ("lightning_gnn.strategies.cover.strategy", "CoverStrategy"),
    "spmm": ("lightning_gnn.strategies.spmm.strategy", "SpMMStrategy"),
    "spmm_1d": ("lightning_gnn.strategies.spmm.strategy", "SpMM1DStrategy"),
    "spmm_15d": ("lightning_gnn.strategies.spmm.strategy", "SpMM15DStrategy"),
    "spmm_2d": ("lightning_gnn.strategies.spmm.strategy", "SpMM2DStrategy"),
    "spmm_3d": ("lightning_gnn.strategies.spmm.strategy", "SpMM3DStrategy"),
    "vertex_cut": ("lightning_gnn.strategies.vertex_cut.strategy", "VertexCutStrategy"),
    "vertex_cut_cached": ("lightning_gnn.strategies.vertex_cut.strategy", "CachedVertexCutStrategy"),
    "sampling": ("lightning_gnn.strategies.sampling.strategy", "SamplingStrategy"),
    "gossip": ("lightning_gnn.strategies.gossip.strategy", "GossipStrategy"),
    "cluster_allreduce": ("lightning_gnn.strategies.gossip.strategy", "ClusterAllReduceStrategy"),
    "auto_gnn": ("lightning_gnn.tools.advising.auto", "AutoStrategy"),
}
"""Module and class of each strategy, by name in ``Trainer(strategy=...)``."""

_OF_STRATEGIES = {"GNNStrategy": "lightning_gnn.strategy.base", "Scheme": "lightning_gnn.strategy.scheme"}

_COSTS = [f"lightning_gnn.strategies.{name}.costs" for name in ("dgcl", "cover", "spmm", "vertex_cut")]
"""Modules that register the cost of an exchange of their schemes."""

_NAMES = {
    "lightning_gnn.tools.advising.advice": ["advise"],
    "lightning_gnn.tools.advising.auto": ["AutoStrategy"],
    "lightning_gnn.strategies.vertex_cut.thresholds": ["AdaptiveThreshold", "TopKChanges"],
    "lightning_gnn.callbacks.communication": ["CommunicationMonitor"],
    "lightning_gnn.tools.comparing": ["compare"],
    "lightning_gnn.datamodules": ["GraphDataModule"],
    "lightning_gnn.data.links": ["split_edges"],
    "lightning_gnn.extensions.samples.order": ["split_by_time"],
    "lightning_gnn.data.synthetic": ["planted_partition"],
    "lightning_gnn.modules": ["LinkPredictor", "NodeClassifier"],
    "lightning_gnn.tools.parity": ["check_parity"],
    "lightning_gnn.rows": ["NotExactError", "gather_global", "local_rows", "register_row_rule"],
}
"""Public names by their modules; other public names are strategies, or in :mod:`lightning_gnn.nn`."""

PARTITIONERS = {"streaming": ("lightning_gnn.extensions.graph_files.partitioner", "Streaming")}
"""Module and class of each extension that partitions nodes, by name as a ``partition``."""

_CUTTERS = {"vertex_cut": "lightning_gnn.strategies.vertex_cut.cutters"}
_BASELINES = {"hdrf": "hdrf", "dbh": "hashed", "grid": "hashed", "dne": "dne"}
"""Module of ``vertex_cut/baselines/`` by the name of a baseline cutter."""

_WRAPPERS = (("lightning_gnn.extensions.zero_rows.transport", "ZeroRowsTransport"),)  # applied to all transports
_REFINERS = {"metis_cover": ("lightning_gnn.strategies.cover.refine", "refine_for_cover")}

_FEATURES = {
    "compiled.models": ["CompiledModels"],
    "containers": ["MemfdPickler", "ensure_kernel_cache"],
    "elastic.balance": ["check_balance"],
    "elastic.launcher": ["ElasticLauncher"],
    "elastic.recovery": ["Recovery"],
    "embeddings.embedding": ["DistributedEmbedding"],
    "findings": ["describe_fixes"],
    "graph_files.pyg_stores": ["graph_in_stores"],
    "graphs.steps": ["StepGraphs"],
    "liveness": ["RankHelper"],
    "mesh.auto": ["agree_on_graph_ranks", "choose_ahead"],
    "mesh.emulation": ["join_sample_ranks"],
    "mesh.run": ["SampleRun"],
    "mesh.search": ["prepare_finder"],
    "mesh.support": ["check_graph_ranks", "check_mesh"],
    "node_types.binding": ["TypedBinding", "TypedGraph", "check_typed_module"],
    "node_types.graph": ["about_types", "prepare_hetero"],
    "node_types.shards": ["TypedCut", "whole_graph_with_types"],
    "node_types.small_graph": ["typed_small_graph"],
    "samples.data": ["SampleData"],
    "samples.small_graph": ["SampleGraphs"],
}
"""Names that the core uses from extensions, by their modules, which are imported on first use."""


def home_of(name: str) -> str:
    """Returns the module of a public name of the package."""
    home = "lightning_gnn.strategies" if name.endswith("Strategy") else "lightning_gnn.nn"
    return next((module for module, names in _NAMES.items() if name in names), home)


def class_of_strategies(name: str) -> Any:
    """Returns one of :data:`STRATEGIES`, or a common base class, by the name of its class; None for other names."""
    homes = {kind: module for module, kind in STRATEGIES.values()} | _OF_STRATEGIES
    return getattr(import_module(homes[name]), name) if name in homes else None


def triton_loops() -> ModuleType:
    """Returns the GPU kernels; importing them is slow."""
    return import_module("lightning_gnn.kernels.triton_loops")


def feature(name: str) -> Any:
    """Returns a class or function of an extension, by a name in `_FEATURES`."""
    [module] = [module for module, names in _FEATURES.items() if name in names]
    return getattr(import_module(f"lightning_gnn.extensions.{module}"), name)


def explain_error(error: str, step: str) -> str | None:
    """Returns an extension's explanation of an error of `step`, for example with a fix; None if there is none."""
    return feature("about_types")(error, step)


def costs_of(*arguments: Any) -> Sequence[Any]:
    """Returns the cost of one exchange of a scheme, with the arguments of `exchange_costs`.

    See :func:`~lightning_gnn.extensions.plans.exchanges.exchange_costs`.
    """
    for module in _COSTS:
        import_module(module)
    return import_module("lightning_gnn.extensions.plans.exchanges").exchange_costs(*arguments)


def source_of(data: Any) -> Any:
    """Returns the :class:`~lightning_gnn.data.loading.GraphSource` of a datamodule; of its files for a folder or URL."""
    if isinstance(data.source, str) and data.source and ("/" in data.source or Path(data.source).exists()):
        return import_module("lightning_gnn.extensions.graph_files").source_of(data)
    return import_module("lightning_gnn.data.loading").GraphSource(data.source)


def store_of(location: str) -> Any:
    """Returns the :class:`~lightning_gnn.data.store.LocalStore` of a path or URL."""
    module, kind = ("extensions.graph_files.url_store", "UrlStore") if "://" in location else ("data.store", "LocalStore")
    return getattr(import_module(f"lightning_gnn.{module}"), kind)(location)


def partitioners() -> dict[str, Any]:
    """Returns a :class:`~lightning_gnn.partition.budget.Partitioner` for each of `PARTITIONERS`, by name."""
    return {name: getattr(import_module(module), kind)() for name, (module, kind) in PARTITIONERS.items()}


def cutter_of(kind: str) -> ModuleType:
    """Returns the module that cuts edges for a kind of layout.

    The module has ``assign_edges``, ``edge_predictions``, ``part_dtype`` and ``report_of``.
    """
    return import_module(_CUTTERS[kind])


def baseline_cutter(method: str) -> Callable[..., None]:
    """Returns the function that cuts edges by a baseline method."""
    return getattr(import_module(f"lightning_gnn.strategies.vertex_cut.baselines.{_BASELINES[method]}"), method)


def refiner_of(method: str) -> Callable[..., Any] | None:
    """Returns the function that refines METIS's parts for a method; None if there is none.

    Methods are methods of :func:`~lightning_gnn.partition.edge_cut.assign_nodes`.
    """
    if method not in _REFINERS:
        return None
    module, name = _REFINERS[method]
    return getattr(import_module(module), name)


def out_of_core(memory_limit: int | str | None, folder: str | Path | None, shared_memory: bool) -> Any:
    """Returns an object that lets ranks share `memory_limit`; None without a limit and folder.

    See :class:`~lightning_gnn.extensions.out_of_core.run.OutOfCore`.
    """
    if memory_limit is None and folder is None:
        return None
    return import_module("lightning_gnn.extensions.out_of_core.run").OutOfCore(memory_limit, folder, shared_memory)


def transport_wrappers() -> list[Any]:
    """Returns the classes that wrap every transport, see :class:`~lightning_gnn.comm.transport.TransportWrapper`."""
    return [getattr(import_module(module), name) for module, name in _WRAPPERS]


def wrap_transport(transport: Any) -> Any:
    """Returns a transport with all wrappers applied."""
    for wrapper in transport_wrappers():
        transport = wrapper(transport)
    return transport


def codecs() -> ModuleType:
    """Returns the module of codecs, with ``make_codec`` and ``EncodingTransport``."""
    return import_module("lightning_gnn.extensions.codecs.transport")
