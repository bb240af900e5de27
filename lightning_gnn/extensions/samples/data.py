"""Datasets of samples of a datamodule: checks of arguments, formats, converted folders, and loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn.arguments import check_flags, check_whole, quote
from lightning_gnn.data.shards import Cut, Shard
from lightning_gnn.datamodules.graph import SAMPLES, STAGE_MASKS, GraphDataModule
from lightning_gnn.extensions.samples import layers  # noqa: F401  its rules register themselves
from lightning_gnn.extensions.samples.copies import Copies
from lightning_gnn.extensions.samples.folders import PartSamples, convert_folder, folder_of, samples_of
from lightning_gnn.extensions.samples.formats import SampleFormat, digest_of, flat_name, values_of
from lightning_gnn.extensions.samples.loader import SampleLoader, read_item, taken_names
from lightning_gnn.extensions.samples.node_sets import local_sizes, rows_of_parts
from lightning_gnn.extensions.samples.order import GlobalOrder

DATASETS = {stage: SAMPLES[STAGE_MASKS.get(stage)] for stage in (*STAGE_MASKS, "predict")}
"""Argument with the samples of a stage."""

_RESERVED = {"batch", "num_nodes", "ptr", "sample_info"}
"""Names that batches set themselves, in addition to attributes of the graph."""


def _keep_batch(batch: Any) -> Any:
    return batch


class SampleData:
    """Datasets of samples of a datamodule.

    Args:
        datasets: dataset of each stage by the name of its argument, or None.
        batch_size, global_batch_size, shuffle, node_dims, num_workers, persistent_workers, prefetch_factor, concatenate:
            arguments of :class:`~lightning_gnn.GraphDataModule`.

    Attributes:
        copies: copies of the graph for concatenated samples; None for stacked samples.
        place: function that sets the placements of a batch, and moves it to the device of its rank; set while ranks run.

    Raises:
        ValueError: invalid argument.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        batch_size: int | None,
        global_batch_size: int | None,
        shuffle: bool,
        node_dims: Mapping[str, int | None] | None,
        num_workers: int,
        persistent_workers: bool,
        prefetch_factor: int | None,
        concatenate: bool,
    ) -> None:
        self._datasets = {name: samples_of(given) for name, given in datasets.items() if given is not None}
        for name, samples in self._datasets.items():
            if len(samples) == 0:
                raise ValueError(f"{name} must have at least one sample, got an empty {type(samples).__name__}. Remove it.")
        check_whole(1, **({} if global_batch_size is None else {"global_batch_size": global_batch_size}))
        check_whole(0, num_workers=num_workers)
        check_whole(1, **({} if prefetch_factor is None else {"prefetch_factor": prefetch_factor}))
        check_flags(shuffle=shuffle, persistent_workers=persistent_workers, concatenate=concatenate)
        if (persistent_workers or prefetch_factor is not None) and not num_workers:
            raise ValueError("persistent_workers and prefetch_factor require num_workers of at least 1 (got 0). Remove them.")
        dims = {} if node_dims is None else node_dims
        if not isinstance(dims, Mapping) or not all(dim is None or type(dim) is int for dim in dims.values()):
            raise ValueError(f"node_dims must map names to dimensions or None, such as {{'x': 1}} (got {quote(node_dims)}).")
        dims = {flat_name(name): dim for name, dim in dims.items()}
        if (batch_size is None) == (global_batch_size is None):
            raise ValueError(
                f"GraphDataModule with {', '.join(self._datasets)} requires batch_size (samples per data rank) or "
                f"global_batch_size (samples of all data ranks together), got batch_size={batch_size}, "
                f"global_batch_size={global_batch_size}. Set one of them."
            )
        self.global_batch_size, self._shuffle, self._node_dims = global_batch_size, shuffle, dims
        self._loading: dict[str, Any] = {
            "num_workers": num_workers,
            "persistent_workers": persistent_workers,
            "prefetch_factor": prefetch_factor,
        }
        self.concatenates = concatenate
        self.copies: Copies | None = None
        self.place: Callable[[Any], Any] = _keep_batch
        self._data_ranks, self._data_rank = 1, 0
        self._local: dict[str, tuple[Any, SampleFormat, Mapping[str, np.ndarray] | None]] = {}
        self._stage_names: list[str] = []  # datasets of the stage that is set up

    def check_strategy(self, strategy: Any) -> None:
        """Set the data ranks of a strategy; raises ValueError if it does not support samples."""
        reason = getattr(strategy, "samples_unsupported_reason", None)
        if reason is not None:
            raise ValueError(f"samples is not supported with {type(strategy).__name__}: {reason}")
        shape = getattr(strategy, "mesh_shape", None)
        self._data_ranks, self._data_rank = getattr(shape, "data_ranks", 1), getattr(shape, "data_rank", 0)
        self.samples_per_data_rank(None, self._data_ranks)

    def convert(self, seed: int, cut: Cut, partition: Path, lock: Callable[[str], Any]) -> None:
        """Write folders of samples in the order of a partition, unless they are stored.

        Args:
            seed: seed of the datamodule.
            cut: partitioned graph.
            partition: folder of the partitioned graph.
            lock: see :func:`~lightning_gnn.extensions.samples.folders.convert_folder`.
        """
        rows = rows_of_parts(cut)
        for name in [name for name, samples in self._datasets.items() if folder_of(samples) is not None]:
            self._convert(name, self.read_first(name, seed, _sizes(rows), len(cut.e_id))[1], rows, partition, lock)

    def setup(self, seed: int, shard: Shard, stage: str, partition: Path | None, lock: Callable[[str], Any]) -> None:
        """Check the first sample of each dataset of a stage against the graph, and open converted folders.

        Args:
            seed: seed of the datamodule.
            shard: rank's part of the graph.
            stage: stage of the Trainer.
            partition: folder of the partitioned graph; None for the whole graph on one device.
            lock: see :func:`~lightning_gnn.extensions.samples.folders.convert_folder`.

        Raises:
            ValueError: a sample does not match the graph, or the graph does not support samples.
        """
        if shard.types.is_hetero and self.concatenates:
            raise ValueError("concatenate=True does not support a HeteroData. Remove it.")
        check_shard(shard)
        self.copies = Copies(shard, self._data_ranks, self._data_rank) if self.concatenates else None
        rows = rows_of_parts(shard)
        of_stage = [DATASETS[stage], *([DATASETS["validate"]] if stage == "fit" else [])]
        self._stage_names = [name for name in of_stage if name in self._datasets]
        for name in self._stage_names:
            _, form = self.read_first(name, seed, _sizes(rows), sum(shard.edge_counts))
            unknown = self._node_dims.keys() - form.tensors.keys()
            if unknown and name != "samples":  # which may have fewer names than other datasets
                others = self._datasets.keys() - {name}
                unknown -= {key for other in others for key in values_of(self._read(other, seed, 0), f"{other}[0]")}
            if unknown:
                raise ValueError(f"node_dims has {sorted(unknown)}, but {name}[0] has {sorted(form.tensors)}. Correct the names.")
            taken = [each for each in form.tensors if each in _RESERVED or each in taken_names(shard)]
            if taken:
                kind, _, own_name = taken[0].rpartition(".")
                where = f"data[{kind!r}].{own_name}" if kind else f"data.{own_name}"
                raise ValueError(
                    f"{', '.join(taken)} of {name}[0] must have another name: the graph or the batch has it, too. Remove it from "
                    f"the samples if it is equal in all samples; else rename it, or remove it from the graph, del {where}."
                )
            folder, samples = self._convert(name, form, rows, partition, lock), self._datasets[name]
            own = None if folder is not None or partition is None else {kind: ids[shard.rank] for kind, ids in rows.items()}
            if folder is not None:
                form = form.resize(local_sizes(shard))
                samples = _with_part(samples, PartSamples(folder_of(samples), folder, shard.rank, form))  # type: ignore[arg-type]
            self._local[name] = samples, form, own

    def loader(self, data: GraphDataModule, name: str) -> SampleLoader | list[Any]:
        """Returns the loader of a dataset on this rank, given the name of its argument; [] without this dataset."""
        if name not in self._datasets:
            return []
        trainer: Any = data.trainer
        ranks = self._data_ranks
        samples, form, rows = self._local[name]
        shuffle = self._shuffle and name == "samples" and not getattr(trainer, "overfit_batches", 0)  # as Lightning's loaders
        return SampleLoader(
            samples,
            form,
            data.shard,
            GlobalOrder(len(samples), self.samples_per_data_rank(data.batch_size, ranks), ranks, shuffle, data.seed),
            self._data_rank,
            lambda: 0 if trainer is None else trainer.current_epoch,
            data.seed,
            rows,
            self.copies,
            lambda batch: self.place(batch),
            **self._loading,
        )

    def full_batch(self, batch_size: int | None) -> int:
        """Returns the number of samples of a full global batch of the first dataset of the stage."""
        samples, *_ = self._local[self._stage_names[0]]
        return min(len(samples), self.samples_per_data_rank(batch_size, self._data_ranks) * self._data_ranks)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of samples of each dataset, by the name of its argument."""
        return {name: len(samples) for name, samples in self._datasets.items()}

    def graph_ranks_of(self, ranks: int) -> list[int]:
        """Returns the divisors of a number of ranks whose data ranks divide a global batch."""
        numbers = [number for number in range(1, ranks + 1) if ranks % number == 0]
        return [each for each in numbers if (self.global_batch_size or 0) % (ranks // each) == 0]

    def samples_per_data_rank(self, batch_size: int | None, data_ranks: int) -> int:
        """Returns the number of samples per data rank and batch."""
        total = self.global_batch_size
        if total is not None and total % data_ranks:
            raise ValueError(
                f"global_batch_size must be divisible by the number of data ranks, got {total} and {data_ranks} data ranks. Use "
                f"global_batch_size={max(1, total // data_ranks) * data_ranks}."
            )
        return (batch_size or 0) if total is None else total // data_ranks

    def read_first(
        self, name: str, seed: int, num_nodes: int | Mapping[str, int], num_edges: int, count: int = 1
    ) -> tuple[list[Any], SampleFormat]:
        """Returns the first items of a dataset and their format.

        Args:
            name: name of the dataset's argument.
            seed: seed of the datamodule.
            num_nodes, num_edges: size of the graph; numbers of nodes by type.
            count: number of items.
        """
        items = [self._read(name, seed, index) for index in range(min(count, len(self._datasets[name])))]
        return items, SampleFormat.of(name, items[0], num_nodes, num_edges, self._node_dims)

    def digests(self, seed: int) -> dict[tuple[str, int], int]:
        """Returns checksums of three samples of each dataset of the stage by name and index, except of folders."""
        found = {}
        for name in self._stage_names:
            samples = self._datasets[name]
            if folder_of(samples) is None:
                places = {0, len(samples) // 2, len(samples) - 1}
                found.update({(name, index): digest_of(self._read(name, seed, index)) for index in sorted(places)})
        return found

    def _read(self, name: str, seed: int, index: int) -> Any:
        return read_item(self._datasets[name], seed, 0, index)

    def _convert(
        self,
        name: str,
        form: SampleFormat,
        rows: Mapping[str, Sequence[np.ndarray]],
        partition: Path | None,
        lock: Callable[[str], Any],
    ) -> Path | None:
        """Returns the folder of a dataset's converted files; None for other datasets, and for one rank."""
        source = folder_of(self._datasets[name])
        if source is None or partition is None or len(next(iter(rows.values()))) == 1:
            return None
        return convert_folder(source, form, rows, partition, lock)


def _sizes(rows: Mapping[str, Sequence[np.ndarray]]) -> dict[str, int]:
    """Returns the number of nodes of each type."""
    return {kind: sum(map(len, ids)) for kind, ids in rows.items()}


def check_shard(shard: Shard) -> None:
    """Raises ValueError if the layout of a graph does not support samples."""
    if shard.rows != shard.counts:
        raise ValueError('samples does not support replicas of nodes. Use another plan, such as DGCLStrategy(plan="p2p").')


def _with_part(samples: Any, part: PartSamples) -> Any:
    """Returns a folder's dataset, or a ``Subset`` of it, with the samples of one part."""
    return type(samples)(_with_part(samples.dataset, part), samples.indices) if folder_of(samples) is not samples else part
